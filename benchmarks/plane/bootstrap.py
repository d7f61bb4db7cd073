"""`python -m benchmarks.plane bootstrap`: how soon a replica is complete that has everything to read.

A plane's partitions hold the tail that came after its newest snapshot, which has all blocks. Both are made here as replicas and
bridges make them: an index and the ledgers of its partitions, fed with what a bridge writes; the snapshot goes to the object
store, and then the tail, page by page, into the partitions. A replica in a process of its own is timed from its start, with
Python and all, and its digests are compared with those of the index that was here all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.history import Engine
from benchmarks.indexing.procfs import cpu_of_threads
from benchmarks.processes import Peer, send_line
from benchmarks.report import machine
from tools.nats_process import Server, one_server

NAME: Final = "bootstrap"
BLOCKS: Final = 4_000_000
TAIL: Final = 100_000
PARTITIONS: Final = 4
ROOM: Final = 4 << 30
"""Of all partitions together, which servers reserve."""
ENGINES: Final = 16
STORE: Final = 500
"""Blocks of a batch while caches fill up."""
PAGE: Final = 250
"""Batches of a page of the tail."""
MOST_SECONDS: Final = 10.0
LOOK: Final = 0.01
DEADLINE: Final = 300.0
MODULE: Final = "plane.bootstrap"


class Former:
    """What a plane's log says, and the index of a reader that has read all of it."""

    def __init__(self, blocks: int, tail: int, partitions: int = PARTITIONS) -> None:
        from kvevents.index import PrefixIndex  # noqa: PLC0415 - each process loads only what its role is about
        from kvevents.plane.layout import Layout  # noqa: PLC0415 - as above
        from kvevents.plane.partition_state import PartitionState  # noqa: PLC0415 - as above

        self.index = PrefixIndex()
        self.layout = Layout(NAME, partitions)
        self.states = {partition: PartitionState() for partition in range(partitions)}
        self._each = blocks // ENGINES
        self._tail = tail // ENGINES
        self._caches = [Engine(STORE, self._each) for _ in range(ENGINES)]
        self._numbers = [0] * ENGINES

    @staticmethod
    def card(number: int) -> Any:
        """Of an engine."""
        from kvevents.service.registration import Registration  # noqa: PLC0415 - as above

        return Registration(instance=f"e{number}", endpoint=f"tcp://127.0.0.1:{20_000 + number}", model="m")

    def fill(self) -> Iterator[tuple[int, list[Any]]]:
        """By partition what is said until all caches are full."""
        import msgspec  # noqa: PLC0415 - as above

        from kvevents.plane.records import JoinRecord  # noqa: PLC0415 - as above

        for number, cache in enumerate(self._caches):
            key = self.card(number).key
            partition = self.layout.partition_of(key[0])
            yield partition, [JoinRecord(key[0], key[1], msgspec.json.encode(self.card(number)))]
            cache._next = 1 + (number << 40)  # noqa: SLF001 - no two engines hold the same
            yield partition, list(self._batches(number, self._each // STORE))

    def tail(self) -> Iterator[tuple[int, list[Any]]]:
        """By partition what is said after that: of each batch one block stored and one removed."""
        for number, cache in enumerate(self._caches):
            cache._blocks = 1  # noqa: SLF001 - of a batch
            partition = self.layout.partition_of(self.card(number).key[0])
            for first in range(0, self._tail, PAGE):
                yield partition, list(self._batches(number, min(PAGE, self._tail - first)))

    def _batches(self, number: int, count: int) -> Iterator[Any]:
        from kvevents.plane.records import BatchRecord  # noqa: PLC0415 - as above
        from kvevents.wire import encode_batch  # noqa: PLC0415 - as above

        key = self.card(number).key
        for batch in self._caches[number].batches(count):
            yield BatchRecord(key[0], key[1], 0, self._numbers[number], False, encode_batch(batch))
            self._numbers[number] += 1

    def take(self, partition: int, position: int, page: Any) -> None:
        """A page is in the partition."""
        from kvevents.stream import RawBatch  # noqa: PLC0415 - as above

        found = self.states[partition].apply(position, page)
        self.index.apply_many([event for event in found if isinstance(event, RawBatch)])


async def make(server: Server, former: Former) -> dict[str, str]:
    """The plane with its snapshots and its tail; digests by stream."""
    from kvevents.plane.connection import open_client  # noqa: PLC0415 - as above
    from kvevents.plane.layout import (  # noqa: PLC0415 - as above
        create_plane,
        partition_info,
    )
    from kvevents.plane.records import VERSION, Page, encode_page  # noqa: PLC0415 - as above
    from kvevents.plane.settings import PlaneSettings  # noqa: PLC0415 - as above
    from kvevents.plane.snapshots import Snapshots, capture  # noqa: PLC0415 - as above

    partitions = former.layout.partitions
    settings = PlaneSettings(servers=(server.url,), name=NAME, partitions=partitions, partition_bytes=ROOM // partitions)
    async with open_client(settings, name="bench") as client:
        js = client.jetstream(timeout=30.0)
        layout = await create_plane(js, settings)
        states = {partition: await partition_info(js, layout, partition) for partition in former.states}

        def page(partition: int, records: list[Any]) -> Any:
            return Page(VERSION, "bench", time.time(), records, states[partition].stream_id)

        # What the snapshot has is in no partition any more: page 1 stands for all that was purged.
        for partition in former.states:
            await js.publish(layout.subject(partition), encode_page(page(partition, [])))
        for partition, records in former.fill():
            former.take(partition, 1, page(partition, records))
        size = 0
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "index")
            for partition, state in former.states.items():
                taken = capture(partition, state, {}, former.index, path)
                size += (await Snapshots(js, layout).save(taken, path, 0, "bench", states[partition].stream_id)).bytes
        found = former.index.stats().blocks
        pages = batches = 0
        for partition, records in former.tail():
            written = page(partition, records)
            acknowledged = await js.publish(layout.subject(partition), encode_page(written))
            former.take(partition, acknowledged.seq, written)
            pages, batches = pages + 1, batches + len(records)
    print(f"   {found:,} blocks in snapshots of {size / 1e6:,.0f} MB, {batches:,} batches on {pages:,} pages", flush=True)
    return {f"{source} {rank}": digest for source, rank, digest in all_digests(former.index)}


# --- the replica ------------------------------------------------------------------------------------------------------------


def replica(url: str) -> None:
    """Ours, until it is complete."""
    asyncio.run(_replica(url))
    os._exit(0)


async def _replica(url: str) -> None:
    from kvevents.cli.process import configure_threads  # noqa: PLC0415 - as above
    from kvevents.index import PrefixIndex  # noqa: PLC0415 - as above
    from kvevents.plane.settings import PlaneSettings  # noqa: PLC0415 - as above
    from kvevents.service.fleet import Fleet  # noqa: PLC0415 - as above
    from kvevents.service.replica import Replica  # noqa: PLC0415 - as above

    configure_threads()
    fleet = Fleet(PrefixIndex(), max_sources=1_000)
    fleet.follower.start()
    found = Replica(PlaneSettings(servers=(url,), name=NAME), "replica", fleet, snapshot_seconds=1e6, memory_limit=None)
    began = time.monotonic()
    running = asyncio.create_task(found.run())
    while not found.is_complete and not running.done():  # noqa: ASYNC110 - no event signals it
        await asyncio.sleep(LOOK)
    took = time.monotonic() - began
    send_line({"took": took, "fault": found.fault})
    assert found.build is not None
    digests = {f"{source} {rank}": digest for source, rank, digest in all_digests(found.build.index)}
    send_line({"digests": digests, "begun": f"snapshots of {len(found.build.loaded_snapshots)} partitions"})


def all_digests(index: Any) -> list[tuple[str, int, str]]:
    """Of every stream of an index."""
    return [(info.source, info.rank, index.digest((info.source, info.rank))) for info in index.workers()]


ROLES: Final[dict[str, Callable[..., None]]] = {"replica": replica}


def trial(server: Server, digests: dict[str, str]) -> dict[str, float]:
    """One replica from nothing. Ends the program when it holds something else."""
    began = time.monotonic()
    with Peer(MODULE, "replica", server.url) as peer:
        report = peer.receive()
        took, cpu = time.monotonic() - began, cpu_of_threads(peer.pid)
        held = peer.receive()
        if held["digests"] != digests:
            sys.exit(f"the replica, begun with {held['begun']}, holds something else: {report['fault']}")
    return {"seconds": took, "without the start of Python": report["took"], "CPU": cpu}


def main(arguments: list[str] | None = None) -> int:
    """Print the figures. Returns 0 when all that is judged was met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plane bootstrap", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of the snapshot (default: %(default)s)")
    parser.add_argument("--tail", type=int, default=TAIL, help="batches behind it (default: %(default)s)")
    options = parser.parse_args(arguments)
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder, one_server(Path(folder)) as server:
        digests = asyncio.run(make(server, Former(options.blocks, options.tail)))
        runs = []
        for _ in range(options.runs):
            runs.append(trial(server, digests))
            print("   " + ", ".join(f"{name} {value:.1f}" for name, value in runs[-1].items()), flush=True)
    seconds = statistics.median(run["seconds"] for run in runs)
    met = seconds < MOST_SECONDS
    print(
        f"a replica from nothing, {options.blocks:,} blocks and {options.tail:,} batches of tail: exact in {seconds:.1f} s "
        f"(< {MOST_SECONDS:g}): {'met' if met else 'MISSED'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] in ROLES:
        ROLES[sys.argv[1]](sys.argv[2])
    else:
        sys.exit(main())
