"""The cache of one worker as events describe it, block by block, and the resulting rows of `events` and `lifetimes`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

from kvevents.events import TIERS, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvevents.export.tables import Row
from kvevents.index import StoredKeys, stored_keys, tier_of
from kvevents.wire.encode import scope_of

I64_END: Final = 1 << 63


class ChainState(NamedTuple):
    """Properties of a block from which the same properties of its children are computed."""

    key: int | None
    depth: int | None
    """Number of blocks from the root of the chain to this block, or None if unknown."""
    salt: int
    """Number that the salt adds to the seed of local hashes; 0 without a salt."""


class Placement(NamedTuple):
    """Where a copy of a block is. Each placement has its own number of copies."""

    tier: str
    group: int | None
    locality: str | None
    ownership: str | None


class BatchPosition(NamedTuple):
    """A batch: incarnation, sequence number, and time in seconds since the epoch."""

    incarnation: int
    seq: int
    at: float | None


@dataclass(slots=True, eq=False)
class _Residency:
    """A block in one placement, from the store of its first copy to the removal of its last copy."""

    columns: Row
    """The columns of `lifetimes` from the block's hash to its salt."""
    stored_step: int
    stored_at: float | None
    gaps: int
    """Number of batches that were lost before the first store."""
    copies: int = 1
    max_copies: int = 1


@dataclass(slots=True, eq=False)
class _Block:
    chain: ChainState
    parent: int | None
    tokens: int | None
    residencies: dict[Placement, _Residency] = field(default_factory=dict)


