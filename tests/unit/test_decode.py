"""The decoder reads every form that an engine sends, and rejects any other input without an exception."""

from __future__ import annotations

import base64
import gzip
import json
import math
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from time import thread_time
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from decode_cases import BAD_EVENTS
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.wire import DEFAULT_WIRE_LIMITS, Decoded, Dialect, WireLimits, decode_batch, dialect_for, dialects, encode_batch
from kvevents.wire.decode import decode_fast
from kvevents.wire.tolerant import decode_tolerant
from wire_cases import (
    CAPTURES,
    GOLDENS,
    GOOD,
    Golden,
    batch_of,
    batches_of,
    events_of,
    make_store,
    msgpack_values,
    pack,
)

ROWS = dialects()


def decode_one(payload: bytes) -> Any:
    """Return the only event of a payload of which nothing was rejected."""
    decoded = decode_batch(payload)
    assert decoded.rejected == ()
    (event,) = decoded.batch.events
    return event


def rejected_reasons(decoded: Decoded) -> list[tuple[int | None, str]]:
    return [(entry.index, entry.reason) for entry in decoded.rejected]


# --- two decoders with equal results-------------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_both_decoders_return_the_events_of_a_golden_payload(golden: Golden) -> None:
    """The tolerant decoder reads every payload; the fast one reads no map batches, and extra keys with digests."""
    fast = decode_fast(golden.payload, DEFAULT_WIRE_LIMITS)
    assert decode_tolerant(golden.payload, DEFAULT_WIRE_LIMITS, lambda *_: None) == (golden.batch(), ())
    is_tolerant_only = "map_batch" in golden.case or "embeds" in golden.case
    assert fast == (None if is_tolerant_only else golden.batch())


@given(st.sampled_from(ROWS).flatmap(lambda row: st.tuples(st.just(row), batches_of(row))))
def test_both_decoders_read_batches_of_each_dialect(case: tuple[Any, KVEventBatch]) -> None:
    row, batch = case
    payload = encode_batch(batch, row)
    assert decode_tolerant(payload, DEFAULT_WIRE_LIMITS, lambda *_: None) == (batch, ())
    assert decode_fast(payload, DEFAULT_WIRE_LIMITS) in (batch, None)
    decoded = decode_batch(payload)
    assert decoded.batch == batch
    assert encode_batch(decoded.batch, row) == payload
    assert decoded.dialect is not None
    assert encode_batch(decoded.batch, decoded.dialect) == payload


@pytest.mark.parametrize("release", ["0.9.0", "0.9.1", "0.17.0", "0.23.0", "0.24.0", "0.32.0", "0.33.0"])
def test_the_fast_decoder_reads_every_vllm_release(release: str) -> None:
    event = BlockStored([2**64 - 1, 5], 2**63, [1, 2, 3, 4], 2, None, "GPU", None)
    payload = encode_batch(
        KVEventBatch(1.0, [event, BlockRemoved([5], "GPU"), AllBlocksCleared()], 3), dialect_for("vllm", release)
    )
    assert decode_fast(payload, DEFAULT_WIRE_LIMITS) is not None


# --- captures --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not CAPTURES.exists(), reason="the recorded vLLM run, tests/data/vllm-0.32-captures.jsonl.gz, is not here")
def test_every_batch_of_a_real_engine_is_decoded_and_encoded_unchanged() -> None:
    """vLLM 0.32.0 under load, with integer and byte hashes, salts and prompt embeddings."""
    row, decoded_count = dialect_for("vllm", "0.32.0"), 0
    for line in gzip.decompress(CAPTURES.read_bytes()).splitlines():
        frames = json.loads(line)
        if frames["socket"] != "pub":
            continue
        payload = base64.b64decode(frames["frames"][2])
        decoded = decode_batch(payload)
        assert decoded.rejected == ()
        assert decoded.batch.events
        assert encode_batch(decoded.batch, row) == payload
        decoded_count += 1
    assert decoded_count > 50


# --- forms of a batch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 0, 7])
@pytest.mark.parametrize("encoded_as", ["data_parallel_rank", "attn_dp_rank"])
def test_the_rank_of_a_map_batch_is_decoded(encoded_as: str, rank: int | None) -> None:
    """This includes rank 0."""
    decoded = decode_batch(pack({"ts": 1.5, "events": [make_store()], encoded_as: rank}))
    assert decoded.batch == KVEventBatch(1.5, [GOOD], rank)
    assert decoded.rejected == ()


def test_the_rank_field_that_is_not_nil_is_used() -> None:
    both = pack({"ts": 1.5, "events": [], "data_parallel_rank": None, "attn_dp_rank": 0})
    assert decode_batch(both).batch.data_parallel_rank == 0


@pytest.mark.parametrize(
    "form", [make_store(), ["BlockStored", [11], None, [1, 2], 2, None, "GPU", None]], ids=["map", "array"]
)
@pytest.mark.parametrize("more", [[], [0], [0, "more"], [0, {"x": [1]}, 2, 3]])
def test_a_batch_can_have_more_than_two_elements(form: Any, more: list[Any]) -> None:
    decoded = decode_batch(pack([1.5, [form], *more]))
    assert decoded.batch == KVEventBatch(1.5, [GOOD], 0 if more else None)
    assert decoded.rejected == ()


