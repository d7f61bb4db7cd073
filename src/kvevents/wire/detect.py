"""Detects from the shape of a payload which engine release could have sent it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from kvevents.wire.dialects import NEUTRAL_FIELDS, Dialect, Form, dialects
from kvevents.wire.raw_msgpack import MSGPACK_ERRORS, NIL, array_items, first_byte, is_array, is_map, map_items, scalar
from kvevents.wire.rejected import DEFAULT_WIRE_LIMITS, DecodeRejectedError

_HASH_FIELDS: Final = ("block_hashes", "parent_block_hash")
_decode_hashes: Final = msgspec.msgpack.Decoder(int | bytes | list[int | bytes] | None).decode


class _BatchShape(NamedTuple):
    """The form of a batch and its raw events."""

    form: Form
    width: int
    """Number of elements of an array; 0 for a map."""
    events: msgspec.Raw


class _EventShape(NamedTuple):
    """The properties of an event that differ between releases."""

    form: Form
    tag: str
    names: tuple[str, ...]
    """Keys of a map in their order, which differs between SGLang and vLLM; empty for an array."""
    width: int
    """Number of elements of an array after the tag; 0 for a map."""
    has_negative_hash: bool
    """Whether a hash is below 0."""
    has_high_hash: bool
    """Whether a hash is 2**63 or above."""
    has_wide_header: bool = False
    """Whether a map of fewer than 16 pairs has the header of a larger one. msgspec chooses the header by the number of fields
    that the struct declares. BlockStored of vLLM 0.33 is the first with 16 fields, so it is recognised whatever it omits."""


def detect_dialect(payload: bytes) -> Dialect | None:
    """Return the first row of the table of dialects that matches all of `payload`; None if no row does."""
    limits = DEFAULT_WIRE_LIMITS
    try:
        form, width, events = _batch_shape(payload)
        rows = [row for row in dialects() if row.batch_form == form and (form == "map" or width == 2 + row.has_rank)]
        seen: set[_EventShape] = set()
        for raw in array_items(events, "the list of events", limits.max_events, "too-many-events"):
            shape = _event_shape(raw)
            if shape in seen:
                continue
            seen.add(shape)
            rows = [row for row in rows if _matches(row, shape)]
            if not rows:
                return None
    except (DecodeRejectedError, *MSGPACK_ERRORS):
        return None
    return rows[0] if rows else None


def _batch_shape(payload: bytes) -> _BatchShape:
    limit = DEFAULT_WIRE_LIMITS.max_fields
    if payload and is_map(payload[0]):
        fields = map_items(payload, "the batch", limit)
        return _BatchShape("map", 0, fields["events"] if fields.keys() >= {"ts", "events"} else NIL)
    parts = array_items(payload, "the batch", limit, "not-a-batch")
    return _BatchShape("array", len(parts), parts[1] if len(parts) > 1 else NIL)


def _event_shape(raw: msgspec.Raw) -> _EventShape:
    limit = DEFAULT_WIRE_LIMITS.max_fields
    if is_array(first_byte(raw)):
        items = array_items(raw, "the event", limit, "too-many-fields")
        # In every release the hashes are the first field, and the parent of a store is the second.
        tag, hashes = _text(items[0] if items else NIL), items[1:3] if len(items) > 5 else items[1:2]
        return _EventShape("array", tag, (), len(items) - 1, *_hash_signs(hashes))
    fields = map_items(raw, "the event", limit)
    tag = _text(fields.pop("type", NIL))
    fields.pop("heartbeat", None)
    signs = _hash_signs([fields.get(name, NIL) for name in _HASH_FIELDS])
    return _EventShape("map", tag, tuple(fields), 0, *signs, has_wide_header=first_byte(raw) == 0xDE and len(fields) < 15)


def _text(raw: msgspec.Raw) -> str:
    value = scalar(raw, "the event type")
    return value if isinstance(value, str) else ""


def _hash_signs(raws: list[msgspec.Raw]) -> tuple[bool, bool]:
    """Return whether any hash is negative and whether any is 2**63 or above."""
    values: list[Any] = []
    for raw in raws:
        decoded = _decode_hashes(raw)
        values += decoded if isinstance(decoded, list) else [decoded]
    numbers = [value for value in values if type(value) is int]
    return min(numbers, default=0) < 0, max(numbers, default=0) >= 1 << 63


def _matches(row: Dialect, event: _EventShape) -> bool:
    """Return whether `row` could have sent this event, by its form, its fields and the sign of its hashes."""
    if event.tag in NEUTRAL_FIELDS:
        return row.event_form == event.form  # no release is known to send these first
    names = {"BlockStored": row.stored_fields, "BlockRemoved": row.removed_fields, "AllBlocksCleared": ()}.get(event.tag)
    if (
        names is None
        or row.event_form != event.form
        or (event.has_high_hash if row.has_signed_hashes else event.has_negative_hash)
    ):
        return False
    if event.form == "array":
        return event.width == len(names)
    if event.has_wide_header and len(names) < 15:
        return False
    present = frozenset(event.names)
    return event.names == tuple(name for name in names if name in present or name not in row.optional_fields)
