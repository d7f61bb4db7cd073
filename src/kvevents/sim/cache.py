"""The prefix cache of one engine: its blocks, its events, and the lookup of prompts.

The rules are those of vLLM 0.32 (`vllm/v1/core/kv_cache_manager.py`, `kv_cache_coordinator.py`,
`single_type_kv_cache_manager.py`); `tests/system/vllm_oracle` drives vLLM and this cache with the same histories. Complete
blocks get their contents when the step that computes them is scheduled. The last token of a prompt never counts as cached,
because its logits must be computed. A sequence is admitted if its blocks fit into the cache.

A hybrid model has a group with a sliding window besides the group with full attention. A sliding window needs only the blocks
within its length before the next token. The window's group has index 0, as in gpt-oss and Gemma 3. It retains contents only
where a later prompt can continue (vLLM 0.32's `prefix_cache_retention_interval` 0): at the end of the prompt, and at the end of
the prefix that full attention found, if the window found less.

Host memory is simpler than in any engine: every complete block is copied to host memory when it is computed. The least recently
used block is evicted. A prompt finds a block on either tier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple, TypeAlias

from kvevents.errors import ConfigError
from kvevents.events import MEDIUM_CPU, MEDIUM_CPU_PINNED, MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvevents.settings import Positive, Range, Settings
from kvevents.sim.pool import NULL_BLOCK, BlockTable, Pool
from kvevents.sim.requests import Sequence


@dataclass(frozen=True, slots=True)
class EventStyle:
    """Properties of an engine's events that are not part of its dialect."""

    host_medium: str
    """The engine's medium for host memory."""
    has_salt_field: bool
    """Whether events have a field for the salt. If not, the salt is an extra key of the first block."""
    counts_copies: bool
    """Whether the removal of each copy of a block is announced, as in vLLM, or only the removal of the final copy."""


EVENT_STYLES: Final = {
    "vllm": EventStyle(MEDIUM_CPU, has_salt_field=False, counts_copies=True),
    "sglang": EventStyle(MEDIUM_CPU_PINNED, has_salt_field=True, counts_copies=False),
}
"""Event style of each engine, by the engine's name."""