@pytest.mark.parametrize("payload", [pack([1.5, []]), pack([1.5, [], 0]), pack({"ts": 1.5, "events": []})])
def test_an_empty_batch_is_a_batch(payload: bytes) -> None:
    decoded = decode_batch(payload)
    assert decoded.batch.events == []
    assert decoded.batch.ts == 1.5
    assert decoded.rejected == ()


@pytest.mark.parametrize(
    ("sent", "seconds"), [(1.7e9, 1.7e9), (0, 0.0), (1700000000, 1.7e9), (1700000000123, 1700000000.123), (1.7e12, 1.7e9)]
)
def test_a_timestamp_is_converted_to_seconds(sent: float, seconds: float) -> None:
    assert decode_batch(pack([sent, [], 0])).batch.ts == seconds


@pytest.mark.parametrize("sent", [math.nan, math.inf, -math.inf, -1.0, 1e300, 2**64 - 1, "now", None, True, [1], b"1"])
def test_an_invalid_timestamp_is_rejected_without_losing_events(sent: Any) -> None:
    decoded = decode_batch(pack([sent, [make_store()], 3]))
    assert decoded.batch == KVEventBatch(0.0, [GOOD], 3)
    assert rejected_reasons(decoded) == [(None, "bad-timestamp")]
    assert not any(rejected.loses_events for rejected in decoded.rejected)


@pytest.mark.parametrize("rank", ["0", 0.0, True, [0], b"\0"])
def test_an_invalid_rank_is_rejected_without_losing_events(rank: Any) -> None:
    decoded = decode_batch(pack([1.5, [make_store()], rank]))
    assert decoded.batch == KVEventBatch(1.5, [GOOD])
    assert rejected_reasons(decoded) == [(None, "bad-rank")]


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        "batch",
        b"batch",
        [],
        [1.5],
        {},
        {"ts": 1.5},
        {"events": []},
        [1.5, {}],
        [1.5, "x"],
        [1.5, None],
        {"ts": 1, "events": 5},
    ],
)
def test_a_payload_that_is_not_a_batch_is_rejected(value: Any) -> None:
    decoded = decode_batch(pack(value))
    assert decoded.batch == KVEventBatch(0.0, [])
    assert rejected_reasons(decoded) == [(None, "not-a-batch")]
    assert decoded.rejected[0].raw == pack(value)
    assert decoded.dialect is None


@pytest.mark.parametrize(
    "payload", [b"", b"\x93", b"\xc1", b"\x92\xcb\x00", batch_of(make_store())[:-3], batch_of(make_store()) + b"\0"]
)
def test_a_truncated_or_corrupt_payload_is_rejected_as_a_whole(payload: bytes) -> None:
    decoded = decode_batch(payload)
    assert decoded.batch.events == []
    assert len(decoded.rejected) == 1
    assert decoded.rejected[0].reason in {"malformed", "not-a-batch"}


# --- forms of an event -----------------------------------------------------------------------------------------------------


def test_unknown_map_fields_are_stored_by_name() -> None:
    event = decode_one(batch_of(make_store(tier="L5", detail={"a": [1, "x", b"\1"], "b": None})))
    assert event.unknown_fields == {"tier": "L5", "detail": {"a": [1, "x", b"\1"], "b": None}}
    event.unknown_fields = None
    assert event == GOOD


def test_unknown_array_elements_are_stored_by_position() -> None:
    known = [[11], None, [1, 2], 2, None, "GPU", None, None, 0, "full_attention", None]
    assert decode_one(batch_of(["BlockStored", *known, "new", [5]])).unknown_fields == {"12": "new", "13": [5]}
    assert decode_one(batch_of(["BlockRemoved", [11], "GPU", 0, None, "LOCAL"])).unknown_fields == {"5": "LOCAL"}
    assert decode_one(batch_of(["AllBlocksCleared", "CPU", 0, 1])).unknown_fields == {"medium": "CPU", "group_idx": 0, "3": 1}


HEARTBEAT = Heartbeat("0123456789abcdef" * 2, 5.0, "STALE", "engine-0: disconnected", 7)


@pytest.mark.parametrize("dialect", [None, *dialects()], ids=str)
def test_a_heartbeat_is_decoded_in_every_dialect(dialect: Dialect | None) -> None:
    beat = BlockRemoved([], heartbeat=HEARTBEAT)
    decoded = decode_batch(encode_batch(KVEventBatch(1.5, [beat], 0), dialect))
    assert decoded.batch.events == [beat]
    assert decoded.rejected == ()


@pytest.mark.parametrize(
    "damaged",
    ["?", {}, {"digest": "x", "every": 1.0}, {"digest": "0" * 32, "every": 0}, {"digest": "0" * 32, "every": 1, "trust": 3}],
)
def test_an_invalid_heartbeat_is_an_unknown_field(damaged: object) -> None:
    event = decode_one(batch_of({"type": "BlockRemoved", "block_hashes": [1], "heartbeat": damaged}))
    assert (event.block_hashes, event.heartbeat, event.unknown_fields) == ([1], None, {"heartbeat": damaged})


