"""Reports of a comparison as text: one sentence that says whether events pay, the settings, and a table of the policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from kvevents.diagnosis.text_format import plural
from kvevents.sim.results import Comparison, Distribution, PolicyResult
from kvevents.sim.routers import POLICIES, needs_events
from kvevents.sim.settings import FleetSettings

MIN_RATIO: Final = 1.05
"""Ratio of two TTFTs below which the two count as equally good."""
MIN_HIT_GAIN: Final = 0.01
"""Difference of two hit rates below which a shorter TTFT is not attributed to caches."""
_T_QUANTILES: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for 95 % and 1, 2, ... degrees of freedom. The last value is also used for more degrees of freedom."""


class Interval(NamedTuple):
    """A mean over seeds, and its 95 % confidence interval. For a single seed, the interval has no width."""

    mean: float
    low: float
    high: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Interval:
        """Return the mean of `values`, which must not be empty, and the confidence interval of the mean."""
        count, mean = len(values), sum(values) / len(values)
        if count == 1:
            return cls(mean, mean, mean)
        variance = sum((value - mean) ** 2 for value in values) / (count - 1)
        half = _T_QUANTILES[min(count - 1, len(_T_QUANTILES)) - 1] * math.sqrt(variance / count)
        return cls(mean, mean - half, mean + half)


def format_seconds(seconds: float) -> str:
    """Return a duration as text such as `4 ms`, `0.80 s` or `12.3 s`."""
    if seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.1f} s"


Runs: TypeAlias = Mapping[str, Sequence[PolicyResult]]
"""Maps each policy to its results, one for each seed."""


def runs_by_policy(results: Sequence[PolicyResult]) -> dict[str, list[PolicyResult]]:
    """Return the results of each policy. Policies and results keep their order."""
    runs: dict[str, list[PolicyResult]] = {}
    for result in results:
        runs.setdefault(result.policy, []).append(result)
    return runs


def mean_hit_rate(runs: Sequence[PolicyResult]) -> float:
    """Return the mean hit rate over the seeds."""
    return Interval.from_values([run.hit_rate for run in runs]).mean


def p90_of(run: PolicyResult) -> float:
    """Return the TTFT p90 of a run in which at least one request was answered."""
    assert run.ttft is not None  # noqa: S101 - the run has answers
    return run.ttft.p90


def p90_ratio(rival: Sequence[PolicyResult], subject: Sequence[PolicyResult]) -> Interval:
    """Return the geometric mean over the seeds of `rival`'s TTFT p90 divided by `subject`'s TTFT p90, with its interval."""
    logs = Interval.from_values([math.log(p90_of(one) / p90_of(other)) for one, other in zip(rival, subject, strict=True)])
    return Interval(*map(math.exp, logs))


# --- the summary


def summary(comparison: Comparison) -> str:
    """Return in one sentence, without a full stop, whether events pay and what was measured.

    A shorter TTFT is attributed to events only if the policy with events also finds more tokens in caches.
    """
    results = comparison.policies
    answered = {name: runs for name, runs in runs_by_policy(results).items() if all(run.ttft and run.finished for run in runs)}
    unanswered = "no request was answered" if any(result.requests for result in results) else "no request was sent"
    sentence = _judgement_text(answered) or _best_text(answered) or unanswered
    return "; ".join(part for part in (sentence, _refused_text(results), _audit_text(results)) if part)


class Judgement(NamedTuple):
    """The result of comparing the policy that needs events (`subject`) with the policies without events."""

    finding: str
    """`pay`, `nothing`, `balance` (the subject is faster, but does not find more tokens in caches) or `undecided`."""
    subject: str
    rival: str
    """The simplest policy without events that is as fast as the subject; if no policy is as fast, the fastest one."""
    ratio: Interval
    """TTFT p90 of the rival divided by TTFT p90 of the subject."""


