"""The index says when events contradict each other although no batch is missing, and the trust of the stream follows."""

from __future__ import annotations

import io
from itertools import permutations
from typing import Any

import pytest

from index_cases import Feed, cleared, namespace, removal, store, tokens_of
from index_keys import Scope
from kvevents.events import AllBlocksCleared, BlockStored, KVEvent, KVEventBatch
from kvevents.index import IndexLimits, PrefixIndex
from kvevents.publisher.compaction import Compactor
from kvevents.stream import Batch, DegradedReason, RawBatch, Reset, Source, Stream
from kvevents.wire import encode_batch

EMPTY_TUPLE = hash(())
WINDOW: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4}


class Follower:
    """A stream without replay, whose deliveries an index applies, as payloads or as decoded events."""

    def __init__(self, *, raw: bool, first: int = 0) -> None:
        self.index, self.seq, self.raw = PrefixIndex(), first, raw
        self.stream = Stream(Source("tcp://127.0.0.1:1", name="a"))
        self.stream.begin_connection(0.0)

    def take(self, *events: KVEvent) -> None:
        self.stream.receive_live([b"", self.seq.to_bytes(8, "big"), encode_batch(KVEventBatch(1.0, list(events)))], 0.0)
        self.seq += 1
        for delivery in self.stream.deliveries():
            taken = delivery.decode() if isinstance(delivery, RawBatch) and not self.raw else delivery
            report = self.index.apply(taken).report
            if report is not None and isinstance(taken, (Batch, RawBatch)):
                self.stream.report(taken, report)

    def is_estimate(self) -> bool:
        found = DegradedReason.ESTIMATED_MATCHES in self.stream.degraded_reasons
        assert found == (self.index.worker("a").estimate not in {None, *OF_LOOKUPS})
        return found


OF_LOOKUPS = ("unknown-kind", "unknown-hashing", "several-block-sizes")
"""Estimates that are no fault of the events, so that they are no reason of the stream."""


def page(tokens: list[int], parent: int | None, **fields: Any) -> BlockStored:
    """Return a page as SGLang 0.5.1 to 0.5.5 announce it: its hash is of its tokens alone."""
    return BlockStored([hash(tuple(tokens))], parent, tokens, len(tokens), **fields)


@pytest.mark.parametrize("raw", [True, False])
def test_an_orphan_in_a_complete_stream_ends_exact_until_its_parent_comes(raw: bool) -> None:
    consumer = Follower(raw=raw)
    consumer.take(store([1], [1, 1], 2))
    assert not consumer.is_estimate()
    consumer.take(store([3, 4, 5], [3, 3, 4, 4, 5, 5], 2, 2))
    assert consumer.is_estimate()
    assert "at least 2 of its blocks have parents or tokens that were never announced" in consumer.stream.trust.reason
    consumer.take(store([2], [2, 2], 2, 1))
    assert not consumer.is_estimate()
    assert tokens_of(consumer.index, [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]) == 10


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("end", [cleared(), removal(3)])
def test_a_clear_or_the_removal_of_the_orphan_ends_the_estimate(raw: bool, end: KVEvent) -> None:
    consumer = Follower(raw=raw)
    consumer.take(store([1], [1, 1], 2), store([3], [3, 3], 2, 2))
    assert consumer.is_estimate()
    consumer.take(end)
    assert not consumer.is_estimate()


@pytest.mark.parametrize("raw", [True, False])
def test_a_parent_that_follows_in_the_same_batch_is_no_contradiction(raw: bool) -> None:
    consumer = Follower(raw=raw)
    consumer.take(store([2], [2, 2], 2, 1), store([1], [1, 1], 2))
    assert not consumer.is_estimate()


