"""`kvevents.testing.proxy`, and the ZMTP splitter that it uses, between real sockets."""

from __future__ import annotations

import errno
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType

import pytest
import zmq

from kvevents.errors import ClosedError, ConfigError, EndpointError
from kvevents.testing import FaultProxy, ProxyLimits, TapePlayer
from kvevents.testing.zmtp import Segment, ZmtpSplitter
from kvevents.wire import replay_request_frames
from resource_cases import leave_nothing_open
from tests.system.chaos_kit.redirecting_proxy import RedirectingProxy

SECONDS = 60
"""Deadline of every wait; only a failing test waits this long."""

Socket = zmq.Socket[bytes]
Open = Callable[..., Socket]


def address(proxy: FaultProxy) -> tuple[str, int]:
    return "127.0.0.1", int(proxy.endpoint.rpartition(":")[2])


def batches(count: int, size: int = 20) -> list[tuple[bytes, int, bytes]]:
    return [(b"kv", seq, bytes([seq % 256]) * size) for seq in range(count)]


def receive(source: Socket) -> list[bytes]:
    assert source.poll(1000 * SECONDS), "nothing arrived"
    return source.recv_multipart()


def receive_seqs(source: Socket, count: int) -> list[int]:
    return [int.from_bytes(receive(source)[1]) for _ in range(count)]


def join(tape: TapePlayer, sub: Socket) -> None:
    """Wait until a socket is subscribed. A SUB socket that reconnects subscribes again when it is polled."""
    deadline = time.monotonic() + SECONDS
    while not tape.wait_for_subscriber(0.01):
        assert time.monotonic() < deadline
        sub.poll(10)


def wait_until_left(tape: TapePlayer) -> None:
    """Wait until the tape no longer counts its subscriber."""
    deadline = time.monotonic() + SECONDS
    while tape.wait_for_subscriber(0):
        assert time.monotonic() < deadline


@pytest.fixture
def connect() -> Iterator[Open]:
    """Open and connect sockets; a SUB socket subscribes to everything."""
    context: zmq.Context[Socket] = zmq.Context()
    opened: list[Socket] = []

    def make(kind: int, endpoint: str, options: Mapping[int, int] = MappingProxyType({})) -> Socket:
        made = context.socket(kind)
        opened.append(made)
        made.setsockopt(zmq.RCVHWM, 0)
        for option, value in options.items():
            made.setsockopt(option, value)
        if kind == zmq.SUB:
            made.subscribe(b"")
        made.connect(endpoint)
        return made

    yield make
    for one in opened:
        one.close(0)
    context.term()


@pytest.fixture
def tape() -> Iterator[TapePlayer]:
    with TapePlayer(batches(1000)) as made:
        yield made


@pytest.fixture
def proxy(tape: TapePlayer) -> Iterator[FaultProxy]:
    with FaultProxy(tape.endpoint) as made:
        yield made


# Forwarding


def test_a_proxy_forwards_live_and_replay_messages_unchanged(tape: TapePlayer, connect: Open) -> None:
    """SUB and DEALER sockets receive the same frames with and without proxies, and the proxies count them."""
    assert tape.replay_endpoint is not None
    with FaultProxy(tape.endpoint) as live, FaultProxy(tape.replay_endpoint) as replay:
        near, far = connect(zmq.SUB, tape.endpoint), connect(zmq.SUB, live.endpoint)
        assert tape.wait_for_subscriber(SECONDS, count=2)
        tape.play()
        assert [receive(far) for _ in range(1000)] == [receive(near) for _ in range(1000)]
        answers = []
        for endpoint in (tape.replay_endpoint, replay.endpoint):
            dealer = connect(zmq.DEALER, endpoint)
            dealer.send_multipart(replay_request_frames(10))
            answers.append([receive(dealer) for _ in range(991)])
        assert answers[0] == answers[1]
        assert live.counts.down.messages == 1000
        assert (replay.counts.up.messages, replay.counts.down.messages) == (1, 991)
        assert repr(replay) == (
            f"<FaultProxy {replay.endpoint} to {tape.replay_endpoint} 1 connections, down 991 (0 dropped), up 1 (0 dropped)>"
        )


