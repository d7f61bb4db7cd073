"""Opens, connects, reconnects and closes the ZeroMQ sockets of a publisher, and explains why a socket cannot be opened."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, Final, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvevents.endpoints import needs_ipv6
from kvevents.errors import EndpointError
from kvevents.zap import SocketSecurity

Socket = zmq.Socket[bytes]

MAX_REQUEST_BYTES: Final = 64 * 1024
"""Longest message that a peer may send to a publisher. Subscriptions and replay requests have tens of bytes; a longer message
ends the connection before it takes memory."""
KEEPALIVE: Final = (30, 10, 3)
"""TCP keepalive: idle seconds, seconds between probes, number of probes. A vanished consumer is noticed within a minute. ZMTP
heartbeats would be quicker, but they need ZMTP 3.1 and a consumer may have an older version."""
FLUSH_GRACE: Final = 0.1
"""Seconds that ZeroMQ has to flush a closed socket when no other time is left."""

_RECONNECT_EVENTS: Final = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED
_MAX_EVENTS_PER_POLL: Final = 100
_HINTS: Final = {
    errno.EADDRINUSE: "another process or rank uses it; choose another port, or port 0 to let the OS choose",
    errno.EADDRNOTAVAIL: "this host has no such address; bind tcp://*:PORT, or set bind=False to connect",
    errno.EACCES: "no permission; choose a port above 1023 or a path that can be written",
    errno.ENODEV: "this host has no such address or interface; bind tcp://*:PORT, or set bind=False to connect",
    errno.EPROTONOSUPPORT: "ZeroMQ does not know this transport; use tcp, ipc or inproc",
    errno.EINVAL: "it is not a valid endpoint; use tcp://HOST:PORT, ipc://PATH or inproc://NAME",
    errno.ENOENT: "the directory does not exist",
}


class SocketError(EndpointError, zmq.ZMQError):  # type: ignore[misc]  # pyright: ignore[reportIncompatibleVariableOverride]
    """An `EndpointError` that is a ZMQError too, since the engines' publishers raise ZMQError and their users catch it."""


@contextmanager
def open_socket(context: zmq.Context[Any], kind: int, security: SocketSecurity | None, endpoint: str) -> Iterator[Socket]:
    """Yield a socket of `kind` with all options set, ready to bind or connect to `endpoint`. Closes it if the block raises."""
    socket: Socket = context.socket(kind)
    try:
        socket.maxmsgsize = MAX_REQUEST_BYTES
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = KEEPALIVE
        if needs_ipv6(endpoint):
            socket.ipv6 = True
        if security is not None:
            security.apply(socket)
        yield socket
    except BaseException:
        socket.close(linger=0)
        raise


def bind(socket: Socket, endpoint: str, what: str) -> str:
    """Bind the socket and return its endpoint as ZeroMQ reports it. `what` names it in errors. Raises `EndpointError`."""
    _raise_endpoint_error(socket.bind, endpoint, f"cannot bind the {what} socket to {endpoint}")
    # ZeroMQ terminates string options with a zero byte.
    return cast("bytes", socket.get(zmq.LAST_ENDPOINT)).partition(b"\0")[0].decode()


def connect(socket: Socket, endpoint: str, what: str) -> None:
    """Connect the socket. `what` names it in errors. Raises `EndpointError`."""
    _raise_endpoint_error(socket.connect, endpoint, f"cannot connect the {what} socket to {endpoint}")


def close_socket(socket: Socket, deadline: float | None) -> float:
    """Close the socket; ZeroMQ flushes it in the background until `deadline` (monotonic seconds; None for not at all).

    Returns the time at which ZeroMQ stops flushing; at least `FLUSH_GRACE` remains if there is a deadline.
    """
    now = monotonic()
    linger = 0.0 if deadline is None else max(deadline - now, FLUSH_GRACE)
    _unbind_inproc(socket)
    socket.close(linger=int(linger * 1000))
    return now + int(linger * 1000) / 1000


def start_termination(context: zmq.Context[Any]) -> threading.Thread:
    """Terminate a context whose sockets are closed, in a daemon thread, which is returned.

    ZeroMQ has no limit for this, and a socket that is still open blocks it for ever.
    """
    thread = threading.Thread(target=context.term, daemon=True, name="zmq-term")
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending and starts no threads any more
        context.term()
    return thread


def _unbind_inproc(socket: Socket) -> None:
    """Free the inproc name of the socket now; close() frees it later, and the next publisher may want it before."""
    with suppress(zmq.ZMQError):  # a terminated context has no names
        bound = cast("bytes", socket.last_endpoint).rstrip(b"\0").decode()
        if bound.startswith("inproc://"):
            socket.unbind(bound)


def _raise_endpoint_error(action: Callable[[str], Any], endpoint: str, failure: str) -> None:
    try:
        action(endpoint)
    except zmq.ZMQError as error:
        number = error.errno or 0
        hint = _HINTS.get(number, "check the endpoint")
        raise SocketError(number, f"{failure}: {zmq.strerror(number)}; {hint}", endpoint=endpoint) from error


class Reconnector:
    """Keeps an event socket connected to a consumer that listens at `endpoint`. Raises `EndpointError`.

    libzmq reconnects after most failures and reports it to its monitor. It does not reconnect after a peer broke the protocol
    (a socket of another type, other keys), although the right peer may come to that address later. `poll` reconnects then.
    """

    def __init__(self, socket: Socket, endpoint: str, what: str, delay: float) -> None:
        """`delay` is the number of seconds to wait after a disconnect."""
        self._socket: Final = socket
        self._endpoint: Final = endpoint
        self._delay: Final = delay
        self._reconnect_at: float | None = None
        self._monitor: Final[Socket] = socket.get_monitor_socket(_RECONNECT_EVENTS)
        try:
            connect(socket, endpoint, what)
        except BaseException:
            self.close()
            raise

    def poll(self, now: float) -> None:
        """Read the monitor, and connect again if that is due; `now` is in monotonic seconds."""
        for _ in range(_MAX_EVENTS_PER_POLL):
            if not cast("int", self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
                break
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))["event"]
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
