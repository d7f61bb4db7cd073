"""Threads for requests that may take longer than a match, each kind with its own, and a bounded queue before each."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

from kvevents.service.errors import UnavailableError

T = TypeVar("T")

LISTING: Final = "listing"
"""The blocks of whole workers are read."""
MATCHING: Final = "matching"
"""Many prompts at once."""
FLEET: Final = "fleet"
"""All members of the fleet are listed."""
METRICS: Final = "metrics"
"""Nothing that clients ask may keep these waiting."""
_THREADS: Final = {LISTING: 1, MATCHING: 4, FLEET: 2, METRICS: 1}


class Worker:
    """Threads that do one kind of work. `max_waiting` requests may wait for them."""

    def __init__(self, name: str, threads: int, max_waiting: int) -> None:
        self._executor: Final = ThreadPoolExecutor(threads, f"kvevents-{name}")
        self._name: Final = name
        self._most: Final = threads + max_waiting
        self._count = 0

    async def run(self, call: Callable[..., T], *given: Any) -> T:
        """What a call returns, in the present context. Raises `UnavailableError` if too many are waiting already."""
        if self._count >= self._most:
            sentence = f"{self._count} requests of this kind ({self._name}) are in progress or waiting"
            raise UnavailableError(sentence, "busy", "ask again in a second, or raise limits.max_waiting")
        self._count += 1
        context = contextvars.copy_context()
        work = asyncio.get_running_loop().run_in_executor(self._executor, lambda: context.run(call, *given))
        work.add_done_callback(self._ended)
        return await work

    def _ended(self, _: object) -> None:
        self._count -= 1


class Run(Protocol):
    """How the steps of a request that may take long are called: in a thread, or at once."""

    def __call__(self, call: Callable[..., T], *given: Any) -> Awaitable[T]:
        """What a call returns."""
        ...


async def at_once(call: Callable[..., T], *given: Any) -> T:
    """What a call returns, without a thread."""
    return call(*given)


class Workers:
    """Those of one service, and the turns of what is done for one client at a time."""

    def __init__(self, max_waiting: int) -> None:
        self._by_name: Final = {name: Worker(name, threads, max_waiting) for name, threads in _THREADS.items()}
        self.dumping: Final = Worker("dump", 1, 0)
        self.dump: Final = Turn("dump", max_waiting)

    def __getitem__(self, name: str) -> Worker:
        return self._by_name[name]


class Turn:
    """What one client may have at a time; `max_waiting` others wait for it, each for a bounded time."""

    def __init__(self, name: str, max_waiting: int) -> None:
        self._name: Final = name
        self._most: Final = max_waiting
        self._waiting = 0
        self._lock: Final = asyncio.Lock()

    async def take(self, seconds: float) -> None:
        """Wait for the turn, which has to be given back. Raises `UnavailableError`."""
        if self._waiting < self._most or not self._lock.locked():
            self._waiting += 1
            try:
                async with asyncio.timeout(seconds):
                    await self._lock.acquire()
            except TimeoutError:
                pass
            else:
                return
            finally:
                self._waiting -= 1
        raise UnavailableError(f"another client is in the middle of a {self._name}", "busy", "ask again in a few seconds")

    def give_back(self) -> None:
        """Let the next one have it."""
        self._lock.release()
