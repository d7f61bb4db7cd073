"""The part of a bridge that reads one partition completely and writes the bridge's next pages to it.

Theory of operation. A reader keeps a `PartitionState` equal to the partition, and a `PageBuilder` builds the next page from the
state. The page is published with the expected last position of the partition. If the real position differs, another bridge has
written a page, which the reader receives. Records that the servers do not accept stay in the builder.

A partition is *ready* while its state is known to match the existing stream. The partition is no longer ready if the stream was
deleted, was recreated, or has lost pages. In this case the state is read again, and then all streams start over. After a
reconnect, no page is written until the reader has verified that the partition is unchanged.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvevents.backoff import Backoff
from kvevents.errors import KVEventsError, PlaneError
from kvevents_plane.bridge_rules import BridgePeers
from kvevents_plane.layout import Layout, create_partition, partition_info
from kvevents_plane.nats_client import PlaneClient
from kvevents_plane.nats_errors import map_errors, report_fault
from kvevents_plane.page_builder import PageBuilder
from kvevents_plane.partition_reader import PartitionReader, ReadFailure
from kvevents_plane.partition_state import PartitionState
from kvevents_plane.records import (
    HISTORY_HEADER,
    PAGE_HEADER,
    HeartbeatRecord,
    Page,
    ReceivedMessage,
    StreamKey,
    StreamRecord,
    Tail,
    encode_page,
    history_header,
)
from kvevents_plane.settings import PlaneSettings
from kvevents_plane.snapshots import Snapshots

log = logging.getLogger(__name__)

ACK_SECONDS: Final = 2.0
"""Timeout for a page's acknowledgement. Sending a page again is harmless: the server rejects a page that it already has."""
REQUEST_SECONDS: Final = 5.0
"""Timeout for all other requests to the servers."""
CATCH_UP_SECONDS: Final = 2.0
"""Maximum number of seconds for which a writer waits, after its page was rejected, until the reader receives the other page."""
MAX_IDLE_SECONDS: Final = 0.5
"""Maximum number of seconds between two checks for due records."""


@dataclass(slots=True, eq=False)
class _SentPage:
    """The page in flight."""

    name: str
    last_position: int
    """Last position of the partition before this page."""
    answer: asyncio.Future[None]


