"""Opens, configures, connects and closes the ZeroMQ sockets of publishers and subscribers, and maps their errors."""

from __future__ import annotations

import errno
import importlib
import resource
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from socket import AF_UNIX
from socket import socket as unix_socket
from time import monotonic, sleep
from typing import Any, Final, cast

import zmq

from kvevents.endpoints import needs_ipv6, validate_port
from kvevents.errors import EndpointError, MissingDependencyError
from kvevents.native_module import require_native
from kvevents.settings import Bytes, Count, Positive, Settings
from kvevents.zeromq.zap import SocketSecurity

Socket = zmq.Socket[bytes]

_ERROR_HINTS: Final = {
    errno.EADDRINUSE: "another process or rank uses it; choose another port or path, or port 0 to let the OS choose",
    errno.EADDRNOTAVAIL: "this host has no such address; bind tcp://*:PORT, or connect (bind=False, publish --connect)",
    errno.EACCES: "no permission; choose a port above 1023 or a path that can be written",
    errno.ENODEV: "this host has no such address or interface; bind tcp://*:PORT, or connect (bind=False, publish --connect)",
    errno.EPROTONOSUPPORT: "ZeroMQ does not know this transport; use tcp, ipc or inproc",
    errno.EINVAL: "it is not a valid endpoint; use tcp://HOST:PORT, ipc://PATH or inproc://NAME",
    errno.ENOENT: "the directory does not exist",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOSPC: "raise fs.epoll.max_user_watches",
}


class SocketError(EndpointError, zmq.ZMQError):  # type: ignore[misc]  # pyright: ignore[reportIncompatibleVariableOverride]
    """An `EndpointError` that is also a ZMQError, because the engines' publishers raise ZMQError and their users catch it."""


@contextmanager
def endpoint_errors(endpoint: str, failure: str) -> Iterator[None]:
    """Raise errors of libzmq and of the system as `SocketError`, with a message that begins with `failure`."""
    try:
        yield
    except EndpointError:
        raise
    except (zmq.ZMQError, OSError) as error:
        number = error.errno
        reason = zmq.strerror(number) if number is not None else str(error)
        hint = _ERROR_HINTS.get(number or 0, "expected tcp://HOST:PORT, ipc://PATH or inproc://NAME")
        raise SocketError(number or 0, f"{failure}: {reason}; {hint}", endpoint=endpoint) from error


def connect_or_bind(socket: Socket, endpoint: str, *, bind: bool, role: str = "") -> str:
    """Connect a socket to an endpoint, or bind the socket to it; return the endpoint as ZeroMQ reports it.

    `role`, such as `replay`, names the socket in errors. Raises `EndpointError`.
    """
    validate_port(endpoint)
    verb = "bind" if bind else "connect"
    subject = f" the {role} socket" if role else ""
    preposition = " to" if role or not bind else ""
    with endpoint_errors(endpoint, f"cannot {verb}{subject}{preposition} {endpoint}"):
        if bind:
            check_path(endpoint)
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    # ZeroMQ terminates string options with a zero byte.
    return cast("bytes", socket.get(zmq.LAST_ENDPOINT)).partition(b"\0")[0].decode()


_MAX_CLOSING_SECONDS: Final = 0.5
"""Maximum time to wait for libzmq, which closes a socket of this process in the background."""


def check_path(endpoint: str) -> None:
    """Raise `ZMQError` if another socket listens at an `ipc://` path, because libzmq would replace its file."""
    path = endpoint.removeprefix("ipc://")
    end = monotonic() + _MAX_CLOSING_SECONDS
    while path != endpoint and path[0] not in "@*" and _has_listener(path):
        if monotonic() > end:
            raise zmq.ZMQError(errno.EADDRINUSE)
        sleep(0.01)


def _has_listener(path: str) -> bool:
    with unix_socket(AF_UNIX) as probe, suppress(OSError):  # the path can be too long
        probe.setblocking(False)
        return probe.connect_ex(path) in {0, errno.EAGAIN}
    return False


# --- contexts

_ZERO_COPY_RECV: Final = 10
"""A context option of libzmq that pyzmq does not name. The option is off, because every message is copied into `bytes` anyway:
shared receive buffers cost a third more for messages of a few kB, and a message would keep a whole buffer in memory."""


def private_context() -> zmq.Context[Socket]:
    """Return a new context for as many sockets as libzmq allows."""
    context: zmq.Context[Socket] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    # A libzmq without `ZMQ_ZERO_COPY_RECV` works, but is slower.
    with suppress(zmq.ZMQError):
        context.set(_ZERO_COPY_RECV, 0)
    return context


def destroy_context(context: zmq.Context[Any]) -> None:
    """Close all sockets of a context without flushing them, terminate the context, and wait at most a second for its end.

    libzmq waits for each socket without a limit. If an interrupt arrives while pyzmq creates a socket, pyzmq does not close
    the socket. The termination waits for it in a daemon thread, which ends with the process at the latest.
    """
    thread = threading.Thread(target=context.destroy, kwargs={"linger": 0}, daemon=True, name="zmq-destroy")
    with suppress(RuntimeError):  # the interpreter is ending, and starts no more threads
        thread.start()
        thread.join(1.0)


