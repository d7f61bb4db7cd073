"""The tolerant decoder in Rust agrees with `decode_batch` on any input: the same events and the same rejections.

The events that they pass to an index are equal too.
"""

from __future__ import annotations

import datetime as dt
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from decode_cases import BAD_EVENTS
from kvevents.events import BlockRemoved, BlockStored, KVEvent
from kvevents.wire import DEFAULT_WIRE_LIMITS, Rejected, WireLimits, decode_batch, dialects, encode_batch
from kvevents.wire.dialects import ARRAY_CLEARED, ARRAY_REMOVED, ARRAY_STORED
from kvevents.wire.encode import encode_events
from kvevents_native import _native
from scan_cases import MUTATIONS, NUMBERS, loose_events, mutate
from wire_cases import GOLDENS, Golden, adopt_details, batch_of, batches_of, make_store, msgpack_values, pack

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def plain(value: Any) -> Any:
    """Return a value of free form in the types that the native decoder returns."""
    match value:
        case list() | tuple():
            return [plain(item) for item in value]
        case dict():
            return {name: plain(item) for name, item in value.items()}
        case msgspec.msgpack.Ext():
            return ("ext", value.code, bytes(value.data))
        case dt.datetime():
            past = value - EPOCH
            return ("time", past.days * 86_400 + past.seconds, past.microseconds)
        case _:
            return value


def fields_of(event: KVEvent) -> dict[str, Any]:
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    if isinstance(event, BlockStored):
        fields["extra_keys"] = plain(fields["extra_keys"])
    if isinstance(event, BlockRemoved) and event.heartbeat is not None:
        fields["heartbeat"] = msgspec.structs.astuple(event.heartbeat)
    return fields | {"type": type(event).__name__, "unknown_fields": plain(event.unknown_fields)}


_UNLIMITED = (2**40,) * 5 + (astuple(DEFAULT_WIRE_LIMITS)[5],)


PYTHON_LIMITS = {"too-complex", "too-many-rejected"}
"""Limits of the time that Python's decoder takes, above which it rejects a batch."""


def native_reasons(payload: bytes) -> list[str]:
    """Return the reasons why the native decoder rejected the batch or some of its events."""
    return [one[0] for one in _native.decoded(_UNLIMITED, DEFAULT_WIRE_LIMITS.max_rejected, payload)[3]]


def check(payload: bytes, limits: WireLimits = DEFAULT_WIRE_LIMITS) -> bytes:
    """Check that both decoders agree, and return the events for the scanner."""
    ts, rank, events, rejected, state = _native.decoded(astuple(limits)[:6], limits.max_rejected, payload)
    expected = decode_batch(payload, limits)
    native_rejected = tuple(Rejected(*one) for one in rejected)
    if {one.reason for one in expected.rejected} & PYTHON_LIMITS:
        assert expected.batch.events == []  # native code reads such a batch in less time than its size allows Python
        return state
    assert native_rejected == adopt_details(native_rejected, expected.rejected)
    batch = expected.batch
    assert repr([ts, rank]) == repr([batch.ts, batch.data_parallel_rank])
    # Compared as text, since NaN never equals NaN.
    ours, theirs = ([sorted(event.items()) for event in found] for found in (events, map(fields_of, batch.events)))
    assert repr(ours) == repr(theirs)
    again = _native.decoded(_UNLIMITED, limits.max_rejected, encode_events(batch.events))
    assert (again[3], again[4]) == ([], state)
    return state


def batch_payload(*values: Any) -> bytes:
    """Return a batch of these encoded events."""
    return b"\x93" + pack(1.5) + b"\xdc" + struct.pack(">H", len(values)) + b"".join(values) + b"\x03"


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_both_decoders_agree_on_every_golden_payload(golden: Golden) -> None:
    check(golden.payload)


@given(st.data())
def test_both_decoders_agree_on_events_of_every_dialect(data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(dialects()))
    check(encode_batch(data.draw(batches_of(row)), row))


@given(st.sampled_from(GOLDENS).map(lambda golden: golden.payload), MUTATIONS)
def test_both_decoders_agree_on_damaged_payloads(payload: bytes, mutations: list[tuple[str, int, int]]) -> None:
    check(mutate(payload, mutations))


@pytest.mark.parametrize("golden", [GOLDENS[0], GOLDENS[-1]], ids=str)
def test_both_decoders_agree_on_any_byte_at_any_place(golden: Golden) -> None:
    """The bytes are all values that MessagePack distinguishes, and every truncation is checked too."""
    heads = (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x91, 0x9F, 0xA0, 0xA3, 0xBF, *range(0xC0, 0xE1), 0xFF)
    for at in range(len(golden.payload)):
        check(golden.payload[:at])
        for head in heads:
            check(golden.payload[:at] + bytes([head]) + golden.payload[at + 1 :])


