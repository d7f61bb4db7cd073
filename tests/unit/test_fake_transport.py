"""The public fake transport lets users test a router without sockets and without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvevents.errors import ConfigError, EndpointError, TrustTimeoutError
from kvevents.events import AllBlocksCleared, BlockRemoved, Heartbeat
from kvevents.stream import Batch, DegradedReason, Delivery, Gap, Reset, Source, StreamLimits, Trust
from kvevents.subscriber import AsyncSubscriber, Subscriber, TrustChange, aio
from kvevents.subscriber.front_end import DELIVERIES_PER_SLICE
from kvevents.subscriber.multiplexer import MAX_READY_DELIVERIES, MESSAGES_PER_READ
from kvevents.testing import FakeEngine, FakeTransport

ENDPOINT, REPLAY = "tcp://engine:5557", "tcp://engine:5558"


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def engine(transport: FakeTransport) -> FakeEngine:
    return transport.engine(ENDPOINT, REPLAY)


def subscribe(transport: FakeTransport, *, replay: bool = True) -> Subscriber:
    return Subscriber(Source(ENDPOINT, REPLAY if replay else None, name="e"), transport=transport, clock=transport.clock)


def receive_all(subscriber: Subscriber[Any], seconds: float = 5.0) -> list[Delivery]:
    """Return everything that arrives until nothing has arrived for `seconds` of virtual time."""
    taken = []
    while (delivery := subscriber.receive(seconds)) is not None:
        taken.append(delivery)
    return taken


def test_published_batches_arrive(transport: FakeTransport, engine: FakeEngine) -> None:
    """Batches published before and after subscribing are delivered, and the clock does not advance while there is work."""
    engine.publish(BlockRemoved([1]))
    with subscribe(transport) as subscriber:
        engine.publish(BlockRemoved([2]), AllBlocksCleared())
        first, second = (subscriber.receive(1.0) for _ in range(2))
        assert isinstance(first, Batch)
        assert isinstance(second, Batch)
        assert (first.seq, first.replayed) == (0, True)
        assert second.events == [BlockRemoved([2]), AllBlocksCleared()]
        assert transport.clock() == 0.0


def test_waiting_advances_virtual_time(transport: FakeTransport, engine: FakeEngine) -> None:
    """A timeout takes no real time. The idle probe runs in virtual seconds and finds the lost batch."""
    with subscribe(transport) as subscriber:
        engine.publish(BlockRemoved([1]), lost=True)
        [batch] = receive_all(subscriber)
        assert isinstance(batch, Batch)
        assert batch.replayed
        assert transport.clock() >= StreamLimits().idle_before_probe
        assert subscriber.trust("e") == Trust.DEGRADED
        assert subscriber.status("e").degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
        engine.publish(BlockRemoved([2]))
        [batch] = receive_all(subscriber)
        assert isinstance(batch, Batch)
        assert not batch.replayed
        assert subscriber.trust("e") == Trust.EXACT


def test_restarts_gaps_and_a_dead_replay_endpoint_are_reported(transport: FakeTransport, engine: FakeEngine) -> None:
    """An unseen restart is a reset, a skipped number a gap, and a dead replay endpoint makes trust DEGRADED in bounded time."""
    with subscribe(transport) as subscriber:
        engine.publish(BlockRemoved([1]))
        engine.restart(unseen=[BlockRemoved([7]), BlockRemoved([8])])
        kinds = [type(item) for item in receive_all(subscriber)]
        assert kinds == [Batch, Reset, Batch, Batch]
        engine.skip_number()
        engine.publish(BlockRemoved([9]))
        assert [type(item) for item in receive_all(subscriber)] == [Gap, Batch]
        engine.answers_replay = False
        receive_all(subscriber, 120.0)
        assert subscriber.trust("e") == Trust.DEGRADED
        assert "does not answer" in subscriber.trust("e").reason


def test_the_log_names_the_first_message_that_is_not_a_batch(
    transport: FakeTransport, caplog: pytest.LogCaptureFixture
) -> None:
    """Without this line, the port of another publisher looks like an idle engine."""
    engine = transport.engine(ENDPOINT)
    with subscribe(transport, replay=False) as subscriber:
        engine.send_raw([b"garbage"])
        engine.send_raw([b"garbage"])
        assert subscriber.receive(0.1) is None
    lines = [record.getMessage() for record in caplog.records if "not a batch" in record.getMessage()]
    assert lines == ["e rank 0: ignored a message that is not a batch: not 3 frames; check the ports"]


def test_raw_frames_can_be_sent_and_without_a_replay_endpoint_nothing_is_requested(transport: FakeTransport) -> None:
    """Any frames can be sent. Without a replay endpoint the subscriber sends no request."""
    engine = transport.engine(ENDPOINT)
    with subscribe(transport, replay=False) as subscriber:
        engine.send_raw([b"garbage"])
        engine.publish_payload(b"\xc1")
        [batch] = receive_all(subscriber)
        assert isinstance(batch, Batch)
        assert batch.rejected
        assert engine.requests == []
        assert engine.next_seq == 1
        before = subscriber.status("e").counters
        assert before.malformed == {"not 3 frames": 1}
        engine.send_raw([b"garbage"])
        assert subscriber.receive(0.1) is None
        assert subscriber.status("e").counters.malformed == {"not 3 frames": 2}
        assert before.malformed == {"not 3 frames": 1}, "a status does not change after it was taken"


def test_the_fake_works_with_asyncio(transport: FakeTransport, engine: FakeEngine) -> None:
    """The same transport works with `AsyncSubscriber`."""

    async def scenario() -> Delivery | None:
        source = Source(ENDPOINT, REPLAY, name="e")
        async with AsyncSubscriber(source, transport=transport, clock=transport.clock) as subscriber:
            assert await subscriber.receive(3.0) is None
            engine.publish(BlockRemoved([1]))
            return await subscriber.receive(1.0)

    assert isinstance(asyncio.run(scenario()), Batch)


def test_a_test_that_would_wait_for_ever_fails_instead(transport: FakeTransport, engine: FakeEngine) -> None:
    """Without a timer and a timeout nothing could ever happen. That is an error instead of a hang."""
    with subscribe(transport, replay=False) as subscriber, pytest.raises(EndpointError, match="give it a timeout"):
        subscriber.receive()


def test_an_engine_must_be_started_first(transport: FakeTransport) -> None:
    """A mistyped endpoint is an error at once."""
    with pytest.raises(EndpointError, match="no fake engine at"):
        Subscriber("tcp://other:1", transport=transport)


def two_engines(transport: FakeTransport) -> tuple[FakeEngine, FakeEngine, Subscriber]:
    """Return an engine that does not answer and holds the only replay slot, a healthy engine that waits for the slot, and
    their subscriber."""
    silent = transport.engine("tcp://silent:5557", "tcp://silent:5558")
    silent.answers_replay = False
    engine = transport.engine(ENDPOINT, REPLAY)
    sources = [Source(silent.endpoint, silent.replay_endpoint, name="silent"), Source(ENDPOINT, REPLAY, name="e")]
    subscriber = Subscriber(sources, transport=transport, clock=transport.clock, max_concurrent_replays=1)
    while not silent.requests:
        subscriber.receive(0.01)
    return silent, engine, subscriber


def test_a_queued_replay_gets_the_slot_of_a_removed_source(transport: FakeTransport) -> None:
    """Removing a source frees its slot at once."""
    _silent, engine, subscriber = two_engines(transport)
    with subscriber:
        engine.publish(BlockRemoved([1]), lost=True)
        subscriber.remove("silent")
        assert isinstance(subscriber.receive(0.5), Batch)


def test_a_stream_that_left_the_replay_queue_can_queue_again(transport: FakeTransport) -> None:
    """A live batch can make a queued request unnecessary. The next request is queued as a new one."""
    silent, engine, subscriber = two_engines(transport)
    with subscriber:
        engine.publish(BlockRemoved([1]))
        assert isinstance(subscriber.receive(0.5), Batch)
        while subscriber.trust("e") != Trust.EXACT or subscriber.trust("silent") != Trust.DEGRADED:
            assert subscriber.receive(1.0) is None
        requests_before = len(silent.requests)
        while len(silent.requests) == requests_before:
            assert subscriber.receive(0.01) is None
        engine.publish(BlockRemoved([2]), lost=True)
        engine.publish(BlockRemoved([3]))
        assert [item.seq for item in receive_all(subscriber, 20.0) if isinstance(item, Batch)] == [1, 2]


class CountingSink:
    """Counts the deliveries that are applied between two turns of the event loop."""

    def __init__(self) -> None:
        self.count = self.most = 0

    def apply_many(self, deliveries: Sequence[Any], /) -> list[Any]:
        self.count += len(deliveries)
        self.most = max(self.most, self.count)
        return [SimpleNamespace(report=None) for _ in deliveries]


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize(("call", "most"), [("receive", 1), ("iterate", 1), ("receive_many", DELIVERIES_PER_SLICE)])
async def test_other_tasks_run_while_deliveries_are_ready(
    call: str, most: int, decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a gap closes, thousands of batches are ready at once. They are decoded and applied in many turns of the loop."""
    monkeypatch.setattr(aio, "MAX_TURN_SECONDS", 0.0)
    transport, sink = FakeTransport(), CountingSink()
    engine = transport.engine("tcp://engine:5557", "tcp://engine:5558")
    source = Source(engine.endpoint, engine.replay_endpoint)
    count = 100

    async def tick() -> None:
        while True:
            sink.count = 0
            await asyncio.sleep(0)

    async with AsyncSubscriber(source, transport=transport, clock=transport.clock, decode=decode, sink=sink) as subscriber:
        assert await subscriber.receive(1) is None
        engine.publish(BlockRemoved([0]), lost=True)
        for number in range(1, count):
            engine.publish(BlockRemoved([number]))
        ticking = asyncio.ensure_future(tick())
        received = 0
        while received < count:
            if call == "receive_many":
                received += len(await subscriber.receive_many(timeout=1))
            elif call == "receive":
                received += await subscriber.receive(timeout=1) is not None
            else:
                async for _ in subscriber:
                    received += 1
                    if received == count:
                        break
        ticking.cancel()
    assert sink.most <= most


