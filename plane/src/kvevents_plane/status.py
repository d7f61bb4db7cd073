"""Status of a plane for operators, queried from the NATS servers alone: no bridge or replica needs to be reachable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from nats.js import JetStreamContext

from kvevents.errors import PlaneError
from kvevents.stream import printable
from kvevents_plane.digests import ReplicaDigests, read_digests
from kvevents_plane.layout import REPAIR_ADVICE, Layout, fetch_message, partition_info
from kvevents_plane.records import HeartbeatRecord, ReceivedMessage, bridge_name, decode_page
from kvevents_plane.snapshots import SnapshotInfo, Snapshots

BRIDGE_SCAN_PAGES: Final = 32
"""Number of pages at the end of a partition in which the status looks for bridges."""
DEFAULT_ALIVE_SECONDS: Final = 1.5
"""Seconds within which a bridge must write if the scanned pages contain no heartbeat from it: three default intervals."""
TRUST_DELAY_SECONDS: Final = 0.5
"""Seconds that a replica needs to lower the trust after a bridge counts as dead."""
OLD_SNAPSHOT_SECONDS: Final = 900.0
"""Age in seconds above which the oldest page that no snapshot contains is a fault."""
OLD_PAGE_SECONDS: Final = 5.0
"""Age in seconds above which the oldest page that a replica lacks is a fault. A running replica reports its positions every
second. The reports of a frozen one expire after `DIGEST_EXPIRY_SECONDS`, so the limit must be much shorter."""
POLL_SECONDS: Final = 0.25
"""Seconds between two searches for newer pages."""
MAX_INSPECTIONS: Final = 16
"""Maximum number of partitions that are inspected at the same time."""


class PartitionView(msgspec.Struct, frozen=True):
    """The status of one partition."""

    partition: int
    first: int
    last: int
    bytes: int
    leader: str | None
    bridges: dict[str, float]
    """The bridges that wrote the newest pages, and the time at which the servers stored the newest page of each bridge."""
    alive_seconds: float = 0.0
    """Seconds within which each bridge must write again, according to the bridges' heartbeats."""
    silent: list[str] = []
    """Bridges that did not write within `alive_seconds` while the status was queried."""
    fault: str = ""
    stream_fault: str = ""
    """Why a bridge refuses the partition's stream when the bridge starts; empty if it accepts the stream."""
    shared: list[str] = []
    """Bridge names under which several processes write alternately."""
    missing: int = 0
    """Number of positions, between the first and the last page, whose messages no longer exist."""
    conflicts: list[str] = []
    """Sentences from the heartbeats of bridges, each about a name that two bridges use for different engines."""
    unsaved_seconds: float = 0.0
    """Seconds from the oldest page that no snapshot contains to the newest page."""
    newest_at: float = 0.0
    """Time at which the servers stored the newest page, by the servers' clock."""

    @property
    def faults(self) -> list[str]:
        """The faults of the partition, as sentences."""
        if self.fault:
            return [self.fault]
        faults = [f"{self.stream_fault}; bridges refuse it when they start: {REPAIR_ADVICE}"] if self.stream_fault else []
        faults += [] if self.bridges else ["no bridge writes"]
        check = f"for more than {self.alive_seconds:g} s; check that the bridges run and can write"
        if self.bridges and len(self.silent) == len(self.bridges):
            faults.append(f"no bridge has written {check}")
        else:
            faults += [f"bridge {name} has not written {check.replace('the bridges run', 'it runs')}" for name in self.silent]
        if self.unsaved_seconds > OLD_SNAPSHOT_SECONDS:
            faults.append(
                f"the oldest page that no snapshot contains is {self.unsaved_seconds / 60:.0f} min old; "
                "check that a replica may write snapshots"
            )
        return [*faults, *self.conflicts]


