"""Which release sent a payload, told from its shape alone."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from kvevents.wire.dialects import Dialect, Shape, dialects
from kvevents.wire.limits import DEFAULT_WIRE_LIMITS
from kvevents.wire.raw import NIL, REFUSED, elements, head_of, is_array, is_map, pairs, scalar
from kvevents.wire.rejected import RefusedError

_HASH_FIELDS: Final = ("block_hashes", "parent_block_hash")
_decode_hashes: Final = msgspec.msgpack.Decoder(int | bytes | list[int | bytes] | None).decode


class _Outline(NamedTuple):
    """What distinguishes one event from another release's."""

    form: Shape
    tag: str
    names: tuple[str, ...]
    """Of a map its keys, in their order, which tells SGLang's from vLLM's; of an array empty."""
    width: int
    """Of an array its elements after the tag; of a map 0."""
    negative: bool
    """Whether a hash is below 0."""
    high: bool
    """Whether a hash is 2**63 or above."""
    wide: bool = False
    """Whether a map of fewer than 16 pairs has the header of a larger one: msgspec goes by how many fields the struct declares,
    so vLLM 0.33, whose BlockStored is the first with 16, is known by it whatever it omits."""


def dialect_of(payload: bytes) -> Dialect | None:
    """The first row of the table that could have sent `payload`; None when no row explains all of it."""
    limits = DEFAULT_WIRE_LIMITS
    try:
        form, width, events = _batch(payload)
        rows = [row for row in dialects() if row.batch == form and (form == "map" or width == 2 + row.rank)]
        seen: set[_Outline] = set()
        for raw in elements(events, "the list of events", limits.max_events, "too-many-events"):
            outline = _outline(raw)
            if outline in seen:
                continue
            seen.add(outline)
            rows = [row for row in rows if _admits(row, outline)]
            if not rows:
                return None
    except (RefusedError, *REFUSED):
        return None
    return rows[0] if rows else None


def _batch(payload: bytes) -> tuple[Shape, int, msgspec.Raw]:
    limit = DEFAULT_WIRE_LIMITS.max_fields
    if payload and is_map(payload[0]):
        fields = pairs(payload, "the batch", limit)
        return "map", 0, fields["events"] if fields.keys() >= {"ts", "events"} else NIL
    parts = elements(payload, "the batch", limit, "not-a-batch")
    return "array", len(parts), parts[1] if len(parts) > 1 else NIL


def _outline(raw: msgspec.Raw) -> _Outline:
    limit = DEFAULT_WIRE_LIMITS.max_fields
    if is_array(head_of(raw)):
        items = elements(raw, "the event", limit, "too-many-fields")
        # Of every release the hashes are the first field and the parent of a store is the second.
        tag, hashes = _text(items[0] if items else NIL), items[1:3] if len(items) > 5 else items[1:2]
        return _Outline("array", tag, (), len(items) - 1, *_signs(hashes))
    fields = pairs(raw, "the event", limit)
    tag = _text(fields.pop("type", NIL))
    fields.pop("heartbeat", None)
    signs = _signs([fields.get(name, NIL) for name in _HASH_FIELDS])
    return _Outline("map", tag, tuple(fields), 0, *signs, wide=head_of(raw) == 0xDE and len(fields) < 15)


def _text(raw: msgspec.Raw) -> str:
    value = scalar(raw, "the event type")
    return value if isinstance(value, str) else ""


def _signs(raws: list[msgspec.Raw]) -> tuple[bool, bool]:
    values: list[Any] = []
    for raw in raws:
        found = _decode_hashes(raw)
        values += found if isinstance(found, list) else [found]
    numbers = [value for value in values if type(value) is int]
    return min(numbers, default=0) < 0, max(numbers, default=0) >= 1 << 63


def _admits(row: Dialect, event: _Outline) -> bool:
    """Whether `row` could have sent such an event: form, fields, and the sign of its hashes."""
    names = {"BlockStored": row.stored, "BlockRemoved": row.removed, "AllBlocksCleared": ()}.get(event.tag)
    if names is None or row.events != event.form or (event.high if row.signed else event.negative):
        return False
    if event.form == "array":
        return event.width == len(names)
    if event.wide and len(names) < 15:
        return False
    present = frozenset(event.names)
    return event.names == tuple(name for name in names if name in present or name not in row.optional)
