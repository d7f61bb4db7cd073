"""Heartbeats in a stream: agreement, divergence, the sender's trust, its incarnations, its silence."""

from __future__ import annotations

from typing import Any

import pytest

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
EVERY = 5.0
END = replay_end_frames(with_topic=True)
BAD = (Rejected("unknown-tag", "not a known tag", 0),)


def heartbeat(trust: str = "EXACT", reason: str = "", incarnation: int = 0, every: float = EVERY) -> Heartbeat:
    return Heartbeat(DIGEST, every, trust, reason, incarnation)


def beating(**what: Any) -> bytes:
    """A batch with a heartbeat alone."""
    return encode_batch(KVEventBatch(0.0, [BlockRemoved([], heartbeat=heartbeat(**what))]))


def plain_batch(number: int) -> bytes:
    """A batch without a heartbeat."""
    return encode_batch(KVEventBatch(0.0, [BlockStored([number], None, [number], 1)]))


class Wire:
    """A stream, the sender's history, the clock, and a consumer that compares digests on request."""

    def __init__(self, source: Source = SOURCE, *, raw: bool = False) -> None:
        self.stream: Stream[Any] = Stream(source, decode=None) if raw else Stream(source)
        self.now = 0.0
        self.history: list[bytes] = []
        self.out: list[Any] = []
        self.first = 0
        """The oldest number that the sender still has."""
        self.attested: bool | None = None
        """What every heartbeat's attestation is found to say."""
        self.stream.connected(self.now)
        self.settle()

    def send(self, payload: bytes, *, agrees: bool | None = None, lost: bool = False, attested: bool | None = None) -> None:
        """The next batch, and what the consumer finds after it."""
        self.attested = attested
        self.history.append(payload)
        if not lost:
            self.stream.receive_live(live_frames(TOPIC, len(self.history) - 1, payload), self.now)
            self.settle(agrees)

    def settle(self, agrees: bool | None = None) -> None:
        """Take deliveries and answer requests until nothing comes any more; every heartbeat is found to be `agrees`."""
        while True:
            taken = self.stream.deliveries()
            self.out += taken
            for delivery in taken:
                self.report(delivery, agrees)
            ask = self.stream.request_to_send(self.now)
            if ask is not None:
                for seq in range(max(ask.start, self.first), len(self.history)):
                    self.stream.receive_replay(replay_batch_frames(TOPIC, seq, self.history[seq]), self.now)
                self.stream.receive_replay(END, self.now)
            elif not taken:
                return

    def believe(self) -> None:
        """As if a live batch before all others had been compared with what replay says."""
        self.stream._cross_check.first_live = 0
        self.stream._cross_check.confirm(0)

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
        """As it was delivered in the life at hand."""
        return RawBatch("relay", 0, self.stream.incarnation, seq, False, b"")

    @property
    def resets(self) -> list[str]:
        return [delivery.reason for delivery in self.out if isinstance(delivery, Reset)]


@pytest.fixture(params=[False, True], ids=["decoded", "raw"])
def wire(request: pytest.FixtureRequest) -> Wire:
    """A stream that is connected and EXACT."""
    found = Wire(raw=request.param)
    found.believe()
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
def test_of_several_heartbeats_the_last_counts_wherever_it_stands(events: list[KVEvent], expected: BatchReport | None) -> None:
    """Its digest is of the end of the batch, so its place in the batch says nothing; other events may stand beside it."""
    assert inspect_events(events) == expected


def test_what_could_not_be_read_is_found_too() -> None:
    assert inspect_events([], BAD) == BatchReport(BAD)


# --- agreement -------------------------------------------------------------------------------------------------------------


