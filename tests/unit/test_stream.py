"""The rules of delivery one by one, each with the smallest sequence of messages that shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

import paths
from decoding_stream import DecodingStream, trust_replay
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


def payload(seq: int, publisher: int = 0) -> bytes:
    """Return the payload of batch `seq` of one publisher process; payloads of any two processes differ."""
    return payload_of(publisher, seq, clear=False)


def live(seq: int, publisher: int = 0) -> list[bytes]:
    """Return the frames of a live batch."""
    return live_frames(TOPIC, seq, payload(seq, publisher))


def replayed(seq: int, publisher: int = 0) -> list[bytes]:
    """Return the frames of a replayed batch."""
    return replay_batch_frames(TOPIC, seq, payload(seq, publisher))


END = replay_end_frames(has_topic=True)


class Wire:
    """A stream, its clock, and what it has delivered."""

    def __init__(self, source: Source = SOURCE, limits: StreamLimits = LIMITS) -> None:
        self.stream = DecodingStream(source, limits)
        self.now = 0.0
        self.out: list[Batch | Gap | Reset] = []

    def feed(self, *messages: list[bytes]) -> None:
        for frames in messages:
            self.stream.receive_live(frames, self.now)

    def answer(self, *messages: list[bytes]) -> None:
        for frames in messages:
            self.stream.receive_replay(frames, self.now)

    def next_request(self) -> int | None:
        """Return the start of the replay request to send now, or None."""
        request = self.stream.request_to_send(self.now)
        return None if request is None else request.start

    def later(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds
        self.stream.tick(self.now)

    def advance_to_deadline(self) -> None:
        deadline = self.stream.deadline()
        assert deadline is not None
        self.later(deadline - self.now)

    def confirm(self, publisher: int = 0) -> None:
        """Answer the next request, or continue the open answer, up to the live batch after the replayed ones."""
        start = self.next_request()
        assert self.stream.is_fetching
        assert self.stream.trust == Trust.REPLAYING
        self.answer(*(replayed(seq, publisher) for seq in range(start or 0, self.stream.last_seq + 1)), END)

    def new_deliveries(self) -> list[str]:
        """Return the new deliveries: `b5` is a batch, `r5` a replayed one, `g2-4` a gap, `c2-4` a compacted one, `R1` a
        reset."""
        return [_short(delivery) for delivery in self.stream.deliveries()]


def _short(delivery: Batch | Gap | Reset) -> str:
    if isinstance(delivery, Batch):
        return f"{'r' if delivery.replayed else 'b'}{delivery.seq}"
    if isinstance(delivery, Gap):
        return f"{'c' if delivery.compacted else 'g'}{delivery.first}-{delivery.last}"
    return f"R{delivery.incarnation}"


@pytest.fixture
def wire() -> Wire:
    """Return a connected stream that knows that nothing was published before, and that trusts its replay endpoint."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    assert wire.next_request() == 0
    wire.answer(END)
    trust_replay(wire.stream)
    return wire


def test_history_is_requested_from_zero_on_connect(wire: Wire) -> None:
    """An empty answer to a request from 0 makes an empty stream EXACT."""
    assert wire.stream.trust == Trust.EXACT


def test_live_batches_in_order_are_delivered_at_once(wire: Wire) -> None:
    """Consecutive numbers are delivered without replay, and all fields of a delivery are set."""
    wire.feed(live(0), live(1))
    first, _second = wire.stream.deliveries()
    assert isinstance(first, Batch)
    assert (first.source, first.rank, first.incarnation, first.seq, first.replayed) == ("engine", 3, 0, 0, False)
    assert first.payload == payload(0)
    assert first.events == [BlockStored([0], None, [0], 1)]
    assert wire.stream.trust == Trust.EXACT


def test_a_gap_is_replayed_from_the_first_missing_number_while_later_batches_wait(wire: Wire) -> None:
    """Contract 1, rule 1: no batch is delivered before a missing one with a lower number."""
    wire.feed(live(0), live(3), live(4))
    assert wire.new_deliveries() == ["b0"]
    assert wire.stream.trust == Trust.REPLAYING
    assert wire.stream.waiting == 2
    assert wire.next_request() == 1
    wire.answer(replayed(1), replayed(2))
    assert wire.new_deliveries() == ["r1", "r2", "b3", "b4"]
    wire.confirm()
    assert wire.stream.trust == Trust.EXACT


def test_an_end_marker_does_not_show_that_a_reply_is_complete(wire: Wire) -> None:
    """Rule 2: after a reply with a gap and an end marker, the stream requests again from the newest batch before the gap."""
    wire.feed(live(5))
    assert wire.next_request() == 0
    wire.answer(replayed(0), replayed(1), replayed(4), END)
    assert wire.next_request() == 1
    wire.answer(*map(replayed, range(1, 5)))
    assert wire.new_deliveries() == ["r0", "r1", "r2", "r3", "r4", "b5"]


def test_a_number_that_no_answer_holds_becomes_a_gap(wire: Wire) -> None:
    """Rule 2: the number of requests is bounded, all batches around the gap are delivered, and the trust says why it is not
    EXACT."""
    wire.feed(live(0), live(2))
    assert wire.next_request() == 1
    wire.answer(replayed(2), END)
    assert wire.next_request() == 1
    wire.answer(replayed(2), END)
    assert wire.new_deliveries() == ["b0", "g1-1", "b2"]
    assert wire.stream.degraded_reasons == {DegradedReason.LOST}


def test_a_silent_replay_endpoint_is_given_up_in_bounded_time(wire: Wire) -> None:
    """Rule 2: after three requests of two seconds, the gap is declared and live batches are delivered."""
    wire.feed(live(0), live(2))
    assert wire.next_request() == 1
    for _ in range(LIMITS.max_unanswered_requests - 1):
        wire.later(LIMITS.replay_timeout)
        assert wire.next_request() == 1
    wire.later(LIMITS.replay_timeout)
    assert wire.new_deliveries() == ["b0", "g1-1", "b2"]
    assert wire.stream.degraded_reasons == {DegradedReason.LOST, DegradedReason.REPLAY_SILENT}
    wire.feed(live(3))
    assert wire.new_deliveries() == ["b3"]


def test_an_endless_answer_without_anything_new_is_cut_off() -> None:
    """Rule 8: a replay endpoint that repeats itself endlessly costs a bounded number of messages and causes no hang."""
    wire = Wire(limits=StreamLimits(max_duplicate_replies=50))
    wire.stream.begin_connection(0.0)
    sent_requests = 0
    for _ in range(1_000):
        sent_requests += wire.next_request() is not None
        wire.answer(replayed(7))
    assert sent_requests == LIMITS.max_unanswered_requests
    assert wire.stream.trust == Trust.DEGRADED


@pytest.mark.parametrize("answer", [[], [b"error"], [b"", b"", b"\0\0\0\1", b"x"]], ids=["none", "text", "short number"])
def test_a_replay_endpoint_without_answers_is_named_while_live_batches_arrive(wire: Wire, answer: list[bytes]) -> None:
    """Live batches are no answers, so the number of unanswered requests does not begin again with each of them."""
    wire.stream.begin_connection(0.0)
    for seq in range(8):
        wire.feed(live(seq))
        wire.next_request()
        if answer:
            wire.answer(answer)
        wire.later(1.0)
    assert DegradedReason.REPLAY_SILENT in wire.stream.degraded_reasons
    assert wire.stream.trust == Trust.DEGRADED


def test_a_replay_endpoint_that_answers_again_is_trusted_while_live_batches_arrive(wire: Wire) -> None:
    """An engine that stood still and then publishes without a pause is EXACT again. A silent endpoint costs few requests."""
    wire.stream.begin_connection(0.0)
    wire.feed(live(0))
    wire.confirm()
    assert wire.stream.trust == Trust.EXACT
    while DegradedReason.REPLAY_SILENT not in wire.stream.degraded_reasons:
        wire.next_request()
        wire.later(1.0)
    requests = []
    for seq in range(1, 600):
        wire.feed(live(seq))
        if (start := wire.next_request()) is not None:
            requests.append(start)
            if seq > 500:
                wire.answer(*(replayed(known) for known in range(start, seq + 1)), END)
        wire.later(0.5)
    assert 6 <= len(requests) <= 36
    assert wire.stream.trust == Trust.EXACT


def test_an_endless_answer_that_begins_with_the_fingerprint_is_cut_off() -> None:
    """Rule 8: each answer repeats the batch that identifies the publisher and nothing else, so the number of requests is
    bounded."""
    wire = Wire(limits=StreamLimits(max_duplicate_replies=50))
    wire.stream.begin_connection(0.0)
    sent_requests = 0
    for _ in range(1_000):
        sent_requests += wire.next_request() is not None
        wire.answer(replayed(0))
    assert wire.new_deliveries() == ["r0"]
    assert sent_requests == 1 + LIMITS.max_unanswered_requests
    assert wire.stream.trust == Trust.DEGRADED


def test_answers_that_end_after_the_fingerprint_are_given_up(wire: Wire) -> None:
    """Rule 2: attempts are bounded, although each of them brings the batch that identifies the publisher."""
    wire.stream.begin_connection(0.0)
    assert wire.next_request() == 0
    wire.answer(replayed(0))
    for _ in range(LIMITS.max_unanswered_requests):
        wire.later(LIMITS.reply_idle_timeout)
        assert wire.next_request() == 0
        wire.answer(replayed(0))
    wire.later(LIMITS.reply_idle_timeout)
    assert wire.next_request() is None
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
    """Rule 3: replies with a topic, without one, and with a bare end marker are decoded."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    assert wire.next_request() == 0
    wire.answer(batch(0), batch(1), end)
    assert wire.next_request() == 1
    wire.answer(batch(1), end)
    assert wire.new_deliveries() == ["r0", "r1"]
    wire.feed(live(2))
    assert wire.next_request() == 1
    wire.answer(batch(1), batch(2), end)
    assert wire.stream.trust == Trust.EXACT


@pytest.mark.parametrize("replay", [True, False])
def test_publishers_of_mooncake_have_no_number_0(replay: bool) -> None:
    """They number their batches from 1. Of any other publisher, number 0 can be lost, and trust says only that."""
    for is_mooncake in (True, False):
        wire = Wire(SOURCE if replay else Source("tcp://h:1", name="a"))
        event = {"event_id": 1, "event_type": "stored", "seq_hashes": [7]} if is_mooncake else BlockStored([7], None, [], 0)
        payloads = [msgspec.msgpack.encode([seq, [event], 0]) for seq in (1, 2, 3)]
        wire.stream.begin_connection(0.0)
        if replay:
            for _ in range(1 if is_mooncake else 2):
                assert wire.next_request() == 0
                wire.answer(*(replay_batch_frames(TOPIC, seq, payloads[seq - 1]) for seq in (1, 2)), END)
            assert wire.next_request() == 2
            wire.answer(replay_batch_frames(TOPIC, 2, payloads[1]), END)
        else:
            wire.feed(*(live_frames(TOPIC, seq, payloads[seq - 1]) for seq in (1, 2)))
        kind = "r" if replay else "b"
        assert wire.new_deliveries() == ["g0-0"] * (not is_mooncake) + [f"{kind}1", f"{kind}2"]
        assert (DegradedReason.LOST in wire.stream.degraded_reasons) is not is_mooncake
        if replay:
            trust_replay(wire.stream)
            wire.feed(live_frames(TOPIC, 3, payloads[2]))
        assert ("numbers its batches from 1" in wire.stream.trust.reason) is not is_mooncake
        assert "history is truncated" not in wire.stream.trust.reason


def test_a_late_subscriber_delivers_the_replay_buffer_and_reports_what_is_truncated() -> None:
    """Rule 4: truncated history is a gap at the start, and the stream is DEGRADED, not EXACT."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    for _ in range(2):
        assert wire.next_request() == 0
        wire.answer(replayed(7), replayed(8), END)
    assert wire.next_request() == 8
    wire.answer(replayed(8), END)
    assert wire.new_deliveries() == ["g0-6", "r7", "r8"]
    assert wire.stream.trust == Trust.DEGRADED
    assert "truncated" in wire.stream.trust.reason


def test_a_live_number_that_goes_back_is_a_restart(wire: Wire) -> None:
    """Rule 5: the stream delivers a Reset, and then the new incarnation from 0."""
    wire.feed(live(0), live(1), live(2), live(1, publisher=1))
    assert wire.new_deliveries() == ["b0", "b1", "b2", "R1"]
    assert wire.next_request() == 0
    wire.answer(replayed(0, publisher=1))
    assert wire.new_deliveries() == ["r0", "b1"]
    wire.confirm(publisher=1)
    assert wire.stream.incarnation == 1
    assert wire.stream.trust == Trust.EXACT


