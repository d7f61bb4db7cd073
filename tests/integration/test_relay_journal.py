"""Tests of the journal: after any fault of process, disk or file, recovery returns everything sent, or reports that it is
incomplete."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.errors import ExternalError, JournalError
from kvevents.relay import journal_format
from kvevents.relay.journal import Journal, JournalLimits
from kvevents.relay.journal_disk import Folder
from kvevents.relay.journal_format import Batches, Origin
from kvevents.relay.journal_recovery import RecoveredJournal
from relay_journal_cases import (
    TINY,
    Killed,
    Model,
    TornError,
    WatchedDisk,
    batches_of,
    crash,
    is_resumable,
    no_failure,
    open_journal,
    release_all,
    release_later,
)

Step: TypeAlias = Callable[[Journal, Model], None]
INCARNATION = 7
OWN = 65_535


@pytest.fixture(autouse=True)
def no_file_stays_open() -> Iterator[None]:
    yield
    release_all()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def begin_journal(path: Path, disk: WatchedDisk | None = None) -> tuple[Journal, Model]:
    journal = open_journal(path, disk=disk)
    journal.begin(INCARNATION)
    return journal, Model()


def store(journal: Journal, model: Model, sizes: list[int], upstream: int = 0) -> None:
    journal.append(batches_of(model.batches(sizes, upstream)))


def skip(journal: Journal, model: Model) -> None:
    journal.skip(model.skip())


def reset(journal: Journal, model: Model, upstream: int) -> None:
    journal.reset(upstream, model.reset(upstream))


def set_checkpoint(journal: Journal, model: Model, text: bytes) -> None:
    model.checkpoint = text
    journal.set_checkpoint(text)


def wants_snapshot(journal: Journal) -> bool:
    """Return `journal.wants_snapshot`; a type checker assumes that a property does not change between two assertions."""
    return journal.wants_snapshot


def snapshot(journal: Journal, model: Model, back: int = 3) -> bool:
    """Write a snapshot if the journal wants one, as a relay does."""
    if not wants_snapshot(journal):
        return False
    number = max([-1, *(each for each in model.states if each < model.next_number)], default=-1)
    number = max(number, model.next_number - 1 - back)
    return journal.snapshot(number, model.state(number), model.tail(number), OWN)


def restart_process(journal: Journal, model: Model) -> None:
    """Mark the start of another process in a list of steps; `Run.take` handles it."""


def step(function: Callable[..., object], *arguments: st.SearchStrategy[object]) -> st.SearchStrategy[Step]:
    return st.tuples(*arguments).map(lambda found: lambda journal, model: _drop(function(journal, model, *found)))


def _drop(_: object) -> None:
    """Ignore a result."""


upstreams = st.integers(0, 2)
steps = st.lists(
    st.one_of(
        step(store, st.lists(st.sampled_from([0, 1, 30, 200, 1_500]), min_size=1, max_size=4), upstreams),
        step(skip),
        step(reset, upstreams),
        step(set_checkpoint, st.binary(max_size=20)),
        step(snapshot, st.integers(0, 6)),
        st.just(restart_process),
    ),
    max_size=25,
)


class Run:
    """Runs steps on a journal and its model, across restarts of the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = Model()
        self.disk = WatchedDisk()
        self.journal = open_journal(folder, disk=self.disk)
        self.now = 0.0

    def take(self, each: Step) -> None:
        if each is restart_process:
            self.journal.close()
            self.restart()
        else:
            each(self.journal, self.model)
            self.now += 0.3
            self.journal.tick(self.now)

    def restart(self) -> None:
        self.journal = open_journal(self.folder, disk=self.disk)
        found = self.journal.recover()
        assert not found.incomplete_reason
        assert self.model.matches(found)
        assert found.incarnation == INCARNATION
        self.journal.resume(found)


# --- recovery


