"""The fleet over time, in a bounded number of samples."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from kvevents.index import PrefixIndex
from kvevents.sim.results import Sample
from kvevents.sim.station import Station
from kvevents.sim.tally import Tally

MAX_SAMPLES: Final = 240
"""When there are so many every second one is left out, and from then on half as many are taken."""
FIRST_INTERVAL: Final = 1.0
"""Seconds between the first samples."""


class Samples:
    """Looks at a fleet now and then."""

    def __init__(self, index: PrefixIndex, stations: Collection[Station]) -> None:
        self.taken: Final[list[Sample]] = []
        self.interval = FIRST_INTERVAL
        """Seconds until the next one is due."""
        self._index: Final = index
        self._stations: Final = stations
        self._before = (0, 0)

    def take(self, now: float, tally: Tally) -> None:
        """Look now."""
        stats = self._index.stats()
        prompt, cached = self._before
        self._before = tally.prompt_tokens, tally.cached_tokens
        engines = [station.engine for station in self._stations if station.up]
        self.taken.append(
            Sample(
                at=now,
                running=sum(engine.running for engine in engines),
                waiting=sum(engine.waiting for engine in engines),
                blocks=stats.blocks,
                unique=stats.unique_blocks,
                prompt_tokens=tally.prompt_tokens - prompt,
                cached_tokens=tally.cached_tokens - cached,
            )
        )
        if len(self.taken) >= MAX_SAMPLES:
            self._thin()

    def _thin(self) -> None:
        pairs = zip(self.taken[::2], self.taken[1::2], strict=True)
        self.taken[:] = [_joined(first, second) for first, second in pairs]
        self.interval *= 2


def _joined(first: Sample, second: Sample) -> Sample:
    """The later one, with what came in both intervals."""
    return Sample(
        second.at,
        second.running,
        second.waiting,
        second.blocks,
        second.unique,
        first.prompt_tokens + second.prompt_tokens,
        first.cached_tokens + second.cached_tokens,
    )
