"""The lower layer of a stream: its parts, the deliveries they make, and what consumers report of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, ClassVar, Final

from kvevents.events import AllBlocksCleared, BlockRemoved, Heartbeat, KVEvent
from kvevents.stream.deliveries import Batch, Gap, RawBatch, RawDelivery, Source, StreamPosition
from kvevents.stream.identity import CrossCheck, Fingerprint, FingerprintChain, NewestBatch, Quarantine
from kvevents.stream.replay_fetch import NOW, CheckSchedule, ReplayFetch, RequestPacer
from kvevents.stream.sequencer import GapEnd, PendingBytes, ReorderBuffer, Sequencer
from kvevents.stream.settings import StreamLimits
from kvevents.stream.transitions import Input, State, Steps
from kvevents.stream.trust import DegradedReason, HeartbeatMonitor, Trust, TrustLedger
from kvevents.wire import Rejected
from kvevents.wire.decode import begins_with_clear, rank_of

UNCONNECTED: Final = (State.CONNECTING, State.DISCONNECTED, State.RESTORED)
"""States without a connection."""


@dataclass(slots=True)
class StreamCounters:
    """What happened to a stream so far."""

    live: int = 0
    delivered: int = 0
    replayed: int = 0
    duplicates: int = 0
    """Messages with nothing new, live or replayed, including the rest of an answer that was no longer needed."""
    malformed: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    gaps: int = 0
    """Runs of lost numbers. Runs that a snapshot represents are not included."""
    lost: int = 0
    """Batches in those gaps."""
    compacted: int = 0
    """Batches that were not delivered because a snapshot represents them: nothing is lost."""
    gaps_repaired: int = 0
    """Gaps after a live batch that replay has begun to fill: losses, and batches missed between two connections. History before
    the first live batch is not included. A gap of which a part is lost counts in `gaps` as well."""
    resets: int = 0
    reconnects: int = 0
    requests: int = 0
    """Replay requests. Their results are in the next four counters. A request that a lost connection or a restart ended has no
    result."""
    complete: int = 0
    """Requests that were answered, after which nothing was known to be missing."""
    truncated: int = 0
    """Requests that were answered without everything that was requested."""
    unanswered: int = 0
    conflicts: int = 0
    """Requests that were answered with something that contradicts the live stream."""
    overflowed: int = 0
    """Live batches for which there was no room to wait. They are replayed later."""
    discarded: int = 0
    """Waiting batches of a connection or an incarnation that ended."""
    heartbeats: int = 0
    """Reported batches with a heartbeat of the publisher."""
    digests_matched: int = 0
    """Heartbeats whose digest the consumer's state had."""
    digests_mismatched: int = 0
    """Heartbeats whose digest the consumer's state did not have, without a known cause: 0 unless something is broken. An
    explained mismatch, such as after a gap, is not counted; nor is the same mismatch at the next heartbeat."""
    attestations_matched: int = 0
    """Heartbeats whose attestation was that of the consumer's state."""
    attestations_mismatched: int = 0
    """Heartbeats whose attestation was not that of the consumer's state."""

    def copy(self) -> StreamCounters:
        """Return a copy that does not change any more."""
        return replace(self, malformed=dict(self.malformed), rejected=dict(self.rejected))


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What a stream can learn only from a consumer that reads, and in part applies, the batch; see `Subscriber.report`."""

    rejected: tuple[Rejected, ...] = ()
    """Events that could not be decoded."""
    cleared: bool = False
    """Whether the batch has an AllBlocksCleared for all tiers and groups."""
    heartbeat: Heartbeat | None = None
    """The last heartbeat in the batch. Its digest is of everything up to the end of the batch, wherever the heartbeat is."""
    digest_matches: bool | None = None
    """Whether the state after the batch has the heartbeat's digest; None if there is no digest or the state is unknown."""
    attestation_matches: bool | None = None
    """Whether the state after the batch is that of the engine's own cache, as the heartbeat's attestation says; None if there
    is no attestation or the state is unknown."""
    estimate: str | None = None
    """Why the consumer's answers can differ from what the engine finds, although no batch is missing, from this batch on. Empty
    if they no longer can; None if that has not changed."""


def inspect_events(events: Iterable[KVEvent], rejected: tuple[Rejected, ...] = ()) -> BatchReport | None:
    """Return what the events of a batch show by themselves; None if that is nothing."""
    cleared, heartbeat = False, None
    for event in events:
        if type(event) is BlockRemoved:
            heartbeat = event.heartbeat or heartbeat
        elif type(event) is AllBlocksCleared:
            cleared = cleared or event.unknown_fields is None
    return BatchReport(rejected, cleared, heartbeat) if rejected or cleared or heartbeat is not None else None


