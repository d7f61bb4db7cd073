"""Trials of one subscriber."""

from __future__ import annotations

import time

import zmq

from benchmarks.processes import Peer
from tools.ports import reserve_port


def bare(port: int, count: int) -> tuple[float, float]:
    """Read as a program without kvevents does: with `recv_multipart`, a typed decoder of msgspec, and a check of the number."""
    import msgspec  # noqa: PLC0415 - each process loads only what its trial is about

    from tools import released  # noqa: PLC0415 - as above

    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.set(zmq.RCVHWM, 0)
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.subscribe(b"")
    decode = msgspec.msgpack.Decoder(released.load(released.VLLM_NEWEST).KVEventBatch).decode
    socket.poll()
    wall, cpu, next_seq = time.monotonic(), time.process_time(), 0
    while next_seq < count:
        _, seq_bytes, payload = socket.recv_multipart()
        seq = int.from_bytes(seq_bytes, "big")
        batch = decode(payload)
        if seq != next_seq or not batch.events:
            raise RuntimeError(f"expected {next_seq}, got {seq}")
        next_seq += 1
    return time.monotonic() - wall, time.process_time() - cpu


def ours(port: int, count: int) -> tuple[float, float]:
    """Read the batches with `Subscriber`."""
    from kvevents.stream import Batch, Source  # noqa: PLC0415 - as above
    from kvevents.subscriber import Subscriber  # noqa: PLC0415 - as above

    with Subscriber([Source(f"tcp://127.0.0.1:{port}", name="e0")]) as subscriber:
        first = subscriber.receive(timeout=10.0)
        wall, cpu, next_seq = time.monotonic(), time.process_time(), 1
        assert isinstance(first, Batch)
        while next_seq < count:
            delivery = subscriber.receive(timeout=10.0)
            if not isinstance(delivery, Batch) or delivery.seq != next_seq or not delivery.events:
                raise RuntimeError(f"expected {next_seq}, got {delivery}")
            next_seq += 1
    return time.monotonic() - wall, time.process_time() - cpu


def read(contender: str, blocks: int, count: int) -> dict[str, float]:
    """Return the batches per second from a process that only sends, and the CPU time of this process for each batch."""
    port = reserve_port()
    with Peer("peers.blast", port, blocks, count) as sender:
        sender.receive()
        wall, cpu = {"bare": bare, "ours": ours}[contender](port, count)
    return {"rate": count / wall, "cpu": cpu / count * 1e6}


def recover(contender: str, blocks: int, count: int) -> dict[str, float]:
    """Recover the buffer of an engine's publisher by its own replay, each answer of which loses most batches."""
    from kvevents.stream import Batch, Source  # noqa: PLC0415 - as above
    from kvevents.subscriber import Subscriber  # noqa: PLC0415 - as above

    port, replay_port = reserve_port(), reserve_port()
    with Peer("peers.engine", contender, port, replay_port, blocks, count) as engine:
        engine.receive()
        endpoints = (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}")
        began, cpu, next_seq = time.monotonic(), time.process_time(), 0
        with Subscriber([Source(*endpoints, name="e0")]) as subscriber:
            while next_seq < count and time.monotonic() - began < 60.0:
                delivery = subscriber.receive(timeout=5.0)
                if not isinstance(delivery, Batch) or delivery.seq != next_seq:
                    break
                next_seq += 1
            seconds, status = time.monotonic() - began, subscriber.status("e0")
            cpu = time.process_time() - cpu
    return {"missing": count - next_seq, "seconds": seconds, "requests": status.counters.requests, "cpu": cpu / count * 1e6}
