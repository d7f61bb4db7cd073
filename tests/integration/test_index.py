"""Tests of `kvevents.index`: each rule that keeps a match exact, each query, and each error."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import paths
from index_cases import (
    Feed,
    blocks_of,
    cleared,
    count_orphans,
    count_rejected,
    namespace,
    removal,
    store,
    tokens_by_level,
    tokens_of,
    workers_of,
)
from index_keys import Scope, prompt_keys
from kvevents.errors import KVEventsError, UnknownSourceError, UsageError
from kvevents.events import BlockRemoved, BlockStored
from kvevents.index import MAX_PAYLOAD_EXPANSION, IndexLimits, MultiModal, Namespace, PrefixIndex, block_keys
from kvevents.stream import BatchReport, Gap, Reset
from kvevents.wire.dialects import ARRAY_CLEARED, ARRAY_REMOVED, ARRAY_STORED, NEUTRAL_KINDS
from wire_cases import batch_of, make_store, pack

REFUSED = (UsageError, TypeError, ValueError, OverflowError)
PROMPT = list(range(1, 9))
"""The tokens of four blocks of two."""


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex()


@pytest.fixture
def feed(index: PrefixIndex) -> Feed:
    return Feed(index)


def store_chain(*hashes: int, **fields: Any) -> Any:
    """Return a store event for the first blocks of `PROMPT`, one for each hash, from the root."""
    return store(hashes, PROMPT[: 2 * len(hashes)], 2, **fields)


def tiers_of(index: PrefixIndex, tokens: Sequence[int] = PROMPT) -> tuple[int, ...]:
    return tokens_by_level(index.match(tokens)).get(("a", 0), (0, 0, 0, 0))


# --- keys depend on tokens, not on the engine's hashes ----------------------------------------------------------------------


def test_engines_with_different_hash_seeds_and_dialects_share_prefixes(index: PrefixIndex) -> None:
    """Two vLLM engines with random seeds and an SGLang engine with negative hashes store one prompt; one query finds all
    three."""
    Feed(index, "vllm-1")(store_chain(0xFFFF_0000_0000_0001, 12, 13, 14, group_idx=0, kv_cache_spec_kind="full_attention"))
    Feed(index, "vllm-2")(store_chain(21, 22, 23))
    sglang = [1.0, [["BlockStored", [-5], None, PROMPT[:2], 2, None], ["BlockStored", [-6], -5, PROMPT[2:4], 2, None]], 0]
    index.apply_payload(("sglang", 0), 0, 0, pack(sglang))
    found = tokens_by_level(index.match(PROMPT))
    assert {worker: tiers[0] for worker, tiers in found.items()} == {("vllm-1", 0): 8, ("vllm-2", 0): 6, ("sglang", 0): 4}
    keys = [{key for key, *_ in blocks_of(index, worker)} for worker in (("vllm-1", 0), ("vllm-2", 0), ("sglang", 0))]
    assert keys[2] < keys[1] < keys[0] == set(block_keys(PROMPT, 2))


def test_equal_page_hashes_under_different_parents_are_different_blocks(index: PrefixIndex, feed: Feed) -> None:
    """SGLang before 0.5.7 hashes the page alone, so the page (7, 7) under two prefixes has one hash but is two blocks."""
    feed(store([1], [1, 1], 2), store([7], [7, 7], 2, 1), store([2], [2, 2], 2), store([7], [7, 7], 2, 2))
    assert tokens_of(index, [1, 1, 7, 7]) == tokens_of(index, [2, 2, 7, 7]) == 4
    assert tokens_of(index, [7, 7]) == 0
    feed(store([8], [8, 8], 2, 7))
    assert tokens_of(index, [2, 2, 7, 7, 8, 8]) == 6, "the newest block with the hash is the parent"
    assert tokens_of(index, [1, 1, 7, 7, 8, 8]) == 4
    feed(removal(7))
    assert tokens_of(index, [1, 1, 7, 7]) == 2, "a removal takes the oldest block with the hash"
    assert tokens_of(index, [2, 2, 7, 7, 8, 8]) == 6
    feed(removal(7))
    assert tokens_of(index, [2, 2, 7, 7, 8, 8]) == 2


def test_a_prompt_that_shares_pages_but_no_prefix_gets_no_credit(index: PrefixIndex, feed: Feed) -> None:
    feed(store_chain(1, 2, 3, 4))
    assert tokens_of(index, PROMPT[2:]) == 0
    assert tokens_of(index, PROMPT[:4] + PROMPT[6:]) == 4
    assert tokens_of(index, PROMPT[:3]) == 2


# --- resident blocks --------------------------------------------------------------------------------------------------------


def test_copies_are_counted_and_the_first_removal_of_two_leaves_one(index: PrefixIndex, feed: Feed) -> None:
    feed(store_chain(1, 2, group_idx=0))
    feed(store_chain(1, 2, group_idx=0))
    assert {copies for *_, copies in blocks_of(index, feed.worker)} == {2}
    feed(removal(1, 2))
    assert tokens_of(index, PROMPT) == 4
    feed(removal(2))
    assert tokens_of(index, PROMPT) == 2
    feed(removal(1), removal(1))
    assert blocks_of(index, feed.worker) == []


def test_a_removal_may_list_a_hash_twice(index: PrefixIndex, feed: Feed) -> None:
    feed(store_chain(1, group_idx=0), store_chain(1, group_idx=0))
    feed(removal(1, 1))
    assert tokens_of(index, PROMPT) == 0


def test_orphans_give_no_credit_until_their_parent_arrives(index: PrefixIndex, feed: Feed) -> None:
    """The grandchild arrives first, then the child, then the root. The whole chain counts when the root arrives, and no orphan
    is ever attached to the root."""
    feed(store([3, 4], PROMPT[4:], 2, 2))
    feed(store([2], PROMPT[2:4], 2, 1))
    assert (
        tokens_by_level(index.match(PROMPT))
        == tokens_by_level(index.match(PROMPT[4:]))
        == tokens_by_level(index.match(PROMPT[2:]))
        == {}
    )
    assert count_orphans(index) == 3
    feed(store_chain(1))
    assert tokens_of(index, PROMPT) == 8
    assert count_orphans(index) == 0


def test_orphans_are_bounded_and_the_oldest_are_evicted_first() -> None:
    index = PrefixIndex(limits=IndexLimits(max_orphans=2))
    feed = Feed(index)
    feed(store([2], [2, 2], 2, 1), store([3], [3, 3], 2, 1), store([4], [4, 4], 2, 1))
    assert count_orphans(index) == 2
    feed(store([1], [1, 1], 2))
    assert tokens_of(index, [1, 1, 2, 2]) == 2
    assert tokens_of(index, [1, 1, 3, 3]) == tokens_of(index, [1, 1, 4, 4]) == 4


def test_a_removal_also_removes_an_orphan(index: PrefixIndex, feed: Feed) -> None:
    feed(store([2], PROMPT[2:4], 2, 1), removal(2), store_chain(1))
    assert tokens_of(index, PROMPT) == 2


def test_removing_a_middle_block_shortens_the_prefix_until_it_is_stored_again(index: PrefixIndex, feed: Feed) -> None:
    """The blocks after the removed one stay resident, as they do in the engine."""
    feed(store_chain(1, 2, 3, 4))
    feed(removal(2))
    assert tokens_of(index, PROMPT) == 2
    assert len(blocks_of(index, feed.worker)) == 3
    feed(store([2], PROMPT[2:4], 2, 1))
    assert tokens_of(index, PROMPT) == 8


def test_a_removed_hash_is_no_longer_a_parent(index: PrefixIndex, feed: Feed) -> None:
    feed(store_chain(1, 2), removal(2), store([3], PROMPT[4:6], 2, 2))
    assert count_orphans(index) == 1
    feed(store([2], PROMPT[2:4], 2, 1))
    assert tokens_of(index, PROMPT) == 6


def test_clears_and_removals_apply_only_to_their_own_stream(index: PrefixIndex, feed: Feed) -> None:
    """Ranks of one engine are separate streams, and so are engines with equal hashes."""
    rank, other = Feed(index, "a", 1), Feed(index, "b")
    for each in (feed, rank, other):
        each(store_chain(1, 2))
    feed(removal(1))
    rank(cleared())
    assert [tokens_of(index, PROMPT, worker=each.worker) for each in (feed, rank, other)] == [0, 0, 4]


def test_a_removal_applies_only_to_its_own_tier_group_locality_and_owner(index: PrefixIndex, feed: Feed) -> None:
    """A field that differs from the store means another placement; another spelling of the same value means the same
    placement."""
    here: dict[str, Any] = {"medium": "STORAGE", "locality": "REMOTE", "ownership": "fs", "group_idx": 1}
    feed(store_chain(1, **here))
    for elsewhere in ({"medium": "GPU"}, {"locality": "LOCAL"}, {"ownership": "s3"}, {"group_idx": 0}):
        feed(removal(1, **{**here, **elsewhere}))
        assert tokens_of(index, PROMPT) == 2
    feed(removal(1, **{**here, "medium": "disk"}))
    assert tokens_of(index, PROMPT) == 0
    feed(store_chain(1, group_idx=None, medium=None), removal(1, group_idx=0, medium="hbm"))
    assert tokens_of(index, PROMPT) == 0


@pytest.mark.parametrize(
    ("scope", "left"),
    [
        ({}, ["cpu", "disk"]),
        ({"medium": "*"}, []),
        ({"medium": "CPU_PINNED"}, ["gpu", "disk"]),
        ({"group_idx": 1}, ["gpu", "cpu"]),
        ({"medium": "gpu"}, ["cpu", "disk"]),
    ],
)
def test_a_clear_can_be_limited_to_one_tier_or_one_group(
    index: PrefixIndex, feed: Feed, scope: dict[str, Any], left: list[str]
) -> None:
    """The orphans of the cleared placement are removed too. A clear of the whole stream is reported; a partial one is not."""
    feed(store_chain(1), store_chain(1, medium="CPU"), store_chain(1, medium="DISK", group_idx=1))
    feed(store([9], [9, 9], 2, 1), store([8], [8, 8], 2, 77))
    applied = feed(cleared(**scope))
    assert (applied.report is not None and applied.report.cleared) is not bool(scope)
    assert {tier for _, value, tier, *_ in blocks_of(index, feed.worker) if value == 1} == set(left)
    assert count_orphans(index) == ("gpu" in left)


def test_blocks_stored_after_a_clear_count(index: PrefixIndex, feed: Feed) -> None:
    assert feed(store_chain(1, 2), cleared(), store_chain(1)).report == BatchReport(cleared=True)
    assert tokens_of(index, PROMPT) == 2
    assert feed(store_chain(1, 2)).report is None


# --- hybrid models ----------------------------------------------------------------------------------------------------------

DENSE = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}


def store_windows(*hashes: int, window: int = 4, **fields: Any) -> Any:
    kind = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": window}
    return store(hashes, PROMPT, 2, **{**kind, **fields})


def test_a_match_in_a_hybrid_model_needs_the_blocks_of_its_windows(index: PrefixIndex, feed: Feed) -> None:
    """A window of 4 needs the last ceil(3 / 2) = 2 blocks before the end, or all blocks from the beginning."""
    feed(store_chain(1, 2, 3, 4, **DENSE))
    assert tokens_of(index, PROMPT) == 8, "a model is dense until a window is known"
    feed(store_windows(3, 4))
    assert tokens_of(index, PROMPT) == 8
    feed(removal(4, group_idx=1))
    assert tokens_of(index, PROMPT) == 0, "block 3 alone fills no window"
    feed(store_windows(2))
    assert tokens_of(index, PROMPT) == 6
    feed(removal(3, group_idx=1), store_windows(1))
    assert tokens_of(index, PROMPT) == 4
    feed(removal(2, group_idx=1))
    assert tokens_of(index, PROMPT) == 2, "a prefix shorter than a window counts if it is complete"
    feed(removal(1, group_idx=0))
    assert tokens_of(index, PROMPT) == 0, "the dense group must hold the whole prefix"


def test_a_store_without_hashes_announces_its_window_group(index: PrefixIndex, feed: Feed) -> None:
    """57 of 208 stores of a real hybrid model have no hash."""
    feed(store_chain(1, 2, **DENSE), store_windows())
    assert tokens_of(index, PROMPT) == 0


def test_sparse_hashes_wait_for_the_tokens_of_the_dense_group(index: PrefixIndex, feed: Feed) -> None:
    feed(store_windows(1, 2))
    assert blocks_of(index, feed.worker) == []
    feed(store_chain(1, 2, **DENSE))
    assert tokens_of(index, PROMPT) == 4
    assert {group for _, _, _, group, _ in blocks_of(index, feed.worker)} == {0, 1}


def test_every_dense_group_must_hold_the_prefix(index: PrefixIndex, feed: Feed) -> None:
    feed(store_chain(1, 2, 3, **DENSE), store_chain(1, 2, group_idx=2, kv_cache_spec_kind="mla_attention"))
    assert tokens_of(index, PROMPT) == 4


def test_kinds_without_a_known_rule_give_no_credit_and_are_counted(index: PrefixIndex, feed: Feed) -> None:
    """Events do not carry the length of a chunk, so the index ignores such a group and its removals, and marks matches as
    estimates."""
    applied = feed(store_chain(1, 2, **DENSE), store_chain(1, 2, 3, group_idx=1, kv_cache_spec_kind="chunked_local_attention"))
    assert applied.status == "applied"
    assert tokens_of(index, PROMPT) == 4
    assert count_rejected(index) == 1
    assert index.worker(feed.worker).estimate == "unknown-kind"
    feed(removal(1, 2, group_idx=1))
    assert tokens_of(index, PROMPT) == 4


@pytest.mark.parametrize(
    ("hashes", "tokens", "size"),
    [([1, 2], PROMPT[:2], 2), ([1], PROMPT[:3], 2), ([1], PROMPT[:4], 2), ([1], PROMPT[:2], 0), ([], [1], 2)],
)
def test_stores_with_inconsistent_lengths_give_no_credit_and_are_counted(
    index: PrefixIndex, feed: Feed, hashes: list[int], tokens: list[int], size: int
) -> None:
    feed(store(hashes, tokens, size), store([5], [9, 9], 2))
    assert [value for _, value, *_ in blocks_of(index, feed.worker)] == [5], "the other event of the batch counts"
    assert count_rejected(index) == 1


@pytest.mark.parametrize("bad", [-1, 2**32, 2**63, -(2**63)])
def test_an_invalid_token_gives_no_credit_and_is_counted(index: PrefixIndex, feed: Feed, bad: int) -> None:
    """The index must not truncate it to 32 bits, where it would be another token."""
    feed(store([1], [bad, 2], 2), store([5], [9, 9], 2))
    assert [value for _, value, *_ in blocks_of(index, feed.worker)] == [5]
    assert tokens_of(index, [bad % 2**32, 2]) == 0
    assert count_rejected(index) == 1


# --- namespaces -------------------------------------------------------------------------------------------------------------

SCOPES = [
    Scope(),
    Scope(salt="tenant-1"),
    Scope(salt="tenant-2"),
    Scope(lora="adapter"),
    Scope(lora="tenant-1"),
    Scope(lora=1),
    Scope(lora=2),
    Scope(lora="1"),
    Scope(lora="adapter", salt="tenant-1"),
    Scope(mm=(("image", 0, 2),)),
    Scope(mm=(("image", 1, 2),)),
    Scope(mm=(("other", 0, 2),)),
    Scope(mm=((7, 0, 2),)),
    Scope(mm=(("ab" * 32, 0, 2),)),
]


def store_prompt(scope: Scope, *, sglang: bool) -> Any:
    """Return the store event of `PROMPT` as an engine sends it for the namespace `scope`."""
    event = store_chain(1, 2, 3, 4)
    event.lora_name = scope.lora if isinstance(scope.lora, str) else None
    event.lora_id = scope.lora if isinstance(scope.lora, int) else None
    keys: list[list[Any]] = [[event.lora_name] if event.lora_name else [] for _ in range(4)]
    for item, start, length in scope.mm:
        for block in range(start // 2, (start + length - 1) // 2 + 1):
            keys[block].append([item, start - 2 * block])
    if sglang:
        event.cache_salt = scope.salt
    elif scope.salt is not None:
        keys[0].append(scope.salt)
    event.extra_keys = [tuple(key) or None for key in keys]
    return event


@pytest.mark.parametrize("sglang", [False, True], ids=["vllm", "sglang"])
@pytest.mark.parametrize("mine", SCOPES, ids=repr)
def test_blocks_of_one_namespace_do_not_match_another(index: PrefixIndex, feed: Feed, mine: Scope, sglang: bool) -> None:
    """Salts, LoRA names, LoRA numbers, and multimodal items with their positions match only their own blocks."""
    feed(store_prompt(mine, sglang=sglang))
    assert {scope for scope in SCOPES if tokens_of(index, PROMPT, scope)} == {
        scope for scope in SCOPES if prompt_keys(PROMPT, (2, False), scope)[0] == prompt_keys(PROMPT, (2, False), mine)[0]
    }
    assert tokens_of(index, PROMPT, mine) == 8


def test_a_salt_is_inherited_by_children_and_by_orphans_of_a_salted_root(index: PrefixIndex, feed: Feed) -> None:
    """vLLM sends the salt with block 0 only."""
    feed(store([3], PROMPT[4:6], 2, 2))
    feed(store([1], PROMPT[:2], 2, extra_keys=[("tenant",)]), store([2], PROMPT[2:4], 2, 1))
    assert tokens_of(index, PROMPT, Scope(salt="tenant")) == 6
    assert tokens_of(index, PROMPT) == 0


def test_a_multimodal_item_marks_the_blocks_it_covers_and_no_others(index: PrefixIndex, feed: Feed) -> None:
    """An image covers the second and third block. Every prompt shares the block before it; no other prompt shares the blocks
    after it."""
    image = Scope(mm=(("image", 2, 3),))
    feed(store_prompt(image, sglang=False))
    assert tokens_of(index, PROMPT, image) == 8
    assert tokens_of(index, PROMPT) == tokens_of(index, PROMPT, Scope(mm=(("other", 2, 3),))) == 2
    assert tokens_of(index, PROMPT, Scope(mm=(("image", 3, 3),))) == 2


def test_content_that_only_the_engine_knows_gives_no_credit(index: PrefixIndex, feed: Feed) -> None:
    """Digests of prompt embeddings, and a bare string after the root, identify content that is not in a prompt's tokens."""
    feed(
        store([1], [0, 0], 2, extra_keys=[(b"\x01" * 32,)]),
        store([2], [5, 5], 2),
        store([3], [6, 6], 2, 2, extra_keys=[("x",)]),
    )
    assert tokens_of(index, [0, 0]) == 0
    assert tokens_of(index, [5, 5, 6, 6]) == 2
    assert tokens_of(index, [5, 5, 6, 6], Scope(salt="x")) == 0


