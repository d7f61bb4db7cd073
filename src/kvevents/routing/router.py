"""The router: it looks up what workers hold, chooses one by a policy, and keeps track of their load."""

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
from kvevents.routing.policies import DECODING_WEIGHT, nearest
from kvevents.routing.policy_types import IDLE, Candidate, Choice, Load, Policy, Prompt, ScoredCandidate, Worker, check_range
from kvevents.routing.weights import describe_tiers, distance_of
from kvevents.stream import Trust
from kvevents.wire.load import EngineLoad

MAX_IN_FLIGHT: Final = 65_536
"""Default limit of requests in flight: four times 64 workers with 256 requests each. A request takes about 250 bytes."""
EXPIRY_SECONDS: Final = 300.0
"""Default number of seconds after which a request counts as finished although no caller has reported its end."""
HALF_LIFE_SECONDS: Final = 10.0
"""Half-life, in seconds, of the initial load of a new worker."""
MAX_HALVINGS: Final = 16
"""Number of halvings after which the initial load of a new worker is ignored."""


class _WorkerLoad:
    """The load of a worker. Requests of a removed worker do not change the load of a new worker with the same name.

    A worker that is added while others have requests begins with their mean load, which is halved every `HALF_LIFE_SECONDS`.
    If it began with no load, it would get every prompt until it had as many requests as the others had when it was added.
    """

    __slots__ = ("_added_at", "_initial", "_reading", "_sent_requests", "_sent_tokens", "load")

    def __init__(self, initial: Load, now: float) -> None:
        self.load = IDLE
        self._initial = initial
        self._added_at = now
        self._reading: EngineLoad | None = None
        """The newest load that the engine has reported."""
        self._sent_requests = 0
        """Number of requests sent since the engine's newest report."""
        self._sent_tokens = 0
        """Number of prompt tokens that the worker must compute for the requests sent since the engine's newest report."""

    def add_request(self, tokens: int) -> None:
        """Add a request for which the worker must compute `tokens` tokens."""
        load = self.load
        self.load = Load(load.requests + 1, load.waiting_tokens + tokens, load.decoding, load.decoding_tokens)
        self._sent_requests += 1
        self._sent_tokens += tokens

    def current_load(self, reading: EngineLoad | None, now: float) -> Load:
        """Return the engine's report plus the requests sent since then; without a report, the router's own count."""
        load = self.load if reading is None else self._combine(reading)
        halvings = int((now - self._added_at) / HALF_LIFE_SECONDS)
        if self._initial is IDLE or halvings > MAX_HALVINGS:
            return load
        return Load(*(own + (initial >> halvings) for own, initial in zip(astuple(load), astuple(self._initial), strict=True)))

    def _combine(self, reading: EngineLoad) -> Load:
        if reading is not self._reading:
            self._reading, self._sent_requests, self._sent_tokens = reading, 0, 0
        load, tokens = self.load, reading.waiting_uncached_tokens
        if tokens is None:
            waiting = load.requests - load.decoding
            tokens = int(reading.waiting * (load.waiting_tokens / waiting if waiting else DECODING_WEIGHT))
        requests, cached_tokens = reading.requests + self._sent_requests, max(load.decoding_tokens, reading.used_tokens)
        return Load(requests, tokens + self._sent_tokens, reading.running, cached_tokens)


class _Request:
    """A request in flight. Its prompt has `length` tokens, of which the worker must compute `waiting`."""

    __slots__ = ("is_decoding", "length", "sent_at", "waiting", "worker")

    def __init__(self, worker: _WorkerLoad, length: int, waiting: int, sent_at: float) -> None:
        self.worker, self.length, self.waiting, self.sent_at = worker, length, waiting, sent_at
        self.is_decoding = False


# --- the router


class NoWorkerError(UsageError):
    """The router has no worker to choose."""


