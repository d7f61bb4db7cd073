"""Blocks per second that an index takes in, in its own process: `python -m benchmarks.indexing.applying apply WHO ...`."""

from __future__ import annotations

import sys
import time
from typing import Final

from benchmarks.indexing.sides import SIDES
from benchmarks.indexing.workload import CHAIN, SPREADS, chains, pieces
from benchmarks.processes import say

EVENTS: Final = (1, 32, 512)
"""Blocks per event."""


def apply(who: str, blocks: int, single: int, spread: int) -> dict[str, float]:
    """Blocks per second by size of event. Of events of one block there are `single`, into an index that has the others."""
    whole = list(chains(blocks, spread=list(SPREADS)[spread]))
    found: dict[str, float] = {}
    for per_event in EVENTS:
        side = SIDES[who]()
        timed = whole
        if per_event == 1:
            timed, before = whole[: single // CHAIN], whole[single // CHAIN :]
            side.apply(0, [side.encoded(piece) for chain in before for piece in pieces(chain, EVENTS[-1])])
        events = [side.encoded(piece) for chain in timed for piece in pieces(chain, per_event)]
        count = sum(len(chain.hashes) for chain in timed)
        began, cpu = time.perf_counter(), time.process_time()
        side.apply(0, events)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        found |= {f"rate_{per_event}": count / wall, f"cpu_{per_event}": cpu / count * 1e9}
        del side, events
    return found


if __name__ == "__main__":
    _, name, *numbers = sys.argv[1:]
    say(apply(name, *map(int, numbers)))
