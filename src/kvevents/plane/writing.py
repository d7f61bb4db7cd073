"""What a bridge writes next into a lane, given what is there.

Theory of operation. The server takes a page only if the lane ends where its writer believes (`Nats-Expected-Last-Sequence`). So
a writer that is refused reads what others have written, and composes anew. Of what it has itself it then finds

- what is there already: dropped. Before it writes anything of an incarnation that others have begun, the bridge must have
  seen that the log's newest batch is its own one, byte for byte; once is enough, since everybody else has done so too;
- what comes next: written;
- neither: it and the log have lost each other. The stream is *adrift* until the bridge follows it anew from where the log
  stands, which makes its publisher prove that it is the one that the log tells of, or begins a new incarnation.

Nothing is dropped because it was sent, only because it was read or acknowledged. So it does not matter which page was lost, or
whether the answer to one was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, NamedTuple

from kvevents.plane.ledger import Event, Ledger, Standing
from kvevents.plane.records import (
    VERSION,
    Batched,
    Beat,
    Blank,
    Join,
    Key,
    Leave,
    Lost,
    Page,
    Piece,
    Record,
    Renewed,
    StreamRecord,
    Trusting,
)
from kvevents.stream import RawBatch
from kvevents.stream.state import digest_of

RECORD_BYTES: Final = 96
"""Of a record beside its payload and its texts, at most."""
DOUBT_BYTES: Final = 32
"""Of a doubt's name and number, at most."""
MAX_RECORDS: Final = 2_000
"""Of one page."""


class Verdict(Enum):
    """What becomes of a record that a bridge has."""

    NEXT = "it comes next"
    KNOWN = "it is there"
    ADRIFT = "the log is of another life, or has left something out"


@dataclass(frozen=True, slots=True)
class Head:
    """Where a stream of the log ends, or will after what is being composed."""

    standing: Standing
    incarnation: int
    last_seq: int
    joined: bool
    ended: bool
    """Whether nothing more counts of the incarnation."""
    agrees: bool
    """Whether the incarnation is known to be the life that the bridge follows."""
    newest: bytes | None
    """Its bytes; None where only their digest is known, or nothing."""


@dataclass(slots=True)
class _Own:
    """What a bridge has of one stream that may not be in the log yet."""

    records: deque[tuple[float, StreamRecord, int]] = field(default_factory=deque)
    """Each with the moment from which on it may be written, and the bytes that it takes at most."""
    trusting: Trusting | None = None
    """To be said when all of them are there."""
    agreed: int | None = None
    """The incarnation of the log that is known to be the life that is followed here."""


@dataclass(slots=True)
class _Draft:
    """A page that is being written, and what of each stream it settles."""

    page: Page
    beat: Beat | None
    settled: list[_Settled]


class _Settled(NamedTuple):
    """How many of the first records of a stream are in the log then, and which incarnation is agreed upon."""

    key: Key
    done: int
    agreed: int | None
    trusting: Trusting | None


