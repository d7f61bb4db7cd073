"""Tests of `PartitionReader` on a real server: it passes on every page once and in order, or reports why it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg

from discovery_cases import await_in_time
from kvevents_plane import layout, partition_reader
from kvevents_plane.connection import open_client
from kvevents_plane.layout import Layout, PartitionInfo, create_partition, create_plane
from kvevents_plane.nats_client import PlaneClient
from kvevents_plane.partition_reader import PartitionReader
from kvevents_plane.partition_state import PartitionState
from kvevents_plane.records import (
    EMPTY_HISTORY,
    HISTORY_HEADER,
    PAGE_HEADER,
    VERSION,
    Page,
    ReceivedMessage,
    Tail,
    encode_page,
    extend_history,
    history_header,
)
from kvevents_plane.settings import PlaneSettings, ReaderLimits
from nats_cases import needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import SECONDS, plane_at
from tools.nats_servers import NatsServer, nats_server

pytestmark = needs_nats


class Partition:
    """Holds one partition, writes messages into it, and collects what its readers receive."""

    def __init__(self, client: PlaneClient, layout: Layout, settings: PlaneSettings) -> None:
        self.client, self.js, self.layout, self.settings = client, client.jetstream(), layout, settings
        self.stream, self.subject = layout.stream(0), layout.subject(0)
        self.received: list[ReceivedMessage] = []
        self.last_number = 0

    async def write(self, count: int, size: int = 0) -> None:
        for _ in range(count):
            self.last_number += 1
            await self.js.publish(self.subject, b"%d " % self.last_number + bytes(size))

    def reader(self, position: int = 0, stream_id: str | None = None, **more: Any) -> PartitionReader:
        return PartitionReader(self.client, self.layout, 0, Tail(position), stream_id, self.received.extend, **more)

    @property
    def numbers(self) -> list[int]:
        return [int(pushed.data.split(b" ")[0]) for pushed in self.received]

    async def until(self, count: int) -> None:
        await until(lambda: len(self.received) >= count)
        assert self.numbers == list(range(1, count + 1))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(reader: PartitionReader) -> AsyncIterator[asyncio.Task[Any]]:
    task = asyncio.create_task(reader.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, ZeroDivisionError):
            await task


def with_partition(settings: PlaneSettings, work: Callable[[Partition], Awaitable[None]]) -> None:
    async def main() -> None:
        async with open_client(settings, name="test") as client:
            await work(Partition(client, await create_plane(client.jetstream(), settings), settings))

    asyncio.run(main())


def test_every_page_is_passed_on_once_and_in_order(server: NatsServer) -> None:
    """The reader passes on existing and new pages, and reports when it has caught up."""

    async def work(partition: Partition) -> None:
        await partition.write(300)
        reader = partition.reader()
        async with running(reader):
            await reader.caught_up.wait()
            assert len(partition.received) == 300
            await partition.write(100)
            await partition.until(400)
            assert (reader.position, reader.lag, reader.fault) == (400, 0, "")
            assert [pushed.position for pushed in partition.received] == list(range(1, 401))

    with_partition(plane_at(server.url, name="order", partitions=1), work)


def test_a_reader_resumes_after_the_given_position(server: NatsServer) -> None:
    async def work(partition: Partition) -> None:
        await partition.write(10)
        async with running(partition.reader(7)) as task:
            await until(lambda: len(partition.received) == 3)
            assert partition.numbers == [8, 9, 10]
            assert not task.done()

    with_partition(plane_at(server.url, name="on", partitions=1), work)


def test_pages_that_overflow_the_queue_are_requested_again(server: NatsServer) -> None:
    limits = ReaderLimits(pending_bytes=64 << 10, retry_seconds=0.01)

    async def work(partition: Partition) -> None:
        await partition.write(20, size=16 << 10)
        async with running(partition.reader(limits=limits)):
            await partition.until(20)

    with_partition(plane_at(server.url, name="fast", partitions=1), work)


def test_a_reader_continues_after_a_restart_of_the_server(tmp_path: Path) -> None:
    async def work(partition: Partition) -> None:
        reader = partition.reader()
        async with running(reader):
            await partition.write(10)
            await partition.until(10)
            server.kill()
            await until(lambda: reader.fault.startswith("no NATS server is connected: "))
            await asyncio.to_thread(server.start)
            await until(lambda: partition.client.is_connected)
            await partition.write(10)
            await partition.until(20)
            await until(lambda: not reader.fault)

    with nats_server(tmp_path) as server:
        with_partition(plane_at(server.url, partitions=1), work)


def test_a_reader_waits_for_a_deleted_partition_and_reports_that_it_was_recreated(server: NatsServer) -> None:
    async def work(partition: Partition) -> None:
        reader = partition.reader()
        async with running(reader) as task:
            await partition.write(5)
            await partition.until(5)
            await partition.js.delete_stream(partition.stream)
            reader.request_check()
            await until(lambda: "deleted" in reader.fault)
            await create_partition(partition.js, partition.layout, 0, partition.settings)
            async with asyncio.timeout(SECONDS):
                assert (await task).reason == "recreated"

    with_partition(plane_at(server.url, name="deleted", partitions=1), work)


def test_a_reader_with_permission_recreates_a_deleted_partition(server: NatsServer) -> None:
    async def work(partition: Partition) -> None:
        async def create_again() -> None:
            await create_partition(partition.js, partition.layout, 0, partition.settings)

        reader = partition.reader(recreate=create_again)
        async with running(reader) as task:
            await partition.write(5)
            await partition.until(5)
            await partition.js.delete_stream(partition.stream)
            async with asyncio.timeout(SECONDS):
                await reader.request_check().wait()
                assert (await task).reason == "recreated"

    with_partition(plane_at(server.url, name="remade", partitions=1), work)


def test_pages_that_were_purged_before_they_were_read_are_reported(server: NatsServer) -> None:
    """The first pages, all pages, or one in the middle are missing; the failure has the position from which reading can
    continue."""

    async def work(partition: Partition) -> None:
        await partition.write(10)
        await partition.js.delete_msg(partition.stream, 5)
        async with running(partition.reader()) as task, asyncio.timeout(SECONDS):
            assert await task == ("purged", 6)
        assert partition.numbers == [1, 2, 3, 4]
        await partition.js.purge_stream(partition.stream, seq=8)
        async with running(partition.reader(4)) as task, asyncio.timeout(SECONDS):
            assert await task == ("purged", 8)
        await partition.js.purge_stream(partition.stream)
        async with running(partition.reader(9)) as task, asyncio.timeout(SECONDS):
            assert await task == ("purged", 11)
        reader = partition.reader(10)
        async with running(reader) as task:
            await reader.caught_up.wait()
            assert not task.done()

    with_partition(plane_at(server.url, name="holes", partitions=1), work)


def test_deleted_messages_at_the_end_of_a_partition_are_reported(server: NatsServer) -> None:
    """The last number of the partition stays, so that the next page follows the deleted ones."""

    async def work(partition: Partition) -> None:
        await partition.write(10)
        for position in (9, 10):
            await partition.js.delete_msg(partition.stream, position)
        async with running(partition.reader()) as task, asyncio.timeout(SECONDS):
            assert await task == ("purged", 11)
        assert partition.numbers == [1, 2, 3, 4, 5, 6, 7, 8]
        async with running(partition.reader(8)) as task, asyncio.timeout(SECONDS):
            assert await task == ("purged", 11)
        partition.received.clear()
        reader = partition.reader(10)
        async with running(reader):
            await reader.caught_up.wait()
            await partition.write(1)
            await until(lambda: partition.numbers == [11])

    with_partition(plane_at(server.url, name="endless", partitions=1), work)


def test_a_partition_that_ends_before_the_tail_is_truncated(server: NatsServer) -> None:
    """The reader fails at once, because new pages may use the numbers of the lost ones."""

    async def work(partition: Partition) -> None:
        await partition.write(10)
        async with running(partition.reader(12)) as task, asyncio.timeout(SECONDS):
            assert (await task).reason == "truncated"
        assert not partition.received

    with_partition(plane_at(server.url, name="truncated", partitions=1), work)


async def publish_page(partition: Partition, name: str, history: bytes | None) -> None:
    """Publish one page with the headers of a bridge."""
    headers = {PAGE_HEADER: name, HISTORY_HEADER: history_header(history)}
    await partition.js.publish(partition.subject, b"page", headers=headers)


def history_of(*names: str) -> bytes:
    return reduce(extend_history, names, EMPTY_HISTORY)


def test_another_page_at_the_position_of_the_tail_is_detected(server: NatsServer) -> None:
    """The partition ends at the same position and nothing is written after it. The reader compares the names of the tail when
    it creates its first consumer."""

    async def work(partition: Partition) -> None:
        await publish_page(partition, "a#1", EMPTY_HISTORY)
        await publish_page(partition, "b#1", history_of("a#1"))
        disagreeing_reader = PartitionReader(
            partition.client, partition.layout, 0, Tail(2, "a#2", history_of("a#1", "a#2")), None, partition.received.extend
        )
        async with running(disagreeing_reader) as task, asyncio.timeout(SECONDS):
            assert (await task).reason == "rewritten"
        agreeing_reader = PartitionReader(
            partition.client, partition.layout, 0, Tail(2, "b#1", history_of("a#1", "b#1")), None, partition.received.extend
        )
        async with running(agreeing_reader):
            await publish_page(partition, "b#2", agreeing_reader.tail.history)
            await until(lambda: partition.received)
            assert agreeing_reader.tail == Tail(3, "b#2", history_of("a#1", "b#1", "b#2"))

    with_partition(plane_at(server.url, name="tails", partitions=1), work)


def test_a_page_whose_writer_has_read_other_pages_is_disputed_once(server: NatsServer) -> None:
    """Either the reader or the writer may be wrong, and the log decides. When the partition is read again from the beginning,
    the page is ignored but passed on."""

    async def work(partition: Partition) -> None:
        await publish_page(partition, "a#1", EMPTY_HISTORY)
        reader = partition.reader()
        reader.tail = Tail(0, "", EMPTY_HISTORY)
        async with running(reader) as task, asyncio.timeout(SECONDS):
            await until(lambda: partition.received)
            await publish_page(partition, "b#1", history_of("something else"))
            assert (await task).reason == "disputed"
        assert len(partition.received) == 1
        second_reader = partition.reader()
        second_reader.tail, second_reader.resolves_disputes = Tail(0, "", EMPTY_HISTORY), True
        async with running(second_reader):
            await until(lambda: len(partition.received) == 3)
            await publish_page(partition, "a#2", history_of("a#1", "b#1"))
            await until(lambda: len(partition.received) == 4)

    with_partition(plane_at(server.url, name="disputes", partitions=1), work)


def test_a_page_can_begin_a_new_history(server: NatsServer) -> None:
    """A `ResetRecord` does that, because its writer cannot know the earlier pages. A message that is not a page still has a
    position."""

    async def work(partition: Partition) -> None:
        await publish_page(partition, "a#1", EMPTY_HISTORY)
        await publish_page(partition, "b#1", None)
        await partition.write(1)
        await publish_page(partition, "b#2", history_of("b#1", ""))
        reader = partition.reader()
        reader.tail = Tail(0, "", EMPTY_HISTORY)
        async with running(reader):
            await until(lambda: len(partition.received) == 4)
            assert reader.tail == Tail(4, "b#2", history_of("b#1", "", "b#2"))

    with_partition(plane_at(server.url, name="begins", partitions=1), work)


def test_a_message_whose_headers_contradict_its_content_is_not_a_page() -> None:
    """Readers use the headers, so a message whose content differs from them is rejected."""
    page = Page(VERSION, "a", [], name="a#1", history=EMPTY_HISTORY)
    data, history = encode_page(page), history_header(EMPTY_HISTORY)
    assert ReceivedMessage(1, data, 0, "a#1", history).page() == page
    for name, said in (("a#2", history), ("a#1", "new"), ("a#1", history_of("x").hex())):
        assert ReceivedMessage(1, data, 0, name, said).page() is None
    state = PartitionState()
    state.receive(ReceivedMessage(1, b"", 0, "x", "new"), 0)
    assert state.tail == Tail(1, "x", history_of("x"))


def test_the_tail_of_a_writer_is_verified_after_a_reconnect(server: NatsServer) -> None:
    """It does so even if its reader polls and no other process has written since."""

    async def work(partition: Partition) -> None:
        writer = FakeWriter()
        async with polling(partition, writer) as (reader, task), asyncio.timeout(SECONDS):
            await publish_page(partition, "a#1", EMPTY_HISTORY)
            writer.position, writer.name = 1, "a#1"
            await reader.request_check().wait()
            assert (reader.tail.name, task.done()) == ("a#1", False)
            await publish_page(partition, "b#2", history_of("a#1"))
            writer.position, writer.name = 2, "a#2"
            reader.request_check()
            assert (await task).reason == "rewritten"

    with_partition(plane_at(server.url, name="again", partitions=1), work)


def test_a_consumer_that_delivers_nothing_is_replaced(server: NatsServer) -> None:
    """The consumer sends heartbeats but no pages; the reader compares with the content of the partition."""
    limits = ReaderLimits(check_seconds=0.05, heartbeat_seconds=0.1)
    delivers_pages = asyncio.Event()

    class SilentConsumerReader(PartitionReader):
        """Its first consumer delivers only heartbeats."""

        async def _on_message(self, message: Msg) -> None:
            if delivers_pages.is_set():
                await super()._on_message(message)
            self._alive_at = asyncio.get_running_loop().time()

        def request_check(self) -> asyncio.Event:
            delivers_pages.set()
            return super().request_check()

    async def work(partition: Partition) -> None:
        reader = SilentConsumerReader(
            partition.client, partition.layout, 0, Tail(0), None, partition.received.extend, limits=limits
        )
        async with running(reader) as task:
            await partition.write(3)
            await partition.until(3)
            assert not task.done()

    with_partition(plane_at(server.url, name="deaf", partitions=1), work)


def test_only_a_response_to_a_later_request_completes_a_requested_check(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response may be of a server that has lost pages since. A bridge writes nothing until a response to a later request
    has arrived."""
    original = layout.partition_info

    async def work(partition: Partition) -> None:
        reader, answers = partition.reader(), 0

        async def partition_info(*arguments: Any) -> PartitionInfo:
            nonlocal answers
            state = await original(*arguments)
            answers += 1
            if answers == 1:
                reader.request_check()
            return state

        monkeypatch.setattr(partition_reader, "partition_info", partition_info)
        async with running(reader), asyncio.timeout(SECONDS):
            await reader.checked.wait()
            assert answers > 1

    with_partition(plane_at(server.url, name="reasons", partitions=1), work)


