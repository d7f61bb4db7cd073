"""Snapshots of some workers, and snapshots merged into an index: as if it had received their streams, or without effect."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index_cases import (
    Admit,
    Adversary,
    Choices,
    Feed,
    Label,
    Remove,
    Step,
    answer,
    blocks_of,
    namespace,
    removal,
    store,
    tokens_of,
)
from index_model import Oracle
from kvevents.errors import SnapshotError, UsageError
from kvevents.index import IndexLimits, Namespace, PrefixIndex
from snapshot_cases import framed, furnished, restored, saved, state, take, unframed

Worker = tuple[str, int]

WORKERS: tuple[Worker, ...] = (("a", 0), ("a", 1), ("b", 0))
"""Those of `Adversary`."""
MAX_PLACEMENTS = 4096
"""Of the index; in native/index/src/shared.rs."""


def part(index: PrefixIndex, *workers: Worker) -> bytes:
    file = io.BytesIO()
    index.snapshot(file, workers)
    return file.getvalue()


def merged(content: bytes, index: PrefixIndex | None = None) -> PrefixIndex:
    index = index or PrefixIndex()
    index.merge(io.BytesIO(content))
    return index


def worker_of(step: Step) -> Worker:
    return step.worker if isinstance(step, Remove | Admit) else (cast("Any", step).source, cast("Any", step).rank)


def concerns(step: Step, workers: Iterable[Worker]) -> bool:
    if isinstance(step, Label):
        return step.source in {source for source, _ in workers}
    return worker_of(step) in workers


def learn(model: Oracle, step: Step) -> None:
    if isinstance(step, Remove):
        model.remove_worker(step.worker)
    elif isinstance(step, Admit):
        model.fences.pop(step.worker, None)
    elif isinstance(step, Label):
        model.labels[step.source] = step.model
    else:
        model.apply(step)


def visible(index: PrefixIndex) -> tuple[Any, ...]:
    """What a failure leaves as it was."""
    stats = index.stats()
    return state(index), stats.unique_blocks, stats.blocks, stats.orphans, stats.copies, stats.workers, stats.evicted


# --- as if it had received the streams itself ---------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    st.binary(min_size=200, max_size=1500),
    st.integers(0, 60),
    st.lists(st.integers(0, 2), min_size=3, max_size=3),
    st.permutations(range(3)),
)
def test_after_any_history_an_index_merged_from_parts_behaves_like_the_original(
    data: bytes, moment: int, groups: list[int], order: list[int]
) -> None:
    """Each worker is in one of three groups: the first is in the index already, the others come as files, in any order.

    The index from which they come, and the model, have received everything.
    """
    parts = [[worker for worker, group in zip(WORKERS, groups, strict=True) if group == one] for one in range(3)]
    choices = Choices(data)
    adversary = Adversary(choices)
    index, twin = PrefixIndex(limits=IndexLimits(max_orphans=6)), PrefixIndex(limits=IndexLimits(max_orphans=6))
    model, at = Oracle(6), -1
    for at, step in enumerate(adversary.steps()):
        if at == moment:
            for one in order:
                if one:
                    merged(part(index, *parts[one]), twin)
            assert state(twin) == state(index)
        take(index, step)
        learn(model, step)
        if at >= moment or concerns(step, parts[0]):
            take(twin, step)
        if at >= moment:
            assert state(twin) == state(index)
            tokens, scope = adversary.prompt()
            assert answer(twin.match(tokens, namespace(scope))) == model.match(tokens, scope)
    if at >= moment:
        assert all(blocks_of(twin, worker) == model.blocks(worker) for worker in WORKERS)


@settings(max_examples=100)
@given(st.binary(min_size=200, max_size=1500), st.integers(0, 60), st.sampled_from(WORKERS))
def test_a_worker_that_is_removed_and_merged_again_has_missed_nothing(data: bytes, moment: int, worker: Worker) -> None:
    """Its fence is lifted, and blocks that it shares with others are shared again."""
    choices = Choices(data)
    adversary = Adversary(choices)
    index, twin = PrefixIndex(), PrefixIndex()
    for at, step in enumerate(adversary.steps()):
        if at == moment and worker in {(info.source, info.rank) for info in index.workers()}:
            blocks, content = index.stats().unique_blocks, part(index, worker)
            index.remove_worker(worker)
            merged(content, index)
            assert index.stats().unique_blocks <= blocks, "less where others can use a record that was its own"
        take(index, step)
        take(twin, step)
        assert state(twin) == state(index)
        tokens, scope = adversary.prompt()
        assert answer(twin.match(tokens, namespace(scope))) == answer(index.match(tokens, namespace(scope)))


def test_streams_share_their_blocks_with_those_that_are_there() -> None:
    index = PrefixIndex()
    for worker in range(8):
        tokens = [token for at in range(2000) for token in (at, worker // 4)]
        Feed(index, f"w{worker}")(store([worker * 10_000 + at for at in range(2000)], tokens, 2))
    twin = PrefixIndex()
    for one in range(4):
        merged(part(index, (f"w{one}", 0), (f"w{7 - one}", 0)), twin)
    assert state(twin) == state(index)
    assert twin.stats().unique_blocks == index.stats().unique_blocks == 4000


def test_blocks_whose_parents_their_worker_has_removed_are_those_of_a_chain_that_is_there() -> None:
    """A worker that stored them after their parents finds them there; a worker from a file without them does too."""
    tokens, hashes = list(range(400)), range(1, 201)
    index, twin = PrefixIndex(), PrefixIndex()
    late = Feed(index, "late")
    late(store(hashes, tokens, 2), removal(*hashes[:50], *hashes[100:120]))
    Feed(twin, "early")(store(hashes, tokens, 2))
    merged(part(index, ("late", 0)), twin)
    assert twin.stats().unique_blocks == 200
    assert twin.digest("late") == index.digest("late")
    late.index = twin
    late(store(hashes[:50], tokens[:100], 2))
    assert {hit.source: hit.tokens for hit in twin.match(tokens)} == {"early": 400, "late": 200}
    late(store(hashes[100:120], tokens[200:240], 2, 100))
    assert {hit.source: hit.tokens for hit in twin.match(tokens)} == {"early": 400, "late": 400}
    assert twin.stats().unique_blocks == 200


def test_placements_have_other_numbers_in_another_index() -> None:
    index, twin = PrefixIndex(), PrefixIndex()
    for at, tier in enumerate(("GPU", "CPU", "DISK", "tape")):
        Feed(index, f"w{at}")(store([at + 1, 9], [1, 1, at, at], 2, medium=tier))
        Feed(twin, f"x{3 - at}")(store([at + 1, 9], [1, 1, at, at], 2, medium=("tape", "DISK", "other", "GPU")[at]))
    before = state(twin)
    merged(part(index, *[(f"w{at}", 0) for at in range(4)]), twin)
    assert state(twin) == sorted(before + state(index))
    assert [info.tiers for info in twin.workers()[:4]] == [{"gpu": 2}, {"cpu": 2}, {"disk": 2}, {"TAPE": 2}]


# --- what is in a part --------------------------------------------------------------------------------------------------------


@pytest.fixture
def index() -> PrefixIndex:
    """Three workers with a model each, and two that were removed."""
    index = PrefixIndex()
    for at, worker in enumerate((("a", 0), ("a", 1), ("b", 0), ("gone", 0), ("gone", 1))):
        index.set_model(worker[0], worker[0].upper())
        Feed(index, *worker)(store([1, 2], [1, 1, at, at], 2))
    index.remove_worker(("gone", 0))
    index.remove_worker(("gone", 1))
    return index


def test_a_part_has_the_workers_that_were_asked_for_and_comes_in_their_order(index: PrefixIndex) -> None:
    twin = PrefixIndex()
    assert twin.merge(io.BytesIO(part(index, ("b", 0), ("absent", 0), ("a", 7), ("a", 1), ("b", 0)))) == [("a", 1), ("b", 0)]
    assert state(twin) == [one for one in state(index) if one[0][:2] != ("a", 0)]


def test_a_part_of_no_worker_is_empty_and_no_part_is_everything(index: PrefixIndex) -> None:
    twin = PrefixIndex()
    assert twin.merge(io.BytesIO(part(index))) == []
    assert twin.workers() == []
    assert twin.merge(io.BytesIO(saved(index))) == [("a", 0), ("a", 1), ("b", 0)]
    assert state(twin) == state(index)


def test_a_part_is_restored_too_and_replaces_everything(index: PrefixIndex) -> None:
    content = part(index, ("a", 1))
    restored(content, index)
    assert [(info.source, info.rank, info.model) for info in index.workers()] == [("a", 1, "A")]


def test_workers_are_any_iterable_of_pairs(index: PrefixIndex, tmp_path: Path) -> None:
    index.snapshot(tmp_path / "file", (worker for worker in [("a", 1)]))
    assert PrefixIndex().merge(tmp_path / "file") == [("a", 1)]
    with pytest.raises(TypeError):
        index.snapshot(tmp_path / "other", cast("Any", "ab"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_fences_come_with_their_workers_and_only_these(index: PrefixIndex) -> None:
    content = part(index, ("gone", 0), ("a", 0))
    twin = merged(content)
    assert Feed(twin, "gone", 0)(store([3], [1, 1], 2)).status == "void"
    assert Feed(twin, "gone", 1)(store([3], [1, 1], 2)).status == "applied"


def test_a_fence_against_a_restored_worker_is_removed(index: PrefixIndex) -> None:
    content = part(index, ("a", 0))
    index.remove_worker("a", 0)
    feed = Feed(index)
    assert feed(store([3], [1, 1], 2)).status == "void"
    merged(content, index)
    assert feed(store([3], [1, 1], 2)).status == "applied"


def test_the_newer_of_two_fences_stands() -> None:
    old, new = PrefixIndex(), PrefixIndex()
    for index, incarnation in ((old, 1), (new, 2)):
        Feed(index, incarnation=incarnation)(store([1], [1, 1], 2))
        index.remove_worker("a", 0)
    contents = part(old, ("a", 0)), part(new, ("a", 0))
    for index, content in ((new, contents[0]), (old, contents[1])):
        merged(content, index)
        assert Feed(index, incarnation=2)(store([1], [1, 1], 2)).status == "void"
        assert Feed(index, incarnation=3)(store([1], [1, 1], 2)).status == "applied"


def test_a_fence_does_not_concern_a_worker_that_is_there(index: PrefixIndex) -> None:
    """Its life is the index's own; the file only knows that it had ended where that was written."""
    twin = PrefixIndex()
    feed = Feed(twin, "gone")
    feed(store([1], [1, 1], 2))
    merged(part(index, ("gone", 0), ("b", 0)), twin)
    assert feed(store([2], [2, 2], 2)).status == "applied"


