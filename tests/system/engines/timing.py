"""Measures durations of `publish()` and of engine steps inside an engine core, by publisher.

Each publisher gets the same requests in engines of its own, which start in turn. Other load of the machine changes the figures
from run to run. CPU times of the thread of the scheduler change less than durations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from statistics import quantiles
from typing import Final

import msgspec

from tests.system.engines.observer.page import Observation
from tests.system.engines.server import BLOCK_SIZE
from tests.system.engines.stage import COMPAT, OWN, PLUGIN, Publisher, Stage
from tests.system.engines.traffic import Habits, Traffic

REQUESTS: Final = 150
WARM_UP: Final = 30
"""Requests whose calls and steps do not count."""
BLOCKS: Final = 48


class Durations(msgspec.Struct):
    """Percentiles of durations and of CPU times, in microseconds."""

    samples: int
    p50: float
    p99: float
    cpu_p50: float
    cpu_p99: float


class TimingResult(msgspec.Struct):
    """Result of one publisher in one engine."""

    publisher: str
    round: int
    publish: Durations
    step: Durations
    load_average: float


def measure(stage: Stage, rounds: int, *, has_plugin: bool) -> Iterator[TimingResult]:
    """Measure all publishers in turn, `rounds` times."""
    publishers = [OWN, COMPAT, PLUGIN] if has_plugin else [OWN, COMPAT]
    for number in range(rounds):
        for publisher in publishers:
            yield _measure_one(stage, publisher, number)


def _measure_one(stage: Stage, publisher: Publisher, number: int) -> TimingResult:
    print(f"timing of {publisher.name}, round {number}", flush=True)
    traffic = Traffic("timing", Habits(), BLOCK_SIZE)
    with stage.pair(publisher, "llama", BLOCKS) as (engine, service):
        observation = engine.observation
        assert observation is not None
        skipped = {"publish_ns": 0, "step_ns": 0}
        for request in range(WARM_UP + REQUESTS):
            if request == WARM_UP:
                service.settle(observation)
                skipped = {series: len(observation.samples(series)) for series in skipped}
            prompt = traffic.next()
            traffic.answered(prompt, engine.complete(prompt).tokens)
        service.settle(observation)
        load = os.getloadavg()[0]
        publish = _durations(observation, "publish", skipped["publish_ns"])
        return TimingResult(publisher.name, number, publish, _durations(observation, "step", skipped["step_ns"]), load)


def _durations(observation: Observation, name: str, skip: int) -> Durations:
    wall, cpu = observation.samples(f"{name}_ns", skip), observation.samples(f"{name}_cpu_ns", skip)
    if len(wall) < 2:
        return Durations(len(wall), 0.0, 0.0, 0.0, 0.0)
    wall_cuts, cpu_cuts = quantiles(wall, n=100), quantiles(cpu, n=100)
    return Durations(
        len(wall), *(round(value / 1e3, 2) for value in (wall_cuts[49], wall_cuts[98], cpu_cuts[49], cpu_cuts[98]))
    )
