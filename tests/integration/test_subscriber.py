"""Both subscribers with real sockets: a tape player has the faults of engines, and a proxy has the faults of networks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, assert_type

import msgspec
import pytest
import zmq
from msgspec.structs import replace

from kvevents.errors import ClosedError, ConfigError, EndpointError, UnknownSourceError
from kvevents.events import BlockRemoved, BlockStored, EventBatch, Heartbeat, KVEvent
from kvevents.index import ApplyResult, PrefixIndex
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import (
    Batch,
    BatchReport,
    Checkpoint,
    DegradedReason,
    Delivery,
    Gap,
    RawBatch,
    RawDelivery,
    Reset,
    Source,
    StreamLimits,
    Trust,
    inspect_events,
)
from kvevents.subscriber import AsyncSubscriber, SocketOptions, Subscriber, ZmqTransport
from kvevents.testing.fake_transport import FakeEngine, FakeTransport
from kvevents.testing.playlist import Faults
from kvevents.testing.proxy import FaultProxy
from kvevents.testing.tape import TapePlayer
from kvevents.zeromq.keys import Curve
from network_model import payload_of
from publisher_cases import wait_until
from resource_cases import leave_nothing_open

LIMITS = StreamLimits(
    replay_timeout=2.0, reply_idle_timeout=0.5, idle_before_probe=0.2, max_probe_interval=1.0, max_unanswered_requests=1_000_000
)
"""Late replies, as on a busy machine, are requested again. The stream never gives up because of them."""
IMPATIENT = replace(LIMITS, replay_timeout=0.2, reply_idle_timeout=0.1, max_unanswered_requests=2)
"""Limits for replay endpoints that never help: their streams give up soon."""
USUAL = SocketOptions()
DEADLINE = 60.0
"""Seconds after which a test fails. Every test is much faster."""


class SyncDriver:
    """`Subscriber`, with the interface of both drivers."""

    def __init__(self, *sources: Source, sockets: SocketOptions = USUAL, limits: StreamLimits = LIMITS, **options: Any) -> None:
        self.subscriber = Subscriber(sources, limits=limits, transport=ZmqTransport(options=sockets), **options)

    def receive(self, timeout: float) -> Delivery | None:
        return self.subscriber.receive(timeout)

    def receive_many(self, limit: int | None, timeout: float) -> list[Delivery]:
        return self.subscriber.receive_many(limit, timeout)

    def close(self) -> None:
        self.subscriber.close()


class AsyncDriver:
    """`AsyncSubscriber`, run by an event loop of its own."""

    def __init__(self, *sources: Source, sockets: SocketOptions = USUAL, limits: StreamLimits = LIMITS, **options: Any) -> None:
        self.runner: asyncio.Runner | None = asyncio.Runner()
        self.subscriber = AsyncSubscriber(sources, limits=limits, transport=ZmqTransport(options=sockets), **options)

    def receive(self, timeout: float) -> Delivery | None:
        assert self.runner is not None
        return self.runner.run(self.subscriber.receive(timeout))

    def receive_many(self, limit: int | None, timeout: float) -> list[Delivery]:
        assert self.runner is not None
        return self.runner.run(self.subscriber.receive_many(limit, timeout))

    def close(self) -> None:
        if self.runner is not None:
            self.runner.run(self.subscriber.close())
            self.runner.close()
            self.runner = None


class Harness:
    """A subscriber and all of its deliveries."""

    def __init__(self, driver: SyncDriver | AsyncDriver) -> None:
        self.driver = driver
        self.subscriber = driver.subscriber
        self.taken: list[Delivery] = []

    def until(self, reached: Callable[[], bool]) -> None:
        """Receive until a condition holds; fail after the deadline."""
        end = time.monotonic() + DEADLINE
        while not reached():
            assert time.monotonic() < end, f"not reached: {self.subscriber!r}, {self.subscriber.statuses()}, {self.taken[-3:]}"
            delivery = self.driver.receive(0.05)
            if delivery is not None:
                self.taken.append(delivery)

    def wait_for_subscriber_of(self, tape: TapePlayer) -> None:
        """Wait until an engine has a subscriber."""
        self.until(lambda: tape.wait_for_subscriber(0))

    def wait_for_trust(self, trust: Trust) -> None:
        self.until(lambda: self.subscriber.trust("e") == trust)

    def wait_until_confirmed(self, publish: Callable[[], object]) -> None:
        """Wait until the stream is EXACT. `publish` publishes a live batch, which must confirm what replay returned."""

        def is_exact() -> bool:
            status = self.subscriber.status("e")
            if status.trust == Trust.DEGRADED and status.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}:
                publish()
            return status.trust == Trust.EXACT

        self.until(is_exact)

    def batches(self, incarnation: int | None = None) -> list[tuple[int, bytes]]:
        return [
            (item.seq, item.payload)
            for item in self.taken
            if isinstance(item, Batch) and incarnation in (None, item.incarnation)
        ]

    def others(self) -> list[Delivery]:
        return [item for item in self.taken if not isinstance(item, Batch)]


@pytest.fixture(params=[SyncDriver, AsyncDriver], ids=["sync", "async"])
def harness(request: pytest.FixtureRequest) -> Iterator[Callable[..., Harness]]:
    """Open subscribers of both kinds, and close them after the test."""
    opened: list[SyncDriver | AsyncDriver] = []

    def open_harness(*sources: Source, **options: Any) -> Harness:
        opened.append(request.param(*sources, **options))
        return Harness(opened[-1])

    yield open_harness
    for driver in opened:
        driver.close()


def make_frames(count: int, engine_incarnation: int = 0) -> list[tuple[bytes, int, bytes]]:
    return [(b"kv", seq, payload_of(engine_incarnation, seq, clear=False)) for seq in range(count)]


def make_source(tape: TapePlayer, **options: Any) -> Source:
    return Source(tape.endpoint, tape.replay_endpoint, topic="kv", name="e", **options)


def test_live_batches_arrive_once_and_in_order(harness: Callable[..., Harness]) -> None:
    """The engine has no faults, and the subscriber is connected from the start."""
    with TapePlayer(make_frames(500)) as tape:
        consumer = harness(make_source(tape))
        consumer.wait_for_subscriber_of(tape)
        tape.play()
        consumer.until(lambda: len(consumer.taken) >= 500)
        assert consumer.batches() == tape.batches()
        consumer.wait_for_trust(Trust.EXACT)


def test_a_late_subscriber_gets_the_whole_buffer_through_a_lossy_replay(harness: Callable[..., Harness]) -> None:
    """The engines' ROUTER drops most of each reply, with and without the end marker. The subscriber still gets every batch."""
    with TapePlayer(make_frames(2_000), faults=Faults(replay_send_limit=450)) as tape:
        tape.play()
        consumer = harness(make_source(tape))
        consumer.until(lambda: len(consumer.taken) >= 1_000)
        tape.faults = Faults(replay_send_limit=450, lose_end_marker=True)
        consumer.until(lambda: len(consumer.taken) >= 2_000)
        assert consumer.batches() == tape.batches()
        tape.faults = Faults()
        consumer.wait_until_confirmed(lambda: tape.play(1))
        assert consumer.others() == []