def test_unknown_fields_of_a_heartbeat_are_ignored() -> None:
    sent = {"digest": "0" * 32, "every": 2, "more": [1]}
    assert decode_one(batch_of({"type": "BlockRemoved", "block_hashes": [], "heartbeat": sent})).heartbeat == Heartbeat(
        "0" * 32, 2.0
    )


def test_block_keys_are_unsigned_and_limited() -> None:
    limit = WireLimits().max_hashes
    assert decode_one(batch_of(make_store(token_ids=[], block_keys=[-1]))).block_keys == [(1 << 64) - 1]
    (rejected,) = decode_batch(batch_of(make_store(token_ids=[], block_keys=[1] * (limit + 1)))).rejected
    assert rejected.reason == "too-many-hashes"


def test_unknown_fields_are_encoded_again_in_map_events() -> None:
    payload = batch_of(make_store(tier="L5"), {"type": "AllBlocksCleared", "scope": [1]})
    assert encode_batch(decode_batch(payload).batch, dialect_for("vllm")) == payload
    assert encode_batch(decode_batch(payload).batch) == payload


def test_a_peer_cannot_set_fields_of_the_decoder() -> None:
    event = decode_one(batch_of(make_store(unknown_fields={"a": 1}, block_digests=[b"x" * 32], parent_block_digest=b"y" * 32)))
    assert event.block_digests is event.parent_block_digest is None
    assert event.unknown_fields == {
        "unknown_fields": {"a": 1},
        "block_digests": [b"x" * 32],
        "parent_block_digest": b"y" * 32,
    }


def test_unknown_event_types_are_rejected_with_their_name() -> None:
    decoded = decode_batch(batch_of(make_store(), {"type": "BlockTransferred", "x": 1}, ["BlockTransferred", 1], make_store()))
    assert decoded.batch.events == [GOOD, GOOD]
    assert rejected_reasons(decoded) == [(1, "unknown-tag"), (2, "unknown-tag")]
    assert "BlockTransferred" in decoded.rejected[0].detail


@pytest.mark.parametrize(
    ("sent", "canonical"), [(5, 5), (-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1), (0, 0), (2**40, 2**40)]
)
@pytest.mark.parametrize("more", [{}, {"unknown": 1}], ids=["fast", "tolerant"])
def test_hashes_are_unsigned(sent: int, canonical: int, more: dict[str, Any]) -> None:
    event = decode_one(batch_of(make_store(block_hashes=[sent, 7], parent_block_hash=sent, **more)))
    assert event.block_hashes == [canonical, 7]
    assert event.parent_block_hash == canonical
    removed = decode_one(batch_of({"type": "BlockRemoved", "block_hashes": [sent], "medium": "GPU"} | more))
    assert removed.block_hashes == [canonical]


def test_byte_hashes_are_shortened_as_vllm_does() -> None:
    digest, parent = bytes(range(32)), bytes(range(100, 132))
    event = decode_one(batch_of(make_store(block_hashes=[digest], parent_block_hash=parent)))
    assert event.block_hashes == [int.from_bytes(digest[-8:], "big")]
    assert event.block_digests == [digest]
    assert event.parent_block_hash == int.from_bytes(parent[-8:], "big")
    assert event.parent_block_digest == parent


def test_hashes_of_both_kinds_in_one_event_have_no_digests() -> None:
    event = decode_one(batch_of(make_store(block_hashes=[3, b"\0" * 8])))
    assert event.block_hashes == [3, 0]
    assert event.block_digests is None


def test_a_parent_of_zero_is_a_hash() -> None:
    assert decode_one(batch_of(make_store(parent_block_hash=0))).parent_block_hash == 0
    assert decode_one(batch_of(make_store(parent_block_hash=0, unknown=1))).parent_block_hash == 0


@pytest.mark.parametrize("form", [make_store(token_ids=None), ["BlockStored", [11], None, None, 2, None, "GPU", None]])
def test_tokens_of_nil_are_unknown_tokens(form: Any) -> None:
    """vLLM-Ascend's AscendStoreConnector sends nil if it has no tokens of a block that vLLM has announced with tokens."""
    event = decode_one(batch_of(form))
    assert (event.block_hashes, event.token_ids, event.block_size) == ([11], [], 2)


def test_parent_zero_means_no_parent_in_an_event_that_llm_d_wraps() -> None:
    arrays = ["BlockStored", [11], 0, [1, 2], 2, None, "GPU", None]
    decoded = decode_batch(
        pack([1.5, [pack(make_store(parent_block_hash=0)), pack(arrays), pack(["BlockRemoved", [11], "GPU"])]])
    )
    assert decoded.rejected == ()
    assert decoded.batch == KVEventBatch(1.5, [GOOD, GOOD, BlockRemoved([11], "GPU")])


@pytest.mark.parametrize(
    "event", [pack(pack(make_store())), b"", b"\xc1", pack(5), pack(make_store())[:-1], pack(make_store()) + b"\0"]
)
def test_an_invalid_wrapped_event_is_rejected_alone(event: bytes) -> None:
    decoded = decode_batch(batch_of(make_store(), event, pack(make_store())))
    assert decoded.batch.events == [GOOD, GOOD]
    assert [entry.index for entry in decoded.rejected] == [1]


