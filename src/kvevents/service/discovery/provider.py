"""The common interface of discovery providers, and the settings of the engines that they find.

A provider is one way to find engines. To add a provider, write a module with a class that has a name, and a method `watch()`
that yields findings. A finding contains registrations (`Template.registrations` makes the registrations of an engine). A
finding can also contain further providers, such as an `EngineProvider` for each address; `ProviderRunner` runs them, too.

The settings are `[[sources]]` tables, and templates for all engines with the same DNS name.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Final, Protocol, Self
from urllib.parse import SplitResult, urljoin, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from kvevents.endpoints import MAX_PORT, offset_endpoint_port, port_collision, split_tcp, tcp_of
from kvevents.errors import ConfigError, ExternalError
from kvevents.routing.load_readings import check_load_url, is_load_url
from kvevents.service.fleet.registration import EngineFields, Registration, Scope
from kvevents.settings import Range, build_decoder_now, convert


class Finding(Struct, frozen=True):
    """All engines that a provider knows at one time. Registrations that are not in its newest finding are removed."""

    registrations: tuple[Registration, ...] = ()
    faults: tuple[str, ...] = ()
    """Sentences about problems, such as a name that does not resolve, a missing rank or a malformed file."""
    providers: tuple[Provider, ...] = ()
    """Further providers, such as engines to query. Each runs for as long as the newest finding contains an equal provider."""
    adapters: tuple[tuple[Scope, str | None], ...] = ()
    """LoRA adapters that requests can name as their model. Each consists of the engine's scope with the adapter's name as
    `lora`, and the path of the adapter's weights (None if the engine does not list the path)."""
    unready_sources: tuple[tuple[str, str], ...] = ()
    """For each source that should get no requests, its name and the reason."""


class Provider(Protocol):
    """One way to find engines. A provider is hashable, and equals others that find the same engines in the same way."""

    @property
    def name(self) -> str:
        """The name in logs and metrics, such as `file /etc/fleet.toml`."""
        ...

    def watch(self) -> AsyncGenerator[Finding, None]:
        """Yield the first finding, and a new finding after each change, until the generator is closed or its task is cancelled.

        After a failure outside of this process, the generator does not raise: it yields a finding with the fault and the former
        registrations. If the generator ends, its newest finding stays valid.
        """
        ...


WILDCARDS: Final = frozenset({"*", "0.0.0.0", "[::]", "::"})  # noqa: S104 - names to recognise in the answers of engines
"""Hosts that mean "all interfaces of this machine", to which a client cannot connect."""
_WILDCARD_HOST: Final = re.compile(r"((?:tcp|https?|grpc)://)(?:\*|0\.0\.0\.0|\[::\]|::)(?=[:/]|$)")
MAX_RANKS: Final = 1_024
"""Maximum number of data-parallel ranks of one engine. The largest known deployments have a few hundred ranks."""
NO_LOAD: Final = "none"
"""Value of the setting `load` for engines whose load must not be read."""
_TRANSPORTS: Final = ("tcp", "ipc")
_URL_PORTS: Final = {"http": 80, "https": 443}


# --- endpoints of ranks


class RankEndpoint(Struct, frozen=True):
    """The endpoints of one rank, and what the engine reports about the rank's events."""

    rank: int
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    block_size: int | None = None
    load: str | None = None
    replay_is_proven: bool = False
    """Whether the engine itself has named both endpoints."""
    url: str | None = None
    """URL at which the engine takes requests."""


