"""The router: applies a policy to the workers, and keeps their load and what they hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import astuple

from kvevents.errors import ConfigError, UnknownSourceError, UsageError
from kvevents.index import Namespace, PrefixIndex
from kvevents.routing.engine_load import EngineLoad
from kvevents.routing.policies import DECODING_WEIGHT, nearest
from kvevents.routing.policy_types import IDLE, Candidate, Choice, Load, Policy, Prompt, ScoredCandidate, Worker, check_range
from kvevents.routing.weights import describe_tiers, distance_of
from kvevents.stream import Trust

MAX_IN_FLIGHT: Final = 65_536
"""Default limit of remembered requests, about 250 bytes each. It is four times as many as 64 workers with 256 requests each."""


EXPIRY_SECONDS: Final = 300.0
"""Default time after which a request without an end counts as finished."""
HALF_LIFE: Final = 10.0
"""Seconds after which half of the load counts that a new worker begins with."""
MAX_HALVINGS: Final = 16
"""Times that it is halved before it no longer counts."""


class _WorkerLoad:
    """The load of a worker. Requests of a removed worker keep its object, and a new worker of the same name gets another.

    A worker that is added while others work begins with their mean load, which is halved again and again. Otherwise every
    prompt would go to it until it has as many requests as they have, some of which might have ended without a report.
    """

    __slots__ = ("_added_at", "_initial", "_reading", "_sent", "_sent_tokens", "load")

    def __init__(self, initial: Load, now: float) -> None:
        self.load = IDLE
        self._initial = initial
        self._added_at = now
        self._reading: EngineLoad | None = None
        """The newest load that the engine has reported."""
        self._sent = 0
        """Requests that were sent since."""
        self._sent_tokens = 0
        """Tokens of their prompts that the worker must compute."""

    def add(self, waiting: int) -> None:
        """Add a request of `waiting` tokens to compute."""
        load = self.load
        self.load = Load(load.requests + 1, load.waiting_tokens + waiting, load.decoding, load.decoding_tokens)
        self._sent += 1
        self._sent_tokens += waiting

    def current(self, reading: EngineLoad | None, now: float) -> Load:
        """Return the load that counts: what the engine has reported and what was sent since; without a report the own count."""
        load = self.load if reading is None else self._reported(reading)
        halvings = int((now - self._added_at) / HALF_LIFE)
        if self._initial is IDLE or halvings > MAX_HALVINGS:
            return load
        return Load(*(mine + (given >> halvings) for mine, given in zip(astuple(load), astuple(self._initial), strict=True)))

    def _reported(self, reading: EngineLoad) -> Load:
        if reading is not self._reading:
            self._reading, self._sent, self._sent_tokens = reading, 0, 0
        own, tokens = self.load, reading.waiting_uncached_tokens
        if tokens is None:
            waiting = own.requests - own.decoding
            tokens = int(reading.waiting * (own.waiting_tokens / waiting if waiting else DECODING_WEIGHT))
        requests, cached = reading.requests + self._sent, max(own.decoding_tokens, reading.used_tokens)
        return Load(requests, tokens + self._sent_tokens, reading.running, cached)


class _Request:
    __slots__ = ("is_decoding", "length", "sent_at", "waiting", "worker")

    def __init__(self, worker: _WorkerLoad, length: int, waiting: int, sent_at: float) -> None:
        self.worker, self.length, self.waiting, self.sent_at = worker, length, waiting, sent_at
        self.is_decoding = False


class InFlightRequests:
    """Requests in flight by key, and the load of each worker. Not thread-safe.

    Above `max_in_flight` requests the oldest ones count as finished, and so does each after `expiry_seconds`.
    """

    def __init__(
        self,
        max_in_flight: int = MAX_IN_FLIGHT,
        expiry_seconds: float = EXPIRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_in_flight = max_in_flight
        self._expiry_seconds = expiry_seconds
        self._clock = clock
        self._workers: dict[Worker, _WorkerLoad] = {}
        self._requests: dict[Hashable, _Request] = {}
        self.evicted = 0
        """Requests that counted as finished because too many were in flight."""
        self.expired = 0
        """Requests that counted as finished because they had no end in time."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers, in the order in which they were added."""
        return tuple(self._workers)

    def add_worker(self, worker: Worker) -> None:
        """Add a worker, which begins with the mean load of the others; nothing if it exists."""
        if worker not in self._workers:
            others = [astuple(other.load) for other in self._workers.values()]
            mean = Load(*(sum(part) // len(others) for part in zip(*others, strict=True))) if others else IDLE
            self._workers[worker] = _WorkerLoad(mean if mean.requests else IDLE, self._clock())

    def remove_worker(self, worker: Worker) -> None:
        """Remove a worker with its load; nothing if it does not exist."""
        self._workers.pop(worker, None)

    def loads(self, engine_load: Callable[[Worker], EngineLoad | None] | None) -> list[tuple[Worker, Load]]:
        """Return the load of every worker that counts for a choice, with what engines report of themselves."""
        now = self._clock()
        return [
            (worker, own.current(engine_load(worker) if engine_load else None, now)) for worker, own in self._workers.items()
        ]

    def load(self, worker: Worker) -> Load | None:
        """Return the load of a worker; None if it does not exist."""
        found = self._workers.get(worker)
        return found.load if found else None

    def add(self, key: Hashable, worker: Worker, length: int, waiting: int) -> None:
        """Add a request of `length` prompt tokens, of which the worker must compute `waiting`. Replaces an equal key."""
        self.finish(key)
        found = self._workers[worker]
        found.add(waiting)
        self._requests[key] = _Request(found, length, waiting, self._clock())
        if len(self._requests) > self._max_in_flight:
            self.evicted += 1
            self.finish(next(iter(self._requests)))

    def expire(self) -> None:
        """Finish the requests whose time is over."""
        oldest = self._clock() - self._expiry_seconds
        while self._requests:
            key, request = next(iter(self._requests.items()))
            if request.sent_at >= oldest:
                return
            self.expired += 1
            self.finish(key)

    def record_first_token(self, key: Hashable) -> None:
        """Record that the prompt is computed; nothing for an unknown key, or if it was recorded before."""
        request = self._requests.get(key)
        if request is None or request.is_decoding:
            return
        request.is_decoding = True
        load = request.worker.load
        request.worker.load = Load(
            load.requests, load.waiting_tokens - request.waiting, load.decoding + 1, load.decoding_tokens + request.length
        )

    def finish(self, key: Hashable) -> None:
        """Remove a request that was answered, failed or was cancelled; nothing for an unknown key."""
        self.record_first_token(key)
        request = self._requests.pop(key, None)
        if request is None:
            return
        load = request.worker.load
        request.worker.load = Load(
            load.requests - 1, load.waiting_tokens, load.decoding - 1, load.decoding_tokens - request.length
        )


# --- the router


class NoWorkerError(UsageError):
    """The router has no worker to choose."""


class Decision(Struct, frozen=True):
    """Where a prompt goes, and why. The explanation is made only when it is read."""

    policy: str
    """Name of the policy."""
    prompt: Prompt
    candidates: int
    """Number of workers to choose from: those with a connection, or all if no worker has one."""
    choice: Choice
    used_index: bool
    """Whether the index was queried."""
    unreachable: int = 0
    """Workers that were excluded because they have no connection and others have one."""
    key: Hashable = None
    """The key under which the request is in flight."""

    @property
    def worker(self) -> Worker:
        """Source and rank."""
        return self.choice.chosen.worker

    @property
    def tokens(self) -> int:
        """Tokens of the prompt that the worker has cached, according to the index; 0 if it was not queried."""
        return self.choice.chosen.tokens

    @property
    def tiers(self) -> Mapping[str, int]:
        """Matched tokens by tier, cumulative."""
        return self.choice.chosen.tiers

    @property
    def trust(self) -> str:
        """State of the worker's stream; CONNECTING or STALE only if no worker has a connection."""
        return self.choice.chosen.trust

    @property
    def load(self) -> Load:
        """The worker's load before this request."""
        return self.choice.chosen.load

    @property
    def scored(self) -> list[ScoredCandidate]:
        """The candidates that the policy scored: the chosen one, then by score; empty if it does not score."""
        chosen = self.choice.chosen
        return sorted(self.choice.scored, key=lambda one: (one.candidate is not chosen, one.score, one.uncached, one.worker))

    def explain(self) -> str:
        """Explain the decision in one sentence."""
        chosen = self.choice.chosen
        source, rank = chosen.worker
        reason = self.choice.reason.format(candidates=self.candidates, equal=self.choice.equal)
        load = chosen.load
        cache, score = (self._explain_cache(chosen), self._explain_score()) if self.used_index else ("", "")
        return (
            f"{self.policy} chose {source} rank {rank}, {reason}: it {cache}has "
            f"{load.requests:,} in flight ({load.waiting_tokens:,} prompt tokens waiting, {load.decoding:,} being answered)"
            f"{score}{self._explain_connection()}."
        )

    def _explain_cache(self, chosen: Candidate) -> str:
        tiers = describe_tiers(chosen.tiers)
        held = f"{chosen.tokens:,} of {self.prompt.length:,} tokens{f' ({tiers})' if tiers else ''}"
        if chosen.uncertain:
            held += f", of which {chosen.uncertain:,} might be gone"
        return f"is {chosen.trust}, holds {held}, "

    def _explain_score(self) -> str:
        if not self.choice.scored:
            return ""
        one = self.scored[0]
        hot = sum(each.hot for each in self.choice.scored)
        guarded = f"; {hot} with too many requests got no credit for their caches" if hot else ""
        return f", must compute {one.uncached:.0%}, and its load adds {one.load:.3f}: score {one.score:.3f}{guarded}"

    def _explain_connection(self) -> str:
        if self.unreachable:
            return f"; {self.unreachable} without a connection were excluded"
        return f"; no worker is connected, and it is {self.trust}" if distance_of(self.trust) else ""


class Router:
    """Chooses a worker for each prompt, and keeps track of requests in flight. Thread-safe.

    The router knows the load of a worker from the requests that it sent there itself and whose end it was given, and, with
    `engine_load`, from what the engine reports of itself.

    - `index` is needed by policies that use it. The caller keeps it up to date.
    - `trust` returns the trust in a worker's stream, or the name of its state (`lambda worker: subscriber.trust(*worker)`);
      without it, EXACT. It must not call the router. What an EXACT worker holds on its `inexact_tiers` counts as DEGRADED. With
      any policy a STALE worker is chosen only if no other one is left, and a CONNECTING one only if none has a connection.
    - `engine_load` returns the newest load of a worker, or None if that is unknown or too old (`LoadSubscriber.load`). It must
      not call the router, and return the same object until the engine reports again. A report counts instead of the router's
      own count: it includes the requests of other routers, and not those that ended unnoticed. What this router has sent since
      is added. For an engine that does not report how many tokens wait, such as vLLM, each waiting request counts as the mean
      of this router's own, or as `DECODING_WEIGHT` tokens if it has none.
    - With `overlay_seconds` above 0 a prompt counts as cached where it was sent, for this time or until events confirm it, if
      the policy uses the index.
    - `max_in_flight` limits the requests that are remembered; beyond it the oldest count as finished. So does each request
      `expiry_seconds` after it was routed, because clients hang up, and callers forget `finish`. `request` never forgets.
    - A worker that is added while others work begins with their mean load, of which half is left after `HALF_LIFE`.
    - The last token of a prompt is not looked up, since engines compute it and its block again, except with `whole_prompt`.

    Raises `ConfigError`.
    """

    def __init__(  # noqa: PLR0913 - settings, by keyword
        self,
        policy: Policy,
        index: PrefixIndex | None = None,
        *,
        trust: Callable[[Worker], str | Trust] | None = None,
        engine_load: Callable[[Worker], EngineLoad | None] | None = None,
        overlay_seconds: float = 0.0,
        max_in_flight: int = MAX_IN_FLIGHT,
        expiry_seconds: float = EXPIRY_SECONDS,
        whole_prompt: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if policy.uses_index and index is None:
            raise ConfigError(f"the policy {policy.name} needs an index: pass a PrefixIndex to the router")
        check_range("overlay_seconds", overlay_seconds, 0, finite=True)
        check_range("max_in_flight", max_in_flight, 1)
        check_range("expiry_seconds", expiry_seconds, 1)
        self.policy = policy
        self._index = index if policy.uses_index else None
        self._trust = trust
        self._engine_load = engine_load
        self._overlay_seconds = overlay_seconds
        self._whole_prompt = whole_prompt
        self._requests = InFlightRequests(max_in_flight, expiry_seconds, clock)
        self._lock = threading.Lock()

    # --- workers

    def add(self, worker: Worker) -> None:
        """Add a worker to choose from; nothing if it was added before."""
        with self._lock:
            self._requests.add_worker(worker)

    def remove(self, worker: Worker) -> None:
        """Remove a worker with its load, but not from the index; nothing if it is unknown."""
        with self._lock:
            self._requests.remove_worker(worker)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers to choose from, in the order in which they were added."""
        with self._lock:
            return self._requests.workers

    def load(self, worker: Worker) -> Load:
        """Return the known load of a worker. Raises `UnknownSourceError` if it was not added."""
        with self._lock:
            load = self._requests.load(worker)
        if load is None:
            raise UnknownSourceError(f"the router has no worker {worker[0]!r} with rank {worker[1]}: add it first")
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
        ignores_cache: bool = False,
    ) -> Decision:
        """Choose a worker for a prompt, which is in flight under `key` from then on.

        `tokens` are a sequence or a buffer, as for `PrefixIndex.match`. Workers in `without` are not chosen, for example one
        that has just failed. With `ignores_cache` the engine will compute the whole prompt, as for `prompt_logprobs`. A key
        that is in flight already is a retry, and replaces the earlier request. Raises `NoWorkerError` if no worker is left.
        """
        prompt = Prompt(len(tokens), session)
        held = {} if ignores_cache else self._look_up(tokens, prompt.length, namespace)
        with self._lock:
            self._requests.finish(key)
            self._requests.expire()
            known = self._candidates(held, without)
            if not known:
                workers = len(self._requests.workers)
                raise NoWorkerError(
                    f"all {workers} workers are excluded: exclude fewer in `without`, or add others"
                    if workers
                    else "the router has no workers: add one first"
                )
            candidates = nearest(known, [distance_of(one.trust) for one in known])
            choice = self.policy.choose(prompt, candidates)
            chosen = choice.chosen
            self._requests.add(key, chosen.worker, prompt.length, prompt.length - chosen.tokens)
        if self._index is not None and self._overlay_seconds:
            self._index.speculate(chosen.worker, tokens, namespace, self._overlay_seconds)
        unreachable = len(known) - len(candidates)
        return Decision(self.policy.name, prompt, len(candidates), choice, self._index is not None, unreachable, key)

    @contextmanager
    def request(
        self,
        tokens: Any,
        *,
        namespace: Namespace | None = None,
        session: str | None = None,
        without: Collection[Worker] = (),
        ignores_cache: bool = False,
    ) -> Iterator[Decision]:
        """Choose a worker as `route` does, for a request that ends with the block of a `with` statement, however it ends.

        `record_first_token(decision.key)` records that the answer begins.
        """
        decision = self.route(
            object(), tokens, namespace=namespace, session=session, without=without, ignores_cache=ignores_cache
        )
        try:
            yield decision
        finally:
            self.finish(decision.key)

    def record_first_token(self, key: Hashable) -> None:
        """Record that the answer begins, so that the prompt waits no more; nothing for an unknown key or a second call."""
        with self._lock:
            self._requests.record_first_token(key)

    def finish(self, key: Hashable) -> None:
        """Record that the answer ended, failed or was cancelled; nothing for an unknown key or a second call."""
        with self._lock:
            self._requests.finish(key)

    @property
    def in_flight(self) -> int:
        """Number of requests in flight, including those of removed workers."""
        return len(self._requests)

    @property
    def evicted(self) -> int:
        """Requests that counted as finished because more than `max_in_flight` existed: a caller of `route` omits `finish`."""
        return self._requests.evicted

    @property
    def expired(self) -> int:
        """Requests that counted as finished `expiry_seconds` after they were routed."""
        return self._requests.expired

    def __repr__(self) -> str:
        return f"<Router {self.policy.name}, {len(self.workers)} workers, {self.in_flight} requests in flight>"

    def _look_up(self, tokens: Any, length: int, namespace: Namespace | None) -> dict[Worker, tuple[int, dict[str, int], int]]:
        """Return what each worker holds of the prompt: tokens on any tiers, tokens by tier, and how many might be gone."""
        if self._index is None:
            return {}
        longest = length if self._whole_prompt else max(length - 1, 0)
        match = self._index.match(tokens, namespace, overlay=self._overlay_seconds > 0, max_tokens=longest)
        return {
            (source, rank): (held, {"gpu": gpu, "cpu": cpu, "disk": disk}, held - certain)
            for source, rank, gpu, cpu, disk, held, certain, _ in match.rows()
        }

    def _candidates(
        self, held: Mapping[Worker, tuple[int, Mapping[str, int], int]], without: Collection[Worker]
    ) -> Sequence[Candidate]:
        trust = self._trust
        candidates: list[Candidate] = []
        for worker, load in self._requests.loads(self._engine_load):
            if worker in without:
                continue
            tokens, tiers, uncertain = held.get(worker, _NOTHING)
            found = "EXACT" if trust is None else trust(worker)
            inexact: tuple[str, ...] = () if isinstance(found, str) else found.inexact_tiers
            # An idle engine has proven nothing yet, and nothing contradicts it.
            state = found if isinstance(found, str) else "EXACT" if found.unproven else found.name
            candidates.append(Candidate(worker, load, tokens, tiers, state, inexact, uncertain))
        return candidates


_NOTHING: Final[tuple[int, Mapping[str, int], int]] = (0, {}, 0)