def test_an_agreement_heals_what_was_lost(wire: Wire) -> None:
    """A lost batch might no longer matter; a digest that equals the sender's proves it."""
    wire.send(plain_batch(0))
    wire.send(plain_batch(1), lost=True)
    wire.first = 2
    wire.send(plain_batch(2))
    assert wire.stream.degraded_reasons == {DegradedReason.LOST}
    wire.send(beating(), agrees=True)
    assert wire.stream.trust == Trust.EXACT
    assert (wire.stream.counters.heartbeats, wire.stream.counters.digests_matched) == (1, 1)


def test_an_agreement_heals_an_identity_in_doubt_but_no_missing_replay() -> None:
    wire = Wire(WITHOUT_REPLAY)
    wire.send(plain_batch(0))
    wire.stream.connected(1.0)
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY, DegradedReason.IDENTITY}
    wire.send(beating(), agrees=True)
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY}


@pytest.mark.parametrize("late", [False, True])
def test_an_agreement_heals_what_could_not_be_read_up_to_its_own_batch(late: bool) -> None:
    """In any order of the reports; events after that batch stay rejected."""
    wire = Wire(raw=True)
    for number in range(5):
        wire.send(plain_batch(number))
    agreement = BatchReport(heartbeat=heartbeat(), digest_matches=True)
    if late:
        wire.stream.report(wire.batch(3), agreement)
    for seq in (1, 3):
        wire.stream.report(wire.batch(seq), BatchReport(BAD))
    if not late:
        assert wire.stream.degraded_reasons == {DegradedReason.REJECTED}
        wire.stream.report(wire.batch(3), agreement)
    assert not wire.stream.degraded_reasons
    wire.stream.report(wire.batch(4), BatchReport(BAD))
    assert wire.stream.degraded_reasons == {DegradedReason.REJECTED}


def test_a_late_report_of_an_agreement_heals_nothing_newer() -> None:
    wire = Wire(WITHOUT_REPLAY, raw=True)
    wire.send(plain_batch(0))
    wire.send(plain_batch(1))
    wire.stream.connected(1.0)
    wire.stream.report(wire.batch(1), BatchReport(heartbeat=heartbeat(), digest_matches=True))
    assert DegradedReason.IDENTITY in wire.stream.degraded_reasons


def test_a_digest_that_is_not_compared_changes_nothing(wire: Wire) -> None:
    """A consumer without an index, or one that has given up blocks."""
    wire.send(beating(), agrees=None)
    assert wire.stream.trust == Trust.EXACT
    assert (wire.stream.counters.heartbeats, wire.stream.counters.digests_matched, wire.stream.counters.digests_mismatched) == (
        1,
        0,
        0,
    )


# --- attestation ------------------------------------------------------------------------------------------------------------


def test_an_attestation_that_agrees_makes_exact_attested(wire: Wire) -> None:
    """EXACT stays EXACT for consumers that compare states; its text and its flag say that the engine's cache is the same."""
    assert (wire.stream.trust, wire.stream.trust.attested) == (Trust.EXACT, False)
    wire.send(beating(), agrees=True, attested=True)
    assert (wire.stream.trust, wire.stream.trust.attested, str(wire.stream.trust)) == (Trust.EXACT, True, "EXACT (attested)")
    wire.send(plain_batch(0))
    assert wire.stream.trust.attested
    assert (wire.stream.counters.attestations_matched, wire.stream.counters.attestations_mismatched) == (1, 0)


def test_an_attestation_that_differs_starts_over_a_bounded_number_of_times(wire: Wire) -> None:
    """A digest that agrees at the same heartbeat ends neither the doubt nor the count: it is of the stream alone."""
    wire.send(plain_batch(0))
    wire.send(beating(), agrees=True, attested=False)
    assert len(wire.resets) == LIMITS.max_consecutive_resyncs
    assert wire.stream.degraded_reasons >= {DegradedReason.UNATTESTED}
    assert DegradedReason.UNATTESTED.value in wire.stream.trust.reason
    wire.send(beating(), agrees=True, attested=False)
    assert len(wire.resets) == LIMITS.max_consecutive_resyncs
    assert wire.stream.trust == Trust.DEGRADED
    wire.send(beating(), agrees=True, attested=True)
    assert wire.stream.trust.attested
    assert wire.stream.degraded_reasons == set()


