"""Reading a journal back: nothing here writes, so a process that dies over it changes nothing.

The newest snapshot that is whole stands for everything up to its number. Behind it the segments are walked, each from where the
one before it ended, until one ends that has no successor, or something does not hold. Of the newest one `end` tells how much
was acknowledged; what does not hold behind that was being written when its process was killed (`frames` has the rules). Any
other fault means that something is missing which was acknowledged, and may have been sent: also a newest segment that is gone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvevents.errors import JournalError
from kvevents.relay.journal.folder import Folder, Kept, boot_id, name_of
from kvevents.relay.journal.frames import (
    BEGINS,
    DETACHED,
    HEADER_BYTES,
    SEGMENT,
    SNAPSHOT,
    VERSION,
    Damaged,
    Frames,
    Header,
    Newer,
    Torn,
)
from kvevents.relay.journal.records import (
    BURST,
    CLOSED,
    END,
    END_BYTES,
    HOLE,
    MARK,
    PART,
    RESET,
    STANDING,
    Positions,
    unpack_burst,
    unpack_end,
    unpack_hole,
    unpack_mark,
    unpack_reset,
    unpack_standing,
)
from kvevents.relay.journal.recovery import Log, Place, Recovered, Snapshot

_BAD: Final = (ValueError, struct.error, msgspec.MsgspecError)
"""Of a frame that holds and is none of ours: a fault of who wrote it."""
_UNKNOWN: Final = bytes(16)


def recover(folder: Folder) -> Recovered:
    """What the folder's files hold. Raises `JournalError` for files of a later release, and for nothing else."""
    try:
        return _Scan(folder).run()
    except JournalError:
        raise
    except OSError as error:
        return Recovered(incarnation=None, unclean=True, because=f"{folder.path} cannot be read: {error.strerror or error}")


