"""The audit log: which caller registered or unregistered what, and which requests were refused; never a token."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

REFUSALS_PER_SECOND: Final = 10
"""Refusals that are logged one by one in a second; the others are counted, so that no client can fill a disk."""


class AuditLog:
    """Writes to the logger of this module: INFO for changes, WARNING for refusals. To be used in one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock: Final = clock
        self._second = -1
        self._logged = 0
        self._suppressed = 0

    def changed(self, what: str, *, caller: str, peer: str) -> None:
        """Log a change that a client made: `what` begins with a verb."""
        log.info("%s from %s %s", caller, peer, what)

    def refused(self, request: str, *, caller: str, peer: str, reason: str) -> None:
        """Log a `request` that the caller may not send, unless too many of the same second were logged."""
        second = int(self._clock())
        if second != self._second:
            if self._suppressed:
                log.warning("%d more refused requests were not logged one by one", self._suppressed)
            self._second, self._logged, self._suppressed = second, 0, 0
        if self._logged >= REFUSALS_PER_SECOND:
            self._suppressed += 1
            return
        self._logged += 1
        log.warning("refused %s of %s from %s: %s", request, caller, peer, reason)