class WorkerCache:
    """Follows the blocks of a worker. Call `begin_batch` and `apply` for each batch, and `finish` at the end."""

    def __init__(self, worker: int, salt_key: bytes, *, tokens: bool) -> None:
        self.counts: Final[Counter[str]] = Counter()
        """The counters `unkeyed`, `unknown_removals` and `dropped` of the table `workers`."""
        self.residencies = 0
        """Number of residencies that have not ended."""
        self._worker = worker
        self._salt_key = salt_key
        self._ended_rows: list[Row] = []
        self._with_tokens = tokens
        self._no_tokens: Row = (None,) if tokens else ()
        self._incarnation = 0
        self._step = 0
        self._gaps = 0
        self._time: float | None = None
        self._blocks: dict[int, _Block] = {}
        self._grouped_placements: set[tuple[str, str | None]] = set()
        """Tiers and localities for which a store named a group. A second store of a block on such a placement adds a copy."""
        self._apply: dict[type[KVEvent], Callable[[Any, BatchPosition, int], list[Row]]] = {
            BlockStored: self._store,
            BlockRemoved: self._remove,
            AllBlocksCleared: self._clear,
        }

    def take_ended(self) -> list[Row]:
        """Return the rows of `lifetimes` of the residencies that ended since the previous call."""
        rows, self._ended_rows = self._ended_rows, []
        return rows

    def begin_batch(self, batch: BatchPosition, gap: int) -> None:
        """Begin a batch, before which `gap` batches were lost. If the batch begins an incarnation, all residencies end."""
        if batch.incarnation != self._incarnation:
            self._end_all("restart", self._time)
            self._incarnation = batch.incarnation
        self._gaps += gap
        self._time = batch.at

    def apply(self, event: KVEvent, batch: BatchPosition, position: int) -> list[Row]:
        """Apply the event at `position` in its batch, and return the rows of `events` that describe the event."""
        return self._apply[type(event)](event, batch, position)

    def finish(self, time: float | None) -> None:
        """End all residencies at the end of the recording: at `time`, or at the newest batch if `time` is None."""
        self._end_all("end", self._time if time is None else time)

    def drop_oldest(self) -> int:
        """End the residencies of the oldest block to save memory, and return their number."""
        block_hash = next(iter(self._blocks))
        placements = list(self._blocks[block_hash].residencies)
        for placement in placements:
            self._end_residency(block_hash, placement, "dropped", self._time)
        self.counts["dropped"] += len(placements)
        return len(placements)

    # --- stores

    def _store(self, event: BlockStored, batch: BatchPosition, position: int) -> list[Row]:
        former = self._chain_before(event)
        keys = stored_keys(event, None if former.key is None else (former.key, former.salt))
        if keys.unkeyed == "parent-unknown" and former.depth is not None:
            keys = keys._replace(unkeyed="parent-unkeyed")
        placement = _placement_of(event)
        if event.group_idx is not None:
            self._grouped_placements.add((placement.tier, placement.locality))
        medium, parent = event.medium, event.parent_block_hash
        lora = event.lora_name if event.lora_name is not None else None if event.lora_id is None else str(event.lora_id)
        salt = former.salt if keys.salt is None else keys.salt
        digest = self._salt_digest(salt)
        rows: list[Row] = []
        for index, block_hash in enumerate(event.block_hashes):
            block, keyless_reason = self._stored_block(event, index, parent, former._replace(salt=salt), keys)
            key, depth, _ = block.chain
            columns = (block_hash, block.parent, key, depth, block.tokens, placement.tier, medium, *placement[1:], lora, digest)
            is_held = placement in block.residencies
            row = (self._worker, *batch[:2], position, index, self._step, batch.at, "stored", *columns, is_held, keyless_reason)
            rows.append(row + self._token_ids(event, index))
            self.counts["unkeyed"] += keyless_reason is not None
            self._add_copy(block_hash, block, placement, _Residency(columns, self._step, batch.at, self._gaps))
            self._step += 1
            parent = block_hash
        return rows or [self._row_without_block("stored", batch, position, (placement.tier, medium, *placement[1:]))]

    def _salt_digest(self, salt: int) -> str | None:
        """Return a digest with a secret key: salts are often names, which can be guessed from a digest without a key."""
        if not salt:
            return None
        return hashlib.blake2b(salt.to_bytes(8, "little"), key=self._salt_key, digest_size=8).hexdigest()

    def _chain_before(self, event: BlockStored) -> ChainState:
        if event.parent_block_hash is None:
            return ChainState(None, 0, 0)
        parent = self._blocks.get(event.parent_block_hash)
        # For `stored_keys`, too, 0 means "no parent" unless a block has this hash.
        return ChainState(None, None if event.parent_block_hash else 0, 0) if parent is None else parent.chain

    def _stored_block(
        self, event: BlockStored, index: int, parent: int | None, chain: ChainState, keys: StoredKeys
    ) -> tuple[_Block, str | None]:
        """Return the block at `index` of a store whose parent has `chain`, and why it has no key (None if it has a key)."""
        known_block = self._blocks.get(event.block_hashes[index])
        key, keyless_reason = (keys.keys[index], None) if index < len(keys.keys) else (None, keys.unkeyed)
        if key is None and known_block is not None and known_block.chain.key is not None:
            return known_block, None  # the event stores a copy on another tier or in another group
        # Stores of these kinds can leave out blocks of the chain, and a store by key can have an unknown parent.
        is_chain = keys.unkeyed not in {"other-group", "no-tokens", "length-mismatch"} and event.block_keys is None
        depth = chain.depth + index + 1 if is_chain and chain.depth is not None else None
        if not is_chain:
            parent = event.parent_block_hash if index == 0 else None
        tokens = event.block_size if 0 < event.block_size < I64_END else None
        block = _Block(ChainState(key, depth, chain.salt), parent, tokens)
        if known_block is not None:
            block.residencies = known_block.residencies
        return block, keyless_reason

    def _add_copy(self, block_hash: int, block: _Block, placement: Placement, residency: _Residency) -> None:
        self._blocks[block_hash] = block
        existing = block.residencies.get(placement)
        if existing is None:
            block.residencies[placement] = residency
            self.residencies += 1
        elif (placement.tier, placement.locality) in self._grouped_placements:
            existing.copies += 1
            existing.max_copies = max(existing.max_copies, existing.copies)

    def _token_ids(self, event: BlockStored, index: int) -> Row:
        """Return a row with a block's token ids (None if any is too large or a digest); empty if ids are not exported.

        If the numbers of hashes and tokens do not match, the first block gets all tokens.
        """
        if not self._with_tokens:
            return ()
        size, tokens = event.block_size, event.token_ids
        if size > 0 and len(tokens) == size * len(event.block_hashes):
            tokens = tokens[index * size : (index + 1) * size]
        elif index > 0:
            tokens = ()
        plain_ids = [token[0] if isinstance(token, tuple) else token for token in tokens]
        numbers = [token for token in plain_ids if isinstance(token, int) and -I64_END <= token < I64_END]
        return (numbers if len(numbers) == len(plain_ids) else None,)

    # --- removals and clears

    def _remove(self, event: BlockRemoved, batch: BatchPosition, position: int) -> list[Row]:
        placement = _placement_of(event)
        rows: list[Row] = []
        for index, block_hash in enumerate(event.block_hashes):
            block = self._blocks.get(block_hash)
            residency = None if block is None else block.residencies.get(placement)
            if residency is None:
                columns: Row = (block_hash, *(None,) * 4, placement.tier, event.medium, *placement[1:], None, None)
            else:
                columns = residency.columns
            head = (self._worker, *batch[:2], position, index, self._step, batch.at, "removed")
            rows.append((*head, *columns, residency is not None, None, *self._no_tokens))
            if residency is None:
                self.counts["unknown_removals"] += 1
            elif residency.copies > 1:
                residency.copies -= 1
            else:
                self._end_residency(block_hash, placement, "removed", batch.at)
            self._step += 1
        return rows or [self._row_without_block("removed", batch, position, (placement.tier, event.medium, *placement[1:]))]

    def _clear(self, event: AllBlocksCleared, batch: BatchPosition, position: int) -> list[Row]:
        """Clear all blocks, or only those on the tier and in the group that the event names."""
        fields = scope_of(event)
        tier = tier_of(fields["medium"]) if "medium" in fields else None
        group = fields.get("group_idx")
        places = chain.from_iterable(block.residencies for block in self._blocks.values())
        is_known = tier in {None, *TIERS} or any(tier == placement.tier for placement in places)
        self._end_all("cleared", batch.at, tier if is_known else None, group if is_known else None)
        return [self._row_without_block("cleared", batch, position, (tier, fields.get("medium"), group, None, None))]

    def _end_all(self, reason: str, time: float | None, tier: str | None = None, group: int | None = None) -> None:
        for block_hash in list(self._blocks):
            for placement in list(self._blocks[block_hash].residencies):
                if tier in {None, placement.tier} and group in {None, placement.group}:
                    self._end_residency(block_hash, placement, reason, time)

    def _end_residency(self, block_hash: int, placement: Placement, reason: str, time: float | None) -> None:
        block = self._blocks[block_hash]
        residency = block.residencies.pop(placement)
        if not block.residencies:
            del self._blocks[block_hash]
        self.residencies -= 1
        gap = residency.gaps != self._gaps
        head = (self._worker, self._incarnation, *residency.columns, residency.max_copies)
        self._ended_rows.append((*head, residency.stored_step, residency.stored_at, reason, self._step, time, gap))

    def _row_without_block(self, kind: str, batch: BatchPosition, position: int, placement: Row) -> Row:
        columns = (*(None,) * 5, *placement, None, None)
        row = (self._worker, *batch[:2], position, 0, self._step, batch.at, kind, *columns, False, None, *self._no_tokens)
        self._step += 1
        return row


def _placement_of(event: BlockStored | BlockRemoved) -> Placement:
    group = event.group_idx or 0
    return Placement(tier_of(event.medium), group if -I64_END <= group < I64_END else None, event.locality, event.ownership)