def test_recorded_batches_are_recovered_after_a_crash_and_after_closing(path: Path) -> None:
    journal, model = begin_journal(path)
    store(journal, model, [0, 1, 300])
    store(journal, model, [20], upstream=3)
    skip(journal, model)
    reset(journal, model, 0)
    set_checkpoint(journal, model, b"first")
    set_checkpoint(journal, model, b"second")
    store(journal, model, [5])
    journal.set_origin(3, Origin(1, 2, bytes(32)))
    journal.set_origin(3, Origin(1, 4, b"\1" * 32))
    for end in (crash, Journal.close):
        end(journal)
        journal = open_journal(path)
        found = journal.recover()
        assert is_resumable(found)
        assert model.matches(found)
        assert found.origins == {3: Origin(1, 4, b"\1" * 32)}
        assert [each.number for each in found.batches()] == [0, 1, 2, 3, 5]
        journal.resume(found)
    crash(journal)


def _folder(journal: Journal) -> Folder:
    assert journal._folder is not None
    return journal._folder


def test_a_snapshot_replaces_earlier_files(path: Path) -> None:
    """The snapshot contains positions, checkpoint and origins."""
    journal, model = begin_journal(path)
    set_checkpoint(journal, model, b"mark")
    journal.set_origin(0, Origin(0, 5, bytes(32)))
    while not wants_snapshot(journal):
        store(journal, model, [100, 50])
    skip(journal, model)
    assert snapshot(journal, model)
    assert journal.stats().snapshots == 1
    assert sorted(each.suffix for each in path.iterdir()) == ["", ".log", ".snapshot"]
    assert not wants_snapshot(journal)
    store(journal, model, [9])
    crash(journal)
    found = open_journal(path).recover()
    assert model.matches(found)
    assert (found.origins, found.snapshot_number) == ({0: Origin(0, 5, bytes(32))}, model.next_number - 5)


def test_the_size_of_all_files_is_bounded(path: Path) -> None:
    journal, model = begin_journal(path)
    largest_size = 0
    for _ in range(400):
        store(journal, model, [100])
        snapshot(journal, model)
        largest_size = max(largest_size, sum(each.stat().st_size for each in path.iterdir()))
    assert journal.stats().snapshots > 10
    assert largest_size < 4 * TINY.compact_bytes
    assert journal.stats().bytes < 4 * TINY.compact_bytes
    crash(journal)


def test_appends_continue_while_a_snapshot_is_written(path: Path) -> None:
    """A thread writes the snapshot, and batches that are stored meanwhile are not lost."""
    journal = Journal(path, TINY)
    journal.begin(INCARNATION)
    model = Model()
    while not wants_snapshot(journal):
        store(journal, model, [100])
    assert snapshot(journal, model)
    store(journal, model, [100])
    assert not wants_snapshot(journal)
    assert journal.close()
    found = open_journal(path).recover()
    assert found.snapshot_number >= 0
    assert model.matches(found)


def test_a_tail_is_split_into_frames() -> None:
    """It is split by number of batches, by bytes and at missing numbers, also at both ends."""
    rows = [(at, b"x") for at in (2, 3, 4, 5, 6, 7, 8, 11, 14)] + [(15, bytes(5)), (16, bytes(6)), (17, bytes(50)), (18, b"")]
    frames = [
        (each.first, each.last) if isinstance(each, journal_format.SkippedNumbers) else [each.first, len(each.payloads)]
        for each in journal_format.tail_records(rows, 1, 21, OWN, max_batches=3, max_bytes=10)
        if isinstance(each, journal_format.SkippedNumbers | Batches)
    ]
    assert frames == [(1, 1), [2, 3], [5, 3], [8, 1], (9, 10), [11, 1], (12, 13), [14, 2], [16, 1], [17, 1], [18, 1], (19, 20)]
    assert list(journal_format.tail_records([], 4, 4, OWN, max_batches=3, max_bytes=10)) == []


# --- kills, disk failures and damage at any point


