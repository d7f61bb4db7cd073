"""The figures of a report. Each has a description in text and a function that draws it."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

from kvevents.errors import MissingDependencyError
from kvevents.sim.report_text import capacity_blocks, percent, span, visible
from kvevents.sim.results import Comparison, FleetSample, PolicyResult, WorkerResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK: Final = "#010101"
SOFT: Final = "#020202"
LINE: Final = "#030303"
PANEL: Final = "#040404"
SERIES: Final = ("#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0005", "#0a0006")
"""Placeholder colours. They are replaced by the page's variables, which differ in light and dark mode."""
_OF_THE_PAGE: Final = {
    INK: "currentColor",
    SOFT: "var(--soft)",
    LINE: "var(--line)",
    PANEL: "var(--panel)",
    **{color: f"var(--series-{number})" for number, color in enumerate(SERIES)},
}
_STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvevents",
    "text.parse_math": False,
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.labelsize": 8.5,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "xtick.labelcolor": SOFT,
    "xtick.labelsize": 8.5,
    "ytick.color": LINE,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8.5,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.facecolor": "none",
    "path.simplify": True,
}
_LEFT_OUT: Final = re.compile(
    r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->|\sxmlns(?::\w+)?=\"[^\"]*\"", re.DOTALL
)
_FONT: Final = re.compile(r"font: ([\d.]+)px [^;\"]*")
_PLACE: Final = re.compile(r"(\bid=\"|url\(#|xlink:href=\"#)")
_COLOR: Final = re.compile("|".join(_OF_THE_PAGE))
_HEAD: Final = re.compile(r"<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>")


def check_matplotlib() -> None:
    """Raise `MissingDependencyError` if matplotlib is not installed."""
    try:
        import matplotlib as _  # noqa: F401, ICN001, PLC0415 - only checked; it belongs to an extra
    except ImportError as error:
        raise MissingDependencyError(
            "a report with figures needs the package matplotlib: pip install 'kvevents[sim]'"
        ) from error


def render_svg(name: str, label: str, width: float, height: float, draw: Callable[[Figure], None]) -> str:
    """Return an `<svg>` element of what `draw` draws on a figure of `width` times `height` inches.

    `name` makes its ids unique in the page; `label` is the description for screen readers. Raises
    `MissingDependencyError`.
    """
    check_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415 - imported late, since it belongs to an extra

    with _report_style():
        figure = Figure((width, height), layout="constrained")
        draw(figure)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _clean_svg(written.getvalue(), name, label)


@contextmanager
def _report_style() -> Iterator[None]:
    from matplotlib import rc_context, rcdefaults  # noqa: PLC0415 - imported late, since it belongs to an extra

    with rc_context(), warnings.catch_warnings():
        rcdefaults()  # the user's matplotlibrc must not change the report
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser draws the glyphs
        with rc_context(_STYLE):
            yield


def _clean_svg(svg: str, name: str, label: str) -> str:
    svg = _LEFT_OUT.sub("", svg[svg.index("<svg") :])
    svg = "\n".join(map(visible, svg.split("\n")))
    svg = _FONT.sub(r"font-size: \1px", svg)
    svg = _PLACE.sub(rf"\g<1>{name}-", svg)
    svg = _COLOR.sub(lambda found: _OF_THE_PAGE[found[0]], svg)
    return _HEAD.sub(rf'<svg role="img" aria-label="{_escape_label(label)}" viewBox="\1">', svg, count=1).strip()


def _escape_label(label: str) -> str:
    return escape(visible(label)).replace("\\", r"\\")


