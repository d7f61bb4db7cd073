"""What a journal does for a relay, on a disk that does as it is told."""

from __future__ import annotations

import os
import shutil
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import ClosedError, ConfigError, JournalError, PeerError, UsageError
from kvevents.relay.journal import (
    Clerk,
    Disk,
    FsyncPolicy,
    Hole,
    Journal,
    JournalSettings,
    Record,
    Relayed,
    UpstreamReset,
    folder,
    scan,
    writer,
)
from kvevents.relay.journal import (
    journal as module,
)
from kvevents.relay.journal.frames import crc32_of
from kvevents.relay.journal.limits import MAX_BURST, MAX_MARK_BYTES
from kvevents.stream import Checkpoint
from relay_journal_cases import TINY, Model, WatchedDisk, asks, crash, open_journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def begun(path: Path, settings: JournalSettings = TINY, disk: Disk | None = None) -> tuple[Journal, Model]:
    journal = open_journal(path, settings, disk)
    journal.begin(3)
    return journal, Model()


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if each.suffix in {".segment", ".snapshot", ".tmp"})


# --- what is kept


def test_everything_told_is_there_again_in_order(path: Path) -> None:
    """Batches with their upstreams' numbers, holes, resets and the newest mark; a checkpoint survives in it."""
    journal, _ = begun(path)
    checkpoint = Checkpoint("engine", 0, 4, 17).encode()
    told: list[Record] = [
        Relayed(0, 0, 4, 16, b"a"),
        Relayed(1, 0, 4, 17, b""),
        Hole(2, 5),
        UpstreamReset(5, 1, 9),
        Relayed(6, 1, 9, 0, b"c"),
    ]
    journal.append([(0, 0, 4, 16, b"a"), (1, 0, 4, 17, b"")])  # type: ignore[list-item]
    journal.hole(2, 5)
    journal.reset(1, 9)
    journal.append([told[-1]])  # type: ignore[list-item]
    journal.mark({"checkpoints": [b"older"]})
    journal.mark({"checkpoints": [checkpoint], "settings": {"dialect": None, "steps": 5}})
    assert journal.close()
    found = open_journal(path).recover()
    assert list(found.records()) == told
    assert list(found.records()) == told, "a second time"
    assert found.mark == {"checkpoints": [checkpoint], "settings": {"dialect": None, "steps": 5}}
    assert Checkpoint.decode(found.mark["checkpoints"][0]).last_seq == 17
    assert found.positions == {0: (4, 17), 1: (9, 0)}
    assert (found.incarnation, found.next_number, found.batches) == (3, 7, 3)
    assert found.clean
    assert found.resumable


def test_a_long_burst_is_cut_into_frames(path: Path) -> None:
    """Of at most `MAX_BURST` batches."""
    journal, model = begun(path, JournalSettings())
    journal.append(model.burst([1] * (2 * MAX_BURST + 3), 0))
    crash(journal)
    found = open_journal(path, JournalSettings()).recover()
    assert model.is_in(found)
    assert found.batches == 2 * MAX_BURST + 3


