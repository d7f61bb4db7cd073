"""The audit log: registrations by caller, and refused requests. It never contains a token."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

REFUSALS_PER_SECOND: Final = 10
"""Refused requests that are logged in a second. The log counts the others, so that no client can fill a disk."""


class AuditLog:
    """Writes to the logger of this module: changes at level INFO, refused requests at level WARNING. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock: Final = clock
        self._second = -1
        self._logged = 0
        self._suppressed = 0

    def log_change(self, change: str, *, caller: str, peer: str) -> None:
        """Log a change that a client made; `change` begins with a verb in the past tense."""
        log.info("%s from %s %s", caller, peer, change)

    def log_refusal(self, request: str, *, caller: str, peer: str, reason: str) -> None:
        """Log a request that was refused, unless too many were logged in this second."""
        second = int(self._clock())
        if second != self._second:
            if self._suppressed:
                log.warning("%d more refused requests were not logged", self._suppressed)
            self._second, self._logged, self._suppressed = second, 0, 0
        if self._logged >= REFUSALS_PER_SECOND:
            self._suppressed += 1
            return
        self._logged += 1
        log.warning("refused %s of %s from %s: %s", request, caller, peer, reason)
