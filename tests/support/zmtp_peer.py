"""A publisher whose bytes are chosen by a test: a server that follows ZMTP, or violates it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from kvevents.stream import StreamLimits
from kvevents.subscriber import SocketOptions
from kvevents.testing import zmtp

DEADLINE: Final = 60.0
LIMITS: Final = StreamLimits(replay_timeout=2.0, reply_idle_timeout=0.5, idle_before_probe=0.2, max_probe_interval=1.0)
OPTIONS: Final = SocketOptions(reconnect_ms=10, reconnect_max_ms=40, handshake_ms=20_000)
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Signature, version 3.1, mechanism NULL, client role, padding."""


def command(name: bytes, data: bytes = b"") -> bytes:
    """Encode a command."""
    return zmtp.encode_frame(zmtp.COMMAND_FLAG, bytes((len(name),)) + name + data)


PUB: Final = command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x03PUB\x08Identity\x00\x00\x00\x00")


def batch(seq: int, payload: bytes = b"\x93\xcb\0\0\0\0\0\0\0\0\x90\xc0") -> bytes:
    return zmtp.encode_message([b"kv", seq.to_bytes(8, "big"), payload])


class Peer:
    """A server that runs one script for each connection, one after the other."""

    def __init__(self, *acts: Callable[[PeerConnection], None]) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.failure: BaseException | None = None
        self.times: list[float] = []
        """The times at which connections were accepted."""
        self._acts = acts
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            for act in self._acts:
                connection, _ = self._server.accept()
                self.times.append(time.monotonic())
                with connection:
                    connection.settimeout(DEADLINE)
                    act(PeerConnection(connection, self._done))
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            if not self._done.is_set():
                self.failure = error

    def close(self) -> None:
        self._done.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE)
        self._server.close()


class PeerConnection:
    """The publisher's side of a connection."""

    def __init__(self, connection: socket.socket, done: threading.Event) -> None:
        self.connection = connection
        self._done = done

    def stay_open(self) -> None:
        """Stay open until the test is over."""
        assert self._done.wait(DEADLINE)

    def send(self, *parts: bytes) -> None:
        self.connection.sendall(b"".join(parts))

    def read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            received = self.connection.recv(size - len(found))
            assert received, "the subscriber has closed"
            found += received
        return found

    def frame(self) -> tuple[int, bytes]:
        flags, size = self.read(2)
        return flags, self.read(size)

    def command(self) -> tuple[bytes, bytes]:
        flags, body = self.frame()
        assert flags == zmtp.COMMAND_FLAG
        name, data = body[1 : 1 + body[0]], body[1 + body[0] :]
        return name, data

    def is_closed(self) -> bool:
        """Wait until the subscriber closes the connection, and return True; fail after the deadline."""
        try:
            while self.connection.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """Yield a function that starts peers. They end after the test. A failure in a script fails the test."""
    opened: list[Peer] = []

    def start(*acts: Callable[[PeerConnection], None]) -> Peer:
        opened.append(Peer(*acts))
        return opened[-1]

    yield start
    for each in opened:
        each.close()
    for each in opened:
        if each.failure is not None:
            raise each.failure
