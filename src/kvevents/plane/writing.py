"""What a bridge writes next into a partition, given what is there.

Theory of operation. The server takes a page only if the partition ends where its writer believes
(`Nats-Expected-Last-Sequence`). So a writer that is refused reads what others have written, and composes anew. Of what it has
itself it then finds

- what is there already: dropped. Before it writes anything of an incarnation that others have begun, the bridge must have
  seen that the log's newest batch is its own one, byte for byte; once is enough, since everybody else has done so too;
- what comes next: written;
- neither: it and the log have lost each other. The stream is *adrift* until the bridge follows it anew from where the log
  stands, which makes its publisher prove that it is the one that the log tells of, or begins a new incarnation.

Nothing is dropped because it was sent, only because it was read or acknowledged. So it does not matter which page was lost, or
whether the answer to one was.

One page is *under way* at a time. What comes meanwhile goes into the next one. If it is refused, or a page of somebody else
comes first, all that was in it is judged anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from kvevents.plane.heads import Head, Verdict, after, as_written, judge, may_trust
from kvevents.plane.ledger import Departure, Event, Ledger
from kvevents.plane.records import (
    VERSION,
    Batched,
    Beat,
    Blank,
    Key,
    Page,
    Piece,
    Record,
    Renewed,
    StreamRecord,
    Trusting,
)
from kvevents.stream import RawBatch, trust_order

RECORD_BYTES: Final = 96
"""Of a record beside its payload and its texts, at most."""
DOUBT_BYTES: Final = 32
"""Of a doubt's name and number, at most."""
MAX_RECORDS: Final = 2_000
"""Of one page."""


_Queued: TypeAlias = tuple[float, StreamRecord, int]
"""A record, from which moment on it may be written, and the bytes that it takes at most."""


@dataclass(slots=True, eq=False)
class _Own:
    """What a bridge has of one stream that may not be in the log yet."""

    records: deque[_Queued] = field(default_factory=deque)
    trusting: Trusting | None = None
    """To be said when all of them are there."""
    followed: int | None = None
    """The incarnation that the bridge follows; None once the stream has left the log. The log may be at a later one, of which
    the bridge has heard nothing: what it trusts is not about that."""
    agreed: int | None = None
    """The incarnation of the log that is known to be the life that is followed here."""


@dataclass(slots=True)
class _Draft:
    """The page that is under way, and what of each stream it settles."""

    page: Page
    beat: Beat | None
    settled: list[_Settled]


class _Settled(NamedTuple):
    """How many records of a stream are in the log then, and which incarnation is agreed upon."""

    key: Key
    own: _Own
    records: int
    agreed: int | None
    trusting: Trusting | None


@dataclass(slots=True)
class _Turn:
    """What a page takes of one stream."""

    head: Head
    room: int
    taken: list[StreamRecord] = field(default_factory=list)
    done: int = 0
    """Records that are in the log with it."""


