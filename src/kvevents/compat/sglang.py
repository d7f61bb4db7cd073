"""`sglang.srt.disaggregation.kv_events` of SGLang 0.5.23, on our publisher.

Names, signatures, defaults, struct layouts and what a program can observe are SGLang's. Better than there: `publish` does not
block, replay does not lose batches or delay live ones, `ipc://` endpoints work with ranks, `shutdown` never raises.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any, Final

import msgspec

from kvevents import events, publisher
from kvevents.compat.sglang_config import KVEventsConfig, uses_dynamo_format
from kvevents.compat.sglang_ports import (
    parse_advertisable_tcp,
    parse_bindable_tcp,
    parse_tcp_port,
    resolve_load_pub_range,
)
from kvevents.compat.sglang_scheduler import (
    is_kv_publisher_rank,
    kv_event_namespace_seed,
    namespaced_block_hash,
    select_kv_publisher_dp_rank,
)
from kvevents.endpoints import connectable
from kvevents.publisher.factory import PublisherRegistry

__all__ = [
    "LOAD_TOPIC",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventPublisher",
    "EventPublisherFactory",
    "KVCacheEvent",
    "KVEventBatch",
    "KVEventsConfig",
    "NullEventPublisher",
    "OffloadedState",
    "StorageMedium",
    "ZmqEventPublisher",
    "is_kv_publisher_rank",
    "kv_event_namespace_seed",
    "namespaced_block_hash",
    "parse_advertisable_tcp",
    "parse_bindable_tcp",
    "parse_tcp_port",
    "resolve_load_pub_range",
    "select_kv_publisher_dp_rank",
    "uses_dynamo_format",
]

LOAD_TOPIC: Final = "load"
"""Topic of SGLang's load reports, which have a socket of their own."""


class StorageMedium(str, enum.Enum):  # noqa: UP042 - as there: `str()` of a StrEnum differs
    """Tiers of SGLang's hierarchical cache, by their names on the wire."""

    GPU = "GPU"
    CPU = "CPU_PINNED"
    DISK = "DISK"
    EXTERNAL = "EXTERNAL"


class OffloadedState(msgspec.Struct):
    """How far one request's decoded tokens have been offloaded."""

    inc_len: int = 0
    last_hash: str | None = None


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What one scheduler step announced: `[ts, events, attn_dp_rank]`."""

    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


class KVCacheEvent(events.KVCacheEvent, forbid_unknown_fields=False):
    """Base class of all KV cache events; also one of `kvevents.events`."""


class BlockStored(KVCacheEvent):
    """Blocks became resident. `kvevents.events.BlockStored` explains the fields."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks left a medium."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """The whole prefix cache was reset."""


class KVEventBatch(EventBatch):
    """An `EventBatch` of KV cache events."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class EventPublisher(publisher.EventPublisher):
    """The face of every publisher."""

    def describe_local_source(self, block_size: int) -> dict[str, Any] | None:  # noqa: ARG002 - the engine's signature
        """Where another process on this host can subscribe; None when nowhere."""
        return None


class NullEventPublisher(publisher.NullEventPublisher, EventPublisher):
    """Accepts everything, sends nothing."""


class ZmqEventPublisher(publisher.ZmqEventPublisher, EventPublisher):
    """`kvevents.publisher.ZmqEventPublisher` with SGLang's parameters."""

    def __init__(
        self,
        attn_dp_rank: int,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
        bind: bool | None = None,
    ) -> None:
        super().__init__(attn_dp_rank, endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic, bind=bind)
        # Now, since the working directory may change before anybody asks.
        self._local_pub_endpoint = _absolute(self._bound) if self._binds else None
        self._local_replay_endpoint = None if self._replay_bound is None else _absolute(self._replay_bound)

    def publish(self, events: Any) -> None:
        """As `kvevents.publisher.ZmqEventPublisher.publish`, with the rank under SGLang's name for it."""
        # Spelled out again, since a call more would cost as much as all of this.
        try:
            if events.attn_dp_rank is None:
                events.attn_dp_rank = self._data_parallel_rank
        except AttributeError:
            self._set_attention_rank(events)
        queue = self._queue
        if len(queue) >= self._limit:
            self._publish_slowly(events)
            return
        queue.append(events)

    def describe_local_source(self, block_size: int) -> dict[str, Any] | None:
        """Rank, endpoint, topic, block size, and the replay endpoint if any, as bound and reachable from this host.

        None in connect mode and for `inproc://`, to which no other process can subscribe.
        """
        endpoint = _reachable(self._local_pub_endpoint)
        if endpoint is None:
            return None
        topic = self._topic_bytes.decode()
        source = {"dp_rank": self._data_parallel_rank, "endpoint": endpoint, "topic": topic, "block_size": block_size}
        replay_endpoint = _reachable(self._local_replay_endpoint)
        return source if replay_endpoint is None else {**source, "replay_endpoint": replay_endpoint}

    def _check_ports(self, endpoint: str, replay_endpoint: str | None, snapshot_endpoint: str | None) -> None:
        """Not here: a rank that has a node to itself runs with ports that would collide on one node, as it does in SGLang."""


def _absolute(endpoint: str) -> str:
    """An `ipc://` path made absolute; names in the abstract namespace (`@...`) are no paths."""
    transport, _, path = endpoint.partition("://")
    if transport != "ipc" or path.startswith("@"):
        return endpoint
    return f"ipc://{Path(path).absolute()}"


def _reachable(endpoint: str | None) -> str | None:
    if endpoint is not None and endpoint.startswith("ipc://"):
        return endpoint
    return None if parse_advertisable_tcp(endpoint) is None or endpoint is None else connectable(endpoint)


class EventPublisherFactory(PublisherRegistry):
    """Makes the publisher that a configuration asks for."""

    _registry = {"null": NullEventPublisher, "zmq": ZmqEventPublisher}  # noqa: RUF012 - declared in the base class

    @classmethod
    def create(cls, config: str | None, attn_dp_rank: int = 0) -> publisher.EventPublisher:
        """The publisher for one rank, from the JSON of `--kv-events-config`; without it a `NullEventPublisher`.

        Raises ValueError for a name that is not registered or a configuration that cannot be read.
        """
        if not config:
            return NullEventPublisher()
        settings = KVEventsConfig.from_cli(config).model_dump()
        del settings["format"]
        kind = settings.pop("publisher")
        return cls._constructor(kind)(attn_dp_rank=attn_dp_rank, **settings)
