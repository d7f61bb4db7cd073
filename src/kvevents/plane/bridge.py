"""The bridge: what engines say goes into the log, each batch once and in order, whoever else writes it too.

Theory of operation. A thread follows the engines (`listening`) and hands records over; everything else is one event loop. Each
lane has a ledger, which a reader keeps as the log is, and a composer, which says what comes next (`writing`). A page goes out
with the number that its lane must end with; if it does not, somebody else has written, and the reader brings it. So it does not
matter how many bridges watch an engine, nor which of them is killed when.

- *Back-pressure*: what the servers do not take waits, up to `max_queued_bytes`; above that the thread reads nothing more, and
  what the engines published meanwhile is asked for by replay.
- *Reserve*: a bridge with `hold_back` writes only what others have not written after so many seconds.
- *Membership*: an engine that no bridge has reached for `dead_seconds` leaves the log. Where more than half of all engines of
  a bridge are gone at once it is the network that is suspected, and none leaves.
- *A lane that was deleted* is made anew, and all its streams are followed from their beginning.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kvevents.errors import ConfigError, PlaneError
from kvevents.plane.connection import opened, require_jetstream
from kvevents.plane.faults import told
from kvevents.plane.layout import Layout, make
from kvevents.plane.ledger import Ledger
from kvevents.plane.listening import Heard, Listener
from kvevents.plane.reading import Broken, LaneReader, Pushed
from kvevents.plane.records import Beat, Join, Key, Leave, Lost, Trusting, decode_page, encode_page, message_id
from kvevents.plane.settings import PlaneSettings
from kvevents.plane.writing import Composer
from kvevents.stream import Source

if TYPE_CHECKING:
    from kvevents.plane.client import PlaneClient

log = logging.getLogger(__name__)

PAGE_BYTES: Final = 512 << 10
"""Of one page at most, less where servers take less: enough for thousands of batches, and not so much that others wait."""
MARGIN_BYTES: Final = 4 << 10
"""Of a message for what is in it beside records: headers, the bridge's name."""
ACK_SECONDS: Final = 5.0
"""Until a page must be acknowledged; a new leader is elected within that."""
CATCH_UP_SECONDS: Final = 2.0
"""For the reader to bring what somebody else has written."""
TEND_SECONDS: Final = 0.5
"""Between two looks at members and trust."""
RETRY_SECONDS: Final = 0.25
"""Between two attempts to write what was not taken."""
GAP_HOLD_SECONDS: Final = 1.0
"""How long a gap waits for another bridge that may have what is missing."""
PAUSE_SECONDS: Final = 0.02
"""Between two looks at what many tasks must bring about."""
STOP_SECONDS: Final = 5.0
"""For what is queued to be written when a bridge ends."""
MISSED_BEATS: Final = 3
"""After so many a bridge is dead."""
ALIVE: Final = frozenset({"EXACT", "DEGRADED", "REPLAYING"})
"""Trust of streams whose engine was reached."""


class BridgeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bridge. Raises `ConfigError` for what cannot work."""

    plane: PlaneSettings
    name: str
    """Of the bridge; another one of the same name would speak for this one."""
    hold_back: float = 0.0
    """Seconds after which it writes what no other bridge has written; 0 writes at once."""
    dead_seconds: float = 30.0
    """Without a connection until an engine leaves the log."""
    beat: float = 2.0
    """Seconds between two signs of life in each lane."""
    max_queued_bytes: int = 64 << 20
    """Of what engines said and the servers have not taken; above it nothing more is heard."""

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 128 or not self.name.isprintable():
            raise ConfigError(f"a bridge's name is {self.name!r}; it is 1 to 128 characters that can be read")
        if not 0 <= self.hold_back <= 3600:
            raise ConfigError(f"hold_back is {self.hold_back}; it is 0 to 3600 seconds")
        for field in ("dead_seconds", "beat", "max_queued_bytes"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"{field} is {getattr(self, field)}; it must be above 0")


class Watch(NamedTuple):
    """An engine's rank to be followed."""

    source: Source
    card: bytes = b""
    """What replicas are to know of it; the bridge does not look into it."""

    @property
    def key(self) -> Key:
        """As the log knows it."""
        return self.source.label, self.source.rank


class LaneStatus(NamedTuple):
    """One lane as a bridge has it."""

    lane: int
    position: int
    waiting: int
    """Records that are not known to be in the log."""
    queued_bytes: int
    fault: str
    """Why nothing is written at the moment; empty where that is not so."""


class BridgeStatus(NamedTuple):
    """A bridge as an operator sees it."""

    name: str
    connected: bool
    lanes: list[LaneStatus]
    written: int
    """Batches that this bridge has put into the log."""
    conflicts: int
    """Pages that were refused because somebody else had written."""
    adrift: int
    """How often a stream was followed anew, since it and the log had lost each other."""
    breaches: int
    """Records of the log that no bridge writes: 0, unless something is broken."""
    suspects: str
    failure: str


