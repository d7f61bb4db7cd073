"""A replica: it builds the index from a plane's log instead of following engines.

Theory of operation. An *index build* is an index with everything that fills it: ledgers, readers of the partitions, and a
thread that applies their events. It begins with the newest snapshot of each partition and reads the partitions to their ends.
Then the fleet answers from it. A build cannot continue if a partition was deleted or purged, or if its content differs from
that of the other replicas or of an engine. Then another build runs beside it, and replaces it when it is complete.

A replica that holds a share takes over and releases partitions while it answers. It serves a partition when it has read it to
its end, and stops serving it before it removes any of its blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvevents.errors import ConfigError, PlaneError, SnapshotError
from kvevents.index import PrefixIndex
from kvevents.plane.connection import open_client, require_jetstream
from kvevents.plane.layout import Layout, find_plane
from kvevents.plane.records import StreamKey
from kvevents.plane.replica_digests import ReplicaDigests
from kvevents.plane.settings import PlaneSettings
from kvevents.plane.sharding import ShardAnnouncement
from kvevents.plane.snapshots import Snapshots
from kvevents.service.config import ShardSettings
from kvevents.service.fleet import Fleet
from kvevents.service.registration import Registration
from kvevents.service.replica.coordination import Assignment, ConsistencyCheck
from kvevents.service.replica.index_build import IndexBuild, Snapshotter
from kvevents.stream import Checkpoint

if TYPE_CHECKING:
    from kvevents.plane.nats_client import PlaneClient

log = logging.getLogger(__name__)

ORIGIN: Final = "plane"
"""Origin of the members."""
LOOK_SECONDS: Final = 0.05
"""Pause between two checks of readers and members."""
TELL_SECONDS: Final = 2.0
"""Pause between two comparisons with the other replicas."""
AGAIN_SECONDS: Final = 2.0
"""Pause between two attempts to reach the servers, or to build an index."""
REBUILD_SECONDS: Final = 60.0
"""Between two builds at least, when it is the content that is doubted."""


class Replica:
    """Keeps a fleet's index equal to the log. `run` it until it is cancelled. All properties may be read at any time."""

    def __init__(
        self,
        plane: PlaneSettings,
        name: str,
        fleet: Fleet,
        *,
        snapshot_seconds: float,
        memory_limit: int | None,
        shard: ShardSettings | None = None,
    ) -> None:
        self.plane: Final = plane
        self.name: Final = name
        self.is_complete = False
        """Whether there was ever a generation that had read the log to its end."""
        self.layout: Layout | None = None
        """Of the plane; None before it was found."""
        self.builds = 0
        self._fault = ""
        self._fleet: Final = fleet
        self._memory_limit: Final = memory_limit
        self._generation: IndexBuild | None = None
        self._told: tuple[Mapping[StreamKey, bytes], frozenset[int]] | None = None
        """Cards and partitions that the fleet was last updated with."""
        self._settled = set[int]()
        """Partitions that were read again because of a dispute."""
        self._answers = frozenset[int]()
        """Partitions whose engines are registered in the fleet."""
        self._built_at = float("-inf")
        self._holding: Final = Assignment(name, shard, lambda: self.shown)
        self._comparing: Final = ConsistencyCheck(name)
        self._taking: Final = Snapshotter(name, self._comparing, snapshot_seconds)

    # --- what may be read

    @property
    def why_hidden(self) -> str:
        """Why queries are not answered yet."""
        return self.fault or "the log is being read"

    @property
    def fault(self) -> str:
        """Why the log cannot be read; empty if it can."""
        return self._fault or self._holding.fault

    @property
    def snapshot_fault(self) -> str:
        """Why the last due snapshot was not taken; empty if it was."""
        return self._taking.fault

    @property
    def passed_over(self) -> list[str]:
        """Why the newest snapshots could not be read, of partitions that were begun without."""
        return [] if self._generation is None else self._generation.passed_over

    @property
    def disagreements(self) -> int:
        """How often another replica held something else at the same place."""
        return self._comparing.disagreements

    @property
    def generation(self) -> IndexBuild | None:
        """The index build that queries are answered from."""
        return self._generation

    @property
    def shown(self) -> frozenset[int]:
        """The partitions that answers cover: those that are read to their end and whose engines are registered."""
        return frozenset() if self._generation is None else self._answers & self._generation.shown

    @property
    def present(self) -> Mapping[str, ShardAnnouncement]:
        """The other replicas that hold a share and are heard of."""
        assignment = self._holding.assignment
        return {} if assignment is None else assignment.present

    @property
    def refused(self) -> Mapping[str, str]:
        """Other replicas that must not be asked, and why."""
        return self._holding.refused

    @property
    def wanted(self) -> frozenset[int]:
        """The partitions that are to be held."""
        return self._holding.wanted

    # --- its life

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            while True:
                try:
                    async with open_client(self.plane, name=f"kvevents replica {self.name}") as client:
                        await require_jetstream(client)
                        await self._replicate(client)
                except (PlaneError, SnapshotError, ConfigError) as error:  # the last of files that were replaced meanwhile
                    self._tell(str(error))
                    await asyncio.sleep(AGAIN_SECONDS)
        finally:
            if self._generation is not None:
                await self._generation.end()

    def _tell(self, fault: str) -> None:
        if fault and fault != self._fault:
            log.warning("%s", fault)
        self._fault = fault

    async def _replicate(self, client: PlaneClient) -> None:
        js = client.jetstream()
        while (layout := await find_plane(js, self.plane.name)) is None:
            self._tell(f"there is no plane {self.plane.name!r} yet; a bridge makes it")
            await asyncio.sleep(AGAIN_SECONDS)
        self.layout = layout
        self._holding.begin(layout)
        snapshots = Snapshots(js, layout)
        async with _beside(self._holding.run(client, layout)):
            while True:
                generation = await self._build(client, layout, snapshots)
                await self._adopt(generation)
                async with (
                    _beside(self._taking.run(js, layout, snapshots, generation)),
                    _beside(self._adjust(generation)),
                ):
                    await self._keep(client, layout, generation)

    # --- a generation

    async def _build(self, client: PlaneClient, layout: Layout, snapshots: Snapshots) -> IndexBuild:
        """One that is complete. Raises `PlaneError` where the log cannot be read."""
        while not self._holding.is_settled:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(LOOK_SECONDS)
        while True:
            index = PrefixIndex(memory_limit=self._memory_limit)
            generation = IndexBuild(client, layout, snapshots, index, self._settled, self.plane.reader)
            try:
                # One that takes the place of another one shows at least what that does.
                while not generation.broken and not generation.shown.issuperset(wanted := self._holding.wanted | self.shown):
                    await generation.adjust(wanted, ())
                    self._tell(_fault_of(generation))
                    await asyncio.sleep(LOOK_SECONDS)
            except BaseException:
                await generation.end()
                raise
            if not generation.broken:
                return generation
            self._settled |= generation.settled
            self._tell(f"an index could not be completed: {generation.broken}")
            await generation.end()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _adopt(self, generation: IndexBuild) -> None:
        """Make the fleet answer from a build."""
        registrations, shown = self._registrations(generation)
        before, self._generation = self._generation, generation
        former = self._fleet.replace_index(generation.follower, generation.index)
        await self._register(generation, registrations, shown)
        self.builds += 1
        self._built_at = time.monotonic()
        self._comparing.forget()
        self.is_complete = True
        self._tell("")
        log.info("the index is complete: %d streams, begun with %s", len(registrations), _begun_with(generation))
        if before is not None:
            await before.end()
        else:
            await asyncio.to_thread(former.stop)

    # --- members

    def _registrations(self, generation: IndexBuild) -> tuple[list[Registration], frozenset[int]]:
        """Of the engines in the partitions that are shown, and these partitions."""
        found = []
        cards, shown = self._told = generation.subscriber.registrations, generation.shown
        for key, card in cards.items():
            if self.layout is None or self.layout.partition_of(key[0]) not in shown:
                continue
            try:
                registration = msgspec.json.decode(card, type=Registration)
            except (msgspec.MsgspecError, ConfigError) as error:
                log.warning("%s rank %d has a card that cannot be read, and is left out: %s", *key, error)
                continue
            if registration.key == key:
                generation.index.set_model(key[0], registration.scope.name)
                found.append(registration)
        return found, shown

    async def _register(self, generation: IndexBuild, registrations: list[Registration], shown: frozenset[int]) -> None:
        known = {member.registration.key: member.registration for member in list(self._fleet.members.values())}
        if any(known.get(each.key, each) != each for each in registrations):
            # Another model behind the same name: the index would forget what it holds of it, and could not learn it again.
            generation.broken = "the card of an engine has changed"
        for fault in self._fleet.replace_registrations(ORIGIN, registrations, resume=lambda key: Checkpoint(*key, 0, -1)):
            log.warning("%s", fault)
        await asyncio.wrap_future(generation.follower.submit(self._fleet.refresh))
        self._answers = shown

    # --- as long as it goes well

    async def _adjust(self, generation: IndexBuild) -> None:
        """Begin and release partitions according to the assignment."""
        while True:
            try:
                await generation.adjust(self._holding.wanted, self._holding.spare)
            except PlaneError as error:
                log.warning("partitions cannot be taken over: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)
            await asyncio.sleep(LOOK_SECONDS)

    async def _keep(self, client: PlaneClient, layout: Layout, generation: IndexBuild) -> None:
        """Return when the index must be rebuilt."""
        tell_at = 0.0
        while not generation.broken:
            await asyncio.sleep(LOOK_SECONDS)
            await self._watch(generation)
            now = time.monotonic()
            if now >= tell_at:
                tell_at = now + TELL_SECONDS
                own = ReplicaDigests.of(dict(generation.subscriber.digests))
                why = await self._comparing.compare(client, layout, own, self._built_at)
                generation.broken = generation.broken or why
        self._settled |= generation.settled
        log.warning("the index is built anew: %s", generation.broken)

    async def _watch(self, generation: IndexBuild) -> None:
        if (
            self._told is None
            or self._told[0] is not generation.subscriber.registrations
            or self._told[1] is not generation.shown
        ):
            await self._register(generation, *self._registrations(generation))
        if generation.subscriber.diverged and time.monotonic() - self._built_at > REBUILD_SECONDS:
            generation.broken = "an engine holds something else than this index"
        self._tell(generation.fault)


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Return a context that runs `work` concurrently. An error of `work` is raised in the context."""
    task, here = asyncio.create_task(work), asyncio.current_task()
    failures: list[BaseException] = []

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and here is not None:
            failures.append(error)
            here.cancel()

    task.add_done_callback(ended)
    try:
        yield
    except asyncio.CancelledError:
        if failures and here is not None and not here.uncancel():
            raise failures[0] from None
        raise
    finally:
        task.remove_done_callback(ended)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _fault_of(generation: IndexBuild) -> str:
    hole = generation.hole
    return generation.fault or (
        hole and f"an index could not be completed: {hole}; a bridge that is started writes the partition anew"
    )


def _begun_with(generation: IndexBuild) -> str:
    names = list(generation.began_with.values())
    if not names:
        return "the log alone"
    return f"snapshot {names[0]}" if len(names) == 1 else f"snapshots of {len(names)} partitions"
