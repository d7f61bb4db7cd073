"""Follows the load of engines, and keeps the newest reading of each.

Theory of operation: readings have no time of their own, and only the newest one matters. A thread receives them as they come,
so that the age of a reading is that of its arrival; a reading older than `max_age_seconds` is not returned. A stream that is
absent, silent or invalid therefore costs its signal and nothing else. One reading is stored for each source. Engines that
publish no load are polled instead, in another thread (`load_polling`). Host names are resolved in threads of their own
(`zeromq.name_resolver`): while a stream with a name is silent, its socket goes through the addresses of the name.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final, Self

import zmq

from kvevents.endpoints import needs_ipv6
from kvevents.errors import EndpointError
from kvevents.routing.engine_load import MAX_LOAD_BYTES, EngineLoad, decode_load
from kvevents.routing.load_readings import (
    LoadReading,
    LoadSettings,
    LoadSource,
    OnLoad,
    Readings,
    Worker,
    is_load_url,
)
from kvevents.wire.framing import Malformed, parse_live
from kvevents.zeromq.name_resolver import Lookup, NameResolver, has_name
from kvevents.zeromq.sockets import SocketFactory, SocketOptions, connect_or_bind, endpoint_errors, private_context
from kvevents.zeromq.zap import SocketSecurity, secure_sockets

if TYPE_CHECKING:
    from kvevents.routing.load_polling import LoadPoller

_logger: Final = logging.getLogger(__name__)
_MESSAGES_PER_TURN: Final = 64
"""Maximum number of messages of one stream that are read before other streams have their turn."""
_OPTIONS: Final = SocketOptions(receive_hwm=_MESSAGES_PER_TURN, max_message_bytes=2 * MAX_LOAD_BYTES)
_DEFAULT_SETTINGS: Final = LoadSettings()
_MAX_RESOLVE_SECONDS: Final = 60.0
"""Longest time between two lookups of the name of a silent stream."""


class _Stream(Readings):
    """The load stream of one engine. The thread of the subscriber writes it."""

    def __init__(
        self,
        source: LoadSource,
        socket: zmq.Socket[bytes],
        security: SocketSecurity | None,
        on_load: OnLoad | None,
        resolve_seconds: float,
    ) -> None:
        super().__init__(source, on_load)
        self.socket: Final = socket
        self._security = security
        self._quiet_seconds: Final = resolve_seconds if has_name(source.endpoint) else math.inf
        self._pause = self._quiet_seconds
        self._resolve_at = 0.0 if has_name(source.endpoint) else math.inf
        self._lookup: Lookup | None = None
        self._address = ""
        self._attempts = 0

    def connect(self, names: NameResolver[_Stream], now: float) -> None:
        """If the stream is silent, connect to the next address of its host name; `names` reports when that is known."""
        if now < self._resolve_at:
            return
        lookup = self._lookup or names.resolve(self.source.endpoint, self)
        if not lookup.is_done:
            self._lookup = lookup
            return
        self._lookup = None
        self._resolve_at, self._pause = now + self._pause, min(2 * self._pause, _MAX_RESOLVE_SECONDS)
        self.fault = lookup.error
        if lookup.endpoints:
            self._connect_to(lookup.endpoints[self._attempts % len(lookup.endpoints)])
            self._attempts += 1

    def _connect_to(self, address: str) -> None:
        if address != self._address:
            with contextlib.suppress(zmq.ZMQError):  # there was no address before
                self.socket.disconnect(self._address)
            self.socket.set(zmq.IPV6, int(needs_ipv6(address)))
            connect_or_bind(self.socket, address, bind=False)
            self._address = address

    def receive(self, now: float) -> None:
        """Read the messages that have arrived, up to a limit."""
        for _ in range(_MESSAGES_PER_TURN):
            try:
                message = parse_live(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._pause, self._resolve_at = self._quiet_seconds, now + self._quiet_seconds
            load = None if isinstance(message, Malformed) else decode_load(message.payload)
            if load is None:
                self.reject()
            else:
                self.store(load, now)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.socket.close(linger=0)
        if self._security is not None:
            self._security.close()
            self._security = None


class LoadSubscriber:
    """Receives the loads that engines publish, and polls engines that publish none. Any thread may call every method.

    `load(worker)` fits `Router(engine_load=...)`. `on_load` is called with each load that arrives, in another thread; what it
    raises is logged. Raises `ConfigError` and `EndpointError`, and `MissingDependencyError` for a source to poll without the
    extra `service`.
    """

    def __init__(
        self,
        sources: Iterable[LoadSource] = (),
        *,
        settings: LoadSettings = _DEFAULT_SETTINGS,
        on_load: OnLoad | None = None,
    ) -> None:
        self._settings: Final = settings
        self._on_load: Final = on_load
        with endpoint_errors("load", "cannot open a context for load streams"):
            self._context: Final = private_context()
        self._readings: dict[Worker, Readings] = {}
        self._poller: LoadPoller | None = None
        self._lock: Final = threading.Lock()
        self._commands: Final[deque[tuple[_Stream, bool]]] = deque()
        self._is_closing = False
        self._selector: Final = zmq.Poller()
        self._names: Final = NameResolver[_Stream](self._watch_names)
        self._take_resolved: Callable[[], Collection[_Stream]] = tuple
        self._wake_end, self._waking_end = socket.socketpair()
        self._wake_end.setblocking(False)
        self._waking_end.setblocking(False)
        self._thread: Final = threading.Thread(target=self._run, name="kvevents-load", daemon=True)
        try:
            for source in sources:
                self.add(source)
        except BaseException:
            self._release()
            self._close_poller()
            raise
        self._thread.start()

    def add(self, source: LoadSource) -> None:
        """Follow the load of a worker, in place of the source that it had. Raises `EndpointError`."""
        is_polled = is_load_url(source.endpoint)
        readings = Readings(source, self._on_load) if is_polled else self._connect(source)
        with self._lock:
            poller = self._polling() if is_polled else None
            former = self._readings.pop(source.worker, None)
            self._readings[source.worker] = readings
            self._end(former)
            if isinstance(readings, _Stream):
                # The socket changes its thread here: the lock orders both threads, as libzmq requires.
                self._commands.append((readings, True))
            elif poller is not None:
                poller.add(readings)
        self._wake()

    def _connect(self, source: LoadSource) -> _Stream:
        security = secure_sockets(self._context, source.curve, source.endpoint)
        try:
            socket = SocketFactory(self._context, _OPTIONS, security, is_private=True).open(zmq.SUB, source.endpoint)
        except EndpointError:
            if security is not None:
                security.close()
            raise
        stream = _Stream(source, socket, security, self._on_load, self._settings.resolve_seconds)
        try:
            socket.set(zmq.RCVHWM, _OPTIONS.receive_hwm)
            socket.set(zmq.SUBSCRIBE, source.topic.encode())
            if not has_name(source.endpoint):
                connect_or_bind(socket, source.endpoint, bind=False)
        except EndpointError:
            stream.close()
            raise
        return stream

    def _polling(self) -> LoadPoller:
        if self._poller is None:
            from kvevents.routing.load_polling import LoadPoller  # noqa: PLC0415 - needs aiohttp, an extra

            self._poller = LoadPoller(self._settings)
        return self._poller

    def remove(self, worker: Worker) -> None:
        """Stop following a worker's load. Does nothing if it is unknown."""
        with self._lock:
            self._end(self._readings.pop(worker, None))
        self._wake()

    def _end(self, former: Readings | None) -> None:
        if isinstance(former, _Stream):
            self._commands.append((former, False))
        elif former is not None and self._poller is not None:
            self._poller.remove(former)

    def load(self, worker: Worker) -> EngineLoad | None:
        """Return the newest load of a worker; None if it is unknown, silent, or older than `max_age_seconds`."""
        readings = self._readings.get(worker)
        return None if readings is None else readings.load(time.monotonic(), self._settings.max_age_seconds)

    def reading(self, worker: Worker) -> LoadReading | None:
        """Return the newest reading of a worker with its age; None if it is not followed."""
        readings = self._readings.get(worker)
        return None if readings is None else readings.reading(time.monotonic(), self._settings.max_age_seconds)

    def readings(self) -> dict[Worker, LoadReading]:
        """Return the newest reading of every worker with its age, for people and metrics."""
        with self._lock:
            items = list(self._readings.items())
        now = time.monotonic()
        return {worker: readings.reading(now, self._settings.max_age_seconds) for worker, readings in items}

    def close(self) -> None:
        """Close all connections and end the thread. Idempotent."""
        self._is_closing = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._close_poller()

    def _close_poller(self) -> None:
        with self._lock:
            poller, self._poller = self._poller, None
        if poller is not None:
            poller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LoadSubscriber {len(self._readings)} workers>"

    # --- the thread

    def _run(self) -> None:
        streams = dict[zmq.Socket[bytes], _Stream]()
        self._selector.register(self._wake_end, zmq.POLLIN)
        seconds, look_at = self._settings.resolve_seconds, 0.0
        try:
            while not self._is_closing:
                for ready, _ in self._selector.poll(int(seconds * 1000)):
                    stream = streams.get(ready)
                    if stream is None:
                        self._run_requests(streams)
                    elif not stream.socket.closed:
                        stream.receive(time.monotonic())
                due, now = self._take_resolved(), time.monotonic()
                if now >= look_at:
                    due, look_at = streams.values(), now + seconds
                for stream in due:
                    stream.connect(self._names, now)
        except Exception:
            _logger.exception("receiving the load of engines has failed; their load is unknown from now on")
        finally:
            self._release()

    def _watch_names(self, end: socket.socket, take_resolved: Callable[[], Collection[_Stream]]) -> None:
        self._selector.register(end, zmq.POLLIN)
        self._take_resolved = take_resolved

    def _run_requests(self, streams: dict[zmq.Socket[bytes], _Stream]) -> None:
        """Start or stop following streams, as other threads have requested."""
        with contextlib.suppress(BlockingIOError):
            while self._wake_end.recv(4_096):
                pass
        while True:
            with self._lock:
                if not self._commands:
                    return
                stream, follows = self._commands.popleft()
            if follows:
                self._selector.register(stream.socket, zmq.POLLIN)
                streams[stream.socket] = stream
                stream.connect(self._names, time.monotonic())
            else:
                if streams.pop(stream.socket, None) is not None:
                    self._selector.unregister(stream.socket)
                self._names.forget(stream)
                stream.close()

    def _wake(self) -> None:
        # A full buffer wakes the thread as well; a closed socket has none.
        with contextlib.suppress(OSError):
            self._waking_end.send(b"\0")

    def _release(self) -> None:
        with self._lock:
            for stream in [*self._readings.values(), *(stream for stream, _ in self._commands)]:
                if isinstance(stream, _Stream):
                    stream.close()
            self._commands.clear()
        self._context.destroy(linger=0)
        self._names.close()
        self._wake_end.close()
        self._waking_end.close()
