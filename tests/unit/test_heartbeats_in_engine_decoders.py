"""Decoders of released engines read a heartbeat as a removal of no blocks, and the events next to it are unaffected."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvevents.events import BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.wire import decode_batch, encode_batch
from kvevents.wire.dialects import Dialect, dialects

HEARTBEAT = BlockRemoved([], heartbeat=Heartbeat("0123456789abcdef" * 2, 5.0, "DEGRADED", "its engine is gone", 7))
STORED = BlockStored([1], None, [1, 2], 2, medium="GPU")


def decoder_of(dialect: Dialect) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder with the structs of a vLLM or SGLang release, which ignore unknown fields."""
    arrays = dialect.event_form == "array"
    required = {"block_hashes": list[int], "token_ids": list[int], "block_size": int}

    def event(tag: str, names: tuple[str, ...]) -> type[msgspec.Struct]:
        fields: list[Any] = [(name, required[name]) if name in required else (name, Any, None) for name in names]
        return msgspec.defstruct(tag, fields, array_like=arrays, tag=True, kw_only=True)

    kinds = [
        event("BlockStored", dialect.stored_fields),
        event("BlockRemoved", dialect.removed_fields),
        event("AllBlocksCleared", ()),
    ]
    union: Any = kinds[0] | kinds[1] | kinds[2]
    rank = [("data_parallel_rank", int | None, None)] if dialect.has_rank else []
    batch = msgspec.defstruct(
        "KVEventBatch",
        [("ts", float), ("events", list[union]), *rank],
        array_like=dialect.batch_form == "array",
    )
    return msgspec.msgpack.Decoder(batch)


@pytest.mark.parametrize("dialect", dialects(), ids=str)
@pytest.mark.parametrize("events", [[HEARTBEAT], [STORED, HEARTBEAT], [HEARTBEAT, STORED]], ids=["alone", "last", "first"])
def test_released_decoders_ignore_a_heartbeat(dialect: Dialect, events: list[KVEvent]) -> None:
    payload = encode_batch(KVEventBatch(1.0, events, 0), dialect)
    found: list[Any] = decoder_of(dialect).decode(payload).events
    assert [type(event).__name__ for event in found] == [type(event).__name__ for event in events]
    for event in found:
        assert list(event.block_hashes) == ([1] if type(event).__name__ == "BlockStored" else [])


@pytest.mark.parametrize("dialect", dialects(), ids=str)
def test_our_decoder_reads_a_heartbeat_in_every_dialect(dialect: Dialect) -> None:
    events: list[KVEvent] = [STORED, HEARTBEAT]
    decoded = decode_batch(encode_batch(KVEventBatch(1.0, events, 0), dialect))
    assert decoded.rejected == ()
    assert decoded.batch.events[1] == HEARTBEAT
