"""What the files of a journal hold, and whether that is all that was sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvevents.errors import JournalError
from kvevents.relay.journal import files, logfile
from kvevents.relay.journal.logfile import Batches, DamagedError, Header, Origin, Positions, Record, Relayed


@dataclass(slots=True, kw_only=True)
class Recovered:
    """What a journal holds. `parts` and `batches` read the files again: use them before the journal goes on."""

    folder: files.Folder | None = field(default=None, repr=False)
    headers: list[Header] = field(default_factory=list)
    """The files of the newest life: a snapshot, if there is one, and logs."""
    incarnation: int | None = None
    """The newest of the relay that any file has; None where there is none."""
    next_number: int = 0
    snapshot_number: int = -1
    """As of which number `parts` are; -1 for none."""
    partial: bool = False
    """Whether they do not hold all that was live."""
    mark: bytes | None = None
    positions: Positions = field(default_factory=dict)
    origins: dict[int, Origin] = field(default_factory=dict)
    doubt: str = ""
    """Why more may have been sent than is here, in words: then the relay must begin a new incarnation."""

    @property
    def resumable(self) -> bool:
        """Whether the relay may go on with `next_number` in the same incarnation."""
        return self.incarnation is not None and not self.doubt

    def parts(self) -> Iterator[bytes]:
        """The state of the snapshot. Raises `JournalError` where it cannot be read again."""
        return (record.payload for record in self._reread(self.headers[:1]) if isinstance(record, logfile.Part))

    def batches(self) -> Iterator[Relayed]:
        """All batches behind the state. Raises `JournalError` where they cannot be read again."""
        for record in self._reread(self.headers):
            if isinstance(record, Batches):
                yield from record.rows()

    def _reread(self, headers: list[Header]) -> Iterator[Record]:
        for header in headers:
            assert self.folder is not None  # noqa: S101 - the files are in it
            try:
                with self.folder.read(header.name) as file:
                    yield from logfile.read_records(file, header)
            except (DamagedError, OSError) as error:
                path = self.folder.path / header.name
                raise JournalError(f"{path} cannot be read again: {error}; begin with another folder") from error


def recover(folder: files.Folder) -> Recovered:
    """Read and check everything. Raises `JournalError` for files of a later release only."""
    found = Recovered(folder=folder)
    try:
        _find(found, folder)
        for header in found.headers:
            _read(found, folder, header)
        if found.headers:
            _check_whole(found)
    except JournalError:
        raise
    except (DamagedError, OSError) as error:
        found.doubt = str(error)
    return found


def _find(found: Recovered, folder: files.Folder) -> None:
    """Find the files to read. Raises `DamagedError` for any that is invalid."""
    damage = ""
    headers: list[Header] = []
    for name in sorted(folder.names()):
        if logfile.generation_of(name) is None or name.endswith(files.TEMPORARY):
            continue
        try:
            with folder.read(name) as file:
                header = logfile.read_header(file)
        except DamagedError as error:
            damage = f"{name}: {error}"
            continue
        if header.version > logfile.VERSION:
            raise JournalError(
                f"{folder.path / name} is of version {header.version}, and this release reads {logfile.VERSION}:"
                " use the release that wrote it, or another folder"
            )
        if header.name != name:
            damage = f"{name}: it was renamed"
        headers.append(header)
    found.incarnation = max((each.incarnation for each in headers), default=None)
    mine = sorted((each for each in headers if each.incarnation == found.incarnation), key=lambda each: each.generation)
    snapshots = [each for each in mine if each.kind == logfile.SNAPSHOT]
    base = snapshots[-1].generation if snapshots else 0
    logs = [each for each in mine if each.kind == logfile.LOG and each.generation >= base]
    found.headers = [*snapshots[-1:], *logs]
    if damage:
        raise DamagedError(damage)


def _read(into: Recovered, folder: files.Folder, header: Header) -> None:
    """Take in one file."""
    try:
        if header.kind == logfile.LOG:  # a snapshot has the number behind it
            _follow(into, header.first, 0)
        with folder.read(header.name) as file:
            for record in logfile.read_records(file, header):
                _take(into, record)
        if header.kind == logfile.SNAPSHOT:
            _follow(into, header.first, 0)
    except DamagedError as error:
        raise DamagedError(f"{header.name}: {error}") from error


def _take(into: Recovered, record: Record) -> None:
    match record:
        case Batches():
            _follow(into, record.first, len(record.payloads))
            into.positions.update(record.positions())
        case logfile.Skipped():
            _follow(into, record.first, record.last - record.first + 1)
        case logfile.UpstreamReset():
            into.positions[record.upstream] = (record.incarnation, -1)
        case logfile.Marked():
            into.mark = record.mark
        case logfile.OriginNoted():
            into.origins[record.upstream] = record.origin
        case logfile.SnapshotHead():
            into.snapshot_number, into.partial, into.next_number = record.number, record.partial, record.number + 1
        case logfile.Standing():
            _follow(into, record.next_number, 0)
            into.mark, into.positions, into.origins = record.mark, record.positions, record.origins
        case logfile.Part():
            pass


def _follow(into: Recovered, first: int, count: int) -> None:
    if first != into.next_number:
        raise DamagedError(f"number {first} does not follow {into.next_number - 1}")
    into.next_number += count


def _check_whole(found: Recovered) -> None:
    """Raise `DamagedError` where valid files might not tell all that was sent."""
    logs = [each for each in found.headers if each.kind == logfile.LOG]
    first, newest = found.headers[0].generation, logs[-1] if logs else None
    if newest is None or [each.generation for each in logs] != list(range(first, first + len(logs))):
        raise DamagedError("a log is missing")
    if newest.state == logfile.CONTINUED:
        raise DamagedError(f"the log behind {newest.name} is missing")
    states = {logfile.OPEN, logfile.CLOSED, logfile.CONTINUED}
    if any(each.state not in states for each in logs):
        raise DamagedError("the disk refused what was sent last")
    if newest.state == logfile.OPEN and not newest.boot == files.boot_id() != files.UNKNOWN_BOOT:
        raise DamagedError("the machine was started again, and what was sent last might not have reached the disk")
