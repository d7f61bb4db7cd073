"""The event types: layout, hashes and media."""

from __future__ import annotations

import msgspec
import pytest

from kvevents import events
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVCacheEvent, KVEventBatch

STORED = BlockStored([1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None)


def test_the_medium_constants_are_the_names_that_engines_send() -> None:
    words = {name: getattr(events, name) for name in dir(events) if name.startswith("MEDIUM_") and name != "MEDIUM_ALL"}
    assert words == {f"MEDIUM_{word}": word for word in ("GPU", "CPU", "STORAGE", "CPU_PINNED", "DISK", "EXTERNAL")}


def test_the_first_fields_are_those_of_vllm_0_33_in_the_same_order() -> None:
    """Programs written for vLLM may construct events positionally."""
    assert BlockStored.__struct_fields__[:15] == (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
        *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id"),
        "lookahead_token_ids",
    )
    assert BlockRemoved.__struct_fields__[:5] == ("block_hashes", "medium", "group_idx", "locality", "ownership")
    assert KVEventBatch.__struct_fields__ == EventBatch.__struct_fields__ == ("ts", "events", "data_parallel_rank")


@pytest.mark.parametrize("event", [STORED, BlockRemoved([1], "GPU"), AllBlocksCleared()])
def test_equal_events_have_equal_hashes(event: KVCacheEvent) -> None:
    copy = msgspec.structs.replace(event)
    assert copy == event
    assert hash(copy) == hash(event)
    assert {event: 1}[copy] == 1


@pytest.mark.parametrize(
    "change",
    [{"block_hashes": [1]}, {"medium": "CPU"}, {"group_idx": 1}, {"session_id": "s"}, {"cache_salt": "s"}, {"lora_name": "l"}],
)
def test_different_events_have_different_hashes(change: dict[str, object]) -> None:
    assert hash(msgspec.structs.replace(STORED, **change)) != hash(STORED)


def test_an_event_with_extra_keys_and_pairs_of_tokens_can_be_hashed() -> None:
    """Lists inside extra keys are not hashable; the hash ignores them, and equality compares them."""
    event = BlockStored([1], None, [(1, 2)], 1, extra_keys=[("lora", ["image", 3]), None], lookahead_token_ids=[[1]])
    assert hash(event) == hash(msgspec.structs.replace(event))


def test_an_event_batch_encodes_events_of_any_type() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(1.5, [{"mine": 1}]))) == [1.5, [{"mine": 1}], None]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(1.5, [], 0))) == [1.5, [], 0]


@pytest.mark.parametrize("event", [STORED, BlockRemoved([1], "GPU"), AllBlocksCleared()])
def test_events_survive_a_round_trip_through_json(event: KVCacheEvent) -> None:
    assert msgspec.json.decode(msgspec.json.encode(KVEventBatch(1.5, [event], 1)), type=KVEventBatch).events == [event]  # type: ignore[list-item]


def test_an_event_prints_its_required_fields_and_the_others_that_have_a_value() -> None:
    """An event has up to 21 fields; `parent_block_hash=None` says that the block is a root."""
    assert (
        repr(BlockStored([1], None, [7], 1))
        == "BlockStored(block_hashes=[1], parent_block_hash=None, token_ids=[7], block_size=1)"
    )
    assert repr(BlockRemoved([1], medium="CPU")) == "BlockRemoved(block_hashes=[1], medium='CPU')"
