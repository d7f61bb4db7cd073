"""`python -m benchmarks.simulation.tuning`: settings of prefix-aware beside each other, on much different traffic.

docs/adr/0008-prefix-aware-score.md has what came out. Ten minutes of two CPUs; `--only` for a few settings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from math import exp, inf, log
from typing import Any, Final

from benchmarks.simulation.cases import TRACE, Case, Generated, Traced, run_all, to_stderr
from kvevents.sim.results import PolicyResult
from kvevents.sim.settings import DEFAULT_PRESET, FleetSettings

BLOCK: Final = 128
_WHOLE: Final = FleetSettings(block_size=BLOCK).size.blocks
_LLAMA: Final = "llama-3.1-8b-h100"


def _fleet(preset: str = DEFAULT_PRESET, blocks: int | None = None, host_blocks: int = 0) -> FleetSettings:
    return FleetSettings(preset=preset, block_size=BLOCK, blocks=blocks, host_blocks=host_blocks)


TRAFFIC: Final[dict[str, tuple[Traced | Generated, FleetSettings]]] = {
    "trace x 0.8": (Traced(0.8, 2_500), _fleet()),
    "trace x 1.1": (Traced(1.1, 2_500), _fleet()),
    "trace x 1.2, 4 times the blocks": (Traced(1.2, 2_500), _fleet(blocks=4 * _WHOLE)),
    "trace x 1.1, 16 times on the host": (Traced(1.1, 2_500), _fleet(host_blocks=16 * _WHOLE)),
    "trace x 2.2, llama": (Traced(2.2, 2_500), _fleet(_LLAMA)),
    "agents 10/s, half the blocks": (Generated("agents", 10, 2_000), _fleet(blocks=_WHOLE // 2)),
    "agents 20/s": (Generated("agents", 20, 2_000), _fleet()),
    "agents 60/s, llama": (Generated("agents", 60, 3_000), _fleet(_LLAMA)),
    "llm-d 10/s": (Generated("llm-d", 10, 2_000), _fleet()),
    "llm-d 15/s": (Generated("llm-d", 15, 2_000), _fleet()),
    "llm-d 20/s": (Generated("llm-d", 20, 2_000), _fleet()),
    "chat 60/s": (Generated("chat", 60, 3_000), _fleet()),
    "chat 150/s, llama": (Generated("chat", 150, 4_000), _fleet(_LLAMA)),
    "shared-prompts 60/s": (Generated("shared-prompts", 60, 3_000), _fleet()),
    "shared-prompts 150/s, llama": (Generated("shared-prompts", 150, 4_000), _fleet(_LLAMA)),
}
SETTINGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "least-loaded by requests": ("least-loaded", {"by": "requests"}),
    "least-loaded by tokens": ("least-loaded", {"by": "tokens"}),
    "the defaults": ("prefix-aware", {}),
    **{f"load_weight {weight:g}": ("prefix-aware", {"load_weight": weight}) for weight in (0, 0.1, 0.35, 0.5, 1, 2)},
    **{f"decoding_weight {weight:g}": ("prefix-aware", {"decoding_weight": weight}) for weight in (0, 64, 1024)},
    **{f"context_weight {weight:g}": ("prefix-aware", {"context_weight": weight}) for weight in (0.05, 0.25)},
    **{f"guard {guard:g}": ("prefix-aware", {"guard": guard}) for guard in (1.25, inf)},
    "guard_requests 4": ("prefix-aware", {"guard_requests": 4}),
    "load relative": ("prefix-aware", {"load": "relative"}),
    "load relative, load_weight 1": ("prefix-aware", {"load": "relative", "load_weight": 1.0}),
    "sample 2": ("prefix-aware", {"sample": 2}),
    **{
        f"session-affinity, factor {factor:g}": ("session-affinity", {"factor": factor, "spare": spare})
        for factor, spare in ((1.25, 8), (1.5, 8), (2.0, 24))
    },
}
"""By name, policy and settings."""


def main() -> int:
    """Returns 0 when no lookup of an engine differed from the index."""
    options = _options()
    if not TRACE.exists():
        sys.exit("this needs the conversation trace; KVEVENTS_MOONCAKE_TRACE names it")
    chosen = {
        name: each for name, each in SETTINGS.items() if options.only is None or any(word in name for word in options.only)
    }
    cases = {
        (name, traffic): Case(policy, asked, fleet, tuple(settings.items()))
        for name, (policy, settings) in {"the defaults": SETTINGS["the defaults"], **chosen}.items()
        for traffic, (asked, fleet) in TRAFFIC.items()
    }
    ran = run_all(cases.values(), to_stderr)
    found: dict[tuple[str, str], PolicyResult] = {place: ran[case] for place, case in cases.items()}
    print("TTFT p90 in seconds; mean of all in relation to the defaults (geometric)\n")
    print(f"| | {' | '.join(TRAFFIC)} | p90, mean | TTFT mean, mean |\n|{' --- |' * (len(TRAFFIC) + 3)}")
    for name in chosen:
        cells = [f"{_p90(found[name, traffic]):.3g}" for traffic in TRAFFIC]
        print(f"| {name} | {' | '.join(cells)} | {_against(found, name, 'p90'):.2f} | {_against(found, name, 'mean'):.2f} |")
    return int(any(result.disagreements for result in found.values()))


def _p90(result: PolicyResult) -> float:
    assert result.ttft is not None
    return result.ttft.p90


def _against(found: Mapping[tuple[str, str], PolicyResult], name: str, value: str) -> float:
    """Of all traffic, the geometric mean in relation to the defaults."""
    ratios = [
        log(getattr(found[name, traffic].ttft, value) / getattr(found["the defaults", traffic].ttft, value))
        for traffic in TRAFFIC
    ]
    return exp(sum(ratios) / len(ratios))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.tuning", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="settings whose name contains NAME; may be repeated")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
