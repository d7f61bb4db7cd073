"""Virtual time: a queue of actions."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final


class Timeline:
    """Runs actions in the order of their times; actions of the same time in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds from the beginning."""
        self._planned: Final[list[tuple[float, int, Callable[[], object]]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Plan an action; if its time has passed, it runs next."""
        self._count += 1
        heapq.heappush(self._planned, (max(time, self.now), self._count, action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Plan an action `seconds` seconds from now."""
        self.at(self.now + seconds, action)

    @property
    def next(self) -> float | None:
        """Time of the next action; None if there is none."""
        return self._planned[0][0] if self._planned else None

    def step(self) -> None:
        """Advance to the next action and run it. There must be one."""
        self.now, _, action = heapq.heappop(self._planned)
        action()
