"""Pauses between attempts; and `Steps`, a clock that the tests of discovery share."""

from __future__ import annotations

import pytest

from kvevents.backoff import BACKOFF_JITTER, INTERVAL_JITTER, Backoff, Clock, jittered


def test_pauses_double_up_to_the_most_and_start_again_after_a_success() -> None:
    """0.5 s doubling to 30 s, never more, however long it fails."""
    backoff = Backoff(lambda: 0.0)
    assert [backoff.next_delay() for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    for _ in range(5_000):
        assert backoff.next_delay() == 30
    backoff.reset()
    assert backoff.next_delay() == 0.5


@pytest.mark.parametrize("random", [0.0, 0.5, 0.999])
def test_jitter_only_shortens(random: float) -> None:
    """What is promised in time comes in time: neither pauses nor intervals become longer, and none shorter than its share."""
    pauses = Backoff(lambda: random, initial=8, maximum=8)
    assert 8 * (1 - BACKOFF_JITTER) <= pauses.next_delay() <= 8
    assert 10 * (1 - INTERVAL_JITTER) <= jittered(10, lambda: random) <= 10


def test_it_says_what_comes_next() -> None:
    """The repr is one line for operators."""
    assert repr(Backoff(initial=0.5, maximum=30)) == "<Backoff next 0.5 s of at most 30 s>"


async def test_the_real_pace_sleeps_and_its_clock_does_not_go_back() -> None:
    """The defaults are asyncio's sleep, the monotonic clock and random numbers below 1."""
    clock = Clock()
    before = clock.now()
    await clock.sleep(0)
    assert clock.now() >= before
    assert 0 <= clock.random() < 1