def test_lost_batches_are_recovered_from_an_idle_engine(harness: Callable[..., Harness]) -> None:
    """A tenth of the live and of the replayed batches is lost, including the last ones, which the idle probe finds."""
    with TapePlayer(make_frames(301), faults=Faults(drop=0.1, replay_holes=0.1, seed=5)) as tape:
        consumer = harness(make_source(tape))
        consumer.wait_for_subscriber_of(tape)
        tape.play(299)
        tape.faults = Faults(drop={299})
        tape.play(1)
        consumer.until(lambda: len(consumer.taken) >= 300)
        assert consumer.batches() == tape.batches()
        tape.faults = Faults()
        tape.play()
        consumer.until(lambda: len(consumer.taken) >= 301)
        consumer.wait_for_trust(Trust.EXACT)


@pytest.mark.parametrize("unseen", [None, 3, 80])
def test_a_restart_is_recognised(harness: Callable[..., Harness], unseen: int | None) -> None:
    """The new incarnation starts from 0, has published a few batches, or has passed the old number before the reconnect."""
    with TapePlayer(make_frames(50)) as tape:
        consumer = harness(make_source(tape))
        consumer.wait_for_subscriber_of(tape)
        tape.play()
        consumer.until(lambda: len(consumer.taken) == 50)
        tape.restart(make_frames(100, engine_incarnation=1), unseen_until=unseen)
        consumer.until(lambda: unseen is None or len(consumer.batches(1)) > unseen)
        consumer.until(lambda: tape.wait_for_subscriber(0))
        tape.play()
        consumer.until(lambda: len(consumer.batches(1)) == len(tape.batches(1)))
        assert consumer.batches(0) == tape.batches(0)
        assert consumer.batches(1) == tape.batches(1)
        assert [type(item) for item in consumer.others()] == [Reset]
        consumer.wait_for_trust(Trust.EXACT)


def test_truncated_history_and_skipped_numbers_are_gaps(harness: Callable[..., Harness]) -> None:
    """Batches that no replay buffer holds are reported as gaps, all others are delivered, and trust is DEGRADED."""
    with TapePlayer(make_frames(100), faults=Faults(buffer_steps=30, skipped={90})) as tape:
        tape.play()
        consumer = harness(make_source(tape))
        consumer.until(lambda: len(consumer.taken) >= 32)
        assert [(gap.first, gap.last) for gap in consumer.others() if isinstance(gap, Gap)] == [(0, 68), (90, 90)]
        assert [seq for seq, _ in consumer.batches()] == [*range(69, 90), *range(91, 100)]
        consumer.wait_for_trust(Trust.DEGRADED)


@pytest.mark.parametrize(
    "faults", [Faults(replay_silent=True), Faults(replay_endless=True, replay_foreign=make_frames(1, engine_incarnation=7))]
)
def test_a_useless_replay_endpoint_delays_but_does_not_stop_the_stream(harness: Callable[..., Harness], faults: Faults) -> None:
    """The endpoint does not answer, or its replies never end.

    Live batches continue after a bounded wait, and trust gives the reason.
    """
    with TapePlayer(make_frames(60), faults=faults) as tape:
        consumer = harness(make_source(tape), limits=IMPATIENT)
        consumer.wait_for_subscriber_of(tape)
        tape.faults = Faults(replay_silent=faults.replay_silent, replay_endless=faults.replay_endless, drop={5})
        if faults.replay_foreign:
            tape.faults = faults
        tape.play(30)
        consumer.until(lambda: any(seq == 29 for seq, _ in consumer.batches()))
        consumer.wait_for_trust(Trust.DEGRADED)


def test_a_replay_endpoint_of_another_stream_does_no_lasting_harm(harness: Callable[..., Harness]) -> None:
    """Another stream's batches are undone by a reset.

    Afterwards only the live stream is delivered, and trust gives the reason.
    """
    with TapePlayer(make_frames(60), faults=Faults(replay_foreign=make_frames(40, engine_incarnation=9))) as tape:
        consumer = harness(make_source(tape))
        consumer.wait_for_subscriber_of(tape)
        published = 0
        while "another stream" not in consumer.subscriber.trust("e").reason:
            tape.play(1)
            published += 1
            assert published < 50
            consumer.until(lambda: any(isinstance(item, Batch) for item in consumer.taken))
            for _ in range(10):
                delivery = consumer.driver.receive(0.05)
                consumer.taken.extend([delivery] if delivery else [])
        tape.play(5)
        consumer.until(lambda: (published + 4, tape.batches()[-1][1]) in consumer.batches())
        assert any(isinstance(item, Reset) for item in consumer.taken)


def test_without_replay_gaps_and_restarts_are_reported(harness: Callable[..., Harness]) -> None:
    """Gaps are delivered, a restart is a reset, and the stream is never EXACT."""
    with TapePlayer(make_frames(20), replay_endpoint=None, faults=Faults(drop={3, 4})) as tape:
        consumer = harness(make_source(tape))
        consumer.wait_for_subscriber_of(tape)
        tape.play()
        consumer.until(lambda: len(consumer.taken) == 19)
        assert [(gap.first, gap.last) for gap in consumer.others() if isinstance(gap, Gap)] == [(3, 4)]
        assert consumer.subscriber.trust("e") == Trust.DEGRADED
        tape.faults = Faults()
        tape.restart()
        consumer.until(lambda: tape.wait_for_subscriber(0))
        tape.play()
        consumer.until(lambda: len(consumer.batches(1)) == 20)


