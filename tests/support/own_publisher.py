"""A stand-in for the built-in publishers of vLLM and SGLang, which are equal in all releases.

Like them, it sends from a thread, takes numbers from `_seq_gen` and answers replay requests from `_buffer`. Only the attributes
that the plugin uses have the names of the engines.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from typing import Any

import msgspec
import zmq

from kvevents.endpoints import connectable_endpoint, offset_endpoint_port

END = (-1).to_bytes(8, "big", signed=True)


class OwnPublisher:
    """Publishes the batches of one rank."""

    def __init__(
        self, data_parallel_rank: int, endpoint: str, replay_endpoint: str, buffer_steps: int = 10_000, **_options: Any
    ) -> None:
        self._rank = data_parallel_rank
        self._seq_gen = itertools.count()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._queue: queue.Queue[Any] = queue.Queue()
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets = [self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)]
        try:
            self.endpoint, self.replay_endpoint = map(self._bind, self._sockets, (endpoint, replay_endpoint))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, daemon=True, name="own-publisher")
        self._thread.start()

    def _bind(self, socket: zmq.Socket[Any], endpoint: str) -> str:
        socket.bind(offset_endpoint_port(endpoint, self._rank) or endpoint)
        bound = socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return connectable_endpoint(bound.rstrip(b"\0").decode())

    def publish(self, batch: Any) -> None:
        self._queue.put(batch)

    def shutdown(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
            self._context.destroy(linger=1000)

    def _run(self) -> None:
        events, replay = self._sockets
        while True:
            while replay.poll(0):
                self._answer(replay)
            try:
                batch = self._queue.get(timeout=0.01)
            except queue.Empty:
                continue
            if batch is None:
                return
            seq, payload = next(self._seq_gen), msgspec.msgpack.encode(batch)
            self._buffer.append((seq, payload))
            events.send_multipart([b"", seq.to_bytes(8, "big"), payload])

    def _answer(self, replay: zmq.Socket[Any]) -> None:
        client, _, start = replay.recv_multipart()
        for seq, payload in list(self._buffer):
            if seq >= int.from_bytes(start, "big"):
                replay.send_multipart([client, b"", b"", seq.to_bytes(8, "big"), payload])
        replay.send_multipart([client, b"", b"", END, b""])
