"""Receives the load reports of engines, and stores the newest report of each engine.

Reports have no timestamp, and only the newest report matters. The event loop of one thread receives a report as soon as it
arrives, so the age of a report is the time since its arrival. Reports older than `max_age_seconds` are not returned. A stream
that is absent, silent or invalid affects no other load. One report is stored for each source. Engines that publish no load are
polled in the same loop (`load_polling`). Host names are resolved in separate threads (`zeromq.name_resolver`). While a stream
with a host name is silent, its socket tries the addresses of the name one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import zmq

from kvevents.closeable import Closeable
from kvevents.endpoints import needs_ipv6
from kvevents.routing.load_readings import LoadReading, LoadSettings, LoadSource, OnLoad, RankLoad, is_load_url
from kvevents.routing.policy_types import Worker
from kvevents.wire.framing import Malformed, parse_live
from kvevents.wire.load import MAX_LOAD_BYTES, EngineLoad, decode_load
from kvevents.zeromq.name_resolver import Lookup, NameResolver, has_name
from kvevents.zeromq.sockets import SocketOptions, connect_or_bind, endpoint_errors, open_source_socket, private_context
from kvevents.zeromq.zap import SocketSecurity, secure_sockets

if TYPE_CHECKING:
    from kvevents.routing.load_polling import LoadPoller

_MESSAGES_PER_TURN: Final = 64
"""Maximum number of messages that are read from one stream before the other streams have their turn."""
_SOCKET_OPTIONS: Final = SocketOptions(receive_hwm=_MESSAGES_PER_TURN, max_message_bytes=2 * MAX_LOAD_BYTES)
_DEFAULT_SETTINGS: Final = LoadSettings()


class _LoadStream(RankLoad):
    """The load stream of one engine. Only the subscriber's thread changes its fields."""

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

    def connect(self, names: NameResolver[_LoadStream], now: float) -> None:
        """If the stream is silent, connect to the next address of its host name. `names` runs the lookup."""
        if now < self._resolve_at:
            return
        lookup = self._lookup or names.resolve(self.source.endpoint, self)
        if not lookup.is_done:
            self._lookup = lookup
            return
        self._lookup = None
        self._resolve_at, self._pause = now + self._pause, min(2 * self._pause, 60.0)
        self.fault = lookup.error
        if lookup.endpoints:
            address = lookup.endpoints[self._attempts % len(lookup.endpoints)]
            if address != self._address:
                with contextlib.suppress(zmq.ZMQError):  # before the first address, there is nothing to disconnect
                    self.socket.disconnect(self._address)
                self.socket.set(zmq.IPV6, int(needs_ipv6(address)))
                connect_or_bind(self.socket, address, bind=False)
                self._address = address
            self._attempts += 1

    def receive(self, now: float) -> bool:
        """Read at most `_MESSAGES_PER_TURN` messages that have arrived. Return whether there may be more to read."""
        for _ in range(_MESSAGES_PER_TURN):
            try:
                message = parse_live(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return False
            self._pause, self._resolve_at = self._quiet_seconds, now + self._quiet_seconds
            load = None if isinstance(message, Malformed) else decode_load(message.payload)
            if load is None:
                self.reject()
            else:
                self.store(load, now)
        return True

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.socket.close(linger=0)
        if self._security is not None:
            self._security.close()
            self._security = None


class LoadSubscriber(Closeable):
    """Receives the loads that engines publish, and polls engines that publish none. Any thread may call every method.

    `Router(engine_load=...)` accepts the method `load`. `on_load` is called with each load, in the subscriber's thread;
    exceptions that it raises are logged. Raises `ConfigError` and `EndpointError`, and `MissingDependencyError` if a source
    must be polled and the extra `service` is not installed.
    """

    def __init__(
        self, sources: Iterable[LoadSource] = (), *, settings: LoadSettings = _DEFAULT_SETTINGS, on_load: OnLoad | None = None
    ) -> None:
        self._settings: Final = settings
        self._on_load: Final = on_load
        with endpoint_errors("load", "cannot open a context for load streams"):
            self._context: Final = private_context()
        self._readings: dict[Worker, RankLoad] = {}
        self._poller: LoadPoller | None = None
        self._lock: Final = threading.Lock()
        self._loop: Final = asyncio.new_event_loop()
        self._has_ended: Final = asyncio.Event()
        self._streams: Final = set[_LoadStream]()
        self._names: Final = NameResolver[_LoadStream](
            lambda end, take_resolved: self._loop.add_reader(end, lambda: self._resolve(take_resolved()))
        )
        self._thread: Final = threading.Thread(target=self._run, name="kvevents-load", daemon=True)
        try:
            for source in sources:
                self.add(source)
        except BaseException:
            self._close_loop()
            raise
        self._thread.start()

    def add(self, source: LoadSource) -> None:
        """Follow the load of a worker. A new source replaces the worker's former source. Raises `EndpointError`."""
        is_polled = is_load_url(source.endpoint)
        readings = RankLoad(source, self._on_load) if is_polled else self._connect(source)
        with self._lock:
            if is_polled and self._poller is None:
                from kvevents.routing.load_polling import LoadPoller  # noqa: PLC0415 - needs aiohttp, an extra

                self._poller = LoadPoller(self._settings)
            former = self._readings.pop(source.worker, None)
            self._readings[source.worker] = readings
            self._run_in_thread(self._end_reading, former)
            self._run_in_thread(self._begin_reading, readings)

    def _connect(self, source: LoadSource) -> _LoadStream:
        with contextlib.ExitStack() as undo:
            security = secure_sockets(self._context, source.curve, source.endpoint)
            if security is not None:
                undo.callback(security.close)
            socket = open_source_socket(self._context, zmq.SUB, source.endpoint, _SOCKET_OPTIONS, security, is_private=True)
            undo.callback(socket.close, linger=0)
            socket.set(zmq.RCVHWM, _SOCKET_OPTIONS.receive_hwm)
            socket.set(zmq.SUBSCRIBE, source.topic.encode())
            if not has_name(source.endpoint):
                connect_or_bind(socket, source.endpoint, bind=False)
            undo.pop_all()
        return _LoadStream(source, socket, security, self._on_load, self._settings.resolve_seconds)

    def remove(self, worker: Worker) -> None:
        """Stop following a worker's load. Does nothing if the worker is unknown."""
        with self._lock:
            self._run_in_thread(self._end_reading, self._readings.pop(worker, None))

    def load(self, worker: Worker) -> EngineLoad | None:
        """Return the newest load of `worker`; None if no load has arrived in the last `max_age_seconds`."""
        readings = self._readings.get(worker)
        return None if readings is None else readings.load(time.monotonic(), self._settings.max_age_seconds)

    def reading(self, worker: Worker) -> LoadReading | None:
        """Return the newest reading of a worker with its age; None if the worker is not followed."""
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
        self._run_in_thread(self._has_ended.set)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __repr__(self) -> str:
        return f"<LoadSubscriber {len(self._readings)} workers>"

    # --- methods of the subscriber's thread

    def _run_in_thread(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # if the thread has ended, nothing needs the call
            self._loop.call_soon_threadsafe(call, *arguments)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._follow())
        finally:
            self._close_loop()

    async def _follow(self) -> None:
        while not self._has_ended.is_set():
            self._resolve(self._streams)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.resolve_seconds):
                    await self._has_ended.wait()
        if self._poller is not None:
            await self._poller.close()

    def _resolve(self, streams: Iterable[_LoadStream]) -> None:
        for stream in list(streams):
            stream.connect(self._names, time.monotonic())

    def _begin_reading(self, readings: RankLoad) -> None:
        if isinstance(readings, _LoadStream):
            self._streams.add(readings)
            self._loop.add_reader(readings.socket.fileno(), self._receive, readings)
            self._resolve([readings])
            self._receive(readings)
        elif self._poller is not None:
            self._poller.add(readings)

    def _receive(self, stream: _LoadStream) -> None:
        # The file descriptor is edge-triggered: it only reports new messages, so all messages are read before the next wait.
        if not stream.socket.closed and stream.receive(time.monotonic()):
            self._loop.call_soon(self._receive, stream)

    def _end_reading(self, readings: RankLoad | None) -> None:
        if isinstance(readings, _LoadStream):
            self._loop.remove_reader(readings.socket.fileno())
            self._streams.discard(readings)
            self._names.forget(readings)
            readings.close()
        elif readings is not None and self._poller is not None:
            self._poller.remove(readings)

    def _close_loop(self) -> None:
        with self._lock:
            self._loop.close()
            for readings in self._readings.values():
                if isinstance(readings, _LoadStream):
                    readings.close()
        self._context.destroy(linger=0)
        self._names.close()