class Decision(Struct, frozen=True):
    """The worker chosen for a prompt, and the reason. The explanation is computed only when `explain` is called."""

    policy: str
    """Name of the policy."""
    prompt: Prompt
    candidates: int
    """Number of workers to choose from: the workers with a connection, or all workers if there is no connection."""
    choice: Choice
    used_index: bool
    """Whether the index was queried."""
    unreachable: int = 0
    """Number of workers that were excluded because they have no connection while other workers have one."""
    key: Hashable = None
    """The key under which the request is in flight."""

    @property
    def worker(self) -> Worker:
        """Source and rank."""
        return self.choice.chosen.worker

    @property
    def tokens(self) -> int:
        """Number of prompt tokens that the worker has cached, according to the index; 0 if the index was not queried."""
        return self.choice.chosen.tokens

    @property
    def tiers(self) -> Mapping[str, int]:
        """Maps each tier to the cumulative number of matched tokens."""
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
        """The scored candidates: first the chosen one, then the others by score; empty if the policy does not score."""
        chosen = self.choice.chosen
        return sorted(self.choice.scored, key=lambda s: (s.candidate is not chosen, s.score, s.uncached, s.worker))

    def explain(self) -> str:
        """Explain the decision in one sentence."""
        chosen = self.choice.chosen
        source, rank = chosen.worker
        reason = self.choice.reason.format(candidates=self.candidates, equal=self.choice.equal)
        load = chosen.load
        cache, score = (self._explain_cache(chosen), self._explain_score()) if self.used_index else ("", "")
        connection = ""
        if self.unreachable:
            connection = f"; {self.unreachable} without a connection were excluded"
        elif distance_of(chosen.trust):
            connection = f"; no worker is connected, and it is {chosen.trust}"
        return (
            f"{self.policy} chose {source} rank {rank}, {reason}: it {cache}has "
            f"{load.requests:,} in flight ({load.waiting_tokens:,} prompt tokens waiting, {load.decoding:,} being answered)"
            f"{score}{connection}."
        )

    def _explain_cache(self, chosen: Candidate) -> str:
        tiers = describe_tiers(chosen.tiers)
        tokens = f"{chosen.tokens:,} of {self.prompt.length:,} tokens{f' ({tiers})' if tiers else ''}"
        if chosen.uncertain:
            tokens += f", of which {chosen.uncertain:,} might be gone"
        return f"is {chosen.trust}, holds {tokens}, "

    def _explain_score(self) -> str:
        if not self.choice.scored:
            return ""
        best = self.scored[0]
        hot = sum(item.hot for item in self.choice.scored)
        note = f"; {hot} with too many requests got no credit for their caches" if hot else ""
        return f", must compute {best.uncached:.0%}, and its load adds {best.load:.3f}: score {best.score:.3f}{note}"


