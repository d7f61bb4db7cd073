"""A clock that a test advances."""

from __future__ import annotations

import math
import threading

from kvevents.errors import ConfigError


class VirtualClock:
    """A replacement for `time.monotonic` that advances only when `advance` or `set` is called.

    Call it for the time in seconds, as a float. It never goes back. Any thread may read and advance it.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = _finite(start)
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self._now

    def __repr__(self) -> str:
        return f"<VirtualClock at {self._now:g} s>"

    def advance(self, seconds: float) -> float:
        """Advance by `seconds` (0 or more) and return the new time. Raise `ConfigError` for a negative or infinite number."""
        if _finite(seconds) < 0:
            raise ConfigError(f"cannot advance the clock by {seconds} s: expected 0 or more")
        with self._lock:
            self._now += seconds
            return self._now

    def set(self, now: float) -> float:
        """Set the time to `now` and return it. Raise `ConfigError` if it is before the current time or infinite."""
        with self._lock:
            if _finite(now) < self._now:
                raise ConfigError(f"cannot set the clock to {now} s: it is at {self._now} s and does not go back")
            self._now = float(now)
            return self._now


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ConfigError(f"invalid time {seconds}: expected a finite number of seconds")
    return float(seconds)