def test_a_clear_ends_an_attestation_that_differed() -> None:
    """An empty cache and an empty state are the same, but nothing has attested that."""
    wire = Wire(WITHOUT_REPLAY)
    wire.send(beating(), agrees=True, attested=False)
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY, DegradedReason.UNATTESTED}
    wire.send(encode_batch(KVEventBatch(0.0, [AllBlocksCleared()])))
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY}
    assert not wire.stream._ledger.is_attested


def test_an_attestation_heals_nothing_but_its_own_doubt(wire: Wire) -> None:
    """It is of one tier of the engine; what was lost may have been of another."""
    wire.send(plain_batch(0))
    wire.send(plain_batch(1), lost=True)
    wire.first = 2
    wire.send(plain_batch(2))
    wire.send(beating(), attested=True)
    assert wire.stream.degraded_reasons == {DegradedReason.LOST}
    assert not wire.stream.trust.attested


def test_another_life_is_not_attested(wire: Wire) -> None:
    wire.send(beating(), agrees=True, attested=True)
    wire.stream.receive_live(live_frames(TOPIC, 0, plain_batch(9)), wire.now)
    assert not wire.stream._ledger.is_attested


# --- divergence ------------------------------------------------------------------------------------------------------------


def test_a_divergence_is_counted_and_everything_is_asked_for_again(wire: Wire) -> None:
    """The consumer drops its state, the sender sends all that it holds, and the next digest agrees."""
    wire.send(plain_batch(0))
    wire.history.append(beating())
    wire.stream.receive_live(live_frames(TOPIC, 1, beating()), wire.now)
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


def test_a_divergence_that_stays_is_reported_and_the_requests_end(wire: Wire) -> None:
    """Then DEGRADED, until a digest agrees. The replayed heartbeats are compared as any."""
    wire.send(plain_batch(0))
    wire.send(beating(), agrees=False)
    assert len(wire.resets) == LIMITS.max_consecutive_resyncs
    assert wire.stream.trust == Trust.DEGRADED
    assert wire.stream.trust.reason.startswith(DegradedReason.DIVERGED.value)
    wire.send(beating(), agrees=False)
    assert len(wire.resets) == LIMITS.max_consecutive_resyncs
    wire.send(beating(), agrees=True)
    assert wire.stream.trust == Trust.EXACT
    wire.send(beating(), agrees=False)
    assert len(wire.resets) > LIMITS.max_consecutive_resyncs


def test_an_older_agreement_that_is_replayed_is_no_reason_to_ask_again() -> None:
    """Of a history with one digest that is wrong the one before it agrees every time."""
    wire = Wire()
    wire.send(beating(), agrees=True)
    wire.history.append(beating())
    wire.stream.receive_live(live_frames(TOPIC, 1, beating()), wire.now)
    for _ in range(20):
        for delivery in wire.stream.deliveries():
            wire.report(delivery, agrees=getattr(delivery, "seq", 0) == 0)
        ask = wire.stream.request_to_send(wire.now)
        if ask is not None:
            for seq in range(ask.start, 2):
                wire.stream.receive_replay(replay_batch_frames(TOPIC, seq, wire.history[seq]), wire.now)
            wire.stream.receive_replay(END, wire.now)
    assert wire.stream.incarnation == LIMITS.max_consecutive_resyncs
    assert wire.stream.degraded_reasons == {DegradedReason.DIVERGED, DegradedReason.REPLAY_UNPROVEN}


def test_a_clear_ends_a_divergence_as_it_ends_all_doubt_about_what_was_before() -> None:
    wire = Wire(WITHOUT_REPLAY)
    wire.send(beating(), agrees=False)
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY, DegradedReason.DIVERGED}
    wire.send(encode_batch(KVEventBatch(0.0, [AllBlocksCleared()])))
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY}


