"""libzmq never reconnects to a peer that violated ZMTP, so the transport opens a new socket for its successor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq
from msgspec.structs import replace

from kvevents.diagnosis.replay_sample import Timeouts, sample_replay, send_request
from kvevents.events import KVEventBatch
from kvevents.publisher import PublisherSettings, ZmqEventPublisher
from kvevents.stream import Batch, FetchRequest, Source
from kvevents.subscriber import Subscriber, ZmqTransport
from kvevents.subscriber.zmq_transport import LiveSocket, ZmqConnection
from kvevents.testing import zmtp
from zmtp_peer import DEADLINE, GREETING, LIMITS, OPTIONS, PUB, Peer, PeerConnection, batch, command, peer

__all__ = ["peer"]

_MAX = 10_000
XPUB = command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x04XPUB\x08Identity\x00\x00\x00\x00")
ROUTER = command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00")


def complete_handshake(line: PeerConnection, ready: bytes = PUB) -> None:
    """Complete the handshake as a socket of the type that `ready` names."""
    line.send(GREETING)
    line.read(zmtp.GREETING_BYTES)
    line.send(ready)
    assert line.command()[0] == b"READY"


def publish_batch(line: PeerConnection) -> None:
    """Complete the handshake as a publisher, then publish one batch."""
    complete_handshake(line)
    line.frame()
    line.send(batch(7))
    line.stay_open()


def close_after_handshake(line: PeerConnection) -> None:
    """Complete the handshake as a publisher, then close."""
    complete_handshake(line)
    line.frame()


def close_at_once(line: PeerConnection) -> None:
    """Close before the handshake."""


def act_as_router(line: PeerConnection) -> None:
    """Complete the handshake as a ROUTER, as if the ports of events and replay were swapped."""
    complete_handshake(line, ROUTER)
    assert line.is_closed()


def demand_other_mechanism(line: PeerConnection) -> None:
    """Demand the security mechanism PLAIN."""
    line.send(GREETING[:12] + b"PLAIN" + GREETING[17:])
    assert line.is_closed()


def send_too_large_message(line: PeerConnection) -> None:
    """Send a message above the limit."""
    complete_handshake(line)
    line.send(zmtp.encode_message([b"kv", bytes(8), bytes(_MAX + 1)]))
    assert line.is_closed()


def send_invalid_handshake(line: PeerConnection) -> None:
    """Send a ZMTP greeting, then garbage."""
    line.send(GREETING, bytes((zmtp.COMMAND_FLAG, 5)) + b"\xffjunk")
    assert line.is_closed()


@contextmanager
def small_transport(reconnect_max_ms: int = OPTIONS.reconnect_max_ms) -> Iterator[ZmqTransport]:
    """Provide a transport that accepts no message above `_MAX` bytes."""
    with zmq.Context() as context:
        transport = ZmqTransport(context, replace(OPTIONS, max_message_bytes=_MAX, reconnect_max_ms=reconnect_max_ms))
        transport.wait(0)  # without it, a connection that ends before the first wait counts as one that was never read
        yield transport


@pytest.mark.parametrize("violate", [act_as_router, demand_other_mechanism, send_too_large_message, send_invalid_handshake])
def test_the_successor_of_a_peer_that_violated_zmtp_is_followed(
    violate: Callable[[PeerConnection], None], peer: Callable[..., Peer]
) -> None:
    """Two peers violate ZMTP in turn. So the second socket must be watched as the first socket was."""
    end = time.monotonic() + DEADLINE
    source = Source(peer(violate, violate, publish_batch).endpoint, topic="kv")
    with small_transport() as transport, Subscriber(source, limits=LIMITS, transport=transport) as subscriber:
        while not isinstance(found := subscriber.receive(timeout=0.1), Batch):
            assert time.monotonic() < end, (found, subscriber.statuses())
        assert found.seq == 7


@pytest.mark.parametrize("close_connection", [close_after_handshake, close_at_once])
def test_a_peer_that_only_closes_is_left_to_libzmq(
    close_connection: Callable[[PeerConnection], None], peer: Callable[..., Peer]
) -> None:
    """libzmq reconnects to a peer that closes the connection, so the transport opens no new socket."""
    source = Source(peer(close_connection, publish_batch).endpoint, topic="kv")
    long = int(DEADLINE * 1000)
    with (
        small_transport(reconnect_max_ms=long) as transport,
        Subscriber(source, limits=LIMITS, transport=transport) as subscriber,
    ):
        (connection,) = transport._connections
        assert isinstance(connection, ZmqConnection)
        live = connection._live
        assert isinstance(live, LiveSocket)
        socket = live._sub
        end = time.monotonic() + DEADLINE
        while not isinstance(subscriber.receive(timeout=0.1), Batch):
            assert time.monotonic() < end, subscriber.statuses()
        assert live._sub is socket
        assert connection.deadline() is None


def act_as_xpub(line: PeerConnection) -> None:
    """Complete the handshake as an XPUB where a DEALER expects a ROUTER."""
    complete_handshake(line, XPUB)
    assert line.is_closed()


def test_a_replay_request_that_cannot_be_sent_takes_a_new_connection(peer: Callable[..., Peer]) -> None:
    """A DEALER accepts no more messages when libzmq has given up its connection, so the transport opens a new one."""
    violated = threading.Event()

    def violate(line: PeerConnection) -> None:
        act_as_xpub(line)
        violated.set()

    replay_peer = peer(violate, PeerConnection.stay_open)
    zmq_transport = ZmqTransport(options=OPTIONS)
    connection = zmq_transport.open(Source("tcp://127.0.0.1:1", replay_peer.endpoint))
    try:
        connection.request_replay(FetchRequest(0, needs_new_connection=True))
        assert violated.wait(DEADLINE)  # requests that wait for the handshake would open a new connection too
        end = time.monotonic() + DEADLINE
        while len(replay_peer.times) < 2:
            assert time.monotonic() < end
            zmq_transport.wait(0.01)
            connection.request_replay(FetchRequest(0, needs_new_connection=False))
    finally:
        zmq_transport.close()


def test_doctor_does_not_wait_for_a_peer_that_violated_zmtp(peer: Callable[..., Peer]) -> None:
    """`doctor` may be given any endpoint. It reports within its time limit that there was no answer."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(peer(act_as_xpub).endpoint)
        end = time.monotonic() + DEADLINE
        while socket.poll(10, zmq.POLLOUT) and time.monotonic() < end:
            pass
        assert not socket.poll(0, zmq.POLLOUT)
        send_request(socket, 0)
    endpoint = peer(act_as_xpub, act_as_xpub).endpoint
    assert not sample_replay(endpoint, (0,), Timeouts(silence=0.1, seconds=1.0), None).is_answered


def test_a_connecting_publisher_reconnects_after_a_zmtp_violation(peer: Callable[..., Peer]) -> None:
    """An engine that connects to a router reconnects after other sockets have listened at the address of the router."""
    received = threading.Event()

    def router(line: PeerConnection) -> None:
        complete_handshake(line, command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x03SUB"))
        line.send(command(b"SUBSCRIBE", b""))
        assert line.read(1)
        received.set()
        line.stay_open()

    endpoint = peer(act_as_router, act_as_router, router).endpoint
    publisher = ZmqEventPublisher(endpoint=endpoint, bind=False, settings=PublisherSettings(reconnect_delay=0.05))
    try:
        end = time.monotonic() + DEADLINE
        while not received.wait(0.02):
            assert time.monotonic() < end, publisher.stats()
            publisher.publish(KVEventBatch(0.0, []))
    finally:
        publisher.shutdown(0)
