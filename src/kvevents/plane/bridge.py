"""The bridge: what engines say goes into the log, each batch once and in order, whoever else writes it too.

Theory of operation. A thread follows the engines (`listening`) and hands records over; everything else is one event loop, where
each partition reads and writes by itself (`partitions`). It does not matter how many bridges watch an engine, nor which of them
is killed when: the servers take a page only from a writer who has read all before it, and what a bridge has in its head the
engines have as well.

- *Back-pressure*: what the servers do not take waits. Where a partition takes nothing, its streams are *parked* once their
  share of `max_queued_bytes` is used up: followed no more until the partition has taken what waits, and then from there on.
  Above `max_queued_bytes` in all the thread reads nothing. In both cases what the engines publish meanwhile is asked for by
  replay. Beats say for how long that lasts, or for how long the oldest record has waited, above `late_seconds`: replicas
  believe no stream of a bridge that is behind.
- *Name*: in the log each process is a bridge of its own, `NAME#LIFE`, so two of one name do not speak for each other. Each sees
  the other's beats, and reports it. What a process has said counts until its beats are missed.
- *Reserve*: a bridge with `hold_back` writes only what others have not written after so many seconds.
- *Membership*: an engine that no bridge has reached for `dead_seconds` leaves the log. So does, by an active bridge, one that
  none has named for `unnamed_seconds` (`membership`). A bridge takes back what it has said of engines that it names no more.
- *A partition that was deleted* is made anew, and all its streams are followed from their beginning.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from kvevents.errors import ConfigError, PlaneError
from kvevents.plane.connection import opened, require_jetstream
from kvevents.plane.layout import Layout, make
from kvevents.plane.ledger import Told
from kvevents.plane.listening import Heard, Listener, size_of
from kvevents.plane.membership import ALIVE, Members, Unnamed
from kvevents.plane.partition_writer import BridgePartition, PartitionStatus
from kvevents.plane.records import Beat, Join, Key, Leave, Lost, StreamRecord, Trusting
from kvevents.plane.settings import BridgeSettings
from kvevents.stream import Source

if TYPE_CHECKING:
    from kvevents.plane.client import PlaneClient

__all__ = ["Bridge", "BridgeSettings", "BridgeStatus", "PartitionStatus", "Watch"]

log = logging.getLogger(__name__)

PAGE_BYTES: Final = 512 << 10
"""Of one page at most, less where servers take less: enough for thousands of batches, and not so much that others wait."""
MARGIN_BYTES: Final = 4 << 10
"""Of a message for what is in it beside records of streams: headers, a beat, the bridge's name."""
MAX_CARD_BYTES: Final = 8 << 10
MAX_SOURCE_BYTES: Final = 1 << 10
"""Of the name of an engine."""
LEAST_PAGE_BYTES: Final = MAX_CARD_BYTES + 8 * MAX_SOURCE_BYTES
"""What any record but a batch has room in."""
TEND_SECONDS: Final = 0.5
"""Between two looks at members and trust."""
UNNAMED_LOOK_SECONDS: Final = 10.0
"""Between two looks at all streams of the log for those that no bridge names, at most."""
GAP_HOLD_SECONDS: Final = 1.0
"""How long a gap waits for another bridge that may have what is missing."""
PAUSE_SECONDS: Final = 0.02
"""Between two looks at what many tasks must bring about."""
START_SECONDS: Final = 30.0
"""For the plane to be found or made: servers that have just begun, and streams that are new, elect their leaders."""
MAKE_SECONDS: Final = 2.0
"""For each part of it. What is asked of a stream without a leader is never answered."""
PASSING: Final = frozenset({"away", "timeout"})
"""Faults of a plane that is being made that may go by themselves."""
STOP_SECONDS: Final = 5.0
"""For what is queued to be written when a bridge ends."""


class Watch(NamedTuple):
    """An engine's rank to be followed."""

    source: Source
    card: bytes = b""
    """What replicas are to know of it, at most `MAX_CARD_BYTES`; the bridge does not look into it."""

    @property
    def key(self) -> Key:
        """As the log knows it."""
        return self.source.label, self.source.rank


