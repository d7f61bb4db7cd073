"""Segments that a snapshot has made needless are written over: what they held is never taken for what they hold, what was
acknowledged is told from what was not, and they take no room that the journal may not have."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvevents.relay.journal import Clerk, Disk, Journal, JournalSettings, scan
from kvevents.relay.journal.folder import Folder
from kvevents.relay.journal.frames import HEAD_BYTES, HEADER_BYTES, NOTHING, Acknowledged
from kvevents.relay.journal.limits import SPARES
from kvevents.relay.journal.scan import recover
from relay_journal_cases import TINY, Killed, Model, TornError, WatchedDisk, asks, crash, open_journal, willing

LARGE = replace(TINY, segment_bytes=2_000)
HEAD_CHECKED = HEAD_BYTES - 4
"""Of which the head's own check is the end; that of the body follows."""
FRAME = 150
"""Bytes that one batch of 100 takes."""


class NamingDisk(WatchedDisk):
    """Remembers which files were made anew, and which were written over."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []
        self.opened: list[str] = []

    def create(self, name: str, folder: int) -> int:
        self.made.append(name)
        return super().create(name, folder)

    def open(self, name: str, folder: int) -> int:
        self.opened.append(name)
        return super().open(name, folder)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def begun(path: Path, settings: JournalSettings = TINY, disk: WatchedDisk | None = None) -> tuple[Journal, Model]:
    journal = open_journal(path, settings, disk)
    journal.begin(3)
    return journal, Model()


def fill(journal: Journal, model: Model, count: int) -> None:
    """Batches one by one, all of one size: their frames are where those of another segment are."""
    for _ in range(count):
        journal.append(model.burst([100], 0))


def cover(journal: Journal, model: Model) -> None:
    """Everything, with a snapshot."""
    number = model.next_number - 1
    assert journal.snapshot(number, model.snapshot(number, False))


def spares(path: Path) -> list[Path]:
    return sorted(path.glob("*.spare.tmp"))


def segments(path: Path) -> list[Path]:
    return sorted(path.glob("*.segment"))


def inodes(paths: list[Path]) -> set[int]:
    return {each.stat().st_ino for each in paths}


def end_of(journal: Journal) -> int:
    """Where the newest segment ends."""
    writer = journal._keeping.writer
    assert writer is not None
    assert writer._segment is not None
    return writer._segment.size


def standing_of(data: bytes) -> int:
    """Bytes of the frame at the head of a segment."""
    return HEAD_BYTES + int.from_bytes(data[HEADER_BYTES : HEADER_BYTES + 4], "little")


def taken(path: Path) -> int:
    return sum(each.stat().st_size for each in (*spares(path), *segments(path), *path.glob("*.snapshot")))


def put(path: Path, at: int, data: bytes) -> None:
    """In place."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def found_in(place: Path | Folder, model: Model) -> tuple[bool, int]:
    """Whether it is unclean, and its torn bytes; where it is not, it holds what was told."""
    folder = Folder(place, Disk()) if isinstance(place, Path) else place
    try:
        found = recover(folder)
        assert found.unclean or model.is_in(found)
        return found.unclean, found.torn_bytes
    finally:
        if folder is not place:
            folder.close()


# --- that they are


def test_a_segment_that_a_snapshot_covers_is_written_over(path: Path) -> None:
    """The same file, under another name; what it holds is what was told, and it ends there when the next one is begun."""
    journal, model = begun(path)
    fill(journal, model, 4)
    (old,) = segments(path)
    inode = old.stat().st_ino
    cover(journal, model)
    assert inodes(spares(path)) == {inode}
    assert journal.stats().bytes == taken(path)
    fill(journal, model, 5)
    assert inode in inodes(segments(path)[-1:])
    assert journal.stats().bytes == taken(path), "stale bytes take room too"
    assert not spares(path)
    fill(journal, model, 5)
    assert journal.stats().bytes == taken(path)
    crash(journal)
    assert found_in(path, model) == (False, 0)


