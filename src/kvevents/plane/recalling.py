"""What the snapshots of a plane say of its lanes: a bridge begins where one ends, and need not read what is before.

Nor could it: what a snapshot holds is purged from the lanes in time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvevents.errors import PlaneError, SnapshotError
from kvevents.plane.layout import LaneState, Layout
from kvevents.plane.ledger import Ledger
from kvevents.plane.snapshots import Snapshots

if TYPE_CHECKING:
    from nats.js import JetStreamContext

log = logging.getLogger(__name__)


class Recall:
    """Ledgers of lanes, as of the newest snapshot that can be read."""

    def __init__(self, js: JetStreamContext, layout: Layout) -> None:
        self._snapshots: Final = Snapshots(js, layout)

    async def ledger(self, lane: int, state: LaneState) -> Ledger | None:
        """Of one lane, as of the newest snapshot of what it holds. Raises `PlaneError`."""
        for kept in await self._snapshots.usable(lane, state):
            try:
                return (await self._snapshots.streams(kept)).restored()[0]
            except SnapshotError as error:
                log.warning("%s", error)
            except PlaneError as error:
                if error.fault != "missing":
                    raise
                log.warning("%s", error)
        return None
