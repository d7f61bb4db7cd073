"""Reads the files of a journal, and decides whether they contain all batches that were sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvevents.errors import JournalError
from kvevents.relay import journal_format
from kvevents.relay.journal_disk import TEMPORARY_SUFFIX, UNKNOWN_BOOT_ID, Folder
from kvevents.relay.journal_format import Batches, DamagedError, ForwardedBatch, Header, JournalRecord, Origin, Positions


@dataclass(slots=True, kw_only=True)
class RecoveredJournal:
    """The contents of a journal. `parts` and `batches` read the files again: call them before appending."""

    folder: Folder | None = field(default=None, repr=False)
    headers: list[Header] = field(default_factory=list)
    """The files of the newest incarnation: the snapshot if one exists, then the logs."""
    incarnation: int | None = None
    """The relay's newest incarnation in any file; None if the folder has no files of a journal."""
    next_number: int = 0
    snapshot_number: int = -1
    """The last number that `parts` cover; -1 if the journal has no snapshot with a state."""
    is_partial: bool = False
    """Whether `parts` might lack live blocks."""
    checkpoint: bytes | None = None
    positions: Positions = field(default_factory=dict)
    origins: dict[int, Origin] = field(default_factory=dict)
    incomplete_reason: str = ""
    """Why the files might lack batches that were sent, so that the relay must begin a new incarnation; empty if complete."""

    def parts(self) -> Iterator[bytes]:
        """Return the state of the snapshot. Raises `JournalError` if the file cannot be read again."""
        return (record.payload for record in self._reread(self.headers[:1]) if isinstance(record, journal_format.SnapshotPart))

    def batches(self) -> Iterator[ForwardedBatch]:
        """Return all batches after the state. Raises `JournalError` if a file cannot be read again."""
        for record in self._reread(self.headers):
            if isinstance(record, Batches):
                yield from record.rows()

    def _reread(self, headers: list[Header]) -> Iterator[JournalRecord]:
        for header in headers:
            assert self.folder is not None  # noqa: S101 - headers were read from this folder
            try:
                with self.folder.read(header.name) as file:
                    yield from journal_format.read_records(file, header)
            except (DamagedError, OSError) as error:
                path = self.folder.path / header.name
                raise JournalError(f"cannot read {path} again: {error}; choose another folder for the journal") from error


def recover(folder: Folder, boot_id: bytes) -> RecoveredJournal:
    """Read and verify all files. Raises `JournalError` only for files of a later release."""
    recovered = RecoveredJournal(folder=folder)
    try:
        _find_files(recovered, folder)
        for header in recovered.headers:
            _read_file(recovered, folder, header)
        if recovered.headers:
            _check_complete(recovered, boot_id)
    except JournalError:
        raise
    except (DamagedError, OSError) as error:
        recovered.incomplete_reason = str(error)
    return recovered


def _find_files(recovered: RecoveredJournal, folder: Folder) -> None:
    """Find the files to read. Raises `DamagedError` if any file is invalid."""
    damage = ""
    headers: list[Header] = []
    for name in sorted(folder.names()):
        if journal_format.generation_of(name) is None or name.endswith(TEMPORARY_SUFFIX):
            continue
        try:
            with folder.read(name) as file:
                header = journal_format.read_header(file)
        except DamagedError as error:
            damage = f"{name}: {error}"
            continue
        if header.version > journal_format.VERSION:
            raise JournalError(
                f"{folder.path / name} has version {header.version}, and this release reads version {journal_format.VERSION}:"
                " use the release that wrote it, or choose another folder"
            )
        if header.name != name:
            damage = f"{name}: it was renamed"
        headers.append(header)
    recovered.incarnation = max((header.incarnation for header in headers), default=None)
    newest = [header for header in headers if header.incarnation == recovered.incarnation]
    newest.sort(key=lambda header: header.generation)
    snapshots = [header for header in newest if header.kind == journal_format.SNAPSHOT]
    base = snapshots[-1].generation if snapshots else 0
    logs = [header for header in newest if header.kind == journal_format.LOG and header.generation >= base]
    recovered.headers = [*snapshots[-1:], *logs]
    if damage:
        raise DamagedError(damage)


def _read_file(recovered: RecoveredJournal, folder: Folder, header: Header) -> None:
    try:
        if header.kind == journal_format.LOG:  # `first` of a snapshot is the number after its last batch
            _advance(recovered, header.first, 0)
        with folder.read(header.name) as file:
            for record in journal_format.read_records(file, header):
                _apply_record(recovered, record)
        if header.kind == journal_format.SNAPSHOT:
            _advance(recovered, header.first, 0)
    except DamagedError as error:
        raise DamagedError(f"{header.name}: {error}") from error


def _apply_record(recovered: RecoveredJournal, record: JournalRecord) -> None:
    match record:
        case Batches():
            _advance(recovered, record.first, len(record.payloads))
            recovered.positions.update(record.positions())
        case journal_format.SkippedNumbers():
            _advance(recovered, record.first, record.last - record.first + 1)
        case journal_format.UpstreamReset():
            recovered.positions[record.upstream] = (record.incarnation, -1)
        case journal_format.CheckpointSet():
            recovered.checkpoint = record.checkpoint
        case journal_format.OriginSet():
            recovered.origins[record.upstream] = record.origin
        case journal_format.SnapshotHead():
            recovered.snapshot_number, recovered.is_partial = record.number, record.is_partial
            recovered.next_number = record.number + 1
        case journal_format.EndState():
            _advance(recovered, record.next_number, 0)
            recovered.checkpoint, recovered.positions, recovered.origins = record.checkpoint, record.positions, record.origins
        case journal_format.SnapshotPart():
            pass


def _advance(recovered: RecoveredJournal, first: int, count: int) -> None:
    if first != recovered.next_number:
        raise DamagedError(f"batch {first} does not follow batch {recovered.next_number - 1}")
    recovered.next_number += count


def _check_complete(recovered: RecoveredJournal, boot_id: bytes) -> None:
    """Raise `DamagedError` if the files are valid but might lack batches that were sent."""
    logs = [log for log in recovered.headers if log.kind == journal_format.LOG]
    first, newest = recovered.headers[0].generation, logs[-1] if logs else None
    if newest is None or [log.generation for log in logs] != list(range(first, first + len(logs))):
        raise DamagedError("a log is missing")
    if newest.state == journal_format.CONTINUED_STATE:
        raise DamagedError(f"the log after {newest.name} is missing")
    states = {journal_format.OPEN_STATE, journal_format.CLOSED_STATE, journal_format.CONTINUED_STATE}
    if any(log.state not in states for log in logs):
        raise DamagedError("the disk failed to record the newest batches that were sent")
    if newest.state == journal_format.OPEN_STATE and not newest.boot_id == boot_id != UNKNOWN_BOOT_ID:
        raise DamagedError("the machine was restarted, and the newest batches that were sent might not have reached the disk")
