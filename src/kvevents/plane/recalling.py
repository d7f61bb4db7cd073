"""What the snapshots of a plane say of its lanes: a bridge begins where one ends, and need not read what is before.

Nor could it: what a snapshot holds is purged from the lanes in time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from kvevents.errors import PlaneError
from kvevents.plane.faults import told
from kvevents.plane.layout import Layout
from kvevents.plane.ledger import Ledger
from kvevents.plane.snapshots import Snapshots, Taken

if TYPE_CHECKING:
    from nats.js import JetStreamContext

log = logging.getLogger(__name__)


class Recall:
    """Ledgers of lanes, as of the newest snapshot that can be read."""

    def __init__(self, js: JetStreamContext, layout: Layout) -> None:
        self._js: Final = js
        self._layout: Final = layout
        self._read: dict[str, Taken] = {}
        """The one that was read last, by name."""

    async def ledger(self, lane: int, made: str) -> Ledger | None:
        """Of one lane, where a snapshot of the same stream (`LaneState.made`) tells of it. Raises `PlaneError`."""
        for kept in await Snapshots(self._js, self._layout).kept():
            if kept.made.get(str(lane)) != made:
                continue
            try:
                saved = (await self._taken(kept.name)).ledgers.get(lane)
                return None if saved is None else Ledger.restore(saved)
            except ValueError as error:  # msgspec's are of this kind
                log.warning("the streams of snapshot %s cannot be read: %s", kept.name, error)
            except PlaneError as error:
                if error.fault != "missing":
                    raise
                log.warning("%s", error)
        return None

    async def _taken(self, name: str) -> Taken:
        if name not in self._read:
            with told(f"reading the streams of snapshot {name}"):
                store = await self._js.object_store(self._layout.snapshots)
                found = await store.get(f"{name}.streams")
            self._read = {name: msgspec.msgpack.decode(found.data or b"", type=Taken)}
        return self._read[name]
