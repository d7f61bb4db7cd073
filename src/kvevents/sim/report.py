"""Reports of a comparison of policies: one self-contained HTML file, with figures that matplotlib draws.

`report_text` has the table, the summary of one sentence and the settings.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from html import escape
from string import Template
from typing import TYPE_CHECKING, Final, TypeAlias

from kvevents.errors import MissingDependencyError
from kvevents.package_metadata import version
from kvevents.sim.report_text import percent, rows, summary, traffic_text
from kvevents.sim.results import Comparison, PolicyResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PAGE: Final = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>Routing policies compared - kvevents</title>
<style>
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
table { display: block; overflow-x: auto; border-collapse: collapse; white-space: nowrap; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ccc; text-align: right; }
th:first-child { text-align: left; }
img { max-width: 100%; }
</style>
</head>
<body>
<h1>Routing policies compared</h1>
<p>$summary</p>
<p>$traffic</p>
<table>
$table
</table>
<p>Times to the first token (TTFT) are in seconds. The best of a column is marked with *.</p>
$figures
<h2>Settings</h2>
<p>The fleet is simulated. Its engines cache, schedule and announce by the rules of vLLM, and their events go through the wire
format of the dialect below. The cost model gives the duration of a step; no GPU is used.</p>
<table>
$settings
</table>
<p>kvevents $version</p>
</body>
</html>
""")


def check_matplotlib() -> None:
    """Raise `MissingDependencyError` if matplotlib is not installed."""
    try:
        import matplotlib as _  # noqa: F401, ICN001, PLC0415 - only checked; it belongs to an extra
    except ImportError as error:
        raise MissingDependencyError(
            "a report with figures needs the package matplotlib: pip install 'kvevents[sim]'"
        ) from error


def page(comparison: Comparison) -> str:
    """Return the file. Equal comparisons give equal files. Raises `MissingDependencyError` without matplotlib."""
    head, *lines = ([_text(cell.text.strip()) for cell in line] for line in rows(comparison))
    settings = {name.replace("_", " "): value for name, value in comparison.settings.items() if value is not None}
    return _PAGE.substitute(
        summary=_text(summary(comparison)),
        traffic=_text(traffic_text(comparison.settings)),
        table="\n".join([_row("th", *head), *(_row("td", *line) for line in lines)]),
        figures="\n".join(_images(comparison.policies)),
        settings="\n".join(_row("td", _text(name), _text(value)) for name, value in settings.items()),
        version=_text(version()),
    )


def _row(tag: str, first: str, *rest: str) -> str:
    return f'<tr><th scope="row">{first}</th>{"".join(f"<{tag}>{each}</{tag}>" for each in rest)}</tr>'


def _text(value: object) -> str:
    return escape(_printable(str(value)))


def _printable(text: str) -> str:
    """Return the text with unprintable characters as escape sequences."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


# --- figures

Results: TypeAlias = Sequence[PolicyResult]


def _draw_ttft(axes: Axes, results: Results) -> None:
    for row, result in enumerate(results):
        if result.ttft is not None:
            axes.plot([result.ttft.p50, result.ttft.p90, result.ttft.p99], [row] * 3, "o-", color="C0")
    axes.set_xscale("log")
    axes.set_xlabel("seconds: p50, p90 and p99")


def _draw_hit_rates(axes: Axes, results: Results) -> None:
    bars = axes.barh(range(len(results)), [result.hit_rate for result in results], color="C0")
    axes.bar_label(bars, [percent(result.hit_rate) for result in results], padding=3)
    axes.margins(x=0.15)
    axes.set_xlabel("share of all prompt tokens that the engines found in their caches")


def _draw_balance(axes: Axes, results: Results) -> None:
    for row, result in enumerate(results):
        computed = [worker.prompt_tokens - worker.cached_tokens for worker in result.workers]
        mean = sum(computed) / len(computed) if computed else 0
        if mean:
            axes.plot([tokens / mean for tokens in computed], [row] * len(computed), "o", color="C0", alpha=0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("prompt tokens that each worker computed, divided by their mean")


_FIGURES: Final[dict[str, Callable[[Axes, Results], None]]] = {
    "Time to the first token": _draw_ttft,
    "Hit rate": _draw_hit_rates,
    "Balance of the workers": _draw_balance,
}


def _images(results: Results) -> Iterator[str]:
    """Yield an `<img>` element for each figure, with a row for each policy. The table has the same values as text."""
    check_matplotlib()
    from matplotlib import style  # noqa: PLC0415 - imported late, since it belongs to an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    # Names do not contain formulas, and equal figures have equal ids.
    names = [_printable(result.policy).replace("$", r"\$") for result in results]
    for title, draw in _FIGURES.items():
        with style.context(["default", {"svg.hashsalt": "kvevents"}]):
            figure, file = Figure((8, 1.2 + 0.3 * len(results)), layout="constrained"), io.BytesIO()
            axes = figure.subplots()
            draw(axes, results)
            axes.set_title(title, loc="left")
            axes.set_yticks(range(len(results)), names)
            axes.set_ylim(max(len(results), 1) - 0.5, -0.5)
            figure.savefig(file, format="svg", metadata={"Date": None})
        yield f'<img alt="{title}" src="data:image/svg+xml;base64,{b64encode(file.getvalue()).decode()}">'
