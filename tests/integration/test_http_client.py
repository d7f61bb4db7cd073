"""`kvevents.routing.http_client` against servers with scripted responses."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kvevents.routing.http_client import Answer, HttpConnections, HttpError, RequestLimits

DEADLINE = 60.0
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
OK = Answer(200, b"ok")
BOUNDS = RequestLimits(DEADLINE, 1_000)

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(serve: Serve) -> AsyncGenerator[str, None]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client closes after it has read enough
        finally:
            writer.close()

    async with asyncio.timeout(DEADLINE), await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


async def get_error_kind(url: str, bounds: RequestLimits = BOUNDS) -> str:
    async with HttpConnections(bounds) as connections:
        with pytest.raises(HttpError) as caught:
            await connections.get(url, {})
    return caught.value.kind


async def test_a_closed_idle_connection_is_replaced_once() -> None:
    """The client sends the request again over a new connection; if that closes too, it raises an error."""
    remaining = [2, 1]  # answers of each connection

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(remaining.pop(0) if remaining else 0):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
        await reader.readuntil(b"\r\n\r\n")

    async with serving(serve) as url, HttpConnections(BOUNDS, idle_seconds=60.0) as connections:
        assert [await connections.send("POST", url, {}, b"") for _ in range(3)] == [OK] * 3
        assert remaining == []
        with pytest.raises(HttpError) as caught:
            await connections.send("POST", url, {}, b"")
        assert caught.value.kind == "closed"


@pytest.mark.parametrize(
    "bounds", [RequestLimits(0.2, 1_000), RequestLimits(0.2, 1_000, DEADLINE)], ids=["all", "after connecting"]
)
@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["head", "body"])
async def test_slow_bytes_do_not_extend_the_time_limit(bounds: RequestLimits, begin: bytes) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begin or b"HTTP/1.1 200 ")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with serving(serve) as url:
        started_at = asyncio.get_running_loop().time()
        assert await get_error_kind(url, bounds) == "timeout"
        assert asyncio.get_running_loop().time() - started_at < DEADLINE / 2


@pytest.mark.parametrize(
    ("head", "repeated", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n", "not-http"),
        (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 100, "not-http"),
        (b"HTTP/1.1 200 ", b"y" * 100, "not-http"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"y" * 100, "too-large"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"2\r\nyy\r\n", "too-large"),
    ],
    ids=["headers", "header", "status", "body", "chunks"],
)
async def test_an_endless_response_is_rejected(head: bytes, repeated: bytes, expected: str) -> None:
    """The client stops reading before the response exceeds the limit in memory."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(repeated * 100)
            await writer.drain()

    async with serving(serve) as url:
        assert await get_error_kind(url) == expected


async def test_a_connection_that_is_reset_is_closed() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        option = struct.pack("ii", 1, 0)  # close discards unsent bytes and resets the connection
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)

    async with serving(serve) as url:
        assert await get_error_kind(url) == "closed"


async def test_redirects_are_returned_and_not_followed() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 302 Found\r\nlocation: /there\r\ncontent-length: 0\r\n\r\n")

    async with serving(serve) as url, HttpConnections(BOUNDS) as connections:
        assert await connections.get(url, {}) == Answer(302, b"", "/there")
