"""Both subscribers against real sockets: a tape that fails as engines fail, and a proxy that fails as networks fail."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, assert_type

import msgspec
import pytest
import zmq

from kvevents.errors import ClosedError, ConfigError, EndpointError, UnknownSourceError
from kvevents.events import BlockRemoved, BlockStored, EventBatch, Heartbeat, KVEvent
from kvevents.index import Applied, PrefixIndex
from kvevents.publisher import ZmqEventPublisher
from kvevents.security import Curve
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
from kvevents.testing.faults import Faults
from kvevents.testing.proxy import FaultProxy
from kvevents.testing.tape import TapePlayer
from network_model import payload_of
from publisher_cases import wait_until

LIMITS = StreamLimits(
    replay_timeout=2.0, reply_idle_timeout=0.5, idle_before_probe=0.2, max_probe_interval=1.0, max_unanswered_requests=1_000_000
)
"""An answer that is late, as on a busy machine, is asked for again; nothing is given up because of it."""
IMPATIENT = replace(LIMITS, replay_timeout=0.2, reply_idle_timeout=0.1, max_unanswered_requests=2)
"""For replay endpoints that never help: their streams give up soon."""
USUAL = SocketOptions()
DEADLINE = 20.0
"""Seconds after which a test fails; nothing takes that long."""


class SyncDriver:
    """`Subscriber`, with the face that both drivers share."""

    def __init__(self, *sources: Source, sockets: SocketOptions = USUAL, limits: StreamLimits = LIMITS, **options: Any) -> None:
        self.subscriber = Subscriber(sources, limits=limits, transport=ZmqTransport(options=sockets), **options)

    def receive(self, timeout: float) -> Delivery | None:
        return self.subscriber.receive(timeout)

    def receive_many(self, limit: int | None, timeout: float) -> list[Delivery]:
        return self.subscriber.receive_many(limit, timeout)

    def close(self) -> None:
        self.subscriber.close()


class AsyncDriver:
    """`AsyncSubscriber`, driven from a loop of its own."""

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


class Desk:
    """A subscriber and everything it has delivered."""

    def __init__(self, driver: SyncDriver | AsyncDriver) -> None:
        self.driver = driver
        self.subscriber = driver.subscriber
        self.taken: list[Delivery] = []

    def until(self, reached: Callable[[], bool]) -> None:
        """Receive until a condition holds; fails after the deadline."""
        end = time.monotonic() + DEADLINE
        while not reached():
            assert time.monotonic() < end, f"not reached: {self.subscriber!r}, {self.subscriber.statuses()}, {self.taken[-3:]}"
            delivery = self.driver.receive(0.05)
            if delivery is not None:
                self.taken.append(delivery)

    def joined(self, tape: TapePlayer) -> None:
        """Until an engine has a subscriber, which takes receiving where libzmq has no part in it."""
        self.until(lambda: tape.wait_for_subscriber(0))

    def trusted(self, trust: Trust) -> None:
        self.until(lambda: self.subscriber.trust("e") == trust)

    def confirmed(self, publish: Callable[[], object]) -> None:
        """Until the stream is EXACT. `publish` publishes a batch: a live one has to confirm what replay has brought."""

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
def desk(request: pytest.FixtureRequest) -> Iterator[Callable[..., Desk]]:
    """Opens subscribers of either kind and closes them."""
    opened: list[SyncDriver | AsyncDriver] = []

    def open_desk(*sources: Source, **options: Any) -> Desk:
        opened.append(request.param(*sources, **options))
        return Desk(opened[-1])

    yield open_desk
    for driver in opened:
        driver.close()


def frames(count: int, life: int = 0) -> list[tuple[bytes, int, bytes]]:
    return [(b"kv", seq, payload_of(life, seq, clear=False)) for seq in range(count)]


def source_of(tape: TapePlayer, **options: Any) -> Source:
    return Source(tape.endpoint, tape.replay_endpoint, topic="kv", name="e", **options)


def test_live_batches_arrive_once_and_in_order(desk: Callable[..., Desk]) -> None:
    """A healthy engine and a subscriber that is there from the start."""
    with TapePlayer(frames(500)) as tape:
        at = desk(source_of(tape))
        at.joined(tape)
        tape.play()
        at.until(lambda: len(at.taken) >= 500)
        assert at.batches() == tape.batches()
        at.trusted(Trust.EXACT)


def test_a_late_subscriber_gets_the_whole_buffer_through_a_lossy_replay(desk: Callable[..., Desk]) -> None:
    """The engines' ROUTER drops all but a part of each reply, with and without the end marker; nothing is missing after it."""
    with TapePlayer(frames(2_000), faults=Faults(replay_send_limit=450)) as tape:
        tape.play()
        at = desk(source_of(tape))
        at.until(lambda: len(at.taken) >= 1_000)
        tape.faults = Faults(replay_send_limit=450, lose_end_marker=True)
        at.until(lambda: len(at.taken) >= 2_000)
        assert at.batches() == tape.batches()
        tape.faults = Faults()
        at.confirmed(lambda: tape.play(1))
        assert at.others() == []


