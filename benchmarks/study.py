"""`python -m benchmarks.study`: when events pay, and llm-d's published figures, for docs/guides/routing-study.md.

Each policy runs with 1, 2 and 8 routers and several seeds.

Everything is in virtual time and seeded, so another machine gets the same figures. The study also has the example of
`kvevents sim compare` in docs/reference/cli.md, and judges the default settings of `prefix-aware`.
"""

from __future__ import annotations

import argparse
import io
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Final, NamedTuple

from matplotlib import style
from matplotlib.figure import Figure

from benchmarks.defaults import find_faults, with_example
from benchmarks.ladder import POD_TOKENS, ROUTERS, STAGES, Stage, climb
from kvevents.sim.report_text import Interval, Judgement, Runs, judge, mean_hit_rate, p90_of, p90_ratio
from kvevents.sim.results import Distribution, PolicyResult
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_fleet import simulate
from kvevents.sim.workloads import workload
from tools.released import CHECKOUT

DOCUMENT: Final = CHECKOUT / "docs" / "guides" / "routing-study.md"
PICTURE: Final = DOCUMENT.with_suffix(".svg")
REFERENCE: Final = CHECKOUT / "docs" / "reference" / "cli.md"
POLICIES: Final = ("least-loaded", "session-affinity", "approximate-tree", "prefix-estimated", "prefix-aware")
"""Policies by load, by sessions, by a router's own decisions (two), and by events."""
ROUTER_COUNTS: Final = (1, 2, 8)
SEEDS: Final = range(5)
PROCESSES: Final = 2


TRAFFIC: Final = ("trace", "chat", "agents", "shared-prompts", "llm-d")
REQUESTS: Final = 800
PUBLISHED: Final = {
    "prefix-aware": ("precise-scheduling", 8730.0, 0.298, 0.542),
    "prefix-estimated": ("estimated-scheduling", 6944.4, 13.316, 31.083),
    "least-loaded": ("load-scheduling", 4266.4, 46.987, 94.865),
    "random": ("random-scheduling", 4428.7, 45.281, 92.551),
}
"""Maps our policy to llm-d's policy and its figures in the report's summary: output tokens per second, mean and p90 of TTFT."""
TEXT: Final = """\
# When events pay

For authors and operators of routers: what routing by cache events is worth beside policies that need none.
`python -m benchmarks.study --write` wrote this page and its picture: do not edit them. Fleets are
[simulated](simulation.md) in virtual time, so every machine gets the same figures.

{findings}

![TTFT p90 of the fastest policy without events, relative to prefix-aware, by the number of routers](routing-study.svg)

- A fleet is 8 engines of `qwen3-32b-2xh100`, a roofline of Qwen3-32B on two H100, with blocks of 128 tokens. Events are
  in the index 1 ms after a step. The traffic is 800 requests of each [workload](workloads.md). `llm-d` saturates it.
- Requests are distributed over the routers at random. A router knows its own decisions and its own requests in flight;
  events reach all of them. Routers that ask one service (`/v1/select`) are one router here.
- `approximate-tree` is the default rule of SMG and of SGLang's gateway without events, over a router's own decisions.
  `prefix-estimated` has the score of `prefix-aware` over the same. The defaults of `prefix-aware` were chosen on
  these generators ([ADR 0008](../adr/0008-prefix-aware-score.md)).
- TTFT: seconds from a request's arrival to its first token. Hit rate: share of prompt tokens that engines found cached.
  Figures are means over {seeds} seeds.

## By the number of routers

Each cell has TTFT p90 in seconds and the hit rate. The last columns name the simplest policy without events that is as
fast as `prefix-aware` within 5 %, else the fastest; its TTFT p90 over that of `prefix-aware`, with a 95 % interval; and
whether events pay: the interval is above 1, and they find more in caches.

{traffic}

SMG's own measurements agree: one gateway serves 27.5 requests a second with events and 28.9 with its tree
([#1771](https://github.com/smg-project/smg/pull/1771)), several gateways 1.0 to 2.6 times as many with events
([#1652](https://github.com/smg-project/smg/pull/1652)).

Not in the figures: gateways that ask engines for their load, or share their trees; restarted routers and engines.

## llm-d's published gain

[KV-Cache Wins You Can See](https://llm-d.ai/blog/kvcache-wins-you-can-see), with a report in llm-d-kv-cache
(`benchmarking/73-capacity`): 8 pods of Qwen3-32B on two H100 each; 150 groups of 5 prompts, with 6,000 tokens shared by
the group and 1,200 of their own; answers of 1,000. After 750 requests, 16 stages of 3 to 60 requests a second. Here:
307,328 tokens of cache per pod, blocks of 64, Poisson arrivals. Output tokens a second are the mean over the stages.

{ladder}

Theirs is one run on GPUs, with TTFT at the client and loads as scraped. Here a step is a roofline that was not fitted
(half of the data sheets' arithmetic, three quarters of their bandwidth), and TTFT ends with the step, tenths of a
second earlier. One router sends all prompts, which fill 73 % of the caches: so `prefix-aware` and `prefix-estimated`
decide the same.

In {runs} runs, {checked:,} lookups of engines were compared with the index: {disagreements} disagreements, {unproven} that
could not be compared.
"""


