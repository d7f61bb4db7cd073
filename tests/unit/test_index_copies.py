"""How many copies of a block an engine has, where its stream does not say: re-announcements, removals, windows, attestations.

A model of vLLM's `BlockPool` plays the engine. It computes prompts again although their blocks are cached (two physical
copies of a block), evicts single copies, and re-announces the hits of requests with `kv_cache_report_mode` "full". Of a group
with a sliding window such a report includes blocks before the window, which the group does not hold.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher.compaction import Compactor, encode_snapshot
from kvevents.stream import RawBatch
from kvevents.wire import encode_batch

WORKER = ("engine", 0)
SIZE = 4
_GROUP = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1
FULL: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
WINDOW_TOKENS = 2 * SIZE + 1
WINDOW: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": WINDOW_TOKENS}
"""A window that needs the last two blocks of a prefix."""


class Consumer:
    """An index that is fed one stream."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.seq = -1

    def send(self, *events: KVEvent) -> Any:
        self.seq += 1
        return self.index.apply(RawBatch(*WORKER, 0, self.seq, False, encode_batch(KVEventBatch(1.0, list(events))))).report

    def match(self, tokens: list[int]) -> tuple[int, int]:
        """Tokens that the worker may hold and those that it certainly holds."""
        found = self.index.match(tokens).get(*WORKER)
        if found is None:
            return 0, 0
        assert found.is_certain == (found.certain == found.tokens)
        return found.tokens, found.certain

    @property
    def uncertain(self) -> int:
        return self.index.worker(WORKER).uncertain


def tokens_of(count: int, first: int = 0) -> list[int]:
    return list(range(first * SIZE, (first + count) * SIZE))


def stored(count: int, *, first: int = 0, **fields: Any) -> BlockStored:
    """Blocks `first` and the following of one prompt; the hash of block n is n + 1."""
    parent = first or None
    return BlockStored(list(range(first + 1, first + count + 1)), parent, tokens_of(count, first), SIZE, medium="GPU", **fields)


def removed(*blocks: int, group: int | None = None, **fields: Any) -> BlockRemoved:
    return BlockRemoved([block + 1 for block in blocks], "GPU", group, **fields)


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


# --- one group ---------------------------------------------------------------------------------------------------------------


def test_a_report_of_a_hit_costs_certainty_at_the_first_removal(consumer: Consumer) -> None:
    """vLLM stores once, announces again, evicts once: the index may say 16 tokens, but never that they are certain."""
    consumer.send(stored(4))
    consumer.send(stored(4))
    assert consumer.match(tokens_of(4)) == (16, 16)
    consumer.send(removed(3), removed(2))
    assert consumer.match(tokens_of(4)) == (16, 8)
    assert consumer.uncertain == 2
    consumer.send(removed(3), removed(2))
    assert consumer.match(tokens_of(4)) == (8, 8)
    assert consumer.uncertain == 0


def test_two_true_copies_keep_their_credit(consumer: Consumer) -> None:
    consumer.send(stored(2), stored(2))
    consumer.send(removed(1))
    assert consumer.match(tokens_of(2)) == (8, 4)
    consumer.send(stored(2))
    assert consumer.match(tokens_of(2)) == (8, 8)


@pytest.mark.parametrize("end", [AllBlocksCleared(), AllBlocksCleared(unknown_fields={"medium": "GPU"})])
def test_a_clear_ends_uncertainty(consumer: Consumer, end: KVEvent) -> None:
    consumer.send(stored(2), stored(2), removed(1))
    consumer.send(end, stored(2))
    assert (consumer.match(tokens_of(2)), consumer.uncertain) == ((8, 8), 0)


def test_another_tier_makes_a_block_certain_there(consumer: Consumer) -> None:
    """On the GPU it might be gone, in host memory it is not: all of the prompt is held, but not certainly on the GPU."""
    consumer.send(stored(2), stored(2), removed(1), BlockStored([2], None, [], 0, medium="CPU"))
    found = consumer.index.match(tokens_of(2)).get(*WORKER)
    assert found is not None
    assert (found.tokens, found.certain, found.is_certain) == (8, 8, False)
    assert "certain" not in repr(found) or "8 of them certain" in repr(found)


def test_an_origin_says_what_a_store_is(consumer: Consumer) -> None:
    """vllm#51699: NEW is another copy, REUSED is not."""
    consumer.send(stored(2, origin="NEW"), stored(2, origin="NEW"), stored(2, origin="REUSED"))
    consumer.send(removed(0), removed(1))
    assert consumer.match(tokens_of(2)) == (8, 8)
    consumer.send(removed(0), removed(1))
    assert consumer.match(tokens_of(2)) == (0, 0)
    consumer.send(stored(1, origin="tomorrow"), stored(1, origin="tomorrow"), removed(0))
    assert consumer.match(tokens_of(1)) == (4, 0)


