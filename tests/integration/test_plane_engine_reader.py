"""The thread that follows engines: events become records, and no engine's fault ends the thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bridge_cases import TalkingEngine
from kvevents.events import BlockRemoved
from kvevents.plane.engine_reader import MAX_REASON, EngineReader, EngineRecord
from kvevents.plane.partition_state import ResumePoint
from kvevents.plane.records import BatchRecord, GapRecord, IncarnationRecord, TrustRecord
from kvevents.stream import Checkpoint, Source, StreamLimits, Trust
from kvevents.testing.fake_transport import FakeTransport
from plane_cases import SECONDS
from publisher_cases import held
from service_cases import until


class Collector:
    """An `EngineReader`, and the records that it has delivered."""

    def __init__(self, **options: Any) -> None:
        self.delivered: list[EngineRecord] = []
        self.room = threading.Event()
        self.room.set()
        self.refused = threading.Event()
        """Set when the thread has asked for room, and the queue was full."""
        self.listener = EngineReader("bridge", self.delivered.extend, self._has_room, **options)

    def _has_room(self) -> bool:
        if not self.room.is_set():
            self.refused.set()
        return self.room.is_set()

    @property
    def batches(self) -> list[BatchRecord]:
        return [each.record for each in list(self.delivered) if isinstance(each.record, BatchRecord)]

    @property
    def trust(self) -> list[str]:
        return [each.record.trust for each in list(self.delivered) if isinstance(each.record, TrustRecord)]

    def until(self, count: int) -> None:
        until(f"{count} batches", lambda: len(self.batches) == count, SECONDS)


@contextmanager
def listening(**options: Any) -> Iterator[Collector]:
    collector = Collector(**options)
    collector.listener.start()
    try:
        yield collector
    finally:
        assert collector.listener.stop()
        assert collector.listener.failure is None


def test_batches_resets_gaps_and_trust_become_records() -> None:
    with TalkingEngine() as engine, listening() as collector:
        collector.listener.follow(engine.source, ResumePoint(None, 7), follow_id=3)
        engine.say(4)
        collector.until(4)
        engine.say(1)  # the others may all have come by replay
        collector.until(5)
        until("trust", lambda: collector.trust[-1:] == ["EXACT"], SECONDS)
        with held(engine.publisher):
            pass  # it has burnt a number
        engine.say(1)
        until("less trust", lambda: collector.trust[-1] == "DEGRADED", SECONDS)
        assert [each.record for each in collector.delivered if isinstance(each.record, GapRecord)] == [
            GapRecord("engine", 0, 7, 5, 5)
        ]
        engine.restart()
        engine.say(1)
        until("a reset", lambda: any(isinstance(each.record, IncarnationRecord) for each in collector.delivered), SECONDS)
        until("the new life", lambda: collector.batches[-1].incarnation == 8, SECONDS)
        assert {each.follow_id for each in collector.delivered} == {3}
        assert {each.incarnation for each in collector.batches[:5]} == {7}


def test_a_stream_resumes_at_the_end_of_the_log_or_begins_again() -> None:
    with TalkingEngine() as engine, listening() as collector:
        engine.say(5)
        collector.listener.follow(engine.source, ResumePoint(Checkpoint("engine", 0, 4, -1), 0), follow_id=1)
        until("batches", lambda: len(collector.batches) >= 5, SECONDS)
        assert isinstance(collector.delivered[0].record, TrustRecord | IncarnationRecord)
        assert [each.record.incarnation for each in collector.delivered if isinstance(each.record, IncarnationRecord)] == [5]
        assert {each.incarnation for each in collector.batches} == {5}


@pytest.mark.parametrize("receive_queue", [1, 100_000])
def test_without_room_nothing_is_delivered_and_nothing_is_lost(receive_queue: int) -> None:
    """However many batches find room in the connection meanwhile."""
    with TalkingEngine() as engine, listening(receive_queue=receive_queue) as collector:
        collector.listener.follow(engine.source, ResumePoint(None, 0), follow_id=1)
        engine.say(5)
        collector.until(5)
        collector.room.clear()
        assert collector.refused.wait(SECONDS)
        engine.say(200)
        until("the engine to have sent it", lambda: engine.publisher.stats().published == 205, SECONDS)
        before = len(collector.batches)
        collector.room.set()
        collector.until(205)
        assert before < 205
        assert [each.seq for each in collector.batches] == list(range(205))


def test_an_unfollowed_stream_delivers_nothing_more_and_can_be_followed_again() -> None:
    with TalkingEngine("one") as one, TalkingEngine("two") as two, listening() as collector:
        for turn, engine in enumerate((one, two)):
            collector.listener.follow(engine.source, ResumePoint(None, 0), turn)
            engine.say(3)
        collector.until(6)
        collector.listener.unfollow(("one", 0))
        collector.listener.unfollow(("absent", 0))
        until("it to be left", lambda: ("one", 0) not in collector.listener._follow_ids, SECONDS)
        one.say(3)
        two.say(3)
        collector.until(9)
        collector.listener.follow(one.source, ResumePoint(None, 0), follow_id=2)
        collector.until(15)
        assert [
            each.record.seq for each in collector.delivered if isinstance(each.record, BatchRecord) and each.follow_id == 2
        ] == list(range(6))


def test_an_invalid_address_is_reported_as_trust() -> None:
    with TalkingEngine() as engine, listening() as collector:
        collector.listener.follow(Source("ipc:///" + "z" * 2 * MAX_REASON, name="odd"), ResumePoint(None, 0), follow_id=5)
        until("the report", lambda: collector.trust == ["CONNECTING"], SECONDS)
        said = collector.delivered[0].record
        assert isinstance(said, TrustRecord)
        assert (said.key, collector.delivered[0].follow_id, len(said.reason)) == (("odd", 0), 5, MAX_REASON)
        collector.listener.unfollow(("odd", 0))
        collector.listener.follow(engine.source, ResumePoint(None, 0), follow_id=6)
        engine.say(1)
        collector.until(1)


def test_one_that_never_began_closes_its_sockets() -> None:
    listener = EngineReader("bridge", lambda _: None, lambda: True)
    assert listener.stop()
    assert repr(listener._subscriber) == "<Subscriber closed>"


def test_idle_streams_cost_nothing_and_each_change_of_trust_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only streams with a change are examined, whatever their number."""
    transport = FakeTransport()
    delivered: list[EngineRecord] = []
    engines = [transport.engine(f"tcp://engine-{number}:1", f"tcp://engine-{number}:2") for number in range(50)]
    listener = EngineReader("bridge", delivered.extend, lambda: True, transport=transport, clock=transport.clock)
    for number, engine in enumerate(engines):
        source = Source(engine.endpoint, engine.replay_endpoint, name=str(number))
        listener.follow(source, ResumePoint(None, 0), 1)
        engine.publish(BlockRemoved([1]))

    def turn() -> None:
        for _ in range(5):
            listener._check_trust_at = 0.0
            listener._turn()

    turn()
    for engine in engines:
        engine.publish(BlockRemoved([1]))  # the first one to come live
    turn()
    assert {each.record.key for each in delivered if isinstance(each.record, TrustRecord) and each.record.trust == "EXACT"} == {
        (str(number), 0) for number in range(50)
    }
    delivered.clear()
    turn()
    assert delivered == []
    engines[7].publish(BlockRemoved([1]))
    looked_at: list[int] = []
    look = listener._subscriber.trust_changes

    def noting() -> list[tuple[tuple[str, int], Trust]]:
        looked_at.append(len(listener._subscriber._multiplexer._changed))
        return look()

    monkeypatch.setattr(listener._subscriber, "trust_changes", noting)
    listener._check_trust_at = float("inf")
    listener._turn()
    assert looked_at == [1]
    assert [type(each.record) for each in delivered] == [BatchRecord]
    delivered.clear()
    engines[7].disconnect()
    turn()
    assert [each.record.key for each in delivered] == [("7", 0)]


