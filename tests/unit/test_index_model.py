"""The prefix index agrees with a plain Python model on every prompt and every block, for any announced events."""

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
    blocks_of,
    count_blocks,
    count_orphans,
    encode_in_dialect,
    namespace,
    removal,
    store,
    tokens_by_level,
    tokens_of,
    workers_of,
)
from index_keys import Scope, Worker
from index_model import Oracle
from kvevents.events import KVEvent, KVEventBatch
from kvevents.index import ApplyResult, IndexLimits, Match, PrefixIndex
from kvevents.stream import Batch, Gap, RawBatch, Reset
from kvevents.wire import encode_batch
from wire_cases import batch_of, make_store

ALL_WORKERS: list[Worker] = [("a", 0), ("a", 1), ("b", 0)]
SLACK = 4096
"""Bytes that an index may use for a stream without blocks: its name, its counters and the rules of its groups."""
histories = st.binary(min_size=1500, max_size=4000)


class IndexesAndOracle:
    """The oracle, an index that receives events, and an index that receives the same events as payloads."""

    def __init__(self, max_orphans: int) -> None:
        limits = IndexLimits(max_orphans=max_orphans)
        self.oracle = Oracle(max_orphans)
        self.by_event, self.by_payload = PrefixIndex(limits=limits), PrefixIndex(limits=limits)
        self.indexes = (self.by_event, self.by_payload)

    def take(self, step: Step, variant: int) -> None:
        if isinstance(step, Remove):
            dropped = {index.remove_worker(*step.worker) for index in self.indexes}
            assert dropped == {count_blocks(self.oracle, step.worker)}
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
        """Apply the payload as a raw batch, which a subscriber that does not decode delivers, or with `apply_payload`."""
        if raw:
            return self.by_payload.apply(RawBatch(batch.source, batch.rank, batch.incarnation, batch.seq, False, payload))
        return self.by_payload.apply_payload((batch.source, batch.rank), batch.incarnation, batch.seq, payload)

    def check_prompt(self, tokens: list[int], scope: Scope) -> None:
        expected = self.oracle.match(tokens, scope)
        for index in self.indexes:
            assert tokens_by_level(index.match(tokens, namespace(scope))) == expected

    def check_state(self) -> None:
        """Compare all blocks in all placements, all digests and all counters."""
        for worker in ALL_WORKERS:
            expected = self.oracle.blocks(worker)
            assert all(blocks_of(index, worker) == expected for index in self.indexes)
            if worker in self.oracle.streams:
                assert len({index.digest(worker) for index in self.indexes}) == 1
        for index in self.indexes:
            stats = index.stats()
            assert workers_of(index) == self.oracle.streams.keys()
            assert stats.blocks == sum(count_blocks(self.oracle, worker) for worker in ALL_WORKERS)
            assert count_orphans(index) == sum(len(stream.waiting) for stream in self.oracle.streams.values())
        assert self.by_payload.workers() == self.by_event.workers()


def check_adversarial_history(data: bytes, max_orphans: int) -> None:
    choices = Choices(data)
    adversary, subjects = Adversary(choices), IndexesAndOracle(max_orphans)
    for number, step in enumerate(adversary.steps()):
        note(step)
        subjects.take(step, choices.byte())
        subjects.check_prompt(*adversary.prompt())
        if number % 8 == 7:
            subjects.check_state()
    for path in (path for stream in adversary.streams for path in stream.paths[-8:]):
        tokens = [token for page in path.pages for token in page.tokens]
        subjects.check_prompt(tokens, Scope(None, path.scope.lora, path.scope.salt))
    subjects.check_state()


@settings(max_examples=60)
@given(histories)
def test_any_history_leads_to_the_state_of_the_model(data: bytes) -> None:
    """Events and payloads of every dialect lead to the same state as the model, from engines that follow no rule.

    Histories have every hashing, tier, group, salt and adapter, children before parents, late and repeated batches, restarts
    and removed workers.
    """
    check_adversarial_history(data, max_orphans=1_000_000)


