"""Sends one numbered stream to all subscribers, and serves replay and placement snapshots at the same time.

Theory of operation. One thread, the caller's, sends; only it may call `send`, `send_barrier` and `poll`, and it ends with
`close_events`. Batches go into the replay buffer first and out afterwards, so that every batch a consumer saw can be requested
again. Each server has a thread and a ROUTER socket of its own, if its endpoint is set: `zmq-replay` (`replay_server`) and
`zmq-snapshot` (`snapshot_server`).
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import monotonic
from typing import Any, Final, cast

import zmq
import zmq.backend

from kvevents.endpoints import connectable
from kvevents.native_module import FRAMES, libzmq_io
from kvevents.publisher.compaction import SequencedPayload
from kvevents.publisher.replay_buffer import ReplayBuffer
from kvevents.publisher.replay_server import ReplayServer, StreamingRouter
from kvevents.publisher.settings import DEFAULT_PUBLISHER_SETTINGS, PublisherSettings, RouterSettings
from kvevents.publisher.snapshot_server import SnapshotServer, live_topic
from kvevents.publisher.stats import FailureLog, ReplayStats
from kvevents.publisher.zmq_sockets import FLUSH_GRACE, Reconnector, Socket, bind, close_socket, open_socket, start_termination
from kvevents.security import Curve
from kvevents.zap import SocketSecurity, secure_sockets

logger = logging.getLogger(__name__)

_EVENT_AFFINITY: Final = 1
"""ZMQ_AFFINITY of the event socket: the first I/O thread of our own context."""
_REPLY_AFFINITY: Final = 2
"""ZMQ_AFFINITY of the other sockets: the second I/O thread."""
_MAX_SUBSCRIPTIONS_PER_POLL: Final = 1000


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
        """Bind the socket, or connect it unless `is_bound`. `affinity` selects its I/O threads. Raises `EndpointError`."""
        self.subscriptions = 0
        """Subscriptions as of the last `poll`; a consumer with two topics counts twice."""
        # To subscribers XPUB is the same as PUB; it also reports subscriptions.
        with open_socket(context, zmq.XPUB, security, endpoint) as socket:
            socket.set_hwm(hwm)
            socket.affinity = affinity
            socket.xpub_verboser = True
            self._reconnector = None if is_bound else Reconnector(socket, endpoint, "event", reconnect_delay)
            self.bound = bind(socket, endpoint, "event") if is_bound else endpoint
            """The bound endpoint, with the port that the OS chose; for a connecting socket, the peer's endpoint."""
            self._socket = socket
        self._native = libzmq_io()
        # The send method of pyzmq's backend: send_multipart costs six times as much for three frames.
        self._send: Callable[..., Any] = zmq.backend.Socket.send.__get__(socket)

    def send(self, topic: bytes, batches: Sequence[SequencedPayload]) -> None:
        """Send batches in order to each consumer that subscribed to a prefix of the topic."""
        if self._native is None:
            self._send_frames(topic, batches)
        elif (sent := self._native.send(self._socket.underlying, topic, batches)) < FRAMES * len(batches):
            self._send_frames(topic, batches[sent // FRAMES :], sent % FRAMES)

    def _send_frames(self, topic: bytes, batches: Sequence[SequencedPayload], sent: int = 0) -> None:
        """Send batches frame by frame; the first `sent` frames of the first batch have been sent already."""
        send = self._send
        for seq, payload in batches:
            if sent < 1:
                send(topic, zmq.SNDMORE)
            if sent < 2:
                send(seq.to_bytes(8, "big"), zmq.SNDMORE)
            send(payload)
            sent = 0

    def poll(self) -> None:
        """Read subscriptions, and reconnect if that is due."""
        if self._reconnector is not None:
            self._reconnector.poll(monotonic())
        for _ in range(_MAX_SUBSCRIPTIONS_PER_POLL):
            if not cast("int", self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            self.subscriptions += {b"\1": 1, b"\0": -1}.get(self._socket.recv(zmq.DONTWAIT)[:1], 0)

    def close(self, deadline: float | None) -> float:
        """Close the socket; see `close_socket`."""
        if self._reconnector is not None:
            self._reconnector.close()
        return close_socket(self._socket, deadline)


class EventServer:
    """The sockets and server threads of a stream. Numbers of batches must rise, and may start anywhere.

    endpoint, replay_endpoint, snapshot_endpoint: used as they are, without adding a rank. bind: whether the event socket binds.
    replay_topic: whether replies repeat the topic.
    incarnation: number of this incarnation of the sender, as in its heartbeats; random by default.
    snapshot_endpoint: if set, the server answers SGLang's draft `snapshot-v1` there. The topic of every batch then ends with
    the incarnation, by which consumers of the draft distinguish the incarnations of a sender. `rank` is part of these answers.
    context: a context to use, which the caller terminates; by default the server creates one, and `close` terminates it.

    Raises `EndpointError` when a socket cannot be bound, and what `kvevents.zap.secure_sockets` raises. No socket
    stays open then.
    """

    def __init__(  # noqa: PLR0913 - the options of three sockets
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
        snapshot_endpoint: str | None = None,
        rank: int = 0,
        incarnation: int | None = None,
        settings: PublisherSettings = DEFAULT_PUBLISHER_SETTINGS,
    ) -> None:
        self.incarnation = secrets.randbits(63) if incarnation is None else incarnation
        self._buffer = buffer
        if incarnation is not None or not buffer.incarnation:
            buffer.incarnation = self.incarnation
        self._settings = settings
        self._hwm = hwm
        self._binds = bind
        self._curve = curve
        self._endpoint, self._replay_endpoint, self._snapshot_endpoint = endpoint, replay_endpoint, snapshot_endpoint
        epoch = f"{self.incarnation:016x}"
        self._topic = topic.encode() if snapshot_endpoint is None else live_topic(topic.encode(), epoch)
        self._context, self._owns_context = self._choose_context(context)
        self._are_events_closed = self._is_closed = False
        self._failures = FailureLog(logger, endpoint, settings.log_interval)
        self._flush_until = float("inf")
        self._termination: threading.Thread | None = None
        self._replay: ReplayServer | None = None
        self._snapshots: SnapshotServer | None = None
        self.replay_bound: str | None = None
        self.snapshot_bound: str | None = None
        with ExitStack() as undo:
            self._open(undo, self._topic if replay_topic else None, epoch, rank)
            self._threads = [
                threading.Thread(target=server.run, daemon=True, name=f"zmq-{server.name}") for server in self._servers()
            ]
            undo.pop_all()
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # such as Ctrl-C; a socket that stays open would block the end of its context
            self.close(0.0)
            raise

    def _choose_context(self, given: zmq.Context[Any] | None) -> tuple[zmq.Context[Any], bool]:
        """Return the context to use, and whether the server terminates it.

        `inproc://` connects within one context only, so with it the server uses the process's context, as the engines do.
        Otherwise it creates a context that it can flush and terminate. With a ROUTER socket the context has a second I/O
        thread, so that a long reply does not delay live batches.
        """
        if given is not None:
            return given, False
        others = [end for end in (self._replay_endpoint, self._snapshot_endpoint) if end is not None]
        if any(end.startswith("inproc://") for end in (self._endpoint, *others)):
            return zmq.Context.instance(), False
        return zmq.Context(io_threads=2 if others else 1), True

    def _open(self, undo: ExitStack, replay_topic: bytes | None, epoch: str, rank: int) -> None:
        settings = self._settings
        if self._owns_context:
            undo.callback(self._context.term)
        self.security = secure_sockets(self._context, self._curve, self._endpoint, settings.security)
        if self.security is not None:
            undo.callback(self.security.close)
        self._events = EventSocket(
            self._context,
            self._endpoint,
            hwm=self._hwm,
            is_bound=self._binds,
            security=self.security,
            affinity=_EVENT_AFFINITY if self._owns_context else 0,
            reconnect_delay=settings.reconnect_delay,
        )
        undo.callback(self._events.close, None)
        if self._replay_endpoint is not None:
            socket, self.replay_bound = self._open_router(self._replay_endpoint, "replay", settings.replay)
            undo.callback(socket.close, linger=0)
            self._replay = ReplayServer(socket, self._buffer, replay_topic, settings.replay, settings.log_interval)
            undo.callback(self._replay.close)
        if self._snapshot_endpoint is not None:
            socket, self.snapshot_bound = self._open_router(self._snapshot_endpoint, "snapshot", settings.snapshots)
            self._snapshots = SnapshotServer(socket, self._buffer, epoch, rank, settings.snapshots, settings.log_interval)

    def _open_router(self, endpoint: str, what: str, settings: RouterSettings) -> tuple[Socket, str]:
        with open_socket(self._context, zmq.ROUTER, self.security, endpoint) as socket:
            socket.sndhwm = settings.send_limit
            socket.tcp_maxrt = int(settings.unread_timeout * 1000)
            socket.affinity = _REPLY_AFFINITY if self._owns_context else 0
            return socket, bind(socket, endpoint, what)

    def _servers(self) -> list[StreamingRouter]:
        return [server for server in (self._replay, self._snapshots) if server is not None]

    # --- state ----------------------------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The endpoint at which a consumer on this host subscribes, with the port that the OS chose, or the peer's endpoint."""
        return connectable(self._events.bound)

    @property
    def bound(self) -> str:
        """The event endpoint as ZeroMQ reports it."""
        return self._events.bound

    @property
    def subscribers(self) -> int:
        """Subscriptions on the event socket as of the last `poll`; a consumer with two topics counts twice."""
        return self._events.subscriptions

    @property
    def replay_endpoint(self) -> str | None:
        """The endpoint at which a consumer on this host requests replay; None without replay."""
        return None if self.replay_bound is None else connectable(self.replay_bound)

    @property
    def snapshot_endpoint(self) -> str | None:
        """The endpoint at which a consumer on this host requests a placement snapshot; None without snapshots."""
        return None if self.snapshot_bound is None else connectable(self.snapshot_bound)

    @property
    def connections_refused(self) -> int:
        """Connections to any socket by clients that know the server key but are not in `curve.allowed`."""
        return 0 if self.security is None else self.security.refused

    @property
    def replays_unfinished(self) -> int:
        """Replies that `close` left unfinished."""
        return sum(server.unfinished for server in self._servers())

    def replay_stats(self) -> ReplayStats:
        """Return the counters of replay; all are zero without replay."""
        return ReplayStats() if self._replay is None else self._replay.stats()

    def snapshot_stats(self) -> ReplayStats:
        """Return the counters of placement snapshots; all are zero without snapshots."""
        return ReplayStats() if self._snapshots is None else self._snapshots.stats()

    def failures(self) -> dict[str, int]:
        """Return the number of survived exceptions by part; parts without exceptions are left out."""
        found = self._failures.counts()
        for server in self._servers():
            found |= server.failures.counts()
        return found

    # --- called by the sending thread -----------------------------------------------------------------------------------------

    def send(self, batches: Sequence[SequencedPayload]) -> None:
        """Store batches for replay and send them, in this order. If they cannot be stored, they are sent nevertheless."""
        self._store(batches)
        self._events.send(self._topic, batches)

    def _store(self, batches: Sequence[SequencedPayload]) -> None:
        try:
            self._buffer.extend(batches)
        except Exception as error:  # noqa: BLE001 - live batches do not depend on replay
            self._buffer.discard()
            self._failures.record("replay_buffer", error, "the buffer is emptied, and compaction is switched off")

    def poll(self) -> None:
        """Read subscriptions, and reconnect if that is due. Call it several times per second."""
        self._events.poll()

    @property
    def barrier_requested(self) -> bool:
        """Whether a request for a placement snapshot waits until `send_barrier` is called."""
        return self._snapshots is not None and self._snapshots.barrier_requested

    def send_barrier(self, number: int, payload: bytes) -> None:
        """Send an empty batch as the barrier of a placement snapshot, which contains everything up to this number."""
        snapshots = self._snapshots
        if snapshots is None:
            self.send([(number, payload)])
            return
        self._store([(number, payload)])
        self._events.send(snapshots.barrier_topic(self._topic, number), [(number, payload)])
        snapshots.barrier_sent(number)

    def close_events(self, deadline: float | None = None) -> None:
        """Close the event socket; ZeroMQ flushes it until `deadline` (monotonic seconds). A second call does nothing."""
        if not self._are_events_closed:
            self._are_events_closed = True
            self._flush_until = self._events.close(deadline)

    # --- the end --------------------------------------------------------------------------------------------------------------

    def stop_replies(self, deadline: float) -> None:
        """Accept no more requests; replies in progress may continue until `deadline` (monotonic seconds). Returns at once."""
        for server in self._servers():
            server.stop(deadline)

    def close(self, seconds: float = 1.0, *, is_sending: bool = False) -> bool | None:
        """Finish replies, flush and close, all within `seconds`. Return whether everything was flushed.

        Returns None if the context is shared and the server did not wait for it. `is_sending` says that the sending thread did
        not end; its socket and the context then stay open. A second call does nothing, or completes one that was interrupted.
        """
        if self._is_closed:
            return None
        deadline = monotonic() + seconds
        self.stop_replies(deadline)
        if not is_sending:
            self.close_events(deadline)
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, deadline - monotonic()) + FLUSH_GRACE)
        if self.security is not None:
            self.security.close()
        if is_sending or any(thread.is_alive() for thread in self._threads):
            return False
        servers = self._servers()
        for server in servers:
            server.close()
        if self._owns_context and not self._end_context(deadline):
            return False
        self._is_closed = True
        if not self._owns_context:
            return None
        return monotonic() < min([self._flush_until, *(server.flush_until for server in servers)])

    def _end_context(self, deadline: float) -> bool:
        """Return whether ZeroMQ has ended the context, `term_timeout` seconds after `deadline` at the latest."""
        if self._termination is None:
            self._termination = start_termination(self._context)
        if self._termination.ident is not None:  # it was started
            self._termination.join(max(0.0, deadline - monotonic()) + FLUSH_GRACE + self._settings.term_timeout)
        if self._termination.is_alive():
            logger.warning("%s: ZeroMQ did not end the publisher's context; its thread and memory remain", self.bound)
        return not self._termination.is_alive()

    def after_fork(self) -> None:
        """Replace the locks in a forked child, in which none of the threads exists."""
        self._buffer.after_fork()
