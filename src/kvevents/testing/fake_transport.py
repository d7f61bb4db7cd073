"""Engines and connections in memory, to test a router without sockets and without waiting.

::

    transport = FakeTransport()
    engine = transport.engine("tcp://engine:5557", "tcp://engine:5558")
    with Subscriber(Source(engine.endpoint, engine.replay_endpoint), transport=transport, clock=transport.clock) as subscriber:
        engine.publish(BlockRemoved([1]))
        batch = subscriber.receive(timeout=1)

Where a real subscriber would wait, the virtual clock advances at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvevents.errors import ConfigError, EndpointError
from kvevents.events import EventBatch, KVEvent
from kvevents.settings import check_finite
from kvevents.stream import FetchRequest, Source, Stream
from kvevents.testing.playlist import ENGINE_BUFFER_STEPS
from kvevents.wire import encode_batch, live_frames, replay_batch_frames, replay_end_frames


class VirtualClock:
    """A replacement for `time.monotonic` that advances only when `advance` is called.

    Calling the clock returns its time in seconds, which never decreases. Any thread may read and advance it.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = float(check_finite(start))
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self._now

    def __repr__(self) -> str:
        return f"<VirtualClock at {self._now:g} s>"

    def advance(self, seconds: float) -> float:
        """Advance by `seconds` (0 or more) and return the new time. Raise `ConfigError` for a negative or infinite number."""
        if check_finite(seconds) < 0:
            raise ConfigError(f"cannot advance the clock by {seconds} s: expected 0 or more")
        with self._lock:
            self._now += seconds
            return self._now


class FakeEngine:
    """A publisher in memory: sequence numbers from 0 in each incarnation, a bounded replay buffer, faults on demand."""

    def __init__(
        self, clock: VirtualClock, endpoint: str, replay_endpoint: str | None, topic: bytes, buffer_steps: int
    ) -> None:
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.is_up = True
        self.answers_replay = True
        """Whether the replay endpoint answers requests."""
        self.requests: list[int] = []
        """The first sequence number of each replay request, oldest request first."""
        self._clock = clock
        self._topic = topic
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self.next_seq = 0
        """Sequence number of the next batch."""
        self.connections: list[FakeConnection] = []
        """Open connections to this engine."""

    def publish(self, *events: KVEvent, lost: bool = False) -> int:
        """Publish a batch of `events` and return its sequence number.

        If `lost` is true, the batch is put into the replay buffer but is not sent live.
        """
        return self.publish_payload(encode_batch(EventBatch(self._clock(), list(events))), lost=lost)

    def publish_payload(self, payload: bytes, *, lost: bool = False) -> int:
        """Publish these bytes unchanged as a batch, and return its sequence number. `publish` explains `lost`."""
        seq = self.next_seq
        self.next_seq += 1
        self._buffer.append((seq, payload))
        if not lost:
            self.send_raw(live_frames(self._topic, seq, payload))
        return seq

    def skip_number(self) -> int:
        """Skip a sequence number, as an engine does if it cannot encode a batch. Return the skipped number."""
        self.next_seq += 1
        return self.next_seq - 1

    def send_raw(self, frames: list[bytes]) -> None:
        """Send these frames on the live stream."""
        if self.is_up:
            for connection in self.connections:
                connection.add_arrival(lambda stream, now: stream.receive_live(frames, now))

    def disconnect(self) -> None:
        """End every connection. Until `reconnect`, published batches only enter the replay buffer."""
        if self.is_up:
            self.is_up = False
            for connection in self.connections:
                connection.replies.clear()
                connection.add_arrival(lambda stream, _now: stream.end_connection())

    def reconnect(self) -> None:
        """Accept connections again."""
        if not self.is_up:
            self.is_up = True
            for connection in self.connections:
                connection.add_arrival(lambda stream, now: stream.begin_connection(now))

    def restart(self, unseen: list[KVEvent] | None = None) -> None:
        """Begin a new incarnation. Each event in `unseen` is published as a batch before any subscriber reconnects."""
        self.disconnect()
        self._buffer.clear()
        self.next_seq = 0
        for event in unseen or []:
            self.publish(event)
        self.reconnect()

    def answer(self, connection: FakeConnection, start: int) -> None:
        """Answer a request for batches from `start` on, unless the engine is down or does not answer replay requests."""
        self.requests.append(start)
        if not (self.is_up and self.answers_replay):
            return
        batches = [batch for batch in self._buffer if batch[0] >= start]
        connection.replies.extend(replay_batch_frames(self._topic, seq, payload) for seq, payload in batches)
        connection.replies.append(replay_end_frames(has_topic=True))


