"""The index that a replica builds from the partitions of a plane's log, and the snapshots of partitions that it writes."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, TypeVar

from kvevents.errors import KVEventsError, PlaneError, SnapshotError
from kvevents.index import PrefixIndex
from kvevents.service.fleet.follower import Follower, IndexSink
from kvevents.stream import DegradedReason
from kvevents_plane.digests import ConsistencyCheck, ReplicaDigests
from kvevents_plane.layout import Layout, PartitionInfo, partition_info
from kvevents_plane.log_subscriber import LogSubscriber
from kvevents_plane.nats_client import PlaneClient
from kvevents_plane.partition_reader import OnMessages, PartitionReader, ReadFailure
from kvevents_plane.partition_state import PartitionState
from kvevents_plane.records import ReceivedMessage, StreamKey, Tail
from kvevents_plane.settings import ReaderLimits
from kvevents_plane.snapshots import SnapshotBody, SnapshotInfo, Snapshots, capture, stream_digests, temporary_file

log = logging.getLogger(__name__)
T = TypeVar("T")

CHECK_SECONDS: Final = 0.05
"""Seconds between two checks of the partition readers."""
MAX_QUEUED_BYTES: Final = 128 << 20
"""Maximum number of bytes in received pages that wait to be applied. Above this size, reading pauses."""
SNAPSHOT_SECONDS: Final = 60.0
"""Timeout in seconds for the follower's thread to write a snapshot to the disk."""
MAX_SNAPSHOT_LOADS: Final = 4
"""Maximum number of snapshots that are loaded at the same time."""
MISSING_PAGES_SECONDS: Final = 1.0
"""Seconds between two searches for a snapshot that contains a partition's missing pages."""
FULL_FOLDER_SECONDS: Final = 10.0
"""Seconds until the next attempt to read a snapshot that did not fit into the temporary folder."""
MAX_BLOCKED_SECONDS: Final = 5.0
"""Seconds for which a partition must be unreadable before queries are answered without that partition."""