def test_a_burst_of_large_payloads_is_cut_into_frames(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too much for one frame goes into two; one payload that is too much is refused."""
    monkeypatch.setattr(module, "MAX_PAYLOADS_BYTES", 100)
    journal, model = begun(path)
    journal.append(model.burst([60, 60, 10, 90, 100], 0))
    with pytest.raises(UsageError, match="payload of number 5 has more than 100 bytes"):
        journal.append([Relayed(5, 0, 0, 5, bytes(101))])
    crash(journal)
    assert model.is_in(open_journal(path).recover())


def test_an_empty_folder_is_neither_resumable_nor_unclean(path: Path) -> None:
    """A new journal; `resume` says that there is nothing."""
    journal = open_journal(path)
    found = journal.recover()
    assert (found.incarnation, found.unclean, found.resumable, found.next_number) == (None, False, False, 0)
    with pytest.raises(UsageError, match="it is empty; begin it anew"):
        journal.resume()


def test_beginning_anew_leaves_nothing_of_before(path: Path) -> None:
    """Numbers from 0, and none of the old files."""
    journal, model = begun(path)
    journal.append(model.burst([300] * 5, 0))
    journal.close()
    journal = open_journal(path)
    journal.begin(4)
    assert (journal.incarnation, journal.next_number, journal.stats().state) == (4, 0, "disk")
    assert len(names(path)) == 1
    journal.append([Relayed(0, 0, 0, 0, b"new")])
    crash(journal)
    found = open_journal(path).recover()
    assert (found.incarnation, [each.payload for each in found.records() if isinstance(each, Relayed)]) == (4, [b"new"])


def test_what_was_recovered_cannot_be_read_once_it_is_gone(path: Path) -> None:
    journal, model = begun(path)
    journal.append(model.burst([1], 0))
    journal.close()
    journal = open_journal(path)
    found = journal.recover()
    journal.begin(4)
    with pytest.raises(JournalError, match="is gone; read what was recovered before the journal goes on"):
        list(found.records())


# --- snapshots


def test_a_snapshot_replaces_what_it_covers(path: Path) -> None:
    """Segments whose batches are all covered are removed, or wait to be written over; the snapshot before is removed too, and
    batches behind it stay."""
    journal, model = begun(path)
    for _ in range(6):
        journal.append(model.burst([200, 200], 0))
    journal.mark({"kept": True})
    model.mark = {"kept": True}
    assert journal.snapshot(3, model.snapshot(3, False))
    assert journal.snapshot(7, model.snapshot(7, True), partial=True)
    assert [each for each in names(path) if each.endswith("snapshot")] == names(path)[-1:]
    assert journal.stats().compactions == 2
    assert journal.stats().segments == len([each for each in names(path) if each.endswith("segment")]) < 6
    assert journal.stats().bytes == sum((path / each).stat().st_size for each in names(path))
    crash(journal)
    found = open_journal(path).recover()
    assert model.is_in(found)
    assert found.snapshot is not None
    assert (found.snapshot.number, found.snapshot.partial, found.snapshot.count) == (7, True, 2)
    assert found.batches == 4


def test_compaction_is_due_by_bytes_and_by_the_size_of_the_last_snapshot(path: Path) -> None:
    """Above `compact_bytes`, above twice the last snapshot if that is more, never above half of `limit_bytes`."""
    journal, model = begun(path)
    journal.append(model.burst([1900], 0))
    assert not asks(journal, "needs_compaction")
    journal.append(model.burst([100], 0))
    assert asks(journal, "needs_compaction")
    assert asks(journal, "wants_snapshot")
    assert journal.snapshot(1, [bytes(3_000)])
    assert not asks(journal, "needs_compaction")
    journal.append(model.burst([5_900], 0))
    assert not asks(journal, "needs_compaction")
    journal.append(model.burst([300], 0))
    assert asks(journal, "needs_compaction")
    assert TINY.wanted_beyond(1 << 30) == TINY.limit_bytes // 2
    crash(journal)
    journal = open_journal(path)
    journal.resume()
    assert asks(journal, "needs_compaction"), "in the next process too"


def test_a_snapshot_is_written_beside_the_journal(path: Path) -> None:
    """While the disk takes its time, batches are appended, and another snapshot is not begun."""
    going, written = threading.Event(), threading.Event()

    class Slow(WatchedDisk):
        def rename(self, name: str, to: str, folder: int) -> None:
            written.set()
            assert going.wait(10)
            super().rename(name, to, folder)

    journal = Journal(path, TINY, disk=Slow(), clerk=Clerk())
    journal.begin(3)
    model = Model()
    journal.append(model.burst([10] * 4, 0))
    assert journal.snapshot(2, model.snapshot(2, False))
    assert written.wait(10)
    journal.append(model.burst([500, 500], 0))
    journal.tick(0.0)
    assert not journal.snapshot(3, [])
    assert journal.stats().compactions == 0
    going.set()
    assert journal.close()
    assert journal.stats().compactions == 1
    assert model.is_in(open_journal(path).recover())


def test_a_snapshot_that_is_damaged_is_not_needed_while_the_segments_are_there(path: Path) -> None:
    """They still tell everything: nothing is lost, and it is told what was found."""
    journal, model = begun(path, JournalSettings())
    journal.append(model.burst([10] * 4, 0))
    kept = {each: (path / each).read_bytes() for each in names(path)}
    journal.snapshot(2, model.snapshot(2, False))
    for name, data in kept.items():  # as a kill after the rename leaves it
        (path / name).write_bytes(data)
    crash(journal)
    (snapshot,) = path.glob("*.snapshot")
    snapshot.write_bytes(snapshot.read_bytes()[:-1])
    found = open_journal(path).recover()
    assert model.is_in(found)
    assert found.snapshot is None
    assert found.resumable
    assert found.because == f"{snapshot.name} is damaged"


# --- the disk's share


@pytest.mark.parametrize(("policy", "appends", "closes"), [("always", 1, 1), ("interval", 0, 1), ("never", 0, 0)])
def test_when_the_disk_is_asked(path: Path, policy: FsyncPolicy, appends: int, closes: int) -> None:
    """For each burst; after an interval, at `tick`; not at all. And at the end, but for "never"."""
    disk = WatchedDisk()
    journal, model = begun(path, replace(TINY, fsync=policy, segment_bytes=1 << 19), disk)
    journal.tick(10.0)
    disk.calls.clear()
    journal.append(model.burst([1, 2, 3], 0))
    assert disk.calls.count("sync") == appends
    journal.tick(10.5)
    assert journal.stats().lag == (0.5 if policy == "interval" else 0.0)
    assert disk.calls.count("sync") == appends
    journal.tick(11.0)
    assert disk.calls.count("sync") == (1 if policy != "never" else 0)
    assert journal.stats().lag == 0.0
    journal.tick(12.5)
    assert disk.calls.count("sync") == (1 if policy != "never" else 0), "nothing new"
    disk.calls.clear()
    journal.close()
    assert disk.calls.count("sync") == closes


@pytest.mark.parametrize("policy", ["always", "interval"])
def test_full_segments_reach_the_disk_too(path: Path, policy: FsyncPolicy) -> None:
    """What a later segment goes on from must not be missing."""
    synced: list[int] = []

    class Noting(WatchedDisk):
        def sync(self, file: int) -> None:
            synced.append(os.fstat(file).st_ino)

    journal, model = begun(path, replace(TINY, fsync=policy), Noting())
    for _ in range(4):
        journal.append(model.burst([700], 0))
    journal.tick(5.0)
    assert {(path / each).stat().st_ino for each in names(path)} <= set(synced)
    assert len(names(path)) == 4
    crash(journal)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("boot", ["the same", "another", "unknown"])
@pytest.mark.parametrize("policy", ["always", "interval", "never"])
def test_a_machine_that_was_started_anew(
    path: Path, policy: FsyncPolicy, boot: str, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unclean, unless the journal was closed, also with "always": disks lie. Where nobody knows, it is taken to be so."""
    ids = {"the same": b"1" * 16, "another": b"2" * 16, "unknown": bytes(16)}
    monkeypatch.setattr(writer, "boot_id", lambda: bytes(16) if boot == "unknown" else b"1" * 16)
    monkeypatch.setattr(scan, "boot_id", lambda: ids[boot])
    journal, model = begun(path, replace(TINY, fsync=policy))
    journal.append(model.burst([1], 0))
    if closed:
        journal.close()
    else:
        crash(journal)
    found = open_journal(path).recover()
    assert model.is_in(found)
    assert found.clean is closed
    assert found.unclean is (boot != "the same" and not closed)
    assert found.unclean is ("started anew" in found.because)


@pytest.mark.parametrize("policy", ["always", "interval", "never"])
def test_a_journal_that_was_closed_is_not_taken_for_that_once_it_goes_on(path: Path, policy: FsyncPolicy) -> None:
    """The disk has the new segment, and its name, before anything is told: without them a loss of power would leave a journal
    that was closed, and numbers that were sent would be given again."""
    journal, model = begun(path, replace(TINY, fsync=policy))
    journal.append(model.burst([1], 0))
    journal.close()
    disk = WatchedDisk()
    journal = open_journal(path, replace(TINY, fsync=policy), disk)
    journal.resume()
    assert {"sync", "sync_folder"} <= set(disk.calls)
    crash(journal)


def test_the_boot_id_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "id").write_text("00112233-4455-6677-8899-aabbccddeeff\n")
    monkeypatch.setattr(folder, "_BOOT_ID", tmp_path / "id")
    assert folder.boot_id() == bytes.fromhex("00112233445566778899aabbccddeeff")
    monkeypatch.setattr(folder, "_BOOT_ID", tmp_path / "none")
    assert folder.boot_id() == bytes(16)


