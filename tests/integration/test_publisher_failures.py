"""Tests of faults in each part of a publisher: `publish` never raises, all other parts continue, and `stats()` counts the
fault."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from kvevents import Source, Subscriber
from kvevents.events import BlockStored, EventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.publisher.base import PollPlanner
from kvevents.publisher.compaction import Compactor, DigestTracker
from kvevents.publisher.event_server import EventSocket
from kvevents.publisher.replay_buffer import ReplayBuffer
from kvevents.publisher.replay_server import InFlightFrames
from kvevents.publisher.settings import PollSettings, ReplayServerSettings
from kvevents.wire import encode_batch
from publisher_cases import (  # noqa: F401 - fixtures must be imported
    ANY,
    QUICK,
    Socket,
    batch,
    connect_dealer,
    consumers_context,
    numbers,
    read_reply,
    receive,
    request_replay,
    run_publisher,
    subscribe,
    wait_until,
)
from publisher_engine import compacting_buffer

Context = zmq.Context[Socket]
POLLING = PollSettings()
SETTINGS = replace(QUICK, error_delay=0.001, replay=ReplayServerSettings(error_delay=0.001))
"""Short delays after exceptions."""


class Panic(BaseException):
    """An exception that is not an `Exception`, like a panic of native code."""


def raise_panic(*_: Any, **__: Any) -> Any:
    raise Panic("injected")


def is_drained(publisher: ZmqEventPublisher) -> bool:
    return publisher.stats().queued == 0


def test_a_burst_that_cannot_be_sent_is_a_gap(
    context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged and counted, and the next batch is sent with the next number."""
    with run_publisher(settings=SETTINGS, replay_endpoint=ANY) as publisher:
        subscriber = subscribe(context, publisher)
        with monkeypatch.context() as patch:
            patch.setattr(EventSocket, "send", raise_panic)
            publisher.publish(batch(0))
            wait_until(lambda: publisher.stats().dropped["send_failed"] == 1, "the batch to be dropped")
        publisher.publish(batch(1))
        wait_until(lambda: is_drained(publisher), "the second batch to be sent")
        stats = publisher.stats()
        assert (stats.accepted, stats.published) == (2, 1)
        assert stats.failures["thread"] >= 1
        seq, payload = receive(subscriber)
        while payload != encode_batch(
            EventBatch(1.0, batch(1).events, 0)
        ):  # an empty batch may arrive before, to reveal the gap
            seq, payload = receive(subscriber)
        assert seq >= 1
    assert "thread failed: Panic('injected')" in caplog.text