def test_a_new_incarnation_beyond_the_old_number_is_recognised_after_a_reconnect(wire: Wire) -> None:
    """Rule 5: the last known number is replayed and its payload compared; live frames wait for the result."""
    wire.feed(live(0), live(1))
    wire.stream.end_connection()
    assert wire.stream.trust == Trust.STALE
    wire.stream.begin_connection(2.0)
    assert wire.next_request() == 1
    wire.feed(live(5, publisher=1))
    assert wire.new_deliveries() == ["b0", "b1"]
    wire.answer(replayed(1, publisher=1))
    assert wire.new_deliveries() == ["R1"]
    assert wire.next_request() == 0
    wire.answer(*(replayed(seq, publisher=1) for seq in range(5)))
    assert wire.new_deliveries() == ["r0", "r1", "r2", "r3", "r4", "b5"]


def test_the_same_incarnation_after_a_reconnect_continues_without_a_reset(wire: Wire) -> None:
    """Rule 5: an equal payload confirms the incarnation; the batches missed meanwhile follow in the same answer."""
    wire.feed(live(0), live(1))
    wire.stream.end_connection()
    wire.stream.begin_connection(2.0)
    wire.feed(live(4))
    assert wire.next_request() == 1
    wire.answer(replayed(1), replayed(2), replayed(3))
    assert wire.new_deliveries() == ["b0", "b1", "r2", "r3", "b4"]
    wire.confirm()
    assert wire.stream.trust == Trust.EXACT


def test_a_publisher_that_no_longer_holds_the_number_has_restarted(wire: Wire) -> None:
    """Rule 5: a publisher whose replay buffer ends before a number that was received has restarted."""
    wire.feed(live(0), live(1), live(3))
    assert wire.next_request() == 2
    wire.answer(replayed(2))
    wire.stream.end_connection()
    wire.stream.begin_connection(2.0)
    for _ in range(LIMITS.max_incomplete_answers):
        assert wire.next_request() == 1  # the newest live batch before replayed ones
        wire.answer(END)
    assert wire.new_deliveries() == ["b0", "b1", "r2", "b3", "R1"]


def reconnect_with_silent_replay(wire: Wire) -> None:
    """Deliver one live batch before a reconnect and one after it, while replay does not answer."""
    wire.feed(live(0))
    wire.stream.end_connection()
    wire.stream.begin_connection(2.0)
    wire.feed(live(1))
    wire.now = 2.0
    for _ in range(LIMITS.max_unanswered_requests):
        assert wire.next_request() == 0
        wire.later(LIMITS.replay_timeout)
    assert wire.new_deliveries() == ["b0", "b1"]


def test_an_identity_that_cannot_be_verified_degrades_the_stream(wire: Wire) -> None:
    """Rule 5 with a silent replay endpoint: live batches are delivered after a bounded wait, and the stream is DEGRADED."""
    reconnect_with_silent_replay(wire)
    assert wire.stream.degraded_reasons == {
        DegradedReason.IDENTITY,
        DegradedReason.REPLAY_SILENT,
        DegradedReason.REPLAY_UNPROVEN,
    }


def test_a_later_probe_verifies_the_identity(wire: Wire) -> None:
    """When the replay endpoint answers again, the fingerprint from before the reconnect verifies the incarnation."""
    reconnect_with_silent_replay(wire)
    wire.later(LIMITS.max_probe_interval)
    assert wire.next_request() == 0
    wire.answer(replayed(0), replayed(1), END)
    assert wire.stream.trust == Trust.EXACT, "one of the repeated batches came live over this connection"


def test_a_fingerprint_that_the_publisher_has_evicted_is_no_longer_requested(wire: Wire) -> None:
    """A clear has ended the IDENTITY reason by then: the tail of a quiet stream is requested after a newer batch."""
    reconnect_with_silent_replay(wire)
    wire.feed(live_frames(TOPIC, 2, payload_of(0, 2, clear=True)), live(3))
    wire.later(LIMITS.max_probe_interval)
    for _ in range(LIMITS.max_incomplete_answers):
        assert wire.next_request() == 0
        wire.answer(replayed(3), END)
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.later(LIMITS.max_probe_interval)
    assert wire.next_request() == 3
    wire.answer(replayed(3), replayed(4), END)
    assert wire.new_deliveries() == ["b2", "b3", "r4"]
    wire.feed(live(5))
    while (start := wire.next_request()) is not None:
        wire.answer(*map(replayed, range(start, 6)), END)
    assert wire.stream.trust == Trust.EXACT


def test_an_evicted_fingerprint_leaves_the_identity_unverified(wire: Wire) -> None:
    """Without a clear, a newer batch does not show whether it is of the incarnation before the reconnect."""
    reconnect_with_silent_replay(wire)
    wire.feed(live(2), live(3))
    wire.later(LIMITS.max_probe_interval)
    for _ in range(LIMITS.max_incomplete_answers):
        assert wire.next_request() == 0
        wire.answer(replayed(3), END)
    wire.later(LIMITS.max_probe_interval)
    assert wire.next_request() == 3
    wire.answer(replayed(3), END)
    assert wire.stream.degraded_reasons == {DegradedReason.IDENTITY}
    wire.stream.end_connection()
    wire.stream.begin_connection(wire.now)
    assert wire.next_request() == 3
    wire.answer(replayed(3), END)
    assert wire.stream.degraded_reasons == {DegradedReason.IDENTITY, DegradedReason.REPLAY_UNPROVEN}, (
        "the same batch does not verify it on the next connection either"
    )


def test_a_batch_from_after_the_reconnect_does_not_verify_the_identity(wire: Wire) -> None:
    """Replay does not answer while the publisher restarts: batches of the next incarnation do not verify it."""
    wire.feed(live(0, publisher=1), live(1, publisher=1))
    wire.stream.end_connection()
    wire.stream.begin_connection(2.0)
    for _ in range(LIMITS.max_unanswered_requests):
        assert wire.next_request() == 1
        wire.later(LIMITS.replay_timeout)
    assert DegradedReason.IDENTITY in wire.stream.degraded_reasons
    wire.feed(live(2, publisher=2), live(4, publisher=2))
    for _ in range(5):
        if (start := wire.next_request()) is not None:
            wire.answer(*(replayed(seq, publisher=2) for seq in range(start, 5)), END)
    assert wire.stream.trust != Trust.EXACT
    wire.later(LIMITS.max_probe_interval)
    for _ in range(5):
        if (start := wire.next_request()) is not None:
            wire.answer(*(replayed(seq, publisher=2) for seq in range(start, 5)), END)
    assert publishers_after_last_reset(wire.stream.deliveries()) == {2}


def test_the_tail_is_checked_when_a_stream_is_quiet(wire: Wire) -> None:
    """Rule 6: batches lost at the end are found without another live batch; the next live batch confirms them."""
    wire.feed(live(0))
    assert wire.new_deliveries() == ["b0"]
    wire.later(LIMITS.idle_before_probe)
    assert wire.next_request() == 0
    wire.answer(replayed(0), replayed(1), replayed(2), END)
    assert wire.new_deliveries() == ["r1", "r2"]
    assert wire.next_request() == 2
    wire.answer(replayed(2), END)
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.feed(live(3))
    wire.confirm()
    assert wire.stream.trust == Trust.EXACT


def test_replay_that_alone_brings_batches_is_unconfirmed_until_a_live_batch_agrees(wire: Wire) -> None:
    """The topic is wrong, or the replay endpoint belongs to another engine. One batch can be lost before a subscription."""
    for seq in range(LIMITS.max_conflicts):
        wire.later(LIMITS.max_probe_interval)
        assert DegradedReason.REPLAY_UNCONFIRMED not in wire.stream.degraded_reasons
        start = wire.next_request()
        assert start == max(0, seq - 1)
        wire.answer(*map(replayed, range(start, seq + 1)), END)
        assert wire.next_request() == seq
        wire.answer(replayed(seq), END)
    wire.later(LIMITS.max_probe_interval)
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN, DegradedReason.REPLAY_UNCONFIRMED}
    assert not wire.stream.trust.unproven
    assert wire.next_request() == seq
    wire.answer(replayed(seq), END)
    wire.feed(live(seq + 1))
    assert wire.next_request() == seq
    wire.answer(replayed(seq), replayed(seq + 1), END)
    assert wire.stream.trust == Trust.EXACT


def test_the_tail_after_an_empty_batch_is_found(wire: Wire) -> None:
    """Replay delivers the empty batch and the tail after it; decoding reports that an empty payload is not a batch."""
    wire.feed(live(0))
    wire.later(LIMITS.idle_before_probe)
    assert wire.next_request() == 0
    wire.answer(replayed(0), replay_batch_frames(TOPIC, 1, b""), replayed(2), END)
    assert wire.stream.last_seq == 2
    assert wire.next_request() == 2
    wire.answer(replayed(2), END)
    assert wire.stream.trust == Trust.DEGRADED
    assert DegradedReason.REJECTED in wire.stream.degraded_reasons


def test_without_replay_gaps_are_reported_at_once_and_trust_is_never_exact() -> None:
    """Rule 7: delivery continues, and the trust says what cannot be known."""
    wire = Wire(Source("tcp://engine:5557", name="engine"))
    wire.stream.begin_connection(0.0)
    wire.feed(live(2), live(3), live(6))
    assert wire.new_deliveries() == ["g0-1", "b2", "b3", "g4-5", "b6"]
    assert wire.stream.trust == Trust.DEGRADED
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY, DegradedReason.LOST}
    assert wire.next_request() is None
    assert wire.stream.deadline() is None


def test_without_replay_a_restart_is_still_recognised() -> None:
    """Rules 5 and 7: a number that goes back is a restart in every mode."""
    wire = Wire(Source("tcp://engine:5557", name="engine"))
    wire.stream.begin_connection(0.0)
    wire.feed(live(0), live(1))
    wire.stream.end_connection()
    wire.stream.begin_connection(2.0)
    wire.feed(live(0, publisher=1))
    assert wire.new_deliveries() == ["b0", "b1", "R1", "b0"]


def test_batches_beyond_the_waiting_limit_are_replayed_later() -> None:
    """Rule 8: waiting batches are bounded, are counted when they exceed the limit, and are not lost."""
    wire = Wire(limits=StreamLimits(max_pending_batches=3))
    wire.stream.begin_connection(0.0)
    assert wire.next_request() == 0
    wire.feed(*(live(seq) for seq in range(1, 7)))
    assert wire.stream.waiting == 3
    assert wire.stream.counters.overflowed == 3
    wire.answer(*(replayed(seq) for seq in range(7)))
    wire.answer(END)
    assert wire.new_deliveries() == ["r0", "b1", "b2", "b3", "r4", "r5", "r6"]
    assert DegradedReason.REPLAY_UNPROVEN in wire.stream.degraded_reasons, "only replay has brought the newest batch"
    wire.feed(live(7))
    while (start := wire.next_request()) is not None:
        wire.answer(replayed(start), *map(replayed, range(start + 1, 8)), END)
    assert wire.stream.trust == Trust.EXACT


def test_a_clear_ends_the_losses_before_it(wire: Wire) -> None:
    """The stream is EXACT again after a clear, because nothing older matters."""
    wire.feed(live(0), live(2))
    for _ in range(LIMITS.max_incomplete_answers):
        assert wire.next_request() == 1
        wire.answer(replayed(2), END)
    assert wire.stream.trust == Trust.DEGRADED
    wire.feed(live_frames(TOPIC, 3, payload_of(0, 3, clear=True)))
    assert wire.stream.trust == Trust.EXACT


def test_an_undecodable_batch_is_delivered_empty_and_degrades_the_stream(wire: Wire) -> None:
    """A bad payload affects only its own batch: the number is delivered with the reason, and the trust says that events are
    missing."""
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
def test_malformed_live_messages_are_counted_and_ignored(wire: Wire, frames: list[bytes]) -> None:
    """The next good batch is delivered as if the malformed message had not arrived."""
    wire.feed(live(0), frames, live(1))
    assert wire.new_deliveries() == ["b0", "b1"]
    assert sum(wire.stream.counters.malformed.values()) == 1
    assert wire.stream.trust == Trust.EXACT


def test_malformed_replies_are_counted_and_ignored(wire: Wire) -> None:
    """Good replies between malformed ones are delivered."""
    wire.feed(live(1))
    assert wire.next_request() == 0
    wire.answer([], [b"x"], [b"", b"\0" * 4, b"x"], [b"", b"a", b"b", b"c", b"d"], [b"", b"\xff" * 8, b"x"], replayed(0))
    assert wire.new_deliveries() == ["r0", "b1"]
    assert sum(wire.stream.counters.malformed.values()) == 5


def test_a_replay_endpoint_of_another_topic_is_distrusted(wire: Wire) -> None:
    """An answer with a topic outside the subscription is of another stream."""
    wire.feed(live(0), live(2))
    assert wire.next_request() == 1
    wire.answer(replay_batch_frames(b"other", 1, payload(1)))
    assert wire.new_deliveries() == ["b0", "g1-1", "b2"]
    assert wire.stream.degraded_reasons == {DegradedReason.LOST, DegradedReason.REPLAY_FOREIGN}


