"""Serves replay beside publishing: a ROUTER socket sends long replies to many consumers, each at that consumer's pace.

Theory of operation. A request opens a session, which holds the batches of its reply as they are buffered at that moment.
Sessions take turns; each turn sends a few messages. With ROUTER_MANDATORY, ZeroMQ reports that the pipe of a consumer is full,
whereas the engines' sockets drop messages silently. If a pipe is full, the session keeps its position and is retried after
`retry_delay`. ZeroMQ also reports that a consumer has disconnected. Large messages also wait while too many bytes of large
messages are in flight. So a reply is sent at the pace of its consumer and loses nothing. Live batches have another socket and
thread, and never wait for a reply. Only the thread of the server uses the socket.

Frames in flight. ZeroMQ limits the number of messages in the pipe of a consumer, not their size, and does not report which
messages have left the pipe. But ZeroMQ reports when it no longer needs a frame in our memory, because the frame was written to
the connection or was dropped at the connection's end. So large frames are sent without a copy and counted until that report
(`InFlightFrames`). Small frames are copied, which costs less than counting them, and the limit of messages bounds their number.
A consumer without large frames in flight gets one message of any size, even if other consumers have not read their messages: a
slow consumer does not delay the others. pyzmq reports from its own thread, `zmq.utils.garbage`, which starts with the first
large frame of the process.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from time import monotonic, sleep
from typing import Final, cast

import zmq
import zmq.backend

from kvevents.publisher.compaction import SequencedPayload
from kvevents.publisher.replay_buffer import ReplayBuffer
from kvevents.publisher.settings import ReplayServerSettings
from kvevents.publisher.stats import FailureLog, ReplayStats, is_context_terminated
from kvevents.wire.framing import Malformed, parse_replay_request, replay_batch_frames, replay_end_frames
from kvevents.zeromq.sockets import MIN_FLUSH_SECONDS, Socket, close_socket

logger = logging.getLogger(__name__)

_SEND_MORE: Final = zmq.SNDMORE
_SEND_MORE_NO_WAIT: Final = zmq.SNDMORE | zmq.DONTWAIT

_frame_lock = threading.Lock()
"""Held while a tracked frame is created: the first frame starts pyzmq's thread, and two concurrent frames might start two."""


def _replace_frame_lock() -> None:
    """Replace the lock in a forked child, where a thread that held it does not exist."""
    global _frame_lock  # noqa: PLW0603
    _frame_lock = threading.Lock()


os.register_at_fork(after_in_child=_replace_frame_lock)


class InFlightFrames:
    """Large frames that ZeroMQ still holds, by consumer identity. One thread uses the object; any thread may read `size`."""

    def __init__(self, settings: ReplayServerSettings) -> None:
        self._settings = settings
        self._frames: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}
        self._bytes: dict[bytes, int] = {}
        self.size = 0
        """Number of bytes in flight to all consumers, as of the last `poll`."""

    def has_room(self, identity: bytes, size: int) -> bool:
        """Whether limits allow a large frame to this consumer. Frames to other consumers count as of the last `poll`."""
        self._poll_consumer(identity)
        in_flight = self._bytes.get(identity, 0)
        fits = in_flight + size <= self._settings.in_flight_bytes and self.size + size <= self._settings.total_in_flight_bytes
        return not in_flight or fits

    def track(self, identity: bytes, frame: bytes) -> zmq.Frame | bytes:
        """Count a frame as in flight, and return the object to send."""
        try:
            with _frame_lock:
                frame_object = zmq.Frame(frame, track=True, copy=False)
        except RuntimeError:
            # The interpreter exits and starts no more threads, so the last frames are copied.
            return frame
        self._frames.setdefault(identity, deque()).append((cast("zmq.MessageTracker", frame_object.tracker), len(frame)))
        self._bytes[identity] = self._bytes.get(identity, 0) + len(frame)
        self.size += len(frame)
        return frame_object

    def bytes_of(self, identity: bytes) -> int:
        """Return the number of bytes in flight to one consumer, as of the last `poll`."""
        return self._bytes.get(identity, 0)

    def wait(self, deadline: float) -> None:
        """Wait until ZeroMQ no longer reads the memory of any frame, or until `deadline` (monotonic seconds)."""
        self.poll()
        while self.size and monotonic() < deadline:
            sleep(self._settings.in_flight_poll_interval)
            self.poll()

    def poll(self) -> None:
        """Subtract the frames that ZeroMQ has released from the counts of frames in flight."""
        for identity in list(self._frames):
            self._poll_consumer(identity)

    def _poll_consumer(self, identity: bytes) -> None:
        frames = self._frames.get(identity)
        if frames is None:
            return
        # Frames leave a pipe in order.
        while frames and frames[0][0].done:
            size = frames.popleft()[1]
            self.size -= size
            self._bytes[identity] -= size
        if not frames:
            del self._frames[identity], self._bytes[identity]


