"""Memory that is there before it is needed.

A virtual machine may give unused pages back to its host (free page reporting), and the next process that takes them waits
until the host has found others. On the machine of our figures that costs 1.6 to 4 ms for a huge page instead of 0.24, where to
index the blocks that fit there takes 7, and which process it hits depends on what ran before.
"""

from __future__ import annotations

import mmap
import sys
from typing import Final

_ENOUGH: Final = 1 << 30
"""Bytes: more than either side of a trial with 2 M blocks takes, messages that wait included."""


def have(size: int = _ENOUGH) -> None:
    """Take so much memory from the host, and leave it to the next process that asks the system. It stays for a few seconds.

    Private memory, since what is shared comes in small pages, and the system then hands out other ones than those first.
    """
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        if sys.platform == "linux":
            taken.madvise(mmap.MADV_HUGEPAGE)
        for page in range(0, size, mmap.PAGESIZE):
            taken[page] = 1