def test_a_run_ends_when_many_deliveries_are_ready() -> None:
    """One turn is bounded in the number of streams that it reads, and the others are read in the next one."""
    transport = FakeTransport()
    engines = [transport.engine(f"tcp://engine:{port}") for port in range(5_001, 5_041)]
    with Subscriber(
        [Source(engine.endpoint) for engine in engines], transport=transport, clock=transport.clock, decode=False
    ) as subscriber:
        assert subscriber.receive(1) is None
        for engine in engines:
            for _ in range(300):
                engine.publish(BlockRemoved([1]))
        sizes = []
        while batches := subscriber.receive_many(timeout=1):
            sizes.append(len(batches))
        assert sum(sizes) == 300 * len(engines)
        assert max(sizes) < MAX_READY_DELIVERIES + MESSAGES_PER_READ


class FailingSink:
    """Applies deliveries, and raises for the batches in `bad`, once for each."""

    def __init__(self, *bad: int) -> None:
        self.bad = list(bad)
        self.applied: list[Any] = []

    def apply_many(self, deliveries: Sequence[Any], /) -> list[Any]:
        for delivery in deliveries:
            if isinstance(delivery, Reset):
                self.applied = [each for each in self.applied if each.source != delivery.source]
            elif getattr(delivery, "seq", None) in self.bad and delivery.source == "e":
                self.bad.remove(delivery.seq)
                raise MemoryError("no room")
            else:
                self.applied.append(delivery)
        return [SimpleNamespace(report=None) for _ in deliveries]

    def numbers(self, source: str = "e") -> list[int]:
        return [each.seq for each in self.applied if each.source == source]


