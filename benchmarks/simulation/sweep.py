"""`python -m benchmarks.simulation.sweep`: settings of prefix-aware beside each other, on much different traffic.

The defaults of `PrefixAwareSettings` are chosen by it; docs/adr/0008-prefix-aware-score.md has what came out. All traffic is in
the package, and virtual time and seeds make it come out the same anywhere. `--only` for a few settings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, inf, log
from typing import Any, Final

from benchmarks.simulation.cases import Case, Generated, Traced, run_all, to_stderr
from kvevents.routing.prefix_aware import PrefixAwareSettings
from kvevents.sim.results import Distribution, PolicyResult
from kvevents.sim.settings import DEFAULT_PRESET, FleetSettings
from kvevents.sim.workloads import SAMPLE

BLOCK: Final = 128
_WHOLE: Final = FleetSettings(block_size=BLOCK).size.blocks
_LLAMA: Final = "llama-3.1-8b-h100"
_DEFAULTS: Final = PrefixAwareSettings()


def _sample(speed: float, preset: str = DEFAULT_PRESET, **fleet: Any) -> tuple[Traced, FleetSettings]:
    """The packaged trace, so many times as fast as it was recorded; a seed is for ties of the policy alone."""
    return Traced(speed, None, SAMPLE), FleetSettings(block_size=BLOCK, preset=preset, **fleet)


def _made(name: str, rate: float, count: int, preset: str = DEFAULT_PRESET, **fleet: Any) -> tuple[Generated, FleetSettings]:
    return Generated(name, rate, count), FleetSettings(block_size=BLOCK, preset=preset, **fleet)


TRAFFIC: Final[dict[str, tuple[Traced | Generated, FleetSettings]]] = {
    "sample x 0.2": _sample(0.2),
    "sample x 1": _sample(1),
    "sample x 2.5": _sample(2.5),
    "sample x 8": _sample(8),
    "sample x 0.3, 2 engines": _sample(0.3, engines=2),
    "sample x 0.5, 4 engines": _sample(0.5, engines=4),
    "sample x 4, 32 engines": _sample(4, engines=32),
    "sample x 4, llama": _sample(4, _LLAMA),
    "sample x 2.5, quarter of the blocks, host": _sample(2.5, blocks=_WHOLE // 4, host_blocks=2 * _WHOLE),
    "agents 1/s": _made("agents", 1, 700),
    "agents 3/s, 16 engines": _made("agents", 3, 700, engines=16),
    "agents 5/s, 4 engines": _made("agents", 5, 1_000, engines=4),
    "agents 10/s": _made("agents", 10, 1_500),
    "agents 10/s, half the blocks": _made("agents", 10, 1_500, blocks=_WHOLE // 2),
    "agents 20/s": _made("agents", 20, 2_000),
    "agents 40/s, 16 engines": _made("agents", 40, 2_500, engines=16),
    "agents 60/s, llama": _made("agents", 60, 3_000, _LLAMA),
    "llm-d 10/s": _made("llm-d", 10, 1_500),
    "llm-d 15/s": _made("llm-d", 15, 1_500),
    "chat 60/s": _made("chat", 60, 2_000),
    "chat 150/s, llama": _made("chat", 150, 2_500, _LLAMA),
    "shared-prompts 30/s, 4 engines": _made("shared-prompts", 30, 1_000, engines=4),
    "shared-prompts 60/s": _made("shared-prompts", 60, 2_000),
    "shared-prompts 150/s, llama": _made("shared-prompts", 150, 3_000, _LLAMA),
}
"""Workload, rate or speed; 8 engines of the default preset with their own cache unless the name says otherwise."""


def _aware(**settings: Any) -> tuple[str, dict[str, Any]]:
    return "prefix-aware", settings


REFERENCE: Final = "the defaults"
SETTINGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "least-loaded": ("least-loaded", {}),
    "session-affinity": ("session-affinity", {}),
    REFERENCE: _aware(),
    **{
        f"wait_weight {wait:g}, load_weight {load:g}": _aware(wait_weight=wait, load_weight=load)
        for wait, load in (
            *((0.15, load) for load in (0.0, 0.02, 0.1)),
            *((wait, 0.05) for wait in (0.1, 0.25)),
            *((0.0, load) for load in (0.05, 0.1, 0.15, 0.25)),
            *((wait, 0.0) for wait in (0.0, 0.1, 0.25, 0.5, 1.0)),
        )
    },
    **{f"decoding_weight {weight:g}": _aware(decoding_weight=weight) for weight in (0, 1024)},
    **{f"context_weight {weight:g}": _aware(context_weight=weight) for weight in (0.05,)},
    **{f"guard {guard:g}": _aware(guard=guard) for guard in (1.25, inf)},
    "sample 2": _aware(sample=2),
}
"""By name, policy and settings; what is not given has its default."""
SHOWN: Final = (
    "least-loaded",
    "session-affinity",
    REFERENCE,
    "wait_weight 0.25, load_weight 0",
    "wait_weight 1, load_weight 0",
    "wait_weight 0, load_weight 0.1",
)
"""The columns of the table of all traffic."""
FIGURES: Final[dict[str, Callable[[Distribution], float]]] = {
    "TTFT mean": lambda ttft: ttft.mean,
    "p50": lambda ttft: ttft.p50,
    "p90": lambda ttft: ttft.p90,
    "p99": lambda ttft: ttft.p99,
}

Found = Mapping[tuple[str, str], Sequence[PolicyResult]]
"""By setting and traffic, a result of each seed."""


def main() -> int:
    """Returns 0 when no lookup of an engine differed from the index."""
    options = _options()
    chosen = [
        name for name in SETTINGS if name == REFERENCE or options.only is None or any(word in name for word in options.only)
    ]
    cases = {
        (name, traffic): [_case(name, traffic, seed) for seed in range(options.seeds)] for name in chosen for traffic in TRAFFIC
    }
    ran = run_all([case for each in cases.values() for case in each], to_stderr)
    found: Found = {place: [ran[case] for case in each] for place, each in cases.items()}
    _print_summary(chosen, found)
    _print_traffic([name for name in SHOWN if name in chosen], found)
    return int(any(result.disagreements for each in found.values() for result in each))


def _case(name: str, traffic: str, seed: int) -> Case:
    """One run. A setting that spells a default out is the same case as the default, and is run once."""
    (policy, settings), (asked, fleet) = SETTINGS[name], TRAFFIC[traffic]
    if policy == "prefix-aware":
        settings = {key: value for key, value in settings.items() if value != getattr(_DEFAULTS, key)}
    return Case(policy, asked, fleet, tuple(settings.items())).seeded(seed)


def _print_summary(chosen: Sequence[str], found: Found) -> None:
    """How all traffic fares with each setting: geometric means of each figure over that of the defaults."""
    print("| setting | " + " | ".join(FIGURES) + " | highest p90 over the best | hit rate, mean | engines without a request |")
    print("|" + " --- |" * (len(FIGURES) + 4))
    best = {traffic: min(_value(found[name, traffic], FIGURES["p90"]) for name in chosen) for traffic in TRAFFIC}
    for name in chosen:
        ratios = [
            _mean(_value(found[name, traffic], figure) / _value(found[REFERENCE, traffic], figure) for traffic in TRAFFIC)
            for figure in FIGURES.values()
        ]
        worst, where = max((_value(found[name, traffic], FIGURES["p90"]) / best[traffic], traffic) for traffic in TRAFFIC)
        results = [result for traffic in TRAFFIC for result in found[name, traffic]]
        hits = sum(result.hit_rate for result in results) / len(results)
        idle = sum(worker.requests == 0 for result in results for worker in result.workers)
        cells = [*(f"{ratio:.2f}" for ratio in ratios), f"{worst:.2f}, {where}", f"{hits:.1%}", str(idle)]
        print(f"| {name} | {' | '.join(cells)} |")


def _print_traffic(shown: Sequence[str], found: Found) -> None:
    """TTFT p90 of each traffic, in seconds, the geometric mean of the seeds."""
    print("\n| TTFT p90, seconds | " + " | ".join(shown) + " |\n|" + " --- |" * (len(shown) + 1))
    for traffic in TRAFFIC:
        cells = [f"{_value(found[name, traffic], FIGURES['p90']):.3g}" for name in shown]
        print(f"| {traffic} | {' | '.join(cells)} |")


def _value(results: Iterable[PolicyResult], figure: Callable[[Distribution], float]) -> float:
    """Of all seeds, the geometric mean."""
    return _mean(figure(result.ttft) for result in results if result.ttft is not None)


def _mean(values: Iterable[float]) -> float:
    logs = [log(value) for value in values]
    return exp(sum(logs) / len(logs))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.sweep", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="settings whose name contains NAME; may be repeated")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="runs of each, with the seeds 0 to N - 1 (2)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