def test_drops_holes_and_an_idle_engine(desk: Callable[..., Desk]) -> None:
    """A tenth of the live batches and of the replayed ones is lost, the last ones too; the tail check finds those."""
    with TapePlayer(frames(301), faults=Faults(drop=0.1, replay_holes=0.1, seed=5)) as tape:
        at = desk(source_of(tape))
        at.joined(tape)
        tape.play(299)
        tape.faults = Faults(drop={299})
        tape.play(1)
        at.until(lambda: len(at.taken) >= 300)
        assert at.batches() == tape.batches()
        tape.faults = Faults()
        tape.play()
        at.until(lambda: len(at.taken) >= 301)
        at.trusted(Trust.EXACT)


@pytest.mark.parametrize("unseen", [None, 3, 80])
def test_a_restart_is_recognised(desk: Callable[..., Desk], unseen: int | None) -> None:
    """A new life from 0, one that published a little, and one that has passed the old number before anyone was back."""
    with TapePlayer(frames(50)) as tape:
        at = desk(source_of(tape))
        at.joined(tape)
        tape.play()
        at.until(lambda: len(at.taken) == 50)
        tape.restart(frames(100, life=1), unseen_until=unseen)
        at.until(lambda: unseen is None or len(at.batches(1)) > unseen)
        at.until(lambda: tape.wait_for_subscriber(0))
        tape.play()
        at.until(lambda: len(at.batches(1)) == len(tape.batches(1)))
        assert at.batches(0) == tape.batches(0)
        assert at.batches(1) == tape.batches(1)
        assert [type(item) for item in at.others()] == [Reset]
        at.trusted(Trust.EXACT)


def test_truncated_history_and_burnt_numbers_are_gaps(desk: Callable[..., Desk]) -> None:
    """What nobody holds any more is named, what is held is delivered, and trust is DEGRADED."""
    with TapePlayer(frames(100), faults=Faults(buffer_steps=30, skipped={90})) as tape:
        tape.play()
        at = desk(source_of(tape))
        at.until(lambda: len(at.taken) >= 32)
        assert [(gap.first, gap.last) for gap in at.others() if isinstance(gap, Gap)] == [(0, 68), (90, 90)]
        assert [seq for seq, _ in at.batches()] == [*range(69, 90), *range(91, 100)]
        at.trusted(Trust.DEGRADED)


@pytest.mark.parametrize("faults", [Faults(replay_silent=True), Faults(replay_endless=True, replay_foreign=frames(1, life=7))])
def test_a_replay_endpoint_that_never_helps_delays_but_does_not_stop_the_stream(
    desk: Callable[..., Desk], faults: Faults
) -> None:
    """Mute or endless: live batches go on after a bounded wait, and trust says why they are not exact."""
    with TapePlayer(frames(60), faults=faults) as tape:
        at = desk(source_of(tape), limits=IMPATIENT)
        at.joined(tape)
        tape.faults = Faults(replay_silent=faults.replay_silent, replay_endless=faults.replay_endless, drop={5})
        if faults.replay_foreign:
            tape.faults = faults
        tape.play(30)
        at.until(lambda: any(seq == 29 for seq, _ in at.batches()))
        at.trusted(Trust.DEGRADED)


def test_a_replay_endpoint_of_another_stream_does_no_lasting_harm(desk: Callable[..., Desk]) -> None:
    """Foreign batches are voided by a reset; the live stream alone remains, and trust says so."""
    with TapePlayer(frames(60), faults=Faults(replay_foreign=frames(40, life=9))) as tape:
        at = desk(source_of(tape))
        at.joined(tape)
        published = 0
        while "another stream" not in at.subscriber.trust("e").reason:
            tape.play(1)
            published += 1
            assert published < 50
            at.until(lambda: any(isinstance(item, Batch) for item in at.taken))
            for _ in range(10):
                delivery = at.driver.receive(0.05)
                at.taken.extend([delivery] if delivery else [])
        tape.play(5)
        at.until(lambda: (published + 4, tape.batches()[-1][1]) in at.batches())
        assert any(isinstance(item, Reset) for item in at.taken)


def test_without_replay_it_works_as_far_as_it_can(desk: Callable[..., Desk]) -> None:
    """Gaps are told, a restart resets, and trust never claims more than can be known."""
    with TapePlayer(frames(20), replay_endpoint=None, faults=Faults(drop={3, 4})) as tape:
        at = desk(source_of(tape))
        at.joined(tape)
        tape.play()
        at.until(lambda: len(at.taken) == 19)
        assert [(gap.first, gap.last) for gap in at.others() if isinstance(gap, Gap)] == [(3, 4)]
        assert at.subscriber.trust("e") == Trust.DEGRADED
        tape.faults = Faults()
        tape.restart()
        at.until(lambda: tape.wait_for_subscriber(0))
        tape.play()
        at.until(lambda: len(at.batches(1)) == 20)


