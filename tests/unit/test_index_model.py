"""The prefix index agrees with plain Python about every prompt and every block, for any announced events."""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from operator import ge
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from index_cases import (
    Admit,
    Adversary,
    Choices,
    Engine,
    Feed,
    Label,
    Remove,
    Step,
    Traffic,
    answer,
    blocks_of,
    count_of,
    encode_in_dialect,
    namespace,
    removal,
    store,
    tokens_of,
    waiting_of,
    workers_of,
)
from index_keys import Scope, Worker
from index_model import Oracle
from kvevents.events import KVEvent, KVEventBatch
from kvevents.index import ApplyResult, IndexLimits, Match, PrefixIndex
from kvevents.stream import Batch, Gap, RawBatch, Reset
from kvevents.wire import encode_batch
from wire_cases import batch_of, stored

ALL_WORKERS: list[Worker] = [("a", 0), ("a", 1), ("b", 0)]
SLACK = 4096
"""Bytes that an index may keep per stream when no block is left: its name, its counters, the rules of its groups."""
histories = st.binary(min_size=1500, max_size=4000)


class Trio:
    """The oracle, an index that is given events, and one that is given the bytes they were sent as."""

    def __init__(self, max_orphans: int) -> None:
        limits = IndexLimits(max_orphans=max_orphans)
        self.oracle = Oracle(max_orphans)
        self.by_event, self.by_payload = PrefixIndex(limits=limits), PrefixIndex(limits=limits)
        self.indexes = (self.by_event, self.by_payload)

    def take(self, step: Step, variant: int) -> None:
        if isinstance(step, Remove):
            dropped = {index.remove_worker(*step.worker) for index in self.indexes}
            assert dropped == {count_of(self.oracle, step.worker)}
            self.oracle.remove_worker(step.worker)
        elif isinstance(step, Admit):
            self.oracle.fences.pop(step.worker, None)
            for index in self.indexes:
                index.readmit(*step.worker)
        elif isinstance(step, Label):
            self.oracle.labels[step.source] = step.model
            for index in self.indexes:
                index.set_model(step.source, step.model)
        else:
            status = self.oracle.apply(step)
            assert self.by_event.apply(step).status == status
            if isinstance(step, Batch):
                applied = self._by_payload(step, encode_in_dialect(step, variant), raw=variant % 2 == 0)
                assert applied.status == status
                assert applied.report is None or not applied.report.rejected
            else:
                assert self.by_payload.apply(step).status == status

    def _by_payload(self, batch: Batch, payload: bytes, *, raw: bool) -> ApplyResult:
        """As a subscriber that does not decode delivers it, or by hand."""
        if raw:
            return self.by_payload.apply(RawBatch(batch.source, batch.rank, batch.incarnation, batch.seq, False, payload))
        return self.by_payload.apply_payload((batch.source, batch.rank), batch.incarnation, batch.seq, payload)

    def check_prompt(self, tokens: list[int], scope: Scope) -> None:
        expected = self.oracle.match(tokens, scope)
        for index in self.indexes:
            assert answer(index.match(tokens, namespace(scope))) == expected

    def check_state(self) -> None:
        """Every block on every plane, every number."""
        for worker in ALL_WORKERS:
            expected = self.oracle.blocks(worker)
            assert all(blocks_of(index, worker) == expected for index in self.indexes)
            if worker in self.oracle.streams:
                assert len({index.digest(worker) for index in self.indexes}) == 1
        for index in self.indexes:
            stats = index.stats()
            assert workers_of(index) == self.oracle.streams.keys()
            assert stats.blocks == sum(count_of(self.oracle, worker) for worker in ALL_WORKERS)
            assert waiting_of(index) == sum(len(stream.waiting) for stream in self.oracle.streams.values())
        assert self.by_payload.workers() == self.by_event.workers()


def adversarial(data: bytes, max_orphans: int) -> None:
    choices = Choices(data)
    adversary, trio = Adversary(choices), Trio(max_orphans)
    for number, step in enumerate(adversary.steps()):
        note(step)
        trio.take(step, choices.byte())
        trio.check_prompt(*adversary.prompt())
        if number % 8 == 7:
            trio.check_state()
    for path in (path for stream in adversary.streams for path in stream.paths[-8:]):
        tokens = [token for page in path.pages for token in page.tokens]
        trio.check_prompt(tokens, Scope(None, path.scope.lora, path.scope.salt))
    trio.check_state()


