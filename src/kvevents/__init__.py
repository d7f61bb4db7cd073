"""KV cache events of LLM inference engines: publish, subscribe and replay them without silent loss."""

from typing import TYPE_CHECKING

from kvevents.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from kvevents.config import KVEventsConfig
    from kvevents.errors import KVEventsError
    from kvevents.events import (
        MEDIUM_CPU,
        MEDIUM_CPU_PINNED,
        MEDIUM_DISK,
        MEDIUM_EXTERNAL,
        MEDIUM_GPU,
        MEDIUM_STORAGE,
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        EventBatch,
        Heartbeat,
        KVCacheEvent,
        KVConnectorKVEvents,
        KVEventAggregator,
        KVEventBatch,
    )
    from kvevents.publisher import (
        EventPublisher,
        EventPublisherFactory,
        NullEventPublisher,
        PublisherStats,
        ShutdownReport,
        ZmqEventPublisher,
    )
    from kvevents.stream import (
        Batch,
        BatchReport,
        Checkpoint,
        DegradedReason,
        Delivery,
        Gap,
        RawBatch,
        RawDelivery,
        Reset,
        Source,
        StreamLimits,
        Trust,
    )
    from kvevents.subscriber import AsyncSubscriber, SocketOptions, StreamStatus, Subscriber, TrustChange
    from kvevents.wire import Decoded, Dialect, decode_batch, dialect_for, encode_batch
    from kvevents.zeromq.keys import Curve

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_CPU_PINNED",
    "MEDIUM_DISK",
    "MEDIUM_EXTERNAL",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "AllBlocksCleared",
    "AsyncSubscriber",
    "Batch",
    "BatchReport",
    "BlockRemoved",
    "BlockStored",
    "Checkpoint",
    "Curve",
    "Decoded",
    "DegradedReason",
    "Delivery",
    "Dialect",
    "EventBatch",
    "EventPublisher",
    "EventPublisherFactory",
    "Gap",
    "Heartbeat",
    "KVCacheEvent",
    "KVConnectorKVEvents",
    "KVEventAggregator",
    "KVEventBatch",
    "KVEventsConfig",
    "KVEventsError",
    "NullEventPublisher",
    "PublisherStats",
    "RawBatch",
    "RawDelivery",
    "Reset",
    "ShutdownReport",
    "SocketOptions",
    "Source",
    "StreamLimits",
    "StreamStatus",
    "Subscriber",
    "Trust",
    "TrustChange",
    "ZmqEventPublisher",
    "decode_batch",
    "dialect_for",
    "encode_batch",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "kvevents.config": "KVEventsConfig",
        "kvevents.errors": "KVEventsError",
        "kvevents.events": (
            "MEDIUM_CPU MEDIUM_CPU_PINNED MEDIUM_DISK MEDIUM_EXTERNAL MEDIUM_GPU MEDIUM_STORAGE AllBlocksCleared BlockRemoved "
            "BlockStored EventBatch Heartbeat KVCacheEvent KVConnectorKVEvents KVEventAggregator KVEventBatch"
        ),
        "kvevents.publisher": (
            "EventPublisher EventPublisherFactory NullEventPublisher PublisherStats ShutdownReport ZmqEventPublisher"
        ),
        "kvevents.stream": (
            "Batch BatchReport Checkpoint DegradedReason Delivery Gap RawBatch RawDelivery Reset Source StreamLimits Trust"
        ),
        "kvevents.subscriber": "AsyncSubscriber SocketOptions StreamStatus Subscriber TrustChange",
        "kvevents.wire": "Decoded Dialect decode_batch dialect_for encode_batch",
        "kvevents.zeromq.keys": "Curve",
    },
)