def test_in_the_long_run_no_file_is_made_but_for_snapshots(path: Path) -> None:
    """Nor removed: what one snapshot frees is what is used until the next."""
    disk = NamingDisk()
    journal, model = begun(path, disk=disk)
    for cycle in range(12):
        if cycle == 4:
            disk.made.clear()
            disk.opened.clear()
            files = inodes([*segments(path), *spares(path)])
        fill(journal, model, 8)
        cover(journal, model)
    assert {each.endswith(".snapshot.tmp") for each in disk.made} == {True}
    assert len(disk.opened) > 8
    assert inodes([*segments(path), *spares(path)]) == files
    crash(journal)
    assert found_in(path, model) == (False, 0)


def test_a_snapshot_does_not_end_a_segment_that_was_only_begun(path: Path) -> None:
    """It would be cut to the little that is in it. What is in it still counts towards the next snapshot."""
    journal, model = begun(path, replace(TINY, segment_bytes=4_000))
    fill(journal, model, 20)
    fill(journal, model, 2)
    assert len(segments(path)) == 1
    fill(journal, model, 8)
    assert len(segments(path)) == 2
    before = segments(path)[-1:]
    number = model.next_number - 1
    assert journal.snapshot(number, model.snapshot(number, False))
    assert segments(path) == before
    fill(journal, model, 8)
    assert not asks(journal, "needs_compaction")
    fill(journal, model, 2)
    assert asks(journal, "needs_compaction")
    crash(journal)
    assert found_in(path, model) == (False, 0)


def test_a_full_segment_ends_where_its_file_does(path: Path) -> None:
    """Though the file was longer before: the next one is begun when it was cut."""
    journal, model = begun(path)
    journal.append(model.burst([3_000], 0))
    cover(journal, model)
    assert spares(path)[0].stat().st_size > 3_000
    fill(journal, model, 5)
    longest = segments(path)[-1]
    assert longest.stat().st_size > 3_000
    fill(journal, model, 3)
    end = end_of(journal)
    fill(journal, model, 1)
    assert longest != segments(path)[-1]
    assert longest.stat().st_size == end
    crash(journal)
    assert found_in(path, model) == (False, 0)


def test_always_writes_nothing_over(path: Path) -> None:
    """The disk's fsync is the cost there, and what follows the last frame stays as it is known to be."""
    disk = NamingDisk()
    journal, model = begun(path, replace(TINY, fsync="always"), disk)
    for _ in range(6):
        fill(journal, model, 8)
        cover(journal, model)
    assert not spares(path)
    assert set(disk.opened) == {"end"}
    crash(journal)
    assert found_in(path, model) == (False, 0)


def test_a_spare_that_somebody_removed_is_made_anew(path: Path) -> None:
    journal, model = begun(path)
    fill(journal, model, 4)
    cover(journal, model)
    spares(path)[0].unlink()
    fill(journal, model, 9)
    assert journal.stats().state == "disk"
    crash(journal)
    assert found_in(path, model) == (False, 0)


# --- what they held


@pytest.mark.parametrize("behind", range(1, 11))
@pytest.mark.parametrize("known", [True, False])
def test_a_stale_frame_is_never_taken(path: Path, behind: int, known: bool) -> None:
    """Though one of the same kind and size begins at each place where a new one ends, and though `end` is gone."""
    journal, model = begun(path, LARGE)
    for _ in range(2):  # the first segment begins otherwise: nothing stands at its head
        fill(journal, model, 11)
        cover(journal, model)
    (old,) = (each.read_bytes() for each in spares(path))
    fill(journal, model, 13 + behind)  # 13 fill the one before
    new, size = segments(path)[-1].read_bytes(), end_of(journal)
    assert size == HEADER_BYTES + standing_of(old) + behind * FRAME < len(old) == len(new)
    assert new[size:] == old[size:]
    crash(journal)
    if not known:
        (path / "end").unlink()
    assert found_in(path, model) == (False, 0)


