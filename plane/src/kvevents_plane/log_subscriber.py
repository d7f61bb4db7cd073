"""A subscriber whose streams come from a plane's log, with the interface of `kvevents.Subscriber`.

Partition readers put messages into its queue. The thread that calls `receive_many` applies the messages, and owns all state of
the subscriber except the members that `LogSubscriber` lists. A stream's trust is the best report of any bridge that is alive.
The subscriber lowers this trust for gaps, invalid records, heartbeats that do not match, and partitions that cannot be read.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import exp
from typing import Final, NamedTuple

import msgspec

from kvevents.errors import ClosedError, UnknownSourceError
from kvevents.stream import (
    BatchReport,
    Checkpoint,
    DegradedReason,
    Gap,
    RawBatch,
    RawDelivery,
    Reset,
    Source,
    StreamCounters,
    Trust,
    TrustLedger,
    printable,
)
from kvevents.subscriber import Sink, StreamStatus
from kvevents_plane.digests import PartitionDigest
from kvevents_plane.partition_state import InvalidRecord, PartitionEvent, PartitionState, StreamJoined, StreamLeft, StreamState
from kvevents_plane.records import CONFLICT_INTERVALS, ReceivedMessage, StreamKey, TrustRecord, bridge_name, stream_text
from kvevents_plane.settings import ReaderLimits

log = logging.getLogger(__name__)

PAGES_PER_TURN: Final = 16
"""Maximum number of pages that are applied before their deliveries are returned."""
DEFAULT_LIMITS: Final = ReaderLimits()
DELAY_DECAY_SECONDS: Final = 20.0
"""Seconds in which a measured delay decays by two thirds. So a constant delay is forgotten: it shows that the bridge's clock
stopped for a time, not that heartbeats are late."""
_STATES_BEST_FIRST: Final = ("EXACT", "DEGRADED", "REPLAYING", "STALE", "CONNECTING")
_CURRENT_STATES: Final = frozenset({"EXACT", "DEGRADED"})
"""Reported trust states of a stream that a bridge follows up to the newest batch."""
_REASON_TEXTS: Final[Mapping[DegradedReason, str]] = {
    DegradedReason.LOST: "the log lacks batches",
    DegradedReason.REJECTED: "the log has a record that no bridge writes, or the engine sent events that could not be read",
    DegradedReason.DIVERGED: "the engine's digest differs from the log",
    DegradedReason.UNATTESTED: "the engine's own cache differs from the log",
    DegradedReason.SENDER: "the engine does not trust its own events, or its snapshot is incomplete",
}


class _QueuedMessage(NamedTuple):
    partition: int
    state: PartitionState | None
    """The state of the partition for which the message was read. If the partition is added again, its state is another object.
    """
    message: ReceivedMessage
    received_at: float


class PartitionProgress(NamedTuple):
    """How far one partition was read."""

    position: int
    lag: int | None
    """Number of pages after the newest page in the index, as the servers reported with that page; None if unknown."""
    fault: str
    """Why the partition cannot be read at the moment; empty if it can."""
    stored_at: float | None
    """Time at which the servers stored the newest page, by the servers' clock."""
    awaited: int = 0
    """Position of the newest page that the servers had at the time `awaited_since`. When that page is read, both are set again.
    """
    awaited_since: float = 0.0
    is_complete: bool = False
    """Whether the partition has been read to its end at any time."""
    is_broken: bool = False
    """Whether pages that were read might be wrong. If so, `fault` remains until the partition is added again."""


class _Heartbeat(NamedTuple):
    """The newest heartbeat of a bridge in a partition."""

    position: int
    received_at: float
    uptime: float
    """Value of the bridge's monotonic clock when the heartbeat was sent."""
    delay: float
    """Seconds by which the heartbeat took longer than the fastest of the earlier heartbeats."""
    is_live: bool
    """Whether the heartbeat arrived after the partition was first read to its end. An earlier heartbeat might be old."""

    def follow(self, position: int, received_at: float, uptime: float, *, is_live: bool) -> _Heartbeat:
        """Return the state of the next heartbeat. After a stop of a server or replica, some heartbeats arrive late."""
        passed = received_at - self.received_at
        delay = 0.0
        if uptime and self.uptime:
            delay = max(0.0, self.delay * exp(-passed / DELAY_DECAY_SECONDS) + passed - (uptime - self.uptime))
        return _Heartbeat(position, received_at, uptime, delay, is_live)


