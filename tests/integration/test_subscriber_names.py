"""Host names are resolved outside of libzmq's thread: a slow or unknown name costs only its own source."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvevents.events import BlockRemoved, EventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import Batch, Source, Trust
from kvevents.subscriber import AsyncSubscriber, SocketOptions, Subscriber, ZmqTransport
from name_cases import (
    DEADLINE,
    Names,
    replace_names,  # noqa: F401 - a fixture, used by being here
)


@pytest.fixture
def publisher() -> Iterator[ZmqEventPublisher]:
    made = ZmqEventPublisher(0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    yield made
    made.shutdown()


def named(publisher: ZmqEventPublisher, host: str, **fields: Any) -> Source:
    """Return the source of a publisher, by a name of its host."""
    assert publisher.replay_endpoint is not None
    live, replay = (end.replace("127.0.0.1", host) for end in (publisher.endpoint, publisher.replay_endpoint))
    return Source(live, replay, name=host, **fields)


def receive_until_exact(subscriber: Subscriber, publisher: ZmqEventPublisher, name: str) -> None:
    """Publish and receive until the stream is EXACT."""
    end = time.monotonic() + DEADLINE
    while subscriber.trust(name) != Trust.EXACT:
        assert time.monotonic() < end, subscriber.statuses()
        publisher.publish(EventBatch(0.0, [BlockRemoved([1])]))
        subscriber.receive_many(timeout=0.02)


def test_a_slow_name_costs_only_its_own_source(names: Names, publisher: ZmqEventPublisher) -> None:
    """The others connect, receive and replay meanwhile. The slow one does so too when its name is known."""
    names.addresses = {"slow.example": ["127.0.0.1"], "quick.example": ["127.0.0.1"]}
    with Subscriber([named(publisher, "slow.example"), named(publisher, "quick.example")]) as subscriber:
        receive_until_exact(subscriber, publisher, "quick.example")
        assert subscriber.trust("slow.example") == Trust.CONNECTING
        names.release.set()
        receive_until_exact(subscriber, publisher, "slow.example")


async def test_the_event_loop_wakes_when_a_name_is_known(names: Names, publisher: ZmqEventPublisher) -> None:
    """Nothing else wakes it."""
    names.addresses = {"slow.example": ["127.0.0.1"]}
    publisher.publish(EventBatch(0.0, [BlockRemoved([1])]))
    timer = threading.Timer(0.2, names.release.set)
    timer.start()
    async with AsyncSubscriber(named(publisher, "slow.example")) as subscriber:
        assert isinstance(await subscriber.receive(DEADLINE), Batch)
    timer.join()


def test_an_unknown_name_is_named_and_resolved_again(names: Names, publisher: ZmqEventPublisher) -> None:
    """The reason of the trust says so, until the name is known."""
    transport = ZmqTransport(options=SocketOptions(reconnect_max_ms=100))
    with Subscriber(named(publisher, "late.example"), transport=transport) as subscriber:
        end = time.monotonic() + DEADLINE
        while "cannot be resolved" not in str(subscriber.trust()):
            assert time.monotonic() < end
            subscriber.receive(0.02)
        names.addresses["late.example"] = ["127.0.0.1"]
        receive_until_exact(subscriber, publisher, "late.example")
        assert subscriber.status().error == ""


def test_each_address_of_a_name_is_tried(names: Names, publisher: ZmqEventPublisher) -> None:
    """A name that has moved is resolved again, too: libzmq knows only the address before."""
    names.addresses["two.example"] = ["127.0.0.2", "127.0.0.1"]
    transport = ZmqTransport(options=SocketOptions(reconnect_max_ms=200))
    source = named(publisher, "two.example")
    source = Source(source.endpoint, publisher.replay_endpoint, name="two.example")
    with Subscriber(source, transport=transport) as subscriber:
        receive_until_exact(subscriber, publisher, "two.example")
    names.addresses["moved.example"] = ["127.0.0.3"]
    source = Source(named(publisher, "moved.example").endpoint, publisher.replay_endpoint, name="moved.example")
    with Subscriber(source, transport=ZmqTransport(options=SocketOptions(reconnect_max_ms=200))) as subscriber:
        subscriber.receive(0.3)
        names.addresses["moved.example"] = ["127.0.0.1"]
        receive_until_exact(subscriber, publisher, "moved.example")


def test_a_subscriber_that_is_closed_during_a_lookup_leaves_nothing_open(names: Names, publisher: ZmqEventPublisher) -> None:
    """The lookup ends in its thread, whenever it does."""
    subscriber = Subscriber(named(publisher, "slow.example"))
    assert subscriber.receive(0.05) is None
    subscriber.close()
    names.release.set()
    for thread in threading.enumerate():
        if thread.name == "kvevents-name":
            thread.join(DEADLINE)
            assert not thread.is_alive()
