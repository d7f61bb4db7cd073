"""A plane as an operator sees it, asked of the servers alone: no bridge or replica need be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kvevents.errors import PlaneError
from kvevents.plane.entries import ANSWER_SECONDS
from kvevents.plane.faults import told
from kvevents.plane.layout import Layout, state_of
from kvevents.plane.leases import Holder
from kvevents.plane.opinions import PREFIX, Opinion
from kvevents.plane.records import Beat, Page, decode_page, name_of
from kvevents.plane.sharding import PREFIX as SHARE
from kvevents.plane.sharding import Announcement, SharePace
from kvevents.plane.snapshots import Kept, Snapshots

if TYPE_CHECKING:
    from nats.js import JetStreamContext

LOOK_BACK: Final = 8
"""Pages of a partition's end in which bridges are looked for."""


class PartitionView(msgspec.Struct, frozen=True):
    """One partition."""

    partition: int
    first: int
    last: int
    bytes: int
    leader: str | None
    bridges: dict[str, float]
    """Heard at the partition's end, each with the clock of its last page or beat."""
    fault: str = ""
    shared: list[str] = []
    """Names of bridges under which several processes write there by turns."""


class ReplicaView(msgspec.Struct, frozen=True):
    """One replica that has told lately what it holds."""

    name: str
    behind: int
    """Pages between its last census and the newest page, in all partitions."""
    differs: list[str]
    """Replicas that hold something else at the same place."""


class ShareView(msgspec.Struct, frozen=True):
    """One replica that holds a part of the partitions, as it announces."""

    name: str
    url: str
    holders: int
    """Replicas that are to hold each partition, as it was told."""
    partitions: list[int]
    """Those that it answers for."""
    silent: float
    """Seconds since it said so, before the newest that anybody has said, by the servers' clock."""

    @property
    def is_heard(self) -> bool:
        """Whether the others ask it."""
        return self.silent <= SharePace().present_seconds


class PlaneView(msgspec.Struct, frozen=True):
    """Everything."""

    name: str
    partitions: list[PartitionView]
    snapshots: list[Kept]
    leases: dict[str, str]
    """By key who has it."""
    replicas: list[ReplicaView]
    shares: list[ShareView] = []
    """Replicas that hold a part each; none where each holds everything."""

    def holders(self, partition: int) -> list[str]:
        """Replicas that answer for a partition, of those that hold a part."""
        return [each.name for each in self.shares if each.is_heard and partition in each.partitions]

    @property
    def faults(self) -> list[str]:
        """What is wrong, as sentences."""
        found = [f"partition {partition.partition}: {partition.fault}" for partition in self.partitions if partition.fault]
        found += [
            f"partition {partition.partition}: no bridge is heard"
            for partition in self.partitions
            if not partition.fault and not partition.bridges
        ]
        found += [
            f"replica {each.name} holds something else than {', '.join(each.differs)}" for each in self.replicas if each.differs
        ]
        found += [
            f"bridge {name} is more than one process; give each a name of its own with --bridge-name"
            for name in sorted({name for partition in self.partitions for name in partition.shared})
        ]
        return found + self._faults_of_shares()

    def _faults_of_shares(self) -> list[str]:
        found = [
            f"replica {each.name} holds a share and has said nothing for {each.silent:.0f} s"
            for each in self.shares
            if not each.is_heard
        ]
        uncovered = [
            partition.partition for partition in self.partitions if self.shares and not self.holders(partition.partition)
        ]
        if uncovered:
            found.append(f"no replica holds {spelled(uncovered)}: the engines there are missing in answers")
        if len({each.holders for each in self.shares}) > 1:
            said = ", ".join(f"{each.name} {each.holders}" for each in self.shares)
            found.append(f"replicas were told different numbers of holders, of which the most counts: {said}")
        return found


def spelled(partitions: Collection[int]) -> str:
    """`partition 3`, `partitions 0-3, 7`."""
    runs: list[list[int]] = []
    for partition in sorted(partitions):
        if runs and partition == runs[-1][-1] + 1:
            runs[-1].append(partition)
        else:
            runs.append([partition])
    told = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"partition {told}" if len(partitions) == 1 else f"partitions {told}"


class _Entry(NamedTuple):
    """Of the bucket whose entries expire."""

    value: bytes
    at: float
    """By the servers' clock."""


