"""A LoRA name that moves to another path: older blocks are not certain, and no number of versions reaches a limit.

vLLM hashes the path of a LoRA and announces its name. `native/compaction/src/lora_tests.rs` compares the rules with an engine.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pytest

from index_cases import Feed, cleared, removal, store
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import IndexLimits, Namespace, PrefixIndex
from kvevents.publisher.compaction import Compactor, encode_snapshot
from kvevents.wire import encode_batch

ADAPTER = "adapter"
TOKENS = list(range(100, 112))
"""Six blocks of two tokens."""


class Answer(NamedTuple):
    tokens: int
    certain: int
    is_certain: bool


def blocks(
    version: int,
    count: int = 6,
    first: int = 0,
    tokens: Sequence[int] = TOKENS,
    lora: str | None = ADAPTER,
    medium: str = "GPU",
) -> BlockStored:
    """Store blocks of a prompt whose weights have this version."""
    hashes = [hash_of(version, tokens, at) for at in range(first, count)]
    parent = hash_of(version, tokens, first - 1) if first else None
    return store(hashes, list(tokens[2 * first : 2 * count]), 2, parent, medium=medium, lora_name=lora)


def hash_of(version: int, tokens: Sequence[int], at: int) -> int:
    return hash((version, *tokens[: 2 * at + 2])) % (1 << 62) + 1_000


def remove(version: int, first: int = 0, count: int = 6) -> KVEvent:
    return removal(*(hash_of(version, TOKENS, at) for at in range(first, count)))


def answer(index: PrefixIndex, tokens: Sequence[int] = TOKENS, lora: str | None = ADAPTER) -> Answer:
    best = index.match(list(tokens), Namespace(lora=lora)).best
    return Answer(0, 0, True) if best is None else Answer(best.tokens, best.certain, best.is_certain)


class History:
    """An index, and what a consumer that starts late or from a snapshot would have."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def __call__(self, *events: KVEvent) -> History:
        self.payloads.append(encode_batch(KVEventBatch(1.0, list(events))))
        return self

    def indexes(self) -> Iterable[PrefixIndex]:
        """The index of a consumer from the start, of one that gets each possible compacted history, and a restored index."""
        for cut in range(len(self.payloads) + 1):
            compacted = compact(self.payloads[:cut])
            yield fill([*compacted, *self.payloads[cut:]])
        whole, file = fill(self.payloads), io.BytesIO()
        yield whole
        whole.snapshot(file)
        restored = PrefixIndex()
        restored.restore(io.BytesIO(file.getvalue()))
        yield restored

    def check(self, expected: Answer, tokens: Sequence[int] = TOKENS, lora: str | None = ADAPTER) -> None:
        for index in self.indexes():
            assert answer(index, tokens, lora) == expected
            assert all(worker.estimate is None for worker in index.workers())


def compact(payloads: Sequence[bytes]) -> list[bytes]:
    compactor = Compactor.create()
    assert compactor is not None
    for payload in payloads:
        compactor.append(payload)
    pieces = compactor.snapshot_pieces(1 << 24)
    assert pieces is not None
    found = encode_snapshot(pieces, 1.0, 0, encode_batch, 1 << 24)
    assert found is not None
    return found


def fill(payloads: Iterable[bytes]) -> PrefixIndex:
    index = PrefixIndex()
    for seq, payload in enumerate(payloads):
        index.apply_payload("a", 0, seq, payload)
    return index


def test_a_copy_that_was_announced_without_tokens_shows_the_change_too() -> None:
    """The blocks of the former weights were announced on the CPU, and then on the GPU by their hashes."""
    other = list(range(200, 212))
    history = History()(blocks(0, medium="CPU"), blocks(0, tokens=other, medium="CPU"))
    copies = BlockStored([hash_of(0, TOKENS, at) for at in range(6)], None, [], 0, medium="GPU")
    history(copies, blocks(1))(remove(0))
    for index in history.indexes():
        assert answer(index, other) == (12, 0, False)


def test_blocks_that_are_known_from_another_tier_show_the_change_too() -> None:
    """The blocks of the new weights were announced on the CPU first."""
    other = list(range(200, 212))
    history = History()(blocks(0), blocks(0, tokens=other))(blocks(1, medium="CPU"))
    for _ in range(2):
        history(blocks(1))
        for index in history.indexes():
            assert answer(index) == (12, 12, True)
            assert answer(index, other) == (12, 0, False)


def test_after_a_swap_only_new_blocks_are_certain() -> None:
    other = [*TOKENS[:2], *range(200, 206)]
    history = History()(blocks(1))(blocks(1, 4, 1, other))
    history.check(Answer(12, 12, True))
    history.check(Answer(8, 8, True), other)
    # The engine has computed two blocks with the new weights; whether it finds others is unknown until they are stored.
    history(blocks(2, 2)).check(Answer(12, 4, False))
    history.check(Answer(8, 2, False), other)
    history(blocks(2, 6, 2)).check(Answer(12, 12, True))
    history(blocks(2, 4, 1, other)).check(Answer(8, 8, True), other)


