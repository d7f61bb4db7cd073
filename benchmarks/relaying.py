"""`python -m benchmarks.relaying`: what a relay costs beside a bare ZeroMQ forwarder, and how soon a killed one is back.

One process publishes what an engine with a full cache does, each batch storing some blocks and removing as many; one consumer
counts. Between them is nothing, ZeroMQ's own `zmq.proxy`, or a relay with its journal on the disk, in turns. Measured is what
goes on day after day: the relay's replay buffer is full before, so that each batch pushes one out into the history. Printed are
batches per second, the CPU time of what is between for each batch (all threads, user and system), and at a steady pace what it
adds to the time from sending to receiving. Then a relay whose journal holds a million live blocks is killed, and its return is
timed.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import zmq

from benchmarks.history import Engine
from benchmarks.indexing.procfs import cpu_of_threads
from benchmarks.processes import Peer, free_ports, receive_line, send_line
from benchmarks.report import machine

ROOM: Final = 4_000
WAYS: Final = ("direct", "proxy", "relay")
PACE: Final = 1_000
"""Batches per second while latency is measured."""
FIRST: Final = 12_000
"""Batches before anything is measured: more than a relay's replay buffer holds."""
WINDOW: Final = 2_000
"""Batches on the way at most while the rate is measured: nothing may be lost, or there would be replays to pay for."""
MOST: Final = 3.0
"""CPU of the relay for a batch over that of the forwarder, which does none of the mirroring and journaling."""
_STAMP: Final = struct.Struct(">d")


# --- roles: each in a process of its own ------------------------------------------------------------------------------------


