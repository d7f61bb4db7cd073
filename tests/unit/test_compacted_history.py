"""Compacted history compared with full history: what late consumers hold, how certain they are, and what they attest.

Streams are arbitrary. They have stores and removals in a group with full attention, one with a sliding window, one of Mamba
states and one of an unknown kind. Blocks are on two tiers; some are twins (blocks that share a hash), and there are clears.
"""

from __future__ import annotations

import io
from collections import Counter
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvevents.events import (
    ATTESTATION_MASK,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Heartbeat,
    KVEvent,
    KVEventBatch,
    attestation_term,
)
from kvevents.index import PrefixIndex
from kvevents.publisher.compaction import Compactor, encode_snapshot
from kvevents.stream import RawBatch
from kvevents.wire import encode_batch

WORKER: Final = ("engine", 0)
SIZE: Final = 4
FULL: Final[dict[str, Any]] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
WINDOW: Final[dict[str, Any]] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}
UNKNOWN: Final[dict[str, Any]] = {"group_idx": 2, "kv_cache_spec_kind": "chunked_local_attention"}
STATE: Final[dict[str, Any]] = {"group_idx": 3, "kv_cache_spec_kind": "mamba"}
GROUPS: Final = (FULL, FULL, WINDOW, WINDOW, STATE, UNKNOWN)
LENGTH: Final = 5
"""Blocks of a prompt."""

Bounds = dict[tuple[int, int, str, int], tuple[int, int]]


def store_blocks(first: int, count: int, group: dict[str, Any], medium: str = "GPU", prompt: int = 0) -> BlockStored:
    """Return a store of `count` blocks of a prompt. Block n has the hash n + 1 in all prompts, so prompts have twins."""
    tokens = [1_000 * prompt + token for token in range(first * SIZE, (first + count) * SIZE)]
    hashes = list(range(first + 1, first + count + 1))
    return BlockStored(hashes, first or None, tokens, SIZE, medium=medium, **group)


