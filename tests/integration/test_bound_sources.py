"""Many publishers behind one bound socket: each topic is a source with its own numbers, connection and trust."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from kvevents.errors import ConfigError, EndpointError, UnknownSourceError
from kvevents.events import BlockRemoved, EventBatch, KVEventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import Batch, DegradedReason, Gap, Reset, Source, Trust
from kvevents.subscriber import AsyncSubscriber, SocketOptions, Subscriber, ZmqTransport
from kvevents.wire import encode_batch, live_frames
from tools.ports import reserve_port

DEADLINE = 60.0


class Pod:
    """A publisher that connects to the consumer, as llm-d's pods do."""

    def __init__(self, endpoint: str, topic: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.linger = 0
        self._socket.connect(endpoint)
        self._topic = topic.encode()
        self.seq = 0

    def send(self, count: int = 1, rank: int | None = None) -> None:
        for _ in range(count):
            payload = encode_batch(KVEventBatch(0.0, [BlockRemoved([self.seq])], rank))
            self._socket.send_multipart(live_frames(self._topic, self.seq, payload))
            self.seq += 1

    def close(self) -> None:
        self._context.destroy(linger=0)


def send_all(made: list[Pod]) -> Callable[[], None]:
    """Return what lets each pod send one batch."""

    def act() -> None:
        for pod in made:
            pod.send()

    return act


class Received:
    """What a subscriber has delivered, by source."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.deliveries: dict[str, list[Any]] = {}

    def until(self, condition: Callable[[], bool], act: Callable[[], None] = lambda: None) -> None:
        """Receive until `condition` holds; call `act` repeatedly meanwhile."""
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, (self.deliveries, self.subscriber.statuses())
            act()
            for delivery in self.subscriber.receive_many(timeout=0.02):
                self.deliveries.setdefault(delivery.source, []).append(delivery)

    def numbers(self, source: str) -> list[int]:
        return [each.seq for each in self.deliveries.get(source, []) if isinstance(each, Batch)]

    def connect(self, pod: Pod, source: str) -> None:
        """Have the pod send until its messages arrive: a PUB socket drops messages before it knows of the subscription."""
        before = len(self.numbers(source))
        self.until(lambda: len(self.numbers(source)) > before, pod.send)


@contextmanager
def pods(endpoint: str, *topics: str) -> Iterator[list[Pod]]:
    """Yield pods, and close them."""
    made = [Pod(endpoint, topic) for topic in topics]
    try:
        yield made
    finally:
        for pod in made:
            pod.close()


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{reserve_port()}"


def test_each_topic_is_a_source_with_its_own_numbers_and_trust(endpoint: str) -> None:
    """The batches of each pod are numbered from 0. A restart of a pod resets only the pod's source. A pod that leaves is
    STALE."""
    source = Source(endpoint, bind=True, topic="kv@", by_topic=True)
    with Subscriber(source) as subscriber, pods(endpoint, "kv@a@m", "kv@b@m", "other@c@m") as (a, b, c):
        assert subscriber.statuses() == []
        received = Received(subscriber)
        received.connect(a, "kv@a@m")
        received.connect(b, "kv@b@m")
        for _ in range(20):
            for pod in (a, b, c):
                pod.send()
        received.until(lambda: received.numbers("kv@a@m")[-1] == a.seq - 1 and received.numbers("kv@b@m")[-1] == b.seq - 1)
        assert set(received.deliveries) == {"kv@a@m", "kv@b@m"}
        for name in received.deliveries:
            first, *rest = received.numbers(name)
            assert rest == list(range(first + 1, first + 1 + len(rest)))
            assert DegradedReason.SHARED not in subscriber.status(name).degraded_reasons
        a.close()
        received.until(lambda: subscriber.trust("kv@a@m") == Trust.STALE)
        assert subscriber.trust("kv@b@m") == Trust.DEGRADED
        with pods(endpoint, "kv@a@m") as (again,):
            received.connect(again, "kv@a@m")
            assert [type(each) for each in received.deliveries["kv@a@m"] if not isinstance(each, Batch | Gap)] == [Reset]
        assert not any(isinstance(each, Reset) for each in received.deliveries["kv@b@m"])


def test_the_first_message_of_a_topic_is_delivered(endpoint: str) -> None:
    """Messages that arrive before the source is followed wait until it is followed."""
    source = Source(endpoint, bind=True, by_topic=True)
    with Subscriber(source) as subscriber, pods(endpoint, "first", "second") as (one, two):
        received = Received(subscriber)
        received.connect(one, "first")
        for pod in (one, two):
            received.until(lambda pod=pod: bool(received.numbers("first" if pod is one else "second")), pod.send)  # type: ignore[misc]
        first = received.deliveries["second"][0]
        assert isinstance(first, Batch) or (isinstance(first, Gap) and first.first == 0)


async def test_tasks_receive_from_sources_that_were_found(endpoint: str) -> None:
    """The event loop wakes for a source whose messages another one has read."""
    async with AsyncSubscriber(Source(endpoint, bind=True, by_topic=True)) as subscriber:
        with pods(endpoint, "a", "b") as made:
            found: set[str] = set()
            end = time.monotonic() + DEADLINE
            while found != {"a", "b"}:
                assert time.monotonic() < end
                for pod in made:
                    pod.send()
                found |= {each.source for each in await subscriber.receive_many(timeout=0.1)}


def test_a_source_that_was_removed_is_not_found_again(endpoint: str) -> None:
    """Neither is one whose finder was removed."""
    source = Source(endpoint, bind=True, by_topic=True)
    with Subscriber(source) as subscriber, pods(endpoint, "a", "b") as (a, b):
        received = Received(subscriber)
        received.connect(a, "a")
        received.connect(b, "b")
        subscriber.remove("a")
        a.send(3)
        before = b.seq
        received.until(lambda: received.numbers("b")[-1] >= before, b.send)
        assert [status.source for status in subscriber.statuses()] == ["b"]
        subscriber.remove(endpoint)
        assert subscriber.statuses() == []
        with pytest.raises(UnknownSourceError):
            subscriber.trust("b")
        end = time.monotonic() + DEADLINE
        while True:
            try:
                subscriber.add(source)
                break
            except EndpointError:  # libzmq frees the endpoint a moment after the socket was closed
                assert time.monotonic() < end
        received.connect(a, "a")


def test_an_application_decides_again_about_a_source_that_was_removed(endpoint: str) -> None:
    """Its next message finds it, or if it was ignored, its next connection."""
    is_wanted = True

    def choose(source: Source) -> Source | None:
        asked.append(source.topic)
        return source if is_wanted else None

    asked: list[str] = []
    with Subscriber(Source(endpoint, bind=True, by_topic=True), on_found=choose) as subscriber:
        received = Received(subscriber)
        with pods(endpoint, "a", "b") as (a, b):
            received.connect(a, "a")
            received.connect(b, "b")
            is_wanted = False
            subscriber.remove("a")
            received.until(lambda: asked == ["a", "b", "a"], a.send)
            a.send(5)
            before = b.seq
            received.until(lambda: received.numbers("b")[-1] > before, b.send)
            assert asked == ["a", "b", "a"]
            a.close()
            is_wanted = True
            with pods(endpoint, "a") as (again,):
                received.connect(again, "a")


def test_an_application_names_the_sources_that_are_found(endpoint: str) -> None:
    """The application can also ignore a source. Messages that a source sent before it got its name are not lost."""

    def name(source: Source) -> Source | None:
        asked.append(source.topic)
        return None if source.topic == "b" else replace(source, name=f"engine {source.topic}", rank=3)

    asked: list[str] = []
    with (
        Subscriber(Source(endpoint, bind=True, by_topic=True), on_found=name) as subscriber,
        pods(endpoint, "a", "b", "c") as (a, b, c),
    ):
        received = Received(subscriber)
        received.until(lambda: {"engine a", "engine c"} <= received.deliveries.keys() and "b" in asked, send_all([a, b, c]))
        assert sorted(asked) == ["a", "b", "c"]
        assert {(status.source, status.rank) for status in subscriber.statuses()} == {("engine a", 3), ("engine c", 3)}
        first, *rest = received.numbers("engine a")
        assert rest == list(range(first + 1, first + 1 + len(rest)))


def test_messages_of_a_topic_that_cannot_be_followed_are_dropped(endpoint: str) -> None:
    """Its name is in use: nothing of it may wait in memory."""
    transport = ZmqTransport()
    with Subscriber(Source(endpoint, bind=True, by_topic=True), transport=transport) as subscriber, pods(endpoint, "a") as (a,):
        subscriber.add(Source("tcp://127.0.0.1:9", name="a"))
        received = Received(subscriber)
        with pods(endpoint, "other") as (other,):
            received.until(lambda: "other" in received.deliveries, send_all([a, other]))
            received.until(lambda: received.numbers("other")[-1] == other.seq - 1, lambda: None)
        (socket,) = transport._bound_sockets.values()
        assert [feed.source.topic for feed in socket._feeds] == ["", "other"]


def test_topics_are_bounded(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    """A publisher that invents topics cannot fill the memory."""
    transport = ZmqTransport(options=SocketOptions(max_topics=3))
    source = Source(endpoint, bind=True, by_topic=True)
    topics = [f"t{number}" for number in range(6)]
    with Subscriber(source, transport=transport) as subscriber, pods(endpoint, *topics) as made:
        received = Received(subscriber)
        for topic, pod in list(zip(topics, made, strict=True))[:3]:
            received.connect(pod, topic)
        received.until(lambda: "more than 3 topics" in caplog.text, send_all(made))
        assert len(subscriber.statuses()) == 3


def test_sources_with_replay_share_a_bound_endpoint(endpoint: str) -> None:
    """Each is verified by its own replay endpoint, and is EXACT."""
    publishers = [
        ZmqEventPublisher(0, endpoint, f"tcp://127.0.0.1:{reserve_port()}", topic=f"kv@{rank}", bind=False) for rank in range(2)
    ]
    sources = [
        Source(endpoint, publisher.replay_endpoint, bind=True, topic=f"kv@{rank}", name=f"e{rank}")
        for rank, publisher in enumerate(publishers)
    ]
    with Subscriber(sources) as subscriber:
        received = Received(subscriber)

        def publish() -> None:
            for publisher in publishers:
                publisher.publish(EventBatch(0.0, [BlockRemoved([1])]))

        received.until(lambda: all(status.trust == Trust.EXACT for status in subscriber.statuses()), publish)
        assert not [each for found in received.deliveries.values() for each in found if isinstance(each, Reset)]
    for publisher in publishers:
        publisher.shutdown()


def test_a_topic_that_begins_with_another_topic_is_a_source_of_its_own(endpoint: str) -> None:
    source = Source(endpoint, bind=True, topic="kv@", by_topic=True)
    with Subscriber(source) as subscriber, pods(endpoint, "kv@a@m", "kv@a@m2") as (a, b):
        received = Received(subscriber)
        received.connect(a, "kv@a@m")
        received.connect(b, "kv@a@m2")
        assert not any(isinstance(each, Reset) for each in received.deliveries["kv@a@m"])
        assert DegradedReason.SHARED not in subscriber.status("kv@a@m").degraded_reasons


@pytest.mark.parametrize("by_topic", [True, False])
def test_two_publishers_with_one_topic_are_named(endpoint: str, by_topic: bool) -> None:
    """The degraded reason names two publishers instead of many restarts. The reason ends when one publisher has left."""
    name = "kv@a" if by_topic else endpoint
    with (
        Subscriber(Source(endpoint, bind=True, topic="kv@", by_topic=by_topic)) as subscriber,
        pods(endpoint, "kv@a", "kv@a") as (one, two),
    ):
        received = Received(subscriber)
        received.connect(one, name)

        def send() -> None:
            one.send()
            two.send()

        received.until(lambda: DegradedReason.SHARED in subscriber.status(name).degraded_reasons, send)
        assert "two publishers" in str(subscriber.trust(name))
        two.close()
        received.until(lambda: DegradedReason.SHARED not in subscriber.status(name).degraded_reasons, one.send)


def test_two_topics_in_one_source_are_named(endpoint: str) -> None:
    """A source without `by_topic`, whose topic is the prefix of two publishers' topics."""
    source = Source(endpoint, bind=True, topic="kv@", name="e")
    with Subscriber(source) as subscriber, pods(endpoint, "kv@a@m", "kv@b@m") as made:
        received = Received(subscriber)
        received.until(
            lambda: bool(subscriber.statuses()) and DegradedReason.SHARED in subscriber.status("e").degraded_reasons,
            send_all(made),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [({"topic": "a"}, "with the topic 'a'"), ({"replay_endpoint": "tcp://127.0.0.1:9", "by_topic": True}, "by_topic needs")],
)
def test_sources_that_cannot_share_an_endpoint_are_refused(endpoint: str, change: dict[str, Any], message: str) -> None:
    """The error says what to do."""
    with Subscriber(Source(endpoint, bind=True, topic="a", name="first")) as subscriber:
        with pytest.raises(ConfigError, match=message):
            subscriber.add(Source(**({"endpoint": endpoint, "bind": True} | change)))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="by_topic needs"):
            Source(endpoint, by_topic=True)
        assert len(subscriber.statuses()) == 1


