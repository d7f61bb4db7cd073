"""Sends one numbered stream to all subscribers, and serves replay at the same time.

Theory of operation. Only one thread of the caller sends: it alone may call `send` and `poll`, and it calls `close_events` at
the end. A batch is stored in the replay buffer before it is sent, so that every batch that a consumer received can be requested
again. If a replay endpoint is set, `replay_server` serves it with its own thread, `zmq-replay`, and its own ROUTER socket.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from time import monotonic
from typing import Any, Final

import zmq
import zmq.backend

from kvevents.endpoints import connectable_endpoint
from kvevents.publisher.compaction import SequencedPayload
from kvevents.publisher.replay_buffer import ReplayBuffer
from kvevents.publisher.replay_server import ReplayServer
from kvevents.publisher.settings import DEFAULT_PUBLISHER_SETTINGS, PublisherSettings
from kvevents.publisher.stats import FailureLog, ReplayStats
from kvevents.zeromq.keys import Curve
from kvevents.zeromq.sockets import MIN_FLUSH_SECONDS, Reconnector, close_socket, connect_or_bind, libzmq_io, open_socket
from kvevents.zeromq.zap import SocketSecurity, secure_sockets

logger = logging.getLogger(__name__)

FRAMES_PER_MESSAGE: Final = 3
"""Number of frames of a message: topic, number, payload."""
_EVENT_AFFINITY: Final = 1
"""ZMQ_AFFINITY of the event socket: the first I/O thread of a context that the server has created."""
_REPLY_AFFINITY: Final = 2
"""ZMQ_AFFINITY of the replay socket: the second I/O thread."""
_MAX_POLL_SECONDS: Final = 0.02
"""Maximum number of seconds for which one `poll` reads subscriptions."""
_MAX_PIPE_SUBSCRIPTIONS: Final = 2
"""Maximum number of subscriptions of one peer in its pipe (ZMQ_RCVHWM). Each libzmq call moves the whole pipe into an unlimited
queue. If the pipe were larger, a peer could fill that queue faster than `poll` empties it."""
_SUBSCRIPTION_CHANGES: Final = {b"\1": 1, b"\0": -1}


class EventSocket:
    """The XPUB socket of a stream. Only the sending thread may call `send`, `poll` and `close`."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        *,
        hwm: int,
        is_bound: bool,
        security: SocketSecurity | None,
        affinity: int,
        reconnect_delay: float,
    ) -> None:
        """Bind the socket if `is_bound`; connect it if not. `affinity` selects the I/O threads. Raises `EndpointError`."""
        self.subscriptions = 0
        """Number of subscriptions as of the last `poll`; a consumer with two topics counts twice."""
        # Subscribers see no difference from PUB; XPUB also reports their subscriptions to the publisher.
        with open_socket(context, zmq.XPUB, security, endpoint) as socket:
            socket.sndhwm, socket.rcvhwm = hwm, _MAX_PIPE_SUBSCRIPTIONS
            socket.affinity = affinity
            socket.xpub_verboser = True
            self._reconnector = None if is_bound else Reconnector(socket, endpoint, "event", reconnect_delay)
            self.bound_endpoint = connect_or_bind(socket, endpoint, bind=True, role="event") if is_bound else endpoint
            """The bound endpoint, with the port that the OS chose; for a connecting socket, the peer's endpoint."""
            self._socket = socket
        self._native = libzmq_io()
        # The send method of pyzmq's backend, because `send_multipart` costs six times as much for three frames.
        self._send: Callable[..., Any] = zmq.backend.Socket.send.__get__(socket)

    def send(self, topic: bytes, batches: Sequence[SequencedPayload]) -> None:
        """Send batches in order to each consumer that subscribed to a prefix of the topic."""
        if self._native is None:
            self._send_frames(topic, batches)
        elif (frames_sent := self._native.send(self._socket.underlying, topic, batches)) < FRAMES_PER_MESSAGE * len(batches):
            self._send_frames(topic, batches[frames_sent // FRAMES_PER_MESSAGE :], frames_sent % FRAMES_PER_MESSAGE)

    def _send_frames(self, topic: bytes, batches: Sequence[SequencedPayload], frames_sent: int = 0) -> None:
        """Send batches frame by frame; the first `frames_sent` frames of the first batch have been sent already."""
        send = self._send
        for seq, payload in batches:
            if frames_sent < 1:
                send(topic, zmq.SNDMORE)
            if frames_sent < 2:
                send(seq.to_bytes(8, "big"), zmq.SNDMORE)
            send(payload)
            frames_sent = 0

    def poll(self) -> None:
        """Read subscriptions, and reconnect if a reconnect is due. Call this several times per second."""
        if self._reconnector is not None:
            self._reconnector.poll(monotonic())
        deadline = monotonic() + _MAX_POLL_SECONDS
        with suppress(zmq.Again):
            while monotonic() < deadline:
                first = self._socket.recv(zmq.DONTWAIT)[:1]
                self.subscriptions = max(0, self.subscriptions + _SUBSCRIPTION_CHANGES.get(first, 0))

    def close(self, deadline: float | None) -> float:
        """Close the socket; see `close_socket`."""
        if self._reconnector is not None:
            self._reconnector.close()
        return close_socket(self._socket, deadline)


class EventServer:
    """The sockets and the replay thread of a stream. Numbers of batches must rise, and may start with any number.

    endpoint, replay_endpoint: used as they are, without adding a rank. bind: whether to bind the event socket.
    replay_topic: whether replies repeat the topic.
    incarnation: the number that identifies this incarnation in heartbeats; random by default.
    context: a context to use, which the caller terminates; by default the server creates one, and `close` terminates it.

    Raises `EndpointError` if a socket cannot be bound, and the exceptions of `kvevents.zeromq.zap.secure_sockets`. After an
    exception no socket stays open.
    """

    replay_bound: str | None = None
    """The replay endpoint as ZeroMQ reports it; None without replay."""
    _replay: ReplayServer | None = None
    _replay_thread: threading.Thread | None = None

    def __init__(  # noqa: PLR0913 - the parameters are the options of two sockets
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        buffer: ReplayBuffer,
        hwm: int = 100_000,
        topic: str = "",
        bind: bool = True,
        replay_topic: bool = True,
        curve: Curve | None = None,
        context: zmq.Context[Any] | None = None,
        incarnation: int | None = None,
        settings: PublisherSettings = DEFAULT_PUBLISHER_SETTINGS,
    ) -> None:
        self.incarnation = int.from_bytes(os.urandom(8), "big") >> 1 if incarnation is None else incarnation
        self._buffer = buffer
        if incarnation is not None or not buffer.incarnation:
            buffer.incarnation = self.incarnation
        self._settings = settings
        self._hwm = hwm
        self._binds = bind
        self._curve = curve
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self.topic: Final = topic.encode()
        """First frame of every live batch."""
        # `inproc://` connects within one context only, so for such an endpoint the server uses the process's context, as the
        # engines do. For other endpoints the server creates a context, which it can flush and terminate. If replay is served,
        # that context has a second I/O thread, so that a long reply does not delay live batches.
        endpoints = [endpoint] if replay_endpoint is None else [endpoint, replay_endpoint]
        self._owns_context = context is None and not any(item.startswith("inproc://") for item in endpoints)
        if self._owns_context:
            context = zmq.Context(io_threads=len(endpoints))
        self._context = context or zmq.Context.instance()
        self._are_events_closed = self._is_closed = False
        self._failures = FailureLog(logger, endpoint, settings.log_interval)
        self._flush_until = float("inf")
        self._termination: threading.Thread | None = None
        with ExitStack() as cleanup:
            self._open(cleanup, self.topic if replay_topic else None)
            cleanup.pop_all()
        try:
            if self._replay_thread is not None:
                self._replay_thread.start()
        except BaseException:  # also for KeyboardInterrupt: an open socket would block the termination of its context
            self.close(0.0)
            raise

    def _open(self, cleanup: ExitStack, replay_topic: bytes | None) -> None:
        settings = self._settings
        if self._owns_context:
            cleanup.callback(self._context.term)
        self.security = secure_sockets(self._context, self._curve, self._endpoint, settings.security)
        if self.security is not None:
            cleanup.callback(self.security.close)
        self.events = EventSocket(
            self._context,
            self._endpoint,
            hwm=self._hwm,
            is_bound=self._binds,
            security=self.security,
            affinity=_EVENT_AFFINITY if self._owns_context else 0,
            reconnect_delay=settings.reconnect_delay,
        )
        cleanup.callback(self.events.close, None)
        if self._replay_endpoint is not None:
            with open_socket(self._context, zmq.ROUTER, self.security, self._replay_endpoint) as socket:
                socket.sndhwm = settings.replay.send_limit
                socket.tcp_maxrt = int(settings.replay.unread_timeout * 1000)
                socket.affinity = _REPLY_AFFINITY if self._owns_context else 0
                self.replay_bound = connect_or_bind(socket, self._replay_endpoint, bind=True, role="replay")
            cleanup.callback(socket.close, linger=0)
            self._replay = ReplayServer(socket, self._buffer, replay_topic, settings.replay, settings.log_interval)
            cleanup.callback(self._replay.close)
            self._replay_thread = threading.Thread(target=self._replay.run, daemon=True, name="zmq-replay")

    # --- state of the server --------------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The endpoint to which a consumer on this host subscribes, with the port that the OS chose; or the peer's endpoint."""
        return connectable_endpoint(self.events.bound_endpoint)

    @property
    def bound(self) -> str:
        """The event endpoint as ZeroMQ reports it."""
        return self.events.bound_endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """The endpoint at which a consumer on this host requests replay; None without replay."""
        return None if self.replay_bound is None else connectable_endpoint(self.replay_bound)

    @property
    def connections_refused(self) -> int:
        """Number of connections to any socket by clients that know the server key but are not in `curve.allowed`."""
        return 0 if self.security is None else self.security.refusals

    @property
    def replays_unfinished(self) -> int:
        """Number of replies that were unfinished at the end of `close`."""
        return 0 if self._replay is None else self._replay.unfinished_replies

    def replay_stats(self) -> ReplayStats:
        """Return the counters of replay; all are zero if replay is not served."""
        return ReplayStats() if self._replay is None else self._replay.stats()

    def failures(self) -> dict[str, int]:
        """Return the number of exceptions after which the server continued, by the part that raised them."""
        return self._failures.counts() | ({} if self._replay is None else self._replay.failures.counts())

    # --- methods that the sending thread calls --------------------------------------------------------------------------------

    def send(self, batches: Sequence[SequencedPayload]) -> None:
        """Store batches for replay, then send them. If storing them fails, send them nevertheless."""
        try:
            self._buffer.extend(batches)
        except Exception as error:  # noqa: BLE001 - live batches are sent even if replay fails
            self._buffer.discard()
            self._failures.record("replay_buffer", error, "the buffer is emptied, and compaction is switched off")
        self.events.send(self.topic, batches)

    def close_events(self, deadline: float | None = None) -> None:
        """Close the event socket; ZeroMQ flushes it until `deadline` (monotonic seconds). A second call does nothing."""
        if not self._are_events_closed:
            self._are_events_closed = True
            self._flush_until = self.events.close(deadline)

    # --- closing the server ---------------------------------------------------------------------------------------------------

    def stop_replies(self, deadline: float) -> None:
        """Stop accepting requests. Replies in progress may continue until `deadline` (monotonic seconds). Returns at once."""
        if self._replay is not None:
            self._replay.stop(deadline)

    def close(self, seconds: float = 1.0, *, is_sending: bool = False) -> bool | None:
        """Finish replies, flush and close, all within `seconds`. Return whether all messages were flushed.

        Returns None if the context is shared and the server did not wait for it. If the sending thread has not ended
        (`is_sending`), its socket and the context stay open. A second call does nothing, or completes an interrupted call.
        """
        if self._is_closed:
            return None
        deadline = monotonic() + seconds
        self.stop_replies(deadline)
        if not is_sending:
            self.close_events(deadline)
        replay, thread = self._replay, self._replay_thread
        if thread is not None and thread.ident is not None:  # the thread was started
            thread.join(max(0.0, deadline - monotonic()) + MIN_FLUSH_SECONDS)
        if self.security is not None:
            self.security.close()
        if is_sending or (thread is not None and thread.is_alive()):
            if self._owns_context:  # the context ends when the thread has closed its socket
                self._start_termination()
            return False
        if replay is not None:
            replay.close()
        if self._owns_context and not self._end_context(deadline):
            return False
        self._is_closed = True
        if not self._owns_context:
            return None
        return monotonic() < (self._flush_until if replay is None else min(self._flush_until, replay.flush_until))

    def _start_termination(self) -> threading.Thread:
        """Terminate the context in a thread, because ZeroMQ waits without a limit until all sockets are closed."""
        if self._termination is None:
            self._termination = threading.Thread(target=self._context.term, daemon=True, name="zmq-term")
            with suppress(RuntimeError):  # the interpreter is ending and starts no more threads
                self._termination.start()
        return self._termination

    def _end_context(self, deadline: float) -> bool:
        """Wait for the end of the context, at most `term_timeout` seconds after `deadline`; return whether it has ended."""
        termination = self._start_termination()
        if termination.ident is None:  # the thread could not be started
            self._context.term()
        else:
            termination.join(max(0.0, deadline - monotonic()) + MIN_FLUSH_SECONDS + self._settings.term_timeout)
        if termination.is_alive():
            logger.warning("%s: ZeroMQ did not end the publisher's context; its thread and memory remain", self.bound)
        return not termination.is_alive()