class PartitionWriter:
    """Reads and writes one partition for one bridge. `read` and `write` run concurrently as long as the bridge runs."""

    def __init__(
        self,
        client: PlaneClient,
        layout: Layout,
        partition: int,
        plane: PlaneSettings,
        bridge: str,
        page_bytes: int,
        on_ready: Callable[[PartitionWriter], None],
        on_diverged: Callable[[Sequence[StreamKey]], None],
    ) -> None:
        """`on_ready` must follow the partition's streams from the log's end. `on_diverged` must follow its streams again."""
        self.partition: Final = partition
        self.builder = PageBuilder(PartitionState(), bridge, page_bytes, secrets.token_hex(4))
        self.peers: Final = BridgePeers(bridge, lambda: self.builder.state.heartbeats)
        self.ready = asyncio.Event()
        self.paused: set[StreamKey] = set()
        """Streams that the bridge has stopped following until the queue of the partition is written."""
        self.paused_since: float | None = None
        """Time at which the first of the paused streams was paused, or None if no stream is paused."""
        self.heartbeat_at = 0.0
        """Time at which the next heartbeat is due."""
        self.is_lagging = False
        """Whether the newest heartbeat of this bridge reported a lag."""
        self.conflict = ""
        """The conflict in the newest heartbeat of this bridge: a stream that another bridge uses for another engine."""
        self.conflicts = 0
        """Number of pages that were rejected because another bridge had written a page."""
        self._on_ready: Final = on_ready
        self._on_diverged: Final = on_diverged
        self._client: Final = client
        self._js: Final = client.jetstream(timeout=REQUEST_SECONDS)
        self._snapshots: Final = Snapshots(self._js, layout)
        self._layout: Final = layout
        self._plane: Final = plane
        self._bridge: Final = bridge
        self._page_bytes: Final = page_bytes
        self._reader: PartitionReader | None = None
        self._write_fault = ""
        self._retry: Final = Backoff(initial=0.1, maximum=1.0)
        """Growing pauses between attempts to write pages that the servers do not accept."""
        self._wake: Final = asyncio.Event()
        self._advanced: Final = asyncio.Event()
        self._sent: _SentPage | None = None
        """The page in flight, whose result is not known yet, or None if no page is in flight."""

    # --- status of the partition

    @property
    def fault(self) -> str:
        """Why the partition cannot be read or written at the moment; empty if reading and writing work."""
        return (self._reader is not None and self._reader.fault) or self._write_fault

    # --- records to write

    def enqueue(self, record: StreamRecord, due: float = 0.0) -> None:
        """Queue a record for writing at `due` or later."""
        self.builder.enqueue(record, due)
        if self._sent is None:
            self._wake.set()

    def set_heartbeat(self, heartbeat: HeartbeatRecord) -> None:
        """Write a heartbeat with the next page."""
        self.builder.set_heartbeat(heartbeat)
        self._wake.set()

    def mark_diverged(self, key: StreamKey) -> None:
        """Mark a stream as diverged, so that the bridge follows it again."""
        self.builder.diverged[key] = None
        self._wake.set()

    def start_over(self, first: int) -> None:
        """Let all streams start over, because replicas cannot read the pages before `first`.

        Do nothing if all streams started over at `first` or later, or if the partition was recreated without these pages.
        """
        state = self.builder.state
        if state.first_page < first <= state.position + 1 and self.ready.is_set():
            reason = f"pages before {first} are missing, and no snapshot contains them"
            log.error("partition %d starts over: %s", self.partition, reason)
            self.builder.reset_reason = reason
            self._wake.set()

    # --- reading the partition

    def on_connected(self) -> None:
        """Give up the requests on the previous connection, which will not be answered. Request a check of the partition.

        The reader determines the result of the page in flight, because the servers can lose even an acknowledged page.
        """
        self._end_page()
        self.builder.withdraw()
        self._wake.set()
        if self._reader is not None:
            self._reader.request_check()

    def _end_page(self) -> None:
        """Stop waiting for the acknowledgement of the page in flight."""
        if self._sent is not None:
            self._sent.answer.cancel()
            self._sent = None

    async def read(self) -> None:
        """Keep the state up to date. Read the partition again whenever reading cannot continue."""
        failure: ReadFailure | None = None
        resolves_disputes = False
        while True:
            stream_id = await self._start_state(failure)
            resolves_disputes = resolves_disputes or (failure is not None and failure.reason == "disputed")
            self._reader = reader = PartitionReader(
                self._client,
                self._layout,
                self.partition,
                self.tail,
                stream_id,
                self._on_messages,
                self._recreate,
                self,
                self._plane.reader,
            )
            reader.resolves_disputes = resolves_disputes
            waiting = asyncio.create_task(self._wait_until_ready(reader))
            try:
                failure = await reader.run()
            finally:
                waiting.cancel()
                self.ready.clear()
            log.error("partition %d was %s; reading it again", self.partition, failure.reason)

    async def _start_state(self, failure: ReadFailure | None) -> str | None:
        """Start with the state in the newest snapshot or, without one, an empty state. Return the id of the stream."""
        state, stream_id = PartitionState(), None
        while True:
            try:
                info = await partition_info(self._js, self._layout, self.partition)
                stream_id = info.stream_id
                state = await self._snapshots.load_state(self.partition, info) or state
                break
            except PlaneError as error:
                if error.fault == "missing":  # the partition's reader will create the stream
                    break
                self._set_write_fault(error)
                await asyncio.sleep(self._plane.reader.retry_seconds)
        if failure is not None and failure.reason == "purged" and state.position + 1 < failure.first:
            reason = f"pages before {failure.first} are missing, and no snapshot contains them"
            log.error("partition %d starts over: %s", self.partition, reason)
            state = PartitionState.after_unknown_prefix(failure.first - 1, reason)
        self._replace_state(state)
        return stream_id

    def _replace_state(self, state: PartitionState) -> None:
        before = self.builder
        state.invalid_records, state.foreign_messages = before.state.invalid_records, before.state.foreign_messages
        self._end_page()
        self.peers.restart()
        self._advanced.set()
        self.builder = PageBuilder(state, self._bridge, self._page_bytes, secrets.token_hex(4))
        self.builder.written = before.written
        self.paused.clear()

    async def _recreate(self) -> None:
        try:
            await create_partition(self._js, self._layout, self.partition, self._plane)
        except KVEventsError as error:
            raise PlaneError(
                f"partition {self.partition} is missing and cannot be created: {error}", fault="missing"
            ) from error
        log.error("partition %d was deleted; the bridge has created it again", self.partition)

    async def _wait_until_ready(self, reader: PartitionReader) -> None:
        await reader.caught_up.wait()
        self._on_ready(self)
        self.ready.set()

    def _on_messages(self, messages: list[ReceivedMessage]) -> None:
        state = self.builder.state
        for message in messages:
            position, name = message.position, message.name
            if position <= state.position:
                continue
            if self._is_in_flight(name):
                # The page has arrived at the reader before its acknowledgement.
                self._end_page()
                self.builder.acknowledge(position)
                self._clear_write_fault()
                continue
            if self._sent is not None:  # the page in flight will be rejected
                self.conflicts += 1
                self._end_page()
                self._clear_write_fault()
            self.builder.receive(message, self.partition)
        self.peers.update(asyncio.get_running_loop().time())
        self._advanced.set()
        self._wake.set()

    def knows(self, position: int, name: str) -> bool:
        """Return whether a page is known to be in the partition, or is in flight."""
        return position <= self.builder.state.position or self._is_in_flight(name)

    def is_writing(self) -> bool:
        """Return whether a page is in flight."""
        return self._sent is not None

    @property
    def tail(self) -> Tail:
        """The newest message that was read or acknowledged."""
        return self.builder.state.tail

    def _is_in_flight(self, name: str) -> bool:
        return self._sent is not None and self._sent.name == name

    # --- writing pages

    async def write(self) -> None:
        """Write queued records as soon as they are due."""
        try:
            while True:
                await self.ready.wait()
                if self._reader is not None and not self._reader.checked.is_set():
                    await self._reader.checked.wait()
                    continue
                if self._sent is not None and self._sent.answer.done():
                    await self._finish_page(self._sent)
                elif self._sent is not None or not self._send_page():
                    await self._wait_for_work()
        finally:
            self._end_page()

    def _send_page(self) -> bool:
        """Send the next page; return False if nothing is due."""
        builder = self.builder
        page = builder.build(asyncio.get_running_loop().time())
        if builder.diverged:
            self._on_diverged(list(builder.diverged))
        if page is None:
            return False
        expected = builder.state.position
        answer = asyncio.create_task(self._publish(page, expected))
        self._sent = _SentPage(page.name, expected, answer)
        answer.add_done_callback(self._on_answer)
        return True

    def _on_answer(self, answer: asyncio.Task[None]) -> None:
        if not answer.cancelled():
            answer.exception()  # so that asyncio does not log the exception of a page that was given up
            self._wake.set()

    async def _wait_for_work(self) -> None:
        self._wake.clear()
        wait = MAX_IDLE_SECONDS
        if self._sent is None and (due := self.builder.next_due()) is not None:
            wait = min(wait, max(0.0, due - asyncio.get_running_loop().time()))
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._wake.wait()

    async def _publish(self, page: Page, expected: int) -> None:
        headers = {
            "Nats-Expected-Last-Sequence": str(expected),
            PAGE_HEADER: page.name,
            HISTORY_HEADER: history_header(page.history),
        }
        with map_errors(f"writing to partition {self.partition}"):
            async with asyncio.timeout(ACK_SECONDS):
                acknowledged = await self._js.publish(
                    self._layout.subject(self.partition),
                    encode_page(page),
                    timeout=2 * ACK_SECONDS,
                    stream=self._layout.stream(self.partition),
                    headers=headers,
                )
        if acknowledged.seq != expected + 1:
            raise PlaneError(f"partition {self.partition} already has the page", fault="conflict")

    async def _finish_page(self, sent: _SentPage) -> None:
        """Handle the result of the page in flight."""
        self._sent = None
        try:
            sent.answer.result()
        except PlaneError as error:
            self.builder.withdraw()
            await self._handle_rejection(sent, error)
        else:
            self.builder.acknowledge(sent.last_position + 1)
            self._clear_write_fault()

    async def _handle_rejection(self, sent: _SentPage, error: PlaneError) -> None:
        reader = self._reader
        if error.fault == "conflict":
            self.conflicts += 1
            if reader is not None:
                reader.request_poll()
            builder = self.builder
            try:
                async with asyncio.timeout(CATCH_UP_SECONDS):
                    while self.builder is builder and builder.state.position <= sent.last_position:
                        self._advanced.clear()
                        await self._advanced.wait()
            except TimeoutError:
                self._set_write_fault(error)  # no page of another bridge has arrived, so the server might have lost pages
                if reader is not None:
                    reader.request_check()
            else:
                self._clear_write_fault()
            return
        if error.fault == "away" and self._client.is_connected and reader is not None:
            reader.request_check()  # the stream might have been deleted
        self._set_write_fault(error)
        await asyncio.sleep(self._retry.next_delay())

    def _clear_write_fault(self) -> None:
        self._write_fault = ""
        self._retry.reset()

    def _set_write_fault(self, error: PlaneError) -> None:
        self._write_fault = report_fault(self._client, error, self._write_fault)
