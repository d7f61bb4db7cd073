"""Indexers, which answer how much of a prompt each worker holds, and the drivers that start them.

Indexers have the API of Mooncake's RFC #1403 or of NVIDIA Dynamo. The drivers are for `kvevents serve`, for NVIDIA Dynamo's
indexer, and for indexers that are already running.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec

from kvevents.conform.scenario import Ability, CheckQuery, Scenario
from kvevents.conform.target import (
    ANSWER_SECONDS,
    Driver,
    EngineRegistration,
    Program,
    RejectedError,
    Target,
    TargetError,
    TargetResponse,
    install_package,
    request,
    wait_until,
)
from kvevents.conform.verdict import WrongAnswer
from kvevents.errors import MissingDependencyError
from kvevents.package_metadata import VERSION

ACCEPTED_STATUSES: Final = frozenset({200, 201})
EXACT_STATE: Final = "EXACT"
"""The trust state in which kvevents guarantees the match of a worker."""
ABILITIES: Final[frozenset[Ability]] = frozenset({"lora", "ranks", "register", "reports", "salt", "tenants", "unregister"})


class Match(msgspec.Struct):
    """Number of tokens of a prompt that an instance holds, in total and by rank."""

    longest_matched: int
    dp: dict[str, int] = {}
    trust: dict[str, str] = {}


class _Matches(msgspec.Struct):
    instances: dict[str, Match]


class _Listener(msgspec.Struct):
    last_error: str | None = None


class _Worker(msgspec.Struct):
    instance_id: int | str
    status: str
    listeners: dict[str, _Listener] = {}


class Indexer(Target):
    """An indexer at a URL, with the API of NVIDIA Dynamo.

    Workers get instance ids from `first_instance` on, so that scenarios which share an indexer can use different ids.
    """

    def __init__(self, url: str, model: str = "m", first_instance: int = 1, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._url = url.rstrip("/")
        self._answer_seconds = answer_seconds
        self._model = model
        self._first_instance = first_instance
        self._instances: dict[str, int] = {}
        self._registrations: list[EngineRegistration] = []
        self._caveats: dict[str, str] = {}
        """For each worker whose trust state in the newest answers is not EXACT, a sentence that names the state."""

    # --- registration of workers

    def register(self, registration: EngineRegistration) -> None:
        self._instances.setdefault(registration.worker, self._first_instance + len(self._instances))
        body = {
            **self._identity(registration),
            "block_size": registration.block_size,
            "endpoint": registration.endpoint,
            "dp_rank": registration.rank,
        }
        if registration.replay_endpoint is not None:
            body["replay_endpoint"] = registration.replay_endpoint
        answer = self.ask("POST", "/register", body)
        if answer.status not in ACCEPTED_STATUSES:
            raise RejectedError(answer.text)
        self._registrations.append(registration)

    def unregister(self, registration: EngineRegistration) -> None:
        self._registrations.remove(registration)
        answer = self.ask("POST", "/unregister", self._identity(registration))
        if answer.status not in ACCEPTED_STATUSES:
            raise TargetError(f"{self._url}/unregister answered with status {answer.status}: {answer.text}")

    def close(self) -> None:
        """Unregister every worker of the scenario, because the indexer may continue to run."""
        for registration in self._registrations:
            self.ask("POST", "/unregister", self._identity(registration))

    def _identity(self, registration: EngineRegistration) -> dict[str, Any]:
        body = {"instance_id": self._instances[registration.worker], "model_name": self._model}
        return body if registration.tenant is None else {**body, "tenant_id": registration.tenant}

    # --- answers

    def find_wrong_answers(self, queries: Sequence[CheckQuery]) -> list[WrongAnswer]:
        self._caveats = {}
        return [difference for query in queries for difference in self._compare(query)]

    def _compare(self, query: CheckQuery) -> list[WrongAnswer]:
        names = {str(instance): name for name, instance in self._instances.items()}
        matches = {names.get(instance, f"instance-{instance}"): match for instance, match in self._send_query(query).items()}
        held = {name: match.longest_matched for name, match in matches.items()}
        held |= {f"{name}:{rank}": tokens for name, match in matches.items() for rank, tokens in match.dp.items()}
        for name, match in matches.items():
            if states := sorted({state for state in match.trust.values() if state != EXACT_STATE}):
                self._caveats[name] = f"the answer is {', '.join(states)}"
        wrong = []
        for name in dict.fromkeys([*query.held, *held]):
            worker, rank_separator, _ = name.partition(":")
            expected, answered = query.held.get(name, 0), held.get(name, 0)
            if answered != expected and (name in query.held or not rank_separator):
                wrong.append(WrongAnswer(worker, f"{name}: {answered} of {expected} tokens"))
        return wrong

    def _send_query(self, query: CheckQuery) -> dict[str, Match]:
        names = {"lora_name": query.lora, "cache_salt": query.salt, "tenant_id": query.tenant}
        given = {name: value for name, value in names.items() if value is not None}
        # By default kvevents does not look up the last token, because engines always recompute it. Dynamo ignores
        # `whole_prompt`.
        answer = self.ask("POST", "/query", {"token_ids": query.ids, "whole_prompt": True, **given, **self._scope()})
        if answer.status == 404:  # the model has no workers
            return {}
        if answer.status != 200:
            raise TargetError(f"{self._url}/query answered {answer.text}")
        return self._decode_matches(answer)

    def _scope(self) -> dict[str, Any]:
        return {"model_name": self._model}

    def _decode_matches(self, answer: TargetResponse) -> dict[str, Match]:
        return answer.decode(_Matches).instances

    def read_reports(self) -> dict[str, str | None]:
        listed = self._list_problems()
        problems = {name: listed.get(str(instance), ["not listed"]) for name, instance in self._instances.items()}
        return {name: "; ".join(dict.fromkeys(texts)) or self._caveats.get(name) for name, texts in problems.items()}

    def _list_problems(self) -> dict[str, list[str]]:
        """Return the problems of each instance, under its id: a status other than `active`, and errors of its listeners."""
        problems: dict[str, list[str]] = {}
        for worker in self.ask("GET", f"/workers?model_name={self._model}").decode(list[_Worker]):
            texts = problems[str(worker.instance_id)] = [] if worker.status == "active" else [f"status {worker.status}"]
            texts += [listener.last_error for listener in worker.listeners.values() if listener.last_error]
        return problems

    def ask(self, method: str, path: str, body: Any = None) -> TargetResponse:
        """Send one request. Raise `TargetError`."""
        return request(self._url + path, method, body, seconds=self._answer_seconds)


# --- the API of Mooncake


class _MooncakeMatch(Match):
    dp: dict[str, int] = msgspec.field(name="DP", default_factory=dict)


class _Trust(msgspec.Struct):
    state: str
    reason: str = ""


class _Service(msgspec.Struct):
    instance_id: str
    status: str = "active"
    trust: _Trust = msgspec.field(default_factory=lambda: _Trust(EXACT_STATE))


class _Services(msgspec.Struct):
    services: list[_Service]


class MooncakeIndexer(Indexer):
    """An indexer with the API of RFC #1403 and of Mooncake's Conductor."""

    def _identity(self, registration: EngineRegistration) -> dict[str, Any]:
        return {
            "instance_id": str(self._instances[registration.worker]),
            "modelname": self._model,
            "type": "vLLM",
            "tenant_id": registration.tenant or "default",
            "block_size": registration.block_size,
            "dp_rank": registration.rank,
        }

    def _scope(self) -> dict[str, Any]:
        sizes = [registration.block_size for registration in self._registrations]
        return {"model": self._model, "block_size": max(sizes, default=1)}

    def _decode_matches(self, answer: TargetResponse) -> dict[str, Match]:
        tenants = answer.decode(dict[str, dict[str, _MooncakeMatch]])
        return {instance: match for instances in tenants.values() for instance, match in instances.items()}

    def _list_problems(self) -> dict[str, list[str]]:
        problems: dict[str, list[str]] = {}
        for rank in self.ask("GET", "/services").decode(_Services).services:
            texts = problems.setdefault(rank.instance_id, [])
            texts += [] if rank.status == "active" else [f"status {rank.status}"]
            texts += [] if rank.trust.state == EXACT_STATE else [rank.trust.reason or rank.trust.state]
        return problems


