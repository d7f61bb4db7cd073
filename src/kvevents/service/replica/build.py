"""An index that is built from partitions of a plane's log, and the snapshots of its partitions."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvevents.errors import KVEventsError, PlaneError, SnapshotError, UnknownSourceError
from kvevents.index import PrefixIndex
from kvevents.plane.layout import Layout, PartitionInfo, partition_info
from kvevents.plane.log_subscriber import LogSubscriber
from kvevents.plane.partition_reader import DEFAULT_LIMITS, PartitionReader
from kvevents.plane.partition_state import PartitionState
from kvevents.plane.records import StreamKey, Tail
from kvevents.plane.settings import ReaderLimits
from kvevents.plane.snapshots import SnapshotBody, SnapshotInfo, Snapshots, capture
from kvevents.service.fleet.follower import Follower, IndexSink
from kvevents.service.replica.consistency_check import ConsistencyCheck
from kvevents.stream import DegradedReason

if TYPE_CHECKING:
    from kvevents.plane.nats_client import PlaneClient


log = logging.getLogger(__name__)
T = TypeVar("T")

CHECK_SECONDS: Final = 0.05
"""Pause between two checks of the readers."""
MAX_QUEUED_BYTES: Final = 128 << 20
"""Size of received pages that are not applied yet, above which a partition is not read further."""
TAKE_SECONDS: Final = 60.0
"""Longest time for the follower's thread to write a snapshot to the disk."""
MISSING_PAGES_SECONDS: Final = 2.0
"""Pause between two attempts to begin a partition of which pages are missing."""


