"""Opens a ZMTP connection without libzmq, to find out what listens at an endpoint.

libzmq reports that a handshake failed, but not why. The bytes show why: a peer names its security mechanism and its socket type
before it checks ours. A greeting has 64 bytes: signature (10), version (2), mechanism (20), role and padding (RFC 23).
"""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import suppress
from typing import Final, Literal, NamedTuple, TypeAlias

from kvevents.endpoints import split_tcp

_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""The greeting that this module sends: signature, version 3.0, mechanism NULL, client role, padding."""
HANDSHAKE_SECONDS: Final = 3.0
"""Maximum number of seconds to connect and exchange greetings: enough for a peer on another continent, or a peer that swaps."""

SIGNATURE_BYTE: Final = 0xFF
MAJOR_OFFSET: Final = 10
MECHANISM_SLICE: Final = slice(12, 32)

HandshakeOutcome: TypeAlias = Literal[
    "socket", "curve", "unknown-host", "refused", "unreachable", "timeout", "closed", "silent", "not-zeromq"
]
"""`socket`: a ZeroMQ socket without CURVE. `timeout`: no connection in time. `silent`: a connection, but no bytes in time."""


class Handshake(NamedTuple):
    """Result of a handshake. If the outcome is `socket`, `detail` is the peer's socket type, such as `PUB`."""

    outcome: HandshakeOutcome
    detail: str = ""

    @property
    def is_publisher(self) -> bool:
        """Whether the peer is a socket to which a SUB socket can connect."""
        return self.outcome == "socket" and self.detail in {"PUB", "XPUB"}


def perform_handshake(endpoint: str, seconds: float = HANDSHAKE_SECONDS) -> Handshake:
    """Run `perform_handshake_async` for callers without an event loop."""
    return asyncio.run(perform_handshake_async(endpoint, seconds))


def _handshake_of_error(error: OSError | UnicodeError) -> Handshake:
    """Return the handshake result for an error that the connection attempt raised."""
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


async def perform_handshake_async(endpoint: str, seconds: float = HANDSHAKE_SECONDS) -> Handshake:
    """Connect to a `tcp://` or `ipc://` endpoint and return what listens there, after at most `seconds`."""
    address = split_tcp(endpoint)
    end = asyncio.get_running_loop().time() + seconds
    try:
        async with asyncio.timeout_at(end):
            if address is not None:
                reader, writer = await asyncio.open_connection(address[0].strip("[]"), address[1])
            else:
                path = re.sub("^@", "\0", endpoint.removeprefix("ipc://"))  # ZeroMQ marks Linux's abstract socket names with @
                reader, writer = await asyncio.open_unix_connection(path)
    except (OSError, UnicodeError) as error:
        return _handshake_of_error(error)
    try:
        async with asyncio.timeout_at(end):
            return await _exchange_greetings(reader, writer)
    except TimeoutError:
        return Handshake("silent")
    except OSError:
        return Handshake("closed")
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _exchange_greetings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Handshake:
    # First send only the version: a peer that receives a mechanism other than its own closes without naming its own.
    writer.write(_GREETING[: MECHANISM_SLICE.start])
    greeting = await _read_bytes(reader, len(_GREETING))
    if not greeting:
        return Handshake("closed")
    if greeting[0] != SIGNATURE_BYTE or len(greeting) < len(_GREETING):
        return Handshake("not-zeromq", "HTTP" if greeting.startswith(b"HTTP/") else "")
    mechanism = greeting[MECHANISM_SLICE].rstrip(b"\0").decode("ascii", "replace")
    if mechanism != "NULL":
        return Handshake("curve" if mechanism == "CURVE" else "not-zeromq", mechanism)
    # The peer now sends its socket type. Send no socket type: the peer would close the connection if the two types did not fit.
    writer.write(_GREETING[MECHANISM_SLICE.start :])
    head = await _read_bytes(reader, 2)
    body = await _read_bytes(reader, head[1]) if len(head) == 2 else b""
    if not body.startswith(b"\x05READY"):
        return Handshake("closed")
    _, has_type, fields = body.partition(b"\x0bSocket-Type")
    size = int.from_bytes(fields[:4], "big")
    return Handshake("socket", fields[4 : 4 + size].decode("ascii", "replace") if has_type else "")


async def _read_bytes(reader: asyncio.StreamReader, size: int) -> bytes:
    """Return `size` bytes, or fewer if the peer has closed the connection."""
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        return error.partial