def test_a_prompt_that_was_not_asked_again_is_uncertain() -> None:
    """The prompt's blocks have one hash each. Only the blocks of a different prompt show the swap."""
    other = list(range(300, 308))
    history = History()(blocks(1))(blocks(1, 4, 0, other))(blocks(2))
    history.check(Answer(12, 12, True))
    history.check(Answer(8, 0, False), other)
    # Also if the blocks that showed it are gone.
    history(remove(1))
    history.check(Answer(8, 0, False), other)
    history.check(Answer(12, 12, True))


def test_only_the_name_that_was_swapped_is_uncertain() -> None:
    history = History()(blocks(1))(blocks(1, lora="other"), blocks(1, lora=None))(blocks(2, 3))
    history.check(Answer(12, 6, False))
    history.check(Answer(12, 12, True), lora="other")
    history.check(Answer(12, 12, True), lora=None)


def test_removals_take_the_blocks_of_their_version() -> None:
    history = History()(blocks(1))(blocks(2, 4))
    history(remove(2, 2, 4)).check(Answer(12, 4, False))
    history(remove(1)).check(Answer(4, 4, True))
    history(remove(2, 0, 2)).check(Answer(0, 0, True))
    for index in history.indexes():
        stats = index.stats()
        assert (stats.blocks, stats.unknown_removals) == (0, 0)


def test_the_name_returns_to_its_former_path() -> None:
    """The engine finds old blocks again, and says so only by continuing them."""
    history = History()(blocks(1, 4))(blocks(2, 3))
    history.check(Answer(8, 6, False))
    history(blocks(1, 5, 4)).check(Answer(10, 0, False))
    # Blocks that are computed from now on are certain, and show the next swap.
    fresh = list(range(400, 408))
    history(blocks(1, 4, 0, fresh)).check(Answer(8, 8, True), fresh)
    history(blocks(3, 2, 0, fresh)).check(Answer(8, 4, False), fresh)
    history(blocks(3)).check(Answer(12, 12, True))


def test_an_old_first_block_that_is_announced_again_is_a_return() -> None:
    history = History()(blocks(1, 2))(blocks(2, 2))(blocks(1, 2))
    history.check(Answer(4, 4, True))
    history(remove(1, 0, 2)).check(Answer(4, 0, False))


def test_children_follow_blocks_of_both_versions() -> None:
    history = History()(blocks(1, 3))(blocks(2, 3))(blocks(2, 5, 3))
    history.check(Answer(10, 10, True))
    history(blocks(1, 4, 3)).check(Answer(10, 0, False))


def test_after_a_clear_all_blocks_are_certain() -> None:
    history = History()(blocks(1))(blocks(2, 2))(cleared())(blocks(1, 4)).check
    history(Answer(8, 8, True))
    tier = History()(blocks(1))(blocks(2, 2))(cleared(medium="GPU"))(blocks(2, 4))
    tier.check(Answer(8, 8, True))


def test_after_the_last_removal_all_blocks_are_certain() -> None:
    history = History()(blocks(1))(blocks(2))(remove(1))(remove(2))(blocks(1, 4))
    history.check(Answer(8, 8, True))


def test_copies_on_other_tiers_are_no_sign() -> None:
    """A connector can copy a block long after it was computed, and may have hashes of its own."""
    history = History()(blocks(1))(blocks(1, medium="CPU"))(blocks(7, medium="DISK"))
    history.check(Answer(12, 12, True))
    history(blocks(2, 3))(blocks(1, medium="CPU"))
    history.check(Answer(12, 6, False))


@pytest.mark.parametrize("lora", [None, ADAPTER])
def test_two_hashes_on_two_tiers_are_no_contradiction(lora: str | None) -> None:
    History()(blocks(1, lora=lora))(blocks(2, medium="CPU", lora=lora)).check(Answer(12, 12, True), lora=lora)


def test_without_a_lora_neither_of_two_hashes_is_certain() -> None:
    """The blocks differ by something that is not announced. With one of them left there is no doubt to be seen."""
    history = History()(blocks(1, lora=None))(blocks(2, 4, lora=None))
    history.check(Answer(12, 0, False), lora=None)
    history(remove(2, 0, 4)).check(Answer(12, 12, True), lora=None)


