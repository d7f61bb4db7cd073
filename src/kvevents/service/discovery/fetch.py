"""One HTTP GET to an engine, after redirects on its host, over a connection of its own."""

from __future__ import annotations

import asyncio
import functools
import ssl
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from kvevents.service.discovery.places import bracketed
from kvevents.service.discovery.urls import AskError, BaseUrl
from kvevents.service.http_client import Answer, Bounds, HttpConnections, HttpError

MAX_ANSWER_BYTES: Final = 1 << 20
"""Of a body. SGLang's `/server_info`, the largest that is asked for, has some tens of kB."""
MAX_REDIRECTS: Final = 3
MAX_ASKING: Final = 256
"""Connections at one time, in one event loop: they need file descriptors, and their times should measure the peers and not the
loop. Of 4,096 dead engines each has its turn every 32 s."""
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_HEADERS: Final = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "kvevents"}


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
        bounds = Bounds(self.read_seconds, self.max_bytes, self.connect_seconds)
        host = bracketed(self.server_name or url.host)
        headers = {**_HEADERS, "Host": f"{host}:{url.port}"}
        try:
            async with _turns(), HttpConnections(bounds, tls=self.tls or _default_tls()) as connections:
                return await connections.get(str(url), headers, server_name=self.server_name)
        except HttpError as error:
            raise AskError(_sentence(url, error, self.max_bytes)) from error


DEFAULT_HTTP: Final = HttpClient()


def _sentence(url: BaseUrl, error: HttpError, max_bytes: int) -> str:
    match error.trouble:
        case "timeout":
            return f"{url} does not answer in time"
        case "too-large":
            return f"{url} answers with more than {max_bytes} bytes; is it an engine?"
        case "not-http" | "closed":
            return f"{url} does not answer in HTTP, or not to the end ({error})"
        case _:
            return f"{url} cannot be reached: {error}"


_TURNS: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]] = WeakKeyDictionary()


def _turns() -> asyncio.Semaphore:
    return _TURNS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_ASKING))


@functools.cache
def _default_tls() -> ssl.SSLContext:
    return ssl.create_default_context()
