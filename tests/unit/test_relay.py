"""A relay between engines and consumers in memory: what it sends, what it restores, and what it never sends."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from index_cases import tokens_of
from index_keys import Scope
from kvevents.config import resolve_dialect
from kvevents.errors import ClosedError, ConfigError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import block_keys
from kvevents.publisher.compaction import Compactor, encode_snapshot
from kvevents.relay import RelayLimits, RelaySettings
from kvevents.relay.checkpoints import _incarnation_after
from kvevents.stream import Gap, RawBatch, Reset, Source
from kvevents.wire import decode_batch, encode_batch
from kvevents.wire.encode import batch_encoder
from relay_cases import SIZE, Consumer, World, block, kill_before, world
from relay_journal_cases import TINY, Killed, WatchedDisk

SECRET = 1_234_567
"""A token id that occurs in prompts only."""
CLEAR = encode_batch(KVEventBatch(0.0, [AllBlocksCleared()]))


@pytest.fixture(name="made")
def one_world(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path / "journal") as found:
        yield found


@pytest.fixture(name="two")
def world_of_two(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path / "journal", 2) as found:
        yield found


def exact(made: World, *consumers: Consumer) -> None:
    made.confirm()
    for consumer in consumers:
        assert consumer.trust.name == "EXACT", consumer.trust
        assert consumer.held == made.truth


def honest(made: World, *consumers: Consumer) -> None:
    """Settle, and check that no consumer that holds something else is EXACT."""
    made.settle()
    for consumer in consumers:
        assert consumer.trust.name != "EXACT" or consumer.held == made.truth


# --- forwarding


def test_payloads_are_forwarded_unchanged_behind_a_clear(made: World) -> None:
    payloads = [encode_batch(KVEventBatch(float(number), [block(number)])) for number in range(5)]
    for payload in payloads:
        made.upstream.engine.publish_payload(payload)
    made.begin()
    made.turn(3)
    payloads_sent = [payload for _, payload in made.event_server.sent if b"heartbeat" not in payload]
    assert [number for number, _ in made.event_server.sent] == list(range(len(made.event_server.sent)))
    assert decode_batch(payloads_sent[0]).batch.events == [AllBlocksCleared()]
    assert payloads_sent[1:] == payloads


def test_a_late_consumer_receives_the_live_blocks(made: World) -> None:
    made.begin(buffer_steps=3)
    early = made.consumer()
    made.upstream.store(*range(1, 20))
    for number in range(1, 15):
        made.upstream.remove(number)
    late = made.consumer()
    exact(made, early, late)
    assert late.agreements()
    assert all(late.agreements())
    assert late.index.digest("relay") == early.index.digest("relay") == made.relay.status().digest


def test_a_restart_of_the_upstream_is_a_clear_and_numbers_continue(made: World) -> None:
    """A consumer without heartbeats holds the right blocks after it."""
    made.begin()
    plain, ours = made.consumer(reads_heartbeats=False), made.consumer()
    made.upstream.store(1, 2, 3)
    made.settle()
    made.upstream.restart(block(7))
    exact(made, plain, ours)
    assert plain.resets == ours.resets == 0
    assert not any(isinstance(each, Reset | Gap) for each in plain.seen)


def test_lower_trust_is_sent_before_doubtful_batches(made: World) -> None:
    """Replayed batches can be another engine's until a live batch confirms them: no consumer is EXACT meanwhile."""
    for number in range(3):
        made.upstream.store(number + 1, lost=True)
    made.begin()
    consumer, seen = made.consumer(), list[tuple[str, int]]()

    def look() -> None:
        consumer.turn()
        seen.append((consumer.trust.name, consumer.held.total()))

    made.sent = look
    made.turn(10)
    assert seen[-1] == ("DEGRADED", 3)
    assert [held for trust, held in seen if trust == "EXACT" and held] == []
    exact(made, consumer)


@pytest.mark.parametrize("between", [Reset("u0", 0, 1, "another"), Gap("u0", 0, 10, 11, 1, compacted=True)])
def test_lower_trust_is_sent_before_batches_around_a_reset_or_a_gap(made: World, between: Reset | Gap) -> None:
    """Batches before it in the same turn are doubtful, and a snapshot after it can have several batches."""
    relay = made.begin()
    made.upstream.store(1)
    exact(made, consumer := made.consumer())
    seen: list[str] = []

    def look() -> None:
        consumer.turn()
        seen.append(consumer.trust.name)

    made.sent = look
    store = [encode_batch(KVEventBatch(0.0, [block(number)])) for number in range(3)]
    deliveries: list[RawBatch | Reset | Gap] = [
        RawBatch("u0", 0, 0, 9, False, store[0]),
        between,
        RawBatch("u0", 0, 1, 12, True, store[1]),
        RawBatch("u0", 0, 1, 13, True, store[2]),
    ]
    relay._warn(deliveries)
    relay._forward(deliveries)
    assert len(seen) >= 4
    assert set(seen) == {"DEGRADED"}


