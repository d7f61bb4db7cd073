"""Counts of the control plane, and the bounds of histograms."""

from __future__ import annotations

import threading
from typing import Final

from kvevents.service.http.messages import HttpRequest


class Metrics:
    """Counts of the control plane. The data plane counts requests and lookups."""

    DURATION_BOUNDS: Final = (0.0001, 0.0002, 0.0004, 0.0008, 0.0016, 0.0032, 0.0064, 0.0128, 0.0256, 0.1, 0.5, 2.0)
    """Seconds from a request's headers to its response."""
    MATCH_RATIO_BOUNDS: Final = (0.0, 0.01, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
    """Fraction of a prompt's tokens that the best worker holds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ignored_fields: dict[str, int] = {}
        """Unknown fields of request bodies that were ignored, by path."""

    def record_ignored_fields(self, request: HttpRequest) -> None:
        """Count the unknown fields of a request that were ignored; from any thread."""
        if request.ignored_fields:
            with self._lock:
                self.ignored_fields[request.route] = self.ignored_fields.get(request.route, 0) + len(request.ignored_fields)
