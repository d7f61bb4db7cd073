"""Heartbeats in a stream: matching digests, divergence, the sender's trust, its incarnations, and its silence."""

from __future__ import annotations

from typing import Any

import pytest

from decoding_stream import DecodingStream, trust_replay
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.stream import (
    Batch,
    BatchReport,
    Checkpoint,
    DegradedReason,
    Gap,
    RawBatch,
    Reset,
    Source,
    State,
    Stream,
    StreamLimits,
    Trust,
    inspect_events,
)
from kvevents.wire import Rejected, encode_batch, live_frames, replay_batch_frames, replay_end_frames

TOPIC = b"kv"
SOURCE = Source("tcp://relay:5557", "tcp://relay:5558", name="relay")
WITHOUT_REPLAY = Source("tcp://relay:5557", name="relay")
LIMITS = StreamLimits()
DIGEST = "0123456789abcdef" * 2
INTERVAL = 5.0
END = replay_end_frames(has_topic=True)
BAD = (Rejected("unknown-tag", "not a known tag", 0),)


def heartbeat(trust: str = "EXACT", reason: str = "", incarnation: int = 0, interval: float = INTERVAL) -> Heartbeat:
    return Heartbeat(DIGEST, interval, trust, reason, incarnation)


def heartbeat_batch(**what: Any) -> bytes:
    """Return a batch with only a heartbeat."""
    return encode_batch(KVEventBatch(0.0, [BlockRemoved([], heartbeat=heartbeat(**what))]))


def plain_batch(number: int) -> bytes:
    """Return a batch without a heartbeat."""
    return encode_batch(KVEventBatch(0.0, [BlockStored([number], None, [number], 1)]))


class Wire:
    """A stream, the sender's history, a clock, and a consumer that reports the digest results that a test passes."""

    def __init__(self, source: Source = SOURCE, *, raw: bool = False) -> None:
        self.stream = Stream(source) if raw else DecodingStream(source)
        self.now = 0.0
        self.history: list[bytes] = []
        self.out: list[Any] = []
        self.first = 0
        """The oldest number that the sender still has."""
        self.attested: bool | None = None
        """The consumer's result for the attestation of every heartbeat."""
        self.stream.begin_connection(self.now)
        self.settle()

    def send(self, payload: bytes, *, agrees: bool | None = None, lost: bool = False, attested: bool | None = None) -> None:
        """Send the next batch, and report the consumer's results for it."""
        self.attested = attested
        self.history.append(payload)
        if not lost:
            self.stream.receive_live(live_frames(TOPIC, len(self.history) - 1, payload), self.now)
            self.settle(agrees)

    def settle(self, agrees: bool | None = None) -> None:
        """Take deliveries and answer requests until there are no more; `agrees` is the result for the digest of every
        heartbeat."""
        while True:
            new_deliveries = self.stream.deliveries()
            self.out += new_deliveries
            for delivery in new_deliveries:
                self.report(delivery, agrees)
            replay_request = self.stream.request_to_send(self.now)
            if replay_request is not None:
                for seq in range(max(replay_request.start, self.first), len(self.history)):
                    self.stream.receive_replay(replay_batch_frames(TOPIC, seq, self.history[seq]), self.now)
                self.stream.receive_replay(END, self.now)
            elif not new_deliveries:
                return

    def report(self, delivery: Any, agrees: bool | None) -> None:
        if isinstance(delivery, Batch | RawBatch):
            batch = delivery.decode() if isinstance(delivery, RawBatch) else delivery
            found = inspect_events(batch.events, batch.rejected)
            if found is not None and found.heartbeat is not None:
                self.stream.report(delivery, BatchReport(found.rejected, found.cleared, found.heartbeat, agrees, self.attested))

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.stream.tick(self.now)

    def batch(self, seq: int) -> RawBatch:
        """Return a batch as it was delivered in the current incarnation."""
        return RawBatch("relay", 0, self.stream.incarnation, seq, False, b"")

    @property
    def resets(self) -> list[str]:
        return [delivery.reason for delivery in self.out if isinstance(delivery, Reset)]


