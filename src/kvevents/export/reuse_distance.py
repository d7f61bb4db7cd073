"""Reuse distances: how many different blocks were stored between the removal of a block and its next store.

Theory of operation. Stores are numbered, and for each block the number of its last store is marked. So a block that was stored
several times since a removal counts once, and a distance is the number of marks since the removal. Marks are counted by
segment, so that setting one is cheap and counting adds few numbers. When the numbers are used up, the remaining marks are
renumbered, and the oldest blocks beyond the limit are forgotten.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

_SEGMENT: Final = 1 << 10
"""Numbers in a segment. The default limit needs about two million numbers, which are about two thousand segments."""


class ReuseDistances:
    """Computes reuse distances of one placement. It remembers at least `limit` different blocks, and at most twice as many."""

    def __init__(self, limit: int) -> None:
        self.forgotten = 0
        """Blocks forgotten because of the limit: they count as new when they are stored again."""
        self._limit = limit
        self._last: dict[int, int] = {}
        """Number of the last store by key, in ascending order."""
        self._removed: dict[int, int] = {}
        """Number of the first store after the removal, by key of a removed block."""
        self._next = 0
        self._marks = bytearray(_SEGMENT)
        self._counts = [0]

    def record_removal(self, key: int) -> None:
        """Record that a block was evicted."""
        if key in self._last:
            self._removed[key] = self._next

    def record_store(self, key: int) -> int | None:
        """Record a store, and return its reuse distance; None if no removal of the block is remembered."""
        since = self._removed.pop(key, None)
        distance = None if since is None else len(self._last) - self._before(since)
        last = self._last.pop(key, None)
        if last is not None:
            self._marks[last] = 0
            self._counts[last // _SEGMENT] -= 1
        if self._next == len(self._marks):
            self._renumber()
        number = self._last[key] = self._next
        self._marks[number] = 1
        self._counts[number // _SEGMENT] += 1
        self._next += 1
        return distance

    def _before(self, number: int) -> int:
        """Return the number of marks below a number."""
        segment = number // _SEGMENT
        return sum(self._counts[:segment]) + self._marks.count(1, segment * _SEGMENT, number)

    def _renumber(self) -> None:
        if len(self._last) >= 2 * self._limit:
            for key in list(self._last)[: -self._limit]:
                del self._last[key]
                self._removed.pop(key, None)
                self.forgotten += 1
        numbers = list(self._last.values())
        self._removed = {key: bisect_left(numbers, since) for key, since in self._removed.items()}
        self._last = dict(zip(self._last, range(len(numbers)), strict=True))
        self._next = used = len(numbers)
        segments = 2 * used // _SEGMENT + 1
        self._marks = bytearray(b"\1" * used + bytes(segments * _SEGMENT - used))
        self._counts = [min(max(used - start, 0), _SEGMENT) for start in range(0, segments * _SEGMENT, _SEGMENT)]
