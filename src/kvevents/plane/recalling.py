"""What the snapshots of a plane say of its partitions: a bridge begins where one ends, and need not read what is before.

Nor could it: what a snapshot holds is purged from the partitions in time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvevents.errors import PlaneError, SnapshotError
from kvevents.plane.entries import entries
from kvevents.plane.layout import Layout, PartitionInfo
from kvevents.plane.ledger import Ledger
from kvevents.plane.opinions import PREFIX, Opinion
from kvevents.plane.snapshots import Snapshots

if TYPE_CHECKING:
    from nats.js import JetStreamContext

log = logging.getLogger(__name__)


class Recall:
    """Ledgers of partitions, as of the newest snapshot that can be read."""

    def __init__(self, js: JetStreamContext, layout: Layout) -> None:
        self._js: Final = js
        self._layout: Final = layout
        self._snapshots: Final = Snapshots(js, layout)

    async def is_readable(self, partition: int, state: PartitionInfo, begins_at: int) -> bool:
        """Whether a reader that comes now can know all of a partition, or will in a moment. Raises `PlaneError`.

        It can where no page is gone, where all streams begin with a page that is there (`Ledger.begins_at`), where a snapshot
        stands for the pages that are gone, or where a replica holds the partition, which takes a snapshot of it.
        """
        if state.first <= max(1, begins_at):
            return True
        for kept in await self._snapshots.usable(partition, state):
            if kept.position + 1 >= state.first and await self._snapshots.is_whole(kept):
                return True
        told = await entries(self._js, self._layout, "asking what replicas hold", PREFIX)
        opinions = [opinion for value in told.values() if (opinion := Opinion.decode(value)) is not None]
        return any(str(partition) in opinion.places for opinion in opinions)

    async def ledger(self, partition: int, state: PartitionInfo) -> Ledger | None:
        """Of one partition, as of the newest snapshot of what it holds; None where no snapshot is whole.

        Raises `PlaneError`, also where the servers do not answer in time for one of them and no other can be read: it may be
        whole.
        """
        late: PlaneError | None = None
        for kept in await self._snapshots.usable(partition, state):
            try:
                return (await self._snapshots.streams(kept)).restored()[0]
            except SnapshotError as error:
                log.warning("%s", error)
            except PlaneError as error:
                if error.fault not in {"missing", "timeout"}:
                    raise
                log.warning("%s", error)
                late = late or (error if error.fault == "timeout" else None)
        if late is not None:
            raise late
        return None
