"""Lookups, in one process: `python -m benchmarks.indexing.matching match WHO CALLS`."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle, islice, repeat
from typing import Final

from benchmarks.indexing.sides import SIDES, Lookup, Side
from benchmarks.indexing.workload import BLOCK_SIZE, Chain, chain, percentile, pieces
from benchmarks.processes import send_line

EVENT: Final = 512
TURNS: Final = 384
"""Prompts of 32,768 tokens that are asked for in turn: 0.8 M blocks, more than any cache holds."""


@dataclass(frozen=True)
class Shape:
    """Who holds how much of the prompt that is looked up."""

    name: str
    tokens: int
    workers: int
    block_size: int = BLOCK_SIZE
    staggered: bool = False

    def fill(self, side: Side, whole: Chain) -> None:
        """Let every worker have all of it, or each one a part that is longer than that of the one before."""
        events = [side.encoded(piece) for piece in pieces(whole, EVENT)]
        for worker in range(self.workers):
            if self.staggered:
                part = whole.prefix(-(-len(whole.hashes) * (worker + 1) // self.workers))
                events = [side.encoded(piece) for piece in pieces(part, EVENT)]
            side.apply(worker, events)


SHAPES: Final = (
    *(Shape(f"1024_{workers}", 1_024, workers) for workers in (1, 16, 256)),
    *(Shape(f"32768_{workers}", 32_768, workers) for workers in (1, 16, 256)),
    Shape("staggered", 32_768, 256, staggered=True),
    Shape("long_16", 240_000, 96),
    Shape("long_64", 240_000, 96, block_size=64),
)


def timed(calls: Iterable[Lookup]) -> list[int]:
    """Nanoseconds of each call, the clock's own part in it."""
    clock, times = time.perf_counter_ns, []
    for call in calls:
        before = clock()
        call()
        times.append(clock() - before)
    return times


def match(contender: str, count: int) -> dict[str, float]:
    """p50 and p99 of each shape, of `count` calls of 32,768 tokens and more of shorter ones."""
    found: dict[str, float] = {}
    draw = random.Random(2)  # noqa: S311 - test data
    for shape in SHAPES:
        side, whole = SIDES[contender](), chain(draw, shape.tokens // shape.block_size, block_size=shape.block_size)
        shape.fill(side, whole)
        times = max(100, int(count * (32_768 / shape.tokens) ** 0.5))
        for name, call in side.lookups(whole).items():
            found |= _percentiles(f"{name}_{shape.name}", timed(repeat(call, times)))
    return found | _in_turn(SIDES[contender](), draw, count)


def _in_turn(side: Side, draw: random.Random, count: int) -> dict[str, float]:
    """Another prompt with each call, of one worker."""
    calls = []
    for _ in range(TURNS):
        whole = chain(draw)
        side.apply(0, [side.encoded(piece) for piece in pieces(whole, EVENT)])
        calls.append(side.lookups(whole))
    names = calls[0]
    return {
        key: value
        for name in names
        for key, value in _percentiles(f"{name}_turns", timed(islice(cycle(each[name] for each in calls), count))).items()
    }


def _percentiles(name: str, times: list[int]) -> dict[str, float]:
    return {f"{name}_p50": percentile(times, 50), f"{name}_p99": percentile(times, 99)}


if __name__ == "__main__":
    _, name, calls = sys.argv[1:]
    send_line(match(name, int(calls)))