@pytest.mark.parametrize("held", [1, 2, 5])
def test_a_replay_endpoint_of_another_stream_that_ends_before_the_live_one_is_detected(held: int) -> None:
    """The endpoint has no number of a live batch. Its newest number can even precede the first live number directly."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    seq, seconds = 2, 0.02
    while DegradedReason.REPLAY_FOREIGN not in wire.stream.degraded_reasons:
        assert wire.now < 10.0
        assert wire.stream.trust != Trust.EXACT
        while (start := wire.next_request()) is not None:
            wire.answer(*(replayed(each, publisher=9) for each in range(start, held)), END)
        wire.feed(live(seq))
        seq += 1
        wire.later(seconds)
    assert wire.stream.trust.reason.startswith("the replay endpoint answers for another stream")


def test_one_answer_that_ends_too_early_is_not_a_conflict() -> None:
    """An engine's socket drops messages beyond its queue, so only two short answers in a row contradict the live stream."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    assert wire.next_request() == 0
    wire.answer(replayed(0), replayed(1), END)
    assert wire.next_request() == 1
    wire.answer(replayed(1), END)
    wire.feed(live(2))
    assert wire.next_request() == 1
    wire.answer(replayed(1), END)
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.later(LIMITS.idle_before_probe)
    wire.feed(live(3))
    assert wire.next_request() == 1
    wire.answer(replayed(1), replayed(2), replayed(3), END)
    assert wire.stream.trust == Trust.EXACT
    assert wire.new_deliveries() == ["r0", "r1", "b2", "b3"]


def test_a_replay_endpoint_of_another_stream_is_detected() -> None:
    """With equal topics, the endpoint is distrusted after a bounded number of conflicts with the live stream."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    seq = 5
    for _ in range(50):
        if (start := wire.next_request()) is not None:
            wire.answer(*(replayed(number, publisher=9) for number in range(start, 10)), END)
        else:
            wire.feed(live(seq))
            seq += 1
    new_deliveries = wire.stream.deliveries()
    resets = [delivery for delivery in new_deliveries if isinstance(delivery, Reset)]
    assert len(resets) == LIMITS.max_conflicts
    after = new_deliveries[new_deliveries.index(resets[-1]) + 1 :]
    batches = [delivery for delivery in after if isinstance(delivery, Batch)]
    assert all(batch.payload == payload(batch.seq) and not batch.replayed for batch in batches)
    assert len(batches) > 20
    assert DegradedReason.REPLAY_FOREIGN in wire.stream.degraded_reasons


def test_a_distrusted_replay_endpoint_is_used_again_and_may_agree() -> None:
    """Old conflicts do not exclude replay forever; one more conflict excludes it for the same time again."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    publisher, seq = 9, 5
    for _ in range(20):
        if (start := wire.next_request()) is not None:
            wire.answer(*(replayed(number, publisher) for number in range(start, 10)), END)
        else:
            wire.feed(live(seq))
            seq += 1
    assert DegradedReason.REPLAY_FOREIGN in wire.stream.degraded_reasons
    for publisher in (9, 0):
        assert wire.next_request() is None
        due = wire.stream.deadline()
        assert due is not None
        wire.later(due - wire.now)
        start = wire.next_request()
        assert start is not None
        wire.answer(*(replayed(number, publisher) for number in range(start, seq)), END)
        trusted = publisher == 0
        assert (DegradedReason.REPLAY_FOREIGN in wire.stream.degraded_reasons) is not trusted
        wire.feed(live(seq))
        seq += 1
    assert DegradedReason.REPLAY_UNCONFIRMED not in wire.stream.degraded_reasons


def publishers_after_last_reset(new_deliveries: list[Batch | Gap | Reset]) -> set[int]:
    """Return the publishers, 1 or 2, of the batches that a consumer holds after it has applied all resets."""
    held: list[bytes] = []
    for delivery in new_deliveries:
        if isinstance(delivery, Reset):
            held.clear()
        elif isinstance(delivery, Batch):
            held.append(delivery.payload)
    return {publisher for publisher in (1, 2) for each in held if each in {payload(seq, publisher) for seq in range(30)}}


def answer_from_next_incarnation(wire: Wire) -> list[Batch | Gap | Reset]:
    """Answer all requests from publisher 2, up to number 19, while live batches are of publisher 1: its old connection is
    still open.

    Return the deliveries. The stream must never be EXACT after it has delivered batches of both publishers.
    """
    new_deliveries: list[Batch | Gap | Reset] = []
    for _ in range(20):
        if (start := wire.next_request()) is None:
            break
        for seq in range(start, 20):
            wire.answer(replayed(seq, publisher=2))
            new_deliveries += wire.stream.deliveries()
            assert wire.stream.trust != Trust.EXACT or len(publishers_after_last_reset(new_deliveries)) <= 1
        wire.answer(END)
        new_deliveries += wire.stream.deliveries()
        assert wire.stream.trust != Trust.EXACT
    return new_deliveries


def test_history_of_another_incarnation_is_not_joined_to_live_batches() -> None:
    """The engine restarts while its first batches are requested, so replay reaches the waiting live batches without a gap."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    wire.feed(*(live(seq, publisher=1) for seq in range(5, 8)))
    new_deliveries = answer_from_next_incarnation(wire)
    assert any(isinstance(delivery, Reset) for delivery in new_deliveries)
    assert publishers_after_last_reset(new_deliveries) <= {2}
    assert wire.stream.trust != Trust.EXACT
    assert wire.stream.counters.conflicts > 0


def test_a_gap_is_not_filled_from_another_incarnation(wire: Wire) -> None:
    """The first number that arrives both live and by replay shows that replay is of another incarnation."""
    wire.feed(*(live(seq, publisher=1) for seq in [*range(5), *range(6, 9)]))
    new_deliveries = answer_from_next_incarnation(wire)
    assert any(isinstance(delivery, Reset) for delivery in new_deliveries)
    assert publishers_after_last_reset(new_deliveries) <= {2}
    assert wire.stream.trust != Trust.EXACT
    assert wire.stream.counters.conflicts > 0


def test_replayed_batches_after_live_ones_are_not_exact_before_a_comparison(wire: Wire) -> None:
    """The live connection is half open, and the next incarnation fills a gap; the reconnect detects that."""
    wire.feed(live(0, publisher=1), live(1, publisher=1), live(3, publisher=1))
    assert wire.next_request() == 2
    wire.answer(*(replayed(seq, publisher=2) for seq in range(2, 9)), END)
    assert wire.stream.trust != Trust.EXACT
    wire.stream.end_connection()
    wire.stream.begin_connection(2.0)
    for _ in range(5):
        if (start := wire.next_request()) is not None:
            wire.answer(*(replayed(seq, publisher=2) for seq in range(start, 9)), END)
    assert publishers_after_last_reset(wire.stream.deliveries()) <= {2}


SNAPSHOT = payload_of(0, 7, clear=True)
"""A snapshot of a kvevents publisher: one payload that represents all batches up to its number."""


@pytest.mark.parametrize("live_first", [True, False])
def test_a_snapshot_and_the_live_batch_of_its_number_do_not_conflict(live_first: bool) -> None:
    """A late subscriber delivers the one that arrives first, and is EXACT without a reset."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    assert wire.next_request() == 0
    answer = replay_batch_frames(TOPIC, 7, SNAPSHOT), replayed(8), END
    if live_first:
        wire.feed(live(7), live(8))
        wire.answer(*answer)
    else:
        wire.answer(*answer)
        wire.feed(live(7), live(8))
    for _ in range(5):
        if wire.next_request() is not None:
            wire.answer(*answer)
    wire.feed(live(9))
    assert wire.new_deliveries() == ["c0-6", "r7", "b8" if live_first else "r8", "b9"]
    for _ in range(3):
        if (start := wire.next_request()) is not None:
            wire.answer(*(replayed(number) for number in range(start, 10)), END)
    assert wire.stream.trust == Trust.EXACT
    assert wire.stream.counters.conflicts == 0


def test_a_snapshot_fills_a_gap_as_the_batch_itself_does(wire: Wire) -> None:
    """For a consumer that has all earlier batches, the snapshot and the batch have the same effect."""
    wire.feed(*map(live, range(7)), live(8))
    assert wire.next_request() == 7
    wire.answer(replay_batch_frames(TOPIC, 7, SNAPSHOT), replayed(8), END)
    assert wire.new_deliveries() == [*(f"b{seq}" for seq in range(7)), "r7", "b8"]
    assert wire.stream.counters.conflicts == 0


def snapshot(seq: int) -> list[bytes]:
    """Return a replay message with a snapshot of everything up to `seq`; snapshots of two numbers differ."""
    return replay_batch_frames(TOPIC, seq, payload_of(0, seq, clear=True))


def test_an_answer_that_begins_with_a_snapshot_ends_the_wait_for_earlier_batches(wire: Wire) -> None:
    """It contains the batches that waited too, so these and the missing ones are one compacted gap, and nothing is lost.

    The state after a waiting batch would lack the missing ones: no heartbeat would match it, and the stream would start over.
    """
    wire.feed(live(0), live(1), live(3), live(5), live(8))
    assert wire.next_request() == 2
    wire.answer(snapshot(6), replayed(7), replayed(8), END)
    assert wire.new_deliveries() == ["b0", "b1", "c2-5", "r6", "r7", "b8"]
    assert wire.stream.counters.requests == 2
    assert DegradedReason.LOST not in wire.stream.degraded_reasons


def test_numbers_that_a_snapshot_represents_are_not_lost() -> None:
    """They have a separate counter; a checkpoint right after them has no degraded reason."""
    stream = Stream(SOURCE, LIMITS)
    before = stream.position()
    stream.begin_connection(0.0)
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
    """The first part begins with a clear; a missing part in the middle is lost."""
    wire.feed(live(0), live(9))
    first = encode_batch(
        KVEventBatch(0.0, [AllBlocksCleared(), BlockRemoved([], heartbeat=Heartbeat("0" * 32, 10.0, "EXACT"))])
    )
    parts = replay_batch_frames(TOPIC, 6, first), replayed(8), replayed(9), END
    for _ in range(4):
        if wire.next_request() is not None:
            wire.answer(*parts)
    assert wire.new_deliveries() == ["b0", "c1-5", "r6", "g7-7", "r8", "b9"]
    counters = wire.stream.counters
    assert (counters.compacted, counters.gaps, counters.lost) == (5, 1, 1)
    assert DegradedReason.LOST in wire.stream.degraded_reasons


def test_numbers_before_a_clear_of_the_engine_itself_are_lost(wire: Wire) -> None:
    """A clear that came live is not a snapshot, although replay repeats it and holds nothing before it."""
    clear = payload_of(0, 3, clear=True)
    wire.feed(live(0), live(1), live_frames(TOPIC, 3, clear))
    for _ in range(2):
        assert wire.next_request() == 2
        wire.answer(replay_batch_frames(TOPIC, 3, clear), END)
    assert wire.new_deliveries() == ["b0", "b1", "g2-2", "b3"]
    assert (wire.stream.counters.compacted, wire.stream.counters.lost) == (0, 1)


def test_snapshots_with_different_numbers_do_not_wait_for_each_other(wire: Wire) -> None:
    """The replay buffer moves on while gaps are open, so each answer holds a snapshot with another number."""
    wire.feed(live(0), *(live(seq) for seq in range(2, 60, 2)))
    for seq in range(30, 40):
        if wire.next_request() is not None:
            wire.answer(snapshot(seq), END)
    wire.new_deliveries()
    assert wire.stream.last_seq >= 30
    assert wire.stream.waiting <= 15


def test_numbers_before_a_live_clear_are_requested_again(wire: Wire) -> None:
    """A clear that came live is an ordinary batch and no snapshot, so the missing number before it is requested twice."""
    clear = payload_of(0, 3, clear=True)
    wire.feed(live(0), live(1), live_frames(TOPIC, 3, clear))
    assert wire.next_request() == 2
    wire.answer(replay_batch_frames(TOPIC, 3, clear), END)
    assert wire.next_request() == 2
    wire.answer(replayed(2), replay_batch_frames(TOPIC, 3, clear), END)
    assert wire.new_deliveries() == ["b0", "b1", "r2", "b3"]


# --- which publisher replay belongs to --------------------------------------------------------------------------------------


def connect_with_history(*history: list[bytes], limits: StreamLimits = LIMITS) -> Wire:
    """Return a connected stream to which replay has sent all of `history`."""
    wire = Wire(limits=limits)
    wire.stream.begin_connection(0.0)
    assert wire.next_request() == 0
    wire.answer(*history, END)
    if history:
        assert wire.next_request() == len(history) - 1
        wire.answer(history[-1], END)
    assert wire.next_request() is None
    return wire


@pytest.mark.parametrize("known", [0, 3])
def test_an_idle_stream_is_not_exact_before_a_live_batch_has_confirmed_its_history(known: int) -> None:
    """Only a live batch shows which publisher the replay endpoint belongs to, even if replay is empty."""
    wire = connect_with_history(*map(replayed, range(known)))
    wire.later(LIMITS.idle_before_probe)
    if wire.next_request() is not None:
        wire.answer(*([replayed(known - 1)] if known else []), END)
    assert wire.stream.trust == Trust.DEGRADED
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.feed(live(known))
    wire.confirm()
    assert wire.stream.trust == Trust.EXACT
    assert wire.stream.counters.resets == 0


