"""When a relay says how far it is to be trusted."""

from __future__ import annotations

import math
from typing import Final

from kvevents.publisher.buffer import ReplayBuffer
from kvevents.relay.output import Output
from kvevents.stream import Trust
from kvevents.stream.trust import rank_of

AGAIN_SECONDS: Final = 0.5
"""Between two heartbeats at least, when trust changes quickly."""


class Beats:
    """The heartbeats of one relay: as often as its consumers were promised, and when there is something else to say."""

    def __init__(self, output: Output, buffer: ReplayBuffer, rank: int, every: float) -> None:
        self._output: Final = output
        self._buffer: Final = buffer
        self._rank: Final = rank
        self._every: Final = every
        self._at = -math.inf
        self._told: tuple[str, str] | None = None
        """Trust as of the last one."""

    def beat(self, trust: Trust, now: float) -> None:
        """When it is time, and when there is something else to say of trust: at once where that is less."""
        told = (trust.name, trust.reason)
        if now >= self._at + self._pause(told):
            self._at, self._told = now, told
            self._output.beat(trust, self._rank)

    def warn(self, trust: Trust, now: float) -> None:
        """When trust is less than the last one said, or nothing was said yet and it is not EXACT."""
        if rank_of(trust.name) < rank_of("EXACT" if self._told is None else self._told[0]):
            self.beat(trust, now)

    def _pause(self, news: tuple[str, str]) -> float:
        if self._told is None or rank_of(news[0]) < rank_of(self._told[0]):
            return 0.0
        return self._every if news == self._told else min(self._every, AGAIN_SECONDS)

    @property
    def wants_repeat(self) -> bool:
        """Whether half of what is kept came since the last one, and what is older is told as a snapshot."""
        return bool(self._told and self._buffer.has_left and self._output.since_beat >= max(1, len(self._buffer) // 2))

    def repeat(self, trust: Trust) -> None:
        """Say how things are once more, out of turn."""
        self._told = trust.name, trust.reason
        self._output.beat(trust, self._rank)