def test_malformed_frames_are_counted_and_cost_nothing(desk: Callable[..., Desk]) -> None:
    """1, 2, 4 and 9 frames, numbers of 0, 4 and 16 bytes, 2**63 and 2**64-1, between good batches."""
    numbers = [b"", b"\0" * 4, b"\0" * 16, (2**63).to_bytes(8, "big"), b"\xff" * 8]
    bad = [[b"kv"] * count for count in (1, 2, 4, 9)] + [[b"kv", number, b"x"] for number in numbers]
    with TapePlayer(frames(len(bad))) as tape:
        at = desk(source_of(tape))
        at.joined(tape)
        for message in bad:
            tape.send_raw(message)
            tape.play(1)
        at.until(lambda: len(at.taken) == len(bad))
        assert at.batches() == tape.batches()
        assert sum(at.subscriber.status("e").counters.malformed.values()) == len(bad)


def test_a_flood_waits_in_bounded_buffers_and_arrives(desk: Callable[..., Desk]) -> None:
    """A subscriber that looks away while far more is published than its socket holds gets everything afterwards."""
    sockets = SocketOptions(receive_hwm=50)
    with TapePlayer(frames(5_001), hwm=50) as tape:
        at = desk(source_of(tape), sockets=sockets)
        at.joined(tape)
        tape.play(5_000)
        at.until(lambda: len(at.taken) >= 5_000)
        assert at.batches() == tape.batches()
        tape.play()
        at.until(lambda: len(at.taken) >= 5_001)
        at.trusted(Trust.EXACT)


def test_a_cut_connection_loses_nothing(desk: Callable[..., Desk]) -> None:
    """What was published while the network was down is replayed; the publisher is proven to be the same; no reset."""
    with TapePlayer(frames(100)) as tape, FaultProxy(tape.endpoint) as proxy:
        at = desk(Source(proxy.endpoint, tape.replay_endpoint, topic="kv", name="e"))
        at.joined(tape)
        tape.play(30)
        at.until(lambda: len(at.taken) == 30)
        proxy.cut(refuse=True)
        at.trusted(Trust.STALE)
        tape.play(40)
        proxy.heal()
        at.until(lambda: tape.wait_for_subscriber(0))
        tape.play(30)
        at.until(lambda: len(at.taken) >= 100)
        assert at.batches() == tape.batches()
        assert at.others() == []
        at.trusted(Trust.EXACT)


def test_a_half_open_connection_is_noticed_by_heartbeats(desk: Callable[..., Desk]) -> None:
    """A network that swallows everything without closing anything makes the stream STALE, and heals."""
    sockets = SocketOptions(heartbeat_ms=100, heartbeat_timeout_ms=300)
    with TapePlayer(frames(20)) as tape, FaultProxy(tape.endpoint) as proxy:
        at = desk(Source(proxy.endpoint, tape.replay_endpoint, topic="kv", name="e"), sockets=sockets)
        at.joined(tape)
        tape.play(10)
        at.until(lambda: len(at.taken) == 10)
        proxy.stall()
        at.trusted(Trust.STALE)
        tape.play(10)
        proxy.heal()
        at.until(lambda: len(at.taken) >= 20)
        assert at.batches() == tape.batches()
        at.confirmed(lambda: tape.play(1))


def test_five_hundred_sources_at_once(desk: Callable[..., Desk]) -> None:
    """Replays are limited in number, every source catches up, and a live batch of each arrives."""
    with TapePlayer(frames(3)) as tape:
        tape.play(2)
        sources = [Source(tape.endpoint, tape.replay_endpoint, topic="kv", name=f"e{number}") for number in range(500)]
        at = desk(*sources, max_concurrent_replays=16)
        at.until(lambda: len(at.taken) == 1_000)
        assert tape.wait_for_subscriber(DEADLINE, 500)
        tape.play(1)
        at.until(lambda: len(at.taken) == 1_500)
        at.until(lambda: all(status.trust == Trust.EXACT for status in at.subscriber.statuses()))


def test_ranks_of_one_engine_are_streams_of_their_own(desk: Callable[..., Desk]) -> None:
    """Two ranks share a name and nothing else."""
    with TapePlayer(frames(5)) as zero, TapePlayer(frames(7, life=1)) as one:
        at = desk(source_of(zero, rank=0), source_of(one, rank=1))
        at.joined(zero)
        at.joined(one)
        zero.play()
        one.play()
        at.until(lambda: len(at.taken) == 12)
        by_rank = {rank: [item.seq for item in at.taken if item.rank == rank and isinstance(item, Batch)] for rank in (0, 1)}
        assert by_rank == {0: list(range(5)), 1: list(range(7))}


def test_an_endpoint_where_nobody_listens_is_connecting_and_bounded(desk: Callable[..., Desk]) -> None:
    """`receive` comes back after its timeout, and trust says that there is no connection."""
    at = desk(Source("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", name="e"))
    assert at.driver.receive(0.2) is None
    assert at.subscriber.trust("e") == Trust.CONNECTING


