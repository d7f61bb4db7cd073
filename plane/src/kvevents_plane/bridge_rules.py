"""Rules of a bridge, without I/O: which records it appends, which engines leave the log, and which other bridges are alive.

A record of a bridge is the next one of its stream in the log, a duplicate, or neither (`classify_record`).

An engine that is unreachable for `dead_seconds` leaves. If more than half of a bridge's engines, and at least two, are
unreachable at the same time, the bridge suspects its own network, and no engine leaves. When the network recovers, connections
return one after the other, so engines that are still unreachable get another `dead_seconds`.

An engine in the log that no bridge has claimed for `unclaimed_seconds` leaves, too: it was removed from the settings while no
bridge ran. If more than half of all engines in the log are unclaimed at the same time, the cause is probably a wrong setting or
a bridge that is down, and no engine leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from kvevents.stream import payload_digest, printable
from kvevents_plane.partition_state import LastHeartbeat, PartialBatch
from kvevents_plane.records import (
    BatchRecord,
    GapRecord,
    IncarnationRecord,
    JoinRecord,
    LeaveRecord,
    StreamKey,
    StreamRecord,
    TrustRecord,
    bridge_name,
)

log = logging.getLogger(__name__)


# --- records


class RecordVerdict(Enum):
    """Action that a bridge takes for one of its records."""

    APPEND = "the record is next"
    DUPLICATE = "the log has the record"
    DIVERGED = "the log has another incarnation, or lacks something before the record"


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """State of a stream in the log, or as it will be after the page in flight or the page that is being built."""

    registration: bytes | None
    """Registration of the engine, or None if the stream has not joined or has left."""
    incarnation: int
    last_seq: int
    has_ended: bool
    """Whether the incarnation accepts no further records."""
    agrees: bool
    """Whether the log's incarnation is known to be the incarnation that the bridge follows."""
    newest: bytes | None
    """Payload of the newest batch, or None if the payload is not known."""
    digest: bytes | None = None
    partial_batch: PartialBatch | None = None

    @property
    def is_joined(self) -> bool:
        """Whether the stream has joined."""
        return self.registration is not None


def classify_record(end: StreamEnd, record: StreamRecord) -> RecordVerdict:
    """Return what a bridge must do with a record, given the end of the record's stream."""
    match record:
        case BatchRecord() | GapRecord():
            return _classify_numbers(end, record)
        case JoinRecord():
            return RecordVerdict.DUPLICATE if end.registration == record.registration else RecordVerdict.APPEND
        case LeaveRecord():
            return RecordVerdict.APPEND if end.is_joined else RecordVerdict.DUPLICATE
        case IncarnationRecord() if end.is_joined and record.incarnation == end.incarnation + 1:
            return RecordVerdict.APPEND
        case IncarnationRecord() if record.incarnation == end.incarnation and _may_be_followed(end):
            # Another bridge might have used this number for an incarnation that this bridge has not seen.
            return RecordVerdict.DUPLICATE
    return RecordVerdict.DIVERGED


def _classify_numbers(end: StreamEnd, record: BatchRecord | GapRecord) -> RecordVerdict:
    first, last = (record.first, record.last) if isinstance(record, GapRecord) else (record.seq, record.seq)
    if not end.is_joined or end.has_ended or record.incarnation != end.incarnation:
        return RecordVerdict.DIVERGED
    if last <= end.last_seq:
        is_other = isinstance(record, BatchRecord) and last == end.last_seq and not _is_newest(end, record)
        return RecordVerdict.DIVERGED if is_other else RecordVerdict.DUPLICATE
    follows = first <= end.last_seq + 1 and end.agrees
    return RecordVerdict.APPEND if follows or end.last_seq < 0 else RecordVerdict.DIVERGED


def can_report_trust(end: StreamEnd, followed: int | None) -> bool:
    """Return whether the trust of a bridge that follows incarnation `followed` applies to the stream in the log."""
    return end.incarnation == followed and _may_be_followed(end)


def _may_be_followed(end: StreamEnd) -> bool:
    """Return whether the bridge might follow the log's incarnation. An incarnation without a batch can be any incarnation."""
    return end.is_joined and (end.agrees or end.last_seq < 0)


