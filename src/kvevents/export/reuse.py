"""Reuse distances: how many different blocks were stored between a block's removal and its return.

Theory of operation. Stores are numbered, and for each block the number of its last store is marked. A block that was stored
more than once since a removal counts once that way, and a distance is the number of marks from the removal on. Marks are
counted by the stretch, so that setting one is cheap and counting adds up few numbers. When the numbers are used up, the marks
that are left are numbered anew, and the oldest blocks beyond the limit forgotten.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

_STRETCH: Final = 1 << 10
"""Numbers in a stretch. With two million in use, as many as the default limit makes, there are as many stretches twice over."""


class ReuseDistances:
    """Of one place that holds blocks. It remembers `limit` different blocks at least, and twice as many at most."""

    def __init__(self, limit: int) -> None:
        self.forgotten = 0
        """Blocks that the limit has cost: if they return, they return as new."""
        self._limit = limit
        self._last: dict[int, int] = {}
        """Number of the last store by key, in ascending order."""
        self._removed: dict[int, int] = {}
        """Number of the store that came next, by key of what is gone."""
        self._next = 0
        self._marks = bytearray(_STRETCH)
        self._counts = [0]

    def removed(self, key: int) -> None:
        """A block left for want of space."""
        if key in self._last:
            self._removed[key] = self._next

    def stored(self, key: int) -> int | None:
        """A block came: different blocks that came since it was removed, or None if it was not, as far as is remembered."""
        since = self._removed.pop(key, None)
        distance = None if since is None else len(self._last) - self._before(since)
        last = self._last.pop(key, None)
        if last is not None:
            self._marks[last] = 0
            self._counts[last // _STRETCH] -= 1
        if self._next == len(self._marks):
            self._renumber()
        number = self._last[key] = self._next
        self._marks[number] = 1
        self._counts[number // _STRETCH] += 1
        self._next += 1
        return distance

    def _before(self, number: int) -> int:
        """Marks below a number."""
        stretch = number // _STRETCH
        return sum(self._counts[:stretch]) + self._marks.count(1, stretch * _STRETCH, number)

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
        stretches = 2 * used // _STRETCH + 1
        self._marks = bytearray(b"\1" * used + bytes(stretches * _STRETCH - used))
        self._counts = [min(max(used - start, 0), _STRETCH) for start in range(0, stretches * _STRETCH, _STRETCH)]
