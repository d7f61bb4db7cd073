"""Writes the results of the study, with conclusions that are computed from them, as docs/guides/routing-study.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.simulation import headings
from benchmarks.simulation.ladder import Stage
from kvevents.sim.results import Distribution, PolicyResult

if TYPE_CHECKING:
    from benchmarks.simulation.cases import Case
    from benchmarks.simulation.study import Plan


class Counted(NamedTuple):
    """Over all runs."""

    checked: int
    disagreements: int
    unproven: int


def counted(found: Mapping[Any, Any]) -> Counted:
    """What the audits of all runs came to."""
    ends = [result[-1] if isinstance(result, list) else result for result in found.values()]
    return Counted(*(sum(getattr(end, name) for end in ends) for name in Counted._fields))


def document(plan: Plan, found: Mapping[Any, Any], *, minutes: int) -> str:
    """All of the page, of the runs that need no trace."""
    counts = counted({case: found[case] for case in plan.without_trace()})
    parts = [
        headings.HEAD.format(minutes=minutes),
        headings.OTHERS,
        _other_traffic(plan, found),
        ratios([[_policy_p90(found, case) for case in cases] for _, cases in plan.others()]),
        headings.LLMD,
        _summary(plan, found),
        headings.LLMD_AFTER,
        headings.AUDIT.format(runs=len(plan.without_trace()), **counts._asdict()),
    ]
    return "\n".join(part.removesuffix("\n") for part in parts) + "\n"


def of_trace(plan: Plan, speed: float, found: Mapping[Any, Any], *, saturated: float) -> str:
    """Sections about a trace, which are printed."""
    parts = [
        headings.RISING.format(saturated=saturated, speed=speed),
        _compared("speed", [(f"{speed:g}", cases) for speed, cases in plan.rising()], found),
        headings.POLICIES.format(speed=speed),
        _table(_EACH, [[name, *_each(found[case])] for name, case in plan.policies(speed)]),
        best([(name, found[case]) for name, case in plan.policies(speed)]),
        headings.CACHES,
        _compared("cache of an engine", plan.caches(speed), found),
        headings.SMALL,
        _table(_EACH, [[case.policy, *_each(found[case])] for case in plan.small_blocks(speed)]),
    ]
    return "\n".join(part.removesuffix("\n") for part in parts) + "\n"


_EACH: Final = (
    "policy", "hit rate", "TTFT p50", "p90", "p99", "TPOT p90", "whole answer, mean", "imbalance", "preemptions",
)  # fmt: skip


def _each(result: PolicyResult) -> list[str]:
    ttft, tpot, latency = (_known(each) for each in (result.ttft, result.tpot, result.latency))
    times = [_seconds(ttft.p50), _seconds(ttft.p90), _seconds(ttft.p99), _seconds(tpot.p90), _seconds(latency.mean)]
    return [_percent(result.hit_rate), *times, f"{result.imbalance:.2f}", f"{result.preemptions:,}"]


def _compared(head: str, rows: Iterable[tuple[str, Sequence[Case]]], found: Mapping[Any, Any]) -> str:
    """TTFT p90 and hit rate of several policies, and how much the last one, which asks the index, has less."""
    heads, lines, times = [head], [], []
    for name, cases in rows:
        times.append([_policy_p90(found, case) for case in cases])
        *others, last = [time for _, time in times[-1]]
        heads = [head, *(case.policy for case in cases), *(f"{case.policy} : {cases[-1].policy}" for case in cases[:-1])]
        lines.append([name, *(_both(found[case]) for case in cases), *(f"{other / last:.1f}" for other in others)])
    return _table(heads, lines) + "\n" + ratios(times)


def _policy_p90(found: Mapping[Any, Any], case: Case) -> tuple[str, float]:
    return case.policy, _known(found[case].ttft).p90


def ratios(rows: Sequence[Sequence[tuple[str, float]]]) -> str:
    """Return how many times the TTFT p90 of the last policy of each row the others have, over all rows."""
    last = rows[0][-1][0]
    parts = []
    for place, (policy, _) in enumerate(rows[0][:-1]):
        times = [row[place][1] / row[-1][1] for row in rows]
        parts.append(f"- {policy} {min(times):.1f} to {max(times):.1f} times")
    return f"\nTTFT p90 compared with {last}:\n" + ",\n".join(parts) + ".\n"


def best(results: Sequence[tuple[str, PolicyResult]]) -> str:
    """Return which policy has the shortest TTFT p90, and which the highest hit rate."""
    fastest, time = min(((name, _known(result.ttft).p90) for name, result in results), key=lambda pair: pair[1])
    highest, rate = max(((name, result.hit_rate) for name, result in results), key=lambda pair: pair[1])
    return f"\nShortest TTFT p90: {fastest} ({_seconds(time)} s). Highest hit rate: {highest} ({_percent(rate)}).\n"


def _both(result: PolicyResult) -> str:
    return f"{_seconds(_known(result.ttft).p90)}, {_percent(result.hit_rate)}"


def _other_traffic(plan: Plan, found: Mapping[Any, Any]) -> str:
    rows, names = [], [""]
    for asked, cases in plan.others():
        names = ["", *(case.policy for case in cases)]
        cells = [_both(found[case]) for case in cases]
        rows.append([f"{asked.name}, {asked.rate:g}/s, {cases[0].fleet.preset}", *cells])
    return _table(names, rows)


_PUBLISHED: Final = {
    "prefix-aware": ("precise-scheduling", 8730.0, 0.298, 0.542),
    "prefix-aware, estimated": ("estimated-scheduling", 6944.4, 13.316, 31.083),
    "least-loaded": ("load-scheduling", 4266.4, 46.987, 94.865),
    "random": ("random-scheduling", 4428.7, 45.281, 92.551),
}
"""By ours: theirs, output tokens a second, TTFT mean and p90, of the report's summary."""


def _summary(plan: Plan, found: Mapping[Any, Any]) -> str:
    heads = ["theirs", "output/s", "TTFT mean", "p90", "ours", "output/s", "TTFT mean", "p90", "hit rate", "preemptions"]
    rows = []
    for climb in plan.climbs():
        name, *published = _PUBLISHED.get(climb.router, ("", None, None, None))
        stages: list[Stage] = found[climb][1:]
        ttft = _known(Distribution.of([value for stage in stages for value in stage.ttft]))
        cached, prompt = sum(stage.cached_tokens for stage in stages), sum(stage.prompt_tokens for stage in stages)
        output = sum(stage.output_rate for stage in stages) / len(stages)
        theirs = ["" if value is None else _published(value) for value in published]
        ours = [f"{output:,.0f}", _seconds(ttft.mean), _seconds(ttft.p90), _percent(cached / prompt)]
        rows.append([name, *theirs, climb.router, *ours, f"{stages[-1].preemptions:,}"])
    return _table(heads, rows)


def _published(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else _seconds(value)


def _known(distribution: Distribution | None) -> Distribution:
    assert distribution is not None, "some requests were answered"
    return distribution


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *rows])
