"""The journal of a relay: a snapshot file and a later log, from which a relay that was killed continues its stream.

::

    new ──> disk ──> memory ──> disk          closed, from every state

In state "disk", all appended batches are in the log when `append` returns, so a killed process loses no batch that it sent.
When the log is long, the journal begins a new log, and a thread writes a *snapshot*: the state, and the batches between that
state and the new log. The complete snapshot is renamed to its final name, and older files are removed.

When an append fails, the logs are marked as broken, which needs no space on the disk, and the state becomes "memory": the relay
continues, and nothing is written. The journal tries the disk again after growing delays. When the disk works, `wants_snapshot`
asks the relay for a snapshot. The snapshot and a new log lead back to state "disk". The new log is also marked as broken until
the snapshot is complete.

A snapshot is synced before it replaces files. A log is synced when it is closed or continued, but not after each batch. So
after a power failure the relay begins a new incarnation, and receives lost batches from the upstream again.
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
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from kvevents.errors import JournalError, reason_of
from kvevents.relay import journal_format
from kvevents.relay.journal_disk import TEMPORARY_SUFFIX, Disk, Folder
from kvevents.relay.journal_recovery import RecoveredJournal, recover

JournalState: TypeAlias = Literal["new", "disk", "memory", "closed"]
"""`new` before `begin`; `disk` if the files have all sent batches; `memory` after the disk has failed: no batch is recorded."""

MIB: Final = 1 << 20
_RECOVERABLE_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
"""Errors that can disappear without action. If opening the folder raises any other error, an operator must correct it."""
_PROBE_NAME: Final = f"probe{TEMPORARY_SUFFIX}"
_UNMARKED_ADVICE: Final = "the logs could not be marked as broken: remove the folder before another relay starts with it"
_DELETED_ERROR: Final = OSError(errno.ENOENT, "its files were deleted or moved")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLimits:
    """Limits and timers of a journal. Times are in seconds."""

    compact_bytes: int = 64 * MIB
    """A snapshot is due if the logs exceed this size in bytes and twice the size of the previous snapshot."""
    max_log_bytes: int = 8192 * MIB
    """Maximum size of the logs while no snapshot can be made. Above this size the journal behaves as if the disk were full."""
    first_retry_delay: float = 1.0
    """Delay before a failed disk is tried again; each further delay is twice as long."""
    max_retry_delay: float = 60.0
    """Maximum delay until a failed disk is tried again."""
    close_timeout: float = 10.0
    """Maximum time for which `close` waits for the disk."""
    check_interval: float = 1.0
    """Time between two checks that the files exist."""
    probe_bytes: int = MIB
    """Free space that a failed disk must have before it is used again."""
    frame_batches: int = 1_000
    """Maximum number of batches in one frame of a snapshot."""
    frame_bytes: int = 8 * MIB
    """Maximum number of bytes in one frame of a snapshot, unless a single payload is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStats:
    """State and counters of a journal."""

    state: JournalState
    reason: str
    """Why the state is "memory" or the newest snapshot failed; empty if neither happened."""
    bytes: int
    """Size of the snapshot and the logs."""
    appended: int
    """Number of batches that were written."""
    dropped: int
    """Number of batches that were not written, because the state was "memory"."""
    failures: int
    """Number of disk operations that failed."""
    snapshots: int
    """Number of snapshots that were written."""


class _SnapshotWrite(NamedTuple):
    result: Future[int]
    """Result of the thread: the size of the snapshot in bytes."""
    log: journal_format.FileWriter
    """The log that continues the snapshot."""


