"""The encoder writes any event in any dialect, and rejects values that cannot be encoded."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import EncodeError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVCacheEvent, KVEvent, KVEventBatch
from kvevents.wire import decode_batch, dialect_for, dialects, encode_batch
from kvevents.wire.dialects import ARRAY_STORED
from wire_cases import batch_of, batches_of, make_store, pack

NEWEST = dialect_for("vllm")
FULL = BlockStored(
    [2**64 - 1],
    2**63,
    [1, 2],
    2,
    lora_id=3,
    medium="GPU",
    lora_name="adapter",
    extra_keys=[("adapter", ("image", 1), "salt", b"\1" * 32)],
    group_idx=1,
    kv_cache_spec_kind="full_attention",
    kv_cache_spec_sliding_window=64,
    locality="LOCAL",
    ownership="tier",
    session_id="s",
    lookahead_token_ids=[[3]],
    cache_salt="salt",
)


def decode_plain(payload: bytes) -> Any:
    return msgspec.msgpack.decode(payload)


@given(batches_of(NEWEST))
def test_the_newest_vllm_has_the_layout_of_the_declared_events(batch: KVEventBatch) -> None:
    assert encode_batch(batch, NEWEST) == pack(batch)


@given(batches_of(dialect_for("vllm", "0.22")))
def test_the_default_is_the_last_array_form(batch: KVEventBatch) -> None:
    assert encode_batch(batch) == encode_batch(batch, dialect_for("vllm", "0.22"))


@given(batches_of(NEWEST))
def test_the_default_leaves_nothing_out(batch: KVEventBatch) -> None:
    assert decode_batch(encode_batch(batch)).batch == batch


@pytest.mark.parametrize("make", [lambda values: array("q", values), lambda values: np.array(values, np.int32)])
@pytest.mark.parametrize("row", [None, NEWEST, dialect_for("sglang", "0.5.17")], ids=str)
def test_arrays_and_numpy_values_are_encoded_as_lists_and_numbers(make: Any, row: Any) -> None:
    plain = KVEventBatch(1.0, [BlockStored([1, 2], 7, [3, 4], 1)])
    packed: Any = BlockStored(make([1, 2]), np.uint64(7), make([3, 4]), np.int32(1))  # type: ignore[arg-type]
    assert encode_batch(KVEventBatch(1.0, [packed]), row) == encode_batch(plain, row)


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        deque,
        bytes,
        bytearray,
        lambda values: range(values[0], values[-1] + 1),
        lambda values: memoryview(array("I", values)),
    ],
)
@pytest.mark.parametrize("row", [None, NEWEST, dialect_for("sglang", "0.5.17")], ids=str)
def test_tokens_of_any_sequence_are_encoded_as_a_list(make: Any, row: Any) -> None:
    """Bytes too, as the numbers that they are: on the wire, bytes are no tokens."""
    plain = KVEventBatch(1.0, [BlockStored([1], None, [3, 4], 2)])
    assert encode_batch(KVEventBatch(1.0, [BlockStored([1], None, make([3, 4]), 2)]), row) == encode_batch(plain, row)


OTHER_FIELDS = {
    "locality": "LOCAL",
    "ownership": "tier",
    "session_id": "s",
    "lookahead_token_ids": [[3]],
    "cache_salt": "salt",
    "block_keys": [7],
    "block_digests": [b"\1" * 32],
    "parent_block_digest": b"\1" * 32,
    "unknown_fields": {"x": 1},
}
"""Values of the fields of a store that the default has no place for."""


@pytest.mark.parametrize("field", OTHER_FIELDS)
def test_each_field_that_the_default_has_no_place_for_is_sent(field: str) -> None:
    """The conversion of plain stores, which is fast, knows all fields of the type."""
    plain = BlockStored([1], None, [3, 4], 2)
    changed = msgspec.structs.replace(plain, **{field: OTHER_FIELDS[field]})
    assert encode_batch(KVEventBatch(1.0, [changed])) != encode_batch(KVEventBatch(1.0, [plain]))
    assert {*BlockStored.__struct_fields__} == {*ARRAY_STORED, *OTHER_FIELDS}


@pytest.mark.parametrize("row", dialects(), ids=str)
def test_fields_that_a_release_does_not_have_are_omitted(row: Any) -> None:
    batch = decode_plain(encode_batch(KVEventBatch(1.0, [FULL], 3), row))
    event = (batch["events"] if row.batch_form == "map" else batch[1])[0]
    if row.event_form == "array":
        assert event[0] == "BlockStored"
        assert len(event) == 1 + len(row.stored_fields)
    else:
        assert event.keys() == {"type", *row.stored_fields}


@pytest.mark.parametrize(("engine", "release"), [("vllm", "0.9.1"), ("sglang", "0.5.17"), ("sglang", "0.5.23")])
def test_signed_dialects_send_signed_hashes(engine: str, release: str) -> None:
    event = decode_plain(
        encode_batch(KVEventBatch(1.0, [BlockRemoved([2**64 - 1, 2**63, 5], "GPU")]), dialect_for(engine, release))
    )[1][0]
    assert (event[1] if isinstance(event, list) else event["block_hashes"]) == [-1, -(2**63), 5]


def test_signed_hashes_are_accepted_for_an_unsigned_dialect() -> None:
    assert decode_plain(encode_batch(KVEventBatch(1.0, [BlockRemoved([-1], "GPU")]), NEWEST))[1][0]["block_hashes"] == [
        2**64 - 1
    ]


def test_the_default_sends_the_same_hash_in_all_events_of_a_block() -> None:
    """Subscribers that compare hashes as they come would keep a block whose removal has another one than its store."""
    stores = [BlockStored([-5], -7, [1], 1), BlockStored([-5], -7, [1], 1, cache_salt="tenant")]
    array, salted, removed = decode_plain(encode_batch(KVEventBatch(1.0, [*stores, BlockRemoved([-5])])))[1]
    assert (array[1:3], salted["block_hashes"], salted["parent_block_hash"], removed[1]) == ([[-5], -7], [-5], -7, [-5])


@pytest.mark.parametrize("event", [BlockStored([2**64], None, [1], 1), BlockRemoved([2**64])])
def test_a_hash_beyond_64_bits_is_refused(event: KVEvent) -> None:
    with pytest.raises(EncodeError):
        encode_batch(KVEventBatch(1.0, [event]))


def test_byte_hashes_are_encoded_as_bytes_again() -> None:
    payload = batch_of(
        make_store(block_hashes=[b"d" * 32], parent_block_hash=b"p" * 32),
        {"type": "BlockRemoved", "block_hashes": [b"r" * 32], "medium": None},
    )
    assert encode_batch(decode_batch(payload).batch, dialect_for("vllm", "0.32.0")) == payload
    assert decode_plain(encode_batch(decode_batch(payload).batch)) == decode_plain(payload)


def test_unknown_fields_are_omitted_from_array_events() -> None:
    batch = decode_batch(batch_of(make_store(tier="L5"))).batch
    assert encode_batch(batch, dialect_for("vllm", "0.23.0")) == encode_batch(
        decode_batch(batch_of(make_store())).batch, dialect_for("vllm", "0.23.0")
    )


class _Custom(KVCacheEvent, tag="Warmed"):
    weight: float


class _Plain(msgspec.Struct):
    note: str


class _EngineStored(KVCacheEvent, tag="BlockStored"):
    """A store as `kvevents.compat.sglang` declares it, with fewer fields, in another order."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class _SGLangBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