class IndexBuild:
    """An index of all partitions of a plane. Each partition is read independently. A damaged partition is read again.

    All methods must be called in one event loop.
    """

    def __init__(
        self, client: PlaneClient, layout: Layout, snapshots: Snapshots, index: PrefixIndex, limits: ReaderLimits
    ) -> None:
        self.index: Final = index
        sink = IndexSink(index)
        self.subscriber: Final = LogSubscriber(time.monotonic, lambda key: stream_digests(index, [key]).get(key), sink, limits)
        self.follower: Final = Follower(self.subscriber, sink)
        self.stream_ids: dict[int, str] = {}
        """Id of the JetStream stream of each partition whose reading has begun."""
        self.loaded_snapshots: dict[int, str] = {}
        """Name of the snapshot with which the reading of each partition began."""
        self.complete: Final = set[int]()
        """Partitions that were read to their ends."""
        self._ever_complete: Final = set[int]()
        """Partitions that were in `complete` at any time."""
        self.newest: dict[int, SnapshotInfo] = {}
        """Newest known snapshot of each partition."""
        self.missing: Final = dict[int, int]()
        """Partitions with missing pages that no readable snapshot contains, each with the first page after the missing ones."""
        self.rereads = 0
        """Number of times that the reading of a partition began again because it could not continue."""
        self.rebuild_reason = ""
        """Why this build must be replaced; empty if it can be kept."""
        self.disputed: Final = set[int]()
        """Partitions that were read again, or must be read again, because a page was disputed (`ReadFailure`)."""
        self._client: Final = client
        self._limits: Final = limits
        self._layout: Final = layout
        self._snapshots: Final = snapshots
        self._loads: Final = asyncio.Semaphore(MAX_SNAPSHOT_LOADS)
        self._tasks: Final = dict[int, asyncio.Task[None]]()
        self._readers: Final = dict[int, PartitionReader]()
        self._faults: Final = dict[int, str]()
        """Maps each partition whose reading cannot begin to the reason."""
        self._blocked_since: Final = dict[int, float]()
        """Maps each partition that is incomplete because of a fault to the time at which the fault was first seen."""
        self._first_pages: Final = dict[int, int]()
        """Maps each partition with a hole (`PartitionReader`) to the first page after the hole."""
        self._known_snapshots: Final = dict[int, set[str]]()
        """Maps each partition to the names of the snapshots that existed when its reading began."""
        self._unreadable: dict[int, dict[str, str]] = {}
        """Maps each partition to its unreadable snapshots, by name, with the reason. Reading began with an older snapshot."""
        self._logged: Final = set[str]()
        self.follower.start()

    async def end(self) -> None:
        """Stop reading the partitions and applying pages."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.to_thread(self.follower.stop)

    def on_connected(self) -> None:
        """Request a check of all partitions, because the servers might have lost pages."""
        for reader in self._readers.values():
            reader.request_check()

    @property
    def fault(self) -> str:
        """Why one of the partitions cannot be read at the moment; empty if all partitions can be read."""
        return next((fault for partition in range(self._layout.partitions) if (fault := self._fault_of(partition))), "")

    def _fault_of(self, partition: int) -> str:
        progress = self.subscriber.partitions.get(partition)
        return self._faults.get(partition, "") or ("" if progress is None else progress.fault)

    @property
    def unreadable_snapshots(self) -> list[str]:
        """A sentence for each partition whose newest snapshots could not be read, until a newer snapshot is found."""
        return [next(iter(sentences.values())) for sentences in list(self._unreadable.values())]

    # --- partitions

    @property
    def is_complete(self) -> bool:
        """Whether all partitions were read to their ends."""
        return len(self.complete) == self._layout.partitions

    @property
    def is_usable(self) -> bool:
        """Whether queries can be answered: a partition is complete, and all others had faults for `MAX_BLOCKED_SECONDS`."""
        limit = time.monotonic() - MAX_BLOCKED_SECONDS
        others = set(range(self._layout.partitions)) - self.complete
        return bool(self.complete) and all(self._blocked_since.get(partition, limit) < limit for partition in others)

    async def advance(self) -> None:
        """Begin to read the partitions that are not being read, and record which partitions were read to their ends."""
        for partition in range(self._layout.partitions):
            task = self._tasks.get(partition)
            if task is None:
                self._tasks[partition] = asyncio.create_task(self._follow_partition(partition))
            elif task.done():
                task.result()
            is_complete = partition in self.complete or await self._submit(
                lambda partition=partition: self.subscriber.is_complete(partition)  # type: ignore[misc]
            )
            if is_complete:
                self.complete.add(partition)
                self._ever_complete.add(partition)
            if is_complete or not self._fault_of(partition):
                self._blocked_since.pop(partition, None)
            else:
                self._blocked_since.setdefault(partition, time.monotonic())

    async def _follow_partition(self, partition: int) -> None:
        """Read one partition. Begin again whenever reading cannot continue."""
        while True:
            try:
                state = await self._begin_partition(partition)
                self._faults.pop(partition, None)
                self.missing.pop(partition, None)
                await self._read_partition(partition, state.tail)
            except PlaneError as error:
                if self._faults.get(partition) != str(error):
                    log.warning("%s", error)
                self._faults[partition] = str(error)
                if error.fault == "full":  # a pause, because each attempt transfers the snapshot again
                    await asyncio.sleep(FULL_FOLDER_SECONDS)
            await asyncio.sleep(self._limits.retry_seconds)

    async def _begin_partition(self, partition: int) -> PartitionState:
        info = await partition_info(self._client.jetstream(), self._layout, partition)
        info = info._replace(first=max(info.first, self._first_pages.get(partition, 0)))
        async with self._loads:
            await self._submit(lambda: self._remove_streams(partition))
            state, degraded_reasons = await self._restore_partition(partition, info)
        self.stream_ids[partition] = info.stream_id
        if state.unknown_prefix:
            await self._find_reset(partition, state, info)
        await self._submit(lambda: self.subscriber.add_partition(partition, state, degraded_reasons))
        return state

    async def _restore_partition(
        self, partition: int, info: PartitionInfo
    ) -> tuple[PartitionState, Mapping[StreamKey, frozenset[DegradedReason]]]:
        """Load the newest readable snapshot of a partition into the index, and return the state of the partition."""
        known: dict[int, Any]
        for known in (self.loaded_snapshots, self.newest, self._unreadable):
            known.pop(partition, None)
        self._known_snapshots[partition] = await self._list_snapshots(partition)
        for snapshot in await self._snapshots.list_matching(partition, info):
            try:
                state, degraded_reasons = await self._snapshots.load(snapshot, self.index)
            except (SnapshotError, PlaneError) as error:
                if isinstance(error, PlaneError) and error.fault not in {"missing", "timeout"}:
                    raise
                self._record_unreadable(snapshot, str(error))
                continue
            self.newest[partition] = snapshot
            if not _are_pages_missing(state.position, info):
                self.loaded_snapshots[partition] = snapshot.name
                return state, degraded_reasons
            await self._submit(lambda state=state: self._forget_streams(state.streams))  # type: ignore[misc]
        if _are_pages_missing(0, info):
            why = "; ".join(self._unreadable.get(partition, {}).values())
            missing_pages = f"pages of partition {partition} are missing that no snapshot covers" + (why and f", and {why}")
            return PartitionState.after_unknown_prefix(info.first - 1, missing_pages), {}
        return PartitionState(), {}

    async def _find_reset(self, partition: int, state: PartitionState, info: PartitionInfo) -> None:
        """Read the pages after the missing pages until a page at which all streams start over. Wait if none exists yet.

        Raises `PlaneError` if a snapshot has been written, because reading can then begin with this snapshot.
        """
        reason = state.unknown_prefix

        def apply(messages: list[ReceivedMessage]) -> None:
            for message in messages:
                if state.unknown_prefix:
                    state.receive(message, partition)

        reader = self._create_reader(partition, state.tail, apply)
        reading = asyncio.create_task(reader.run())
        search_at = time.monotonic() + MISSING_PAGES_SECONDS
        try:
            while state.unknown_prefix and not reading.done():
                await asyncio.sleep(CHECK_SECONDS)
                if reader.caught_up.is_set() and state.unknown_prefix:
                    self.missing[partition], self._faults[partition] = info.first, f"cannot complete the index: {reason}"
                if time.monotonic() > search_at:
                    search_at = time.monotonic() + MISSING_PAGES_SECONDS
                    if await self._list_snapshots(partition) - self._known_snapshots[partition]:
                        break
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
        if reading.done() and not reading.cancelled():
            self._note_failure(partition, reading.result())
        if state.unknown_prefix:
            raise PlaneError(f"cannot complete the index: {reason}", fault="missing")

    async def _list_snapshots(self, partition: int) -> set[str]:
        return {snapshot.name for snapshot in await self._snapshots.list_valid(partition)}

    def _record_unreadable(self, snapshot: SnapshotInfo, why: str) -> None:
        self._unreadable.setdefault(snapshot.partition, {})[snapshot.name] = why
        if why not in self._logged:  # log each sentence once, because reading a partition with missing pages begins repeatedly
            self._logged.add(why)
            log.warning("%s", why)

    def _remove_streams(self, partition: int) -> None:
        """Remove the blocks of a partition that is read again. If the partition was never complete, also remove its engines."""
        if (state := self.subscriber.states.get(partition)) is None:
            return
        self._forget_streams(state.streams)
        if partition not in self._ever_complete:
            fault = self._fault_of(partition)
            self.subscriber.add_partition(partition, PartitionState(), {})
            self.subscriber.mark_broken(partition, fault)

    def _forget_streams(self, keys: Iterable[StreamKey]) -> None:
        for key in list(keys):
            self.index.remove_worker(key)
            self.index.readmit(key)

    def _submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(self.follower.submit(work))

    def _create_reader(self, partition: int, tail: Tail, on_messages: OnMessages) -> PartitionReader:
        stream_id = self.stream_ids[partition]
        reader = PartitionReader(self._client, self._layout, partition, tail, stream_id, on_messages, limits=self._limits)
        reader.resolves_disputes = partition in self.disputed
        self._readers[partition] = reader
        return reader

    async def _read_partition(self, partition: int, tail: Tail) -> None:
        """Read one partition until reading cannot continue. Pause while `MAX_QUEUED_BYTES` of pages wait."""
        subscriber = self.subscriber
        while True:
            reader = self._create_reader(partition, tail, lambda came: subscriber.put(partition, came))
            reading = asyncio.create_task(reader.run())
            try:
                while subscriber.queued_bytes < MAX_QUEUED_BYTES:
                    done, _ = await asyncio.wait({reading}, timeout=CHECK_SECONDS)
                    subscriber.report_progress(partition, reader.lag, reader.fault)
                    if done:
                        self._note_failure(partition, reading.result())
                        return
            finally:
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading
            tail = reader.tail
            while subscriber.queued_bytes > MAX_QUEUED_BYTES // 2:  # noqa: ASYNC110 - a thread takes the queued pages
                await asyncio.sleep(CHECK_SECONDS)

    def _note_failure(self, partition: int, failure: ReadFailure) -> None:
        """Record why reading cannot continue. The partition's streams are STALE until its reading begins again."""
        if failure.reason == "disputed":
            self.disputed.add(partition)
        if failure.reason == "purged":
            self._first_pages[partition] = failure.first
        else:
            self._first_pages.pop(partition, None)  # other messages can now have the sequence numbers of pages that were read
        self.complete.discard(partition)
        self.rereads += 1
        fault = f"partition {partition} was {failure.reason}"
        log.warning("%s; it is read again", fault)
        self.subscriber.mark_broken(partition, fault)

    # --- snapshots

    def snapshot_ages(self) -> dict[int, float]:
        """Return, for each partition, the number of seconds since this process found the newest snapshot."""
        ages = {partition: self._snapshots.newest_age(partition) for partition in list(self.newest)}
        return {partition: age for partition, age in ages.items() if age is not None}

    def record(self, snapshot: SnapshotInfo) -> None:
        """Record a readable snapshot of a partition."""
        self.newest[snapshot.partition] = snapshot
        if snapshot.name not in self._unreadable.get(snapshot.partition, ()):
            self._unreadable.pop(snapshot.partition, None)

    def digests(self) -> ReplicaDigests:
        """Return this replica's published data: digests of the complete partitions, and partitions with missing pages."""
        known, progress = dict(self.subscriber.digests), self.subscriber.partitions
        return ReplicaDigests(
            {partition: list(known.get(partition, ())) for partition in self.complete},
            self.missing,
            {partition: progress[partition].position for partition in self.complete},
        )

    async def capture_snapshot(self, partition: int, path: Path) -> tuple[SnapshotBody, int]:
        """Write a snapshot of a partition to `path`. Return its metadata and its approximate number of blocks.

        Raises `SnapshotError`, and `TimeoutError` after `SNAPSHOT_SECONDS`.
        """
        subscriber = self.subscriber
        # The follower's thread writes the snapshot, so that the degraded reasons and the index are from the same moment.
        pending = self._submit(
            lambda: capture(partition, subscriber.states[partition], subscriber.degraded_reasons(), self.index, path)
        )
        async with asyncio.timeout(SNAPSHOT_SECONDS):
            taken = await pending
        # Another thread counts the blocks: the follower's thread has no time to read every worker for each partition.
        infos = await asyncio.to_thread(self.index.workers)
        return taken, sum(info.blocks for info in infos if (info.source, info.rank) in taken.digests)


