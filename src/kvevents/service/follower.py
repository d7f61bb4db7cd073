"""The thread that follows all streams and brings them into the index."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from kvevents.errors import KVEventsError
from kvevents.index import PrefixIndex
from kvevents.stream import Checkpoint, Findings, Gap, RawBatch, RawDelivery, Reset, Source, Trust
from kvevents.subscriber import StreamStatus
from kvevents.wire import Rejected

log = logging.getLogger(__name__)
T = TypeVar("T")

TICK_SECONDS: Final = 0.02
"""How long the thread waits for the network at most: orders, trust and rates are at most so old."""
MIN_TURN_SECONDS: Final = 0.001
"""Shortest time from the start of a turn that received something to the next turn. With hundreds of engines a turn then
receives the batches of a dozen of them, which saves about a quarter of the CPU. An event that arrives alone is received at
once (ADR 0015)."""
RATE_SECONDS: Final = 10
"""Seconds over which the rate of batches is told."""


@dataclass(slots=True)
class _Order(Generic[T]):
    work: Callable[[], T]
    done: Future[T]


class Listener:
    """What a follower tells, from its own thread."""

    def received(self, keys: Iterable[tuple[str, int]]) -> None:
        """Something has come of these streams, and is not in the index yet."""

    def delivered(self, batches: list[RawBatch], losses: list[Reset | Gap]) -> None:
        """Deliveries that are in the index now: the newest batch of each stream, and every reset and gap."""

    def rejected(self, batch: RawBatch, events: tuple[Rejected, ...]) -> None:
        """A batch with events that could not be read."""

    def ticked(self) -> None:
        """About `TICK_SECONDS` have passed."""

    def failed(self, error: BaseException) -> None:
        """The thread has come to an end that nobody asked for."""


class Streams(Protocol):
    """What a follower and a fleet need of a subscriber."""

    def receive_many(self, *, timeout: float | None = None) -> Sequence[RawDelivery]:
        """What is new, in order; empty after `timeout` seconds."""
        ...

    def report(self, delivery: RawDelivery, findings: Findings | None) -> None:
        """What applying a batch has shown."""
        ...

    def add(self, source: Source, resume: Checkpoint | None = None) -> None:
        """Follow one more."""
        ...

    def remove(self, name: str, rank: int = 0) -> None:
        """Follow it no more."""
        ...

    def trust(self, name: str | None = None, rank: int = 0) -> Trust:
        """Of one stream; a `LookupError` for one that is not followed."""
        ...

    def status(self, name: str | None = None, rank: int = 0) -> StreamStatus:
        """Everything of one stream; a `LookupError` for one that is not followed."""
        ...

    def checkpoints(self) -> list[Checkpoint]:
        """Of all, to go on with later."""
        ...

    def close(self) -> None:
        """Hand out nothing any more."""
        ...


class Follower(threading.Thread):
    """Owns the subscriber: whoever wants something of it gives an order."""

    def __init__(self, subscriber: Streams, index: PrefixIndex, listener: Listener) -> None:
        super().__init__(name="kvevents-follower", daemon=True)
        self.subscriber = subscriber
        self._index = index
        self.listener = listener
        """Who is told; it may be replaced at any time."""
        self._orders: deque[_Order[object]] = deque()
        self._stopping = False
        self._per_second: deque[tuple[int, int]] = deque(maxlen=RATE_SECONDS + 1)
        self._began = int(time.monotonic())
        self.batches = 0
        """Batches that came into the index."""

    def order(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` done by the thread, between two deliveries: everything received before it is in the index then."""
        done: Future[T] = Future()
        self._orders.append(_Order(work, done))  # type: ignore[arg-type]  # the queue does not look at results
        if not self.is_alive():
            self._obey()
        return done

    @property
    def rate(self) -> float:
        """Batches per second of late."""
        now = int(time.monotonic())
        recent = [count for second, count in list(self._per_second) if now - RATE_SECONDS <= second < now]
        return sum(recent) / max(1, min(RATE_SECONDS, now - self._began))

    def run(self) -> None:
        """Follow until `stop`."""
        try:
            self._follow()
        except BaseException as error:
            log.exception("the thread that follows the engines has failed; nothing new comes into the index")
            self.listener.failed(error)
            raise
        finally:
            self.subscriber.close()

    def _follow(self) -> None:
        due = 0.0
        while not self._stopping:
            deliveries = self.subscriber.receive_many(timeout=TICK_SECONDS)
            began = time.monotonic()
            if deliveries:
                self._apply(deliveries)
            # Only now is nothing on its way from the subscriber to the index, so that an order sees both alike.
            self._obey()
            now = time.monotonic()
            if now >= due:
                due = now + TICK_SECONDS
                self.listener.ticked()
            if deliveries and (rest := began + MIN_TURN_SECONDS - now) > 0:
                time.sleep(rest)

    def _apply(self, deliveries: Sequence[RawDelivery]) -> None:
        self.listener.received({(delivery.source, delivery.rank) for delivery in deliveries})
        outcomes = self._index.apply_many(deliveries)
        newest: dict[tuple[str, int], RawBatch] = {}
        losses: list[Reset | Gap] = []
        count = 0
        for delivery, applied in zip(deliveries, outcomes, strict=True):
            if not isinstance(delivery, RawBatch):
                losses.append(delivery)
                continue
            count += 1
            newest[delivery.source, delivery.rank] = delivery
            if applied.findings is not None:
                self.subscriber.report(delivery, applied.findings)
                if applied.findings.rejected:
                    self.listener.rejected(delivery, applied.findings.rejected)
        self._count(count)
        self.listener.delivered(list(newest.values()), losses)

    def _count(self, batches: int) -> None:
        self.batches += batches
        second = int(time.monotonic())
        if self._per_second and self._per_second[-1][0] == second:
            batches += self._per_second.pop()[1]
        self._per_second.append((second, batches))

    def _obey(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            if not order.done.set_running_or_notify_cancel():
                continue  # whoever gave it waits no more
            try:
                order.done.set_result(order.work())
            except BaseException as error:
                order.done.set_exception(error)  # whoever waits for it is told, whatever it is
                if not isinstance(error, (KVEventsError, OSError)):
                    raise

    def stop(self, timeout: float = 5.0) -> bool:
        """End the thread, and close the subscriber; False when it has not ended in time."""
        self._stopping = True
        if self.is_alive():
            self.join(timeout)
        return not self.is_alive()


_STAMPED = msgspec.msgpack.Decoder(list[msgspec.Raw])


def published_at(payload: bytes) -> float | None:
    """The engine's clock in a batch, where it is an array that begins with it: as all engines send it."""
    try:
        first = _STAMPED.decode(payload)[0]
        stamp = msgspec.msgpack.decode(first, type=float)
    except (msgspec.MsgspecError, IndexError, ValueError, RecursionError):  # the last for lists in lists in lists
        return None
    return stamp
