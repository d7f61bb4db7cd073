"""`python -m benchmarks.plane bridge`: a bridge beside nats-py publishing the same bytes, and what a fleet costs it.

*As fast as can be*, judged. A process sends what it has encoded beforehand, from one engine into one partition, and from 1,000
engines, in turn, into 8 partitions; each engine has a connection of its own. What the bridge has not read waits in ZeroMQ, so
nothing is lost and nothing is replayed. Reported is the time from the first batch to when the last one is acknowledged by the
server, and the CPU time (user and system, all threads) of the bridge's process. nats-py has the same payloads in memory and
publishes each as one message with `Nats-Msg-Id`, into as many streams, `WINDOW` of them waiting for their acknowledgement at
any time. A bridge packs batches into pages of up to half a MiB, of which one of a partition waits for its acknowledgement;
it also reads ZeroMQ and follows the trust of every stream, which nats-py is spared. Each trial has a server of its own.

*As a fleet is*, not judged: 1,000 engines say 10 batches a second each, and three servers keep three copies of 256 partitions,
as of a fleet ten times as large, of which each bridge follows a tenth. CPU and memory of the bridge, or of each of several that
are all active (`--active`); CPU, memory and disk of the servers. `sizing` computes with these.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from typing import Any, Final, NamedTuple

from benchmarks.history import Engine
from benchmarks.indexing.procfs import cpu_of_threads, resident
from benchmarks.processes import PATIENCE, Peer, receive_line, send_line
from benchmarks.report import machine
from tools.nats_process import Server, Servers, one_server

ROOM: Final = 4_000
WINDOW: Final = 256
"""Messages of nats-py that wait for their acknowledgement."""
SHARE: Final = 0.8
MOST_CPU: Final = 1.3
LOOK: Final = 0.005
SETTLE_SECONDS: Final = 6.0
MODULE: Final = "plane.bridging"
COPIES: Final = 3


class Load(NamedTuple):
    """What is sent."""

    engines: int
    partitions: int
    blocks: int
    """Stored by each batch, which removes as many."""
    batches: int
    """Of all engines."""
    pace: int = 0
    """Batches a second of all engines; 0 for as fast as can be."""

    def __str__(self) -> str:
        engines = "1 engine" if self.engines == 1 else f"{self.engines:,} engines"
        return f"{engines}, {self.partitions} partitions, {self.blocks} blocks a batch"


LOADS: Final = (Load(1, 1, 1, 40_000), Load(1, 1, 32, 8_000), Load(1_000, 8, 10, 40_000))
FLEET: Final = Load(1_000, 256, 10, 80_000, 10_000)


def payloads_of(load: Load) -> list[bytes]:
    """The batches of an engine with a full cache. All engines of a fleet send the same, which no process here decodes."""
    from kvevents.wire import encode_batch  # noqa: PLC0415 - each process loads only what its role is about

    engine = Engine(load.blocks, ROOM)
    for _ in engine.batches(ROOM // load.blocks):
        pass
    return [encode_batch(batch) for batch in engine.batches(load.batches // load.engines)]


def batches_of(load: Load) -> Iterator[tuple[int, int, bytes]]:
    """Engine, number and payload of each batch; engines in turn."""
    for seq, payload in enumerate(payloads_of(load)):
        for engine in range(load.engines):
            yield engine, seq, payload


def topic_of(engine: int) -> str:
    """None is the beginning of another one."""
    return f"engine-{engine:05}"


# --- roles: each in a process of its own ------------------------------------------------------------------------------------


def source(bridges: int, *rest: int) -> None:
    """Send everything on request, once so many bridges follow every engine."""
    import zmq  # noqa: PLC0415 - as above

    load = Load(*rest)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events = context.socket(zmq.XPUB)
    events.set_hwm(0)
    events.setsockopt(zmq.XPUB_VERBOSE, 1)
    port = events.bind_to_random_port("tcp://127.0.0.1")
    batches = [(topic_of(engine).encode(), seq.to_bytes(8, "big"), payload) for engine, seq, payload in batches_of(load)]
    send_line(port)
    followed = 0
    while followed < load.engines * bridges:
        followed += events.recv()[:1] == b"\1"
    send_line("subscribed")
    receive_line()
    began = time.monotonic()
    for number, frames in enumerate(batches):
        if load.pace and (early := began + number / load.pace - time.monotonic()) > 0:
            time.sleep(early)
        events.send_multipart(frames)
    send_line("sent")
    receive_line()


def ours(url: str, name: str, port: int, *rest: int) -> None:
    """Ours, until it has written so many batches."""
    from kvevents.cli.process import configure_threads  # noqa: PLC0415 - as above

    configure_threads()
    asyncio.run(_ours(url, name, port, Load(*rest)))
    os._exit(0)


async def _ours(urls: str, name: str, port: int, load: Load) -> None:
    from kvevents.plane.bridge import Bridge, BridgeSettings, Watch  # noqa: PLC0415 - as above
    from kvevents.plane.settings import PlaneSettings  # noqa: PLC0415 - as above
    from kvevents.stream import Source  # noqa: PLC0415 - as above

    servers = tuple(urls.split(","))
    copies = COPIES if len(servers) > 1 else 1
    plane = PlaneSettings(
        servers=servers, name="bench", partitions=load.partitions, partition_bytes=(4 << 30) // load.partitions, copies=copies
    )
    engines = map(topic_of, range(load.engines))
    watches = [Watch(Source(f"tcp://127.0.0.1:{port}", topic=engine, name=engine)) for engine in engines]
    bridge = Bridge(BridgeSettings(plane=plane, name=name), watches)
    stop = asyncio.Event()
    running = asyncio.create_task(bridge.run(stop))
    await bridge.ready.wait()
    send_line("ready")
    while _positions(bridge) < load.batches and not running.done():  # noqa: ASYNC110 - a count, not an event
        await asyncio.sleep(LOOK if not load.pace else 0.5)
    status = bridge.status()
    send_line({"at": time.monotonic(), "written": status.written, "conflicts": status.conflicts})
    await asyncio.to_thread(receive_line)
    stop.set()
    await running


def _positions(bridge: Any) -> int:
    """Batches that are in the log, whichever bridge has written them."""
    streams = (stream for partition in bridge._partitions for stream in partition.builder.state.streams.values())  # noqa: SLF001
    return sum(stream.last_seq + 1 for stream in streams)


def theirs(url: str, *rest: int) -> None:
    """nats-py's `publish_async`."""
    asyncio.run(_theirs(url, Load(*rest)))


