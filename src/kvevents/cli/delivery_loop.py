"""The loop around a subscriber that `tail` and `record` share, and the summary at its end."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvevents.cli.command import NOTHING_ARRIVED, OK
from kvevents.cli.console import Console, Part, Span, plural
from kvevents.cli.event_format import trust_style
from kvevents.cli.process import StopSignal
from kvevents.stream import Batch, DegradedReason, Delivery, Gap, Trust
from kvevents.subscriber import Subscriber

POLL_SECONDS: Final = 0.1
"""Seconds between checks of the clock, the signals and the reader of the output while nothing arrives."""
BUSY_POLL_SECONDS: Final = 0.05
"""Seconds between these checks while batches arrive one by one."""
SETTLE_SECONDS: Final = 1.0
"""Time at the end, also after Ctrl-C, for streams that are still REPLAYING. They need milliseconds."""


@dataclass(slots=True)
class StreamTotals:
    """Counts of what one stream delivered."""

    batches: int = 0
    replayed: int = 0
    unreadable: int = 0
    """Batches with a part that could not be decoded."""
    gaps: int = 0
    lost: int = 0
    compacted: int = 0
    """Batches that a snapshot represents, so nothing of them is lost."""
    resets: int = 0

    def add(self, delivery: Delivery) -> None:
        """Count one delivery."""
        if isinstance(delivery, Batch):
            self.batches += 1
            self.replayed += delivery.replayed
            self.unreadable += bool(delivery.rejected)
        elif isinstance(delivery, Gap) and delivery.compacted:
            self.compacted += delivery.last - delivery.first + 1
        elif isinstance(delivery, Gap):
            self.gaps += 1
            self.lost += delivery.last - delivery.first + 1
        else:
            self.resets += 1


class DeliveryLoop:
    """Iterates over the deliveries of a subscriber until a limit of the command line is reached or a signal comes."""

    def __init__(self, subscriber: Subscriber, args: Namespace, stop: StopSignal) -> None:
        self.totals: dict[tuple[str, int], StreamTotals] = {}
        self._subscriber = subscriber
        self._stop = stop
        self._idle_timeout: float | None = args.idle_timeout
        self._delivered_at = time.monotonic()
        self._until = None if args.duration is None else stop.began + args.duration

    @property
    def batches(self) -> int:
        """Batches of all streams so far."""
        return sum(totals.batches for totals in self.totals.values())

    def __iter__(self) -> Iterator[Delivery | None]:
        """Yield deliveries in order, and None from time to time while no delivery waits."""
        idle_at = 0.0
        while not self._is_over(now := time.monotonic()):
            delivery = self._subscriber.receive(timeout=0)
            if delivery is None and now >= idle_at:
                idle_at = now + BUSY_POLL_SECONDS
                yield None
            delivery = delivery or self._subscriber.receive(timeout=POLL_SECONDS)
            if delivery is not None:
                self._delivered_at = time.monotonic()
                self.totals.setdefault((delivery.source, delivery.rank), StreamTotals()).add(delivery)
                yield delivery

    def _is_over(self, now: float) -> bool:
        if self._stop.requested or (self._until is not None and now >= self._until):
            return True
        return self._idle_timeout is not None and now >= self._delivered_at + self._idle_timeout

    def print_summary(self, console: Console) -> int:
        """Print a note about each stream, and return the exit code."""
        self._settle()
        for status in self._subscriber.statuses():
            totals = self.totals.get((status.source, status.rank), StreamTotals())
            console.note(*_summary(f"{status.source}/{status.rank}", totals, status.trust))
            if (
                status.trust == Trust.DEGRADED
                and status.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
                and not status.counters.live
            ):
                console.note("nothing came live: send the engine a request; the next batch confirms the replay endpoint")
        if self.totals or self._idle_timeout is None or self._stop.requested:
            return OK
        endpoint = self._subscriber.statuses()[0].endpoint
        text = f"nothing arrived within {self._idle_timeout:g} s; `kvevents doctor {endpoint}` finds out why"
        console.note(Span(text, "warn"))
        return NOTHING_ARRIVED

    def _settle(self) -> None:
        """Wait until the trust after the last batch is known. Discard deliveries that arrive meanwhile."""
        until = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:  # a second signal interrupts
            if all(status.trust != Trust.REPLAYING for status in self._subscriber.statuses()):
                return
            self._subscriber.receive(timeout=POLL_SECONDS)


def _summary(stream: str, totals: StreamTotals, trust: Trust) -> list[Part]:
    parts: list[Part] = [Span(f"{stream}: ", "name"), f"{plural(totals.batches, 'batch')}, {totals.replayed} replayed, "]
    lost = f"{plural(totals.gaps, 'gap')}, {totals.lost} lost, "
    parts += [Span(lost, "bad") if totals.gaps else lost, f"{plural(totals.resets, 'reset')}, "]
    if totals.compacted:
        parts.append(f"a snapshot of {plural(totals.compacted, 'older batch')}, ")
    if totals.unreadable:
        parts.append(Span(f"{totals.unreadable} not fully readable, ", "warn"))
    return [*parts, "trust ", Span(str(trust), trust_style(trust))]


class TrustChanges:
    """Detects changes of trust. Call `poll` while no delivery waits, since trust is ahead of waiting deliveries."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self._known: dict[tuple[str, int], str] = {}

    def poll(self) -> list[tuple[str, int, Trust]]:
        """Return source, rank and trust of the streams whose trust, or its reason, has changed since the last call."""
        changed: list[tuple[str, int, Trust]] = []
        for status in self._subscriber.statuses():
            key, text = (status.source, status.rank), str(status.trust)
            if self._known.get(key) != text:
                self._known[key] = text
                changed.append((*key, status.trust))
        return changed
