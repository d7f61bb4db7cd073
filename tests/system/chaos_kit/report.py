"""The results of a run as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tests.system.chaos_kit.judging import Outcome

NO_FAULT: Final = "nothing"


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of some rounds."""

    rounds: int
    """Rounds that could be played."""
    batches: int
    results: int
    right: int
    inexact: int
    wrong: int
    reasons: list[tuple[str, int]]
    """Reasons of the results that are not EXACT, the most frequent first."""


def tally(outcomes: Sequence[Outcome]) -> Tally:
    results = [result for outcome in outcomes for result in outcome.results]
    kinds = Counter(result.kind for result in results)
    reasons = Counter(reason for result in results if result.kind == "inexact" for reason in result.reasons)
    batches = sum(outcome.batches for outcome in outcomes)
    counts = len(results), kinds["right"], kinds["inexact"], kinds["wrong"]
    return Tally(sum(not outcome.error for outcome in outcomes), batches, *counts, reasons.most_common())


def add_counters(outcomes: Iterable[Outcome]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for outcome in outcomes:
        counted.update(outcome.counted)
    return counted


def make_fault_rows(
    outcomes: Sequence[Outcome], names: Iterable[str], format_row: Callable[[Sequence[Outcome]], list[str]]
) -> list[list[str]]:
    """Return a row for each fault. A round counts in the row of each of its faults."""
    played = [outcome for outcome in outcomes if not outcome.error]
    rounds = {name: [each for each in played if name in (each.faults or (NO_FAULT,))] for name in (NO_FAULT, *names)}
    return [[name, *format_row(found)] for name, found in rounds.items() if found]


def format_table(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *body])
