"""One consumer's connection, as a sender without libzmq has it: ZMTP 3 with the mechanism NULL, the publisher's side.

Theory of operation. The sending thread writes batches into the connection itself, as far as the system takes them (`send`).
What it does not take *waits* here, and the outlet's own thread goes on with it when there is room (`flush`); until all of it is
out, what follows waits behind it. The outlet's thread also reads what the consumer says (`read`): the greeting, what kind of
socket it is, its subscriptions, pings. Both threads hold the lock while they write, so that no message ends inside of another.

Batches wait by reference: those that replay keeps as well take no memory. A consumer for which `hwm` of them wait is sent no
more until there is room, which its next numbers show it, and asks for the rest; how many it was not sent is counted.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvevents.bulk import Connections
from kvevents.publisher import sockets
from kvevents.publisher.kept import Numbered
from kvevents.wire.zmtp import (
    GREETING,
    GREETING_BYTES,
    PUBLISHER_READY,
    SUBSCRIBERS,
    greeted,
    parse_command,
    pong,
    refused,
    wish_of_command,
    wish_of_message,
)

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS: Final = 30.0
"""For which a connection may say nothing that makes it a consumer; libzmq's default."""
MAX_SUBSCRIPTIONS: Final = 1000
"""Of one consumer. Engines have one topic, or a few."""
MAX_ANSWERS: Final = 100
"""Answers to pings that wait: whoever asks so often and reads nothing is not alive."""
_AT_ONCE: Final = 1000
"""Messages and commands that are read in one go."""
_PIECE: Final = 512
"""Batches that wait together."""
_CLOSED: Final = "it was closed"


class LostError(Exception):
    """The connection has ended, or nothing can come of it; says why."""


class _Phase(Enum):
    GREETING = "greeting"
    INTRODUCTION = "introduction"
    UP = "up"


@dataclass(slots=True)
class _Run:
    """Batches that wait."""

    topic: bytes
    batches: Sequence[Numbered]
    at: int = 0
    """The one to go on with."""
    sent: int = 0
    """Bytes of it that are out."""


