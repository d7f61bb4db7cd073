"""The bridge: writes the batches of engines to the log, each one once and in order, even if several bridges follow an engine.

Theory of operation. One thread follows the engines and passes on records (`engine_reader`). All other parts run in one event
loop, in which each partition is read and written independently (`partition_writer`). Any number of bridges can follow an
engine, and any of them can be killed at any time. The servers accept a page only from a bridge that has read all earlier pages,
and the engines can replay everything that a bridge has in memory.

- *Back-pressure*: records that the servers do not accept are queued. If a partition accepts nothing and its queue exceeds its
  share of `max_queued_bytes`, its streams are *paused*: the bridge stops following them until the queue is written, and then
  follows them from the end of the log. If all queues together exceed `max_queued_bytes`, the thread reads nothing. In both
  cases the streams recover by replay. If nothing was read, or the oldest record has waited, for more than `max_lag_seconds`,
  heartbeats report this time as the lag. Replicas trust no stream of a bridge that lags.
- *Name*: in the log each process has its own id, `NAME#RANDOM`, so bridges with the same name do not overwrite each other's
  reports. Each of these bridges sees the other's heartbeats and reports the conflict. A process's reports are valid until its
  heartbeats stop.
- *Membership*: a bridge removes an engine from the log if no bridge has reached it for `dead_seconds`, or if no bridge has
  claimed it for `unclaimed_seconds` (`bridge_rules`). A bridge withdraws its reports about engines that it no longer follows.
- *A deleted partition* is created again, and all its streams are followed from their beginning.
- *Missing pages*: a bridge that cannot read a part of a partition continues after that part, with a page at which all streams
  start over. A bridge writes this page, too, if a replica reports missing pages and no other replica writes a snapshot that
  contains them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from nats.js import JetStreamContext

from kvevents.errors import ConfigError, PlaneError
from kvevents_plane.bridge_rules import REACHED_STATES, EngineLiveness, UnclaimedEngines
from kvevents_plane.connection import open_client, require_jetstream
from kvevents_plane.digests import missing_pages, read_digests
from kvevents_plane.engine_reader import MAX_REGISTRATION_BYTES, MAX_SOURCE_BYTES, EngineReader, EngineRecord, Watch
from kvevents_plane.layout import Layout, create_buckets, create_plane
from kvevents_plane.nats_client import PlaneClient
from kvevents_plane.nats_errors import first_error
from kvevents_plane.page_builder import record_size
from kvevents_plane.partition_writer import PartitionWriter
from kvevents_plane.records import (
    CONFLICT_INTERVALS,
    GapRecord,
    HeartbeatRecord,
    JoinRecord,
    LeaveRecord,
    StreamKey,
    StreamRecord,
    TrustRecord,
    bridge_name,
    engine_digest,
    stream_text,
)
from kvevents_plane.settings import BridgeSettings, PlaneSettings

__all__ = ["Bridge", "BridgeSettings", "Watch"]

log = logging.getLogger(__name__)

PAGE_BYTES: Final = 512 << 10
"""Maximum size of a page in bytes; lower if the servers accept less. A page of this size holds thousands of batches."""
PAGE_MARGIN_BYTES: Final = 4 << 10
"""Number of bytes in a message that are reserved for headers, a heartbeat and the bridge's name."""
MIN_PAGE_BYTES: Final = MAX_REGISTRATION_BYTES + 8 * MAX_SOURCE_BYTES
"""Size of a page in bytes that has room for any record except a batch."""
MAX_UNCLAIMED_CHECK_SECONDS: Final = 10.0
"""Maximum number of seconds between two checks for unclaimed engines."""
MISSING_CHECK_SECONDS: Final = 1.0
"""Seconds between two checks of whether a replica reports missing pages."""
MISSING_PAGES_SECONDS: Final = 2.0
"""Seconds from a replica's report of missing pages until the partition starts over."""
SNAPSHOT_WAIT_SECONDS: Final = 30.0
"""Replaces `MISSING_PAGES_SECONDS` if another replica has the missing pages. The other replica then has time to write a
snapshot."""
BUCKET_CHECK_SECONDS: Final = 10.0
"""Seconds between two searches for missing buckets."""
ENGINE_CHECK_SECONDS: Final = 0.5
"""Seconds between two checks of which engines are reachable and which trust they have."""
GAP_HOLD_SECONDS: Final = 1.0
"""Seconds for which a gap record waits, because another bridge might have the missing batches."""
START_SECONDS: Final = 30.0
"""Timeout for the first connection, and then for finding or creating the plane. Servers that have just started must elect
leaders, even for new streams."""
STOP_SECONDS: Final = 5.0
"""Maximum number of seconds for which a stopping bridge still writes the queued records."""
POLL_SECONDS: Final = 0.02
"""Seconds between two checks of a condition that many tasks change."""
REQUEST_SECONDS: Final = 2.0
"""Timeout of each request that creates the plane. Requests to a stream without a leader are never answered."""