async def _theirs(url: str, load: Load) -> None:
    import nats  # noqa: PLC0415 - as above
    from nats.js import api  # noqa: PLC0415 - as above

    batches = [
        (f"bench.{engine % load.partitions}", payload, {"Nats-Msg-Id": f"{topic_of(engine)}/0/0/{seq}"})
        for engine, seq, payload in batches_of(load)
    ]
    client = await nats.connect(url)
    js = client.jetstream(publish_async_max_pending=WINDOW)
    for partition in range(load.partitions):
        room = (4 << 30) // load.partitions
        config = api.StreamConfig(
            name=f"bench-{partition}", subjects=[f"bench.{partition}"], max_bytes=room, duplicate_window=120
        )
        await js.add_stream(config)
    send_line("ready")
    await asyncio.to_thread(receive_line)
    began, futures = time.monotonic(), []
    for subject, payload, headers in batches:
        futures.append(await js.publish_async(subject, payload, headers=headers))
    for future in futures:
        await future
    send_line({"began": began, "at": time.monotonic()})
    await client.close()


ROLES: Final[dict[str, Callable[..., None]]] = {"source": source, "ours": ours, "theirs": theirs}


# --- as fast as can be ------------------------------------------------------------------------------------------------------


def trial_of_ours(server: Server, load: Load) -> dict[str, float]:
    """From the first batch that an engine sends."""
    with ExitStack() as closing:
        sender = closing.enter_context(Peer(MODULE, "source", 1, *load))
        port = sender.receive()
        bridge = closing.enter_context(Peer(MODULE, "ours", server.url, "bridge", port, *load))
        bridge.receive()
        sender.receive()
        time.sleep(SETTLE_SECONDS)  # the bridge sees that it is alone; nothing is measured yet
        before, before_server = cpu_of_threads(bridge.pid), cpu_of_threads(server.pid)
        began = time.monotonic()
        sender.send("go")
        report = bridge.receive()
        used, used_server = cpu_of_threads(bridge.pid) - before, cpu_of_threads(server.pid) - before_server
        bridge.send("end")
        if report["written"] != load.batches:
            sys.exit(f"the bridge wrote {report['written']} of {load.batches} batches")
        return _figures(load.batches, report["at"] - began, used, used_server)


def trial_of_theirs(server: Server, load: Load) -> dict[str, float]:
    """From the first message that is published."""
    with Peer(MODULE, "theirs", server.url, *load) as peer:
        peer.receive()
        before, before_server = cpu_of_threads(peer.pid), cpu_of_threads(server.pid)
        peer.send("go")
        report = peer.receive()
        seconds = report["at"] - report["began"]
        return _figures(load.batches, seconds, cpu_of_threads(peer.pid) - before, cpu_of_threads(server.pid) - before_server)


def _figures(count: int, seconds: float, cpu: float, server: float) -> dict[str, float]:
    return {"rate": count / seconds, "cpu": cpu / count * 1e6, "server": server / count * 1e6}


