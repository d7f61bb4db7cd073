"""The subscriber for threads."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from kvevents.stream import Delivery
from kvevents.subscriber.base import BaseSubscriber


class Subscriber(BaseSubscriber):
    """Follows one or many sources and hands out their deliveries in order.

    Use it from one thread. Iterate over it, or call `receive`::

        with Subscriber(Source("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")) as subscriber:
            for delivery in subscriber:
                print(delivery)
    """

    def receive(self, timeout: float | None = None) -> Delivery | None:
        """The next delivery; None after `timeout` seconds without one (None waits without bound, 0 does not wait).

        Raises `ClosedError` after `close`.
        """
        ready = self._hub.ready
        if ready:
            return ready.popleft()
        self._check_open()
        end = None if timeout is None else self._clock() + timeout
        while True:
            now = self._clock()
            self._hub.turn(self._hub.transport.wait(self._pause(now, end)), self._clock())
            if ready:
                return ready.popleft()
            if end is not None and self._clock() >= end:
                return None

    def _pause(self, now: float, end: float | None) -> float | None:
        due = self._hub.timeout(now)
        if end is None:
            return due
        left = max(0.0, end - now)
        return left if due is None else min(due, left)

    def __iter__(self) -> Iterator[Delivery]:
        while not self._closed:
            delivery = self.receive()
            if delivery is not None:
                yield delivery

    def close(self) -> None:
        """Close every connection; idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
