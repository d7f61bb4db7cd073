"""Follows the load streams of engines, and keeps the newest reading of each.

Theory of operation: readings have no time of their own, and only the newest one matters. A thread receives them as they come,
so that the age of a reading is that of its arrival; a reading older than `max_age` is not returned. A stream that is absent,
silent or invalid therefore costs its signal and nothing else. One reading is stored for each source.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

import zmq

from kvevents.endpoints import validate_endpoint
from kvevents.errors import ConfigError, EndpointError
from kvevents.security import Curve
from kvevents.security.zap import SocketSecurity, secure_sockets
from kvevents.subscriber.zmq_sockets import SocketFactory, SocketOptions, connect_or_bind, endpoint_errors, private_context
from kvevents.wire.framing import Malformed, parse_live
from kvevents.wire.load import LOAD_TOPIC, MAX_LOAD_BYTES, EngineLoad, decode_load

_logger: Final = logging.getLogger(__name__)
Worker: TypeAlias = tuple[str, int]
"""Source and rank."""
DEFAULT_MAX_AGE: Final = 5.0
"""Seconds after which a reading no longer counts. SGLang repeats an unchanged one every second, and a step of a large prompt
takes a few seconds."""
_MESSAGES_PER_TURN: Final = 64
"""Messages of one stream that are read before those of the others."""
_OPTIONS: Final = SocketOptions(receive_hwm=_MESSAGES_PER_TURN, max_message_bytes=2 * MAX_LOAD_BYTES)


@dataclass(frozen=True, slots=True)
class LoadSource:
    """The load stream of one rank."""

    endpoint: str
    """Where the rank publishes its load, such as `tcp://10.0.0.7:5559`: SGLang's `load_endpoint_port_base` plus the rank."""
    name: str
    """Name of the engine, as in `Source.name`."""
    rank: int = 0
    topic: str = LOAD_TOPIC
    """Prefix of the topics to receive."""
    curve: Curve | None = None

    def __post_init__(self) -> None:
        validate_endpoint(self.endpoint)
        if self.rank < 0:
            raise ConfigError(f"invalid rank {self.rank} of {self.name}: expected a number from 0")

    @property
    def worker(self) -> Worker:
        """Name and rank."""
        return self.name, self.rank


@dataclass(frozen=True, slots=True)
class LoadReading:
    """The newest reading of one stream, and what was received of it."""

    load: EngineLoad | None
    """None if no reading has come, or the newest one is older than `max_age`."""
    age: float | None
    """Seconds since the newest reading arrived; None before the first."""
    received: int
    """Readings so far."""
    rejected: int
    """Messages that are no reading."""


