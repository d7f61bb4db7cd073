"""A disk that is full, fails, is read-only or goes away: nothing raises, all of it is told, and nothing is taken for whole."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from kvevents.errors import UsageError
from kvevents.relay.journal import Journal, JournalSettings
from relay_journal_cases import TINY, Model, TornError, WatchedDisk, asks, crash, open_journal

WRITES = {"create", "open", "write", "note", "cut", "shorten", "reserve"}
ALL = WRITES | {"sync", "sync_folder", "rename", "remove"}
PART = 7


class FailingDisk(WatchedDisk):
    """Refuses `refused` calls from the `at`-th on, when `ill`; a write leaves its beginning."""

    def __init__(self, at: int = 0, error: int = errno.ENOSPC, refused: set[str] = WRITES) -> None:
        super().__init__(self._refuse)
        self.at = at
        self.error = error
        self.refused = refused
        self.ill = True

    def _refuse(self, call: str, data: bytes) -> None:
        if self.ill and call in self.refused and len(self.calls) > self.at:
            raise TornError(min(PART, len(data)), OSError(self.error, "No space left on device"))


def begun(path: Path, disk: FailingDisk, settings: JournalSettings = TINY) -> tuple[Journal, Model]:
    """On a disk that fails from the next call on."""
    ill, disk.ill = disk.ill, False
    journal = open_journal(path, settings, disk)
    journal.begin(3)
    model = Model()
    journal.append(model.burst([50, 60], 0))
    disk.ill, disk.at = ill, len(disk.calls) + disk.at
    return journal, model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_is_done_without(path: Path, error: int) -> None:
    """The state and the reason say so, batches are counted, and a process that dies then leaves an unclean journal, which holds
    what it held."""
    disk = FailingDisk(error=error)
    journal, model = begun(path, disk)
    before = model.copy()
    journal.append(model.burst([1, 2, 3], 0))
    journal.hole(*model.hole(2))
    journal.reset(1, 1)
    journal.mark({"a": 1})
    stats = journal.stats()
    assert (stats.state, stats.reason, stats.marked) == ("memory", "No space left on device", True)
    assert (stats.appended, stats.dropped, stats.failures) == (2, 3, 1)
    assert journal.next_number == model.next_number
    assert "memory (No space left on device), incarnation 3, next number 7" in repr(journal)
    assert repr(journal).endswith("3 batches not recorded>")
    crash(journal)
    found = open_journal(path).recover()
    assert before.is_in(found)
    assert found.unclean
    assert not found.resumable
    assert found.because == "the disk refused what was sent last"
    assert 0 < found.torn_bytes <= 4 * PART


def test_where_even_the_note_is_refused_it_is_told(path: Path) -> None:
    """On a file system that became read-only nothing can say that the files are not whole, but for the stats."""
    disk = FailingDisk(error=errno.EROFS, refused=ALL)
    journal, model = begun(path, disk)
    journal.append(model.burst([1], 0))
    assert not journal.stats().marked
    disk.refused = WRITES - {"cut"}
    journal.tick(100.0)
    assert journal.stats().marked, "it is tried again"
    crash(journal)
    assert open_journal(path).recover().unclean


def test_a_note_that_cannot_be_removed_is_emptied(path: Path) -> None:
    """There are file systems that need room to remove a file; to cut one takes none."""
    disk = FailingDisk(refused=ALL - {"cut"})
    journal, model = begun(path, disk)
    journal.append(model.burst([1], 0))
    assert journal.stats().marked
    assert (path / "whole").read_bytes() == b""
    crash(journal)
    assert open_journal(path).recover().unclean


def test_the_way_back_is_a_snapshot(path: Path) -> None:
    """Tried ever more rarely; when there is room, the relay is asked for a snapshot and for what it sent since."""
    disk = FailingDisk()
    journal, model = begun(path, disk)
    journal.tick(100.0)
    journal.append(model.burst([10], 0))
    tries: list[float] = []
    for second in range(100, 400):
        calls = len(disk.calls)
        journal.tick(float(second))
        if len(disk.calls) > calls:
            tries.append(second)
    assert [later - earlier for earlier, later in pairwise(tries)] == [2, 4, 8, 16, 32, 60, 60, 60]
    assert not asks(journal, "wants_snapshot")
    assert not journal.snapshot(0, model.snapshot(0, False), tail=model.behind(0))
    disk.ill = False
    journal.append(model.burst([10, 20], 0))
    model.hole(2)
    journal.hole(5, 6)
    model.reset(0)
    journal.reset(0, 1)
    journal.tick(1_000.0)
    assert asks(journal, "wants_snapshot")
    assert journal.stats().state == "memory"
    with pytest.raises(UsageError, match="the tail of a snapshot ends with 4, and must reach 6"):
        journal.snapshot(3, [], tail=model.behind(3)[:1])
    with pytest.raises(UsageError, match="in the tail of a snapshot 3 follows 1"):
        journal.snapshot(1, [], tail=model.behind(2))
    assert journal.snapshot(1, model.snapshot(1, True), partial=True, tail=iter(model.behind(1)))
    assert (journal.stats().state, journal.stats().reason, asks(journal, "wants_snapshot")) == ("disk", "", False)
    assert [each.suffix for each in sorted(path.iterdir()) if each.suffix] == [".segment", ".snapshot"]
    journal.append(model.burst([700, 800], 0))
    crash(journal)
    found = open_journal(path).recover()
    assert model.is_in(found)
    assert found.resumable


@pytest.mark.parametrize(
    "refused", [ALL, WRITES, {"sync"}, {"rename"}, {"remove"}], ids=lambda refused: "+".join(sorted(refused))
)
def test_a_disk_that_fails_anywhere_is_never_taken_for_whole(path: Path, refused: set[str]) -> None:
    """From each call on, for good: nothing raises, and who dies then leaves all that was told, or an unclean journal."""
    at, called = 0, 1
    while at < called:
        shutil.rmtree(path, ignore_errors=True)
        disk = FailingDisk(at, errno.EIO, refused)
        journal, model = begun(path, disk, replace(TINY, fsync="always"))
        journal.append(model.burst([700], 0))
        journal.mark({"one": 1})
        model.mark = {"one": 1}
        journal.snapshot(1, model.snapshot(1, False))
        journal.append(model.burst([800, 1], 1))
        journal.snapshot(4, model.snapshot(4, True), partial=True)
        journal.append(model.burst([5], 1))
        journal.tick(1_000.0)
        stats = journal.stats()
        crash(journal)
        called = len(disk.calls)
        disk.ill = False
        found = open_journal(path).recover()
        assert found.unclean or model.is_in(found) or not stats.marked, at
        assert stats.marked or stats.state == "disk" or refused is ALL
        at += 1
    assert at > 10


@pytest.mark.parametrize("at", range(12))
def test_a_process_that_dies_on_the_way_back_leaves_it_unclean_or_whole(path: Path, at: int) -> None:
    """The disk fails once more while the snapshot and what is behind it are written."""
    disk = FailingDisk()
    journal, model = begun(path, disk)
    journal.append(model.burst([10], 0))
    disk.ill = False
    journal.tick(1_000.0)
    disk.ill, disk.at, disk.refused = True, len(disk.calls) + at, ALL - {"remove", "cut"}
    journal.snapshot(0, model.snapshot(0, False), tail=model.behind(0))
    journal.append(model.burst([20], 0))
    stats = journal.stats()
    crash(journal)
    found = open_journal(path).recover()
    assert found.unclean is (stats.state == "memory")
    assert found.unclean or model.is_in(found)


def test_a_snapshot_for_which_there_is_no_room_is_done_without(path: Path) -> None:
    """The journal goes on, says why, leaves nothing half, and wants one again after a while."""
    disk = FailingDisk(at=1 << 30)
    journal, model = begun(path, disk)
    journal.tick(1.0)
    journal.append(model.burst([3_000], 0))
    assert asks(journal, "needs_compaction")
    disk.at, disk.refused = len(disk.calls), {"rename"}
    assert journal.snapshot(1, model.snapshot(1, False))
    assert (journal.stats().state, journal.stats().compactions, journal.stats().failures) == ("disk", 0, 1)
    assert journal.stats().reason == "no snapshot was written: No space left on device"
    assert not list(path.glob("*.tmp"))
    assert not asks(journal, "needs_compaction")
    disk.ill = False
    journal.tick(3.0)
    assert asks(journal, "needs_compaction")
    assert journal.snapshot(1, model.snapshot(1, False))
    assert (journal.stats().reason, journal.stats().compactions) == ("", 1)
    crash(journal)
    assert model.is_in(open_journal(path).recover())


def test_a_journal_that_nobody_compacts_ends_at_its_limit(path: Path) -> None:
    """Whoever shares the disk goes on; a snapshot frees it."""
    journal, model = begun(path, FailingDisk(at=1 << 30), replace(TINY, limit_bytes=4_000))
    while journal.stats().state == "disk":
        journal.append(model.burst([500], 0))
    assert "more than limit_bytes" in journal.stats().reason
    assert sum(each.stat().st_size for each in path.iterdir()) < 5_500
    journal.tick(10.0)
    last = journal.next_number - 1
    assert journal.snapshot(last, model.snapshot(last, False))
    assert journal.stats().state == "disk"
    assert sum(each.stat().st_size for each in path.iterdir()) < 1_000
    crash(journal)


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_folder_that_goes_away_is_noticed(path: Path, how: str) -> None:
    """At a tick, though everything written still succeeds; with a snapshot it begins again in a folder of that name."""
    journal, model = begun(path, FailingDisk(at=1 << 30))
    if how == "deleted":
        shutil.rmtree(path)
    else:
        path.rename(path.with_name("moved"))
    journal.append(model.burst([1], 0))
    assert journal.stats().state == "disk"
    journal.tick(10.0)
    assert (journal.stats().state, journal.stats().reason) == ("memory", "its files were deleted or moved")
    journal.tick(20.0)
    assert journal.snapshot(2, model.snapshot(2, False))
    journal.append(model.burst([2], 0))
    assert journal.stats().state == "disk"
    crash(journal)
    assert model.is_in(open_journal(path).recover())
    if how == "moved":
        assert open_journal(path.with_name("moved")).recover().unclean


def test_a_disk_that_is_ill_from_the_beginning(path: Path) -> None:
    """Begun or resumed: in memory, until it is well."""
    disk = FailingDisk()
    journal = open_journal(path, disk=disk)
    journal.begin(3)
    model = Model()
    journal.append(model.burst([1], 0))
    assert (journal.stats().state, journal.stats().dropped) == ("memory", 1)
    disk.ill = False
    journal.tick(100.0)
    assert journal.snapshot(-1, [], tail=model.behind(-1))
    model.snapshots[-1, False] = []
    journal.close()
    disk.ill, disk.at = True, 0
    journal = open_journal(path, disk=disk)
    assert model.is_in(journal.recover())
    journal.resume()
    assert journal.stats().state == "memory"
    crash(journal)
    assert open_journal(path).recover().unclean, "numbers beyond may have been sent"


def test_a_folder_that_the_disk_does_not_give(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of what it holds then; the relay begins anew, in memory."""

    def refused(self: Path, **how: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refused)
        journal = open_journal(path)
        found = journal.recover()
        assert found.unclean
        assert not found.resumable
        journal.begin(9)
        assert (journal.stats().state, journal.stats().reason) == ("memory", "Read-only file system")
        journal.tick(100.0)
        assert journal.stats().state == "memory"
    journal.tick(1_000.0)
    assert journal.snapshot(-1, [])
    assert journal.stats().state == "disk"
    crash(journal)


