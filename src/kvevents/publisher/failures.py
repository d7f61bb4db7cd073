"""Exceptions that a publisher's own threads survive, counted and logged."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Final

import zmq

LOG_EVERY: Final = 10.0
"""Seconds between two log records about the same part."""
_ENDED: Final = {zmq.ETERM, zmq.ENOTSOCK}


class Failures:
    """Counts exceptions by the part of the publisher that raised them. Each part is noted by one thread."""

    def __init__(self, logger: logging.Logger, label: str) -> None:
        self._logger = logger
        self._label = label
        self._counts: dict[str, int] = {}
        self._logged: dict[str, float] = {}

    def note(self, part: str, error: BaseException, consequence: str) -> None:
        """Count an exception, and log it with its traceback: the first one of a part, then one every `LOG_EVERY` seconds."""
        self._counts[part] = self._counts.get(part, 0) + 1
        now = monotonic()
        if part not in self._logged or now - self._logged[part] > LOG_EVERY:
            self._logged[part] = now
            self._logger.error("%s: %s failed: %r; %s", self._label, part, error, consequence, exc_info=error)

    def counts(self) -> dict[str, int]:
        """Exceptions by part; parts without any are left out."""
        return dict(self._counts)


def is_context_end(error: BaseException) -> bool:
    """Whether ZeroMQ reports that the context was terminated, or the socket closed with it."""
    return isinstance(error, zmq.ZMQError) and error.errno in _ENDED
