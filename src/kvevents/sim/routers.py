"""The routers of a simulated fleet, and the policies that a fleet can have.

A fleet can have the policies of `kvevents.routing`, and two policies that estimate caches without events. With either of these
two policies, a router expects a prompt in the cache of the worker to which it sent the prompt. `approximate-tree` chooses by
the rule of gateways, `prefix-estimated` by the score of `prefix-aware`. Like the trees of gateways, the index of such a router
is large: it stores a million blocks of decisions for a day. The router does not notice evictions or restarts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any, Final

from kvevents.events import BlockStored, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.routing import POLICIES as ROUTING_POLICIES
from kvevents.routing import Candidate, Choice, Policy, Prompt, Router, Ties
from kvevents.routing.policies import MEASURES, PrefixAware, break_tie
from kvevents.sim.audit import Audit
from kvevents.sim.settings import FleetSettings
from kvevents.stream import RawBatch
from kvevents.wire.encode import batch_encoder

DECISION_SECONDS: Final = 86_400.0
"""Seconds for which a router without events expects a prompt in the cache of the worker that received the prompt."""
CACHE_THRESHOLD: Final = 0.3
"""Default of `--cache-threshold` of SMG 1.13.0 and of SGLang's gateway."""
SPILL_MARGIN: Final = 64.0
"""Default of `--balance-abs-threshold` of SMG 1.13.0 and of SGLang's gateway."""
SPILL_FACTOR: Final = 1.5
"""Default of `--balance-rel-threshold` of SMG 1.13.0 and of SGLang's gateway."""
LEAST_MARGIN: Final = 4.0
ESTIMATING_POLICIES: Final = ("approximate-tree", "prefix-estimated")
"""Policies whose routers have an index of their own decisions."""


class ApproximateTree:
    """Chooses the worker that received the longest prefix of the prompt before, as gateways without events do by default.

    The rule comes from SMG 1.13.0 (`policies/cache_aware.rs` of the crate). If the longest prefix is a larger share of the
    prompt than `CACHE_THRESHOLD`, the least loaded worker with this prefix is chosen. Otherwise the least loaded of all workers
    is chosen. A worker is skipped if its requests exceed both `SPILL_FACTOR` times the mean and the mean plus a margin. The
    margin is two standard deviations, but at least `LEAST_MARGIN` and at most `SPILL_MARGIN`. SMG asks engines for their load;
    here a router counts its own requests.
    """

    name = "approximate-tree"
    uses_index = True

    def __init__(self, seed: int | None = None) -> None:
        self._ties: Final = Ties(Random(seed))  # noqa: S311 - random numbers that need not be secret

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:
        """Choose a candidate. `Candidate.tokens` is the length of the prefix that this router sent to the candidate before."""
        mean = sum(one.load.requests for one in candidates) / len(candidates)
        most = max(SPILL_FACTOR * mean, mean + min(SPILL_MARGIN, max(LEAST_MARGIN, math.ceil(2 * math.sqrt(mean)))))
        longest = max(one.tokens for one in candidates)
        calm = [one for one in candidates if one.load.requests <= most]
        holders = [one for one in calm if one.tokens == longest > CACHE_THRESHOLD * prompt.length]
        eligible = holders or (calm if longest > CACHE_THRESHOLD * prompt.length else candidates)
        loads = [MEASURES["tokens"](one.load) for one in eligible]
        equal = [one for one, load in zip(eligible, loads, strict=True) if load == min(loads)]
        reason = "which was sent most of the prompt" if holders else "the least loaded of {candidates}"
        return Choice(break_tie(self._ties, equal), reason, len(equal))


POLICIES: Final[Mapping[str, Callable[..., Policy]]] = MappingProxyType(
    {
        **{name: make for name, make in ROUTING_POLICIES.items() if name != PrefixAware.name},
        ApproximateTree.name: ApproximateTree,
        "prefix-estimated": PrefixAware,
        PrefixAware.name: PrefixAware,
    }
)
"""Maps the name of each policy to its factory, from the simplest policy to the policy that needs events."""


def needs_events(name: str) -> bool:
    """Return whether the policy `name` uses the events of engines for its choice."""
    return POLICIES[name]().uses_index and name not in ESTIMATING_POLICIES


def make_routers(
    settings: FleetSettings, name: str, audit: Audit, *, chosen: Callable[..., Policy] | None = None, **options: Any
) -> list[Router]:
    """Return the routers of a fleet under the policy `name`, each with its own seed. `options` are arguments of `Router`.

    A single router uses the index of `audit`. Several routers have one index each, so that no router sees the recent decisions
    of another router. `chosen`, if not None, is a function that creates a policy from a seed, and replaces the policy `name`.
    """
    make, clock, estimates = chosen or POLICIES[name], options["clock"], name in ESTIMATING_POLICIES
    if estimates:
        indexes = [_index_without_events(settings, clock) for _ in range(settings.routers)]
    else:
        audit.further_indexes.extend(PrefixIndex(clock=clock) for _ in range(1, settings.routers) if make().uses_index)
        indexes = [audit.index, *audit.further_indexes]
    seconds = DECISION_SECONDS if estimates else settings.overlay
    return [
        Router(make(settings.seed + number), indexes[number % len(indexes)], overlay_seconds=seconds, **options)
        for number in range(settings.routers)
    ]


def _index_without_events(settings: FleetSettings, clock: Callable[[], float]) -> PrefixIndex:
    """Return an index to which one block of each worker was applied, so that the index knows the block size."""
    index, encode = PrefixIndex(clock=clock), batch_encoder()
    block = BlockStored([1], None, [0] * settings.block_size, settings.block_size)
    for source, rank in settings.workers:
        index.apply(RawBatch(source, rank, 0, 0, False, encode(KVEventBatch(0.0, [block], rank))))
    return index
