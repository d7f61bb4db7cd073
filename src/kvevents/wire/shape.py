"""Which release sent a payload, told from its shape alone."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvevents.wire.dialects import Dialect, dialects

_HASH_FIELDS: Final = ("block_hashes", "parent_block_hash")


def dialect_of(payload: bytes) -> Dialect | None:
    """The first row of the table that could have sent `payload`; None when no row explains all of it."""
    try:
        batch = msgspec.msgpack.decode(payload)
        form, width, events = _outline(batch)
    except (msgspec.DecodeError, RecursionError, ValueError, TypeError):
        return None
    for row in dialects():
        if row.batch == form and (form == "map" or width == 2 + row.rank) and all(_admits(row, event) for event in events):
            return row
    return None


def _outline(batch: Any) -> tuple[str, int, list[Any]]:
    if isinstance(batch, dict):
        return "map", 0, list(batch["events"]) if isinstance(batch.get("events"), list) else []
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("not a batch")
    return "array", len(batch), batch[1]


def _admits(row: Dialect, event: Any) -> bool:
    """Whether `row` could have sent this event: form, fields, and the sign of its hashes."""
    if isinstance(event, list) and event:
        tag, values = event[0], event[1:]
        names = _names(row, tag)
        if row.events != "array" or names is None or len(values) != len(names):
            return False
        return _signs_fit(row, dict(zip(names, values, strict=True)))
    if not isinstance(event, dict):
        return False
    names = _names(row, event.get("type"))
    if row.events != "map" or names is None:
        return False
    keys = event.keys() - {"type"}
    return set(names) - row.optional <= keys <= set(names) and _signs_fit(row, event)


def _names(row: Dialect, tag: Any) -> tuple[str, ...] | None:
    names = {"BlockStored": row.stored, "BlockRemoved": row.removed, "AllBlocksCleared": ()}
    return names.get(tag) if isinstance(tag, str) else None


def _signs_fit(row: Dialect, fields: dict[str, Any]) -> bool:
    for name in _HASH_FIELDS:
        value = fields.get(name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and (item >= 1 << 63 if row.signed else item < 0):
                return False
    return True
