"""The face that both subscribers share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeAlias, TypedDict

from kvevents.errors import ClosedError, ConfigError
from kvevents.stream import (
    DEFAULT_STREAM_LIMITS,
    Batch,
    Checkpoint,
    Findings,
    Gap,
    RawBatch,
    Reset,
    Source,
    StreamLimits,
    Trust,
)
from kvevents.stream.deliveries import B
from kvevents.subscriber.hub import DEFAULT_CONCURRENT_REPLAYS, Hub, StreamStatus
from kvevents.subscriber.sink import Sink
from kvevents.subscriber.transport import Transport
from kvevents.subscriber.zmq import ZmqTransport

Sources: TypeAlias = Source | str | Iterable[Source | str]


class Options(TypedDict, total=False):
    """What `BaseSubscriber` takes by name, `decode` aside: for the overloads, whose types depend on that alone."""

    limits: StreamLimits
    max_concurrent_replays: int
    transport: Transport | None
    clock: Callable[[], float]
    sink: Sink | None


class BaseSubscriber(Generic[B]):
    """Sources in, state out; how to wait is the front end's.

    Threads. The connections belong to the calls that use them: `add`, `remove` and the wait inside `receive`. `_calls` holds a
    token for each of them. `close` may come from anywhere, also from a signal handler in the middle of a call. It closes the
    connections itself if no call uses them; else it wakes the call, and the last call to leave closes them. Either side first
    changes its own variable (`_closed` or `_calls`) and then reads the other one, so one of them always sees both changes.
    `_lock` is held while streams are read or changed, never while waiting for messages.
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
        self._hub: Hub[B] = Hub(transport or ZmqTransport(), limits, max_concurrent_replays, decode=decode)
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

        With `resume`, go on where an earlier process has ended: the publisher is first proven to be the same, as after a
        reconnect. If it is, the batch after the checkpoint's last is next; if not, a `Reset` is. Until then trust is STALE.

        Raises `ConfigError` for a name and rank that are followed already, or that are not those of `resume`, `EndpointError`
        for an impossible endpoint.
        """
        call = object()
        try:
            self._enter(call)
            with self._lock:
                self._hub.add(Source(source) if isinstance(source, str) else source, resume)
        finally:
            self._leave(call)

    def remove(self, name: str, rank: int = 0) -> None:
        """Stop following a source; deliveries already received from it are still handed out."""
        call = object()
        try:
            self._enter(call)
            with self._lock:
                self._hub.remove(name, rank)
        finally:
            self._leave(call)

    def report(self, delivery: Batch | RawBatch | Reset | Gap, findings: Findings | None) -> None:
        """Say what reading and applying a batch has shown; without it, trust does not know. None says nothing.

        A `sink` is reported for by itself. Once for each batch of which there is something to say, at any time after it was
        delivered: doubts newer than the batch stay. Of a `Batch`, which the subscriber has read itself, only `findings.agrees`
        counts; where that is False, a `Reset` may come next. There is nothing to say of other deliveries, nor of sources that
        were removed; it does nothing then.
        """
        if findings is not None:
            with self._lock:
                self._hub.report(delivery, findings)

    def checkpoint(self, name: str | None = None, rank: int = 0) -> Checkpoint:
        """What to keep of a stream to `resume` it in a later process: how far its deliveries were handed out, no further.

        Take it when everything received was applied and reported. It may be taken after `close`, too.
        """
        with self._lock:
            return self._hub.checkpoint(name, rank)

    def checkpoints(self) -> list[Checkpoint]:
        """The same of every stream."""
        with self._lock:
            return self._hub.checkpoints()

    def trust(self, name: str | None = None, rank: int = 0) -> Trust:
        """How far the deliveries of a stream can be trusted; `name` may be left out when there is one stream only.

        It is as of all that was received. Who takes deliveries one by one, or with a `limit`, may not have all of them yet: a
        loss may come before the clear that has healed it. Ask when `receive_many()` has handed out everything.

        Any thread may call this, `status` and `statuses`, also after `close`.
        """
        with self._lock:
            return self._hub.trust(name, rank)

    def trust_changes(self) -> list[tuple[tuple[str, int], Trust]]:
        """Source, rank and trust of the streams whose trust or its reason has changed since the last call, at first of all.

        Any thread may call this, but only one of them: each change is returned once.
        """
        with self._lock:
            return self._hub.trust_changes()

    def status(self, name: str | None = None, rank: int = 0) -> StreamStatus:
        """Trust, numbers and counters of one stream."""
        with self._lock:
            return self._hub.status(name, rank)

    def statuses(self) -> list[StreamStatus]:
        """The same of every stream."""
        with self._lock:
            return self._hub.statuses()

    def _next(self) -> B | Reset | Gap:
        """The oldest delivery that is ready; there must be one."""
        delivery = self._hub.ready.popleft()
        self._apply([delivery])
        return delivery

    def _take(self, limit: int | None) -> list[B | Reset | Gap]:
        """All that are ready, at most `limit`."""
        deliveries = self._hub.take(limit)
        self._apply(deliveries)
        return deliveries

    def _apply(self, deliveries: Sequence[B | Reset | Gap]) -> None:
        if self._sink is not None:
            for delivery, outcome in zip(deliveries, self._sink.apply_many(deliveries), strict=True):
                self.report(delivery, outcome.findings)

    @staticmethod
    def _check_limit(limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ConfigError(f"limit is {limit}; it must be at least 1, or None for no limit")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{type(self).__name__} is closed")

    def _enter(self, call: object) -> None:
        """Begin to use the connections; `_leave` must follow. Raises `ClosedError`."""
        self._calls.add(call)
        self._check_open()

    def _leave(self, call: object) -> None:
        """Stop using the connections, and close them if `close` came meanwhile."""
        self._calls.discard(call)
        if self._closed:
            self._release()

    def _close(self) -> None:
        self._closed = True
        if self._calls:
            self._hub.transport.wake()
        else:
            self._release()

    def _release(self) -> None:
        with self._lock:
            if not self._calls:
                self._hub.close()

    def __repr__(self) -> str:
        with self._lock:
            return f"<{type(self).__name__} {'closed' if self._closed else self._hub.describe()}>"