def test_workers_match_only_prompts_of_their_own_model(index: PrefixIndex, feed: Feed) -> None:
    """Workers of one model are not matched for another model, and workers without a label are not matched for a labelled one.
    All ranks of a source share one label."""
    rank, other = Feed(index, "a", 1), Feed(index, "b")
    for each in (feed, rank, other):
        each(store_chain(1))
    index.set_model("a", "llama")
    index.set_model("c", "llama")
    assert tokens_by_level(index.match(PROMPT, Namespace(model="llama"))).keys() == {("a", 0), ("a", 1)}
    assert tokens_by_level(index.match(PROMPT)).keys() == {("b", 0)}
    assert len(index.match(PROMPT, Namespace(model="qwen"))) == 0
    Feed(index, "c")(store_chain(1))
    index.set_model("a", None)
    assert tokens_by_level(index.match(PROMPT, Namespace(model="llama"))).keys() == {("c", 0)}


# --- tiers ------------------------------------------------------------------------------------------------------------------


def test_tiers_are_cumulative_along_the_prefix(index: PrefixIndex, feed: Feed) -> None:
    feed(
        store_chain(1, 2, 3, 4),
        store([2, 3, 4], [], 0, medium="CPU"),
        store([3, 4], [], 0, medium="DISK"),
        store([4], [], 0, medium="TAPE"),
    )
    assert tiers_of(index) == (8, 8, 8, 8)
    feed(removal(2, 3, 4))
    assert tiers_of(index) == (2, 8, 8, 8)
    feed(removal(3, 4, medium="CPU"))
    assert tiers_of(index) == (2, 4, 8, 8)
    feed(removal(4, medium="DISK"))
    assert tiers_of(index) == (2, 4, 6, 8)
    feed(removal(1))
    assert tiers_of(index) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("medium", "tiers"),
    [
        *((medium, (2, 2, 2, 2)) for medium in (None, "", "gpu", "HBM", "Device")),
        *((medium, (0, 2, 2, 2)) for medium in ("CPU", "cpu_pinned", "CPU_TIER1", "host", "host-pinned")),
        *((medium, (0, 0, 2, 2)) for medium in ("CPU_TIER2", "DISK", "ssd", "NVMe", "FS", "STORAGE", "EXTERNAL", "REMOTE")),
        *((medium, (0, 0, 2, 2)) for medium in ("OBJ", "SHARED_STORAGE", "object-store", "S3", "local_disk", "REMOTE_CPU")),
        *((medium, (0, 0, 0, 2)) for medium in ("tape", "_", "CPUX", "DISKETTE")),
    ],
)
def test_a_medium_maps_to_its_tier_regardless_of_case(
    index: PrefixIndex, feed: Feed, medium: str | None, tiers: tuple[int, ...]
) -> None:
    feed(store_chain(1, medium=medium))
    assert tiers_of(index) == tiers
    expected = ("gpu", "cpu", "disk", (medium or "").upper())[tiers.index(2)]
    assert [tier for _, _, tier, *_ in blocks_of(index, feed.worker)] == [expected]


