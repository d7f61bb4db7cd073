"""A bound SUB socket, to which any number of publishers connect. Sources that share the socket have different topics.

Theory of operation. libzmq states the descriptor of the connection with each message, and in the events of its monitor. So a
source is connected when the first message of its topic arrives with any connection. The source is disconnected when this
connection has ended and all its messages were read, or when messages of the topic arrive with another connection. Numbers,
trust and identity of one publisher do not depend on other publishers.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Iterator
from typing import Final, TypeAlias

import zmq
from msgspec.structs import replace

from kvevents.errors import ConfigError
from kvevents.stream import Source, Stream
from kvevents.subscriber.multiplexer import Connection
from kvevents.subscriber.socket_owner import SocketOwner, StallDetector
from kvevents.zeromq.sockets import Socket, connect_or_bind, disable_monitor, endpoint_errors, open_monitor, read_monitor

_SRCFD: Final = 2
"""ZMQ_SRCFD, a message property that pyzmq does not name: the descriptor of the message's connection."""
_ACCEPTED: Final = zmq.Event.ACCEPTED
_HANDSHAKE_SUCCEEDED: Final = zmq.Event.HANDSHAKE_SUCCEEDED
_DISCONNECTED: Final = zmq.Event.DISCONNECTED

log = logging.getLogger(__name__)


class _ConnectionChange(enum.Enum):
    CONNECTED = enum.auto()
    DISCONNECTED = enum.auto()
    SHARED = enum.auto()
    """A second publisher sends with the topic of the source."""


_Arrival: TypeAlias = "list[bytes] | _ConnectionChange"


class TopicFeed:
    """The messages that a bound socket has received for one source: the live side of its connection."""

    fault = ""
    reopen_at: float | None = None
    """Always None, because a bound socket waits for publishers and never connects again."""

    def __init__(self, source: Source, socket: BoundSocket, owner: SocketOwner, connection: Connection | None) -> None:
        self.source = source
        self.connection = connection
        """The connection; None if the source was found by its topic but is not followed yet."""
        self.arrivals: deque[_Arrival] = deque()
        self.descriptor: int | None = None
        """Descriptor of the connection that brought the newest message; None if the descriptor is unknown."""
        self.other_connections: set[int] = set()
        """Descriptors of other connections that also bring messages of the source."""
        self.is_found = connection is None
        """Whether the source was found by its topic. Then other topics that begin with this topic are other sources."""
        self.is_connected = False
        self._socket = socket
        self._owner = owner

    def receives(self, topic: bytes) -> bool:
        """Return whether messages of a topic are for the source."""
        own = self.source.topic.encode()
        return topic == own if self.is_found else topic.startswith(own)

    def feed_stream(self, stream: Stream, now: float, limit: int) -> bool:
        """Feed live messages and connection changes to `stream`. Return True if there may be more to read."""
        has_more = self._socket.read(limit)
        for _ in range(min(limit, len(self.arrivals))):
            arrival = self.arrivals.popleft()
            if arrival is _ConnectionChange.CONNECTED:
                stream.begin_connection(now)
            elif arrival is _ConnectionChange.DISCONNECTED:
                stream.end_connection()
            elif arrival is _ConnectionChange.SHARED:
                stream.mark_shared()
            else:
                stream.receive_live(arrival, now)
        # Marked connections must be read, but the selector does not report them.
        return has_more or bool(self.arrivals or self._owner.marked_connections)

    def change(self, *, is_connected: bool) -> None:
        """Queue a change of the source's connection, unless the source already has the new state."""
        if self.is_connected is not is_connected:
            self.is_connected = is_connected
            self.arrivals.append(_ConnectionChange.CONNECTED if is_connected else _ConnectionChange.DISCONNECTED)

    def close(self) -> None:
        """Leave the bound socket, which closes when its last source leaves. Idempotent."""
        self._socket.leave(self)