@pytest.mark.parametrize("older", [0, 1, 30, 39])
def test_a_live_batch_below_the_replayed_numbers_is_compared_however_old_it_is(older: int) -> None:
    """Replay is of another engine that is ahead: no live batch is dropped as a duplicate because of its number alone."""
    wire = connect_with_history(
        *(replayed(seq, publisher=1) for seq in range(50)), limits=StreamLimits(max_replayed_digests=10)
    )

    def answer() -> None:
        while (start := wire.next_request()) is not None:
            wire.answer(*(replayed(seq, publisher=1) for seq in range(start, 50)), END)
            assert wire.stream.trust != Trust.EXACT

    wire.feed(live(older))
    answer()
    assert (wire.stream.counters.conflicts, wire.stream.counters.resets) == (1, 1)
    for seq in range(older + 1, older + 10):
        wire.feed(live(seq))
        answer()
    assert wire.stream.counters.conflicts == LIMITS.max_conflicts
    assert DegradedReason.REPLAY_FOREIGN in wire.stream.degraded_reasons
    live_batches = [delivery for delivery in wire.stream.deliveries() if isinstance(delivery, Batch) and not delivery.replayed]
    assert [delivery.payload for delivery in live_batches[-3:]] == [payload(seq) for seq in range(older + 7, older + 10)]


def test_replayed_batches_beyond_the_newest_live_one_stay_unconfirmed() -> None:
    """Two engines may be equal up to some number, so agreement about one number confirms no later one."""
    wire = connect_with_history(*map(replayed, range(5)), *(replayed(seq, publisher=1) for seq in range(5, 9)))
    wire.feed(live(3), live(4))
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.feed(live(5))
    assert wire.stream.counters.conflicts == 1
    assert "R1" in wire.new_deliveries()


def test_replay_that_repeats_itself_confirms_nothing() -> None:
    """A waiting batch came by replay too, so the same batch in the next reply does not confirm the live stream."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    assert wire.next_request() == 0
    wire.answer(replayed(0), replayed(1), replayed(3), END)
    while (start := wire.next_request()) is not None:
        wire.answer(*map(replayed, range(start, 4)), END)
    assert wire.new_deliveries() == ["r0", "r1", "r2", "r3"]
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}


def test_a_snapshot_under_the_number_of_a_live_batch_confirms_nothing() -> None:
    """If a publisher stores only a snapshot, its content differs, which neither contradicts nor confirms the live batch.

    Earlier replayed batches can no longer be confirmed, so everything is requested again, but only
    `max_consecutive_resyncs` times.
    """
    wire = connect_with_history(*map(replayed, range(3)))
    for seq in range(3, 20):
        wire.now += LIMITS.max_probe_interval
        wire.feed(live(seq))
        while wire.next_request() is not None:
            wire.answer(snapshot(seq), END)
        assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    assert (wire.stream.counters.resets, wire.stream.counters.conflicts) == (LIMITS.max_consecutive_resyncs, 0)
    assert wire.new_deliveries()[-15:] == [f"b{seq}" for seq in range(5, 20)]
    wire.feed(live_frames(TOPIC, 20, payload_of(0, 20, clear=True)))
    wire.later(LIMITS.max_probe_interval)
    assert wire.next_request() == 20, "after the clear, no replayed batch matters any more"
    wire.answer(replay_batch_frames(TOPIC, 20, payload_of(0, 20, clear=True)), END)
    assert wire.stream.trust == Trust.EXACT


def test_a_publisher_without_replay_buffer_is_not_exact() -> None:
    """`buffer_steps=0`: live numbers show that the publisher has published, so an end marker alone confirms nothing."""
    wire = connect_with_history()
    wire.feed(live(0))
    while wire.next_request() is not None:
        wire.answer(END)
    assert wire.stream.trust == Trust.DEGRADED
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.feed(live(1))
    assert wire.new_deliveries() == ["b0", "b1"]


def test_a_live_heartbeat_with_a_matching_digest_confirms_the_replayed_batches_before_it() -> None:
    """The digest is of the live publisher's state; replayed and older heartbeats confirm nothing."""
    wire = connect_with_history(*map(replayed, range(3)))
    result = BatchReport(heartbeat=Heartbeat("0" * 32, 10.0, "EXACT"), digest_matches=True)
    *_, newest = wire.stream.deliveries()
    assert isinstance(newest, Batch)
    wire.stream.report(newest, result)
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.feed(live(3))
    (delivery,) = wire.stream.deliveries()
    assert isinstance(delivery, Batch)
    wire.stream.report(delivery, result)
    assert wire.stream.trust == Trust.EXACT


def test_an_answer_that_confirms_a_live_batch_does_not_deliver_batches_that_arrive_live() -> None:
    """Nothing is missing, so nothing is repaired: later batches of the engine arrive live."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    assert wire.next_request() == 0
    wire.answer(END)
    wire.feed(live(0))
    assert wire.next_request() == 0
    wire.answer(replayed(0), replayed(1))
    assert not wire.stream.is_fetching
    wire.answer(replayed(2), END)
    wire.feed(live(1), live(2))
    assert wire.new_deliveries() == ["b0", "b1", "b2"]
    counters = wire.stream.counters
    assert (counters.replayed, counters.gaps_repaired, counters.requests, counters.complete) == (0, 0, 2, 2)
    assert wire.stream.trust == Trust.EXACT


def test_requests_that_confirm_are_paced() -> None:
    """Replay no longer holds the number of any live batch: a busy stream requests at growing intervals and is DEGRADED
    meanwhile."""
    wire = connect_with_history(*map(replayed, range(3)))
    sent_requests: list[float] = []
    for seq in range(3, 3 + 6000):
        wire.now += 0.01
        wire.feed(live(seq))
        while wire.next_request() is not None:
            sent_requests.append(wire.now)
            wire.answer(snapshot(seq + 5), END)
            wire.stream.deliveries()
        assert wire.stream.trust != Trust.EXACT
    assert 2 <= len(sent_requests) <= 10 * LIMITS.max_incomplete_answers
    assert wire.stream.counters.resets == LIMITS.max_consecutive_resyncs


def answer_every_request(answer: Callable[[int], list[list[bytes]]], seconds: float) -> tuple[Wire, int]:
    """Answer every request of a stream at once for some seconds. Return the stream and the number of requests."""
    wire, count = Wire(), 0
    wire.stream.begin_connection(0.0)
    while wire.now < seconds:
        while (start := wire.next_request()) is not None:
            count += 1
            wire.answer(*answer(start), END)
        wire.later(0.01)
    return wire, count


def test_requests_are_bounded_if_the_endpoint_ignores_the_requested_number() -> None:
    """The endpoint answers each request with everything that it holds, which is never new."""
    _, count = answer_every_request(lambda _: [replayed(seq) for seq in range(3)], seconds=60.0)
    assert count <= 10


def test_requests_are_bounded_if_each_answer_brings_one_more_batch() -> None:
    """Live batches do not arrive, as with another topic, while the engine publishes: replay must not become a way to poll
    it."""
    limits = LIMITS
    wire, count = answer_every_request(lambda start: [replayed(start), replayed(start + 1)], seconds=60.0)
    assert limits.max_request_burst < count <= limits.max_request_burst + 60.0 / limits.request_interval + 1
    assert wire.stream.last_seq == count
    assert wire.stream.trust == Trust.REPLAYING
    assert "many consecutive replay requests" in wire.stream.trust.reason


def test_a_reconnect_is_unconfirmed_until_a_live_batch_of_the_new_connection_was_compared(wire: Wire) -> None:
    """The live endpoint may lead to another engine by then, while the replay endpoint still leads to the first one."""
    wire.feed(live(0))
    wire.stream.end_connection()
    wire.stream.begin_connection(1.0)
    assert wire.next_request() == 0
    wire.answer(replayed(0), END)
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    wire.feed(live(1, publisher=1))
    assert wire.next_request() == 0
    wire.answer(replayed(0), replayed(1), END)
    assert wire.stream.counters.conflicts == 1


def test_an_exact_checkpoint_does_not_confirm_another_replay_endpoint(wire: Wire) -> None:
    """In the next process, replay is of another engine; or replay is of the same engine and the live stream is of another
    one."""
    wire.feed(live(0), live(1))
    assert wire.stream.trust == Trust.EXACT
    checkpoint = save_checkpoint(wire.stream)
    foreign = resume_wire(checkpoint)
    assert foreign.next_request() == 1
    foreign.answer(replayed(1, publisher=1), replayed(2, publisher=1), END)
    assert foreign.new_deliveries() == ["R1"]
    moved = resume_wire(checkpoint)
    assert moved.next_request() == 1
    moved.answer(replayed(1), replayed(2), replayed(3), END)
    assert moved.next_request() == 3
    moved.answer(replayed(3), END)
    assert moved.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    moved.feed(live(2, publisher=1))
    assert moved.stream.counters.conflicts == 1


def test_the_first_live_batch_after_replayed_history_is_requested_for_comparison(wire: Wire) -> None:
    """Replay and the live stream are compared once per connection, so that a foreign replay endpoint is detected."""
    fresh = Wire()
    fresh.stream.begin_connection(0.0)
    assert fresh.next_request() == 0
    fresh.answer(replayed(0), END)
    assert fresh.next_request() == 0
    fresh.answer(replayed(0), END)
    fresh.feed(live(1))
    assert fresh.next_request() == 0
    fresh.answer(replayed(0), replayed(1), END)
    assert fresh.stream.trust == Trust.EXACT
    fresh.feed(live(2))
    assert fresh.next_request() is None
    assert fresh.new_deliveries() == ["r0", "b1", "b2"]


def test_the_same_live_batch_twice_is_delivered_once(wire: Wire) -> None:
    """A relay that repeats a batch has not restarted."""
    wire.feed(live(0), live(1), live(1), live(2))
    assert wire.new_deliveries() == ["b0", "b1", "b2"]
    assert wire.stream.counters.duplicates == 1


def test_a_live_batch_that_replay_has_already_delivered_is_not_a_restart() -> None:
    """Replay may be faster than the live stream."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    assert wire.next_request() == 0
    wire.answer(replayed(0), replayed(1), replayed(2))
    wire.feed(live(1), live(2), live(3))
    assert wire.new_deliveries() == ["r0", "r1", "r2", "b3"]


def nonzero_counters(wire: Wire) -> dict[str, int]:
    """Return the counters of gaps and replay requests that are not 0, by name."""
    counters_by_name = asdict(wire.stream.counters)
    names = ("gaps", "gaps_repaired", "requests", "complete", "truncated", "unanswered", "conflicts")
    return {name: counters_by_name[name] for name in names if counters_by_name[name]}


