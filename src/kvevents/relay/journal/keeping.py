"""Keeping a journal on a disk that may refuse, and coming back when it does not any more.

::

    new ──> disk ──> memory ──> disk          closed, from everywhere

In "disk" everything that is put is in the files when `put` returns. When the disk refuses anything but a snapshot, the files
are noted not to tell everything (`Folder.break_off`), and nothing is written in "memory" but for tries, which get rarer. When
one succeeds, a snapshot is wanted. It comes with what was sent behind it, which opens a segment of its own, and what is put
from then on follows there; when the snapshot is in its file, the files tell everything again.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvevents.relay.journal.clerk import Clerk
from kvevents.relay.journal.disk import Disk
from kvevents.relay.journal.folder import Folder, opened
from kvevents.relay.journal.frames import BEGINS, DETACHED
from kvevents.relay.journal.limits import PROBE_BYTES, JournalSettings
from kvevents.relay.journal.records import CLOSED, STANDING, End, Frame
from kvevents.relay.journal.recovery import Recovered
from kvevents.relay.journal.stats import State
from kvevents.relay.journal.writer import Compacted, Held, Told, Writer

PROBE: Final = "probe.tmp"
_DELETED: Final = OSError(errno.ENOENT, "its files were deleted or moved")


class _Compaction(NamedTuple):
    """A snapshot that is being written."""

    future: Future[Compacted]
    writer: Writer
    number: int
    doomed: list[str]
    since: int
    """Bytes behind the snapshot before, when it was begun."""


class Keeping:
    """The files of a journal, as far as the disk gives them. Only `__init__` raises what `opened` does."""

    def __init__(self, path: Path, settings: JournalSettings, disk: Disk, clerk: Clerk) -> None:
        self.state: State = "new"
        self.reason = ""
        self.marked = False
        self.writer: Writer | None = None
        self.failures = self.compactions = 0
        self._fsyncs = 0
        """Of writers before."""
        self._settings = settings
        self._disk = disk
        self._clerk = clerk
        self._path = path
        self._now = 0.0
        self._dirty_since: float | None = None
        self._syncing: Future[None] | None = None
        self._syncing_since = 0.0
        self._tend_at = 0.0
        self._compaction: _Compaction | None = None
        self._since = 0
        """Bytes behind the last snapshot."""
        self._snapshot_bytes = 0
        self._ready = False
        """Whether the disk takes things again."""
        self._pause = settings.retry_first
        self._retry_at = 0.0
        found = opened(path, disk)
        self.folder = None if isinstance(found, OSError) else found
        self._sick = found if isinstance(found, OSError) else None

    # --- beginning and end --------------------------------------------------------------------------------------------------

    def begin(self, told: Told, found: Recovered) -> None:
        """Begin a new life; whatever is there goes."""
        if self.folder is None:
            self._give_up(self._sick or _DELETED)
            return
        writer = self.writer = Writer(self.folder, self._disk, self._settings, told, found.log.next_ordinal)
        try:
            self.folder.break_off()
            writer.open(0, BEGINS)
            self.folder.make_whole()
        except OSError as error:
            self._give_up(error)
        else:
            writer.needless = self.folder.remove(found.log.everything)
            self.state = "disk"

    def resume(self, told: Told, found: Recovered) -> None:
        """Go on behind what was found."""
        folder, log, snapshot = self.folder, found.log, found.snapshot
        assert folder is not None  # noqa: S101 - without one, nothing was found
        writer = self.writer = Writer(folder, self._disk, self._settings, told, log.next_ordinal)
        writer.held = [Held(place.kept.name, place.header.first, end) for place, end in log.kept]
        self._since = sum(each.size for each in writer.held)
        if snapshot is not None:
            writer.snapshot = Held(snapshot.place.kept.name, snapshot.number + 1, snapshot.size)
            self._snapshot_bytes = snapshot.size
        try:
            writer.needless = folder.remove(log.needless)
            for place, end in log.kept[-1:]:
                if end < place.kept.size:
                    self._disk.cut(place.kept.name, end, folder.fd)
            writer.open(found.next_number, previous=log.chain)
            if found.clean:
                writer.sync()  # or a loss of power would leave the end of the life before as that of this one
        except OSError as error:
            self._give_up(error)
        else:
            self.state = "disk"

    def close(self) -> bool:
        """Write what waits, and let go of the folder; whether the disk had it all in time."""
        until = time.monotonic() + self._settings.close_timeout
        self._await(self._compaction and self._compaction.future, until)
        self._await(self._syncing, until)
        self._settle()
        if self.state == "disk" and self.put(CLOSED, b"") and self._settings.fsync == "interval" and self.writer:
            self._await(self._clerk.submit(self.writer.syncing()), until)
        told = self.state == "disk"
        self.state = "closed"
        self._abandon()
        idle = self._clerk.close(max(0.0, until - time.monotonic()))
        if idle and self.folder is not None:  # otherwise something may still be written there: nobody else may use it
            self.folder.close()
        return told and idle

    # --- in between ---------------------------------------------------------------------------------------------------------

    def put(self, kind: int, *body: bytes) -> bool:
        """Append one frame, whose body may be in pieces; whether it was."""
        writer = self.writer
        if writer is None:
            return False
        try:
            self._since += writer.append(kind, body)
        except OSError as error:
            self._give_up(error)
            return False
        if self._dirty_since is None:
            self._dirty_since = self._now
        return True

    def tick(self, now: float) -> None:
        """Do what is due; `now` is in seconds of any clock that never goes back."""
        self._now = now
        self._settle()
        if self.state == "disk":
            self._tend()
        elif self.state == "memory":
            self._retry()

    @property
    def needs_compaction(self) -> bool:
        """Whether there is so much behind the last snapshot that another one is due."""
        due = self._since > self._settings.wanted_beyond(self._snapshot_bytes)
        return due and self.state == "disk" and self._compaction is None and self._now >= self._retry_at

    @property
    def wants_snapshot(self) -> bool:
        """The same, or one is the way back to the disk."""
        return self._ready or self.needs_compaction

    @property
    def lag(self) -> float:
        """Seconds for which the oldest bytes wait for the disk; 0 where nobody asks it."""
        if self._settings.fsync != "interval" or self.writer is None:
            return 0.0
        since = self._syncing_since if self._syncing is not None else self._dirty_since
        return 0.0 if since is None else max(0.0, self._now - since)

    @property
    def fsyncs(self) -> int:
        """Of files, so far."""
        return self._fsyncs + (0 if self.writer is None else self.writer.fsyncs)

    # --- snapshots ----------------------------------------------------------------------------------------------------------

    def compact(self, end: End, parts: Sequence[bytes]) -> bool:
        """Have a snapshot written; whether that was begun."""
        writer = self.writer
        if writer is None or self.state != "disk" or self._compaction is not None:
            return False
        try:
            stays = writer.turn()
        except OSError as error:
            self._give_up(error)
            return False
        doomed = writer.covered(end.number)
        errand = writer.compacting(end, parts, doomed, reuse=True)
        self._begin_compaction(writer, errand, end.number, doomed, self._since - stays)
        return True

    def come_back(self, told: Told, end: End, parts: Sequence[bytes], tail: Iterable[Frame]) -> bool:
        """Have a snapshot written with what was sent behind it, as frames, from where the disk is used again."""
        if not self._ready or self.folder is None:
            return False
        self._ready = False
        try:
            there = [*(each.name for each in self.folder.files()), *self.folder.leftovers()]
            ordinal = max((each.ordinal for each in self.folder.files()), default=-1) + 1
            writer = self.writer = Writer(self.folder, self._disk, self._settings, told, ordinal)
            self._syncing = self._dirty_since = None
            writer.open(end.number + 1, DETACHED)
            for frame in (*tail, (STANDING, (told.standing(),))):
                writer.append(*frame)
        except OSError as error:
            self._give_up(error)
            return False
        self._dirty_since = self._now
        self._begin_compaction(writer, writer.compacting(end, parts, there), end.number, there, self._since)
        return True

    def _begin_compaction(
        self, writer: Writer, errand: Callable[[], Compacted], number: int, doomed: list[str], since: int
    ) -> None:
        self._compaction = _Compaction(self._clerk.submit(errand), writer, number, doomed, since)
        self._settle()

    def _end_compaction(self, compaction: _Compaction) -> None:
        error, stale = compaction.future.exception(), compaction.writer is not self.writer
        if stale:
            if error is None:
                compaction.writer.folder.remove(each.name for each in compaction.future.result().spares)
            return
        if isinstance(error, OSError):
            if self.state == "memory":
                self._give_up(error)
            else:
                self._fail(error, "no snapshot was written: ")
            return
        done = compaction.future.result()
        compaction.writer.compacted(done, compaction.number, compaction.doomed)
        self._since -= compaction.since
        self._snapshot_bytes = done.size
        self.compactions += 1
        if self.state == "memory":
            self._be_back()
        self.reason, self._pause = "", self._settings.retry_first

    def _be_back(self) -> None:
        assert self.folder is not None  # noqa: S101 - the snapshot is in it
        try:
            self.folder.make_whole()
        except OSError as error:
            self._give_up(error)
        else:
            self.state = "disk"

    # --- the disk -----------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Take note of errands that are done."""
        syncing, compaction = self._syncing, self._compaction
        if syncing is not None and syncing.done():
            self._syncing = None
            error = syncing.exception()
            if isinstance(error, OSError):
                self._give_up(error)
            else:
                syncing.result()
        if compaction is not None and compaction.future.done():
            self._compaction = None
            self._end_compaction(compaction)

    def _tend(self) -> None:
        if self._now < self._tend_at or self.writer is None:
            return
        self._tend_at = self._now + self._settings.fsync_interval
        if self.writer.gone():
            self._give_up(_DELETED)
        elif self._settings.fsync == "interval" and self._syncing is None and self._dirty_since is not None:
            self._syncing_since, self._dirty_since = self._dirty_since, None
            self._syncing = self._clerk.submit(self.writer.syncing())
            self._settle()

    def _give_up(self, error: OSError) -> None:
        """The disk refused: nothing more is written there, and it is to say so."""
        self._abandon()
        self.state = "memory"
        self._ready = False
        self.marked = self.folder is not None and self.folder.break_off()
        self._fail(error)

    def _fail(self, error: OSError, what: str = "") -> None:
        self.failures += 1
        self.reason = what + (error.strerror or str(error))
        self._retry_at = self._now + self._pause
        self._pause = min(2 * self._pause, self._settings.retry_most)

    def _abandon(self) -> None:
        writer, self.writer = self.writer, None
        self._syncing = self._dirty_since = None
        if writer is not None:
            self._fsyncs += writer.fsyncs
            self._clerk.submit(writer.abandon())

    def _retry(self) -> None:
        """In memory: see whether the disk takes things again."""
        if self.writer is not None or self._ready or self._now < self._retry_at or self._compaction is not None:
            return
        try:
            if self.folder is None or self.folder.replaced():
                self._reopen()
            self._probe()
        except OSError as error:
            self._fail(error)
        else:
            self._ready = True

    def _reopen(self) -> None:
        """The folder that is there now. What is in it is not what was sent last."""
        folder = Folder(self._path, self._disk, parents=False)
        if self.folder is not None:
            self._clerk.submit(self.folder.close)
        self.folder = folder

    def _probe(self) -> None:
        assert self.folder is not None  # noqa: S101 - it was opened
        self.marked = self.folder.break_off() or self.marked
        self.folder.remove([PROBE])
        file = self._disk.create(PROBE, self.folder.fd)
        try:
            self._disk.reserve(file, self._snapshot_bytes + PROBE_BYTES)
        finally:
            os.close(file)
            self.folder.remove([PROBE])

    @staticmethod
    def _await(future: Future[Any] | None, until: float) -> None:
        if future is not None:
            with suppress(FutureTimeoutError):
                future.exception(max(0.0, until - time.monotonic()))
