"""Asking another replica over HTTP, within a bound of time and size."""

from __future__ import annotations

import logging
import ssl
import time
from typing import Any, Final, TypeVar

import msgspec

from kvevents.errors import ConfigError, MissingDependencyError, PeerError
from kvevents.service.access import token_of_file
from kvevents.service.config import ShardSettings

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_ANSWER_BYTES: Final = 64 << 20
"""Of one answer; a hundred thousand ranks with all that is told of each."""
MAX_CONNECTIONS: Final = 64
"""To one replica; more questions wait for one of them, within their time."""
IDLE_SECONDS: Final = 60.0
"""For which a connection is kept: less than the service keeps it, so that it is not closed under a question."""
AWAY_SECONDS: Final = 2.0
"""After a failure, for which a replica is asked only where nobody else can be."""
MSGPACK: Final = "application/msgpack"


class AwayError(PeerError):
    """Another replica did not answer, or what it answered cannot be used."""


class Peers:
    """The other replicas, by name. To be used in one event loop; `close` it."""

    def __init__(self, settings: ShardSettings) -> None:
        """Raises `ConfigError`, and `MissingDependencyError` without the extra `plane`."""
        self.failures = 0
        """Questions without an answer that could be used."""
        self._settings: Final = settings
        self._headers: Final = {"content-type": MSGPACK, "accept": MSGPACK} | _authorization(settings)
        self._tls: Final = _tls(settings)
        self._failed: dict[str, float] = {}
        self._session: Any = None

    def is_away(self, name: str) -> bool:
        """Whether it has failed just now."""
        return time.monotonic() - self._failed.get(name, float("-inf")) < AWAY_SECONDS

    async def ask(self, name: str, url: str, path: str, question: msgspec.Struct, kind: type[T]) -> T:
        """What replica `name` answers at `url`. Raises `AwayError`."""
        import aiohttp  # noqa: PLC0415 - an extra

        try:
            status, body = await self._post(url + path, msgspec.msgpack.encode(question))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._away(name, str(error) or f"no answer within {self._settings.ask_seconds:g} s") from error
        if status != 200:
            raise self._away(name, f"it answers {status}: {body[:200].decode(errors='replace')}")
        try:
            found = msgspec.msgpack.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise self._away(name, f"its answer cannot be read: {error}") from error
        if self._failed.pop(name, None) is not None:
            log.info("replica %s answers again", name)
        return found

    async def _post(self, url: str, body: bytes) -> tuple[int, bytes]:
        import aiohttp  # noqa: PLC0415 - an extra

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=MAX_CONNECTIONS, keepalive_timeout=IDLE_SECONDS)
            timeout = aiohttp.ClientTimeout(total=self._settings.ask_seconds)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        async with self._session.post(url, data=body, ssl=self._tls, allow_redirects=False) as response:
            if (response.content_length or 0) > MAX_ANSWER_BYTES:
                raise aiohttp.ClientPayloadError(f"an answer of {response.content_length} bytes")
            return response.status, await response.read()

    def _away(self, name: str, why: str) -> AwayError:
        error = AwayError(f"replica {name}: {why}")
        if name not in self._failed:
            log.warning("%s; another one that holds the same is asked in its place, as far as there is one", error)
        self.failures += 1
        self._failed[name] = time.monotonic()
        return error

    async def close(self) -> None:
        """End all connections."""
        if self._session is not None:
            await self._session.close()


def _authorization(settings: ShardSettings) -> dict[str, str]:
    if settings.token_file is None:
        return {}
    return {"authorization": f"Bearer {token_of_file(settings.token_file, 'shard')}"}


def _tls(settings: ShardSettings) -> ssl.SSLContext | bool:
    try:
        import aiohttp  # noqa: F401, PLC0415 - only whether it is there
    except ImportError as error:
        raise MissingDependencyError("a replica that holds a part needs aiohttp: pip install 'kvevents[plane]'") from error
    if settings.tls_ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=settings.tls_ca)
    except (OSError, ValueError) as error:  # ssl's errors are both
        raise ConfigError(f"shard.tls_ca: {settings.tls_ca} cannot be used: {error}; it is a PEM file") from error
