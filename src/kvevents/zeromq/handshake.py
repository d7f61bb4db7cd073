"""ZMTP without libzmq: encodes frames, splits a TCP stream into messages, and finds out what listens at an endpoint.

The versions are 3.0 and 3.1 (RFC 23 and 37). A connection opens with a greeting of 64 bytes: signature (10), version (2),
mechanism (20), role and padding. Frames follow: a flags byte (bit 0: more frames follow, bit 1: 8-byte size, bit 2: command),
the size in 1 or 8 bytes, big-endian, the body.

libzmq only reports that a handshake failed. The bytes show why: a peer names its security mechanism and its socket type before
it checks ours. `_converse` does no I/O; `perform_handshake` and `perform_handshake_async` run it over a connection.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from typing import Final, Literal, NamedTuple, TypeAlias

from kvevents.endpoints import split_tcp

MORE: Final = 0x01
"""Flag: more frames of the message follow."""
LONG: Final = 0x02
"""Flag: the size of the frame takes 8 bytes."""
COMMAND: Final = 0x04
"""Flag: the frame is a command."""
GREETING_BYTES: Final = 64
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Signature, version 3.1, mechanism NULL, client role, padding."""
MAX_MESSAGE_BYTES: Final = 128 * 1024 * 1024
"""Longest message that is recognised, four times the limit of a payload. If a connection sends a longer one, the rest of the
stream is forwarded without splitting it, so that memory is bounded and no bytes are lost."""
HANDSHAKE_TIMEOUT: Final = 3.0
"""Seconds for connecting and the whole exchange: enough for another continent and for a peer that is swapping."""

_SIGNATURE: Final = 0xFF
_MAJOR_AT: Final = 10
_MECHANISM: Final = slice(12, 32)
_NULL: Final = b"NULL".ljust(20, b"\0")
_MAX_SHORT_SIZE: Final = 255
_HANDSHAKE_GREETING: Final = GREETING[:11] + b"\0" + GREETING[12:]
"""The greeting of a handshake has version 3.0."""
_READY: Final = b"\x05READY"
_SOCKET_TYPE: Final = b"\x0bSocket-Type"

SegmentKind: TypeAlias = Literal["message", "command", "raw"]
"""`raw` is the greeting, or any part of a stream that is not ZMTP 3 with the NULL mechanism. Only NULL has messages that can be
recognised; with CURVE they are encrypted and numbered."""
HandshakeOutcome: TypeAlias = Literal[
    "socket", "curve", "unknown-host", "refused", "unreachable", "timeout", "closed", "silent", "not-zeromq"
]
"""`socket`: a ZeroMQ socket without CURVE. `timeout`: no connection in time. `silent`: a connection, but no bytes in time."""


def message(frames: Sequence[bytes]) -> bytes:
    """Encode a message of at least one frame."""
    return b"".join([*(_frame(MORE, frame) for frame in frames[:-1]), _frame(0, frames[-1])])


def command(name: bytes, data: bytes = b"") -> bytes:
    """Encode a command."""
    return _frame(COMMAND, bytes((len(name),)) + name + data)


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) <= _MAX_SHORT_SIZE:
        return bytes((flags, len(body))) + body
    return bytes((flags | LONG,)) + len(body).to_bytes(8, "big") + body


class Segment(NamedTuple):
    """A part of the stream. The `raw` bytes of all segments, followed by `ZmtpSplitter.remainder`, are the stream."""

    kind: SegmentKind
    raw: bytes
    frames: tuple[bytes, ...] = ()
    """The frames of a message."""


class ZmtpSplitter:
    """Splits one direction of one connection: `feed` it bytes, forward the segments, and at the end the `remainder`."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max = max_message_bytes
        self._greeting = bytearray()
        self._buffer = bytearray()
        self._scanned = 0
        self._frames: list[bytes] = []
        self._is_opaque = False

    def feed(self, data: bytes) -> list[Segment]:
        """Add bytes and return what is complete. Parts of the greeting are returned at once, because peers negotiate in it."""
        segments: list[Segment] = []
        missing = GREETING_BYTES - len(self._greeting)
        if missing and not self._is_opaque:
            greeting, data = data[:missing], data[missing:]
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
        """Return whether the greeting, as far as it was received, is ZMTP 3 with the NULL mechanism."""
        greeting = self._greeting
        if greeting and greeting[0] != _SIGNATURE:
            return False
        if len(greeting) > _MAJOR_AT and greeting[_MAJOR_AT] < 3:
            return False
        return len(greeting) < _MECHANISM.stop or bytes(greeting[_MECHANISM]) == _NULL

    def _segments(self) -> Iterator[Segment]:
        while (frame := self._next_frame()) is not None:
            flags, body = frame
            if flags & COMMAND and not self._frames:
                yield Segment("command", self._take_scanned())
                continue
            self._frames.append(body)
            if not flags & MORE:
                frames = tuple(self._frames)
                self._frames.clear()
                yield Segment("message", self._take_scanned(), frames)
        if self._is_opaque:
            yield Segment("raw", self.remainder())

    def _take_scanned(self) -> bytes:
        raw = bytes(self._buffer[: self._scanned])
        del self._buffer[: self._scanned]
        self._scanned = 0
        return raw

    def _next_frame(self) -> tuple[int, bytes] | None:
        """Return flags and body of the next complete frame; None if no frame is complete."""
        buffer, at = self._buffer, self._scanned
        if len(buffer) < at + 2:
            return None
        flags = buffer[at]
        head = at + (9 if flags & LONG else 2)
        if len(buffer) < head:
            return None
        end = head + int.from_bytes(buffer[at + 1 : head], "big")
        if end > self._max:
            self._is_opaque = True
            return None
        if len(buffer) < end:
            return None
        self._scanned = end
        return flags, bytes(buffer[head:end])


# --- the handshake ---------------------------------------------------------------------------------------------------------


class Handshake(NamedTuple):
    """Result of a handshake. With the outcome `socket`, `detail` is the peer's socket type, such as `PUB`."""

    outcome: HandshakeOutcome
    detail: str = ""

    @property
    def is_publisher(self) -> bool:
        """Whether a SUB socket can connect here."""
        return self.outcome == "socket" and self.detail in {"PUB", "XPUB"}