def test_an_error_while_applying_pages_ends_the_reader(server: NatsServer) -> None:
    """Otherwise the state would lack a page without any sign of it."""

    async def work(partition: Partition) -> None:
        def fail(_: list[ReceivedMessage]) -> None:
            raise ZeroDivisionError

        await partition.write(1)
        task = asyncio.create_task(PartitionReader(partition.client, partition.layout, 0, Tail(0), None, fail).run())
        with pytest.raises(ZeroDivisionError):
            await await_in_time(task)

    with_partition(plane_at(server.url, name="wrong", partitions=1), work)


def test_messages_that_no_consumer_sent_are_ignored(server: NatsServer) -> None:
    async def work(partition: Partition) -> None:
        inboxes: list[str] = []
        partition.client.new_inbox = lambda: inboxes.append(f"_INBOX.test{len(inboxes)}") or inboxes[-1]  # type: ignore[method-assign,func-returns-value]
        reader = partition.reader()
        async with running(reader):
            await reader.caught_up.wait()
            for reply in ("", "a.b", ".".join("abcdefgh")):
                await partition.client.publish(inboxes[-1], b"hello", reply=reply)
            await partition.write(3)
            await partition.until(3)

    with_partition(plane_at(server.url, name="strange", partitions=1), work)


class FakeWriter:
    """Reports to the reader what the writer of the partition knows."""

    def __init__(self) -> None:
        self.position = 0
        self.name: str | None = None
        self.has_page_in_flight = False

    def knows(self, position: int, name: str) -> bool:
        return position <= self.position or name == "mine"

    def is_writing(self) -> bool:
        return self.has_page_in_flight

    @property
    def tail(self) -> Tail:
        return Tail(self.position, self.name)