class ReplicaView(msgspec.Struct, frozen=True):
    """One replica whose published digests have not expired."""

    name: str
    lag: int
    """Number of pages that the replica lacks in all partitions together."""
    differs: list[str]
    """Names of the replicas whose digests differ from this replica's at the same position."""
    missing: dict[int, int] = {}
    """For each partition that the replica cannot read, the first page after the missing pages."""
    lag_seconds: float = 0.0
    """Seconds from the oldest page that the replica lacks to the newest page of the partition."""

    @property
    def faults(self) -> list[str]:
        """The faults of the replica, as sentences that continue its name."""
        faults = [f"holds another index than {', '.join(self.differs)}"] if self.differs else []
        faults += [
            f"cannot read partition {partition}: pages before {first} are missing; the runbook has what to do"
            for partition, first in sorted(self.missing.items())
        ]
        if self.lag_seconds > OLD_PAGE_SECONDS:
            faults.append(
                f"lacks pages that are {self.lag_seconds:.0f} s old: it is frozen, overloaded, cut off, or rebuilds its index"
            )
        return faults


class PlaneView(msgspec.Struct, frozen=True):
    """The status of a plane."""

    name: str
    partitions: list[PartitionView]
    snapshots: list[SnapshotInfo]
    replicas: list[ReplicaView]

    @property
    def exact_seconds(self) -> float:
        """Maximum age in seconds of a state that replicas report as EXACT."""
        return max((partition.alive_seconds for partition in self.partitions), default=0.0) + TRUST_DELAY_SECONDS

    @property
    def faults(self) -> list[str]:
        """The faults of all partitions and replicas, as sentences."""
        faults = [f"partition {partition.partition}: {fault}" for partition in self.partitions for fault in partition.faults]
        faults += [f"replica {replica.name} {fault}" for replica in self.replicas for fault in replica.faults]
        names = sorted({name for partition in self.partitions for name in partition.shared})
        faults += [f"several processes use the bridge name {name}; give each its own name with --bridge-name" for name in names]
        return faults


def format_partitions(partitions: Collection[int]) -> str:
    """Return `partition 3` or `partitions 0-3, 7`."""
    runs: list[list[int]] = []
    for partition in sorted(partitions):
        if runs and partition == runs[-1][-1] + 1:
            runs[-1].append(partition)
        else:
            runs.append([partition])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"partition {text}" if len(partitions) == 1 else f"partitions {text}"


async def inspect_plane(js: JetStreamContext, layout: Layout) -> PlaneView:
    """Query the status of a plane. Raises `PlaneError` if the servers do not answer.

    The call waits until each bridge has written another page to each partition; the next heartbeat is in such a page. The pages
    that exist do not show whether a bridge is alive, because clocks can differ.
    """
    snapshots = Snapshots(js, layout)
    valid = [snapshot for partition in range(layout.partitions) for snapshot in await snapshots.list_valid(partition)]
    limit = asyncio.Semaphore(MAX_INSPECTIONS)

    async def inspect(partition: int) -> PartitionView:
        async with limit:
            newest = next((snapshot.position for snapshot in valid if snapshot.partition == partition), 0)
            return await _inspect_partition(js, layout, partition, newest)

    partitions = await asyncio.gather(*map(inspect, range(layout.partitions)))
    digests: dict[str, ReplicaDigests] = {}
    try:
        digests = await read_digests(js, layout)
    except PlaneError as error:
        if error.fault != "missing":  # the bucket is missing if a bridge was killed while it created the plane
            raise
    replicas = [await _replica_view(js, layout, name, digests, partitions) for name in sorted(digests)]
    return PlaneView(layout.name, partitions, valid, replicas)


class _BridgeScan:
    """What the pages at the end of a partition show about the bridges that wrote them."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float]] = []
        """For each page, in order, the bridge that wrote it, and the time at which the servers stored it."""
        self.alive_seconds = DEFAULT_ALIVE_SECONDS
        self.conflicts: dict[str, str] = {}
        """The conflict in the newest heartbeat of each bridge; empty if it reports none."""
        self.newest_at = 0.0

    def add(self, message: ReceivedMessage | None) -> set[str]:
        """Add the next page. Return the name of the message's bridge as a set; an empty set if the message is not a page."""
        if message is None or (page := decode_page(message.data)) is None:
            return set()
        heartbeats = [record for record in page.records if isinstance(record, HeartbeatRecord)]
        self.alive_seconds = max([self.alive_seconds, *(heartbeat.alive_seconds for heartbeat in heartbeats)])
        # Any page shows that its bridge writes. In a busy partition, only few pages have heartbeats.
        self.written.append((page.bridge, message.stored_at))
        self.conflicts |= {heartbeat.bridge: printable(heartbeat.conflict) for heartbeat in heartbeats}
        self.newest_at = message.stored_at
        return {bridge_name(page.bridge)}


