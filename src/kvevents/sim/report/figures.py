"""The figures of a report: each says in words what it shows, and draws it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvevents.sim.report.rendering import INK, LINE, PANEL, SERIES, SOFT, drawn
from kvevents.sim.report.settings import room
from kvevents.sim.report.words import percent, span
from kvevents.sim.results import Comparison, PolicyResult, Sample, WorkerResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH: Final = 4.9
"""Inches of 72 points; a phone shows a point as about one pixel."""
ROW: Final = 0.34
"""Inches that a policy takes in a figure with a line for each."""
PANE: Final = 0.95
"""Inches that a policy takes in a figure with a pane for each."""
MAX_DOTS: Final = 200
"""Workers of a policy that are drawn one by one; of more, so many from the least to the most."""
MAX_POINTS: Final = 40
"""Of a line of hit rates; what comes in between is taken together."""
MANY_DECADES: Final = 3_000.0
"""A logarithmic scale from 1 to this has names at powers of ten only, for want of room."""
_MARKS: Final = (("p50", "o"), ("p90", "s"), ("p99", "D"))
_DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure of the report."""

    name: str
    title: str
    about: str
    """What is seen, for all readers."""
    label: Callable[[Comparison], str]
    """The figures in words, for those who do not see them."""
    height: Callable[[int], float]
    """Inches, of the number of policies."""
    draw: Callable[[Figure, Comparison], None]

    def svg(self, comparison: Comparison) -> str:
        """Raises `MissingDependencyError`."""
        height = self.height(len(comparison.policies))
        return drawn(self.name, self.label(comparison), WIDTH, height, lambda figure: self.draw(figure, comparison))


def _by_policy(said: Callable[[PolicyResult], str]) -> Callable[[Comparison], str]:
    return lambda comparison: "; ".join(f"{result.policy}: {said(result)}" for result in comparison.policies)


def _lines(policies: int) -> float:
    return 0.75 + ROW * max(policies, 2)


def _panes(policies: int) -> float:
    return 0.6 + PANE * max(policies, 1)


# --- one line for each policy


def _named_rows(axes: Axes, results: Sequence[PolicyResult]) -> None:
    axes.set_yticks(range(len(results)), [result.policy for result in results])
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _ttft(figure: Figure, comparison: Comparison) -> None:
    axes = figure.add_subplot()
    _named_rows(axes, comparison.policies)
    # Times on a logarithmic scale have no 0 that a bar could begin at, so a policy is a line from p50 to p99.
    for row, result in enumerate(comparison.policies):
        if result.ttft is None:
            continue
        times = [max(getattr(result.ttft, name), 1e-6) for name, _ in _MARKS]
        axes.plot(times, [row] * 3, color=SERIES[0], linewidth=1.5, zorder=2)
        for time, (name, mark) in zip(times, _MARKS, strict=True):
            label = name if row == _first_answered(comparison) else None
            fill = SERIES[0] if name == "p90" else PANEL
            axes.plot(
                [time],
                [row],
                mark,
                color=SERIES[0],
                markerfacecolor=fill,
                markersize=6,
                label=label,
                linestyle="none",
                zorder=3,
            )
    _logarithmic(axes)
    _legend(figure, axes)


def _logarithmic(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullLocator  # noqa: PLC0415 - late: it is of an extra

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    steps = (1.0, 3.0) if high / low < MANY_DECADES else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} s" if value >= 1 else f"{1000 * value:g} ms")


def _first_answered(comparison: Comparison) -> int:
    return next((row for row, result in enumerate(comparison.policies) if result.ttft is not None), 0)


def _hit_rates(figure: Figure, comparison: Comparison) -> None:
    axes = figure.add_subplot()
    results = comparison.policies
    _named_rows(axes, results)
    rates = [result.hit_rate for result in results]
    bars = axes.barh(range(len(results)), rates, height=0.6, color=SERIES[0])
    axes.bar_label(bars, [percent(rate) for rate in rates], padding=3, color=INK)
    axes.set_xlim(0, max([0.01, *rates]) * 1.18)
    axes.xaxis.set_major_formatter(_as_percent)


def _as_percent(value: float, _position: Any = None) -> str:
    return f"{100 * value:g}%"


def _dots(value: Callable[[PolicyResult], list[float]], unit: Callable[..., str]) -> Callable[[Figure, Comparison], None]:
    def draw(figure: Figure, comparison: Comparison) -> None:
        axes = figure.add_subplot()
        _named_rows(axes, comparison.policies)
        for row, result in enumerate(comparison.policies):
            found = _thinned(sorted(value(result)))
            axes.plot(found[:1] + found[-1:], [row] * len(found[:1] + found[-1:]), color=LINE, linewidth=4, zorder=1)
            axes.plot(found, [row] * len(found), "o", color=SERIES[0], alpha=0.6, markersize=6, markeredgewidth=0, zorder=3)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(unit)

    return draw


def _thinned(ordered: list[float]) -> list[float]:
    if len(ordered) <= MAX_DOTS:
        return ordered
    return [ordered[round(at * (len(ordered) - 1) / (MAX_DOTS - 1))] for at in range(MAX_DOTS)]


def _busy(result: PolicyResult) -> list[float]:
    return [worker.busy for worker in result.workers]


def _work(result: PolicyResult) -> list[float]:
    """Prompt tokens that each worker had to compute, over their mean."""
    computed = [_computed(worker) for worker in result.workers]
    mean = sum(computed) / len(computed) if computed else 0
    return [tokens / mean for tokens in computed] if mean else []


def _computed(worker: WorkerResult) -> int:
    return worker.prompt_tokens - worker.cached_tokens


def _range(values: list[float], spell: Callable[[float], str]) -> str:
    return f"{spell(min(values))} to {spell(max(values))}" if values else "nothing"