def reused(path: Path) -> tuple[Journal, Model, Path, int, WatchedDisk]:
    """A journal whose last segment has stale frames behind its end, that segment, and the end."""
    disk = WatchedDisk()
    journal, model = begun(path, LARGE, disk)
    fill(journal, model, 5)
    cover(journal, model)
    fill(journal, model, 15)
    last, size = segments(path)[-1], end_of(journal)
    assert HEADER_BYTES < size < last.stat().st_size - 400
    return journal, model, last, size, disk


def test_a_flipped_bit_before_the_end_is_damage_and_behind_it_nothing(path: Path) -> None:
    """Of each byte of a segment that is written over."""
    journal, model, last, size, _ = reused(path)
    crash(journal)
    data = last.read_bytes()
    folder = Folder(path, Disk())
    for at in range(len(data)):
        put(last, at, bytes([data[at] ^ 1 << at % 8]))
        assert found_in(folder, model) == (at < size, 0), at
        put(last, at, data[at : at + 1])
    folder.close()


def test_a_file_cut_before_the_end_is_damage_and_behind_it_nothing(path: Path) -> None:
    """At each length: a kill does not shorten what was acknowledged."""
    journal, model, last, size, _ = reused(path)
    crash(journal)
    folder = Folder(path, Disk())
    for length in reversed(range(last.stat().st_size)):
        os.truncate(last, length)
        unclean, torn = found_in(folder, model)
        assert unclean is (length < size), length
        assert unclean or torn < HEAD_BYTES, "of stale bytes at most what looks like the beginning of a head"
    folder.close()


def test_a_torn_frame_before_stale_bytes_is_cut_off(path: Path, tmp_path: Path) -> None:
    """However much of it a kill has let be written, in the head and behind it; all of it is as good as told. The rest is no
    part of what is found, and the process after the next one does not see it either."""
    journal, model, last, size, _ = reused(path)
    end, before = (path / "end").read_bytes(), model.copy()
    fill(journal, model, 1)
    after = end_of(journal)
    crash(journal)
    new = last.read_bytes()
    stale = bytes(each ^ 255 for each in new)
    for written in (*range(HEAD_BYTES + 2), *range(HEAD_BYTES + 2, after - size, 9), after - size - 1, after - size):
        place = tmp_path / "as a kill leaves it"
        shutil.copytree(path, place)
        (place / "end").write_bytes(end)
        (place / last.name).write_bytes(new[: size + written] + stale[size + written :])
        again = open_journal(place)
        found = again.recover()
        assert not found.unclean, found.because
        assert (model if written == after - size else before).is_in(found)
        assert found.torn_bytes == (after - size if HEAD_CHECKED <= written < after - size else 0)
        again.resume()
        assert (place / last.name).stat().st_size == (after if written == after - size else size)
        crash(again)
        assert open_journal(place).recover().torn_bytes == 0
        shutil.rmtree(place)


def test_a_frame_that_a_kill_kept_from_being_noted_is_taken(path: Path) -> None:
    """It holds: whether it was sent does not matter then."""
    journal, model, _, size, disk = reused(path)

    def kill(call: str, _: bytes) -> None:
        if call == "note":
            raise TornError(0, Killed())

    disk.before = kill
    with pytest.raises(Killed):
        fill(journal, model, 1)
    disk.before = willing
    crash(journal)
    assert Acknowledged.unpack((path / "end").read_bytes()).end == size
    assert found_in(path, model) == (False, 0)


def test_a_head_that_announces_more_than_the_file_has_is_torn(path: Path) -> None:
    """A large burst of which the kill let only the head be written."""
    journal, model, last, size, disk = reused(path)
    before = model.copy()

    def kill(call: str, _: bytes) -> None:
        if call == "write":
            raise TornError(HEAD_BYTES, Killed())

    disk.before = kill
    with pytest.raises(Killed):
        journal.append(model.burst([9_000], 0))
    disk.before = willing
    crash(journal)
    assert found_in(path, before) == (False, last.stat().st_size - size)