@dataclass(slots=True, eq=False)
class _ObservedIncarnation:
    """The records of one incarnation of a stream that this subscriber has received."""

    incarnation: int
    has_batch: bool = False
    ledger: TrustLedger = field(default_factory=TrustLedger)
    snapshot_end: int = -1
    """Last batch number that an engine's snapshot represents; -1 as soon as the index contains the whole snapshot."""
    heartbeat_seq: int = -1
    """Number of the batch with the newest heartbeat."""

    def add_report(self, seq: int, report: BatchReport) -> bool:
        """Add the report about batch `seq`. Return whether the index differs from the engine for no known reason.

        As in `kvevents.stream`, a clear, a matching digest or a matching attestation ends only the reasons of batches before
        `seq`, even if the report arrives late. If the digest matches, the index is right, and a mismatched attestation has
        another cause.
        """
        ledger = self.ledger
        if report.cleared:
            ledger.clear(seq)
        if any(rejection.loses_events for rejection in report.rejected):
            ledger.record_rejection(seq)
        heartbeat = report.heartbeat
        if heartbeat is not None and seq > self.heartbeat_seq:
            self.heartbeat_seq = seq
            ledger.discard(DegradedReason.SENDER)
            if heartbeat.trust != Trust.EXACT.name:
                ledger.add(DegradedReason.SENDER, seq)
        is_whole = report.cleared if heartbeat is None else heartbeat.trust == Trust.EXACT.name
        if is_whole and seq > self.snapshot_end:
            # Each batch of a snapshot has a heartbeat, but only the last batch's heartbeat is EXACT.
            self.snapshot_end = -1
        if report.digest_matches:
            ledger.match_digest(seq)
        if report.attestation_matches:
            ledger.match_attestation(seq)
        is_explained = report.digest_matches is True or ledger.explains(seq)
        is_unattested = report.attestation_matches is False and ledger.record_attestation_mismatch(seq)
        is_diverged = report.digest_matches is False and ledger.record_digest_mismatch(seq)
        return (is_diverged or is_unattested) and not is_explained


