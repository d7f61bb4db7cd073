"""Opening ZeroMQ sockets, and saying in words why one could not be opened."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, Final, cast

import zmq

from kvevents.admission import Admission
from kvevents.endpoints import needs_ipv6
from kvevents.errors import EndpointError

Socket = zmq.Socket[bytes]

MAX_REQUEST_BYTES: Final = 64 * 1024
"""Longest message a peer may send to a publisher: subscriptions and replay requests are tens of bytes. A longer one ends the
connection before it takes memory."""
KEEPALIVE: Final = (30, 10, 3)
"""Seconds of silence before TCP probes a peer, seconds between probes, probes: a vanished consumer is noticed in a minute.
ZMTP heartbeats would be quicker, but came with ZMTP 3.1, and a consumer may speak an older one. Consumers may send them and are
answered."""
FLUSH_GRACE: Final = 0.1
"""Seconds that ZeroMQ has to flush a closed socket when no more time was left."""

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
    """An `EndpointError` that code written for the engines' publishers, which let ZeroMQ's error through, catches as well."""


@contextmanager
def opened(context: zmq.Context[Any], kind: int, admission: Admission | None, endpoint: str) -> Iterator[Socket]:
    """A socket of `kind`, ready to bind or connect to `endpoint`; closed again when that fails."""
    socket: Socket = context.socket(kind)
    try:
        socket.maxmsgsize = MAX_REQUEST_BYTES
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = KEEPALIVE
        if needs_ipv6(endpoint):
            socket.ipv6 = True
        if admission is not None:
            admission.apply(socket)
        yield socket
    except BaseException:
        socket.close(linger=0)
        raise


def bind(socket: Socket, endpoint: str, what: str) -> str:
    """Bind and return what ZeroMQ calls the endpoint. Raises `EndpointError`."""
    _attempt(socket.bind, endpoint, f"cannot bind the {what} socket to {endpoint}")
    # A string option of ZeroMQ ends with a zero byte, and the first one ends it.
    return cast("bytes", socket.get(zmq.LAST_ENDPOINT)).partition(b"\0")[0].decode()


def connect(socket: Socket, endpoint: str, what: str) -> None:
    """Connect. Raises `EndpointError`."""
    _attempt(socket.connect, endpoint, f"cannot connect the {what} socket to {endpoint}")


def close_by(socket: Socket, deadline: float | None) -> float:
    """Close, giving ZeroMQ until `deadline` (monotonic seconds; None for no time) to flush; returns when it will give up."""
    now = monotonic()
    linger = 0.0 if deadline is None else max(deadline - now, FLUSH_GRACE)
    _free_name(socket)
    socket.close(linger=int(linger * 1000))
    return now + int(linger * 1000) / 1000


def _free_name(socket: Socket) -> None:
    """An inproc name, that is: close() frees it some time later, from another thread, and the next publisher may want it."""
    with suppress(zmq.ZMQError):  # of a context that was ended, where nothing has a name any more
        bound = cast("bytes", socket.last_endpoint).rstrip(b"\0").decode()
        if bound.startswith("inproc://"):
            socket.unbind(bound)


def _attempt(action: Callable[[str], Any], endpoint: str, failure: str) -> None:
    try:
        action(endpoint)
    except zmq.ZMQError as error:
        raise _refusal(endpoint, error.errno or 0, zmq.strerror(error.errno or 0), failure) from error


def _refusal(endpoint: str, number: int, reason: str, failure: str) -> SocketError:
    return SocketError(number, f"{failure}: {reason}; {_HINTS.get(number, 'check the endpoint')}", endpoint=endpoint)
