"""`kvevents.index.lift_tokens`: token ids out of a request, as `json` would read them, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.index import block_keys, chain_hashes, lift_tokens, local_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 200_000), max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    tokens=TOKENS,
    others=st.dictionaries(st.text(max_size=6).filter(lambda name: name != "token_ids"), VALUES, max_size=4),
    indent=st.none() | st.integers(0, 3),
    ascii_only=st.booleans(),
)
def test_what_is_lifted_is_what_json_reads(
    tokens: list[int], others: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps({**others, "token_ids": tokens}, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    lifted = lift_tokens(text, "token_ids")
    assert lifted is not None
    rest, buffer = lifted
    assert buffer.tolist() == tokens
    assert json.loads(rest) == {**others, "token_ids": []}


@given(VALUES)
def test_what_is_no_list_of_token_ids_is_left(value: Any) -> None:
    lifted = lift_tokens(json.dumps({"token_ids": value}).encode(), "token_ids")
    if lifted is not None:
        assert lifted[1].tolist() == value


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"{", b'{"token_ids":[1]', b'{"token_ids":[1]} x', b'{"token_ids":[1],"token_ids":[2]}']
)
def test_what_is_no_object_or_says_it_twice_is_left(text: bytes) -> None:
    assert lift_tokens(text, "token_ids") is None


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_chained_hashes_are_the_keys_of_the_blocks(tokens: list[int]) -> None:
    assert chain_hashes(local_hashes(tokens, 4)) == block_keys(tokens, 4)