WIDTH: Final = 4.9
"""Width of a figure in inches of 72 points; a phone shows a point as about one pixel."""
ROW: Final = 0.34
"""Height in inches of one policy in a figure with a line for each policy."""
PANE: Final = 0.95
"""Height in inches of one policy in a figure with a pane for each policy."""
MAX_DOTS: Final = 200
"""Largest number of dots of a policy, one for each worker. Of more workers, this many are drawn, evenly chosen in the order of
their values."""
MAX_POINTS: Final = 40
"""Largest number of points of a line of hit rates; samples between two points are summed."""
MANY_DECADES: Final = 3_000.0
"""Ratio of the ends of a logarithmic scale from which on only powers of ten have labels, because more do not fit."""
_MARKS: Final = (("p50", "o"), ("p90", "s"), ("p99", "D"))
_DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure of the report."""

    name: str
    title: str
    about: str
    """Caption: what the figure shows."""
    label: Callable[[Comparison], str]
    """Returns the values as text, for screen readers."""
    height: Callable[[int], float]
    """Returns the height in inches for a number of policies."""
    draw: Callable[[Figure, Comparison], None]

    def svg(self, comparison: Comparison) -> str:
        """Return the figure as an `<svg>` element. Raises `MissingDependencyError`."""
        height = self.height(len(comparison.policies))
        return render_svg(self.name, self.label(comparison), WIDTH, height, lambda figure: self.draw(figure, comparison))


def _by_policy(describe: Callable[[PolicyResult], str]) -> Callable[[Comparison], str]:
    return lambda comparison: "; ".join(f"{result.policy}: {describe(result)}" for result in comparison.policies)


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
    # A logarithmic scale has no 0 at which a bar could begin, so each policy is a line from p50 to p99.
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
    from matplotlib.ticker import LogLocator, NullLocator  # noqa: PLC0415 - imported late, since it belongs to an extra

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
            found = _sample_dots(sorted(value(result)))
            axes.plot(found[:1] + found[-1:], [row] * len(found[:1] + found[-1:]), color=LINE, linewidth=4, zorder=1)
            axes.plot(found, [row] * len(found), "o", color=SERIES[0], alpha=0.6, markersize=6, markeredgewidth=0, zorder=3)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(unit)

    return draw


def _sample_dots(ordered: list[float]) -> list[float]:
    if len(ordered) <= MAX_DOTS:
        return ordered
    return [ordered[round(at * (len(ordered) - 1) / (MAX_DOTS - 1))] for at in range(MAX_DOTS)]


def _busy_shares(result: PolicyResult) -> list[float]:
    return [worker.busy for worker in result.workers]


def _relative_work(result: PolicyResult) -> list[float]:
    """Return the prompt tokens that each worker computed, divided by their mean."""
    computed = [_computed_tokens(worker) for worker in result.workers]
    mean = sum(computed) / len(computed) if computed else 0
    return [tokens / mean for tokens in computed] if mean else []


def _computed_tokens(worker: WorkerResult) -> int:
    return worker.prompt_tokens - worker.cached_tokens


def _range(values: list[float], to_text: Callable[[float], str]) -> str:
    return f"{to_text(min(values))} to {to_text(max(values))}" if values else "nothing"


# --- over time


def _over_time(
    draw: Callable[[Axes, list[float], list[FleetSample], Comparison], None],
) -> Callable[[Figure, Comparison], None]:
    """Return a function that draws a pane for each policy, all with the same scales."""

    def draw_panes(figure: Figure, comparison: Comparison) -> None:
        results = comparison.policies
        panes = figure.subplots(max(len(results), 1), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, result in zip(panes, results, strict=False):
            axes.set_title(result.policy, pad=3)
            draw(axes, [sample.at for sample in result.series], result.series, comparison)
            axes.margins(x=0)
            axes.set_ylim(bottom=0)
            axes.tick_params(axis="y", labelcolor=SOFT)
            axes.yaxis.set_major_formatter(lambda value, _: _short_number(value))
            axes.locator_params(axis="y", nbins=3)
        panes[-1].set_xlabel("seconds")
        _legend(figure, panes[0])

    return draw_panes


def _short_number(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _contents(axes: Axes, at: list[float], series: list[FleetSample], comparison: Comparison) -> None:
    unique = [sample.unique for sample in series]
    blocks = [sample.blocks for sample in series]
    axes.fill_between(at, unique, color=SERIES[0], linewidth=0, label="different blocks")
    axes.fill_between(at, unique, blocks, color=SERIES[0], alpha=0.4, linewidth=0, label="copies of them")
    capacity = capacity_blocks(comparison.settings)
    if capacity is not None:
        axes.axhline(capacity, color=INK, linewidth=1, linestyle="--", label="capacity")


def _queues(axes: Axes, at: list[float], series: list[FleetSample], _comparison: Comparison) -> None:
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


def hit_rates(series: Sequence[FleetSample]) -> tuple[list[float], list[float]]:
    """Return times and hit rates for at most `MAX_POINTS` equal intervals; intervals without lookups are left out."""
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


def _fullest_sample(result: PolicyResult) -> FleetSample | None:
    return max(result.series, key=lambda sample: sample.blocks, default=None)


def _describe_contents(result: PolicyResult) -> str:
    most = _fullest_sample(result)
    return "nothing" if most is None else f"{most.blocks:,} blocks at most, {most.unique:,} of them different"


def _describe_queues(result: PolicyResult) -> str:
    waiting = max((sample.waiting for sample in result.series), default=0)
    running = max((sample.running for sample in result.series), default=0)
    return f"at most {running:,} running and {waiting:,} waiting"


def _describe_ttft(result: PolicyResult) -> str:
    ttft = result.ttft
    return "no answers" if ttft is None else f"p50 {span(ttft.p50)}, p90 {span(ttft.p90)}, p99 {span(ttft.p99)}"


DRAWINGS: Final = (
    Drawing(
        "ttft",
        "Time to the first token",
        "Measured from the arrival of a request. Shorter is better. The scale is logarithmic.",
        _by_policy(_describe_ttft),
        _lines,
        _ttft,
    ),
    Drawing(
        "hits",
        "Hit rate",
        "Share of all prompt tokens that the engines found in their caches.",
        _by_policy(lambda result: percent(result.hit_rate)),
        _lines,
        _hit_rates,
    ),
    Drawing(
        "hits-over-time",
        "Hit rate over time",
        "Hit rate of the requests that were admitted at that time.",
        _by_policy(lambda result: _range(hit_rates(result.series)[1], percent)),
        lambda _policies: 2.9,
        _hit_rates_over_time,
    ),
    Drawing(
        "work",
        "Work of each worker",
        "Prompt tokens that the worker computed, divided by the mean of all workers; 1 is even.",
        _by_policy(lambda result: _range(_relative_work(result), lambda value: f"{value:.2f}")),
        _lines,
        _dots(_relative_work, lambda value, _=None: f"{value:g}"),
    ),
    Drawing(
        "busy",
        "Busy share of each worker",
        "Share of the run in which the worker computed.",
        _by_policy(lambda result: _range(_busy_shares(result), percent)),
        _lines,
        _dots(_busy_shares, _as_percent),
    ),
    Drawing(
        "contents",
        "What the caches hold",
        "Blocks in the index. A block that several workers hold counts once as different; the rest are copies.",
        _by_policy(_describe_contents),
        _panes,
        _over_time(_contents),
    ),
    Drawing(
        "queues",
        "Requests in the engines",
        "Requests that run, and requests that wait for free blocks.",
        _by_policy(_describe_queues),
        _panes,
        _over_time(_queues),
    ),
)
"""All figures, in the order of the report."""
