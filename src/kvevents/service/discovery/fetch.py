"""One HTTP GET, bounded in time and size.

The bytes are exchanged over an asyncio connection and read by the standard library's HTTP parser. Not `http.client` in a
thread: a thread cannot be cancelled, its timeout begins again with every byte that a slow peer sends, and a fleet of dead
engines would hold all threads that the loop has.
"""

from __future__ import annotations

import asyncio
import functools
import http.client
import io
import ssl
from dataclasses import dataclass, replace
from typing import Final, Self, cast
from urllib.parse import SplitResult, urljoin, urlsplit
from weakref import WeakKeyDictionary

from kvevents.errors import ConfigError, PeerError
from kvevents.service.discovery.places import bracketed

MAX_ANSWER_BYTES: Final = 1 << 20
"""Of a body. SGLang's `/server_info`, the largest that is asked for, has some tens of kB."""
MAX_HEAD_BYTES: Final = 1 << 16
"""Of status line, headers and the marks of a chunked body."""
MAX_REDIRECTS: Final = 3
MAX_ASKING: Final = 256
"""Connections at one time, in one event loop: they need file descriptors, and their times should measure the peers and not the
loop. Of 4,096 dead engines each has its turn every 32 s."""
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_PORTS: Final = {"http": 80, "https": 443}


class AskError(PeerError):
    """An engine could not be asked, or its answer cannot be used; the message is a sentence for people."""


@dataclass(frozen=True, slots=True)
class BaseUrl:
    """Where an engine's HTTP server is."""

    scheme: str
    host: str
    """Without brackets."""
    port: int
    path: str = ""
    """In front of every path, without a slash at its end."""
    query: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ConfigError` that says what it must look like."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"base_url is {text!r}: {error}") from error
        if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(f"base_url is {text!r}; write http://HOST:PORT or https://HOST:PORT")
        return cls._of(parts, port)

    @classmethod
    def _of(cls, parts: SplitResult, port: int | None) -> Self:
        path = parts.path.rstrip("/") if not parts.query else parts.path
        if not (path + parts.query).isascii() or " " in path + parts.query or not (parts.hostname or "").isascii():
            raise ConfigError(f"the URL {parts.geturl()!r} has characters that must be escaped")
        return cls(parts.scheme, parts.hostname or "", port or _PORTS.get(parts.scheme, 0), path, parts.query)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.address}{self.path}" + (f"?{self.query}" if self.query else "")

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{bracketed(self.host)}:{self.port}"

    def join(self, path: str) -> Self:
        """The URL of what stands at `path` below it."""
        return replace(self, path=self.path + path)

    def redirected(self, location: str) -> Self:
        """Where an answer points to. Raises `AskError` when that is another host, or no longer encrypted."""
        try:
            parts = urlsplit(urljoin(str(self), location))
            found = self._of(parts, parts.port)
        except ValueError as error:
            raise AskError(f"{self} redirects to {location!r}, which is no URL") from error
        if found.host != self.host or found.scheme not in {self.scheme, "https"}:
            raise AskError(f"{self} redirects to {location!r}, which is another server: name that one as base_url")
        return found


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body."""

    status: int
    body: bytes
    location: str | None = None


@dataclass(frozen=True, slots=True)
class HttpClient:
    """Asks with these bounds."""

    connect_seconds: float = 2.0
    """For name, connection and TLS."""
    read_seconds: float = 5.0
    """For the whole answer."""
    max_bytes: int = MAX_ANSWER_BYTES
    tls: ssl.SSLContext | None = None
    """Of `https` URLs; the system's trusted authorities when not given."""
    server_name: str | None = None
    """Whom the certificate must name; the URL's host when not given."""

    async def get(self, url: BaseUrl) -> Answer:
        """The answer, after redirects on the same host. Raises `AskError` when there is none."""
        for _ in range(1 + MAX_REDIRECTS):
            answer = await self._get(url)
            if answer.status not in _REDIRECTS or not answer.location:
                return answer
            url = url.redirected(answer.location)
        raise AskError(f"{url} redirects more than {MAX_REDIRECTS} times")

    async def _get(self, url: BaseUrl) -> Answer:
        try:
            async with _turns():
                received = await self._exchange(url)
        except TimeoutError as error:
            raise AskError(f"{url} does not answer in time") from error
        except (OSError, UnicodeError) as error:  # the latter for host names that cannot be
            raise AskError(f"{url} cannot be reached: {getattr(error, 'strerror', None) or error}") from error
        return _parsed(url, received, self.max_bytes)

    async def _exchange(self, url: BaseUrl) -> bytes:
        tls = (self.tls or _default_tls()) if url.scheme == "https" else None
        name = (self.server_name or url.host) if tls else None
        async with asyncio.timeout(self.connect_seconds):
            reader, writer = await asyncio.open_connection(url.host, url.port, ssl=tls, server_hostname=name)
        try:
            async with asyncio.timeout(self.read_seconds):
                writer.write(self._request(url))
                return await self._read_to_end(url, reader)
        finally:
            writer.transport.abort()

    def _request(self, url: BaseUrl) -> bytes:
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        host = bracketed(self.server_name or url.host)
        lines = (
            f"GET {target} HTTP/1.1",
            f"Host: {host}:{url.port}",
            "Accept: application/json",
            "Accept-Encoding: identity",
            "User-Agent: kvevents",
            "Connection: close",
        )
        return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii", "replace")

    async def _read_to_end(self, url: BaseUrl, reader: asyncio.StreamReader) -> bytes:
        received = bytearray()
        while data := await reader.read(1 << 16):
            received += data
            if len(received) > self.max_bytes + MAX_HEAD_BYTES:
                raise _too_large(url, self.max_bytes)
        return bytes(received)


DEFAULT_HTTP: Final = HttpClient()


class _Received:
    """As much of a socket as the parser looks at."""

    def __init__(self, received: bytes) -> None:
        self._received = received

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._received)


def _parsed(url: BaseUrl, received: bytes, max_bytes: int) -> Answer:
    # HTTPResponse asks its socket for nothing but a file to read from.
    response = http.client.HTTPResponse(cast("ssl.SSLSocket", _Received(received)), method="GET")
    try:
        response.begin()
        body = response.read()
    except (http.client.HTTPException, ValueError) as error:
        raise AskError(f"{url} does not answer in HTTP, or not to the end ({type(error).__name__})") from error
    finally:
        response.close()
    if len(body) > max_bytes:
        raise _too_large(url, max_bytes)
    return Answer(response.status, body, response.headers.get("Location"))


def _too_large(url: BaseUrl, max_bytes: int) -> AskError:
    return AskError(f"{url} answers with more than {max_bytes} bytes; is it an engine?")


_TURNS: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]] = WeakKeyDictionary()


def _turns() -> asyncio.Semaphore:
    return _TURNS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_ASKING))


@functools.cache
def _default_tls() -> ssl.SSLContext:
    return ssl.create_default_context()
