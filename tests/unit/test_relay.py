"""A relay between engines and consumers in memory: what it forwards, what it restores, and what it never sends."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from index_cases import tokens_of
from index_keys import Scope
from kvevents.errors import ClosedError, ConfigError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import block_keys
from kvevents.publisher.compaction import Compactor, encode_snapshot
from kvevents.relay import RelayLimits, RelaySettings
from kvevents.stream import Gap, RawBatch, Reset, Source
from kvevents.wire import decode_batch, encode_batch, resolve_dialect
from kvevents.wire.encode import batch_encoder
from relay_cases import SIZE, Consumer, World, block, kill_before, world
from relay_journal_cases import TINY, Killed, WatchedDisk

SECRET = 1_234_567
"""A token id that occurs in prompts only."""
CLEARED = [AllBlocksCleared(), AllBlocksCleared({"medium": "*", "group_idx": None})]
"""The events with which a relay begins, as decoded from arrays."""
CLEAR = encode_batch(KVEventBatch(0.0, [AllBlocksCleared()]))


@pytest.fixture(name="scenario")
def make_scenario(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path / "journal") as found:
        yield found


@pytest.fixture(name="scenario_of_two")
def make_scenario_of_two(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path / "journal", 2) as found:
        yield found


def assert_exact(scenario: World, *consumers: Consumer) -> None:
    """Confirm replayed batches, and check that all consumers are EXACT and right."""
    scenario.confirm()
    for consumer in consumers:
        assert consumer.trust.name == "EXACT", consumer.trust
        assert consumer.held == scenario.truth


def assert_not_exact_and_wrong(scenario: World, *consumers: Consumer) -> None:
    """Settle, and check that no consumer with wrong blocks is EXACT."""
    scenario.settle()
    for consumer in consumers:
        assert consumer.trust.name != "EXACT" or consumer.held == scenario.truth


# --- forwarding


def test_payloads_are_forwarded_unchanged_after_a_clear(scenario: World) -> None:
    payloads = [encode_batch(KVEventBatch(float(number), [block(number)])) for number in range(5)]
    for payload in payloads:
        scenario.upstream.engine.publish_payload(payload)
    scenario.begin()
    scenario.turn(3)
    payloads_sent = [payload for _, payload in scenario.event_server.sent if b"incarnation" not in payload]
    assert [number for number, _ in scenario.event_server.sent] == list(range(len(scenario.event_server.sent)))
    assert decode_batch(payloads_sent[0]).batch.events == CLEARED
    assert payloads_sent[1:] == payloads


def test_a_late_consumer_receives_the_live_blocks(scenario: World) -> None:
    scenario.begin(buffer_steps=3)
    early = scenario.consumer()
    scenario.upstream.store(*range(1, 20))
    for number in range(1, 15):
        scenario.upstream.remove(number)
    late = scenario.consumer()
    assert_exact(scenario, early, late)
    assert late.agreements()
    assert all(late.agreements())
    assert late.index.digest("relay") == early.index.digest("relay") == scenario.relay.status().digest


def test_a_restart_of_the_upstream_is_sent_as_a_clear_and_numbers_continue(scenario: World) -> None:
    """A consumer that ignores heartbeats holds the right blocks afterwards."""
    scenario.begin()
    plain, ours = scenario.consumer(reads_heartbeats=False), scenario.consumer()
    scenario.upstream.store(1, 2, 3)
    scenario.settle()
    scenario.upstream.restart(block(7))
    assert_exact(scenario, plain, ours)
    assert plain.resets == ours.resets == 0
    assert not any(isinstance(each, Reset | Gap) for each in plain.seen)


def test_lower_trust_is_sent_before_unconfirmed_batches(scenario: World) -> None:
    """Replayed batches might be of another engine until a live batch confirms them. No consumer is EXACT meanwhile."""
    for number in range(3):
        scenario.upstream.store(number + 1, lost=True)
    scenario.begin()
    consumer, seen = scenario.consumer(), list[tuple[str, int]]()

    def record_trust() -> None:
        consumer.turn()
        seen.append((consumer.trust.name, consumer.held.total()))

    scenario.sent = record_trust
    scenario.turn(10)
    assert seen[-1] == ("DEGRADED", 3)
    assert [held for trust, held in seen if trust == "EXACT" and held] == []
    assert_exact(scenario, consumer)


@pytest.mark.parametrize("between", [Reset("u0", 0, 1, "another"), Gap("u0", 0, 10, 11, 1, compacted=True)])
def test_lower_trust_is_sent_before_batches_around_a_reset_or_a_gap(scenario: World, between: Reset | Gap) -> None:
    """Batches before it in the same turn are unconfirmed, and a snapshot after it can have several batches."""
    relay = scenario.begin()
    scenario.upstream.store(1)
    assert_exact(scenario, consumer := scenario.consumer())
    seen: list[str] = []

    def record_trust() -> None:
        consumer.turn()
        seen.append(consumer.trust.name)

    scenario.sent = record_trust
    store = [encode_batch(KVEventBatch(0.0, [block(number)])) for number in range(3)]
    deliveries: list[RawBatch | Reset | Gap] = [
        RawBatch("u0", 0, 0, 9, False, store[0]),
        between,
        RawBatch("u0", 0, 1, 12, True, store[1]),
        RawBatch("u0", 0, 1, 13, True, store[2]),
    ]
    relay.take_turn_with(deliveries)
    assert len(seen) >= 4
    assert set(seen) == {"DEGRADED"}


REWRITING: list[dict[str, Any]] = [{"dialect": "vllm-0.22"}, {"dialect": "sglang"}, {"tokens": "hash"}, {"tokens": "drop"}]


FORWARDED: dict[str, list[list[KVEvent]]] = {
    "stores": [[block(5)], [block(6)]],
    "a clear": [[AllBlocksCleared()]],
    "a snapshot": [[AllBlocksCleared(), block(5), block(6), BlockRemoved([], heartbeat=Heartbeat("", 1.0))]],
    "a clear and a store": [[AllBlocksCleared(), block(5)]],
    "a store and a heartbeat": [[block(5)], [BlockRemoved([], heartbeat=Heartbeat("", 1.0))]],
}
"""Batches that a relay forwards after its last checkpoint."""


@pytest.mark.parametrize("forwarded", FORWARDED)
@pytest.mark.parametrize(("upstreams", "settings"), [*((1, settings) for settings in ({}, *REWRITING)), (2, {})])
def test_after_a_kill_the_upstream_must_have_sent_what_was_forwarded_after_the_checkpoint(
    upstreams: int, settings: dict[str, Any], forwarded: str, tmp_path: Path
) -> None:
    """Another incarnation is equal up to the checkpoint and differs afterwards. Its later batches are not skipped."""
    with world(tmp_path / "journal", upstreams) as scenario:
        forward_after_the_last_checkpoint(scenario, settings, FORWARDED[forwarded])


def forward_after_the_last_checkpoint(scenario: World, settings: dict[str, Any], forwarded: list[list[KVEvent]]) -> None:
    engine = scenario.upstream.engine
    payloads = [encode_batch(KVEventBatch(float(number), [block(number)])) for number in range(1, 5)]
    for payload in payloads[:3]:
        engine.publish_payload(payload)
    scenario.begin(**settings)
    consumer = scenario.consumer()
    scenario.settle()
    engine.publish_payload(payloads[3])
    scenario.settle()
    for number, events in enumerate(forwarded, 5):
        engine.publish_payload(encode_batch(KVEventBatch(float(number), events)))
    scenario.turn(1)
    held = {number for number, _ in consumer.held}
    assert held != {1, 2, 3, 4}
    scenario.kill()
    scenario.upstream.restart()
    engine.disconnect()
    for payload in [*payloads, *(encode_batch(KVEventBatch(0.0, [block(number)])) for number in (21, 22))]:
        engine.publish_payload(payload)
    engine.reconnect()
    scenario.begin(**settings)
    scenario.settle()
    engine.publish_payload(encode_batch(KVEventBatch(0.0, [block(23)])))
    scenario.settle()
    assert scenario.relay.status().was_resumed
    assert sorted(number for number, _ in consumer.held) == [1, 2, 3, 4, 21, 22, 23]


def test_a_gap_of_the_upstream_skips_a_number_until_a_clear(scenario: World) -> None:
    scenario.begin()
    plain, ours = scenario.consumer(reads_heartbeats=False), scenario.consumer()
    scenario.upstream.store(1)
    scenario.upstream.engine.skip_number()
    scenario.upstream.store(2)
    scenario.settle()
    late = scenario.consumer()
    scenario.settle()
    for consumer in (plain, ours, late):
        assert consumer.trust.name == "DEGRADED", consumer.trust
        assert sum(isinstance(each, Gap) for each in consumer.seen) == 1
    assert scenario.relay.status().skipped_seqs == 1
    scenario.upstream.clear()
    scenario.upstream.store(3)
    assert_exact(scenario, plain, ours, late)


CLEARING = RawBatch("u0", 0, 0, 9, False, CLEAR)


@pytest.mark.parametrize(("between", "expected_gaps"), [(None, 1), (CLEARING, 2), (Reset("u0", 0, 0, "another"), 2)])
def test_gaps_of_one_turn_skip_one_number_unless_a_clear_is_between_them(
    scenario: World, between: RawBatch | Reset | None, expected_gaps: int
) -> None:
    """For each skipped number consumers request the whole replay buffer twice."""
    relay = scenario.begin()
    plain, ours = scenario.consumer(reads_heartbeats=False), scenario.consumer()
    store = [encode_batch(KVEventBatch(0.0, [block(number)])) for number in range(3)]
    relay.take_turn_with(
        [
            Gap("u0", 0, 0, 4),
            RawBatch("u0", 0, 0, 5, False, store[0]),
            Gap("u0", 0, 6, 7),
            RawBatch("u0", 0, 0, 8, False, store[1]),
            *([] if between is None else [between]),
            Gap("u0", 0, 10, 10),
            RawBatch("u0", 0, 0, 11, False, store[2]),
        ]
    )
    scenario.settle()
    assert relay.status().skipped_seqs == expected_gaps
    for consumer in (plain, ours):
        assert sum(isinstance(each, Gap) for each in consumer.seen) == expected_gaps
    assert plain.trust.name == "DEGRADED"
    assert len(plain.held) == (3 if between is None else 1)


def test_a_compacted_gap_of_the_upstream_skips_no_number(scenario: World) -> None:
    """Compacted history of the upstream is complete downstream too, and does not count as lost."""
    for _ in range(9):
        scenario.upstream.engine.skip_number()
    scenario.upstream.publish_events(AllBlocksCleared(), block(1))
    scenario.begin()
    consumer = scenario.consumer()
    assert_exact(scenario, consumer)
    assert scenario.relay.status().skipped_seqs == 0
    assert not any(isinstance(each, Gap) for each in consumer.seen)


def test_history_that_was_truncated_before_the_relay_started_is_sent_as_far_as_known(scenario: World) -> None:
    """The clear at the start of each incarnation leaves a number for a snapshot, although a number is skipped at once."""
    scenario.upstream.store(1)
    scenario.upstream.clear_replay_buffer()
    scenario.upstream.store(2)
    scenario.begin(buffer_steps=2)
    for number in range(3, 9):
        scenario.upstream.store(number)
    scenario.settle()
    late = scenario.consumer()
    scenario.settle()
    assert late.trust.name == "DEGRADED"
    assert {number for number, _ in late.held} == set(range(2, 9))
    scenario.upstream.clear()
    assert_exact(scenario, late)


def test_a_skipped_number_at_the_end_is_noticed_after_a_kill(scenario: World) -> None:
    """The next relay reveals it, although its upstream is gone and sends nothing after the gap."""
    scenario.begin()
    consumer = scenario.consumer()
    scenario.upstream.store(1)
    scenario.settle()
    scenario.upstream.engine.skip_number()
    scenario.upstream.store(2)

    def kill_after_the_gap(step: str) -> None:
        if step == "send" and scenario.relay.status().skipped_seqs:
            scenario.before = lambda _: None
            raise Killed

    scenario.before = kill_after_the_gap
    with pytest.raises(Killed):
        scenario.settle()
    assert not any(isinstance(each, Gap) for each in consumer.seen)
    scenario.kill()
    scenario.upstream.engine.disconnect()
    scenario.begin()
    scenario.settle()
    assert any(isinstance(each, Gap) for each in consumer.seen)


@pytest.mark.parametrize("payload", [b"\xc1", b"\xc1" * (32 * 1024 * 1024 + 1)], ids=["unreadable", "oversized"])
@pytest.mark.parametrize("tokens", ["keep", "drop"])
def test_all_consumers_are_degraded_by_an_undecodable_batch_until_a_clear(scenario: World, payload: bytes, tokens: str) -> None:
    """This holds for early and late consumers and for consumers that ignore heartbeats, also after a kill of the relay."""
    scenario.begin(tokens=tokens, buffer_steps=3)
    early = scenario.consumer(reads_heartbeats=False)
    scenario.upstream.store(1)
    scenario.upstream.engine.publish_payload(payload)
    scenario.upstream.store(2)
    scenario.turn()
    scenario.kill()
    scenario.begin(tokens=tokens, buffer_steps=3)
    for number in range(3, 10):
        scenario.upstream.store(number)
    scenario.settle()
    late, ours = scenario.consumer(reads_heartbeats=False), scenario.consumer()
    scenario.settle()
    assert {each.trust.name for each in (early, late, ours)} == {"DEGRADED"}
    assert scenario.relay.trust().name == "DEGRADED"
    scenario.upstream.clear()
    scenario.upstream.store(4)
    assert_exact(scenario, early, late, ours)


# --- trust


FIRST_BLOCK = BlockStored([1], None, [1, 2, 3, 4], SIZE, medium="GPU", extra_keys=[("salt",)])
ESTIMATES: dict[str, list[KVEvent]] = {
    "pages alone": [BlockStored([hash((1, 2, 3, 4))], None, [1, 2, 3, 4], SIZE, medium="GPU")],
    "unknown parent": [BlockStored([1], 77, [1, 2, 3, 4], SIZE, medium="GPU")],
    "length": [BlockStored([1, 2, 3], None, [1, 2, 3, 4], SIZE, medium="GPU")],
    "token": [BlockStored([1, 2], None, [1, 2, 3, 4, -1, 6, 7, 8], SIZE, medium="GPU")],
    "no keys below the GPU": [FIRST_BLOCK, BlockStored([9], None, [4, 2, 3, 4], SIZE, medium="CPU")],
}
CHANGES: list[dict[str, Any]] = [{}, {"tokens": "hash"}, {"dialect": "vllm-0.33"}]


@pytest.mark.parametrize("events", ESTIMATES.values(), ids=ESTIMATES)
@pytest.mark.parametrize("settings", CHANGES, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_consumers_learn_why_answers_about_an_upstream_are_estimates(
    tmp_path: Path, count: int, settings: dict[str, Any], events: list[KVEvent]
) -> None:
    """Consumers of block keys and of compacted history do not see the reason in the events. A kill does not end it."""
    with world(tmp_path / "journal", count) as scenario:
        scenario.begin(buffer_steps=3, **settings)
        early = scenario.consumer()
        scenario.upstream.publish_events(*events)
        for is_restarted in (False, True):
            if is_restarted:
                scenario.turn(1)
                scenario.kill()
                scenario.begin(buffer_steps=3, **settings)
            for number in range(100, 110):
                scenario.upstream.store(number)
            scenario.confirm()
            late = scenario.consumer()
            scenario.confirm()
            assert [scenario.relay.trust().name, early.trust.name, late.trust.name] == ["DEGRADED"] * 3
        if count > 1 and settings.get("tokens") != "hash":
            return  # a clear of one upstream is sent as removals, which do not end estimates
        scenario.upstream.clear()
        scenario.upstream.publish_events(AllBlocksCleared({"medium": "*"}))
        scenario.confirm()
        assert [scenario.relay.trust().name, early.trust.name, late.trust.name] == ["EXACT"] * 3


@pytest.mark.parametrize("settings", CHANGES, ids=str)
def test_an_estimate_is_reported_again_after_a_restart_of_the_upstream(scenario: World, settings: dict[str, Any]) -> None:
    scenario.begin(**settings)
    consumer = scenario.consumer()
    for _ in range(2):
        scenario.upstream.publish_events(*ESTIMATES["length"])
        scenario.confirm()
        assert [scenario.relay.trust().name, consumer.trust.name] == ["DEGRADED"] * 2
        scenario.upstream.restart()


@pytest.mark.parametrize("settings", CHANGES, ids=str)
def test_an_engine_that_restarts_can_have_other_hashes(scenario: World, settings: dict[str, Any]) -> None:
    """What was learned about the former engine ends with it, for the relay and for early and late consumers."""
    scenario.begin(buffer_steps=3, **settings)
    early = scenario.consumer()
    scenario.upstream.publish_events(*ESTIMATES["pages alone"])
    scenario.confirm()
    assert [scenario.relay.trust().name, early.trust.name] == ["DEGRADED"] * 2
    scenario.upstream.restart()
    for number in range(100, 110):
        scenario.upstream.store(number)
    scenario.confirm()
    late = scenario.consumer()
    scenario.confirm()
    assert [scenario.relay.trust().name, early.trust.name, late.trust.name] == ["EXACT"] * 3


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 50])
def test_a_late_consumer_learns_the_trust_of_the_relay_at_once(scenario: World, steps: int) -> None:
    """A snapshot has no trust, and the next heartbeat can be far away. So the replay buffer always holds a heartbeat."""
    scenario.begin(buffer_steps=steps, heartbeat=600.0)
    scenario.upstream.publish_events(BlockRemoved([], heartbeat=Heartbeat("0" * 32, 600.0, "DEGRADED", "something was lost")))
    scenario.turn()
    for number in range(1, 120):
        scenario.upstream.store(number)
        if number % 7 == 0:
            scenario.turn()
        if number % 20 == 0:
            late = scenario.consumer()
            for _ in range(20):
                late.turn()
                assert late.trust.name != "EXACT"
            assert late.trust.name == "DEGRADED"
    # Heartbeats: one at the start, one for the changed trust, and one whenever the last heartbeat leaves the buffer.
    assert scenario.relay.status().heartbeats <= 4 + 120 // max(1, steps // 2)


def _lose_unnoticed(scenario: World) -> None:
    scenario.upstream.fail_to_publish(block(1_000))


def _publish_unreadable(scenario: World) -> None:
    scenario.upstream.fail_to_publish(block(1_000), payload=b"\xc1")


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
@pytest.mark.parametrize("harm", [_lose_unnoticed, _publish_unreadable])
def test_a_heartbeat_within_a_turn_covers_the_batches_before_it(
    scenario: World, harm: Callable[[World], None], steps: int
) -> None:
    """The consumer is checked after every message. A heartbeat with the right digest and EXACT would end DEGRADED."""
    scenario.begin(buffer_steps=steps)
    consumer = scenario.consumer()
    for number in range(1, 120):
        scenario.upstream.store(number)
    assert_exact(scenario, consumer)
    trusts: list[str] = []

    def record_trust() -> None:
        consumer.turn()
        trusts.append(consumer.trust.name)

    scenario.sent = record_trust
    harm(scenario)
    for number in range(120, 220):
        scenario.upstream.store(number)
    scenario.settle()
    assert consumer.trust.name == "DEGRADED"
    assert "EXACT" not in trusts[trusts.index("DEGRADED") :]
    scenario.upstream.clear()
    assert_exact(scenario, consumer)


def test_batches_lost_before_a_reset_degrade_until_the_reset_is_sent(scenario: World) -> None:
    """The relay receives both in one turn, so it no longer knows the trust of the earlier incarnation."""
    relay = scenario.begin(buffer_steps=4)
    consumer = scenario.consumer()
    store = [encode_batch(KVEventBatch(0.0, [block(number)])) for number in range(60)]
    trusts: list[tuple[int, str]] = []

    def record_trust() -> None:
        consumer.turn()
        trusts.append((len(consumer.held), consumer.trust.name))

    scenario.upstream.store(0)  # live, so that the upstream is EXACT
    scenario.settle()
    relay.take_turn_with([RawBatch("u0", 0, 0, seq, False, store[seq]) for seq in range(1, 20)])
    scenario.settle()
    scenario.sent = record_trust
    relay.take_turn_with(
        [
            Gap("u0", 0, 20, 20),
            *(RawBatch("u0", 0, 0, seq, False, store[seq]) for seq in range(21, 40)),
            Reset("u0", 0, 1, "another"),
            *(RawBatch("u0", 0, 1, seq, False, store[40 + seq]) for seq in range(20)),
        ]
    )
    scenario.settle()
    assert (39, "DEGRADED") in trusts
    assert not {(held, "EXACT") for held in range(21, 40)} & set(trusts)
    assert (len(consumer.held), consumer.trust.name) == (20, "EXACT")


def test_consumers_follow_the_trust_of_the_upstream(scenario: World) -> None:
    scenario.begin()
    consumer = scenario.consumer()
    scenario.upstream.store(1)
    assert_exact(scenario, consumer)
    scenario.upstream.engine.disconnect()
    scenario.turn(2)
    assert consumer.trust.name == "STALE", consumer.trust
    assert "disconnected" in consumer.trust.reason
    scenario.upstream.engine.reconnect()
    assert_exact(scenario, consumer)
    assert all(consumer.agreements())


def test_a_restarted_relay_sends_its_trust_before_it_has_caught_up(scenario: World) -> None:
    """Connected consumers must not take what they hold for the newest state."""
    scenario.begin(heartbeat=60.0)
    consumer = scenario.consumer()
    scenario.upstream.store(1)
    assert_exact(scenario, consumer)
    scenario.kill()
    scenario.upstream.engine.disconnect()
    scenario.upstream.store(2)
    scenario.begin(heartbeat=60.0)
    for _ in range(5):
        consumer.turn()
    assert consumer.trust.name == "STALE", "before the first turn of the relay"
    scenario.turn(5)
    assert consumer.trust.name == "STALE", consumer.trust
    scenario.upstream.engine.reconnect()
    assert_exact(scenario, consumer)


def test_a_batch_that_is_too_large_without_its_heartbeat_is_split(scenario: World) -> None:
    """A part of a snapshot has a heartbeat. Without it, the part can be larger when it is encoded in another dialect."""
    limit = 6_000
    history, encode = Compactor.create(), batch_encoder(resolve_dialect("vllm-0.22"))
    assert history is not None
    for number in range(60):
        stored = BlockStored(
            [number * 100 + at for at in range(40)], None, list(range(number * 1000, number * 1000 + 160)), SIZE
        )
        history.append(encode_batch(KVEventBatch(0.0, [stored])))
    parts = encode_snapshot(history.snapshot_pieces(limit) or [], 0.0, 0, encode, limit, 77)
    assert parts is not None
    assert len(parts) > 1
    engine = scenario.upstream.engine
    engine.next_seq = 100
    for part in parts:
        engine.publish_payload(part, lost=True)
    scenario.begin(limits=RelayLimits(journal=TINY, max_payload_bytes=limit))
    consumer = scenario.consumer()
    scenario.settle()
    assert scenario.relay.status().skipped_seqs == 0
    assert consumer.held.total() == 60 * 40


def test_an_upstreams_digest_is_compared_and_its_heartbeats_are_not_forwarded(scenario: World) -> None:
    scenario.begin()
    consumer = scenario.consumer()
    scenario.upstream.store(1)
    scenario.settle()
    wrong = Heartbeat("f" * 32, 5.0, incarnation=7)
    scenario.upstream.publish_events(BlockRemoved([], heartbeat=wrong))
    scenario.settle()
    assert scenario.relay.status().divergences >= 1
    relayed = [event for _, payload in scenario.event_server.sent for event in decode_batch(payload).batch.events]
    assert wrong not in [event.heartbeat for event in relayed if isinstance(event, BlockRemoved)]
    assert consumer.trust.name != "EXACT"
    assert consumer.held == scenario.truth


@pytest.mark.parametrize("release", ["vllm-0.9", "vllm-0.22", "sglang-0.5.9", "vllm-0.24", "sglang-0.5.22", "vllm"])
def test_the_relays_own_batches_have_the_dialect_of_the_stream(scenario: World, release: str) -> None:
    """These are heartbeats, clears and snapshots, also after a restart with no batch of the upstream in the buffer."""
    row = resolve_dialect(release)
    assert row is not None
    for number in range(1, 9):
        high = BlockStored([number + (1 << 63)], None, [number] * SIZE, SIZE, medium="GPU")
        for event in (high, BlockRemoved(high.block_hashes, "GPU")) if number < 5 else (block(number),):
            scenario.upstream.engine.publish_payload(encode_batch(KVEventBatch(1.0, [event], 0), row))
    scenario.begin(buffer_steps=3)
    scenario.settle()
    scenario.kill()
    scenario.begin(buffer_steps=3)
    scenario.settle()
    buffered = [payload for _, payload in scenario.relay_endpoint.buffer.batches_from(0)]
    events = [event for payload in buffered for event in msgspec.msgpack.decode(payload)[1]]
    assert len(events) > 3
    assert {type(event) for event in events} == {list if row.event_form == "array" else dict}
    consumer = scenario.consumer()
    scenario.confirm()
    assert consumer.trust.name == "EXACT"
    assert {number for number, _ in _blocks_with_copies(consumer)} == set(range(5, 9))


def _blocks_with_copies(consumer: Consumer) -> set[tuple[int, int]]:
    return {(each.hash, each.copies) for each in consumer.index.blocks("relay")}


# --- kills and restarts


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("step", ["write", "keep", "send"])
@pytest.mark.parametrize("after", range(8))
def test_consumers_do_not_notice_a_kill_before_any_step(tmp_path: Path, count: int, step: str, after: int) -> None:
    """The kill is in a turn with batches and a restart of an upstream. The next relay finds the restart in the journal or
    handles it itself."""
    with world(tmp_path / "journal", count) as scenario:
        scenario.begin()
        consumer = scenario.consumer()
        for each in scenario.upstreams:
            each.store(1, 2)
        scenario.settle()
        incarnation_before = scenario.relay.status().incarnation
        scenario.upstream.restart(block(3))
        scenario.upstream.store(4)
        kill_before(scenario, step, after)
        with pytest.raises(Killed):
            scenario.settle()
        scenario.kill()
        assert scenario.begin().status().incarnation == incarnation_before
        assert_exact(scenario, consumer, scenario.consumer())
        assert consumer.resets == 0


def test_a_relay_killed_in_its_first_turns_resumes(scenario: World) -> None:
    scenario.begin()
    incarnation_before = scenario.relay.status().incarnation
    consumer = scenario.consumer()
    scenario.upstream.store(1)
    scenario.turn()
    scenario.kill()
    scenario.begin()
    assert scenario.relay.status().incarnation == incarnation_before
    scenario.upstream.store(2)
    scenario.turn()
    scenario.kill()
    scenario.begin()
    assert_exact(scenario, consumer)
    cleared = [each for each in consumer.seen if isinstance(each, RawBatch) and each.decode().events == CLEARED]
    assert len(cleared) == 1, "the upstream was recognised"


@pytest.mark.parametrize("after", range(12))
def test_batches_repeated_after_a_wrong_digest_are_not_skipped(scenario: World, after: int) -> None:
    """After a wrong digest the relay clears and repeats all batches. If it is killed meanwhile, none of them is skipped."""
    scenario.begin()
    consumer, plain = scenario.consumer(), scenario.consumer(reads_heartbeats=False)
    for number in range(1, 7):
        scenario.upstream.store(number)
    scenario.settle()
    kill_before(scenario, "send", after)
    scenario.upstream.publish_events(BlockRemoved([], heartbeat=Heartbeat("f" * 32, 5.0)))
    with pytest.raises(Killed):
        scenario.settle()
    scenario.kill()
    scenario.begin()
    scenario.settle()
    assert consumer.held == plain.held == scenario.truth


def kill_before_the_checkpoint(scenario: World) -> None:
    """Kill the relay when a batch was sent after a skipped number, before the checkpoint is written."""
    sent = False

    def before(step: str) -> None:
        nonlocal sent
        if step == "write" and sent:
            scenario.before = lambda _: None
            raise Killed
        sent = sent or (step == "send" and scenario.relay.status().skipped_seqs > 0)

    scenario.before = before


def test_lost_batches_that_are_replayed_later_do_not_count_as_forwarded(scenario: World) -> None:
    """The next relay knows the numbers after the gap, and that the numbers in the gap are lost."""
    scenario.begin()
    ours, plain = scenario.consumer(), scenario.consumer(reads_heartbeats=False)
    scenario.upstream.store(1)
    scenario.settle()
    scenario.upstream.engine.answers_replay = False
    scenario.upstream.store(2, lost=True)
    scenario.upstream.store(3)
    kill_before_the_checkpoint(scenario)
    with pytest.raises(Killed):
        scenario.settle()
    scenario.kill()
    scenario.upstream.engine.answers_replay = True
    scenario.begin()
    assert_not_exact_and_wrong(scenario, ours)
    assert plain.trust.name != "EXACT"
    scenario.upstream.clear()
    assert_exact(scenario, ours, plain)


def test_no_batch_is_skipped_of_an_upstream_with_unverified_identity(scenario: World) -> None:
    """Another incarnation has the forwarded numbers, with a clear among them. At first it does not answer replay."""
    scenario.begin()
    ours, plain = scenario.consumer(), scenario.consumer(reads_heartbeats=False)
    scenario.upstream.store(1)
    scenario.settle()
    for number in range(2, 30):
        scenario.upstream.store(number)
    scenario.turn()  # forwarded, before a checkpoint
    scenario.kill()
    scenario.upstream.engine.answers_replay = False
    scenario.upstream.restart(*(block(number) for number in range(40, 45)))
    scenario.begin()
    scenario.upstream.store(45)
    scenario.settle()
    scenario.upstream.clear()
    scenario.upstream.store(50)
    assert_not_exact_and_wrong(scenario, ours)
    scenario.upstream.engine.answers_replay = True
    scenario.upstream.store(51)
    assert_exact(scenario, ours, plain)


def test_a_relay_with_an_interrupted_turn_is_closed_and_nothing_is_lost(scenario: World) -> None:
    scenario.begin()
    consumer = scenario.consumer()
    scenario.upstream.store(1)
    scenario.settle()
    scenario.upstream.store(2)

    def fail(step: str) -> None:
        if step == "keep":
            raise RuntimeError("out of memory")

    scenario.before = fail
    with pytest.raises(RuntimeError):
        scenario.turn()
    scenario.before = lambda _: None
    with pytest.raises(ClosedError, match="interrupted"):
        scenario.relay.turn(0)
    scenario.end()
    scenario.begin()
    assert_exact(scenario, consumer)
    assert consumer.resets == 0


def test_a_closed_relay_resumes(scenario: World) -> None:
    scenario.begin()
    consumer = scenario.consumer()
    scenario.upstream.store(1)
    scenario.settle()
    scenario.end()
    with pytest.raises(ClosedError):
        scenario.relay.turn(0)
    scenario.relay.close()
    scenario.upstream.store(2)
    assert scenario.begin().status().was_resumed
    assert_exact(scenario, consumer)
    assert consumer.resets == 0
    assert "EXACT" in repr(scenario.relay)


def test_other_settings_begin_a_new_incarnation(scenario: World) -> None:
    scenario.begin()
    consumer = scenario.consumer()
    scenario.upstream.store(1)
    scenario.settle()
    scenario.end()
    scenario.begin(tokens="drop")
    assert not scenario.relay.status().was_resumed
    assert "treatment of tokens" in scenario.relay.status().start_reason
    assert_exact(scenario, consumer)
    assert consumer.resets == 1


def test_a_damaged_journal_begins_a_new_incarnation(scenario: World, tmp_path: Path) -> None:
    scenario.begin()
    consumer = scenario.consumer()
    for number in range(1, 30):
        scenario.upstream.store(number)
    scenario.settle()
    incarnation_before = scenario.relay.status().incarnation
    scenario.kill()
    segment = min((tmp_path / "journal").glob("*.log"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    scenario.begin()
    assert scenario.relay.status().incarnation > incarnation_before
    assert scenario.relay.status().start_reason.startswith("new incarnation: ")
    assert_exact(scenario, consumer)
    assert consumer.resets == 1


def test_incarnations_increase_although_the_clock_was_set_back(scenario: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before = scenario.begin().status().incarnation
    assert before > 1_700_000_000_000
    scenario.end()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 1_000_000_000.0)
        scenario.begin(tokens="drop")
    assert scenario.relay.status().incarnation == before + 1


# --- the disk


class FullDisk(WatchedDisk):
    """Fails all writes while it is `full`."""

    def __init__(self) -> None:
        super().__init__(self._refuse)
        self.full = False

    def _refuse(self, call: str, _data: bytes) -> None:
        if self.full and call in {"write", "create"}:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_relay_survives_a_full_disk(scenario: World) -> None:
    disk = FullDisk()
    scenario.begin(disk, buffer_steps=5)
    consumer = scenario.consumer()
    scenario.upstream.store(1)
    scenario.settle()
    disk.full = True
    for number in range(2, 20):
        scenario.upstream.store(number)
    assert_exact(scenario, consumer)
    found = scenario.relay.status().journal
    assert found is not None
    assert (found.state, found.reason) == ("memory", "No space left on device")
    assert found.dropped >= 18
    disk.full = False
    scenario.clock.advance(60)
    scenario.settle()
    found = scenario.relay.status().journal
    assert found is not None
    assert (found.state, found.reason) == ("disk", "")
    scenario.kill()
    scenario.begin(buffer_steps=5)
    assert_exact(scenario, consumer, scenario.consumer())
    assert consumer.resets == 0


def test_the_journal_stays_in_memory_while_the_history_is_lost(scenario: World) -> None:
    """A journal without the batches that left the buffer would be incomplete, and the next relay would not know."""
    disk = FullDisk()
    scenario.begin(disk, buffer_steps=5)
    consumer = scenario.consumer()
    for number in range(1, 20):
        scenario.upstream.store(number)
    scenario.settle()
    disk.full = True
    scenario.upstream.store(20)
    scenario.settle()
    scenario.upstream.engine.publish_payload(msgspec.msgpack.encode([0.0, [["Unknown"]], 0]))  # no snapshot can contain it
    for number in range(21, 30):
        scenario.upstream.store(number)
    scenario.settle()
    disk.full = False
    scenario.clock.advance(60)
    scenario.settle()
    found = scenario.relay.status().journal
    assert found is not None
    assert found.state == "memory"
    scenario.kill()
    scenario.begin(buffer_steps=5)
    scenario.upstream.clear()
    scenario.upstream.store(1)
    assert_exact(scenario, consumer)
    assert consumer.resets == 1, "the relay begins another incarnation"


# --- several upstreams


def test_tiers_of_one_worker_become_one_stream(scenario_of_two: World) -> None:
    gpu, cpu = scenario_of_two.upstreams
    scenario_of_two.begin()
    consumer = scenario_of_two.consumer()
    gpu.store(1, 2, 3)
    cpu.store(2, 3, medium="CPU")
    assert_exact(scenario_of_two, consumer)
    gpu.clear()
    assert_exact(scenario_of_two, consumer)
    cpu.restart(block(3, medium="CPU"))
    gpu.store(1)
    assert_exact(scenario_of_two, consumer, scenario_of_two.consumer())
    assert consumer.resets == 0


def test_equal_hashes_of_ranks_are_separate_copies(scenario_of_two: World) -> None:
    first, second = scenario_of_two.upstreams
    scenario_of_two.begin(buffer_steps=3)
    consumer = scenario_of_two.consumer()
    first.store(1, 2)
    second.store(1, 2)
    first.remove(1)
    first.remove(1)
    scenario_of_two.settle()
    scenario_of_two.kill()
    scenario_of_two.begin(buffer_steps=3)
    assert_exact(scenario_of_two, consumer)
    second.clear()
    assert_exact(scenario_of_two, consumer, scenario_of_two.consumer())
    assert consumer.held == {(2, "GPU"): 1}


def test_a_shared_stream_is_cleared_after_a_gap_when_all_upstreams_are_empty(scenario_of_two: World) -> None:
    """No upstream's clear clears the stream, so consumers without heartbeats would stay DEGRADED."""
    first, second = scenario_of_two.upstreams
    scenario_of_two.begin()
    plain, ours = scenario_of_two.consumer(reads_heartbeats=False), scenario_of_two.consumer()
    first.store(1)
    second.store(2)
    first.engine.skip_number()
    first.store(3)
    scenario_of_two.settle()
    assert plain.trust.name == "DEGRADED"
    first.clear()
    assert_exact(scenario_of_two, ours)
    assert plain.trust.name == "DEGRADED"
    second.clear()
    second.store(4)
    assert_exact(scenario_of_two, ours, plain)


