"""The ZeroMQ transport: for each source a SUB socket with its monitor, and a DEALER socket while replay is requested.

One selector watches all descriptors, so idle sources cost nothing. libzmq signals a socket's descriptor only once per change.
Therefore a signalled connection is read until its sockets are empty; until then, `feed_stream` returns True.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import zmq
import zmq.backend

from kvevents.endpoints import GRPC, needs_ipv6
from kvevents.stream import FetchRequest, Source, Stream
from kvevents.subscriber.bound_socket import BoundSocket, TopicFeed
from kvevents.subscriber.multiplexer import Connection
from kvevents.subscriber.smg_connection import SmgConnection
from kvevents.subscriber.socket_owner import SocketOwner, StallDetector
from kvevents.wire import replay_request_frames
from kvevents.wire.framing import encode_seq
from kvevents.zeromq import sockets
from kvevents.zeromq.name_resolver import Lookup, NameResolver
from kvevents.zeromq.zap import SocketSecurity

_CONNECTED: Final = zmq.Event.CONNECTED
"""A peer has accepted the TCP connection. The handshake shows whether the peer is a publisher."""
_HANDSHAKE_SUCCEEDED: Final = zmq.Event.HANDSHAKE_SUCCEEDED
_DISCONNECTED: Final = zmq.Event.DISCONNECTED
_CONNECT_RETRIED: Final = zmq.Event.CONNECT_RETRIED
_MONITOR_EVENTS: Final = _CONNECTED | _HANDSHAKE_SUCCEEDED | _DISCONNECTED | _CONNECT_RETRIED
_UNREACHABLE_FAULT: Final = "nothing listens there, or it cannot be reached"
_NOT_A_PUBLISHER_FAULT: Final = "the peer is not an event publisher, has other CURVE keys, or closes each connection at once"

_recv = zmq.backend.Socket.recv
_get = zmq.backend.Socket.get
_DONTWAIT: Final = int(zmq.DONTWAIT)
_RCVMORE: Final = int(zmq.RCVMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)

log = logging.getLogger(__name__)


class ZmqTransport(SocketOwner):
    """Opens connections over ZeroMQ sockets, in `context` if one is given. Like sockets, a transport is not thread-safe.

    A transport that is dropped without `close` closes its sockets and descriptors, and causes a `ResourceWarning`. In a forked
    child, `close` closes only the child's copies of the descriptors, because the sockets belong to the parent.
    """

    def __init__(
        self,
        context: zmq.Context[sockets.Socket] | None = None,
        options: sockets.SocketOptions = sockets.DEFAULT_SOCKET_OPTIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(context, options)
        self.stalls = StallDetector(options.heartbeat_timeout_ms / 1000, clock)
        self._connections: set[Connection] = set()
        self._bound_sockets: dict[str, BoundSocket] = {}
        self.names: Final = NameResolver[Connection](self.watch)
        self._wake_lock = threading.RLock()
        """Lock that `wake` holds while it writes, so that `close` does not close the descriptor at the same time."""

    def open(self, source: Source) -> Connection:
        """Start to connect to `source`, or bind its endpoint. Raise `ConfigError` and `EndpointError`."""
        if source.endpoint not in self._bound_sockets:
            sockets.check_descriptors(len(self._connections) + 1)
        is_grpc = source.endpoint.startswith(GRPC)
        connection: Connection = SmgConnection(source, self, self.discard) if is_grpc else ZmqConnection(source, self)
        self._connections.add(connection)
        return connection

    def bind(self, source: Source, connection: ZmqConnection) -> TopicFeed:
        """Return the feed of a source with a bound endpoint. Bind the endpoint if no other source has bound it."""
        socket = self._bound_sockets.get(source.endpoint)
        if socket is None or socket.is_closed:
            socket = self._bound_sockets[source.endpoint] = BoundSocket(source, self, self.stalls)
        return socket.join(source, connection)

    def take_found(self) -> list[Source]:
        """Return the sources found by their topic since the last call. The caller opens or ignores each found source."""
        sources, self.found_sources = self.found_sources, []
        return sources

    def ignore_found(self, source: Source) -> None:
        """Drop all messages with the topic of this source, which `take_found` has returned."""
        self._bound_sockets[source.endpoint].ignore(source.topic)

    def discard(self, connection: Connection) -> None:
        """Forget a closed connection."""
        self._connections.discard(connection)
        self.marked_connections.discard(connection)
        self.names.forget(connection)

    def wait(self, timeout: float | None) -> set[Connection]:
        """Wait at most `timeout` seconds and return the connections whose descriptors are signalled."""
        self.stalls.begin_wait()
        keys = self.selector.select(0 if self.marked_connections else timeout)
        connections, self.marked_connections = self.marked_connections, set()
        for key, _ in keys:
            if key.data is not None:
                connections.update(key.data())
        self.stalls.end_wait()
        return connections

    @property
    def max_wait(self) -> float | None:
        """Maximum number of seconds between two calls of `wait`; longer pauses can count as a stall of the application."""
        return self.stalls.max_wait

    def fileno(self) -> int:
        """Return the descriptor of the selector (epoll, kqueue)."""
        return self.selector.fileno()

    def wake(self) -> None:
        """Make the selector readable, and leave it so."""
        with self._wake_lock, contextlib.suppress(BlockingIOError):
            if self.finalizer.alive:
                os.write(self.wake_writer, b"\0")

    def close(self) -> None:
        """Close every connection, and the context if it is private."""
        if self.process != os.getpid():
            # Descriptors stay registered: the parent uses the same epoll set, and would not see an unregistered descriptor.
            self.finalizer()
            self.selector.close()
            self.names.close()
            return
        with self._wake_lock:
            if self.finalizer.detach() is None:
                return
            os.close(self.wake_writer)
        for connection in list(self._connections):
            connection.close()
        self.selector.close()
        self.names.close()
        os.close(self.wake_reader)
        if self.owns_context:
            sockets.destroy_context(self.context)


class ZmqConnection:
    """The live socket of one source, and its replay socket while replay is requested."""

    def __init__(self, source: Source, transport: ZmqTransport) -> None:
        self._source = source
        self._transport = transport
        self._replay: sockets.Socket | None = None
        self._postponed_request: FetchRequest | None = None
        """A replay request that waits until the address of the replay endpoint is known."""
        self._read_ahead = 0
        """Number of live messages that were read while the readable replay socket was left unread."""
        self._max_read_ahead = transport.options.receive_hwm or sockets.DEFAULT_SOCKET_OPTIONS.receive_hwm
        self._as_set: Final = frozenset({self}).__iter__
        self._security = transport.secure(source)
        try:
            self._live = transport.bind(source, self) if source.bind else LiveSocket(source, self._security, transport, self)
        except BaseException:
            transport.end_security(self._security)
            raise

    @property
    def fault(self) -> str:
        """Why there is no live connection; empty if there is one, or if the cause is unknown."""
        return self._live.fault

    def deadline(self) -> float | None:
        """Return the time at which to open the live socket again; libzmq runs all other timers itself."""
        return self._live.reopen_at

    def feed_stream(self, stream: Stream, now: float, limit: int) -> bool:
        """Feed live messages, connection changes and replay replies to `stream`. Return True if there may be more to read."""
        has_more = self._live.feed_stream(stream, now, limit)
        if self._postponed_request is not None:
            self.request_replay(self._postponed_request)
        replay = self._replay
        if replay is None:
            self._read_ahead = 0
            return has_more
        # Live messages are read first, because an earlier incarnation may have sent them, and the stream would drop them after
        # the reply of a later incarnation. While messages are missing, live messages wait for the reply anyway.
        # `_max_read_ahead` keeps a busy stream from postponing the reply endlessly.
        if has_more and stream.expected_run(1) and self._read_ahead < self._max_read_ahead and is_readable(replay):
            self._read_ahead += limit
            stream.defer_replay_timeout(now)
            return True
        self._read_ahead = 0
        replies, is_drained = receive_messages(replay, limit)
        for frames in replies:
            stream.receive_replay(frames, now)
        return has_more or not is_drained

    def request_replay(self, request: FetchRequest) -> None:
        """Send a replay request. If the socket refuses the request, the stream gets no reply and sends the request again."""
        endpoint = self._source.replay_endpoint
        if request.needs_new_connection or self._postponed_request is not None:
            self.end_replay()
        if self._replay is None and endpoint is not None:
            lookup = self._transport.names.resolve(endpoint, self)
            if not lookup.endpoints:
                # If there is no address, the request will count as unanswered, and the stream sends it again.
                self._postponed_request = None if lookup.error else request
                return
            endpoint = lookup.endpoints[0]
            self._replay = self._transport.open_socket(zmq.DEALER, endpoint, self._security)
            try:
                # An engine's ROUTER drops messages when 1,000 are queued, so this socket should hold a whole replay buffer.
                self._replay.set(zmq.RCVHWM, self._transport.options.receive_hwm)
                sockets.connect_or_bind(self._replay, endpoint, bind=False)
                with sockets.endpoint_errors(endpoint, f"cannot wait for {endpoint}"):
                    self._transport.watch(self._replay, self._as_set)
            except BaseException:
                self.end_replay()
                raise
        if self._replay is not None:
            try:
                self._replay.send_multipart(replay_request_frames(request.start), zmq.DONTWAIT)
            except zmq.Again:
                # libzmq does not reconnect after a peer has violated the protocol, so the next request uses a new socket.
                self.end_replay()

    def end_replay(self) -> None:
        """Close the replay socket."""
        self._postponed_request = None
        if self._replay is not None:
            self._transport.close_socket(self._replay)
            self._replay = None

    def close(self) -> None:
        """Close all sockets. Idempotent."""
        self.end_replay()
        self._live.close()
        self._transport.end_security(self._security)
        self._transport.discard(self)


class LiveSocket:
    """A SUB socket and its monitor. The selector reports `connection` when either socket is readable."""

    def __init__(
        self, source: Source, security: SocketSecurity | None, transport: ZmqTransport, connection: ZmqConnection
    ) -> None:
        self._source = source
        self._security = security
        self._transport = transport
        self._options = transport.options
        self._stalls = transport.stalls
        self._connection = connection
        self._connections: Final = frozenset({connection}).__iter__
        self._lookup: Lookup | None = None
        """The lookup of the endpoint's name, until the socket is connected."""
        self._attempts = 0
        """Number of sockets that were opened; each is connected to the next address of the host."""
        self._native = sockets.libzmq_io()
        self._was_connected = False
        """Whether the stream has ever begun a connection."""
        self._is_connected = False
        """Whether the newest connection change that was fed to the stream is `begin_connection`."""
        self._has_ended = False
        """Whether the connection has ended and no newer one has begun, so `end_connection` is due after its last messages."""
        self._old_messages_left: float = 0
        """Maximum number of messages to read from earlier connections before `begin_connection` is due; 0 if it is not due."""
        self.reopen_at: float | None = None
        """The time at which to open a new socket, because libzmq might not reconnect; None if no new socket is planned."""
        self._is_named = False
        """Whether the endpoint has a host name, whose address may change."""
        self._is_accepted = False
        """Whether the peer of the last attempt has accepted the TCP connection."""
        self._expects_retry = False
        """Whether the next retry event follows the end of a connection, and so does not report a failed attempt."""
        self.fault = ""
        """Why there is no connection, as logged; empty if there is a connection, or if the cause is unknown."""
        self._monitor: sockets.Socket | None = None
        self._open()

    def _open(self) -> None:
        source = self._source
        self._sub = self._transport.open_socket(zmq.SUB, source.endpoint, self._security)
        try:
            with sockets.endpoint_errors(source.endpoint, f"cannot follow {source.endpoint}"):
                self._monitor = self._transport.register(sockets.open_monitor(self._sub, _MONITOR_EVENTS))
                self._sub.set(zmq.RCVHWM, self._options.receive_hwm)
                self._sub.subscribe(source.topic.encode())
                self._transport.watch(self._sub, self._connections)
                self._transport.watch(self._monitor, self._connections)
                self._lookup = self._transport.names.resolve(source.endpoint, self._connection)
                self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self, now: float = 0.0) -> None:
        """Connect the socket once its address is known. If the lookup fails, open another socket later."""
        lookup = self._lookup
        if lookup is None or not lookup.is_done:
            return
        self._lookup = None
        if lookup.error:
            self._set_fault(lookup.error)
            self.reopen_at = now + self._options.reconnect_max_ms / 1000
        else:
            address = lookup.endpoints[self._attempts % len(lookup.endpoints)]
            self._attempts += 1
            self._is_named = address != lookup.endpoint
            if needs_ipv6(address):
                self._sub.set(zmq.IPV6, 1)
            sockets.connect_or_bind(self._sub, address, bind=False)
            if self._attempts == 1:
                log.info("connecting to %s", lookup.endpoint)

    def feed_stream(self, stream: Stream, now: float, limit: int) -> bool:
        """Feed live messages and connection changes to `stream`. Return True if there may be more to read.

        libzmq reports changes on another socket, so the place of a change among the messages is not exactly known. The monitor
        is read after the messages, so that every change that preceded a message is known. Until a new connection begins, all
        messages come from the old one. After the monitor has reported the end of the old connection, messages are fed until one
        more read drains the socket; then `end_connection` is called.
        """
        self._connect(now)
        changes = self._read_monitor() if self._stalls.is_stalled else []
        if _DISCONNECTED in changes:
            self._abandon_socket(stream)
            return True
        expected = stream.expected_run(limit)
        payloads, messages, is_drained = receive_batches(self._native, self._sub, stream.topic, expected, limit)
        changes += self._read_monitor()
        if changes:
            self._plan_reopening(changes[-1], now)
            self._update_fault(changes)
            changes = [change for change in changes if change in {_HANDSHAKE_SUCCEEDED, _DISCONNECTED}]
        is_inproc = self._source.endpoint.startswith("inproc://")
        if not self._was_connected and (_HANDSHAKE_SUCCEEDED in changes or messages or is_inproc):
            self._was_connected = self._is_connected = True
            stream.begin_connection(now)
            if _HANDSHAKE_SUCCEEDED in changes:
                changes = changes[changes.index(_HANDSHAKE_SUCCEEDED) + 1 :]
        had_ended, self._has_ended = self._has_ended, self._has_ended or _DISCONNECTED in changes
        if _HANDSHAKE_SUCCEEDED in changes:
            # Any of the messages just received may come from the new connection.
            had_ended = False
            self._feed_disconnected(stream)
            capacity = self._options.receive_hwm or math.inf
            self._old_messages_left = 0 if changes[-1] == _DISCONNECTED else capacity + 1
        if payloads:
            stream.receive_run(payloads, now)
        for frames in messages:
            stream.receive_live(frames, now)
        if self._old_messages_left:
            count = len(payloads) + len(messages)
            self._old_messages_left = 0 if is_drained else max(0, self._old_messages_left - count)
            if not self._old_messages_left:
                self._is_connected = True
                stream.begin_connection(now)
        if had_ended and is_drained:
            self._feed_disconnected(stream)
        if is_drained and self.reopen_at is not None and now >= self.reopen_at:
            self._reopen()
        return not is_drained or self._has_ended

    def _plan_reopening(self, newest: int, now: float) -> None:
        """Reopen the socket later if its connection stays down.

        A reopened socket is needed in two cases: libzmq does not reconnect after a peer has violated the protocol (other socket
        type or keys, or a message that is too large), and libzmq, which knows only the address, does not resolve a name again.
        """
        is_down = newest in ((_DISCONNECTED, _CONNECT_RETRIED) if self._is_named else (_DISCONNECTED,))
        self.reopen_at = (self.reopen_at or now + self._options.reconnect_max_ms / 1000) if is_down else None

    def _abandon_socket(self, stream: Stream) -> None:
        """Replace a socket whose connection was lost while the application was stalled. Replay returns the lost messages.

        If the socket was full, the peer's pongs waited behind the messages. libzmq 4.3.5 aborts the process when such a socket
        is read (libzmq issues 3596 and 3937).
        """
        self._old_messages_left = 0
        self._feed_disconnected(stream)
        self._reopen()

    def _feed_disconnected(self, stream: Stream) -> None:
        self._has_ended = False
        if self._is_connected:
            self._is_connected = False
            stream.end_connection()

    def _update_fault(self, changes: list[int]) -> None:
        """Derive `fault` from connection changes, and log a changed fault."""
        fault = self.fault
        for change in changes:
            if change == _CONNECTED:
                self._is_accepted = True
            elif change == _HANDSHAKE_SUCCEEDED:
                self._is_accepted, fault = False, ""
            elif change == _DISCONNECTED:
                fault = _NOT_A_PUBLISHER_FAULT if self._is_accepted else fault
                self._is_accepted, self._expects_retry = False, True
            elif self._expects_retry:
                self._expects_retry = False
            elif fault != _NOT_A_PUBLISHER_FAULT:
                fault = _UNREACHABLE_FAULT
        self._set_fault(fault)

    def _set_fault(self, fault: str) -> None:
        if fault != self.fault:
            self.fault = fault
            if fault:
                log.warning("%s: no connection: %s; retrying", self._source.endpoint, fault)
            else:
                log.info("%s: connected", self._source.endpoint)

    def _reopen(self) -> None:
        self.reopen_at = None
        self.close()
        self._open()

    def _read_monitor(self) -> list[int]:
        if self._monitor is None or not is_readable(self._monitor):
            return []
        return [event for event, _ in sockets.read_monitor(self._monitor)]

    def close(self) -> None:
        """Close both sockets. Idempotent."""
        if not self._sub.closed:
            if self._monitor is not None:
                sockets.disable_monitor(self._sub)
                self._transport.close_socket(self._monitor)
                self._monitor = None
            self._transport.close_socket(self._sub)


