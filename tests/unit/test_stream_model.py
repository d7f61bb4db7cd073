"""The stream compared with a model network: order and trust are right through lost messages, disconnects, restarts and
truncation."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decoding_stream import DecodingStream
from kvevents.stream import Batch, DegradedReason, RawBatch, Reset, Source, Stream, StreamLimits, Trust
from kvevents.wire import live_frames, replay_batch_frames, replay_end_frames
from kvevents.wire.framing import encode_seq
from network_model import TOPIC, Claim, Network, Publisher, StreamPair, payload_of

LIMITS = StreamLimits(max_pending_batches=40, max_replayed_digests=8)
KINDS = st.sampled_from(["sent", "sent", "sent", "dropped", "burnt", "clear", "unreadable", "unreadable clear"])
WORDS: st.SearchStrategy[Claim] = st.sampled_from(["EXACT", "EXACT", "EXACT", "lie", "DEGRADED", "STALE"])


class StreamMachine(RuleBasedStateMachine):
    """After every sequence of faults, each batch was delivered once and in order per incarnation, and EXACT was never false."""

    network: Network

    @initialize(buffer_steps=st.integers(1, 30), replay=st.booleans(), up=st.booleans(), at_once=st.booleans())
    def begin(self, buffer_steps: int, replay: bool, up: bool, at_once: bool) -> None:
        self.has_replay = replay
        source = Source("tcp://e:1", "tcp://e:2" if replay else None, topic="k", name="e")
        self.network = Network(Publisher(buffer_steps), self.open(source))
        self.network.reports_at_once = at_once or isinstance(self.network.stream, StreamPair)
        if up:
            self.network.connect()

    def open(self, source: Source) -> DecodingStream | StreamPair:
        return DecodingStream(source, LIMITS)

    @rule(kinds=st.lists(KINDS, min_size=1, max_size=12))
    def publish(self, kinds: list[str]) -> None:
        for kind in kinds:
            self.network.publish(
                drop=kind == "dropped", skipped=kind == "burnt", clear="clear" in kind, unreadable="unreadable" in kind
            )

    @rule(claim=WORDS, drop=st.booleans())
    def heartbeat(self, claim: Claim, drop: bool) -> None:
        self.network.publish(claim=claim, drop=drop)

    @rule()
    def spoil(self) -> None:
        self.network.spoil()

    @precondition(lambda self: hasattr(self, "network") and self.network.unreported)
    @rule(which=st.integers(0, 20))
    def report_heartbeat(self, which: int) -> None:
        """Report a heartbeat late and in any order."""
        self.network.report(which)

    @rule(count=st.integers(50, 120))
    def flood(self, count: int) -> None:
        self.network.publish(drop=True)
        for _ in range(count):
            self.network.publish()

    @rule(count=st.integers(1, 30))
    def read_live(self, count: int) -> None:
        self.network.read_live(count)

    @rule(count=st.integers(1, 30))
    def read_replies(self, count: int) -> None:
        self.network.read_replies(count)

    @rule(seconds=st.sampled_from([0.1, 0.9, 1.1, 2.1, 40.0]))
    def advance(self, seconds: float) -> None:
        self.network.advance(seconds)

    @rule()
    def cut(self) -> None:
        self.network.cut()

    @rule()
    def connect(self) -> None:
        self.network.connect()

    @rule(unseen=st.integers(0, 60))
    def restart(self, unseen: int) -> None:
        self.network.restart()
        for _ in range(unseen):
            self.network.publish()

    @rule(waiting=st.integers(0, 3))
    def save(self, waiting: int) -> None:
        """Write a checkpoint and the application's state, possibly before the newest deliveries are taken."""
        self.on_reported()
        self.network.save(waiting)

    @precondition(lambda self: hasattr(self, "network") and self.network.saved)
    @rule(which=st.integers(0, 5) | st.just(-1), newer=st.integers(0, 2))
    def resubscribe(self, which: int, newer: int) -> None:
        """Restart the subscriber with one of its checkpoints, and the state of that moment or of a later one."""
        self.network.resubscribe(self.open(self.network.stream.source), which, newer)

    @rule(limit=st.none() | st.integers(1, 6), lose_marker=st.booleans(), is_silent=st.booleans())
    def set_reply_faults(self, limit: int | None, lose_marker: bool, is_silent: bool) -> None:
        self.network.reply_limit, self.network.lose_marker, self.network.is_silent = limit, lose_marker, is_silent

    @invariant()
    def waiting_batches_are_bounded(self) -> None:
        if hasattr(self, "network"):
            assert self.network.stream.waiting <= 2 * LIMITS.max_pending_batches

    @invariant()
    def divergence_is_never_a_false_alarm(self) -> None:
        if hasattr(self, "network") and self.network.is_consistent:
            assert self.network.stream.counters.digests_mismatched == 0

    @precondition(lambda self: hasattr(self, "network"))
    @rule()
    def check_recovery(self) -> None:
        """On a healthy network everything that still exists arrives, and the trust says whether that is everything."""
        network = self.network
        self.quiesce()
        true_incarnation = network.publisher.true_incarnation
        observer = network.observer
        if self.has_replay and true_incarnation.payloads:
            assert observer.true_incarnation == true_incarnation.number, "a restart of an idle engine was not detected"
            assert observer.next_seq > max(true_incarnation.payloads), "the tail of an idle engine was not found"
        network.publish()
        network.publish(claim="EXACT")
        self.quiesce()
        # If the heartbeat has shown another incarnation or state, everything was replayed and is not yet confirmed.
        network.publish()
        self.quiesce()
        assert observer.next_seq == true_incarnation.next_seq, "the newest batch was not delivered"
        assert observer.true_incarnation == true_incarnation.number
        if not self.has_replay:
            assert network.stream.trust == Trust.DEGRADED
        elif network.stream.trust != Trust.EXACT:
            assert network.stream.trust == Trust.DEGRADED
            assert observer.gap_since_clear or observer.unreadable_since_clear, (
                f"DEGRADED without a cause: {network.stream.trust}"
            )
        # Without replay, batches of another incarnation can have numbers that a state newer than its checkpoint has already.
        assert not observer.spoilt or observer.applied >= observer.next_seq, "a true digest did not detect the wrong state"
        assert (network.stream.trust == Trust.EXACT) <= observer.holds_everything()

    def quiesce(self) -> None:
        """Deliver and report everything, repeatedly until that causes nothing new."""
        self.network.quiesce()
        self.on_reported()
        while self.network.has_delivered:
            self.network.quiesce()
            self.on_reported()

    def on_reported(self) -> None:
        """Report everything that a consumer found."""
        self.network.report_all()

    def teardown(self) -> None:
        if hasattr(self, "network"):
            self.check_recovery()


