"""Subscribers: sockets around `kvevents.stream`, for threads and for asyncio."""

from kvevents.subscriber.aio import AsyncSubscriber
from kvevents.subscriber.hub import StreamStatus
from kvevents.subscriber.sync import Subscriber
from kvevents.subscriber.transport import Link, Transport
from kvevents.subscriber.zmq import SocketOptions, ZmqTransport

__all__ = ["AsyncSubscriber", "Link", "SocketOptions", "StreamStatus", "Subscriber", "Transport", "ZmqTransport"]