def test_a_missing_label_is_taken_from_the_file_and_holds_for_all_ranks(index: PrefixIndex) -> None:
    twin = PrefixIndex()
    Feed(twin, "a", 3)(store([1, 2], [1, 1, 0, 0], 2))
    twin.set_model("b", "other")
    merged(part(index, ("a", 0), ("b", 0)), twin)
    assert {(info.source, info.rank): info.model for info in twin.workers()} == {
        ("a", 0): "A",
        ("a", 3): "A",
        ("b", 0): "other",
    }
    found = {model: set(answer(twin.match([1, 1], Namespace(model=model)))) for model in ("A", "B", "other", None)}
    assert found == {"A": {("a", 0), ("a", 3)}, "B": set(), "other": {("b", 0)}, None: set()}
    Feed(twin, "a", 4)(store([1], [1, 1], 2))
    assert twin.workers()[2].model == "A"


# --- all of it or nothing -----------------------------------------------------------------------------------------------------


def test_a_worker_that_exists_raises_and_nothing_is_merged(index: PrefixIndex) -> None:
    content, before = saved(index), visible(index)
    index.remove_worker("a", 0)
    middle = visible(index)
    with pytest.raises(SnapshotError, match=r'the worker "a" with rank 1 already; call remove_worker for it first'):
        index.merge(io.BytesIO(content))
    assert visible(index) == middle
    assert Feed(index)(store([3], [1, 1], 2)).status == "void", "its fence stands"
    for worker in (("a", 1), ("b", 0)):
        index.remove_worker(worker)
    merged(content, index)
    assert visible(index) == before


