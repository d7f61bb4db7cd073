"""The subscriber for threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from kvevents.errors import ClosedError
from kvevents.stream import Batch, Gap, RawBatch, Reset
from kvevents.stream.deliveries import B
from kvevents.subscriber.base import BaseSubscriber, Options, Sources


class Subscriber(BaseSubscriber[B]):
    """Follows one or many sources and hands out their deliveries in order.

    Receive from one thread, which also adds and removes sources; any thread may call `close`, `trust`, `status` and `statuses`.
    Iterate over it, or call `receive`::

        with Subscriber(Source("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")) as subscriber:
            for delivery in subscriber:
                print(delivery)

    With `decode=False` it delivers `RawBatch` instead of `Batch`, for those who read payloads themselves; they `report` what
    they find. With a `sink`, such as a `PrefixIndex`, each delivery is applied to it and reported before it is handed out; what
    the sink raises, `receive` raises, and the deliveries that it was given are not handed out.
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

    def receive(self, timeout: float | None = None) -> B | Reset | Gap | None:
        """The next delivery; None after `timeout` seconds without one (None waits without bound, 0 does not wait).

        Raises `ClosedError` after `close`, and when another thread or a signal handler calls `close` meanwhile.
        """
        self._check_open()
        if self._hub.ready or self._take_turns(timeout):
            return self._next()
        return None

    def receive_many(self, limit: int | None = None, timeout: float | None = None) -> list[B | Reset | Gap]:
        """What `receive` would hand out without waiting any further, at most `limit`; empty after `timeout` seconds."""
        self._check_limit(limit)
        self._check_open()
        if self._hub.ready or self._take_turns(timeout):
            return self._take(limit)
        return []

    def _take_turns(self, timeout: float | None) -> bool:
        """Wait until something is ready; False after `timeout`."""
        hub, clock = self._hub, self._clock
        end = None if timeout is None else clock() + timeout
        call = object()
        try:
            self._enter(call)
            while True:
                links = hub.transport.wait(self._pause(clock(), end))
                with self._lock:
                    self._check_open()
                    hub.turn(links, clock())
                if hub.ready:
                    return True
                if end is not None and clock() >= end:
                    return False
        finally:
            self._leave(call)

    def _pause(self, now: float, end: float | None) -> float | None:
        due = self._hub.timeout(now)
        if end is None:
            return due
        left = max(0.0, end - now)
        return left if due is None else min(due, left)

    def __iter__(self) -> Iterator[B | Reset | Gap]:
        """Every delivery until `close`."""
        while not self._closed:
            if self._hub.ready:
                yield self._next()
            else:
                with suppress(ClosedError):
                    self._take_turns(None)

    def close(self) -> None:
        """Stop: iteration ends, and `receive` raises `ClosedError`, also where another thread is waiting in it. Idempotent.

        Any thread and any signal handler may call it; it does not wait. A call that is waiting closes the connections as it
        returns. Otherwise they are closed when this returns.
        """
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