def test_malformed_frames_are_counted_and_lose_no_batch(harness: Callable[..., Harness]) -> None:
    """Messages of 1, 2, 4 and 9 frames, numbers of 0, 4 and 16 bytes, 2**63 and 2**64-1, between good batches."""
    numbers = [b"", b"\0" * 4, b"\0" * 16, (2**63).to_bytes(8, "big"), b"\xff" * 8]
    bad = [[b"kv"] * count for count in (1, 2, 4, 9)] + [[b"kv", number, b"x"] for number in numbers]
    with TapePlayer(make_frames(len(bad))) as tape:
        consumer = harness(make_source(tape))
        consumer.wait_for_subscriber_of(tape)
        for message in bad:
            tape.send_raw(message)
            tape.play(1)
        consumer.until(lambda: len(consumer.taken) == len(bad))
        assert consumer.batches() == tape.batches()
        assert sum(consumer.subscriber.status("e").counters.malformed.values()) == len(bad)


def test_many_batches_wait_in_bounded_buffers_and_all_arrive(harness: Callable[..., Harness]) -> None:
    """A subscriber that does not receive while more is published than its socket holds gets every batch afterwards."""
    sockets = SocketOptions(receive_hwm=50)
    with TapePlayer(make_frames(5_001), hwm=50) as tape:
        consumer = harness(make_source(tape), sockets=sockets)
        consumer.wait_for_subscriber_of(tape)
        tape.play(5_000)
        consumer.until(lambda: len(consumer.taken) >= 5_000)
        assert consumer.batches() == tape.batches()
        tape.play()
        consumer.until(lambda: len(consumer.taken) >= 5_001)
        consumer.wait_for_trust(Trust.EXACT)


def test_a_cut_connection_loses_no_batch(harness: Callable[..., Harness]) -> None:
    """Batches published while the network is down are replayed. The publisher is verified to be the same, without a reset."""
    with TapePlayer(make_frames(100)) as tape, FaultProxy(tape.endpoint) as proxy:
        consumer = harness(Source(proxy.endpoint, tape.replay_endpoint, topic="kv", name="e"))
        consumer.wait_for_subscriber_of(tape)
        tape.play(30)
        consumer.until(lambda: len(consumer.taken) == 30)
        proxy.cut(refuse=True)
        consumer.wait_for_trust(Trust.STALE)
        tape.play(40)
        proxy.heal()
        consumer.until(lambda: tape.wait_for_subscriber(0))
        tape.play(30)
        consumer.until(lambda: len(consumer.taken) >= 100)
        assert consumer.batches() == tape.batches()
        assert consumer.others() == []
        consumer.wait_for_trust(Trust.EXACT)


def test_a_half_open_connection_is_detected_by_heartbeats(harness: Callable[..., Harness]) -> None:
    """A network that drops all packets without closing connections makes the stream STALE. The stream recovers afterwards."""
    sockets = SocketOptions(heartbeat_ms=100, heartbeat_timeout_ms=300)
    with TapePlayer(make_frames(20)) as tape, FaultProxy(tape.endpoint) as proxy:
        consumer = harness(Source(proxy.endpoint, tape.replay_endpoint, topic="kv", name="e"), sockets=sockets)
        consumer.wait_for_subscriber_of(tape)
        tape.play(10)
        consumer.until(lambda: len(consumer.taken) == 10)
        proxy.stall()
        consumer.wait_for_trust(Trust.STALE)
        tape.play(10)
        proxy.heal()
        consumer.until(lambda: len(consumer.taken) >= 20)
        assert consumer.batches() == tape.batches()
        consumer.wait_until_confirmed(lambda: tape.play(1))


def test_five_hundred_sources_are_followed_at_once(harness: Callable[..., Harness]) -> None:
    """The number of replays is limited, every source catches up, and a live batch of each source arrives."""
    with TapePlayer(make_frames(3)) as tape:
        tape.play(2)
        sources = [Source(tape.endpoint, tape.replay_endpoint, topic="kv", name=f"e{number}") for number in range(500)]
        consumer = harness(*sources, max_concurrent_replays=16)
        consumer.until(lambda: len(consumer.taken) == 1_000)
        assert tape.wait_for_subscriber(DEADLINE, 500)
        tape.play(1)
        consumer.until(lambda: len(consumer.taken) == 1_500)
        consumer.until(lambda: all(status.trust == Trust.EXACT for status in consumer.subscriber.statuses()))


def test_ranks_of_one_engine_are_separate_streams(harness: Callable[..., Harness]) -> None:
    """Two ranks share a source name and nothing else."""
    with TapePlayer(make_frames(5)) as zero, TapePlayer(make_frames(7, engine_incarnation=1)) as one:
        consumer = harness(make_source(zero, rank=0), make_source(one, rank=1))
        consumer.wait_for_subscriber_of(zero)
        consumer.wait_for_subscriber_of(one)
        zero.play()
        one.play()
        consumer.until(lambda: len(consumer.taken) == 12)
        by_rank = {
            rank: [item.seq for item in consumer.taken if item.rank == rank and isinstance(item, Batch)] for rank in (0, 1)
        }
        assert by_rank == {0: list(range(5)), 1: list(range(7))}


def test_an_endpoint_where_nothing_listens_is_connecting(harness: Callable[..., Harness]) -> None:
    """`receive` returns after its timeout, and the reason of trust is that there is no connection."""
    consumer = harness(Source("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", name="e"))
    assert consumer.driver.receive(0.2) is None
    assert consumer.subscriber.trust("e") == Trust.CONNECTING


def test_an_engine_that_starts_later_is_followed(harness: Callable[..., Harness], tmp_path: Path) -> None:
    """The subscriber starts first, over ipc. Every batch from number 0 on arrives."""
    endpoint, replay_endpoint = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    consumer = harness(Source(endpoint, replay_endpoint, name="e"))
    assert consumer.driver.receive(0.05) is None
    publisher = ZmqEventPublisher(0, endpoint, replay_endpoint)
    publisher.publish(EventBatch(1.0, [BlockRemoved([1])]))
    consumer.until(lambda: len(consumer.taken) == 1)
    consumer.wait_until_confirmed(lambda: publisher.publish(EventBatch(2.0, [])))
    publisher.shutdown()


def test_in_process_endpoints_work(harness: Callable[..., Harness]) -> None:
    """inproc has no connection events. The stream is followed nevertheless."""
    publisher = ZmqEventPublisher(0, "inproc://subscriber-test", "inproc://subscriber-test-replay")
    consumer = harness(Source("inproc://subscriber-test", "inproc://subscriber-test-replay", name="e"))
    publisher.publish(EventBatch(1.0, [BlockRemoved([1])]))
    consumer.until(lambda: len(consumer.taken) == 1)
    publisher.shutdown()


