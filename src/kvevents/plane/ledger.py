"""State of one partition of the log: its streams, how far each one is written, and how far each bridge trusts it.

Theory of operation. Several bridges may write about one stream, and any may be killed, stopped or cut off at any moment. The
log is one story all the same, because the server takes a page only from a writer who has seen every page before it
(`writing`), and because all read pages by the same rules, which are here:

- A batch is the next one where it is of the stream's present incarnation and has the number after the newest one. The first of
  an incarnation may have any number: what an engine has forgotten nobody can ask for.
- A batch with a number that is there already is passed over, as are records of incarnations that have ended.
- Anything else is a *breach*: no writer of ours does it. It is counted, the stream is marked, and nothing is made of it.

Pieces of a large batch follow each other, with anything in between; a piece at offset 0 begins again.

Each page carries a digest of the names of all messages that its writer expects before it, and is void behind any others. The
server compares numbers alone, and those can be right by chance, where it has lost pages that it had acknowledged and their
numbers were used again.

A partition that is deleted and made anew has another `life`; pages of a writer who had not noticed are void in it. Where pages
were purged before a bridge had read them, and no snapshot tells what was in them, the partition has a *hole*: nothing behind it
can be believed until somebody writes a `Blank`, with which all streams leave and begin anew, for every reader alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from kvevents.plane.records import (
    START,
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
    Tail,
    Trusting,
    extend_history,
)
from kvevents.stream import PERSISTENT_REASONS, Checkpoint, Fingerprint, Gap, RawBatch, Reset, payload_digest
from kvevents.structs import build_decoder_now
from kvevents.wire import DEFAULT_WIRE_LIMITS

_KEPT: Final = frozenset(doubt.name for doubt in PERSISTENT_REASONS)
MAX_DEPARTED: Final = 100_000
"""Streams that have left and whose last incarnation is remembered, so that late records of it are void; the oldest go first."""
MAX_WATCHERS: Final = 64
"""Bridges that say something about one stream; the one whose last beat is the oldest goes first."""
MAX_BRIDGES: Final = 1_000
"""Whose last beat is remembered: each is a life of a process; the oldest go first."""


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What a bridge said last of a stream."""

    trust: str
    reason: str
    doubts: dict[str, int]


class Arrival(NamedTuple):
    """A stream has joined, or its card has changed."""

    key: Key
    card: bytes


class Departure(NamedTuple):
    """A stream has left."""

    key: Key
    reason: str
    incarnation: int
    """Which has ended with that."""


class Change(NamedTuple):
    """A bridge has said something about a stream."""

    key: Key


class Breach(NamedTuple):
    """A record that no writer of ours writes."""

    key: Key
    what: str


Event: TypeAlias = RawBatch | Reset | Gap | Arrival | Departure | Change | Breach


class Half(msgspec.Struct, array_like=True):
    """What there is of a batch that comes in pieces."""

    seq: int
    total: int
    size: int = 0
    """Bytes so far."""
    pieces: list[bytes] = []

    def is_continued_by(self, piece: Piece) -> bool:
        """Whether a piece is the next one of the same batch."""
        fits = self.size + len(piece.payload) <= self.total
        return fits and (self.seq, self.total, self.size) == (piece.seq, piece.total, piece.offset)

    def add(self, piece: Piece) -> None:
        """Take in the next piece."""
        self.pieces.append(piece.payload)
        self.size += len(piece.payload)


class Standing(msgspec.Struct, array_like=True):
    """How one stream stands."""

    card: bytes | None
    """None once it has left."""
    incarnation: int = 0
    last_seq: int = -1
    digest: bytes | None = None
    """SHA-256 of the newest batch, where it is not at hand."""
    told: dict[str, Told] = {}
    """By bridge, the one that spoke last at the end."""
    half: Half | None = None
    ended: bool = False
    """Whether nothing more counts of this incarnation: the stream had left, or something was written that no bridge writes."""


class Start(NamedTuple):
    """How a subscriber follows a stream so that it continues the log."""

    resume: Checkpoint | None
    """None where the log has no batch of its present incarnation, so that there is nothing to prove."""
    added: int
    """To the incarnations that the subscriber counts: they are the log's then."""


