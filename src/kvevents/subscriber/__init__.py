"""Subscribers: sockets around `kvevents.stream`, for threads and for asyncio."""

from typing import TYPE_CHECKING

from kvevents.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from kvevents.subscriber.aio import AsyncSubscriber
    from kvevents.subscriber.front_end import Outcome, Sink, TrustChange
    from kvevents.subscriber.multiplexer import Connection, StreamStatus, Transport
    from kvevents.subscriber.sync import Subscriber
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
    "TrustChange",
    "ZmqTransport",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "kvevents.subscriber.aio": "AsyncSubscriber",
        "kvevents.subscriber.front_end": "Outcome Sink TrustChange",
        "kvevents.subscriber.multiplexer": "Connection StreamStatus Transport",
        "kvevents.subscriber.sync": "Subscriber",
        "kvevents.subscriber.zmq_transport": "ZmqTransport",
        "kvevents.zeromq.sockets": "SocketOptions",
    },
)