def test_history_does_not_count_as_a_repaired_gap() -> None:
    """Batches before the subscriber's start, and the first batches of a new incarnation, do not count as missing."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    wire.feed(live(3))
    assert wire.next_request() == 0
    wire.answer(replayed(0), replayed(1), replayed(2))
    assert nonzero_counters(wire) == {"requests": 1, "complete": 1}
    wire.feed(live(1, publisher=1))
    assert wire.next_request() == 0
    wire.answer(replayed(0, publisher=1))
    assert wire.new_deliveries() == ["r0", "r1", "r2", "b3", "R1", "r0", "b1"]
    assert nonzero_counters(wire) == {"requests": 2, "complete": 2}


def test_each_gap_that_replay_fills_counts_as_repaired_once(wire: Wire) -> None:
    """A gap counts once regardless of its size and of the number of answers. An answer counts as complete if no batch is
    missing after it."""
    wire.feed(live(0), live(4), live(5), live(7))
    assert wire.next_request() == 1
    wire.answer(replayed(1), END)
    assert nonzero_counters(wire) == {"gaps_repaired": 1, "requests": 2, "complete": 1, "truncated": 1}
    assert wire.next_request() == 1
    wire.answer(replayed(1), replayed(2), replayed(3), replayed(6))
    assert wire.new_deliveries() == ["b0", "r1", "r2", "r3", "b4", "b5", "r6", "b7"]
    assert nonzero_counters(wire) == {"gaps_repaired": 2, "requests": 3, "complete": 2, "truncated": 1}


def test_batches_missed_between_two_connections_are_a_repaired_gap(wire: Wire) -> None:
    wire.feed(live(0))
    wire.stream.end_connection()
    wire.stream.begin_connection(1.0)
    assert wire.next_request() == 0
    wire.answer(replayed(0), replayed(1), END)
    assert wire.next_request() == 1
    wire.answer(replayed(1), END)
    assert wire.new_deliveries() == ["b0", "r1"]
    assert nonzero_counters(wire) == {"gaps_repaired": 1, "requests": 3, "complete": 3}


def test_a_partly_repaired_gap_counts_as_a_gap_and_as_repaired(wire: Wire) -> None:
    wire.feed(live(0), live(3))
    assert wire.next_request() == 1
    wire.answer(replayed(1), END)
    assert wire.next_request() == 1
    wire.answer(replayed(1), END)
    assert wire.next_request() == 2, "the first message of an answer is never lost"
    wire.answer(END)
    assert wire.new_deliveries() == ["b0", "r1", "g2-2", "b3"]
    assert nonzero_counters(wire) == {
        "gaps": 1,
        "gaps_repaired": 1,
        "complete": 1,
        "requests": 2 + LIMITS.max_incomplete_answers,
        "truncated": 1 + LIMITS.max_incomplete_answers,
    }


def test_requests_without_an_answer_are_neither_complete_nor_truncated(wire: Wire) -> None:
    wire.feed(live(0), live(2))
    for _ in range(LIMITS.max_unanswered_requests):
        assert wire.next_request() == 1
        wire.later(LIMITS.replay_timeout)
    assert nonzero_counters(wire) == {
        "gaps": 1,
        "complete": 1,
        "requests": 1 + LIMITS.max_unanswered_requests,
        "unanswered": LIMITS.max_unanswered_requests,
    }


def test_frames_before_the_connection_is_announced_wait_for_it() -> None:
    """A frame may be read before the event of its connection; it is neither lost nor delivered out of order."""
    wire = Wire()
    wire.feed(live(1))
    assert wire.stream.trust == Trust.CONNECTING
    wire.stream.begin_connection(0.0)
    assert wire.next_request() == 0
    wire.answer(replayed(0))
    assert wire.new_deliveries() == ["r0", "b1"]


def test_batches_that_waited_when_the_connection_was_lost_are_not_mixed_with_those_of_another_publisher(wire: Wire) -> None:
    """The next incarnation may equal the old one up to the batch that verifies it, and differ in one that waited."""
    wire.feed(live(0), live(1), live(3))
    assert wire.next_request() == 2
    wire.stream.end_connection()
    wire.stream.begin_connection(1.0)
    wire.now = 1.0
    assert wire.next_request() == 1
    wire.answer(replayed(1), replayed(2), replayed(3, 7), END)
    assert [delivery.payload for delivery in wire.stream.deliveries() if isinstance(delivery, Batch)][3:4] == [payload(3, 7)]


# --- batches that the consumer decodes itself -------------------------------------------------------------------------------

BAD = (Rejected("unknown-tag", "not a known tag", 0), Rejected("more", "and more", 1, count=4))


def report(stream: Stream, incarnation: int, seq: int, rejected: Sequence[Rejected] = (), *, cleared: bool = False) -> None:
    """Report what a consumer found in a raw batch that was delivered."""
    batch = RawBatch("engine", 3, incarnation, seq, False, b"")
    stream.report(batch, BatchReport(tuple(rejected), cleared))


class RawWire:
    """A stream that has delivered batches 0 to 3."""

    def __init__(self, source: Source = SOURCE) -> None:
        self.stream = Stream(source)
        self.stream.begin_connection(0.0)
        self.stream.request_to_send(0.0)
        self.stream.receive_replay(END, 0.0)
        self.run(0, 4)
        self.confirm(3)

    def confirm(self, seq: int, publisher: int = 0) -> None:
        """Answer the open request with the live batch to compare."""
        if self.stream.request_to_send(0.0) is not None:
            self.stream.receive_replay(replayed(seq, publisher), 0.0)
            self.stream.receive_replay(END, 0.0)

    def run(self, first: int, last: int) -> None:
        self.stream.receive_run([payload(seq) for seq in range(first, last)], 0.0)

    def lose(self, seq: int) -> None:
        """Lose number `seq` both live and in replay, and deliver the next one."""
        self.stream.receive_live(live(seq + 1), 0.0)
        while self.stream.request_to_send(0.0) is not None:
            self.stream.receive_replay(replayed(seq + 1), 0.0)
            self.stream.receive_replay(END, 0.0)
        assert DegradedReason.LOST in self.stream.degraded_reasons


def test_raw_batches_decode_to_the_same_batches() -> None:
    """They are the same in a run or message by message, live or replayed."""
    raw, decoding = Stream(SOURCE), DecodingStream(SOURCE)
    for stream in (raw, decoding):
        stream.begin_connection(0.0)
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


def test_a_run_is_expected_only_while_the_stream_waits_for_nothing() -> None:
    """`expected_run` returns the next numbers of a healthy stream, and no numbers of a stream that waits for something."""
    fresh = Stream(SOURCE)
    assert not fresh.expected_run(3)
    fresh.begin_connection(0.0)
    assert not fresh.expected_run(3)
    stream = RawWire().stream
    assert stream.expected_run(2) == range(4, 6)
    stream.receive_live(live(6), 0.0)
    assert not stream.expected_run(2)


def test_a_run_after_a_disconnect_waits_until_the_incarnation_is_verified() -> None:
    """Every live batch that is read after a disconnect may be of another incarnation."""
    wire = RawWire()
    wire.stream.deliveries()
    wire.stream.end_connection()
    wire.run(4, 6)
    assert wire.stream.deliveries() == []
    wire.stream.begin_connection(1.0)
    wire.stream.request_to_send(1.0)
    wire.stream.receive_replay(replayed(3), 1.0)
    assert wire.stream.deliveries() == []
    for seq in (4, 5):
        wire.stream.receive_replay(replayed(seq), 1.0)
    assert [batch.seq for batch in wire.stream.deliveries() if isinstance(batch, RawBatch)] == [4, 5]


def test_the_newest_batch_of_a_run_after_replayed_history_is_requested_for_comparison() -> None:
    """`receive_run` does not skip the comparison of replay with the live stream."""
    stream = Stream(SOURCE)
    stream.begin_connection(0.0)
    stream.request_to_send(0.0)
    stream.receive_replay(replayed(0), 0.0)
    stream.receive_replay(END, 0.0)
    stream.request_to_send(0.0)
    stream.receive_replay(replayed(0), 0.0)
    stream.receive_replay(END, 0.0)
    stream.receive_run([payload(1), payload(2)], 0.0)
    request = stream.request_to_send(0.0)
    assert request is not None
    assert request.start == 0
    for seq in range(3):
        assert stream.trust == Trust.REPLAYING
        stream.receive_replay(replayed(seq), 0.0)
    assert stream.trust == Trust.EXACT


def test_events_that_the_consumer_rejects_degrade_the_stream_and_are_counted() -> None:
    """The result is the same as if the stream had decoded the batch."""
    stream = RawWire().stream
    assert stream.trust == Trust.EXACT
    report(stream, 0, 2, BAD)
    assert stream.degraded_reasons == {DegradedReason.REJECTED}
    assert stream.counters.rejected == {"unknown-tag": 1, "more": 4}
    report(stream, 0, 3, [Rejected("bad-timestamp", "nan")])
    assert stream.counters.rejected["bad-timestamp"] == 1


def test_a_late_report_of_a_clear_ends_only_losses_before_the_clear() -> None:
    """A gap after batch 3 is declared before the report that batch 3 is a clear; that gap still counts."""
    wire = RawWire()
    wire.lose(4)
    report(wire.stream, 0, 3, cleared=True)
    assert wire.stream.degraded_reasons == {DegradedReason.LOST}
    report(wire.stream, 0, 5, cleared=True)
    assert wire.stream.trust == Trust.EXACT


def test_an_identity_that_is_unverified_since_the_clear_stays_unverified() -> None:
    """The clear was of the incarnation before the reconnect; the next one may be another."""
    wire = RawWire(Source("tcp://engine:5557", name="engine"))
    wire.stream.end_connection()
    wire.stream.begin_connection(1.0)
    report(wire.stream, 0, 3, cleared=True)
    assert DegradedReason.IDENTITY in wire.stream.degraded_reasons
    wire.run(4, 5)
    report(wire.stream, 0, 4, cleared=True)
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY}


@pytest.mark.parametrize("clear_first", [True, False])
def test_reports_may_come_in_any_order(clear_first: bool) -> None:
    """A rejected batch before the clear has no effect. In the clear's own batch, or after it, it degrades the stream."""
    for unreadable, reasons in ((1, set()), (2, {DegradedReason.REJECTED}), (3, {DegradedReason.REJECTED})):
        stream = RawWire().stream
        if clear_first:
            report(stream, 0, 2, cleared=True)
            report(stream, 0, 0, cleared=True)
        report(stream, 0, unreadable, BAD)
        report(stream, 0, 0, BAD)
        if not clear_first:
            report(stream, 0, 0, cleared=True)
            report(stream, 0, 2, cleared=True)
        assert stream.degraded_reasons == reasons, unreadable


def test_a_report_about_an_ended_incarnation_is_only_counted() -> None:
    """Neither its clears nor its losses affect the new incarnation."""
    wire = RawWire()
    wire.stream.receive_live(live(0, publisher=1), 0.0)
    wire.stream.request_to_send(0.0)
    wire.stream.receive_replay(END, 0.0)
    wire.confirm(0, publisher=1)
    wire.stream.receive_live(live(1, publisher=1), 0.0)
    report(wire.stream, 0, 3, BAD, cleared=True)
    assert wire.stream.incarnation == 1
    assert wire.stream.trust == Trust.EXACT
    assert wire.stream.counters.rejected == {"unknown-tag": 1, "more": 4}
    report(wire.stream, 1, 0, BAD)
    assert wire.stream.degraded_reasons == {DegradedReason.REJECTED}
    report(wire.stream, 1, 1, cleared=True)
    assert wire.stream.trust == Trust.EXACT


def test_a_report_about_a_batch_that_was_never_delivered_is_ignored() -> None:
    """The report can only be about another subscriber's batch."""
    stream = RawWire().stream
    for incarnation, seq in ((0, 4), (1, 0)):
        report(stream, incarnation, seq, BAD, cleared=True)
    assert stream.trust == Trust.EXACT
    assert stream.counters.rejected == {}


# --- streams that continue from a checkpoint --------------------------------------------------------------------------------


def save_checkpoint(stream: Stream) -> Checkpoint:
    """Return the checkpoint of a stream, encoded and decoded again."""
    return Checkpoint.decode(stream.position().checkpoint("engine", 3).encode())


def restore_wire(checkpoint: Checkpoint, source: Source = SOURCE) -> Wire:
    """Return the stream in the next process, not yet connected."""
    wire = Wire(source)
    wire.stream.restore(checkpoint)
    return wire


def resume_wire(checkpoint: Checkpoint, source: Source = SOURCE) -> Wire:
    """Return the stream in the next process, connected."""
    wire = restore_wire(checkpoint, source)
    wire.stream.begin_connection(0.0)
    return wire


@pytest.fixture
def checkpoint(wire: Wire) -> Checkpoint:
    """Return the checkpoint of an EXACT stream that has delivered numbers 0 to 2, all of them live."""
    wire.feed(live(0), live(1), live(2))
    wire.stream.deliveries()
    wire.later(LIMITS.idle_before_probe)
    assert wire.next_request() == 2
    wire.answer(replayed(2), END)
    assert wire.stream.trust == Trust.EXACT
    return save_checkpoint(wire.stream)


def test_a_restored_stream_claims_nothing_before_it_is_connected(checkpoint: Checkpoint) -> None:
    """It is STALE with a reason, without request, timer or delivery; a disconnect before the first connection has no effect."""
    wire = restore_wire(checkpoint)
    wire.stream.end_connection()
    wire.later(LIMITS.max_probe_interval)
    assert wire.stream.trust == Trust.STALE
    assert "not yet connected" in wire.stream.trust.reason
    assert (wire.stream.last_seq, wire.stream.incarnation, wire.stream.deadline()) == (2, 0, None)
    assert wire.next_request() is None
    assert wire.new_deliveries() == []
    assert save_checkpoint(wire.stream) == checkpoint


def test_a_restored_stream_of_the_same_incarnation_continues(checkpoint: Checkpoint) -> None:
    """Replay repeats the fingerprint: there is no reset and no duplicate, and what was missed is delivered; then it is
    EXACT."""
    wire = resume_wire(checkpoint)
    assert wire.stream.trust == Trust.REPLAYING
    assert wire.next_request() == 2
    wire.feed(live(5))
    wire.answer(replayed(2), replayed(3), replayed(4), END)
    assert wire.new_deliveries() == ["r3", "r4", "b5"]
    wire.confirm()
    assert wire.stream.trust == Trust.EXACT
    assert wire.stream.incarnation == 0
    assert wire.stream.counters.reconnects == 0


def test_a_restored_stream_without_new_batches_is_unconfirmed_and_keeps_its_fingerprint(checkpoint: Checkpoint) -> None:
    """The replayed batch is the fingerprint of the next check and of the next checkpoint."""
    wire = resume_wire(checkpoint)
    assert wire.next_request() == 2
    wire.answer(replayed(2), END)
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    assert save_checkpoint(wire.stream) == checkpoint
    wire.later(LIMITS.idle_before_probe)
    assert wire.next_request() == 2
    wire.answer(replayed(2), END)
    wire.feed(live(2))
    wire.stream.end_connection()
    wire.stream.begin_connection(9.0)
    assert wire.next_request() == 2
    wire.answer(replayed(2, publisher=1))
    assert wire.new_deliveries() == ["R1"]