# --- sockets of subscribers

DESCRIPTORS_PER_SOURCE: Final = 8
"""A source uses six: SUB, monitor (two), DEALER, and one TCP connection each for SUB and DEALER. Two are a reserve."""
_SPARE_DESCRIPTORS: Final = 64
"""Number of descriptors that are reserved for other files of the process."""


class SocketOptions(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and timers of the sockets of one source."""

    receive_hwm: Count = 100_000
    """Maximum number of messages that wait in a live or a replay socket while the application is busy, 0 for no limit. When a
    socket is full, libzmq drops messages at the publisher, and replay repairs the gap."""
    max_message_bytes: Bytes = 64 * 1024 * 1024
    """Maximum size of a message in bytes, twice the decoder's limit. A larger message, which only abuse causes, ends the
    connection."""
    reconnect_ms: Positive = 100
    """Delay before the first reconnect attempt; it doubles after each failure, with jitter."""
    reconnect_max_ms: Positive = 5_000
    """Maximum delay between two reconnect attempts."""
    heartbeat_ms: Positive = 5_000
    """Interval of ZMTP pings."""
    handshake_ms: Positive = 5_000
    """Timeout of the handshake, after which a connection is retried. The default of libzmq is 30 s."""
    heartbeat_timeout_ms: Positive = 15_000
    """Timeout of the answer to a ping, after which a peer is disconnected, so that half-open connections end."""
    max_topics: Positive = 1_024
    """Maximum number of different topics of one bound endpoint. Messages with further topics are ignored."""
    keepalive_idle_s: Positive = 30
    """Idle seconds after which the system sends TCP keep-alive probes."""


DEFAULT_SOCKET_OPTIONS: Final = SocketOptions()


def open_source_socket(
    context: zmq.Context[Socket],
    kind: int,
    endpoint: str,
    options: SocketOptions,
    security: SocketSecurity | None,
    *,
    is_private: bool,
) -> Socket:
    """Return a configured, unconnected socket for the endpoint of a source. Raise `EndpointError`.

    An inproc endpoint exists only within one context, which is the caller's context or, if `context` is private, the
    process-wide one.
    """
    with endpoint_errors(endpoint, f"cannot open a socket for {endpoint}"):
        is_shared = is_private and endpoint.startswith("inproc://")
        socket: Socket = (zmq.Context.instance() if is_shared else context).socket(kind)
    socket.linger = 0
    socket.set(zmq.MAXMSGSIZE, options.max_message_bytes)
    socket.set(zmq.RECONNECT_IVL, options.reconnect_ms)
    socket.set(zmq.RECONNECT_IVL_MAX, options.reconnect_max_ms)
    socket.set(zmq.HANDSHAKE_IVL, options.handshake_ms)
    socket.set(zmq.HEARTBEAT_IVL, options.heartbeat_ms)
    socket.set(zmq.HEARTBEAT_TIMEOUT, options.heartbeat_timeout_ms)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, options.keepalive_idle_s)
    if needs_ipv6(endpoint):
        socket.set(zmq.IPV6, 1)
    if security is not None:
        security.apply(socket)
    return socket


_MAX_EVENTS_PER_READ: Final = 1_000


def open_monitor(socket: Socket, events: int) -> Socket:
    """Return the socket on which libzmq reports these connection events."""
    while True:
        # pyzmq repeats other calls if a signal interrupts them, but not `get_monitor_socket`.
        with suppress(zmq.error.InterruptedSystemCall):
            return socket.get_monitor_socket(events)


def read_monitor(monitor: Socket) -> list[tuple[int, int]]:
    """Return the events that wait at a socket of `open_monitor`, each with its value, such as the descriptor of a connection.

    pyzmq's function for this is not used, because its module imports asyncio.
    """
    events: list[tuple[int, int]] = []
    with suppress(zmq.Again):
        while len(events) < _MAX_EVENTS_PER_READ:
            event, value = struct.unpack("=HI", monitor.recv_multipart(zmq.DONTWAIT)[0])
            events.append((event, value))
    return events


def disable_monitor(socket: Socket) -> None:
    """Stop the reports of `open_monitor`."""
    while True:
        with suppress(zmq.error.InterruptedSystemCall):
            return socket.disable_monitor()


def check_descriptors(sources: int) -> None:
    """Raise `EndpointError` if the limit of the process is too low for the descriptors of this many sources.

    If descriptors run out, libzmq reports nothing that can be mapped to an error. The application owns the limit: if a library
    raised the limit, `select()` could break in the whole process. Only the programs of kvevents raise the limit.
    """
    count = DESCRIPTORS_PER_SOURCE * sources
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit != resource.RLIM_INFINITY and count + _SPARE_DESCRIPTORS > soft_limit:
        raise EndpointError(
            f"{sources} sources need {count} of the {soft_limit} files that this process may open, and {_SPARE_DESCRIPTORS} are"
            " reserved for its other files; raise the limit (ulimit -n, or resource.setrlimit in the program)",
            errno=errno.EMFILE,
        )


def raise_descriptor_limit(maximum: int = 1 << 20) -> int:
    """Raise the soft limit of open files to the hard limit, but at most to `maximum`. Return the new soft limit."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = maximum if hard_limit == resource.RLIM_INFINITY else min(hard_limit, maximum)
    if soft_limit == resource.RLIM_INFINITY or soft_limit >= target:
        return soft_limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard_limit))
    return target