class Beaten(NamedTuple):
    """The last beat of a bridge."""

    beat: Beat
    page: int
    """Number of the page that it was in."""


class Ledger:
    """One partition, as of its page `position`. Feed it every page, in order."""

    def __init__(self) -> None:
        self.position = 0
        """Number of the newest page that was read; JetStream counts from 1."""
        self.streams: dict[Key, Standing] = {}
        """Those that have left too, as far as they are remembered, in the order in which they came or went."""
        self.beats: dict[str, Beaten] = {}
        """By bridge."""
        self.breaches = 0
        self.doubled = 0
        """Records that said again what was there."""
        self.foreign = 0
        """Messages that are no pages."""
        self.strays = 0
        """Pages that were meant for a partition of another life."""
        self.overtaken = 0
        """Pages whose writer expected other messages before them."""
        self.history: bytes | None = START
        """Digest of the names of all messages that were read; None where the partition could not be read from its beginning."""
        self.life = ""
        """Of the partition; that of its first page where nobody has said."""
        self.floor = 0
        """First incarnation of a stream that was not there."""
        self.hole = ""
        """Why nothing of the partition can be believed yet; empty where all of it was read."""
        self.begins_at = 1
        """Number of the page with which all streams began last: the first one, or one with a `Blank`."""
        self._newest: dict[Key, bytes] = {}
        self._writer = ""
        """Who wrote the page that is read."""
        self._name: str | None = ""
        """Of the newest message."""

    # --- reading

    def feed(self, position: int, page: Page) -> list[Event]:
        """What a page brings. Its writer has read all before it, so `position` may leave numbers out: nobody wrote them."""
        history = self.history
        self._move(position, page.name, is_first=page.history is None)
        self.life = self.life or page.life
        if page.life != self.life:
            self.strays += 1
            return []
        if page.history is not None and history is not None and page.history != history:
            self.overtaken += 1
            return []
        self._writer = page.bridge
        found: list[Event] = []
        for record in page.records:
            if isinstance(record, Beat):
                self._hear(Beaten(record, position))
            elif isinstance(record, Blank):
                found += self._blank(record)
            elif not self.hole:
                found += self._read(record)
        return found

    def _move(self, position: int, name: str, *, is_first: bool = False) -> None:
        self.position, self._name = position, name
        known = START if is_first else self.history
        self.history = None if known is None else extend_history(known, name)

    def _hear(self, beaten: Beaten) -> None:
        self.beats.pop(beaten.beat.bridge, None)
        self.beats[beaten.beat.bridge] = beaten
        if len(self.beats) > MAX_BRIDGES:
            del self.beats[next(iter(self.beats))]

    def _blank(self, record: Blank) -> Iterable[Event]:
        left = [
            Departure(key, record.reason, standing.incarnation)
            for key, standing in self.streams.items()
            if standing.card is not None
        ]
        self.hole, self.floor, self.begins_at = "", max(self.floor, record.floor), self.position
        self.streams.clear()
        self._newest.clear()
        return left

    def _read(self, record: StreamRecord) -> Iterable[Event]:
        read: Callable[[Ledger, Any], Iterable[Event]] = _READERS[type(record)]
        return read(self, record)

    def _join(self, record: Join) -> Iterable[Event]:
        known = self.streams.get(record.key)
        if known is None:
            self.streams[record.key] = Standing(record.card, self.floor)
        elif known.card is None:
            del self.streams[record.key]
            # Nothing of its old incarnation is held any more; a bridge goes on with the next one.
            self.streams[record.key] = Standing(record.card, known.incarnation, ended=True)
        else:
            known.card = record.card
        yield Arrival(record.key, record.card)

    def _leave(self, record: Leave) -> Iterable[Event]:
        known = self.streams.pop(record.key, None)
        if known is None or known.card is None:
            return
        self._newest.pop(record.key, None)
        self.streams[record.key] = Standing(None, known.incarnation)
        if len(self.streams) > MAX_DEPARTED:
            departed = [key for key, standing in self.streams.items() if standing.card is None]
            for key in departed[:-MAX_DEPARTED]:
                del self.streams[key]
        yield Departure(record.key, record.reason, known.incarnation)

    def _batch(self, record: Batched) -> Iterable[Event]:
        standing = self._present(record.key, record.incarnation)
        if standing is None:
            return
        if (breach := _out_of_turn(standing, record)) is not None:
            yield self._object(record.key, standing, breach)
        elif record.seq <= standing.last_seq:
            self.doubled += 1
        else:
            yield self._accept(standing, record, record.payload)

    def _accept(self, standing: Standing, record: Batched | Piece, payload: bytes) -> RawBatch:
        if standing.last_seq < 0:
            # Which life it is shows now: what others said may have been about another one.
            standing.told = {bridge: told for bridge, told in standing.told.items() if bridge == self._writer}
        standing.last_seq, standing.half, standing.digest = record.seq, None, None
        self._newest[record.key] = payload
        return RawBatch(record.source, record.rank, record.incarnation, record.seq, record.replayed, payload)

    def _piece(self, record: Piece) -> Iterable[Event]:
        standing = self._present(record.key, record.incarnation)
        if standing is None or record.seq <= standing.last_seq:
            return
        half = Half(record.seq, record.total) if record.offset == 0 else standing.half
        breach = _out_of_turn(standing, record)
        if breach is None and record.total > DEFAULT_WIRE_LIMITS.max_payload_bytes:
            breach = f"batch {record.seq} of {record.total} bytes"
        if half is None or not half.is_continued_by(record):
            breach = breach or f"a piece of batch {record.seq} at {record.offset} that continues nothing"
        if breach is not None or half is None:
            yield self._object(record.key, standing, breach or "")
            return
        half.add(record)
        standing.half = half
        if half.size == half.total:
            yield self._accept(standing, record, b"".join(half.pieces))

    def _renew(self, record: Renewed) -> Iterable[Event]:
        standing = self.streams.get(record.key)
        if standing is None or standing.card is None or record.incarnation <= standing.incarnation:
            self.doubled += 1
            return
        self._newest.pop(record.key, None)
        # What bridges said is of the life before; those that follow this one say it anew.
        self.streams[record.key] = Standing(standing.card, record.incarnation)
        yield Reset(record.source, record.rank, record.incarnation, record.reason)

    def _lose(self, record: Lost) -> Iterable[Event]:
        standing = self._present(record.key, record.incarnation)
        if standing is None:
            return
        if record.last <= standing.last_seq:
            self.doubled += 1
        elif (breach := _out_of_turn(standing, record)) is not None:
            yield self._object(record.key, standing, breach)
        else:
            standing.last_seq, standing.half, standing.digest = record.last, None, None
            self._newest.pop(record.key, None)
            yield Gap(record.source, record.rank, record.first, record.last, record.incarnation, record.compacted)

    def _trust(self, record: Trusting) -> Iterable[Event]:
        standing = self.streams.get(record.key)
        if standing is None or standing.card is None:
            return
        standing.told.pop(record.bridge, None)
        if record.trust:
            standing.told[record.bridge] = Told(record.trust, record.reason, record.doubts)
        if len(standing.told) > MAX_WATCHERS:
            del standing.told[min(standing.told, key=self._beaten_at)]
        yield Change(record.key)

    def _beaten_at(self, bridge: str) -> int:
        beaten = self.beats.get(bridge)
        return 0 if beaten is None else beaten.page

    def _present(self, key: Key, incarnation: int) -> Standing | None:
        """How a stream stands, if the incarnation is not one that has ended."""
        standing = self.streams.get(key)
        if standing is None or standing.card is None or incarnation < standing.incarnation:
            self.doubled += 1
            return None
        return standing

    def _object(self, key: Key, standing: Standing, what: str) -> Breach:
        self.breaches += 1
        standing.ended = True
        return Breach(key, what)

    def skip(self, position: int, name: str = "", *, is_first: bool = False) -> None:
        """A message that is no page. `is_first`: its headers say that a new history begins with it."""
        self._move(position, name, is_first=is_first)
        self.foreign += 1

    # --- what is known

    @property
    def tail(self) -> Tail:
        """The newest message that was read."""
        return Tail(self.position, self._name, self.history)

    def joined(self) -> dict[Key, bytes]:
        """The streams that there are, each with its card."""
        return {key: standing.card for key, standing in self.streams.items() if standing.card is not None}

    def newest(self, key: Key) -> bytes | None:
        """Bytes of the newest batch of a stream, where they are at hand."""
        return self._newest.get(key)

    def start(self, key: Key, bridge: str) -> Start:
        """How a bridge goes on with a stream: with its own doubts, or those of who spoke last."""
        standing = self.streams.get(key)
        if standing is None:
            return Start(None, self.floor)
        if standing.card is not None and not standing.ended and standing.last_seq < 0:
            return Start(None, standing.incarnation)
        digest = self._digest(key, standing)
        if standing.card is None or standing.ended or digest is None:
            # With nothing to prove it by, its life ends here: what comes next is of another one.
            return Start(Checkpoint(*key, standing.incarnation, -1), 0)
        anchor = Fingerprint(standing.last_seq, digest, True)
        told = standing.told.get(bridge) or next(reversed(standing.told.values()), None)
        doubts = {} if told is None else {name: last for name, last in told.doubts.items() if name in _KEPT}
        return Start(Checkpoint(*key, standing.incarnation, standing.last_seq, (anchor,), True, doubts), 0)

    def _digest(self, key: Key, standing: Standing) -> bytes | None:
        newest = self._newest.get(key)
        return standing.digest if newest is None else payload_digest(newest)

    # --- in a snapshot

    def save(self) -> bytes:
        """For `restore`, of this moment."""
        for key, newest in self._newest.items():
            self.streams[key].digest = payload_digest(newest)
        rows = [(*key, standing) for key, standing in self.streams.items()]
        beats = [(beaten.beat, beaten.page) for beaten in self.beats.values()]
        saved = _Saved(self.position, rows, beats, self.life, self.floor, self.hole, self._name, self.history, self.begins_at)
        return msgspec.msgpack.encode(saved)

    @classmethod
    def restore(cls, data: bytes) -> Ledger:
        """What `save` wrote. Raises `ValueError` for anything else."""
        saved = msgspec.msgpack.decode(data, type=_Saved)
        ledger = cls()
        ledger.position = saved.position
        ledger.streams = {(source, rank): standing for source, rank, standing in saved.streams}
        ledger.beats = {beat.bridge: Beaten(beat, page) for beat, page in saved.beats}
        ledger.life, ledger.floor, ledger.hole = saved.life, saved.floor, saved.hole
        ledger._name, ledger.history, ledger.begins_at = saved.name, saved.history, saved.begins_at
        return ledger

    @classmethod
    def behind(cls, position: int, hole: str) -> Ledger:
        """Of a partition that can be read from behind a page on only; `hole` says why."""
        ledger = cls()
        ledger.position, ledger.hole = position, hole
        ledger._name = ledger.history = None
        return ledger