POLLING = ReaderLimits(heartbeat_seconds=0.1)
"""Short heartbeats: a reader polls after a few of them."""


@asynccontextmanager
async def polling(
    partition: Partition, writer: FakeWriter, limits: ReaderLimits = POLLING
) -> AsyncIterator[tuple[PartitionReader, asyncio.Task[Any]]]:
    """Run a reader of an empty partition that polls, because it has seen no other writer for a while."""
    reader = partition.reader(writer=writer, limits=limits)
    async with running(reader) as task:
        await until(lambda: reader._polls)
        await until_consumers(partition, 0)
        yield reader, task


async def until_consumers(partition: Partition, count: int) -> None:
    async with asyncio.timeout(SECONDS):
        while len(await partition.js.consumers_info(partition.stream)) != count:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.005)


def test_a_polling_reader_requests_only_the_pages_of_other_writers(server: NatsServer) -> None:
    """The server pushes nothing. Pages that the writer knows count as read; the reader requests other pages, in order."""

    async def work(partition: Partition) -> None:
        writer = FakeWriter()
        async with polling(partition, writer) as (reader, _):
            writer.has_page_in_flight = True
            await partition.write(300)
            writer.position, writer.has_page_in_flight = 300, False
            await partition.write(2)
            await until(lambda: len(partition.received) == 2)
            assert partition.numbers == [301, 302]
            assert (reader.position, reader.lag, reader.fault) == (302, 0, "")
            assert not await partition.js.consumers_info(partition.stream)

    with_partition(plane_at(server.url, name="resting", partitions=1), work)


