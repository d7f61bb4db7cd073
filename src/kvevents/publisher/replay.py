"""Replay beside publishing: a ROUTER socket with a thread of its own.

Theory of operation. A request opens a session: the batches it asks for, as they are in the buffer at that moment, and the end
marker. Sessions take turns, a slice each. ROUTER_MANDATORY makes ZeroMQ say when a consumer's pipe is full, where the engines'
sockets drop without a word; the session then keeps its place and is tried again after `RETRY_WAITS`. It also says when a
consumer is gone. So a reply goes at its reader's pace and loses nothing, and live batches, on another socket and thread, never
wait for it. Only this thread touches the socket.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable
from itertools import islice
from time import monotonic, sleep
from typing import Final

import zmq
import zmq.backend

from kvevents.publisher.buffer import Numbered, ReplayBuffer
from kvevents.publisher.sockets import Socket, close_by
from kvevents.publisher.stats import ReplayStats
from kvevents.wire.framing import Malformed, parse_replay_request, replay_batch_frames, replay_end_frames

logger = logging.getLogger(__name__)

REPLAY_STALL_TIMEOUT: Final = 30.0
"""Seconds without progress after which a reply is given up: a consumer that busy has lost its connection or its mind."""
MAX_REPLAY_SESSIONS: Final = 256
"""Replies in progress at once; each may hold a buffer's worth of batches. Further requests wait in ZeroMQ."""
MAX_WAITING_REQUESTS: Final = 8
"""Requests of one consumer that wait for its present reply; they are answered in order, and more are refused."""
REPLAY_SEND_LIMIT: Final = 256
"""Batches in one consumer's pipe (ZMQ_SNDHWM): enough to keep TCP busy for a millisecond, little enough to bound memory."""
SLICE: Final = 32
"""Batches sent for one session before the next one has its turn."""
REQUESTS_AT_ONCE: Final = 64
"""Requests read before replies have their turn, so that a flood of requests does not stop them."""
PAUSE: Final = 0.0001
"""Seconds between slices in which other threads get the interpreter, and other processes a CPU. A thread that sends without a
pause gives the lock up for each send and has it back before a waiting thread wakes, which then waits its 5 ms
(`sys.getswitchinterval`). At this pace a full buffer of 10,000 batches takes 0.1 s."""
RETRY_WAITS: Final = (0.001, 0.002, 0.004, 0.008)
"""Seconds to wait when every consumer's pipe is full: longer each time, the last one from then on."""
IDLE_WAIT: Final = 1.0
"""Seconds the idle thread sleeps at most; requests and `stop` wake it at once."""

_MORE: Final = zmq.SNDMORE
_MORE_OR_REFUSE: Final = zmq.SNDMORE | zmq.DONTWAIT


class _Session:
    """One reply in progress."""

    __slots__ = ("batches", "identity", "position", "progressed", "waiting")

    def __init__(self, identity: bytes, batches: list[Numbered], now: float) -> None:
        self.identity = identity
        self.progressed = now
        self.waiting: deque[int] = deque()
        self.restart(batches)

    def restart(self, batches: list[Numbered]) -> None:
        self.batches = batches
        self.position = 0