def receive_without_end(subscriber: Subscriber[Any], limit: int | None) -> None:
    """Receive until that raises."""
    while subscriber.receive_many(limit, timeout=5):
        pass


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("limit", [1, 3, None])
def test_a_sink_that_raises_loses_nothing(
    transport: FakeTransport, engine: FakeEngine, limit: int | None, decode: bool
) -> None:
    """The stream starts over, trust says so until everything was applied, and the checkpoint stays behind. Others go on."""
    other = transport.engine("tcp://other:5557", "tcp://other:5558")
    sources = [Source(ENDPOINT, REPLAY, name="e"), Source(other.endpoint, other.replay_endpoint, name="o")]
    sink = FailingSink(4)
    with Subscriber(sources, transport=transport, clock=transport.clock, sink=sink, decode=decode) as subscriber:
        assert subscriber.receive(1) is None
        for number in range(6):
            engine.publish(BlockRemoved([number]))
            other.publish(BlockRemoved([number]))
        with pytest.raises(MemoryError):
            receive_without_end(subscriber, limit)
        assert subscriber.trust("e") == Trust.REPLAYING
        assert subscriber.checkpoint("e").last_seq < 4
        while sink.numbers() != list(range(6)):
            assert subscriber.trust("e") != Trust.EXACT
            assert subscriber.receive_many(limit, timeout=5), sink.numbers()
        for each in (engine, other):
            each.publish(BlockRemoved([6]))  # a live batch, which confirms the replayed ones
        receive_all(subscriber)
        assert (subscriber.trust("e"), subscriber.trust("o")) == (Trust.EXACT, Trust.EXACT)
        assert subscriber.checkpoint("e").last_seq == 6
        assert sink.numbers("o") == list(range(7))