@pytest.fixture(params=[False, True], ids=["decoded", "raw"])
def wire(request: pytest.FixtureRequest) -> Wire:
    """Return a stream that is connected and EXACT."""
    found = Wire(raw=request.param)
    trust_replay(found.stream)
    assert found.stream.trust == Trust.EXACT
    return found


# --- report --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], None),
        ([BlockStored([1], None, [1], 1), BlockRemoved([1])], None),
        ([AllBlocksCleared()], BatchReport(cleared=True)),
        ([AllBlocksCleared(unknown_fields={"medium": "GPU"})], None),
        ([BlockRemoved([], heartbeat=heartbeat()), BlockRemoved([1])], BatchReport(heartbeat=heartbeat())),
        ([BlockRemoved([1], heartbeat=heartbeat()), AllBlocksCleared()], BatchReport(cleared=True, heartbeat=heartbeat())),
        (
            [BlockRemoved([], heartbeat=heartbeat("STALE")), BlockRemoved([], heartbeat=heartbeat("DEGRADED"))],
            BatchReport(heartbeat=heartbeat("DEGRADED")),
        ),
    ],
)
def test_the_last_heartbeat_of_a_batch_counts_at_any_place(events: list[KVEvent], expected: BatchReport | None) -> None:
    """Its digest is of the end of the batch, so its place in the batch does not matter; other events may surround it."""
    assert inspect_events(events) == expected


def test_rejected_events_are_reported() -> None:
    assert inspect_events([], BAD) == BatchReport(BAD)


# --- matching digests ------------------------------------------------------------------------------------------------------


def test_a_matching_digest_ends_an_earlier_loss(wire: Wire) -> None:
    """A lost batch might no longer matter; a digest that equals the sender's confirms that."""
    wire.send(plain_batch(0))
    wire.send(plain_batch(1), lost=True)
    wire.first = 2
    """The oldest number that the sender still has."""
    wire.send(plain_batch(2))
    assert wire.stream.degraded_reasons == {DegradedReason.LOST}
    wire.send(heartbeat_batch(), agrees=True)
    assert wire.stream.trust == Trust.EXACT
    assert (wire.stream.counters.heartbeats, wire.stream.counters.digests_matched) == (1, 1)


def test_a_matching_digest_verifies_the_identity_but_does_not_replace_replay() -> None:
    wire = Wire(WITHOUT_REPLAY)
    wire.send(plain_batch(0))
    wire.stream.begin_connection(1.0)
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY, DegradedReason.IDENTITY}
    wire.send(heartbeat_batch(), agrees=True)
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY}


@pytest.mark.parametrize("late", [False, True])
def test_a_matching_digest_ends_rejections_up_to_its_own_batch(late: bool) -> None:
    """The reports may come in any order; events after that batch stay rejected."""
    wire = Wire(raw=True)
    for number in range(5):
        wire.send(plain_batch(number))
    matching_report = BatchReport(heartbeat=heartbeat(), digest_matches=True)
    if late:
        wire.stream.report(wire.batch(3), matching_report)
    for seq in (1, 3):
        wire.stream.report(wire.batch(seq), BatchReport(BAD))
    if not late:
        assert wire.stream.degraded_reasons == {DegradedReason.REJECTED}
        wire.stream.report(wire.batch(3), matching_report)
    assert not wire.stream.degraded_reasons
    wire.stream.report(wire.batch(4), BatchReport(BAD))
    assert wire.stream.degraded_reasons == {DegradedReason.REJECTED}


def test_a_late_report_of_a_matching_digest_does_not_end_newer_reasons() -> None:
    wire = Wire(WITHOUT_REPLAY, raw=True)
    wire.send(plain_batch(0))
    wire.send(plain_batch(1))
    wire.stream.begin_connection(1.0)
    wire.stream.report(wire.batch(1), BatchReport(heartbeat=heartbeat(), digest_matches=True))
    assert DegradedReason.IDENTITY in wire.stream.degraded_reasons


