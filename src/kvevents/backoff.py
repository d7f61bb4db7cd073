"""Pauses between attempts: growing while something fails, spread so that many who wait do not come at once.

Nothing here waits or reads a clock by itself: `Pace` carries both, so that a test decides what time it is.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

FIRST_SECONDS: Final = 0.5
"""Of the first pause after a failure: a restarting peer is found soon."""
MOST_SECONDS: Final = 30.0
"""Of any pause: a peer that came back is found within this."""
INTERVAL_JITTER: Final = 0.1
"""Share of an interval by which it is at most shortened."""
BACKOFF_JITTER: Final = 0.5
"""Share of a pause after a failure by which it is at most shortened: whoever lost the same peer asks at different times."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How somebody waits: sleep, clock in seconds that never goes back, and numbers from 0 to below 1."""

    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    now: Callable[[], float] = time.monotonic
    random: Callable[[], float] = random.random


REAL_PACE: Final = Pace()


def jittered(seconds: float, random: Callable[[], float], share: float = INTERVAL_JITTER) -> float:
    """`seconds`, shortened by up to `share` of it; never longer, so that what was promised in time is."""
    return seconds * (1 - share * random())


class Backoff:
    """Pauses that double from `first` to `most` seconds, each shortened at random by up to half; `reset` after a success."""

    __slots__ = ("_first", "_most", "_next", "_random")

    def __init__(
        self,
        random: Callable[[], float] = random.random,
        *,
        first: float = FIRST_SECONDS,
        most: float = MOST_SECONDS,
    ) -> None:
        self._random = random
        self._first = first
        self._most = most
        self._next = first

    def __repr__(self) -> str:
        return f"<Backoff next {self._next:g} s of at most {self._most:g} s>"

    def pause(self) -> float:
        """Seconds to wait now; the next pause is twice as long, up to the most."""
        seconds = min(self._next, self._most)
        self._next = min(seconds * 2, self._most)
        return jittered(seconds, self._random, BACKOFF_JITTER)

    def reset(self) -> None:
        """It worked: the next pause is the first one again."""
        self._next = self._first
