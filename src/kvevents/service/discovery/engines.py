"""Discovery of engines that describe themselves: vLLM and SGLang, queried over HTTP."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec

from kvevents.backoff import SYSTEM_CLOCK, Backoff, Clock, jittered
from kvevents.errors import ConfigError
from kvevents.service.discovery.engine_info import INFO_PATHS, EngineInfo, ServedModels, parse_models
from kvevents.service.discovery.provider import DiscoveryFault, Finding
from kvevents.service.discovery.source_config import (
    DEFAULT_TEMPLATE,
    BaseUrl,
    EngineQueryError,
    RankEndpoint,
    Template,
    bracket_host,
)
from kvevents.service.http_client import Answer, HttpConnections, HttpError, RequestLimits
from kvevents.service.registration import Scope

QUERY_SECONDS: Final = 15.0
"""Pause between two queries to an engine that answers. A change of its ports stays unknown for this long."""
MAX_REDIRECTS: Final = 3
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_NOT_FOUND: Final = frozenset({404, 405})
_UNAUTHORIZED: Final = frozenset({401, 403})
_HEADERS: Final = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "kvevents"}


@dataclass(frozen=True, slots=True)
class EngineHttpClient:
    """Sends GET requests to engines, each over a connection of its own, within these bounds."""

    connect_seconds: float = 2.0
    """Longest time for the name, the connection and TLS."""
    read_seconds: float = 5.0
    """Longest time for the whole answer."""
    max_bytes: int = 1 << 20
    """Largest body of an answer. The largest that is requested, SGLang's `/server_info`, has some tens of kB."""
    max_connections: int = 256
    """Most connections at one time of all clients in one event loop; the first client in the loop sets it. More connections
    would need many file descriptors and measure the loop instead of the engines. Of 4,096 dead engines each is queried every
    32 s."""
    tls: ssl.SSLContext | None = None
    """TLS settings for `https` URLs; by default the system's authorities are trusted."""
    server_name: str | None = None
    """Name that the certificate must have; by default the URL's host."""

    async def get(self, url: BaseUrl) -> Answer:
        """Return the answer after redirects on the same host. Raises `EngineQueryError` if there is none."""
        for _ in range(1 + MAX_REDIRECTS):
            answer = await self._get(url)
            if answer.status not in _REDIRECTS or not answer.location:
                return answer
            url = url.redirected(answer.location)
        raise EngineQueryError(f"{url} redirects more than {MAX_REDIRECTS} times")

    async def _get(self, url: BaseUrl) -> Answer:
        bounds = RequestLimits(self.read_seconds, self.max_bytes, self.connect_seconds)
        host = bracket_host(self.server_name or url.host)
        headers = {**_HEADERS, "Host": f"{host}:{url.port}"}
        slots = _SLOTS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_connections))
        try:
            async with slots, HttpConnections(bounds, tls=self.tls or _default_tls()) as connections:
                return await connections.get(str(url), headers, server_name=self.server_name)
        except HttpError as error:
            raise EngineQueryError(_describe(url, error, self.max_bytes)) from error


DEFAULT_HTTP_CLIENT: Final = EngineHttpClient()
_SLOTS: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]] = WeakKeyDictionary()


def _describe(url: BaseUrl, error: HttpError, max_bytes: int) -> str:
    match error.kind:
        case "timeout":
            return f"{url} does not answer in time"
        case "too-large":
            return f"{url} answers with more than {max_bytes} bytes; is it an engine?"
        case "not-http" | "closed":
            return f"{url} does not answer in HTTP, or not to the end ({error})"
        case _:
            return f"{url} cannot be reached: {error}"


@functools.cache
def _default_tls() -> ssl.SSLContext:
    return ssl.create_default_context()


