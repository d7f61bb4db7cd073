"""Requests to other replicas, within a bound of time and size.

Theory of operation. Replicas announce their URLs in a bucket of the plane, and every user with permission to write there can
announce any URL. Prompts and the token of this replica are sent to announced URLs. So the host of an announced URL must match
the patterns of `shard.allow`. If this replica is reached by `https`, the others must be too: then TLS proves that the host is
the named one.
"""

from __future__ import annotations

import logging
import ssl
import time
from http import HTTPStatus
from typing import Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvevents.errors import ConfigError, ExternalError
from kvevents.http_client import HttpConnections, HttpError, RequestLimits
from kvevents.service.access import HostPatterns, address_of, is_loopback, token_of_file
from kvevents.service.config import ShardSettings

_LOOPBACK: Final = ("127.0.0.0/8", "::1", "localhost")


class PeerPolicy:
    """Decides which URLs of other replicas are used."""

    def __init__(self, settings: ShardSettings) -> None:
        own = urlsplit(settings.url)
        self.patterns: Final = tuple(settings.allow) or _default_patterns(own.hostname or "")
        self._hosts: Final = HostPatterns(self.patterns, "shard.allow")
        self._is_secure: Final = own.scheme == "https"

    def refusal(self, url: str) -> str:
        """Return why a URL must not be used; empty if it is allowed."""
        parts = urlsplit(url)
        if self._is_secure and parts.scheme != "https":
            return f"{url} is not encrypted, and this replica is reached by https"
        if (parts.hostname or "") not in self._hosts:
            return f"{url} is not among shard.allow ({', '.join(self.patterns)})"
        return ""


def _default_patterns(host: str) -> tuple[str, ...]:
    """Return the default patterns for the hosts of the other replicas."""
    if is_loopback(host):
        return _LOOPBACK
    domain = host.partition(".")[2]
    if address_of(host) is None and "." in domain:
        return (f"*.{domain}",)
    return (host,)


log = logging.getLogger(__name__)
T = TypeVar("T")

MSGPACK: Final = "application/msgpack"
MAX_CONNECTIONS: Final = 64
"""Most connections to one replica. Further requests wait for one of them, within their time limit."""
IDLE_SECONDS: Final = 60.0
"""Time after which an idle connection is not used again. It is shorter than the server's, which rarely closes it first then."""
MAX_ANSWER_BYTES: Final = 64 << 20
"""Largest answer: a hundred thousand ranks with their descriptions."""
MAX_SHOWN: Final = 200
"""Bytes of an error answer that a log message shows."""


class PeerUnavailableError(ExternalError):
    """Another replica did not answer, or its answer cannot be used."""


class Peers:
    """Sends requests to the other replicas. Use it in one event loop, and `close` it."""

    def __init__(self, settings: ShardSettings) -> None:
        """Raises `ConfigError` for a token or authorities that cannot be read."""
        self.failures = 0
        """Number of requests without a usable answer."""
        self.settings: Final = settings
        self._headers: Final = {
            "content-type": MSGPACK,
            "accept": MSGPACK,
            "accept-encoding": "identity",
            **_authorization(settings),
        }
        self._tls: Final = _tls(settings)
        self._failed: dict[str, float] = {}
        self._bounds: Final = RequestLimits(settings.ask_seconds, MAX_ANSWER_BYTES)
        self._connections: HttpConnections | None = None

    def has_failed(self, name: str) -> bool:
        """Return whether a replica failed within the last `shard.pace.avoid_seconds`."""
        return time.monotonic() - self._failed.get(name, float("-inf")) < self.settings.pace.avoid_seconds

    async def ask(self, name: str, url: str, path: str, question: msgspec.Struct, kind: type[T]) -> T:
        """Return the answer of replica `name` at `url`. Raises `PeerUnavailableError`."""
        if self._connections is None:
            self._connections = HttpConnections(
                self._bounds, tls=self._tls, idle_seconds=IDLE_SECONDS, max_connections=MAX_CONNECTIONS
            )
        try:
            status, body, _ = await self._connections.post(url + path, self._headers, msgspec.msgpack.encode(question))
        except HttpError as error:
            late = error.kind == "timeout"
            raise self._record_failure(
                name, f"no answer within {self.settings.ask_seconds:g} s" if late else str(error)
            ) from error
        if status != HTTPStatus.OK:
            raise self._record_failure(name, f"it answers {status}: {body[:MAX_SHOWN].decode(errors='replace')}")
        try:
            found = msgspec.msgpack.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise self._record_failure(name, f"its answer cannot be read: {error}") from error
        if self._failed.pop(name, None) is not None:
            log.info("replica %s answers again", name)
        return found

    def _record_failure(self, name: str, why: str) -> PeerUnavailableError:
        error = PeerUnavailableError(f"replica {name}: {why}")
        if name not in self._failed:
            log.warning("%s; other replicas with the same partitions are queried instead, if there are any", error)
        self.failures += 1
        self._failed[name] = time.monotonic()
        return error

    async def close(self) -> None:
        """Close all connections."""
        if self._connections is not None:
            await self._connections.close()
            self._connections = None


def _authorization(settings: ShardSettings) -> dict[str, str]:
    if settings.token_file is None:
        return {}
    return {"authorization": f"Bearer {token_of_file(settings.token_file, 'shard')}"}


def _tls(settings: ShardSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca)
    except (OSError, ValueError) as error:  # ssl's errors are both
        raise ConfigError(f"shard.tls_ca: {settings.tls_ca} cannot be used: {error}; expected a PEM file") from error
    if settings.tls_certificate is not None:
        try:
            context.load_cert_chain(settings.tls_certificate, settings.tls_key)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"shard.tls_certificate: {settings.tls_certificate} and {settings.tls_key} cannot be used: {error}; expected "
                "PEM files, the key without password"
            ) from error
    return context
