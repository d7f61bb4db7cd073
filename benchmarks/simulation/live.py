"""A live fleet on this machine: `python -m benchmarks.simulation.live run WHO ENGINES RATE SECONDS`."""

from __future__ import annotations

import sys
import time
from itertools import takewhile
from typing import Final

from benchmarks.processes import send_line
from kvevents.sim.live import LiveFleet
from kvevents.sim.settings import FleetSettings
from kvevents.sim.workloads import workload

WARM_UP: Final = 8.0
"""Seconds until every engine has answers to give; an answer takes about so long."""
ENOUGH: Final = 20.0
"""Batches a second that each engine should send."""


class _Look:
    """What a fleet had done when it was warm, and at its end."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.first: tuple[float, float, dict[tuple[str, int], int]] | None = None

    def __call__(self, live: LiveFleet) -> None:
        if self.first is None and time.monotonic() - self.began >= WARM_UP:
            self.first = _now(live)


def _now(live: LiveFleet) -> tuple[float, float, dict[tuple[str, int], int]]:
    return time.monotonic(), time.process_time(), {view.worker: view.batches for view in live.views()}


def run(engines: int, rate: int, seconds: int) -> dict[str, float]:
    """Batches a second of each engine, what a subscriber lost of them, and what it took: one process has all of it."""
    asked = workload("chat", rate=float(rate), requests=10**9)
    with LiveFleet(FleetSettings(engines=engines), "least-loaded") as live:  # all engines have about as much to send
        look, end = _Look(), WARM_UP + seconds
        last: list[tuple[float, float, dict[tuple[str, int], int]]] = []
        live.after(end, lambda: last.append(_now(live)))
        result = live.run(takewhile(lambda request: request.at < end, asked), look=look)
        assert look.first is not None
        streams = live.streams()
    (began, cpu, before), (ended, spent, after) = look.first, last[0]
    rates = [(after[worker] - before[worker]) / (ended - began) for worker in before]
    return {
        "slow": sum(rate < ENOUGH for rate in rates),
        "least": min(rates),
        "mean": sum(rates) / len(rates),
        "cpu": (spent - cpu) / (ended - began) * 100,
        "behind": live.behind * 1e3,
        "lost": sum(stream.lost for stream in streams),
        "replayed": sum(stream.replayed for stream in streams),
        "inexact": sum(not stream.trust.startswith("EXACT") for stream in streams),
        "disagreements": result.disagreements,
        "checked": result.checked,
        "unproven": result.unproven,
    }


if __name__ == "__main__":
    send_line(run(*map(int, sys.argv[3:])))
