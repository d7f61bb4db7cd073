"""Parts of the publisher tests: consumers on real sockets, waits with a deadline, and a batch that blocks the thread."""

from __future__ import annotations

import os
import select
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import pytest
import zmq

from kvevents.events import BlockStored, EventBatch
from kvevents.publisher import PublisherSettings, ZmqEventPublisher

DEADLINE = 60.0
"""Deadline of every wait in seconds. Only a failing test waits that long."""
ANY = "tcp://127.0.0.1:*"
QUICK = PublisherSettings(max_sleep=0.005, poll_interval=0.002)
"""Settings with which a publisher polls often, so that tests do not wait long for the number of subscribers."""
Socket = zmq.Socket[bytes]
_opened: list[Socket] = []


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Check the condition every millisecond until it holds; fail after `DEADLINE`."""
    until = monotonic() + DEADLINE
    pause = threading.Event()
    while not condition():
        assert monotonic() < until, f"waited {DEADLINE:g} seconds for {what}"
        pause.wait(0.001)


@pytest.fixture(name="context")
def consumers_context() -> Iterator[zmq.Context[Socket]]:
    """A context for consumers; its sockets stay open until the test ends."""
    with zmq.Context() as made:
        yield made
        while _opened:
            _opened.pop().close()


@contextmanager
def run_publisher(*args: Any, **kwargs: Any) -> Iterator[ZmqEventPublisher]:
    """Yield a publisher with `QUICK` settings, by default on a port that the OS chooses."""
    kwargs.setdefault("endpoint", ANY)
    kwargs.setdefault("settings", QUICK)
    publisher = ZmqEventPublisher(*args, **kwargs)
    try:
        yield publisher
    finally:
        publisher.shutdown()


def open_consumer(context: zmq.Context[Socket], kind: int) -> Socket:
    socket: Socket = context.socket(kind)
    socket.set_hwm(0)
    socket.rcvtimeo = socket.sndtimeo = int(DEADLINE * 1000)
    socket.linger = 0
    _opened.append(socket)
    return socket


def last_endpoint(socket: Socket) -> str:
    """Return the endpoint to which a socket is bound."""
    found = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(found, bytes)
    return found.decode().rstrip("\0")


def subscribe(context: zmq.Context[Socket], publisher: ZmqEventPublisher, topic: bytes = b"") -> Socket:
    """Return a subscriber whose subscription has reached the publisher, so that it receives everything from now on."""
    before = publisher.stats().subscribers
    socket = open_consumer(context, zmq.SUB)
    socket.connect(publisher.endpoint)
    socket.subscribe(topic)
    wait_until(lambda: publisher.stats().subscribers > before, "a subscription")
    return socket


def connect_dealer(context: zmq.Context[Socket], publisher: ZmqEventPublisher) -> Socket:
    socket = open_consumer(context, zmq.DEALER)
    assert publisher.replay_endpoint is not None
    socket.connect(publisher.replay_endpoint)
    return socket


def request_replay(socket: Socket, start: int) -> None:
    socket.send_multipart([b"", start.to_bytes(8, "big")])


def read_reply(socket: Socket) -> list[tuple[int, bytes]]:
    """Return the batches of one reply, up to the end marker."""
    found: list[tuple[int, bytes]] = []
    while (frames := socket.recv_multipart())[-1] != b"":
        found.append((int.from_bytes(frames[-2], "big"), frames[-1]))
    return found


def numbers(reply: list[tuple[int, bytes]]) -> list[int]:
    return [seq for seq, _ in reply]


def receive(socket: Socket) -> tuple[int, bytes]:
    _, seq, payload = socket.recv_multipart()
    return int.from_bytes(seq, "big"), payload


def batch(number: int = 0, blocks: int = 1) -> EventBatch:
    """Return a batch that contains its number."""
    hashes = [number * 1000 + block for block in range(blocks)]
    return EventBatch(float(number), [BlockStored(hashes, None, list(range(1000, 1000 + 16 * blocks)), 16)])


def find_faults_in_fork(find_faults: Callable[[], list[str]]) -> str:
    """Return the faults that the function finds in a forked child of this process."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.write(writing, "; ".join(find_faults()).encode())
        except BaseException as error:  # noqa: BLE001 - the parent reports it
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as output:
        is_over = select.select([output], [], [], DEADLINE)[0]
        if not is_over:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return output.read() if is_over else "the child hangs"


class Gate:
    """A batch of a custom type. Its encoding waits until the test opens the gate, and then fails."""

    def __init__(self) -> None:
        self.data_parallel_rank = 0
        self.reached = threading.Event()
        self._open = threading.Event()

    @property
    def events(self) -> list[Any]:
        self.reached.set()
        assert self._open.wait(DEADLINE), "the gate was not opened"
        raise ValueError("a gate has no bytes")

    def open(self) -> None:
        self._open.set()


@contextmanager
def hold_publisher(publisher: ZmqEventPublisher) -> Iterator[Gate]:
    """Block the publisher's thread while it encodes a batch. The batch uses one sequence number."""
    gate = Gate()
    publisher.publish(gate)
    assert gate.reached.wait(DEADLINE)
    try:
        yield gate
    finally:
        gate.open()
