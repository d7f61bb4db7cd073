"""Publishes batches over ZeroMQ, with replay.

Theory of operation. `publish` puts a batch into a queue (`base`). One thread, `zmq-publisher`, takes bursts of batches out of
the queue, encodes them and sends them (`event_server`). While batches arrive steadily, the thread sleeps until the next one is
expected, because waking the thread would be the most expensive step of `publish`. If batches arrive irregularly, the thread
sleeps until `publish` wakes it. Batches that the thread itself creates, such as heartbeats, get numbers before queued batches.
A second thread, `zmq-compaction`, compacts batches that leave the replay buffer, so that no live batch waits for compaction.

The publisher fails open. The thread logs and counts every exception and continues with the next batch; the number of a batch
that could not be sent stays a gap. Compaction and heartbeats are switched off by their first exception. Only `shutdown` and a
terminated ZeroMQ context end the thread. The decision record 0002 has the measurements.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from time import monotonic, sleep, time
from typing import Any

import zmq

from kvevents.config import KVEventsConfig
from kvevents.endpoints import offset_endpoint_port, port_collision, should_bind, with_bound_port
from kvevents.errors import ConfigError
from kvevents.events import BlockRemoved, Heartbeat, KVEventBatch
from kvevents.native_module import require_native, warn_without_native
from kvevents.publisher import base
from kvevents.publisher.base import PollPlanner, QueuedPublisher
from kvevents.publisher.compaction import Compactor, DigestTracker, Encode, SequencedPayload
from kvevents.publisher.event_server import EventServer
from kvevents.publisher.replay_buffer import ReplayBuffer
from kvevents.publisher.settings import DEFAULT_PUBLISHER_SETTINGS, PublisherSettings
from kvevents.publisher.stats import FailureLog, LossLogger, PublisherStats, ShutdownReport, is_context_terminated
from kvevents.settings import check_counts, check_finite, check_heartbeat, check_texts
from kvevents.wire import resolve_dialect
from kvevents.wire.dialects import DEFAULT_DIALECT, Dialect
from kvevents.wire.encode import batch_encoder
from kvevents.wire.framing import END_SEQ
from kvevents.zeromq.keys import Curve
from kvevents.zeromq.sockets import MIN_FLUSH_SECONDS

logger = logging.getLogger(__name__)


class _EngineInternal:
    """A private member of the engines' class that kvevents' class lacks. To read, set or override the member is an error."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.sentence = f"kvevents has no {name}, a private member of the engines' ZmqEventPublisher, so nothing would use it"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise AttributeError(self.sentence)

    def __set__(self, instance: object, value: Any) -> None:
        raise AttributeError(self.sentence)


