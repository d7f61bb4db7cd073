"""`python -m benchmarks.study`: when events pay, and llm-d's published figures, for docs/guides/routing-study.md.

Everything is in virtual time and seeded, so another machine gets the same figures. The study also has the example of
`kvevents sim compare` in docs/reference/cli.md, and judges the default settings of `prefix-aware`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from typing import Final, NamedTuple

from benchmarks.defaults import find_faults, with_example
from benchmarks.ladder import POD_TOKENS, ROUTERS, STAGES, Stage, climb
from kvevents.sim.results import Distribution, PolicyResult
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_fleet import simulate
from kvevents.sim.workloads import workload
from tools.released import CHECKOUT

DOCUMENT: Final = CHECKOUT / "docs" / "guides" / "routing-study.md"
REFERENCE: Final = CHECKOUT / "docs" / "reference" / "cli.md"
POLICIES: Final = ("least-loaded", "session-affinity", "prefix-aware")
"""Policies that know neither caches nor sessions, only sessions, and caches by their events."""
REQUESTS: Final = 3_000
PROCESSES: Final = 2


class Traffic(NamedTuple):
    """Requests of a generator, and the engines that receive them."""

    workload: str
    rate: float
    """Requests a second."""
    preset: str

    def __str__(self) -> str:
        return f"{self.workload}, {self.rate:g}/s, {self.preset}"


TRAFFIC: Final = (
    Traffic("chat", 60.0, "qwen3-32b-2xh100"),
    Traffic("chat", 150.0, "llama-3.1-8b-h100"),
    Traffic("agents", 10.0, "qwen3-32b-2xh100"),
    Traffic("agents", 20.0, "qwen3-32b-2xh100"),
    Traffic("agents", 60.0, "llama-3.1-8b-h100"),
    Traffic("shared-prompts", 60.0, "qwen3-32b-2xh100"),
    Traffic("shared-prompts", 150.0, "llama-3.1-8b-h100"),
)
PUBLISHED: Final = {
    "prefix-aware": ("precise-scheduling", 8730.0, 0.298, 0.542),
    "prefix-aware, estimated": ("estimated-scheduling", 6944.4, 13.316, 31.083),
    "least-loaded": ("load-scheduling", 4266.4, 46.987, 94.865),
    "random": ("random-scheduling", 4428.7, 45.281, 92.551),
}
"""By our policy: theirs, its output tokens a second, mean and p90 of TTFT, of the report's summary."""
TEXT: Final = """\
# When events pay

For authors and operators of routers: what routing by cache events is worth beside session affinity, which needs none,
and beside llm-d's published figures.

`python -m benchmarks.study --write` wrote this page in a few minutes: do not edit it. Fleets are
[simulated](simulation.md), times are virtual and runs are seeded, so every machine gets the same figures.

- A fleet is 8 engines of a preset, such as `qwen3-32b-2xh100`: a roofline of Qwen3-32B on two H100. Events are in the index
  1 ms after a step. Policies have their defaults, and there is one seed.
- TTFT: seconds from a request's arrival to its first token. Hit rate: share of prompt tokens that engines found cached.
- The defaults of `prefix-aware` were chosen on these generators ([ADR 0008](../adr/0008-prefix-aware-score.md)).

## Beside session affinity

[Workloads](workloads.md) describes the traffic. Blocks have 128 tokens. Each cell has TTFT p90 in seconds and the hit
rate; the last column is TTFT p90 of session affinity over that of `prefix-aware`.

{traffic}

Events gain least on {least} ({least_ratio:.1f} times),
and most on {most} ({most_ratio:.1f} times).

## llm-d's published gain

[KV-Cache Wins You Can See](https://llm-d.ai/blog/kvcache-wins-you-can-see), with a report in llm-d-kv-cache
(`benchmarking/73-capacity`): 8 pods of Qwen3-32B on two H100 each; 150 groups of 5 prompts, with 6,000 tokens shared by the
group and 1,200 of their own; answers of 1,000. After 750 requests, 16 stages of 3 to 60 requests a second; each begins when
the one before is answered. Here: 307,328 tokens of cache per pod, blocks of 64, Poisson arrivals. Output tokens a second are
the mean over the stages, TTFT is over all requests.

{ladder}

| | theirs | here |
| --- | --- | --- |
| a step | GPUs | a roofline: half of the data sheets' arithmetic, three quarters of their bandwidth, not fitted |
| TTFT | at the client, behind gateway and network | from the router to the end of the step: tenths of a second less |
| prompts and answers | 7,580 and 940 tokens in later reports of the same guide | 7,200 and 1,000 |
| precise scheduling | prefix, KV usage and queue as scraped | `prefix-aware`: uncached share, and work that it sent |
| estimated scheduling | an LRU of what was sent, without evictions | `prefix-aware` over an index of its own decisions |
| load scheduling | queue and KV usage as scraped, always the best pod | `least-loaded`: each decision counts at once |
| runs | one | one, of one seed |

In {runs} runs, {checked:,} lookups of engines were compared with the index: {disagreements} disagreements, {unproven} that
could not be compared.
"""


