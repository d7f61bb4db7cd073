"""From the socket to visible: `python -m benchmarks.indexing.ingesting ingest WHO BLOCKS PER_EVENT`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

from benchmarks.indexing import memory, procfs
from benchmarks.indexing.feed import Feed, Prepared
from benchmarks.indexing.workload import CHAIN
from benchmarks.processes import send_line
from tools.dynamo import Service


def ready(feed: Feed, blocks: int) -> Prepared:
    """What the worker will send, with the memory for it there."""
    prepared = feed.prepare(blocks)
    memory.have()
    return prepared


def service(feed: Feed, blocks: int) -> tuple[int, float, float]:
    """Events, and seconds of the clock and of the CPU until Dynamo's service answers with the last block."""
    with Service(feed.port) as rival:
        prepared = ready(feed, blocks)
        began, cpu = time.monotonic(), procfs.cpu(rival.pid)
        feed.send()
        wall = rival.wait_for(prepared.last) - began
        return prepared.events, wall, procfs.cpu(rival.pid) - cpu


def ours(feed: Feed, blocks: int) -> tuple[int, float, float]:
    """The same of a loop that gives our index what our subscriber receives."""
    from kvevents.index import PrefixIndex  # noqa: PLC0415 - each process loads only what its trial is about
    from kvevents.stream import RawBatch, Source  # noqa: PLC0415 - as above
    from kvevents.subscriber import Subscriber  # noqa: PLC0415 - as above

    index = PrefixIndex()
    source = Source(f"tcp://127.0.0.1:{feed.port}", name="worker-1")
    with Subscriber([source], decode=False) as subscriber:
        subscriber.receive_many(timeout=0.2)  # connects
        prepared = ready(feed, blocks)
        began, cpu, seq = time.monotonic(), time.process_time(), -1
        feed.send()
        while seq < prepared.seq:
            for delivery in subscriber.receive_many(timeout=10.0):
                assert isinstance(delivery, RawBatch)
                index.apply(delivery)
                seq = delivery.seq
        assert len(index.match(prepared.last)) == 1
        return prepared.events, time.monotonic() - began, time.process_time() - cpu


_WAYS: Final[dict[str, Callable[[Feed, int], tuple[int, float, float]]]] = {
    "ours": ours,
    "service": service,
}


def ingest(contender: str, blocks: int, per_event: int) -> dict[str, float]:
    """Messages and blocks per second, and the CPU time of each, in microseconds."""
    with Feed("zmtp", "array", "chains", CHAIN, per_event) as feed:
        events, wall, cpu = _WAYS[contender](feed, blocks)
    return {
        "rate": blocks / wall,
        "messages": events / wall,
        "cpu": cpu / blocks * 1e6,
        "cpu_message": cpu / events * 1e6,
    }


if __name__ == "__main__":
    _, name, *numbers = sys.argv[1:]
    send_line(ingest(name, *map(int, numbers)))
