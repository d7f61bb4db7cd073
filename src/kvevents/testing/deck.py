"""The deck: a tape's sockets, its replay buffer and its books. One thread drives it; `tape.TapePlayer` is its face."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import zmq

from kvevents.endpoints import connectable
from kvevents.errors import EndpointError, UsageError
from kvevents.recording import LiveBatch
from kvevents.testing.faults import Faults, Reply
from kvevents.testing.ports import HeldPort, hold_port
from kvevents.testing.reel import Reel
from kvevents.wire import Malformed, live_frames, parse_replay_request

BIND_SECONDS: Final = 5.0
"""How long a bind waits for a port: libzmq closes a listener a moment after its socket."""
LINGER_MS: Final = 1_000
"""How long an orderly stop hands out what is queued; also bounds `close`."""
MESSAGES_PER_TURN: Final = 256
"""Messages that one consumer gets before the others, and whoever wants to stop the tape, have their turn."""
RETRY_SECONDS: Final = 0.005
"""Pause before a reply is offered again to a consumer whose queue is full."""
REPLY_QUEUE: Final = 1_000
"""Messages of a reply that are queued for one consumer; the rest waits unsent, so an endless reply has bounded memory."""
MAX_WAITING_REPLIES: Final = 100
"""Requests of one consumer that wait behind its first; a flood beyond is refused."""

Fate: TypeAlias = Literal["live", "dropped", "burnt", "unseen"]
"""`live`: sent and kept. `dropped`: kept, not sent. `burnt`: neither. `unseen`: kept, published before the sockets opened."""


class Sent(NamedTuple):
    """One number that a tape gave away. Lives count from 0."""

    life: int
    batch: LiveBatch
    fate: Fate


@dataclass(slots=True)
class TapeCounts:
    """What a tape did since it was opened, over all its lives."""

    lives: int = 1
    published: int = 0
    """Batches that a lossless subscriber delivers: live, dropped or unseen, but not burnt."""
    live: int = 0
    dropped: int = 0
    burnt: int = 0
    unseen: int = 0
    requests: int = 0
    """Well-formed replay requests."""
    refused: int = 0
    """Messages on the ROUTER that were no request, and got no answer; requests of a flood."""
    replayed: int = 0
    """Batches handed to the ROUTER in replies."""
    withheld: int = 0
    """Batches that were asked for, were kept, and were left out of a reply by a fault."""


class _Answers:
    """Replies to one consumer, one after the other; the message at the head stays until it was sent."""

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


class Deck:
    """Sockets and state of one engine; not thread-safe but for `books`, the condition that guards what callers read."""

    def __init__(self, reel: Reel, faults: Faults, endpoint: str, replay_endpoint: str | None, hwm: int, log: int) -> None:
        self.reel = reel
        self.faults = faults
        self.books: Final = threading.Condition()
        self.counts = TapeCounts()
        self.log: deque[Sent] = deque(maxlen=log)
        self.requests: deque[int] = deque(maxlen=log)
        self.subscriptions: Counter[bytes] = Counter()
        self.kept: deque[LiveBatch] = deque()
        self._hwm = hwm
        self._context = zmq.Context()
        self._ports = [hold_port(name) for name in (endpoint, replay_endpoint) if name is not None]
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._answers: dict[bytes, _Answers] = {}
        self.endpoints: list[str] = []
        try:
            self.open()
        except EndpointError:
            self.destroy()
            raise

    @property
    def is_open(self) -> bool:
        return self._pub is not None

    def open(self) -> None:
        """Bind both sockets, where they were before; `EndpointError`, with both closed, when an address cannot be had."""
        try:
            self._open()
        except EndpointError:
            self.close(0)
            raise

    def _open(self) -> None:
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._pub.setsockopt(zmq.SNDHWM, self._hwm)
        bound = [_bind(self._pub, self._ports[0])]
        if len(self._ports) > 1:
            limit = self.faults.replay_sndhwm
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.SNDHWM, REPLY_QUEUE if limit is None else limit)
            # A mandatory ROUTER refuses what it cannot queue; without, as in the engines, it drops it in silence.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, limit is None)
            bound.append(_bind(self._router, self._ports[1]))
        self._ports = [HeldPort(name, port.holder) for name, port in zip(bound, self._ports, strict=True)]
        self.endpoints = [connectable(name) for name in bound]

    def close(self, linger_ms: int) -> None:
        """Close the sockets; what is queued may still leave for `linger_ms`."""
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger_ms)
        self._pub = self._router = None
        self._answers.clear()
        with self.books:
            self.subscriptions.clear()
            self.books.notify_all()

    def destroy(self) -> None:
        """Close everything for good. Waits up to `LINGER_MS` for what an orderly stop left behind."""
        self.close(0)
        for port in self._ports:
            if port.holder is not None:
                port.holder.close()
        self._context.term()

    def begin_life(self, batches: Sequence[LiveBatch] | None) -> None:
        """Forget what a process forgets when it dies, and count from 0."""
        self.reel.restart(batches)
        self._forget()

    def _forget(self) -> None:
        with self.books:
            self.kept.clear()
            self.counts.lives += 1

    def publish(self, seen: bool = True) -> int:
        """Give the next batch its number, keep it and send it, as the faults will have it; return the number."""
        turn = self.reel.take()
        if turn.new_life:
            self._forget()
        batch = turn.batch
        fate = self._fate(batch.seq, seen)
        if fate == "live":
            self.send(live_frames(batch.topic, batch.seq, batch.payload))
        with self.books:
            if fate != "burnt":
                self._keep(batch)
            self.log.append(Sent(self.counts.lives - 1, batch, fate))
            setattr(self.counts, fate, getattr(self.counts, fate) + 1)
            self.books.notify_all()
        return batch.seq

    def _fate(self, seq: int, seen: bool) -> Fate:
        if seq in self.faults.burnt:
            return "burnt"
        if not seen:
            return "unseen"
        return "dropped" if self.faults.drops(seq) else "live"

    def _keep(self, batch: LiveBatch) -> None:
        self.counts.published += 1
        self.kept.append(batch)
        while len(self.kept) > self.faults.buffer_steps:
            self.kept.popleft()

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message from the PUB socket. Raises `UsageError` while it is closed."""
        if self._pub is None:
            raise UsageError("the tape is stopped: restart() opens its sockets again")
        self._pub.send_multipart(frames)

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll for reading."""
        return [socket for socket in (self._pub, self._router) if socket is not None]

    def read_subscriptions(self) -> None:
        """Take note of who subscribed: a first byte of 1 joins, of 0 leaves (RFC 29)."""
        while self._pub is not None:
            try:
                message = self._pub.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            if message[:1] in (b"\x00", b"\x01"):
                with self.books:
                    self.subscriptions[message[1:]] += 1 if message[0] else -1
                    self.books.notify_all()

    def read_requests(self) -> None:
        """Take in replay requests; anything but `[identity, "", start]` is not answered (vLLM `distributed/kv_events.py`)."""
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT) if self._router is not None else None
            except zmq.Again:
                return
            if frames is not None:
                self._take_request(frames)

    def _take_request(self, frames: list[bytes]) -> None:
        request = parse_replay_request(frames)
        waiting = None if isinstance(request, Malformed) else self._answers.setdefault(request.identity, _Answers())
        with self.books:
            if isinstance(request, Malformed) or waiting is None or len(waiting) > MAX_WAITING_REPLIES:
                self.counts.refused += 1
            else:
                reply = self.faults.reply(self.kept, request.start, self.counts.requests)
                waiting.add(reply)
                self.counts.requests += 1
                self.counts.withheld += reply.withheld
                self.requests.append(request.start)
            self.books.notify_all()

    def answer(self) -> float | None:
        """Send what consumers can take. Seconds until there is more to try, None when every reply is out."""
        waits = [self._answer_one(identity, answers) for identity, answers in list(self._answers.items())]
        return min((wait for wait in waits if wait is not None), default=None)

    def _answer_one(self, identity: bytes, answers: _Answers) -> float | None:
        replayed = 0
        wait: float | None = 0.0
        for _ in range(MESSAGES_PER_TURN):
            wait = self._offer(identity, answers)
            if wait != 0.0 or answers.head is None:
                break
            replayed += answers.head[-1] != b""
            answers.advance()
        with self.books:
            self.counts.replayed += replayed
            self.books.notify_all()
        if wait is None:
            del self._answers[identity]
        return wait

    def _offer(self, identity: bytes, answers: _Answers) -> float | None:
        """Send the message at the head: 0.0 when it went, a pause when the queue is full, None without message or consumer."""
        if answers.head is None or self._router is None:
            return None
        try:
            self._router.send_multipart([identity, *answers.head], zmq.DONTWAIT)
        except zmq.Again:
            return RETRY_SECONDS
        except zmq.ZMQError:  # EHOSTUNREACH: the consumer is gone
            return None
        return 0.0


def _bind(socket: zmq.Socket[bytes], port: HeldPort) -> str:
    """Bind, waiting for an earlier listener of ours to be gone; return the address with its port."""
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        try:
            socket.bind(port.endpoint)
        except zmq.ZMQError as error:
            ours = error.errno == errno.EADDRINUSE and port.holder is not None
            if not ours or time.monotonic() > deadline:
                raise EndpointError(error.errno, f"cannot bind {port.endpoint}: {error.strerror}") from error
            time.sleep(RETRY_SECONDS)
        else:
            return socket.get_string(zmq.LAST_ENDPOINT)
