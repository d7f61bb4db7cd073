"""Publishing over ZeroMQ, with replay.

Theory of operation. `publish` queues (`intake`). One thread, `zmq-publisher`, encodes in bursts what waits and sends it
(`broadcast`). While batches come quickly it dozes, looking at the queue after each of `NAPS`, since waking a sleeping thread is
the dearest thing that `publish` could do; when they come slowly it sleeps until woken. Batches of its own, heartbeats and
barriers, get numbers between those that wait.
`docs/adr/0002-publisher-thread.md` has the measurements.
"""

from __future__ import annotations

import logging
import os
import threading
from time import monotonic, sleep, time
from typing import Any, Final

import zmq

from kvevents.config import Curve, check_heartbeat, resolve_dialect
from kvevents.endpoints import offset_endpoint_port, port_collision, should_bind
from kvevents.errors import ConfigError, MissingDependencyError
from kvevents.events import BlockRemoved, KVEventBatch
from kvevents.publisher import lifetime
from kvevents.publisher.broadcast import Broadcast
from kvevents.publisher.buffer import ReplayBuffer
from kvevents.publisher.episode import Episode
from kvevents.publisher.history import History
from kvevents.publisher.intake import Encode, QueuedPublisher
from kvevents.publisher.kept import Numbered
from kvevents.publisher.resident import Resident
from kvevents.publisher.sockets import FLUSH_GRACE
from kvevents.publisher.stats import PublisherStats, ShutdownReport
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
"""Seconds between looks at what is not the queue: subscriptions, losses to tell of, snapshots that are wanted."""


