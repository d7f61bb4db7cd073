"""What native decoders must know of the dialects."""

from __future__ import annotations

from typing import TypeAlias

from kvevents.events import BlockRemoved, BlockStored
from kvevents.wire.dialects import ARRAY_REMOVED, ARRAY_STORED

Layouts: TypeAlias = list[tuple[str, list[str], list[str]]]
"""By tag, the fields of array events and the names of map events."""

_SCOPED = ("medium", "group_idx")
"""Fields by which a clear may be meant for a tier or a group only."""


def native_layouts() -> Layouts:
    """Of all events of all dialects."""
    names = {kind: [name for name in kind.__struct_fields__ if name != "unrecognised"] for kind in (BlockStored, BlockRemoved)}
    return [
        ("BlockStored", list(ARRAY_STORED), names[BlockStored]),
        ("BlockRemoved", list(ARRAY_REMOVED), names[BlockRemoved]),
        ("AllBlocksCleared", [], list(_SCOPED)),
    ]