def test_a_subscriber_binds_if_the_engine_connects(harness: Callable[..., Harness], tmp_path: Path) -> None:
    """An engine with a concrete address connects to it, so the subscriber has to bind."""
    endpoint = f"ipc://{tmp_path}/pub"
    consumer = harness(Source(endpoint, name="e", bind=True))
    publisher = ZmqEventPublisher(0, endpoint, bind=False)
    consumer.until(lambda: publisher.stats().subscribers == 1)
    publisher.publish(EventBatch(1.0, [BlockRemoved([1])]))
    consumer.until(lambda: len(consumer.taken) == 1)
    publisher.shutdown()


def test_curve_keys_are_required_on_both_sockets(harness: Callable[..., Harness]) -> None:
    """With the server's key, live and replay traffic is encrypted. Without keys, no batch is delivered."""
    server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
    client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
    server = Curve(public_key=server_public, secret_key=server_secret)
    client = Curve(public_key=client_public, secret_key=client_secret, server_key=server_public)
    publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", curve=server)
    publisher.publish(EventBatch(1.0, [BlockRemoved([1])]))
    friend = Source(publisher.endpoint, publisher.replay_endpoint, name="e", curve=client)
    stranger = Source(publisher.endpoint, publisher.replay_endpoint, name="stranger")
    consumer = harness(friend, stranger)
    consumer.until(lambda: len(consumer.taken) == 1)
    consumer.wait_until_confirmed(lambda: publisher.publish(EventBatch(2.0, [])))
    assert consumer.subscriber.trust("stranger") != Trust.EXACT
    assert {item.source for item in consumer.taken} == {"e"}
    publisher.shutdown()


def test_sources_are_added_and_removed(harness: Callable[..., Harness]) -> None:
    """A removed source is unknown, and a name and rank can be added only once."""
    with TapePlayer(make_frames(2)) as tape:
        consumer = harness(make_source(tape))
        with pytest.raises(ConfigError, match="given twice"):
            consumer.subscriber.add(make_source(tape))
        consumer.subscriber.remove("e")
        with pytest.raises(UnknownSourceError, match="known: none"):
            consumer.subscriber.trust("e")
        consumer.subscriber.add(make_source(tape))
        consumer.wait_for_subscriber_of(tape)
        tape.play()
        consumer.until(lambda: len(consumer.taken) == 2)


def test_invalid_endpoints_raise_when_they_are_added(harness: Callable[..., Harness]) -> None:
    """An endpoint that can never work is an error at once, with a message that gives the reason."""
    for endpoint in ("tcp://", "tcp://host", "tcp://127.0.0.1:5557:5558", "http://host:1", "gopher://host:1"):
        with pytest.raises(ConfigError, match="invalid endpoint"):
            Source(endpoint)
    with pytest.raises(EndpointError, match="cannot connect to"):
        harness(Source("ipc:///" + 200 * "x"))


def test_the_repr_counts_streams_by_trust_and_ready_deliveries(harness: Callable[..., Harness]) -> None:
    """The repr has the number of streams by trust and the number of ready deliveries."""
    consumer = harness(Source("tcp://127.0.0.1:9"), Source("tcp://127.0.0.1:9", name="b"))
    assert repr(consumer.subscriber).endswith("2 streams, 2 CONNECTING, 0 ready>")
    consumer.driver.close()
    assert repr(consumer.subscriber).endswith("ubscriber closed>")


def test_receive_many_returns_ready_deliveries_up_to_its_limit(harness: Callable[..., Harness]) -> None:
    """`receive_many` returns all ready deliveries, or at most the requested number and the rest later. It returns [] after the
    timeout."""
    with TapePlayer(make_frames(100)) as tape:
        consumer = harness(make_source(tape))
        assert consumer.driver.receive_many(None, 0.05) == []
        consumer.wait_for_subscriber_of(tape)
        tape.play()
        while len(consumer.taken) < 100:
            received = consumer.driver.receive_many(3, DEADLINE)
            assert 1 <= len(received) <= 3
            consumer.taken += received + consumer.driver.receive_many(None, 0)
        assert consumer.batches() == tape.batches()
        with pytest.raises(ConfigError, match="invalid limit 0"):
            consumer.driver.receive_many(0, 0)


def test_raw_batches_arrive_as_they_were_sent(harness: Callable[..., Harness]) -> None:
    """Replayed and live batches, of which some are dropped, arrive once and in order, and none is decoded."""
    with TapePlayer(make_frames(1_000)) as tape:
        tape.play(300)
        consumer = harness(make_source(tape), decode=False)
        consumer.until(lambda: len(consumer.taken) == 300)
        tape.faults = Faults(drop=0.02, seed=3)
        consumer.wait_for_subscriber_of(tape)
        tape.play(699)
        tape.faults = Faults()
        tape.play()
        consumer.until(lambda: len(consumer.taken) == 1_000)
        raw: list[Any] = consumer.taken
        assert all(isinstance(batch, RawBatch) for batch in raw)
        assert [(batch.seq, batch.payload) for batch in raw] == tape.batches()
        assert {batch.topic for batch in raw} == {b"kv"}
        assert raw[-1].decode().events == [BlockStored([999], None, [999], 1)]
        consumer.wait_for_trust(Trust.EXACT)


@pytest.mark.parametrize("decode", [True, False])
def test_the_consumer_of_raw_batches_reports_rejected_events(harness: Callable[..., Harness], decode: bool) -> None:
    """One loop works for both modes, because a report about a decoded batch does not count its events again."""
    unreadable = msgspec.msgpack.encode([3.0, [["Unknown", 1]]])
    with TapePlayer([*make_frames(3), (b"kv", 3, unreadable), (b"kv", 4, payload_of(0, 4, clear=True))]) as tape:
        consumer = harness(make_source(tape), decode=decode)
        taken: list[Any] = consumer.taken
        consumer.wait_for_subscriber_of(tape)
        tape.play(4)
        consumer.until(lambda: len(taken) == 4)
        consumer.wait_for_trust(Trust.DEGRADED if decode else Trust.EXACT)
        consumer.subscriber.report(taken[3], BatchReport((taken[3] if decode else taken[3].decode()).rejected))
        consumer.until(lambda: consumer.subscriber.status("e").degraded_reasons == {DegradedReason.REJECTED})
        assert consumer.subscriber.status("e").counters.rejected == {"unknown-tag": 1}
        tape.play()
        consumer.until(lambda: len(taken) == 5)
        consumer.subscriber.report(taken[4], BatchReport(cleared=True))
        consumer.wait_for_trust(Trust.EXACT)
        consumer.subscriber.remove("e")
        consumer.subscriber.report(taken[4], BatchReport(cleared=True))


