"""Thread pools for requests that may take longer than a match: one pool for each kind of work, each with a bounded queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, Literal, TypeAlias, TypeVar

from kvevents.service.errors import UnavailableError

T = TypeVar("T")

PoolName: TypeAlias = Literal["listing", "queries", "fleet", "metrics"]
_THREADS_BY_POOL: Final[dict[PoolName, int]] = {
    "listing": 1,  # Reads all blocks of a worker.
    "queries": 4,  # Checks and answers the queries that the data plane has forwarded.
    "fleet": 2,  # Lists all members of the fleet.
    "metrics": 1,  # Writes the metrics. A pool of its own, so that no other request delays a scrape.
}


class ThreadPool:
    """Threads that do one kind of work. At most `max_waiting` requests wait for a thread."""

    def __init__(self, name: str, threads: int, max_waiting: int) -> None:
        self._executor: Final = ThreadPoolExecutor(threads, f"kvevents-{name}")
        self._name: Final = name
        self._limit: Final = threads + max_waiting
        self._count = 0

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread, and return its result.

        Raises `UnavailableError` if `max_waiting` calls already wait.
        """
        if self._count >= self._limit:
            sentence = f"{self._count} requests of kind {self._name!r} are in progress or wait"
            raise UnavailableError(sentence, "busy", "retry in a second, or raise limits.max_waiting")
        self._count += 1
        work = asyncio.get_running_loop().run_in_executor(self._executor, lambda: call(*arguments))
        work.add_done_callback(self._on_finished)
        return await work

    def _on_finished(self, _: object) -> None:
        self._count -= 1


def thread_pools(max_waiting: int) -> dict[PoolName, ThreadPool]:
    """Return new thread pools for one service. The keys are the names of the pools."""
    return {name: ThreadPool(name, threads, max_waiting) for name, threads in _THREADS_BY_POOL.items()}


class BoundedLock:
    """A lock for work that only one client at a time may request. At most `max_waiting` clients wait for the lock."""

    def __init__(self, name: str, max_waiting: int) -> None:
        self._name: Final = name
        self._max_waiting: Final = max_waiting
        self._waiting = 0
        self._lock: Final = asyncio.Lock()

    async def acquire(self, seconds: float) -> None:
        """Acquire the lock. Raises `UnavailableError` after `seconds`, or if `max_waiting` clients already wait."""
        if self._waiting < self._max_waiting or not self._lock.locked():
            self._waiting += 1
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._lock.acquire()
                    return
            finally:
                self._waiting -= 1
        raise UnavailableError(f"another client is reading a {self._name}", "busy", "retry in a few seconds")

    def release(self) -> None:
        """Release the lock for the next client."""
        self._lock.release()
