"""Ports for servers that need a fixed port."""

from __future__ import annotations

import random
import socket
from typing import Final

LOOPBACK: Final = "127.0.0.1"
_PORTS: Final = range(15_000, 32_000)
"""Below those that systems give to outgoing connections: while a server is down nobody else gets its port, not even a client
that tries to reach it, which could otherwise reach itself."""
_CHOICE: Final = random.SystemRandom()
"""Tests run in several processes, which must not choose alike."""


def quiet_port() -> int:
    """A port that nobody listens at, and that no system gives away by itself."""
    while True:
        port = _CHOICE.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        return port
