"""HTTP connections to one other replica, kept open: a question that finds one idle costs a write and a read.

A client library does the same for any server there is, at several times the CPU, and each answer is several questions. Here
both ends are this service, with a proxy between them at most; the parser is the one that uvicorn has.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httptools

MAX_LINES: Final = 64
"""To one replica at one time; more questions wait for one of them, within their time."""
IDLE_SECONDS: Final = 60.0
"""For which an idle one is used again: less than the service keeps it, so that it is not closed under a question."""
MAX_ANSWER_BYTES: Final = 64 << 20
"""Of one answer; a hundred thousand ranks with all that is told of each."""


class LineError(Exception):
    """A connection was lost, or brought something else than an answer."""


class Answered(NamedTuple):
    """Status and body."""

    status: int
    body: bytes


class Lines:
    """The connections to one URL. To be used in one event loop; `close` them."""

    def __init__(self, url: str, headers: dict[str, str], tls: ssl.SSLContext) -> None:
        parts = urlsplit(url)
        self._host: Final = parts.hostname or ""
        self._port: Final = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls: Final = tls if parts.scheme == "https" else None
        lines = [f"{name}: {value}\r\n" for name, value in {"host": parts.netloc, **headers}.items()]
        self._headers: Final = "".join(lines).encode("latin-1")
        self._room: Final = asyncio.Semaphore(MAX_LINES)
        self._idle: list[_Line] = []
        self._closed = False

    async def post(self, path: str, body: bytes) -> Answered:
        """The answer to a question. Raises `LineError`, and `OSError` where there is no connection; bound it in time."""
        request = b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (path.encode(), self._headers, len(body), body)
        async with self._room:
            if (line := self._take()) is not None:
                try:
                    return await self._ask(line, request)
                except LineError:
                    if line.heard:
                        raise
                    # It was closed before the question came: nothing has been made of that.
            return await self._ask(await self._connect(), request)

    def _take(self) -> _Line | None:
        oldest = time.monotonic() - IDLE_SECONDS
        while self._idle:
            line = self._idle.pop()
            if line.is_open and line.used_at > oldest:
                return line
            line.abort()
        return None

    async def _connect(self) -> _Line:
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(_Line, self._host, self._port, ssl=self._tls)
        return line

    async def _ask(self, line: _Line, request: bytes) -> Answered:
        try:
            answered = await line.ask(request)
        except BaseException:
            line.abort()  # an answer that still comes is nobody's
            raise
        if self._closed:
            line.abort()
        elif line.is_open:
            self._idle.append(line)
        return answered

    def close(self) -> None:
        """End all that are idle; the others end with their question."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()


class _Line(asyncio.Protocol):
    """One connection, with one question at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self.heard = False
        """Whether anything of the present answer has come."""
        self.used_at = 0.0
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Answered] | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    async def ask(self, request: bytes) -> Answered:
        if not self.is_open:
            raise LineError("the connection was closed")
        self._answer = asyncio.get_running_loop().create_future()
        self.heard = False
        self._transport.write(request)
        return await self._answer

    def abort(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        self.heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"what came is no answer: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was lost: {exc}" if exc else "the connection was closed")

    def _fail(self, why: str) -> None:
        self.abort()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(LineError(why))

    # --- the parser's

    def on_message_begin(self) -> None:
        self._pieces, self._size = [], 0

    def on_body(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > MAX_ANSWER_BYTES:
            self._fail(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        else:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        self.used_at = time.monotonic()
        self.is_open = self.is_open and self._parser.should_keep_alive()
        if self._answer is None or self._answer.done():
            self._fail("an answer that nobody asked for")
            return
        self._answer.set_result(Answered(self._parser.get_status_code(), b"".join(self._pieces)))
        if not self.is_open:
            self.abort()