def remove_blocks(first: int, count: int, group: int, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(list(range(first + 1, first + count + 1)), medium, group)


def draw_ranges() -> st.SearchStrategy[tuple[int, int]]:
    return st.integers(0, LENGTH - 1).flatmap(lambda first: st.tuples(st.just(first), st.integers(1, LENGTH - first)))


def draw_stores(prompts: int) -> st.SearchStrategy[KVEvent]:
    return st.builds(
        lambda blocks, group, medium, prompt: store_blocks(blocks[0], blocks[1], group, medium, prompt),
        draw_ranges(),
        st.sampled_from(GROUPS),
        st.sampled_from(("GPU", "GPU", "GPU", "CPU")),
        st.integers(0, prompts - 1),
    )


def events(prompts: int) -> st.SearchStrategy[KVEvent]:
    removals = st.builds(
        lambda blocks, group, medium: remove_blocks(blocks[0], blocks[1], group, medium),
        draw_ranges(),
        st.integers(0, 3),
        st.sampled_from(("GPU", "GPU", "GPU", "CPU")),
    )
    scopes = st.sampled_from(({"medium": "GPU"}, {"medium": "CPU"}, {"group_idx": 1}, {"group_idx": 2}, {"group_idx": 3}, None))
    clears = st.builds(AllBlocksCleared, unknown_fields=scopes)
    return st.one_of(draw_stores(prompts), draw_stores(prompts), draw_stores(prompts), removals, removals, removals, clears)


class Consumer:
    """An index that receives one stream."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.seq = -1

    def send(self, batch: list[KVEvent]) -> Any:
        self.seq += 1
        return self.index.apply(RawBatch(*WORKER, 0, self.seq, False, encode_batch(KVEventBatch(1.0, batch)))).report

    @property
    def bounds(self) -> Bounds:
        """Return the fewest and the most copies of each block, by key, hash, tier and group."""
        return {
            (block.key, block.hash, block.tier, block.group): (block.certain_copies, block.copies)
            for block in self.index.blocks(WORKER)
        }

    def agrees_with(self, attestation: int) -> bool:
        """Return whether the index agrees with an attestation. The test uses a copy, so that no block becomes certain by it."""
        other, file = PrefixIndex(), io.BytesIO()
        self.index.snapshot(file)
        file.seek(0)
        other.restore(file)
        heartbeat = Heartbeat("f" * 32, 5.0, attestation=attestation)
        payload = encode_batch(KVEventBatch(1.0, [BlockRemoved([], heartbeat=heartbeat)]))
        report = other.apply(RawBatch(*WORKER, 0, self.seq + 1, False, payload)).report
        assert report is not None
        assert report.attestation_matches is not None
        return report.attestation_matches


class UnknownGroup:
    """Copies of blocks of the group of an unknown kind, on the device; no index shows them."""

    def __init__(self) -> None:
        self.copies: Counter[int] = Counter()
        self.is_known = False
        """Whether a store has announced the kind of the group."""

    def apply(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            scope = event.unknown_fields or {}
            if scope.get("medium", "GPU") == "GPU" and scope.get("group_idx", 2) == 2:
                self.copies.clear()
            return
        if event.group_idx != 2 or not isinstance(event, BlockStored | BlockRemoved):
            return
        is_store = isinstance(event, BlockStored)
        self.is_known |= is_store
        if event.medium == "GPU" and self.is_known:
            (self.copies.update if is_store else self.copies.subtract)(event.block_hashes)

    @property
    def digest(self) -> int:
        return sum(count * attestation_term(each, 2) for each, count in self.copies.items())


def make_late_consumer(compactor: Compactor) -> Consumer | None:
    """Return a consumer that receives the compacted history; None if no order of events can express it."""
    late, history = Consumer(), compactor.snapshot_pieces(1 << 62)
    if history is None:
        assert compactor.unavailable_reason is None
        return None

    def send(batch: KVEventBatch) -> bytes:
        late.send(batch.events)
        return b""

    encode_snapshot(history, 1.0, 0, send, 1 << 62)
    return late


def check_certainty(batches: list[list[KVEvent]], cut: int) -> None:
    """Check that a consumer of the history compacted before `cut` is never more certain than one that received every batch."""
    full, unknown_group, compactor, late = Consumer(), UnknownGroup(), Compactor.create(), None
    assert compactor is not None
    for number, batch in enumerate([*batches, []]):
        if number == cut:
            late = make_late_consumer(compactor)
            if late is None:
                return
        full.send(batch)
        for event in batch:
            unknown_group.apply(event)
        compactor.append(encode_batch(KVEventBatch(1.0, batch)))
        if late is None:
            continue
        late.send(batch)
        full_bounds, late_bounds = full.bounds, late.bounds
        assert {block: most for block, (_, most) in late_bounds.items()} == {
            block: most for block, (_, most) in full_bounds.items()
        }
        assert {block: least for block, (least, _) in late_bounds.items() if least > full_bounds[block][0]} == {}
        assert late.index.digest(WORKER) == full.index.digest(WORKER)
        assert late.index.worker(WORKER).uncertain >= full.index.worker(WORKER).uncertain
        if not full.index.worker(WORKER).orphans:
            held = sum(
                most * attestation_term(hash_, group)
                for (_, hash_, tier, group), (_, most) in full_bounds.items()
                if tier == "gpu"
            )
            attestation = (held + unknown_group.digest) & ATTESTATION_MASK
            assert full.agrees_with(attestation)
            assert late.agrees_with(attestation)


def draw_histories(prompts: int) -> st.SearchStrategy[list[list[KVEvent]]]:
    return st.lists(st.lists(events(prompts), min_size=1, max_size=4), min_size=1, max_size=14)


REPORT: Final[list[KVEvent]] = [store_blocks(0, 4, FULL), store_blocks(0, 4, WINDOW)]
"""Events of vLLM for a hit, which include blocks that the window does not hold."""


@given(draw_histories(1), st.integers(0, 14))
@example([[*REPORT], [remove_blocks(0, 2, 1)], REPORT], 3)
@example([[store_blocks(0, 2, UNKNOWN)], [remove_blocks(0, 3, 2)], [AllBlocksCleared({"medium": "CPU"})]], 2)
def test_a_late_consumer_is_never_more_certain_than_an_early_one(batches: list[list[KVEvent]], cut: int) -> None:
    """Histories of one prompt have copies, repeated stores of hits, and windows that a store announces and the engine lacks."""
    check_certainty(batches, min(cut, len(batches)))


@given(draw_histories(3), st.integers(0, 14))
def test_a_late_consumer_of_twins_is_never_more_certain_than_an_early_one(batches: list[list[KVEvent]], cut: int) -> None:
    """Histories have several prompts whose blocks share their hashes."""
    check_certainty(batches, min(cut, len(batches)))


UNUSABLE: Final[dict[str, KVEvent]] = {
    "length": BlockStored([8, 9], None, [1, 2, 3], SIZE, medium="GPU", **FULL),
    "first token": BlockStored([8], None, [1, 2, -1, 3], SIZE, medium="GPU", **FULL),
    "second block": BlockStored([8, 9], None, [1, 2, 3, 4, -1, 5, 6, 7], SIZE, medium="GPU", **FULL),
    "bigrams": BlockStored([8, 9], None, [(1, 2), (2, 3), (3, 4)], SIZE, medium="GPU"),
}


@pytest.mark.parametrize("event", UNUSABLE.values(), ids=UNUSABLE)
def test_a_late_consumer_knows_that_a_store_could_not_be_used(event: KVEvent) -> None:
    """The engine holds blocks that no consumer can find, so answers are estimates until a clear."""
    twins: list[KVEvent] = [store_blocks(0, 1, FULL, prompt=number) for number in (0, 1)]
    windows: list[KVEvent] = [store_blocks(0, 2, FULL), store_blocks(0, 2, WINDOW)]
    for held in ([], windows, twins):
        full, compactor = Consumer(), Compactor.create()
        assert compactor is not None
        batches: list[list[KVEvent]] = [[event], held, [AllBlocksCleared()], held]
        for batch, expected in zip(batches, ["set-aside", "set-aside", None, None], strict=True):
            full.send(batch)
            compactor.append(encode_batch(KVEventBatch(1.0, batch)))
            late = make_late_consumer(compactor)
            assert late is not None
            first, second = full.index.worker(WORKER), late.index.worker(WORKER)
            assert first.estimate == second.estimate == expected
            assert late.index.digest(WORKER) == full.index.digest(WORKER)