def test_without_replay_a_divergence_requests_nothing() -> None:
    wire = Wire(WITHOUT_REPLAY)
    wire.send(beating(), agrees=False)
    assert (wire.resets, wire.stream.counters.digests_mismatched) == ([], 1)
    assert wire.stream.trust == Trust.DEGRADED


def test_a_difference_that_is_explained_is_no_divergence_but_ends_as_well(wire: Wire) -> None:
    """After a gap the digest is another one. What is held now can be had all the same, and makes the stream exact."""
    wire.send(plain_batch(0))
    wire.send(plain_batch(1), lost=True)
    wire.first = 2
    wire.send(plain_batch(2))
    wire.first = 0
    wire.history[1] = plain_batch(7)
    wire.history.append(beating())
    wire.stream.receive_live(live_frames(TOPIC, 3, beating()), wire.now)
    (delivery,) = wire.stream.deliveries()
    wire.report(delivery, agrees=False)
    wire.settle(agrees=True)
    wire.send(plain_batch(4))
    assert wire.stream.trust == Trust.EXACT
    assert (wire.stream.counters.digests_mismatched, wire.stream.counters.resets) == (0, 1)


def test_a_divergence_that_a_later_agreement_has_ended_is_old_news() -> None:
    wire = Wire(raw=True)
    for number in range(3):
        wire.send(plain_batch(number))
    wire.stream.report(wire.batch(2), BatchReport(heartbeat=heartbeat(), digest_matches=True))
    wire.stream.report(wire.batch(1), BatchReport(heartbeat=heartbeat(), digest_matches=False))
    assert wire.stream.trust == Trust.EXACT
    assert (wire.stream.deliveries(), wire.stream.counters.digests_mismatched) == ([], 0)


def test_a_divergence_while_the_connection_is_gone_waits_for_it(wire: Wire) -> None:
    """No endpoint can answer; batches on the new connection are from after the restart."""
    wire.send(plain_batch(0))
    wire.history.append(beating())
    wire.stream.receive_live(live_frames(TOPIC, 1, beating()), wire.now)
    (delivery,) = wire.stream.deliveries()
    wire.stream.disconnected()
    wire.report(delivery, agrees=False)
    assert wire.stream.deliveries() == []
    wire.stream.connected(1.0)
    assert wire.stream.state is State.VERIFYING
    wire.settle(agrees=True)
    assert len(wire.resets) == 1
    wire.send(plain_batch(2))
    assert wire.stream.trust == Trust.EXACT


def test_a_report_about_a_life_that_has_ended_says_nothing_of_this_one(wire: Wire) -> None:
    wire.send(plain_batch(0))
    wire.send(beating(), agrees=False)
    before = wire.stream.counters.copy()
    wire.stream.report(RawBatch("relay", 0, 0, 1, False, b""), BatchReport(heartbeat=heartbeat("STALE"), digest_matches=True))
    before.heartbeats += 1
    assert wire.stream.counters == before
    assert DegradedReason.DIVERGED in wire.stream.degraded_reasons


# --- how far the sender trusts itself --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "trust", "name"),
    [
        ("CONNECTING", Trust.DEGRADED, "CONNECTING"),
        ("REPLAYING", Trust.DEGRADED, "REPLAYING"),
        ("DEGRADED", Trust.DEGRADED, "DEGRADED"),
        ("STALE", Trust.STALE, "STALE"),
        ("DELIGHTED", Trust.DEGRADED, "DEGRADED"),
    ],
)
def test_the_sender_is_trusted_no_more_than_it_trusts_itself(wire: Wire, said: str, trust: Trust, name: str) -> None:
    """Until it says EXACT. A digest that agrees says only that consumer and sender are wrong alike."""
    wire.send(beating(trust=said, reason="its engine is gone"), agrees=True)
    assert wire.stream.trust == trust
    assert wire.stream.trust.reason == f"its sender is {name}: its engine is gone"
    assert wire.stream.degraded_reasons == {DegradedReason.SENDER}
    wire.send(plain_batch(1))
    assert wire.stream.trust == trust
    wire.send(beating(), agrees=True)
    assert wire.stream.trust == Trust.EXACT


