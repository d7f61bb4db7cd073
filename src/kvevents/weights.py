"""What routing believes of a worker by default: by the tier that holds a token, and by the state of the worker's stream.

Needs no native code, unlike `kvevents.routing`: clients of the service need these names too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

State: TypeAlias = Literal["CONNECTING", "REPLAYING", "EXACT", "DEGRADED", "STALE"]
"""Of a stream, as `kvevents.Trust` names it."""

TIER_WEIGHTS: Final[Mapping[str, float]] = {"gpu": 1.0, "cpu": 0.8, "disk": 0.5}
"""What a token that a tier holds is worth, against computing it."""
TIERS: Final = tuple(TIER_WEIGHTS)
"""Tiers that are known, the fastest first. The index has them in `native/index/src/placements.rs`, with the media of each."""
TRUST_WEIGHTS: Final[Mapping[State, float]] = {
    "EXACT": 1.0,
    "REPLAYING": 0.8,
    "DEGRADED": 0.5,
    "CONNECTING": 0.0,
    "STALE": 0.0,
}
"""How far a worker is believed in each state."""

_DISTANCE: Final[Mapping[str, int]] = {"CONNECTING": 1, "STALE": 2}
"""How far a worker in a state is from taking a request: 0 with a connection, 1 before the first one, 2 after the last one."""
LOST: Final = 2
"""The distance of a worker whose connection is gone, or that cannot be reached."""


def distance_of(state: str) -> int:
    """How far a worker in a state is from taking a request, from 0 on; a state that is not known counts as connected."""
    return _DISTANCE.get(state, 0)


def tiers_by_reach(tiers: Mapping[str, int]) -> list[tuple[str, int]]:
    """Tiers with how far a prefix reaches down to them, without those that add nothing to a faster one."""
    order = [*(tier for tier in TIERS if tier in tiers), *sorted(tiers.keys() - set(TIERS))]
    found: list[tuple[str, int]] = []
    for tier in order:
        if tiers[tier] > (found[-1][1] if found else 0):
            found.append((tier, tiers[tier]))
    return found


def describe_tiers(tiers: Mapping[str, int]) -> str:
    """In words: `2,176 on gpu`, or `20 on gpu, 50 including cpu` where a prefix goes on in host memory."""
    reached = tiers_by_reach(tiers)
    return ", ".join(f"{tokens:,} {'including' if number else 'on'} {tier}" for number, (tier, tokens) in enumerate(reached))
