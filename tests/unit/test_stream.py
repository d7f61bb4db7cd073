"""The rules of delivery one by one, each with the smallest network that needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paths
from kvevents.errors import ConfigError, SnapshotError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEventBatch
from kvevents.stream import (
    TRANSITIONS,
    Batch,
    BatchReport,
    Checkpoint,
    DegradedReason,
    Fingerprint,
    Gap,
    RawBatch,
    Reset,
    Source,
    State,
    Stream,
    StreamLimits,
    Trust,
    payload_digest,
)
from kvevents.stream.identity import MAX_FINGERPRINTS, CrossCheck
from kvevents.stream.transitions import Action, Input
from kvevents.wire import Rejected, encode_batch, live_frames, replay_batch_frames, replay_end_frames
from network_model import TOPIC, payload_of

SOURCE = Source("tcp://engine:5557", "tcp://engine:5558", topic="kv", name="engine", rank=3)
LIMITS = StreamLimits()


def payload(seq: int, life: int = 0) -> bytes:
    return payload_of(life, seq, clear=False)


def live(seq: int, life: int = 0) -> list[bytes]:
    return live_frames(TOPIC, seq, payload(seq, life))


def replayed(seq: int, life: int = 0) -> list[bytes]:
    return replay_batch_frames(TOPIC, seq, payload(seq, life))


END = replay_end_frames(with_topic=True)


class Wire:
    """A stream, its clock and what came out of it."""

    def __init__(self, source: Source = SOURCE, limits: StreamLimits = LIMITS) -> None:
        self.stream = Stream(source, limits)
        self.now = 0.0
        self.out: list[Batch | Gap | Reset] = []

    def feed(self, *messages: list[bytes]) -> None:
        for frames in messages:
            self.stream.receive_live(frames, self.now)

    def answer(self, *messages: list[bytes]) -> None:
        for frames in messages:
            self.stream.receive_replay(frames, self.now)

    def asked(self) -> int | None:
        ask = self.stream.request_to_send(self.now)
        return None if ask is None else ask.start

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.stream.tick(self.now)

    def until_due(self) -> None:
        deadline = self.stream.deadline()
        assert deadline is not None
        self.later(deadline - self.now)

    def confirm(self, life: int = 0) -> None:
        """Go on in the open answer, or give the one that is asked for: up to the live batch that came behind replayed ones."""
        start = self.asked()
        assert self.stream.is_fetching
        assert self.stream.trust == Trust.REPLAYING
        self.answer(*(replayed(seq, life) for seq in range(start or 0, self.stream.last_seq + 1)), END)

    def believe(self) -> None:
        """As if a live batch before all others had been compared."""
        self.stream._cross_check.first_live = 0
        self.stream._cross_check.confirm(0)

    def taken(self) -> list[str]:
        """`b5` a batch, `r5` a replayed one, `g2-4` a gap, `c2-4` a compacted one, `R1` a reset."""
        return [_short(delivery) for delivery in self.stream.deliveries()]


def _short(delivery: Batch | Gap | Reset) -> str:
    if isinstance(delivery, Batch):
        return f"{'r' if delivery.replayed else 'b'}{delivery.seq}"
    if isinstance(delivery, Gap):
        return f"{'c' if delivery.compacted else 'g'}{delivery.first}-{delivery.last}"
    return f"R{delivery.incarnation}"


@pytest.fixture
def wire() -> Wire:
    """A stream that is connected, has learnt that nothing was published before, and believes its replay endpoint."""
    wire = Wire()
    wire.stream.connected(0.0)
    assert wire.asked() == 0
    wire.answer(END)
    wire.believe()
    return wire


def test_history_is_asked_for_from_zero_on_connect(wire: Wire) -> None:
    """An empty answer to a request from 0 makes an empty stream EXACT."""
    assert wire.stream.trust == Trust.EXACT


def test_live_batches_in_order_are_delivered_at_once(wire: Wire) -> None:
    """Numbers that follow each other need nothing else; all fields of a delivery are filled."""
    wire.feed(live(0), live(1))
    first, _second = wire.stream.deliveries()
    assert isinstance(first, Batch)
    assert (first.source, first.rank, first.incarnation, first.seq, first.replayed) == ("engine", 3, 0, 0, False)
    assert first.payload == payload(0)
    assert first.events == [BlockStored([0], None, [0], 1)]
    assert wire.stream.trust == Trust.EXACT


def test_a_gap_is_replayed_from_the_first_missing_number_while_later_batches_wait(wire: Wire) -> None:
    """Contract 1, rule 1: nothing overtakes what is missing."""
    wire.feed(live(0), live(3), live(4))
    assert wire.taken() == ["b0"]
    assert wire.stream.trust == Trust.REPLAYING
    assert wire.stream.waiting == 2
    assert wire.asked() == 1
    wire.answer(replayed(1), replayed(2))
    assert wire.taken() == ["r1", "r2", "b3", "b4"]
    wire.confirm()
    assert wire.stream.trust == Trust.EXACT


def test_the_end_marker_proves_nothing(wire: Wire) -> None:
    """Rule 2: a reply with a hole and an end marker is asked again, from the newest batch before the hole."""
    wire.feed(live(5))
    assert wire.asked() == 0
    wire.answer(replayed(0), replayed(1), replayed(4), END)
    assert wire.asked() == 1
    wire.answer(*map(replayed, range(1, 5)))
    assert wire.taken() == ["r0", "r1", "r2", "r3", "r4", "b5"]


def test_a_number_that_no_answer_holds_becomes_a_gap(wire: Wire) -> None:
    """Rule 2: bounded in answers; the good batches around the hole are all delivered and trust says why it is not exact."""
    wire.feed(live(0), live(2))
    assert wire.asked() == 1
    wire.answer(replayed(2), END)
    assert wire.asked() == 1
    wire.answer(replayed(2), END)
    assert wire.taken() == ["b0", "g1-1", "b2"]
    assert wire.stream.degraded_reasons == {DegradedReason.LOST}


def test_a_mute_replay_endpoint_is_given_up_in_bounded_time(wire: Wire) -> None:
    """Rule 2: three requests of two seconds, then the gap is declared and live batches go on."""
    wire.feed(live(0), live(2))
    assert wire.asked() == 1
    for _ in range(LIMITS.max_unanswered_requests - 1):
        wire.later(LIMITS.replay_timeout)
        assert wire.asked() == 1
    wire.later(LIMITS.replay_timeout)
    assert wire.taken() == ["b0", "g1-1", "b2"]
    assert wire.stream.degraded_reasons == {DegradedReason.LOST, DegradedReason.REPLAY_SILENT}
    wire.feed(live(3))
    assert wire.taken() == ["b3"]


def test_an_endless_answer_without_anything_new_is_cut_off() -> None:
    """Rule 8: a replay endpoint that repeats itself for ever costs a bounded number of messages and no hang."""
    wire = Wire(limits=StreamLimits(max_duplicate_replies=50))
    wire.stream.connected(0.0)
    asks = 0
    for _ in range(1_000):
        asks += wire.asked() is not None
        wire.answer(replayed(7))
    assert asks == LIMITS.max_unanswered_requests
    assert wire.stream.trust == Trust.DEGRADED


def test_an_endless_answer_that_begins_with_what_must_be_proven_is_cut_off() -> None:
    """Rule 8: each answer repeats the batch that shows whose it is, and then nothing but that: no reason to ask for ever."""
    wire = Wire(limits=StreamLimits(max_duplicate_replies=50))
    wire.stream.connected(0.0)
    asks = 0
    for _ in range(1_000):
        asks += wire.asked() is not None
        wire.answer(replayed(0))
    assert wire.taken() == ["r0"]
    assert asks == 1 + LIMITS.max_unanswered_requests
    assert wire.stream.trust == Trust.DEGRADED


def test_answers_that_break_off_behind_what_must_be_proven_are_given_up(wire: Wire) -> None:
    """Rule 2: bounded in tries, although each of them brings the batch that shows whose it is."""
    wire.stream.connected(0.0)
    assert wire.asked() == 0
    wire.answer(replayed(0))
    for _ in range(LIMITS.max_unanswered_requests):
        wire.later(LIMITS.reply_idle_timeout)
        assert wire.asked() == 0
        wire.answer(replayed(0))
    wire.later(LIMITS.reply_idle_timeout)
    assert wire.asked() is None
    assert DegradedReason.REPLAY_SILENT in wire.stream.degraded_reasons
    assert wire.stream.trust == Trust.DEGRADED


@pytest.mark.parametrize(
    ("batch", "end"),
    [
        (lambda seq: [b"", TOPIC, seq.to_bytes(8, "big"), payload(seq)], [b"", b"", b"\xff" * 8, b""]),
        (lambda seq: [b"", seq.to_bytes(8, "big"), payload(seq)], [b"", b"\xff" * 8, b""]),
        (lambda seq: [b"", seq.to_bytes(8, "big"), payload(seq)], [b"", b""]),
    ],
    ids=["with topic", "without topic", "bare end"],
)
def test_all_three_reply_shapes_are_understood(batch, end) -> None:  # type: ignore[no-untyped-def]
    """Rule 3."""
    wire = Wire()
    wire.stream.connected(0.0)
    assert wire.asked() == 0
    wire.answer(batch(0), batch(1), end)
    assert wire.asked() == 1
    wire.answer(batch(1), end)
    assert wire.taken() == ["r0", "r1"]
    wire.feed(live(2))
    assert wire.asked() == 1
    wire.answer(batch(1), batch(2), end)
    assert wire.stream.trust == Trust.EXACT


def test_a_late_subscriber_learns_what_the_buffer_holds_and_says_what_it_does_not() -> None:
    """Rule 4: truncated history is a gap at the start and DEGRADED, not EXACT."""
    wire = Wire()
    wire.stream.connected(0.0)
    for _ in range(2):
        assert wire.asked() == 0
        wire.answer(replayed(7), replayed(8), END)
    assert wire.asked() == 8
    wire.answer(replayed(8), END)
    assert wire.taken() == ["g0-6", "r7", "r8"]
    assert wire.stream.trust == Trust.DEGRADED
    assert "truncated" in wire.stream.trust.reason


def test_a_live_number_that_goes_back_is_a_restart(wire: Wire) -> None:
    """Rule 5: Reset first, then the new life from 0."""
    wire.feed(live(0), live(1), live(2), live(1, life=1))
    assert wire.taken() == ["b0", "b1", "b2", "R1"]
    assert wire.asked() == 0
    wire.answer(replayed(0, life=1))
    assert wire.taken() == ["r0", "b1"]
    wire.confirm(life=1)
    assert wire.stream.incarnation == 1
    assert wire.stream.trust == Trust.EXACT


def test_a_new_life_that_has_passed_the_old_number_is_recognised_after_a_reconnect(wire: Wire) -> None:
    """Rule 5: the last number known is replayed and its payload compared; live frames wait for the verdict."""
    wire.feed(live(0), live(1))
    wire.stream.disconnected()
    assert wire.stream.trust == Trust.STALE
    wire.stream.connected(2.0)
    assert wire.asked() == 1
    wire.feed(live(5, life=1))
    assert wire.taken() == ["b0", "b1"]
    wire.answer(replayed(1, life=1))
    assert wire.taken() == ["R1"]
    assert wire.asked() == 0
    wire.answer(*(replayed(seq, life=1) for seq in range(5)))
    assert wire.taken() == ["r0", "r1", "r2", "r3", "r4", "b5"]


def test_the_same_life_after_a_reconnect_goes_on_without_a_reset(wire: Wire) -> None:
    """Rule 5: an equal payload proves the life; what was missed meanwhile follows in the same answer."""
    wire.feed(live(0), live(1))
    wire.stream.disconnected()
    wire.stream.connected(2.0)
    wire.feed(live(4))
    assert wire.asked() == 1
    wire.answer(replayed(1), replayed(2), replayed(3))
    assert wire.taken() == ["b0", "b1", "r2", "r3", "b4"]
    wire.confirm()
    assert wire.stream.trust == Trust.EXACT


def test_a_life_that_no_longer_knows_the_number_is_another_one(wire: Wire) -> None:
    """Rule 5: a publisher whose buffer ends before a number that was seen has restarted."""
    wire.feed(live(0), live(1), live(3))
    assert wire.asked() == 2
    wire.answer(replayed(2))
    wire.stream.disconnected()
    wire.stream.connected(2.0)
    for _ in range(LIMITS.max_incomplete_answers):
        assert wire.asked() == 1  # the newest live one that stood before replayed ones
        wire.answer(END)
    assert wire.taken() == ["b0", "b1", "r2", "b3", "R1"]


def reconnect_with_a_mute_replay_endpoint(wire: Wire) -> None:
    """One live batch before a reconnect and one after it, and requests for replay that nothing answers."""
    wire.feed(live(0))
    wire.stream.disconnected()
    wire.stream.connected(2.0)
    wire.feed(live(1))
    wire.now = 2.0
    for _ in range(LIMITS.max_unanswered_requests):
        assert wire.asked() == 0
        wire.later(LIMITS.replay_timeout)
    assert wire.taken() == ["b0", "b1"]


def test_identity_that_cannot_be_checked_is_a_doubt(wire: Wire) -> None:
    """Rule 5 with a dead replay endpoint: live batches go on after a bounded wait, DEGRADED."""
    reconnect_with_a_mute_replay_endpoint(wire)
    assert wire.stream.degraded_reasons == {
        DegradedReason.IDENTITY,
        DegradedReason.REPLAY_SILENT,
        DegradedReason.REPLAY_UNPROVEN,
    }


def test_a_later_probe_settles_a_doubted_identity(wire: Wire) -> None:
    """When the replay endpoint answers again, the anchor from before the reconnect is what proves the life."""
    reconnect_with_a_mute_replay_endpoint(wire)
    wire.later(LIMITS.max_probe_interval)
    assert wire.asked() == 0
    wire.answer(replayed(0), replayed(1), END)
    assert wire.stream.trust == Trust.EXACT, "one of them came over this connection"


def test_a_proof_that_the_publisher_has_forgotten_is_asked_for_no_longer(wire: Wire) -> None:
    """A clear has ended the doubt by then: the tail of a quiet stream is looked for behind a newer batch."""
    reconnect_with_a_mute_replay_endpoint(wire)
    wire.feed(live_frames(TOPIC, 2, payload_of(0, 2, clear=True)), live(3))
    wire.later(LIMITS.max_probe_interval)
    for _ in range(LIMITS.max_incomplete_answers):
        assert wire.asked() == 0
        wire.answer(replayed(3), END)
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.later(LIMITS.max_probe_interval)
    assert wire.asked() == 3
    wire.answer(replayed(3), replayed(4), END)
    assert wire.taken() == ["b2", "b3", "r4"]
    wire.feed(live(5))
    while (start := wire.asked()) is not None:
        wire.answer(*map(replayed, range(start, 6)), END)
    assert wire.stream.trust == Trust.EXACT


def test_a_forgotten_proof_leaves_the_identity_doubted(wire: Wire) -> None:
    """Without a clear: what a newer batch proves is not whether it is of the life before the reconnect."""
    reconnect_with_a_mute_replay_endpoint(wire)
    wire.feed(live(2), live(3))
    wire.later(LIMITS.max_probe_interval)
    for _ in range(LIMITS.max_incomplete_answers):
        assert wire.asked() == 0
        wire.answer(replayed(3), END)
    wire.later(LIMITS.max_probe_interval)
    assert wire.asked() == 3
    wire.answer(replayed(3), END)
    assert wire.stream.degraded_reasons == {DegradedReason.IDENTITY}
    wire.stream.disconnected()
    wire.stream.connected(wire.now)
    assert wire.asked() == 3
    wire.answer(replayed(3), END)
    assert wire.stream.degraded_reasons == {DegradedReason.IDENTITY, DegradedReason.REPLAY_UNPROVEN}, (
        "nor does the same batch on the next connection"
    )


def test_a_batch_from_after_the_reconnect_settles_no_doubted_identity(wire: Wire) -> None:
    """No reply shows whether the incarnation is the same, and it is not: batches of the next one prove nothing."""
    wire.feed(live(0, life=1), live(1, life=1))
    wire.stream.disconnected()
    wire.stream.connected(2.0)
    for _ in range(LIMITS.max_unanswered_requests):
        assert wire.asked() == 1
        wire.later(LIMITS.replay_timeout)
    assert DegradedReason.IDENTITY in wire.stream.degraded_reasons
    wire.feed(live(2, life=2), live(4, life=2))
    for _ in range(5):
        if (start := wire.asked()) is not None:
            wire.answer(*(replayed(seq, life=2) for seq in range(start, 5)), END)
    assert wire.stream.trust != Trust.EXACT
    wire.later(LIMITS.max_probe_interval)
    for _ in range(5):
        if (start := wire.asked()) is not None:
            wire.answer(*(replayed(seq, life=2) for seq in range(start, 5)), END)
    assert lives_after_the_last_reset(wire.stream.deliveries()) == {2}


def test_the_tail_is_checked_when_a_stream_is_quiet(wire: Wire) -> None:
    """Rule 6: batches lost at the end are found without any further live batch; the next one confirms them."""
    wire.feed(live(0))
    assert wire.taken() == ["b0"]
    wire.later(LIMITS.idle_before_probe)
    assert wire.asked() == 0
    wire.answer(replayed(0), replayed(1), replayed(2), END)
    assert wire.taken() == ["r1", "r2"]
    assert wire.asked() == 2
    wire.answer(replayed(2), END)
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.feed(live(3))
    wire.confirm()
    assert wire.stream.trust == Trust.EXACT


def test_the_tail_behind_an_empty_batch_is_found(wire: Wire) -> None:
    """A replay finds it, the only check of a connection without incarnations; decoding reports that it is not a batch."""
    wire.feed(live(0))
    wire.later(LIMITS.idle_before_probe)
    assert wire.asked() == 0
    wire.answer(replayed(0), replay_batch_frames(TOPIC, 1, b""), replayed(2), END)
    assert wire.stream.last_seq == 2
    assert wire.asked() == 2
    wire.answer(replayed(2), END)
    assert wire.stream.trust == Trust.DEGRADED
    assert DegradedReason.REJECTED in wire.stream.degraded_reasons


def test_without_replay_gaps_are_reported_at_once_and_trust_is_never_exact() -> None:
    """Rule 7: delivery goes on; the trust says what cannot be known."""
    wire = Wire(Source("tcp://engine:5557", name="engine"))
    wire.stream.connected(0.0)
    wire.feed(live(2), live(3), live(6))
    assert wire.taken() == ["g0-1", "b2", "b3", "g4-5", "b6"]
    assert wire.stream.trust == Trust.DEGRADED
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY, DegradedReason.LOST}
    assert wire.asked() is None
    assert wire.stream.deadline() is None


def test_without_replay_a_restart_is_still_recognised() -> None:
    """Rule 7 with rule 5: a number that goes back is a restart in every mode."""
    wire = Wire(Source("tcp://engine:5557", name="engine"))
    wire.stream.connected(0.0)
    wire.feed(live(0), live(1))
    wire.stream.disconnected()
    wire.stream.connected(2.0)
    wire.feed(live(0, life=1))
    assert wire.taken() == ["b0", "b1", "R1", "b0"]


def test_what_does_not_fit_the_buffer_is_replayed_later() -> None:
    """Rule 8: waiting batches are bounded, counted when they overflow, and not lost."""
    wire = Wire(limits=StreamLimits(max_pending_batches=3))
    wire.stream.connected(0.0)
    assert wire.asked() == 0
    wire.feed(*(live(seq) for seq in range(1, 7)))
    assert wire.stream.waiting == 3
    assert wire.stream.counters.overflowed == 3
    wire.answer(*(replayed(seq) for seq in range(7)))
    wire.answer(END)
    assert wire.taken() == ["r0", "b1", "b2", "b3", "r4", "r5", "r6"]
    assert DegradedReason.REPLAY_UNPROVEN in wire.stream.degraded_reasons, "the newest came by replay alone"
    wire.feed(live(7))
    while (start := wire.asked()) is not None:
        wire.answer(replayed(start), *map(replayed, range(start + 1, 8)), END)
    assert wire.stream.trust == Trust.EXACT


def test_a_clear_heals_what_was_lost_before_it(wire: Wire) -> None:
    """EXACT again after a clear: nothing older matters."""
    wire.feed(live(0), live(2))
    for _ in range(LIMITS.max_incomplete_answers):
        assert wire.asked() == 1
        wire.answer(replayed(2), END)
    assert wire.stream.trust == Trust.DEGRADED
    wire.feed(live_frames(TOPIC, 3, payload_of(0, 3, clear=True)))
    assert wire.stream.trust == Trust.EXACT


def test_a_batch_that_cannot_be_read_is_delivered_empty_and_doubted(wire: Wire) -> None:
    """A bad payload costs itself only: its number is delivered with the reason, and trust says that something is missing."""
    wire.feed(live(0), live_frames(TOPIC, 1, b"\xc1"), live(2))
    _zero, one, two = wire.stream.deliveries()
    assert isinstance(one, Batch)
    assert one.events == []
    assert one.rejected[0].reason == "not-a-batch"
    assert isinstance(two, Batch)
    assert wire.stream.degraded_reasons == {DegradedReason.REJECTED}
    assert wire.stream.counters.rejected == {"not-a-batch": 1}


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"kv"],
        [b"kv", b"\0" * 8],
        [b"kv", b"", b"x"],
        [b"kv", b"\0" * 4, b"x"],
        [b"kv", b"\0" * 16, b"x"],
        [b"kv", (2**63).to_bytes(8, "big"), b"x"],
        [b"kv", b"\xff" * 8, b"x"],
        [b"kv", b"\0" * 8, b"x", b"y"],
        [b"x"] * 9,
    ],
    ids=lambda frames: f"{len(frames)} frames",
)
def test_frames_without_a_meaning_are_counted_and_disturb_nothing(wire: Wire, frames: list[bytes]) -> None:
    """Bad input: the next good batch is delivered as if the bad one had not been."""
    wire.feed(live(0), frames, live(1))
    assert wire.taken() == ["b0", "b1"]
    assert sum(wire.stream.counters.malformed.values()) == 1
    assert wire.stream.trust == Trust.EXACT


def test_malformed_replies_are_counted_and_disturb_nothing(wire: Wire) -> None:
    """A replay endpoint may send anything."""
    wire.feed(live(1))
    assert wire.asked() == 0
    wire.answer([], [b"x"], [b"", b"\0" * 4, b"x"], [b"", b"a", b"b", b"c", b"d"], [b"", b"\xff" * 8, b"x"], replayed(0))
    assert wire.taken() == ["r0", "b1"]
    assert sum(wire.stream.counters.malformed.values()) == 5


def test_a_replay_endpoint_of_another_topic_is_not_believed(wire: Wire) -> None:
    """An answer that names a topic outside the subscription is of another stream."""
    wire.feed(live(0), live(2))
    assert wire.asked() == 1
    wire.answer(replay_batch_frames(b"other", 1, payload(1)))
    assert wire.taken() == ["b0", "g1-1", "b2"]
    assert wire.stream.degraded_reasons == {DegradedReason.LOST, DegradedReason.REPLAY_FOREIGN}


@pytest.mark.parametrize("held", [1, 2, 5])
def test_a_replay_endpoint_of_another_stream_that_ends_before_the_live_one_is_found_out(held: int) -> None:
    """It has no number of which another batch came live, the newest one it holds may even be just before the first of those."""
    wire = Wire()
    wire.stream.connected(0.0)
    seq, seconds = 2, 0.02
    while DegradedReason.REPLAY_FOREIGN not in wire.stream.degraded_reasons:
        assert wire.now < 10.0
        assert wire.stream.trust != Trust.EXACT
        while (start := wire.asked()) is not None:
            wire.answer(*(replayed(each, life=9) for each in range(start, held)), END)
        wire.feed(live(seq))
        seq += 1
        wire.later(seconds)
    assert wire.stream.trust.reason.startswith("the replay endpoint answers for another stream")


def test_a_replay_endpoint_that_ends_too_early_once_may_have_lost_the_rest() -> None:
    """An engine's socket drops what it has no room for, whatever follows that: only twice in a row is it a contradiction."""
    wire = Wire()
    wire.stream.connected(0.0)
    assert wire.asked() == 0
    wire.answer(replayed(0), replayed(1), END)
    assert wire.asked() == 1
    wire.answer(replayed(1), END)
    wire.feed(live(2))
    assert wire.asked() == 1
    wire.answer(replayed(1), END)
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.later(LIMITS.idle_before_probe)
    wire.feed(live(3))
    assert wire.asked() == 1
    wire.answer(replayed(1), replayed(2), replayed(3), END)
    assert wire.stream.trust == Trust.EXACT
    assert wire.taken() == ["r0", "r1", "b2", "b3"]


