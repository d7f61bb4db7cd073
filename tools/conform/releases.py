"""Scenarios of what each engine release sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kvevents.events import EventBatch
from kvevents.wire import dialects, encode_batch
from tools.conform.script import A, B, Play, Script, to_json


def _dialect(script: Script) -> None:
    """Stores, removals, a gap that replay fills, and a clear, as one release sends them."""
    engine = script.warm(A, 6)
    engine.remove(A, [4, 5])
    engine.store(A, [4])
    script.check()
    engine.store(A, [5], lost=True)
    engine.store(A, range(6, 10))
    script.settle(1.0)
    script.ask(B)
    engine.store(B, range(5))
    script.check()
    engine.clear()
    engine.store(B, range(3))
    script.check()


def _odd_dialect(change: Callable[[list[Any]], Any]) -> Play:
    """Batches of the newest vLLM as another producer sends them: `change` makes them out of `[ts, events, rank]`."""

    def play(script: Script) -> None:
        engine = script.engine()
        script.follow(engine)
        script.ask(A)
        for events in (
            [engine.stored(A, place) for place in range(10)],
            [engine.removed(A, [8, 9])],
            [engine.stored(A, 8)],
        ):
            payload = encode_batch(EventBatch(script.now(), list(events), 0), script.dialect)
            engine.publish_json(to_json(change(msgspec.msgpack.decode(payload))))
        script.check()

    return play


def _mooncake(batch: list[Any]) -> Any:
    """Mooncake's RFC #1527: both `type` and `event_type`, `seq_hashes`, timestamps in milliseconds."""
    ts, events, rank = batch
    kinds = {"BlockStored": "stored", "BlockRemoved": "removed"}
    changed = []
    for event in events:
        event["event_type"] = kinds[event["type"]]
        event["seq_hashes"] = event.pop("block_hashes")
        if "parent_block_hash" in event:
            event["parent_hash"] = event.pop("parent_block_hash")
        del event["type"]
        changed.append(event)
    return [int(ts * 1000), changed, rank]


def _wide_hashes(batch: list[Any]) -> Any:
    """Hashes as 32 bytes, of which the last 8 are what integers are: vLLM's `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`."""

    def widen(value: int | None) -> bytes | None:
        return None if value is None else bytes(24) + value.to_bytes(8, "big")

    for event in batch[1]:
        event["block_hashes"] = [widen(each) for each in event["block_hashes"]]
        if "parent_block_hash" in event:
            event["parent_block_hash"] = widen(event["parent_block_hash"])
    return batch


def _wrapped(batch: list[Any]) -> Any:
    """Events in a msgpack bin each: llm-d's storage connector."""
    return [batch[0], [msgspec.msgpack.encode(event) for event in batch[1]]]


def _more_keys(batch: list[Any]) -> Any:
    """Keys that no release has yet."""
    for event in batch[1]:
        event |= {"component_types": [1], "later": {"nested": [None, 1.5]}}
    return batch


def releases() -> Iterator[tuple[Script, Play]]:
    for each in dialects():
        release = each.since.replace("@", "-")
        title = f"{each.engine} {each.since}: stores, removals, a gap with replay, a clear"
        yield Script(f"dialect-{each.engine}-{release}", title, "dialects", dialect=each.name), _dialect
    for name, title, change in (
        ("dialect-mooncake", "Mooncake's RFC #1527", _mooncake),
        ("dialect-wide-hashes", "hashes of 32 bytes", _wide_hashes),
        ("dialect-wrapped", "events in a bin each, and batches without a rank (llm-d's storage connector)", _wrapped),
        ("dialect-no-rank", "a rank of nil", lambda batch: [*batch[:2], None]),
        ("dialect-more-keys", "events with unknown keys", _more_keys),
        ("dialect-longer-batch", "batches with a fourth element", lambda batch: [*batch, {"later": 1}]),
    ):
        yield Script(name, title, "dialects"), _odd_dialect(change)
