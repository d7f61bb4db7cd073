"""Consumers' connections that the sender writes itself: with real consumers of libzmq's, and with peers of any kind."""

from __future__ import annotations

import os
import random
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest
import zmq

from kvevents.config import Curve
from kvevents.errors import EndpointError
from kvevents.publisher import consumer as consumers
from kvevents.publisher import direct
from kvevents.publisher.broadcast import Broadcast
from kvevents.publisher.buffer import ReplayBuffer
from kvevents.publisher.direct import DirectOutlet, address_of
from kvevents.publisher.outlet import ZmqOutlet
from kvevents.wire import zmtp
from publisher_cases import (  # noqa: F401 - a fixture, used by being here
    ANY,
    DEADLINE,
    Socket,
    consumers_context,
    open_consumer,
    wait_until,
)

Context = zmq.Context[Socket]
LOCAL = ("127.0.0.1", 0)
TOPIC = b"kv"
OLD = zmtp.GREETING[:11] + b"\0" + zmtp.GREETING[12:]
"""The greeting of ZMTP 3.0."""
BIG = bytes(200_000)
PUBLIC, SECRET = (key.decode() for key in zmq.curve_keypair())
KEYS = Curve(public_key=PUBLIC, secret_key=SECRET)


@contextmanager
def outlet(hwm: int = 100_000) -> Iterator[DirectOutlet]:
    made = DirectOutlet(LOCAL, ANY, hwm)
    try:
        yield made
    finally:
        made.end(None)
        made.join()


class Peer:
    """A consumer that does what it is told, byte by byte."""

    def __init__(self, endpoint: str, *, room: int | None = None) -> None:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self.connection = socket.socket()
        if room is not None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        self.connection.settimeout(DEADLINE)
        self.connection.connect((host, int(port)))
        self._have = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def say(self, *parts: bytes) -> None:
        self.connection.sendall(b"".join(parts))

    def read(self, size: int) -> bytes:
        while len(self._have) < size:
            came = self.connection.recv(1 << 16)
            assert came, "the publisher has closed"
            self._have += came
        found, self._have = self._have[:size], self._have[size:]
        return found

    def frame(self) -> tuple[int, bytes]:
        flags, size = self.read(2)
        if flags & zmtp.LONG:
            size = size << 56 | int.from_bytes(self.read(7), "big")
        return flags, self.read(size)

    def message(self) -> list[bytes] | tuple[bytes, bytes]:
        """The frames of a message, or the name and data of a command."""
        frames: list[bytes] = []
        while True:
            flags, body = self.frame()
            if flags & zmtp.COMMAND:
                assert not frames, "a command inside of a message"
                return zmtp.parse_command(body)
            frames.append(body)
            if not flags & zmtp.MORE:
                return frames

    def greets(self, greeting: bytes = zmtp.GREETING, ready: bytes = zmtp.READY) -> None:
        self.say(greeting, ready)
        assert self.read(zmtp.GREETING_BYTES) == zmtp.GREETING
        name, data = self.message()
        assert (name, zmtp.properties(data)) == (b"READY", {b"socket-type": b"XPUB"})

    def is_closed(self) -> bool:
        """Whether the publisher closes it in time."""
        with suppress(ConnectionResetError):
            while self.connection.recv(1 << 16):
                pass
        return True


def subscribed(sender: DirectOutlet, topic: bytes = TOPIC, **more: Any) -> Peer:
    before, peer = sender.subscriptions, Peer(sender.bound, **more)
    peer.greets()
    peer.say(zmtp.subscription(topic, 1))
    wait_until(lambda: sender.subscriptions > before, "the subscription")
    return peer


def frames(number: int, payload: bytes, topic: bytes = TOPIC) -> list[bytes]:
    return [topic, number.to_bytes(8, "big"), payload]


# --- consumers of libzmq's


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.XSUB])
def test_consumers_of_libzmq_get_what_they_subscribed_to(context: Context, kind: int) -> None:
    """By prefixes, each as often as it subscribed; and no more when it takes that back."""
    with outlet() as sender:
        reader = open_consumer(context, kind)
        reader.connect(sender.bound)

        def wish(wanted: bool, topic: bytes, count: int) -> None:
            if kind == zmq.XSUB:
                reader.send(bytes([wanted]) + topic)
            else:
                reader.set(zmq.SUBSCRIBE if wanted else zmq.UNSUBSCRIBE, topic)
            wait_until(lambda: sender.subscriptions == count, f"{count} subscriptions")

        wish(True, b"k", 1)
        wish(True, b"other", 2)
        sender.send(b"kv", [(0, b"first"), (1, BIG)])
        sender.send(b"none", [(2, b"nobody's")])
        sender.send(b"otherwise", [(3, b"last")])
        sent = [frames(0, b"first", b"kv"), frames(1, BIG, b"kv"), frames(3, b"last", b"otherwise")]
        assert [reader.recv_multipart() for _ in sent] == sent
        wish(False, b"k", 1)
        sender.send(b"kv", [(4, b"no more")])
        sender.send(b"other", [(5, b"this")])
        assert reader.recv_multipart() == frames(5, b"this", b"other")
        reader.close(linger=0)
        wait_until(lambda: not sender.subscriptions, "nobody")


