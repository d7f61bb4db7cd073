"""One numbered stream for everybody: the event socket, and replay and snapshots beside it.

Theory of operation. One thread, the caller's, sends; only it may call `send`, `cut` and `look_around`, and it ends with `end`.
They go into the replay buffer first and out only then, so that whatever a consumer saw can
be asked for again. Another thread, `zmq-replay`, owns the replay socket (`replay`), and a third one, `zmq-snapshot`, that of
placement snapshots (`snapshot_v1`), each where there is such an endpoint.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from time import monotonic
from typing import Any, Final

import zmq

from kvevents.admission import admit
from kvevents.config import Curve
from kvevents.endpoints import connectable
from kvevents.publisher import sockets
from kvevents.publisher.buffer import ReplayBuffer
from kvevents.publisher.event_socket import EventSocket
from kvevents.publisher.failures import Failures
from kvevents.publisher.kept import Numbered
from kvevents.publisher.replay import REPLAY_SEND_LIMIT, ReplayServer
from kvevents.publisher.replies import UNREAD_TIMEOUT, ReplyServer
from kvevents.publisher.snapshot_v1 import SNAPSHOT_SEND_LIMIT, SnapshotServer, live_topic
from kvevents.publisher.stats import ReplayStats

logger = logging.getLogger(__name__)

_EVENT_IO: Final = 1
"""ZMQ_AFFINITY of the event socket: the first I/O thread of our own context."""
_REPLAY_IO: Final = 2
"""ZMQ_AFFINITY of the other sockets: the second one."""


class Broadcast:
    """A stream's sockets. Payloads are sent as they are, with numbers that rise and may begin anywhere.

    Endpoints are final: no rank is added. `bind` is for the event socket. `replay_topic` says whether replies repeat the topic.
    `incarnation` is the sender's in this life, a random one by default; heartbeats must have the same one. With
    `snapshot_endpoint`, SGLang's draft `snapshot-v1` is answered there, and the topic of every batch ends with the incarnation,
    by which the draft's consumers tell one life of the sender from another; `rank` is told with it. The context, unless one is
    given, is ended by `close`; one that is given is the caller's.

    Raises `EndpointError` when a socket cannot be bound, and what `kvevents.admission.admit` raises; nothing stays open then.
    """

    def __init__(  # noqa: PLR0913 - what can be chosen of sockets
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
    ) -> None:
        self.incarnation = secrets.randbits(63) if incarnation is None else incarnation
        self._buffer = buffer
        if incarnation is not None or not buffer.incarnation:
            buffer.incarnation = self.incarnation
        self._hwm = hwm
        self._binds = bind
        self._curve = curve
        self._endpoint, self._replay_endpoint, self._snapshot_endpoint = endpoint, replay_endpoint, snapshot_endpoint
        epoch = f"{self.incarnation:016x}"
        self._topic = topic.encode() if snapshot_endpoint is None else live_topic(topic.encode(), epoch)
        self._context, self._owns_context = self._choose_context(context)
        self._ended = self._closed = False
        self._failures = Failures(logger, endpoint)
        self._flush_until = float("inf")
        self._replay: ReplayServer | None = None
        self._snapshots: SnapshotServer | None = None
        self.replay_bound: str | None = None
        self.snapshot_bound: str | None = None
        with ExitStack() as undo:
            self._open(undo, self._topic if replay_topic else None, epoch, rank)
            undo.pop_all()
        self._threads = [self._started(server, name) for name, server in self._servers().items()]

    def _choose_context(self, given: zmq.Context[Any] | None) -> tuple[zmq.Context[Any], bool]:
        """The context to use and whether it is ours to end.

        `inproc://` is only reachable within a context, so there it is the process's, as in the engines. Otherwise one of our
        own, which can be flushed and ended; with replay it has a second I/O thread, so that a long reply does not delay live
        batches.
        """
        if given is not None:
            return given, False
        others = [end for end in (self._replay_endpoint, self._snapshot_endpoint) if end is not None]
        if any(end.startswith("inproc://") for end in (self._endpoint, *others)):
            return zmq.Context.instance(), False
        return zmq.Context(io_threads=2 if others else 1), True

    def _open(self, undo: ExitStack, replay_topic: bytes | None, epoch: str, rank: int) -> None:
        if self._owns_context:
            undo.callback(self._context.term)
        self.admission = admit(self._context, self._curve, self._endpoint)
        if self.admission is not None:
            undo.callback(self.admission.close)
        self._events = EventSocket(
            self._context,
            self._endpoint,
            hwm=self._hwm,
            bind=self._binds,
            admission=self.admission,
            affinity=_EVENT_IO if self._owns_context else 0,
        )
        undo.callback(self._events.end, None)
        if self._replay_endpoint is not None:
            socket, self.replay_bound = self._open_router(self._replay_endpoint, "replay", REPLAY_SEND_LIMIT)
            undo.callback(socket.close, linger=0)
            self._replay = ReplayServer(socket, self._buffer, replay_topic)
            undo.callback(self._replay.close)
        if self._snapshot_endpoint is not None:
            socket, self.snapshot_bound = self._open_router(self._snapshot_endpoint, "snapshot", SNAPSHOT_SEND_LIMIT)
            self._snapshots = SnapshotServer(socket, self._buffer, epoch, rank)

    def _open_router(self, endpoint: str, what: str, limit: int) -> tuple[sockets.Socket, str]:
        with sockets.opened(self._context, zmq.ROUTER, self.admission, endpoint) as socket:
            socket.sndhwm = limit
            socket.tcp_maxrt = int(UNREAD_TIMEOUT * 1000)
            socket.affinity = _REPLAY_IO if self._owns_context else 0
            return socket, sockets.bind(socket, endpoint, what)

    def _servers(self) -> dict[str, ReplyServer]:
        """By the name of the thread that runs each."""
        found = {"zmq-replay": self._replay, "zmq-snapshot": self._snapshots}
        return {name: server for name, server in found.items() if server is not None}

    @staticmethod
    def _started(server: ReplyServer, name: str) -> threading.Thread:
        thread = threading.Thread(target=server.run, daemon=True, name=name)
        thread.start()
        return thread

    # --- what is known about it --------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """Where a consumer on this host subscribes, with the port that the OS chose; in connect mode, where we connect to."""
        return connectable(self._events.bound)

    @property
    def bound(self) -> str:
        """What ZeroMQ calls the event endpoint."""
        return self._events.bound

    @property
    def subscribers(self) -> int:
        """Subscriptions on the event socket, as of the last `look_around`; a consumer with two topics counts twice."""
        return self._events.subscriptions

    @property
    def replay_endpoint(self) -> str | None:
        """Where a consumer on this host asks for replay; None without replay."""
        return None if self.replay_bound is None else connectable(self.replay_bound)

    @property
    def snapshot_endpoint(self) -> str | None:
        """Where a consumer on this host asks for a placement snapshot; None without."""
        return None if self.snapshot_bound is None else connectable(self.snapshot_bound)

    @property
    def connections_refused(self) -> int:
        """Connections of clients that know this end's key and are not in `curve.allowed`; those to all sockets count."""
        return 0 if self.admission is None else self.admission.refused

    @property
    def replays_cut(self) -> int:
        """Replies that `close` left unfinished."""
        return sum(server.cut for server in self._servers().values())

    def replay_stats(self) -> ReplayStats:
        """Of replay; all zero without."""
        return ReplayStats() if self._replay is None else self._replay.stats()

    def snapshot_stats(self) -> ReplayStats:
        """Of placement snapshots; all zero without."""
        return ReplayStats() if self._snapshots is None else self._snapshots.stats()

    def failures(self) -> dict[str, int]:
        """Exceptions that were survived, by part; parts without any are left out."""
        found = self._failures.counts()
        for server in self._servers().values():
            found |= server.failures.counts()
        return found

    # --- the sending thread's ----------------------------------------------------------------------------------------------

    def send(self, batches: Sequence[Numbered]) -> None:
        """Keep batches for replay and send them, in this order. They are sent live even if they cannot be kept."""
        self._keep(batches)
        self._events.send(self._topic, batches)

    def _keep(self, batches: Sequence[Numbered]) -> None:
        try:
            self._buffer.extend(batches)
        except Exception as error:  # noqa: BLE001 - live batches do not depend on replay
            self._buffer.forget()
            self._failures.note("replay_buffer", error, "it is emptied, and compaction is switched off")

    def look_around(self) -> None:
        """Read who subscribed; to be called now and then."""
        self._events.look_around()

    @property
    def wants_cut(self) -> bool:
        """Whether somebody waits for a placement snapshot: `cut` is to be called, soon. Nobody does without that endpoint."""
        return self._snapshots is not None and self._snapshots.wanted

    def cut(self, number: int, payload: bytes) -> None:
        """Send a batch of no events as the barrier of a placement snapshot: that of everything up to this number."""
        snapshots = self._snapshots
        if snapshots is None:
            self.send([(number, payload)])
            return
        self._keep([(number, payload)])
        self._events.send(snapshots.barrier_topic(self._topic, number), [(number, payload)])
        snapshots.cut_at(number)

    def end(self, deadline: float | None = None) -> None:
        """Close the event socket; there is time until `deadline` (monotonic seconds) to flush. May be called again."""
        if not self._ended:
            self._ended = True
            self._flush_until = self._events.end(deadline)

    # --- the end -----------------------------------------------------------------------------------------------------------

    def stop(self, deadline: float) -> None:
        """Accept no more requests; replies in progress may go on until `deadline` (monotonic seconds). Returns at once."""
        for server in self._servers().values():
            server.stop(deadline)

    def close(self, seconds: float = 1.0, *, sending: bool = False) -> bool | None:
        """Finish replies in progress, flush and close, all within `seconds`; whether everything was flushed.

        None where the context is not ours, and nobody waited for it. `sending` says that the sending thread would not end: then
        its socket is left alone, and so is the context. May be called again: it does nothing then, or, after a call that was
        interrupted, what is left to do.
        """
        if self._closed:
            return None
        deadline = monotonic() + seconds
        self.stop(deadline)
        if not sending:
            self.end(deadline)
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()) + sockets.FLUSH_GRACE)
        if self.admission is not None:
            self.admission.close()
        if sending or any(thread.is_alive() for thread in self._threads):
            return False
        servers = list(self._servers().values())
        for server in servers:
            server.close()
        if self._owns_context:
            self._context.term()
        self._closed = True
        if not self._owns_context:
            return None
        return monotonic() < min([self._flush_until, *(server.flush_until for server in servers)])

    def forget_locks(self) -> None:
        """For a forked child, in which none of the threads exists."""
        self._buffer.after_fork()