class Fleet(NamedTuple):
    """A workload, and the number of routers that route its requests."""

    traffic: str
    routers: int


def run_policy(fleet: Fleet, policy: str, seed: int, requests: int) -> PolicyResult:
    """Run a fleet under one policy with one seed."""
    settings = FleetSettings(block_size=128, routers=fleet.routers, seed=seed)
    return simulate(settings, policy, workload(fleet.traffic, requests=requests, seed=seed))


def run_ladder(router: str, stages: Sequence[tuple[float, int]]) -> list[Stage]:
    """Run llm-d's stages with its cache size and its block size."""
    return climb(router, FleetSettings(block_size=64, blocks=POD_TOKENS // 64), stages)


def document(fleets: Mapping[Fleet, Runs], ladders: dict[str, list[Stage]]) -> str:
    """Return the page."""
    ends = last_results(fleets, ladders)
    return TEXT.format(
        findings=_findings_text(fleets),
        seeds=len(next(iter(next(iter(fleets.values())).values()))),
        traffic=_table(
            ["", "routers", *POLICIES, "without events", "ratio", "events"], map(_fleet_row, fleets, fleets.values())
        ),
        ladder=_ladder_table(ladders),
        runs=len(ends),
        checked=sum(end.checked for end in ends),
        disagreements=sum(end.disagreements for end in ends),
        unproven=sum(end.unproven for end in ends),
    )


def judgement_of(runs: Runs) -> Judgement:
    """Return whether events pay in a fleet."""
    judgement = judge(runs)
    assert judgement is not None, "both kinds of policies ran"
    return judgement


def fastest_ratio(runs: Runs) -> Interval:
    """Return the TTFT p90 of the fastest policy without events relative to that of `prefix-aware`."""
    return min((p90_ratio(runs[name], runs["prefix-aware"]) for name in POLICIES[:-1]), key=lambda ratio: ratio.mean)


_WORDS: Final = {"pay": "pay", "nothing": "gain nothing", "balance": "gain balance only", "undecided": "undecided"}


def _fleet_row(fleet: Fleet, runs: Runs) -> list[str]:
    found, cells = (
        judgement_of(runs),
        [f"{_seconds(_mean_p90(runs[name]))}, {mean_hit_rate(runs[name]):.1%}" for name in POLICIES],
    )
    ratio = f"{found.ratio.mean:.2f} ({found.ratio.low:.2f} to {found.ratio.high:.2f})"
    return [fleet.traffic, str(fleet.routers), *cells, found.rival, ratio, _WORDS[found.finding]]


def _findings_text(fleets: Mapping[Fleet, Runs]) -> str:
    lines = []
    for count in dict.fromkeys(fleet.routers for fleet in fleets):
        findings = {fleet.traffic: judgement_of(runs).finding for fleet, runs in fleets.items() if fleet.routers == count}
        pay = ", ".join(traffic for traffic, finding in findings.items() if finding == "pay") or "no workload"
        nothing = ", ".join(traffic for traffic, finding in findings.items() if finding == "nothing")
        ratios = [fastest_ratio(runs).mean for fleet, runs in fleets.items() if fleet.routers == count]
        lines.append(
            f"**{_routers_text(count)}**: events pay for {pay}{', and gain nothing for ' + nothing if nothing else ''}. TTFT "
            f"p90 without events, by the fastest policy, is {min(ratios):.2f} to {max(ratios):.2f} times that with events."
        )
    return "\n".join(textwrap.fill(line, 120, initial_indent="- ", subsequent_indent="  ") for line in lines)


def _routers_text(count: int) -> str:
    return f"{count} router{'' if count == 1 else 's'}"


def draw(fleets: Mapping[Fleet, Runs]) -> str:
    """Return the picture, an SVG file: a line for each kind of traffic. Equal results give equal files."""
    with style.context(["default", {"svg.hashsalt": "kvevents"}]):
        figure, file = Figure((9, 5), layout="constrained"), io.StringIO()
        axes = figure.subplots()
        counts = list(dict.fromkeys(fleet.routers for fleet in fleets))
        for place, traffic in enumerate(dict.fromkeys(fleet.traffic for fleet in fleets)):
            ratios = [fastest_ratio(fleets[Fleet(traffic, count)]) for count in counts]
            bounds = [[ratio.mean - ratio.low for ratio in ratios], [ratio.high - ratio.mean for ratio in ratios]]
            places = [at + (place - 2) * 0.05 for at in range(len(counts))]
            axes.errorbar(places, [ratio.mean for ratio in ratios], bounds, fmt="o-", capsize=3, label=traffic)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_yscale("log")
        axes.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
        axes.set_ylabel("TTFT p90 without events / with events")
        axes.set_xticks(range(len(counts)), list(map(_routers_text, counts)))
        axes.set_title("Above 1, events pay: the fastest policy without them is slower (95 % intervals)", loc="left")
        axes.legend()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def last_results(fleets: Mapping[Fleet, Runs], ladders: dict[str, list[Stage]]) -> list[PolicyResult | Stage]:
    """Return the last stage of each run, which has the counts of all lookups of the run."""
    results = (result for runs in fleets.values() for seeds in runs.values() for result in seeds)
    return [*results, *(stages[-1] for stages in ladders.values())]


def _ladder_table(ladders: dict[str, list[Stage]]) -> str:
    heads = ["theirs", "output/s", "TTFT mean", "p90", "ours", "output/s", "TTFT mean", "p90", "hit rate", "preemptions"]
    return _table(heads, (_ladder_row(router, stages[1:]) for router, stages in ladders.items()))


def _ladder_row(router: str, stages: list[Stage]) -> list[str]:
    published_cells = ["", "", "", ""]
    if router in PUBLISHED:
        name, output, mean, p90 = PUBLISHED[router]
        published_cells = [name, f"{output:,.0f}", _seconds(mean), _seconds(p90)]
    ttft = Distribution.from_values([value for stage in stages for value in stage.ttft])
    assert ttft is not None, "some requests were answered"
    output = sum(stage.output_rate for stage in stages) / len(stages)
    hit_rate = sum(stage.cached_tokens for stage in stages) / sum(stage.prompt_tokens for stage in stages)
    cells = [f"{output:,.0f}", _seconds(ttft.mean), _seconds(ttft.p90), f"{hit_rate:.1%}", f"{stages[-1].preemptions:,}"]
    return [*published_cells, router, *cells]


def _mean_p90(runs: Sequence[PolicyResult]) -> float:
    return sum(map(p90_of, runs)) / len(runs)


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
    seeds, requests, stages = (SEEDS[:2], 100, STAGES[:4]) if options.quick else (SEEDS, REQUESTS, STAGES)
    kinds = [Fleet(traffic, count) for traffic in TRAFFIC for count in ROUTER_COUNTS]
    with ProcessPoolExecutor(PROCESSES) as pool:
        of_ladders = {router: pool.submit(run_ladder, router, stages) for router in ROUTERS}
        of_fleets = {
            fleet: {name: [pool.submit(run_policy, fleet, name, seed, requests) for seed in seeds] for name in POLICIES}
            for fleet in kinds
        }
        faults = [] if options.quick else list(find_faults(pool))
        fleets = {
            fleet: {name: [job.result() for job in jobs] for name, jobs in policies.items()}
            for fleet, policies in of_fleets.items()
        }
        ladders = {router: jobs.result() for router, jobs in of_ladders.items()}
    page = document(fleets, ladders)
    print(page)
    faults += [f"{end.disagreements} disagreements" for end in last_results(fleets, ladders) if end.disagreements]
    if not options.quick:
        reference = with_example(REFERENCE.read_text(encoding="utf-8"))
        for path, text in ((DOCUMENT, page), (PICTURE, draw(fleets)), (REFERENCE, reference)):
            if options.write:
                path.write_text(text, encoding="utf-8")
            elif not path.exists() or path.read_text(encoding="utf-8") != text:
                faults.append(f"{path} has other figures; --write replaces them")
    print("\n".join(faults), end="", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
