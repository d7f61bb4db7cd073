"""Hypothesis strategies for events with valid and invalid fields, and mutations of payloads."""

from __future__ import annotations

from hypothesis import strategies as st

from kvevents.wire.dialects import NEUTRAL_KINDS
from wire_cases import msgpack_values

MUTATIONS = st.lists(
    st.tuples(st.sampled_from(["set", "insert", "delete", "cut", "copy"]), st.integers(0, 2**16), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


def mutate(payload: bytes, mutations: list[tuple[str, int, int]]) -> bytes:
    for kind, place, value in mutations:
        at = place % (len(payload) + 1)
        head, tail = payload[:at], payload[at:]
        match kind:
            case "set":
                payload = head + bytes([value]) + tail[1:]
            case "insert":
                payload = head + bytes([value]) + tail
            case "delete":
                payload = head + tail[1 + value % 4 :]
            case "cut":
                payload = head
            case _:
                payload = head + payload[at // 2 : at // 2 + value % 16] + tail
    return payload


numbers = st.sampled_from([0, 1, 2, 4]) | st.integers(-(2**63), 2**64 - 1)


numbers_or_none = st.none() | numbers


texts = (
    st.none() | st.sampled_from(["GPU", "cpu", "", "REMOTE", "full_attention", "sliding_window", "mamba"]) | st.text(max_size=3)
)


loose_keys = st.lists(st.none() | st.lists(msgpack_values | st.tuples(msgpack_values, numbers), max_size=3), max_size=4)


mm_hashes = st.sampled_from(["a" * 64, "b" * 64, 5, b"a"]) | msgpack_values
mm_items = st.fixed_dictionaries(
    {}, optional={"hash": mm_hashes, "start_offset": st.sampled_from([0, 1, 2]) | numbers, "uuid": msgpack_values}
) | st.tuples(mm_hashes, numbers)


loose_stores = st.fixed_dictionaries(
    {
        "type": st.just("BlockStored"),
        "block_hashes": st.lists(st.integers(0, 8) | numbers | st.binary(min_size=8, max_size=9), max_size=3),
        "parent_block_hash": st.none() | st.integers(0, 8) | numbers,
        "token_ids": st.lists(
            st.sampled_from([1, 2, "3", [1, 2], "a" * 64, "B" * 64, "c", None, 1.5]) | numbers | st.tuples(numbers, numbers),
            max_size=6,
        ),
        "block_size": st.sampled_from([1, 2]) | numbers,
    },
    optional={
        **dict.fromkeys(("lora_id", "group_idx", "kv_cache_spec_sliding_window"), numbers_or_none),
        **dict.fromkeys(
            ("medium", "lora_name", "cache_salt", "kv_cache_spec_kind", "locality", "ownership", "session_id"), texts
        ),
        "extra_keys": st.none() | loose_keys,
        "mm_keys": msgpack_values | st.lists(mm_items | st.lists(mm_items, max_size=2), max_size=3),
        "lookahead_token_ids": st.none() | st.lists(st.lists(numbers, max_size=2), max_size=2),
        "block_keys": msgpack_values | st.lists(numbers, max_size=3),
        "tomorrow": msgpack_values,
    },
)


loose_removals = st.fixed_dictionaries(
    {"type": st.just("BlockRemoved"), "block_hashes": st.lists(st.integers(0, 12) | numbers, max_size=3)},
    optional={
        "group_idx": numbers_or_none,
        **dict.fromkeys(("medium", "locality", "ownership"), texts),
        **dict.fromkeys(("heartbeat", "tomorrow"), msgpack_values),
    },
)


loose_clears = st.fixed_dictionaries(
    {"type": st.just("AllBlocksCleared")},
    optional={"medium": texts | msgpack_values, "group_idx": numbers_or_none | msgpack_values, "tomorrow": msgpack_values},
)


loose_neutral_events = st.fixed_dictionaries(
    {"type": st.sampled_from(sorted(NEUTRAL_KINDS))}, optional={"tomorrow": msgpack_values}
)


loose_events = loose_stores | loose_removals | loose_clears | loose_neutral_events


NUMBERS = [
    0,
    127,
    128,
    255,
    256,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -1,
    -33,
    -(2**31),
    -(2**63),
]
