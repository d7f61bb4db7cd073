"""The index keeps bounds of the copies of a block that an engine can have, if the stream does not say how many.

A model of vLLM's `BlockPool` plays the engine. It computes prompts again although their blocks are cached (two physical
copies of a block), evicts single copies, and re-announces the hits of requests with `kv_cache_report_mode` "full". For a group
with a sliding window, this report includes blocks before the window, which the group does not hold.
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
from kvevents.wire import dialect_for, encode_batch

WORKER = ("engine", 0)
SIZE = 4
GROUP_FACTOR = 0x9E37_79B9_7F4A_7C15
MASK = (1 << 64) - 1
FULL: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
WINDOW_TOKENS = 2 * SIZE + 1
WINDOW: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": WINDOW_TOKENS}
"""A window that needs the last two blocks of a prefix."""


MAPS = dialect_for("vllm", "0.33.0")
"""A dialect of maps, in which only stores with a group count as copies."""


class Consumer:
    """An index that applies the batches of one stream."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.seq = -1

    def send(self, *events: KVEvent) -> Any:
        self.seq += 1
        return self.index.apply(
            RawBatch(*WORKER, 0, self.seq, False, encode_batch(KVEventBatch(1.0, list(events)), MAPS))
        ).report

    def match(self, tokens: list[int]) -> tuple[int, int]:
        """Return how many tokens the worker might hold and how many it certainly holds."""
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
    """Return a store of `count` blocks of one prompt from block `first` on. The hash of block n is n + 1."""
    parent = first or None
    given: dict[str, Any] = {"medium": "GPU", "group_idx": 0, **fields}
    return BlockStored(list(range(first + 1, first + count + 1)), parent, tokens_of(count, first), SIZE, **given)


def removed(*blocks: int, group: int | None = None, **fields: Any) -> BlockRemoved:
    return BlockRemoved([block + 1 for block in blocks], "GPU", group, **fields)


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


# --- one group ---------------------------------------------------------------------------------------------------------------


def test_after_a_reannounced_hit_the_first_removal_makes_a_block_uncertain(consumer: Consumer) -> None:
    """vLLM stores once, announces again and evicts once. The index still matches 16 tokens, but not all of them are certain."""
    consumer.send(stored(4))
    consumer.send(stored(4))
    assert consumer.match(tokens_of(4)) == (16, 16)
    consumer.send(removed(3), removed(2))
    assert consumer.match(tokens_of(4)) == (16, 8)
    assert consumer.uncertain == 2
    consumer.send(removed(3), removed(2))
    assert consumer.match(tokens_of(4)) == (8, 8)
    assert consumer.uncertain == 0


def test_two_real_copies_still_match_after_one_removal(consumer: Consumer) -> None:
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


@pytest.mark.parametrize("scope", [{}, {"medium": "GPU"}, {"medium": "*"}])
def test_repeated_stores_before_a_clear_concern_no_later_stores(consumer: Consumer, scope: dict[str, Any]) -> None:
    """One batch repeats the stores of both groups, and stores the blocks again after a clear."""
    window = BlockStored([1, 2], None, [], SIZE, medium="GPU", **WINDOW)
    consumer.send(stored(2, **FULL), window)
    end = AllBlocksCleared(unknown_fields=scope or None)
    consumer.send(stored(2, **FULL), window, end, stored(2, **FULL), window)
    assert (consumer.match(tokens_of(2)), consumer.uncertain) == ((8, 8), 0)


def test_a_block_that_is_uncertain_on_one_tier_can_be_certain_on_another(consumer: Consumer) -> None:
    """The block might not be on the GPU but is in host memory. The worker holds the whole prompt, but maybe not on the GPU."""
    consumer.send(stored(2), stored(2), removed(1), BlockStored([2], None, [], 0, medium="CPU"))
    found = consumer.index.match(tokens_of(2)).get(*WORKER)
    assert found is not None
    assert (found.tokens, found.certain, found.is_certain) == (8, 8, False)
    assert "certain" not in repr(found) or "8 of them certain" in repr(found)


@pytest.mark.parametrize("fields", [{"origin": "REUSED"}, {"origin": "NEW"}])
def test_proposed_fields_of_a_store_do_not_change_the_copies(consumer: Consumer, fields: dict[str, Any]) -> None:
    """`origin` (vllm#51699) is an unknown field: a store of a block that is held is perhaps one more copy."""
    consumer.send(stored(2), stored(2, unknown_fields=fields), removed(1))
    assert consumer.match(tokens_of(2)) == (8, 4)