def test_a_proxy_forwards_every_byte_unchanged() -> None:
    """A greeting, commands, frames of every size and an incomplete message arrive unchanged in both directions, for any
    division into chunks."""
    stream = greeting() + command(b"READY") + message(b"kv", b"x" * 255, b"y" * 256, b"") + message(b"z" * 200_000)
    stream += message(b"half")[:-2]
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        FaultProxy(f"tcp://127.0.0.1:{server.getsockname()[1]}") as proxy,
        socket.create_connection(address(proxy), SECONDS) as client,
        server.accept()[0] as upstream,
    ):
        upstream.settimeout(SECONDS)
        sender = threading.Thread(target=send_in_chunks, args=(client, stream))
        sender.start()
        assert read_all(upstream) == stream
        sender.join(SECONDS)
    assert proxy.counts.up.messages == 2
    assert proxy.counts.up.bytes == len(stream)


def send_in_chunks(client: socket.socket, stream: bytes) -> None:
    """Send a stream in chunks that end anywhere, as TCP delivers them, then close."""
    chance = random.Random(3)
    cuts = sorted({0, len(stream), *range(80), *chance.sample(range(len(stream)), 50)})
    for start, end in pairwise(cuts):
        client.sendall(stream[start:end])
    client.shutdown(socket.SHUT_WR)


def read_all(source: socket.socket) -> bytes:
    received = bytearray()
    while data := source.recv(65536):
        received += data
    return bytes(received)


def test_a_closed_peer_closes_the_other_side(connect: Open) -> None:
    """Everything that an engine sent before it ended is delivered; then the connection ends on the other side too."""
    with TapePlayer(batches(3000, size=500)) as tape, FaultProxy(tape.endpoint) as proxy:
        sub = connect(zmq.SUB, proxy.endpoint)
        join(tape, sub)
        tape.play()
        tape.stop()
        assert receive_seqs(sub, 3000) == list(range(3000))
        assert proxy.wait_until(lambda counts: counts.open == 0, SECONDS)
        tape.restart()
        join(tape, sub)
        tape.play(1)
        assert receive_seqs(sub, 1) == [0]


def test_many_connections_are_forwarded_separately(connect: Open) -> None:
    """Each connection gets its own messages only."""
    with TapePlayer(batches(100)) as tape, FaultProxy(str(tape.replay_endpoint)) as proxy:
        tape.play()
        dealers = [connect(zmq.DEALER, proxy.endpoint) for _ in range(40)]
        for start, dealer in enumerate(dealers):
            dealer.send_multipart(replay_request_frames(start))
        for start, dealer in enumerate(dealers):
            assert [int.from_bytes(receive(dealer)[2]) for _ in range(100 - start)] == list(range(start, 100))
        assert (proxy.counts.connections, proxy.counts.open) == (40, 40)


def test_a_slow_reader_slows_down_the_sender(connect: Open) -> None:
    """Queued bytes are limited. At the limit the proxy stops reading from the sender, and every message arrives in the end."""
    limits = ProxyLimits(max_queued_bytes=100_000)
    with TapePlayer(batches(2000, size=10_000)) as tape, FaultProxy(tape.endpoint, limits=limits) as proxy:
        sub = connect(zmq.SUB, proxy.endpoint)
        join(tape, sub)
        proxy.delay()
        tape.play()
        assert proxy.wait_until(lambda counts: counts.down.held >= 9, SECONDS)
        proxy.heal()
        assert receive_seqs(sub, 2000) == list(range(2000))
        assert proxy.counts.down.held == 0


# Dropping