def test_a_digest_that_is_not_compared_changes_nothing(wire: Wire) -> None:
    """The consumer has no index, or its index has evicted blocks."""
    wire.send(heartbeat_batch(), agrees=None)
    assert wire.stream.trust == Trust.EXACT
    assert (wire.stream.counters.heartbeats, wire.stream.counters.digests_matched, wire.stream.counters.digests_mismatched) == (
        1,
        0,
        0,
    )


# --- attestation ------------------------------------------------------------------------------------------------------------


def test_a_matching_attestation_makes_an_exact_stream_attested(wire: Wire) -> None:
    """The trust still equals EXACT for consumers that compare states; its text and its flag say that it is attested."""
    assert (wire.stream.trust, wire.stream.trust.attested) == (Trust.EXACT, False)
    wire.send(heartbeat_batch(), agrees=True, attested=True)
    assert (wire.stream.trust, wire.stream.trust.attested, str(wire.stream.trust)) == (Trust.EXACT, True, "EXACT (attested)")
    wire.send(plain_batch(0))
    assert wire.stream.trust.attested
    assert (wire.stream.counters.attestations_matched, wire.stream.counters.attestations_mismatched) == (1, 0)


def test_a_mismatching_attestation_causes_a_bounded_number_of_resets(wire: Wire) -> None:
    """A matching digest of the same heartbeat ends neither UNATTESTED nor the count, because it is about the stream only."""
    wire.send(plain_batch(0))
    wire.send(heartbeat_batch(), agrees=True, attested=False)
    assert len(wire.resets) == LIMITS.max_consecutive_resyncs
    assert wire.stream.degraded_reasons >= {DegradedReason.UNATTESTED}
    assert DegradedReason.UNATTESTED.value in wire.stream.trust.reason
    wire.send(heartbeat_batch(), agrees=True, attested=False)
    assert len(wire.resets) == LIMITS.max_consecutive_resyncs
    assert wire.stream.trust == Trust.DEGRADED
    wire.send(heartbeat_batch(), agrees=True, attested=True)
    assert wire.stream.trust.attested
    assert wire.stream.degraded_reasons == set()


def test_a_clear_ends_the_reason_of_a_mismatching_attestation() -> None:
    """An empty cache and an empty state are equal, but the stream is not attested."""
    wire = Wire()
    trust_replay(wire.stream)
    wire.send(heartbeat_batch(), agrees=True, attested=False)
    assert DegradedReason.UNATTESTED in wire.stream.degraded_reasons
    wire.send(encode_batch(KVEventBatch(0.0, [AllBlocksCleared()])))
    assert wire.stream.degraded_reasons == set()
    assert (wire.stream.trust, wire.stream.trust.attested) == (Trust.EXACT, False)


def test_a_matching_attestation_ends_no_other_reason(wire: Wire) -> None:
    """It is about one tier of the engine; the lost batch may have been about another one."""
    wire.send(plain_batch(0))
    wire.send(plain_batch(1), lost=True)
    wire.first = 2
    wire.send(plain_batch(2))
    wire.send(heartbeat_batch(), attested=True)
    assert wire.stream.degraded_reasons == {DegradedReason.LOST}
    assert not wire.stream.trust.attested


def test_a_new_incarnation_is_not_attested(wire: Wire) -> None:
    wire.send(heartbeat_batch(), agrees=True, attested=True)
    wire.history = []
    wire.send(plain_batch(9))
    assert wire.resets
    assert (wire.stream.trust, wire.stream.trust.attested) == (Trust.EXACT, False)


# --- divergence ------------------------------------------------------------------------------------------------------------


