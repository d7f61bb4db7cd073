"""An index that is built from a plane's log, in the place of one that follows engines itself.

Theory of operation. A *generation* is an index with all that keeps it: ledgers, readers of the lanes, a thread that applies
what they bring. It begins with the newest snapshot, reads the lanes to their end, and is hidden until then; then the fleet
answers from it. Where it cannot go on, because a lane was deleted or purged, or because what it holds is not what the other
replicas or an engine hold, another one is built beside it, and takes its place when it is complete.

Replicas tell each other the digests of all streams at the same places of the log. One that is alone with what it holds is in
the wrong; where nobody has a majority they build anew one after the other.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvevents.errors import ConfigError, KVEventsError, PlaneError, SnapshotError, UnknownSourceError
from kvevents.index import PrefixIndex
from kvevents.plane.connection import opened, require_jetstream
from kvevents.plane.faults import told
from kvevents.plane.layout import Layout, find, state_of
from kvevents.plane.leases import Holder, Lease, lease_key
from kvevents.plane.ledger import Ledger
from kvevents.plane.opinions import PREFIX, Opinion
from kvevents.plane.reading import LaneReader
from kvevents.plane.records import Key
from kvevents.plane.settings import PlaneSettings
from kvevents.plane.snapshots import VERSION, Kept, Snapshots, Taken, digests_of
from kvevents.plane.subscriber import LogSubscriber
from kvevents.service.fleet import Fleet
from kvevents.service.follower import Follower, Listener
from kvevents.service.registration import Registration
from kvevents.stream import Checkpoint

if TYPE_CHECKING:
    from nats.js.kv import KeyValue

    from kvevents.plane.client import PlaneClient

log = logging.getLogger(__name__)

ORIGIN: Final = "plane"
"""Who names the members."""
LOOK_SECONDS: Final = 0.05
"""Between two looks at readers and members."""
SNAPSHOT_LEASE: Final = lease_key("lease", "snapshot")
"""Who has it writes the next snapshot."""
TELL_SECONDS: Final = 2.0
"""Between two looks at the other replicas."""
AGAIN_SECONDS: Final = 2.0
"""Between two attempts to reach the servers, or to build."""
MAX_QUEUED_BYTES: Final = 128 << 20
"""Of pages that came and are not in the index; a lane is read no further above it."""
TURN_SECONDS: Final = 20.0
"""That replicas of different opinions, none of them a majority, leave each other to build anew."""
REBUILD_SECONDS: Final = 60.0
"""Between two generations at least, when it is the content that is doubted."""
FRESH: Final = 0.8
"""Share of the time between two snapshots within which another replica's is new enough."""
TAKE_SECONDS: Final = 60.0
"""For the thread that applies to write a snapshot to the disk."""