def test_remote_blocks_count_in_the_disk_tier(index: PrefixIndex, feed: Feed) -> None:
    feed(store_chain(1, locality="REMOTE"))
    assert tiers_of(index) == (0, 0, 2, 2)
    assert [tier for _, _, tier, *_ in blocks_of(index, feed.worker)] == ["gpu"]


def test_a_move_between_tiers_needs_no_tokens(index: PrefixIndex, feed: Feed) -> None:
    """vLLM offloads like this: it announces the hash alone on the CPU, removes the block from the GPU, and stores it again
    later."""
    feed(store_chain(1, 2))
    feed(store([1, 2], [], 0, medium="CPU"), removal(1, 2))
    assert tiers_of(index) == (0, 4, 4, 4)
    feed(store([1], [], 0))
    assert tiers_of(index) == (2, 4, 4, 4)
    feed(removal(1, 2, medium="CPU"))
    assert tiers_of(index) == (2, 2, 2, 2)


def test_a_hash_stored_without_tokens_waits_for_them(index: PrefixIndex, feed: Feed) -> None:
    feed(store([1], [], 0, medium="CPU"))
    assert tiers_of(index) == (0, 0, 0, 0)
    feed(store_chain(1), removal(1))
    assert tiers_of(index) == (0, 2, 2, 2)


# --- incarnations of a stream ------------------------------------------------------------------------------------------------


def test_late_events_of_an_old_incarnation_are_ignored(index: PrefixIndex) -> None:
    old, new = Feed(index), Feed(index, incarnation=1)
    old(store_chain(1, 2))
    late = old.batch(store_chain(1, 2, 3, 4))
    assert new(store_chain(1)).status == "applied"
    assert tokens_of(index, PROMPT) == 2, "the first batch of a new incarnation removes the old blocks"
    assert index.apply(late).status == "void"
    assert index.apply_payload(("a", 0), 0, 9, batch_of(make_store())).status == "void"
    assert index.apply(Gap("a", 0, 9, 9, incarnation=0)).status == "void"
    assert index.apply(Reset("a", 0, 0, "late")).status == "void"
    assert tokens_of(index, PROMPT) == 2


def test_a_reset_removes_all_blocks_of_the_stream_and_numbers_restart_at_0(index: PrefixIndex, feed: Feed) -> None:
    feed(store_chain(1, 2), store([9], [9, 9], 2, 77))
    assert index.apply(Reset("a", 0, 1, "restart")).status == "applied"
    assert blocks_of(index, ("a", 0)) == []
    assert count_orphans(index) == 0
    assert Feed(index, incarnation=1)(store_chain(1)).status == "applied"
    assert tokens_of(index, PROMPT) == 2