# --- what is known of the end


def test_an_end_that_does_not_hold_tells_nothing() -> None:
    """Cut, longer, empty, or with a flipped bit."""
    data = Acknowledged.pack(7, 1 << 40)
    assert Acknowledged.unpack(data) == (7, 1 << 40)
    for at in range(len(data)):
        assert Acknowledged.unpack(data[:at]) == NOTHING
        assert Acknowledged.unpack(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) == NOTHING
    assert Acknowledged.unpack(data + b"\0") == NOTHING
    assert Acknowledged.unpack(bytes(len(data))) == NOTHING


@pytest.mark.parametrize("policy", ["always", "interval"])
def test_an_older_end_loses_nothing(path: Path, policy: str) -> None:
    """As a loss of power leaves it with "always", and a kill right after a frame: whatever it told before, all is found."""
    journal, model = begun(path, replace(TINY, fsync=policy))  # type: ignore[arg-type]
    ends = [b"", (path / "end").read_bytes()]
    for _ in range(12):
        fill(journal, model, 1)
        ends.append((path / "end").read_bytes())
    crash(journal)
    assert len(segments(path)) > 2
    for end in ends:
        (path / "end").write_bytes(end)
        assert found_in(path, model) == (False, 0)


def test_damage_behind_an_older_end_ends_what_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "always" it was acknowledged, perhaps, and a loss of power took the note of it: that begins a new incarnation."""
    journal, model = begun(path, replace(LARGE, fsync="always"))
    fill(journal, model, 2)
    before = model.copy()
    end, (last,) = (path / "end").read_bytes(), segments(path)
    fill(journal, model, 2)
    crash(journal)
    (path / "end").write_bytes(end)
    data = last.read_bytes()
    size = Acknowledged.unpack(end).end
    put(last, size, bytes([data[size] ^ 1]))
    assert found_in(path, before)[0] is False
    monkeypatch.setattr(scan, "boot_id", lambda: b"2" * 16)
    assert open_journal(path).recover().because.startswith("the machine was started anew")


def test_a_newest_segment_that_is_gone_is_missed(path: Path) -> None:
    """Also when it went on behind a journal that was closed."""
    journal, model = begun(path)
    fill(journal, model, 2)
    journal.close()
    journal = open_journal(path)
    journal.resume()
    fill(journal, model, 1)
    crash(journal)
    segments(path)[-1].unlink()
    found = open_journal(path).recover()
    assert (found.unclean, found.clean) == (True, False)
    assert found.because == "0000000000000001.segment, of which something was acknowledged, is missing"


# --- what they take


def test_no_more_wait_than_are_used(path: Path) -> None:
    """However many one snapshot frees; the others go."""
    journal, model = begun(path)
    fill(journal, model, 40)
    assert len(segments(path)) > 2 * SPARES
    cover(journal, model)
    assert len(spares(path)) == SPARES
    assert journal.stats().bytes == taken(path)
    crash(journal)


def test_none_waits_beyond_half_of_the_limit(path: Path) -> None:
    """The journal's own files, the new snapshot and those that wait together."""
    journal, model = begun(path, replace(TINY, limit_bytes=4_000))
    fill(journal, model, 12)
    number = model.next_number - 1
    assert journal.snapshot(number, [bytes(1_000)])
    assert len(spares(path)) == 1
    assert taken(path) <= 2_000
    model.snapshots[number, False] = [bytes(1_000)]
    fill(journal, model, 8)
    number = model.next_number - 1
    assert journal.snapshot(number, [bytes(2_000)])
    assert not spares(path)
    crash(journal)