def test_an_engine_that_starts_later_is_found(desk: Callable[..., Desk], tmp_path: Path) -> None:
    """Over ipc, with the subscriber first: everything from number 0 arrives."""
    endpoint, replay_endpoint = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    at = desk(Source(endpoint, replay_endpoint, name="e"))
    assert at.driver.receive(0.05) is None
    publisher = ZmqEventPublisher(0, endpoint, replay_endpoint)
    publisher.publish(EventBatch(1.0, [BlockRemoved([1])]))
    at.until(lambda: len(at.taken) == 1)
    at.confirmed(lambda: publisher.publish(EventBatch(2.0, [])))
    publisher.shutdown()


def test_in_process_endpoints_work(desk: Callable[..., Desk]) -> None:
    """inproc has no connection events; the stream is followed all the same."""
    publisher = ZmqEventPublisher(0, "inproc://subscriber-test", "inproc://subscriber-test-replay")
    at = desk(Source("inproc://subscriber-test", "inproc://subscriber-test-replay", name="e"))
    publisher.publish(EventBatch(1.0, [BlockRemoved([1])]))
    at.until(lambda: len(at.taken) == 1)
    publisher.shutdown()


def test_a_subscriber_may_bind_and_the_engine_connect(desk: Callable[..., Desk], tmp_path: Path) -> None:
    """Engines that are told a concrete address connect; then the subscriber's side has to listen."""
    endpoint = f"ipc://{tmp_path}/pub"
    at = desk(Source(endpoint, name="e", bind=True))
    publisher = ZmqEventPublisher(0, endpoint, bind=False)
    at.until(lambda: publisher.stats().subscribers == 1)
    publisher.publish(EventBatch(1.0, [BlockRemoved([1])]))
    at.until(lambda: len(at.taken) == 1)
    publisher.shutdown()


def test_curve_keys_open_and_a_stranger_stays_outside(desk: Callable[..., Desk]) -> None:
    """With the server's key both conversations are encrypted; without keys nothing is delivered."""
    server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
    client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
    server = Curve(public_key=server_public, secret_key=server_secret)
    client = Curve(public_key=client_public, secret_key=client_secret, server_key=server_public)
    publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", curve=server)
    publisher.publish(EventBatch(1.0, [BlockRemoved([1])]))
    friend = Source(publisher.endpoint, publisher.replay_endpoint, name="e", curve=client)
    stranger = Source(publisher.endpoint, publisher.replay_endpoint, name="stranger")
    at = desk(friend, stranger)
    at.until(lambda: len(at.taken) == 1)
    at.confirmed(lambda: publisher.publish(EventBatch(2.0, [])))
    assert at.subscriber.trust("stranger") != Trust.EXACT
    assert {item.source for item in at.taken} == {"e"}
    publisher.shutdown()


def test_sources_come_and_go(desk: Callable[..., Desk]) -> None:
    """A source that was removed is gone; a name and rank can be taken only once."""
    with TapePlayer(frames(2)) as tape:
        at = desk(source_of(tape))
        with pytest.raises(ConfigError, match="given twice"):
            at.subscriber.add(source_of(tape))
        at.subscriber.remove("e")
        with pytest.raises(UnknownSourceError, match="known: none"):
            at.subscriber.trust("e")
        at.subscriber.add(source_of(tape))
        at.joined(tape)
        tape.play()
        at.until(lambda: len(at.taken) == 2)


def test_wrong_endpoints_are_refused_with_a_sentence(desk: Callable[..., Desk]) -> None:
    """What can never work is said when the source is given."""
    for endpoint in ("tcp://", "tcp://host", "tcp://127.0.0.1:5557:5558", "http://host:1"):
        with pytest.raises(ConfigError, match="invalid endpoint"):
            Source(endpoint)
    with pytest.raises(EndpointError, match="cannot connect to"):
        desk(Source("gopher://host:1"))


def test_a_repr_for_operators(desk: Callable[..., Desk]) -> None:
    """Streams by trust, and what waits."""
    at = desk(Source("tcp://127.0.0.1:9"), Source("tcp://127.0.0.1:9", name="b"))
    assert repr(at.subscriber).endswith("2 streams, 2 CONNECTING, 0 ready>")
    at.driver.close()
    assert repr(at.subscriber).endswith("ubscriber closed>")


def test_many_deliveries_at_once(desk: Callable[..., Desk]) -> None:
    """All of a turn, or as many as wanted and the rest later; nothing after the timeout."""
    with TapePlayer(frames(100)) as tape:
        at = desk(source_of(tape))
        assert at.driver.receive_many(None, 0.05) == []
        at.joined(tape)
        tape.play()
        while len(at.taken) < 100:
            some = at.driver.receive_many(3, DEADLINE)
            assert 1 <= len(some) <= 3
            at.taken += some + at.driver.receive_many(None, 0)
        assert at.batches() == tape.batches()
        with pytest.raises(ConfigError, match="limit is 0"):
            at.driver.receive_many(0, 0)


