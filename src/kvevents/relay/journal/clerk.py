"""Who waits for the disk, so that the relay's loop need not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class Clerk:
    """Does one errand after another in a thread of its own, or at once in the caller's where it is not `threaded`.

    The thread does not keep the process from ending. A journal has one fsync, one snapshot and the closing of what it gave up
    under way at most, so the queue stays short.
    """

    def __init__(self, *, threaded: bool = True) -> None:
        self._threaded = threaded
        self._errands: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, errand: Callable[[], Result]) -> Future[Result]:
        """Have it done; the future has its result, or the exception that it raised."""
        future: Future[Result] = Future()
        if not self._threaded:
            _do(future, errand)
            return future
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvevents-journal", daemon=True)
            self._thread.start()
        self._errands.put((future, errand))
        return future

    def close(self, timeout: float) -> bool:
        """End the thread when its errands are done; whether they were, within `timeout` seconds."""
        if self._thread is None:
            return True
        self._errands.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (order := self._errands.get()) is not None:
            _do(*order)


def _do(future: Future[Result], errand: Callable[[], Result]) -> None:
    try:
        future.set_result(errand())
    except Exception as error:  # noqa: BLE001 - whoever asked gets it, whatever it is
        future.set_exception(error)