def test_a_divergence_is_counted_and_everything_is_requested_again(wire: Wire) -> None:
    """The consumer drops its state, the sender sends everything that it holds, and the next digest matches."""
    wire.send(plain_batch(0))
    wire.history.append(heartbeat_batch())
    wire.stream.receive_live(live_frames(TOPIC, 1, heartbeat_batch()), wire.now)
    (delivery,) = wire.stream.deliveries()
    wire.report(delivery, agrees=False)
    assert wire.stream.trust == Trust.DEGRADED
    assert wire.stream.degraded_reasons == {DegradedReason.DIVERGED}
    (reset,) = wire.stream.deliveries()
    assert (type(reset), wire.stream.state) == (Reset, State.CATCHING_UP)
    wire.settle(agrees=True)
    assert [delivery.seq for delivery in wire.out[-2:]] == [0, 1]
    wire.send(plain_batch(2))
    assert wire.stream.trust == Trust.EXACT
    assert (wire.stream.incarnation, wire.stream.counters.digests_mismatched, wire.stream.counters.digests_matched) == (1, 1, 1)


def test_a_persistent_divergence_is_reported_and_the_requests_end(wire: Wire) -> None:
    """The stream is DEGRADED until a digest matches. Replayed heartbeats are compared like live ones."""
    wire.send(plain_batch(0))
    wire.send(heartbeat_batch(), agrees=False)
    assert len(wire.resets) == LIMITS.max_consecutive_resyncs
    assert wire.stream.trust == Trust.DEGRADED
    assert wire.stream.trust.reason.startswith(DegradedReason.DIVERGED.value)
    wire.send(heartbeat_batch(), agrees=False)
    assert len(wire.resets) == LIMITS.max_consecutive_resyncs
    wire.send(heartbeat_batch(), agrees=True)
    assert wire.stream.trust == Trust.EXACT
    wire.send(heartbeat_batch(), agrees=False)
    assert len(wire.resets) > LIMITS.max_consecutive_resyncs


def test_a_replayed_older_match_does_not_allow_another_reset() -> None:
    """In a history with one wrong digest, the digest before it matches in every replay."""
    wire = Wire()
    wire.send(heartbeat_batch(), agrees=True)
    wire.history.append(heartbeat_batch())
    wire.stream.receive_live(live_frames(TOPIC, 1, heartbeat_batch()), wire.now)
    for _ in range(20):
        for delivery in wire.stream.deliveries():
            wire.report(delivery, agrees=getattr(delivery, "seq", 0) == 0)
        replay_request = wire.stream.request_to_send(wire.now)
        if replay_request is not None:
            for seq in range(replay_request.start, 2):
                wire.stream.receive_replay(replay_batch_frames(TOPIC, seq, wire.history[seq]), wire.now)
            wire.stream.receive_replay(END, wire.now)
    assert wire.stream.incarnation == LIMITS.max_consecutive_resyncs
    assert wire.stream.degraded_reasons == {DegradedReason.DIVERGED, DegradedReason.REPLAY_UNPROVEN}


def test_a_clear_ends_a_divergence() -> None:
    wire = Wire(WITHOUT_REPLAY)
    wire.send(heartbeat_batch(), agrees=False)
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY, DegradedReason.DIVERGED}
    wire.send(encode_batch(KVEventBatch(0.0, [AllBlocksCleared()])))
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY}


def test_without_replay_a_divergence_requests_nothing() -> None:
    wire = Wire(WITHOUT_REPLAY)
    wire.send(heartbeat_batch(), agrees=False)
    assert (wire.resets, wire.stream.counters.digests_mismatched) == ([], 1)
    assert wire.stream.trust == Trust.DEGRADED


def test_a_mismatch_after_a_gap_is_not_a_divergence_but_causes_a_resync(wire: Wire) -> None:
    """After a gap the digest differs as expected. The sender's current state can be replayed, and makes the stream EXACT."""
    wire.send(plain_batch(0))
    wire.send(plain_batch(1), lost=True)
    wire.first = 2
    wire.send(plain_batch(2))
    wire.first = 0
    wire.history[1] = plain_batch(7)
    wire.history.append(heartbeat_batch())
    wire.stream.receive_live(live_frames(TOPIC, 3, heartbeat_batch()), wire.now)
    (delivery,) = wire.stream.deliveries()
    wire.report(delivery, agrees=False)
    wire.settle(agrees=True)
    wire.send(plain_batch(4))
    assert wire.stream.trust == Trust.EXACT
    assert (wire.stream.counters.digests_mismatched, wire.stream.counters.resets) == (0, 1)


