"""The subscriber for threads. `aio` has the subscriber for asyncio."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from kvevents.closeable import Closeable
from kvevents.errors import ClosedError
from kvevents.stream import Batch, BatchT, Gap, RawBatch, Reset, Trust
from kvevents.subscriber.front_end import TRUST_CHECK_SECONDS, FrontEnd, Options, Sources


class Subscriber(FrontEnd[BatchT], Closeable):
    """Follows one or many sources and returns their deliveries in order.

    Receive, add and remove sources in one thread. Any thread may call `close`, `trust`, `status` and `statuses`.
    Iterate over the subscriber, or call `receive`::

        with Subscriber(Source("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")) as subscriber:
            for delivery in subscriber:
                print(delivery)

    With `decode=False`, `receive` returns `RawBatch` instead of `Batch`: the application decodes payloads, and must `report`
    its findings. With a `sink`, such as a `PrefixIndex`, each delivery is applied and reported before it is returned. If the
    sink raises, `receive` raises the same exception, and each stream whose deliveries were passed to the sink is delivered
    again after a `Reset`. Until a stream is delivered again completely, its trust is at most REPLAYING.
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
        """Return the next delivery, or None if none arrives within `timeout` seconds (None: no limit, 0: do not wait).

        Raise `ClosedError` after `close`, and if another thread or a signal handler calls `close` during the wait.
        """
        self._check_open()
        return self._pop_one() if self._multiplexer.ready or self._wait_ready(timeout) else None

    def receive_many(self, limit: int | None = None, timeout: float | None = None) -> list[BatchT | Reset | Gap]:
        """Wait as `receive` does, then return at most `limit` of the deliveries that are ready; [] after `timeout` seconds."""
        self._check_limit(limit)
        self._check_open()
        return self._pop_many(limit) if self._multiplexer.ready or self._wait_ready(timeout) else []

    def wait_for(self, trust: Trust = Trust.DEGRADED, timeout: float | None = None) -> list[BatchT | Reset | Gap]:
        """Receive until every stream has at least this trust. Return the deliveries, which were applied if there is a sink.

        With the default `trust`, all streams catch up as far as possible. Unproven streams (`Trust.unproven`) count as EXACT,
        because an idle engine sends no live batch that could confirm replay. Raise `TrustTimeoutError` after `timeout` seconds.
        After any other exception, deliveries that no sink has applied are delivered again, after a `Reset`.
        """
        end = self._end_of_wait(timeout)
        with self._redeliver_on_error() as deliveries:
            while not self._has_reached(trust) and (end is None or self._clock() < end):
                deliveries.extend(self.receive_many(timeout=TRUST_CHECK_SECONDS))
        self._check_reached(trust, deliveries)
        return deliveries

    def _wait_ready(self, timeout: float | None) -> bool:
        """Wait until a delivery is ready. Return False if none becomes ready within `timeout` seconds."""
        multiplexer, clock = self._multiplexer, self._clock
        end = self._end_of_wait(timeout)
        call = object()
        try:
            self._begin_wait(call)
            while True:
                connections = multiplexer.transport.wait(self._wait_time(clock(), end))
                with self._lock:
                    self._check_open()
                    multiplexer.run_once(connections, clock())
                if self._on_change is not None:
                    self._notify(self._on_change)
                if multiplexer.ready:
                    return True
                if end is not None and clock() >= end:
                    return False
        finally:
            self._end_wait(call)

    def __iter__(self) -> Iterator[BatchT | Reset | Gap]:
        """Yield every delivery until `close`."""
        while not self._is_closed:
            if self._multiplexer.ready:
                yield self._pop_one()
            else:
                with suppress(ClosedError):
                    self._wait_ready(None)

    def close(self) -> None:
        """Close the subscriber: iteration ends, and `receive` raises `ClosedError`, also while it waits. Idempotent.

        Any thread and any signal handler may call this method, which does not wait. If another call is waiting, the waiting
        call closes the connections when it returns; if not, this method closes them.
        """
        self._close()
