"""Block keys: equal to those of other routers to the last bit, and to XXH3 itself for whatever a prompt holds."""

from __future__ import annotations

import json
import struct
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest as xxh3

from index_cases import namespace
from index_keys import Scope, prompt_keys, prompt_locals
from kvevents.index import MultiModal, Namespace, block_keys, local_hashes
from wire_cases import DATA

VECTORS: dict[str, list[str]] = json.loads((DATA / "block-keys-xxh3.json").read_text())
TOKENS = list(range(1, 33))
"""What the vectors are of, in blocks of 16."""


def vector(name: str) -> list[int]:
    return [int(value) for value in VECTORS[name]]


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("local", Namespace()),
        ("lora adapter-A", Namespace(lora="adapter-A")),
        ("cache_namespace tenant-salt", Namespace(salt="tenant-salt")),
        ("both", Namespace(lora="adapter-A", salt="tenant-salt")),
        ("mm 0xDEADBEEF block0", Namespace(mm=[MultiModal(0xDEADBEEF, 0, 16)])),
    ],
)
def test_local_hashes_are_those_of_dynamo(name: str, scope: Namespace) -> None:
    assert local_hashes(TOKENS, 16, scope) == vector(name)
    rolled = struct.pack("<QQ", *vector(name))
    assert block_keys(TOKENS, 16, scope) == [vector(name)[0], xxh3(rolled)]


def test_rolling_keys_are_those_of_dynamo() -> None:
    assert block_keys(TOKENS, 16) == block_keys(np.array(TOKENS, dtype=np.uint32), 16) == vector("seq_seed0")


def test_eagle_windows_are_those_of_dynamo() -> None:
    """17 tokens a block, 16 of them its own."""
    assert local_hashes([*TOKENS, 33], 16, eagle=True) == vector("eagle 1..33")
    assert local_hashes(TOKENS, 16, eagle=True) == vector("eagle 1..33")[:1]


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
def test_keys_are_xxh3_over_tokens_namespace_and_what_came_before(
    prompt: list[int], size: int, scope: Scope, eagle: bool
) -> None:
    """Of every namespace that can be said, in blocks of any size, of lists and of buffers."""
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
def test_blocks_of_every_length_take_every_path_through_xxh3(length: int) -> None:
    """XXH3 changes its method at 16, 128 and 240 bytes, and its stripes repeat each 1,024."""
    prompt = [(at * 2654435761 + 7) % 2**32 for at in range(3 * length + 1)]
    for scope in (Scope(), Scope(salt="t"), Scope(mm=(("image", length, 1),))):
        for eagle in (False, True):
            assert block_keys(prompt, length, namespace(scope), eagle=eagle) == prompt_keys(prompt, (length, eagle), scope)


def test_keys_do_not_depend_on_the_model_label() -> None:
    """It is a wall between workers, not part of what is hashed."""
    assert block_keys(TOKENS, 16, Namespace(model="llama")) == block_keys(TOKENS, 16)


@pytest.mark.parametrize(
    ("one", "other"),
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
def test_namespaces_that_differ_have_no_key_in_common(one: Any, other: Any) -> None:
    assert set(block_keys(TOKENS, 16, one)[1:]).isdisjoint(block_keys(TOKENS, 16, other)[1:])
