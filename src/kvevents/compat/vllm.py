"""A replacement of `vllm.distributed.kv_events` and `vllm.config.kv_events` that uses the publisher of kvevents.

The names, signatures, defaults, fields and observable behaviour are those of vLLM 0.33. Programs for older releases work too:
fields that later releases added are optional. Events are sent as arrays, the form of the releases up to 0.23, which almost all
subscribers read; `dialect="vllm-0.33"` of the publisher sends the bytes of that release.

Improvements: `publish` does not block, replay neither loses batches nor delays live ones, `ipc://` endpoints work with ranks,
and `shutdown` never raises.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, get_type_hints

from kvevents import events, publisher
from kvevents.compat.field_parsers import parse_fields
from kvevents.config import parse_object
from kvevents.errors import ConfigError
from kvevents.events import MEDIUM_CPU, MEDIUM_GPU, MEDIUM_STORAGE, EventBatch, KVConnectorKVEvents, KVEventAggregator
from kvevents.publisher.factory import PublisherRegistry
from kvevents.wire.dialects import Dialect

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventPublisher",
    "EventPublisherFactory",
    "ExternalBlockHash",
    "KVCacheEvent",
    "KVConnectorKVEvents",
    "KVEventAggregator",
    "KVEventBatch",
    "KVEventsConfig",
    "NullEventPublisher",
    "ZmqEventPublisher",
]

ExternalBlockHash: TypeAlias = bytes | int
"""vLLM's type of the same name, from `vllm.v1.core.kv_cache_utils`."""

if TYPE_CHECKING:
    _Locality: TypeAlias = str | None
else:
    _Locality = str | dict[str, Any] | None


class KVCacheEvent(events.KVCacheEvent, array_like=True, forbid_unknown_fields=False):
    """Base class of all KV cache events; a subclass of the one in `kvevents.events`."""


class BlockStored(KVCacheEvent):
    """Blocks became resident. `kvevents.events.BlockStored` explains the fields."""

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks were removed from a medium."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: _Locality = None
    ownership: str | None = None

    def __post_init__(self) -> None:
        """Drop the heartbeat of kvevents that an array event has in place of `locality`, which vLLM sends in maps only."""
        if not isinstance(self.locality, str):
            self.locality = None


class AllBlocksCleared(KVCacheEvent):
    """The whole prefix cache was reset."""


class KVEventBatch(EventBatch):
    """An `EventBatch` of KV cache events."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


@dataclass
class KVEventsConfig:
    """A replacement of `vllm.config.kv_events.KVEventsConfig`: a dataclass that checks its fields.

    `publisher` is a name registered with `EventPublisherFactory`; vLLM itself accepts `null` and `zmq` only.

    Raises `ConfigError`, a ValueError, which names the invalid fields.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """None is replaced by `zmq` if events are enabled, and by `null` if they are not."""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in parse_fields(type(self).__name__, _CONFIG_FIELDS, values).items():
            setattr(self, name, value)
        if self.publisher is None:
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"
        EventPublisherFactory.check_name(self.publisher)

    @classmethod
    def from_cli(cls, cli_value: str) -> Self:
        """Parse the JSON of `--kv-events-config`. Raises `ConfigError` unless it is an object with known keys."""
        data = parse_object(cli_value, cls.__name__)
        unknown = sorted(data.keys() - _CONFIG_FIELDS.keys())
        if unknown:
            raise ConfigError(f"invalid {cls.__name__}: unexpected key {unknown[0]!r}; known keys: {', '.join(_CONFIG_FIELDS)}")
        return cls(**data)


_CONFIG_FIELDS: Final = get_type_hints(KVEventsConfig)


class EventPublisher(publisher.EventPublisher):
    """Base class of all publishers."""


class NullEventPublisher(publisher.NullEventPublisher, EventPublisher):
    """Accepts every batch and sends nothing."""


class ZmqEventPublisher(publisher.ZmqEventPublisher, EventPublisher):
    """A `kvevents.publisher.ZmqEventPublisher` with the parameters of vLLM's publisher, and `dialect`.

    As in vLLM, `tcp://*:0` binds a port that the OS chooses, at this node's address (`get_ip`) only.

    Raises `ConfigError`, a ValueError, if the endpoint is `tcp://*:0` and this node's address is unknown.
    """

    _may_collide = True

    def __init__(
        self,
        data_parallel_rank: int,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
        *,
        dialect: Dialect | str | None = None,
    ) -> None:
        replay = None if replay_endpoint is None else resolve_node_endpoint(replay_endpoint)
        events = resolve_node_endpoint(endpoint)
        super().__init__(data_parallel_rank, events, replay, buffer_steps, hwm, max_queue_size, topic, dialect=dialect)

    def get_publisher_config(self) -> KVEventsConfig:
        """Return the settings, with port 0 replaced by the port that the OS chose at this node's address."""
        config = super().get_publisher_config()
        return KVEventsConfig(**{field.name: getattr(config, field.name) for field in fields(KVEventsConfig)})


def resolve_node_endpoint(endpoint: str) -> str:
    """Return the endpoint that vLLM from 0.31 binds: for `tcp://*:0`, port 0 at this node's address."""
    if endpoint != "tcp://*:0":
        return endpoint
    address = get_ip()
    if address in _WILDCARD_HOSTS:
        raise ConfigError(
            f"cannot bind {endpoint} at this node's address, which is unknown: "
            "set VLLM_HOST_IP to the address, or put an address or a port into the endpoint"
        )
    return f"tcp://[{address}]:0" if ":" in address else f"tcp://{address}:0"


_WILDCARD_HOSTS: Final = ("0.0.0.0", "::")  # noqa: S104 - hosts to recognise, not to bind
_PROBE_ADDRESSES: Final = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses for which the OS selects a route. RFC 5737 and RFC 3849 reserve these addresses for documentation."""


def get_ip() -> str:
    """Return `VLLM_HOST_IP`, or the local address of this host's default route, or `0.0.0.0` if there is no route.

    The rules are those of `vllm.utils.network_utils.get_ip`.
    """
    configured_ip = os.environ.get("VLLM_HOST_IP")
    if configured_ip:
        return configured_ip
    for family, address in _PROBE_ADDRESSES:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # on a datagram socket this selects a route and sends nothing
            local_ip: str = probe.getsockname()[0]
            return local_ip
    return _WILDCARD_HOSTS[0]


class EventPublisherFactory(PublisherRegistry):
    """Creates the publisher that a configuration names."""

    _registry = {"null": NullEventPublisher, "zmq": ZmqEventPublisher}  # noqa: RUF012 - a ClassVar of the base class

    @classmethod
    def create(cls, config: KVEventsConfig | None, data_parallel_rank: int = 0, **options: Any) -> publisher.EventPublisher:
        """Return the publisher for one rank. Raises ValueError for a name that is not registered.

        `options`, such as `dialect`, are passed to the publisher's constructor.
        """
        if config is None or not config.enable_kv_cache_events or config.publisher == "null":
            return NullEventPublisher()
        try:
            settings = asdict(config)
        except TypeError as error:
            expected = "a KVEventsConfig of vLLM; kvevents.publisher.EventPublisherFactory accepts a kvevents.KVEventsConfig"
            raise ConfigError(f"invalid config {config!r}: expected {expected}") from error
        del settings["enable_kv_cache_events"]
        create = cls._constructor(settings.pop("publisher"))
        return create(data_parallel_rank=data_parallel_rank, **settings, **options)
