"""Deadlines, and a clock that tests advance, for tests of discovery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

from kvevents.backoff import Clock

T = TypeVar("T")


DEADLINE = 60.0


class ManualClock:
    """A clock that a test advances: `wait_for_sleep` waits until a task sleeps, `end_sleep` ends that sleep."""

    def __init__(self, random: float = 0.0) -> None:
        self.time = 0.0
        self.clock = Clock(self._sleep, lambda: self.time, lambda: random)
        self._sleeps: asyncio.Queue[tuple[float, asyncio.Future[None]]] = asyncio.Queue()
        self._current: tuple[float, asyncio.Future[None]] | None = None

    async def _sleep(self, seconds: float) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeps.put_nowait((seconds, over))
        await over

    async def wait_for_sleep(self) -> float:
        self._current = await await_in_time(self._sleeps.get())
        return self._current[0]

    def end_sleep(self) -> None:
        assert self._current is not None
        seconds, over = self._current
        self.time += seconds
        if not over.done():
            over.set_result(None)

    async def step(self) -> float:
        seconds = await self.wait_for_sleep()
        self.end_sleep()
        return seconds


def start_next(found: AsyncGenerator[T, None]) -> asyncio.Task[T]:
    """Start a task that returns the next item of `found`; it fails after the deadline."""

    async def next_one() -> T:
        return await await_in_time(anext(found))

    return asyncio.create_task(next_one())


async def await_in_time(what: Awaitable[T]) -> T:
    async with asyncio.timeout(DEADLINE):
        return await what
