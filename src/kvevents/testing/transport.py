"""Engines and connections that exist only in memory: test a router without sockets and without waiting.

::

    transport = FakeTransport()
    engine = transport.engine("tcp://engine:5557", "tcp://engine:5558")
    with Subscriber(Source(engine.endpoint, engine.replay_endpoint), transport=transport, clock=transport.clock) as subscriber:
        engine.publish(BlockRemoved([1]))
        batch = subscriber.receive(timeout=1)

Where a real subscriber would wait, the virtual clock advances at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvevents.errors import EndpointError
from kvevents.events import EventBatch, KVEvent
from kvevents.stream import Ask, Source, Stream
from kvevents.testing.clock import VirtualClock
from kvevents.wire import encode_batch, live_frames, replay_batch_frames, replay_end_frames

DEFAULT_BUFFER_STEPS = 10_000


class FakeEngine:
    """A publisher in memory: numbers from 0 in each life, a bounded replay buffer, faults on demand."""

    def __init__(
        self, clock: VirtualClock, endpoint: str, replay_endpoint: str | None, topic: bytes, buffer_steps: int
    ) -> None:
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.up = True
        self.answers_replay = True
        """Set to False for a replay endpoint that is dead or mute."""
        self.requests: list[int] = []
        """Numbers from which replay was asked for."""
        self._clock = clock
        self._topic = topic
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._next_seq = 0
        self.links: list[FakeLink] = []
        """Open links to this engine."""

    @property
    def next_seq(self) -> int:
        """Number of the next batch."""
        return self._next_seq

    def publish(self, *events: KVEvent, lost: bool = False) -> int:
        """Publish a batch of `events` and return its number; `lost` keeps it from the live stream, not from the buffer."""
        return self.publish_payload(encode_batch(EventBatch(self._clock(), list(events))), lost=lost)

    def publish_payload(self, payload: bytes, *, lost: bool = False) -> int:
        """Publish these bytes as they are."""
        seq = self._next_seq
        self._next_seq += 1
        self._buffer.append((seq, payload))
        if not lost:
            self.send_raw(live_frames(self._topic, seq, payload))
        return seq

    def burn_number(self) -> int:
        """Use up a number for nothing, as an engine does for a batch that it cannot encode."""
        self._next_seq += 1
        return self._next_seq - 1

    def send_raw(self, frames: list[bytes]) -> None:
        """Send these frames on the live stream."""
        if self.up:
            for link in self.links:
                link.arrive(lambda stream, now: stream.receive_live(frames, now))

    def disconnect(self) -> None:
        """Lose every connection; batches published now are missed by everyone."""
        if self.up:
            self.up = False
            for link in self.links:
                link.replies.clear()
                link.arrive(lambda stream, _now: stream.disconnected())

    def reconnect(self) -> None:
        """Accept connections again."""
        if not self.up:
            self.up = True
            for link in self.links:
                link.arrive(lambda stream, now: stream.connected(now))

    def restart(self, unseen: list[KVEvent] | None = None) -> None:
        """Begin a new life from number 0; `unseen` events are published, one a batch, before anyone reconnects."""
        self.disconnect()
        self._buffer.clear()
        self._next_seq = 0
        for event in unseen or []:
            self.publish(event)
        self.reconnect()

    def attach(self, link: FakeLink) -> None:
        """A subscriber connects."""
        self.links.append(link)
        if self.up:
            link.arrive(lambda stream, now: stream.connected(now))

    def answer(self, link: FakeLink, start: int) -> None:
        """A subscriber asks for replay."""
        self.requests.append(start)
        if not (self.up and self.answers_replay):
            return
        link.replies.extend(replay_batch_frames(self._topic, seq, payload) for seq, payload in self._buffer if seq >= start)
        link.replies.append(replay_end_frames(with_topic=True))


class FakeLink:
    """One stream's connections to a `FakeEngine`."""

    def __init__(self, engine: FakeEngine, transport: FakeTransport) -> None:
        self._engine = engine
        self._transport = transport
        self._arrivals: deque[Callable[[Stream, float], None]] = deque()
        self.replies: deque[list[bytes]] = deque()
        self.closed = False

    @property
    def has_news(self) -> bool:
        """Whether `pump` would feed something."""
        return bool(self._arrivals or self.replies) and not self.closed

    def arrive(self, feed: Callable[[Stream, float], None]) -> None:
        """Something for the stream arrived."""
        self._arrivals.append(feed)

    def pump(self, stream: Stream, now: float, limit: int) -> bool:
        """Feed what has arrived."""
        for _ in range(min(limit, len(self._arrivals))):
            self._arrivals.popleft()(stream, now)
        if self._arrivals and self.replies and stream.coming(1):
            stream.replay_waits(now)
            return True
        for _ in range(min(limit, len(self.replies))):
            stream.receive_replay(self.replies.popleft(), now)
        return self.has_news

    @property
    def fault(self) -> str:
        """Whether the engine is down."""
        return "" if self._engine.up else "the fake engine is down"

    def deadline(self) -> float | None:
        """None: nothing here takes time."""
        return None

    def send(self, ask: Ask) -> None:
        """Ask the engine for replay."""
        if ask.fresh:
            self.replies.clear()
        self._engine.answer(self, ask.start)

    def end_replay(self) -> None:
        """Drop what is left of the answer."""
        self.replies.clear()

    def close(self) -> None:
        """Hear nothing any more."""
        if not self.closed:
            self.closed = True
            self._engine.links.remove(self)
            self._transport.forget(self)


class FakeTransport:
    """A `kvevents.subscriber.Transport` between subscribers and `FakeEngine`s; give its `clock` to the subscriber too."""

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock = clock or VirtualClock()
        self._engines: dict[str, FakeEngine] = {}
        self._links: list[FakeLink] = []

    def engine(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: bytes = b"",
        buffer_steps: int = DEFAULT_BUFFER_STEPS,
    ) -> FakeEngine:
        """Start an engine at `endpoint`, before anyone subscribes to it."""
        engine = FakeEngine(self.clock, endpoint, replay_endpoint, topic, buffer_steps)
        self._engines[endpoint] = engine
        return engine

    def open(self, source: Source) -> FakeLink:
        """Connect to an engine that was started here."""
        engine = self._engines.get(source.endpoint)
        if engine is None:
            raise EndpointError(
                f"no fake engine at {source.endpoint}; start one with FakeTransport.engine()", endpoint=source.endpoint
            )
        link = FakeLink(engine, self)
        self._links.append(link)
        engine.attach(link)
        return link

    def forget(self, link: FakeLink) -> None:
        """A link was closed."""
        self._links.remove(link)

    def wait(self, timeout: float | None) -> list[FakeLink]:
        """Links with news; without any, time passes at once.

        Raises `EndpointError` when nothing can ever happen: a real subscriber would wait for ever.
        """
        news = [link for link in self._links if link.has_news]
        if not news:
            if timeout is None:
                raise EndpointError("no fake engine will ever send anything more; give receive() a timeout")
            self.clock.advance(timeout)
        return news

    @property
    def max_pause(self) -> None:
        """Nothing here takes time."""

    def fileno(self) -> int:
        """No descriptor: `wait` must be asked."""
        return -1

    def wake(self) -> None:
        """`wait` never waits."""

    def close(self) -> None:
        """Close every link."""
        for link in list(self._links):
            link.close()
