"""`python -m benchmarks.simulation.study`: where prefix-aware routing pays, for docs/guides/routing-study.md.

Everything is in virtual time and seeded, so another machine gets the same figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from benchmarks.simulation import document as writer
from benchmarks.simulation import ladder
from benchmarks.simulation.cases import Case, Climb, Generated, Traced, run_all, to_stderr, trace_path
from kvevents.sim.results import PolicyResult
from kvevents.sim.settings import FleetSettings
from kvevents.sim.workloads import SAMPLE
from tools.released import CHECKOUT

DOCUMENT: Final = CHECKOUT / "docs" / "guides" / "routing-study.md"
SATURATED: Final = 10.0
"""Seconds of TTFT p90 from which on a fleet is called saturated."""
SPEEDS: Final = (0.6, 0.8, 1.0, 1.2, 1.4)
BLOCK: Final = 128
"""Tokens of a block: a quarter of one of the trace's pieces, so hits are those of smaller blocks, and runs are short."""
POLICIES: Final = ("random", "round-robin", "least-loaded", "session-affinity", "prefix-aware")
COMPARED: Final = ("round-robin", "least-loaded", "prefix-aware")
"""Beside each other where load or caches change: neither load nor cache, load, both."""
OTHERS: Final = (
    ("chat", 60.0, "qwen3-32b-2xh100"),
    ("chat", 150.0, "llama-3.1-8b-h100"),
    ("agents", 10.0, "qwen3-32b-2xh100"),
    ("agents", 20.0, "qwen3-32b-2xh100"),
    ("agents", 60.0, "llama-3.1-8b-h100"),
    ("shared-prompts", 60.0, "qwen3-32b-2xh100"),
    ("shared-prompts", 150.0, "llama-3.1-8b-h100"),
)
"""Workload, requests a second, preset."""
MINUTES: Final = 7
"""That the whole study takes, about."""
QUICK: Final = 1_000
"""Requests of each run of `--quick`."""


@dataclass(frozen=True)
class Plan:
    """All cases of the study, but those at the speed that is only known when some have run."""

    quick: bool

    @property
    def limit(self) -> int | None:
        """Requests of the trace."""
        return QUICK if self.quick else None

    def rising(self) -> list[tuple[float, list[Case]]]:
        """By speed of the trace, `COMPARED`."""
        return [(speed, self.compared(speed)) for speed in SPEEDS]

    def compared(self, speed: float, **fleet: Any) -> list[Case]:
        """The trace at a speed under each of `COMPARED`."""
        return [self.traced(name, speed, **fleet) for name in COMPARED]

    def traced(self, name: str, speed: float, **fleet: Any) -> Case:
        """The trace at a speed."""
        return Case(name, Traced(speed, self.limit), FleetSettings(**{"block_size": BLOCK, **fleet}))

    def policies(self, speed: float) -> Iterator[tuple[str, Case]]:
        """All policies at one speed."""
        base = self.traced("round-robin", speed)
        yield from ((name, base.under(name)) for name in POLICIES)
        yield "least-loaded, by requests", base.under("least-loaded", by="requests")
        yield "prefix-aware, wait_weight 1 alone", base.under("prefix-aware", wait_weight=1.0, load_weight=0.0)
        yield "prefix-aware, load_weight 0.1 alone", base.under("prefix-aware", wait_weight=0.0, load_weight=0.1)
        yield "prefix-aware, overlay 2 s", replace(base.under("prefix-aware"), fleet=_with(base.fleet, overlay=2.0))

    def caches(self, speed: float) -> Iterator[tuple[str, list[Case]]]:
        """Sizes of caches at one speed, `COMPARED`."""
        blocks = FleetSettings(block_size=BLOCK).size.blocks
        sizes = {
            "a quarter of the GPU's": {"blocks": blocks // 4},
            "the preset's": {},
            "4 times the GPU's": {"blocks": 4 * blocks},
            "the preset's, and 4 times as much on the host": {"host_blocks": 4 * blocks},
            "the preset's, and 16 times as much on the host": {"host_blocks": 16 * blocks},
        }
        for name, size in sizes.items():
            yield name, self.compared(speed, **size)

    def small_blocks(self, speed: float) -> list[Case]:
        """The same with an engine's own block size."""
        return [self.traced(name, speed, block_size=16) for name in ("round-robin", "prefix-aware")]

    def others(self) -> Iterator[tuple[Generated, list[Case]]]:
        """Other traffic, under each policy."""
        for name, rate, preset in OTHERS:
            asked = Generated(name, rate, QUICK if self.quick else 3 * QUICK)
            fleet = FleetSettings(block_size=BLOCK, preset=preset)
            yield asked, [Case(policy, asked, fleet) for policy in POLICIES]

    def without_trace(self) -> list[Case | Climb]:
        """The runs of the page."""
        return [*self.climbs(), *(case for _, cases in self.others() for case in cases)]

    def climbs(self) -> list[Climb]:
        """llm-d's ladder: its cache size, its block size."""
        fleet = FleetSettings(block_size=64, blocks=ladder.POD_TOKENS // 64)
        stages = ladder.STAGES[:4] if self.quick else ladder.STAGES
        return [Climb(router, fleet, stages) for router in ladder.ROUTERS]


def _with(fleet: FleetSettings, **settings: Any) -> FleetSettings:
    return msgspec.structs.replace(fleet, **settings)


def main() -> int:
    """Returns 0 when no lookup of an engine differed from the index."""
    options = _options()
    began, plan = time.monotonic(), Plan(options.quick)
    found: dict[Any, Any] = run_all(plan.without_trace(), to_stderr)
    page = writer.document(plan, found, minutes=MINUTES)
    print(page)
    if trace_path() == SAMPLE:
        to_stderr("KVEVENTS_MOONCAKE_TRACE names no trace: nothing is run with one")
    else:
        found |= _run_trace(plan)
    to_stderr(f"{len(found)} runs in {time.monotonic() - began:.0f} s")
    if options.write:
        if options.quick:
            sys.exit("only the whole study is written")
        DOCUMENT.write_text(page, encoding="utf-8")
    return int(writer.counted(found).disagreements > 0)


def _run_trace(plan: Plan) -> dict[Any, Any]:
    """Run what needs the conversation trace, and print it."""
    rising = plan.rising()
    found: dict[Any, Any] = run_all([case for _, each in rising for case in each], to_stderr)
    speed = _saturating([(speed, found[each[0]]) for speed, each in rising])
    more = [case for _, case in plan.policies(speed)] + [case for _, each in plan.caches(speed) for case in each]
    found |= run_all([case for case in [*more, *plan.small_blocks(speed)] if case not in found], to_stderr)
    print(writer.of_trace(plan, speed, found, saturated=SATURATED))
    return found


def _saturating(found: list[tuple[float, PolicyResult]]) -> float:
    """The first speed at which a fleet is saturated; the highest where none is."""
    for speed, result in found:
        if result.ttft is not None and result.ttft.p90 > SATURATED:
            return speed
    return found[-1][0]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.study", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} requests of each: whether it works")
    parser.add_argument("--write", action="store_true", help="write docs/guides/routing-study.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