def test_raw_batches_arrive_as_they_were_sent(desk: Callable[..., Desk]) -> None:
    """History by replay, then live batches with some dropped: the bytes of each, once and in order, none of them read."""
    with TapePlayer(frames(1_000)) as tape:
        tape.play(300)
        at = desk(source_of(tape), decode=False)
        at.until(lambda: len(at.taken) == 300)
        tape.faults = Faults(drop=0.02, seed=3)
        at.joined(tape)
        tape.play(699)
        tape.faults = Faults()
        tape.play()
        at.until(lambda: len(at.taken) == 1_000)
        raw: list[Any] = at.taken
        assert all(isinstance(batch, RawBatch) for batch in raw)
        assert [(batch.seq, batch.payload) for batch in raw] == tape.batches()
        assert {batch.topic for batch in raw} == {b"kv"}
        assert raw[-1].decode().events == [BlockStored([999], None, [999], 1)]
        at.trusted(Trust.EXACT)


@pytest.mark.parametrize("decode", [True, False])
def test_the_consumer_of_raw_batches_reports_what_it_finds(desk: Callable[..., Desk], decode: bool) -> None:
    """One loop serves both modes: what decoding has told already is not told twice."""
    unreadable = msgspec.msgpack.encode([3.0, [["Unheard", 1]]])
    with TapePlayer([*frames(3), (b"kv", 3, unreadable), (b"kv", 4, payload_of(0, 4, clear=True))]) as tape:
        at = desk(source_of(tape), decode=decode)
        taken: list[Any] = at.taken
        at.joined(tape)
        tape.play(4)
        at.until(lambda: len(taken) == 4)
        at.trusted(Trust.DEGRADED if decode else Trust.EXACT)
        at.subscriber.report(taken[3], BatchReport((taken[3] if decode else taken[3].decode()).rejected))
        at.until(lambda: at.subscriber.status("e").degraded_reasons == {DegradedReason.REJECTED})
        assert at.subscriber.status("e").counters.rejected == {"unknown-tag": 1}
        tape.play()
        at.until(lambda: len(taken) == 5)
        at.subscriber.report(taken[4], BatchReport(cleared=True))
        at.trusted(Trust.EXACT)
        at.subscriber.remove("e")
        at.subscriber.report(taken[4], BatchReport(cleared=True))


class Counting:
    """A sink that notes what it was given, and fails when told to."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.given: list[Batch | RawBatch | Reset | Gap] = []
        self.fails = False

    def apply_many(self, deliveries: Sequence[Batch | RawBatch | Reset | Gap]) -> list[Applied]:
        if self.fails:
            raise RuntimeError("injected")
        self.given += deliveries
        return self.index.apply_many(deliveries)


@pytest.mark.parametrize("decode", [True, False])
def test_a_sink_has_each_delivery_before_it_is_handed_out(desk: Callable[..., Desk], decode: bool) -> None:
    """One by one or many, and what it found is reported without anybody's doing."""
    unreadable = msgspec.msgpack.encode([3.0, [["Unheard", 1]]])
    sink = Counting(PrefixIndex())
    with TapePlayer([*frames(3), (b"kv", 3, unreadable), (b"kv", 4, payload_of(0, 4, clear=True))]) as tape:
        at = desk(source_of(tape), decode=decode, sink=sink)
        at.joined(tape)
        tape.play(4)
        for count in (1, 2):
            at.until(lambda: len(at.taken) >= count)  # noqa: B023 - called before the next one
            assert sink.given == at.taken
        while len(at.taken) < 4:
            at.taken += at.driver.receive_many(None, 0.05)
            assert sink.given == at.taken
        assert DegradedReason.REJECTED in at.subscriber.status("e").degraded_reasons
        assert sink.index.worker("e").blocks == 3
        tape.play()
        at.until(lambda: len(at.taken) == 5)
        at.trusted(Trust.EXACT)
        assert sink.index.worker("e").blocks == 0


def test_what_a_sink_raises_is_raised(desk: Callable[..., Desk]) -> None:
    """A fault of the consumer's own; the next call goes on with what has come behind."""
    sink = Counting(PrefixIndex())
    with TapePlayer(frames(2)) as tape:
        at = desk(source_of(tape), sink=sink)
        at.joined(tape)
        tape.play(1)
        sink.fails = True
        with pytest.raises(RuntimeError, match="injected"):
            at.until(lambda: bool(at.taken))
        sink.fails = False
        tape.play(1)
        at.until(lambda: bool(at.taken))
        assert sink.given == at.taken


@pytest.mark.parametrize("decode", [True, False])
def test_a_message_that_begins_as_the_batch_that_is_due_is_none(desk: Callable[..., Desk], decode: bool) -> None:
    """It goes on behind the payload, or ends before it: it is counted, and the batch itself follows."""
    with TapePlayer(frames(8)) as tape:
        at = desk(source_of(tape), decode=decode)
        at.joined(tape)
        tape.play(2)
        at.until(lambda: len(at.taken) == 2)
        for seq, behind in ((2, [b"x", b""]), (3, []), (4, [b"x", b"kv", b"x"])):
            tape.send_raw([b"kv", seq.to_bytes(8, "big"), *behind])
            tape.play(1)
        tape.play()
        at.until(lambda: len(at.taken) == 8)
        taken: list[Any] = at.taken
        assert [(batch.seq, batch.payload) for batch in taken] == tape.batches()
        assert at.subscriber.status("e").counters.malformed == {"not 3 frames": 3}
        at.trusted(Trust.EXACT)


