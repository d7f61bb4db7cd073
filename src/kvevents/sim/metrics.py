"""The workers of a fleet with their counters, and the metrics of a run."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Final

from kvevents.index import PrefixIndex
from kvevents.routing import Worker
from kvevents.sim.engine import Engine, Lookup
from kvevents.sim.results import Sample, WorkerResult
from kvevents.sim.settings import FleetSettings


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
        self._engine: Engine | None = None
        self._computed = 0
        self._preemptions = 0

    @property
    def engine(self) -> Engine:
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
        self._engine = Engine(
            settings.size,
            settings.costs,
            settings.batching,
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


MAX_SAMPLES: Final = 240
"""When this number is reached, pairs of samples are merged, and from then on half as many are taken."""
FIRST_INTERVAL: Final = 1.0
"""Seconds between the first samples."""


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
        """When the last answer ended, in seconds from the beginning."""

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


class Sampler:
    """Takes samples of a fleet at regular intervals."""

    def __init__(self, index: PrefixIndex, workers: Collection[SimulatedWorker]) -> None:
        self.taken: Final[list[Sample]] = []
        self.interval = FIRST_INTERVAL
        """Seconds until the next one is due."""
        self._index: Final = index
        self._workers: Final = workers
        self._before = (0, 0)

    def take(self, now: float, metrics: RequestMetrics) -> None:
        """Take a sample."""
        stats = self._index.stats()
        prompt, cached = self._before
        self._before = metrics.prompt_tokens, metrics.cached_tokens
        engines = [worker.engine for worker in self._workers if worker.is_up]
        self.taken.append(
            Sample(
                at=now,
                running=sum(engine.running for engine in engines),
                waiting=sum(engine.waiting for engine in engines),
                blocks=stats.blocks,
                unique=stats.unique_blocks,
                prompt_tokens=metrics.prompt_tokens - prompt,
                cached_tokens=metrics.cached_tokens - cached,
            )
        )
        if len(self.taken) >= MAX_SAMPLES:
            self._thin()

    def _thin(self) -> None:
        pairs = zip(self.taken[::2], self.taken[1::2], strict=True)
        self.taken[:] = [_merged(first, second) for first, second in pairs]
        self.interval *= 2


def _merged(first: Sample, second: Sample) -> Sample:
    """Return the later sample, with the tokens of both intervals."""
    return Sample(
        second.at,
        second.running,
        second.waiting,
        second.blocks,
        second.unique,
        first.prompt_tokens + second.prompt_tokens,
        first.cached_tokens + second.cached_tokens,
    )