def _is_newest(end: StreamEnd, record: BatchRecord) -> bool:
    """Return whether a batch equals the log's newest batch, by an earlier comparison if the log now ends with a gap."""
    if end.newest is not None:
        return record.payload == end.newest
    return end.agrees if end.digest is None else end.digest == payload_digest(record.payload)


def trim_record(end: StreamEnd, record: StreamRecord) -> StreamRecord:
    """Return the record to write: a gap without the part that the log already has, any other record unchanged."""
    if isinstance(record, GapRecord) and end.last_seq >= 0:
        return GapRecord(*record.key, record.incarnation, end.last_seq + 1, record.last, record.compacted)
    return record


def advance_end(end: StreamEnd, record: StreamRecord, verdict: RecordVerdict) -> StreamEnd:
    """Return the end of the stream after the record."""
    if verdict is RecordVerdict.DUPLICATE:
        # Only the newest batch was compared with the log's batch of the same number.
        return replace(end, agrees=True) if isinstance(record, BatchRecord) and record.seq == end.last_seq else end
    match record:
        case BatchRecord():
            # The constructor is faster than `replace`, which matters because a page has thousands of batches.
            return StreamEnd(end.registration, end.incarnation, record.seq, end.has_ended, True, record.payload)
        case GapRecord():
            return replace(end, last_seq=record.last, agrees=True, newest=None, digest=None, partial_batch=None)
        case IncarnationRecord():
            # If another bridge writes the first batch of the incarnation, that batch must be compared: `agrees` is False.
            return StreamEnd(end.registration, record.incarnation, -1, has_ended=False, agrees=False, newest=None)
        case JoinRecord():
            return replace(end, registration=record.registration)
    return replace(end, registration=None, has_ended=True)  # a `LeaveRecord`


# --- engines and other bridges

REACHED_STATES: Final = frozenset({"EXACT", "DEGRADED", "REPLAYING"})
"""Trust states of a stream that show that its engine is reachable."""
MIN_ABSENT_ENGINES: Final = 2
"""Minimum number of absent engines for a suspicion. A single absent engine can have an unrelated cause."""


def _describe_suspicion(joined: Collection[StreamKey], absent: Collection[StreamKey], text: str) -> str:
    """Return `text` with the numbers of absent engines and of all engines. Return "" unless more than half are absent."""
    engines, missing = len({source for source, _ in joined}), len({source for source, _ in absent})
    return text.format(missing, engines) if missing >= MIN_ABSENT_ENGINES and missing * 2 > engines else ""


class EngineLiveness:
    """Reachability of one bridge's engines."""

    def __init__(self, dead_seconds: float) -> None:
        self.suspicion = ""
        """Why the bridge suspects its own network; empty if it has no suspicion."""
        self._dead_seconds: Final = dead_seconds
        self.reports: dict[StreamKey, TrustRecord] = {}
        """Newest report about each stream whose trust is known. An unreachable stream without an entry stays unreachable."""
        self._unreachable_since: dict[StreamKey, float] = {}

    def forget(self, key: StreamKey) -> None:
        """Remove a stream that is no longer followed."""
        self.reports.pop(key, None)
        self._unreachable_since.pop(key, None)

    def is_reached(self, key: StreamKey) -> bool:
        """Return whether the stream's engine is reachable."""
        report = self.reports.get(key)
        return report is not None and report.trust in REACHED_STATES

    def dead_streams(self, joined: Collection[StreamKey], now: float) -> list[StreamKey]:
        """Return the streams of `joined` that were unreachable for `dead_seconds`. Call this periodically, to take samples."""
        since = self._unreachable_since
        unreachable = [key for key in joined if not self.is_reached(key) and (key in self.reports or key in since)]
        since = {key: since.get(key, now) for key in unreachable}
        # A short outage removes no engine, so only a long outage makes the bridge suspect its network.
        is_long = max((now - began for began in since.values()), default=0.0) > self._dead_seconds / 2
        suspicion = _describe_suspicion(joined, unreachable, "{} of {} engines are unreachable") if is_long else ""
        if bool(suspicion) != bool(self.suspicion):
            text = f"{suspicion}: suspecting the network, removing none of them" if suspicion else "engines are reachable again"
            log.warning("%s", text)
            since = since if suspicion else dict.fromkeys(since, now)
        self._unreachable_since, self.suspicion = since, suspicion
        return [] if suspicion else [key for key, began in since.items() if now - began > self._dead_seconds]