def run_policy(traffic: Traffic, policy: str, requests: int) -> PolicyResult:
    """Run a fleet under one policy."""
    fleet = FleetSettings(block_size=128, preset=traffic.preset)
    return simulate(fleet, policy, workload(traffic.workload, rate=traffic.rate, requests=requests, seed=fleet.seed))


def run_ladder(router: str, stages: Sequence[tuple[float, int]]) -> list[Stage]:
    """Run llm-d's stages with its cache size and its block size."""
    return climb(router, FleetSettings(block_size=64, blocks=POD_TOKENS // 64), stages)


def document(fleets: dict[Traffic, list[PolicyResult]], ladders: dict[str, list[Stage]]) -> str:
    """Return the page."""
    ratios = {traffic: _p90(results[1]) / _p90(results[2]) for traffic, results in fleets.items()}
    rows = [
        [str(traffic), *(f"{_seconds(_p90(each))}, {each.hit_rate:.1%}" for each in results), f"{ratios[traffic]:.1f}"]
        for traffic, results in fleets.items()
    ]
    least, most = (chosen(ratios, key=ratios.__getitem__) for chosen in (min, max))
    ends = last_results(fleets, ladders)
    return TEXT.format(
        traffic=_table(["", *POLICIES, "session-affinity : prefix-aware"], rows),
        least=least,
        least_ratio=ratios[least],
        most=most,
        most_ratio=ratios[most],
        ladder=_ladder_table(ladders),
        runs=len(ends),
        checked=sum(end.checked for end in ends),
        disagreements=sum(end.disagreements for end in ends),
        unproven=sum(end.unproven for end in ends),
    )


def last_results(fleets: dict[Traffic, list[PolicyResult]], ladders: dict[str, list[Stage]]) -> list[PolicyResult | Stage]:
    """Return the end of each run, which has the counts of all its lookups."""
    return [*chain.from_iterable(fleets.values()), *(stages[-1] for stages in ladders.values())]


def _ladder_table(ladders: dict[str, list[Stage]]) -> str:
    heads = ["theirs", "output/s", "TTFT mean", "p90", "ours", "output/s", "TTFT mean", "p90", "hit rate", "preemptions"]
    return _table(heads, (_ladder_row(router, stages[1:]) for router, stages in ladders.items()))


def _ladder_row(router: str, stages: list[Stage]) -> list[str]:
    theirs = ["", "", "", ""]
    if router in PUBLISHED:
        name, output, mean, p90 = PUBLISHED[router]
        theirs = [name, f"{output:,.0f}", _seconds(mean), _seconds(p90)]
    ttft = Distribution.of([value for stage in stages for value in stage.ttft])
    assert ttft is not None, "some requests were answered"
    output = sum(stage.output_rate for stage in stages) / len(stages)
    hit_rate = sum(stage.cached_tokens for stage in stages) / sum(stage.prompt_tokens for stage in stages)
    ours = [f"{output:,.0f}", _seconds(ttft.mean), _seconds(ttft.p90), f"{hit_rate:.1%}", f"{stages[-1].preemptions:,}"]
    return [*theirs, router, *ours]


def _p90(result: PolicyResult) -> float:
    assert result.ttft is not None, "some requests were answered"
    return result.ttft.p90


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *rows])


def main() -> int:
    """Print the page. Return 1 if lookups differed from the index, other defaults are better, or a document is out of date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few requests, and no document: whether it works")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name} and the example in {REFERENCE.name}")
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("only the whole study is written")
    requests, stages = (500, STAGES[:4]) if options.quick else (REQUESTS, STAGES)
    with ProcessPoolExecutor(PROCESSES) as pool:
        of_ladders = {router: pool.submit(run_ladder, router, stages) for router in ROUTERS}
        of_fleets = {each: [pool.submit(run_policy, each, name, requests) for name in POLICIES] for each in TRAFFIC}
        faults = [] if options.quick else list(find_faults(pool))
        fleets = {traffic: [each.result() for each in running] for traffic, running in of_fleets.items()}
        ladders = {router: running.result() for router, running in of_ladders.items()}
    page = document(fleets, ladders)
    print(page)
    faults += [f"{end.disagreements} disagreements" for end in last_results(fleets, ladders) if end.disagreements]
    if not options.quick:
        for path, text in ((DOCUMENT, page), (REFERENCE, with_example(REFERENCE.read_text(encoding="utf-8")))):
            if options.write:
                path.write_text(text, encoding="utf-8")
            elif path.read_text(encoding="utf-8") != text:
                faults.append(f"{path} has other figures; --write replaces them")
    print("\n".join(faults), end="", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
