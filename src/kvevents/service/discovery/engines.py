"""Discovery of engines by HTTP queries. vLLM and SGLang describe their endpoints.

vLLM, from 0.31 on (`vllm/entrypoints/serve/instrumentator/basic.py`, 0.33): `GET /kv_event_sources` maps each data-parallel
rank that this server has started to the resolved configuration of the rank's publisher. The map is empty if events are off.
Behind an external load balancer the first rank need not be 0::

    {"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://10.0.0.1:41233", "replay_endpoint": null,
           "buffer_steps": 10000, "hwm": 100000, "max_queue_size": 100000, "topic": ""}}

SGLang (`sglang/srt/runtime_context.py`, `describe_kv_events_publisher`, 0.5.23): `GET /server_info` returns all settings of the
server. Its field `kv_events` is one address for all ranks (rank r has this port plus r), or null if events are off. The
address is only correct for the ranks on the server's node. The field `kv_event_sources`, if present, lists those ranks.
Releases without `kv_events` return their start option as `kv_events_config`. The oldest releases have the path
`/get_server_info` instead of `/server_info`::

    {"served_model_name": "Qwen/Qwen3-0.6B", "nnodes": 1, "node_rank": 0, ...,
     "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "", "block_size": 64,
                   "dp_size": 2, "replay_endpoint_port_base": 6557, "load_endpoint_port_base": 5559, "load_topic": "load"}}
"""

# No `from __future__ import annotations`: `kvevents.client.schemas` has the reason.
import asyncio
import functools
import socket
import ssl
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from kvevents.backoff import SYSTEM_CLOCK, Backoff, Clock, apply_jitter
from kvevents.config import KVEventsConfig
from kvevents.endpoints import MAX_PORT, split_tcp
from kvevents.errors import ConfigError
from kvevents.routing.load_readings import METRICS_PATH
from kvevents.service.access import is_loopback
from kvevents.service.discovery.provider import (
    DEFAULT_TEMPLATE,
    MAX_RANKS,
    BaseUrl,
    EngineQueryError,
    Finding,
    RankEndpoint,
    Template,
    bracket_host,
    replace_wildcard_host,
)
from kvevents.service.fleet.registration import Scope
from kvevents.settings import build_decoder_now

if TYPE_CHECKING:
    from kvevents.routing.http_client import Answer

_PUBLISHER_OPTIONS: Final = '"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"'
"""JSON members of an engine's option `--kv-events-config` that enable events and replay."""
_START_VLLM: Final = f"start vLLM with --kv-events-config '{{\"enable_kv_cache_events\": true, {_PUBLISHER_OPTIONS}}}'"
_START_SGLANG: Final = f"start SGLang with --kv-events-config '{{{_PUBLISHER_OPTIONS}}}'"


class EngineInfo(Struct):
    """The ranks of one engine and their endpoints, as the engine describes them."""

    endpoints: list[RankEndpoint] = []
    missing_ranks: dict[int, str] = {}
    """For each rank that cannot be followed, the reason: a sentence without its beginning `rank 3 of ENGINE`."""
    model: str | None = None
    has_metrics: bool = False
    """Whether the server has metrics about its load by default, as vLLM's server does."""
    off_reason: str | None = None
    """Why the engine publishes no events, as a sentence without its subject; None if the engine publishes events."""


@build_decoder_now
class _VllmSource(Struct):
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str | None = None
    publisher: str | None = None


class _EventsDescriptor(Struct):
    endpoint_port_base: int
    endpoint_host: str | None = None
    replay_endpoint_port_base: int | None = None
    topic: str | None = None
    block_size: int | None = None
    dp_size: int | None = None
    load_endpoint_port_base: int | None = None


class _LocalSource(Struct):
    dp_rank: int


@build_decoder_now
class _ServerInfo(Struct):
    kv_events: _EventsDescriptor | UnsetType | None = UNSET
    kv_events_config: str | None = None
    kv_event_sources: list[_LocalSource] | None = None
    page_size: int | None = None
    dp_size: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    served_model_name: str | None = None


