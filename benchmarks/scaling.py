"""`python -m benchmarks.scaling`: what a block costs as the index grows, beside what the machine's memory costs by itself.

From 10^4 to 10^8 blocks of one worker, as far as memory goes. At each size, more blocks are applied and timed, in events of
three sizes; the bound is two reads of random cache lines for each block, in a table as large as the index, independent of each
other so that the processor may overlap them.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.indexing import holders
from benchmarks.indexing.matching import timed
from benchmarks.indexing.workload import CHAIN, chain, percentile, pieces

SIZES: Final = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
STEP: Final = 1_000_000
"""Blocks that are made ready at a time."""
PROBE: Final = 32
"""Chains that are timed at most at each size and for each size of event: 65,536 blocks."""
SHARE: Final = 0.7
"""Of the memory that is free when it starts."""
LINES: Final = 1 << 20
"""Random cache lines that are read."""


def available() -> int:
    """Bytes that the system could still give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def bound(size: int) -> float:
    """Nanoseconds of two random cache lines in a table of `size` bytes."""
    table = np.ones(max(1, size // 64) * 8, dtype=np.uint64)
    at = np.random.default_rng(7).integers(0, len(table) // 8, LINES) * 8
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        table.take(at)
        best = min(best, time.perf_counter() - began)
    return 2 * best / LINES * 1e9


def probe(holder: holders.OurHolder, draw: random.Random, count: int) -> dict[str, float]:
    """Nanoseconds per block by size of event, and microseconds of a lookup of 32,768 tokens, another each time."""
    found: dict[str, float] = {}
    lookups = []
    for per_event in (1, 32, 512):
        fresh = [chain(draw) for _ in range(count)]
        events = [holder.side.encoded(piece) for each in fresh for piece in pieces(each, per_event)]
        began = time.perf_counter()
        holder.side.apply(0, events)
        found[f"{per_event}"] = (time.perf_counter() - began) / (count * CHAIN) * 1e9
        lookups += [holder.side.lookups(each)["array"] for each in fresh]
    return found | {"match": percentile(timed(draw.sample(lookups, len(lookups))), 50)}


def main() -> None:
    """One line for each size."""
    limit, draw, held = available() * SHARE, random.Random(8), 0  # noqa: S311 - test data
    print(f"{'blocks':>12}  {'B/block':>8}  {'ns/block of 1':>13}  {'32':>6}  {'512':>6}  {'bound':>6}  {'match us':>8}")
    with holders.ours("chains", CHAIN, 512) as holder:
        holder.take(CHAIN)
        base = holder.resident()
        for size in SIZES:
            # The index, and beside it the table of the bound; what a block takes is known from the sizes before.
            if held and 2 * size * (holder.resident() - base) / held > limit:
                print(f"{size:12,}  more than {SHARE:.0%} of the free memory")
                break
            while held < size:
                held += holder.take(min(STEP, size - held))
            grown = holder.resident() - base
            count = max(1, min(PROBE, held // CHAIN // 10))
            costs = probe(holder, draw, count)
            line = f"{held:12,}  {grown / held:8.1f}  {costs['1']:13.0f}  {costs['32']:6.0f}  {costs['512']:6.0f}"
            print(f"{line}  {bound(grown):6.1f}  {costs['match']:8.1f}", flush=True)
            held += 3 * count * CHAIN


if __name__ == "__main__":
    main()