def test_a_reused_block_that_is_not_known_is_held(consumer: Consumer) -> None:
    """A consumer that came late learns of it so."""
    consumer.send(stored(2, origin="REUSED"))
    assert consumer.match(tokens_of(2)) == (8, 8)


def test_a_reused_block_that_waits_is_not_counted_twice(consumer: Consumer) -> None:
    consumer.send(stored(1, first=1), stored(1, first=1, origin="REUSED"), stored(1))
    consumer.send(removed(1))
    assert consumer.match(tokens_of(2)) == (4, 4)


def test_remaining_copy_counts_say_how_many_are_left(consumer: Consumer) -> None:
    """vllm#48933: the number is certain from then on, however often the blocks were announced."""
    consumer.send(stored(3), stored(3), stored(3))
    consumer.send(removed(0, 1, 2, remaining_copy_counts=[1, 2, 0]))
    assert consumer.match(tokens_of(3)) == (8, 8)
    counts = {block.hash: (block.copies, block.certain_copies) for block in consumer.index.blocks(WORKER)}
    assert counts == {1: (1, 1), 2: (2, 2)}
    consumer.send(removed(0, remaining_copy_counts=[0]), removed(1, remaining_copy_counts=[1]))
    assert consumer.match(tokens_of(3)) == (0, 0)
    other = Consumer()
    other.send(stored(1, first=1), removed(1))  # what waited and is gone
    assert consumer.index.digest(WORKER) != other.index.digest(WORKER)
    other.send(stored(2), removed(0))
    assert consumer.index.digest(WORKER) == other.index.digest(WORKER)


@pytest.mark.parametrize("counts", [[1], [1, 2, 3], [-1, 0], []])
def test_counts_that_do_not_fit_say_nothing(consumer: Consumer, counts: list[int]) -> None:
    consumer.send(stored(2), stored(2))
    consumer.send(removed(0, 1, remaining_copy_counts=counts))
    assert consumer.match(tokens_of(2)) == (8, 0)


def test_removals_with_counts_in_a_row_are_read_one_by_one(consumer: Consumer) -> None:
    """Engines send one removal a block, and equal ones in a row are read together."""
    consumer.send(stored(3), stored(3))
    consumer.send(*(removed(block, remaining_copy_counts=[1]) for block in (2, 1, 0)))
    assert consumer.match(tokens_of(3)) == (12, 12)


# --- attestations ------------------------------------------------------------------------------------------------------------


def attested(copies: list[tuple[int, int]]) -> BlockRemoved:
    digest = sum((block + 1) ^ (group * _GROUP & _MASK) for block, group in copies) & _MASK
    return BlockRemoved([], heartbeat=Heartbeat("f" * 32, 5.0, attestation=digest))


def test_an_attestation_that_agrees_makes_copies_certain_and_keeps_them_so(consumer: Consumer) -> None:
    consumer.send(stored(2), stored(2), removed(1))
    assert consumer.match(tokens_of(2)) == (8, 4)
    assert consumer.send(attested([(0, 0), (0, 0), (1, 0)])).attestation_matches is True
    assert (consumer.match(tokens_of(2)), consumer.uncertain) == ((8, 8), 0)
    consumer.send(stored(2), removed(0), removed(0))
    assert consumer.match(tokens_of(2)) == (8, 8)


def test_an_attestation_that_differs_makes_nothing_certain(consumer: Consumer) -> None:
    consumer.send(stored(2), stored(2), removed(1))
    assert consumer.send(attested([(0, 0)])).attestation_matches is False
    assert consumer.match(tokens_of(2)) == (8, 4)


# --- what is saved -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("merged", [False, True])
def test_snapshots_have_the_bounds_and_the_promise(consumer: Consumer, merged: bool) -> None:
    consumer.send(stored(3), stored(3), removed(2))
    other = PrefixIndex()
    file = io.BytesIO()
    consumer.index.snapshot(file)
    file.seek(0)
    if merged:
        other.apply(RawBatch("another", 0, 0, 0, False, encode_batch(KVEventBatch(1.0, [stored(3)]))))
        other.merge(file)
    else:
        other.restore(file)
    found = other.match(tokens_of(3)).get(*WORKER)
    assert found is not None
    assert (found.tokens, found.certain) == (12, 8)
    assert other.digest(WORKER) == consumer.index.digest(WORKER)
    assert other.worker(WORKER).uncertain == 1
    payload = encode_batch(KVEventBatch(1.0, [removed(2), attested([(0, 0), (0, 0), (1, 0), (1, 0)])]))
    report = other.apply(RawBatch(*WORKER, 0, consumer.seq + 1, False, payload)).report
    assert report is not None
    assert report.attestation_matches is True


