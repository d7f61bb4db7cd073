"""Draws a comparison of policies with matplotlib. The picture shows figures that `report_text` reports as text."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

from kvevents.errors import ConfigError, MissingDependencyError
from kvevents.sim.report_text import p90_of, runs_by_policy, summary, traffic_text
from kvevents.sim.results import Comparison
from kvevents.sim.routers import POLICIES, needs_events

PICTURE_SUFFIXES: Final = (".svg", ".png", ".pdf")


def check_picture(path: Path) -> None:
    """Raise `MissingDependencyError` if matplotlib is missing, `ConfigError` if the suffix is unknown."""
    try:
        import matplotlib as mpl  # noqa: F401, PLC0415 - matplotlib is optional
    except ImportError as error:
        raise MissingDependencyError("the picture of a comparison needs the package matplotlib", "sim") from error
    if path.suffix not in PICTURE_SUFFIXES:
        raise ConfigError(f"cannot write {path}: expected a name that ends in {', '.join(PICTURE_SUFFIXES)}")


def write_picture(path: Path, comparison: Comparison) -> None:
    """Draw TTFT p90 and hit rate. A policy has a row with a dot for each seed. Orange dots show policies that need events.

    Equal comparisons produce identical SVG files. Raises `ConfigError` if the file cannot be written.
    """
    from matplotlib import style  # noqa: PLC0415 - matplotlib is optional
    from matplotlib.figure import Figure  # noqa: PLC0415 - matplotlib is optional

    runs = runs_by_policy([result for result in comparison.policies if result.ttft])
    with style.context(["default", {"svg.hashsalt": "kvevents"}]):
        figure = Figure((10, 2 + 0.3 * len(runs)), layout="constrained")
        times, hits = figure.subplots(1, 2, sharey=True)
        for row, (policy, results) in enumerate(runs.items()):
            color = "C1" if policy in POLICIES and needs_events(policy) else "C0"
            times.plot([p90_of(result) for result in results], [row] * len(results), "o", color=color, alpha=0.6)
            hits.plot([100 * result.hit_rate for result in results], [row] * len(results), "o", color=color, alpha=0.6)
        times.set_xscale("log")
        times.set_xlabel("TTFT p90 in seconds")
        hits.set_xlim(left=0)
        hits.set_xlabel("% of prompt tokens that engines found cached")
        times.set_yticks(range(len(runs)), runs, parse_math=False)
        times.set_ylim(max(len(runs), 1) - 0.5, -0.5)
        title = [*textwrap.wrap(traffic_text(comparison.settings), 140), *textwrap.wrap(summary(comparison), 140)]
        figure.suptitle("\n".join(title), fontsize="small", parse_math=False)
        try:
            metadata = {} if path.suffix == ".png" else {"Date" if path.suffix == ".svg" else "CreationDate": None}
            figure.savefig(path, metadata=metadata)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