class DeliveryLayer:
    """The parts of a stream and the deliveries of one incarnation. `ReplayLayer` and `Stream` build on it."""

    _STEPS: ClassVar[Steps] = {}
    """The transition table with the method of each action. `Stream` defines it."""

    def __init__(self, source: Source, limits: StreamLimits, first_incarnation: int, pending: PendingBytes) -> None:
        self.source = source
        self.counters = StreamCounters()
        self.state = State.CONNECTING
        self.incarnation = self._first_incarnation = first_incarnation
        self.topic = source.topic.encode()
        """The topic of the newest message."""
        self._limits = limits
        self._name, self._rank = source.label, source.rank
        self._deliveries: list[RawDelivery] = []
        self._early = ReorderBuffer(limits, pending)
        self._quarantine = Quarantine(limits, pending)
        self._fetch: ReplayFetch | None = None
        self._pacer = RequestPacer(limits)
        self._checks = CheckSchedule(limits)
        self._ledger = TrustLedger()
        self._heartbeats = HeartbeatMonitor(limits)
        self.stated_rank: int | None = None
        """The rank that the payloads state; None if that is unknown, or if they state several, as those of a relay may."""
        self._states_ranks = False
        """Whether the payloads have stated several ranks."""
        self._next_rank_at = NOW
        self._other_topic: bytes | None = None
        """The topic before the newest one, on this connection."""
        self._regressed_at = self._regressions = 0
        """Number of live messages at the last regression to a number above 0, and the regressions shortly after each other."""
        self._now = 0.0
        self._live_at = 0.0
        self._can_replay = bool(source.replay_endpoint)
        """Whether there is a replay endpoint and it is not distrusted."""
        self._has_replayed = False
        """Whether the replay endpoint has ever sent a batch."""
        self._conflicts = 0
        """Conflicts in a row, with no match between."""
        self._distrusted_at = 0.0
        self._retries_distrusted = False
        """Whether the replay endpoint was distrusted and is asked again."""
        self._resyncs = 0
        """Restarts in a row because replay no longer held what it had brought, with no match between."""
        self._begin_incarnation()
        if not self._can_replay:
            self._degrade(DegradedReason.NO_REPLAY)

    def _begin_incarnation(self) -> None:
        self._order = Sequencer(self._limits, self._early)
        self._newest: NewestBatch | Fingerprint | None = None
        """The newest batch delivered in this incarnation."""
        self._chain = FingerprintChain()
        self._cross_check = CrossCheck()
        self._has_delivered = False
        self._answers_behind_live = 0
        """Answers in a row that end with the requested batch although the live batch that should confirm them is newer."""
        self._is_silent = False
        self._restart_reason: str | None = None
        """Why to start over when deliveries are taken next, because of a heartbeat."""
        self._heartbeats.begin_incarnation()
        self._ledger.begin_incarnation()
        # At once: a small replay buffer may soon evict what this incarnation fetches, and then nothing can confirm it.
        self._checks.reset_comparisons()

    def _apply(self, input_: Input, *context: Any) -> None:
        """Enter the state that the table gives for an input, and carry out its action."""
        try:
            self.state, act = self._STEPS[self.state][input_]
        except KeyError:
            raise AssertionError(f"input {input_.name} in state {self.state.name} is not in the transition table") from None
        act(self, *context)

    # --- observe --------------------------------------------------------------------------------------------------------

    @property
    def trust(self) -> Trust:
        """How far the deliveries so far can be trusted."""
        if self.state is State.FOLLOWING:
            return self._trust_while_following()
        if self.state is State.CONNECTING:
            return Trust.CONNECTING
        if self.state in UNCONNECTED:
            return Trust.STALE.with_reason(self.state.value)
        return Trust.REPLAYING.with_reason(_PACED if self._pacer.is_waiting else self.state.value)

    def _trust_while_following(self) -> Trust:
        if self._ledger:
            stale = self._is_silent or (DegradedReason.SENDER in self._ledger and self._heartbeats.trust == Trust.STALE)
            found = self.degraded_reasons
            reasons = [self._describe_reason(reason) for reason in DegradedReason if reason in found]
            return (Trust.STALE if stale else Trust.DEGRADED).with_reason("; ".join(reasons))
        if not self._is_unproven:
            return Trust.ATTESTED if self._ledger.is_attested else Trust.EXACT
        if self._cross_check.last_live is not None and not self._checks.failed_comparisons:
            return Trust.REPLAYING.with_reason(_COMPARING)
        return Trust("DEGRADED", DegradedReason.REPLAY_UNPROVEN.value, unproven=True)

    @property
    def _is_unproven(self) -> bool:
        check = self._cross_check
        if self.state in UNCONNECTED or not self._can_replay or not check.is_incomplete:
            return False
        return not self.source.replay_is_proven or check.last_live is not None or self._conflicts > 0

    def _describe_reason(self, reason: DegradedReason) -> str:
        if reason is DegradedReason.SENDER:
            return self._heartbeats.trust.reason or reason.value
        if reason is DegradedReason.ESTIMATED_MATCHES:
            return self._ledger.estimate_reason or reason.value
        return self._heartbeats.silence if reason is DegradedReason.SILENT else reason.value

    def close(self) -> None:
        """Drop what waits, so that it no longer counts as pending."""
        self._early.clear()
        self._quarantine.take()

    @property
    def max_unread(self) -> float:
        """Seconds without a read of the connection after which the state of the stream is unknown."""
        silence = self._heartbeats.max_silence
        return self._limits.max_unread if silence is None else min(silence, self._limits.max_unread)

    @property
    def degraded_reasons(self) -> frozenset[DegradedReason]:
        """Why the stream is, or would be, DEGRADED. It includes `REPLAY_UNPROVEN` while a comparison is on its way."""
        reasons = frozenset(self._ledger)
        return reasons | _UNPROVEN if self._is_unproven else reasons

    @property
    def last_seq(self) -> int:
        """Number of the newest batch delivered or given up in this incarnation; -1 before the first."""
        return self._order.next_seq - 1

    @property
    def waiting(self) -> int:
        """Batches held back because an earlier one is missing, or because their publisher is not verified."""
        return len(self._early) + len(self._quarantine)

    def position(self) -> StreamPosition:
        """Return what a checkpoint needs, once the deliveries so far were taken."""
        if self._restart_reason is not None:
            return StreamPosition(self.incarnation, -1, FingerprintChain(), None, self._has_replayed, {})
        last_seq = self._order.next_seq - 1
        chain = self._chain.up_to(last_seq)
        chain.add(self._cross_check.live_before_replay, *self._cross_check.all_unconfirmed)
        return StreamPosition(self.incarnation, last_seq, chain, self._newest, self._has_replayed, self._ledger.persistent())

    # --- reports -----------------------------------------------------------------------------------------------------------

    def report(self, delivery: Batch | RawBatch, report: BatchReport) -> None:
        """Take what reading and applying a delivered batch has shown; of a `Batch`, only comparisons and estimates are new.

        Reports may come late and in any order. A clear or a matching digest ends the degraded reasons that are older than its
        batch and no newer ones. Take the deliveries afterwards: they may begin with a `Reset`.
        """
        incarnation, seq = delivery.incarnation, delivery.seq
        if (incarnation, seq) >= (self.incarnation, self._order.next_seq):
            return
        if isinstance(delivery, RawBatch):
            self._take_report(delivery, report)
        if report.estimate is not None and incarnation == self.incarnation:
            self._ledger.estimate(seq, report.estimate)
        if report.digest_matches is not None and incarnation == self.incarnation:
            self._compare_digest(seq, matches=report.digest_matches, live=not delivery.replayed)
            if report.digest_matches and not delivery.replayed:
                self._cross_check.match_digest(seq)
        if report.attestation_matches is not None and incarnation == self.incarnation:
            self._compare_attestation(seq, matches=report.attestation_matches, live=not delivery.replayed)

    def _take_report(self, delivery: RawBatch, report: BatchReport) -> None:
        seq, heartbeat = delivery.seq, report.heartbeat
        for each in report.rejected:
            self._count(self.counters.rejected, each.reason, each.count)
        self.counters.heartbeats += heartbeat is not None
        if delivery.incarnation != self.incarnation:
            return
        if report.cleared:
            self._ledger.clear(seq)
        if any(each.loses_events for each in report.rejected):
            self._ledger.reject(seq)
        if heartbeat is not None:
            if delivery.replayed and heartbeat.trust != Trust.EXACT.name:
                self._order.parts.last_not_final = seq
                self._degrade_if_truncated()
            self._take_heartbeat(seq, heartbeat, live=not delivery.replayed and self.state not in UNCONNECTED)

    def _take_heartbeat(self, seq: int, heartbeat: Heartbeat, *, live: bool) -> None:
        monitor = self._heartbeats
        if monitor.is_other_incarnation(heartbeat, live=live):
            self._ledger.add(DegradedReason.IDENTITY, seq - 1)
            if monitor.allow_new_incarnation():
                self._restart_reason = f"publisher restarted: it is of another incarnation at number {seq} than before"
        if monitor.receive(seq, heartbeat, live=live):
            self._ledger.discard(DegradedReason.SENDER)
            if monitor.trust != Trust.EXACT:
                self._ledger.add(DegradedReason.SENDER, seq)

    def _compare_digest(self, seq: int, *, matches: bool, live: bool) -> None:
        if matches:
            self.counters.digests_matched += 1
            self._heartbeats.digests.match(seq, live=live)
            self._ledger.match_digest(seq)
            return
        is_explained = self._ledger.explains(seq)
        if self._ledger.record_digest_mismatch(seq):
            self.counters.digests_mismatched += not is_explained
            if self._heartbeats.digests.allow_resync(seq) and self._can_replay:
                self._restart_reason = f"the state after number {seq} does not have the publisher's digest"

    def _compare_attestation(self, seq: int, *, matches: bool, live: bool) -> None:
        if matches:
            self.counters.attestations_matched += 1
            self._heartbeats.attestations.match(seq, live=live)
            self._ledger.match_attestation(seq)
        elif self._ledger.mismatch_attestation(seq):
            self.counters.attestations_mismatched += 1
            if self._heartbeats.attestations.allow_resync(seq) and self._can_replay:
                self._restart_reason = f"the state after number {seq} is not that of the engine's own cache"

    # --- deliveries --------------------------------------------------------------------------------------------------------

    def _deliver(self, seq: int, payload: bytes, *, replayed: bool) -> None:
        order = self._order
        order.next_seq = seq + 1
        order.highest_seen = max(order.highest_seen, seq)
        if replayed:
            self._record_replayed(seq, payload)
        else:
            self._newest = newest = NewestBatch(seq, payload, True)
            if self._chain.wants_first_of_connection:
                self._chain.add_first_of_connection(newest)
            if self._cross_check.is_incomplete:
                self._set_last_live(newest, payload)
        self._has_delivered = True
        self.counters.delivered += 1
        if self._now > self._next_rank_at:
            self._read_rank(payload)
        self._deliveries.append(RawBatch(self._name, self._rank, self.incarnation, seq, replayed, payload, self.topic))

    def _record_replayed(self, seq: int, payload: bytes) -> None:
        """Record a batch that replay has brought: live batches have to confirm it."""
        before, fetch = self._newest, self._fetch
        is_repair = before is not None and before.live
        self.counters.gaps_repaired += is_repair
        self.counters.replayed += 1
        self._heartbeats.replayed_at = self._now
        if self._is_silent:
            self._end_silence()
        self._newest = fingerprint = Fingerprint.of(seq, payload, live=False)
        if not begins_with_clear(payload):
            # A snapshot has another content than the batch of its number.
            self._order.replayed_digests.add(seq, fingerprint.digest)
        if self._chain.wants_first_of_connection:
            self._chain.add_first_of_connection(fingerprint)
        began_with_live = fetch is not None and fetch.began_with_live
        self._cross_check.add_replayed(fingerprint, before if is_repair and not began_with_live else None)

    def _deliver_run(self, first: int, payloads: Sequence[bytes]) -> None:
        """Deliver consecutive live payloads."""
        count = len(payloads)
        if count == 1:
            self._deliver(first, payloads[0], replayed=False)
            return
        if self._now > self._next_rank_at:
            self._read_rank(payloads[-1])
        if self._chain.wants_first_of_connection:
            self._chain.add_first_of_connection(NewestBatch(first, payloads[0], True))
        if self._cross_check.is_incomplete:
            self._set_last_live(NewestBatch(first, payloads[0], True))
            if self._cross_check.all_unconfirmed and any(map(begins_with_clear, payloads)):
                self._cross_check.clear()
        name, rank, number, topic = repeat(self._name), repeat(self._rank), repeat(self.incarnation), repeat(self.topic)
        self._deliveries.extend(map(RawBatch, name, rank, number, range(first, first + count), repeat(False), payloads, topic))
        self._order.next_seq = first + count
        self._order.highest_seen = max(self._order.highest_seen, first + count - 1)
        newest = self._newest = NewestBatch(first + count - 1, payloads[-1], True)
        if self._cross_check.is_incomplete:
            self._set_last_live(newest)
        self._has_delivered = True
        self.counters.delivered += count

    def _read_rank(self, payload: bytes) -> None:
        """Read the rank that a payload states. Once per second is enough to notice that ports of ranks are swapped."""
        self._next_rank_at = self._now + _RANK_INTERVAL
        rank = rank_of(payload)
        if rank is not None and not self._states_ranks:
            self._states_ranks = self.stated_rank not in (None, rank)
            self.stated_rank = None if self._states_ranks else rank

    def compare_rank(self, stated_by_other: int | None) -> None:
        """Compare the stated rank with that of the stream that has it by its source; None if there is no such stream."""
        is_other = self.stated_rank not in (None, self._rank) and stated_by_other not in (None, self.stated_rank)
        if is_other and DegradedReason.RANK not in self._ledger:
            self._ledger.add(DegradedReason.RANK, 0)
        elif not is_other:
            self._ledger.discard(DegradedReason.RANK)

    def _set_last_live(self, live: NewestBatch, payload: bytes = b"") -> None:
        """Record a live batch that has to be compared. `payload` is its payload if it is delivered.

        The open answer may repeat the first one of them. The newest one is requested later.
        """
        cross_check, fetch = self._cross_check, self._fetch
        if cross_check.all_unconfirmed and begins_with_clear(payload):
            cross_check.clear()
        cross_check.last_live = live
        if fetch is not None:
            known, unconfirmed = fetch.live_batch, cross_check.unconfirmed
            if known is None or (unconfirmed is not None and known.seq < unconfirmed.seq):
                fetch.live_batch = live

    def _drain(self) -> None:
        while True:
            if payloads := self._order.pop_live_run():
                self._deliver_run(self._order.next_seq, payloads)
            elif (batch := self._order.pop_next()) is not None:
                self._deliver(self._order.next_seq, batch.payload, replayed=batch.replayed)
            else:
                return

    def _declare_gap_before_early(self) -> None:
        first = self._early.first()
        waiting = None if first is None else self._early.get(first)
        is_snapshot = waiting is not None and waiting.replayed and begins_with_clear(waiting.payload)
        self._declare_gap(self._order.gap_before_early(is_snapshot))

    def _declare_gap(self, gap: GapEnd) -> None:
        first = self._order.next_seq
        count = self._order.skip_to(gap.last)
        self._deliveries.append(Gap(self._name, self._rank, first, gap.last, self.incarnation, gap.compacted))
        self._has_delivered = True
        if gap.compacted:
            self.counters.compacted += count
        else:
            self.counters.gaps += 1
            self.counters.lost += count
            self._degrade(DegradedReason.LOST)
        self._drain()

    def _end_snapshot(self) -> None:
        """Expect no further part of a snapshot, whether or not all parts have come."""
        if self._order.parts.is_open:
            self._order.parts.stop()
            self._degrade_if_truncated()
            self._drain()

    def _degrade_if_truncated(self) -> None:
        if self._order.parts.is_truncated:
            self._ledger.add(DegradedReason.LOST, self._order.parts.stopped_at)

    def _confirm(self, seq: int) -> None:
        """Record that replay and the live stream have the same batch `seq`."""
        self._cross_check.confirm(seq)
        self._checks.reset_comparisons()
        self._pacer.reset()
        self._answers_behind_live = 0
        self._conflicts = self._resyncs = 0
        self._retries_distrusted = False
        self._ledger.discard(DegradedReason.REPLAY_UNCONFIRMED)

    def _degrade(self, reason: DegradedReason) -> None:
        """Add a degraded reason for everything delivered or given up so far, but not for what follows."""
        self._ledger.add(reason, self._order.next_seq - 1)

    def _end_silence(self) -> None:
        self._is_silent = False
        self._ledger.discard(DegradedReason.SILENT)

    @staticmethod
    def _count(counter: dict[str, int], reason: str, count: int = 1) -> None:
        counter[reason] = counter.get(reason, 0) + count


_PACED: Final = "many replay requests in a row have not shown that nothing is missing; the next one has to wait"
_RANK_INTERVAL: Final = 1.0
"""Seconds between two looks at the rank that payloads state."""
_COMPARING: Final = "a live batch is compared with what replay says of its number"
_UNPROVEN: Final = frozenset({DegradedReason.REPLAY_UNPROVEN})
