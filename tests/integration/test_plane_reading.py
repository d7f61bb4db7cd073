"""Reading a partition of a real server: every page once and in order, or a word that this cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from kvevents.plane import layout, reading
from kvevents.plane.client import PlaneClient
from kvevents.plane.connection import opened
from kvevents.plane.layout import Layout, PartitionInfo, make, make_partition
from kvevents.plane.ledger import Ledger
from kvevents.plane.reading import HISTORY_HEADER, PAGE_HEADER, PartitionReader, Pushed, header_of
from kvevents.plane.records import START, VERSION, Page, Tail, encode_page, extend_history
from kvevents.plane.settings import PlaneSettings
from nats_servers import NatsServer, nats_server, needs_nats
from plane_cases import SECONDS, plane_at

pytestmark = needs_nats


@pytest.fixture(scope="module", name="server")
def server_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as found:
        yield found


class Partition:
    """One partition, somebody who writes into it, and a reader."""

    def __init__(self, client: PlaneClient, layout: Layout, settings: PlaneSettings) -> None:
        self.client, self.js, self.layout, self.settings = client, client.jetstream(), layout, settings
        self.stream, self.subject = layout.stream(0), layout.subject(0)
        self.came: list[Pushed] = []
        self.made = 0

    async def write(self, count: int, size: int = 0) -> None:
        for _ in range(count):
            self.made += 1
            await self.js.publish(self.subject, b"%d " % self.made + bytes(size))

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
        async with opened(settings, name="test") as client:
            await work(Partition(client, await make(client.jetstream(), settings), settings))

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
            assert (reader.position, reader.behind, reader.fault) == (400, 0, "")
            assert [pushed.position for pushed in partition.came] == list(range(1, 401))

    with_partition(plane_at(server.url, name="order", partitions=1), work)


def test_it_goes_on_where_it_was_told(server: NatsServer) -> None:
    async def work(partition: Partition) -> None:
        await partition.write(10)
        async with running(partition.reader(7)) as task:
            await until(lambda: len(partition.came) == 3)
            assert partition.numbers == [8, 9, 10]
            assert not task.done()

    with_partition(plane_at(server.url, name="on", partitions=1), work)


def test_pages_that_come_faster_than_they_are_taken_are_read_again(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PENDING_BYTES", 64 << 10)
    monkeypatch.setattr(reading, "AGAIN_SECONDS", 0.01)

    async def work(partition: Partition) -> None:
        await partition.write(20, size=16 << 10)
        async with running(partition.reader()):
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
            reader.look_again()
            await until(lambda: "deleted" in reader.fault)
            await make_partition(partition.js, partition.layout, 0, partition.settings)
            async with asyncio.timeout(SECONDS):
                assert (await task).why == "made anew"

    with_partition(plane_at(server.url, name="deleted", partitions=1), work)


def test_who_may_make_it_does(server: NatsServer) -> None:
    async def work(partition: Partition) -> None:
        async def remake() -> None:
            await make_partition(partition.js, partition.layout, 0, partition.settings)

        reader = partition.reader(remake=remake)
        async with running(reader) as task:
            await partition.write(5)
            await partition.until(5)
            await partition.js.delete_stream(partition.stream)
            async with asyncio.timeout(SECONDS):
                await reader.look_again().wait()
                assert (await task).why == "made anew"

    with_partition(plane_at(server.url, name="remade", partitions=1), work)


def test_pages_that_are_gone_before_they_were_read_are_told(server: NatsServer) -> None:
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
            assert (await task).why == "shrunk"
        assert not partition.came

    with_partition(plane_at(server.url, name="shrunk", partitions=1), work)


async def put(partition: Partition, name: str, history: bytes | None) -> None:
    """One page as a bridge sends it."""
    headers = {PAGE_HEADER: name, HISTORY_HEADER: header_of(history)}
    await partition.js.publish(partition.subject, b"page", headers=headers)


def history_of(*names: str) -> bytes:
    return reduce(extend_history, names, START)


def test_a_reader_finds_another_page_where_its_tail_was(server: NatsServer) -> None:
    """The partition ends where it did, and nothing is written behind it: with its first consumer the reader compares the
    names."""

    async def work(partition: Partition) -> None:
        await put(partition, "a#1", START)
        await put(partition, "b#1", history_of("a#1"))
        read = PartitionReader(
            partition.client, partition.layout, 0, Tail(2, "a#2", history_of("a#1", "a#2")), None, partition.came.extend
        )
        async with running(read) as task, asyncio.timeout(SECONDS):
            assert (await task).why == "rewritten"
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
        await put(partition, "a#1", START)
        reader = partition.reader()
        reader.tail = Tail(0, "", START)
        async with running(reader) as task, asyncio.timeout(SECONDS):
            await until(lambda: partition.came)
            await put(partition, "b#1", history_of("something else"))
            assert (await task).why == "disputed"
        assert len(partition.came) == 1
        again = partition.reader()
        again.tail, again.settled = Tail(0, "", START), True
        async with running(again):
            await until(lambda: len(partition.came) == 3)
            await put(partition, "a#2", history_of("a#1", "b#1"))
            await until(lambda: len(partition.came) == 4)

    with_partition(plane_at(server.url, name="disputes", partitions=1), work)


def test_a_history_begins_with_a_page_that_says_so(server: NatsServer) -> None:
    """As a `Blank` does, whose writer cannot know what was before. A message that is no page has a place in it."""

    async def work(partition: Partition) -> None:
        await put(partition, "a#1", START)
        await put(partition, "b#1", None)
        await partition.write(1)
        await put(partition, "b#2", history_of("b#1", ""))
        reader = partition.reader()
        reader.tail = Tail(0, "", START)
        async with running(reader):
            await until(lambda: len(partition.came) == 4)
            assert reader.tail == Tail(4, "b#2", history_of("b#1", "", "b#2"))

    with_partition(plane_at(server.url, name="begins", partitions=1), work)


def test_a_message_whose_headers_say_something_else_is_no_page() -> None:
    """Readers go by the headers, so nothing else may come of a message that is read."""
    page = Page(VERSION, "a", 0.0, [], name="a#1", history=START)
    data, history = encode_page(page), header_of(START)
    assert Pushed(1, data, 0, "a#1", history).page() == page
    for name, said in (("a#2", history), ("a#1", "new"), ("a#1", history_of("x").hex())):
        assert Pushed(1, data, 0, name, said).page() is None
    ledger = Ledger()
    ledger.skip(1, "x", is_first=True)
    assert ledger.tail == Tail(1, "x", history_of("x"))


def test_a_writer_verifies_its_tail_when_it_has_another_connection(server: NatsServer) -> None:
    """Also where it rests, and nobody has written since."""

    async def work(partition: Partition) -> None:
        writer = Writing()
        async with resting(partition, writer) as (reader, task), asyncio.timeout(SECONDS):
            await put(partition, "a#1", START)
            writer.position, writer.name = 1, "a#1"
            await reader.look_again().wait()
            assert (reader.tail.name, task.done()) == ("a#1", False)
            await put(partition, "b#2", history_of("a#1"))
            writer.position, writer.name = 2, "a#2"
            reader.look_again()
            assert (await task).why == "rewritten"

    with_partition(plane_at(server.url, name="again", partitions=1), work)


def test_a_consumer_that_has_stopped_is_made_again(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends signs of life, and no page: what the partition holds shows it."""
    monkeypatch.setattr(reading, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(reading, "HEARTBEAT_SECONDS", 0.1)
    deaf = asyncio.Event()

    class Deaf(PartitionReader):
        """Its first consumer sends nothing but that it is there."""

        async def _on_message(self, message: Msg) -> None:
            if deaf.is_set():
                await super()._on_message(message)
            self._alive_at = asyncio.get_running_loop().time()

        def look_again(self) -> asyncio.Event:
            deaf.set()
            return super().look_again()

    async def work(partition: Partition) -> None:
        async with running(Deaf(partition.client, partition.layout, 0, Tail(0), None, partition.came.extend)) as task:
            await partition.write(3)
            await partition.until(3)
            assert not task.done()

    with_partition(plane_at(server.url, name="deaf", partitions=1), work)


def test_what_was_asked_for_before_a_doubt_does_not_end_it(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer may be of a server that has lost pages since: a bridge writes nothing until another one has come."""
    ask = layout.state_of

    async def work(partition: Partition) -> None:
        reader, answers = partition.reader(), 0

        async def state_of(*arguments: Any) -> PartitionInfo:
            nonlocal answers
            state = await ask(*arguments)
            answers += 1
            if answers == 1:
                reader.look_again()
            return state

        monkeypatch.setattr(reading, "state_of", state_of)
        async with running(reader), asyncio.timeout(SECONDS):
            await reader.looked.wait()
            assert answers > 1

    with_partition(plane_at(server.url, name="doubts", partitions=1), work)


def test_what_goes_wrong_in_taking_ends_it(server: NatsServer) -> None:
    """Or its ledger would have a hole that nobody sees."""

    async def work(partition: Partition) -> None:
        def take(_: list[Pushed]) -> None:
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
    """What somebody who writes into the partition says to its reader."""

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


@pytest.fixture(name="heartbeat")
def short_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader rests after a few of them."""
    monkeypatch.setattr(reading, "HEARTBEAT_SECONDS", 0.1)


@asynccontextmanager
async def resting(partition: Partition, writer: Writing) -> AsyncIterator[tuple[PartitionReader, asyncio.Task[Any]]]:
    """A reader of an empty partition that has seen nobody else write for a while."""
    reader = partition.reader(writer=writer)
    async with running(reader) as task:
        await until_consumers(partition, 1)
        await until_consumers(partition, 0)
        yield reader, task


async def until_consumers(partition: Partition, count: int) -> None:
    async with asyncio.timeout(SECONDS):
        while len(await partition.js.consumers_info(partition.stream)) != count:  # noqa: ASYNC110 - the server's
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("heartbeat")
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
            assert (reader.position, reader.behind, reader.fault) == (302, 0, "")
            assert not await partition.js.consumers_info(partition.stream)

    with_partition(plane_at(server.url, name="resting", partitions=1), work)


@pytest.mark.usefixtures("heartbeat")
def test_one_that_rests_asks_at_once_where_somebody_else_must_have_written(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And waits for what becomes of pages that are under way, or it would fetch them."""
    monkeypatch.setattr(reading, "LOOK_SECONDS", 0.01)

    async def work(partition: Partition) -> None:
        writer = Writing()
        async with resting(partition, writer) as (reader, _):
            writer.under_way = True
            await partition.write(1)
            looked = reader.look_again()
            await looked.wait()
            await reader.look_again().wait()
            assert not partition.came
            monkeypatch.setattr(reading, "LOOK_SECONDS", 2 * SECONDS)
            await reader.look_again().wait()
            reader.ask()
            await partition.until(1)

    with_partition(plane_at(server.url, name="asking", partitions=1), work)


@pytest.mark.usefixtures("heartbeat")
def test_one_that_rests_is_sent_pages_again_where_many_are_of_others(server: NatsServer) -> None:
    async def work(partition: Partition) -> None:
        writer = Writing()
        async with resting(partition, writer) as (reader, _):
            writer.under_way = True  # so that they are many when it asks
            await partition.write(reading.MANY_PAGES + 1)
            reader.ask()
            await partition.until(reading.MANY_PAGES + 1)
            assert len(await partition.js.consumers_info(partition.stream)) == 1
            await partition.write(100)
            await partition.until(reading.MANY_PAGES + 101)

    with_partition(plane_at(server.url, name="many", partitions=1), work)


@pytest.mark.usefixtures("heartbeat")
def test_one_that_rests_is_sent_pages_again_where_it_must_ask_again_and_again(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LOOK_SECONDS", 2 * SECONDS)

    async def work(partition: Partition) -> None:
        writer = Writing()
        writer.under_way = True
        async with resting(partition, writer) as (reader, _):
            for count in range(1, reading.FEW_PAGES + 2):
                await partition.write(1)
                reader.ask()
                await partition.until(count)
            await until_consumers(partition, 1)

    with_partition(plane_at(server.url, name="often", partitions=1), work)


@pytest.mark.usefixtures("heartbeat")
def test_one_that_rests_tells_what_became_of_its_partition(server: NatsServer) -> None:
    """A page of somebody else that is gone before it was asked for, and a partition that is another one."""

    async def work(partition: Partition) -> None:
        writer = Writing()
        async with resting(partition, writer) as (reader, task), asyncio.timeout(SECONDS):
            await partition.write(1)
            await partition.until(1)
            writer.under_way = True
            await reader.look_again().wait()
            await partition.write(2)
            await partition.js.delete_msg(partition.stream, 2)
            reader.ask()
            assert await task == ("purged", 3)
        await partition.js.delete_stream(partition.stream)
        await make_partition(partition.js, partition.layout, 0, partition.settings)
        async with resting(partition, Writing()) as (_, task), asyncio.timeout(SECONDS):
            await partition.js.delete_stream(partition.stream)
            await make_partition(partition.js, partition.layout, 0, partition.settings)
            assert (await task).why == "made anew"

    with_partition(plane_at(server.url, name="restless", partitions=1), work)


@pytest.mark.usefixtures("heartbeat")
def test_a_reader_without_a_writer_never_rests(server: NatsServer) -> None:
    """Nobody would tell it what comes. One that could rest does so meanwhile, which says that there was time enough."""

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