@pytest.mark.parametrize("raw", [True, False])
def test_orphans_of_a_stream_that_is_known_to_be_incomplete_contradict_nothing(raw: bool) -> None:
    """After a gap, or for a consumer that came late, the parent may be in a batch that was never received."""
    late = Follower(raw=raw, first=7)
    late.take(store([3], [3, 3], 2, 2))
    lossy = Follower(raw=raw)
    lossy.take(store([1], [1, 1], 2))
    lossy.seq += 1
    lossy.take(store([3], [3, 3], 2, 2))
    for consumer in (late, lossy):
        assert not consumer.is_estimate()
        consumer.take(cleared())
        consumer.take(store([3], [3, 3], 2, 2))
        assert consumer.is_estimate(), "everything since the clear was received"


@pytest.mark.parametrize(
    "event",
    [
        store([3], [3, 3], 2, 2, **WINDOW),
        store([3], [3, 3], 2, 2, medium="CPU"),
        store([3], [3, 3], 2, 2, medium="DISK", group_idx=0),
        store([3], [3, 3], 2, 2, group_idx=1, kv_cache_spec_kind="a-kind-of-tomorrow"),
        store([3], [3, 3], 2, 2, locality="REMOTE"),
    ],
)
def test_only_blocks_with_full_attention_on_the_device_must_have_a_parent(event: KVEvent) -> None:
    """Windows skip blocks, and other tiers evict parents before children."""
    index = PrefixIndex()
    feed = Feed(index)
    feed(store([1], [1, 1], 2, kv_cache_spec_kind="full_attention", group_idx=0), event)
    assert index.worker(feed.worker).estimate in {None, "unknown-kind"}


def test_blocks_of_a_window_alone_need_no_parent() -> None:
    """vLLM announces no block before the window, so the engine's own hashes find the others."""
    index = PrefixIndex()
    feed = Feed(index)
    feed(store([3], [3, 3], 2, 2, **WINDOW))
    assert index.worker(feed.worker).estimate in {None, "unknown-hashing"}


def test_blocks_before_an_image_count_while_the_hashing_is_unknown() -> None:
    """An image changes no block before it, so the estimate for them is that of the same text without the image."""
    index = PrefixIndex()
    feed = Feed(index)
    feed(
        store([1, 2], [1, 1, 2, 2], 2, kv_cache_spec_kind="full_attention", group_idx=0),
        store([2], [], 1, kv_cache_spec_kind="mamba", group_idx=1),
    )
    assert index.worker(feed.worker).estimate == "unknown-hashing"
    for prompt, scope in ([1, 1, 2, 2], Scope()), ([1, 1, 2, 2, 3, 3], Scope(mm=(("image", 4, 2),))):
        hit = index.match(prompt, namespace(scope)).get(*feed.worker)
        assert hit is not None
        assert (hit.tokens, hit.is_certain) == (4, False)


OFFLOADING: dict[str, list[KVEvent]] = {
    "computed": [store([1, 2], [1, 1, 2, 2], 2)],
    "evicted": [removal(1, 2)],
    "offloaded by hash": [store([1, 2], [], 0, medium="CPU")],
    "evicted from the host": [removal(1, 2, medium="CPU")],
    "loaded by hash": [store([1, 2], [], 0)],
}


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("order", list(permutations(OFFLOADING)), ids=", ".join)
def test_a_hash_alone_is_credited_in_any_order_or_ends_exact(order: tuple[str, ...], raw: bool) -> None:
    """vLLM's connectors announce offloaded blocks by their hashes, and some only when the GPU has evicted the blocks."""
    consumer = Follower(raw=raw)
    held: set[str | None] = set()
    for name in order:
        consumer.take(*OFFLOADING[name])
        (event,) = OFFLOADING[name]
        assert not isinstance(event, AllBlocksCleared)
        (held.add if isinstance(event, BlockStored) else held.discard)(event.medium)
        credit = tokens_of(consumer.index, [1, 1, 2, 2])
        assert credit == (4 if held else 0) or consumer.is_estimate()
        assert credit <= 4 * bool(held)
    for medium in ("GPU", "CPU"):
        consumer.take(removal(1, 2, medium=medium))
    assert not consumer.is_estimate(), "what was unknown has been removed"


