"""What was recovered of a journal. Its bulk stays in the files, which are read a frame at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from kvevents.errors import JournalError
from kvevents.relay.journal.folder import Folder, Kept
from kvevents.relay.journal.frames import HEADER_BYTES, Frames, Header
from kvevents.relay.journal.records import (
    BURST,
    HOLE,
    PART,
    RESET,
    Hole,
    Positions,
    Record,
    relayed,
    unpack_hole,
    unpack_reset,
)


class Place(NamedTuple):
    """A file of a journal whose header holds."""

    kept: Kept
    header: Header
    chain: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state as of `number`, as the relay gave it."""

    number: int
    partial: bool
    """Whether it does not tell all that was live."""
    count: int
    """Of its parts."""
    size: int
    """Bytes of the file."""
    folder: Folder = field(repr=False)
    place: Place = field(repr=False)

    def parts(self) -> Iterator[bytes]:
        """Its parts, read one after the other. Raises `JournalError` where they are gone, or cannot be read again."""
        for kind, body in _reread(self.folder, self.place, self.size):
            if kind == PART:
                yield body


@dataclass(frozen=True, slots=True)
class Log:
    """What goes on from here: the last CRC, and what to tidy up."""

    chain: int = 0
    kept: tuple[tuple[Place, int], ...] = ()
    """Segments that are of use, each with where it ends."""
    needless: tuple[str, ...] = ()
    """Names of files that are not."""
    everything: tuple[str, ...] = ()
    """Names of all files."""
    next_ordinal: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a journal holds. Read `snapshot.parts()` and `records()` before the journal is begun anew or compacted."""

    incarnation: int | None
    """Newest of the relay that any file tells of; None where there is none."""
    next_number: int = 0
    snapshot: Snapshot | None = None
    mark: dict[str, Any] | None = None
    """The newest one."""
    positions: Positions = field(default_factory=dict)
    """How far each upstream was relayed, by batches and resets."""
    batches: int = 0
    """Behind the snapshot."""
    clean: bool = False
    """Whether it was closed."""
    unclean: bool = False
    """Whether numbers beyond `next_number` may have been sent: the relay must begin a new incarnation."""
    because: str = ""
    """Why it is `unclean`; otherwise, what else was found to be wrong."""
    torn_bytes: int = 0
    """At the end, of a write that was never acknowledged."""
    dropped_bytes: int = 0
    """Of what followed something damaged, or belongs to nothing."""
    seconds: float = 0.0
    log: Log = field(default=Log(), repr=False)
    folder: Folder | None = field(default=None, repr=False)

    @property
    def resumable(self) -> bool:
        """Whether the relay may go on with `next_number` in the same incarnation."""
        return self.incarnation is not None and not self.unclean

    def records(self) -> Iterator[Record]:
        """Everything behind the snapshot, in order. Raises `JournalError` where it is gone, or cannot be read again."""
        above = -1 if self.snapshot is None else self.snapshot.number
        for place, end in self.log.kept:
            assert self.folder is not None  # noqa: S101 - where there are segments, there is a folder
            for kind, body in _reread(self.folder, place, end):
                yield from _records(kind, body, above)


def _records(kind: int, body: bytes, above: int) -> Iterator[Record]:
    if kind == BURST:
        yield from relayed(body, above)
    elif kind == HOLE:
        hole = unpack_hole(body)
        if hole.last > above:
            yield Hole(max(hole.first, above + 1), hole.last)
    elif kind == RESET:
        reset = unpack_reset(body)
        if reset.after >= above:
            yield reset


def _reread(folder: Folder, place: Place, end: int) -> Iterator[tuple[int, bytes]]:
    name = place.kept.name
    try:
        with folder.read(name) as file:
            file.seek(HEADER_BYTES)
            frames = Frames(file, place.chain)
            yield from takewhile(lambda _: frames.end <= end, frames)
    except FileNotFoundError as error:
        raise JournalError(f"{folder.path / name} is gone; read what was recovered before the journal goes on") from error
    except OSError as error:
        raise JournalError(f"{folder.path / name} cannot be read again: {error.strerror}; begin a new journal") from error
    if frames.end < end:
        raise JournalError(f"{folder.path / name} cannot be read again: {frames.damage}; begin a new journal")