def test_a_restored_stream_of_another_incarnation_is_reset(checkpoint: Checkpoint) -> None:
    """The number has another content, so a Reset with the next incarnation is delivered, and then everything from 0."""
    wire = resume_wire(checkpoint)
    assert wire.next_request() == 2
    wire.feed(live(4, publisher=1))
    wire.answer(replayed(2, publisher=1))
    assert wire.new_deliveries() == ["R1"]
    assert wire.next_request() == 0
    wire.answer(*(replayed(seq, publisher=1) for seq in range(4)))
    assert wire.new_deliveries() == ["r0", "r1", "r2", "r3", "b4"]
    wire.confirm(publisher=1)
    assert wire.stream.trust == Trust.EXACT


@pytest.mark.parametrize("known", [0, 2])
def test_a_publisher_that_does_not_hold_the_fingerprint_has_restarted(checkpoint: Checkpoint, known: int) -> None:
    """It holds fewer batches, so it is a new incarnation. The frames that waited are from the new one and are delivered."""
    wire = resume_wire(checkpoint)
    for _ in range(LIMITS.max_incomplete_answers):
        assert wire.next_request() == 2
        wire.answer(END)
    assert wire.new_deliveries() == ["R1"]
    assert wire.next_request() == 0
    wire.answer(*(replayed(seq, publisher=1) for seq in range(known)))
    wire.feed(live(known, publisher=1))
    assert wire.new_deliveries() == [*(f"r{seq}" for seq in range(known)), f"b{known}"]


def test_a_number_that_is_not_above_the_last_one_resets_a_restored_stream(checkpoint: Checkpoint) -> None:
    """Rule 5 in every mode: every live batch was sent after this process had connected."""
    wire = resume_wire(checkpoint)
    wire.feed(live(2, publisher=1))
    assert wire.new_deliveries() == ["R1"]
    unsupported = resume_wire(checkpoint, Source("tcp://engine:5557", name="engine", rank=3))
    unsupported.feed(live(0, publisher=1))
    assert unsupported.new_deliveries() == ["R1", "b0"]


def test_frames_read_before_a_restored_stream_is_announced_are_of_the_new_connection(
    checkpoint: Checkpoint,
) -> None:
    """They wait until the incarnation is verified, and are delivered after it, whether it is the same or another one."""
    same, other = restore_wire(checkpoint), restore_wire(checkpoint)
    for publisher, wire in enumerate((same, other)):
        wire.feed(live(3, publisher=publisher))
        assert wire.stream.trust == Trust.STALE
        wire.stream.begin_connection(0.0)
        assert wire.next_request() == 2
        wire.answer(replayed(2, publisher=publisher))
    assert same.new_deliveries() == ["b3"]
    assert other.next_request() == 0
    other.answer(*(replayed(seq, publisher=1) for seq in range(3)))
    assert other.new_deliveries() == ["R1", "r0", "r1", "r2", "b3"]


def test_a_silent_replay_endpoint_leaves_the_identity_of_a_restored_stream_unverified(checkpoint: Checkpoint) -> None:
    """As after a reconnect, live batches are delivered after a bounded wait, DEGRADED until the fingerprint is repeated."""
    wire = resume_wire(checkpoint)
    wire.feed(live(3))
    for _ in range(LIMITS.max_unanswered_requests):
        assert wire.next_request() == 2
        wire.later(LIMITS.replay_timeout)
    assert wire.new_deliveries() == ["b3"]
    assert wire.stream.degraded_reasons == {
        DegradedReason.IDENTITY,
        DegradedReason.REPLAY_SILENT,
        DegradedReason.REPLAY_UNPROVEN,
    }
    wire.later(LIMITS.max_probe_interval)
    assert wire.next_request() == 2
    wire.answer(replayed(2), replayed(3), END)
    assert wire.stream.trust == Trust.EXACT


def test_an_unverified_incarnation_is_not_verified_by_its_own_batches(checkpoint: Checkpoint) -> None:
    """A checkpoint stores the fingerprint from before the connection, so an incarnation beyond the old number is detected
    later."""
    wire = resume_wire(checkpoint)
    wire.feed(live(3, publisher=1))
    for _ in range(LIMITS.max_unanswered_requests):
        assert wire.next_request() == 2
        wire.later(LIMITS.replay_timeout)
    assert wire.new_deliveries() == ["b3"]
    again = save_checkpoint(wire.stream)
    assert (again.last_seq, again.degraded_reasons) == (3, {"IDENTITY": 2})
    assert again.fingerprints == (*checkpoint.fingerprints, Fingerprint(3, payload_digest(payload(3, publisher=1)), live=True))
    later = resume_wire(again)
    assert later.next_request() == 2
    later.answer(replayed(2, publisher=1))
    assert later.new_deliveries() == ["R1"]


def test_without_replay_a_restored_stream_continues_degraded(checkpoint: Checkpoint) -> None:
    """Rule 7: nothing can be verified, and the trust says so; its checkpoint is not EXACT in a process with replay either."""
    wire = resume_wire(checkpoint, Source("tcp://engine:5557", name="engine", rank=3))
    wire.feed(live(3), live(5))
    assert wire.new_deliveries() == ["b3", "g4-4", "b5"]
    assert wire.stream.degraded_reasons == {DegradedReason.NO_REPLAY, DegradedReason.IDENTITY, DegradedReason.LOST}
    verified = resume_wire(save_checkpoint(wire.stream))
    assert verified.next_request() == 2
    verified.answer(replayed(2), replayed(3), replayed(4), replayed(5), END)
    assert verified.new_deliveries() == []
    assert verified.stream.degraded_reasons == {DegradedReason.LOST, DegradedReason.REPLAY_UNPROVEN}


def test_degraded_reasons_are_restored_and_end_as_without_a_restart(wire: Wire) -> None:
    """LOST persists through a restart until the next clear ends it; reasons about an endpoint do not persist."""
    wire.feed(live(0), live(2))
    for _ in range(LIMITS.max_unanswered_requests):
        assert wire.next_request() == 1
        wire.later(LIMITS.replay_timeout)
    assert wire.new_deliveries() == ["b0", "g1-1", "b2"]
    assert wire.stream.degraded_reasons == {DegradedReason.LOST, DegradedReason.REPLAY_SILENT}
    again = resume_wire(save_checkpoint(wire.stream))
    assert again.next_request() == 2
    again.answer(replayed(2), END)
    assert again.stream.trust == Trust.DEGRADED
    assert again.stream.degraded_reasons == {DegradedReason.LOST, DegradedReason.REPLAY_UNPROVEN}
    again.feed(live_frames(TOPIC, 3, payload_of(0, 3, clear=True)))
    assert again.next_request() == 3
    again.answer(replay_batch_frames(TOPIC, 3, payload_of(0, 3, clear=True)), END)
    assert again.stream.trust == Trust.EXACT


def test_a_replayed_fingerprint_does_not_confirm_the_replay_endpoint() -> None:
    """The first live batch after it is requested for comparison, in the next process too."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    assert wire.next_request() == 0
    wire.answer(replayed(0), END)
    again = resume_wire(save_checkpoint(wire.stream))
    assert again.next_request() == 0
    again.answer(replayed(0), END)
    again.feed(live(1))
    assert again.next_request() == 0
    again.answer(replayed(0), END)
    assert again.stream.trust != Trust.EXACT


@pytest.mark.parametrize("source", [SOURCE, Source("tcp://engine:5557", name="engine", rank=3)])
def test_without_a_fingerprint_a_restored_stream_begins_with_a_reset(source: Source) -> None:
    """If nothing or only a gap was delivered, an engine that holds more cannot be distinguished from another incarnation."""
    nothing = Stream(source).position().checkpoint("engine", 3)
    for checkpoint in (nothing, Checkpoint("engine", 3, 0, 4, degraded_reasons={"LOST": 4})):
        wire = resume_wire(checkpoint, source)
        wire.feed(live(0))
        assert wire.new_deliveries()[0] == "R1"
        assert not wire.stream.degraded_reasons - {DegradedReason.NO_REPLAY, DegradedReason.REPLAY_UNPROVEN}


def test_a_checkpoint_of_another_stream_is_refused(checkpoint: Checkpoint) -> None:
    """Name and rank must be equal, because numbers of one stream mean nothing in another."""
    with pytest.raises(ConfigError, match="rank 0 from a checkpoint of engine rank 3"):
        Stream(Source("tcp://e:1", name="engine")).restore(checkpoint)


def test_a_checkpoint_is_small_and_reveals_nothing_of_the_prompt(wire: Wire) -> None:
    """The checkpoint stores 32 bytes for a batch of any size."""
    wire.feed(live_frames(TOPIC, 0, b"\x92" + b"secret" * 1_000_000))
    written = save_checkpoint(wire.stream).encode()
    assert len(written) < 300
    assert b"secret" not in written


FINGERPRINT = Fingerprint(5, bytes(32), live=True)


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
        ({"fingerprints": [msgspec.to_builtins(FINGERPRINT)] * 2}, "not in rising order"),
        ({"fingerprints": [msgspec.to_builtins(FINGERPRINT)] * (MAX_FINGERPRINTS + 1)}, "length <= 16"),
        ({"degraded_reasons": {"EVERYTHING": 3}}, "unknown degraded reason 'EVERYTHING'"),
        ({"degraded_reasons": {"NO_REPLAY": 3}}, "unknown degraded reason 'NO_REPLAY'"),
        ({"degraded_reasons": {"LOST": None}}, "got `null`"),
        ({"more": 1}, "unknown field `more`"),
    ],
    ids=str,
)
def test_an_invalid_checkpoint_is_refused_with_an_explanation(checkpoint: object, message: str) -> None:
    """A corrupt or hostile file never becomes a position in a stream."""
    good = Checkpoint("engine", 3, 0, 5, (FINGERPRINT,), degraded_reasons={"LOST": 3})
    whole = {**msgspec.to_builtins(good), **checkpoint} if isinstance(checkpoint, dict) and checkpoint else checkpoint
    written = msgspec.json.encode(whole)
    with pytest.raises(SnapshotError, match=message) as caught:
        Checkpoint.decode(written)
    assert "invalid checkpoint of a stream" in str(caught.value)


@given(st.binary(max_size=200) | st.tuples(st.integers(0, 150), st.binary(max_size=4)))
def test_any_bytes_are_a_checkpoint_or_an_error(noise: bytes | tuple[int, bytes]) -> None:
    """`decode` raises only `SnapshotError`, and what it accepts can be encoded again."""
    if isinstance(noise, tuple):
        good = Checkpoint("engine", 3, 0, 5, (FINGERPRINT,), degraded_reasons={"LOST": 3}).encode()
        noise = good[: noise[0]] + noise[1] + good[noise[0] + len(noise[1]) :]
    try:
        checkpoint = Checkpoint.decode(noise)
    except SnapshotError:
        return
    assert Checkpoint.decode(checkpoint.encode()) == checkpoint


def test_msgspec_encodes_a_checkpoint_in_json_and_messagepack(checkpoint: Checkpoint) -> None:
    """The checkpoint is an element of a list."""
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode([checkpoint]), type=list[Checkpoint]) == [checkpoint]


def test_merging_a_later_checkpoint_combines_the_degraded_reasons_of_both(checkpoint: Checkpoint) -> None:
    """A batch that the state already has does not repair a gap of the later state; a state of another incarnation causes a
    reset."""
    earlier = msgspec.structs.replace(checkpoint, degraded_reasons={"IDENTITY": 1, "LOST": 2})
    later = msgspec.structs.replace(checkpoint, last_seq=9, fingerprints=(), degraded_reasons={"LOST": 7, "REJECTED": 8})
    both = earlier.merge_later(later)
    assert (both.last_seq, both.fingerprints) == (2, checkpoint.fingerprints)
    assert both.degraded_reasons == {"IDENTITY": 1, "LOST": 7, "REJECTED": 8}
    wire = resume_wire(both)
    assert wire.next_request() == 2
    wire.answer(replayed(2), replay_batch_frames(TOPIC, 3, payload_of(0, 3, clear=True)), END)
    assert wire.stream.degraded_reasons == {DegradedReason.LOST, DegradedReason.REJECTED, DegradedReason.REPLAY_UNPROVEN}
    other = resume_wire(checkpoint.merge_later(msgspec.structs.replace(later, incarnation=4)))
    assert other.new_deliveries() == ["R5"]


def test_missing_batches_are_given_up_if_a_distrusted_endpoint_contradicts_the_stream_again() -> None:
    """Replay will not bring them. The stream goes on after a gap, and asks the endpoint again later."""
    wire = Wire(limits=StreamLimits(max_conflicts=1))
    wire.stream.begin_connection(0.0)
    wire.next_request()
    wire.answer(replayed(0, publisher=1))
    wire.feed(live(0))
    assert DegradedReason.REPLAY_FOREIGN in wire.stream.degraded_reasons
    wire.advance_to_deadline()
    wire.next_request()
    wire.feed(live(2))
    wire.next_request()
    wire.answer(replayed(0, publisher=1))
    wire.feed(live(3))
    assert wire.new_deliveries() == ["r0", "R1", "b0", "g1-1", "b2", "b3"]
    assert wire.stream.degraded_reasons >= {DegradedReason.REPLAY_FOREIGN, DegradedReason.LOST}
    assert wire.stream.waiting == 0
    wire.advance_to_deadline()
    assert wire.next_request() is not None


def test_every_state_has_a_transition_and_every_input_and_action_is_used() -> None:
    """Each state can be entered and left, and the table has no unused entry."""
    transitions = [transition for row in TRANSITIONS.values() for transition in row.values()]
    assert all(TRANSITIONS[state] for state in State)
    assert {transition.state for transition in transitions} | {State.RESTORED} == set(State)
    assert {input_ for row in TRANSITIONS.values() for input_ in row} == set(Input)
    assert {transition.action for transition in transitions} == set(Action)


def test_trust_compares_by_state_and_carries_the_reason() -> None:
    """`==` compares the states; the reason is for people."""
    degraded = Trust.DEGRADED.with_reason("batches are lost")
    assert degraded == Trust.DEGRADED
    assert degraded != Trust.EXACT
    assert (degraded != Trust.DEGRADED) is False
    assert hash(degraded) == hash(Trust.DEGRADED)
    assert str(degraded) == "DEGRADED (batches are lost)"
    assert repr(Trust.EXACT) == "<Trust EXACT>"
    with pytest.raises(AttributeError, match="immutable"):
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
def test_an_invalid_source_is_refused_with_an_explanation(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Source(**arguments)  # type: ignore[arg-type]


def test_each_rank_has_the_next_ports_and_the_same_name() -> None:
    """The two ports increase with the rank. The name is the same for all ranks, so that `trust(name, rank)` finds each rank."""
    ranks = Source("tcp://engine:5557", "tcp://engine:5600").ranks(3)
    assert [(each.endpoint, each.replay_endpoint, each.label, each.rank) for each in ranks] == [
        ("tcp://engine:5557", "tcp://engine:5600", "tcp://engine:5557", 0),
        ("tcp://engine:5558", "tcp://engine:5601", "tcp://engine:5557", 1),
        ("tcp://engine:5559", "tcp://engine:5602", "tcp://engine:5557", 2),
    ]


# --- incarnations that are equal up to some number ---------------------------------------------------------------------------


def replayed_with_content(seq: int, content: int) -> list[bytes]:
    """Return a replayed batch `seq` with the payload of batch `content`, as from an incarnation with other numbers."""
    return replay_batch_frames(TOPIC, seq, payload(content))


def reconnect_after_filled_gap() -> Wire:
    """Return a stream that has delivered 0 to 4, of which 3 was replayed, and has reconnected before that was confirmed."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    assert wire.next_request() == 0
    wire.answer(END)
    wire.feed(live(0), live(1), live(2), live(4))
    assert wire.next_request() == 3
    wire.answer(replayed(3))
    assert wire.new_deliveries() == ["b0", "b1", "b2", "r3", "b4"]
    wire.stream.end_connection()
    wire.stream.begin_connection(wire.now)
    assert wire.next_request() == 2, "live, and before what was replayed"
    return wire