def test_a_senders_reason_cannot_write_over_a_terminal(wire: Wire) -> None:
    wire.send(beating(trust="STALE", reason="red: \x1b[31m\nEXACT"))
    assert wire.stream.trust.reason == "its sender is STALE: red: ?[31m?EXACT"


def test_own_doubts_are_reported_beside_the_senders() -> None:
    wire = Wire(WITHOUT_REPLAY)
    wire.send(beating(trust="STALE"))
    assert wire.stream.trust == Trust.STALE
    assert wire.stream.trust.reason == f"{DegradedReason.NO_REPLAY.value}; its sender is STALE"


def test_of_heartbeats_reported_out_of_order_the_newest_counts() -> None:
    wire = Wire(raw=True)
    for number in range(3):
        wire.send(plain_batch(number))
    wire.stream.report(wire.batch(2), BatchReport(heartbeat=heartbeat()))
    wire.stream.report(wire.batch(1), BatchReport(heartbeat=heartbeat("STALE")))
    assert wire.stream.trust == Trust.EXACT


def test_what_the_sender_said_of_itself_outlives_a_divergence_but_not_its_life(wire: Wire) -> None:
    wire.send(beating(trust="STALE"), agrees=False)
    assert wire.stream.degraded_reasons == {DegradedReason.DIVERGED, DegradedReason.SENDER, DegradedReason.REPLAY_UNPROVEN}
    wire.history = [plain_batch(100)]
    wire.stream.connected(1.0)
    wire.settle()
    assert wire.resets[-1].startswith("publisher restarted")
    wire.send(plain_batch(101))
    assert wire.stream.trust == Trust.EXACT


def test_what_the_sender_said_of_itself_is_kept_by_a_checkpoint() -> None:
    """Its words are not: a process that goes on knows that it was not trusted, and waits for what it says next."""
    wire = Wire()
    wire.send(beating(trust="STALE", reason="its engine is gone"))
    checkpoint = Checkpoint.decode(wire.stream.position().checkpoint("relay", 0).encode())
    assert checkpoint.degraded_reasons == {"SENDER": 0}
    wire.stream = Stream(SOURCE)
    wire.stream.restore(checkpoint)
    wire.stream.connected(1.0)
    wire.settle()
    assert wire.stream.trust == Trust.DEGRADED
    assert wire.stream.degraded_reasons == {DegradedReason.SENDER, DegradedReason.REPLAY_UNPROVEN}
    wire.send(beating())
    assert wire.stream.trust == Trust.EXACT


def test_a_divergence_is_kept_by_a_checkpoint() -> None:
    wire = Wire()
    wire.send(beating(), agrees=False)
    assert wire.stream.position().checkpoint("relay", 0).degraded_reasons == {"DIVERGED": 0}


# --- its lives -------------------------------------------------------------------------------------------------------------


def test_mixed_incarnations_are_reported_as_a_missed_restart(wire: Wire) -> None:
    """Nothing else shows it: the numbers go on."""
    wire.send(beating(incarnation=1))
    wire.send(plain_batch(1))
    wire.history[:2] = [plain_batch(100), plain_batch(101)]
    wire.send(beating(incarnation=2))
    assert wire.resets == ["publisher restarted: it is of another incarnation at number 2 than before"]
    assert [delivery.seq for delivery in wire.out[-3:]] == [0, 1, 2]
    wire.send(plain_batch(3))
    assert wire.stream.trust == Trust.EXACT


