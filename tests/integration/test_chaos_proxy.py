"""Faults of `kvevents.testing.FaultProxy` for the chaos suites: half-open connections, reordering, injected messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import zmq

from kvevents.errors import ConfigError
from kvevents.testing import FaultProxy
from kvevents.zmtp import ZmtpSplitter, message

SECONDS = 10
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
def line() -> Iterator[ProxiedPush]:
    made = ProxiedPush()
    yield made
    made.close()


def receive(socket: Socket) -> list[bytes]:
    assert socket.poll(1000 * SECONDS), "nothing came"
    return socket.recv_multipart()


@pytest.mark.parametrize("frames", [[b"a"], [b"", b"b" * 255, b"c" * 256], [b"x" * 70_000]])
def test_an_encoded_message_is_split_into_its_frames(frames: list[bytes]) -> None:
    """`ZmtpSplitter` reads what `message` encodes as one message of these frames."""
    splitter = ZmtpSplitter()
    splitter.feed(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    (piece,) = splitter.feed(message(frames))
    assert list(piece.frames) == frames


def test_half_open_connections_carry_nothing_and_new_ones_work(line: ProxiedPush) -> None:
    """The old connection stays open and carries nothing, also after `heal`. New connections work."""
    old = line.pull()
    line.sender.send(b"before")
    assert receive(old) == [b"before"]
    line.proxy.half_open()
    fresh = line.pull()
    assert line.proxy.wait_until(lambda counts: counts.connections == 2, SECONDS)
    line.proxy.heal()
    deadline = time.monotonic() + SECONDS
    while not fresh.poll(10):
        # PUSH takes turns once the handshake is done: of what goes to both, the old one's share never arrives.
        assert time.monotonic() < deadline
        line.sender.send(b"after")
    assert not old.poll(0)
    assert line.proxy.counts.open == 2


def test_a_stall_is_not_ended_by_half_open(line: ProxiedPush) -> None:
    """Connections that are made during a stall wait for `resume`."""
    line.proxy.stall()
    line.proxy.half_open()
    puller = line.pull()
    assert not line.proxy.wait_until(lambda counts: counts.connections > 0, 0.05)
    line.proxy.resume()
    line.sender.send(b"late")
    assert receive(puller) == [b"late"]


def test_messages_are_swapped(line: ProxiedPush) -> None:
    """A swapped message arrives behind the next one. No message is lost, and the swaps are counted."""
    puller = line.pull()
    line.sender.send(b"first")
    assert receive(puller) == [b"first"]
    line.proxy.stall()
    sent = [b"%03d" % number for number in range(100)]
    for frame in sent:
        line.sender.send(frame)
    line.proxy.reorder(0.3, seed=7)
    line.proxy.resume()
    came = [receive(puller)[0] for _ in sent]
    assert sorted(came) == sent
    assert came != sent
    assert line.proxy.counts.down.swapped >= sum(early > late for early, late in pairwise(came)) > 0


def test_all_messages_are_swapped_in_pairs(line: ProxiedPush) -> None:
    """Of the messages that arrive together. The last one of an odd number is not swapped."""
    puller = line.pull()
    line.sender.send(b"first")
    assert receive(puller) == [b"first"]
    line.proxy.reorder(1.0)
    line.sender.send(b"alone")
    assert receive(puller) == [b"alone"]
    line.proxy.heal()
    line.sender.send(b"a")
    assert receive(puller) == [b"a"]
    assert line.proxy.counts.down.swapped == 1


def test_a_message_is_injected_between_others(line: ProxiedPush) -> None:
    """Only on connections that have carried a message; before that it would break the handshake."""
    puller = line.pull()
    assert line.proxy.wait_until(lambda counts: counts.open == 1, SECONDS)
    line.proxy.inject([b"too early"])
    line.sender.send(b"before")
    assert receive(puller) == [b"before"]
    line.proxy.inject([b"", b"of", b"x" * 300])
    line.sender.send(b"after")
    assert [receive(puller), receive(puller)] == [[b"", b"of", b"x" * 300], [b"after"]]
    assert line.proxy.counts.down.injected == 1


def test_invalid_arguments_are_refused(line: ProxiedPush) -> None:
    with pytest.raises(ConfigError, match="share"):
        line.proxy.reorder(1.5)
    with pytest.raises(ConfigError, match="without frames"):
        line.proxy.inject([])
