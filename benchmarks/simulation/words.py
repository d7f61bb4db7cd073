"""What docs/routing-study.md says around its tables."""

from __future__ import annotations

from typing import Final

HEAD: Final = """\
# Where prefix-aware routing pays

Policies of `kvevents.routing` on simulated fleets ([simulation.md](simulation.md)). `python -m benchmarks.simulation.study
--write` makes this file: do not edit it. All of it is in virtual time and seeded, so it comes out the same anywhere, in about
{minutes} minutes of two CPUs. `KVEVENTS_MOONCAKE_TRACE` names the file of [Mooncake's conversation
trace](https://github.com/kvcache-ai/Mooncake): 12,031 requests, 145 million prompt tokens, 59 minutes.

- Unless told otherwise a fleet is 8 engines of `qwen3-32b-2xh100`, a roofline of Qwen3-32B over two H100, with 276,000 tokens
  of cache each. Blocks have 128 tokens, events are in the index 1 ms after a step, all policies have their defaults and seed
  0.
- TTFT: seconds from a request's arrival to its first token, of all requests. Hit rate: prompt tokens that engines found in
  their caches, of all. Imbalance: the most prompt tokens that an engine had to compute, over the mean of all.
- The defaults of `prefix-aware` were chosen on the generators below and on the packaged sample ([ADR
  0008](adr/0008-prefix-aware-score.md)), and not on this trace. One seed each.
- Requests come when the trace says, however slow the fleet is. One that is too slow gets slower to the end: beyond saturation
  TTFT tells who is worse, and for the rest how long the run was.
"""
RISING: Final = """
## Where round robin saturates

The trace at several times its own speed: TTFT p90 and hit rate, and how many times as long p90 is as with prefix-aware. A
fleet whose TTFT p90 is above {saturated:g} s is called saturated: round robin is at {speed:g} times the trace's speed.
"""
POLICIES: Final = """
## All policies at that load

{speed:g} times the trace's speed. `least-loaded` compares tokens unless told otherwise.
"""
POLICIES_AFTER: Final = """
On this trace nearly all that is gained over round robin is balance, not cache. Prompts differ a hundredfold in length, so who
counts tokens avoids the long queues, and who counts requests does not. An endless cache would hold 37 % of the prompt tokens;
the eight GPU caches together hold 2.2 million tokens, which is a minute of the trace. What the index adds is the difference
between `prefix-aware` and `least-loaded`: some GPU time, and no shorter TTFT, until the fleet is nearly too slow; then what
is not computed decides whether it keeps up.
"""
CACHES: Final = """
## How much cache it takes

The same load with caches of other sizes in each engine: TTFT p90 and hit rate, and how many times as long p90 is as with
prefix-aware. A quarter of the cache is too small for 214 of the prompts, which are refused.
"""
CACHES_AFTER: Final = """
Where a cache is small beside what comes between two turns of a conversation, the earlier turn is gone before anybody asks for
it: with a quarter of the GPUs' cache all policies find the same, and an index is not worth its trouble. With larger ones
round robin and least-loaded find a turn in one of eight places by chance, however much is kept; prefix-aware finds about
three times as much, up to nine tenths of what an endless cache would hold. Whether that shows in TTFT depends on how busy the
fleet is: at this load it is a sixth to a quarter.
"""
SMALL: Final = """
## Block size

The same with blocks of 16 tokens, vLLM's default. The trace tells equal text in pieces of 512 tokens, so hits hardly differ.
"""
OTHERS: Final = """
## Other traffic

The generators of [workloads.md](workloads.md). Each cell has TTFT p90 and the hit rate.
"""
OTHERS_AFTER: Final = """
Agents come back with long prompts soon: there the cache decides whether a fleet keeps up. Chats behind few system prompts
find those in every cache anyway; less is computed, and hardly anybody would notice the difference in waiting before the fleet
is full.
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
The "73 %" is what all 750 prompts take when each group's shared part is kept once: 1.8 of 2.46 million tokens. Kept once, it
fits. Spread over all pods, prompts want up to 5.4 million, more than twice the fleet's cache, and go round in one fixed
order, for which least recently used is the worst rule: each is evicted shortly before it comes again. So it is all or
nothing, by construction, and that is what both found: precise scheduling computes the questions at most, blind scheduling
nearly everything, and the output differs by a factor of about two.

Output agrees within a tenth with precise scheduling from 20 requests a second on, and within a fifth or so with random. What
differs:

- *Short TTFT*: 0.15 s here, 0.5 s there. Nothing waits in either. Probably most of the rest is the way to the client, which
  is not simulated: a later run of the same guide, with other versions, has a p90 of 0.26 s and 13,900 tokens a second in the
  last stage, where we have 0.16 s and 10,900.
- *Long TTFT*: 155 s here, 95 s there, though ours finish more tokens a second. In the stages of 1,500 requests a queue of
  that length follows from the output: 1,500 answers of 1,000 tokens at 5,000 a second are 300 s. The report's 4,800 a second
  and a p90 of 106 s do not fit an open queue of answers of 1,000; how long answers were is not told.
- *Estimated scheduling* is much worse there than here, since ours hardly ever moves a prompt from where it was first sent.
  With a `wait_weight` of 1 it moves some, believes from then on that two pods have them, learns of no eviction, and breaks
  down as theirs does, at 20 a second already (theirs at 40). With events the same weight holds until 46. So the gain of
  precise over estimated is as much one of how rarely prompts are moved as of what is known.
- *Preemptions*: 9,000 in 16,000 requests, all from 40 a second on, where 190 answers at once in a pod outgrow its memory.
  They cost output and hardly any TTFT, since the first token has been given; but some 90 requests of three stages, admitted
  last, waited for 40 s, which is why the mean is above the p90.
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
`session-affinity` is no estimate of caches: it keeps a user in one place, but a group of five in five.
"""
ODD: Final = """
## Checked on the way

In {runs} runs {checked:,} lookups of engines were compared with the index: {disagreements} disagreements, {unproven} that
could not be compared.
"""