def test_a_requested_poll_fetches_the_pages_of_another_writer_at_once(server: NatsServer) -> None:
    """It waits for the acknowledgements of pages in flight; otherwise it would fetch those pages."""
    limits = msgspec.structs.replace(POLLING, poll_seconds=2 * SECONDS)

    async def work(partition: Partition) -> None:
        writer = FakeWriter()
        async with polling(partition, writer, limits) as (reader, _):
            writer.has_page_in_flight = True
            await partition.write(1)
            first_check = reader.request_check()
            await first_check.wait()
            await reader.request_check().wait()
            assert not partition.received
            await reader.request_check().wait()
            reader.request_poll()
            await partition.until(1)

    with_partition(plane_at(server.url, name="asking", partitions=1), work)


def test_polling_ends_if_one_poll_finds_many_pages_of_other_writers(server: NatsServer) -> None:
    async def work(partition: Partition) -> None:
        writer = FakeWriter()
        async with polling(partition, writer) as (reader, _):
            writer.has_page_in_flight = True  # so that there are many pages when the reader polls
            await partition.write(partition_reader.MAX_POLLED_PAGES + 1)
            reader.request_poll()
            await partition.until(partition_reader.MAX_POLLED_PAGES + 1)
            assert len(await partition.js.consumers_info(partition.stream)) == 1
            await partition.write(100)
            await partition.until(partition_reader.MAX_POLLED_PAGES + 101)

    with_partition(plane_at(server.url, name="many", partitions=1), work)