class Composer:
    """Composes the pages of one bridge for one partition. `ledger` is fed here, and by nobody else.

    Pages are named after `life`, which no other composer has.
    """

    def __init__(self, ledger: Ledger, bridge: str, page_bytes: int, life: str) -> None:
        self.ledger: Final = ledger
        self.adrift: dict[Key, None] = {}
        """Streams to follow anew; `anchor` says that it was done."""
        self.queued_bytes = 0
        """Of what is not known to be in the log."""
        self.written = 0
        """Batches of the log that were written here."""
        self._bridge: Final = bridge
        self._page_bytes: Final = page_bytes
        self._life: Final = life
        self._pages = 0
        self._own: dict[Key, _Own] = {}
        self._active: dict[Key, None] = {}
        """Streams with something to write, in turn."""
        self._beat: Beat | None = None
        self._draft: _Draft | None = None

    # --- what there is

    def anchor(self, key: Key) -> None:
        """The stream is followed from where the log stands: what was offered of it before is void."""
        self._drop(key)
        standing = self.ledger.streams.get(key)
        # Another one: what is under way of the stream settles nothing of what comes now.
        self._own[key] = _Own(
            followed=self.ledger.floor if standing is None else standing.incarnation,
            agreed=None if standing is None or standing.last_seq < 0 else standing.incarnation,
        )
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
            own.followed = record.incarnation
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

    def lag(self, now: float) -> float:
        """Seconds for which the oldest of what is due has waited; 0 where nothing does."""
        waiting = (own.records[0][0] for key in self._active if (own := self._own[key]).records)
        return max(0.0, now - min(waiting, default=now))

    def _may_say(self, key: Key, own: _Own) -> bool:
        return own.trusting is not None and may_trust(self._head(key, own), own.followed)

    def has_left(self, key: Key) -> bool:
        """Whether a stream has left the log since it was anchored; it may be there again."""
        own = self._own.get(key)
        return own is not None and own.followed is None

    def waits(self, key: Key) -> bool:
        """Whether there is something of a stream that is not known to be in the log."""
        own = self._own.get(key)
        return own is not None and bool(own.records)

    @property
    def waiting(self) -> int:
        """Records that are not known to be in the log."""
        return sum(len(self._own[key].records) for key in self._active)

    def _drop(self, key: Key) -> None:
        """Forget what waits."""
        own = self._own.get(key)
        self._active.pop(key, None)
        if own is not None:
            self.queued_bytes -= sum(size for _, _, size in own.records)
            own.records.clear()
            own.trusting = None

    # --- a page

    def compose(self, now: float, at: float) -> Page | None:
        """The next page, by the writer's clock at `at`; None if nothing is due, or one is under way.

        Say then what became of it: `landed`, or `returned`.
        """
        if self._draft is not None:
            return None
        records: list[Record] = [] if self._beat is None else [self._beat]
        settled: list[_Settled] = []
        if self.ledger.hole:
            # No stream had as many incarnations as there was room for records.
            records.append(Blank((self.ledger.position + 1) * MAX_RECORDS, self.ledger.hole))
        else:
            self._fill(records, settled, now)
        if not records:
            return None
        self._pages += 1
        page = Page(VERSION, self._bridge, at, records, self.ledger.life, f"{self._life}#{self._pages}", self.ledger.history)
        self._draft = _Draft(page, self._beat, settled)
        self._beat = None
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
        turn = _Turn(head, room)
        if (warning := self._warning(key, own, head)) is not None:
            turn.taken.append(warning)
            turn.room -= _size(warning)
        for due, record, size in own.records:
            verdict = judge(turn.head, record)
            if turn.room <= 0 or len(turn.taken) >= count or (due > now and verdict is Verdict.NEXT):
                break
            if verdict is Verdict.ADRIFT:
                self._drop(key)
                self.adrift[key] = None
                return [], room
            if not self._add(turn, record, size, verdict):
                break
        is_about = turn.done == len(own.records) and may_trust(turn.head, own.followed)
        trusting = own.trusting if is_about else None
        if trusting is not None and (most := _size(trusting)) <= turn.room and len(turn.taken) < count:
            turn.taken.append(trusting)
            turn.room -= most
        else:
            trusting = None
        agreed = turn.head.incarnation if turn.head.agrees else own.agreed
        outcome = _Settled(key, own, turn.done, agreed, trusting)
        if turn.taken:
            settled.append(outcome)
        else:
            self._settle(outcome)  # all of it is there
        return turn.taken, turn.room

    def _warning(self, key: Key, own: _Own, head: Head) -> Trusting | None:
        """Less trust than was said last, before the records that it may be about; it is said behind them as well."""
        standing = self.ledger.streams.get(key)
        told = None if standing is None else standing.told.get(self._bridge)
        if own.trusting is None or told is None or not own.records or not may_trust(head, own.followed):
            return None
        return own.trusting if trust_order(own.trusting.trust) < trust_order(told.trust) else None

    def _add(self, turn: _Turn, record: StreamRecord, size: int, verdict: Verdict) -> bool:
        """Take one more record, which may be there already. Whether there was room for all of it."""
        if verdict is Verdict.NEXT:
            said = as_written(turn.head, record)
            if size > turn.room:
                if isinstance(said, Batched) and not turn.taken and turn.room == self._page_bytes:
                    self._add_piece(turn, said)
                return False
            turn.taken.append(said)
            turn.room -= size
        turn.head = after(turn.head, record, verdict)
        turn.done += 1
        return True

    def _add_piece(self, turn: _Turn, record: Batched) -> None:
        """Of a batch that no page has room for the next part."""
        piece = self._piece(turn.head, record)
        turn.taken.append(piece)
        turn.room = 0
        if piece.offset + len(piece.payload) == piece.total:
            turn.head = after(turn.head, record, Verdict.NEXT)
            turn.done += 1

    def _head(self, key: Key, own: _Own) -> Head:
        standing = self.ledger.streams.get(key)
        if standing is None:
            return Head(None, self.ledger.floor, -1, ended=False, agrees=False, newest=None)
        return Head(
            standing.card,
            standing.incarnation,
            standing.last_seq,
            standing.ended or standing.card is None,
            own.agreed == standing.incarnation,
            self.ledger.newest(key),
            standing.digest,
            standing.half,
        )

    def _piece(self, head: Head, record: Batched) -> Piece:
        """The next part of a batch that no page has room for: behind what is there of it."""
        half, offset = head.half, 0
        if half is not None and (half.seq, half.total) == (record.seq, len(record.payload)):
            offset = half.size if _begins_with(record.payload, half.pieces) else 0
        part = record.payload[offset : offset + max(1, self._page_bytes - RECORD_BYTES - _length(record.source))]
        return Piece(*record.key, record.incarnation, record.seq, record.replayed, offset, len(record.payload), part)

    # --- what became of it

    def landed(self, position: int) -> list[Event]:
        """The page that is under way is in the partition, under this number. What it means to readers."""
        draft, self._draft = self._draft, None
        if draft is None:
            return []
        found = self._feed(position, draft.page)
        for outcome in draft.settled:
            self._settle(outcome)
        self.written += sum(isinstance(event, RawBatch) for event in found)
        return found

    def returned(self) -> None:
        """The page that is under way is not known to be in the partition. Read what is, then compose anew."""
        draft, self._draft = self._draft, None
        if draft is not None:
            self._beat = self._beat or draft.beat

    def _settle(self, outcome: _Settled) -> None:
        key, own = outcome.key, outcome.own
        if self._own.get(key) is not own:
            return  # followed anew, or no more
        for _ in range(outcome.records):
            self.queued_bytes -= own.records.popleft()[2]
        own.agreed = outcome.agreed
        if own.trusting is outcome.trusting:
            own.trusting = None
        self._active.pop(key, None)
        if own.records or own.trusting is not None:
            self._active[key] = None  # others are first next time

    def read(self, position: int, page: Page) -> list[Event]:
        """A page of somebody, or one of ours of which it was not known that it had landed. What it means to readers.

        What is under way comes too late then.
        """
        self.returned()
        return self._feed(position, page)

    def _feed(self, position: int, page: Page) -> list[Event]:
        found = self.ledger.feed(position, page)
        for event in found:
            if isinstance(event, Departure) and (own := self._own.get(event.key)) is not None:
                own.followed = None
        return found

    def skip(self, position: int, name: str = "", *, is_first: bool = False) -> None:
        """A message that is no page, which also comes before what is under way."""
        self.returned()
        self.ledger.skip(position, name, is_first=is_first)


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
