"""Engines for the conformance suite of connections: tests run the same steps with real and with fake connections."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import zmq
from msgspec.structs import replace

from kvevents.stream import Source
from kvevents.subscriber import Connection, SocketOptions, Transport, ZmqTransport
from kvevents.testing import FakeEngine, FakeTransport, zmtp
from kvevents.wire import (
    Live,
    ReplayBatch,
    ReplayEnd,
    live_frames,
    parse_live,
    parse_replay_reply,
    replay_batch_frames,
    replay_end_frames,
)
from tools.ports import LOOPBACK, reserve_port
from zmtp_peer import GREETING, PUB

DEADLINE: Final = 60.0
"""Seconds after which a test fails."""
TOPIC: Final = b"kv"
PAYLOAD: Final = b"\x93\xcb\0\0\0\0\0\0\0\0\x90\xc0"
OPTIONS: Final = SocketOptions(reconnect_ms=10, reconnect_max_ms=40, handshake_ms=20_000, max_message_bytes=4_000)


class Recorder:
    """Records the calls of a connection, in place of a stream: every call in order, with the numbers of batches.

    With `reads_ahead` it returns the numbers that it expects, like a stream without missing batches.
    """

    topic = TOPIC

    def __init__(self, *, reads_ahead: bool) -> None:
        self.log: list[object] = []
        """`"up"`, `"down"`, numbers of live batches, `("replay", number)`, `"end"` of a reply, `("odd", frames)`."""
        self._reads_ahead = reads_ahead
        self._next = 0

    def expected_run(self, limit: int) -> range:
        return range(self._next, self._next + limit) if self._reads_ahead else range(0)

    def receive_run(self, payloads: Sequence[bytes], _now: float) -> None:
        assert all(isinstance(payload, bytes) for payload in payloads)
        self.log += range(self._next, self._next + len(payloads))
        self._next += len(payloads)

    def receive_live(self, frames: Sequence[bytes], _now: float) -> None:
        live = parse_live(frames)
        if isinstance(live, Live):
            self.log.append(live.seq)
            self._next = live.seq + 1
        else:
            self.log.append(("odd", len(frames)))

    def receive_replay(self, frames: Sequence[bytes], _now: float) -> None:
        reply = parse_replay_reply(frames)
        if isinstance(reply, ReplayEnd):
            self.log.append("end")
        else:
            self.log.append(("replay", reply.seq) if isinstance(reply, ReplayBatch) else ("odd", len(frames)))

    def defer_replay_timeout(self, _now: float) -> None:
        assert self._reads_ahead

    def begin_connection(self, _now: float) -> None:
        self.log.append("up")

    def end_connection(self) -> None:
        self.log.append("down")

    @property
    def numbers(self) -> list[int]:
        return [each for each in self.log if isinstance(each, int)]


class Engine(Protocol):
    """The remote side of a connection, controlled by a test."""

    source: Source

    def publish(self, *numbers: int) -> None:
        """Send these batches live."""

    def send_raw(self, frames: list[bytes]) -> None:
        """Send any frames live."""

    def cut(self) -> None:
        """End the connection after everything that was sent, and refuse new ones."""

    def come_back(self) -> None:
        """Accept connections again."""

    def answer(self, *numbers: int) -> None:
        """Answer the next request for replay with these batches and an end marker."""


class RealEngine:
    """A publisher of plain TCP sockets, and a ROUTER: the test decides which bytes are sent when."""

    def __init__(self) -> None:
        self._port = reserve_port()
        self._connections: queue.Queue[socket.socket] = queue.Queue()
        """Connections that are up, in the order in which they were accepted."""
        self._current: socket.socket | None = None
        self._server: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self.subscription_count = 0
        """Number of connections that have subscribed, which libzmq does only when its socket is used."""
        self.received = b""
        """Bytes that subscribers have sent after their subscription."""
        self.requesters: list[bytes] = []
        """Routing ids of requests, a different one for each connection."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        replay_port = self._router.bind_to_random_port(f"tcp://{LOOPBACK}")
        self.source = Source(f"tcp://{LOOPBACK}:{self._port}", f"tcp://{LOOPBACK}:{replay_port}", topic="kv", name="e")
        self.come_back()

    def come_back(self) -> None:
        self._server = socket.create_server((LOOPBACK, self._port))
        self._start(self._accept, self._server)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                connection.settimeout(DEADLINE)
                self._start(self._greet, connection)

    def _greet(self, connection: socket.socket) -> None:
        """Complete the handshake, then read until the subscriber closes."""
        with suppress(OSError), connection:
            connection.sendall(GREETING + PUB)
            connection.recv(zmtp.GREETING_BYTES, socket.MSG_WAITALL)
            for expected in ("READY", "SUBSCRIBE"):
                if expected == "SUBSCRIBE":
                    self.subscription_count += 1
                flags_and_size = connection.recv(2, socket.MSG_WAITALL)
                if len(flags_and_size) < 2:
                    return  # the subscriber has closed
                connection.recv(flags_and_size[1], socket.MSG_WAITALL)
            self._connections.put(connection)
            while received := connection.recv(1 << 16):
                self.received += received

    def wait_for_subscriber(self, reader: Callable[[], None]) -> None:
        """Wait until there is a newer connection than the current one."""
        end = time.monotonic() + DEADLINE
        while self._connections.empty():
            assert time.monotonic() < end, "no subscriber came"
            reader()
        self._current = self._connections.get()

    def send_bytes(self, *parts: bytes) -> None:
        assert self._current is not None
        self._current.sendall(b"".join(parts))

    def publish(self, *numbers: int) -> None:
        self.send_bytes(*(zmtp.encode_message(live_frames(TOPIC, number, PAYLOAD)) for number in numbers))

    def send_raw(self, frames: list[bytes]) -> None:
        self.send_bytes(zmtp.encode_message(frames))

    def cut(self) -> None:
        self._stop_listening()
        self.end_connection()

    def end_connection(self) -> None:
        """End the connection only, so that the subscriber may reconnect at once."""
        if self._current is not None:
            # Not close(): if bytes of the subscriber are unread, the system would discard what was sent to it.
            with suppress(OSError):
                self._current.shutdown(socket.SHUT_WR)
            self._current = None

    def _stop_listening(self) -> None:
        if self._server is not None:
            with suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
            self._server = None

    def answer(self, *numbers: int) -> None:
        assert self._router.poll(int(1000 * DEADLINE)), "no replay was requested"
        requester, *_ = self._router.recv_multipart()
        self.requesters.append(requester)
        for number in numbers:
            self._router.send_multipart([requester, *replay_batch_frames(TOPIC, number, PAYLOAD)])
        self._router.send_multipart([requester, *replay_end_frames(has_topic=True)])

    def close(self) -> None:
        self.cut()
        while not self._connections.empty():
            self._connections.get().close()
        self._context.destroy(linger=0)
        for thread in self._threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()


