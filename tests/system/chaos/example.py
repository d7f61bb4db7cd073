"""The example subscriber of vLLM (`examples/online_serving/kv_events_subscriber.py`), in a process of its own.

It requests replay on a REQ socket, which receives one message of a reply and drops the rest. Since vLLM 0.26 that message has
one frame more than the example unpacks. It never stores the number of a live batch, so as released it never requests a replay.
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
from tests.system.chaos_kit.truth import EMPTY, key_of

POLL_MS: Final = 50
REPLAY_MS: Final = 200
CONNECT_MS: Final = 5_000
SUBSCRIBED_SECONDS: Final = 0.05
"""Time from a handshake until the publisher has the subscription."""


@dataclass(frozen=True, slots=True)
class Example:
    """The settings of an example subscriber."""

    name: str
    endpoint: str
    replay_endpoint: str
    corrected: bool
    topic: str = "kv-events"


class Received(NamedTuple):
    """The state of an example subscriber."""

    keys: list[int]
    """Keys of the processed batches, each once."""
    digest: bytes
    """Digest of an index to which the same batches were applied."""


class _ExampleSubscriber:
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
        self._applied = 0

    def wait_for_connection(self) -> None:
        """Wait until the publisher has the subscription. The example does not wait, and misses what is sent before."""
        self._monitor.poll(CONNECT_MS)
        self._sub.disable_monitor()
        time.sleep(SUBSCRIBED_SECONDS)

    def process_one(self) -> None:
        """Do one pass of the loop of the example."""
        # The example prints "Error decoding message:" and continues after any exception.
        with suppress(Exception):
            if self._sub.poll(POLL_MS):
                _, number, payload = self._sub.recv_multipart()
                seq = int.from_bytes(number, "big")
                last = self._last
                if self._corrected:
                    self._last = seq
                if last >= 0 and seq > last + 1:
                    self._request_replay(last, seq)
                self._process(payload)

    def _request_replay(self, last: int, seq: int) -> None:
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
        return Received(list(self._keys), digest)


def run(pipe: Connection, example: Example) -> None:
    """Run the process: send `"connected"`, and then `Received` for each message in the pipe."""
    subscriber = _ExampleSubscriber(example)
    subscriber.wait_for_connection()
    pipe.send("connected")
    with suppress(EOFError, BrokenPipeError):
        while True:
            subscriber.process_one()
            while pipe.poll():
                pipe.recv()
                pipe.send(subscriber.received())