def test_an_incarnation_that_is_equal_up_to_the_newest_batch_continues() -> None:
    wire = reconnect_after_filled_gap()
    wire.answer(replayed(2), replayed(3))
    assert wire.stream.trust == Trust.REPLAYING, "the newest batch has not arrived"
    wire.answer(replayed(4), replayed(5), END)
    assert wire.new_deliveries() == ["r5"]


def test_an_incarnation_that_is_equal_only_up_to_an_older_batch_is_another_one() -> None:
    """A relay without a journal that was killed sends the same batches again, with heartbeats at other numbers: some numbers
    keep their content, and after an added or missing heartbeat no number does."""
    wire = reconnect_after_filled_gap()
    wire.answer(replayed(2), replayed_with_content(3, 100), replayed_with_content(4, 3), replayed_with_content(5, 4), END)
    assert wire.new_deliveries() == ["R1"]
    assert wire.next_request() == 0
    assert wire.stream.trust == Trust.REPLAYING


def test_after_an_answer_without_the_newest_batch_the_request_is_repeated() -> None:
    """The request begins with the first fingerprint, because the next answer may come from another publisher."""
    wire = reconnect_after_filled_gap()
    wire.answer(replayed(2), replayed(3), END)
    assert wire.next_request() == 2
    wire.answer(replayed(2), replayed(3), replayed_with_content(4, 3), END)
    assert wire.new_deliveries() == ["R1"]


@pytest.mark.parametrize(("newest", "delivered"), [(4, []), (100, ["R1"])], ids=["the same", "another"])
def test_an_incarnation_that_is_verified_later_must_repeat_both_batches(newest: int, delivered: list[str]) -> None:
    """Replay is silent after the reconnect. When it answers, it must repeat both the requested batch and the newest one."""
    wire = reconnect_after_filled_gap()
    while DegradedReason.IDENTITY not in wire.stream.degraded_reasons:
        wire.advance_to_deadline()
        wire.next_request()
    wire.feed(live(5))
    assert wire.new_deliveries() == ["b5"]
    assert wire.next_request() is None, "the endpoint has just been silent"
    assert DegradedReason.IDENTITY in wire.stream.degraded_reasons
    while (start := wire.next_request()) is None:
        wire.advance_to_deadline()
    assert start == 2
    wire.answer(replayed(2), replayed(3), replayed_with_content(4, newest), replayed(5), END)
    assert wire.new_deliveries() == delivered
    assert DegradedReason.IDENTITY not in wire.stream.degraded_reasons


def reconnect_with_unread_frames() -> Wire:
    """Return a reconnected stream that has delivered 0 to 2; 3 to 6 were read from the lost connection after the disconnect."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    assert wire.next_request() == 0
    wire.answer(END)
    wire.feed(live(0), live(1), live(2))
    wire.stream.end_connection()
    wire.feed(live(3), live(4), live(5), live(6))
    wire.stream.begin_connection(wire.now)
    assert wire.next_request() == 2
    assert wire.new_deliveries() == ["b0", "b1", "b2"]
    return wire


def test_frames_in_quarantine_are_delivered_when_the_answer_has_repeated_them() -> None:
    wire = reconnect_with_unread_frames()
    wire.answer(replayed(2), replayed(3), replayed(4), replayed(5))
    assert wire.new_deliveries() == []
    assert wire.stream.position().checkpoint("engine", 3).last_seq == 2, "a checkpoint does not include waiting frames"
    wire.answer(replayed(6), END)
    assert wire.new_deliveries() == ["b3", "b4", "b5", "b6"]
    assert wire.stream.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}, "all of them are of the earlier connection"


def test_an_answer_may_have_lost_some_of_the_frames_in_quarantine() -> None:
    """The next answer may come from another publisher, so the newest of the requested frames must arrive."""
    wire = reconnect_with_unread_frames()
    wire.answer(replayed(2), replayed(4), END)
    assert wire.next_request() == 2
    wire.answer(replayed(2), replayed(5), replayed(6), END)
    assert wire.new_deliveries() == ["b3", "b4", "b5", "b6"]


@pytest.mark.parametrize("first_different", range(3, 7))
def test_frames_in_quarantine_of_an_incarnation_that_differs_later_are_dropped(first_different: int) -> None:
    """The old and the new incarnation are equal up to some number. No frame of the old incarnation is delivered as a batch of
    the new one."""
    wire = reconnect_with_unread_frames()
    wire.answer(
        *map(replayed, range(2, first_different)),
        replayed_with_content(first_different, 100),
        *(replayed_with_content(seq, seq - 1) for seq in range(first_different + 1, 9)),
        END,
    )
    assert wire.new_deliveries() == ["R1"]
    assert wire.next_request() == 0


def test_if_replay_is_silent_the_newest_frame_in_quarantine_verifies_the_incarnation_later() -> None:
    for newest, delivered in ((6, []), (100, ["R1"])):
        wire = reconnect_with_unread_frames()
        while DegradedReason.IDENTITY not in wire.stream.degraded_reasons:
            wire.advance_to_deadline()
            wire.next_request()
        assert wire.new_deliveries() == ["b3", "b4", "b5", "b6"]
        while (start := wire.next_request()) is None:
            wire.advance_to_deadline()
        assert start == 2
        wire.answer(*map(replayed, range(2, 6)), replayed_with_content(6, newest), END)
        assert wire.new_deliveries() == delivered
        assert DegradedReason.IDENTITY not in wire.stream.degraded_reasons


def payloads_with_marks(marks: set[int], name: int) -> list[bytes]:
    """Return batches 0 to 19, and before some of them a mark of publisher `name`, as a relay inserts heartbeats."""
    payloads: list[bytes] = []
    for content in range(20):
        if content in marks:
            payloads.append(payload(content, publisher=name))
        payloads.append(payload(content))
    return payloads


MARKS = st.sets(st.integers(0, 19), max_size=4)
PLACES = st.sets(st.integers(0, 23), max_size=5)


@given(MARKS, MARKS, st.integers(1, 20), st.integers(0, 20), PLACES, PLACES, st.booleans())
def test_no_batch_is_lost_or_delivered_twice_however_much_two_incarnations_have_in_common(
    old_marks: set[int], new_marks: set[int], read: int, unread: int, missing: set[int], lost: set[int], confirmed: bool
) -> None:
    """Some batches of an incarnation were read, others wait when it ends. The next incarnation sends the same batches with
    other marks, and its replies lose messages. Whatever is delivered as one incarnation holds every batch once and in
    order."""
    old, new = payloads_with_marks(old_marks, 1), payloads_with_marks(new_marks, 2)
    wire = Wire()
    by_incarnation: list[list[bytes]] = [[]]

    def take() -> None:
        for delivery in wire.stream.deliveries():
            if isinstance(delivery, Reset):
                by_incarnation.append([])
            else:
                assert isinstance(delivery, Batch)
                by_incarnation[-1].append(delivery.payload)

    def serve(publisher: list[bytes], lost: set[int]) -> None:
        start = wire.next_request()
        if start is not None:
            sent = [seq for seq in range(start, len(publisher)) if seq == start or seq not in lost]
            wire.answer(*(replay_batch_frames(TOPIC, seq, publisher[seq]) for seq in sent), END)
        take()

    wire.stream.begin_connection(0.0)
    serve([], set())
    for seq in range(read):
        if seq not in missing or seq == read - 1:
            wire.feed(live_frames(TOPIC, seq, old[seq]))
            if confirmed:
                serve(old[: seq + 1], set())
    serve(old[:read], set())
    wire.stream.end_connection()
    wire.feed(*(live_frames(TOPIC, seq, old[seq]) for seq in range(read, min(read + unread, len(old)))))
    wire.stream.begin_connection(0.0)
    for _ in range(40):
        serve(new, lost)
        if not wire.stream.is_fetching:
            wire.advance_to_deadline()
    batches = list(map(payload, range(20)))
    for delivered in by_incarnation:
        of_both = [each for each in delivered if each in batches]
        assert of_both == batches[: len(of_both)]


class Consumer:
    """A consumer and its state, which may continue in another process."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.state: dict[int, bytes] = {}

    def take(self) -> None:
        for delivery in self.wire.stream.deliveries():
            if isinstance(delivery, Reset):
                self.state.clear()
            elif isinstance(delivery, Batch):
                # It skips numbers that it already has, as `Checkpoint.merge_later` requires.
                self.state.setdefault(delivery.seq, delivery.payload)

    def serve_replay(self, publisher: list[bytes]) -> None:
        """Let replay answer until the stream has nothing more to request."""
        for _ in range(60):
            if (start := self.wire.next_request()) is not None:
                self.wire.answer(
                    *(replay_batch_frames(TOPIC, seq, publisher[seq]) for seq in range(start, len(publisher))), END
                )
            self.take()
            if not self.wire.stream.is_fetching:
                self.wire.advance_to_deadline()

    def give_up_replay(self) -> None:
        """Let replay be silent until the stream continues without it."""
        while self.wire.stream.state is not State.FOLLOWING:
            self.wire.next_request()
            self.wire.advance_to_deadline()
        self.take()

    def end_connection(self, how: str, before: Checkpoint) -> None:
        """End the connection, or restart the process: from the current checkpoint, or from `before` with the current state."""
        now = save_checkpoint(self.wire.stream)
        if how.startswith("reconnects"):
            self.wire.stream.end_connection()
        else:
            self.wire = restore_wire(now if how == "restarts" else before.merge_later(now))