def test_matches_are_estimates_while_limits_have_cost_blocks() -> None:
    """A refused block is no contradiction to the blocks after it, but lookups do not find it."""
    for index in (PrefixIndex(memory_limit=1), PrefixIndex(limits=IndexLimits(max_orphans=1))):
        feed = Feed(index)
        feed(store([2], [2, 2], 2, 1), store([3], [3, 3], 2, 9))
        assert index.worker(feed.worker).estimate == "limits"
        feed(cleared())
        assert index.worker(feed.worker).estimate is None
    feed(store([2], [2, 2], 2, 1))
    assert index.worker(feed.worker).estimate == "unknown-parents"


def test_orphans_above_the_limit_do_not_end_the_estimate() -> None:
    """Their parents were never announced either, and the index has forgotten them."""
    index = PrefixIndex(limits=IndexLimits(max_orphans=2))
    feed = Feed(index)
    for number in range(1, 5):
        feed(store([number], [number, 1], 2, 90 + number))
        assert index.worker(feed.worker).estimate == ("unknown-parents" if number < 3 else "limits")
    feed(removal(3), removal(4))
    assert index.worker(feed.worker).estimate == "limits"
    feed(cleared())
    assert index.worker(feed.worker).estimate is None


def test_an_estimate_survives_a_snapshot_of_the_index_and_ends_with_an_incarnation() -> None:
    for events, code in (([store([2], [2, 2], 2, 1)], "unknown-parents"), ([store([1], [1], 2)], "set-aside")):
        feed = Feed(PrefixIndex())
        feed(*events)
        file = io.BytesIO()
        feed.index.snapshot(file)
        file.seek(0)
        again = PrefixIndex()
        again.restore(file)
        assert again.worker(feed.worker).estimate == code
        report = again.apply(feed.batch(store([7], [7, 7], 2))).report
        assert report is not None
        assert report.estimate, "a restored index reports it once more"
        again.apply(Reset("a", 0, 1, "restart"))
        assert again.worker(feed.worker).estimate is None


def test_an_estimate_of_a_checkpoint_ends_if_the_first_event_after_a_restart_is_a_clear() -> None:
    consumer = Follower(raw=True)
    consumer.take(store([2], [2, 2], 2, 1))
    file = io.BytesIO()
    consumer.index.snapshot(file)
    file.seek(0)
    restarted = Follower(raw=True, first=1)
    restarted.index.restore(file)
    restarted.stream = Stream(consumer.stream.source)
    restarted.stream.restore(consumer.stream.position().checkpoint("a", 0))
    restarted.stream.begin_connection(0.0)
    assert restarted.is_estimate()
    restarted.take(cleared())
    assert not restarted.is_estimate()


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize(
    "event",
    [
        store([1, 2], list(range(32)), 0),
        store([1, 2], [1, 1], 2),
        store([1], [1, 1, 1], 2),
        store([1], [-1, 1], 2),
        store([1, 2], [1], 16, medium="CPU"),
    ],
)
def test_a_store_that_cannot_be_used_ends_exact_until_a_clear(raw: bool, event: KVEvent) -> None:
    consumer = Follower(raw=raw)
    consumer.take(store([7], [7, 7], 2))
    consumer.take(event)
    assert consumer.is_estimate()
    consumer.take(store([8], [8, 8], 2, 7))
    assert consumer.is_estimate()
    assert tokens_of(consumer.index, [7, 7, 8, 8]) == 4, "its neighbours count"
    consumer.take(cleared(), AllBlocksCleared(unknown_fields={"medium": "CPU"}))
    assert not consumer.is_estimate()


def test_a_store_without_hashes_sets_nothing_aside() -> None:
    consumer = Follower(raw=True)
    consumer.take(store([], [1, 1], 2))
    assert not consumer.is_estimate()


