"""The native parts of a choice, which `/v1/select` goes by too: the score, ties, and which workers are chosen from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import kvevents.index  # noqa: F401 - says readably if the compiled module is missing
from kvevents import _native
from kvevents._native import Scorer, Ties

__all__ = ["EQUAL", "TIES", "Scorer", "Ties", "nearest"]

EQUAL: Final = 1e-9
"""Scores and shares that are no further apart are equal, as in `native/server/src/score.rs`."""
TIES: Final = ("rotate", "random", "first")
"""Ways to end a tie: who was chosen longest ago, chance, or the order of the candidates."""

A = TypeVar("A")


def nearest(candidates: Sequence[A], distances: list[int]) -> Sequence[A]:
    """The candidates with the least distance, in their order; at least one of at least one.

    So a worker that is STALE takes a prompt only if no other one is connected or may still be.
    """
    places = _native.nearest(distances)
    return candidates if len(places) == len(candidates) else [candidates[place] for place in places]
