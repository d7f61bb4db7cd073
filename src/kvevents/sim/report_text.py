"""Reports of a comparison as text: its settings, a summary in one sentence, and a table with a line for each policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from kvevents.routing import POLICIES
from kvevents.sim.results import Comparison, Distribution, PolicyResult
from kvevents.sim.settings import FleetSettings

_SUBJECT = "prefix-aware"
"""Policy that the summary describes, if it ran."""
_OTHER = "round-robin"
"""Policy with which it is compared, if it ran."""
NOISE: Final = 0.05
"""Relative difference of times that is noise: if the packaged sample runs one or two per cent faster or slower, the TTFT p90
changes by 3.5 %."""
_TIMES: Final[tuple[tuple[str, Callable[[Distribution], float]], ...]] = (
    ("p90", lambda ttft: ttft.p90),
    ("mean", lambda ttft: ttft.mean),
)
"""Figures of the TTFT by which a policy that uses the index is compared with those that do not: it must improve one of them."""


def percent(share: float) -> str:
    """Return a share from 0 to 1 as text such as `41.0%`."""
    return f"{100 * share:.1f}%"


def span(seconds: float) -> str:
    """Return a duration as text such as `4 ms`, `0.80 s` or `12.3 s`."""
    if seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.1f} s"


def summary(comparison: Comparison) -> str:
    """Return the results in one sentence without a full stop. It also covers one policy, no answers and disagreements."""
    results = comparison.policies
    answered = [result for result in results if result.ttft is not None and result.finished]
    if not answered:
        text = [_without_answers_text(results)]
    else:
        subject = _policy_named(_SUBJECT, answered) or max(answered, key=_hits)
        rest = [result for result in answered if result is not subject]
        other = _policy_named(_OTHER, rest) or min(rest, key=_hits, default=None)
        text = [
            _hit_rate_text(subject, other, rest),
            _ttft_text(subject, other, rest),
            _benefit(subject, rest),
            _refused_text(results),
        ]
    return "; ".join(part for part in (*text, _audit_text(results)) if part)


def _hits(result: PolicyResult) -> float:
    return result.hit_rate


def _p90(result: PolicyResult) -> float:
    return _ttft_figure(result, lambda ttft: ttft.p90)


def _policy_named(name: str, results: Sequence[PolicyResult]) -> PolicyResult | None:
    return next((result for result in results if result.policy == name), None)


def _without_answers_text(results: Sequence[PolicyResult]) -> str:
    if not any(result.requests for result in results):
        return "no request was sent"
    return "; ".join(part for part in ("no request was answered", _refused_text(results)) if part)


def _hit_rate_text(subject: PolicyResult, other: PolicyResult | None, rest: Sequence[PolicyResult]) -> str:
    text = f"{subject.policy} found {percent(subject.hit_rate)} of prompt tokens in caches"
    if other is not None:
        text += f", {other.policy} {percent(other.hit_rate)}"
    best = max(rest, key=_hits, default=subject)
    if best is not other and percent(best.hit_rate) != percent(subject.hit_rate) and best.hit_rate > subject.hit_rate:
        text += f" ({best.policy} the most, {percent(best.hit_rate)})"
    return text


def _ttft_text(subject: PolicyResult, other: PolicyResult | None, rest: Sequence[PolicyResult]) -> str:
    mine = span(_p90(subject))
    text = f"its TTFT p90 was {mine}"
    if other is not None:
        text += f" against {span(_p90(other))}"
    best = min(rest, key=_p90, default=subject)
    if best is not other and span(_p90(best)) != mine and _p90(best) < _p90(subject):
        text += f" ({best.policy} the least, {span(_p90(best))})"
    return text


def _benefit(subject: PolicyResult, rest: Sequence[PolicyResult]) -> str:
    """Compare the TTFT of a policy that uses the index with the shortest TTFT of those that need no events."""
    rivals = [result for result in rest if not _uses_index(result)]
    if not rivals or not _uses_index(subject):
        return ""
    shares = []
    for name, figure in _TIMES:
        rival = min(rivals, key=lambda result: _ttft_figure(result, figure))
        shortest = _ttft_figure(rival, figure)
        shares.append((1 - _ttft_figure(subject, figure) / shortest if shortest else 0.0, name, rival.policy))
    share, name, policy = max(shares)
    if share >= NOISE:
        return f"routing by cache made the TTFT {name} {share:.0%} shorter than {policy}, the best policy without events"
    best = shares[0][2]
    if share > -NOISE:
        return (
            f"routing by cache is worth nothing here: with {best}, which needs no events, TTFT is within {NOISE:.0%} or shorter"
        )
    return f"routing by cache is worth nothing here: with {best}, which needs no events, TTFT is shorter"


def _uses_index(result: PolicyResult) -> bool:
    return result.policy in POLICIES and POLICIES[result.policy]().uses_index


def _ttft_figure(result: PolicyResult, figure: Callable[[Distribution], float]) -> float:
    assert result.ttft is not None  # noqa: S101 - it has answers
    return figure(result.ttft)


def _refused_text(results: Sequence[PolicyResult]) -> str:
    most = max((result.refused for result in results), default=0)
    return f"{most:,} request{' was' if most == 1 else 's were'} refused, longer than a whole cache" if most else ""


def _audit_text(results: Sequence[PolicyResult]) -> str:
    checked, wrong, unproven = (
        sum(getattr(result, name) for result in results) for name in ("checked", "disagreements", "unproven")
    )
    lookups = "lookup" if checked == 1 else "lookups"
    rest = f", {unproven:,} could not be compared" if unproven else ""
    if wrong:
        return f"index and engines DISAGREED on {wrong:,} of {checked:,} {lookups}, which is a defect{rest}"
    if checked:
        return f"index and engines agreed on {'its only' if checked == 1 else f'all {checked:,}'} {lookups}{rest}"
    return "no lookup was compared with the index" if any(result.requests for result in results) else ""


ReportSettings: TypeAlias = Mapping[str, str | int | float | bool | None]


def report_settings(fleet: FleetSettings, **more: str | float | bool | None) -> dict[str, str | int | float | bool | None]:
    """Return the settings of a fleet, with the real number of blocks, the source of the costs, and `more`."""
    return msgspec.structs.asdict(fleet) | {"blocks": fleet.size.blocks, "cost_source": fleet.costs.source} | more


def traffic_text(settings: ReportSettings) -> str:
    """Return a fleet and its requests as one line: `8 engines, llama-3.1-8b-h100, 200 requests of chat, seed 0`."""
    engines, ranks = settings.get("engines"), settings.get("ranks")
    parts = [
        f"{engines} engine{'' if engines == 1 else 's'}" + ("" if ranks in {None, 1} else f" of {ranks} ranks"),
        str(settings.get("preset")),
        _source(settings),
        _pace(settings),
        f"seed {settings.get('seed')}",
    ]
    return ", ".join(part for part in parts if part)


def _source(settings: ReportSettings) -> str:
    trace, workload, requests = (settings.get(name) for name in ("trace", "workload", "requests"))
    count = f"{requests:,} request{'' if requests == 1 else 's'} of " if isinstance(requests, int) else ""
    if trace is not None:
        return f"{count}the trace {trace}"
    return "" if workload is None else f"{count}the packaged sample" if workload == "trace" else f"{count}{workload}"


def _pace(settings: ReportSettings) -> str:
    rate, speed = settings.get("rate"), settings.get("trace_speed")
    return f"{rate:g} requests a second" if rate is not None else f"{speed:g} times as fast" if speed is not None else ""


class Cell(NamedTuple):
    """One value of the table as text."""

    text: str
    best: bool = False


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """One column of the table."""

    title: str
    value: Callable[[PolicyResult], float | None]
    to_text: Callable[[float], str]
    best: Literal["least", "most"] | None = None


def _ttft(value: Callable[[Distribution], float]) -> Callable[[PolicyResult], float | None]:
    return lambda result: None if result.ttft is None else value(result.ttft)


def _if_looked_up(value: Callable[[PolicyResult], float]) -> Callable[[PolicyResult], float | None]:
    """Return the value; None if no prompt was looked up, since rates are undefined then."""
    return lambda result: value(result) if result.prompt_tokens else None


COLUMNS: Final = (
    ReportColumn("TTFT p50", _ttft(lambda ttft: ttft.p50), "{:,.3f}".format, "least"),
    ReportColumn("p90", _ttft(lambda ttft: ttft.p90), "{:,.3f}".format, "least"),
    ReportColumn("p99", _ttft(lambda ttft: ttft.p99), "{:,.3f}".format, "least"),
    ReportColumn("hit rate", _if_looked_up(lambda result: result.hit_rate), percent, "most"),
    ReportColumn("tokens/s", _if_looked_up(lambda result: result.output_tokens_per_second), "{:,.1f}".format, "most"),
    ReportColumn("imbalance", _if_looked_up(lambda result: result.imbalance), "{:.2f}".format, "least"),
    ReportColumn("preemptions", lambda result: result.preemptions, "{:,.0f}".format, "least"),
    ReportColumn("checked", lambda result: result.checked, "{:,.0f}".format),
    ReportColumn("disagreements", lambda result: result.disagreements, "{:,.0f}".format),
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
    return [[Cell(f"{line[0].text:<{widths[0]}}"), *map(_pad_cell, line[1:], widths[1:], COLUMNS)] for line in table]


def _column(column: ReportColumn, results: Sequence[PolicyResult]) -> list[Cell]:
    values = [column.value(result) for result in results]
    texts = ["-" if value is None else column.to_text(value) for value in values]
    known = [value for value in values if value is not None]
    if column.best is None or len(set(texts)) < 2 or not known:
        return [Cell(text) for text in texts]
    best = column.to_text(min(known) if column.best == "least" else max(known))
    return [Cell(text, text == best) for text in texts]


def _pad_cell(cell: Cell, width: int, column: ReportColumn) -> Cell:
    mark = "*" if cell.best else "" if column.best is None else " "
    return Cell(f"{cell.text:>{width}}{mark}", cell.best)