class Composer:
    """Composes the pages of one bridge for one lane. `ledger` is fed here, and by nobody else."""

    def __init__(self, ledger: Ledger, bridge: str, page_bytes: int) -> None:
        self.ledger: Final = ledger
        self.adrift: dict[Key, None] = {}
        """Streams to follow anew; `anchor` says that it was done."""
        self.queued_bytes = 0
        """Of what is not known to be in the log."""
        self.written = 0
        """Batches of the log that were written here."""
        self._bridge: Final = bridge
        self._page_bytes: Final = page_bytes
        self._own: dict[Key, _Own] = {}
        self._active: dict[Key, None] = {}
        """Streams with records, in turn."""
        self._beat: Beat | None = None
        self._draft: _Draft | None = None

    # --- what there is

    def anchor(self, key: Key) -> None:
        """The stream is followed from where the log stands: what was offered of it before is void."""
        self._drop(key)
        standing = self.ledger.streams.get(key)
        self._own[key] = _Own(agreed=None if standing is None or standing.last_seq < 0 else standing.incarnation)
        self.adrift.pop(key, None)

    def forget(self, key: Key) -> None:
        """The stream is followed no more."""
        self._drop(key)
        self._own.pop(key, None)
        self.adrift.pop(key, None)

    def offer(self, record: StreamRecord, due: float = 0.0) -> None:
        """Something of an anchored stream, in its order, to be written not before `due`. Void while it is adrift."""
        key = record.key
        own = self._own.get(key)
        if own is None or key in self.adrift:
            return
        self._active[key] = None
        if isinstance(record, Trusting):
            own.trusting = record
            return
        if isinstance(record, Renewed):
            own.trusting = None  # it was about the life before
        size = _size(record)
        own.records.append((due, record, size))
        self.queued_bytes += size

    def beat(self, beat: Beat) -> None:
        """Say with the next page that the bridge is alive."""
        self._beat = beat

    def due(self) -> float | None:
        """The moment from which on there is something to write; None where nothing waits."""
        if self._beat is not None:
            return 0.0
        waiting = [own for key in self._active if (own := self._own[key]).records or self._may_say(key, own)]
        return min((own.records[0][0] if own.records else 0.0 for own in waiting), default=None)

    def _may_say(self, key: Key, own: _Own) -> bool:
        return _may_trust(self._head(key, own))

    def waits(self, key: Key) -> bool:
        """Whether there are records of a stream that are not known to be in the log."""
        own = self._own.get(key)
        return own is not None and bool(own.records)

    @property
    def waiting(self) -> int:
        """Records that are not known to be in the log."""
        return sum(len(self._own[key].records) for key in self._active)

    def _drop(self, key: Key) -> None:
        own = self._own.get(key)
        self._active.pop(key, None)
        if own is not None:
            self.queued_bytes -= sum(size for _, _, size in own.records)
            own.records.clear()
            own.trusting = None

    # --- a page

    def compose(self, now: float, at: float) -> Page | None:
        """The next page, by the writer's clock at `at`; None if nothing is due.

        Say then what became of it: `landed`, or `returned`.
        """
        records: list[Record] = [] if self._beat is None else [self._beat]
        settled: list[_Settled] = []
        if self.ledger.hole:
            # No stream had as many incarnations as there was room for records.
            records.append(Blank((self.ledger.position + 1) * MAX_RECORDS, self.ledger.hole))
        else:
            self._fill(records, settled, now)
        if not records:
            return None
        page = Page(VERSION, self._bridge, at, records, self.ledger.life)
        self._draft = _Draft(page, self._beat, settled)
        return page

    def _fill(self, records: list[Record], settled: list[_Settled], now: float) -> None:
        room = self._page_bytes
        for key in list(self._active):
            taken, room = self._take(key, now, room, MAX_RECORDS - len(records), settled)
            records += taken
            if room <= 0 or len(records) >= MAX_RECORDS:
                break

    def _take(self, key: Key, now: float, room: int, count: int, settled: list[_Settled]) -> tuple[list[StreamRecord], int]:
        """What comes next of one stream, as far as there is room."""
        own = self._own[key]
        head = self._head(key, own)
        taken: list[StreamRecord] = []
        done = 0
        for due, record, size in own.records:
            if room <= 0 or len(taken) >= count:
                break
            verdict = _judge(head, record)
            if due > now and verdict is Verdict.NEXT:
                break
            if verdict is Verdict.ADRIFT:
                self._drop(key)
                self.adrift[key] = None
                return [], room
            if verdict is Verdict.NEXT:
                said = _said(head, record)
                if size > room:
                    if not taken and room == self._page_bytes and isinstance(said, Batched):
                        piece = self._piece(head, said)
                        taken.append(piece)
                        room = 0
                        if piece.offset + len(piece.payload) == piece.total:
                            head, done = _after(head, record, verdict), done + 1
                    break
                taken.append(said)
                room -= size
            head = _after(head, record, verdict)
            done += 1
        trusting = own.trusting if done == len(own.records) and _may_trust(head) else None
        if trusting is not None and (most := _size(trusting)) <= room and len(taken) < count:
            taken.append(trusting)
            room -= most
        else:
            trusting = None
        outcome = _Settled(key, done, head.incarnation if head.agrees else own.agreed, trusting)
        if taken:
            settled.append(outcome)
            self._move_back(key)
        else:
            self._settle(outcome)
        return taken, room

    def _head(self, key: Key, own: _Own) -> Head:
        standing = self.ledger.streams.get(key)
        if standing is None:
            return Head(Standing(None), self.ledger.floor, -1, joined=False, ended=False, agrees=False, newest=None)
        joined, newest = standing.card is not None, self.ledger.newest(key)
        ended, agrees = standing.ended or not joined, own.agreed == standing.incarnation
        return Head(standing, standing.incarnation, standing.last_seq, joined, ended, agrees, newest)

    def _piece(self, head: Head, record: Batched) -> Piece:
        """The next part of a batch that no page has room for: behind what is there of it."""
        half, offset = head.standing.half, 0
        if half is not None and (half.seq, half.total) == (record.seq, len(record.payload)):
            offset = half.size if _begins_with(record.payload, half.pieces) else 0
        part = record.payload[offset : offset + max(1, self._page_bytes - RECORD_BYTES - _length(record.source))]
        return Piece(*record.key, record.incarnation, record.seq, record.replayed, offset, len(record.payload), part)

    def _move_back(self, key: Key) -> None:
        """Let other streams be first next time."""
        del self._active[key]
        self._active[key] = None

    # --- what became of it

    def landed(self, position: int) -> list[Event]:
        """The page is in the lane, under this number. What it means to readers."""
        draft = self._draft
        if draft is None:
            return []
        self._draft = None
        if draft.beat is self._beat:
            self._beat = None
        found = self.ledger.feed(position, draft.page)
        for outcome in draft.settled:
            self._settle(outcome)
        self.written += sum(isinstance(event, RawBatch) for event in found)
        return found

    def returned(self) -> None:
        """The page is not known to be in the lane. Read what is, then compose anew."""
        self._draft = None

    def _settle(self, outcome: _Settled) -> None:
        own = self._own.get(outcome.key)
        if own is None:
            return
        for _ in range(outcome.done):
            self.queued_bytes -= own.records.popleft()[2]
        own.agreed = outcome.agreed
        if own.trusting is outcome.trusting:
            own.trusting = None
        if not own.records and own.trusting is None:
            self._active.pop(outcome.key, None)

    def read(self, position: int, page: Page) -> list[Event]:
        """A page of somebody, or one of ours of which it was not known that it had landed. What it means to readers."""
        return self.ledger.feed(position, page)


