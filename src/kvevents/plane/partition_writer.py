"""What a bridge does with one partition: it reads all of it, and writes what comes next.

Theory of operation. A reader keeps the ledger as the partition is, and a composer says what comes next (`writing`). A page goes
out with the number that its partition must end with; if it does not, somebody else has written, and the reader brings it. What
the servers do not take stays with the composer.

A partition is *ready* while its ledger is known to be that of the stream that is there. It ceases to be where the stream was
deleted, is of another life or has lost pages: the ledger is begun anew then, and so are all streams once it has been read.
Nothing is written over a new connection before the reader has verified that the partition is what it was.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvevents.backoff import Backoff
from kvevents.errors import KVEventsError, PlaneError
from kvevents.plane.faults import told
from kvevents.plane.layout import Layout, make_buckets, make_partition, state_of
from kvevents.plane.ledger import Ledger
from kvevents.plane.reading import AGAIN_SECONDS, HISTORY_HEADER, PAGE_HEADER, Broken, PartitionReader, Pushed, header_of
from kvevents.plane.recalling import Recall
from kvevents.plane.records import Beat, Key, Page, StreamRecord, Tail, encode_page, name_of
from kvevents.plane.settings import PlaneSettings
from kvevents.plane.writing import Composer

if TYPE_CHECKING:
    from kvevents.plane.client import PlaneClient

log = logging.getLogger(__name__)

ACK_SECONDS: Final = 2.0
"""Until a page must be acknowledged. To send it again does no harm: it is refused where the first one has arrived."""
ASK_SECONDS: Final = 5.0
"""For anything else that is asked of the servers."""
CATCH_UP_SECONDS: Final = 2.0
"""For the reader to bring what somebody else has written."""
REST_SECONDS: Final = 0.5
"""Between two looks whether something is due, unless something comes."""
RETRY_FIRST_SECONDS: Final = 0.1
RETRY_MOST_SECONDS: Final = 1.0
"""Between two attempts to write what was not taken."""

_LAST_SEQUENCE: Final = re.compile(r"wrong last sequence: (\d+)")


class PartitionStatus(NamedTuple):
    """One partition as a bridge has it."""

    partition: int
    position: int
    waiting: int
    """Records that are not known to be in the log."""
    queued_bytes: int
    fault: str
    """Why nothing is read or written at the moment; empty where that is not so."""
    foreign: int = 0
    """Messages that are no pages: somebody else writes there."""
    parked: int = 0
    """Streams that are not followed until what waits has been written."""


@dataclass(slots=True, eq=False)
class _Sent:
    """A page that is under way."""

    name: str
    expected: int
    """Number of the page before it."""
    answer: asyncio.Future[None]


class Host(Protocol):
    """What a partition asks of its bridge."""

    def begin(self, partition: BridgePartition) -> None:
        """The partition is ready: follow its streams from where its log stands."""

    def is_adrift(self, keys: Sequence[Key]) -> None:
        """These and the log have lost each other."""

    def count(self) -> None:
        """Less, or more, is queued."""


class BridgePartition:
    """One partition of one bridge; `read` and `write` run side by side for as long as the bridge lives."""

    def __init__(
        self,
        host: Host,
        client: PlaneClient,
        layout: Layout,
        partition: int,
        plane: PlaneSettings,
        bridge: str,
        room: int,
        unreadable_seconds: float,
    ) -> None:
        self.partition: Final = partition
        self.composer = Composer(Ledger(), bridge, room, secrets.token_hex(4))
        self.ready = asyncio.Event()
        self.parked: set[Key] = set()
        """Streams that are not followed, as there is no room for what they say."""
        self.conflicts = 0
        self._host: Final = host
        self._client: Final = client
        self._js: Final = client.jetstream(timeout=ASK_SECONDS)
        self._recall: Final = Recall(self._js, layout)
        self._layout: Final = layout
        self._plane: Final = plane
        self._bridge: Final = bridge
        self._room: Final = room
        self._unreadable_seconds: Final = unreadable_seconds
        self._reader: PartitionReader | None = None
        self._refusal = ""
        self._retry: Final = Backoff(initial=RETRY_FIRST_SECONDS, maximum=RETRY_MOST_SECONDS)
        self._wake: Final = asyncio.Event()
        self._advanced: Final = asyncio.Event()
        self._written = 0
        self._breaches = 0
        self._foreign = 0
        self._sent: _Sent | None = None
        """The page of which it is not known what became of it: the composer's that is under way."""
        self._answers: set[asyncio.Task[None]] = set()
        """Those that are waited for, of pages that were given up too."""
        self._heard: dict[str, tuple[int, float]] = {}
        """By bridge, the page of its last beat, and when it came."""
        self._first_beat: int | None = None
        """A page with a beat of this bridge, the oldest that is known."""

    # --- what is known

    @property
    def fault(self) -> str:
        """Why nothing is read or written at the moment; empty where that is not so."""
        return (self._reader is not None and self._reader.fault) or self._refusal

    @property
    def written(self) -> int:
        """Batches that this bridge has put into the partition."""
        return self._written + self.composer.written

    @property
    def breaches(self) -> int:
        """Records that no bridge writes."""
        return self._breaches + self.composer.ledger.breaches

    def status(self) -> PartitionStatus:
        """Everything at once."""
        composer = self.composer
        position, foreign = composer.ledger.position, self._foreign + composer.ledger.foreign
        return PartitionStatus(
            self.partition, position, composer.waiting, composer.queued_bytes, self.fault, foreign, len(self.parked)
        )

    def is_alive(self, bridge: str, now: float) -> bool:
        """Whether another bridge has been heard lately."""
        beaten = self.composer.ledger.beats.get(bridge)
        heard = self._heard.get(bridge)
        if beaten is None or heard is None:
            return False
        return now - heard[1] < beaten.beat.alive_seconds

    def has_company(self, now: float) -> bool:
        """Whether any other bridge writes into this partition."""
        return any(self.is_alive(bridge, now) for bridge in self.composer.ledger.beats if bridge != self._bridge)

    def namesake(self, now: float) -> str:
        """Where another bridge of the same name runs; empty where none does.

        A bridge of that name that was there before counts only if it writes behind this one.
        """
        beats = self.composer.ledger.beats
        if self._first_beat is None and (own := beats.get(self._bridge)) is not None:
            self._first_beat = own.page
        for bridge, beaten in beats.items():
            is_behind = self._first_beat is not None and beaten.page > self._first_beat
            if is_behind and bridge != self._bridge and name_of(bridge) == name_of(self._bridge) and self.is_alive(bridge, now):
                return beaten.beat.process or "another process"
        return ""

    # --- what is to be written

    def offer(self, record: StreamRecord, due: float = 0.0) -> None:
        """Something of a stream, to be written not before `due`."""
        self.composer.offer(record, due)
        if self._sent is None:
            self._wake.set()

    def beat(self, beat: Beat) -> None:
        """The bridge is alive."""
        self.composer.beat(beat)
        self._wake.set()

    def set_adrift(self, key: Key) -> None:
        """Have a stream followed anew."""
        self.composer.adrift[key] = None
        self._wake.set()

    # --- reading

    def connected(self) -> None:
        """There is another connection: nothing that was asked over the last one is answered.

        What was under way is judged again by what the reader finds: a page that was acknowledged may be lost since then.
        """
        self._give_up()
        if self._reader is not None:
            self._reader.look_again()

    def _give_up(self) -> None:
        self._sent = None
        self.composer.returned()
        for answer in self._answers:
            answer.cancel()
        self._wake.set()

    async def read(self) -> None:
        """Keep the ledger as the partition is, whatever becomes of it."""
        broken: Broken | None = None
        settled = False
        while True:
            made = await self._begin(broken)
            settled = settled or (broken is not None and broken.why == "disputed")
            self._reader = reader = PartitionReader(
                self._client, self._layout, self.partition, self.tail, made, self._take, self._remake, self
            )
            reader.settled = settled
            beside = [asyncio.create_task(work(reader)) for work in (self._catch_up, self._look_after)]
            try:
                broken = await reader.run()
            finally:
                for task in beside:
                    task.cancel()
                self.ready.clear()
            log.error("partition %d was %s", self.partition, broken.why)

    async def _begin(self, broken: Broken | None) -> str | None:
        """A ledger for a partition that is read from a snapshot on, or from its beginning; which stream it is of."""
        ledger, made = Ledger(), None
        while True:
            try:
                state = await state_of(self._js, self._layout, self.partition)
                made = state.made
                ledger = await self._recall.ledger(self.partition, state) or ledger
                break
            except PlaneError as error:
                if error.fault == "missing":  # the reader makes it
                    break
                self._say(error)
                await asyncio.sleep(AGAIN_SECONDS)
        if broken is not None and broken.why == "purged" and ledger.position + 1 < broken.first:
            why = f"pages before {broken.first} were purged, and no snapshot stands for them"
            log.error("partition %d is begun anew: %s", self.partition, why)
            ledger = Ledger.behind(broken.first - 1, why)
        self._adopt(ledger)
        return made

    def _adopt(self, ledger: Ledger) -> None:
        before = self.composer
        self._written += before.written
        self._breaches += before.ledger.breaches
        self._foreign += before.ledger.foreign
        self._sent = None
        self._first_beat = None
        self._advanced.set()
        ledger.breaches = ledger.foreign = 0
        self.composer = Composer(ledger, self._bridge, self._room, secrets.token_hex(4))
        self.parked.clear()

    async def _remake(self) -> None:
        try:
            await make_partition(self._js, self._layout, self.partition, self._plane)
        except KVEventsError as error:
            raise PlaneError(f"partition {self.partition} is missing, and cannot be made: {error}", fault="missing") from error
        log.error("partition %d was deleted, and has been made anew", self.partition)

    async def _catch_up(self, reader: PartitionReader) -> None:
        await reader.caught_up.wait()
        self.composer.ledger.life = self.composer.ledger.life or reader.made or ""
        self._host.begin(self)
        self.ready.set()

    async def _look_after(self, reader: PartitionReader) -> None:
        """End a reader whose partition nobody else could begin with: pages were purged that no snapshot stands for.

        With the first partition, what the plane has besides partitions is looked after as well.
        """
        await reader.caught_up.wait()
        was_unreadable = False
        while True:
            await asyncio.sleep(self._unreadable_seconds * random.uniform(0.25, 0.75))  # noqa: S311 - not all partitions at once
            try:
                if self.partition == 0:
                    await make_buckets(self._js, self._layout, self._plane)
                state = await state_of(self._js, self._layout, self.partition)
                is_readable = await self._recall.is_readable(self.partition, state, self.composer.ledger.begins_at)
            except PlaneError as error:
                log.debug("%s", error)
                continue
            if was_unreadable and not is_readable:
                reader.end(Broken("purged", state.first))
                return
            was_unreadable = not is_readable

    def _take(self, came: list[Pushed]) -> None:
        ledger = self.composer.ledger
        if self._reader is not None:
            ledger.life = ledger.life or self._reader.made or ""
        for pushed in came:
            position, name = pushed.position, pushed.name
            if position <= ledger.position:
                continue
            if self._is_next(name):
                # Quicker than its acknowledgement.
                self._sent = None
                self.composer.landed(position)
                self._went_well()
                continue
            if self._sent is not None:  # it comes too late
                self.conflicts += 1
                self._sent = None
                self._went_well()
            if (page := pushed.page()) is None:
                if not ledger.foreign + self._foreign:
                    log.error("message %d of partition %d is no page; somebody else writes there", position, self.partition)
                self.composer.skip(position, name, is_first=pushed.begins_history)
            else:
                self.composer.read(position, page)
        self._hear(asyncio.get_running_loop().time())
        self._advanced.set()
        self._wake.set()

    def knows(self, position: int, name: str) -> bool:
        """Whether a page is known to be there, or would be in a moment."""
        return position <= self.composer.ledger.position or self._is_next(name)

    def is_writing(self) -> bool:
        """Whether a page is under way."""
        return self._sent is not None

    @property
    def tail(self) -> Tail:
        """The newest message that was read, or was acknowledged."""
        return self.composer.ledger.tail

    def _is_next(self, name: str) -> bool:
        return self._sent is not None and self._sent.name == name

    def _hear(self, now: float) -> None:
        beats = self.composer.ledger.beats
        for bridge, beaten in beats.items():
            if self._heard.get(bridge, (-1, now))[0] != beaten.page:
                self._heard[bridge] = beaten.page, now
        if len(self._heard) > len(beats):
            self._heard = {bridge: heard for bridge, heard in self._heard.items() if bridge in beats}

    # --- writing

    async def write(self) -> None:
        """Write whatever is due."""
        try:
            while True:
                await self.ready.wait()
                if self._reader is not None and not self._reader.looked.is_set():
                    await self._reader.looked.wait()
                    continue
                if self._sent is not None and self._sent.answer.done():
                    await self._settle(self._sent)
                elif self._sent is not None or not self._send():
                    self._host.count()
                    await self._rest()
        finally:
            for answer in self._answers:
                answer.cancel()

    def _send(self) -> bool:
        """The next page, if anything is due."""
        composer = self.composer
        page = composer.compose(asyncio.get_running_loop().time(), time.time())
        if composer.adrift:
            self._host.is_adrift(list(composer.adrift))
        if page is None:
            return False
        expected = composer.ledger.position
        answer = asyncio.create_task(self._publish(page, expected))
        self._sent = _Sent(page.name, expected, answer)
        self._answers.add(answer)
        answer.add_done_callback(self._answered)
        return True

    def _answered(self, answer: asyncio.Task[None]) -> None:
        self._answers.discard(answer)
        if not answer.cancelled():
            answer.exception()  # of a page that was given up, nobody asks any more
        self._wake.set()

    async def _rest(self) -> None:
        self._wake.clear()
        wait = REST_SECONDS
        if self._sent is None and (due := self.composer.due()) is not None:
            wait = min(wait, max(0.0, due - asyncio.get_running_loop().time()))
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._wake.wait()

    async def _publish(self, page: Page, expected: int) -> None:
        headers = {
            "Nats-Expected-Last-Sequence": str(expected),
            PAGE_HEADER: page.name,
            HISTORY_HEADER: header_of(page.history),
        }
        with told(f"writing to partition {self.partition}"):
            async with asyncio.timeout(ACK_SECONDS):
                acknowledged = await self._js.publish(
                    self._layout.subject(self.partition),
                    encode_page(page),
                    timeout=2 * ACK_SECONDS,
                    stream=self._layout.stream(self.partition),
                    headers=headers,
                )
        if acknowledged.seq != expected + 1:
            raise PlaneError(f"partition {self.partition}: the page is there already", fault="conflict")

    async def _settle(self, sent: _Sent) -> None:
        """What became of the page that is under way."""
        try:
            sent.answer.result()
        except PlaneError as error:
            self._sent = None
            self.composer.returned()
            await self._refused(sent, error)
        else:
            self._sent = None
            self.composer.landed(sent.expected + 1)
            self._went_well()
        self._host.count()

    async def _refused(self, sent: _Sent, error: PlaneError) -> None:
        if error.fault == "conflict":
            self.conflicts += 1
            if self._is_shorter(error) and self._reader is not None:
                await self._reader.look_again().wait()
                return
            if self._reader is not None:
                self._reader.ask()
            composer = self.composer
            try:
                async with asyncio.timeout(CATCH_UP_SECONDS):
                    while self.composer is composer and composer.ledger.position <= sent.expected:
                        self._advanced.clear()
                        await self._advanced.wait()
            except TimeoutError:
                self._say(error)  # what others have written does not come: there may be less than was read
                if self._reader is not None:
                    self._reader.look_again()
            else:
                self._went_well()
            return
        if error.fault == "away" and self._client.is_connected and self._reader is not None:
            self._reader.look_again()  # there may be no such stream any more
        self._say(error)
        await asyncio.sleep(self._retry.next_delay())

    def _is_shorter(self, error: PlaneError) -> bool:
        """Whether the partition ends before what was read of it: it is another one, and what it is must be known first."""
        found = _LAST_SEQUENCE.search(str(error))
        return found is not None and int(found[1]) < self.composer.ledger.position

    def _went_well(self) -> None:
        self._refusal = ""
        self._retry.reset()

    def _say(self, error: PlaneError) -> None:
        if str(error) != self._refusal:
            log.warning("%s", error)
        self._refusal = str(error)
