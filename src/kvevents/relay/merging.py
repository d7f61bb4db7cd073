"""One of several upstreams: what it has resident, since in their common stream nobody else can tell whose a block is.

A clear of one upstream must not clear the blocks of the others, so it goes out as removals of what that upstream holds. Nor may
it remove what it does not hold, as one does whose history is not known from the start: that could be another's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvevents.wire import DEFAULT_WIRE_LIMITS
from kvevents.wire.respelling import scope_of

MAX_RESIDENT: Final = 8_000_000
"""Different blocks of one upstream on all its planes, about 1 GB: more than any engine has."""


_PIECE: Final = 500_000
"""Blocks in one piece of what is kept across a restart."""


class Plane(NamedTuple):
    """Where a block is, as a removal says it."""

    medium: str | None
    group_idx: int | None
    locality: str | None
    ownership: str | None


PLACE: Final = frozenset(Plane._fields)


class Residents:
    """Copies of each block of one upstream, by plane.

    `fields` are those of a plane that consumers are told of: what differs in others only is one place to them.
    """

    def __init__(self, fields: frozenset[str] = PLACE) -> None:
        self._fields: Final = fields
        self._planes: dict[Plane, Counter[int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def settle(self, events: Iterable[KVEvent]) -> list[KVEvent]:
        """The same events for a stream that others share: clears as removals. What they leave resident is remembered."""
        out: list[KVEvent] = []
        for event in events:
            out += _SETTLE[type(event)](self, event)
        return out

    def cleared(self, **scope: Any) -> list[KVEvent]:
        """Removals of everything that is resident, or of one tier or group; afterwards nothing of it is."""
        planes = [plane for plane in self._planes if all(getattr(plane, name) == value for name, value in scope.items())]
        return list(chain.from_iterable(self._removals(plane, self._take(plane)) for plane in planes))

    def removals(self) -> list[KVEvent]:
        """Removals of everything that is resident, which stays so."""
        return list(chain.from_iterable(self._removals(plane, copies) for plane, copies in self._planes.items()))

    def _clear(self, event: AllBlocksCleared) -> list[KVEvent]:
        return self.cleared(**scope_of(event))

    def _store(self, event: BlockStored) -> list[KVEvent]:
        copies = self._planes.setdefault(self._plane(event), Counter())
        before = len(copies)
        for each in event.block_hashes:
            copies[each] += 1
        self._count += len(copies) - before
        return [event]

    def _remove(self, event: BlockRemoved) -> list[KVEvent]:
        plane = self._plane(event)
        copies = self._planes.get(plane, Counter())
        gone = [each for each in event.block_hashes if self._is_taken(copies, each)]
        if not copies:
            self._planes.pop(plane, None)
        if len(gone) == len(event.block_hashes):
            return [event]
        return [msgspec.structs.replace(event, block_hashes=gone, block_digests=None)] if gone else []

    def _is_taken(self, copies: Counter[int], block_hash: int) -> bool:
        left = copies[block_hash] - 1
        if left > 0:
            copies[block_hash] = left
        elif left == 0:
            del copies[block_hash]
            self._count -= 1
        return left >= 0

    def _take(self, plane: Plane) -> Counter[int]:
        copies = self._planes.pop(plane)
        self._count -= len(copies)
        return copies

    @staticmethod
    def _removals(plane: Plane, copies: Counter[int]) -> Iterator[KVEvent]:
        hashes = list(chain.from_iterable(repeat(each, count) for each, count in copies.items()))
        limit = DEFAULT_WIRE_LIMITS.max_hashes
        for start in range(0, len(hashes), limit):
            yield BlockRemoved(hashes[start : start + limit], **plane._asdict())

    def _plane(self, event: BlockStored | BlockRemoved) -> Plane:
        plane = Plane(event.medium, event.group_idx, event.locality, event.ownership)
        return plane if self._fields == PLACE else Plane(*(self._told(name, value) for name, value in plane._asdict().items()))

    def _told(self, name: str, value: Any) -> Any:
        return value if name in self._fields else None

    # --- kept across a restart

    def kept(self) -> list[Any]:
        """In pieces that msgspec writes, of a few megabytes each."""
        pieces: list[Any] = []
        for plane, copies in self._planes.items():
            hashes, counts = list(copies), list(copies.values())
            cuts = (slice(start, start + _PIECE) for start in range(0, len(hashes), _PIECE))
            pieces += [[list(plane), hashes[cut], counts[cut]] for cut in cuts]
        return pieces

    def restore(self, piece: Any) -> None:
        """Take in one piece of what `kept` told; all of them are what it was of. Raises `msgspec.ValidationError`."""
        plane, hashes, counts = msgspec.convert(piece, tuple[Plane, list[int], list[int]])
        copies = self._planes.setdefault(plane, Counter())
        before = len(copies)
        copies.update(dict(zip(hashes, counts, strict=True)))
        self._count += len(copies) - before


_SETTLE: Final[dict[type[KVEvent], Callable[[Residents, Any], list[KVEvent]]]] = {
    AllBlocksCleared: Residents._clear,  # noqa: SLF001 - its own table
    BlockStored: Residents._store,  # noqa: SLF001 - as above
    BlockRemoved: Residents._remove,  # noqa: SLF001 - as above
}
