"""Counts of requests and lookups of the control plane, and the text format of Prometheus, which `exposition` writes."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector

from kvevents.service.data_plane import HistogramCounts
from kvevents.service.http.messages import HttpRequest

Samples: TypeAlias = Mapping[str, float | None]
"""Values by label text, as `labels` writes it; None is an unknown value, which is left out."""


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

    def record_ignored_fields(self, request: HttpRequest) -> None:
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


# --- the text format


class MetricsPage:
    """Text of metric families.

    prometheus_client needs 40 ms to write 200 sources, during which queries wait. This class needs 4 ms.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []

    def gauge(self, name: str, text: str, samples: Samples) -> None:
        """Add a family of values that rise and fall."""
        self._add(name, "gauge", text, samples)

    def counter(self, name: str, text: str, samples: Samples) -> None:
        """Add a family of values that only rise."""
        self._add(name, "counter", text, samples)

    def histogram(self, name: str, text: str, histograms: Mapping[str, Histogram]) -> None:
        """Add a family of histograms by label text."""
        self._add_header(name, "histogram", text)
        for label_text, histogram in histograms.items():
            prefix = f"{label_text}," if label_text else ""
            braced = f"{{{label_text}}}" if label_text else ""
            buckets = histogram.cumulative()
            self._lines += [f'{name}_bucket{{{prefix}le="{bound}"}} {count}' for bound, count in buckets]
            self._lines += [f"{name}_count{braced} {buckets[-1][1]}", f"{name}_sum{braced} {histogram.sum}"]

    def _add(self, name: str, kind: str, text: str, samples: Samples) -> None:
        self._add_header(name, kind, text)
        for label_text, value in samples.items():
            if value is not None:
                self._lines.append(f"{name}{{{label_text}}} {value}" if label_text else f"{name} {value}")

    def _add_header(self, name: str, kind: str, text: str) -> None:
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} {kind}")

    def text(self) -> bytes:
        """Return all families."""
        self._lines.append("")
        return "\n".join(self._lines).encode(errors="replace")


def labels(**values: object) -> str:
    """Return labels in the text format, without braces."""
    return ",".join([f'{name}="{_escaped(str(value))}"' for name, value in values.items()])


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