def test_a_stream_can_use_64_placements_in_each_incarnation(index: PrefixIndex, feed: Feed) -> None:
    """Names of media and groups come from a peer and are stored, so their number is bounded. Above 64 in one incarnation,
    stores are rejected and counted. Placements that are already known stay usable, other streams are not affected, and a new
    incarnation starts from zero."""
    media = [f"M{number}" for number in range(66)]
    feed(*(store_chain(1, medium=medium) for medium in media))
    assert index.stats().rejected == {("none", "too-many-placements"): 2}
    assert {tier for _, _, tier, *_ in blocks_of(index, ("a", 0))} == set(media[:64])
    feed(store([1], [], 0, medium=media[65]), store_chain(1, 2, medium=media[3]))
    assert index.stats().rejected == {("none", "too-many-placements"): 3}
    assert tokens_of(index, PROMPT) == 4
    other = Feed(index, "b")
    other(*(store_chain(1, medium=medium) for medium in media[64:]))
    assert {tier for _, _, tier, *_ in blocks_of(index, ("b", 0))} == {"M64", "M65"}
    index.apply(Reset("a", 0, 1, "restart"))
    Feed(index, incarnation=1)(*(store_chain(1, medium=medium) for medium in media[64:]))
    assert {tier for _, _, tier, *_ in blocks_of(index, ("a", 0))} == {"M64", "M65"}
    assert sum(info.rejected.get(("none", "too-many-placements"), 0) for info in index.workers() if info.source == "b") == 0


def test_the_ranks_of_a_source_share_the_limit_of_placements(index: PrefixIndex) -> None:
    """An engine's ranks have the same media, so media that several ranks name count once, until the last of these ranks starts
    over or is removed. Other sources are not affected."""
    media = [f"M{number}" for number in range(66)]

    def tiers(rank: int) -> set[str]:
        return {tier for _, _, tier, *_ in blocks_of(index, ("a", rank))}

    first, second, other = Feed(index), Feed(index, rank=1), Feed(index, "b")
    first(*(store_chain(1, medium=medium) for medium in media[:40]))
    second(*(store_chain(1, medium=medium) for medium in media[30:]))
    assert index.stats().rejected == {("none", "too-many-placements"): 2}
    assert (tiers(0), tiers(1)) == (set(media[:40]), set(media[30:64]))
    other(*(store_chain(1, medium=medium) for medium in media[64:]))
    assert index.stats().rejected == {("none", "too-many-placements"): 2}
    index.apply(Reset("a", 0, 1, "restart"))
    second(*(store_chain(1, medium=medium) for medium in media[64:]))
    assert tiers(1) == set(media[30:])
    index.remove_worker("a", 1)
    Feed(index, incarnation=1)(*(store_chain(1, medium=medium) for medium in media[:64]))
    assert tiers(0) == set(media[:64])
    assert index.stats().rejected == {("none", "too-many-placements"): 2}


def test_duplicates_are_ignored(index: PrefixIndex, feed: Feed) -> None:
    """Replay overlaps with live batches; a batch that is applied twice would leave copies that no removal takes."""
    batch = feed.batch(store_chain(1))
    assert [index.apply(batch).status for _ in range(3)] == ["applied", "duplicate", "duplicate"]
    assert index.apply_payload(("a", 0), 0, 0, batch_of(make_store())).status == "duplicate"
    assert {copies for *_, copies in blocks_of(index, feed.worker)} == {1}


def test_a_gap_removes_no_blocks_and_its_numbers_are_duplicates_afterwards(index: PrefixIndex, feed: Feed) -> None:
    feed(store_chain(1))
    late = feed.batch(removal(1))
    assert index.apply(Gap("a", 0, 1, 5)).status == "applied"
    assert index.apply(late).status == "duplicate"
    assert tokens_of(index, PROMPT) == 2
    feed.seq = 6
    assert feed(store_chain(1, 2)).status == "applied"


def test_a_compacted_gap_is_not_counted(index: PrefixIndex, feed: Feed) -> None:
    """The snapshot after the gap contains what the gap left out."""
    feed(store_chain(1))
    assert index.apply(Gap("a", 0, 1, 5, compacted=True)).status == "applied"
    assert index.stats().gaps == 0
    feed.seq = 6
    assert feed(store_chain(1, 2)).status == "applied"


def test_a_removed_worker_stays_removed_until_it_is_readmitted(index: PrefixIndex, feed: Feed) -> None:
    """Batches still in flight do not restore a removed worker; a new incarnation or `readmit` does."""
    feed(store_chain(1, 2))
    assert index.remove_worker("a", 0) == 2
    assert workers_of(index) == set()
    assert feed(store_chain(1)).status == "void"
    assert index.apply(Reset("a", 0, 0, "late")).status == "void"
    assert workers_of(index) == set()
    assert index.remove_worker("a", 0) == 0, "a second removal does nothing"
    index.readmit("a")
    assert feed(store_chain(1)).status == "applied"
    index.remove_worker(("a", 0))
    assert feed(store_chain(1)).status == "void"
    assert Feed(index, incarnation=1)(store_chain(1, 2, 3)).status == "applied"
    assert tokens_of(index, PROMPT) == 6


def test_removing_a_source_removes_all_its_ranks_and_no_other(index: PrefixIndex, feed: Feed) -> None:
    for each in (feed, Feed(index, "a", 3), Feed(index, "ab")):
        each(store_chain(1, 2))
    assert index.remove_worker("a") == 4
    assert workers_of(index) == {("ab", 0)}
    assert index.remove_worker("absent") == 0


def test_dozens_of_streams_can_be_removed_and_replaced(index: PrefixIndex) -> None:
    """New streams reuse the numbers of removed ones, and the bitmaps over streams shrink and grow."""
    feeds = [Feed(index, f"engine-{number}") for number in range(130)]
    for feed in feeds:
        feed(store_chain(1))
    for removed in (*range(64, 130), 5):
        index.remove_worker(f"engine-{removed}")
    Feed(index, "late")(store_chain(1, 2))
    assert len(index.match(PROMPT)) == 64
    index.set_model("late", "llama")
    assert [hit.source for hit in index.match(PROMPT, Namespace(model="llama"))] == ["late"]
    assert len(index.match(PROMPT)) == 63


# --- block sizes and EAGLE --------------------------------------------------------------------------------------------------


def test_one_query_matches_workers_of_different_block_sizes(index: PrefixIndex) -> None:
    Feed(index, "two")(store_chain(1, 2, 3))
    Feed(index, "four")(store([1, 2], PROMPT, 4))
    assert {worker[0]: tiers[0] for worker, tiers in tokens_by_level(index.match(PROMPT)).items()} == {"two": 6, "four": 8}
    assert {worker[0]: tiers[0] for worker, tiers in tokens_by_level(index.match(PROMPT[:7])).items()} == {"two": 6, "four": 4}


@pytest.mark.parametrize("held", [63, 64, 65, 100])
def test_one_query_matches_block_sizes_that_need_different_numbers_of_lookups(index: PrefixIndex, held: int) -> None:
    """The first lookup covers 64 blocks of each size, and only blocks of 2 need a second one for 200 tokens. The final result
    includes what the first lookup found for the other size, and counts nothing twice."""
    tokens = list(range(1000, 1200))
    Feed(index, "two")(store(range(1, held + 1), tokens[: 2 * held], 2))
    Feed(index, "four")(store(range(1, 51), tokens, 4))
    Feed(index, "short")(store(range(1, 8), tokens[:28], 4))
    found = tokens_by_level(index.match(tokens))
    assert {worker[0]: tiers[0] for worker, tiers in found.items()} == {"two": 2 * held, "four": 200, "short": 28}


def test_a_block_of_another_size_continues_no_chain(index: PrefixIndex, feed: Feed) -> None:
    feed(store_chain(1), store([2], PROMPT[2:6], 4, 1))
    assert tokens_of(index, PROMPT) == 2


def test_eagle_blocks_cover_one_token_more_than_they_count(index: PrefixIndex, feed: Feed) -> None:
    """SGLang under EAGLE sends pairs of tokens: a block of 2 is identified by 3 tokens, so a prompt must contain the third."""
    pairs = list(pairwise(PROMPT))
    feed(store([1, 2], pairs[:4], 2), store([3], pairs[4:6], 2, 2))
    assert [tokens_of(index, PROMPT[:length]) for length in range(2, 9)] == [0, 2, 2, 4, 4, 6, 6]
    assert tokens_of(index, [*PROMPT[:4], 99]) == 2
    assert [key for key, *_ in sorted(blocks_of(index, feed.worker), key=lambda block: block[1])] == block_keys(
        PROMPT[:7], 2, eagle=True
    )


def test_eagle_blocks_and_plain_blocks_with_equal_tokens_are_distinct(index: PrefixIndex) -> None:
    """Both hash the same tokens but count them differently."""
    Feed(index, "eagle")(store([1], [(1, 2), (2, 3)], 2))
    Feed(index, "plain")(store([1], [1, 2, 3], 3))
    assert {worker[0]: tiers[0] for worker, tiers in tokens_by_level(index.match([1, 2, 3])).items()} == {
        "eagle": 2,
        "plain": 3,
    }


