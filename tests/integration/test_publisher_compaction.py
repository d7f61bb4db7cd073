"""Tests of compacted history over real sockets: a consumer that requests it is exact."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvevents import Source, Subscriber
from kvevents.compat import sglang, vllm
from kvevents.config import KVEventsConfig
from kvevents.errors import MissingDependencyError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher import EventPublisherFactory, ZmqEventPublisher
from kvevents.publisher.compaction import Compactor
from kvevents.publisher.replay_buffer import ReplayBuffer
from kvevents.publisher.settings import ReplayBufferSettings
from kvevents.stream import DegradedReason, RawBatch
from kvevents.testing import FaultProxy
from kvevents.wire import decode_batch, encode_batch
from publisher_cases import (  # noqa: F401 - fixtures must be imported
    ANY,
    DEADLINE,
    QUICK,
    Socket,
    batch,
    connect_dealer,
    consumers_context,
    numbers,
    read_reply,
    request_replay,
    run_publisher,
    wait_until,
)
from publisher_engine import WORKER, Engine

Context = zmq.Context[Socket]


def fill(publisher: ZmqEventPublisher, engine: Engine, count: int) -> list[KVEventBatch]:
    batches = [KVEventBatch(float(number), engine.events()) for number in range(count)]
    for each in batches:
        publisher.publish(each)
    wait_until(lambda: publisher.stats().queued == 0, "all to be published")
    return batches


def index_batches(batches: list[KVEventBatch]) -> PrefixIndex:
    index = PrefixIndex()
    for seq, each in enumerate(batches):
        index.apply_payload(WORKER, 0, seq, encode_batch(each))
    return index


def index_reply(reply: list[tuple[int, bytes]]) -> PrefixIndex:
    index = PrefixIndex()
    for seq, payload in reply:
        index.apply_payload(WORKER, 0, seq, payload)
    return index


def apply_without_snapshots(reply: list[tuple[int, bytes]]) -> set[int]:
    """Return the blocks of a consumer that applies three kinds of events and does not know snapshots, like vLLM's example."""
    held: Counter[int] = Counter()
    for _, payload in reply:
        for event in decode_batch(payload).batch.events:
            if isinstance(event, BlockStored):
                held.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                held.subtract(event.block_hashes)
            else:
                held.clear()
    return set(held.elements())


@pytest.mark.parametrize("dialect", [None, "vllm-0.10.2", "vllm-0.24", "sglang-0.5.9", "sglang-latest"])
def test_a_request_from_before_the_buffer_gets_a_snapshot_first(context: Context, dialect: str | None) -> None:
    """The snapshot has the number of the last batch it contains. With it an index, and a consumer that does not know snapshots,
    are exact."""
    engine = Engine()
    with run_publisher(replay_endpoint=ANY, buffer_steps=20, dialect=dialect) as publisher:
        batches = fill(publisher, engine, 200)
        replay = connect_dealer(context, publisher)
        for start, first in ((0, 179), (179, 179), (180, 180), (195, 195)):
            request_replay(replay, start)
            reply = read_reply(replay)
            assert numbers(reply) == list(range(first, 200))
            if first == 179:
                assert apply_without_snapshots(reply) == engine.live
                assert index_reply(reply).digest(WORKER) == index_batches(batches).digest(WORKER)
        history = publisher.stats().history
        assert history is not None
        assert (history.batches, history.unavailable_reason) == (180, None)
        assert 0 < history.blocks <= 12


def test_a_late_subscriber_is_exact() -> None:
    """A subscriber that connects after the buffer has overflowed becomes EXACT."""
    with run_publisher(replay_endpoint=ANY, buffer_steps=10) as publisher:
        batches = fill(publisher, Engine(1), 500)
        index = PrefixIndex()
        with Subscriber(Source(publisher.endpoint, publisher.replay_endpoint, name="engine"), decode=False) as subscriber:
            confirm(publisher, subscriber, index, 499)
        assert index.digest(WORKER) == index_batches(batches).digest(WORKER)


def test_a_subscriber_is_exact_after_a_long_disconnect() -> None:
    """During the disconnect, many times the size of the buffer is published."""
    engine = Engine(2)
    with run_publisher(replay_endpoint=ANY, buffer_steps=10) as publisher, FaultProxy(publisher.endpoint) as proxy:
        batches = fill(publisher, engine, 50)
        index = PrefixIndex()
        with Subscriber(Source(proxy.endpoint, publisher.replay_endpoint, name="engine"), decode=False) as subscriber:
            last = confirm(publisher, subscriber, index, 49)
            proxy.cut(refuse=True)
            batches += fill(publisher, engine, 300)
            proxy.heal()
            confirm(publisher, subscriber, index, last + 300)
        assert index.digest(WORKER) == index_batches(batches).digest(WORKER)


