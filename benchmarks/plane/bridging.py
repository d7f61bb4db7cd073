"""`python -m benchmarks.plane bridge`: a bridge beside nats-py publishing the same bytes, to the same server.

An engine's process sends what it has encoded beforehand, as fast as the bridge reads; what the bridge has not read waits in
ZeroMQ, so nothing is lost and nothing is replayed. Told is the time from the first batch to when the last one is acknowledged
by the server, and the CPU time (user and system, all threads) of the bridge's process. nats-py has the same payloads in memory
and publishes each as one message with `Nats-Msg-Id`, `WINDOW` of them waiting for their acknowledgement at any time. A bridge
packs batches into pages of up to half a MiB, of which two at most wait for their acknowledgement; it also reads ZeroMQ, and
every batch, to know what the engine should hold, which nats-py is spared. Each trial has a server of its own.
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
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.history import Engine
from benchmarks.indexing.procfs import cpu_of_threads
from benchmarks.plane.servers import Server, one_server
from benchmarks.processes import Peer, heed, say
from benchmarks.report import machine

ROOM: Final = 4_000
WINDOW: Final = 256
"""Messages of nats-py that wait for their acknowledgement."""
SHARE: Final = 0.8
MOST_CPU: Final = 1.3
LOADS: Final = ((1, 40_000), (32, 8_000))
"""Blocks of a batch, and how many batches."""
LOOK: Final = 0.005
SETTLE_SECONDS: Final = 6.0
MODULE: Final = "plane.bridging"


def payloads_of(blocks: int, count: int) -> list[bytes]:
    """What an engine with a full cache says: each batch stores some blocks and removes as many."""
    from kvevents.wire import encode_batch  # noqa: PLC0415 - each process loads only what its role is about

    engine = Engine(blocks, ROOM)
    for _ in engine.batches(ROOM // blocks):
        pass
    return [encode_batch(batch) for batch in engine.batches(count)]


# --- roles: each in a process of its own ------------------------------------------------------------------------------------


def source(blocks: int, count: int) -> None:
    """Send everything when told to."""
    import zmq  # noqa: PLC0415 - as above

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events = context.socket(zmq.XPUB)
    events.set_hwm(0)
    port = events.bind_to_random_port("tcp://127.0.0.1")
    payloads = payloads_of(blocks, count)
    say(port)
    while events.recv()[:1] != b"\1":
        pass
    say("subscribed")
    heed()
    for seq, payload in enumerate(payloads):
        events.send_multipart([b"", seq.to_bytes(8, "big"), payload])
    say("sent")
    heed()


def ours(url: str, name: str, port: int, count: int) -> None:
    """Ours, until it has written so many batches."""
    asyncio.run(_ours(url, name, port, count))
    os._exit(0)


async def _ours(url: str, name: str, port: int, count: int) -> None:
    from kvevents.plane.bridge import Bridge, BridgeSettings, Watch  # noqa: PLC0415 - as above
    from kvevents.plane.settings import PlaneSettings  # noqa: PLC0415 - as above
    from kvevents.stream import Source  # noqa: PLC0415 - as above

    settings = BridgeSettings(plane=PlaneSettings(servers=(url,), name=name, lanes=1, lane_bytes=4 << 30), name="bridge")
    bridge = Bridge(settings, [Watch(Source(f"tcp://127.0.0.1:{port}", name="engine"))])
    stop = asyncio.Event()
    running = asyncio.create_task(bridge.run(stop))
    await bridge.ready.wait()
    say("ready")
    while bridge.status().written < count and not running.done():  # noqa: ASYNC110 - a count, not an event
        await asyncio.sleep(LOOK)
    say({"at": time.monotonic(), "written": bridge.status().written})
    stop.set()
    await running


def theirs(url: str, name: str, blocks: int, count: int) -> None:
    """nats-py's `publish_async`."""
    asyncio.run(_theirs(url, name, blocks, count))


