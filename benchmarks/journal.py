"""`python -m benchmarks.journal`: what a relay's journal costs, as files of frames and as a table of SQLite.

Both are given the same bursts, in one run, interleaved: CPU and wall time for a batch, for each size of batch, burst and policy
of fsync. SQLite is in WAL mode, a burst is one transaction; "always" is `synchronous=FULL`, "interval" is NORMAL with a
checkpoint a second, "never" is OFF. Then the files alone as a relay has them in the long run, with a snapshot whenever one is
due, so that what is freed and what is taken are in it. Then what a process finds after a kill: a state of a million blocks and
10,000 batches, how long until they are read; how long a snapshot takes; how large the files are.
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
from kvevents.relay.journal import FsyncPolicy, Journal, JournalSettings, Relayed

SIZES: Final = {150: "1 block", 2_700: "32 blocks", 40_000: "512 blocks"}
"""Bytes of a payload, and what makes such a one."""
BURSTS: Final = (1, 64)
POLICIES: Final[tuple[FsyncPolicy, ...]] = ("never", "interval", "always")
SYNCHRONOUS: Final[dict[FsyncPolicy, str]] = {"never": "OFF", "interval": "NORMAL", "always": "FULL"}
BYTES: Final = 24_000_000
"""Written in one measurement, or fewer where the disk is asked for each burst."""
MOST_BURSTS: Final = 3_000
MOST_SYNCED: Final = 200
STEADY_BURST: Final = 64
STEADY_BEGINS: Final = 200_000_000
"""Bytes until files are freed, and files that were freed are used, if they are."""
STEADY_BYTES: Final = 270_000_000
"""Measured behind that: four times what makes a snapshot due."""
STEADY_BEHIND: Final = 40_000_000
"""By which snapshots are behind, as a relay's are by its replay buffer."""
STEADY_PART: Final = 1_000_000
PART: Final = 25_000_000
PARTS: Final = 4
"""A snapshot of a million live blocks is about 100 MB."""
TAIL: Final = 10_000
TAIL_SIZE: Final = 2_700
MIB: Final = 1 << 20


class Store(Protocol):
    """What is compared."""

    def append(self, burst: Sequence[Relayed]) -> None: ...
    def tick(self) -> None: ...
    def snapshot(self, number: int, parts: list[bytes]) -> None: ...
    def close(self) -> None: ...


class Files:
    """The journal."""

    def __init__(self, folder: Path, policy: FsyncPolicy) -> None:
        self._journal = Journal(folder, JournalSettings(fsync=policy))
        self._journal.begin(1)

    def append(self, burst: Sequence[Relayed]) -> None:
        self._journal.append(burst)

    def tick(self) -> None:
        self._journal.tick()

    def snapshot(self, number: int, parts: list[bytes]) -> None:
        done = self._journal.stats().compactions
        assert self._journal.snapshot(number, parts)
        while self._journal.stats().compactions == done:
            time.sleep(0.001)
            self._journal.tick()

    def close(self) -> None:
        self._journal.close()

    @staticmethod
    def recover(folder: Path) -> tuple[int, int]:
        """Bytes of the snapshot, and batches behind it; all of them are read."""
        journal = Journal(folder)
        found = journal.recover()
        assert found.snapshot is not None
        size, count = sum(map(len, found.snapshot.parts())), sum(1 for _ in found.records())
        journal.close()
        return size, count


class Table:
    """A table of batches, and one of the snapshot's parts, in SQLite."""

    def __init__(self, folder: Path, policy: FsyncPolicy) -> None:
        folder.mkdir()
        self._policy = policy
        self._base = sqlite3.connect(folder / "journal.db", isolation_level=None)
        self._base.execute("PRAGMA journal_mode=WAL")
        self._base.execute(f"PRAGMA synchronous={SYNCHRONOUS[policy]}")
        self._base.execute(
            "CREATE TABLE batches (number INTEGER PRIMARY KEY, upstream INTEGER, incarnation INTEGER, seq INTEGER,"
            " payload BLOB)"
        )
        self._base.execute("CREATE TABLE parts (number INTEGER, part INTEGER, payload BLOB)")
        self._next = time.monotonic() + 1.0

    def append(self, burst: Sequence[Relayed]) -> None:
        self._base.execute("BEGIN")
        self._base.executemany("INSERT INTO batches VALUES (?, ?, ?, ?, ?)", burst)
        self._base.execute("COMMIT")

    def tick(self) -> None:
        if self._policy == "interval" and time.monotonic() >= self._next:
            self._next = time.monotonic() + 1.0
            self._base.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def snapshot(self, number: int, parts: list[bytes]) -> None:
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
        count = sum(1 for _ in map(Relayed._make, batches))
        base.close()
        return size, count


