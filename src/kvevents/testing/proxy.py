"""A TCP proxy between real ZeroMQ peers that drops, delays, stalls and cuts on demand.

Put one in front of each socket of an engine, or of a `TapePlayer`::

    with TapePlayer("run.jsonl.gz") as tape, FaultProxy(tape.endpoint) as live:
        subscriber.connect(live.endpoint, tape.replay_endpoint)
        live.drop(0.05, seed=7)     # one message in twenty
        tape.play()
        live.cut()                  # and now the connection goes
        live.heal()

Bytes pass unchanged. Only whole messages are dropped, swapped, held or injected, so that the peers' connection stays valid;
handshakes, subscriptions and heartbeats always pass, except while stalled. Messages can be told apart in ZMTP 3 with the NULL
mechanism; anything else, CURVE too, can be stalled and cut, but not dropped or held.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias, TypeVar

from kvevents.endpoints import connectable
from kvevents.errors import ClosedError, ConfigError, EndpointError
from kvevents.testing.lanes import Lane, LaneCounts, Rule, Way
from kvevents.testing.ports import HeldPort, hold_port
from kvevents.testing.zmtp import message

MAX_CONNECTIONS: Final = 1_024
"""Open at once; each is two file descriptors. Further ones are closed as soon as they are accepted."""
LINGER_SECONDS: Final = 1.0
"""How long the last bytes of a peer that has closed may take to reach the other one."""

TURNS_TO_CONNECT: Final = 4
"""Of the event loop, in which what a listener has accepted becomes a connection; asyncio needs two."""

Direction: TypeAlias = Literal["down", "up"]
"""`down`: from the upstream endpoint to those who connected to the proxy. `up`: the other way."""

_T = TypeVar("_T")


@dataclass(slots=True)
class ProxyCounts:
    """What a proxy saw since it was opened."""

    connections: int = 0
    """Accepted, and connected to upstream."""
    open: int = 0
    refused: int = 0
    """Accepted and closed again: upstream could not be reached, or there were too many."""
    down: LaneCounts = field(default_factory=LaneCounts)
    up: LaneCounts = field(default_factory=LaneCounts)


class FaultProxy:
    """Listens at `listen` and connects each client to `upstream`, both TCP endpoints; a port of `*` is wherever the OS likes.

    A context manager, to be driven from any thread; what a method did has happened when it returns. Raises `EndpointError` when
    it cannot listen, `ConfigError` for an endpoint that is not TCP.
    """

    def __init__(self, upstream: str, listen: str = "tcp://127.0.0.1:*") -> None:
        self._own_upstream = self._upstream = _address(connectable(upstream))
        self._port = hold_port(listen)
        self._books = threading.Condition()
        self._counts = ProxyCounts()
        self._lanes = {"down": Lane(self._counts.down, self._books), "up": Lane(self._counts.up, self._books)}
        self._links: set[asyncio.Task[None]] = set()
        self._gate = threading.Lock()
        self._closed = False
        self._failure: Exception | None = None
        self._server: asyncio.Server | None = None
        self._stop = asyncio.Event()
        self._flow = asyncio.Event()
        self._flow.set()
        listener = self._listener()
        self._port = HeldPort(f"tcp://{listener.getsockname()[0]}:{listener.getsockname()[1]}", self._port.holder)
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(listener, ready), name="kvevents-proxy", daemon=True)
        self._thread.start()
        ready.result()

    # What is where, and what was done

    @property
    def endpoint(self) -> str:
        """Where clients connect; the same after every cut."""
        return connectable(self._port.endpoint)

    @property
    def counts(self) -> ProxyCounts:
        """A copy of the counters."""
        with self._books:
            return replace(self._counts, down=replace(self._counts.down), up=replace(self._counts.up))

    def wait_until(self, reached: Callable[[ProxyCounts], bool], timeout: float) -> bool:
        """Wait until a condition holds, `lambda counts: counts.down.held == 3` say; False after `timeout` seconds."""
        with self._books:
            return self._books.wait_for(lambda: reached(self._counts), timeout)

    def __repr__(self) -> str:
        counts = self.counts
        state = "closed" if self._closed else f"{counts.open} connections"
        return (
            f"<FaultProxy {self.endpoint} to tcp://{self._upstream[0]}:{self._upstream[1]} {state},"
            f" down {counts.down.messages} ({counts.down.dropped} dropped),"
            f" up {counts.up.messages} ({counts.up.dropped} dropped)>"
        )

    # What it can be told to do

    def drop(self, rule: Rule, *, direction: Direction = "down", seed: int = 0) -> None:
        """Drop messages by `rule` from now on, in place of the rule before; None drops nothing.

        A share draws from `seed`. A rule that raises ends the connection and comes out of `close`. Raises `ConfigError` for a
        share outside 0.0 to 1.0 or a negative count.
        """
        if isinstance(rule, int | float) and not (0 <= rule <= 1 or (isinstance(rule, int) and rule >= 0)):
            raise ConfigError(f"drop takes a count of 0 or more or a share from 0.0 to 1.0, not {rule}")

        async def act() -> None:
            lane = self._lanes[direction]
            lane.rule = rule
            lane.random.seed(seed)

        self._ask(act)

    def reorder(self, share: float, *, direction: Direction = "down", seed: int = 0) -> None:
        """Let a share of the messages, from 0.0 to 1.0, change places with the one behind it, where both arrive together.

        TCP never does, but what stands between two sockets may. Draws from `seed`; raises `ConfigError` for another share.
        """
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"reorder takes a share from 0.0 to 1.0, not {share}")

        async def act() -> None:
            lane = self._lanes[direction]
            lane.swap = float(share)
            lane.random.seed(seed)

        self._ask(act)

    def inject(self, frames: Sequence[bytes], *, direction: Direction = "down") -> None:
        """Send a message of these frames, whatever they are, on every connection that has carried one that way before.

        Raises `ConfigError` for a message without frames.
        """
        if not frames:
            raise ConfigError("a message has at least one frame")
        raw = message(frames)

        async def act() -> None:
            self._lanes[direction].inject(raw)

        self._ask(act)

    def delay(self, seconds: float | None = None, *, direction: Direction = "down") -> None:
        """Hold every message for some seconds, or until `release`; they stay in order. 0 ends it for the messages to come."""
        if seconds is not None and seconds < 0:
            raise ConfigError(f"delay takes seconds of 0 or more, or None, not {seconds}")

        async def act() -> None:
            lane = self._lanes[direction]
            lane.hold, lane.delay = seconds is None, seconds or 0.0

        self._ask(act)

    def release(self, n: int | None = None, *, direction: Direction = "down") -> None:
        """Let the `n` messages go that were held the longest, or all; those that arrive later are held again."""

        async def act() -> None:
            self._lanes[direction].release(n)

        self._ask(act)

    def stall(self) -> None:
        """Read and write nothing, keep everything open: a network that swallows packets. New connections get no answer."""

        async def act() -> None:
            self._flow.clear()

        self._ask(act)

    def half_open(self) -> None:
        """Carry nothing any more on the connections there are, and keep them open; new ones work.

        As when a peer, or what stands between, was replaced without a word. `heal` does not bring them back; `cut` ends them.
        """

        async def act() -> None:
            stalled = not self._flow.is_set()
            self._flow.clear()
            self._flow = asyncio.Event()
            if not stalled:
                self._flow.set()

        self._ask(act)

    def resume(self) -> None:
        """End a stall, and nothing else."""

        async def act() -> None:
            self._flow.set()

        self._ask(act)

    def cut(self, *, refuse: bool = False) -> None:
        """Close every connection at once; what was held is lost. With `refuse` nobody can connect until `heal`."""

        async def act() -> None:
            if refuse:
                await self._refuse()
            await self._end_links()

        self._ask(act)

    def redirect(self, upstream: str) -> None:
        """Close every connection, and connect clients to another TCP endpoint until `heal`. Raises `ConfigError`."""
        address = _address(connectable(upstream))

        async def act() -> None:
            self._upstream = address
            await self._end_links()

        self._ask(act)

    def heal(self) -> None:
        """End every fault: nothing is dropped, what is held goes out, stalled connections go on, clients can connect.

        But those that `half_open` has left stay as they are. Connections that were redirected are closed.
        """

        async def act() -> None:
            if self._upstream != self._own_upstream:
                self._upstream = self._own_upstream
                await self._end_links()
            for lane in self._lanes.values():
                lane.heal()
            self._flow.set()
            if self._server is None:
                await self._serve(self._listener())

        self._ask(act)

    # Its end

    def close(self) -> None:
        """Close every connection and the listener; idempotent, from any thread. Raises what a `drop` rule raised."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LINGER_SECONDS + 1)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # The thread

    def _ask(self, act: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        with self._gate:
            if self._closed:
                raise ClosedError("the proxy is closed")
            return asyncio.run_coroutine_threadsafe(act(), self._loop).result()

    def _run(self, listener: socket.socket, ready: Future[None]) -> None:
        try:
            asyncio.run(self._main(listener, ready))
        finally:
            if self._port.holder is not None:
                self._port.holder.close()

    async def _main(self, listener: socket.socket, ready: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        await self._serve(listener)
        ready.set_result(None)
        await self._stop.wait()
        await self._refuse()
        await self._end_links()
        await asyncio.sleep(0)  # in which the last connections are closed

    async def _refuse(self) -> None:
        """Close the listener, once what it has accepted is a connection: asyncio loses one whose server is closed meanwhile."""
        server, self._server = self._server, None
        if server is None:
            return
        for listener in server.sockets:
            self._loop.remove_reader(listener.fileno())
        for _ in range(TURNS_TO_CONNECT):
            await asyncio.sleep(0)
        server.close()

    async def _serve(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accept, sock=listener)

    async def _end_links(self) -> None:
        links = list(self._links)
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)

    def _listener(self) -> socket.socket:
        host, port = _address(self._port.endpoint)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            listener.close()
            if self._port.holder is not None:
                self._port.holder.close()
            raise EndpointError(error.errno, f"cannot listen at {self._port.endpoint}: {error.strerror}") from error
        return listener

    # One connection

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._links) >= MAX_CONNECTIONS:
            self._count(refused=1)
            writer.transport.abort()
            return
        link = asyncio.ensure_future(self._link(reader, writer))
        self._links.add(link)
        link.add_done_callback(self._links.discard)
        # A link that is cut before its first step never reaches its own clean-up.
        link.add_done_callback(lambda _: writer.transport.abort())

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        linger = 0.0
        try:
            await self._flow.wait()
            await self._join(reader, writer)
            linger = LINGER_SECONDS
        except OSError:
            self._count(refused=1)
        finally:
            await _hang_up(writer, linger)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a client to upstream and carry both ways until one of the two has left."""
        up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        self._count(connections=1, open=1)
        linger = 0.0
        try:
            await self._carry(
                Way(self._lanes["down"], self._flow, up_reader, writer), Way(self._lanes["up"], self._flow, reader, up_writer)
            )
            linger = LINGER_SECONDS
        finally:
            self._count(open=-1)
            await _hang_up(up_writer, linger)

    async def _carry(self, *ways: Way) -> None:
        tasks = [asyncio.ensure_future(way.run()) for way in ways]
        try:
            # When one has ended, all that its sender sent was passed on, and what is sent to that peer has no reader any more.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                # Not the network: a caller's rule raised, which close() tells.
                if isinstance(result, Exception) and not isinstance(result, OSError):
                    self._failure = self._failure or result

    def _count(self, **changes: int) -> None:
        with self._books:
            for name, change in changes.items():
                setattr(self._counts, name, getattr(self._counts, name) + change)
            self._books.notify_all()


async def _hang_up(writer: asyncio.StreamWriter, linger: float) -> None:
    """Close a connection; what was written to it may still leave for `linger` seconds."""
    if linger:
        writer.close()
    else:
        writer.transport.abort()
    closed = asyncio.ensure_future(writer.wait_closed())
    # Whatever it ends with is the network's; this may be cancelled before anybody looks.
    closed.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait([closed], timeout=linger or None)
    finally:
        writer.transport.abort()
    await asyncio.gather(closed, return_exceptions=True)


def _address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    port = "0" if port == "*" else port
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        raise ConfigError(f"a proxy needs an endpoint such as tcp://127.0.0.1:5557, not {endpoint}")
    return ("0.0.0.0" if host == "*" else host), int(port)  # noqa: S104  asked for