def test_polling_ends_if_other_writers_write_often(server: NatsServer) -> None:
    limits = msgspec.structs.replace(POLLING, poll_seconds=2 * SECONDS)

    async def work(partition: Partition) -> None:
        writer = FakeWriter()
        writer.has_page_in_flight = True
        async with polling(partition, writer, limits) as (reader, _):
            for count in range(1, partition_reader.MAX_FOREIGN_PAGES + 2):
                await partition.write(1)
                reader.request_poll()
                await partition.until(count)
            await until_consumers(partition, 1)

    with_partition(plane_at(server.url, name="often", partitions=1), work)


def test_a_polling_reader_reports_purged_pages_and_a_recreated_partition(server: NatsServer) -> None:
    """It reports a page of another writer that was deleted before it was requested, and a partition that was created again."""

    async def work(partition: Partition) -> None:
        writer = FakeWriter()
        async with polling(partition, writer) as (reader, task), asyncio.timeout(SECONDS):
            await partition.write(1)
            await partition.until(1)
            writer.has_page_in_flight = True
            await reader.request_check().wait()
            await partition.write(2)
            await partition.js.delete_msg(partition.stream, 2)
            reader.request_poll()
            assert await task == ("purged", 3)
        await partition.js.delete_stream(partition.stream)
        await create_partition(partition.js, partition.layout, 0, partition.settings)
        async with polling(partition, FakeWriter()) as (_, task), asyncio.timeout(SECONDS):
            await partition.js.delete_stream(partition.stream)
            await create_partition(partition.js, partition.layout, 0, partition.settings)
            assert (await task).reason == "recreated"

    with_partition(plane_at(server.url, name="restless", partitions=1), work)


def test_a_reader_without_a_writer_never_polls(server: NatsServer) -> None:
    """No writer would report new pages. A reader with a writer starts to poll meanwhile, which shows that there was enough
    time."""

    async def work(partition: Partition) -> None:
        plain, writer = partition.reader(), FakeWriter()
        async with running(plain):
            await until_consumers(partition, 1)
            (before,) = await partition.js.consumers_info(partition.stream)
            other = partition.reader(writer=writer)
            async with running(other):
                await until(lambda: other._polls)
                await until_consumers(partition, 1)
            assert [each.name for each in await partition.js.consumers_info(partition.stream)] == [before.name]

    with_partition(plane_at(server.url, name="plain", partitions=1), work)
