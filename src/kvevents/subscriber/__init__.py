"""Subscribers: sockets around `kvevents.stream`, for threads and for asyncio."""

from kvevents.subscriber.aio import AsyncSubscriber
from kvevents.subscriber.front_end import Outcome, Sink
from kvevents.subscriber.load_readings import LoadReading, LoadSettings, LoadSource
from kvevents.subscriber.load_subscriber import LoadSubscriber
from kvevents.subscriber.multiplexer import StreamStatus
from kvevents.subscriber.sync import Subscriber
from kvevents.subscriber.transport import Connection, Transport
from kvevents.subscriber.zmq_sockets import SocketOptions
from kvevents.subscriber.zmq_transport import ZmqTransport

__all__ = [
    "AsyncSubscriber",
    "Connection",
    "LoadReading",
    "LoadSettings",
    "LoadSource",
    "LoadSubscriber",
    "Outcome",
    "Sink",
    "SocketOptions",
    "StreamStatus",
    "Subscriber",
    "Transport",
    "ZmqTransport",
]
