"""The bytes of ZMTP 3.0 and 3.1 (RFC 23 and 37): frames to send, and where messages begin and end in a TCP stream.

A connection opens with a greeting of 64 bytes: signature (10), version (2), mechanism (20), role and padding. Frames follow:
a flags byte (bit 0: more frames follow, bit 1: 8-byte size, bit 2: command), the size in 1 or 8 bytes, big-endian, the body.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

MORE: Final = 0x01
"""Flags of a frame: more frames of the message follow, its size takes eight bytes, it is a command."""
LONG: Final = 0x02
COMMAND: Final = 0x04
GREETING_BYTES: Final = 64
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Signature, version 3.1, mechanism, not a server, filler."""
MAX_MESSAGE_BYTES: Final = 128 * 1024 * 1024
"""Longest message that is kept together, twice the wire's own limit for a payload. A connection that sends a longer one is
passed on unread from there, so memory stays bounded and the bytes arrive all the same."""

_SIGNATURE: Final = 0xFF
_MAJOR_AT: Final = 10
_MECHANISM: Final = slice(12, 32)
_NULL: Final = b"NULL".ljust(20, b"\0")

_MOST_SHORT: Final = 255

Kind: TypeAlias = Literal["message", "command", "raw"]
"""`raw` is the greeting, or anything of a connection that is not ZMTP 3 with the NULL mechanism: only NULL has messages that
can be told apart, under CURVE they are encrypted and numbered."""


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


class Piece(NamedTuple):
    """A part of the stream, as it was. The `raw` of all pieces, and of `rest` at the end, is the stream."""

    kind: Kind
    raw: bytes
    frames: tuple[bytes, ...] = ()
    """The frames of a message."""


class ZmtpSplitter:
    """One direction of one connection: `feed` it what arrived, pass on the pieces, and `rest` when the stream has ended."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max = max_message_bytes
        self._greeting = bytearray()
        self._buffer = bytearray()
        self._scanned = 0
        self._frames: list[bytes] = []
        self._opaque = False

    def feed(self, data: bytes) -> list[Piece]:
        """Take in some bytes; return what is complete. The greeting is passed on as it comes, since peers negotiate in it."""
        pieces: list[Piece] = []
        missing = GREETING_BYTES - len(self._greeting)
        if missing and not self._opaque:
            greeting, data = data[:missing], data[missing:]
            self._greeting += greeting
            self._opaque = not self._speaks_null()
            pieces.append(Piece("raw", greeting))
        if self._opaque:
            return [*pieces, Piece("raw", data)] if data else pieces
        self._buffer += data
        pieces.extend(self._pieces())
        return pieces

    def rest(self) -> bytes:
        """What arrived of a message that never became complete."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def _speaks_null(self) -> bool:
        """Whether the greeting, as far as it is known, is one of ZMTP 3 with the NULL mechanism."""
        greeting = self._greeting
        if greeting and greeting[0] != _SIGNATURE:
            return False
        if len(greeting) > _MAJOR_AT and greeting[_MAJOR_AT] < 3:
            return False
        return len(greeting) < _MECHANISM.stop or bytes(greeting[_MECHANISM]) == _NULL

    def _pieces(self) -> Iterator[Piece]:
        while (frame := self._next_frame()) is not None:
            flags, body = frame
            if flags & COMMAND and not self._frames:
                yield Piece("command", self._cut())
                continue
            self._frames.append(body)
            if not flags & MORE:
                frames = tuple(self._frames)
                self._frames.clear()
                yield Piece("message", self._cut(), frames)
        if self._opaque:
            yield Piece("raw", self.rest())

    def _cut(self) -> bytes:
        raw = bytes(self._buffer[: self._scanned])
        del self._buffer[: self._scanned]
        self._scanned = 0
        return raw

    def _next_frame(self) -> tuple[int, bytes] | None:
        """Flags and body of the next complete frame."""
        buffer, at = self._buffer, self._scanned
        if len(buffer) < at + 2:
            return None
        flags = buffer[at]
        head = at + (9 if flags & LONG else 2)
        if len(buffer) < head:
            return None
        end = head + int.from_bytes(buffer[at + 1 : head], "big")
        if end > self._max:
            self._opaque = True
            return None
        if len(buffer) < end:
            return None
        self._scanned = end
        return flags, bytes(buffer[head:end])
