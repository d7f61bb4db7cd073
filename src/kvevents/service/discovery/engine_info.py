"""What engines say of their own event streams, read from their HTTP answers.

vLLM, from 0.31 on (`vllm/entrypoints/serve/instrumentator/basic.py`, 0.33): `GET /kv_event_sources` answers the publisher's
resolved configuration of each data-parallel rank that this server has started, by rank, and `{}` without events. Behind an
external load balancer the first rank need not be 0::

    {"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://10.0.0.1:41233", "replay_endpoint": null,
           "buffer_steps": 10000, "hwm": 100000, "max_queue_size": 100000, "topic": ""}}

SGLang (`sglang/srt/runtime_context.py`, `describe_kv_events_publisher`, 0.5.23): `GET /server_info` answers all its settings
and, as `kv_events`, one address for all ranks (rank r is r ports further; null without events), which is right for the ranks of
its own node only. Where `kv_event_sources` is there too, it lists those, as seen from their own node. Releases before
`kv_events` still tell the flag that they were started with, `kv_events_config`, and those before `/server_info` call it
`/get_server_info`::

    {"served_model_name": "Qwen/Qwen3-0.6B", "nnodes": 1, "node_rank": 0, ...,
     "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "", "block_size": 64,
                   "dp_size": 2, "replay_endpoint_port_base": 6557}}
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kvevents.config import KVEventsConfig
from kvevents.endpoints import split_tcp
from kvevents.errors import ConfigError
from kvevents.service.discovery.source_config import (
    MAX_RANKS,
    EngineQueryError,
    RankEndpoint,
    bracket_host,
    check_endpoint,
    replace_wildcard_host,
)
from kvevents.structs import build_decoder_now

_SOCKETS: Final = '"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"'
"""What an engine is to be started with: it listens, and losses can be repaired."""
_START_VLLM: Final = f"start vLLM with --kv-events-config '{{\"enable_kv_cache_events\": true, {_SOCKETS}}}'"
_START_SGLANG: Final = f"start SGLang with --kv-events-config '{{{_SOCKETS}}}'"


@dataclass(slots=True)
class EngineInfo:
    """Where the ranks of one engine publish; what is left out of it the engine did not say."""

    places: list[RankEndpoint] = field(default_factory=list)
    missing: dict[int, str] = field(default_factory=dict)
    """Ranks that it has and that cannot be followed, with the reason: `rank 3 REASON`."""
    model: str | None = None
    silence: str | None = None
    """Why it publishes nothing at all."""


@build_decoder_now
class _VllmSource(Struct):
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str | None = None
    publisher: str | None = None


class _Descriptor(Struct):
    endpoint_port_base: int
    endpoint_host: str | None = None
    replay_endpoint_port_base: int | None = None
    topic: str | None = None
    block_size: int | None = None
    dp_size: int | None = None


class _LocalSource(Struct):
    dp_rank: int


@build_decoder_now
class _ServerInfo(Struct):
    kv_events: _Descriptor | UnsetType | None = UNSET
    kv_events_config: str | None = None
    kv_event_sources: list[_LocalSource] | None = None
    page_size: int | None = None
    dp_size: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    served_model_name: str | None = None


def read_kv_event_sources(answer: Any, host: str) -> EngineInfo:
    """What vLLM answers to who reaches it at `host`. Raises `EngineQueryError` for another shape."""
    if not isinstance(answer, dict):
        raise EngineQueryError("/kv_event_sources is no JSON object of ranks, as vLLM's is")
    found = EngineInfo()
    for key, raw in answer.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise EngineQueryError(f"/kv_event_sources has {key!r} where vLLM has the number of a rank")
        _read_vllm_rank(found, int(key), raw, host)
    ranks = found.missing.keys() | {place.rank for place in found.places}
    if not ranks:
        found.silence = f"publishes no KV events: {_START_VLLM}"
        return found
    _check_count(max(ranks) - min(ranks) + 1)
    found.missing |= {rank: "is not in /kv_event_sources" for rank in range(min(ranks), max(ranks)) if rank not in ranks}
    return found


def _read_vllm_rank(found: EngineInfo, rank: int, raw: Any, host: str) -> None:
    try:
        source = msgspec.convert(raw, _VllmSource)
        if source.publisher == "null" or source.endpoint is None:
            raise ConfigError("it has no endpoint")
        replay = source.replay_endpoint
        replay = None if replay is None else replace_wildcard_host(replay, host)
        place = RankEndpoint(rank, replace_wildcard_host(source.endpoint, host), replay, topic=source.topic or "")
    except ValueError as error:  # of msgspec and ours
        found.missing[rank] = f"cannot be followed: {error}"
    else:
        _add(found, place)


def read_server_info(answer: Any, host: str) -> EngineInfo:
    """What SGLang answers to who reaches it at `host`. Raises `EngineQueryError` for another shape."""
    try:
        info = msgspec.convert(answer, _ServerInfo)
        descriptor = _configured(info) if info.kv_events is UNSET else info.kv_events
    except ValueError as error:
        raise EngineQueryError(f"/server_info is not as SGLang's: {error}") from error
    found = EngineInfo(model=info.served_model_name or None)
    if descriptor is None:
        found.silence = f"publishes no KV events: {_START_SGLANG}"
        return found
    count = 1 if descriptor.dp_size is None else descriptor.dp_size
    _check_count(count)
    here = _ranks_here(info, count)
    for rank in range(count):
        if rank in here:
            _read_sglang_rank(found, rank, descriptor, host)
        else:
            found.missing[rank] = "runs on another node, whose address SGLang does not tell: name it in a [[sources]] table"
    return found


def _configured(info: _ServerInfo) -> _Descriptor | None:
    """What `kv_events` would say, from the flag. A release that has neither publishes nothing."""
    if not info.kv_events_config:
        return None
    config = KVEventsConfig.from_cli(info.kv_events_config)
    events, replay = split_tcp(config.endpoint), split_tcp(config.replay_endpoint or "")
    if not config.enable_kv_cache_events or events is None:
        return None
    return _Descriptor(
        endpoint_host=events[0],
        endpoint_port_base=events[1],
        replay_endpoint_port_base=replay[1] if replay else None,
        topic=config.topic,
        block_size=info.page_size,
        dp_size=info.dp_size,
    )


def _ranks_here(info: _ServerInfo, count: int) -> set[int]:
    """Those of the asked node. Ranks are laid over nodes in equal runs (`data_parallel_controller.py`)."""
    nodes = info.nnodes or 1
    if nodes <= 1:
        return set(range(count))
    if info.kv_event_sources is not None:
        return {source.dp_rank for source in info.kv_event_sources}
    return {rank for rank in range(count) if rank * nodes // count == (info.node_rank or 0)}


def _read_sglang_rank(found: EngineInfo, rank: int, descriptor: _Descriptor, host: str) -> None:
    own = bracket_host(descriptor.endpoint_host or "*")
    replay_port = descriptor.replay_endpoint_port_base
    endpoint = replace_wildcard_host(f"tcp://{own}:{descriptor.endpoint_port_base + rank}", host)
    # Replay is bound always, on the host whose HTTP server answers, wherever events are sent to.
    replay = None if replay_port is None else replace_wildcard_host(f"tcp://*:{replay_port + rank}", host)
    _add(found, RankEndpoint(rank, endpoint, replay, topic=descriptor.topic or "", block_size=descriptor.block_size or None))


def _add(found: EngineInfo, place: RankEndpoint) -> None:
    """To the places when it can be connected to, else to the missing."""
    try:
        check_endpoint("endpoint", place.endpoint)
        if place.replay_endpoint is not None:
            check_endpoint("replay_endpoint", place.replay_endpoint)
    except ConfigError as error:
        found.missing[place.rank] = f"cannot be followed: {error}"
    else:
        found.places.append(place)


def _check_count(count: int) -> None:
    if not 0 < count <= MAX_RANKS:
        raise EngineQueryError(f"it claims {count} data-parallel ranks; 1 to {MAX_RANKS} can be followed")


class _Model(Struct):
    id: str
    parent: str | None = None


@build_decoder_now
class _Models(Struct):
    data: list[_Model]


class ServedModels(NamedTuple):
    """The names that an engine serves."""

    base: str | None
    """That of its model; None if it lists none."""
    adapters: tuple[str, ...] = ()
    """Those of the LoRA adapters of it, which requests name as their model."""


def read_models(answer: Any) -> ServedModels:
    """Return the first model of `/v1/models` that has no parent, and its adapters.

    Raises `EngineQueryError` for an answer of another shape.
    """
    try:
        models = msgspec.convert(answer, _Models).data
    except msgspec.ValidationError as error:
        raise EngineQueryError(f"/v1/models is not as OpenAI's: {error}") from error
    base = next((model.id for model in models if model.parent is None and model.id), None)
    return ServedModels(
        base, tuple(model.id for model in models if model.parent is not None and model.parent == base and model.id)
    )


class InfoPath(NamedTuple):
    """A path to ask an engine at, and who reads the answer."""

    path: str
    read: Callable[[Any, str], EngineInfo]


INFO_PATHS: Final = (
    InfoPath("/kv_event_sources", read_kv_event_sources),
    InfoPath("/server_info", read_server_info),
    InfoPath("/get_server_info", read_server_info),
)
"""In the order in which they are asked until one is not answered with 404."""
