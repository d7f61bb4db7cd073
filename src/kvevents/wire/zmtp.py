"""The bytes by which a subscriber and a publisher agree to talk, for connections without libzmq.

ZMTP 3 (https://rfc.zeromq.org/spec/23/ for 3.0, https://rfc.zeromq.org/spec/37/ for 3.1) with the mechanism NULL, that is
without keys: both sides send a greeting, then a READY command with what they are; then one subscribes. What a publisher sends
after that is read by the native module (`_native.Zmtp`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

MORE: Final = 0x01
"""Flags of a frame: more frames of the message follow, its size takes eight bytes, it is a command."""
LONG: Final = 0x02
COMMAND: Final = 0x04
GREETING_BYTES: Final = 64
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Signature, version 3.1, mechanism, not a server, filler."""
PUBLISHERS: Final = frozenset({b"PUB", b"XPUB"})
SUBSCRIBERS: Final = frozenset({b"SUB", b"XSUB"})
"""Socket types that may talk to each other."""
MAX_SHOWN: Final = 40
"""Bytes of what a peer says that a sentence repeats."""
MAX_CONTEXT: Final = 16
"""Bytes of a PING that its PONG repeats."""
_MOST_SHORT: Final = 255
_WISHES: Final = (b"\x00", b"\x01")


def message(frames: Sequence[bytes]) -> bytes:
    """The bytes of a message of these frames, of which there is at least one."""
    return b"".join([*(_frame(MORE, frame) for frame in frames[:-1]), _frame(0, frames[-1])])


def command(name: bytes, data: bytes = b"") -> bytes:
    """A command as a frame of its own."""
    return _frame(COMMAND, bytes((len(name),)) + name + data)


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) <= _MOST_SHORT:
        return bytes((flags, len(body))) + body
    return bytes((flags | LONG,)) + len(body).to_bytes(8, "big") + body


READY: Final = command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x03SUB")
"""Of a subscriber, and of a publisher."""
PUBLISHER_READY: Final = command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x04XPUB")
PING: Final = command(b"PING", bytes(2))
"""Without a time after which the peer should give us up."""


def subscription(topic: bytes, minor: int) -> bytes:
    """To be sent what begins with a topic; peers before ZMTP 3.1 know no command for that."""
    return command(b"SUBSCRIBE", topic) if minor >= 1 else message([b"\x01" + topic])


def wish_of_message(frames: Sequence[bytes]) -> tuple[bool, bytes] | None:
    """Whether what begins with a topic is wanted or no longer, and the topic; None for a message that says nothing of that."""
    if len(frames) != 1 or frames[0][:1] not in _WISHES:
        return None
    return frames[0][0] == 1, frames[0][1:]


def wish_of_command(name: bytes, data: bytes) -> tuple[bool, bytes] | None:
    """The same, of a command."""
    return (name == b"SUBSCRIBE", data) if name in {b"SUBSCRIBE", b"CANCEL"} else None


def pong(data: bytes) -> bytes:
    """The answer to a PING with this data, which begins with a time to live."""
    return command(b"PONG", data[2 : 2 + MAX_CONTEXT])


def greeted(greeting: bytes) -> tuple[int, str]:
    """The peer's minor version, and why nothing can come of it; empty where something can."""
    if greeting[0] != 0xFF or not greeting[9] & 1:
        return 0, "the peer is no ZeroMQ socket"
    if greeting[10] < 3:
        return 0, "the peer speaks a ZMTP before 3.0"
    mechanism = greeting[12:32].rstrip(b"\0")
    if mechanism != b"NULL":
        return 0, f"the peer wants {_shown(mechanism)}, and no keys are given"
    return greeting[11], ""


def parse_command(body: bytes) -> tuple[bytes, bytes]:
    """Name and data of a command; both empty where it is none."""
    if not body or len(body) < 1 + body[0]:
        return b"", b""
    end = 1 + body[0]
    return body[1:end], body[end:]


def refused(name: bytes, data: bytes, kinds: Collection[bytes] = PUBLISHERS) -> str:
    """Why the peer's first command is not the READY of a socket of one of these types; empty where it is."""
    if name == b"ERROR":
        return f"the peer refuses: {_shown(data[1:])}"
    if name != b"READY":
        return "the peer does not say what it is"
    kind = properties(data).get(b"socket-type", b"")
    return "" if kind in kinds else f"the peer is a {_shown(kind)} socket, and must be {b' or '.join(sorted(kinds)).decode()}"


def properties(data: bytes) -> dict[bytes, bytes]:
    """By names in lower case; what is cut off is left out."""
    found: dict[bytes, bytes] = {}
    while data:
        name, rest = data[1 : 1 + data[0]], data[1 + data[0] :]
        size = int.from_bytes(rest[:4], "big")
        value, data = rest[4 : 4 + size], rest[4 + size :]
        if len(rest) < 4 or len(value) < size:
            break
        found[name.lower()] = value
    return found


def _shown(said: bytes) -> str:
    """What a peer says, on one line of a log however it says it."""
    return ascii(said[:MAX_SHOWN].decode("latin-1"))
