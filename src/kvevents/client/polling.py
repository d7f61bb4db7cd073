"""Polls a service, as `kvevents top` does, and derives rates from consecutive polls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from kvevents.client.protocol import ServiceRequestError
from kvevents.client.schemas import ReadyAnswer, SourceView, StatsAnswer
from kvevents.client.sync import Client


class PolledSource(SourceView, frozen=True, kw_only=True):
    """One source in a poll, with the rate of its batches."""

    rate: float | None = None
    """Batches per second since the previous poll; None in the first poll."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Return the key that identifies the source."""
        return self.tenant, self.group, self.instance, self.rank


class PolledSources(msgspec.Struct, frozen=True):
    """The response to `/v1/sources`."""

    sources: list[PolledSource]
    faults: dict[str, list[str]]


class PollResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one poll. The page `reference/cli.md` of the documentation has the keys; programs rely on them."""

    at: float
    """Time of the poll, in seconds since the epoch."""
    service: str
    error: str | None = None
    """Why the poll failed; None if the poll succeeded. After a failed poll, the fields from `ready` on are empty."""
    failing_since: float | None = None
    """Time of the first of the consecutive failed polls, in seconds since the epoch; None if the poll succeeded."""
    ready: ReadyAnswer | None = None
    stats: StatsAnswer | None = None
    lookups_per_second: float | None = None
    """Lookups per second since the previous poll; None in the first poll."""
    sources: list[PolledSource] = msgspec.field(default_factory=list)
    faults: dict[str, list[str]] = msgspec.field(default_factory=dict)


_STATES_WORST_FIRST: Final = ("STALE", "CONNECTING", "DEGRADED", "REPLAYING", "EXACT")
SOURCE_ORDERS: Final[dict[str, Callable[[PolledSource], Any]]] = {
    "trust": lambda source: (_STATES_WORST_FIRST.index(source.trust.state), source.fault is None, -source.lost),
    "name": lambda source: source.key,
    "blocks": lambda source: -source.blocks,
    "rate": lambda source: -(source.rate or 0.0),
    "lag": lambda source: -abs(source.lag_seconds or 0.0),
    "age": lambda source: source.last_event or 0.0,
    "lost": lambda source: -source.lost,
}
"""Sort orders of sources. Each order begins with the sources that an operator looks for."""


def sort_sources(sources: Sequence[PolledSource], order: str) -> list[PolledSource]:
    """Return the sources sorted by `order`, and then by name."""
    return sorted(sources, key=lambda source: (SOURCE_ORDERS[order](source), source.key))


class Poller:
    """Polls one service. A rate is the average between two consecutive successful polls."""

    def __init__(self, client: Client, order: str) -> None:
        self._client = client
        self._order = order
        self._previous: PollResult | None = None
        self._failing_since: float | None = None

    def poll(self) -> PollResult:
        """Poll the service. Raises `ServiceRequestError`."""
        ready = self._client.ready()
        stats = self._client.get("/v1/stats", StatsAnswer)
        answer = self._client.get("/v1/sources", PolledSources)
        at, previous, sources, lookups = time.time(), self._previous, answer.sources, None
        if previous is not None and previous.stats is not None and at > previous.at:
            seconds, batches = at - previous.at, {source.key: source.batches for source in previous.sources}
            rates = (_rate_of(batches.get(source.key), source.batches, seconds) for source in sources)
            sources = [msgspec.structs.replace(source, rate=rate) for source, rate in zip(sources, rates, strict=True)]
            lookups = _rate_of(previous.stats.lookups, stats.lookups, seconds)
        self._failing_since = None
        self._previous = PollResult(
            at=at,
            service=self._client.url,
            ready=ready,
            stats=stats,
            lookups_per_second=lookups,
            sources=sort_sources(sources, self._order),
            faults=answer.faults,
        )
        return self._previous

    def poll_or_error(self) -> PollResult:
        """Poll the service. If the poll fails, return a result with the error."""
        try:
            return self.poll()
        except ServiceRequestError as problem:
            now = time.time()
            self._failing_since = self._failing_since or now
            return PollResult(at=now, service=self._client.url, error=str(problem), failing_since=self._failing_since)


def _rate_of(previous: int | None, current: int, seconds: float) -> float | None:
    """Return the rate per second at which a counter grew; None without a former value, or if the counter has restarted."""
    return None if previous is None or current < previous else (current - previous) / seconds
