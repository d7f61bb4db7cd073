"""Tests of `kvevents.testing.VirtualClock`."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvevents.errors import ConfigError
from kvevents.testing import VirtualClock


def test_the_clock_changes_only_when_it_is_advanced() -> None:
    """Reading it does not advance it."""
    clock = VirtualClock(10)
    assert [clock(), clock()] == [10.0, 10.0]
    assert clock.advance(2.5) == clock() == 12.5
    assert repr(clock) == "<VirtualClock at 12.5 s>"


@pytest.mark.parametrize("seconds", [-0.1, math.inf, math.nan])
def test_the_clock_never_decreases_or_becomes_infinite(seconds: float) -> None:
    clock = VirtualClock(5)
    with pytest.raises(ConfigError):
        clock.advance(seconds)
    assert clock() == 5.0


def test_threads_can_advance_the_clock_at_the_same_time() -> None:
    """No advance is lost when several threads advance the clock."""
    clock = VirtualClock()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(clock.advance, [1.0] * 1000))
    assert clock() == 1000.0