def test_a_clear_of_one_tier_that_the_dialect_cannot_express_clears_all(scenario: World) -> None:
    scenario.begin(dialect="vllm-0.9")
    consumer = scenario.consumer()
    scenario.upstream.store(1)
    scenario.upstream.store(2, medium="CPU")
    scenario.upstream.publish_events(AllBlocksCleared({"medium": "GPU"}))
    scenario.settle()
    assert consumer.trust.name == "DEGRADED"
    assert not consumer.held
    scenario.upstream.clear()
    scenario.upstream.store(5)
    scenario.confirm()
    assert consumer.trust.name == "EXACT", consumer.trust
    assert {number for number, _ in consumer.held} == {5}


@pytest.mark.parametrize("dialect", ["vllm-0.22", "vllm-0.24"])
def test_a_clear_of_one_tier_is_expressed_in_arrays_and_maps(scenario: World, dialect: str) -> None:
    scenario.begin(dialect=dialect)
    consumer = scenario.consumer()
    scenario.upstream.store(1)
    scenario.upstream.store(2, medium="CPU")
    scenario.upstream.publish_events(AllBlocksCleared({"medium": "GPU"}))
    assert_exact(scenario, consumer)
    scenario.upstream.publish_events(AllBlocksCleared(), AllBlocksCleared({"medium": "CPU"}))
    scenario.upstream.store(5)
    assert_exact(scenario, consumer)