def test_less_trust_is_reported_together_with_what_it_is_about() -> None:
    """A replayed batch may be another engine's: its reader must not be EXACT until the next look."""
    transport = FakeTransport()
    deliveries: list[list[EngineRecord]] = []
    engine = transport.engine("tcp://engine:1", "tcp://engine:2")
    listener = EngineReader(
        "bridge", lambda records: deliveries.append(list(records)), lambda: True, transport=transport, clock=transport.clock
    )
    listener.follow(Source(engine.endpoint, engine.replay_endpoint, name="engine"), ResumePoint(None, 0), 1)
    engine.publish(BlockRemoved([1]))
    for _ in range(10):
        listener._check_trust_at = 0.0
        listener._turn()
    engine.publish(BlockRemoved([1]))
    for _ in range(10):
        listener._check_trust_at = 0.0
        listener._turn()
    assert _trust_in([each for records in deliveries for each in records])[-1] == "EXACT"
    deliveries.clear()
    engine.publish(BlockRemoved([1]), lost=True)
    transport.clock.advance(StreamLimits().idle_before_probe)
    listener._check_trust_at = float("inf")
    for _ in range(5):
        listener._turn()
    for records in deliveries:
        replayed = [each for each in records if isinstance(each.record, BatchRecord) and each.record.replayed]
        assert not replayed or _trust_in(records), "nothing was said of trust"
    assert deliveries


def _trust_in(records: list[EngineRecord]) -> list[str]:
    return [each.record.trust for each in records if isinstance(each.record, TrustRecord)]


def test_a_thread_of_the_library_leaves_the_process_as_it_was() -> None:
    """The limit of a thread's runtime belongs to the process, which is not the library's."""
    before = sys.getswitchinterval()
    with TalkingEngine() as engine, listening() as collector:
        collector.listener.follow(engine.source, ResumePoint(None, 0), 1)
        engine.say(1)
        collector.until(1)
        assert sys.getswitchinterval() == before
    assert sys.getswitchinterval() == before
