"""llm-d's published benchmark: stages with rising rates; a stage begins when the previous stage is answered completely.

Stages, prompts and cache sizes are those of the report behind "KV-Cache Wins You Can See": `benchmarking/73-capacity` of
github.com/llm-d/llm-d-kv-cache. inference-perf, the program of that benchmark, waits for all answers of a stage before the next
stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Final, NamedTuple

from kvevents.index import PrefixIndex
from kvevents.sim.audit import Audit
from kvevents.sim.requests import Request
from kvevents.sim.routers import make_routers
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_fleet import DelayedDelivery, SimulatedFleet, Timeline
from kvevents.sim.workloads import LlmD, arrivals

POD_TOKENS: Final = 307_328
"""Size in tokens of the cache of each pod in the report."""
STAGES: Final[tuple[tuple[float, int], ...]] = (
    (15, 50),
    (3, 20),
    (10, 20),
    (15, 20),
    (20, 38),
    (22, 34),
    (25, 30),
    (30, 25),
    (35, 21),
    (40, 38),
    (43, 36),
    (46, 33),
    (49, 30),
    (52, 29),
    (55, 27),
    (57, 26),
    (60, 25),
)
"""Requests per second and seconds of each stage. The first stage warms up the caches and does not count."""


class Stage(NamedTuple):
    """The result of one stage."""

    rate: float
    seconds: float
    """Seconds from the beginning of the stage to its last answer."""
    output_tokens: int
    ttft: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    checked: int
    """Number of lookups that were compared with the index, in this and all earlier stages."""
    disagreements: int
    unproven: int
    preemptions: int

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds


ROUTERS: Final = ("prefix-aware", "approximate-tree", "prefix-estimated", "session-affinity", "least-loaded", "random")
"""Policies, each with one router."""


def climb(name: str, settings: FleetSettings, stages: Sequence[tuple[float, int]] = STAGES) -> list[Stage]:
    """Run all stages in order. Each stage begins with the caches of the previous stage."""
    timeline = Timeline()
    index = PrefixIndex(clock=lambda: timeline.now)
    audit = Audit(index)
    sink = DelayedDelivery(timeline, settings.event_delay, settings.wire, audit.apply)
    routers = make_routers(settings, name, audit, clock=lambda: timeline.now)
    fleet = SimulatedFleet(settings, routers, audit, sink, timeline)
    texts, random = LlmD().requests(settings.seed), Random(settings.seed)  # noqa: S311 - simulation, not a secret
    return [_stage(fleet, rate, islice(texts, int(rate * seconds)), random) for rate, seconds in stages]


def _stage(fleet: SimulatedFleet, rate: float, texts: Iterator[Request], random: Random) -> Stage:
    tally, timeline = fleet.metrics, fleet.timeline
    began, start_counts = timeline.now, (tally.output_tokens, len(tally.ttft), tally.prompt_tokens, tally.cached_tokens)
    times = arrivals("poisson", rate, random)
    fleet.feed(replace(request, at=began + time) for request, time in zip(texts, times, strict=False))
    while timeline.next is not None:
        timeline.step()
    output, first, prompt, cached_tokens = start_counts
    counts = fleet.audit.counts
    return Stage(
        rate,
        tally.last - began,
        tally.output_tokens - output,
        tuple(tally.ttft[first:]),
        tally.prompt_tokens - prompt,
        tally.cached_tokens - cached_tokens,
        counts.checked,
        counts.disagreements,
        counts.unproven,
        sum(worker.engine.preemptions for worker in fleet.workers.values()),
    )
