"""Who listens to what happens: clients of `/v1/events`, each with a queue of its own that never grows without bound."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from kvevents.service.schemas import StreamEvent

MAX_QUEUED: Final = 1_024
"""Events that wait for one slow client; beyond, it is told how many it has missed."""


class EventBus:
    """Hands events of other threads to clients in the event loop."""

    def __init__(self) -> None:
        self._queues: set[Queue] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._queues)

    def announce(self, event: StreamEvent) -> None:
        """Tell everybody. From any thread."""
        if self._queues and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: StreamEvent) -> None:
        for queue in self._queues:
            queue.put(event)

    def close(self) -> None:
        """End everybody's listening; in the event loop."""
        for queue in self._queues:
            queue.close()

    @contextmanager
    def listening(self) -> Iterator[Queue]:
        """From now on events are kept for one client; in the event loop."""
        self._loop = asyncio.get_running_loop()
        queue = Queue()
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)


class Queue:
    """What waits for one client."""

    def __init__(self) -> None:
        self._events: deque[StreamEvent] = deque()
        self._filled = asyncio.Event()
        self._missed = 0
        self.closed = False

    def put(self, event: StreamEvent) -> None:
        """Keep an event, or count it where there is no room."""
        if len(self._events) < MAX_QUEUED:
            self._events.append(event)
        else:
            self._missed += 1
        self._filled.set()

    def close(self) -> None:
        """No more events."""
        self.closed = True
        self._filled.set()

    async def get(self, pause: float) -> StreamEvent | int | None:
        """The next event; a number for so many that this client was too slow for; None after `pause` idle seconds."""
        if not self._events and not self._missed:
            self._filled.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._filled.wait(), pause)
        if self._events:
            return self._events.popleft()
        missed, self._missed = self._missed, 0
        return missed or None
