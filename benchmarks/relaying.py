"""Trials of forwarders between an engine and a consumer: a relay with its journal on the disk, or ZeroMQ's own forwarder.

One process publishes as an engine with a full cache does: each batch stores some blocks and removes the same number of blocks.
Another process counts the batches. The replay buffer of the relay is full before the measurement, so that each new batch moves
an old batch into the history."""

from __future__ import annotations

import struct
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import zmq

from benchmarks.measures import cpu_seconds_of_threads, percentile
from benchmarks.processes import Peer, receive_line, send_line
from tools.ports import reserve_port

CAPACITY: Final = 4_000
"""Number of blocks of the engine's cache."""
PACE: Final = 1_000
"""Batches per second while latency is measured."""
WARM_UP: Final = 12_000
"""Number of batches before the measurement, which is more than the capacity of a relay's replay buffer."""
WINDOW: Final = 2_000
"""Maximum number of batches in transit while the rate is measured, so that no batch is lost: a replay would distort the
rate."""
_STAMP: Final = struct.Struct(">d")


def forward(contender: str, blocks: int, count: int) -> dict[str, float]:
    """Return batches per second, the forwarder's CPU time per batch, and the time from sending to receiving (steady pace)."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        port, out, replay = (reserve_port() for _ in range(3))
        source = stack.enter_context(Peer("relaying.source", port, blocks))
        credit_port = source.receive()
        options = [replay, str(Path(folder, "journal"))] if contender == "ours" else []
        between = stack.enter_context(Peer(f"relaying.{'relay' if options else 'proxy'}", port, out, *options))
        stack.callback(between.kill)
        between.receive()
        consumer = stack.enter_context(Peer("relaying.consumer", out, credit_port))
        for peer in (consumer, source):
            peer.receive()
        time.sleep(1.0)  # time for the subscriptions to arrive, before the measurement

        def send(count: int, pace: int) -> tuple[dict[str, Any], float]:
            """Return the measurements of the consumer, and the CPU seconds of the forwarder."""
            source.send([count, pace])
            source.receive()
            consumer.send(count)
            cpu_before = cpu_seconds_of_threads(between.pid)
            source.send("go")
            result = consumer.receive()
            cpu = cpu_seconds_of_threads(between.pid) - cpu_before
            source.receive()
            return result, cpu

        send(WARM_UP, 0)
        flow, cpu = send(count, 0)
        ages = send(4 * PACE, PACE)[0]["ages"]
    p50, p99 = (percentile(ages, per_cent) * 1e3 for per_cent in (50, 99))
    return {"rate": count / flow["seconds"], "cpu": cpu / count * 1e6, "p50": p50, "p99": p99}


# --- roles: each role runs in a process of its own
# ------------------------------------------------------------------------------------


def source(port: int, blocks: int) -> None:
    """Publish on request: `[count, pace]`, as fast as the consumer's credit allows if the pace is 0."""
    from benchmarks.workload import Engine  # noqa: PLC0415 - the forwarder loads no module of kvevents

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events, credit = context.socket(zmq.XPUB), context.socket(zmq.PULL)
    events.set_hwm(0)
    events.bind(f"tcp://127.0.0.1:{port}")
    credit_port = credit.bind_to_random_port("tcp://127.0.0.1")
    engine = Engine(blocks, CAPACITY).fill()
    seq = 0
    send_line(credit_port)
    while events.recv()[:1] != b"\1":
        pass
    send_line("subscribed")
    while (order := receive_line()) is not None:
        count, pace = order
        payloads = engine.payloads(count)
        send_line("ready")
        receive_line()
        credit_given = WINDOW
        began = time.monotonic()
        for number, payload in enumerate(payloads):
            if pace:
                time.sleep(max(0.0, began + number / pace - time.monotonic()))
            while not pace and number >= credit_given:
                credit_given += int(credit.recv())
            payload_with_time = payload[:2] + _STAMP.pack(time.time()) + payload[10:]
            events.send_multipart([b"", seq.to_bytes(8, "big"), payload_with_time])
            seq += 1
        while not pace and credit.poll(0):
            credit.recv()
        send_line("sent")


def proxy(port: int, out: int) -> None:
    """Forward with `zmq.proxy`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front, back = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    front.set_hwm(0)
    back.set_hwm(0)
    front.connect(f"tcp://127.0.0.1:{port}")
    back.bind(f"tcp://127.0.0.1:{out}")
    send_line("bound")
    zmq.proxy(front, back)


def relay(port: int, out: int, replay: int, journal: str) -> None:
    """Run our relay."""
    from kvevents.relay import Relay, RelaySettings  # noqa: PLC0415 - as above
    from kvevents.stream import Source  # noqa: PLC0415 - as above

    upstream = Source(f"tcp://127.0.0.1:{port}", name="engine")
    settings = RelaySettings(
        upstreams=(upstream,), endpoint=f"tcp://127.0.0.1:{out}", replay_endpoint=f"tcp://127.0.0.1:{replay}", journal=journal
    )
    with Relay(settings) as instance:
        send_line("bound")
        instance.run(lambda: False)


def consumer(port: int, credit_port: int) -> None:
    """Count batches, grant credit when they arrive, and report their ages."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events, credit = context.socket(zmq.SUB), context.socket(zmq.PUSH)
    events.set_hwm(0)
    events.connect(f"tcp://127.0.0.1:{port}")
    events.subscribe(b"")
    credit.connect(f"tcp://127.0.0.1:{credit_port}")
    send_line("connected")
    while (count := receive_line()) is not None:
        ages: list[float] = []
        first = last = 0.0
        while len(ages) < count:
            payload = events.recv_multipart()[2]
            if len(payload) < 140 and b"heartbeat" in payload:
                continue
            last = time.time()
            first = first or last
            ages.append(last - _STAMP.unpack_from(payload, 2)[0])
            if len(ages) % 500 == 0:
                credit.send(b"500")
        send_line({"seconds": last - first, "ages": ages})
