"""A clock that stands still until a test moves it."""

from __future__ import annotations

import math
import threading

from kvevents.errors import ConfigError


class VirtualClock:
    """Seconds that pass when told to; a drop-in for `time.monotonic` wherever a clock is passed in.

    Calling it gives the time in seconds as a float. It never goes back, as no monotonic clock does, and may be read and moved
    from any thread.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = _finite(start)
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self._now

    def __repr__(self) -> str:
        return f"<VirtualClock at {self._now:g} s>"

    def advance(self, seconds: float) -> float:
        """Let `seconds` (0 or more) pass and return the new time. Raises `ConfigError` for a negative or infinite number."""
        if _finite(seconds) < 0:
            raise ConfigError(f"time does not go back: cannot advance by {seconds} s")
        with self._lock:
            self._now += seconds
            return self._now

    def set(self, now: float) -> float:
        """Jump to the time `now` and return it. Raises `ConfigError` when that is in the past or infinite."""
        with self._lock:
            if _finite(now) < self._now:
                raise ConfigError(f"time does not go back: it is {self._now} s, cannot set {now} s")
            self._now = float(now)
            return self._now


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ConfigError(f"a time is a finite number of seconds, not {seconds}")
    return float(seconds)
