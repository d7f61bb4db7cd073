"""Shorter timeouts than those of production networks, so that a round is short."""

from __future__ import annotations

from typing import Final

from kvevents.stream import StreamLimits
from kvevents.subscriber import SocketOptions

FAST_LIMITS: Final = StreamLimits(replay_timeout=0.5, reply_idle_timeout=0.2, idle_before_probe=0.15, max_probe_interval=1.0)
FAST_SOCKET_OPTIONS: Final = SocketOptions(reconnect_ms=20, reconnect_max_ms=200, heartbeat_ms=150, heartbeat_timeout_ms=600)