class Consumer:
    """A connection that was taken; `hwm` is the most batches that wait for it. `deadline` is that of its handshake."""

    def __init__(self, connection: socket.socket, peer: str, hwm: int, native: Connections, now: float) -> None:
        self.peer: Final = peer
        self.deadline = now + HANDSHAKE_SECONDS
        self.subscriptions = 0
        self.dropped = 0
        """Batches that it was not sent."""
        self._connection: Final = connection
        self._descriptor: Final = connection.fileno()
        self._hwm: Final = hwm
        self._native: Final = native
        self._arrivals: Final = native.arrivals(sockets.MAX_REQUEST_BYTES)
        self._phase = _Phase.GREETING
        self._greeting = b""
        self._lock: Final = threading.Lock()
        self._topics: Counter[bytes] = Counter()
        self._wanted: tuple[bytes, bool] = (b"", False)
        """A topic, and whether it is."""
        self._waiting: deque[_Run | bytes] = deque()
        self._behind = self._answers = 0
        """Batches, and answers to pings, that wait."""
        self._fault = ""
        """Why nothing more can be written."""
        try:
            connection.setblocking(False)
            sockets.keep_alive(connection)
            self._words(GREETING)
        except OSError as error:
            raise LostError(_why(error)) from error

    def fileno(self) -> int:
        """For a selector."""
        return self._descriptor

    @property
    def waits(self) -> bool:
        """Whether anything waits for room."""
        return bool(self._waiting)

    # --- the sending thread's

    def send(self, topic: bytes, batches: Sequence[Numbered]) -> bool:
        """Send batches, if it wants those of this topic; whether the outlet's thread has to go on with it."""
        with self._lock:
            if self._fault or not self._wants(topic):
                return False
            if self._waiting:
                self._keep(topic, batches, 0)
                return False
            at, sent, error = self._native.pour(self._descriptor, topic, batches, 0, 0)
            if error:
                self._fault = _why(_refused(error))
            elif at < len(batches):
                self._keep(topic, batches[at:], sent)
            else:
                return False
            return True

    def _wants(self, topic: bytes) -> bool:
        if self._wanted[0] != topic:
            self._wanted = topic, any(map(topic.startswith, self._topics))
        return self._wanted[1]

    def _keep(self, topic: bytes, batches: Sequence[Numbered], sent: int) -> None:
        """Have batches wait, as many as may; of the first one some bytes are out, so that it must."""
        room = max(self._hwm - self._behind, int(sent > 0))
        if room < len(batches):
            if not self.dropped:
                log.warning("%s is %d batches behind, and is not sent what follows: it has to ask for it", self.peer, self._hwm)
            self.dropped += len(batches) - room
            batches = batches[:room]
        self._behind += len(batches)
        for start in range(0, len(batches), _PIECE):
            self._waiting.append(_Run(topic, batches[start : start + _PIECE], 0, 0 if start else sent))

    # --- the outlet's thread's

    def flush(self) -> bool:
        """Send what waits, as far as there is room; whether nothing waits any more. Raises `LostError`."""
        with self._lock:
            while self._waiting and not self._fault:
                if not self._flush_one(self._waiting[0]):
                    return False
                self._waiting.popleft()
            if self._fault:
                raise LostError(self._fault)
            return True

    def _flush_one(self, waiting: _Run | bytes) -> bool:
        if isinstance(waiting, bytes):
            sent = self._put(waiting)
            self._waiting[0] = waiting[sent:]
            self._answers -= sent == len(waiting)
            return sent == len(waiting)
        before = waiting.at
        waiting.at, waiting.sent, error = self._native.pour(
            self._descriptor, waiting.topic, waiting.batches, waiting.at, waiting.sent
        )
        self._behind -= waiting.at - before
        if error:
            raise LostError(_why(_refused(error)))
        return waiting.at == len(waiting.batches)

    def read(self) -> bool:
        """Take in what it says; whether there may be more already. Raises `LostError`."""
        try:
            if self._phase is _Phase.GREETING and not self._greet():
                return False
        except BlockingIOError:
            return False
        except OSError as error:
            raise LostError(_why(error)) from error
        _, messages, commands, _, more, end = self._arrivals.receive(self._descriptor, b"", 0, 0, _AT_ONCE)
        for each in commands:
            self._obey(*parse_command(each))
        for frames in messages:
            if self._phase is not _Phase.UP:
                raise LostError("the peer does not say what it is")
            self._heed(wish_of_message(frames))
        if end is not None:
            raise LostError(end)
        return more

    def _greet(self) -> bool:
        came = self._connection.recv(GREETING_BYTES - len(self._greeting))
        if not came:
            raise LostError(_CLOSED)
        self._greeting += came
        if self._greeting[0] == GREETING[0] and len(self._greeting) < GREETING_BYTES:
            return False
        _, fault = greeted(self._greeting.ljust(GREETING_BYTES, b"\0"))
        if fault:
            raise LostError(fault)
        self._words(PUBLISHER_READY)
        self._phase = _Phase.INTRODUCTION
        return True

    def _obey(self, name: bytes, data: bytes) -> None:
        if self._phase is not _Phase.UP:
            if fault := refused(name, data, SUBSCRIBERS):
                raise LostError(fault)
            self._phase, self.deadline = _Phase.UP, float("inf")
        elif name == b"PING":
            self._words(pong(data))
        else:
            self._heed(wish_of_command(name, data))

    def _heed(self, wish: tuple[bool, bytes] | None) -> None:
        """A subscription, or the end of one."""
        if wish is None:
            return
        wanted, topic = wish
        with self._lock:
            if wanted:
                self._topics[topic] += 1
            elif self._topics[topic] > 1:
                self._topics[topic] -= 1
            else:
                del self._topics[topic]
            self._wanted = (b"", any(not each for each in self._topics))
            self.subscriptions = self._topics.total()
        if self.subscriptions > MAX_SUBSCRIPTIONS:
            raise LostError(f"it has more than {MAX_SUBSCRIPTIONS} subscriptions")

    def _words(self, data: bytes) -> None:
        """Say something of our own: before batches that wait, but not inside of one."""
        with self._lock:
            rest = data if self._waiting else data[self._put(data) :]
            if not rest:
                return
            self._waiting.insert(self._boundary(), rest)
            self._answers += 1
        if self._answers > MAX_ANSWERS:
            raise LostError("the peer asks, and reads nothing")

    def _boundary(self) -> int:
        """Before which of what waits something else may be sent: the first batch of which nothing is out."""
        waiting, place = self._waiting, 0
        if waiting and isinstance(first := waiting[0], _Run) and first.sent:
            begun, rest = first.batches[first.at : first.at + 1], first.batches[first.at + 1 :]
            waiting[0] = _Run(first.topic, begun, 0, first.sent)
            if rest:
                waiting.insert(1, _Run(first.topic, rest))
            place = 1
        while place < len(waiting) and isinstance(waiting[place], bytes):
            place += 1
        return place

    def _put(self, data: bytes) -> int:
        """How many bytes of it the system takes. Raises `LostError`."""
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LostError(_why(error)) from error

    def close(self) -> None:
        """End the connection; what the system has taken it still delivers. Idempotent."""
        with self._lock:
            self._fault = self._fault or _CLOSED
            self._waiting.clear()
            self._behind = self._answers = 0
            sockets.hang_up(self._connection)

    def __repr__(self) -> str:
        return f"<Consumer {self.peer} {self._phase.value}, {self.subscriptions} subscriptions, {self._behind} batches behind>"


def _refused(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _why(error: OSError) -> str:
    return _CLOSED if isinstance(error, ConnectionResetError | BrokenPipeError) else error.strerror or str(error)
