"""`python -m benchmarks.unread`: what answers to nobody cost in memory, and what it costs to count them.

In processes of their own, with frames counted as they are and, for comparison, all of them copied and bounded by their number
alone (`--rounds` times in turns): how much a publisher grows while `READERS` ask for its history and read nothing of it, when
its buffer is short, so that each pipe has room for a dozen snapshots; and how long a reader needs for batches of several sizes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import zmq

from benchmarks.report import machine
from kvevents.events import BlockStored, KVEventBatch
from kvevents.publisher import PublisherSettings, ZmqEventPublisher
from kvevents.publisher.settings import ReplayServerSettings

ANY: Final = "tcp://127.0.0.1:*"
READERS: Final = 20
REQUESTS: Final = 8
"""Of each: one that is answered, and those that may wait."""
LIVE: Final = 50_000
STEPS: Final = 20
SIZES: Final = ((1, 10_000), (300, 2_000), (2_000, 300), (60_000, 10))
"""Blocks of a batch, and batches."""
QUIET_SECONDS: Final = 1.0
"""Without progress, after which all that will be sent to readers that read nothing was sent."""
TIMES: Final = 5


def main() -> int:
    """Both ways in turns; or one of them, in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unread", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", choices=["counted", "copied"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once is None:
        print(machine())
        for number in range(options.rounds):
            for way in ("counted", "copied") if number % 2 else ("copied", "counted"):
                subprocess.run([sys.executable, "-m", "benchmarks.unread", "--once", way], check=True)  # noqa: S603 - ourselves
        return 0
    replay = ReplayServerSettings() if options.once == "counted" else ReplayServerSettings(large_frame_bytes=sys.maxsize)
    settings = PublisherSettings(replay=replay)
    print(
        f"{options.once}: {READERS} who read nothing +{_growth(settings)} MiB",
        *(_speed(*size, settings) for size in SIZES),
        sep=", ",
        flush=True,
    )
    return 0


def _publisher(steps: int, blocks: int, batches: int, settings: PublisherSettings) -> ZmqEventPublisher:
    """That has published so many."""
    publisher = ZmqEventPublisher(0, ANY, ANY, buffer_steps=steps, max_queue_size=0, settings=settings)
    for number in range(batches):
        first = number * blocks
        tokens = [(first * 7 + at) % 128_000 for at in range(16 * blocks)]
        publisher.publish(KVEventBatch(float(number), [BlockStored([*range(first, first + blocks)], None, tokens, 16)]))
    while publisher.stats().queued:
        time.sleep(0.01)
    return publisher


def _growth(settings: PublisherSettings) -> int:
    """MiB, resident."""
    publisher, context = _publisher(STEPS, 10, LIVE // 10, settings), zmq.Context()
    before = _resident()
    readers = []
    for _ in range(READERS):
        reader = context.socket(zmq.DEALER)
        reader.set(zmq.RCVHWM, 1)
        reader.set(zmq.RCVBUF, 4_096)
        reader.connect(publisher.replay_endpoint or "")
        for _ in range(REQUESTS):
            reader.send_multipart([b"", bytes(8)])
        readers.append(reader)
    sent, since = -1, time.monotonic()
    while time.monotonic() - since < QUIET_SECONDS:
        time.sleep(0.05)
        if publisher.stats().replay.batches != sent:
            sent, since = publisher.stats().replay.batches, time.monotonic()
    grown = _resident() - before
    for reader in readers:
        reader.close(linger=0)
    publisher.shutdown()
    context.term()
    return grown


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def _speed(blocks: int, batches: int, settings: PublisherSettings) -> str:
    """The quickest of several answers."""
    publisher, context = _publisher(batches, blocks, batches, settings), zmq.Context()
    best = float("inf")
    for _ in range(TIMES):
        with context.socket(zmq.DEALER) as reader:
            reader.set(zmq.RCVHWM, 0)
            reader.connect(publisher.replay_endpoint or "")
            began = time.perf_counter()
            reader.send_multipart([b"", bytes(8)])
            while reader.recv_multipart()[-1]:
                pass
            best = min(best, time.perf_counter() - began)
    size = publisher.stats().buffered_bytes
    publisher.shutdown()
    context.term()
    return f"{batches:,} batches of {size / batches / 1000:,.1f} KB {best:.3f} s"


if __name__ == "__main__":
    sys.exit(main())