async def _inspect_partition(js: JetStreamContext, layout: Layout, partition: int, snapshot_end: int) -> PartitionView:
    """Return the status of a partition whose newest snapshot contains the pages up to `snapshot_end`."""
    scan = _BridgeScan()
    try:
        info = await partition_info(js, layout, partition)
        for position in range(max(info.first, info.last - BRIDGE_SCAN_PAGES + 1, 1), info.last + 1):
            scan.add(await fetch_message(js, layout, partition, position))
        silent = await _find_silent(js, layout, partition, info.last, scan)
        oldest = await _stored_at(js, layout, partition, snapshot_end + 1)
    except PlaneError as error:
        return PartitionView(partition, 0, 0, 0, None, {}, fault=str(error))
    return PartitionView(
        partition,
        info.first,
        info.last,
        info.bytes,
        info.leader,
        {bridge_name(bridge): at for bridge, at in scan.written},
        scan.alive_seconds,
        silent,
        stream_fault=info.stream_fault and f"stream {layout.stream(partition)} {info.stream_fault}",
        shared=_shared_names(bridge for bridge, _ in scan.written),
        missing=info.missing,
        conflicts=sorted({conflict for conflict in scan.conflicts.values() if conflict}),
        unsaved_seconds=0.0 if oldest is None else max(0.0, scan.newest_at - oldest),
        newest_at=scan.newest_at,
    )


async def _find_silent(js: JetStreamContext, layout: Layout, partition: int, position: int, scan: _BridgeScan) -> list[str]:
    """Wait until the bridges in `scan` have written after `position`. Return the bridges that have not written in time."""
    waiting = {bridge_name(bridge) for bridge, _ in scan.written}
    began = time.monotonic()
    while waiting:
        waited = time.monotonic() - began
        while (message := await fetch_message(js, layout, partition, position + 1, allows_later=True)) is not None:
            position = message.position
            waiting -= scan.add(message)
        if waited >= scan.alive_seconds:
            break
        await asyncio.sleep(POLL_SECONDS)
    return sorted(waiting)


async def _stored_at(js: JetStreamContext, layout: Layout, partition: int, position: int) -> float | None:
    """Return the time at which the servers stored the first message at `position` or later, or None without a message."""
    message = await fetch_message(js, layout, partition, max(1, position), allows_later=True)
    return None if message is None else message.stored_at


def _shared_names(bridges: Iterable[str]) -> list[str]:
    """Return the names under which two processes write alternately: a process wrote again after another process's page."""
    turns: dict[str, list[str]] = {}
    for bridge in bridges:
        processes = turns.setdefault(bridge_name(bridge), [])
        if processes[-1:] != [bridge]:
            processes.append(bridge)
    return sorted(name for name, processes in turns.items() if len(set(processes)) < len(processes))


async def _replica_view(
    js: JetStreamContext, layout: Layout, name: str, digests: Mapping[str, ReplicaDigests], partitions: Sequence[PartitionView]
) -> ReplicaView:
    own = digests[name]
    lags = [
        (partition, partition.last - own.positions[partition.partition])
        for partition in partitions
        if partition.partition in own.positions
    ]
    seconds = 0.0
    for partition, lag in lags:
        if lag > 0 and (oldest := await _stored_at(js, layout, partition.partition, partition.last - lag + 1)) is not None:
            seconds = max(seconds, partition.newest_at - oldest)
    differs = [other for other, others_digests in digests.items() if own.agrees(others_digests) is False]
    return ReplicaView(name, sum(max(0, lag) for _, lag in lags), sorted(differs), own.missing, seconds)