def _are_pages_missing(position: int, state: PartitionInfo) -> bool:
    """Return whether pages after a position are missing from the log."""
    return position + 1 < state.first and position < state.last


FRESH_FRACTION: Final = 0.8
"""Fraction of the snapshot interval for which a snapshot counts as new, beginning when this replica finds it."""
CHECKS_PER_INTERVAL: Final = 50
"""Number of checks for due snapshots in one snapshot interval."""
MAX_CHECK_SECONDS: Final = 0.5
"""Maximum number of seconds between two checks for due snapshots."""
MISSED_TURN_SECONDS: Final = 2.0
"""If other replicas lack pages, a replica delays its snapshot by this many seconds for each replica before it in the order."""


class Snapshotter:
    """Writes snapshots of the partitions of one replica when it is this replica's turn.

    The replicas that publish digests take turns: for each partition, rendezvous hashing of their names gives all replicas the
    same order without any message. The first replica writes the partition's snapshots. Every further replica waits one interval
    longer than its predecessor, which might be alive but unable to write. Two replicas that know different names can both
    write. In this case, the second replica finds that the list of snapshots has changed, and discards its own snapshot.

    If another replica lacks pages that this replica has, a snapshot is due at once.
    """

    def __init__(self, name: str, consistency: ConsistencyCheck, seconds: float) -> None:
        self._name: Final = name
        self._consistency: Final = consistency
        self._seconds: Final = seconds
        self._due: dict[int, float] = {}
        self._since = 0.0
        self._faults: dict[int, str] = {}

    @property
    def fault(self) -> str:
        """Why the newest due snapshot of a partition was not written; empty if all due snapshots were written."""
        return next(iter(self._faults.values()), "")

    async def run(self, layout: Layout, snapshots: Snapshots, build: IndexBuild) -> None:
        """Write snapshots until cancelled. `build` is the build that answers queries.

        Partitions are due at different times, so that their snapshots do not coincide.
        """
        self._since = now = time.monotonic()
        self._due = {partition: now + random.uniform(0.0, self._seconds) for partition in range(layout.partitions)}  # noqa: S311
        self._faults = {}
        while True:
            await asyncio.sleep(min(self._seconds / CHECKS_PER_INTERVAL, MAX_CHECK_SECONDS))
            for partition in self._due:
                if self._is_missed(partition, build):
                    earlier = count_earlier_replicas(self._name, self._consistency.complete_replicas, partition)
                    wait = MISSED_TURN_SECONDS * earlier
                    self._due[partition] = min(self._due[partition], time.monotonic() + wait)
            for partition in sorted(self._due, key=self._due.__getitem__):
                if self._due[partition] > time.monotonic():
                    break
                self._due[partition] = time.monotonic() + self._seconds
                # While digests differ, this replica's index might be wrong, so the replica writes no snapshot.
                if self._consistency.differs_since is None and partition in build.complete:
                    await self._write_if_due(partition, snapshots, build)

    def _is_missed(self, partition: int, build: IndexBuild) -> bool:
        """Return whether another replica lacks pages of a partition, which this replica has and no known snapshot contains."""
        newest = build.newest.get(partition)
        return 1 + (0 if newest is None else newest.position) < self._consistency.missing.get(partition, 0)

    async def _write_if_due(self, partition: int, snapshots: Snapshots, build: IndexBuild) -> None:
        """Write a snapshot if it is this replica's turn. After an error, which `fault` reports, the next interval retries."""
        try:
            if not await self._is_new_enough(partition, snapshots, build):
                if self._consistency.write_fault:  # without permission for digests, snapshots are forbidden too
                    raise PlaneError(self._consistency.write_fault, fault="denied")
                stream_id = build.stream_ids[partition]
                with temporary_file() as path:
                    taken, blocks = await build.capture_snapshot(partition, path)
                    build.record(await snapshots.save(taken, path, blocks, self._name, stream_id))
        except (KVEventsError, OSError, TimeoutError) as error:
            self._set_fault(partition, error)
        else:
            self._faults.pop(partition, None)

    async def _is_new_enough(self, partition: int, snapshots: Snapshots, build: IndexBuild) -> bool:
        """Return whether the newest valid snapshot of any replica is new enough for this replica's turn."""
        valid = await snapshots.list_valid(partition)
        if valid:
            build.record(valid[0])
        known_for = snapshots.newest_age(partition)
        if self._is_missed(partition, build):
            return False
        intervals = count_earlier_replicas(self._name, self._consistency.others, partition)
        if known_for is None:
            return time.monotonic() - self._since < self._seconds * intervals
        return known_for < self._seconds * (FRESH_FRACTION + intervals)

    def _set_fault(self, partition: int, error: Exception) -> None:
        fault = f"partition {partition}: {str(error) or 'it was not written in time'}"
        denied = isinstance(error, PlaneError) and error.fault == "denied"
        # A replica that has no permission for one snapshot has no permission for any.
        if fault != self._faults.get(partition) and not (denied and self._faults):
            log.warning("no snapshot was written: %s", fault)
        self._faults[partition] = fault


def count_earlier_replicas(name: str, others: Collection[str], partition: int) -> int:
    """Return the number of replicas in `others` that write a partition's snapshots before the replica `name`."""

    def weight(replica: str) -> bytes:
        return sha256(f"{partition} {replica}".encode()).digest()

    return sum(weight(other) < weight(name) for other in others if other != name)