@pytest.mark.parametrize(
    ("new", "is_read"),
    [
        ([[]] * 49_999, True),
        ([[]] * 50_000, False),
        ([{}] * 50_000, False),
        ([[[7]]] * 25_000, False),
        ([[[7]]] * 24_999, True),
    ],
    ids=["lists", "one more", "maps", "nested", "one less"],
)
def test_both_decoders_limit_lists_and_maps_of_free_form_equally(new: list[Any], is_read: bool) -> None:
    """The limit is for the whole batch."""
    payloads = (
        batch_of(make_store(new=new)),
        batch_of(make_store(extra_keys=[[*new, 1.5]])),
        batch_of(make_store(new=new), make_store(new=[])),
    )
    for payload in payloads:
        check(payload)
    assert native_reasons(payloads[0]) == ([] if is_read else ["oversized"])


@pytest.mark.parametrize(("lists", "is_read"), [(49_999, True), (50_000, False)])
def test_extra_keys_as_engines_send_them_do_not_count_as_lists(lists: int, is_read: bool) -> None:
    payload = batch_of(make_store(extra_keys=[[("a", 1)] * 60_000]), make_store(new=[[]] * lists))
    check(payload)
    assert native_reasons(payload) == ([] if is_read else ["oversized"])


def test_extra_keys_after_the_last_block_are_ignored() -> None:
    more, same = (check(batch_of(make_store(extra_keys=keys, new=1))) for keys in ([None] * 10, [None, None]))
    assert more == same


extensions = st.builds(
    lambda code, data: b"\xc7" + struct.pack(">Bb", len(data), code) + data,
    st.sampled_from([-1, 0, 5, 127, -128]),
    st.binary(max_size=16),
)
times = st.builds(
    lambda nanos, seconds: b"\xc7\x0c\xff" + struct.pack(">Iq", nanos, seconds),
    st.integers(0, 2**32 - 1) | st.integers(0, 10**9),
    st.sampled_from([0, -1, 253_402_300_799, 253_402_300_800, -62_135_596_800, -62_135_596_801])
    | st.integers(-(2**63), 2**63 - 1),
)
floats = st.floats(width=32).map(lambda value: b"\xca" + struct.pack(">f", value))
texts = st.binary(max_size=3).map(lambda data: bytes([0xA0 | len(data)]) + data)
raw_values = st.recursive(
    msgpack_values.map(pack) | extensions | times | floats | texts,
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda items: bytes([0x90 | len(items)]) + b"".join(items))
        | st.lists(st.tuples(texts | st.just(b"\xa4hash") | inner, inner), max_size=3).map(
            lambda items: bytes([0x80 | len(items)]) + b"".join(key + value for key, value in items)
        )
    ),
    max_leaves=8,
)
"""MessagePack values, including those that no Python value is encoded to."""

NAMES = sorted(
    {
        *ARRAY_STORED,
        *BlockStored.__struct_fields__,
        *BlockRemoved.__struct_fields__,
        "type",
        "event_type",
        "seq_hashes",
        "parent_hash",
        "additional_salt",
        "base_block_idx",
        "mm_keys",
        "tomorrow",
        "12",
    }
)


@given(st.lists(st.tuples(st.sampled_from(NAMES), raw_values), max_size=3), st.sampled_from([{}, {"event_type": "stored"}]))
@example([("mm_keys", pack([{"hash": "a", "start_offset": 1}]))], {})
@example([("mm_keys", pack([[{"hash": b"a"}, ("b", 3), 7]])), ("extra_keys", pack([None, [1.5]]))], {})
@example([("heartbeat", b"\xc0"), ("block_digests", b"\xc0")], {})
@example(
    [("seq_hashes", pack([9])), ("block_hashes", pack([8])), ("token_ids", b"\xc0"), ("block_size", b"\xc0")],
    {"event_type": "stored"},
)
@example([("base_block_idx", b"\xd0\x00")], {"event_type": "stored"})
@example([("base_block_idx", pack(1)), ("parent_block_hash", b"\xc0")], {"event_type": "stored"})
@example([("base_block_idx", pack("1")), ("token_ids", pack([7]))], {"event_type": "stored"})
def test_both_decoders_agree_on_any_value_of_any_field(fields: list[tuple[str, bytes]], more: dict[str, Any]) -> None:
    """Stores, removals and clears as maps, with additional and repeated fields."""
    bodies = (
        make_store(**more),
        {"type": "BlockRemoved", "block_hashes": [1]},
        {"type": "AllBlocksCleared"},
        {"type": "BlockInactive", "block_hashes": [1]},
    )
    events = []
    for body in bodies:
        pairs = [(name, pack(value)) for name, value in body.items()] + fields
        events.append(bytes([0xDE, 0, len(pairs)]) + b"".join(pack(name) + value for name, value in pairs))
    check(batch_payload(*events))
    check(batch_payload(*(pack(event) for event in events)))  # wrapped in a bin


@given(
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "BlockInactive", "Tomorrow"]),
    st.lists(raw_values, max_size=13),
    st.data(),
)
def test_both_decoders_agree_on_any_element_of_an_array_event(tag: str, values: list[bytes], data: st.DataObject) -> None:
    names = {"BlockStored": ARRAY_STORED, "BlockRemoved": ARRAY_REMOVED, "AllBlocksCleared": ARRAY_CLEARED}.get(tag, ())
    good = {**make_store(), "heartbeat": {"digest": "0" * 32, "every": 5.0}}
    for at, name in enumerate(names[: len(values)]):
        if name in good and data.draw(st.integers(0, 3)):
            values[at] = pack(good[name])
    check(batch_payload(bytes([0xDC, 0, len(values) + 1]) + pack(tag) + b"".join(values)))


