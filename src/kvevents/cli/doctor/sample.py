"""A sample of what an endpoint publishes: all messages, decoded and counted."""

from __future__ import annotations

import time
from collections import Counter, deque
from math import ceil
from types import TracebackType
from typing import Final, Self

import msgspec
import zmq

from kvevents.cli.console import number_ranges
from kvevents.endpoints import needs_ipv6
from kvevents.errors import EndpointError
from kvevents.security import Curve
from kvevents.security.zap import secure_sockets
from kvevents.wire import Decoded, Live, decode_batch, parse_live

MAX_NEWEST: Final = 32
"""Batches whose payloads are kept for the comparison with replay."""
MAX_GAPS: Final = 1_000
"""Gaps whose sequence numbers are kept; further ones are only counted."""
MAX_GAP: Final = 10_000
"""Longest gap whose sequence numbers are kept: as many as an engine keeps batches."""


class SequenceNumbers:
    """The sequence numbers of one stream's live batches. Several topics are several streams, of which none is kept."""

    def __init__(self, topic: str) -> None:
        self.received = 0
        self.missing = 0
        self.gaps: list[tuple[int, int]] = []
        """First and last missing number of each gap, the oldest first."""
        self.newest: deque[tuple[int, bytes]] = deque(maxlen=MAX_NEWEST)
        self._prefix = topic.encode()
        self._topic: bytes | None = None
        self._has_several_topics = False
        self._last: int | None = None

    def add(self, topic: bytes, seq: int, payload: bytes) -> None:
        """Count one live batch. A number that is not above the last one begins another incarnation of the publisher."""
        if self._has_several_topics or not topic.startswith(self._prefix):
            return
        if self._topic is not None and topic != self._topic:
            self._clear()
            return
        self._topic = topic
        if self._last is not None and seq <= self._last:
            self.newest.clear()
            self.gaps.clear()
        elif self._last is not None and seq > self._last + 1:
            self._add_gap(self._last + 1, seq - 1)
        self._last = seq
        self.received += 1
        self.newest.append((seq, payload))

    @property
    def shown(self) -> str:
        """The missing numbers as text."""
        return number_ranges(self.gaps) or "before a restart"

    def _add_gap(self, first: int, last: int) -> None:
        self.missing += last - first + 1
        if len(self.gaps) < MAX_GAPS and last - first < MAX_GAP:
            self.gaps.append((first, last))

    def _clear(self) -> None:
        self._has_several_topics = True
        self.received = self.missing = 0
        self.gaps.clear()
        self.newest.clear()


MAX_DECODED: Final = 20_000
"""Messages that are decoded; further ones are only counted. Detecting a dialect takes some 50 us."""
MAX_COMPARED: Final = 500
"""Batches that are compared to detect the dialect, since half of all batches match several dialects."""
MAX_PER_TURN: Final = 1_000
MAX_TOPICS: Final = 1_000
RECEIVE_HWM: Final = 100_000


class DecodedContents:
    """Counts of what decoded batches contain."""

    def __init__(self) -> None:
        self.batches = 0
        self.events: Counter[str] = Counter()
        self._dialects: Counter[str] = Counter()
        self._compared: list[bytes] = []
        self.rejects: Counter[str] = Counter()
        self.undecodable = 0
        """Payloads without any event that can be decoded."""
        self.example = ""
        """Detail of the first rejection."""
        self.ranks: set[int] = set()

    def add(self, payload: bytes) -> None:
        """Decode and count one payload."""
        if self.batches >= MAX_DECODED:
            return
        decoded = decode_batch(payload)
        self.batches += 1
        self.events.update(type(event).__name__ for event in decoded.batch.events)
        self._add_rejects(decoded)
        if decoded.batch.data_parallel_rank is not None:
            self.ranks.add(decoded.batch.data_parallel_rank)
        if decoded.batch.events or decoded.rejected:
            # An empty batch has the same bytes in every release.
            self._dialects[_name(decoded)] += 1
            if len(self._compared) < MAX_COMPARED and not decoded.rejected:
                self._compared.append(payload)

    @property
    def dialects(self) -> Counter[str]:
        """The oldest release that can have written all batches; if there is none, the releases of the single batches."""
        if self.rejects or len(self._dialects) < 2:
            return self._dialects
        merged = _merged(self._compared)
        dialect = None if merged is None else decode_batch(merged).dialect
        return self._dialects if dialect is None else Counter({dialect.name: self._dialects.total()})

    def _add_rejects(self, decoded: Decoded) -> None:
        for rejected in decoded.rejected:
            self.rejects[rejected.reason] += rejected.count
            self.example = self.example or rejected.detail
        self.undecodable += bool(decoded.rejected) and not decoded.batch.events


def _name(decoded: Decoded) -> str:
    return decoded.dialect.name if decoded.dialect else "unknown"


def _merged(payloads: list[bytes]) -> bytes | None:
    """Return one batch with the events of all; None if the batches are not arrays of the same length."""
    try:
        parts = [msgspec.msgpack.decode(payload, type=list[msgspec.Raw]) for payload in payloads]
        events = [event for part in parts for event in msgspec.msgpack.decode(part[1], type=list[msgspec.Raw])]
    except (msgspec.DecodeError, IndexError):
        return None
    if len({len(part) for part in parts}) != 1:
        return None
    return msgspec.msgpack.encode([parts[0][0], events, *parts[0][2:]])


class Sample:
    """A SUB socket that receives everything. It is separate from the subscriber, which hides invalid messages."""

    def __init__(self, endpoint: str, topic: str = "", *, bind: bool, curve: Curve | None = None) -> None:
        self.messages = 0
        self.bytes = 0
        self.seconds = 0.0
        """From the start to the last call of `take`."""
        self._began: Final = time.monotonic()
        self.topics: Counter[bytes] = Counter()
        self.malformed: Counter[str] = Counter()
        self.contents = DecodedContents()
        self.numbers = SequenceNumbers(topic)
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
        """Wait up to `timeout` seconds for messages, and count those that have arrived."""
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
        """Count one message."""
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
