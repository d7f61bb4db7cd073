"""Snapshots of some workers: merging one into an index has the effect of receiving their streams, or no effect."""

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
    blocks_of,
    namespace,
    removal,
    store,
    tokens_by_level,
    tokens_of,
)
from index_model import Oracle
from kvevents.errors import SnapshotError, UsageError
from kvevents.index import IndexLimits, Namespace, PrefixIndex
from snapshot_cases import add_frames, apply_step, make_full_snapshot, remove_frames, restore_snapshot, state, take_snapshot

Worker = tuple[str, int]

WORKERS: tuple[Worker, ...] = (("a", 0), ("a", 1), ("b", 0))
"""The workers of `Adversary`."""
MAX_PLACEMENTS = 4096
"""The limit of the index in native/index/src/store/shared_state.rs."""


def snapshot_of(index: PrefixIndex, *workers: Worker) -> bytes:
    file = io.BytesIO()
    index.snapshot(file, workers)
    return file.getvalue()


def merge_snapshot(content: bytes, index: PrefixIndex | None = None) -> PrefixIndex:
    index = index or PrefixIndex()
    index.merge(io.BytesIO(content))
    return index


def worker_of(step: Step) -> Worker:
    return step.worker if isinstance(step, Remove | Admit) else (cast("Any", step).source, cast("Any", step).rank)


def concerns(step: Step, workers: Iterable[Worker]) -> bool:
    if isinstance(step, Label):
        return step.source in {source for source, _ in workers}
    return worker_of(step) in workers


def apply_to_model(model: Oracle, step: Step) -> None:
    if isinstance(step, Remove):
        model.remove_worker(step.worker)
    elif isinstance(step, Admit):
        model.fences.pop(step.worker, None)
    elif isinstance(step, Label):
        model.labels[step.source] = step.model
    else:
        model.apply(step)


def observable_state(index: PrefixIndex) -> tuple[Any, ...]:
    """Return everything that a failed merge must leave unchanged."""
    stats = index.stats()
    return state(index), stats.unique_blocks, stats.blocks, stats.orphans, stats.copies, stats.workers, stats.evicted