async def _theirs(url: str, name: str, blocks: int, count: int) -> None:
    import nats  # noqa: PLC0415 - as above
    from nats.js import api  # noqa: PLC0415 - as above

    payloads = payloads_of(blocks, count)
    client = await nats.connect(url)
    js = client.jetstream(publish_async_max_pending=WINDOW)
    config = api.StreamConfig(name=name, subjects=[f"bench.{name}"], max_bytes=4 << 30, duplicate_window=120)
    await js.add_stream(config)
    say("ready")
    await asyncio.to_thread(heed)
    began, futures = time.monotonic(), []
    for seq, payload in enumerate(payloads):
        futures.append(await js.publish_async(f"bench.{name}", payload, headers={"Nats-Msg-Id": f"engine/0/0/{seq}"}))
    for future in futures:
        await future
    say({"began": began, "at": time.monotonic()})
    await client.close()


ROLES: Final[dict[str, Callable[..., None]]] = {"source": source, "ours": ours, "theirs": theirs}


# --- the harness ------------------------------------------------------------------------------------------------------------


def trial_of_ours(server: Server, name: str, blocks: int, count: int) -> dict[str, float]:
    """From the first batch that the engine sends."""
    with ExitStack() as closing:
        sender = closing.enter_context(Peer(MODULE, "source", blocks, count))
        port = sender.hear()
        bridge = closing.enter_context(Peer(MODULE, "ours", server.url, name, port, count))
        bridge.hear()
        sender.hear()
        time.sleep(SETTLE_SECONDS)  # subscriptions travel, and the bridge sees that it is alone; nothing is measured yet
        before, before_server = cpu_of_threads(bridge.pid), cpu_of_threads(server.pid)
        began = time.monotonic()
        sender.tell("go")
        told = bridge.hear()
        found = _figures(
            count, told["at"] - began, cpu_of_threads(bridge.pid) - before, cpu_of_threads(server.pid) - before_server
        )
        if told["written"] != count:
            sys.exit(f"the bridge wrote {told['written']} of {count} batches")
        return found


def trial_of_theirs(server: Server, name: str, blocks: int, count: int) -> dict[str, float]:
    """From the first message that is published."""
    with Peer(MODULE, "theirs", server.url, name, blocks, count) as peer:
        peer.hear()
        before, before_server = cpu_of_threads(peer.pid), cpu_of_threads(server.pid)
        peer.tell("go")
        told = peer.hear()
        seconds = told["at"] - told["began"]
        return _figures(count, seconds, cpu_of_threads(peer.pid) - before, cpu_of_threads(server.pid) - before_server)


def _figures(count: int, seconds: float, cpu: float, server: float) -> dict[str, float]:
    return {"rate": count / seconds, "cpu": cpu / count * 1e6, "server": server / count * 1e6}


def compare(folder: Path, runs: int, blocks: int, count: int) -> bool:
    """Both ways in turns; whether what is judged was met."""
    found: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for number in range(runs):
        ways: list[tuple[str, Callable[..., dict[str, float]]]] = [("ours", trial_of_ours), ("theirs", trial_of_theirs)]
        for way, trial in ways[:: 1 if number % 2 else -1]:
            name = f"{way}-{blocks}-{number}"
            with one_server(folder / name) as server:
                found[way].append(trial(server, name, blocks, count))
            shutil.rmtree(folder / name)
    middle = {way: {name: statistics.median(run[name] for run in each) for name in each[0]} for way, each in found.items()}
    for way, title in (("ours", "bridge"), ("theirs", "nats-py")):
        told = middle[way]
        print(
            f"{blocks:>2} stored and removed, {title:>7}: {told['rate']:,.0f} batches/s, {told['cpu']:.1f} us of CPU a batch, "
            f"the server's {told['server']:.1f}"
        )
    rate, cpu = (middle["ours"][name] / middle["theirs"][name] for name in ("rate", "cpu"))
    met = rate >= SHARE and cpu <= MOST_CPU
    print(f"   rate {rate:.2f} (>= {SHARE}), CPU {cpu:.2f} (<= {MOST_CPU}): {'met' if met else 'MISSED'}", flush=True)
    return met


def main(arguments: list[str] | None = None) -> int:
    """Print the figures. Returns 0 when all that is judged was met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plane bridge", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each way (default: %(default)s)")
    options = parser.parse_args(arguments)
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        met = [compare(Path(folder), options.runs, *load) for load in LOADS]
    return 0 if all(met) else 1


def play(role: str, *rest: Any) -> None:
    """A role, with numbers as such."""
    ROLES[role](*(int(each) if each.isdecimal() else each for each in rest))


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] in ROLES:
        play(*sys.argv[1:])
    else:
        sys.exit(main())
