"""What waits in a socket of pyzmq's, taken without waiting, and at the least cost that pyzmq allows."""

from __future__ import annotations

from typing import Final

import zmq
import zmq.backend

from kvevents.bulk import bulk
from kvevents.wire.framing import encode_seq

_recv = zmq.backend.Socket.recv
_get = zmq.backend.Socket.get
_DONTWAIT: Final = int(zmq.DONTWAIT)
_RCVMORE: Final = int(zmq.RCVMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)


def has_news(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive; to be told so by `zmq.Again` costs three times as much."""
    return bool(int(_get(socket, _EVENTS)) & _POLLIN)


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """One message without waiting; raises `zmq.Again` when there is none.

    The wrappers of pyzmq cost three times what libzmq does here; this calls its backend directly.
    """
    frames = [_recv(socket, _DONTWAIT)]
    while _get(socket, _RCVMORE):
        frames.append(_recv(socket, _DONTWAIT))
    return frames


def drain(socket: zmq.Socket[bytes], limit: int) -> tuple[list[list[bytes]], bool]:
    """Up to `limit` messages, and whether there were no more."""
    messages: list[list[bytes]] = []
    try:
        for _ in range(limit):
            messages.append(receive(socket))  # noqa: PERF401 - what was read before the exception must be kept
    except zmq.Again:
        return messages, True
    return messages, False


def drain_live(socket: zmq.Socket[bytes], topic: bytes, due: range, limit: int) -> tuple[list[bytes], list[list[bytes]], bool]:
    """Payloads of batches with this topic and the numbers that are due, then messages from the first other one on; as `drain`.

    What has more frames than a batch, or fewer, is none, whatever they begin with.
    """
    many = bulk()
    if many is not None:
        payloads, messages, drained = many.receive(socket.underlying, topic, due.start, len(due), limit)
        if payloads or messages or drained:
            return payloads, messages, drained
    return _drain_live(socket, topic, due, limit)


def _drain_live(socket: zmq.Socket[bytes], topic: bytes, due: range, limit: int) -> tuple[list[bytes], list[list[bytes]], bool]:
    """The same by pyzmq, which raises what is to be raised."""
    messages, drained = drain(socket, limit)
    payloads: list[bytes] = []
    for number, frames in zip(due, messages, strict=False):
        if frames[:-1] != [topic, encode_seq(number)]:
            break
        payloads.append(frames[-1])
    return payloads, messages[len(payloads) :], drained
