"""Reads one partition of the log: hands out every page once and in order, or reports why it cannot.

An ordered ephemeral consumer: the server pushes, nothing is acknowledged, and no state outlives it. Whatever happens, to the
connection, to the server that leads the partition, or to messages that came faster than they were taken, the numbers show it,
and the consumer is made anew behind the last page that was handed out.

Servers may lose messages that they have acknowledged, and use their numbers again. So a reader verifies its *tail*, the newest
message that it has read: by name with each new consumer, and by the history that each page carries (`ledger`) with each page.

A writer need not be told of its own pages, which are most of what a partition brings it where nobody else writes much, and
which the servers would read from their disks for that. As long as that is so its reader *rests*: there is no consumer, what the
writer knows to be there counts as read, and pages of others are asked for one by one: at once where a page of the writer was
refused, since only they can be the reason, and now and then where it writes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kvevents.errors import PlaneError
from kvevents.plane.faults import told
from kvevents.plane.layout import Layout, PartitionInfo, state_of
from kvevents.plane.records import START, Page, Tail, decode_page, extend_history

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS: Final = 1.0
"""Between two signs of life of an idle consumer."""
SILENT_SECONDS: Final = 3.5
"""After so long without any the consumer is made anew."""
CHECK_SECONDS: Final = 10.0
"""Between two comparisons of what a consumer has sent with what the partition holds: a server whose copy of the partition has
stopped, or differs from those of the others, still sends signs of life."""
AGAIN_SECONDS: Final = 0.5
"""Between two attempts to make it."""
DELETE_SECONDS: Final = 0.5
"""For the server to forget a consumer that nobody needs; it does by itself, a little later."""
SHORT_REPLY: Final = 9
"""Words of a message's reply subject; there are more where it has the account's domain in it."""
PAGE_HEADER: Final = "Kvevents-Page"
"""Of a message: what its writer calls the page."""
HISTORY_HEADER: Final = "Kvevents-History"
"""Of a message: `Page.history` in hexadecimal digits, or `FIRST`."""
FIRST: Final = "new"
MANY_PAGES: Final = 20
"""Of others, between two looks of a reader that rests: so many are not asked for one by one."""
FEW_PAGES: Final = 5
"""Of others, in the time between two heartbeats or looks, without a reason to be sent all pages."""
FEW_LOOKS: Final = 3
"""For so many heartbeats there must have been none of others, or few and more of its own, before a writer's reader rests."""
LOOK_SECONDS: Final = 1.0
"""Between two looks of a reader that rests at what its partition is."""
FETCH_SECONDS: Final = 5.0
PENDING_BYTES: Final = 64 << 20
"""Of pages that came and were not handed out; what is above it is read again later."""


class Broken(NamedTuple):
    """Why a partition cannot be read on."""

    why: str
    """`made anew`: it was deleted, and is another one now. `purged`: pages are gone that were not read. `shrunk`, `rewritten`:
    pages are gone that were read, in the latter case with others in their place. `disputed`: the writer of a page has read
    something else before it than this reader has. What the partition holds now is to be read from a snapshot or its beginning
    on."""
    first: int = 1
    """Number of the oldest page that can be read on from."""


class Pushed(NamedTuple):
    """One message of a partition."""

    position: int
    data: bytes
    pending: int
    """Of the messages behind it, those that the server had then."""
    name: str = ""
    """Of the page, as its writer calls it."""
    history: str | None = None
    """As `HISTORY_HEADER` says it; None for a message that is no page."""

    @property
    def begins_history(self) -> bool:
        """Whether a new history begins with it, page or not: readers go by the headers."""
        return self.history == FIRST

    def page(self) -> Page | None:
        """The page that it is; None for one whose headers say something else than it does, and for other messages."""
        page = decode_page(self.data)
        if page is None or page.name != self.name:
            return None
        return page if self.history in {None, header_of(page.history)} else None


Take = Callable[[list[Pushed]], None]
Remake = Callable[[], Awaitable[None]]


class Writer(Protocol):
    """Who writes into the partition that is read."""

    def knows(self, position: int, name: str) -> bool:
        """Whether a page of this number and name is its own, or was read."""
        ...

    def is_writing(self) -> bool:
        """Whether a page is under way. What becomes of it shows whether anybody else has written."""
        ...

    @property
    def tail(self) -> Tail:
        """The newest message that it knows to be there."""
        ...


def header_of(history: bytes | None) -> str:
    """Return what `HISTORY_HEADER` says of a page."""
    return FIRST if history is None else history.hex()


