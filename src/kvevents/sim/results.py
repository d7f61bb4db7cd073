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
    """Distribution of a duration in seconds over all requests. A percentile is a value that occurred (nearest rank)."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Distribution | None:
        """Return the distribution of `values`, or None if `values` is empty."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (ordered[max(0, -(-len(ordered) * share // 100) - 1)] for share in (50, 90, 99))
        return cls(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


class WorkerResult(Struct, frozen=True, kw_only=True):
    """The counters of one worker: an engine, or one rank of an engine."""

    source: str
    rank: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Number of tokens in these prompts that the worker found in its cache."""
    busy: float
    """Share of the run, 0 to 1, for which the worker was computing a step."""
    preemptions: int
    restarts: int


class Disagreement(Struct, frozen=True):
    """A lookup for which index and engine found different numbers of tokens: a defect of the simulation or of the index."""

    source: str
    rank: int
    incarnation: int
    """Number of the engine's incarnation; the first is 0."""
    seq: int
    """Sequence number of the batch that the step with the lookup published."""
    position: int
    """Number of events in that batch that precede the lookup."""
    prompt: int
    """Number of tokens in the prompt."""
    cached: int
    """Number of tokens that the engine found in its cache."""
    indexed: int
    """Number of tokens that the index found for the worker."""


class PolicyResult(Struct, frozen=True, kw_only=True):
    """The result of one run of a fleet under one policy."""

    policy: str
    seed: int
    requests: int
    finished: int
    refused: int
    """Number of requests that were refused because they are longer than the cache."""
    retried: int
    """Number of requests that were routed again because their engine was restarted."""
    seconds: float
    """Time from the first arrival to the last answer, in the fleet's time."""
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    """Cached tokens divided by all prompt tokens, 0 to 1, as the engines found them."""
    ttft: Distribution | None
    """Seconds from the arrival of a request to the first token of its answer."""
    latency: Distribution | None
    """Seconds from the arrival of a request to the last token of its answer."""
    tpot: Distribution | None
    """Seconds per token of the answer, without the first token."""
    output_tokens_per_second: float
    imbalance: float
    """Number of tokens that the busiest worker computed, divided by the mean over the workers; 1 means an even load."""
    preemptions: int
    checked: int
    """Number of lookups that were compared with the index after all earlier batches had been delivered."""
    disagreements: int
    """Number of compared lookups for which index and engine found different numbers of tokens."""
    unproven: int
    """Number of lookups that could not be compared, because earlier batches were lost or the stream was degraded."""
    predicted_tokens: int
    """Number of cached tokens that the index predicted when requests were routed; 0 for policies that do not use an index."""
    overpredictions: int
    """Number of requests with fewer cached tokens than predicted, because blocks were evicted around the time of routing."""
    batches: int
    events: int
    workers: list[WorkerResult]
    examples: list[Disagreement] = []
    """The first disagreements."""


class Comparison(Struct, frozen=True, kw_only=True):
    """The results of several policies for the same requests."""

    settings: dict[str, str | int | float | bool | None]
    policies: list[PolicyResult]


class StreamResult(Struct, frozen=True, kw_only=True):
    """The status and counters of one worker's stream at the subscriber."""

    source: str
    rank: int
    endpoint: str
    trust: str
    """Trust in the stream at the end of the run, with the reason."""
    batches: int
    """Number of batches that were delivered in all incarnations."""
    replayed: int
    """Number of batches that replay delivered."""
    gaps_repaired: int
    """Number of gaps that replay filled."""
    lost: int
    """Number of batches that were lost because replay did not deliver them."""
    resets: int
    """Number of incarnations after the first one."""
    reconnects: int


class LiveResult(Struct, frozen=True, kw_only=True):
    """The result of a fleet that ran in real time."""

    settings: dict[str, str | int | float | bool | None]
    policies: list[PolicyResult]
    """The result of the policy that was run, as the only item."""
    streams: list[StreamResult]
    faults: dict[str, int]
    """Number of times that each recurring fault was injected."""
    seconds: float
    """Duration of the run in seconds of real time."""
    behind: float
    """Maximum number of seconds by which the fleet was behind real time."""


# --- the data from which results are made


class SimulatedWorker:
    """The state and the counters of a worker across all its incarnations."""

    def __init__(self, worker: Worker, settings: FleetSettings) -> None:
        self.worker: Final = worker
        self.incarnation = -1
        self.batches = 0
        """Sequence number of the next batch in this incarnation."""
        self.is_busy = False
        """Whether a step is being computed."""
        self.is_up = False
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.seconds = 0.0
        """Seconds for which the worker computed in all its incarnations."""
        self._settings: Final = settings
        self._engine: SimulatedEngine | None = None
        self._computed = 0
        self._preemptions = 0

    @property
    def engine(self) -> SimulatedEngine:
        """The engine of the current incarnation or, if the worker is down, of the previous incarnation."""
        assert self._engine is not None  # noqa: S101 - a fleet has started this worker
        return self._engine

    @property
    def computed(self) -> int:
        """Number of prompt tokens that the worker computed in all its incarnations."""
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
        """Record the first lookup of a request: the length of its prompt and how much was cached, in tokens."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached

    def result(self, seconds: float) -> WorkerResult:
        """Return the counters of the worker in a run that took `seconds` seconds."""
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
    """Counters over all requests, and lists of durations in seconds with an entry for each request."""

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
        """Time at which the latest answer ended, in seconds from the beginning."""

    def record_lookup(self, lookup: Lookup, predicted: int, block_size: int) -> None:
        """Record the first lookup of a prompt, for which the index had predicted `predicted` cached tokens."""
        self.prompt_tokens += lookup.tokens
        self.cached_tokens += lookup.cached
        self.predicted_tokens += predicted
        usable = (lookup.tokens - 1) // block_size * block_size
        self.overpredictions += min(predicted, usable) > lookup.cached

    def record_answer(self, now: float, arrived: float, first: float, answer: int) -> None:
        """Record that a request was answered. `answer` is the number of tokens in the answer."""
        self.latency.append(now - arrived)
        self.output_tokens += answer
        if answer > 1:
            self.tpot.append((now - first) / (answer - 1))
        self.last = now
