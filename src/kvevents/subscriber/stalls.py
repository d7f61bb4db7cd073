"""Detects that the application did not receive for so long that connections may have timed out behind full sockets."""

from __future__ import annotations

from collections.abc import Callable


class StallDetector:
    """Measures the time between two waits for messages, which is the time in which nothing reads the sockets.

    A quiet source is not a stall: as long as the application keeps waiting, `is_stalled` stays False. A front end that waits by
    other means (asyncio) must come back to `Transport.wait` at least every `max_pause` seconds.
    """

    def __init__(self, heartbeat_timeout: float, clock: Callable[[], float]) -> None:
        # Half: a connection is given up this long after a ping that was sent before the socket was full.
        self._longest = max(0.0, heartbeat_timeout) / 2
        self._clock = clock
        self._waited_at = float("-inf")
        self.is_stalled = True
        """Whether the wait that was last begun came too late. Before the first wait that is not known."""

    @property
    def max_pause(self) -> float | None:
        """Seconds between two waits that are certainly not a stall; None where every pause counts as one."""
        return self._longest / 2 or None

    def begin_wait(self) -> None:
        """Sockets are read from now on."""
        self.is_stalled = self._clock() - self._waited_at > self._longest

    def end_wait(self) -> None:
        """The application has its turn."""
        self._waited_at = self._clock()