# --- subscribers that restart ------------------------------------------------------------------------------------------------


def on_disk(at: Desk) -> Checkpoint:
    """The subscriber's process ends; this is what it leaves."""
    at.driver.close()
    (checkpoint,) = at.subscriber.checkpoints()
    assert checkpoint == at.subscriber.checkpoint()
    return Checkpoint.decode(checkpoint.encode())


def test_a_restarted_subscriber_goes_on_with_a_publisher_that_went_on(desk: Callable[..., Desk], tmp_path: Path) -> None:
    """What was published meanwhile follows, the rest is not delivered again, and the stream is EXACT after the proof only."""
    endpoints = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    publisher = ZmqEventPublisher(0, *endpoints)
    before = desk(Source(*endpoints, name="e"))
    for number in range(5):
        publisher.publish(EventBatch(float(number), [BlockRemoved([number])]))
    before.until(lambda: len(before.taken) == 5)
    checkpoint = on_disk(before)
    for number in range(5, 9):
        publisher.publish(EventBatch(float(number), [BlockRemoved([number])]))
    wait_until(lambda: publisher.stats().published == 9, "all to be sent before the next subscriber comes")
    after = desk()
    after.subscriber.add(Source(*endpoints, name="e"), resume=checkpoint)
    assert after.subscriber.trust("e") == Trust.STALE
    after.until(lambda: len(after.taken) == 4)
    assert after.subscriber.trust("e") != Trust.EXACT
    publisher.publish(EventBatch(9.0, [BlockRemoved([9])]))
    after.until(lambda: len(after.taken) == 5)
    after.confirmed(lambda: publisher.publish(EventBatch(10.0, [])))
    assert after.others() == []
    assert [seq for seq, _ in after.batches(0)] == list(range(5, 5 + len(after.taken)))
    publisher.shutdown()


@pytest.mark.parametrize("published", [0, 1, 9])
def test_a_restarted_subscriber_finds_that_the_publisher_restarted(
    desk: Callable[..., Desk], tmp_path: Path, published: int
) -> None:
    """Idle, young, or already past the old number: Reset with the next incarnation, then its batches from 0."""
    endpoints = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    first = ZmqEventPublisher(0, *endpoints)
    before = desk(Source(*endpoints, name="e"))
    for number in range(5):
        first.publish(EventBatch(float(number), [BlockRemoved([number])]))
    before.until(lambda: len(before.taken) == 5)
    before.until(lambda: before.subscriber.checkpoint().replay_seen)
    checkpoint = on_disk(before)
    first.shutdown()
    second = ZmqEventPublisher(0, *endpoints)
    for number in range(published):
        second.publish(EventBatch(100.0 + number, [BlockRemoved([number])]))
    after = desk()
    after.subscriber.add(Source(*endpoints, name="e"), resume=checkpoint)
    after.until(lambda: len(after.taken) == 1 + published)
    assert isinstance(after.taken[0], Reset)
    assert [seq for seq, _ in after.batches(1)] == list(range(published))
    after.confirmed(lambda: second.publish(EventBatch(200.0, [])))
    assert after.subscriber.checkpoint().incarnation == 1
    second.shutdown()


def test_a_restarted_subscriber_waits_for_a_publisher_that_is_away(desk: Callable[..., Desk]) -> None:
    """Nothing is claimed and nothing forgotten; the checkpoint of that time is the one it was given."""
    checkpoint = Checkpoint("e", 0, 2, 7, degraded_reasons={"LOST": 7})
    at = desk()
    at.subscriber.add(Source("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", name="e"), resume=checkpoint)
    assert at.driver.receive(0.1) is None
    assert at.subscriber.trust("e") == Trust.STALE
    assert at.subscriber.status("e").last_seq == 7
    assert at.subscriber.checkpoints() == [checkpoint]
    with pytest.raises(ConfigError, match="checkpoint of e rank 0"):
        at.subscriber.add(Source("tcp://127.0.0.1:9", name="other"), resume=checkpoint)
    assert [status.source for status in at.subscriber.statuses()] == ["e"]


def lively(transport: FakeTransport) -> FakeEngine:
    """An engine with history: an event that cannot be read, a gap, a clear, and one batch that was not sent live."""
    engine = transport.engine("tcp://engine:5557", "tcp://engine:5558")
    for number in range(4):
        engine.publish(BlockRemoved([number]))
    engine.publish_payload(msgspec.msgpack.encode([4.0, [["Unheard", 1]]]))
    engine.skip_number()
    engine.publish(BlockRemoved([6]))
    engine.publish_payload(payload_of(0, 7, clear=True))
    engine.publish(BlockRemoved([8]), lost=True)
    return engine