class LogSubscriber:
    """Subscribes to the streams of the partitions that were added with `add_partition`.

    Any thread may call `put`, `report_progress` and `mark_broken`, and read `partitions`, `states`, `registrations` and
    `digests`. All other members belong to one thread. `digest` returns a stream's digest in the index; it is called when the
    index contains all deliveries that were returned before.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        digest: Callable[[StreamKey], str | None],
        sink: Sink | None = None,
        limits: ReaderLimits = DEFAULT_LIMITS,
    ) -> None:
        self.states: Mapping[int, PartitionState] = {}
        """State of each partition; the dict is replaced as a whole."""
        self.registrations: Mapping[StreamKey, bytes] = {}
        """Registration of each joined stream; the dict is replaced as a whole."""
        self.diverged = 0
        """Number of heartbeats whose digest or attestation differed from the index for no known reason."""
        self.digests: dict[int, tuple[PartitionDigest, ...]] = {}
        """For each partition, the newest digests for the intervals in `ReaderLimits.digest_intervals`, without repetitions."""
        self._digests_by_interval: dict[int, dict[int, PartitionDigest]] = {}
        """The newest digest for each partition and interval."""
        self._digest: Final = digest
        self._due: list[int] = []
        """Partitions whose digest must be computed before further deliveries are returned."""
        self._sink: Final = sink
        """Applies deliveries before `receive_many` returns them, and returns reports about the deliveries."""
        self._clock: Final = clock
        self._limits: Final = limits
        self._queue: deque[_QueuedMessage] = deque()
        # The thread of the readers changes only the first counter, the thread of the deliveries only the second.
        self._put_bytes = self._taken_bytes = 0
        self._wake = threading.Event()
        self._is_closed = self._has_membership_changed = False
        self.partitions: dict[int, PartitionProgress] = {}
        """Progress of each partition."""
        self._partitions_lock: Final = threading.Lock()
        """Held while `partitions` changes, because the thread of the deliveries and the thread of the readers change it."""
        self._partition_of: dict[StreamKey, int] = {}
        self._observed: dict[StreamKey, _ObservedIncarnation] = {}
        """What this subscriber has seen of the current incarnation of each stream that had a delivery."""
        self._counters: dict[StreamKey, StreamCounters] = {}
        self._heartbeats: dict[tuple[int, str], _Heartbeat] = {}
        """The newest heartbeat for each partition and bridge."""
        self._complete_at: dict[int, float] = {}
        """Arrival time of the message with which a partition was first read to its end."""

    # --- methods for any thread

    def put(self, partition: int, messages: list[ReceivedMessage]) -> None:
        """Queue the next messages of a partition."""
        self._put_bytes += sum(len(message.data) for message in messages)
        state = self.states.get(partition)
        now = self._clock()
        self._queue.extend(_QueuedMessage(partition, state, message, now) for message in messages)
        self._wake.set()

    def report_progress(self, partition: int, lag: int | None, fault: str) -> None:
        """Update the progress of a partition. The readers call this if no messages arrive."""
        with self._partitions_lock:
            known = self.partitions.get(partition)
            if known is None or known.is_broken:  # no reader reads the partition any more
                return
            if lag == 0 and not fault and not self._queue:
                known = known._replace(lag=0, awaited=0, is_complete=True)
            elif lag is None:
                known = known._replace(lag=None)
            self.partitions[partition] = known._replace(fault=fault)

    def mark_broken(self, partition: int, reason: str) -> None:
        """Record that pages that were read might be wrong.

        The partition's streams are STALE until the partition is added again. Messages that were not applied yet are ignored.
        """
        with self._partitions_lock:
            if (known := self.partitions.get(partition)) is not None:
                self.partitions[partition] = known._replace(lag=None, fault=reason, is_complete=False, is_broken=True)

    @property
    def queued_bytes(self) -> int:
        """Number of bytes in the messages that were not applied yet."""
        return self._put_bytes - self._taken_bytes

    def bridges(self) -> int:
        """Return the number of bridges that are alive."""
        return len({bridge for partition, bridge in list(self._heartbeats) if self._is_alive(partition, bridge)})

    def is_complete(self, partition: int) -> bool:
        """Return whether a partition has been read to its end. Call this in the follower's thread after an index update."""
        known = self.partitions.get(partition)
        return known is not None and known.is_complete

    # --- partitions

    def add_partition(
        self, partition: int, state: PartitionState, degraded_reasons: Mapping[StreamKey, frozenset[DegradedReason]]
    ) -> None:
        """Apply messages of a partition after the position of `state`. The index must have exactly the streams of `state`."""
        if partition in self.states:
            self._drop_partition(partition)
        with self._partitions_lock:
            self.partitions = {**self.partitions, partition: PartitionProgress(state.position, None, "", None)}
        self.states = {**self.states, partition: state}
        self._partition_of.update(dict.fromkeys(state.streams, partition))
        for key, stream in state.streams.items():
            observed = self._observed[key] = _ObservedIncarnation(stream.incarnation, has_batch=stream.last_seq >= 0)
            for reason in degraded_reasons.get(key, ()):
                observed.ledger.add(reason, stream.last_seq)
        self.registrations = _registrations(self.states.values())

    def _drop_partition(self, partition: int) -> None:
        state = self.states[partition]
        self.states = {number: state for number, state in self.states.items() if number != partition}
        with self._partitions_lock:
            self.partitions = {number: progress for number, progress in self.partitions.items() if number != partition}
        self.digests = {number: digests for number, digests in self.digests.items() if number != partition}
        self._digests_by_interval.pop(partition, None)
        self._due = [number for number in self._due if number != partition]
        self._complete_at.pop(partition, None)
        self._heartbeats = {key: heartbeat for key, heartbeat in self._heartbeats.items() if key[0] != partition}
        for key in state.streams:
            self._partition_of.pop(key, None)
            self._observed.pop(key, None)
            self._counters.pop(key, None)

    # --- deliveries

    def receive_many(self, timeout: float | None = None, limit: int | None = None) -> list[RawDelivery]:  # noqa: ARG002 - an interface
        """Return new deliveries in order; an empty list if none arrives within `timeout` seconds."""
        if self._is_closed:
            raise ClosedError("cannot receive: the LogSubscriber is closed")
        self._compute_digests()
        if not self._queue:
            self._wake.wait(timeout)
        self._wake.clear()
        deliveries: list[RawDelivery] = []
        for _ in range(min(PAGES_PER_TURN, len(self._queue))):
            queued = self._queue.popleft()
            self._taken_bytes += len(queued.message.data)
            deliveries += self._apply(queued)
            if self._due:
                break
        if deliveries and self._sink is not None:
            for delivery, outcome in zip(deliveries, self._sink.apply_many(deliveries), strict=True):
                self.report(delivery, outcome.report)
        if self._has_membership_changed:
            self._has_membership_changed = False
            self.registrations = _registrations(self.states.values())
        if self._queue:
            self._wake.set()
        return deliveries

    def _compute_digests(self) -> None:
        """Compute the digests that are due. The index must contain exactly the pages up to their position."""
        while self._due:
            partition = self._due.pop()
            state = self.states[partition]
            digests = {key: digest for key in state.registrations() if (digest := self._digest(key)) is not None}
            combined = PartitionDigest.combine(state.position, digests)
            known = self._digests_by_interval.setdefault(partition, {})
            known.update({pages: combined for pages in self._limits.digest_intervals if combined.position % pages == 0})
            self.digests[partition] = tuple(dict.fromkeys(known.values()))

    def _apply(self, queued: _QueuedMessage) -> list[RawDelivery]:
        partition, state, message, received_at = queued
        if state is None or self.states.get(partition) is not state or self.partitions[partition].is_broken:
            return []
        is_live = self.partitions[partition].is_complete
        events = state.receive(message, partition)
        if message.position % self._limits.digest_intervals[0] == 0 and not state.unknown_prefix:
            self._due.append(partition)
        self._advance(partition, message, received_at)
        for bridge, last in state.heartbeats.items():
            known = self._heartbeats.get((partition, bridge), _Heartbeat(-1, received_at, 0.0, 0.0, is_live))
            if known.position != last.position:
                following = known.follow(last.position, received_at, last.record.uptime, is_live=is_live)
                self._heartbeats[partition, bridge] = following
        return [delivery for event in events if (delivery := self._deliver(partition, event)) is not None]

    def _advance(self, partition: int, message: ReceivedMessage, received_at: float) -> None:
        with self._partitions_lock:
            known = self.partitions[partition]._replace(position=message.position, stored_at=message.stored_at)
            if not known.is_broken:
                is_complete = known.is_complete or message.pending == 0
                known = known._replace(lag=message.pending, fault="", is_complete=is_complete)
                if is_complete:
                    self._complete_at.setdefault(partition, received_at)
                if message.position >= known.awaited:
                    known = known._replace(awaited=message.position + message.pending, awaited_since=received_at)
            self.partitions[partition] = known

    def _deliver(self, partition: int, event: PartitionEvent) -> RawDelivery | None:
        """Update the trust for an event, and return the delivery that the index must apply, or None if the index needs none."""
        if isinstance(event, RawBatch | Reset | Gap):
            self._count(event)
            return event
        if isinstance(event, StreamJoined | StreamLeft):
            self._partition_of[event.key] = partition
            self._has_membership_changed = True
        if isinstance(event, StreamLeft):
            # Data of a stream that leaves are removed here, because the stream can join again before any caller sees that it
            # had left.
            self._observed.pop(event.key, None)
            return Reset(*event.key, event.incarnation, f"the engine left the log: {printable(event.reason)}")
        if isinstance(event, InvalidRecord):
            log.error("partition %d, %s: invalid record: %s", partition, stream_text(event.key), event.reason)
            stream = self.states[partition].streams[event.key]
            # The reason gets the number after the last batch, so that no report about an earlier batch ends it.
            self._observe(event.key, stream.incarnation).ledger.add(DegradedReason.REJECTED, stream.last_seq + 1)
        return None

    def _observe(self, key: StreamKey, incarnation: int) -> _ObservedIncarnation:
        """Return the state of a stream's incarnation, and forget the previous incarnation."""
        observed = self._observed.get(key)
        if observed is None or observed.incarnation != incarnation:
            observed = self._observed[key] = _ObservedIncarnation(incarnation)
        return observed

    def _count(self, event: RawDelivery) -> None:
        key = (event.source, event.rank)
        counters = self._counters.setdefault(key, StreamCounters())
        observed = self._observe(key, event.incarnation)
        if isinstance(event, RawBatch):
            if not observed.has_batch:
                observed.has_batch = True
                if event.seq > 0:
                    observed.ledger.add(DegradedReason.LOST, event.seq - 1)
            counters.delivered += 1
            counters.replayed += event.replayed
        elif isinstance(event, Gap) and event.compacted:
            observed.has_batch, observed.snapshot_end = True, event.last
            counters.compacted += event.last - event.first + 1
        elif isinstance(event, Gap):
            counters.gaps += 1
            counters.lost += event.last - event.first + 1
            observed.ledger.add(DegradedReason.LOST, event.last)
        else:
            counters.resets += 1

    def report(self, delivery: RawDelivery, report: BatchReport | None) -> None:
        """Process the report about an applied batch. Ignore the report if the batch's incarnation has ended."""
        if report is None or not isinstance(delivery, RawBatch):
            return
        key = (delivery.source, delivery.rank)
        if report.heartbeat is not None:
            counters = self._counters.setdefault(key, StreamCounters())
            counters.heartbeats += 1
            counters.attestations_matched += report.attestation_matches is True
            counters.attestations_mismatched += report.attestation_matches is False
        observed = self._observed.get(key)
        if observed is not None and observed.incarnation == delivery.incarnation:
            # A difference with a known reason is not counted, because every index of the same log has that difference.
            self.diverged += observed.add_report(delivery.seq, report)

    # --- status of the streams

    def trust(self, name: str | None = None, rank: int = 0) -> Trust:
        """Return the trust in a stream."""
        key = (name or "", rank)
        partition, stream = self._find(key)
        progress = self.partitions[partition]
        if progress.fault:
            return Trust.STALE.with_reason(f"the log cannot be read: {progress.fault}")
        is_late = self._clock() - progress.awaited_since > self._limits.max_lag_seconds
        if not progress.is_complete or progress.lag is None or (progress.position < progress.awaited and is_late):
            return Trust.REPLAYING.with_reason("the log is being read")
        reported = self._best_trust(partition, stream)
        observed = self._observed.get(key)
        if reported != Trust.EXACT or observed is None:
            return reported
        if observed.snapshot_end >= 0:
            return Trust.REPLAYING.with_reason("a snapshot of the engine is being read")
        if observed.ledger:
            return Trust.DEGRADED.with_reason("; ".join(sorted(_REASON_TEXTS[reason] for reason in observed.ledger)))
        return Trust.ATTESTED if observed.ledger.is_attested else reported

    def trust_changes(self) -> list[tuple[StreamKey, Trust]]:
        """Return the trust in every stream. Trust can change without a message, because time passes."""
        return [(key, self.trust(*key)) for state in self.states.values() for key in state.registrations()]

    def _best_trust(self, partition: int, stream: StreamState) -> Trust:
        """Return the best report of the bridges that are alive."""
        if bridges := stream.differing_bridges(lambda bridge: self._may_be_alive(partition, bridge)):
            names = ", ".join(sorted({bridge_name(bridge) for bridge in bridges}))
            return Trust.STALE.with_reason(f"bridges {names} follow different engines under this name")
        if (best := self._best_report(partition, stream)) is not None:
            return Trust(best.trust, printable(best.reason))
        if stream.trust_reports:
            return Trust.STALE.with_reason("no bridge writes the stream's batches; check that one runs and can write")
        return Trust.REPLAYING.with_reason("no bridge has reported its trust in the stream yet")

    def _best_report(self, partition: int, stream: StreamState) -> TrustRecord | None:
        """Return the best report of the bridges that are alive, or None if no report exists."""
        reports = [
            self._current_report(partition, bridge, report)
            for bridge, report in stream.trust_reports.items()
            if self._is_alive(partition, bridge)
        ]
        order = {trust: place for place, trust in enumerate(_STATES_BEST_FIRST)}
        return min(reports, key=lambda report: order.get(report.trust, len(order)), default=None)

    def _current_report(self, partition: int, bridge: str, report: TrustRecord) -> TrustRecord:
        """Return a bridge's report; REPLAYING if the bridge lags, because its report covers only what it has read."""
        lag = self.states[partition].heartbeats[bridge].record.lag
        if not lag or report.trust not in _CURRENT_STATES:
            return report
        reason = f"bridge {bridge_name(bridge)} lags by {lag:.0f} s: the engines' events are not in the log yet"
        return msgspec.structs.replace(report, trust="REPLAYING", reason=reason)

    def _is_alive(self, partition: int, bridge: str, intervals: float = 1.0) -> bool:
        state, known = self.states.get(partition), self._heartbeats.get((partition, bridge))
        last = None if state is None else state.heartbeats.get(bridge)
        if last is None or known is None or not known.is_live:
            return False
        return self._clock() - known.received_at + known.delay < intervals * last.record.alive_seconds

    def _may_be_alive(self, partition: int, bridge: str) -> bool:
        """Return whether a bridge is alive, or might be: no heartbeat was due since the partition was first read."""
        state = self.states[partition]
        last, since = state.heartbeats.get(bridge), self._complete_at.get(partition, self._clock())
        is_due = last is None or self._clock() - since >= CONFLICT_INTERVALS * last.record.alive_seconds
        return not is_due or self._is_alive(partition, bridge, CONFLICT_INTERVALS)

    def _find(self, key: StreamKey) -> tuple[int, StreamState]:
        partition = self._partition_of.get(key)
        stream = None if partition is None else self.states[partition].streams.get(key)
        if partition is None or stream is None or stream.registration is None:
            raise UnknownSourceError(f"the log has no stream {stream_text(key)}; check the source and the rank")
        return partition, stream

    def status(self, name: str | None = None, rank: int = 0) -> StreamStatus:
        """Return trust, numbers and counters of one stream."""
        key = (name or "", rank)
        partition, stream = self._find(key)
        counters = self._counters.setdefault(key, StreamCounters())
        best, observed = self._best_report(partition, stream), self._observed.get(key)
        names = () if best is None else best.degraded_reasons
        reported = (DegradedReason[name] for name in names if name in DegradedReason.__members__)
        reasons = frozenset((*(() if observed is None else observed.ledger), *reported))
        trust, position = self.trust(*key), (stream.incarnation, stream.last_seq)
        return StreamStatus(*key, f"partition {partition}", trust, reasons, *position, waiting=0, counters=counters.copy())

    def statuses(self) -> list[StreamStatus]:
        """Return the status of every stream."""
        return [self.status(*key) for key in self.registrations]

    def degraded_reasons(self) -> dict[StreamKey, frozenset[DegradedReason]]:
        """Return the names of the degraded reasons of each degraded stream, for a snapshot."""
        reasons_by_stream = {
            key: frozenset((*observed.ledger, *((DegradedReason.LOST,) * (observed.snapshot_end >= 0))))
            for key, observed in self._observed.items()
        }
        return {key: reasons for key, reasons in reasons_by_stream.items() if reasons}

    # --- further methods of a subscriber, for the service

    def add(self, source: Source, resume: Checkpoint | None = None) -> None:
        """Do nothing: the bridges determine which engines are followed."""

    def remove(self, name: str, rank: int = 0) -> None:
        """Do nothing: the records of the log determine the streams."""

    def checkpoints(self) -> list[Checkpoint]:
        """Return no checkpoints: after a restart, a log is read again from its newest snapshot."""
        return []

    def close(self) -> None:
        """Make `receive_many` raise `ClosedError` from now on, and end a call that waits."""
        self._is_closed = True
        self._wake.set()


def _registrations(states: Iterable[PartitionState]) -> dict[StreamKey, bytes]:
    return {key: registration for state in states for key, registration in state.registrations().items()}
