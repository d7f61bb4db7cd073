"""Answers of many messages to many readers, each at its reader's pace: what replay and placement snapshots have in common.

Theory of operation. A request opens a session: the messages of its answer, as they are at that moment. Sessions take turns, a
slice each. ROUTER_MANDATORY makes ZeroMQ say when a consumer's pipe is full, where the engines' sockets drop without a word;
the session then keeps its place and is tried again after `RETRY_WAITS`. It also says when a consumer is gone. Messages that are
large wait here as well while ZeroMQ holds too many bytes of them (`unsent`). So an answer goes at its reader's pace and loses
nothing, and live batches, on another socket and thread, never wait for it. Only this thread touches the socket.
"""

from __future__ import annotations

import errno
import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from time import monotonic, sleep
from typing import Any, ClassVar, Final, cast

import zmq
import zmq.backend

from kvevents.publisher.failures import Failures, is_context_end
from kvevents.publisher.sockets import FLUSH_GRACE, Socket, close_by
from kvevents.publisher.stats import ReplayStats
from kvevents.publisher.unsent import LARGE, Unsent

logger = logging.getLogger(__name__)

MAX_WAITING_REQUESTS: Final = 8
"""Requests of one consumer that wait for its present reply; they are answered in order, and more are refused."""
SLICE: Final = 32
"""Messages sent for one session before the next one has its turn."""
REQUESTS_AT_ONCE: Final = 64
"""Requests read before replies have their turn, so that a flood of requests does not stop them."""
PAUSE: Final = 0.0001
"""Seconds between slices in which other threads get the interpreter, and other processes a CPU. A thread that sends without a
pause gives the lock up for each send and has it back before a waiting thread wakes, which then waits its 5 ms
(`sys.getswitchinterval`). At this pace a full buffer of 10,000 batches takes 0.1 s."""
RETRY_WAITS: Final = (0.001, 0.002, 0.004, 0.008)
"""Seconds to wait when every consumer's pipe is full: longer each time, the last one from then on."""
ERROR_PAUSE: Final = 0.1
"""Seconds after an exception, so that a fault that lasts does not keep a CPU busy."""
IDLE_WAIT: Final = 1.0
"""Seconds the idle thread sleeps at most; requests, `wake` and `stop` end that at once."""
UNREAD_TIMEOUT: Final = 60.0
"""Seconds in which a TCP connection takes nothing of what waits for it, after which it is ended, and with it what ZeroMQ holds
for that consumer (ZMQ_TCP_MAXRT, on Linux). Its replies were given up before."""
SLOWEST: Final = 128 * 1024
"""Bytes per second of a connection. As long as one takes a slower one may be at a large message, no reply is given up."""

_MORE: Final = zmq.SNDMORE
_MORE_OR_REFUSE: Final = zmq.SNDMORE | zmq.DONTWAIT


class Session:
    """One answer in progress."""

    __slots__ = ("began", "ending", "identity", "messages", "position", "progressed", "waiting")

    def __init__(self, identity: bytes, messages: Sequence[Any], ending: list[bytes], now: float) -> None:
        self.identity = identity
        self.began = self.progressed = now
        self.waiting: deque[Any] = deque()
        self.restart(messages, ending)

    def restart(self, messages: Sequence[Any], ending: list[bytes]) -> None:
        """The same reader's next answer: messages as `ReplyServer._spelled` takes them, and the frames of the last one."""
        self.messages = messages
        self.ending = ending
        self.position = 0


