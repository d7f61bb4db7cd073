"""What both subscribers share: streams, their links, their timers. It never waits; the front ends do."""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic

from kvevents.backoff import MOST_SECONDS, Backoff
from kvevents.errors import ConfigError, EndpointError, UnknownSourceError
from kvevents.stream import (
    Batch,
    Checkpoint,
    Doubt,
    Findings,
    Gap,
    RawBatch,
    Reset,
    Source,
    Stream,
    StreamCounters,
    StreamLimits,
    Trust,
)
from kvevents.stream.deliveries import B
from kvevents.subscriber.transport import Link, Transport
from kvevents.wire import decode_batch

log = logging.getLogger(__name__)

MESSAGES_PER_TURN: Final = 32
"""Messages read from one stream before the next gets its turn; more of them at once fall out of the processor's cache."""
RAW_MESSAGES_PER_TURN: Final = 256
"""The same where they are not decoded: they are far smaller then, and the cost of a turn itself counts for more."""
DEFAULT_CONCURRENT_REPLAYS: Final = 64
"""Replays at one time in one process: an engine's full buffer may be 100 MB, and a fleet reconnects all at once."""


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """One stream as an operator sees it."""

    source: str
    rank: int
    endpoint: str
    trust: Trust
    doubts: frozenset[Doubt]
    incarnation: int
    last_seq: int
    """Number of the newest batch delivered or given up; -1 before the first."""
    waiting: int
    """Batches held back because an earlier one is missing."""
    counters: StreamCounters
    error: str = ""
    """Why there is no connection, or no request for replay, as far as that is known; it is retried. "" if nothing is wrong."""


class _Entry:
    """A stream with its link and timer, and what it has delivered since all of it was last handed out."""

    __slots__ = (
        "backoff",
        "before",
        "delivered",
        "error",
        "first_incarnation",
        "known_trust",
        "link",
        "opened_at",
        "resumed",
        "retry_at",
        "stream",
        "timer",
        "waits_for_turn",
    )

    def __init__(self, stream: Stream[Any], link: Link, first_incarnation: int) -> None:
        self.stream = stream
        self.link: Link | None = link
        """None between a failure and the next attempt, which is due at `retry_at`."""
        self.retry_at = self.opened_at = float("-inf")
        self.backoff = Backoff()
        self.error = ""
        self.first_incarnation = first_incarnation
        """The first one that is of no earlier follow of the source, except `resumed`, with which this one goes on."""
        self.resumed = stream.incarnation
        self.all_handed_out()
        self.timer: float | None = None
        self.waits_for_turn = False
        self.known_trust: tuple[str, str] = ("", "")
        """State and reason that `Hub.trust_changes` returned last."""

    def all_handed_out(self) -> None:
        self.before = self.stream.standing()
        self.delivered: list[Any] = []

    @property
    def label(self) -> str:
        """The stream's name in the log."""
        return f"{self.stream.source.label} rank {self.stream.source.rank}"

    @property
    def trust(self) -> Trust:
        """The stream's trust; its reason names what is wrong with its connections, if that is known."""
        trust, fault = self.stream.trust, self.fault
        return trust.because(f"{trust.reason}; {fault}" if trust.reason else fault) if fault else trust

    @property
    def fault(self) -> str:
        """What is wrong with the connections."""
        return self.error or ("" if self.link is None else self.link.fault)

    def deadline(self) -> float | None:
        """When the stream or its connections are due."""
        own = self.retry_at if self.link is None else self.link.deadline()
        due = self.stream.deadline()
        return due if own is None else own if due is None else min(due, own)

    def status(self) -> StreamStatus:
        """The stream as an operator sees it."""
        stream, source = self.stream, self.stream.source
        return StreamStatus(
            source=source.label,
            rank=source.rank,
            endpoint=source.endpoint,
            trust=self.trust,
            doubts=stream.doubts,
            incarnation=stream.incarnation,
            last_seq=stream.last_seq,
            waiting=stream.waiting,
            counters=stream.counters.copy(),
            error=self.fault,
        )

    def checkpoint(self, waiting: Container[int]) -> Checkpoint:
        """As of what was handed out; `waiting` are the ids of deliveries that were not."""
        standing = self.stream.standing()
        handed_out = [delivery for delivery in self.delivered if id(delivery) not in waiting]
        if len(handed_out) < len(self.delivered):
            standing = self.before.after(handed_out, standing)
        return standing.checkpoint(self.stream.source.label, self.stream.source.rank)