# --- the effect of the streams themselves -------------------------------------------------------------------------------------


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
    """Each worker is in one of three groups: the first is in the index already, and the others are merged from files in any
    order.

    The index that writes the files and the model have received everything.
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
                    merge_snapshot(snapshot_of(index, *parts[one]), twin)
            assert state(twin) == state(index)
        apply_step(index, step)
        apply_to_model(model, step)
        if at >= moment or concerns(step, parts[0]):
            apply_step(twin, step)
        if at >= moment:
            assert state(twin) == state(index)
            tokens, scope = adversary.prompt()
            assert tokens_by_level(twin.match(tokens, namespace(scope))) == model.match(tokens, scope)
    if at >= moment:
        assert all(blocks_of(twin, worker) == model.blocks(worker) for worker in WORKERS)


@settings(max_examples=100)
@given(st.binary(min_size=200, max_size=1500), st.integers(0, 60), st.sampled_from(WORKERS))
def test_a_worker_that_is_removed_and_merged_again_is_complete(data: bytes, moment: int, worker: Worker) -> None:
    """Its fence is lifted, and blocks that it shares with others are shared again."""
    choices = Choices(data)
    adversary = Adversary(choices)
    index, twin = PrefixIndex(), PrefixIndex()
    for at, step in enumerate(adversary.steps()):
        if at == moment and worker in {(info.source, info.rank) for info in index.workers()}:
            blocks, content = index.stats().unique_blocks, snapshot_of(index, worker)
            index.remove_worker(worker)
            merge_snapshot(content, index)
            assert index.stats().unique_blocks <= blocks, "fewer if other workers can share a record that only this worker used"
        apply_step(index, step)
        apply_step(twin, step)
        assert state(twin) == state(index)
        tokens, scope = adversary.prompt()
        assert tokens_by_level(twin.match(tokens, namespace(scope))) == tokens_by_level(index.match(tokens, namespace(scope)))


def test_merged_streams_share_their_blocks_with_existing_ones() -> None:
    index = PrefixIndex()
    for worker in range(8):
        tokens = [token for at in range(2000) for token in (at, worker // 4)]
        Feed(index, f"w{worker}")(store([worker * 10_000 + at for at in range(2000)], tokens, 2))
    twin = PrefixIndex()
    for one in range(4):
        merge_snapshot(snapshot_of(index, (f"w{one}", 0), (f"w{7 - one}", 0)), twin)
    assert state(twin) == state(index)
    assert twin.stats().unique_blocks == index.stats().unique_blocks == 4000


def test_merged_blocks_without_parents_are_matched_with_an_existing_chain() -> None:
    """The worker removed the parents, so the file does not have them; later stores of the worker continue the same chain."""
    tokens, hashes = list(range(400)), range(1, 201)
    index, twin = PrefixIndex(), PrefixIndex()
    late = Feed(index, "late")
    late(store(hashes, tokens, 2), removal(*hashes[:50], *hashes[100:120]))
    Feed(twin, "early")(store(hashes, tokens, 2))
    merge_snapshot(snapshot_of(index, ("late", 0)), twin)
    assert twin.stats().unique_blocks == 200
    assert twin.digest("late") == index.digest("late")
    late.index = twin
    late(store(hashes[:50], tokens[:100], 2))
    assert {hit.source: hit.tokens for hit in twin.match(tokens)} == {"early": 400, "late": 200}
    late(store(hashes[100:120], tokens[200:240], 2, 100))
    assert {hit.source: hit.tokens for hit in twin.match(tokens)} == {"early": 400, "late": 400}
    assert twin.stats().unique_blocks == 200


def test_placements_are_renumbered_for_another_index() -> None:
    index, twin = PrefixIndex(), PrefixIndex()
    for at, tier in enumerate(("GPU", "CPU", "DISK", "tape")):
        Feed(index, f"w{at}")(store([at + 1, 9], [1, 1, at, at], 2, medium=tier))
        Feed(twin, f"x{3 - at}")(store([at + 1, 9], [1, 1, at, at], 2, medium=("tape", "DISK", "other", "GPU")[at]))
    before = state(twin)
    merge_snapshot(snapshot_of(index, *[(f"w{at}", 0) for at in range(4)]), twin)
    assert state(twin) == sorted(before + state(index))
    assert [info.tiers for info in twin.workers()[:4]] == [{"gpu": 2}, {"cpu": 2}, {"disk": 2}, {"TAPE": 2}]


# --- the content of a part ----------------------------------------------------------------------------------------------------


@pytest.fixture
def index() -> PrefixIndex:
    """Return an index with three workers, each with a model, and two workers that were removed."""
    index = PrefixIndex()
    for at, worker in enumerate((("a", 0), ("a", 1), ("b", 0), ("gone", 0), ("gone", 1))):
        index.set_model(worker[0], worker[0].upper())
        Feed(index, *worker)(store([1, 2], [1, 1, at, at], 2))
    index.remove_worker(("gone", 0))
    index.remove_worker(("gone", 1))
    return index


def test_a_part_has_the_requested_workers_in_sorted_order(index: PrefixIndex) -> None:
    twin = PrefixIndex()
    assert twin.merge(io.BytesIO(snapshot_of(index, ("b", 0), ("absent", 0), ("a", 7), ("a", 1), ("b", 0)))) == [
        ("a", 1),
        ("b", 0),
    ]
    assert state(twin) == [one for one in state(index) if one[0][:2] != ("a", 0)]


def test_a_part_without_workers_is_empty_and_a_whole_snapshot_merges_everything(index: PrefixIndex) -> None:
    twin = PrefixIndex()
    assert twin.merge(io.BytesIO(snapshot_of(index))) == []
    assert twin.workers() == []
    assert twin.merge(io.BytesIO(take_snapshot(index))) == [("a", 0), ("a", 1), ("b", 0)]
    assert state(twin) == state(index)


def test_restoring_a_part_replaces_everything(index: PrefixIndex) -> None:
    content = snapshot_of(index, ("a", 1))
    restore_snapshot(content, index)
    assert [(info.source, info.rank, info.model) for info in index.workers()] == [("a", 1, "A")]


def test_workers_are_any_iterable_of_pairs(index: PrefixIndex, tmp_path: Path) -> None:
    index.snapshot(tmp_path / "file", (worker for worker in [("a", 1)]))
    assert PrefixIndex().merge(tmp_path / "file") == [("a", 1)]
    with pytest.raises(TypeError):
        index.snapshot(tmp_path / "other", cast("Any", "ab"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_part_has_only_the_fences_of_its_workers(index: PrefixIndex) -> None:
    content = snapshot_of(index, ("gone", 0), ("a", 0))
    twin = merge_snapshot(content)
    assert Feed(twin, "gone", 0)(store([3], [1, 1], 2)).status == "void"
    assert Feed(twin, "gone", 1)(store([3], [1, 1], 2)).status == "applied"


def test_a_fence_against_a_restored_worker_is_removed(index: PrefixIndex) -> None:
    content = snapshot_of(index, ("a", 0))
    index.remove_worker("a", 0)
    feed = Feed(index)
    assert feed(store([3], [1, 1], 2)).status == "void"
    merge_snapshot(content, index)
    assert feed(store([3], [1, 1], 2)).status == "applied"


def test_the_newer_of_two_fences_applies() -> None:
    old, new = PrefixIndex(), PrefixIndex()
    for index, incarnation in ((old, 1), (new, 2)):
        Feed(index, incarnation=incarnation)(store([1], [1, 1], 2))
        index.remove_worker("a", 0)
    contents = snapshot_of(old, ("a", 0)), snapshot_of(new, ("a", 0))
    for index, content in ((new, contents[0]), (old, contents[1])):
        merge_snapshot(content, index)
        assert Feed(index, incarnation=2)(store([1], [1, 1], 2)).status == "void"
        assert Feed(index, incarnation=3)(store([1], [1, 1], 2)).status == "applied"


def test_a_fence_from_a_file_does_not_affect_an_existing_worker(index: PrefixIndex) -> None:
    """The file only knows that the worker was removed in the index that wrote it."""
    twin = PrefixIndex()
    feed = Feed(twin, "gone")
    feed(store([1], [1, 1], 2))
    merge_snapshot(snapshot_of(index, ("gone", 0), ("b", 0)), twin)
    assert feed(store([2], [2, 2], 2)).status == "applied"


def test_a_missing_model_is_taken_from_the_file_and_applies_to_all_ranks(index: PrefixIndex) -> None:
    twin = PrefixIndex()
    Feed(twin, "a", 3)(store([1, 2], [1, 1, 0, 0], 2))
    twin.set_model("b", "other")
    merge_snapshot(snapshot_of(index, ("a", 0), ("b", 0)), twin)
    assert {(info.source, info.rank): info.model for info in twin.workers()} == {
        ("a", 0): "A",
        ("a", 3): "A",
        ("b", 0): "other",
    }
    found = {model: set(tokens_by_level(twin.match([1, 1], Namespace(model=model)))) for model in ("A", "B", "other", None)}
    assert found == {"A": {("a", 0), ("a", 3)}, "B": set(), "other": {("b", 0)}, None: set()}
    Feed(twin, "a", 4)(store([1], [1, 1], 2))
    assert twin.workers()[2].model == "A"


# --- all or nothing -----------------------------------------------------------------------------------------------------------


def test_an_existing_worker_raises_and_nothing_is_merged(index: PrefixIndex) -> None:
    content, before = take_snapshot(index), observable_state(index)
    index.remove_worker("a", 0)
    middle = observable_state(index)
    with pytest.raises(SnapshotError, match=r'the worker "a" with rank 1 already; call remove_worker for it first'):
        index.merge(io.BytesIO(content))
    assert observable_state(index) == middle
    assert Feed(index)(store([3], [1, 1], 2)).status == "void", "its fence still applies"
    for worker in (("a", 1), ("b", 0)):
        index.remove_worker(worker)
    merge_snapshot(content, index)
    assert observable_state(index) == before


class InterruptedFile:
    """A file that calls a function before each of its reads except the first."""

    def __init__(self, content: bytes, then: Callable[[], object], size: int = 1 << 20) -> None:
        self._file, self._then, self._size = io.BytesIO(content), then, size

    def read(self, size: int = -1) -> bytes:
        if self._file.tell():
            self._then()
        return self._file.read(min(size, self._size))


def test_a_worker_that_appears_during_a_merge_remains_and_the_file_is_refused() -> None:
    index, twin = PrefixIndex(), PrefixIndex()
    for at in range(3):
        Feed(index, f"w{at}")(store(range(2000), [at, *range(3999)], 2))
    feed = Feed(twin, "w1")
    with pytest.raises(SnapshotError, match="w1"):
        twin.merge(cast("BinaryIO", InterruptedFile(take_snapshot(index), lambda: feed(store([1], [1, 1], 2)), 30_000)))
    assert [(info.source, info.blocks) for info in twin.workers()] == [("w1", 1)]
    assert twin.stats().unique_blocks == 1
    assert tokens_of(twin, [0, *range(3999)], worker=("w0", 0)) == 0


def test_a_corrupt_file_with_valid_checksums_has_no_effect_when_it_is_refused() -> None:
    """Each byte of the items is changed, removed, and made the last one in turn; the index has blocks of its own."""
    whole = make_full_snapshot()
    content, head = remove_frames(whole), whole[:12]
    index = PrefixIndex()
    for step in Adversary(Choices(random.Random(1).randbytes(800))).steps():
        if not isinstance(step, Label) and worker_of(step) == ("a", 0):
            apply_step(index, step)
    index.remove_worker("a", 0)
    index.readmit("a", 0)
    Feed(index, "mine")(store(range(50), [1, 1, 2, 2, *range(96)], 2))
    before, refused = observable_state(index), 0
    for at in range(len(content)):
        start, end = content[:at], content[at + 1 :]
        others = {content[at] ^ 1, content[at] ^ 0x80, 0, 255} - {content[at]}
        for changed in [start, start + end, *(start + bytes([other]) + end for other in others)]:
            try:
                merged_workers = index.merge(io.BytesIO(add_frames(changed, head)))
            except SnapshotError:
                refused += 1
            else:
                for worker in merged_workers:
                    index.set_model(worker[0], None)
                    index.remove_worker(worker)
            assert observable_state(index) == before
    assert refused > 2 * len(content)


def test_a_truncated_or_damaged_file_leaves_no_blocks_and_leaks_no_memory() -> None:
    index, twin = PrefixIndex(), PrefixIndex()
    for at in range(4):
        Feed(index, f"w{at}")(store(range(at, 60_000, 3), [at // 2, *range(39_999)], 2))
    Feed(twin, "mine")(store(range(5000), [0, *range(9999)], 2))
    content, before = take_snapshot(index), observable_state(twin)
    sizes = []
    for at in (13, len(content) // 3, len(content) // 2, len(content) - 1) * 3:
        broken = bytearray(content)
        broken[at] ^= 1
        for damaged in (content[:at], bytes(broken)):
            with pytest.raises(SnapshotError, match="the index was not changed"):
                twin.merge(io.BytesIO(damaged))
            assert observable_state(twin) == before
            assert tokens_of(twin, [0, *range(39_999)], worker=("w0", 0)) == 0
        sizes.append(twin.stats().bytes)
    assert sizes[-1] < sizes[3] * 1.01, "memory does not grow with refused merges"
    merge_snapshot(content, twin)
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
        twin.merge(cast("BinaryIO", InterruptedFile(take_snapshot(index), fail, 30_000)))
    assert observable_state(twin) == observable_state(PrefixIndex())


# --- limits -------------------------------------------------------------------------------------------------------------------


def test_an_index_with_all_placements_accepts_only_blocks_on_existing_ones() -> None:
    index, full = PrefixIndex(), PrefixIndex()
    for at in range(MAX_PLACEMENTS // 64):
        groups = range(at * 64, at * 64 + 64)
        Feed(full, f"x{at}")(*[store([group + 1], [1, 1], 2, group_idx=group) for group in groups])
    Feed(index, "known")(store([1], [5, 5], 2, group_idx=4000))
    Feed(index, "new")(store([1], [6, 6], 2, group_idx=MAX_PLACEMENTS))
    before = observable_state(full)
    with pytest.raises(SnapshotError, match=f"or the index more than {MAX_PLACEMENTS}"):
        full.merge(io.BytesIO(take_snapshot(index)))
    assert observable_state(full) == before
    merge_snapshot(snapshot_of(index, ("known", 0)), full)
    assert full.digest("known") == index.digest("known")


def test_the_memory_limit_holds_afterwards_and_existing_workers_keep_their_blocks() -> None:
    index, twin = PrefixIndex(), PrefixIndex()
    for at, one in enumerate((index, twin)):
        for worker in range(2):
            Feed(one, f"w{at}{worker}")(store(range(20_000), [at, worker, *range(39_998)], 2))
    limit = merge_snapshot(take_snapshot(index), merge_snapshot(take_snapshot(twin))).stats().bytes * 2 // 3
    small = PrefixIndex(memory_limit=limit)
    merge_snapshot(take_snapshot(twin), small)
    assert small.stats().evicted == 0
    merge_snapshot(take_snapshot(index), small)
    stats = small.stats()
    assert stats.bytes <= limit
    assert 0 < stats.blocks == 80_000 - stats.evicted < 80_000
    assert {info.source: info.blocks for info in small.workers() if not info.evicted} == {"w10": 20_000, "w11": 20_000}
    for source in ("w00", "w01", "w10", "w11"):
        small.remove_worker(source)
    Feed(small)(store(range(20_000), [7, *range(39_999)], 2))
    assert small.stats().evicted == stats.evicted, "removed workers no longer count"


def test_a_refused_file_evicts_nothing_under_a_memory_limit() -> None:
    index = PrefixIndex()
    Feed(index)(store(range(20_000), range(40_000), 2))
    small = PrefixIndex(memory_limit=index.stats().bytes * 3 // 2)
    Feed(small, "mine")(store(range(20_000), [7, *range(39_999)], 2))
    before = observable_state(small)
    with pytest.raises(SnapshotError):
        small.merge(io.BytesIO(take_snapshot(index)[:-1]))
    assert observable_state(small) == before


def test_merged_orphans_respect_the_limit() -> None:
    index = PrefixIndex()
    Feed(index)(*[store([at], [at, at], 2, parent=at + 1000) for at in range(1, 21)])
    small = merge_snapshot(take_snapshot(index), PrefixIndex(limits=IndexLimits(max_orphans=8)))
    assert (small.stats().orphans, small.stats().orphans_dropped) == (8, 12)


# --- concurrency --------------------------------------------------------------------------------------------------------------


def test_during_a_merge_the_index_answers_and_applies_without_the_merged_workers() -> None:
    index, twin = PrefixIndex(), PrefixIndex()
    prompt = [0, *range(39_999)]
    for at in range(3):
        Feed(index, f"w{at}")(store(range(20_000), prompt, 2))
    feed = Feed(twin, "mine")
    feed(store(range(20_000), prompt, 2))
    seen: list[dict[Worker, tuple[int, ...]]] = []

    def check_during_merge() -> None:
        seen.append(tokens_by_level(twin.match(prompt)))
        assert [info.source for info in twin.workers()] == ["mine"]
        feed(store([30_000 + feed.seq], [5, feed.seq], 2))
        merge_snapshot(snapshot_of(twin), twin)
        merge_snapshot(take_snapshot(twin))

    twin.merge(cast("BinaryIO", InterruptedFile(take_snapshot(index), check_during_merge, 30_000)))
    assert len(seen) > 30
    assert {frozenset(one) for one in seen} == {frozenset({("mine", 0)})}
    assert len(tokens_by_level(twin.match(prompt))) == 4
    assert state(twin)[1:] == state(index)


def test_several_files_can_be_merged_concurrently_but_each_worker_only_once() -> None:
    index = PrefixIndex()
    for at in range(2):
        Feed(index, f"w{at}")(store(range(20_000), [at, *range(39_999)], 2))
    contents = [snapshot_of(index, ("w0", 0)), snapshot_of(index, ("w1", 0)), take_snapshot(index)]
    twin, barrier = PrefixIndex(), threading.Barrier(6)
    outcomes: list[list[Worker] | SnapshotError] = []

    def task(content: bytes) -> None:
        barrier.wait()
        try:
            outcomes.append(twin.merge(io.BytesIO(content)))
        except SnapshotError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=task, args=(content,)) for content in contents * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    merged_workers = [worker for outcome in outcomes if isinstance(outcome, list) for worker in outcome]
    assert sorted(merged_workers) == [(info.source, info.rank) for info in twin.workers()]
    assert len(outcomes) == 6
    assert all(twin.digest(worker) == index.digest(worker) for worker in merged_workers)
    assert twin.stats().unique_blocks == sum(len(blocks_of(index, worker)) for worker in merged_workers)
    assert len(merged_workers) == len(set(merged_workers)) > 0


def test_a_restore_waits_for_a_merge_and_replaces_its_workers_too() -> None:
    index, other = PrefixIndex(), PrefixIndex()
    Feed(index)(store(range(5000), range(10_000), 2))
    Feed(other, "b")(store(range(5000), [3, *range(9999)], 2))
    twin, begun, content = PrefixIndex(), threading.Event(), take_snapshot(other)
    thread = threading.Thread(target=lambda: (begun.wait(), restore_snapshot(content, twin)))
    thread.start()
    assert twin.merge(cast("BinaryIO", InterruptedFile(take_snapshot(index), begun.set, 30_000))) == [("a", 0)]
    thread.join()
    assert state(twin) == state(other)
    assert twin.stats().unique_blocks == 5000


class BackgroundThreads:
    """Threads that run until the context ends, which fails if one of them raised an exception."""

    def __init__(self, *tasks: Callable[[], None]) -> None:
        self._stop, self._failures = threading.Event(), list[BaseException]()
        self._threads = [threading.Thread(target=self._run, args=(task,)) for task in tasks]

    def _run(self, task: Callable[[], None]) -> None:
        try:
            while not self._stop.is_set():
                task()
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


def publish_next(feed: Feed) -> None:
    feed(store(range(feed.seq * 10, feed.seq * 10 + 10), [feed.seq % 3, *range(19)], 2))


def merge_and_remove(index: PrefixIndex, contents: list[bytes]) -> None:
    for content in contents:
        merge_snapshot(content, index)
    for content in contents:
        with pytest.raises(SnapshotError):
            index.merge(io.BytesIO(content[:-1]))
    for at in range(3):
        index.remove_worker(f"w{at}")


def test_workers_join_and_leave_while_others_are_written_and_queried() -> None:
    """A query finds all blocks of a merged worker or none; other streams stay exact."""
    index, source, prompt = PrefixIndex(memory_limit=1 << 30), PrefixIndex(), [1, *range(3999)]
    for at in range(3):
        Feed(source, f"w{at}")(store(range(at, at + 2000), prompt, 2))
    feeds = [Feed(index, f"x{at}") for at in range(2)]

    def query() -> None:
        found = tokens_by_level(index.match(prompt))
        assert all(found.get((f"w{at}", 0), (4000,))[0] == 4000 for at in range(3))
        assert index.stats().workers <= 5

    contents = [snapshot_of(source, ("w0", 0)), snapshot_of(source, ("w1", 0), ("w2", 0))]
    with BackgroundThreads(partial(publish_next, feeds[0]), partial(publish_next, feeds[1]), query):
        for _ in range(30):
            merge_and_remove(index, contents)
    for content in contents:
        merge_snapshot(content, index)
    assert all(index.digest(f"w{at}") == source.digest(f"w{at}") for at in range(3))
    for feed in feeds:
        twin = Feed(PrefixIndex(), feed.source)
        while twin.seq < feed.seq:
            publish_next(twin)
        assert twin.index.digest(feed.source) == index.digest(feed.source)