@pytest.mark.parametrize("raw", [True, False])
def test_first_blocks_of_releases_that_hash_pages_alone_are_estimates(raw: bool) -> None:
    """SGLang 0.5.1 to 0.5.5 announce the first page of every node as a first block."""
    consumer = Follower(raw=raw)
    consumer.take(page([1, 2, 3, 4], None), page([5, 6, 7, 8], hash((1, 2, 3, 4))))
    assert consumer.is_estimate()
    consumer.take(cleared())
    assert consumer.is_estimate(), "another cache of the same release"


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("size", [1, 4])
def test_first_pages_of_bigrams_that_are_hashed_alone_are_estimates(size: int, raw: bool) -> None:
    """With EAGLE these releases hash the tuple of a page's bigrams."""
    consumer = Follower(raw=raw)
    bigrams = [(token, token + 1) for token in range(5, 5 + size)]
    consumer.take(BlockStored([hash(tuple(bigrams))], None, bigrams, size))
    assert consumer.is_estimate()


def test_several_first_blocks_with_other_hashes_prove_nothing() -> None:
    consumer = Follower(raw=True)
    for first in range(20):
        consumer.take(store([100 + first], [first, 1], 2))
    assert not consumer.is_estimate()


@pytest.mark.parametrize("raw", [True, False])
def test_the_hash_of_an_empty_tuple_is_the_root(raw: bool) -> None:
    """SGLang 0.4.7 to 0.4.9 name it as the parent of first pages. Equal later pages of two prompts share a hash there.

    So the last page is credited to the wrong prompt.
    """
    consumer = Follower(raw=raw)
    consumer.take(page([1, 2], EMPTY_TUPLE), page([3, 4], hash((1, 2))))
    assert tokens_of(consumer.index, [1, 2, 3, 4]) == 4
    consumer.take(page([5, 6], EMPTY_TUPLE), page([3, 4], hash((5, 6))))
    consumer.take(page([7, 8], hash((3, 4))))
    assert [tokens_of(consumer.index, [*first, 3, 4, 7, 8]) for first in ([1, 2], [5, 6])] == [4, 6]
    assert consumer.is_estimate()


@pytest.mark.parametrize("raw", [True, False])
def test_a_parent_of_0_is_the_root_unless_a_block_has_that_hash(raw: bool) -> None:
    """llm-d's simulator (in arrays) and older releases of LMCache send 0 for "no parent". But 0 is a legal hash."""
    consumer = Follower(raw=raw)
    consumer.take(store([5, 6], [1, 1, 2, 2], 2, 0), store([7], [3, 3], 2, 6))
    consumer.take(store([8], [4, 4], 2, 0, medium="CPU", extra_keys=[("salt",)]))
    assert (tokens_of(consumer.index, [1, 1, 2, 2, 3, 3]), consumer.is_estimate()) == (6, False)
    assert tokens_of(consumer.index, [4, 4], Scope(salt="salt")) == 2
    consumer.take(store([0], [9, 9], 2), store([1], [8, 8], 2, 0))
    assert (tokens_of(consumer.index, [9, 9, 8, 8]), tokens_of(consumer.index, [8, 8])) == (4, 0)


def test_snapshots_have_the_blocks_of_parents_of_0_and_of_chunks_of_lmcache() -> None:
    index, late, compactor = PrefixIndex(), PrefixIndex(), Compactor.create()
    assert compactor is not None
    chunks = [store([20], [1, 1, 2, 2, 3], 4, medium="cpu"), store([21], [3, 3, 4, 4], 4, 20, medium="cpu")]
    events: list[KVEvent] = [store([5, 6], [1, 1, 2, 2], 2, 0), *chunks, store([0], [9, 9], 2), store([1], [8, 8], 2, 0)]
    payload = encode_batch(KVEventBatch(1.0, events))
    index.apply_payload("a", 0, 0, payload)
    compactor.append(payload)
    for seq, part in enumerate(compactor.payloads(1 << 20, 1.0) or ()):
        late.apply_payload("a", 0, seq, part)
    assert late.digest("a") == index.digest("a")
    assert [tokens_of(late, prompt) for prompt in ([1, 1, 2, 2, 3, 3, 4, 4], [9, 9, 8, 8], [8, 8])] == [8, 4, 0]


