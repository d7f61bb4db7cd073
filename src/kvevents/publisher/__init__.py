"""Publishes KV cache events."""

from kvevents.publisher.base import EventPublisher, NullEventPublisher
from kvevents.publisher.factory import EventPublisherFactory
from kvevents.publisher.settings import PublisherSettings
from kvevents.publisher.stats import HistoryStats, PublisherStats, ReplayStats, ShutdownReport
from kvevents.publisher.zmq_publisher import ZmqEventPublisher

__all__ = [
    "EventPublisher",
    "EventPublisherFactory",
    "HistoryStats",
    "NullEventPublisher",
    "PublisherSettings",
    "PublisherStats",
    "ReplayStats",
    "ShutdownReport",
    "ZmqEventPublisher",
]