class ZmqEventPublisher(QueuedPublisher):
    """Publishes batches on a PUB socket and answers replay requests on a ROUTER socket.

    Parameters are those of the engines' class, with the same meaning and defaults, then ours:

    data_parallel_rank: added to both ports, and written into batches that carry no rank.
    endpoint, replay_endpoint: `tcp://`, `ipc://` or `inproc://`; without the second there is no replay.
    buffer_steps: batches kept for replay, or a few more. hwm: batches one slow subscriber may be behind, 0 for no limit.
    max_queue_size: batches that may wait for the thread, 0 for no limit. topic: first frame of every batch.
    bind: bind or connect the event socket; None binds wildcards, `ipc://`, `inproc://` and port 0.
    dialect: a `Dialect` or a name such as `sglang-0.5.17`; None sends events as declared.
    replay_topic: whether replies repeat the topic; None goes by the dialect, and without one, yes.
    compact: collapse what leaves the replay buffer into one snapshot batch, sent first to whoever asks from before the buffer;
    None does so where the native module is installed.
    curve: keys for all sockets. context: a ZeroMQ context to use, which the caller ends.
    heartbeat: seconds between batches that say what is resident, by which consumers check what they know; None for none.
    snapshot_endpoint: where placement snapshots are answered as in SGLang's draft `snapshot-v1`; changes the topics of batches.

    Raises `ConfigError` for settings that cannot work, ports that ranks would fight over included, `UnknownDialectError`,
    `MissingDependencyError` for those that need the native module, and `EndpointError`, an OSError, when a socket cannot be
    bound.
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
        heartbeat: float | None = None,
        snapshot_endpoint: str | None = None,
    ) -> None:
        _check_counts(data_parallel_rank=data_parallel_rank, buffer_steps=buffer_steps, hwm=hwm, max_queue_size=max_queue_size)
        check_heartbeat(heartbeat)
        super().__init__(data_parallel_rank, max_queue_size)
        self._dp_rank = data_parallel_rank
        self._topic_bytes = topic.encode()
        self._dialect = resolve_dialect(dialect)
        self._binds = should_bind(endpoint) if bind is None else bind
        self._refuse_collision(endpoint, replay_endpoint)
        self._refuse_snapshot_collision(snapshot_endpoint, endpoint, replay_endpoint)
        self._endpoint: str = self.offset_endpoint_port(endpoint, data_parallel_rank) or endpoint
        self._replay_endpoint = self.offset_endpoint_port(replay_endpoint, data_parallel_rank)
        self._resident = None if heartbeat is None else Resident.create()
        self._heartbeat = heartbeat or 0.0
        self._buffer = self._replay_buffer(buffer_steps, compact, snapshots=snapshot_endpoint is not None)
        self._broadcast = Broadcast(
            self._endpoint,
            self._replay_endpoint,
            buffer=self._buffer,
            hwm=hwm,
            topic=topic,
            bind=self._binds,
            replay_topic=self._dialect is None or self._dialect.replay_topic if replay_topic is None else replay_topic,
            curve=curve,
            context=context,
            snapshot_endpoint=self.offset_endpoint_port(snapshot_endpoint, data_parallel_rank),
            rank=data_parallel_rank,
        )
        self._bound, self._replay_bound = self._broadcast.bound, self._broadcast.replay_bound
        self._admission = self._broadcast.admission
        self._published = self._heartbeats = 0
        self._queue_full = Episode(logger, f"{self.endpoint}: the queue of {max_queue_size} batches is full")
        self._bad_batches = Episode(logger, f"{self.endpoint}: a batch cannot be encoded")
        self._last_fault = ""
        self._pid = os.getpid()
        self._deadline: float | None = None
        self._closing = threading.RLock()
        self._report: ShutdownReport | None = None
        self._thread = threading.Thread(target=self._publisher_thread, daemon=True, name="zmq-publisher")
        self._thread.start()
        lifetime.enrol(self)
        logger.info("publishing KV events of rank %d at %s", self._dp_rank, self.endpoint)

    def _replay_buffer(self, steps: int, compact: bool | None, *, snapshots: bool) -> ReplayBuffer:
        if snapshots and compact is False:
            raise ConfigError("snapshot_endpoint tells what compaction keeps; leave compact=False out")
        if (self._replay_endpoint is None and not snapshots) or compact is False:
            return ReplayBuffer(0 if self._replay_endpoint is None else steps)
        history = History.create()
        if history is None and (compact or snapshots):
            setting = "snapshot_endpoint" if snapshots else "compact=True"
            raise MissingDependencyError(
                f"{setting} needs the compiled module kvevents._native; install a wheel of kvevents, or leave the setting out"
            )
        return ReplayBuffer(steps, history, batch_encoder(self._dialect))

    def _refuse_collision(self, endpoint: str, replay_endpoint: str | None) -> None:
        sentence = port_collision(endpoint, replay_endpoint, self._dp_rank) if self._binds else None
        if sentence is not None:
            raise ConfigError(sentence)

    def _refuse_snapshot_collision(self, snapshots: str | None, *others: str | None) -> None:
        for other in others:
            if snapshots is not None and other is not None and port_collision(other, snapshots, self._dp_rank) is not None:
                raise ConfigError(
                    f"the snapshot port of rank {self._dp_rank} would be a port of a rank at or below it; "
                    f"put snapshot_endpoint ({snapshots}) at least as many ports from {other} as there are ranks"
                )

    # --- what is known about it --------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """Where a consumer on this host subscribes, with the port that the OS chose; in connect mode, where we connect to."""
        return self._broadcast.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where a consumer on this host asks for replay; None without replay."""
        return self._broadcast.replay_endpoint

    @property
    def snapshot_endpoint(self) -> str | None:
        """Where a consumer on this host asks for a placement snapshot; None without."""
        return self._broadcast.snapshot_endpoint

    @property
    def connections_refused(self) -> int:
        """Connections of clients that know this end's key and are not in `curve.allowed`; those to all sockets count."""
        return self._broadcast.connections_refused

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
            heartbeats=self._heartbeats,
            subscribers=self._broadcast.subscribers,
            replay=self._broadcast.replay_stats(),
            snapshots=self._broadcast.snapshot_stats(),
        )

    def __repr__(self) -> str:
        _, accepted = self._numbers()
        queued = accepted - self._published - self._failed
        replay = f", replay at {self.replay_endpoint}" if self._replay_bound else ""
        state = "" if self._running else "closed, "
        return (
            f"<{type(self).__name__} rank {self._dp_rank} at {self.endpoint}{replay}: {state}{self._published} published, "
            f"{queued} queued, {self._refused + self._failed} dropped, {self._broadcast.subscribers} subscribers>"
        )

    # --- the publisher thread ----------------------------------------------------------------------------------------------

    def _publisher_thread(self) -> None:
        encode = batch_encoder(self._dialect)
        try:
            self._publish_until_closed(encode)
            while self._queue and self._deadline is not None and monotonic() < self._deadline:
                self._publish_burst(encode)
            if self._unseen and not self._queue:
                self._show(encode)
        except zmq.ZMQError as error:
            self._close_intake(f"its ZeroMQ context was terminated ({error})")
        finally:
            self._close_intake(self._why_closed or "its thread failed")
            self._broadcast.end(self._deadline)

    def _publish_until_closed(self, encode: Encode) -> None:
        look_at, brisk = 0.0, False
        beat_at = float("inf") if self._resident is None else 0.0
        while self._running:
            if self._queue:
                self._publish_burst(encode)
            elif self._unseen:
                self._show(encode)
            else:
                brisk = self._rest(brisk, beat_at)
            now = monotonic()
            if now >= look_at:
                look_at = now + LOOK_EVERY
                self._look_around(now, encode)
            if now >= beat_at:
                beat_at = now + self._heartbeat
                self._beat(encode)

    def _publish_burst(self, encode: Encode) -> None:
        batches = self._take_burst(encode)
        self._send(batches)
        self._published += len(batches)

    def _send(self, batches: list[Numbered]) -> None:
        self._broadcast.send(batches)
        if self._resident is not None:
            self._resident.apply(batches)

    def _show(self, encode: Encode) -> None:
        """Have every consumer see that the numbers before this one were burnt."""
        self._send([(self._insert(), encode(KVEventBatch(time(), [], self._dp_rank)))])

    def _beat(self, encode: Encode) -> None:
        if self._resident is not None and self._running:
            number = self._insert()
            heartbeat = self._resident.heartbeat(number, self._heartbeat, self._broadcast.incarnation)
            self._send([(number, encode(KVEventBatch(time(), [BlockRemoved([], heartbeat=heartbeat)], self._dp_rank)))])
            self._heartbeats += 1

    def _cut(self, encode: Encode) -> None:
        barrier = (self._insert(), encode(KVEventBatch(time(), [], self._dp_rank)))
        self._broadcast.cut(*barrier)
        if self._resident is not None:
            self._resident.apply([barrier])

    def _rest(self, brisk: bool, beat_at: float) -> bool:
        """Until there is something to do; whether batches come so quickly that the next rest should begin with dozing."""
        if brisk:
            for nap in NAPS:
                sleep(nap)
                if self._queue or not self._running:
                    return True
        began = monotonic()
        self._sleep(max(0.0, min(SLEEP, beat_at - began)))
        return monotonic() - began < sum(NAPS)

    def _look_around(self, now: float, encode: Encode) -> None:
        self._queue_full.watch(self._refused, now)
        self._bad_batches.watch(self._failed, now, self._last_fault)
        self._broadcast.look_around()
        if self._broadcast.wants_cut:
            self._cut(encode)

    def _unencodable(self, seq: int, error: Exception) -> None:
        self._last_fault = f"number {seq}: {error}"

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
        self._broadcast.stop(self._deadline)
        self._thread.join(seconds + FLUSH_GRACE)
        left = max(0.0, self._deadline - monotonic())
        flushed = self._broadcast.close(left, sending=self._thread.is_alive())
        report = self._tell(flushed)
        lifetime.discharge(self)
        if not report.complete:
            logger.warning("%s was shut down before everything was sent: %s", self.endpoint, report)
        return report

    def _tell(self, flushed: bool | None = None) -> ShutdownReport:
        _, accepted = self._numbers()
        return ShutdownReport(
            sent=self._published,
            unsent=accepted - self._published - self._failed,
            dropped=self._refused + self._failed,
            replays_cut=self._broadcast.replays_cut,
            flushed=flushed,
        )

    def _after_fork(self) -> None:
        self._broadcast.forget_locks()
        self._become_child(f"it belongs to process {self._pid}, of which this one is a fork; make a publisher of your own here")


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 0:
            raise ConfigError(f"{name} is {value}; it cannot be negative")