def test_a_clear_of_one_tier_behind_a_clear_of_everything_needs_no_expression(scenario: World) -> None:
    """A compacted history begins with both."""
    scenario.begin(dialect="vllm-0.9")
    consumer = scenario.consumer()
    scenario.upstream.store(1)
    scenario.upstream.publish_events(AllBlocksCleared(), AllBlocksCleared({"medium": "CPU"}), block(2))
    scenario.confirm()
    assert consumer.trust.name == "EXACT", consumer.trust
    assert {number for number, _ in consumer.held} == {2}


def test_an_event_that_the_dialect_cannot_express_skips_a_number(scenario: World) -> None:
    """Events in array form have no field for the block keys of another relay."""
    scenario.begin(dialect="vllm-0.22")
    consumer = scenario.consumer()
    scenario.upstream.publish_events(BlockStored([1], None, [], SIZE, medium="GPU", block_keys=[5]), block(2))
    scenario.settle()
    assert consumer.trust.name == "DEGRADED"
    assert {number for number, _ in consumer.held} == {2}


@pytest.mark.parametrize(
    ("dialect", "matched"), [(None, {1, 2, 3}), ("vllm", {1, 3}), ("sglang", {1, 2}), ("vllm-0.10", {1}), ("vllm-0.17", {1, 3})]
)
def test_a_prompt_with_a_salt_never_matches_a_plain_one(scenario_of_two: World, dialect: str | None, matched: set[int]) -> None:
    """A dialect without a field for the salt drops the block. A dialect with a field preserves it beside unknown fields."""
    scenario_of_two.begin(dialect=dialect)
    consumer = scenario_of_two.consumer()
    scenario_of_two.upstream.publish_events(BlockStored([1], None, prompt(1), SIZE, medium="GPU"))
    other_tokens = [SECRET + 99] * SIZE
    salted = [
        BlockStored([2], None, other_tokens, SIZE, medium="GPU", unknown_fields={"note": 1, "cache_salt": "tenant"}),
        BlockStored([3], None, other_tokens, SIZE, medium="GPU", extra_keys=[("tenant",)], unknown_fields={"note": 1}),
    ]
    scenario_of_two.upstream.publish_events(*salted)
    scenario_of_two.settle()
    assert {number for number, _ in consumer.held} == matched
    assert _matched_blocks(consumer, prompt(1)) == 1
    assert _matched_blocks(consumer, other_tokens) == 0
    assert _matched_blocks(consumer, other_tokens, Scope(salt="tenant")) == (matched != {1})