REWRITING: list[dict[str, Any]] = [{"dialect": "vllm-0.22"}, {"dialect": "sglang"}, {"tokens": "hash"}, {"tokens": "drop"}]


SENT_ON: dict[str, list[list[KVEvent]]] = {
    "stores": [[block(5)], [block(6)]],
    "a clear": [[AllBlocksCleared()]],
    "a snapshot": [[AllBlocksCleared(), block(5), block(6), BlockRemoved([], heartbeat=Heartbeat("", 1.0))]],
    "a clear and a store": [[AllBlocksCleared(), block(5)]],
    "a store and a heartbeat": [[block(5)], [BlockRemoved([], heartbeat=Heartbeat("", 1.0))]],
}
"""Batches that a relay forwards after its last checkpoint."""


@pytest.mark.parametrize("sent_on", SENT_ON)
@pytest.mark.parametrize(("upstreams", "settings"), [*((1, settings) for settings in ({}, *REWRITING)), (2, {})])
def test_after_a_kill_the_upstream_must_have_sent_what_was_forwarded_after_the_checkpoint(
    upstreams: int, settings: dict[str, Any], sent_on: str, tmp_path: Path
) -> None:
    """Another incarnation is equal up to the checkpoint and differs after it: its batches there are not skipped."""
    with world(tmp_path / "journal", upstreams) as made:
        forward_after_the_last_checkpoint(made, settings, SENT_ON[sent_on])


def forward_after_the_last_checkpoint(made: World, settings: dict[str, Any], sent_on: list[list[KVEvent]]) -> None:
    engine = made.upstream.engine
    payloads = [encode_batch(KVEventBatch(float(number), [block(number)])) for number in range(1, 5)]
    for payload in payloads[:3]:
        engine.publish_payload(payload)
    made.begin(**settings)
    consumer = made.consumer()
    made.settle()
    engine.publish_payload(payloads[3])
    made.settle()
    marked = made.relay._checkpoints.checkpoints[0].last_seq
    for number, events in enumerate(sent_on, 5):
        engine.publish_payload(encode_batch(KVEventBatch(float(number), events)))
    made.turn(1)
    held = {number for number, _ in consumer.held}
    assert held != {1, 2, 3, 4}
    assert marked == made.relay._checkpoints.checkpoints[0].last_seq == 3, (
        "the batches that follow were forwarded before a new checkpoint"
    )
    made.kill()
    made.upstream.restart()
    engine.disconnect()
    for payload in [*payloads, *(encode_batch(KVEventBatch(0.0, [block(number)])) for number in (21, 22))]:
        engine.publish_payload(payload)
    engine.reconnect()
    made.begin(**settings)
    made.settle()
    engine.publish_payload(encode_batch(KVEventBatch(0.0, [block(23)])))
    made.settle()
    assert made.relay.status().was_resumed
    assert sorted(number for number, _ in consumer.held) == [1, 2, 3, 4, 21, 22, 23]


def test_a_gap_of_the_upstream_skips_a_number_until_a_clear(made: World) -> None:
    made.begin()
    plain, ours = made.consumer(reads_heartbeats=False), made.consumer()
    made.upstream.store(1)
    made.upstream.engine.skip_number()
    made.upstream.store(2)
    made.settle()
    late = made.consumer()
    made.settle()
    for consumer in (plain, ours, late):
        assert consumer.trust.name == "DEGRADED", consumer.trust
        assert sum(isinstance(each, Gap) for each in consumer.seen) == 1
    assert made.relay.status().skipped_seqs == 1
    made.upstream.clear()
    made.upstream.store(3)
    exact(made, plain, ours, late)


CLEARING = RawBatch("u0", 0, 0, 9, False, CLEAR)