def test_a_late_report_of_a_mismatch_before_a_match_is_ignored() -> None:
    wire = Wire(raw=True)
    for number in range(3):
        wire.send(plain_batch(number))
    wire.stream.report(wire.batch(2), BatchReport(heartbeat=heartbeat(), digest_matches=True))
    wire.stream.report(wire.batch(1), BatchReport(heartbeat=heartbeat(), digest_matches=False))
    assert wire.stream.trust == Trust.EXACT
    assert (wire.stream.deliveries(), wire.stream.counters.digests_mismatched) == ([], 0)


def test_a_divergence_after_a_disconnect_waits_for_the_next_connection(wire: Wire) -> None:
    """No endpoint can answer before; batches of the new connection were sent after the reset."""
    wire.send(plain_batch(0))
    wire.history.append(heartbeat_batch())
    wire.stream.receive_live(live_frames(TOPIC, 1, heartbeat_batch()), wire.now)
    (delivery,) = wire.stream.deliveries()
    wire.stream.end_connection()
    wire.report(delivery, agrees=False)
    assert wire.stream.deliveries() == []
    wire.stream.begin_connection(1.0)
    assert wire.stream.state is State.VERIFYING
    wire.settle(agrees=True)
    assert len(wire.resets) == 1
    wire.send(plain_batch(2))
    assert wire.stream.trust == Trust.EXACT


def test_a_report_about_an_ended_incarnation_does_not_affect_the_current_one(wire: Wire) -> None:
    wire.send(plain_batch(0))
    wire.send(heartbeat_batch(), agrees=False)
    before = wire.stream.counters.copy()
    wire.stream.report(RawBatch("relay", 0, 0, 1, False, b""), BatchReport(heartbeat=heartbeat("STALE"), digest_matches=True))
    before.heartbeats += 1
    assert wire.stream.counters == before
    assert DegradedReason.DIVERGED in wire.stream.degraded_reasons


# --- the sender's trust in itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sender_trust", "trust", "name"),
    [
        ("CONNECTING", Trust.DEGRADED, "CONNECTING"),
        ("REPLAYING", Trust.DEGRADED, "REPLAYING"),
        ("DEGRADED", Trust.DEGRADED, "DEGRADED"),
        ("STALE", Trust.STALE, "STALE"),
        ("DELIGHTED", Trust.DEGRADED, "DEGRADED"),
    ],
)
def test_the_trust_is_at_most_what_the_sender_reports_of_itself(wire: Wire, sender_trust: str, trust: Trust, name: str) -> None:
    """This holds until the sender reports EXACT. A matching digest shows only that the consumer and the sender have the same
    state."""
    wire.send(heartbeat_batch(trust=sender_trust, reason="its engine is gone"), agrees=True)
    assert wire.stream.trust == trust
    assert wire.stream.trust.reason == f"its sender is {name}: its engine is gone"
    assert wire.stream.degraded_reasons == {DegradedReason.SENDER}
    wire.send(plain_batch(1))
    assert wire.stream.trust == trust
    wire.send(heartbeat_batch(), agrees=True)
    assert wire.stream.trust == Trust.EXACT


def test_control_characters_of_a_senders_reason_are_replaced(wire: Wire) -> None:
    wire.send(heartbeat_batch(trust="STALE", reason="red: \x1b[31m\nEXACT"))
    assert wire.stream.trust.reason == "its sender is STALE: red: ?[31m?EXACT"


def test_own_degraded_reasons_are_reported_in_addition_to_the_senders() -> None:
    wire = Wire(WITHOUT_REPLAY)
    wire.send(heartbeat_batch(trust="STALE"))
    assert wire.stream.trust == Trust.STALE
    assert wire.stream.trust.reason == f"{DegradedReason.NO_REPLAY.value}; its sender is STALE"