class RealRig:
    """A transport over real connections, and its engines."""

    def __init__(self, **options: Any) -> None:
        self.transport = ZmqTransport(options=replace(OPTIONS, **options))
        self.clock = time.monotonic
        self._engines: list[RealEngine] = []

    def engine(self) -> RealEngine:
        self._engines.append(RealEngine())
        return self._engines[-1]

    def connect(self, engine: RealEngine, reader: Callable[[], None]) -> None:
        """Wait until the subscriber is connected to the engine."""
        engine.wait_for_subscriber(reader)

    def connect_unread(self, engine: RealEngine, count: int) -> None:
        """Wait until libzmq has connected `count` times, without reading from it."""
        end = time.monotonic() + DEADLINE
        while engine.subscription_count < count:
            assert time.monotonic() < end, "no subscriber came"
            time.sleep(0.001)

    def settle(self, connection: Any) -> None:
        """Wait until libzmq has noticed the end of a connection."""
        assert connection._live._monitor.poll(int(1000 * DEADLINE))

    def close(self) -> None:
        self.transport.close()
        for engine in self._engines:
            engine.close()


class FakeRigEngine:
    """A `FakeEngine` with the interface of `Engine`."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.source = Source(engine.endpoint, engine.replay_endpoint, topic="kv", name="e")

    def publish(self, *numbers: int) -> None:
        for number in numbers:
            self._engine.send_raw(live_frames(TOPIC, number, PAYLOAD))

    def send_raw(self, frames: list[bytes]) -> None:
        self._engine.send_raw(frames)

    def cut(self) -> None:
        self._engine.disconnect()

    def come_back(self) -> None:
        self._engine.reconnect()

    def answer(self, *numbers: int) -> None:
        """Replace the answers that the fake has queued already."""
        assert self._engine.requests
        for connection in self._engine.connections:
            connection.replies.clear()
            connection.replies.extend([*(replay_batch_frames(TOPIC, number, PAYLOAD) for number in numbers)])
            connection.replies.append(replay_end_frames(has_topic=True))


class FakeRig:
    """The fake transport, which ignores socket options."""

    def __init__(self, **_options: Any) -> None:
        self.transport = FakeTransport()
        self.clock = self.transport.clock
        self._count = 0

    def engine(self) -> FakeRigEngine:
        self._count += 1
        return FakeRigEngine(self.transport.engine(f"tcp://engine:{self._count}", f"tcp://replay:{self._count}", TOPIC))

    def connect(self, _engine: FakeRigEngine, reader: Callable[[], None]) -> None:
        reader()

    def connect_unread(self, _engine: FakeRigEngine, _count: int) -> None:
        """Wait until libzmq has connected `count` times, without reading from it."""

    def settle(self, _connection: Connection) -> None:
        """Wait until libzmq has noticed the end of a connection."""

    def close(self) -> None:
        self.transport.close()


Rig = RealRig | FakeRig
RIGS: Final[dict[str, Callable[..., Rig]]] = {
    "libzmq": RealRig,
    "fake": FakeRig,
}


class Reader:
    """Reads one connection as the multiplexer does: when it is signalled, when it has more to read, and at its deadline."""

    def __init__(
        self, transport: Transport, connection: Connection, recorder: Any, clock: Callable[[], float], limit: int
    ) -> None:
        self.connection = connection
        self.recorder = recorder
        self._transport = transport
        self._clock = clock
        self._limit = limit
        self._more = True

    def __call__(self) -> None:
        """Read once, after a short wait if there is nothing to read."""
        due = self.connection.deadline()
        signalled = self._transport.wait(0 if self._more else 0.005)
        now = self._clock()
        if self._more or self.connection in signalled or (due is not None and due <= now):
            self._more = self.connection.feed_stream(self.recorder, now, self._limit)

    def now(self) -> None:
        """Read once, whether or not there was a signal, because another reader may have consumed it."""
        self._more = True
        self()

    def read_until(self, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not reached():
            assert time.monotonic() < end, self.recorder.log
            self()

    def read_until_quiet(self, rounds: int = 10) -> None:
        """Read until nothing has arrived for some rounds."""
        for _ in range(rounds):
            self()
