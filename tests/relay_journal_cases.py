"""Disks that refuse or kill, and what a journal has to hold, in a form that a reader can check by eye."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvevents.relay.journal import (
    Clerk,
    Disk,
    Hole,
    Journal,
    JournalSettings,
    Record,
    Recovered,
    Relayed,
    Snapshot,
    UpstreamReset,
)

TINY = JournalSettings(segment_bytes=600, compact_bytes=2_000, limit_bytes=1 << 20)
"""Few batches fill a segment."""


class Killed(BaseException):
    """The process was killed."""


def willing(*_: object) -> None:
    """Refuses nothing."""


class WatchedDisk(Disk):
    """Does everything, and calls `before` first, which may refuse: with the name of the call, and the bytes to be written."""

    def __init__(self, before: Callable[[str, bytes], None] | None = None) -> None:
        self.before = before or willing
        self.calls: list[str] = []

    def create(self, name: str, folder: int) -> int:
        self._note("create")
        return super().create(name, folder)

    def write(self, file: int, parts: Sequence[bytes]) -> int:
        self._note("write", b"".join(parts), file)
        return super().write(file, parts)

    def open(self, name: str, folder: int) -> int:
        self._note("open")
        return super().open(name, folder)

    def note(self, file: int, data: bytes) -> None:
        self._note("note", data, file)
        super().note(file, data)

    def shorten(self, file: int, size: int) -> None:
        self._note("shorten")
        super().shorten(file, size)

    def sync(self, file: int) -> None:  # noqa: ARG002 - the real disk need not be asked
        self._note("sync")

    def sync_folder(self, folder: int) -> None:  # noqa: ARG002 - as above
        self._note("sync_folder")

    def rename(self, name: str, to: str, folder: int) -> None:
        self._note("rename")
        super().rename(name, to, folder)

    def remove(self, name: str, folder: int) -> None:
        self._note("remove")
        super().remove(name, folder)

    def cut(self, name: str, size: int, folder: int) -> None:
        self._note("cut")
        super().cut(name, size, folder)

    def reserve(self, file: int, size: int) -> None:  # noqa: ARG002 - as above
        self._note("reserve", bytes(1))

    def _note(self, call: str, data: bytes = b"", file: int = -1) -> None:
        self.calls.append(call)
        try:
            self.before(call, data)
        except TornError as torn:
            if file >= 0:
                os.write(file, data[: torn.written])
            raise torn.error from None


class TornError(Exception):
    """What to raise from a write, of which so many bytes were done."""

    def __init__(self, written: int, error: BaseException) -> None:
        super().__init__()
        self.written = written
        self.error = error


def open_journal(folder: Path, settings: JournalSettings = TINY, disk: Disk | None = None) -> Journal:
    """Without a thread, and with a disk that asks nothing of the real one."""
    return Journal(folder, settings, disk=disk or WatchedDisk(), clerk=Clerk(threaded=False))


def asks(journal: Journal, what: Literal["needs_compaction", "wants_snapshot"]) -> bool:
    """Whether it does; a type checker takes an attribute that was false to stay so."""
    return bool(getattr(journal, what))


def crash(journal: Journal) -> None:
    """Let go of the folder as the system does for a killed process: nothing is tidied up."""
    keeping = journal._keeping
    if keeping.writer is not None:
        for file in keeping.writer.let_go():
            os.close(file)
    keeping.writer = None
    if keeping.folder is not None:
        keeping.folder.close()
    keeping.state = "closed"


@dataclass
class Model:
    """What was told, and nothing else. `kept` is what each step left behind."""

    records: list[Record] = field(default_factory=list)
    mark: dict[str, Any] | None = None
    positions: dict[int, tuple[int, int]] = field(default_factory=dict)
    next_number: int = 0
    snapshots: dict[tuple[int, bool], list[bytes]] = field(default_factory=dict)

    def copy(self) -> Model:
        return Model(list(self.records), self.mark, dict(self.positions), self.next_number, dict(self.snapshots))

    def burst(self, sizes: Sequence[int], upstream: int) -> list[Relayed]:
        """Batches of such sizes, and take note of them."""
        first, (incarnation, seq) = self.next_number, self.positions.get(upstream, (0, -1))
        burst = [
            Relayed(first + at, upstream, incarnation, seq + 1 + at, payload_of(first + at, size))
            for at, size in enumerate(sizes)
        ]
        self.records += burst
        self.next_number += len(burst)
        if burst:
            self.positions[upstream] = (incarnation, burst[-1].seq)
        return burst

    def hole(self, count: int) -> Hole:
        hole = Hole(self.next_number, self.next_number + count - 1)
        self.records.append(hole)
        self.next_number += count
        return hole

    def reset(self, upstream: int) -> UpstreamReset:
        incarnation = self.positions.get(upstream, (0, -1))[0] + 1
        reset = UpstreamReset(self.next_number - 1, upstream, incarnation)
        self.records.append(reset)
        self.positions[upstream] = (incarnation, -1)
        return reset

    def snapshot(self, number: int, partial: bool) -> list[bytes]:
        parts = [f"{number} {partial} {at}".encode() * 3 for at in range(number % 3 + 1)]
        self.snapshots[number, partial] = parts
        return parts

    def behind(self, number: int) -> list[Record]:
        """What was told after `number`. A reset right behind a snapshot may be in it as well."""
        return [clipped for record in self.records if (clipped := _clipped(record, number)) is not None]

    def is_in(self, found: Recovered) -> bool:
        """Whether this is what was found."""
        number = -1 if found.snapshot is None else found.snapshot.number
        return (
            found.next_number == self.next_number
            and found.mark == self.mark
            and found.positions == self.positions
            and self.has(found.snapshot)
            and [clipped for each in found.records() if (clipped := _clipped(each, number)) is not None] == self.behind(number)
        )

    def has(self, snapshot: Snapshot | None) -> bool:
        """Whether such a one was taken."""
        return snapshot is None or self.snapshots.get((snapshot.number, snapshot.partial)) == list(snapshot.parts())


def payload_of(number: int, size: int) -> bytes:
    """Different for each number."""
    return (number.to_bytes(8, "little") * (size // 8 + 1))[:size]


def _clipped(record: Record, number: int) -> Record | None:
    if isinstance(record, Relayed):
        return record if record.number > number else None
    if isinstance(record, Hole):
        return Hole(max(record.first, number + 1), record.last) if record.last > number else None
    return record if record.after > number else None
