"""What a stream doubts, against a list of everything that was ever said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvevents.stream.doubts import MAX_MARKS, Doubts
from kvevents.stream.trust import Doubt

NUMBERS = st.integers(0, 30)


@given(st.lists(st.tuples(st.sampled_from(("lost", "clear", "agree")), NUMBERS), max_size=40), NUMBERS)
def test_every_gap_counts_until_a_clear_or_an_agreement_behind_it(said: list[tuple[str, int]], asked: int) -> None:
    """A difference is explained by the oldest gap that still stands, however many came later."""
    doubts, standing = Doubts(), list[int]()
    for what, number in said:
        if what == "lost":
            doubts.add(Doubt.LOST, number)
            standing.append(number)
        else:
            getattr(doubts, what)(number)
            standing = [mark for mark in standing if mark >= number]
    assert (Doubt.LOST in doubts) == bool(standing)
    assert doubts.explains(asked) == any(mark <= asked for mark in standing)
    assert doubts.kept().get(Doubt.LOST) == max(standing, default=None)


def test_what_is_remembered_is_bounded() -> None:
    """The oldest stays, since it explains most, and the newest, which says when all is healed."""
    doubts = Doubts()
    for number in range(10 * MAX_MARKS):
        doubts.add(Doubt.LOST, number)
    assert doubts.explains(0)
    assert len(doubts._through[Doubt.LOST]) <= MAX_MARKS
    doubts.clear(10 * MAX_MARKS - 1)
    assert Doubt.LOST in doubts
    doubts.clear(10 * MAX_MARKS)
    assert Doubt.LOST not in doubts
