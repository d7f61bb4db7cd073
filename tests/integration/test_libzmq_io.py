"""The native module sends and receives the same messages as pyzmq, many in one call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvevents.publisher.event_server import EventServer, EventSocket
from kvevents.publisher.replay_buffer import ReplayBuffer
from kvevents.subscriber.zmq_transport import receive_batches
from kvevents.wire.framing import encode_seq
from kvevents.zeromq.sockets import libzmq_io

TOPIC = b"kv"
LIBZMQ = libzmq_io()

pytestmark = pytest.mark.skipif(LIBZMQ is None, reason="needs the native module, and a pyzmq whose libzmq it finds")


@contextmanager
def pipe() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Yield two connected sockets within the process; all sent messages are available at once."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for socket in (sender, receiver):
            socket.set_hwm(0)
            socket.linger = 0
        receiver.bind("inproc://pipe")
        sender.connect("inproc://pipe")
        yield sender, receiver
    finally:
        context.destroy(linger=0)


def test_native_sending_delivers_topic_number_and_payload_of_every_batch() -> None:
    """The batches include empty and large payloads, and the highest sequence number."""
    batches = [(0, b"first"), (1, b""), (2**63, b"x" * 100_000), (2**64 - 1, b"last")]
    with pipe() as (sender, receiver):
        assert LIBZMQ is not None
        assert LIBZMQ.send(sender.underlying, TOPIC, batches) == 3 * len(batches)
        for number, payload in batches:
            assert receiver.recv_multipart(zmq.DONTWAIT) == [TOPIC, encode_seq(number), payload]
        with pytest.raises(zmq.Again):
            receiver.recv(zmq.DONTWAIT)


def test_refused_frames_are_left_to_pyzmq() -> None:
    """The call returns the number of frames that were sent, so that nothing is lost or sent twice, even in the middle of a
    message."""
    with pipe() as (sender, receiver):
        assert LIBZMQ is not None
        assert LIBZMQ.send(sender.underlying, TOPIC, []) == 0
        sender.disconnect("inproc://pipe")
        sender.setsockopt(zmq.SNDTIMEO, 0)
        assert LIBZMQ.send(sender.underlying, TOPIC, [(0, b"no consumer")]) == 0
        receiver.close()
        with pytest.raises(ValueError, match="closed"):
            LIBZMQ.receive(0, TOPIC, 0, 1, 1)


FRAME = st.sampled_from([b"", TOPIC, b"kv2", *map(encode_seq, range(4)), b"payload"])
MESSAGE = st.one_of(
    st.builds(lambda seq, payload: [TOPIC, encode_seq(seq), payload], st.integers(0, 4), st.binary(max_size=9)),
    st.lists(FRAME, min_size=1, max_size=6),
)


@pytest.mark.parametrize("native", [LIBZMQ, None], ids=["native", "pyzmq"])
@given(messages=st.lists(MESSAGE, max_size=6), lead=st.integers(0, 5), due=st.integers(0, 8), limit=st.integers(0, 9))
def test_a_batch_is_a_whole_message(native: Any, messages: list[list[bytes]], lead: int, due: int, limit: int) -> None:
    """A message with more or fewer frames than topic, sequence number and payload is not a batch."""
    sent = [[TOPIC, encode_seq(seq), b"%d" % seq] for seq in range(lead)] + messages
    expected: list[bytes] = []
    for number, message in enumerate(sent[: min(due, limit)]):
        if len(message) != 3 or message[:2] != [TOPIC, encode_seq(number)]:
            break
        expected.append(message[2])
    with pipe() as (sender, receiver):
        for message in sent:
            sender.send_multipart(message)
        payloads, others, drained = receive_batches(native, receiver, TOPIC, range(due), limit)
        rest = []
        while receiver.poll(0):
            rest.append(receiver.recv_multipart())
    assert (payloads, others, rest) == (expected, sent[len(expected) : limit], sent[limit:])
    assert drained == (limit > len(sent))


def test_one_call_receives_a_limited_number_of_bytes() -> None:
    """So other threads do not wait long. The next call returns the rest."""
    with pipe() as (sender, receiver):
        for seq in range(4):
            sender.send_multipart([TOPIC, encode_seq(seq), bytes(400_000)])
        payloads, others, drained = receive_batches(LIBZMQ, receiver, TOPIC, range(4), 4)
        assert ([len(each) for each in payloads], others, drained) == ([400_000] * 3, [], False)
        payloads, others, drained = receive_batches(LIBZMQ, receiver, TOPIC, range(3, 7), 4)
        assert ([len(each) for each in payloads], others, drained) == ([400_000], [], True)


def test_a_socket_that_cannot_receive_raises() -> None:
    """The exception is that of pyzmq."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        send_only = context.socket(zmq.PUB)
        with pytest.raises(zmq.ZMQError, match="not supported"):
            receive_batches(LIBZMQ, send_only, TOPIC, range(4), 4)
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("native", [True, False])
def test_a_stream_is_the_same_without_native_sending(native: bool) -> None:
    """Without the native module, or with another pyzmq, the frames are the same."""
    server = EventServer("tcp://127.0.0.1:*", buffer=ReplayBuffer(10), topic="kv")
    if not native:
        server.events._native = None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        consumer = context.socket(zmq.SUB)
        consumer.rcvtimeo = 60_000
        consumer.subscribe(b"")
        consumer.connect(server.endpoint)
        while not server.events.subscriptions:
            server.events.poll()
        batches = [(seq, b"%d" % seq) for seq in (3, 4, 9)]
        server.send(batches)
        received = [consumer.recv_multipart() for _ in batches]
        assert received == [[b"kv", encode_seq(seq), payload] for seq, payload in batches]
    finally:
        context.destroy(linger=0)
        server.close()


class _PartialSender:
    """Behaves like a libzmq that refuses the second frame of the second message."""

    def __init__(self, event_socket: EventSocket) -> None:
        self._event_socket = event_socket

    def send(self, socket: int, topic: bytes, batches: list[tuple[int, bytes]]) -> int:
        assert LIBZMQ is not None
        done: int = LIBZMQ.send(socket, topic, batches[:1])
        self._event_socket._socket.send(topic, zmq.SNDMORE)
        return done + 1


def test_pyzmq_completes_a_message_that_was_sent_in_part() -> None:
    """pyzmq sends the rest, beginning with the refused frame."""
    server = EventServer("tcp://127.0.0.1:*", buffer=ReplayBuffer(10), topic="kv")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        consumer = context.socket(zmq.SUB)
        consumer.rcvtimeo = 60_000
        consumer.subscribe(b"")
        consumer.connect(server.endpoint)
        while not server.events.subscriptions:
            server.events.poll()
        event_socket = server.events
        assert isinstance(event_socket, EventSocket)
        event_socket._native = _PartialSender(event_socket)
        batches = [(seq, b"%d" % seq) for seq in range(3)]
        server.send(batches)
        assert [consumer.recv_multipart() for _ in batches] == [[b"kv", encode_seq(seq), payload] for seq, payload in batches]
    finally:
        context.destroy(linger=0)
        server.close()


def test_only_a_loaded_libzmq_is_used() -> None:
    """A file that is not loaded, or that has no libzmq, raises an error with the reason; pyzmq is used instead."""
    code = """
import ctypes, sys
from kvevents_native import _native
for name, loads in (("/nowhere/at/all.so", False), (_native.__file__, True)):
    try:
        _native.Libzmq(name)
    except OSError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    first, second = done.stdout.splitlines()
    assert first == "/nowhere/at/all.so is not loaded"
    assert "does not export zmq_version" in second
