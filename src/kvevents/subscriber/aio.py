"""The subscriber for asyncio. `sync` has the subscriber for threads."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, overload

from kvevents.closeable import AsyncCloseable
from kvevents.errors import ClosedError, UsageError
from kvevents.stream import Batch, BatchT, Gap, RawBatch, Reset, Trust
from kvevents.subscriber.front_end import TRUST_CHECK_SECONDS, FrontEnd, Options, Sources

MAX_TURN_SECONDS: Final = 0.005
"""Maximum number of seconds of work in the event loop before other tasks run, even if more deliveries are ready."""


class AsyncSubscriber(FrontEnd[BatchT], AsyncCloseable):
    """Follows one or many sources and returns their deliveries in order.

    Receive in one task, and add and remove sources in the thread of that task. Any task or thread may call `close`, `trust`,
    `status` and `statuses`. Iterate over the subscriber with `async for`, or await `receive`. `decode=False` and `sink` have
    the same meaning as for `Subscriber`; the sink is called in the event loop.
    """

    _resumed_at = 0.0
    """The time at which this task last let other tasks run."""

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

    async def receive(self, timeout: float | None = None) -> BatchT | Reset | Gap | None:  # noqa: ASYNC109 - `Subscriber` has the same parameter
        """Return the next delivery, or None if none arrives within `timeout` seconds (None: no limit, 0: do not wait).

        Raise `ClosedError` after `close`, and if another task or thread calls `close` during the wait. Cancellation loses no
        delivery.
        """
        self._check_open()
        await self._end_turn()
        return self._pop_one() if self._multiplexer.ready or await self._wait_ready(timeout) else None

    async def receive_many(
        self,
        limit: int | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - `Subscriber` has the same parameter
    ) -> list[BatchT | Reset | Gap]:
        """Wait as `receive` does, then return at most `limit` of the deliveries that are ready; [] after `timeout` seconds.

        A call decodes and applies for at most about 5 ms, so that it does not block the event loop; the next call continues.
        """
        self._check_limit(limit)
        self._check_open()
        await self._end_turn()
        return self._pop_many(limit, MAX_TURN_SECONDS) if self._multiplexer.ready or await self._wait_ready(timeout) else []

    async def _end_turn(self) -> None:
        """Let other tasks run if this task has worked for more than `MAX_TURN_SECONDS`."""
        if time.perf_counter() - self._resumed_at > MAX_TURN_SECONDS:
            await asyncio.sleep(0)
            self._resumed_at = time.perf_counter()
            self._check_open()

    async def wait_for(
        self,
        trust: Trust = Trust.DEGRADED,
        timeout: float | None = None,  # noqa: ASYNC109 - `Subscriber` has the same parameter
    ) -> list[BatchT | Reset | Gap]:
        """Receive until every stream has at least this trust. Return the deliveries, which were applied if there is a sink.

        With the default `trust`, all streams catch up as far as possible. Unproven streams (`Trust.unproven`) count as EXACT,
        because an idle engine sends no live batch that could confirm replay. Raise `TrustTimeoutError` after `timeout` seconds.
        After cancellation, deliveries that no sink has applied are delivered again, after a `Reset`.
        """
        end = self._end_of_wait(timeout)
        with self._redeliver_on_error() as deliveries:
            while not self._has_reached(trust) and (end is None or self._clock() < end):
                deliveries.extend(await self.receive_many(timeout=TRUST_CHECK_SECONDS))
        self._check_reached(trust, deliveries)
        return deliveries

    async def _wait_ready(self, timeout: float | None) -> bool:  # noqa: ASYNC109 - `Subscriber` has the same parameter
        """Wait until a delivery is ready. Return False if none becomes ready within `timeout` seconds."""
        multiplexer, clock = self._multiplexer, self._clock
        end = self._end_of_wait(timeout)
        if self._waits:
            raise UsageError(f"another task is waiting in receive() of this {type(self).__name__}; receive in one task")
        call = object()
        try:
            self._begin_wait(call)
            while True:
                await self._wait_readable(self._wait_time(clock(), end))
                self._resumed_at, self._read_at = time.perf_counter(), clock()
                with self._lock:
                    self._check_open()
                    multiplexer.run_once(multiplexer.transport.wait(0), clock())
                if self._on_change is not None:
                    self._notify(self._on_change)
                if multiplexer.ready:
                    return True
                if end is not None and clock() >= end:
                    return False
        finally:
            self._end_wait(call)

    async def _wait_readable(self, wait_time: float | None) -> None:
        """Wait until a connection is readable, but at most `wait_time` seconds."""
        transport = self._multiplexer.transport
        descriptor = transport.fileno()
        self._due_at = math.inf if wait_time is None else self._clock() + wait_time
        if wait_time == 0:
            await asyncio.sleep(0)
        elif descriptor < 0:
            with self._lock:
                self._multiplexer.run_once(transport.wait(wait_time), self._clock())
            await asyncio.sleep(0)
        else:
            await _wait_for_descriptor(descriptor, wait_time)

    async def __aiter__(self) -> AsyncIterator[BatchT | Reset | Gap]:
        """Yield every delivery until `close`."""
        while not self._is_closed:
            with suppress(ClosedError):
                await self._end_turn()
                if not self._multiplexer.ready:
                    await self._wait_ready(None)
            if self._multiplexer.ready and not self._is_closed:
                yield self._pop_one()

    async def close(self) -> None:
        """Close the subscriber: iteration ends, and `receive` raises `ClosedError`, also while it waits. Idempotent.

        Any task or thread may call this method, which does not wait. If another call is waiting, the waiting call closes the
        connections when it returns; if not, this method closes them.
        """
        self._close()


async def _wait_for_descriptor(descriptor: int, wait_time: float | None) -> None:
    """Wait until `descriptor` is readable, but at most `wait_time` seconds."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(descriptor, wake)
    timer = None if wait_time is None else loop.call_later(wait_time, wake)
    try:
        await future
    finally:
        loop.remove_reader(descriptor)
        if timer is not None:
            timer.cancel()
