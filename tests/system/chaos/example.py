"""vLLM's example subscriber (`examples/online_serving/kv_events_subscriber.py`), as it behaves, in a process of its own.

It asks for replay on a REQ socket, which takes one message of an answer and drops the rest; from vLLM 0.26 on that message has
a frame more than it unpacks. It never stores the number of a live batch, so as released it never requests a replay.
`corrected` stores it, and requests a replay once for each gap.
Its batches go into an index without resets, since it does not see restarts.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import msgspec
import zmq

from kvevents.index import PrefixIndex
from kvevents.stream import Batch
from kvevents.wire import decode_batch
from tests.system.chaos.consumer import NAME
from tests.system.chaos.truth import EMPTY, key_of

POLL_MS: Final = 50
REPLAY_MS: Final = 200
CONNECT_MS: Final = 5_000
SUBSCRIBED_SECONDS: Final = 0.05
"""From a handshake until the publisher knows of the subscription."""


@dataclass(frozen=True, slots=True)
class Example:
    """How one of them is started."""

    name: str
    endpoint: str
    replay_endpoint: str
    corrected: bool
    topic: str = "kv-events"


class Received(NamedTuple):
    """Its reply to a question."""

    keys: list[int]
    """Of the batches that it processed, each once."""
    digest: bytes
    """Of an index that received the same batches."""
    missed: int
    """Batches that it said it had missed."""
    errors: int
    """Exceptions that it printed."""


class _Listener:
    def __init__(self, example: Example) -> None:
        self._corrected = example.corrected
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sub = context.socket(zmq.SUB)
        self._monitor = self._sub.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
        self._sub.connect(example.endpoint)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, example.topic)
        self._replay = context.socket(zmq.REQ)
        self._replay.linger = 0
        self._replay.connect(example.replay_endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._replay, zmq.POLLIN)
        self._last = -1
        self._index = PrefixIndex()
        self._keys: dict[int, None] = {}
        self._applied = self._missed = self._errors = 0

    def wait_for_connection(self) -> None:
        """What the example does not do; without, it would miss what is sent before it has connected."""
        self._monitor.poll(CONNECT_MS)
        self._sub.disable_monitor()
        time.sleep(SUBSCRIBED_SECONDS)

    def turn(self) -> None:
        """One pass through the example's loop."""
        try:
            if self._sub.poll(POLL_MS):
                _, number, payload = self._sub.recv_multipart()
                seq = int.from_bytes(number, "big")
                last = self._last
                if self._corrected:
                    self._last = seq
                if last >= 0 and seq > last + 1:
                    self._missed += seq - last - 1
                    self._ask(last, seq)
                self._process(payload)
        except Exception:  # noqa: BLE001 - "Error decoding message:", and on it goes
            self._errors += 1

    def _ask(self, last: int, seq: int) -> None:
        self._replay.send((last + 1).to_bytes(8, "big"))
        while self._poller.poll(timeout=REPLAY_MS):
            number, payload = self._replay.recv_multipart()
            if not payload:
                break
            replayed = int.from_bytes(number, "big")
            if replayed > last:
                self._process(payload)
                last = replayed
                if replayed >= seq - 1:
                    break

    def _process(self, payload: bytes) -> None:
        decoded = decode_batch(payload)
        if decoded.rejected:
            raise msgspec.ValidationError(decoded.rejected[0].reason)
        batch = decoded.batch
        self._keys[key_of(batch.ts)] = None
        self._index.apply(Batch(NAME, 0, 0, self._applied, batch.ts, batch.events, False))
        self._applied += 1

    def received(self) -> Received:
        digest = bytes.fromhex(self._index.digest(NAME)) if self._applied else EMPTY
        return Received(list(self._keys), digest, self._missed, self._errors)


def run(pipe: Connection, example: Example) -> None:
    """The process: connected, it says so; then any message is a question, answered with `Received`."""
    listener = _Listener(example)
    listener.wait_for_connection()
    pipe.send("connected")
    with suppress(EOFError, BrokenPipeError):
        while True:
            listener.turn()
            while pipe.poll():
                pipe.recv()
                pipe.send(listener.received())
