"""The journal of a relay: a snapshot file and a log behind it, from which a killed relay goes on with the same bytes.

::

    new ──> disk ──> memory ──> disk          closed, from everywhere

In "disk" all that is appended is in the log when `append` returns, so a killed process loses nothing that it sent. When the log
has become long, a new log is begun, and a thread writes a *snapshot*: the state, and the batches behind it, up to the new log.
When the snapshot has its name, the files before it are removed.

When the disk refuses an append, the logs are marked as broken, which needs no room, and the state is "memory": the relay goes
on, and nothing is written. After growing pauses the disk is tried. When it takes something, `wants_snapshot` asks the relay for
a snapshot, which together with a new log is the way back. Until the snapshot is there, the new log is marked as broken too.

The disk is asked to sync snapshots before they replace anything, a log when it is closed or continued, and never for a batch:
batches that a machine loses with its power come again from the upstream, in a new incarnation of the relay.
"""

from __future__ import annotations

import copy
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from kvevents.relay.journal import logfile
from kvevents.relay.journal.files import TEMPORARY, Disk, Folder, open_folder
from kvevents.relay.journal.logfile import Batches, Header, Origin, Record, Standing, Writer, generation_of
from kvevents.relay.journal.recovery import Recovered, recover

State: TypeAlias = Literal["new", "disk", "memory", "closed"]
"""Not yet begun; all that is sent is in the files; the disk refuses, and nothing is recorded; closed."""