def test_the_next_messages_can_be_dropped(tape: TapePlayer, proxy: FaultProxy, connect: Open) -> None:
    """Whole messages are dropped and counted, and the connection stays valid."""
    sub = connect(zmq.SUB, proxy.endpoint)
    join(tape, sub)
    tape.play(2)
    assert receive_seqs(sub, 2) == [0, 1]
    proxy.drop(3)
    tape.play(3)
    assert proxy.wait_until(lambda counts: counts.down.dropped_tail == 3, SECONDS)
    tape.play(2)
    assert receive_seqs(sub, 2) == [5, 6]
    assert proxy.counts.down.dropped_tail == 0
    assert (proxy.counts.down.messages, proxy.counts.down.dropped, proxy.counts.connections) == (7, 3, 1)


def test_dropping_a_share_of_messages_is_reproducible(tape: TapePlayer, proxy: FaultProxy, connect: Open) -> None:
    """The draws depend on the seed only."""
    sub = connect(zmq.SUB, proxy.endpoint)
    join(tape, sub)
    runs = []
    for first in (0, 1000, 2000):
        before = proxy.counts.down.dropped
        proxy.drop(0.1, seed=4)
        tape.play()
        messages = first + 1000
        assert proxy.wait_until(lambda counts, messages=messages: counts.down.messages == messages, SECONDS)  # type: ignore[misc]
        dropped = proxy.counts.down.dropped - before
        runs.append([seq - first for seq in receive_seqs(sub, 1000 - dropped)])
    assert runs[0] == runs[1] == runs[2]
    assert 800 < len(runs[0]) < 980


def test_a_function_can_choose_the_messages_to_drop(tape: TapePlayer, proxy: FaultProxy, connect: Open) -> None:
    """A function decides by the frames of each message."""
    sub = connect(zmq.SUB, proxy.endpoint)
    join(tape, sub)
    proxy.drop(lambda frames: frames[0] == b"kv" and frames[1][-1] % 2 == 1)
    tape.play(4)
    assert proxy.wait_until(lambda counts: counts.down.messages == 4, SECONDS)
    assert receive_seqs(sub, 2) == [0, 2]
    proxy.drop(None)
    tape.play(2)
    assert receive_seqs(sub, 2) == [4, 5]


def test_requests_can_be_dropped(tape: TapePlayer, connect: Open) -> None:
    """The other direction has its own rule: a dropped request is never answered, and replies pass."""
    with FaultProxy(str(tape.replay_endpoint)) as proxy:
        tape.play(2)
        dealer = connect(zmq.DEALER, proxy.endpoint)
        proxy.drop(1, direction="up")
        dealer.send_multipart(replay_request_frames(0))
        dealer.send_multipart(replay_request_frames(1))
        assert [receive(dealer)[-1] != b"" for _ in range(2)] == [True, False]
        assert tape.requests == [1]


def test_an_exception_of_a_rule_is_raised_by_close(tape: TapePlayer, connect: Open) -> None:
    """The connection ends, and `close` raises the exception, which would otherwise be lost in the thread."""

    def rule(frames: tuple[bytes, ...]) -> bool:
        raise LookupError(frames[0])

    proxy = FaultProxy(tape.endpoint)
    join(tape, connect(zmq.SUB, proxy.endpoint))
    proxy.drop(rule)
    tape.play(1)
    assert proxy.wait_until(lambda counts: counts.open == 0, SECONDS)
    with pytest.raises(LookupError, match="kv"):
        proxy.close()
    proxy.close()


@pytest.mark.parametrize("rule", [1.5, -0.5, -1])
def test_invalid_rules_are_refused(proxy: FaultProxy, rule: float) -> None:
    """Invalid are a share outside 0 to 1, a negative count, and negative seconds."""
    with pytest.raises(ConfigError):
        proxy.drop(rule)
    with pytest.raises(ConfigError):
        proxy.delay(-1)


# Delaying


