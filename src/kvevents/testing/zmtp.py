"""ZMTP without libzmq: encodes frames, and splits a TCP stream into messages.

The versions are 3.0 and 3.1 (RFC 23 and 37). A connection opens with a greeting of 64 bytes: signature (10), version (2),
mechanism (20), role and padding. Frames follow: a flags byte (bit 0: more frames follow, bit 1: 8-byte size, bit 2: command),
the size in 1 or 8 bytes, big-endian, the body.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from kvevents.diagnosis.handshake import MAJOR_OFFSET, MECHANISM_SLICE, SIGNATURE_BYTE

MORE_FLAG: Final = 0x01
"""Flag of a frame: more frames of the message follow."""
LONG_FLAG: Final = 0x02
"""Flag of a frame: its size field has 8 bytes."""
COMMAND_FLAG: Final = 0x04
"""Flag of a frame: it is a command."""
GREETING_BYTES: Final = 64
MAX_MESSAGE_BYTES: Final = 128 * 1024 * 1024
"""Maximum length of a message that is recognised: four times the limit of a payload. From a longer message on, the stream is
forwarded without being split, so that memory is bounded and no bytes are lost."""


SegmentKind: TypeAlias = Literal["message", "command", "raw"]
"""`raw` is a part of a greeting, or of a stream that is not ZMTP 3 with the NULL mechanism. Messages cannot be recognised with
CURVE, which encrypts and numbers them."""


def encode_message(frames: Sequence[bytes]) -> bytes:
    """Encode a message of at least one frame."""
    return b"".join([*(encode_frame(MORE_FLAG, body) for body in frames[:-1]), encode_frame(0, frames[-1])])


def encode_frame(flags: int, body: bytes) -> bytes:
    """Encode a frame. The flag `LONG_FLAG` is added for a body above 255 bytes."""
    if len(body) <= 255:
        return bytes((flags, len(body))) + body
    return bytes((flags | LONG_FLAG,)) + len(body).to_bytes(8, "big") + body


class Segment(NamedTuple):
    """A part of the stream. The stream consists of the `raw` bytes of all segments, followed by `ZmtpSplitter.remainder`."""

    kind: SegmentKind
    raw: bytes
    frames: tuple[bytes, ...] = ()
    """The frames of the message, if the segment is a message."""


class ZmtpSplitter:
    """Splits one direction of a connection. Call `feed` with its bytes, forward the segments and, at the end, `remainder`."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max = max_message_bytes
        self._greeting = bytearray()
        self._buffer = bytearray()
        self._scan_position = 0
        self._frames: list[bytes] = []
        self._is_opaque = False

    def feed(self, data: bytes) -> list[Segment]:
        """Add bytes and return the complete segments. Parts of a greeting are returned at once: a peer may wait for them."""
        segments: list[Segment] = []
        bytes_left = GREETING_BYTES - len(self._greeting)
        if bytes_left and not self._is_opaque:
            greeting, data = data[:bytes_left], data[bytes_left:]
            self._greeting += greeting
            self._is_opaque = not self._is_null_greeting()
            segments.append(Segment("raw", greeting))
        if self._is_opaque:
            return [*segments, Segment("raw", data)] if data else segments
        self._buffer += data
        segments.extend(self._segments())
        return segments

    def remainder(self) -> bytes:
        """Remove and return the bytes of an incomplete message."""
        remainder = bytes(self._buffer)
        self._buffer.clear()
        return remainder

    def _is_null_greeting(self) -> bool:
        """Return whether the received part of the greeting is consistent with ZMTP 3 and the NULL mechanism."""
        greeting = self._greeting
        if greeting and greeting[0] != SIGNATURE_BYTE:
            return False
        if len(greeting) > MAJOR_OFFSET and greeting[MAJOR_OFFSET] < 3:
            return False
        return len(greeting) < MECHANISM_SLICE.stop or bytes(greeting[MECHANISM_SLICE]) == b"NULL".ljust(20, b"\0")

    def _segments(self) -> Iterator[Segment]:
        while (frame := self._next_frame()) is not None:
            flags, body = frame
            if flags & COMMAND_FLAG and not self._frames:
                yield Segment("command", self._take_scanned())
                continue
            self._frames.append(body)
            if not flags & MORE_FLAG:
                frames = tuple(self._frames)
                self._frames.clear()
                yield Segment("message", self._take_scanned(), frames)
        if self._is_opaque:
            yield Segment("raw", self.remainder())

    def _take_scanned(self) -> bytes:
        raw = bytes(self._buffer[: self._scan_position])
        del self._buffer[: self._scan_position]
        self._scan_position = 0
        return raw

    def _next_frame(self) -> tuple[int, bytes] | None:
        """Return the flags and the body of the next frame, or None if it is not complete."""
        buffer, position = self._buffer, self._scan_position
        if len(buffer) < position + 2:
            return None
        flags = buffer[position]
        head = position + (9 if flags & LONG_FLAG else 2)
        if len(buffer) < head:
            return None
        end = head + int.from_bytes(buffer[position + 1 : head], "big")
        if end > self._max:
            self._is_opaque = True
            return None
        if len(buffer) < end:
            return None
        self._scan_position = end
        return flags, bytes(buffer[head:end])