@settings(max_examples=20)
@given(histories, st.integers(0, 6))
def test_the_oldest_orphans_are_dropped_when_there_are_too_many(data: bytes, max_orphans: int) -> None:
    """The same histories agree with the model if only a few orphans are stored."""
    check_adversarial_history(data, max_orphans)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(ALL_WORKERS), st.sampled_from([1, 2, 3]), st.integers(1, 80), st.booleans()), max_size=5
    ),
    st.integers(0, 240),
    st.integers(0, 240),
)
def test_prompts_are_matched_with_every_block_size_and_scheme_at_once(
    store_payloads: list[tuple[Worker, int, int, bool]], prompt_tokens: int, shared: int
) -> None:
    """Workers have blocks of several sizes, plain and EAGLE's, and one worker can have more than one scheme.

    Chains and prompts are shorter and longer than the 64 blocks that a lookup checks first. Prompts leave the chains
    at any point.
    """
    oracle, index = Oracle(), PrefixIndex()
    feeds = {worker: Feed(index, *worker) for worker in ALL_WORKERS}
    tokens = list(range(1, 300))
    for number, (worker, size, count, eagle) in enumerate(store_payloads):
        hashes = range(1000 * number, 1000 * number + count)
        given = list(pairwise(tokens))[: count * size] if eagle else tokens[: count * size]
        batch = feeds[worker].batch(store(hashes, given, size))
        assert oracle.apply(batch) == index.apply(batch).status
    prompt = tokens[: min(shared, prompt_tokens)] + [7] * (prompt_tokens - shared)
    assert tokens_by_level(index.match(prompt)) == oracle.match(prompt, Scope())


def engine_steps(choices: Choices, engine: Engine, salts: tuple[str | None, ...]) -> Iterator[Callable[[], Any]]:
    """Yield the next steps of an engine, one at a time."""
    traffic = Traffic(engine, choices, salts=salts, longest=30)
    while not choices.is_used_up:
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
def test_the_index_predicts_the_hits_of_engines_that_run_requests(data: bytes) -> None:
    """Two engines have block pools with different seeds, and one engine can be hybrid. Caches fill, evict in LRU order, hold
    copies and are reset. After every step both indexes know every block, and predict what the engine itself would find."""
    choices, subjects = Choices(data), IndexesAndOracle(1_000_000)
    size = choices.choose((1, 2, 4))
    windows: tuple[int | None, ...] = choices.choose(((None, 2 * size + 1), (None, 5), (None, None, 3 * size), (None,)))
    pool = 110 // size + 2  # hardly more than two of the longest requests take in one group
    engines = {("a", 0): Engine(1, size, pool * len(windows), windows), ("b", 0): Engine(2, size, pool)}
    salts = choices.choose(((None,), (None, "tenant")))
    runs = [(worker, engine, engine_steps(choices, engine, salts)) for worker, engine in engines.items()]
    sent = dict.fromkeys(engines, 0)
    while not choices.is_used_up:
        worker, engine, steps = choices.choose(runs)
        for run in (step for step in [next(steps, None)] if step is not None):
            run()
        subjects.take(Batch(*worker, 0, sent[worker], 1.0, engine.take_events(), False), choices.byte())
        sent[worker] += 1
        tokens, salt = Traffic(engine, choices, salts=salts, longest=30).arrive()
        subjects.check_prompt(tokens, Scope(salt=salt))
        assert tokens_of(subjects.by_event, tokens[:-1], Scope(salt=salt), worker) == engine.cached(tokens, salt) * size
    subjects.check_state()


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
    assert (index.stats().blocks, count_orphans(index)) == (0, 0)
    assert index.stats().bytes <= baseline + SLACK * len(ALL_WORKERS)


def test_memory_returns_to_the_baseline_when_every_block_is_removed() -> None:
    """Removals alone free the memory, in another order than the stores, with copies, orphans and several tiers."""
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
    assert (index.stats().blocks, count_orphans(index)) == (0, 0)
    assert index.stats().bytes <= baseline + SLACK


# --- many deliveries at once ------------------------------------------------------------------------------------------------


def to_delivery(step: Batch | Reset | Gap, choice: int) -> Batch | RawBatch | Reset | Gap:
    """Return the step as events, as a payload, or as a payload that is damaged or contains unknown fields."""
    if not isinstance(step, Batch) or choice < 60:
        return step
    payload = encode_in_dialect(step, choice)
    if choice > 200:
        payload = (b"", payload[:-2], b"\x94" + payload[1:] + b"\xc0", batch_of(make_store(tomorrow=1), 5))[choice % 4]
    return RawBatch(step.source, step.rank, step.incarnation, step.seq, False, payload)


def has_same_state(one: PrefixIndex, other: PrefixIndex) -> bool:
    state = [(index.workers(), index.stats().wire_rejected) for index in (one, other)]
    return state[0] == state[1] and all(one.digest(worker) == other.digest(worker) for worker in workers_of(one))


@settings(max_examples=20)
@given(histories)
def test_applying_many_deliveries_equals_applying_each(data: bytes) -> None:
    choices = Choices(data)
    steps = [step for step in Adversary(choices).steps() if not isinstance(step, Remove | Admit | Label)]
    deliveries = [to_delivery(step, data[at % len(data)]) for at, step in enumerate(steps)]
    each, many = PrefixIndex(), PrefixIndex()
    cut = len(deliveries) * data[0] // 256
    found = many.apply_many(deliveries[:cut]) + many.apply_many(iter(deliveries[cut:]))
    assert found == [each.apply(delivery) for delivery in deliveries]
    assert has_same_state(each, many)


