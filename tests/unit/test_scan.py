"""The native scanner agrees with `decode_batch`: it decodes a payload exactly as Python does, or leaves it to Python.

An index that receives payloads and one that receives their events hold the same blocks, and no input raises.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from index_cases import blocks_of, scanned
from kvevents.events import AllBlocksCleared, BlockStored, KVEvent
from kvevents.index import ApplyResult, PrefixIndex
from kvevents.stream import RawBatch
from kvevents.wire import decode_batch, dialects, encode_batch
from kvevents.wire.checked_msgpack import DEFAULT_WIRE_LIMITS
from scan_cases import MUTATIONS, NUMBERS, loose_events, mutate
from wire_cases import GOLDENS, Golden, adopt_details, batch_of, batches_of, make_store, msgpack_values, pack

# --- the form of events in both decoders --------------------------------------------------------------------------------------

STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "keyable",
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
"""Fields of a store that the index needs; other fields change nothing."""
REMOVED = ("block_hashes", "medium", "group_idx", "locality", "ownership")
CLEARED = ("medium", "group_idx")
NAMES = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": CLEARED}


def scan_events(payload: bytes) -> list[dict[str, Any]] | None:
    """Return events as the scanner decodes them: extra keys in one list, and tokens modulo 2**32."""
    found = scanned(payload)
    if found is None:
        return None
    return [{"type": event["type"]} | {name: event[name] for name in NAMES[event["type"]]} for event in found]


def normalize_event(event: KVEvent) -> dict[str, Any]:
    """Return an event that Python decoded in the form of `scan_events`."""
    kind = type(event).__name__
    if isinstance(event, AllBlocksCleared):
        return {"type": kind} | {name: (event.unknown_fields or {}).get(name) for name in CLEARED}
    fields = {name: getattr(event, name, None) for name in NAMES[kind]}
    if isinstance(event, BlockStored):
        tokens = [token if isinstance(token, tuple) else (token,) for token in event.token_ids]
        good = [all(isinstance(part, int) and 0 <= part < 2**32 for part in token) for token in tokens]
        fields["keyable"] = [*good, False].index(False)
        low = [tuple(part % 2**32 for part in token) for token in tokens]
        fields["token_ids"] = [token if len(token) == 2 else token[0] for token in low]
        if event.extra_keys is not None:
            pairs = [(at, key) for at, keys in enumerate(event.extra_keys) for key in keys or ()]
            fields["extra_keys"] = [(at, tuple(key) if isinstance(key, list) else key) for at, key in pairs]
    return {"type": kind} | fields


# ----------------------------------------------------------------------------------------------------------------------------


KNOWN = batch_of(
    make_store(),
    make_store(block_hashes=[1, 2], token_ids=[1, 2, 3, 4], medium=None),
    make_store(block_hashes=[3], group_idx=1),
    *(make_store(block_hashes=[60 + at], group_idx=1, medium=medium) for at, medium in enumerate(("CPU", "DISK", "EXTERNAL"))),
)
"""Events before each payload, whose parents and hashes the payloads below name. Groups on each level, since otherwise stores of
arrays count as copies, and events that were decoded from them do not."""


def check(payload: bytes) -> bool:
    """Check that Python decodes everything that the scanner decodes to equal events. Return whether the scanner decoded the
    payload."""
    check_same_state(KNOWN, payload, payload)
    found = scan_events(payload)
    if found is None:
        return False
    python = decode_batch(payload)
    assert python.rejected == ()
    assert found == [normalize_event(event) for event in python.batch.events]
    return True


def check_same_state(*payloads: bytes) -> None:
    """Check that the payloads and their events lead to the same state and the same report."""
    by_payload, by_event = PrefixIndex(), PrefixIndex()
    for seq, payload in enumerate(payloads):
        raw = RawBatch("a", 0, 0, seq, False, payload)
        found, expected = by_payload.apply(raw), by_event.apply(raw.decode())
        if found.report is not None and expected.report is not None:
            rejected = adopt_details(found.report.rejected, expected.report.rejected)
            expected = ApplyResult(expected.status, replace(expected.report, rejected=rejected))
        assert found == expected
    assert by_payload.digest("a") == by_event.digest("a")
    assert blocks_of(by_payload, ("a", 0)) == blocks_of(by_event, ("a", 0))
    assert by_payload.workers() == by_event.workers()
    assert by_payload.stats().wire_rejected == by_event.stats().wire_rejected


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_every_golden_payload_is_decoded_as_by_python(golden: Golden) -> None:
    """The exception is the map batch of one commit between releases, which is left to Python."""
    assert check(golden.payload) is (golden.case != "map_batch")


@given(st.data())
def test_events_of_every_dialect_are_decoded_as_by_python(data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(dialects()))
    check(encode_batch(data.draw(batches_of(row)), row))


@given(st.sampled_from(GOLDENS).map(lambda golden: golden.payload), MUTATIONS)
def test_damaged_payloads_are_decoded_as_by_python_or_left_to_it(payload: bytes, mutations: list[tuple[str, int, int]]) -> None:
    check(mutate(payload, mutations))


@pytest.mark.parametrize("golden", [GOLDENS[0], GOLDENS[-1]], ids=str)
def test_a_payload_with_any_byte_changed_or_truncated_is_decoded_as_by_python_or_left_to_it(golden: Golden) -> None:
    """Each byte is replaced by each byte value that MessagePack distinguishes."""
    heads = (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x91, 0x9F, 0xA0, 0xA3, 0xBF, *range(0xC0, 0xE1), 0xFF)
    for at in range(len(golden.payload)):
        check(golden.payload[:at])
        for head in heads:
            check(golden.payload[:at] + bytes([head]) + golden.payload[at + 1 :])


@given(msgpack_values)
@example([1.0, [["AllBlocksCleared", 1]]])
@example([1.0, [["AllBlocksCleared"]], 0, "more"])
@example({"ts": 1.0, "events": [{"type": "AllBlocksCleared", "medium": "CPU", "group_idx": None}]})
def test_any_msgpack_is_decoded_as_by_python_or_left_to_it(value: Any) -> None:
    check(pack(value))
    check(pack([1.0, value, 0]))
    check(pack([1.0, [value], None]))


@given(
    st.sampled_from(
        [
            *make_store(),
            "group_idx",
            "extra_keys",
            "cache_salt",
            "locality",
            "block_keys",
            "heartbeat",
            "unknown_fields",
            "later",
        ]
    ),
    msgpack_values,
)
def test_any_value_of_any_field_is_decoded_as_by_python_or_left_to_it(name: str, value: Any) -> None:
    check(batch_of(make_store(**{name: value})))
    check(batch_of(make_store(), {"type": "BlockRemoved", "block_hashes": [1], name: value}))
    check(batch_of({"type": "AllBlocksCleared", name: value}))


@given(st.binary(max_size=60))
def test_any_bytes_do_not_raise(payload: bytes) -> None:
    check(payload)
    check(b"\x93\xcb\x3f\xf0\0\0\0\0\0\0" + payload)


@given(st.lists(st.lists(loose_events, min_size=1, max_size=3), min_size=1, max_size=5))
def test_unusual_but_valid_events_lead_to_the_same_state_in_both_decoders(batches: list[list[Any]]) -> None:
    """The events have numbers of any width, and media and keys of any kind that a decoder accepts."""
    check_same_state(KNOWN, *(batch_of(*events) for events in batches))


def test_limits_apply_to_the_form_that_the_peer_sent() -> None:
    """Hashes and free-form bytes are limited in the form that the peer sends, which may be smaller than their form in
    Python."""
    nils = b"\xdd" + struct.pack(">I", 1_000_001) + b"\xc0" * 1_000_001
    event = pack(make_store())
    with_nils = bytes([event[0] + 1]) + event[1:] + pack("extra_keys") + nils
    floats = pack(make_store(extra_keys=[[1.5] * (DEFAULT_WIRE_LIMITS.max_free_form_bytes // 9 - 10)]))
    for body in (with_nils, floats):
        check_same_state(b"\x93" + pack(1.0) + b"\x91" + body + b"\x00")


def encode_event_with_repeated_key() -> bytes:
    """Return a batch with a repeated key in an event, which no engine sends."""
    event = pack(make_store())
    return b"\x93" + pack(1.0) + b"\x91" + bytes([event[0] + 1]) + event[1:] + pack("medium") + pack("CPU") + b"\x00"


HEARTBEAT = {"digest": "0" * 32, "every": 5.0}


@pytest.mark.parametrize(
    "payload",
    [
        *(batch_of(make_store(block_hashes=[number], parent_block_hash=number)) for number in NUMBERS),
        *(batch_of(make_store(token_ids=[number, 1])) for number in NUMBERS),
        *(batch_of(make_store(token_ids=[[number, 1], [1, number]])) for number in NUMBERS),
        *(batch_of(make_store(block_size=number, group_idx=number, lora_id=number)) for number in NUMBERS),
        batch_of(make_store(token_ids=[[1, 2], 3])),
        batch_of(make_store(token_ids=["7", "8"])),
        batch_of(make_store(token_ids=[1.0, 2.0])),
        batch_of(make_store(token_ids=[True, False])),
        *(batch_of(make_store(token_ids=[], block_keys=[number])) for number in NUMBERS),
        batch_of(make_store(token_ids=[], block_keys=[b"x" * 32])),
        batch_of(make_store(token_ids=[], block_keys=[1, 2])),
        batch_of(make_store(token_ids=[], block_keys=[])),
        batch_of(make_store(block_keys=[1])),
        batch_of(make_store(block_keys=None)),
        batch_of({"type": "BlockRemoved", "block_hashes": [], "heartbeat": None}),
        batch_of({"type": "BlockRemoved", "block_hashes": [1], "heartbeat": HEARTBEAT}),
        batch_of(["BlockRemoved", [1], None, None, HEARTBEAT]),
        batch_of({"type": "BlockRemoved", "block_hashes": [1], "heartbeat": 7}),
        batch_of(make_store(medium=b"GPU")),
        batch_of(make_store(block_hashes=[b"x" * 32])),
        batch_of(pack(make_store())),
        batch_of(),
        pack([1700000000250, [make_store()], 0]),
        pack([-1.0, [make_store()], 0]),
        pack([float("nan"), [make_store()], 0]),
        pack([1.0, [make_store()], "0"]),
        pack([1.0, [make_store()], -1]),
        pack([1.0, [make_store()], 2**40]),
        pack({"ts": 1.0, "events": [make_store()]}),
        batch_of(make_store()) + b"\x00",
        encode_event_with_repeated_key(),
        batch_of({"block_hashes": [1], "type": "BlockRemoved", "medium": None}),
    ],
    ids=repr,
)
def test_corner_cases_are_decoded_as_by_python_or_left_to_it(payload: bytes) -> None:
    check(payload)


def test_heartbeats_are_left_to_python_and_block_keys_are_not() -> None:
    """A heartbeat is compared after its own batch, which the native index cannot do. Block keys are as common as tokens."""
    removed = {"type": "BlockRemoved", "block_hashes": []}
    assert not check(batch_of(make_store(), {**removed, "heartbeat": HEARTBEAT}))
    assert check(batch_of(make_store(), {**removed, "heartbeat": None}))
    assert check(batch_of(make_store(token_ids=[], block_keys=[2**64 - 1]), make_store(block_keys=None)))
    assert scanned(batch_of(make_store(token_ids=[], block_keys=[7])))[0]["block_keys"] == [7]  # type: ignore[index]