class FakeConnection:
    """The connection of one stream to a `FakeEngine`."""

    def __init__(self, engine: FakeEngine, transport: FakeTransport) -> None:
        self._engine = engine
        self._transport = transport
        self._arrivals: deque[Callable[[Stream, float], None]] = deque()
        """Live messages and connection changes that have arrived, as functions that feed them to the stream."""
        self.replies: deque[list[bytes]] = deque()
        """Messages of replay replies that have arrived, each as a list of frames."""
        self._is_closed = False

    @property
    def is_readable(self) -> bool:
        """Whether arrivals or replies wait for `feed_stream`; False after `close`."""
        return bool(self._arrivals or self.replies) and not self._is_closed

    def add_arrival(self, feed: Callable[[Stream, float], None]) -> None:
        """Queue a live message or a connection change."""
        self._arrivals.append(feed)

    def feed_stream(self, stream: Stream, now: float, limit: int) -> bool:
        """Feed at most `limit` arrived messages and connection changes to `stream`. Return True if further messages remain."""
        for _ in range(min(limit, len(self._arrivals))):
            self._arrivals.popleft()(stream, now)
        if self._arrivals and self.replies and stream.expected_run(1):
            stream.defer_replay_timeout(now)
            return True
        for _ in range(min(limit, len(self.replies))):
            stream.receive_replay(self.replies.popleft(), now)
        return self.is_readable

    @property
    def fault(self) -> str:
        """Why the connection is down; "" if it is up."""
        return "" if self._engine.is_up else "the fake engine is down"

    def deadline(self) -> float | None:
        """Return None: a fake connection has no timers."""
        return None

    def request_replay(self, request: FetchRequest) -> None:
        """Let the engine answer a replay request."""
        if request.needs_new_connection:
            self.replies.clear()
        self._engine.answer(self, request.start)

    def end_replay(self) -> None:
        """Drop the replies that have arrived and were not read."""
        self.replies.clear()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._engine.connections.remove(self)
            self._transport.discard(self)


class FakeTransport:
    """A `kvevents.subscriber.Transport` between subscribers and `FakeEngine`s. The subscribers must have its `clock`."""

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock = clock or VirtualClock()
        self._engines: dict[str, FakeEngine] = {}
        self._connections: list[FakeConnection] = []

    def engine(
        self, endpoint: str, replay_endpoint: str | None = None, topic: bytes = b"", buffer_steps: int = ENGINE_BUFFER_STEPS
    ) -> FakeEngine:
        """Start an engine at `endpoint`. Call this before a subscriber connects."""
        engine = self._engines[endpoint] = FakeEngine(self.clock, endpoint, replay_endpoint, topic, buffer_steps)
        return engine

    def open(self, source: Source) -> FakeConnection:
        """Connect to an engine of this transport. Raise `EndpointError` if no engine has this endpoint."""
        engine = self._engines.get(source.endpoint)
        if engine is None:
            sentence = f"no fake engine at {source.endpoint}; start one with FakeTransport.engine()"
            raise EndpointError(sentence, endpoint=source.endpoint)
        connection = FakeConnection(engine, self)
        self._connections.append(connection)
        engine.connections.append(connection)
        if engine.is_up:
            connection.add_arrival(lambda stream, now: stream.begin_connection(now))
        return connection

    def discard(self, connection: FakeConnection) -> None:
        """Remove a closed connection."""
        self._connections.remove(connection)

    def wait(self, timeout: float | None) -> list[FakeConnection]:
        """Return readable connections. If no connection is readable, advance the clock by `timeout` seconds.

        Raise `EndpointError` without a timeout: a real subscriber would wait for ever.
        """
        readable = [connection for connection in self._connections if connection.is_readable]
        if not readable:
            if timeout is None:
                raise EndpointError("no fake engine has anything to send, so receive() would wait forever: give it a timeout")
            self.clock.advance(timeout)
        return readable

    def take_found(self) -> list[Source]:
        """Return no sources: fake engines do not connect to a subscriber that binds."""
        return []

    def ignore_found(self, source: Source) -> None:
        """Do nothing, because `take_found` returns no sources."""

    @property
    def max_wait(self) -> None:
        """Return None: a fake transport has no timers."""

    def fileno(self) -> int:
        """Return -1: the transport has no descriptor, so `wait` must be called."""
        return -1

    def wake(self) -> None:
        """Do nothing, because `wait` never blocks."""

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._connections):
            connection.close()
