"""The parts of a score: what a cache saves, what a load is among others, who is best.

Pure numbers: shares of a prompt, 0 to 1, and loads over their mean, so that neither the length of a prompt nor the unit of a
load matters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

State: TypeAlias = Literal["CONNECTING", "REPLAYING", "EXACT", "DEGRADED", "STALE"]
"""Of a stream, as `kvevents.Trust` names it."""

EQUAL: Final = 1e-9
"""Scores and shares that are no further apart are equal: sums of floats of the same worth differ by less."""
TIER_WEIGHTS: Final[Mapping[str, float]] = {"gpu": 1.0, "cpu": 0.8, "disk": 0.5}
"""What a token that a tier holds is worth, against computing it."""
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


A = TypeVar("A", bound=Any)


def nearest(candidates: Sequence[A], distances: Sequence[int]) -> Sequence[A]:
    """The candidates with the least distance, in their order; at least one of at least one.

    So a worker that is STALE takes a prompt only if no other one is connected or may still be.
    """
    least = min(distances)
    if least == max(distances):
        return candidates
    return [one for one, distance in zip(candidates, distances, strict=True) if distance == least]


class Scored(Protocol):
    """Anything that has a score, the smaller the better, and an uncached share."""

    @property
    def score(self) -> float: ...
    @property
    def uncached(self) -> float: ...


S = TypeVar("S", bound=Scored)


def best_of(considered: Sequence[S]) -> list[S]:
    """Those with the smallest score, and of them those that compute least, in the order given; one at least of one at least."""
    score = min([one.score for one in considered]) + EQUAL
    equal = [one for one in considered if one.score <= score]
    if len(equal) == 1:
        return equal
    uncached = min([one.uncached for one in equal]) + EQUAL
    return [one for one in equal if one.uncached <= uncached]


def relative_loads(loads: Sequence[float]) -> list[float]:
    """Loads over their mean; all 0 without any load. The largest is taken out first, so that no sum overflows."""
    most = max(loads)
    if most == 0:
        return [0.0] * len(loads)
    shares = [load / most for load in loads]
    mean = math.fsum(shares) / len(shares)
    return [share / mean for share in shares]


class TierWeights:
    """What cached tokens are worth by the tier that holds them; a tier that is not named has the lowest weight of all.

    `weights` has one tier at least, and numbers from 0 to 1.
    """

    __slots__ = ("_best_first", "_lowest")

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._best_first = sorted(weights.items(), key=lambda item: -item[1])
        self._lowest = min(weights.values())

    def saved(self, tokens: int, tiers: Mapping[str, int], whole: int) -> float:
        """The share of a prompt of `whole` tokens that its cached ones are worth, 0 to 1; an empty prompt saves nothing.

        `tokens` are held on whatever tiers, the longest of `tiers` at least. Lengths there are cumulative, so that `cpu`
        reaches as far as `gpu` or further: each token counts for the best tier that reaches it.
        """
        best, worth = self._best_first[0]
        if 0 < tokens <= whole and tiers.get(best, 0) >= tokens:  # most are, and this is asked for each candidate
            return worth * tokens / whole
        saved, covered, end = 0.0, 0, min(whole, tokens)
        for tier, weight in self._best_first:
            reached = tiers.get(tier, 0)
            if reached > covered:
                reached = min(reached, end)
                saved += weight * (reached - covered)
                covered = reached
                if covered == end:
                    break
        return (saved + self._lowest * (end - covered)) / max(whole, 1)
