"""The event types: layout, hashes and media."""

from __future__ import annotations

import msgspec
import pytest

from kvevents import events
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVCacheEvent, KVEventBatch

STORED = BlockStored([1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None)


def test_media_are_those_of_the_engines() -> None:
    words = {name: getattr(events, name) for name in dir(events) if name.startswith("MEDIUM_")}
    assert words == {f"MEDIUM_{word}": word for word in ("GPU", "CPU", "STORAGE", "CPU_PINNED", "DISK", "EXTERNAL")}


def test_the_fields_begin_with_vllm_0_33_s_in_its_order() -> None:
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
    twin = msgspec.structs.replace(event)
    assert twin == event
    assert hash(twin) == hash(event)
    assert {event: 1}[twin] == 1


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


def test_a_batch_of_users_own_events_is_a_batch() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(1.5, [{"mine": 1}]))) == [1.5, [{"mine": 1}], None]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(1.5, [], 0))) == [1.5, [], 0]


@pytest.mark.parametrize("event", [STORED, BlockRemoved([1], "GPU"), AllBlocksCleared()])
def test_events_go_through_json(event: KVCacheEvent) -> None:
    assert msgspec.json.decode(msgspec.json.encode(KVEventBatch(1.5, [event], 1)), type=KVEventBatch).events == [event]  # type: ignore[list-item]
