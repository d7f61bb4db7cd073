"""Where a subscriber's deliveries go before they are handed out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvevents.stream import Batch, Findings, Gap, RawBatch, Reset


class Outcome(Protocol):
    """What became of a delivery."""

    @property
    def findings(self) -> Findings | None:
        """What applying it has shown; None where that is nothing."""
        ...


class Sink(Protocol):
    """Applies deliveries, as a `PrefixIndex` does."""

    def apply_many(self, deliveries: Sequence[Batch | RawBatch | Reset | Gap], /) -> Sequence[Outcome]:
        """Apply them in this order; an outcome for each."""
        ...