def bracket_host(host: str) -> str:
    """Return a host in the form that precedes `:port`: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def replace_wildcard_host(address: str, host: str) -> str:
    """Return an endpoint or a URL with `host` in place of a wildcard host. An address without a wildcard stays unchanged."""
    wildcard = _WILDCARD_HOST.match(address)
    return address if wildcard is None else f"{wildcard[1]}{bracket_host(host)}{address[wildcard.end() :]}"


def _complete_host(address: str, endpoint: str) -> str:
    """Return an address with the host of a TCP endpoint in place of a wildcard host."""
    target = split_tcp(endpoint)
    return address if target is None else replace_wildcard_host(address, target[0])


def check_endpoint(field: str, endpoint: str, *, bind: bool = False) -> None:
    """Raise `ConfigError`, which names `field`, if no socket can connect to an endpoint (with `bind`: bind to it)."""
    transport, separator, address = tcp_of(endpoint).partition("://")
    if not separator or not address or transport not in _TRANSPORTS:
        raise ConfigError(f"invalid {field} {endpoint!r}: expected tcp://HOST:PORT or ipc://PATH")
    if transport != "tcp":
        return
    target = split_tcp(tcp_of(endpoint))
    if target is None or not 0 < target[1] <= MAX_PORT:
        raise ConfigError(f"invalid {field} {endpoint!r}: it needs a port from 1 to {MAX_PORT}")
    if target[0] in WILDCARDS and not bind:
        hint = "write the engine's host, or set bind = true"
        raise ConfigError(f"invalid {field} {endpoint!r}: a wildcard host cannot be connected to; {hint}")


def check_load(load: str) -> None:
    """Raise `ConfigError` for a setting `load` that is neither an endpoint nor a URL to poll."""
    if is_load_url(load):
        check_load_url(load)
        if urlsplit(load).hostname in WILDCARDS:
            raise ConfigError(f"invalid load {load!r}: a wildcard host cannot be connected to; write the engine's host")
    elif load.partition("://")[0] not in _TRANSPORTS:
        raise ConfigError(f"invalid load {load!r}: expected the URL of an HTTP server, tcp://HOST:PORT or ipc://PATH")
    else:
        check_endpoint("load", load)


# --- URLs of engines


class EngineQueryError(ExternalError):
    """An engine did not answer a query, or its answer cannot be used. The message is a sentence for people."""


class BaseUrl(Struct, frozen=True):
    """The URL of an engine's HTTP server."""

    scheme: str
    host: str
    """An address or a name; an IPv6 address has no brackets."""
    port: int
    path: str = ""
    """Path prefix of all requests, without a slash at its end."""
    query: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the setting `base_url`. Raises `ConfigError`."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"invalid base_url {text!r}: {error}") from error
        if parts.scheme not in _URL_PORTS or not parts.hostname or parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(f"invalid base_url {text!r}: expected http://HOST:PORT or https://HOST:PORT")
        return cls._from_parts(parts._replace(path=parts.path.rstrip("/")), port)

    @classmethod
    def _from_parts(cls, parts: SplitResult, port: int | None) -> Self:
        path = parts.path
        if not (path + parts.query).isascii() or " " in path + parts.query or not (parts.hostname or "").isascii():
            raise ConfigError(f"invalid URL {parts.geturl()!r}: some of its characters must be escaped")
        return cls(parts.scheme, parts.hostname or "", port or _URL_PORTS.get(parts.scheme, 0), path, parts.query)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.address}{self.path}" + (f"?{self.query}" if self.query else "")

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{bracket_host(self.host)}:{self.port}"

    def join(self, path: str) -> Self:
        """Return the URL of `path` below this URL."""
        return replace(self, path=self.path + path)

    def follow_redirect(self, location: str, *, other_hosts: bool = False) -> Self:
        """Return the target of a redirect.

        Raises `EngineQueryError` for a redirect from HTTPS to HTTP. Without `other_hosts`, it also raises if the
        redirect changes the host or the port. A redirect from port 80 to HTTPS at port 443 is allowed.
        """
        try:
            parts = urlsplit(urljoin(str(self), location))
            target = self._from_parts(parts, parts.port)
        except ValueError as error:
            raise EngineQueryError(f"{self} redirects to {location!r}, which is not a valid URL") from error
        is_upgrade = (self.port, target.port) == (_URL_PORTS["http"], _URL_PORTS["https"]) and target.scheme == "https"
        is_same = target.host == self.host and (target.port == self.port or is_upgrade)
        if not (is_same or other_hosts) or target.scheme not in {self.scheme, "https"}:
            raise EngineQueryError(f"{self} redirects to {location!r}, which is another server: set base_url to its URL")
        return target


# --- tables