class RawStreamMachine(StreamMachine):
    """The same without decoding: late reports in any order have the same effect as decoding."""

    twins: StreamPair

    def open(self, source: Source) -> StreamPair:
        self.twins = StreamPair(source, LIMITS)
        return self.twins

    @precondition(lambda self: hasattr(self, "twins") and self.twins.unreported)
    @rule(choices=st.lists(st.integers(0, 20), min_size=1, max_size=6))
    def report(self, choices: list[int]) -> None:
        for which in choices[: len(self.twins.unreported)]:
            self.twins.report_one(which)
        self.network.check_exact()

    @precondition(lambda self: hasattr(self, "twins"))
    @rule()
    def on_reported(self) -> None:
        self.twins.report_all()
        super().on_reported()


class ForeignReplayMachine(RuleBasedStateMachine):
    """The replay endpoint belongs to another publisher, for some answers or for all.

    The other publisher has more or fewer batches than the live one, or is equal to it up to some number.

    In any order of messages, the stream is never EXACT while a delivered batch differs from what the live publisher sent
    under its number. With the right endpoint it becomes EXACT again.
    """

    @initialize(
        prefix=st.integers(0, 12),
        ahead=st.integers(0, 40),
        sent=st.integers(0, 40),
        steps=st.none() | st.integers(0, 30),
        compacts=st.booleans(),
        decode=st.booleans(),
    )
    def begin(self, prefix: int, ahead: int, sent: int, steps: int | None, compacts: bool, decode: bool) -> None:
        source = Source("tcp://e:1", "tcp://e:2", topic="k", name="e")
        self.stream = DecodingStream(source, LIMITS) if decode else Stream(source, LIMITS)
        self.prefix, self.steps, self.compacts = prefix, steps, compacts
        self.sent, self.other = sent, ahead
        self.is_foreign = True
        self.now = 0.0
        self.live: deque[list[bytes]] = deque()
        self.replies: deque[list[bytes]] = deque()
        self.held: dict[int, bytes] = {}
        self.stream.begin_connection(self.now)
        self.settle()

    def foreign_payload(self, seq: int) -> bytes:
        """Return what the other publisher has under a number."""
        return payload_of(0 if seq < self.prefix else 1, seq, clear=False)

    def reply(self, start: int) -> list[list[bytes]]:
        if not self.is_foreign:
            return [replay_batch_frames(TOPIC, seq, payload_of(0, seq, clear=False)) for seq in range(start, self.sent)]
        first = 0 if self.steps is None else max(0, self.other - self.steps)
        answer = [replay_batch_frames(TOPIC, seq, self.foreign_payload(seq)) for seq in range(max(start, first), self.other)]
        # A snapshot of what both have in common would be right, and the batches after it do not identify its publisher.
        if self.compacts and first > max(start, self.prefix):
            answer.insert(0, replay_batch_frames(TOPIC, first - 1, payload_of(1, first - 1, clear=True)))
        return answer

    @rule(count=st.integers(1, 20), lost=st.booleans())
    def publish(self, count: int, lost: bool) -> None:
        for seq in range(self.sent, self.sent + count):
            if not lost:
                self.live.append(live_frames(TOPIC, seq, payload_of(0, seq, clear=False)))
        self.sent += count

    @rule(count=st.integers(1, 20))
    def publish_foreign(self, count: int) -> None:
        self.other += count

    @rule(count=st.integers(1, 30))
    def read_live(self, count: int) -> None:
        for _ in range(min(count, len(self.live))):
            frames = self.live.popleft()
            if frames[1] in map(encode_seq, self.stream.expected_run(1)) and frames[0] == self.stream.topic:
                self.stream.receive_run([frames[2]], self.now)
            else:
                self.stream.receive_live(frames, self.now)
            self.settle()

    @rule(count=st.integers(1, 30))
    def read_replies(self, count: int) -> None:
        for _ in range(count):
            if self.replies:
                self.stream.receive_replay(self.replies.popleft(), self.now)
                self.settle()

    @rule(seconds=st.sampled_from([0.1, 1.1, 2.1, 40.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.stream.tick(self.now)
        self.settle()

    @rule(is_foreign=st.booleans())
    def redirect(self, is_foreign: bool) -> None:
        """Let the other publisher answer the next requests; earlier answers may still arrive."""
        self.is_foreign = is_foreign

    @rule()
    def reconnect(self) -> None:
        self.stream.end_connection()
        self.live.clear()
        self.stream.begin_connection(self.now)
        self.settle()

    @precondition(lambda self: hasattr(self, "stream") and self.stream.last_seq >= 0)
    @rule()
    def restart_the_subscriber(self) -> None:
        """Continue from the checkpoint in a new stream, whichever publisher answers now."""
        checkpoint = self.stream.position().checkpoint("e", 0)
        self.stream = type(self.stream)(self.stream.source, LIMITS)
        self.stream.restore(checkpoint)
        self.replies.clear()
        self.live.clear()
        self.stream.begin_connection(self.now)
        self.settle()

    def settle(self) -> None:
        for delivery in self.stream.deliveries():
            if isinstance(delivery, Reset):
                self.held.clear()
            elif isinstance(delivery, Batch | RawBatch):
                self.held[delivery.seq] = delivery.payload
        while (request := self.stream.request_to_send(self.now)) is not None:
            if request.needs_new_connection:
                self.replies.clear()
            self.replies += [*self.reply(request.start), replay_end_frames(has_topic=True)]
        if not self.stream.is_fetching:
            self.replies.clear()
        self.check()

    def check(self) -> None:
        if self.stream.trust == Trust.EXACT:
            wrong = [seq for seq, payload in self.held.items() if payload != payload_of(0, seq, clear=False)]
            assert not wrong, f"EXACT with batches of another publisher: {wrong}"

    def teardown(self) -> None:
        if not hasattr(self, "stream"):
            return
        self.is_foreign = False
        self.reconnect()
        for _ in range(3):
            self.publish(1, False)
            for seconds in (0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0, 60.0, 2.0):
                self.read_live(1000)
                self.read_replies(1000)
                self.advance(seconds)
        assert self.stream.degraded_reasons <= {DegradedReason.LOST}, (
            "only what was given up while the endpoint was distrusted is missing"
        )
        assert (self.stream.trust == Trust.EXACT) == (not self.stream.degraded_reasons)
        held = {seq: payload_of(0, seq, clear=False) for seq in range(self.sent)}
        assert self.held == held if not self.stream.degraded_reasons else self.held.items() <= held.items()


pytestmark = pytest.mark.timeout(600)
"""A limit that a busy machine reaches would look like results that differ from run to run."""
SETTINGS = settings(max_examples=120, stateful_step_count=40)
TestStream = StreamMachine.TestCase
TestStream.settings = SETTINGS
TestRawStream = RawStreamMachine.TestCase
TestRawStream.settings = SETTINGS
TestForeignReplay = ForeignReplayMachine.TestCase
TestForeignReplay.settings = SETTINGS
