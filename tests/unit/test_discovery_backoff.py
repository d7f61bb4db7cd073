"""Delays between attempts grow, and jitter shortens them."""

from __future__ import annotations

import pytest

from kvevents.backoff import BACKOFF_JITTER, INTERVAL_JITTER, Backoff, Clock, apply_jitter


def test_delays_double_up_to_the_maximum_until_a_success() -> None:
    """They start at 0.5 s and never exceed 30 s, however many attempts fail."""
    backoff = Backoff(lambda: 0.0)
    assert [backoff.next_delay() for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    for _ in range(5_000):
        assert backoff.next_delay() == 30
    backoff.reset()
    assert backoff.next_delay() == 0.5


@pytest.mark.parametrize("random", [0.0, 0.5, 0.999])
def test_jitter_only_shortens(random: float) -> None:
    """Neither delays nor intervals become longer, and none is shortened by more than its jitter."""
    pauses = Backoff(lambda: random, initial=8, maximum=8)
    assert 8 * (1 - BACKOFF_JITTER) <= pauses.next_delay() <= 8
    assert 10 * (1 - INTERVAL_JITTER) <= apply_jitter(10, lambda: random) <= 10


async def test_the_system_clock_sleeps_and_does_not_go_back() -> None:
    """The defaults are asyncio's sleep, the monotonic clock and random numbers below 1."""
    clock = Clock()
    before = clock.now()
    await clock.sleep(0)
    assert clock.now() >= before
    assert 0 <= clock.random() < 1