def test_lives_that_take_turns_are_not_followed_for_ever(wire: Wire) -> None:
    wire.send(beating(incarnation=1))
    wire.send(beating(incarnation=2))
    assert len(wire.resets) == LIMITS.max_consecutive_resyncs
    assert wire.stream.degraded_reasons == {DegradedReason.IDENTITY, DegradedReason.REPLAY_UNPROVEN}
    wire.send(beating(incarnation=2), agrees=True)
    assert wire.stream.trust == Trust.EXACT


def test_an_unseen_restart_without_replay_forgets_all_the_same() -> None:
    wire = Wire(WITHOUT_REPLAY)
    wire.send(beating(incarnation=1))
    wire.send(beating(incarnation=2))
    assert len(wire.resets) == 1
    wire.send(plain_batch(2))
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY, DegradedReason.LOST}


# --- its silence -----------------------------------------------------------------------------------------------------------


def test_a_sender_that_promised_to_speak_and_does_not_is_stale(wire: Wire) -> None:
    """The connection may be half open, or the sender hang; STALE lasts until anything arrives."""
    wire.send(beating())
    wire.later(LIMITS.max_missed_heartbeats * EVERY - 0.1)
    wire.settle()
    assert wire.stream.trust == Trust.EXACT
    wire.later(0.1)
    wire.settle()
    assert wire.stream.trust == Trust.STALE
    assert wire.stream.trust.reason == "silent: nothing was received for 3 times the heartbeat interval of 5 s"
    assert wire.stream.degraded_reasons == {DegradedReason.SILENT}
    wire.send(plain_batch(1))
    assert wire.stream.trust == Trust.EXACT


def test_it_is_looked_at_when_it_is_due() -> None:
    """Without replay nothing else ever is."""
    wire = Wire(WITHOUT_REPLAY)
    assert wire.stream.deadline() is None
    wire.send(beating())
    assert wire.stream.deadline() == LIMITS.max_missed_heartbeats * EVERY
    wire.later(LIMITS.max_missed_heartbeats * EVERY)
    assert (wire.stream.trust, wire.stream.deadline()) == (Trust.STALE, None)


def test_a_run_of_messages_ends_the_silence() -> None:
    wire = Wire(WITHOUT_REPLAY, raw=True)
    wire.send(beating())
    wire.later(LIMITS.max_missed_heartbeats * EVERY)
    assert DegradedReason.SILENT in wire.stream.degraded_reasons
    wire.stream.receive_run([plain_batch(1)], wire.now)
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY}


def test_a_batch_found_by_replay_ends_the_silence(wire: Wire) -> None:
    """The live connection may be dead; the replies of the sender arrive all the same."""
    wire.send(beating())
    for number in range(4):
        wire.send(beating(), lost=True)
        wire.later(2 * EVERY)
        wire.settle()
        assert wire.stream.last_seq == number + 1
        assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.later(LIMITS.max_missed_heartbeats * EVERY)
    wire.settle()
    assert wire.stream.trust == Trust.STALE
    wire.send(beating(), lost=True)
    wire.later(LIMITS.max_probe_interval)
    wire.settle()
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}


def test_a_sender_without_heartbeats_may_be_silent_for_ever(wire: Wire) -> None:
    wire.send(plain_batch(0))
    for _ in range(50):
        wire.later(1_000.0)
        wire.settle()
    assert wire.stream.trust == Trust.EXACT


def test_heartbeats_of_before_promise_nothing_on_this_connection(wire: Wire) -> None:
    """Replayed ones, and those of a connection that is gone."""
    wire.send(beating(), lost=True)
    wire.send(beating())
    wire.stream.connected(1.0)
    wire.settle()
    wire.later(1_000.0)
    wire.settle()
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}


def test_silence_ends_with_the_connection(wire: Wire) -> None:
    wire.send(beating())
    wire.later(LIMITS.max_missed_heartbeats * EVERY)
    wire.stream.disconnected()
    assert wire.stream.degraded_reasons == set()


