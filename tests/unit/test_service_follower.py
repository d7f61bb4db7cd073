"""The follower thread writes events to the index and runs submitted tasks in between."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

from kvevents.events import BlockRemoved
from kvevents.index import ApplyResult, PrefixIndex
from kvevents.plane.log_subscriber import LogSubscriber
from kvevents.service.fleet.fleet import Fleet
from kvevents.service.fleet.follower import Follower, IndexSink
from kvevents.service.fleet.registration import Registration
from kvevents.stream import RawBatch, RawDelivery, StreamLimits
from kvevents.subscriber import Subscriber
from kvevents.testing.fake_transport import FakeTransport


def test_a_cancelled_task_is_skipped() -> None:
    """The thread does not run it, does not end because of it, and runs later tasks."""
    sink = IndexSink(PrefixIndex())
    follower = Follower(LogSubscriber(lambda: 0.0, lambda _: None, sink), sink)
    follower.start()
    begun, may_continue = threading.Event(), threading.Event()
    done: list[str] = []

    def block_thread() -> None:
        begun.set()
        may_continue.wait(60.0)

    follower.submit(block_thread)
    assert begun.wait(60.0)
    cancelled = follower.submit(lambda: done.append("cancelled"))
    assert cancelled.cancel()
    may_continue.set()
    follower.submit(lambda: done.append("awaited")).result(60.0)
    assert done == ["awaited"]
    assert follower.stop()


def test_trust_is_lowered_before_the_index_has_the_batch_that_lowers_it() -> None:
    """A replayed batch may come from another engine, so an answer that counts it must not be EXACT."""
    transport = FakeTransport()
    engine = transport.engine("tcp://engine:1", "tcp://engine:2")
    index = PrefixIndex()
    fleet = Fleet(index, max_sources=10)
    seen: list[tuple[bool, str]] = []
    states: list[str] = []

    class RecordingIndex:
        """The index, which records the trust that answers would have when deliveries arrive."""

        def apply_many(self, deliveries: Sequence[RawDelivery]) -> list[ApplyResult]:
            states.append(fleet.members[registration.key].trust_status.state)
            return index.apply_many(deliveries)

    sink = IndexSink(cast("PrefixIndex", RecordingIndex()), fleet)
    subscriber = Subscriber(decode=False, transport=transport, clock=transport.clock, sink=sink)
    fleet.follower.subscriber.close()  # the subscriber has sockets
    follower = fleet.follower = Follower(subscriber, sink)
    registration = Registration(instance="e", endpoint=engine.endpoint, replay_endpoint=engine.replay_endpoint, model="m")
    fleet.register(registration)

    def follow() -> None:
        for _ in range(5):
            deliveries = subscriber.receive_many(timeout=0)
            follower._count(deliveries)
            is_replayed = any(isinstance(delivery, RawBatch) and delivery.replayed for delivery in deliveries)
            seen.extend([(is_replayed, state) for state in states])
            states.clear()

    for _ in range(5):
        engine.publish(BlockRemoved([1]))
        follow()
    assert seen[-1] == (False, "EXACT")
    seen.clear()
    engine.publish(BlockRemoved([1]), lost=True)
    transport.clock.advance(StreamLimits().idle_before_probe)
    follow()
    assert [state for is_replayed, state in seen if is_replayed]
    assert "EXACT" not in [state for is_replayed, state in seen if is_replayed]
    for _ in range(2):
        engine.publish(BlockRemoved([3]))
        follow()
    assert fleet.members[registration.key].trust_status.state == "EXACT"
    subscriber.remove(*registration.key)
    fleet.on_received([registration.key])  # as if a log reported that the stream left after its last batch