def _size(record: StreamRecord) -> int:
    """Bytes that a record takes in a page, at most."""
    size = RECORD_BYTES + _length(record.source)
    if isinstance(record, Batched | Piece):
        return size + len(record.payload)
    size += len(getattr(record, "card", b"")) + _length(getattr(record, "reason", ""))
    if isinstance(record, Trusting):
        size += _length(record.bridge) + DOUBT_BYTES * len(record.doubts)
    return size


def _length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _begins_with(payload: bytes, pieces: Sequence[bytes]) -> bool:
    offset = 0
    for piece in pieces:
        if not payload.startswith(piece, offset):
            return False
        offset += len(piece)
    return True


# --- what comes next


def _judge(head: Head, record: StreamRecord) -> Verdict:
    judge: Callable[[Head, Any], Verdict] = _JUDGES[type(record)]
    return judge(head, record)


def _judge_join(head: Head, record: Join) -> Verdict:
    return Verdict.KNOWN if head.joined and head.standing.card == record.card else Verdict.NEXT


def _judge_leave(head: Head, _: Leave) -> Verdict:
    return Verdict.NEXT if head.joined else Verdict.KNOWN


def _judge_reset(head: Head, record: Renewed) -> Verdict:
    if not head.joined or record.incarnation not in {head.incarnation, head.incarnation + 1}:
        return Verdict.ADRIFT
    return Verdict.NEXT if record.incarnation > head.incarnation else Verdict.KNOWN


