"""When the publisher thread looks at its queue next."""

from __future__ import annotations

from typing import Final

LONGEST: Final = 0.005
"""Seconds between batches from which on the thread sleeps until `publish` wakes it: looking would cost more than that."""
SHORTEST: Final = 0.00025
"""Seconds of a nap at least, however quickly batches come."""
LOOK: Final = 0.0001
"""Seconds between two looks at least, once a batch is expected."""
_MEAN_WEIGHT: Final = 1 / 8
_DEVIATION_WEIGHT: Final = 1 / 4
"""As TCP smooths round-trip times (RFC 6298)."""
_STEADY: Final = 1 / 4
"""Deviation from the mean, as a part of it, up to which batches are expected at a time."""


class Pace:
    """Predicts the next batch from the time between the last ones.

    While batches come steadily, the thread naps until shortly before the next one is expected, and then looks a few times. So
    `publish` need not wake it, and the batch waits for `LOOK` or little more. When batches come at irregular times there are no
    naps: the thread sleeps, and `publish` wakes it.
    """

    def __init__(self) -> None:
        self._found_at = float("-inf")
        self._mean = float("inf")
        self._deviation = 0.0

    def found(self, now: float, *, at_first_look: bool = False) -> None:
        """Batches were found at `now` (monotonic seconds), by the first look of all, or a later one, or after a sleep."""
        interval = now - self._found_at
        # The batch came at an unknown time before the first look; without a correction naps would grow longer and longer.
        interval -= LOOK if at_first_look else 0.0
        self._found_at = now
        if interval > LONGEST or self._mean > LONGEST:
            self._mean, self._deviation = interval, interval / 2
            return
        error = interval - self._mean
        self._mean += error * _MEAN_WEIGHT
        self._deviation += (abs(error) - self._deviation) * _DEVIATION_WEIGHT

    def naps(self, now: float) -> list[float]:
        """Seconds to sleep before each look at the queue, beginning at `now`. Empty when the next batch is not foreseeable."""
        if self._mean > LONGEST or self._deviation > self._mean * _STEADY:
            return []
        step = max(LOOK, self._deviation / 2)
        first = self._found_at + self._mean - self._deviation - step - now
        return [max(first, SHORTEST), *[step] * (3 + int(3 * self._deviation / step))]
