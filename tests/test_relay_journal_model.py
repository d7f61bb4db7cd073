"""Whatever is told and wherever the process dies or a byte changes: what is recovered was told, in order, and nothing is
missing that was acknowledged, or the journal says so."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.relay.journal import Journal, JournalSettings, Recovered
from relay_journal_cases import TINY, Killed, Model, TornError, WatchedDisk, crash, open_journal, willing

Step: TypeAlias = Callable[[Journal, Model], None]
LIFE = 7


def _burst(journal: Journal, model: Model, sizes: list[int], upstream: int) -> None:
    journal.append(model.burst(sizes, upstream))


def _hole(journal: Journal, model: Model, count: int) -> None:
    hole = model.hole(count)
    journal.hole(*hole)


def _reset(journal: Journal, model: Model, upstream: int) -> None:
    reset = model.reset(upstream)
    journal.reset(reset.upstream, reset.incarnation)


def _mark(journal: Journal, model: Model, text: bytes) -> None:
    model.mark = {"checkpoint": text, "settings": [1, "two"]}
    journal.mark(model.mark)


def _snapshot(journal: Journal, model: Model, back: int, partial: bool) -> None:
    number = max(journal._snapshot_number, model.next_number - 1 - back)
    parts = model.snapshot(number, partial)
    journal.snapshot(number, parts, partial=partial)


def _again(journal: Journal, model: Model) -> None:
    """Nothing is told: what changes is the process."""


def step(function: Callable[..., None], *arguments: st.SearchStrategy[object]) -> st.SearchStrategy[Step]:
    return st.tuples(*arguments).map(lambda found: lambda journal, model: function(journal, model, *found))


upstreams = st.integers(0, 2)
steps = st.lists(
    st.one_of(
        step(_burst, st.lists(st.sampled_from([0, 1, 30, 200, 700]), min_size=1, max_size=4), upstreams),
        step(_hole, st.integers(1, 5)),
        step(_reset, upstreams),
        step(_mark, st.binary(max_size=20)),
        step(_snapshot, st.integers(0, 6), st.booleans()),
        st.just(_again),
    ),
    max_size=25,
)


class Run:
    """A journal beside its model, from which a process may be taken away."""

    def __init__(self, folder: Path, settings: JournalSettings = TINY) -> None:
        self.folder = folder
        self.settings = settings
        self.model = Model()
        self.disk = WatchedDisk()
        self.journal = self._opened()

    def _opened(self) -> Journal:
        return open_journal(self.folder, self.settings, self.disk)

    def begin(self) -> None:
        self.journal.begin(LIFE)

    def take(self, each: Step) -> None:
        """One step; `_again` closes the journal, and goes on in another process."""
        if each is _again:
            self.journal.close()
            self.restart()
        else:
            each(self.journal, self.model)

    def restart(self) -> Recovered:
        self.journal = self._opened()
        found = self.journal.recover()
        assert self.model.is_in(found)
        assert found.incarnation == LIFE
        assert not found.unclean, found.because
        self.journal.resume()
        return found


@pytest.fixture
def folders(tmp_path: Path) -> Callable[[], Path]:
    return lambda: Path(tempfile.mkdtemp(dir=tmp_path))


@given(taken=steps, more=steps, kill_at=st.integers(0, 150), part=st.floats(0, 1), after=st.booleans())
@settings(max_examples=120, deadline=None)
def test_a_kill_anywhere_loses_nothing_that_was_acknowledged(
    taken: list[Step], more: list[Step], kill_at: int, part: float, after: bool
) -> None:
    """Killed at any call to the system, in the middle of a write too: it goes on with all that was told, or with that and the
    one thing that was being told."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder, "journal"))
        run.begin()

        def kill(call: str, data: bytes) -> None:
            if len(run.disk.calls) > kill_at:
                raise TornError(int(part * len(data)), Killed())

        run.disk.before = kill
        run.disk.calls.clear()
        before = run.model.copy()
        try:
            for each in taken:
                before = run.model.copy()
                run.take(each)
            before = run.model
        except Killed:
            pass
        run.disk.before = willing
        crash(run.journal)
        run.journal = open_journal(run.folder, disk=run.disk)
        found = run.journal.recover()
        assert not found.unclean, found.because
        before.snapshots = run.model.snapshots
        run.model = before if before.is_in(found) else run.model
        assert run.model.is_in(found)
        run.journal.resume()
        for each in more:
            run.take(each)
        run.journal.close()
        last = run.restart()
        assert last.clean
        assert not last.torn_bytes
        run.journal.close()