def test_held_messages_are_sent_when_released(tape: TapePlayer, proxy: FaultProxy, connect: Open) -> None:
    """Held messages stay in order and are released one by one."""
    sub = connect(zmq.SUB, proxy.endpoint)
    join(tape, sub)
    proxy.delay()
    tape.play(5)
    assert proxy.wait_until(lambda counts: counts.down.held == 5, SECONDS)
    assert not sub.poll(0)
    proxy.release(2)
    assert receive_seqs(sub, 2) == [0, 1]
    assert proxy.counts.down.held == 3
    proxy.heal()
    tape.play(1)
    assert receive_seqs(sub, 4) == [2, 3, 4, 5]


def test_messages_can_be_delayed_by_time(tape: TapePlayer, proxy: FaultProxy, connect: Open) -> None:
    """Every message arrives in order, no earlier than the delay after it was sent.

    Messages that are sent after the end of the delay do not overtake held ones.
    """
    sub = connect(zmq.SUB, proxy.endpoint)
    join(tape, sub)
    proxy.delay(0.2)
    began = time.monotonic()
    tape.play(5)
    assert proxy.wait_until(lambda counts: counts.down.messages == 5, SECONDS)
    proxy.delay(0)
    tape.play(5)
    assert receive_seqs(sub, 1) == [0]
    assert time.monotonic() - began >= 0.2
    assert receive_seqs(sub, 9) == list(range(1, 10))


def test_subscriptions_and_heartbeats_pass_while_messages_are_held(tape: TapePlayer, proxy: FaultProxy, connect: Open) -> None:
    """Pings and pongs overtake held messages, so peers do not end a delayed connection."""
    proxy.delay()
    proxy.delay(direction="up")
    sub = connect(zmq.SUB, proxy.endpoint, {zmq.HEARTBEAT_IVL: 5, zmq.HEARTBEAT_TIMEOUT: 1000 * SECONDS})
    join(tape, sub)
    tape.play(1)
    assert proxy.wait_until(lambda counts: counts.down.held == 1, SECONDS)
    sent = proxy.counts
    assert proxy.wait_until(lambda now: now.down.bytes > sent.down.bytes + 20 and now.up.bytes > sent.up.bytes + 20, SECONDS)
    assert not sub.poll(0)
    proxy.heal()
    assert receive_seqs(sub, 1) == [0]


# Stalling and cutting


def test_a_stalled_connection_stays_open(tape: TapePlayer, proxy: FaultProxy, connect: Open) -> None:
    """Nothing passes and no side is closed. After `heal` everything arrives in order."""
    sub = connect(zmq.SUB, proxy.endpoint)
    join(tape, sub)
    proxy.stall()
    tape.play(3)
    other = connect(zmq.SUB, proxy.endpoint)
    assert not tape.wait_for_subscriber(0.05, count=2)
    assert not sub.poll(0)
    assert proxy.counts.open == 1
    proxy.heal()
    assert receive_seqs(sub, 3) == [0, 1, 2]
    assert tape.wait_for_subscriber(SECONDS, count=2)
    tape.play(1)
    assert receive_seqs(other, 1) == receive_seqs(sub, 1) == [3]


def test_a_stall_can_be_ended_alone(tape: TapePlayer, proxy: FaultProxy, connect: Open) -> None:
    """The rule for dropped messages stays, and the stalled messages arrive."""
    sub = connect(zmq.SUB, proxy.endpoint)
    join(tape, sub)
    proxy.drop(lambda frames: frames[1] == (1).to_bytes(8, "big"))
    proxy.stall()
    tape.play(3)
    assert not sub.poll(0)
    proxy.resume()
    assert receive_seqs(sub, 2) == [0, 2]


def test_heartbeats_notice_a_stall(tape: TapePlayer, proxy: FaultProxy, connect: Open) -> None:
    """Only heartbeats detect a half-open connection. The subscriber reconnects when the network works again."""
    sub = connect(zmq.SUB, proxy.endpoint, {zmq.HEARTBEAT_IVL: 50, zmq.HEARTBEAT_TIMEOUT: 50})
    join(tape, sub)
    with sub.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        proxy.stall()
        assert monitor.poll(1000 * SECONDS)
        sub.disable_monitor()
    proxy.heal()
    # The tape may still count the closed connection for a moment, so the test waits for a message that arrives.
    deadline = time.monotonic() + SECONDS
    while not sub.poll(10):
        assert time.monotonic() < deadline
        tape.send_raw([b"kv"])
    assert receive(sub) == [b"kv"]


