"""`python -m benchmarks.simulation.engine_load`: what `/v1/select` gains or loses by the load that engines report.

Each run is a fleet in virtual time whose requests are sent where a selection of the service would send them: by the shares of
the prompt that workers would compute, plus `load_weight` times the load over the mean. The service sends no requests itself, so
it knows a load only from readings of the engines, which are `seconds` old at most. The variants differ in the unit of the
readings and in whether selections since a reading count.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from benchmarks.simulation.cases import Generated, Traced, run_all, to_stderr
from kvevents.index import PrefixIndex
from kvevents.routing import TIER_WEIGHTS, TRUST_WEIGHTS, Router, Ties
from kvevents.routing.policies import DECODING_WEIGHT, break_tie
from kvevents.routing.policy_types import Candidate, Choice, Prompt
from kvevents.sim.audit import Audit
from kvevents.sim.results import PolicyResult
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_engine import SimulatedEngine
from kvevents.sim.simulated_fleet import DelayedDelivery, SimulatedFleet, Timeline
from kvevents_native._native import Scorer

LOAD_WEIGHT: Final = 0.1
"""Default of `/v1/select`."""
BASE_REQUESTS: Final = 4.0
"""`BASE_REQUESTS` of `native/server/src/select.rs`."""
BLOCK: Final = 128


def _requests(engine: SimulatedEngine) -> float:
    return engine.running + engine.waiting


def waiting_tokens(engine: SimulatedEngine) -> int:
    """Return SGLang's `waiting_uncached_tokens`."""
    waiting = 0
    for job in engine._waiting:  # noqa: SLF001 - what an engine reports of itself
        sequence = job.sequence or engine._sequence(job.request)  # noqa: SLF001 - as above
        waiting += sequence.known - engine.cache.find(sequence).tokens
    return waiting


def _tokens(engine: SimulatedEngine) -> float:
    """The tokens that wait, and for each running request what `DECODING_WEIGHT` says."""
    return waiting_tokens(engine) + DECODING_WEIGHT * engine.running


MEASURES: Final[dict[str, Callable[[SimulatedEngine], float]]] = {"requests": _requests, "tokens": _tokens}


@dataclass(frozen=True)
class Variant:
    """How a selection knows loads."""

    measure: str = ""
    """A name of `MEASURES`; empty for no load."""
    seconds: float = 1.0
    """Between two readings."""
    counts_selections: bool = False
    """Whether selections since the newest reading count as requests."""
    selectors: int = 1
    """Services that select, each of which knows its own selections."""
    base: float = BASE_REQUESTS
    """Requests that are added to the load of each worker."""

    def __str__(self) -> str:
        if not self.measure:
            return "no load"
        more = ", and selections since" if self.counts_selections else ""
        many = f", {self.selectors} services" if self.selectors > 1 else ""
        base = "" if self.base == BASE_REQUESTS else f", {self.base:g} added"
        return f"{self.measure} every {self.seconds:g} s{more}{many}{base}"


class Selector:
    """Selects as `/v1/select` does with these readings."""

    name = "select"
    uses_index = True

    def __init__(self, variant: Variant, timeline: Timeline, seed: int) -> None:
        self.fleet: SimulatedFleet | None = None
        self._variant = variant
        self._timeline = timeline
        self._ties = Ties(Random(seed))  # noqa: S311 - spreads load, keeps no secret
        self._random = Random(seed)  # noqa: S311 - as above
        self._scorer = Scorer(dict(TIER_WEIGHTS), 0.0, LOAD_WEIGHT, math.inf, 0, TRUST_WEIGHTS["DEGRADED"])
        self._read_at = -math.inf
        self._readings: dict[Any, float] = {}
        self._selections: dict[tuple[int, Any], int] = {}

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:
        selector = self._random.randrange(self._variant.selectors)
        loads = [self._load(selector, one.worker) for one in candidates]
        _, best = self._scorer.weigh(
            prompt.length,
            [one.tokens for one in candidates],
            [one.tokens - one.uncertain for one in candidates],
            [one.tiers for one in candidates],
            [1.0] * len(candidates),
            loads,
            [0] * len(candidates),
        )
        chosen = break_tie(self._ties, [candidates[place] for place in best])
        key = selector, chosen.worker
        self._selections[key] = self._selections.get(key, 0) + 1
        return Choice(chosen, "")

    def _load(self, selector: int, worker: Any) -> float:
        if not self._variant.measure:
            return 0.0
        now = self._timeline.now
        if now - self._read_at >= self._variant.seconds:
            assert self.fleet is not None
            measure = MEASURES[self._variant.measure]
            self._readings = {name: measure(each.engine) for name, each in self.fleet.workers.items()}
            self._selections.clear()
            self._read_at = now
        since = self._selections.get((selector, worker), 0) if self._variant.counts_selections else 0
        unit = DECODING_WEIGHT if self._variant.measure == "tokens" else 1.0
        return self._readings[worker] + unit * (since + self._variant.base)