class ReplayServer:
    """Answers replay requests on a bound ROUTER socket from a `ReplayBuffer`.

    `topic` is repeated in every reply, or None for the shape of releases before vLLM 0.26 and SGLang 0.5.22. The server owns
    the socket from `start()` on and closes it when it stops.
    """

    def __init__(self, socket: Socket, buffer: ReplayBuffer, topic: bytes | None) -> None:
        socket.router_mandatory = True
        self._socket = socket
        self._send: Callable[..., None] = zmq.backend.Socket.send.__get__(socket)
        self._buffer = buffer
        self._topic = topic
        self._sessions: dict[bytes, _Session] = {}
        self._deadline: float | None = None
        self._retries = 0
        self.cut = 0
        """Replies that a stop left unfinished."""
        self.flush_until = float("inf")
        """When ZeroMQ gives up flushing the socket (monotonic seconds); set when `run` ends."""
        self._wake_read, self._wake_write = os.pipe()
        self._count: dict[str, int] = dict.fromkeys(
            ("requests", "batches", "finished", "abandoned", "gone", "malformed", "refused"), 0
        )

    def stats(self) -> ReplayStats:
        """Counters since the start."""
        return ReplayStats(active=len(self._sessions), **self._count)

    def stop(self, deadline: float) -> None:
        """Let replies in progress go on until `deadline` (monotonic seconds), then end `run`. Returns at once."""
        self._deadline = deadline
        os.write(self._wake_write, b"\0")

    def close(self) -> None:
        """Free what remains once `run` has ended or was never called."""
        os.close(self._wake_read)
        os.close(self._wake_write)

    def run(self) -> None:
        """Serve until `stop`; the body of the `zmq-replay` thread."""
        try:
            while self._deadline is None or (self._sessions and monotonic() < self._deadline):
                self.turn()
        except zmq.ZMQError as error:
            if error.errno not in {zmq.ETERM, zmq.ENOTSOCK}:
                raise
            logger.warning("replay stopped: its ZeroMQ context was terminated")
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
        for session in list(self._sessions.values()):
            if self._serve(session):
                session.progressed = now
                self._retries = 0
                sleep(PAUSE)
            elif now - session.progressed > REPLAY_STALL_TIMEOUT:
                self._end(session, "abandoned")
                logger.warning("gave up a replay: its consumer read nothing for %g seconds", REPLAY_STALL_TIMEOUT)

    def _wait(self) -> None:
        watched: list[tuple[Socket | int, int]] = []
        if self._deadline is None:
            watched.append((self._wake_read, zmq.POLLIN))
        if self._has_room():
            watched.append((self._socket, zmq.POLLIN))
        zmq.zmq_poll(watched, int(self._patience() * 1000))

    def _patience(self) -> float:
        """Seconds to wait for a request before the next turn."""
        if not self._sessions:
            return IDLE_WAIT
        return RETRY_WAITS[min(self._retries, len(RETRY_WAITS)) - 1] if self._retries else 0.0

    def _has_room(self) -> bool:
        return self._deadline is None and len(self._sessions) < MAX_REPLAY_SESSIONS

    def _accept(self) -> None:
        for _ in range(REQUESTS_AT_ONCE):
            if not self._has_room():
                return
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            request = parse_replay_request(frames)
            if isinstance(request, Malformed):
                self._count["malformed"] += 1
                logger.debug("ignored a replay request: %s", request.reason)
                continue
            self._open(request.identity, request.start)
            self._count["requests"] += 1

    def _open(self, identity: bytes, start: int) -> None:
        session = self._sessions.get(identity)
        if session is None:
            self._sessions[identity] = _Session(identity, self._buffer.since(start), monotonic())
        elif len(session.waiting) < MAX_WAITING_REQUESTS:
            session.waiting.append(start)
        else:
            self._count["refused"] += 1

    def _serve(self, session: _Session) -> bool:
        """Send one slice; whether anything could be sent or the session ended."""
        before = session.position
        try:
            self._send_slice(session)
            if session.position == len(session.batches):
                self._send_frames(session.identity, replay_end_frames(self._topic is not None))
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

    def _send_slice(self, session: _Session) -> None:
        last = session.position + SLICE
        for seq, payload in islice(session.batches, session.position, last):
            self._send_frames(session.identity, replay_batch_frames(self._topic, seq, payload))
            session.position += 1
            self._count["batches"] += 1

    def _send_frames(self, identity: bytes, frames: list[bytes]) -> None:
        """Send to one consumer, whole or not at all: only the identity can be refused."""
        send = self._send
        send(identity, _MORE_OR_REFUSE)
        last = frames.pop()
        for frame in frames:
            send(frame, _MORE)
        send(last)

    def _next(self, session: _Session) -> None:
        if session.waiting:
            session.restart(self._buffer.since(session.waiting.popleft()))
        else:
            del self._sessions[session.identity]
        self._count["finished"] += 1

    def _end(self, session: _Session, reason: str) -> None:
        # Gone before it is counted: whoever sees the count finds it gone.
        del self._sessions[session.identity]
        self._count[reason] += 1