def test_cut_connections_are_reestablished(tape: TapePlayer, proxy: FaultProxy, connect: Open) -> None:
    """A cut closes both sides at once and loses held messages. The peer reconnects to the same port."""
    sub = connect(zmq.SUB, proxy.endpoint)
    join(tape, sub)
    proxy.delay()
    tape.play(2)
    assert proxy.wait_until(lambda counts: counts.down.held == 2, SECONDS)
    proxy.cut()
    assert (proxy.counts.open, proxy.counts.down.held) == (0, 0)
    proxy.heal()
    wait_until_left(tape)
    join(tape, sub)
    tape.play(1)
    assert receive_seqs(sub, 1) == [2]
    assert proxy.counts.connections == 2


def test_a_cut_can_refuse_until_healed(tape: TapePlayer, proxy: FaultProxy, connect: Open) -> None:
    """The port refuses connections, stays reserved, and accepts connections again after `heal`."""
    sub = connect(zmq.SUB, proxy.endpoint)
    join(tape, sub)
    for _ in range(2):
        proxy.cut(refuse=True)
        assert proxy.counts.open == 0
        wait_until_left(tape)
        with socket.socket() as probe:
            assert probe.connect_ex(address(proxy)) == errno.ECONNREFUSED
    proxy.heal()
    proxy.heal()
    join(tape, sub)
    tape.play(1)
    assert receive_seqs(sub, 1) == [0]


def test_a_redirected_proxy_uses_another_upstream_until_healed(tape: TapePlayer, connect: Open) -> None:
    """The port then seems to belong to another engine. Each of the two changes ends existing connections."""
    other_tape = TapePlayer([(b"kv", seq, b"another") for seq in range(500, 510)])
    with other_tape as another, RedirectingProxy(tape.endpoint) as proxy:
        sub = connect(zmq.SUB, proxy.endpoint)
        join(tape, sub)
        proxy.redirect(another.endpoint)
        wait_until_left(tape)
        join(another, sub)
        another.play(1)
        assert receive_seqs(sub, 1) == [500]
        proxy.heal()
        wait_until_left(another)
        join(tape, sub)
        tape.play(1)
        assert receive_seqs(sub, 1) == [0]
        with pytest.raises(ConfigError):
            proxy.redirect("ipc://somewhere")


def test_connections_are_closed_while_the_upstream_is_unreachable(connect: Open) -> None:
    """Connections are accepted and closed again at each attempt, and work once upstream is reachable."""
    with TapePlayer(batches(1)) as tape, FaultProxy(tape.endpoint) as proxy:
        tape.stop()
        sub = connect(zmq.SUB, proxy.endpoint)
        assert proxy.wait_until(lambda counts: counts.refused >= 2, SECONDS)
        tape.restart()
        join(tape, sub)
        tape.play()
        assert receive_seqs(sub, 1) == [0]


def test_connections_are_limited(tape: TapePlayer) -> None:
    """Beyond the limit a connection is closed at once."""
    with (
        FaultProxy(tape.endpoint, limits=ProxyLimits(max_connections=1)) as proxy,
        socket.create_connection(address(proxy), SECONDS),
        socket.create_connection(address(proxy), SECONDS),
    ):
        assert proxy.wait_until(lambda counts: (counts.open, counts.refused) == (1, 1), SECONDS)


# Closing


