"""Engines that describe themselves: vLLM and SGLang, queried over HTTP."""

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
from kvevents.service.discovery.engine_info import INFO_PATHS, EngineInfo, ServedModels, read_models
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

MAX_ANSWER_BYTES: Final = 1 << 20
"""Of a body. SGLang's `/server_info`, the largest that is asked for, has some tens of kB."""
MAX_REDIRECTS: Final = 3
MAX_ASKING: Final = 256
"""Connections at one time, in one event loop: they need file descriptors, and their times should measure the peers and not the
loop. Of 4,096 dead engines each has its turn every 32 s."""
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_HEADERS: Final = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "kvevents"}


@dataclass(frozen=True, slots=True)
class EngineHttpClient:
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
        """The answer, after redirects on the same host. Raises `EngineQueryError` when there is none."""
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
        try:
            async with _turns(), HttpConnections(bounds, tls=self.tls or _default_tls()) as connections:
                return await connections.get(str(url), headers, server_name=self.server_name)
        except HttpError as error:
            raise EngineQueryError(_sentence(url, error, self.max_bytes)) from error


DEFAULT_HTTP_CLIENT: Final = EngineHttpClient()


def _sentence(url: BaseUrl, error: HttpError, max_bytes: int) -> str:
    match error.kind:
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


ASK_SECONDS: Final = 15.0
"""Between two questions to an engine that answers: how long a change of its ports stays unknown."""
_ABSENT: Final = frozenset({404, 405})
_LOCKED: Final = frozenset({401, 403})


@dataclass(frozen=True, slots=True)
class EngineProvider:
    """One engine, by the URL of its HTTP server; all its ranks share the name `instance`.

    Raises `ConfigError` for a URL that is none.
    """

    base_url: str
    template: Template = DEFAULT_TEMPLATE
    instance: str | None = None
    """Its name for routers; host and port of the URL when not given."""
    interval: float = ASK_SECONDS
    http: EngineHttpClient = DEFAULT_HTTP_CLIENT
    clock: Clock = field(default=SYSTEM_CLOCK, compare=False, repr=False)

    def __post_init__(self) -> None:
        BaseUrl.parse(self.base_url)

    @property
    def name(self) -> str:
        """As `engine http://10.0.0.7:8000`."""
        return f"engine {self.base_url}"

    @property
    def label(self) -> str:
        """The instance that its ranks belong to."""
        return self.instance or BaseUrl.parse(self.base_url).address

    async def watch(self) -> AsyncGenerator[Finding, None]:
        """What the engine says; while it says nothing, what it said last and why it does not."""
        backoff = Backoff(self.clock.random)
        told, last = None, Finding()
        while True:
            try:
                found = last = await self._ask()
            except EngineQueryError as error:
                found = replace(last, faults=(DiscoveryFault(self.label, str(error)),))
                pause = backoff.next_delay()
            else:
                backoff.reset()
                pause = jittered(self.interval, self.clock.random)
            if found != told:
                yield found
            told = found
            await self.clock.sleep(pause)

    async def _ask(self) -> Finding:
        url = BaseUrl.parse(self.base_url)
        for question in INFO_PATHS:
            answer = await self._get(url.join(question.path))
            if answer is not None:
                return await self._finding(url, question.read(answer, url.host))
        raise EngineQueryError(
            f"{url} has neither /kv_event_sources (vLLM from 0.31 on) nor /server_info (SGLang): name its endpoint instead"
        )

    async def _get(self, url: BaseUrl) -> Any:
        """Its JSON; None when there is no such path."""
        answer = await self.http.get(url)
        if answer.status in _ABSENT:
            return None
        if answer.status in _LOCKED:
            raise EngineQueryError(
                f"{url} wants a key (status {answer.status}): write what it would tell into a [[sources]] table"
            )
        if answer.status != 200:
            raise EngineQueryError(f"{url} answers with status {answer.status}")
        try:
            return msgspec.json.decode(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineQueryError(f"{url} does not answer in JSON: {error}") from error

    async def _finding(self, url: BaseUrl, found: EngineInfo) -> Finding:
        if found.silence is not None:
            return Finding(faults=(DiscoveryFault(self.label, f"{self.label} {found.silence}"),))
        models = await self._models(url, needed=not (self.template.model or found.model))
        model = self.template.model or found.model or models.base
        if model is None:
            raise EngineQueryError(f"{url.join('/v1/models')} does not tell its model: name it with model")
        self._add_claims(found)
        registrations = []
        for place in found.places:
            try:
                registrations.append(self.template.registration(self.label, model, self._placed(place)))
            except ConfigError as error:
                found.missing[place.rank] = f"cannot be followed: {error}"
        adapters = [Scope(model, self.template.tenant, self.template.group, name) for name in models.adapters]
        return Finding(tuple(registrations), self._faults(found), adapters=tuple(adapters))

    async def _models(self, url: BaseUrl, *, needed: bool) -> ServedModels:
        """The names that it serves; none if it does not list them and they are not needed. Raises `EngineQueryError`."""
        try:
            answer = await self._get(url.join("/v1/models"))
            return ServedModels(None) if answer is None else read_models(answer)
        except EngineQueryError:
            if needed:
                raise
            return ServedModels(None)

    def _placed(self, place: RankEndpoint) -> RankEndpoint:
        if self.template.replay_endpoint is None:
            return place
        index = place.rank - self.template.rank
        return replace(place, replay_endpoint=self.template.replay_of(index, place.endpoint))

    def _add_claims(self, found: EngineInfo) -> None:
        """Ranks that the operator says there are, when they say so."""
        told = found.missing.keys() | {place.rank for place in found.places}
        first, count = self.template.rank, self.template.ranks
        if count > 1:
            found.missing |= {rank: "is not told by it" for rank in range(first, first + count) if rank not in told}

    def _faults(self, found: EngineInfo) -> tuple[DiscoveryFault, ...]:
        return tuple(
            DiscoveryFault(f"{self.label} rank {rank}", f"rank {rank} of {self.label} {reason}")
            for rank, reason in sorted(found.missing.items())
        )