def written_over(run: Run) -> None:
    """A history in which segments are written over, in two lives: with the same frames at the same places as before, with
    others, half full, and closed."""
    for number in range(60):
        if number == 40:
            run.take(_again)
        run.take(lambda journal, model: _burst(journal, model, [100], 0))
        if number % 7 == 6:
            run.take(lambda journal, model: _snapshot(journal, model, 3, False))
        if number % 10 == 5:
            run.take(lambda journal, model: _mark(journal, model, b"a mark"))
        if number % 20 == 19:
            run.take(lambda journal, model: _burst(journal, model, [350, 200, 100], 1))
    run.journal.close()


@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_a_kill_at_each_call_while_segments_are_written_over(folders: Callable[[], Path], part: float) -> None:
    """Before it, in its middle and behind it: nothing that was acknowledged is lost, and nothing is found that was not told."""
    whole = Run(folders())
    whole.begin()
    whole.disk.calls.clear()
    written_over(whole)
    calls = whole.disk.calls
    assert min(calls.count(call) for call in ("open", "note", "shorten", "rename", "remove")) > 1
    assert calls.count("open") > 8, "segments are written over"
    for kill_at in range(0, len(calls), 1 if part == 0.4 else 3):
        run = Run(folders())
        run.begin()
        run.disk.calls.clear()

        def kill(call: str, data: bytes, disk: WatchedDisk = run.disk, at: int = kill_at) -> None:
            if len(disk.calls) > at:
                raise TornError(int(part * len(data)), Killed())

        run.disk.before = kill
        with pytest.raises(Killed):
            written_over(run)
        run.disk.before = willing
        crash(run.journal)
        told, number = run.model, run.model.next_number
        journal = open_journal(run.folder)
        found = journal.recover()
        assert not found.unclean, (kill_at, found.because)
        last = len(told.records) - 1 if found.next_number == number else found.next_number - 1
        assert found.next_number in {number, number - 1, number - 3}
        assert told.has(found.snapshot)
        above = -1 if found.snapshot is None else found.snapshot.number
        assert list(found.records()) == told.records[above + 1 : last + 1]
        journal.resume()
        assert not list(run.folder.glob("*.tmp"))
        crash(journal)


def small(folder: Path) -> list[Model]:
    """A journal of three segments with a snapshot in between, and the model after each step."""
    run = Run(folder, replace(TINY, segment_bytes=250))
    run.begin()
    models = [run.model.copy()]
    plan: list[Step] = [
        lambda journal, model: _mark(journal, model, b"one"),
        lambda journal, model: _burst(journal, model, [10, 20, 30], 0),
        lambda journal, model: _hole(journal, model, 2),
        lambda journal, model: _burst(journal, model, [40], 1),
        lambda journal, model: _snapshot(journal, model, 2, True),
        lambda journal, model: _burst(journal, model, [90, 60], 0),
        lambda journal, model: _reset(journal, model, 0),
        lambda journal, model: _burst(journal, model, [30], 0),
        lambda journal, model: _mark(journal, model, b"two"),
        lambda journal, model: _burst(journal, model, [5, 6], 1),
    ]
    for each in plan:
        run.take(each)
        models.append(run.model.copy())
    crash(run.journal)
    for model in models:
        model.snapshots = run.model.snapshots
    return models


def recovered(folder: Path, models: list[Model]) -> tuple[Recovered, int]:
    """What is found, and after which step it was so; -1 for nothing."""
    journal = open_journal(folder)
    try:
        found = journal.recover()
        step = next((at for at in reversed(range(len(models))) if models[at].is_in(found)), -1)
        # Without a segment that holds there is the snapshot at most, and nobody knows the mark.
        bare = found.unclean and not list(found.records())
        begun = found.next_number == (0 if found.snapshot is None else found.snapshot.number + 1)
        assert step >= 0 or ((bare or found.incarnation is None) and begun and models[-1].has(found.snapshot)), found
        return found, step
    finally:
        crash(journal)


def put(path: Path, data: bytes) -> None:
    """In a new file: some file systems wait for the disk when an old one is cut and written again."""
    path.unlink()
    path.write_bytes(data)