STORES: Final[dict[str, Callable[[Path, FsyncPolicy], Store]]] = {"files": Files, "sqlite": Table}
READERS: Final[dict[str, Callable[[Path], tuple[int, int]]]] = {"files": Files.recover, "sqlite": Table.recover}


class Cost(NamedTuple):
    """Microseconds for a batch."""

    cpu: float
    wall: float


def cost(store: str, folder: Path, size: int, burst: int, policy: FsyncPolicy) -> Cost:
    """Of appending bursts until `BYTES` are written; CPU is that of all threads, the kernel's share included."""
    most = MOST_SYNCED if policy == "always" else MOST_BURSTS
    count = max(20, min(most, BYTES // (size * burst)))
    payloads = [os.urandom(size) for _ in range(burst)]
    written = STORES[store](folder / "journal", policy)
    cpu, wall = time.process_time(), time.perf_counter()
    for first in range(0, count * burst, burst):
        written.append([Relayed(first + at, 0, 1, first + at, payload) for at, payload in enumerate(payloads)])
        written.tick()
    batches = count * burst / 1e6
    found = Cost((time.process_time() - cpu) / batches, (time.perf_counter() - wall) / batches)
    written.close()
    return found


def print_costs(folder: Path, runs: int) -> None:
    titles = f"{'files: CPU':>11} {'wall':>9} {'SQLite: CPU':>12} {'wall':>9}"
    print(f"{'a batch of':<12} {'burst':>5} {'fsync':<9} {titles}   CPU ratio")
    for size, name in SIZES.items():
        for burst in BURSTS:
            for policy in POLICIES:
                found = {store: [fresh(folder, store, size, burst, policy) for _ in range(runs)] for store in STORES}
                files, table = (
                    Cost(*(statistics.median(values) for values in zip(*found[store], strict=True))) for store in STORES
                )
                print(
                    f"{name:<12} {burst:>5} {policy:<9} {files.cpu:>8.1f} us {files.wall:>6.1f} us {table.cpu:>9.1f} us "
                    f"{table.wall:>6.1f} us   {files.cpu / table.cpu:.2f}"
                )


def fresh(folder: Path, store: str, size: int, burst: int, policy: FsyncPolicy) -> Cost:
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        return cost(store, place, size, burst, policy)
    finally:
        shutil.rmtree(place)


def steady(folder: Path, size: int, policy: FsyncPolicy) -> tuple[Cost, int]:
    """Of appending bursts with a snapshot whenever one is due, and the bytes of all files at most; the files' only."""
    place = Path(tempfile.mkdtemp(dir=folder))
    payloads = [os.urandom(size) for _ in range(STEADY_BURST)]
    begins, ends, part = STEADY_BEGINS // size, (STEADY_BEGINS + STEADY_BYTES) // size, os.urandom(STEADY_PART)
    try:
        with Journal(place / "journal", JournalSettings(fsync=policy)) as journal:
            journal.begin(1)
            cpu = wall = 0.0
            first = most = 0
            while first < ends:
                if not cpu and first >= begins:
                    cpu, wall, begins = time.process_time(), time.perf_counter(), first
                journal.append([Relayed(first + at, 0, 1, first + at, payload) for at, payload in enumerate(payloads)])
                journal.tick()
                first += STEADY_BURST
                if journal.needs_compaction:
                    most = max(most, journal.stats().bytes)
                    journal.snapshot(first - STEADY_BEHIND // size, [part])
            batches = (first - begins) / 1e6
            return Cost((time.process_time() - cpu) / batches, (time.perf_counter() - wall) / batches), most
    finally:
        shutil.rmtree(place)


def print_steady(folder: Path, runs: int) -> None:
    print("in the long run, files only:")
    for size in list(SIZES)[1:]:
        for policy in POLICIES[:2]:
            found = [steady(folder, size, policy) for _ in range(runs)]
            cpu, wall = (statistics.median(values) for values in zip(*(each for each, _ in found), strict=True))
            most = max(most for _, most in found)
            taken = f"{most / MIB:.0f} MiB at most"
            print(f"{SIZES[size]:<12} {STEADY_BURST:>5} {policy:<9} {cpu:>8.1f} us {wall:>6.1f} us   {taken}")


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
    written = STORES[store](place, "interval")
    for first in range(0, 2 * TAIL, 100):
        written.append([Relayed(number, 0, 1, number, payload) for number in range(first, first + 100)])
    written.tick()
    wall, cpu = time.perf_counter(), time.process_time()
    written.snapshot(TAIL - 1, parts)
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
        print_steady(Path(folder), options.runs)
        met = print_restarts(Path(folder), options.runs)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