def test_an_attestation_does_not_make_old_blocks_certain() -> None:
    feed = Feed(PrefixIndex())
    feed(blocks(1))
    feed(blocks(2, 3))
    hashes = [hash_of(1, TOKENS, at) for at in range(6)] + [hash_of(2, TOKENS, at) for at in range(3)]
    feed(BlockRemoved([], heartbeat=Heartbeat("f" * 32, 5.0, attestation=sum(hashes) % (1 << 64))))
    worker = feed.index.worker("a")
    assert (worker.attested, answer(feed.index)) == (True, Answer(12, 6, False))


@pytest.mark.parametrize("lora", [None, ADAPTER])
def test_a_thousand_versions_reach_no_limit(lora: str | None) -> None:
    """With a limit of records that is far below, and in any order of removal."""
    versions = 1_000
    index = PrefixIndex(limits=IndexLimits(max_records_per_key=8))
    payloads = [encode_batch(KVEventBatch(1.0, [blocks(version, lora=lora)])) for version in range(versions)]
    for seq, payload in enumerate(payloads):
        index.apply_payload("a", 0, seq, payload)
    assert answer(index, lora=lora) == (Answer(12, 12, True) if lora else Answer(12, 0, False))
    late, numbers = fill(compact(payloads)), itertools.count(versions)
    assert answer(late, lora=lora) == answer(index, lora=lora)
    for found in (index, late):
        worker = found.worker("a")
        assert (worker.blocks, worker.estimate, found.stats().rejected) == (6 * versions, None, {})
    order = [*range(0, versions, 3), *range(1, versions, 3), *reversed(range(2, versions, 3))]
    for version in order[:-2]:
        index.apply_payload("a", 0, next(numbers), encode_batch(KVEventBatch(1.0, [remove(version)])))
    assert answer(index, lora=lora) == Answer(12, 0, False), "two versions are left, and none is that of the last swap"
    for version in order[-2:]:
        index.apply_payload("a", 0, next(numbers), encode_batch(KVEventBatch(1.0, [remove(version)])))
    stats = index.stats()
    assert (stats.blocks, stats.unknown_removals, answer(index, lora=lora)) == (0, 0, Answer(0, 0, True))


def test_workers_swap_at_different_times() -> None:
    """The workers share records, but each worker has its own versions of a LoRA."""
    index = PrefixIndex(limits=IndexLimits(max_records_per_key=4))
    sources = [f"engine-{number}" for number in range(12)]
    seqs = dict.fromkeys(sources, 0)
    for version in range(20):
        for number, source in enumerate(sources):
            if version < 3 + number:
                index.apply_payload(source, 0, seqs[source], encode_batch(KVEventBatch(1.0, [blocks(version)])))
                seqs[source] += 1
    matches = index.match(TOKENS, Namespace(lora=ADAPTER))
    assert {found.source: (found.tokens, found.certain) for found in matches} == dict.fromkeys(sources, (12, 12))
    assert index.stats().rejected == {}


def test_a_cleared_stream_is_certain_with_another_publisher() -> None:
    feed = Feed(PrefixIndex())
    feed(blocks(1))
    feed(blocks(2, 2))
    feed(AllBlocksCleared(), blocks(1, 3))
    assert answer(feed.index) == Answer(6, 6, True)


def test_an_engine_lists_another_path() -> None:
    """Without a store that shows it, nothing that was stored before is certain."""
    feeds = [Feed(PrefixIndex(), rank=rank) for rank in (0, 1)]
    feeds[1].index = index = feeds[0].index
    for feed in feeds:
        feed(blocks(1), blocks(1, 2, lora="other"))
    index.replace_lora("a", ADAPTER)
    index.replace_lora("a", "unknown")
    index.replace_lora("nowhere", ADAPTER)
    assert [(found.tokens, found.certain) for found in index.match(TOKENS, Namespace(lora=ADAPTER))] == [(12, 0)] * 2
    assert answer(index, lora="other") == Answer(4, 4, True)
    feeds[0](blocks(2))
    certain = {found.rank: found.certain for found in index.match(TOKENS, Namespace(lora=ADAPTER))}
    assert certain == {0: 12, 1: 0}


def test_a_change_that_blocks_have_shown_is_listed_later() -> None:
    feed = Feed(PrefixIndex())
    feed(blocks(1))
    feed(blocks(2))
    feed.index.replace_lora("a", ADAPTER)
    assert answer(feed.index) == Answer(12, 12, True)
    feed.index.replace_lora("a", ADAPTER)
    assert answer(feed.index) == Answer(12, 0, False)
    feed(blocks(3, 2))
    assert answer(feed.index) == Answer(12, 4, False)
    feed.index.replace_lora("a", ADAPTER)
    assert answer(feed.index) == Answer(12, 0, False)


def test_without_blocks_nothing_is_replaced() -> None:
    feed = Feed(PrefixIndex())
    feed(blocks(1))
    feed(remove(1))
    feed.index.replace_lora("a", ADAPTER)
    feed(blocks(1))
    assert answer(feed.index) == Answer(12, 12, True)
