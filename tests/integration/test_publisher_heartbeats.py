"""Tests of heartbeats: a publisher sends the digest of its resident blocks, and consumers agree with it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvevents import Batch, Source, Subscriber
from kvevents.config import KVEventsConfig
from kvevents.errors import ConfigError
from kvevents.events import AllBlocksCleared, BlockRemoved, Heartbeat, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher import EventPublisherFactory, ZmqEventPublisher
from kvevents.publisher.compaction import DigestTracker
from kvevents.wire import decode_batch, encode_batch
from publisher_cases import (  # noqa: F401 - fixtures must be imported
    ANY,
    Socket,
    consumers_context,
    receive,
    run_publisher,
    subscribe,
    wait_until,
)
from publisher_engine import WORKER, Engine

Context = zmq.Context[Socket]
HEARTBEAT_SECONDS = 0.01
"""Seconds between heartbeats in tests."""


def heartbeat_of(payload: bytes) -> Heartbeat | None:
    events = decode_batch(payload).batch.events
    return events[0].heartbeat if len(events) == 1 and isinstance(events[0], BlockRemoved) else None


@given(st.integers(0, 2**16), st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_the_digest_equals_that_of_an_index(seed: int, bursts: list[int]) -> None:
    """Both are equal after the same payloads, for any sizes of bursts."""
    engine, digest_tracker, index = Engine(seed), DigestTracker.create(), PrefixIndex()
    number = 0
    for burst in bursts:
        batches = [(number + at, encode_batch(KVEventBatch(1.0, engine.events(), 0))) for at in range(burst)]
        number += burst
        digest_tracker.apply(batches)
        for batch in batches:
            index.apply_payload(WORKER, 0, *batch)
        assert digest_tracker.digest() == index.digest(WORKER)


def test_payloads_that_only_python_can_decode_are_applied() -> None:
    """Some payloads have a nested unknown field, which the native decoder rejects."""
    engine = Engine(1)
    plain = [encode_batch(KVEventBatch(1.0, engine.events(), 0)) for _ in range(3)]
    found_heartbeat = encode_batch(KVEventBatch(1.0, [BlockRemoved([], heartbeat=Heartbeat("0" * 32, 1.0))], 0))
    digest_tracker, index = DigestTracker.create(), PrefixIndex()
    payloads = [plain[0], found_heartbeat, plain[1], found_heartbeat, found_heartbeat, plain[2]]
    digest_tracker.apply(list(enumerate(payloads)))
    for seq, payload in enumerate(payloads):
        index.apply_payload(WORKER, 0, seq, payload)
    assert digest_tracker.digest() == index.digest(WORKER)


def test_a_missing_number_degrades_trust_until_a_clear() -> None:
    """This also holds if the newest number is missing. The digest covers all batches that were sent."""
    digest_tracker = DigestTracker.create()
    assert digest_tracker.heartbeat(0, 1.0, 5) == Heartbeat("0" * 32, 1.0, incarnation=5)
    payload = encode_batch(KVEventBatch(1.0, Engine().events(), 0))
    digest_tracker.apply([(0, payload)])
    assert digest_tracker.heartbeat(1, 1.0, 5).trust == "EXACT"
    found_heartbeat = digest_tracker.heartbeat(2, 1.0, 5)
    assert (found_heartbeat.trust, found_heartbeat.digest) == ("DEGRADED", digest_tracker.digest())
    assert "number 1 was never sent" in found_heartbeat.reason
    digest_tracker.apply([(2, payload)])
    assert digest_tracker.heartbeat(3, 1.0, 5).trust == "DEGRADED"
    digest_tracker.apply([(3, encode_batch(KVEventBatch(1.0, [AllBlocksCleared()], 0)))])
    assert digest_tracker.heartbeat(4, 1.0, 5).trust == "EXACT"


@pytest.mark.parametrize("dialect", [None, "vllm-0.10.2", "sglang-latest"])
def test_a_subscribers_index_agrees_at_each_heartbeat(dialect: str | None) -> None:
    """It agrees live and in replay, with and without batches in between, in every dialect."""
    with run_publisher(1, replay_endpoint=ANY, heartbeat=HEARTBEAT_SECONDS, dialect=dialect) as publisher:
        engine, index = Engine(3), PrefixIndex()
        source = Source(publisher.endpoint, publisher.replay_endpoint, name="engine")
        seen: list[bool | None] = []
        with Subscriber(source, decode=False) as subscriber:

            def has_ten_heartbeats() -> bool:
                publisher.publish(KVEventBatch(0.0, engine.events()))
                for delivery in subscriber.receive_many(timeout=0.01):
                    report = index.apply(delivery).report
                    if report is not None:
                        subscriber.report(delivery, report)
                        seen.extend([report.digest_matches] if report.heartbeat is not None else [])
                return len(seen) >= 10

            wait_until(has_ten_heartbeats, "ten heartbeats")
            assert subscriber.trust().name == "EXACT"
    assert set(seen) == {True}


def test_heartbeats_report_dropped_batches_until_a_clear(context: Context) -> None:
    """They report the loss until a clear. Heartbeats have ordinary numbers, but other counters do not include them."""
    with run_publisher(heartbeat=HEARTBEAT_SECONDS) as publisher:
        subscriber = subscribe(context, publisher)
        publisher.publish(KVEventBatch(0.0, [object()]))  # type: ignore[list-item] # it cannot be encoded

        def wait_for_trust(trust: str) -> Heartbeat:
            while (found_heartbeat := heartbeat_of(receive(subscriber)[1])) is None or found_heartbeat.trust != trust:
                pass
            return found_heartbeat

        assert "was never sent" in wait_for_trust("DEGRADED").reason
        publisher.publish(KVEventBatch(0.0, [AllBlocksCleared()]))
        assert wait_for_trust("EXACT").reason == ""
        stats = publisher.stats()
        assert stats.heartbeats > 1
        assert (stats.accepted, stats.published, stats.dropped["encode_failed"]) == (2, 1, 1)
        wait_until(lambda: publisher.stats().next_seq >= stats.heartbeats + 2, "a number for each of them")


def test_each_publisher_has_another_incarnation_in_its_heartbeats(context: Context) -> None:
    """Consumers distinguish the two publisher processes by it."""
    found = set()
    for _ in range(2):
        with run_publisher(heartbeat=HEARTBEAT_SECONDS) as publisher:
            found_heartbeats = [heartbeat_of(receive(subscribe(context, publisher))[1]) for _ in range(2)]
            found |= {found_heartbeat.incarnation for found_heartbeat in found_heartbeats if found_heartbeat is not None}
    assert len(found) == 2


@pytest.mark.parametrize("seconds", [0, -1.0, 86_401.0, float("nan")])
def test_an_invalid_heartbeat_interval_is_rejected(seconds: float) -> None:
    """It is rejected before any socket is opened."""
    with pytest.raises(ConfigError, match="heartbeat is"):
        ZmqEventPublisher(0, ANY, heartbeat=seconds)
    with pytest.raises(ConfigError, match="heartbeat is"):
        KVEventsConfig(heartbeat=seconds)


def test_the_factory_passes_the_heartbeat_interval_on() -> None:
    """The default is no heartbeats."""
    made: Any = EventPublisherFactory.create(
        KVEventsConfig(enable_kv_cache_events=True, endpoint=ANY, heartbeat=HEARTBEAT_SECONDS)
    )
    wait_until(lambda: made.stats().heartbeats, "a heartbeat")
    made.shutdown()
    with run_publisher() as publisher:
        publisher.publish(KVEventBatch(0.0, []))
        wait_until(lambda: publisher.stats().published, "the batch")
        assert publisher.stats().heartbeats == 0


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvevents_native._native", None)


@pytest.mark.usefixtures("without_native")
def test_without_the_native_module_heartbeats_have_no_digest(caplog: pytest.LogCaptureFixture) -> None:
    """A subscriber follows them and is EXACT. Silence and new incarnations are detected as before. One warning names what is
    missing."""
    with run_publisher(replay_endpoint=ANY, heartbeat=HEARTBEAT_SECONDS) as publisher:
        publisher.publish(KVEventBatch(0.0, Engine(3).events()))
        source = Source(publisher.endpoint, publisher.replay_endpoint, name="engine")
        found: list[Heartbeat] = []
        with Subscriber(source) as subscriber:

            def has_three() -> bool:
                for delivery in subscriber.receive_many(timeout=0.01):
                    events = delivery.events if isinstance(delivery, Batch) else []
                    found.extend(event.heartbeat for event in events if isinstance(event, BlockRemoved) and event.heartbeat)
                return len(found) >= 3 and subscriber.trust().name == "EXACT"

            wait_until(has_three, "three heartbeats")
            counters = subscriber.status().counters
    assert {(each.digest, each.trust, each.interval) for each in found} == {(None, "EXACT", HEARTBEAT_SECONDS)}
    assert len({each.incarnation for each in found}) == 1
    assert counters.heartbeats >= 3
    assert (counters.digests_matched, counters.digests_mismatched) == (0, 0)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "no snapshots of batches that have left the replay buffer and no digests in heartbeats" in warning
    assert "install kvevents[native]" in warning


@pytest.mark.usefixtures("without_native")
def test_without_the_native_module_heartbeats_report_dropped_batches_until_a_clear() -> None:
    """This also holds if the missing number is the newest, or if the batch after it is the clear."""
    tracker = DigestTracker.create()
    payload = encode_batch(KVEventBatch(1.0, Engine().events(), 0))
    clear = encode_batch(KVEventBatch(1.0, [AllBlocksCleared()], 0))
    assert tracker.heartbeat(0, 1.0, 5) == Heartbeat(None, 1.0, incarnation=5)
    tracker.apply([(0, payload)])
    assert tracker.heartbeat(1, 1.0, 5).trust == "EXACT"
    assert "number 1 was never sent" in tracker.heartbeat(2, 1.0, 5).reason
    tracker.apply([(2, payload)])
    assert tracker.heartbeat(3, 1.0, 5).trust == "DEGRADED"
    tracker.apply([(3, clear)])
    assert tracker.heartbeat(4, 1.0, 5).trust == "EXACT"
    tracker.apply([(5, clear), (6, payload)])
    assert tracker.heartbeat(7, 1.0, 5).trust == "EXACT"


def test_a_heartbeat_without_a_digest_is_not_compared() -> None:
    """The report has the heartbeat, but neither agreement nor a difference."""
    payload = encode_batch(KVEventBatch(1.0, [*Engine(3).events(), BlockRemoved([], heartbeat=Heartbeat(None, 1.0))], 0))
    report = PrefixIndex().apply_payload(WORKER, 0, 0, payload).report
    assert report is not None
    assert (report.heartbeat, report.digest_matches) == (Heartbeat(None, 1.0), None)


@pytest.mark.usefixtures("without_native")
def test_no_warning_is_logged_for_disabled_features(caplog: pytest.LogCaptureFixture) -> None:
    with run_publisher(replay_endpoint=ANY, compact=False):
        pass
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