@pytest.mark.parametrize(
    ("stated", "is_swapped"), [((0, 1), False), ((1, 0), True), ((0, 0), False), ((None, None), False), ((5, 6), False)]
)
def test_swapped_ports_of_ranks_are_named(stated: tuple[int | None, int | None], is_swapped: bool) -> None:
    """The ports are swapped if each stream has batches that state the other's rank."""
    publishers = [ZmqEventPublisher(0, f"tcp://127.0.0.1:{reserve_port()}", bind=True) for _ in stated]
    sources = [Source(publisher.endpoint, name="e", rank=rank) for rank, publisher in enumerate(publishers)]

    def publish() -> None:
        for publisher, rank in zip(publishers, stated, strict=True):
            publisher.publish(KVEventBatch(0.0, [BlockRemoved([1])], rank))

    with Subscriber(sources) as subscriber:
        received = Received(subscriber)

        def have_arrived() -> bool:
            ranks = [each.rank for each in received.deliveries.get("e", [])]
            return min(ranks.count(0), ranks.count(1)) > 10

        def are_named() -> list[bool]:
            return [DegradedReason.RANK in status.degraded_reasons for status in subscriber.statuses()]

        received.until(have_arrived, publish)
        if is_swapped:
            received.until(lambda: are_named() == [True, True], publish)
        assert are_named() == [is_swapped, is_swapped]
        # A publisher adds its own rank, 0, to batches without one.
        expected = {rank: other or 0 for rank, other in enumerate(stated)}
        assert {each.rank: each.data_parallel_rank for each in received.deliveries["e"] if isinstance(each, Batch)} == expected
    for publisher in publishers:
        publisher.shutdown()