def test_the_newest_of_heartbeats_reported_out_of_order_counts() -> None:
    wire = Wire(raw=True)
    for number in range(3):
        wire.send(plain_batch(number))
    wire.stream.report(wire.batch(2), BatchReport(heartbeat=heartbeat()))
    wire.stream.report(wire.batch(1), BatchReport(heartbeat=heartbeat("STALE")))
    assert wire.stream.trust == Trust.EXACT


def test_the_senders_trust_persists_through_a_divergence_but_not_through_its_restart(wire: Wire) -> None:
    wire.send(heartbeat_batch(trust="STALE"), agrees=False)
    assert wire.stream.degraded_reasons == {DegradedReason.DIVERGED, DegradedReason.SENDER, DegradedReason.REPLAY_UNPROVEN}
    wire.history = [plain_batch(100)]
    wire.stream.begin_connection(1.0)
    wire.settle()
    assert wire.resets[-1].startswith("publisher restarted")
    wire.send(plain_batch(101))
    assert wire.stream.trust == Trust.EXACT


def test_a_checkpoint_stores_that_the_sender_was_not_exact() -> None:
    """The sender's own reason is not stored: the next process knows that the sender was not EXACT, and waits for its next
    heartbeat."""
    wire = Wire()
    wire.send(heartbeat_batch(trust="STALE", reason="its engine is gone"))
    checkpoint = Checkpoint.decode(wire.stream.position().checkpoint("relay", 0).encode())
    assert checkpoint.degraded_reasons == {"SENDER": 0}
    wire.stream = DecodingStream(SOURCE)
    wire.stream.restore(checkpoint)
    wire.stream.begin_connection(1.0)
    wire.settle()
    assert wire.stream.trust == Trust.DEGRADED
    assert wire.stream.degraded_reasons == {DegradedReason.SENDER, DegradedReason.REPLAY_UNPROVEN}
    wire.send(heartbeat_batch())
    assert wire.stream.trust == Trust.EXACT


def test_a_checkpoint_stores_a_divergence() -> None:
    wire = Wire()
    wire.send(heartbeat_batch(), agrees=False)
    assert wire.stream.position().checkpoint("relay", 0).degraded_reasons == {"DIVERGED": 0}


# --- the sender's incarnations ---------------------------------------------------------------------------------------------


def test_mixed_incarnations_are_reported_as_a_missed_restart(wire: Wire) -> None:
    """Only the heartbeats show the restart, because the numbers continue."""
    wire.send(heartbeat_batch(incarnation=1))
    wire.send(plain_batch(1))
    wire.history[:2] = [plain_batch(100), plain_batch(101)]
    wire.send(heartbeat_batch(incarnation=2))
    assert wire.resets == ["publisher restarted: it is of another incarnation at number 2 than before"]
    assert [delivery.seq for delivery in wire.out[-3:]] == [0, 1, 2]
    wire.send(plain_batch(3))
    assert wire.stream.trust == Trust.EXACT


def test_alternating_incarnations_cause_a_bounded_number_of_resets(wire: Wire) -> None:
    wire.send(heartbeat_batch(incarnation=1))
    wire.send(heartbeat_batch(incarnation=2))
    assert len(wire.resets) == LIMITS.max_consecutive_resyncs
    assert wire.stream.degraded_reasons == {DegradedReason.IDENTITY, DegradedReason.REPLAY_UNPROVEN}
    wire.send(heartbeat_batch(incarnation=2), agrees=True)
    assert wire.stream.trust == Trust.EXACT


def test_an_unseen_restart_without_replay_causes_a_reset() -> None:
    wire = Wire(WITHOUT_REPLAY)
    wire.send(heartbeat_batch(incarnation=1))
    wire.send(heartbeat_batch(incarnation=2))
    assert len(wire.resets) == 1
    wire.send(plain_batch(2))
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY, DegradedReason.LOST}