def test_payloads_are_for_their_owner_only(path: Path) -> None:
    journal, model = begun(path)
    journal.append(model.burst([1], 0))
    journal.snapshot(0, [b"state"])
    assert path.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in path.iterdir()} == {0o600}
    crash(journal)


# --- what an operator must mend


def test_one_process_at_a_time(path: Path) -> None:
    """The message names the other one; after it ended, the folder is free."""
    journal, _ = begun(path)
    with pytest.raises(JournalError, match=f"another process uses it, {os.getpid()}; name another folder"):
        open_journal(path)
    journal.close()
    open_journal(path).close()


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    """A file, or a place where nobody can make one. It is a `PeerError`."""
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"no journal can be kept in .*file: .*; name a folder that can be written"):
        open_journal(tmp_path / "file")
    with pytest.raises(PeerError):
        open_journal(Path("/proc/journal"))


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(0, 2**32 - 1))
def test_the_checks_are_those_of_zlib(parts: list[bytes], before: int) -> None:
    """So that other programs can read the files."""
    assert crc32_of(parts, before) == zlib.crc32(b"".join(parts), before)


def test_files_of_a_later_release_are_not_touched(path: Path) -> None:
    """Told apart from damage by their own check, however long their header is."""
    journal, model = begun(path)
    journal.append(model.burst([1], 0))
    crash(journal)
    (file,) = path.glob("*.segment")
    later = b"kvejrnl\n" + struct.pack("<HH", 2, 200) + bytes(184)
    file.write_bytes(later + struct.pack("<I", zlib.crc32(later)))
    journal = open_journal(path)
    with pytest.raises(JournalError, match="is of version 2, and this release reads 1: use the release that wrote it"):
        journal.recover()
    crash(journal)
    file.write_bytes(later + b"none")
    assert open_journal(path).recover().unclean


