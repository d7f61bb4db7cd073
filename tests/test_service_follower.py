"""The thread that brings what is followed into the index, and does what it is ordered in between."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

from kvevents.events import BlockRemoved
from kvevents.index import Applied, PrefixIndex
from kvevents.plane.subscriber import LogSubscriber
from kvevents.service.fleet import Fleet
from kvevents.service.follower import Follower, Listener
from kvevents.service.registration import Registration
from kvevents.stream import RawBatch, RawDelivery, StreamLimits
from kvevents.subscriber import Subscriber
from kvevents.testing.fake_transport import FakeTransport


def test_an_order_that_nobody_waits_for_any_more_is_passed_over() -> None:
    """It neither is done nor ends the thread, and those after it are done."""
    index = PrefixIndex()
    follower = Follower(LogSubscriber(lambda: 0.0, lambda _: None), index, Listener())
    follower.start()
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def hold() -> None:
        begun.set()
        go_on.wait(10.0)

    follower.order(hold)
    assert begun.wait(10.0)
    given_up = follower.order(lambda: done.append("given up"))
    assert given_up.cancel()
    go_on.set()
    follower.order(lambda: done.append("waited for")).result(10.0)
    assert done == ["waited for"]
    assert follower.stop()


def test_less_trust_is_told_before_what_it_is_about_is_in_the_index() -> None:
    """What replay has brought may be another engine's: an answer that counts it must not say EXACT."""
    transport = FakeTransport()
    engine = transport.engine("tcp://engine:1", "tcp://engine:2")
    index = PrefixIndex()
    fleet = Fleet(index, max_sources=10)
    told: list[tuple[bool, str]] = []
    subscriber = Subscriber(decode=False, transport=transport, clock=transport.clock)
    fleet.follower.subscriber.close()  # which has sockets
    follower = fleet.follower = Follower(subscriber, index, fleet)
    registration = Registration(instance="e", endpoint=engine.endpoint, replay_endpoint=engine.replay_endpoint, model="m")
    fleet.register(registration)

    def turn() -> None:
        for _ in range(5):
            deliveries = subscriber.receive_many(timeout=0)
            follower._apply(deliveries)
            is_replayed = any(isinstance(delivery, RawBatch) and delivery.replayed for delivery in deliveries)
            told.extend([(is_replayed, state) for state in states])
            states.clear()

    states: list[str] = []

    class Watched:
        """The index, which notes what is told of trust when something comes into it."""

        def apply_many(self, deliveries: Sequence[RawDelivery]) -> list[Applied]:
            states.append(fleet.members[registration.key].trusted.state)
            return index.apply_many(deliveries)

    follower._index = cast("PrefixIndex", Watched())
    for _ in range(5):
        engine.publish(BlockRemoved([1]))
        turn()
    assert told[-1] == (False, "EXACT")
    told.clear()
    engine.publish(BlockRemoved([1]), lost=True)
    transport.clock.advance(StreamLimits().quiet_before_probe)
    turn()
    assert [state for is_replayed, state in told if is_replayed]
    assert "EXACT" not in [state for is_replayed, state in told if is_replayed]
    for _ in range(2):
        engine.publish(BlockRemoved([3]))
        turn()
    assert fleet.members[registration.key].trusted.state == "EXACT"
    subscriber.remove(*registration.key)
    fleet.received([registration.key])  # as where a log says that a stream has left behind its last batch
