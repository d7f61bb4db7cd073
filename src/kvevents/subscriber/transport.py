"""The seam between streams and sockets: two small classes that a test can replace (`kvevents.testing.FakeTransport`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from kvevents.stream import Ask, Source, Stream


class Link(Protocol):
    """The connections of one stream."""

    def pump(self, stream: Stream[Any], now: float, limit: int) -> bool:
        """Feed what has arrived, at most about `limit` messages of each kind, to `stream`; True when there may be more.

        While the stream misses nothing, all that is live comes before an answer of replay, which may be of a later life.
        Connection changes are fed in their place: `disconnected` before anything newer and, if no new connection is up yet,
        behind everything older; `connected` behind everything older. Raises `EndpointError` when the link can go on no longer:
        it is closed then, and opened again later.
        """
        ...

    @property
    def fault(self) -> str:
        """Why there is no live connection, as far as that is known; "" if there is one."""
        ...

    def deadline(self) -> float | None:
        """When to pump though nothing has arrived; None for never. By the clock of `pump`."""
        ...

    def send(self, ask: Ask) -> None:
        """Send a replay request, on a new connection if it asks for a fresh one. Raises `EndpointError` when it cannot."""
        ...

    def end_replay(self) -> None:
        """Close the replay connection: no answer is wanted any more."""
        ...

    def close(self) -> None:
        """Close everything; idempotent."""
        ...


class Transport(Protocol):
    """Opens links and waits for them."""

    def open(self, source: Source) -> Link:
        """Start connecting. Raises `EndpointError` where that can never work."""
        ...

    def wait(self, timeout: float | None) -> Collection[Link]:
        """Links with something to pump, after at most `timeout` seconds (None: no bound)."""
        ...

    @property
    def max_pause(self) -> float | None:
        """Seconds after which `wait` is to be called again though nothing has come; None for any time."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable when `wait` has something; -1 when there is none and `wait` must be asked."""
        ...

    def wake(self) -> None:
        """Make the present call of `wait` return, and every later one: the subscriber is being closed.

        Any thread may call it, a signal handler too, also after `close`.
        """
        ...

    def close(self) -> None:
        """Release what the links shared; idempotent."""
        ...
