"""Delays between attempts: they grow while attempts fail, and are randomised so that many clients do not retry at once.

Nothing here sleeps or reads a clock except through the functions of `Clock`, so that a test controls the time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct

INITIAL_DELAY: Final = 0.5
"""First delay after a failure, in seconds; it is short, so that a restarting peer is found soon."""
MAX_DELAY: Final = 30.0
"""Longest delay in seconds: a peer that has come back is found within this time."""
INTERVAL_JITTER: Final = 0.1
"""Maximum fraction by which an interval is shortened."""
BACKOFF_JITTER: Final = 0.5
"""Maximum fraction by which a delay after a failure is shortened, so that clients of one peer retry at different times."""


async def sleep(seconds: float) -> None:
    """Call `asyncio.sleep`. asyncio is imported here only, since users of `Backoff` in threads do not need it."""
    from asyncio import sleep as wait  # noqa: PLC0415

    await wait(seconds)


class Clock(Struct, frozen=True):
    """Source of time and randomness. `now` returns monotonic seconds; `random` returns a number from 0 to below 1."""

    sleep: Callable[[float], Awaitable[None]] = sleep
    now: Callable[[], float] = time.monotonic
    random: Callable[[], float] = random.random


SYSTEM_CLOCK: Final = Clock()


def apply_jitter(seconds: float, random: Callable[[], float], max_fraction: float = INTERVAL_JITTER) -> float:
    """Return `seconds` shortened by a random fraction of at most `max_fraction`, never lengthened, so that deadlines hold."""
    return seconds * (1 - max_fraction * random())


class Backoff:
    """Delays that double from `initial` to `maximum` seconds, each shortened at random by up to half."""

    __slots__ = ("_initial", "_maximum", "_next", "_random")

    def __init__(
        self, random: Callable[[], float] = random.random, *, initial: float = INITIAL_DELAY, maximum: float = MAX_DELAY
    ) -> None:
        self._random = random
        self._initial = initial
        self._maximum = maximum
        self._next = initial

    def next_delay(self) -> float:
        """Return the seconds to wait now. The next delay is twice as long, up to the maximum."""
        seconds = min(self._next, self._maximum)
        self._next = min(seconds * 2, self._maximum)
        return apply_jitter(seconds, self._random, BACKOFF_JITTER)

    def reset(self) -> None:
        """Start again with the initial delay, after a success."""
        self._next = self._initial