# --- over time


def _over_time(draw: Callable[[Axes, list[float], list[Sample], Comparison], None]) -> Callable[[Figure, Comparison], None]:
    """A pane for each policy, all with the same scales."""

    def drawn_panes(figure: Figure, comparison: Comparison) -> None:
        results = comparison.policies
        panes = figure.subplots(max(len(results), 1), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, result in zip(panes, results, strict=False):
            axes.set_title(result.policy, pad=3)
            draw(axes, [sample.at for sample in result.series], result.series, comparison)
            axes.margins(x=0)
            axes.set_ylim(bottom=0)
            axes.tick_params(axis="y", labelcolor=SOFT)
            axes.yaxis.set_major_formatter(lambda value, _: _short(value))
            axes.locator_params(axis="y", nbins=3)
        panes[-1].set_xlabel("seconds")
        _legend(figure, panes[0])

    return drawn_panes


def _short(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _contents(axes: Axes, at: list[float], series: list[Sample], comparison: Comparison) -> None:
    unique = [sample.unique for sample in series]
    blocks = [sample.blocks for sample in series]
    axes.fill_between(at, unique, color=SERIES[0], linewidth=0, label="different blocks")
    axes.fill_between(at, unique, blocks, color=SERIES[0], alpha=0.4, linewidth=0, label="copies of them")
    capacity = room(comparison.settings)
    if capacity is not None:
        axes.axhline(capacity, color=INK, linewidth=1, linestyle="--", label="room")


def _queues(axes: Axes, at: list[float], series: list[Sample], _comparison: Comparison) -> None:
    running = [sample.running for sample in series]
    axes.fill_between(at, running, color=SERIES[0], alpha=0.4, linewidth=0, label="running")
    both = [sample.running + sample.waiting for sample in series]
    axes.fill_between(at, running, both, color=SERIES[1], linewidth=0, label="waiting")


def _hit_rates_over_time(figure: Figure, comparison: Comparison) -> None:
    axes = figure.add_subplot()
    for number, result in enumerate(comparison.policies):
        times, rates = hit_rates(result.series)
        color, dash = SERIES[number % len(SERIES)], _DASHES[number % len(_DASHES)]
        axes.plot(times, rates, color=color, linestyle=dash, linewidth=1.6, label=result.policy)
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.yaxis.set_major_formatter(_as_percent)
    axes.tick_params(axis="y", labelcolor=SOFT)
    axes.set_xlabel("seconds")
    _legend(figure, axes)


def hit_rates(series: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Times and hit rates, in at most `MAX_POINTS` spans of equally many samples, but those in which nothing was looked up."""
    step = -(-len(series) // MAX_POINTS)
    times, rates = [], []
    for start in range(0, len(series), max(step, 1)):
        part = series[start : start + step]
        prompt = sum(sample.prompt_tokens for sample in part)
        if prompt:
            times.append(part[-1].at)
            rates.append(sum(sample.cached_tokens for sample in part) / prompt)
    return times, rates


def _legend(figure: Figure, axes: Axes) -> None:
    marks, names = axes.get_legend_handles_labels()
    if names:
        figure.legend(marks, names, loc="outside upper left", ncols=3, handlelength=1.8, columnspacing=1.4, borderpad=0.1)


# --- all of them


def _most(result: PolicyResult) -> Sample | None:
    return max(result.series, key=lambda sample: sample.blocks, default=None)


def _held(result: PolicyResult) -> str:
    most = _most(result)
    return "nothing" if most is None else f"{most.blocks:,} blocks at most, {most.unique:,} of them different"


def _longest(result: PolicyResult) -> str:
    waiting = max((sample.waiting for sample in result.series), default=0)
    running = max((sample.running for sample in result.series), default=0)
    return f"at most {running:,} running and {waiting:,} waiting"


def _times(result: PolicyResult) -> str:
    ttft = result.ttft
    return "no answers" if ttft is None else f"p50 {span(ttft.p50)}, p90 {span(ttft.p90)}, p99 {span(ttft.p99)}"


DRAWINGS: Final = (
    Drawing(
        "ttft",
        "Time to the first token",
        "From the arrival of a request; to the left is better. The scale is logarithmic.",
        _by_policy(_times),
        _lines,
        _ttft,
    ),
    Drawing(
        "hits",
        "Hit rate",
        "Prompt tokens that the engines found in their caches, of all.",
        _by_policy(lambda result: percent(result.hit_rate)),
        _lines,
        _hit_rates,
    ),
    Drawing(
        "hits-over-time",
        "Hit rate over time",
        "Of the requests that were admitted just then.",
        _by_policy(lambda result: _range(hit_rates(result.series)[1], percent)),
        lambda _policies: 2.9,
        _hit_rates_over_time,
    ),
    Drawing(
        "work",
        "Work of each worker",
        "Prompt tokens that it had to compute, over the mean; the closer to 1, the more even.",
        _by_policy(lambda result: _range(_work(result), lambda value: f"{value:.2f}")),
        _lines,
        _dots(_work, lambda value, _=None: f"{value:g}"),
    ),
    Drawing(
        "busy",
        "Busy share of each worker",
        "Of the whole time, in which it computed.",
        _by_policy(lambda result: _range(_busy(result), percent)),
        _lines,
        _dots(_busy, _as_percent),
    ),
    Drawing(
        "contents",
        "What the caches hold",
        "Blocks that the index knows of. A block that several workers hold is one and its copies.",
        _by_policy(_held),
        _panes,
        _over_time(_contents),
    ),
    Drawing(
        "queues",
        "Requests in the engines",
        "Those that run, and those that wait for room.",
        _by_policy(_longest),
        _panes,
        _over_time(_queues),
    ),
)
"""In the order of the report."""
