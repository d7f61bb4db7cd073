"""What a stream doubts, against a list of everything that was ever said."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from kvevents.stream.trust import MAX_MARKS, DegradedReason, TrustLedger

NUMBERS = st.integers(0, 30)


SAID = st.lists(st.tuples(st.sampled_from(("lost", "clear", "match_digest")), NUMBERS), max_size=40)


def told(said: list[tuple[str, int]]) -> tuple[TrustLedger, list[int]]:
    """Doubts that were told so, and the gaps that still stand."""
    doubts, standing = TrustLedger(), list[int]()
    for what, number in said:
        if what == "lost":
            doubts.add(DegradedReason.LOST, number)
            standing.append(number)
        else:
            getattr(doubts, what)(number)
            standing = [mark for mark in standing if mark >= number]
    return doubts, standing


@given(SAID, NUMBERS)
def test_every_gap_counts_until_a_clear_or_an_agreement_behind_it(said: list[tuple[str, int]], asked: int) -> None:
    """A difference is explained by the oldest gap that still stands, however many came later."""
    doubts, standing = told(said)
    assert (DegradedReason.LOST in doubts) == bool(standing)
    assert doubts.explains(asked) == any(mark <= asked for mark in standing)
    assert doubts.persistent().get(DegradedReason.LOST) == max(standing, default=None)


@given(SAID, NUMBERS)
def test_with_more_gaps_than_are_remembered_none_is_passed_over(said: list[tuple[str, int]], asked: int) -> None:
    """What is explained is said to be; that something is doubted, and how far, is known as exactly as before."""
    with patch("kvevents.stream.trust.MAX_MARKS", 3):
        doubts, standing = told(said)
    assert doubts.explains(asked) >= any(mark <= asked for mark in standing)
    assert (DegradedReason.LOST in doubts) == bool(standing)
    assert doubts.persistent().get(DegradedReason.LOST) == max(standing, default=None)


def test_a_gap_among_hundreds_explains_what_is_found_long_after_it() -> None:
    """A consumer that lags says what was in the batches when hundreds of gaps behind them are known already."""
    doubts = TrustLedger()
    for number in range(0, 20 * MAX_MARKS, 2):
        doubts.add(DegradedReason.LOST, number)
    doubts.clear(101)
    assert not doubts.explains(100)
    assert doubts.explains(102)


def test_what_is_remembered_is_bounded() -> None:
    """Where doubts began stays, and the newest, which says when all is healed."""
    doubts = TrustLedger()
    for number in range(10 * MAX_MARKS):
        doubts.add(DegradedReason.LOST, number)
    assert doubts.explains(0)
    assert len(doubts._through[DegradedReason.LOST]) <= MAX_MARKS
    doubts.clear(10 * MAX_MARKS - 1)
    assert DegradedReason.LOST in doubts
    doubts.clear(10 * MAX_MARKS)
    assert DegradedReason.LOST not in doubts
