"""`python -m benchmarks.plane latency`: from an engine's `publish` to a replica that would answer with it, at a steady pace.

Four processes on one machine: an engine with our publisher, a NATS server, a bridge, and a replica as `kvevents serve --nats`
has it. Each batch stores one block and removes one; its timestamp is the machine's monotonic clock when `publish` was called.
It is visible when the call that has brought it into the replica's index returns. The first batches do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.history import Engine
from benchmarks.indexing.procfs import cpu_of_threads
from benchmarks.processes import Peer, receive_line, send_line
from benchmarks.report import machine
from tools.nats_process import Server, one_server

PACE: Final = 10_000
ROOM: Final = 4_000
SECONDS: Final = 5
WARM_SECONDS: Final = 1
BURST: Final = 10
"""Batches that the engine publishes at a time: a step of a scheduler has events of several requests."""
P50_MS: Final = 10.0
P99_MS: Final = 50.0
MODULE: Final = "plane.latency"
NAME: Final = "latency"
_STAMP: Final = struct.Struct(">d")


# --- roles: each in a process of its own ------------------------------------------------------------------------------------


def engine(pace: int, seconds: int) -> None:
    """Publish on request."""
    from kvevents.publisher import ZmqEventPublisher  # noqa: PLC0415 - each process loads only what its role is about

    publisher = ZmqEventPublisher(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    made = Engine(1, ROOM)
    batches = list(made.batches(pace * seconds))
    send_line([publisher.endpoint, publisher.replay_endpoint])
    receive_line()
    began = time.monotonic()
    for first in range(0, len(batches), BURST):
        time.sleep(max(0.0, began + first / pace - time.monotonic()))
        for batch in batches[first : first + BURST]:
            batch.ts = time.monotonic()
            publisher.publish(batch)
    took = time.monotonic() - began
    while publisher.stats().queued:
        time.sleep(0.01)
    send_line(took)
    receive_line()


def bridge(url: str, endpoint: str, replay_endpoint: str) -> None:
    """Ours."""
    asyncio.run(_bridge(url, endpoint, replay_endpoint))


async def _bridge(url: str, endpoint: str, replay_endpoint: str) -> None:
    import msgspec  # noqa: PLC0415 - as above

    from kvevents.cli.process import configure_threads  # noqa: PLC0415 - as above
    from kvevents.plane.bridge import Bridge, BridgeSettings, Watch  # noqa: PLC0415 - as above
    from kvevents.plane.settings import PlaneSettings  # noqa: PLC0415 - as above
    from kvevents.service.registration import Registration  # noqa: PLC0415 - as above

    configure_threads()
    plane = PlaneSettings(servers=(url,), name=NAME, partitions=1, partition_bytes=4 << 30)
    registration = Registration(instance="e", endpoint=endpoint, replay_endpoint=replay_endpoint, model="m")
    found = Bridge(
        BridgeSettings(plane=plane, name="bridge"), [Watch(registration.source(), msgspec.json.encode(registration))]
    )
    stop = asyncio.Event()
    running = asyncio.create_task(found.run(stop))
    await found.ready.wait()
    send_line("ready")
    await asyncio.to_thread(receive_line)
    stop.set()
    await running


def replica(url: str, count: int, skipped: int) -> None:
    """Ours, until so many batches are in its index; the age of each but the first few."""
    asyncio.run(_replica(url, count, skipped))
    os._exit(0)


async def _replica(url: str, count: int, skipped: int) -> None:
    from kvevents.cli.process import configure_threads  # noqa: PLC0415 - as above
    from kvevents.index import PrefixIndex  # noqa: PLC0415 - as above
    from kvevents.plane.settings import PlaneSettings  # noqa: PLC0415 - as above
    from kvevents.service import index_build  # noqa: PLC0415 - as above
    from kvevents.service.fleet import Fleet  # noqa: PLC0415 - as above
    from kvevents.service.follower import IndexSink  # noqa: PLC0415 - as above
    from kvevents.service.replica import Replica  # noqa: PLC0415 - as above
    from kvevents.stream import RawBatch  # noqa: PLC0415 - as above

    seen: list[tuple[float, list[bytes]]] = []

    class Watched(IndexSink):
        """Records when each batch was in the index."""

        def apply_many(self, deliveries: Sequence[Any], /) -> Any:
            applied = super().apply_many(deliveries)
            seen.append((time.monotonic(), [each.payload[2:10] for each in deliveries if isinstance(each, RawBatch)]))
            return applied

    setattr(index_build, "IndexSink", Watched)  # noqa: B010 - it is the replica's own, not exported
    configure_threads()
    fleet = Fleet(PrefixIndex(), max_sources=10)
    fleet.follower.start()
    plane = PlaneSettings(servers=(url,), name=NAME, partitions=1)
    found = Replica(plane, "replica", fleet, snapshot_seconds=1e6, memory_limit=None)
    running = asyncio.create_task(found.run())
    while not found.is_complete:  # noqa: ASYNC110 - no event signals it
        await asyncio.sleep(0.05)
    send_line("ready")
    while sum(len(stamps) for _, stamps in seen) < count and not running.done():  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.1)
    ages = [at - _STAMP.unpack(stamp)[0] for at, stamps in seen for stamp in stamps][skipped:]
    send_line({"ages": sorted(ages), "turns": len(seen)})


ROLES: Final[dict[str, Callable[..., None]]] = {"engine": engine, "bridge": bridge, "replica": replica}


# --- the harness ------------------------------------------------------------------------------------------------------------


def trial(server: Server, pace: int, seconds: int) -> dict[str, float]:
    """Start all processes, and measure once."""
    count = pace * (seconds + WARM_SECONDS)
    with ExitStack() as closing:
        publisher = closing.enter_context(Peer(MODULE, "engine", pace, seconds + WARM_SECONDS))
        endpoints = publisher.receive()
        writer = closing.enter_context(Peer(MODULE, "bridge", server.url, *endpoints))
        writer.receive()
        reader = closing.enter_context(Peer(MODULE, "replica", server.url, count, pace * WARM_SECONDS))
        closing.callback(reader.kill)
        reader.receive()
        before = {
            name: cpu_of_threads(pid) for name, pid in (("bridge", writer.pid), ("server", server.pid), ("replica", reader.pid))
        }
        publisher.send("go")
        took = publisher.receive()
        report = reader.receive()
        cpu = {
            name: cpu_of_threads(pid) for name, pid in (("bridge", writer.pid), ("server", server.pid), ("replica", reader.pid))
        }
        publisher.send("done")
        writer.send("done")
        ages = report["ages"]
        return {
            "pace": count / took,
            "p50": ages[len(ages) // 2] * 1e3,
            "p99": ages[len(ages) * 99 // 100] * 1e3,
            "most": ages[-1] * 1e3,
            **{f"cpu of {name}, us a batch": (cpu[name] - before[name]) / count * 1e6 for name in cpu},
        }


def main(arguments: list[str] | None = None) -> int:
    """Print the figures. Returns 0 when all that is judged was met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plane latency", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--pace", type=int, default=PACE, help="batches per second (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="that count (default: %(default)s)")
    options = parser.parse_args(arguments)
    print(machine(), flush=True)
    runs = []
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder, one_server(Path(folder)) as server:
            runs.append(trial(server, options.pace, options.seconds))
        print("   " + ", ".join(f"{name} {value:,.1f}" for name, value in runs[-1].items()), flush=True)
    p50, p99 = (statistics.median(run[name] for run in runs) for name in ("p50", "p99"))
    met = p50 < P50_MS and p99 < P99_MS
    print(
        f"published to visible at {options.pace:,} batches/s: "
        f"p50 {p50:.1f} ms (< {P50_MS:g}), p99 {p99:.1f} ms (< {P99_MS:g}): {'met' if met else 'MISSED'}"
    )
    return 0 if met else 1


def play(role: str, *rest: Any) -> None:
    """A role, with numbers as such."""
    ROLES[role](*(int(each) if each.isdecimal() else each for each in rest))


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] in ROLES:
        play(*sys.argv[1:])
    else:
        sys.exit(main())