@dataclass(frozen=True, slots=True)
class EngineProvider:
    """Finds the ranks of one engine by the URL of its HTTP server. All ranks have the same `instance`.

    Raises `ConfigError` for an invalid URL.
    """

    base_url: str
    template: Template = DEFAULT_TEMPLATE
    instance: str | None = None
    """Name of the engine for routers; by default host and port of the URL."""
    interval: float = QUERY_SECONDS
    http: EngineHttpClient = DEFAULT_HTTP_CLIENT
    clock: Clock = field(default=SYSTEM_CLOCK, compare=False, repr=False)

    def __post_init__(self) -> None:
        BaseUrl.parse(self.base_url)

    @property
    def name(self) -> str:
        """The name in logs, such as `engine http://10.0.0.7:8000`."""
        return f"engine {self.base_url}"

    @property
    def label(self) -> str:
        """The instance of the ranks."""
        return self.instance or BaseUrl.parse(self.base_url).address

    async def watch(self) -> AsyncGenerator[Finding, None]:
        """Yield what the engine reports. While it does not answer, yield its last report and a fault."""
        backoff = Backoff(self.clock.random)
        yielded, last = None, Finding()
        while True:
            try:
                found = last = await self._query()
            except EngineQueryError as error:
                found = replace(last, faults=(DiscoveryFault(self.label, str(error)),))
                pause = backoff.next_delay()
            else:
                backoff.reset()
                pause = jittered(self.interval, self.clock.random)
            if found != yielded:
                yield found
            yielded = found
            await self.clock.sleep(pause)

    async def _query(self) -> Finding:
        url = BaseUrl.parse(self.base_url)
        for info_path in INFO_PATHS:
            answer = await self._get(url.join(info_path.path))
            if answer is not None:
                return await self._finding(url, info_path.parse(answer, url.host))
        raise EngineQueryError(
            f"{url} has neither /kv_event_sources (vLLM from 0.31 on) nor /server_info (SGLang): name its endpoint instead"
        )

    async def _get(self, url: BaseUrl) -> Any:
        """Return the JSON at a URL; None if the path does not exist."""
        answer = await self.http.get(url)
        if answer.status in _NOT_FOUND:
            return None
        if answer.status in _UNAUTHORIZED:
            raise EngineQueryError(
                f"{url} requires a key (status {answer.status}): name the engine's endpoints in a [[sources]] table"
            )
        if answer.status != 200:
            raise EngineQueryError(f"{url} answers with status {answer.status}")
        try:
            return msgspec.json.decode(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineQueryError(f"{url} does not answer in JSON: {error}") from error

    async def _finding(self, url: BaseUrl, info: EngineInfo) -> Finding:
        if info.off_reason is not None:
            return Finding(faults=(DiscoveryFault(self.label, f"{self.label} {info.off_reason}"),))
        models = await self._models(url, is_needed=not (self.template.model or info.model))
        model = self.template.model or info.model or models.base
        if model is None:
            raise EngineQueryError(f"{url.join('/v1/models')} lists no model: set model in the source's table")
        self._add_configured_ranks(info)
        registrations = []
        for found in info.endpoints:
            try:
                registrations.append(self.template.registration(self.label, model, self._with_replay_endpoint(found)))
            except ConfigError as error:
                info.missing[found.rank] = f"cannot be followed: {error}"
        adapters = [Scope(model, self.template.tenant, self.template.group, name) for name in models.adapters]
        faults = tuple(
            DiscoveryFault(f"{self.label} rank {rank}", f"rank {rank} of {self.label} {reason}")
            for rank, reason in sorted(info.missing.items())
        )
        return Finding(tuple(registrations), faults, adapters=tuple(adapters))

    async def _models(self, url: BaseUrl, *, is_needed: bool) -> ServedModels:
        """Return the models that the engine lists. Raises `EngineQueryError` only if the list is needed."""
        try:
            answer = await self._get(url.join("/v1/models"))
            return ServedModels(None) if answer is None else parse_models(answer)
        except EngineQueryError:
            if is_needed:
                raise
            return ServedModels(None)

    def _with_replay_endpoint(self, found: RankEndpoint) -> RankEndpoint:
        if self.template.replay_endpoint is None:
            return found
        index = found.rank - self.template.rank
        return replace(found, replay_endpoint=self.template.replay_endpoint_of(index, found.endpoint))

    def _add_configured_ranks(self, info: EngineInfo) -> None:
        """Add the ranks of the template that the engine does not report to the missing ones."""
        reported = info.missing.keys() | {found.rank for found in info.endpoints}
        first, count = self.template.rank, self.template.ranks
        if count > 1:
            info.missing |= {
                rank: "is configured, but the engine does not report it"
                for rank in range(first, first + count)
                if rank not in reported
            }