async def look(js: JetStreamContext, layout: Layout) -> PlaneView:
    """Ask for everything. Raises `PlaneError` where the servers cannot be asked at all."""
    partitions = [await _partition(js, layout, partition) for partition in range(layout.partitions)]
    snapshots = Snapshots(js, layout)
    kept = [each for partition in range(layout.partitions) for each in await snapshots.kept(partition)]
    entries = await _entries(js, layout)
    opinions = {name: found for name, entry in _under(PREFIX, entries) if (found := Opinion.decode(entry.value)) is not None}
    now = max((entry.at for entry in entries.values()), default=0.0)
    shares = [
        ShareView(name, said.url, said.holders, said.held, now - entry.at)
        for name, entry in _under(SHARE, entries)
        if (said := Announcement.decode(entry.value)) is not None
    ]
    leases = {key: _holder(entry.value) for key, entry in entries.items() if not key.startswith((PREFIX, SHARE))}
    ends = {str(partition.partition): partition.last for partition in partitions}
    replicas = [_replica(name, opinions, ends) for name in sorted(opinions)]
    return PlaneView(layout.name, partitions, kept, leases, replicas, shares)


def _under(prefix: str, entries: Mapping[str, _Entry]) -> list[tuple[str, _Entry]]:
    return [(key.removeprefix(prefix), entry) for key, entry in sorted(entries.items()) if key.startswith(prefix)]


async def _partition(js: JetStreamContext, layout: Layout, partition: int) -> PartitionView:
    try:
        state = await state_of(js, layout, partition)
        heard: list[tuple[str, float]] = []
        for position in range(max(state.first, state.last - LOOK_BACK + 1, 1), state.last + 1):
            page = await _page(js, layout, partition, position)
            if page is not None:
                # Who writes is heard, whether or not it has said so lately: beats are few among the pages of a busy partition.
                heard.append((page.bridge, page.at))
                heard += [(each.bridge, each.at) for each in page.records if isinstance(each, Beat)]
    except PlaneError as error:
        return PartitionView(partition, 0, 0, 0, None, {}, str(error))
    bridges = {name_of(bridge): at for bridge, at in heard}
    shared = _shared(bridge for bridge, _ in heard)
    return PartitionView(partition, state.first, state.last, state.bytes, state.leader, bridges, shared=shared)


def _shared(heard: Iterable[str]) -> list[str]:
    """Names of bridges of which a process is heard again after another one of that name."""
    last: dict[str, str] = {}
    before: set[str] = set()
    found: set[str] = set()
    for bridge in heard:
        name = name_of(bridge)
        if bridge in before and last[name] != bridge:
            found.add(name)
        before.add(bridge)
        last[name] = bridge
    return sorted(found)


async def _page(js: JetStreamContext, layout: Layout, partition: int, position: int) -> Page | None:
    """One that may be purged at this moment."""
    try:
        with told(f"reading partition {partition}"):
            return decode_page((await js.get_msg(layout.stream(partition), position)).data or b"")
    except PlaneError as error:
        if error.fault != "missing":
            raise
        return None


async def _entries(js: JetStreamContext, layout: Layout) -> dict[str, _Entry]:
    """Of the bucket whose entries expire."""
    found: dict[str, _Entry] = {}
    try:
        with told("asking for leases"):
            bucket = await js.key_value(layout.leases)
            # Not key by key, for entries go while one looks.
            watcher: Any = await bucket.watchall(ignore_deletes=True)
            with suppress(TimeoutError):  # the last one was written anew meanwhile, and there is no end
                async with asyncio.timeout(ANSWER_SECONDS):
                    async for entry in watcher:
                        if entry is None:
                            break
                        found[entry.key] = _Entry(entry.value or b"", entry.created.timestamp())
            await watcher.stop()
    except PlaneError as error:
        if error.fault != "missing":
            raise
    return found


def _holder(value: bytes) -> str:
    try:
        return str(msgspec.json.decode(value, type=Holder))
    except msgspec.MsgspecError:
        return value.decode(errors="replace")


def _replica(name: str, opinions: Mapping[str, Opinion], ends: Mapping[str, int]) -> ReplicaView:
    own = opinions[name]
    newest = {partition: max(place.position for place in places) for partition, places in own.places.items() if places}
    behind = sum(max(0, end - newest[partition]) for partition, end in ends.items() if partition in newest)
    differs = [other for other, opinion in opinions.items() if own.agrees(opinion) is False]
    return ReplicaView(name, behind, sorted(differs))