class RecordingSink:
    """A sink that records its deliveries and can fail."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.given: list[Batch | RawBatch | Reset | Gap] = []
        self.fails = False

    def apply_many(self, deliveries: Sequence[Batch | RawBatch | Reset | Gap]) -> list[ApplyResult]:
        if self.fails:
            raise RuntimeError("injected")
        self.given += deliveries
        return self.index.apply_many(deliveries)


@pytest.mark.parametrize("decode", [True, False])
def test_a_sink_applies_each_delivery_before_it_is_returned(harness: Callable[..., Harness], decode: bool) -> None:
    """This holds for `receive` and `receive_many`. The report of the sink is passed to the stream automatically."""
    unreadable = msgspec.msgpack.encode([3.0, [["Unknown", 1]]])
    sink = RecordingSink(PrefixIndex())
    with TapePlayer([*make_frames(3), (b"kv", 3, unreadable), (b"kv", 4, payload_of(0, 4, clear=True))]) as tape:
        consumer = harness(make_source(tape), decode=decode, sink=sink)
        consumer.wait_for_subscriber_of(tape)
        tape.play(4)
        for count in (1, 2):
            consumer.until(lambda: len(consumer.taken) >= count)  # noqa: B023 - called before the next one
            assert sink.given == consumer.taken
        while len(consumer.taken) < 4:
            consumer.taken += consumer.driver.receive_many(None, 0.05)
            assert sink.given == consumer.taken
        assert DegradedReason.REJECTED in consumer.subscriber.status("e").degraded_reasons
        assert sink.index.worker("e").blocks == 3
        tape.play()
        consumer.until(lambda: len(consumer.taken) == 5)
        consumer.wait_for_trust(Trust.EXACT)
        assert sink.index.worker("e").blocks == 0


def test_an_exception_of_a_sink_is_raised(harness: Callable[..., Harness]) -> None:
    """The next calls deliver everything again, after a reset."""
    sink = RecordingSink(PrefixIndex())
    with TapePlayer(make_frames(2)) as tape:
        consumer = harness(make_source(tape), sink=sink)
        consumer.wait_for_subscriber_of(tape)
        tape.play(1)
        sink.fails = True
        with pytest.raises(RuntimeError, match="injected"):
            consumer.until(lambda: bool(consumer.taken))
        sink.fails = False
        tape.play(1)
        consumer.until(lambda: len(consumer.taken) == 3)
        assert sink.given == consumer.taken
        assert [getattr(each, "seq", None) for each in consumer.taken] == [None, 0, 1]


async def test_trust_ages_while_the_event_loop_is_blocked() -> None:
    """A task waits in `receive`, but it cannot run. Other threads, which route by `trust()`, see that."""
    with TapePlayer(make_frames(2)) as tape:
        transport = ZmqTransport(options=SocketOptions(heartbeat_timeout_ms=400))
        limits = replace(LIMITS, max_unread=0.3)
        async with (
            asyncio.timeout(DEADLINE),
            AsyncSubscriber(make_source(tape), limits=limits, transport=transport) as subscriber,
        ):
            while not tape.wait_for_subscriber(0):
                await subscriber.receive(0.01)
            tape.play()
            await subscriber.wait_for(Trust.EXACT)
            task = asyncio.create_task(subscriber.receive())
            await asyncio.sleep(0)
            await asyncio.to_thread(wait_until, lambda: subscriber.trust() >= Trust.DEGRADED, "the task to read")
            # This blocks the event loop.
            wait_until(lambda: subscriber.trust() == Trust.STALE, "the trust to age")
            assert "has not called receive()" in subscriber.trust().reason
            await asyncio.to_thread(wait_until, lambda: subscriber.trust() != Trust.STALE, "the task to read again")
            task.cancel()


@pytest.mark.parametrize("decode", [True, False])
def test_a_message_that_only_begins_like_the_expected_batch_is_malformed(harness: Callable[..., Harness], decode: bool) -> None:
    """The message has more or fewer frames than a batch. It is counted, and the batch itself follows."""
    with TapePlayer(make_frames(8)) as tape:
        consumer = harness(make_source(tape), decode=decode)
        consumer.wait_for_subscriber_of(tape)
        tape.play(2)
        consumer.until(lambda: len(consumer.taken) == 2)
        for seq, behind in ((2, [b"x", b""]), (3, []), (4, [b"x", b"kv", b"x"])):
            tape.send_raw([b"kv", seq.to_bytes(8, "big"), *behind])
            tape.play(1)
        tape.play()
        consumer.until(lambda: len(consumer.taken) == 8)
        taken: list[Any] = consumer.taken
        assert [(batch.seq, batch.payload) for batch in taken] == tape.batches()
        assert consumer.subscriber.status("e").counters.malformed == {"not 3 frames": 3}
        consumer.wait_for_trust(Trust.EXACT)


# --- subscribers that restart ------------------------------------------------------------------------------------------------


def store_checkpoint(consumer: Harness) -> Checkpoint:
    """Return a subscriber's checkpoint as it is stored at the end of its process."""
    consumer.driver.close()
    (checkpoint,) = consumer.subscriber.checkpoints()
    assert checkpoint == consumer.subscriber.checkpoint()
    return Checkpoint.decode(checkpoint.encode())


def test_a_restarted_subscriber_resumes_with_the_same_publisher(harness: Callable[..., Harness], tmp_path: Path) -> None:
    """Batches published meanwhile follow, no batch is delivered twice, and the stream is EXACT only after verification."""
    endpoints = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    publisher = ZmqEventPublisher(0, *endpoints)
    before = harness(Source(*endpoints, name="e"))
    for number in range(5):
        publisher.publish(EventBatch(float(number), [BlockRemoved([number])]))
    before.until(lambda: len(before.taken) == 5)
    checkpoint = store_checkpoint(before)
    for number in range(5, 9):
        publisher.publish(EventBatch(float(number), [BlockRemoved([number])]))
    wait_until(lambda: publisher.stats().published == 9, "all to be sent before the next subscriber comes")
    after = harness()
    after.subscriber.add(Source(*endpoints, name="e"), resume=checkpoint)
    assert after.subscriber.trust("e") == Trust.STALE
    after.until(lambda: len(after.taken) == 4)
    assert after.subscriber.trust("e") != Trust.EXACT
    publisher.publish(EventBatch(9.0, [BlockRemoved([9])]))
    after.until(lambda: len(after.taken) == 5)
    after.wait_until_confirmed(lambda: publisher.publish(EventBatch(10.0, [])))
    assert after.others() == []
    assert [seq for seq, _ in after.batches(0)] == list(range(5, 5 + len(after.taken)))
    publisher.shutdown()


