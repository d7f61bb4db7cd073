"""Headings and introductions of docs/guides/routing-study.md; conclusions are computed in `document`."""

from __future__ import annotations

from typing import Final

HEAD: Final = """\
# Where prefix-aware routing pays

Policies of `kvevents.routing` on simulated fleets ([simulation.md](simulation.md)). `python -m benchmarks.simulation.study
--write` makes this file: do not edit it. All of it is in virtual time and seeded, so it comes out the same anywhere, in about
{minutes} minutes of two CPUs. `KVEVENTS_MOONCAKE_TRACE` names the file of [Mooncake's conversation
trace](https://github.com/kvcache-ai/Mooncake): 12,031 requests, 145 million prompt tokens, 59 minutes.

- By default a fleet is 8 engines of `qwen3-32b-2xh100`, a roofline of Qwen3-32B over two H100, with 276,000 tokens
  of cache each. Blocks have 128 tokens, events are in the index 1 ms after a step, all policies have their defaults and seed
  0.
- TTFT: seconds from a request's arrival to its first token, of all requests. Hit rate: prompt tokens that engines found in
  their caches, of all. Imbalance: the most prompt tokens that an engine had to compute, over the mean of all.
- The defaults of `prefix-aware` were chosen on the generators below and on the packaged sample ([ADR
  0008](adr/0008-prefix-aware-score.md)), and not on this trace. One seed each.
- Requests come when the trace says, however slow the fleet is. One that is too slow gets slower to the end: beyond saturation
  TTFT shows which policy is worse, and otherwise depends on the length of the run.
"""
RISING: Final = """
## Where round robin saturates

The trace at several times its own speed: TTFT p90 and hit rate, and how many times as long p90 is as with prefix-aware. A
fleet whose TTFT p90 is above {saturated:g} s is called saturated: round robin is at {speed:g} times the trace's speed.
"""
POLICIES: Final = """
## All policies at that load

{speed:g} times the trace's speed. `least-loaded` compares tokens by default.
"""
CACHES: Final = """
## How much cache it takes

The same load with caches of other sizes in each engine: TTFT p90 and hit rate, and how many times as long p90 is as with
prefix-aware. A quarter of the cache is too small for 214 of the prompts, which are refused.
"""
SMALL: Final = """
## Block size

The same with blocks of 16 tokens, vLLM's default. The trace identifies equal text in pieces of 512 tokens, so hit rates
hardly differ.
"""
OTHERS: Final = """
## Other traffic

The generators of [workloads.md](workloads.md). Each cell has TTFT p90 and the hit rate.
"""
LLMD: Final = """
## llm-d's published gain

[KV-Cache Wins You Can See](https://llm-d.ai/blog/kvcache-wins-you-can-see), with a report in llm-d-kv-cache
(`benchmarking/73-capacity`): 8 pods of Qwen3-32B, two H100 each; 150 groups of 5 prompts, of 6,000 tokens shared by the group
and 1,200 of their own; answers of 1,000. 750 requests to warm up, then 16 stages from 3 to 60 requests a second. The same
here: 307,328 tokens of cache a pod, blocks of 64 as in their indexer, Poisson arrivals, and each stage begins when all of the
one before is answered, as inference-perf does it. Output tokens a second are the mean over the stages, as in the report, TTFT
is over all requests.
"""
LLMD_AFTER: Final = """
What differs between the two:
"""
DIFFERENCES: Final = (
    (
        "time of a step",
        "GPUs",
        "a roofline: half of the data sheets' arithmetic, three quarters of their bandwidth, nothing fitted to the report",
    ),
    (
        "TTFT where nothing waits",
        "at the client: gateway, scheduler, tokenizer, network and the client itself; many p90 are 0.5 or 0.6 to the digit",
        "from the arrival at the router to the end of the step that computed it: a few tenths of a second less",
    ),
    (
        "prompts and answers",
        "later reports of the same guide count 7,580 and 940 tokens",
        "7,200 and 1,000",
    ),
    (
        "precise scheduling",
        "prefix, KV usage and queue of each pod as scraped, weighted 3 : 2 : 2",
        "`prefix-aware`: uncached share and the work that this router sent",
    ),
    (
        "estimated scheduling",
        "what was sent where, in an LRU of 2 million tokens a pod, so no eviction is ever known; weighted 1 : 1 : 1",
        "the same idea with our score: `prefix-aware` over an index of its own decisions",
    ),
    (
        "load scheduling",
        "queue and KV usage as scraped, always the best pod: requests between two scrapes can all go to one",
        "`least-loaded`: each decision counts at once",
    ),
    (
        "runs",
        "one",
        "one, of one seed",
    ),
)
LLMD_END: Final = """
`session-affinity` does not estimate caches: each of a group's five users has one worker, so the group's prefix is on up to
five.
"""
ODD: Final = """
## Checked on the way

In {runs} runs {checked:,} lookups of engines were compared with the index: {disagreements} disagreements, {unproven} that
could not be compared.
"""
