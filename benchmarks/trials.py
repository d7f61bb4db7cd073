"""Trials, which run several times for each contender, and figures, each of which is one value of a trial with a limit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, Literal

from benchmarks import processes
from kvevents.conform.indexer import DYNAMO_PACKAGE
from tools.released import SGLANG, VLLM_NEWEST

Results = dict[str, dict[str, list[dict[str, float]]]]
"""Maps each trial and contender to the results of the runs."""

TITLES: Final = {
    "ours": "kvevents",
    "vllm": VLLM_NEWEST.title,
    "sglang": SGLANG.title,
    "bare": "bare pyzmq + msgspec",
    "proxy": "zmq.proxy",
    "nats-py": "nats-py",
    "dynamo": f"Dynamo {DYNAMO_PACKAGE[1]} indexer",
    "": "",
}


@dataclass(frozen=True)
class Trial:
    """A trial: a process that runs several times for each contender, in turn."""

    name: str
    function: str
    """`MODULE.FUNCTION` of `benchmarks`, which receives the contender and these numbers, and returns values by name."""
    full: tuple[int, ...]
    quick: tuple[int, ...]
    contenders: tuple[str, ...] = ("ours", "vllm", "sglang")
    most: tuple[int, int] = (5, 3)
    """Maximum number of runs, and of runs with `--quick`. Further runs would not improve the result."""


@dataclass(frozen=True)
class Figure:
    """A figure: one value of a trial, and its limit, which is relative to each rival or absolute."""

    what: str
    trial: str
    value: str
    unit: str
    reach: float | None
    """None if the figure is printed but not judged."""
    judge: Literal["ratio at most", "ratio at least", "at most", "below", "none"] = "ratio at most"
    """`at most` and `below` are absolute limits of our value; `none` means that the value must be 0 in every run."""
    context: bool = False
    """Whether the figure only describes a trial, and judges neither side."""


@dataclass(frozen=True)
class Row:
    """A figure of kvevents and of one rival."""

    figure: Figure
    rival: str
    ours: list[float]
    theirs: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """Ratio of our median to the rival's median."""
        if self.figure.judge in {"below", "none"} or not self.theirs or not median(self.theirs):
            return None
        return median(self.ours) / median(self.theirs)

    @property
    def met(self) -> bool | None:
        reach, ratio = self.figure.reach, self.ratio
        if reach is None:
            return None
        if self.figure.judge == "none":
            return not any(self.ours)
        if self.figure.judge == "below":
            return median(self.ours) < reach
        if self.figure.judge == "at most":
            return median(self.ours) <= reach
        if ratio is None:
            return None
        return ratio <= reach if self.figure.judge == "ratio at most" else ratio >= reach

    def plain(self) -> dict[str, Any]:
        """Return the figure as an object for `--json`."""
        return {
            "trial": self.figure.trial,
            "what": self.figure.what,
            "context": self.figure.context,
            "unit": self.figure.unit,
            "rival": TITLES[self.rival],
            "ours": self.ours,
            "theirs": self.theirs,
            "ratio": self.ratio,
            "judge": self.figure.judge,
            "reach": self.figure.reach,
            "met": self.met,
        }


def measure(trial: Trial, runs: int, quick: bool) -> dict[str, list[dict[str, float]]]:
    """Run a trial `runs` times for every contender, in turn: A B C, then B C A, so that no contender is always first."""
    values: dict[str, list[dict[str, float]]] = {name: [] for name in trial.contenders}
    numbers = trial.quick if quick else trial.full
    for number in range(min(runs, trial.most[quick])):
        shift = number % len(trial.contenders)
        for name in trial.contenders[shift:] + trial.contenders[:shift]:
            values[name].append(processes.run(trial.function, name, *numbers))
    return values


def rows(figures: Iterable[Figure], results: Results) -> list[Row]:
    """Return the figures of the trials that were run, once for each rival with that figure, or once if no rival has it."""
    result = []
    for figure in figures:
        runs = results.get(figure.trial, {})
        values_of = {name: [run[figure.value] for run in side] for name, side in runs.items() if figure.value in side[0]}
        ours = values_of.pop("ours", None)
        if ours is None:
            result += [Row(figure, rival, values) for rival, values in values_of.items()]
        else:
            result += [Row(figure, rival, ours, values) for rival, values in values_of.items()] or [Row(figure, "", ours)]
    return result
