"""Tests of the thread that follows engines: events become records, and a fault of an engine does not end the thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bridge_cases import PublishingEngine
from kvevents.events import BlockRemoved
from kvevents.stream import Checkpoint, Source, StreamLimits
from kvevents.testing.fake_transport import FakeEngine, FakeTransport
from kvevents_plane.engine_reader import MAX_REASON_CHARACTERS, PAUSE_SECONDS, TRUST_CHECK_SECONDS, EngineReader, EngineRecord
from kvevents_plane.partition_state import ResumePoint
from kvevents_plane.records import BatchRecord, GapRecord, IncarnationRecord, TrustRecord
from plane_cases import SECONDS
from publisher_cases import hold_publisher
from service_cases import wait_for

TOO_LONG = "ipc:///" + "z" * 2 * MAX_REASON_CHARACTERS
"""An endpoint to which no socket can connect; the reason has it."""


class Collector:
    """Holds an `EngineReader` and collects the records that it delivers."""

    def __init__(self, **options: Any) -> None:
        self.delivered: list[EngineRecord] = []
        self.has_room = threading.Event()
        self.has_room.set()
        self.was_refused = threading.Event()
        """Set when the thread has checked for room while the queue was full."""
        self.reader = EngineReader("bridge", self.delivered.extend, self._has_room, **options)

    def _has_room(self) -> bool:
        if not self.has_room.is_set():
            self.was_refused.set()
        return self.has_room.is_set()

    @property
    def batches(self) -> list[BatchRecord]:
        return [each.record for each in list(self.delivered) if isinstance(each.record, BatchRecord)]

    @property
    def trust(self) -> list[str]:
        return [each.record.trust for each in list(self.delivered) if isinstance(each.record, TrustRecord)]

    def wait_for(self, count: int) -> None:
        wait_for(f"{count} batches", lambda: len(self.batches) == count, SECONDS)


@contextmanager
def reading(**options: Any) -> Iterator[Collector]:
    collector = Collector(**options)
    collector.reader.start()
    try:
        yield collector
    finally:
        assert collector.reader.stop()
        assert collector.reader.failure is None


def test_batches_resets_gaps_and_trust_become_records() -> None:
    with PublishingEngine() as engine, reading() as collector:
        collector.reader.follow(engine.source, ResumePoint(None, 7), follow_id=3)
        engine.publish_next(4)
        collector.wait_for(4)
        engine.publish_next(1)  # the other batches may all have been replayed
        collector.wait_for(5)
        wait_for("trust", lambda: collector.trust[-1:] == ["EXACT"], SECONDS)
        with hold_publisher(engine.publisher):
            pass  # uses up a number
        engine.publish_next(1)
        wait_for("less trust", lambda: collector.trust[-1] == "DEGRADED", SECONDS)
        assert [each.record for each in collector.delivered if isinstance(each.record, GapRecord)] == [
            GapRecord("engine", 0, 7, 5, 5)
        ]
        engine.restart()
        engine.publish_next(1)
        wait_for("a reset", lambda: any(isinstance(each.record, IncarnationRecord) for each in collector.delivered), SECONDS)
        wait_for("the new incarnation", lambda: collector.batches[-1].incarnation == 8, SECONDS)
        assert {each.follow_id for each in collector.delivered} == {3}
        assert {each.incarnation for each in collector.batches[:5]} == {7}


def test_a_stream_resumes_at_the_end_of_the_log_or_begins_again() -> None:
    with PublishingEngine() as engine, reading() as collector:
        engine.publish_next(5)
        collector.reader.follow(engine.source, ResumePoint(Checkpoint("engine", 0, 4, -1), 0), follow_id=1)
        wait_for("batches", lambda: len(collector.batches) >= 5, SECONDS)
        assert isinstance(collector.delivered[0].record, TrustRecord | IncarnationRecord)
        assert [each.record.incarnation for each in collector.delivered if isinstance(each.record, IncarnationRecord)] == [5]
        assert {each.incarnation for each in collector.batches} == {5}


@pytest.mark.parametrize("receive_queue", [1, 100_000])
def test_while_the_queue_is_full_nothing_is_delivered_and_nothing_is_lost(receive_queue: int) -> None:
    """This holds regardless of how many batches fit into the receive queue of the connection."""
    with PublishingEngine() as engine, reading(receive_queue=receive_queue) as collector:
        collector.reader.follow(engine.source, ResumePoint(None, 0), follow_id=1)
        engine.publish_next(5)
        collector.wait_for(5)
        collector.has_room.clear()
        assert collector.was_refused.wait(SECONDS)
        engine.publish_next(200)
        wait_for("the engine to send all batches", lambda: engine.publisher.stats().published == 205, SECONDS)
        before = len(collector.batches)
        collector.has_room.set()
        collector.wait_for(205)
        assert before < 205
        assert [each.seq for each in collector.batches] == list(range(205))


def test_an_unfollowed_stream_delivers_nothing_more_and_can_be_followed_again() -> None:
    with PublishingEngine("one") as one, PublishingEngine("two") as two, reading() as collector:
        for turn, engine in enumerate((one, two)):
            collector.reader.follow(engine.source, ResumePoint(None, 0), turn)
            engine.publish_next(3)
        collector.wait_for(6)
        collector.reader.unfollow(("one", 0))
        collector.reader.unfollow(("absent", 0))
        collector.reader.follow(Source(TOO_LONG, name="odd"), ResumePoint(None, 0), follow_id=3)
        wait_for("a report of what follows", lambda: any(each.follow_id == 3 for each in list(collector.delivered)), SECONDS)
        one.publish_next(3)
        two.publish_next(3)
        collector.wait_for(9)
        collector.reader.follow(one.source, ResumePoint(None, 0), follow_id=2)
        collector.wait_for(15)
        assert [
            each.record.seq for each in collector.delivered if isinstance(each.record, BatchRecord) and each.follow_id == 2
        ] == list(range(6))


def test_an_invalid_address_is_reported_as_the_reason_of_the_trust() -> None:
    with PublishingEngine() as engine, reading() as collector:
        collector.reader.follow(Source(TOO_LONG, name="odd"), ResumePoint(None, 0), follow_id=5)
        wait_for("the report", lambda: collector.trust == ["CONNECTING"], SECONDS)
        report = collector.delivered[0].record
        assert isinstance(report, TrustRecord)
        assert (report.key, collector.delivered[0].follow_id, len(report.reason)) == (("odd", 0), 5, MAX_REASON_CHARACTERS)
        collector.reader.unfollow(("odd", 0))
        collector.reader.follow(engine.source, ResumePoint(None, 0), follow_id=6)
        engine.publish_next(1)
        collector.wait_for(1)


class Script:
    """Runs an `EngineReader` of engines in memory. Before each turn of the reader, the script continues and returns whether the
    reader has room.

    A turn with room waits for no real time. A turn without room waits `PAUSE_SECONDS`, and reads nothing.
    """

    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.deliveries: list[list[EngineRecord]] = []
        self.reader = EngineReader(
            "bridge", self.deliveries.append, self._go_on, transport=self.transport, clock=self.transport.clock
        )
        self._script: Iterator[bool] = iter(())

    @property
    def delivered(self) -> list[EngineRecord]:
        return [record for records in self.deliveries for record in records]

    def follow(self, name: str) -> FakeEngine:
        """Follow an engine that has published one batch."""
        engine = self.transport.engine(f"tcp://{name}:1", f"tcp://{name}:2")
        self.reader.follow(Source(engine.endpoint, engine.replay_endpoint, name=name), ResumePoint(None, 0), 1)
        engine.publish(BlockRemoved([1]))
        return engine

    def run(self, script: Iterator[bool]) -> None:
        self._script = script
        self.reader.run()
        if self.reader.failure is not None:
            raise self.reader.failure

    def _go_on(self) -> bool:
        has_room = next(self._script, None)
        if has_room is None:
            self.reader.stop()
        return bool(has_room)


MANY_TURNS = [True] * 10
TRUST_IS_DUE = [*MANY_TURNS, *[False] * (1 + int(TRUST_CHECK_SECONDS / PAUSE_SECONDS)), True, True]
"""Turns after which a change of trust must have been reported even if nothing else was delivered."""


def test_a_reader_that_was_never_started_closes_its_transport() -> None:
    class RecordingTransport(FakeTransport):
        is_closed = False

        def close(self) -> None:
            super().close()
            self.is_closed = True

    transport = RecordingTransport()
    assert EngineReader("bridge", lambda _: None, lambda: True, transport=transport).stop()
    assert transport.is_closed


def test_each_change_of_trust_is_reported_once() -> None:
    """Nothing is reported of a stream whose trust does not change, regardless of what other streams do."""
    script = Script()
    engines = [script.follow(str(number)) for number in range(50)]

    def run() -> Iterator[bool]:
        yield from MANY_TURNS
        for engine in engines:
            engine.publish(BlockRemoved([1]))  # the first one that arrives live
        yield from TRUST_IS_DUE
        exact = [each.record.key for each in script.delivered if _trust_in([each]) == ["EXACT"]]
        assert sorted(exact) == sorted((str(number), 0) for number in range(50))
        script.deliveries.clear()
        yield from TRUST_IS_DUE
        assert script.delivered == []
        engines[7].publish(BlockRemoved([1]))
        yield from MANY_TURNS
        assert [type(each.record) for each in script.delivered] == [BatchRecord]
        script.deliveries.clear()
        engines[7].disconnect()
        yield from TRUST_IS_DUE
        assert [each.record.key for each in script.delivered] == [("7", 0)]

    script.run(run())


def test_a_replayed_batch_and_the_lower_trust_are_delivered_together() -> None:
    """A replayed batch may be of another incarnation: the log must not say EXACT about it until the next check."""
    script = Script()
    engine = script.follow("engine")

    def run() -> Iterator[bool]:
        yield from MANY_TURNS
        engine.publish(BlockRemoved([1]))
        yield from TRUST_IS_DUE
        assert _trust_in(script.delivered)[-1] == "EXACT"
        script.deliveries.clear()
        engine.publish(BlockRemoved([1]), lost=True)
        script.transport.clock.advance(StreamLimits().idle_before_probe)
        yield from MANY_TURNS

    script.run(run())
    for records in script.deliveries:
        replayed = [each for each in records if isinstance(each.record, BatchRecord) and each.record.replayed]
        assert not replayed or _trust_in(records), "a replayed batch is delivered without trust"
    assert script.deliveries


def _trust_in(records: list[EngineRecord]) -> list[str]:
    return [each.record.trust for each in records if isinstance(each.record, TrustRecord)]


def test_the_thread_does_not_change_the_switch_interval_of_the_process() -> None:
    """The switch interval of threads belongs to the process and not to the library."""
    before = sys.getswitchinterval()
    with PublishingEngine() as engine, reading() as collector:
        collector.reader.follow(engine.source, ResumePoint(None, 0), 1)
        engine.publish_next(1)
        collector.wait_for(1)
        assert sys.getswitchinterval() == before
    assert sys.getswitchinterval() == before
