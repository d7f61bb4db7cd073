"""One stream: mangled frames in, ordered deliveries and trust out. No I/O, no clock, no threads.

`transitions` holds the theory of operation and the table that decides. This module classifies what happens as inputs of that
table, and carries out its actions with the parts that `delivery_layer` owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvevents.errors import ConfigError
from kvevents.stream.deliveries import Checkpoint, RawDelivery, Reset, Source
from kvevents.stream.delivery_layer import UNCONNECTED
from kvevents.stream.identity import NewestBatch, payload_digest
from kvevents.stream.replay_fetch import FetchRequest, Purpose, ReplayFetch, Stage
from kvevents.stream.replay_layer import ReplayLayer
from kvevents.stream.sequencer import Order, PendingBytes
from kvevents.stream.settings import DEFAULT_STREAM_LIMITS, StreamLimits
from kvevents.stream.transitions import Action, Input, State, bind_actions
from kvevents.stream.trust import DegradedReason
from kvevents.wire import MAX_SEQ, Live, Malformed, parse_live
from kvevents.wire.decode import begins_with_clear


class Stream(ReplayLayer):
    """Feed it (`connected`, `disconnected`, `receive_live`, `receive_replay`, `tick`), then take what follows from that.

    After each call that feeds it, take `deliveries()`, and send what `request_to_send()` returns. Call `tick` at
    `deadline()`. While `is_fetching` is False, no replay connection is needed. `now` is any monotonic clock in seconds.

    Payloads are not decoded. The consumer decodes them, and must `report` what that has shown.
    Incarnations begin at `first_incarnation`. Those after a restored one are not below it either.
    """

    def __init__(
        self,
        source: Source,
        limits: StreamLimits = DEFAULT_STREAM_LIMITS,
        first_incarnation: int = 0,
        pending: PendingBytes | None = None,
    ) -> None:
        """`pending` is the limit that several streams share."""
        super().__init__(source, limits, first_incarnation, pending or PendingBytes())

    # --- take -----------------------------------------------------------------------------------------------------------

    def deliveries(self) -> list[RawDelivery]:
        """Return what became deliverable since the last call, in order."""
        if self._restart_reason is not None and self.state not in UNCONNECTED:
            self._start_over(self._restart_reason)
        deliveries, self._deliveries = self._deliveries, []
        return deliveries

    @property
    def is_fetching(self) -> bool:
        """Whether a replay request is open, sent or not."""
        return self._fetch is not None

    def start_over(self, reason: str) -> None:
        """Have everything delivered again, after a `Reset` with this reason. A checkpoint is then of the start."""
        self._restart_reason = reason
        if self.state not in UNCONNECTED:
            self._start_over(reason)

    def request_to_send(self, now: float) -> FetchRequest | None:
        """Return the replay request to send now, once; its timeout begins. None while requests are paced: see `deadline`."""
        fetch = self._fetch
        if fetch is None or fetch.sent or not self._pacer.take(now):
            return None
        self.counters.requests += 1
        return fetch.send(now, self._order.next_seq)

    def deadline(self) -> float | None:
        """Return when `tick` is due, unless something arrives before."""
        silent, due = self._silent_at(), self._replay_due()
        return due if silent is None else silent if due is None else min(due, silent)

    def _replay_due(self) -> float | None:
        if self._fetch is not None:
            if self._fetch.sent:
                return self._fetch.deadline(self._limits)
            return self._pacer.next_at if self._pacer.is_waiting else None
        if self.state is not State.FOLLOWING or not self.source.replay_endpoint:
            return None
        if not self._can_replay:
            return self._distrusted_at + self._limits.distrust_cooldown
        return self._checks.probe_at if self._checks.probes else self._live_at + self._limits.idle_before_probe

    def _silent_at(self) -> float | None:
        """Return when the publisher counts as silent if nothing more arrives; None if it has not promised a heartbeat."""
        monitor = self._heartbeats
        if self._is_silent or monitor.max_silence is None:
            return None
        return max(self._live_at, monitor.replayed_at) + monitor.max_silence

    # --- feed: connections and time -------------------------------------------------------------------------------------

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue where an earlier process has ended; call it before anything is fed.

        Raises `ConfigError` if the checkpoint is of another stream.
        """
        if (checkpoint.source, checkpoint.rank) != (self._name, self._rank):
            raise ConfigError(
                f"cannot resume {self._name} rank {self._rank} from a checkpoint of {checkpoint.source} rank {checkpoint.rank}"
            )
        self.state = State.RESTORED
        self.incarnation = checkpoint.incarnation
        self._order.highest_seen = self._order.last_live = checkpoint.last_seq
        self._order.next_seq = checkpoint.last_seq + 1
        # The consumer may hold more than the checkpoint knows of, so another incarnation always begins with a Reset.
        self._has_delivered = True
        self._has_replayed = checkpoint.replay_seen
        self._chain = checkpoint.fingerprint_chain()
        newest = self._newest = self._chain.up_to(checkpoint.last_seq).last
        if newest is not None and not newest.live:
            self._cross_check.add_replayed(newest, None)
        for name, last in checkpoint.degraded_reasons.items():
            self._ledger.add(DegradedReason[name], last)

    def connected(self, now: float) -> None:
        """The subscription is up. Record a new connection. Feed every frame of an earlier connection before this call."""
        self._now = self._live_at = now
        self._other_topic, self._regressions = None, 0
        self._ledger.discard(DegradedReason.SHARED)
        self._end_distrust()
        if self.state is not State.CONNECTING:
            self._prepare_reconnect()
        is_identified = self._chain.first is not None
        if self._can_replay:
            input_ = Input.UP_VERIFIABLE if is_identified else Input.UP_UNIDENTIFIED
        else:
            input_ = Input.UP_WITHOUT_REPLAY if is_identified else Input.UP_UNIDENTIFIED_WITHOUT_REPLAY
        self._apply(input_, _NO_FINGERPRINT[self.state])

    def _prepare_reconnect(self) -> None:
        self._cross_check.reconnect()
        self._checks.reset_comparisons()
        self._answers_behind_live = 0
        if self.state is not State.RESTORED:
            self.disconnected()
            self.counters.reconnects += 1
            self._quarantine.reconnect()
            # The publisher may be another one that equals the old one up to where it is verified. Replay brings them again.
            self.counters.discarded += self._early.clear()
            self._order.highest_seen = self._order.next_seq - 1
        self._chain.add(self._cross_check.live_before_replay, *self._cross_check.all_unconfirmed, self._newest)

    def disconnected(self) -> None:
        """The subscription is down.

        Record that the connection is lost. Frames fed from now until `connected` can be of the old connection or of a new one.
        """
        if self.state not in UNCONNECTED:
            self._end_snapshot()
            self._apply(Input.DOWN)

    def tick(self, now: float) -> None:
        """Handle what is due at `now`: requests without an answer, checks, and silent publishers."""
        self._now = now
        silent = self._silent_at()
        if silent is not None and now >= silent:
            self._is_silent = True
            self._degrade(DegradedReason.SILENT)
        fetch = self._fetch
        if fetch is not None:
            if fetch.sent and now >= fetch.deadline(self._limits):
                self._fail_request(fetch)
        elif (due := self._replay_due()) is not None and now >= due:
            self._retry_distrusted()
            self._checks.probe(now)
            self._fetch = self._fetch_from_fingerprints(Purpose.PROBE)

    # --- feed: live frames ----------------------------------------------------------------------------------------------

    def receive_live(self, frames: Sequence[bytes], now: float) -> None:
        """Take the frames of one message from the SUB socket, valid or not."""
        live = parse_live(frames)
        if isinstance(live, Malformed):
            self._count(self.counters.malformed, live.reason)
        else:
            self._receive(live, now)

    def expected_run(self, limit: int) -> range:
        """Return the numbers of the next live batches, at most `limit`, for a transport that reads ahead for `receive_run`.

        It is empty while anything is unsettled. Then each message must go to `receive_live`.
        """
        order = self._order
        if self.state is State.FOLLOWING and order.next_seq > order.highest_seen:
            return range(order.next_seq, min(order.next_seq + limit, MAX_SEQ))
        return range(0)

    def receive_run(self, payloads: Sequence[bytes], now: float) -> None:
        """Take live messages with the topic `topic` and the numbers that `expected_run` returned.

        Nearly every message of a healthy stream arrives this way.
        """
        count, first, topic = len(payloads), self._order.next_seq, self.topic
        if self.state is not State.FOLLOWING:
            # The connection was lost after the messages had been read.
            for seq, payload in enumerate(payloads, first):
                self._receive(Live(topic, seq, payload), now)
        elif count:
            self.counters.live += count
            self._now = self._live_at = now
            self._checks.probes = 0
            if self._is_silent:
                self._end_silence()
            if self._cross_check.first_live is None:
                self._cross_check.first_live = first
            self._deliver_run(first, payloads)
            self._order.last_live = first + count - 1
            self._compare_soon()

    def _receive(self, live: Live, now: float) -> None:
        order = self._order
        if live.seq == order.next_seq > order.highest_seen and self.state is State.FOLLOWING and order.parts.last < 0:
            # Nothing is missing: the frame is a run of one.
            if live.topic != self.topic:
                self._note_topic(live.topic)
            self.receive_run((live.payload,), now)
            return
        self.counters.live += 1
        self._now = self._live_at = now
        self._checks.probes = 0
        if self._is_silent:
            self._end_silence()
        if live.topic != self.topic:
            self._note_topic(live.topic)
        if self._cross_check.first_live is None:
            self._note_connection_of(live)
        self._apply(Input.LIVE, live)
        if self._cross_check.first_live is None:
            # It has begun another incarnation, of which it is the first frame.
            self._note_connection_of(live)

    def _note_regression(self, seq: int) -> None:
        """Record that the numbers went back. A restarted publisher begins with 0 and then counts up."""
        if seq == 0:
            return
        is_soon = self.counters.live - self._regressed_at <= _REGRESSION_SPAN
        self._regressions = self._regressions + 1 if is_soon else 1
        self._regressed_at = self.counters.live
        if self._regressions >= _MAX_REGRESSIONS:
            self.share()

    def _note_topic(self, topic: bytes) -> None:
        """Record that the topic has changed. A publisher has one; two publishers alternate."""
        if topic == self._other_topic:
            self.share()
        self._other_topic, self.topic = self.topic, topic

    def share(self) -> None:
        """Record that two publishers send at the same time. It holds until the connection ends."""
        if DegradedReason.SHARED not in self._ledger:
            self._degrade(DegradedReason.SHARED)

    def _note_connection_of(self, live: Live) -> None:
        """Record the first live batch of the connection. While there is no connection, the frame may be of the one before."""
        if self.state not in _MAY_BE_OF_EARLIER_CONNECTION:
            self._cross_check.first_live = live.seq

    def _sequence(self, live: Live) -> None:
        seq, order = live.seq, self._order.order_of(live.seq)
        if order is Order.REGRESSED:
            if self._newest is not None and seq == self._newest.seq and self._newest.matches(live.payload):
                self.counters.duplicates += 1
                return
            self._note_regression(seq)
            self._apply(Input.NEW_INCARNATION, f"publisher restarted: number {seq} came after {self._order.last_live}")
            self._sequence(live)
            return
        self._order.last_live = seq
        if order is Order.NEXT:
            self._deliver(seq, live.payload, replayed=False)
            if self._order.highest_seen > seq:
                self._drain()
            self._apply(Input.LIVE_DELIVERED)
        elif order is Order.KNOWN:
            self._compare_with_replayed(live)
        else:
            self._take_early(live)

    def _compare_with_replayed(self, live: Live) -> None:
        """Replay has delivered this number before the live stream: the payload must be the same."""
        known = self._order.replayed_digests.pop(live.seq)
        if known is not None and known != payload_digest(live.payload):
            self._apply(Input.CONFLICT, f"publisher restarted: number {live.seq} came live with another content than replayed")
            self._sequence(live)
            return
        self.counters.duplicates += 1
        if known is not None:
            self._confirm(live.seq)
        else:
            self._set_last_live(NewestBatch(live.seq, live.payload, True))
            self._compare_soon()

    def _take_early(self, live: Live) -> None:
        """Let a batch wait because one before it is missing."""
        self._order.see(live.seq)
        waiting = self._early.get(live.seq)
        if waiting is None:
            self.counters.overflowed += not self._early.add(live.seq, live.payload, replayed=False)
            self._apply(Input.GAP if self._can_replay else Input.GAP_WITHOUT_REPLAY)
        elif waiting.payload != live.payload and begins_with_clear(waiting.payload):
            self.counters.duplicates += 1
        elif not self._check_equal(live.seq, waiting.payload, live.payload, live=True):
            self._sequence(live)

    def _quarantine_frame(self, live: Live) -> None:
        waiting = self._quarantine.newest
        newest = self._order.last_live if waiting is None else waiting.seq
        if live.seq > newest:
            self.counters.overflowed += not self._quarantine.add(live)
        elif waiting == live:
            self.counters.duplicates += 1
        else:
            self._apply(Input.LIVE_REGRESSED, live, newest)

    def _discard_quarantine(self, live: Live, _newest: int) -> None:
        self.counters.discarded += len(self._quarantine.take())
        self.counters.overflowed += not self._quarantine.add(live)

    def _restart_and_sequence(self, live: Live, newest: int) -> None:
        self.counters.discarded += len(self._quarantine.take())
        self._restart(f"publisher restarted: number {live.seq} came after {newest}")
        self._sequence(live)

    def _release_quarantine(self) -> None:
        for live in self._quarantine.take():
            self._sequence(live)

    # --- actions of the table -------------------------------------------------------------------------------------------

    def _fetch_missing(self) -> None:
        """Request from what is unconfirmed, so that the answer shows whether it is of the same publisher."""
        self._fetch = self._fetch_from_missing()

    def _compare_soon(self) -> None:
        """Ask replay for a live batch that has to be compared: at once, and later and later if that was in vain."""
        if (
            self._cross_check.last_live is not None
            and self._fetch is None
            and self._can_replay
            and self._now >= self._checks.compare_at
        ):
            self._fetch = self._fetch_from_fingerprints(Purpose.COMPARE)

    def _retry_distrusted(self) -> None:
        """Ask a distrusted endpoint again: the conflicts may have been many restarts in a row."""
        if DegradedReason.REPLAY_FOREIGN in self._ledger:
            self._end_distrust()
            self._degrade(DegradedReason.REPLAY_UNCONFIRMED)
            self._retries_distrusted = True

    def _do_nothing(self, *_context: Any) -> None:
        pass

    def _begin_first_incarnation(self, _reason: str) -> None:
        self._apply(Input.INCARNATION_WITH_REPLAY if self._can_replay else Input.INCARNATION_WITHOUT_REPLAY)
        self._release_quarantine()

    def _verify(self, _reason: str) -> None:
        first = self._chain.first
        if first is not None:
            self._fetch = ReplayFetch(Purpose.VERIFY, first.seq, first)

    def _follow_unverified(self, _reason: str) -> None:
        if self._has_delivered:
            self._degrade(DegradedReason.IDENTITY)
        self._release_unverified()

    def _continue_unverified(self) -> None:
        self._abandon()
        self._degrade(DegradedReason.IDENTITY)
        self._release_unverified()
        self._fetch_if_missing()

    def _release_unverified(self) -> None:
        self._chain.add(*self._quarantine.around_reconnects())
        self._chain.wants_first_of_connection = not self._quarantine.has_new
        self._release_quarantine()

    def _degrade_identity(self) -> None:
        self._abandon()
        self._degrade(DegradedReason.IDENTITY)
        self._fetch_if_missing()

    def _fetch_if_missing(self) -> None:
        if not self._order.is_complete and self._fetch is None:
            self._apply(Input.STILL_MISSING if self._can_replay else Input.STILL_MISSING_WITHOUT_REPLAY)

    def _disconnect(self) -> None:
        self._fetch = None
        self._heartbeats.disconnect()
        self._end_silence()

    def _restart(self, reason: str) -> None:
        """Begin another incarnation. Frames from before the reconnect are of the old one, frames after it of the new one."""
        old, new = self._quarantine.take_new()
        self.counters.discarded += old + self._early.clear()
        self._fetch = None
        if self._has_delivered:
            self.incarnation = max(self.incarnation + 1, self._first_incarnation)
            self.counters.resets += 1
            self._deliveries.append(Reset(self._name, self._rank, self.incarnation, reason))
        self._begin_incarnation()
        self._apply(Input.INCARNATION_WITH_REPLAY if self._can_replay else Input.INCARNATION_WITHOUT_REPLAY)
        for live in new:
            if self._cross_check.first_live is None:
                self._note_connection_of(live)
            self._sequence(live)

    def _restart_conflicted(self, reason: str) -> None:
        self.counters.conflicts += 1
        self._conflicts += 1
        if self._conflicts >= self._limits.max_conflicts:
            self._distrust()
            self._ledger.discard(DegradedReason.REPLAY_UNCONFIRMED)
        else:
            self._degrade(DegradedReason.REPLAY_UNCONFIRMED)
        self._restart(reason)

    def _restart_unconfirmed(self, reason: str) -> None:
        self._abandon()
        self._resyncs += 1
        self._restart(reason)

    def _distrust_again(self, _reason: str) -> None:
        self._fetch = None
        self._ledger.discard(DegradedReason.REPLAY_UNCONFIRMED)
        self._distrust()

    def _finish_comparison(self) -> None:
        # Newer batches come live. Taken from this answer, they would count as a gap.
        self.counters.complete += 1
        self._close_fetch()

    def _skip_comparison(self, _reason: str) -> None:
        self._checks.fail_comparison(self._now)
        if self._fetch is not None:
            self._fetch.collect(self._order.next_seq)

    def _abandon(self, _reason: str = "") -> None:
        self._checks.fail_comparison(self._now)
        self._fetch = None

    def _give_up(self) -> None:
        """Give up missing batches, because replay will not bring them: declare gaps and continue."""
        self._abandon()
        while not self._order.is_complete:
            self._declare_gap_before_early()

    def _confirm_answer(self) -> None:
        if self._fetch is not None:
            self._fetch.stage = Stage.CONFIRMING

    def _close_fetch(self) -> None:
        self._fetch = None
        self._compare_soon()

    def _settle_and_compare(self) -> None:
        self._settle()
        self._compare_soon()

    def _start_over(self, reason: str) -> None:
        is_sender_degraded = DegradedReason.SENDER in self._ledger
        self._apply(Input.NEW_INCARNATION, reason)
        if is_sender_degraded:
            # The publisher has not taken back what it said of itself.
            self._ledger.add(DegradedReason.SENDER, -1)

    _STEPS = bind_actions(
        {
            Action.BEGIN_INCARNATION: _begin_first_incarnation,
            Action.FETCH_MISSING: _fetch_missing,
            Action.VERIFY: _verify,
            Action.FOLLOW_UNVERIFIED: _follow_unverified,
            Action.CONTINUE_UNVERIFIED: _continue_unverified,
            Action.DISCONNECT: _disconnect,
            Action.SEQUENCE: _sequence,
            Action.QUARANTINE: _quarantine_frame,
            Action.DISCARD_QUARANTINE: _discard_quarantine,
            Action.RESTART_AND_SEQUENCE: _restart_and_sequence,
            Action.COMPARE_SOON: _compare_soon,
            Action.SETTLE: _settle_and_compare,
            Action.GIVE_UP: _give_up,
            Action.RESTART: _restart,
            Action.RESTART_UNCONFIRMED: _restart_unconfirmed,
            Action.RESTART_CONFLICTED: _restart_conflicted,
            Action.DISTRUST: _distrust_again,
            Action.RELEASE_QUARANTINE: _release_quarantine,
            Action.READ_HISTORY: _do_nothing,
            Action.FINISH_COMPARISON: _finish_comparison,
            Action.SKIP_COMPARISON: _skip_comparison,
            Action.ABANDON: _abandon,
            Action.DEGRADE_IDENTITY: _degrade_identity,
            Action.CONFIRM_ANSWER: _confirm_answer,
            Action.CLOSE_FETCH: _close_fetch,
            Action.NOTHING: _do_nothing,
        }
    )
    """The transition table with the method of each action, which takes the context that the input was applied with."""


_REGRESSION_SPAN: Final = 64
"""Live messages within which a second regression of the numbers is no second restart."""
_MAX_REGRESSIONS: Final = 3
_MAY_BE_OF_EARLIER_CONNECTION: Final = (State.DISCONNECTED, State.RESTORED)
_NO_FINGERPRINT: Final = {
    State.CONNECTING: "",
    State.DISCONNECTED: "reconnected before the first batch",
    State.RESTORED: "the checkpoint has no fingerprint of the publisher",
}
