"""The numbers of live batches: which did not arrive, and the contents of the newest."""

from __future__ import annotations

from collections import deque
from typing import Final

from kvevents.cli.lines import number_ranges

MAX_NEWEST: Final = 32
"""Batches whose contents are kept to be compared with replay."""
MAX_GAPS: Final = 1_000
"""Gaps whose numbers are kept; the numbers of further ones are counted only."""
MAX_GAP: Final = 10_000
"""Numbers of one gap that are kept: as many as an engine keeps batches."""


class Numbers:
    """The numbers of one stream's live batches. With several topics at one endpoint there are several streams: none is kept."""

    def __init__(self, topic: str) -> None:
        self.received = 0
        self.missing = 0
        self.gaps: list[tuple[int, int]] = []
        """First and last missing number, the oldest first."""
        self.newest: deque[tuple[int, bytes]] = deque(maxlen=MAX_NEWEST)
        self._wanted = topic.encode()
        self._topic: bytes | None = None
        self._mixed = False
        self._last: int | None = None

    def add(self, topic: bytes, seq: int, payload: bytes) -> None:
        """Count one live batch. A number that is not above the last one begins another life of the publisher."""
        if self._mixed or not topic.startswith(self._wanted):
            return
        if self._topic is not None and topic != self._topic:
            self._forget()
            return
        self._topic = topic
        if self._last is not None and seq <= self._last:
            self.newest.clear()
            self.gaps.clear()
        elif self._last is not None and seq > self._last + 1:
            self._add_gap(self._last + 1, seq - 1)
        self._last = seq
        self.received += 1
        self.newest.append((seq, payload))

    @property
    def shown(self) -> str:
        """The missing numbers, for people."""
        return number_ranges(self.gaps) or "before a restart"

    def _add_gap(self, first: int, last: int) -> None:
        self.missing += last - first + 1
        if len(self.gaps) < MAX_GAPS and last - first < MAX_GAP:
            self.gaps.append((first, last))

    def _forget(self) -> None:
        self._mixed = True
        self.received = self.missing = 0
        self.gaps.clear()
        self.newest.clear()
