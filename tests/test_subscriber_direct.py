"""Live connections that are read without libzmq: with real publishers in `test_subscriber.py`; with peers of any kind here."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvevents.config import Curve
from kvevents.stream import Batch, Delivery, RawBatch, Source, StreamLimits, Trust
from kvevents.subscriber import AsyncSubscriber, SocketOptions, Subscriber, ZmqTransport
from kvevents.subscriber.direct import DirectLive, address_of
from kvevents.subscriber.live import ZmqLive
from kvevents.testing.proxy import FaultProxy
from kvevents.testing.tape import TapePlayer
from kvevents.wire import zmtp
from network_model import payload_of

DEADLINE = 20.0
LIMITS = StreamLimits(replay_timeout=2.0, reply_silence=0.5, quiet_before_probe=0.2, max_probe_interval=1.0)
OPTIONS = SocketOptions(direct=True, reconnect_ms=10, reconnect_max_ms=40, handshake_ms=1_000)
OLD = zmtp.GREETING[:11] + b"\0" + zmtp.GREETING[12:]
"""The greeting of ZMTP 3.0."""
PUB = zmtp.command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x03PUB\x08Identity\x00\x00\x00\x00")
SUB = zmtp.READY


def transport(**changes: Any) -> ZmqTransport:
    """One that reads connections itself."""
    options = {name: getattr(OPTIONS, name) for name in OPTIONS.__slots__} | changes
    return ZmqTransport(options=SocketOptions(**options))


def batch(seq: int, payload: bytes = b"\x93\xcb\0\0\0\0\0\0\0\0\x90\xc0") -> bytes:
    return zmtp.message([b"kv", seq.to_bytes(8, "big"), payload])


class Peer:
    """A server that does with its connections, one after the other, what it is told to."""

    def __init__(self, *acts: Callable[[Line], None]) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.failure: BaseException | None = None
        self.times: list[float] = []
        """When connections came."""
        self._acts = acts
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            for act in self._acts:
                connection, _ = self._server.accept()
                self.times.append(time.monotonic())
                with connection:
                    connection.settimeout(DEADLINE)
                    act(Line(connection, self._done))
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            if not self._done.is_set():
                self.failure = error

    def close(self) -> None:
        self._done.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE)
        self._server.close()


class Line:
    """A connection, from the publisher's side."""

    def __init__(self, connection: socket.socket, done: threading.Event) -> None:
        self.connection = connection
        self._done = done

    def stays(self) -> None:
        """Until the test is over."""
        assert self._done.wait(DEADLINE)

    def send(self, *parts: bytes) -> None:
        self.connection.sendall(b"".join(parts))

    def read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            came = self.connection.recv(size - len(found))
            assert came, "the subscriber has closed"
            found += came
        return found

    def frame(self) -> tuple[int, bytes]:
        flags, size = self.read(2)
        return flags, self.read(size)

    def command(self) -> tuple[bytes, bytes]:
        flags, body = self.frame()
        assert flags == zmtp.COMMAND
        return zmtp.parse_command(body)

    def is_closed(self) -> bool:
        """Whether the subscriber closes it in time."""
        try:
            while self.connection.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True

    def greets(self, greeting: bytes = zmtp.GREETING, ready: bytes = PUB) -> None:
        """What comes before a subscription."""
        self.send(greeting)
        assert self.read(zmtp.GREETING_BYTES) == zmtp.GREETING
        self.send(ready)
        assert self.command()[0] == b"READY"

    def subscribed(self) -> None:
        """The whole handshake."""
        self.greets()
        assert self.command() == (b"SUBSCRIBE", b"kv")


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """Starts peers, and ends them; what failed in one fails the test."""
    opened: list[Peer] = []

    def start(*acts: Callable[[Line], None]) -> Peer:
        opened.append(Peer(*acts))
        return opened[-1]

    yield start
    for each in opened:
        each.close()
    for each in opened:
        if each.failure is not None:
            raise each.failure


def taken(endpoint: str, count: int, **changes: Any) -> list[Delivery]:
    """So many deliveries of a stream."""
    found: list[Delivery] = []
    end = time.monotonic() + DEADLINE
    with Subscriber(Source(endpoint, topic="kv", name="e"), limits=LIMITS, transport=transport(**changes)) as subscriber:
        while len(found) < count:
            assert time.monotonic() < end, f"{found}, {subscriber.statuses()}"
            found += subscriber.receive_many(timeout=0.1)
    return found


def seqs(deliveries: list[Delivery]) -> list[int]:
    return [each.seq for each in deliveries if isinstance(each, Batch)]