def test_those_that_wait_go_before_the_journal_does(path: Path) -> None:
    """They are never why it goes to memory for `limit_bytes`, nor does it take more than that for them."""
    settings = replace(TINY, limit_bytes=4_000)
    journal, model = begun(path, settings)
    fill(journal, model, 9)
    cover(journal, model)
    assert len(spares(path)) == SPARES
    journal.append(model.burst([3_000], 0))
    assert spares(path)
    fill(journal, model, 1)
    assert not spares(path)
    assert journal.stats().state == "disk"
    assert journal.stats().bytes == taken(path)
    crash(journal)
    assert found_in(path, model) == (False, 0)


def full(call: str, _: bytes) -> None:
    if call == "write":
        raise TornError(0, OSError(errno.ENOSPC, "No space left on device"))


def leaves(how: str, path: Path, journal: Journal, model: Model, disk: WatchedDisk) -> None:
    if how == "closed":
        journal.close()
        return
    if how == "refused":
        disk.before = full
        fill(journal, model, 1)
        disk.before = willing
        assert journal.stats().state == "memory"
        crash(journal)
        return
    crash(journal)
    assert spares(path)
    journal = open_journal(path)
    if how == "resumed":
        journal.resume()
    else:
        journal.begin(4)
    crash(journal)


@pytest.mark.parametrize("how", ["closed", "refused", "resumed", "begun anew"])
def test_none_waits_when_nobody_writes(path: Path, how: str) -> None:
    """What is closed, or given up since the disk is full, takes no more than what it holds; what a killed process leaves goes
    with the next one."""
    journal, model, _, _, disk = reused(path)
    cover(journal, model)
    fill(journal, model, 1)
    assert spares(path)
    assert end_of(journal) < segments(path)[-1].stat().st_size
    leaves(how, path, journal, model, disk)
    assert not spares(path)
    assert not list(path.glob("*.tmp"))
    if how in {"closed", "refused"}:
        end = Acknowledged.unpack((path / "end").read_bytes())
        assert segments(path)[-1].name == f"{end.ordinal:016}.segment"
        assert segments(path)[-1].stat().st_size == end.end


def test_none_waits_after_the_way_back(path: Path) -> None:
    """A disk that was full has better uses for them."""
    journal, model, _, _, disk = reused(path)
    disk.before = full
    fill(journal, model, 1)
    disk.before = willing
    journal.tick(100.0)
    number = model.next_number - 1
    assert journal.snapshot(number, model.snapshot(number, False))
    assert journal.stats().state == "disk"
    assert not spares(path)
    crash(journal)
    assert found_in(path, model) == (False, 0)


def test_none_waits_when_the_disk_refuses_beside_a_snapshot(path: Path) -> None:
    """What a snapshot frees that is still being written then is of no use any more."""
    going, written = threading.Event(), threading.Event()

    class Slow(WatchedDisk):
        def rename(self, name: str, to: str, folder: int) -> None:
            written.set()
            assert going.wait(10)
            super().rename(name, to, folder)

    disk = Slow()
    journal = Journal(path, TINY, disk=disk, clerk=Clerk())
    journal.begin(3)
    model = Model()
    fill(journal, model, 9)
    cover(journal, model)
    assert written.wait(10)
    disk.before = full
    fill(journal, model, 1)
    disk.before = willing
    assert journal.stats().state == "memory"
    going.set()
    journal.close()
    assert list(path.glob("*.snapshot"))
    assert not list(path.glob("*.tmp"))


def test_one_that_cannot_be_kept_is_removed(path: Path) -> None:
    """Where the file system renames nothing more after the snapshot."""
    renamed, disk = iter(range(100)), WatchedDisk()
    journal, model = begun(path, disk=disk)
    fill(journal, model, 9)

    def refuse_later(call: str, _: bytes) -> None:
        if call == "rename" and next(renamed):
            raise OSError(errno.EIO, "Input/output error")

    disk.before = refuse_later
    cover(journal, model)
    assert (len(segments(path)), spares(path), journal.stats().state) == (1, [], "disk")
    disk.before = willing
    fill(journal, model, 9)
    crash(journal)
    assert found_in(path, model) == (False, 0)
