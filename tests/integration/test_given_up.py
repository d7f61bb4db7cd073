"""Peers that break ZMTP: libzmq never connects to them again, though another may come to their address; we do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import zmq

from kvevents.cli.asking import _request as request
from kvevents.cli.asking import ask, dealers
from kvevents.events import KVEventBatch
from kvevents.publisher import PublisherSettings, ZmqEventPublisher
from kvevents.stream import Batch, FetchRequest, Source
from kvevents.subscriber import Subscriber, ZmqTransport
from kvevents.testing import zmtp
from zmtp_peer import DEADLINE, LIMITS, OPTIONS, PUB, Line, Peer, batch, peer

__all__ = ["peer"]

_MAX = 10_000
XPUB = zmtp.command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x04XPUB\x08Identity\x00\x00\x00\x00")
ROUTER = zmtp.command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00")


def introduces(line: Line, ready: bytes = PUB) -> None:
    """The handshake of any socket, whatever libzmq's release says of itself."""
    line.send(zmtp.GREETING)
    line.read(zmtp.GREETING_BYTES)
    line.send(ready)
    assert line.command()[0] == b"READY"


def publishes(line: Line) -> None:
    """A publisher of one batch."""
    introduces(line)
    line.frame()
    line.send(batch(7))
    line.stays()


def closes(line: Line) -> None:
    """A publisher that ends at once."""
    introduces(line)
    line.frame()


def says_nothing(line: Line) -> None:
    """A listener that ends before it has introduced itself."""


def another_socket(line: Line) -> None:
    """The events' port and that of replay have changed places for once."""
    introduces(line, ROUTER)
    assert line.is_closed()


def other_keys(line: Line) -> None:
    """An engine was started without the keys that others have, or with them."""
    line.send(zmtp.GREETING[:12] + b"PLAIN" + zmtp.GREETING[17:])
    assert line.is_closed()


def too_much(line: Line) -> None:
    """A message beyond what is taken."""
    introduces(line)
    line.send(zmtp.message([b"kv", bytes(8), bytes(_MAX + 1)]))
    assert line.is_closed()


def no_introduction(line: Line) -> None:
    """A greeting of ZMTP, and then something else."""
    line.send(zmtp.GREETING, bytes((zmtp.COMMAND, 5)) + b"\xffjunk")
    assert line.is_closed()


@contextmanager
def libzmqs(reconnect_max_ms: int = OPTIONS.reconnect_max_ms) -> Iterator[ZmqTransport]:
    """A transport that takes no large message."""
    with zmq.Context() as context:
        transport = ZmqTransport(context, replace(OPTIONS, max_message_bytes=_MAX, reconnect_max_ms=reconnect_max_ms))
        transport.wait(0)  # or a connection that ended before the first wait would be taken for one that nobody has read
        yield transport


@pytest.mark.parametrize("breaks", [another_socket, other_keys, too_much, no_introduction])
def test_who_comes_after_a_peer_that_broke_the_protocol_is_heard(
    breaks: Callable[[Line], None], peer: Callable[..., Peer]
) -> None:
    """Twice, so that the new connection is known to be looked after as the first one was."""
    end = time.monotonic() + DEADLINE
    source = Source(peer(breaks, breaks, publishes).endpoint, topic="kv")
    with libzmqs() as transport, Subscriber(source, limits=LIMITS, transport=transport) as subscriber:
        while not isinstance(found := subscriber.receive(timeout=0.1), Batch):
            assert time.monotonic() < end, (found, subscriber.statuses())
        assert found.seq == 7


@pytest.mark.parametrize("ends", [closes, says_nothing])
def test_a_peer_that_only_closes_is_left_to_libzmq(ends: Callable[[Line], None], peer: Callable[..., Peer]) -> None:
    """It connects again by itself, and says so: nothing has to be made anew."""
    source = Source(peer(ends, publishes).endpoint, topic="kv")
    long = int(DEADLINE * 1000)
    with libzmqs(reconnect_max_ms=long) as transport, Subscriber(source, limits=LIMITS, transport=transport) as subscriber:
        (connection,) = transport._connections
        socket = connection._live._sub
        end = time.monotonic() + DEADLINE
        while not isinstance(subscriber.receive(timeout=0.1), Batch):
            assert time.monotonic() < end, subscriber.statuses()
        assert connection._live._sub is socket
        assert connection.deadline() is None


def no_replay_endpoint(line: Line) -> None:
    """A DEALER's peer that is an XPUB."""
    introduces(line, XPUB)
    assert line.is_closed()


def test_a_replay_request_that_cannot_be_sent_is_made_on_another_connection(peer: Callable[..., Peer]) -> None:
    """A DEALER whose connection is given up takes nothing more, at once or ever."""
    asked = peer(no_replay_endpoint, Line.stays)
    made = ZmqTransport(options=OPTIONS)
    connection = made.open(Source("tcp://127.0.0.1:1", asked.endpoint))
    try:
        connection.request_replay(FetchRequest(0, new_connection=True))
        end = time.monotonic() + DEADLINE
        while len(asked.times) < 2:
            assert time.monotonic() < end
            made.wait(0.01)
            connection.request_replay(FetchRequest(0, new_connection=False))
    finally:
        made.close()


def test_asking_a_peer_that_has_broken_the_protocol_waits_for_nothing(peer: Callable[..., Peer]) -> None:
    """`doctor` asks whatever it is told to."""
    with dealers([peer(no_replay_endpoint).endpoint]) as (socket,):
        end = time.monotonic() + DEADLINE
        while socket.poll(10, zmq.POLLOUT) and time.monotonic() < end:
            pass
        assert not socket.poll(0, zmq.POLLOUT)
        request(socket, 0)
    endpoint = peer(no_replay_endpoint, no_replay_endpoint).endpoint
    assert not ask(endpoint, 0, silence=0.1, seconds=1).answered


def test_a_publisher_that_connects_comes_back_to_who_listens(peer: Callable[..., Peer]) -> None:
    """An engine that connects to a router outlives whatever listened at the router's address before."""
    heard = threading.Event()

    def router(line: Line) -> None:
        introduces(line, zmtp.command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x03SUB"))
        line.send(zmtp.command(b"SUBSCRIBE", b""))
        assert line.read(1)
        heard.set()
        line.stays()

    endpoint = peer(another_socket, another_socket, router).endpoint
    publisher = ZmqEventPublisher(endpoint=endpoint, bind=False, settings=PublisherSettings(reconnect_delay=0.05))
    try:
        end = time.monotonic() + DEADLINE
        while not heard.wait(0.02):
            assert time.monotonic() < end, publisher.stats()
            publisher.publish(KVEventBatch(0.0, []))
    finally:
        publisher.shutdown(0)