def bounds(index: PrefixIndex) -> dict[tuple[int, int], tuple[int, int]]:
    """The bounds of the copies of each block, by hash and group."""
    return {(block.hash, block.group): (block.certain_copies, block.copies) for block in index.blocks(WORKER)}


def late_consumer(compactor: Compactor) -> Consumer:
    """A consumer that is given the state of a compactor."""
    late, history = Consumer(), compactor.events()
    assert history is not None

    def send(batch: KVEventBatch) -> bytes:
        late.send(*batch.events)
        return b""

    encode_snapshot(history, 1.0, 0, send, 1 << 62)
    return late


def test_a_compacted_history_has_the_same_bounds(consumer: Consumer) -> None:
    """A late consumer that is given the state instead of the events is as uncertain as one that saw them."""
    events: list[KVEvent] = [stored(4), stored(4), stored(2), removed(3), removed(1), removed(0), stored(1)]
    compactor = Compactor.create()
    assert compactor is not None
    for event in events:
        consumer.send(event)
        compactor.append(encode_batch(KVEventBatch(1.0, [event])))
    late = late_consumer(compactor)
    assert bounds(late.index) == bounds(consumer.index)
    assert bounds(late.index) == {(1, 0): (1, 3), (2, 0): (0, 2), (3, 0): (1, 2), (4, 0): (0, 1)}
    assert late.index.digest(WORKER) == consumer.index.digest(WORKER)


def test_a_compacted_history_knows_origins_and_counts(consumer: Consumer) -> None:
    events: list[KVEvent] = [
        stored(3),
        stored(3, origin="REUSED"),
        stored(3),
        removed(0, 1, 2, remaining_copy_counts=[1, 0, 1]),
    ]
    compactor = Compactor.create()
    assert compactor is not None
    for event in events:
        consumer.send(event)
        compactor.append(encode_batch(KVEventBatch(1.0, [event])))
    late = late_consumer(compactor)
    assert bounds(late.index) == bounds(consumer.index) == {(1, 0): (1, 1), (3, 0): (1, 1)}
    assert late.index.digest(WORKER) == consumer.index.digest(WORKER)


# --- sliding windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_first", [False, True])
def test_a_report_credits_no_window_that_is_not_there(consumer: Consumer, window_first: bool) -> None:
    """The window group has evicted blocks 0 and 1 of four. A report announces all four in both groups, in either order."""
    consumer.send(stored(4, **FULL), stored(4, **WINDOW))
    consumer.send(removed(0, group=1), removed(1, group=1))
    assert consumer.match(tokens_of(2)) == (0, 0)
    report = [stored(4, **FULL), stored(4, **WINDOW)]
    consumer.send(*(reversed(report) if window_first else report))
    assert consumer.match(tokens_of(2)) == (8, 0)
    assert consumer.match(tokens_of(4)) == (16, 16)


def test_a_window_that_an_origin_vouches_for_is_certain(consumer: Consumer) -> None:
    consumer.send(stored(4, **FULL), stored(4, **WINDOW))
    consumer.send(removed(0, group=1), removed(1, group=1))
    consumer.send(stored(4, origin="REUSED", **FULL), stored(4, origin="REUSED", **WINDOW))
    assert consumer.match(tokens_of(2)) == (0, 0)
    consumer.send(stored(4, origin="NEW", **FULL), stored(4, origin="NEW", **WINDOW))
    assert consumer.match(tokens_of(2)) == (8, 8)


def test_a_window_that_is_cleared_in_the_batch_of_its_report_is_gone(consumer: Consumer) -> None:
    consumer.send(stored(4, **FULL))
    consumer.send(stored(4, **FULL), stored(4, **WINDOW), AllBlocksCleared())
    assert (consumer.match(tokens_of(4)), consumer.uncertain) == ((0, 0), 0)


def test_a_window_that_goes_on_is_certain(consumer: Consumer) -> None:
    """Stores without a re-announcement are what they always were."""
    consumer.send(stored(2, **FULL), stored(2, **WINDOW))
    consumer.send(stored(2, first=2, **FULL), stored(2, first=2, **WINDOW), removed(0, group=1))
    assert consumer.match(tokens_of(4)) == (16, 16)
    assert consumer.uncertain == 0


# --- a model of the pool -----------------------------------------------------------------------------------------------------

PROMPTS = 3
BLOCKS = 4