def test_proposed_fields_of_a_removal_do_not_change_the_copies(consumer: Consumer) -> None:
    """`remaining_copy_counts` (vllm#48933) is an unknown field: a removal is one copy less."""
    consumer.send(stored(2), stored(2), removed(0, 1, unknown_fields={"remaining_copy_counts": [0, 2]}))
    assert consumer.match(tokens_of(2)) == (8, 0)
    assert bounds(consumer.index) == {(1, 0): (0, 1), (2, 0): (0, 1)}


# --- logical caches ----------------------------------------------------------------------------------------------------------


def plain(number: int, *, parent: int | None = None, **fields: Any) -> BlockStored:
    """Return a store of one block without a group, as SGLang announces it."""
    return BlockStored([number], parent, tokens_of(1, number - 1), SIZE, **{"medium": "GPU", **fields})


LOGICAL: dict[str, tuple[list[KVEvent], dict[str, Any]]] = {
    "sglang": ([], {}),
    "sglang's host tier": ([], {"medium": "CPU_PINNED"}),
    "tensorrt-llm": ([], {"unknown_fields": {"mm_keys": [[]]}}),
    "lmcache beside vllm": ([stored(1, first=8, group_idx=0)], {"medium": "CPU"}),
    "a remote store beside vllm": ([stored(1, first=8, group_idx=0)], {"locality": "REMOTE"}),
}


@pytest.mark.parametrize(("before", "fields"), LOGICAL.values(), ids=LOGICAL)
def test_a_logical_cache_holds_a_block_once(consumer: Consumer, before: list[KVEvent], fields: dict[str, Any]) -> None:
    """However often it is announced, the first removal ends it, in the index, a snapshot of it and a compacted history."""
    compactor = Compactor.create()
    assert compactor is not None
    where: dict[str, Any] = {"medium": "GPU"} | {name: fields[name] for name in ("medium", "locality") if name in fields}
    events = [*before, *[plain(number, parent=number - 1 or None, **fields) for number in (1, 2, 1, 2, 1, 3)]]
    for event in events:
        consumer.send(event)
        compactor.append(encode_batch(KVEventBatch(1.0, [event]), MAPS))
    late = late_consumer(compactor)
    copied, file = Consumer(), io.BytesIO()
    consumer.index.snapshot(file)
    file.seek(0)
    copied.index.restore(file)
    copied.seq = consumer.seq
    for one in (consumer, late, copied):
        assert one.match(tokens_of(3)) == (12, 12)
        assert one.index.digest(WORKER) == consumer.index.digest(WORKER)
    for one in (consumer, late, copied):
        one.send(BlockRemoved([3], **where), BlockRemoved([2], **where))
        assert (one.match(tokens_of(3)), one.uncertain) == ((4, 4), 0)
        one.send(BlockRemoved([1], **where))
        assert one.match(tokens_of(3)) == (0, 0)


@pytest.mark.parametrize(
    ("engine", "release", "left"), [("vllm", "0.9.1", 4), ("vllm", "0.13.0", 4), ("vllm", "0.17.0", 4), ("sglang", "0.5.20", 0)]
)
@pytest.mark.parametrize("ts", [1.0, 1_790_000_000_000])
def test_stores_of_vllm_without_a_group_count_as_copies(engine: str, release: str, left: int, ts: float) -> None:
    """These stores are arrays without a field for a group. SGLang, which sends maps from 0.5.20 on, holds each block once.

    Batches with milliseconds are read by the tolerant decoder.
    """
    index, row = PrefixIndex(), dialect_for(engine, release)
    events: list[KVEvent] = [plain(1), plain(1), BlockRemoved([1], "GPU")]
    for seq, event in enumerate(events):
        index.apply(RawBatch(*WORKER, 0, seq, False, encode_batch(KVEventBatch(ts, [event]), row)))
    found = index.match(tokens_of(1)).get(*WORKER)
    assert ((0, 0) if found is None else (found.tokens, found.certain)) == (left, 0)