@pytest.mark.parametrize(("between", "holes"), [(None, 1), (CLEARING, 2), (Reset("u0", 0, 0, "another"), 2)])
def test_gaps_of_one_turn_skip_one_number_unless_a_clear_is_between_them(
    made: World, between: RawBatch | Reset | None, holes: int
) -> None:
    """For each skipped number consumers request the whole replay buffer twice."""
    relay = made.begin()
    plain, ours = made.consumer(reads_heartbeats=False), made.consumer()
    store = [encode_batch(KVEventBatch(0.0, [block(number)])) for number in range(3)]
    relay._forward(
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
    made.settle()
    assert relay.status().skipped_seqs == holes
    for consumer in (plain, ours):
        assert sum(isinstance(each, Gap) for each in consumer.seen) == holes
    assert plain.trust.name == "DEGRADED"
    assert len(plain.held) == (3 if between is None else 1)


def test_numbers_that_a_snapshot_replaces_skip_no_number(made: World) -> None:
    """Compacted history of the upstream is complete downstream too, and does not count as lost."""
    relay = made.begin()
    consumer = made.consumer()
    relay._forward([Gap("u0", 0, 0, 8, compacted=True), CLEARING])
    made.settle()
    assert relay.status().skipped_seqs == 0
    assert not any(isinstance(each, Gap) for each in consumer.seen)
    assert relay._checkpoints.checkpoints[0].degraded_reasons == {}


def test_history_that_was_truncated_before_the_relay_started_is_sent_as_far_as_known(made: World) -> None:
    """The clear at the start of each incarnation leaves a number for a snapshot, although a number is skipped at once."""
    made.upstream.store(1)
    made.upstream.forget()
    made.upstream.store(2)
    made.begin(buffer_steps=2)
    for number in range(3, 9):
        made.upstream.store(number)
    made.settle()
    late = made.consumer()
    made.settle()
    assert late.trust.name == "DEGRADED"
    assert {number for number, _ in late.held} == set(range(2, 9))
    made.upstream.clear()
    exact(made, late)


def test_a_skipped_number_at_the_end_is_noticed_after_a_kill(made: World) -> None:
    made.begin()
    consumer = made.consumer()
    made.upstream.store(1)
    made.settle()
    made.relay._sequencer.skip_number()
    made.kill()
    made.begin()
    made.settle()
    assert any(isinstance(each, Gap) for each in consumer.seen)
    made.confirm()
    assert consumer.trust.name == "EXACT"  # by digest: no batch had it


@pytest.mark.parametrize("payload", [b"\xc1", b"\xc1" * (32 * 1024 * 1024 + 1)], ids=["unreadable", "oversized"])
@pytest.mark.parametrize("tokens", ["keep", "drop"])
def test_all_consumers_are_degraded_by_an_undecodable_batch_until_a_clear(made: World, payload: bytes, tokens: str) -> None:
    """Early consumers, late ones, and those without heartbeats; also if the relay was killed since."""
    made.begin(tokens=tokens, buffer_steps=3)
    early = made.consumer(reads_heartbeats=False)
    made.upstream.store(1)
    made.upstream.engine.publish_payload(payload)
    made.upstream.store(2)
    made.turn()
    made.kill()
    made.begin(tokens=tokens, buffer_steps=3)
    for number in range(3, 10):
        made.upstream.store(number)
    made.settle()
    late, ours = made.consumer(reads_heartbeats=False), made.consumer()
    made.settle()
    assert {each.trust.name for each in (early, late, ours)} == {"DEGRADED"}
    assert made.relay.trust().name == "DEGRADED"
    made.upstream.clear()
    made.upstream.store(4)
    exact(made, early, late, ours)


# --- trust


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 50])
def test_a_late_consumer_learns_the_trust_of_the_relay_at_once(made: World, steps: int) -> None:
    """A snapshot has no trust, and the next heartbeat can be far away: the replay buffer always holds one."""
    made.begin(buffer_steps=steps, heartbeat=600.0)
    made.upstream.say(BlockRemoved([], heartbeat=Heartbeat("0" * 32, 600.0, "DEGRADED", "something was lost")))
    made.turn()
    for number in range(1, 120):
        made.upstream.store(number)
        if number % 7 == 0:
            made.turn()
        if number % 20 == 0:
            late = made.consumer()
            for _ in range(20):
                late.turn()
                assert late.trust.name != "EXACT"
            assert late.trust.name == "DEGRADED"
    # One at the start, one for the changed trust, then by batches that leave the buffer, not for each batch.
    assert made.relay.status().heartbeats <= 4 + 120 // max(1, steps // 2)


def _lost(made: World) -> None:
    made.upstream.fail_to_say(block(1_000))


def _unreadable(made: World) -> None:
    made.upstream.fail_to_say(block(1_000), payload=b"\xc1")


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
@pytest.mark.parametrize("harm", [_lost, _unreadable])
def test_a_heartbeat_within_a_turn_covers_the_batches_before_it(made: World, harm: Callable[[World], None], steps: int) -> None:
    """The consumer is checked after every message: a heartbeat with the right digest and EXACT would end its doubt."""
    made.begin(buffer_steps=steps)
    consumer = made.consumer()
    for number in range(1, 120):
        made.upstream.store(number)
    exact(made, consumer)
    trusts: list[str] = []

    def look() -> None:
        consumer.turn()
        trusts.append(consumer.trust.name)

    made.sent = look
    harm(made)
    for number in range(120, 220):
        made.upstream.store(number)
    made.settle()
    assert consumer.trust.name == "DEGRADED"
    assert "EXACT" not in trusts[trusts.index("DEGRADED") :]
    made.upstream.clear()
    exact(made, consumer)