class Bridge:
    """Writes the events of engines to the log. `run` does so until an event is set.

    Raises `ConfigError` for watches whose name or registration is too large for the log.
    """

    def __init__(self, plane: PlaneSettings, settings: BridgeSettings, watches: Iterable[Watch] = ()) -> None:
        self.settings: Final = settings
        self._plane: Final = plane
        self.id: Final = f"{settings.name}#{secrets.token_hex(4)}"
        """Id of this process in the log."""
        self.resyncs = 0
        """Number of times that the bridge followed a stream again because the stream had diverged from the log."""
        self.name_conflict = ""
        """Process and host of another bridge that has the same name as this bridge; empty if no other bridge has this name."""
        self.partitions: list[PartitionWriter] = []
        self.liveness: Final = EngineLiveness(settings.dead_seconds)
        self.unclaimed: Final = UnclaimedEngines(settings.unclaimed_seconds)
        self.ready = asyncio.Event()
        """Set as soon as every partition has been read to its end, and the engines are followed."""
        self._watches: Final = {watch.key: watch.validate() for watch in watches}
        self._layout = Layout(plane.name, plane.partitions)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader = EngineReader(self.id, self._on_records, self._has_room, receive_queue=settings.receive_queue)
        self._client: PlaneClient | None = None
        self._follow_ids: dict[StreamKey, int] = {}
        self._last_follow_id = 0
        # Numbers of bytes in records. The reader's thread changes only the first counter, the event loop only the second.
        self._handed_over = self._taken_over = 0
        self._unread_since: float | None = None
        """Time at which the reader's thread stopped reading because the queues were full, or None while it reads."""
        self._process: Final = f"process {os.getpid()} at {socket.gethostname()}"

    # --- status of the bridge

    @property
    def is_connected(self) -> bool:
        """Whether the bridge is connected to a NATS server."""
        return self._client is not None and self._client.is_connected

    @property
    def written(self) -> int:
        """Number of batches that this bridge has written to the log."""
        return sum(partition.builder.written for partition in self.partitions)

    @property
    def invalid_records(self) -> int:
        """Number of invalid records in the log. No bridge writes invalid records, so a number above 0 shows a defect."""
        return sum(partition.builder.state.invalid_records for partition in self.partitions)

    @property
    def engine_conflict(self) -> str:
        """Sentence that names an engine whose name another bridge uses for another engine; empty without a conflict."""
        return next((partition.conflict for partition in self.partitions if partition.conflict), "")

    def trusts(self) -> dict[StreamKey, TrustRecord | None]:
        """Return the trust in each followed stream; None for a stream whose trust is not known yet."""
        return {key: self.liveness.reports.get(key) for key in self._watches}

    # --- tasks of the bridge

    async def run(self, stop: asyncio.Event) -> None:
        """Write until `stop` is set. Then write the queued records for at most `STOP_SECONDS`.

        Raises `PlaneError` if the servers cannot be used, and `ConfigError` if the servers do not accept the settings.
        """
        self._loop = asyncio.get_running_loop()
        plane = self._plane
        try:
            name = f"kvevents bridge {self.settings.name}"
            async with open_client(plane, name=name, on_state=self._on_state, wait_seconds=START_SECONDS) as client:
                self._client = client
                self._layout = layout = await self._create_plane(client)
                page_bytes = min(PAGE_BYTES, client.max_payload - PAGE_MARGIN_BYTES)
                if page_bytes < MIN_PAGE_BYTES:
                    raise ConfigError(
                        f"the servers' max_payload is {client.max_payload}; a plane needs at least "
                        f"{MIN_PAGE_BYTES + PAGE_MARGIN_BYTES}: raise it"
                    )
                self.partitions = [
                    PartitionWriter(client, layout, partition, plane, self.id, page_bytes, self._on_ready, self._on_diverged)
                    for partition in range(layout.partitions)
                ]
                await self._run_tasks(client.jetstream(timeout=REQUEST_SECONDS), stop)
        finally:
            await asyncio.to_thread(self._reader.stop)

    async def _create_plane(self, client: PlaneClient) -> Layout:
        """Create the plane. Raises `PlaneError`, `ConfigError`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + START_SECONDS
        transient = {"timeout"}  # faults that can end without action by an operator
        while True:
            try:
                await require_jetstream(client)
                transient = {"away", "timeout"}
                return await create_plane(client.jetstream(timeout=REQUEST_SECONDS), self._plane)
            except PlaneError as error:
                if error.fault not in transient or loop.time() > end:
                    raise
                log.warning("%s", error)
            await asyncio.sleep(ENGINE_CHECK_SECONDS)

    def _on_state(self, state: str) -> None:
        if state == "connected":
            for partition in self.partitions:
                partition.on_connected()

    async def _run_tasks(self, js: JetStreamContext, stop: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._reader.start()
                work = [run() for partition in self.partitions for run in (partition.read, partition.write)]
                work += [self._run_periodic_work(), self._set_ready(), self._watch_replicas(js)]
                running = [tasks.create_task(coroutine) for coroutine in work]
                await stop.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(STOP_SECONDS):
                        await self._drain()
                for task in running:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def _set_ready(self) -> None:
        for partition in self.partitions:
            await partition.ready.wait()
        self.ready.set()

    async def _drain(self) -> None:
        await asyncio.to_thread(self._reader.stop)
        while any(partition.builder.queued_records for partition in self.partitions):  # noqa: ASYNC110 - tasks change it
            await asyncio.sleep(POLL_SECONDS)

    # --- followed engines

    def watch(self, watches: Sequence[Watch]) -> None:
        """Follow exactly these ranks from now on. Call this in the event loop. Changes nothing if it raises `ConfigError`."""
        wanted = {watch.key: watch.validate() for watch in watches}
        for key in [key for key in self._watches if key not in wanted]:
            del self._watches[key]
            self._unfollow(key)
        for key, watch in wanted.items():
            known = self._watches.get(key)
            self._watches[key] = watch
            if known == watch or not self.partitions or not (partition := self._partition_of(key)).ready.is_set():
                continue  # if the partition is not ready, `_on_ready` will follow the stream
            if known is None or known.source != watch.source:
                self._resync(key)
            else:
                self._enqueue(partition, JoinRecord(*key, watch.registration))

    def _unfollow(self, key: StreamKey) -> None:
        self._reader.unfollow(key)
        self.liveness.forget(key)
        self._follow_ids.pop(key, None)
        if not self.partitions:
            return
        partition = self._partition_of(key)
        partition.paused.discard(key)
        partition.builder.resync(key)
        if self._is_reached_by_others(partition, key):
            self._withdraw_report(partition, key)
        else:
            partition.enqueue(LeaveRecord(*key, f"bridge {self.settings.name} no longer follows it"))

    def _withdraw_report(self, partition: PartitionWriter, key: StreamKey) -> None:
        """Withdraw the report about a stream that this bridge no longer follows, so that replicas do not use the report."""
        partition.enqueue(TrustRecord(*key, self.id, "", "", {}))

    def _is_reached_by_others(self, partition: PartitionWriter, key: StreamKey) -> bool:
        """Return whether another bridge that is alive reports that it reaches the stream's engine."""
        return any(report.trust in REACHED_STATES for report in self._reports_of_others(partition, key))

    def _reports_of_others(self, partition: PartitionWriter, key: StreamKey) -> list[TrustRecord]:
        """Return the reports about a stream from all other bridges that are alive."""
        now = asyncio.get_running_loop().time()
        stream = partition.builder.state.streams.get(key)
        reports = {} if stream is None else stream.trust_reports
        return [report for bridge, report in reports.items() if bridge != self.id and partition.peers.is_alive(bridge, now)]

    def _resync(self, key: StreamKey) -> None:
        """Follow a stream from the end of the log."""
        watch, partition = self._watches[key], self._partition_of(key)
        start = partition.builder.state.resume_point(key, self.id)
        partition.paused.discard(key)
        partition.builder.resync(key)
        self._enqueue(partition, JoinRecord(*key, watch.registration))
        self.liveness.reports.pop(key, None)
        self._reader.follow(watch.source, start, self._next_follow_id(key))

    def _is_stuck(self, partition: PartitionWriter) -> bool:
        """Return whether a partition accepts no pages and its queue exceeds the partition's share of `max_queued_bytes`."""
        share = self.settings.max_queued_bytes // (len(self.partitions) + 1)
        return bool(partition.fault) and partition.builder.queued_bytes > share

    def _pause_and_resume(self) -> None:
        stuck = {partition.partition for partition in self.partitions if self._is_stuck(partition)}
        for key in self._watches:
            partition = self._partition_of(key)
            if key not in partition.paused:
                if partition.partition in stuck:
                    self._pause(key, partition)
            elif partition.ready.is_set() and not partition.fault and not partition.builder.queued_records:
                self._resync(key)

    def _pause(self, key: StreamKey, partition: PartitionWriter) -> None:
        """Stop following a stream until the queue of its partition is written."""
        partition.paused.add(key)
        partition.paused_since = partition.paused_since or time.monotonic()
        self.liveness.forget(key)
        self._next_follow_id(key)
        self._reader.unfollow(key)

    def _next_follow_id(self, key: StreamKey) -> int:
        self._last_follow_id += 1
        self._follow_ids[key] = self._last_follow_id
        return self._last_follow_id

    def _partition_of(self, key: StreamKey) -> PartitionWriter:
        return self.partitions[self._layout.partition_of(key[0])]

    def _enqueue(self, partition: PartitionWriter, record: StreamRecord, delay: float = 0.0) -> None:
        partition.enqueue(record, asyncio.get_running_loop().time() + delay)

    # --- events of partitions

    def _on_ready(self, writer: PartitionWriter) -> None:
        """Follow the streams of a partition that has become ready, from the end of the log."""
        for key in self._watches:
            if self._partition_of(key) is writer:
                self._resync(key)
        for key, stream in writer.builder.state.streams.items():
            if stream.registration is not None and self.id in stream.trust_reports and key not in self._watches:
                writer.builder.resync(key)
                self._withdraw_report(writer, key)

    def _on_diverged(self, keys: Sequence[StreamKey]) -> None:
        """Follow again the streams that have diverged from the log."""
        for key in keys:
            if key not in self._watches:
                self._partition_of(key).builder.forget(key)
                continue
            self.resyncs += 1
            log.info("%s has diverged from the log; following it again", stream_text(key))
            self._resync(key)

    # --- records from the reader's thread

    def _has_room(self) -> bool:
        # The queues of paused partitions do not count: they must not stop the reading of other partitions.
        queued = sum(partition.builder.queued_bytes for partition in self.partitions if not partition.paused)
        if queued + self._handed_over - self._taken_over < self.settings.max_queued_bytes:
            self._unread_since = None
            return True
        if self._unread_since is None:
            self._unread_since = time.monotonic()
        return False

    def _on_records(self, records: list[EngineRecord]) -> None:
        """Hand records over to the event loop; runs in the reader's thread."""
        loop = self._loop
        if loop is not None:
            # The reader's thread counts the bytes itself, because it can read a whole burst before the event loop counts a
            # record.
            size = sum(record_size(engine_record.record) for engine_record in records)
            self._handed_over += size
            with suppress(RuntimeError):  # the event loop might have ended
                loop.call_soon_threadsafe(self._queue_records, records, size)

    def _queue_records(self, records: list[EngineRecord], size: int) -> None:
        now = asyncio.get_running_loop().time()
        for record, follow_id in records:
            key = record.key
            if follow_id != self._follow_ids.get(key) or key not in self._watches:
                continue
            partition = self._partition_of(key)
            if isinstance(record, TrustRecord):
                self.liveness.reports[key] = record
            elif self._is_stuck(partition):
                self._pause(key, partition)
                continue
            is_held = isinstance(record, GapRecord) and partition.peers.has_other(now)
            self._enqueue(partition, record, GAP_HOLD_SECONDS if is_held else 0.0)
        self._taken_over += size

    # --- periodic work

    async def _run_periodic_work(self) -> None:
        settings = self.settings
        unclaimed_check_at = 0.0
        while True:
            now = asyncio.get_running_loop().time()
            if self._reader.failure is not None:
                raise PlaneError(f"the thread that follows the engines has failed: {self._reader.failure!r}", fault="closed")
            self._write_heartbeats(now)
            self._check_engines(now)
            if now >= unclaimed_check_at:
                unclaimed_check_at = now + min(MAX_UNCLAIMED_CHECK_SECONDS, settings.unclaimed_seconds / 4)
                self._check_unclaimed(now)
            self._pause_and_resume()
            self.name_conflict = next(
                (conflict for partition in self.partitions if (conflict := partition.peers.name_conflict(now))), ""
            )
            pause = min(ENGINE_CHECK_SECONDS, settings.heartbeat_seconds, settings.dead_seconds / 2)
            await asyncio.sleep(max(POLL_SECONDS, pause))

    async def _watch_replicas(self, js: JetStreamContext) -> None:
        """Create missing buckets, and let partitions start over that a replica cannot read because of missing pages.

        Before a partition starts over, a replica that has the pages gets time to write a snapshot.
        """
        buckets_at, since = 0.0, dict[int, float]()
        while True:
            await asyncio.sleep(MISSING_CHECK_SECONDS)
            now = time.monotonic()
            try:
                if now >= buckets_at:
                    await create_buckets(js, self._layout, self._plane)
                    buckets_at = now + BUCKET_CHECK_SECONDS
                digests = await read_digests(js, self._layout)
            except PlaneError as error:
                log.debug("%s", error)
                buckets_at = 0.0 if error.fault == "missing" else buckets_at
                continue
            missing = missing_pages(digests.values())
            since = {partition: since.get(partition, now) for partition in missing if partition < len(self.partitions)}
            for partition, began in since.items():
                is_held = any(partition in replica.partitions for replica in digests.values())
                if now - began >= (SNAPSHOT_WAIT_SECONDS if is_held else MISSING_PAGES_SECONDS):
                    self.partitions[partition].start_over(missing[partition])

    def _write_heartbeats(self, now: float) -> None:
        """Write due heartbeats. A partition that becomes ready, or begins or ceases to lag, gets a heartbeat at once."""
        interval = self.settings.heartbeat_seconds
        for partition in self.partitions:
            if not partition.ready.is_set():
                partition.heartbeat_at = 0.0  # a heartbeat that is queued now would be dropped when the partition becomes ready
                continue
            lag = self._lag(partition, now)
            is_lagging, is_due = lag > self.settings.max_lag_seconds, now >= partition.heartbeat_at
            if is_due:
                partition.heartbeat_at = now + interval
            if is_due or is_lagging != partition.is_lagging:
                partition.is_lagging, partition.conflict = is_lagging, self._conflict_in(partition, now)
                suspicion, reported = self.liveness.suspicion, lag if is_lagging else 0.0
                heartbeat = HeartbeatRecord(self.id, interval, suspicion, reported, self._process, now, partition.conflict)
                partition.set_heartbeat(heartbeat)

    def _conflict_in(self, partition: PartitionWriter, now: float) -> str:
        """Return a sentence about a stream whose name another bridge uses for another engine; empty without a conflict."""
        for key, stream in partition.builder.state.streams.items():
            if (watch := self._watches.get(key)) is None:
                continue
            bridges = stream.differing_bridges(
                lambda bridge: bridge == self.id or partition.peers.is_alive(bridge, now, CONFLICT_INTERVALS)
            )
            own = engine_digest(watch.registration) if bridges else b""
            if names := sorted({bridge_name(bridge) for bridge in bridges if stream.engines[bridge] != own}):
                return f"{stream_text(key)} is another engine for bridge {', '.join(names)}: give each engine its own name"
        return ""

    def _lag(self, partition: PartitionWriter, now: float) -> float:
        """Return the seconds for which the oldest record has waited, or for which nothing was read, whichever is longer."""
        if not partition.paused:
            partition.paused_since = None
        since = (self._unread_since, partition.paused_since)
        return max(partition.builder.lag(now), *(now - began for began in since if began is not None), 0.0)

    def _check_engines(self, now: float) -> None:
        joined: list[StreamKey] = []
        for key in self._watches:
            partition, report = self._partition_of(key), self.liveness.reports.get(key)
            if not partition.ready.is_set():
                continue
            stream = partition.builder.state.streams.get(key)
            if stream is not None and stream.registration is not None:
                joined.append(key)
                known = stream.trust_reports.get(self.id)
                if report is not None and (known is None or (known.trust, known.reason) != (report.trust, report.reason)):
                    partition.enqueue(report)
            is_idle = not partition.builder.has_queued(key) and key not in partition.builder.diverged
            if is_idle and self._is_lost(partition, key):
                partition.mark_diverged(key)  # another bridge has removed or replaced a stream that this bridge reaches
        for key in self.liveness.dead_streams(joined, now):
            partition = self._partition_of(key)
            if not partition.builder.has_queued(key) and not self._is_reached_by_others(partition, key):
                partition.enqueue(LeaveRecord(*key, f"unreachable for {self.settings.dead_seconds:g} s"))

    def _is_lost(self, partition: PartitionWriter, key: StreamKey) -> bool:
        """Return whether the log lacks a stream whose engine this bridge reaches.

        The log lacks a stream that has left it, or a stream whose incarnation in the log no bridge follows.
        """
        if not self.liveness.is_reached(key) or not partition.builder.is_replaced(key):
            return False
        stream = partition.builder.state.streams.get(key)
        has_left = stream is None or stream.registration is None or partition.builder.has_left(key)
        return has_left or not self._reports_of_others(partition, key)

    def _check_unclaimed(self, now: float) -> None:
        """Remove from the log all engines that no bridge has claimed for the time limit."""
        if any(partition.fault or not partition.ready.is_set() for partition in self.partitions):
            self.unclaimed.clear()
            return
        joined = {key: partition for partition in self.partitions for key in partition.builder.state.registrations()}
        unclaimed = [
            key for key, partition in joined.items() if key not in self._watches and not self._reports_of_others(partition, key)
        ]
        for key in self.unclaimed.expired_streams(joined, unclaimed, now):
            partition = joined[key]
            if not partition.builder.has_queued(key):
                partition.builder.resync(key)
                partition.enqueue(LeaveRecord(*key, f"no bridge has claimed it for {self.settings.unclaimed_seconds:g} s"))
