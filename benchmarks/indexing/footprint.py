"""Memory, as growth of what a process has resident: `python -m benchmarks.indexing.footprint TRIAL WHO ...`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Final

from benchmarks.indexing import procfs
from benchmarks.indexing.sides import SIDES
from benchmarks.indexing.workload import chains, pieces
from benchmarks.processes import say

STEPS: Final = (0.25, 0.35, 0.5, 0.7, 1.0)
"""Where memory is read, as parts of the largest size: a table that grows by doubling is met full as well as half empty."""
WARM: Final = 3
"""Rounds after which memory shall grow no more."""


def grow(who: str, blocks: int, length: int, per_event: int) -> dict[str, float]:
    """Bytes per block of one worker with `blocks` blocks in chains, the most and the least of five sizes.

    The service is not asked for more than the first size where a message has one block: that is all the same, and takes long.
    """
    from benchmarks.indexing.holders import HOLDERS  # noqa: PLC0415 - each process loads only what its trial is about

    steps = STEPS[:1] if who == "service" and per_event == 1 else STEPS
    with HOLDERS[who]("chains", length, per_event) as holder:
        holder.take(length)
        base, held, found = holder.resident(), 0, {}
        for step in steps:
            held += holder.take(int(blocks * step) - held)
            found[f"at_{held}"] = (holder.resident() - base) / held
    return found | {"worst": max(found.values()), "best": min(found.values())}


def share(who: str, blocks: int, workers: int) -> dict[str, float]:
    """Bytes per block and worker where all workers hold the same blocks, keys and all; the most and the least of five sizes."""
    side, whole = SIDES[who](), list(chains(blocks))
    events = [[side.encoded(piece) for piece in pieces(chain, 512)] for chain in whole]
    gc.collect()
    base, done, found = procfs.resident(), 0, []
    for step in STEPS:
        until = max(1, int(len(events) * step))
        for worker in range(workers):
            for chain in events[done:until]:
                side.apply(worker, chain)
        done = until
        gc.collect()
        found.append((procfs.resident() - base) / (sum(len(chain.hashes) for chain in whole[:done]) * workers))
    return {"worst": max(found), "best": min(found)}


def churn(who: str, blocks: int, times: int) -> dict[str, float]:
    """Growth in MB from the end of the third round to the end of the last, when all is stored and removed in every round."""
    from benchmarks.indexing.holders import HOLDERS  # noqa: PLC0415 - as above

    sizes = {}
    with HOLDERS[who]("churn") as holder:
        for number in range(1, times + 1):
            holder.take(blocks)
            if number in {WARM, times}:
                sizes[number] = holder.resident()
    return {"growth": (sizes[times] - sizes[WARM]) / 1e6, "after": sizes[times] / 1e6}


TRIALS: Final[dict[str, Callable[..., dict[str, float]]]] = {"grow": grow, "share": share, "churn": churn}

if __name__ == "__main__":
    trial, name, *numbers = sys.argv[1:]
    say(TRIALS[trial](name, *map(int, numbers)))
