"""`python -m benchmarks.simulation.many_routers`: what several routers gain by the load that engines report.

Each router knows the requests that it sent itself, and with `engine_load` the newest reading of each engine, which is a second
old at most. Requests go to routers by their number. Times are virtual, and relative to the same routers without readings.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from benchmarks.simulation.cases import Generated, Traced, run_all, to_stderr
from benchmarks.simulation.engine_load import BLOCK, TRAFFIC, waiting_tokens
from kvevents.index import PrefixIndex
from kvevents.routing import Decision, Router, Worker, policy
from kvevents.routing.engine_load import EngineLoad
from kvevents.sim.audit import Audit
from kvevents.sim.results import PolicyResult
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_engine import SimulatedEngine
from kvevents.sim.simulated_fleet import DelayedDelivery, SimulatedFleet, Timeline

POLL_SECONDS: Final = 1.0
ROUTERS: Final = (1, 4, 16)


class ManyRouters(Router):
    """Has the interface of one router, and gives each request to one of several."""

    def __init__(self, routers: list[Router]) -> None:
        super().__init__(policy("random"))
        self._routers = routers

    def add(self, worker: Worker) -> None:
        super().add(worker)
        for router in self._routers:
            router.add(worker)

    def remove(self, worker: Worker) -> None:
        super().remove(worker)
        for router in self._routers:
            router.remove(worker)

    def route(self, key: Hashable, tokens: Any, **options: Any) -> Decision:
        return self._of(key).route(key, tokens, **options)

    def record_first_token(self, key: Hashable) -> None:
        self._of(key).record_first_token(key)

    def finish(self, key: Hashable) -> None:
        self._of(key).finish(key)

    def _of(self, key: Hashable) -> Router:
        # The hash of a number is the number, and the same in each process.
        return self._routers[(hash(key) * 2_654_435_761 >> 16) % len(self._routers)]


@dataclass
class Readings:
    """The newest reading of each engine of a fleet."""

    timeline: Timeline
    has_tokens: bool
    """Whether engines report how many tokens wait, as SGLang."""
    fleet: SimulatedFleet | None = None
    at: float = -math.inf
    loads: dict[Worker, EngineLoad] = field(default_factory=dict)

    def load(self, worker: Worker) -> EngineLoad:
        if self.timeline.now - self.at >= POLL_SECONDS:
            assert self.fleet is not None
            self.loads = {name: self._read(each.engine) for name, each in self.fleet.workers.items()}
            self.at = self.timeline.now
        return self.loads[worker]

    def _read(self, engine: SimulatedEngine) -> EngineLoad:
        tokens = waiting_tokens(engine) if self.has_tokens else None
        return EngineLoad(engine.running, engine.waiting, 0, 0, waiting_uncached_tokens=tokens)


@dataclass(frozen=True)
class Case:
    """One run."""

    asked: Generated | Traced
    preset: str
    routers: int
    reported: Literal["nothing", "requests", "tokens"]

    def __str__(self) -> str:
        return f"{self.asked}, {self.routers} routers, engines report {self.reported}"

    def run(self) -> PolicyResult:
        settings = FleetSettings(block_size=BLOCK, preset=self.preset)
        timeline = Timeline()
        index = PrefixIndex(clock=lambda: timeline.now)
        audit = Audit(index)
        readings = Readings(timeline, self.reported == "tokens")
        engine_load = None if self.reported == "nothing" else readings.load
        routers = [Router(policy("prefix-aware", seed), index, engine_load=engine_load) for seed in range(self.routers)]
        sink = DelayedDelivery(timeline, settings.event_delay, settings.wire, audit.apply)
        fleet = readings.fleet = SimulatedFleet(settings, ManyRouters(routers), audit, sink, timeline)
        fleet.feed(self.asked.requests(settings.seed))
        while timeline.next is not None:
            timeline.step()
        return fleet.result("prefix-aware")


def main() -> None:
    cases = [
        Case(*traffic, routers, reported)
        for traffic in TRAFFIC
        for routers in ROUTERS
        for reported in ("nothing", "requests", "tokens")
    ]
    results = run_all(cases, to_stderr)
    out = sys.stdout.write
    out("| routers | engines report | TTFT mean | p50 | p90 | p99 | worst p90 |\n| --- | --- | --- | --- | --- | --- | --- |\n")
    for routers in ROUTERS:
        for reported in ("requests", "tokens"):
            ratios: dict[str, list[float]] = {"mean": [], "p50": [], "p90": [], "p99": []}
            worst = (0.0, "")
            for traffic in TRAFFIC:
                base = results[Case(*traffic, routers, "nothing")]
                found = results[Case(*traffic, routers, reported)]
                for name, values in ratios.items():
                    values.append(getattr(found.ttft, name) / getattr(base.ttft, name))
                worst = max(worst, (ratios["p90"][-1], str(traffic[0])))
            means = [math.exp(sum(map(math.log, values)) / len(values)) for values in ratios.values()]
            cells = " | ".join(f"{mean:.2f}" for mean in means)
            out(f"| {routers} | {reported} | {cells} | {worst[0]:.2f}, {worst[1]} |\n")


if __name__ == "__main__":
    main()
