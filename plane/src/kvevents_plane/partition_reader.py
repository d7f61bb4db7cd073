"""Reads one partition of the log: passes on every page once and in order, or reports why this is impossible.

The reader uses an ordered ephemeral consumer: the server pushes pages, nothing is acknowledged, and no state outlives the
consumer. If a page is lost because of the connection, the partition's leader or a full queue, a sequence number is missing.
The reader then creates a new consumer that begins after the last page that the reader passed on.

A damaged file or a deletion leaves a *hole*: sequence numbers without messages, possibly up to the last number. A consumer
skips a hole silently. So a reader that misses a number, or that has received everything without reaching the last number,
requests the next message. If the answer shows a hole, reading can continue only after the hole.

Servers can lose messages that they have acknowledged, and then use the sequence numbers again. So a reader verifies its *tail*,
the newest message that it has read: by name with each new consumer, and by the history in each page (`partition_state`).

The reader of a bridge also has a *writer*, which already knows its own pages. If other bridges write few pages to the
partition, the reader *polls*: it has no consumer, skips the pages that the writer knows, and requests pages of other bridges
one by one. The reader requests these pages at once if a page of the writer is rejected, because another bridge has then written
a page. If the writer writes nothing, the reader requests them periodically.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from nats import errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api

from kvevents.errors import PlaneError
from kvevents_plane.layout import Layout, PartitionInfo, fetch_message, has_tail, partition_info
from kvevents_plane.nats_errors import map_errors, report_fault
from kvevents_plane.records import (
    EMPTY_HISTORY,
    HISTORY_HEADER,
    NEW_HISTORY_MARK,
    PAGE_HEADER,
    ReceivedMessage,
    Tail,
    extend_history,
)
from kvevents_plane.settings import ReaderLimits

log = logging.getLogger(__name__)

DELETE_SECONDS: Final = 0.5
"""Timeout for deleting a consumer. If the request fails, the server deletes the consumer a little later."""
MAX_POLLED_PAGES: Final = 20
"""Maximum number of pages of other bridges that a reader requests one by one. To read more pages, it creates a consumer."""
MAX_FOREIGN_PAGES: Final = 5
"""Maximum number of pages of other bridges between two heartbeats or polls. Above this number, the reader does not poll."""
DEFAULT_LIMITS: Final = ReaderLimits()


class ReadFailure(NamedTuple):
    """Why reading cannot continue. The partition must be read again from a snapshot or from its beginning."""

    reason: str
    """`recreated`: the stream was deleted and created again. `purged`: unread pages no longer exist, after a purge or damage.
    `truncated`: pages that were read no longer exist. `rewritten`: other pages have the positions of pages that were read.
    `disputed`: the writer of the next page had read other pages before it than this reader."""
    first: int = 1
    """Position of the first page at which reading can begin again."""


OnMessages = Callable[[list[ReceivedMessage]], None]


class LocalWriter(Protocol):
    """The methods that a reader calls of the writer to the same partition."""

    def knows(self, position: int, name: str) -> bool:
        """Return whether the writer knows the page, because the writer has written it or has received it from the reader."""
        ...

    def is_writing(self) -> bool:
        """Return whether a page is in flight. Its result will show whether another bridge has written a page."""
        ...

    @property
    def tail(self) -> Tail:
        """The newest message that the writer knows."""
        ...


class PartitionReader:
    """Reads one partition after `tail`. `run` ends only if reading cannot continue, or if `on_messages` raises an exception.

    If the partition's stream is missing, the reader calls `recreate`. If `recreate` is None, the reader waits until another
    process creates the stream. A reader with a `writer` can poll, and skips the pages that the writer knows.
    """

    lag: int | None = None
    """Number of pages on the servers that were not passed on yet, or None if unknown."""
    info: PartitionInfo | None = None
    """The newest state of the partition that the servers have reported, or None before the first query."""
    resolves_disputes = False
    """Whether the partition is being read again because of a dispute. If so, disputed pages do not end `run`."""
    fault = ""
    """Why the partition cannot be read at the moment; empty if it can."""
    _void_position = 0
    """Position of a page that must be ignored because of a dispute."""

    def __init__(  # noqa: PLR0913, PLR0917 - parameters for the source, the position and the sink
        self,
        client: Client,
        layout: Layout,
        partition: int,
        tail: Tail,
        stream_id: str | None,
        on_messages: OnMessages,
        recreate: Callable[[], Awaitable[None]] | None = None,
        writer: LocalWriter | None = None,
        limits: ReaderLimits = DEFAULT_LIMITS,
    ) -> None:
        self.tail = tail
        """The newest message that was passed on or that the writer already knows."""
        self.stream_id = stream_id
        """Id of the partition's stream, or None before the first query."""
        self.caught_up = asyncio.Event()
        """Set as soon as all messages that the partition then has were passed on, and never cleared."""
        self.checked = asyncio.Event()
        """Cleared while a check that was requested (`request_check`) is not done."""
        self._client: Final = client
        self._js: Final = client.jetstream()
        self._layout: Final = layout
        self._partition: Final = partition
        self._on_messages: Final = on_messages
        self._recreate: Final = recreate
        self._writer: Final = writer
        self._limits: Final = limits
        self._polls = False
        self._own_pages = self._foreign_pages = self._quiet_heartbeats = 0
        """Numbers of own and foreign pages since the newest heartbeat or idle poll, and number of consecutive heartbeats with
        few foreign pages."""
        self._is_urgent = False
        """Whether the next check begins without a pause after the current check."""
        self._poll_requested = False
        self._dispute: ReceivedMessage | None = None
        """The page after the tail, if the writer of the page had read other pages before it than this reader."""
        self._verified: asyncio.Future[bool] | None = None
        """Whether the partition still had the tail after the current consumer was created."""
        self._is_page_missing = False
        """Whether a consumer has not sent the page after the tail, although the partition has later pages."""
        self._failure: BaseException | None = None
        self._received: list[ReceivedMessage] = []
        self._delivered = 0
        self._interrupted = asyncio.Event()
        """Set if the consumer must be replaced or the poll must end."""
        self._check_requests = 0
        """Number of requests for a check. The number shows whether a check began before or after the newest request."""
        self._alive_at = 0.0

    @property
    def position(self) -> int:
        """Position of the newest message that was read."""
        return self.tail.position

    async def run(self) -> ReadFailure:
        """Read until reading cannot continue, and return the reason."""
        try:
            while True:
                try:
                    failure = await self._check()
                    if failure is None:
                        use = self._consume() if self._writer is None or not self._polls else self._poll(self._writer)
                        failure = await use
                    if failure is not None:
                        return failure
                except PlaneError as error:
                    self.lag = None
                    self.fault = report_fault(self._client, error, self.fault)
                await asyncio.sleep(0.0 if self._is_urgent else self._limits.retry_seconds)
                self._is_urgent = False
        finally:
            self.checked.set()

    def request_check(self) -> asyncio.Event:
        """Request a check of whether the partition is the one that was read. Return an event that is set after the check."""
        self._check_requests += 1
        self.checked.clear()
        self._interrupted.set()
        return self.checked

    def request_poll(self) -> None:
        """Make a polling reader request the pages of other bridges now. A consumer receives them without a request."""
        if self._polls:
            self._poll_requested = True
            self._interrupted.set()

    # --- checks of the partition

    async def _fetch_info(self) -> PartitionInfo:
        try:
            return await partition_info(self._js, self._layout, self._partition)
        except PlaneError as error:
            if error.fault != "missing" or self._recreate is None:
                raise
            await self._recreate()
            return await partition_info(self._js, self._layout, self._partition)

    async def _check(self) -> ReadFailure | None:
        """Return why the next page cannot be read, or None if it can."""
        self._interrupted.clear()
        requests = self._check_requests
        self._skip_known()
        info = await self._fetch_info()
        self.info = info
        if self.stream_id is None:
            self.stream_id = info.stream_id
        if info.stream_id != self.stream_id:
            return ReadFailure("recreated")
        if info.last < self.position:
            if info.leader == "":
                raise PlaneError(
                    f"partition {self._partition} has no leader; wait until a majority of its servers runs", fault="away"
                )
            return ReadFailure("truncated", info.first)
        if (failure := await self._verify_tail(info)) is not None:
            return failure
        if requests == self._check_requests:
            self.checked.set()
        is_short, self._is_page_missing = self._is_page_missing, False
        if self.position < info.last:
            return await self._find_hole(info) if is_short or self.position + 1 < info.first else None
        self.lag = 0
        self.caught_up.set()
        return None

    async def _find_hole(self, info: PartitionInfo) -> ReadFailure | None:
        """Return a failure if the log lacks the page after the tail. If only the consumer lacks it, pass the page on."""
        if self.position + 1 < info.first:
            return ReadFailure("purged", info.first)
        following = await fetch_message(self._js, self._layout, self._partition, self.position + 1, allows_later=True)
        if following is None or following.position > self.position + 1:
            return ReadFailure("purged", info.last + 1 if following is None else following.position)
        await self._fetch_to(min(info.last, self.position + MAX_POLLED_PAGES))
        return None

    async def _verify_tail(self, info: PartitionInfo) -> ReadFailure | None:
        dispute = self._dispute
        if dispute is None and self.checked.is_set():
            return None
        if not await self._has_page_of(self.tail, info):
            return ReadFailure("rewritten", info.first)
        if dispute is None:
            return None
        if not self.resolves_disputes:
            return ReadFailure("disputed", info.first)
        log.warning(
            "page %d of partition %d is void: its writer expected other pages before it", dispute.position, self._partition
        )
        self._dispute, self._void_position = None, dispute.position
        return None

    async def _has_page_of(self, tail: Tail, info: PartitionInfo) -> bool:
        """Return whether the partition holds `tail` and has not lost it. The page after the tail is not checked."""
        return await has_tail(self._js, self._layout, self._partition, info, tail._replace(history=None))

    def _skip_known(self) -> None:
        """Skip the pages that the writer knows."""
        if self._writer is not None and self._writer.tail.position > self.position:
            self.tail = self._writer.tail

    def _advance(self, message: ReceivedMessage) -> bool:
        """Make the message the tail and return True. Return False if the message is disputed."""
        history = EMPTY_HISTORY if message.begins_history else self.tail.history
        expected = None if message.history == NEW_HISTORY_MARK else message.history
        if expected and history is not None and expected != history.hex() and message.position != self._void_position:
            self._dispute = message
            self._interrupted.set()
            return False
        self.tail = Tail(message.position, message.name, None if history is None else extend_history(history, message.name))
        return True

    def _pass_messages_on(self) -> None:
        received, self._received = self._received, []
        if not received:
            return
        try:
            self._on_messages(received)
        except BaseException as error:  # noqa: BLE001 - `run` raises the exception again
            self._failure = error
            self._interrupted.set()
            return
        self.lag = received[-1].pending
        if self.lag == 0:
            self.caught_up.set()

    # --- polling pages

    async def _poll(self, writer: LocalWriter) -> ReadFailure | None:
        """Request pages of other bridges, and pass them on. Then wait for an interrupt or the next poll."""
        self._is_urgent = True
        requested, self._poll_requested = self._poll_requested, False
        self._skip_known()
        last = self.position if self.info is None else self.info.last
        if requested or not writer.is_writing():
            is_far = last - self.position > MAX_POLLED_PAGES
            if is_far or not await self._fetch_to(last) or self._foreign_pages > MAX_FOREIGN_PAGES:
                self._polls, self._foreign_pages = False, 0
                return None
            self.lag = 0
        self.fault = ""
        try:
            async with asyncio.timeout(self._limits.poll_seconds):
                await self._interrupted.wait()
        except TimeoutError:
            self._foreign_pages = 0
        return None

    async def _fetch_to(self, last: int) -> bool:
        """Pass on all pages up to position `last` and return True. Return False if only a consumer can read the pages."""
        while self.position < last:
            try:
                message = await fetch_message(self._js, self._layout, self._partition, self.position + 1)
            except PlaneError as error:
                log.debug("%s", error)
                return False
            if message is None or not self._advance(message):
                return False
            self._foreign_pages += 1
            self._received.append(message)
            self._pass_messages_on()
            if self._failure is not None:
                raise self._failure
            self._skip_known()
        return True

    # --- receiving pages from a consumer

    async def _consume(self) -> ReadFailure | None:
        """Read with a new consumer until the consumer must be replaced."""
        client, inbox = self._client, self._client.new_inbox()
        self._verified = verified = asyncio.get_running_loop().create_future()
        self._received.clear()
        self._delivered = 0
        self._alive_at = asyncio.get_running_loop().time()
        with map_errors(f"reading partition {self._partition}"):
            subscription = await client.subscribe(
                inbox, cb=self._on_message, pending_msgs_limit=-1, pending_bytes_limit=self._limits.pending_bytes
            )
            name = None
            try:
                config = api.ConsumerConfig(
                    deliver_subject=inbox,
                    deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
                    opt_start_seq=self.position + 1,
                    ack_policy=api.AckPolicy.NONE,
                    idle_heartbeat=self._limits.heartbeat_seconds,
                    flow_control=True,
                    mem_storage=True,
                    num_replicas=1,
                )
                info = await self._js.add_consumer(self._layout.stream(self._partition), config)
                name = info.name
                if self.fault:
                    log.info("partition %d: reading again", self._partition)
                self.fault = ""
                if not info.num_pending:
                    self._note_end()
                # The tail is verified after the creation: a server that loses messages later also loses the consumer.
                if not await self._has_page_of(self.tail, await self._fetch_info()):
                    return ReadFailure("rewritten")
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

    def _note_end(self) -> None:
        """Record that the consumer has sent all of the consumer's pages. Request a check if the partition has later pages."""
        if self.info is not None and self.position < self.info.last:
            self._is_page_missing = True
            self._interrupted.set()

    async def _watch(self) -> None:
        """Wait until the consumer must be replaced. Raises `PlaneError` if the server is silent."""
        loop = asyncio.get_running_loop()
        last, check_at = 0, loop.time() + self._limits.check_seconds
        while not self._interrupted.is_set():
            if loop.time() >= check_at:
                last, check_at = await self._compare(last), loop.time() + self._limits.check_seconds
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.heartbeat_seconds):
                    await self._interrupted.wait()
            self._choose_mode()
            if self._failure is not None:
                raise self._failure
            if loop.time() - self._alive_at > self._limits.silent_seconds:
                raise PlaneError(f"partition {self._partition}: the server has been silent", fault="timeout")

    async def _compare(self, last: int) -> int:
        """Request a check unless the consumer has sent the pages up to position `last`. Return the newest page's position."""
        info = await self._fetch_info()
        if self.position < last or not await self._has_page_of(self.tail, info):
            log.warning(
                "partition %d: the consumer has stopped, or has sent other pages than the partition holds", self._partition
            )
            self._is_page_missing = True
            self.request_check()
        return info.last

    def _choose_mode(self) -> None:
        """Switch to polling if other bridges have written few pages for `quiet_heartbeats` consecutive heartbeats."""
        is_quiet = self._foreign_pages <= MAX_FOREIGN_PAGES and (
            not self._foreign_pages or self._foreign_pages < self._own_pages
        )
        self._quiet_heartbeats = self._quiet_heartbeats + 1 if is_quiet else 0
        self._own_pages = self._foreign_pages = 0
        can_poll = self._writer is not None and self.caught_up.is_set() and not self._interrupted.is_set()
        if can_poll and self._quiet_heartbeats >= self._limits.quiet_heartbeats:
            self._quiet_heartbeats, self._polls, self._is_urgent = 0, True, True
            self._interrupted.set()

    async def _on_message(self, message: Msg) -> None:
        self._alive_at = asyncio.get_running_loop().time()
        verified = self._verified
        if verified is None or not await verified or self._verified is not verified:
            return
        if message.headers is not None and (status := message.headers.get("Status")) is not None:
            await self._on_status(message, status)
            return
        try:
            metadata = message.metadata
        except (errors.NotJSMessageError, ValueError):  # the message does not come from a consumer
            return
        position, delivered, pending = metadata.sequence.stream, metadata.sequence.consumer, metadata.num_pending
        if self._interrupted.is_set() or delivered != self._delivered + 1 or position != self.position + 1:
            if delivered == self._delivered + 1 and position > self.position + 1:
                self._is_page_missing = True
            self._interrupted.set()
            return
        headers = message.headers or {}
        name = headers.get(PAGE_HEADER, "")
        stored_at = metadata.timestamp.timestamp()
        page = ReceivedMessage(position, message.data, pending, name, headers.get(HISTORY_HEADER), stored_at)
        if not self._advance(page):
            return
        is_known = self._writer is not None and self._writer.knows(position, name)
        self._own_pages += is_known
        self._foreign_pages += not is_known
        self._delivered = delivered
        self._received.append(page)
        if not pending:
            self._note_end()
        if is_known:
            self._pass_messages_on()
        elif len(self._received) == 1:
            # One call passes on all pages that have already arrived.
            asyncio.get_running_loop().call_soon(self._pass_messages_on)

    async def _on_status(self, message: Msg, status: str) -> None:
        headers = message.headers or {}
        if status != "100":
            self._interrupted.set()
        elif message.reply:
            await self._client.publish(message.reply)
        elif int(headers.get("Nats-Last-Consumer", self._delivered)) != self._delivered:
            self._interrupted.set()