def judge(runs: Runs) -> Judgement | None:
    """Return whether events pay; None if no policy with events was run, or no policy without events."""
    subject = next((name for name in runs if name in POLICIES and needs_events(name)), None)
    rivals = [name for name in POLICIES if name in runs and not needs_events(name)]
    if subject is None or not rivals:
        return None
    ratios = {name: p90_ratio(runs[name], runs[subject]) for name in rivals}
    rival = next((name for name in rivals if ratios[name].mean < MIN_RATIO), min(rivals, key=lambda name: ratios[name].mean))
    more = Interval.from_values([one.hit_rate - other.hit_rate for one, other in zip(runs[subject], runs[rival], strict=True)])
    finding = "pay" if more.mean >= MIN_HIT_GAIN and more.low > 0 else "balance"
    finding = "nothing" if ratios[rival].mean < MIN_RATIO else "undecided" if ratios[rival].low <= 1 else finding
    return Judgement(finding, subject, rival, ratios[rival])


_FINDINGS: Final = {
    "pay": "events pay here: {} is the fastest policy without events",
    "nothing": "events pay nothing here: {}, which needs none, is as fast",
    "balance": "caches gain nothing here, but the balance of load does: {} is the fastest policy without events",
    "undecided": "more seeds must decide whether events pay here: {} is the fastest policy without events",
}


def _judgement_text(runs: Runs) -> str:
    judgement = judge(runs)
    if judgement is None:
        return ""
    seeds, (mean, low, high) = len(runs[judgement.subject]), judgement.ratio
    return (
        f"{_FINDINGS[judgement.finding].format(judgement.rival)}: its TTFT p90 is {mean:.2f} times that of {judgement.subject} "
        + (f"({low:.2f} to {high:.2f} in {seeds} seeds)" if seeds > 1 else "(one seed)")
        + f", and it found {mean_hit_rate(runs[judgement.rival]):.1%} of prompt tokens in caches, {judgement.subject} "
        f"{mean_hit_rate(runs[judgement.subject]):.1%}"
    )


def _best_text(runs: Runs) -> str:
    p90s = {name: Interval.from_values([p90_of(run) for run in of_policy]).mean for name, of_policy in runs.items()}
    best = min(p90s, key=p90s.__getitem__, default=None)
    if best is None:
        return ""
    hits = mean_hit_rate(runs[best])
    return f"{best} has a TTFT p90 of {format_seconds(p90s[best])} and found {hits:.1%} of prompt tokens in caches"


def _refused_text(results: Sequence[PolicyResult]) -> str:
    most = max((result.refused for result in results), default=0)
    return f"{plural(most, 'request')} {'was' if most == 1 else 'were'} refused, longer than a whole cache" if most else ""


def _audit_text(results: Sequence[PolicyResult]) -> str:
    names = ("checked", "disagreements", "unproven")
    checked, wrong, unproven = (sum(getattr(result, name) for result in results) for name in names)
    rest = f", {unproven:,} could not be compared" if unproven else ""
    if wrong:
        return f"index and engines DISAGREED on {wrong:,} of {plural(checked, 'lookup')}, which is a defect{rest}"
    if checked:
        return f"index and engines agreed on {'its only lookup' if checked == 1 else f'all {checked:,} lookups'}{rest}"
    return "no lookup was compared with the index" if any(result.requests for result in results) else ""


# --- settings

ReportSettings: TypeAlias = Mapping[str, str | int | float | bool | None]


def report_settings(fleet: FleetSettings, **more: str | float | bool | None) -> dict[str, str | int | float | bool | None]:
    """Return the settings of a fleet, its actual number of blocks, the source of its costs, and the settings in `more`."""
    return msgspec.structs.asdict(fleet) | {"blocks": fleet.size.blocks, "cost_source": fleet.costs.source} | more


def traffic_text(settings: ReportSettings) -> str:
    """Return a fleet and its requests as one line: `8 engines, llama-3.1-8b-h100, 200 requests of chat, seed 0`."""
    engines, ranks, routers = settings.get("engines"), settings.get("ranks"), settings.get("routers")
    rate, speed = settings.get("rate"), settings.get("trace_speed")
    seed, seeds = settings.get("seed"), settings.get("seeds")
    seed_text = f"seed {seed}"
    if isinstance(seed, int) and isinstance(seeds, int) and seeds > 1:
        seed_text = f"seeds {seed} to {seed + seeds - 1}"
    parts = [
        f"{engines} engine{'' if engines == 1 else 's'}" + ("" if ranks in {None, 1} else f" of {ranks} ranks"),
        "" if routers in {None, 1} else f"{routers} routers",
        str(settings.get("preset")),
        _traffic_source(settings),
        f"{rate:g} requests a second" if rate is not None else "",
        f"{speed:g} times as fast" if speed is not None else "",
        seed_text,
    ]
    return ", ".join(part for part in parts if part)


