"""One worker's caches as its events tell of them, block by block: where the rows of `events` and `lifetimes` come from."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, TokenId
from kvevents.export.limits import ExportLimits
from kvevents.export.reuse import ReuseDistances
from kvevents.export.tables import Row
from kvevents.index import StoredKeys, stored_keys, tier_of
from kvevents.wire.canonical import scope_of

_I63: Final = 1 << 63
_SALT_DIGITS: Final = 16

UNKEYED: Final = {
    "other-group": "of a group that skips blocks, such as a sliding window, and of no hash that is resident with a key",
    "no-tokens": "announced without tokens, and of no hash that is resident with a key",
    "length-mismatch": "hashes and tokens do not fit each other",
    "bad-token": "an invalid token id",
    "parent-unknown": "the block before it is not resident, as far as the recording shows",
    "parent-unkeyed": "the block before it has no key",
}
"""Why a block has no key."""


class Before(NamedTuple):
    """What a store continues."""

    key: int | None
    depth: int | None
    """Blocks from the root; None if it is unknown."""
    salt: int
    """What the salt adds to the seed of local hashes; 0 for none."""


_ROOT: Final = Before(None, 0, 0)
_UNKNOWN: Final = Before(None, None, 0)


class Place(NamedTuple):
    """Where a block can be; copies are counted in each."""

    tier: str
    group: int | None
    locality: str | None
    ownership: str | None


class Moment(NamedTuple):
    """When: a batch of a life."""

    life: int
    seq: int
    at: float | None


class _Stay:
    """A block in one place."""

    __slots__ = ("copies", "facts", "gaps", "most", "stored")

    def __init__(self, facts: Row, stored: Row, gaps: int) -> None:
        self.facts = facts
        """What `lifetimes` tells of the block, from its hash to its salt."""
        self.stored = stored
        """When it was stored, as `lifetimes` tells it, and the reuse distance."""
        self.gaps = gaps
        self.copies = self.most = 1


class _Block:
    """A block that is resident somewhere."""

    __slots__ = ("before", "parent", "stays", "tokens")

    def __init__(self, before: Before, parent: int | None, tokens: int | None) -> None:
        self.before = before
        """What a store that continues it has to know."""
        self.parent = parent
        self.tokens = tokens
        self.stays: dict[Place, _Stay] = {}


class Salts:
    """Digests of salts, with a key that nobody keeps: salts are often names, which a plain digest would let everybody try."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def digest(self, salt: int) -> str | None:
        """16 hex digits for what a salt adds to the seed of local hashes; None for no salt."""
        if not salt:
            return None
        return hashlib.blake2b(salt.to_bytes(8, "little"), key=self._key, digest_size=_SALT_DIGITS // 2).hexdigest()


class Residents:
    """Feed it `begin`, `apply` and `end`; after each, take what has `ended`."""

    def __init__(self, worker: int, limits: ExportLimits, salts: Salts, *, tokens: bool) -> None:
        self.counts: Final[Counter[str]] = Counter()
        """`unkeyed`, `unknown_removals` and `dropped`, as the table `workers` has them."""
        self.held = 0
        """Residencies at present."""
        self._worker = worker
        self._limits = limits
        self._salts = salts
        self._ended: list[Row] = []
        self._with_tokens = tokens
        self._life = 0
        self._step = 0
        self._gaps = 0
        self._at: float | None = None
        self._blocks: dict[int, _Block] = {}
        self._reuse: dict[Place, ReuseDistances] = {}
        self._forgotten = 0
        self._apply: dict[type[KVEvent], Callable[[Any, Moment, int], list[Row]]] = {
            BlockStored: self._store,
            BlockRemoved: self._remove,
            AllBlocksCleared: self._clear,
        }

    @property
    def forgotten(self) -> int:
        """Blocks whose reuse distance the limit has cost."""
        return self._forgotten + sum(each.forgotten for each in self._reuse.values())

    def ended(self) -> list[Row]:
        """Rows of `lifetimes` that became known since the last call."""
        rows, self._ended = self._ended, []
        return rows

    def begin(self, moment: Moment, gap: int) -> None:
        """A batch begins, after so many that were lost. With another life nothing is resident any more."""
        if moment.life != self._life:
            self._end_all("restart", self._at)
            self._life = moment.life
            self._forget_removed(None)
        self._gaps += gap
        self._at = moment.at

    def apply(self, event: KVEvent, moment: Moment, position: int) -> list[Row]:
        """Apply the event at a place of its batch. Returns its rows of `events`."""
        return self._apply[type(event)](event, moment, position)

    def end(self, at: float | None) -> None:
        """Nothing more is recorded; what is resident was so until `at`, or until the newest batch where that is None."""
        self._end_all("end", self._at if at is None else at)

    def drop_oldest(self) -> int:
        """Take the oldest block for gone, for want of memory here. Returns how many residencies that ends."""
        value = next(iter(self._blocks))
        places = list(self._blocks[value].stays)
        for place in places:
            self._leave(value, place, "dropped", self._at)
        self.counts["dropped"] += len(places)
        return len(places)

    # --- stores

    def _store(self, event: BlockStored, moment: Moment, position: int) -> list[Row]:
        before = self._before(event)
        keyed = _keys_of(event, before)
        place = _place(event)
        medium = event.medium
        lora = event.lora_name if event.lora_name is not None else None if event.lora_id is None else str(event.lora_id)
        salt = before.salt if keyed.salt is None else keyed.salt
        digest = self._salts.digest(salt)
        rows: list[Row] = []
        parent = event.parent_block_hash
        for index, value in enumerate(event.block_hashes):
            block, unkeyed = self._announced(event, index, parent, before._replace(salt=salt), keyed)
            key, depth, _ = block.before
            facts = (value, block.parent, key, depth, block.tokens, place.tier, medium, *place[1:], lora, digest)
            held = place in block.stays
            row = (self._worker, *moment[:2], position, index, self._step, moment.at, "stored", *facts, held, unkeyed)
            rows.append(row + self._token_ids(event, index))
            self.counts["unkeyed"] += unkeyed is not None
            self._come(value, block, place, _Stay(facts, (*moment[1:2], position, index, self._step, moment.at), self._gaps))
            self._step += 1
            parent = value
        return rows or [self._blockless("stored", moment, position, (place.tier, medium, *place[1:]))]

    def _before(self, event: BlockStored) -> Before:
        if event.parent_block_hash is None:
            return _ROOT
        parent = self._blocks.get(event.parent_block_hash)
        return _UNKNOWN if parent is None else parent.before

    def _announced(
        self, event: BlockStored, index: int, parent: int | None, before: Before, keyed: StoredKeys
    ) -> tuple[_Block, str | None]:
        """The block at a place of a store, with its old residencies, and why it has no key."""
        known = self._blocks.get(event.block_hashes[index])
        if not keyed.keys and known is not None and known.before.key is not None:
            return known, None  # a move between tiers, or another group: the same hash is the same block
        key = keyed.keys[index] if keyed.keys else None
        # Blocks between may be skipped, and blocks that are announced by their keys may have lost their parents.
        is_chain = keyed.unkeyed not in {"other-group", "no-tokens", "length-mismatch"} and event.block_keys is None
        depth = before.depth + index + 1 if is_chain and before.depth is not None else None
        if not is_chain:
            parent = event.parent_block_hash if index == 0 else None
        tokens = event.block_size if 0 < event.block_size < _I63 else None
        block = _Block(Before(key, depth, before.salt), parent, tokens)
        if known is not None:
            block.stays = known.stays
        return block, keyed.unkeyed

    def _come(self, value: int, block: _Block, place: Place, stay: _Stay) -> None:
        self._blocks[value] = block
        there = block.stays.get(place)
        if there is not None:
            there.copies += 1
            there.most = max(there.most, there.copies)
            return
        key = block.before.key
        distance = None if key is None else self._distances(place).stored(key)
        stay.stored = (*stay.stored, distance)
        block.stays[place] = stay
        self.held += 1

    def _distances(self, place: Place) -> ReuseDistances:
        found = self._reuse.get(place)
        if found is None:
            found = self._reuse[place] = ReuseDistances(self._limits.remembered_keys)
        return found

    def _token_ids(self, event: BlockStored, index: int) -> Row:
        """Token ids where they are wanted; of a store whose hashes and tokens do not fit, all with its first block."""
        if not self._with_tokens:
            return ()
        size, tokens = event.block_size, event.token_ids
        if size > 0 and len(tokens) == size * len(event.block_hashes):
            tokens = tokens[index * size : (index + 1) * size]
        elif index > 0:
            tokens = ()
        return (_numbers(tokens),)

    # --- removals and clears

    def _remove(self, event: BlockRemoved, moment: Moment, position: int) -> list[Row]:
        place = _place(event)
        rows: list[Row] = []
        for index, value in enumerate(event.block_hashes):
            block = self._blocks.get(value)
            stay = None if block is None else block.stays.get(place)
            facts = (value, *(None,) * 4, place.tier, event.medium, *place[1:], None, None) if stay is None else stay.facts
            row = (self._worker, *moment[:2], position, index, self._step, moment.at, "removed", *facts, stay is not None, None)
            rows.append(row + self._no_tokens)
            if stay is None:
                self.counts["unknown_removals"] += 1
            elif stay.copies > 1:
                stay.copies -= 1
            else:
                key = stay.facts[2]
                if key is not None:
                    self._distances(place).removed(key)
                self._leave(value, place, "removed", moment.at)
            self._step += 1
        return rows or [self._blockless("removed", moment, position, (place.tier, event.medium, *place[1:]))]

    def _clear(self, event: AllBlocksCleared, moment: Moment, position: int) -> list[Row]:
        """Of everything, or of a tier or group only, as some engines can say."""
        scope = scope_of(event)
        tier = tier_of(scope["medium"]) if "medium" in scope else None
        group = scope.get("group_idx")
        chosen = None if tier is None and group is None else (tier, group)
        self._end_all("cleared", moment.at, chosen)
        self._forget_removed(chosen)
        return [self._blockless("cleared", moment, position, (tier, scope.get("medium"), group, None, None))]

    def _end_all(self, how: str, at: float | None, chosen: tuple[str | None, int | None] | None = None) -> None:
        for value in list(self._blocks):
            for place in list(self._blocks[value].stays):
                if _chosen(place, chosen):
                    self._leave(value, place, how, at)

    def _forget_removed(self, chosen: tuple[str | None, int | None] | None) -> None:
        for place in [place for place in self._reuse if _chosen(place, chosen)]:
            self._forgotten += self._reuse.pop(place).forgotten

    def _leave(self, value: int, place: Place, how: str, at: float | None) -> None:
        block = self._blocks[value]
        stay = block.stays.pop(place)
        if not block.stays:
            del self._blocks[value]
        self.held -= 1
        *stored, distance = stay.stored
        gap = stay.gaps != self._gaps
        self._ended.append((self._worker, self._life, *stay.facts, stay.most, *stored, how, self._step, at, gap, distance))

    # --- rows

    @property
    def _no_tokens(self) -> Row:
        return (None,) if self._with_tokens else ()

    def _blockless(self, kind: str, moment: Moment, position: int, where: Row) -> Row:
        """The row of an event that names no block."""
        facts = (*(None,) * 5, *where, None, None)
        row = (self._worker, *moment[:2], position, 0, self._step, moment.at, kind, *facts, False, None, *self._no_tokens)
        self._step += 1
        return row


def _keys_of(event: BlockStored, before: Before) -> StoredKeys:
    found = stored_keys(event, None if before.key is None else (before.key, before.salt))
    if found.unkeyed == "parent-unknown" and before.depth is not None:
        return found._replace(unkeyed="parent-unkeyed")
    return found


def _place(event: BlockStored | BlockRemoved) -> Place:
    group = event.group_idx or 0
    return Place(tier_of(event.medium), group if -_I63 <= group < _I63 else None, event.locality, event.ownership)


def _chosen(place: Place, chosen: tuple[str | None, int | None] | None) -> bool:
    return chosen is None or (chosen[0] in {None, place.tier} and chosen[1] in {None, place.group})


def _numbers(tokens: Sequence[TokenId]) -> list[int] | None:
    """Token ids as numbers of 64 bits; None where one is none."""
    plain = [token if isinstance(token, int) else token[0] for token in tokens]
    return plain if all(-_I63 <= token < _I63 for token in plain) else None