def good(*numbers: int) -> Callable[[Line], None]:
    """A publisher that sends these batches, and stays."""

    def act(line: Line) -> None:
        line.subscribed()
        line.send(*map(batch, numbers))
        line.stays()

    return act


# --- which connections are read so


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("tcp://10.1.2.3:5557", ("10.1.2.3", 5557)),
        ("tcp://localhost:5557", ("127.0.0.1", 5557)),
        ("tcp://[::1]:5557", ("::1", 5557)),
        ("tcp://engine-0.engines:5557", None),
        ("tcp://[fe80::1%eth0]:5557", None),
        ("tcp://10.0.0.1:0;10.1.2.3:5557", None),
        ("tcp://127.0.0.1:*", None),
        ("tcp://010.1.2.3:5557", None),
        ("ipc:///run/kv", None),
        ("inproc://kv", None),
    ],
)
def test_numeric_addresses_are_read_directly(endpoint: str, address: tuple[str, int] | None) -> None:
    """What has to be looked up, or is no TCP, is libzmq's."""
    assert address_of(Source(endpoint)) == address


def test_keys_binding_and_a_context_of_the_callers_are_libzmqs() -> None:
    """Whoever gives a context, or keys, gets sockets that have them."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    curve = Curve(public_key=public, secret_key=secret, server_key=public)
    assert address_of(Source("tcp://127.0.0.1:1", curve=curve)) is None
    assert address_of(Source("tcp://127.0.0.1:1", bind=True)) is None
    options = SocketOptions(direct=True)
    with zmq.Context() as context:
        for made, kind in ((ZmqTransport(context, options), ZmqLive), (ZmqTransport(options=options), DirectLive)):
            assert isinstance(made.open(Source("tcp://127.0.0.1:1"))._live, kind)
            made.close()


# --- peers that are as they should be


def test_a_peer_of_zmtp_3_0_gets_a_message_for_a_subscription(peer: Callable[..., Peer]) -> None:
    """It knows no command for that, and no ping, so it is not pinged however long it is silent."""

    def act(line: Line) -> None:
        line.greets(OLD)
        assert line.frame() == (0, b"\x01kv")
        line.connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            line.read(1)
        line.send(batch(0))
        line.stays()

    assert seqs(taken(peer(act).endpoint, 1, heartbeat_ms=50, heartbeat_timeout_ms=100)) == [0]


def test_bytes_may_come_one_by_one(peer: Callable[..., Peer]) -> None:
    """Greeting, introduction and batches in pieces of a byte are the same as in one."""

    def act(line: Line) -> None:
        line.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in zmtp.GREETING + PUB:
            line.send(bytes((byte,)))
        line.read(zmtp.GREETING_BYTES)
        assert line.command()[0] == b"READY"
        assert line.command()[0] == b"SUBSCRIBE"
        for byte in batch(0) + batch(1):
            line.send(bytes((byte,)))
        line.stays()

    assert seqs(taken(peer(act).endpoint, 2)) == [0, 1]


def test_a_message_that_takes_longer_than_heartbeats_wait_is_no_silence(peer: Callable[..., Peer]) -> None:
    """Its publisher can answer no ping in the midst of it."""
    whole = batch(0, b"\x93\xcb" + bytes(8) + b"\x90" + b"\xc6" + (1_000).to_bytes(4, "big") + bytes(1_000))

    def act(line: Line) -> None:
        line.subscribed()
        line.connection.settimeout(0.2)
        for byte in whole[:12]:
            line.send(bytes((byte,)))
            with suppress(TimeoutError):
                assert line.connection.recv(100), "the subscriber has closed"
        line.send(whole[12:])
        line.stays()

    assert seqs(taken(peer(act).endpoint, 1, heartbeat_ms=100, heartbeat_timeout_ms=800)) == [0]


@pytest.mark.parametrize("raw", [False, True])
def test_odd_messages_among_good_ones_are_counted_and_cost_nothing(peer: Callable[..., Peer], raw: bool) -> None:
    """Of one frame, of many, with numbers that are none, with no bytes at all."""
    odd = [[b"kv"], [b""], [b"kv"] * 9, [b"kv", b"\0" * 4, b"x"], [b"kv", b"\xff" * 8, b"x"]]

    def act(line: Line) -> None:
        line.subscribed()
        line.send(*[batch(number) + zmtp.message(each) for number, each in enumerate(odd)], batch(len(odd)))
        line.stays()

    source, found = Source(peer(act).endpoint, topic="kv", name="e"), list[Batch | RawBatch]()
    with Subscriber(source, limits=LIMITS, transport=transport(), decode=not raw) as subscriber:
        end = time.monotonic() + DEADLINE
        while len(found) <= len(odd):
            assert time.monotonic() < end
            found += [each for each in subscriber.receive_many(timeout=0.1) if isinstance(each, Batch | RawBatch)]
        assert [each.seq for each in found] == list(range(len(odd) + 1))
        assert sum(subscriber.status("e").counters.malformed.values()) == len(odd)


# --- peers that are not


def says(*parts: bytes) -> Callable[[Line], None]:
    """Sends bytes, whatever comes, and waits to be left."""

    def act(line: Line) -> None:
        line.send(*parts)
        assert line.is_closed()

    return act


CURVED = zmtp.GREETING[:12] + b"CURVE".ljust(20, b"\0") + zmtp.GREETING[32:]
WRONG = {
    "http": (says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "no ZeroMQ socket"),
    "zmtp 2": (says(b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53)), "ZMTP before 3.0"),
    "curve": (says(CURVED), "wants 'CURVE'"),
    "another SUB": (says(zmtp.GREETING, SUB), "is a 'SUB' socket"),
    "refusal": (says(zmtp.GREETING, zmtp.command(b"ERROR", b"\x04busy")), "refuses: 'busy'"),
    "no introduction": (says(zmtp.GREETING, batch(0)), "does not say what it is"),
    "mute": (says(), "no answer within 1 s"),
    "mute behind its greeting": (says(zmtp.GREETING), "no answer within 1 s"),
    "garbage": (says(zmtp.GREETING, b"\xf8" * 100), "no ZMTP"),
    "closed": (lambda _: None, "it was closed"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_peer_that_is_no_publisher_is_told_of_once_and_tried_again(
    peer: Callable[..., Peer], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """When a publisher is there at last, its batches arrive."""
    wrong, sentence = WRONG[what]
    with caplog.at_level(logging.INFO, "kvevents.subscriber.direct"):
        server = peer(wrong, wrong, good(0, 1))
        assert seqs(taken(server.endpoint, 2)) == [0, 1]
    assert [(each.levelname, sentence in each.message) for each in caplog.records] == [("WARNING", True), ("INFO", False)]


def test_nobody_there_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """A port where nobody listens is asked again after growing pauses."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with caplog.at_level(logging.INFO, "kvevents.subscriber.direct"):
        source = Source(f"tcp://127.0.0.1:{port}", name="e")
        with Subscriber(source, limits=LIMITS, transport=transport()) as subscriber:
            assert subscriber.receive(0.3) is None
            assert subscriber.trust("e") == Trust.CONNECTING
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "Connection refused" in caplog.text


