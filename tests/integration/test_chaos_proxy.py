"""Faults of `kvevents.testing.FaultProxy`: half-open connections, reordered messages, injected messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import zmq

from kvevents.errors import ConfigError
from kvevents.testing import FaultProxy
from kvevents.testing.zmtp import ZmtpSplitter, encode_message

SECONDS = 60
"""Deadline of every wait."""

Socket = zmq.Socket[bytes]


class ProxiedPush:
    """A PUSH socket behind a proxy, and PULL sockets that connect through it."""

    def __init__(self) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self.pulling: list[Socket] = []
        self.sender = self.context.socket(zmq.PUSH)
        self.sender.bind("tcp://127.0.0.1:*")
        self.proxy = FaultProxy(self.sender.get_string(zmq.LAST_ENDPOINT))

    def pull(self) -> Socket:
        puller = self.context.socket(zmq.PULL)
        self.pulling.append(puller)
        puller.connect(self.proxy.endpoint)
        return puller

    def close(self) -> None:
        self.proxy.close()
        self.context.destroy(linger=0)


@pytest.fixture
def proxied_push() -> Iterator[ProxiedPush]:
    proxied = ProxiedPush()
    yield proxied
    proxied.close()


def receive(socket: Socket) -> list[bytes]:
    assert socket.poll(1000 * SECONDS), "no message arrived"
    return socket.recv_multipart()


@pytest.mark.parametrize("frames", [[b"a"], [b"", b"b" * 255, b"c" * 256], [b"x" * 70_000]])
def test_an_encoded_message_is_split_into_its_frames(frames: list[bytes]) -> None:
    """`ZmtpSplitter` reads what `encode_message` encodes as one message of these frames."""
    splitter = ZmtpSplitter()
    splitter.feed(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    (piece,) = splitter.feed(encode_message(frames))
    assert list(piece.frames) == frames


def test_half_open_connections_carry_nothing_and_new_ones_work(proxied_push: ProxiedPush) -> None:
    """The old connection stays open and carries nothing, also after `heal`. New connections work."""
    old = proxied_push.pull()
    proxied_push.sender.send(b"before")
    assert receive(old) == [b"before"]
    proxied_push.proxy.half_open()
    fresh = proxied_push.pull()
    assert proxied_push.proxy.wait_until(lambda counts: counts.connections == 2, SECONDS)
    proxied_push.proxy.heal()
    deadline = time.monotonic() + SECONDS
    while not fresh.poll(10):
        # PUSH alternates between its connections as soon as the handshake is done; what it sends to the old one never arrives.
        assert time.monotonic() < deadline
        proxied_push.sender.send(b"after")
    assert not old.poll(0)
    assert proxied_push.proxy.counts.open == 2


def test_a_stall_is_not_ended_by_half_open(proxied_push: ProxiedPush) -> None:
    """Connections that are made during a stall wait for `resume`."""
    proxied_push.proxy.stall()
    proxied_push.proxy.half_open()
    puller = proxied_push.pull()
    assert not proxied_push.proxy.wait_until(lambda counts: counts.connections > 0, 0.05)
    proxied_push.proxy.resume()
    proxied_push.sender.send(b"late")
    assert receive(puller) == [b"late"]


def test_messages_are_swapped(proxied_push: ProxiedPush) -> None:
    """A swapped message arrives after the next one. No message is lost, and the swaps are counted."""
    puller = proxied_push.pull()
    proxied_push.sender.send(b"first")
    assert receive(puller) == [b"first"]
    proxied_push.proxy.stall()
    sent = [b"%03d" % number for number in range(100)]
    for frame in sent:
        proxied_push.sender.send(frame)
    proxied_push.proxy.reorder(0.3, seed=7)
    proxied_push.proxy.resume()
    received = [receive(puller)[0] for _ in sent]
    assert sorted(received) == sent
    assert received != sent
    assert proxied_push.proxy.counts.down.swapped >= sum(early > late for early, late in pairwise(received)) > 0


def test_all_messages_are_swapped_in_pairs(proxied_push: ProxiedPush) -> None:
    """Messages that arrive together are swapped in pairs; the last one of an odd number is not swapped."""
    puller = proxied_push.pull()
    proxied_push.sender.send(b"first")
    assert receive(puller) == [b"first"]
    proxied_push.proxy.reorder(1.0)
    proxied_push.sender.send(b"alone")
    assert receive(puller) == [b"alone"]
    proxied_push.proxy.heal()
    proxied_push.sender.send(b"a")
    assert receive(puller) == [b"a"]
    assert proxied_push.proxy.counts.down.swapped == 1


def test_a_message_is_injected_between_others(proxied_push: ProxiedPush) -> None:
    """Only connections that have carried a message get it; on others it would break the handshake."""
    puller = proxied_push.pull()
    assert proxied_push.proxy.wait_until(lambda counts: counts.open == 1, SECONDS)
    proxied_push.proxy.inject([b"too early"])
    proxied_push.sender.send(b"before")
    assert receive(puller) == [b"before"]
    proxied_push.proxy.inject([b"", b"of", b"x" * 300])
    proxied_push.sender.send(b"after")
    assert [receive(puller), receive(puller)] == [[b"", b"of", b"x" * 300], [b"after"]]
    assert proxied_push.proxy.counts.down.injected == 1


def test_invalid_arguments_are_refused(proxied_push: ProxiedPush) -> None:
    with pytest.raises(ConfigError, match="share"):
        proxied_push.proxy.reorder(1.5)
    with pytest.raises(ConfigError, match="without frames"):
        proxied_push.proxy.inject([])
    with pytest.raises(ConfigError, match="duration nan"):
        proxied_push.proxy.delay(float("nan"))