def parse_kv_event_sources(answer: Any, host: str) -> EngineInfo:
    """Parse the answer of a vLLM server that was reached at `host`. Raises `EngineQueryError` for an invalid answer."""
    if not isinstance(answer, dict):
        raise EngineQueryError("/kv_event_sources does not return a JSON object of ranks, as vLLM does")
    info = EngineInfo(has_metrics=True)
    for key, raw in answer.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise EngineQueryError(f"/kv_event_sources returns the key {key!r} in place of a rank number")
        rank = int(key)
        try:
            source = msgspec.convert(raw, _VllmSource)
        except msgspec.ValidationError as error:
            info.missing_ranks[rank] = f"cannot be followed: {error}"
            continue
        if source.publisher == "null" or source.endpoint is None:
            info.missing_ranks[rank] = "cannot be followed: it has no endpoint"
            continue
        replay = None if source.replay_endpoint is None else replace_wildcard_host(source.replay_endpoint, host)
        endpoint, is_proven = replace_wildcard_host(source.endpoint, host), replay is not None
        info.endpoints.append(RankEndpoint(rank, endpoint, replay, topic=source.topic or "", replay_is_proven=is_proven))
    ranks = info.missing_ranks.keys() | {each.rank for each in info.endpoints}
    if not ranks:
        info.off_reason = f"publishes no KV events: {_START_VLLM}"
        return info
    _check_rank_count(max(ranks) - min(ranks) + 1)
    info.missing_ranks |= {rank: "is not in /kv_event_sources" for rank in range(min(ranks), max(ranks)) if rank not in ranks}
    return info


def parse_server_info(answer: Any, host: str) -> EngineInfo:
    """Parse the answer of an SGLang server that was reached at `host`. Raises `EngineQueryError` for an invalid answer."""
    try:
        info = msgspec.convert(answer, _ServerInfo)
        descriptor = _descriptor_from_flag(info) if info.kv_events is UNSET else info.kv_events
    except ValueError as error:
        raise EngineQueryError(f"/server_info does not have the shape of SGLang's: {error}") from error
    found = EngineInfo(model=info.served_model_name or None)
    if descriptor is None:
        found.off_reason = f"publishes no KV events: {_START_SGLANG}"
        return found
    count = 1 if descriptor.dp_size is None else descriptor.dp_size
    _check_rank_count(count)
    node_ranks = _ranks_of_node(info, count)
    for rank in range(count):
        if rank in node_ranks:
            found.endpoints.append(_make_sglang_rank(rank, descriptor, host))
        else:
            found.missing_ranks[rank] = "runs on another node, whose address SGLang does not return: name it in [[sources]]"
    return found


def _descriptor_from_flag(info: _ServerInfo) -> _EventsDescriptor | None:
    """Build `kv_events` from the flag `kv_events_config`; None if events are off, or if the release has neither field."""
    if not info.kv_events_config:
        return None
    config = KVEventsConfig.from_cli(info.kv_events_config)
    events, replay = split_tcp(config.endpoint), split_tcp(config.replay_endpoint or "")
    if not config.enable_kv_cache_events or events is None:
        return None
    return _EventsDescriptor(
        endpoint_host=events[0],
        endpoint_port_base=events[1],
        replay_endpoint_port_base=replay[1] if replay else None,
        topic=config.topic,
        block_size=info.page_size,
        dp_size=info.dp_size,
    )


