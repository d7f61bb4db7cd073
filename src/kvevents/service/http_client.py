"""HTTP requests to others: to engines, to other replicas, and from the commands to a service.

aiohttp makes them. What it does not have stands here: one bound of time for a whole answer, however many bytes come in between,
one of its size, and one kind of error, `HttpError`, with a word for programs. Redirects are not followed; what comes compressed
is not unpacked, since nobody asks for that.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias

from kvevents.errors import ExternalError, MissingDependencyError

try:
    import aiohttp
    from yarl import URL
except ImportError as error:
    raise MissingDependencyError(
        f"HTTP requests need aiohttp, and there is {error}: pip install 'kvevents[service]'"
    ) from error

HttpErrorKind: TypeAlias = Literal[
    "untrusted", "no-tls", "unknown-host", "timeout", "refused", "closed", "not-http", "too-large", "unreachable"
]
"""`closed` is a connection that ended before an answer began, `not-http` one that brought something else, or not all of it."""
MAX_LINE_BYTES: Final = 8_190
"""Of the status line and of each header; of headers there are 128 at most."""


class HttpError(ExternalError):
    """There is no answer that could be used; the text says what happened, and not to whom."""

    def __init__(self, trouble: HttpErrorKind, detail: str) -> None:
        super().__init__(detail)
        self.kind: Final[HttpErrorKind] = trouble


class Answer(NamedTuple):
    """Status, body, and where a redirect points to."""

    status: int
    body: bytes
    location: str | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of each request."""

    seconds: float
    """For everything, waiting for a connection included."""
    max_bytes: int
    """Of the body."""
    connect_seconds: float | None = None
    """For name, connection and TLS; `seconds` then begin when these are done."""


class HttpConnections:
    """Connections with these bounds. A context manager of one event loop, or `close` them.

    `kept` is for how many seconds an idle connection is used again, and `most` how many there are to one host at one time; more
    requests wait for one of them. `tls` is used for `https` URLs; by default the system's authorities are trusted.
    """

    def __init__(self, bounds: Bounds, *, tls: ssl.SSLContext | None = None, kept: float = 0.0, most: int = 0) -> None:
        """To be made in an event loop."""
        self._bounds = bounds
        self._is_kept = kept > 0
        self._traces = [] if bounds.connect_seconds is None else [_trace_connected()]
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                limit_per_host=most,
                ssl=True if tls is None else tls,
                resolver=aiohttp.ThreadedResolver(),  # as the system has it, whatever else is installed
                use_dns_cache=False,
                # Those of one request are kept too, until `close` aborts them: ending TLS in order takes another round trip.
                keepalive_timeout=kept or None,
            ),
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            trace_configs=self._traces,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all connections, and with them what is still asked."""
        await self._session.close()

    async def get(self, url: str, headers: Mapping[str, str], *, server_name: str | None = None) -> Answer:
        """The answer to GET. `server_name` is whom the certificate must name, if not the URL's host. Raises `HttpError`."""
        return await self._ask("GET", url, headers, None, server_name)

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """The answer to POST. Raises `HttpError`.

        Where a connection is closed before anything of the answer has come, as one that was idle may be, it is asked once more:
        only what may be asked twice is to be posted over connections that are kept.
        """
        return await self._ask("POST", url, headers, body, None)

    async def _ask(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, server_name: str | None
    ) -> Answer:
        bounds, loop = self._bounds, asyncio.get_running_loop()
        async with _mapped(), asyncio.timeout(bounds.connect_seconds or bounds.seconds) as deadline:
            options: dict[str, Any] = {"headers": headers, "data": body, "server_hostname": server_name}
            if self._traces:
                options["trace_request_ctx"] = lambda: deadline.reschedule(loop.time() + bounds.seconds)
            target = URL(url, encoded=True)
            try:
                return await self._exchange(method, target, options)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if isinstance(error, aiohttp.ClientConnectorError) or not self._may_repeat:
                    raise
                return await self._exchange(method, target, options)

    @property
    def _may_repeat(self) -> bool:
        return self._is_kept and not self._session.closed

    async def _exchange(self, method: str, url: URL, options: dict[str, Any]) -> Answer:
        async with self._session.request(method, url, allow_redirects=False, **options) as response:
            left, pieces = self._bounds.max_bytes, []
            async for piece in response.content.iter_any():
                left -= len(piece)
                if left < 0:
                    raise HttpError("too-large", f"an answer of more than {self._bounds.max_bytes} bytes")
                pieces.append(piece)
            return Answer(response.status, b"".join(pieces), response.headers.get("Location"))


def _trace_connected() -> aiohttp.TraceConfig:
    async def connected(_session: aiohttp.ClientSession, context: SimpleNamespace, _: object) -> None:
        done: Callable[[], None] = context.trace_request_ctx
        done()

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(connected)
    trace.on_connection_reuseconn.append(connected)
    return trace


# The first that fits; the order matters, for some are kinds of others.
_TROUBLES: Final[tuple[tuple[type[BaseException], HttpErrorKind], ...]] = (
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
)


@asynccontextmanager
async def _mapped() -> AsyncGenerator[None, None]:
    """Errors of aiohttp and of the system become `HttpError`."""
    try:
        yield
    except (aiohttp.ClientError, OSError, UnicodeError) as error:
        cause = _cause(error)
        raise HttpError(_trouble(cause), _detail(cause)) from error


def _trouble(cause: BaseException) -> HttpErrorKind:
    for kind, trouble in _TROUBLES:
        if isinstance(cause, kind):
            return trouble
    return "unreachable"


def _cause(error: Exception) -> BaseException:
    """The system's own error, where aiohttp has wrapped it."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return error.certificate_error
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error
    return error


def _detail(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientResponseError):
        return " ".join(error.message.split())
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
