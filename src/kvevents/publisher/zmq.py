"""Publishing over ZeroMQ, with replay.

Theory of operation. `publish` queues (`intake`). One thread, `zmq-publisher`, encodes in bursts what waits and sends it
(`broadcast`). While batches come at a steady pace it naps until the next one is expected (`pace`), since waking a sleeping
thread is the dearest thing that `publish` could do; otherwise it sleeps until woken. Batches of its own, heartbeats and
barriers, get numbers between those that wait. What leaves the replay buffer is compacted by a thread of its own,
`zmq-compaction`, so that no live batch waits for that.

The publisher fails open. Whatever is raised in the thread is logged and counted, and the thread goes on with the next batch;
the number of a batch that could not be sent stays a gap. Compaction and heartbeats are switched off by their first exception.
Only `shutdown` and a terminated ZeroMQ context end the thread.
`docs/adr/0002-publisher-thread.md` has the measurements.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from time import monotonic, sleep, time
from typing import Any, Final

import zmq

from kvevents.config import Curve, KVEventsConfig, check_heartbeat, resolve_dialect
from kvevents.endpoints import offset_endpoint_port, port_collision, should_bind, split_tcp
from kvevents.errors import ConfigError, MissingDependencyError
from kvevents.events import BlockRemoved, KVEventBatch
from kvevents.publisher import lifetime
from kvevents.publisher.broadcast import Broadcast
from kvevents.publisher.buffer import ReplayBuffer
from kvevents.publisher.episode import Episode
from kvevents.publisher.failures import Failures, is_context_end
from kvevents.publisher.history import History
from kvevents.publisher.intake import Encode, QueuedPublisher
from kvevents.publisher.kept import Numbered
from kvevents.publisher.pace import Pace
from kvevents.publisher.resident import Resident
from kvevents.publisher.sockets import FLUSH_GRACE
from kvevents.publisher.stats import PublisherStats, ShutdownReport
from kvevents.wire.dialects import Dialect
from kvevents.wire.encode import batch_encoder
from kvevents.wire.framing import END_SEQ

logger = logging.getLogger(__name__)

SLEEP: Final = 0.25
"""Seconds the idle thread sleeps at most."""
LOOK_EVERY: Final = 0.1
"""Seconds between looks at what is not the queue: subscriptions, losses to tell of, snapshots that are wanted."""
ERROR_PAUSE: Final = 0.1
"""Seconds after a burst that could not be sent, as in vLLM: a fault that lasts does not keep a CPU busy."""


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
        self._pace = Pace()
        self._failures = Failures(logger, self.endpoint)
        self._history_lost: str | None = None
        self._queue_full = Episode(logger, f"{self.endpoint}: the queue of {max_queue_size} batches is full")
        self._bad_batches = Episode(logger, f"{self.endpoint}: a batch cannot be encoded")
        self._last_fault = ""
        self._counts: dict[str, Any] = {"buffer_steps": buffer_steps, "hwm": hwm, "max_queue_size": max_queue_size}
        self._pid = os.getpid()
        self._deadline: float | None = None
        self._closing = threading.RLock()
        self._report: ShutdownReport | None = None
        self._is_closing = False
        self._compaction = threading.Thread(target=self._buffer.compact_until_stopped, daemon=True, name="zmq-compaction")
        if self._buffer.history_stats() is not None:
            self._compaction.start()
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
        # The newest batch is kept in any case: by it a consumer recognises this publisher after a reconnect.
        return ReplayBuffer(steps if history is None else max(steps, 1), history, batch_encoder(self._dialect))

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

    def get_publisher_config(self) -> Any:
        """The settings in force that the engines know, as `kvevents.config.KVEventsConfig`.

        Endpoints are those of this rank, as configured; of a port left to the OS, with the one that it chose.
        """
        return KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=_resolved(self._endpoint, self._bound) or self._endpoint,
            replay_endpoint=_resolved(self._replay_endpoint, self._replay_bound),
            topic=self._topic_bytes.decode(),
            **self._counts,
        )

    def stats(self) -> PublisherStats:
        """Counters since the start. Safe from any thread, also after `shutdown()`."""
        next_seq, accepted = self._numbers()
        batches, size = self._buffer.size()
        return PublisherStats(
            accepted=accepted,
            published=self._published,
            queued=accepted - self._published - self._failed - self._unsendable,
            dropped={
                "queue_full": self._refused,
                "encode_failed": self._failed,
                "send_failed": self._unsendable,
                "ended": self._after_end,
            },
            failures=self._failures.counts() | self._broadcast.failures() | self._buffer.failures(),
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
        queued = accepted - self._published - self._failed - self._unsendable
        replay = f", replay at {self.replay_endpoint}" if self._replay_bound else ""
        state = "" if self._running else "closed, "
        return (
            f"<{type(self).__name__} rank {self._dp_rank} at {self.endpoint}{replay}: {state}{self._published} published, "
            f"{queued} queued, {self._dropped()} dropped, {self._broadcast.subscribers} subscribers>"
        )

    # --- the publisher thread ----------------------------------------------------------------------------------------------

    def _publisher_thread(self) -> None:
        encode = batch_encoder(self._dialect)
        try:
            self._publish_until_closed(encode)
            while self._queue and self._deadline is not None and monotonic() < self._deadline:
                self._attempt(self._publish_burst, encode)
            if self._unseen and not self._queue:
                self._attempt(self._show, encode)
        except zmq.ZMQError as error:
            logger.warning("%s: the publisher thread ended: its ZeroMQ context was terminated (%s)", self.endpoint, error)
        finally:
            self._end_intake("its ZeroMQ context was terminated")
            self._buffer.stop_compacting()
            self._broadcast.end(self._deadline)

    def _publish_until_closed(self, encode: Encode) -> None:
        look_at = beat_at = 0.0
        while self._running:
            if not self._attempt(self._turn, encode, beat_at):
                sleep(ERROR_PAUSE)
            now = monotonic()
            if now >= look_at:
                look_at = now + LOOK_EVERY
                self._attempt(self._look_around, now, encode)
            if self._resident is not None and now >= beat_at:
                beat_at = now + self._heartbeat
                self._attempt(self._beat, self._resident, encode)

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> bool:
        """Whether this went well; if not, it is logged and counted. Raises ZMQError if the context was terminated."""
        try:
            action(*arguments)
        # A panic of native code, or what users' types raise, need not be an Exception.
        except BaseException as error:
            if is_context_end(error):
                raise
            self._failures.note("thread", error, "publishing goes on with the next batch")
            return False
        return True

    def _turn(self, encode: Encode, beat_at: float) -> None:
        if self._queue:
            self._publish_burst(encode)
        elif self._unseen:
            self._show(encode)
        else:
            self._rest(beat_at)

    def _publish_burst(self, encode: Encode) -> None:
        batches = self._take_burst(encode)
        try:
            self._send(batches)
        except BaseException:
            self._unsendable += len(batches)
            raise
        self._published += len(batches)

    def _send(self, batches: list[Numbered]) -> None:
        try:
            self._broadcast.send(batches)
        except BaseException:
            self._unseen = True
            raise
        self._mirror(batches)

    def _mirror(self, batches: list[Numbered]) -> None:
        if self._resident is not None:
            try:
                self._resident.apply(batches)
            except BaseException as error:  # noqa: BLE001 - a panic of native code is a BaseException
                self._stop_heartbeats(error)

    def _stop_heartbeats(self, error: BaseException) -> None:
        self._resident = None
        self._failures.note("heartbeat", error, "heartbeats are switched off")

    def _show(self, encode: Encode) -> None:
        """Have every consumer see that the numbers before this one were burnt."""
        self._send([self._own([], encode)])

    def _own(self, events: list[BlockRemoved], encode: Encode) -> Numbered:
        """A batch of the publisher's own, with the next number."""
        number = self._insert()
        try:
            return number, encode(KVEventBatch(time(), list(events), self._dp_rank))
        except BaseException:
            self._unseen = True
            raise

    def _beat(self, resident: Resident, encode: Encode) -> None:
        if not self._running:
            return
        number = self._insert()
        try:
            heartbeat = resident.heartbeat(number, self._heartbeat, self._broadcast.incarnation)
            payload = encode(KVEventBatch(time(), [BlockRemoved([], heartbeat=heartbeat)], self._dp_rank))
        except BaseException as error:  # noqa: BLE001 - a panic of native code is a BaseException
            self._unseen = True
            self._stop_heartbeats(error)
            return
        self._send([(number, payload)])
        self._heartbeats += 1

    def _cut(self, encode: Encode) -> None:
        barrier = self._own([], encode)
        try:
            self._broadcast.cut(*barrier)
        except BaseException:
            self._unseen = True
            raise
        self._mirror([barrier])

    def _rest(self, beat_at: float) -> None:
        """Until there is something to do."""
        pace = self._pace
        for position, nap in enumerate(pace.naps(monotonic())):
            sleep(nap)
            if self._queue or not self._running:
                pace.found(monotonic(), at_first_look=not position)
                return
        until = SLEEP if self._resident is None else min(SLEEP, beat_at - monotonic())
        self._sleep(max(0.0, until))
        if self._queue:
            pace.found(monotonic())

    def _look_around(self, now: float, encode: Encode) -> None:
        self._queue_full.watch(self._refused, now)
        self._bad_batches.watch(self._failed, now, self._last_fault)
        self._watch_history()
        self._broadcast.look_around()
        if self._broadcast.wants_cut:
            self._cut(encode)

    def _watch_history(self) -> None:
        """Log when there is no snapshot any more for those who come late, and when there is one again."""
        history = self._buffer.history_stats()
        if history is None or history.lost == self._history_lost:
            return
        self._history_lost = history.lost
        if history.lost is None:
            logger.info("%s: older history can be compacted again", self.endpoint)
        else:
            logger.warning(
                "%s: no snapshot of older history: %s; late consumers get the replay buffer only, see docs/publishing.md",
                self.endpoint,
                history.lost,
            )

    def _unencodable(self, seq: int, error: BaseException) -> None:
        self._last_fault = f"number {seq}: {error}"

    # --- the end -----------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None) -> ShutdownReport:
        """Stop accepting, send what is queued, finish replies in progress, close: all within `timeout` seconds.

        None means `SHUTDOWN_TIMEOUT`. ZeroMQ and each thread get a tenth of a second more. May be called again and from several
        threads: all get the same report. A call after one that was interrupted, as by Ctrl-C, finishes the job. What could not
        be sent is in the report and in one warning. In a forked child it does nothing.
        """
        if self._pid != os.getpid():
            return self._tell()
        with self._closing:
            if self._report is None:
                if self._is_closing:  # a signal handler calls this again from in here
                    return self._tell()
                self._is_closing = True
                try:
                    self._report = self._close(self.SHUTDOWN_TIMEOUT if timeout is None else timeout)
                finally:
                    self._is_closing = False
            return self._report

    def _close(self, seconds: float) -> ShutdownReport:
        """May be interrupted anywhere, and called again."""
        self._deadline = monotonic() + seconds
        self._close_intake()
        self._broadcast.stop(self._deadline)
        self._thread.join(seconds + FLUSH_GRACE)
        left = max(0.0, self._deadline - monotonic())
        flushed = self._broadcast.close(left, sending=self._thread.is_alive())
        if self._compaction.is_alive():
            self._buffer.stop_compacting()
            self._compaction.join(max(0.0, self._deadline - monotonic()) + FLUSH_GRACE)
        report = self._tell(flushed)
        lifetime.discharge(self)
        if not report.complete:
            logger.warning("%s was shut down before everything was sent: %s", self.endpoint, report)
        return report

    def _tell(self, flushed: bool | None = None) -> ShutdownReport:
        _, accepted = self._numbers()
        return ShutdownReport(
            sent=self._published,
            unsent=accepted - self._published - self._failed - self._unsendable,
            dropped=self._dropped(),
            replays_cut=self._broadcast.replays_cut,
            flushed=flushed,
        )

    def _dropped(self) -> int:
        return self._refused + self._failed + self._unsendable + self._after_end

    def _after_fork(self) -> None:
        self._broadcast.forget_locks()
        self._become_child(f"it belongs to process {self._pid}, of which this one is a fork; make a publisher of your own here")


def _resolved(endpoint: str | None, bound: str | None) -> str | None:
    """An endpoint as configured; of a port left to the OS, the host as configured with the port that was bound."""
    found, actual = split_tcp(endpoint or ""), split_tcp(bound or "")
    if found is None or actual is None or found[1] != 0:
        return endpoint
    return f"tcp://{found[0]}:{actual[1]}"


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 0:
            raise ConfigError(f"{name} is {value}; it cannot be negative")