def test_a_pending_block_of_a_logical_cache_is_pending_once(consumer: Consumer) -> None:
    consumer.send(plain(2, parent=1), plain(2, parent=1), plain(2, parent=1))
    assert consumer.index.worker(WORKER).orphans == 1
    consumer.send(BlockRemoved([2], "GPU"), plain(1))
    assert consumer.match(tokens_of(2)) == (4, 4)


# --- attestations ------------------------------------------------------------------------------------------------------------


def attestation_event(copies: list[tuple[int, int]]) -> BlockRemoved:
    digest = sum((block + 1) ^ (group * GROUP_FACTOR & MASK) for block, group in copies) & MASK
    return BlockRemoved([], heartbeat=Heartbeat("f" * 32, 5.0, attestation=digest))


def test_a_matching_attestation_makes_present_and_later_copies_certain(consumer: Consumer) -> None:
    consumer.send(stored(2), stored(2), removed(1))
    assert consumer.match(tokens_of(2)) == (8, 4)
    assert consumer.send(attestation_event([(0, 0), (0, 0), (1, 0)])).attestation_matches is True
    assert (consumer.match(tokens_of(2)), consumer.uncertain) == ((8, 8), 0)
    consumer.send(stored(2), removed(0), removed(0))
    assert consumer.match(tokens_of(2)) == (8, 8)


def test_a_different_attestation_makes_no_copy_certain(consumer: Consumer) -> None:
    consumer.send(stored(2), stored(2), removed(1))
    assert consumer.send(attestation_event([(0, 0)])).attestation_matches is False
    assert consumer.match(tokens_of(2)) == (8, 4)


# --- snapshots and compaction ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("merged", [False, True])
def test_a_snapshot_contains_the_bounds_of_copies(consumer: Consumer, merged: bool) -> None:
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
    payload = encode_batch(KVEventBatch(1.0, [removed(2), attestation_event([(0, 0), (0, 0), (1, 0), (1, 0)])]))
    report = other.apply(RawBatch(*WORKER, 0, consumer.seq + 1, False, payload)).report
    assert report is not None
    assert report.attestation_matches is True