def test_token_pairs_of_sglang_with_eagle_are_decoded() -> None:
    expected = [(100, 101), (101, 102)]
    assert decode_one(batch_of(make_store(token_ids=[[100, 101], [101, 102]]))).token_ids == expected
    assert decode_one(batch_of(make_store(token_ids=[[100, 101], [101, 102]], unknown=1))).token_ids == expected


def test_token_ids_of_tensorrt_llm_are_converted_from_strings() -> None:
    event = decode_one(
        batch_of(make_store(token_ids=["100", 7, "0"], mm_keys=[{"type": "mm_key", "hash": "ab", "start_offset": 3}]))
    )
    assert event.token_ids == [100, 7, 0]
    assert event.unknown_fields == {"mm_keys": [{"type": "mm_key", "hash": "ab", "start_offset": 3}]}


def test_digests_of_items_stay_among_the_token_ids() -> None:
    assert decode_one(batch_of(make_store(token_ids=["AB" * 32, "c" * 64]))).token_ids == ["ab" * 32, "c" * 64]


@pytest.mark.parametrize(
    "token", ["", "-1", "1.5", "१२", "9" * 21, "9" * 20, "9" * 100_000, "g" * 64, "a" * 63, None, 1.0, True]
)
def test_a_value_that_is_no_token_id_becomes_an_invalid_one(token: Any) -> None:
    assert decode_one(batch_of(make_store(token_ids=[7, token]))).token_ids == [7, -1]


@pytest.mark.parametrize("token", [[1], [1, 2, 3], [1, "2"], {}, b"1"])
def test_an_invalid_token_id_rejects_its_event(token: Any) -> None:
    decoded = decode_batch(batch_of(make_store(), make_store(token_ids=[token]), make_store()))
    assert decoded.batch.events == [GOOD, GOOD]
    assert rejected_reasons(decoded) == [(1, "bad-field")]


def test_extra_keys_of_every_kind_that_vllm_sends_are_decoded() -> None:
    sent = [["lora", ["image", -3], "salt", b"\1" * 32], None, []]
    assert decode_one(batch_of(make_store(extra_keys=sent))).extra_keys == [
        ("lora", ["image", -3], "salt", b"\1" * 32),
        None,
        (),
    ]
    assert decode_one(batch_of(make_store(extra_keys=[["lora", ["image", 3]]]))).extra_keys == [("lora", ["image", 3])]


# --- Mooncake RFC #1527 ----------------------------------------------------------------------------------------------------

PLAIN = {
    "event_type": "stored",
    "event_id": 7,
    "model_name": "m",
    "block_size": 64,
    "additional_salt": "tenant",
    "lora_name": None,
    "medium": "cpu",
    "seq_hashes": [2**64 - 1],
    "parent_hash": None,
    "token_ids": None,
    "object_key": "0xff",
}
COMPAT = PLAIN | {"type": "BlockStored", "block_hashes": [-1], "parent_block_hash": None}
MOONCAKE_STORED = BlockStored(
    [2**64 - 1],
    None,
    [],
    64,
    medium="cpu",
    cache_salt="tenant",
    unknown_fields={"event_id": 7, "model_name": "m", "object_key": "0xff"},
)


@pytest.mark.parametrize("form", [PLAIN, COMPAT], ids=["plain", "compat"])
def test_a_mooncake_store_is_decoded(form: dict[str, Any]) -> None:
    decoded = decode_batch(pack([1700000000123, [form], 0]))
    assert decoded.rejected == ()
    assert decoded.batch == KVEventBatch(1700000000.123, [MOONCAKE_STORED], 0)


def test_a_mooncake_store_without_block_size_is_decoded() -> None:
    event = decode_one(
        pack([1700000000123, [{"event_type": "stored", "seq_hashes": [3], "block_size": None, "parent_hash": 0}], 0])
    )
    assert event == BlockStored([3], 0, [], 0)


@pytest.mark.parametrize(
    ("place", "tokens"),
    [({"base_block_idx": 0}, [5]), ({"base_block_idx": 1}, []), ({"base_block_idx": 1, "parent_hash": 2}, [5]), ({}, [5])],
)
def test_a_mooncake_store_has_no_tokens_if_its_prefix_is_unknown(place: dict[str, Any], tokens: list[int]) -> None:
    """RFC #1527 names the parent or the index of the first block. With the index alone, the tokens would begin a prompt."""
    event = decode_one(pack([1.0, [{"event_type": "stored", "seq_hashes": [3], "token_ids": [5], "block_size": 1} | place], 0]))
    assert (event.parent_block_hash, event.token_ids) == (place.get("parent_hash"), tokens)


@pytest.mark.parametrize("more", [{}, {"type": "BlockRemoved", "block_hashes": [-1]}], ids=["plain", "compat"])
def test_a_mooncake_removal_is_decoded(more: dict[str, Any]) -> None:
    removed = {"event_type": "removed", "seq_hashes": [2**64 - 1], "medium": "disk", "block_size": None, "token_ids": None}
    assert decode_one(pack([1700000000123, [removed | more], 0])) == BlockRemoved([2**64 - 1], "disk")


@pytest.mark.parametrize("more", [{}, {"type": "AllBlocksCleared", "seq_hashes": None}], ids=["plain", "compat"])
def test_a_mooncake_clear_is_decoded(more: dict[str, Any]) -> None:
    assert decode_one(pack([1700000000123, [{"event_type": "cleared"} | more], 0])) == AllBlocksCleared()


