"""Subscribers: sockets around `kvevents.stream`, for threads and for asyncio."""

from kvevents.subscriber.front_ends import AsyncSubscriber, Outcome, Sink, Subscriber
from kvevents.subscriber.multiplexer import Connection, StreamStatus, Transport
from kvevents.subscriber.zmq_transport import ZmqTransport
from kvevents.zeromq.sockets import SocketOptions

__all__ = [
    "AsyncSubscriber",
    "Connection",
    "Outcome",
    "Sink",
    "SocketOptions",
    "StreamStatus",
    "Subscriber",
    "Transport",
    "ZmqTransport",
]
