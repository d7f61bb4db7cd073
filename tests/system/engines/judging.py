"""Counts of right and wrong predictions."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import msgspec

from tests.system.engines.service import Prediction

MAX_EXAMPLES: Final = 20
"""Wrong predictions that a report shows."""


class Example(msgspec.Struct):
    """One prediction and the answer of the engine."""

    number: int
    """Number of the request in its run."""
    predicted: int
    cached: int
    length: int
    salt: str | None
    lora: str | None
    trust: str


class Tally(msgspec.Struct):
    """Counts of requests."""

    requests: int = 0
    hits: int = 0
    """Requests for which the engine had cached tokens."""
    exact: int = 0
    """Predictions that were EXACT and equal to the number of the engine."""
    wrong: int = 0
    """Predictions that were EXACT and differed from the number of the engine."""
    unclaimed: int = 0
    """Predictions that were not EXACT."""
    unclaimed_equal: int = 0
    """Predictions that were not EXACT and equal to the number of the engine."""
    attested: int = 0
    """Predictions while the state of the service was attested."""
    unsettled: int = 0
    """Predictions before which the service had not applied everything within the limit."""
    salted: int = 0
    adapted: int = 0
    reported_in_full: int = 0
    trust: dict[str, int] = {}
    examples: list[Example] = []

    def add(self, prediction: Prediction, cached: int, example: Example) -> bool:
        """Count one prediction. Return False if it was wrong."""
        self.requests += 1
        self.hits += cached > 0
        self.attested += prediction.is_attested
        states = Counter(self.trust)
        states[prediction.trust] += 1
        self.trust = dict(states)
        is_equal = prediction.tokens == cached
        is_wrong = prediction.trust == "EXACT" and not is_equal
        if prediction.trust != "EXACT":
            self.unclaimed += 1
            self.unclaimed_equal += is_equal
        elif is_equal:
            self.exact += 1
        else:
            self.wrong += 1
        if is_wrong and len(self.examples) < MAX_EXAMPLES:
            self.examples.append(example)
        return not is_wrong

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for name in ("requests", "hits", "exact", "wrong", "unclaimed", "unclaimed_equal", "attested", "unsettled"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("salted", "adapted", "reported_in_full"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.trust = dict(Counter(self.trust) + Counter(other.trust))
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]

    def as_row(self) -> dict[str, Any]:
        row: dict[str, Any] = msgspec.to_builtins(self)
        return row