MIB: Final = 1 << 20
_PROBE: Final = f"probe{TEMPORARY}"
_UNMARKED: Final = "the logs could not be marked either: remove the folder before another relay starts with it"
_DELETED: Final = OSError(errno.ENOENT, "its files were deleted or moved")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLimits:
    """Bounds of a journal."""

    compact_bytes: int = 64 * MIB
    """Bytes of logs from which a snapshot is wanted, or twice the last snapshot's, if that is more."""
    limit_bytes: int = 8192 * MIB
    """Of logs, where no snapshot can be made. Beyond it the disk is left to others, as if it were full."""
    retry_first: float = 1.0
    """Seconds until a disk that refused is tried again; doubling."""
    retry_most: float = 60.0
    close_timeout: float = 10.0
    """Seconds that `close` waits for the disk."""
    check_seconds: float = 1.0
    """Between two looks at whether the files are still there."""
    probe_bytes: int = MIB
    """Room that the disk must have again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStats:
    """What a journal reports about itself."""

    state: State
    reason: str
    """Why the state is "memory", or the last snapshot failed; empty otherwise."""
    bytes: int
    """Of the snapshot and the logs."""
    appended: int
    """Batches that were written."""
    dropped: int
    """Batches that were not, in memory."""
    failures: int
    """Times that the disk refused something."""
    snapshots: int
    """Written."""


class _Writing(NamedTuple):
    """A snapshot that is being written."""

    result: Future[int]
    """Its size."""
    log: Writer
    """The log that continues it."""


class Journal:
    """A record in one folder. `recover` first, then `begin` or `resume`; then it can be appended to.

    For one thread, which calls `tick` several times a second. Append before sending: then nothing was sent that is not here.
    What the disk refuses never raises: the state becomes "memory", with a reason.

    Raises `JournalError` for a folder that an operator must change: one that cannot be written, or that another process uses.
    Tests pass `threaded=False` to have snapshots written at once.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        limits: JournalLimits | None = None,
        *,
        disk: Disk | None = None,
        threaded: bool = True,
    ) -> None:
        self.path: Final = Path(folder)
        self.limits: Final = limits or JournalLimits()
        self.state: State = "new"
        self._disk: Final = disk or Disk()
        self._threaded: Final = threaded
        self._known = Standing(0, None, {}, {})
        self._incarnation = self._generation = 0
        self._log: Writer | None = None
        self._closed_logs = 0
        """Bytes of logs behind the last snapshot that are not written any more."""
        self._snapshot_bytes = 0
        self._writing: _Writing | None = None
        self._is_back = False
        """Whether the disk takes things again, and a snapshot is wanted."""
        self._is_marked = True
        """Whether, in memory, the files say that they do not tell everything."""
        self._reason = ""
        self._appended = self._dropped = self._failures = self._snapshots = 0
        self._now = self._check_at = self._retry_at = 0.0
        self._pause = self.limits.retry_first
        found = open_folder(self.path)
        self._folder = None if isinstance(found, OSError) else found
        self._refused = found if isinstance(found, OSError) else None

    # --- beginning ----------------------------------------------------------------------------------------------------------

    def recover(self) -> Recovered:
        """Read what the files hold. Writes nothing. Raises `JournalError` for files of a later release only."""
        if self._folder is None:
            return Recovered(doubt=f"{self.path} cannot be used now: {self._refused}")
        return recover(self._folder)

    def begin(self, incarnation: int) -> None:
        """Begin a new life of the relay, with number 0, and remove whatever the folder holds."""
        self._incarnation = incarnation
        self._start(())

    def resume(self, found: Recovered) -> None:
        """Continue behind what was recovered, which must be `resumable`."""
        assert found.incarnation is not None  # noqa: S101 - or it is not
        self._incarnation = found.incarnation
        self._known = Standing(found.next_number, found.mark, dict(found.positions), dict(found.origins))
        sizes = {kind: sum(each.committed for each in found.headers if each.kind == kind) for kind in logfile.SUFFIXES}
        self._snapshot_bytes, self._closed_logs = sizes[logfile.SNAPSHOT], sizes[logfile.LOG]
        self._start([each.name for each in found.headers])

    def _start(self, continued: Sequence[str]) -> None:
        try:
            if self._folder is None:
                raise self._refused or _DELETED
            names = self._folder.names()
            self._generation = _newest_of(names)
            self._log = log = self._new_log(logfile.OPEN)
            # A machine that loses its power must find that the log before was continued.
            self._disk.sync(log.fd)
            self._disk.sync(self._folder.fd)
            if continued:
                self._set_state(continued[-1], logfile.CONTINUED)
            for name in names:
                if name not in continued and (generation_of(name) is not None or name == _PROBE):
                    with suppress(OSError):  # recovery does not read it
                        self._disk.remove(name, self._folder.fd)
        except OSError as error:
            self._give_up(error)
        else:
            self.state = "disk"

    # --- what is recorded ---------------------------------------------------------------------------------------------------

    def append(self, batches: Batches) -> None:
        """Record batches that are about to be sent, numbered on from the last one: all of them, or none."""
        count = len(batches.payloads)
        if self._put(batches):
            self._appended += count
        else:
            self._dropped += count
        self._known.positions.update(batches.positions())
        self._known.next_number += count

    def skip(self, number: int) -> None:
        """No batch has the next number."""
        self._put(logfile.Skipped(number, number))
        self._known.next_number += 1

    def mark(self, mark: bytes) -> None:
        """Keep this in the place of the mark before."""
        self._put(logfile.Marked(mark))
        self._known.mark = mark

    def note_origin(self, upstream: int, origin: Origin) -> None:
        """Keep from which batch of an upstream those are made that are appended next, in the place of the one before."""
        self._put(logfile.OriginNoted(upstream, origin))
        self._known.origins[upstream] = origin

    def reset(self, upstream: int, incarnation: int) -> None:
        """An upstream began a new life."""
        self._put(logfile.UpstreamReset(upstream, incarnation))
        self._known.positions[upstream] = (incarnation, -1)

    def snapshot(
        self, number: int, parts: Sequence[bytes], tail: Iterable[tuple[int, bytes]], upstream: int, *, partial: bool = False
    ) -> bool:
        """Have a snapshot written, if `wants_snapshot`; whether that was begun.

        `parts` are the state as of `number`, -1 for none; `tail` are all batches that were sent behind it, which are kept as
        those of `upstream`. The snapshot is written in the background, and what it makes needless is removed.
        """
        if not self.wants_snapshot or self._folder is None:
            return False
        self._is_back = False
        before = self._log
        try:
            # In memory there is a gap before the new log, until the snapshot fills it.
            log = self._new_log(logfile.OPEN if self.state == "disk" else logfile.BROKEN, before)
        except OSError as error:
            self._give_up(error)
            return False
        self._log = log
        self._closed_logs += 0 if before is None else before.size
        end = self._known.next_number
        header = Header(logfile.SNAPSHOT, log.header.generation, self._incarnation, end)
        records = (
            logfile.SnapshotHead(number, partial),
            *map(logfile.Part, parts),
            *logfile.tail_records(tail, number + 1, end, upstream),
            copy.deepcopy(self._known),
        )
        self._writing = _Writing(self._in_background(self._snapshot_writer(self._folder, header, records, before)), log)
        self._settle()
        return True

    def _snapshot_writer(
        self, folder: Folder, header: Header, records: Sequence[Record], before: Writer | None
    ) -> Callable[[], int]:
        disk, temporary = self._disk, header.name + TEMPORARY

        def write() -> int:
            try:
                if before is not None:
                    disk.sync(before.fd)
            finally:
                if before is not None:
                    before.close()
            snapshot = Writer(disk, folder, temporary, header)
            try:
                for record in records:
                    snapshot.append(record)
                snapshot.commit()
                disk.sync(snapshot.fd)
            finally:
                snapshot.close()
            disk.rename(temporary, header.name, folder.fd)
            disk.sync(folder.fd)
            for name in folder.names():
                generation = generation_of(name)
                if generation is not None and generation < header.generation:
                    with suppress(OSError):  # recovery does not read it
                        disk.remove(name, folder.fd)
            return snapshot.size

        return write

    # --- now and then, and the end ------------------------------------------------------------------------------------------

    def tick(self, now: float | None = None) -> None:
        """Do what is due; `now` is in seconds of any clock that never goes back."""
        self._now = time.monotonic() if now is None else now
        self._settle()
        if self.state == "memory":
            self._retry()
        elif self._now >= self._check_at:
            self._check_at = self._now + self.limits.check_seconds
            log = self._log
            if log is None or self._folder is None or os.fstat(log.fd).st_nlink == 0 or self._folder.is_gone():
                self._give_up(_DELETED)

    @property
    def wants_snapshot(self) -> bool:
        """Whether the logs are long, or a snapshot is the way back from memory."""
        if self._writing is not None:
            return False
        due = self._log_bytes > max(self.limits.compact_bytes, 2 * self._snapshot_bytes)
        return self._is_back or (due and self.state == "disk" and self._now >= self._retry_at)

    def close(self) -> bool:
        """Mark the end, and release the folder; idempotent. Whether the disk had everything in `close_timeout`."""
        if self.state == "closed":
            return True
        until = time.monotonic() + self.limits.close_timeout
        done = self._writing is None or _wait(self._writing.result, until)
        self._settle()
        log, self._log = self._log, None
        if self.state == "disk" and log is not None:
            done &= _wait(self._in_background(lambda: self._end(log)), until)
            is_recorded = done
        else:
            is_recorded = False
        self.state = "closed"
        if self._folder is not None and done:  # otherwise something might still be written there: no other process may use it
            self._folder.close()
        return is_recorded

    def stats(self) -> JournalStats:
        """How it is doing."""
        return JournalStats(
            state=self.state,
            reason=self._reason if self._is_marked or self.state != "memory" else f"{self._reason}; {_UNMARKED}",
            bytes=self._snapshot_bytes + self._log_bytes,
            appended=self._appended,
            dropped=self._dropped,
            failures=self._failures,
            snapshots=self._snapshots,
        )

    def __repr__(self) -> str:
        stats = self.stats()
        reason = f" ({stats.reason})" if stats.reason else ""
        dropped = f", {stats.dropped} batches not recorded" if stats.dropped else ""
        life = f"incarnation {self._incarnation}, next number {self._known.next_number}"
        return f"<Journal {self.path} {stats.state}{reason}, {life}, {stats.bytes / MIB:.1f} MiB{dropped}>"

    # --- the disk -----------------------------------------------------------------------------------------------------------

    @property
    def _log_bytes(self) -> int:
        return self._closed_logs + (0 if self._log is None else self._log.size)

    def _put(self, record: Record) -> bool:
        log = self._log
        if log is None:
            return False
        if self._log_bytes > self.limits.limit_bytes:
            self._give_up(OSError(errno.EDQUOT, f"the logs take {self._log_bytes} bytes, more than limit_bytes"))
            return False
        try:
            log.append(record)
            log.commit()
        except OSError as error:
            self._give_up(error)
            return False
        return self.state == "disk"

    def _new_log(self, state: bytes, before: Writer | None = None) -> Writer:
        """Begin a log behind the one before, if there is one. It has its name when its header is there."""
        assert self._folder is not None  # noqa: S101 - the callers look
        self._generation += 1
        header = Header(logfile.LOG, self._generation, self._incarnation, self._known.next_number, state=state)
        log = Writer(self._disk, self._folder, header.name + TEMPORARY, header)
        try:
            self._disk.rename(header.name + TEMPORARY, header.name, self._folder.fd)
            if before is not None:
                self._set_state(before.header.name, logfile.CONTINUED)
        except BaseException:
            log.close()
            raise
        return log

    def _set_state(self, name: str, state: bytes) -> None:
        assert self._folder is not None  # noqa: S101 - as above
        file = self._disk.open(name, self._folder.fd)
        try:
            self._disk.overwrite(file, logfile.STATE_AT, state)
        except BaseException:
            os.close(file)
            raise

        def sync() -> None:
            try:
                self._disk.sync(file)
            finally:
                os.close(file)

        self._in_background(sync)

    def _end(self, log: Writer) -> None:
        log.set_state(logfile.CLOSED)
        self._disk.sync(log.fd)
        log.close()

    def _settle(self) -> None:
        """Take note of a snapshot that is done."""
        writing = self._writing
        if writing is None or not writing.result.done():
            return
        self._writing = None
        error = writing.result.exception()
        if writing.log is not self._log:
            return  # the disk refused the log meanwhile
        if error is not None:
            if self.state == "memory":
                self._give_up(error)
            else:
                self._fail(error, "no snapshot was written: ")
            return
        self._snapshot_bytes, self._closed_logs = writing.result.result(), 0
        self._snapshots += 1
        if self.state == "memory":
            try:
                writing.log.set_state(logfile.OPEN)
            except OSError as refused:
                self._give_up(refused)
                return
            self.state = "disk"
        self._reason, self._pause = "", self.limits.retry_first

    def _give_up(self, error: BaseException) -> None:
        """Write nothing more, and mark the logs: what is sent from here on is not in them."""
        log, self._log = self._log, None
        self.state = "memory"
        self._is_back = False
        if log is not None:
            log.close()
        self._is_marked = self._mark_broken()
        self._fail(error)

    def _mark_broken(self) -> bool:
        """Have no later relay take the logs for all that was sent; whether the disk allowed that, in any way."""
        if self._folder is None:
            return True
        try:
            names = [name for name in self._folder.names() if name.endswith(logfile.SUFFIXES[logfile.LOG])]
            for name in names:
                try:
                    self._set_state(name, logfile.BROKEN)
                except OSError:
                    self._disk.remove(name, self._folder.fd)
        except OSError:
            return False
        return True

    def _fail(self, error: BaseException, what: str = "") -> None:
        self._failures += 1
        self._reason = what + (getattr(error, "strerror", None) or str(error) or type(error).__name__)
        self._retry_at = self._now + self._pause
        self._pause = min(2 * self._pause, self.limits.retry_most)

    def _retry(self) -> None:
        """Find out whether the disk takes things again."""
        if self._is_back or self._writing is not None or self._now < self._retry_at:
            return
        try:
            if self._folder is None or self._folder.is_gone():
                folder = Folder(self.path, parents=False)
                if self._folder is not None:
                    self._folder.close()
                self._folder = folder
                self._generation = max(self._generation, _newest_of(folder.names()))
            self._is_marked = self._mark_broken()
            file = self._disk.create(_PROBE, self._folder.fd)
            try:
                self._disk.write(file, (bytes(self.limits.probe_bytes),))
            finally:
                os.close(file)
                self._disk.remove(_PROBE, self._folder.fd)
        except OSError as error:
            self._fail(error)
        else:
            self._is_back = True

    def _in_background(self, task: Callable[[], Any]) -> Future[Any]:
        """Run a task that waits for the disk. A disk that never answers does not keep the process from ending."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(task())
            except Exception as error:  # noqa: BLE001 - the caller looks at it
                future.set_exception(error)

        if self._threaded:
            threading.Thread(target=run, name="kvevents-journal", daemon=True).start()
        else:
            run()
        return future


def _newest_of(names: Iterable[str]) -> int:
    """The highest generation of files that are finished."""
    return max((generation_of(name) or 0 for name in names if not name.endswith(TEMPORARY)), default=0)


def _wait(result: Future[Any], until: float) -> bool:
    """Whether it was done without an error in time."""
    try:
        return result.exception(max(0.0, until - time.monotonic())) is None
    except FutureTimeoutError:
        return False