def _ranks_of_node(info: _ServerInfo, count: int) -> set[int]:
    """Return the ranks on the queried node. All nodes have equally many consecutive ranks (`data_parallel_controller.py`)."""
    nodes = info.nnodes or 1
    if nodes <= 1:
        return set(range(count))
    if info.kv_event_sources is not None:
        return {source.dp_rank for source in info.kv_event_sources}
    return {rank for rank in range(count) if rank * nodes // count == (info.node_rank or 0)}


def _make_sglang_rank(rank: int, descriptor: _EventsDescriptor, host: str) -> RankEndpoint:
    own = bracket_host(descriptor.endpoint_host or "*")
    replay_port = descriptor.replay_endpoint_port_base
    endpoint = replace_wildcard_host(f"tcp://{own}:{descriptor.endpoint_port_base + rank}", host)
    # The engine always binds the replay socket on the host of the HTTP server, even if it sends events to another host.
    replay = None if replay_port is None else replace_wildcard_host(f"tcp://*:{replay_port + rank}", host)
    # If the load port cannot be used, only the load is missing, so follow the rank without the load.
    load_port = (descriptor.load_endpoint_port_base or 0) + rank if descriptor.load_endpoint_port_base else 0
    load = replace_wildcard_host(f"tcp://{own}:{load_port}", host) if 0 < load_port <= MAX_PORT else None
    topic, size = descriptor.topic or "", descriptor.block_size or None
    return RankEndpoint(rank, endpoint, replay, topic, size, load, replay_is_proven=replay is not None)


def _check_rank_count(count: int) -> None:
    if not 0 < count <= MAX_RANKS:
        raise EngineQueryError(f"the engine reports {count} data-parallel ranks: expected 1 to {MAX_RANKS}")


class _Model(Struct):
    id: str
    parent: str | None = None
    root: str | None = None


@build_decoder_now
class _Models(Struct):
    data: list[_Model]


INFO_PATHS: Final = (
    ("/kv_event_sources", parse_kv_event_sources),
    ("/server_info", parse_server_info),
    ("/get_server_info", parse_server_info),
)
"""Paths at which engines describe themselves, and the parsers of the answers. The first path that the server has is used."""
RETRY_SECONDS: Final = 2.0
"""Maximum pause in seconds between two queries to an engine that does not answer, and so the delay until it is found."""
RESOLVE_SECONDS: Final = 2.0
"""Maximum number of seconds for resolving a host name."""
MAX_REDIRECTS: Final = 3
_UNREADABLE_ANSWER: Final = "{url} does not answer in HTTP, or not to the end ({error})"
_HTTP_ERRORS: Final = {
    "timeout": "{url} does not answer in time",
    **dict.fromkeys(("not-http", "closed", "too-large"), _UNREADABLE_ANSWER),
}
_UNAUTHORIZED_STATUSES: Final = frozenset({401, 403})
_HEADERS: Final = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "kvevents"}


class EngineHttpClient(Struct, frozen=True):
    """Sends GET requests to engines, each over a new connection, and applies these limits."""

    connect_seconds: float = 2.0
    """Maximum number of seconds for resolving the name, connecting and TLS."""
    read_seconds: float = 5.0
    """Maximum number of seconds for the whole answer."""
    max_bytes: int = 1 << 20
    """Maximum number of bytes in an answer's body. The largest body, from SGLang's `/server_info`, has tens of kilobytes."""
    max_connections: int = 256
    """Maximum number of open connections of all clients in one event loop; the first client in the loop sets this limit. More
    connections would need many file descriptors, and would time out because the loop is busy. With this limit, each of 4,096
    dead engines is queried every 32 s."""
    tls: ssl.SSLContext | None = None
    """TLS settings for `https` URLs; by default the system's authorities are trusted."""
    server_name: str | None = None
    """Name that the certificate must have; by default the URL's host."""

    async def get(self, url: BaseUrl, *, other_hosts: bool = False) -> "Answer":
        """Return the answer. Follow redirects; to a different host or port only if `other_hosts`. Raises `EngineQueryError`."""
        for _ in range(1 + MAX_REDIRECTS):
            answer = await self._get(url)
            if answer.status not in {301, 302, 303, 307, 308} or not answer.location:
                return answer
            url = url.follow_redirect(answer.location, other_hosts=other_hosts)
        raise EngineQueryError(f"{url} redirects more than {MAX_REDIRECTS} times")

    async def _get(self, url: BaseUrl) -> "Answer":
        # Import aiohttp late: aiohttp is a third of a service's imports, and is only needed to query engines.
        from kvevents.routing.http_client import HttpConnections, HttpError, RequestLimits  # noqa: PLC0415

        bounds = RequestLimits(self.read_seconds, self.max_bytes, self.connect_seconds)
        headers = {**_HEADERS, "Host": f"{bracket_host(self.server_name or url.host)}:{url.port}"}
        slots = _CONNECTION_SLOTS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_connections))
        try:
            async with slots, HttpConnections(bounds, tls=self.tls or _default_tls()) as connections:
                return await connections.get(str(url), headers, server_name=self.server_name)
        except HttpError as error:
            sentence = _HTTP_ERRORS.get(error.kind, "{url} cannot be reached: {error}")
            raise EngineQueryError(sentence.format(url=url, error=error)) from error


