"""SGLang's draft `snapshot-v1`: its consumers receive the resident blocks and continue from there."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq

from kvevents import Source, Subscriber
from kvevents.config import KVEventsConfig
from kvevents.errors import ConfigError, EndpointError, MissingDependencyError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher import EventPublisherFactory, ZmqEventPublisher
from kvevents.publisher.settings import SnapshotServerSettings
from kvevents.wire import decode_batch
from publisher_cases import (  # noqa: F401 - fixtures
    ANY,
    QUICK,
    Socket,
    consumers_context,
    open_consumer,
    run_publisher,
    subscribe,
    wait_until,
)
from publisher_engine import WORKER, Engine

Context = zmq.Context[Socket]
REQUEST = [b"", b"snapshot-v1"]


def serving(
    *args: Any, snapshots: SnapshotServerSettings | None = None, **kwargs: Any
) -> AbstractContextManager[ZmqEventPublisher]:
    """Return a publisher that serves snapshots as often as they are requested."""
    settings = replace(QUICK, snapshots=replace(snapshots or SnapshotServerSettings(), min_interval=0.0))
    return run_publisher(*args, snapshot_endpoint=ANY, settings=settings, **kwargs)


def fill(publisher: ZmqEventPublisher, engine: Engine, count: int) -> None:
    for number in range(count):
        publisher.publish(KVEventBatch(float(number), engine.events()))


def open_dealer(context: Context, publisher: ZmqEventPublisher) -> Socket:
    socket = open_consumer(context, zmq.DEALER)
    assert publisher.snapshot_endpoint is not None
    socket.connect(publisher.snapshot_endpoint)
    return socket


def read_reply(socket: Socket, limit: int = 8_192) -> tuple[list[Any], list[Any]]:
    """Return header and records, and check each reply as the consumer of the draft does."""
    kinds: list[bytes] = []
    payloads: list[bytes] = []
    while not kinds or kinds[-1] not in {b"end", b"error"}:
        empty, kind, payload = socket.recv_multipart()
        assert empty == b""
        kinds.append(kind)
        payloads.append(payload)
    assert kinds == [b"header", *[b"chunk"] * (len(kinds) - 2), b"end"], payloads[-1]
    assert payloads[-1] == b""
    header = msgspec.msgpack.decode(payloads[0])
    chunks = [msgspec.msgpack.decode(payload) for payload in payloads[1:-1]]
    assert all(len(chunk) <= limit for chunk in chunks)
    records = [record for chunk in chunks for record in chunk]
    assert header[6] == len(records)
    return header, records


class DraftConsumer:
    """A consumer of the draft: it subscribes, requests a snapshot, waits for the barrier, reads the snapshot, and needs every
    later number."""

    def __init__(self, context: Context, publisher: ZmqEventPublisher) -> None:
        self._live = subscribe(context, publisher)
        request_socket = open_dealer(context, publisher)
        request_socket.send_multipart(REQUEST)
        (version, epoch, self.rank, resume, barrier, barrier_id, _), records = read_reply(
            request_socket, publisher._settings.snapshots.records_per_chunk
        )
        assert (version, resume) == (1, barrier + 1)
        self._epoch = b"\0sgl-kv-epoch=" + epoch.encode()
        while True:
            topic, seq, payload = self._receive()
            assert seq <= barrier
            if seq == barrier:
                break
        assert topic.partition(b"\0sgl-kv-snapshot=")[2] == barrier_id.encode()
        assert decode_batch(payload).batch.events == []
        self.resident = {value for _, hashes in records for value in hashes}
        parents = {hashes[0]: parent for parent, hashes in records}
        assert all(parent is None or parent not in self.resident or parent in parents for parent in parents.values())
        self.number = barrier

    def _receive(self) -> tuple[bytes, int, bytes]:
        topic, seq, payload = self._live.recv_multipart()
        assert self._epoch in topic
        return topic, int.from_bytes(seq, "big"), payload

    def follow(self, last: int) -> None:
        while self.number < last:
            _, seq, payload = self._receive()
            assert seq == self.number + 1
            self.number = seq
            for event in decode_batch(payload).batch.events:
                if isinstance(event, AllBlocksCleared):
                    self.resident.clear()
                else:
                    change = self.resident.update if isinstance(event, BlockStored) else self.resident.difference_update
                    change(event.block_hashes)


@pytest.mark.parametrize("steps", [3, 10_000])
@pytest.mark.parametrize("chunk", [1, 5, 8_192])
def test_a_consumer_of_the_draft_is_exact(context: Context, steps: int, chunk: int) -> None:
    """The consumer is exact whether batches have left the buffer or not, and for any number of chunks."""
    engine = Engine(4)
    with serving(2, snapshots=SnapshotServerSettings(records_per_chunk=chunk), buffer_steps=steps) as publisher:
        fill(publisher, engine, 40)
        consumer = DraftConsumer(context, publisher)
        assert consumer.rank == 2
        assert consumer.resident == engine.live
        fill(publisher, engine, 40)
        wait_until(lambda: publisher.stats().queued == 0, "all batches to be sent")
        consumer.follow(publisher.stats().next_seq - 1)
        assert consumer.resident == engine.live


def test_concurrent_requests_share_one_snapshot(context: Context) -> None:
    """Requests that wait at the same time get the same snapshot, with one barrier."""
    with serving() as publisher:
        fill(publisher, Engine(), 10)
        readers = [open_dealer(context, publisher) for _ in range(5)]
        for reader in readers:
            reader.send_multipart(REQUEST)
        headers = [read_reply(reader)[0] for reader in readers]
        assert len({header[1] for header in headers}) == 1
        barriers = {header[4] for header in headers}
        assert len(barriers) <= 5
        assert publisher.stats().next_seq == 10 + len(barriers)
        wait_until(lambda: publisher.stats().snapshots.finished == 5, "all replies to be counted")


def test_a_snapshot_has_only_blocks_in_device_memory(context: Context) -> None:
    """The draft has no tiers. Its consumers take every record for device memory, and store signed hashes."""
    events: list[KVEvent] = [
        BlockStored([1, 2, 2**64 - 1], None, list(range(12)), 4, medium="GPU"),
        BlockStored([1, 2], None, list(range(8)), 4, medium="CPU"),
        BlockStored([9], None, list(range(50, 54)), 4, medium="CPU"),
        BlockRemoved([1], "GPU"),
    ]
    with serving() as publisher:
        publisher.publish(KVEventBatch(0.0, events))
        wait_until(lambda: publisher.stats().queued == 0, "all batches to be sent")
        reader = open_dealer(context, publisher)
        reader.send_multipart(REQUEST)
        assert read_reply(reader)[1] == [[1, [2]], [2, [-1]]]


def test_a_missing_batch_is_an_error(context: Context) -> None:
    """The error has a reason, and lasts until everything is cleared."""
    with serving() as publisher:
        publisher.publish(KVEventBatch(0.0, [object()]))  # type: ignore[list-item] # it cannot be encoded
        fill(publisher, Engine(), 3)
        wait_until(lambda: publisher.stats().queued == 0, "all batches to be sent")
        reader = open_dealer(context, publisher)
        reader.send_multipart(REQUEST)
        _, kind, reason = reader.recv_multipart()
        assert kind == b"error"
        assert b"unknown until the cache is cleared" in reason
        publisher.publish(KVEventBatch(0.0, [AllBlocksCleared()]))
        wait_until(lambda: publisher.stats().queued == 0, "the clear")
        reader.send_multipart(REQUEST)
        assert read_reply(reader)[1] == []


@pytest.mark.parametrize("request_frames", [[b"", b"snapshot-v2"], [b"x", b"snapshot-v1"], [b"snapshot-v1"], [b"", b"", b""]])
def test_an_invalid_request_is_rejected(context: Context, request_frames: list[bytes]) -> None:
    """The reply is the error of the draft, and no barrier is sent."""
    with serving() as publisher:
        reader = open_dealer(context, publisher)
        reader.send_multipart(request_frames)
        assert reader.recv_multipart() == [b"", b"error", b"invalid snapshot-v1 request"]
        assert publisher.stats().next_seq == 0
        assert publisher.stats().snapshots.malformed == 1


def open_stalled_reader(context: Context, publisher: ZmqEventPublisher) -> Socket:
    socket = open_consumer(context, zmq.DEALER)
    socket.rcvhwm, socket.rcvbuf = 1, 4096
    assert publisher.snapshot_endpoint is not None
    socket.connect(publisher.snapshot_endpoint)
    socket.send_multipart(REQUEST)
    return socket


def publish_many_blocks(publisher: ZmqEventPublisher) -> None:
    """Publish more blocks than all buffers on the way hold."""
    for number in range(70):
        hashes = [(number << 32) + block + (1 << 60) for block in range(4_096)]
        publisher.publish(KVEventBatch(0.0, [BlockStored(hashes, None, [0] * 4_096, 1, medium="GPU")]))
    wait_until(lambda: publisher.stats().queued == 0, "all batches to be sent")


def test_the_number_of_snapshots_in_memory_is_limited(context: Context) -> None:
    """A request that would need one more is answered with an error."""
    with serving(snapshots=SnapshotServerSettings(max_snapshots=1)) as publisher:
        publish_many_blocks(publisher)
        open_stalled_reader(context, publisher)
        wait_until(lambda: publisher.stats().snapshots.active, "the reply to begin")
        reader = open_dealer(context, publisher)
        reader.send_multipart(REQUEST)
        assert reader.recv_multipart() == [b"", b"error", b"snapshot provider busy"]
        publisher.shutdown(timeout=0.0)


def test_a_reply_that_is_not_read_is_abandoned_and_others_are_served(context: Context) -> None:
    """With one snapshot allowed in memory, the next request is served when the first reply is abandoned."""
    with serving(snapshots=SnapshotServerSettings(max_snapshots=1, reply_timeout=0.05)) as publisher:
        publish_many_blocks(publisher)
        open_stalled_reader(context, publisher)
        wait_until(lambda: publisher.stats().snapshots.abandoned, "the first reply to be abandoned")
        reader = open_dealer(context, publisher)
        reader.send_multipart(REQUEST)
        assert reader.recv_multipart()[1] == b"header"
        publisher.shutdown(timeout=0.0)


def test_repeated_requests_are_refused(context: Context) -> None:
    """A consumer has at most one snapshot in memory."""
    with serving() as publisher:
        publish_many_blocks(publisher)
        reader = open_stalled_reader(context, publisher)
        for _ in range(10):
            reader.send_multipart(REQUEST)
        wait_until(lambda: publisher.stats().snapshots.refused == 10, "all requests to be refused")
        wait_until(lambda: publisher.stats().snapshots.active, "the reply to begin")
        assert publisher.shutdown(timeout=0.1).replays_unfinished == 1


def test_ordinary_subscribers_stay_exact() -> None:
    """For them, barriers are batches without events, under topics with the same prefix."""
    with serving(replay_endpoint=ANY, topic="kv") as publisher:
        engine, index = Engine(9), PrefixIndex()
        source = Source(publisher.endpoint, publisher.replay_endpoint, name="engine", topic="kv")
        with Subscriber(source, decode=False) as subscriber, zmq.Context() as context:
            wait_until(lambda: subscriber.receive_many(timeout=0.0) or publisher.stats().subscribers, "the subscription")
            reader = context.socket(zmq.DEALER)
            assert publisher.snapshot_endpoint is not None
            reader.connect(publisher.snapshot_endpoint)
            for _ in range(3):
                fill(publisher, engine, 5)
                reader.send_multipart(REQUEST)
                read_reply(reader)
            reader.close(linger=0)

            def is_exact() -> bool:
                for delivery in subscriber.receive_many(timeout=0.05):
                    index.apply(delivery)
                return subscriber.status().last_seq == 17 and subscriber.trust().name == "EXACT"

            wait_until(is_exact, "EXACT at 17")
        assert {block.hash for block in index.blocks(WORKER)} == engine.live
        assert publisher.stats().published == 15


def test_settings_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port must differ from those of other ranks, and the requirements are those of compaction."""
    with pytest.raises(ConfigError, match="the snapshot port of rank 3"):
        ZmqEventPublisher(3, "tcp://*:5557", snapshot_endpoint="tcp://*:5559")
    with pytest.raises(ConfigError, match="the snapshot port of rank 3"):
        ZmqEventPublisher(3, "tcp://*:5557", "tcp://*:5600", snapshot_endpoint="tcp://*:5602")
    with pytest.raises(ConfigError, match="compact=False"):
        ZmqEventPublisher(0, ANY, snapshot_endpoint=ANY, compact=False)
    with pytest.raises(ConfigError, match="snapshot_endpoint is 'here'"):
        KVEventsConfig(snapshot_endpoint="here")
    with serving() as publisher, pytest.raises(EndpointError, match="snapshot socket"):
        ZmqEventPublisher(0, ANY, ANY, snapshot_endpoint=publisher.snapshot_endpoint)
    monkeypatch.setitem(sys.modules, "kvevents_native._native", None)
    with pytest.raises(MissingDependencyError, match="snapshot_endpoint needs the package kvevents-native"):
        ZmqEventPublisher(0, ANY, snapshot_endpoint=ANY)


def test_the_factory_passes_the_snapshot_endpoint_on() -> None:
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=ANY, snapshot_endpoint=ANY)
    made: Any = EventPublisherFactory.create(config)
    assert made.snapshot_endpoint.startswith("tcp://127.0.0.1:")
    made.shutdown()