class Template(EngineFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an engine without its address. The same template applies to all engines behind one DNS name."""

    ranks: Annotated[int, Range(1, MAX_RANKS)] = 1
    """Number of data-parallel ranks, which have consecutive ports. A queried engine must have at least this number of ranks."""
    rank: Annotated[int, Range()] = 0
    """Rank number of the first rank."""
    replay_endpoint: str | None = None
    """Replay endpoint of the first rank. A wildcard host, as in `tcp://*:5558`, means the engine's own host."""
    other_hosts: bool = False
    """Whether a queried engine may name `ipc` endpoints and endpoints at other hosts, and may redirect queries to other
    servers."""

    def __post_init__(self) -> None:
        EngineFields.__post_init__(self)
        if self.load not in {None, NO_LOAD}:
            check_load(self._load_of(0, "tcp://0:1") or "")

    def __hash__(self) -> int:
        # msgspec's hash would use all fields, but `labels` has no hash.
        return hash((self.model, self.tenant, self.group, self.rank, self.url))

    def registrations(self, instance: str, endpoint: str) -> tuple[Registration, ...]:
        """Return the registrations of all ranks of an engine whose first rank publishes at `endpoint`.

        Raises `ConfigError`, which names the field.
        """
        if self.model is None:
            raise ConfigError("model is missing: routers ask for the engines of a model")
        collision = port_collision(endpoint, self.replay_endpoint, self.ranks - 1)
        if collision is not None:
            raise ConfigError(collision)
        owns = [offset_endpoint_port(endpoint, index) or endpoint for index in range(self.ranks)]
        ranks = [RankEndpoint(self.rank + index, own, self.replay_endpoint_of(index, own)) for index, own in enumerate(owns)]
        return tuple(self.registration(instance, self.model, rank) for rank in ranks)

    def registration(self, instance: str, model: str, rank: RankEndpoint) -> Registration:
        """Return the registration of one rank. A setting of this template takes precedence over the value in `rank`."""
        replay = rank.replay_endpoint
        check_endpoint("endpoint", rank.endpoint, bind=self.bind)
        if replay is not None:
            check_endpoint("replay_endpoint", replay)
        load = self._load_of(rank.rank - self.rank, rank.endpoint) or rank.load
        load = None if load == NO_LOAD else load
        if load is not None:
            check_load(load)
        fields: dict[str, Any] = {name: getattr(self, name) for name in EngineFields.__struct_fields__}
        fields |= {
            "model": model,
            "topic": self.topic or rank.topic,
            "block_size": self.block_size or rank.block_size,
            "load": load,
            "url": rank.url if self.url is None else _complete_host(self.url, rank.endpoint),
        }
        return Registration(
            instance=instance,
            endpoint=rank.endpoint,
            rank=rank.rank,
            replay_endpoint=replay,
            replay_is_proven=rank.replay_is_proven,
            **fields,
        )

    def replay_endpoint_of(self, index: int, endpoint: str) -> str | None:
        """Return the replay endpoint of rank `self.rank + index`; `endpoint` is the endpoint of the rank's events."""
        replay = offset_endpoint_port(self.replay_endpoint, index)
        return None if replay is None else _complete_host(replay, endpoint)

    def _load_of(self, index: int, endpoint: str) -> str | None:
        """Return the address of the load of rank `self.rank + index`; `endpoint` is the endpoint of the rank's events."""
        if self.load is None or self.load == NO_LOAD:
            return self.load
        load = self.load if is_load_url(self.load) else offset_endpoint_port(self.load, index) or self.load
        return _complete_host(load, endpoint)


DEFAULT_TEMPLATE: Final = Template()
"""The template for an engine of which only the address is known."""


@build_decoder_now
class SourceTable(Template, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine, named by `endpoint`, or by `base_url`: the URL of its HTTP server, which is queried for the endpoints.

    Raises `ConfigError` for an invalid field, and if both or neither of `endpoint` and `base_url` are set.
    """

    instance: str | None = None
    """Name of the engine for routers; default: the address of the engine."""
    endpoint: str | None = None
    """Endpoint at which the first rank publishes: `tcp://HOST:PORT`."""
    base_url: str | None = None
    """URL of the HTTP server, such as `http://HOST:PORT`: vLLM answers `/kv_event_sources` there, SGLang `/server_info`."""

    def __post_init__(self) -> None:
        Template.__post_init__(self)
        if (self.endpoint is None) == (self.base_url is None):
            raise ConfigError("the table needs either endpoint or base_url" + (", not both" if self.endpoint else ""))
        if self.base_url is not None:
            BaseUrl.parse(self.base_url)
        self.static_registrations()

    def static_registrations(self) -> tuple[Registration, ...]:
        """Return the registrations of all ranks; empty if the engine must be queried for them."""
        if self.endpoint is None:
            return ()
        return self.registrations(self.instance or self.endpoint.removeprefix("tcp://"), self.endpoint)


def parse_table(number: int, fields: Any) -> SourceTable:
    """Convert the `number`th `[[sources]]` table of a file. Raises `ConfigError`, which names the table and the field."""
    name = fields.get("instance") if isinstance(fields, dict) else None
    label = f"[[sources]] {number}" + (f" ({name})" if isinstance(name, str) and name else "")
    return convert(fields, SourceTable, label)
