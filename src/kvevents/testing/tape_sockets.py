"""The sockets of a tape player: a PUB and a ROUTER socket, the replay buffer behind them, and counters."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import zmq

from kvevents.endpoints import connectable_endpoint
from kvevents.errors import EndpointError, UsageError
from kvevents.recording import LiveBatch
from kvevents.testing.playlist import Faults, Playlist, Reply
from kvevents.testing.ports import ReservedPort, reserve_port
from kvevents.wire import Malformed, live_frames, parse_replay_request
from kvevents.zeromq.sockets import check_path, endpoint_errors

BIND_SECONDS: Final = 5.0
"""Maximum time for which a bind waits for its port, because libzmq closes a listener shortly after its socket."""
LINGER_MS: Final = 1_000
"""Maximum time for which an orderly stop, or `close`, sends queued messages."""
MESSAGES_PER_ROUND: Final = 256
"""Maximum number of messages that one consumer gets before other consumers and calls of the tape player are served."""
RETRY_SECONDS: Final = 0.005
"""Delay before a reply is sent again to a consumer whose queue is full."""
MAX_QUEUED_REPLIES: Final = 1_000
"""Maximum number of queued reply messages for one consumer. Further messages wait, so that endless replies are bounded."""
MAX_WAITING_REPLIES: Final = 100
"""Maximum number of requests from one consumer that wait while an earlier request is answered. Further requests are refused."""

SendOutcome: TypeAlias = Literal["live", "dropped", "skipped", "unseen"]
"""`live`: the batch was sent and stored for replay. `dropped`: it was only stored. `skipped`: it was neither sent nor stored.
`unseen`: it was published before the sockets opened, and only stored."""


class Sent(NamedTuple):
    """A sequence number that a tape has used, with its batch. The first incarnation is 0."""

    incarnation: int
    batch: LiveBatch
    outcome: SendOutcome


@dataclass(slots=True)
class TapeCounts:
    """Counters of a tape player since it was opened, over all its incarnations."""

    incarnations: int = 1
    published: int = 0
    """Number of batches that a subscriber without loss delivers: live, dropped and unseen ones, but not skipped ones."""
    live: int = 0
    dropped: int = 0
    skipped: int = 0
    unseen: int = 0
    requests: int = 0
    """Well-formed replay requests."""
    refused: int = 0
    """Number of messages on the ROUTER socket without a reply: malformed messages, and requests above the limit."""
    replayed: int = 0
    """Number of batches in replies that were passed to the ROUTER socket."""
    withheld: int = 0
    """Number of requested and stored batches that a fault removed from a reply."""


class _ReplyQueue:
    """Replies to one consumer, which are sent one after the other. `head` is the next message; None if no message is left."""

    def __init__(self) -> None:
        self._replies: deque[Reply] = deque()
        self.head: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self._replies)

    def add(self, reply: Reply) -> None:
        self._replies.append(reply)
        if self.head is None:
            self.advance()

    def advance(self) -> None:
        while self._replies:
            self.head = next(self._replies[0].messages, None)
            if self.head is not None:
                return
            self._replies.popleft()
        self.head = None


class TapeSockets:
    """Sockets and state of one simulated engine.

    Not thread-safe, except that `condition` guards the counters, the logs, the subscriptions and the replay buffer.
    """

    def __init__(
        self, playlist: Playlist, faults: Faults, endpoint: str, replay_endpoint: str | None, hwm: int, log: int
    ) -> None:
        self.playlist = playlist
        self.faults = faults
        self.condition: Final = threading.Condition()
        self.counts = TapeCounts()
        self.log: deque[Sent] = deque(maxlen=log)
        self.requests: deque[int] = deque(maxlen=log)
        self.subscriptions: Counter[bytes] = Counter()
        self.replay_buffer: deque[LiveBatch] = deque()
        self._hwm = hwm
        self._context = zmq.Context()
        self._ports = [reserve_port(name) for name in (endpoint, replay_endpoint) if name is not None]
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._replies: dict[bytes, _ReplyQueue] = {}
        self.endpoints: list[str] = []
        try:
            self.open()
        except EndpointError:
            self.destroy()
            raise

    @property
    def is_open(self) -> bool:
        """Whether both sockets are bound."""
        return self._pub is not None

    def open(self) -> None:
        """Bind both sockets to the same addresses as before. If a bind fails, close both sockets and raise `EndpointError`."""
        try:
            self._open()
        except EndpointError:
            self.close(0)
            raise

    def _open(self) -> None:
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._pub.setsockopt(zmq.SNDHWM, self._hwm)
        addresses = [_bind_socket(self._pub, self._ports[0])]
        if len(self._ports) > 1:
            limit = self.faults.replay_sndhwm
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.SNDHWM, MAX_QUEUED_REPLIES if limit is None else limit)
            # With this option, a ROUTER reports messages that it cannot queue. Without it, as in engines, they are dropped.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, limit is None)
            addresses.append(_bind_socket(self._router, self._ports[1]))
        self._ports = [ReservedPort(name, port.holder) for name, port in zip(addresses, self._ports, strict=True)]
        self.endpoints = [connectable_endpoint(name) for name in addresses]

    def close(self, linger_ms: int) -> None:
        """Close the sockets. Queued messages are sent for up to `linger_ms`."""
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger_ms)
        self._pub = self._router = None
        self._replies.clear()
        with self.condition:
            self.subscriptions.clear()
            self.condition.notify_all()

    def destroy(self) -> None:
        """Close the sockets, the reserved ports and the context. Wait up to `LINGER_MS` until queued messages are sent."""
        self.close(0)
        for port in self._ports:
            port.close()
        self._context.term()

    def begin_incarnation(self, batches: Sequence[LiveBatch] | None) -> None:
        """Restart the playlist, clear the replay buffer and count sequence numbers from 0, as after a restart."""
        self.playlist.restart(batches)
        self._clear_buffer()

    def _clear_buffer(self) -> None:
        with self.condition:
            self.replay_buffer.clear()
            self.counts.incarnations += 1

    def publish(self, is_seen: bool = True) -> int:
        """Publish the next batch, subject to the faults, and return its sequence number.

        If `is_seen` is false, the batch is not sent live.
        """
        batch, is_restart = self.playlist.next_batch()
        if is_restart:
            self._clear_buffer()
        outcome = self._outcome(batch.seq, is_seen)
        if outcome == "live":
            self.send(live_frames(batch.topic, batch.seq, batch.payload))
        with self.condition:
            if outcome != "skipped":
                self.counts.published += 1
                self.replay_buffer.append(batch)
                while len(self.replay_buffer) > self.faults.buffer_steps:
                    self.replay_buffer.popleft()
            self.log.append(Sent(self.counts.incarnations - 1, batch, outcome))
            setattr(self.counts, outcome, getattr(self.counts, outcome) + 1)
            self.condition.notify_all()
        return batch.seq

    def _outcome(self, seq: int, is_seen: bool) -> SendOutcome:
        if seq in self.faults.skipped:
            return "skipped"
        return "unseen" if not is_seen else "dropped" if self.faults.drops(seq) else "live"

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message from the PUB socket. Raise `UsageError` if the socket is closed."""
        if self._pub is None:
            raise UsageError("the tape is stopped: restart() opens its sockets again")
        self._pub.send_multipart(frames)

    def open_sockets(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets to poll for reading."""
        return [socket for socket in (self._pub, self._router) if socket is not None]

    def read_subscriptions(self) -> None:
        """Count subscriptions by topic. A message begins with 1 to subscribe, with 0 to unsubscribe (RFC 29)."""
        while self._pub is not None:
            try:
                message = self._pub.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            if message[:1] in (b"\x00", b"\x01"):
                with self.condition:
                    self.subscriptions[message[1:]] += 1 if message[0] else -1
                    self.condition.notify_all()

    def read_requests(self) -> None:
        """Read replay requests. Only `[identity, "", start]` gets a reply, as in vLLM `distributed/kv_events.py`."""
        for _ in range(MESSAGES_PER_ROUND):
            if self._router is None:
                return
            try:
                self._queue_reply(self._router.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return

    def _queue_reply(self, frames: list[bytes]) -> None:
        request = parse_replay_request(frames)
        replies = None if isinstance(request, Malformed) else self._replies.setdefault(request.identity, _ReplyQueue())
        with self.condition:
            if isinstance(request, Malformed) or replies is None or len(replies) > MAX_WAITING_REPLIES:
                self.counts.refused += 1
            else:
                reply = self.faults.reply(self.replay_buffer, request.start, self.counts.requests)
                replies.add(reply)
                self.counts.requests += 1
                self.counts.withheld += reply.withheld
                self.requests.append(request.start)
            self.condition.notify_all()

    def send_replies(self) -> float | None:
        """Send messages to consumers with room. Return the seconds until the next attempt, or None if all replies are sent."""
        waits = [self._send_replies_to(identity, replies) for identity, replies in list(self._replies.items())]
        return min((wait for wait in waits if wait is not None), default=None)

    def _send_replies_to(self, identity: bytes, replies: _ReplyQueue) -> float | None:
        count = 0
        wait: float | None = 0.0
        for _ in range(MESSAGES_PER_ROUND):
            wait = self._send_head(identity, replies)
            if wait != 0.0 or replies.head is None:
                break
            count += replies.head[-1] != b""
            replies.advance()
        with self.condition:
            self.counts.replayed += count
            self.condition.notify_all()
        if wait is None:
            del self._replies[identity]
        return wait

    def _send_head(self, identity: bytes, replies: _ReplyQueue) -> float | None:
        """Send the next message. Return 0.0 if it is sent, a delay if the queue is full, None without a message or consumer."""
        if replies.head is None or self._router is None:
            return None
        try:
            self._router.send_multipart([identity, *replies.head], zmq.DONTWAIT)
        except zmq.Again:
            return RETRY_SECONDS
        except zmq.ZMQError:  # EHOSTUNREACH: the consumer has disconnected
            return None
        return 0.0


def _bind_socket(socket: zmq.Socket[bytes], port: ReservedPort) -> str:
    """Bind to a reserved port, if necessary after its previous listener has closed. Return the endpoint with the port."""
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        try:
            check_path(port.endpoint)
            socket.bind(port.endpoint)
        except zmq.ZMQError as error:
            is_reserved = error.errno == errno.EADDRINUSE and port.holder is not None
            if not is_reserved or time.monotonic() > deadline:
                with endpoint_errors(port.endpoint, f"cannot bind {port.endpoint}"):
                    raise
            time.sleep(RETRY_SECONDS)
        else:
            return socket.get_string(zmq.LAST_ENDPOINT)