# --- queries ----------------------------------------------------------------------------------------------------------------

BIG = [2**32 - 1, 0, 2**31, 2**16 + 1, 7, 8]


@pytest.mark.parametrize(
    "given",
    [list, tuple, lambda tokens: array("I", tokens), lambda tokens: np.array(tokens, dtype=np.uint32)],
    ids=["list", "tuple", "array-I", "numpy-uint32"],
)
def test_tokens_can_be_a_list_a_tuple_or_a_buffer_of_u32(
    index: PrefixIndex, feed: Feed, given: Callable[[list[int]], Any]
) -> None:
    feed(store([1, 2, 3], BIG, 2))
    tokens = given(BIG)
    assert tokens_of(index, tokens) == 6
    assert block_keys(tokens, 2) == block_keys(BIG, 2)
    assert [tokens_by_level(match) for match in index.match_many([tokens, tokens[:4], tokens[:0]])] == [
        tokens_by_level(index.match(BIG[:length])) for length in (6, 4, 0)
    ]


def test_a_memoryview_is_a_buffer_too(index: PrefixIndex, feed: Feed) -> None:
    feed(store([1, 2, 3], BIG, 2))
    assert tokens_of(index, memoryview(array("I", BIG))) == 6
    assert tokens_of(index, memoryview(array("I", BIG))[:4]) == 4


OTHERS: dict[str, Callable[[list[int]], Any]] = {
    "numpy-int32": lambda tokens: np.array(tokens, dtype=np.int32),
    "numpy-int64": lambda tokens: np.array(tokens, dtype=np.int64),
    "numpy-uint64": lambda tokens: np.array(tokens, dtype=np.uint64),
    "numpy-uint16": lambda tokens: np.array(tokens, dtype=np.uint16),
    "numpy-big-endian": lambda tokens: np.array(tokens, dtype=">u4"),
    "numpy-strided": lambda tokens: np.repeat(np.array(tokens, dtype=np.uint32), 2)[::2],
    "numpy-reversed": lambda tokens: np.array(tokens[::-1], dtype=np.uint32)[::-1],
    "numpy-object": lambda tokens: np.array(tokens, dtype=object),
    "numpy-2d": lambda tokens: np.array([tokens], dtype=np.uint32),
    "numpy-float": lambda tokens: np.array(tokens, dtype=np.float32),
    "array-L": lambda tokens: array("L", tokens),
    "array-q": lambda tokens: array("q", tokens),
    "array-i": lambda tokens: array("i", tokens),
    "array-H": lambda tokens: array("H", tokens),
    "array-f": lambda tokens: array("f", tokens),
    "numpy-scalars": lambda tokens: list(np.array(tokens, dtype=np.uint32)),
    "iterator": iter,
    "range": lambda tokens: range(tokens[0], tokens[-1] + 1),
}


@pytest.mark.parametrize("given", OTHERS.values(), ids=OTHERS.keys())
def test_other_token_containers_are_read_correctly_or_rejected(
    index: PrefixIndex, feed: Feed, given: Callable[[list[int]], Any]
) -> None:
    feed(store_chain(1, 2, 3, 4))
    try:
        found = tokens_of(index, given(PROMPT))
    except REFUSED as refusal:
        assert len(str(refusal)) > 10  # noqa: PT017 - an error is one of two correct results
    else:
        assert found == 8


@pytest.mark.parametrize(
    "tokens", [b"\1\0\0\0\2\0\0\0", bytearray(8), memoryview(b"\1\0\0\0\2\0\0\0"), "12", 7, None, 1.5, {1: 2}]
)
def test_an_invalid_list_of_tokens_raises(index: PrefixIndex, tokens: Any) -> None:
    for query in (index.match, lambda what: index.match_many([what]), lambda what: block_keys(what, 2)):
        with pytest.raises(REFUSED, match=r"(?i)token") as refusal:
            query(tokens)
        assert type(tokens).__name__ in str(refusal.value)


