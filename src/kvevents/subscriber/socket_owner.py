"""Owns the context, sockets, keys and descriptors that a transport opens, and closes them if the transport is dropped."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import zmq

from kvevents.stream import Source
from kvevents.subscriber.multiplexer import Connection
from kvevents.zeromq.sockets import Socket, SocketOptions, disable_monitor, open_source_socket, private_context
from kvevents.zeromq.zap import SocketSecurity, secure_sockets

if TYPE_CHECKING:
    from _typeshed import HasFileno


class StallDetector:
    """Detects that the application has not called `receive` for so long that connections with full sockets may have timed out.

    The detector measures the time between two waits, in which nothing reads the sockets. A quiet source is not a stall: while
    the application keeps waiting, `is_stalled` is False. A front end that waits in another way (asyncio) must call
    `Transport.wait` at least every `max_wait` seconds.
    """

    def __init__(self, heartbeat_timeout: float, clock: Callable[[], float]) -> None:
        # The limit is half of the timeout, because libzmq may have sent the ping before the socket was full.
        self._max_delay = max(0.0, heartbeat_timeout) / 2
        self._clock = clock
        self._waited_at = float("-inf")
        self.is_stalled = True
        """Whether the pause before the latest wait was a stall; True before the first wait."""

    @property
    def max_wait(self) -> float | None:
        """Maximum number of seconds between two waits that is never a stall; None if every pause can be a stall."""
        return self._max_delay / 2 or None

    def begin_wait(self) -> None:
        """Record that the application begins to wait for deliveries: sockets are read while it waits."""
        self.is_stalled = self._clock() - self._waited_at > self._max_delay

    def end_wait(self) -> None:
        """Record that the application begins to process deliveries: no socket is read until it waits again."""
        self._waited_at = self._clock()


class SocketOwner:
    """The sockets of one transport, and the selector that watches them."""

    def __init__(self, context: zmq.Context[Socket] | None, options: SocketOptions) -> None:
        self.options = options
        self.owns_context = context is None
        self.context = context or private_context()
        self.selector = selectors.DefaultSelector()
        self.marked_connections: set[Connection] = set()
        """Connections that must be read, because another connection has received messages for them."""
        self.found_sources: list[Source] = []
        """Sources that were found by their topic."""
        self.process = os.getpid()
        self._sockets: set[Socket] = set()
        self._securities: set[SocketSecurity] = set()
        pipe = self.wake_reader, self.wake_writer = os.pipe()
        # Without the finalizer, garbage collection would finalize a context before its sockets, and wait for them endlessly.
        private = self.context if self.owns_context else None
        self.finalizer = weakref.finalize(self, _close_dropped, self.process, private, self._sockets, self._securities, pipe)
        self.finalizer.atexit = False
        os.set_blocking(self.wake_writer, False)
        self.selector.register(self.wake_reader, selectors.EVENT_READ)

    def secure(self, source: Source) -> SocketSecurity | None:
        """Return the keys of a source's sockets; close them with `end_security`. Raise `ConfigError`."""
        security = secure_sockets(self.context, source.curve, source.endpoint)
        if security is not None:
            self._securities.add(security)
        return security

    def end_security(self, security: SocketSecurity | None) -> None:
        """Close the keys of a source."""
        if security is not None:
            self._securities.discard(security)
            security.close()

    def open_socket(self, kind: int, endpoint: str, security: SocketSecurity | None) -> Socket:
        """Return a new socket for an endpoint, which `close_socket` closes. Raise `EndpointError`."""
        is_private = self.owns_context
        return self.register(open_source_socket(self.context, kind, endpoint, self.options, security, is_private=is_private))

    def register(self, socket: Socket) -> Socket:
        """Record a new socket, which `close_socket` closes, and return it."""
        self._sockets.add(socket)
        return socket

    def watch(self, socket: HasFileno, connections: Callable[[], Iterable[Connection]]) -> None:
        """Make `wait` return `connections()` when the state of a socket changes."""
        self.selector.register(socket.fileno(), selectors.EVENT_READ, connections)

    def close_socket(self, socket: Socket) -> None:
        """Stop watching a socket, and close it. Idempotent."""
        self._sockets.discard(socket)
        if not socket.closed:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(socket.fileno())
            socket.close(linger=0)


def _close_dropped(
    process: int,
    context: zmq.Context[Socket] | None,
    sockets: Collection[Socket],
    securities: Collection[SocketSecurity],
    descriptors: Collection[int],
) -> None:
    """Close the resources of a dropped transport, in a thread, because garbage collection must not wait."""
    for descriptor in descriptors:
        os.close(descriptor)
    if process != os.getpid():
        return

    def close() -> None:
        # Monitors are closed first: libzmq's I/O thread, which serves all sockets, would wait endlessly for a closed monitor.
        for socket in sockets:
            with contextlib.suppress(zmq.ZMQError):  # the application has terminated its context
                disable_monitor(socket)
        for socket in sockets:
            socket.close(linger=0)
        for security in securities:
            security.close()
        if context is not None:
            context.destroy(linger=0)

    with contextlib.suppress(RuntimeError):  # the interpreter is ending; the system closes the sockets
        threading.Thread(target=close, daemon=True, name="zmq-destroy").start()
    warnings.warn(
        f"a subscriber with {len(sockets)} open sockets was dropped without close(); use it in a `with` block",
        ResourceWarning,
        stacklevel=2,
    )