@settings(max_examples=60)
@given(histories)
def test_any_history_leaves_what_the_model_has(data: bytes) -> None:
    """Engines that follow no rule: every hashing, tier, group, salt and adapter, children before parents, late and repeated
    batches, restarts, removed workers. Events and payloads of every dialect lead to the same state as the model."""
    adversarial(data, max_orphans=1_000_000)


@settings(max_examples=20)
@given(histories, st.integers(0, 6))
def test_what_waits_is_dropped_oldest_first_when_the_pool_is_full(data: bytes, max_orphans: int) -> None:
    """The same histories with a pool of a few blocks."""
    adversarial(data, max_orphans)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(ALL_WORKERS), st.sampled_from([1, 2, 3]), st.integers(1, 80), st.booleans()), max_size=5
    ),
    st.integers(0, 240),
    st.integers(0, 240),
)
def test_prompts_are_matched_in_every_scheme_at_once(
    stores: list[tuple[Worker, int, int, bool]], asked: int, shared: int
) -> None:
    """Workers with blocks of several sizes, plain and EAGLE's, one worker with more than one of them too; chains and prompts on
    both sides of the first look at 64 blocks, and prompts that leave the chains at some point."""
    oracle, index = Oracle(), PrefixIndex()
    feeds = {worker: Feed(index, *worker) for worker in ALL_WORKERS}
    tokens = list(range(1, 300))
    for number, (worker, size, count, eagle) in enumerate(stores):
        hashes = range(1000 * number, 1000 * number + count)
        given = list(pairwise(tokens))[: count * size] if eagle else tokens[: count * size]
        batch = feeds[worker].batch(store(hashes, given, size))
        assert oracle.apply(batch) == index.apply(batch).status
    prompt = tokens[: min(shared, asked)] + [7] * (asked - shared)
    assert answer(index.match(prompt)) == oracle.match(prompt, Scope())


def engine_steps(choices: Choices, engine: Engine, salts: tuple[str | None, ...]) -> Iterator[Callable[[], Any]]:
    """What an engine may do next, one thing at a time."""
    traffic = Traffic(engine, choices, salts=salts, longest=30)
    while not choices.over:
        what = choices.byte()
        if what < 100:
            arrival = traffic.arrive()
            yield partial(traffic.admit, *arrival)
        elif what < 250:
            yield traffic.step
        else:
            traffic.drain()
            yield engine.reset


@settings(max_examples=30)
@given(st.binary(min_size=300, max_size=900))
def test_engines_that_run_requests_are_mirrored(data: bytes) -> None:
    """Two engines with block pools of their own seeds, one of them hybrid: caches fill, evict in LRU order, keep copies and are
    reset; after every step both indexes know every block, and predict what the engine itself would find."""
    choices, trio = Choices(data), Trio(1_000_000)
    size = choices.of((1, 2, 4))
    windows: tuple[int | None, ...] = choices.of(((None, 2 * size + 1), (None, 5), (None, None, 3 * size), (None,)))
    pool = 110 // size + 2  # hardly more than two of the longest requests take in one group
    engines = {("a", 0): Engine(1, size, pool * len(windows), windows), ("b", 0): Engine(2, size, pool)}
    salts = choices.of(((None,), (None, "tenant")))
    runs = [(worker, engine, engine_steps(choices, engine, salts)) for worker, engine in engines.items()]
    sent = dict.fromkeys(engines, 0)
    while not choices.over:
        worker, engine, steps = choices.of(runs)
        for run in (step for step in [next(steps, None)] if step is not None):
            run()
        trio.take(Batch(*worker, 0, sent[worker], 1.0, engine.take_events(), False), choices.byte())
        sent[worker] += 1
        tokens, salt = Traffic(engine, choices, salts=salts, longest=30).arrive()
        trio.check_prompt(tokens, Scope(salt=salt))
        assert tokens_of(trio.by_event, tokens[:-1], Scope(salt=salt), worker) == engine.cached(tokens, salt) * size
    trio.check_state()