class CacheSize(Settings, frozen=True):
    """Size of an engine's cache. Raises `ConfigError`."""

    blocks: Positive
    """Number of blocks on the GPU, shared by all groups."""
    block_size: Positive
    """Number of tokens in a block."""
    host_blocks: Annotated[int, Range()] = 0
    """Number of blocks in host memory; 0 if host memory is not used."""
    window: Annotated[int, Range(2)] | None = None
    """Number of tokens in the sliding window. If None, the model has only a group with full attention."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.window is not None and self.host_blocks:
            raise ConfigError("cannot model a sliding window and host memory together; leave out `window` or `host_blocks`")


class CachedPrefix(NamedTuple):
    """The cached prefix of a sequence."""

    tokens: int
    tables: tuple[list[int], ...]
    """For each group, the blocks as in `Sequence.tables`; `NULL_BLOCK` for a block that must be loaded from host memory."""
    loaded: int = 0
    """Number of blocks that must be loaded from host memory."""
    boundary: int = 0
    """Number of tokens that full attention found; 0 unless the sliding window found fewer."""


class PrefixCache:
    """The blocks of one engine. Changes are collected in order until `take_events` returns their events."""

    def __init__(self, size: CacheSize, *, max_step_tokens: int = 8192, event_style: EventStyle = EVENT_STYLES["vllm"]) -> None:
        self.size: Final = size
        self.pool: Final = Pool(size.blocks)
        self._changes: Final[list[Change]] = []
        self._event_style: Final = event_style
        windows = [None] if size.window is None else [size.window, None]
        self._groups: Final = [_Group(index, window, size.block_size, max_step_tokens) for index, window in enumerate(windows)]
        self._full: Final = self._groups[-1].table
        self._window: Final = None if size.window is None else self._groups[0]
        self._host: Final = HostMemory(size.host_blocks, event_style.host_medium, self._changes) if size.host_blocks else None

    def take_events(self) -> list[KVEvent]:
        """Return the events of all changes since the previous call.

        The events of a step contain half a megabyte of token ids and hashes. Events that were created earlier would have left
        the CPU's caches by the end of the step.
        """
        events: list[KVEvent] = []
        for change in self._changes:
            if isinstance(change, tuple):
                events.append(BlockRemoved([change[1]], MEDIUM_GPU, change[0]))
            else:
                events.append(self._store_event(change) if isinstance(change, _FilledBlocks) else change)
        self._changes.clear()
        return events

    @property
    def pending(self) -> int:
        """Number of events that `take_events` would return."""
        return len(self._changes)

    # --- sequences

    def find(self, sequence: Sequence) -> CachedPrefix:
        """Return the cached prefix of `sequence`, which must not hold blocks. The cache does not change."""
        hashes = sequence.hashes[: (sequence.known - 1) // self.size.block_size]
        size, whole, host = self.size.block_size, self._full.block_by_hash, self._host
        blocks, loaded = [], 0
        for block_hash in hashes:
            block = whole.get(block_hash)
            if block is None:
                if host is None or block_hash not in host:
                    break
                block = NULL_BLOCK
                loaded += 1
            blocks.append(block)
        if self._window is None:
            return CachedPrefix(len(blocks) * size, (blocks,), loaded)
        reached = self._window.find(hashes[: len(blocks)])
        boundary = len(blocks) * size if len(blocks) > len(reached) else 0
        return CachedPrefix(len(reached) * size, (reached, blocks[: len(reached)]), boundary=boundary)

    def admit(self, sequence: Sequence, prefix: CachedPrefix, tokens: int) -> bool:
        """Give a sequence its cached prefix, and blocks for the next `tokens` tokens.

        Returns False, and changes nothing, if not all known tokens of the sequence fit.
        """
        pool = self.pool
        whole = self._count_needed(sequence.known, prefix, caps_windows=True)
        wanted = max(whole, self._count_needed(prefix.tokens + tokens, prefix))
        if wanted + prefix.loaded + sum(pool.count_unused(table) for table in prefix.tables) > pool.free_blocks:
            return False
        for table in prefix.tables:
            pool.touch(table)
        sequence.tables = prefix.tables
        sequence.placed = [len(table) for table in prefix.tables]
        sequence.computed = prefix.tokens
        sequence.boundary = prefix.boundary
        if self._host is not None:
            self._host.touch(sequence.hashes[: len(prefix.tables[0])])
            self._load_blocks(sequence)
        self._extend(sequence, tokens)
        return True

    def extend(self, sequence: Sequence, tokens: int) -> bool:
        """Give an admitted sequence blocks for the next `tokens` tokens. Returns False if they do not fit."""
        if self._window is not None:
            self._release_before_window(sequence, self._window)
        needed = -(-(sequence.computed + tokens) // self.size.block_size)
        # The tables of all groups have the same length.
        if (needed - len(sequence.tables[0])) * len(sequence.tables) > self.pool.free_blocks:
            return False
        self._extend(sequence, tokens)
        return True

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence. The contents of a block stay until it is reused."""
        for table in sequence.tables:
            self.pool.give_back(reversed(table))
        sequence.tables, sequence.placed, sequence.computed = (), [], 0

    def reset(self) -> bool:
        """Remove all contents and return True. If a sequence holds blocks, change nothing and return False."""
        if not self.pool.reset():
            return False
        if self._host is not None:
            self._host.clear()
        self._changes.append(AllBlocksCleared())
        return True

    def could_hold(self, tokens: int) -> bool:
        """Return whether a single sequence of `tokens` tokens fits."""
        return sum(group.max_blocks(tokens) for group in self._groups) <= self.size.blocks

    # --- blocks

    def _count_needed(self, tokens: int, prefix: CachedPrefix, *, caps_windows: bool = False) -> int:
        """Return how many blocks `tokens` tokens need besides `prefix`; if `caps_windows`, at most as many as a window uses."""
        needed = -(-tokens // self.size.block_size)
        return sum(
            max(0, (group.max_blocks(tokens) if caps_windows else needed) - len(table))
            for group, table in zip(self._groups, prefix.tables, strict=True)
        )

    def _extend(self, sequence: Sequence, tokens: int) -> None:
        sequence.computed += tokens
        needed = -(-sequence.computed // self.size.block_size)
        for table in sequence.tables:
            if needed > len(table):
                table.extend(self._take_blocks(needed - len(table)))
        whole = sequence.computed // self.size.block_size
        for group, table in zip(self._groups, sequence.tables, strict=True):
            start = sequence.placed[group.index]
            if start < whole:
                sequence.placed[group.index] = whole
                self._put_blocks(sequence, group, start, table[start:whole])

    def _take_blocks(self, count: int) -> list[int]:
        blocks, gone = self.pool.allocate(count)
        counts, groups = self._event_style.counts_copies, self._groups
        self._changes.extend(change for change in gone if counts or change[1] not in groups[change[0]].table.block_by_hash)
        return blocks

    def _put_blocks(self, sequence: Sequence, group: _Group, start: int, blocks: list[int]) -> None:
        """Record that the blocks hold the contents of a sequence, beginning with the sequence's block `start`."""
        hashes = sequence.hashes[start : start + len(blocks)]
        blocks = group.retained_blocks(sequence, start, blocks)
        self.pool.set_contents(group.table, blocks, hashes)
        self._changes.append(_FilledBlocks(sequence, group, start, blocks))
        if self._host is not None:
            self._host.put(hashes)

    def _store_event(self, filled: _FilledBlocks) -> BlockStored:
        sequence, group, start, blocks = filled.sequence, filled.group, filled.start, filled.blocks
        size, hashes = self.size.block_size, sequence.hashes[start : start + len(blocks)]
        keys = _extra_keys(sequence, start, len(blocks))
        if NULL_BLOCK in blocks:
            # An event has the tokens of all blocks, but only the hashes of blocks that the window retains.
            keys = [key for key, block in zip(keys, blocks, strict=True) if block]
            hashes = [block_hash for block_hash, block in zip(hashes, blocks, strict=True) if block]
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=sequence.hashes[start - 1] if start else None,
            token_ids=sequence.tokens[start * size : (start + len(blocks)) * size].tolist(),
            block_size=size,
            lora_id=None if sequence.lora is None else 1,
            medium=MEDIUM_GPU,
            lora_name=sequence.lora,
            extra_keys=keys or None,
            group_idx=group.index,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window,
            cache_salt=sequence.salt if self._event_style.has_salt_field else None,
        )

    def _load_blocks(self, sequence: Sequence) -> None:
        """Take blocks for contents that are loaded from host memory. Consecutive blocks are announced in one event."""
        table = sequence.tables[0]
        places = [place for place, block in enumerate(table) if block == NULL_BLOCK]
        for place, block in zip(places, self._take_blocks(len(places)), strict=True):
            table[place] = block
        start = end = -1
        for place in [*places, -1]:
            if place != end:
                if start >= 0:
                    self._put_blocks(sequence, self._groups[0], start, table[start:end])
                start = place
            end = place + 1

    def _release_before_window(self, sequence: Sequence, group: _Group) -> None:
        table, gone = sequence.tables[group.index], []
        reached = max(0, sequence.computed - (group.window or 0) + 1) // self.size.block_size
        for place in range(reached - 1, -1, -1):
            if table[place] == NULL_BLOCK:
                break
            gone.append(table[place])
            table[place] = NULL_BLOCK
        self.pool.give_back(gone)


class _Group:
    """One KV cache group: looks up its contents, and computes which blocks its sliding window needs."""

    def __init__(self, index: int, window: int | None, block_size: int, max_step_tokens: int) -> None:
        self.index: Final = index
        self.table: Final = BlockTable(index)
        self.window: Final = window
        self.kind: Final = "full_attention" if window is None else "sliding_window"
        self._block_size: Final = block_size
        self._needed: Final = -(-((window or 1) - 1) // block_size)
        self._max_blocks: Final = None if window is None else -(-(window - 1 + max_step_tokens) // block_size) + 1

    def max_blocks(self, tokens: int) -> int:
        """Return the maximum number of blocks that a sequence of `tokens` tokens uses at the same time."""
        needed = -(-tokens // self._block_size)
        return needed if self._max_blocks is None else min(needed, self._max_blocks)

    def find(self, hashes: Items[int]) -> list[int]:
        """Return the longest prefix of `hashes` that ends with a window of cached blocks; `NULL_BLOCK` before the window."""
        whole, run = self.table.block_by_hash, 0
        for place in range(len(hashes) - 1, -1, -1):
            run = run + 1 if hashes[place] in whole else 0
            if run == self._needed:
                return [NULL_BLOCK] * place + [whole[block_hash] for block_hash in hashes[place : place + run]]
        return [whole[block_hash] for block_hash in hashes[:run]]

    def retained_blocks(self, sequence: Sequence, start: int, blocks: list[int]) -> list[int]:
        """Return `blocks` (the first is block number `start`), with `NULL_BLOCK` for each block that no later prompt needs."""
        if self.window is None:
            return blocks
        ends = [end // self._block_size for end in (sequence.prompt - 1, sequence.boundary)]
        return [
            block if any(end - self._needed <= place < end for end in ends) else NULL_BLOCK
            for place, block in enumerate(blocks, start)
        ]


@dataclass(slots=True)
class _FilledBlocks:
    """Consecutive complete blocks of a sequence. The first one is block number `start` of the sequence."""

    sequence: Sequence
    group: _Group
    start: int
    blocks: list[int]
    """The blocks; `NULL_BLOCK` for a block whose contents are not retained."""


Change: TypeAlias = "_FilledBlocks | tuple[int, int] | KVEvent"
"""A change from which `take_events` makes an event, or an event. A tuple is an evicted block of the GPU: group index and
hash."""


class HostMemory:
    """Copies of blocks in host memory, from the least to the most recently used."""

    def __init__(self, size: int, medium: str, changes: list[Change]) -> None:
        self._size: Final = size
        self._medium: Final = medium
        self._changes: Final = changes
        self._blocks: Final[OrderedDict[int, None]] = OrderedDict()

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._blocks

    def touch(self, hashes: Items[int]) -> None:
        """Record a use of these blocks, the last one first, so that the end of a prompt is evicted before its beginning."""
        for block_hash in reversed(hashes):
            if block_hash in self._blocks:
                self._blocks.move_to_end(block_hash)

    def put(self, hashes: Items[int]) -> None:
        """Copy these blocks to host memory, and evict the least recently used blocks if host memory is full."""
        self.touch(hashes)
        added = [block_hash for block_hash in hashes if block_hash not in self._blocks][: self._size]
        gone = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) + len(added) - self._size)]
        for block_hash in reversed(added):
            self._blocks[block_hash] = None
        if added:
            self._changes.append(BlockStored(added, None, [], 0, medium=self._medium))
        self._changes.extend(BlockRemoved([block_hash], self._medium) for block_hash in gone)

    def clear(self) -> None:
        """Remove all copies."""
        self._blocks.clear()


def _extra_keys(sequence: Sequence, start: int, count: int) -> list[tuple[str, ...] | None]:
    """Return extra keys as vLLM sends them: every block has the LoRA name, only the first block of a prompt has the salt."""
    lora = () if sequence.lora is None else (sequence.lora,)
    keys: list[tuple[str, ...] | None] = [lora or None] * count
    if start == 0 and sequence.salt is not None:
        keys[0] = (*lora, sequence.salt)
    return keys
