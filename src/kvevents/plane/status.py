"""Status of a plane for operators, queried from the NATS servers alone: no bridge or replica needs to be reachable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from kvevents.errors import PlaneError
from kvevents.plane.digests import ReplicaDigests, read_digests
from kvevents.plane.layout import Layout, fetch_message, partition_info
from kvevents.plane.records import HeartbeatRecord, bridge_name, decode_page
from kvevents.plane.snapshots import SnapshotInfo, Snapshots

if TYPE_CHECKING:
    from nats.js import JetStreamContext

BRIDGE_SCAN_PAGES: Final = 8
"""Pages at the end of a partition in which the status looks for bridges."""
DEFAULT_ALIVE_SECONDS: Final = 6.0
"""Seconds within which a bridge writes whose heartbeats are not among these pages: three heartbeats with default settings."""
POLL_SECONDS: Final = 0.25
"""Pause between two looks for newer pages."""


class PartitionView(msgspec.Struct, frozen=True):
    """One partition."""

    partition: int
    first: int
    last: int
    bytes: int
    leader: str | None
    bridges: dict[str, float]
    """Bridges that wrote the last pages, with the time of their last page or heartbeat by their clocks."""
    alive_seconds: float = 0.0
    """Seconds within which one of these bridges writes again, as their heartbeats say."""
    is_silent: bool = False
    """Whether none of them wrote within that time while the status was read."""
    fault: str = ""
    shared: list[str] = []
    """Names of bridges under which several processes write alternately."""


class ReplicaView(msgspec.Struct, frozen=True):
    """One replica that has published digests recently."""

    name: str
    lag: int
    """Pages between its last digests and the newest pages, over all partitions."""
    differs: list[str]
    """Replicas whose digests differ at the same position."""


class PlaneView(msgspec.Struct, frozen=True):
    """The status of a plane."""

    name: str
    partitions: list[PartitionView]
    snapshots: list[SnapshotInfo]
    replicas: list[ReplicaView]

    @property
    def faults(self) -> list[str]:
        """All faults, as sentences."""
        found = [f"partition {each.partition}: {each.fault}" for each in self.partitions if each.fault]
        found += [
            f"partition {each.partition}: no bridge writes" for each in self.partitions if not each.fault and not each.bridges
        ]
        found += [
            f"partition {each.partition}: no bridge has written for {each.alive_seconds:g} s; check that the bridges run"
            for each in self.partitions
            if each.is_silent
        ]
        found += [
            f"replica {each.name} holds another index than {', '.join(each.differs)}" for each in self.replicas if each.differs
        ]
        found += [
            f"several processes use the bridge name {name}; give each its own name with --bridge-name"
            for name in sorted({name for each in self.partitions for name in each.shared})
        ]
        return found


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

    It takes until each partition has another page, which is the next heartbeat of a bridge at the latest, so that nothing
    depends on clocks. The pages alone do not show how old they are.
    """
    partitions = [await _partition_view(js, layout, partition) for partition in range(layout.partitions)]
    snapshots = Snapshots(js, layout)
    valid = [each for partition in range(layout.partitions) for each in await snapshots.list_valid(partition)]
    digests: dict[str, ReplicaDigests] = {}
    try:
        digests = await read_digests(js, layout)
    except PlaneError as error:
        if error.fault != "missing":  # a bridge that was killed early has created the partitions alone
            raise
    partitions = await _with_silence(js, layout, partitions)
    ends = {str(each.partition): each.last for each in partitions}
    replicas = [_replica_view(name, digests, ends) for name in sorted(digests)]
    return PlaneView(layout.name, partitions, valid, replicas)


async def _partition_view(js: JetStreamContext, layout: Layout, partition: int) -> PartitionView:
    try:
        info = await partition_info(js, layout, partition)
        written: list[tuple[str, float]] = []
        alive_seconds = DEFAULT_ALIVE_SECONDS
        for position in range(max(info.first, info.last - BRIDGE_SCAN_PAGES + 1, 1), info.last + 1):
            message = await fetch_message(js, layout, partition, position)
            page = None if message is None else decode_page(message.data)
            if page is not None:
                heartbeats = [each for each in page.records if isinstance(each, HeartbeatRecord)]
                alive_seconds = max([alive_seconds, *(each.alive_seconds for each in heartbeats)])
                # Any page shows that its bridge writes: few pages of a busy partition contain heartbeats.
                written.append((page.bridge, page.written_at))
                written += [(each.bridge, each.sent_at) for each in heartbeats]
    except PlaneError as error:
        return PartitionView(partition, 0, 0, 0, None, {}, fault=str(error))
    bridges = {bridge_name(bridge): at for bridge, at in written}
    shared = _shared_names(bridge for bridge, _ in written)
    return PartitionView(partition, info.first, info.last, info.bytes, info.leader, bridges, alive_seconds, shared=shared)


async def _with_silence(js: JetStreamContext, layout: Layout, views: Sequence[PartitionView]) -> list[PartitionView]:
    """Wait until the bridges of each partition write again, and mark the partitions where none does in time."""
    waiting = {each.partition: each for each in views if each.bridges}
    began = time.monotonic()
    while waiting:
        for partition, view in list(waiting.items()):
            with suppress(PlaneError):  # it is asked again
                if (await partition_info(js, layout, partition)).last > view.last:
                    del waiting[partition]
        waited = time.monotonic() - began
        if all(waited >= view.alive_seconds for view in waiting.values()):
            break
        await asyncio.sleep(POLL_SECONDS)
    return [msgspec.structs.replace(each, is_silent=each.partition in waiting) for each in views]


def _shared_names(bridges: Iterable[str]) -> list[str]:
    """Return the names under which a process writes again after another process of that name."""
    last: dict[str, str] = {}
    before: set[str] = set()
    found: set[str] = set()
    for bridge in bridges:
        name = bridge_name(bridge)
        if bridge in before and last[name] != bridge:
            found.add(name)
        before.add(bridge)
        last[name] = bridge
    return sorted(found)


def _replica_view(name: str, digests: Mapping[str, ReplicaDigests], ends: Mapping[str, int]) -> ReplicaView:
    own = digests[name]
    newest = {partition: max(each.position for each in found) for partition, found in own.partitions.items() if found}
    lag = sum(max(0, end - newest[partition]) for partition, end in ends.items() if partition in newest)
    differs = [other for other, found in digests.items() if own.agrees(found) is False]
    return ReplicaView(name, lag, sorted(differs))