def test_a_replay_endpoint_of_another_stream_is_found_out() -> None:
    """With equal topics, contradictions with the live stream end the belief after a bounded number of resets."""
    wire = Wire()
    wire.stream.connected(0.0)
    seq = 5
    for _ in range(50):
        if (start := wire.asked()) is not None:
            wire.answer(*(replayed(number, life=9) for number in range(start, 10)), END)
        else:
            wire.feed(live(seq))
            seq += 1
    taken = wire.stream.deliveries()
    resets = [delivery for delivery in taken if isinstance(delivery, Reset)]
    assert len(resets) == LIMITS.max_conflicts
    after = taken[taken.index(resets[-1]) + 1 :]
    batches = [delivery for delivery in after if isinstance(delivery, Batch)]
    assert all(batch.payload == payload(batch.seq) and not batch.replayed for batch in batches)
    assert len(batches) > 20
    assert DegradedReason.REPLAY_FOREIGN in wire.stream.degraded_reasons


def test_a_replay_endpoint_that_was_not_believed_is_asked_again_and_may_agree() -> None:
    """Contradictions of a past that is over do not cost replay for ever; one more of them does, for as long again."""
    wire = Wire()
    wire.stream.connected(0.0)
    life, seq = 9, 5
    for _ in range(20):
        if (start := wire.asked()) is not None:
            wire.answer(*(replayed(number, life) for number in range(start, 10)), END)
        else:
            wire.feed(live(seq))
            seq += 1
    assert DegradedReason.REPLAY_FOREIGN in wire.stream.degraded_reasons
    for life in (9, 0):
        assert wire.asked() is None
        due = wire.stream.deadline()
        assert due is not None
        wire.later(due - wire.now)
        start = wire.asked()
        assert start is not None
        wire.answer(*(replayed(number, life) for number in range(start, seq)), END)
        believed = life == 0
        assert (DegradedReason.REPLAY_FOREIGN in wire.stream.degraded_reasons) is not believed
        wire.feed(live(seq))
        seq += 1
    assert DegradedReason.REPLAY_UNCONFIRMED not in wire.stream.degraded_reasons


