"""`kvevents.sim.requests`: texts of numbered pieces, and the prefix that requests share."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.sim.requests import VOCABULARY_SIZE, Drawn, Request, Text, draw, shared_prefix

NUMBERS = st.integers(0, 2**64 - 1)
DRAW_SIZE = 1 << 20


@given(NUMBERS, st.integers(0, 2_000), st.integers(0, 2_000))
def test_a_shorter_piece_is_the_beginning_of_a_longer_one(number: int, one: int, other: int) -> None:
    """A number always stands for the same text, of any length."""
    shorter, longer = sorted((one, other))
    assert draw(number, longer)[:shorter] == draw(number, shorter)
    assert len(draw(number, longer)) == longer
    assert all(token < VOCABULARY_SIZE for token in draw(number, longer))


def test_a_piece_may_be_longer_than_what_is_drawn_at_once() -> None:
    tokens = draw(7, DRAW_SIZE + 100)
    assert len(tokens) == DRAW_SIZE + 100
    assert tokens[:1000] == draw(7, 1000)


@given(st.sets(NUMBERS, min_size=2, max_size=50))
def test_pieces_with_different_numbers_differ_in_their_first_tokens(numbers: set[int]) -> None:
    """Two pieces never share a first block of four or more tokens."""
    assert len({draw(number, 4).tobytes() for number in numbers}) == len(numbers)


@given(
    st.lists(
        st.one_of(st.tuples(NUMBERS, st.integers(0, 50)), st.lists(st.integers(0, 2**32 - 1)).map(lambda ids: array("I", ids)))
    )
)
def test_a_text_is_the_concatenation_of_its_pieces(pieces: list[tuple[int, int] | array[int]]) -> None:
    text = Text(pieces)
    expected = [token for piece in pieces for token in (piece if isinstance(piece, array) else draw(*piece))]
    assert text.tokens().tolist() == expected
    assert len(text) == len(expected)
    assert Text(pieces[:1]) + Text(pieces[1:]) == text
    assert hash(Text(pieces)) == hash(text)


def test_texts_are_equal_if_their_pieces_are() -> None:
    assert Text.from_tokens([1, 2]) == Text([array("I", [1, 2])]) != Text.from_tokens([1, 3])
    assert Text([(1, 2)]) == Text([Drawn(1, 2)]) != Text([(1, 3)])
    assert Text.from_tokens([1]) != [1]
    assert repr(Text([(1, 20), (2, 5)])) == "<Text 25 tokens in 2 pieces>"


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_ids_have_32_bits(token: int) -> None:
    with pytest.raises(OverflowError):
        Text.from_tokens([token])


def make_request(*pieces: tuple[int, int], answer: int = 0, salt: str | None = None) -> Request:
    return Request(0.0, Text(pieces), Text([(10**6 + answer, 5)]), salt=salt)


def test_the_shared_prefix_begins_with_the_first_token() -> None:
    """A known piece after an unknown one, or in another namespace, saves nothing."""
    assert shared_prefix([]) == 0
    assert shared_prefix([make_request((1, 30), (2, 10)), make_request((1, 30), (3, 10))]) == 30 / 80
    assert shared_prefix([make_request((1, 30), (2, 10)), make_request((3, 30), (2, 10))]) == 0
    assert shared_prefix([make_request((1, 30)), make_request((1, 30), salt="t")]) == 0


def test_the_shared_prefix_includes_answers() -> None:
    """The next turn of a conversation repeats prompt and answer, and finds the blocks of both."""
    first = make_request((1, 30))
    following = Request(1.0, first.prompt + first.output + Text([(2, 5)]), Text([(9, 1)]))
    assert shared_prefix([first, following]) == 35 / 70
