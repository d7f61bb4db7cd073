"""A replica of the service without HTTP."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvevents.index import PrefixIndex
from kvevents.service.fleet.fleet import Fleet
from kvevents.stream import Trust
from kvevents_plane.replica.replica import Replica
from kvevents_plane.settings import PlaneSettings
from service_cases import confirm


class ReplicaRunner:
    """A replica with a fleet and no HTTP."""

    def __init__(self, plane: PlaneSettings, name: str) -> None:
        self.fleet = Fleet(PrefixIndex(), max_sources=100)
        self.replica = Replica(plane, name, self.fleet, snapshot_seconds=3600, memory_limit=None)

    async def run(self, stop: asyncio.Event) -> None:
        self.fleet.follower.start()
        task = asyncio.create_task(self.replica.run())
        await stop.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    @property
    def digest(self) -> str | None:
        try:
            return self.fleet.index.digest(self.key)
        except LookupError:
            return None

    @property
    def key(self) -> tuple[str, int]:
        return next(iter(self.fleet.members), ("", 0))

    @property
    def is_exact(self) -> bool:
        return any(member.trust == Trust.EXACT for member in list(self.fleet.members.values()))

    def confirm(self) -> None:
        """Call `confirm` for every source."""
        for member in list(self.fleet.members.values()):
            if member.status is not None:
                trust, endpoint = member.status.trust, member.registration.endpoint
                confirm({"endpoint": endpoint, "trust": {"reason": trust.reason}, "last_seq": member.status.last_seq})

    def corrupt_index(self) -> None:
        """Remove all blocks from the index, as a bug or a fault of the memory would."""
        index = self.fleet.index
        index.remove_worker(self.key)
        index.readmit(self.key)
