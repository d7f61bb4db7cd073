"""The subscribers for threads and for asyncio, and their base class with the public methods that do not wait, and closing.

`Subscriber` and `AsyncSubscriber` mirror each other: what one does under a name, the other does under the same name.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeAlias, TypedDict, Unpack, overload

from kvevents.errors import ClosedError, ConfigError, UsageError
from kvevents.stream import (
    DEFAULT_STREAM_LIMITS,
    Batch,
    BatchReport,
    BatchT,
    Checkpoint,
    Gap,
    RawBatch,
    Reset,
    Source,
    StreamLimits,
    Trust,
)
from kvevents.subscriber.multiplexer import DEFAULT_CONCURRENT_REPLAYS, Multiplexer, StreamStatus, Transport
from kvevents.subscriber.zmq_transport import ZmqTransport

Sources: TypeAlias = Source | str | Iterable[Source | str]


class Outcome(Protocol):
    """Result of applying one delivery to a `Sink`."""

    @property
    def report(self) -> BatchReport | None:
        """What was found while applying the delivery; None for nothing."""
        ...


class Sink(Protocol):
    """Applies deliveries before the subscriber returns them, as a `PrefixIndex` does."""

    def apply_many(self, deliveries: Sequence[Batch | RawBatch | Reset | Gap], /) -> Sequence[Outcome]:
        """Apply the deliveries in this order and return one outcome for each."""
        ...


class Options(TypedDict, total=False):
    """Keyword options of `FrontEnd` except `decode`, for the overloads whose types depend on `decode`."""

    limits: StreamLimits
    max_concurrent_replays: int
    transport: Transport | None
    clock: Callable[[], float]
    sink: Sink | None


class FrontEnd(Generic[BatchT]):
    """Base class of both subscribers.

    Threads: the connections belong to the calls that use them, which are `add`, `remove` and the wait inside `receive`.
    `_calls` holds a token for each of these calls. Any thread and any signal handler may call `close`, also in the middle of
    another call. `close` closes the connections itself if no call uses them. Otherwise it wakes the call, and the last call
    to return closes them. Each side first changes its own variable (`_closed` or `_calls`) and then reads the other one, so
    at least one of them sees both changes. `_lock` is held while streams are read or changed, never during a wait.
    """

    def __init__(
        self,
        sources: Sources = (),
        *,
        limits: StreamLimits = DEFAULT_STREAM_LIMITS,
        max_concurrent_replays: int = DEFAULT_CONCURRENT_REPLAYS,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
        decode: bool = True,
        sink: Sink | None = None,
    ) -> None:
        self._clock = clock
        self._multiplexer: Multiplexer[BatchT] = Multiplexer(
            transport or ZmqTransport(), limits, max_concurrent_replays, decode=decode
        )
        self._sink = sink
        self._closed = False
        self._calls: set[object] = set()
        self._lock = threading.RLock()
        try:
            for source in [sources] if isinstance(sources, (Source, str)) else sources:
                self.add(source)
        except BaseException:
            self._close()
            raise

    def add(self, source: Source | str, resume: Checkpoint | None = None) -> None:
        """Follow one more source; a string is its endpoint.

        With `resume`, continue after the checkpoint of an earlier process. The stream first verifies that the publisher is
        still the same incarnation, as after a reconnect. If it is, the next delivery is the batch after the checkpoint;
        otherwise it is a `Reset`. Until then trust is STALE.

        Raise `ConfigError` if the name and rank are followed already or differ from those of `resume`, and `EndpointError` if
        the endpoint is invalid.
        """
        call = object()
        try:
            self._begin_call(call)
            with self._lock:
                self._multiplexer.add(Source(source) if isinstance(source, str) else source, resume)
        finally:
            self._end_call(call)

    def remove(self, name: str, rank: int = 0) -> None:
        """Stop following a source. Deliveries that were received from it are still returned. Raise `UnknownSourceError`."""
        call = object()
        try:
            self._begin_call(call)
            with self._lock:
                self._multiplexer.remove(name, rank)
        finally:
            self._end_call(call)

    def report(self, delivery: Batch | RawBatch | Reset | Gap, report: BatchReport | None) -> None:
        """Report what reading and applying a batch has shown, so that trust can take it into account. None does nothing.

        Call it at most once for each batch, at any time after its delivery. With a `sink`, the subscriber calls it itself.
        Degraded reasons that are newer than the batch stay. The subscriber has decoded a `Batch` itself, so only
        `report.digest_matches` counts for it. If that is False, the next delivery may be a `Reset`. A report about another
        kind of delivery, or about a source that was removed, is ignored.
        """
        if report is not None:
            with self._lock:
                self._multiplexer.report(delivery, report)

    def checkpoint(self, name: str | None = None, rank: int = 0) -> Checkpoint:
        """Return what a later process needs to `resume` a stream after the deliveries that were returned so far.

        Call it when everything received has been applied and reported. It also works after `close`.
        """
        with self._lock:
            return self._multiplexer.checkpoint(name, rank)

    def checkpoints(self) -> list[Checkpoint]:
        """Return a checkpoint of every stream; see `checkpoint`."""
        with self._lock:
            return self._multiplexer.checkpoints()

    def trust(self, name: str | None = None, rank: int = 0) -> Trust:
        """Return how far the deliveries of a stream can be trusted. `name` can be omitted if there is one stream.

        Trust covers everything received. An application that takes deliveries one by one, or with a `limit`, might not have all
        of them: a gap may precede the clear that repaired it. Call this when `receive_many()` has returned everything.

        Any thread may call this, `status` and `statuses`, also after `close`. Raise `UnknownSourceError`.
        """
        with self._lock:
            return self._multiplexer.entry(name, rank).trust

    def trust_changes(self) -> list[tuple[tuple[str, int], Trust]]:
        """Return (source, rank) and trust of each stream whose trust or reason has changed since the last call.

        The first call returns all streams. Each change is returned once, so only one thread should call this.
        """
        with self._lock:
            return self._multiplexer.trust_changes()

    def status(self, name: str | None = None, rank: int = 0) -> StreamStatus:
        """Return trust, sequence numbers and counters of one stream. Raise `UnknownSourceError`."""
        with self._lock:
            return self._multiplexer.entry(name, rank).status()

    def statuses(self) -> list[StreamStatus]:
        """Return trust, sequence numbers and counters of every stream."""
        with self._lock:
            return self._multiplexer.statuses()

    def _wait_time(self, now: float, end: float | None) -> float | None:
        """Return the seconds until a timer is due or `end` is reached; None for no limit."""
        due = self._multiplexer.timeout(now)
        if end is None:
            return due
        left = max(0.0, end - now)
        return left if due is None else min(due, left)

    def _pop_one(self) -> BatchT | Reset | Gap:
        """Remove and return the oldest delivery that is ready; there must be one."""
        delivery = self._multiplexer.ready.popleft()
        self._apply_to_sink([delivery])
        return delivery

    def _pop_many(self, limit: int | None) -> list[BatchT | Reset | Gap]:
        """Remove and return at most `limit` deliveries that are ready."""
        deliveries = self._multiplexer.pop(limit)
        self._apply_to_sink(deliveries)
        return deliveries

    def _apply_to_sink(self, deliveries: Sequence[BatchT | Reset | Gap]) -> None:
        if self._sink is not None:
            for delivery, outcome in zip(deliveries, self._sink.apply_many(deliveries), strict=True):
                self.report(delivery, outcome.report)

    @staticmethod
    def _check_limit(limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ConfigError(f"limit is {limit}; it must be at least 1, or None for no limit")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{type(self).__name__} is closed")

    def _begin_call(self, call: object) -> None:
        """Start using the connections; `_end_call` must follow. Raise `ClosedError`."""
        self._calls.add(call)
        self._check_open()

    def _end_call(self, call: object) -> None:
        """Stop using the connections, and close them if `close` was called meanwhile."""
        self._calls.discard(call)
        if self._closed:
            self._close_if_unused()

    def _close(self) -> None:
        self._closed = True
        if self._calls:
            self._multiplexer.transport.wake()
        else:
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        with self._lock:
            if not self._calls:
                self._multiplexer.close()

    def __repr__(self) -> str:
        with self._lock:
            return f"<{type(self).__name__} {'closed' if self._closed else self._multiplexer.describe()}>"


class Subscriber(FrontEnd[BatchT]):
    """Follows one or many sources and returns their deliveries in order.

    Receive, add and remove sources in one thread. Any thread may call `close`, `trust`, `status` and `statuses`.
    Iterate over it, or call `receive`::

        with Subscriber(Source("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")) as subscriber:
            for delivery in subscriber:
                print(delivery)

    With `decode=False` it delivers `RawBatch` instead of `Batch`, for applications that read payloads themselves. They must
    `report` what they find. With a `sink`, such as a `PrefixIndex`, each delivery is applied and reported before it is
    returned. If the sink raises, `receive` raises the same exception, and the deliveries that the sink was given are lost.
    """

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: Subscriber[Batch], sources: Sources = ..., *, decode: Literal[True] = ..., **options: Unpack[Options]
        ) -> None: ...
        @overload
        def __init__(
            self: Subscriber[RawBatch], sources: Sources = ..., *, decode: Literal[False], **options: Unpack[Options]
        ) -> None: ...
        @overload
        def __init__(
            self: Subscriber[Batch | RawBatch], sources: Sources = ..., *, decode: bool, **options: Unpack[Options]
        ) -> None: ...
        def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def receive(self, timeout: float | None = None) -> BatchT | Reset | Gap | None:
        """Return the next delivery, or None after `timeout` seconds without one (None: no limit, 0: do not wait).

        Raise `ClosedError` after `close`, and if another thread or a signal handler calls `close` meanwhile.
        """
        self._check_open()
        if self._multiplexer.ready or self._wait_ready(timeout):
            return self._pop_one()
        return None

    def receive_many(self, limit: int | None = None, timeout: float | None = None) -> list[BatchT | Reset | Gap]:
        """Wait as `receive` does, then return all deliveries that are ready, at most `limit`; [] after `timeout` seconds."""
        self._check_limit(limit)
        self._check_open()
        if self._multiplexer.ready or self._wait_ready(timeout):
            return self._pop_many(limit)
        return []

    def _wait_ready(self, timeout: float | None) -> bool:
        """Wait until a delivery is ready. Return False after `timeout` seconds without one."""
        multiplexer, clock = self._multiplexer, self._clock
        end = None if timeout is None else clock() + timeout
        call = object()
        try:
            self._begin_call(call)
            while True:
                connections = multiplexer.transport.wait(self._wait_time(clock(), end))
                with self._lock:
                    self._check_open()
                    multiplexer.run_once(connections, clock())
                if multiplexer.ready:
                    return True
                if end is not None and clock() >= end:
                    return False
        finally:
            self._end_call(call)

    def __iter__(self) -> Iterator[BatchT | Reset | Gap]:
        """Yield every delivery until `close`."""
        while not self._closed:
            if self._multiplexer.ready:
                yield self._pop_one()
            else:
                with suppress(ClosedError):
                    self._wait_ready(None)

    def close(self) -> None:
        """Close the subscriber: iteration ends, and `receive` raises `ClosedError`, also while it waits. Idempotent.

        Any thread and any signal handler may call it; it does not wait. If another call is waiting, that call closes the
        connections when it returns. Otherwise they are closed when this returns.
        """
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class AsyncSubscriber(FrontEnd[BatchT]):
    """Follows one or many sources and returns their deliveries in order.

    Receive in one task, and add and remove sources in the thread of that task. Any task or thread may call `close`, `trust`,
    `status` and `statuses`. Iterate over it with `async for`, or await `receive`. `decode=False` and `sink` have the same
    meaning as for `Subscriber`; the sink is called in the event loop.
    """

    _is_waiting = False
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

    async def receive(self, timeout: float | None = None) -> BatchT | Reset | Gap | None:  # noqa: ASYNC109 - as Subscriber
        """Return the next delivery, or None after `timeout` seconds without one (None: no limit, 0: do not wait).

        Raise `ClosedError` after `close`, and if another task or thread calls `close` meanwhile. Cancellation loses no
        delivery.
        """
        self._check_open()
        if self._multiplexer.ready or await self._wait_ready(timeout):
            return self._pop_one()
        return None

    async def receive_many(
        self,
        limit: int | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as Subscriber
    ) -> list[BatchT | Reset | Gap]:
        """Wait as `receive` does, then return all deliveries that are ready, at most `limit`; [] after `timeout` seconds."""
        self._check_limit(limit)
        self._check_open()
        if self._multiplexer.ready or await self._wait_ready(timeout):
            return self._pop_many(limit)
        return []

    async def _wait_ready(self, timeout: float | None) -> bool:  # noqa: ASYNC109 - as Subscriber
        """Wait until a delivery is ready. Return False after `timeout` seconds without one."""
        multiplexer, clock = self._multiplexer, self._clock
        end = None if timeout is None else clock() + timeout
        if self._is_waiting:
            raise UsageError(f"another task is waiting in receive() of this {type(self).__name__}; receive in one task")
        call = object()
        try:
            self._is_waiting = True
            self._begin_call(call)
            while True:
                await self._wait_readable(self._wait_time(clock(), end))
                with self._lock:
                    self._check_open()
                    multiplexer.run_once(multiplexer.transport.wait(0), clock())
                if multiplexer.ready:
                    return True
                if end is not None and clock() >= end:
                    return False
        finally:
            self._is_waiting = False
            self._end_call(call)

    async def _wait_readable(self, wait_time: float | None) -> None:
        """Wait until a connection is readable, at most `wait_time` seconds."""
        transport = self._multiplexer.transport
        descriptor = transport.fileno()
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
        while not self._closed:
            if self._multiplexer.ready:
                yield self._pop_one()
            else:
                with suppress(ClosedError):
                    await self._wait_ready(None)

    async def close(self) -> None:
        """Close the subscriber: iteration ends, and `receive` raises `ClosedError`, also while it waits. Idempotent.

        Any task or thread may call it; it does not wait. If another call is waiting, that call closes the connections when it
        returns. Otherwise they are closed when this returns.
        """
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _wait_for_descriptor(descriptor: int, wait_time: float | None) -> None:
    """Wait until `descriptor` is readable, at most `wait_time` seconds."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    loop.add_reader(descriptor, wake)
    timer = None if wait_time is None else loop.call_later(wait_time, wake)
    try:
        await woken
    finally:
        loop.remove_reader(descriptor)
        if timer is not None:
            timer.cancel()
