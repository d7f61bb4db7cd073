"""Headings and introductions of docs/guides/routing-study.md; conclusions are computed in `document`."""

from __future__ import annotations

from typing import Final

HEAD: Final = """\
# Where prefix-aware routing pays

For authors and operators of routers: what routing by cache is worth on which traffic, and when it is worth nothing.

`python -m benchmarks.simulation.study --write` wrote this page in about {minutes} minutes of two CPUs: do not edit it. Fleets
are [simulated](simulation.md), times are virtual and runs are seeded, so every machine gets the same figures.

- A fleet is 8 engines of a preset, such as `qwen3-32b-2xh100`: a roofline of Qwen3-32B on two H100. Events are in the index
  1 ms after a step. Policies have their defaults, and there is one seed.
- TTFT: seconds from a request's arrival to its first token. Hit rate: share of prompt tokens that engines found cached.
- The defaults of `prefix-aware` were chosen on these generators ([ADR 0008](../adr/0008-prefix-aware-score.md)).
"""
OTHERS: Final = """
## Traffic of the generators

[Workloads](workloads.md) describes them. Blocks have 128 tokens. Each cell has TTFT p90 in seconds and the hit rate.
"""
LLMD: Final = """
## llm-d's published gain

[KV-Cache Wins You Can See](https://llm-d.ai/blog/kvcache-wins-you-can-see), with a report in llm-d-kv-cache
(`benchmarking/73-capacity`): 8 pods of Qwen3-32B on two H100 each; 150 groups of 5 prompts, with 6,000 tokens shared by the
group and 1,200 of their own; answers of 1,000. After 750 requests, 16 stages of 3 to 60 requests a second; each begins when
the one before is answered. Here: 307,328 tokens of cache per pod, blocks of 64, Poisson arrivals. Output tokens a second are
the mean over the stages, TTFT is over all requests.
"""
LLMD_AFTER: Final = """
| | theirs | here |
| --- | --- | --- |
| a step | GPUs | a roofline: half of the data sheets' arithmetic, three quarters of their bandwidth, not fitted |
| TTFT | at the client, behind gateway and network | from the router to the end of the step: tenths of a second less |
| prompts and answers | 7,580 and 940 tokens in later reports of the same guide | 7,200 and 1,000 |
| precise scheduling | prefix, KV usage and queue as scraped | `prefix-aware`: uncached share, and work that it sent |
| estimated scheduling | an LRU of what was sent, without evictions | `prefix-aware` over an index of its own decisions |
| load scheduling | queue and KV usage as scraped, always the best pod | `least-loaded`: each decision counts at once |
| runs | one | one, of one seed |
"""
AUDIT: Final = """
In {runs} runs, {checked:,} lookups of engines were compared with the index: {disagreements} disagreements, {unproven} that
could not be compared.
"""

# --- with a trace, which is printed and not written ---------------------------------------------------------------------------

RISING: Final = """
## Where round robin saturates

The trace at several times its own speed: TTFT p90 and hit rate, and how many times as long p90 is as with prefix-aware. A
fleet whose TTFT p90 is above {saturated:g} s is called saturated: round robin is at {speed:g} times the trace's speed.
"""
POLICIES: Final = """
## All policies at that load

{speed:g} times the trace's speed. `least-loaded` compares tokens by default. Imbalance: the most prompt tokens that an engine
had to compute, over the mean of all.
"""
CACHES: Final = """
## How much cache it takes

The same load with caches of other sizes in each engine: TTFT p90 and hit rate, and how many times as long p90 is as with
prefix-aware.
"""
SMALL: Final = """
## Block size

The same with blocks of 16 tokens, vLLM's default.
"""
