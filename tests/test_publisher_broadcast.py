"""A stream's sockets without a queue before them: what a relay sends with, from its own thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from kvevents import Source, Subscriber
from kvevents.errors import EndpointError
from kvevents.events import AllBlocksCleared, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher.broadcast import Broadcast
from kvevents.publisher.buffer import ReplayBuffer
from kvevents.wire import encode_batch
from publisher_cases import (  # noqa: F401 - a fixture, used by being here
    ANY,
    DEADLINE,
    Socket,
    consumers_context,
    open_consumer,
    wait_until,
)
from publisher_engine import WORKER, Engine

Context = zmq.Context[Socket]


@contextmanager
def broadcasting(buffer: ReplayBuffer, replay: str | None = ANY, **settings: Any) -> Iterator[Broadcast]:
    broadcast = Broadcast(ANY, replay, buffer=buffer, **settings)
    try:
        yield broadcast
    finally:
        broadcast.close(0.0)


def payloads(seed: int, count: int) -> list[bytes]:
    engine = Engine(seed)
    clear = encode_batch(KVEventBatch(0.0, [AllBlocksCleared()], 0))
    return [clear, *(encode_batch(KVEventBatch(1.0, engine.events(), 0)) for _ in range(count))]


def test_payloads_go_out_as_they_are_under_the_callers_numbers(context: Context) -> None:
    """From any number on, and are kept first."""
    buffer = ReplayBuffer.collapsing(10)
    with broadcasting(buffer, topic="kv") as broadcast:
        subscriber = open_consumer(context, zmq.SUB)
        subscriber.connect(broadcast.endpoint)
        subscriber.subscribe(b"k")

        def subscribed() -> bool:
            broadcast.look_around()
            return broadcast.subscribers == 1

        wait_until(subscribed, "the subscription")
        batches = list(enumerate(payloads(0, 3), 7_000))
        broadcast.send(batches)
        assert buffer.since(0) == batches
        for seq, payload in batches:
            assert subscriber.recv_multipart() == [b"kv", seq.to_bytes(8, "big"), payload]


def test_a_subscriber_is_exact_with_a_stream_that_goes_on_in_another_life() -> None:
    """The buffer is filled from what was collapsed before anybody can ask; live batches follow."""
    sent = list(enumerate(payloads(1, 60), 500))
    first = ReplayBuffer.collapsing(5)
    first.extend(sent[:40])
    collapsed = first.collapse()
    assert collapsed is not None
    second = ReplayBuffer.collapsing(5)
    second.resume(*collapsed, [batch for batch in sent[:40] if batch[0] > collapsed.number], rank=0)
    index, expected = PrefixIndex(), PrefixIndex()
    for batch in sent:
        expected.apply_payload(WORKER, 0, *batch)
    with broadcasting(second) as broadcast:
        source = Source(broadcast.endpoint, broadcast.replay_endpoint, name="engine")
        with Subscriber(source, decode=False) as subscriber:
            left = iter(sent[40:])

            def there() -> bool:
                broadcast.look_around()
                if broadcast.subscribers:
                    broadcast.send([batch for batch in [next(left, None)] if batch is not None])
                for delivery in subscriber.receive_many(timeout=0.01):
                    findings = index.apply(delivery).findings
                    if findings is not None:
                        subscriber.report(delivery, findings)
                return subscriber.status().last_seq == sent[-1][0] and subscriber.trust().name == "EXACT"

            wait_until(there, "EXACT at the last number")
    assert index.digest(WORKER) == expected.digest(WORKER)


def test_a_barrier_is_wanted_and_sent_by_the_caller(context: Context) -> None:
    """Under the caller's number; without such an endpoint nobody wants one, and it is a batch like any other."""
    with broadcasting(ReplayBuffer.collapsing(10), snapshot_endpoint=ANY, rank=3, incarnation=11) as broadcast:
        broadcast.send(list(enumerate(payloads(2, 3))))
        assert not broadcast.wants_cut
        reader = open_consumer(context, zmq.DEALER)
        assert broadcast.snapshot_endpoint is not None
        reader.connect(broadcast.snapshot_endpoint)
        reader.send_multipart([b"", b"snapshot-v1"])
        wait_until(lambda: broadcast.wants_cut, "a request")
        broadcast.cut(4, encode_batch(KVEventBatch(0.0, [], 3)))
        assert reader.recv_multipart()[1] == b"header"
        assert broadcast.snapshot_stats().requests == 1
    buffer = ReplayBuffer.collapsing(10)
    with broadcasting(buffer) as broadcast:
        assert not broadcast.wants_cut
        broadcast.cut(0, b"payload")
        assert buffer.since(0) == [(0, b"payload")]


def test_closing_is_bounded_and_may_be_repeated() -> None:
    """Everything flushed is said, once; the ports are free afterwards, and the threads gone."""
    threads = threading.active_count()
    broadcast = Broadcast(ANY, ANY, buffer=ReplayBuffer.collapsing(10), snapshot_endpoint=ANY)
    ends = broadcast.endpoint, broadcast.replay_endpoint
    broadcast.send([(0, b"payload")])
    assert broadcast.close(DEADLINE) is True
    assert broadcast.close(DEADLINE) is None
    assert threading.active_count() == threads
    with pytest.raises(EndpointError):
        Broadcast("tcp://127.0.0.1:1:2", buffer=ReplayBuffer(0))
    assert threading.active_count() == threads
    Broadcast(*ends, buffer=ReplayBuffer(0)).close(0.0)


def test_a_given_context_is_left_alone(context: Context) -> None:
    """Its owner ends it, and flushes."""
    broadcast = Broadcast(ANY, ANY, buffer=ReplayBuffer(1), context=context)
    assert broadcast.close(DEADLINE) is None
    assert not context.closed
