"""A relay in a process of its own, as one hop of a chain."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from kvevents.relay import Relay, RelayLimits, RelaySettings
from kvevents.relay.journal import JournalLimits
from kvevents.stream import Source
from kvevents.subscriber import ZmqTransport
from tests.system.chaos.consumer import BRISK, BRISK_SOCKETS, NAME
from tests.system.chaos.parts import START_SECONDS, Part

TURN_SECONDS: Final = 0.05
SHORT_LIMITS: Final = RelayLimits(stream=BRISK, snapshot_retry_interval=0.1, journal=JournalLimits(compact_bytes=20_000))
"""A round is short: the relay gives up on its upstream sooner, and writes a snapshot of its journal in most rounds."""


@dataclass(frozen=True, slots=True)
class Hop:
    """The settings of a relay without its endpoints and its upstream."""

    journal: bool = True
    heartbeat: float = 0.2
    """Never None: without it, a relay cannot say how far it trusts its batches, and its consumers are exact as it is."""
    dialect: str | None = None
    tokens: str = "keep"
    buffer_steps: int = 10_000
    brisk: bool = True

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


class Station:
    """A relay that is stopped, killed and started again at the same place. `part` makes its process."""

    def __init__(self, hop: Hop, settings: RelaySettings, part: Callable[..., Part]) -> None:
        self._hop = hop
        self._settings = settings
        self._part = part
        self._running: Part | None = None
        self.starts = 0
        self.start()

    @property
    def is_alive(self) -> bool:
        return self._running is not None and self._running.is_alive

    def start(self) -> None:
        """Begin, or come back; nothing when it is there."""
        if self.is_alive:
            return
        self.starts += 1
        self._running = self._part("relay", run, self._settings, self._hop.brisk)
        self._running.receive(START_SECONDS)

    def stop(self) -> None:
        if self._running is not None and self.is_alive:
            self._running.stop()

    def go_on(self) -> None:
        if self._running is not None:
            self._running.go_on()

    def kill(self) -> None:
        if self._running is not None:
            self._running.kill()

    def status(self) -> str:
        """As a person would read it."""
        assert self._running is not None
        return str(self._running.ask())


def run(pipe: Connection, settings: RelaySettings, brisk: bool) -> None:
    """The process: any message is a question; when the pipe ends, so does it."""
    options: dict[str, Any] = {"limits": SHORT_LIMITS, "transport": ZmqTransport(options=BRISK_SOCKETS)} if brisk else {}
    with suppress(EOFError, BrokenPipeError), Relay(settings, **options) as running:
        pipe.send("open")
        while True:
            running.turn(TURN_SECONDS)
            while pipe.poll():
                pipe.recv()
                pipe.send(repr(running.status()))


def source(endpoint: str, replay_endpoint: str | None, topic: str) -> Source:
    """What a relay listens to."""
    return Source(endpoint, replay_endpoint, topic, NAME)