@pytest.mark.parametrize(("dialect", "held"), [(None, {1, 2}), ("vllm", {1, 2}), ("vllm-0.17", {1}), ("sglang-0.5.18", {1})])
def test_a_prompt_with_an_image_never_matches_a_plain_one(scenario: World, dialect: str | None, held: set[int]) -> None:
    """TensorRT-LLM replaces the tokens of all images by one placeholder, and names the image in a field that arrays lack."""
    scenario.begin(dialect=dialect)
    consumer = scenario.consumer()
    image = {"hash": "ab", "start_offset": 0}
    scenario.upstream.publish_events(BlockStored([1], None, prompt(1), SIZE, medium="GPU", unknown_fields={"mm_keys": [[]]}))
    tokens = [SECRET + 99] * SIZE
    scenario.upstream.publish_events(BlockStored([2], None, tokens, SIZE, medium="GPU", unknown_fields={"mm_keys": [[image]]}))
    scenario.settle()
    assert {number for number, _ in consumer.held} == held
    assert (_matched_blocks(consumer, prompt(1)), _matched_blocks(consumer, tokens)) == (1, 0)


# --- tokens


def prompt(blocks: int = 3) -> list[int]:
    return [SECRET + place for place in range(blocks * SIZE)]


def readable_bytes(scenario: World, tmp_path: Path) -> bytes:
    """Return everything that others can read: sent and replayed payloads, and the files of the journal."""
    sent = [payload for _, payload in [*scenario.event_server.sent, *scenario.relay_endpoint.buffer.batches_from(0)]]
    files = [path.read_bytes() for path in (tmp_path / "journal").iterdir() if path.is_file()]
    return b"".join((*sent, *files))


