"""Events as vLLM puts them on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from benchmarks.indexing.workload import Event, Removal
from kvevents import BlockRemoved, BlockStored

_TS: Final = 1.7e9
_encode: Final = msgspec.msgpack.Encoder().encode


def in_maps(event: Event) -> bytes:
    """As vLLM 0.24 and later, whose bytes our own types have."""
    if isinstance(event, Removal):
        return _encode([_TS, [BlockRemoved(event.hashes, "GPU")], 0])
    stored = BlockStored(event.hashes, event.parent, event.tokens, event.block_size, None, "GPU", None)
    return _encode([_TS, [stored], 0])


def in_arrays(event: Event) -> bytes:
    """As vLLM 0.17 to 0.19."""
    fields: list[Any]
    if isinstance(event, Removal):
        fields = ["BlockRemoved", event.hashes, "GPU"]
    else:
        fields = ["BlockStored", event.hashes, event.parent, event.tokens, event.block_size, None, "GPU", None, None]
    return _encode([_TS, [fields], 0])


DIALECTS: Final[dict[str, Callable[[Event], bytes]]] = {"map": in_maps, "array": in_arrays}