def test_closing_is_idempotent(tape: TapePlayer, connect: Open) -> None:
    """`close` is called several times, from two threads, with held messages during a stall. Later calls of other methods raise
    `ClosedError`."""
    proxy = FaultProxy(tape.endpoint)
    join(tape, connect(zmq.SUB, proxy.endpoint))
    proxy.delay()
    tape.play(10)
    assert proxy.wait_until(lambda counts: counts.down.held == 10, SECONDS)
    proxy.stall()
    closers = [threading.Thread(target=proxy.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(SECONDS)
    proxy.close()
    assert "closed" in repr(proxy)
    with pytest.raises(ClosedError):
        proxy.heal()


def test_no_thread_or_descriptor_is_left() -> None:
    """This holds after a proxy with open connections is closed, and after a proxy could not listen."""
    with socket.create_server(("127.0.0.1", 0)) as server, leave_nothing_open():
        upstream = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for _ in range(3):
            with FaultProxy(upstream) as proxy:
                with socket.create_connection(address(proxy), SECONDS):
                    assert proxy.wait_until(lambda counts: counts.open == 1, SECONDS)
                    proxy.cut()
                with pytest.raises(EndpointError, match="cannot listen"):
                    FaultProxy(upstream, proxy.endpoint)


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/x", "tcp://127.0.0.1", "nonsense"])
def test_only_tcp_is_proxied(endpoint: str) -> None:
    """Other transports are refused with a message."""
    with pytest.raises(ConfigError, match="expected tcp://HOST:PORT"):
        FaultProxy(endpoint)


# The splitter


def greeting(mechanism: bytes = b"NULL", major: int = 3) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f" + bytes([major, 1]) + mechanism.ljust(20, b"\0") + bytes(32)


def command(body: bytes) -> bytes:
    return bytes([4, len(body)]) + body


def message(*frames: bytes) -> bytes:
    raw = b""
    for at, body in enumerate(frames):
        more = at < len(frames) - 1
        raw += bytes([more, len(body)]) + body if len(body) < 256 else bytes([2 + more]) + len(body).to_bytes(8) + body
    return raw


@pytest.mark.parametrize("step", [1, 7, 64, 100_000])
def test_messages_are_split_for_any_sizes_of_reads(step: int) -> None:
    """Commands and whole messages are segments, in order, for any sizes of reads; together they are the stream."""
    parts = [command(b"READY"), message(b"a"), message(b"", b"x" * 300, b""), command(b"PING"), message(b"")]
    stream = greeting() + b"".join(parts)
    splitter = ZmtpSplitter()
    segments = [segment for at in range(0, len(stream), step) for segment in splitter.feed(stream[at : at + step])]
    assert b"".join(segment.raw for segment in segments) + splitter.remainder() == stream
    assert [segment for segment in segments if segment.kind != "raw"] == [
        Segment("command", parts[0]),
        Segment("message", parts[1], (b"a",)),
        Segment("message", parts[2], (b"", b"x" * 300, b"")),
        Segment("command", parts[3]),
        Segment("message", parts[4], (b"",)),
    ]


@pytest.mark.parametrize("opening", [greeting(b"CURVE"), greeting(major=2), b"GET / HTTP/1.1\r\n" * 10])
@pytest.mark.parametrize("step", [1, 5, 1000])
def test_other_protocols_pass_without_splitting(opening: bytes, step: int) -> None:
    """Streams of CURVE, older ZMTP and other protocols have no messages, and lose no byte."""
    stream = opening + message(b"a") + b"\xff" * 50
    splitter = ZmtpSplitter()
    segments = [segment for at in range(0, len(stream), step) for segment in splitter.feed(stream[at : at + step])]
    assert {segment.kind for segment in segments} == {"raw"}
    assert b"".join(segment.raw for segment in segments) + splitter.remainder() == stream


def test_a_message_beyond_the_limit_passes_without_splitting() -> None:
    """Memory is bounded: the message and everything after it is forwarded as it arrives."""
    splitter = ZmtpSplitter(max_message_bytes=100)
    small, large = message(b"a", b"b"), message(b"x" * 60, b"y" * 60)
    segments = splitter.feed(greeting() + small + large[:70])
    assert [segment.kind for segment in segments] == ["raw", "message", "raw"]
    assert splitter.feed(large[70:] + small) == [Segment("raw", large[70:] + small)]
    assert segments[-1].raw == large[:70]
