"""Rules that decide whether a bridge's record is the next one of its stream in the log, a duplicate, or neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from kvevents.plane.partition_state import PartialBatch
from kvevents.plane.records import BatchRecord, GapRecord, IncarnationRecord, JoinRecord, LeaveRecord, StreamRecord
from kvevents.stream import payload_digest


class RecordVerdict(Enum):
    """What happens to a bridge's record."""

    APPEND = "the record is next"
    DUPLICATE = "the log has the record"
    DIVERGED = "the log has another incarnation, or lacks something before the record"


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The state at the end of a stream: in the log, or as it will be after the page in flight or the page being built."""

    registration: bytes | None
    """None if the stream has not joined, or has left."""
    incarnation: int
    last_seq: int
    has_ended: bool
    """Whether the incarnation accepts no more records."""
    agrees: bool
    """Whether the incarnation is known to be the one that the bridge follows."""
    newest: bytes | None
    """Bytes of the newest batch; None if only its digest is known, or nothing."""
    digest: bytes | None = None
    partial_batch: PartialBatch | None = None

    @property
    def is_joined(self) -> bool:
        """Whether the stream has joined."""
        return self.registration is not None


# --- classify a record


def classify(end: StreamEnd, record: StreamRecord) -> RecordVerdict:
    """Return what happens to a bridge's record at the end of its stream."""
    rule: Callable[[StreamEnd, Any], RecordVerdict] = _CLASSIFY[type(record)]
    return rule(end, record)


def _classify_join(end: StreamEnd, record: JoinRecord) -> RecordVerdict:
    return RecordVerdict.DUPLICATE if end.registration == record.registration else RecordVerdict.APPEND


def _classify_leave(end: StreamEnd, _: LeaveRecord) -> RecordVerdict:
    return RecordVerdict.APPEND if end.is_joined else RecordVerdict.DUPLICATE


def _classify_incarnation(end: StreamEnd, record: IncarnationRecord) -> RecordVerdict:
    if not end.is_joined or record.incarnation not in {end.incarnation, end.incarnation + 1}:
        return RecordVerdict.DIVERGED
    if record.incarnation > end.incarnation:
        return RecordVerdict.APPEND
    # Another bridge may have written the number for an incarnation that this bridge has not seen.
    return RecordVerdict.DUPLICATE if _is_maybe_same(end) else RecordVerdict.DIVERGED


def _classify_batch(end: StreamEnd, record: BatchRecord) -> RecordVerdict:
    if not _is_current(end, record.incarnation):
        return RecordVerdict.DIVERGED
    if record.seq < end.last_seq:
        return RecordVerdict.DUPLICATE
    if record.seq == end.last_seq:
        return RecordVerdict.DUPLICATE if _is_newest(end, record) else RecordVerdict.DIVERGED
    follows = record.seq == end.last_seq + 1 and end.agrees
    return RecordVerdict.APPEND if follows or end.last_seq < 0 else RecordVerdict.DIVERGED


def _classify_gap(end: StreamEnd, record: GapRecord) -> RecordVerdict:
    if not _is_current(end, record.incarnation):
        return RecordVerdict.DIVERGED
    if record.last <= end.last_seq:
        return RecordVerdict.DUPLICATE
    follows = record.first <= end.last_seq + 1 and end.agrees
    return RecordVerdict.APPEND if follows or end.last_seq < 0 else RecordVerdict.DIVERGED


def can_report_trust(end: StreamEnd, followed: int | None) -> bool:
    """Return whether a bridge that follows incarnation `followed` can report its trust in the stream."""
    return end.incarnation == followed and _is_maybe_same(end)


def _is_maybe_same(end: StreamEnd) -> bool:
    """Return whether the log can have the bridge's incarnation: before the first batch nothing distinguishes two."""
    return end.is_joined and (end.agrees or end.last_seq < 0)


def _is_current(end: StreamEnd, incarnation: int) -> bool:
    return end.is_joined and incarnation == end.incarnation and not end.has_ended


def _is_newest(end: StreamEnd, record: BatchRecord) -> bool:
    """Return whether a batch is the log's newest one. If the log has a gap there, only an earlier comparison shows it."""
    if end.newest is not None:
        return record.payload == end.newest
    return end.agrees if end.digest is None else end.digest == payload_digest(record.payload)


_CLASSIFY: Final[dict[type[Any], Callable[[StreamEnd, Any], RecordVerdict]]] = {
    JoinRecord: _classify_join,
    LeaveRecord: _classify_leave,
    BatchRecord: _classify_batch,
    IncarnationRecord: _classify_incarnation,
    GapRecord: _classify_gap,
}


# --- advance the end


def trim(end: StreamEnd, record: StreamRecord) -> StreamRecord:
    """Return the record to write: of a gap, only the part that the log lacks."""
    if isinstance(record, GapRecord) and end.last_seq >= 0:
        return GapRecord(*record.key, record.incarnation, end.last_seq + 1, record.last, record.compacted)
    return record


def advance(end: StreamEnd, record: StreamRecord, verdict: RecordVerdict) -> StreamEnd:
    """Return the end of the stream after the record."""
    rule: Callable[[StreamEnd, Any, RecordVerdict], StreamEnd] = _ADVANCE[type(record)]
    return rule(end, record, verdict)


def _advance_batch(end: StreamEnd, record: BatchRecord, verdict: RecordVerdict) -> StreamEnd:
    if verdict is RecordVerdict.APPEND:
        # Faster than `replace`, for records of which a page has thousands.
        return StreamEnd(end.registration, end.incarnation, record.seq, end.has_ended, True, record.payload)
    # The newest batch was compared; an earlier one cannot be.
    return replace(end, agrees=end.agrees or record.seq == end.last_seq)


def _advance_gap(end: StreamEnd, record: GapRecord, verdict: RecordVerdict) -> StreamEnd:
    if verdict is RecordVerdict.APPEND:
        return replace(end, last_seq=record.last, agrees=True, newest=None, digest=None, partial_batch=None)
    return end


def _advance_incarnation(end: StreamEnd, record: IncarnationRecord, verdict: RecordVerdict) -> StreamEnd:
    if verdict is RecordVerdict.APPEND:
        # Another bridge may write the first batch of the incarnation, which must then be compared.
        return StreamEnd(end.registration, record.incarnation, -1, has_ended=False, agrees=False, newest=None)
    return end


def _advance_join(end: StreamEnd, record: JoinRecord, __: RecordVerdict) -> StreamEnd:
    return replace(end, registration=record.registration)


def _advance_leave(end: StreamEnd, _: LeaveRecord, __: RecordVerdict) -> StreamEnd:
    return replace(end, registration=None, has_ended=True)


_ADVANCE: Final[dict[type[Any], Callable[[StreamEnd, Any, RecordVerdict], StreamEnd]]] = {
    JoinRecord: _advance_join,
    LeaveRecord: _advance_leave,
    BatchRecord: _advance_batch,
    IncarnationRecord: _advance_incarnation,
    GapRecord: _advance_gap,
}