class UnclaimedEngines:
    """The engines in the log that no bridge claims, according to what one bridge has read."""

    def __init__(self, unclaimed_seconds: float) -> None:
        self.engines = 0
        """Number of engines that no bridge claims."""
        self.suspicion = ""
        """Why unclaimed engines do not leave the log; empty if they leave."""
        self._unclaimed_seconds: Final = unclaimed_seconds
        self._since: dict[StreamKey, float] = {}

    def clear(self) -> None:
        """Forget how long engines have been unclaimed, because the bridge cannot know now which engines are claimed."""
        self._since.clear()

    def expired_streams(self, joined: Collection[StreamKey], unclaimed: Collection[StreamKey], now: float) -> list[StreamKey]:
        """Return the streams that were unclaimed for the time limit. Call this periodically: each call takes a sample."""
        self._since = {key: self._since.get(key, now) for key in unclaimed}
        self.engines = len({source for source, _ in unclaimed})
        reason = _describe_suspicion(joined, unclaimed, "no bridge claims {} of the {} engines in the log")
        if bool(reason) != bool(self.suspicion):
            text = f"{reason}: removing none of them; check that all bridges run, and their settings" if reason else ""
            log.warning("%s", text or "bridges claim most engines in the log again")
        self.suspicion = reason
        return [] if reason else [key for key, since in self._since.items() if now - since > self._unclaimed_seconds]


class BridgePeers:
    """The other bridges that write to one partition, according to what one bridge has read.

    `heartbeats` returns each bridge's newest heartbeat in the partition. A bridge is alive only if its heartbeat arrived after
    this bridge had started.
    """

    def __init__(self, own_id: str, heartbeats: Callable[[], Mapping[str, LastHeartbeat]]) -> None:
        self._own_id: Final = own_id
        self._heartbeats: Final = heartbeats
        self._arrivals: dict[str, tuple[int, float]] = {}
        """Position and time of arrival of each bridge's newest heartbeat."""
        self._first_own: int | None = None
        """Position of the oldest known heartbeat of this bridge."""

    def restart(self) -> None:
        """Forget the position of this bridge's oldest heartbeat. Call this when the partition is read again."""
        self._first_own = None

    def update(self, now: float) -> None:
        """Record the arrival times of new heartbeats."""
        heartbeats = self._heartbeats()
        for bridge, last in heartbeats.items():
            if self._arrivals.get(bridge, (-1, now))[0] != last.position:
                self._arrivals[bridge] = last.position, now
        if len(self._arrivals) > len(heartbeats):
            self._arrivals = {bridge: arrival for bridge, arrival in self._arrivals.items() if bridge in heartbeats}

    def is_alive(self, bridge: str, now: float, intervals: float = 1.0) -> bool:
        """Return whether a heartbeat of another bridge has arrived recently, within `intervals` times its `alive_seconds`."""
        last, arrival = self._heartbeats().get(bridge), self._arrivals.get(bridge)
        return last is not None and arrival is not None and now - arrival[1] < intervals * last.record.alive_seconds

    def has_other(self, now: float) -> bool:
        """Return whether another bridge is alive."""
        return any(self.is_alive(bridge, now) for bridge in self._heartbeats() if bridge != self._own_id)

    def name_conflict(self, now: float) -> str:
        """Return the process of another bridge with this bridge's name; empty if no other bridge has this name.

        A bridge that started earlier counts only if it writes after this bridge has written.
        """
        heartbeats = self._heartbeats()
        if self._first_own is None and (own := heartbeats.get(self._own_id)) is not None:
            self._first_own = own.position
        for bridge, last in heartbeats.items():
            is_behind = self._first_own is not None and last.position > self._first_own
            has_same_name = bridge != self._own_id and bridge_name(bridge) == bridge_name(self._own_id)
            if is_behind and has_same_name and self.is_alive(bridge, now):
                return printable(last.record.process) or "another process"
        return ""
