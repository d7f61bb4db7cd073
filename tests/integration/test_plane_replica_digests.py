"""Tests of the digests that replicas publish: their size is bounded, and they differ if and only if the contents differ."""

from __future__ import annotations

import asyncio

import nats

from kvevents_plane.connection import open_client
from kvevents_plane.digests import ConsistencyCheck, PartitionDigest, ReplicaDigests
from kvevents_plane.layout import create_plane
from kvevents_plane.log_subscriber import LogSubscriber
from kvevents_plane.partition_state import PartitionState
from kvevents_plane.records import VERSION, BatchRecord, JoinRecord, Page, ReceivedMessage, Record, StreamKey, encode_page
from kvevents_plane.settings import MAX_PARTITIONS, ReaderLimits
from kvevents_plane.status import PlaneView, inspect_plane
from nats_cases import needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import plane_at
from tools.nats_servers import NatsServer

STREAMS = 20_000
LARGE_NAME = "default\x1fdefault\x1fengine-with-a-name-as-pods-have-them-7d4b9c6f5-%05d"


def digests(count: int) -> dict[StreamKey, str]:
    return {(LARGE_NAME % number, 0): f"{number:064x}" for number in range(count)}


def read_log(stream_digests: dict[StreamKey, str]) -> ReplicaDigests:
    """Return the digests of a replica that has read a log with the streams in `stream_digests`."""
    subscriber = LogSubscriber(lambda: 0.0, stream_digests.get)
    subscriber.add_partition(0, PartitionState(), {})
    names = sorted(source for source, _ in stream_digests)
    records: list[Record] = [
        record for name in names for record in (JoinRecord(name, 0, b""), BatchRecord(name, 0, 0, 0, False, b""))
    ]
    pages = [
        Page(VERSION, "bridge", records),
        *[Page(VERSION, "bridge", [])] * (ReaderLimits().digest_intervals[0] - 1),
    ]
    subscriber.put(0, [ReceivedMessage(position, encode_page(page), 0) for position, page in enumerate(pages, 1)])
    while 0 not in subscriber.digests:
        subscriber.receive_many(0.0)
    return ReplicaDigests({partition: list(digests) for partition, digests in subscriber.digests.items()})


def test_replicas_disagree_if_one_of_many_streams_differs() -> None:
    """The replicas disagree if one stream differs, is missing, or has no blocks. The order of the streams does not matter."""
    stream_digests = digests(STREAMS)
    name = (LARGE_NAME % 7, 0)
    own = read_log(stream_digests)
    assert own.partitions[0][0].streams == STREAMS
    assert own.agrees(read_log(dict(reversed(stream_digests.items())))) is True
    assert own.agrees(read_log({**stream_digests, name: "0" * 64})) is False
    assert own.agrees(read_log({key: digest for key, digest in stream_digests.items() if key != name})) is False


def test_digests_at_different_positions_are_not_compared() -> None:
    one, two = PartitionDigest.combine(7, digests(3)), PartitionDigest.combine(8, digests(4))
    assert ReplicaDigests({0: [one], 1: [one]}).agrees(ReplicaDigests({0: [one], 1: [two]})) is True
    assert ReplicaDigests({0: [one]}).agrees(ReplicaDigests({0: [two]})) is None
    assert ReplicaDigests({0: [one]}).agrees(ReplicaDigests({1: [one]})) is None


def test_replicas_that_have_read_different_numbers_of_pages_share_positions() -> None:
    """The positions depend on the numbers of pages alone."""
    stream_digests: dict[StreamKey, str] = {("engine", 0): "a"}

    def positions(pages: int) -> list[int]:
        digested: list[StreamKey] = []

        def digest(key: StreamKey) -> str:
            digested.append(key)
            return stream_digests[key]

        subscriber = LogSubscriber(lambda: 0.0, digest)
        subscriber.add_partition(0, PartitionState(), {})
        records: list[Record] = [JoinRecord("engine", 0, b"")]
        found = [Page(VERSION, "bridge", records)] * pages
        subscriber.put(0, [ReceivedMessage(position, encode_page(page), 0) for position, page in enumerate(found, 1)])
        while subscriber.queued_bytes:
            subscriber.receive_many(0.0)
        subscriber.receive_many(0.0)
        assert len(digested) == pages // ReaderLimits().digest_intervals[0]
        return [place.position for place in subscriber.digests[0]]

    assert positions(1_030) == [1_024]
    assert positions(1_100) == [1_088, 1_024]
    assert positions(1_200) == [1_152, 1_024]


def test_digests_fit_into_a_message_of_any_plane() -> None:
    """The digests fit even for the largest number of partitions, regardless of the partitions' content."""
    place = PartitionDigest.combine(2**53, digests(10))
    replica_digests = ReplicaDigests(dict.fromkeys(range(MAX_PARTITIONS), [place] * len(ReaderLimits().digest_intervals)))
    assert len(replica_digests.encode()) < 60 << 10
    assert ReplicaDigests.decode(replica_digests.encode()) == replica_digests
    assert ReplicaDigests.decode(b'{"places": {"0": [[1, {"x": "y"}]]}}') is None


@needs_nats
def test_replicas_of_twenty_thousand_streams_read_each_others_digests(server: NatsServer) -> None:
    """A NATS server accepts 1 MiB per message, and one digest for each stream would be larger."""
    plane = plane_at(server.url, name="many", partitions=1)
    stream_digests = digests(STREAMS)
    other = {**stream_digests, (LARGE_NAME % 0, 0): "another"}
    same, another = (read_log(content).encode() for content in (stream_digests, other))  # before: digests expire

    async def exchange() -> PlaneView:
        client = await nats.connect(server.url)
        try:
            js = client.jetstream()
            layout = await create_plane(js, plane)
            bucket = await js.key_value(layout.digests)
            for name, log in (("a", same), ("b", same), ("c", another)):
                await bucket.put(name, log)
            return await inspect_plane(js, layout)
        finally:
            await client.close()

    view = asyncio.run(exchange())
    assert [(each.name, each.differs) for each in view.replicas] == [("a", ["c"]), ("b", ["c"]), ("c", ["a", "b"])]


@needs_nats
def test_replicas_with_one_name_are_named(server: NatsServer) -> None:
    """They do not compare their digests with each other. A restart under the same name is no fault."""

    async def compare() -> None:
        plane = plane_at(server.url, name="twins", partitions=1)
        async with open_client(plane, name="test") as client:
            layout = await create_plane(client.jetstream(), plane)
            one, restarted, other = (ConsistencyCheck(name, 20.0) for name in ("a", "a", "b"))
            for check in (one, one, other, restarted, restarted, other):
                assert await check.compare(client, layout, ReplicaDigests({}), 0.0) == ""
                assert check.name_fault == ""
            for check in (one, restarted):
                await check.compare(client, layout, ReplicaDigests({}), 0.0)
                assert check.name_fault == "another replica has the name 'a'; give each its own with --replica-name"
            for check in (restarted, restarted, other):
                await check.compare(client, layout, ReplicaDigests({}), 0.0)
            assert restarted.name_fault == other.name_fault == ""

    asyncio.run(compare())