class BoundSocket:
    """The SUB socket at one endpoint, and the sources that share it."""

    def __init__(self, source: Source, owner: SocketOwner, stalls: StallDetector) -> None:
        self.endpoint: Final = source.endpoint
        self.is_closed = False
        """Whether the last source has left."""
        self._curve: Final = source.curve
        self._owner: Final = owner
        self._stalls: Final = stalls
        self._security: Final = owner.secure(source)
        self._feeds: list[TopicFeed] = []
        self._by_topic: dict[bytes, TopicFeed | None] = {}
        """The feed of each topic that was received; None if no source has the topic."""
        self._ignored: dict[bytes, int | None] = {}
        """Topics whose sources the application does not follow, each with the descriptor that brought its newest message."""
        self._ended_connections: set[int] = set()
        """Descriptors of ended connections whose messages might not all be read yet."""
        self._peers: set[int] = set()
        """Descriptors of connections that were accepted and have not ended."""
        self._has_peer = self.endpoint.startswith("inproc://")
        """Whether a handshake has succeeded since the socket last had no connection."""
        try:
            self._open()
        except BaseException:
            owner.end_security(self._security)
            raise

    def _open(self) -> None:
        owner, endpoint = self._owner, self.endpoint
        self._sub = owner.open_socket(zmq.SUB, endpoint, self._security)
        self._monitor: Socket | None = None
        try:
            with endpoint_errors(endpoint, f"cannot follow {endpoint}"):
                self._monitor = owner.register(open_monitor(self._sub, _ACCEPTED | _HANDSHAKE_SUCCEEDED | _DISCONNECTED))
                self._sub.set(zmq.RCVHWM, owner.options.receive_hwm)
                owner.watch(self._sub, self._connections)
                owner.watch(self._monitor, self._connections)
                address = connect_or_bind(self._sub, endpoint, bind=True)
            for feed in self._feeds:
                self._sub.subscribe(feed.source.topic.encode())
            log.info("bound to %s", address)
        except BaseException:
            self._close()
            raise

    def _connections(self) -> Iterator[Connection]:
        return (feed.connection for feed in self._feeds if feed.connection is not None)

    def join(self, source: Source, connection: Connection) -> TopicFeed:
        """Add a source and return its feed. Raise `ConfigError` if the source cannot share the socket."""
        for feed in self._feeds:
            if feed.connection is None and feed.source.topic == source.topic and not source.by_topic:
                feed.source, feed.connection = source, connection
                return feed
        if source.curve != self._curve:
            raise ConfigError(f"two sources are bound to {self.endpoint} with different CURVE keys; give them the same keys")
        if any(feed.source.topic == source.topic for feed in self._feeds):
            raise ConfigError(
                f"two sources are bound to {self.endpoint} with the topic {source.topic!r}: give each the topic of its"
                " publisher, or use one source with by_topic=True"
            )
        feed = TopicFeed(source, self, self._owner, connection)
        self._feeds.append(feed)
        prefix = source.topic.encode()
        self._by_topic = {topic: other for topic, other in self._by_topic.items() if not topic.startswith(prefix)}
        self._ignored.pop(prefix, None)
        self._sub.subscribe(source.topic.encode())
        if self._has_peer and not source.by_topic:
            feed.change(is_connected=True)
        return feed

    def ignore(self, topic: str) -> None:
        """Drop the messages of a topic that was found, until its connection ends or a source with this topic joins."""
        for feed in [feed for feed in self._feeds if feed.connection is None and feed.source.topic == topic]:
            self._feeds.remove(feed)
            self._by_topic[topic.encode()] = None
            if len(self._ignored) < self._owner.options.max_topics:
                del self._by_topic[topic.encode()]
                self._ignored[topic.encode()] = feed.descriptor

    def leave(self, feed: TopicFeed) -> None:
        """Remove the feed of a source. After the last feed, close the socket. Idempotent."""
        if feed in self._feeds:
            self._feeds.remove(feed)
            self._by_topic = {topic: other for topic, other in self._by_topic.items() if other is not feed}
            if self._feeds:
                self._sub.unsubscribe(feed.source.topic.encode())
            else:
                self._close()
                self._owner.end_security(self._security)
                self.is_closed = True

    def read(self, limit: int) -> bool:
        """Receive up to `limit` messages, for all sources. Return True if there may be more to read."""
        events = self._read_monitor() if self._stalls.is_stalled else []
        if any(event == _DISCONNECTED for event, _ in events):
            # As in `LiveSocket`: libzmq 4.3.5 can abort the process when it reads a full socket whose peer has timed out.
            self._replace_socket()
            return True
        is_drained = self._receive(limit)
        for event, value in events + self._read_monitor():
            if event == _HANDSHAKE_SUCCEEDED:
                self._has_peer = True
                for feed in self._feeds:
                    if feed.descriptor is None and not feed.source.by_topic:
                        feed.change(is_connected=True)
            elif event == _DISCONNECTED:
                self._peers.discard(value)
                self._ended_connections.add(value)
            else:
                self._peers.add(value)
                if value in self._ended_connections:
                    # A new connection reuses the descriptor. Undrained messages may belong to the old or the new connection.
                    for feed in self._feeds_of(value):
                        feed.change(is_connected=False)
        if is_drained and self._ended_connections:
            self._end_connections()
        return not is_drained or bool(self._ended_connections)

    def _receive(self, limit: int) -> bool:
        """Receive up to `limit` messages. Return whether the socket is drained."""
        try:
            for _ in range(limit):
                frames = self._sub.recv_multipart(zmq.DONTWAIT, copy=False)
                self._route([frame.bytes for frame in frames], _descriptor_of(frames[0]))
        except zmq.Again:
            return True
        return False

    def _route(self, message: list[bytes], descriptor: int) -> None:
        topic = message[0]
        if self._ignored and self._ignored.get(topic, -2) == descriptor:
            return
        feed = self._by_topic[topic] if topic in self._by_topic else self._find_feed(topic)
        if feed is None:
            return
        if descriptor != feed.descriptor:
            if feed.descriptor in self._peers:
                if not feed.other_connections:
                    feed.arrivals.append(_ConnectionChange.SHARED)
                feed.other_connections.add(feed.descriptor)
                feed.other_connections.discard(descriptor)
            elif feed.descriptor is not None:
                feed.change(is_connected=False)
            feed.descriptor = descriptor
        if descriptor not in self._ended_connections:
            feed.change(is_connected=True)
        feed.arrivals.append(message)
        self._mark_readable(feed)

    def _mark_readable(self, feed: TopicFeed) -> None:
        if feed.connection is not None:
            self._owner.marked_connections.add(feed.connection)

    def _find_feed(self, topic: bytes) -> TopicFeed | None:
        """Return the feed with the longest prefix of a topic. A source with `by_topic` gets a new feed for each topic."""
        feeds = [feed for feed in self._feeds if feed.receives(topic)]
        feed_of_topic = max(feeds, key=lambda feed: (len(feed.source.topic), not feed.source.by_topic), default=None)
        limit = self._owner.options.max_topics
        if feed_of_topic is not None and feed_of_topic.source.by_topic:
            name, parent, feed_of_topic = topic.decode(errors="backslashreplace"), feed_of_topic.source, None
            if len(self._by_topic) < limit and name.isprintable():
                feed_of_topic = TopicFeed(replace(parent, topic=name, name=name, by_topic=False), self, self._owner, None)
                self._feeds.append(feed_of_topic)
                self._owner.found_sources.append(feed_of_topic.source)
        if len(self._by_topic) < limit:
            self._by_topic[topic] = feed_of_topic
        elif len(self._by_topic) == limit:
            self._by_topic[b"\0"] = None
            log.warning("%s: more than %d topics were received; the others are ignored", self.endpoint, limit)
        return feed_of_topic

    def _feeds_of(self, descriptor: int) -> list[TopicFeed]:
        return [feed for feed in self._feeds if descriptor == feed.descriptor or descriptor in feed.other_connections]

    def _end_connections(self) -> None:
        for descriptor in self._ended_connections:
            for feed in self._feeds_of(descriptor):
                feed.change(is_connected=False)
                feed.other_connections.discard(descriptor)
                feed.descriptor = None
                self._mark_readable(feed)
        self._ignored = {topic: fd for topic, fd in self._ignored.items() if fd not in self._ended_connections}
        if not self._peers:
            self._has_peer = False
            for feed in self._feeds:
                feed.change(is_connected=False)
                self._mark_readable(feed)
        self._ended_connections.clear()

    def _replace_socket(self) -> None:
        for feed in self._feeds:
            feed.change(is_connected=False)
            feed.descriptor = None
        self._has_peer = False
        self._peers.clear()
        self._ended_connections.clear()
        self._close()
        self._open()

    def _read_monitor(self) -> list[tuple[int, int]]:
        return [] if self._monitor is None else read_monitor(self._monitor)

    def _close(self) -> None:
        if self._monitor is not None:
            disable_monitor(self._sub)
            self._owner.close_socket(self._monitor)
            self._monitor = None
        self._owner.close_socket(self._sub)


def _descriptor_of(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection with which a message arrived; -1 for inproc, which has no descriptor."""
    try:
        return int(frame.get(_SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1
