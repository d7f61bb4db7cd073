"""What the snapshots of a plane say of its lanes: a bridge begins where one ends, and need not read what is before.

Nor could it: what a snapshot holds is purged from the lanes in time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvevents.errors import PlaneError, SnapshotError
from kvevents.plane.layout import Layout
from kvevents.plane.ledger import Ledger
from kvevents.plane.snapshots import Snapshots

if TYPE_CHECKING:
    from nats.js import JetStreamContext

log = logging.getLogger(__name__)


class Recall:
    """Ledgers of lanes, as of the newest snapshot that can be read."""

    def __init__(self, js: JetStreamContext, layout: Layout) -> None:
        self._snapshots: Final = Snapshots(js, layout)

    async def ledger(self, lane: int, made: str) -> Ledger | None:
        """Of one lane, where a snapshot of the same stream (`LaneState.made`) tells of it. Raises `PlaneError`."""
        for kept in await self._snapshots.kept(lane):
            if kept.made != made:
                continue
            try:
                return (await self._snapshots.streams(kept)).restored()[0]
            except SnapshotError as error:
                log.warning("%s", error)
            except PlaneError as error:
                if error.fault != "missing":
                    raise
                log.warning("%s", error)
        return None
