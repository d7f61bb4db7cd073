"""pyzmq's sockets, as links make and end them."""

from __future__ import annotations

import contextlib
import errno
import selectors
from collections.abc import Iterator
from typing import Final

import zmq

from kvevents.admission import Admission
from kvevents.endpoints import needs_ipv6
from kvevents.errors import EndpointError
from kvevents.subscriber.options import SocketOptions

_DESCRIPTORS: Final = "raise the limit of open files (ulimit -n)"
_HINTS: Final = {
    errno.EMFILE: _DESCRIPTORS,
    errno.ENFILE: _DESCRIPTORS,
    errno.EADDRINUSE: "another process uses it; choose another port",
    errno.ENOSPC: "raise fs.epoll.max_user_watches",
}


class Sockets:
    """Makes the sockets of one link: all of them with the same options and keys.

    inproc endpoints exist only within one context: the caller's, or by convention the process-wide one if `context` is private.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        options: SocketOptions,
        admission: Admission | None,
        *,
        is_private: bool,
    ) -> None:
        self.options = options
        self._context = context
        self._admission = admission
        self._is_private = is_private

    def open(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        """One that is to be attached to an endpoint. Raises `EndpointError`."""
        with endpoint_errors(endpoint, f"cannot open a socket for {endpoint}"):
            shared = self._is_private and endpoint.startswith("inproc://")
            context = zmq.Context.instance() if shared else self._context
            socket: zmq.Socket[bytes] = context.socket(kind)
        options = self.options
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
        if self._admission is not None:
            self._admission.apply(socket)
        return socket


@contextlib.contextmanager
def endpoint_errors(endpoint: str, failure: str) -> Iterator[None]:
    """Turn errors of ZeroMQ and the system into `EndpointError`, which says what failed."""
    try:
        yield
    except EndpointError:
        raise
    except (zmq.ZMQError, OSError) as error:
        number = error.errno
        reason = zmq.strerror(number) if number is not None else str(error)
        hint = _HINTS.get(number or 0, "expected tcp://HOST:PORT, ipc://PATH or inproc://NAME")
        raise EndpointError(f"{failure}: {reason}; {hint}", endpoint=endpoint, errno=number) from error


def attach(socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> None:
    """Bind or connect. Raises `EndpointError`."""
    with endpoint_errors(endpoint, f"cannot {'bind' if bind else 'connect to'} {endpoint}"):
        if bind:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)


def monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Open the socket on which libzmq reports these connection events."""
    while True:
        # pyzmq repeats other calls that a signal has interrupted, but not this one.
        with contextlib.suppress(zmq.error.InterruptedSystemCall):
            return socket.get_monitor_socket(events)


def end_monitor(socket: zmq.Socket[bytes]) -> None:
    """Have libzmq report nothing more."""
    while True:
        with contextlib.suppress(zmq.error.InterruptedSystemCall):
            return socket.disable_monitor()


def watch(selector: selectors.BaseSelector, socket: zmq.Socket[bytes], link: object) -> None:
    """Have the selector tell of `link` when a socket has news."""
    selector.register(socket.fileno(), selectors.EVENT_READ, link)


def drop(selector: selectors.BaseSelector, socket: zmq.Socket[bytes]) -> None:
    """Stop watching a socket, and close it."""
    if not socket.closed:
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(socket.fileno())
        socket.close(linger=0)
