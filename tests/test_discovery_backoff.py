"""Pauses between attempts; and `Steps`, a pace that the tests of discovery share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import pytest

from kvevents.backoff import BACKOFF_JITTER, INTERVAL_JITTER, Backoff, Pace, jittered

T = TypeVar("T")
DEADLINE = 20.0


class Steps:
    """Time that passes when a test says so: `paused` waits until somebody sleeps, `go` lets that sleep be over."""

    def __init__(self, random: float = 0.0) -> None:
        self.time = 0.0
        self.pace = Pace(self._sleep, lambda: self.time, lambda: random)
        self._asked: asyncio.Queue[tuple[float, asyncio.Future[None]]] = asyncio.Queue()
        self._held: tuple[float, asyncio.Future[None]] | None = None

    async def _sleep(self, seconds: float) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((seconds, over))
        await over

    async def paused(self) -> float:
        self._held = await asyncio.wait_for(self._asked.get(), DEADLINE)
        return self._held[0]

    def go(self) -> None:
        assert self._held is not None
        seconds, over = self._held
        self.time += seconds
        if not over.done():
            over.set_result(None)

    async def step(self) -> float:
        seconds = await self.paused()
        self.go()
        return seconds


def soon(found: AsyncGenerator[T, None]) -> asyncio.Task[T]:
    """The next finding, being waited for while the test goes on."""

    async def next_one() -> T:
        return await asyncio.wait_for(anext(found), DEADLINE)

    return asyncio.create_task(next_one())


async def within(what: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
    return await asyncio.wait_for(what, DEADLINE)


def test_pauses_double_up_to_the_most_and_start_again_after_a_success() -> None:
    """0.5 s doubling to 30 s, never more, however long it fails."""
    backoff = Backoff(lambda: 0.0)
    assert [backoff.pause() for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    for _ in range(5_000):
        assert backoff.pause() == 30
    backoff.reset()
    assert backoff.pause() == 0.5


@pytest.mark.parametrize("random", [0.0, 0.5, 0.999])
def test_jitter_only_shortens(random: float) -> None:
    """What is promised in time comes in time: neither pauses nor intervals become longer, and none shorter than its share."""
    pauses = Backoff(lambda: random, first=8, most=8)
    assert 8 * (1 - BACKOFF_JITTER) <= pauses.pause() <= 8
    assert 10 * (1 - INTERVAL_JITTER) <= jittered(10, lambda: random) <= 10


def test_it_says_what_comes_next() -> None:
    """The repr is one line for operators."""
    assert repr(Backoff(first=0.5, most=30)) == "<Backoff next 0.5 s of at most 30 s>"


async def test_the_real_pace_sleeps_and_its_clock_does_not_go_back() -> None:
    """The defaults are asyncio's sleep, the monotonic clock and random numbers below 1."""
    pace = Pace()
    before = pace.now()
    await pace.sleep(0)
    assert pace.now() >= before
    assert 0 <= pace.random() < 1