@pytest.mark.parametrize("kind", ["stored", "removed"])
def test_a_mooncake_event_whose_object_key_has_no_hash_is_rejected(kind: str) -> None:
    """Mooncake sends the event of such an object without a hash, so it names no block."""
    event: dict[str, Any] = {
        "event_type": kind,
        "object_key": "model@0@cafe",
        "seq_hashes": [],
        "block_hashes": [],
        "token_ids": None,
    }
    decoded = decode_batch(pack([1700000000123, [event, {"event_type": "removed", "seq_hashes": [7]}], 0]))
    assert (decoded.batch.events, rejected_reasons(decoded)) == ([BlockRemoved([7])], [(0, "bad-field")])
    assert decoded.rejected[0].detail == "seq_hashes is empty: the object key contains no hash"


def test_a_vllm_event_can_have_an_unknown_field_event_type() -> None:
    event = decode_one(batch_of(make_store(event_type="prefill")))
    assert event.unknown_fields == {"event_type": "prefill"}


# --- invalid events of a batch----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "reason"), BAD_EVENTS.values(), ids=BAD_EVENTS)
def test_an_invalid_event_is_rejected_alone(bad: bytes, reason: str) -> None:
    payload = (
        b"\x93\xcb"
        + b"\0" * 8
        + b"\x95"
        + pack(make_store())
        + bad
        + pack(["BlockRemoved", [5], "GPU"])
        + bad
        + pack(make_store())
        + b"\x03"
    )
    decoded = decode_batch(payload)
    assert decoded.batch == KVEventBatch(0.0, [GOOD, BlockRemoved([5], "GPU"), GOOD], 3)
    assert rejected_reasons(decoded) == [(1, reason), (3, reason)]
    assert decoded.rejected[0].raw == bad[:256]
    assert len(decoded.rejected[0].detail) <= 256


def test_a_deeply_nested_event_is_rejected_alone_in_a_map_batch() -> None:
    bomb = pack({"type": "AllBlocksCleared", "x": 0})[:-1] + b"\x91" * 5_000 + b"\x01"
    payload = b"\x82\xa2ts\x01\xa6events\x93" + pack(make_store()) + bomb + pack(make_store())
    decoded = decode_batch(payload)
    assert decoded.batch == KVEventBatch(1.0, [GOOD, GOOD])
    assert rejected_reasons(decoded) == [(1, "too-deep")]


def test_both_decoders_use_the_last_of_equal_keys() -> None:
    twice = b"\x89" + pack(make_store())[1:] + pack("medium") + pack("CPU")
    decoded = decode_batch(batch_of()[:10] + b"\x91" + twice + b"\x00")
    assert decoded.batch.events[0].medium == "CPU"  # type: ignore[union-attr]
    assert (
        decode_tolerant(batch_of()[:10] + b"\x91" + twice + b"\x00", DEFAULT_WIRE_LIMITS, lambda *_: None)[0] == decoded.batch
    )


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
def test_a_huge_declared_length_allocates_nothing(head: bytes) -> None:
    huge = head + b"\xff\xff\xff\xff\x01"
    tracemalloc.start()
    try:
        for payload in (huge, b"\x93\x01" + huge + b"\x00", b"\x93\x01\x91" + huge, b"\x93\x01\x91\x92\xacBlockRemoved" + huge):
            assert decode_batch(payload).rejected
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


# --- limits ----------------------------------------------------------------------------------------------------------------


def test_a_payload_above_the_limit_of_bytes_is_rejected() -> None:
    payload = batch_of(make_store())
    refused = decode_batch(payload, WireLimits(max_payload_bytes=len(payload) - 1))
    assert rejected_reasons(refused) == [(None, "oversized")]
    assert refused.dialect is None
    assert decode_batch(payload, WireLimits(max_payload_bytes=len(payload))).batch.events == [GOOD]


def test_a_batch_above_the_limit_of_events_is_rejected() -> None:
    payload = batch_of(make_store(), make_store(), make_store())
    assert rejected_reasons(decode_batch(payload, WireLimits(max_events=2))) == [(None, "too-many-events")]
    assert len(decode_batch(payload, WireLimits(max_events=3)).batch.events) == 3


@pytest.mark.parametrize(
    "event",
    [
        make_store(block_hashes=[1, 2, 3]),
        ["BlockRemoved", [1, 2, 3]],
        make_store(extra_keys=[None] * 3),
        make_store(lookahead_token_ids=[[]] * 3),
    ],
)
def test_an_event_above_the_limit_of_hashes_is_rejected(event: Any) -> None:
    """The tolerant decoder applies the limit to other fields with one entry per block, too."""
    bound = WireLimits(max_hashes=2)
    decoded = decode_batch(batch_of(make_store(unknown=1), event, b""), bound)
    assert rejected_reasons(decoded)[0] == (1, "too-many-hashes")
    assert len(decode_batch(batch_of(event), WireLimits(max_hashes=3)).batch.events) == 1


