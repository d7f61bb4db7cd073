"""The HTTP client for requests to engines, which `AsyncClient` also uses for requests to a service.

The client adds to aiohttp a time limit for a whole response, a size limit, and one error type with a kind: `HttpError`.
The client does not follow redirects. The client does not request compression, and so does not decompress responses.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from kvevents.closeable import AsyncCloseable
from kvevents.errors import ExternalError, MissingDependencyError, reason_of

try:
    import aiohttp
    from yarl import URL
except ImportError as error:
    raise MissingDependencyError(f"HTTP requests need aiohttp ({error})", "service") from error

HttpErrorKind: TypeAlias = Literal[
    "untrusted", "no-tls", "unknown-host", "timeout", "refused", "closed", "not-http", "too-large", "unreachable"
]
"""`closed`: the connection ended before a response began. `not-http`: the response is malformed or incomplete."""
MAX_LINE_BYTES: Final = 8_190
"""Maximum size in bytes of the status line and of each header. Aiohttp accepts at most 128 headers."""


class HttpError(ExternalError):
    """A request without a usable response. The error's text says what failed, without the URL."""

    def __init__(self, kind: HttpErrorKind, detail: str) -> None:
        super().__init__(detail)
        self.kind: Final[HttpErrorKind] = kind


class Answer(NamedTuple):
    """A response: its status, its body, and for a redirect its location."""

    status: int
    body: bytes
    location: str | None = None


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of each request."""

    seconds: float
    """Maximum number of seconds for the whole request."""
    max_bytes: int
    """Maximum size of the response's body in bytes."""
    connect_seconds: float | None = None
    """Maximum number of seconds for name resolution, connection and TLS, after which `seconds` begin; None if `seconds`
    includes them."""


class HttpConnections(AsyncCloseable):
    """A pool of connections for one event loop. Each request has the same limits. As a context manager the pool closes itself.

    An idle connection is reused for `idle_seconds`. `tls` is for `https` URLs; by default the system's certificate authorities
    are trusted.
    """

    def __init__(self, bounds: RequestLimits, *, tls: ssl.SSLContext | None = None, idle_seconds: float = 0.0) -> None:
        """Create the pool in a running event loop."""
        self._bounds = bounds
        self._reuses_connections = idle_seconds > 0
        self._traces = [] if bounds.connect_seconds is None else [_trace_connected()]
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                ssl=True if tls is None else tls,
                resolver=aiohttp.ThreadedResolver(),  # aiohttp would prefer aiodns to the operating system's resolver
                use_dns_cache=False,
                # Without reuse, connections stay open until `close` aborts them: an orderly TLS close takes another round trip.
                keepalive_timeout=idle_seconds or None,
            ),
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            trace_configs=self._traces,
        )

    async def close(self) -> None:
        """Close all connections and abort open requests."""
        await self._session.close()

    async def get(self, url: str, headers: Mapping[str, str], *, server_name: str | None = None) -> Answer:
        """Send GET and return the response. A certificate must be for `server_name` or the URL's host. Raises `HttpError`."""
        return await self.send("GET", url, headers, server_name=server_name)

    async def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        seconds: float | None = None,
        is_repeatable: bool = True,
        server_name: str | None = None,
    ) -> Answer:
        """Send a request and return the response; `seconds` replaces the pool's limit. Raises `HttpError`.

        If a reused connection closes before a response begins, the request is sent once more if it is repeatable.
        """
        bounds, loop = self._bounds, asyncio.get_running_loop()
        limit = bounds.connect_seconds or bounds.seconds if seconds is None else seconds
        options: dict[str, Any] = {"headers": headers, "data": body, "server_hostname": server_name}
        try:
            async with asyncio.timeout(limit) as deadline:
                if self._traces:
                    options["trace_request_ctx"] = lambda: deadline.reschedule(loop.time() + bounds.seconds)
                target = URL(url, encoded=True)
                try:
                    return await self._exchange(method, target, options)
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                    may_retry = is_repeatable and self._reuses_connections and not self._session.closed
                    if isinstance(error, aiohttp.ClientConnectorError) or not may_retry:
                        raise
                    return await self._exchange(method, target, options)
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            cause: BaseException = error
            if isinstance(error, aiohttp.ClientConnectorCertificateError):
                cause = error.certificate_error
            elif isinstance(error, aiohttp.ClientConnectorError):
                cause = error.os_error
            kind: HttpErrorKind = next(kind for error_type, kind in _ERROR_KINDS if isinstance(cause, error_type))
            detail = cause.message if isinstance(cause, aiohttp.ClientResponseError) else reason_of(cause)
            raise HttpError(kind, " ".join(detail.split())) from error

    async def _exchange(self, method: str, url: URL, options: dict[str, Any]) -> Answer:
        async with self._session.request(method, url, allow_redirects=False, **options) as response:
            bytes_left, pieces = self._bounds.max_bytes, []
            async for piece in response.content.iter_any():
                bytes_left -= len(piece)
                if bytes_left < 0:
                    raise HttpError("too-large", f"the response has more than {self._bounds.max_bytes} bytes")
                pieces.append(piece)
            return Answer(response.status, b"".join(pieces), response.headers.get("Location"))


def _trace_connected() -> aiohttp.TraceConfig:
    async def report_connection(_session: aiohttp.ClientSession, context: SimpleNamespace, _: object) -> None:
        callback: Callable[[], None] = context.trace_request_ctx
        callback()

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(report_connection)
    trace.on_connection_reuseconn.append(report_connection)
    return trace


# The first match counts: some types are subclasses of types further below.
_ERROR_KINDS: Final[tuple[tuple[type[BaseException], HttpErrorKind], ...]] = (
    (TimeoutError, "timeout"),
    (ssl.SSLCertVerificationError, "untrusted"),
    (ssl.SSLError, "no-tls"),
    (socket.gaierror, "unknown-host"),
    (UnicodeError, "unknown-host"),
    (aiohttp.InvalidURL, "unknown-host"),
    (ConnectionRefusedError, "refused"),
    (aiohttp.ServerDisconnectedError, "closed"),
    (ConnectionError, "closed"),
    (aiohttp.ClientOSError, "closed"),
    (aiohttp.ClientPayloadError, "not-http"),
    (aiohttp.ClientResponseError, "not-http"),
    (BaseException, "unreachable"),
)