@dataclass
class Generation:
    """An index, and what keeps it."""

    index: PrefixIndex
    subscriber: LogSubscriber
    follower: Follower
    made: dict[int, str]
    """By lane which stream it is."""
    began_with: str
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    broken: str = ""
    """Why it cannot go on."""

    async def end(self) -> None:
        """Stop reading, and applying."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.to_thread(self.follower.stop)


class Replica:
    """Keeps a fleet's index as the log is. `run` until it is cancelled; everything else may be read at any time."""

    def __init__(
        self, plane: PlaneSettings, name: str, fleet: Fleet, *, snapshot_seconds: float, memory_limit: int | None
    ) -> None:
        self.plane: Final = plane
        self.name: Final = name
        self.is_complete = False
        """Whether there was ever a generation that had read the log to its end."""
        self.fault = ""
        """Why nothing is known, or nothing new; empty where all is well."""
        self.generations = 0
        self.disagreements = 0
        """How often another replica held something else at the same place."""
        self.snapshot: Kept | None = None
        """The newest one that counts, as far as this replica knows."""
        self.snapshot_fault = ""
        self.unheard = ""
        """Why the other replicas are not told what this one holds, as where it may only read."""
        self._fleet: Final = fleet
        self._snapshot_seconds: Final = snapshot_seconds
        self._memory_limit: Final = memory_limit
        self._generation: Generation | None = None
        self._cards: Mapping[Key, bytes] | None = None
        """Of which the fleet was told last."""
        self._built_at = float("-inf")
        self._differs_since: float | None = None

    @property
    def why_hidden(self) -> str:
        """Why there is no answer yet."""
        return self.fault or "the log is being read"

    @property
    def generation(self) -> Generation | None:
        """The one that answers."""
        return self._generation

    # --- its life

    async def run(self) -> None:
        """For as long as the service lives."""
        try:
            while True:
                try:
                    async with opened(self.plane, name=f"kvevents replica {self.name}") as client:
                        await require_jetstream(client)
                        await self._replicate(client)
                except (PlaneError, SnapshotError) as error:
                    self._tell(str(error))
                    await asyncio.sleep(AGAIN_SECONDS)
        finally:
            if self._generation is not None:
                await self._generation.end()

    def _tell(self, fault: str) -> None:
        if fault and fault != self.fault:
            log.warning("%s", fault)
        self.fault = fault

    async def _replicate(self, client: PlaneClient) -> None:
        js = client.jetstream()
        while (layout := await find(js, self.plane.name)) is None:
            self._tell(f"there is no plane {self.plane.name!r} yet; a bridge makes it")
            await asyncio.sleep(AGAIN_SECONDS)
        snapshots = Snapshots(js, layout)
        while True:
            generation = await self._build(client, layout, snapshots)
            await self._adopt(generation)
            await self._keep(client, layout, snapshots, generation)

    # --- a generation

    async def _build(self, client: PlaneClient, layout: Layout, snapshots: Snapshots) -> Generation:
        """One that is complete. Raises `PlaneError` where the log cannot be read."""
        while True:
            generation = await self._begin(client, layout, snapshots)
            try:
                while not generation.subscriber.is_complete and not generation.broken:
                    faults = [lane.fault for lane in generation.subscriber.lanes.values() if lane.fault]
                    self._tell(faults[0] if faults else "")
                    await asyncio.sleep(LOOK_SECONDS)
            except BaseException:
                await generation.end()
                raise
            holes = [ledger.hole for ledger in generation.subscriber.ledgers.values() if ledger.hole]
            if not generation.broken and not holes:
                return generation
            generation.broken = generation.broken or f"{holes[0]}; a bridge that is started writes the lane anew"
            self._tell(f"an index could not be completed: {generation.broken}")
            await generation.end()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _begin(self, client: PlaneClient, layout: Layout, snapshots: Snapshots) -> Generation:
        index = PrefixIndex(memory_limit=self._memory_limit)
        states = {lane: await state_of(client.jetstream(), layout, lane) for lane in range(layout.lanes)}
        ledgers = {lane: Ledger() for lane in states}
        doubts: Mapping[Key, frozenset[object]] = {}
        kept, taken = await self._restored(snapshots, index)
        if kept is not None and taken is not None:
            restored, doubts = taken.restored()
            for lane, ledger in restored.items():
                if lane in states and kept.made.get(str(lane)) == states[lane].made:
                    ledgers[lane] = ledger
                else:
                    _forget(index, ledger)
        for lane, state in states.items():
            if ledgers[lane].position + 1 < state.first and ledgers[lane].position < state.last:
                _forget(index, ledgers[lane])
                ledgers[lane] = Ledger.behind(state.first - 1, f"pages of lane {lane} are gone that no snapshot stands for")
        subscriber = LogSubscriber(ledgers, doubts, time.monotonic, lambda key: _digest(index, key))  # type: ignore[arg-type]
        follower = Follower(subscriber, index, Listener())
        made = {lane: state.made for lane, state in states.items()}
        generation = Generation(index, subscriber, follower, made, "the log alone" if kept is None else f"snapshot {kept.name}")
        follower.start()
        generation.tasks = [asyncio.create_task(self._read(client, layout, lane, generation)) for lane in ledgers]
        return generation

    async def _restored(self, snapshots: Snapshots, index: PrefixIndex) -> tuple[Kept | None, Taken | None]:
        """The newest snapshot that can be read, in `index`."""
        for kept in await snapshots.kept():
            with tempfile.TemporaryDirectory(prefix="kvevents-") as folder:
                try:
                    taken = await snapshots.load(kept, index, Path(folder))
                except (SnapshotError, PlaneError) as error:
                    if isinstance(error, PlaneError) and error.fault != "missing":
                        raise
                    log.warning("%s", error)
                else:
                    self.snapshot = kept
                    return kept, taken
        return None, None

    async def _read(self, client: PlaneClient, layout: Layout, lane: int, generation: Generation) -> None:
        """Read one lane for as long as it can be, and there is room for what comes."""
        subscriber = generation.subscriber
        position = subscriber.ledgers[lane].position
        while True:
            reader = LaneReader(
                client,
                layout,
                lane,
                position,
                generation.made[lane],
                lambda came, lane=lane: subscriber.put(lane, came),  # type: ignore[misc]
            )
            reading = asyncio.create_task(reader.run())
            try:
                while subscriber.queued_bytes < MAX_QUEUED_BYTES:
                    done, _ = await asyncio.wait({reading}, timeout=LOOK_SECONDS)
                    subscriber.tell(lane, reader.behind, reader.fault)
                    if done:
                        generation.broken = f"lane {lane} was {reading.result().why}"
                        return
            finally:
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading
            position = reader.position
            while subscriber.queued_bytes > MAX_QUEUED_BYTES // 2:  # noqa: ASYNC110 - a thread takes it away
                await asyncio.sleep(LOOK_SECONDS)

    async def _adopt(self, generation: Generation) -> None:
        """Have the fleet answer from it."""
        registrations = self._registrations(generation)
        for registration in registrations:
            generation.index.label(registration.key[0], registration.wall.name)
        before, self._generation = self._generation, generation
        former = self._fleet.switch(generation.follower, generation.index)
        self._register(generation, registrations)
        self.generations += 1
        self._built_at, self._differs_since = time.monotonic(), None
        self.is_complete = True
        self._tell("")
        log.info("the index is complete: %d streams, begun with %s", len(registrations), generation.began_with)
        if before is not None:
            await before.end()
        else:
            await asyncio.to_thread(former.stop)

    # --- members

    def _registrations(self, generation: Generation) -> list[Registration]:
        found = []
        self._cards = generation.subscriber.cards
        for key, card in self._cards.items():
            try:
                registration = msgspec.json.decode(card, type=Registration)
            except (msgspec.MsgspecError, ConfigError) as error:
                log.warning("%s rank %d has a card that cannot be read, and is left out: %s", *key, error)
                continue
            if registration.key == key:
                found.append(registration)
        return found

    def _register(self, generation: Generation, registrations: list[Registration]) -> None:
        known = {member.registration.key: member.registration for member in list(self._fleet.members.values())}
        if any(known.get(each.key, each) != each for each in registrations):
            # Another model behind the same name: the index would forget what it holds of it, and could not learn it again.
            generation.broken = "the card of an engine has changed"
        for fault in self._fleet.replace(ORIGIN, registrations, resume=lambda key: Checkpoint(*key, 0, -1)):
            log.warning("%s", fault)

    # --- as long as it goes well

    async def _keep(self, client: PlaneClient, layout: Layout, snapshots: Snapshots, generation: Generation) -> None:
        """Until it must be built anew."""
        tell_at = 0.0
        snapshot_at = time.monotonic() + self._snapshot_seconds
        while not generation.broken:
            await asyncio.sleep(LOOK_SECONDS)
            self._watch(generation)
            now = time.monotonic()
            if now >= tell_at:
                tell_at = now + TELL_SECONDS
                await self._compare(client, layout, generation, now)
            if now >= snapshot_at:
                snapshot_at = now + self._snapshot_seconds
                await self._take(client, layout, snapshots, generation)
        log.warning("the index is built anew: %s", generation.broken)

    def _watch(self, generation: Generation) -> None:
        if generation.subscriber.cards is not self._cards:
            self._register(generation, self._registrations(generation))
        if generation.subscriber.diverged and time.monotonic() - self._built_at > REBUILD_SECONDS:
            generation.broken = "an engine holds something else than this index"
        faults = [lane.fault for lane in generation.subscriber.lanes.values() if lane.fault]
        self._tell(faults[0] if faults else "")

    async def _take(self, client: PlaneClient, layout: Layout, snapshots: Snapshots, generation: Generation) -> None:
        """Write a snapshot, unless another replica does. What the servers do not take shows, and is tried again."""
        if self._differs_since is not None:
            return  # it may be this one that is in the wrong
        lease = Lease(client.jetstream(), layout, SNAPSHOT_LEASE, Holder.here())
        try:
            if not await self._is_fresh(snapshots) and await lease.acquire() and not await self._is_fresh(snapshots):
                self.snapshot = await self._take_within(lease, snapshots, generation)
        except (KVEventsError, OSError, TimeoutError) as error:
            self._tell_snapshot(error)
        else:
            self.snapshot_fault = ""
        finally:
            await lease.release()

    async def _is_fresh(self, snapshots: Snapshots) -> bool:
        """Whether the newest one that counts, whoever took it, is new enough."""
        kept = await snapshots.kept()
        self.snapshot = kept[0] if kept else self.snapshot
        return bool(kept) and time.time() - kept[0].at < self._snapshot_seconds * FRESH

    def _tell_snapshot(self, error: Exception) -> None:
        fault = str(error) or "it was not written in time"
        if fault != self.snapshot_fault:
            log.warning("no snapshot was taken: %s", fault)
        self.snapshot_fault = fault

    async def _take_within(self, lease: Lease, snapshots: Snapshots, generation: Generation) -> Kept:
        keeping = asyncio.create_task(lease.keep())
        try:
            with tempfile.TemporaryDirectory(prefix="kvevents-") as folder:
                path = Path(folder, "index")
                order = generation.follower.order(lambda: _take(generation, path))
                async with asyncio.timeout(TAKE_SECONDS):
                    taken, blocks = await asyncio.wrap_future(order)
                return await snapshots.save(taken, path, blocks, self.name, generation.made)
        finally:
            keeping.cancel()

    # --- what the others hold

    async def _compare(self, client: PlaneClient, layout: Layout, generation: Generation, now: float) -> None:
        own = Opinion.of(dict(generation.subscriber.census))
        try:
            others = await self._opinions(client, layout, own)
        except PlaneError as error:
            log.debug("the other replicas cannot be asked: %s", error)
            return
        against = Counter(own.agrees(opinion) for opinion in others.values())
        if not against[False]:
            if against[True] or not others:
                self._differs_since = None
            return
        if self._differs_since is None:
            self._differs_since = now
            self.disagreements += 1
            log.error("%d of %d replicas hold something else at the same place", against[False], len(others))
        turn = sorted([self.name, *others]).index(self.name)
        outvoted = against[False] > against[True] + 1
        in_turn = against[False] == against[True] + 1 and now - self._differs_since > (turn + 1) * TURN_SECONDS
        if (outvoted or in_turn) and now - self._built_at > TURN_SECONDS:
            generation.broken = "the other replicas hold something else"

    async def _opinions(self, client: PlaneClient, layout: Layout, own: Opinion) -> dict[str, Opinion]:
        """What the others say, after this one has."""
        with told("telling the other replicas what this one holds"):
            bucket = await client.jetstream().key_value(layout.leases)
            await self._say(bucket, own)
            found: dict[str, Opinion] = {}
            for key in await bucket.keys():
                name = key.removeprefix(PREFIX)
                if name not in {key, self.name}:
                    entry = await bucket.get(key)
                    opinion = Opinion.decode(entry.value or b"")
                    found |= {} if opinion is None else {name: opinion}
        return found

    async def _say(self, bucket: KeyValue, own: Opinion) -> None:
        """What this one holds. One that may only read compares itself all the same."""
        try:
            with told("telling the other replicas what this one holds"):
                await bucket.put(PREFIX + self.name, own.encode())
        except PlaneError as error:
            if error.fault != "denied":
                raise
            if not self.unheard:
                log.warning("this replica only reads: %s", error)
            self.unheard = str(error)
        else:
            self.unheard = ""


def _forget(index: PrefixIndex, ledger: Ledger) -> None:
    for key in ledger.streams:
        index.remove_worker(key)
        index.admit(key)


def _digest(index: PrefixIndex, key: Key) -> str | None:
    with suppress(UnknownSourceError):
        return index.digest(key)
    return None


def _take(generation: Generation, path: Path) -> tuple[Taken, int]:
    """By the thread that applies: ledgers and index are of one moment then."""
    subscriber, index = generation.subscriber, generation.index
    index.snapshot(path)
    ledgers = {lane: ledger.save() for lane, ledger in subscriber.ledgers.items()}
    doubts = [(*key, [doubt.name for doubt in found]) for key, found in subscriber.doubts().items()]
    return Taken(VERSION, ledgers, doubts, digests_of(index)), index.stats().blocks
