"""The face that both subscribers share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvevents.errors import ClosedError
from kvevents.stream import DEFAULT_STREAM_LIMITS, Source, StreamLimits, Trust
from kvevents.subscriber.hub import DEFAULT_CONCURRENT_REPLAYS, Hub, StreamStatus
from kvevents.subscriber.transport import Transport
from kvevents.subscriber.zmq import ZmqTransport


class BaseSubscriber:
    """Sources in, state out; how to wait is the front end's."""

    def __init__(
        self,
        sources: Source | str | Iterable[Source | str] = (),
        *,
        limits: StreamLimits = DEFAULT_STREAM_LIMITS,
        max_concurrent_replays: int = DEFAULT_CONCURRENT_REPLAYS,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._hub = Hub(transport or ZmqTransport(), limits, max_concurrent_replays)
        self._closed = False
        try:
            for source in [sources] if isinstance(sources, (Source, str)) else sources:
                self.add(source)
        except BaseException:
            self._close()
            raise

    def add(self, source: Source | str) -> None:
        """Follow one more source; a string is its endpoint.

        Raises `ConfigError` for a name and rank that are followed already, `EndpointError` for an impossible endpoint.
        """
        self._check_open()
        self._hub.add(Source(source) if isinstance(source, str) else source)

    def remove(self, name: str, rank: int = 0) -> None:
        """Stop following a source; deliveries already received from it are still handed out."""
        self._check_open()
        self._hub.remove(name, rank)

    def trust(self, name: str | None = None, rank: int = 0) -> Trust:
        """How far the deliveries of a stream can be trusted; `name` may be left out when there is one stream only."""
        return self._hub.trust(name, rank)

    def status(self, name: str | None = None, rank: int = 0) -> StreamStatus:
        """Trust, numbers and counters of one stream."""
        return self._hub.status(name, rank)

    def statuses(self) -> list[StreamStatus]:
        """The same of every stream."""
        return self._hub.statuses()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{type(self).__name__} is closed")

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._hub.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'closed' if self._closed else self._hub.describe()}>"