@settings(max_examples=15)
@given(histories)
def test_memory_returns_to_the_baseline_when_every_worker_is_removed(data: bytes) -> None:
    choices = Choices(data)
    index = PrefixIndex()
    baseline = index.stats().bytes
    for step in Adversary(choices).steps():
        if not isinstance(step, Remove | Admit | Label):
            index.apply(step)
    for worker in ALL_WORKERS:
        index.remove_worker(*worker)
    assert (index.stats().blocks, waiting_of(index)) == (0, 0)
    assert index.stats().bytes <= baseline + SLACK * len(ALL_WORKERS)


def test_memory_returns_to_the_baseline_when_every_block_is_removed() -> None:
    """By removals alone, in another order than that of the stores, with copies, orphans and several tiers."""
    index = PrefixIndex()
    feed = Feed(index)
    feed(store([1], [1, 2], 2), removal(1))
    baseline = index.stats().bytes
    hashes = list(range(1000, 6000))
    for first in range(0, 5000, 50):
        part, parent = hashes[first : first + 50], hashes[first - 1] if first else None
        tokens = [token for value in part for token in (value, value + 1)]
        feed(store(part, tokens, 2, parent), store(part, tokens, 2, parent), store(part, [], 0, medium="CPU"))
        feed(store([value + 10_000 for value in part], tokens, 2, first + 50_000))
    assert index.stats().bytes > baseline + 5000 * 16
    for first in range(4950, -50, -50):
        part = hashes[first : first + 50]
        feed(removal(*part, medium="CPU"), removal(*part), removal(*part), removal(*(value + 10_000 for value in part)))
    assert (index.stats().blocks, waiting_of(index)) == (0, 0)
    assert index.stats().bytes <= baseline + SLACK


# --- many at once -----------------------------------------------------------------------------------------------------------


def as_delivered(step: Batch | Reset | Gap, choice: int) -> Batch | RawBatch | Reset | Gap:
    """As events, as bytes, or as bytes that were damaged on the way or have something new in them."""
    if not isinstance(step, Batch) or choice < 60:
        return step
    payload = encode_in_dialect(step, choice)
    if choice > 200:
        payload = (b"", payload[:-2], b"\x94" + payload[1:] + b"\xc0", batch_of(stored(tomorrow=1), 5))[choice % 4]
    return RawBatch(step.source, step.rank, step.incarnation, step.seq, False, payload)


def same_state(one: PrefixIndex, other: PrefixIndex) -> bool:
    state = [(index.workers(), index.stats().wire_rejected) for index in (one, other)]
    return state[0] == state[1] and all(one.digest(worker) == other.digest(worker) for worker in workers_of(one))


@settings(max_examples=20)
@given(histories)
def test_applying_many_is_applying_each(data: bytes) -> None:
    choices = Choices(data)
    steps = [step for step in Adversary(choices).steps() if not isinstance(step, Remove | Admit | Label)]
    deliveries = [as_delivered(step, data[at % len(data)]) for at, step in enumerate(steps)]
    each, many = PrefixIndex(), PrefixIndex()
    cut = len(deliveries) * data[0] // 256
    found = many.apply_many(deliveries[:cut]) + many.apply_many(iter(deliveries[cut:]))
    assert found == [each.apply(delivery) for delivery in deliveries]
    assert same_state(each, many)


def test_a_long_run_of_payloads_is_applied_in_order() -> None:
    """More than go into the native module at once, now and then one that is read in Python, and one that is not a batch."""
    odd: dict[int, dict[str, Any]] = {
        7: {"tomorrow": 1},
        255: {"block_hashes": [b"x" * 32]},
        256: {"block_size": "x"},
        600: {"tomorrow": 2},
    }
    payloads = [batch_of(stored(**{"block_hashes": [at], "token_ids": [at, 1], **odd.get(at, {})})) for at in range(700)]
    payloads[300] = b"\xc1"
    each, many = PrefixIndex(), PrefixIndex()
    deliveries = [RawBatch("a", 0, 0, at, False, payload) for at, payload in enumerate(payloads)]
    assert many.apply_many(deliveries) == [each.apply(delivery) for delivery in deliveries]
    assert same_state(each, many)
    assert many.stats().blocks == 698


