"""What is measured of the simulator, and what each figure has to reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.trials import Figure, Trial

_OURS: Final = ("ours",)

TRIALS: Final = (
    Trial("simulation-trace", "simulation.whole", "run", (0,), (1_000,), _OURS, (3, 1)),
    Trial("simulation-live", "simulation.live", "run", (64, 130, 20), (64, 130, 5), _OURS, (3, 1)),
)


def _whole() -> Iterator[Figure]:
    trial = "simulation-trace"
    yield Figure("conversation trace, 8 engines, one policy: time", trial, "seconds", "s", 60.0, "below")
    yield Figure("CPU time of that", trial, "cpu", "s", None)
    yield Figure("memory for that, at most", trial, "peak", "MB", None)
    yield Figure("requests", trial, "requests", "", None)
    yield Figure("prompt tokens", trial, "tokens", "", None)
    yield Figure("lookups compared with the index", trial, "checked", "", None)
    yield Figure("of those, index and engine disagree", trial, "disagreements", "", 0.0, "none")
    yield Figure("lookups that could not be compared", trial, "unproven", "", 0.0, "none")


def _live() -> Iterator[Figure]:
    trial = "simulation-live"
    yield Figure("live fleet of 64: engines that sent less than 20 batches/s", trial, "slow", "", 0.0, "none")
    yield Figure("batches/s of the slowest engine", trial, "least", "/s", None)
    yield Figure("batches/s of an engine, mean", trial, "mean", "/s", None)
    yield Figure("batches lost", trial, "lost", "", 0.0, "none")
    yield Figure("streams that are not EXACT at the end", trial, "inexact", "", 0.0, "none")
    yield Figure("batches that only replay brought", trial, "replayed", "", 0.0, "none")
    yield Figure("CPU, engines to index", trial, "cpu", "%", None)
    yield Figure("the fleet was late by, at most", trial, "behind", "ms", None)
    yield Figure("lookups compared with the index", trial, "checked", "", None)
    yield Figure("of those, index and engine disagree", trial, "disagreements", "", 0.0, "none")


FIGURES: Final = (*_whole(), *_live())