@pytest.mark.parametrize("raw", [True, False])
def test_a_chunk_of_lmcache_ends_with_the_first_token_of_the_next_chunk(raw: bool) -> None:
    """LMCache 0.5.6 sends such a token with each chunk except the last (LMCache/LMCache#4543)."""
    consumer = Follower(raw=raw)
    consumer.take(store([1], range(4), 4, group_idx=0, kv_cache_spec_kind="full_attention"))
    consumer.take(store([20], range(5), 4, medium="cpu"), store([21], range(4, 9), 4, 20, medium="cpu"))
    consumer.take(store([22], range(8, 12), 4, 21, medium="cpu"))
    consumer.take(store([23], range(12, 14), 2, 22, medium="cpu"))
    assert (tokens_of(consumer.index, list(range(14))), consumer.is_estimate()) == (12, False)
    assert consumer.index.worker("a").rejected == {("none", "other-block-size"): 1}, "the end of a prompt"
    consumer.take(store([30], range(6), 4, medium="cpu"))
    assert consumer.is_estimate(), "LMCache sends one token more"


@pytest.mark.parametrize("kind", [None, "full_attention"])
def test_chunks_of_a_connector_beside_blocks_of_the_engine_are_no_estimate(kind: str | None) -> None:
    """LMCache announces chunks of 256 tokens under its own hashes and without a group, in the stream of vLLM."""
    consumer = Follower(raw=True)
    consumer.take(store([900], list(range(8)), 8, medium="CPU"))
    consumer.take(store([1, 2, 3], list(range(6)), 2, group_idx=0, kv_cache_spec_kind=kind))
    consumer.take(store([901], list(range(8, 16)), 8, 900, medium="CPU"))
    assert not consumer.is_estimate()
    match = consumer.index.match(list(range(16))).best
    assert match is not None
    assert match.tiers == {"gpu": 6, "cpu": 16, "disk": 16}
    consumer.take(removal(900, 901, medium="CPU"))
    assert tokens_of(consumer.index, list(range(16))) == 6


def test_chunks_of_a_connector_do_not_change_the_groups_of_a_hybrid_model() -> None:
    """Group 0 keeps its blocks of two tokens, so that the window is searched where the engine searches it."""
    consumer = Follower(raw=True)
    dense: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    consumer.take(store([1, 2, 3], list(range(6)), 2, **dense), store([1, 2, 3], list(range(6)), 2, **WINDOW))
    before = tokens_of(consumer.index, list(range(6)))
    consumer.take(store([900], list(range(8)), 8, medium="CPU"))
    assert (before, tokens_of(consumer.index, list(range(6)))) == (6, 6)
    assert not consumer.is_estimate()


def test_blocks_of_several_sizes_on_the_device_are_an_estimate_of_lookups() -> None:
    """The events are complete, so the stream may be EXACT; a service that answers from the index says DEGRADED."""
    consumer = Follower(raw=True)
    consumer.take(store([1], [1, 1], 2), store([2], [1, 1, 1, 1], 4))
    assert consumer.index.worker("a").estimate == "several-block-sizes"
    assert not consumer.is_estimate()


@pytest.mark.parametrize("kind", ["full_attention", None])
def test_groups_without_kinds_are_an_estimate_of_lookups(kind: str | None) -> None:
    """vLLM 0.20 and 0.21 name no kinds, so any of several groups might have a window. A later store can name the kind."""
    index = PrefixIndex()
    feed = Feed(index)
    feed(store([1], [1, 1], 2, group_idx=0))
    assert index.worker("a").estimate is None
    feed(store([1], [1, 1], 2, group_idx=1, kv_cache_spec_kind=kind))
    assert index.worker("a").estimate == "unknown-kind"
    feed(store([2], [2, 2], 2, group_idx=0, kv_cache_spec_kind="full_attention"), store([3], [3, 3], 2, group_idx=0))
    assert index.worker("a").estimate == (None if kind else "unknown-kind")
    file = io.BytesIO()
    index.snapshot(file)
    file.seek(0)
    restored = PrefixIndex()
    restored.restore(file)
    assert restored.worker("a").estimate == index.worker("a").estimate


