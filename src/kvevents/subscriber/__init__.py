"""Subscribers: sockets around `kvevents.stream`, for threads and for asyncio."""

from kvevents.subscriber.aio import AsyncSubscriber
from kvevents.subscriber.hub import StreamStatus
from kvevents.subscriber.options import SocketOptions
from kvevents.subscriber.sink import Outcome, Sink
from kvevents.subscriber.sync import Subscriber
from kvevents.subscriber.transport import Link, Transport
from kvevents.subscriber.zmq import ZmqTransport

__all__ = [
    "AsyncSubscriber",
    "Link",
    "Outcome",
    "Sink",
    "SocketOptions",
    "StreamStatus",
    "Subscriber",
    "Transport",
    "ZmqTransport",
]