class Router:
    """Chooses a worker for each prompt, and keeps track of requests in flight. Thread-safe.

    The load of a worker consists of the requests that this router has sent to it and that have not ended. With
    `engine_load`, the load of a worker is the load that its engine reports.

    - `index` is needed by policies that use it. The caller keeps the index up to date.
    - `trust` returns the trust in a worker's stream, or the name of its state (`lambda worker: subscriber.trust(*worker)`);
      default: EXACT. `trust` must not call the router. The blocks that an EXACT worker holds on its `inexact_tiers` count as
      DEGRADED. With any policy a STALE worker is chosen only if all workers are STALE, and a CONNECTING worker only if no
      worker has a connection.
    - `engine_load` returns the newest load of a worker, or None if the load is unknown or too old (`LoadSubscriber.load`).
      `engine_load` must not call the router, and must return the same object until the engine reports again. A report replaces
      the router's own count, because the report includes the requests of other routers and excludes requests that ended
      unnoticed. Requests that this router has sent after the report are added. For an engine that does not report how many
      tokens wait, such as vLLM, each waiting request counts as the mean of this router's waiting requests, or as
      `DECODING_WEIGHT` tokens if no request waits.
    - With `overlay_seconds` above 0 and a policy that uses the index, a prompt counts as cached by the chosen worker for
      `overlay_seconds`, or until events confirm it.
    - `max_in_flight` limits the stored requests; above it the oldest request counts as finished. A request also counts as
      finished when `expiry_seconds` have passed since its routing, because a caller might never call `finish`.
    - A worker that is added while others work begins with their mean load, of which half is left after `HALF_LIFE_SECONDS`.
    - Without `whole_prompt` the last token of a prompt is not looked up, since engines recompute it with its block.

    Raises `ConfigError`.
    """

    def __init__(  # noqa: PLR0913 - the parameters are settings
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
        self._max_in_flight = max_in_flight
        self._expiry_seconds = expiry_seconds
        self._clock = clock
        self._workers: dict[Worker, _WorkerLoad] = {}
        self._requests: dict[Hashable, _Request] = {}
        self._lock = threading.RLock()
        self.evicted = 0
        """Number of requests that counted as finished because of `max_in_flight`, usually because a caller omits `finish`."""
        self.expired = 0
        """Number of requests whose end was not reported within `expiry_seconds`, so that they counted as finished."""

    # --- workers

    def add(self, worker: Worker) -> None:
        """Add a worker to choose from. Does nothing if the worker was added before."""
        with self._lock:
            if worker not in self._workers:
                loads = [astuple(entry.load) for entry in self._workers.values()]
                mean = Load(*(sum(part) // len(loads) for part in zip(*loads, strict=True))) if loads else IDLE
                self._workers[worker] = _WorkerLoad(mean if mean.requests else IDLE, self._clock())

    def remove(self, worker: Worker) -> None:
        """Remove a worker and its load; the index keeps its blocks. Does nothing if the worker is unknown."""
        with self._lock:
            self._workers.pop(worker, None)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers to choose from, in the order in which they were added."""
        with self._lock:
            return tuple(self._workers)

    def load(self, worker: Worker) -> Load:
        """Return the known load of a worker. Raises `UnknownSourceError` if the worker was not added."""
        with self._lock:
            entry = self._workers.get(worker)
        if entry is None:
            raise UnknownSourceError(f"the router has no worker {worker[0]!r} with rank {worker[1]}: add it first")
        return entry.load

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
        """Choose a worker for a prompt. The request is then in flight under `key`.

        `tokens` are a sequence or a buffer, as for `PrefixIndex.match`. Workers in `without` are not chosen, for example one
        that has just failed. With `ignores_cache` the engine will compute the whole prompt, as for `prompt_logprobs`. If `key`
        is in flight already, the call is a retry: it replaces the earlier request. Raises `NoWorkerError` if no worker is left.
        """
        prompt = Prompt(len(tokens), session)
        matches = {} if ignores_cache else self._look_up(tokens, prompt.length, namespace)
        with self._lock:
            self.finish(key)
            self._expire()
            all_candidates = self._make_candidates(matches, without)
            if not all_candidates:
                if not self._workers:
                    raise NoWorkerError("the router has no workers: add one first")
                raise NoWorkerError(f"all {len(self._workers)} workers are excluded: exclude fewer in `without`, or add others")
            candidates = nearest(all_candidates, [distance_of(candidate.trust) for candidate in all_candidates])
            choice = self.policy.choose(prompt, candidates)
            chosen = choice.chosen
            self._send(key, chosen.worker, prompt.length, prompt.length - chosen.tokens)
        if self._index is not None and self._overlay_seconds:
            self._index.speculate(chosen.worker, tokens, namespace, self._overlay_seconds)
        unreachable = len(all_candidates) - len(candidates)
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
        """Choose a worker as `route` does. The request ends with the block of the `with` statement, even after an error.

        Call `record_first_token(decision.key)` when the answer begins.
        """
        decision = self.route(
            object(), tokens, namespace=namespace, session=session, without=without, ignores_cache=ignores_cache
        )
        try:
            yield decision
        finally:
            self.finish(decision.key)

    def record_first_token(self, key: Hashable) -> None:
        """Record that the answer has begun: the prompt no longer waits. Does nothing for an unknown key or a second call."""
        with self._lock:
            request = self._requests.get(key)
            if request is None or request.is_decoding:
                return
            request.is_decoding = True
            load = request.worker.load
            waiting_tokens = load.waiting_tokens - request.waiting
            request.worker.load = Load(load.requests, waiting_tokens, load.decoding + 1, load.decoding_tokens + request.length)

    def finish(self, key: Hashable) -> None:
        """Record that the answer ended, failed or was cancelled. Does nothing for an unknown key or a second call."""
        with self._lock:
            self.record_first_token(key)
            request = self._requests.pop(key, None)
            if request is not None:
                load, length = request.worker.load, request.length
                request.worker.load = Load(
                    load.requests - 1, load.waiting_tokens, load.decoding - 1, load.decoding_tokens - length
                )

    @property
    def in_flight(self) -> int:
        """Number of requests in flight, including requests of removed workers."""
        return len(self._requests)

    def __repr__(self) -> str:
        return f"<Router {self.policy.name}, {len(self.workers)} workers, {self.in_flight} requests in flight>"

    def _send(self, key: Hashable, worker: Worker, length: int, waiting: int) -> None:
        entry = self._workers[worker]
        entry.add_request(waiting)
        self._requests[key] = _Request(entry, length, waiting, self._clock())
        if len(self._requests) > self._max_in_flight:
            self.evicted += 1
            self.finish(next(iter(self._requests)))

    def _expire(self) -> None:
        oldest = self._clock() - self._expiry_seconds
        while self._requests:
            key, request = next(iter(self._requests.items()))
            if request.sent_at >= oldest:
                return
            self.expired += 1
            self.finish(key)

    def _look_up(self, tokens: Any, length: int, namespace: Namespace | None) -> dict[Worker, tuple[int, dict[str, int], int]]:
        """Return the number of tokens that each worker holds: in total, by tier, and the number that might be gone."""
        if self._index is None:
            return {}
        max_tokens = length if self._whole_prompt else max(length - 1, 0)
        match = self._index.match(tokens, namespace, overlay=self._overlay_seconds > 0, max_tokens=max_tokens)
        return {
            (source, rank): (tokens_held, {"gpu": gpu, "cpu": cpu, "disk": disk}, tokens_held - certain)
            for source, rank, gpu, cpu, disk, tokens_held, certain, _ in match.rows()
        }

    def _make_candidates(
        self, matches: Mapping[Worker, tuple[int, Mapping[str, int], int]], without: Collection[Worker]
    ) -> Sequence[Candidate]:
        trust, engine_load, now = self._trust, self._engine_load, self._clock()
        candidates: list[Candidate] = []
        for worker, entry in self._workers.items():
            if worker in without:
                continue
            load = entry.current_load(engine_load(worker) if engine_load else None, now)
            tokens, tiers, uncertain = matches.get(worker, _NO_MATCH)
            report = "EXACT" if trust is None else trust(worker)
            inexact: tuple[str, ...] = () if isinstance(report, str) else report.inexact_tiers
            # An idle engine has not proven its replay endpoint yet, but no event contradicts it.
            state = report if isinstance(report, str) else "EXACT" if report.unproven else report.name
            candidates.append(Candidate(worker, load, tokens, tiers, state, inexact, uncertain))
        return candidates


_NO_MATCH: Final[tuple[int, Mapping[str, int], int]] = (0, {}, 0)