DEFAULT_HTTP_CLIENT: Final = EngineHttpClient()
_default_tls: Final = functools.cache(ssl.create_default_context)
_CONNECTION_SLOTS: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]] = WeakKeyDictionary()


async def is_same_host(host: str, server: str) -> bool:
    """Whether all addresses of `host` belong to `server`. A loopback `server` has all addresses of this machine."""
    try:
        addresses, server_addresses = await resolve_host(host), await resolve_host(server)
    except (OSError, UnicodeError):
        return False
    is_local = any(is_loopback(address) for address in server_addresses)
    return all(address in server_addresses or (is_local and _is_own_address(address)) for address in addresses)


async def resolve_host(host: str) -> set[str]:
    """Return the addresses of a host. Raises `OSError` or `UnicodeError` if no address is found within `RESOLVE_SECONDS`."""
    async with asyncio.timeout(RESOLVE_SECONDS):
        records = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {str(address[4][0]) for address in records}


def _is_own_address(address: str) -> bool:
    """Whether an address belongs to this machine, so that a socket can be bound to it."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return True
    return False


class Declaration(Struct, frozen=True):
    """What the labels and ports of a pod declare about its engine. The engine's own answers take precedence."""

    model: str | None = None
    names_model: bool = False
    """Whether `model` must be a name under which the engine serves; if false, `model` can be a nickname."""
    events_port: int | None = None
    """Declared port of the first rank's events; None if no port is declared."""
    replay_port: int | None = None
    assumed_events_port: int = 5557
    """Port of the first rank's events if neither the engine nor the pod names a port."""
    assumed_replay_port: int | None = None
    is_relay: bool = False
    """Whether the ports belong to relays in the engine's pod, which are followed instead of the engine."""

    def endpoints(self, host: str, template: Template) -> list[RankEndpoint]:
        """Return the endpoints of all ranks at `host`, for an engine that does not name its endpoints."""
        events, replay = self.events_port or self.assumed_events_port, self.replay_port or self.assumed_replay_port
        ranks = []
        for index in range(template.ranks):
            own_replay = None if replay is None else f"tcp://{host}:{replay + index}"
            ranks.append(RankEndpoint(template.rank + index, f"tcp://{host}:{events + index}", own_replay))
        return ranks

    def contradictions(self, first_rank: RankEndpoint, models: set[str]) -> Iterator[str]:
        """Yield sentences about declared values that differ from those that the engine reports about its first rank."""
        if self.names_model and models and self.model not in models:
            yield f"it is declared to serve {self.model}, but serves {', '.join(sorted(models))}"
        replay, rank = first_rank.replay_endpoint or "no endpoint", first_rank.rank
        for name, port, endpoint in ("events", self.events_port, first_rank.endpoint), ("replay", self.replay_port, replay):
            if port is not None and (split_tcp(endpoint) or ("", 0))[1] != port + rank:
                yield f"its declared {name} port is {port + rank}, but the engine names {endpoint}"