DYNAMO_PACKAGE: Final = ("ai-dynamo-runtime", "1.6.1")
SNAPSHOT_SECONDS: Final = 0.5
"""Seconds between two snapshots of `kvevents serve`. The driver waits for a snapshot before it kills the process."""
SNAPSHOT_WAIT_SECONDS: Final = 20.0

FIRST_INSTANCE_ID: Final = 1_000_000
INSTANCES_PER_SCENARIO: Final = 100
"""Number of instance ids that are reserved for each scenario at a running indexer. The first id is `FIRST_INSTANCE_ID`."""


class StartedIndexer(Indexer):
    """An indexer in a process that the referee starts and can kill."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.url)
        self._program = program
        self._start()

    def _start(self) -> None:
        self._program.start(lambda: request(f"{self._program.url}/health", seconds=1.0).status == 200)

    def kill(self) -> None:
        self._program.kill()

    def start(self, registrations: Sequence[EngineRegistration]) -> None:
        self._start()
        for registration in registrations:
            self.register(registration)


class KveventsIndexer(StartedIndexer):
    """Driver of `kvevents serve`, which stores its registrations on disk."""

    def kill(self) -> None:
        now = time.time()
        if not wait_until(lambda: (self.ask("GET", "/v1/stats").json.get("snapshot_at") or 0.0) >= now, SNAPSHOT_WAIT_SECONDS):
            raise TargetError(f"{self._url} wrote no snapshot within {SNAPSHOT_WAIT_SECONDS:g} s")
        super().kill()

    def start(self, registrations: Sequence[EngineRegistration]) -> None:
        del registrations
        self._start()


class IndexerDriver(Driver):
    """Starts an indexer for each scenario."""

    abilities = ABILITIES | frozenset[Ability]({"kill"})

    def __init__(
        self, title: str, command: Callable[[int, Path], Sequence[str]], target: type[StartedIndexer] = StartedIndexer
    ) -> None:
        self.title = title
        self._command = command
        self._target = target

    @contextmanager
    def running(self) -> Iterator[str]:
        """Yield the URL of one indexer that several scenarios can share."""
        with Program(self.title, self._command) as program:
            self._target(program)
            yield program.url

    @contextmanager
    def target(self, scenario: Scenario, registrations: Sequence[EngineRegistration]) -> Iterator[Target]:
        """Yield an indexer without any workers."""
        del scenario, registrations
        with Program(self.title, self._command) as program:
            yield self._target(program)


class RunningIndexer(Driver):
    """An indexer that is already running. All scenarios share it, and use different models and instance ids."""

    abilities = ABILITIES

    def __init__(self, url: str, answer_seconds: float = ANSWER_SECONDS, kind: type[Indexer] = Indexer) -> None:
        """Create the driver. `kind` is the class that implements the indexer's API."""
        self.title = url
        self._url = url
        self._kind = kind
        self._answer_seconds = answer_seconds
        self._scenarios = count()

    @contextmanager
    def target(self, scenario: Scenario, registrations: Sequence[EngineRegistration]) -> Iterator[Target]:
        """Yield the indexer, and unregister the workers of the scenario at the end."""
        del registrations
        first = FIRST_INSTANCE_ID + INSTANCES_PER_SCENARIO * next(self._scenarios)
        indexer = self._kind(self._url, f"conform-{scenario.name}", first, self._answer_seconds)
        try:
            yield indexer
        finally:
            indexer.close()


def kvevents_indexer() -> IndexerDriver:
    """Return the driver of `kvevents serve`, with a folder for its state. Raise `MissingDependencyError`."""
    missing = [name for name in ("kvevents_native", "aiohttp") if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"`kvevents serve` needs {', '.join(missing)}", "service")

    def command(port: int, folder: Path) -> list[str]:
        options = ("--host", "127.0.0.1", "--port", str(port), "--state-dir", str(folder / "state"))
        return [sys.executable, "-m", "kvevents", "serve", *options, "--snapshot-seconds", str(SNAPSHOT_SECONDS)]

    return IndexerDriver(f"kvevents {VERSION}", command, KveventsIndexer)


def dynamo_indexer(folder: Path) -> Driver:
    """Return the driver of Dynamo's indexer, from its released wheel in a virtual environment in `folder`."""
    python = install_package(*DYNAMO_PACKAGE, folder)

    def command(port: int, _: Path) -> list[str]:
        return [python, "-m", "dynamo.indexer", "--port", str(port), "--threads", "4"]

    return IndexerDriver(" ".join(DYNAMO_PACKAGE), command)
