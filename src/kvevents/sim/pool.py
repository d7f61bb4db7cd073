"""The blocks of one GPU's KV cache: which are in use, which hold something, and which goes next.

The rules are those of vLLM 0.32 (`vllm/v1/core/block_pool.py`). A block that nobody uses waits in the free queue with its
contents, which are found by hash until the block is taken from the queue's front and used for something else. What a sequence
gives back joins the queue's end with its last block first, so that the tail of a sequence goes before its beginning; blocks
without contents, such as one half full, go to the front. Two blocks may hold the same contents, computed side by side; the
older one is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

NULL: Final = 0
"""Stands in a sequence's table for a block that a sliding window has left behind, or never needed."""
_MAX_QUEUE: Final = 2
"""Times the pool's size that its queue may be long; then the places that blocks have left are taken out."""


class Shelf:
    """Contents by hash, of one KV cache group."""

    __slots__ = ("place", "twins", "whole")

    def __init__(self, place: int) -> None:
        self.place: Final = place
        self.whole: Final[dict[int, int]] = {}
        """The oldest block for each hash."""
        self.twins: Final[dict[int, list[int]]] = {}
        """Further blocks of the same contents, from old to new."""

    def drop(self, name: int, block: int) -> None:
        """`block` no longer holds what `name` stands for."""
        twins = self.twins.get(name)
        if twins is None:
            del self.whole[name]
            return
        if self.whole[name] == block:
            self.whole[name] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self.twins[name]


class Pool:
    """A fixed number of blocks, shared by all groups of one engine."""

    def __init__(self, size: int) -> None:
        self.size: Final = size
        self.uses: Final = [0] * (size + 1)
        """How many sequences use a block; place 0 is `NULL`'s."""
        self.free = size
        """Blocks that no sequence uses."""
        self.holding = 0
        """Blocks with contents that can be found."""
        self.freed = 0
        """Blocks that ever joined the free queue: while it stays, what did not fit still does not."""
        self._names: Final[list[int]] = [0] * (size + 1)
        self._shelves: Final[list[Shelf | None]] = [None] * (size + 1)
        self._queue: Final = deque(range(1, size + 1))
        """Free blocks, the next one first, and places that blocks have left: a deque has no cheap way to take them out."""
        self._left: Final[dict[int, int]] = {}
        """By block, how many places it has left. They are all before its own, since only what has contents leaves one."""

    def unused(self, blocks: Iterable[int]) -> int:
        """How many of these wait in the free queue."""
        uses = self.uses
        return sum(not uses[block] for block in blocks if block)

    def touch(self, blocks: Iterable[int]) -> None:
        """One more sequence uses these, all of them in use or with contents."""
        uses, left = self.uses, self._left
        for block in blocks:
            if block:
                if not uses[block]:
                    left[block] = left.get(block, 0) + 1
                    self.free -= 1
                uses[block] += 1

    def take(self, count: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Blocks from the front of the free queue, which must hold as many, and what had to go: place of its shelf, hash."""
        uses, shelves, names = self.uses, self._shelves, self._names
        taken = self._pop(count)
        gone = []
        for block in taken:
            uses[block] = 1
            shelf = shelves[block]
            if shelf is not None:
                name = names[block]
                if shelf.twins and name in shelf.twins:
                    shelf.drop(name, block)
                else:
                    del shelf.whole[name]
                shelves[block] = None
                gone.append((shelf.place, name))
        self.free -= count
        self.holding -= len(gone)
        return taken, gone

    def name(self, shelf: Shelf, blocks: Sequence[int], names: Sequence[int]) -> None:
        """These blocks hold from now on what the hashes stand for."""
        shelves, whole, kept = self._shelves, shelf.whole, self._names
        named = 0
        for block, name in zip(blocks, names, strict=True):
            if block:
                named += 1
                kept[block] = name
                shelves[block] = shelf
                if whole.setdefault(name, block) != block:
                    shelf.twins.setdefault(name, []).append(block)
        self.holding += named

    def give_back(self, blocks: Iterable[int]) -> None:
        """One sequence less uses these; the first one given is the first to go."""
        uses, shelves = self.uses, self._shelves
        full, empty = list[int](), list[int]()
        for block in blocks:
            if block:
                uses[block] -= 1
                if not uses[block]:
                    (empty if shelves[block] is None else full).append(block)
        self._queue.extend(full)
        self._queue.extendleft(reversed(empty))
        self.free += len(full) + len(empty)
        self.freed += len(full) + len(empty)
        if len(self._queue) > self.size * _MAX_QUEUE:
            self._queue.extend(self._pop(self.free))

    def forget(self) -> bool:
        """Forget all contents, unless a block is in use: vLLM refuses a reset then."""
        if self.free < self.size:
            return False
        for block in range(1, self.size + 1):
            shelf = self._shelves[block]
            if shelf is not None:
                shelf.drop(self._names[block], block)
                self._shelves[block] = None
        self.holding = 0
        return True

    def _pop(self, count: int) -> list[int]:
        """The first `count` free blocks, out of the queue."""
        pop, left = self._queue.popleft, self._left
        found: list[int] = []
        while len(found) < count:
            places = [pop() for _ in range(count - len(found))]
            if left.keys().isdisjoint(places):
                found += places
            else:
                found += [block for block in places if not self._has_left(block)]
        return found

    def _has_left(self, block: int) -> bool:
        """Whether this was a place that the block has left, which is gone then."""
        places = self._left.pop(block, 0)
        if places > 1:
            self._left[block] = places - 1
        return places > 0
