"""One stream: turns frames, which can be lost or invalid, into ordered deliveries and trust, and uses no I/O, clock or threads.

`transitions` has the theory of operation and the transition table. This module classifies events as inputs of the table,
and carries out the table's actions with two parts: `Deliverer` orders and delivers, `AnswerReader` requests and reads replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvevents.errors import ConfigError
from kvevents.stream.answers import AnswerReader, NextInput
from kvevents.stream.deliverer import BatchReport, Deliverer
from kvevents.stream.deliveries import RESTARTED, Batch, Checkpoint, RawBatch, RawDelivery, Source, StreamPosition, printable
from kvevents.stream.identity import NewestBatch, Quarantine, payload_digest
from kvevents.stream.replay_fetch import FetchRequest
from kvevents.stream.sequencer import Order, PendingBytes
from kvevents.stream.settings import DEFAULT_STREAM_LIMITS, StreamLimits
from kvevents.stream.transitions import TRANSITIONS, Input, State
from kvevents.stream.trust import DegradedReason, Trust
from kvevents.wire import MAX_SEQ, Live, Malformed, parse_live
from kvevents.wire.decode import begins_with_clear


class Stream:
    """One stream as a state machine: `begin_connection`, `end_connection`, `receive_live`, `receive_replay` and `tick` feed it.

    After each call that feeds the stream, take `deliveries()`, and send the request that `request_to_send()` returns. Call
    `tick` at `deadline()`. While `is_fetching` is False, no replay connection is needed. `now` is in monotonic seconds.

    Payloads are not decoded. The consumer decodes payloads, and must `report` its findings. Incarnations begin at
    `first_incarnation`. After `restore`, the next incarnation is not lower than that of the checkpoint.
    """

    def __init__(
        self,
        source: Source,
        limits: StreamLimits = DEFAULT_STREAM_LIMITS,
        first_incarnation: int = 0,
        pending: PendingBytes | None = None,
    ) -> None:
        """`pending` counts the waiting bytes of several streams, which share one limit."""
        pending = PendingBytes() if pending is None else pending
        self.source = source
        self.state = State.CONNECTING
        self._limits = limits
        self._deliverer = Deliverer(source, limits, first_incarnation, pending)
        self._quarantine = Quarantine(limits, pending)
        self._answers = AnswerReader(source, limits, self._deliverer, self._quarantine)
        self.counters = self._deliverer.counters
        self._live_at = 0.0
        self._other_topic: bytes | None = None
        """The topic that preceded the newest topic on this connection."""
        self._regressed_at = self._regressions = 0
        """Count of live messages at the last regression to a number above 0, and count of regressions in quick succession."""
        if not source.replay_endpoint:
            self._deliverer.degrade(DegradedReason.NO_REPLAY)

    def _apply(self, input_: Input, *context: Any) -> None:
        """Look up an input in the transition table, enter the next state, and carry out the action."""
        self.state, act = _STEPS[self.state][input_]
        act(self, *context)

    def _apply_next(self, next_input: NextInput) -> bool:
        if next_input is not None:
            self._apply(next_input[0], *next_input[1:])
        return next_input is not None

    # --- state for observers --------------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """The publisher's incarnation, as in deliveries."""
        return self._deliverer.incarnation

    @property
    def topic(self) -> bytes:
        """The topic of the newest message."""
        return self._deliverer.topic

    @property
    def last_seq(self) -> int:
        """Number of the newest batch delivered or given up in this incarnation; -1 before the first."""
        return self._deliverer.order.next_seq - 1

    @property
    def waiting(self) -> int:
        """Number of batches that wait because an earlier batch is missing, or because their publisher is not verified."""
        return len(self._deliverer.early) + len(self._quarantine)

    @property
    def stated_rank(self) -> int | None:
        """The rank that the payloads state; None if unknown, or if they state several ranks, as a relay's payloads can."""
        return self._deliverer.stated_rank

    @property
    def max_unread(self) -> float:
        """Number of seconds without a read of the connection after which the state of the stream is unknown."""
        silence = self._deliverer.heartbeats.max_silence
        return self._limits.max_unread if silence is None else min(silence, self._limits.max_unread)

    @property
    def trust(self) -> Trust:
        """The trust in the deliveries so far."""
        if self.state is State.FOLLOWING:
            return self._trust_while_following()
        if self.state is State.CONNECTING:
            return Trust.CONNECTING
        if self.state in _UNCONNECTED_STATES:
            return Trust.STALE.with_reason(self.state.value)
        return Trust.REPLAYING.with_reason(_PACED_REASON if self._answers.pacer.is_waiting else self.state.value)

    def _trust_while_following(self) -> Trust:
        ledger, heartbeats = self._deliverer.ledger, self._deliverer.heartbeats
        if ledger:
            is_stale = self._deliverer.is_silent or (DegradedReason.SENDER in ledger and heartbeats.trust == Trust.STALE)
            active_reasons = self.degraded_reasons
            sentences = {
                DegradedReason.SENDER: heartbeats.trust.reason,
                DegradedReason.ESTIMATED_MATCHES: ledger.estimate_reason,
                DegradedReason.SILENT: heartbeats.silence,
                DegradedReason.LOST: _NUMBER_0_REASON if ledger.lacks_only_number_0 else "",
            }
            reasons = [sentences.get(reason) or reason.value for reason in DegradedReason if reason in active_reasons]
            return (Trust.STALE if is_stale else Trust.DEGRADED).with_reason("; ".join(reasons))
        if not self._is_unproven:
            return Trust.ATTESTED if ledger.is_attested else Trust.EXACT
        if self._deliverer.cross_check.last_live is not None and not self._answers.checks.failed_comparisons:
            return Trust.REPLAYING.with_reason(_COMPARING_REASON)
        return Trust("DEGRADED", DegradedReason.REPLAY_UNPROVEN.value, unproven=True)

    @property
    def degraded_reasons(self) -> frozenset[DegradedReason]:
        """The degraded reasons in any state, including `REPLAY_UNPROVEN` until a comparison has succeeded."""
        reasons = frozenset(self._deliverer.ledger)
        return reasons | {DegradedReason.REPLAY_UNPROVEN} if self._is_unproven else reasons

    @property
    def _is_unproven(self) -> bool:
        check = self._deliverer.cross_check
        if self.state in _UNCONNECTED_STATES or not check.is_incomplete or not self._deliverer.ledger.can_replay:
            return False
        return not self.source.replay_is_proven or check.last_live is not None or self._answers.conflicts > 0

    def position(self) -> StreamPosition:
        """Return the position for a checkpoint of a consumer that has taken all deliveries."""
        return self._deliverer.position(has_replayed=self._answers.has_replayed)

    # --- results to take after each input -------------------------------------------------------------------------------

    def deliveries(self) -> list[RawDelivery]:
        """Return the deliveries since the last call, in order."""
        deliverer = self._deliverer
        if deliverer.restart_reason is not None and self.state not in _UNCONNECTED_STATES:
            self._start_over(deliverer.restart_reason)
        deliveries, deliverer.deliveries = deliverer.deliveries, []
        return deliveries

    @property
    def is_fetching(self) -> bool:
        """Whether a replay request is open, sent or not."""
        return self._answers.fetch is not None

    def request_to_send(self, now: float) -> FetchRequest | None:
        """Return each replay request once, when it must be sent, and begin its timeout; None if no request must be sent now."""
        return self._answers.request_to_send(now)

    def deadline(self) -> float | None:
        """Return the time at which to call `tick` if no message arrives before that time; None if no call is due."""
        silence_at, replay_at = self._silent_at(), self._replay_due()
        return replay_at if silence_at is None else silence_at if replay_at is None else min(replay_at, silence_at)

    def _replay_due(self) -> float | None:
        answers = self._answers
        if answers.fetch is not None:
            return answers.deadline()
        if self.state is not State.FOLLOWING or not self.source.replay_endpoint:
            return None
        if answers.distrusted_until is not None:
            return answers.distrusted_until
        if answers.checks.probes:
            return answers.checks.probe_at
        return min(self._live_at + self._limits.idle_before_probe, answers.checks.busy_probe_at)

    def _silent_at(self) -> float | None:
        """Return the time at which a quiet publisher counts as silent; None if the publisher has not promised a heartbeat."""
        monitor = self._deliverer.heartbeats
        if self._deliverer.is_silent or monitor.max_silence is None:
            return None
        return max(self._live_at, monitor.replayed_at) + monitor.max_silence

    # --- reports of the consumer ----------------------------------------------------------------------------------------

    def report(self, delivery: Batch | RawBatch, report: BatchReport) -> None:
        """Process a consumer's report about a delivered batch; for a `Batch`, only comparisons and estimates are used.

        Late reports are accepted, in any order. A clear or a matching digest ends only the degraded reasons that began before
        its batch. Take the deliveries after this call, because they can begin with a `Reset`.
        """
        self._deliverer.report(delivery, report, is_connected=self.state not in _UNCONNECTED_STATES)

    def start_over(self, reason: str) -> None:
        """Deliver all batches again, after a `Reset` with this reason. A checkpoint before the `Reset` has no position."""
        self._deliverer.restart_reason = reason
        if self.state not in _UNCONNECTED_STATES:
            self._start_over(reason)

    def compare_rank(self, stated_by_other: int | None) -> None:
        """Compare the rank that payloads state with the source's rank; see `Deliverer.compare_rank`."""
        self._deliverer.compare_rank(stated_by_other)

    def mark_shared(self) -> None:
        """Degrade the stream until the connection ends, because two publishers send at the same time."""
        if DegradedReason.SHARED not in self._deliverer.ledger:
            self._deliverer.degrade(DegradedReason.SHARED)

    def mark_incomplete(self, *, is_incomplete: bool) -> None:
        """Record whether the sender has said that parts of its state will follow, if its protocol has such a sign."""
        self._deliverer.ledger.discard(DegradedReason.SENDER)
        if is_incomplete:
            self._deliverer.degrade(DegradedReason.SENDER)

    def close(self) -> None:
        """Drop the waiting batches, so that `pending` no longer counts them."""
        self._deliverer.early.clear()
        self._quarantine.remove_frames()

    # --- input: connections and time ------------------------------------------------------------------------------------

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of an earlier process; call this before any method that feeds the stream.

        Raises `ConfigError` if the checkpoint belongs to another stream.
        """
        source, deliverer = self.source, self._deliverer
        if (checkpoint.source, checkpoint.rank) != (source.label, source.rank):
            checkpoint_name = f"{printable(checkpoint.source)} rank {checkpoint.rank}"
            raise ConfigError(
                f"cannot resume {printable(source.label)} rank {source.rank} from a checkpoint of {checkpoint_name}"
            )
        self.state = State.RESTORED
        self._answers.has_replayed = checkpoint.replay_seen
        deliverer.restore(checkpoint)

    def begin_connection(self, now: float) -> None:
        """Record that a new connection is subscribed. Feed every frame of an earlier connection before this call."""
        deliverer = self._deliverer
        deliverer.now = self._live_at = now
        self._other_topic, self._regressions = None, 0
        deliverer.ledger.discard(DegradedReason.SHARED)
        self._answers.end_distrust()
        if self.state is not State.CONNECTING:
            self._prepare_reconnect()
        is_identified = deliverer.chain.first is not None
        if not deliverer.ledger.can_replay and (is_identified or not deliverer.has_delivered):
            input_ = Input.UP_WITHOUT_REPLAY
        else:
            input_ = Input.UP_VERIFIABLE if is_identified else Input.UP_UNIDENTIFIED
        self._apply(input_, "reconnected, and no batch from before identifies the publisher")

    def _prepare_reconnect(self) -> None:
        deliverer = self._deliverer
        deliverer.cross_check.reconnect()
        self._answers.checks.reset_comparisons()
        if self.state is not State.RESTORED:
            self.end_connection()
            self.counters.reconnects += 1
            self._quarantine.reconnect()
            # Early batches may come from a publisher other than the one to verify. Replay brings early batches again.
            self.counters.discarded += deliverer.early.clear()
            deliverer.order.highest_known = deliverer.order.next_seq - 1
        deliverer.chain.add(deliverer.cross_check.live_before_replay, *deliverer.cross_check.all_unconfirmed, deliverer.newest)

    def end_connection(self) -> None:
        """Record that the connection is lost.

        Frames fed between this call and `begin_connection` can belong to the old connection or to a new one.
        """
        if self.state not in _UNCONNECTED_STATES:
            self._deliverer.end_snapshot()
            self._apply(Input.DOWN)

    def tick(self, now: float) -> None:
        """Handle unanswered requests, checks and silent publishers that are due at `now`."""
        self._deliverer.now = now
        silence_at = self._silent_at()
        if silence_at is not None and now >= silence_at:
            self._deliverer.is_silent = True
            self._deliverer.degrade(DegradedReason.SILENT)
        fetch, due = self._answers.fetch, self._replay_due()
        if due is None or now < due:
            return
        if fetch is None:
            self._answers.probe()
        elif fetch.is_sent:
            self._apply_next(self._answers.expire())

    # --- input: replay --------------------------------------------------------------------------------------------------

    def receive_replay(self, frames: Sequence[bytes], now: float) -> None:
        """Process the frames of one message, which can be invalid, from the replay connection."""
        self._deliverer.now = now
        self._apply_next(self._answers.read(frames))
        if self._answers.is_endless:
            self._apply_next(self._answers.expire())

    def defer_replay_timeout(self, now: float) -> None:
        """Restart the timeout of an answer that has arrived but is not fed yet."""
        if self._answers.fetch is not None:
            self._answers.fetch.active_at = now

    # --- input: live frames ---------------------------------------------------------------------------------------------

    def receive_live(self, frames: Sequence[bytes], now: float) -> None:
        """Process the frames of one message, which can be invalid, from the SUB socket."""
        live = parse_live(frames)
        if isinstance(live, Malformed):
            self.counters.malformed[live.reason] += 1
        else:
            self._receive(live, now)

    def expected_run(self, limit: int) -> range:
        """Return at most `limit` numbers of the next live batches, for a transport that collects messages for `receive_run`.

        While batches are missing or unverified, the range is empty, and each message must be passed to `receive_live`.
        """
        order = self._deliverer.order
        if self.state is State.FOLLOWING and order.next_seq > order.highest_known:
            return range(order.next_seq, min(order.next_seq + limit, MAX_SEQ))
        return range(0)

    def receive_run(self, payloads: Sequence[bytes], now: float) -> None:
        """Process live messages with the topic `topic` and the numbers that `expected_run` returned.

        Almost all messages of a healthy stream take this path.
        """
        deliverer = self._deliverer
        count, first = len(payloads), deliverer.order.next_seq
        if self.state is not State.FOLLOWING:
            # The connection was lost after the messages had been read.
            for seq, payload in enumerate(payloads, first):
                self._receive(Live(deliverer.topic, seq, payload), now)
        elif count:
            self._record_arrival(count, now)
            if deliverer.cross_check.first_live_seq is None:
                deliverer.cross_check.first_live_seq = first
            deliverer.deliver_run(first, payloads)
            deliverer.order.last_live = first + count - 1
            if deliverer.cross_check.last_live is not None:
                self._answers.compare_soon()

    def _record_arrival(self, count: int, now: float) -> None:
        self.counters.live += count
        self._deliverer.now = self._live_at = now
        self._answers.checks.probes = 0
        if self._deliverer.is_silent:
            self._deliverer.end_silence()

    def _receive(self, live: Live, now: float) -> None:
        order = self._deliverer.order
        if live.topic != self._deliverer.topic:
            # A publisher has one topic, so topics that alternate come from two publishers.
            if live.topic == self._other_topic:
                self.mark_shared()
            self._other_topic, self._deliverer.topic = self._deliverer.topic, live.topic
        if live.seq == order.next_seq > order.highest_known and self.state is State.FOLLOWING and order.parts.last < 0:
            # No batch is missing, so the frame is processed as a run of one message.
            self.receive_run((live.payload,), now)
            return
        self._record_arrival(1, now)
        self._record_first_live(live)
        self._apply(Input.LIVE, live)
        # Called again: if the frame has begun another incarnation, it is the first live batch of this incarnation.
        self._record_first_live(live)

    def _record_first_live(self, live: Live) -> None:
        """Record a connection's first live batch. While disconnected do nothing: the old connection may have sent the frame."""
        if self._deliverer.cross_check.first_live_seq is None and self.state not in _UNCONNECTED_STATES:
            self._deliverer.cross_check.first_live_seq = live.seq

    def _record_regression(self, seq: int) -> None:
        """Record that numbers went back to `seq`. A return to 0 does not count, because it is a restart."""
        if seq == 0:
            return
        is_soon = self.counters.live - self._regressed_at <= _REGRESSION_SPAN
        self._regressions = self._regressions + 1 if is_soon else 1
        self._regressed_at = self.counters.live
        if self._regressions >= _MAX_REGRESSIONS:
            self.mark_shared()

    # --- actions of the table: live frames ------------------------------------------------------------------------------

    def _sequence(self, live: Live) -> None:
        deliverer, seq, payload = self._deliverer, live.seq, live.payload
        order = deliverer.order.order_of(seq)
        if order is Order.REGRESSED:
            newest = deliverer.newest
            if newest is not None and seq == newest.seq and newest.matches(payload):
                self.counters.duplicates += 1
                return
            self._record_regression(seq)
            self._apply(Input.NEW_INCARNATION, f"{RESTARTED}number {seq} came after {deliverer.order.last_live}")
            self._sequence(live)
            return
        deliverer.order.last_live = seq
        if order is Order.NEXT:
            deliverer.deliver(seq, payload, replayed=False)
            if deliverer.order.highest_known > seq:
                deliverer.drain()
            self._apply(Input.LIVE_DELIVERED)
        elif order is Order.KNOWN:
            self._compare_with_replayed(live)
        else:
            self._buffer_early_batch(live)

    def _compare_with_replayed(self, live: Live) -> None:
        """Compare a live batch with the replayed batch of the same number; their payloads must be equal."""
        digest = self._deliverer.order.replayed_digests.pop(live.seq, None)
        if digest is not None and digest != payload_digest(live.payload):
            self._apply(Input.CONFLICT, f"{RESTARTED}number {live.seq} came live with another content than replayed")
            self._sequence(live)
            return
        self.counters.duplicates += 1
        if digest is not None:
            self._answers.confirm(live.seq)
        else:
            self._deliverer.cross_check.add_live(NewestBatch(live.seq, live.payload, True))
            self._answers.compare_soon()

    def _buffer_early_batch(self, live: Live) -> None:
        """Let a batch wait because an earlier batch is missing."""
        deliverer, order = self._deliverer, self._deliverer.order
        order.highest_known = max(order.highest_known, live.seq)
        early_batch = deliverer.early.get(live.seq)
        if early_batch is None:
            self.counters.overflowed += not deliverer.early.add(live.seq, live.payload, replayed=False)
            self._apply(Input.GAP)
        elif early_batch.payload != live.payload and begins_with_clear(early_batch.payload):
            self.counters.duplicates += 1
        elif self._apply_next(self._answers.compare_waiting(live.seq, early_batch.payload, live.payload, live=True)):
            self._sequence(live)

    def _quarantine_frame(self, live: Live) -> None:
        frame = self._quarantine.newest
        newest = self._deliverer.order.last_live if frame is None else frame.seq
        if live.seq > newest:
            self.counters.overflowed += not self._quarantine.add(live)
        elif frame == live:
            self.counters.duplicates += 1
        else:
            self._apply(Input.LIVE_REGRESSED, live, newest)

    def _discard_quarantine(self, live: Live, _newest: int) -> None:
        self.counters.discarded += len(self._quarantine.remove_frames())
        self.counters.overflowed += not self._quarantine.add(live)

    def _restart_and_sequence(self, live: Live, newest: int) -> None:
        self.counters.discarded += len(self._quarantine.remove_frames())
        self._restart(f"{RESTARTED}number {live.seq} came after {newest}")
        self._sequence(live)

    def _release_quarantine(self) -> None:
        for live in self._quarantine.remove_frames():
            self._sequence(live)

    # --- actions of the table: connections, incarnations and requests -----------------------------------------------------

    def _verify(self, _reason: str) -> None:
        self._answers.verify()

    def _follow_unverified(self, _reason: str = "") -> None:
        self._answers.abandon()
        if self._deliverer.has_delivered:
            self._deliverer.degrade(DegradedReason.IDENTITY)
        self._deliverer.chain.add(*self._quarantine.around_reconnects())
        self._deliverer.chain.wants_first_of_connection = not self._quarantine.has_current_frames
        self._release_quarantine()

    def _disconnect(self) -> None:
        self._answers.close()
        self._deliverer.heartbeats.disconnect()
        self._deliverer.end_silence()

    def _restart(self, reason: str) -> None:
        """Begin another incarnation, with the frames since the reconnect; earlier frames belong to the old incarnation."""
        old_count, frames = self._quarantine.remove_and_split_frames()
        self.counters.discarded += old_count
        self._deliverer.reset(reason)
        self._answers.begin_incarnation()
        self._fetch_missing()
        for live in frames:
            self._record_first_live(live)
            self._sequence(live)

    def _restart_conflicted(self, reason: str) -> None:
        self._answers.count_conflict()
        self._restart(reason)

    def _start_over(self, reason: str) -> None:
        is_sender_degraded = DegradedReason.SENDER in self._deliverer.ledger
        self._apply(Input.NEW_INCARNATION, reason)
        if is_sender_degraded:
            # The publisher's newest heartbeat reports that its own stream is not EXACT; this report stays valid.
            self._deliverer.ledger.add(DegradedReason.SENDER, -1)

    def _fetch_missing(self) -> None:
        if self._deliverer.ledger.can_replay:
            self._answers.fetch_missing()
        else:
            self._apply(Input.FETCH_FAILED)

    def _give_up(self, _reason: str = "") -> None:
        """Give up batches that replay will not bring: declare gaps and continue."""
        deliverer = self._deliverer
        self._answers.abandon()
        while not deliverer.order.is_complete:
            deliverer.declare_gap(deliverer.order.gap_before_early_batches())

    def _compare_soon(self) -> None:
        self._answers.compare_soon()

    def _settle(self) -> None:
        self._apply_next(self._answers.settle())
        self._answers.compare_soon()

    def _close_fetch(self) -> None:
        self._answers.close()
        self._answers.compare_soon()

    def _nothing(self) -> None:
        pass


_STEPS: Final = {
    state: {input_: (following, getattr(Stream, f"_{action.name.lower()}")) for input_, (following, action) in row.items()}
    for state, row in TRANSITIONS.items()
}
"""The transition table with the method of each action; `_apply` passes `context` to the method."""
_PACED_REASON: Final = "many consecutive replay requests have brought no complete answer; the next request has to wait"
_NUMBER_0_REASON: Final = "number 0 never came: it is lost or evicted, or the publisher numbers its batches from 1"
_COMPARING_REASON: Final = "a live batch is compared with the replayed batch of its number"
_REGRESSION_SPAN: Final = 64
"""Maximum number of live messages between two regressions that both count towards `_MAX_REGRESSIONS`."""
_MAX_REGRESSIONS: Final = 3
_UNCONNECTED_STATES: Final = (State.CONNECTING, State.DISCONNECTED, State.RESTORED)
