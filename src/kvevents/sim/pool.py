"""The blocks of one GPU's KV cache: which are in use, which hold something, and which goes next.

The rules are those of vLLM 0.32 (`vllm/v1/core/block_pool.py`). A block that nobody uses waits in the free queue with its
contents, which are found by hash until the block is taken from the queue's front and used for something else. What a sequence
gives back joins the queue's end with its last block first, so that the tail of a sequence goes before its beginning; blocks
without contents, such as one half full, go to the front. Two blocks may hold the same contents, computed side by side; the
older one is found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

NULL: Final = 0
"""Stands in a sequence's table for a block that a sliding window has left behind, or never needed."""


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
        self._names: Final[list[int]] = [0] * (size + 1)
        self._shelves: Final[list[Shelf | None]] = [None] * (size + 1)
        self._free: Final[OrderedDict[int, None]] = OrderedDict.fromkeys(range(1, size + 1))
        self.holding = 0
        """Blocks with contents that can be found."""
        self.freed = 0
        """Blocks that ever joined the free queue: while it stays, what did not fit still does not."""

    @property
    def free(self) -> int:
        """Blocks that no sequence uses."""
        return len(self._free)

    def unused(self, blocks: Iterable[int]) -> int:
        """How many of these wait in the free queue."""
        uses = self.uses
        return sum(not uses[block] for block in blocks if block)

    def touch(self, blocks: Iterable[int]) -> None:
        """One more sequence uses these."""
        uses, free = self.uses, self._free
        for block in blocks:
            if block:
                if not uses[block]:
                    del free[block]
                uses[block] += 1

    def take(self, count: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Blocks from the front of the free queue, which must hold as many, and what had to go: place of its shelf, hash."""
        uses, shelves, names, pop = self.uses, self._shelves, self._names, self._free.popitem
        taken = [pop(last=False)[0] for _ in range(count)]
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
        self.holding -= len(gone)
        return taken, gone

    def name(self, shelf: Shelf, blocks: Sequence[int], names: Sequence[int]) -> None:
        """These blocks hold from now on what the hashes stand for."""
        shelves, whole, kept = self._shelves, shelf.whole, self._names
        for block, name in zip(blocks, names, strict=True):
            if block:
                self.holding += 1
                kept[block] = name
                shelves[block] = shelf
                if whole.setdefault(name, block) != block:
                    shelf.twins.setdefault(name, []).append(block)

    def give_back(self, blocks: Iterable[int]) -> None:
        """One sequence less uses these; the first one given is the first to go."""
        uses, free, shelves = self.uses, self._free, self._shelves
        empty = []
        for block in blocks:
            if block:
                uses[block] -= 1
                if not uses[block]:
                    self.freed += 1
                    free[block] = None
                    if shelves[block] is None:
                        empty.append(block)
        for block in reversed(empty):
            free.move_to_end(block, last=False)

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