def test_batches_lost_before_a_reset_degrade_until_the_reset_is_sent(made: World) -> None:
    """They were received together, so the trust of the earlier incarnation is not known any more."""
    relay = made.begin(buffer_steps=4)
    consumer = made.consumer()
    store = [encode_batch(KVEventBatch(0.0, [block(number)])) for number in range(60)]
    trusts: list[tuple[int, str]] = []

    def look() -> None:
        consumer.turn()
        trusts.append((len(consumer.held), consumer.trust.name))

    made.upstream.store(0)  # live, so that the upstream is EXACT
    made.settle()
    relay._forward([RawBatch("u0", 0, 0, seq, False, store[seq]) for seq in range(1, 20)])
    made.settle()
    made.sent = look
    relay._forward(
        [
            Gap("u0", 0, 20, 20),
            *(RawBatch("u0", 0, 0, seq, False, store[seq]) for seq in range(21, 40)),
            Reset("u0", 0, 1, "another"),
            *(RawBatch("u0", 0, 1, seq, False, store[40 + seq]) for seq in range(20)),
        ]
    )
    made.settle()
    assert (39, "DEGRADED") in trusts
    assert not {(held, "EXACT") for held in range(21, 40)} & set(trusts)
    assert (len(consumer.held), consumer.trust.name) == (20, "EXACT")


def test_consumers_follow_the_trust_of_the_upstream(made: World) -> None:
    made.begin()
    consumer = made.consumer()
    made.upstream.store(1)
    exact(made, consumer)
    made.upstream.engine.disconnect()
    made.turn(2)
    assert consumer.trust.name == "STALE", consumer.trust
    assert "disconnected" in consumer.trust.reason
    made.upstream.engine.reconnect()
    exact(made, consumer)
    assert all(consumer.agreements())


def test_a_restarted_relay_sends_its_trust_before_it_has_caught_up(made: World) -> None:
    """Connected consumers must not take what they hold for the newest state."""
    made.begin(heartbeat=60.0)
    consumer = made.consumer()
    made.upstream.store(1)
    exact(made, consumer)
    made.kill()
    made.upstream.engine.disconnect()
    made.upstream.store(2)
    made.begin(heartbeat=60.0)
    for _ in range(5):
        consumer.turn()
    assert consumer.trust.name == "STALE", "before the first turn of the relay"
    made.turn(5)
    assert consumer.trust.name == "STALE", consumer.trust
    made.upstream.engine.reconnect()
    exact(made, consumer)


def test_a_batch_that_is_too_large_without_its_heartbeat_is_split(made: World) -> None:
    """A part of a snapshot has a heartbeat; encoded again without it, it can be larger."""
    limit = 6_000
    history, encode = Compactor.create(), batch_encoder(resolve_dialect("vllm-0.22"))
    assert history is not None
    for number in range(60):
        stored = BlockStored(
            [number * 100 + at for at in range(40)], None, list(range(number * 1000, number * 1000 + 160)), SIZE
        )
        history.append(encode_batch(KVEventBatch(0.0, [stored])))
    parts = encode_snapshot(history.events() or [], 0.0, 0, encode, limit, 77)
    assert parts is not None
    assert len(parts) > 1
    engine = made.upstream.engine
    engine._next_seq = 100
    for part in parts:
        engine.publish_payload(part, lost=True)
    made.begin(limits=RelayLimits(journal=TINY, max_payload_bytes=limit))
    consumer = made.consumer()
    made.settle()
    assert made.relay.status().skipped_seqs == 0
    assert consumer.held.total() == 60 * 40


def test_an_upstreams_digest_is_compared_and_its_heartbeats_are_not_forwarded(made: World) -> None:
    made.begin()
    consumer = made.consumer()
    made.upstream.store(1)
    made.settle()
    wrong = Heartbeat("f" * 32, 5.0, incarnation=7)
    made.upstream.say(BlockRemoved([], heartbeat=wrong))
    made.settle()
    assert made.relay.status().divergences >= 1
    relayed = [event for _, payload in made.event_server.sent for event in decode_batch(payload).batch.events]
    assert wrong not in [event.heartbeat for event in relayed if isinstance(event, BlockRemoved)]
    assert consumer.trust.name != "EXACT"
    assert consumer.held == made.truth