class Journal:
    """Records the batches of one relay in one folder. Call `recover`, then `begin` or `resume`, then `append`.

    Use the object from one thread, and call `tick` several times a second. Append batches before sending them, so that the
    journal has every batch that was sent. A failing disk raises no exception; the state becomes "memory", with a reason.

    Raises `JournalError` for a folder that cannot be written, or that another process uses.
    """

    def __init__(
        self, folder: str | os.PathLike[str], limits: JournalLimits | None = None, *, disk: Disk | None = None
    ) -> None:
        self.path: Final = Path(folder)
        self.limits: Final = limits or JournalLimits()
        self.state: JournalState = "new"
        self._disk: Final = disk or Disk()
        self._end_state = journal_format.EndState(0, None, {}, {})
        self._incarnation = self._generation = 0
        self._log: journal_format.FileWriter | None = None
        self._closed_logs = 0
        """Number of bytes of the logs after the newest snapshot, except the current log."""
        self._snapshot_bytes = 0
        self._snapshot_write: _SnapshotWrite | None = None
        self._is_disk_back = False
        """Whether a failed disk works again, so that a snapshot can lead back to state "disk"."""
        self._is_marked = True
        """Whether, in state "memory", all logs are marked as broken."""
        self._reason = ""
        self._appended = self._dropped = self._failures = self._snapshots = 0
        self._now = self._check_at = self._retry_at = 0.0
        self._retry_delay = self.limits.first_retry_delay
        self._folder: Folder | None = None
        self._open_error: OSError | None = None
        try:
            self._folder = Folder(self.path)
        except JournalError:
            raise
        except OSError as error:
            if error.errno not in _RECOVERABLE_ERRNOS:
                hint = "choose a folder that this process can write"
                raise JournalError(f"cannot open the journal folder {self.path}: {error.strerror}; {hint}") from error
            self._open_error = error

    # --- start

    def recover(self) -> RecoveredJournal:
        """Read the files, without writing. Raises `JournalError` only for files of a later release."""
        if self._folder is None:
            reason = reason_of(self._open_error or _DELETED_ERROR)
            return RecoveredJournal(incomplete_reason=f"{self.path} cannot be used now: {reason}")
        return recover(self._folder, self._disk.boot_id())

    def begin(self, incarnation: int) -> None:
        """Begin a new incarnation of the relay, with number 0, and remove all files of earlier incarnations."""
        self._incarnation = incarnation
        self._start(())

    def resume(self, recovered: RecoveredJournal) -> None:
        """Continue after the records in `recovered`, which must be complete."""
        assert recovered.incarnation is not None  # noqa: S101 - complete records have an incarnation
        self._incarnation = recovered.incarnation
        positions, origins = dict(recovered.positions), dict(recovered.origins)
        self._end_state = journal_format.EndState(recovered.next_number, recovered.checkpoint, positions, origins)
        self._snapshot_bytes = sum(header.committed for header in recovered.headers if header.kind == journal_format.SNAPSHOT)
        self._closed_logs = sum(header.committed for header in recovered.headers if header.kind == journal_format.LOG)
        self._start([header.name for header in recovered.headers])

    def _start(self, continued_names: Sequence[str]) -> None:
        try:
            if self._folder is None:
                raise self._open_error or _DELETED_ERROR
            names = self._folder.names()
            self._generation = _newest_generation(names)
            self._log = log = self._new_log(journal_format.OPEN_STATE)
            # The new log is synced first: after a power failure, the previous log must be known to have a successor.
            self._disk.sync(log.fd)
            self._disk.sync(self._folder.fd)
            if continued_names:
                self._set_state(continued_names[-1], journal_format.CONTINUED_STATE)
            for name in names:
                if name not in continued_names and (journal_format.generation_of(name) is not None or name == _PROBE_NAME):
                    with suppress(OSError):  # recovery ignores a file of an earlier incarnation
                        self._disk.remove(name, self._folder.fd)
        except OSError as error:
            self._stop_recording(error)
        else:
            self.state = "disk"

    # --- records

    def append(self, batches: journal_format.Batches) -> None:
        """Record consecutive batches, either all or none, before they are sent."""
        count = len(batches.payloads)
        if self._append(batches):
            self._appended += count
        else:
            self._dropped += count
        self._end_state.positions.update(batches.positions())
        self._end_state.next_number += count

    def skip(self, number: int) -> None:
        """Record that no batch has the next number."""
        self._append(journal_format.SkippedNumbers(number, number))
        self._end_state.next_number += 1

    def set_checkpoint(self, checkpoint: bytes) -> None:
        """Record the relay's checkpoint, which replaces the previous checkpoint."""
        self._append(journal_format.CheckpointSet(checkpoint))
        self._end_state.checkpoint = checkpoint

    def set_origin(self, upstream: int, origin: journal_format.Origin) -> None:
        """Record the upstream batch from which the next batches are made, in place of the upstream's previous origin."""
        self._append(journal_format.OriginSet(upstream, origin))
        self._end_state.origins[upstream] = origin

    def reset(self, upstream: int, incarnation: int) -> None:
        """Record that an upstream began a new incarnation."""
        self._append(journal_format.UpstreamReset(upstream, incarnation))
        self._end_state.positions[upstream] = (incarnation, -1)

    def _append(self, record: journal_format.JournalRecord) -> bool:
        log = self._log
        if log is None:
            return False
        if self._log_bytes > self.limits.max_log_bytes:
            self._stop_recording(OSError(errno.EDQUOT, f"the logs have {self._log_bytes} bytes, more than max_log_bytes"))
            return False
        try:
            log.append(record)
            log.commit()
        except OSError as error:
            self._stop_recording(error)
            return False
        return self.state == "disk"

    # --- snapshots

    @property
    def wants_snapshot(self) -> bool:
        """Whether a snapshot is due, because the logs are long or the journal can leave state "memory"."""
        if self._snapshot_write is not None:
            return False
        is_due = self._log_bytes > max(self.limits.compact_bytes, 2 * self._snapshot_bytes)
        return self._is_disk_back or (is_due and self.state == "disk" and self._now >= self._retry_at)

    def snapshot(
        self, number: int, parts: Sequence[bytes], tail: Iterable[tuple[int, bytes]], upstream: int, *, is_partial: bool = False
    ) -> bool:
        """Begin to write a snapshot if `wants_snapshot`; return whether it was begun.

        `parts` are the state after batch `number`; without a state, `number` is -1. `tail` has all later batches that were
        sent, which are recorded as batches of `upstream`. A thread writes the snapshot, and removes the files that it replaces.
        """
        if not self.wants_snapshot or self._folder is None:
            return False
        self._is_disk_back = False
        ended_log = self._log
        try:
            # In state "memory", the older files lack batches, so the new log is unusable until the snapshot is complete.
            log = self._new_log(journal_format.OPEN_STATE if self.state == "disk" else journal_format.BROKEN_STATE, ended_log)
        except OSError as error:
            self._stop_recording(error)
            return False
        self._log = log
        self._closed_logs += 0 if ended_log is None else ended_log.size
        end = self._end_state.next_number
        header = journal_format.Header(journal_format.SNAPSHOT, log.header.generation, self._incarnation, end)
        limits = self.limits
        records = (
            journal_format.SnapshotHead(number, is_partial),
            *map(journal_format.SnapshotPart, parts),
            *journal_format.tail_records(
                tail, number + 1, end, upstream, max_batches=limits.frame_batches, max_bytes=limits.frame_bytes
            ),
            copy.deepcopy(self._end_state),
        )
        write = partial(journal_format.write_snapshot, self._disk, self._folder, header, records, ended_log)
        self._snapshot_write = _SnapshotWrite(self._in_background(write), log)
        self._check_snapshot()
        return True

    def _check_snapshot(self) -> None:
        write = self._snapshot_write
        if write is None or not write.result.done():
            return
        self._snapshot_write = None
        error = write.result.exception()
        if write.log is not self._log:
            return  # an append to `write.log` has failed since the snapshot was begun
        if error is not None:
            if self.state == "memory":
                self._stop_recording(error)
            else:
                self._count_failure(error, "no snapshot was written: ")
            return
        self._snapshot_bytes, self._closed_logs = write.result.result(), 0
        self._snapshots += 1
        if self.state == "memory":
            try:
                write.log.set_state(journal_format.OPEN_STATE)
            except OSError as failure:
                self._stop_recording(failure)
                return
            self.state = "disk"
        self._reason, self._retry_delay = "", self.limits.first_retry_delay

    # --- timers, and the end

    def tick(self, now: float | None = None) -> None:
        """Run the checks and retries that are due. `now` is in seconds of a monotonic clock."""
        self._now = time.monotonic() if now is None else now
        self._check_snapshot()
        if self.state == "memory":
            self._retry_disk()
        elif self._now >= self._check_at:
            self._check_at = self._now + self.limits.check_interval
            log = self._log
            if log is None or self._folder is None or os.fstat(log.fd).st_nlink == 0 or self._folder.is_gone():
                self._stop_recording(_DELETED_ERROR)

    def close(self) -> bool:
        """Mark the end of the log and release the folder; idempotent. Return whether all batches reached the disk in time."""
        if self.state == "closed":
            return True
        until = time.monotonic() + self.limits.close_timeout
        is_done = self._snapshot_write is None or _wait_for_task(self._snapshot_write.result, until)
        self._check_snapshot()
        log, self._log = self._log, None
        is_recorded = False
        if self.state == "disk" and log is not None:
            is_done &= _wait_for_task(self._in_background(lambda: self._close_log(log)), until)
            is_recorded = is_done
        self.state = "closed"
        if self._folder is not None and is_done:  # while a thread might still write, the folder must stay locked
            self._folder.close()
        return is_recorded

    def stats(self) -> JournalStats:
        """Return the state and counters."""
        return JournalStats(
            state=self.state,
            reason=self._reason if self._is_marked or self.state != "memory" else f"{self._reason}; {_UNMARKED_ADVICE}",
            bytes=self._snapshot_bytes + self._log_bytes,
            appended=self._appended,
            dropped=self._dropped,
            failures=self._failures,
            snapshots=self._snapshots,
        )

    # --- the disk

    @property
    def _log_bytes(self) -> int:
        return self._closed_logs + (0 if self._log is None else self._log.size)

    def _new_log(self, state: bytes, previous: journal_format.FileWriter | None = None) -> journal_format.FileWriter:
        """Begin a log that continues the log `previous`, if any. Its file gets the final name after the header is written."""
        assert self._folder is not None  # noqa: S101 - callers check that the folder is open
        self._generation += 1
        header = journal_format.Header(
            journal_format.LOG, self._generation, self._incarnation, self._end_state.next_number, state=state
        )
        log = journal_format.FileWriter(self._disk, self._folder, header.name + TEMPORARY_SUFFIX, header)
        try:
            self._disk.rename(header.name + TEMPORARY_SUFFIX, header.name, self._folder.fd)
            if previous is not None:
                self._set_state(previous.header.name, journal_format.CONTINUED_STATE)
        except BaseException:
            log.discard()
            raise
        return log

    def _set_state(self, name: str, state: bytes) -> None:
        """Overwrite the state of a file, and sync the file in the background."""
        assert self._folder is not None  # noqa: S101 - callers check that the folder is open
        file = self._disk.open(name, self._folder.fd)
        try:
            self._disk.overwrite(file, journal_format.STATE_OFFSET, state)
        except BaseException:
            os.close(file)
            raise

        def sync() -> None:
            try:
                self._disk.sync(file)
            finally:
                os.close(file)

        self._in_background(sync)

    def _close_log(self, log: journal_format.FileWriter) -> None:
        log.set_state(journal_format.CLOSED_STATE)
        self._disk.sync(log.fd)
        log.close()

    def _stop_recording(self, error: BaseException) -> None:
        """Enter state "memory", and mark the logs as broken, because they will lack all later batches."""
        log, self._log = self._log, None
        self.state = "memory"
        self._is_disk_back = False
        if log is not None:
            log.close()
        self._is_marked = self._mark_broken()
        self._count_failure(error)

    def _mark_broken(self) -> bool:
        """Mark or remove all logs, so that no later relay resumes from them. Return False if a log could not be marked."""
        if self._folder is None:
            return True
        try:
            names = [name for name in self._folder.names() if name.endswith(journal_format.SUFFIXES[journal_format.LOG])]
            for name in names:
                try:
                    self._set_state(name, journal_format.BROKEN_STATE)
                except OSError:
                    self._disk.remove(name, self._folder.fd)
        except OSError:
            return False
        return True

    def _count_failure(self, error: BaseException, prefix: str = "") -> None:
        self._failures += 1
        self._reason = prefix + reason_of(error)
        self._retry_at = self._now + self._retry_delay
        self._retry_delay = min(2 * self._retry_delay, self.limits.max_retry_delay)

    def _retry_disk(self) -> None:
        """Test whether the disk works again, by writing a file of `probe_bytes`."""
        if self._is_disk_back or self._snapshot_write is not None or self._now < self._retry_at:
            return
        try:
            if self._folder is None or self._folder.is_gone():
                folder = Folder(self.path, parents=False)
                if self._folder is not None:
                    self._folder.close()
                self._folder = folder
                self._generation = max(self._generation, _newest_generation(folder.names()))
            self._is_marked = self._mark_broken()
            file = self._disk.create(_PROBE_NAME, self._folder.fd)
            try:
                self._disk.write(file, (bytes(self.limits.probe_bytes),))
            finally:
                os.close(file)
                self._disk.remove(_PROBE_NAME, self._folder.fd)
        except OSError as error:
            self._count_failure(error)
        else:
            self._is_disk_back = True

    def _in_background(self, task: Callable[[], Any]) -> Future[Any]:
        """Run a task in a daemon thread, so that the process can exit even if the disk never answers."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(task())
            except Exception as error:  # noqa: BLE001 - the caller gets the exception from the `Future`
                future.set_exception(error)

        threading.Thread(target=run, name="kvevents-journal", daemon=True).start()
        return future


def _newest_generation(names: Iterable[str]) -> int:
    return max((journal_format.generation_of(name) or 0 for name in names if not name.endswith(TEMPORARY_SUFFIX)), default=0)


def _wait_for_task(result: Future[Any], deadline: float) -> bool:
    """Wait for a task; return whether it ended before `deadline` and without an error."""
    try:
        return result.exception(max(0.0, deadline - time.monotonic())) is None
    except FutureTimeoutError:
        return False
