"""Workers that the services follow. They use only ZeroMQ, so that no publisher thread delays the batches.

Each worker stores all sent batches and answers replay requests, since our service needs replay to regard a stream as EXACT.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import islice
from threading import Event, Thread
from types import TracebackType
from typing import Final, NamedTuple, Self

import zmq

from benchmarks.processes import receive_line, send_line
from benchmarks.workload import chain, stores
from kvevents.wire.framing import (
    Malformed,
    live_frames,
    parse_replay_request,
    replay_batch_frames,
    replay_end_frames,
)

TOPIC: Final = b"kv-events"
REQUEST_CHAIN: Final = 64
"""Number of blocks of a prompt of the fleet."""
TICK: Final = 0.001
"""Shortest sleep of a sender, in seconds."""
_POLL_MS: Final = 100


class Endpoints(NamedTuple):
    """The endpoints of one worker."""

    events: str
    replay: str


class Workers:
    """Several workers in this process; a context manager."""

    def __init__(self, count: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._batches: list[list[bytes]] = [[] for _ in range(count)]
        self._events = [self._bind(zmq.XPUB) for _ in range(count)]
        self._replays = [self._bind(zmq.ROUTER) for _ in range(count)]
        pairs = zip(self._events, self._replays, strict=True)
        self.endpoints = [Endpoints(_endpoint(events), _endpoint(replays)) for events, replays in pairs]
        self._stop = Event()
        self._thread = Thread(target=self._answer, daemon=True)
        self._thread.start()

    def wait_for_subscribers(self) -> None:
        """Wait until every worker has a subscriber."""
        for socket in self._events:
            socket.recv()

    def send(self, number: int, payload: bytes) -> None:
        """Send a batch of one worker."""
        batches = self._batches[number]
        batches.append(payload)
        self._events[number].send_multipart(live_frames(TOPIC, len(batches) - 1, payload))

    def _bind(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind("tcp://127.0.0.1:*")
        return socket

    def _answer(self) -> None:
        poller = zmq.Poller()
        batches_of_socket = dict(zip(self._replays, self._batches, strict=True))
        for socket in self._replays:
            poller.register(socket, zmq.POLLIN)
        while not self._stop.is_set():
            for socket, _ in poller.poll(_POLL_MS):
                _replay(socket, batches_of_socket[socket])
        for socket in self._replays:
            socket.close(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        for socket in self._events:
            socket.close(0)
        self._context.term()


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    name = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(name, bytes)
    return name.rstrip(b"\0").decode()


def _replay(socket: zmq.Socket[bytes], batches: list[bytes]) -> None:
    request = parse_replay_request(socket.recv_multipart())
    if isinstance(request, Malformed):
        return
    for seq in range(request.start, len(batches)):
        socket.send_multipart([request.identity, *replay_batch_frames(TOPIC, seq, batches[seq])])
    socket.send_multipart([request.identity, *replay_end_frames(has_topic=True)])


def _requests(seed: int, blocks: int) -> Iterator[bytes]:
    draw = random.Random(seed)  # noqa: S311 - test data
    while True:
        yield from stores(chain(draw, REQUEST_CHAIN), blocks)


def serve(count: int, first: int, every: int, rate: int, blocks: int, seconds: int) -> None:
    """Run each `every`-th worker of a fleet from worker `first` on, with `rate` batches per second at equal intervals.

    Report the endpoints, wait for subscribers and for the time to begin, send, and answer replay requests until the parent
    ends.
    """
    fleet, batches = count * every, rate * seconds
    with Workers(count) as workers:
        payloads = [list(islice(_requests(first + index * every, blocks), batches)) for index in range(count)]
        send_line(workers.endpoints)
        workers.wait_for_subscribers()
        send_line("followed")
        if (began := receive_line()) is None:
            return
        time.sleep(max(0.0, began - time.monotonic()))
        max_delay, cpu = 0.0, time.process_time()
        for batch in range(batches):
            for index in range(count):
                due = (batch + (first + index * every) / fleet) / rate
                delay = time.monotonic() - began - due
                if delay < 0:
                    time.sleep(max(TICK, -delay))
                max_delay = max(max_delay, delay)
                workers.send(index, payloads[index][batch])
        send_line({"late": max_delay, "cpu": time.process_time() - cpu, "seconds": time.monotonic() - began})
        receive_line()