@pytest.mark.parametrize("row", [None, *dialects()], ids=str)
def test_custom_events_are_encoded_as_they_are_declared(row: Any) -> None:
    batch = decode_plain(encode_batch(EventBatch(1.0, [_Custom(0.5), _Plain("x"), {"free": 1}], 0), row))
    events = batch["events"] if row is not None and row.batch_form == "map" else batch[1]
    assert events == [{"type": "Warmed", "weight": 0.5}, {"note": "x"}, {"free": 1}]


def test_events_and_batches_of_engine_types_are_encoded_in_the_dialect() -> None:
    batch: Any = _SGLangBatch(1.0, [_EngineStored([2**64 - 1], None, [1], 1, None, "GPU")], 4)
    sent = decode_plain(encode_batch(batch, dialect_for("sglang", "0.5.17")))
    assert sent == [1.0, [["BlockStored", [-1], None, [1], 1, None, "GPU"]], 4]


@pytest.mark.parametrize("row", [None, NEWEST, dialect_for("vllm", "0.9.0")], ids=str)
@pytest.mark.parametrize(
    "events",
    [[object()], [BlockStored([object()], None, [], 1)], [{1, object()}], None],  # type: ignore[list-item]
)
def test_a_value_that_cannot_be_encoded_raises_encode_error(events: Any, row: Any) -> None:
    with pytest.raises(EncodeError, match=r"^cannot encode EventBatch: "):
        encode_batch(EventBatch(1.0, events), row)


def test_a_list_that_contains_itself_raises_encode_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(EncodeError):
        encode_batch(EventBatch(1.0, [loop]))


def test_a_clear_consists_of_its_tag_in_every_dialect() -> None:
    for row in dialects():
        batch = decode_plain(encode_batch(KVEventBatch(1.0, [AllBlocksCleared()], None), row))
        events = batch["events"] if row.batch_form == "map" else batch[1]
        assert events == ([["AllBlocksCleared"]] if row.event_form == "array" else [{"type": "AllBlocksCleared"}])


@given(st.integers())
def test_hashes_of_any_size_are_taken_modulo_2_to_the_64(value: int) -> None:
    for row in dialects():
        (event,) = decode_batch(encode_batch(KVEventBatch(1.0, [BlockRemoved([value], None)]), row)).batch.events
        assert event.block_hashes == [value % 2**64]  # type: ignore[union-attr]


def test_block_keys_can_be_encoded_only_in_map_events() -> None:
    keyed = KVEventBatch(1.0, [BlockStored([1], None, [], 16, block_keys=[7])])
    for dialect in (None, *dialects()):
        if dialect is not None and dialect.event_form == "array":
            with pytest.raises(
                EncodeError, match=r"the dialect .* has no field for block_keys; choose a dialect with events as maps"
            ):
                encode_batch(keyed, dialect)
        else:
            assert decode_batch(encode_batch(keyed, dialect)).batch.events[0].block_keys == [7]  # type: ignore[union-attr]
