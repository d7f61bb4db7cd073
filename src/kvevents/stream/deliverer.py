"""Puts the batches of a stream in order, delivers them, and records the evidence for trust and the reports of consumers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from kvevents.events import AllBlocksCleared, BlockRemoved, Heartbeat, KVEvent
from kvevents.stream.deliveries import RESTARTED, Batch, Checkpoint, Gap, RawBatch, RawDelivery, Reset, Source, StreamPosition
from kvevents.stream.identity import CrossCheck, Fingerprint, FingerprintChain, NewestBatch
from kvevents.stream.sequencer import GapEnd, PendingBytes, ReorderBuffer, Sequencer
from kvevents.stream.settings import StreamLimits
from kvevents.stream.trust import DegradedReason, HeartbeatMonitor, Trust, TrustLedger
from kvevents.wire import Rejected
from kvevents.wire.decode import begins_with_clear, has_no_number_0, rank_of


class StreamCounters(Struct):
    """Counters of a stream since its start."""

    live: int = 0
    delivered: int = 0
    replayed: int = 0
    duplicates: int = 0
    """Number of live or replayed messages without a new batch, including the unneeded last messages of an answer."""
    malformed: dict[str, int] = field(default_factory=Counter)
    rejected: dict[str, int] = field(default_factory=Counter)
    gaps: int = 0
    """Number of gaps whose batches are lost; gaps that a snapshot represents do not count."""
    lost: int = 0
    """Number of batches that were lost in the `gaps`."""
    compacted: int = 0
    """Number of batches that were not delivered because a snapshot represents them; they do not count as lost."""
    gaps_repaired: int = 0
    """Number of gaps that replay began to fill: batches that were lost after a live batch, or between two connections.
    The history before the first live batch does not count. A gap that replay fills only in part also counts in `gaps`."""
    resets: int = 0
    reconnects: int = 0
    requests: int = 0
    """Number of replay requests. The next four counters count the results of requests. A request has no result if a lost
    connection or a restart ended it."""
    complete: int = 0
    """Number of requests whose answer left no batch missing, as far as the stream knows."""
    truncated: int = 0
    """Number of requests whose answer lacked a requested batch."""
    unanswered: int = 0
    conflicts: int = 0
    """Number of requests whose answer contradicts the live stream."""
    overflowed: int = 0
    """Number of live batches that were dropped because too many batches were waiting. Replay delivers these batches later."""
    discarded: int = 0
    """Number of waiting batches that were dropped because their connection or incarnation ended."""
    heartbeats: int = 0
    """Number of batches for which the consumer has reported a heartbeat of the publisher."""
    digests_matched: int = 0
    """Number of heartbeats whose digest matched the consumer's state."""
    digests_mismatched: int = 0
    """Number of heartbeats whose digest differed from the consumer's without a known cause; each shows a defect. A mismatch
    with a known cause, such as a gap or an earlier mismatch, is not counted."""
    attestations_matched: int = 0
    """Number of heartbeats whose attestation matched the consumer's state."""
    attestations_mismatched: int = 0
    """Number of heartbeats whose attestation did not match the consumer's state."""

    def copy(self) -> StreamCounters:
        """Return a copy, which later inputs of the stream do not change."""
        return replace(self, malformed=dict(self.malformed), rejected=dict(self.rejected))


class BatchReport(Struct, frozen=True):
    """Findings of a consumer that has decoded, and perhaps applied, a batch; see `Subscriber.report`."""

    rejected: tuple[Rejected, ...] = ()
    """Events that could not be decoded."""
    cleared: bool = False
    """Whether the batch has an AllBlocksCleared for all tiers and groups."""
    heartbeat: Heartbeat | None = None
    """The last heartbeat in the batch. The heartbeat's digest covers the whole batch and all batches before it."""
    digest_matches: bool | None = None
    """Whether the state after the batch has the heartbeat's digest; None if there is no digest or the state is unknown."""
    attestation_matches: bool | None = None
    """Whether the state after the batch matches the heartbeat's attestation of the engine's own cache; None if there is no
    attestation or the state is unknown."""
    estimate: str | None = None
    """Why the consumer's state can differ from the engine's cache from this batch on, although no batch is missing. An empty
    text ends the previous reason; None keeps it."""