def test_an_event_above_the_limit_of_fields_is_rejected() -> None:
    decoded = decode_batch(
        batch_of(make_store(), make_store(a=1, b=2), ["AllBlocksCleared"] + [1] * 10), WireLimits(max_fields=9)
    )
    assert decoded.batch.events == [GOOD]
    assert rejected_reasons(decoded) == [(1, "too-many-fields"), (2, "too-many-fields")]
    assert rejected_reasons(decode_batch(pack([1.5, [make_store(x=1)], *range(8)]), WireLimits(max_fields=9))) == [
        (None, "not-a-batch")
    ]


def test_the_limit_of_free_form_bytes_holds_for_the_whole_batch() -> None:
    decoded = decode_batch(
        batch_of(make_store(a="x" * 30), make_store(a="x" * 30), make_store(a="x")), WireLimits(max_free_form_bytes=50)
    )
    assert len(decoded.batch.events) == 2
    assert rejected_reasons(decoded) == [(1, "oversized")]
    keys = make_store(extra_keys=[["x" * 60]], more=1)
    assert rejected_reasons(decode_batch(batch_of(keys), WireLimits(max_free_form_bytes=50))) == [(0, "oversized")]


def test_an_event_above_the_limit_of_nesting_is_rejected() -> None:
    nested = make_store(a=[[["x"]]], extra_keys=[[["m", [b"5"]]]])
    assert len(decode_batch(batch_of(nested), WireLimits(max_nesting=5)).batch.events) == 1
    assert rejected_reasons(decode_batch(batch_of(nested), WireLimits(max_nesting=3))) == [(0, "too-deep")]


def test_a_batch_with_more_rejected_events_than_the_limit_is_rejected() -> None:
    """Reading goes no further: a megabyte of empty events would take seconds."""
    events = [None] * 4, [make_store()], [None]
    decoded = decode_batch(batch_of(*events[0], *events[1]), WireLimits(max_rejected=4))
    assert (decoded.batch.events, rejected_reasons(decoded)) == ([GOOD], [(at, "malformed") for at in range(4)])
    decoded = decode_batch(batch_of(*events[0], *events[1], *events[2]), WireLimits(max_rejected=4))
    assert (decoded.batch.events, rejected_reasons(decoded)) == ([], [(None, "too-many-rejected")])
    assert "more than 4 events cannot be read; the first one: malformed: " in decoded.rejected[0].detail


def test_a_large_payload_is_decoded_like_a_small_one() -> None:
    """Above 1 MiB every declared length is checked before memory is allocated."""
    tokens = list(range(400_000))
    payload = batch_of(make_store(token_ids=tokens), make_store())
    assert decode_fast(payload, DEFAULT_WIRE_LIMITS) is None
    decoded = decode_batch(payload)
    assert decoded.rejected == ()
    assert decoded.batch.events == [BlockStored([11], None, tokens, 2, None, "GPU", None), GOOD]


# --- malicious peers -------------------------------------------------------------------------------------------------------


def colliding_keys(count: int, step: int = 0) -> bytes:
    """Return a msgpack map whose keys are arrays of two integers with one hash in CPython or, with a `step`, different hashes.

    The hash of a tuple is xxHash's rounds over its items' hashes, each of which can be inverted: choose the first item and
    solve for the second.
    """
    p1, p2, p5, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, 2**64 - 1
    inverse = pow(p2, -1, 2**64)
    pairs: list[bytes] = []
    target, first = 0x123456789ABCDEF, 1
    while len(pairs) < count:
        acc = (p5 + first * p2) & mask
        acc = ((acc << 31 | acc >> 33) & mask) * p1 & mask
        second = (target + step * first - acc) * inverse & mask
        if second < 2**61 - 1:
            pairs.append(b"\x92" + pack(first) + pack(second) + b"\xc0")
        first += 1
    return b"\xdf" + count.to_bytes(4, "big") + b"".join(pairs)


def test_colliding_keys_have_one_hash() -> None:
    keys = msgspec.msgpack.decode(colliding_keys(5))
    assert len(keys) == 5
    assert len({hash(key) for key in keys}) == 1
    assert len({hash(key) for key in msgspec.msgpack.decode(colliding_keys(5, step=1))}) == 5


HOSTILE = {
    "unknown field": lambda bomb: pack(make_store(new=0))[:-1] + bomb,
    "extra keys": lambda bomb: pack(make_store(extra_keys=0))[:-1] + b"\x91\x91" + bomb,
    "our own name": lambda bomb: pack(make_store(unknown_fields=0))[:-1] + bomb,
    "event": lambda bomb: bomb,
    "tag": lambda bomb: b"\x91" + bomb,
}


@pytest.mark.parametrize("place", HOSTILE.values(), ids=HOSTILE)
def test_keys_with_one_hash_do_not_take_quadratic_time(place: Any) -> None:
    """Decoded into a dict, 20,000 such keys take a hundred times as long as keys with different hashes.

    The test measures CPU time of this thread only and takes the shortest of three runs.
    """

    def seconds(keys: bytes) -> float:
        payload = batch_of()[:10] + b"\x92" + pack(make_store()) + place(keys) + b"\x00"
        durations = []
        for _ in range(3):
            began = time.thread_time()
            decoded = decode_batch(payload)
            assert isinstance(repr(decoded), str)  # this detects the dialect too
            durations.append(time.thread_time() - began)
            assert decoded.batch.events == [GOOD]
        return min(durations)

    assert seconds(colliding_keys(20_000)) < 10 * seconds(colliding_keys(20_000, step=1))


