"""Asking a replay endpoint directly, beside any subscriber: whether it answers, and with what."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Final

import zmq

from kvevents.endpoints import needs_ipv6
from kvevents.errors import EndpointError
from kvevents.security import Curve
from kvevents.wire import ReplayBatch, ReplayEnd, parse_replay_reply, replay_request_frames

MAX_REPLY_MESSAGES: Final = 200_000
"""Messages read of one reply; an engine keeps 10,000 batches. An endless reply ends here."""

Dealer = zmq.Socket[bytes]


@dataclass(slots=True)
class Reply:
    """What one request brought."""

    start: int
    batches: list[ReplayBatch] = field(default_factory=list)
    malformed: int = 0
    shapes: set[str] = field(default_factory=set)
    """Which of the layouts of WIRE it came in, for a person."""
    end: bool = False
    """Whether an end marker came."""
    cut: bool = False
    """Whether it was given up while messages were still coming."""

    @property
    def answered(self) -> bool:
        """Whether anything came back."""
        return self.end or bool(self.batches) or bool(self.malformed)

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Ranges of numbers missing between the first and the last."""
        pairs = zip(self.batches, self.batches[1:], strict=False)
        return [(one.seq + 1, other.seq - 1) for one, other in pairs if other.seq > one.seq + 1]


@contextmanager
def dealers(endpoints: Sequence[str], curve: Curve | None = None) -> Iterator[list[Dealer]]:
    """A DEALER for each endpoint, closed afterwards. Raises `EndpointError` for one that cannot be connected to."""
    context: zmq.Context[Dealer] = zmq.Context()
    try:
        yield [_dealer(context, endpoint, curve) for endpoint in endpoints]
    finally:
        context.destroy(linger=0)


def _dealer(context: zmq.Context[Dealer], endpoint: str, curve: Curve | None) -> Dealer:
    socket: Dealer = context.socket(zmq.DEALER)
    socket.set(zmq.RCVHWM, 0)
    if needs_ipv6(endpoint):
        socket.set(zmq.IPV6, 1)
    if curve is not None:
        curve.apply(socket)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise EndpointError(f"cannot connect to {endpoint}: {error}; write tcp://HOST:PORT or ipc:///PATH") from error
    return socket


def _request(socket: Dealer, start: int) -> None:
    # A peer that has broken the protocol by now takes nothing any more, and answers nothing.
    with suppress(zmq.Again):
        socket.send_multipart(replay_request_frames(start), zmq.DONTWAIT)


def ask(endpoint: str, start: int, *, silence: float, seconds: float, curve: Curve | None = None) -> Reply:
    """What `endpoint` answers to one request, up to the end marker, `silence` seconds without a message, or `seconds`."""
    reply = Reply(start)
    with dealers([endpoint], curve) as (socket,):
        _request(socket, start)
        until = time.monotonic() + seconds
        for _ in range(MAX_REPLY_MESSAGES):
            wait = min(silence, until - time.monotonic())
            if wait <= 0 or not socket.poll(ceil(1000 * wait)):
                reply.cut = wait <= 0
                return reply
            _take(reply, socket.recv_multipart())
            if reply.end:
                return reply
    reply.cut = True
    return reply


def _take(reply: Reply, frames: list[bytes]) -> None:
    message = parse_replay_reply(frames)
    if isinstance(message, ReplayBatch):
        reply.batches.append(message)
    elif isinstance(message, ReplayEnd):
        reply.end = True
    else:
        reply.malformed += 1
        return
    reply.shapes.add({2: "bare end marker", 3: "[seq, payload]", 4: "[topic, seq, payload]"}[len(frames)])
