"""The batches of a replay buffer: added a burst at a time, taken out a group at a time, and seldom looked at in between."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, takewhile
from operator import itemgetter
from typing import Final, TypeAlias

Numbered: TypeAlias = tuple[int, bytes]
"""A batch as it is sent: its number and its payload."""
PIECE: Final = 64
"""Batches of a piece; those that were added at once stay together. What is done for a piece costs each of them little."""

_number = itemgetter(0)
_payload = itemgetter(1)


class Kept:
    """Batches whose numbers rise, oldest first, in pieces."""

    def __init__(self) -> None:
        self._pieces: deque[list[Numbered]] = deque()
        self._sizes: deque[int] = deque()
        """Bytes of the payloads of each piece."""
        self._count = 0
        self.bytes = 0
        """Of all payloads."""

    def extend(self, batches: Sequence[Numbered]) -> None:
        """Add batches, all of them newer."""
        if not batches:
            return
        size = _bytes_of(batches)
        if self._pieces and len(self._pieces[-1]) + len(batches) <= PIECE:
            self._pieces[-1] += batches
            self._sizes[-1] += size
        else:
            self._pieces.append(list(batches))
            self._sizes.append(size)
        self._count += len(batches)
        self.bytes += size

    def take(self, count: int) -> list[Numbered]:
        """Take out so many of the oldest; as many there are."""
        taken, size = self._pieces.popleft(), self._sizes.popleft()
        while len(taken) < count:
            taken += self._pieces.popleft()
            size += self._sizes.popleft()
        if len(taken) > count:
            rest = taken[count:]
            del taken[count:]
            left = _bytes_of(rest)
            self._pieces.appendleft(rest)
            self._sizes.appendleft(left)
            size -= left
        self._count -= count
        self.bytes -= size
        return taken

    def count_within(self, size: int) -> int:
        """How many of the oldest have `size` bytes together at most; 1 where the oldest has more. There must be one."""
        sizes = accumulate(len(payload) for _, payload in self)
        return max(1, sum(1 for _ in takewhile(lambda total: total <= size, sizes)))

    def since(self, start: int) -> list[Numbered]:
        """Those numbered `start` or higher."""
        pieces = list(takewhile(lambda piece: piece[-1][0] >= start, reversed(self._pieces)))
        found = list(chain.from_iterable(reversed(pieces)))
        return found[bisect_left(found, start, key=_number) :]

    @property
    def newest(self) -> int:
        """Number of the last one; there must be one."""
        return self._pieces[-1][-1][0]

    def __iter__(self) -> Iterator[Numbered]:
        return chain.from_iterable(self._pieces)

    def __len__(self) -> int:
        return self._count


def _bytes_of(batches: Sequence[Numbered]) -> int:
    return sum(map(len, map(_payload, batches)))
