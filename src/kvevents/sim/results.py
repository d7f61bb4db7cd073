"""The results of a run of a fleet, and the workers and metrics from which they are made."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from kvevents.routing import Worker
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_engine import Lookup, SimulatedEngine


class Distribution(Struct, frozen=True):
    """Distribution of a duration over all requests, in seconds. Percentiles are values that occurred (nearest rank)."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """Return the distribution of `values`; None if there is no value."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (ordered[max(0, -(-len(ordered) * share // 100) - 1)] for share in (50, 90, 99))
        return cls(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


class WorkerResult(Struct, frozen=True, kw_only=True):
    """The counters of one engine, or of one rank of it."""

    source: str
    rank: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Tokens of these prompts that were found in the worker's cache."""
    busy: float
    """Share of the time for which it computed, 0 to 1."""
    preemptions: int
    restarts: int


class Disagreement(Struct, frozen=True):
    """A lookup in which index and engine differ: a defect of the simulation or the index, not a result."""

    source: str
    rank: int
    incarnation: int
    """Incarnation of the engine, from 0."""
    seq: int
    """Sequence number of the batch of the step with the lookup."""
    position: int
    """Events of that batch before the lookup."""
    prompt: int
    """Tokens."""
    cached: int
    """Tokens that the engine found."""
    indexed: int
    """Tokens according to the index."""


class PolicyResult(Struct, frozen=True, kw_only=True):
    """A fleet under one policy."""

    policy: str
    seed: int
    requests: int
    finished: int
    refused: int
    """Requests longer than the cache."""
    retried: int
    """Requests that were routed again because their engine was restarted."""
    seconds: float
    """Time from the first arrival to the last answer, in the fleet's time."""
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    """Cached tokens divided by all prompt tokens, 0 to 1, as the engines found them."""
    ttft: Distribution | None
    """Seconds from arrival to the first token."""
    latency: Distribution | None
    """Seconds from arrival to the last token."""
    tpot: Distribution | None
    """Seconds per token of the answer after the first."""
    output_tokens_per_second: float
    imbalance: float
    """Computed tokens of the busiest worker divided by the mean; 1 is even."""
    preemptions: int
    checked: int
    """Lookups of engines that were compared with the index after everything before them was delivered."""
    disagreements: int
    """Compared lookups in which index and engine differ."""
    unproven: int
    """Lookups that could not be compared, because batches before them were lost or the stream was degraded."""
    predicted_tokens: int
    """Cached tokens that the index predicted when requests were routed; 0 for policies that do not use it."""
    overpredictions: int
    """Requests that found fewer cached tokens than predicted: blocks were evicted after the prediction, or just before it."""
    batches: int
    events: int
    workers: list[WorkerResult]
    examples: list[Disagreement] = []
    """The first disagreements."""


class Comparison(Struct, frozen=True, kw_only=True):
    """Several policies with the same requests."""

    settings: dict[str, str | int | float | bool | None]
    policies: list[PolicyResult]


class StreamResult(Struct, frozen=True, kw_only=True):
    """The status and counters of a subscriber about one worker's stream."""

    source: str
    rank: int
    endpoint: str
    trust: str
    """Trust at the end, with the reason."""
    batches: int
    """Batches delivered, of all incarnations."""
    replayed: int
    """Batches delivered by replay."""
    gaps_repaired: int
    """Gaps that replay filled."""
    lost: int
    """Batches that replay did not deliver."""
    resets: int
    """Incarnations after the first."""
    reconnects: int


class LiveResult(Struct, frozen=True, kw_only=True):
    """A fleet that ran in real time."""

    settings: dict[str, str | int | float | bool | None]
    policies: list[PolicyResult]
    """The result of the one policy."""
    streams: list[StreamResult]
    faults: dict[str, int]
    """Number of times that each recurring fault was injected."""
    seconds: float
    """Duration in real time."""
    behind: float
    """Maximum delay of the fleet behind real time, in seconds."""


# --- the data from which results are made


class SimulatedWorker:
    """A worker through all of its incarnations."""

    def __init__(self, worker: Worker, settings: FleetSettings) -> None:
        self.worker: Final = worker
        self.incarnation = -1
        self.batches = 0
        """Number of the next batch of this incarnation."""
        self.is_busy = False
        """Whether a step is being computed."""
        self.is_up = False
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.seconds = 0.0
        """Computation time of all incarnations."""
        self._settings: Final = settings
        self._engine: SimulatedEngine | None = None
        self._computed = 0
        self._preemptions = 0

    @property
    def engine(self) -> SimulatedEngine:
        """The engine of the current incarnation, or of the last one."""
        assert self._engine is not None  # noqa: S101 - a fleet starts all its workers
        return self._engine

    @property
    def computed(self) -> int:
        """Prompt tokens computed in all incarnations."""
        return self._computed + self.engine.computed

    def start(self) -> None:
        """Begin an incarnation, with an empty cache and its own block hashes."""
        if self._engine is not None:
            self._computed, self._preemptions = self.computed, self._preemptions + self._engine.preemptions
        self.incarnation += 1
        self.batches = 0
        self.is_up = True
        settings = self._settings
        source, rank = self.worker
        self._engine = SimulatedEngine(
            settings.size,
            settings.costs,
            settings.step_limits,
            seed=f"{settings.seed}/{source}/{rank}/{self.incarnation}",
            event_style=settings.event_style,
        )

    def stop(self) -> None:
        """End the incarnation and the current step."""
        self.is_up = self.is_busy = False

    def record_lookup(self, prompt: int, cached: int) -> None:
        """Record the first lookup of a request, in tokens."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached

    def result(self, seconds: float) -> WorkerResult:
        """Return its counters, for a run of `seconds` seconds."""
        return WorkerResult(
            source=self.worker[0],
            rank=self.worker[1],
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            busy=min(1.0, self.seconds / seconds) if seconds else 0.0,
            preemptions=self._preemptions + self.engine.preemptions,
            restarts=self.incarnation,
        )


class RequestMetrics:
    """Sums over requests, and the times of each request in seconds."""

    def __init__(self) -> None:
        self.ttft: Final = array("d")
        self.latency: Final = array("d")
        self.tpot: Final = array("d")
        self.requests = 0
        self.refused = 0
        self.retried = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.predicted_tokens = 0
        self.overpredictions = 0
        self.batches = 0
        self.events = 0
        self.last = 0.0
        """Time at which the last answer ended, in seconds from the beginning."""

    def record_lookup(self, lookup: Lookup, predicted: int, block_size: int) -> None:
        """Record the first lookup of a prompt, for which the index had predicted `predicted` cached tokens."""
        self.prompt_tokens += lookup.tokens
        self.cached_tokens += lookup.cached
        self.predicted_tokens += predicted
        usable = (lookup.tokens - 1) // block_size * block_size
        self.overpredictions += min(predicted, usable) > lookup.cached

    def record_answer(self, now: float, arrived: float, first: float, answer: int) -> None:
        """Record that a request was answered with `answer` tokens."""
        self.latency.append(now - arrived)
        self.output_tokens += answer
        if answer > 1:
            self.tpot.append((now - first) / (answer - 1))
        self.last = now
