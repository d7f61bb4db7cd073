"""Lookups while another thread writes: `python -m benchmarks.indexing.reading read WHO CALLS`."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from threading import Event, Thread
from typing import Final

from benchmarks.indexing.payloads import in_maps
from benchmarks.indexing.sides import Ours
from benchmarks.indexing.workload import BLOCK_SIZE, CHAIN, Removal, chain, chains, percentile, pieces
from benchmarks.processes import say

RATE: Final = 1_000_000
"""Blocks per second, half of them stored and half removed again."""
POOL: Final = 1 << 18
WORKERS: Final = 16
PAUSE: Final = 0.0005
"""Seconds between lookups, so that the writer, which needs the interpreter's lock too, is held up by none but the index."""


class Writer:
    """Stores and removes the same blocks at a pace."""

    def __init__(self, side: Ours, per_event: int) -> None:
        whole = [piece for each in chains(POOL, seed=5) for piece in pieces(each, per_event)]
        self._payloads = [in_maps(piece) for piece in whole] + [in_maps(Removal(piece.hashes[::-1])) for piece in whole[::-1]]
        self._apply, self._per_event = side.index.apply_payload, per_event
        self.rate = 0.0

    def run(self, stop: Event) -> None:
        """Until told to stop; `rate` is what was reached."""
        apply, pause, stream = self._apply, self._per_event / RATE, ("writer", 0)
        began = due = time.perf_counter()
        seq = 0
        for seq, payload in enumerate(cycle(self._payloads)):
            apply(stream, 0, seq, payload)
            due += pause
            if (early := due - time.perf_counter()) > 0:
                time.sleep(early)
            if stop.is_set():
                break
        self.rate = seq * self._per_event / (time.perf_counter() - began)


@contextmanager
def _running(writer: Writer | None) -> Iterator[None]:
    stop = Event()
    thread = Thread(target=writer.run if writer else lambda _: None, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def read(who: str, calls: int) -> dict[str, float]:
    """p50 and p99 of lookups of two lengths, beside a writer of events of two sizes; `idle` has no writer."""
    found: dict[str, float] = {}
    draw = random.Random(6)  # noqa: S311 - test data
    for per_event in (32, 512):
        side, whole = Ours(), chain(draw)
        payloads = [side.encoded(piece) for piece in pieces(whole, 512)]
        for worker in range(WORKERS):
            side.apply(worker, payloads)
        writer = Writer(side, per_event)
        for tokens in (1_024, CHAIN * BLOCK_SIZE):
            match = side.lookups(whole.prefix(tokens // BLOCK_SIZE))["match"]
            times = []
            with _running(writer if who == "ours" else None):
                for _ in range(calls):
                    time.sleep(PAUSE)
                    before = time.perf_counter_ns()
                    match()
                    times.append(time.perf_counter_ns() - before)
            name = f"{tokens}_{per_event}"
            found |= {f"p50_{name}": percentile(times, 50), f"p99_{name}": percentile(times, 99), f"rate_{name}": writer.rate}
    return found


if __name__ == "__main__":
    _, name, calls = sys.argv[1:]
    say(read(name, int(calls)))