# --- a silent sender -------------------------------------------------------------------------------------------------------


def test_a_sender_that_misses_its_heartbeats_is_stale(wire: Wire) -> None:
    """The connection may be half open, or the sender may hang; the stream is STALE until anything arrives."""
    wire.send(heartbeat_batch())
    wire.later(LIMITS.max_missed_heartbeats * INTERVAL - 0.1)
    wire.settle()
    assert wire.stream.trust == Trust.EXACT
    wire.later(0.1)
    wire.settle()
    assert wire.stream.trust == Trust.STALE
    assert wire.stream.trust.reason == "silent: nothing was received for 3 times the heartbeat interval of 5 s"
    assert wire.stream.degraded_reasons == {DegradedReason.SILENT}
    wire.send(plain_batch(1))
    assert wire.stream.trust == Trust.EXACT


def test_the_deadline_is_when_the_sender_counts_as_silent() -> None:
    """Without replay the stream has no other deadline."""
    wire = Wire(WITHOUT_REPLAY)
    assert wire.stream.deadline() is None
    wire.send(heartbeat_batch())
    assert wire.stream.deadline() == LIMITS.max_missed_heartbeats * INTERVAL
    wire.later(LIMITS.max_missed_heartbeats * INTERVAL)
    assert (wire.stream.trust, wire.stream.deadline()) == (Trust.STALE, None)


def test_a_run_of_messages_ends_the_silence() -> None:
    wire = Wire(WITHOUT_REPLAY, raw=True)
    wire.send(heartbeat_batch())
    wire.later(LIMITS.max_missed_heartbeats * INTERVAL)
    assert DegradedReason.SILENT in wire.stream.degraded_reasons
    wire.stream.receive_run([plain_batch(1)], wire.now)
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY}


def test_a_batch_found_by_replay_ends_the_silence(wire: Wire) -> None:
    """The live connection may be dead while the sender still answers requests."""
    wire.send(heartbeat_batch())
    for number in range(4):
        wire.send(heartbeat_batch(), lost=True)
        wire.later(2 * INTERVAL)
        wire.settle()
        assert wire.stream.last_seq == number + 1
        assert DegradedReason.SILENT not in wire.stream.degraded_reasons
    wire.later(LIMITS.max_missed_heartbeats * INTERVAL)
    wire.settle()
    assert wire.stream.trust == Trust.STALE
    wire.send(heartbeat_batch(), lost=True)
    wire.later(LIMITS.max_probe_interval)
    wire.settle()
    assert DegradedReason.SILENT not in wire.stream.degraded_reasons


def test_a_sender_without_heartbeats_never_counts_as_silent(wire: Wire) -> None:
    wire.send(plain_batch(0))
    for _ in range(50):
        wire.later(1_000.0)
        wire.settle()
    assert wire.stream.trust == Trust.EXACT


def test_replayed_and_earlier_heartbeats_promise_nothing_on_a_new_connection(wire: Wire) -> None:
    wire.send(heartbeat_batch(), lost=True)
    wire.send(heartbeat_batch())
    wire.stream.begin_connection(1.0)
    wire.settle()
    wire.later(1_000.0)
    wire.settle()
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}


def test_silence_ends_with_the_connection(wire: Wire) -> None:
    wire.send(heartbeat_batch())
    wire.later(LIMITS.max_missed_heartbeats * INTERVAL)
    wire.stream.end_connection()
    assert wire.stream.degraded_reasons == set()


# --- snapshots of several batches --------------------------------------------------------------------------------------------


def part(number: int, *, is_last: bool = False) -> bytes:
    """Return a part of a snapshot; part 0 is the first one."""
    events: list[KVEvent] = [] if number else [AllBlocksCleared()]
    trust = "EXACT" if is_last else "DEGRADED"
    store = BlockStored([number + 100], None, [number + 100], 1)
    return encode_batch(KVEventBatch(0.0, [*events, store, BlockRemoved([], heartbeat=heartbeat(trust))]))


