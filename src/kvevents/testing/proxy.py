"""A TCP proxy between ZeroMQ peers. On demand, it drops, delays and reorders messages, and stalls or cuts connections.

Put a proxy in front of each socket of an engine or of a `TapePlayer`::

    with TapePlayer("run.jsonl.gz") as tape, FaultProxy(tape.endpoint) as live:
        subscriber.connect(live.endpoint, tape.replay_endpoint)
        live.drop(0.05, seed=7)     # one message in twenty
        tape.play()
        live.cut()                  # end the connection
        live.heal()

Bytes pass unchanged. Only whole messages are dropped, swapped, held or injected, so that the peers' connection stays valid.
Handshakes, subscriptions and heartbeats always pass, except during a stall. The proxy recognises messages in ZMTP 3 with the
NULL mechanism. Other connections, such as those with CURVE, can only be stalled and cut: their messages cannot be dropped.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from kvevents.closeable import Closeable
from kvevents.endpoints import connectable_endpoint
from kvevents.errors import ClosedError, ConfigError, EndpointError
from kvevents.settings import check_finite
from kvevents.testing.ports import ReservedPort, reserve_port
from kvevents.testing.proxy_pipe import DirectionCounts, DirectionFaults, Pipe, Rule, change_counts
from kvevents.testing.zmtp import encode_message

LINGER_SECONDS: Final = 1.0
"""Maximum time for sending the last bytes from a peer that has closed its connection to the other peer."""
LOOP_ROUNDS_TO_CONNECT: Final = 4
"""Number of rounds of the event loop after which asyncio has a connection for each accepted socket. Two rounds are enough."""

Direction: TypeAlias = Literal["down", "up"]
"""`down`: from the upstream endpoint to the clients of the proxy. `up`: from the clients to upstream."""


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """Limits of a `FaultProxy`."""

    max_connections: int = 1_024
    """Maximum number of connections; each takes two file descriptors. Further connections are closed when they are accepted."""
    max_queued_bytes: int = 64 * 1024 * 1024
    """Maximum number of bytes that the proxy holds or queues for a slow reader, per direction of a connection. At the limit the
    proxy stops reading, as if the network were congested."""


@dataclass(slots=True)
class ProxyCounts:
    """Counters of a proxy since it was opened."""

    connections: int = 0
    """Number of connections that were accepted and connected to upstream."""
    open: int = 0
    """Number of connections that are open."""
    refused: int = 0
    """Number of connections that were accepted and closed at once: upstream was unreachable, or the limit was reached."""
    down: DirectionCounts = field(default_factory=DirectionCounts)
    up: DirectionCounts = field(default_factory=DirectionCounts)


class FaultProxy(Closeable):
    """Listens at `listen` and connects each client to `upstream`. Both are TCP endpoints. The OS chooses a port for `*`.

    The proxy is a context manager. Any thread may call its methods; each method returns when its effect is complete. Raise
    `EndpointError` if the proxy cannot listen, `ConfigError` for an endpoint that is not TCP.
    """

    def __init__(self, upstream: str, listen: str = "tcp://127.0.0.1:*", *, limits: ProxyLimits = ProxyLimits()) -> None:
        self._upstream = tcp_address(connectable_endpoint(upstream))
        self._limits = limits
        self._port = reserve_port(listen)
        self._condition = threading.Condition()
        """Guards the counters."""
        self._counts = ProxyCounts()
        self._directions = {
            "down": DirectionFaults(self._counts.down, self._condition, limits.max_queued_bytes),
            "up": DirectionFaults(self._counts.up, self._condition, limits.max_queued_bytes),
        }
        self._connections: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._failure: Exception | None = None
        self._server: asyncio.Server | None = None
        self._stop = asyncio.Event()
        self._flow = asyncio.Event()
        self._flow.set()
        listener = self._listener()
        self._port = ReservedPort(f"tcp://{listener.getsockname()[0]}:{listener.getsockname()[1]}", self._port.holder)
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(listener, ready), name="kvevents-proxy", daemon=True)
        self._thread.start()
        ready.result()

    # --- state of the proxy

    @property
    def endpoint(self) -> str:
        """Endpoint for clients, which stays the same when connections are cut."""
        return connectable_endpoint(self._port.endpoint)

    @property
    def counts(self) -> ProxyCounts:
        """A copy of the counters."""
        with self._condition:
            return replace(self._counts, down=replace(self._counts.down), up=replace(self._counts.up))

    def wait_until(self, condition: Callable[[ProxyCounts], bool], timeout: float) -> bool:
        """Wait for a condition like `lambda counts: counts.down.held == 3`. Return False if `timeout` seconds pass first."""
        with self._condition:
            return self._condition.wait_for(lambda: condition(self._counts), check_finite(timeout))

    def __repr__(self) -> str:
        counts = self.counts
        state = "closed" if self._is_closed else f"{counts.open} connections"
        return (
            f"<FaultProxy {self.endpoint} to tcp://{self._upstream[0]}:{self._upstream[1]} {state},"
            f" down {counts.down.messages} ({counts.down.dropped} dropped),"
            f" up {counts.up.messages} ({counts.up.dropped} dropped)>"
        )

    # --- faults

    def drop(self, rule: Rule, *, direction: Direction = "down", seed: int = 0) -> None:
        """Drop messages by `rule`, which replaces the previous rule; None drops nothing.

        If the rule is a share, messages are selected at random, with `seed`. If a rule raises an exception, the connection
        ends, and `close` raises the same exception. Raise `ConfigError` for a share outside 0.0 to 1.0 or a negative count.
        """
        if isinstance(rule, int | float) and not (0 <= rule <= 1 or (isinstance(rule, int) and rule >= 0)):
            raise ConfigError(f"invalid drop rule {rule}: expected a count of 0 or more or a share from 0.0 to 1.0")
        self._run_in_loop(lambda: self._directions[direction].set_drops(rule, seed))

    def reorder(self, share: float, *, direction: Direction = "down", seed: int = 0) -> None:
        """Swap each message of a share with the message after it, if the two arrive together.

        TCP never reorders data, but a device between two sockets may reorder messages. The messages are selected at random,
        with `seed`. Raise `ConfigError` for a share outside 0.0 to 1.0.
        """
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"invalid reorder share {share}: expected 0.0 to 1.0")
        self._run_in_loop(lambda: self._directions[direction].set_swaps(float(share), seed))

    def inject(self, frames: Sequence[bytes], *, direction: Direction = "down") -> None:
        """Send a message with these frames on every connection that has carried a message in this direction.

        Raise `ConfigError` for a message without frames.
        """
        if not frames:
            raise ConfigError("cannot inject a message without frames: give at least one frame")
        self._run_in_loop(lambda: self._directions[direction].inject(encode_message(frames)))

    def delay(self, seconds: float | None = None, *, direction: Direction = "down") -> None:
        """Hold every later message, in order, for `seconds` seconds or, if None, until `release`. 0 ends the delay."""
        if seconds is not None and check_finite(seconds) < 0:
            raise ConfigError(f"invalid delay {seconds}: expected 0 or more seconds, or None")
        self._run_in_loop(lambda: self._directions[direction].set_delay(seconds))

    def release(self, n: int | None = None, *, direction: Direction = "down") -> None:
        """Release the `n` messages that were held longest; if None, all. Messages that arrive later are held again."""
        self._run_in_loop(lambda: self._directions[direction].release(n))

    def stall(self) -> None:
        """Stop reading and writing, but keep connections open, as if all packets were lost. New connections stall too."""
        self._run_in_loop(self._flow.clear)

    def half_open(self) -> None:
        """Stall the open connections, but not new ones, as if a peer had been replaced without closing its connections.

        `heal` does not resume the stalled connections; `cut` ends them.
        """

        def apply() -> None:
            is_flowing = self._flow.is_set()
            self._flow.clear()
            self._flow = asyncio.Event()
            if is_flowing:
                self._flow.set()

        self._run_in_loop(apply)

    def resume(self) -> None:
        """End a stall, but no other fault."""
        self._run_in_loop(self._flow.set)

    def cut(self, *, refuse: bool = False) -> None:
        """Close every connection at once; held messages are lost. If `refuse` is true, refuse new connections until `heal`."""

        async def apply() -> None:
            if refuse:
                await self._stop_listening()
            await self._close_connections()

        self._run_in_loop(apply)

    def heal(self) -> None:
        """End every fault: drop nothing, release held messages, resume stalled connections, accept clients again.

        Connections that `half_open` stalled stay stalled.
        """

        async def apply() -> None:
            for faults in self._directions.values():
                faults.heal()
            self._flow.set()
            if self._server is None:
                await self._listen(self._listener())

        self._run_in_loop(apply)

    # --- closing the proxy

    def close(self) -> None:
        """Close every connection and the listener. Idempotent; any thread may call it. Raise the exception of a `drop` rule."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LINGER_SECONDS + 1)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    # --- methods of the proxy's thread

    def _run_in_loop(self, apply: Callable[[], Coroutine[Any, Any, None] | None]) -> None:
        """Run a function in the event loop's thread. Wait until the function and the coroutine that it returns are complete."""

        async def run() -> None:
            coroutine = apply()
            if coroutine is not None:
                await coroutine

        with self._lock:
            if self._is_closed:
                raise ClosedError("the proxy is closed")
            asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _run(self, listener: socket.socket, ready: Future[None]) -> None:
        try:
            asyncio.run(self._main(listener, ready))
        finally:
            self._port.close()

    async def _main(self, listener: socket.socket, ready: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        await self._listen(listener)
        ready.set_result(None)
        await self._stop.wait()
        await self._stop_listening()
        await self._close_connections()
        await asyncio.sleep(0)  # another round of the loop closes the last connections

    async def _stop_listening(self) -> None:
        """Close the listener when every accepted socket is a connection: asyncio loses sockets if its server closes earlier."""
        server, self._server = self._server, None
        if server is None:
            return
        for listener in server.sockets:
            self._loop.remove_reader(listener.fileno())
        for _ in range(LOOP_ROUNDS_TO_CONNECT):
            await asyncio.sleep(0)
        server.close()

    async def _listen(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accept, sock=listener)

    async def _close_connections(self) -> None:
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _listener(self) -> socket.socket:
        host, port = tcp_address(self._port.endpoint)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            listener.close()
            self._port.close()
            raise EndpointError(error.errno, f"cannot listen at {self._port.endpoint}: {error.strerror}") from error
        return listener

    # --- forwarding of one connection

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= self._limits.max_connections:
            self._count(refused=1)
            writer.transport.abort()
            return
        connection = asyncio.ensure_future(self._serve_client(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)
        # A task that is cancelled before its first step does not run its own clean-up.
        connection.add_done_callback(lambda _: writer.transport.abort())

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        linger = 0.0
        try:
            await self._flow.wait()
            await self._connect_upstream(reader, writer)
            linger = LINGER_SECONDS
        except OSError:
            self._count(refused=1)
        finally:
            await _close_writer(writer, linger)

    async def _connect_upstream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        self._count(connections=1, open=1)
        linger = 0.0
        try:
            await self._run_pipes(
                Pipe(self._directions["down"], self._flow, up_reader, writer),
                Pipe(self._directions["up"], self._flow, reader, up_writer),
            )
            linger = LINGER_SECONDS
        finally:
            self._count(open=-1)
            await _close_writer(up_writer, linger)

    async def _run_pipes(self, *pipes: Pipe) -> None:
        tasks = [asyncio.ensure_future(pipe.run()) for pipe in pipes]
        try:
            # When a pipe ends, all bytes from its sender were forwarded, and no peer reads the other direction any more.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                # This exception comes from a drop rule, not from the network, so close() raises it again.
                if isinstance(result, Exception) and not isinstance(result, OSError):
                    self._failure = self._failure or result

    def _count(self, **changes: int) -> None:
        change_counts(self._condition, self._counts, **changes)


async def _close_writer(writer: asyncio.StreamWriter, linger: float) -> None:
    """Close a connection. Written bytes may still be sent for `linger` seconds."""
    if linger:
        writer.close()
    else:
        writer.transport.abort()
    closing = asyncio.ensure_future(writer.wait_closed())
    # The callback retrieves the exception, a network error, because this task may be cancelled before it awaits `closing`.
    closing.add_done_callback(lambda future: future.cancelled() or future.exception())
    try:
        await asyncio.wait([closing], timeout=linger or None)
    finally:
        writer.transport.abort()
    await asyncio.gather(closing, return_exceptions=True)


def tcp_address(endpoint: str) -> tuple[str, int]:
    """Return the host and the port of a TCP endpoint. The port of `*` is 0. Raise `ConfigError`."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    port = "0" if port == "*" else port
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        raise ConfigError(f"invalid proxy endpoint {endpoint}: expected tcp://HOST:PORT")
    return ("0.0.0.0" if host == "*" else host), int(port)  # noqa: S104  asked for
