"""Memory that a burst has left behind, back to the machine.

Theory of operation. What is freed stays with glibc's allocator wherever something above it is still in use, and each thread has
an arena of its own: a process in which every buffer has been full once looks as if all of them were, for ever. Asked to
(`malloc_trim`), glibc gives back every page that is free. So the commands that run for months ask it now and then. A library
must not, since the process belongs to somebody else.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

TRIM_SECONDS: Final = 30.0
"""Between two times. One takes about half a millisecond for each 10 MiB that it gives back."""


@contextmanager
def giving_back(every: float = TRIM_SECONDS, *, keep: int = 0) -> Iterator[None]:
    """As long as it lasts, have a thread give back what is free; nothing where there is no glibc.

    `keep` bytes at the top of the heap stay: a process that will need so much again soon would only fetch them back.
    """
    trim = _trim()
    if trim is None:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_give_back, args=(trim, stop, every, keep), daemon=True, name="kvevents-allocator")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _give_back(trim: Callable[[int], int], stop: threading.Event, every: float, keep: int) -> None:
    while not stop.wait(every):
        trim(keep)


def _trim() -> Callable[[int], int] | None:
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    trim: Callable[[int], int] = found
    return trim
