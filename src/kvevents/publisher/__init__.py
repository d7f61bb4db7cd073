"""Publishing KV cache events."""

from kvevents.publisher.base import EventPublisher
from kvevents.publisher.factory import EventPublisherFactory
from kvevents.publisher.null import NullEventPublisher
from kvevents.publisher.stats import PublisherStats, ReplayStats, ShutdownReport
from kvevents.publisher.zmq import ZmqEventPublisher

__all__ = [
    "EventPublisher",
    "EventPublisherFactory",
    "NullEventPublisher",
    "PublisherStats",
    "ReplayStats",
    "ShutdownReport",
    "ZmqEventPublisher",
]
