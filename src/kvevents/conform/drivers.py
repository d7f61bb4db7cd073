"""Drivers of programs under test: `kvevents serve`, NVIDIA Dynamo's indexer, and indexers that run already."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Final

from kvevents.conform.indexer import ABILITIES, Indexer
from kvevents.conform.scenario import Ability, Scenario
from kvevents.conform.scripted_engine import wait_until
from kvevents.conform.target import ANSWER_SECONDS, Driver, EngineRegistration, Target, TargetError, request
from kvevents.conform.target_process import Program, python_with
from kvevents.errors import MissingDependencyError
from kvevents.version import version

SERVICE_PACKAGES: Final = ("kvevents_native", "aiohttp", "uvicorn")
DYNAMO: Final = ("ai-dynamo-runtime", "1.6.1")
SNAPSHOT_SECONDS: Final = 0.5
"""Time between two snapshots of `kvevents serve`, so that a scenario that kills it need not wait for one."""
SNAPSHOT_WAIT_SECONDS: Final = 20.0


FIRST_INSTANCE: Final = 1_000_000
INSTANCES: Final = 100
"""Number of instance ids that each scenario has at a running indexer, counted from `FIRST_INSTANCE` on."""
_KILL: Final[frozenset[Ability]] = frozenset({"kill"})


class StartedIndexer(Indexer):
    """An indexer in a process of the referee, which can be killed."""

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


class Kvevents(StartedIndexer):
    """`kvevents serve`, which stores its registrations."""

    def kill(self) -> None:
        now = time.time()
        if not wait_until(lambda: (self._stats().get("snapshot_at") or 0.0) >= now, SNAPSHOT_WAIT_SECONDS):
            raise TargetError(f"no snapshot was written within {SNAPSHOT_WAIT_SECONDS:g} s")
        super().kill()

    def start(self, registrations: Sequence[EngineRegistration]) -> None:
        del registrations
        self._start()

    def _stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", "/v1/stats").json
        return found


class IndexerDriver(Driver):
    """Starts an indexer for each scenario."""

    def __init__(
        self, title: str, command: Callable[[int, Path], Sequence[str]], target: type[StartedIndexer] = StartedIndexer
    ) -> None:
        self.title = title
        self._command = command
        self._target = target

    @property
    def abilities(self) -> frozenset[Ability]:
        """Abilities of the API, and `kill`."""
        return ABILITIES | _KILL

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
    """An indexer that runs already, and that all scenarios share: each has a model and instances of its own."""

    def __init__(self, url: str, answer_seconds: float = ANSWER_SECONDS, kind: type[Indexer] = Indexer) -> None:
        """Create the driver. `kind` is the form of the API."""
        self.title = url
        self._url = url
        self._kind = kind
        self._answer_seconds = answer_seconds
        self._scenarios = count()

    @property
    def abilities(self) -> frozenset[Ability]:
        """The abilities of the API."""
        return ABILITIES

    @contextmanager
    def target(self, scenario: Scenario, registrations: Sequence[EngineRegistration]) -> Iterator[Target]:
        """Yield the indexer. Afterwards the workers of the scenario are not registered any more."""
        del registrations
        first = FIRST_INSTANCE + INSTANCES * next(self._scenarios)
        indexer = self._kind(self._url, f"conform-{scenario.name}", first, self._answer_seconds)
        try:
            yield indexer
        finally:
            indexer.close()


def kvevents_indexer() -> IndexerDriver:
    """Return the driver of `kvevents serve`, with a folder for its state. Raise `MissingDependencyError`."""
    missing = [name for name in SERVICE_PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"`kvevents serve` needs {', '.join(missing)}: pip install 'kvevents[service]'")

    def command(port: int, folder: Path) -> list[str]:
        options = ("--host", "127.0.0.1", "--port", str(port), "--state-dir", str(folder / "state"))
        return [sys.executable, "-m", "kvevents", "serve", *options, "--snapshot-seconds", str(SNAPSHOT_SECONDS)]

    return IndexerDriver(f"kvevents {version()}", command, Kvevents)


def dynamo_indexer(folder: Path) -> Driver:
    """Return the driver of Dynamo's indexer, from its released wheel in a virtual environment in `folder`."""
    python = python_with(*DYNAMO, folder)

    def command(port: int, _: Path) -> list[str]:
        return [python, "-m", "dynamo.indexer", "--port", str(port), "--threads", "4"]

    return IndexerDriver(" ".join(DYNAMO), command)
