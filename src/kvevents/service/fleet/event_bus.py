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
"""Maximum number of events that wait for one slow client. The client receives the number of the events beyond that."""


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
    """All batches since the service follows it."""
    last_seq: int
    blocks: int
    """Blocks that the source holds now."""


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
        self._has_events = asyncio.Event()
        self._missed_count = 0
        self.closed = False

    def put(self, event: StreamEvent) -> None:
        """Append an event, or count it as missed if the queue is full."""
        if len(self._events) < MAX_QUEUED:
            self._events.append(event)
        else:
            self._missed_count += 1
        self._has_events.set()

    def close(self) -> None:
        """End the queue: the client receives no more events."""
        self.closed = True
        self._has_events.set()

    async def get(self, pause: float) -> StreamEvent | int | None:
        """Return the next event, or the number of events that this client missed; None after `pause` seconds without one."""
        if not self._events and not self._missed_count:
            self._has_events.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._has_events.wait()
        if self._events:
            return self._events.popleft()
        count, self._missed_count = self._missed_count, 0
        return count or None