def lives_after_the_last_reset(taken: list[Batch | Gap | Reset]) -> set[int]:
    """The incarnations of the batches that a consumer holds after applying resets; each payload names its incarnation."""
    held: list[bytes] = []
    for delivery in taken:
        if isinstance(delivery, Reset):
            held.clear()
        elif isinstance(delivery, Batch):
            held.append(delivery.payload)
    return {life for life in (1, 2) for each in held if each in {payload(seq, life) for seq in range(30)}}


def answered_by_the_next_life(wire: Wire) -> list[Batch | Gap | Reset]:
    """Replay is of life 2, as far as 20, while what is live is of life 1: the old connection is not known to be dead yet.

    Returns the deliveries. At no time is a stream EXACT that has delivered batches of both.
    """
    taken: list[Batch | Gap | Reset] = []
    for _ in range(20):
        if (start := wire.asked()) is None:
            break
        for seq in range(start, 20):
            wire.answer(replayed(seq, life=2))
            taken += wire.stream.deliveries()
            assert wire.stream.trust != Trust.EXACT or len(lives_after_the_last_reset(taken)) <= 1
        wire.answer(END)
        taken += wire.stream.deliveries()
        assert wire.stream.trust != Trust.EXACT
    return taken


def test_history_of_another_life_is_not_joined_to_what_is_live() -> None:
    """The engine restarted while its first batches were asked for; as soon as replay reaches what waits it would look whole."""
    wire = Wire()
    wire.stream.connected(0.0)
    wire.feed(*(live(seq, life=1) for seq in range(5, 8)))
    taken = answered_by_the_next_life(wire)
    assert any(isinstance(delivery, Reset) for delivery in taken)
    assert lives_after_the_last_reset(taken) <= {2}
    assert wire.stream.trust != Trust.EXACT
    assert wire.stream.counters.conflicts > 0


def test_a_gap_is_not_filled_from_another_life(wire: Wire) -> None:
    """The first number that is there twice, live and replayed, shows that replay is of another incarnation."""
    wire.feed(*(live(seq, life=1) for seq in [*range(5), *range(6, 9)]))
    taken = answered_by_the_next_life(wire)
    assert any(isinstance(delivery, Reset) for delivery in taken)
    assert lives_after_the_last_reset(taken) <= {2}
    assert wire.stream.trust != Trust.EXACT
    assert wire.stream.counters.conflicts > 0


def test_what_only_replay_has_brought_behind_live_batches_is_not_exact_before_they_are_compared(wire: Wire) -> None:
    """The live connection is half open, and the next life answers for a hole; the reconnect finds out."""
    wire.feed(live(0, life=1), live(1, life=1), live(3, life=1))
    assert wire.asked() == 2
    wire.answer(*(replayed(seq, life=2) for seq in range(2, 9)), END)
    assert wire.stream.trust != Trust.EXACT
    wire.stream.disconnected()
    wire.stream.connected(2.0)
    for _ in range(5):
        if (start := wire.asked()) is not None:
            wire.answer(*(replayed(seq, life=2) for seq in range(start, 9)), END)
    assert lives_after_the_last_reset(wire.stream.deliveries()) <= {2}


SNAPSHOT = payload_of(0, 7, clear=True)
"""What a publisher of ours sends for everything up to a number, under that number."""


@pytest.mark.parametrize("live_first", [True, False])
def test_a_snapshot_and_the_batch_of_its_number_are_no_contradiction(live_first: bool) -> None:
    """A late subscriber takes the snapshot, whichever comes first; it is EXACT, and nothing was reset."""
    wire = Wire()
    wire.stream.connected(0.0)
    assert wire.asked() == 0
    answer = replay_batch_frames(TOPIC, 7, SNAPSHOT), replayed(8), END
    if live_first:
        wire.feed(live(7), live(8))
        wire.answer(*answer)
    else:
        wire.answer(*answer)
        wire.feed(live(7), live(8))
    for _ in range(5):
        if wire.asked() is not None:
            wire.answer(*answer)
    wire.feed(live(9))
    assert wire.taken() == ["c0-6", "r7", "b8" if live_first else "r8", "b9"]
    for _ in range(3):
        if (start := wire.asked()) is not None:
            wire.answer(*(replayed(number) for number in range(start, 10)), END)
    assert wire.stream.trust == Trust.EXACT
    assert wire.stream.counters.conflicts == 0


def test_a_hole_is_filled_by_a_snapshot_as_by_the_batch_itself(wire: Wire) -> None:
    """For a consumer that has all earlier batches, both mean the same."""
    wire.feed(*map(live, range(7)), live(8))
    assert wire.asked() == 7
    wire.answer(replay_batch_frames(TOPIC, 7, SNAPSHOT), replayed(8), END)
    assert wire.taken() == [*(f"b{seq}" for seq in range(7)), "r7", "b8"]
    assert wire.stream.counters.conflicts == 0


def snapshot(seq: int) -> list[bytes]:
    """An answer's message that stands for all up to a number; each number has another one."""
    return replay_batch_frames(TOPIC, seq, payload_of(0, seq, clear=True))


def test_an_answer_that_begins_with_a_snapshot_ends_the_wait_for_all_before_it(wire: Wire) -> None:
    """The gaps before it are reported at once, with the batches that waited between them; none of them is requested again."""
    wire.feed(live(0), live(1), live(3), live(5), live(8))
    assert wire.asked() == 2
    wire.answer(snapshot(6), replayed(7), replayed(8), END)
    assert wire.taken() == ["b0", "b1", "g2-2", "b3", "g4-4", "b5", "r6", "r7", "b8"]
    assert wire.stream.counters.requests == 2
    assert DegradedReason.LOST not in wire.stream.degraded_reasons


@pytest.mark.parametrize("decode", [True, False])
def test_numbers_that_a_snapshot_represents_are_not_lost(decode: bool) -> None:
    """They have a counter of their own, whether or not payloads are read here; a checkpoint right behind them has no doubt."""
    stream = Stream(SOURCE, LIMITS) if decode else Stream(SOURCE, LIMITS, decode=None)
    before = stream.position()
    stream.connected(0.0)
    assert stream.request_to_send(0.0) is not None
    for frames in (snapshot(6), replayed(7), END):
        stream.receive_replay(frames, 0.0)
    deliveries = stream.deliveries()
    assert deliveries[0] == Gap("engine", 3, 0, 5, compacted=True)
    counters = stream.counters
    assert (counters.compacted, counters.gaps, counters.lost, counters.delivered) == (6, 0, 0, 2)
    assert DegradedReason.LOST not in stream.degraded_reasons
    assert before.after_deliveries(deliveries[:1], stream.position()).checkpoint("engine", 3).degraded_reasons == {}


def test_a_snapshot_in_parts_represents_the_numbers_before_its_first_part(wire: Wire) -> None:
    """Its first part begins with the clear; a part that is missing in the middle is lost."""
    wire.feed(live(0), live(9))
    first = encode_batch(
        KVEventBatch(0.0, [AllBlocksCleared(), BlockRemoved([], heartbeat=Heartbeat("0" * 32, 10.0, "EXACT"))])
    )
    parts = replay_batch_frames(TOPIC, 6, first), replayed(8), replayed(9), END
    for _ in range(4):
        if wire.asked() is not None:
            wire.answer(*parts)
    assert wire.taken() == ["b0", "c1-5", "r6", "g7-7", "r8", "b9"]
    counters = wire.stream.counters
    assert (counters.compacted, counters.gaps, counters.lost) == (5, 1, 1)
    assert DegradedReason.LOST in wire.stream.degraded_reasons


def test_numbers_before_a_clear_of_the_engine_itself_are_lost(wire: Wire) -> None:
    """It came live, so it is not a snapshot, although replay repeats it and has nothing before it."""
    clear = payload_of(0, 3, clear=True)
    wire.feed(live(0), live(1), live_frames(TOPIC, 3, clear))
    for _ in range(2):
        assert wire.asked() == 2
        wire.answer(replay_batch_frames(TOPIC, 3, clear), END)
    assert wire.taken() == ["b0", "b1", "g2-2", "b3"]
    assert (wire.stream.counters.compacted, wire.stream.counters.lost) == (0, 1)


def test_snapshots_do_not_wait_for_each_other(wire: Wire) -> None:
    """The publisher's buffer moves on while holes stay open: its snapshot, of some MiB, has another number in each answer."""
    wire.feed(live(0), *(live(seq) for seq in range(2, 60, 2)))
    for seq in range(30, 40):
        if wire.asked() is not None:
            wire.answer(snapshot(seq), END)
    wire.taken()
    assert wire.stream.last_seq >= 30
    assert wire.stream.waiting <= 15


def test_a_clear_that_came_live_may_lack_what_the_next_answer_brings(wire: Wire) -> None:
    """It is a batch as others, and no snapshot: what was lost before it is asked for twice."""
    clear = payload_of(0, 3, clear=True)
    wire.feed(live(0), live(1), live_frames(TOPIC, 3, clear))
    assert wire.asked() == 2
    wire.answer(replay_batch_frames(TOPIC, 3, clear), END)
    assert wire.asked() == 2
    wire.answer(replayed(2), replay_batch_frames(TOPIC, 3, clear), END)
    assert wire.taken() == ["b0", "b1", "r2", "b3"]


# --- whose history replay brings -------------------------------------------------------------------------------------------


def joined(*history: list[bytes], limits: StreamLimits = LIMITS) -> Wire:
    """A stream that is connected and has taken all that replay holds."""
    wire = Wire(limits=limits)
    wire.stream.connected(0.0)
    assert wire.asked() == 0
    wire.answer(*history, END)
    if history:
        assert wire.asked() == len(history) - 1
        wire.answer(history[-1], END)
    assert wire.asked() is None
    return wire


@pytest.mark.parametrize("known", [0, 3])
def test_an_idle_stream_is_not_exact_before_a_live_batch_has_confirmed_its_history(known: int) -> None:
    """Whatever replay holds, be it nothing: only a live batch shows whose replay endpoint that is."""
    wire = joined(*map(replayed, range(known)))
    wire.later(LIMITS.idle_before_probe)
    if wire.asked() is not None:
        wire.answer(*([replayed(known - 1)] if known else []), END)
    assert wire.stream.trust == Trust.DEGRADED
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.feed(live(known))
    wire.confirm()
    assert wire.stream.trust == Trust.EXACT
    assert wire.stream.counters.resets == 0