def request_snapshot(raw: bool, parts: int) -> Wire:
    """Return a stream that misses everything before live batch 13 and has received the first parts of a snapshot, numbers 10
    to 12."""
    wire = Wire(raw=raw)
    trust_replay(wire.stream)
    wire.stream.receive_live(live_frames(TOPIC, 13, plain_batch(13)), wire.now)
    assert wire.stream.request_to_send(wire.now) is not None
    for number in range(parts):
        wire.stream.receive_replay(replay_batch_frames(TOPIC, 10 + number, part(number, is_last=number == 2)), wire.now)
    return wire


def report_deliveries(wire: Wire) -> list[int | str]:
    """Report new deliveries and return their numbers; `R` is a reset, `c` a compacted gap."""
    found: list[int | str] = []
    for delivery in wire.stream.deliveries():
        if isinstance(delivery, Batch | RawBatch):
            found.append(delivery.seq)
            wire.report(delivery, agrees=None)
        else:
            found.append("c" if isinstance(delivery, Gap) and delivery.compacted else "R")
    return found


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("waiting", [range(13, 14), range(10, 14), range(11, 13)], ids=["after it", "all", "within it"])
def test_parts_of_a_snapshot_take_the_place_of_live_batches(raw: bool, waiting: range) -> None:
    """Their numbers are those of live batches that may wait, and the parts are only valid together."""
    wire = Wire(raw=raw)
    trust_replay(wire.stream)
    for seq in waiting:
        wire.stream.receive_live(live_frames(TOPIC, seq, plain_batch(seq)), wire.now)
    assert wire.stream.request_to_send(wire.now) is not None
    sent = [(10 + number, part(number, is_last=number == 2)) for number in range(3)] + [(13, plain_batch(13))]
    for seq, payload in sent:
        wire.stream.receive_replay(replay_batch_frames(TOPIC, seq, payload), wire.now)
    delivered = [each for each in wire.stream.deliveries() if isinstance(each, Batch | RawBatch)]
    assert [(each.seq, each.payload) for each in delivered] == sent


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_truncated_snapshot_is_requested_again(raw: bool, parts: int) -> None:
    """A request after its first number would return only what follows the snapshot, so all of it is requested."""
    wire = request_snapshot(raw, parts)
    wire.stream.receive_replay(END, wire.now)
    while (replay_request := wire.stream.request_to_send(wire.now)) is not None:
        for seq in [10, 11, 12] if replay_request.start < 10 else []:
            payload = part(seq - 10, is_last=seq == 12)
            wire.stream.receive_replay(replay_batch_frames(TOPIC, seq, payload), wire.now)
        wire.stream.receive_replay(replay_batch_frames(TOPIC, 13, plain_batch(13)), wire.now)
        wire.stream.receive_replay(END, wire.now)
    assert report_deliveries(wire) == ["c", *range(10, 10 + parts), "R", "c", 10, 11, 12, 13]
    assert DegradedReason.LOST not in wire.stream.degraded_reasons


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_snapshot_whose_last_parts_never_arrive_is_lost(raw: bool, parts: int) -> None:
    """Replay is silent from then on, and live batches follow the part that arrived: the content of the other parts is lost."""
    wire = request_snapshot(raw, parts)
    while wire.stream.state is not State.FOLLOWING:
        wire.later(LIMITS.replay_timeout)
        wire.stream.request_to_send(wire.now)
    wire.stream.receive_live(live_frames(TOPIC, 14, heartbeat_batch()), wire.now)
    assert report_deliveries(wire)[-1] == 14
    assert (DegradedReason.LOST in wire.stream.degraded_reasons) is (parts < 3)
    wire.stream.receive_live(live_frames(TOPIC, 15, encode_batch(KVEventBatch(0.0, [AllBlocksCleared()]))), wire.now)
    for delivery in wire.stream.deliveries():
        if isinstance(delivery, RawBatch):
            wire.stream.report(delivery, BatchReport(cleared=True))
    assert DegradedReason.LOST not in wire.stream.degraded_reasons
