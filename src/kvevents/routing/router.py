"""A policy at work: who may be chosen, what each has to do, what each holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from kvevents.errors import ConfigError, UnknownSourceError, UsageError
from kvevents.index import Namespace, PrefixIndex
from kvevents.routing.choice import Candidate, Choice, Considered, Load, Policy, Prompt, Worker
from kvevents.routing.ledger import MAX_IN_FLIGHT, Ledger
from kvevents.routing.scoring import nearest
from kvevents.routing.settings import check_range
from kvevents.weights import describe_tiers, distance_of


class NoWorkerError(UsageError):
    """There is no worker that a prompt could go to."""


class Decision(Struct, frozen=True):
    """Where a prompt goes. Nothing of the explanation is made before it is asked for."""

    policy: str
    """Name of the policy."""
    prompt: Prompt
    candidates: int
    """How many there were to choose from: those with a connection, or all where no worker has one."""
    choice: Choice
    asked: bool
    """Whether the index was asked."""
    unreachable: int = 0
    """Workers that were left out because they have no connection and others do."""

    @property
    def worker(self) -> Worker:
        """Source and rank."""
        return self.choice.chosen.worker

    @property
    def tokens(self) -> int:
        """Tokens that the index says the worker has cached; 0 where it was not asked."""
        return self.choice.chosen.tokens

    @property
    def tiers(self) -> Mapping[str, int]:
        """The same by tier, cumulative."""
        return self.choice.chosen.tiers

    @property
    def trust(self) -> str:
        """State of the worker's stream; CONNECTING or STALE only if no worker has a connection."""
        return self.choice.chosen.trust

    @property
    def load(self) -> Load:
        """What the worker had to do before this."""
        return self.choice.chosen.load

    @property
    def considered(self) -> list[Considered]:
        """What the policy weighed, the chosen one first, then the best; empty where it weighs nothing."""
        chosen = self.choice.chosen
        return sorted(
            self.choice.considered, key=lambda one: (one.candidate is not chosen, one.score, one.uncached, one.worker)
        )

    def why(self) -> str:
        """One sentence for people."""
        chosen = self.choice.chosen
        source, rank = chosen.worker
        reason = self.choice.reason.format(candidates=self.candidates, equal=self.choice.equal)
        load = chosen.load
        return (
            f"{self.policy} chose {source} rank {rank}, {reason}: it {self._held(chosen) if self.asked else ''}has "
            f"{load.requests:,} in flight ({load.waiting_tokens:,} prompt tokens waiting, {load.decoding:,} being answered)"
            f"{self._scored() if self.asked else ''}{self._reached()}."
        )

    def _reached(self) -> str:
        if self.unreachable:
            return f"; {self.unreachable} without a connection were left out"
        return f"; no worker is connected, and it is {self.trust}" if distance_of(self.trust) else ""

    def _held(self, chosen: Candidate) -> str:
        tiers = describe_tiers(chosen.tiers)
        held = f"{chosen.tokens:,} of {self.prompt.length:,} tokens{f' ({tiers})' if tiers else ''}"
        return f"is {chosen.trust}, holds {held}, "

    def _scored(self) -> str:
        if not self.choice.considered:
            return ""
        one = self.considered[0]
        hot = sum(each.hot for each in self.choice.considered)
        guarded = f"; {hot} with too many requests got no credit for what they hold" if hot else ""
        return f", must compute {one.uncached:.0%}, and its load counts {one.load:.3f}: score {one.score:.3f}{guarded}"