class IndexBuild:
    """An index of all partitions of a plane.

    Use it in one event loop.
    """

    def __init__(
        self,
        client: PlaneClient,
        layout: Layout,
        snapshots: Snapshots,
        index: PrefixIndex,
        settled: Collection[int] = (),
        limits: ReaderLimits = DEFAULT_LIMITS,
    ) -> None:
        self.index: Final = index
        sink = IndexSink(index)
        self.subscriber: Final = LogSubscriber(time.monotonic, lambda key: _digest(index, key), sink, limits)
        self.follower: Final = Follower(self.subscriber, sink)
        self.stream_ids: dict[int, str] = {}
        """JetStream stream of each partition that was begun."""
        self.loaded_snapshots: dict[int, str] = {}
        """Snapshot with which each partition was begun."""
        self._complete: Final = set[int]()
        """Partitions that were read to their ends."""
        self.newest: dict[int, SnapshotInfo] = {}
        """Newest known snapshot of each partition."""
        self.rebuild_reason = ""
        """Why this build must be replaced; empty if it need not be."""
        self.settled: Final = set(settled)
        """Partitions that were read again because of a dispute (`PartitionReader`), or must be."""
        self._client: Final = client
        self._limits: Final = limits
        self._layout: Final = layout
        self._snapshots: Final = snapshots
        self._reading: dict[int, asyncio.Task[None]] = {}
        self._begun_at: dict[int, float] = {}
        self._unread: dict[int, dict[str, str]] = {}
        """Unreadable snapshots of each partition that are newer than the one with which it was begun, and why."""
        self._logged: Final = set[str]()
        self.follower.start()

    async def end(self) -> None:
        """Stop reading and applying."""
        for task in self._reading.values():
            task.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)
        await asyncio.to_thread(self.follower.stop)

    @property
    def fault(self) -> str:
        """Why a partition cannot be read at the moment; empty if all can."""
        return next((partition.fault for partition in self.subscriber.partitions.values() if partition.fault), "")

    @property
    def missing_pages(self) -> str:
        """Why a partition cannot be served: pages are missing that no snapshot covers; empty if all can."""
        return next((state.unknown_prefix for state in self.subscriber.states.values() if state.unknown_prefix), "")

    @property
    def unreadable_snapshots(self) -> list[str]:
        """Why the newest snapshots of a partition could not be read, until a newer one is found."""
        return [next(iter(sentences.values())) for sentences in list(self._unread.values())]

    # --- partitions

    @property
    def is_complete(self) -> bool:
        """Whether all partitions were read to their ends, so that queries can be answered."""
        return len(self._complete) == self._layout.partitions

    async def advance(self) -> None:
        """Begin the partitions that are not begun, and note those that were read to their ends.

        Raises `PlaneError` if the servers do not return the state of a partition.
        """
        partitions = range(self._layout.partitions)
        for partition in partitions:
            if partition not in self.stream_ids:
                await self._begin(partition)
        for partition in partitions:
            if partition not in self._complete and await self._order(
                lambda partition=partition: self.subscriber.is_complete(partition)  # type: ignore[misc]
            ):
                await self._end_reading(partition)

    async def _end_reading(self, partition: int) -> None:
        if not self.subscriber.states[partition].unknown_prefix:
            self._complete.add(partition)
        elif time.monotonic() - self._begun_at[partition] > MISSING_PAGES_SECONDS:
            # Another process may have written a snapshot or the whole partition meanwhile.
            await self._drop(partition)
            await self._begin(partition)

    async def _begin(self, partition: int) -> None:
        info = await partition_info(self._client.jetstream(), self._layout, partition)
        state, degraded_reasons = await self._restore_partition(partition, info)
        await self._order(lambda: self.subscriber.add_partition(partition, state, degraded_reasons))
        self.stream_ids[partition], self._begun_at[partition] = info.stream_id, time.monotonic()
        self._reading[partition] = asyncio.create_task(self._read(partition, state.tail))

    async def _restore_partition(
        self, partition: int, info: PartitionInfo
    ) -> tuple[PartitionState, Mapping[StreamKey, frozenset[DegradedReason]]]:
        """Load the newest readable snapshot of a partition into the index, and return the state of the partition."""
        for snapshot in await self._snapshots.matching(partition, info):
            with tempfile.TemporaryDirectory(prefix="kvevents-") as folder:
                try:
                    state, degraded_reasons = await self._snapshots.load(snapshot, self.index, Path(folder))
                except (SnapshotError, PlaneError) as error:
                    if isinstance(error, PlaneError) and error.fault not in {"missing", "timeout"}:
                        raise
                    self._record_unreadable(snapshot, str(error))
                    continue
            self.newest[partition] = snapshot
            if not _are_pages_missing(state.position, info):
                self.loaded_snapshots[partition] = snapshot.name
                return state, degraded_reasons
            self._forget(state.streams)
        if _are_pages_missing(0, info):
            why = "; ".join(self._unread.get(partition, {}).values())
            missing_pages = f"pages of partition {partition} are missing that no snapshot covers" + (why and f", and {why}")
            return PartitionState.after_unknown_prefix(info.first - 1, missing_pages), {}
        return PartitionState(), {}

    def _record_unreadable(self, snapshot: SnapshotInfo, why: str) -> None:
        self._unread.setdefault(snapshot.partition, {})[snapshot.name] = why
        if why not in self._logged:  # a partition with missing pages is begun repeatedly
            self._logged.add(why)
            log.warning("%s", why)

    async def _drop(self, partition: int) -> None:
        reading = self._reading.pop(partition)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await self._order(lambda: self._forget(self.subscriber.drop_partition(partition)))
        known: dict[int, Any]
        for known in (self.stream_ids, self.loaded_snapshots, self.newest, self._begun_at, self._unread):
            known.pop(partition, None)

    def _forget(self, keys: Collection[StreamKey]) -> None:
        for key in keys:
            self.index.remove_worker(key)
            self.index.readmit(key)

    def _order(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(self.follower.submit(work))

    async def _read(self, partition: int, tail: Tail) -> None:
        """Read one partition until it breaks. Pause while too many received pages wait."""
        subscriber = self.subscriber
        while True:
            reader = PartitionReader(
                self._client,
                self._layout,
                partition,
                tail,
                self.stream_ids[partition],
                lambda came: subscriber.put(partition, came),
            )
            reader.resolves_disputes = partition in self.settled
            reading = asyncio.create_task(reader.run())
            try:
                while subscriber.queued_bytes < MAX_QUEUED_BYTES:
                    done, _ = await asyncio.wait({reading}, timeout=CHECK_SECONDS)
                    subscriber.report_progress(partition, reader.lag, reader.fault)
                    if done:
                        why = reading.result().reason
                        if why == "disputed":
                            self.settled.add(partition)
                        self.rebuild_reason = f"partition {partition} was {why}"
                        subscriber.mark_broken(partition, self.rebuild_reason)
                        return
            finally:
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading
            tail = reader.tail
            while subscriber.queued_bytes > MAX_QUEUED_BYTES // 2:  # noqa: ASYNC110 - a thread takes it away
                await asyncio.sleep(CHECK_SECONDS)

    # --- snapshots

    def snapshot_ages(self) -> dict[int, float]:
        """Return the seconds since this process found the newest snapshot, by partition."""
        ages = {partition: self._snapshots.newest_age(partition) for partition in list(self.newest)}
        return {partition: age for partition, age in ages.items() if age is not None}

    def record(self, snapshot: SnapshotInfo) -> None:
        """Record a readable snapshot of a partition."""
        self.newest[snapshot.partition] = snapshot
        if snapshot.name not in self._unread.get(snapshot.partition, ()):
            self._unread.pop(snapshot.partition, None)

    async def take(self, partition: int, path: Path) -> tuple[SnapshotBody, int]:
        """Write a snapshot of a partition to `path`. Return its metadata and its approximate number of blocks.

        Raises `SnapshotError`, and `TimeoutError` after `TAKE_SECONDS`.
        """
        order = self.follower.submit(lambda: self._take(partition, path))
        async with asyncio.timeout(TAKE_SECONDS):
            taken = await asyncio.wrap_future(order)
        # Counted in another thread, since the follower's thread has no time to read every worker for each partition.
        infos = await asyncio.to_thread(self.index.workers)
        keys = {(source, rank) for source, rank, _ in taken.digests}
        return taken, sum(info.blocks for info in infos if (info.source, info.rank) in keys)

    def _take(self, partition: int, path: Path) -> SnapshotBody:
        """Write a snapshot in the follower's thread, so that ledger and index have the same state."""
        state = self.subscriber.states[partition]
        return capture(partition, state, self.subscriber.degraded_reasons(), self.index, path)


def _are_pages_missing(position: int, state: PartitionInfo) -> bool:
    """Return whether pages after a position are missing from the log."""
    return position + 1 < state.first and position < state.last


def _digest(index: PrefixIndex, key: StreamKey) -> str | None:
    with suppress(UnknownSourceError):
        return index.digest(key)
    return None


FRESH_FRACTION: Final = 0.8
"""Fraction of the snapshot interval for which a snapshot of another replica is new enough after it was found."""
CHECKS_PER_INTERVAL: Final = 50
"""Number of checks in one snapshot interval."""


class Snapshotter:
    """Writes snapshots of the partitions of one replica when it is this replica's turn.

    The replicas that publish digests take turns: for each partition, rendezvous hashing of their names gives an order, in which
    all of them agree without a message. The first writes the partition's snapshots. Each of the following waits one interval
    longer than the one before it, in case that one is alive but cannot write. Two replicas that know different names can both
    write; then the second finds another list of snapshots than it has read, and discards its own.
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
        """Why the last due snapshot of a partition was not written; empty if all were."""
        return next(iter(self._faults.values()), "")

    async def run(self, layout: Layout, snapshots: Snapshots, build: IndexBuild) -> None:
        """Write snapshots while `build` is the build that answers queries.

        Partitions have different times, so that their snapshots do not coincide.
        """
        self._since = now = time.monotonic()
        self._due = {partition: now + random.uniform(0.0, self._seconds) for partition in range(layout.partitions)}  # noqa: S311
        self._faults = {}
        while True:
            await asyncio.sleep(self._seconds / CHECKS_PER_INTERVAL)
            for partition in sorted(self._due, key=self._due.__getitem__):
                if self._due[partition] > time.monotonic():
                    break
                self._due[partition] = time.monotonic() + self._seconds
                # If digests differ, this index may be the wrong one.
                if not self._consistency.differs:
                    await self._write_if_due(partition, snapshots, build)

    async def _write_if_due(self, partition: int, snapshots: Snapshots, build: IndexBuild) -> None:
        """Write a snapshot if it is this replica's turn. An error is served in `fault`, and the next interval tries again."""
        try:
            if not await self._is_fresh(partition, snapshots, build):
                if self._consistency.write_fault:  # a router, which cannot write snapshots either
                    raise PlaneError(self._consistency.write_fault, fault="denied")
                build.record(await self._write(partition, snapshots, build))
        except (KVEventsError, OSError, TimeoutError) as error:
            self._set_fault(partition, error)
        else:
            self._faults.pop(partition, None)

    async def _is_fresh(self, partition: int, snapshots: Snapshots, build: IndexBuild) -> bool:
        """Return whether the newest valid snapshot of any replica is new enough for this replica's turn."""
        valid = await snapshots.list_valid(partition)
        if valid:
            build.record(valid[0])
        known_for = snapshots.newest_age(partition)
        intervals = turn(self._name, self._consistency.others, partition)
        if known_for is None:
            return time.monotonic() - self._since < self._seconds * intervals
        return known_for < self._seconds * (FRESH_FRACTION + intervals)

    def _set_fault(self, partition: int, error: Exception) -> None:
        fault = f"partition {partition}: {str(error) or 'it was not written in time'}"
        denied = isinstance(error, PlaneError) and error.fault == "denied"
        # A replica without permission for one snapshot has permission for none.
        if fault != self._faults.get(partition) and not (denied and self._faults):
            log.warning("no snapshot was written: %s", fault)
        self._faults[partition] = fault

    async def _write(self, partition: int, snapshots: Snapshots, build: IndexBuild) -> SnapshotInfo:
        made = build.stream_ids[partition]
        with tempfile.TemporaryDirectory(prefix="kvevents-") as folder:
            path = Path(folder, "index")
            taken, blocks = await build.take(partition, path)
            return await snapshots.save(taken, path, blocks, self._name, made)


def turn(name: str, others: Collection[str], partition: int) -> int:
    """Return how many of the other replicas write a partition's snapshots before the replica `name` does."""

    def weight(each: str) -> bytes:
        return sha256(f"{partition} {each}".encode()).digest()

    return sum(weight(each) < weight(name) for each in others if each != name)
