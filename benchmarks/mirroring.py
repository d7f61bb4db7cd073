"""`python -m benchmarks.mirroring`: what it costs to know the digest of a stream, by an index that nobody asks for prompts.

Engines with full caches of several sizes store 32 blocks with each batch and remove as many. Their payloads are applied to
mirrors, as relays and publishers with heartbeats have them, and to an index of which any prompt may be asked, in turn. Told are
the CPU time of a batch and the bytes of a block.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Final

from benchmarks.history import Engine
from benchmarks.report import machine
from kvevents.index import PrefixIndex
from kvevents.wire import encode_batch

BLOCKS: Final = 32
"""Stored by each batch."""
ROOMS: Final = (4_000, 50_000, 300_000, 1_000_000)
COUNT: Final = 6_000
"""Batches of which the time is taken."""
RUN: Final = 64
"""Batches that are applied together, as a relay does."""


def cost(index: PrefixIndex, filling: Sequence[bytes], churn: Sequence[bytes]) -> tuple[float, float]:
    """Microseconds of CPU for a batch, and bytes of a block."""
    began = 0.0
    for payloads, first in ((filling, 0), (churn, len(filling))):
        began = time.process_time()
        for at in range(0, len(payloads), RUN):
            index.apply_payloads("engine", 0, first + at, payloads[at : at + RUN])
    spent = time.process_time() - began
    stats = index.stats()
    return spent / len(churn) * 1e6, stats.bytes / stats.blocks


def main() -> int:
    """Print the figures, which are judged by nobody."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mirroring", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each (default: %(default)s)")
    runs = parser.parse_args().runs
    print(machine())
    print(f"{'blocks':>10}  {'asked by nobody: us':>20} {'bytes':>6}  {'asked by anybody: us':>20} {'bytes':>6}")
    for room in ROOMS:
        engine = Engine(BLOCKS, room)
        filling, churn = ([encode_batch(batch) for batch in engine.batches(count)] for count in (room // BLOCKS, COUNT))
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(runs):
            for asked, costs in found.items():
                costs.append(cost(PrefixIndex(asked=asked), filling, churn))
        told = [statistics.median(column) for costs in found.values() for column in zip(*costs, strict=True)]
        print(f"{room:>10,}  {told[0]:>20.1f} {told[1]:>6.0f}  {told[2]:>20.1f} {told[3]:>6.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