def bounds(index: PrefixIndex) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the fewest and the most copies of each block, by hash and group."""
    return {(block.hash, block.group): (block.certain_copies, block.copies) for block in index.blocks(WORKER)}


def late_consumer(compactor: Compactor) -> Consumer:
    """Return a consumer that has received the snapshot of a compactor."""
    late, history = Consumer(), compactor.snapshot_pieces(1 << 62)
    assert history is not None

    def send(batch: KVEventBatch) -> bytes:
        late.send(*batch.events)
        return b""

    encode_snapshot(history, 1.0, 0, send, 1 << 62)
    return late


def test_compacted_history_has_the_same_bounds_of_copies(consumer: Consumer) -> None:
    """A late consumer that receives a snapshot has the same bounds as a consumer that received all events."""
    events: list[KVEvent] = [stored(4), stored(4), stored(2), removed(3), removed(1), removed(0), stored(1)]
    compactor = Compactor.create()
    assert compactor is not None
    for event in events:
        consumer.send(event)
        compactor.append(encode_batch(KVEventBatch(1.0, [event]), MAPS))
    late = late_consumer(compactor)
    assert bounds(late.index) == bounds(consumer.index)
    assert bounds(late.index) == {(1, 0): (1, 3), (2, 0): (0, 2), (3, 0): (1, 2), (4, 0): (0, 1)}
    assert late.index.digest(WORKER) == consumer.index.digest(WORKER)


# --- sliding windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_first", [False, True])
def test_a_reannouncement_makes_no_evicted_window_certain(consumer: Consumer, window_first: bool) -> None:
    """The window group has evicted blocks 0 and 1 of four. A re-announcement contains all four in both groups, in any order."""
    consumer.send(stored(4, **FULL), stored(4, **WINDOW))
    consumer.send(removed(0, group=1), removed(1, group=1))
    assert consumer.match(tokens_of(2)) == (0, 0)
    report = [stored(4, **FULL), stored(4, **WINDOW)]
    consumer.send(*(reversed(report) if window_first else report))
    assert consumer.match(tokens_of(2)) == (8, 0)
    assert consumer.match(tokens_of(4)) == (16, 16)


def test_a_window_that_is_cleared_in_the_batch_of_its_reannouncement_is_gone(consumer: Consumer) -> None:
    consumer.send(stored(4, **FULL))
    consumer.send(stored(4, **FULL), stored(4, **WINDOW), AllBlocksCleared())
    assert (consumer.match(tokens_of(4)), consumer.uncertain) == ((0, 0), 0)


def test_a_window_that_is_extended_without_a_reannouncement_is_certain(consumer: Consumer) -> None:
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

    def is_held(self, prompt: int, block: int, group: int) -> bool:
        return self.copies[prompt, block, group] > 0

    def longest_hit(self, prompt: int) -> int:
        """Return the number of blocks of the longest prefix that the engine finds cached."""
        dense = next((block for block in range(BLOCKS) if not self.is_held(prompt, block, 0)), BLOCKS)
        if 1 not in self.groups:
            return dense
        for length in range(dense, 0, -1):
            if all(self.is_held(prompt, block, 1) for block in range(max(0, length - 2), length)):
                return length
        return 0

    @rule(prompt=st.integers(0, PROMPTS - 1), count=st.integers(1, BLOCKS), report=st.booleans(), twice=st.booleans())
    def request(self, prompt: int, count: int, report: bool, twice: bool) -> None:
        """Announce the hit again if `report` is set, and compute the missing blocks; twice for two concurrent requests."""
        longest_hit = min(self.longest_hit(prompt), count)
        events: list[KVEvent] = []
        if report and longest_hit and self.reports:
            events += [self.event(prompt, 0, longest_hit, group) for group in self.groups]
        for _ in range(1 + twice):
            for group in self.groups if longest_hit < count else ():
                events.append(self.event(prompt, longest_hit, count - longest_hit, group))
                self.copies.update((prompt, block, group) for block in range(longest_hit, count))
        if events:
            self.consumer.send(*events)

    @rule(prompt=st.integers(0, PROMPTS - 1), block=st.integers(0, BLOCKS - 1), group=st.integers(0, 1))
    def evict(self, prompt: int, block: int, group: int) -> None:
        if self.is_held(prompt, block, group):
            self.copies[prompt, block, group] -= 1
            self.consumer.send(BlockRemoved([self.hash_of(prompt, block)], "GPU", group))

    @rule()
    def reset(self) -> None:
        self.copies.clear()
        self.consumer.send(AllBlocksCleared())

    @rule()
    def attest(self) -> None:
        """Send the engine's own digest if the upper bounds are right. From then on the publisher omits re-announcements."""
        if self.consumer.seq < 0:
            return
        blocks = list(self.consumer.index.blocks(WORKER))
        upper = Counter(
            {((block.hash - 1) // BLOCKS, (block.hash - 1) % BLOCKS, block.group): block.copies for block in blocks}
        )
        if upper == +self.copies:
            total = sum(
                count * (self.hash_of(prompt, block) ^ (group * GROUP_FACTOR & MASK))
                for (prompt, block, group), count in self.copies.items()
            )
            self.reports = False
            heartbeat = Heartbeat("f" * 32, 5.0, attestation=total & MASK)
            assert self.consumer.send(BlockRemoved([], heartbeat=heartbeat)).attestation_matches is True
            assert self.consumer.uncertain == 0

    @invariant()
    def matches_bracket_the_hit_of_the_engine(self) -> None:
        """The engine finds at least the certain tokens and at most the matched tokens, so a certain match is exact."""
        if not hasattr(self, "consumer"):
            return
        for prompt in range(PROMPTS):
            upper, certain = self.consumer.match(self.tokens(prompt))
            assert certain <= self.longest_hit(prompt) * SIZE <= upper

    @invariant()
    def copies_are_within_their_bounds(self) -> None:
        if not hasattr(self, "consumer") or self.consumer.seq < 0:
            return
        listed = Counter[tuple[int, int, int]]()
        for block in self.consumer.index.blocks(WORKER):
            place = ((block.hash - 1) // BLOCKS, (block.hash - 1) % BLOCKS, block.group)
            assert block.certain_copies <= self.copies[place] <= block.copies
            listed[place] += 1
        assert all(listed[place] for place, count in self.copies.items() if count)
        assert self.reports or all(block.copies == block.certain_copies for block in self.consumer.index.blocks(WORKER))
        uncertain_blocks = sum(block.certain_copies == 0 for block in self.consumer.index.blocks(WORKER))
        assert self.consumer.uncertain == uncertain_blocks


Pool.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPool: Callable[..., Any] = Pool.TestCase