# --- sockets of publishers

MAX_REQUEST_BYTES: Final = 64 * 1024
"""Maximum size in bytes of a message from a peer of a publisher. Subscriptions and replay requests have tens of bytes; a larger
message ends the connection before it takes memory."""
KEEPALIVE_OPTIONS: Final = (30, 10, 3)
"""TCP keepalive: idle seconds, seconds between probes, number of probes. A vanished consumer is noticed within a minute. ZMTP
heartbeats would be faster, but they need ZMTP 3.1, and a consumer may have an older version."""
MIN_FLUSH_SECONDS: Final = 0.1
"""Minimum number of seconds for which ZeroMQ may send what a closed socket holds, even if the caller's deadline is over."""

_RECONNECT_EVENTS: Final = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED


@contextmanager
def open_socket(context: zmq.Context[Any], kind: int, security: SocketSecurity | None, endpoint: str) -> Iterator[Socket]:
    """Yield a socket of `kind` with all options set, ready to bind or connect to `endpoint`. If the block raises, close it."""
    socket: Socket = context.socket(kind)
    try:
        socket.maxmsgsize = MAX_REQUEST_BYTES
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = KEEPALIVE_OPTIONS
        if needs_ipv6(endpoint):
            socket.ipv6 = True
        if security is not None:
            security.apply(socket)
        yield socket
    except BaseException:
        socket.close(linger=0)
        raise


def close_socket(socket: Socket, deadline: float | None) -> float:
    """Close a socket, which ZeroMQ flushes in the background until `deadline` (monotonic seconds); None drops its messages.

    Returns the time at which ZeroMQ stops flushing; at least `MIN_FLUSH_SECONDS` remains if there is a deadline.
    """
    now = monotonic()
    linger = 0.0 if deadline is None else max(deadline - now, MIN_FLUSH_SECONDS)
    with suppress(zmq.ZMQError):  # the context was terminated, so its `inproc://` names are free
        endpoint = cast("bytes", socket.last_endpoint).rstrip(b"\0").decode()
        if endpoint.startswith("inproc://"):
            socket.unbind(endpoint)  # a publisher may be opened before `close` frees the name
    socket.close(linger=int(linger * 1000))
    return now + int(linger * 1000) / 1000


class Reconnector:
    """Keeps an event socket connected to a consumer that listens at `endpoint`. Raises `EndpointError`.

    libzmq reconnects after most failures and reports this to its monitor. But libzmq does not reconnect after a peer has
    violated the protocol (wrong socket type, wrong keys). `poll` then reconnects, because a consumer may use that address
    later.
    """

    def __init__(self, socket: Socket, endpoint: str, role: str, delay: float) -> None:
        """`delay` is the number of seconds to wait after a disconnect."""
        self._socket: Final = socket
        self._endpoint: Final = endpoint
        self._delay: Final = delay
        self._reconnect_at: float | None = None
        self._monitor: Final[Socket] = socket.get_monitor_socket(_RECONNECT_EVENTS)
        try:
            connect_or_bind(socket, endpoint, bind=False, role=role)
        except BaseException:
            self.close()
            raise

    def poll(self, now: float) -> None:
        """Read the monitor, and connect again if a reconnect is due; `now` is in monotonic seconds."""
        for event, _ in read_monitor(self._monitor):
            self._reconnect_at = now + self._delay if event == zmq.Event.DISCONNECTED else None
        if self._reconnect_at is not None and now >= self._reconnect_at:
            self._reconnect_at = None
            with suppress(zmq.ZMQError):  # libzmq may have dropped the endpoint
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)

    def close(self) -> None:
        """Stop monitoring; the socket stays open."""
        with suppress(zmq.ZMQError):  # the context may be terminated
            self._socket.disable_monitor()
        self._monitor.close(linger=0)


@cache
def libzmq_io() -> Any | None:
    """Return a `_native.Libzmq`; None if there is no native module, or it does not support pyzmq's backend or libzmq.

    One pyzmq call per frame costs several times as much as libzmq itself. So the native module transfers many messages in one
    call: it calls the functions of the libzmq that pyzmq has loaded, on pyzmq's own sockets. The module handles only messages
    that can be transferred without waiting, and leaves all other messages to pyzmq, which raises the proper exception.
    """
    try:
        native = require_native("message transfer in one call")
        backend = importlib.import_module("zmq.backend.cython._zmq")
        return native.Libzmq(backend.__file__)
    except (MissingDependencyError, ImportError, AttributeError, OSError):
        return None
