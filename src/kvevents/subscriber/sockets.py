"""pyzmq's sockets, as links make and end them."""

from __future__ import annotations

import contextlib
import selectors

import zmq

from kvevents.admission import Admission
from kvevents.errors import EndpointError
from kvevents.subscriber.options import SocketOptions


class Sockets:
    """Makes the sockets of one link: all of them with the same options and keys."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], options: SocketOptions, admission: Admission | None) -> None:
        self.options = options
        self._context = context
        self._admission = admission

    def open(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        """One that is to be attached to an endpoint. Raises `EndpointError`."""
        try:
            socket: zmq.Socket[bytes] = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise EndpointError(f"no socket for {endpoint}: {error}; raise the limit of open files (ulimit -n)") from error
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
        if "[" in endpoint:
            socket.set(zmq.IPV6, 1)
        if self._admission is not None:
            self._admission.apply(socket)
        return socket


def attach(socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> None:
    """Bind or connect. Raises `EndpointError`."""
    try:
        if bind:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if bind else "connect to"
        raise EndpointError(
            f"cannot {verb} {endpoint}: {error}; expected tcp://host:port, ipc://path or inproc://name"
        ) from error


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
