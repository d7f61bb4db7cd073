"""The HTTP connections of the service: how many there may be, for how long, and how much memory they take together.

Theory of operation. `Entry` is the first protocol of each connection. It asks `Connections` for admission, does the TLS
handshake, and makes the protocol that reads requests. That protocol reports what its connection does (`State`), and
`Connections.sweep` ends each connection that has been in its state for too long:

========== ========================================================= ==========================================
state      the connection                                            ends after
========== ========================================================= ==========================================
NEW        has sent nothing yet, or is in its TLS handshake          `request_seconds`, without an answer
READING    is in the middle of a request, from its first byte on     `request_seconds`, with 408
ANSWERING  waits for the service, whose own limits bound that        never
IDLE       is kept for the next request                              `idle_seconds`
CLOSING    has its last answer, which may be on its way              `CLOSING_SECONDS`; input is discarded meanwhile
========== ========================================================= ==========================================

In each state, a client that does not read its answers is cut off after `unread_seconds`, unless it has taken `MIN_TAKEN_BYTES`
since.

At `max_clients` connections a new one takes the place of another that has no request in progress: of the oldest one that
never sent a request, else of the one that is idle for the longest time. If each has a request in progress, the new one is
*reserved*: only probes are answered on it. There are at most `reserved_clients` of these, and the oldest one among them that
does not wait for the service makes room for the next. So connections that do nothing, or are slow, never keep a probe from its
answer.

Memory: each connection holds `FREE_BYTES` of its request. What all of them hold beyond that is at most `max_received_bytes`;
the request that would exceed it is refused. Of answers that clients have not read, `max_unread_bytes` are kept: above that the
connection with the most is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvevents.service.errors import ServiceError, UnavailableError
from kvevents.service.http.messages import problem

if TYPE_CHECKING:
    from kvevents.service.config import Limits

log = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 0.2
"""Between two looks at the deadlines of all connections."""
CLOSING_SECONDS: Final = 2.0
"""For a client to take its last answer and close: it may be sending, and a reset would destroy the answer on its way."""
FREE_BYTES: Final = 1 << 16
"""Of a request that each connection may hold, whatever the others hold."""
MIN_TAKEN_BYTES: Final = 1 << 20
"""That a client must take of a long answer within `unread_seconds`."""
CLOSE: Final = (b"connection", b"close")
CLOSED: Final = ("full", "evicted", "silent", "idle", "unread", "unread-bytes", "not-closed", "handshake", "draining")
"""Why the service closes connections. A refusal that cannot be sent counts here as well, by its reason."""
REFUSED: Final = ("too-slow", "headers-too-large", "malformed-request", "too-much-at-once", "too-many-clients")
"""Why the service refuses requests before it knows them."""


class State(Enum):
    """What a connection does."""

    NEW = "new"
    READING = "reading"
    ANSWERING = "answering"
    IDLE = "idle"
    CLOSING = "closing"


_WITHOUT_REQUEST: Final = frozenset({State.NEW, State.IDLE, State.CLOSING})


class Connection:
    """One connection, as its protocol reports it; made by `Connections.admit`."""

    __slots__ = (
        "_all",
        "_unread",
        "_unread_until",
        "deadline",
        "give_up",
        "held",
        "is_in_head",
        "is_reserved",
        "since",
        "state",
        "transport",
    )

    def __init__(self, connections: Connections, transport: Any, now: float, *, is_reserved: bool) -> None:
        self._all: Final = connections
        self.transport = transport
        self.is_reserved: Final = is_reserved
        self.state = State.NEW
        self.since = now
        """When it came into its state."""
        self.deadline = now + connections.limits.request_seconds
        self.is_in_head = True
        """Whether the head of its first request has not come completely."""
        self.held = 0
        """Bytes of a request that count towards `max_received_bytes`."""
        self.give_up: Callable[[], None] = self.close
        """What its protocol does at the deadline of a request that is not complete."""
        self._unread = 0
        self._unread_until = inf

    @property
    def limits(self) -> Limits:
        """Those of all connections."""
        return self._all.limits

    # --- states

    def reading(self) -> None:
        """A request has begun; further bytes of it do not move the deadline."""
        if self.state is not State.READING:
            self._enter(State.READING, self.limits.request_seconds)

    def answering(self) -> None:
        """The request is complete."""
        self._enter(State.ANSWERING, inf)

    def idle(self) -> None:
        """All requests are answered."""
        self._enter(State.IDLE, self.limits.idle_seconds)

    def head_is_complete(self) -> None:
        """It has sent the head of a request: others make room before it does."""
        if self.is_in_head:
            self.is_in_head = False
            self._all.has_asked(self)

    def _enter(self, state: State, seconds: float) -> None:
        self.state = state
        self.since = now = self._all.clock()
        self.deadline = now + seconds

    # --- memory

    def hold(self, size: int) -> None:
        """Note how many bytes of a request it holds now. Raises `UnavailableError` if that is too much with all the others."""
        self._all.hold(self, max(0, size - FREE_BYTES))

    def pause_writing(self) -> None:
        """The client does not read as fast as the service writes."""
        if self._unread_until == inf:
            self._unread = self.unread
            self._unread_until = self._all.clock() + self.limits.unread_seconds

    def resume_writing(self) -> None:
        """It has read nearly all."""
        self._unread_until = inf
        if self.state is State.CLOSING:
            self._enter(State.CLOSING, CLOSING_SECONDS)

    @property
    def unread(self) -> int:
        """Bytes of answers that the client has not read, as far as the process holds them."""
        return int(self.transport.get_write_buffer_size())

    def is_stuck(self, now: float) -> bool:
        """Whether the client has taken too little of its answer for too long."""
        if now < self._unread_until:
            return False
        left, before = self.unread, self._unread
        self._unread, self._unread_until = left, now + self.limits.unread_seconds
        return before - left < MIN_TAKEN_BYTES

    # --- the end

    def refuse(self, error: ServiceError) -> None:
        """Answer with an error, and end; what still comes has to be discarded."""
        self._all.refusals[error.reason] += 1
        if not self.transport.is_closing():
            self.transport.write(problem(error, (CLOSE,)).written())
        self.linger()

    def linger(self) -> None:
        """End behind the last answer, though the client may be sending; what still comes has to be discarded.

        Over TLS the client alone can close in an orderly way, as the answer asks it to.
        """
        if not self.transport.is_closing() and self.transport.can_write_eof():
            self.transport.write_eof()
        self.closing()

    def close(self, reason: str = "") -> None:
        """End as soon as what was written is sent; `reason` if the client does not expect it."""
        if reason:
            self._all.closed[reason] += 1
        self.transport.close()
        self.closing()

    def closing(self) -> None:
        """It ends: bound the time for what was written."""
        if self.state is not State.CLOSING:
            self._enter(State.CLOSING, CLOSING_SECONDS)
            if self.unread:
                self.pause_writing()
        if self._unread_until != inf:
            self.deadline = inf

    def lost(self) -> None:
        """It has ended."""
        self._all.remove(self)


class Connections:
    """All connections of one event loop. `run` must run meanwhile."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits: Final = limits
        self.clock: Final = clock
        self.opened = 0
        """Connections that clients have opened."""
        self.closed: Final = Counter[str]()
        """Connections that the service has ended against the client's will, by reason."""
        self.refusals: Final = Counter[str]()
        """Errors that were sent before a request was known, by reason."""
        self.received = 0
        """Bytes of requests that are held, beyond `FREE_BYTES` of each connection."""
        self._strangers: dict[Connection, None] = {}
        """Those that have not sent the head of a request yet, oldest first."""
        self._known: dict[Connection, None] = {}
        """Those that have."""
        self._reserved: dict[Connection, None] = {}
        """Those above the limit, oldest first."""

    def all(self) -> list[Connection]:
        """Every connection; may be called in any thread."""
        return [*list(self._strangers), *list(self._known), *list(self._reserved)]

    async def run(self) -> None:
        """Hold connections to their deadlines."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    # --- their number

    def admit(self, transport: Any) -> Connection | None:
        """Take a new connection; None if there is no room for it."""
        self.opened += 1
        is_full = len(self._strangers) + len(self._known) >= self.limits.max_clients
        is_reserved = is_full and not self._make_room()
        if is_reserved and len(self._reserved) >= self.limits.reserved_clients and not self._evict(_first(self._reserved)):
            self.closed["full"] += 1
            return None
        connection = Connection(self, transport, self.clock(), is_reserved=is_reserved)
        (self._reserved if is_reserved else self._strangers)[connection] = None
        return connection

    def has_asked(self, connection: Connection) -> None:
        """The head of its first request is complete."""
        if self._strangers.pop(connection, self) is None:
            self._known[connection] = None

    def _make_room(self) -> bool:
        if self._evict(next(iter(self._strangers), None)):
            return True
        idle = (each for each in self._known if each.state in _WITHOUT_REQUEST)
        return self._evict(min(idle, key=lambda each: each.since, default=None))

    def _evict(self, connection: Connection | None) -> bool:
        if connection is None:
            return False
        self._abort(connection, "evicted")
        return True

    def remove(self, connection: Connection) -> None:
        """It has ended."""
        for group in (self._strangers, self._known, self._reserved):
            group.pop(connection, None)
        self.hold(connection, 0)

    def _abort(self, connection: Connection, reason: str) -> None:
        self.closed[reason] += 1
        self.remove(connection)
        connection.transport.abort()

    def close_all(self) -> None:
        """End every connection: the time for the requests in progress is over."""
        for connection in self.all():
            self._abort(connection, "draining")

    def close_silent(self) -> None:
        """End those that have sent nothing, at the end of the service."""
        for connection in [each for each in self.all() if each.state is State.NEW]:
            self._abort(connection, "draining")

    # --- their memory

    def hold(self, connection: Connection, size: int) -> None:
        """As `Connection.hold`, of the bytes that count."""
        received = self.received + size - connection.held
        limit = self.limits.max_received_bytes
        if size > connection.held and received > limit:
            raise UnavailableError(
                f"requests hold more than {limit} bytes together",
                "too-much-at-once",
                "ask again; see limits.max_received_bytes",
            )
        self.received = received
        connection.held = size

    @property
    def unread(self) -> int:
        """Bytes of answers that clients have not read yet."""
        return sum(each.unread for each in self.all())

    # --- their time

    def sweep(self) -> None:
        """End connections whose time is over."""
        now = self.clock()
        unread: list[tuple[int, Connection]] = []
        for connection in self.all():
            if connection.is_stuck(now):
                self._abort(connection, "unread")
            elif now >= connection.deadline:
                self._end(connection)
            elif size := connection.unread:
                unread.append((size, connection))
        total = sum(size for size, _ in unread)
        while total > self.limits.max_unread_bytes:
            largest = max(unread, key=lambda each: each[0])
            unread.remove(largest)
            total -= largest[0]
            self._abort(largest[1], "unread-bytes")

    def _end(self, connection: Connection) -> None:
        if connection.state is State.CLOSING:
            self._abort(connection, "not-closed")
        elif connection.state is State.READING:
            connection.give_up()
        elif connection.state is State.NEW:
            self._abort(connection, "silent")
        else:
            connection.close("idle")


def _first(reserved: dict[Connection, None]) -> Connection | None:
    return next((each for each in reserved if each.state is not State.ANSWERING), None)


Make: TypeAlias = Callable[[Connection], Any]
"""Makes the protocol that reads the requests of a connection."""


class Entry(asyncio.Protocol):
    """The first protocol of a connection, until it is admitted and its TLS handshake is done."""

    def __init__(self, connections: Connections, make: Make, tls: ssl.SSLContext | None) -> None:
        self._connections: Final = connections
        self._make: Final = make
        self._tls: Final = tls
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._early = bytearray()
        """What came before the next protocol was there to take it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of `BaseProtocol`."""
        self._connection = connection = self._connections.admit(transport)
        if connection is None:
            transport.abort()  # type: ignore[attr-defined]
        elif self._tls is None:
            self._begin(connection)
        else:
            self._task = asyncio.get_running_loop().create_task(self._shake_hands(connection, self._tls))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's names
        """Of `BaseProtocol`."""
        if self._connection is not None:
            self._connection.lost()

    def data_received(self, data: bytes) -> None:
        """Of `Protocol`."""
        self._early += data

    async def _shake_hands(self, connection: Connection, tls: ssl.SSLContext) -> None:
        loop, plain = asyncio.get_running_loop(), connection.transport
        seconds = self._connections.limits.request_seconds
        plain.pause_reading()
        hello, self._early = bytes(self._early), bytearray()
        handshake = loop.create_task(loop.start_tls(plain, self, tls, server_side=True, ssl_handshake_timeout=seconds))
        try:
            for _ in range(2):  # turns of the loop, after which the handshake has begun and nothing was read yet
                await asyncio.sleep(0)
            feed(plain, hello)
            transport = await handshake
        except (OSError, EOFError) as error:  # ssl's errors and timeouts among them
            log.debug("a TLS handshake failed: %s", error)
            self._connections.closed["handshake"] += 1
            plain.abort()
            connection.lost()
            return
        if transport is None or transport.is_closing():
            connection.lost()
            return
        connection.transport = transport
        self._begin(connection)
        feed(transport, bytes(self._early))

    def _begin(self, connection: Connection) -> None:
        protocol = self._make(connection)
        connection.transport.set_protocol(protocol)
        protocol.connection_made(connection.transport)


def feed(transport: Any, data: bytes) -> None:
    """Give bytes to the protocol of a transport as the transport does; another protocol may take over in between."""
    while data and not transport.is_closing():
        protocol = transport.get_protocol()
        if not hasattr(protocol, "get_buffer"):  # uvloop's protocol for TLS has it, and is not a `BufferedProtocol`
            protocol.data_received(data)
            return
        room = memoryview(protocol.get_buffer(len(data)))
        size = min(len(room), len(data))
        room[:size] = data[:size]
        data = data[size:]
        protocol.buffer_updated(size)
