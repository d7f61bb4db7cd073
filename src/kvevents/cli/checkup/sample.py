"""A sample of what an endpoint publishes, whatever it is: subscribed to everything, decoded, counted."""

from __future__ import annotations

import time
from collections import Counter
from math import ceil
from types import TracebackType
from typing import Final, Self

import msgspec
import zmq

from kvevents.cli.checkup.numbers import Numbers
from kvevents.endpoints import needs_ipv6
from kvevents.errors import EndpointError
from kvevents.security import Curve
from kvevents.security.zap import secure_sockets
from kvevents.wire import Decoded, Live, decode_batch, parse_live

MAX_DECODED: Final = 20_000
"""Messages looked into; beyond that they are counted only. Telling a dialect takes some 50 us."""
MAX_COMPARED: Final = 500
"""Batches by which the dialect of a stream is told: half of all batches look like several."""
MAX_PER_TURN: Final = 1_000
MAX_TOPICS: Final = 1_000
RECEIVE_HWM: Final = 100_000


class Contents:
    """What batches hold, live or replayed."""

    def __init__(self) -> None:
        self.batches = 0
        self.events: Counter[str] = Counter()
        self._dialects: Counter[str] = Counter()
        self._compared: list[bytes] = []
        self.rejects: Counter[str] = Counter()
        self.refused = 0
        """Payloads that are no batch at all."""
        self.example = ""
        """The first rejection's detail."""
        self.ranks: set[int] = set()

    def add(self, payload: bytes) -> None:
        """Look into one payload."""
        if self.batches >= MAX_DECODED:
            return
        decoded = decode_batch(payload)
        self.batches += 1
        self.events.update(type(event).__name__ for event in decoded.batch.events)
        self._add_rejects(decoded)
        if decoded.batch.data_parallel_rank is not None:
            self.ranks.add(decoded.batch.data_parallel_rank)
        if decoded.batch.events or decoded.rejected:
            # An empty batch looks the same in every release.
            self._dialects[_name(decoded)] += 1
            if len(self._compared) < MAX_COMPARED and not decoded.rejected:
                self._compared.append(payload)

    @property
    def dialects(self) -> Counter[str]:
        """The oldest release that writes like this; where no single one does, one for each batch."""
        if self.rejects or len(self._dialects) < 2:
            return self._dialects
        merged = _merged(self._compared)
        dialect = None if merged is None else decode_batch(merged).dialect
        return self._dialects if dialect is None else Counter({dialect.name: self._dialects.total()})

    def _add_rejects(self, decoded: Decoded) -> None:
        for rejected in decoded.rejected:
            self.rejects[rejected.reason] += rejected.count
            self.example = self.example or rejected.detail
        self.refused += bool(decoded.rejected) and not decoded.batch.events


def _name(decoded: Decoded) -> str:
    return decoded.dialect.name if decoded.dialect else "unknown"


def _merged(payloads: list[bytes]) -> bytes | None:
    """One batch with the events of all; None when they are not arrays of one length."""
    try:
        parts = [msgspec.msgpack.decode(payload, type=list[msgspec.Raw]) for payload in payloads]
        events = [event for part in parts for event in msgspec.msgpack.decode(part[1], type=list[msgspec.Raw])]
    except (msgspec.DecodeError, IndexError):
        return None
    if len({len(part) for part in parts}) != 1:
        return None
    return msgspec.msgpack.encode([parts[0][0], events, *parts[0][2:]])


class Sample:
    """A SUB socket of its own, beside the subscriber's, since that one hides what it cannot use."""

    def __init__(self, endpoint: str, topic: str = "", *, bind: bool, curve: Curve | None = None) -> None:
        self.messages = 0
        self.bytes = 0
        self.seconds = 0.0
        """From the start to the last look."""
        self._began: Final = time.monotonic()
        self.topics: Counter[bytes] = Counter()
        self.malformed: Counter[str] = Counter()
        self.contents = Contents()
        self.numbers = Numbers(topic)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._security = secure_sockets(self._context, curve, endpoint)
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.RCVHWM, RECEIVE_HWM)
        if needs_ipv6(endpoint):
            self._socket.set(zmq.IPV6, 1)
        self._socket.subscribe(b"")
        if self._security is not None:
            self._security.apply(self._socket)
        try:
            (self._socket.bind if bind else self._socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self.close()
            verb = "listen at" if bind else "connect to"
            raise EndpointError(f"cannot {verb} {endpoint}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)
        if self._security is not None:
            self._security.close()
        self._context.term()

    def take(self, timeout: float) -> None:
        """Wait `timeout` seconds at most for messages and look at what there is."""
        waiting = self._socket.poll(ceil(1000 * timeout))
        self.seconds = time.monotonic() - self._began
        if not waiting:
            return
        for _ in range(MAX_PER_TURN):
            try:
                self.add(self._socket.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return

    def add(self, frames: list[bytes]) -> None:
        """Look at one message."""
        self.messages += 1
        self.bytes += sum(map(len, frames))
        if len(self.topics) < MAX_TOPICS or frames[0] in self.topics:
            self.topics[frames[0]] += 1
        live = parse_live(frames)
        if isinstance(live, Live):
            self.contents.add(live.payload)
            self.numbers.add(live.topic, live.seq, live.payload)
        else:
            self.malformed[live.reason] += 1
