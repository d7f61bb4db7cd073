"""uvicorn's HTTP protocol, with bounds for what comes before a request is known, and with errors that look like all others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvevents.service.errors import ServiceError
from kvevents.service.http.connections import Connection

if TYPE_CHECKING:
    from kvevents.service.http.app import App

MAX_HEAD_BYTES: Final = 65_536
"""Of a request's first line and headers: eight times what proxies let through."""
MAX_PIPELINED: Final = 128
"""Requests that may wait for the answer to an earlier one of the same connection."""


class Protocol(HttpToolsProtocol):
    """One connection, which reports what it does to `connection`."""

    def __init__(self, app: App, connection: Connection, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connection: Final = connection
        if connection.is_reserved:
            self.app = app.probes_only
        self._is_in_head = False
        self._is_in_message = False
        self._head_bytes = 0
        self._body_bytes = 0
        self._queued_bytes = 0
        """Of requests that wait for the answer to an earlier one."""
        self._unanswered = 0
        """Requests whose head has come."""
        self._has_ended = False
        """Whether the last answer is given; what still comes is discarded."""
        self._refusal: ServiceError | None = None
        """Why the request at hand cannot be taken: found in a callback of the parser, in which it cannot be sent."""
        self._is_due = False
        """Whether the client expects an answer to an earlier request than that one."""

    # --- asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Of `BaseProtocol`."""
        self._connection.give_up = self._give_up
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Of `BaseProtocol`."""
        self._connection.lost()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Of `Protocol`: the transport closes behind what has been written."""
        self._connection.closing()

    def pause_writing(self) -> None:
        """Of `BaseProtocol`."""
        self._connection.pause_writing()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Of `BaseProtocol`."""
        self._connection.resume_writing()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """A piece of a request; the hot path is one that has all of the head in it."""
        if self._has_ended:
            return
        super().data_received(data)
        if self._has_ended or self.transport.is_closing():
            return
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                sentence = f"the request's headers have more than {MAX_HEAD_BYTES} bytes"
                self._cannot_take(ServiceError(sentence, "headers-too-large", "send what is long in the body", status=431))
        if self._refusal is not None:
            self._refuse(self._refusal)

    # --- the parser's

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._is_in_head = self._is_in_message = True
        if self._unanswered:
            self._queued_bytes += self._body_bytes
        else:
            self._connection.reading()
        self._body_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A request is known, and is given to the application."""
        self._is_in_head = False
        self._head_bytes = 0
        self._unanswered += 1
        self._connection.head_is_complete()
        super().on_headers_complete()
        self.cycle.transport = _Ending(self)  # type: ignore[assignment]  # it needs no more of a transport
        if self._connection.is_reserved:
            self.cycle.keep_alive = False
        if self.pipeline:
            self._queued_bytes += len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            self._hold()
        if len(self.pipeline) > MAX_PIPELINED:
            sentence = f"more than {MAX_PIPELINED} requests wait for an answer to an earlier one"
            self._cannot_take(ServiceError(sentence, "too-many-pipelined", "wait for answers", status=429))

    def on_body(self, body: bytes) -> None:
        """A piece of a body; one of a request that has its answer is discarded."""
        if self._has_ended:
            return
        self._body_bytes += len(body)
        self._hold()
        if self._refusal is None:
            super().on_body(body)

    def _hold(self) -> None:
        try:
            self._connection.hold(self._queued_bytes + self._body_bytes)
        except ServiceError as error:
            self._cannot_take(error)

    def on_message_complete(self) -> None:
        """A request is complete."""
        self._is_in_message = False
        self._head_bytes = 0
        if self._unanswered and not self._has_ended:
            self._connection.answering()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer is written."""
        self._unanswered -= 1
        if self._has_ended:
            self.server_state.total_requests += 1
            return
        if self._is_in_message and not self._unanswered and not self._is_in_head:
            self._end()  # the rest of the body is not waited for
            return
        super().on_response_complete()
        self._unset_keepalive_if_required()  # deadlines are the business of `Connections`
        if not self.pipeline:
            self._queued_bytes = 0
            self._hold()
        if not self._unanswered and not self._is_in_message:
            self._connection.idle()
        elif not self._unanswered or (self._unanswered == 1 and self._is_in_message and not self._is_in_head):
            self._connection.reading()

    # --- the end

    def shutdown(self) -> None:
        """Close as soon as no request is in progress; called by the server when it drains."""
        if not self._has_ended:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP."""
        self._cannot_take(ServiceError(msg, "malformed-request", "speak HTTP/1.1", status=400))
        if self._refusal is not None:
            self._refuse(self._refusal)

    def _unsupported_upgrade_warning(self) -> None:
        """Clients that offer another protocol are answered in this one; that is no news."""

    def _give_up(self) -> None:
        seconds = f"{self._connection.limits.request_seconds:g} s"
        self._refuse(ServiceError(f"the request was not complete after {seconds}", "too-slow", "send it faster", status=408))

    def _cannot_take(self, error: ServiceError) -> None:
        """The request that is being received is refused; the first reason counts."""
        if self._refusal is None:
            self._refusal = error
            is_known = self._is_in_message and not self._is_in_head
            self._is_due = self._unanswered > is_known

    def _refuse(self, error: ServiceError) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self.pipeline.clear()
        has_begun = False
        if self.cycle is not None and not self.cycle.response_complete:
            has_begun = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.cycle.body.clear()
        self._connection.hold(0)
        if has_begun or self._is_due:
            self._connection.close(error.reason)
        else:
            self._connection.refuse(error)

    def _end(self) -> None:
        """End behind the answer that was just written."""
        self._has_ended = True
        self.pipeline.clear()
        if self._is_in_message:
            self._connection.linger()
        else:
            self._connection.close()

    def end(self) -> None:
        """The application's last answer is written, and says so."""
        if not self._has_ended:
            self._end()


class _Ending:
    """A transport as an answer of uvicorn uses it: in place of `close`, the client may finish what it is sending."""

    __slots__ = ("_protocol",)

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        """Of a transport; an answer to a client that was cut off is discarded."""
        if not self.is_closing():
            self._protocol.transport.write(data)

    def is_closing(self) -> bool:
        """Of a transport."""
        return self._protocol.transport.is_closing()

    def close(self) -> None:
        """Of a transport."""
        self._protocol.end()
