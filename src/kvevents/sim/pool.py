"""The blocks of one GPU's KV cache: their use, their contents, and the order of eviction.

The rules are those of vLLM 0.32 (`vllm/v1/core/block_pool.py`). An unused block waits in the free queue with its contents.
Lookups find these contents by hash until the block is taken from the front of the queue and reused. The blocks that a sequence
gives back join the end of the queue, the sequence's last block first, so that the tail of a sequence is evicted before its
beginning. Blocks without contents, such as incomplete blocks, join the front of the queue (before vLLM 0.32, the end). Two
blocks can have the same contents if they were computed at the same time; lookups find the older one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

NULL_BLOCK: Final = 0
"""Entry of a sequence's table for a block that its sliding window does not need."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """Finds the blocks of one KV cache group by the hash of their contents."""

    group_index: int
    block_by_hash: dict[int, int] = field(default_factory=dict)
    """The oldest block with each hash."""
    duplicates: dict[int, list[int]] = field(default_factory=dict)
    """For each hash, all other blocks with this hash, from the oldest to the newest."""

    def drop(self, block_hash: int, block: int) -> None:
        """Remove `block`, whose contents have `block_hash`."""
        duplicates = self.duplicates.get(block_hash)
        if duplicates is None:
            del self.block_by_hash[block_hash]
            return
        if self.block_by_hash[block_hash] == block:
            self.block_by_hash[block_hash] = duplicates.pop(0)
        else:
            duplicates.remove(block)
        if not duplicates:
            del self.duplicates[block_hash]


class Pool:
    """A fixed number of blocks, shared by all groups of one engine."""

    def __init__(self, size: int) -> None:
        self.size: Final = size
        self.uses: Final = [0] * (size + 1)
        """Number of sequences that use each block; entry 0 belongs to `NULL_BLOCK`."""
        self._hashes: Final[list[int]] = [0] * (size + 1)
        self._tables: Final[list[BlockTable | None]] = [None] * (size + 1)
        self._queue: Final[OrderedDict[int, None]] = OrderedDict.fromkeys(range(1, size + 1))
        """Free blocks, in the order in which `allocate` will return them."""

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence uses."""
        return len(self._queue)

    def count_unused(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks no sequence uses."""
        uses = self.uses
        return sum(not uses[block] for block in blocks if block)

    def touch(self, blocks: Iterable[int]) -> None:
        """Record that a further sequence uses the blocks. Each block must be in use or have contents."""
        uses, queue = self.uses, self._queue
        for block in blocks:
            if block:
                if not uses[block]:
                    del queue[block]
                uses[block] += 1

    def allocate(self, count: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Remove `count` blocks from the front of the free queue. Return them and their evicted contents (group, hash)."""
        uses, tables, hashes = self.uses, self._tables, self._hashes
        taken = [self._queue.popitem(last=False)[0] for _ in range(count)]
        gone = []
        for block in taken:
            uses[block] = 1
            table = tables[block]
            if table is not None:
                table.drop(hashes[block], block)
                tables[block] = None
                gone.append((table.group_index, hashes[block]))
        return taken, gone

    def set_contents(self, table: BlockTable, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """Record that each block has the contents with the hash at the same index of `hashes`."""
        tables, block_by_hash, block_hashes = self._tables, table.block_by_hash, self._hashes
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block:
                block_hashes[block] = block_hash
                tables[block] = table
                if block_by_hash.setdefault(block_hash, block) != block:
                    table.duplicates.setdefault(block_hash, []).append(block)

    def give_back(self, blocks: Iterable[int]) -> None:
        """Record that a sequence no longer uses the blocks. They are evicted in the order of `blocks`."""
        uses, tables = self.uses, self._tables
        full, empty = list[int](), list[int]()
        for block in blocks:
            if block:
                uses[block] -= 1
                if not uses[block]:
                    (empty if tables[block] is None else full).append(block)
        self._queue.update(dict.fromkeys(full))
        for block in reversed(empty):
            self._queue[block] = None
            self._queue.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Remove all contents, and return True. If any block is in use, change nothing and return False, as vLLM does."""
        if self.free_blocks < self.size:
            return False
        for block in range(1, self.size + 1):
            table = self._tables[block]
            if table is not None:
                table.drop(self._hashes[block], block)
                self._tables[block] = None
        return True