def compare(folder: Path, runs: int, load: Load) -> bool:
    """Both ways in turns; whether what is judged was met."""
    found: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for number in range(runs):
        ways: list[tuple[str, Callable[..., dict[str, float]]]] = [("ours", trial_of_ours), ("theirs", trial_of_theirs)]
        for way, trial in ways[:: 1 if number % 2 else -1]:
            with one_server(folder / "server") as server:
                found[way].append(trial(server, load))
            shutil.rmtree(folder / "server")
    middle = {way: {name: statistics.median(run[name] for run in each) for name in each[0]} for way, each in found.items()}
    for way, title in (("ours", "bridge"), ("theirs", "nats-py")):
        figures = middle[way]
        print(
            f"{load}, {title:>7}: {figures['rate']:,.0f} batches/s, {figures['cpu']:.1f} us of CPU a batch, "
            f"the server's {figures['server']:.1f}"
        )
    rate, cpu = (middle["ours"][name] / middle["theirs"][name] for name in ("rate", "cpu"))
    met = rate >= SHARE and cpu <= MOST_CPU
    print(f"   rate {rate:.2f} (>= {SHARE}), CPU {cpu:.2f} (<= {MOST_CPU}): {'met' if met else 'MISSED'}", flush=True)
    return met


# --- as a fleet is ----------------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """What a fleet costs."""

    bridge: float
    """Microseconds of CPU of a bridge for a batch."""
    bridge_bytes: float
    """Memory of a bridge at the end."""
    bridge_idle: float
    """The same before anything was said."""
    servers: float
    """Microseconds of CPU of all servers for a batch."""
    server_bytes: float
    """Memory of the largest server at the end."""
    server_idle: float
    """The same before anything was said."""
    stored: float
    """Bytes on a server's disk for a batch."""
    refused: float
    """Pages that were refused, for each batch."""


def cost_of(folder: Path, load: Load, bridges: int) -> Cost:
    """A fleet at its pace, from when it begins to when all of it is in the log."""
    with ExitStack() as closing:
        servers = closing.enter_context(Servers(folder, COPIES))
        sender = closing.enter_context(Peer(MODULE, "source", bridges, *load))
        port = sender.receive()
        urls = ",".join(servers.urls)
        peers = [closing.enter_context(Peer(MODULE, "ours", urls, f"b{each}", port, *load)) for each in range(bridges)]
        for peer in peers:
            peer.receive()
        sender.receive()
        time.sleep(SETTLE_SECONDS)
        pids, own = [node.pid for node in servers.nodes], [peer.pid for peer in peers]
        idle, idle_servers = max(map(resident, own)), max(map(resident, pids))
        before, stored = sum(map(cpu_of_threads, own)), _stored(folder)
        before_servers = sum(map(cpu_of_threads, pids))
        alarm = Timer(PATIENCE, peers[0].kill)  # then it says nothing, which ends the run
        alarm.start()
        closing.callback(alarm.cancel)
        sender.send("go")
        reports = [peer.receive() for peer in peers]
        used, used_servers = sum(map(cpu_of_threads, own)) - before, sum(map(cpu_of_threads, pids)) - before_servers
        found = Cost(
            used / bridges / load.batches * 1e6,
            max(map(resident, own)),
            idle,
            used_servers / load.batches * 1e6,
            max(map(resident, pids)),
            idle_servers,
            (_stored(folder) - stored) / COPIES / load.batches,
            sum(each["conflicts"] for each in reports) / load.batches,
        )
        for peer in peers:
            peer.send("end")
        return found


def _stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.blk"))


def report_fleet(folder: Path, load: Load, bridges: int) -> None:
    """One line of each."""
    found = cost_of(folder, load, bridges)
    shutil.rmtree(folder)
    seconds = load.batches / load.pace
    print(f"{load}, {COPIES} servers, {bridges} active: {load.pace:,} batches/s for {seconds:.0f} s")
    print(
        f"   a bridge: {found.bridge:.1f} us of CPU a batch ({found.bridge * load.pace / 1e4:.0f}% of a core), "
        f"{found.bridge_idle / 1e6:.0f} MB, then {found.bridge_bytes / 1e6:.0f} MB; "
        f"{found.refused * 1e3:.1f} pages of 1,000 batches refused"
    )
    print(
        f"   servers: {found.servers:.1f} us of CPU a batch together, {found.stored:,.0f} B a batch on each disk, the largest "
        f"{found.server_idle / 1e6:.0f} MB, then {found.server_bytes / 1e6:.0f} MB",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the figures. Returns 0 when all that is judged was met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plane bridge", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each way (default: %(default)s)")
    parser.add_argument("--only", choices=("race", "fleet"), help="beside nats-py, or the fleet at its pace")
    parser.add_argument("--active", type=int, default=1, help="bridges that write the fleet's batches (default: %(default)s)")
    parser.add_argument("--partitions", type=int, default=FLEET.partitions, help="of the fleet (default: %(default)s)")
    options = parser.parse_args(arguments)
    print(machine(), flush=True)
    met = []
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "fleet":
            met = [compare(Path(folder), options.runs, load) for load in LOADS]
        if options.only != "race":
            report_fleet(Path(folder, "fleet"), FLEET._replace(partitions=options.partitions), options.active)
    return 0 if all(met) else 1


def play(role: str, *rest: Any) -> None:
    """A role, with numbers as such."""
    ROLES[role](*(int(each) if each.isdecimal() else each for each in rest))


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] in ROLES:
        play(*sys.argv[1:])
    else:
        sys.exit(main())
