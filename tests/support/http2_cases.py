"""A client of HTTP/2 for tests: it sends frames one by one and never opens a window that a test does not open."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GO_AWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS: Final = 4
INITIAL_WINDOW: Final = 4
MAX_FRAME: Final = 1 << 14


class Frame(NamedTuple):
    """A frame of HTTP/2."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def encode_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def encode_settings(window: int) -> bytes:
    """Return the beginning of a connection, on which each stream's window has this size."""
    return PREFACE + encode_frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, window))


def encode_request(stream: int, path: str, body: bytes = b"", *, method: str = "POST", **headers: str) -> bytes:
    """Return the frames of a request. `_` in the names of headers is sent as `-`."""
    fields = {":method": method, ":path": path, ":scheme": "http", ":authority": "localhost", **headers}
    block = b"".join(_encode_text(name.replace("_", "-"), value) for name, value in fields.items())
    frames = encode_frame(HEADERS, END_HEADERS | (0 if body else END_STREAM), stream, block)
    for start in range(0, len(body), MAX_FRAME):
        is_last = start + MAX_FRAME >= len(body)
        frames += encode_frame(DATA, END_STREAM if is_last else 0, stream, body[start : start + MAX_FRAME])
    return frames


def _encode_text(name: str, value: str) -> bytes:
    """Encode a header without compression (RFC 7541, 6.2.2)."""
    assert max(len(name), len(value)) < 127
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def receive_frames(connection: socket.socket) -> Iterator[Frame]:
    """Yield the frames that arrive until the connection ends. SETTINGS are acknowledged, nothing else."""
    received = b""
    while True:
        while len(received) < 9 or len(received) < 9 + int.from_bytes(received[:3], "big"):
            try:
                piece = connection.recv(1 << 16)
            except ConnectionResetError:
                return
            if not piece:
                return
            received += piece
        length, (kind, flags, stream) = int.from_bytes(received[:3], "big"), struct.unpack(">BBI", received[3:9])
        frame, received = Frame(kind, flags, stream, received[9 : 9 + length]), received[9 + length :]
        if frame.kind == SETTINGS and not frame.flags & ACK:
            connection.sendall(encode_frame(SETTINGS, ACK, 0))
        yield frame
