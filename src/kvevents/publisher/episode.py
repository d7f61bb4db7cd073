"""Telling of losses once, not once per batch."""

from __future__ import annotations

import logging
from typing import Final

QUIET: Final = 10.0
"""Seconds without another loss after which an episode is over."""


class Episode:
    """Logs when a counter starts to rise, and, when it has stopped for `QUIET` seconds, by how much it rose."""

    def __init__(self, logger: logging.Logger, what: str) -> None:
        self._logger = logger
        self._what = what
        self._before = self._seen = 0
        self._changed = 0.0

    def watch(self, count: int, now: float, detail: str = "") -> None:
        """Look at the counter; `now` in seconds."""
        if count != self._seen:
            if self._before == self._seen:
                self._logger.warning(
                    "%s%s; consumers see a gap, further ones are counted", self._what, detail and f": {detail}"
                )
            self._seen, self._changed = count, now
        elif self._before != self._seen and now - self._changed > QUIET:
            self._logger.warning("%s: over after %d batches", self._what, self._seen - self._before)
            self._before = self._seen
