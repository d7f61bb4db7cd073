"""Subscribers: sockets around `kvevents.stream`, for threads and for asyncio."""

from kvevents.subscriber.front_ends import AsyncSubscriber, Outcome, Sink, Subscriber
from kvevents.subscriber.load_readings import LoadReading, LoadSettings, LoadSource
from kvevents.subscriber.load_subscriber import LoadSubscriber
from kvevents.subscriber.multiplexer import Connection, StreamStatus, Transport
from kvevents.subscriber.zmq_transport import ZmqTransport
from kvevents.zeromq.sockets import SocketOptions

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
