"""What waits in a socket of pyzmq's, taken without waiting, and at the least cost that pyzmq allows."""

from __future__ import annotations

from struct import Struct
from typing import Final

import zmq
import zmq.backend

from kvevents.bulk import FRAMES, bulk
from kvevents.wire import Live, parse_live

_recv = zmq.backend.Socket.recv
_get = zmq.backend.Socket.get
_DONTWAIT: Final = int(zmq.DONTWAIT)
_RCVMORE: Final = int(zmq.RCVMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_pack_seq: Final = Struct(">Q").pack


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


def drain_run(socket: zmq.Socket[bytes], topic: bytes, numbers: range) -> tuple[list[bytes], list[list[bytes]], bool]:
    """Payloads of messages with this topic and these numbers, then what came instead if anything did, and as `drain`.

    It asks no message where it ends: three frames with the topic and exactly the number that was due are the batch that was
    due. Where a message had more frames than those, the rest of it does not look like that, and `drain_live` asks. There may be
    more with these numbers, unless something came instead.
    """
    many = bulk()
    if many is None or not numbers:
        return _drain_run(socket, topic, numbers)
    payloads, odd, drained = many.receive(socket.underlying, topic, numbers.start, len(numbers))
    return payloads, _whole(socket, odd) if len(odd) == FRAMES else [odd] if odd else [], drained


def _drain_run(socket: zmq.Socket[bytes], topic: bytes, numbers: range) -> tuple[list[bytes], list[list[bytes]], bool]:
    """The same, frame by frame."""
    payloads: list[bytes] = []
    first = second = None
    try:
        for number in map(_pack_seq, numbers):
            first = _recv(socket, _DONTWAIT)
            second = _recv(socket, _DONTWAIT)
            third = _recv(socket, _DONTWAIT)
            if second != number or first != topic:
                return payloads, _whole(socket, [first, second, third]), False
            if not payloads and not int(_get(socket, _EVENTS)) & _POLLIN:
                # The only one, as when an engine has little to say; to be told so by zmq.Again takes three times as long.
                return [third], [], True
            payloads.append(third)
            first = second = None
    except zmq.Again:
        return payloads, [[frame for frame in (first, second) if frame is not None]] if first is not None else [], True
    return payloads, [], False


def drain_live(socket: zmq.Socket[bytes], limit: int) -> tuple[list[list[bytes]], bool]:
    """As `drain`, for messages of three frames, asking once a message instead of once a frame where it ends.

    That question costs as much as two frames. Three frames of which the last has no successor are a whole message, or several
    that have fewer frames each and mean nothing anyway.
    """
    messages: list[list[bytes]] = []
    while len(messages) < limit:
        frames: list[bytes] = []
        try:
            frames.append(_recv(socket, _DONTWAIT))
            frames.append(_recv(socket, _DONTWAIT))
            frames.append(_recv(socket, _DONTWAIT))
        except zmq.Again:
            if frames:
                messages.append(frames)
            return messages, True
        messages += _whole(socket, frames)
    return messages, False


def _whole(socket: zmq.Socket[bytes], frames: list[bytes]) -> list[list[bytes]]:
    """The message of these three frames; if it goes on, it is a longer one, or a good one behind one that was too short."""
    if not _get(socket, _RCVMORE):
        return [frames]
    while _get(socket, _RCVMORE):
        frames.append(_recv(socket, _DONTWAIT))
    good = frames[-3:]
    if len(frames) <= 5 and isinstance(parse_live(good), Live):
        return [frames[:-3], good]
    return [frames]
