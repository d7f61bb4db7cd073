"""What stands at an address: the greeting of ZeroMQ's own protocol (ZMTP 3.0, RFC 23), spoken by hand.

libzmq only says that a handshake failed. The bytes say why: a peer names its security and the type of its socket before it
judges ours.
"""

from __future__ import annotations

import socket
import time
from contextlib import closing
from typing import Final, Literal, NamedTuple, TypeAlias

from kvevents.endpoints import split_tcp

TIMEOUT: Final = 3.0
"""Seconds for everything: connecting across a continent, and a peer that swaps."""

Outcome: TypeAlias = Literal["socket", "curve", "unknown-host", "refused", "unreachable", "closed", "mute", "foreign"]

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


def shake_hands(endpoint: str, timeout: float = TIMEOUT) -> Handshake:
    """Connect to a `tcp://` or `ipc://` endpoint and ask who is there."""
    until = time.monotonic() + timeout
    try:
        connection = _connect(endpoint, timeout)
    except socket.gaierror as error:
        return Handshake("unknown-host", str(error.strerror))
    except (ConnectionRefusedError, FileNotFoundError):
        return Handshake("refused")
    except OSError as error:
        return Handshake("unreachable", str(error.strerror or error))
    with closing(connection):
        try:
            return _converse(connection, until)
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
        path = endpoint.removeprefix("ipc://")
        # ZeroMQ writes Linux's abstract names with an @ for their leading zero byte.
        connection.connect("\0" + path[1:] if path.startswith("@") else path)
    except OSError:
        connection.close()
        raise
    return connection


def _converse(connection: socket.socket, until: float) -> Handshake:
    # Up to the version only: a peer that sees another mechanism than its own closes before it has named its own.
    connection.sendall(_GREETING[: _MECHANISM.start])
    greeting = _read(connection, 64, until)
    if not greeting:
        return Handshake("closed")
    if greeting[:1] != b"\xff" or len(greeting) < 64:
        return Handshake("foreign", "HTTP" if greeting.startswith(b"HTTP/") else "")
    mechanism = greeting[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")
    if mechanism != "NULL":
        return Handshake("curve" if mechanism == "CURVE" else "foreign", mechanism)
    # It names its type now; hearing ours first, one that does not fit would close instead.
    connection.sendall(_GREETING[_MECHANISM.start :])
    head = _read(connection, 2, until)
    body = _read(connection, head[1], until) if len(head) == 2 else b""
    return Handshake("socket", _socket_type(body)) if body.startswith(_READY) else Handshake("closed")


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


def _socket_type(ready: bytes) -> str:
    _, found, rest = ready.partition(_TYPE)
    size = int.from_bytes(rest[:4], "big")
    return rest[4 : 4 + size].decode("ascii", "replace") if found else ""
