"""The files of a journal that is being written. What the disk refuses is raised, as `OSError`, and ends the writer."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvevents.relay.journal.disk import Disk
from kvevents.relay.journal.folder import END as ACKNOWLEDGED
from kvevents.relay.journal.folder import Folder, boot_id, name_of, spare_of
from kvevents.relay.journal.frames import HEADER_BYTES, SEGMENT, SNAPSHOT, Acknowledged, Header, head_of
from kvevents.relay.journal.limits import SPARES, JournalSettings
from kvevents.relay.journal.records import END, PART, STANDING, End, Positions, Standing, pack_end, pack_standing


@dataclass(slots=True)
class Told:
    """What the journal was told so far, whether or not the disk took it."""

    incarnation: int = 0
    next_number: int = 0
    mark: dict[str, Any] | None = None
    positions: Positions = field(default_factory=dict)

    def standing(self) -> bytes:
        """As the body of a frame."""
        return pack_standing(Standing(self.mark, self.positions))


class Held(NamedTuple):
    """A segment that is not written any more; one that waits to be written over has a name for that."""

    name: str
    first: int
    size: int


class Segment:
    """The file that is appended to: a new one, or `spare` written over, which has its name when its beginning is there."""

    def __init__(self, disk: Disk, folder: Folder, header: Header, standing: bytes, spare: str | None) -> None:
        self.name: Final = name_of(header.ordinal, SEGMENT)
        self.ordinal: Final = header.ordinal
        self.first: Final = header.first
        self._disk = disk
        data, chain = header.pack()
        head, self.chain = head_of(STANDING, (standing,), chain)
        self.fd: Final = disk.create(self.name, folder.fd) if spare is None else disk.open(spare, folder.fd)
        try:
            self._length = os.fstat(self.fd).st_size
            self.size = disk.write(self.fd, (data, head, standing))
            if spare is not None:
                disk.rename(spare, self.name, folder.fd)
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def taken(self) -> int:
        """Bytes of the file, stale ones behind the end among them."""
        return max(self.size, self._length)

    def append(self, kind: int, body: Sequence[bytes]) -> int:
        """Write one frame; how many bytes it takes."""
        head, self.chain = head_of(kind, body, self.chain)
        size = self._disk.write(self.fd, (head, *body))
        self.size += size
        return size

    def finish(self) -> None:
        """Have the file end where the segment does."""
        if self.size < self._length:
            self._disk.shorten(self.fd, self.size)
            self._length = self.size

    def gone(self) -> bool:
        """Whether the file was deleted, while it is still open here."""
        return os.fstat(self.fd).st_nlink == 0


class Compacted(NamedTuple):
    """A snapshot that is in its file."""

    name: str
    size: int
    left: list[str]
    """Names of files that it makes needless, and that could not be removed."""
    spares: list[Held]
    """Such files that were not removed, but wait to be written over."""


class Writer:
    """Segments, one after the other, and snapshots beside them. `open` comes first."""

    def __init__(self, folder: Folder, disk: Disk, settings: JournalSettings, told: Told, ordinal: int) -> None:
        self.folder = folder
        self._disk = disk
        self._settings = settings
        self._told = told
        self._ordinal = ordinal
        self._segment: Segment | None = None
        self.held: list[Held] = []
        self.snapshot: Held | None = None
        self.needless: list[str] = []
        self._spares: tuple[Held, ...] = ()
        self._end: int | None = None
        """Open file that tells what was acknowledged."""
        self._retired: list[Segment] = []
        """Full segments that the disk may not have yet."""
        self._named = False
        """Whether the folder has names that the disk may not have yet."""
        self.fsyncs = 0

    @property
    def size(self) -> int:
        """Bytes of all files."""
        held, snapshot, segment = self.held, self.snapshot, self._segment  # may be asked from another thread
        there = (*held, *self._spares, *([] if snapshot is None else [snapshot]))
        return sum(each.size for each in there) + (segment.taken if segment else 0)

    @property
    def segments(self) -> int:
        """How many there are."""
        return len(self.held) + (self._segment is not None)

    def open(self, first: int, flags: int = 0, previous: int = 0) -> None:
        """Begin a segment, in which `first` will be the number of the next batch."""
        if self._end is None:
            self._end = self._disk.open(ACKNOWLEDGED, self.folder.fd)
        header, spare = self._header(SEGMENT, first, flags, previous), self._spares[-1].name if self._spares else None
        self._segment = Segment(self._disk, self.folder, header, self._told.standing(), spare)
        self._spares = self._spares[:-1]
        self._named = True
        self._acknowledge(self._segment)

    def append(self, kind: int, body: Sequence[bytes]) -> int:
        """Write one frame, behind a segment that is full in a new one; how many bytes it takes."""
        segment = self._segment
        assert segment is not None  # noqa: S101 - `open` comes first
        if segment.size >= self._settings.segment_bytes:
            segment = self.roll()
        size = segment.append(kind, body)
        self._acknowledge(segment)
        return size

    def roll(self) -> Segment:
        """Begin another segment behind the current one."""
        full = self._segment
        assert full is not None  # noqa: S101 - as above
        full.finish()
        if self.size > self._settings.limit_bytes:
            self._drop_spares()
        if self.size > self._settings.limit_bytes:
            raise OSError(errno.EDQUOT, f"the journal's files take {self.size} bytes, more than limit_bytes")
        try:
            self.open(self._told.next_number, previous=full.chain)
        finally:  # until the new one is there, the old one is what `abandon` finds
            if self._segment is not full:
                self._retire(full)
        assert self._segment is not None  # noqa: S101 - as above
        return self._segment

    def turn(self) -> int:
        """Begin another one, so that a snapshot may free this one, unless there is little in it; how much, then."""
        segment = self._segment
        assert segment is not None  # noqa: S101 - as above
        if segment.size < self._settings.fair_size:
            return segment.size
        self.roll()
        return 0

    def gone(self) -> bool:
        """Whether somebody deleted or moved the files."""
        return self._segment is None or self._segment.gone() or self.folder.replaced()

    def sync(self) -> None:
        """Return when the disk has everything."""
        self.syncing()()

    def syncing(self) -> Callable[[], None]:
        """An errand that has the disk take what was written until now."""
        retired, self._retired = self._retired, []
        named, self._named = self._named, False
        segment = self._segment

        def sync() -> None:
            try:
                for each in (*retired, *([] if segment is None else [segment])):
                    self._disk.sync(each.fd)
                    self.fsyncs += 1
                if named:
                    self._disk.sync_folder(self.folder.fd)
            finally:
                for each in retired:
                    os.close(each.fd)

        return sync

    def covered(self, number: int) -> list[str]:
        """Names of files that a snapshot of `number` makes needless."""
        behind = [each.first for each in self.held[1:]]
        behind += [] if self._segment is None else [self._segment.first]
        names = [each.name for each, first in zip(self.held, behind, strict=False) if first <= number + 1]
        return [*names, *([] if self.snapshot is None else [self.snapshot.name]), *self.needless]

    def compacting(
        self, end: End, parts: Sequence[bytes], doomed: Iterable[str], *, reuse: bool = False
    ) -> Callable[[], Compacted]:
        """An errand that writes a snapshot, and then removes what it makes needless, but for what is to be written over."""
        header = self._header(SNAPSHOT, end.number + 1)
        name, doomed = name_of(header.ordinal, SNAPSHOT), list(doomed)
        fit = self._fit_to_reuse(doomed, sum(map(len, parts))) if reuse and self._settings.reuses else []

        def compact() -> Compacted:
            fresh = f"{name}.tmp"
            try:
                size = self._fill(fresh, header, end, parts)
                self._disk.rename(fresh, name, self.folder.fd)
            except OSError:
                self.folder.remove([fresh])
                raise
            self._disk.sync_folder(self.folder.fd)
            spares = {each.name: each._replace(name=spare_of(each.name)) for each in fit if self._spare(each.name)}
            left = self.folder.remove(each for each in doomed if each not in spares)
            return Compacted(name, size, left, list(spares.values()))

        return compact

    def compacted(self, done: Compacted, number: int, doomed: Iterable[str]) -> None:
        """Take note of what that errand did."""
        gone = set(doomed)
        self.snapshot = Held(done.name, number + 1, done.size)
        self.held = [each for each in self.held if each.name not in gone]
        self.needless = done.left
        self._spares = (*self._spares, *done.spares)

    def abandon(self) -> Callable[[], None]:
        """An errand that closes the files, and gives back what they take beyond what was written."""
        segment, files = self._segment, self.let_go()

        def close() -> None:
            try:
                if segment is not None:
                    with suppress(OSError):  # it holds no less for it
                        segment.finish()
                self._drop_spares()
            finally:
                for each in files:
                    with suppress(OSError):  # what it holds was given up, or is there
                        os.close(each)

        return close

    def let_go(self) -> list[int]:
        """Which files are open; they are the caller's from now on."""
        segments = [*self._retired, *([] if self._segment is None else [self._segment])]
        files = [*(each.fd for each in segments), *([] if self._end is None else [self._end])]
        self._retired, self._segment, self._end = [], None, None
        return files

    def _retire(self, full: Segment) -> None:
        self.held.append(Held(full.name, full.first, full.size))
        if self._settings.fsync == "interval":
            self._retired.append(full)
        else:
            os.close(full.fd)

    def _acknowledge(self, segment: Segment) -> None:
        """Note how far it holds: last of all, where the disk is asked too."""
        if self._settings.fsync == "always":
            self.sync()
        assert self._end is not None  # noqa: S101 - as above
        self._disk.note(self._end, Acknowledged.pack(segment.ordinal, segment.size))

    def _fit_to_reuse(self, doomed: Iterable[str], snapshot_bytes: int) -> list[Held]:
        """Which of the segments that go are kept: large ones, as far as all files then take half of what they may."""
        going, settings = set(doomed), self._settings
        gone = [each for each in (*self.held, *([] if self.snapshot is None else [self.snapshot])) if each.name in going]
        room = settings.limit_bytes // 2 - (self.size - sum(each.size for each in gone) + snapshot_bytes)
        fit: list[Held] = []
        for each in gone:
            if settings.fair_size <= each.size <= room and each != self.snapshot and len(self._spares) + len(fit) < SPARES:
                fit.append(each)
                room -= each.size
        return fit

    def _spare(self, name: str) -> bool:
        """Have a segment wait to be written over; whether it does."""
        try:
            self._disk.rename(name, spare_of(name), self.folder.fd)
        except OSError:
            return False
        return True

    def _drop_spares(self) -> None:
        spares, self._spares = self._spares, ()
        self.needless = [*self.needless, *self.folder.remove(each.name for each in spares)]

    def _header(self, kind: int, first: int, flags: int = 0, previous: int = 0) -> Header:
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        return Header(kind, flags, ordinal, self._told.incarnation, first, previous, boot_id(), secrets.token_bytes(8))

    def _fill(self, name: str, header: Header, end: End, parts: Sequence[bytes]) -> int:
        data, chain = header.pack()
        file = self._disk.create(name, self.folder.fd)
        size = HEADER_BYTES
        try:
            self._disk.write(file, (data,))
            for kind, body in (*((PART, part) for part in parts), (END, pack_end(end))):
                head, chain = head_of(kind, (body,), chain)
                size += self._disk.write(file, (head, body))
            self._disk.sync(file)
        finally:
            os.close(file)
        return size
