"""Block keys equal those of other routers and of XXH3, for any content of a prompt."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from index_cases import blocks_of, namespace, store
from index_keys import Scope, prompt_keys, prompt_locals
from kvevents.events import TIERS, BlockStored, KVEventBatch
from kvevents.index import (
    MultiModal,
    Namespace,
    PrefixIndex,
    StoredKeys,
    block_keys,
    keys_from_local_hashes,
    local_hashes,
    stored_keys,
    tier_of,
)
from kvevents.wire import encode_batch
from kvevents_native import _native
from wire_cases import DATA

VECTORS: list[dict[str, Any]] = json.loads((DATA / "block-keys.json").read_text())
CASES = {case["case"]: case for case in VECTORS}
CRATES = ("dynamo-kv-router 1.6.1", "kv-index 2.0.0")
TOKENS = list(range(1, 33))


def make_prompt(case: dict[str, Any]) -> list[int]:
    return [(case["first"] + offset * case["step"]) % 2**17 for offset in range(case["tokens"])]


def make_namespace(case: dict[str, Any]) -> Namespace:
    items = [] if case["item"] is None else [MultiModal(case["item"], 0, case["block_size"])]
    return Namespace(lora=case["lora"], salt=case["salt"], mm=items)


@pytest.mark.parametrize("name", CASES)
def test_keys_equal_those_of_the_crates_of_other_routers(name: str) -> None:
    case = CASES[name]
    prompt, size, scope = make_prompt(case), case["block_size"], make_namespace(case)
    for crate in filter(case.__contains__, CRATES):
        assert local_hashes(prompt, size, scope, eagle=case["eagle"]) == case[crate]["local"]
        assert block_keys(prompt, size, scope, eagle=case["eagle"]) == case[crate]["rolling"]
        assert keys_from_local_hashes(case[crate]["local"]) == case[crate]["rolling"]


@pytest.mark.parametrize("name", ["plain", "lora and salt", "chain", "blocks of 64"])
@pytest.mark.parametrize("crate", CRATES)
def test_keys_of_another_router_find_the_whole_prompt(name: str, crate: str) -> None:
    case = CASES[name]
    prompt, size = make_prompt(case), case["block_size"]
    hashes = list(range(1, 1 + len(prompt) // size))
    stored = BlockStored(hashes, None, prompt, size, None, "GPU", case["lora"], cache_salt=case["salt"])
    index = PrefixIndex()
    index.apply_payload(("engine", 0), 0, 0, encode_batch(KVEventBatch(1.0, [stored], 0)))
    assert [hit.tokens for hit in index.match_keys(case[crate]["rolling"])] == [len(prompt)]
    assert [hit.tokens for hit in index.match(prompt, make_namespace(case))] == [len(prompt)]


def test_keys_of_a_buffer_equal_those_of_a_list() -> None:
    assert block_keys(np.array(TOKENS, dtype=np.uint32), 16) == block_keys(TOKENS, 16)


def test_eagle_windows_end_with_the_first_token_of_the_next_block() -> None:
    """A window has 17 tokens, 16 of them the block's own."""
    case = CASES["eagle"]
    prompt, expected = make_prompt(case), case["dynamo-kv-router 1.6.1"]["local"]
    assert local_hashes(prompt, 16, eagle=True) == expected
    assert local_hashes(prompt[:-1], 16, eagle=True) == expected[:1]


tokens = st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), max_size=40)
items = st.tuples(
    st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(["0aF1" * 16, "0aF1" * 15]),
    st.integers(0, 30),
    st.integers(0, 30),
)
scopes = st.builds(
    Scope,
    st.none(),
    st.none() | st.text(min_size=1, max_size=5) | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.text(min_size=1, max_size=5),
    st.lists(items, max_size=3).map(tuple),
)


@given(tokens, st.integers(1, 17), scopes, st.booleans())
def test_keys_are_xxh3_over_tokens_namespace_and_preceding_blocks(
    prompt: list[int], size: int, scope: Scope, eagle: bool
) -> None:
    """This holds for every valid namespace, for blocks of any size, and for lists and buffers."""
    found = block_keys(prompt, size, namespace(scope), eagle=eagle)
    assert found == prompt_keys(prompt, (size, eagle), scope)
    assert local_hashes(prompt, size, namespace(scope), eagle=eagle) == prompt_locals(prompt, (size, eagle), scope)
    assert block_keys(np.array(prompt, dtype=np.uint32), size, namespace(scope), eagle=eagle) == found
    assert len(found) == max(0, len(prompt) - eagle) // size


