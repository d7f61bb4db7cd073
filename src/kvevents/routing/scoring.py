"""The native score and tie-break, which `/v1/select` of the service uses too, and the selection of reachable workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import kvevents.index  # noqa: F401 - raises a readable error if the compiled module is missing
from kvevents.routing.policy_types import Candidate
from kvevents_native import _native
from kvevents_native._native import Scorer, Ties

__all__ = ["EQUAL", "TIES", "Scorer", "Ties", "break_tie", "nearest"]

EQUAL: Final = 1e-9
"""Scores and shares that differ by no more are equal, as in `native/server/src/score.rs`."""
TIES: Final = ("rotate", "random", "first")
"""Ways to break a tie: the worker chosen longest ago, a random one, or the first of the candidates."""

A = TypeVar("A")


def nearest(candidates: Sequence[A], distances: list[int]) -> Sequence[A]:
    """Return the candidates with the lowest distance, in their order.

    With `weights.distance_of` a STALE worker is returned only if no other worker is connected or connecting.
    """
    places = _native.nearest(distances)
    return candidates if len(places) == len(candidates) else [candidates[place] for place in places]


def break_tie(ties: Ties, equal: Sequence[Candidate], how: str = "rotate") -> Candidate:
    """Choose one of several equal candidates. It is the last to be chosen by the next rotation."""
    chosen = equal[ties.pick(how, [one.worker for one in equal]) if len(equal) > 1 else 0]
    ties.took(chosen.worker)
    return chosen