@pytest.mark.parametrize("release", ["vllm-0.9", "vllm-0.22", "sglang-0.5.9", "vllm-0.24", "sglang-0.5.22", "vllm"])
def test_the_relays_own_batches_have_the_dialect_of_the_stream(made: World, release: str) -> None:
    """Heartbeats, clears and snapshots, also after a restart with no batch of the upstream in the buffer."""
    row = resolve_dialect(release)
    assert row is not None
    for number in range(1, 9):
        high = BlockStored([number + (1 << 63)], None, [number] * SIZE, SIZE, medium="GPU")
        for event in (high, BlockRemoved(high.block_hashes, "GPU")) if number < 5 else (block(number),):
            made.upstream.engine.publish_payload(encode_batch(KVEventBatch(1.0, [event], 0), row))
    made.begin(buffer_steps=3)
    made.settle()
    made.kill()
    made.begin(buffer_steps=3)
    made.settle()
    buffered = [payload for _, payload in made.relay._buffer.batches_from(0)]
    events = [event for payload in buffered for event in msgspec.msgpack.decode(payload)[1]]
    assert len(events) > 3
    assert {type(event) for event in events} == {list if row.event_form == "array" else dict}
    consumer = made.consumer()
    made.confirm()
    assert consumer.trust.name == "EXACT"
    assert {number for number, _ in _blocks(consumer)} == set(range(5, 9))


def _blocks(consumer: Consumer) -> set[tuple[int, int]]:
    return {(each.hash, each.copies) for each in consumer.index.blocks("relay")}


# --- kills and restarts


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("step", ["write", "keep", "send"])
@pytest.mark.parametrize("after", range(8))
def test_consumers_do_not_notice_a_kill_before_any_step(tmp_path: Path, count: int, step: str, after: int) -> None:
    """In a turn with batches and a restart of an upstream, which the next relay finds recorded or handles itself."""
    with world(tmp_path / "journal", count) as made:
        made.begin()
        consumer = made.consumer()
        for each in made.upstreams:
            each.store(1, 2)
        made.settle()
        life = made.relay.status().incarnation
        made.upstream.restart(block(3))
        made.upstream.store(4)
        kill_before(made, step, after)
        with pytest.raises(Killed):
            made.settle()
        made.kill()
        assert made.begin().status().incarnation == life
        exact(made, consumer, made.consumer())
        assert consumer.resets == 0


def test_a_relay_killed_in_its_first_turns_resumes(made: World) -> None:
    made.begin()
    life = made.relay.status().incarnation
    consumer = made.consumer()
    made.upstream.store(1)
    made.turn()
    made.kill()
    made.begin()
    assert made.relay.status().incarnation == life
    made.upstream.store(2)
    made.turn()
    made.kill()
    made.begin()
    exact(made, consumer)
    cleared = [each for each in consumer.seen if isinstance(each, RawBatch) and each.decode().events == [AllBlocksCleared()]]
    assert len(cleared) == 1, "the upstream was recognised"


@pytest.mark.parametrize("after", range(12))
def test_batches_repeated_after_a_wrong_digest_are_not_skipped(made: World, after: int) -> None:
    """After a wrong digest the relay retracts everything; a relay killed meanwhile must not skip what it retracted."""
    made.begin()
    consumer, plain = made.consumer(), made.consumer(reads_heartbeats=False)
    for number in range(1, 7):
        made.upstream.store(number)
    made.settle()
    kill_before(made, "send", after)
    made.upstream.say(BlockRemoved([], heartbeat=Heartbeat("f" * 32, 5.0)))
    with pytest.raises(Killed):
        made.settle()
    made.kill()
    made.begin()
    made.settle()
    assert consumer.held == plain.held == made.truth


def kill_before_the_checkpoint(made: World, skipped: int) -> None:
    """Kill the relay when a batch was sent after `skipped` skipped numbers, before the checkpoint is written."""
    sent = False

    def before(step: str) -> None:
        nonlocal sent
        if step == "write" and sent:
            made.before = lambda _: None
            raise Killed
        sent = sent or (step == "send" and made.relay.status().skipped_seqs >= skipped)

    made.before = before


def test_lost_batches_that_are_replayed_later_do_not_count_as_forwarded(made: World) -> None:
    """The next relay knows the numbers after the gap, and that those in it are lost."""
    made.begin()
    ours, plain = made.consumer(), made.consumer(reads_heartbeats=False)
    made.upstream.store(1)
    made.settle()
    made.upstream.engine.answers_replay = False
    made.upstream.store(2, lost=True)
    made.upstream.store(3)
    kill_before_the_checkpoint(made, skipped=1)
    with pytest.raises(Killed):
        made.settle()
    made.kill()
    made.upstream.engine.answers_replay = True
    made.begin()
    honest(made, ours)
    assert plain.trust.name != "EXACT"
    made.upstream.clear()
    exact(made, ours, plain)