def test_a_run_of_payloads_returns_the_outcomes_that_are_not_plain_applied() -> None:
    """They are keyed by position, and the state is the same: after clears, events that only Python decodes, and duplicates."""
    odd: dict[int, dict[str, Any]] = {7: {"tomorrow": 1}, 255: {"block_hashes": [b"x" * 32]}, 256: {"block_size": "x"}}
    payloads = [batch_of(stored(**{"block_hashes": [at], "token_ids": [at, 1], **odd.get(at, {})})) for at in range(600)]
    payloads[300], payloads[5] = b"\xc1", batch_of({"type": "AllBlocksCleared"})
    each, many = PrefixIndex(), PrefixIndex()
    outcomes = [each.apply(RawBatch("a", 3, 0, 100 + at, False, payload)) for at, payload in enumerate(payloads)]
    found = many.apply_payloads(("a", 3), 0, 100, payloads)
    assert found == {at: outcome for at, outcome in enumerate(outcomes) if outcome != ApplyResult("applied")}
    assert list(found) == [5, 256, 300]
    assert same_state(each, many)
    assert [outcome.status for outcome in many.apply_payloads(("a", 3), 0, 699, payloads[:2]).values()] == ["duplicate"]
    assert many.apply_payloads(("a", 3), 0, 701, []) == {}


# --- threads ----------------------------------------------------------------------------------------------------------------

BLOCKS, STEP = 20_000, 1_000
"""A step is much more than `WORTH_RELEASING` and `BLOCKS_PER_HOLD` of the native module: threads really meet inside of it."""
TOKENS = array("I", range(2 * BLOCKS))
ROUNDS = 5
"""What threads meet in by chance differs from round to round."""


def payload_of(event: KVEvent) -> bytes:
    return encode_batch(KVEventBatch(1.0, [event]))


def stores() -> list[bytes]:
    """`TOKENS` as payloads of `STEP` blocks; hashes are places, from 1 on."""
    firsts = range(0, BLOCKS, STEP)
    tokens = [TOKENS[2 * first : 2 * (first + STEP)] for first in firsts]
    ranges = [range(first + 1, first + STEP + 1) for first in firsts]
    return [payload_of(store(blocks, part, 2, blocks[0] - 1 or None)) for blocks, part in zip(ranges, tokens, strict=True)]


def removals() -> list[bytes]:
    """The same from the end, so that what is left is always a prefix."""
    return [payload_of(removal(*range(last, last - STEP, -1))) for last in range(BLOCKS, 0, -STEP)]


