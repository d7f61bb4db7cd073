"""Figures of single requests, as they come."""

from __future__ import annotations

from array import array
from typing import Final

from kvevents.sim.engine import Lookup


class Tally:
    """Sums, and a time for each request."""

    def __init__(self) -> None:
        self.ttft: Final = array("d")
        self.latency: Final = array("d")
        self.tpot: Final = array("d")
        self.requests = 0
        self.refused = 0
        self.retried = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.promised_tokens = 0
        self.broken_promises = 0
        self.batches = 0
        self.events = 0
        self.last = 0.0
        """When the last answer ended."""

    def looked_up(self, lookup: Lookup, promised: int, block_size: int) -> None:
        """A prompt was looked up for the first time where it was sent, because `promised` tokens were said to be there."""
        self.prompt_tokens += lookup.tokens
        self.cached_tokens += lookup.cached
        self.promised_tokens += promised
        usable = (lookup.tokens - 1) // block_size * block_size
        self.broken_promises += min(promised, usable) > lookup.cached

    def finished(self, now: float, arrived: float, first: float, answer: int) -> None:
        """A request was answered with `answer` tokens."""
        self.latency.append(now - arrived)
        self.output_tokens += answer
        if answer > 1:
            self.tpot.append((now - first) / (answer - 1))
        self.last = now