class ZmqEventPublisher(QueuedPublisher):
    """Publishes batches on a PUB socket and answers replay requests on a ROUTER socket.

    The first parameters are those of the engines' class, with the same meaning and defaults:

    data_parallel_rank: added to the ports, and written into batches that carry no rank.
    endpoint, replay_endpoint: `tcp://`, `ipc://` or `inproc://`; if replay_endpoint is None, there is no replay.
    buffer_steps: number of batches in the replay buffer, which may hold a few more. hwm: maximum number of batches that wait
    for one subscriber, 0 for no limit. max_queue_size: maximum number of batches that wait for the thread, 0 for no limit.
    topic: first frame of every batch.

    The engines' class does not have the other parameters:

    bind: whether to bind the event socket rather than connect it; None binds wildcards, `ipc://`, `inproc://` and port 0.
    dialect: the release whose consumers read the stream, a `Dialect` or a name such as `vllm-0.33` or `sglang-latest`. None
    selects the form that almost all consumers read: arrays, as in vLLM up to 0.23, and replies without the topic. An event with
    a field that the array cannot hold is sent as a map. replay_topic: whether replies repeat the topic; None lets the dialect
    decide. compact: whether batches that leave the replay buffer are collapsed into a snapshot, with which replay from older
    numbers begins; None means yes if the native module is installed. curve: keys for all sockets. context: a ZeroMQ context to
    use, which the caller terminates. heartbeat: seconds between batches with a digest of the resident blocks, by which
    consumers verify their state, or None. Without the native module these batches have no digest. settings: limits and timers.

    Raises `ConfigError` for settings that cannot work, including ports that two ranks would use, `UnknownDialectError`,
    `MissingDependencyError` for settings that need the native module, and `EndpointError`, an OSError, if a socket cannot be
    bound.
    """

    SHUTDOWN_TIMEOUT: float = 1.0
    """Default time limit of `shutdown` in seconds."""
    END_SEQ = END_SEQ
    """Number in the end marker of a replay reply."""

    offset_endpoint_port = staticmethod(offset_endpoint_port)

    _ctx, _pub, _replay, _hwm, _pack = (_EngineInternal() for _ in range(5))
    _event_queue, _buffer, _seq_gen, _running = (_EngineInternal() for _ in range(4))
    _socket_setup, _service_replay, _publisher_thread = (_EngineInternal() for _ in range(3))

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises TypeError if a subclass overrides a member of the engines' class that this class would never call."""
        super().__init_subclass__(**options)
        for name in vars(cls):
            member = vars(ZmqEventPublisher).get(name)
            if isinstance(member, _EngineInternal) or (name == "END_SEQ" and cls.END_SEQ != END_SEQ):
                sentence = member.sentence if isinstance(member, _EngineInternal) else "END_SEQ is part of the protocol"
                raise TypeError(f"{cls.__name__} overrides {name}: {sentence}; override publish() or shutdown() instead")

    _default_dialect = DEFAULT_DIALECT
    _may_collide = False
    """Whether two ranks may use the same port; the engines allow this, because ranks can run on different nodes."""
    _published_count = _heartbeats = 0
    _history_problem: str | None = None
    """Why the snapshot of older history was unavailable at the last check; None if the snapshot was available."""
    _last_encode_failure = ""
    _deadline: float | None = None
    _report: ShutdownReport | None = None
    _is_closing = False

    def __init__(  # noqa: PLR0913 - the parameters of the engines' class, and further ones
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
        settings: PublisherSettings = DEFAULT_PUBLISHER_SETTINGS,
    ) -> None:
        check_counts(data_parallel_rank=data_parallel_rank, buffer_steps=buffer_steps, hwm=hwm, max_queue_size=max_queue_size)
        check_heartbeat(heartbeat)
        super().__init__(data_parallel_rank, max_queue_size, settings.burst)
        self._settings = settings
        self._dialect = resolve_dialect(dialect) or self._default_dialect
        check_texts(endpoint=endpoint, replay_endpoint=replay_endpoint or "", topic=topic)
        self._binds = should_bind(endpoint) if bind is None else bind
        self._role = "bound to" if self._binds else "connecting to"
        self._is_lonely = not self._binds
        """True for a connecting publisher until a consumer has subscribed or the missing subscription was logged."""
        collision = port_collision(endpoint, replay_endpoint, data_parallel_rank)
        if collision is not None and self._binds and not self._may_collide:
            raise ConfigError(collision)
        self._endpoint: str = self.offset_endpoint_port(endpoint, data_parallel_rank) or endpoint
        self._replay_endpoint = self.offset_endpoint_port(replay_endpoint, data_parallel_rank)
        self._digest_tracker = None if heartbeat is None else DigestTracker.create()
        self._heartbeat_interval, self._compact = heartbeat or 0.0, compact
        self._replay_buffer = self._create_buffer(buffer_steps, compact)
        self._poll_planner = PollPlanner(settings.polling)
        self._counts: dict[str, Any] = {"buffer_steps": buffer_steps, "hwm": hwm, "max_queue_size": max_queue_size}
        self._pid = os.getpid()
        self._closing_lock = threading.RLock()
        compact_until_stopped = self._replay_buffer.compact_until_stopped
        self._compaction = threading.Thread(target=compact_until_stopped, daemon=True, name="zmq-compaction")
        self._thread = threading.Thread(target=self._run, daemon=True, name="zmq-publisher")
        self._server = EventServer(
            self._endpoint,
            self._replay_endpoint,
            buffer=self._replay_buffer,
            hwm=hwm,
            topic=topic,
            bind=self._binds,
            replay_topic=self._dialect.has_replay_topic if replay_topic is None else replay_topic,
            curve=curve,
            context=context,
            settings=settings,
        )
        try:
            self._start(max_queue_size)
        except BaseException:  # also for KeyboardInterrupt: an open socket would block the termination of its context
            self.shutdown(0.0)
            raise

    def _start(self, max_queue_size: int) -> None:
        """Start the threads after the sockets were opened."""
        self._bound_endpoint, self._replay_bound = self._server.bound, self._server.replay_bound
        settings = self._settings
        self._failures = FailureLog(logger, self.endpoint, settings.log_interval)
        subject = f"{self.endpoint}: the queue of {max_queue_size} batches is full"
        self._queue_full_log = LossLogger(logger, subject, settings.loss_quiet_time)
        self._encode_failure_log = LossLogger(logger, f"{self.endpoint}: a batch cannot be encoded", settings.loss_quiet_time)
        if self._replay_buffer.history_stats() is not None:
            self._compaction.start()
        self._thread.start()
        base.open_publishers.add(self)
        self._started_at = monotonic()
        logger.info("publishing KV events of rank %d, %s %s", self._data_parallel_rank, self._role, self.endpoint)
        features = {
            "snapshots of batches that have left the replay buffer": self._replay_endpoint and self._compact is not False,
            "digests in heartbeats": self._digest_tracker,
        }
        warn_without_native(logger, self.endpoint, [feature for feature, is_enabled in features.items() if is_enabled])

    def _create_buffer(self, steps: int, compact: bool | None) -> ReplayBuffer:
        settings = self._settings.buffer
        if self._replay_endpoint is None or compact is False:
            return ReplayBuffer(0 if self._replay_endpoint is None else steps, settings=settings)
        compactor = Compactor.create()
        if compactor is None and compact:
            require_native("compact=True")
        # The newest batch stays in the buffer, because after a reconnect a consumer recognises this publisher by that batch.
        steps = steps if compactor is None else max(steps, 1)
        return ReplayBuffer(steps, compactor, batch_encoder(self._dialect), settings=settings)

    # --- state of the publisher ----------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The endpoint to which a consumer on this host subscribes, with the port that the OS chose; or the peer's endpoint."""
        return self._server.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """The endpoint at which a consumer on this host requests replay; None without replay."""
        return self._server.replay_endpoint

    @property
    def _dp_rank(self) -> int:
        return self._data_parallel_rank

    @property
    def _topic_bytes(self) -> bytes:
        return self._server.topic

    @property
    def connections_refused(self) -> int:
        """Number of connections to any socket by clients that know the server key but are not in `curve.allowed`."""
        return self._server.connections_refused

    def get_publisher_config(self) -> Any:
        """Return the settings that the engines know, as `kvevents.config.KVEventsConfig`.

        The endpoints are those configured for this rank, with the port that the OS chose instead of port 0.
        """
        return KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=with_bound_port(self._endpoint, self._bound_endpoint) or self._endpoint,
            replay_endpoint=with_bound_port(self._replay_endpoint, self._replay_bound),
            topic=self._topic_bytes.decode(),
            **self._counts,
        )

    def stats(self) -> PublisherStats:
        """Return counters since the start. Safe from any thread, also after `shutdown()`."""
        next_seq, accepted = self._next_seq_and_accepted()
        batches, size = self._replay_buffer.size()
        return PublisherStats(
            accepted=accepted,
            published=self._published_count,
            queued=self._count_queued(accepted),
            dropped={
                "queue_full": self._dropped_full,
                "encode_failed": self._encode_failures,
                "send_failed": self._send_failures,
                "ended": self._dropped_after_end,
            },
            failures=self._failures.counts() | self._server.failures() | self._replay_buffer.failures(),
            next_seq=next_seq,
            buffered_batches=batches,
            buffered_bytes=size,
            history=self._replay_buffer.history_stats(),
            heartbeats=self._heartbeats,
            subscribers=self._server.events.subscriptions,
            replay=self._server.replay_stats(),
        )

    def _count_queued(self, accepted: int) -> int:
        return accepted - self._published_count - self._encode_failures - self._send_failures

    def _count_dropped(self) -> int:
        return self._dropped_full + self._encode_failures + self._send_failures + self._dropped_after_end

    def __repr__(self) -> str:
        _, accepted = self._next_seq_and_accepted()
        replay = f", replay at {self.replay_endpoint}" if self._replay_bound else ""
        state = "" if self._is_running else "closed, "
        return (
            f"<{type(self).__name__} rank {self._data_parallel_rank} {self._role} {self.endpoint}{replay}: {state}"
            f"{self._published_count} published, {self._count_queued(accepted)} queued, {self._count_dropped()} dropped, "
            f"{self._server.events.subscriptions} subscribers>"
        )

    # --- the publisher thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        encode = batch_encoder(self._dialect)
        try:
            self._publish_until_closed(encode)
            while self._queue and self._deadline is not None and monotonic() < self._deadline:
                self._attempt(self._publish_burst, encode)
            if self._has_tail_gap and not self._queue:
                self._attempt(self._reveal_gap, encode)
        except zmq.ZMQError as error:
            logger.warning("%s: the publisher thread ended: its ZeroMQ context was terminated (%s)", self.endpoint, error)
        finally:
            self._end_queue("its ZeroMQ context was terminated")
            self._replay_buffer.stop_compacting()
            self._server.close_events(self._deadline)

    def _publish_until_closed(self, encode: Encode) -> None:
        poll_at = heartbeat_at = 0.0
        while self._is_running:
            if not self._attempt(self._run_once, encode, heartbeat_at):
                sleep(self._settings.error_delay)
            now = monotonic()
            if now >= poll_at:
                poll_at = now + self._settings.poll_interval
                self._attempt(self._poll, now)
            if self._digest_tracker is not None and now >= heartbeat_at:
                heartbeat_at = now + self._heartbeat_interval
                self._attempt(self._send_heartbeat, self._digest_tracker, encode)

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> bool:
        """Run an action and return whether it succeeded; count its exception. Raises ZMQError if the context was terminated."""
        try:
            action(*arguments)
        # A panic of native code, or an exception of a user's type, can be a BaseException that is not an Exception.
        except BaseException as error:
            if is_context_terminated(error):
                raise
            self._record_failure(error)
            return False
        return True

    def _record_failure(self, error: BaseException) -> None:
        self._failures.record("thread", error, "publishing continues with the next batch")

    def _run_once(self, encode: Encode, heartbeat_at: float) -> None:
        if self._queue:
            self._publish_burst(encode)
        elif self._has_tail_gap:
            self._reveal_gap(encode)
        else:
            self._wait_for_batch(heartbeat_at)

    def _publish_burst(self, encode: Encode) -> None:
        batches = self._take_burst(encode)
        try:
            self._send(batches)
        except BaseException:
            self._send_failures += len(batches)
            raise
        self._published_count += len(batches)

    def _send(self, batches: list[SequencedPayload]) -> None:
        try:
            self._server.send(batches)
        except BaseException:
            self._has_tail_gap = True
            raise
        if self._digest_tracker is not None:
            try:
                self._digest_tracker.apply(batches)
            except BaseException as error:  # noqa: BLE001 - a panic of native code is a BaseException
                self._disable_heartbeats(error)

    def _disable_heartbeats(self, error: BaseException) -> None:
        self._digest_tracker = None
        self._failures.record("heartbeat", error, "heartbeats are switched off")

    def _reveal_gap(self, encode: Encode) -> None:
        """Send an empty batch, so that consumers see that the numbers before it have no batches."""
        payload = encode(KVEventBatch(time(), [], self._data_parallel_rank))
        self._send([(self._next_own_number(), payload)])

    def _attestation(self) -> int | None:
        """Return the digest of the engine's cache after all batches that were sent; None outside an engine."""
        return None

    def _heartbeat(self, tracker: DigestTracker, number: int) -> Heartbeat:
        return tracker.heartbeat(number, self._heartbeat_interval, self._server.incarnation, self._attestation())

    def _send_heartbeat(self, tracker: DigestTracker, encode: Encode) -> None:
        if not self._is_running:
            return
        number = self._next_own_number()
        try:
            heartbeat = self._heartbeat(tracker, number)
            payload = encode(KVEventBatch(time(), [BlockRemoved([], heartbeat=heartbeat)], self._data_parallel_rank))
        except BaseException as error:  # noqa: BLE001 - a panic of native code is a BaseException
            self._has_tail_gap = True
            self._disable_heartbeats(error)
            return
        self._send([(number, payload)])
        self._heartbeats += 1

    def _wait_for_batch(self, heartbeat_at: float) -> None:
        """Poll or wait until a batch arrives, the queue closes, or a heartbeat or the periodic work is due."""
        planner = self._poll_planner
        for position, pause in enumerate(planner.plan(monotonic())):
            sleep(pause)
            if self._queue or not self._is_running:
                planner.record_arrival(monotonic(), at_first_poll=not position)
                return
        seconds = self._settings.max_sleep
        if self._digest_tracker is not None:
            seconds = min(seconds, heartbeat_at - monotonic())
        self._sleep(max(0.0, seconds))
        if self._queue:
            planner.record_arrival(monotonic())

    def _poll(self, now: float) -> None:
        self._queue_full_log.update(self._dropped_full, now)
        self._encode_failure_log.update(self._encode_failures, now, self._last_encode_failure)
        self._log_history_problem()
        self._server.events.poll()
        if self._server.events.subscriptions:
            self._is_lonely = False
        elif self._is_lonely and now - self._started_at > self._settings.peer_timeout:
            self._is_lonely = False
            logger.warning(
                "%s: this publisher connects to that endpoint, and no consumer has answered there for %g s; pass bind=True, or "
                "an endpoint such as tcp://*:5557, to let consumers connect to this publisher",
                self.endpoint,
                self._settings.peer_timeout,
            )

    def _log_history_problem(self) -> None:
        """Log when the snapshot for late consumers becomes unavailable, and when it is available again."""
        history = self._replay_buffer.history_stats()
        if history is None or history.unavailable_reason == self._history_problem:
            return
        self._history_problem = history.unavailable_reason
        if history.unavailable_reason is None:
            logger.info("%s: a snapshot of older history is available again", self.endpoint)
        else:
            logger.warning(
                "%s: no snapshot of older history: %s; late consumers get the replay buffer alone",
                self.endpoint,
                history.unavailable_reason,
            )

    def _on_encode_failure(self, seq: int, error: BaseException) -> None:
        self._last_encode_failure = f"number {seq}: {error}"

    # --- shutdown of the publisher -------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None) -> ShutdownReport:
        """Stop accepting batches, send queued batches, finish replies in progress, and close, all within `timeout` seconds.

        None means `SHUTDOWN_TIMEOUT`. ZeroMQ and each thread can take a tenth of a second longer, and the termination of
        ZeroMQ's context can take `PublisherSettings.term_timeout` longer. The method can be called repeatedly and from several
        threads; all calls return the same report. If a call was interrupted, for example by Ctrl-C, the next call completes the
        shutdown. The report and one logged warning list what could not be sent. In a forked child, `shutdown` does nothing.
        """
        seconds = self.SHUTDOWN_TIMEOUT if timeout is None else check_finite(timeout)
        if self._pid != os.getpid():
            return self._make_report()
        with self._closing_lock:
            if self._report is None:
                if self._is_closing:  # a signal handler has called `shutdown` during the shutdown
                    return self._make_report()
                self._is_closing = True
                try:
                    self._report = self._close(seconds)
                finally:
                    self._is_closing = False
            return self._report

    def _close(self, seconds: float) -> ShutdownReport:
        """Shut down. If an exception interrupts this method at any point, the next call completes the shutdown."""
        self._deadline = monotonic() + seconds
        self._end_queue(None)
        self._server.stop_replies(self._deadline)
        if self._thread.ident is not None:  # the thread was started
            self._thread.join(seconds + MIN_FLUSH_SECONDS)
        remaining = max(0.0, self._deadline - monotonic())
        was_flushed = self._server.close(remaining, is_sending=self._thread.is_alive())
        if self._compaction.is_alive():
            self._replay_buffer.stop_compacting()
            self._compaction.join(max(0.0, self._deadline - monotonic()) + MIN_FLUSH_SECONDS)
        report = self._make_report(was_flushed)
        base.open_publishers.discard(self)
        if not report.complete:
            logger.warning("%s: shut down before everything was sent: %s", self.endpoint, report)
        return report

    def _make_report(self, was_flushed: bool | None = None) -> ShutdownReport:
        _, accepted = self._next_seq_and_accepted()
        return ShutdownReport(
            sent=self._published_count,
            unsent=self._count_queued(accepted),
            dropped=self._count_dropped(),
            replays_unfinished=self._server.replays_unfinished,
            flushed=was_flushed,
        )

    def _after_fork(self) -> None:
        self._replay_buffer.make_locks()
        self._end_in_child(f"it belongs to process {self._pid}, and this process is a fork of it; create a publisher here")
