"""The table of a comparison, with a line for each policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from kvevents.sim.report.words import percent
from kvevents.sim.results import Comparison, Distribution, PolicyResult

Value: TypeAlias = float | None

BEST: Final = "*"
"""Mark after the best value of a column."""
NONE: Final = "-"


class Cell(NamedTuple):
    """One value of the table as text."""

    text: str
    best: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table."""

    title: str
    value: Callable[[PolicyResult], Value]
    to_text: Callable[[float], str]
    best: Literal["least", "most"] | None = None


def _ttft(value: Callable[[Distribution], float]) -> Callable[[PolicyResult], Value]:
    return lambda result: None if result.ttft is None else value(result.ttft)


def _if_looked_up(value: Callable[[PolicyResult], float]) -> Callable[[PolicyResult], Value]:
    """Return the value; None if no prompt was looked up, since rates are undefined then."""
    return lambda result: value(result) if result.prompt_tokens else None


def _seconds(value: float) -> str:
    return f"{value:,.3f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


COLUMNS: Final = (
    Column("TTFT p50", _ttft(lambda ttft: ttft.p50), _seconds, "least"),
    Column("p90", _ttft(lambda ttft: ttft.p90), _seconds, "least"),
    Column("p99", _ttft(lambda ttft: ttft.p99), _seconds, "least"),
    Column("hit rate", _if_looked_up(lambda result: result.hit_rate), percent, "most"),
    Column("tokens/s", _if_looked_up(lambda result: result.output_tokens_per_second), lambda value: f"{value:,.1f}", "most"),
    Column("imbalance", _if_looked_up(lambda result: result.imbalance), lambda value: f"{value:.2f}", "least"),
    Column("preemptions", lambda result: result.preemptions, _whole, "least"),
    Column("checked", lambda result: result.checked, _whole),
    Column("disagreements", lambda result: result.disagreements, _whole),
)


def cells(comparison: Comparison) -> list[list[Cell]]:
    """Return a list for each policy, with a cell for each of `COLUMNS`. Values with equal text are equally good."""
    columns = [_column(column, comparison.policies) for column in COLUMNS]
    return [list(line) for line in zip(*columns, strict=True)] if comparison.policies else []


def rows(comparison: Comparison) -> list[list[Cell]]:
    """Return the table as text: a line of titles and one for each policy, with its name first, padded to columns."""
    titles = [Cell("policy"), *(Cell(column.title) for column in COLUMNS)]
    lines = [[Cell(result.policy), *line] for result, line in zip(comparison.policies, cells(comparison), strict=True)]
    table = [titles, *lines]
    widths = [max(len(cell.text) for cell in column) for column in zip(*table, strict=True)]
    # Names are left-aligned, figures right-aligned, with a place for the mark after them.
    return [[Cell(f"{line[0].text:<{widths[0]}}"), *map(_padded, line[1:], widths[1:], COLUMNS)] for line in table]


def _column(column: Column, results: Sequence[PolicyResult]) -> list[Cell]:
    values = [column.value(result) for result in results]
    texts = [NONE if value is None else column.to_text(value) for value in values]
    known = [value for value in values if value is not None]
    if column.best is None or len(set(texts)) < 2 or not known:
        return [Cell(text) for text in texts]
    best = column.to_text(min(known) if column.best == "least" else max(known))
    return [Cell(text, text == best) for text in texts]


def _padded(cell: Cell, width: int, column: Column) -> Cell:
    mark = BEST if cell.best else "" if column.best is None else " "
    return Cell(f"{cell.text:>{width}}{mark}", cell.best)
