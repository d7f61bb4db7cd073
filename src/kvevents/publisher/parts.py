"""A snapshot as batches: what a history tells, spelled as a publisher speaks, in as many as subscribers read.

Of several batches a consumer must have all, in a row. But live batches may have had the same numbers, and it may hold some of
those. So each batch has a heartbeat, by which who misses another one finds out: its digest is of all up to there, and its trust
is EXACT in the last one only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvevents.config import MAX_HEARTBEAT
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.publisher.history import Told
from kvevents.publisher.resident import Resident

if TYPE_CHECKING:
    from kvevents.publisher.intake import Encode

MAX_PARTS: Final = 16
"""Batches of one snapshot. At 32 MiB each they hold some six million blocks of 16 tokens; all are in memory at once."""
_PIECES: Final = 8
"""An event that would fill more than this part of a batch is cut, so that batches can be filled evenly."""
_SMALL: Final = 400
"""Bytes of an event without hashes, tokens and names, at most."""
_MARGIN: Final = 16
"""Bytes by which the lengths of a batch's own arrays may grow with what is in it."""

_MORE: Final = "its snapshot is several batches, of which this is not the last one"

_Payload = Callable[[list[KVEvent]], bytes]


def spelled(
    told: list[Told], ts: float, rank: int | None, encode: Encode, limit: int, incarnation: int = 0
) -> list[bytes] | None:
    """Payloads of at most `limit` bytes that stand for all that was told, the first one beginning with a clear.

    Nearly always one. `incarnation` is the sender's, as its heartbeats tell it. None where more than `MAX_PARTS` would be
    needed, or a block alone takes more than a payload holds.
    """

    def payload(events: list[KVEvent]) -> bytes:
        return encode(KVEventBatch(ts, events, rank))

    if sum(map(_bound, told)) + _SMALL <= limit:
        return [payload([AllBlocksCleared(), *map(_event, told)])]
    parts = _bound_together(_packed(told, payload, limit), payload, incarnation)
    return parts if parts is not None and all(len(part) <= limit for part in parts) else None


def _bound_together(groups: Iterable[list[KVEvent]], payload: _Payload, incarnation: int) -> list[bytes] | None:
    """Payloads of groups of events. Of several each says what is resident after it, and whether it is the last one."""
    resident = Resident.create()
    parts: list[bytes] = []
    held: list[KVEvent] = []
    for number, group in enumerate(groups):
        if number == MAX_PARTS:
            return None
        if held:
            parts.append(payload([*held, _trusted("DEGRADED", resident, incarnation)]))
        resident.apply([(number, payload(group))])
        held = group
    return [*parts, payload([*held, _trusted("EXACT", resident, incarnation)] if parts else held)]


def _trusted(trust: str, resident: Resident, incarnation: int) -> BlockRemoved:
    reason = "" if trust == "EXACT" else _MORE
    return BlockRemoved([], heartbeat=Heartbeat(resident.digest(), MAX_HEARTBEAT, trust, reason, incarnation))


def _packed(told: list[Told], payload: _Payload, limit: int) -> Iterator[list[KVEvent]]:
    """Events in groups that fill a batch; cut small first, since one large encoding would hold up the whole process."""
    clear = AllBlocksCleared()
    group: list[KVEvent] = [clear]
    bare = len(payload([]))
    binding = Heartbeat("0" * 32, MAX_HEARTBEAT, "DEGRADED", _MORE, 1 << 63)
    empty = bare + _MARGIN + len(payload([BlockRemoved([], heartbeat=binding)])) - bare
    size = empty + len(payload([clear])) - bare
    for piece in (piece for event in told for piece in _pieces(event, limit // _PIECES)):
        event = _event(piece)
        more = len(payload([event])) - bare
        if size + more > limit and len(group) > 1:
            yield group
            group, size = [], empty
        group.append(event)
        size += more
    yield group


def _bound(event: Told) -> int:
    """Bytes that it takes in any dialect, at most."""
    kind, hashes, *values = event
    tokens = len(values[1]) * 3 // 2 if kind == "stored" else 0
    names = sum(4 * len(value) for value in values if isinstance(value, str))
    extra = 2 * len(values[_EXTRA]) if kind == "stored" and values[_EXTRA] is not None else 0
    # A keyed store has a key for each hash.
    return _SMALL + 18 * len(hashes) + tokens + names + extra


def _pieces(event: Told, room: int) -> Iterable[Told]:
    """The same event as several of at most `room` bytes each, but for a single block that takes more."""
    bound, count = _bound(event), len(event[1])
    if bound <= room or count < 2:
        return (event,)
    step = max(1, count * room // bound)
    return _CUTS[event[0]](event, step)


def _cut_stored(event: Told, step: int) -> Iterator[Told]:
    kind, hashes, parent, tokens, pairs, *others = event
    each = len(tokens) // len(hashes)
    extra = None if others[_EXTRA - 3] is None else _decode(others[_EXTRA - 3])
    keys = others[-1]
    for start in range(0, len(hashes), step):
        stop = start + step
        others[-1] = None if keys is None else keys[start:stop]
        if extra is not None:
            others[_EXTRA - 3] = _encode(extra[start:stop])
        yield (kind, hashes[start:stop], parent, tokens[start * each : stop * each], pairs, *others)
        # Copies without tokens are of blocks that stand in a chain already.
        parent = hashes[min(stop, len(hashes)) - 1] if tokens else parent


def _cut_removed(event: Told, step: int) -> Iterator[Told]:
    kind, hashes, *others = event
    for start in range(0, len(hashes), step):
        yield (kind, hashes[start : start + step], *others)


_CUTS: Final[dict[str, Callable[[Told, int], Iterator[Told]]]] = {"stored": _cut_stored, "removed": _cut_removed}

# --- as events --------------------------------------------------------------------------------------------------------------

_STORED: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "pairs",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "cache_salt",
    "block_keys",
)
_REMOVED: Final = ("block_hashes", "medium", "group_idx", "locality", "ownership")
_EXTRA: Final = _STORED.index("extra_keys") - 1
"""Place of the extra keys behind the hashes."""

_decode: Final = msgspec.msgpack.decode
_encode: Final = msgspec.msgpack.encode


def _event(told: Told) -> KVEvent:
    return _SPELLINGS[told[0]](*told[1:])


def _stored(*values: Any) -> BlockStored:
    fields = dict(zip(_STORED, values, strict=True))
    numbers = array("I", fields["token_ids"]).tolist()
    fields["token_ids"] = list(zip(numbers[::2], numbers[1::2], strict=True)) if fields.pop("pairs") else numbers
    if fields["extra_keys"] is not None:
        fields["extra_keys"] = _decode(fields["extra_keys"])
    return BlockStored(**fields)


def _removed(*values: Any) -> BlockRemoved:
    return BlockRemoved(**dict(zip(_REMOVED, values, strict=True)))


_SPELLINGS: Final[dict[str, Callable[..., KVEvent]]] = {"stored": _stored, "removed": _removed}
