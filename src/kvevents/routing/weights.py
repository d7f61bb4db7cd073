"""Default weights of routing, by the tier that holds a token and by the trust state of the worker's stream; texts about tiers.

This module does not import native code, because clients of the service use it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Final, Literal, TypeAlias

from kvevents.events import TIERS
from kvevents.stream.trust import TrustState

Tier: TypeAlias = Literal["gpu", "cpu", "disk", "other"]
"""A tier that `/v1/select` weighs; `other` is the tier of all unknown media."""
TIER_WEIGHTS: Final[Mapping[Tier, float]] = {"gpu": 1.0, "cpu": 0.8, "disk": 0.5}
"""Maps each tier to the value of a token cached there: 1 for a token in GPU memory, 0 for a token that must be computed."""
TRUST_WEIGHTS: Final[Mapping[TrustState, float]] = {
    "EXACT": 1.0,
    "REPLAYING": 0.8,
    "DEGRADED": 0.5,
    "CONNECTING": 0.0,
    "STALE": 0.0,
}
"""Maps each trust state to the factor for the cached tokens of a worker."""

_DISTANCE_BY_STATE: Final[Mapping[str, int]] = {"CONNECTING": 1, "STALE": 2}
"""Maps trust states to the distance of a worker; see `distance_of`."""
DISTANCE_SILENT: Final = 1
"""Distance of a worker whose stream is connected but whose server does not answer."""
DISTANCE_LOST: Final = 2
"""Distance of a worker that cannot be reached, or whose stream has lost its connection."""


def distance_of(state: str) -> int:
    """Return the distance of a worker by its trust state: 0 connected, 1 not yet connected, 2 lost, 0 for an unknown state."""
    return _DISTANCE_BY_STATE.get(state, 0)


def tokens_by_tier(tiers: Mapping[str, int]) -> dict[str, int]:
    """Return how many tokens each tier adds to the faster tiers, from cumulative counts.

    The sum of the returned numbers is the length of the prefix. Tiers that add nothing are omitted.
    """
    added: dict[str, int] = {}
    for tier in (*(tier for tier in TIERS if tier in tiers), *sorted(tiers.keys() - set(TIERS))):
        if (tokens := tiers[tier] - sum(added.values())) > 0:
            added[tier] = tokens
    return added


def describe_tiers(tiers: Mapping[str, int]) -> str:
    """Return a text such as `2,176 on gpu`, or `20 on gpu, 50 including cpu` if the prefix continues in host memory."""
    added = tokens_by_tier(tiers)
    reach = zip(added, accumulate(added.values()), strict=True)
    return ", ".join(f"{tokens:,} {'including' if number else 'on'} {tier}" for number, (tier, tokens) in enumerate(reach))
