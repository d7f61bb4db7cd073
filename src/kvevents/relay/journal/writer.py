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
from kvevents.relay.journal.folder import Folder, boot_id, name_of
from kvevents.relay.journal.frames import HEADER_BYTES, SEGMENT, SNAPSHOT, Header, head_of
from kvevents.relay.journal.limits import FSYNC_POLICIES, JournalSettings
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
    """A segment that is not written any more."""

    name: str
    first: int
    size: int


class Segment:
    """The file that is appended to."""

    def __init__(self, disk: Disk, folder: Folder, header: Header, standing: bytes) -> None:
        self.name: Final = name_of(header.ordinal, SEGMENT)
        self.first: Final = header.first
        self._disk = disk
        data, chain = header.pack()
        head, self.chain = head_of(STANDING, (standing,), chain)
        self.fd: Final = disk.create(self.name, folder.fd)
        self.size = len(data) + len(head) + len(standing)
        try:
            disk.write(self.fd, (data, head, standing))
        except BaseException:
            os.close(self.fd)
            raise

    def append(self, kind: int, body: Sequence[bytes]) -> int:
        """Write one frame; how many bytes it takes."""
        head, self.chain = head_of(kind, body, self.chain)
        size = self._disk.write(self.fd, (head, *body))
        self.size += size
        return size

    def gone(self) -> bool:
        """Whether the file was deleted, while it is still open here."""
        return os.fstat(self.fd).st_nlink == 0


class Compacted(NamedTuple):
    """A snapshot that is in its file."""

    name: str
    size: int
    left: list[str]
    """Names of files that it makes needless, and that could not be removed."""


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
        self._retired: list[Segment] = []
        """Full segments that the disk may not have yet."""
        self._named = False
        """Whether the folder has names that the disk may not have yet."""
        self.fsyncs = 0

    @property
    def size(self) -> int:
        """Bytes of all files."""
        held, snapshot, segment = self.held, self.snapshot, self._segment  # may be asked from another thread
        return sum(each.size for each in held) + (snapshot.size if snapshot else 0) + (segment.size if segment else 0)

    @property
    def segments(self) -> int:
        """How many there are."""
        return len(self.held) + (self._segment is not None)

    def open(self, first: int, flags: int = 0, previous: int = 0) -> None:
        """Begin a segment, in which `first` will be the number of the next batch."""
        header = self._header(SEGMENT, first, flags, previous)
        self._segment = Segment(self._disk, self.folder, header, self._told.standing())
        self._named = True
        if self._settings.fsync == "always":
            self.sync()

    def append(self, kind: int, body: Sequence[bytes]) -> int:
        """Write one frame, behind a segment that is full in a new one; how many bytes it takes."""
        segment = self._segment
        assert segment is not None  # noqa: S101 - `open` comes first
        if segment.size >= self._settings.segment_bytes:
            segment = self.roll()
        size = segment.append(kind, body)
        if self._settings.fsync == "always":
            self.sync()
        return size

    def roll(self) -> Segment:
        """Begin another segment behind the current one."""
        full = self._segment
        assert full is not None  # noqa: S101 - as above
        if self.size > self._settings.limit_bytes:
            raise OSError(errno.EDQUOT, f"the journal's files take {self.size} bytes, more than limit_bytes")
        # Until the new one is there, the old one is what `abandon` finds.
        self.open(self._told.next_number, previous=full.chain)
        self.held.append(Held(full.name, full.first, full.size))
        if self._settings.fsync == "interval":
            self._retired.append(full)
        else:
            os.close(full.fd)
        assert self._segment is not None  # noqa: S101 - as above
        return self._segment

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

    def compacting(self, end: End, parts: Sequence[bytes], doomed: Iterable[str]) -> Callable[[], Compacted]:
        """An errand that writes a snapshot, and then removes what it makes needless."""
        header = self._header(SNAPSHOT, end.number + 1)
        name, doomed = name_of(header.ordinal, SNAPSHOT), list(doomed)

        def compact() -> Compacted:
            fresh = f"{name}.tmp"
            try:
                size = self._fill(fresh, header, end, parts)
                self._disk.rename(fresh, name, self.folder.fd)
            except OSError:
                self.folder.remove([fresh])
                raise
            self._disk.sync_folder(self.folder.fd)
            return Compacted(name, size, self.folder.remove(doomed))

        return compact

    def compacted(self, done: Compacted, number: int, doomed: Iterable[str]) -> None:
        """Take note of what that errand did."""
        gone = set(doomed)
        self.snapshot = Held(done.name, number + 1, done.size)
        self.held = [each for each in self.held if each.name not in gone]
        self.needless = done.left

    def abandon(self) -> Callable[[], None]:
        """An errand that closes the files as they are."""
        open_files = [*self._retired, *([] if self._segment is None else [self._segment])]
        self._retired, self._segment = [], None

        def close() -> None:
            for each in open_files:
                with suppress(OSError):  # what it holds was given up, or is there
                    os.close(each.fd)

        return close

    def _header(self, kind: int, first: int, flags: int = 0, previous: int = 0) -> Header:
        policy = FSYNC_POLICIES.index(self._settings.fsync)
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        return Header(kind, policy, flags, ordinal, self._told.incarnation, first, previous, boot_id(), secrets.token_bytes(8))

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