class Router:
    """Sends each prompt to a worker, and keeps in mind what is in flight. For any number of threads.

    What it knows of a worker's load is what it has sent there itself and has not been told the end of, never what goes on
    inside an engine. `index` is needed by policies that ask it, and is kept up to date by others; so is `trust`, which names
    the state of a worker's stream (`lambda worker: subscriber.trust(*worker).name`), without which all are EXACT; it must not
    call the router. Whatever the policy, a worker that is STALE is chosen only if no other one is left, and one that is
    CONNECTING only if none has a connection. With `overlay_seconds` above 0 a prompt is believed to be cached where it was sent
    for so long before any event says so, if the policy asks the index. `max_in_flight` bounds what is remembered. The
    last token of a prompt is not looked up, since engines recompute it and with it its block, except with `whole_prompt`.
    Raises `ConfigError`.
    """

    def __init__(
        self,
        policy: Policy,
        index: PrefixIndex | None = None,
        *,
        trust: Callable[[Worker], str] | None = None,
        overlay_seconds: float = 0.0,
        max_in_flight: int = MAX_IN_FLIGHT,
        whole_prompt: bool = False,
    ) -> None:
        if policy.asks_index and index is None:
            raise ConfigError(f"the policy {policy.name} needs an index; give the router a PrefixIndex")
        check_range("overlay_seconds", overlay_seconds, 0, finite=True)
        check_range("max_in_flight", max_in_flight, 1)
        self.policy = policy
        self._index = index if policy.asks_index else None
        self._trust = trust
        self._overlay_seconds = overlay_seconds
        self._whole_prompt = whole_prompt
        self._ledger = Ledger(max_in_flight)
        self._lock = threading.Lock()

    # --- workers

    def add(self, worker: Worker) -> None:
        """Prompts may go there from now on. A worker that is there already stays as it is."""
        with self._lock:
            self._ledger.open(worker)

    def remove(self, worker: Worker) -> None:
        """Nothing goes there any more, and its requests are forgotten; the index is not told. Unknown workers are fine."""
        with self._lock:
            self._ledger.close(worker)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All that prompts may go to, in the order in which they were added."""
        with self._lock:
            return self._ledger.workers

    def load(self, worker: Worker) -> Load:
        """What a worker has to do as far as is known here. Raises `UnknownSourceError` for one that was not added."""
        with self._lock:
            load = self._ledger.load(worker)
        if load is None:
            raise UnknownSourceError(f"the router has no worker {worker[0]!r} with rank {worker[1]}; add it first")
        return load

    # --- requests

    def route(
        self,
        key: Hashable,
        tokens: Any,
        *,
        namespace: Namespace | None = None,
        session: str | None = None,
        without: Collection[Worker] = (),
    ) -> Decision:
        """Choose a worker for a prompt, which is in flight under `key` from then on.

        `tokens` are a sequence or a buffer, as for `PrefixIndex.match`. Workers in `without` are not chosen, such as one that
        has just failed; a key that is in flight already is a retry, and what it was before is forgotten. Raises
        `NoWorkerError` if no worker is left to choose.
        """
        prompt = Prompt(len(tokens), session)
        held = self._held(tokens, prompt.length, namespace)
        with self._lock:
            self._ledger.finished(key)
            known = self._candidates(held, without)
            if not known:
                raise NoWorkerError(_nobody(len(self._ledger.workers)))
            candidates = nearest(known, [distance_of(one.trust) for one in known])
            choice = self.policy.choose(prompt, candidates)
            chosen = choice.chosen
            self._ledger.sent(key, chosen.worker, prompt.length, prompt.length - chosen.tokens)
        if self._index is not None and self._overlay_seconds:
            self._index.speculate(chosen.worker, tokens, namespace, self._overlay_seconds)
        left_out = len(known) - len(candidates)
        return Decision(self.policy.name, prompt, len(candidates), choice, self._index is not None, left_out)

    def first_token(self, key: Hashable) -> None:
        """The answer begins: nothing of the prompt waits any more. Once is enough; unknown keys are fine."""
        with self._lock:
            self._ledger.first_token(key)

    def finished(self, key: Hashable) -> None:
        """The answer has ended, or never will. Once is enough; unknown keys are fine."""
        with self._lock:
            self._ledger.finished(key)

    @property
    def in_flight(self) -> int:
        """Requests that are remembered, those of removed workers included."""
        return len(self._ledger)

    @property
    def forgotten(self) -> int:
        """Requests that count as finished because more than `max_in_flight` were there: somebody does not tell their end."""
        return self._ledger.forgotten

    def __repr__(self) -> str:
        return f"<Router {self.policy.name}, {len(self.workers)} workers, {self.in_flight} requests in flight>"

    # --- candidates

    def _held(self, tokens: Any, length: int, namespace: Namespace | None) -> dict[Worker, tuple[int, dict[str, int]]]:
        """By worker what it holds of the prompt, on whatever tiers and by tier."""
        if self._index is None:
            return {}
        usable = tokens if self._whole_prompt or not length else tokens[: length - 1]
        match = self._index.match(usable, namespace, overlay=self._overlay_seconds > 0)
        return {
            (source, rank): (held, {"gpu": gpu, "cpu": cpu, "disk": disk})
            for source, rank, gpu, cpu, disk, held in match.rows()
        }

    def _candidates(
        self, held: Mapping[Worker, tuple[int, Mapping[str, int]]], without: Collection[Worker]
    ) -> Sequence[Candidate]:
        trust = self._trust
        found: list[Candidate] = []
        for worker, load in self._ledger.loads():
            if worker in without:
                continue
            tokens, tiers = held.get(worker, _NOTHING)
            found.append(Candidate(worker, load, tokens, tiers, "EXACT" if trust is None else trust(worker)))
        return found


_NOTHING: Final[tuple[int, Mapping[str, int]]] = (0, {})


def _nobody(workers: int) -> str:
    if not workers:
        return "there is no worker to route to; add one first"
    return f"all {workers} workers are excluded; name fewer in `without`, or add others"