@given(raw_values, raw_values)
def test_both_decoders_agree_on_any_envelope(one: bytes, other: bytes) -> None:
    event = pack(make_store())
    events = b"\x91" + event
    check(one)
    check(b"\x92" + one + other)
    check(b"\x93" + pack(1.0) + events + one)
    check(b"\x92" + one + events)
    check(b"\x93" + pack(1.0) + b"\x93" + one + event + other + b"\xc0")
    check(
        b"\x84" + pack("ts") + one + pack("events") + events + pack("data_parallel_rank") + other + pack("attn_dp_rank") + one
    )


@given(st.lists(st.lists(loose_events, min_size=1, max_size=3), min_size=1, max_size=5))
def test_both_decoders_agree_on_barely_readable_events(batches: list[list[Any]]) -> None:
    for events in batches:
        check(batch_of(*events))
        check(batch_of(*(pack(event) for event in events)))


@given(st.binary(max_size=60))
@example(b"\xdd\x01\x01")
def test_both_decoders_agree_on_any_bytes(payload: bytes) -> None:
    check(payload)
    check(b"\x93\xcb\x3f\xf0\0\0\0\0\0\0" + payload)


@pytest.mark.parametrize("bad", [raw for raw, _ in BAD_EVENTS.values()], ids=BAD_EVENTS)
def test_both_decoders_reject_invalid_events_equally(bad: bytes) -> None:
    check(batch_payload(pack(make_store()), bad, pack(["BlockRemoved", [5], "GPU"]), bad))


HEARTBEATS: list[dict[Any, Any]] = [
    {},
    {"every": 1},
    {"every": 0},
    {"every": 86_400.5},
    {"every": float("nan")},
    {"every": True},
    {"digest": "0" * 31 + "A"},
    {"digest": "0" * 33},
    {"digest": None},
    {"trust": "DEGRADED", "reason": "\u00e4" * 1_000, "incarnation": 2**64 - 1},
    {"reason": "a" * 1_001},
    {"trust": "a" * 33},
    {"incarnation": -1},
    {"digest": None},
    {"attestation": 2**64 - 1},
    {"attestation": None},
    {"attestation": -1},
    {"attestation": "1"},
    {"tomorrow": [1]},
    {5: 1},
]


@pytest.mark.parametrize("changes", HEARTBEATS, ids=repr)
def test_both_decoders_agree_on_heartbeats(changes: dict[Any, Any]) -> None:
    encoded_heartbeat = {"digest": "0123456789abcdef" * 2, "every": 5.0} | changes
    check(batch_of({"type": "BlockRemoved", "block_hashes": [], "heartbeat": encoded_heartbeat}))
    check(batch_of(["BlockRemoved", [], None, None, encoded_heartbeat]))
    check(batch_of(make_store(heartbeat=encoded_heartbeat)))


@pytest.mark.parametrize("number", NUMBERS)
def test_both_decoders_agree_on_numbers_of_every_width(number: int) -> None:
    check(batch_of(make_store(block_hashes=[number], parent_block_hash=number, block_size=number)))
    check(batch_of(make_store(group_idx=number, lora_id=number), {"type": "AllBlocksCleared", "group_idx": number}))
    check(batch_of(make_store(token_ids=[number, str(number)]), make_store(token_ids=[[number, 1], [1, number]])))
    check(batch_of(make_store(kv_cache_spec_sliding_window=number, block_keys=[number], tomorrow=number)))
    check(batch_of(make_store(extra_keys=[[number, ["a", number], [number, number, number]]])))
    check(pack([number, [make_store()], number]))


LIMITS = (
    {"max_payload_bytes": 100},
    {"max_events": 2},
    {"max_hashes": 2},
    {"max_fields": 9},
    {"max_free_form_bytes": 12},
    {"max_nesting": 5},
    {"max_rejected": 1},
    {"max_rejected": 0},
)


@pytest.mark.parametrize("changes", LIMITS, ids=repr)
def test_both_decoders_apply_limits_equally(changes: dict[str, int]) -> None:
    limits = replace(DEFAULT_WIRE_LIMITS, **changes)
    check(batch_of(make_store()), limits)
    check(batch_of(make_store(), make_store(), 5, make_store(), 6, 7), limits)
    check(batch_of(make_store(block_hashes=[1, 2, 3])), limits)
    check(batch_of(make_store(extra_keys=[None, None, None]), make_store(block_keys=[1, 2, 3])), limits)
    check(batch_of(make_store(lookahead_token_ids=[[], [], []], tomorrow=1)), limits)
    check(batch_of(make_store(one=1), make_store(one=1, two=2), ["BlockRemoved", [1], *range(8)]), limits)
    check(
        batch_of(make_store(one=[[[[1]]]], two="0123456789"), make_store(one="0123456789"), make_store(extra_keys=[["a" * 9]])),
        limits,
    )
