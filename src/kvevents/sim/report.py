"""Reports of a comparison of policies: one self-contained HTML file, without scripts, fonts or requests to the network.

`report_text` has the table and the summary of one sentence, `report_figures` the figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Final

from kvevents.package_metadata import version
from kvevents.sim.report_figures import DRAWINGS, Drawing, check_matplotlib
from kvevents.sim.report_text import COLUMNS, Cell, cells, report_settings, rows, summary, traffic_text, visible
from kvevents.sim.results import Comparison, Disagreement, PolicyResult

__all__ = ["Cell", "check_matplotlib", "page", "report_settings", "rows", "summary", "traffic_text"]

_STYLE: Final = Path(__file__).with_name("report.css")
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: the page loads nothing."""
_LONG: Final = frozenset({"cost_source", "trace"})
"""Settings that the page shows on a line of their own."""
_ASSUMED: Final = (
    "The fleet is simulated. Its engines cache, schedule and announce by the rules of vLLM, and their events go through the"
    " wire format of the dialect below. The cost model gives the duration of a step; no GPU is used."
)


def page(comparison: Comparison) -> str:
    """Return the file. Equal comparisons give equal files. Raises `MissingDependencyError` without matplotlib."""
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        "<title>Routing policies compared - kvevents</title>",
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>",
        "</head>",
        "<body>",
        *_head(comparison),
        "<main>",
        *_table(comparison),
        '<div class="figures">',
        *(line for drawing in DRAWINGS for line in _figure(drawing, comparison)),
        "</div>",
        *_audit(comparison),
        *_settings(comparison),
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _text(value: object) -> str:
    """Return `value` as escaped text, with unprintable characters made visible."""
    return escape(visible(str(value)))


def _head(comparison: Comparison) -> Iterator[str]:
    yield "<header>"
    yield "<h1>Routing policies compared</h1>"
    yield f'<p class="summary">{_join_numbers_to_units(_text(_sentence(summary(comparison))))}</p>'
    yield f'<p class="soft">{_text(traffic_text(comparison.settings))}</p>'
    yield "</header>"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _join_numbers_to_units(text: str) -> str:
    """Keep a number and its unit on one line."""
    return re.sub(r"(\d) (m?s)\b", r"\1&nbsp;\2", text)


def _table(comparison: Comparison) -> Iterator[str]:
    yield "<section>"
    yield '<div class="wide" role="region" aria-label="Figures of each policy" tabindex="0">'
    yield "<table>"
    yield '<caption class="unseen">Figures of each policy; times to the first token (TTFT) in seconds</caption>'
    titles = "".join(f'<th scope="col">{_text(title)}</th>' for title in ("policy", *(column.title for column in COLUMNS)))
    yield f"<thead><tr>{titles}</tr></thead>"
    yield "<tbody>"
    for result, line in zip(comparison.policies, cells(comparison), strict=True):
        yield f'<tr><th scope="row">{_text(result.policy)}</th>{"".join(map(_cell, line))}</tr>'
    yield "</tbody>"
    yield "</table>"
    yield "</div>"
    yield '<p class="soft">TTFT is the time to the first token, in seconds. The best of a column is marked with *.</p>'
    yield "</section>"


def _cell(cell: Cell) -> str:
    if not cell.best:
        return f"<td>{_text(cell.text)}</td>"
    return f'<td class="best">{_text(cell.text)}<span aria-hidden="true">*</span><span class="unseen"> best</span></td>'


def _figure(drawing: Drawing, comparison: Comparison) -> Iterator[str]:
    yield f'<figure aria-labelledby="{drawing.name}-title">'
    yield f'<figcaption><h2 id="{drawing.name}-title">{_text(drawing.title)}</h2><p>{_text(drawing.about)}</p></figcaption>'
    yield drawing.svg(comparison)
    yield "</figure>"


def _audit(comparison: Comparison) -> Iterator[str]:
    wrong = any(result.disagreements for result in comparison.policies)
    yield f"<section{' class=bad' if wrong else ''}>"
    yield "<h2>Comparison of index and engines</h2>"
    yield "<p>Each lookup of a prompt in an engine's cache was compared with an index built from the events up to it.</p>"
    for result in comparison.policies:
        yield f"<p>{_text(_audit_text(result))}</p>"
        for one in result.examples:
            yield f"<p>{_text(_example(one))}</p>"
    yield "</section>"


def _audit_text(result: PolicyResult) -> str:
    text = (
        f"{result.policy}: {result.checked:,} compared, {result.disagreements:,} differed,"
        f" {result.unproven:,} could not be compared"
    )
    if result.predicted_tokens:
        text += (
            f"; {result.predicted_tokens:,} cached tokens were predicted when requests were routed,"
            f" and {result.overpredictions:,} requests found fewer than predicted"
        )
    return f"{text}; {result.batches:,} batches with {result.events:,} events."


def _example(one: Disagreement) -> str:
    return (
        f"{one.source}/{one.rank}, incarnation {one.incarnation}, batch {one.seq}, event {one.position}:"
        f" of {one.prompt:,} tokens the engine found {one.cached:,}, the index {one.indexed:,}."
    )


def _settings(comparison: Comparison) -> Iterator[str]:
    yield "<section>"
    yield "<h2>Settings</h2>"
    yield f"<p>{_text(_ASSUMED)}</p>"
    yield "<dl>"
    given = {name: value for name, value in comparison.settings.items() if value is not None}
    for name, value in sorted(given.items(), key=lambda item: item[0] in _LONG):
        long = ' class="long"' if name in _LONG else ""
        yield f"<div{long}><dt>{_text(name.replace('_', ' '))}</dt><dd>{_text(value)}</dd></div>"
    yield "</dl>"
    yield f'<p class="soft">kvevents {_text(version())}</p>'
    yield "</section>"
