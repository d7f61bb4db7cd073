"""A service looked at again and again: frames, with what only two looks can tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from kvevents.cli.client import UNAVAILABLE, AskError, ServiceClient
from kvevents.service.schemas import ReadyAnswer, SourceView, StatsAnswer


class Source(SourceView, frozen=True, kw_only=True):
    """One source, and what two looks tell of it."""

    rate: float | None = None
    """Batches per second since the look before; None at the first one."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What tells it apart."""
        return self.tenant, self.group, self.instance, self.rank


class Sources(msgspec.Struct, frozen=True):
    """What `/v1/sources` answers."""

    sources: list[Source]
    faults: dict[str, list[str]]


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One look. `docs/cli.md` documents the keys; they are a promise."""

    at: float
    """Seconds since the epoch."""
    service: str
    error: str | None = None
    """Why the service could not be asked; nothing below is told then."""
    away_since: float | None = None
    """When that began."""
    ready: ReadyAnswer | None = None
    stats: StatsAnswer | None = None
    lookups_per_second: float | None = None
    """Since the look before; None at the first one."""
    sources: list[Source] = msgspec.field(default_factory=list)
    faults: dict[str, list[str]] = msgspec.field(default_factory=dict)


_WORST_FIRST: Final = ("STALE", "CONNECTING", "DEGRADED", "REPLAYING", "EXACT")
_ORDERS: Final[dict[str, Callable[[Source], Any]]] = {
    "trust": lambda source: (_WORST_FIRST.index(source.trust.state), source.fault is None, -source.lost),
    "name": lambda source: source.key,
    "blocks": lambda source: -source.blocks,
    "rate": lambda source: -(source.rate or 0.0),
    "lag": lambda source: -abs(source.lag_seconds or 0.0),
    "age": lambda source: source.last_event or 0.0,
    "lost": lambda source: -source.lost,
}
ORDERS: Final = tuple(_ORDERS)
"""What sources can be sorted by; what an operator looks for comes first."""


def in_order(sources: Sequence[Source], order: str) -> list[Source]:
    """Sources sorted; equal ones by name."""
    return sorted(sources, key=lambda source: (_ORDERS[order](source), source.key))


class Watch:
    """Takes frames of one service. Rates are between the last two looks that succeeded."""

    def __init__(self, client: ServiceClient, order: str, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._order = order
        self._clock = clock
        self._before: Frame | None = None
        self._away_since: float | None = None

    def look(self) -> Frame:
        """What is there now. Raises `AskError`."""
        ready = self._client.get("/readyz", ReadyAnswer, status=UNAVAILABLE)
        stats = self._client.get("/v1/stats", StatsAnswer)
        told = self._client.get("/v1/sources", Sources)
        frame = self._compared(
            Frame(
                at=self._clock(), service=self._client.url, ready=ready, stats=stats, sources=told.sources, faults=told.faults
            )
        )
        self._before, self._away_since = frame, None
        return frame

    def look_anyhow(self) -> Frame:
        """The same; a frame with an error where the service cannot be asked."""
        try:
            return self.look()
        except AskError as problem:
            now = self._clock()
            self._away_since = self._away_since or now
            return Frame(at=now, service=self._client.url, error=str(problem), away_since=self._away_since)

    def _compared(self, frame: Frame) -> Frame:
        before = self._before
        seconds = frame.at - before.at if before is not None else 0.0
        if before is None or before.stats is None or frame.stats is None or seconds <= 0:
            return msgspec.structs.replace(frame, sources=in_order(frame.sources, self._order))
        batches = {source.key: source.batches for source in before.sources}
        sources = [
            msgspec.structs.replace(source, rate=_rate(batches.get(source.key), source.batches, seconds))
            for source in frame.sources
        ]
        return msgspec.structs.replace(
            frame,
            sources=in_order(sources, self._order),
            lookups_per_second=_rate(before.stats.lookups, frame.stats.lookups, seconds),
        )


def _rate(before: int | None, now: int, seconds: float) -> float | None:
    """Per second; None where counting has begun anew."""
    return None if before is None or now < before else (now - before) / seconds
