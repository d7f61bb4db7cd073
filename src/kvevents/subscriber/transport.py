"""The interface between streams and sockets: two small classes that a test can replace (`kvevents.testing.FakeTransport`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from kvevents.stream import FetchRequest, Source, Stream


class Connection(Protocol):
    """The live connection of one stream and, while replay is requested, its replay connection."""

    def read_into(self, stream: Stream[Any], now: float, limit: int) -> bool:
        """Feed what has arrived to `stream`, at most about `limit` messages of each kind. Return True if there may be more.

        While the stream misses nothing, live messages are fed before a replay reply, which may come from a later incarnation.
        `disconnected` is fed before every message of a newer connection. If no newer connection is up yet, it is fed after
        every message of the old one. `connected` is fed after every message of the old connection.

        Raise `EndpointError` if the connection cannot continue. The caller then closes it and opens another one later.
        """
        ...

    @property
    def fault(self) -> str:
        """Why there is no live connection, if that is known; "" if there is one."""
        ...

    def deadline(self) -> float | None:
        """Return when `read_into` is due although nothing has arrived, by its clock; None for never."""
        ...

    def request_replay(self, request: FetchRequest) -> None:
        """Send a replay request, on a new connection if the request says so. Raise `EndpointError` if that fails."""
        ...

    def end_replay(self) -> None:
        """Close the replay connection. Replies that have not been read are dropped."""
        ...

    def close(self) -> None:
        """Close all sockets. Idempotent."""
        ...


class Transport(Protocol):
    """Opens connections and waits for them."""

    def open(self, source: Source) -> Connection:
        """Start to connect to `source`. Raise `EndpointError` if that can never succeed."""
        ...

    def wait(self, timeout: float | None) -> Collection[Connection]:
        """Wait at most `timeout` seconds (None: no limit) and return the connections that are readable."""
        ...

    @property
    def max_wait(self) -> float | None:
        """Longest time in seconds between two calls of `wait`, even if nothing arrives; None for no limit."""
        ...

    def fileno(self) -> int:
        """Return a descriptor that is readable when a connection is; -1 without a descriptor: then call `wait`."""
        ...

    def wake(self) -> None:
        """Make the current and every later call of `wait` return at once, because the subscriber is being closed.

        Any thread and any signal handler may call it, also after `close`.
        """
        ...

    def close(self) -> None:
        """Close every connection and what they share. Idempotent."""
        ...
