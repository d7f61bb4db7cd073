"""The batches that can be replayed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TypeAlias

Numbered: TypeAlias = tuple[int, bytes]
"""A batch as it is sent: its number and its payload."""


class ReplayBuffer:
    """The last `steps` published batches, in order. Numbers rise but may have holes. Safe to use from several threads."""

    def __init__(self, steps: int) -> None:
        self._kept: deque[Numbered] = deque(maxlen=steps)
        self._lock = threading.Lock()

    def extend(self, batches: Sequence[Numbered]) -> None:
        """Add batches, pushing out the oldest. Called before they are sent live, so that what was seen can be asked for."""
        with self._lock:
            self._kept.extend(batches)

    def since(self, start: int) -> list[Numbered]:
        """Every kept batch numbered `start` or higher; when `start` is older than the buffer, from the oldest kept."""
        with self._lock:
            if not self._kept or start > self._kept[-1][0]:
                return []
            # Without holes this many batches are wanted; with holes, fewer, and the surplus is cut off below.
            wanted = self._kept[-1][0] - start + 1
            found = list(islice(reversed(self._kept), wanted))
        while found and found[-1][0] < start:
            found.pop()
        found.reverse()
        return found

    def size(self) -> tuple[int, int]:
        """Number of batches and of payload bytes."""
        kept = self.since(0)
        return len(kept), sum(len(payload) for _, payload in kept)

    def forget_lock(self) -> None:
        """For a forked child, in which the thread that held the lock does not exist."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)
