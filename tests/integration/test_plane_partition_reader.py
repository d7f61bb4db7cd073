"""Reading a partition of a real server: every page once and in order, or a fault that names the reason."""

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

from kvevents.plane import layout, partition_reader
from kvevents.plane.connection import open_client
from kvevents.plane.layout import Layout, PartitionInfo, create_partition, create_plane
from kvevents.plane.nats_client import PlaneClient
from kvevents.plane.partition_reader import PartitionReader
from kvevents.plane.partition_state import PartitionState
from kvevents.plane.records import (
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
from kvevents.plane.settings import PlaneSettings, ReaderLimits
from nats_servers import NatsServer, nats_server, needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import SECONDS, plane_at

pytestmark = needs_nats


class Partition:
    """One partition, another writer of it, and a reader."""

    def __init__(self, client: PlaneClient, layout: Layout, settings: PlaneSettings) -> None:
        self.client, self.js, self.layout, self.settings = client, client.jetstream(), layout, settings
        self.stream, self.subject = layout.stream(0), layout.subject(0)
        self.came: list[ReceivedMessage] = []
        self.stream_id = 0

    async def write(self, count: int, size: int = 0) -> None:
        for _ in range(count):
            self.stream_id += 1
            await self.js.publish(self.subject, b"%d " % self.stream_id + bytes(size))

    def reader(self, position: int = 0, made: str | None = None, **more: Any) -> PartitionReader:
        return PartitionReader(self.client, self.layout, 0, Tail(position), made, self.came.extend, **more)

    @property
    def numbers(self) -> list[int]:
        return [int(pushed.data.split(b" ")[0]) for pushed in self.came]

    async def until(self, count: int) -> None:
        await until(lambda: len(self.came) >= count)
        assert self.numbers == list(range(1, count + 1))


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not look():  # noqa: ASYNC110 - of anything
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


def test_every_page_once_and_in_order(server: NatsServer) -> None:
    """Those that were there, and those that come; the reader says when it has caught up."""

    async def work(partition: Partition) -> None:
        await partition.write(300)
        reader = partition.reader()
        async with running(reader):
            await reader.caught_up.wait()
            assert len(partition.came) == 300
            await partition.write(100)
            await partition.until(400)
            assert (reader.position, reader.lag, reader.fault) == (400, 0, "")
            assert [pushed.position for pushed in partition.came] == list(range(1, 401))

    with_partition(plane_at(server.url, name="order", partitions=1), work)


def test_it_resumes_at_the_given_position(server: NatsServer) -> None:
    async def work(partition: Partition) -> None:
        await partition.write(10)
        async with running(partition.reader(7)) as task:
            await until(lambda: len(partition.came) == 3)
            assert partition.numbers == [8, 9, 10]
            assert not task.done()

    with_partition(plane_at(server.url, name="on", partitions=1), work)


def test_pages_that_come_faster_than_they_are_taken_are_read_again(server: NatsServer) -> None:
    limits = ReaderLimits(pending_bytes=64 << 10, retry_seconds=0.01)

    async def work(partition: Partition) -> None:
        await partition.write(20, size=16 << 10)
        async with running(partition.reader(limits=limits)):
            await partition.until(20)

    with_partition(plane_at(server.url, name="fast", partitions=1), work)


def test_a_server_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    async def work(partition: Partition) -> None:
        reader = partition.reader()
        async with running(reader):
            await partition.write(10)
            await partition.until(10)
            server.kill()
            await until(lambda: reader.fault)
            await asyncio.to_thread(server.start)
            await until(lambda: partition.client.is_connected)
            await partition.write(10)
            await partition.until(20)
            await until(lambda: not reader.fault)

    with nats_server(tmp_path) as server:
        with_partition(plane_at(server.url, partitions=1), work)


def test_a_partition_that_is_deleted_is_waited_for_and_is_another_one_then(server: NatsServer) -> None:
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


def test_a_reader_with_permission_creates_it(server: NatsServer) -> None:
    async def work(partition: Partition) -> None:
        async def remake() -> None:
            await create_partition(partition.js, partition.layout, 0, partition.settings)

        reader = partition.reader(recreate=remake)
        async with running(reader) as task:
            await partition.write(5)
            await partition.until(5)
            await partition.js.delete_stream(partition.stream)
            async with asyncio.timeout(SECONDS):
                await reader.request_check().wait()
                assert (await task).reason == "recreated"

    with_partition(plane_at(server.url, name="remade", partitions=1), work)


def test_pages_that_are_gone_before_they_were_read_are_reported(server: NatsServer) -> None:
    """At its beginning, all of it, or in its midst: and where it can be read on from."""

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


def test_a_partition_that_ends_before_what_was_read_cannot_be_read_on(server: NatsServer) -> None:
    """At once: pages that are written next may use the numbers of those that are gone."""

    async def work(partition: Partition) -> None:
        await partition.write(10)
        async with running(partition.reader(12)) as task, asyncio.timeout(SECONDS):
            assert (await task).reason == "truncated"
        assert not partition.came

    with_partition(plane_at(server.url, name="truncated", partitions=1), work)


async def put(partition: Partition, name: str, history: bytes | None) -> None:
    """One page as a bridge sends it."""
    headers = {PAGE_HEADER: name, HISTORY_HEADER: history_header(history)}
    await partition.js.publish(partition.subject, b"page", headers=headers)


def history_of(*names: str) -> bytes:
    return reduce(extend_history, names, EMPTY_HISTORY)


def test_a_reader_finds_another_page_where_its_tail_was(server: NatsServer) -> None:
    """The partition ends where it did, and nothing is written behind it: with its first consumer the reader compares the
    names."""

    async def work(partition: Partition) -> None:
        await put(partition, "a#1", EMPTY_HISTORY)
        await put(partition, "b#1", history_of("a#1"))
        read = PartitionReader(
            partition.client, partition.layout, 0, Tail(2, "a#2", history_of("a#1", "a#2")), None, partition.came.extend
        )
        async with running(read) as task, asyncio.timeout(SECONDS):
            assert (await task).reason == "rewritten"
        same = PartitionReader(
            partition.client, partition.layout, 0, Tail(2, "b#1", history_of("a#1", "b#1")), None, partition.came.extend
        )
        async with running(same):
            await put(partition, "b#2", same.tail.history)
            await until(lambda: partition.came)
            assert same.tail == Tail(3, "b#2", history_of("a#1", "b#1", "b#2"))

    with_partition(plane_at(server.url, name="tails", partitions=1), work)


def test_a_page_whose_writer_has_read_something_else_ends_the_reader_once(server: NatsServer) -> None:
    """Either of them may be wrong. The log itself decides: read again from its beginning, the page is void, and handed out."""

    async def work(partition: Partition) -> None:
        await put(partition, "a#1", EMPTY_HISTORY)
        reader = partition.reader()
        reader.tail = Tail(0, "", EMPTY_HISTORY)
        async with running(reader) as task, asyncio.timeout(SECONDS):
            await until(lambda: partition.came)
            await put(partition, "b#1", history_of("something else"))
            assert (await task).reason == "disputed"
        assert len(partition.came) == 1
        again = partition.reader()
        again.tail, again.resolves_disputes = Tail(0, "", EMPTY_HISTORY), True
        async with running(again):
            await until(lambda: len(partition.came) == 3)
            await put(partition, "a#2", history_of("a#1", "b#1"))
            await until(lambda: len(partition.came) == 4)

    with_partition(plane_at(server.url, name="disputes", partitions=1), work)


def test_a_history_begins_with_a_page_that_says_so(server: NatsServer) -> None:
    """As a `ResetRecord` does, whose writer cannot know what was before. A message that is not a page still has a position."""

    async def work(partition: Partition) -> None:
        await put(partition, "a#1", EMPTY_HISTORY)
        await put(partition, "b#1", None)
        await partition.write(1)
        await put(partition, "b#2", history_of("b#1", ""))
        reader = partition.reader()
        reader.tail = Tail(0, "", EMPTY_HISTORY)
        async with running(reader):
            await until(lambda: len(partition.came) == 4)
            assert reader.tail == Tail(4, "b#2", history_of("b#1", "", "b#2"))

    with_partition(plane_at(server.url, name="begins", partitions=1), work)


def test_a_message_whose_headers_say_something_else_is_no_page() -> None:
    """Readers go by the headers, so nothing else may come of a message that is read."""
    page = Page(VERSION, "a", 0.0, [], name="a#1", history=EMPTY_HISTORY)
    data, history = encode_page(page), history_header(EMPTY_HISTORY)
    assert ReceivedMessage(1, data, 0, "a#1", history).page() == page
    for name, said in (("a#2", history), ("a#1", "new"), ("a#1", history_of("x").hex())):
        assert ReceivedMessage(1, data, 0, name, said).page() is None
    state = PartitionState()
    state.skip(1, "x", is_first=True)
    assert state.tail == Tail(1, "x", history_of("x"))


def test_a_writer_verifies_its_tail_when_it_has_another_connection(server: NatsServer) -> None:
    """Also if it rests, and no other process has written since."""

    async def work(partition: Partition) -> None:
        writer = Writing()
        async with resting(partition, writer) as (reader, task), asyncio.timeout(SECONDS):
            await put(partition, "a#1", EMPTY_HISTORY)
            writer.position, writer.name = 1, "a#1"
            await reader.request_check().wait()
            assert (reader.tail.name, task.done()) == ("a#1", False)
            await put(partition, "b#2", history_of("a#1"))
            writer.position, writer.name = 2, "a#2"
            reader.request_check()
            assert (await task).reason == "rewritten"

    with_partition(plane_at(server.url, name="again", partitions=1), work)


def test_a_consumer_that_has_stopped_is_made_again(server: NatsServer) -> None:
    """It sends signs of life, and no page: what the partition holds shows it."""
    limits = ReaderLimits(check_seconds=0.05, heartbeat_seconds=0.1)
    deaf = asyncio.Event()

    class Deaf(PartitionReader):
        """Its first consumer sends nothing but that it is there."""

        async def _on_message(self, message: Msg) -> None:
            if deaf.is_set():
                await super()._on_message(message)
            self._alive_at = asyncio.get_running_loop().time()

        def request_check(self) -> asyncio.Event:
            deaf.set()
            return super().request_check()

    async def work(partition: Partition) -> None:
        reader = Deaf(partition.client, partition.layout, 0, Tail(0), None, partition.came.extend, limits=limits)
        async with running(reader) as task:
            await partition.write(3)
            await partition.until(3)
            assert not task.done()

    with_partition(plane_at(server.url, name="deaf", partitions=1), work)


def test_what_was_asked_for_before_a_doubt_does_not_end_it(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer may be of a server that has lost pages since: a bridge writes nothing until another one has come."""
    ask = layout.partition_info

    async def work(partition: Partition) -> None:
        reader, answers = partition.reader(), 0

        async def partition_info(*arguments: Any) -> PartitionInfo:
            nonlocal answers
            state = await ask(*arguments)
            answers += 1
            if answers == 1:
                reader.request_check()
            return state

        monkeypatch.setattr(partition_reader, "partition_info", partition_info)
        async with running(reader), asyncio.timeout(SECONDS):
            await reader.checked.wait()
            assert answers > 1

    with_partition(plane_at(server.url, name="doubts", partitions=1), work)


def test_an_error_while_applying_ends_it(server: NatsServer) -> None:
    """Otherwise its state would lack a page without any sign of it."""

    async def work(partition: Partition) -> None:
        def take(_: list[ReceivedMessage]) -> None:
            raise ZeroDivisionError

        await partition.write(1)
        task = asyncio.create_task(PartitionReader(partition.client, partition.layout, 0, Tail(0), None, take).run())
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(task, SECONDS)

    with_partition(plane_at(server.url, name="wrong", partitions=1), work)


def test_messages_that_no_consumer_sends_are_passed_over(server: NatsServer) -> None:
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


class Writing:
    """The reports of the partition's writer to its reader."""

    def __init__(self) -> None:
        self.position = 0
        self.name: str | None = None
        self.under_way = False

    def knows(self, position: int, name: str) -> bool:
        return position <= self.position or name == "mine"

    def is_writing(self) -> bool:
        return self.under_way

    @property
    def tail(self) -> Tail:
        return Tail(self.position, self.name)


POLLING = ReaderLimits(heartbeat_seconds=0.1)
"""A reader polls after a few heartbeats."""


@asynccontextmanager
async def resting(
    partition: Partition, writer: Writing, limits: ReaderLimits = POLLING
) -> AsyncIterator[tuple[PartitionReader, asyncio.Task[Any]]]:
    """A reader of an empty partition that has seen no other writer for a while."""
    reader = partition.reader(writer=writer, limits=limits)
    async with running(reader) as task:
        await until_consumers(partition, 1)
        await until_consumers(partition, 0)
        yield reader, task


async def until_consumers(partition: Partition, count: int) -> None:
    async with asyncio.timeout(SECONDS):
        while len(await partition.js.consumers_info(partition.stream)) != count:  # noqa: ASYNC110 - the server's
            await asyncio.sleep(0.005)


def test_a_writer_is_not_sent_its_own_pages_and_gets_those_of_others(server: NatsServer) -> None:
    """Nothing is pushed. What it knows counts as read; what it does not is asked for, and comes in order."""

    async def work(partition: Partition) -> None:
        writer = Writing()
        async with resting(partition, writer) as (reader, _):
            writer.under_way = True
            await partition.write(300)
            writer.position, writer.under_way = 300, False
            await partition.write(2)
            await until(lambda: len(partition.came) == 2)
            assert partition.numbers == [301, 302]
            assert (reader.position, reader.lag, reader.fault) == (302, 0, "")
            assert not await partition.js.consumers_info(partition.stream)

    with_partition(plane_at(server.url, name="resting", partitions=1), work)


def test_a_resting_reader_asks_at_once_if_another_writer_must_have_written(server: NatsServer) -> None:
    """It waits for the fate of pages in flight, or it would fetch them."""
    limits = msgspec.structs.replace(POLLING, poll_seconds=2 * SECONDS)

    async def work(partition: Partition) -> None:
        writer = Writing()
        async with resting(partition, writer, limits) as (reader, _):
            writer.under_way = True
            await partition.write(1)
            looked = reader.request_check()
            await looked.wait()
            await reader.request_check().wait()
            assert not partition.came
            await reader.request_check().wait()
            reader.request_poll()
            await partition.until(1)

    with_partition(plane_at(server.url, name="asking", partitions=1), work)


def test_one_that_rests_is_sent_pages_again_where_many_are_of_others(server: NatsServer) -> None:
    async def work(partition: Partition) -> None:
        writer = Writing()
        async with resting(partition, writer) as (reader, _):
            writer.under_way = True  # so that they are many when it asks
            await partition.write(partition_reader.MAX_POLLED_PAGES + 1)
            reader.request_poll()
            await partition.until(partition_reader.MAX_POLLED_PAGES + 1)
            assert len(await partition.js.consumers_info(partition.stream)) == 1
            await partition.write(100)
            await partition.until(partition_reader.MAX_POLLED_PAGES + 101)

    with_partition(plane_at(server.url, name="many", partitions=1), work)


def test_one_that_rests_is_sent_pages_again_where_it_must_ask_again_and_again(server: NatsServer) -> None:
    limits = msgspec.structs.replace(POLLING, poll_seconds=2 * SECONDS)

    async def work(partition: Partition) -> None:
        writer = Writing()
        writer.under_way = True
        async with resting(partition, writer, limits) as (reader, _):
            for count in range(1, partition_reader.MAX_FOREIGN_PAGES + 2):
                await partition.write(1)
                reader.request_poll()
                await partition.until(count)
            await until_consumers(partition, 1)

    with_partition(plane_at(server.url, name="often", partitions=1), work)


def test_a_resting_reader_reports_the_fate_of_its_partition(server: NatsServer) -> None:
    """A page of another writer that is gone before it was asked for, and a partition that was replaced."""

    async def work(partition: Partition) -> None:
        writer = Writing()
        async with resting(partition, writer) as (reader, task), asyncio.timeout(SECONDS):
            await partition.write(1)
            await partition.until(1)
            writer.under_way = True
            await reader.request_check().wait()
            await partition.write(2)
            await partition.js.delete_msg(partition.stream, 2)
            reader.request_poll()
            assert await task == ("purged", 3)
        await partition.js.delete_stream(partition.stream)
        await create_partition(partition.js, partition.layout, 0, partition.settings)
        async with resting(partition, Writing()) as (_, task), asyncio.timeout(SECONDS):
            await partition.js.delete_stream(partition.stream)
            await create_partition(partition.js, partition.layout, 0, partition.settings)
            assert (await task).reason == "recreated"

    with_partition(plane_at(server.url, name="restless", partitions=1), work)


def test_a_reader_without_a_writer_never_rests(server: NatsServer) -> None:
    """No writer would report what comes. One that could rest does so meanwhile, which says that there was time enough."""

    async def work(partition: Partition) -> None:
        plain, writer = partition.reader(), Writing()
        async with running(plain):
            await until_consumers(partition, 1)
            (before,) = await partition.js.consumers_info(partition.stream)
            async with running(partition.reader(writer=writer)):
                await until_consumers(partition, 2)
                await until_consumers(partition, 1)
            assert [each.name for each in await partition.js.consumers_info(partition.stream)] == [before.name]

    with_partition(plane_at(server.url, name="plain", partitions=1), work)