@dataclass(frozen=True)
class Case:
    """One run."""

    variant: Variant
    asked: Generated | Traced
    preset: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.asked}, {self.preset}: {self.variant}"

    def run(self) -> PolicyResult:
        settings = FleetSettings(block_size=BLOCK, preset=self.preset, seed=self.seed)
        timeline = Timeline()
        index = PrefixIndex(clock=lambda: timeline.now)
        audit = Audit(index)
        selector = Selector(self.variant, timeline, self.seed)
        sink = DelayedDelivery(timeline, settings.event_delay, settings.wire, audit.apply)
        fleet = selector.fleet = SimulatedFleet(settings, Router(selector, index), audit, sink, timeline)
        fleet.feed(self.asked.requests(self.seed))
        while timeline.next is not None:
            timeline.step()
        return fleet.result("select")


TRAFFIC: Final[tuple[tuple[Generated | Traced, str], ...]] = (
    (Traced(8.0), "qwen3-32b-2xh100"),
    (Generated("chat", 60.0, 4_000), "qwen3-32b-2xh100"),
    (Generated("agents", 1.0, 600), "qwen3-32b-2xh100"),
    (Generated("agents", 10.0, 3_000), "qwen3-32b-2xh100"),
    (Generated("agents", 20.0, 3_000), "qwen3-32b-2xh100"),
    (Generated("shared-prompts", 60.0, 4_000), "qwen3-32b-2xh100"),
    (Generated("shared-prompts", 150.0, 6_000), "llama-3.1-8b-h100"),
)
VARIANTS: Final = (
    Variant(),
    Variant("requests", counts_selections=True, base=0.0),
    Variant("requests", counts_selections=True, base=1.0),
    Variant("requests", counts_selections=True, base=2.0),
    Variant("requests", counts_selections=True),
    Variant("requests", counts_selections=True, base=8.0),
    Variant("requests", 5.0, counts_selections=True),
    Variant("requests", counts_selections=True, selectors=4),
    Variant("requests"),
    Variant("tokens", counts_selections=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    cases = [Case(variant, *traffic, seed) for traffic in TRAFFIC for variant in VARIANTS for seed in range(args.seeds)]
    results = run_all(cases, to_stderr)
    out = sys.stdout.write
    out("Geometric means over seeds and traffic, in relation to no load; TTFT in seconds below.\n\n")
    out("| variant | TTFT mean | p50 | p90 | p99 | hit rate | worst p90 |\n| --- | --- | --- | --- | --- | --- | --- |\n")
    for variant in VARIANTS:
        ratios: dict[str, list[float]] = {"mean": [], "p50": [], "p90": [], "p99": []}
        rates, worst = [], (0.0, "")
        for traffic in TRAFFIC:
            for seed in range(args.seeds):
                found, base = results[Case(variant, *traffic, seed)], results[Case(VARIANTS[0], *traffic, seed)]
                for name, values in ratios.items():
                    values.append(getattr(found.ttft, name) / getattr(base.ttft, name))
                rates.append(found.hit_rate)
                worst = max(worst, (ratios["p90"][-1], f"{traffic[0]}"))
        means = [math.exp(sum(map(math.log, values)) / len(values)) for values in ratios.values()]
        cells = " | ".join(f"{mean:.2f}" for mean in means)
        out(f"| {variant} | {cells} | {sum(rates) / len(rates):.1%} | {worst[0]:.2f}, {worst[1]} |\n")
    out("\n| traffic | " + " | ".join(map(str, VARIANTS)) + " |\n|" + " --- |" * (len(VARIANTS) + 1) + "\n")
    for traffic in TRAFFIC:
        row = [results[Case(variant, *traffic, 0)] for variant in VARIANTS]
        cells = " | ".join(f"{each.ttft.p90:.3f}, {each.hit_rate:.1%}" for each in row)
        out(f"| {traffic[0]}, {traffic[1]} | {cells} |\n")


if __name__ == "__main__":
    main()