def test_after_more_unverified_connections_than_are_remembered_the_identity_stays_unverified() -> None:
    """Each connection needs its own fingerprints; those that are left do not verify all connections, in this process or in
    another."""
    publisher = list(map(payload, range(40)))
    reasons: list[frozenset[DegradedReason]] = []
    for reconnects in (MAX_FINGERPRINTS // 2 - 1, MAX_FINGERPRINTS // 2 + 1):
        for end in ("reconnects", "restarts"):
            consumer = Consumer()
            consumer.wire.stream.begin_connection(0.0)
            consumer.wire.feed(live_frames(TOPIC, 0, publisher[0]))
            consumer.serve_replay(publisher[:1])
            for number in range(reconnects):
                consumer.end_connection(end, save_checkpoint(consumer.wire.stream))
                consumer.wire.stream.begin_connection(consumer.wire.now)
                consumer.wire.feed(*(live_frames(TOPIC, seq, publisher[seq]) for seq in (2 * number + 1, 2 * number + 2)))
                consumer.give_up_replay()
            consumer.end_connection(end, save_checkpoint(consumer.wire.stream))
            consumer.wire.stream.begin_connection(consumer.wire.now)
            consumer.serve_replay(publisher)
            assert list(consumer.state.values()) == publisher
            consumer.wire.feed(live_frames(TOPIC, len(publisher), payload(len(publisher))))
            consumer.serve_replay([*publisher, payload(len(publisher))])
            reasons.append(consumer.wire.stream.degraded_reasons)
            # The next connection verifies the newest batch, but none of those whose fingerprints were dropped.
            consumer.end_connection(end, save_checkpoint(consumer.wire.stream))
            consumer.wire.stream.begin_connection(consumer.wire.now)
            consumer.serve_replay([*publisher, payload(len(publisher))])
            reasons.append(consumer.wire.stream.degraded_reasons - {DegradedReason.REPLAY_UNPROVEN})
    assert reasons == [frozenset()] * 4 + [{DegradedReason.IDENTITY}] * 4


def test_a_checkpoint_between_deliveries_has_the_fingerprints_of_the_batches_taken() -> None:
    """A consumer may stop between batches that became deliverable together, over connections of which none was verified."""
    wire = Wire()
    wire.stream.begin_connection(0.0)
    before = wire.stream.position()
    for seqs in ((0,), (1, 2, 3), (4, 5, 6)):
        wire.stream.end_connection()
        wire.stream.begin_connection(wire.now)
        wire.feed(*map(live, seqs))
        while wire.stream.state is not State.FOLLOWING:
            wire.next_request()
            wire.advance_to_deadline()
    batches, now = wire.stream.deliveries(), wire.stream.position()
    result = [before.after_deliveries(batches[:count], now).checkpoint("engine", 3) for count in range(8)]
    assert [[each.seq for each in checkpoint.fingerprints] for checkpoint in result] == [
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
    connections: list[tuple[set[int], int, str]], last_marks: set[int], verified: bool
) -> None:
    """Replay does not answer on several connections after the first, each of which may be of another incarnation. Whatever
    these have in common, once replay answers again, no EXACT stream has lost a batch or delivered one twice."""
    consumer, seq = Consumer(), 0
    for number, (marks, count, end) in enumerate(connections):
        publisher = payloads_with_marks(marks, number + 1)
        consumer.wire.stream.begin_connection(consumer.wire.now)
        consumer.take()
        before = save_checkpoint(consumer.wire.stream)
        coming = range(seq, max(seq, min(seq + count, len(publisher))))
        consumer.wire.feed(*(live_frames(TOPIC, at, publisher[at]) for at in coming))
        seq = coming.stop
        if number == 0 and verified:
            consumer.serve_replay(publisher[:seq])
        if end != "reconnects at once":
            consumer.give_up_replay()
        consumer.end_connection(end, before)
    publisher = payloads_with_marks(last_marks, len(connections) + 1)
    consumer.wire.stream.begin_connection(consumer.wire.now)
    consumer.serve_replay(publisher)
    assert consumer.wire.stream.trust != Trust.EXACT, "no live batch has come over this connection"
    publisher.append(payload(20))
    consumer.wire.feed(live_frames(TOPIC, len(publisher) - 1, publisher[-1]))
    consumer.serve_replay(publisher)
    if consumer.wire.stream.trust == Trust.EXACT:
        batches = list(map(payload, range(21)))
        assert list(consumer.state) == list(range(len(publisher)))
        assert [each for each in consumer.state.values() if each in batches] == batches


def test_a_live_batch_before_replayed_ones_is_compared_however_late_they_arrive() -> None:
    """Replay and a live batch agree; then an answer that did not begin with a known batch fills a gap below that number.

    The live batches before the gap are of this publisher only if replay agrees with a live batch once more.
    """
    cross_check = CrossCheck()
    cross_check.first_live_seq = 134
    cross_check.confirm(134)
    seen = [cross_check.is_incomplete]
    cross_check.add_replayed(
        Fingerprint.of_batch(133, b"replayed", live=False), Fingerprint.of_batch(124, b"before", live=True)
    )
    seen.append(cross_check.is_incomplete)
    assert cross_check.live_before_replay is not None
    cross_check.confirm(135)
    seen.append(cross_check.is_incomplete)
    assert seen == [False, True, False]
    assert cross_check.live_before_replay is None


def test_answers_that_do_not_repeat_each_other_are_confirmed_by_one_that_repeats_both() -> None:
    """A live batch in the newest answer confirms nothing of the earlier one."""
    cross_check = CrossCheck()
    cross_check.first_live_seq = 0
    for seq in (1, 5):
        cross_check.separate_next_answer()
        cross_check.add_replayed(Fingerprint.of_batch(seq, b"", live=False), None)
    assert [each.seq for each in cross_check.all_unconfirmed] == [1, 5]
    cross_check.confirm(6)
    assert [each.seq for each in cross_check.all_unconfirmed] == [1]
    cross_check.confirm(7)
    assert cross_check.is_incomplete
    cross_check.record_repeated(Fingerprint.of_batch(1, b"", live=False))
    cross_check.confirm(8)
    assert not cross_check.is_incomplete


def test_no_more_answers_are_separate_than_one_request_can_repeat() -> None:
    """Beyond that limit, the next answer must begin with the batch of the earlier one."""
    cross_check = CrossCheck()
    for seq in range(2 * MAX_FINGERPRINTS):
        cross_check.separate_next_answer()
        cross_check.add_replayed(Fingerprint.of_batch(seq, b"", live=False), None)
    assert len(cross_check.all_unconfirmed) == MAX_FINGERPRINTS + 1
    cross_check.first_live_seq = 0
    cross_check.match_digest(2 * MAX_FINGERPRINTS)
    assert not cross_check.is_incomplete


def test_one_answer_of_another_engine_is_detected_although_later_ones_are_right(wire: Wire) -> None:
    """If several engines share an address, later agreement of replay with the live stream does not show which engine filled
    a gap."""
    wire.feed(live(0), live(2))
    assert wire.next_request() == 1
    wire.answer(replayed(1, publisher=7), END)
    assert wire.new_deliveries() == ["b0", "r1", "b2"]
    while (start := wire.next_request()) is not None:
        assert wire.stream.trust == Trust.REPLAYING
        wire.answer(*(replayed(seq) for seq in range(start, 3)), END)
    assert wire.stream.counters.conflicts == 1
    assert wire.new_deliveries() == ["R1", "r0", "r1", "r2"]
    assert wire.stream.trust != Trust.EXACT


def test_one_answer_fills_a_gap_and_confirms_its_publisher(wire: Wire) -> None:
    """The answer holds the live batch after the gap as well, so no second request is needed."""
    wire.feed(live(0), live(2), live(3))
    assert wire.next_request() == 1
    wire.answer(replayed(1))
    assert wire.new_deliveries() == ["b0", "r1", "b2", "b3"]
    assert wire.stream.trust == Trust.REPLAYING
    wire.answer(replayed(2))
    assert wire.stream.trust == Trust.EXACT
    assert not wire.stream.is_fetching


def test_an_unconfirmed_answer_that_replay_has_evicted_causes_a_reset(wire: Wire) -> None:
    """Its batches cannot be repeated any more and may be another engine's, so everything is delivered again."""
    wire.feed(live(0), live(2))
    assert wire.next_request() == 1
    wire.answer(replayed(1), END)
    assert wire.new_deliveries() == ["b0", "r1", "b2"]
    for _ in range(LIMITS.max_incomplete_answers):
        assert wire.next_request() == 1
        wire.answer(replayed(2), END)
    assert wire.new_deliveries() == ["R1"]
    while wire.next_request() is not None:
        wire.answer(replayed(2), END)
    assert wire.new_deliveries() == ["g0-1", "r2"]


def test_after_everything_was_requested_again_the_next_live_batch_is_compared_at_once(wire: Wire) -> None:
    """A small replay buffer moves on: its batches are confirmed now, or they have been evicted by the next check."""
    wire.feed(live(0), live(2))
    assert wire.next_request() == 1
    wire.answer(replayed(1), END)
    for _ in range(LIMITS.max_incomplete_answers):
        assert wire.next_request() == 1
        wire.answer(replayed(2), END)
    assert wire.next_request() == 0
    wire.answer(replayed(2), replayed(3), END)
    while (start := wire.next_request()) is not None:
        wire.answer(*(replayed(seq) for seq in range(max(start, 2), 4)), END)
    wire.feed(live(4))
    assert wire.next_request() == 3, "at once"
    wire.answer(replayed(3), replayed(4), END)
    assert wire.stream.degraded_reasons == {DegradedReason.LOST}


# --- limits


def test_an_answer_that_pauses_has_ended(wire: Wire) -> None:
    """`reply_idle_timeout` runs from the last message of an answer, `replay_timeout` from the request; both are counted."""
    wire.feed(live(0), live(3))
    assert wire.next_request() == 1
    wire.answer(replayed(1))
    assert wire.stream.deadline() == wire.now + LIMITS.reply_idle_timeout
    wire.later(LIMITS.reply_idle_timeout)
    assert wire.stream.counters.unanswered == 1
    assert wire.next_request() == 1
    assert wire.stream.deadline() == wire.now + LIMITS.replay_timeout


def test_a_distrusted_replay_endpoint_is_used_again_after_the_cooldown(wire: Wire) -> None:
    """A request is sent `distrust_cooldown` after its last conflict and not before; then its answers must be confirmed."""
    wire.feed(live(0), live(2))
    assert wire.next_request() == 1
    wire.answer([b"", b"other-topic", (1).to_bytes(8, "big"), payload(1)])
    assert DegradedReason.REPLAY_FOREIGN in wire.stream.degraded_reasons
    assert wire.new_deliveries() == ["b0", "g1-1", "b2"]
    assert wire.stream.deadline() == wire.now + LIMITS.distrust_cooldown
    wire.later(LIMITS.distrust_cooldown - 0.1)
    assert wire.next_request() is None
    wire.later(0.1)
    assert wire.next_request() == 2
    assert DegradedReason.REPLAY_FOREIGN not in wire.stream.degraded_reasons
    assert DegradedReason.REPLAY_UNCONFIRMED in wire.stream.degraded_reasons


TEST_OF_LIMIT = {
    "max_pending_batches": "test_batches_beyond_the_waiting_limit_are_replayed_later",
    "max_pending_bytes": "test_stream_sequencer.py",
    "replay_timeout": "test_a_silent_replay_endpoint_is_given_up_in_bounded_time",
    "reply_idle_timeout": "test_an_answer_that_pauses_has_ended",
    "max_duplicate_replies": "test_an_endless_answer_without_anything_new_is_cut_off",
    "max_unanswered_requests": "test_requests_without_an_answer_are_neither_complete_nor_truncated",
    "max_incomplete_answers": "test_a_partly_repaired_gap_counts_as_a_gap_and_as_repaired",
    "max_request_burst": "test_requests_are_bounded_if_each_answer_brings_one_more_batch",
    "request_interval": "test_requests_are_bounded_if_each_answer_brings_one_more_batch",
    "idle_before_probe": "test_the_tail_is_checked_when_a_stream_is_quiet",
    "max_probe_interval": "test_a_later_probe_verifies_the_identity",
    "max_conflicts": "test_a_replay_endpoint_of_another_stream_is_detected",
    "distrust_cooldown": "test_a_distrusted_replay_endpoint_is_used_again_after_the_cooldown",
    "max_replayed_digests": "test_stream_sequencer.py",
    "max_missed_heartbeats": "test_stream_heartbeats.py",
    "max_unread": "test_fake_transport.py",
    "max_total_pending_bytes": "test_fake_transport.py",
    "max_consecutive_resyncs": "test_stream_heartbeats.py",
}
"""The test or the module that reaches each limit."""


def test_every_limit_is_reached_by_a_test() -> None:
    """Rule 8: this fails if a limit is added that no test reaches."""
    assert TEST_OF_LIMIT.keys() == {*StreamLimits.__struct_fields__}
    known = set(globals()) | {path.name for path in paths.TESTS.rglob("test_*.py")}
    assert set(TEST_OF_LIMIT.values()) <= known


def test_one_restart_is_not_two_publishers(wire: Wire) -> None:
    """Neither is one of which the first batches are lost."""
    for first in (0, 3, 2):
        wire.feed(*(live(seq, first) for seq in range(first, 70 + first)))
        assert DegradedReason.SHARED not in wire.stream.degraded_reasons


def test_numbers_that_go_back_again_and_again_are_of_two_publishers(wire: Wire) -> None:
    """The sentence says so, until the next connection."""
    for seq in range(10, 16):
        wire.feed(live(seq, 0), live(seq - 5, 1))
    assert DegradedReason.SHARED in wire.stream.degraded_reasons
    wire.stream.end_connection()
    wire.stream.begin_connection(2.0)
    assert DegradedReason.SHARED not in wire.stream.degraded_reasons