def test_no_batch_is_skipped_of_an_upstream_with_unproven_identity(made: World) -> None:
    """Another incarnation has the forwarded numbers, and a clear among them; replay is not answered at first."""
    made.begin()
    ours, plain = made.consumer(), made.consumer(reads_heartbeats=False)
    made.upstream.store(1)
    made.settle()
    for number in range(2, 30):
        made.upstream.store(number)
    made.turn()  # sent, before a checkpoint
    made.kill()
    made.upstream.engine.answers_replay = False
    made.upstream.restart(*(block(number) for number in range(40, 45)))
    made.begin()
    made.upstream.store(45)
    made.settle()
    made.upstream.clear()
    made.upstream.store(50)
    honest(made, ours)
    made.upstream.engine.answers_replay = True
    made.upstream.store(51)
    exact(made, ours, plain)


def test_an_interrupted_turn_is_the_last_and_nothing_is_lost(made: World) -> None:
    made.begin()
    consumer = made.consumer()
    made.upstream.store(1)
    made.settle()
    made.upstream.store(2)

    def fail(step: str) -> None:
        if step == "keep":
            raise RuntimeError("out of memory")

    made.before = fail
    with pytest.raises(RuntimeError):
        made.turn()
    made.before = lambda _: None
    with pytest.raises(ClosedError, match="interrupted"):
        made.relay.turn(0)
    made.end()
    made.begin()
    exact(made, consumer)
    assert consumer.resets == 0


def test_a_closed_relay_resumes(made: World) -> None:
    made.begin()
    consumer = made.consumer()
    made.upstream.store(1)
    made.settle()
    made.end()
    with pytest.raises(ClosedError):
        made.relay.turn(0)
    made.relay.close()
    made.upstream.store(2)
    assert made.begin().status().was_resumed
    exact(made, consumer)
    assert consumer.resets == 0
    assert "EXACT" in repr(made.relay)


def test_other_settings_begin_a_new_incarnation(made: World) -> None:
    made.begin()
    consumer = made.consumer()
    made.upstream.store(1)
    made.settle()
    made.end()
    made.begin(tokens="drop")
    assert not made.relay.status().was_resumed
    assert "treatment of tokens" in made.relay.status().start_reason
    exact(made, consumer)
    assert consumer.resets == 1


