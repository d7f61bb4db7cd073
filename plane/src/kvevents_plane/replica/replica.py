"""A replica, which builds its index from a plane's log instead of following engines.

Theory of operation. An *index build* is an index with everything that fills it: ledgers, readers of the partitions, and a
thread that applies their events. It begins with the newest snapshot of each partition and reads the partitions to their ends.
The fleet then answers queries from this build. A build cannot continue if a partition was deleted or purged, or if the index
differs from an engine or from the indexes of other replicas. A new build then runs beside the old build, and replaces it after
reading all partitions to their ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
from prometheus_client.metrics_core import Metric

from kvevents.errors import ConfigError, PlaneError, SnapshotError
from kvevents.index import PrefixIndex
from kvevents.prometheus import MetricTable, Samples, families, samples_by_label
from kvevents.service.fleet.fleet import Fleet
from kvevents.service.fleet.registration import Registration
from kvevents.stream import Checkpoint
from kvevents_plane.connection import open_client, require_jetstream
from kvevents_plane.digests import ConsistencyCheck
from kvevents_plane.layout import Layout, find_plane
from kvevents_plane.log_subscriber import PartitionProgress
from kvevents_plane.nats_client import PlaneClient
from kvevents_plane.nats_errors import first_error
from kvevents_plane.partition_state import PartitionState
from kvevents_plane.records import StreamKey, stream_text
from kvevents_plane.replica.build import IndexBuild, Snapshotter
from kvevents_plane.settings import PlaneSettings
from kvevents_plane.snapshots import Snapshots

log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 0.05
"""Seconds between two checks of the readers and of the registrations in the log."""


class Replica:
    """Keeps a fleet's index equal to the log while `run` runs. Cancel `run` to stop. All other members work at any time."""

    has_found_engines = True
    registration_advice = "name engines to the bridges of its plane; to drain one, leave it out of the `candidates` of requests"

    def __init__(
        self, plane: PlaneSettings, name: str, fleet: Fleet, *, snapshot_seconds: float, memory_limit: int | None
    ) -> None:
        self.plane: Final = plane
        self.name: Final = name
        self.is_answering = False
        """Whether queries are answered."""
        self._former_builds = 0
        """Number of builds before the current one, plus the number of times that those builds read a partition again."""
        self.fault = ""
        """Why the log cannot be read; empty if it can."""
        self._fleet: Final = fleet
        self._memory_limit: Final = memory_limit
        self.build: IndexBuild | None = None
        """The index build that queries are answered from."""
        self._applied_registrations: Mapping[StreamKey, bytes] | None = None
        """The registrations of the newest update of the fleet, or None before the first update."""
        self._built_at = float("-inf")
        self.consistency: Final = ConsistencyCheck(name, plane.replicas.turn_seconds)
        self.snapshotter: Final = Snapshotter(name, self.consistency, snapshot_seconds)

    # --- status of the replica

    @property
    def builds(self) -> int:
        """Number of times that the index was built, or a partition of it was read again."""
        return 0 if self.build is None else self._former_builds + 1 + self.build.rereads

    @property
    def is_complete(self) -> bool:
        """Whether all partitions of the log were read to their ends."""
        return self.is_answering and self.build is not None and self.build.is_complete

    @property
    def why_incomplete(self) -> str:
        """Why answers can lack engines; empty if all partitions of the log were read to their ends."""
        return "" if self.is_complete else self.fault or "the log is being read"

    @property
    def is_partial(self) -> bool:
        """Whether queries are answered although a partition cannot be read."""
        return self.is_answering and not self.is_complete

    def warnings(self) -> list[str]:
        """Return sentences about the log, the name, and snapshots that could not be written or read."""
        unreadable = [] if self.build is None else self.build.unreadable_snapshots
        return [fault for fault in (self.fault, self.consistency.name_fault, self.snapshotter.fault, *unreadable) if fault]

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of this replica."""
        yield from families("kvevents_plane_", _REPLICA_METRICS, self)
        if self.build is not None:
            yield from families("kvevents_plane_", _BUILD_METRICS, self.build)

    # --- lifecycle of the replica

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            while True:
                try:
                    name = f"kvevents replica {self.name}"
                    async with open_client(self.plane, name=name, on_state=self._on_state) as client:
                        await require_jetstream(client)
                        await self._replicate(client)
                except (PlaneError, SnapshotError, ConfigError) as error:  # ConfigError: credential files changed
                    self._set_fault(str(error))
                    await asyncio.sleep(self.plane.replicas.retry_seconds)
        finally:
            if self.build is not None:
                await self.build.end()

    def _on_state(self, state: str) -> None:
        if state == "connected" and self.build is not None:
            self.build.on_connected()

    def _set_fault(self, fault: str) -> None:
        if fault and fault != self.fault:
            log.warning("%s", fault)
        self.fault = fault

    async def _replicate(self, client: PlaneClient) -> None:
        js = client.jetstream()
        while (layout := await find_plane(js, self.plane.name)) is None:
            self._set_fault(f"plane {self.plane.name!r} does not exist yet: start a bridge, which creates it")
            await asyncio.sleep(self.plane.replicas.retry_seconds)
        snapshots = Snapshots(js, layout)
        while True:
            build = await self._complete_build(client, layout, snapshots)
            await self._switch_to_build(build)
            try:
                async with asyncio.TaskGroup() as tasks:
                    writing = tasks.create_task(self.snapshotter.run(layout, snapshots, build))
                    await self._maintain_build(client, layout, build)
                    writing.cancel()
            except BaseExceptionGroup as group:
                raise first_error(group) from None

    # --- index builds

    async def _complete_build(self, client: PlaneClient, layout: Layout, snapshots: Snapshots) -> IndexBuild:
        """Return an index build that has read all partitions to their ends, except those that cannot be read."""
        index = PrefixIndex(memory_limit=self._memory_limit)
        build = IndexBuild(client, layout, snapshots, index, self.plane.reader)
        compare_at = 0.0
        try:
            while not build.is_complete and not build.is_usable:
                await build.advance()
                self._set_fault(build.fault)
                if build.missing and time.monotonic() >= compare_at:
                    compare_at = time.monotonic() + self.plane.replicas.compare_seconds
                    await self.consistency.compare(client, layout, build.digests(), self._built_at)
                await asyncio.sleep(CHECK_SECONDS)
        except BaseException:
            await build.end()
            raise
        return build

    async def _switch_to_build(self, build: IndexBuild) -> None:
        """Make the fleet answer from a build."""
        registrations = self._registrations(build)
        before, self.build = self.build, build
        former = self._fleet.replace_index(build.follower, build.index)
        await self._register(build, registrations)
        self._former_builds += 0 if before is None else 1 + before.rereads
        self._built_at = time.monotonic()
        self.consistency.differs_since = None
        self.is_answering = True
        self._set_fault(build.fault)
        whole = "complete" if build.is_complete else "used without the partitions that cannot be read"
        begun = f"snapshots of {len(build.loaded_snapshots)} partitions" if build.loaded_snapshots else "the log alone"
        log.info("the index is %s: %d streams, loaded from %s", whole, len(registrations), begun)
        if before is not None:
            await before.end()
        else:
            await asyncio.to_thread(former.stop)

    # --- members

    def _registrations(self, build: IndexBuild) -> list[Registration]:
        """Return the registrations of the engines in the log."""
        registrations = []
        registrations_by_key = self._applied_registrations = build.subscriber.registrations
        for key, encoded in registrations_by_key.items():
            try:
                registration = msgspec.json.decode(encoded, type=Registration)
            except (msgspec.MsgspecError, ConfigError) as error:
                log.warning(
                    "%s is left out, because its registration in the plane cannot be decoded: %s", stream_text(key), error
                )
                continue
            if registration.key == key:
                build.index.set_model(key[0], registration.scope.name)
                build.index.set_drafts(key[0], registration.drafts)
                registrations.append(registration)
        return registrations

    async def _register(self, build: IndexBuild, registrations: list[Registration]) -> None:
        known = {member.registration.key: member.registration for member in list(self._fleet.members.values())}
        if any(known.get(registration.key, registration) != registration for registration in registrations):
            # If the model of a source changes, the index removes the source's blocks, and the log cannot restore these blocks.
            build.rebuild_reason = "the registration of an engine has changed"
        for fault in self._fleet.replace_registrations("plane", registrations, resume=lambda key: Checkpoint(*key, 0, -1)):
            log.warning("%s", fault)
        await asyncio.wrap_future(build.follower.submit(self._fleet.refresh))

    # --- maintenance of a valid build

    async def _maintain_build(self, client: PlaneClient, layout: Layout, build: IndexBuild) -> None:
        """Keep the registrations and digests of a build up to date until the index must be rebuilt."""
        compare_at = 0.0
        while not build.rebuild_reason:
            await asyncio.sleep(CHECK_SECONDS)
            await build.advance()
            if self._applied_registrations is not build.subscriber.registrations:
                await self._register(build, self._registrations(build))
            if build.subscriber.diverged and time.monotonic() - self._built_at > self.plane.replicas.rebuild_seconds:
                build.rebuild_reason = "the digest or the attestation of an engine differs from this index"
            self._set_fault(build.fault)
            now = time.monotonic()
            if now >= compare_at:
                compare_at = now + self.plane.replicas.compare_seconds
                why = await self.consistency.compare(client, layout, build.digests(), self._built_at)
                build.rebuild_reason = build.rebuild_reason or why
        log.warning("the index is rebuilt: %s", build.rebuild_reason)


# --- metrics: their only label is `partition`

_REPLICA_METRICS: Final[MetricTable[Replica]] = {
    "synced": ("1 while all partitions of the log were read to their ends.", lambda r: r.is_complete),
    "readable": ("1 while the replica can read the log.", lambda r: not r.fault),
    "snapshot_failed": ("1 while the replica's last attempt to take a snapshot failed.", lambda r: bool(r.snapshotter.fault)),
    "index_builds_total": ("Times that the replica built its index, or read a partition of it again.", lambda r: r.builds),
    "divergences_total": (
        "Times that another replica's digest differed at the same position of the log; stays at 0.",
        lambda r: r.consistency.disagreements,
    ),
}


def _sum_partitions(count: Callable[[PartitionState], int]) -> Callable[[IndexBuild], Samples]:
    return lambda build: sum(map(count, list(build.subscriber.states.values())))


def _samples_by_partition(read: Callable[[PartitionProgress], float | None]) -> Callable[[IndexBuild], Samples]:
    return lambda build: samples_by_label(
        "partition", {str(number): read(partition) for number, partition in dict(build.subscriber.partitions).items()}
    )


_BUILD_METRICS: Final[MetricTable[IndexBuild]] = {
    "invalid_records_total": (
        "Records and messages in the log that no bridge writes; stays at 0.",
        _sum_partitions(lambda s: s.invalid_records + s.foreign_messages),
    ),
    "duplicate_records_total": (
        "Records that repeat the log or belong to an incarnation that has ended; stays at 0.",
        _sum_partitions(lambda s: s.duplicate_records),
    ),
    "discarded_pages_total": (
        "Pages without effect because their writer expected other pages before them; the bridge writes them again.",
        _sum_partitions(lambda s: s.void_pages),
    ),
    "bridges": ("Bridges whose heartbeats arrive.", lambda b: b.subscriber.bridges()),
    "partition_position": ("Number of the newest page in the index.", _samples_by_partition(lambda p: p.position)),
    "partition_lag_pages": (
        "Pages in the log that are not in the index yet; absent while unknown.",
        _samples_by_partition(lambda p: p.lag),
    ),
    "partition_last_page_timestamp_seconds": (
        "Unix time at which the servers stored the newest page in the index, by their clock.",
        _samples_by_partition(lambda p: p.stored_at),
    ),
    "partition_snapshot_timestamp_seconds": (
        "Unix time at which this replica found the newest snapshot; absent before the first.",
        lambda b: samples_by_label("partition", {str(number): time.time() - age for number, age in b.snapshot_ages().items()}),
    ),
}