def test_a_long_run_of_payloads_is_applied_in_order() -> None:
    """The run is longer than one call into the native module. Some payloads are read in Python, and one is not a batch."""
    odd: dict[int, dict[str, Any]] = {
        7: {"tomorrow": 1},
        255: {"block_hashes": [b"x" * 32]},
        256: {"block_size": "x"},
        600: {"tomorrow": 2},
    }
    payloads = [batch_of(make_store(**{"block_hashes": [at], "token_ids": [at, 1], **odd.get(at, {})})) for at in range(700)]
    payloads[300] = b"\xc1"
    each, many = PrefixIndex(), PrefixIndex()
    deliveries = [RawBatch("a", 0, 0, at, False, payload) for at, payload in enumerate(payloads)]
    assert many.apply_many(deliveries) == [each.apply(delivery) for delivery in deliveries]
    assert has_same_state(each, many)
    assert many.stats().blocks == 698


def test_a_run_of_payloads_returns_the_outcomes_that_are_not_plain_applied() -> None:
    """Outcomes are keyed by position, and the state is equal after clears, events that only Python decodes, and duplicates."""
    odd: dict[int, dict[str, Any]] = {7: {"tomorrow": 1}, 255: {"block_hashes": [b"x" * 32]}, 256: {"block_size": "x"}}
    payloads = [batch_of(make_store(**{"block_hashes": [at], "token_ids": [at, 1], **odd.get(at, {})})) for at in range(600)]
    payloads[300], payloads[5] = b"\xc1", batch_of({"type": "AllBlocksCleared"})
    each, many = PrefixIndex(), PrefixIndex()
    outcomes = [each.apply(RawBatch("a", 3, 0, 100 + at, False, payload)) for at, payload in enumerate(payloads)]
    found = many.apply_payloads(("a", 3), 0, 100, payloads)
    assert found == {at: outcome for at, outcome in enumerate(outcomes) if outcome != ApplyResult("applied")}
    assert list(found) == [5, 256, 300]
    assert has_same_state(each, many)
    assert [outcome.status for outcome in many.apply_payloads(("a", 3), 0, 699, payloads[:2]).values()] == ["duplicate"]
    assert many.apply_payloads(("a", 3), 0, 701, []) == {}


# --- threads ----------------------------------------------------------------------------------------------------------------

BLOCKS, STEP = 20_000, 1_000
"""A step is much more than `WORTH_RELEASING` and `BLOCKS_PER_HOLD` of the native module, so threads overlap inside it."""
TOKENS = array("I", range(2 * BLOCKS))
ROUNDS = 5
"""Threads overlap differently in each round."""


def payload_of(event: KVEvent) -> bytes:
    return encode_batch(KVEventBatch(1.0, [event]))


def store_payloads() -> list[bytes]:
    """Return stores of `TOKENS` as payloads of `STEP` blocks. The hash of a block is its number, from 1 on."""
    firsts = range(0, BLOCKS, STEP)
    tokens = [TOKENS[2 * first : 2 * (first + STEP)] for first in firsts]
    ranges = [range(first + 1, first + STEP + 1) for first in firsts]
    return [payload_of(store(blocks, part, 2, blocks[0] - 1 or None)) for blocks, part in zip(ranges, tokens, strict=True)]


def removal_payloads() -> list[bytes]:
    """Return removals of the same blocks from the end, so that the rest is always a prefix."""
    return [payload_of(removal(*range(last, last - STEP, -1))) for last in range(BLOCKS, 0, -STEP)]