def test_a_damaged_journal_begins_a_new_incarnation(made: World, tmp_path: Path) -> None:
    made.begin()
    consumer = made.consumer()
    for number in range(1, 30):
        made.upstream.store(number)
    made.settle()
    life = made.relay.status().incarnation
    made.kill()
    segment = min((tmp_path / "journal").glob("*.log"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    made.begin()
    assert made.relay.status().incarnation > life
    assert made.relay.status().start_reason.startswith("new incarnation: ")
    exact(made, consumer)
    assert consumer.resets == 1


def test_incarnations_increase_although_the_clock_was_set_back() -> None:
    assert _incarnation_after(1 << 60) == (1 << 60) + 1
    assert _incarnation_after(None) > 1_700_000_000_000


# --- the disk


class FullDisk(WatchedDisk):
    """Fails all writes while it is `full`."""

    def __init__(self) -> None:
        super().__init__(self._refuse)
        self.full = False

    def _refuse(self, call: str, _data: bytes) -> None:
        if self.full and call in {"write", "create"}:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_relay_survives_a_full_disk(made: World) -> None:
    disk = FullDisk()
    made.begin(disk, buffer_steps=5)
    consumer = made.consumer()
    made.upstream.store(1)
    made.settle()
    disk.full = True
    for number in range(2, 20):
        made.upstream.store(number)
    exact(made, consumer)
    found = made.relay.status().journal
    assert found is not None
    assert (found.state, found.reason) == ("memory", "No space left on device")
    assert found.dropped >= 18
    disk.full = False
    made.clock.advance(60)
    made.settle()
    found = made.relay.status().journal
    assert found is not None
    assert (found.state, found.reason) == ("disk", "")
    made.kill()
    made.begin(buffer_steps=5)
    exact(made, consumer, made.consumer())
    assert consumer.resets == 0


def test_the_journal_stays_in_memory_while_the_history_is_lost(made: World) -> None:
    """A journal without the batches that left the buffer would be incomplete, and the next relay would not know."""
    disk = FullDisk()
    made.begin(disk, buffer_steps=5)
    consumer = made.consumer()
    for number in range(1, 20):
        made.upstream.store(number)
    made.settle()
    disk.full = True
    made.upstream.store(20)
    made.settle()
    history = made.relay._buffer._compactor
    assert history is not None
    history.invalidate("payloads")
    disk.full = False
    made.clock.advance(60)
    made.settle()
    found = made.relay.status().journal
    assert found is not None
    assert found.state == "memory"
    made.kill()
    made.begin(buffer_steps=5)
    exact(made, consumer)
    assert consumer.resets == 1, "it is another incarnation"


# --- several upstreams


def test_tiers_of_one_worker_become_one_stream(two: World) -> None:
    gpu, cpu = two.upstreams
    two.begin()
    consumer = two.consumer()
    gpu.store(1, 2, 3)
    cpu.store(2, 3, medium="CPU")
    exact(two, consumer)
    gpu.clear()
    exact(two, consumer)
    cpu.restart(block(3, medium="CPU"))
    gpu.store(1)
    exact(two, consumer, two.consumer())
    assert consumer.resets == 0


def test_equal_hashes_of_ranks_are_separate_copies(two: World) -> None:
    first, second = two.upstreams
    two.begin(buffer_steps=3)
    consumer = two.consumer()
    first.store(1, 2)
    second.store(1, 2)
    first.remove(1)
    first.remove(1)
    two.settle()
    two.kill()
    two.begin(buffer_steps=3)
    exact(two, consumer)
    second.clear()
    exact(two, consumer, two.consumer())
    assert consumer.held == {(2, "GPU"): 1}


def test_a_shared_stream_is_cleared_after_a_gap_when_all_upstreams_are_empty(two: World) -> None:
    """No upstream's clear clears the stream, so consumers without heartbeats would stay DEGRADED."""
    first, second = two.upstreams
    two.begin()
    plain, ours = two.consumer(reads_heartbeats=False), two.consumer()
    first.store(1)
    second.store(2)
    first.engine.skip_number()
    first.store(3)
    two.settle()
    assert plain.trust.name == "DEGRADED"
    first.clear()
    exact(two, ours)
    assert plain.trust.name == "DEGRADED"
    second.clear()
    second.store(4)
    exact(two, ours, plain)


def test_a_clear_of_one_tier_that_the_dialect_cannot_express_clears_all(made: World) -> None:
    made.begin(dialect="vllm-0.22")
    consumer = made.consumer()
    made.upstream.store(1)
    made.upstream.store(2, medium="CPU")
    made.upstream.say(AllBlocksCleared({"medium": "GPU"}))
    made.settle()
    assert consumer.trust.name == "DEGRADED"
    assert not consumer.held
    made.upstream.clear()
    made.upstream.store(5)
    exact(made, consumer)


def test_an_event_that_the_dialect_cannot_express_skips_a_number(made: World) -> None:
    """Events as arrays have no field for keys of another relay."""
    made.begin(dialect="vllm-0.22")
    consumer = made.consumer()
    made.upstream.say(BlockStored([1], None, [], SIZE, medium="GPU", block_keys=[5]), block(2))
    made.settle()
    assert consumer.trust.name == "DEGRADED"
    assert {number for number, _ in consumer.held} == {2}


@pytest.mark.parametrize(
    ("dialect", "matched"), [(None, {1, 2, 3}), ("vllm", {1, 3}), ("sglang", {1, 2}), ("vllm-0.10", {1}), ("vllm-0.17", {1, 3})]
)
def test_a_prompt_with_a_salt_never_matches_a_plain_one(two: World, dialect: str | None, matched: set[int]) -> None:
    """A dialect without a field for it drops the block; one with a field keeps it beside unknown fields."""
    two.begin(dialect=dialect)
    consumer = two.consumer()
    two.upstream.say(BlockStored([1], None, prompt(1), SIZE, medium="GPU"))
    strange = [SECRET + 99] * SIZE
    salted = [
        BlockStored([2], None, strange, SIZE, medium="GPU", unknown_fields={"note": 1, "cache_salt": "tenant"}),
        BlockStored([3], None, strange, SIZE, medium="GPU", extra_keys=[("tenant",)], unknown_fields={"note": 1}),
    ]
    two.upstream.say(*salted)
    two.settle()
    assert {number for number, _ in consumer.held} == matched
    assert _matched(consumer, prompt(1)) == 1
    assert _matched(consumer, strange) == 0
    assert _matched(consumer, strange, Scope(salt="tenant")) == (matched != {1})


# --- tokens


def prompt(blocks: int = 3) -> list[int]:
    return [SECRET + place for place in range(blocks * SIZE)]


def readable_bytes(made: World, tmp_path: Path) -> bytes:
    """Return everything that others can read: sent and replayed payloads, and the files."""
    sent = [payload for _, payload in [*made.event_server.sent, *made.relay._buffer.batches_from(0)]]
    files = [path.read_bytes() for path in (tmp_path / "journal").iterdir() if path.is_file()]
    return b"".join((*sent, *files))


@pytest.mark.parametrize("tokens", ["hash", "drop"])
@pytest.mark.parametrize("count", [1, 2])
def test_redacted_streams_contain_no_tokens_and_match_by_key(tmp_path: Path, tokens: str, count: int) -> None:
    """Nor salts or extra keys; also after a restart, and for late consumers."""
    with world(tmp_path / "journal", count) as made:
        made.begin(tokens=tokens, buffer_steps=3)
        early = made.consumer()
        for at, each in enumerate(made.upstreams):
            tail = prompt()[SIZE:]
            each.say(
                BlockStored([1], None, prompt()[:SIZE], SIZE, medium="GPU", session_id="secret-session"),
                BlockStored([2, 3], 1, tail, SIZE, medium="GPU", unknown_fields={"note": "secret-note"}),
            )
            # Its own encoder has no room for a salt beside fields that it does not know.
            each.say(
                BlockStored([11 + at], None, prompt()[:SIZE], SIZE, medium="GPU", cache_salt="secret-salt"),
                BlockStored([21 + at], None, prompt()[:SIZE], SIZE, medium="GPU", extra_keys=[("secret-key",)]),
            )
            for number in range(100, 110):
                each.store(number)
        made.settle()
        for restarted in (False, True):
            if restarted:
                made.kill()
                made.begin(tokens=tokens, buffer_steps=3)
                made.settle()
                made.upstream.say(BlockStored([4], 3, [SECRET] * SIZE, SIZE, medium="GPU"))
            late = made.consumer()
            exact(made, early, late)
            readable = readable_bytes(made, tmp_path)
            assert msgspec.msgpack.encode(SECRET) not in readable
            assert b"secret" not in readable
            wanted = (4 if restarted else 3) if tokens == "hash" else 0
            for consumer in (early, late):
                assert _matched(consumer, [*prompt(), *[SECRET] * SIZE]) == wanted
                assert _matched(consumer, prompt(1), Scope(salt="secret-salt")) == (tokens == "hash")


def _matched(consumer: Consumer, tokens: list[int], scope: Scope = Scope()) -> int:  # noqa: B008 - frozen
    """Return how many blocks of a prompt a consumer holds."""
    return tokens_of(consumer.index, tokens, scope, ("relay", 0)) // SIZE


@pytest.mark.parametrize("salted", [False, True])
def test_a_journal_with_salted_prompts_begins_a_new_incarnation(made: World, salted: bool) -> None:
    """It has the keys but not the salt, on which the keys of all following blocks depend."""
    made.begin(tokens="hash")
    scope = Scope(salt="of-a-tenant" if salted else None)
    made.upstream.say(BlockStored([1], None, prompt()[:SIZE], SIZE, medium="GPU", cache_salt=scope.salt))
    made.settle()
    made.kill()
    made.begin(tokens="hash")
    assert made.relay.status().was_resumed is not salted
    made.settle()
    made.upstream.say(BlockStored([2], 1, prompt()[SIZE:][:SIZE], SIZE, medium="GPU"))
    consumer = made.consumer()
    exact(made, consumer)
    assert _matched(consumer, prompt()[: 2 * SIZE], scope) == 2


def test_keys_of_another_relay_are_kept(made: World) -> None:
    """The tokens are removed already; the blocks must stay known."""
    made.begin(tokens="hash")
    consumer = made.consumer()
    made.upstream.say(BlockStored([1, 2], None, [], SIZE, medium="GPU", block_keys=block_keys(prompt(2), SIZE)))
    exact(made, consumer)
    assert _matched(consumer, prompt()) == 2


# --- settings and status


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"upstreams": ()}, "at least one upstream"),
        ({"upstreams": (Source("tcp://a:1"), Source("tcp://a:1"))}, "same name and rank"),
        ({"heartbeat": 0}, "heartbeat is 0"),
        ({"heartbeat": float("nan")}, "heartbeat is nan"),
        ({"heartbeat": 1e9}, "heartbeat is 1000000000"),
        ({"buffer_steps": 0}, "buffer_steps is 0"),
        ({"hwm": -1}, "hwm is -1"),
        ({"tokens": "hash", "dialect": "vllm-0.22"}, "has no room"),
        ({"dialect": "vllm-0.1"}, "older than"),
    ],
    ids=str,
)
def test_invalid_settings_raise(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        RelaySettings(**{"upstreams": (Source("tcp://a:1"),), **wrong})


def test_the_status_can_be_read_from_any_thread(made: World) -> None:
    made.begin(buffer_steps=5)
    failed: list[BaseException] = []
    stop, asked = threading.Event(), threading.Event()

    def ask() -> None:
        try:
            while not stop.is_set():
                assert made.relay.status().blocks >= 0
                repr(made.relay)
                asked.set()
        except BaseException as error:  # noqa: BLE001 - whatever it is
            failed.append(error)
            asked.set()

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(200):
        made.upstream.store(number)
        if number % 20 == 0:
            made.upstream.engine.disconnect()
            made.turn()
            made.upstream.engine.reconnect()
        made.turn()
    assert asked.wait(20)
    stop.set()
    for thread in threads:
        thread.join(20)
    assert not failed
