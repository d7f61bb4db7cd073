"""The loop around a subscriber that `tail` and `record` share, and what they say when it ends."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvevents.cli.command import NOTHING_ARRIVED, OK
from kvevents.cli.console import Console, Part, Span
from kvevents.cli.lines import plural, trust_style
from kvevents.cli.stopping import Stop
from kvevents.stream import Batch, DegradedReason, Delivery, Gap, Trust
from kvevents.subscriber import Subscriber

TURN: Final = 0.1
"""Seconds between looks at the clock, the signals and the reader of our output while nothing arrives."""
SETTLE: Final = 1.0
"""Seconds that a stream which is being proven has at the end, also after Ctrl-C; it takes milliseconds."""
QUIET: Final = 0.05
"""Seconds between two of those looks while batches come one by one."""


@dataclass(slots=True)
class Tally:
    """What one stream delivered."""

    batches: int = 0
    replayed: int = 0
    unreadable: int = 0
    """Batches of which something could not be read."""
    gaps: int = 0
    lost: int = 0
    compacted: int = 0
    """Batches that a snapshot represents: nothing is lost."""
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


class Following:
    """Deliveries of `subscriber` until a limit of the command line is reached, or `stop` is requested."""

    def __init__(self, subscriber: Subscriber, args: Namespace, stop: Stop) -> None:
        self.tallies: dict[tuple[str, int], Tally] = {}
        self._subscriber = subscriber
        self._stop = stop
        self._idle: float | None = args.idle_timeout
        self._heard_at = time.monotonic()
        self._until = None if args.duration is None else stop.began + args.duration

    @property
    def batches(self) -> int:
        """Batches delivered so far, by all streams."""
        return sum(tally.batches for tally in self.tallies.values())

    @property
    def silent(self) -> bool:
        """Whether nothing was ever delivered and that is why it ended."""
        return not self.tallies and self._idle is not None and not self._stop.requested

    def __iter__(self) -> Iterator[Delivery | None]:
        """Deliveries in order; None now and then while nothing is waiting."""
        quiet_at = 0.0
        while not self._over(now := time.monotonic()):
            delivery = self._subscriber.receive(timeout=0)
            if delivery is None and now >= quiet_at:
                quiet_at = now + QUIET
                yield None
            delivery = delivery or self._subscriber.receive(timeout=TURN)
            if delivery is not None:
                self._heard_at = time.monotonic()
                self.tallies.setdefault((delivery.source, delivery.rank), Tally()).add(delivery)
                yield delivery

    def _over(self, now: float) -> bool:
        if self._stop.requested or (self._until is not None and now >= self._until):
            return True
        return self._idle is not None and now >= self._heard_at + self._idle

    def summarize(self, console: Console) -> int:
        """Say how each stream ended; returns the exit code."""
        self._let_settle()
        for status in self._subscriber.statuses():
            tally = self.tallies.get((status.source, status.rank), Tally())
            console.note(*_summary(f"{status.source}/{status.rank}", tally, status.trust))
            if (
                status.trust == Trust.DEGRADED
                and status.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
                and not status.counters.live
            ):
                console.note("nothing came live: send the engine a request; the next batch confirms the replay endpoint")
        if not self.silent:
            return OK
        return nothing_arrived(self._subscriber.statuses()[0].endpoint, self._idle or 0.0, console)

    def _let_settle(self) -> None:
        """The last batch may have come before it was known what to think of it; what else comes meanwhile is not asked for."""
        until = time.monotonic() + SETTLE
        while time.monotonic() < until:  # a second signal interrupts
            if all(status.trust != Trust.REPLAYING for status in self._subscriber.statuses()):
                return
            self._subscriber.receive(timeout=TURN)


def nothing_arrived(endpoint: str, idle: float, console: Console) -> int:
    """Say that `--idle-timeout` ended a wait in vain; returns the exit code."""
    console.note(Span(f"nothing arrived within {idle:g} s; `kvevents doctor {endpoint}` finds out why", "warn"))
    return NOTHING_ARRIVED


def _summary(stream: str, tally: Tally, trust: Trust) -> list[Part]:
    parts: list[Part] = [Span(f"{stream}: ", "name"), f"{plural(tally.batches, 'batch')}, {tally.replayed} replayed, "]
    lost = f"{plural(tally.gaps, 'gap')}, {tally.lost} lost, "
    parts += [Span(lost, "bad") if tally.gaps else lost, f"{plural(tally.resets, 'reset')}, "]
    if tally.compacted:
        parts.append(f"a snapshot of {plural(tally.compacted, 'older batch')}, ")
    if tally.unreadable:
        parts.append(Span(f"{tally.unreadable} not fully readable, ", "warn"))
    return [*parts, "trust ", Span(str(trust), trust_style(trust))]


class TrustWatch:
    """Tells changes of trust. To be asked when nothing waits: trust is ahead of deliveries that wait."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self._known: dict[tuple[str, int], str] = {}

    def changes(self) -> list[tuple[str, int, Trust]]:
        """Streams whose trust, or the reason for it, is another than when last asked."""
        changed: list[tuple[str, int, Trust]] = []
        for status in self._subscriber.statuses():
            key, text = (status.source, status.rank), str(status.trust)
            if self._known.get(key) != text:
                self._known[key] = text
                changed.append((*key, status.trust))
        return changed