# --- snapshots of several batches --------------------------------------------------------------------------------------------


def part(number: int, *, is_last: bool = False) -> bytes:
    """A part of a snapshot, the first one if its number is 0."""
    events: list[KVEvent] = [] if number else [AllBlocksCleared()]
    trust = "EXACT" if is_last else "DEGRADED"
    store = BlockStored([number + 100], None, [number + 100], 1)
    return encode_batch(KVEventBatch(0.0, [*events, store, BlockRemoved([], heartbeat=heartbeat(trust))]))


def asked_for_a_snapshot(raw: bool, parts: int) -> Wire:
    """A stream that misses what was before the live batch 13, and has got the first parts of a snapshot, numbers 10 to 12."""
    wire = Wire(raw=raw)
    wire.believe()
    wire.stream.receive_live(live_frames(TOPIC, 13, plain_batch(13)), wire.now)
    assert wire.stream.request_to_send(wire.now) is not None
    for number in range(parts):
        wire.stream.receive_replay(replay_batch_frames(TOPIC, 10 + number, part(number, is_last=number == 2)), wire.now)
    return wire


def numbers(wire: Wire) -> list[int | str]:
    """Of the batches that were delivered and are reported now; `R` for a reset, `c` for a gap that is compacted."""
    found: list[int | str] = []
    for delivery in wire.stream.deliveries():
        if isinstance(delivery, Batch | RawBatch):
            found.append(delivery.seq)
            wire.report(delivery, agrees=None)
        else:
            found.append("c" if isinstance(delivery, Gap) and delivery.compacted else "R")
    return found


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("waiting", [range(13, 14), range(10, 14), range(11, 13)], ids=["behind it", "all", "within it"])
def test_parts_of_a_snapshot_take_the_place_of_live_batches(raw: bool, waiting: range) -> None:
    """Their numbers are those of batches that may wait here, and they make sense together only."""
    wire = Wire(raw=raw)
    wire.believe()
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
def test_a_snapshot_that_was_cut_is_requested_again(raw: bool, parts: int) -> None:
    """A request after its first number returns what follows the snapshot; so all of it is requested."""
    wire = asked_for_a_snapshot(raw, parts)
    wire.stream.receive_replay(END, wire.now)
    while (ask := wire.stream.request_to_send(wire.now)) is not None:
        for seq in [10, 11, 12] if ask.start < 10 else []:
            payload = part(seq - 10, is_last=seq == 12)
            wire.stream.receive_replay(replay_batch_frames(TOPIC, seq, payload), wire.now)
        wire.stream.receive_replay(replay_batch_frames(TOPIC, 13, plain_batch(13)), wire.now)
        wire.stream.receive_replay(END, wire.now)
    assert numbers(wire) == ["c", *range(10, 10 + parts), "R", "c", 10, 11, 12, 13]
    assert DegradedReason.LOST not in wire.stream.degraded_reasons


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_snapshot_whose_end_never_comes_is_a_loss(raw: bool, parts: int) -> None:
    """Replay is mute from then on, and live batches go on behind the part that came: what the others had is lost."""
    wire = asked_for_a_snapshot(raw, parts)
    while wire.stream.state is not State.FOLLOWING:
        wire.later(LIMITS.replay_timeout)
        wire.stream.request_to_send(wire.now)
    wire.stream.receive_live(live_frames(TOPIC, 14, beating()), wire.now)
    assert numbers(wire)[-1] == 14
    assert (DegradedReason.LOST in wire.stream.degraded_reasons) is (parts < 3)
    wire.stream.receive_live(live_frames(TOPIC, 15, encode_batch(KVEventBatch(0.0, [AllBlocksCleared()]))), wire.now)
    for delivery in wire.stream.deliveries():
        if isinstance(delivery, RawBatch):
            wire.stream.report(delivery, BatchReport(cleared=True))
    assert DegradedReason.LOST not in wire.stream.degraded_reasons
