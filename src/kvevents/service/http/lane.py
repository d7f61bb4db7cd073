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
from typing import TYPE_CHECKING, Any, Final

from kvevents.service.errors import ServiceError
from kvevents.service.http.connections import Connection
from kvevents.service.http.heads import Head
from kvevents.service.http.messages import Request, Response
from kvevents.service.http.routing import Endpoint
from kvevents.service.http.turns import Turns

if TYPE_CHECKING:
    from kvevents.service.http.app import App

FIRST_BYTES: Final = 1 << 16
"""Room of a connection from the start; a request head that is longer is not for here."""
STEP_BYTES: Final = 1 << 20
"""Room that a connection takes at once for a body that is only announced."""
MAX_KEPT_HEAD_BYTES: Final = 2_048
"""A head that a connection remembers, so as to recognise the next one."""
_HEAD_END: Final = b"\r\n\r\n"


class Lane(asyncio.BufferedProtocol):
    """One connection, until something unusual comes over it. `general` makes the protocol that takes it then."""

    def __init__(self, app: App, turns: Turns, connections: set[Any], general: Any, connection: Connection) -> None:
        self._app = app
        self._turns = turns
        self._connections = connections
        """Those that the server ends when it drains."""
        self._general = general
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._room = memoryview(bytearray(FIRST_BYTES))
        self._have = 0
        self._head: Head | None = None
        """That of the last request."""
        self._asked: Head | None = None
        """That of a request which is not answered yet."""
        self._start = self._end = 0
        """Where its body begins and ends."""
        self._closing = False
        self._waiting: asyncio.Task[None] | None = None
        """For an answer that takes other replicas; nothing more is read meanwhile."""
        self._is_full = False
        """Whether the client does not take what it is sent."""
        self._is_gone = False
        self._has_ended = False
        """Whether a request was refused; what still comes is discarded."""

    # --- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of `BaseProtocol`."""
        self._transport = transport
        self._connections.add(self)
        self._connection.give_up = self._give_up
        if self._connection.is_reserved:
            self._hand_over()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's names
        """Of `BaseProtocol`."""
        self._connections.discard(self)
        self._connection.lost()
        self._is_gone = True

    def eof_received(self) -> None:
        """Of `BufferedProtocol`: the transport is closed now, behind what has been written."""
        self._turns.flush()
        self._connection.closing()

    def pause_writing(self) -> None:
        """Whoever does not read answers may ask nothing more."""
        self._is_full = True
        self._transport.pause_reading()
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Of `BaseProtocol`."""
        self._is_full = False
        self._connection.resume_writing()
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
        if self._has_ended:
            return
        self._have += nbytes
        if self._waiting is None:
            self._go_on()

    def _go_on(self) -> None:
        """Answer what has come, up to a question that takes other replicas."""
        while self._asked is not None or self._have:
            self._asked = self._asked or self._begin()
            if self._asked is None or self._have < self._end:
                if self._asked is not None:
                    self._grow()
                if self._have:  # else it has gone over, or was refused
                    self._connection.reading()
                return
            self._answer(self._asked)
            if self._waiting is not None:
                return
        if self._closing:
            self._close()

    def _close(self) -> None:
        self._turns.flush()
        self._connection.close()

    # --- one request

    def _begin(self) -> Head | None:
        """Read the head; None when it is not complete, or not for here."""
        start = self._room.obj.find(_HEAD_END, 0, self._have)  # type: ignore[attr-defined]  # a bytearray
        if start < 0:
            if self._have == len(self._room):
                self._hand_over()
            return None
        text = bytes(self._room[:start])
        head = self._head
        if head is None or not head.recognises(text):
            head = Head.read(text)
            if head is not None and not self._app.admits(head.endpoint, head.headers):
                head = None  # it is refused there, before its body is read
            self._head = head if start <= MAX_KEPT_HEAD_BYTES else None
        if head is None or head.length > self._app.service.config.limits.max_body_bytes:
            self._hand_over()
            return None
        self._start, self._end = start + len(_HEAD_END), start + len(_HEAD_END) + head.length
        self._connection.head_is_complete()
        return head

    def _grow(self) -> None:
        """Make room for the body, in steps, since an announced length is only a claim."""
        if self._have < len(self._room):
            return
        size = min(self._end, max(2 * len(self._room), STEP_BYTES))
        try:
            self._connection.hold(size)
        except ServiceError as error:
            self._refuse(error)
            return
        room = memoryview(bytearray(size))
        room[: self._have] = self._room[: self._have]
        self._room = room

    def _answer(self, asked: Head) -> None:
        began = perf_counter()
        self._turns.ask()
        endpoint = asked.endpoint
        request = Request("POST", endpoint.path, asked.query, asked.headers, bytes(self._room[self._start : self._end]))
        response = self._app.answer(endpoint, request)
        if isinstance(response, Response):
            self._tell(endpoint, response, began)
            return
        self._transport.pause_reading()
        self._connection.answering()
        self._waiting = self._loop.create_task(self._wait(endpoint, response, began))

    async def _wait(self, endpoint: Endpoint, response: Awaitable[Response], began: float) -> None:
        told = await response
        self._waiting = None
        if self._is_gone or self._transport.is_closing():
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
        if len(self._room) > FIRST_BYTES:
            self._room = memoryview(bytearray(max(FIRST_BYTES, left)))
            self._connection.hold(len(self._room))
        self._room[:left] = rest
        self._have = left
        self._connection.idle()

    def _hand_over(self) -> None:
        """Let uvicorn have the connection."""
        self._turns.flush()
        self._connections.discard(self)
        self._connection.hold(0)
        received = bytes(self._room[: self._have])
        general = self._general()
        general.connection_made(self._transport)
        self._transport.set_protocol(general)
        if received:
            general.data_received(received)
        self._have, self._asked = 0, None

    def _give_up(self) -> None:
        seconds = f"{self._connection.limits.request_seconds:g} s"
        self._refuse(ServiceError(f"the request was not complete after {seconds}", "too-slow", "send it faster", status=408))

    def _refuse(self, error: ServiceError) -> None:
        self._turns.flush()
        self._has_ended = True
        self._have, self._asked = 0, None
        self._room = memoryview(bytearray(FIRST_BYTES))
        self._connection.hold(0)
        self._connection.refuse(error)
