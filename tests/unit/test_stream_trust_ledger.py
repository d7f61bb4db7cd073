"""The trust ledger compared with a list of everything that was recorded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvevents.stream.trust import MAX_MARKS, DegradedReason, TrustLedger

NUMBERS = st.integers(0, 30)
STEPS = st.lists(st.tuples(st.sampled_from(("lost", "clear", "match_digest")), NUMBERS), max_size=40)


def record_steps(ledger: TrustLedger, steps: list[tuple[str, int]]) -> list[int]:
    """Record the steps, and return the gaps that no later clear or matching digest has ended."""
    gaps: list[int] = []
    for step, number in steps:
        if step == "lost":
            ledger.add(DegradedReason.LOST, number)
            gaps.append(number)
        else:
            getattr(ledger, step)(number)
            gaps = [gap for gap in gaps if gap >= number]
    return gaps


@given(STEPS, NUMBERS)
def test_every_gap_counts_until_a_later_clear_or_matching_digest(steps: list[tuple[str, int]], seq: int) -> None:
    """The oldest gap that has not ended explains a mismatch, however many gaps came later."""
    ledger = TrustLedger()
    gaps = record_steps(ledger, steps)
    assert (DegradedReason.LOST in ledger) == bool(gaps)
    assert ledger.explains(seq) == any(gap <= seq for gap in gaps)
    assert ledger.persistent_reasons().get(DegradedReason.LOST) == max(gaps, default=None)


@given(STEPS, NUMBERS)
def test_with_more_gaps_than_are_stored_every_mismatch_is_still_explained(steps: list[tuple[str, int]], seq: int) -> None:
    """The ledger still knows exactly that there is a reason and which number it affects last."""
    ledger = TrustLedger(max_marks=3)
    gaps = record_steps(ledger, steps)
    assert ledger.explains(seq) >= any(gap <= seq for gap in gaps)
    assert (DegradedReason.LOST in ledger) == bool(gaps)
    assert ledger.persistent_reasons().get(DegradedReason.LOST) == max(gaps, default=None)


def test_a_gap_among_hundreds_explains_a_mismatch_that_is_reported_late() -> None:
    """A slow consumer reports a batch after hundreds of later gaps are known."""
    ledger = TrustLedger()
    for number in range(0, 20 * MAX_MARKS, 2):
        ledger.add(DegradedReason.LOST, number)
    ledger.clear(101)
    assert not ledger.explains(100)
    assert ledger.explains(102)


def test_the_stored_marks_are_bounded() -> None:
    """The first mark stays, and so does the newest one, which decides when the reason ends."""
    ledger = TrustLedger()
    for number in range(10 * MAX_MARKS):
        ledger.add(DegradedReason.LOST, number)
    assert ledger.explains(0)
    assert len(ledger._marks[DegradedReason.LOST]) <= MAX_MARKS
    ledger.clear(10 * MAX_MARKS - 1)
    assert DegradedReason.LOST in ledger
    ledger.clear(10 * MAX_MARKS)
    assert DegradedReason.LOST not in ledger
