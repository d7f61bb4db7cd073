"""The subscriber for asyncio; `sync.py` with `await`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from kvevents.errors import ClosedError, UsageError
from kvevents.stream import Batch, Gap, RawBatch, Reset
from kvevents.stream.deliveries import B
from kvevents.subscriber.base import BaseSubscriber, Options, Sources


class AsyncSubscriber(BaseSubscriber[B]):
    """Follows one or many sources and hands out their deliveries in order.

    Receive from one task, whose thread also adds and removes sources; any task or thread may call `close`, `trust`, `status` or
    `statuses`. Iterate over it with `async for`, or await `receive`. `decode=False` and `sink` are as for `Subscriber`;
    a sink is called in the event loop.
    """

    _waits = False
    """Whether a task is waiting for deliveries."""

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: AsyncSubscriber[Batch], sources: Sources = ..., *, decode: Literal[True] = ..., **options: Unpack[Options]
        ) -> None: ...
        @overload
        def __init__(
            self: AsyncSubscriber[RawBatch], sources: Sources = ..., *, decode: Literal[False], **options: Unpack[Options]
        ) -> None: ...
        @overload
        def __init__(
            self: AsyncSubscriber[Batch | RawBatch], sources: Sources = ..., *, decode: bool, **options: Unpack[Options]
        ) -> None: ...
        def __init__(self, *arguments: Any, **options: Any) -> None: ...

    async def receive(self, timeout: float | None = None) -> B | Reset | Gap | None:  # noqa: ASYNC109 - as Subscriber
        """The next delivery; None after `timeout` seconds without one (None waits without bound, 0 does not wait).

        Raises `ClosedError` after `close`, and when another task or thread calls `close` meanwhile. Cancellation loses nothing.
        """
        self._check_open()
        if self._hub.ready or await self._take_turns(timeout):
            return self._next()
        return None

    async def receive_many(
        self,
        limit: int | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as Subscriber
    ) -> list[B | Reset | Gap]:
        """What `receive` would hand out without waiting any further, at most `limit`; empty after `timeout` seconds."""
        self._check_limit(limit)
        self._check_open()
        if self._hub.ready or await self._take_turns(timeout):
            return self._take(limit)
        return []

    async def _take_turns(self, timeout: float | None) -> bool:  # noqa: ASYNC109 - as Subscriber
        """Wait until something is ready; False after `timeout`."""
        hub, clock = self._hub, self._clock
        end = None if timeout is None else clock() + timeout
        if self._waits:
            raise UsageError(f"another task is waiting in receive() of this {type(self).__name__}; receive from one task")
        call = object()
        try:
            self._waits = True
            self._enter(call)
            while True:
                await self._wait(end)
                with self._lock:
                    self._check_open()
                    hub.turn(hub.transport.wait(0), clock())
                if hub.ready:
                    return True
                if end is not None and clock() >= end:
                    return False
        finally:
            self._waits = False
            self._leave(call)

    async def _wait(self, end: float | None) -> None:
        """Until a link has something, a timer is due, or `end`."""
        now = self._clock()
        due = self._hub.timeout(now)
        left = None if end is None else max(0.0, end - now)
        pause = left if due is None else due if left is None else min(due, left)
        descriptor = self._hub.transport.fileno()
        if pause == 0:
            await asyncio.sleep(0)
        elif descriptor < 0:
            with self._lock:
                self._hub.turn(self._hub.transport.wait(pause), self._clock())
            await asyncio.sleep(0)
        else:
            await _readable(descriptor, pause)

    async def __aiter__(self) -> AsyncIterator[B | Reset | Gap]:
        """Every delivery until `close`."""
        while not self._closed:
            if self._hub.ready:
                yield self._next()
            else:
                with suppress(ClosedError):
                    await self._take_turns(None)

    async def close(self) -> None:
        """Stop: iteration ends, and `receive` raises `ClosedError`, also where another task is waiting in it. Idempotent.

        Any task or thread may call it; it does not wait. A call that is waiting closes the connections as it returns.
        Otherwise they are closed when this returns.
        """
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _readable(descriptor: int, pause: float | None) -> None:
    """Until `descriptor` is readable, at most `pause` seconds."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    loop.add_reader(descriptor, wake)
    timer = None if pause is None else loop.call_later(pause, wake)
    try:
        await woken
    finally:
        loop.remove_reader(descriptor)
        if timer is not None:
            timer.cancel()