def told(deliveries: list[Delivery]) -> list[object]:
    """What they say, however they came."""
    return [(item.incarnation, item.seq, item.payload) if isinstance(item, Batch) else item for item in deliveries]


def follow(transport: FakeTransport, engine: FakeEngine, resume: Checkpoint) -> tuple[list[Delivery], Subscriber]:
    """Everything that a subscriber delivers which goes on from there."""
    subscriber = Subscriber(transport=transport, clock=transport.clock, limits=LIMITS)
    subscriber.add(Source(engine.endpoint, engine.replay_endpoint, name="e"), resume=resume)
    taken = []
    while (delivery := subscriber.receive(timeout=5)) is not None:
        taken.append(delivery)
    return taken, subscriber


def test_a_checkpoint_is_never_ahead_of_what_was_handed_out() -> None:
    """One delivery at a time, while others wait: each checkpoint leads to exactly those that came after it."""
    transport = FakeTransport()
    engine = lively(transport)
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
        assert told(again) == told(taken[position:])
        with subscriber:
            engine.publish()
            live = subscriber.receive(timeout=5)
            assert live is not None
            taken.append(live)
            assert subscriber.receive(timeout=5) is None
            assert subscriber.trust("e") == Trust.EXACT
            assert subscriber.checkpoint("e").last_seq == 8 + position


def test_a_checkpoint_between_two_lives_is_of_the_one_that_was_handed_out() -> None:
    """A Reset that waits is delivered again; one that was handed out is not, unless nothing of its life was."""
    transport = FakeTransport()
    engine = lively(transport)
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
        assert told(again) == told([item for item in taken[position:] if item is not None])
    again, _ = follow(transport, engine, positions[0])
    assert isinstance(again[0], Reset)
    assert len(again) == 21


def test_what_was_reported_while_others_wait_is_in_the_checkpoint() -> None:
    """A consumer of raw batches has found something that it cannot read; later ones are still to be handed out."""
    transport = FakeTransport()
    engine = lively(transport)
    source = Source(engine.endpoint, engine.replay_endpoint, name="e")
    with Subscriber(source, decode=False, transport=transport, clock=transport.clock, limits=LIMITS) as subscriber:
        raw = [subscriber.receive(timeout=5) for _ in range(5)][-1]
        assert isinstance(raw, RawBatch)
        subscriber.report(raw, BatchReport(raw.decode().rejected))
        assert subscriber.checkpoint("e").last_seq == 4
        assert subscriber.checkpoint("e").degraded_reasons == {"REJECTED": 4}


def beating(engine: FakeEngine, digest: str = "0" * 32) -> None:
    """The engine is one of ours, and says what it holds."""
    engine.publish(BlockRemoved([], heartbeat=Heartbeat(digest, 5.0)))


@pytest.mark.parametrize("decode", [True, False])
def test_a_state_that_is_not_the_senders_is_built_anew(decode: bool) -> None:
    """An index that went wrong is found out by the next heartbeat, forgets, and is told everything again; then it agrees."""
    transport = FakeTransport()
    engine = transport.engine("tcp://relay:5557", "tcp://relay:5558")
    source = Source(engine.endpoint, engine.replay_endpoint, name="relay")
    truth, index = PrefixIndex(), PrefixIndex()
    with Subscriber(source, decode=decode, transport=transport, clock=transport.clock) as subscriber:

        def follow() -> list[bool | None]:
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
            truth.apply(Batch("relay", 0, 0, number, 0.0, events, False))
        beating(engine, truth.digest("relay"))
        assert follow() == [True]
        index.apply(Batch("relay", 0, 0, 4, 0.0, [BlockRemoved([1])], False))
        engine.publish(BlockRemoved([99]))
        beating(engine, truth.digest("relay"))
        assert follow() == [False, True, True]
        beating(engine, truth.digest("relay"))
        assert follow() == [True]
        assert subscriber.trust() == Trust.EXACT
        assert subscriber.status().counters.digests_mismatched == 1
        assert index.digest("relay") == truth.digest("relay")


@pytest.mark.parametrize("decode", [True, False])
def test_silence_is_noticed_though_nothing_else_is_due(decode: bool) -> None:
    """The promise is told after the batch was delivered, where the consumer reads it."""
    transport = FakeTransport()
    engine = transport.engine("tcp://relay:5557")
    with Subscriber(Source(engine.endpoint, name="e"), decode=decode, transport=transport, clock=transport.clock) as subscriber:
        beating(engine)
        delivery = subscriber.receive(timeout=1)
        assert isinstance(delivery, Batch | RawBatch)
        batch = delivery.decode() if isinstance(delivery, RawBatch) else delivery
        subscriber.report(delivery, inspect_events(batch.events))
        assert subscriber.receive(timeout=14) is None
        assert subscriber.trust() == Trust.DEGRADED
        assert subscriber.receive(timeout=2) is None
        assert subscriber.trust() == Trust.STALE