def test_a_subscriber_that_takes_its_time_gets_all_in_order(context: Context) -> None:
    """More than all buffers hold, of sizes that leave the system in the midst of messages, heads included."""
    rng = random.Random(7)
    payloads = [rng.randbytes(rng.choice((0, 1, 254, 255, 256, 5_000, 70_000))) for _ in range(3_000)]
    with outlet() as sender:
        reader = open_consumer(context, zmq.SUB)
        reader.set_hwm(0)
        reader.subscribe(b"")
        reader.connect(sender.bound)
        wait_until(lambda: sender.subscriptions == 1, "the subscription")
        numbered = list(enumerate(payloads))
        while numbered:
            count = rng.randrange(1, 700)
            sender.send(TOPIC, numbered[:count])
            numbered = numbered[count:]
        for number, payload in enumerate(payloads):
            assert reader.recv_multipart() == frames(number, payload)
        assert sender.dropped == 0


# --- what waits


def test_who_is_too_far_behind_is_not_sent_more_and_that_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Never a part of a message; what comes when there is room again follows; others get everything."""
    with outlet(hwm=20) as sender, subscribed(sender, room=4096) as slow, subscribed(sender) as quick:
        caught: list[Any] = []
        reading = threading.Thread(target=lambda: caught.extend(quick.message() for _ in range(301)), daemon=True)
        reading.start()
        for number in range(300):
            sender.send(TOPIC, [(number, BIG)])
            wait_until(lambda at=number: len(caught) > at, "the other one")  # type: ignore[misc]
        lost = sender.dropped
        assert 0 < lost < 280
        there = [slow.message() for _ in range(300 - lost)]
        assert there == [frames(number, BIG) for number in range(300 - lost)]
        sender.send(TOPIC, [(300, b"again")])
        assert slow.message() == frames(300, b"again")
        reading.join(DEADLINE)
        assert caught[-1] == frames(300, b"again")
        assert sender.dropped == lost
    assert [record.message.split(" ", 1)[1] for record in caplog.records if "behind" in record.message] == [
        "is 20 batches behind, and is not sent what follows: it has to ask for it"
    ]


def test_what_was_not_sent_stays_counted_when_its_consumer_is_gone() -> None:
    with outlet(hwm=1) as sender:
        with subscribed(sender, room=4096):
            while not sender.dropped:
                sender.send(TOPIC, [(0, BIG)])
            lost = sender.dropped
        wait_until(lambda: not sender.subscriptions, "nobody")
        assert sender.dropped == lost


def test_pings_are_answered_though_batches_wait() -> None:
    """Before them, and never inside of one."""
    with outlet() as sender, subscribed(sender, room=4096) as peer:
        sender.send(TOPIC, [(number, BIG) for number in range(100)])
        peer.say(zmtp.command(b"PING", b"\0\1" + b"abc"), zmtp.command(b"PING", b"\0\1" + b"def"))
        said = [peer.message() for _ in range(102)]
        answers = [(at, data) for at, (name, data) in enumerate((each[0], each[1]) for each in said) if name == b"PONG"]
        assert [data for _, data in answers] == [b"abc", b"def"]
        assert answers[0][0] < 100
        assert [each for each in said if each[0] != b"PONG"] == [frames(number, BIG) for number in range(100)]


def test_an_answer_waits_for_room_like_anything_else() -> None:
    """Of whoever pings and reads nothing, until there are too many; then the connection ends, and nobody else's."""
    flood = zmtp.command(b"PING", b"\0\1" + bytes(16)) * (consumers.MAX_ANSWERS + 50)
    with outlet() as sender, subscribed(sender, room=4096) as deaf, subscribed(sender) as good:
        caught: list[Any] = []
        reading = threading.Thread(target=lambda: caught.extend(good.message() for _ in range(100)), daemon=True)
        reading.start()
        sender.send(TOPIC, [(number, BIG) for number in range(100)])
        deaf.say(flood)
        wait_until(lambda: sender.subscriptions == 1, "its end")
        reading.join(DEADLINE)
        assert caught == [frames(number, BIG) for number in range(100)]


# --- peers of any kind


