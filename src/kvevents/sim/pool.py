"""The blocks of one GPU's KV cache: their use, their contents, and the order of eviction.

The rules are those of vLLM 0.32 (`vllm/v1/core/block_pool.py`). An unused block waits in the free queue with its
contents, which can be found by hash until the block is taken from the front of the queue and reused. The blocks that a sequence
gives back join the end of the queue, the last one first, so that the tail of a sequence is evicted before its beginning. Blocks
without contents, such as an incomplete one, join the front (earlier releases appended them, too). Two blocks can have the same
contents if they were computed at the same time; the older one is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

NULL: Final = 0
"""Entry of a sequence's table for a block that its sliding window does not need."""
_MAX_QUEUE: Final = 2
"""Longest queue, as a multiple of the pool's size; beyond it stale entries are removed."""


class BlockTable:
    """The blocks of one KV cache group by hash."""

    __slots__ = ("duplicates", "place", "whole")

    def __init__(self, place: int) -> None:
        self.place: Final = place
        self.whole: Final[dict[int, int]] = {}
        """The oldest block for each hash."""
        self.duplicates: Final[dict[int, list[int]]] = {}
        """Further blocks with the same contents, from old to new."""

    def drop(self, name: int, block: int) -> None:
        """Remove `block` from the blocks with hash `name`."""
        duplicates = self.duplicates.get(name)
        if duplicates is None:
            del self.whole[name]
            return
        if self.whole[name] == block:
            self.whole[name] = duplicates.pop(0)
        else:
            duplicates.remove(block)
        if not duplicates:
            del self.duplicates[name]


class Pool:
    """A fixed number of blocks, shared by all groups of one engine."""

    def __init__(self, size: int) -> None:
        self.size: Final = size
        self.uses: Final = [0] * (size + 1)
        """Number of sequences that use each block; entry 0 belongs to `NULL`."""
        self.free = size
        """Number of blocks that no sequence uses."""
        self.holding = 0
        """Number of blocks with contents that can be found."""
        self.freed = 0
        """Blocks that ever joined the free queue. While it is unchanged, a sequence that did not fit still does not."""
        self._names: Final[list[int]] = [0] * (size + 1)
        self._tables: Final[list[BlockTable | None]] = [None] * (size + 1)
        self._queue: Final = deque(range(1, size + 1))
        """Free blocks, the next one first, and stale entries of reused blocks: removing them from a deque is expensive."""
        self._left: Final[dict[int, int]] = {}
        """Number of stale entries by block. They are all before its current entry."""

    def unused(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are in the free queue."""
        uses = self.uses
        return sum(not uses[block] for block in blocks if block)

    def touch(self, blocks: Iterable[int]) -> None:
        """Record that one more sequence uses these blocks, each of which is in use or has contents."""
        uses, left = self.uses, self._left
        for block in blocks:
            if block:
                if not uses[block]:
                    left[block] = left.get(block, 0) + 1
                    self.free -= 1
                uses[block] += 1

    def take(self, count: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Take `count` blocks from the front of the free queue. Return them and the evicted contents (table, hash)."""
        uses, tables, names = self.uses, self._tables, self._names
        taken = self._pop(count)
        gone = []
        for block in taken:
            uses[block] = 1
            table = tables[block]
            if table is not None:
                name = names[block]
                if table.duplicates and name in table.duplicates:
                    table.drop(name, block)
                else:
                    del table.whole[name]
                tables[block] = None
                gone.append((table.place, name))
        self.free -= count
        self.holding -= len(gone)
        return taken, gone

    def name(self, table: BlockTable, blocks: Sequence[int], names: Sequence[int]) -> None:
        """Record that these blocks hold the contents with these hashes."""
        tables, whole, block_names = self._tables, table.whole, self._names
        named = 0
        for block, name in zip(blocks, names, strict=True):
            if block:
                named += 1
                block_names[block] = name
                tables[block] = table
                if whole.setdefault(name, block) != block:
                    table.duplicates.setdefault(name, []).append(block)
        self.holding += named

    def give_back(self, blocks: Iterable[int]) -> None:
        """Record that one sequence no longer uses these blocks. The first one is evicted first."""
        uses, tables = self.uses, self._tables
        full, empty = list[int](), list[int]()
        for block in blocks:
            if block:
                uses[block] -= 1
                if not uses[block]:
                    (empty if tables[block] is None else full).append(block)
        self._queue.extend(full)
        self._queue.extendleft(reversed(empty))
        self.free += len(full) + len(empty)
        self.freed += len(full) + len(empty)
        if len(self._queue) > self.size * _MAX_QUEUE:
            self._queue.extend(self._pop(self.free))

    def forget(self) -> bool:
        """Remove all contents, and return True. If a block is in use, return False, as vLLM does."""
        if self.free < self.size:
            return False
        for block in range(1, self.size + 1):
            table = self._tables[block]
            if table is not None:
                table.drop(self._names[block], block)
                self._tables[block] = None
        self.holding = 0
        return True

    def _pop(self, count: int) -> list[int]:
        """Remove the first `count` free blocks from the queue."""
        pop, left = self._queue.popleft, self._left
        blocks: list[int] = []
        while len(blocks) < count:
            places = [pop() for _ in range(count - len(blocks))]
            if left.keys().isdisjoint(places):
                blocks += places
            else:
                blocks += [block for block in places if not self._has_left(block)]
        return blocks

    def _has_left(self, block: int) -> bool:
        """Return whether an entry of the queue is stale, and count it as removed."""
        places = self._left.pop(block, 0)
        if places > 1:
            self._left[block] = places - 1
        return places > 0