@pytest.mark.parametrize("field", ["extra_keys", "lookahead_token_ids", "new"])
def test_a_few_megabytes_of_empty_lists_do_not_become_gigabytes(field: str) -> None:
    count = 6_000_000
    lists = b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count
    tracemalloc.start()
    try:
        decoded = decode_batch(batch_of()[:10] + b"\x91" + pack(make_store(**{field: 0}))[:-1] + lists + b"\x00")
        assert tracemalloc.get_traced_memory()[1] < 4 * count
    finally:
        tracemalloc.stop()
    assert decoded.batch.events == []
    assert decoded.rejected[0].reason in {"oversized", "too-many-hashes"}


def test_a_batch_of_many_invalid_events_is_rejected_unread() -> None:
    count = 200_000
    payload = b"\x93\x01\xdd" + count.to_bytes(4, "big") + b"\xc0" * count + b"\x00"
    decoded = decode_batch(payload)
    assert rejected_reasons(decoded) == [(None, "too-many-rejected")]
    assert decoded.dialect is None


# --- arbitrary input -----------------------------------------------------------------------------------------------------


def check_result(decoded: Decoded) -> None:
    """Check the conditions that every result must meet, for any input."""
    batch = decoded.batch
    assert 0.0 <= batch.ts <= 1e11
    for event in batch.events:
        if isinstance(event, BlockStored):
            assert event.parent_block_hash is None or 0 <= event.parent_block_hash < 2**64
        if not isinstance(event, AllBlocksCleared):
            assert all(0 <= value < 2**64 for value in event.block_hashes)
        hash(event)
    assert decoded.dialect is None or decoded.dialect in ROWS
    for entry in decoded.rejected:
        assert entry.reason
        assert entry.detail
    assert isinstance(repr(decoded), str)
    for row in (None, ROWS[0], dialect_for("vllm"), dialect_for("sglang")):
        encode_batch(batch, row)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_raise(payload: bytes) -> None:
    check_result(decode_batch(payload))


@given(msgpack_values)
@example({"ts": 1.0, "events": [{"type": "AllBlocksCleared", "unknown_fields": {"a": 1}}]})
def test_arbitrary_msgpack_never_raises(value: Any) -> None:
    for payload in (
        pack(value),
        pack([1.5, value]),
        pack([1.5, [value], 0]),
        pack([value, [make_store()], value]),
        pack({"ts": value, "events": [value]}),
    ):
        check_result(decode_batch(payload))


