"""The subscriber for threads."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from kvevents.stream import Batch, Gap, RawBatch, Reset
from kvevents.stream.deliveries import B
from kvevents.subscriber.base import BaseSubscriber, Options, Sources


class Subscriber(BaseSubscriber[B]):
    """Follows one or many sources and hands out their deliveries in order.

    Use it from one thread. Iterate over it, or call `receive`::

        with Subscriber(Source("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")) as subscriber:
            for delivery in subscriber:
                print(delivery)

    With `decode=False` it delivers `RawBatch` instead of `Batch`, for those who read payloads themselves; they `report` what
    they find.
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

        Raises `ClosedError` after `close`.
        """
        ready = self._hub.ready
        if ready or self._take_turns(timeout):
            return ready.popleft()
        return None

    def receive_many(self, limit: int | None = None, timeout: float | None = None) -> list[B | Reset | Gap]:
        """What `receive` would hand out without waiting any further, at most `limit`; empty after `timeout` seconds."""
        self._check_limit(limit)
        if self._hub.ready or self._take_turns(timeout):
            return self._hub.take(limit)
        return []

    def _take_turns(self, timeout: float | None) -> bool:
        """Wait until something is ready; False after `timeout`."""
        self._check_open()
        hub, clock = self._hub, self._clock
        end = None if timeout is None else clock() + timeout
        while True:
            hub.turn(hub.transport.wait(self._pause(clock(), end)), clock())
            if hub.ready:
                return True
            if end is not None and clock() >= end:
                return False

    def _pause(self, now: float, end: float | None) -> float | None:
        due = self._hub.timeout(now)
        if end is None:
            return due
        left = max(0.0, end - now)
        return left if due is None else min(due, left)

    def __iter__(self) -> Iterator[B | Reset | Gap]:
        ready = self._hub.ready
        while not self._closed:
            if ready:
                yield ready.popleft()
            else:
                self._take_turns(None)

    def close(self) -> None:
        """Close every connection; idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