class ReplyServer(ABC):
    """Answers requests on a bound ROUTER socket, which it owns from `run` on and closes when that ends."""

    name: ClassVar[str]
    """What it answers, for logs and counters."""

    def __init__(self, socket: Socket) -> None:
        socket.router_mandatory = True
        self._socket = socket
        self._send: Callable[..., None] = zmq.backend.Socket.send.__get__(socket)
        # A consumer in our own process holds what it has not read for as long as it likes; that is its own memory.
        self._counts = not cast("bytes", socket.last_endpoint).startswith(b"inproc://")
        self._sessions: dict[bytes, Session] = {}
        self._unsent = Unsent()
        self._deadline: float | None = None
        self._retries = 0
        self.cut = 0
        """Replies that a stop left unfinished."""
        self.flush_until = float("inf")
        """When ZeroMQ gives up flushing the socket (monotonic seconds); set when `run` ends."""
        self.failures = Failures(logger, cast("bytes", socket.last_endpoint).rstrip(b"\0").decode())
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._is_closed = False
        self._count: dict[str, int] = dict.fromkeys(
            ("requests", "batches", "finished", "abandoned", "gone", "malformed", "refused", "deferred"), 0
        )

    def stats(self) -> ReplayStats:
        """Counters since the start."""
        return ReplayStats(active=len(self._sessions), unsent_bytes=self._unsent.size, **self._count)

    def stop(self, deadline: float) -> None:
        """Let replies in progress go on until `deadline` (monotonic seconds), then end `run`. Returns at once."""
        self._deadline = deadline
        self.wake()

    def wake(self) -> None:
        """Have `run` look around."""
        if not self._is_closed:
            with suppress(BlockingIOError):  # it has been woken often enough
                os.write(self._wake_write, b"\0")

    def close(self) -> None:
        """Free what remains once `run` has ended or was never called; waits for ZeroMQ to flush what it was to flush."""
        self._unsent.wait(self.flush_until + FLUSH_GRACE)
        if not self._is_closed:
            self._is_closed = True
            os.close(self._wake_read)
            os.close(self._wake_write)

    def run(self) -> None:
        """Serve until `stop`; the body of a thread. No exception ends it, except when the context is terminated."""
        try:
            while self._deadline is None or (self._sessions and monotonic() < self._deadline):
                try:
                    self.turn()
                except BaseException as error:  # noqa: BLE001 - a panic of native code is a BaseException
                    self._survive(error, "the request is not answered")
                    sleep(ERROR_PAUSE)
        except zmq.ZMQError:
            logger.warning("%s stopped: its ZeroMQ context was terminated", self.name)
        finally:
            self.cut = len(self._sessions)
            self._count["abandoned"] += self.cut
            self._sessions.clear()
            self.flush_until = close_by(self._socket, self._deadline)

    def turn(self) -> None:
        """Wait for something to do, accept requests, send one slice for each session."""
        self._wait()
        if self._deadline is None:
            self._accept()
        now = monotonic()
        self._retries += 1
        self._unsent.look()
        for session in list(self._sessions.values()):
            if self._attempt(session):
                session.progressed = now
                self._retries = 0
                sleep(PAUSE)
            else:
                self._stalled(session, now)

    # --- what a kind of answer is

    @abstractmethod
    def _receive(self, frames: list[bytes]) -> None:
        """Take a request: `_open` a session, or count it as malformed."""

    @abstractmethod
    def _answer(self, request: Any) -> tuple[Sequence[Any], list[bytes]]:
        """Messages of the answer to a request, and the frames of the last one."""

    @abstractmethod
    def _spelled(self, message: Any) -> list[bytes]:
        """Frames of a message behind the identity."""

    @abstractmethod
    def _stalled(self, session: Session, now: float) -> None:
        """Nothing could be sent: perhaps for too long."""

    @abstractmethod
    def _has_room(self) -> bool:
        """Whether another request may be read."""

    # --- requests

    def _wait(self) -> None:
        watched: list[tuple[Socket | int, int]] = []
        if self._deadline is None:
            watched.append((self._wake_read, zmq.POLLIN))
        if self._deadline is None and self._has_room():
            watched.append((self._socket, zmq.POLLIN))
        ready = dict(zmq.zmq_poll(watched, int(self._patience() * 1000)))
        if self._wake_read in ready and self._deadline is None:
            os.read(self._wake_read, 4096)

    def _patience(self) -> float:
        """Seconds to wait for a request before the next turn."""
        if not self._sessions:
            return IDLE_WAIT
        return RETRY_WAITS[min(self._retries, len(RETRY_WAITS)) - 1] if self._retries else 0.0

    def _accept(self) -> None:
        for _ in range(REQUESTS_AT_ONCE):
            if not self._has_room():
                return
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._receive(frames)

    def _open(self, identity: bytes, request: Any) -> None:
        """Answer a request now, or after those that the same reader has made before."""
        session = self._sessions.get(identity)
        if session is None:
            self._sessions[identity] = Session(identity, *self._answer(request), monotonic())
        elif len(session.waiting) < MAX_WAITING_REQUESTS:
            session.waiting.append(request)
        else:
            self._count["refused"] += 1
        self._count["requests"] += 1

    # --- answers

    def _attempt(self, session: Session) -> bool:
        """`_serve`; an answer that fails for a reason of ours is given up, and others go on."""
        try:
            return self._serve(session)
        except BaseException as error:  # noqa: BLE001 - a panic of native code is a BaseException
            self._survive(error, "the answer is given up")
            self._end(session, "abandoned")
            return True

    def _survive(self, error: BaseException, consequence: str) -> None:
        """Log and count. Raises the error again if the context was terminated."""
        if is_context_end(error):
            raise error
        self.failures.note(self.name, error, consequence)

    def _serve(self, session: Session) -> bool:
        """Send one slice; whether anything could be sent or the session ended."""
        before = session.position
        try:
            self._send_slice(session)
            if session.position == len(session.messages):
                self._send_frames(session.identity, list(session.ending))
                self._next(session)
                return True
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._end(session, "gone")
            return True
        return session.position > before

    def _send_slice(self, session: Session) -> None:
        last = session.position + SLICE
        for message in islice(session.messages, session.position, last):
            self._send_frames(session.identity, self._spelled(message))
            session.position += 1
            self._count["batches"] += 1

    def _send_frames(self, identity: bytes, frames: list[bytes]) -> None:
        """Send to one consumer, whole or not at all: only the identity can be refused. Raises `zmq.Again` for a later turn."""
        send = self._send
        last = frames.pop()
        large = self._counts and len(last) >= LARGE
        if large and not self._unsent.has_room(identity, len(last)):
            self._count["deferred"] += 1
            raise zmq.Again
        send(identity, _MORE_OR_REFUSE)
        for frame in frames:
            send(frame, _MORE)
        send(self._unsent.counted(identity, last) if large else last)

    def _patience_with(self, session: Session, seconds: float) -> float:
        """Seconds without progress that are none of the consumer's fault: these, and as long as its large messages may take."""
        return seconds + self._unsent.of(session.identity) / SLOWEST

    def _next(self, session: Session) -> None:
        if session.waiting:
            session.restart(*self._answer(session.waiting.popleft()))
        else:
            del self._sessions[session.identity]
        self._count["finished"] += 1

    def _end(self, session: Session, reason: str) -> None:
        # Gone before it is counted: whoever sees the count finds it gone.
        del self._sessions[session.identity]
        self._count[reason] += 1
