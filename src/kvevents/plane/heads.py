"""Rules that decide whether a bridge's record is the next one of a stream in the log, a duplicate, or neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from kvevents.plane.ledger import Half
from kvevents.plane.records import Batched, Join, Leave, Lost, Renewed, StreamRecord
from kvevents.stream import payload_digest


class Verdict(Enum):
    """What becomes of a record that a bridge has."""

    NEXT = "it comes next"
    KNOWN = "it is there"
    ADRIFT = "the log is of another life, or has left something out"


@dataclass(frozen=True, slots=True)
class Head:
    """Where a stream of the log ends, or will after what is under way or being composed."""

    card: bytes | None
    """None where the stream has not joined, or has left."""
    incarnation: int
    last_seq: int
    ended: bool
    """Whether nothing more counts of the incarnation."""
    agrees: bool
    """Whether the incarnation is known to be the life that the bridge follows."""
    newest: bytes | None
    """Its bytes; None where only their digest is known, or nothing."""
    digest: bytes | None = None
    half: Half | None = None
    """What there is of a batch in pieces."""

    @property
    def joined(self) -> bool:
        """Whether the stream is there."""
        return self.card is not None


# --- what comes next


def judge(head: Head, record: StreamRecord) -> Verdict:
    """What becomes of a record of a bridge, given where its stream ends."""
    of_kind: Callable[[Head, Any], Verdict] = _JUDGES[type(record)]
    return of_kind(head, record)


def _judge_join(head: Head, record: Join) -> Verdict:
    return Verdict.KNOWN if head.card == record.card else Verdict.NEXT


def _judge_leave(head: Head, _: Leave) -> Verdict:
    return Verdict.NEXT if head.joined else Verdict.KNOWN


def _judge_reset(head: Head, record: Renewed) -> Verdict:
    if not head.joined or record.incarnation not in {head.incarnation, head.incarnation + 1}:
        return Verdict.ADRIFT
    if record.incarnation > head.incarnation:
        return Verdict.NEXT
    # Another bridge may have written the number for a life that this one has not seen.
    return Verdict.KNOWN if _may_be_the_same(head) else Verdict.ADRIFT


def _judge_batch(head: Head, record: Batched) -> Verdict:
    if not _is_present(head, record.incarnation):
        return Verdict.ADRIFT
    if record.seq < head.last_seq:
        return Verdict.KNOWN
    if record.seq == head.last_seq:
        return Verdict.KNOWN if _is_same(head, record) else Verdict.ADRIFT
    follows = record.seq == head.last_seq + 1 and head.agrees
    return Verdict.NEXT if follows or head.last_seq < 0 else Verdict.ADRIFT


def _judge_gap(head: Head, record: Lost) -> Verdict:
    if not _is_present(head, record.incarnation):
        return Verdict.ADRIFT
    if record.last <= head.last_seq:
        return Verdict.KNOWN
    follows = record.first <= head.last_seq + 1 and head.agrees
    return Verdict.NEXT if follows or head.last_seq < 0 else Verdict.ADRIFT


def may_trust(head: Head, followed: int | None) -> bool:
    """Whether a bridge may say how far it trusts, given the incarnation that it follows."""
    return head.incarnation == followed and _may_be_the_same(head)


def _may_be_the_same(head: Head) -> bool:
    """Whether the log's life may be that of the bridge: before the first batch there is nothing that two could differ in."""
    return head.joined and (head.agrees or head.last_seq < 0)


def _is_present(head: Head, incarnation: int) -> bool:
    return head.joined and incarnation == head.incarnation and not head.ended


def _is_same(head: Head, record: Batched) -> bool:
    """Whether the log has this batch as its newest one. Where it has a gap there, only an earlier comparison shows it."""
    if head.newest is not None:
        return record.payload == head.newest
    return head.agrees if head.digest is None else head.digest == payload_digest(record.payload)


_JUDGES: Final[dict[type[Any], Callable[[Head, Any], Verdict]]] = {
    Join: _judge_join,
    Leave: _judge_leave,
    Batched: _judge_batch,
    Renewed: _judge_reset,
    Lost: _judge_gap,
}


# --- where the stream ends then


def as_written(head: Head, record: StreamRecord) -> StreamRecord:
    """A record as it is written: of a gap only what the log does not have."""
    if isinstance(record, Lost) and head.last_seq >= 0:
        return Lost(*record.key, record.incarnation, head.last_seq + 1, record.last, record.compacted)
    return record


def after(head: Head, record: StreamRecord, verdict: Verdict) -> Head:
    """Where the stream ends when the record is there."""
    move: Callable[[Head, Any, Verdict], Head] = _MOVES[type(record)]
    return move(head, record, verdict)


def _move_batch(head: Head, record: Batched, verdict: Verdict) -> Head:
    if verdict is Verdict.NEXT:
        # As `replace` does, for what there are thousands of on a page.
        return Head(head.card, head.incarnation, record.seq, head.ended, True, record.payload)
    # The newest batch has been compared. An earlier one cannot be.
    return replace(head, agrees=head.agrees or record.seq == head.last_seq)


def _move_gap(head: Head, record: Lost, verdict: Verdict) -> Head:
    if verdict is Verdict.NEXT:
        return replace(head, last_seq=record.last, agrees=True, newest=None, digest=None, half=None)
    return head


def _move_reset(head: Head, record: Renewed, verdict: Verdict) -> Head:
    if verdict is Verdict.NEXT:
        # Another bridge may be the first to write a batch of it: that one has to be compared.
        return Head(head.card, record.incarnation, -1, ended=False, agrees=False, newest=None)
    return head


def _move_join(head: Head, record: Join, __: Verdict) -> Head:
    return replace(head, card=record.card)


def _move_leave(head: Head, _: Leave, __: Verdict) -> Head:
    return replace(head, card=None, ended=True)


_MOVES: Final[dict[type[Any], Callable[[Head, Any, Verdict], Head]]] = {
    Join: _move_join,
    Leave: _move_leave,
    Batched: _move_batch,
    Renewed: _move_reset,
    Lost: _move_gap,
}