class EngineProvider(Struct, frozen=True):
    """Finds the ranks of one engine by the URL of its HTTP server. All ranks have the same `instance`.

    Raises `ConfigError` for an invalid URL.
    """

    base_url: str
    template: Template = DEFAULT_TEMPLATE
    instance: str | None = None
    """Name of the engine for routers; default: host and port of the URL."""
    interval: float = 15.0
    """Seconds between two queries to an engine that answers. A change of the engine's ports is noticed within this time."""
    http: EngineHttpClient = DEFAULT_HTTP_CLIENT
    clock: Clock = SYSTEM_CLOCK
    declaration: Declaration | None = None
    """The declarations of the pod, for an engine that does not describe itself or requires a key; None without a pod."""

    def __post_init__(self) -> None:
        BaseUrl.parse(self.base_url)

    @property
    def name(self) -> str:
        """The name in logs, such as `engine http://10.0.0.7:8000`."""
        return f"engine {self.base_url}"

    @property
    def label(self) -> str:
        """Name of the engine, which is the field `instance` of all its registrations."""
        return self.instance or BaseUrl.parse(self.base_url).address

    async def watch(self) -> AsyncGenerator[Finding, None]:
        """Yield the ranks that the engine reports. If the engine does not answer, yield the former ranks with a fault."""
        backoff = Backoff(self.clock.random, maximum=RETRY_SECONDS)
        yielded, last = None, Finding()
        while True:
            try:
                finding = last = await self.query()
            except EngineQueryError as error:
                finding = replace(last, faults=(str(error),))
                pause = backoff.next_delay()
            else:
                backoff.reset()
                pause = apply_jitter(self.interval, self.clock.random)
            if finding != yielded:
                yield finding
            yielded = finding
            await self.clock.sleep(pause)

    async def query(self) -> Finding:
        """Query the engine, and return the ranks that it reports. Raises `EngineQueryError`."""
        url = BaseUrl.parse(self.base_url)
        for path, parse in INFO_PATHS:
            answer = await self._get(url.join(path))
            if answer is not None:
                return await self._make_finding(url, parse(answer, url.host))
        if self.declaration is not None:
            ranks = self.declaration.endpoints(bracket_host(url.host), self.template)
            return await self._make_finding(url, EngineInfo(ranks, has_metrics=True))  # As for vLLM before 0.31.
        paths = "neither /kv_event_sources (vLLM from 0.31 on) nor /server_info (SGLang)"
        raise EngineQueryError(f"cannot ask {url} for its endpoints: it has {paths}; name the engine by its endpoint")

    async def _get(self, url: BaseUrl) -> Any:
        """Return the JSON at a URL; None if the path does not exist."""
        answer = await self.http.get(url, other_hosts=self.template.other_hosts)
        if answer.status in {404, 405} or (answer.status in _UNAUTHORIZED_STATUSES and self.declaration is not None):
            return None
        if answer.status in _UNAUTHORIZED_STATUSES:
            hint = "name the engine's endpoints in a [[sources]] table"
            raise EngineQueryError(f"{url} requires a key (status {answer.status}): {hint}")
        if answer.status != 200:
            raise EngineQueryError(f"{url} answers with status {answer.status}")
        try:
            return msgspec.json.decode(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineQueryError(f"{url} does not answer in JSON: {error}") from error

    async def _make_finding(self, url: BaseUrl, info: EngineInfo) -> Finding:
        if info.off_reason is not None:
            return Finding(faults=(f"{self.label} {info.off_reason}",))
        declared = self.declaration or Declaration()
        if declared.is_relay:
            # Replace the engine's endpoints by those of its relays, so that only the relays connect to the engine.
            known = {each.rank: each for each in info.endpoints}
            relays = declared.endpoints(bracket_host(url.host), self.template)
            pairs = [(relay, known.get(relay.rank, relay)) for relay in relays]
            info.endpoints = [replace(relay, topic=own.topic, block_size=own.block_size, load=own.load) for relay, own in pairs]
            info.missing_ranks = {}
        models = await self._query_models(url, is_needed=not (self.template.model or info.model or declared.model))
        base = next((model.id for model in models if model.parent is None and model.id), None)
        model = self.template.model or info.model or base or declared.model
        if model is None:
            hint = "set the annotation kvevents/model of its pod" if self.declaration else "set model in the source's table"
            raise EngineQueryError(f"{url.join('/v1/models')} lists no model: {hint}")
        faults = []
        if info.endpoints:
            wrong = declared.contradictions(info.endpoints[0], {model, *(served.id for served in models)})
            faults += [f"{self.label}: {sentence}; what the engine reports takes effect" for sentence in wrong]
        self._add_configured_ranks(info)
        if not self.template.other_hosts:
            await self._drop_foreign_endpoints(url, info)
        registrations = []
        metrics = str(url.join(METRICS_PATH)) if info.has_metrics else None
        for each in info.endpoints:
            replay = self.template.replay_endpoint_of(each.rank - self.template.rank, each.endpoint) or each.replay_endpoint
            found = replace(each, replay_endpoint=replay, load=each.load or metrics, url=str(url))
            try:
                registrations.append(self.template.registration(self.label, model, found))
            except ConfigError as error:
                info.missing_ranks[found.rank] = f"cannot be followed: {error}"
        scope = Scope(model, self.template.tenant, self.template.group)
        loras = (served for served in models if base is not None and served.parent == base and served.id)
        adapters = tuple((scope._replace(lora=lora.id), lora.root) for lora in loras)
        faults += [f"rank {rank} of {self.label} {reason}" for rank, reason in sorted(info.missing_ranks.items())]
        return Finding(tuple(registrations), tuple(faults), adapters=adapters)

    async def _drop_foreign_endpoints(self, url: BaseUrl, info: EngineInfo) -> None:
        """Mark a rank as missing if one of its endpoints is not at the queried host."""
        hosts: dict[str, bool] = {url.host: True}
        for rank in list(info.endpoints):
            named = [rank.endpoint]
            named += [rank.replay_endpoint] if rank.replay_endpoint and self.template.replay_endpoint is None else []
            named += [rank.load] if rank.load and self.template.load is None else []
            for endpoint in named:
                host = (split_tcp(endpoint) or ("",))[0].strip("[]")
                if host not in hosts:
                    hosts[host] = bool(host) and await is_same_host(host, url.host)
                if not hosts[host]:
                    info.endpoints.remove(rank)
                    hint = "to allow this, set other_hosts = true in the engine's table"
                    info.missing_ranks[rank.rank] = f"cannot be followed: {endpoint} is not at the host {url.host}; {hint}"
                    break

    async def _query_models(self, url: BaseUrl, *, is_needed: bool) -> list[_Model]:
        """Return the models of `/v1/models`. If that fails, raise `EngineQueryError` if `is_needed`, else return no model."""
        try:
            answer = await self._get(url.join("/v1/models"))
            return [] if answer is None else msgspec.convert(answer, _Models).data
        except (EngineQueryError, msgspec.ValidationError) as error:
            if not is_needed:
                return []
            if isinstance(error, EngineQueryError):
                raise
            raise EngineQueryError(f"/v1/models does not have the shape of OpenAI's: {error}") from error

    def _add_configured_ranks(self, info: EngineInfo) -> None:
        """Mark ranks of the template as missing if the engine does not report them."""
        reported = info.missing_ranks.keys() | {found.rank for found in info.endpoints}
        first, count = self.template.rank, self.template.ranks
        unreported = set(range(first, first + count)) - reported if count > 1 else ()
        info.missing_ranks |= dict.fromkeys(unreported, "is configured, but the engine does not report it")