@given(taken=steps, more=steps, kill_at=st.integers(0, 150), part=st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_a_kill_anywhere_loses_nothing_that_was_acknowledged(
    taken: list[Step], more: list[Step], kill_at: int, part: float
) -> None:
    """The process is killed at any system call, or in the middle of a write. The next process has everything that was
    acknowledged, and at most the one record that was being written."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder, "journal"))
        run.journal.begin(INCARNATION)

        def kill(_call: str, data: bytes) -> None:
            if len(run.disk.calls) > kill_at:
                raise TornError(int(part * len(data)), Killed())

        run.disk.before = kill
        run.disk.calls.clear()
        before = run.model.copy()
        try:
            for each in taken:
                before = run.model.copy()
                run.take(each)
        except Killed:
            pass
        else:
            before = run.model
        run.disk.before = no_failure
        crash(run.journal)
        run.journal = open_journal(run.folder, disk=run.disk)
        found = run.journal.recover()
        assert not found.incomplete_reason
        before.states = run.model.states
        run.model = before if before.matches(found) else run.model
        assert run.model.matches(found)
        run.journal.resume(found)
        for each in more:
            run.take(each)
        run.journal.close()
        run.restart()
        run.journal.close()


REFUSALS = (
    {"write"},
    {"write", "create"},
    {"overwrite"},
    {"rename"},
    {"remove"},
    {"create", "open", "overwrite", "remove", "write"},
)


@given(
    taken=steps,
    more=steps,
    refused=st.sampled_from(REFUSALS),
    begins=st.integers(0, 60),
    count=st.integers(1, 40),
    last=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_a_disk_that_fails_at_any_point_never_causes_wrong_data(
    taken: list[Step], more: list[Step], refused: set[str], begins: int, count: int, last: bool
) -> None:
    """No call raises. If the process is killed afterwards, the files have everything that was sent or are marked as broken; if
    they could not be marked, the statistics say so."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder, "journal"))
        run.journal.begin(INCARNATION)

        def refuse(call: str, data: bytes) -> None:
            if call in refused and begins <= len(run.disk.calls) < begins + count:
                raise TornError(len(data) // 2, OSError(errno.ENOSPC, "No space left on device"))

        run.disk.before = refuse
        run.disk.calls.clear()
        for each in [*taken, *more]:
            if each is not restart_process:
                run.take(each)
        if last:
            run.disk.before = no_failure
            run.now += 1_000
            run.journal.tick(run.now)
            assert run.journal.state == "disk" or snapshot(run.journal, run.model)
            assert run.journal.state == "disk"
            assert not run.journal.stats().reason or run.journal.stats().reason.startswith("no snapshot was written")
            store(run.journal, run.model, [5])
        stats = run.journal.stats()
        crash(run.journal)
        found = open_journal(run.folder).recover()
        assert is_resumable(found) == (stats.state == "disk") or "could not be marked" in stats.reason
        assert run.model.matches(found) or not is_resumable(found) or "could not be marked" in stats.reason


def write_history(path: Path) -> tuple[Model, dict[str, bytes]]:
    """Return a model with a snapshot, a continued log and one more log, and the content of these files."""
    journal, model = begin_journal(path)
    for _ in range(30):
        store(journal, model, [100])
        set_checkpoint(journal, model, b"mark")
        snapshot(journal, model)
    crash(journal)
    journal = open_journal(path)
    journal.resume(journal.recover())
    store(journal, model, [30, 40])
    crash(journal)
    (path / "lock").unlink()
    content = {each.name: each.read_bytes() for each in path.iterdir()}
    assert sorted(name.partition(".")[2] for name in content) == ["log", "log", "snapshot"]
    return model, content


def recover_changed(tmp_path: Path, content: dict[str, bytes]) -> RecoveredJournal:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    for name, data in content.items():
        (folder / name).write_bytes(data)
    journal = open_journal(folder)
    found = journal.recover()
    crash(journal)
    found.folder = Folder(folder)
    release_later(found.folder.close)
    return found


def test_a_truncated_file_makes_the_journal_incomplete(tmp_path: Path, path: Path) -> None:
    """This holds even at the end of a frame, because the committed size is known."""
    model, content = write_history(path)
    assert model.matches(recover_changed(tmp_path, content))
    for name, data in content.items():
        for size in {*range(0, len(data), 13), len(data) - 1}:
            assert recover_changed(tmp_path, {**content, name: data[:size]}).incomplete_reason


def test_bytes_that_were_not_acknowledged_are_ignored(tmp_path: Path, path: Path) -> None:
    """Their content does not matter: the next process writes another log."""
    model, content = write_history(path)
    newest = max(name for name in content if name.endswith("log"))
    for rest in (b"\0", b"garbage" * 100, content[newest][journal_format.FRAMES_OFFSET :]):
        found = recover_changed(tmp_path, {**content, newest: content[newest] + rest})
        assert not found.incomplete_reason
        assert model.matches(found)


def test_a_missing_file_makes_the_journal_incomplete(tmp_path: Path, path: Path) -> None:
    _, content = write_history(path)
    for name in content:
        assert recover_changed(tmp_path, {each: data for each, data in content.items() if each != name}).incomplete_reason


def test_a_renamed_file_makes_the_journal_incomplete(tmp_path: Path, path: Path) -> None:
    """Files are swapped or copied to another name."""
    _, content = write_history(path)
    one, two = sorted(name for name in content if name.endswith("log"))
    assert recover_changed(tmp_path, {**content, one: content[two], two: content[one]}).incomplete_reason
    assert recover_changed(tmp_path, {**content, "0000000000000099.log": content[two]}).incomplete_reason


def test_a_flipped_bit_never_gives_wrong_data(tmp_path: Path, path: Path) -> None:
    _, content = write_history(path)
    for name, data in content.items():
        for at in range(0, len(data), 7):
            damaged = bytearray(data)
            damaged[at] ^= 1 << at % 8
            assert recover_changed(tmp_path, {**content, name: bytes(damaged)}).incomplete_reason


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_many_changed_bytes_never_give_wrong_data(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, content = write_history(Path(folder, "journal"))
        for name in data.draw(st.lists(st.sampled_from(sorted(content)), min_size=1, max_size=2)):
            damaged = bytearray(content[name])
            at = data.draw(st.integers(0, len(damaged)))
            damaged[at : at + data.draw(st.integers(0, 300))] = data.draw(st.binary(max_size=300))
            content[name] = bytes(damaged)
        found = recover_changed(Path(folder), content)
        assert found.incomplete_reason or model.matches(found)


# --- restarts of the machine


@pytest.mark.parametrize(("closes", "continues"), [(True, False), (True, True), (False, False)])
def test_after_a_restart_of_the_machine_a_journal_that_was_not_closed_is_incomplete(
    path: Path, tmp_path: Path, closes: bool, continues: bool
) -> None:
    """Batches can be lost in a power failure; a journal that was closed and not continued is complete."""
    journal, model = begin_journal(path)
    store(journal, model, [5])
    if closes:
        journal.close()
    if continues:
        journal = open_journal(path)
        journal.resume(journal.recover())
    crash(journal)
    other_boot_id = tmp_path / "boot_id"
    other_boot_id.write_text("00112233-4455-6677-8899-aabbccddeeff\n")
    found = open_journal(path, disk=WatchedDisk(boot_id_file=other_boot_id)).recover()
    assert bool(found.incomplete_reason) == (not closes or continues)
    assert not found.incomplete_reason or "the machine was restarted" in found.incomplete_reason


def test_without_a_boot_id_a_journal_that_was_not_closed_is_incomplete(path: Path, tmp_path: Path) -> None:
    disk = WatchedDisk(boot_id_file=tmp_path / "none")
    journal, model = begin_journal(path, disk)
    store(journal, model, [5])
    crash(journal)
    assert open_journal(path, disk=disk).recover().incomplete_reason
    (tmp_path / "none").write_text("00112233-4455-6677-8899-aabbccddeeff\n")
    assert disk.boot_id() == bytes.fromhex("00112233445566778899aabbccddeeff")


# --- disk failures


def failing_calls(error: int, *calls: str) -> Callable[[str, bytes], None]:
    def refuse(call: str, _data: bytes) -> None:
        if call in calls:
            raise OSError(error, os.strerror(error))

    return refuse


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_failed_disk_is_retried_with_growing_delays(path: Path, error: int) -> None:
    """Nothing is recorded meanwhile. A snapshot makes the journal complete again when the disk works."""
    disk = WatchedDisk()
    journal, model = begin_journal(path, disk)
    store(journal, model, [5, 5])
    disk.before = failing_calls(error, "write", "create")
    store(journal, model, [5, 5])
    skip(journal, model)
    stats = journal.stats()
    assert (stats.state, stats.reason, stats.appended, stats.dropped) == ("memory", os.strerror(error), 2, 2)
    shutil.copytree(path, path.with_name("killed"))
    assert (
        open_journal(path.with_name("killed")).recover().incomplete_reason
        == "the disk failed to record the newest batches that were sent"
    )
    failures = []
    for second in range(100):
        journal.tick(float(second))
        failures.append(journal.stats().failures)
    assert [at for at in range(1, 100) if failures[at] > failures[at - 1]] == [1, 3, 7, 15, 31, 63]
    disk.before = failing_calls(error, "rename")
    journal.tick(150.0)
    assert not snapshot(journal, model)
    assert not list(path.glob("*.tmp"))
    disk.before = no_failure
    journal.tick(500.0)
    assert snapshot(journal, model)
    assert (journal.stats().state, journal.stats().reason) == ("disk", "")
    store(journal, model, [1])
    crash(journal)
    assert model.matches(open_journal(path).recover())


def test_the_reason_says_if_the_logs_could_not_be_marked(path: Path) -> None:
    disk = WatchedDisk()
    journal, model = begin_journal(path, disk)
    disk.before = failing_calls(errno.EROFS, "write", "create", "open", "overwrite", "remove", "rename")
    store(journal, model, [5])
    assert journal.stats().reason == (
        "Read-only file system; the logs could not be marked as broken: remove the folder before another relay starts with it"
    )
    crash(journal)


def test_a_log_that_cannot_be_marked_is_removed(path: Path) -> None:
    disk = WatchedDisk()
    journal, model = begin_journal(path, disk)
    store(journal, model, [5])
    disk.before = failing_calls(errno.ENOSPC, "write", "overwrite")
    store(journal, model, [5])
    assert not list(path.glob("*.log"))
    assert journal.stats().reason == "No space left on device"
    crash(journal)


def test_the_log_continues_if_a_snapshot_cannot_be_written(path: Path) -> None:
    """The journal tries another snapshot after a delay."""
    disk = WatchedDisk()
    journal, model = begin_journal(path, disk)
    while not wants_snapshot(journal):
        store(journal, model, [100])
    refused = failing_calls(errno.ENOSPC, "sync")
    disk.before = refused
    assert snapshot(journal, model)
    assert (journal.stats().state, journal.stats().snapshots) == ("disk", 0)
    assert journal.stats().reason == "no snapshot was written: No space left on device"
    assert not wants_snapshot(journal)
    store(journal, model, [5])
    disk.before = no_failure
    journal.tick(1.5)
    assert snapshot(journal, model)
    store(journal, model, [5])
    assert (journal.stats().reason, journal.stats().snapshots) == ("", 1)
    crash(journal)
    assert model.matches(open_journal(path).recover())


def test_a_snapshot_that_cannot_be_written_leaves_no_file(path: Path) -> None:
    """A full disk needs the room."""
    disk = WatchedDisk()
    journal, model = begin_journal(path, disk)
    while not wants_snapshot(journal):
        store(journal, model, [100])
    renames = count()

    def refuse(call: str, _data: bytes) -> None:
        if call == "rename" and next(renames) == 1:  # the first one is that of the log
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.before = refuse
    assert snapshot(journal, model)
    assert journal.stats().reason == "no snapshot was written: No space left on device"
    assert {file.suffix for file in path.iterdir() if file.name != "lock"} == {".log"}
    crash(journal)
    assert model.matches(open_journal(path).recover())


def test_a_journal_without_snapshots_stops_at_its_limit(path: Path) -> None:
    journal = open_journal(path, JournalLimits(max_log_bytes=3_000))
    journal.begin(INCARNATION)
    model = Model()
    while journal.state == "disk":
        store(journal, model, [100])
    assert "more than max_log_bytes" in journal.stats().reason
    crash(journal)


@pytest.mark.parametrize("how", ["deleted", "moved", "emptied"])
def test_a_deleted_or_moved_folder_is_noticed(path: Path, how: str) -> None:
    """The journal notices it within a second, although writes still succeed. A snapshot then starts a new journal in a folder
    of the same name."""
    journal, model = begin_journal(path)
    if how == "deleted":
        shutil.rmtree(path)
    elif how == "moved":
        path.rename(path.with_name("moved"))
    else:
        for each in path.glob("*.log"):
            each.unlink()
    store(journal, model, [1])
    assert journal.state == "disk"
    journal.tick(10.0)
    assert (journal.stats().state, journal.stats().reason) == ("memory", "its files were deleted or moved")
    path.mkdir(exist_ok=True)
    journal.tick(20.0)
    assert snapshot(journal, model)
    store(journal, model, [2])
    assert journal.stats().state == "disk"
    crash(journal)
    assert model.matches(open_journal(path).recover())
    if how == "moved":
        assert open_journal(path.with_name("moved")).recover().incomplete_reason


def test_a_journal_can_start_while_the_disk_fails(path: Path) -> None:
    """The state of a journal that begins or resumes is `memory` until the disk works."""
    disk = WatchedDisk(failing_calls(errno.ENOSPC, "create"))
    journal, model = begin_journal(path, disk)
    store(journal, model, [1])
    assert (journal.stats().state, journal.stats().dropped) == ("memory", 1)
    disk.before = no_failure
    journal.tick(100.0)
    assert snapshot(journal, model)
    journal.close()
    disk.before = failing_calls(errno.ENOSPC, "create")
    journal = open_journal(path, disk=disk)
    found = journal.recover()
    assert model.matches(found)
    journal.resume(found)
    assert journal.stats().state == "memory"
    crash(journal)
    assert open_journal(path).recover().incomplete_reason, "higher numbers may have been sent"


def test_a_folder_that_cannot_be_opened_is_retried(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its content is unknown, so the relay begins a new incarnation with the journal in memory."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refused)
        journal = open_journal(path)
        found = journal.recover()
        assert found.incomplete_reason.endswith("cannot be used now: Read-only file system")
        journal.begin(9)
        assert (journal.stats().state, journal.stats().reason) == ("memory", "Read-only file system")
        journal.tick(100.0)
        assert journal.stats().state == "memory"
    journal.tick(1_000.0)
    assert journal.snapshot(-1, [], [], OWN)
    assert journal.stats().state == "disk"
    crash(journal)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    mount_point = tmp_path / "tiny"
    mount_point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(mount_point)],  # noqa: S607 - the path of mount varies
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    yield mount_point
    subprocess.run(["umount", "-l", str(mount_point)], check=True)  # noqa: S607 - as above


def test_a_journal_recovers_from_a_full_file_system(tiny_disk: Path) -> None:
    """The journal is incomplete while the disk is full; with free space it becomes complete again."""
    path = tiny_disk / "journal"
    journal = Journal(path, JournalLimits(probe_bytes=20_000))
    journal.begin(INCARNATION)
    model = Model()
    while journal.state == "disk":
        store(journal, model, [1000, 500])
    assert journal.stats().reason == "No space left on device"
    assert journal.stats().appended == model.next_number - 2 > 150
    shutil.copytree(path, tiny_disk.with_name("killed"))
    assert (
        open_journal(tiny_disk.with_name("killed")).recover().incomplete_reason
        == "the disk failed to record the newest batches that were sent"
    )
    journal.tick(1.0)
    assert not wants_snapshot(journal)
    subprocess.run(["mount", "-o", "remount,size=4m", str(tiny_disk)], check=True)  # noqa: S607 - as above
    journal.tick(100.0)
    assert snapshot(journal, model)
    store(journal, model, [10])
    assert journal.close()
    assert journal.stats().snapshots == 1
    assert model.matches(open_journal(path).recover())


def test_a_journal_stays_in_memory_when_its_file_system_becomes_read_only(tiny_disk: Path) -> None:
    journal = Journal(tiny_disk / "journal")
    journal.begin(INCARNATION)
    model = Model()
    if subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=False, capture_output=True).returncode:  # noqa: S607
        # A file that is open for writing prevents the remount, so only the next process sees it.
        journal.close()
        subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)  # noqa: S607 - as above
        journal = Journal(tiny_disk / "journal")
        assert journal.recover().incomplete_reason
        journal.begin(INCARNATION + 1)
    store(journal, model, [5])
    assert journal.stats().state == "memory"
    assert journal.stats().reason.startswith("Read-only file system")
    journal.close()


# --- errors that an operator must correct


def test_a_second_process_is_rejected(path: Path) -> None:
    """The message names the first process. After the first journal is closed, the folder can be opened."""
    journal, _ = begin_journal(path)
    with pytest.raises(JournalError, match=f"another process uses it \\(pid {os.getpid()}\\); choose another folder"):
        open_journal(path)
    assert journal.close()
    assert journal.close()
    open_journal(path).close()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    """A file has that name, or the parent does not allow folders. The second error is an `ExternalError`."""
    (tmp_path / "file").write_text("")
    with pytest.raises(
        JournalError, match=r"cannot open the journal folder .*file: .*; choose a folder that this process can write"
    ):
        open_journal(tmp_path / "file")
    with pytest.raises(ExternalError):
        open_journal(Path("/proc/journal"))


def test_files_of_a_later_release_are_not_touched(path: Path) -> None:
    """Their checksum distinguishes them from damaged files, for any length of their header."""
    journal, model = begin_journal(path)
    store(journal, model, [1])
    crash(journal)
    (file,) = path.glob("*.log")
    header = journal_format.MAGIC + struct.pack("<HH", 3, 200) + bytes(184)
    file.write_bytes(header + struct.pack("<I", zlib.crc32(header)))
    journal = open_journal(path)
    with pytest.raises(JournalError, match="has version 3, and this release reads version 2: use the release that wrote it"):
        journal.recover()
    crash(journal)
    file.write_bytes(header + b"none")
    assert open_journal(path).recover().incomplete_reason


def test_files_that_are_deleted_before_they_are_read_again_raise(path: Path) -> None:
    journal, model = begin_journal(path)
    store(journal, model, [1])
    crash(journal)
    found = open_journal(path).recover()
    (file,) = path.glob("*.log")
    file.unlink()
    with pytest.raises(JournalError, match=r"cannot read .*log again: .*; choose another folder for the journal"):
        list(found.batches())


def test_other_files_in_the_folder_are_ignored(path: Path) -> None:
    journal, model = begin_journal(path)
    store(journal, model, [1])
    crash(journal)
    (path / "notes.txt").write_text("mine")
    (path / "0000000000000009.snapshot.tmp").write_text("half")
    journal = open_journal(path)
    found = journal.recover()
    assert model.matches(found)
    journal.resume(found)
    assert (path / "notes.txt").exists()
    assert not list(path.glob("*.tmp"))
    crash(journal)


def test_an_unfinished_log_of_a_killed_process_is_ignored(path: Path) -> None:
    """It does not have its final name yet, and the next log replaces it, so no log is missing."""
    journal, model = begin_journal(path)
    store(journal, model, [1])
    crash(journal)
    (path / "0000000000000002.log.tmp").write_text("half")
    for _ in range(2):
        journal = open_journal(path)
        found = journal.recover()
        assert not found.incomplete_reason
        assert model.matches(found)
        journal.resume(found)
        store(journal, model, [1])
        crash(journal)
    assert sorted(each.name for each in path.glob("*.log*")) == [f"{number:016}.log" for number in (1, 2, 3)]


def test_only_the_owner_can_read_payloads(path: Path) -> None:
    journal, model = begin_journal(path)
    while not snapshot(journal, model):
        store(journal, model, [100])
    assert path.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in path.iterdir()} == {0o600}
    crash(journal)


def test_an_empty_folder_is_neither_resumable_nor_incomplete(path: Path) -> None:
    found = open_journal(path).recover()
    assert (found.incarnation, found.incomplete_reason, is_resumable(found)) == (None, "", False)


def test_a_new_incarnation_removes_earlier_files(path: Path) -> None:
    write_history(path)
    journal = open_journal(path)
    journal.begin(INCARNATION + 1)
    crash(journal)
    assert len(list(path.glob("*.*"))) == 1
    found = open_journal(path).recover()
    assert (found.incarnation, found.next_number, found.checkpoint, found.incomplete_reason) == (INCARNATION + 1, 0, None, "")
