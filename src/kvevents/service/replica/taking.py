"""Snapshots of the partitions that a replica shows: each by one replica at a time, under a lease."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvevents.errors import KVEventsError, PlaneError
from kvevents.plane.layout import Layout
from kvevents.plane.leases import Holder, Lease
from kvevents.plane.snapshots import Kept, Snapshots
from kvevents.service.replica.comparing import Comparing
from kvevents.service.replica.generation import Generation

if TYPE_CHECKING:
    from nats.js import JetStreamContext

log = logging.getLogger(__name__)

LEASE: Final = "lease.snapshot"
"""Level of the keys of leases; who has a partition's writes its next snapshot."""
FRESH: Final = 0.8
"""Share of the time between two snapshots within which another replica's is new enough, since this one found it."""
LOOKS: Final = 50
"""In the time between two snapshots of a partition."""


class Taking:
    """Takes the snapshots of one replica."""

    def __init__(self, name: str, comparing: Comparing, seconds: float) -> None:
        self._name: Final = name
        self._comparing: Final = comparing
        self._seconds: Final = seconds
        self._due: dict[int, float] = {}
        self._faults: dict[int, str] = {}

    @property
    def fault(self) -> str:
        """Why a partition's last snapshot that was due was not taken; empty where all were."""
        return next(iter(self._faults.values()), "")

    async def run(self, js: JetStreamContext, layout: Layout, snapshots: Snapshots, generation: Generation) -> None:
        """As long as a generation answers. Partitions have different times, so that the work of one is never that of all."""
        self._due, self._faults = {}, {}
        while True:
            await asyncio.sleep(self._seconds / LOOKS)
            now = time.monotonic()
            shown = generation.shown
            self._due = {partition: self._due.get(partition, now + random.uniform(0.0, self._seconds)) for partition in shown}  # noqa: S311
            for partition in sorted(shown, key=self._due.__getitem__):
                if self._due[partition] > time.monotonic():
                    break
                self._due[partition] = time.monotonic() + self._seconds
                # It may be this index that is in the wrong.
                if not self._comparing.differs and partition in generation.shown:
                    await self._take(Lease(js, layout, f"{LEASE}.{partition}", Holder.here()), partition, snapshots, generation)

    async def _take(self, lease: Lease, partition: int, snapshots: Snapshots, generation: Generation) -> None:
        """Write a snapshot, unless another replica does. What the servers do not take shows, and is tried again."""
        try:
            # Asked for again with the lease, for who had it before may just have taken one.
            if (
                not await self._is_fresh(partition, snapshots, generation)
                and await lease.acquire()
                and not await self._is_fresh(partition, snapshots, generation)
            ):
                generation.know(await self._take_within(lease, partition, snapshots, generation))
        except (KVEventsError, OSError, TimeoutError) as error:
            self._tell(partition, error)
        else:
            self._faults.pop(partition, None)
        finally:
            await lease.release()

    async def _is_fresh(self, partition: int, snapshots: Snapshots, generation: Generation) -> bool:
        """Whether the newest one that counts, whoever took it, is new enough."""
        kept = await snapshots.kept(partition)
        if kept:
            generation.know(kept[0])
        known_for = snapshots.known_for(partition)
        return known_for is not None and known_for < self._seconds * FRESH

    def _tell(self, partition: int, error: Exception) -> None:
        fault = f"partition {partition}: {str(error) or 'it was not written in time'}"
        denied = isinstance(error, PlaneError) and error.fault == "denied"
        # Who may not take one may take none.
        if fault != self._faults.get(partition) and not (denied and self._faults):
            log.warning("no snapshot was taken: %s", fault)
        self._faults[partition] = fault

    async def _take_within(self, lease: Lease, partition: int, snapshots: Snapshots, generation: Generation) -> Kept:
        made = generation.made.get(partition, "")  # nothing comes of one that was let go meanwhile
        keeping = asyncio.create_task(lease.keep())
        try:
            with tempfile.TemporaryDirectory(prefix="kvevents-") as folder:
                path = Path(folder, "index")
                taken, blocks = await generation.take(partition, path)
                return await snapshots.save(taken, path, blocks, self._name, made)
        finally:
            keeping.cancel()