def follow(subscriber: Subscriber[RawBatch], index: PrefixIndex, last: int, trust: str = "EXACT") -> None:
    """Apply deliveries until the stream has `trust` at number `last`."""

    def has_trust() -> bool:
        for delivery in subscriber.receive_many(timeout=0.05):
            subscriber.report(delivery, index.apply(delivery).report)
        return subscriber.status().last_seq == last and subscriber.trust().name == trust

    wait_until(has_trust, f"{trust} at {last}")


def confirm(publisher: ZmqEventPublisher, subscriber: Subscriber[RawBatch], index: PrefixIndex, last: int) -> int:
    """Follow to number `last`, then publish empty batches until live batches confirm it as EXACT. Return the newest number."""
    follow(subscriber, index, last, "DEGRADED")
    newest = last

    def has_trust() -> bool:
        nonlocal newest
        for delivery in subscriber.receive_many(timeout=0.05):
            subscriber.report(delivery, index.apply(delivery).report)
        status = subscriber.status()
        assert status.degraded_reasons <= {DegradedReason.REPLAY_UNPROVEN}
        if status.trust.name == "DEGRADED" and status.last_seq == newest:
            publisher.publish(KVEventBatch(0.0, []))
            newest += 1
        return status.trust.name == "EXACT" and status.last_seq == newest

    wait_until(has_trust, f"EXACT at {newest}")
    return newest


def test_a_late_subscriber_sees_a_batch_that_was_never_sent(context: Context) -> None:
    """The snapshot ends before the missing number, so every consumer sees the gap, until a clear leaves the buffer."""
    with run_publisher(replay_endpoint=ANY, buffer_steps=2) as publisher:
        sent = fill(publisher, Engine(3), 3)
        publisher.publish(KVEventBatch(0.0, [object()]))  # type: ignore[list-item] # it cannot be encoded
        sent += fill(publisher, Engine(4), 5)
        replay = connect_dealer(context, publisher)
        request_replay(replay, 0)
        assert numbers(read_reply(replay)) == [2, 6, 7, 8]
        history = publisher.stats().history
        assert history is not None
        assert (history.partial, history.unavailable_reason) == (True, None)
        index = PrefixIndex()
        with Subscriber(Source(publisher.endpoint, publisher.replay_endpoint, name="engine"), decode=False) as subscriber:
            follow(subscriber, index, 8, "DEGRADED")
            assert index.digest(WORKER) == index_batches(sent).digest(WORKER)
            assert "batches are permanently lost" in subscriber.trust().reason
        publisher.publish(KVEventBatch(0.0, [AllBlocksCleared()]))
        batches = fill(publisher, Engine(5), 5)
        request_replay(replay, 0)
        reply = read_reply(replay)
        assert numbers(reply) == [12, 13, 14]
        assert index_reply(reply).digest(WORKER) == index_batches(batches).digest(WORKER)
        late = PrefixIndex()
        with Subscriber(Source(publisher.endpoint, publisher.replay_endpoint, name="engine"), decode=False) as subscriber:
            confirm(publisher, subscriber, late, 14)
        assert late.digest(WORKER) == index_batches(batches).digest(WORKER)


def test_a_returning_subscriber_replaces_its_state_after_a_loss() -> None:
    """It was exact until its connection was cut; then a number is never sent and leaves the buffer. No block is counted
    twice."""
    with run_publisher(replay_endpoint=ANY, buffer_steps=2) as publisher, FaultProxy(publisher.endpoint) as proxy:
        batches = fill(publisher, Engine(6), 20)
        index = PrefixIndex()
        with Subscriber(Source(proxy.endpoint, publisher.replay_endpoint, name="engine"), decode=False) as subscriber:
            last = confirm(publisher, subscriber, index, 19)
            proxy.cut(refuse=True)
            publisher.publish(KVEventBatch(0.0, [object()]))  # type: ignore[list-item] # it cannot be encoded
            batches += fill(publisher, Engine(7), 20)
            proxy.heal()
            follow(subscriber, index, last + 21, "DEGRADED")
        assert index.digest(WORKER) == index_batches(batches).digest(WORKER)


def test_a_snapshot_that_is_too_large_is_not_sent(context: Context) -> None:
    """Subscribers receive the buffered batches, and the statistics have the reason."""
    settings = replace(QUICK, buffer=ReplayBufferSettings(max_payload_bytes=10))
    with run_publisher(replay_endpoint=ANY, buffer_steps=2, settings=settings) as publisher:
        fill(publisher, Engine(), 10)
        replay = connect_dealer(context, publisher)
        request_replay(replay, 0)
        assert numbers(read_reply(replay)) == [8, 9]
        history = publisher.stats().history
        assert history is not None
        assert history.unavailable_reason == "oversized"


