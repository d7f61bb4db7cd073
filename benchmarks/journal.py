"""`python -m benchmarks.journal`: what a relay's journal costs, as a snapshot and logs, and as a table of SQLite.

Both are given the same bursts, in one run, interleaved: CPU and wall time for a batch, for each size of batch and burst, and
what that is of a CPU at the 50 batches a second of one engine. SQLite is in WAL mode with `synchronous=NORMAL`, a burst is one
transaction. Then what a process finds after a kill: a state of a million blocks and 10,000 batches, how long until they are
read; how long a snapshot takes; how large the files are.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from benchmarks.report import machine
from kvevents.relay.journal import Batches, Journal, JournalLimits

SIZES: Final = {150: "1 block", 2_700: "32 blocks", 40_000: "512 blocks"}
"""Bytes of a payload, and what makes such a one."""
BURSTS: Final = (1, 64)
BYTES: Final = 24_000_000
"""Written in one measurement."""
MOST_BURSTS: Final = 3_000
RATE: Final = 50
"""Batches per second of one engine."""
PART: Final = 25_000_000
PARTS: Final = 4
"""A snapshot of a million live blocks is about 100 MB."""
TAIL: Final = 10_000
TAIL_SIZE: Final = 2_700


class Store(Protocol):
    """What is compared."""

    def append(self, batches: Batches) -> None: ...
    def tick(self) -> None: ...
    def snapshot(self, number: int, parts: list[bytes], tail: Sequence[tuple[int, bytes]]) -> None: ...
    def close(self) -> None: ...


class Files:
    """The journal."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder, JournalLimits(compact_bytes=0))
        self._journal.begin(1)

    def append(self, batches: Batches) -> None:
        self._journal.append(batches)

    def tick(self) -> None:
        self._journal.tick()

    def snapshot(self, number: int, parts: list[bytes], tail: Sequence[tuple[int, bytes]]) -> None:
        assert self._journal.snapshot(number, parts, tail, 0)
        while not self._journal.stats().snapshots:
            time.sleep(0.001)
            self._journal.tick()

    def close(self) -> None:
        self._journal.close()

    @staticmethod
    def recover(folder: Path) -> tuple[int, int]:
        """Bytes of the snapshot's state, and batches behind it; all of them are read, twice, as a relay does."""
        journal = Journal(folder)
        found = journal.recover()
        assert found.is_resumable
        size, count = sum(map(len, found.parts())), sum(1 for _ in found.batches())
        journal.begin(2)
        journal.close()
        return size, count