async def has_tail(js: JetStreamContext, layout: Layout, partition: int, state: PartitionInfo, tail: Tail) -> bool:
    """Return whether a partition still holds what somebody has read of it, as far as its messages show that.

    Raises `PlaneError` where they cannot be read.
    """
    if tail.position > state.last:
        return False
    if tail.name is not None and tail.position >= max(1, state.first):
        found = await _message(js, layout, partition, tail.position)
        if found is not None and found.name != tail.name:
            return False
    if tail.history is not None and state.first <= tail.position + 1 <= state.last:
        found = await _message(js, layout, partition, tail.position + 1)
        if found is not None and found.history not in {None, FIRST}:
            return found.history == tail.history.hex()
    return True


async def _message(js: JetStreamContext, layout: Layout, partition: int, position: int) -> Pushed | None:
    """One message of a partition; None where somebody has deleted it."""
    try:
        with told(f"reading page {position} of partition {partition}"):
            async with asyncio.timeout(FETCH_SECONDS):
                found = await js.get_msg(layout.stream(partition), position)
    except PlaneError as error:
        if error.fault != "missing":
            raise
        return None
    headers = found.headers or {}
    return Pushed(position, found.data or b"", 0, headers.get(PAGE_HEADER, ""), headers.get(HISTORY_HEADER))