def _traffic_source(settings: ReportSettings) -> str:
    trace, workload, requests = (settings.get(name) for name in ("trace", "workload", "requests"))
    count = f"{plural(requests, 'request')} of " if isinstance(requests, int) else ""
    if trace is not None:
        return f"{count}the trace {trace}"
    return "" if workload is None else f"{count}the packaged sample" if workload == "trace" else f"{count}{workload}"


# --- the table


class Cell(NamedTuple):
    """One cell of the table: its text, and whether its value is the best of the column."""

    text: str
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """One column of the table."""

    title: str
    value: Callable[[PolicyResult], float | None]
    to_text: Callable[[float], str]
    best_end: Literal["least", "most"] | None = None
    """Which value is the best. None for a count, for which the table shows the sum over the seeds instead of the mean."""


def _ttft_reader(read: Callable[[Distribution], float]) -> Callable[[PolicyResult], float | None]:
    """Return a function that reads a value of the TTFT, and returns None if no request was answered."""
    return lambda result: None if result.ttft is None else read(result.ttft)


def _none_without_lookups(read: Callable[[PolicyResult], float]) -> Callable[[PolicyResult], float | None]:
    """Return a function that reads a rate, and returns None if no prompt was looked up, because the rate is then undefined."""
    return lambda result: read(result) if result.prompt_tokens else None


COLUMNS: Final = (
    ReportColumn("TTFT p50", _ttft_reader(lambda ttft: ttft.p50), "{:,.3f}".format, "least"),
    ReportColumn("p90", _ttft_reader(lambda ttft: ttft.p90), "{:,.3f}".format, "least"),
    ReportColumn("p99", _ttft_reader(lambda ttft: ttft.p99), "{:,.3f}".format, "least"),
    ReportColumn("hit rate", _none_without_lookups(lambda result: result.hit_rate), "{:.1%}".format, "most"),
    ReportColumn("tokens/s", _none_without_lookups(lambda result: result.output_tokens_per_second), "{:,.1f}".format, "most"),
    ReportColumn("imbalance", _none_without_lookups(lambda result: result.imbalance), "{:.2f}".format, "least"),
    ReportColumn("preemptions", lambda result: result.preemptions, "{:,.0f}".format, "least"),
    ReportColumn("checked", lambda result: result.checked, "{:,.0f}".format),
    ReportColumn("disagreements", lambda result: result.disagreements, "{:,.0f}".format),
)


def cells(comparison: Comparison) -> list[list[Cell]]:
    """Return, for each policy, a list with one cell for each of `COLUMNS`. Values with equal text are equally good."""
    runs = list(runs_by_policy(comparison.policies).values())
    columns = [_column_cells(column, runs) for column in COLUMNS]
    return [list(line) for line in zip(*columns, strict=True)] if runs else []


def rows(comparison: Comparison) -> list[list[Cell]]:
    """Return the rows of the table as text: the titles, then one row for each policy. The best figures have a mark."""
    titles = [Cell("policy"), *(_mark_best(Cell(column.title), column) for column in COLUMNS)]
    lines = zip(runs_by_policy(comparison.policies), cells(comparison), strict=True)
    return [titles, *([Cell(policy), *map(_mark_best, line, COLUMNS)] for policy, line in lines)]


def _column_cells(column: ReportColumn, runs: Sequence[Sequence[PolicyResult]]) -> list[Cell]:
    values = [_aggregate_seeds(column, [column.value(run) for run in of_policy]) for of_policy in runs]
    texts = ["-" if value is None else column.to_text(value) for value in values]
    known = [value for value in values if value is not None]
    if column.best_end is None or len(set(texts)) < 2 or not known:
        return [Cell(text) for text in texts]
    best = column.to_text(min(known) if column.best_end == "least" else max(known))
    return [Cell(text, text == best) for text in texts]


def _aggregate_seeds(column: ReportColumn, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return None if len(known) < len(values) else sum(known) if column.best_end is None else sum(known) / len(known)


def _mark_best(cell: Cell, column: ReportColumn) -> Cell:
    return Cell(cell.text + ("*" if cell.is_best else "" if column.best_end is None else " "), cell.is_best)
