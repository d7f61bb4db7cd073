"""An index that is built from partitions of a plane's log, and the snapshots that are taken of it."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvevents.errors import KVEventsError, PlaneError, SnapshotError, UnknownSourceError
from kvevents.index import PrefixIndex
from kvevents.plane.layout import Layout, PartitionInfo, partition_info
from kvevents.plane.leases import Lease, LeaseHolder
from kvevents.plane.log_subscriber import LogSubscriber
from kvevents.plane.partition_reader import DEFAULT_LIMITS, PartitionReader
from kvevents.plane.partition_state import PartitionState
from kvevents.plane.records import StreamKey, Tail
from kvevents.plane.settings import ReaderLimits
from kvevents.plane.snapshots import SnapshotBody, SnapshotInfo, Snapshots, capture
from kvevents.service.follower import Follower, IndexSink
from kvevents.service.replica.coordination import ConsistencyCheck
from kvevents.stream import DegradedReason

if TYPE_CHECKING:
    from nats.js import JetStreamContext

    from kvevents.plane.nats_client import PlaneClient


log = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_SECONDS: Final = 0.05
"""Pause between two checks of the readers."""
MAX_QUEUED_BYTES: Final = 128 << 20
"""Size of received pages that are not applied yet, above which a partition is not read further."""
TAKE_SECONDS: Final = 60.0
"""Longest time for the follower's thread to write a snapshot to the disk."""
HOLE_SECONDS: Final = 2.0
"""Pause between two attempts to begin a partition of which pages are missing."""