def _converse() -> Generator[tuple[bytes, int], bytes, Handshake]:
    """Yield bytes to send and the number of bytes to read next; send it the bytes read, fewer if the peer has closed."""
    # Only up to the version: a peer that sees another mechanism than its own closes before it names its own.
    greeting = yield _HANDSHAKE_GREETING[: _MECHANISM.start], GREETING_BYTES
    if not greeting:
        return Handshake("closed")
    if greeting[0] != _SIGNATURE or len(greeting) < GREETING_BYTES:
        return Handshake("not-zeromq", "HTTP" if greeting.startswith(b"HTTP/") else "")
    mechanism = greeting[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")
    if mechanism != "NULL":
        return Handshake("curve" if mechanism == "CURVE" else "not-zeromq", mechanism)
    # The peer now names its socket type. If it saw ours first, it would close if the two do not fit.
    head = yield _HANDSHAKE_GREETING[_MECHANISM.start :], 2
    body = (yield b"", head[1]) if len(head) == 2 else b""
    if not body.startswith(_READY):
        return Handshake("closed")
    _, has_type, rest = body.partition(_SOCKET_TYPE)
    size = int.from_bytes(rest[:4], "big")
    return Handshake("socket", rest[4 : 4 + size].decode("ascii", "replace") if has_type else "")


def _handshake_of_error(error: OSError | UnicodeError) -> Handshake:
    """Convert an error that was raised while connecting."""
    match error:
        case UnicodeError():
            return Handshake("unknown-host", "not a valid host name")
        case socket.gaierror():
            return Handshake("unknown-host", str(error.strerror))
        case ConnectionRefusedError() | FileNotFoundError():
            return Handshake("refused")
        case TimeoutError():
            return Handshake("timeout")
        case _:
            return Handshake("unreachable", str(error.strerror or error))


def _unix_address(endpoint: str) -> str:
    """Return the address of an `ipc://` endpoint. ZeroMQ writes Linux's abstract names with @ for the leading zero byte."""
    path = endpoint.removeprefix("ipc://")
    return "\0" + path[1:] if path.startswith("@") else path


# --- over a blocking socket


def perform_handshake(endpoint: str, timeout: float = HANDSHAKE_TIMEOUT) -> Handshake:
    """Connect to a `tcp://` or `ipc://` endpoint and return what listens there, after at most `timeout` seconds."""
    end = time.monotonic() + timeout
    try:
        connection = _connect(endpoint, timeout)
    except (OSError, UnicodeError) as error:
        return _handshake_of_error(error)
    conversation = _converse()
    with closing(connection):
        try:
            data, size = next(conversation)
            while True:
                connection.sendall(data)
                data, size = conversation.send(_read(connection, size, end))
        except StopIteration as result:
            handshake: Handshake = result.value
            return handshake
        except TimeoutError:
            return Handshake("silent")
        except OSError:
            return Handshake("closed")


def _connect(endpoint: str, timeout: float) -> socket.socket:
    address = split_tcp(endpoint)
    if address is not None:
        return socket.create_connection((address[0].strip("[]"), address[1]), timeout)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout)
        connection.connect(_unix_address(endpoint))
    except OSError:
        connection.close()
        raise
    return connection


def _read(connection: socket.socket, size: int, end: float) -> bytes:
    """Read `size` bytes, or fewer if the peer closes. Raise `TimeoutError` at the time `end`."""
    data = b""
    while len(data) < size:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        chunk = connection.recv(size - len(data))
        if not chunk:
            break
        data += chunk
    return data


# --- in an event loop


async def perform_handshake_async(endpoint: str, seconds: float = HANDSHAKE_TIMEOUT) -> Handshake:
    """Connect to a `tcp://` or `ipc://` endpoint and return what listens there, after at most `seconds`."""
    address = split_tcp(endpoint)
    end = asyncio.get_running_loop().time() + seconds
    try:
        async with asyncio.timeout_at(end):
            if address is not None:
                reader, writer = await asyncio.open_connection(address[0].strip("[]"), address[1])
            else:
                reader, writer = await asyncio.open_unix_connection(_unix_address(endpoint))
    except (OSError, UnicodeError) as error:
        return _handshake_of_error(error)
    try:
        async with asyncio.timeout_at(end):
            return await _run_conversation(reader, writer)
    except TimeoutError:
        return Handshake("silent")
    except OSError:
        return Handshake("closed")
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _run_conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Handshake:
    conversation = _converse()
    sent, size = next(conversation)
    while True:
        writer.write(sent)
        try:
            received = await reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            received = error.partial
        try:
            sent, size = conversation.send(received)
        except StopIteration as result:
            handshake: Handshake = result.value
            return handshake
