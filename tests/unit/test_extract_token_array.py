"""`kvevents.index.extract_token_array` extracts the token ids that `json` would read from a request, or nothing."""

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

VALID_NUMBERS = st.integers(0, 10**7 - 1).map(str) | st.integers(0, 128_255).map(str) | st.integers(0, 9).map(str)
"""Token ids as clients write them."""
INVALID_OR_UNUSUAL_NUMBERS = (
    st.integers(0, 2**34).map(str)
    | st.integers(2**32 - 2, 2**32 + 1).map(str)
    | st.integers(0, 22).map(lambda digits: "9" * digits)
    | st.sampled_from(
        ("00", "01", "0000123", "-1", "-0", "1.0", "1e3", "1E3", "0x1", "+1", "null", '"1"', "[1]", " 1", "1 ", "\n1\t", "")
    )
)
"""Numbers of any width, numbers out of range, and texts that are not numbers."""


@given(
    tokens=TOKENS,
    others=st.dictionaries(st.text(max_size=6).filter(lambda name: name != "token_ids"), VALUES, max_size=4),
    indent=st.none() | st.integers(0, 3),
    ascii_only=st.booleans(),
)
def test_the_extracted_tokens_and_the_rest_are_what_json_reads(
    tokens: list[int], others: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps({**others, "token_ids": tokens}, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    extracted = extract_token_array(text, "token_ids")
    assert extracted is not None
    rest, buffer = extracted
    assert buffer.tolist() == tokens
    assert json.loads(rest) == {**others, "token_ids": []}


def _is_extractable(value: Any) -> bool:
    """Return whether `value` is an object with a list of valid token ids."""
    tokens = value.get("token_ids") if isinstance(value, dict) else None
    return isinstance(tokens, list) and all(type(token) is int and 0 <= token < 2**32 for token in tokens)


def _check_against_json(text: bytes) -> None:
    """Check that the function extracts the token ids that `json` reads, and nothing if `json` reads no token ids."""
    extracted = extract_token_array(text, "token_ids")
    try:
        value = json.loads(text)
    except ValueError:
        assert extracted is None, text
        return
    if not _is_extractable(value) or b"-" in text:  # `json` reads -0 as 0
        assert extracted is None, text
        return
    assert extracted is not None, text
    rest, buffer = extracted
    assert buffer.tolist() == value["token_ids"]
    assert json.loads(rest) == {**value, "token_ids": []}


@given(
    numbers=st.lists(VALID_NUMBERS, max_size=400).map(lambda numbers: numbers * 3)
    | st.lists(
        st.integers(0, 40).flatmap(lambda choice: INVALID_OR_UNUSUAL_NUMBERS if not choice else VALID_NUMBERS), max_size=400
    )
    | st.lists(INVALID_OR_UNUSUAL_NUMBERS, max_size=60),
    separator=st.sampled_from((", ", ",", ", ", ",", " ,", ",  ", ",\n", ",\t", " , ", ",,", ";", "")),
)
def test_numbers_of_every_width_are_read_with_any_separator(numbers: list[str], separator: str) -> None:
    _check_against_json(f'{{"token_ids":[{separator.join(numbers)}],"m":"1, 2"}}'.encode())


@given(numbers=st.lists(VALID_NUMBERS, min_size=60, max_size=400), separator=st.sampled_from((", ", ",")), data=st.data())
def test_one_unusual_byte_among_many_valid_numbers_is_read_as_json_reads_it(
    numbers: list[str], separator: str, data: st.DataObject
) -> None:
    text = f'{{"token_ids":[{separator.join(numbers)}]}}'.encode()
    place = data.draw(st.integers(14, len(text) - 3))
    odd = data.draw(
        st.sampled_from((b" ", b"  ", b"\n", b",", b"]", b"[", b"0", b"-", b".", b"e", b"\x00", b"/", b":", b"'", b""))
    )
    _check_against_json(text[:place] + odd + text[place + data.draw(st.integers(0, 2)) :])


@pytest.mark.parametrize("separator", [", ", ","])
def test_nothing_is_extracted_from_a_truncated_text(separator: str) -> None:
    tokens = [10 ** (at % 7) * (1 + at % 9) for at in range(900)]
    text = json.dumps({"token_ids": tokens}, separators=(separator, ": ")).encode()
    assert all(extract_token_array(text[:end], "token_ids") is None for end in range(len(text)))
    _check_against_json(text)


@pytest.mark.parametrize("separator", [", ", ","])
def test_lists_of_every_length_are_read(separator: str) -> None:
    """The lengths cover several SIMD vectors, of which the last is partly filled, and two long lists."""
    for count in (*range(70), 1_000, 32_768):
        tokens = [at * 2654435761 % 128_256 for at in range(count)]
        _check_against_json(json.dumps({"token_ids": tokens, "model": "m"}, separators=(separator, ":")).encode())


@given(VALUES)
def test_nothing_is_extracted_from_a_value_that_is_not_a_list_of_token_ids(value: Any) -> None:
    extracted = extract_token_array(json.dumps({"token_ids": value}).encode(), "token_ids")
    if extracted is not None:
        assert extracted[1].tolist() == value


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"{", b'{"token_ids":[1]', b'{"token_ids":[1]} x', b'{"token_ids":[1],"token_ids":[2]}']
)
def test_nothing_is_extracted_if_the_text_is_not_one_object_with_the_field_once(text: bytes) -> None:
    assert extract_token_array(text, "token_ids") is None


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_chained_local_hashes_equal_the_block_keys(tokens: list[int]) -> None:
    assert keys_from_local_hashes(local_hashes(tokens, 4)) == block_keys(tokens, 4)
