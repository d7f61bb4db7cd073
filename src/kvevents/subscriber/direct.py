"""The live connection of one stream without libzmq: a TCP connection that whoever waits for batches reads itself.

Theory of operation. libzmq has a thread that reads connections and wakes up the one that waits for messages; to wake a thread
takes longer than to apply a batch, and on a busy machine each message is handled on two CPUs. Here the connection is in the
selector like everything else, and the native module makes messages of its bytes (`_native.Zmtp`). What libzmq's thread does
beside that is done when the link is pumped: connecting again after growing pauses, the handshake, pings.

The phases follow each other: a *pause* until the next attempt, *connecting*, *greeting*, *introduction* (of what each side is),
and *up*. Whatever goes wrong in any of them ends the connection, and a pause follows. A fault is told once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from enum import Enum
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector
from typing import Any, Final

from kvevents.backoff import Backoff
from kvevents.bulk import connections
from kvevents.endpoints import literal_tcp
from kvevents.stream import Source, Stream
from kvevents.subscriber.options import SocketOptions
from kvevents.wire.zmtp import GREETING, GREETING_BYTES, PING, READY, greeted, parse_command, pong, refused, subscription

log = logging.getLogger(__name__)

MAX_ANSWERS: Final = 1000
"""Pings of a peer that are answered in a second: more are no question, and answers that nobody reads would wait for ever."""
_CLOSED: Final = "it was closed"
_FULL: Final = "the peer reads nothing"


class _Phase(Enum):
    PAUSE = "pause"
    CONNECTING = "connecting"
    GREETING = "greeting"
    INTRODUCTION = "introduction"
    UP = "up"


class _LostError(Exception):
    """The connection has ended, or nothing can come of it; says why."""


def address_of(source: Source) -> tuple[str, int] | None:
    """Where to connect to; None for what only libzmq can do: names to be looked up, keys, other transports, binding."""
    if source.bind or source.curve is not None or "*" in source.endpoint or connections() is None:
        return None
    found = literal_tcp(source.endpoint)
    return found if found is not None and found[1] > 0 else None


class DirectLive:
    """One connection after the other to `address`; `link` is what the selector tells of."""

    def __init__(
        self, source: Source, address: tuple[str, int], options: SocketOptions, selector: BaseSelector, link: object
    ) -> None:
        self._endpoint: Final = source.endpoint
        self._topic: Final = source.topic.encode()
        self._address: Final = address
        self._options: Final = options
        self._selector: Final = selector
        self._link: Final = link
        self._backoff: Final = Backoff(first=options.reconnect_ms / 1000, most=options.reconnect_max_ms / 1000)
        self._phase = _Phase.PAUSE
        self._socket: socket.socket | None = None
        self._descriptor = -1
        self._greeting = b""
        self._minor = 0
        self._deadline = float("-inf")
        """Of the phase: the next attempt, the end of patience, the next look at whether the peer is alive."""
        self._heard_at = self._pinged_at = 0.0
        self._answers = 0
        """To pings, since the last full second."""
        self._second = 0
        self.fault = ""
        """Why there is no connection. It was logged."""

    def deadline(self) -> float | None:
        """When to pump though nothing has come."""
        return self._deadline

    def pump(self, stream: Stream[Any], now: float, limit: int) -> bool:
        """Feed what has arrived to `stream`, and do what is due."""
        try:
            if self._phase is _Phase.UP:
                return self._receive(stream, now, limit)
            return self._advance(stream, now)
        except _LostError as lost:
            self._lose(stream, now, str(lost))
            return False

    # --- until it is up

    def _advance(self, stream: Stream[Any], now: float) -> bool:
        """A step towards being up, or the time for it is over; whether there may be another one at once."""
        if self._phase is _Phase.PAUSE:
            if now >= self._deadline:
                self._connect(now)
            return False
        if self._phase is _Phase.CONNECTING:
            self._finish_connecting()
        elif self._phase is _Phase.GREETING:
            self._greet()
        if self._phase is _Phase.INTRODUCTION:
            self._introduce(stream, now)
        if self._phase is not _Phase.UP and now >= self._deadline:
            raise _LostError(f"no answer within {self._options.handshake_ms / 1000:g} s")
        return self._phase is _Phase.UP

    def _connect(self, now: float) -> None:
        self._deadline = now + self._options.handshake_ms / 1000
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        try:
            self._socket = made = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise _LostError(f"{error.strerror}; raise the limit of open files (ulimit -n)") from error
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self._options.keepalive_idle_s)
        self._descriptor = made.fileno()
        self._phase = _Phase.CONNECTING
        try:
            self._selector.register(self._descriptor, EVENT_WRITE, self._link)
        except OSError as error:
            raise _LostError(str(error)) from error
        refused_by = made.connect_ex(self._address)
        if refused_by not in {0, errno.EINPROGRESS}:
            raise _LostError(os.strerror(refused_by))

    def _finish_connecting(self) -> None:
        made = self._connection
        error = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise _LostError(os.strerror(error))
        try:
            made.getpeername()
        except OSError:  # not yet
            return
        self._selector.modify(self._descriptor, EVENT_READ, self._link)
        self._phase, self._greeting = _Phase.GREETING, b""
        self._send(GREETING)

    def _greet(self) -> None:
        try:
            came = self._connection.recv(GREETING_BYTES - len(self._greeting))
        except BlockingIOError:
            return
        except OSError as error:
            raise _LostError(_why(error)) from error
        if not came:
            raise _LostError(_CLOSED)
        self._greeting += came
        if self._greeting[0] != GREETING[0] or len(self._greeting) == GREETING_BYTES:
            self._minor, fault = greeted(self._greeting.ljust(GREETING_BYTES, b"\0"))
            if fault:
                raise _LostError(fault)
            self._send(READY)
            found = connections()
            assert found is not None  # noqa: S101 - or libzmq would have the connection
            self._reader = found.arrivals(self._options.max_message_bytes)
            self._phase = _Phase.INTRODUCTION

    def _introduce(self, stream: Stream[Any], now: float) -> None:
        _, messages, commands, _, _, end = self._reader.receive(self._descriptor, b"", 0, 0, 1)
        if not commands and not messages:
            if end is not None:
                raise _LostError(end)
            return
        fault = refused(*parse_command(commands[0] if commands else b""))
        if fault:
            raise _LostError(fault)
        self._send(subscription(self._topic, self._minor))
        self._phase = _Phase.UP
        self._backoff.reset()
        if self.fault:
            log.info("%s: connected", self._endpoint)
            self.fault = ""
        self._heard(now)
        stream.connected(now)

    # --- while it is

    def _receive(self, stream: Stream[Any], now: float, limit: int) -> bool:
        due = stream.coming(limit)
        payloads, messages, commands, came, more, end = self._reader.receive(
            self._descriptor, stream.topic, due.start, len(due), limit
        )
        if payloads:
            stream.receive_run(payloads, now)
        for frames in messages:
            stream.receive_live(frames, now)
        if came:
            self._heard(now)
        for each in commands:
            self._obey(*parse_command(each), now)
        if end is not None:
            raise _LostError(end)
        if now >= self._deadline:
            self._look_whether_alive(now)
        return more

    def _heard(self, now: float) -> None:
        self._heard_at = now
        self._deadline = now + self._options.heartbeat_ms / 1000

    def _obey(self, name: bytes, data: bytes, now: float) -> None:
        if name == b"PING":
            self._answers = self._answers + 1 if int(now) == self._second else 1
            self._second = int(now)
            if self._answers > MAX_ANSWERS:
                raise _LostError(f"the peer pings more than {MAX_ANSWERS} times a second")
            self._send(pong(data))
        elif name == b"ERROR":
            raise _LostError(refused(name, data))

    def _look_whether_alive(self, now: float) -> None:
        """Nothing has come for a while: ask, and give up who does not answer. ZMTP 3.0 has no question for that."""
        if self._minor < 1:
            self._heard(now)
            return
        if self._pinged_at <= self._heard_at:
            self._pinged_at = now
            self._deadline = now + self._options.heartbeat_timeout_ms / 1000
            self._send(PING)
        else:
            raise _LostError(f"no answer to a ping within {self._options.heartbeat_timeout_ms / 1000:g} s")

    # --- its end

    @property
    def _connection(self) -> socket.socket:
        if self._socket is None:
            raise _LostError("it is closed")
        return self._socket

    def _send(self, data: bytes) -> None:
        """All of it, or the connection is lost: a peer with no room for so little reads nothing."""
        try:
            sent = self._connection.send(data)
        except OSError as error:
            raise _LostError(_why(error)) from error
        if sent < len(data):
            raise _LostError(_FULL)

    def _lose(self, stream: Stream[Any], now: float, why: str) -> None:
        if self._phase is _Phase.UP:
            stream.disconnected()
        elif why != self.fault:
            # What is lost the stream's trust says; what never was, nobody else.
            log.warning("%s: no connection: %s; it is tried again", self._endpoint, why)
            self.fault = why
        self.close()
        self._phase = _Phase.PAUSE
        self._deadline = now + self._backoff.pause()

    def close(self) -> None:
        """Close the connection; idempotent."""
        if self._socket is not None:
            with contextlib.suppress(KeyError):  # it could not be registered
                self._selector.unregister(self._descriptor)
            self._socket.close()
            self._socket = None


def _why(error: OSError) -> str:
    if isinstance(error, BlockingIOError):
        return _FULL
    return _CLOSED if isinstance(error, ConnectionResetError | BrokenPipeError) else str(error)