@pytest.mark.parametrize("older", [0, 1, 30, 39])
def test_a_live_batch_below_what_was_replayed_is_compared_however_old_its_number(older: int) -> None:
    """Another engine that is ahead: no batch of the live one is dropped as known because of its number alone."""
    wire = joined(*(replayed(seq, life=1) for seq in range(50)), limits=StreamLimits(max_replayed_digests=10))

    def answer() -> None:
        while (start := wire.asked()) is not None:
            wire.answer(*(replayed(seq, life=1) for seq in range(start, 50)), END)
            assert wire.stream.trust != Trust.EXACT

    wire.feed(live(older))
    answer()
    assert (wire.stream.counters.conflicts, wire.stream.counters.resets) == (1, 1)
    for seq in range(older + 1, older + 10):
        wire.feed(live(seq))
        answer()
    assert wire.stream.counters.conflicts == LIMITS.max_conflicts
    assert DegradedReason.REPLAY_FOREIGN in wire.stream.degraded_reasons
    ours = [delivery for delivery in wire.stream.deliveries() if isinstance(delivery, Batch) and not delivery.replayed]
    assert [delivery.payload for delivery in ours[-3:]] == [payload(seq) for seq in range(older + 7, older + 10)]


def test_what_replay_has_brought_beyond_the_newest_live_batch_stays_unproven() -> None:
    """Both engines may be alike up to some number: agreement about one number proves no later one."""
    wire = joined(*map(replayed, range(5)), *(replayed(seq, life=1) for seq in range(5, 9)))
    wire.feed(live(3), live(4))
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.feed(live(5))
    assert wire.stream.counters.conflicts == 1
    assert "R1" in wire.taken()


def test_replay_that_repeats_itself_confirms_nothing() -> None:
    """A batch that waits came by replay too: the same batch in the next reply does not confirm the live stream."""
    wire = Wire()
    wire.stream.connected(0.0)
    assert wire.asked() == 0
    wire.answer(replayed(0), replayed(1), replayed(3), END)
    while (start := wire.asked()) is not None:
        wire.answer(*map(replayed, range(start, 4)), END)
    assert wire.taken() == ["r0", "r1", "r2", "r3"]
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}


def test_a_snapshot_under_the_number_of_a_live_batch_shows_nothing() -> None:
    """A publisher that keeps only a snapshot: its content differs, which neither contradicts nor proves anything.

    What replay brought before can be proven no more, so all is asked for again, which helps no more often than it may.
    """
    wire = joined(*map(replayed, range(3)))
    for seq in range(3, 20):
        wire.now += LIMITS.max_probe_interval
        wire.feed(live(seq))
        while wire.asked() is not None:
            wire.answer(snapshot(seq), END)
        assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    assert (wire.stream.counters.resets, wire.stream.counters.conflicts) == (LIMITS.max_consecutive_resyncs, 0)
    assert wire.taken()[-15:] == [f"b{seq}" for seq in range(5, 20)]
    wire.feed(live_frames(TOPIC, 20, payload_of(0, 20, clear=True)))
    wire.later(LIMITS.max_probe_interval)
    assert wire.asked() == 20, "nothing that replay has brought matters any more"
    wire.answer(replay_batch_frames(TOPIC, 20, payload_of(0, 20, clear=True)), END)
    assert wire.stream.trust == Trust.EXACT


def test_a_publisher_that_keeps_nothing_is_not_exact() -> None:
    """`buffer_steps=0`: an end marker alone says nothing of a publisher whose live numbers show that it has published."""
    wire = joined()
    wire.feed(live(0))
    while wire.asked() is not None:
        wire.answer(END)
    assert wire.stream.trust == Trust.DEGRADED
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.feed(live(1))
    assert wire.taken() == ["b0", "b1"]


def test_a_live_heartbeat_that_agrees_confirms_what_was_replayed_before_it() -> None:
    """The state is the live sender's, wherever it came from; replayed heartbeats and older ones show nothing."""
    wire = joined(*map(replayed, range(3)))
    found = BatchReport(heartbeat=Heartbeat("0" * 32, 10.0, "EXACT"), digest_matches=True)
    *_, newest = wire.stream.deliveries()
    assert isinstance(newest, Batch)
    wire.stream.report(newest, found)
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.feed(live(3))
    (delivery,) = wire.stream.deliveries()
    assert isinstance(delivery, Batch)
    wire.stream.report(delivery, found)
    assert wire.stream.trust == Trust.EXACT


def test_an_answer_that_confirms_a_live_batch_brings_none_that_is_on_its_way() -> None:
    """Nothing is missing, so nothing is healed: what the engine has published meanwhile comes live."""
    wire = Wire()
    wire.stream.connected(0.0)
    assert wire.asked() == 0
    wire.answer(END)
    wire.feed(live(0))
    assert wire.asked() == 0
    wire.answer(replayed(0), replayed(1))
    assert not wire.stream.is_fetching
    wire.answer(replayed(2), END)
    wire.feed(live(1), live(2))
    assert wire.taken() == ["b0", "b1", "b2"]
    counters = wire.stream.counters
    assert (counters.replayed, counters.gaps_repaired, counters.requests, counters.complete) == (0, 0, 2, 2)
    assert wire.stream.trust == Trust.EXACT


def test_requests_that_confirm_are_paced() -> None:
    """Replay never holds the number of a live batch any more: a busy stream asks later and later, and is DEGRADED meanwhile."""
    wire = joined(*map(replayed, range(3)))
    asks: list[float] = []
    for seq in range(3, 3 + 6000):
        wire.now += 0.01
        wire.feed(live(seq))
        while wire.asked() is not None:
            asks.append(wire.now)
            wire.answer(snapshot(seq + 5), END)
            wire.stream.deliveries()
        assert wire.stream.trust != Trust.EXACT
    assert 2 <= len(asks) <= 10 * LIMITS.max_incomplete_answers
    assert wire.stream.counters.resets == LIMITS.max_consecutive_resyncs


def busy_with_requests(answer: Callable[[int], list[list[bytes]]], seconds: float) -> tuple[Wire, int]:
    """A stream for some time whose every request is answered at once; and how many there were."""
    wire, count = Wire(), 0
    wire.stream.connected(0.0)
    while wire.now < seconds:
        while (start := wire.asked()) is not None:
            count += 1
            wire.answer(*answer(start), END)
        wire.later(0.01)
    return wire, count


def test_requests_are_bounded_where_the_endpoint_ignores_what_is_asked_for() -> None:
    """It answers with all that it has, each time; nothing of that is new."""
    _, count = busy_with_requests(lambda _: [replayed(seq) for seq in range(3)], seconds=60.0)
    assert count <= 10


def test_requests_are_bounded_where_each_answer_brings_one_more() -> None:
    """Live batches do not arrive, as with another topic, and the engine goes on: replay does not become a way to poll it."""
    limits = LIMITS
    wire, count = busy_with_requests(lambda start: [replayed(start), replayed(start + 1)], seconds=60.0)
    assert limits.max_request_burst < count <= limits.max_request_burst + 60.0 / limits.request_interval + 1
    assert wire.stream.last_seq == count
    assert wire.stream.trust == Trust.REPLAYING
    assert "many replay requests in a row" in wire.stream.trust.reason


def test_a_reconnect_is_unproven_until_a_live_batch_of_the_new_connection_was_compared(wire: Wire) -> None:
    """The endpoint may lead to another engine by then, while replay still leads to the one before."""
    wire.feed(live(0))
    wire.stream.disconnected()
    wire.stream.connected(1.0)
    assert wire.asked() == 0
    wire.answer(replayed(0), END)
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.feed(live(1, life=1))
    assert wire.asked() == 0
    wire.answer(replayed(0), replayed(1), END)
    assert wire.stream.counters.conflicts == 1


def test_an_exact_checkpoint_does_not_vouch_for_another_replay_endpoint(wire: Wire) -> None:
    """In the next process replay is of another engine, or of the engine before, and then the live stream is of another one."""
    wire.feed(live(0), live(1))
    assert wire.stream.trust == Trust.EXACT
    checkpoint = kept(wire.stream)
    foreign = resumed(checkpoint)
    assert foreign.asked() == 1
    foreign.answer(replayed(1, life=1), replayed(2, life=1), END)
    assert foreign.taken() == ["R1"]
    moved = resumed(checkpoint)
    assert moved.asked() == 1
    moved.answer(replayed(1), replayed(2), replayed(3), END)
    assert moved.asked() == 3
    moved.answer(replayed(3), END)
    assert moved.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    moved.feed(live(2, life=1))
    assert moved.stream.counters.conflicts == 1


def test_the_first_live_batch_after_replayed_history_is_asked_back(wire: Wire) -> None:
    """Replay and live stream are compared once per connection, so that a foreign replay endpoint cannot hide."""
    fresh = Wire()
    fresh.stream.connected(0.0)
    assert fresh.asked() == 0
    fresh.answer(replayed(0), END)
    assert fresh.asked() == 0
    fresh.answer(replayed(0), END)
    fresh.feed(live(1))
    assert fresh.asked() == 0
    fresh.answer(replayed(0), replayed(1), END)
    assert fresh.stream.trust == Trust.EXACT
    fresh.feed(live(2))
    assert fresh.asked() is None
    assert fresh.taken() == ["r0", "b1", "b2"]


def test_the_same_live_batch_twice_is_delivered_once(wire: Wire) -> None:
    """A relay that repeats itself is not a restart."""
    wire.feed(live(0), live(1), live(1), live(2))
    assert wire.taken() == ["b0", "b1", "b2"]
    assert wire.stream.counters.duplicates == 1


def test_a_live_batch_that_replay_brought_before_is_not_a_restart() -> None:
    """Replay may be faster than the live stream."""
    wire = Wire()
    wire.stream.connected(0.0)
    assert wire.asked() == 0
    wire.answer(replayed(0), replayed(1), replayed(2))
    wire.feed(live(1), live(2), live(3))
    assert wire.taken() == ["r0", "r1", "r2", "b3"]


def outcomes(wire: Wire) -> dict[str, int]:
    """Counters of gaps and of requests for replay that are not 0, by name."""
    counted = asdict(wire.stream.counters)
    names = ("gaps", "gaps_repaired", "requests", "complete", "truncated", "unanswered", "conflicts")
    return {name: counted[name] for name in names if counted[name]}


def test_history_is_no_gap_that_was_healed() -> None:
    """Neither what came before the subscriber nor what a new life begins with was ever missing."""
    wire = Wire()
    wire.stream.connected(0.0)
    wire.feed(live(3))
    assert wire.asked() == 0
    wire.answer(replayed(0), replayed(1), replayed(2))
    assert outcomes(wire) == {"requests": 1, "complete": 1}
    wire.feed(live(1, life=1))
    assert wire.asked() == 0
    wire.answer(replayed(0, life=1))
    assert wire.taken() == ["r0", "r1", "r2", "b3", "R1", "r0", "b1"]
    assert outcomes(wire) == {"requests": 2, "complete": 2}


def test_each_hole_that_replay_fills_is_healed_once(wire: Wire) -> None:
    """However many batches were in it, and however many answers that took; each answer is counted by what it left missing."""
    wire.feed(live(0), live(4), live(5), live(7))
    assert wire.asked() == 1
    wire.answer(replayed(1), END)
    assert outcomes(wire) == {"gaps_repaired": 1, "requests": 2, "complete": 1, "truncated": 1}
    assert wire.asked() == 1
    wire.answer(replayed(1), replayed(2), replayed(3), replayed(6))
    assert wire.taken() == ["b0", "r1", "r2", "r3", "b4", "b5", "r6", "b7"]
    assert outcomes(wire) == {"gaps_repaired": 2, "requests": 3, "complete": 2, "truncated": 1}


def test_what_was_missed_between_two_connections_is_a_gap_that_was_healed(wire: Wire) -> None:
    wire.feed(live(0))
    wire.stream.disconnected()
    wire.stream.connected(1.0)
    assert wire.asked() == 0
    wire.answer(replayed(0), replayed(1), END)
    assert wire.asked() == 1
    wire.answer(replayed(1), END)
    assert wire.taken() == ["b0", "r1"]
    assert outcomes(wire) == {"gaps_repaired": 1, "requests": 3, "complete": 3}


def test_a_gap_that_was_healed_in_part_counts_as_both(wire: Wire) -> None:
    wire.feed(live(0), live(3))
    assert wire.asked() == 1
    wire.answer(replayed(1), END)
    assert wire.asked() == 1
    wire.answer(replayed(1), END)
    assert wire.asked() == 2, "the first message of an answer is the one that is never lost"
    wire.answer(END)
    assert wire.taken() == ["b0", "r1", "g2-2", "b3"]
    assert outcomes(wire) == {
        "gaps": 1,
        "gaps_repaired": 1,
        "complete": 1,
        "requests": 2 + LIMITS.max_incomplete_answers,
        "truncated": 1 + LIMITS.max_incomplete_answers,
    }