@pytest.mark.parametrize("fields", [{"medium": "CPU"}, {"block_keys": None}])
def test_adapters_of_blocks_with_keys_or_below_the_gpu_count_for_lookups_by_hashes(fields: dict[str, Any]) -> None:
    """The answer is an upper bound, and not 0."""
    index = PrefixIndex()
    dense: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    adapted = store([1, 2], [1, 1, 1, 1], 2, lora_name="x", **dense)
    if "block_keys" in fields:
        other = PrefixIndex()
        Feed(other)(adapted)
        keys = [block.key for block in sorted(other.blocks("a"), key=lambda block: block.hash)]
        adapted = store([1, 2], [], 2, block_keys=keys, **dense)
    else:
        adapted.medium = "CPU"
    Feed(index)(store([3], [3, 3], 2, **dense), store([3], [], 1, group_idx=1, kv_cache_spec_kind="mamba"), adapted)
    found = index.match([1, 1, 1, 1], namespace(Scope(lora="x"))).best
    assert found is not None
    assert (found.tokens, found.certain) == (4, 0)


def test_restored_groups_keep_that_hashes_cover_more_than_tokens() -> None:
    """The path of a LoRA is such a value. States can end inside of blocks, so prompts are looked up by hashes."""
    feed = Feed(PrefixIndex())
    state: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
    feed(store([1, 2], [1, 1, 1, 1], 2, lora_name="x", group_idx=0, kv_cache_spec_kind="full_attention"))
    feed(store([1], [], 1, lora_name="x", **state))
    file = io.BytesIO()
    feed.index.snapshot(file)
    restored = PrefixIndex()
    restored.restore(io.BytesIO(file.getvalue()))
    for index in (feed.index, restored):
        assert tokens_of(index, [1, 1, 1, 1], Scope(lora="x")) == 4


def test_a_late_report_does_not_replace_a_newer_one() -> None:
    consumer = Follower(raw=True)
    consumer.take(store([2], [2, 2], 2, 1))
    assert consumer.is_estimate()
    orphaned = consumer.index.apply(RawBatch("b", 0, 0, 0, False, encode_batch(KVEventBatch(1.0, [store([2], [2, 2], 2, 1)]))))
    consumer.take(store([1], [1, 1], 2))
    assert not consumer.is_estimate()
    assert orphaned.report is not None
    consumer.stream.report(RawBatch("a", 0, 0, 0, False, b""), orphaned.report)
    assert not consumer.is_estimate()


@pytest.mark.parametrize(
    "first",
    [
        [store([1, 2], range(8), 4), store([3], range(8), 8)],
        [store([1], range(4), 4, group_idx=0), store([1], [], 4, **WINDOW)],
        [page([1, 2, 3, 4], None)],
    ],
    ids=["sizes", "window", "page-hashes"],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_clear_of_all_tiers_forgets_the_engine(first: list[KVEvent], is_late: bool) -> None:
    """A relay sends this clear when its engine has restarted, and the next engine can have other blocks, groups and hashes.

    A late consumer gets a snapshot, which does not have the groups of the former engine either.
    """
    index, compactor = PrefixIndex(), Compactor.create()
    assert compactor is not None
    batches: list[list[KVEvent]] = [first, [cleared(), cleared(medium="*")], [store([1, 2], range(8), 4, group_idx=0)]]
    payloads = [encode_batch(KVEventBatch(1.0, events)) for events in batches]
    for payload in payloads:
        compactor.append(payload)
    for seq, payload in enumerate(compactor.payloads(1 << 20, 1.0) or () if is_late else payloads):
        index.apply_payload("a", 0, seq, payload)
    found = index.worker("a")
    assert (tokens_of(index, list(range(8))), found.estimate, found.block_sizes) == (8, None, [4])
