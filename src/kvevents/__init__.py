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
        KVCacheEvent,
        KVConnectorKVEvents,
        KVEventAggregator,
        KVEventBatch,
    )
    from kvevents.publisher import EventPublisher, EventPublisherFactory, NullEventPublisher, ZmqEventPublisher
    from kvevents.stream import Batch, Checkpoint, Delivery, Gap, RawBatch, RawDelivery, Reset, Source, StreamLimits, Trust
    from kvevents.subscriber import AsyncSubscriber, StreamStatus, Subscriber
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
    "BlockRemoved",
    "BlockStored",
    "Checkpoint",
    "Curve",
    "Decoded",
    "Delivery",
    "Dialect",
    "EventBatch",
    "EventPublisher",
    "EventPublisherFactory",
    "Gap",
    "KVCacheEvent",
    "KVConnectorKVEvents",
    "KVEventAggregator",
    "KVEventBatch",
    "KVEventsConfig",
    "KVEventsError",
    "NullEventPublisher",
    "RawBatch",
    "RawDelivery",
    "Reset",
    "Source",
    "StreamLimits",
    "StreamStatus",
    "Subscriber",
    "Trust",
    "ZmqEventPublisher",
    "decode_batch",
    "dialect_for",
    "encode_batch",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "kvevents.config": ("KVEventsConfig",),
        "kvevents.errors": ("KVEventsError",),
        "kvevents.events": (
            "MEDIUM_CPU",
            "MEDIUM_CPU_PINNED",
            "MEDIUM_DISK",
            "MEDIUM_EXTERNAL",
            "MEDIUM_GPU",
            "MEDIUM_STORAGE",
            "AllBlocksCleared",
            "BlockRemoved",
            "BlockStored",
            "EventBatch",
            "KVCacheEvent",
            "KVConnectorKVEvents",
            "KVEventAggregator",
            "KVEventBatch",
        ),
        "kvevents.publisher": (
            "EventPublisher",
            "EventPublisherFactory",
            "NullEventPublisher",
            "ZmqEventPublisher",
        ),
        "kvevents.stream": (
            "Batch",
            "Checkpoint",
            "Delivery",
            "Gap",
            "RawBatch",
            "RawDelivery",
            "Reset",
            "Source",
            "StreamLimits",
            "Trust",
        ),
        "kvevents.subscriber": (
            "AsyncSubscriber",
            "StreamStatus",
            "Subscriber",
        ),
        "kvevents.wire": (
            "Decoded",
            "Dialect",
            "decode_batch",
            "dialect_for",
            "encode_batch",
        ),
        "kvevents.zeromq.keys": ("Curve",),
    },
)