@pytest.mark.parametrize("published", [0, 1, 9])
def test_a_restarted_subscriber_detects_a_restarted_publisher(
    harness: Callable[..., Harness], tmp_path: Path, published: int
) -> None:
    """The new incarnation is idle, young, or past the old number. A Reset is delivered, then its batches from 0."""
    endpoints = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    first = ZmqEventPublisher(0, *endpoints)
    before = harness(Source(*endpoints, name="e"))
    for number in range(5):
        first.publish(EventBatch(float(number), [BlockRemoved([number])]))
    before.until(lambda: len(before.taken) == 5)
    before.until(lambda: before.subscriber.checkpoint().replay_seen)
    checkpoint = store_checkpoint(before)
    first.shutdown()
    second = ZmqEventPublisher(0, *endpoints)
    for number in range(published):
        second.publish(EventBatch(100.0 + number, [BlockRemoved([number])]))
    after = harness()
    after.subscriber.add(Source(*endpoints, name="e"), resume=checkpoint)
    after.until(lambda: len(after.taken) == 1 + published)
    assert isinstance(after.taken[0], Reset)
    assert [seq for seq, _ in after.batches(1)] == list(range(published))
    after.wait_until_confirmed(lambda: second.publish(EventBatch(200.0, [])))
    assert after.subscriber.checkpoint().incarnation == 1
    second.shutdown()


def test_a_restarted_subscriber_waits_for_an_absent_publisher(harness: Callable[..., Harness]) -> None:
    """The stream is not EXACT, and a checkpoint taken meanwhile equals the one that was resumed."""
    checkpoint = Checkpoint("e", 0, 2, 7, degraded_reasons={"LOST": 7})
    consumer = harness()
    consumer.subscriber.add(Source("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", name="e"), resume=checkpoint)
    assert consumer.driver.receive(0.1) is None
    assert consumer.subscriber.trust("e") == Trust.STALE
    assert consumer.subscriber.status("e").last_seq == 7
    assert consumer.subscriber.checkpoints() == [checkpoint]
    with pytest.raises(ConfigError, match="checkpoint of e rank 0"):
        consumer.subscriber.add(Source("tcp://127.0.0.1:9", name="other"), resume=checkpoint)
    assert [status.source for status in consumer.subscriber.statuses()] == ["e"]


def make_engine_with_history(transport: FakeTransport) -> FakeEngine:
    """Return an engine with an event that cannot be decoded, a gap, a clear, and a batch that was not sent live."""
    engine = transport.engine("tcp://engine:5557", "tcp://engine:5558")
    for number in range(4):
        engine.publish(BlockRemoved([number]))
    engine.publish_payload(msgspec.msgpack.encode([4.0, [["Unknown", 1]]]))
    engine.skip_number()
    engine.publish(BlockRemoved([6]))
    engine.publish_payload(payload_of(0, 7, clear=True))
    engine.publish(BlockRemoved([8]), lost=True)
    return engine


def summarize(deliveries: list[Delivery]) -> list[object]:
    """Return the contents of deliveries, without whether they were replayed."""
    return [(item.incarnation, item.seq, item.payload) if isinstance(item, Batch) else item for item in deliveries]


def follow(transport: FakeTransport, engine: FakeEngine, resume: Checkpoint) -> tuple[list[Delivery], Subscriber]:
    """Resume from a checkpoint and return everything that the subscriber delivers, and the subscriber."""
    subscriber = Subscriber(transport=transport, clock=transport.clock, limits=LIMITS)
    subscriber.add(Source(engine.endpoint, engine.replay_endpoint, name="e"), resume=resume)
    taken = []
    while (delivery := subscriber.receive(timeout=5)) is not None:
        taken.append(delivery)
    return taken, subscriber


def test_a_checkpoint_is_never_ahead_of_returned_deliveries() -> None:
    """Deliveries are taken one at a time while others are ready. Each checkpoint leads to exactly the later ones."""
    transport = FakeTransport()
    engine = make_engine_with_history(transport)
    source = Source(engine.endpoint, engine.replay_endpoint, name="e")
    taken: list[Delivery] = []
    checkpoints: list[Checkpoint] = []
    waited = 0
    with Subscriber(source, transport=transport, clock=transport.clock, limits=LIMITS) as subscriber:
        while (delivery := subscriber.receive(timeout=5)) is not None:
            taken.append(delivery)
            checkpoints.append(subscriber.checkpoint("e"))
            waited += "0 ready" not in repr(subscriber)
        assert subscriber.status("e").degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    assert waited > 3
    assert len(taken) == 9
    for position, checkpoint in enumerate(checkpoints, 1):
        again, subscriber = follow(transport, engine, checkpoint)
        assert summarize(again) == summarize(taken[position:])
        with subscriber:
            engine.publish()
            live = subscriber.receive(timeout=5)
            assert live is not None
            taken.append(live)
            assert subscriber.receive(timeout=5) is None
            assert subscriber.trust("e") == Trust.EXACT
            assert subscriber.checkpoint("e").last_seq == 8 + position


def test_a_checkpoint_between_two_incarnations_is_of_the_returned_one() -> None:
    """A Reset that is ready but not taken is delivered again after resuming.

    A Reset that was taken is delivered again only if no batch of its incarnation was taken.
    """
    transport = FakeTransport()
    engine = make_engine_with_history(transport)
    source = Source(engine.endpoint, engine.replay_endpoint, name="e")
    with Subscriber(source, transport=transport, clock=transport.clock, limits=LIMITS) as subscriber:
        taken = [subscriber.receive(timeout=5) for _ in range(9)]
        engine.restart([BlockRemoved([100 + number]) for number in range(20)])
        reset = subscriber.receive(timeout=5)
        assert isinstance(reset, Reset)
        positions = [subscriber.checkpoint("e")]
        for _ in range(20):
            taken.append(subscriber.receive(timeout=5))
            positions.append(subscriber.checkpoint("e"))
    assert [(each.incarnation, each.last_seq) for each in positions] == [(1, seq) for seq in range(-1, 20)]
    assert not positions[0].fingerprints
    assert all(each.fingerprints and not each.degraded_reasons for each in positions[1:])
    for position, checkpoint in enumerate(positions[1:], 10):
        again, _ = follow(transport, engine, checkpoint)
        assert summarize(again) == summarize([item for item in taken[position:] if item is not None])
    again, _ = follow(transport, engine, positions[0])
    assert isinstance(again[0], Reset)
    assert len(again) == 21


