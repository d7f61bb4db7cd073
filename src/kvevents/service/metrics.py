"""What the service counts of requests and lookups; `kvevents.service.exposition` writes it for Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, ProcessCollector

if TYPE_CHECKING:
    from kvevents.service.data_plane import Histogram
    from kvevents.service.http.messages import Request

_SECONDS: Final = (0.0001, 0.0002, 0.0004, 0.0008, 0.0016, 0.0032, 0.0064, 0.0128, 0.0256, 0.1, 0.5, 2.0)
_DEPTHS: Final = (0.0, 0.01, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


class Tally:
    """A histogram. prometheus_client's own takes a tenth of a short request's time; this one leaves locking to its owner."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def plus(self, other: Histogram | None) -> Tally:
        """One with the values of another histogram too, which has the same bounds."""
        found = Tally(self._bounds)
        counts = [0] * len(self._counts) if other is None else other.counts
        found._counts = [one + more for one, more in zip(self._counts, counts, strict=True)]
        found._sum = self._sum + (0.0 if other is None else other.sum)
        return found

    def told(self) -> tuple[list[tuple[str, int]], float]:
        """Cumulative buckets, and the sum."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True)), self._sum


class Metrics:
    """Counts the requests and lookups that the control plane answers."""

    SECONDS: Final = _SECONDS
    DEPTHS: Final = _DEPTHS

    def __init__(self) -> None:
        self.process: Final = CollectorRegistry()
        """CPU, memory and file descriptors of this process."""
        ProcessCollector(registry=self.process)
        self._lock = threading.Lock()
        self.requests: dict[tuple[str, int], int] = {}
        """By path and status. This and `seconds` grow in the event loop: any other thread reads copies."""
        self.seconds: dict[str, Tally] = {}
        """By path, from a request's headers to its answer."""
        self.depth = Tally(_DEPTHS)
        """Share of a prompt that the best worker holds."""
        self.lookups = 0
        self.hits = 0
        self.ignored_fields: dict[str, int] = {}
        """Unknown fields of bodies that were ignored, by path."""

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count a request to one of the table's paths; from the event loop only."""
        self.requests[path, status] = self.requests.get((path, status), 0) + 1
        tally = self.seconds.get(path)
        if tally is None:
            tally = self.seconds[path] = Tally(_SECONDS)
        tally.add(seconds)

    def ignored(self, request: Request) -> None:
        """Count the unknown fields of a request that were ignored."""
        if request.ignored:
            self.ignored_fields[request.path] = self.ignored_fields.get(request.path, 0) + len(request.ignored)

    def lookup(self, tokens: int, longest: int) -> None:
        """Count a lookup of a prompt of which so much was found; from any thread."""
        with self._lock:
            self.lookups += 1
            if longest:
                self.hits += 1
            if tokens:
                self.depth.add(longest / tokens)
