"""`EventServer`, the sockets of a stream without a queue, as a relay uses it from its own thread."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import zmq

from kvevents import Source, Subscriber
from kvevents.errors import EndpointError
from kvevents.events import AllBlocksCleared, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher.event_server import EventServer
from kvevents.publisher.replay_buffer import ReplayBuffer
from kvevents.wire import encode_batch
from publisher_cases import (  # noqa: F401 - a fixture, used by being here
    ANY,
    DEADLINE,
    Socket,
    consumers_context,
    open_consumer,
    wait_until,
)
from publisher_engine import WORKER, Engine, compacting_buffer
from tools.ports import reserve_port

Context = zmq.Context[Socket]


@contextmanager
def serving(buffer: ReplayBuffer, replay: str | None = ANY, **settings: Any) -> Iterator[EventServer]:
    server = EventServer(ANY, replay, buffer=buffer, **settings)
    try:
        yield server
    finally:
        server.close(0.0)


def payloads(seed: int, count: int) -> list[bytes]:
    engine = Engine(seed)
    clear = encode_batch(KVEventBatch(0.0, [AllBlocksCleared()], 0))
    return [clear, *(encode_batch(KVEventBatch(1.0, engine.events(), 0)) for _ in range(count))]


def open_raw_subscriber(endpoint: str) -> socket.socket:
    """Connect as a SUB socket does, without libzmq, and return the connection after its handshake."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    peer = socket.create_connection((host, int(port)), timeout=DEADLINE)
    peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    received = b""
    while len(received) < 64:
        received += peer.recv(64 - len(received))
    ready = b"\x05READY\x0bSocket-Type" + (3).to_bytes(4, "big") + b"SUB"
    peer.sendall(bytes((4, len(ready))) + ready)
    return peer


def test_the_number_of_subscriptions_is_never_negative(context: Context) -> None:
    """A peer may end subscriptions that it never began."""
    with serving(ReplayBuffer(1)) as server, open_raw_subscriber(server.endpoint) as peer:
        peer.sendall(b"\x00\x02\x00a" * 5)
        peer.sendall(b"\x00\x02\x01a")

        def is_subscribed() -> bool:
            server.events.poll()
            assert server.events.subscriptions >= 0
            return server.events.subscriptions == 1

        wait_until(is_subscribed, "the subscription")


def test_a_flood_of_subscriptions_stays_outside_of_memory(context: Context) -> None:
    """They wait in the connection of the peer, which can send no more, while batches are published."""
    payload = payloads(1, 0)[0]
    with serving(ReplayBuffer(1)) as server, open_raw_subscriber(server.endpoint) as peer:
        peer.settimeout(0.0)
        flood, number = (b"\x00\x0b\x01" + b"a" * 10 + b"\x00\x0b\x00" + b"a" * 10) * 1_000, 0
        before, until = memory_kib(), monotonic() + 2.0
        while monotonic() < until:
            with suppress(BlockingIOError):
                while True:
                    peer.send(flood)
            server.send([(number, payload)])
            number += 1
            if number % 50 == 0:
                server.events.poll()
            sleep(0.001)
        assert memory_kib() - before < 8 * 1024


def memory_kib() -> int:
    return int(re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def test_payloads_are_sent_unchanged_with_the_numbers_of_the_caller(context: Context) -> None:
    """The first number is arbitrary, and batches are stored for replay before they are sent."""
    buffer = compacting_buffer(10)
    with serving(buffer, topic="kv") as server:
        subscriber = open_consumer(context, zmq.SUB)
        subscriber.connect(server.endpoint)
        subscriber.subscribe(b"k")

        def is_subscribed() -> bool:
            server.events.poll()
            return server.events.subscriptions == 1

        wait_until(is_subscribed, "the subscription")
        batches = list(enumerate(payloads(0, 3), 7_000))
        server.send(batches)
        assert buffer.batches_from(0) == batches
        for seq, payload in batches:
            assert subscriber.recv_multipart() == [b"kv", seq.to_bytes(8, "big"), payload]


def test_a_subscriber_of_a_restored_stream_becomes_exact() -> None:
    """The buffer is filled from a compacted history before any consumer can connect; live batches follow."""
    sent = list(enumerate(payloads(1, 60), 500))
    first = compacting_buffer(5)
    first.extend(sent[:40])
    history = first.compacted_history()
    assert history is not None
    second = compacting_buffer(5)
    second.restore(*history)
    second.extend([batch for batch in sent[:40] if batch[0] > history.last_seq])
    index, expected = PrefixIndex(), PrefixIndex()
    for batch in sent:
        expected.apply_payload(WORKER, 0, *batch)
    with serving(second) as server:
        source = Source(server.endpoint, server.replay_endpoint, name="engine")
        with Subscriber(source, decode=False) as subscriber:
            remaining = iter(sent[40:])

            def is_exact() -> bool:
                server.events.poll()
                if server.events.subscriptions:
                    server.send([batch for batch in [next(remaining, None)] if batch is not None])
                for delivery in subscriber.receive_many(timeout=0.01):
                    report = index.apply(delivery).report
                    if report is not None:
                        subscriber.report(delivery, report)
                return subscriber.status().last_seq == sent[-1][0] and subscriber.trust().name == "EXACT"

            wait_until(is_exact, "EXACT at the last number")
    assert index.digest(WORKER) == expected.digest(WORKER)


def test_closing_is_bounded_and_may_be_repeated() -> None:
    """The first call reports that everything was flushed; then the ports are free and the server's threads have ended."""
    threads = set(threading.enumerate())
    endpoints = [f"tcp://127.0.0.1:{reserve_port()}" for _ in range(2)]
    server = EventServer(*endpoints, buffer=compacting_buffer(10))
    server.send([(0, b"payload")])
    assert server.close(DEADLINE) is True
    assert server.close(DEADLINE) is None
    assert not set(threading.enumerate()) - threads
    with pytest.raises(EndpointError):
        EventServer("tcp://127.0.0.1:1:2", buffer=ReplayBuffer(0))
    assert not set(threading.enumerate()) - threads
    EventServer(*endpoints, buffer=ReplayBuffer(0)).close(0.0)


def test_a_shared_context_stays_open(context: Context) -> None:
    """Its owner terminates it, which flushes the sockets."""
    server = EventServer(ANY, ANY, buffer=ReplayBuffer(1), context=context)
    assert server.close(DEADLINE) is None
    assert not context.closed