class Table:
    """A table of batches, and one of the snapshot's parts, in SQLite."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._base = sqlite3.connect(folder / "journal.db", isolation_level=None)
        self._base.execute("PRAGMA journal_mode=WAL")
        self._base.execute("PRAGMA synchronous=NORMAL")
        self._base.execute(
            "CREATE TABLE batches (number INTEGER PRIMARY KEY, upstream INTEGER, incarnation INTEGER, seq INTEGER,"
            " payload BLOB)"
        )
        self._base.execute("CREATE TABLE parts (number INTEGER, part INTEGER, payload BLOB)")
        self._next = time.monotonic() + 1.0

    def append(self, batches: Batches) -> None:
        self._base.execute("BEGIN")
        self._base.executemany("INSERT INTO batches VALUES (?, ?, ?, ?, ?)", batches.rows())
        self._base.execute("COMMIT")

    def tick(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 1.0
            self._base.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def snapshot(self, number: int, parts: list[bytes], tail: Sequence[tuple[int, bytes]]) -> None:  # noqa: ARG002 - it is there
        self._base.execute("BEGIN")
        self._base.execute("DELETE FROM parts")
        self._base.executemany("INSERT INTO parts VALUES (?, ?, ?)", [(number, at, part) for at, part in enumerate(parts)])
        self._base.execute("DELETE FROM batches WHERE number <= ?", (number,))
        self._base.execute("COMMIT")
        self._base.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._base.close()

    @staticmethod
    def recover(folder: Path) -> tuple[int, int]:
        """As of `Files`; SQLite checks nothing of what is in the table already."""
        base = sqlite3.connect(folder / "journal.db", isolation_level=None)
        size = sum(len(part) for (part,) in base.execute("SELECT payload FROM parts ORDER BY part"))
        batches = base.execute("SELECT number, upstream, incarnation, seq, payload FROM batches ORDER BY number")
        count = sum(1 for _ in batches)
        base.close()
        return size, count


STORES: Final[dict[str, Callable[[Path], Store]]] = {"files": Files, "sqlite": Table}
READERS: Final[dict[str, Callable[[Path], tuple[int, int]]]] = {"files": Files.recover, "sqlite": Table.recover}


class Cost(NamedTuple):
    """Microseconds for a batch."""

    cpu: float
    wall: float


def batches_of(first: int, payloads: list[bytes]) -> Batches:
    count = len(payloads)
    return Batches(first, [0] * count, [1] * count, list(range(first, first + count)), payloads)


def cost(store: str, folder: Path, size: int, burst: int) -> Cost:
    """Of appending bursts until `BYTES` are written; CPU is that of all threads, the kernel's share included."""
    count = max(20, min(MOST_BURSTS, BYTES // (size * burst)))
    payloads = [os.urandom(size) for _ in range(burst)]
    written = STORES[store](folder / "journal")
    cpu, wall = time.process_time(), time.perf_counter()
    for first in range(0, count * burst, burst):
        written.append(batches_of(first, payloads))
        written.tick()
    batches = count * burst / 1e6
    found = Cost((time.process_time() - cpu) / batches, (time.perf_counter() - wall) / batches)
    written.close()
    return found


def print_costs(folder: Path, runs: int) -> None:
    print(f"{'a batch of':<12} {'burst':>5} {'files: CPU':>11} {'wall':>9} {'SQLite: CPU':>12} {'wall':>9}   files at {RATE}/s")
    for size, name in SIZES.items():
        for burst in BURSTS:
            found = {store: [fresh(folder, store, size, burst) for _ in range(runs)] for store in STORES}
            files, table = (
                Cost(*(statistics.median(values) for values in zip(*found[store], strict=True))) for store in STORES
            )
            print(
                f"{name:<12} {burst:>5} {files.cpu:>8.1f} us {files.wall:>6.1f} us {table.cpu:>9.1f} us "
                f"{table.wall:>6.1f} us   {files.cpu * RATE / 1e3:.2f} ms of CPU a second"
            )


def fresh(folder: Path, store: str, size: int, burst: int) -> Cost:
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        return cost(store, place, size, burst)
    finally:
        shutil.rmtree(place)


class Restart(NamedTuple):
    """What is found after a kill."""

    snapshot: float
    """Seconds until it was on the disk, and what it covers was gone."""
    cpu: float
    """Of that."""
    recovery: float
    """Seconds until all is read."""
    size: int
    """Bytes of all files."""
    extra: int
    """Of them, those that are not payloads."""


def restart(store: str, folder: Path) -> Restart:
    """A snapshot in the middle of 20,000 batches, then reading back."""
    place = Path(tempfile.mkdtemp(dir=folder)) / "journal"
    payload, parts = os.urandom(TAIL_SIZE), [os.urandom(PART) for _ in range(PARTS)]
    written = STORES[store](place)
    for first in range(0, 2 * TAIL, 100):
        written.append(batches_of(first, [payload] * 100))
    written.tick()
    wall, cpu = time.perf_counter(), time.process_time()
    written.snapshot(TAIL - 1, parts, [(number, payload) for number in range(TAIL, 2 * TAIL)])
    snapshot, used = time.perf_counter() - wall, time.process_time() - cpu
    written.close()
    size = sum(each.stat().st_size for each in place.iterdir())
    began = time.perf_counter()
    assert READERS[store](place) == (PART * PARTS, TAIL)
    recovery = time.perf_counter() - began
    shutil.rmtree(place.parent)
    return Restart(snapshot, used, recovery, size, size - PART * PARTS - TAIL * TAIL_SIZE)


def print_restarts(folder: Path, runs: int) -> bool:
    good = True
    for store in STORES:
        found = [restart(store, folder) for _ in range(runs)]
        snapshot, cpu, recovery, size, extra = (statistics.median(values) for values in zip(*found, strict=True))
        line = (
            f"{store}: snapshot of {PART * PARTS / 1e6:.0f} MB in {snapshot:.2f} s ({cpu:.2f} s CPU), recovery {recovery:.2f} s"
        )
        print(f"{line}, files {size / 1e6:.0f} MB, of which not payloads {extra / 1e6:.1f} MB")
        if store == "files":
            good = recovery < 1.0
    print(f"recovery within 1 s: {'met' if good else 'MISSED'}")
    return good


def main() -> int:
    """Print all of it. Returns 0 when recovery is fast enough."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.journal", description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is measured (default: for temporary files)")
    parser.add_argument("--runs", type=int, default=3, help="of each measurement (default: %(default)s)")
    options = parser.parse_args()
    print(f"{machine()}, SQLite {sqlite3.sqlite_version}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print_costs(Path(folder), options.runs)
        met = print_restarts(Path(folder), options.runs)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