@pytest.mark.parametrize("tokens", ["hash", "drop"])
@pytest.mark.parametrize("count", [1, 2])
def test_redacted_streams_contain_no_tokens_and_match_by_key(tmp_path: Path, tokens: str, count: int) -> None:
    """They contain no salts or extra keys either, also after a restart and for late consumers."""
    with world(tmp_path / "journal", count) as scenario:
        scenario.begin(tokens=tokens, buffer_steps=3)
        early = scenario.consumer()
        for at, each in enumerate(scenario.upstreams):
            tail = prompt()[SIZE:]
            each.publish_events(
                BlockStored([1], None, prompt()[:SIZE], SIZE, medium="GPU", session_id="secret-session"),
                BlockStored([2, 3], 1, tail, SIZE, medium="GPU", unknown_fields={"note": "secret-note"}),
            )
            # The encoder of the engine has no room for a salt beside unknown fields.
            each.publish_events(
                BlockStored([11 + at], None, prompt()[:SIZE], SIZE, medium="GPU", cache_salt="secret-salt"),
                BlockStored([21 + at], None, prompt()[:SIZE], SIZE, medium="GPU", extra_keys=[("secret-key",)]),
            )
            for number in range(100, 110):
                each.store(number)
        scenario.settle()
        for restarted in (False, True):
            if restarted:
                scenario.kill()
                scenario.begin(tokens=tokens, buffer_steps=3)
                scenario.settle()
                scenario.upstream.publish_events(BlockStored([4], 3, [SECRET] * SIZE, SIZE, medium="GPU"))
            late = scenario.consumer()
            assert_exact(scenario, early, late)
            readable = readable_bytes(scenario, tmp_path)
            assert msgspec.msgpack.encode(SECRET) not in readable
            assert b"secret" not in readable
            wanted = (4 if restarted else 3) if tokens == "hash" else 0
            for consumer in (early, late):
                assert _matched_blocks(consumer, [*prompt(), *[SECRET] * SIZE]) == wanted
                assert _matched_blocks(consumer, prompt(1), Scope(salt="secret-salt")) == (tokens == "hash")


