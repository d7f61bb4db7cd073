"""Disks that fail or kill the process, and a model of what a journal must hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvevents.relay.journal import Journal, JournalLimits
from kvevents.relay.journal_disk import Disk
from kvevents.relay.journal_format import Batches, ForwardedBatch, SkippedNumbers
from kvevents.relay.journal_recovery import RecoveredJournal

TINY = JournalLimits(compact_bytes=2_000, max_log_bytes=1 << 20, probe_bytes=10)
"""A snapshot is due after a few batches."""


class Killed(BaseException):
    """The process was killed."""


class TornError(Exception):
    """Makes a write raise `error` after `written` bytes."""

    def __init__(self, written: int, error: BaseException) -> None:
        super().__init__()
        self.written = written
        self.error = error


def no_failure(*_: object) -> None:
    """Fail no call."""


class WatchedDisk(Disk):
    """A disk that calls `before` with the name of each call and the bytes to write, before it. `before` can raise."""

    def __init__(self, before: Callable[[str, bytes], None] | None = None, boot_id_file: Path = Disk.boot_id_file) -> None:
        self.boot_id_file = boot_id_file
        self.before = before or no_failure
        self.calls: list[str] = []

    def create(self, name: str, folder: int) -> int:
        self._note("create")
        return super().create(name, folder)

    def open(self, name: str, folder: int) -> int:
        self._note("open")
        return super().open(name, folder)

    def write(self, file: int, parts: Sequence[bytes]) -> None:
        self._note("write", b"".join(parts), file)
        super().write(file, parts)

    def overwrite(self, file: int, offset: int, data: bytes) -> None:
        self._note("overwrite", data)
        super().overwrite(file, offset, data)

    def sync(self, file: int) -> None:  # noqa: ARG002 - the real disk is not needed
        self._note("sync")

    def rename(self, name: str, new_name: str, folder: int) -> None:
        self._note("rename")
        super().rename(name, new_name, folder)

    def remove(self, name: str, folder: int) -> None:
        self._note("remove")
        super().remove(name, folder)

    def _note(self, call: str, data: bytes = b"", file: int = -1) -> None:
        self.calls.append(call)
        try:
            self.before(call, data)
        except TornError as torn:
            if file >= 0:
                os.write(file, data[: torn.written])
            raise torn.error from None


class SynchronousJournal(Journal):
    """A journal that waits for the disk itself, so that a test knows when a snapshot is written."""

    def _in_background(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(task())
        except Exception as error:  # noqa: BLE001 - as in a thread
            future.set_exception(error)
        return future


def open_journal(folder: Path, limits: JournalLimits = TINY, disk: Disk | None = None) -> Journal:
    """Open a journal that writes snapshots at once, and does not sync the real disk."""
    journal = SynchronousJournal(folder, limits, disk=disk or WatchedDisk())
    release_later(lambda: crash(journal))
    return journal


def is_resumable(found: RecoveredJournal) -> bool:
    """Return whether a relay can continue with `next_number` in the same incarnation."""
    return found.incarnation is not None and not found.incomplete_reason


_opened: Final[list[Callable[[], None]]] = []


def release_later(release: Callable[[], None]) -> None:
    """Call `release` at the end of the test, so that no file stays open in the process of the tests."""
    _opened.append(release)


def release_all() -> None:
    """Close everything that tests have left open, as the system does for a process that ends."""
    while _opened:
        _opened.pop()()


def crash(journal: Journal) -> None:
    """Release the folder without cleanup, as the system does for a killed process."""
    if journal._log is not None:
        journal._log.close()
    if journal._folder is not None and journal.state != "closed":
        journal._folder.close()
    journal._log = journal._folder = None
    journal.state = "closed"


def batches_of(rows: Sequence[ForwardedBatch]) -> Batches:
    _, upstreams, incarnations, seqs, payloads = map(list, zip(*rows, strict=True))
    return Batches(rows[0].number, upstreams, incarnations, seqs, payloads)


@dataclass
class Model:
    """The records that were written to a journal."""

    records: list[ForwardedBatch | SkippedNumbers] = field(default_factory=list)
    checkpoint: bytes | None = None
    positions: dict[int, tuple[int, int]] = field(default_factory=dict)
    states: dict[int, list[bytes]] = field(default_factory=dict)
    """Parts of the snapshots that were begun, by number."""

    def copy(self) -> Model:
        return Model(list(self.records), self.checkpoint, dict(self.positions), dict(self.states))

    @property
    def next_number(self) -> int:
        last = self.records[-1] if self.records else SkippedNumbers(0, -1)
        return last.last + 1 if isinstance(last, SkippedNumbers) else last.number + 1

    def batches(self, sizes: Sequence[int], upstream: int) -> list[ForwardedBatch]:
        """Create batches of these sizes and add them to the records."""
        first, (incarnation, seq) = self.next_number, self.positions.get(upstream, (0, -1))
        made = [
            ForwardedBatch(first + at, upstream, incarnation, seq + 1 + at, payload_of(first + at, size))
            for at, size in enumerate(sizes)
        ]
        self.records += made
        self.positions[upstream] = (incarnation, made[-1].seq)
        return made

    def skip(self) -> int:
        number = self.next_number
        self.records.append(SkippedNumbers(number, number))
        return number

    def reset(self, upstream: int) -> int:
        incarnation = self.positions.get(upstream, (0, -1))[0] + 1
        self.positions[upstream] = (incarnation, -1)
        return incarnation

    def state(self, number: int) -> list[bytes]:
        self.states[number] = [f"{number} {at}".encode() * 3 for at in range(1, number % 3 + 2)] if number >= 0 else []
        return self.states[number]

    def tail(self, number: int) -> list[tuple[int, bytes]]:
        """Return what was sent after `number`, as a relay passes it to a snapshot."""
        return [(each.number, each.payload) for each in self._behind(number) if isinstance(each, ForwardedBatch)]

    def _behind(self, number: int) -> list[ForwardedBatch | SkippedNumbers]:
        return [each for each in self.records if (each.last if isinstance(each, SkippedNumbers) else each.number) > number]

    def matches(self, found: RecoveredJournal) -> bool:
        """Return whether a recovered journal equals this. A snapshot does not hold the upstreams of batches."""
        number = found.snapshot_number
        return (
            found.next_number == self.next_number
            and found.checkpoint == self.checkpoint
            and found.positions == self.positions
            and list(found.parts()) == self.states.get(number, [])
            and [(each.number, each.payload) for each in found.batches()] == self.tail(number)
        )


def payload_of(number: int, size: int) -> bytes:
    """Return a payload that is different for each number."""
    return (number.to_bytes(8, "little") * (size // 8 + 1))[:size]
