"""What this process has open: descriptors and threads."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

DEADLINE: Final = 60.0
"""Seconds to wait for libzmq, which closes the descriptors of a socket in threads of its own, after `close` has returned."""


def list_descriptors() -> list[str]:
    """Return the target of each open descriptor of this process."""
    gc.collect()
    return sorted(str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.exists())


def count_resources() -> tuple[int, int]:
    """Return the numbers of open descriptors and of threads of this process."""
    return len(list_descriptors()), threading.active_count()


def settle() -> tuple[int, int]:
    """Return the numbers of descriptors and threads once what earlier tests have closed is gone."""
    until = time.monotonic() + DEADLINE
    newest = count_resources()
    while newest != (newest := _count_after_a_moment()):
        assert time.monotonic() < until, f"descriptors and threads change for {DEADLINE:g} seconds"
    return newest


def _count_after_a_moment() -> tuple[int, int]:
    time.sleep(0.02)
    return count_resources()


@contextmanager
def leave_nothing_open() -> Iterator[None]:
    """Check that no more descriptors and threads stay open than there were, as soon as those of libzmq are closed."""
    descriptors, threads = settle()
    yield
    until = time.monotonic() + DEADLINE
    while (now := count_resources())[0] > descriptors or now[1] > threads:
        assert time.monotonic() < until, f"{now} descriptors and threads, not {descriptors, threads}: {list_descriptors()}"
        time.sleep(0.01)