def test_a_peer_of_zmtp_3_0_subscribes_by_messages() -> None:
    with outlet() as sender, Peer(sender.bound) as peer:
        peer.greets(OLD)
        peer.say(zmtp.subscription(TOPIC, 0), zmtp.message([b"\2neither"]), zmtp.message([b"\1two", b"frames"]))
        wait_until(lambda: sender.subscriptions == 1, "the subscription")
        sender.send(TOPIC, [(5, b"payload")])
        assert peer.message() == frames(5, b"payload")
        peer.say(zmtp.message([b"\0" + TOPIC]))
        wait_until(lambda: not sender.subscriptions, "its end")


def test_words_may_come_in_pieces() -> None:
    """A greeting byte by byte, and everything at once."""
    with outlet() as sender:
        with Peer(sender.bound) as peer:
            for at in range(zmtp.GREETING_BYTES):
                peer.say(zmtp.GREETING[at : at + 1])
            peer.say(zmtp.READY, zmtp.subscription(b"", 1))
            wait_until(lambda: sender.subscriptions == 1, "the subscription")
        with Peer(sender.bound) as peer:
            peer.say(zmtp.GREETING, zmtp.READY, *[zmtp.subscription(b"%d" % at, 1) for at in range(900)])
            wait_until(lambda: sender.subscriptions == 900, "all subscriptions")


HOSTILE: dict[str, bytes] = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "zmtp 2": b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53),
    "curve": zmtp.GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32),
    "publisher": zmtp.GREETING + zmtp.PUBLISHER_READY,
    "error": zmtp.GREETING + zmtp.command(b"ERROR", b"\3no\n"),
    "no ready": zmtp.GREETING + zmtp.command(b"PING", b"\0\0"),
    "no command": zmtp.GREETING + zmtp.message([b"\1kv"]),
    "not a command": zmtp.GREETING + bytes([zmtp.COMMAND, 0]),
    "flags": zmtp.GREETING + zmtp.READY + b"\xff\xff",
    "large": zmtp.GREETING + zmtp.READY + b"\2" + (1 << 40).to_bytes(8, "big"),
    "too many": zmtp.GREETING + zmtp.READY + zmtp.subscription(b"kv", 1) * (consumers.MAX_SUBSCRIPTIONS + 1),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_consumer_is_left(kind: str) -> None:
    """Its connection ends, and a consumer notices nothing."""
    with outlet() as sender, subscribed(sender) as good, Peer(sender.bound) as peer:
        peer.say(HOSTILE[kind])
        assert peer.is_closed()
        sender.send(TOPIC, [(0, b"payload")])
        assert good.message() == frames(0, b"payload")
        assert sender.subscriptions == 1


def test_random_bytes_do_no_harm() -> None:
    """Behind a right beginning of any length."""
    rng = random.Random(3)
    right = zmtp.GREETING + zmtp.READY + zmtp.subscription(b"zz", 1)
    with outlet() as sender, subscribed(sender) as good:
        for _ in range(60):
            with Peer(sender.bound) as peer, suppress(ConnectionError):
                peer.say(right[: rng.randrange(len(right) + 1)], rng.randbytes(rng.randrange(400)))
        sender.send(TOPIC, [(0, b"payload")])
        assert good.message() == frames(0, b"payload")
        wait_until(lambda: sender.subscriptions == 1, "nobody else")


def test_who_says_nothing_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within the introduction; a consumer that is up may be silent for ever."""
    monkeypatch.setattr(consumers, "HANDSHAKE_SECONDS", 0.2)
    with outlet() as sender, subscribed(sender) as good, Peer(sender.bound) as mute, Peer(sender.bound) as slow:
        slow.say(zmtp.GREETING)
        assert mute.is_closed()
        assert slow.is_closed()
        sender.send(TOPIC, [(0, b"payload")])
        assert good.message() == frames(0, b"payload")


def test_there_is_a_most_of_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes then is turned away, until somebody goes."""
    monkeypatch.setattr(direct, "MAX_CONSUMERS", 2)
    with outlet() as sender, subscribed(sender) as first:
        with subscribed(sender), Peer(sender.bound) as third:
            assert third.is_closed()
        wait_until(lambda: sender.subscriptions == 1, "one to go")
        with subscribed(sender) as again:
            sender.send(TOPIC, [(0, b"payload")])
            assert first.message() == again.message() == frames(0, b"payload")