# --- enabling and disabling


def test_compaction_is_on_in_the_drop_in_modules() -> None:
    """An engine that uses them serves late consumers like the publisher of kvevents."""
    publishers: list[Any] = [vllm.ZmqEventPublisher(0, ANY, ANY), sglang.ZmqEventPublisher(0, ANY, ANY)]
    for publisher in publishers:
        assert publisher.stats().history is not None
        publisher.shutdown()


def test_compaction_can_be_disabled() -> None:
    """It is off with `compact=False`, as an argument and in a configuration, and without a replay endpoint."""
    for settings in ({"replay_endpoint": ANY, "compact": False}, {}):
        with run_publisher(**settings) as publisher:
            assert publisher.stats().history is None
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=ANY, replay_endpoint=ANY, compact=False)
    made: Any = EventPublisherFactory.create(config)
    assert made.stats().history is None
    made.shutdown()


def test_a_consumer_like_the_engines_example_joins_late_and_is_exact(context: Context) -> None:
    """The test runs the loop of vLLM's example on a DEALER, with vLLM's event types: it requests from 0 and reads every batch
    of the reply. The consumer does not know snapshots; it applies stores, removals and clears in order, and has the blocks of
    the engine."""
    publisher = vllm.ZmqEventPublisher(0, ANY, ANY, buffer_steps=20)
    resident: set[int] = set()
    for number in range(200):
        stored = vllm.BlockStored([number], None, [number], 1, None, "GPU", None)
        removed = sorted(resident)[:1] if number % 3 else []
        publisher.publish(vllm.KVEventBatch(float(number), [stored, vllm.BlockRemoved(list(removed), "GPU")]))
        resident = (resident | {number}) - set(removed)
    wait_until(lambda: publisher.stats().published == 200, "everything to be published")
    decoder = msgspec.msgpack.Decoder(type=vllm.KVEventBatch)
    found: set[Any] = set()
    replay = connect_dealer(context, publisher)
    request_replay(replay, 0)
    reply = read_reply(replay)
    assert numbers(reply)[-1] == 199
    for _, payload in reply:
        for event in decoder.decode(payload).events:
            match event:
                case vllm.BlockStored():
                    found.update(event.block_hashes)
                case vllm.BlockRemoved():
                    found.difference_update(event.block_hashes)
                case vllm.AllBlocksCleared():
                    found.clear()
    assert found == resident
    publisher.shutdown()


def test_a_reply_has_a_snapshot_and_exactly_the_buffered_batches(context: Context) -> None:
    """The reply has `buffer_steps` batches as they were sent and a snapshot of all others, even if evicted batches wait for
    compaction."""
    with run_publisher(replay_endpoint=ANY, buffer_steps=1_000) as publisher:
        for number in range(1_010):
            publisher.publish(batch(number))
        wait_until(lambda: publisher.stats().published == 1_010, "everything to be published")
        replay = connect_dealer(context, publisher)
        request_replay(replay, 0)
        assert numbers(read_reply(replay)) == list(range(9, 1_010))


def test_compaction_needs_the_native_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the module it is off by default, and `compact=True` is an error."""
    monkeypatch.setitem(sys.modules, "kvevents_native._native", None)
    with run_publisher(replay_endpoint=ANY) as publisher:
        assert publisher.stats().history is None
    with pytest.raises(MissingDependencyError, match="compact=True needs the package kvevents-native"):
        ZmqEventPublisher(endpoint=ANY, replay_endpoint=ANY, compact=True)


# --- against a model


@given(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(0, 2**16), st.data())
def test_any_request_at_any_time_has_an_exact_reply(steps: int, bursts: list[int], seed: int, drawn: st.DataObject) -> None:
    """Bursts and requests alternate at random; every reply leads to the state of a consumer that saw every batch."""
    history = Compactor.create()
    assert history is not None
    buffer, engine = ReplayBuffer(steps, history, encode_batch), Engine(seed)
    batches: list[KVEventBatch] = []
    for burst in bursts:
        fresh = [KVEventBatch(1.0, engine.events()) for _ in range(burst)]
        buffer.extend([(seq, encode_batch(batch)) for seq, batch in enumerate(fresh, len(batches))])
        batches += fresh
        start = drawn.draw(st.integers(0, len(batches)))
        reply = buffer.batches_from(start)
        oldest = max(0, len(batches) - steps)
        assert numbers(reply) == list(range(max(start, oldest) if start >= oldest else oldest - 1, len(batches)))
        if start < oldest:
            assert index_reply(reply).digest(WORKER) == index_batches(batches).digest(WORKER)
            assert apply_without_snapshots(reply) == engine.live
        else:
            assert [payload for _, payload in reply] == [encode_batch(batch) for batch in batches[start:]]