def test_requests_without_an_answer_are_neither_complete_nor_truncated(wire: Wire) -> None:
    wire.feed(live(0), live(2))
    for _ in range(LIMITS.max_unanswered_requests):
        assert wire.asked() == 1
        wire.later(LIMITS.replay_timeout)
    assert outcomes(wire) == {
        "gaps": 1,
        "complete": 1,
        "requests": 1 + LIMITS.max_unanswered_requests,
        "unanswered": LIMITS.max_unanswered_requests,
    }


def test_frames_before_the_connection_is_announced_wait_for_it() -> None:
    """A frame can be read before the connection's event; it is neither lost nor delivered out of order."""
    wire = Wire()
    wire.feed(live(1))
    assert wire.stream.trust == Trust.CONNECTING
    wire.stream.connected(0.0)
    assert wire.asked() == 0
    wire.answer(replayed(0))
    assert wire.taken() == ["r0", "b1"]


# --- batches that the consumer reads itself --------------------------------------------------------------------------------

BAD = (Rejected("unknown-tag", "not a known tag", 0), Rejected("more", "and more", 1, count=4))


def report(
    stream: Stream[Any], incarnation: int, seq: int, rejected: Sequence[Rejected] = (), *, cleared: bool = False
) -> None:
    """What its consumer says of a raw batch that was delivered."""
    batch = RawBatch("engine", 3, incarnation, seq, False, b"")
    stream.report(batch, BatchReport(tuple(rejected), cleared))


class RawWire:
    """A stream without decoding that has delivered batches 0 to 3."""

    def __init__(self, source: Source = SOURCE) -> None:
        self.stream = Stream(source, decode=None)
        self.stream.connected(0.0)
        self.stream.request_to_send(0.0)
        self.stream.receive_replay(END, 0.0)
        self.run(0, 4)
        self.confirm(3)

    def confirm(self, seq: int, life: int = 0) -> None:
        """Repeat the live batch that is compared."""
        if self.stream.request_to_send(0.0) is not None:
            self.stream.receive_replay(replayed(seq, life), 0.0)
            self.stream.receive_replay(END, 0.0)

    def run(self, first: int, last: int) -> None:
        self.stream.receive_run([payload(seq) for seq in range(first, last)], 0.0)

    def lose(self, seq: int) -> None:
        """Number `seq` is lost in every connection; the one after it arrives."""
        self.stream.receive_live(live(seq + 1), 0.0)
        while self.stream.request_to_send(0.0) is not None:
            self.stream.receive_replay(replayed(seq + 1), 0.0)
            self.stream.receive_replay(END, 0.0)
        assert DegradedReason.LOST in self.stream.degraded_reasons


def test_raw_batches_carry_what_decoded_ones_do() -> None:
    """Read later, by a run or message by message, live or replayed: the same batches."""
    raw, decoding = Stream(SOURCE, decode=None), Stream(SOURCE)
    for stream in (raw, decoding):
        stream.connected(0.0)
        stream.request_to_send(0.0)
        stream.receive_replay(replayed(0), 0.0)
        stream.receive_replay(END, 0.0)
    raw.receive_run([payload(1), payload(2)], 0.0)
    raw.receive_live(live(3), 0.0)
    decoding.receive_run([payload(1)], 0.0)
    for seq in (2, 3):
        decoding.receive_live(live(seq), 0.0)
    delivered = raw.deliveries()
    assert all(isinstance(batch, RawBatch) for batch in delivered)
    assert [batch.decode() for batch in delivered if isinstance(batch, RawBatch)] == decoding.deliveries()
    assert raw.counters == decoding.counters
    assert raw.last_seq == 3


def test_a_run_is_read_ahead_only_while_nothing_is_unsettled() -> None:
    """`coming` names the next numbers of a healthy stream, and none of one that waits for something."""
    fresh = Stream(SOURCE, decode=None)
    assert not fresh.expected_run(3)
    fresh.connected(0.0)
    assert not fresh.expected_run(3)
    stream = RawWire().stream
    assert stream.expected_run(2) == range(4, 6)
    stream.receive_live(live(6), 0.0)
    assert not stream.expected_run(2)


def test_a_run_that_was_read_before_the_connection_was_lost_waits_for_the_verdict() -> None:
    """As every live batch does after a disconnect: it may be of another incarnation."""
    wire = RawWire()
    wire.stream.deliveries()
    wire.stream.disconnected()
    wire.run(4, 6)
    assert wire.stream.deliveries() == []
    wire.stream.connected(1.0)
    wire.stream.request_to_send(1.0)
    wire.stream.receive_replay(replayed(3), 1.0)
    assert wire.stream.deliveries() == []
    for seq in (4, 5):
        wire.stream.receive_replay(replayed(seq), 1.0)
    assert [batch.seq for batch in wire.stream.deliveries() if isinstance(batch, RawBatch)] == [4, 5]


def test_the_newest_batch_of_a_run_after_replayed_history_is_asked_back() -> None:
    """The comparison of replay and live stream is not skipped on the fast way."""
    stream = Stream(SOURCE, decode=None)
    stream.connected(0.0)
    stream.request_to_send(0.0)
    stream.receive_replay(replayed(0), 0.0)
    stream.receive_replay(END, 0.0)
    stream.request_to_send(0.0)
    stream.receive_replay(replayed(0), 0.0)
    stream.receive_replay(END, 0.0)
    stream.receive_run([payload(1), payload(2)], 0.0)
    ask = stream.request_to_send(0.0)
    assert ask is not None
    assert ask.start == 0
    for seq in range(3):
        assert stream.trust == Trust.REPLAYING
        stream.receive_replay(replayed(seq), 0.0)
    assert stream.trust == Trust.EXACT


def test_what_the_consumer_could_not_read_is_doubted_and_counted() -> None:
    """As if the stream had decoded it."""
    stream = RawWire().stream
    assert stream.trust == Trust.EXACT
    report(stream, 0, 2, BAD)
    assert stream.degraded_reasons == {DegradedReason.REJECTED}
    assert stream.counters.rejected == {"unknown-tag": 1, "more": 4}
    report(stream, 0, 3, [Rejected("bad-timestamp", "nan")])
    assert stream.counters.rejected["bad-timestamp"] == 1


def test_a_late_report_of_a_clear_heals_only_what_is_older_than_the_clear() -> None:
    """A gap after batch 3 was declared before the report that batch 3 cleared everything; that gap still counts."""
    wire = RawWire()
    wire.lose(4)
    report(wire.stream, 0, 3, cleared=True)
    assert wire.stream.degraded_reasons == {DegradedReason.LOST}
    report(wire.stream, 0, 5, cleared=True)
    assert wire.stream.trust == Trust.EXACT


def test_an_identity_that_was_doubted_after_the_clear_stays_doubted() -> None:
    """The clear was of the life before the reconnect; the next one may be another."""
    wire = RawWire(Source("tcp://engine:5557", name="engine"))
    wire.stream.disconnected()
    wire.stream.connected(1.0)
    report(wire.stream, 0, 3, cleared=True)
    assert DegradedReason.IDENTITY in wire.stream.degraded_reasons
    wire.run(4, 5)
    report(wire.stream, 0, 4, cleared=True)
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY}


@pytest.mark.parametrize("clear_first", [True, False])
def test_reports_may_come_in_any_order(clear_first: bool) -> None:
    """Unreadable before the clear: healed. In the clear's own batch, or after it: doubted."""
    for unreadable, doubts in ((1, set()), (2, {DegradedReason.REJECTED}), (3, {DegradedReason.REJECTED})):
        stream = RawWire().stream
        if clear_first:
            report(stream, 0, 2, cleared=True)
            report(stream, 0, 0, cleared=True)
        report(stream, 0, unreadable, BAD)
        report(stream, 0, 0, BAD)
        if not clear_first:
            report(stream, 0, 0, cleared=True)
            report(stream, 0, 2, cleared=True)
        assert stream.degraded_reasons == doubts, unreadable


def test_a_report_about_a_life_that_has_ended_is_only_counted() -> None:
    """Its batches are void: neither its clears nor its losses say anything about the new life."""
    wire = RawWire()
    wire.stream.receive_live(live(0, life=1), 0.0)
    wire.stream.request_to_send(0.0)
    wire.stream.receive_replay(END, 0.0)
    wire.confirm(0, life=1)
    wire.stream.receive_live(live(1, life=1), 0.0)
    report(wire.stream, 0, 3, BAD, cleared=True)
    assert wire.stream.incarnation == 1
    assert wire.stream.trust == Trust.EXACT
    assert wire.stream.counters.rejected == {"unknown-tag": 1, "more": 4}
    report(wire.stream, 1, 0, BAD)
    assert wire.stream.degraded_reasons == {DegradedReason.REJECTED}
    report(wire.stream, 1, 1, cleared=True)
    assert wire.stream.trust == Trust.EXACT


def test_a_report_about_what_was_never_delivered_is_void() -> None:
    """It can only be about another subscriber's batch."""
    stream = RawWire().stream
    for incarnation, seq in ((0, 4), (1, 0)):
        report(stream, incarnation, seq, BAD, cleared=True)
    assert stream.trust == Trust.EXACT
    assert stream.counters.rejected == {}


# --- streams that an earlier process followed ------------------------------------------------------------------------------


def kept(stream: Stream[Batch]) -> Checkpoint:
    """As it comes back from a disk."""
    return Checkpoint.decode(stream.position().checkpoint("engine", 3).encode())


def restored(checkpoint: Checkpoint, source: Source = SOURCE) -> Wire:
    """The stream in the next process, not yet connected."""
    wire = Wire(source)
    wire.stream.restore(checkpoint)
    return wire


def resumed(checkpoint: Checkpoint, source: Source = SOURCE) -> Wire:
    """The same, connected."""
    wire = restored(checkpoint, source)
    wire.stream.connected(0.0)
    return wire


@pytest.fixture
def checkpoint(wire: Wire) -> Checkpoint:
    """Of an EXACT stream that has handed out numbers 0 to 2, all of them live."""
    wire.feed(live(0), live(1), live(2))
    wire.stream.deliveries()
    wire.later(LIMITS.idle_before_probe)
    assert wire.asked() == 2
    wire.answer(replayed(2), END)
    assert wire.stream.trust == Trust.EXACT
    return kept(wire.stream)


def test_a_restored_stream_claims_nothing_before_it_is_connected(checkpoint: Checkpoint) -> None:
    """STALE with the reason; no request, no timer, no delivery; a loss of a connection that never was changes nothing."""
    wire = restored(checkpoint)
    wire.stream.disconnected()
    wire.later(LIMITS.max_probe_interval)
    assert wire.stream.trust == Trust.STALE
    assert "not yet connected" in wire.stream.trust.reason
    assert (wire.stream.last_seq, wire.stream.incarnation, wire.stream.deadline()) == (2, 0, None)
    assert wire.asked() is None
    assert wire.taken() == []
    assert kept(wire.stream) == checkpoint


def test_a_restored_stream_of_the_same_life_goes_on(checkpoint: Checkpoint) -> None:
    """The anchor comes back: no reset, nothing twice, what was missed meanwhile, then EXACT, and a reconnect works as ever."""
    wire = resumed(checkpoint)
    assert wire.stream.trust == Trust.REPLAYING
    assert wire.asked() == 2
    wire.feed(live(5))
    wire.answer(replayed(2), replayed(3), replayed(4), END)
    assert wire.taken() == ["r3", "r4", "b5"]
    wire.confirm()
    assert wire.stream.trust == Trust.EXACT
    assert wire.stream.incarnation == 0
    assert wire.stream.counters.reconnects == 0


def test_a_restored_stream_without_news_is_unproven_and_knows_its_anchor_again(checkpoint: Checkpoint) -> None:
    """The bytes that only their digest was known of are the anchor of the next check, and of the next checkpoint."""
    wire = resumed(checkpoint)
    assert wire.asked() == 2
    wire.answer(replayed(2), END)
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    assert kept(wire.stream) == checkpoint
    wire.later(LIMITS.idle_before_probe)
    assert wire.asked() == 2
    wire.answer(replayed(2), END)
    wire.feed(live(2))
    wire.stream.disconnected()
    wire.stream.connected(9.0)
    assert wire.asked() == 2
    wire.answer(replayed(2, life=1))
    assert wire.taken() == ["R1"]