def _matched_blocks(consumer: Consumer, tokens: list[int], scope: Scope = Scope()) -> int:  # noqa: B008 - frozen
    """Return how many blocks of a prompt a consumer holds."""
    return tokens_of(consumer.index, tokens, scope, ("relay", 0)) // SIZE


@pytest.mark.parametrize("salted", [False, True])
def test_a_journal_with_salted_prompts_begins_a_new_incarnation(scenario: World, salted: bool) -> None:
    """The journal has the keys but not the salt, on which the keys of all following blocks depend."""
    scenario.begin(tokens="hash")
    scope = Scope(salt="of-a-tenant" if salted else None)
    scenario.upstream.publish_events(BlockStored([1], None, prompt()[:SIZE], SIZE, medium="GPU", cache_salt=scope.salt))
    scenario.settle()
    scenario.kill()
    scenario.begin(tokens="hash")
    assert scenario.relay.status().was_resumed is not salted
    scenario.settle()
    scenario.upstream.publish_events(BlockStored([2], 1, prompt()[SIZE:][:SIZE], SIZE, medium="GPU"))
    consumer = scenario.consumer()
    assert_exact(scenario, consumer)
    assert _matched_blocks(consumer, prompt()[: 2 * SIZE], scope) == 2


def test_keys_of_another_relay_are_forwarded(scenario: World) -> None:
    """The first relay has removed the tokens, and the blocks can still be matched."""
    scenario.begin(tokens="hash")
    consumer = scenario.consumer()
    scenario.upstream.publish_events(BlockStored([1, 2], None, [], SIZE, medium="GPU", block_keys=block_keys(prompt(2), SIZE)))
    assert_exact(scenario, consumer)
    assert _matched_blocks(consumer, prompt()) == 2