def test_a_checkpoint_includes_reports_while_deliveries_are_ready() -> None:
    """A consumer of raw batches reports an event that it cannot decode while later deliveries are ready."""
    transport = FakeTransport()
    engine = make_engine_with_history(transport)
    source = Source(engine.endpoint, engine.replay_endpoint, name="e")
    with Subscriber(source, decode=False, transport=transport, clock=transport.clock, limits=LIMITS) as subscriber:
        raw = [subscriber.receive(timeout=5) for _ in range(5)][-1]
        assert isinstance(raw, RawBatch)
        subscriber.report(raw, BatchReport(raw.decode().rejected))
        assert subscriber.checkpoint("e").last_seq == 4
        assert subscriber.checkpoint("e").degraded_reasons == {"REJECTED": 4}


def publish_heartbeat(engine: FakeEngine, digest: str = "0" * 32) -> None:
    """Publish a heartbeat of kvevents with this digest."""
    engine.publish(BlockRemoved([], heartbeat=Heartbeat(digest, 5.0)))


@pytest.mark.parametrize("decode", [True, False])
def test_a_diverged_index_is_rebuilt(decode: bool) -> None:
    """The next heartbeat shows that the index differs.

    A reset clears it, everything is replayed, and then the digests agree.
    """
    transport = FakeTransport()
    engine = transport.engine("tcp://relay:5557", "tcp://relay:5558")
    source = Source(engine.endpoint, engine.replay_endpoint, name="relay")
    reference, index = PrefixIndex(), PrefixIndex()
    with Subscriber(source, decode=decode, transport=transport, clock=transport.clock) as subscriber:

        def follow() -> list[bool | None]:
            """Return whether the digests of received heartbeats matched."""
            agreed: list[bool | None] = []
            for _ in range(10):
                for delivery in subscriber.receive_many(timeout=0.1):
                    report = index.apply(delivery).report
                    subscriber.report(delivery, report)
                    if report is not None:
                        agreed.append(report.digest_matches)
            return agreed

        for number in range(3):
            events: list[KVEvent] = [BlockStored([number], None, [number], 1)]
            engine.publish(*events)
            reference.apply(Batch("relay", 0, 0, number, 0.0, events, False))
        publish_heartbeat(engine, reference.digest("relay"))
        assert follow() == [True]
        index.apply(Batch("relay", 0, 0, 4, 0.0, [BlockRemoved([1])], False))
        engine.publish(BlockRemoved([99]))
        publish_heartbeat(engine, reference.digest("relay"))
        assert follow() == [False, True, True]
        publish_heartbeat(engine, reference.digest("relay"))
        assert follow() == [True]
        assert subscriber.trust() == Trust.EXACT
        assert subscriber.status().counters.digests_mismatched == 1
        assert index.digest("relay") == reference.digest("relay")


@pytest.mark.parametrize("decode", [True, False])
def test_missing_heartbeats_are_detected_without_other_timers(decode: bool) -> None:
    """The heartbeat interval is known only after the batch was delivered, because the consumer decodes it."""
    transport = FakeTransport()
    engine = transport.engine("tcp://relay:5557")
    with Subscriber(Source(engine.endpoint, name="e"), decode=decode, transport=transport, clock=transport.clock) as subscriber:
        publish_heartbeat(engine)
        delivery = subscriber.receive(timeout=1)
        assert isinstance(delivery, Batch | RawBatch)
        batch = delivery.decode() if isinstance(delivery, RawBatch) else delivery
        subscriber.report(delivery, inspect_events(batch.events))
        assert subscriber.receive(timeout=14) is None
        assert subscriber.trust() == Trust.DEGRADED
        assert subscriber.receive(timeout=2) is None
        assert subscriber.trust() == Trust.STALE


def test_an_empty_report_changes_nothing() -> None:
    transport = FakeTransport()
    engine = make_engine_with_history(transport)
    source = Source(engine.endpoint, engine.replay_endpoint, name="e")
    with Subscriber(source, decode=False, transport=transport, clock=transport.clock) as subscriber:
        raw = subscriber.receive(timeout=5)
        assert isinstance(raw, RawBatch)
        subscriber.report(raw, None)
        assert subscriber.status().counters.rejected == {}


def test_deliveries_of_a_removed_source_do_not_count_for_its_successor() -> None:
    """Deliveries of the removed source can still be ready when a source of the same name is added."""
    transport = FakeTransport()
    engine = make_engine_with_history(transport)
    source = Source(engine.endpoint, engine.replay_endpoint, name="e")
    with Subscriber(source, transport=transport, clock=transport.clock, limits=LIMITS) as subscriber:
        subscriber.receive(timeout=5)
        checkpoint = subscriber.checkpoint("e")
        subscriber.remove("e")
        subscriber.add(source, resume=checkpoint)
        assert "0 ready" not in repr(subscriber)
        assert subscriber.checkpoint("e") == checkpoint


def test_type_checkers_infer_the_delivered_types() -> None:
    """`Subscriber` without arguments delivers decoded batches. `decode=False` changes the type."""
    with (
        Subscriber("tcp://127.0.0.1:9") as decoding,
        Subscriber("tcp://127.0.0.1:9", decode=False, limits=LIMITS) as raw,
        Subscriber("tcp://127.0.0.1:9", decode=bool(LIMITS)) as either,
    ):
        assert_type(decoding, Subscriber[Batch])
        assert_type(decoding.receive(0), Batch | Reset | Gap | None)
        assert_type(raw.receive(0), RawBatch | Reset | Gap | None)
        assert_type(raw.receive_many(timeout=0), list[RawBatch | Reset | Gap])
        assert_type(either.receive(0), Batch | RawBatch | Reset | Gap | None)
        unnamed: Subscriber = decoding
        delivery: RawDelivery | None = raw.receive(0)
        assert (unnamed.receive(0), delivery) == (None, None)