def test_a_restored_stream_of_another_life_is_reset(checkpoint: Checkpoint) -> None:
    """The number is there with another content: Reset with the next incarnation, then everything from 0."""
    wire = resumed(checkpoint)
    assert wire.asked() == 2
    wire.feed(live(4, life=1))
    wire.answer(replayed(2, life=1))
    assert wire.taken() == ["R1"]
    assert wire.asked() == 0
    wire.answer(*(replayed(seq, life=1) for seq in range(4)))
    assert wire.taken() == ["r0", "r1", "r2", "r3", "b4"]
    wire.confirm(life=1)
    assert wire.stream.trust == Trust.EXACT


@pytest.mark.parametrize("known", [0, 2])
def test_a_publisher_that_no_longer_holds_the_anchor_is_another_one(checkpoint: Checkpoint, known: int) -> None:
    """It holds less, or nothing where something was: a young life. The frames that waited are its own, and are kept."""
    wire = resumed(checkpoint)
    for _ in range(LIMITS.max_incomplete_answers):
        assert wire.asked() == 2
        wire.answer(END)
    assert wire.taken() == ["R1"]
    assert wire.asked() == 0
    wire.answer(*(replayed(seq, life=1) for seq in range(known)))
    wire.feed(live(known, life=1))
    assert wire.taken() == [*(f"r{seq}" for seq in range(known)), f"b{known}"]


def test_a_number_that_is_not_above_the_last_one_resets_a_restored_stream(checkpoint: Checkpoint) -> None:
    """Rule 5, in every mode: whatever comes live was sent after this process had connected."""
    wire = resumed(checkpoint)
    wire.feed(live(2, life=1))
    assert wire.taken() == ["R1"]
    unsupported = resumed(checkpoint, Source("tcp://engine:5557", name="engine", rank=3))
    unsupported.feed(live(0, life=1))
    assert unsupported.taken() == ["R1", "b0"]


def test_frames_read_before_a_restored_stream_is_announced_are_of_the_new_connection(
    checkpoint: Checkpoint,
) -> None:
    """They wait for the verdict, and follow it whichever it is."""
    same, other = restored(checkpoint), restored(checkpoint)
    for life, wire in enumerate((same, other)):
        wire.feed(live(3, life=life))
        assert wire.stream.trust == Trust.STALE
        wire.stream.connected(0.0)
        assert wire.asked() == 2
        wire.answer(replayed(2, life=life))
    assert same.taken() == ["b3"]
    assert other.asked() == 0
    other.answer(*(replayed(seq, life=1) for seq in range(3)))
    assert other.taken() == ["R1", "r0", "r1", "r2", "b3"]


def test_a_mute_replay_endpoint_leaves_the_identity_of_a_restored_stream_in_doubt(checkpoint: Checkpoint) -> None:
    """As after a reconnect: live batches go on after a bounded wait, DEGRADED, until the anchor is proven."""
    wire = resumed(checkpoint)
    wire.feed(live(3))
    for _ in range(LIMITS.max_unanswered_requests):
        assert wire.asked() == 2
        wire.later(LIMITS.replay_timeout)
    assert wire.taken() == ["b3"]
    assert wire.stream.degraded_reasons == {
        DegradedReason.IDENTITY,
        DegradedReason.REPLAY_SILENT,
        DegradedReason.REPLAY_UNPROVEN,
    }
    wire.later(LIMITS.max_probe_interval)
    assert wire.asked() == 2
    wire.answer(replayed(2), replayed(3), END)
    assert wire.stream.trust == Trust.EXACT


def test_an_unproven_life_is_not_proven_by_its_own_batches(checkpoint: Checkpoint) -> None:
    """A checkpoint keeps the anchor from before the doubt: a life that passed the old number unseen is found out later."""
    wire = resumed(checkpoint)
    wire.feed(live(3, life=1))
    for _ in range(LIMITS.max_unanswered_requests):
        assert wire.asked() == 2
        wire.later(LIMITS.replay_timeout)
    assert wire.taken() == ["b3"]
    again = kept(wire.stream)
    assert (again.last_seq, again.degraded_reasons) == (3, {"IDENTITY": 2})
    assert again.fingerprints == (*checkpoint.fingerprints, Fingerprint(3, payload_digest(payload(3, life=1)), live=True))
    later = resumed(again)
    assert later.asked() == 2
    later.answer(replayed(2, life=1))
    assert later.taken() == ["R1"]


def test_without_replay_a_restored_stream_goes_on_in_doubt(checkpoint: Checkpoint) -> None:
    """Rule 7: nothing can be proven, and trust says so; a checkpoint of that does not come back as EXACT with replay either."""
    wire = resumed(checkpoint, Source("tcp://engine:5557", name="engine", rank=3))
    wire.feed(live(3), live(5))
    assert wire.taken() == ["b3", "g4-4", "b5"]
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY, DegradedReason.IDENTITY, DegradedReason.LOST}
    proven = resumed(kept(wire.stream))
    assert proven.asked() == 2
    proven.answer(replayed(2), replayed(3), replayed(4), replayed(5), END)
    assert proven.taken() == []
    assert proven.stream.degraded_reasons == {DegradedReason.LOST, DegradedReason.REPLAY_UNPROVEN}


def test_doubts_come_back_and_end_as_they_would_have(wire: Wire) -> None:
    """LOST stays through a restart, the next clear ends it; those about an endpoint stay behind."""
    wire.feed(live(0), live(2))
    for _ in range(LIMITS.max_unanswered_requests):
        assert wire.asked() == 1
        wire.later(LIMITS.replay_timeout)
    assert wire.taken() == ["b0", "g1-1", "b2"]
    assert wire.stream.degraded_reasons == {DegradedReason.LOST, DegradedReason.REPLAY_SILENT}
    again = resumed(kept(wire.stream))
    assert again.asked() == 2
    again.answer(replayed(2), END)
    assert again.stream.trust == Trust.DEGRADED
    assert again.stream.degraded_reasons == {DegradedReason.LOST, DegradedReason.REPLAY_UNPROVEN}
    again.feed(live_frames(TOPIC, 3, payload_of(0, 3, clear=True)))
    assert again.asked() == 3
    again.answer(replay_batch_frames(TOPIC, 3, payload_of(0, 3, clear=True)), END)
    assert again.stream.trust == Trust.EXACT


def test_an_anchor_that_was_replayed_does_not_vouch_for_the_replay_endpoint() -> None:
    """The first live batch after it is asked back, in the next process too."""
    wire = Wire()
    wire.stream.connected(0.0)
    assert wire.asked() == 0
    wire.answer(replayed(0), END)
    again = resumed(kept(wire.stream))
    assert again.asked() == 0
    again.answer(replayed(0), END)
    again.feed(live(1))
    assert again.asked() == 0
    again.answer(replayed(0), END)
    assert again.stream.trust != Trust.EXACT


@pytest.mark.parametrize("source", [SOURCE, Source("tcp://engine:5557", name="engine", rank=3)])
def test_without_an_anchor_a_restored_stream_begins_with_a_reset(source: Source) -> None:
    """Nothing was delivered, or only a gap: an engine that holds more cannot be distinguished from another incarnation."""
    nothing = Stream(source).position().checkpoint("engine", 3)
    for checkpoint in (nothing, Checkpoint("engine", 3, 0, 4, degraded_reasons={"LOST": 4})):
        wire = resumed(checkpoint, source)
        wire.feed(live(0))
        assert wire.taken()[0] == "R1"
        assert not wire.stream.degraded_reasons - {DegradedReason.NO_REPLAY, DegradedReason.REPLAY_UNPROVEN}


def test_a_checkpoint_of_another_stream_is_refused(checkpoint: Checkpoint) -> None:
    """Names and ranks must be equal: numbers of one stream mean nothing in another."""
    with pytest.raises(ConfigError, match="rank 0 from a checkpoint of engine rank 3"):
        Stream(Source("tcp://e:1", name="engine")).restore(checkpoint)


def test_a_checkpoint_is_small_and_reveals_nothing_of_the_prompt(wire: Wire) -> None:
    """Whatever the batch holds, the checkpoint stores 32 bytes for it."""
    wire.feed(live_frames(TOPIC, 0, b"\x92" + b"secret" * 1_000_000))
    written = kept(wire.stream).encode()
    assert len(written) < 300
    assert b"secret" not in written


ANCHOR = Fingerprint(5, bytes(32), live=True)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ({}, "required field `source`"),
        ([], "got `array`"),
        ({"incarnation": -1}, ">= 0"),
        ({"rank": "0"}, "got `str`"),
        ({"last_seq": -2}, ">= -1"),
        ({"last_seq": 2**48}, "<= 281474976710655"),
        ({"last_seq": 1e300}, "got `float`"),
        ({"last_seq": 4}, "fingerprint of batch 5 is after last_seq 4"),
        ({"fingerprints": [{"seq": 5, "digest": "AAAA", "live": True}]}, "length >= 32"),
        ({"fingerprints": [{"seq": 5, "digest": "?" * 43 + "=", "live": True}]}, "base64"),
        ({"fingerprints": [{"seq": 5}]}, "required field `digest`"),
        ({"fingerprints": [msgspec.to_builtins(ANCHOR)] * 2}, "not in rising order"),
        ({"fingerprints": [msgspec.to_builtins(ANCHOR)] * (MAX_FINGERPRINTS + 1)}, "length <= 16"),
        ({"degraded_reasons": {"EVERYTHING": 3}}, "unknown degraded reason 'EVERYTHING'"),
        ({"degraded_reasons": {"NO_REPLAY": 3}}, "unknown degraded reason 'NO_REPLAY'"),
        ({"degraded_reasons": {"LOST": None}}, "got `null`"),
        ({"more": 1}, "unknown field `more`"),
    ],
    ids=str,
)
def test_what_is_no_checkpoint_is_refused_with_a_sentence(checkpoint: object, message: str) -> None:
    """A corrupt or hostile file never becomes a position in a stream."""
    good = Checkpoint("engine", 3, 0, 5, (ANCHOR,), degraded_reasons={"LOST": 3})
    whole = {**msgspec.to_builtins(good), **checkpoint} if isinstance(checkpoint, dict) and checkpoint else checkpoint
    written = msgspec.json.encode(whole)
    with pytest.raises(SnapshotError, match=message) as caught:
        Checkpoint.decode(written)
    assert "invalid checkpoint of a stream" in str(caught.value)


@given(st.binary(max_size=200) | st.tuples(st.integers(0, 150), st.binary(max_size=4)))
def test_any_bytes_are_a_checkpoint_or_an_error(noise: bytes | tuple[int, bytes]) -> None:
    """Nothing else is raised, and what is accepted can be written again."""
    if isinstance(noise, tuple):
        good = Checkpoint("engine", 3, 0, 5, (ANCHOR,), degraded_reasons={"LOST": 3}).encode()
        noise = good[: noise[0]] + noise[1] + good[noise[0] + len(noise[1]) :]
    try:
        checkpoint = Checkpoint.decode(noise)
    except SnapshotError:
        return
    assert Checkpoint.decode(checkpoint.encode()) == checkpoint


def test_a_checkpoint_goes_into_whatever_msgspec_writes(checkpoint: Checkpoint) -> None:
    """In JSON or MessagePack, alone or in a list."""
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode([checkpoint]), type=list[Checkpoint]) == [checkpoint]


def test_a_state_of_a_later_moment_is_kept_with_the_doubts_of_both(checkpoint: Checkpoint) -> None:
    """A gap that the state has seen is not repaired by a batch that it passes over; a new incarnation voids all of it."""
    doubted = msgspec.structs.replace(checkpoint, degraded_reasons={"IDENTITY": 1, "LOST": 2})
    later = msgspec.structs.replace(checkpoint, last_seq=9, fingerprints=(), degraded_reasons={"LOST": 7, "REJECTED": 8})
    both = doubted.merge_later(later)
    assert (both.last_seq, both.fingerprints) == (2, checkpoint.fingerprints)
    assert both.degraded_reasons == {"IDENTITY": 1, "LOST": 7, "REJECTED": 8}
    wire = resumed(both)
    assert wire.asked() == 2
    wire.answer(replayed(2), replay_batch_frames(TOPIC, 3, payload_of(0, 3, clear=True)), END)
    assert wire.stream.degraded_reasons == {DegradedReason.LOST, DegradedReason.REJECTED, DegradedReason.REPLAY_UNPROVEN}
    other = resumed(checkpoint.merge_later(msgspec.structs.replace(later, incarnation=4)))
    assert other.taken() == ["R5"]


def test_every_state_has_a_transition_and_every_input_and_action_is_used() -> None:
    """The table is complete: each state can be entered and left, and nothing in it is out of use."""
    transitions = [transition for row in TRANSITIONS.values() for transition in row.values()]
    assert all(TRANSITIONS[state] for state in State)
    assert {transition.state for transition in transitions} | {State.RESTORED} == set(State)
    assert {input_ for row in TRANSITIONS.values() for input_ in row} == set(Input)
    assert {transition.action for transition in transitions} == set(Action)


