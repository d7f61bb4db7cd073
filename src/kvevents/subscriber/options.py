"""Limits and times of sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """Limits and times of the sockets of one stream."""

    receive_hwm: int = 100_000
    """Live messages that wait in the socket while the application is busy, 0 for no limit. Beyond it the publisher drops
    messages, which replay brings."""
    max_message_bytes: int = 256 * 1024 * 1024
    """A larger message ends the connection: eight times what the decoder accepts, so only abuse reaches it."""
    reconnect_ms: int = 100
    reconnect_max_ms: int = 5_000
    """Pause between attempts to connect: doubles, jittered, up to this."""
    heartbeat_ms: int = 5_000
    handshake_ms: int = 5_000
    """A peer that accepts a connection and says nothing for this long is tried anew; libzmq itself waits 30 s."""
    heartbeat_timeout_ms: int = 15_000
    """A peer that answers no ping for this long is disconnected: half-open connections end here."""
    keepalive_idle_s: int = 30


DEFAULT_SOCKET_OPTIONS: Final = SocketOptions()