# --- receiving without waiting ---------------------------------------------------------------------------------------------
# pyzmq's wrappers cost three times as much as libzmq, so these functions call pyzmq's backend directly.


def is_readable(socket: sockets.Socket) -> bool:
    """Return whether a message can be received. Receiving and catching `zmq.Again` would cost three times as much."""
    return bool(int(_get(socket, _EVENTS)) & _POLLIN)


def receive_messages(socket: sockets.Socket, limit: int) -> tuple[list[list[bytes]], bool]:
    """Return at most `limit` messages, each a list of frames, and whether the socket is drained."""
    messages: list[list[bytes]] = []
    try:
        for _ in range(limit):
            frames = [_recv(socket, _DONTWAIT)]
            while _get(socket, _RCVMORE):
                frames.append(_recv(socket, _DONTWAIT))
            messages.append(frames)
    except zmq.Again:
        return messages, True
    return messages, False


class ReceivedBatches(NamedTuple):
    """The messages that `receive_batches` has received."""

    payloads: list[bytes]
    """Payloads of the expected batches, in order."""
    messages: list[list[bytes]]
    """All messages from the first unexpected message on, each as a list of frames."""
    is_drained: bool
    """Whether the socket holds no further messages."""


def receive_batches(native: Any | None, socket: sockets.Socket, topic: bytes, numbers: range, limit: int) -> ReceivedBatches:
    """Receive at most `limit` messages; expected batches (with `topic` and `numbers`) are reduced to their payloads.

    A message with more or fewer than three frames is never an expected batch. If `native` is None, only pyzmq is used.
    """
    if native is not None:
        result = native.receive(socket.underlying, topic, numbers.start, len(numbers), limit)
        if result[0] or result[1] or result[2]:
            return ReceivedBatches(*result)
        # The native module could not receive the next message; pyzmq receives it or raises the proper error.
    messages, is_drained = receive_messages(socket, limit)
    payloads: list[bytes] = []
    for seq, frames in zip(numbers, messages, strict=False):
        if frames[:-1] != [topic, encode_seq(seq)]:
            break
        payloads.append(frames[-1])
    return ReceivedBatches(payloads, messages[len(payloads) :], is_drained)
