"""A relay in a process of its own, as one hop of a chain."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from kvevents.relay import Relay, RelayLimits, RelaySettings
from kvevents.relay.journal import JournalLimits
from kvevents.stream import Source
from kvevents.subscriber import ZmqTransport
from tests.system.chaos_kit.timeouts import FAST_LIMITS, FAST_SOCKET_OPTIONS

RECEIVE_SECONDS: Final = 0.05
SHORT_LIMITS: Final = RelayLimits(stream=FAST_LIMITS, snapshot_retry_interval=0.1, journal=JournalLimits(compact_bytes=20_000))
"""Limits for short rounds: the relay gives up on its upstream sooner, and compacts its journal in most rounds."""


@dataclass(frozen=True, slots=True)
class Hop:
    """The settings of a relay, without its endpoints and its upstream."""

    journal: bool = True
    heartbeat: float = 0.2
    """Never None: without heartbeats, a relay cannot report its own trust to its consumers."""
    dialect: str | None = None
    tokens: str = "keep"
    buffer_steps: int = 10_000
    has_short_timeouts: bool = True

    def settings(self, source: Source, endpoint: str, replay_endpoint: str, journal: str) -> RelaySettings:
        return RelaySettings(
            upstreams=(source,),
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            dialect=self.dialect,
            tokens="hash" if self.tokens == "hash" else "keep",
            buffer_steps=self.buffer_steps,
            heartbeat=self.heartbeat,
            journal=journal if self.journal else None,
        )


def run(pipe: Connection, settings: RelaySettings, has_short_timeouts: bool) -> None:
    """Run the process: send the status for each message in the pipe, until the pipe is closed."""
    options: dict[str, Any] = (
        {"limits": SHORT_LIMITS, "transport": ZmqTransport(options=FAST_SOCKET_OPTIONS)} if has_short_timeouts else {}
    )
    with suppress(EOFError, BrokenPipeError), Relay(settings, **options) as running:
        pipe.send("open")
        while True:
            running.turn(RECEIVE_SECONDS)
            while pipe.poll():
                pipe.recv()
                pipe.send(repr(running.status()))
