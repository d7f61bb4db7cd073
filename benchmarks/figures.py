"""What is measured, how often, and what each figure has to reach."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, Literal

from benchmarks import processes
from benchmarks.engines import SGLANG, VLLM

Results = dict[str, dict[str, list[dict[str, float]]]]
"""By trial, then by contender: what each run returned."""

TITLES: Final = {
    "ours": "kvevents",
    "vllm": VLLM.title,
    "sglang": SGLANG.title,
    "bare": "bare pyzmq + msgspec",
}


@dataclass(frozen=True)
class Trial:
    """One process to run for each contender in turn, several times."""

    name: str
    module: str
    kind: str
    full: tuple[int, ...]
    quick: tuple[int, ...]
    contenders: tuple[str, ...] = ("ours", "vllm", "sglang")


@dataclass(frozen=True)
class Figure:
    """One value of a trial and what it must reach: in relation to each rival, or by itself."""

    what: str
    trial: str
    value: str
    unit: str
    reach: float | None
    """None where the figure is told and not judged."""
    judge: Literal["ratio at most", "ratio at least", "below", "none"] = "ratio at most"
    """`none` means no run may have any."""


TRIALS: Final = (
    Trial("publish-busy", "publishing", "busy", (1, 20), (1, 5)),
    Trial("publish-paced", "publishing", "paced", (1, 2_000, 500), (1, 500, 500)),
    Trial("flow-1", "publishing", "flow", (1, 100_000), (1, 20_000)),
    Trial("flow-32", "publishing", "flow", (32, 60_000), (32, 10_000)),
    Trial("replay", "publishing", "replay", (32, 10_000, 500), (32, 10_000, 500)),
    Trial("subscribe-1", "subscribing", "read", (1, 60_000), (1, 20_000), ("ours", "bare")),
    Trial("subscribe-32", "subscribing", "read", (32, 30_000), (32, 10_000), ("ours", "bare")),
    Trial("recover", "subscribing", "recover", (32, 10_000), (32, 10_000), ("vllm", "sglang")),
)

FIGURES: Final = (
    Figure("publish() p50, busy", "publish-busy", "p50", "ns", 1 / 4),
    Figure("publish() p99, busy", "publish-busy", "p99", "ns", 1.0),
    Figure("of both, the clock's own part", "publish-busy", "clock", "ns", None),
    Figure("publish() p50, 500/s", "publish-paced", "p50", "ns", 1 / 2),
    Figure("publish() p99, 500/s", "publish-paced", "p99", "ns", 1.0),
    Figure("CPU per batch at 500/s, 1 block", "publish-paced", "cpu", "us", None),
    Figure("batches/s to one process, 1 block", "flow-1", "rate", "/s", 2.0, "ratio at least"),
    Figure("batches/s to one process, 32 blocks", "flow-32", "rate", "/s", 2.0, "ratio at least"),
    Figure("batches lost on the way, 1 block", "flow-1", "lost", "", 0.0, "none"),
    Figure("batches lost on the way, 32 blocks", "flow-32", "lost", "", 0.0, "none"),
    Figure("publisher CPU per batch, 1 block", "flow-1", "cpu", "us", 1 / 3),
    Figure("publisher CPU per batch, 32 blocks", "flow-32", "cpu", "us", 1 / 2),
    Figure("replay of 10,000, lost by a fast reader", "replay", "lost_fast", "", 0.0, "none"),
    Figure("replay of 10,000, lost by a slow reader", "replay", "lost_slow", "", 0.0, "none"),
    Figure("replay of 10,000, lost by a late reader", "replay", "lost_late", "", 0.0, "none"),
    Figure("longest stall of live events in replay", "replay", "stall", "ms", 5.0, "below"),
    Figure("the same without replay", "replay", "stall_quiet", "ms", None),
    Figure("subscriber CPU per batch, 1 block", "subscribe-1", "cpu", "us", 1.5),
    Figure("subscriber CPU per batch, 32 blocks", "subscribe-32", "cpu", "us", 1.5),
    Figure("subscriber batches/s, 1 block", "subscribe-1", "rate", "/s", None),
    Figure("subscriber batches/s, 32 blocks", "subscribe-32", "rate", "/s", None),
    Figure("recovery of 10,000 from the engine: missing", "recover", "missing", "", 0.0, "none"),
    Figure("recovery of 10,000 from the engine: time", "recover", "seconds", "s", None),
    Figure("recovery of 10,000 from the engine: requests", "recover", "requests", "", None),
)


@dataclass(frozen=True)
class Row:
    """One figure of ours against one rival."""

    figure: Figure
    rival: str
    ours: list[float]
    theirs: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """Ours to theirs, of medians."""
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
        if ratio is None:
            return None
        return ratio <= reach if self.figure.judge == "ratio at most" else ratio >= reach

    def plain(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "what": self.figure.what,
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
    """Run a trial `runs` times for every contender, in turn: A B C, then B C A, so that no one is always first."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trial.contenders}
    numbers = trial.quick if quick else trial.full
    for number in range(runs):
        shift = number % len(trial.contenders)
        for name in trial.contenders[shift:] + trial.contenders[:shift]:
            found[name].append(processes.run(trial.module, trial.kind, name, *numbers))
    return found


def rows(results: Results) -> list[Row]:
    """Every figure of the trials that were run, against each rival."""
    made = []
    for figure in FIGURES:
        found = {name: [run[figure.value] for run in runs] for name, runs in results.get(figure.trial, {}).items()}
        for rival, values in found.items():
            if figure.trial == "recover":
                made.append(Row(figure, rival, values))
            elif rival != "ours":
                made.append(Row(figure, rival, found["ours"], values))
    return made