def source(port: int, blocks: int) -> None:
    """Publish on request: `[count, pace]`, as fast as the consumer's credit allows if the pace is 0."""
    from kvevents.wire import encode_batch  # noqa: PLC0415 - each process loads only what its role is about

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events, credit = context.socket(zmq.XPUB), context.socket(zmq.PULL)
    events.set_hwm(0)
    events.bind(f"tcp://127.0.0.1:{port}")
    credit_port = credit.bind_to_random_port("tcp://127.0.0.1")
    engine = Engine(blocks, ROOM)
    for _ in engine.batches(ROOM // blocks):
        pass
    seq = 0
    send_line(credit_port)
    while events.recv()[:1] != b"\1":
        pass
    send_line("subscribed")
    while (order := receive_line()) is not None:
        count, pace = order
        payloads = [encode_batch(batch) for batch in engine.batches(count)]
        send_line("ready")
        receive_line()
        granted = WINDOW
        began = time.monotonic()
        for number, payload in enumerate(payloads):
            if pace:
                time.sleep(max(0.0, began + number / pace - time.monotonic()))
            while not pace and number >= granted:
                granted += int(credit.recv())
            stamped = payload[:2] + _STAMP.pack(time.time()) + payload[10:]
            events.send_multipart([b"", seq.to_bytes(8, "big"), stamped])
            seq += 1
        while not pace and credit.poll(0):
            credit.recv()
        send_line("sent")


def proxy(port: int, out: int) -> None:
    """ZeroMQ's own forwarder."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front, back = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    front.set_hwm(0)
    back.set_hwm(0)
    front.connect(f"tcp://127.0.0.1:{port}")
    back.bind(f"tcp://127.0.0.1:{out}")
    send_line(out)
    zmq.proxy(front, back)


def relay(port: int, out: int, replay: int, journal: str) -> None:
    """Ours."""
    from kvevents.relay import Relay, RelaySettings  # noqa: PLC0415 - as above
    from kvevents.stream import Source  # noqa: PLC0415 - as above

    upstream = Source(f"tcp://127.0.0.1:{port}", name="engine")
    settings = RelaySettings(
        upstreams=(upstream,), endpoint=f"tcp://127.0.0.1:{out}", replay_endpoint=f"tcp://127.0.0.1:{replay}", journal=journal
    )
    with Relay(settings) as found:
        send_line(found.status().recovery_seconds)
        found.run(lambda: False)


def consumer(port: int, credit_port: int) -> None:
    """Count batches; give credit as they come; report their ages."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events, credit = context.socket(zmq.SUB), context.socket(zmq.PUSH)
    events.set_hwm(0)
    events.connect(f"tcp://127.0.0.1:{port}")
    events.subscribe(b"")
    credit.connect(f"tcp://127.0.0.1:{credit_port}")
    send_line("there")
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
        send_line({"seconds": last - first, "ages": sorted(ages)})


# --- the harness ------------------------------------------------------------------------------------------------------------


class Line:
    """Source, what is between, consumer."""

    def __init__(self, way: str, blocks: int, folder: Path, closing: ExitStack) -> None:
        port, out, replay = free_ports(3)
        self.source = closing.enter_context(Peer("relaying", "source", port, blocks))
        credit = self.source.receive()
        self.between: Peer | None = None
        if way != "direct":
            more = [replay, folder] if way == "relay" else []
            self.between = closing.enter_context(Peer("relaying", way, port, out, *more))
            closing.callback(self.between.kill)
            self.between.receive()
        self.consumer = closing.enter_context(Peer("relaying", "consumer", port if way == "direct" else out, credit))
        self.consumer.receive()
        self.source.receive()
        time.sleep(1.0)  # subscriptions travel; nothing is measured yet

    def send(self, count: int, pace: int) -> tuple[dict[str, Any], float]:
        """What the consumer saw, and the CPU seconds of what is between."""
        self.source.send([count, pace])
        self.source.receive()
        self.consumer.send(count)
        before = 0.0 if self.between is None else cpu_of_threads(self.between.pid)
        self.source.send("go")
        seen = self.consumer.receive()
        after = 0.0 if self.between is None else cpu_of_threads(self.between.pid)
        self.source.receive()
        return seen, after - before


def trial(way: str, blocks: int, count: int) -> dict[str, float]:
    """One way, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        line = Line(way, blocks, Path(folder) / "journal", closing)
        line.send(FIRST, 0)
        flow, cpu = line.send(count, 0)
        paced, paced_cpu = line.send(4 * PACE, PACE)
        ages = paced["ages"]
        return {
            "rate": count / flow["seconds"],
            "cpu": cpu / count * 1e6,
            "paced_cpu": paced_cpu / len(ages) * 1e6,
            "p50": ages[len(ages) // 2] * 1e3,
            "p99": ages[len(ages) * 99 // 100] * 1e3,
        }


def recovery(live: int) -> tuple[float, float]:
    """Seconds until a killed relay with so many live blocks is back: of reading its journal, and until it answers."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        port, out, replay = free_ports(3)
        journal = Path(folder) / "journal"
        fed = closing.enter_context(Peer("relaying", "fill", port, live))
        fed.receive()
        first = closing.enter_context(Peer("relaying", "relay", port, out, replay, journal))
        first.receive()
        fed.send("go")
        fed.receive()
        time.sleep(2.0)  # until the relay has taken the last of it, and said so in its journal
        first.kill()
        began = time.monotonic()
        second = closing.enter_context(Peer("relaying", "relay", port, out, replay, journal))
        closing.callback(second.kill)
        reading = second.receive()
        return reading, time.monotonic() - began


def fill(port: int, live: int) -> None:
    """An engine whose cache fills up with so many blocks, and that answers replay requests."""
    from kvevents.publisher import ZmqEventPublisher  # noqa: PLC0415 - as above

    publisher = ZmqEventPublisher(endpoint=f"tcp://127.0.0.1:{port}", bind=True, hwm=0)
    send_line("there")
    receive_line()
    engine = Engine(32, live)
    for number, batch in enumerate(engine.batches(live // 32 + 20_000)):
        publisher.publish(batch)
        while number % 200 == 0 and publisher.stats().queued > 1_000:
            time.sleep(0.002)
    while publisher.stats().queued:
        time.sleep(0.01)
    send_line("full")
    receive_line()
    publisher.shutdown()


ROLES: Final[dict[str, Callable[..., None]]] = {
    "source": source,
    "proxy": proxy,
    "relay": relay,
    "consumer": consumer,
    "fill": fill,
}


def main() -> int:
    """Print the figures. Returns 0 when all that is judged was met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relaying", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each way (default: %(default)s)")
    parser.add_argument("--live", type=int, default=1_000_000, help="blocks of the relay that is killed (default: %(default)s)")
    options = parser.parse_args()
    print(machine())
    met = True
    for blocks, count in ((1, 40_000), (32, 20_000)):
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(options.runs):
            for way in WAYS:
                runs[way].append(trial(way, blocks, count))
        middle = {
            way: {name: statistics.median(run[name] for run in found) for name in found[0]} for way, found in runs.items()
        }
        for way, found in middle.items():
            listed = ", ".join(f"{name} {value:,.2f}" for name, value in found.items())
            print(f"{blocks:>2} stored and removed, {way:>6}: {listed}")
        ratio = middle["relay"]["cpu"] / middle["proxy"]["cpu"]
        met &= ratio <= MOST
        added = [middle["relay"][name] - middle["direct"][name] for name in ("p50", "p99")]
        print(
            f"   CPU of the relay over that of the forwarder: {ratio:.2f} (<= {MOST:g}): "
            f"{'met' if ratio <= MOST else 'MISSED'}; latency added p50 {added[0]:.2f} ms, p99 {added[1]:.2f} ms"
        )
    reading, back = recovery(options.live)
    met &= back < 3.0
    print(
        f"killed with {options.live:,} live blocks: back after {back:.2f} s (< 3), {reading:.2f} s of it the journal: "
        f"{'met' if back < 3 else 'MISSED'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] in ROLES:
        role, *rest = sys.argv[1:]
        ROLES[role](*(int(each) if each.isdecimal() else each for each in rest))
    else:
        sys.exit(main())