class _Scan:
    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files = folder.files()
        self._acknowledged = folder.acknowledged()
        self._incarnation: int | None = None
        self._segments: list[tuple[Kept, Place | None]] = []
        """Of the newest life; without a place where the header does not hold."""
        self._snapshots: list[tuple[Kept, Place | None]] = []
        self._snapshot: Snapshot | None = None
        self._kept: list[tuple[Place, int]] = []
        """Segments that were walked, and where they end."""
        self._chain = 0
        self._next = 0
        self._mark: dict[str, Any] | None = None
        self._positions: Positions = {}
        self._batches = 0
        self._clean = False
        self._damage = ""
        self._notes: list[str] = []
        self._torn = self._dropped = 0

    def run(self) -> Recovered:
        """Read everything."""
        self._sort()
        self._find_snapshot()
        if self._segments or self._snapshots:
            self._walk()
        because = self._doubt()
        return Recovered(
            incarnation=self._incarnation,
            next_number=self._next,
            snapshot=self._snapshot,
            mark=self._mark,
            positions=self._positions,
            batches=self._batches,
            clean=self._clean,
            unclean=bool(because),
            because="; ".join(filter(None, (because, *self._notes))),
            torn_bytes=self._torn,
            dropped_bytes=self._dropped,
            log=self._log(),
            folder=self._folder,
        )

    def _log(self) -> Log:
        used = {place.kept.name for place, _ in self._kept}
        used |= {self._snapshot.place.kept.name} if self._snapshot else set()
        names, leftovers = [each.name for each in self._files], self._folder.leftovers()
        needless = [name for name in names if name not in used]
        behind = max((each.ordinal for each in self._files), default=-1) + 1
        return Log(self._chain, tuple(self._kept), (*needless, *leftovers), (*names, *leftovers), behind)

    # --- which files --------------------------------------------------------------------------------------------------------

    def _sort(self) -> None:
        """Read the headers, and leave aside what precedes the newest life, or was begun and never used."""
        read = [(kept, self._place(kept)) for kept in self._files]
        self._incarnation = max((place.header.incarnation for _, place in read if place is not None), default=None)
        begins = max((kept.ordinal for kept, place in read if place is not None and place.header.flags & BEGINS), default=0)
        life = [each for each in read if each[0].ordinal >= begins]
        self._snapshots = [each for each in life if each[0].kind == SNAPSHOT]
        self._segments = [each for each in life if each[0].kind == SEGMENT]
        if self._segments and self._segments[-1][0].size < HEADER_BYTES:
            self._torn += self._segments.pop()[0].size

    def _place(self, kept: Kept) -> Place | None:
        with self._folder.read(kept.name) as file:
            found = Header.read(file)
        if isinstance(found, Newer):
            raise JournalError(
                f"{self._folder.path / kept.name} is of version {found.version}, and this release reads {VERSION}:"
                " use the release that wrote it, or another folder"
            )
        if isinstance(found, Torn | Damaged):
            return None
        header, chain = found
        return Place(kept, header, chain) if (header.ordinal, header.kind) == (kept.ordinal, kept.kind) else None

    def _find_snapshot(self) -> None:
        for kept, place in reversed(self._snapshots):
            self._snapshot = None if place is None else self._whole(place)
            if self._snapshot is not None:
                self._next = self._snapshot.number + 1
                return
            self._notes.append(f"{kept.name} is damaged")

    def _whole(self, place: Place) -> Snapshot | None:
        """The snapshot of a file, if all of it holds."""
        parts, end = 0, None
        with self._folder.read(place.kept.name) as file:
            file.seek(HEADER_BYTES)
            frames = Frames(file, place.chain)
            for kind, body in frames:
                parts += kind == PART
                end = unpack_end(body) if kind == END and len(body) == END_BYTES else None
        if end is None or end.parts != parts or end.number != place.header.first - 1 or frames.torn or frames.damage:
            return None
        return Snapshot(end.number, end.partial, parts, frames.end, self._folder, place)

    # --- the segments -------------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        index = self._begin()
        if index is None:
            self._stop(0, 0, "what precedes the first segment is missing")
            return
        self._next, behind = self._segments[index][1].header.first, self._next  # type: ignore[union-attr]
        for at in range(index, len(self._segments)):
            if not self._read(at, first=at == index):
                break
        newest = self._acknowledged.ordinal
        if newest > self._segments[-1][0].ordinal:
            self._damage = self._damage or f"{name_of(newest, SEGMENT)}, of which something was acknowledged, is missing"
            self._clean = False
        if self._next < behind:
            self._damage = self._damage or f"the segments end with {self._next - 1}, before the snapshot of {behind - 1}"
            self._next = behind

    def _begin(self) -> int | None:
        """With which segment: the first of those that go back to the snapshot, and as little farther as there is."""
        fit = [(at, place) for at, (_, place) in enumerate(self._segments) if place and place.header.first <= self._next]
        opening = max((at for at, place in fit if place.header.flags & (BEGINS | DETACHED)), default=0)
        fit = [each for each in fit if each[0] >= opening]
        if not fit or (self._snapshot is None and not fit[0][1].header.flags & BEGINS):
            return None
        latest = max(place.header.first for _, place in fit)
        return next(at for at, place in fit if place.header.first == latest)

    def _read(self, at: int, *, first: bool) -> bool:
        """Take in one segment; whether another one can follow."""
        kept, place = self._segments[at]
        if place is None:
            return self._stop(at, 0, "its header does not hold")
        header = place.header
        if not first and (header.flags or header.previous != self._chain or header.first != self._next):
            return self._stop(at, 0, "it does not go on from the one before it")
        with self._folder.read(kept.name) as file:
            file.seek(HEADER_BYTES)
            last = at == len(self._segments) - 1
            frames = Frames(file, place.chain, self._end_of(kept), reused=last)
            self._take_all(frames)
        self._kept.append((place, frames.end))
        self._chain = frames.chain
        if frames.torn and not last:
            frames.damage = "it ends inside of a frame"
        if frames.damage:
            return self._stop(at, frames.end, frames.damage)
        self._torn += frames.torn
        return True

    def _end_of(self, kept: Kept) -> int:
        """Up to where it was acknowledged, if that is known."""
        return self._acknowledged.end if self._acknowledged.ordinal == kept.ordinal else 0

    def _take_all(self, frames: Frames) -> None:
        for kind, body in frames:
            take = _TAKES.get(kind)
            try:
                if take is None:
                    raise ValueError(f"no frame of kind {kind} belongs in a segment")
                take(self, body)
            except _BAD as error:
                frames.refuse(str(error))
            else:
                self._clean = kind == CLOSED

    def _stop(self, at: int, end: int, reason: str) -> bool:
        """Everything from byte `end` of a segment is left aside."""
        sizes = [min(kept.size, self._end_of(kept) or kept.size) for kept, _ in self._segments[at:]]
        self._dropped += max(0, sum(sizes) - end)
        name = self._segments[at][0].name if sizes else "there is no segment"
        self._damage = f"{name}: {reason}"
        self._clean = False
        return False

    def _doubt(self) -> str:
        """Why more may have been sent than was found; empty where that cannot be."""
        if self._damage:
            return self._damage
        if not self._kept:
            return ""
        if not self._folder.is_whole():
            return "the disk refused what was sent last"
        header = self._kept[-1][0].header
        boot = boot_id()
        # Whatever the policy: a disk may say that it has written what it has not.
        if self._clean or header.boot == boot != _UNKNOWN:
            return ""
        return "the machine was started anew, and what was sent last may not have reached the disk"

    # --- frames -------------------------------------------------------------------------------------------------------------

    def _take_burst(self, body: bytes) -> None:
        burst = unpack_burst(body)
        self._follow(burst.first, burst.last)
        self._positions.update(zip(burst.upstreams, zip(burst.incarnations, burst.seqs, strict=True), strict=True))
        above = -1 if self._snapshot is None else self._snapshot.number
        self._batches += max(0, burst.last - max(above, burst.first - 1))

    def _take_hole(self, body: bytes) -> None:
        self._follow(*unpack_hole(body))

    def _follow(self, first: int, last: int) -> None:
        if not first == self._next <= last:
            raise ValueError(f"{first} to {last} does not follow {self._next - 1}")
        self._next = last + 1

    def _take_reset(self, body: bytes) -> None:
        reset = unpack_reset(body)
        self._positions[reset.upstream] = (reset.incarnation, -1)

    def _take_mark(self, body: bytes) -> None:
        self._mark = unpack_mark(body)

    def _take_standing(self, body: bytes) -> None:
        standing = unpack_standing(body)
        self._mark, self._positions = standing.mark, standing.positions

    def _take_closed(self, body: bytes) -> None:
        """Nothing but that it was."""


_TAKES: Final[dict[int, Callable[[_Scan, bytes], None]]] = {
    BURST: _Scan._take_burst,  # noqa: SLF001 - the table of the class above
    HOLE: _Scan._take_hole,  # noqa: SLF001
    RESET: _Scan._take_reset,  # noqa: SLF001
    MARK: _Scan._take_mark,  # noqa: SLF001
    STANDING: _Scan._take_standing,  # noqa: SLF001
    CLOSED: _Scan._take_closed,  # noqa: SLF001
}