# --- settings and status


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"upstreams": ()}, "at least one upstream"),
        (
            {"upstreams": (Source("tcp://a:1", name="x"), Source("tcp://b:1", name="x"))},
            "tcp://a:1 and tcp://b:1 have the same name and rank, x",
        ),
        ({"upstreams": (Source("tcp://127.0.0.1:6557"),)}, "is the relay's own endpoint; name the engine's"),
        ({"upstreams": (Source("tcp://localhost:6557"),)}, "is the relay's own endpoint"),
        ({"upstreams": (Source("tcp://127.0.0.1:1"),), "endpoint": "tcp://*:1"}, "is the relay's own endpoint"),
        ({"heartbeat": 0}, "heartbeat is 0"),
        ({"heartbeat": float("nan")}, "heartbeat is nan"),
        ({"heartbeat": 1e9}, "heartbeat is 1000000000"),
        ({"buffer_steps": 0}, "buffer_steps is 0"),
        ({"hwm": -1}, "hwm is -1"),
        ({"tokens": "hash", "dialect": "vllm-0.22"}, "has no field"),
        ({"dialect": "vllm-0.1"}, "older than"),
    ],
    ids=str,
)
def test_invalid_settings_raise(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        RelaySettings(**{"upstreams": (Source("tcp://a:1"),), **wrong})


def test_the_status_can_be_read_from_any_thread(scenario: World) -> None:
    scenario.begin(buffer_steps=5)
    failed: list[BaseException] = []
    stop, was_read = threading.Event(), threading.Event()

    def read_status() -> None:
        try:
            while not stop.is_set():
                assert scenario.relay.status().blocks >= 0
                repr(scenario.relay)
                was_read.set()
        except BaseException as error:  # noqa: BLE001 - the test reports any exception
            failed.append(error)
            was_read.set()

    threads = [threading.Thread(target=read_status) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(200):
        scenario.upstream.store(number)
        if number % 20 == 0:
            scenario.upstream.engine.disconnect()
            scenario.turn()
            scenario.upstream.engine.reconnect()
        scenario.turn()
    assert was_read.wait(60)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failed
