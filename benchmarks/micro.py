"""`python -m benchmarks.micro`: the costs of single steps that decided docs/adr/0002 and 0004, in microseconds per batch.

One thread, one process; the least of several rounds, since whatever adds to it is the machine's. These are no ratios against
anybody: they say which of our own ways is cheaper.
"""

from __future__ import annotations

import _thread
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq
import zmq.backend

from benchmarks.processes import Peer, free_ports
from kvevents import BlockStored, KVEventBatch
from kvevents.libzmq_io import libzmq_io

ROUNDS: Final = 5
TIMES: Final = 20_000
RUN: Final = 100
"""Messages of one native call."""
SEQ: Final = (7).to_bytes(8, "big")
_send: Final = zmq.backend.Socket.send
_recv: Final = zmq.backend.Socket.recv
_get: Final = zmq.backend.Socket.get


def cost(step: Callable[[], Any], before: Callable[[], Any] = lambda: None, times: int = TIMES) -> float:
    """Microseconds of one `step` of so many; `before` prepares each round."""
    best = float("inf")
    for _ in range(ROUNDS):
        before()
        began = time.perf_counter()
        for _ in range(times):
            step()
        best = min(best, time.perf_counter() - began)
    return best / times * 1e6


def report(title: str, steps: dict[str, float]) -> None:
    """Print one group of figures."""
    print(f"\n{title}")
    for name, microseconds in steps.items():
        print(f"  {name:<54} {microseconds:6.2f} us")


def batch_of(blocks: int) -> KVEventBatch:
    """One store, with hashes and token ids as large as real ones."""
    numbers = random.Random(blocks)  # noqa: S311 - test data
    hashes = [numbers.getrandbits(64) for _ in range(blocks)]
    tokens = [numbers.randrange(128_000) for _ in range(16 * blocks)]
    return KVEventBatch(time.time(), [BlockStored(hashes, None, tokens, 16, None, "GPU", None)], 0)


def sending() -> dict[str, float]:
    """Three frames on an XPUB socket, to nobody and to one subscriber in another process."""
    payload = msgspec.msgpack.encode(batch_of(1))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    [port] = free_ports(1)
    socket = context.socket(zmq.XPUB)
    socket.set_hwm(0)
    socket.bind(f"tcp://127.0.0.1:{port}")

    def directly() -> None:
        _send(socket, b"kv", zmq.SNDMORE)
        _send(socket, SEQ, zmq.SNDMORE)
        _send(socket, payload)

    found = {
        "send_multipart, no subscriber": cost(lambda: socket.send_multipart((b"kv", SEQ, payload))),
        "backend send three times, no subscriber": cost(directly),
    }
    many = libzmq_io()
    run = [(number, payload) for number in range(RUN)]

    def together() -> None:
        assert many is not None
        many.send(socket.underlying, b"kv", run)

    found[f"in one native call, of {RUN}, no subscriber"] = cost(together, times=TIMES // RUN) / RUN
    with Peer("peers", "count", port):
        socket.recv()
        found["send_multipart, one subscriber"] = cost(lambda: socket.send_multipart((b"kv", SEQ, payload)))
        found["backend send three times, one subscriber"] = cost(directly)
        found[f"in one native call, of {RUN}, one subscriber"] = cost(together, times=TIMES // RUN) / RUN
    socket.close(linger=0)
    context.term()
    return found


def receiving() -> dict[str, float]:
    """Three frames from a socket in the same process, so that nothing but taking them out is measured."""
    payload = msgspec.msgpack.encode(batch_of(1))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (sender, receiver):
        socket.set_hwm(0)
    sender.bind("inproc://micro")
    receiver.connect("inproc://micro")

    def fill() -> None:
        for _ in range(TIMES):
            sender.send_multipart((b"kv", SEQ, payload))

    def asking_each() -> None:
        _recv(receiver, 1)
        while _get(receiver, zmq.RCVMORE):
            _recv(receiver, 1)

    def asking_once() -> None:
        not_asking()
        _get(receiver, zmq.RCVMORE)

    many = libzmq_io()
    first = 0

    def count() -> None:
        nonlocal first
        first = 0
        for number in range(TIMES):
            sender.send_multipart((b"kv", number.to_bytes(8, "big"), payload))

    def together() -> None:
        nonlocal first
        assert many is not None
        payloads, _, _ = many.receive(receiver.underlying, b"kv", first, RUN, RUN)
        first += len(payloads)

    def not_asking() -> None:
        _recv(receiver, 1)
        _recv(receiver, 1)
        _recv(receiver, 1)

    found = {
        "recv_multipart": cost(lambda: receiver.recv_multipart(zmq.DONTWAIT), fill),
        "backend recv, asking after each frame": cost(asking_each, fill),
        "backend recv, asking once": cost(asking_once, fill),
        "backend recv, not asking": cost(not_asking, fill),
        f"in one native call, of {RUN}": cost(together, count, times=TIMES // RUN) / RUN,
    }
    context.destroy(linger=0)
    return found


def handing_over() -> dict[str, float]:
    """One batch into a queue, and what waking a thread is made of, with nobody waiting."""
    unbounded: queue.Queue[int] = queue.Queue()
    plain: deque[int] = deque()
    event, lock = threading.Event(), _thread.allocate_lock()

    def set_and_clear() -> None:
        event.set()
        event.clear()

    def take_and_release() -> None:
        lock.acquire()
        lock.release()

    return {
        "queue.Queue.put": cost(lambda: unbounded.put(1)),
        "deque.append": cost(lambda: plain.append(1)),
        "threading.Event: set and clear": cost(set_and_clear),
        "lock: acquire and release": cost(take_and_release),
    }


def main() -> None:
    """Print every group."""
    report("sending (ADR 0002)", sending())
    report("handing over (ADR 0002)", handing_over())
    report("receiving (ADR 0004)", receiving())


if __name__ == "__main__":
    main()