class InterruptedFile:
    """A file that does something before each of its pieces but the first."""

    def __init__(self, content: bytes, then: Callable[[], object], size: int = 1 << 20) -> None:
        self._file, self._then, self._size = io.BytesIO(content), then, size

    def read(self, size: int = -1) -> bytes:
        if self._file.tell():
            self._then()
        return self._file.read(min(size, self._size))


def test_a_worker_that_comes_by_itself_meanwhile_stays_and_the_file_does_not() -> None:
    index, twin = PrefixIndex(), PrefixIndex()
    for at in range(3):
        Feed(index, f"w{at}")(store(range(2000), [at, *range(3999)], 2))
    feed = Feed(twin, "w1")
    with pytest.raises(SnapshotError, match="w1"):
        twin.merge(cast("BinaryIO", InterruptedFile(saved(index), lambda: feed(store([1], [1, 1], 2)), 30_000)))
    assert [(info.source, info.blocks) for info in twin.workers()] == [("w1", 1)]
    assert twin.stats().unique_blocks == 1
    assert tokens_of(twin, [0, *range(3999)], worker=("w0", 0)) == 0


def test_nothing_in_a_file_with_right_checksums_leaves_anything_when_it_is_refused() -> None:
    """Every byte of the items is changed in turn, and left out, and made the last; the index has blocks of its own."""
    whole = furnished()
    content, head = unframed(whole), whole[:12]
    index = PrefixIndex()
    for step in Adversary(Choices(random.Random(1).randbytes(800))).steps():
        if not isinstance(step, Label) and worker_of(step) == ("a", 0):
            take(index, step)
    index.remove_worker("a", 0)
    index.readmit("a", 0)
    Feed(index, "mine")(store(range(50), [1, 1, 2, 2, *range(96)], 2))
    before, refused = visible(index), 0
    for at in range(len(content)):
        start, end = content[:at], content[at + 1 :]
        others = {content[at] ^ 1, content[at] ^ 0x80, 0, 255} - {content[at]}
        for changed in [start, start + end, *(start + bytes([other]) + end for other in others)]:
            try:
                came = index.merge(io.BytesIO(framed(changed, head)))
            except SnapshotError:
                refused += 1
            else:
                for worker in came:
                    index.set_model(worker[0], None)
                    index.remove_worker(worker)
            assert visible(index) == before
    assert refused > 2 * len(content)