@given(tokens, tokens, st.integers(1, 5))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(prompt: list[int], rest: list[int], size: int) -> None:
    short, whole = block_keys(prompt, size), block_keys(prompt + rest, size)
    assert whole[: len(short)] == short


@pytest.mark.parametrize("length", [*range(1, 20), 31, 32, 33, 60, 61, 64, 65, 128, 256, 511, 512, 1024])
def test_keys_are_right_for_block_lengths_on_every_path_through_xxh3(length: int) -> None:
    """XXH3 changes its method at 16, 128 and 240 bytes, and its stripes repeat every 1,024 bytes."""
    prompt = [(offset * 2654435761 + 7) % 2**32 for offset in range(3 * length + 1)]
    for scope in (Scope(), Scope(salt="t"), Scope(mm=(("image", length, 1),))):
        for eagle in (False, True):
            assert block_keys(prompt, length, namespace(scope), eagle=eagle) == prompt_keys(prompt, (length, eagle), scope)


def test_keys_do_not_depend_on_the_model_label() -> None:
    """The label separates workers; it is not part of what is hashed."""
    assert block_keys(TOKENS, 16, Namespace(model="llama")) == block_keys(TOKENS, 16)


@pytest.mark.parametrize(
    ("left", "right"),
    list(
        combinations(
            [
                Namespace(),
                Namespace(lora="a"),
                Namespace(salt="a"),
                Namespace(lora=1),
                Namespace(lora="1"),
                Namespace(mm=[MultiModal("a", 0, 1)]),
                Namespace(mm=[MultiModal("a", 1, 1)]),
                Namespace(mm=[MultiModal("a", 0, 1)] * 2),
                Namespace(mm=[MultiModal(1, 0, 1)]),
                Namespace(mm=[MultiModal(1, 16, 1)]),
            ],
            2,
        )
    ),
)
def test_different_namespaces_have_no_key_in_common(left: Any, right: Any) -> None:
    assert set(block_keys(TOKENS, 16, left)[1:]).isdisjoint(block_keys(TOKENS, 16, right)[1:])


@pytest.mark.parametrize("fields", [{"lora": ""}, {"lora": -1}, {"salt": ""}, {"lora": "", "salt": ""}])
def test_empty_names_and_negative_numbers_mean_the_base_model_without_a_salt(fields: Any) -> None:
    assert block_keys(TOKENS, 16, Namespace(**fields)) == block_keys(TOKENS, 16)


# --- keys of stores


@given(st.integers(1, 5), st.one_of(st.none(), st.just("tenant")), st.one_of(st.none(), st.just("fr")), st.integers(0, 4))
def test_keys_of_a_store_equal_those_of_its_prompt(blocks: int, salt: str | None, lora: str | None, cut: int) -> None:
    """The store is one event or two; the salt is in the root's extra keys as vLLM sends it, or in a field as in SGLang."""
    tokens, cut = list(range(4 * blocks)), min(cut, blocks)
    extra: list[Any] = [((lora,) if lora else ()) + ((salt,) if salt and index == 0 else ()) for index in range(blocks)]
    keys_of_prompt = block_keys(tokens, 4, Namespace(lora=lora, salt=salt))
    for salt_fields in ({"extra_keys": extra}, {"cache_salt": salt}):
        found = stored_keys(store(range(blocks), tokens, 4, lora_name=lora, **salt_fields))
        assert (found.keys, found.unkeyed) == (keys_of_prompt, None)
        assert found.salt is not None
        if 0 < cut < blocks:
            rest = store(range(cut, blocks), tokens[cut * 4 :], 4, 1, lora_name=lora)
            assert stored_keys(rest, (keys_of_prompt[cut - 1], found.salt)) == (keys_of_prompt[cut:], None, None)