class Meetings:
    """Counts what readers have read, so that a writer can wait until all of them have read what it has just written."""

    def __init__(self, readers: int) -> None:
        self._reads = [0] * readers
        self._changed = threading.Condition()

    def has_read(self, reader: int) -> None:
        with self._changed:
            self._reads[reader] += 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Until each reader has begun and ended a read. The first to end may have begun before, so two have to."""
        with self._changed:
            wanted = [reads + 2 for reads in self._reads]
            assert self._changed.wait_for(lambda: all(map(ge, self._reads, wanted)), 60), "a reader has stopped"


class Writer:
    """Applies payloads one after the other. A reader may see any state between `done` and `begun` payloads.

    With `meetings` it waits for the readers after every second payload; the others are applied while they read, or not, as
    threads come to run.
    """

    def __init__(self, index: PrefixIndex, source: str, payloads: list[bytes], meetings: Meetings | None = None) -> None:
        self.index, self.source, self.payloads, self.meetings = index, source, payloads, meetings
        self.begun = self.done = 0

    def __call__(self) -> None:
        first = next((info.last_seq + 1 for info in self.index.workers() if info.source == self.source), 0)
        for at, payload in enumerate(self.payloads):
            self.begun = at + 1
            assert self.index.apply_payload(self.source, 0, first + at, payload).status == "applied"
            self.done = at + 1
            if self.meetings is not None and at % 2:
                self.meetings.wait()


def in_threads(writers: list[Callable[[], None]], readers: list[Callable[[], object]]) -> None:
    """Run each writer once, and each reader again and again until all writers are done, and once more; threads change often."""
    failures: list[BaseException] = []
    finished = threading.Event()
    start = threading.Barrier(len(writers) + len(readers))

    def guarded(work: Callable[[], None]) -> None:
        try:
            start.wait(60)
            work()
        except BaseException as failure:  # noqa: BLE001 - the thread of the test raises it
            failures.append(failure)
            finished.set()

    def reading(read: Callable[[], object]) -> None:
        while not finished.is_set():
            read()
        read()

    writing = [threading.Thread(target=guarded, args=(write,)) for write in writers]
    others = [threading.Thread(target=guarded, args=(partial(reading, read),)) for read in readers]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in (*writing, *others):
            thread.start()
        for thread in writing:
            thread.join(60)
        finished.set()
        for thread in others:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in (*writing, *others))
    if failures:
        raise failures[0]


@pytest.mark.parametrize("growing", [True, False], ids=["stores", "removals"])
def test_readers_see_only_states_between_the_beginning_and_the_end_of_their_call(growing: bool) -> None:
    """Three readers beside one writer: no answer is older than what was applied before the call, newer than what was begun when
    it returned, or anything that never was. A stream without a writer answers the same all the time. Each reader sees every
    second state of the writer at least."""

    def between(writer: Writer, reader: int, read: Callable[[], list[int]]) -> None:
        before = writer.done
        answers = read()
        after = writer.begun
        low, high = (before, after) if growing else (BLOCKS // STEP - after, BLOCKS // STEP - before)
        for blocks in answers:
            assert low * STEP <= blocks <= high * STEP
            seen[reader].add(blocks)
        meetings.has_read(reader)

    def depth(match: Match) -> int:
        found = answer(match)
        assert found["still", 0] == (100,) * 4
        hit = found.get(("a", 0), (0, 0, 0, 0))
        assert hit == (hit[0],) * 4
        return hit[0] // 2

    for _ in range(ROUNDS):
        index, meetings = PrefixIndex(), Meetings(3)
        seen: list[set[int]] = [set(), set(), set()]
        Feed(index, "still")(store(range(1, 51), TOKENS[:100], 2))
        if not growing:
            Writer(index, "a", STORES)()
        writer = Writer(index, "a", STORES if growing else REMOVALS, meetings)
        readers: list[Callable[[], list[int]]] = [
            lambda: [depth(index.match(TOKENS))],  # noqa: B023 - read within its round
            lambda: [depth(match) for match in index.match_many([TOKENS])],  # noqa: B023
            lambda: [index.stats().blocks - 50],  # noqa: B023
        ]
        in_threads([writer], [partial(between, writer, at, read) for at, read in enumerate(readers)])
        assert tokens_of(index, TOKENS) == (2 * BLOCKS if growing else 0)
        assert min(map(len, seen)) >= len(writer.payloads) // 2


def test_what_is_not_touched_is_never_hidden_from_a_reader() -> None:
    """A writer removes the second half of a prefix and stores it again, over and over: readers always find the first half."""
    index, meetings = PrefixIndex(), Meetings(3)
    half = BLOCKS // STEP // 2
    Writer(index, "a", STORES)()
    seen: list[set[int]] = [set(), set(), set()]

    def read(reader: int) -> None:
        blocks = tokens_of(index, TOKENS) // 2
        assert BLOCKS // 2 <= blocks <= BLOCKS
        seen[reader].add(blocks)
        meetings.has_read(reader)

    for _ in range(ROUNDS):
        writer = Writer(index, "a", REMOVALS[:half] + STORES[half:], meetings)
        in_threads([writer], [partial(read, reader) for reader in range(3)])
        assert tokens_of(index, TOKENS) == 2 * BLOCKS
    assert min(map(len, seen)) >= half // 2


def test_writers_of_the_same_blocks_do_not_disturb_each_other() -> None:
    """Three streams of the same blocks, and a worker that comes and goes: in the end each holds what its own deliveries say."""
    expected = PrefixIndex()
    Writer(expected, "a", STORES)()
    for _ in range(3):
        index = PrefixIndex()

        def visit(index: PrefixIndex = index) -> None:
            for life in range(10):
                for seq, payload in enumerate(STORES[:3]):
                    index.apply_payload("visitor", life, seq, payload)
                assert index.remove_worker("visitor") == 3 * STEP

        writers = [
            Writer(index, "a", STORES),
            Writer(index, "b", STORES + REMOVALS + STORES),
            Writer(index, "c", STORES + REMOVALS),
        ]
        in_threads([*writers, visit], [partial(index.match, TOKENS)])
        assert index.digest("a") == index.digest("b") == expected.digest("a")
        assert {info.source: info.blocks for info in index.workers()} == {"a": BLOCKS, "b": BLOCKS, "c": 0}
        assert index.stats().unique_blocks == BLOCKS


STORES, REMOVALS = stores(), removals()
