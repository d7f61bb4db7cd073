"""Metrics of a run: sums over requests, and samples of the fleet over time."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Final

from kvevents.index import PrefixIndex
from kvevents.sim.engine import Lookup
from kvevents.sim.results import Sample
from kvevents.sim.worker import SimulatedWorker

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