class ReadCounter:
    """Counts the reads of each reader, so that a writer can wait until all readers have read the latest write."""

    def __init__(self, readers: int) -> None:
        self._reads = [0] * readers
        self._changed = threading.Condition()

    def record_read(self, reader: int) -> None:
        with self._changed:
            self._reads[reader] += 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until each reader has begun and ended a read. The first read might have begun before, so wait for two."""
        with self._changed:
            wanted = [reads + 2 for reads in self._reads]
            assert self._changed.wait_for(lambda: all(map(ge, self._reads, wanted)), 60), "a reader has stopped"


class Writer:
    """Applies payloads in order. A reader can see the state after any number of payloads from `done` to `begun`.

    With a `read_counter`, the writer waits for the readers after every second payload. The other payloads might be applied
    during a read, depending on how threads are scheduled.
    """

    def __init__(self, index: PrefixIndex, source: str, payloads: list[bytes], read_counter: ReadCounter | None = None) -> None:
        self.index, self.source, self.payloads, self.read_counter = index, source, payloads, read_counter
        self.begun = self.done = 0

    def __call__(self) -> None:
        first = next((info.last_seq + 1 for info in self.index.workers() if info.source == self.source), 0)
        for at, payload in enumerate(self.payloads):
            self.begun = at + 1
            assert self.index.apply_payload(self.source, 0, first + at, payload).status == "applied"
            self.done = at + 1
            if self.read_counter is not None and at % 2:
                self.read_counter.wait()


def run_in_threads(writers: list[Callable[[], None]], readers: list[Callable[[], object]]) -> None:
    """Run each writer once. Run each reader repeatedly until all writers are done, and once more. Threads switch often."""
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
    """Three readers run beside one writer. Each answer is a state between what was applied before the call and what was begun
    when it returned. The matches of a stream without a writer never change. Each reader sees at least every second state."""

    def check_read(writer: Writer, reader: int, read: Callable[[], list[int]]) -> None:
        before = writer.done
        answers = read()
        after = writer.begun
        low, high = (before, after) if growing else (BLOCKS // STEP - after, BLOCKS // STEP - before)
        for blocks in answers:
            assert low * STEP <= blocks <= high * STEP
            seen[reader].add(blocks)
        read_counter.record_read(reader)

    def depth(match: Match) -> int:
        found = tokens_by_level(match)
        assert found["still", 0] == (100,) * 4
        hit = found.get(("a", 0), (0, 0, 0, 0))
        assert hit == (hit[0],) * 4
        return hit[0] // 2

    for _ in range(ROUNDS):
        index, read_counter = PrefixIndex(), ReadCounter(3)
        seen: list[set[int]] = [set(), set(), set()]
        Feed(index, "still")(store(range(1, 51), TOKENS[:100], 2))
        if not growing:
            Writer(index, "a", STORES)()
        writer = Writer(index, "a", STORES if growing else REMOVALS, read_counter)
        readers: list[Callable[[], list[int]]] = [
            lambda: [depth(index.match(TOKENS))],  # noqa: B023 - read within its round
            lambda: [depth(match) for match in index.match_many([TOKENS])],  # noqa: B023
            lambda: [index.stats().blocks - 50],  # noqa: B023
        ]
        run_in_threads([writer], [partial(check_read, writer, at, read) for at, read in enumerate(readers)])
        assert tokens_of(index, TOKENS) == (2 * BLOCKS if growing else 0)
        assert min(map(len, seen)) >= len(writer.payloads) // 2


def test_readers_always_find_the_blocks_that_a_writer_does_not_touch() -> None:
    """A writer repeatedly removes the second half of a prefix and stores it again. Readers always find the first half."""
    index, read_counter = PrefixIndex(), ReadCounter(3)
    half = BLOCKS // STEP // 2
    Writer(index, "a", STORES)()
    seen: list[set[int]] = [set(), set(), set()]

    def read(reader: int) -> None:
        blocks = tokens_of(index, TOKENS) // 2
        assert BLOCKS // 2 <= blocks <= BLOCKS
        seen[reader].add(blocks)
        read_counter.record_read(reader)

    for _ in range(ROUNDS):
        writer = Writer(index, "a", REMOVALS[:half] + STORES[half:], read_counter)
        run_in_threads([writer], [partial(read, reader) for reader in range(3)])
        assert tokens_of(index, TOKENS) == 2 * BLOCKS
    assert min(map(len, seen)) >= half // 2


def test_writers_of_the_same_blocks_do_not_disturb_each_other() -> None:
    """Three streams store the same blocks, and another worker is added and removed. Each holds the blocks of its deliveries."""
    expected = PrefixIndex()
    Writer(expected, "a", STORES)()
    for _ in range(3):
        index = PrefixIndex()

        def visit(index: PrefixIndex = index) -> None:
            for visit_number in range(10):
                for seq, payload in enumerate(STORES[:3]):
                    index.apply_payload("visitor", visit_number, seq, payload)
                assert index.remove_worker("visitor") == 3 * STEP

        writers = [
            Writer(index, "a", STORES),
            Writer(index, "b", STORES + REMOVALS + STORES),
            Writer(index, "c", STORES + REMOVALS),
        ]
        run_in_threads([*writers, visit], [partial(index.match, TOKENS)])
        assert index.digest("a") == index.digest("b") == expected.digest("a")
        assert {info.source: info.blocks for info in index.workers()} == {"a": BLOCKS, "b": BLOCKS, "c": 0}
        assert index.stats().unique_blocks == BLOCKS


STORES, REMOVALS = store_payloads(), removal_payloads()
