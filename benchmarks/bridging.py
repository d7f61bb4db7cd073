"""Trials of writing batches into NATS JetStream: a bridge, or nats-py that publishes the same bytes.

A bridge reads ZeroMQ: a process sends batches that it has encoded before, over one connection per engine. Unread batches wait
in the connection, so that no batch is lost or replayed. nats-py has the same payloads in memory, and publishes each payload as
one message with `Nats-Msg-Id`, into the same number of streams, with at most `WINDOW` unacknowledged messages. A bridge packs
batches into pages of up to half a MiB, with at most one unacknowledged page per partition, and follows the trust of every
stream.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.measures import cpu_seconds_of_threads
from benchmarks.processes import Peer, receive_line, send_line
from tools.nats_servers import nats_server

CAPACITY: Final = 4_000
"""Number of blocks of an engine's cache, which is full."""
WINDOW: Final = 256
"""Maximum number of unacknowledged messages of nats-py."""
ROOM: Final = 4 << 30
"""Maximum size of all partitions together, in bytes."""
POLL_SECONDS: Final = 0.005
SETTLE_SECONDS: Final = 6.0
"""Time until a bridge knows that no other bridge writes. The measurement begins afterwards."""


class Load(NamedTuple):
    """The batches that are written."""

    engines: int
    partitions: int
    blocks: int
    """Number of blocks that each batch stores. Each batch removes the same number."""
    batches: int
    """Number of batches of all engines together."""


def write(contender: str, *numbers: int) -> dict[str, float]:
    """Return batches per second until the last one is acknowledged, and CPU per batch of the process and of the server."""
    load = Load(*numbers)
    with tempfile.TemporaryDirectory() as folder, nats_server(Path(folder)) as server, ExitStack() as stack:
        if contender == "ours":
            source = stack.enter_context(Peer("bridging.source", *load))
            writer = stack.enter_context(Peer("bridging.bridge", server.url, source.receive(), *load))
            writer.receive()
            source.receive()
            time.sleep(SETTLE_SECONDS)
        else:
            source = writer = stack.enter_context(Peer("bridging.client", server.url, *load))
            writer.receive()
        pids = writer.pid, server.process.pid
        starts, began = [cpu_seconds_of_threads(pid) for pid in pids], time.monotonic()
        source.send("go")
        end = writer.receive()
        cpu, of_server = (cpu_seconds_of_threads(pid) - start for pid, start in zip(pids, starts, strict=True))
        writer.send("end")
    per_batch = 1e6 / load.batches
    return {"rate": load.batches / (end - began), "cpu": cpu * per_batch, "server": of_server * per_batch}


# --- roles: each role runs in a process of its own
# ------------------------------------------------------------------------------------


def _batches_of(load: Load) -> Iterator[tuple[str, int, bytes]]:
    """Yield engine, number and payload of each batch. The engines take turns. All payloads are equal."""
    from benchmarks.workload import Engine  # noqa: PLC0415 - each process loads only what its role is about

    for seq, payload in enumerate(Engine(load.blocks, CAPACITY).fill().payloads(load.batches // load.engines)):
        for engine in range(load.engines):
            yield _topic(engine), seq, payload


def _topic(engine: int) -> str:
    """Return a topic that is not the beginning of another one."""
    return f"engine-{engine:05}"


def source(*numbers: int) -> None:
    """Send all batches on request, when every engine has a subscriber."""
    import zmq  # noqa: PLC0415 - as above

    load = Load(*numbers)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events = context.socket(zmq.XPUB)
    events.set_hwm(0)
    events.setsockopt(zmq.XPUB_VERBOSE, 1)
    port = events.bind_to_random_port("tcp://127.0.0.1")
    batches = [(topic.encode(), seq.to_bytes(8, "big"), payload) for topic, seq, payload in _batches_of(load)]
    send_line(port)
    count = 0
    while count < load.engines:
        count += events.recv()[:1] == b"\1"
    send_line("subscribed")
    receive_line()
    for frames in batches:
        events.send_multipart(frames)
    receive_line()


def bridge(url: str, port: int, *numbers: int) -> None:
    """Run our bridge until it has written all batches."""
    from kvevents.cli.signals import configure_threads  # noqa: PLC0415 - as above

    configure_threads()
    asyncio.run(_bridge(url, port, Load(*numbers)))
    os._exit(0)


async def _bridge(url: str, port: int, load: Load) -> None:
    from kvevents.stream import Source  # noqa: PLC0415 - as above
    from kvevents_plane.bridge import Bridge, BridgeSettings, Watch  # noqa: PLC0415 - as above
    from kvevents_plane.settings import PlaneSettings  # noqa: PLC0415 - as above

    plane = PlaneSettings(
        servers=(url,), name="bench", partitions=load.partitions, partition_bytes=ROOM // load.partitions, copies=1
    )
    topics = map(_topic, range(load.engines))
    watches = [Watch(Source(f"tcp://127.0.0.1:{port}", topic=topic, name=topic)) for topic in topics]
    running_bridge = Bridge(plane, BridgeSettings(name="bridge"), watches)
    stop = asyncio.Event()
    task = asyncio.create_task(running_bridge.run(stop))
    await running_bridge.ready.wait()
    send_line("ready")
    while running_bridge.written < load.batches and not task.done():  # noqa: ASYNC110 - a count, not an event
        await asyncio.sleep(POLL_SECONDS)
    send_line(time.monotonic())
    await asyncio.to_thread(receive_line)
    stop.set()
    await task


def client(url: str, *numbers: int) -> None:
    """Publish all batches with nats-py's `publish_async`."""
    asyncio.run(_client(url, Load(*numbers)))


async def _client(url: str, load: Load) -> None:
    import nats  # noqa: PLC0415 - as above
    from nats.js import api  # noqa: PLC0415 - as above

    subjects = [f"bench.{partition}" for partition in range(load.partitions)]
    batches = [
        (subjects[number % load.partitions], payload, {"Nats-Msg-Id": f"{topic}/0/0/{seq}"})
        for number, (topic, seq, payload) in enumerate(_batches_of(load))
    ]
    connection = await nats.connect(url)
    js = connection.jetstream(publish_async_max_pending=WINDOW)
    for number, subject in enumerate(subjects):
        config = api.StreamConfig(
            name=f"bench-{number}", subjects=[subject], max_bytes=ROOM // load.partitions, duplicate_window=120
        )
        await js.add_stream(config)
    send_line("ready")
    await asyncio.to_thread(receive_line)
    futures = [await js.publish_async(subject, payload, headers=headers) for subject, payload, headers in batches]
    for future in futures:
        await future
    send_line(time.monotonic())
    await connection.close()