@build_decoder_now
class _Saved(msgspec.Struct, array_like=True):
    position: int
    streams: list[tuple[str, int, Standing]]
    beats: list[tuple[Beat, int]]
    life: str = ""
    floor: int = 0
    hole: str = ""
    name: str | None = ""
    history: bytes | None = START
    begins_at: int = 1


def _out_of_turn(standing: Standing, record: Batched | Piece | Lost) -> str | None:
    """Why a record is not the next one."""
    first = record.first if isinstance(record, Lost) else record.seq
    if record.incarnation != standing.incarnation or standing.ended:
        return f"number {first} of incarnation {record.incarnation}, which has not begun"
    if standing.last_seq >= 0 and first > standing.last_seq + 1:
        return f"number {first} after {standing.last_seq}"
    return None


_READERS: Final[dict[type[Record], Callable[[Ledger, Any], Iterable[Event]]]] = {
    Join: Ledger._join,  # noqa: SLF001 - the table of its own methods
    Leave: Ledger._leave,  # noqa: SLF001 - as above
    Batched: Ledger._batch,  # noqa: SLF001 - as above
    Piece: Ledger._piece,  # noqa: SLF001 - as above
    Renewed: Ledger._renew,  # noqa: SLF001 - as above
    Lost: Ledger._lose,  # noqa: SLF001 - as above
    Trusting: Ledger._trust,  # noqa: SLF001 - as above
}