class ReplySession:
    """One reply in progress."""

    def __init__(self, identity: bytes, batches: Sequence[SequencedPayload], now: float) -> None:
        self.identity = identity
        self.waiting_starts: deque[int] = deque()
        """First numbers of waiting requests of the same consumer."""
        self.merged_requests = 0
        """Number of requests merged into the last waiting request, whose reply begins at the lowest of their numbers."""
        self.restart(batches, now)

    def restart(self, batches: Sequence[SequencedPayload], now: float, requests: int = 1) -> None:
        """Start the next reply, which answers `requests` requests and ends with one marker for each of them."""
        self.batches = batches
        self.end_markers = requests
        self.position = self.sent_bytes = 0
        self.started_at = self.progressed_at = now

    def add_request(self, start: int, limit: int) -> bool:
        """Add a waiting request, or merge it into the last one if `limit` requests wait. Return whether it was merged."""
        is_merged = len(self.waiting_starts) >= limit
        if is_merged:
            self.waiting_starts[-1] = min(self.waiting_starts[-1], start)
            self.merged_requests += 1
        else:
            self.waiting_starts.append(start)
        return is_merged


class ReplayServer:
    """Answers replay requests from a `ReplayBuffer` on a bound ROUTER socket.

    `run` is the body of the `zmq-replay` thread. The server owns the socket from `run` on, and closes it when `run` ends.
    """

    def __init__(
        self, socket: Socket, buffer: ReplayBuffer, topic: bytes | None, settings: ReplayServerSettings, log_interval: float
    ) -> None:
        """`topic` is the first frame of every reply message; None selects the format before vLLM 0.26 and SGLang 0.5.22."""
        socket.router_mandatory = True
        self._socket = socket
        self._buffer = buffer
        self._topic = topic
        self._settings = settings
        self._send: Callable[..., None] = zmq.backend.Socket.send.__get__(socket)
        # A consumer in this process is not limited, because its unread messages use memory of its own process only.
        self._counts_in_flight = not cast("bytes", socket.last_endpoint).startswith(b"inproc://")
        self._sessions: dict[bytes, ReplySession] = {}
        self._in_flight = InFlightFrames(settings)
        self._deadline: float | None = None
        self._fruitless_turns = 0
        self.unfinished_replies = 0
        """Number of replies that were unfinished when `run` ended."""
        self.flush_until = float("inf")
        """Time at which ZeroMQ stops flushing the socket (monotonic seconds); set when `run` ends."""
        endpoint = cast("bytes", socket.last_endpoint).rstrip(b"\0").decode()
        self.failures = FailureLog(logger, endpoint, log_interval)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._is_closed = False
        self._count: dict[str, int] = dict.fromkeys(
            ("requests", "batches", "finished", "abandoned", "disconnected", "malformed", "merged", "deferred"), 0
        )

    def stats(self) -> ReplayStats:
        """Return counters since the start."""
        return ReplayStats(active=len(self._sessions), unsent_bytes=self._in_flight.size, **self._count)

    def stop(self, deadline: float) -> None:
        """Let replies in progress continue until `deadline` (monotonic seconds), then end `run`. Returns at once."""
        self._deadline = deadline
        if not self._is_closed:
            with suppress(BlockingIOError):  # the pipe is full of wake-ups
                os.write(self._wake_write, b"\0")

    def close(self) -> None:
        """Free all resources, after the end of `run` or if `run` was never called. Wait until ZeroMQ has flushed the socket."""
        if not self._socket.closed:  # `run` was never called, so it has not closed the socket
            self.flush_until = close_socket(self._socket, self._deadline)
        self._in_flight.wait(self.flush_until + MIN_FLUSH_SECONDS)
        if not self._is_closed:
            self._is_closed = True
            os.close(self._wake_read)
            os.close(self._wake_write)

    def run(self) -> None:
        """Serve until `stop`, or until the ZeroMQ context is terminated. This is the body of a thread."""
        try:
            while self._deadline is None or (self._sessions and monotonic() < self._deadline):
                try:
                    self.run_once()
                except BaseException as error:  # noqa: BLE001 - a panic of native code is a BaseException
                    self._record_failure(error, "the request is not answered")
                    sleep(self._settings.error_delay)
        except zmq.ZMQError:
            logger.warning("the replay server stopped: its ZeroMQ context was terminated")
        finally:
            self.unfinished_replies = len(self._sessions)
            self._count["abandoned"] += self.unfinished_replies
            self._sessions.clear()
            self.flush_until = close_socket(self._socket, self._deadline)

    def run_once(self) -> None:
        """Wait for work, read requests, and give each session a turn."""
        self._wait()
        if self._deadline is None:
            self._read_requests()
        now = monotonic()
        self._fruitless_turns += 1
        self._in_flight.poll()
        for session in list(self._sessions.values()):
            if self._take_turn(session):
                session.progressed_at = now
                self._fruitless_turns = 0
                sleep(self._settings.yield_delay)
            self._abandon_if_slow(session, now)

    # --- requests

    def _wait(self) -> None:
        """Wait for a request; but while replies are in progress, at most until the next turn."""
        sockets: list[tuple[Socket | int, int]] = []
        if self._deadline is None:
            sockets.append((self._wake_read, zmq.POLLIN))
            if self._has_room():
                sockets.append((self._socket, zmq.POLLIN))
        settings, turns, seconds = self._settings, self._fruitless_turns, self._settings.idle_wait
        if self._sessions:
            delay = settings.retry_delay * 2.0 ** min(turns - 1, 64)
            seconds = min(delay, settings.max_retry_delay) if turns else 0.0
        zmq.zmq_poll(sockets, int(seconds * 1000))

    def _has_room(self) -> bool:
        return len(self._sessions) < self._settings.max_sessions

    def _read_requests(self) -> None:
        for _ in range(self._settings.requests_per_turn):
            if not self._has_room():
                return
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._on_request(frames)

    def _on_request(self, frames: list[bytes]) -> None:
        """Reply to a request now, or after the earlier requests of the same consumer."""
        request = parse_replay_request(frames)
        if isinstance(request, Malformed):
            self._count["malformed"] += 1
            logger.debug("ignored a malformed replay request: %s", request.reason)
            return
        session = self._sessions.get(request.identity)
        if session is None:
            batches = self._buffer.batches_from(request.start)
            self._sessions[request.identity] = ReplySession(request.identity, batches, monotonic())
        else:
            self._count["merged"] += session.add_request(request.start, self._settings.max_waiting_requests)
        self._count["requests"] += 1

    # --- replies

    def _take_turn(self, session: ReplySession) -> bool:
        """Send some messages; return whether any was sent or the session ended. An exception abandons only this reply."""
        start = session.position
        try:
            for seq, payload in islice(session.batches, start, start + self._settings.messages_per_turn):
                self._send_message(session.identity, replay_batch_frames(self._topic, seq, payload))
                session.position += 1
                session.sent_bytes += len(payload)
                self._count["batches"] += 1
            for _ in range(self._settings.messages_per_turn if session.position == len(session.batches) else 0):
                self._send_message(session.identity, replay_end_frames(self._topic is not None))
                session.end_markers -= 1
                if not session.end_markers:
                    self._finish(session)
                    return True
        except zmq.Again:
            pass
        except BaseException as error:  # noqa: BLE001 - a panic of native code is a BaseException
            if isinstance(error, zmq.ZMQError) and error.errno == errno.EHOSTUNREACH:
                self._end_session(session, "disconnected")
                return True
            self._record_failure(error, "the reply is abandoned")
            self._end_session(session, "abandoned")
            return True
        return session.position > start

    def _send_message(self, identity: bytes, frames: list[bytes]) -> None:
        """Send all frames to one consumer, or raise `zmq.Again` and send none: ZeroMQ can refuse only the identity frame."""
        send = self._send
        last = frames.pop()
        is_large = self._counts_in_flight and len(last) >= self._settings.large_frame_bytes
        if is_large and not self._in_flight.has_room(identity, len(last)):
            self._count["deferred"] += 1
            raise zmq.Again
        send(identity, _SEND_MORE_NO_WAIT)
        for frame in frames:
            send(frame, _SEND_MORE)
        send(self._in_flight.track(identity, last) if is_large else last)

    def _abandon_if_slow(self, session: ReplySession, now: float) -> None:
        """Abandon the reply if its consumer reads nothing or reads slowly for longer than `progress_timeout` allows."""
        settings = self._settings
        patience = settings.progress_timeout if self._has_room() else settings.busy_timeout
        in_flight = self._in_flight.bytes_of(session.identity)
        is_stalled = now - session.progressed_at > patience + in_flight / settings.min_read_rate
        is_slow = now - session.started_at > patience + session.sent_bytes / settings.min_read_rate
        if (is_stalled or is_slow) and self._sessions.get(session.identity) is session:
            self._end_session(session, "abandoned")
            amount = "nothing" if is_stalled else "too little"
            logger.warning("abandoned a replay reply: its consumer read %s for %g seconds", amount, patience)

    def _finish(self, session: ReplySession) -> None:
        if session.waiting_starts:
            start = session.waiting_starts.popleft()
            count = 0 if session.waiting_starts else session.merged_requests
            session.merged_requests -= count
            session.restart(self._buffer.batches_from(start), monotonic(), 1 + count)
        else:
            del self._sessions[session.identity]
        self._count["finished"] += 1

    def _end_session(self, session: ReplySession, reason: str) -> None:
        # The session is removed before it is counted as ended, so that it is never counted as both active and ended.
        del self._sessions[session.identity]
        self._count[reason] += 1

    def _record_failure(self, error: BaseException, consequence: str) -> None:
        """Log and count an exception. Raises the exception again if the context was terminated."""
        if is_context_terminated(error):
            raise error
        self.failures.record("replay", error, consequence)