class IndexBuild:
    """An index of some partitions. Each is *held* from when it is begun, and *shown* once it was read to its end.

    To be used in one event loop.
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
        """By partition that is held which stream it is."""
        self.began_with: dict[int, str] = {}
        """By partition the snapshot."""
        self.shown: frozenset[int] = frozenset()
        """Partitions that answers may be about; replaced as a whole."""
        self.newest: dict[int, SnapshotInfo] = {}
        """By partition the newest snapshot that is known."""
        self.broken = ""
        """Why it must be replaced; empty if it need not be."""
        self.settled: Final = set(settled)
        """Partitions that were read again because of a dispute (`PartitionReader`), or must be."""
        self._client: Final = client
        self._limits: Final = limits
        self._layout: Final = layout
        self._snapshots: Final = snapshots
        self._reading: dict[int, asyncio.Task[None]] = {}
        self._begun_at: dict[int, float] = {}
        self._unread: dict[int, dict[str, str]] = {}
        """By partition, the snapshots that are newer than the one that it was begun with, and why each could not be read."""
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
    def hole(self) -> str:
        """Why a partition cannot be shown: pages are gone that no snapshot stands for."""
        return next((state.unknown_prefix for state in self.subscriber.states.values() if state.unknown_prefix), "")

    @property
    def passed_over(self) -> list[str]:
        """By partition that was begun without them, why its newest snapshots could not be read; until there are others."""
        return [next(iter(sentences.values())) for sentences in list(self._unread.values())]

    # --- partitions

    async def adjust(self, wanted: Collection[int], spare: Collection[int]) -> None:
        """Begin wanted partitions, serve those that are read to their end, and release spare ones.

        Raises `PlaneError` where the servers do not say how a partition stands.
        """
        for partition in sorted(set(wanted) - self.stream_ids.keys()):
            await self._begin(partition)
        for partition in sorted(self.stream_ids.keys() - self.shown):
            if partition not in wanted:
                await self._drop(partition)
            elif await self._order(lambda partition=partition: self.subscriber.is_complete(partition)):  # type: ignore[misc]
                await self._complete(partition)
        for partition in self.shown.intersection(spare):
            self.shown -= {partition}
            await self._drop(partition)

    async def _complete(self, partition: int) -> None:
        if not self.subscriber.states[partition].unknown_prefix:
            self.shown |= {partition}
        elif time.monotonic() - self._begun_at[partition] > HOLE_SECONDS:
            # Somebody may have taken a snapshot, or have written the partition anew.
            await self._drop(partition)
            await self._begin(partition)

    async def _begin(self, partition: int) -> None:
        info = await partition_info(self._client.jetstream(), self._layout, partition)
        state, doubts = await self._restored(partition, info)
        await self._order(lambda: self.subscriber.add_partition(partition, state, doubts))
        self.stream_ids[partition], self._begun_at[partition] = info.stream_id, time.monotonic()
        self._reading[partition] = asyncio.create_task(self._read(partition, state.tail))

    async def _restored(
        self, partition: int, info: PartitionInfo
    ) -> tuple[PartitionState, Mapping[StreamKey, frozenset[DegradedReason]]]:
        """How a partition stands by the newest snapshot that can be read, whose blocks are in the index then."""
        for kept in await self._snapshots.matching(partition, info):
            with tempfile.TemporaryDirectory(prefix="kvevents-") as folder:
                try:
                    state, doubts = await self._snapshots.load(kept, self.index, Path(folder))
                except (SnapshotError, PlaneError) as error:
                    if isinstance(error, PlaneError) and error.fault not in {"missing", "timeout"}:
                        raise
                    self._pass_over(kept, str(error))
                    continue
            self.newest[partition] = kept
            if not _is_gone(state.position, info):
                self.began_with[partition] = kept.name
                return state, doubts
            self._forget(state.streams)
        if _is_gone(0, info):
            why = "; ".join(self._unread.get(partition, {}).values())
            hole = f"pages of partition {partition} are gone that no snapshot stands for" + (f", and {why}" if why else "")
            return PartitionState.after_unknown_prefix(info.first - 1, hole), {}
        return PartitionState(), {}

    def _pass_over(self, kept: SnapshotInfo, why: str) -> None:
        self._unread.setdefault(kept.partition, {})[kept.name] = why
        if why not in self._logged:  # a partition with a hole is begun again and again
            self._logged.add(why)
            log.warning("%s", why)

    async def _drop(self, partition: int) -> None:
        reading = self._reading.pop(partition)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await self._order(lambda: self._forget(self.subscriber.drop_partition(partition)))
        known: dict[int, Any]
        for known in (self.stream_ids, self.began_with, self.newest, self._begun_at, self._unread):
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
                    done, _ = await asyncio.wait({reading}, timeout=LOOK_SECONDS)
                    subscriber.report_progress(partition, reader.lag, reader.fault)
                    if done:
                        why = reading.result().reason
                        if why == "disputed":
                            self.settled.add(partition)
                        self.broken = f"partition {partition} was {why}"
                        subscriber.mark_broken(partition, self.broken)
                        return
            finally:
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading
            tail = reader.tail
            while subscriber.queued_bytes > MAX_QUEUED_BYTES // 2:  # noqa: ASYNC110 - a thread takes it away
                await asyncio.sleep(LOOK_SECONDS)

    # --- snapshots

    def snapshot_ages(self) -> dict[int, float]:
        """By partition, seconds since this process found its newest snapshot."""
        ages = {partition: self._snapshots.newest_age(partition) for partition in list(self.newest)}
        return {partition: age for partition, age in ages.items() if age is not None}

    def know(self, kept: SnapshotInfo) -> None:
        """That a snapshot of a partition counts."""
        if kept.partition in self.stream_ids:
            self.newest[kept.partition] = kept
            if kept.name not in self._unread.get(kept.partition, ()):
                self._unread.pop(kept.partition, None)

    async def take(self, partition: int, path: Path) -> tuple[SnapshotBody, int]:
        """A snapshot of a partition at `path`, and about how many blocks it has.

        Raises `SnapshotError`, and `TimeoutError` where it is too slow.
        """
        order = self.follower.submit(lambda: self._take(partition, path))
        async with asyncio.timeout(TAKE_SECONDS):
            taken = await asyncio.wrap_future(order)
        # Counted aside: the thread that applies has no time to look at every worker for each partition.
        infos = await asyncio.to_thread(self.index.workers)
        keys = {(source, rank) for source, rank, _ in taken.digests}
        return taken, sum(info.blocks for info in infos if (info.source, info.rank) in keys)

    def _take(self, partition: int, path: Path) -> SnapshotBody:
        """By the thread that applies: ledger and index are of one moment then."""
        state = self.subscriber.states.get(partition)
        if state is None:
            raise SnapshotError(f"partition {partition} is no longer held here; another replica takes its snapshots")
        return capture(partition, state, self.subscriber.doubts(), self.index, path)


def _is_gone(position: int, state: PartitionInfo) -> bool:
    """Return whether pages after a position are missing from the log."""
    return position + 1 < state.first and position < state.last


def _digest(index: PrefixIndex, key: StreamKey) -> str | None:
    with suppress(UnknownSourceError):
        return index.digest(key)
    return None


LEASE: Final = "lease.snapshot"
"""Prefix of the lease keys. The replica with the lease of a partition writes its next snapshot."""
FRESH: Final = 0.8
"""Fraction of the snapshot interval for which a snapshot of another replica is new enough after it was found."""
LOOKS: Final = 50
"""Number of checks in one snapshot interval."""


class Snapshotter:
    """Takes snapshots of the partitions of one replica, each under a lease."""

    def __init__(self, name: str, comparing: ConsistencyCheck, seconds: float) -> None:
        self._name: Final = name
        self._comparing: Final = comparing
        self._seconds: Final = seconds
        self._due: dict[int, float] = {}
        self._faults: dict[int, str] = {}

    @property
    def fault(self) -> str:
        """Why a partition's last snapshot that was due was not taken; empty where all were."""
        return next(iter(self._faults.values()), "")

    async def run(self, js: JetStreamContext, layout: Layout, snapshots: Snapshots, generation: IndexBuild) -> None:
        """As long as a generation answers. Partitions have different times, so that the work of one is never that of all."""
        self._due, self._faults = {}, {}
        while True:
            await asyncio.sleep(self._seconds / LOOKS)
            now = time.monotonic()
            shown = generation.shown
            self._due = {partition: self._due.get(partition, now + random.uniform(0.0, self._seconds)) for partition in shown}  # noqa: S311
            for partition in sorted(shown, key=self._due.__getitem__):
                if self._due[partition] > time.monotonic():
                    break
                self._due[partition] = time.monotonic() + self._seconds
                # If digests differ, this index may be the wrong one.
                if not self._comparing.differs and partition in generation.shown:
                    await self._take(
                        Lease(js, layout, f"{LEASE}.{partition}", LeaseHolder.current()), partition, snapshots, generation
                    )

    async def _take(self, lease: Lease, partition: int, snapshots: Snapshots, generation: IndexBuild) -> None:
        """Write a snapshot, unless another replica does. What the servers do not take shows, and is tried again."""
        try:
            # Asked for again with the lease, for who had it before may just have taken one.
            if (
                not await self._is_fresh(partition, snapshots, generation)
                and await lease.acquire()
                and not await self._is_fresh(partition, snapshots, generation)
            ):
                generation.know(await self._take_within(lease, partition, snapshots, generation))
        except (KVEventsError, OSError, TimeoutError) as error:
            self._tell(partition, error)
        else:
            self._faults.pop(partition, None)
        finally:
            await lease.release()

    async def _is_fresh(self, partition: int, snapshots: Snapshots, generation: IndexBuild) -> bool:
        """Return whether the newest valid snapshot of any replica is new enough."""
        kept = await snapshots.list_valid(partition)
        if kept:
            generation.know(kept[0])
        known_for = snapshots.newest_age(partition)
        return known_for is not None and known_for < self._seconds * FRESH

    def _tell(self, partition: int, error: Exception) -> None:
        fault = f"partition {partition}: {str(error) or 'it was not written in time'}"
        denied = isinstance(error, PlaneError) and error.fault == "denied"
        # A replica without permission for one snapshot has permission for none.
        if fault != self._faults.get(partition) and not (denied and self._faults):
            log.warning("no snapshot was taken: %s", fault)
        self._faults[partition] = fault

    async def _take_within(self, lease: Lease, partition: int, snapshots: Snapshots, generation: IndexBuild) -> SnapshotInfo:
        made = generation.stream_ids.get(partition, "")  # nothing comes of one that was let go meanwhile
        keeping = asyncio.create_task(lease.renew_until_lost())
        try:
            with tempfile.TemporaryDirectory(prefix="kvevents-") as folder:
                path = Path(folder, "index")
                taken, blocks = await generation.take(partition, path)
                return await snapshots.save(taken, path, blocks, self._name, made)
        finally:
            keeping.cancel()