def test_a_file_that_ends_early_or_is_damaged_leaves_no_blocks_and_no_bytes() -> None:
    index, twin = PrefixIndex(), PrefixIndex()
    for at in range(4):
        Feed(index, f"w{at}")(store(range(at, 60_000, 3), [at // 2, *range(39_999)], 2))
    Feed(twin, "mine")(store(range(5000), [0, *range(9999)], 2))
    content, before = saved(index), visible(twin)
    sizes = []
    for at in (13, len(content) // 3, len(content) // 2, len(content) - 1) * 3:
        broken = bytearray(content)
        broken[at] ^= 1
        for bad in (content[:at], bytes(broken)):
            with pytest.raises(SnapshotError, match="the index was not changed"):
                twin.merge(io.BytesIO(bad))
            assert visible(twin) == before
            assert tokens_of(twin, [0, *range(39_999)], worker=("w0", 0)) == 0
        sizes.append(twin.stats().bytes)
    assert sizes[-1] < sizes[3] * 1.01, "of what comes and goes nothing adds up"
    merged(content, twin)
    assert state(twin) == sorted(before[0] + state(index))


def test_the_error_for_an_unreadable_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"cannot merge the snapshot .*missing: No such file"):
        PrefixIndex().merge(tmp_path / "missing")
    with pytest.raises(UsageError, match="binary"):
        PrefixIndex().merge(cast("BinaryIO", io.StringIO("text")))


def test_a_file_that_raises_in_the_middle_leaves_nothing() -> None:
    index, twin = PrefixIndex(), PrefixIndex()
    Feed(index)(store(range(5000), range(10_000), 2))

    def fail() -> None:
        raise KeyError("no more")

    with pytest.raises(KeyError):
        twin.merge(cast("BinaryIO", InterruptedFile(saved(index), fail, 30_000)))
    assert visible(twin) == visible(PrefixIndex())


# --- limits -------------------------------------------------------------------------------------------------------------------


def test_an_index_with_all_placements_takes_blocks_on_those_alone() -> None:
    index, full = PrefixIndex(), PrefixIndex()
    for at in range(MAX_PLACEMENTS // 64):
        groups = range(at * 64, at * 64 + 64)
        Feed(full, f"x{at}")(*[store([group + 1], [1, 1], 2, group_idx=group) for group in groups])
    Feed(index, "known")(store([1], [5, 5], 2, group_idx=4000))
    Feed(index, "new")(store([1], [6, 6], 2, group_idx=MAX_PLACEMENTS))
    before = visible(full)
    with pytest.raises(SnapshotError, match=f"more than {MAX_PLACEMENTS} placements"):
        full.merge(io.BytesIO(saved(index)))
    assert visible(full) == before
    merged(part(index, ("known", 0)), full)
    assert full.digest("known") == index.digest("known")


def test_the_memory_limit_holds_afterwards_and_existing_workers_keep_their_blocks() -> None:
    index, twin = PrefixIndex(), PrefixIndex()
    for at, one in enumerate((index, twin)):
        for worker in range(2):
            Feed(one, f"w{at}{worker}")(store(range(20_000), [at, worker, *range(39_998)], 2))
    limit = merged(saved(index), merged(saved(twin))).stats().bytes * 2 // 3
    small = PrefixIndex(memory_limit=limit)
    merged(saved(twin), small)
    assert small.stats().evicted == 0
    merged(saved(index), small)
    stats = small.stats()
    assert stats.bytes <= limit
    assert 0 < stats.blocks == 80_000 - stats.evicted < 80_000
    assert {info.source: info.blocks for info in small.workers() if not info.evicted} == {"w10": 20_000, "w11": 20_000}
    for source in ("w00", "w01", "w10", "w11"):
        small.remove_worker(source)
    Feed(small)(store(range(20_000), [7, *range(39_999)], 2))
    assert small.stats().evicted == stats.evicted, "what has gone no longer counts"


def test_a_refused_file_has_cost_nothing_under_a_memory_limit() -> None:
    index = PrefixIndex()
    Feed(index)(store(range(20_000), range(40_000), 2))
    small = PrefixIndex(memory_limit=index.stats().bytes * 3 // 2)
    Feed(small, "mine")(store(range(20_000), [7, *range(39_999)], 2))
    before = visible(small)
    with pytest.raises(SnapshotError):
        small.merge(io.BytesIO(saved(index)[:-1]))
    assert visible(small) == before


def test_what_may_wait_is_bounded_as_ever() -> None:
    index = PrefixIndex()
    Feed(index)(*[store([at], [at, at], 2, parent=at + 1000) for at in range(1, 21)])
    small = merged(saved(index), PrefixIndex(limits=IndexLimits(max_orphans=8)))
    assert (small.stats().orphans, small.stats().orphans_dropped) == (8, 12)


# --- what goes on meanwhile ---------------------------------------------------------------------------------------------------


def test_while_a_file_is_read_the_index_answers_and_applies_and_shows_nothing_of_it() -> None:
    index, twin = PrefixIndex(), PrefixIndex()
    prompt = [0, *range(39_999)]
    for at in range(3):
        Feed(index, f"w{at}")(store(range(20_000), prompt, 2))
    feed = Feed(twin, "mine")
    feed(store(range(20_000), prompt, 2))
    seen: list[dict[Worker, tuple[int, ...]]] = []

    def look() -> None:
        seen.append(answer(twin.match(prompt)))
        assert [info.source for info in twin.workers()] == ["mine"]
        feed(store([30_000 + feed.seq], [5, feed.seq], 2))
        merged(part(twin), twin)
        merged(saved(twin))

    twin.merge(cast("BinaryIO", InterruptedFile(saved(index), look, 30_000)))
    assert len(seen) > 30
    assert {frozenset(one) for one in seen} == {frozenset({("mine", 0)})}
    assert len(answer(twin.match(prompt))) == 4
    assert state(twin)[1:] == state(index)


def test_several_files_can_be_merged_at_once_but_each_worker_only_once() -> None:
    index = PrefixIndex()
    for at in range(2):
        Feed(index, f"w{at}")(store(range(20_000), [at, *range(39_999)], 2))
    contents = [part(index, ("w0", 0)), part(index, ("w1", 0)), saved(index)]
    twin, barrier = PrefixIndex(), threading.Barrier(6)
    outcomes: list[list[Worker] | SnapshotError] = []

    def work(content: bytes) -> None:
        barrier.wait()
        try:
            outcomes.append(twin.merge(io.BytesIO(content)))
        except SnapshotError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=work, args=(content,)) for content in contents * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    came = [worker for outcome in outcomes if isinstance(outcome, list) for worker in outcome]
    assert sorted(came) == [(info.source, info.rank) for info in twin.workers()]
    assert len(outcomes) == 6
    assert all(twin.digest(worker) == index.digest(worker) for worker in came)
    assert twin.stats().unique_blocks == sum(len(blocks_of(index, worker)) for worker in came)
    assert len(came) == len(set(came)) > 0


def test_a_restore_waits_for_a_merge_and_replaces_its_workers_too() -> None:
    index, other = PrefixIndex(), PrefixIndex()
    Feed(index)(store(range(5000), range(10_000), 2))
    Feed(other, "b")(store(range(5000), [3, *range(9999)], 2))
    twin, begun, content = PrefixIndex(), threading.Event(), saved(other)
    thread = threading.Thread(target=lambda: (begun.wait(), restored(content, twin)))
    thread.start()
    assert twin.merge(cast("BinaryIO", InterruptedFile(saved(index), begun.set, 30_000))) == [("a", 0)]
    thread.join()
    assert state(twin) == state(other)
    assert twin.stats().unique_blocks == 5000


class Crew:
    """Threads that run until they are stopped; an exception in one is raised then."""

    def __init__(self, *works: Callable[[], None]) -> None:
        self._stop, self._failures = threading.Event(), list[BaseException]()
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in works]

    def _run(self, work: Callable[[], None]) -> None:
        try:
            while not self._stop.is_set():
                work()
        except BaseException as error:  # noqa: BLE001 - the thread of the test raises it
            self._failures.append(error)

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert not self._failures


def go_on(feed: Feed) -> None:
    feed(store(range(feed.seq * 10, feed.seq * 10 + 10), [feed.seq % 3, *range(19)], 2))


def come_and_go(index: PrefixIndex, contents: list[bytes]) -> None:
    for content in contents:
        merged(content, index)
    for content in contents:
        with pytest.raises(SnapshotError):
            index.merge(io.BytesIO(content[:-1]))
    for at in range(3):
        index.remove_worker(f"w{at}")


def test_workers_join_and_leave_while_others_are_written_and_queried() -> None:
    """A query finds all blocks of a joining worker or none; other streams stay exact."""
    index, source, prompt = PrefixIndex(memory_limit=1 << 30), PrefixIndex(), [1, *range(3999)]
    for at in range(3):
        Feed(source, f"w{at}")(store(range(at, at + 2000), prompt, 2))
    feeds = [Feed(index, f"x{at}") for at in range(2)]

    def ask() -> None:
        found = answer(index.match(prompt))
        assert all(found.get((f"w{at}", 0), (4000,))[0] == 4000 for at in range(3))
        assert index.stats().workers <= 5

    contents = [part(source, ("w0", 0)), part(source, ("w1", 0), ("w2", 0))]
    with Crew(partial(go_on, feeds[0]), partial(go_on, feeds[1]), ask):
        for _ in range(30):
            come_and_go(index, contents)
    for content in contents:
        merged(content, index)
    assert all(index.digest(f"w{at}") == source.digest(f"w{at}") for at in range(3))
    for feed in feeds:
        twin = Feed(PrefixIndex(), feed.source)
        while twin.seq < feed.seq:
            go_on(twin)
        assert twin.index.digest(feed.source) == index.digest(feed.source)