async def test_type_checkers_infer_the_types_delivered_to_a_task() -> None:
    """The same as for `Subscriber`, with `await`."""
    async with AsyncSubscriber("tcp://127.0.0.1:9") as decoding, AsyncSubscriber("tcp://127.0.0.1:9", decode=False) as raw:
        assert_type(decoding, AsyncSubscriber[Batch])
        assert_type(await decoding.receive(0), Batch | Reset | Gap | None)
        assert_type(await raw.receive_many(timeout=0), list[RawBatch | Reset | Gap])


def test_receiving_after_close_is_an_error() -> None:
    """A closed subscriber raises `ClosedError`. Closing twice is allowed."""
    subscriber = Subscriber(Source("tcp://127.0.0.1:9"))
    subscriber.close()
    subscriber.close()
    with pytest.raises(ClosedError, match="Subscriber is closed"):
        subscriber.receive(0)


def test_closing_does_not_wait_for_an_incomplete_socket() -> None:
    """An interrupt can leave a socket that no connection owns. Closing the context closes it, too, and does not hang."""
    transport = ZmqTransport()
    forgotten = transport.context.socket(zmq.DEALER)
    transport.close()
    assert forgotten.closed


def test_iteration_yields_what_receive_returns() -> None:
    """`for` and `async for` yield the same deliveries as `receive`."""

    async def receive_two(source: Source) -> list[int]:
        seqs = []
        async with AsyncSubscriber(source) as subscriber:
            async for delivery in subscriber:
                assert isinstance(delivery, Batch)
                seqs.append(delivery.seq)
                if len(seqs) == 2:
                    break
        return seqs

    with TapePlayer(make_frames(2)) as tape:
        tape.play()
        with Subscriber(make_source(tape)) as subscriber:
            deliveries = iter(subscriber)
            assert [next(deliveries).seq, next(deliveries).seq] == [0, 1]  # type: ignore[union-attr]
        assert asyncio.run(receive_two(make_source(tape))) == [0, 1]


def test_a_cancelled_receive_loses_no_delivery() -> None:
    """Cancellation ends the wait and loses no batch."""

    async def scenario(tape: TapePlayer) -> list[int]:
        async with AsyncSubscriber(make_source(tape), limits=LIMITS) as subscriber:
            for _ in range(3):
                waiting = asyncio.create_task(subscriber.receive())
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            tape.play()
            seqs: list[int] = []
            while len(seqs) < 5:
                delivery = await subscriber.receive(DEADLINE)
                assert isinstance(delivery, Batch)
                seqs.append(delivery.seq)
            return seqs

    with TapePlayer(make_frames(5)) as tape:
        assert asyncio.run(scenario(tape)) == [0, 1, 2, 3, 4]


def test_closing_leaves_no_threads_and_no_descriptors() -> None:
    """Sockets, contexts, monitors and selectors are all closed."""

    def open_and_close() -> None:
        with Subscriber([Source("tcp://127.0.0.1:9", name=str(number)) for number in range(5)]) as subscriber:
            assert subscriber.receive(0.01) is None

    open_and_close()
    with leave_nothing_open():
        for _ in range(5):
            open_and_close()


STALLED = """
import zmq
from kvevents.stream import Source
from kvevents.subscriber import SocketOptions, Subscriber, ZmqTransport

publisher = zmq.Context().socket(zmq.XPUB)
publisher.set_hwm(0)
publisher.bind("tcp://127.0.0.1:*")
ended = publisher.get_monitor_socket(zmq.EVENT_DISCONNECTED)
options = SocketOptions(receive_hwm=20, heartbeat_ms=100, heartbeat_timeout_ms=300, reconnect_ms=20)
source = Source(publisher.get_string(zmq.LAST_ENDPOINT))
with Subscriber(source, transport=ZmqTransport(options=options), decode=False) as subscriber:
    while publisher.poll(0) == 0:
        subscriber.receive(0.05)
    publisher.recv()
    for number in range(1000):
        publisher.send_multipart([b"", number.to_bytes(8, "big"), bytes(100)])
    # The application is busy: its receive pipe is full, pongs wait behind it, the connection times out.
    assert ended.poll(30_000)
    while subscriber.receive_many(timeout=0.5):
        pass
print("lives")
"""


def test_a_stalled_application_is_not_aborted_by_libzmq() -> None:
    """libzmq 4.3.5 aborts the process that reads a full socket whose connection has timed out (its issues 3596 and 3937)."""
    done = subprocess.run([sys.executable, "-c", STALLED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr


def test_repaired_gaps_leave_no_timers() -> None:
    """The timer of a request is due before the idle probe. Only one of the two timers can stay."""
    transport = FakeTransport()
    engine = transport.engine("tcp://e:1", "tcp://r:1")
    source = Source(engine.endpoint, engine.replay_endpoint, name="e")
    ticks = 0
    limits = replace(LIMITS, replay_timeout=0.4, reply_idle_timeout=0.2)
    with Subscriber(source, transport=transport, clock=transport.clock, limits=limits) as subscriber:
        stream = subscriber._multiplexer.entry("e", 0).stream
        tick = stream.tick

        def count_tick(now: float) -> None:
            nonlocal ticks
            ticks += 1
            tick(now)

        stream.tick = count_tick  # type: ignore[method-assign]
        for _ in range(500):
            engine.publish(lost=True)
            engine.publish()
            while subscriber.receive(timeout=0) is not None:
                pass
            transport.clock.advance(0.1)
        assert subscriber.status("e").counters.gaps_repaired == 499
        assert len(subscriber._multiplexer._timers) < 10
    assert ticks < 500 * 2


@pytest.mark.parametrize("lost", [0.01, 0.2])
def test_each_gap_needs_one_request(lost: float) -> None:
    """The reply that fills a gap also holds the live batch behind it, which verifies the replay endpoint."""
    transport, random = FakeTransport(), Random(3)
    engine = transport.engine("tcp://engine:1", "tcp://engine:2")
    source = Source(engine.endpoint, engine.replay_endpoint, name="e")
    with Subscriber(source, transport=transport, clock=transport.clock) as subscriber:
        for number in range(3_000):
            engine.publish(BlockRemoved([number]), lost=random.random() < lost)
            for _ in range(2):
                subscriber.receive_many(timeout=0)
            transport.clock.advance(0.01)
        counters = subscriber.status("e").counters
        assert counters.gaps_repaired > 10
        assert counters.requests == counters.gaps_repaired + 1, "one at the start"