def files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.suffix in {".segment", ".snapshot"})


def test_a_last_segment_that_lost_its_end_makes_the_journal_unclean(folders: Callable[[], Path]) -> None:
    """Every length of the last file, and none: what was acknowledged is missing, also where it ends between two frames."""
    origin = folders()
    models = small(origin)
    last = [each for each in files(origin) if each.suffix == ".segment"][-1]
    data = last.read_bytes()
    for size in range(len(data)):
        put(last, data[:size])
        found, _ = recovered(origin, models)
        assert found.unclean, size
        assert not found.clean
    last.unlink()
    found, _ = recovered(origin, models)
    assert found.because == f"{last.name}, of which something was acknowledged, is missing"


def test_a_last_segment_cut_off_anywhere_is_what_was_told_until_there(folders: Callable[[], Path]) -> None:
    """Every length of a last file of which nothing is known to be acknowledged: one that ends inside of a frame is as if that
    frame had not been begun."""
    origin = folders()
    models = small(origin)
    (origin / "end").unlink()
    last = [each for each in files(origin) if each.suffix == ".segment"][-1]
    data, seen = last.read_bytes(), set()
    for size in range(len(data) + 1):
        put(last, data[:size])
        found, step = recovered(origin, models)
        assert not found.unclean, found.because
        assert found.torn_bytes <= size
        seen.add(step)
    assert seen == set(range(min(seen), len(models)))
    assert len(seen) > 1


def test_what_was_cut_off_is_gone_on_over(folders: Callable[[], Path]) -> None:
    """A torn end is cut off when the journal is resumed: a kill after that finds no damage."""
    origin = folders()
    models = small(origin)
    (origin / "end").unlink()
    last = files(origin)[-1]
    put(last, last.read_bytes()[:-3])
    journal = open_journal(origin)
    assert journal.recover().torn_bytes > 3
    journal.resume()
    model = models[-2].copy()
    _burst(journal, model, [7], 2)
    crash(journal)
    found, step = recovered(origin, [model])
    assert (step, found.unclean, found.torn_bytes) == (0, False, 0)


def test_a_segment_before_the_last_that_lost_its_end_makes_the_journal_unclean(folders: Callable[[], Path]) -> None:
    """Also where it ends between two frames: the next segment says how it ended."""
    origin = folders()
    models = small(origin)
    before = [each for each in files(origin) if each.suffix == ".segment"][-2]
    data = before.read_bytes()
    for size in range(len(data)):
        put(before, data[:size])
        found, _ = recovered(origin, models)
        assert found.unclean, size
        assert found.dropped_bytes


def test_a_flipped_bit_anywhere_never_gives_wrong_data(folders: Callable[[], Path]) -> None:
    """One bit of every byte of every file: damage of a segment or a snapshot is reported, and what is recovered is a state that
    there was; without a readable end, which only says how far the segments reached, everything is recovered."""
    origin = folders()
    models = small(origin)
    for path in (*files(origin), origin / "end"):
        data = path.read_bytes()
        for at in range(len(data)):
            put(path, data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            found, step = recovered(origin, models)
            if path.name == "end":
                assert (found.unclean, step) == (False, len(models) - 1), at
            else:
                assert found.unclean, (path, at)
        put(path, data)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_many_changed_bytes_never_give_wrong_data(data: st.DataObject) -> None:
    """Bytes changed, cut out and put in, files removed: the same."""
    with tempfile.TemporaryDirectory() as folder:
        origin = Path(folder, "journal")
        models = small(origin)
        changed = data.draw(st.lists(st.sampled_from([*files(origin), origin / "end"]), min_size=1, max_size=2, unique=True))
        unknown = {files(origin)[-1], origin / "end"} == set(changed)
        for path in changed:
            content = bytearray(path.read_bytes())
            if data.draw(st.booleans()):
                path.unlink()
                continue
            for _ in range(data.draw(st.integers(1, 4))):
                begin = data.draw(st.integers(0, len(content)))
                end = data.draw(st.integers(begin, min(len(content), begin + 40)))
                content[begin:end] = data.draw(st.binary(max_size=40))
            put(path, bytes(content))
        found, step = recovered(origin, models)
        # What is behind an end that nobody knows looks torn: nobody can tell that from a kill.
        assert found.unclean or step == len(models) - 1 or unknown or found.incarnation is None