def test_nothing_found_is_nothing_to_report() -> None:
    transport = FakeTransport()
    engine = lively(transport)
    source = Source(engine.endpoint, engine.replay_endpoint, name="e")
    with Subscriber(source, decode=False, transport=transport, clock=transport.clock) as subscriber:
        raw = subscriber.receive(timeout=5)
        assert isinstance(raw, RawBatch)
        subscriber.report(raw, None)
        assert subscriber.status().counters.rejected == {}


def test_deliveries_of_a_source_that_was_removed_do_not_count_for_its_successor() -> None:
    """They may still wait when the same name is followed again."""
    transport = FakeTransport()
    engine = lively(transport)
    source = Source(engine.endpoint, engine.replay_endpoint, name="e")
    with Subscriber(source, transport=transport, clock=transport.clock, limits=LIMITS) as subscriber:
        subscriber.receive(timeout=5)
        checkpoint = subscriber.checkpoint("e")
        subscriber.remove("e")
        subscriber.add(source, resume=checkpoint)
        assert "0 ready" not in repr(subscriber)
        assert subscriber.checkpoint("e") == checkpoint


def test_type_checkers_know_what_is_delivered() -> None:
    """`Subscriber` alone means decoded batches; `decode=False` changes the type."""
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


async def test_type_checkers_know_what_is_delivered_to_a_task() -> None:
    """The same with `await`."""
    async with AsyncSubscriber("tcp://127.0.0.1:9") as decoding, AsyncSubscriber("tcp://127.0.0.1:9", decode=False) as raw:
        assert_type(decoding, AsyncSubscriber[Batch])
        assert_type(await decoding.receive(0), Batch | Reset | Gap | None)
        assert_type(await raw.receive_many(timeout=0), list[RawBatch | Reset | Gap])


def test_after_close_receiving_is_an_error() -> None:
    """A closed subscriber says so; closing twice is fine."""
    subscriber = Subscriber(Source("tcp://127.0.0.1:9"))
    subscriber.close()
    subscriber.close()
    with pytest.raises(ClosedError, match="Subscriber is closed"):
        subscriber.receive(0)


def test_closing_does_not_wait_for_a_socket_that_was_left_half_made() -> None:
    """An interrupt may leave a socket that no link knows; closing takes it along instead of hanging."""
    transport = ZmqTransport()
    forgotten = transport.context.socket(zmq.DEALER)
    transport.close()
    assert forgotten.closed


def test_iterating_in_both_worlds() -> None:
    """`for` and `async for` hand out the same as `receive`."""

    async def first_two(source: Source) -> list[int]:
        seqs = []
        async with AsyncSubscriber(source) as subscriber:
            async for delivery in subscriber:
                assert isinstance(delivery, Batch)
                seqs.append(delivery.seq)
                if len(seqs) == 2:
                    break
        return seqs

    with TapePlayer(frames(2)) as tape:
        tape.play()
        with Subscriber(source_of(tape)) as subscriber:
            deliveries = iter(subscriber)
            assert [next(deliveries).seq, next(deliveries).seq] == [0, 1]  # type: ignore[union-attr]
        assert asyncio.run(first_two(source_of(tape))) == [0, 1]


def test_a_cancelled_receive_loses_nothing() -> None:
    """Cancelling waits, not batches."""

    async def scenario(tape: TapePlayer) -> list[int]:
        async with AsyncSubscriber(source_of(tape), limits=LIMITS) as subscriber:
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

    with TapePlayer(frames(5)) as tape:
        assert asyncio.run(scenario(tape)) == [0, 1, 2, 3, 4]


def test_closing_leaves_no_threads_and_no_descriptors() -> None:
    """Sockets, contexts, monitors and selectors are all released."""

    def once() -> None:
        with Subscriber([Source("tcp://127.0.0.1:9", name=str(number)) for number in range(5)]) as subscriber:
            assert subscriber.receive(0.01) is None

    once()
    gc.collect()
    threads, descriptors = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        once()
    gc.collect()
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


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


def test_an_application_that_was_busy_for_too_long_is_not_ended_by_its_sockets() -> None:
    """libzmq 4.3.5 aborts the process that reads a full socket whose connection has timed out (its issues 3596 and 3937)."""
    done = subprocess.run([sys.executable, "-c", STALLED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr


def test_healed_gaps_leave_no_timers_behind() -> None:
    """A request's patience ends before the check of a quiet stream is due; neither timer may go on beside the other."""
    transport = FakeTransport()
    engine = transport.engine("tcp://e:1", "tcp://r:1")
    source = Source(engine.endpoint, engine.replay_endpoint, name="e")
    ticks = 0
    limits = replace(LIMITS, replay_timeout=0.4, reply_idle_timeout=0.2)
    with Subscriber(source, transport=transport, clock=transport.clock, limits=limits) as subscriber:
        stream = subscriber._multiplexer._entry("e", 0).stream
        tick = stream.tick

        def counted(now: float) -> None:
            nonlocal ticks
            ticks += 1
            tick(now)

        stream.tick = counted  # type: ignore[method-assign]
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
def test_each_hole_costs_one_request(lost: float) -> None:
    """The answer that fills it holds the live batch behind it, too, which proves whose answer it is."""
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