def test_keys_of_stores_with_items_or_token_pairs_equal_those_of_the_prompt() -> None:
    item, tokens = MultiModal("picture", 2, 5), list(range(9))
    event = store([1, 2], tokens[:8], 4, extra_keys=[(("picture", 2),), (("picture", -2),)])
    assert stored_keys(event).keys == block_keys(tokens[:8], 4, Namespace(mm=[item]))
    assert stored_keys(store([1, 2], list(pairwise(tokens)), 4)).keys == block_keys(tokens, 4, eagle=True)


_extra_keys = st.one_of(
    st.text(max_size=3), st.binary(max_size=3), st.integers(-5, 5), st.tuples(st.text(max_size=3), st.integers(-9, 9))
)
_extras = st.lists(st.lists(_extra_keys), max_size=3)


@given(_extras, st.one_of(st.none(), st.text(max_size=3)), st.one_of(st.none(), st.integers(-3, 3)), st.booleans())
def test_keys_of_stores_equal_those_that_an_index_computes(
    extras: list[Any], salt: str | None, lora: int | None, pairs: bool
) -> None:
    """This holds for a root and for blocks behind it, with any extra keys."""
    index = PrefixIndex()
    tokens: list[Any] = list(pairwise(range(13))) if pairs else list(range(12))
    root = store([1, 2], tokens[:8], 4, lora_id=lora, cache_salt=salt, extra_keys=extras)
    rest = store([3], tokens[8:], 4, 2, lora_id=lora, extra_keys=extras[:1])
    index.apply_payload(("a", 0), 0, 0, encode_batch(KVEventBatch(1.0, [root, rest], 0)))
    keys = {block_hash: key for key, block_hash, *_ in blocks_of(index, ("a", 0))}
    first = stored_keys(root)
    assert first.salt is not None
    child = stored_keys(rest, (first.keys[-1], first.salt))
    assert [keys[1], keys[2], keys[3]] == first.keys + child.keys


@pytest.mark.parametrize(
    ("event", "unkeyed"),
    [
        (store([1], [1, 2], 2, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=8), "other-group"),
        (store([1], [], 2), "no-tokens"),
        (store([1], [1, 2, 3], 2), "length-mismatch"),
        (store([1], [1, -2], 2), "bad-token"),
        (store([1], [1, 2], 2, 7), "parent-unknown"),
    ],
)
def test_a_store_without_keys_has_a_reason(event: BlockStored, unkeyed: str) -> None:
    assert (stored_keys(event).keys, stored_keys(event).unkeyed) == ([], unkeyed)


@pytest.mark.parametrize("bad", [-1, 2**32, 2**64 - 1, "c" * 64])
@pytest.mark.parametrize("at", range(6))
def test_blocks_before_a_token_that_cannot_be_keyed_have_keys(bad: int | str, at: int) -> None:
    """The digest of an item without anything else about it is not one: it is read."""
    tokens: list[int | str] = [1, 2, 3, 4, 5, 6]
    good = stored_keys(store([1, 2, 3], tokens, 2)).keys
    tokens[at] = bad
    found = stored_keys(store([1, 2, 3], tokens, 2))
    assert found.keys[: at // 2] == good[: at // 2]
    assert (len(found.keys), found.unkeyed) == ((3, None) if isinstance(bad, str) else (at // 2, "bad-token"))


def test_a_store_with_announced_keys_has_these_keys() -> None:
    assert stored_keys(store([1, 2], [], 4, 7, block_keys=[8, 9])) == StoredKeys([8, 9], None, None)


# --- tiers


def test_tiers_are_equal_in_python_and_in_the_index() -> None:
    """Tiers have one order, and each medium that engines name has one tier."""
    assert list(TIERS) == _native.TIERS
    media = {"": "gpu", "hbm": "gpu", "CPU_PINNED": "cpu", "CPU_TIER2": "disk", "nvme": "disk", "Weird": "WEIRD"}
    media |= {"NPU": "gpu", "xpu:0": "gpu", "DRAM": "cpu", "cuda:0": "CUDA:0"}
    assert {medium: tier_of(medium) for medium in media} == media
    assert tier_of(None) == "gpu"
    for medium, tier in media.items():
        index = PrefixIndex()
        stored = store([1], [1, 2], 2, medium=medium or None)
        index.apply_payload(("a", 0), 0, 0, encode_batch(KVEventBatch(1.0, [stored], 0)))
        assert [block[2] for block in blocks_of(index, ("a", 0))] == [tier]