def test_trust_compares_by_state_and_carries_the_reason() -> None:
    """`==` asks for the state; the reason is for people."""
    degraded = Trust.DEGRADED.with_reason("batches are lost")
    assert degraded == Trust.DEGRADED
    assert degraded != Trust.EXACT
    assert hash(degraded) == hash(Trust.DEGRADED)
    assert str(degraded) == "DEGRADED (batches are lost)"
    assert repr(Trust.EXACT) == "<Trust EXACT>"
    with pytest.raises(AttributeError, match="cannot assign"):
        degraded.reason = ""  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"endpoint": "host:5557"}, "has no transport"),
        ({"endpoint": "tcp://127.0.0.1:5557:5558"}, "expected tcp://HOST:PORT"),
        ({"endpoint": "tcp://h:1", "replay_endpoint": "http://h:8000"}, "expected tcp://HOST:PORT with the engine's port"),
        ({"endpoint": "tcp://h:1", "rank": -1}, "expected a number from 0"),
    ],
)
def test_a_wrong_source_is_refused_with_a_sentence(arguments: dict[str, object], message: str) -> None:
    """Settings are checked where they are given."""
    with pytest.raises(ConfigError, match=message):
        Source(**arguments)  # type: ignore[arg-type]


def test_ranks_count_ports_up_and_share_a_name() -> None:
    """Both endpoints move together; the name stays, so that `trust(name, rank)` finds each."""
    ranks = Source("tcp://engine:5557", "tcp://engine:5600").ranks(3)
    assert [(each.endpoint, each.replay_endpoint, each.label, each.rank) for each in ranks] == [
        ("tcp://engine:5557", "tcp://engine:5600", "tcp://engine:5557", 0),
        ("tcp://engine:5558", "tcp://engine:5601", "tcp://engine:5557", 1),
        ("tcp://engine:5559", "tcp://engine:5602", "tcp://engine:5557", 2),
    ]


# --- lives that begin alike -------------------------------------------------------------------------------------------------


def numbered(seq: int, content: int) -> list[bytes]:
    """A replayed batch, in a life that counts other things before it than the first one did."""
    return replay_batch_frames(TOPIC, seq, payload(content))


def reconnected_behind_a_hole() -> Wire:
    """0 to 4 were delivered, 3 of them by replay behind the live 2; the connection was lost before that was confirmed."""
    wire = Wire()
    wire.stream.connected(0.0)
    assert wire.asked() == 0
    wire.answer(END)
    wire.feed(live(0), live(1), live(2), live(4))
    assert wire.asked() == 3
    wire.answer(replayed(3))
    assert wire.taken() == ["b0", "b1", "b2", "r3", "b4"]
    wire.stream.disconnected()
    wire.stream.connected(wire.now)
    assert wire.asked() == 2, "live, and before what was replayed"
    return wire


def test_a_life_that_is_the_same_up_to_the_newest_batch_goes_on() -> None:
    wire = reconnected_behind_a_hole()
    wire.answer(replayed(2), replayed(3))
    assert wire.stream.trust == Trust.REPLAYING, "the newest has not come"
    wire.answer(replayed(4), replayed(5), END)
    assert wire.taken() == ["r5"]


def test_a_life_that_is_the_same_up_to_an_older_batch_only_is_another_one() -> None:
    """A relay without a journal that was killed sends the same batches again, with heartbeats at other numbers: some numbers
    keep their meaning, and after an added or missing heartbeat none do."""
    wire = reconnected_behind_a_hole()
    wire.answer(replayed(2), numbered(3, 100), numbered(4, 3), numbered(5, 4), END)
    assert wire.taken() == ["R1"]
    assert wire.asked() == 0
    assert wire.stream.trust == Trust.REPLAYING


def test_an_answer_without_the_newest_batch_is_asked_for_again() -> None:
    """From its beginning, since another publisher may give the next one."""
    wire = reconnected_behind_a_hole()
    wire.answer(replayed(2), replayed(3), END)
    assert wire.asked() == 2
    wire.answer(replayed(2), replayed(3), numbered(4, 3), END)
    assert wire.taken() == ["R1"]


@pytest.mark.parametrize(("newest", "delivered"), [(4, []), (100, ["R1"])], ids=["the same", "another"])
def test_a_life_that_could_not_be_proven_at_once_is_proven_by_both_batches(newest: int, delivered: list[str]) -> None:
    """Replay is mute after the reconnect. Once it answers, the batch that is newer than what is asked back counts too."""
    wire = reconnected_behind_a_hole()
    while DegradedReason.IDENTITY not in wire.stream.degraded_reasons:
        wire.until_due()
        wire.asked()
    wire.feed(live(5))
    assert wire.taken() == ["b5"]
    assert wire.asked() is None, "it has just been mute"
    assert DegradedReason.IDENTITY in wire.stream.degraded_reasons
    while (start := wire.asked()) is None:
        wire.until_due()
    assert start == 2
    wire.answer(replayed(2), replayed(3), numbered(4, newest), replayed(5), END)
    assert wire.taken() == delivered
    assert DegradedReason.IDENTITY not in wire.stream.degraded_reasons


def reconnected_with_frames_unread() -> Wire:
    """0 to 2 were delivered; 3 to 6 came over the connection that was lost, and were read behind the news of that."""
    wire = Wire()
    wire.stream.connected(0.0)
    assert wire.asked() == 0
    wire.answer(END)
    wire.feed(live(0), live(1), live(2))
    wire.stream.disconnected()
    wire.feed(live(3), live(4), live(5), live(6))
    wire.stream.connected(wire.now)
    assert wire.asked() == 2
    assert wire.taken() == ["b0", "b1", "b2"]
    return wire


def test_frames_that_waited_are_delivered_once_the_answer_has_repeated_them() -> None:
    wire = reconnected_with_frames_unread()
    wire.answer(replayed(2), replayed(3), replayed(4), replayed(5))
    assert wire.taken() == []
    assert wire.stream.position().checkpoint("engine", 3).last_seq == 2, "what waits is in no checkpoint"
    wire.answer(replayed(6), END)
    assert wire.taken() == ["b3", "b4", "b5", "b6"]
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}, "all of them are of the connection before"


def test_of_the_frames_that_waited_an_answer_may_have_lost_some() -> None:
    """Of those that are asked for again, since another publisher may give the next answer, the newest has to come."""
    wire = reconnected_with_frames_unread()
    wire.answer(replayed(2), replayed(4), END)
    assert wire.asked() == 2
    wire.answer(replayed(2), replayed(5), replayed(6), END)
    assert wire.taken() == ["b3", "b4", "b5", "b6"]


@pytest.mark.parametrize("alike", range(3, 7))
def test_frames_that_waited_and_are_of_a_life_that_was_like_this_one_are_dropped(alike: int) -> None:
    """Up to some number both lives say the same; wherever they part, nothing of the old one is delivered as the new one's."""
    wire = reconnected_with_frames_unread()
    wire.answer(
        *map(replayed, range(2, alike)), numbered(alike, 100), *(numbered(seq, seq - 1) for seq in range(alike + 1, 9)), END
    )
    assert wire.taken() == ["R1"]
    assert wire.asked() == 0


def test_where_replay_is_mute_the_newest_frame_that_waited_is_what_proves_the_life_later() -> None:
    for newest, delivered in ((6, []), (100, ["R1"])):
        wire = reconnected_with_frames_unread()
        while DegradedReason.IDENTITY not in wire.stream.degraded_reasons:
            wire.until_due()
            wire.asked()
        assert wire.taken() == ["b3", "b4", "b5", "b6"]
        while (start := wire.asked()) is None:
            wire.until_due()
        assert start == 2
        wire.answer(*map(replayed, range(2, 6)), numbered(6, newest), END)
        assert wire.taken() == delivered
        assert DegradedReason.IDENTITY not in wire.stream.degraded_reasons


def life_with(marks: set[int], name: int) -> list[bytes]:
    """Batches 0 to 19, and before some of them a mark of this incarnation: as a relay sends batches and heartbeats."""
    payloads: list[bytes] = []
    for content in range(20):
        if content in marks:
            payloads.append(payload(content, life=name))
        payloads.append(payload(content))
    return payloads


MARKS = st.sets(st.integers(0, 19), max_size=4)
PLACES = st.sets(st.integers(0, 23), max_size=5)


@given(MARKS, MARKS, st.integers(1, 20), st.integers(0, 20), PLACES, PLACES, st.booleans())
def test_whatever_two_lives_have_in_common_no_batch_is_lost_or_comes_twice(
    old_marks: set[int], new_marks: set[int], read: int, unread: int, holes: set[int], lost: set[int], confirmed: bool
) -> None:
    """Some batches of an incarnation were read, others waited when it ended; the next one sends the same with other marks, and
    its replies lose messages. Whatever is delivered as one incarnation holds every batch once and in order."""
    old, new = life_with(old_marks, 1), life_with(new_marks, 2)
    wire = Wire()
    by_life: list[list[bytes]] = [[]]

    def take() -> None:
        for delivery in wire.stream.deliveries():
            if isinstance(delivery, Reset):
                by_life.append([])
            else:
                assert isinstance(delivery, Batch)
                by_life[-1].append(delivery.payload)

    def serve(life: list[bytes], lost: set[int]) -> None:
        start = wire.asked()
        if start is not None:
            sent = [seq for seq in range(start, len(life)) if seq == start or seq not in lost]
            wire.answer(*(replay_batch_frames(TOPIC, seq, life[seq]) for seq in sent), END)
        take()

    wire.stream.connected(0.0)
    serve([], set())
    for seq in range(read):
        if seq not in holes or seq == read - 1:
            wire.feed(live_frames(TOPIC, seq, old[seq]))
            if confirmed:
                serve(old[: seq + 1], set())
    serve(old[:read], set())
    wire.stream.disconnected()
    wire.feed(*(live_frames(TOPIC, seq, old[seq]) for seq in range(read, min(read + unread, len(old)))))
    wire.stream.connected(0.0)
    for _ in range(40):
        serve(new, lost)
        if not wire.stream.is_fetching:
            wire.until_due()
    batches = list(map(payload, range(20)))
    for delivered in by_life:
        of_both = [each for each in delivered if each in batches]
        assert of_both == batches[: len(of_both)]


