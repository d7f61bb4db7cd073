"""The owners of the blocks of a shared stream: several upstreams become one stream, and each clears only its own blocks.

A clear of one upstream is sent as removals of the blocks that this upstream holds, so that the blocks of the others stay. An
upstream whose history is not known from its start can remove blocks that are not recorded as its own. Such removals are
dropped, since the blocks can be another upstream's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.events import (
    ATTESTATION_MASK,
    AllBlocksCleared,
    BlockInactive,
    BlockRemoved,
    BlockStored,
    KVEvent,
    attestation_group_term,
)
from kvevents.index import tier_of
from kvevents.weights import TIERS
from kvevents.wire import DEFAULT_WIRE_LIMITS
from kvevents.wire.encode import scope_of

_BLOCKS_PER_PIECE: Final = 500_000
"""Blocks in one piece of `UpstreamBlocks.dump`: a few megabytes."""


class RemovalPlacement(NamedTuple):
    """Where a copy of a block is, in the fields of a removal."""

    medium: str | None
    group_idx: int | None
    locality: str | None
    ownership: str | None


PLACEMENT_FIELDS: Final = frozenset(RemovalPlacement._fields)


class UpstreamBlocks:
    """Counts the copies of each block that one upstream holds, by placement.

    `fields` are the fields of a placement that the dialect of the stream can express. Placements that differ only in other
    fields are one placement.
    """

    def __init__(self, fields: frozenset[str] = PLACEMENT_FIELDS) -> None:
        self._fields: Final = fields
        self._placements: dict[RemovalPlacement, Counter[int]] = {}
        self._count = 0
        self._digest = 0

    def __len__(self) -> int:
        return self._count

    @property
    def digest(self) -> int:
        """What the attestation of the upstream's engine is (`Heartbeat.attestation`) if the engine has these blocks."""
        return self._digest & ATTESTATION_MASK

    def apply(self, events: Iterable[KVEvent]) -> list[KVEvent]:
        """Record the events of the upstream, and return them for the shared stream: clears become removals."""
        out: list[KVEvent] = []
        for event in events:
            out += _APPLY[type(event)](self, event)
        return out

    def clear(self, **scope: Any) -> list[KVEvent]:
        """Forget all blocks, or those of one scope such as `medium="GPU"`, and return the removals that say so."""
        chosen = [each for each in self._placements if all(getattr(each, name) == value for name, value in scope.items())]
        return list(chain.from_iterable(self._removals(each, self._take(each)) for each in chosen))

    def removals(self) -> list[KVEvent]:
        """Return removals of all blocks, without forgetting them."""
        return list(chain.from_iterable(self._removals(each, copies) for each, copies in self._placements.items()))

    def dump(self) -> list[Any]:
        """Return the blocks in pieces of a few megabytes that msgspec can encode, for `load`."""
        pieces: list[Any] = []
        for placement, copies in self._placements.items():
            hashes, counts = list(copies), list(copies.values())
            ranges = (slice(start, start + _BLOCKS_PER_PIECE) for start in range(0, len(hashes), _BLOCKS_PER_PIECE))
            pieces += [[list(placement), hashes[each], counts[each]] for each in ranges]
        return pieces

    def load(self, piece: Any) -> None:
        """Add one piece of a `dump`. Raises `msgspec.ValidationError`."""
        placement, hashes, counts = msgspec.convert(piece, tuple[RemovalPlacement, list[int], list[int]])
        copies = self._placements.setdefault(placement, Counter())
        before = len(copies)
        copies.update(dict(zip(hashes, counts, strict=True)))
        self._count += len(copies) - before
        if _is_attested(placement):
            term = attestation_group_term(placement.group_idx)
            self._digest += sum((each ^ term) * count for each, count in zip(hashes, counts, strict=True))

    def _apply_clear(self, event: AllBlocksCleared) -> list[KVEvent]:
        return self.clear(**scope_of(event))

    def _apply_store(self, event: BlockStored) -> list[KVEvent]:
        placement = self._placement_of(event)
        copies = self._placements.setdefault(placement, Counter())
        before = len(copies)
        for each in event.block_hashes:
            copies[each] += 1
        self._count += len(copies) - before
        self._digest += _digest_of(placement, event.block_hashes)
        return [event]

    def _apply_removal(self, event: BlockRemoved) -> list[KVEvent]:
        placement = self._placement_of(event)
        copies = self._placements.get(placement, Counter())
        removed = [each for each in event.block_hashes if self._remove_copy(copies, each)]
        self._digest -= _digest_of(placement, removed)
        if not copies:
            self._placements.pop(placement, None)
        if len(removed) == len(event.block_hashes):
            return [event]
        return [msgspec.structs.replace(event, block_hashes=removed, block_digests=None)] if removed else []

    def _remove_copy(self, copies: Counter[int], block_hash: int) -> bool:
        """Remove one copy; return False if the upstream holds none."""
        left = copies[block_hash] - 1
        if left > 0:
            copies[block_hash] = left
        elif left == 0:
            del copies[block_hash]
            self._count -= 1
        return left >= 0

    def _take(self, placement: RemovalPlacement) -> Counter[int]:
        copies = self._placements.pop(placement)
        self._count -= len(copies)
        self._digest -= _digest_of(placement, copies.elements())
        return copies

    @staticmethod
    def _removals(placement: RemovalPlacement, copies: Counter[int]) -> Iterator[KVEvent]:
        hashes = list(chain.from_iterable(repeat(each, count) for each, count in copies.items()))
        limit = DEFAULT_WIRE_LIMITS.max_hashes
        for start in range(0, len(hashes), limit):
            yield BlockRemoved(hashes[start : start + limit], **placement._asdict())

    def _placement_of(self, event: BlockStored | BlockRemoved) -> RemovalPlacement:
        placement = RemovalPlacement(event.medium, event.group_idx, event.locality, event.ownership)
        if self._fields == PLACEMENT_FIELDS:
            return placement
        return RemovalPlacement(
            **{name: value if name in self._fields else None for name, value in placement._asdict().items()}
        )


def _is_attested(placement: RemovalPlacement) -> bool:
    return placement.locality != "REMOTE" and tier_of(placement.medium) == TIERS[0]


def _digest_of(placement: RemovalPlacement, hashes: Iterable[int]) -> int:
    """Return what copies of blocks add to a digest; 0 unless they are on the device."""
    if not _is_attested(placement):
        return 0
    term = attestation_group_term(placement.group_idx)
    return sum(each ^ term for each in hashes)


_APPLY: Final[dict[type[KVEvent], Callable[[UpstreamBlocks, Any], list[KVEvent]]]] = {
    AllBlocksCleared: UpstreamBlocks._apply_clear,  # noqa: SLF001 - its own table
    BlockStored: UpstreamBlocks._apply_store,  # noqa: SLF001 - as above
    BlockRemoved: UpstreamBlocks._apply_removal,  # noqa: SLF001 - as above
    BlockInactive: lambda _, event: [event],
}