class BridgeStatus(NamedTuple):
    """A bridge as an operator sees it."""

    name: str
    connected: bool
    partitions: list[PartitionStatus]
    written: int
    """Batches that this bridge has put into the log."""
    conflicts: int
    """Pages that were refused because somebody else had written."""
    adrift: int
    """How often a stream was followed anew, since it and the log had lost each other."""
    breaches: int
    """Records of the log that no bridge writes: 0, unless something is broken."""
    suspects: str
    """Why this end's network is suspected rather than the engines; empty where it is not."""
    unnamed: int
    """Engines of the log that no bridge names; 0 for one in reserve, which does not look."""
    failure: str
    namesake: str = ""
    """Another process that writes under the same name now; empty where none does."""


class Bridge:
    """Writes what engines say into the log: `run` until an event is set.

    Raises `ConfigError` for watches whose name or card is too large for the log.
    """

    def __init__(self, settings: BridgeSettings, watches: Iterable[Watch] = ()) -> None:
        self.settings: Final = settings
        self.id: Final = f"{settings.name}#{secrets.token_hex(4)}"
        """In the log."""
        self.adrift = 0
        self.ready = asyncio.Event()
        """Set when every partition was read to its end once, and the engines are followed."""
        self._watches: Final = {watch.key: _checked(watch) for watch in watches}
        self._partitions: list[BridgePartition] = []
        self._layout = Layout(settings.plane.name, settings.plane.partitions)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener = Listener(self.id, self._heard_elsewhere, self._has_room, receive_queue=settings.receive_queue)
        self._client: PlaneClient | None = None
        self._members: Final = Members(settings.dead_seconds)
        self._unnamed: Final = Unnamed(settings.unnamed_seconds)
        self._turns: dict[Key, int] = {}
        self._turn = 0
        self._beat_at = 0.0
        # Each is written by one thread alone.
        self._handed_over = self._taken_over = self._queued = 0
        self._unread_since: float | None = None
        """When the thread found no room, while it reads nothing."""
        self._parked_since: dict[int, float] = {}
        """By partition, when the first of its streams was parked."""
        self._late: set[int] = set()
        """Partitions whose last beat said that they are behind."""
        self._process: Final = f"process {os.getpid()} at {socket.gethostname()}"
        self._namesake = ""

    # --- what is known about it

    @property
    def suspects(self) -> str:
        """Why this end's network is suspected rather than the engines."""
        return self._members.suspects

    def status(self) -> BridgeStatus:
        """Everything at once."""
        return BridgeStatus(
            self.settings.name,
            self._client is not None and self._client.is_connected,
            [partition.status() for partition in self._partitions],
            sum(partition.written for partition in self._partitions),
            sum(partition.conflicts for partition in self._partitions),
            self.adrift,
            sum(partition.breaches for partition in self._partitions),
            self.suspects,
            self._unnamed.engines,
            "" if self._listener.failure is None else repr(self._listener.failure),
            self._namesake,
        )

    def trusts(self) -> dict[Key, Trusting | None]:
        """What it says of each stream that it follows; None before it has said anything."""
        return {key: self._members.said(key) for key in self._watches}

    # --- its life

    async def run(self, stop: asyncio.Event) -> None:
        """Write until `stop` is set, and then for at most `STOP_SECONDS` what is queued.

        Raises `PlaneError` where the servers cannot be used, `ConfigError` for settings that they do not take.
        """
        self._loop = asyncio.get_running_loop()
        plane = self.settings.plane
        try:
            async with opened(plane, name=f"kvevents bridge {self.settings.name}", on_state=self._on_state) as client:
                self._client = client
                layout = await self._make(client, stop)
                if layout is None:
                    return
                self._layout = layout
                room = _room(client.max_payload)
                unreadable = self.settings.unreadable_seconds
                self._partitions = [
                    BridgePartition(self, client, layout, partition, plane, self.id, room, unreadable)
                    for partition in range(layout.partitions)
                ]
                await self._work(stop)
        finally:
            await asyncio.to_thread(self._listener.stop)

    async def _make(self, client: PlaneClient, stop: asyncio.Event) -> Layout | None:
        """The plane, or None where `stop` comes before it. Raises `PlaneError`, `ConfigError`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + START_SECONDS
        passing = frozenset({"timeout"})
        while True:
            try:
                await require_jetstream(client)
                passing = PASSING
                return await make(client.jetstream(timeout=MAKE_SECONDS), self.settings.plane)
            except PlaneError as error:
                if error.fault not in passing or loop.time() > end:
                    raise
                log.warning("%s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), TEND_SECONDS)
            if stop.is_set():
                return None

    def _on_state(self, state: str) -> None:
        if state == "connected":
            for partition in self._partitions:
                partition.connected()

    async def _work(self, stop: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._listener.start()
                running = [
                    tasks.create_task(work()) for partition in self._partitions for work in (partition.read, partition.write)
                ]
                running += [tasks.create_task(self._tend()), tasks.create_task(self._tell_when_ready())]
                await stop.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(STOP_SECONDS):
                        await self._drain()
                for task in running:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from None

    async def _tell_when_ready(self) -> None:
        for partition in self._partitions:
            await partition.ready.wait()
        self.ready.set()

    async def _drain(self) -> None:
        await asyncio.to_thread(self._listener.stop)
        while any(partition.composer.waiting and not self.settings.hold_back for partition in self._partitions):  # noqa: ASYNC110 - of many
            await asyncio.sleep(PAUSE_SECONDS)

    # --- engines

    def watch(self, watches: Sequence[Watch]) -> None:
        """Follow just these from now on; from the event loop. Raises `ConfigError`, and changes nothing then."""
        wanted = {watch.key: _checked(watch) for watch in watches}
        for key in [key for key in self._watches if key not in wanted]:
            del self._watches[key]
            self._forget(key)
        for key, watch in wanted.items():
            known = self._watches.get(key)
            self._watches[key] = watch
            if known == watch or not self._partitions or not (partition := self._partition_of(key)).ready.is_set():
                continue  # it is followed when its partition is ready
            if known is None or known.source != watch.source:
                self._anchor(key)
            else:
                self._offer(partition, Join(*key, watch.card))

    def _forget(self, key: Key) -> None:
        self._listener.leave(key)
        self._members.forget(key)
        self._turns.pop(key, None)
        if not self._partitions:
            return
        partition = self._partition_of(key)
        partition.parked.discard(key)
        partition.composer.anchor(key)
        if self._is_kept_by_others(partition, key):
            self._take_back(partition, key)
        else:
            partition.offer(Leave(*key, f"bridge {self.settings.name} follows it no more"))

    def _take_back(self, partition: BridgePartition, key: Key) -> None:
        """What was said of a stream that is followed no more, or another bridge would go by it."""
        partition.offer(Trusting(*key, self.id, "", "", {}))

    def _is_kept_by_others(self, partition: BridgePartition, key: Key) -> bool:
        """Whether another bridge that is alive reaches the engine."""
        return any(said.trust in ALIVE for said in self._said_by_others(partition, key))

    def _said_by_others(self, partition: BridgePartition, key: Key) -> list[Told]:
        """What other bridges that are alive say of a stream."""
        now = asyncio.get_running_loop().time()
        standing = partition.composer.ledger.streams.get(key)
        told = {} if standing is None else standing.told
        return [said for bridge, said in told.items() if bridge != self.id and partition.is_alive(bridge, now)]

    def _anchor(self, key: Key) -> None:
        """Follow a stream from where the log stands."""
        watch, partition = self._watches[key], self._partition_of(key)
        start = partition.composer.ledger.start(key, self.id)
        partition.parked.discard(key)
        partition.composer.anchor(key)
        self._offer(partition, Join(*key, watch.card))
        self._members.begin_anew(key)
        self._listener.follow(watch.source, start, self._next_turn(key))

    def _is_stuck(self, partition: BridgePartition) -> bool:
        """Whether a partition takes nothing, and more waits for it than its share."""
        return bool(partition.fault) and partition.composer.queued_bytes > self.settings.max_queued_bytes // (
            len(self._partitions) + 1
        )

    def _look_after_partitions(self) -> None:
        stuck = {partition.partition for partition in self._partitions if self._is_stuck(partition)}
        for key in self._watches:
            partition = self._partition_of(key)
            if partition.partition in stuck and key not in partition.parked:
                self._park(key, partition)
            elif (
                key in partition.parked and partition.ready.is_set() and not partition.fault and not partition.composer.waiting
            ):
                self._anchor(key)

    def _park(self, key: Key, partition: BridgePartition) -> None:
        """Follow a stream no more until there is room for what it says."""
        partition.parked.add(key)
        self._parked_since.setdefault(partition.partition, time.monotonic())
        self._members.forget(key)
        self._next_turn(key)
        self._listener.leave(key)

    def _next_turn(self, key: Key) -> int:
        self._turn += 1
        self._turns[key] = self._turn
        return self._turn

    def _partition_of(self, key: Key) -> BridgePartition:
        return self._partitions[self._layout.partition_of(key[0])]

    def _offer(self, partition: BridgePartition, record: StreamRecord, hold: float = 0.0) -> None:
        partition.offer(record, asyncio.get_running_loop().time() + self.settings.hold_back + hold)

    # --- what partitions ask (`kvevents.plane.partition_writer.Host`)

    def begin(self, partition: BridgePartition) -> None:
        """The partition is ready: follow its streams from where its log stands."""
        for key in self._watches:
            if self._partition_of(key) is partition:
                self._anchor(key)
        for key, standing in partition.composer.ledger.streams.items():
            if standing.card is not None and self.id in standing.told and key not in self._watches:
                partition.composer.anchor(key)
                self._take_back(partition, key)

    def is_adrift(self, keys: Sequence[Key]) -> None:
        """These and the log have lost each other."""
        for key in keys:
            if key not in self._watches:
                self._partition_of(key).composer.forget(key)
                continue
            self.adrift += 1
            log.info("%s rank %d and the log have lost each other; it is followed anew", *key)
            self._anchor(key)

    def count(self) -> None:
        """Less, or more, is queued. A partition whose streams are parked gets no more, and need not hold up the others."""
        self._queued = sum(partition.composer.queued_bytes for partition in self._partitions if not partition.parked)

    # --- what the thread hears

    def _has_room(self) -> bool:
        if self._queued + self._handed_over - self._taken_over < self.settings.max_queued_bytes:
            self._unread_since = None
            return True
        if self._unread_since is None:
            self._unread_since = time.monotonic()
        return False

    def _heard_elsewhere(self, heard: list[Heard]) -> None:
        loop = self._loop
        if loop is not None:
            # Counted here, or a burst would all be heard before the loop has counted any of it.
            size = sum(size_of(each.record) for each in heard)
            self._handed_over += size
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._heard, heard, size)

    def _heard(self, heard: list[Heard], size: int) -> None:
        now = asyncio.get_running_loop().time()
        for record, turn in heard:
            key = record.key
            if turn != self._turns.get(key) or key not in self._watches:
                continue
            partition = self._partition_of(key)
            if isinstance(record, Trusting):
                self._members.hear(record)
            elif self._is_stuck(partition):
                self._park(key, partition)
                continue
            hold = GAP_HOLD_SECONDS if isinstance(record, Lost) and partition.has_company(now) else 0.0
            self._offer(partition, record, hold)
        self._taken_over += size
        self.count()

    # --- now and then

    async def _tend(self) -> None:
        unnamed_at = 0.0
        while True:
            now = asyncio.get_running_loop().time()
            if self._listener.failure is not None:
                raise PlaneError(f"the thread that follows the engines has failed: {self._listener.failure!r}", fault="closed")
            self._beat(now)
            self._look_after_members(now)
            if now >= unnamed_at and not self.settings.hold_back:
                unnamed_at = now + min(UNNAMED_LOOK_SECONDS, self.settings.unnamed_seconds / 4)
                self._look_after_unnamed(now)
            self._look_after_partitions()
            self._namesake = next((found for partition in self._partitions if (found := partition.namesake(now))), "")
            self.count()
            await asyncio.sleep(max(PAUSE_SECONDS, min(TEND_SECONDS, self.settings.beat, self.settings.dead_seconds / 2)))

    def _beat(self, now: float) -> None:
        """Say that the bridge is alive: when it is time, and at once in a partition that falls behind or has caught up."""
        is_due = now >= self._beat_at
        if is_due:
            self._beat_at = now + self.settings.beat
        for partition in self._partitions:
            lag = self._lag(partition, now)
            is_late = lag > self.settings.late_seconds
            if is_due or is_late != (partition.partition in self._late):
                (self._late.add if is_late else self._late.discard)(partition.partition)
                said = lag if is_late else 0.0
                partition.beat(Beat(self.id, self.settings.beat, time.time(), self.suspects, said, self._process))

    def _lag(self, partition: BridgePartition, now: float) -> float:
        """Seconds for which the oldest of what engines say has waited, or for which nothing of them was read."""
        if not partition.parked:
            self._parked_since.pop(partition.partition, None)
        unread = (self._unread_since, self._parked_since.get(partition.partition))
        return max(partition.composer.lag(now), *(time.monotonic() - since for since in unread if since is not None), 0.0)

    def _look_after_members(self, now: float) -> None:
        present: list[Key] = []
        for key in self._watches:
            partition, said = self._partition_of(key), self._members.said(key)
            if not partition.ready.is_set():
                continue
            standing = partition.composer.ledger.streams.get(key)
            if standing is not None and standing.card is not None:
                present.append(key)
                told = standing.told.get(self.id)
                if said is not None and (told is None or (told.trust, told.reason) != (said.trust, said.reason)):
                    partition.offer(said)
            if self._has_left(partition, key) and not partition.composer.waits(key) and key not in partition.composer.adrift:
                partition.set_adrift(key)  # somebody let it leave, and here it is
        for key in self._members.gone(present, now):
            partition = self._partition_of(key)
            if not partition.composer.waits(key) and not self._is_kept_by_others(partition, key):
                partition.offer(Leave(*key, f"not reached for {self.settings.dead_seconds:g} s"))

    def _has_left(self, partition: BridgePartition, key: Key) -> bool:
        """Whether a stream has left the log although its engine is reached here."""
        standing = partition.composer.ledger.streams.get(key)
        is_away = standing is None or standing.card is None or partition.composer.has_left(key)
        return is_away and self._members.is_reached(key)

    def _look_after_unnamed(self, now: float) -> None:
        """Engines of which nobody has said that they are followed no more."""
        if any(partition.fault or not partition.ready.is_set() for partition in self._partitions):
            self._unnamed.clear()
            return
        joined = {key: partition for partition in self._partitions for key in partition.composer.ledger.joined()}
        unnamed = [
            key for key, partition in joined.items() if key not in self._watches and not self._said_by_others(partition, key)
        ]
        for key in self._unnamed.gone(joined, unnamed, now):
            partition = joined[key]
            if not partition.composer.waits(key):
                partition.composer.anchor(key)
                partition.offer(Leave(*key, f"no bridge has named it for {self.settings.unnamed_seconds:g} s"))


def _checked(watch: Watch) -> Watch:
    """A watch that the log has room for. Raises `ConfigError`."""
    try:
        name = len(watch.source.label.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"the name of engine {watch.source.label!r} is no text; give it another one") from error
    if name > MAX_SOURCE_BYTES:
        raise ConfigError(
            f"the name of engine {watch.source.label[:60]!r}... has {name} bytes; at most {MAX_SOURCE_BYTES} may be"
        )
    if len(watch.card) > MAX_CARD_BYTES:
        raise ConfigError(f"the card of {watch.source.label!r} has {len(watch.card)} bytes; at most {MAX_CARD_BYTES} may be")
    return watch


def _room(max_payload: int) -> int:
    """Bytes of a page's records. Raises `ConfigError`."""
    room = min(PAGE_BYTES, max_payload - MARGIN_BYTES)
    if room < LEAST_PAGE_BYTES:
        raise ConfigError(
            f"the servers' max_payload is {max_payload}; a plane needs {LEAST_PAGE_BYTES + MARGIN_BYTES} at least"
        )
    return room


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What one who runs a bridge is told: the first that went wrong."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