def test_a_sink_that_raises_without_replay_is_a_loss(transport: FakeTransport, engine: FakeEngine) -> None:
    """Deliveries that were passed to the sink cannot be delivered again."""
    sink = FailingSink(2)
    with Subscriber(Source(ENDPOINT, name="e"), transport=transport, clock=transport.clock, sink=sink) as subscriber:
        assert subscriber.receive(1) is None
        for number in range(3):
            engine.publish(BlockRemoved([number]))
        with pytest.raises(MemoryError):
            subscriber.receive_many(timeout=1)
        engine.publish(BlockRemoved([3]))
        deliveries = receive_all(subscriber)
        assert [type(each) for each in deliveries] == [Reset, Gap, Batch]
        assert "MemoryError: no room" in deliveries[0].reason  # type: ignore[union-attr]
        assert DegradedReason.LOST in subscriber.status().degraded_reasons


async def test_a_sink_that_raises_in_a_task_loses_nothing(
    transport: FakeTransport, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deliveries are applied in several slices, of which the second one fails."""
    monkeypatch.setattr(aio, "MAX_TURN_SECONDS", 60.0)
    sink = FailingSink(DELIVERIES_PER_SLICE + 1)
    source = Source(ENDPOINT, REPLAY, name="e")
    async with AsyncSubscriber(source, transport=transport, clock=transport.clock, sink=sink) as subscriber:
        assert await subscriber.receive(1) is None
        count = 3 * DELIVERIES_PER_SLICE
        for number in range(count):
            engine.publish(BlockRemoved([number]))
        with pytest.raises(MemoryError):
            await subscriber.receive_many(2 * DELIVERIES_PER_SLICE, timeout=5)
        while sink.numbers() != list(range(count)):
            await subscriber.receive_many(timeout=5)


def test_a_failure_while_disconnected_is_delivered_again_later(transport: FakeTransport, engine: FakeEngine) -> None:
    """The checkpoint stays behind meanwhile, too."""
    sink = FailingSink(1)
    source = Source(ENDPOINT, REPLAY, name="e")
    with Subscriber(source, transport=transport, clock=transport.clock, sink=sink) as subscriber:
        assert subscriber.receive(1) is None
        engine.publish(BlockRemoved([0]))
        engine.publish(BlockRemoved([1]))
        engine.disconnect()
        assert isinstance(subscriber.receive(1), Batch)
        with pytest.raises(MemoryError):
            subscriber.receive(1)
        assert subscriber.trust() == Trust.STALE
        assert subscriber.checkpoint().last_seq == -1
        engine.reconnect()
        receive_all(subscriber)
        assert sink.numbers() == [0, 1]


def test_trust_ages_while_the_application_does_not_receive(transport: FakeTransport, engine: FakeEngine) -> None:
    """Another thread that routes by `trust()` learns that the receiving thread is blocked or has ended."""
    with subscribe(transport) as subscriber:
        assert subscriber.receive(1) is None
        engine.publish(BlockRemoved([0]))
        receive_all(subscriber)
        assert subscriber.trust() == Trust.EXACT
        subscriber.trust_changes()
        transport.clock.advance(StreamLimits().max_unread)
        assert subscriber.trust() == Trust.EXACT
        transport.clock.advance(1.0)
        assert str(subscriber.trust()) == "STALE (the application has not called receive() for 11 s)"
        assert subscriber.status().trust == subscriber.statuses()[0].trust == Trust.STALE
        assert [(key, trust.name) for key, trust in subscriber.trust_changes()] == [(("e", 0), "STALE")]
        receive_all(subscriber)
        assert subscriber.trust() == Trust.EXACT
        assert [(key, trust.name) for key, trust in subscriber.trust_changes()] == [(("e", 0), "EXACT")]


def test_trust_ages_as_fast_as_heartbeats_promise(transport: FakeTransport, engine: FakeEngine) -> None:
    """A publisher whose heartbeats come twice per second is silent after 1.5 s, whether or not the application looks."""
    with subscribe(transport) as subscriber:
        assert subscriber.receive(1) is None
        engine.publish(BlockRemoved([], heartbeat=Heartbeat("0" * 32, 0.5, "EXACT")))
        assert subscriber.receive(1) is not None
        assert subscriber.receive(0.1) is None
        transport.clock.advance(1.6)
        assert subscriber.trust() == Trust.STALE


def test_trust_orders_by_state() -> None:
    """Reasons do not count."""
    states = [Trust.STALE, Trust.CONNECTING, Trust.REPLAYING, Trust.DEGRADED, Trust.EXACT]
    backwards = states[::-1]
    assert sorted(backwards) == states
    assert Trust.EXACT >= Trust.ATTESTED >= Trust.DEGRADED.with_reason("lost") > Trust.REPLAYING
    assert not Trust.DEGRADED.with_reason("a") < Trust.DEGRADED.with_reason("b")
    with pytest.raises(TypeError):
        assert Trust.EXACT < 1


def test_a_subscriber_waits_until_it_has_caught_up(transport: FakeTransport, engine: FakeEngine) -> None:
    """The deliveries of the wait are returned. An idle engine whose replay is not contradicted counts as EXACT."""
    engine.publish(BlockRemoved([0]))
    engine.publish(BlockRemoved([1]))
    with subscribe(transport) as subscriber:
        assert [each.seq for each in subscriber.wait_for(timeout=5) if isinstance(each, Batch)] == [0, 1]
        assert subscriber.wait_for(Trust.EXACT, timeout=5) == []
        assert subscriber.trust() == Trust.DEGRADED
        assert subscriber.trust().unproven
        engine.publish(BlockRemoved([2]))
        receive_all(subscriber)
        assert (subscriber.trust(), subscriber.trust().unproven) == (Trust.EXACT, False)


def test_an_interrupted_wait_for_trust_loses_nothing(transport: FakeTransport, engine: FakeEngine) -> None:
    """As after an exception of a sink, everything is delivered again after a reset, and the checkpoint stays behind."""
    engine.publish(BlockRemoved([0]))

    def interrupt(change: object) -> None:
        if isinstance(change, TrustChange) and change.trust >= Trust.DEGRADED and not is_over:
            raise KeyboardInterrupt

    is_over = False
    source = Source(ENDPOINT, REPLAY, name="e")
    with Subscriber(source, transport=transport, clock=transport.clock, on_change=interrupt) as subscriber:
        with pytest.raises(KeyboardInterrupt):
            subscriber.wait_for(timeout=5)
        assert str(subscriber.trust()) == "REPLAYING (wait_for() was interrupted; all is delivered again)"
        assert subscriber.checkpoint().last_seq == -1
        is_over = True
        assert [getattr(each, "seq", None) for each in receive_all(subscriber)] == [None, 0]
        assert subscriber.checkpoint().last_seq == 0


async def test_a_cancelled_wait_for_trust_loses_nothing(transport: FakeTransport, engine: FakeEngine) -> None:
    """Deliveries that were received during the wait are delivered again."""
    engine.publish(BlockRemoved([0]))
    transport.engine("tcp://other:5557", "tcp://other:5558").disconnect()
    sources = Source(ENDPOINT, REPLAY, name="e"), Source("tcp://other:5557", "tcp://other:5558", name="other")
    async with AsyncSubscriber(sources, transport=transport, clock=transport.clock) as subscriber:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await subscriber.wait_for()
        assert "wait_for() was interrupted" in subscriber.trust("e").reason
        while not isinstance(delivery := await subscriber.receive(1), Batch):
            assert isinstance(delivery, Reset)
        assert delivery.seq == 0


def test_changes_of_trust_are_reported_again_if_the_callback_raises(transport: FakeTransport) -> None:
    """Changes of other streams are reported again too."""
    names = ["a", "b", "c"]
    for name in names:
        transport.engine(f"tcp://{name}:5557")
    seen: list[str] = []

    def report(change: object) -> None:
        assert isinstance(change, TrustChange)
        seen.append(change.source)
        if len(seen) == 2:
            raise RuntimeError("injected")

    sources = [Source(f"tcp://{name}:5557", name=name) for name in names]
    with Subscriber(sources, transport=transport, clock=transport.clock, on_change=report) as subscriber:
        with pytest.raises(RuntimeError):
            subscriber.receive(1)
        assert seen == ["a", "b"]
        receive_all(subscriber)
        assert seen[2:4] == ["b", "c"]


async def test_a_wait_for_trust_ends_in_time(transport: FakeTransport, engine: FakeEngine) -> None:
    """The error has what was received, and says what is missing."""
    async with AsyncSubscriber(Source(ENDPOINT, name="e"), transport=transport, clock=transport.clock) as subscriber:
        assert await subscriber.wait_for(timeout=5) == []
        engine.publish(BlockRemoved([0]))
        with pytest.raises(TrustTimeoutError, match=r"did not reach EXACT in time: e rank 0 is DEGRADED \(no replay") as raised:
            await subscriber.wait_for(Trust.EXACT, timeout=1)
        assert [each.seq for each in raised.value.deliveries] == [0]
    with pytest.raises(TrustTimeoutError, match="there is no source"), Subscriber(transport=FakeTransport()) as empty:
        empty.wait_for(timeout=0)


def test_an_engine_that_has_named_its_replay_endpoint_is_exact_while_it_is_idle(
    transport: FakeTransport, engine: FakeEngine
) -> None:
    """Its own answer proves what a live batch would, until replay contradicts the live stream."""
    engine.publish(BlockRemoved([0]))
    source = Source(ENDPOINT, REPLAY, name="e", replay_is_proven=True)
    with Subscriber(source, transport=transport, clock=transport.clock) as subscriber:
        receive_all(subscriber)
        assert subscriber.trust() == Trust.EXACT
        engine.restart([BlockRemoved([7])])
        receive_all(subscriber)
        assert subscriber.trust() == Trust.EXACT


@pytest.mark.parametrize("decode", [True, False])
def test_changes_of_trust_resets_and_gaps_are_called_back(transport: FakeTransport, engine: FakeEngine, decode: bool) -> None:
    """In the order in which they happen, each once."""
    changes: list[Any] = []
    source = Source(ENDPOINT, name="e")
    with Subscriber(source, transport=transport, clock=transport.clock, decode=decode, on_change=changes.append) as subscriber:
        assert subscriber.receive(1) is None
        engine.publish(BlockRemoved([0]))
        engine.skip_number()
        engine.publish(BlockRemoved([2]))
        while subscriber.receive(1) is not None:
            pass
        engine.restart([])
        engine.publish(BlockRemoved([0]))
        while subscriber.receive(1) is not None:
            pass
    assert [type(each).__name__ for each in changes if not isinstance(each, TrustChange)] == ["Gap", "Reset"]
    names = [each.trust.name for each in changes if isinstance(each, TrustChange)]
    assert names[0] == "DEGRADED"
    assert all(each[:2] == ("e", 0) for each in changes if isinstance(each, TrustChange))


def test_a_callback_that_raises_counts_as_a_sink_that_raises(transport: FakeTransport, engine: FakeEngine) -> None:
    """Nothing is lost."""
    bad = [True]

    def raise_once(change: object) -> None:
        if isinstance(change, Gap) and bad:
            bad.clear()
            raise KeyError("once")

    source = Source(ENDPOINT, REPLAY, name="e")
    with Subscriber(source, transport=transport, clock=transport.clock, on_change=raise_once) as subscriber:
        assert subscriber.receive(1) is None
        engine.publish(BlockRemoved([0]))
        engine.skip_number()
        engine.publish(BlockRemoved([2]))
        with pytest.raises(KeyError):
            receive_all(subscriber, 20)
        assert [each.seq for each in receive_all(subscriber, 20) if isinstance(each, Batch)][-2:] == [0, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Subscriber(5),  # type: ignore[call-overload]
        lambda: Subscriber([5]),  # type: ignore[list-item]
        lambda: Subscriber(limits={}),  # type: ignore[call-overload]
        lambda: Subscriber(max_concurrent_replays="4"),  # type: ignore[call-overload]
        lambda: Subscriber(sink=print),  # type: ignore[call-overload]
        lambda: AsyncSubscriber(sink=print),  # type: ignore[call-overload]
        lambda: Source(5557),  # type: ignore[arg-type]
        lambda: Source("tcp://a:1", 5558),  # type: ignore[arg-type]
        lambda: Source("tcp://a:1", topic=b"kv"),  # type: ignore[arg-type]
        lambda: Source("tcp://a:1", rank="0"),  # type: ignore[arg-type]
        lambda: Source("tcp://a:1", name=("e", 0)),  # type: ignore[arg-type]
    ],
)
def test_wrong_types_are_errors_of_the_configuration(make: Callable[[], object]) -> None:
    """The message names the setting."""
    with pytest.raises(ConfigError, match=r"invalid (source|limits|max_|sink|endpoint|replay_|topic|rank|name)"):
        make()


@pytest.mark.parametrize("kind", [Subscriber, AsyncSubscriber])
def test_an_unknown_option_names_the_class_that_was_called(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\) got an unexpected keyword argument 'buffer'$"):
        kind("tcp://a:1", buffer=1)


def test_a_subscriber_says_what_it_connects_to_and_what_it_cannot_repair(
    transport: FakeTransport, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A source without a replay endpoint can never be EXACT."""
    with subscribe(transport, replay=False) as subscriber:
        assert "connecting to tcp://engine:5557" in repr(subscriber)
        assert "e has no replay endpoint" in caplog.text
    caplog.clear()
    with subscribe(transport):
        assert "no replay endpoint" not in caplog.text


def test_what_waits_in_all_streams_has_one_limit(transport: FakeTransport) -> None:
    """After a restart of a router, all streams of a fleet can wait at the same time. Batches without room are replayed
    later."""
    limits = StreamLimits(max_total_pending_bytes=2_000)
    engines = [transport.engine(f"tcp://engine:{port}", f"tcp://replay:{port}") for port in range(5_001, 5_021)]
    sources = [Source(engine.endpoint, engine.replay_endpoint) for engine in engines]
    with Subscriber(sources, transport=transport, clock=transport.clock, limits=limits) as subscriber:
        assert subscriber.receive(1) is None
        for engine in engines:
            engine.answers_replay = False
            engine.publish(BlockRemoved([0]), lost=True)
            for number in range(1, 20):
                engine.publish(BlockRemoved([number]))
        assert subscriber.receive(0.5) is None
        pending = subscriber._multiplexer._pending
        assert 1_000 < pending.bytes_used <= 2_000
        assert sum(status.counters.overflowed for status in subscriber.statuses()) > 0
        for engine in engines:
            engine.answers_replay = True
        received: dict[str, list[int]] = {}
        for delivery in receive_all(subscriber, 10):
            assert isinstance(delivery, Batch)
            received.setdefault(delivery.source, []).append(delivery.seq)
        assert received == {engine.endpoint: list(range(20)) for engine in engines}
        assert pending.bytes_used == 0
        engines[0].publish(BlockRemoved([0]), lost=True)
        engines[0].answers_replay = False
        engines[0].publish(BlockRemoved([1]))
        assert subscriber.receive(0.5) is None
        assert pending.bytes_used > 0
        subscriber.remove(engines[0].endpoint)
        assert pending.bytes_used == 0