@given(st.sampled_from(GOLDENS), st.data())
def test_damaged_goldens_never_raise(golden: Golden, data: st.DataObject) -> None:
    payload = bytearray(golden.payload)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(payload) - 1, 0)))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "drop"]))
        if kind == "flip" and payload:
            payload[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del payload[at:]
        elif kind == "insert":
            payload[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        else:
            del payload[at : at + data.draw(st.integers(1, 4))]
    check_result(decode_batch(bytes(payload)))


good_events = st.sampled_from(ROWS).flatmap(lambda row: st.tuples(st.just(row), events_of(row)))
FIELD_NAMES = st.sampled_from(
    [*dialect_for("vllm").stored_fields, "cache_salt", "unknown_fields", "block_digests", "type", "event_type", "seq_hashes"]
)


def encoded_as(row: Any, event: KVEvent) -> Any:
    """Return one event as `row` encodes it, as Python values."""
    batch = msgspec.msgpack.decode(encode_batch(KVEventBatch(0.0, [event]), row))
    return (batch["events"] if isinstance(batch, dict) else batch[1])[0]


@given(st.lists(good_events | st.tuples(st.none(), msgpack_values), max_size=6))
def test_valid_events_are_decoded_beside_any_other_values(items: list[tuple[Any, Any]]) -> None:
    """A batch decodes to the events that its elements decode to one by one."""
    sent = [value if row is None else encoded_as(row, value) for row, value in items]
    decoded = decode_batch(batch_of(*sent))
    alone = [decode_batch(batch_of(value)).batch.events for value in sent]
    assert decoded.batch.events == [event for events in alone for event in events]
    assert all(events == [item[1]] for item, events in zip(items, alone, strict=True) if item[0] is not None)
    assert [entry.index for entry in decoded.rejected] == [at for at, events in enumerate(alone) if not events]


@given(st.dictionaries(FIELD_NAMES, msgpack_values, max_size=4))
def test_any_value_in_any_field_rejects_at_most_its_event(fields: dict[str, Any]) -> None:
    decoded = decode_batch(batch_of(make_store(), make_store(**fields), make_store()))
    assert decoded.batch.events[0] == decoded.batch.events[-1] == GOOD
    assert len(decoded.batch.events) + len(decoded.rejected) == 3
    check_result(decoded)


@given(st.dictionaries(FIELD_NAMES, msgpack_values, max_size=3))
def test_the_tolerant_decoder_agrees_with_the_fast_one(fields: dict[str, Any]) -> None:
    payload = batch_of(make_store(**fields))
    fast = decode_fast(payload, DEFAULT_WIRE_LIMITS)
    if fast is not None:
        assert decode_tolerant(payload, DEFAULT_WIRE_LIMITS, lambda *_: None) == (fast, ())


def test_the_repr_of_a_result_is_one_line() -> None:
    assert repr(decode_batch(batch_of(make_store(), None))) == "<Decoded 1 events, 1 rejected, dialect None>"
    assert repr(decode_batch(batch_of(make_store()))) == "<Decoded 1 events, 0 rejected, dialect vllm-0.24.0>"


def test_fields_that_only_a_proposal_has_are_unknown_fields() -> None:
    """vllm#44488 proposes to describe blocks that a group does not hold. No release sends this."""
    proposed: dict[str, Any] = {"skipped_parent_block_hash": 7, "skipped_token_ids": [5], "skipped_extra_keys": [None]}
    decoded = decode_batch(batch_of(make_store(**proposed)))
    (event,) = decoded.batch.events
    assert isinstance(event, BlockStored)
    assert (event.unknown_fields, decoded.rejected) == (proposed, ())


# --- the time that a payload takes


def fill_megabyte(event: bytes) -> bytes:
    """Return a batch of a megabyte of the same event."""
    count = 1_000_000 // len(event)
    return b"\x92\xcb" + bytes(8) + b"\xdd" + count.to_bytes(4, "big") + event * count


def cpu_time(action: Callable[[], object]) -> float:
    before = thread_time()
    action()
    return thread_time() - before


def stored(**changes: Any) -> bytes:
    whole = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": 2, "token_ids": [1] * 16, "block_size": 16}
    return msgspec.msgpack.encode(whole | changes)


def list_of(item: bytes, count: int = 1_000_000) -> msgspec.Raw:
    return msgspec.Raw(b"\xdd" + (count // len(item)).to_bytes(4, "big") + item * (count // len(item)))


SLOW: dict[str, bytes] = {
    **{f"events {event!r}": fill_megabyte(event) for event in (b"\x90", b"\xc0", b"\x80", b"\xa0", b"\x91\x01")},
    **{
        f"events {event}": fill_megabyte(msgspec.msgpack.encode(event))
        for event in (
            ["BlockRemoved", []],
            ["BlockRemoved", [], 1],
            ["AllBlocksCleared", 1],
            {"type": "AllBlocksCleared", "": 0},
            {"type": "BlockRemoved", "block_hashes": [], "": []},
            {"type": "BlockRemoved", "block_hashes": [1], "x": 1},
            {"event_type": "cleared"},
            {"type": "BlockStored"},
            {"type": "AllBlocksCleared", **{str(number): 0 for number in range(200)}},
        )
    },
    "valid events before an invalid one": fill_megabyte(msgspec.msgpack.encode(["BlockRemoved", []]))[:-16] + b"\x00" * 16,
    "unknown field": fill_megabyte(stored(x=1)),
    "digests": fill_megabyte(stored(block_hashes=[bytes(32)], parent_block_hash=bytes(32))),
    "token strings": fill_megabyte(stored(token_ids=["1"] * 16)),
    **{
        f"{name} of {item!r}": batch_of(msgspec.Raw(stored(**{name: list_of(item)})))
        for name in ("block_hashes", "token_ids", "extra_keys", "block_keys", "lookahead_token_ids", "x")
        for item in (b"\x01", b"\xff", b"\xa11", b"\xa1x", b"\x90", b"\x80", b"\xc0", b"\xc4\x08" + bytes(8), b"\x92\x01\x02")
    },
}


@pytest.mark.parametrize("name", SLOW)
def test_a_megabyte_takes_a_bounded_time(name: str) -> None:
    """About 100 ms. The reference, a loop of about 50 ms, makes the limit independent of the machine.

    Both are measured in turn until they fit, since another program on the same core slows one of them down for a while.
    """
    payload = SLOW[name]
    limit = 4 * max(1.0, len(payload) / 1e6)
    taken, reference = [], []
    for _ in range(10):
        reference.append(cpu_time(lambda: sum(number * number for number in range(1_000_000))))
        taken.append(cpu_time(lambda: decode_batch(payload)))
        if min(taken) < limit * min(reference):
            return
    pytest.fail(f"{min(taken):.3f} s, {min(taken) / min(reference):.1f} times the reference; the limit is {limit:.1f}")


def calls(action: Callable[[], object]) -> int:
    """Return how many functions of Python and of C `action` calls."""
    counted = Counter[str]()
    sys.setprofile(lambda _, what, __: counted.update([what]))
    try:
        action()
    finally:
        sys.setprofile(None)
    return counted["call"] + counted["c_call"]


def test_digests_take_no_call_each() -> None:
    """vLLM sends hashes of 32 bytes with `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`."""
    one, whole = (stored(block_hashes=[bytes(32)] * blocks, parent_block_hash=bytes(32)) for blocks in (1, 32))
    few, many = (batch_of(*[msgspec.Raw(event)] * 100) for event in (one, whole))
    integers = batch_of(*[msgspec.Raw(stored(block_hashes=[2**60] * 32))] * 100)
    assert calls(lambda: decode_batch(few)) == calls(lambda: decode_batch(many))
    assert calls(lambda: decode_batch(many)) < 2 * calls(lambda: decode_batch(integers))