def test_a_message_of_too_many_frames_ends_the_connection(peer: Callable[..., Peer]) -> None:
    """libzmq has no such limit. What came before it arrives, as of any connection that ends; then the next one goes on."""

    def act(line: Line) -> None:
        line.subscribed()
        line.send(batch(0), batch(1), zmtp.message([b"kv"] * 65))
        assert line.is_closed()

    assert seqs(taken(peer(act, good(2, 3)).endpoint, 4)) == [0, 1, 2, 3]


def test_a_peer_that_pings_without_end_is_left(peer: Callable[..., Peer]) -> None:
    """Answers that nobody takes are not kept, however slowly the system tells that; other sources never notice."""
    flood = zmtp.command(b"PING", b"\0\0" + b"x" * 16) * 10_000

    def act(line: Line) -> None:
        line.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.subscribed()
        with suppress(ConnectionError):
            while True:
                line.send(flood)

    def calm(line: Line) -> None:
        line.subscribed()
        line.send(*map(batch, range(50)))
        line.stays()

    server, other = peer(act, good(7)), peer(calm)
    sources = [Source(server.endpoint, topic="kv", name="hostile"), Source(other.endpoint, topic="kv", name="calm")]
    found: list[tuple[str, int]] = []
    with Subscriber(sources, limits=LIMITS, transport=transport()) as subscriber:
        end = time.monotonic() + DEADLINE
        while ("hostile", 7) not in found or len(found) < 51:
            assert time.monotonic() < end, found
            found += [(each.source, each.seq) for each in subscriber.receive_many(timeout=0.1) if isinstance(each, Batch)]
    assert [seq for name, seq in found if name == "calm"] == list(range(50))


