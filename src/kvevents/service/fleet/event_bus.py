"""The events of `/v1/events`: a bus with one bounded queue for each client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from kvevents.client.schemas import TrustStatus
from kvevents.stream import TrustState

MAX_QUEUED: Final = 1_024
"""Most events that wait for one slow client. The client receives the number of the events beyond that."""


class SourceEvent(Struct, frozen=True, kw_only=True, tag_field="type", tag="state"):
    """Event of `/v1/events`: the trust state of a source changed."""

    at: float
    instance: str
    rank: int
    model: str
    tenant: str
    group: str
    trust: TrustStatus
    was: TrustState


class BatchesEvent(Struct, frozen=True, kw_only=True, tag_field="type", tag="batches"):
    """Event of `/v1/events`: batches of a source since the previous event of this type."""

    at: float
    instance: str
    rank: int
    model: str
    tenant: str
    group: str
    batches: int
    last_seq: int
    blocks: int
    """Blocks that the source holds now."""


class SnapshotEvent(Struct, frozen=True, kw_only=True, tag_field="type", tag="snapshot"):
    """Event of `/v1/events`: a snapshot of the publisher replaced older batches; nothing is lost."""

    at: float
    instance: str
    rank: int
    model: str
    tenant: str
    group: str
    first: int
    last: int


class LossEvent(Struct, frozen=True, kw_only=True, tag_field="type", tag="loss"):
    """Event of `/v1/events`: a gap, or a reset because the publisher restarted."""

    at: float
    instance: str
    rank: int
    model: str
    tenant: str
    group: str
    what: Literal["gap", "reset"]
    sentence: str


StreamEvent: TypeAlias = SourceEvent | BatchesEvent | SnapshotEvent | LossEvent


class EventBus:
    """Passes events from other threads to clients in the event loop."""

    def __init__(self) -> None:
        self._queues: set[Queue] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._queues)

    def publish(self, event: StreamEvent) -> None:
        """Send an event to all clients. Any thread may call it."""
        if self._queues and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: StreamEvent) -> None:
        for queue in self._queues:
            queue.put(event)

    def close(self) -> None:
        """Close the queues of all clients. Call it in the event loop."""
        for queue in self._queues:
            queue.close()

    @contextmanager
    def subscribe(self) -> Iterator[Queue]:
        """Return a context with a queue that receives all events. Call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        queue = Queue()
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)


class Queue:
    """The events that wait for one client."""

    def __init__(self) -> None:
        self._events: deque[StreamEvent] = deque()
        self._filled = asyncio.Event()
        self._missed = 0
        self.closed = False

    def put(self, event: StreamEvent) -> None:
        """Append an event, or count it as missed if the queue is full."""
        if len(self._events) < MAX_QUEUED:
            self._events.append(event)
        else:
            self._missed += 1
        self._filled.set()

    def close(self) -> None:
        """End the queue: the client receives no more events."""
        self.closed = True
        self._filled.set()

    async def get(self, pause: float) -> StreamEvent | int | None:
        """Return the next event, or the number of events that this client missed; None after `pause` seconds without one."""
        if not self._events and not self._missed:
            self._filled.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._filled.wait()
        if self._events:
            return self._events.popleft()
        missed, self._missed = self._missed, 0
        return missed or None
