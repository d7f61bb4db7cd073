"""A model of the simulated engine's cache in plain Python; slow, but easy to read.

The free queue is a list whose first block is used next. Contents are a dict from block to (group, hash), in the order in which
they were stored. The state that events describe is a count for each (medium, group, hash).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvevents.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvevents.sim.cache import CacheSize, PrefixCache
from kvevents.sim.pool import Pool


@dataclass
class PlainPool:
    size: int
    queue: list[int] = field(default_factory=list)
    uses: Counter[int] = field(default_factory=Counter)
    contents: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue = list(range(1, self.size + 1))

    def find(self, what: tuple[int, int]) -> int | None:
        """Return the oldest block with these contents."""
        return next((block for block, held in self.contents.items() if held == what), None)

    def allocate(self, count: int) -> tuple[list[int], list[tuple[int, int]]]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        gone = [self.contents.pop(block) for block in taken if block in self.contents]
        self.uses.update(taken)
        return taken, gone

    def touch(self, blocks: Sequence[int]) -> None:
        self.queue = [block for block in self.queue if block not in blocks]
        self.uses.update(blocks)

    def give_back(self, blocks: Sequence[int]) -> None:
        self.uses.subtract(blocks)
        idle = [block for block in blocks if not self.uses[block]]
        empty = [block for block in idle if block not in self.contents]
        self.queue = [*empty, *self.queue, *(block for block in idle if block in self.contents)]


@dataclass
class PlainCache:
    """A cache with full attention only. Its events are ("removed", hash) and ("stored", parent, hashes)."""

    pool: PlainPool
    block_size: int
    events: list[tuple[object, ...]] = field(default_factory=list)

    def find(self, hashes: Sequence[int], known: int) -> list[int]:
        """Return the blocks of the longest cached prefix, without the block of the last token."""
        found: list[int] = []
        for name in hashes[: (known - 1) // self.block_size]:
            block = self.pool.find((0, name))
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, hashes: Sequence[int], known: int, tokens: int) -> list[int] | None:
        """Return the table of a new sequence with `tokens` tokens after the cached prefix; None if there is no room for it."""
        table = self.find(hashes, known)
        if self.blocks(known) - len(table) + sum(not self.pool.uses[block] for block in table) > len(self.pool.queue):
            return None
        self.pool.touch(table)
        return self._grow(hashes, table, len(table) * self.block_size, tokens)

    def extend(self, hashes: Sequence[int], table: list[int], computed: int, tokens: int) -> list[int] | None:
        if self.blocks(computed + tokens) - len(table) > len(self.pool.queue):
            return None
        return self._grow(hashes, table, computed, tokens)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _grow(self, hashes: Sequence[int], table: list[int], computed: int, tokens: int) -> list[int]:
        taken, gone = self.pool.allocate(self.blocks(computed + tokens) - len(table))
        table = [*table, *taken]
        self.events += [("removed", name) for _, name in gone]
        start, end = computed // self.block_size, (computed + tokens) // self.block_size
        for place in range(start, end):
            self.pool.contents[table[place]] = 0, hashes[place]
        if start < end:
            self.events.append(("stored", hashes[start - 1] if start else None, list(hashes[start:end])))
        return table


@dataclass
class EventState:
    """The state that events describe. If it is strict, it accepts no removal of an unknown block."""

    strict: bool = True
    held: Counter[tuple[str, int, int]] = field(default_factory=Counter)

    def apply(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.held.clear()
            return
        change = 1 if isinstance(event, BlockStored) else -1
        for name in event.block_hashes:
            place = event.medium or MEDIUM_GPU, event.group_idx or 0, int(name)
            if self.held[place] + change >= 0:
                self.held[place] += change
            else:
                assert not self.strict, f"{name} was removed but is not held"

    def cached(self, size: CacheSize, hashes: Sequence[int], known: int) -> int:
        """Return the tokens of a prompt that an engine must find: the longest prefix that all groups hold."""
        full = {name for (_, group, name), count in self.held.items() if count and group == (size.window is not None)}
        sliding = {name for (_, group, name), count in self.held.items() if count and group == 0}
        reach = -(-((size.window or 1) - 1) // size.block_size)
        for length in range((known - 1) // size.block_size, 0, -1):
            window = hashes[max(0, length - reach) : length]
            if full.issuperset(hashes[:length]) and (size.window is None or sliding.issuperset(window)):
                return length * size.block_size
        return 0


def list_free_blocks(pool: Pool) -> list[int]:
    """Return the free blocks, the next one first."""
    return list(pool._queue)


def contents(cache: PrefixCache) -> Counter[tuple[str, int, int]]:
    """Return the contents of a cache, read from its blocks."""
    pool, host = cache.pool, cache._host
    found = Counter(
        (MEDIUM_GPU, table.group_index, name)
        for table, name in zip(pool._tables, pool._hashes, strict=True)
        if table is not None
    )
    if host is not None:
        found.update((host._medium, 0, name) for name in host._blocks)
    return found


def simplify_events(events: Sequence[KVEvent]) -> list[tuple[object, ...]]:
    """Return events in the form of `PlainCache`."""
    found: list[tuple[object, ...]] = []
    for event in events:
        if isinstance(event, BlockStored):
            found.append(("stored", event.parent_block_hash, event.block_hashes))
        elif isinstance(event, BlockRemoved):
            found += [("removed", name) for name in event.block_hashes]
    return found
