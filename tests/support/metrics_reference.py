"""Metrics in the tables of docs/reference/metrics.md and in the export of a process, in the same form."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import paths

PAGE: Final = paths.ROOT / "docs" / "reference" / "metrics.md"
SOURCE_LABELS: Final = frozenset({"engine", "rank", "model", "tenant", "group"})
"""Labels that the page lists once for all metrics of sources."""


class Metric(NamedTuple):
    """A row of a table. The meaning is the help text of the export, without its full stop."""

    meaning: str
    labels: frozenset[str]


def read_documented(section: str) -> dict[str, Metric]:
    """Return the metrics of a section of the page, by name."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(kvevents_\w+)` \| (.*) \| (.*) \|$", text, re.MULTILINE)
    return {name: Metric(meaning, frozenset(re.findall(r"`(\w+)`", labels))) for name, labels, meaning in rows}


def exported(page: str) -> dict[str, Metric]:
    """Return the metrics of kvevents in an export, with the labels of their samples."""
    families = re.findall(r"^# HELP (kvevents_\w+) (.*)$", page, re.MULTILINE)
    found = {name: Metric(text.rstrip("."), frozenset()) for name, text in families}
    for sample, labels in re.findall(r"^(kvevents_\w+)\{(.*)\} ", page, re.MULTILINE):
        name = sample if sample in found else re.sub(r"_(bucket|count|sum)$", "", sample)
        if name in found:
            names = frozenset(re.findall(r'(\w+)="', labels)) - SOURCE_LABELS
            found[name] = Metric(found[name].meaning, found[name].labels | names)
    return found