class Consumer:
    """A consumer with its state, which may go on in another process."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.state: dict[int, bytes] = {}

    def take(self) -> None:
        for delivery in self.wire.stream.deliveries():
            if isinstance(delivery, Reset):
                self.state.clear()
            elif isinstance(delivery, Batch):
                # It passes over numbers that it knows, as `Checkpoint.merge_later` demands.
                self.state.setdefault(delivery.seq, delivery.payload)

    def is_served(self, life: list[bytes]) -> None:
        """Replay speaks, for as long as there is anything to ask, and longer."""
        for _ in range(60):
            if (start := self.wire.asked()) is not None:
                self.wire.answer(*(replay_batch_frames(TOPIC, seq, life[seq]) for seq in range(start, len(life))), END)
            self.take()
            if not self.wire.stream.is_fetching:
                self.wire.until_due()

    def gives_up(self) -> None:
        """Replay is mute, until the stream goes on without it."""
        while self.wire.stream.state is not State.FOLLOWING:
            self.wire.asked()
            self.wire.until_due()
        self.take()

    def ends(self, how: str, before: Checkpoint) -> None:
        """The connection, or the process too: it goes on from a checkpoint of now, or of one before with the state of now."""
        now = kept(self.wire.stream)
        if how.startswith("reconnects"):
            self.wire.stream.disconnected()
        else:
            self.wire = restored(now if how == "restarts" else before.merge_later(now))


def test_after_more_unproven_connections_than_are_remembered_a_doubt_stays() -> None:
    """Each needs batches of its own; those that are left do not prove all, in this process or in another one."""
    life = list(map(payload, range(40)))
    doubts: list[frozenset[DegradedReason]] = []
    for reconnects in (MAX_FINGERPRINTS // 2 - 1, MAX_FINGERPRINTS // 2 + 1):
        for end in ("reconnects", "restarts"):
            consumer = Consumer()
            consumer.wire.stream.connected(0.0)
            consumer.wire.feed(live_frames(TOPIC, 0, life[0]))
            consumer.is_served(life[:1])
            for number in range(reconnects):
                consumer.ends(end, kept(consumer.wire.stream))
                consumer.wire.stream.connected(consumer.wire.now)
                consumer.wire.feed(*(live_frames(TOPIC, seq, life[seq]) for seq in (2 * number + 1, 2 * number + 2)))
                consumer.gives_up()
            consumer.ends(end, kept(consumer.wire.stream))
            consumer.wire.stream.connected(consumer.wire.now)
            consumer.is_served(life)
            assert list(consumer.state.values()) == life
            consumer.wire.feed(live_frames(TOPIC, len(life), payload(len(life))))
            consumer.is_served([*life, payload(len(life))])
            doubts.append(consumer.wire.stream.degraded_reasons)
            # What the next connection proves is the newest batch, and none of those that were not remembered.
            consumer.ends(end, kept(consumer.wire.stream))
            consumer.wire.stream.connected(consumer.wire.now)
            consumer.is_served([*life, payload(len(life))])
            doubts.append(consumer.wire.stream.degraded_reasons - {DegradedReason.REPLAY_UNPROVEN})
    assert doubts == [frozenset()] * 4 + [{DegradedReason.IDENTITY}] * 4


def test_a_checkpoint_amid_deliveries_has_the_anchors_of_those_that_were_handed_out() -> None:
    """A consumer may stop between batches that became deliverable together, over connections of which none was proven."""
    wire = Wire()
    wire.stream.connected(0.0)
    before = wire.stream.position()
    for seqs in ((0,), (1, 2, 3), (4, 5, 6)):
        wire.stream.disconnected()
        wire.stream.connected(wire.now)
        wire.feed(*map(live, seqs))
        while wire.stream.state is not State.FOLLOWING:
            wire.asked()
            wire.until_due()
    batches, now = wire.stream.deliveries(), wire.stream.position()
    found = [before.after_deliveries(batches[:count], now).checkpoint("engine", 3) for count in range(8)]
    assert [[each.seq for each in checkpoint.fingerprints] for checkpoint in found] == [
        [],
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 1, 3, 4],
        [0, 1, 3, 4, 5],
        [0, 1, 3, 4, 6],
    ]


ENDS = st.sampled_from(["reconnects", "reconnects at once", "restarts", "restarts with a later state"])


@given(st.lists(st.tuples(MARKS, st.integers(1, 6), ENDS), min_size=1, max_size=12), MARKS, st.booleans())
def test_a_stream_that_is_exact_has_delivered_what_its_publisher_sent(
    connections: list[tuple[set[int], int, str]], last_marks: set[int], proven: bool
) -> None:
    """After a first connection, proven or not, replay does not answer for several, each of which may be of another incarnation.
    Whatever these have in common, once replay answers again no EXACT stream has lost a batch or delivered one twice."""
    consumer, seq = Consumer(), 0
    for number, (marks, count, end) in enumerate(connections):
        life = life_with(marks, number + 1)
        consumer.wire.stream.connected(consumer.wire.now)
        consumer.take()
        before = kept(consumer.wire.stream)
        coming = range(seq, max(seq, min(seq + count, len(life))))
        consumer.wire.feed(*(live_frames(TOPIC, at, life[at]) for at in coming))
        seq = coming.stop
        if number == 0 and proven:
            consumer.is_served(life[:seq])
        if end != "reconnects at once":
            consumer.gives_up()
        consumer.ends(end, before)
    life = life_with(last_marks, len(connections) + 1)
    consumer.wire.stream.connected(consumer.wire.now)
    consumer.is_served(life)
    assert consumer.wire.stream.trust != Trust.EXACT, "no live batch has come over this connection"
    life.append(payload(20))
    consumer.wire.feed(live_frames(TOPIC, len(life) - 1, life[-1]))
    consumer.is_served(life)
    if consumer.wire.stream.trust == Trust.EXACT:
        batches = list(map(payload, range(21)))
        assert list(consumer.state) == list(range(len(life)))
        assert [each for each in consumer.state.values() if each in batches] == batches


def test_a_live_batch_before_replayed_ones_is_compared_however_late_they_come() -> None:
    """Replay and a live batch have agreed; then an answer that began with no known batch fills a hole below that number.

    What was live before the hole is of this publisher only if replay agrees with a live batch once more.
    """
    cross_check = CrossCheck()
    cross_check.first_live = 134
    cross_check.confirm(134)
    seen = [cross_check.is_incomplete]
    cross_check.add_replayed(Fingerprint.of(133, b"replayed", live=False), Fingerprint.of(124, b"before", live=True))
    seen.append(cross_check.is_incomplete)
    assert cross_check.live_before_replay is not None
    cross_check.confirm(135)
    seen.append(cross_check.is_incomplete)
    assert seen == [False, True, False]
    assert cross_check.live_before_replay is None


def test_answers_that_do_not_begin_with_each_other_are_proven_by_one_that_repeats_both() -> None:
    """A live batch in the newest answer says nothing of the one before."""
    cross_check = CrossCheck()
    cross_check.first_live = 0
    for seq in (1, 5):
        cross_check.separate_next_answer()
        cross_check.add_replayed(Fingerprint.of(seq, b"", live=False), None)
    assert [each.seq for each in cross_check.all_unconfirmed] == [1, 5]
    cross_check.confirm(6)
    assert [each.seq for each in cross_check.all_unconfirmed] == [1]
    cross_check.confirm(7)
    assert cross_check.is_incomplete
    cross_check.repeat(Fingerprint.of(1, b"", live=False))
    cross_check.confirm(8)
    assert not cross_check.is_incomplete


def test_no_more_answers_are_kept_apart_than_can_be_repeated() -> None:
    """Then the next one has to begin with the one before."""
    cross_check = CrossCheck()
    for seq in range(2 * MAX_FINGERPRINTS):
        cross_check.separate_next_answer()
        cross_check.add_replayed(Fingerprint.of(seq, b"", live=False), None)
    assert len(cross_check.all_unconfirmed) == MAX_FINGERPRINTS + 1
    cross_check.first_live = 0
    cross_check.match_digest(2 * MAX_FINGERPRINTS)
    assert not cross_check.is_incomplete


def test_an_answer_of_another_engine_is_found_out_though_later_ones_are_of_the_right_one(wire: Wire) -> None:
    """At an address of several engines, agreement of replay and live stream now does not say which engine filled a gap."""
    wire.feed(live(0), live(2))
    assert wire.asked() == 1
    wire.answer(replayed(1, life=7), END)
    assert wire.taken() == ["b0", "r1", "b2"]
    while (start := wire.asked()) is not None:
        assert wire.stream.trust == Trust.REPLAYING
        wire.answer(*(replayed(seq) for seq in range(start, 3)), END)
    assert wire.stream.counters.conflicts == 1
    assert wire.taken() == ["R1", "r0", "r1", "r2"]
    assert wire.stream.trust != Trust.EXACT


def test_one_answer_fills_a_hole_and_proves_whose_it_is(wire: Wire) -> None:
    """It holds the live batch behind the hole as well; nothing has to be asked again."""
    wire.feed(live(0), live(2), live(3))
    assert wire.asked() == 1
    wire.answer(replayed(1))
    assert wire.taken() == ["b0", "r1", "b2", "b3"]
    assert wire.stream.trust == Trust.REPLAYING
    wire.answer(replayed(2))
    assert wire.stream.trust == Trust.EXACT
    assert not wire.stream.is_fetching


def test_an_unproven_answer_that_has_left_the_buffer_is_void(wire: Wire) -> None:
    """Its batches cannot be repeated any more, and may be another engine's: everything is delivered again."""
    wire.feed(live(0), live(2))
    assert wire.asked() == 1
    wire.answer(replayed(1), END)
    assert wire.taken() == ["b0", "r1", "b2"]
    for _ in range(LIMITS.max_incomplete_answers):
        assert wire.asked() == 1
        wire.answer(replayed(2), END)
    assert wire.taken() == ["R1"]
    while wire.asked() is not None:
        wire.answer(replayed(2), END)
    assert wire.taken() == ["g0-1", "r2"]


def test_after_everything_was_requested_again_the_next_live_batch_is_compared_at_once(wire: Wire) -> None:
    """A small replay buffer moves on: what it has brought is confirmed now, or it has been evicted by the next check."""
    wire.feed(live(0), live(2))
    assert wire.asked() == 1
    wire.answer(replayed(1), END)
    for _ in range(LIMITS.max_incomplete_answers):
        assert wire.asked() == 1
        wire.answer(replayed(2), END)
    assert wire.asked() == 0
    wire.answer(replayed(2), replayed(3), END)
    while (start := wire.asked()) is not None:
        wire.answer(*(replayed(seq) for seq in range(max(start, 2), 4)), END)
    wire.feed(live(4))
    assert wire.asked() == 3, "at once"
    wire.answer(replayed(3), replayed(4), END)
    assert wire.stream.degraded_reasons == {DegradedReason.LOST}


# --- limits


def test_an_answer_that_pauses_has_ended(wire: Wire) -> None:
    """`reply_idle_timeout` counts from the last message of an answer, `replay_timeout` from the request; both are counted."""
    wire.feed(live(0), live(3))
    assert wire.asked() == 1
    wire.answer(replayed(1))
    assert wire.stream.deadline() == wire.now + LIMITS.reply_idle_timeout
    wire.later(LIMITS.reply_idle_timeout)
    assert wire.stream.counters.unanswered == 1
    assert wire.asked() == 1
    assert wire.stream.deadline() == wire.now + LIMITS.replay_timeout


def test_a_replay_endpoint_that_was_distrusted_is_asked_again_after_a_while(wire: Wire) -> None:
    """`distrust_cooldown` after its last contradiction, and not before; what it says has to be confirmed then."""
    wire.feed(live(0), live(2))
    assert wire.asked() == 1
    wire.answer([b"", b"other-topic", (1).to_bytes(8, "big"), payload(1)])
    assert DegradedReason.REPLAY_FOREIGN in wire.stream.degraded_reasons
    assert wire.taken() == ["b0", "g1-1", "b2"]
    assert wire.stream.deadline() == wire.now + LIMITS.distrust_cooldown
    wire.later(LIMITS.distrust_cooldown - 0.1)
    assert wire.asked() is None
    wire.later(0.1)
    assert wire.asked() == 2
    assert DegradedReason.REPLAY_FOREIGN not in wire.stream.degraded_reasons
    assert DegradedReason.REPLAY_UNCONFIRMED in wire.stream.degraded_reasons


REACHED = {
    "max_pending_batches": "test_what_does_not_fit_the_buffer_is_replayed_later",
    "max_pending_bytes": "test_stream_sequencer.py",
    "replay_timeout": "test_a_mute_replay_endpoint_is_given_up_in_bounded_time",
    "reply_idle_timeout": "test_an_answer_that_pauses_has_ended",
    "max_duplicate_replies": "test_an_endless_answer_without_anything_new_is_cut_off",
    "max_unanswered_requests": "test_requests_without_an_answer_are_neither_complete_nor_truncated",
    "max_incomplete_answers": "test_a_gap_that_was_healed_in_part_counts_as_both",
    "max_request_burst": "test_requests_are_bounded_where_each_answer_brings_one_more",
    "request_interval": "test_requests_are_bounded_where_each_answer_brings_one_more",
    "idle_before_probe": "test_the_tail_is_checked_when_a_stream_is_quiet",
    "max_probe_interval": "test_a_later_probe_settles_a_doubted_identity",
    "max_conflicts": "test_a_replay_endpoint_of_another_stream_is_found_out",
    "distrust_cooldown": "test_a_replay_endpoint_that_was_distrusted_is_asked_again_after_a_while",
    "max_replayed_digests": "test_stream_sequencer.py",
    "max_missed_heartbeats": "test_stream_heartbeats.py",
    "max_consecutive_resyncs": "test_stream_heartbeats.py",
}
"""Where each limit is reached, and what shows that: a test here, or another module."""


def test_every_limit_is_reached_by_a_test() -> None:
    """Rule 8: a limit that is added, and reached by no test, is found here."""
    assert REACHED.keys() == {field.name for field in fields(StreamLimits)}
    known = set(globals()) | {path.name for path in paths.TESTS.rglob("test_*.py")}
    assert set(REACHED.values()) <= known


def test_a_gap_before_a_live_batch_is_a_loss_though_a_snapshot_follows(wire: Wire) -> None:
    """Between that batch and the snapshot the state lacks what was in the gap, so only what is right before it is compacted."""
    wire.feed(live(0), live(3))
    assert wire.asked() == 1
    wire.answer(replay_batch_frames(TOPIC, 6, payload_of(0, 6, clear=True)))
    assert wire.taken() == ["b0", "g1-2", "b3", "c4-5", "r6"]
    assert wire.stream.counters.lost == 2
    assert wire.stream.counters.compacted == 2