class Bridge:
    """Writes what engines say into the log. `async with`, or `run` until an event is set."""

    def __init__(self, settings: BridgeSettings, watches: Iterable[Watch] = ()) -> None:
        self.settings: Final = settings
        self.conflicts = self.readings = 0
        self.suspects = ""
        """Why this end's network is suspected rather than the engines."""
        self._watches: Final = {watch.key: watch for watch in watches}
        self._queued = 0
        self._lanes: list[_Lane] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener = Listener(settings.name, self._heard_elsewhere, self._has_room)
        self._client: PlaneClient | None = None
        self._trust: dict[Key, Trusting] = {}
        self._turns: dict[Key, int] = {}
        self._dead_since: dict[Key, float] = {}
        self.ready = asyncio.Event()
        """Set when every lane was read to its end once, and the engines are followed."""

    # --- what is known about it

    def status(self) -> BridgeStatus:
        """Everything at once."""
        return BridgeStatus(
            self.settings.name,
            self._client is not None and self._client.is_connected,
            [lane.status() for lane in self._lanes],
            sum(lane.composer.written for lane in self._lanes),
            self.conflicts,
            self.readings,
            sum(lane.composer.ledger.breaches for lane in self._lanes),
            self.suspects,
            "" if self._listener.failure is None else repr(self._listener.failure),
        )

    def trusts(self) -> dict[Key, Trusting | None]:
        """What it says of each stream that it follows; None before it has said anything."""
        return {key: self._trust.get(key) for key in self._watches}

    # --- its life

    async def run(self, stop: asyncio.Event) -> None:
        """Write until `stop` is set, and then for at most `STOP_SECONDS` what is queued.

        Raises `PlaneError` where the servers cannot be used, `ConfigError` for settings that they do not take.
        """
        self._loop = asyncio.get_running_loop()
        async with opened(self.settings.plane, name=f"kvevents bridge {self.settings.name}") as client:
            self._client = client
            await require_jetstream(client)
            layout = await make(client.jetstream(), self.settings.plane)
            room = min(PAGE_BYTES, client.max_payload - MARGIN_BYTES)
            self._lanes = [_Lane(self, client, layout, lane, room) for lane in range(layout.lanes)]
            try:
                await self._work(stop)
            finally:
                await asyncio.to_thread(self._listener.stop)

    async def _work(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(lane.read()) for lane in self._lanes]
            running += [tasks.create_task(lane.write()) for lane in self._lanes]
            await asyncio.gather(*(lane.caught_up.wait() for lane in self._lanes))
            self._listener.start()
            for key in self._watches:
                self._anchor(key)
            self.ready.set()
            running.append(tasks.create_task(self._tend()))
            await stop.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self._drain()
            for task in running:
                task.cancel()

    async def _drain(self) -> None:
        await asyncio.to_thread(self._listener.stop)
        while any(lane.composer.waiting for lane in self._lanes):  # noqa: ASYNC110 - of many things at once
            await asyncio.sleep(PAUSE_SECONDS)

    # --- engines

    def watch(self, watches: Sequence[Watch]) -> None:
        """Follow just these from now on; from the event loop."""
        wanted = {watch.key: watch for watch in watches}
        for key in [key for key, watch in self._watches.items() if wanted.get(key) != watch]:
            del self._watches[key]
            self._forget(key)
        for key, watch in wanted.items():
            if key not in self._watches:
                self._watches[key] = watch
                if self.ready.is_set():
                    self._anchor(key)

    def _forget(self, key: Key) -> None:
        self._listener.leave(key)
        self._trust.pop(key, None)
        self._dead_since.pop(key, None)
        lane = self._lane_of(key)
        lane.composer.anchor(key)
        lane.offer(Leave(*key, f"bridge {self.settings.name} follows it no more"))

    def _anchor(self, key: Key) -> None:
        """Follow a stream from where the log stands."""
        watch, lane = self._watches[key], self._lane_of(key)
        start = lane.composer.ledger.start(key, self.settings.name)
        self._turns[key] = self._turns.get(key, 0) + 1
        self._trust.pop(key, None)
        lane.composer.anchor(key)
        lane.offer(Join(*key, watch.card))
        self._listener.follow(watch.source, start, self._turns[key])

    def _lane_of(self, key: Key) -> _Lane:
        return self._lanes[Layout(self.settings.plane.name, len(self._lanes)).lane_of(key[0])]

    # --- what the thread hears

    def _has_room(self) -> bool:
        return self._queued < self.settings.max_queued_bytes

    def _heard_elsewhere(self, heard: list[Heard]) -> None:
        loop = self._loop
        if loop is not None:
            # Counted here, or a burst would all be heard before the loop has counted any of it.
            self._queued += sum(len(getattr(each.record, "payload", b"")) for each in heard)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._heard, heard)

    def _heard(self, heard: list[Heard]) -> None:
        now = asyncio.get_running_loop().time()
        due = now + self.settings.hold_back
        touched = set()
        for record, turn in heard:
            key = record.key
            if turn != self._turns.get(key) or key not in self._watches:
                continue
            lane = self._lane_of(key)
            if isinstance(record, Trusting):
                self._trust[key] = record
            hold = GAP_HOLD_SECONDS if isinstance(record, Lost) and lane.has_company(now) else 0.0
            lane.composer.offer(record, due + hold)
            touched.add(lane)
        for lane in touched:
            lane.wake.set()
        self._count()

    def _count(self) -> None:
        self._queued = sum(lane.composer.queued_bytes for lane in self._lanes)

    # --- now and then

    async def _tend(self) -> None:
        beat_at = 0.0
        while True:
            now = asyncio.get_running_loop().time()
            if self._listener.failure is not None:
                raise PlaneError(f"the thread that follows the engines has failed: {self._listener.failure!r}", fault="closed")
            if now >= beat_at:
                beat_at = now + self.settings.beat
                for lane in self._lanes:
                    lane.beat(Beat(self.settings.name, self.settings.beat, time.time(), self.suspects))
            self._look_after_members(now)
            self._count()
            await asyncio.sleep(TEND_SECONDS)

    def _look_after_members(self, now: float) -> None:
        dead = []
        for key in self._watches:
            lane, trust = self._lane_of(key), self._trust.get(key)
            standing = lane.composer.ledger.streams.get(key)
            if trust is None or standing is None:
                continue
            if trust.trust in ALIVE:
                self._dead_since.pop(key, None)
                if standing.card is None and key not in lane.composer.adrift:
                    lane.composer.adrift[key] = None  # somebody let it leave, and here it is
                    lane.wake.set()
            elif now - self._dead_since.setdefault(key, now) > self.settings.dead_seconds:
                dead.append(key)
            said = standing.told.get(self.settings.name)
            if standing.card is not None and (said is None or (said.trust, said.reason) != (trust.trust, trust.reason)):
                lane.offer(trust)
        self._let_leave(dead, now)

    def _let_leave(self, dead: Sequence[Key], now: float) -> None:
        gone = len(self._dead_since)
        suspects = gone * 2 > len(self._watches) if self._watches else False
        self._suspect(f"{gone} of {len(self._watches)} engines cannot be reached" if suspects else "")
        for key in dead:
            lane = self._lane_of(key)
            standing = lane.composer.ledger.streams[key]
            others = any(
                said.trust in ALIVE and lane.is_alive(bridge, now)
                for bridge, said in standing.told.items()
                if bridge != self.settings.name
            )
            if not suspects and not others and standing.card is not None:
                lane.offer(Leave(*key, f"not reached for {self.settings.dead_seconds:g} s"))

    def _suspect(self, why: str) -> None:
        if bool(why) != bool(self.suspects):
            log.warning(
                "%s", f"{why}: the network is suspected, and none of them leaves" if why else "engines are reached again"
            )
        self.suspects = why

    def _is_adrift(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if key in self._watches:
                self.readings += 1
                log.info("%s rank %d and the log have lost each other; it is followed anew", *key)
                self._anchor(key)


class _Lane:
    """What a bridge does with one lane."""

    def __init__(self, bridge: Bridge, client: PlaneClient, layout: Layout, lane: int, room: int) -> None:
        self.lane: Final = lane
        self.composer = Composer(Ledger(), bridge.settings.name, room)
        self.caught_up = asyncio.Event()
        self.wake = asyncio.Event()
        self.fault = ""
        self._bridge: Final = bridge
        self._client: Final = client
        self._js: Final = client.jetstream(timeout=ACK_SECONDS)
        self._layout: Final = layout
        self._room: Final = room
        self._advanced = asyncio.Event()
        self._life: Final = secrets.token_hex(4)
        self._pages = 0
        self._in_flight: bytes | None = None
        """The page that was sent, and not heard of since."""
        self._heard_beat: dict[str, tuple[int, float]] = {}

    def status(self) -> LaneStatus:
        composer = self.composer
        return LaneStatus(self.lane, composer.ledger.position, composer.waiting, composer.queued_bytes, self.fault)

    def offer(self, record: Any) -> None:
        self.composer.offer(record)
        self.wake.set()

    def beat(self, beat: Beat) -> None:
        self.composer.beat(beat)
        self.wake.set()

    # --- others

    def is_alive(self, bridge: str, now: float) -> bool:
        """Whether another bridge has been heard lately."""
        beaten = self.composer.ledger.beats.get(bridge)
        if beaten is None:
            return False
        page, since = self._heard_beat.get(bridge, (-1, now))
        if page != beaten.page:
            self._heard_beat[bridge] = (beaten.page, now)
            return True
        return now - since < MISSED_BEATS * beaten.beat.every

    def has_company(self, now: float) -> bool:
        """Whether any other bridge writes into this lane."""
        own = self._bridge.settings.name
        return any(self.is_alive(bridge, now) for bridge in self.composer.ledger.beats if bridge != own)

    # --- reading

    async def read(self) -> None:
        """Keep the ledger as the lane is, whatever becomes of it."""
        made = None
        while True:
            reader = LaneReader(self._client, self._layout, self.lane, self.composer.ledger.position, made, self._take)
            following = asyncio.create_task(self._tell_when_caught_up(reader))
            try:
                broken = await reader.run()
            finally:
                following.cancel()
            log.error("lane %d was %s: its streams are written from their beginning", self.lane, broken.why)
            made = await self._begin_anew(broken)

    async def _tell_when_caught_up(self, reader: LaneReader) -> None:
        while reader.behind != 0:
            self.fault = reader.fault
            await asyncio.sleep(PAUSE_SECONDS)
        self.fault = ""
        self.caught_up.set()

    async def _begin_anew(self, broken: Broken) -> str | None:
        ledger = Ledger()
        if broken.why == "purged":
            from kvevents.plane.layout import state_of  # noqa: PLC0415 - for what nobody should have done

            state = await state_of(self._js, self._layout, self.lane)
            ledger.position = state.first - 1
        self.composer = Composer(ledger, self._bridge.settings.name, self._room)
        self._bridge._is_adrift([key for key in self._bridge._watches if self._layout.lane_of(key[0]) == self.lane])  # noqa: SLF001 - its other half
        return None

    def _take(self, came: list[Pushed]) -> None:
        ledger = self.composer.ledger
        for position, data, _ in came:
            if position <= ledger.position:
                continue
            if data == self._in_flight:
                # Quicker than its acknowledgement.
                self._in_flight = None
                self.composer.landed(position)
            elif (page := decode_page(data)) is None:
                log.error("message %d of lane %d is no page; somebody else writes there", position, self.lane)
                ledger.skip(position)
            else:
                self.composer.read(position, page)
        self._advanced.set()
        self.wake.set()

    # --- writing

    async def write(self) -> None:
        """Write whatever is due, as long as the bridge lives."""
        await self.caught_up.wait()
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            page = self.composer.compose(now, time.time())
            adrift = list(self.composer.adrift)
            if adrift:
                self._bridge._is_adrift(adrift)  # noqa: SLF001 - its other half
            if page is None:
                await self._rest(now)
                continue
            try:
                await self._publish(encode_page(page), message_id(page, f"{page.bridge}/{self._life}#{self._pages}"))
            except PlaneError as error:
                await self._refused(error)
            self._bridge._count()  # noqa: SLF001 - its other half

    async def _rest(self, now: float) -> None:
        due = self.composer.due()
        self.wake.clear()
        if due is not None and due <= now:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(TEND_SECONDS if due is None else min(TEND_SECONDS, due - now)):
                await self.wake.wait()

    async def _publish(self, data: bytes, name: str) -> None:
        composer, expected = self.composer, self.composer.ledger.position
        self._pages += 1
        self._in_flight = data
        self._advanced.clear()
        headers = {"Nats-Expected-Last-Sequence": str(expected), "Nats-Msg-Id": name}
        with told(f"writing to lane {self.lane}"):
            acknowledged = await self._js.publish(
                self._layout.subject(self.lane),
                data,
                timeout=ACK_SECONDS,
                stream=self._layout.stream(self.lane),
                headers=headers,
            )
        if acknowledged.duplicate or acknowledged.seq != expected + 1:
            raise PlaneError(f"lane {self.lane}: the page is there already", fault="conflict")
        self.fault = ""
        if self._in_flight is not None and self.composer is composer:
            self._in_flight = None
            composer.landed(acknowledged.seq)

    async def _refused(self, error: PlaneError) -> None:
        if self._in_flight is None:  # it has come back by the reader
            return
        self._in_flight = None
        self.composer.returned()
        if error.fault == "conflict":
            self._bridge.conflicts += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(CATCH_UP_SECONDS):
                    await self._advanced.wait()
            return
        if str(error) != self.fault:
            log.warning("%s", error)
        self.fault = str(error)
        await asyncio.sleep(RETRY_SECONDS)