def test_other_files_in_the_folder_do_not_matter(path: Path) -> None:
    journal, model = begun(path)
    journal.append(model.burst([1], 0))
    crash(journal)
    (path / "notes.txt").write_text("mine")
    (path / "0000000000000009.snapshot.tmp").write_text("half")
    journal = open_journal(path)
    assert model.is_in(journal.recover())
    journal.resume()
    assert (path / "notes.txt").exists()
    assert not list(path.glob("*.tmp"))
    crash(journal)


def test_a_whole_journal_moved_elsewhere_is_the_same(path: Path, tmp_path: Path) -> None:
    journal, model = begun(path)
    journal.append(model.burst([1, 2], 0))
    journal.close()
    shutil.copytree(path, tmp_path / "elsewhere")
    assert model.is_in(open_journal(tmp_path / "elsewhere").recover())


# --- what cannot be asked


WRONG: dict[str, tuple[Callable[[Journal], object], str]] = {
    "numbers": (lambda journal: journal.append([Relayed(5, 0, 0, 0, b"")]), "numbered 5 to 5, and must go on from 2"),
    "order": (lambda journal: journal.append([Relayed(2, 0, 0, 0, b""), Relayed(4, 0, 0, 1, b"")]), "must go on from 2"),
    "ordinal": (lambda journal: journal.append([Relayed(2, 1 << 16, 0, 0, b"")]), "out of range"),
    "hole": (lambda journal: journal.hole(3, 4), "a hole from 3 to 4 does not follow number 1"),
    "no hole": (lambda journal: journal.hole(2, 1), "does not follow"),
    "mark": (lambda journal: journal.mark({"large": bytes(MAX_MARK_BYTES)}), "may take 1048576"),
    "no mark": (lambda journal: journal.mark({"what": object()}), "msgpack has no bytes for"),
    "reset": (lambda journal: journal.reset(0, -1), "out of range"),
    "snapshot": (lambda journal: journal.snapshot(2, []), "between the last one, 0, and 1"),
    "old snapshot": (lambda journal: journal.snapshot(-1, []), "between the last one, 0, and 1"),
    "again": (lambda journal: journal.begin(1), "was begun already"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_asked_wrongly_changes_nothing(path: Path, what: str) -> None:
    journal, model = begun(path)
    journal.append(model.burst([1, 2], 0))
    journal.snapshot(0, model.snapshot(0, False))
    ask, why = WRONG[what]
    with pytest.raises(UsageError, match=why):
        ask(journal)
    journal.append(model.burst([3], 0))
    crash(journal)
    assert model.is_in(open_journal(path).recover())


def test_before_the_beginning_and_after_the_end(path: Path) -> None:
    journal = open_journal(path)
    with pytest.raises(UsageError, match="begin or resume it first"):
        journal.append([Relayed(0, 0, 0, 0, b"")])
    journal.begin(1)
    with journal:
        pass
    assert journal.close()
    with pytest.raises(ClosedError, match="is closed"):
        journal.tick(1.0)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"fsync": "sometimes"}, "one of always, interval, never"),
        ({"fsync_interval": 0}, "fsync_interval is 0; it must be above 0"),
        ({"retry_first": 9.0, "retry_most": 3.0}, "retry_most is 3.0, below retry_first, 9.0"),
        ({"limit_bytes": 5}, "must hold two segments"),
    ],
)
def test_wrong_settings(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        JournalSettings(**settings)  # type: ignore[arg-type]


def test_one_line_for_an_operator(path: Path) -> None:
    journal, model = begun(path, JournalSettings())
    journal.append(model.burst([1 << 20, 1 << 19], 0))
    assert repr(journal) == f"<Journal {path} disk, incarnation 3, next number 2, 1.5 MiB in 1 segments>"
    crash(journal)