def _judge_batch(head: Head, record: Batched) -> Verdict:
    if not _is_present(head, record.incarnation):
        return Verdict.ADRIFT
    if record.seq < head.last_seq:
        return Verdict.KNOWN
    if record.seq == head.last_seq:
        return Verdict.ADRIFT if _is_another(head, record) else Verdict.KNOWN
    follows = record.seq == head.last_seq + 1 and head.agrees
    return Verdict.NEXT if follows or head.last_seq < 0 else Verdict.ADRIFT


def _judge_gap(head: Head, record: Lost) -> Verdict:
    if not _is_present(head, record.incarnation):
        return Verdict.ADRIFT
    if record.last <= head.last_seq:
        return Verdict.KNOWN
    follows = record.first <= head.last_seq + 1 and head.agrees
    return Verdict.NEXT if follows or head.last_seq < 0 else Verdict.ADRIFT


def _may_trust(head: Head) -> bool:
    """Before its first batch there is nothing that two lives could differ in."""
    return head.joined and (head.agrees or head.last_seq < 0)


def _is_present(head: Head, incarnation: int) -> bool:
    return head.joined and incarnation == head.incarnation and not head.ended


def _is_another(head: Head, record: Batched) -> bool:
    """Whether the log has another batch under the same number. Where it has a gap there, nothing can be compared."""
    if head.newest is not None:
        return record.payload != head.newest
    digest = head.standing.digest
    return digest is not None and digest != digest_of(record.payload)


_JUDGES: Final[dict[type[Any], Callable[[Head, Any], Verdict]]] = {
    Join: _judge_join,
    Leave: _judge_leave,
    Batched: _judge_batch,
    Renewed: _judge_reset,
    Lost: _judge_gap,
}


# --- where the stream ends then


def _said(head: Head, record: StreamRecord) -> StreamRecord:
    """A record as it is written: of a gap only what the log does not have."""
    if isinstance(record, Lost) and head.last_seq >= 0:
        return Lost(*record.key, record.incarnation, head.last_seq + 1, record.last)
    return record


def _after(head: Head, record: StreamRecord, verdict: Verdict) -> Head:
    move: Callable[[Head, Any, Verdict], Head] = _MOVES[type(record)]
    return move(head, record, verdict)


def _move_batch(head: Head, record: Batched, verdict: Verdict) -> Head:
    if verdict is Verdict.NEXT:
        # As `replace` does, for what there are thousands of on a page.
        return Head(head.standing, head.incarnation, record.seq, head.joined, head.ended, True, record.payload)
    # Compared, where it is the newest. What a bridge has before that says nothing.
    return replace(head, agrees=head.agrees or record.seq == head.last_seq)


def _move_gap(head: Head, record: Lost, verdict: Verdict) -> Head:
    if verdict is Verdict.NEXT:
        return replace(head, last_seq=record.last, agrees=True, newest=None)
    return replace(head, agrees=head.agrees or record.last == head.last_seq)


def _move_reset(head: Head, record: Renewed, verdict: Verdict) -> Head:
    if verdict is Verdict.NEXT:
        return replace(head, incarnation=record.incarnation, last_seq=-1, ended=False, agrees=True, newest=None)
    return head


def _move_join(head: Head, _: Join, __: Verdict) -> Head:
    return replace(head, joined=True)


def _move_leave(head: Head, _: Leave, __: Verdict) -> Head:
    return replace(head, joined=False, ended=True)


_MOVES: Final[dict[type[Any], Callable[[Head, Any, Verdict], Head]]] = {
    Join: _move_join,
    Leave: _move_leave,
    Batched: _move_batch,
    Renewed: _move_reset,
    Lost: _move_gap,
}
