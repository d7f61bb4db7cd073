"""Memory, as growth of what a process has resident: `python -m benchmarks.indexing.footprint churn WHO BLOCKS TIMES`."""

from __future__ import annotations

import sys
from typing import Final

from benchmarks.indexing.holders import HOLDERS
from benchmarks.processes import send_line

WARM: Final = 3
"""Rounds after which memory shall grow no more."""


def churn(contender: str, blocks: int, times: int) -> dict[str, float]:
    """Growth in MB from the end of the third round to the end of the last, when all is stored and removed in every round."""
    sizes = {}
    with HOLDERS[contender]("churn") as holder:
        for number in range(1, times + 1):
            holder.take(blocks)
            if number in {WARM, times}:
                sizes[number] = holder.resident()
    return {"growth": (sizes[times] - sizes[WARM]) / 1e6, "after": sizes[times] / 1e6}


if __name__ == "__main__":
    _, name, blocks, times = sys.argv[1:]
    send_line(churn(name, int(blocks), int(times)))
