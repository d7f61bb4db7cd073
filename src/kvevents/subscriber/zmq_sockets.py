"""Opens, configures and closes the ZeroMQ sockets of subscribers, and maps their errors to `EndpointError`."""

from __future__ import annotations

import contextlib
import errno
import resource
import selectors
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import zmq

from kvevents.endpoints import needs_ipv6
from kvevents.errors import EndpointError
from kvevents.zap import SocketSecurity

DESCRIPTORS_PER_SOURCE: Final = 8
"""A source needs up to 6: SUB, monitor (two), DEALER, and one TCP connection each for SUB and DEALER."""
_SPARE_DESCRIPTORS: Final = 256
"""Descriptors left for the rest of the process."""
_ZERO_COPY_RECV: Final = 10
"""A context option of libzmq that pyzmq does not name. It is switched off because every message is copied into `bytes` anyway.
Sharing receive buffers costs a third more for messages of some kB, and one message keeps a whole buffer alive."""
_HINTS: Final = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files (ulimit -n)",
    errno.EADDRINUSE: "another process uses it; choose another port",
    errno.ENOSPC: "raise fs.epoll.max_user_watches",
}


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """Limits and timers of the sockets of one source."""

    receive_hwm: int = 100_000
    """Live messages that may wait in the socket while the application is busy, 0 for no limit. When it is full, libzmq drops
    messages at the publisher, and replay repairs the gap."""
    max_message_bytes: int = 256 * 1024 * 1024
    """A larger message ends the connection. This is eight times what the decoder accepts, so only abuse reaches it."""
    reconnect_ms: int = 100
    """Delay before the first reconnect attempt; it doubles after each failure, with jitter."""
    reconnect_max_ms: int = 5_000
    """Longest delay between two reconnect attempts."""
    heartbeat_ms: int = 5_000
    """Interval of ZMTP pings."""
    handshake_ms: int = 5_000
    """A peer that accepts a connection but does not complete the handshake in this time is retried. libzmq waits for 30 s."""
    heartbeat_timeout_ms: int = 15_000
    """A peer that does not answer a ping in this time is disconnected, so half-open connections end."""
    keepalive_idle_s: int = 30
    """Idle seconds after which the system sends TCP keep-alive probes."""


DEFAULT_SOCKET_OPTIONS: Final = SocketOptions()


class SocketFactory:
    """Opens the sockets of one source, all with the same options and keys.

    An inproc endpoint exists only within one context. That is the caller's context or, if `context` is private, the
    process-wide one.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        options: SocketOptions,
        security: SocketSecurity | None,
        *,
        is_private: bool,
    ) -> None:
        self.options = options
        self._context = context
        self._security = security
        self._is_private = is_private

    def open(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        """Return a configured socket for `endpoint` that is not connected yet. Raise `EndpointError`."""
        with endpoint_errors(endpoint, f"cannot open a socket for {endpoint}"):
            is_shared = self._is_private and endpoint.startswith("inproc://")
            context = zmq.Context.instance() if is_shared else self._context
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
        if self._security is not None:
            self._security.apply(socket)
        return socket


@contextlib.contextmanager
def endpoint_errors(endpoint: str, failure: str) -> Iterator[None]:
    """Raise errors of libzmq and of the system as `EndpointError`, with `failure` as the beginning of the message."""
    try:
        yield
    except EndpointError:
        raise
    except (zmq.ZMQError, OSError) as error:
        number = error.errno
        reason = zmq.strerror(number) if number is not None else str(error)
        hint = _HINTS.get(number or 0, "expected tcp://HOST:PORT, ipc://PATH or inproc://NAME")
        raise EndpointError(f"{failure}: {reason}; {hint}", endpoint=endpoint, errno=number) from error


def connect_or_bind(socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> None:
    """Connect a socket to an endpoint, or bind it there. Raise `EndpointError`."""
    with endpoint_errors(endpoint, f"cannot {'bind' if bind else 'connect to'} {endpoint}"):
        if bind:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)


def open_monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Return the socket on which libzmq reports these connection events."""
    while True:
        # pyzmq repeats other calls that a signal interrupts, but not this one.
        with contextlib.suppress(zmq.error.InterruptedSystemCall):
            return socket.get_monitor_socket(events)


def disable_monitor(socket: zmq.Socket[bytes]) -> None:
    """Stop the reports of `open_monitor`."""
    while True:
        with contextlib.suppress(zmq.error.InterruptedSystemCall):
            return socket.disable_monitor()


def register(selector: selectors.BaseSelector, socket: zmq.Socket[bytes], connection: object) -> None:
    """Make the selector report `connection` when the state of a socket changes."""
    selector.register(socket.fileno(), selectors.EVENT_READ, connection)


def unregister_and_close(selector: selectors.BaseSelector, socket: zmq.Socket[bytes]) -> None:
    """Remove a socket from the selector and close it. Idempotent."""
    if not socket.closed:
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(socket.fileno())
        socket.close(linger=0)


def private_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a new context for as many sockets as libzmq allows."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    # A libzmq without the option works too; it is only slower.
    with contextlib.suppress(zmq.ZMQError):
        context.set(_ZERO_COPY_RECV, 0)
    return context


def allow_descriptors(sources: int) -> None:
    """Raise the soft limit of open files for this many sources. Raise `EndpointError` if the hard limit is too low.

    The limit is checked here because libzmq does not report it in a way that could be mapped to an error.
    """
    needed = DESCRIPTORS_PER_SOURCE * sources
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + _SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    raised = wanted * 2 if hard == resource.RLIM_INFINITY else min(hard, wanted * 2)
    if raised < wanted:
        raise EndpointError(
            f"{needed} descriptors are needed for {sources} sources but the hard limit is {hard}; raise it (ulimit -Hn)",
            errno=errno.EMFILE,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def destroy_context(context: zmq.Context[Any], wait: float = 1.0) -> bool:
    """Close all sockets of a context without flushing them, and terminate it. Return whether it ended within `wait` seconds.

    libzmq waits for each socket without a bound. If an interrupt comes while pyzmq makes a socket, the exception holds a socket
    that pyzmq does not close. Termination then goes on in a daemon thread, and ends with the process at the latest.
    """
    ending = threading.Thread(target=context.destroy, kwargs={"linger": 0}, daemon=True, name="zmq-destroy")
    ending.start()
    ending.join(wait)
    return not ending.is_alive()
