"""llm-d's published benchmark: stages of rising rates, each of which begins when all of the one before is answered.

Stages, prompts and cache sizes are those of the report behind "KV-Cache Wins You Can See": `benchmarking/73-capacity` of
github.com/llm-d/llm-d-kv-cache. inference-perf, which it was taken with, waits for all answers of a stage before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Final, NamedTuple

from kvevents.events import BlockStored, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.routing import Router, policy
from kvevents.sim.audit import Audit
from kvevents.sim.requests import Request
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_fleet import DelayedDelivery, SimulatedFleet, Timeline
from kvevents.sim.workloads import LlmD, arrivals
from kvevents.stream import RawBatch
from kvevents.wire.encode import batch_encoder

POD_TOKENS: Final = 307_328
"""Tokens that each of the report's pods had cache for."""
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
"""Requests a second, and for how many seconds; the first one warms up and does not count."""
REMEMBERED: Final = 86_400.0
"""Seconds for which the estimating router believes that what it sent somewhere is cached there: all of the run."""


class Stage(NamedTuple):
    """What one stage came to."""

    rate: float
    seconds: float
    """From its beginning to its last answer."""
    output_tokens: int
    ttft: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    checked: int
    """Lookups compared with the index, in all stages so far."""
    disagreements: int
    unproven: int
    preemptions: int

    @property
    def output_rate(self) -> float:
        """Tokens a second."""
        return self.output_tokens / self.seconds


def _of_its_own(settings: FleetSettings) -> PrefixIndex:
    """An index that receives no event except one block of each stream, from which it knows how long blocks are."""
    index, encode = PrefixIndex(), batch_encoder()
    block = BlockStored([1], None, [0] * settings.block_size, settings.block_size)
    for source, rank in settings.workers:
        index.apply(RawBatch(source, rank, 0, 0, False, encode(KVEventBatch(0.0, [block], rank))))
    return index


def _asking(name: str, *, estimated: bool = False, **policy_settings: float) -> Callable[[FleetSettings, PrefixIndex], Router]:
    def make(settings: FleetSettings, index: PrefixIndex) -> Router:
        chosen = policy(name, settings.seed, **policy_settings)
        if estimated:
            return Router(chosen, _of_its_own(settings), overlay_seconds=REMEMBERED)
        return Router(chosen, index, overlay_seconds=settings.overlay)

    return make


ROUTERS: Final[dict[str, Callable[[FleetSettings, PrefixIndex], Router]]] = {
    "prefix-aware": _asking("prefix-aware"),
    "prefix-aware, estimated": _asking("prefix-aware", estimated=True),
    "prefix-aware, wait_weight 1": _asking("prefix-aware", wait_weight=1.0, load_weight=0.0),
    "prefix-aware, estimated, wait_weight 1": _asking("prefix-aware", estimated=True, wait_weight=1.0, load_weight=0.0),
    "session-affinity": _asking("session-affinity"),
    "least-loaded": _asking("least-loaded"),
    "random": _asking("random"),
}
"""By name. The estimating ones have the same score, and an index that knows its own decisions and no event."""


def climb(name: str, settings: FleetSettings, stages: Sequence[tuple[float, int]] = STAGES) -> list[Stage]:
    """All stages, one after the other, with the caches that the ones before left."""
    timeline = Timeline()
    index = PrefixIndex(clock=lambda: timeline.now)
    audit = Audit(index)
    sink = DelayedDelivery(timeline, settings.event_delay, settings.wire, audit.apply)
    fleet = SimulatedFleet(settings, ROUTERS[name](settings, index), audit, sink, timeline)
    texts, random = LlmD().requests(settings.seed), Random(settings.seed)  # noqa: S311 - simulation, not a secret
    return [_stage(fleet, rate, islice(texts, int(rate * seconds)), random) for rate, seconds in stages]


def _stage(fleet: SimulatedFleet, rate: float, texts: Iterator[Request], random: Random) -> Stage:
    tally, timeline = fleet.metrics, fleet.timeline
    began, before = timeline.now, (tally.output_tokens, len(tally.ttft), tally.prompt_tokens, tally.cached_tokens)
    times = arrivals("poisson", rate, random)
    fleet.feed(replace(request, at=began + at) for request, at in zip(texts, times, strict=False))
    while timeline.next is not None:
        timeline.step()
    output, first, prompt, cached = before
    counts = fleet.audit.counts
    return Stage(
        rate,
        tally.last - began,
        tally.output_tokens - output,
        tuple(tally.ttft[first:]),
        tally.prompt_tokens - prompt,
        tally.cached_tokens - cached,
        counts.checked,
        counts.disagreements,
        counts.unproven,
        sum(worker.engine.preemptions for worker in fleet.workers.values()),
    )
