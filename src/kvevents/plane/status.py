"""A plane as an operator sees it, asked of the servers alone: no bridge or replica need be reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from kvevents.errors import PlaneError
from kvevents.plane.faults import told
from kvevents.plane.layout import Layout, state_of
from kvevents.plane.leases import Holder
from kvevents.plane.opinions import PREFIX, Opinion
from kvevents.plane.records import Beat, Page, decode_page
from kvevents.plane.snapshots import Kept, Snapshots

if TYPE_CHECKING:
    from nats.js import JetStreamContext

LOOK_BACK: Final = 8
"""Pages of a lane's end in which beats of bridges are looked for."""


class LaneView(msgspec.Struct, frozen=True):
    """One lane."""

    lane: int
    first: int
    last: int
    bytes: int
    leader: str | None
    bridges: dict[str, float]
    """Heard at the lane's end, each with the clock of its last beat."""
    fault: str = ""


class ReplicaView(msgspec.Struct, frozen=True):
    """One replica that has told lately what it holds."""

    name: str
    behind: int
    """Pages between its last census and the newest page, in all lanes."""
    differs: list[str]
    """Replicas that hold something else at the same place."""


class PlaneView(msgspec.Struct, frozen=True):
    """Everything."""

    name: str
    lanes: list[LaneView]
    snapshots: list[Kept]
    leases: dict[str, str]
    """By key who has it."""
    replicas: list[ReplicaView]

    @property
    def faults(self) -> list[str]:
        """What is wrong, as sentences."""
        found = [f"lane {lane.lane}: {lane.fault}" for lane in self.lanes if lane.fault]
        found += [f"lane {lane.lane}: no bridge is heard" for lane in self.lanes if not lane.fault and not lane.bridges]
        found += [
            f"replica {each.name} holds something else than {', '.join(each.differs)}" for each in self.replicas if each.differs
        ]
        return found


async def look(js: JetStreamContext, layout: Layout) -> PlaneView:
    """Ask for everything. Raises `PlaneError` where the servers cannot be asked at all."""
    lanes = [await _lane(js, layout, lane) for lane in range(layout.lanes)]
    snapshots = Snapshots(js, layout)
    kept = [each for lane in range(layout.lanes) for each in await snapshots.kept(lane)]
    entries = await _entries(js, layout)
    said = {key: Opinion.decode(value) for key, value in entries.items() if key.startswith(PREFIX)}
    opinions = {key.removeprefix(PREFIX): opinion for key, opinion in said.items() if opinion is not None}
    leases = {key: _holder(value) for key, value in entries.items() if key not in said}
    ends = {str(lane.lane): lane.last for lane in lanes}
    replicas = [_replica(name, opinions, ends) for name in sorted(opinions)]
    return PlaneView(layout.name, lanes, kept, leases, replicas)


async def _lane(js: JetStreamContext, layout: Layout, lane: int) -> LaneView:
    try:
        state = await state_of(js, layout, lane)
        bridges: dict[str, float] = {}
        for position in range(max(state.first, state.last - LOOK_BACK + 1, 1), state.last + 1):
            page = await _page(js, layout, lane, position)
            bridges |= {each.bridge: each.at for each in (page.records if page is not None else []) if isinstance(each, Beat)}
    except PlaneError as error:
        return LaneView(lane, 0, 0, 0, None, {}, str(error))
    return LaneView(lane, state.first, state.last, state.bytes, state.leader, bridges)


async def _page(js: JetStreamContext, layout: Layout, lane: int, position: int) -> Page | None:
    """One that may be purged at this moment."""
    try:
        with told(f"reading lane {lane}"):
            return decode_page((await js.get_msg(layout.stream(lane), position)).data or b"")
    except PlaneError as error:
        if error.fault != "missing":
            raise
        return None


async def _entries(js: JetStreamContext, layout: Layout) -> dict[str, bytes]:
    """Of the bucket whose entries expire."""
    found: dict[str, bytes] = {}
    try:
        with told("asking for leases"):
            bucket = await js.key_value(layout.leases)
            for key in await bucket.keys():
                entry = await bucket.get(key)
                found[key] = entry.value or b""
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
    behind = sum(max(0, end - own.places[lane].position) for lane, end in ends.items() if lane in own.places)
    differs = [other for other, opinion in opinions.items() if own.agrees(opinion) is False]
    return ReplicaView(name, behind, sorted(differs))
