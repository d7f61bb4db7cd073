"""uvicorn's HTTP protocol, with bounds for what comes before a request is known, and with errors that look like all others."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvevents.service.errors import ServiceError
from kvevents.service.http.messages import problem

MAX_HEAD_BYTES: Final = 65_536
"""Of a request's first line and headers: eight times what proxies let through."""
HEAD_SECONDS: Final = 10.0
"""How long they may take to come once they have begun: without an end, connections would be all that an attacker needs."""
SILENT_SECONDS: Final = 75.0
"""How long a new connection may say nothing: as long as an idle one is kept."""


class Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Wait for a request, but not for ever."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(SILENT_SECONDS, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A piece of a request; the hot path is one that has all of the head in it."""
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        if not self._head_bytes:
            self._stop_waiting()
            self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._end(
                ServiceError(
                    f"the request's headers have more than {MAX_HEAD_BYTES} bytes",
                    "headers-too-large",
                    "send what is long in the body",
                    status=431,
                )
            )

    def on_message_begin(self) -> None:
        """Of the parser: the first byte of a request."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Of the parser."""
        self._in_head = False
        self._head_bytes = 0
        self._stop_waiting()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP."""
        self._end(ServiceError(msg, "malformed-request", "speak HTTP/1.1", status=400))

    def _unsupported_upgrade_warning(self) -> None:
        """Clients that offer another protocol are answered in this one; that is no news."""

    def _give_up(self) -> None:
        self._end(
            ServiceError(
                f"the request's headers were not complete after {HEAD_SECONDS:g} s", "too-slow", "send it faster", status=408
            )
        )

    def _end(self, error: ServiceError) -> None:
        self.transport.write(problem(error, ((b"connection", b"close"),)).written())
        self.transport.close()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