class Hub(Generic[B]):
    """All streams of one subscriber.

    What fails of one stream concerns that stream alone. A link that raises `EndpointError` is closed, its stream is told that
    it is disconnected, and the link is opened again after a pause. A replay request that could not be sent counts as one that
    nothing answers, which the stream repeats.
    """

    def __init__(self, transport: Transport, limits: StreamLimits, max_concurrent_replays: int, *, decode: bool) -> None:
        if max_concurrent_replays < 1:
            raise ConfigError(f"max_concurrent_replays is {max_concurrent_replays}; it must be at least 1")
        self.transport = transport
        self.ready: deque[B | Reset | Gap] = deque()
        """What waits for the application. A turn is taken only when it is empty, so one turn's worth is its limit."""
        self._limits = limits
        self._decode = decode_batch if decode else None
        self._per_turn = MESSAGES_PER_TURN if decode else RAW_MESSAGES_PER_TURN
        self._max_replays = max_concurrent_replays
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._by_link: dict[Link, _Entry] = {}
        self._delivering: set[_Entry] = set()
        self._hungry: dict[_Entry, None] = {}
        """A set that keeps its order, so that equal inputs give equal runs."""
        self._touched: dict[_Entry, None] = {}
        """Streams that something has happened to since `trust_changes`."""
        self._timers: list[tuple[float, int, _Entry]] = []
        self._tie = 0
        self._unused_incarnation = 0
        """No source that was removed has had this incarnation or a later one."""
        self._replaying: set[_Entry] = set()
        self._queue: deque[_Entry] = deque()

    # --- sources

    def add(self, source: Source, resume: Checkpoint | None) -> None:
        """Start following `source`, or go on with it."""
        key = (source.label, source.rank)
        if key in self._entries:
            raise ConfigError(f"source {source.label!r} rank {source.rank} is given twice; names and ranks must differ")
        first = self._unused_incarnation
        stream = Stream(source, self._limits, decode=self._decode, first_incarnation=first)
        if resume is not None:
            stream.restore(resume)
        link = self.transport.open(source)
        self._entries[key] = self._by_link[link] = entry = _Entry(stream, link, first)
        self._hungry[entry] = self._touched[entry] = None

    def remove(self, name: str, rank: int) -> None:
        """Stop following a source."""
        entry = self._entry(name, rank)
        del self._entries[name, rank]
        self._unused_incarnation = max(self._unused_incarnation, entry.stream.incarnation + 1)
        self._hungry.pop(entry, None)
        self._touched.pop(entry, None)
        self._delivering.discard(entry)
        if entry.waits_for_turn:
            self._queue.remove(entry)
        self._close_link(entry)

    def _entry(self, name: str | None, rank: int) -> _Entry:
        if name is None and len(self._entries) == 1:
            return next(iter(self._entries.values()))
        entry = self._entries.get((name or "", rank))
        if entry is None:
            known = ", ".join(f"{label} rank {number}" for label, number in self._entries) or "none"
            raise UnknownSourceError(f"no source {name!r} with rank {rank}; known: {known}")
        return entry

    def status(self, name: str | None, rank: int) -> StreamStatus:
        """State of one stream."""
        return self._entry(name, rank).status()

    def statuses(self) -> list[StreamStatus]:
        """State of all streams, in the order in which they were added."""
        return [entry.status() for entry in self._entries.values()]

    def checkpoint(self, name: str | None, rank: int) -> Checkpoint:
        """What to keep of one stream."""
        return self._entry(name, rank).checkpoint({id(delivery) for delivery in self.ready})

    def checkpoints(self) -> list[Checkpoint]:
        """What to keep of all streams, in the order in which they were added."""
        waiting = {id(delivery) for delivery in self.ready}
        return [entry.checkpoint(waiting) for entry in self._entries.values()]

    def trust(self, name: str | None, rank: int) -> Trust:
        """Trust of one stream."""
        return self._entry(name, rank).trust

    def trust_changes(self) -> list[tuple[tuple[str, int], Trust]]:
        """Streams whose trust or its reason is another than this returned last."""
        touched, self._touched = self._touched, {}
        found = []
        for entry in touched:
            trust = entry.trust
            if entry.known_trust != (known := (trust.name, trust.reason)):
                entry.known_trust = known
                found.append(((entry.stream.source.label, entry.stream.source.rank), trust))
        return found

    def report(self, delivery: Batch | RawBatch | Reset | Gap, findings: Findings) -> None:
        """What a consumer found in a batch; nothing that is of an earlier follow of its source."""
        entry = self._entries.get((delivery.source, delivery.rank))
        if entry is None or not isinstance(delivery, Batch | RawBatch):
            return
        if delivery.incarnation < entry.first_incarnation and delivery.incarnation != entry.resumed:
            return
        entry.stream.report(delivery, findings)
        self._touched[entry] = None
        if findings.heartbeat is not None or findings.agrees is not None:
            # It may have brought a delivery, a request or a deadline, for which the next turn looks.
            self._hungry[entry] = None

    # --- time

    def timeout(self, now: float) -> float | None:
        """Seconds until something is due; None when nothing is."""
        if self._hungry or (self._queue and len(self._replaying) < self._max_replays):
            return 0.0
        longest = self.transport.max_pause
        if not self._timers:
            return longest
        due = max(0.0, self._timers[0][0] - now)
        return due if longest is None else min(due, longest)

    def turn(self, links: Iterable[Link], now: float) -> None:
        """Read from links that have something, and do what is due."""
        if not self.ready:
            for delivering in self._delivering:
                delivering.all_handed_out()
            self._delivering.clear()
        self._hungry.update((entry, None) for link in links if (entry := self._by_link.get(link)) is not None)
        hungry = list(self._hungry)
        self._touched.update(self._hungry)
        for entry in hungry:
            # One by one: were anything raised that is no EndpointError, those behind it would still be there.
            del self._hungry[entry]
            self._pump(entry, now)
            self._serve(entry, now)
        while self._timers and self._timers[0][0] <= now:
            due, _, entry = heapq.heappop(self._timers)
            if entry.timer != due:
                # An earlier one has taken its place. To go on from here as well would keep both, for as long as gaps come.
                continue
            entry.timer = None
            if self._entries.get((entry.stream.source.label, entry.stream.source.rank)) is entry:
                entry.stream.tick(now)
                self._touched[entry] = None
                self._pump_if_due(entry, now)
                self._serve(entry, now)
        self._start_waiting_replays(now)

    def take(self, limit: int | None) -> list[B | Reset | Gap]:
        """What is ready, at most `limit` of it, in order."""
        ready = self.ready
        if limit is not None and limit < len(ready):
            return [ready.popleft() for _ in range(limit)]
        taken = list(ready)
        ready.clear()
        return taken

    def _serve(self, entry: _Entry, now: float) -> None:
        """Take from a stream what feeding it has brought."""
        deliveries = entry.stream.deliveries()
        if deliveries:
            self.ready.extend(deliveries)
            entry.delivered += deliveries
            self._delivering.add(entry)
        if entry.stream.asking:
            self._ask(entry, now)
        elif entry in self._replaying:
            self._replaying.discard(entry)
            if entry.link is not None:
                entry.link.end_replay()
                entry.error = ""
        self._schedule(entry)

    def _ask(self, entry: _Entry, now: float) -> None:
        if entry not in self._replaying:
            if len(self._replaying) >= self._max_replays:
                if not entry.waits_for_turn:
                    entry.waits_for_turn = True
                    self._queue.append(entry)
                return
            self._replaying.add(entry)
        ask = entry.stream.ask(now)
        self._touched[entry] = None
        if ask is not None and entry.link is not None:
            try:
                entry.link.send(ask)
            except EndpointError as error:
                self._note(entry, f"replay cannot be requested: {error}")
            else:
                entry.error = ""
            # Sending may swallow the signal of something that arrived meanwhile.
            self._hungry[entry] = None

    def _start_waiting_replays(self, now: float) -> None:
        while self._queue and len(self._replaying) < self._max_replays:
            following = self._queue.popleft()
            waited, following.waits_for_turn = following.waits_for_turn, False
            if waited and following.stream.asking:
                self._ask(following, now)
                self._schedule(following)

    def _schedule(self, entry: _Entry) -> None:
        due = entry.deadline()
        if due is not None and (entry.timer is None or due < entry.timer):
            entry.timer = due
            self._tie += 1
            heapq.heappush(self._timers, (due, self._tie, entry))

    # --- links, and what fails

    def _pump(self, entry: _Entry, now: float) -> None:
        if entry.link is None:
            return
        try:
            if entry.link.pump(entry.stream, now, self._per_turn):
                self._hungry[entry] = None
        except EndpointError as error:
            if now - entry.opened_at > MOST_SECONDS:
                entry.backoff.reset()
            self._close_link(entry)
            entry.stream.disconnected()
            self._fail(entry, str(error), now)

    def _pump_if_due(self, entry: _Entry, now: float) -> None:
        if entry.link is None:
            if entry.retry_at <= now:
                self._open_again(entry, now)
        elif (due := entry.link.deadline()) is not None and due <= now:
            self._pump(entry, now)

    def _open_again(self, entry: _Entry, now: float) -> None:
        try:
            link = self.transport.open(entry.stream.source)
        except EndpointError as error:
            self._fail(entry, str(error), now)
            return
        log.info("%s: its connections are open again", entry.label)
        entry.link, entry.opened_at, entry.error = link, now, ""
        self._by_link[link] = entry
        self._hungry[entry] = None

    def _fail(self, entry: _Entry, error: str, now: float) -> None:
        entry.retry_at = now + entry.backoff.pause()
        self._note(entry, f"no connection: {error}")

    def _note(self, entry: _Entry, error: str) -> None:
        """Report an error, once for as long as it is the same."""
        if entry.error != error:
            entry.error = error
            log.warning("%s: %s; it is retried", entry.label, error)

    def _close_link(self, entry: _Entry) -> None:
        self._replaying.discard(entry)
        if entry.link is not None:
            del self._by_link[entry.link]
            entry.link.close()
            entry.link = None

    def close(self) -> None:
        """Close every link; idempotent."""
        for entry in self._entries.values():
            if entry.link is not None:
                entry.link.close()
        self.transport.close()

    def describe(self) -> str:
        """Streams by trust, for a repr: `3 streams, 2 EXACT, 1 STALE, 0 ready`."""
        states: dict[str, int] = {}
        for entry in self._entries.values():
            name = entry.trust.name
            states[name] = states.get(name, 0) + 1
        counts = "".join(f", {count} {name}" for name, count in sorted(states.items()))
        noun = "stream" if len(self._entries) == 1 else "streams"
        return f"{len(self._entries)} {noun}{counts}, {len(self.ready)} ready"