def test_pauses_between_attempts_grow_and_are_bounded(peer: Callable[..., Peer]) -> None:
    """A peer that lets nobody in is asked at most as often as `reconnect_max_ms` says."""
    refusals = [says(b"no")] * 12
    server = peer(*refusals, good(0))
    taken(server.endpoint, 1, reconnect_ms=10, reconnect_max_ms=80)
    pauses = [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]
    assert min(pauses) > 0.004
    assert min(pauses[4:]) > 0.03


@given(st.binary(max_size=200))
def test_any_bytes_are_a_greeting_or_a_reason(data: bytes) -> None:
    """Nothing that a peer may send raises anything, or writes into a log as it likes."""
    minor, fault = zmtp.greeted(data[:64].ljust(64, b"\0"))
    assert fault or minor == data[11]
    kind = b"\x0bSocket-Type" + len(data).to_bytes(4, "big") + data
    sentences = [fault, zmtp.refused(*zmtp.parse_command(data)), zmtp.refused(b"READY", kind), zmtp.refused(b"ERROR", data)]
    assert all(each.isprintable() and len(each) < 250 for each in sentences)


# --- what the operating system and the network do


def test_silence_is_asked_about_and_a_dead_line_noticed_by_asyncio_too() -> None:
    """Pings go out by the subscriber's timers alone, in both worlds; `test_subscriber.py` has the other one."""

    async def scenario(tape: TapePlayer, proxy: FaultProxy) -> None:
        source = Source(proxy.endpoint, tape.replay_endpoint, topic="kv", name="e")
        options = transport(heartbeat_ms=50, heartbeat_timeout_ms=1_500)
        async with asyncio.timeout(DEADLINE), AsyncSubscriber(source, limits=LIMITS, transport=options) as subscriber:
            while not tape.wait_for_subscriber(0):
                await subscriber.receive(0.02)
            tape.play(1)
            batch = None
            while batch is None or subscriber.trust("e") != Trust.EXACT:
                batch = await subscriber.receive(0.02) or batch
            assert await subscriber.receive(0.4) is None
            assert subscriber.status("e").counters.reconnects == 0
            proxy.stall()
            while subscriber.trust("e") != Trust.STALE:
                await subscriber.receive(0.02)
            tape.play(1)
            proxy.heal()
            delivery = None
            while delivery is None:
                delivery = await subscriber.receive(0.02)
            assert isinstance(delivery, Batch)

    with (
        TapePlayer([(b"kv", seq, payload_of(0, seq, clear=False)) for seq in range(2)]) as tape,
        FaultProxy(tape.endpoint) as proxy,
    ):
        asyncio.run(scenario(tape, proxy))


def test_a_publisher_with_heartbeats_of_its_own_keeps_the_line(peer: Callable[..., Peer]) -> None:
    """libzmq's own pings, with a time to live, from a real PUB socket: the connection stays through many of them."""
    del peer
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        for option, value in (
            (zmq.HEARTBEAT_IVL, 30),
            (zmq.HEARTBEAT_TIMEOUT, 3_000),
            (zmq.HEARTBEAT_TTL, 3_000),
            (zmq.LINGER, 0),
        ):
            publisher.set(option, value)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        source = Source(f"tcp://127.0.0.1:{port}", topic="kv", name="e")
        with Subscriber(source, limits=LIMITS, transport=transport()) as subscriber:
            end = time.monotonic() + DEADLINE
            while not publisher.poll(0):
                assert time.monotonic() < end
                subscriber.receive(0.02)
            assert publisher.recv() == b"\x01kv"
            quiet = time.monotonic() + 0.6
            while time.monotonic() < quiet:
                assert subscriber.receive(0.02) is None
            assert subscriber.status("e").counters.reconnects == 0
            publisher.send_multipart([b"kv", bytes(8), payload_of(0, 0, clear=False)])
            assert isinstance(subscriber.receive(DEADLINE), Batch)


def test_no_threads_and_nothing_left_open(peer: Callable[..., Peer]) -> None:
    """Connections come and go, and the subscriber with them."""

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def brief(line: Line) -> None:
        line.subscribed()

    server = peer(*[brief] * 30, good(0))
    gc.collect()
    threads, files = threading.active_count(), open_files()
    source = Source(server.endpoint, topic="kv", name="e")
    with Subscriber(source, limits=LIMITS, transport=transport(reconnect_max_ms=10)) as subscriber:
        end = time.monotonic() + DEADLINE
        while not isinstance(subscriber.receive(0.05), Batch):
            assert time.monotonic() < end
            assert threading.active_count() == threads
        assert subscriber.status("e").counters.reconnects == 30
    gc.collect()
    # The peer has the last connection open still.
    assert open_files() <= files + 1
