"""What an operator writes about an engine: a `[[sources]]` table, a template for the engines of one name, and addresses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Self
from urllib.parse import SplitResult, urljoin, urlsplit

from kvevents.endpoints import MAX_PORT, offset_endpoint_port, port_collision, split_tcp
from kvevents.errors import ConfigError, ExternalError
from kvevents.security import Curve
from kvevents.service.registration import DEFAULT_GROUP, Registration
from kvevents.settings import Range, Settings, convert
from kvevents.structs import build_decoder_now

WILDCARDS: Final = frozenset({"*", "0.0.0.0", "[::]", "::"})  # noqa: S104 - names to recognise in what engines say
"""Hosts that say "every interface of mine": nothing connects to them."""
_TRANSPORTS: Final = ("tcp", "ipc")


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """Where one rank publishes, and what is known of it there."""

    rank: int
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    block_size: int | None = None


def bracket_host(host: str) -> str:
    """A host as it stands in front of `:port`: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def replace_wildcard_host(endpoint: str, host: str) -> str:
    """The endpoint as seen from elsewhere: a wildcard host becomes `host`; any other endpoint stays."""
    found = split_tcp(endpoint)
    if found is None or found[0] not in WILDCARDS:
        return endpoint
    return f"tcp://{bracket_host(host)}:{found[1]}"


def check_endpoint(field: str, endpoint: str, *, bind: bool = False) -> None:
    """Raises `ConfigError`, which names the field, for what cannot be connected to, or with `bind` be listened at."""
    transport, separator, address = endpoint.partition("://")
    if not separator or not address or transport not in _TRANSPORTS:
        raise ConfigError(f"{field} is {endpoint!r}; write tcp://HOST:PORT or ipc://PATH")
    if transport != "tcp":
        return
    found = split_tcp(endpoint)
    if found is None or not 0 < found[1] <= MAX_PORT:
        raise ConfigError(f"{field} is {endpoint!r}; it needs a port from 1 to {MAX_PORT}")
    if found[0] in WILDCARDS and not bind:
        raise ConfigError(f"{field} is {endpoint!r}, which names no host to connect to; write the engine's, or bind = true")


_PORTS: Final = {"http": 80, "https": 443}


class EngineQueryError(ExternalError):
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
        return f"{bracket_host(self.host)}:{self.port}"

    def join(self, path: str) -> Self:
        """The URL of what stands at `path` below it."""
        return replace(self, path=self.path + path)

    def redirected(self, location: str) -> Self:
        """Where an answer points to. Raises `EngineQueryError` when that is another host, or no longer encrypted."""
        try:
            parts = urlsplit(urljoin(str(self), location))
            found = self._of(parts, parts.port)
        except ValueError as error:
            raise EngineQueryError(f"{self} redirects to {location!r}, which is no URL") from error
        if found.host != self.host or found.scheme not in {self.scheme, "https"}:
            raise EngineQueryError(f"{self} redirects to {location!r}, which is another server: name that one as base_url")
        return found


MAX_RANKS: Final = 1_024
"""Data-parallel ranks of one engine, whoever claims them; the largest known deployments have a few hundred."""


class Template(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is said of an engine beside where it is; all addresses of one DNS name share one."""

    model: str | None = None
    """Needed where the engine is not asked for it."""
    ranks: Annotated[int, Range(1, MAX_RANKS)] = 1
    """Data-parallel ranks: ports count up from the first one's. An engine that is asked must have at least these."""
    rank: Annotated[int, Range()] = 0
    """Of the first one."""
    replay_endpoint: str | None = None
    """A wildcard host, as in `tcp://*:5558`, stands for the engine's own."""
    block_size: int | None = None
    tenant: str = DEFAULT_GROUP
    group: str = DEFAULT_GROUP
    topic: str = ""
    bind: bool = False
    curve: Curve | None = None
    lora_name: str | None = None
    salt: str | None = None

    def registrations(self, instance: str, endpoint: str) -> tuple[Registration, ...]:
        """All ranks of an engine whose first one publishes at `endpoint`. Raises `ConfigError` that names the field."""
        if self.model is None:
            raise ConfigError("model is missing; routers ask for a model's engines")
        collision = port_collision(endpoint, self.replay_endpoint, self.ranks - 1)
        if collision is not None:
            raise ConfigError(collision)
        return tuple(self.registration(instance, self.model, place) for place in self._places(endpoint))

    def registration(self, instance: str, model: str, place: RankEndpoint) -> Registration:
        """One rank, at a place that somebody told; what this template says goes before what the place says."""
        replay = place.replay_endpoint
        check_endpoint("endpoint", place.endpoint, bind=self.bind)
        if replay is not None:
            check_endpoint("replay_endpoint", replay)
        return Registration(
            instance=instance,
            endpoint=place.endpoint,
            model=model,
            rank=place.rank,
            replay_endpoint=replay,
            topic=self.topic or place.topic,
            block_size=place.block_size if self.block_size is None else self.block_size,
            tenant=self.tenant,
            group=self.group,
            lora_name=self.lora_name,
            salt=self.salt,
            bind=self.bind,
            curve=self.curve,
        )

    def replay_of(self, index: int, endpoint: str) -> str | None:
        """Where the rank that comes `index` after the first answers replay requests, given where it publishes."""
        replay = offset_endpoint_port(self.replay_endpoint, index)
        found = split_tcp(endpoint)
        return replay if replay is None or found is None else replace_wildcard_host(replay, found[0])

    def _places(self, endpoint: str) -> Iterator[RankEndpoint]:
        for index in range(self.ranks):
            its = offset_endpoint_port(endpoint, index) or endpoint
            yield RankEndpoint(self.rank + index, its, self.replay_of(index, its))


DEFAULT_TEMPLATE: Final = Template()
"""Nothing is said beside where it is."""


@build_decoder_now
class SourceTable(Template, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: its endpoint, or the URL of its HTTP server, where it tells its endpoints itself.

    Raises `ConfigError` when it has both or neither, or a field cannot be used.
    """

    instance: str | None = None
    """Its name for routers; its address when not given."""
    endpoint: str | None = None
    """Where its first rank publishes: `tcp://HOST:PORT`."""
    base_url: str | None = None
    """Such as `http://HOST:PORT`: vLLM has `/kv_event_sources` there, SGLang `/server_info`."""

    def __post_init__(self) -> None:
        Template.__post_init__(self)
        if (self.endpoint is None) == (self.base_url is None):
            raise ConfigError("it needs either endpoint or base_url" + (", not both" if self.endpoint else ""))
        if self.base_url is not None:
            BaseUrl.parse(self.base_url)
        self.listed()

    def listed(self) -> tuple[Registration, ...]:
        """Its ranks as far as the table names them: those of an engine that is to be asked are not among them."""
        if self.endpoint is None:
            return ()
        return self.registrations(self.instance or self.endpoint.removeprefix("tcp://"), self.endpoint)


def parse_table(number: int, fields: Any) -> SourceTable:
    """A parsed table, the `number`th of its kind. Raises `ConfigError` that names the table and the field."""
    name = fields.get("instance") if isinstance(fields, dict) else None
    label = f"[[sources]] {number}" + (f" ({name})" if isinstance(name, str) and name else "")
    return convert(fields, SourceTable, label)
