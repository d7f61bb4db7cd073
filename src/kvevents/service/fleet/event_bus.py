"""The events of `/v1/events`: a bus that keeps the newest events, and the position of each client among them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from kvevents.client.schemas import TrustStatus
from kvevents.stream import TrustState

MAX_EVENTS: Final = 1_024
"""Number of events stored for clients that are slow or reconnect. For older events, a client receives only their number."""


class _Event(Struct, frozen=True, kw_only=True, tag_field="type"):
    at: float
    instance: str
    rank: int
    model: str
    tenant: str
    group: str


class SourceEvent(_Event, frozen=True, kw_only=True, tag="state"):
    """Event of `/v1/events`: the trust state of a source changed."""

    trust: TrustStatus
    was: TrustState


class BatchesEvent(_Event, frozen=True, kw_only=True, tag="batches"):
    """Event of `/v1/events`: a source has received batches."""

    batches: int
    """Number of batches since the service began to follow the source."""
    last_seq: int
    blocks: int
    """Number of blocks that the source holds now."""


class SnapshotEvent(_Event, frozen=True, kw_only=True, tag="snapshot"):
    """Event of `/v1/events`: a snapshot of the publisher replaced older batches; nothing is lost."""

    first: int
    last: int


class LossEvent(_Event, frozen=True, kw_only=True, tag="loss"):
    """Event of `/v1/events`: a gap, or a reset because the publisher restarted."""

    what: Literal["gap", "reset"]
    sentence: str


StreamEvent: TypeAlias = SourceEvent | BatchesEvent | SnapshotEvent | LossEvent


class EventBus:
    """Numbers the events of all sources, and stores the newest events for the clients in the event loop."""

    def __init__(self) -> None:
        self.name: Final = token_hex(4)
        """Random part of all event ids, because every process counts its events from 0."""
        self._lock: Final = threading.Lock()
        self._newest: Final = deque[StreamEvent](maxlen=MAX_EVENTS)
        self._count = 0
        """Number of events that have been published."""
        self._subscriptions: Final = set[Subscription]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_closed = False
        """Whether the bus is closed, so that clients receive no more events."""

    def __len__(self) -> int:
        return len(self._subscriptions)

    def publish(self, event: StreamEvent) -> None:
        """Send an event to all clients. Any thread may call this method."""
        with self._lock:
            self._newest.append(event)
            self._count += 1
        if self._subscriptions and self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for subscription in self._subscriptions:
            subscription.has_events.set()

    def close(self) -> None:
        """End the subscriptions of all clients. Call this method in the event loop."""
        self.is_closed = True
        self._wake()

    @contextmanager
    def subscribe(self, last_id: str | None = None) -> Iterator[Subscription]:
        """Return a context with a subscription to the events after `last_id`. Call this method in the event loop.

        If `last_id` is None, begin with the next event. If another process made the id, begin with the oldest stored event.
        """
        self._loop = asyncio.get_running_loop()
        name, _, number = (last_id or "").partition("-")
        position = self._count if last_id is None else 0
        if name == self.name and number.isascii() and number.isdecimal() and len(number) < 20:
            position = min(int(number), self._count)
        subscription = Subscription(self, position)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def read(self, position: int) -> StreamEvent | int | None:
        """Return the event at `position`; None before it is published; the number of missed events if it was dropped."""
        with self._lock:
            first = self._count - len(self._newest)
            if position < first:
                return first - position
            return self._newest[position - first] if position < self._count else None


class Subscription:
    """The position of one client among the events of a bus."""

    def __init__(self, bus: EventBus, position: int) -> None:
        self.bus: Final = bus
        self._position = position
        """Number of the next event that the client receives."""
        self.has_events: Final = asyncio.Event()
        """Set when an event arrives, and when the bus is closed."""

    @property
    def last_id(self) -> str:
        """The id of the newest event that the client has received or missed."""
        return f"{self.bus.name}-{self._position}"

    async def get(self, pause: float) -> StreamEvent | int | None:
        """Return the next event, or the number of missed events; None if no event arrives for `pause` seconds."""
        self.has_events.clear()
        event = self.bus.read(self._position)
        if event is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.has_events.wait()
            event = self.bus.read(self._position)
        if event is not None:
            self._position += event if isinstance(event, int) else 1
        return event