class _Stream:
    """One load stream. The thread of the subscriber writes it; each field is replaced as a whole."""

    def __init__(self, socket: zmq.Socket[bytes], security: SocketSecurity | None) -> None:
        self.socket: Final = socket
        self._security = security
        self.newest: tuple[EngineLoad, float] | None = None
        self.received = 0
        self.rejected = 0

    def receive(self, now: float) -> None:
        """Read what has come, up to a limit."""
        for _ in range(_MESSAGES_PER_TURN):
            try:
                parsed = parse_live(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            load = None if isinstance(parsed, Malformed) else decode_load(parsed.payload)
            if load is None:
                self.rejected += 1
            else:
                self.received += 1
                self.newest = load, now

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.socket.close(linger=0)
        if self._security is not None:
            self._security.close()
            self._security = None


class LoadSubscriber:
    """Receives the load that engines report in a thread of its own. Any thread may call every method.

    `load(worker)` fits `Router(engine_load=...)`. `max_age` is in seconds. Raises `ConfigError` and `EndpointError`.
    """

    def __init__(self, sources: Iterable[LoadSource] = (), *, max_age: float = DEFAULT_MAX_AGE) -> None:
        if not max_age > 0:
            raise ConfigError(f"invalid max_age {max_age}: expected a number of seconds above 0")
        self._max_age: Final = max_age
        with endpoint_errors("load", "cannot open a context for load streams"):
            self._context: Final = private_context()
        self._streams: dict[Worker, _Stream] = {}
        self._lock: Final = threading.Lock()
        self._commands: Final[deque[tuple[_Stream, bool]]] = deque()
        self._is_closing = False
        self._wake_end, self._waking_end = socket.socketpair()
        self._wake_end.setblocking(False)
        self._waking_end.setblocking(False)
        self._thread: Final = threading.Thread(target=self._run, name="kvevents-load", daemon=True)
        try:
            for source in sources:
                self.add(source)
        except BaseException:
            self._release()
            raise
        self._thread.start()

    def add(self, source: LoadSource) -> None:
        """Follow a load stream, in place of the one that this worker had. Raises `EndpointError`."""
        security = secure_sockets(self._context, source.curve, source.endpoint)
        try:
            connected = SocketFactory(self._context, _OPTIONS, security, is_private=True).open(zmq.SUB, source.endpoint)
        except EndpointError:
            if security is not None:
                security.close()
            raise
        stream = _Stream(connected, security)
        try:
            connected.set(zmq.RCVHWM, _OPTIONS.receive_hwm)
            connected.set(zmq.SUBSCRIBE, source.topic.encode())
            connect_or_bind(connected, source.endpoint, bind=False)
        except EndpointError:
            stream.close()
            raise
        with self._lock:
            former = self._streams.pop(source.worker, None)
            self._streams[source.worker] = stream
            if former is not None:
                self._commands.append((former, False))
            # The socket changes its thread here: the lock orders both threads, as libzmq requires.
            self._commands.append((stream, True))
        self._wake()

    def remove(self, worker: Worker) -> None:
        """Stop following a worker's load; nothing if it is unknown."""
        with self._lock:
            former = self._streams.pop(worker, None)
            if former is not None:
                self._commands.append((former, False))
        self._wake()

    def load(self, worker: Worker) -> EngineLoad | None:
        """Return the newest load of a worker; None if it is unknown, silent, or older than `max_age`."""
        stream = self._streams.get(worker)
        newest = None if stream is None else stream.newest
        return None if newest is None or time.monotonic() - newest[1] > self._max_age else newest[0]

    def reading(self, worker: Worker) -> LoadReading | None:
        """Return the newest reading of one stream with its age; None if it is not followed."""
        stream = self._streams.get(worker)
        return None if stream is None else self._reading(stream, time.monotonic())

    def readings(self) -> dict[Worker, LoadReading]:
        """Return the newest reading of every stream with its age, for people and metrics."""
        with self._lock:
            streams = list(self._streams.items())
        now = time.monotonic()
        return {worker: self._reading(stream, now) for worker, stream in streams}

    def _reading(self, stream: _Stream, now: float) -> LoadReading:
        newest = stream.newest
        age = None if newest is None else max(now - newest[1], 0.0)
        load = None if newest is None or age is None or age > self._max_age else newest[0]
        return LoadReading(load, age, stream.received, stream.rejected)

    def close(self) -> None:
        """Close all connections and end the thread. Idempotent."""
        self._is_closing = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LoadSubscriber {len(self._streams)} streams>"

    # --- the thread

    def _run(self) -> None:
        poller, followed = zmq.Poller(), dict[zmq.Socket[bytes], _Stream]()
        poller.register(self._wake_end, zmq.POLLIN)
        try:
            while not self._is_closing:
                for ready, _ in poller.poll():
                    stream = followed.get(ready)
                    if stream is None:
                        self._obey(poller, followed)
                    elif not stream.socket.closed:
                        stream.receive(time.monotonic())
        except Exception:
            _logger.exception("the load of engines is no longer received")
        finally:
            self._release()

    def _obey(self, poller: zmq.Poller, followed: dict[zmq.Socket[bytes], _Stream]) -> None:
        """Begin and end to follow streams."""
        with contextlib.suppress(BlockingIOError):
            while self._wake_end.recv(4_096):
                pass
        while True:
            with self._lock:
                if not self._commands:
                    return
                stream, follows = self._commands.popleft()
            if follows:
                poller.register(stream.socket, zmq.POLLIN)
                followed[stream.socket] = stream
            else:
                if followed.pop(stream.socket, None) is not None:
                    poller.unregister(stream.socket)
                stream.close()

    def _wake(self) -> None:
        # A full buffer wakes the thread as well; a closed socket has none.
        with contextlib.suppress(OSError):
            self._waking_end.send(b"\0")

    def _release(self) -> None:
        with self._lock:
            for stream in [*self._streams.values(), *(stream for stream, _ in self._commands)]:
                stream.close()
            self._commands.clear()
        self._context.destroy(linger=0)
        self._wake_end.close()
        self._waking_end.close()
