"""`python -m benchmarks.history`: what compaction costs a publisher, and what a late joiner gets for it.

Two things, each shown beside its limit. The publisher's CPU per batch with and without compaction, in one run,
interleaved; batches store blocks and remove as many old ones, once the buffer and the cache are full. And a consumer that joins
after `--batches` batches of history, when 50,000 blocks are live: how long until it is exact, and how many bytes it reads, over
those of the live set encoded once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from benchmarks.report import machine
from kvevents import Source, Subscriber
from kvevents.events import BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher import ZmqEventPublisher
from kvevents.wire import encode_batch

ANY: Final = "tcp://127.0.0.1:*"
SIZE: Final = 16
LIVE: Final = 50_000
CHAIN: Final = 512
"""Blocks of a chain: 8,192 tokens."""
STEPS: Final = 1_000
"""Batches kept for replay in the first part, so that the buffer is soon full."""
BATCHES_PER_SECOND: Final = 200
"""What a busy engine sends."""
MAX_SHARE: Final = 0.01
"""Of a core, that compaction may take beside publishing at that rate."""
PAUSE: Final = 0.002
DEADLINE: Final = 30.0
"""Seconds that a late joiner has."""
_SPREAD: Final = 0x9E3779B97F4A7C15


class Engine:
    """A cache of chains, of which the oldest goes, its tail first, when a new one needs the room."""

    def __init__(self, blocks: int, room: int) -> None:
        self._blocks = blocks
        self._room = room
        self._next = 1
        self._live: deque[list[int]] = deque()
        self._held = 0

    def batches(self, count: int) -> Iterator[KVEventBatch]:
        """So many, each of which stores `blocks` blocks."""
        for number in range(count):
            yield KVEventBatch(float(number), self._events())

    def live_bytes(self) -> int:
        """The size of the live blocks, encoded once: a store for each chain."""
        stores = [self._store(chain, None) for chain in self._live if chain]
        return len(encode_batch(KVEventBatch(0.0, [*stores])))

    def _events(self) -> list[KVEvent]:
        if not self._live or len(self._live[-1]) >= CHAIN:
            self._live.append([])
        chain = self._live[-1]
        parent = chain[-1] if chain else None
        fresh = [number * _SPREAD % 2**64 for number in range(self._next, self._next + self._blocks)]
        self._next += self._blocks
        chain += fresh
        self._held += self._blocks
        gone: list[KVEvent] = []
        while self._held > self._room:
            gone.append(BlockRemoved([self._live[0].pop()], "GPU", 0))
            self._held -= 1
            if not self._live[0]:
                self._live.popleft()
        return [*gone, self._store(fresh, parent)]

    @staticmethod
    def _store(hashes: list[int], parent: int | None) -> BlockStored:
        tokens = [(value + place) % 60_000 for value in hashes for place in range(SIZE)]
        return BlockStored(hashes, parent, tokens, SIZE, medium="GPU", group_idx=0)


def cpu_per_batch(blocks: int, count: int, *, compact: bool) -> float:
    """Microseconds of CPU that the publisher's threads take for a batch, buffer and cache being full."""
    engine = Engine(blocks, 4_000)
    publisher = ZmqEventPublisher(endpoint=ANY, replay_endpoint=ANY, buffer_steps=STEPS, compact=compact)
    try:
        _publish(publisher, engine.batches(2 * STEPS + 4_000 // blocks))
        batches = list(engine.batches(count))
        before, caller = time.process_time(), time.thread_time()
        _publish(publisher, iter(batches))
        return ((time.process_time() - before) - (time.thread_time() - caller)) / count * 1e6
    finally:
        publisher.shutdown()


def _publish(publisher: ZmqEventPublisher, batches: Iterator[KVEventBatch]) -> None:
    for number, batch in enumerate(batches):
        publisher.publish(batch)
        if number % 1_000 == 0:
            _drain(publisher)
    _drain(publisher)


def _drain(publisher: ZmqEventPublisher) -> None:
    while publisher.stats().queued:
        time.sleep(PAUSE)


def late_joiner(batches: int) -> tuple[float, int, int, int]:
    """Seconds until a consumer that comes after so many batches is EXACT; bytes that it read, of the live set, blocks."""
    engine = Engine(1, LIVE)
    publisher = ZmqEventPublisher(endpoint=ANY, replay_endpoint=ANY, buffer_steps=100, compact=True)
    try:
        _publish(publisher, engine.batches(batches))
        index, read, began = PrefixIndex(), 0, time.monotonic()
        source = Source(publisher.endpoint, publisher.replay_endpoint, name="engine")
        with Subscriber(source, decode=False) as subscriber:
            last = batches - 1
            while subscriber.status().last_seq < last or subscriber.trust().name != "EXACT":
                if last < batches <= subscriber.status().last_seq + 1:
                    last = batches  # it has caught up: a live batch has to confirm what replay has brought
                    publisher.publish(KVEventBatch(float(batches), []))
                if time.monotonic() > began + DEADLINE:
                    sys.exit(f"not exact after {DEADLINE:g} s: {subscriber.status()}, {publisher.stats().history}")
                for delivery in subscriber.receive_many(timeout=0.01):
                    subscriber.report(delivery, index.apply(delivery).report)
                    read += len(getattr(delivery, "payload", b""))
        return time.monotonic() - began, read, engine.live_bytes(), index.stats().blocks
    finally:
        publisher.shutdown()


def main() -> int:
    """Print both. Returns 0 when all that is judged was met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history", description=__doc__)
    parser.add_argument(
        "--batches", type=int, default=1_000_000, help="of history before the late joiner (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=5, help="of each way to publish (default: %(default)s)")
    options = parser.parse_args()
    print(machine())
    met = True
    for blocks, count in ((1, 40_000), (32, 8_000)):
        pairs = [
            (cpu_per_batch(blocks, count, compact=False), cpu_per_batch(blocks, count, compact=True))
            for _ in range(options.runs)
        ]
        plain, compacted = (statistics.median(values) for values in zip(*pairs, strict=True))
        share = (compacted - plain) * BATCHES_PER_SECOND / 1e6
        good = share <= MAX_SHARE
        met &= good
        print(
            f"publisher CPU per batch of {blocks:>2} stored and removed: {plain:.2f} us, compacted {compacted:.2f} us; at "
            f"{BATCHES_PER_SECOND} batches/s {share:.2%} of a core (<= {MAX_SHARE:.0%}): {'met' if good else 'MISSED'}"
        )
    seconds, read, live, blocks = late_joiner(options.batches)
    good = seconds <= 1.0 and read <= 3 * live
    met &= good
    print(
        f"late joiner after {options.batches:,} batches, {blocks:,} blocks live: exact in {seconds:.2f} s (<= 1), read "
        f"{read:,} bytes, {read / live:.2f} of the live set encoded once (<= 3): {'met' if good else 'MISSED'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
