"""Publishing over ZeroMQ, with replay.

Theory of operation. `publish` queues (`intake`). One thread, `zmq-publisher`, owns the event socket: in bursts it encodes what
waits, puts it into the replay buffer, and only then sends it, so that whatever a consumer saw can be asked for again. While
batches come quickly it dozes, looking at the queue after each of `NAPS`, since waking a sleeping thread is the dearest thing
that `publish` could do; when they come slowly it sleeps until woken. Another thread, `zmq-replay`, owns the replay socket
(`replay`).
`docs/adr/0002-publisher-thread.md` has the measurements.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic, sleep
from typing import Any, Final, cast

import zmq
import zmq.backend

from kvevents.admission import admit
from kvevents.config import Curve, resolve_dialect
from kvevents.endpoints import connectable, offset_endpoint_port, port_collision, should_bind
from kvevents.errors import ConfigError, MissingDependencyError
from kvevents.publisher import lifetime, sockets
from kvevents.publisher.buffer import ReplayBuffer
from kvevents.publisher.episode import Episode
from kvevents.publisher.history import History
from kvevents.publisher.intake import Encode, QueuedPublisher
from kvevents.publisher.replay import REPLAY_SEND_LIMIT, ReplayServer
from kvevents.publisher.stats import PublisherStats, ReplayStats, ShutdownReport
from kvevents.wire.dialects import Dialect
from kvevents.wire.encode import batch_encoder
from kvevents.wire.framing import END_SEQ

logger = logging.getLogger(__name__)

NAPS: Final = (0.001, *[0.0005] * 8)
"""Seconds before each look at the queue while batches come quickly: the delay that dozing adds to one, at most. Batches further
apart than all of them together do not make the thread doze at all."""
SLEEP: Final = 0.25
"""Seconds the idle thread sleeps at most."""
LOOK_EVERY: Final = 0.1
"""Seconds between looks at what is not the queue: subscriptions, losses to tell of."""
_SUBSCRIPTIONS_AT_ONCE: Final = 1000
_EVENT_IO: Final = 1
"""ZMQ_AFFINITY of the event socket: the first I/O thread of our own context."""
_REPLAY_IO: Final = 2
"""ZMQ_AFFINITY of the replay socket: the second one."""

Send = Callable[..., Any]


class ZmqEventPublisher(QueuedPublisher):
    """Publishes batches on a PUB socket and answers replay requests on a ROUTER socket.

    Parameters are those of the engines' class, with the same meaning and defaults, then ours:

    data_parallel_rank: added to both ports, and written into batches that carry no rank.
    endpoint, replay_endpoint: `tcp://`, `ipc://` or `inproc://`; without the second there is no replay.
    buffer_steps: batches kept for replay. hwm: batches one slow subscriber may be behind, 0 for no limit.
    max_queue_size: batches that may wait for the thread, 0 for no limit. topic: first frame of every batch.
    bind: bind or connect the event socket; None binds wildcards, `ipc://`, `inproc://` and port 0.
    dialect: a `Dialect` or a name such as `sglang-0.5.17`; None sends events as declared.
    replay_topic: whether replies repeat the topic; None goes by the dialect, and without one, yes.
    compact: collapse what leaves the replay buffer into one snapshot batch, sent first to whoever asks from before the buffer;
    None does so where the native module is installed.
    curve: keys for both sockets. context: a ZeroMQ context to use, which the caller ends.

    Raises `ConfigError` for settings that cannot work, ports that ranks would fight over included, `UnknownDialectError`,
    and `EndpointError`, an OSError, when a socket cannot be bound.
    """

    SHUTDOWN_TIMEOUT: float = 1.0
    """Seconds that `shutdown` takes at most, unless told otherwise."""
    END_SEQ = END_SEQ
    """Number in the end marker of a replay reply."""

    offset_endpoint_port = staticmethod(offset_endpoint_port)

    def __init__(  # noqa: PLR0913 - the engines' own parameter list, and ours
        self,
        data_parallel_rank: int = 0,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
        *,
        bind: bool | None = None,
        dialect: Dialect | str | None = None,
        replay_topic: bool | None = None,
        compact: bool | None = None,
        curve: Curve | None = None,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        _check_counts(data_parallel_rank=data_parallel_rank, buffer_steps=buffer_steps, hwm=hwm, max_queue_size=max_queue_size)
        super().__init__(data_parallel_rank, max_queue_size)
        self._dp_rank = data_parallel_rank
        self._hwm = hwm
        self._curve = curve
        self._topic_bytes = topic.encode()
        self._dialect = resolve_dialect(dialect)
        self._replay_topic = self._dialect is None or self._dialect.replay_topic if replay_topic is None else replay_topic
        self._binds = should_bind(endpoint) if bind is None else bind
        self._refuse_collision(endpoint, replay_endpoint)
        self._endpoint: str = self.offset_endpoint_port(endpoint, data_parallel_rank) or endpoint
        self._replay_endpoint = self.offset_endpoint_port(replay_endpoint, data_parallel_rank)
        self._buffer = self._replay_buffer(buffer_steps, compact)
        self._ctx, self._owns_context = _choose_context(context, self._endpoint, self._replay_endpoint)
        self._socket_setup()
        self._published = self._subscriptions = 0
        self._queue_full = Episode(logger, f"{self.endpoint}: the queue of {max_queue_size} batches is full")
        self._bad_batches = Episode(logger, f"{self.endpoint}: a batch cannot be encoded")
        self._last_fault = ""
        self._pid = os.getpid()
        self._deadline: float | None = None
        self._flush_until = float("inf")
        self._closing = threading.RLock()
        self._report: ShutdownReport | None = None
        self._start()

    def _replay_buffer(self, steps: int, compact: bool | None) -> ReplayBuffer:
        if self._replay_endpoint is None or compact is False:
            return ReplayBuffer(0 if self._replay_endpoint is None else steps)
        history = History.create()
        if history is None and compact:
            raise MissingDependencyError(
                "compact=True needs the compiled module kvevents._native; install a wheel of kvevents, or leave the setting out"
            )
        return ReplayBuffer(steps, history, batch_encoder(self._dialect))

    def _refuse_collision(self, endpoint: str, replay_endpoint: str | None) -> None:
        sentence = port_collision(endpoint, replay_endpoint, self._dp_rank) if self._binds else None
        if sentence is not None:
            raise ConfigError(sentence)

    def _socket_setup(self) -> None:
        """Open both sockets; when one fails, neither stays open."""
        with ExitStack() as undo:
            if self._owns_context:
                undo.callback(self._ctx.term)
            self._admission = admit(self._ctx, self._curve, self._endpoint)
            if self._admission is not None:
                undo.callback(self._admission.close)
            self._pub: sockets.Socket = self._open_events()
            undo.callback(self._pub.close, linger=0)
            self._replay: sockets.Socket | None = self._open_replay()
            undo.pop_all()
        topic = self._topic_bytes if self._replay_topic else None
        self._server = None if self._replay is None else ReplayServer(self._replay, self._buffer, topic)

    def _open_events(self) -> sockets.Socket:
        # XPUB is PUB that also tells who subscribed; to subscribers the two are the same.
        with sockets.opened(self._ctx, zmq.XPUB, self._admission, self._endpoint) as socket:
            socket.set_hwm(self._hwm)
            socket.affinity = _EVENT_IO if self._owns_context else 0
            socket.xpub_verboser = True
            enter = sockets.bind if self._binds else sockets.connect
            self._bound = enter(socket, self._endpoint, "event")
            return socket

    def _open_replay(self) -> sockets.Socket | None:
        self._replay_bound: str | None = None
        if self._replay_endpoint is None:
            return None
        with sockets.opened(self._ctx, zmq.ROUTER, self._admission, self._replay_endpoint) as socket:
            socket.sndhwm = REPLAY_SEND_LIMIT
            socket.affinity = _REPLAY_IO if self._owns_context else 0
            self._replay_bound = sockets.bind(socket, self._replay_endpoint, "replay")
            return socket

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._publisher_thread, daemon=True, name="zmq-publisher")
        self._thread.start()
        self._replay_thread: threading.Thread | None = None
        if self._server is not None:
            self._replay_thread = threading.Thread(target=self._service_replay, daemon=True, name="zmq-replay")
            self._replay_thread.start()
        lifetime.enrol(self)
        logger.info("publishing KV events of rank %d at %s", self._dp_rank, self.endpoint)

    # --- what is known about it --------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """Where a consumer on this host subscribes, with the port that the OS chose; in connect mode, where we connect to."""
        return connectable(self._bound)

    @property
    def replay_endpoint(self) -> str | None:
        """Where a consumer on this host asks for replay; None without replay."""
        return None if self._replay_bound is None else connectable(self._replay_bound)

    @property
    def connections_refused(self) -> int:
        """Connections of clients that know this end's key and are not in `curve.allowed`; those to both sockets count."""
        return 0 if self._admission is None else self._admission.refused

    def stats(self) -> PublisherStats:
        """Counters since the start. Safe from any thread, also after `shutdown()`."""
        next_seq, accepted = self._numbers()
        batches, size = self._buffer.size()
        return PublisherStats(
            accepted=accepted,
            published=self._published,
            queued=accepted - self._published - self._failed,
            dropped={"queue_full": self._refused, "encode_failed": self._failed},
            next_seq=next_seq,
            buffered_batches=batches,
            buffered_bytes=size,
            history=self._buffer.history_stats(),
            subscribers=self._subscriptions,
            replay=ReplayStats() if self._server is None else self._server.stats(),
        )

    def __repr__(self) -> str:
        _, accepted = self._numbers()
        queued = accepted - self._published - self._failed
        replay = f", replay at {self.replay_endpoint}" if self._replay_bound else ""
        state = "" if self._running else "closed, "
        return (
            f"<{type(self).__name__} rank {self._dp_rank} at {self.endpoint}{replay}: {state}{self._published} published, "
            f"{queued} queued, {self._refused + self._failed} dropped, {self._subscriptions} subscribers>"
        )

    # --- the publisher thread ----------------------------------------------------------------------------------------------

    def _publisher_thread(self) -> None:
        encode = batch_encoder(self._dialect)
        # The backend's own send: pyzmq's send_multipart costs six times as much for three frames.
        send: Send = zmq.backend.Socket.send.__get__(self._pub)
        try:
            self._publish_until_closed(encode, send)
            while self._queue and self._deadline is not None and monotonic() < self._deadline:
                self._publish_burst(encode, send)
        except zmq.ZMQError as error:
            self._close_intake(f"its ZeroMQ context was terminated ({error})")
        finally:
            self._close_intake(self._why_closed or "its thread failed")
            self._flush_until = sockets.close_by(self._pub, self._deadline)

    def _publish_until_closed(self, encode: Encode, send: Send) -> None:
        look_at, brisk = 0.0, False
        while self._running:
            if self._queue:
                self._publish_burst(encode, send)
            else:
                brisk = self._rest(brisk)
            now = monotonic()
            if now >= look_at:
                look_at = now + LOOK_EVERY
                self._look_around(now)

    def _publish_burst(self, encode: Encode, send: Send) -> None:
        batches = self._take_burst(encode)
        self._buffer.extend(batches)
        topic = self._topic_bytes
        for seq, payload in batches:
            send(topic, zmq.SNDMORE)
            send(seq.to_bytes(8, "big"), zmq.SNDMORE)
            send(payload)
        self._published += len(batches)

    def _rest(self, brisk: bool) -> bool:
        """Until there is something to do; whether batches come so quickly that the next rest should begin with dozing."""
        if brisk:
            for nap in NAPS:
                sleep(nap)
                if self._queue or not self._running:
                    return True
        began = monotonic()
        self._sleep(SLEEP)
        return monotonic() - began < sum(NAPS)

    def _look_around(self, now: float) -> None:
        self._queue_full.watch(self._refused, now)
        self._bad_batches.watch(self._failed, now, self._last_fault)
        for _ in range(_SUBSCRIPTIONS_AT_ONCE):
            if not cast("int", self._pub.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            self._subscriptions += {b"\1": 1, b"\0": -1}.get(self._pub.recv(zmq.DONTWAIT)[:1], 0)

    def _unencodable(self, seq: int, error: Exception) -> None:
        self._last_fault = f"number {seq}: {error}"

    def _service_replay(self) -> None:
        if self._server is not None:
            self._server.run()

    # --- the end -----------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None) -> ShutdownReport:
        """Stop accepting, send what is queued, finish replies in progress, close: all within `timeout` seconds.

        None means `SHUTDOWN_TIMEOUT`. May be called again and from several threads: all get the same report. What could not be
        sent is in the report and in one warning. In a forked child it does nothing.
        """
        if self._pid != os.getpid():
            return self._tell()
        with self._closing:
            if self._report is None:
                # In place at once, for a signal handler that calls this again from in here.
                self._report = self._tell()
                self._report = self._close(self.SHUTDOWN_TIMEOUT if timeout is None else timeout)
            return self._report

    def _close(self, seconds: float) -> ShutdownReport:
        self._deadline = monotonic() + seconds
        self._close_intake("shutdown() was called")
        if self._server is not None:
            self._server.stop(self._deadline)
        threads = [thread for thread in (self._thread, self._replay_thread) if thread is not None]
        for thread in threads:
            thread.join(max(0.0, self._deadline - monotonic()) + sockets.FLUSH_GRACE)
        if self._admission is not None:
            self._admission.close()
        ended = not any(thread.is_alive() for thread in threads)
        if ended and self._server is not None:
            self._server.close()
        report = self._tell(self._flush() if ended else False)
        lifetime.discharge(self)
        if not report.complete:
            logger.warning("%s was shut down before everything was sent: %s", self.endpoint, report)
        return report

    def _flush(self) -> bool | None:
        """Wait for ZeroMQ to send what it holds; whether it did. A context of others is left alone: None."""
        if not self._owns_context:
            return None
        self._ctx.term()
        until = self._flush_until if self._server is None else min(self._flush_until, self._server.flush_until)
        return monotonic() < until

    def _tell(self, flushed: bool | None = None) -> ShutdownReport:
        _, accepted = self._numbers()
        return ShutdownReport(
            sent=self._published,
            unsent=accepted - self._published - self._failed,
            dropped=self._refused + self._failed,
            replays_cut=0 if self._server is None else self._server.cut,
            flushed=flushed,
        )

    def _after_fork(self) -> None:
        self._buffer.forget_lock()
        self._become_child(f"it belongs to process {self._pid}, of which this one is a fork; make a publisher of your own here")


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 0:
            raise ConfigError(f"{name} is {value}; it cannot be negative")


def _choose_context(
    given: zmq.Context[Any] | None, endpoint: str, replay_endpoint: str | None
) -> tuple[zmq.Context[Any], bool]:
    """The context to use and whether it is ours to end.

    `inproc://` is only reachable within a context, so there it is the process's, as in the engines. Otherwise one of our own,
    which can be flushed and ended; with replay it has a second I/O thread, so that a long reply does not delay live batches.
    """
    if given is not None:
        return given, False
    if any(item.startswith("inproc://") for item in (endpoint, replay_endpoint or "")):
        return zmq.Context.instance(), False
    return zmq.Context(io_threads=1 if replay_endpoint is None else 2), True