# --- a real one


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """256 KiB, full when they are."""
    place = tmp_path / "tiny"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(place)],  # noqa: S607 - wherever mount is
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)  # noqa: S607 - as above


def test_a_real_disk_that_is_full(tiny_disk: Path) -> None:
    """What was acknowledged before is there, the journal is unclean; with room again, it comes back and is whole."""
    path = tiny_disk / "journal"
    with Journal(path, JournalSettings(segment_bytes=16_384, compact_bytes=1 << 20)) as journal:
        journal.begin(3)
        model = Model()
        while journal.stats().state == "disk":
            before = model.copy()
            journal.append(model.burst([1000, 500], 0))
        assert journal.stats().reason == "No space left on device"
        assert journal.stats().marked
        assert journal.stats().appended == before.next_number > 150
        shutil.copytree(path, tiny_disk.with_name("as a kill leaves it"))
        left = open_journal(tiny_disk.with_name("as a kill leaves it")).recover()
        assert before.is_in(left)
        assert left.unclean
        journal.tick(1.0)
        assert not asks(journal, "wants_snapshot")
        subprocess.run(["mount", "-o", "remount,size=4m", str(tiny_disk)], check=True)  # noqa: S607 - as above
        journal.tick(100.0)
        assert asks(journal, "wants_snapshot")
        number = model.next_number - 5
        assert journal.snapshot(number, model.snapshot(number, False), tail=model.behind(number))
        journal.append(model.burst([10], 0))
    assert journal.stats().compactions == 1
    found = open_journal(path).recover()
    assert model.is_in(found)
    assert found.clean


def test_a_real_disk_that_becomes_read_only(tiny_disk: Path) -> None:
    """Where nothing can be noted any more, the stats say that."""
    if subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=False, capture_output=True).returncode:  # noqa: S607
        pytest.skip("it cannot be made read-only here")
    journal = Journal(tiny_disk / "journal")
    assert journal.recover().unclean
    journal.begin(3)
    assert (journal.stats().state, journal.stats().reason, journal.stats().marked) == ("memory", "Read-only file system", False)
    journal.close()
