"""What listens at an address: the greeting of ZeroMQ's own protocol (ZMTP 3.0, RFC 23), exchanged without libzmq.

libzmq only says that a handshake failed. The bytes say why: a peer names its security and the type of its socket before it
judges ours. The conversation itself does no I/O; `shake_hands` and `shake_hands_async` carry it over a socket.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Generator
from contextlib import closing, suppress
from typing import Final, Literal, NamedTuple, TypeAlias

from kvevents.endpoints import split_tcp

TIMEOUT: Final = 3.0
"""Seconds for everything: connecting across a continent, and a peer that swaps."""

Outcome: TypeAlias = Literal[
    "socket", "curve", "unknown-host", "refused", "unreachable", "timeout", "closed", "mute", "foreign"
]
"""`timeout`: no connection in time; `mute`: a connection, and nothing came over it in time."""

_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MECHANISM: Final = slice(12, 32)
_READY: Final = b"\x05READY"
_TYPE: Final = b"\x0bSocket-Type"


class Handshake(NamedTuple):
    """What was found. With the outcome `socket`, `detail` is the type of the peer's socket, such as `PUB`."""

    outcome: Outcome
    detail: str = ""

    @property
    def publishes(self) -> bool:
        """Whether a SUB socket can connect here. XPUB is PUB that also listens."""
        return self.outcome == "socket" and self.detail in {"PUB", "XPUB"}


def _converse() -> Generator[tuple[bytes, int], bytes, Handshake]:
    """Yields bytes to send and how many to read then; is sent what was read, which is less where the peer has closed."""
    # Up to the version only: a peer that sees another mechanism than its own closes before it has named its own.
    greeting = yield _GREETING[: _MECHANISM.start], 64
    if not greeting:
        return Handshake("closed")
    if greeting[:1] != b"\xff" or len(greeting) < 64:
        return Handshake("foreign", "HTTP" if greeting.startswith(b"HTTP/") else "")
    mechanism = greeting[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")
    if mechanism != "NULL":
        return Handshake("curve" if mechanism == "CURVE" else "foreign", mechanism)
    # It names its type now; hearing ours first, one that does not fit would close instead.
    head = yield _GREETING[_MECHANISM.start :], 2
    body = (yield b"", head[1]) if len(head) == 2 else b""
    return Handshake("socket", _socket_type(body)) if body.startswith(_READY) else Handshake("closed")


def _socket_type(ready: bytes) -> str:
    _, found, rest = ready.partition(_TYPE)
    size = int.from_bytes(rest[:4], "big")
    return rest[4 : 4 + size].decode("ascii", "replace") if found else ""


def _failed(error: OSError | UnicodeError) -> Handshake:
    """What an attempt to connect came to."""
    match error:
        case UnicodeError():
            return Handshake("unknown-host", "it is no host name")
        case socket.gaierror():
            return Handshake("unknown-host", str(error.strerror))
        case ConnectionRefusedError() | FileNotFoundError():
            return Handshake("refused")
        case TimeoutError():
            return Handshake("timeout")
        case _:
            return Handshake("unreachable", str(error.strerror or error))


def _unix_address(endpoint: str) -> str:
    """ZeroMQ writes Linux's abstract names with an @ for their leading zero byte."""
    path = endpoint.removeprefix("ipc://")
    return "\0" + path[1:] if path.startswith("@") else path


# --- over a blocking socket


def shake_hands(endpoint: str, timeout: float = TIMEOUT) -> Handshake:
    """Connect to a `tcp://` or `ipc://` endpoint and ask what listens there."""
    until = time.monotonic() + timeout
    try:
        connection = _connect(endpoint, timeout)
    except (OSError, UnicodeError) as error:
        return _failed(error)
    with closing(connection):
        try:
            return _carry(connection, until)
        except TimeoutError:
            return Handshake("mute")
        except OSError:
            return Handshake("closed")


def _connect(endpoint: str, timeout: float) -> socket.socket:
    found = split_tcp(endpoint)
    if found is not None:
        return socket.create_connection((found[0].strip("[]"), found[1]), timeout)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout)
        connection.connect(_unix_address(endpoint))
    except OSError:
        connection.close()
        raise
    return connection


def _carry(connection: socket.socket, until: float) -> Handshake:
    talk = _converse()
    sent, size = next(talk)
    while True:
        connection.sendall(sent)
        try:
            sent, size = talk.send(_read(connection, size, until))
        except StopIteration as end:
            found: Handshake = end.value
            return found


def _read(connection: socket.socket, size: int, until: float) -> bytes:
    """`size` bytes, or fewer when the peer closes."""
    data = b""
    while len(data) < size:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        piece = connection.recv(size - len(data))
        if not piece:
            break
        data += piece
    return data


# --- in an event loop


async def shake_hands_async(endpoint: str, seconds: float = TIMEOUT) -> Handshake:
    """The same as `shake_hands`."""
    found = split_tcp(endpoint)
    until = asyncio.get_running_loop().time() + seconds
    try:
        async with asyncio.timeout_at(until):
            if found is not None:
                reader, writer = await asyncio.open_connection(found[0].strip("[]"), found[1])
            else:
                reader, writer = await asyncio.open_unix_connection(_unix_address(endpoint))
    except (OSError, UnicodeError) as error:
        return _failed(error)
    try:
        async with asyncio.timeout_at(until):
            return await _carry_async(reader, writer)
    except TimeoutError:
        return Handshake("mute")
    except OSError:
        return Handshake("closed")
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _carry_async(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Handshake:
    talk = _converse()
    sent, size = next(talk)
    while True:
        writer.write(sent)
        try:
            data = await reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            data = error.partial
        try:
            sent, size = talk.send(data)
        except StopIteration as end:
            found: Handshake = end.value
            return found
