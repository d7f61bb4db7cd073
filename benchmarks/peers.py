"""Roles of other processes in a trial. The roles use only pyzmq, and are equal for every contender."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from statistics import median
from typing import Final

import msgspec
import zmq
import zmq.backend

from benchmarks.processes import receive_line, send_line

SILENCE_MS: Final = 3_000
"""Seconds without a message after which a reply counts as ended without an end marker."""
_END: Final = b"\xff" * 8


def _sub(port: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.set(zmq.RCVHWM, 0)
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.subscribe(b"")
    return socket


def count(port: int) -> None:
    """Report the first batch; receive the last batch's number; report how many batches arrived, and when the last did."""
    socket = _sub(port)
    first = int.from_bytes(socket.recv_multipart()[1], "big")
    send_line("ready")
    last = receive_line()
    if last is None:
        return
    received, seq = 1, first
    # The receive function of pyzmq's backend, so that the reader takes as little CPU time as possible.
    receive = zmq.backend.Socket.recv.__get__(socket)
    socket.set(zmq.RCVTIMEO, SILENCE_MS)
    with suppress(zmq.Again):
        while seq < last:
            receive()
            seq = int.from_bytes(receive(), "big")
            receive()
            received += 1
    send_line({"lost": last - first + 1 - received, "end": time.monotonic()})
    receive_line()


def live(port: int) -> None:
    """Measure the delay of batches, whose timestamps are from the monotonic clock. Report on request, and begin again."""
    socket = _sub(port)
    decode = msgspec.msgpack.Decoder(tuple[float, msgspec.Raw, msgspec.Raw]).decode
    socket.recv_multipart()
    send_line("ready")
    delays: list[float] = []
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if socket in ready:
            payload = socket.recv_multipart()[2]
            delays.append(time.monotonic() - decode(payload)[0])
        elif receive_line() is None:
            return
        else:
            send_line({"median": median(delays or [0.0]), "longest": max(delays, default=0.0), "batches": len(delays)})
            delays = []


def lost(numbers: Collection[int], count: int) -> int:
    """Return how many batches are missing from a replay of a buffer of `count` batches, by the received numbers.

    The buffer changes while live batches are published, and a reply can continue with these batches. So more than `count`
    numbers can arrive. Additional numbers do not replace numbers that are missing between the first and the last.
    """
    return max(count, max(numbers) - min(numbers) + 1) - len(numbers) if numbers else count


def replay(port: int, pace: str, count: int) -> None:
    """Request all batches once, read them at a fixed pace, and report how many of the `count` buffered batches arrived.

    The socket has pyzmq's default limits.
    """
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{port}")
    send_line("ready")
    if receive_line() is None:
        return
    start = time.monotonic()
    socket.send_multipart([b"", bytes(8)])
    if pace == "late":
        time.sleep(2.0)
    numbers: set[int] = set()
    has_ended = False
    while not has_ended and socket.poll(SILENCE_MS):
        frames = socket.recv_multipart()
        has_ended = frames[-1] == b"" and frames[-2] == _END
        if not has_ended:
            numbers.add(int.from_bytes(frames[-2], "big"))
            if pace == "slow" and len(numbers) % 20 == 0:
                time.sleep(0.005)
    send_line({"lost": lost(numbers, count), "ended": has_ended, "seconds": time.monotonic() - start})


def blast(port: int, blocks: int, batches: int) -> None:
    """Send batches as vLLM encodes them, as fast as pyzmq can, to the first subscriber. Then wait for the parent's end."""
    from benchmarks.contenders import VLLM  # noqa: PLC0415 - readers of other roles need not load an engine

    payloads = [msgspec.msgpack.encode(batch) for batch in VLLM.batches(500, blocks)]
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
    socket.set(zmq.SNDHWM, 0)
    socket.bind(f"tcp://127.0.0.1:{port}")
    send_line("bound")
    socket.recv()
    time.sleep(0.2)  # the reader sends a message before it reads
    for seq in range(batches):
        socket.send_multipart((b"kv-events", seq.to_bytes(8, "big"), payloads[seq % 500]))
    receive_line()


def engine(name: str, port: int, replay_port: int, blocks: int, batches: int) -> None:
    """Run an engine's publisher that publishes `batches` batches without a subscriber, and then answers replay requests."""
    from benchmarks.contenders import CONTENDERS  # noqa: PLC0415 - as above
    from benchmarks.publishing import feed  # noqa: PLC0415 - as above

    contender = CONTENDERS[name]
    publisher = contender.publisher(port, replay_port)
    feed(contender, publisher, contender.batches(500, blocks), batches)
    while contender.waiting(publisher):
        time.sleep(0.01)
    time.sleep(0.2)
    send_line("published")
    select.select([sys.stdin], [], [])
    publisher.shutdown()