class PartitionReader:
    """Reads one partition behind `tail`. `run` ends only when the partition cannot be read on, or when `take` raises.

    `remake` is called where the partition's stream is missing; without it the reader waits until somebody else makes it. With a
    `writer` the reader may rest, and what the writer knows is handed out at once.
    """

    def __init__(
        self,
        client: Client,
        layout: Layout,
        partition: int,
        tail: Tail,
        made: str | None,
        take: Take,
        remake: Remake | None = None,
        writer: Writer | None = None,
    ) -> None:
        self.tail = tail
        """The last message that was handed out, or that the writer was found to know."""
        self.made = made
        """Which stream it is; None before it was asked for."""
        self.behind: int | None = None
        """Pages that the server has and that were not handed out; None while that is not known."""
        self.state: PartitionInfo | None = None
        """As the server told it last."""
        self.caught_up = asyncio.Event()
        """Set once everything that the partition had was handed out, and taken."""
        self.settled = False
        """Whether the partition is read again because of a dispute: what the log holds shows who is right, so no other ends
        this."""
        self.fault = ""
        """Why nothing can be read at the moment."""
        self._client: Final = client
        self._js: Final = client.jetstream()
        self._layout: Final = layout
        self._partition: Final = partition
        self._take: Final = take
        self._remake: Final = remake
        self._writer: Final = writer
        self._rests = False
        self._own = self._others = 0
        """Pages since the last heartbeat; of one that rests, since the last time that nobody asked for anything for so long."""
        self._few = 0
        """Heartbeats between which there were few of others."""
        self._at_once = False
        """Whether there is nothing to wait for before the next look."""
        self._asked = False
        """Whether somebody else is known to have written."""
        self._dispute: Pushed | None = None
        """The page behind the tail whose writer has read something else before it."""
        self._void = 0
        """Number of a page that is known to be void for that."""
        self._verified: asyncio.Future[bool] | None = None
        """Of the present consumer: whether the tail was found in the partition since it was made."""
        self._ended: Broken | None = None
        self._hole: int | None = None
        self._failure: BaseException | None = None
        self._came: list[Pushed] = []
        self._delivered = 0
        self._lost = asyncio.Event()
        self._doubts = 0
        """How often it was to look again: what was asked for before the last time does not count."""
        self.looked = asyncio.Event()
        """Cleared while it is not known whether the partition is what it was."""
        self._alive_at = 0.0

    @property
    def position(self) -> int:
        """Number of the tail."""
        return self.tail.position

    async def run(self) -> Broken:
        """Read on until that cannot be."""
        try:
            while True:
                try:
                    broken = await self._look()
                    if broken is not None:
                        return broken
                    broken = await (self._follow() if self._writer is None or not self._rests else self._rest(self._writer))
                    if broken is not None:
                        return broken
                except PlaneError as error:
                    self._tell(error)
                await asyncio.sleep(0.0 if self._at_once else AGAIN_SECONDS)
                self._at_once = False
        finally:
            self.looked.set()

    def look_again(self) -> asyncio.Event:
        """Check again whether the partition is the one that was read. Return an event that is set after the check."""
        self._doubts += 1
        self.looked.clear()
        self._lost.set()
        return self.looked

    def end(self, broken: Broken) -> None:
        """Somebody else has found out that the partition cannot be read on."""
        self._ended = broken
        self._lost.set()

    def ask(self) -> None:
        """Somebody else has written. What is pushed brings it by itself."""
        if self._rests:
            self._asked = True
            self._lost.set()

    def _tell(self, error: PlaneError) -> None:
        self.behind = None
        if self.fault != str(error):
            self.fault = str(error)
            log.warning("partition %d: %s", self._partition, error)

    async def _state(self) -> PartitionInfo:
        try:
            return await state_of(self._js, self._layout, self._partition)
        except PlaneError as error:
            if error.fault != "missing" or self._remake is None:
                raise
            await self._remake()
            return await state_of(self._js, self._layout, self._partition)

    async def _look(self) -> Broken | None:
        """Whether what comes next is there still."""
        self._lost.clear()
        doubts = self._doubts
        if self._ended is not None:
            return self._ended
        self._pass_by()
        state = await self._state()
        self.state = state
        if self.made is None:
            self.made = state.made
        if state.made != self.made:
            return Broken("made anew")
        if state.last < self.position:
            if state.leader == "":
                raise PlaneError(
                    f"partition {self._partition} has no leader; wait until a majority of its servers runs", fault="away"
                )
            return Broken("shrunk", state.first)
        if (broken := await self._settle(state)) is not None:
            return broken
        if doubts == self._doubts:
            self.looked.set()
        if self._hole is not None or (self.position + 1 < state.first and self.position < state.last):
            return Broken("purged", max(state.first, self._hole or 0))
        if self.position >= state.last:
            self.behind = 0
            self.caught_up.set()
        return None

    async def _settle(self, state: PartitionInfo) -> Broken | None:
        """Look into whatever is doubted."""
        dispute = self._dispute
        if dispute is None and self.looked.is_set():
            return None
        if not await self._has(self.tail, state):
            return Broken("rewritten", state.first)
        if dispute is None:
            return None
        if not self.settled:
            return Broken("disputed", state.first)
        log.warning("page %d of partition %d is void: its writer expected others before it", dispute.position, self._partition)
        self._dispute, self._void = None, dispute.position
        return None

    async def _has(self, tail: Tail, state: PartitionInfo) -> bool:
        """Whether a partition still holds what was read of it; the page behind it is not asked here."""
        return await has_tail(self._js, self._layout, self._partition, state, tail._replace(history=None))

    def _pass_by(self) -> None:
        """What the writer knows of what comes next."""
        if self._writer is not None and self._writer.tail.position > self.position:
            self.tail = self._writer.tail

    async def _rest(self, writer: Writer) -> Broken | None:
        """Ask for what others have written, if they have, and for nothing more until there is reason to, or for a while."""
        self._at_once = True
        asked, self._asked = self._asked, False
        self._pass_by()
        last = self.position if self.state is None else self.state.last
        if asked or not writer.is_writing():
            if last - self.position > MANY_PAGES or not await self._ask(last) or self._others > FEW_PAGES:
                self._rests, self._others = False, 0
                return None
            self.behind = 0
        self.fault = ""
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._lost.wait()
        except TimeoutError:
            self._others = 0
        return None

    async def _ask(self, last: int) -> bool:
        """Hand out all pages up to one. False where that is not to be had in this way."""
        while self.position < last:
            page = await self._fetch(self.position + 1)
            if page is None or not self._move(page):
                return False
            self._others += 1
            self._came.append(page)
            self._hand_out()
            if self._failure is not None:
                raise self._failure
            self._pass_by()
        return True

    def _move(self, page: Pushed) -> bool:
        """Go on to the next message, unless its writer expected others before it."""
        history = START if page.begins_history else self.tail.history
        expected = None if page.history == FIRST else page.history
        if expected and history is not None and expected != history.hex() and page.position != self._void:
            self._dispute = page
            self._lost.set()
            return False
        self.tail = Tail(page.position, page.name, None if history is None else extend_history(history, page.name))
        return True

    async def _follow(self) -> Broken | None:
        """Until the consumer has lost its way."""
        client, inbox = self._client, self._client.new_inbox()
        self._verified = verified = asyncio.get_running_loop().create_future()
        self._came.clear()
        self._delivered = 0
        self._alive_at = asyncio.get_running_loop().time()
        with told(f"reading partition {self._partition}"):
            subscription = await client.subscribe(
                inbox, cb=self._on_message, pending_msgs_limit=-1, pending_bytes_limit=PENDING_BYTES
            )
            name = None
            try:
                info = await self._js.add_consumer(self._layout.stream(self._partition), self._config(inbox))
                name = info.name
                if self.fault:
                    log.info("partition %d: read again", self._partition)
                self.fault = ""
                # A server that loses messages loses this consumer with them: what it sends belongs behind what is there now.
                if not await self._has(self.tail, await self._state()):
                    return Broken("rewritten")
                verified.set_result(True)
                await self._watch()
            finally:
                if not verified.done():
                    verified.set_result(False)
                with suppress(Exception):
                    await subscription.unsubscribe()
                if name is not None and client.is_connected:
                    with suppress(Exception):
                        async with asyncio.timeout(DELETE_SECONDS):
                            await self._js.delete_consumer(self._layout.stream(self._partition), name)
        return None

    def _config(self, inbox: str) -> Any:
        from nats.js import api  # noqa: PLC0415 - an extra

        return api.ConsumerConfig(
            deliver_subject=inbox,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self.position + 1,
            ack_policy=api.AckPolicy.NONE,
            idle_heartbeat=HEARTBEAT_SECONDS,
            flow_control=True,
            mem_storage=True,
            num_replicas=1,
        )

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        last, check_at = 0, loop.time() + CHECK_SECONDS
        while not self._lost.is_set():
            if loop.time() >= check_at:
                last, check_at = await self._check(last), loop.time() + CHECK_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._lost.wait()
            self._weigh()
            if self._failure is not None:
                raise self._failure
            if loop.time() - self._alive_at > SILENT_SECONDS:
                raise PlaneError(f"partition {self._partition}: the server has been silent", fault="timeout")

    async def _check(self, last: int) -> int:
        """Look again where the consumer has sent less than was there at the check before, or other pages. The last page now."""
        state = await self._state()
        if self.position < last or not await self._has(self.tail, state):
            log.warning(
                "partition %d: its consumer has sent other pages than the partition holds, or has stopped", self._partition
            )
            self.look_again()
        return state.last

    def _weigh(self) -> None:
        """Whether to rest from now on."""
        few = self._others <= FEW_PAGES and (not self._others or self._others < self._own)
        self._few = self._few + 1 if few else 0
        self._own = self._others = 0
        may = self._writer is not None and self.caught_up.is_set() and not self._lost.is_set()
        if may and self._few >= FEW_LOOKS:
            self._few, self._rests, self._at_once = 0, True, True
            self._lost.set()

    # --- what comes

    async def _on_message(self, message: Msg) -> None:
        self._alive_at = asyncio.get_running_loop().time()
        verified = self._verified
        if verified is None or not await verified or self._verified is not verified:
            return
        if message.headers is not None and (status := message.headers.get("Status")) is not None:
            await self._on_status(message, status)
            return
        numbers = message.reply.split(".")
        if len(numbers) < SHORT_REPLY:  # nothing that a consumer sends
            return
        position, delivered, pending = (int(numbers[at]) for at in ((5, 6, 8) if len(numbers) == SHORT_REPLY else (7, 8, 10)))
        if self._lost.is_set() or delivered != self._delivered + 1 or position != self.position + 1:
            if delivered == self._delivered + 1 and position > self.position + 1:
                self._hole = position  # the server has sent all that there is
            self._lost.set()
            return
        headers = message.headers or {}
        name = headers.get(PAGE_HEADER, "")
        page = Pushed(position, message.data, pending, name, headers.get(HISTORY_HEADER))
        if not self._move(page):
            return
        known = self._writer is not None and self._writer.knows(position, name)
        self._own += known
        self._others += not known
        self._delivered = delivered
        self._came.append(page)
        if known:
            self._hand_out()
        elif len(self._came) == 1:
            # Those that are there already go together.
            asyncio.get_running_loop().call_soon(self._hand_out)

    async def _fetch(self, position: int) -> Pushed | None:
        """One page; None where it cannot be had now."""
        try:
            return await _message(self._js, self._layout, self._partition, position)
        except PlaneError as error:
            log.debug("%s", error)
            return None

    def _hand_out(self) -> None:
        came, self._came = self._came, []
        if not came:
            return
        try:
            self._take(came)
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._failure = error
            self._lost.set()
            return
        self.behind = came[-1].pending
        if self.behind == 0:
            self.caught_up.set()

    async def _on_status(self, message: Msg, status: str) -> None:
        headers = message.headers or {}
        if status != "100":
            self._lost.set()
        elif message.reply:
            await self._client.publish(message.reply)
        elif int(headers.get("Nats-Last-Consumer", self._delivered)) != self._delivered:
            self._lost.set()
