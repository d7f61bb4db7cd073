"""The fast lane: short questions are answered where their bytes arrive.

A lookup takes a few microseconds; what a general server does around it (a parser's callbacks, a task, an event, flow control
by chunks) takes twenty times as long. So each connection begins here: a plain POST of known length to a quick endpoint is read
into one buffer, handled, and answered with one write; nothing more is read while an answer waits for other replicas. With
anything else, the connection goes over to uvicorn's protocol for good, with the bytes that were read, so there is one way only
in which HTTP is understood in full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvevents.service.errors import ServiceError
from kvevents.service.http.messages import Request, Response, problem
from kvevents.service.http.routing import TABLE, Endpoint
from kvevents.service.http.turns import Turns

if TYPE_CHECKING:
    from kvevents.service.http.app import App

FIRST_BYTES: Final = 1 << 16
"""Room of a connection from the start; a request head that is longer is not for here."""
MAX_KEPT_BYTES: Final = 1 << 20
"""Room that a connection keeps for its next request, and takes at once for a body that is only announced."""
_HEAD_END: Final = b"\r\n\r\n"
_UNUSUAL: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"content-encoding", b"te", b"trailer"})
"""Headers of requests that are not plain."""
_QUICK: Final[dict[bytes, Endpoint]] = {
    path.encode("ascii"): endpoint
    for path, methods in TABLE.items()
    for method, endpoint in methods.items()
    if method == "POST" and endpoint.quick
}


_Asked: TypeAlias = tuple[Endpoint, bytes, list[tuple[bytes, bytes]], int]
"""Endpoint, query string and headers of a request whose body is awaited, and where that begins."""


class Lane(asyncio.BufferedProtocol):
    """One connection, until something unusual comes over it. `general` makes the protocol that takes it then."""

    def __init__(self, app: App, turns: Turns, connections: set[Any], general: Any, keep_alive_seconds: float) -> None:
        self._app = app
        self._turns = turns
        self._connections = connections
        self._general = general
        self._keep_alive_seconds = keep_alive_seconds
        self._request_seconds = app.service.config.limits.request_seconds
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + self._request_seconds
        self._timer = self._loop.call_at(self._deadline, self._look_at_time)
        self._transport: Any = None
        self._room = memoryview(bytearray(FIRST_BYTES))
        self._have = 0
        self._asked: _Asked | None = None
        self._end = 0
        """Where the body ends."""
        self._closing = False
        self._waiting: asyncio.Task[None] | None = None
        """For an answer that takes other replicas; nothing more is read meanwhile."""
        self._is_full = False
        """Whether the client does not take what it is sent."""
        self._is_gone = False

    # --- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of `BaseProtocol`."""
        self._transport = transport
        self._connections.add(self)
        if len(self._connections) > self._app.service.config.limits.max_clients:
            self._hand_over()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's names
        """Of `BaseProtocol`."""
        self._connections.discard(self)
        self._timer.cancel()
        self._is_gone = True

    def eof_received(self) -> None:
        """Of `BufferedProtocol`: the transport is closed now, behind what has been written."""
        self._turns.flush()

    def pause_writing(self) -> None:
        """Whoever does not read answers may ask nothing more."""
        self._is_full = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Of `BaseProtocol`."""
        self._is_full = False
        if self._waiting is None:
            self._transport.resume_reading()

    def shutdown(self) -> None:
        """Close as soon as no request is under way; called by the server when it drains."""
        self._closing = True
        if not self._have:
            self._close()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - as above
        """Of `BufferedProtocol`."""
        return self._room[self._have :]

    def buffer_updated(self, nbytes: int) -> None:
        """Of `BufferedProtocol`."""
        self._have += nbytes
        if self._waiting is None:
            self._go_on()

    def _go_on(self) -> None:
        """Answer what has come, up to a question that takes other replicas."""
        while self._asked is not None or self._have:
            self._asked = self._asked or self._begin()
            if self._asked is None:
                return
            if self._have < self._end:
                self._grow()
                return
            self._answer(self._asked)
            if self._waiting is not None:
                return
        if self._closing:
            self._close()

    def _close(self) -> None:
        self._turns.flush()
        self._transport.close()

    # --- one request

    def _begin(self) -> _Asked | None:
        """Read the head; None when it is not complete, or not for here."""
        start = self._room.obj.find(_HEAD_END, 0, self._have)  # type: ignore[attr-defined]  # a bytearray
        if start < 0:
            if self._have == len(self._room):
                self._hand_over()
            return None
        head = bytes(self._room[:start])
        line, _, rest = head.partition(b"\r\n")
        method, _, target = line.partition(b" ")
        target, _, version = target.partition(b" ")
        path, _, query = target.partition(b"?")
        endpoint = _QUICK.get(path)
        headers = (
            _headers(rest)
            if endpoint is not None and method == b"POST" and version == b"HTTP/1.1" and _is_plain(head)
            else None
        )
        length = -1 if headers is None else _length(headers)
        if endpoint is None or headers is None or not 0 <= length <= self._app.service.config.limits.max_body_bytes:
            self._hand_over()
            return None
        if self._have < start + 4 + length and not self._app.admits(endpoint, headers):
            self._hand_over()  # nobody without a token makes the service wait for a body, and keep it
            return None
        self._end = start + 4 + length
        self._deadline = self._loop.time() + self._request_seconds
        return endpoint, query, headers, start + 4

    def _grow(self) -> None:
        """Make room for the body, in steps, since an announced length is only a claim."""
        if self._have < len(self._room):
            return
        room = memoryview(bytearray(min(self._end, max(2 * len(self._room), MAX_KEPT_BYTES))))
        room[: self._have] = self._room[: self._have]
        self._room = room

    def _answer(self, asked: _Asked) -> None:
        began = perf_counter()
        endpoint, query, headers, start = asked
        request = Request("POST", endpoint.path, query, headers, bytes(self._room[start : self._end]))
        response = self._app.answer(endpoint, request)
        if isinstance(response, Response):
            self._tell(endpoint, response, began)
            return
        self._transport.pause_reading()
        self._waiting = self._loop.create_task(self._wait(endpoint, response, began))

    async def _wait(self, endpoint: Endpoint, response: Awaitable[Response], began: float) -> None:
        told = await response
        self._waiting = None
        if self._is_gone:
            return
        self._tell(endpoint, told, began)
        self._go_on()
        if self._waiting is None and not self._is_full and not self._closing:
            self._transport.resume_reading()

    def _tell(self, endpoint: Endpoint, response: Response, began: float) -> None:
        self._turns.answer(self._transport, response.written(), began)
        self._app.service.metrics.request(endpoint.path, response.status, perf_counter() - began)
        self._asked = None
        left = self._have - self._end
        rest = bytes(self._room[self._end : self._have]) if left else b""
        if len(self._room) > MAX_KEPT_BYTES:
            self._room = memoryview(bytearray(max(FIRST_BYTES, left)))
        self._room[:left] = rest
        self._have = left
        self._deadline = self._loop.time() + (self._request_seconds if left else self._keep_alive_seconds)

    def _hand_over(self) -> None:
        """Let uvicorn have the connection."""
        self._turns.flush()
        self._connections.discard(self)
        self._timer.cancel()
        received = bytes(self._room[: self._have])
        general = self._general()
        general.connection_made(self._transport)
        self._transport.set_protocol(general)
        if received:
            general.data_received(received)
        self._have, self._asked = 0, None

    def _look_at_time(self) -> None:
        """One timer for all requests of a connection: it goes off seldom, and sees then how long there is left."""
        if self._waiting is not None:  # that has bounds of its own
            self._deadline = self._loop.time() + self._request_seconds
        if self._deadline > self._loop.time():
            self._timer = self._loop.call_at(self._deadline, self._look_at_time)
            return
        if self._asked is not None:
            seconds = f"{self._request_seconds:g} s"
            late = ServiceError(f"the request was not complete after {seconds}", "too-slow", "send it faster", status=408)
            self._turns.flush()
            self._transport.write(problem(late, ((b"connection", b"close"),)).written())
        self._close()


def _is_plain(head: bytes) -> bool:
    """Whether lines end as they should only: what else ends one for somebody must not be read in two ways."""
    ends = head.count(b"\r\n")
    return head.count(b"\n") == ends == head.count(b"\r") and b"\0" not in head


def _headers(text: bytes) -> list[tuple[bytes, bytes]] | None:
    """Names in lower case, and values; None where anything about them is unusual."""
    found: list[tuple[bytes, bytes]] = []
    for line in text.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if not colon or not name or name in _UNUSUAL or name[0] <= 32 or name[-1] <= 32:
            return None
        if name == b"connection" and value.lower() != b"keep-alive":
            return None
        found.append((name, value))
    return found


def _length(headers: list[tuple[bytes, bytes]]) -> int:
    """Of the body; -1 where it is not told just once."""
    told = [value for name, value in headers if name == b"content-length"]
    return int(told[0]) if len(told) == 1 and told[0].isdigit() and len(told[0]) < 12 else -1
