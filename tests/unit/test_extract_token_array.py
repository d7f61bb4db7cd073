"""`kvevents.index.extract_token_array`: token ids out of a request, as `json` would read them, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.index import block_keys, extract_token_array, keys_from_local_hashes, local_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 200_000), max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)

USUAL = st.integers(0, 10**7 - 1).map(str) | st.integers(0, 128_255).map(str) | st.integers(0, 9).map(str)
"""Token ids as they are written."""
ODD = (
    st.integers(0, 2**34).map(str)
    | st.integers(2**32 - 2, 2**32 + 1).map(str)
    | st.integers(0, 22).map(lambda digits: "9" * digits)
    | st.sampled_from(
        ("00", "01", "0000123", "-1", "-0", "1.0", "1e3", "1E3", "0x1", "+1", "null", '"1"', "[1]", " 1", "1 ", "\n1\t", "")
    )
)
"""Numbers of any width, and texts that are not numbers."""


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
    lifted = extract_token_array(text, "token_ids")
    assert lifted is not None
    rest, buffer = lifted
    assert buffer.tolist() == tokens
    assert json.loads(rest) == {**others, "token_ids": []}


def _is_usual(value: Any) -> bool:
    """Whether it is an object with a list of token ids."""
    tokens = value.get("token_ids") if isinstance(value, dict) else None
    return isinstance(tokens, list) and all(type(token) is int and 0 <= token < 2**32 for token in tokens)


def _check(text: bytes) -> None:
    """What is lifted is what `json` reads, and whatever `json` reads as token ids is lifted."""
    lifted = extract_token_array(text, "token_ids")
    try:
        value = json.loads(text)
    except ValueError:
        assert lifted is None, text
        return
    if not _is_usual(value) or b"-" in text:  # -0 is 0 to `json`
        assert lifted is None, text
        return
    assert lifted is not None, text
    rest, buffer = lifted
    assert buffer.tolist() == value["token_ids"]
    assert json.loads(rest) == {**value, "token_ids": []}


@given(
    numbers=st.lists(USUAL, max_size=400).map(lambda numbers: numbers * 3)
    | st.lists(st.integers(0, 40).flatmap(lambda choice: ODD if not choice else USUAL), max_size=400)
    | st.lists(ODD, max_size=60),
    separator=st.sampled_from((", ", ",", ", ", ",", " ,", ",  ", ",\n", ",\t", " , ", ",,", ";", "")),
)
def test_numbers_of_every_width_however_they_are_separated(numbers: list[str], separator: str) -> None:
    _check(f'{{"token_ids":[{separator.join(numbers)}],"m":"1, 2"}}'.encode())


@given(numbers=st.lists(USUAL, min_size=60, max_size=400), separator=st.sampled_from((", ", ",")), data=st.data())
def test_one_thing_that_is_odd_among_many_that_are_not(numbers: list[str], separator: str, data: st.DataObject) -> None:
    text = f'{{"token_ids":[{separator.join(numbers)}]}}'.encode()
    place = data.draw(st.integers(14, len(text) - 3))
    odd = data.draw(
        st.sampled_from((b" ", b"  ", b"\n", b",", b"]", b"[", b"0", b"-", b".", b"e", b"\x00", b"/", b":", b"'", b""))
    )
    _check(text[:place] + odd + text[place + data.draw(st.integers(0, 2)) :])


@pytest.mark.parametrize("separator", [", ", ","])
def test_a_text_that_ends_anywhere_is_left(separator: str) -> None:
    tokens = [10 ** (at % 7) * (1 + at % 9) for at in range(900)]
    text = json.dumps({"token_ids": tokens}, separators=(separator, ": ")).encode()
    assert all(extract_token_array(text[:end], "token_ids") is None for end in range(len(text)))
    _check(text)


@pytest.mark.parametrize("separator", [", ", ","])
def test_as_many_as_there_may_be(separator: str) -> None:
    """Every length up to some vectors of the widest machine, where the last one is partly filled, and two long ones."""
    for count in (*range(70), 1_000, 32_768):
        tokens = [at * 2654435761 % 128_256 for at in range(count)]
        _check(json.dumps({"token_ids": tokens, "model": "m"}, separators=(separator, ":")).encode())


@given(VALUES)
def test_what_is_no_list_of_token_ids_is_left(value: Any) -> None:
    lifted = extract_token_array(json.dumps({"token_ids": value}).encode(), "token_ids")
    if lifted is not None:
        assert lifted[1].tolist() == value


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"{", b'{"token_ids":[1]', b'{"token_ids":[1]} x', b'{"token_ids":[1],"token_ids":[2]}']
)
def test_what_is_no_object_or_says_it_twice_is_left(text: bytes) -> None:
    assert extract_token_array(text, "token_ids") is None


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_chained_hashes_are_the_keys_of_the_blocks(tokens: list[int]) -> None:
    assert keys_from_local_hashes(local_hashes(tokens, 4)) == block_keys(tokens, 4)