@pytest.mark.parametrize(
    "given",
    [
        "llama",
        {"model": "llama"},
        Namespace(model=5),  # type: ignore[arg-type]
        Namespace(salt=b"tenant"),  # type: ignore[arg-type]
        Namespace(lora=1.5),  # type: ignore[arg-type]
        Namespace(lora=2**63),
        Namespace(mm=["image"]),  # type: ignore[list-item]
        Namespace(mm=[MultiModal("image", 0, "x")]),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_an_invalid_namespace_raises(index: PrefixIndex, given: Any) -> None:
    """The message is one sentence that says what a namespace is. It does not contain the salt."""
    for query in (lambda: index.match(PROMPT, given), lambda: block_keys(PROMPT, 2, given)):
        with pytest.raises(TypeError, match="namespace is a Namespace with text for model and salt") as refusal:
            query()
        assert type(given).__name__ in str(refusal.value)
        assert "tenant" not in str(refusal.value)


@pytest.mark.parametrize("stream", [5, None, b"a", ("a",), ("a", "0"), ("a", 0, 0), (1, "a")])
def test_an_invalid_stream_raises(index: PrefixIndex, stream: Any) -> None:
    with pytest.raises(TypeError, match=r"^a stream is \(source, rank\), or its source alone for rank 0; not ") as refusal:
        index.apply_payload(stream, 0, 0, b"")
    assert str(refusal.value).endswith(f"not {stream!r}")


@pytest.mark.parametrize("bad", [-1, 2**32, 2**64, -(2**63), 2**200, "x", None, 1.0, (1, 2)])
def test_a_token_outside_of_u32_raises(index: PrefixIndex, bad: Any) -> None:
    with pytest.raises(REFUSED, match=r"(?i)token"):
        index.match([1, bad, 3])


def test_a_token_outside_of_u32_in_a_wider_buffer_is_rejected_and_not_truncated(index: PrefixIndex, feed: Feed) -> None:
    feed(store([1], [1, 2], 2))
    for tokens in (
        np.array([2**32 + 1, 2], dtype=np.int64),
        np.array([-(2**32) + 1, 2], dtype=np.int64),
        array("L", [2**32 + 1, 2]),
    ):
        with pytest.raises(REFUSED):
            index.match(tokens)


def test_prompts_shorter_than_a_block_match_nothing(index: PrefixIndex, feed: Feed) -> None:
    assert len(index.match([])) == len(index.match(PROMPT)) == 0
    assert index.match_many([]) == []
    feed(store_chain(1, 2))
    for prompt in ([], PROMPT[:1]):
        match = index.match(prompt)
        assert (len(match), match.best, match.get("a"), list(match)) == (0, None, None, [])


def test_a_match_names_the_best_worker_and_all_others(index: PrefixIndex, feed: Feed) -> None:
    feed(store_chain(1))
    Feed(index, "b", 2)(store_chain(1, 2, 3, medium="CPU"))
    match = index.match(PROMPT)
    best = match.best
    assert best is not None
    assert (best.source, best.rank, best.tokens) == ("b", 2, 6)
    assert {name: best.tiers[name] for name in ("gpu", "cpu", "disk")} == {"gpu": 0, "cpu": 6, "disk": 6}
    mine = match.get("a")
    assert mine is not None
    assert mine.tokens == 2
    assert match.get("b") is None
    assert match.get("b", 2) is not None
    assert match.get("absent") is None
    assert len(match) == 2
    assert {hit.source for hit in match} == {"a", "b"}


def test_match_many_returns_what_match_returns_for_each_prompt(index: PrefixIndex, feed: Feed) -> None:
    feed(store_prompt(Scope(salt="t"), sglang=True), store([9], [9, 9], 2))
    prompts = [PROMPT, [9, 9], [], PROMPT[:5], [8, 8]]
    for scope in (Scope(), Scope(salt="t"), Scope(model="m")):
        found = index.match_many(prompts, namespace(scope))
        assert [tokens_by_level(match) for match in found] == [
            tokens_by_level(index.match(prompt, namespace(scope))) for prompt in prompts
        ]


def test_matching_precomputed_keys_equals_matching_tokens(index: PrefixIndex, feed: Feed) -> None:
    feed(store_chain(1, 2, 3))
    keys = block_keys(PROMPT, 2)
    for given in (keys, array("Q", keys), np.array(keys, dtype=np.uint64), tuple(keys)):
        assert (
            tokens_by_level(index.match_keys(given))
            == tokens_by_level(index.match_keys(given, 2))
            == tokens_by_level(index.match(PROMPT))
        )
    assert len(index.match_keys([])) == len(index.match_keys(keys, 4)) == 0
    assert len(index.match_keys(keys, namespace=Namespace(model="m"))) == 0


@pytest.mark.parametrize("keys", [np.array([1], dtype=">u8"), np.array([-1]), [-1], [2**64], b"12345678", "12", [1.5], None])
def test_invalid_keys_raise(index: PrefixIndex, keys: Any) -> None:
    with pytest.raises(REFUSED, match="keys"):
        index.match_keys(keys)


def test_matching_keys_needs_a_block_size_if_workers_have_several(index: PrefixIndex, feed: Feed) -> None:
    """If workers have two block sizes, the caller must pass one; the error says so."""
    feed(store_chain(1, 2))
    Feed(index, "four")(store([1], PROMPT[:4], 4))
    with pytest.raises(REFUSED, match="block_size"):
        index.match_keys(block_keys(PROMPT, 2))
    assert tokens_by_level(index.match_keys(block_keys(PROMPT, 2), 2)).keys() == {("a", 0)}
    assert tokens_by_level(index.match_keys(block_keys(PROMPT, 4), 4)).keys() == {("four", 0)}


@pytest.mark.parametrize("size", [0, -1, 2**40])
def test_an_invalid_block_size_is_refused(size: int) -> None:
    with pytest.raises(REFUSED, match="block_size"):
        block_keys(PROMPT, size)


# --- payloads ---------------------------------------------------------------------------------------------------------------


def test_tokens_sent_as_decimal_strings_are_read(index: PrefixIndex) -> None:
    """TensorRT-LLM can send token ids as decimal strings."""
    payload = batch_of(make_store(block_hashes=[1, 2], token_ids=[str(token) for token in PROMPT[:4]]))
    assert index.apply_payload("a", 0, 0, payload).status == "applied"
    assert tokens_of(index, PROMPT) == 4


def test_an_invalid_event_is_rejected_and_the_rest_of_its_batch_is_applied(index: PrefixIndex) -> None:
    events = [
        make_store(block_hashes=[1]),
        make_store(block_hashes="x"),
        {"type": "Tomorrow"},
        5,
        make_store(block_hashes=[3], token_ids=[3, 4]),
    ]
    applied = index.apply_payload(("a", 0), 0, 0, batch_of(*events))
    assert applied.status == "applied"
    assert applied.report is not None
    assert [rejected.index for rejected in applied.report.rejected] == [1, 2, 3]
    assert len(blocks_of(index, ("a", 0))) == 2
    assert index.apply_payload(("a", 0), 0, 0, batch_of(make_store())).status == "duplicate"


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x90", b"\xff" * 40, pack([1.0]), pack({"ts": 1.0}), pack([1.0, [], 0])[:-3]]
)
def test_a_payload_that_is_not_a_batch_is_rejected_and_reported(index: PrefixIndex, payload: bytes) -> None:
    applied = index.apply_payload(("a", 0), 0, 0, payload)
    assert applied.report is not None
    assert len(applied.report.rejected) == 1
    assert index.stats().blocks == 0


def test_a_source_name_alone_means_rank_0(index: PrefixIndex) -> None:
    index.apply_payload("a", 0, 0, batch_of(make_store()))
    assert [hit.rank for hit in index.match([1, 2])] == [0]
    assert index.digest("a") == index.digest(("a", 0))
    assert [block.hash for block in index.blocks("a")] == [11]


HOSTILE = """
import struct, sys
import msgspec
from kvevents.index import MAX_PAYLOAD_EXPANSION, PrefixIndex

pack = msgspec.msgpack.encode
SIZE = 1 << 19
SLACK = 16 << 20  # arenas, and memory that the allocator retains


def batch(body, count=1):
    return b"\\x93\\xcb" + struct.pack(">d", 1.0) + b"\\xdd" + struct.pack(">I", count) + body + b"\\x00"


def stored(hashes, tokens, size, *rest):
    head = b"\\x96" if not rest else b"\\xdc" + struct.pack(">H", 6 + len(rest))
    return batch(head + pack("BlockStored") + hashes + b"\\xc0" + tokens + pack(size) + b"\\xc0" + b"".join(rest))


def array(count, body):
    return b"\\xdd" + struct.pack(">I", count) + body


cleared = pack(["AllBlocksCleared"])
one_block = pack("BlockStored") + b"\\x91\\x01\\xc0\\x91\\x01\\x01"
few = range(SIZE // 28)
numbers = range(1 << 17, (1 << 17) + SIZE // 6)
kinds = {
    "blocks of one token": stored(pack([*numbers]), array(len(numbers), b"\\x01" * len(numbers)), 1),
    "hashes without tokens": stored(pack([*numbers]), b"\\x90", 0),
    "one hash again and again": stored(array(SIZE, b"\\x01" * SIZE), b"\\x90", 0),
    "removals": batch(b"\\x92" + pack("BlockRemoved") + array(SIZE, b"\\x01" * SIZE)),
    "tokens of no block": stored(b"\\x90", array(SIZE, b"\\x01" * SIZE), 1 << 30),
    "declared, not sent": stored(array(0xFFFFFFFF, b"\\x01"), array(0xFFFFFFFF, b"\\x01"), 1),
    "declared events": batch(cleared, 0xFFFFFFFF),
    "empty events": batch(b"\\x90" * SIZE, SIZE),
    "events of nil": batch(b"\\xc0" * SIZE, SIZE),
    "clears": batch(cleared * (SIZE // len(cleared)), SIZE // len(cleared)),
    "empty extra keys": stored(b"\\x91\\x01", b"\\x91\\x01", 1, b"\\xc0", b"\\xc0", array(SIZE, b"\\x90" * SIZE)),
    "deep extra keys": stored(b"\\x91\\x01", b"\\x91\\x01", 1, b"\\xc0", b"\\xc0", b"\\x91" * SIZE + b"\\xc0"),
    "a long name": stored(b"\\x91\\x01", b"\\x91\\x01", 1, b"\\xc0", pack("x" * SIZE)),
    "a long medium": stored(b"\\x91\\x01", b"\\x91\\x01", 1, pack("x" * SIZE)),
    "a multimodal item of no form, for every block": batch(
        b"\\x86" + pack("type") + pack("BlockStored") + pack("block_hashes") + array(100_000, b"\\x01" * 100_000)
        + pack("parent_block_hash") + b"\\xc0" + pack("token_ids") + b"\\x90" + pack("block_size") + b"\\x01"
        + pack("mm_keys") + pack({"x": "y" * 4_000})
    ),
    "depth": b"\\x91" * SIZE,
    "many media": batch(b"".join(b"\\x97" + one_block + b"\\xc0" + pack(f"m{n}") for n in few), len(few)),
    "many groups": batch(b"".join(b"\\x9a" + one_block + b"\\xc0\\xc0\\xc0\\xc0" + pack(n) for n in few), len(few)),
}


def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


for kind, payload in kinds.items():
    index = PrefixIndex()
    index.apply_payload("warm", 0, 0, batch(cleared))
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = peak()
    index.apply_payload("a", 0, 0, payload)
    grown = peak() - before
    retained = index.stats().bytes
    limit = MAX_PAYLOAD_EXPANSION * len(payload)
    print(f"{kind}: {len(payload)} bytes, {grown} allocated, {retained} retained, limit {limit}")
    assert retained <= limit + SLACK, kind
    assert grown <= limit + SLACK, kind
    del index
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read as Linux reports it")
def test_the_memory_of_a_hostile_payload_is_bounded_by_a_multiple_of_its_size() -> None:
    """A separate process resets and measures its peak memory for each kind of payload. Declared lengths are not allocated, and
    the stored data is proportional to the bytes that were sent."""
    assert 1 <= MAX_PAYLOAD_EXPANSION <= 200
    result = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


# --- memory -----------------------------------------------------------------------------------------------------------------


def store_long_chain(first: int, count: int) -> Any:
    tokens = [first + at for at in range(2 * count)]
    return store(range(first, first + count), tokens, 2)


def test_the_memory_limit_holds_and_blocks_of_the_largest_worker_are_evicted() -> None:
    """A worker with 40 blocks keeps all of them while a much larger one loses blocks. Evicted blocks are counted, and the
    remaining prefixes still match."""
    limit = PrefixIndex().stats().bytes + 1_000_000
    index = PrefixIndex(memory_limit=limit)
    small, large = Feed(index, "small"), Feed(index, "large")
    small(store_long_chain(1, 40))
    for number in range(40):
        large(store_long_chain(1_000_000 * (number + 1), 1000))
        assert index.stats().bytes <= limit
    stats = index.stats()
    assert stats.evicted > 0
    assert tokens_of(index, list(range(1, 81)), worker=("small", 0)) == 80
    assert 0 < len(blocks_of(index, ("large", 0))) < 40_000
    assert stats.blocks == len(blocks_of(index, ("large", 0))) + 40
    assert stats.blocks + stats.evicted == 40_040


def test_evicted_blocks_can_be_removed_and_stored_again() -> None:
    """An engine does not know which blocks the index evicted: it can remove them without an error, and new stores of them
    count."""
    limit = PrefixIndex().stats().bytes + 300_000
    index = PrefixIndex(memory_limit=limit)
    feed = Feed(index)
    for number in range(20):
        feed(store_long_chain(1_000_000 * (number + 1), 1000))
    for number in range(20):
        first = 1_000_000 * (number + 1)
        assert feed(removal(*range(first, first + 1000))).status == "applied"
    assert index.stats().blocks == 0
    feed(store_long_chain(1, 10))
    assert tokens_of(index, list(range(1, 21))) == 20


@pytest.mark.parametrize("limit", [0, -1])
def test_an_invalid_memory_limit_is_refused(limit: int) -> None:
    with pytest.raises(REFUSED, match="memory_limit"):
        PrefixIndex(memory_limit=limit)


# --- digest, snapshot -------------------------------------------------------------------------------------------------------


def test_a_digest_depends_only_on_resident_blocks_and_not_on_their_history(index: PrefixIndex) -> None:
    one, two, three = Feed(index, "one"), Feed(index, "two"), Feed(index, "three", 5)
    one(store_chain(1, 2, 3))
    two(store([2, 3], PROMPT[2:6], 2, 1))
    two(store_chain(1), store([9], [9, 9], 2))
    assert index.digest("one") != index.digest("two")
    two(removal(9))
    three(store_chain(1, 2, 3))
    assert index.digest("one") == index.digest("two") == index.digest(("three", 5))
    assert len(index.digest("one")) == 32
    int(index.digest("one"), 16)


@pytest.mark.parametrize(
    "change",
    [
        store_chain(1, group_idx=0),
        store_chain(1, 2, 3),
        store_chain(1, medium="CPU"),
        store_chain(1, group_idx=1),
        store([7], [1, 2], 2),
    ],
)
def test_a_digest_distinguishes_copies_tiers_groups_and_hashes(index: PrefixIndex, feed: Feed, change: Any) -> None:
    feed(store_chain(1, 2))
    before = index.digest("a")
    feed(change)
    assert index.digest("a") != before


def make_full_index() -> PrefixIndex:
    """Return an index with at least one of everything that a snapshot must hold."""
    index = PrefixIndex()
    a, b = Feed(index), Feed(index, "b", 1, incarnation=3)
    a(
        store_chain(1, 2, 3, **DENSE),
        store_chain(1, **DENSE),
        store_windows(2, 3),
        store([3], [], 0, medium="CPU"),
        store([50], [], 0, medium="CPU"),
    )
    a(store([9], [9, 9], 2, 8), store_prompt(Scope(lora="x", salt="t"), sglang=True), store([4], PROMPT[6:], 2, 3, **DENSE))
    b(store([1, 2], list(pairwise(PROMPT))[:4], 2, medium="tape", locality="REMOTE", ownership="fs"))
    index.set_model("b", "llama")
    Feed(index, "gone")(store_chain(1))
    index.remove_worker("gone")
    return index


def behave_equally(one: PrefixIndex, other: PrefixIndex) -> bool:
    """Return whether both indexes behave equally, now and after the same events were applied to both."""
    for _ in range(2):
        for scope in (Scope(), Scope(lora="x", salt="t"), Scope(model="llama")):
            if tokens_by_level(one.match(PROMPT, namespace(scope))) != tokens_by_level(other.match(PROMPT, namespace(scope))):
                return False
        if workers_of(one) != workers_of(other) or one.stats().blocks != other.stats().blocks:
            return False
        if any(blocks_of(one, worker) != blocks_of(other, worker) for worker in workers_of(one)):
            return False
        if any(one.digest(worker) != other.digest(worker) for worker in workers_of(one)):
            return False
        for index in (one, other):
            a, b, removed = Feed(index), Feed(index, "b", 1, incarnation=3), Feed(index, "gone")
            a.seq, b.seq, removed.seq = 2, 0, 5
            a(store([8], [8, 8], 2), store([50], [5, 5], 2, 1, **DENSE), removal(2, group_idx=1))
            assert b(cleared()).status == "duplicate"
            assert removed(store_chain(1)).status == "void"
    return True


def test_a_snapshot_restores_everything_from_a_file_or_a_stream(tmp_path: Path) -> None:
    """Blocks, tiers, groups, orphans, labels, removed workers and sequence numbers are restored, so that the index continues
    where the other one stopped."""
    index, path, stream = make_full_index(), tmp_path / "index.snapshot", io.BytesIO()
    index.snapshot(path)
    index.snapshot(stream)
    for file in (path, str(path), io.BytesIO(stream.getvalue())):
        original, restored = make_full_index(), PrefixIndex()
        restored.restore(file)
        assert behave_equally(original, restored)
    assert not list(tmp_path.glob("*.tmp*")), "no temporary file is left"


def test_restoring_replaces_the_previous_content() -> None:
    stream = io.BytesIO()
    make_full_index().snapshot(stream)
    index = PrefixIndex()
    Feed(index, "old")(store_chain(1))
    stream.seek(0)
    index.restore(stream)
    assert workers_of(index) == {("a", 0), ("b", 1)}


def test_a_damaged_snapshot_is_refused_and_leaves_the_index_as_it_was(tmp_path: Path) -> None:
    """The snapshot is truncated at many lengths, or has one bit flipped at many positions."""
    path = tmp_path / "index.snapshot"
    make_full_index().snapshot(path)
    whole = path.read_bytes()
    index = PrefixIndex()
    Feed(index, "mine")(store_chain(1, 2))
    lengths = {*range(0, len(whole), max(1, len(whole) // 97)), len(whole) - 1}
    damaged = [whole[:length] for length in sorted(lengths)]
    places = range(0, len(whole), max(1, len(whole) // 97))
    damaged += [whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :] for at in places]
    damaged += [b"", b"{}", b"\0" * 4096, whole + b"x"]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(KVEventsError) as refusal:
            index.restore(path)
        assert str(path) in str(refusal.value)
        assert tokens_of(index, PROMPT, worker=("mine", 0)) == 4
    with pytest.raises(KVEventsError):
        index.restore(io.BytesIO(whole[:-1]))


def test_a_snapshot_of_another_build_with_this_version_is_restored() -> None:
    """A build that changes the format must increment the version: else it would misread files of other builds.

    Write the file again, from `make_full_index`, after each such change.
    """
    content = (paths.DATA / "index.snapshot").read_bytes()
    restored, expected = PrefixIndex(), make_full_index()
    restored.restore(io.BytesIO(content))
    assert list(map(repr, restored.workers())) == list(map(repr, expected.workers()))
    assert behave_equally(restored, expected)
    older = content[:8] + bytes([content[8] - 1]) + content[9:]
    with pytest.raises(KVEventsError, match="too old"):
        restored.restore(io.BytesIO(older))


def test_a_snapshot_of_a_newer_version_is_refused_and_says_so(tmp_path: Path) -> None:
    """The version is a number in the first 16 bytes. The test increments each of them; the byte that holds the version gives an
    error that names a newer version."""
    path = tmp_path / "index.snapshot"
    make_full_index().snapshot(path)
    whole = path.read_bytes()
    messages = []
    for at in range(16):
        path.write_bytes(whole[:at] + bytes([whole[at] + 1 & 0xFF]) + whole[at + 1 :])
        with pytest.raises(KVEventsError) as refusal:
            PrefixIndex().restore(path)
        messages.append(str(refusal.value))
    assert any("version" in message and "newer" in message for message in messages), messages


def test_a_missing_snapshot_raises(tmp_path: Path) -> None:
    with pytest.raises(KVEventsError, match="nowhere"):
        PrefixIndex().restore(tmp_path / "nowhere")
    with pytest.raises(KVEventsError, match="nowhere"):
        PrefixIndex().snapshot(tmp_path / "nowhere" / "file")


# --- inspection -------------------------------------------------------------------------------------------------------------


def test_reprs_show_the_important_values(index: PrefixIndex, feed: Feed) -> None:
    applied = feed(store_chain(1, 2))
    match = index.match(PROMPT)
    assert repr(index) == f"<PrefixIndex 1 workers, 2 blocks, {index.stats().bytes} bytes>"
    assert repr(match) == "<Match of 1 workers: a/0: 4>"
    assert repr(match.best) == "<WorkerMatch a rank 0: 4 tokens, gpu 4>"
    assert repr(applied) == "ApplyResult(status='applied', report=None)"
    assert repr(index.workers()).startswith("[WorkerInfo(blocks=2, orphans=0, ")
    assert repr(index.stats()).startswith("IndexStats(blocks=2, orphans=0, ")
    assert re.fullmatch(
        r"Block\(key=\d+, hash=1, tier='gpu', group=0, copies=1, certain_copies=1\)", repr(next(index.blocks("a")))
    )
    assert repr(Namespace(salt="t", mm=[MultiModal("image", 0, 2)])) == (
        "Namespace(model=None, lora=None, salt='t', mm=[MultiModal(id='image', start=0, length=2)])"
    )


def test_unknown_workers_raise(index: PrefixIndex) -> None:
    """Requesting the blocks of an unknown worker is a mistake of the caller; an empty result would look like a real one."""
    assert list(index.workers()) == []
    for query in (index.digest, index.blocks):
        with pytest.raises(UnknownSourceError, match="absent"):
            query(("absent", 0))


def test_without_the_native_module_the_package_works_and_importing_the_index_names_what_is_missing() -> None:
    script = (
        "import sys; sys.modules['kvevents_native._native'] = None\n"
        "import kvevents, kvevents.compat.vllm\n"
        "from kvevents.errors import MissingDependencyError\n"
        "try:\n    import kvevents.index\n"
        "except MissingDependencyError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "kvevents" in result.stdout
    assert len(result.stdout) > 40


def test_importing_the_package_does_not_load_the_native_module() -> None:
    script = "import sys, kvevents; print([name for name in sys.modules if '_native' in name or 'kvevents.index' in name])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_event_layouts_in_rust_equal_those_of_the_dialects() -> None:
    """The list in Rust must change when a dialect gains a field. A clear can name a tier or a group."""
    source = (paths.ROOT / "native" / "index" / "src" / "wire" / "scan" / "layouts.rs").read_text()
    lists = {
        name: re.findall(r'"(\w+)"', body)
        for name, body in re.findall(r"const (\w+): &\[&str\] = &\[(.*?)\];", source, re.DOTALL)
    }
    rows = re.findall(r'\("?(\w+)"?, (\w+), (\w+)\)', source)
    maps = {kind: [name for name in kind.__struct_fields__ if name != "unknown_fields"] for kind in (BlockStored, BlockRemoved)}
    assert [(tag, lists[fields], lists[names]) for tag, fields, names in rows] == [
        ("BlockStored", list(ARRAY_STORED), maps[BlockStored]),
        ("BlockRemoved", list(ARRAY_REMOVED), maps[BlockRemoved]),
        ("AllBlocksCleared", list(ARRAY_CLEARED), ["medium", "group_idx"]),
    ]
    assert frozenset(lists["NEUTRAL_KINDS"]) == NEUTRAL_KINDS


def test_a_batch_needs_a_payload_or_events_but_not_both(index: PrefixIndex) -> None:
    """A batch with a payload and events leads to the same index as a batch with one of them."""
    payload = batch_of(make_store(block_hashes=[1, 2], token_ids=PROMPT[:4]))
    batch = msgspec.structs.replace(Feed(index).batch(store_chain(1, 2)), payload=payload)
    index.apply(batch)
    index.apply(msgspec.structs.replace(batch, source="b", payload=b""))
    index.apply_payload(("c", 0), 0, 0, payload)
    assert blocks_of(index, ("a", 0)) == blocks_of(index, ("b", 0)) == blocks_of(index, ("c", 0))
    assert index.digest("a") == index.digest("b") == index.digest("c")


# --- reports about workers and matches


def test_a_worker_reports_its_block_sizes_and_its_tiers(index: PrefixIndex, feed: Feed) -> None:
    """Both follow every event: stores, moves between tiers, removals, and a new incarnation that has sent nothing yet."""
    feed(store_chain(1, 2, medium="GPU"), store_chain(1, medium="CPU"))
    (info,) = index.workers()
    assert (info.block_sizes, info.tiers) == ([2], {"gpu": 2, "cpu": 1})
    feed(store([9], range(4), 4), removal(1))
    (info,) = index.workers()
    assert (info.block_sizes, info.tiers) == ([2, 4], {"gpu": 2, "cpu": 1})
    feed(cleared(medium="*"))
    (info,) = index.workers()
    assert (info.block_sizes, info.tiers) == ([], {})
    index.apply(Reset("a", 0, 1, "restarted"))
    (info,) = index.workers()
    assert (info.block_sizes, info.tiers) == ([], {})


def test_a_restored_worker_reports_the_same_block_sizes_and_tiers(index: PrefixIndex, feed: Feed, tmp_path: Path) -> None:
    feed(store_chain(1, 2, medium="GPU"), store_chain(1, medium="CPU"))
    index.snapshot(tmp_path / "snapshot")
    other = PrefixIndex()
    other.restore(tmp_path / "snapshot")
    assert [(info.block_sizes, info.tiers) for info in other.workers()] == [([2], {"gpu": 2, "cpu": 1})]


def test_rows_equal_the_fields_of_the_hits(index: PrefixIndex, feed: Feed) -> None:
    feed(store_chain(1, 2, medium="GPU"), store([3], PROMPT[4:6], 2, 2, medium="CPU"))
    match = index.match(PROMPT)
    expected = [(each.source, each.rank, *(each.tiers[name] for name in ("gpu", "cpu", "disk")), each.tokens) for each in match]
    assert match.rows() == [(*each, 6, True) for each in expected] == [("a", 0, 4, 6, 6, 6, 6, True)]


@pytest.mark.parametrize("blocks", [4_000, 40_000, 400_000])
def test_tables_of_any_size_lose_no_block_and_retain_no_removed_one(index: PrefixIndex, tmp_path: Path, blocks: int) -> None:
    """How far ahead the core prefetches memory depends on the size of its tables; their content does not."""
    size, hashes = 200, np.random.default_rng(blocks).permutation(blocks) + 1_000_000
    feed = Feed(index)
    for at in range(0, blocks, size):
        parent = int(hashes[at - 1]) if at else None
        feed(store(hashes[at : at + size].tolist(), list(range(4 * at, 4 * (at + size))), 4, parent))
    assert index.stats().blocks == blocks
    order = np.random.default_rng(1).permutation(hashes)
    removed, left = order[: blocks // 2], order[blocks // 2 :]
    for at in range(0, len(removed), size):
        feed(removal(*removed[at : at + size].tolist(), 5))  # and an unknown one
    assert (index.stats().blocks, index.stats().unknown_removals) == (len(left), len(removed) // size)
    assert {block.hash for block in index.blocks(feed.worker)} == set(left.tolist())
    index.snapshot(tmp_path / "snapshot")
    other = PrefixIndex()
    other.restore(tmp_path / "snapshot")
    assert other.digest(feed.worker) == index.digest(feed.worker) != "0" * 32
    for at in range(0, len(left), size):
        feed(removal(*left[at : at + size].tolist()))
    assert (index.stats().blocks, index.digest(feed.worker)) == (0, "0" * 32)


def test_a_second_engine_with_its_own_hashes_is_matched_in_full(index: PrefixIndex) -> None:
    """A second engine has its own hashes. Its hash table grows between batches and loses nothing."""
    first, second = Feed(index, "a"), Feed(index, "b")
    tokens = list(range(2 * 3_000))
    for feed, offset in ((first, 1), (second, 1_000_000)):
        for at in range(0, 3_000, 100):
            parent = None if at == 0 else offset + at - 1
            feed(store(range(offset + at, offset + at + 100), tokens[2 * at : 2 * at + 200], 2, parent))
    assert [(each.source, each.tokens) for each in index.match(tokens)] == [("a", 6_000), ("b", 6_000)]