def test_without_descriptors_nobody_is_let_in_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those who are there go on; who waits is let in when there are some again."""
    monkeypatch.setattr(direct, "BREATHER_SECONDS", 0.05)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with outlet() as sender, subscribed(sender) as good, ExitStack() as held:
        highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
        taken: list[int] = []
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        os.close(taken.pop())
        peer = Peer(sender.bound)
        wait_until(lambda: "nobody can be let in" in caplog.text, "a warning")
        sender.send(TOPIC, [(0, b"payload")])
        assert good.message() == frames(0, b"payload")
        for each in taken:
            os.close(each)
        with peer:
            peer.greets()


def test_consumers_may_come_and_go_while_batches_are_sent() -> None:
    """Some of them in the midst of a message, with a reset; whoever stays gets everything."""
    with outlet(hwm=50) as sender, subscribed(sender) as good:
        caught: list[Any] = []
        count = 400
        reading = threading.Thread(target=lambda: caught.extend(good.message() for _ in range(count)), daemon=True)
        reading.start()
        for number in range(count):
            if number % 4 == 0:
                wait_until(lambda: sender.subscriptions == 1, "the guest before to be gone")
                guest = subscribed(sender, room=4096)
                guest.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            sender.send(TOPIC, [(number, BIG)])
            if number % 4 == 2:
                guest.connection.close()
            wait_until(lambda at=number: len(caught) > at, "the one that stays")  # type: ignore[misc]
        reading.join(DEADLINE)
        assert caught == [frames(number, BIG) for number in range(count)]
        wait_until(lambda: sender.subscriptions == 1, "the guests to be gone")


# --- its end


def test_what_waits_is_flushed_at_the_end() -> None:
    """Nobody else is let in meanwhile, and the port is free."""
    sender = DirectOutlet(LOCAL, ANY, 1_000)
    with subscribed(sender, room=4096) as peer:
        sender.send(TOPIC, [(number, BIG) for number in range(100)])
        sender.end(time.monotonic() + DEADLINE)
        wait_until(lambda: is_free(sender.bound), "the port")
        assert [peer.message() for _ in range(100)] == [frames(number, BIG) for number in range(100)]
        assert sender.join() is True
        assert peer.is_closed()


def is_free(endpoint: str) -> bool:
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    try:
        with socket.create_server((host, int(port))):
            return True
    except OSError:
        return False


def test_the_end_is_bounded_where_nobody_reads() -> None:
    sender = DirectOutlet(LOCAL, ANY, 1_000)
    with subscribed(sender, room=4096):
        sender.send(TOPIC, [(number, BIG) for number in range(100)])
        began = time.monotonic()
        sender.end(began + 0.2)
        assert sender.join() is False
        assert time.monotonic() - began < 5.0


# --- as a part of a broadcast


@pytest.mark.parametrize(
    ("endpoint", "settings", "kind"),
    [
        (ANY, {"direct": True}, DirectOutlet),
        ("tcp://*:*", {"direct": True}, DirectOutlet),
        ("tcp://localhost:0", {"direct": True}, DirectOutlet),
        (ANY, {}, ZmqOutlet),
        (ANY, {"direct": True, "curve": KEYS}, ZmqOutlet),
        ("inproc://direct", {"direct": True}, ZmqOutlet),
        ("tcp://127.0.0.1:1", {"direct": True, "bind": False}, ZmqOutlet),
    ],
    ids=["literal", "any", "localhost", "not asked", "keys", "inproc", "connecting"],
)
def test_who_sends_by_which_way(endpoint: str, settings: dict[str, Any], kind: type) -> None:
    """What only libzmq can do is libzmq's."""
    broadcast = Broadcast(endpoint, buffer=ReplayBuffer(1), **settings)
    try:
        assert type(broadcast._outlet) is kind
        assert (broadcast.dropped is None) == (kind is ZmqOutlet)
    finally:
        broadcast.close(0.0)


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_both_families_are_served_at_once() -> None:
    try:
        sender = DirectOutlet(("::", 0), "tcp://[::]:0", 10)
    except EndpointError:
        pytest.skip("no IPv6 here")
    port = sender.bound.rsplit(":", 1)[1]
    assert sender.bound == f"tcp://[::]:{port}"
    with Peer(f"tcp://127.0.0.1:{port}") as peer:
        peer.greets()
    with socket.create_connection(("::1", int(port)), DEADLINE) as connection:
        assert connection.recv(1) == b"\xff"
    sender.end(None)
    sender.join()


def test_an_address_that_is_taken_is_refused_in_words() -> None:
    with outlet() as sender, pytest.raises(EndpointError, match=r"cannot bind the event socket to .* in use; another process"):
        DirectOutlet(("127.0.0.1", int(sender.bound.rsplit(":", 1)[1])), sender.bound, 1)


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("tcp://*:5557", ("0.0.0.0", 5557)),  # noqa: S104 - what the wildcard means
        ("tcp://127.0.0.1:*", ("127.0.0.1", 0)),
        ("tcp://[::1]:7", ("::1", 7)),
        ("tcp://localhost:7", ("127.0.0.1", 7)),
        ("tcp://eth0:7", None),
        ("tcp://[fe80::1%eth0]:7", None),
        ("tcp://127.0.0.1:70000", None),
        ("ipc:///tmp/x", None),
    ],
)
def test_where_it_can_listen(endpoint: str, address: tuple[str, int] | None) -> None:
    assert address_of(endpoint) == address


def test_without_the_native_module_it_is_libzmqs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "connections", lambda: None)
    assert address_of(ANY) is None