def inspect_events(events: Iterable[KVEvent], rejected: tuple[Rejected, ...] = ()) -> BatchReport | None:
    """Return the findings that need only the events of the batch; None if there are no findings."""
    has_clear, heartbeat = False, None
    for event in events:
        if type(event) is BlockRemoved:
            heartbeat = event.heartbeat or heartbeat
        elif type(event) is AllBlocksCleared:
            has_clear = has_clear or event.unknown_fields is None
    return BatchReport(rejected, has_clear, heartbeat) if rejected or has_clear or heartbeat is not None else None


class Deliverer:
    """Puts the batches of a stream in order and delivers them. The class does not use connections or requests.

    The deliverer also records the evidence for trust: fingerprints of the publisher, matches of replayed and live batches,
    heartbeats, and degraded reasons.
    """

    def __init__(self, source: Source, limits: StreamLimits, first_incarnation: int, pending: PendingBytes) -> None:
        self.counters = StreamCounters()
        self.deliveries: list[RawDelivery] = []
        self.incarnation = self._first_incarnation = first_incarnation
        self.topic = source.topic.encode()
        """The topic of the newest message."""
        self.now = 0.0
        """The time of the newest input."""
        self.early = ReorderBuffer(limits, pending)
        self.ledger = TrustLedger()
        self.heartbeats = HeartbeatMonitor(limits)
        self.stated_rank: int | None = None
        """The rank that the payloads state; None if unknown, or if they state several ranks, as a relay's payloads can."""
        self._states_ranks = False
        """Whether the payloads have stated several ranks."""
        self._next_rank_at = float("-inf")
        self._limits = limits
        self._name, self._rank = source.label, source.rank
        self._begin_incarnation()

    def _begin_incarnation(self) -> None:
        self.order = Sequencer(self._limits, self.early)
        self.newest: NewestBatch | Fingerprint | None = None
        """The newest batch that was delivered in this incarnation."""
        self.chain = FingerprintChain()
        self.cross_check = CrossCheck()
        self.has_delivered = False
        self.is_silent = False
        self.restart_reason: str | None = None
        """Why the stream must start over when deliveries are next taken; None if no report requires a restart."""
        self.heartbeats.begin_incarnation()
        self.ledger.begin_incarnation()

    def reset(self, reason: str) -> None:
        """Begin another incarnation, with a `Reset` if anything was delivered. Waiting batches are dropped."""
        self.counters.discarded += self.early.clear()
        if self.has_delivered:
            self.incarnation = max(self.incarnation + 1, self._first_incarnation)
            self.counters.resets += 1
            self.deliveries.append(Reset(self._name, self._rank, self.incarnation, reason))
        self._begin_incarnation()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue after the newest batch of a checkpoint."""
        self.incarnation = checkpoint.incarnation
        self.order.highest_known = self.order.last_live = checkpoint.last_seq
        self.order.next_seq = checkpoint.last_seq + 1
        # The consumer may have applied batches after the checkpoint, so another incarnation always begins with a Reset.
        self.has_delivered = True
        self.chain = checkpoint.fingerprint_chain()
        newest = self.newest = self.chain.up_to(checkpoint.last_seq).last
        if newest is not None and not newest.live:
            self.cross_check.add_replayed(newest, None)
        for name, last in checkpoint.degraded_reasons.items():
            self.ledger.add(DegradedReason[name], last)

    def position(self, *, has_replayed: bool) -> StreamPosition:
        """Return the position for a checkpoint of a consumer that has taken all deliveries."""
        if self.restart_reason is not None:
            return StreamPosition(self.incarnation, -1, FingerprintChain(), None, has_replayed, {})
        last_seq = self.order.next_seq - 1
        chain = self.chain.up_to(last_seq)
        chain.add(self.cross_check.live_before_replay, *self.cross_check.all_unconfirmed)
        return StreamPosition(self.incarnation, last_seq, chain, self.newest, has_replayed, self.ledger.persistent_reasons())

    def degrade(self, reason: DegradedReason) -> None:
        """Add a degraded reason for all batches that were already delivered or given up, but not for later batches."""
        self.ledger.add(reason, self.order.next_seq - 1)

    def end_silence(self) -> None:
        """Record that a message was received, so the publisher is not silent."""
        self.is_silent = False
        self.ledger.discard(DegradedReason.SILENT)

    def compare_rank(self, stated_by_other: int | None) -> None:
        """Compare the rank that payloads state with the source's rank.

        `stated_by_other` is the rank in the payloads of the source whose rank is `stated_rank`; None if unknown.
        """
        is_other = self.stated_rank not in (None, self._rank) and stated_by_other not in (None, self.stated_rank)
        if is_other and DegradedReason.RANK not in self.ledger:
            self.ledger.add(DegradedReason.RANK, 0)
        elif not is_other:
            self.ledger.discard(DegradedReason.RANK)

    # --- reports -----------------------------------------------------------------------------------------------------------

    def report(self, delivery: Batch | RawBatch, report: BatchReport, *, is_connected: bool) -> None:
        """Process a consumer's report about a delivered batch; see `Stream.report`."""
        seq, live, is_current = delivery.seq, not delivery.replayed, delivery.incarnation == self.incarnation
        if (delivery.incarnation, seq) >= (self.incarnation, self.order.next_seq):
            return
        if isinstance(delivery, RawBatch):
            for rejection in report.rejected:
                self.counters.rejected[rejection.reason] += rejection.count
            self.counters.heartbeats += report.heartbeat is not None
            if is_current:
                self._take_report(delivery, report, is_connected=is_connected)
        if not is_current:
            return
        if report.estimate is not None:
            self.ledger.record_estimate(seq, report.estimate)
        if report.digest_matches is not None:
            self._compare_digest(seq, matches=report.digest_matches, live=live)
        if report.attestation_matches is not None:
            self._compare_attestation(seq, matches=report.attestation_matches, live=live)

    def _take_report(self, delivery: RawBatch, report: BatchReport, *, is_connected: bool) -> None:
        seq, heartbeat = delivery.seq, report.heartbeat
        # If a stream has several ranks, a clear in a batch that states a rank clears only that rank.
        if report.cleared and not (self._states_ranks and rank_of(delivery.payload) is not None):
            self.ledger.clear(seq)
        if any(rejection.loses_events for rejection in report.rejected):
            self.ledger.record_rejection(seq)
        if heartbeat is not None:
            if delivery.replayed and heartbeat.trust != Trust.EXACT.name:
                self.order.parts.last_not_final = seq
                self._degrade_if_truncated()
            self._take_heartbeat(seq, heartbeat, live=not delivery.replayed and is_connected)

    def _take_heartbeat(self, seq: int, heartbeat: Heartbeat, *, live: bool) -> None:
        monitor = self.heartbeats
        if monitor.is_other_incarnation(heartbeat, live=live):
            self.ledger.add(DegradedReason.IDENTITY, seq - 1)
            if monitor.incarnations.allow_resync(seq):
                self.restart_reason = f"{RESTARTED}it is of another incarnation at number {seq} than before"
        if monitor.receive(seq, heartbeat, live=live):
            self.ledger.discard(DegradedReason.SENDER)
            if monitor.trust != Trust.EXACT:
                self.ledger.add(DegradedReason.SENDER, seq)

    def _compare_digest(self, seq: int, *, matches: bool, live: bool) -> None:
        if matches:
            self.counters.digests_matched += 1
            self.heartbeats.digests.match(seq, live=live)
            self.ledger.match_digest(seq)
            if live:
                self.cross_check.match_digest(seq)
            return
        is_explained = self.ledger.explains(seq)
        if self.ledger.record_digest_mismatch(seq):
            self.counters.digests_mismatched += not is_explained
            if self.heartbeats.digests.allow_resync(seq) and self.ledger.can_replay:
                self.restart_reason = f"the state after number {seq} does not have the publisher's digest"

    def _compare_attestation(self, seq: int, *, matches: bool, live: bool) -> None:
        if matches:
            self.counters.attestations_matched += 1
            self.heartbeats.attestations.match(seq, live=live)
            self.ledger.match_attestation(seq)
        elif self.ledger.record_attestation_mismatch(seq):
            self.counters.attestations_mismatched += 1
            if self.heartbeats.attestations.allow_resync(seq) and self.ledger.can_replay:
                self.restart_reason = f"the state after number {seq} is not that of the engine's own cache"

    # --- deliveries --------------------------------------------------------------------------------------------------------

    def deliver(self, seq: int, payload: bytes, *, replayed: bool) -> None:
        """Deliver the next batch."""
        order = self.order
        order.next_seq = seq + 1
        order.highest_known = max(order.highest_known, seq)
        if replayed:
            self._record_replayed(seq, payload)
        else:
            self.newest = newest = NewestBatch(seq, payload, True)
            if self.chain.wants_first_of_connection:
                self.chain.add_first_of_connection(newest)
            if self.cross_check.is_incomplete:
                if self.cross_check.all_unconfirmed and begins_with_clear(payload):
                    self.cross_check.clear()
                self.cross_check.add_live(newest)
        self.has_delivered = True
        self.counters.delivered += 1
        if self.now > self._next_rank_at:
            self._read_rank(payload)
        self.deliveries.append(RawBatch(self._name, self._rank, self.incarnation, seq, replayed, payload, self.topic))

    def _record_replayed(self, seq: int, payload: bytes) -> None:
        """Record a replayed batch, which a live batch must confirm later."""
        former = self.newest
        is_repair = former is not None and former.live
        self.counters.gaps_repaired += is_repair
        self.counters.replayed += 1
        self.heartbeats.replayed_at = self.now
        if self.is_silent:
            self.end_silence()
        self.newest = fingerprint = Fingerprint.of_batch(seq, payload, live=False)
        if not begins_with_clear(payload):
            # The digest of a snapshot is not stored, because the live batch with the same number has another digest.
            self.order.add_digest(seq, fingerprint.digest)
        if self.chain.wants_first_of_connection:
            self.chain.add_first_of_connection(fingerprint)
        self.cross_check.add_replayed(fingerprint, former if is_repair else None)

    def deliver_run(self, first: int, payloads: Sequence[bytes]) -> None:
        """Deliver consecutive live payloads, the first of which is the next batch."""
        count = len(payloads)
        if count == 1:
            self.deliver(first, payloads[0], replayed=False)
            return
        order, cross_check = self.order, self.cross_check
        if self.now > self._next_rank_at:
            self._read_rank(payloads[-1])
        if self.chain.wants_first_of_connection:
            self.chain.add_first_of_connection(NewestBatch(first, payloads[0], True))
        if cross_check.is_incomplete:
            cross_check.add_live(NewestBatch(first, payloads[0], True))
            if cross_check.all_unconfirmed and any(map(begins_with_clear, payloads)):
                cross_check.clear()
        name, rank, number, topic = repeat(self._name), repeat(self._rank), repeat(self.incarnation), repeat(self.topic)
        self.deliveries.extend(map(RawBatch, name, rank, number, range(first, first + count), repeat(False), payloads, topic))
        order.next_seq = first + count
        order.highest_known = max(order.highest_known, first + count - 1)
        newest = self.newest = NewestBatch(first + count - 1, payloads[-1], True)
        if cross_check.is_incomplete:
            cross_check.add_live(newest)
        self.has_delivered = True
        self.counters.delivered += count

    def _read_rank(self, payload: bytes) -> None:
        """Read the rank that a payload states. One payload per second is enough to notice swapped ports of ranks."""
        self._next_rank_at = self.now + _RANK_CHECK_SECONDS
        rank = rank_of(payload)
        if rank is not None and not self._states_ranks:
            self._states_ranks = self.stated_rank not in (None, rank)
            self.stated_rank = None if self._states_ranks else rank

    def drain(self) -> None:
        """Deliver the early batches that are next in order."""
        while True:
            if payloads := self.order.pop_live_run():
                self.deliver_run(self.order.next_seq, payloads)
            elif (batch := self.order.pop_next()) is not None:
                self.deliver(self.order.next_seq, batch.payload, replayed=batch.replayed)
            else:
                return

    def declare_gap(self, gap: GapEnd) -> None:
        """Give up the batches up to the end of a gap."""
        first, early = self.order.next_seq, self.early.get(1)
        count = gap.last + 1 - first
        self.order.next_seq = gap.last + 1
        if gap.last == 0 and early is not None and has_no_number_0(early.payload):
            self.drain()
            return
        self.deliveries.append(Gap(self._name, self._rank, first, gap.last, self.incarnation, gap.compacted))
        self.has_delivered = True
        if gap.compacted:
            self.counters.compacted += count
        else:
            self.counters.gaps += 1
            self.counters.lost += count
            self.degrade(DegradedReason.LOST)
        self.drain()

    def end_snapshot(self) -> None:
        """Stop waiting for parts of a snapshot, whether or not all parts have arrived."""
        if self.order.parts.is_open:
            self.order.parts.stop()
            self._degrade_if_truncated()
            self.drain()

    def _degrade_if_truncated(self) -> None:
        if self.order.parts.is_truncated:
            self.ledger.add(DegradedReason.LOST, self.order.parts.stopped_at)


_RANK_CHECK_SECONDS: Final = 1.0
"""Seconds between two checks of the rank that payloads state."""
