"""Counts the requests and lookups of the control plane; `kvevents.service.exposition` writes them for Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector

from kvevents.service.data_plane import HistogramCounts
from kvevents.service.http.messages import Request


class Histogram:
    """Counts values by bucket.

    The histogram of prometheus_client takes a tenth of a short request's time. This one does not lock: its owner does.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def merged_with(self, other: HistogramCounts | None) -> Histogram:
        """Return a histogram with the values of both; `other` has the same bounds."""
        merged = Histogram(self._bounds)
        counts = [0] * len(self._counts) if other is None else other.counts
        merged._counts = [own + more for own, more in zip(self._counts, counts, strict=True)]
        merged.sum = self.sum + (0.0 if other is None else other.sum)
        return merged

    def cumulative(self) -> list[tuple[str, int]]:
        """Return the upper bound of each bucket with the number of values up to it."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))


class Metrics:
    """Counts the requests and lookups that the control plane answers."""

    DURATION_BOUNDS: Final = (0.0001, 0.0002, 0.0004, 0.0008, 0.0016, 0.0032, 0.0064, 0.0128, 0.0256, 0.1, 0.5, 2.0)
    """Seconds. The data plane has the same buckets."""
    MATCH_RATIO_BOUNDS: Final = (0.0, 0.01, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)

    def __init__(self) -> None:
        self.process: Final = CollectorRegistry()
        """CPU, memory and file descriptors of this process."""
        ProcessCollector(registry=self.process)
        self._lock = threading.Lock()
        self.requests: dict[tuple[str, int], int] = {}
        """Requests by path and status. The event loop changes this and `durations`; other threads read copies."""
        self.durations: dict[str, Histogram] = {}
        """Seconds from a request's headers to its response, by path."""
        self.match_ratio = Histogram(self.MATCH_RATIO_BOUNDS)
        """Fraction of a prompt's tokens that the best worker holds."""
        self.lookups = 0
        self.hits = 0
        self.ignored_fields: dict[str, int] = {}
        """Unknown fields of request bodies that were ignored, by path."""

    def record_request(self, path: str, status: int, seconds: float) -> None:
        """Count a request to a path of the table of endpoints. Only the event loop calls this."""
        self.requests[path, status] = self.requests.get((path, status), 0) + 1
        histogram = self.durations.get(path)
        if histogram is None:
            histogram = self.durations[path] = Histogram(self.DURATION_BOUNDS)
        histogram.observe(seconds)

    def record_ignored_fields(self, request: Request) -> None:
        """Count the unknown fields of a request that were ignored."""
        if request.ignored:
            self.ignored_fields[request.path] = self.ignored_fields.get(request.path, 0) + len(request.ignored)

    def record_lookup(self, tokens: int, longest: int) -> None:
        """Count a lookup of a prompt of `tokens` tokens, of which the best worker holds `longest`; from any thread."""
        with self._lock:
            self.lookups += 1
            if longest:
                self.hits += 1
            if tokens:
                self.match_ratio.observe(longest / tokens)
