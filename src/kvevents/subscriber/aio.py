"""The subscriber for asyncio; `sync.py` with `await`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from kvevents.stream import Delivery
from kvevents.subscriber.base import BaseSubscriber


class AsyncSubscriber(BaseSubscriber):
    """Follows one or many sources and hands out their deliveries in order.

    Use it from one task of one event loop. Iterate over it with `async for`, or await `receive`.
    """

    async def receive(self, timeout: float | None = None) -> Delivery | None:  # noqa: ASYNC109 - the same face as Subscriber
        """The next delivery; None after `timeout` seconds without one (None waits without bound, 0 does not wait).

        Raises `ClosedError` after `close`. Cancelling it loses nothing.
        """
        ready = self._hub.ready
        if ready:
            return ready.popleft()
        self._check_open()
        end = None if timeout is None else self._clock() + timeout
        while True:
            await self._wait(end)
            self._check_open()
            self._hub.turn(self._hub.transport.wait(0), self._clock())
            if ready:
                return ready.popleft()
            if end is not None and self._clock() >= end:
                return None

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
            self._hub.turn(self._hub.transport.wait(pause), self._clock())
            await asyncio.sleep(0)
        else:
            await _readable(descriptor, pause)

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while not self._closed:
            delivery = await self.receive()
            if delivery is not None:
                yield delivery

    async def close(self) -> None:
        """Close every connection; idempotent."""
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