class Pool(RuleBasedStateMachine):
    """vLLM's block pool with full attention and one sliding window, and an index that reads its events."""

    @initialize(hybrid=st.booleans())
    def begin(self, hybrid: bool) -> None:
        self.consumer = Consumer()
        self.copies: Counter[tuple[int, int, int]] = Counter()
        """Physical copies by prompt, block and group."""
        self.groups = (0, 1) if hybrid else (0,)
        self.reports = True

    def event(self, prompt: int, first: int, count: int, group: int) -> BlockStored:
        fields = FULL if group == 0 else WINDOW
        hashes = [self.hash_of(prompt, block) for block in range(first, first + count)]
        parent = self.hash_of(prompt, first - 1) if first else None
        tokens = self.tokens(prompt)[first * SIZE : (first + count) * SIZE]
        return BlockStored(hashes, parent, tokens, SIZE, medium="GPU", **fields)

    def hash_of(self, prompt: int, block: int) -> int:
        return 1 + prompt * BLOCKS + block

    def tokens(self, prompt: int) -> list[int]:
        return list(range(prompt * 1_000, prompt * 1_000 + BLOCKS * SIZE))

    def held(self, prompt: int, block: int, group: int) -> bool:
        return self.copies[prompt, block, group] > 0

    def hit(self, prompt: int) -> int:
        """Blocks of the longest prefix that the engine finds cached."""
        dense = next((block for block in range(BLOCKS) if not self.held(prompt, block, 0)), BLOCKS)
        if 1 not in self.groups:
            return dense
        for length in range(dense, 0, -1):
            if all(self.held(prompt, block, 1) for block in range(max(0, length - 2), length)):
                return length
        return 0

    @rule(prompt=st.integers(0, PROMPTS - 1), count=st.integers(1, BLOCKS), report=st.booleans(), twice=st.booleans())
    def request(self, prompt: int, count: int, report: bool, twice: bool) -> None:
        """Announce the hit again if the client asks for it, and compute what is missing; at once for two requests."""
        hit = min(self.hit(prompt), count)
        events: list[KVEvent] = []
        if report and hit and self.reports:
            events += [self.event(prompt, 0, hit, group) for group in self.groups]
        for _ in range(1 + twice):
            for group in self.groups if hit < count else ():
                events.append(self.event(prompt, hit, count - hit, group))
                self.copies.update((prompt, block, group) for block in range(hit, count))
        if events:
            self.consumer.send(*events)

    @rule(prompt=st.integers(0, PROMPTS - 1), block=st.integers(0, BLOCKS - 1), group=st.integers(0, 1))
    def evict(self, prompt: int, block: int, group: int) -> None:
        if self.held(prompt, block, group):
            self.copies[prompt, block, group] -= 1
            self.consumer.send(BlockRemoved([self.hash_of(prompt, block)], "GPU", group))

    @rule()
    def reset(self) -> None:
        self.copies.clear()
        self.consumer.send(AllBlocksCleared())

    @rule()
    def attest(self) -> None:
        """The engine's own digest, if it agrees. From then on the publisher leaves reports out, as it promises."""
        if self.consumer.seq < 0:
            return
        blocks = list(self.consumer.index.blocks(WORKER))
        most = Counter({((block.hash - 1) // BLOCKS, (block.hash - 1) % BLOCKS, block.group): block.copies for block in blocks})
        if most == +self.copies:
            total = sum(
                count * (self.hash_of(prompt, block) ^ (group * _GROUP & _MASK))
                for (prompt, block, group), count in self.copies.items()
            )
            self.reports = False
            heartbeat = Heartbeat("f" * 32, 5.0, attestation=total & _MASK)
            assert self.consumer.send(BlockRemoved([], heartbeat=heartbeat)).attestation_matches is True
            assert self.consumer.uncertain == 0

    @invariant()
    def what_is_certain_is_true(self) -> None:
        """The engine finds at least what is certain and at most what may be held, so an answer that is certain is exact."""
        if not hasattr(self, "consumer"):
            return
        for prompt in range(PROMPTS):
            most, certain = self.consumer.match(self.tokens(prompt))
            assert certain <= self.hit(prompt) * SIZE <= most

    @invariant()
    def copies_are_within_their_bounds(self) -> None:
        if not hasattr(self, "consumer") or self.consumer.seq < 0:
            return
        seen = Counter[tuple[int, int, int]]()
        for block in self.consumer.index.blocks(WORKER):
            place = ((block.hash - 1) // BLOCKS, (block.hash - 1) % BLOCKS, block.group)
            assert block.certain_copies <= self.copies[place] <= block.copies
            seen[place] += 1
        assert all(seen[place] for place, count in self.copies.items() if count)
        assert self.reports or all(block.copies == block.certain_copies for block in self.consumer.index.blocks(WORKER))
        doubtful = sum(block.certain_copies == 0 for block in self.consumer.index.blocks(WORKER))
        assert self.consumer.uncertain == doubtful


Pool.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPool: Callable[..., Any] = Pool.TestCase