def test_live_batches_continue_when_the_replay_buffer_fails(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """All batches are sent live; replay has the later ones, and no snapshot claims to contain the others."""
    with run_publisher(settings=SETTINGS, replay_endpoint=ANY, buffer_steps=2) as publisher:
        subscriber = subscribe(context, publisher)
        for number in range(5):
            publisher.publish(batch(number))
        wait_until(lambda: is_drained(publisher), "the first batches to be sent")

        def raise_memory_error(*_: Any) -> None:
            raise MemoryError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(ReplayBuffer, "extend", raise_memory_error)
            publisher.publish(batch(5))
            wait_until(lambda: is_drained(publisher), "the sixth batch to be sent")
        publisher.publish(batch(6))
        assert [receive(subscriber)[0] for _ in range(7)] == list(range(7))
        replay = connect_dealer(context, publisher)
        request_replay(replay, 0)
        assert numbers(read_reply(replay)) == [6]
        stats = publisher.stats()
        assert stats.failures == {"replay_buffer": 1}
        assert stats.history is not None
        assert stats.history.unavailable_reason == "batches"


@pytest.mark.parametrize("part", ["extend", "payloads"])
def test_compaction_that_fails_is_switched_off(
    context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    """The publisher sends no snapshot from then on, so history is truncated but never wrong. The log has one record, and the
    statistics have the reason."""
    with run_publisher(settings=SETTINGS, replay_endpoint=ANY, buffer_steps=4) as publisher, caplog.at_level(logging.ERROR):
        monkeypatch.setattr(Compactor, part, raise_panic)
        for number in range(100):
            publisher.publish(batch(number))
        wait_until(lambda: is_drained(publisher), "all to be published")
        replay = connect_dealer(context, publisher)
        for _ in range(2):
            request_replay(replay, 0)
            assert numbers(read_reply(replay)) == [96, 97, 98, 99]
        stats = publisher.stats()
        assert (stats.published, stats.failures) == (100, {"compaction": 1})
        assert stats.history is not None
        assert stats.history.unavailable_reason == "failed: Panic: injected"
        with Subscriber(Source(publisher.endpoint, publisher.replay_endpoint, name="engine")) as subscriber:

            def knows_that_history_is_truncated() -> bool:
                subscriber.receive_many(timeout=0.01)
                return subscriber.status().last_seq == 99 and subscriber.trust().name == "DEGRADED"

            wait_until(knows_that_history_is_truncated, "a subscriber that knows that history is truncated")
    assert caplog.text.count("compaction failed and is switched off") == 1


def test_heartbeats_that_fail_are_switched_off(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches continue, and no digest that lacks a batch is sent."""
    with run_publisher(settings=SETTINGS, replay_endpoint=ANY, heartbeat=0.001) as publisher:
        subscriber = subscribe(context, publisher)
        monkeypatch.setattr(DigestTracker, "apply", raise_panic)
        publisher.publish(batch(0))
        wait_until(lambda: publisher.stats().failures == {"heartbeat": 1}, "heartbeats to be switched off")
        wait_until(lambda: is_drained(publisher), "the batch to be sent, after any heartbeat that was being sent")
        sent = publisher.stats().heartbeats
        for number in range(1, 20):
            publisher.publish(batch(number))
        wait_until(lambda: is_drained(publisher), "all to be published")
        stats = publisher.stats()
        assert (stats.published, stats.heartbeats, stats.failures) == (20, sent, {"heartbeat": 1})
        last = 0
        while last < stats.next_seq - 1:
            last = receive(subscriber)[0]


def test_a_failed_reply_is_abandoned_and_the_next_one_is_served(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay thread survives a request that it cannot answer and a message that it cannot encode."""
    with run_publisher(settings=SETTINGS, replay_endpoint=ANY) as publisher:
        publisher.publish(batch(0, blocks=1_000))  # a large frame
        wait_until(lambda: is_drained(publisher), "the batch to be published")
        replay = connect_dealer(context, publisher)
        for count, (owner, part) in enumerate(((ReplayBuffer, "batches_from"), (InFlightFrames, "track")), 1):
            with monkeypatch.context() as patch:
                patch.setattr(owner, part, raise_panic)
                request_replay(replay, 0)
                wait_until(lambda: publisher.stats().failures == {"replay": count}, f"{part} to fail")  # noqa: B023
        wait_until(lambda: not publisher.stats().replay.active, "the failed reply to be abandoned")
        request_replay(replay, 0)
        assert numbers(read_reply(replay)) == [0]


class Broken:
    """Raises when any attribute is read."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)


class BrokenStrError(Exception):
    def __str__(self) -> str:
        raise ValueError("no message")


class BrokenWithoutMessage(Broken):
    def __getattr__(self, name: str) -> Any:
        raise BrokenStrError


@pytest.mark.parametrize(
    "make", [lambda: None, object, dict, lambda: 7, Broken, BrokenWithoutMessage, lambda: EventBatch(0.0, [object()])]
)
def test_an_object_that_is_not_a_batch_is_a_gap(context: Context, make: Callable[[], Any]) -> None:
    """`publish` does not raise; the object is counted as dropped, and the next batch is sent after the gap."""
    with run_publisher(settings=SETTINGS) as publisher:
        subscriber = subscribe(context, publisher)
        publisher.publish(make())
        wait_until(lambda: publisher.stats().dropped["encode_failed"] == 1, "the object to be counted")
        publisher.publish(batch(1))
        seq, payload = receive(subscriber)
        while payload != encode_batch(EventBatch(1.0, batch(1).events, 0)):
            seq, payload = receive(subscriber)
        assert seq >= 1


def test_unknown_events_stop_compaction_until_a_clear(caplog: pytest.LogCaptureFixture) -> None:
    """The meaning of a user's own event is unknown, so no snapshot can contain it. The log says so."""
    with run_publisher(settings=SETTINGS, replay_endpoint=ANY, buffer_steps=1) as publisher:
        publisher.publish(EventBatch(0.0, [{"type": "Mine"}]))
        for number in range(5):
            publisher.publish(batch(number))
        wait_until(lambda: "no snapshot of older history: payloads" in caplog.text, "a line in the log")
        history = publisher.stats().history
        assert history is not None
        assert history.unavailable_reason == "payloads"


def test_a_buffer_without_steps_sends_a_snapshot() -> None:
    """With compaction and `buffer_steps=0` every batch has left the buffer, and replay sends the snapshot."""
    buffer = compacting_buffer(0)
    for number in range(5):
        stored = BlockStored([number + 1], number or None, [1] * 16, 16)
        buffer.extend([(number, encode_batch(EventBatch(1.0, [stored])))])
    assert numbers(buffer.batches_from(0)) == [4]
    assert numbers(buffer.batches_from(4)) == [4]
    assert buffer.batches_from(5) == []
    with run_publisher(settings=SETTINGS, replay_endpoint=ANY, buffer_steps=0) as publisher:
        publisher.publish(batch(0))
        wait_until(lambda: publisher.stats().buffered_batches == 1, "the newest batch in the buffer")


# --- when the thread polls


def test_polls_are_planned_for_steady_batches() -> None:
    """The first poll is shortly before the next batch, and polls continue until the batch must have arrived."""
    planner = PollPlanner(POLLING)
    for number in range(100):
        planner.record_arrival(number * 0.002)
    pauses = planner.plan(99 * 0.002)
    assert 0.002 - 3 * POLLING.min_poll_interval < pauses[0] < 0.002
    assert sum(pauses) > 0.002


def test_polls_do_not_drift_when_the_first_one_finds_batches() -> None:
    """Without the correction, a timer that is always late would lead to later and later polls."""
    planner, now, due = PollPlanner(POLLING), 0.0, 0.0
    waits = []
    for _ in range(1_000):
        pauses = planner.plan(now) or [max(0.0, due - now)]
        polls = 0
        for pause in pauses:
            now += pause + 0.00006
            polls += 1
            if now >= due:
                break
        now = max(now, due)
        waits.append(now - due)
        planner.record_arrival(now, at_first_poll=len(pauses) > 1 and polls == 1)
        while due <= now:
            due += 0.002
    assert max(waits[100:]) < 0.0006


@pytest.mark.parametrize(
    "times", [[0.0, 1.0, 2.0], [0.0, 0.0005, 0.0045, 0.005, 0.009, 0.0095, 0.0135]], ids=["slow", "uneven"]
)
def test_the_thread_does_not_poll_for_unpredictable_batches(times: list[float]) -> None:
    """The thread sleeps until `publish` wakes it, so that no batch waits for a poll."""
    planner = PollPlanner(POLLING)
    for time in times:
        planner.record_arrival(time)
    assert planner.plan(times[-1]) == []


def test_pauses_between_polls_have_a_minimum() -> None:
    """Otherwise polling the queue would keep a CPU busy."""
    planner = PollPlanner(POLLING)
    for number in range(100):
        planner.record_arrival(number * 1e-5)
    assert planner.plan(99e-5)[0] >= POLLING.min_pause
    assert POLLING.max_interval > POLLING.min_pause
