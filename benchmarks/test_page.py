"""Figures of speed in documents are those of the generated page, whose results are committed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.page import PAGE, RESULTS, page
from tools.released import CHECKOUT

SPEED: Final = re.compile(
    r"\d[\d.,]*(?: [kM])? ?(?:ns|us|µs|microseconds?|nanoseconds?|[kMG]?B/s|[kM]/s|(?:batches|blocks|requests|messages)/s)\b"
    r"|\d[\d.,]* times (?:as|faster|less|more)|\d[\d.,]*x (?:as|faster|less|more)"
)
GENERATED: Final = {
    "docs/figures.md": "the page itself",
    "docs/operations/sizing.md": "costs of a plane; tests/unit/test_sizing_document.py compares its bytes",
    "docs/guides/routing-study.md": "python -m benchmarks.study writes it; its times are simulated",
    "docs/guides/workloads.md": "rates are properties of the workloads",
    "docs/guides/simulation.md": "times are simulated",
    "docs/reference/cli.md": "rates are those of the printed examples",
}
"""Documents with figures of other commands."""
DOCUMENTS: Final = sorted(
    path
    for path in [*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md")]
    if path.parent.name != "adr" and path.name != "CHANGELOG.md"
)


def test_the_page_shows_the_committed_results() -> None:
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text()))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_a_document_has_no_figure_of_speed_that_is_not_on_the_page(path: Path) -> None:
    """Decision records keep the figures of their alternatives, with commit and machine."""
    if str(path.relative_to(CHECKOUT)) in GENERATED:
        return
    page_text = PAGE.read_text()
    assert [match[0] for match in SPEED.finditer(path.read_text()) if match[0] not in page_text] == []


def row(what: str, ours: float, theirs: float, unit: str) -> dict[str, Any]:
    values = {"ours": [ours], "theirs": [theirs], "ratio": ours / theirs, "unit": unit, "rival": "rival"}
    return values | {"what": what, "trial": "publish-busy", "context": False}


def test_losses_are_counted_and_named() -> None:
    """A higher rate and a shorter time are better. Figures that differ by less than 5 % count as equal."""
    rows = [row("fast", 1, 2, "us"), row("slow", 3, 2, "us"), row("same", 2.02, 2, "us"), row("rate", 1, 2, "/s")]
    results = {"date": "", "commit": "", "machine": "", "rust": "", "runs": 1, "rows": rows, "native": [[]]}
    text = page(results)
    assert "Of 4 comparisons kvevents is better in 1, within 5% in 1, and worse in 2." in text
    losses = text.partition("worse in 2.")[2].partition("## Publishers")[0]
    assert re.findall(r"- (\w+):", losses) == ["slow", "rate"]
