"""What both subscribers share: streams, their links, their timers. It never waits; the front ends do."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic

from kvevents.errors import ConfigError, UnknownSourceError
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


class _Entry:
    """A stream with its link and timer, and what it has delivered since all of it was last handed out."""

    __slots__ = ("before", "delivered", "known_trust", "link", "stream", "timer", "waits_for_turn")

    def __init__(self, stream: Stream[Any], link: Link) -> None:
        self.stream = stream
        self.link = link
        self.all_handed_out()
        self.timer: float | None = None
        self.waits_for_turn = False
        self.known_trust = ("", "")
        """State and reason that `Hub.trust_changes` returned last."""

    def all_handed_out(self) -> None:
        self.before = self.stream.standing()
        self.delivered: list[Any] = []

    def checkpoint(self, waiting: Container[int]) -> Checkpoint:
        """As of what was handed out; `waiting` are the ids of deliveries that were not."""
        standing = self.stream.standing()
        handed_out = [delivery for delivery in self.delivered if id(delivery) not in waiting]
        if len(handed_out) < len(self.delivered):
            standing = self.before.after(handed_out, standing)
        return standing.checkpoint(self.stream.source.label, self.stream.source.rank)


class Hub(Generic[B]):
    """All streams of one subscriber."""

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
        self._replaying: set[_Entry] = set()
        self._queue: deque[_Entry] = deque()

    # --- sources

    def add(self, source: Source, resume: Checkpoint | None) -> None:
        """Start following `source`, or go on with it."""
        key = (source.label, source.rank)
        if key in self._entries:
            raise ConfigError(f"source {source.label!r} rank {source.rank} is given twice; names and ranks must differ")
        stream = Stream(source, self._limits, decode=self._decode)
        if resume is not None:
            stream.restore(resume)
        entry = _Entry(stream, self.transport.open(source))
        self._entries[key] = entry
        self._by_link[entry.link] = entry
        self._hungry[entry] = self._touched[entry] = None

    def remove(self, name: str, rank: int) -> None:
        """Stop following a source."""
        entry = self._entry(name, rank)
        del self._entries[name, rank]
        del self._by_link[entry.link]
        self._hungry.pop(entry, None)
        self._touched.pop(entry, None)
        self._replaying.discard(entry)
        self._delivering.discard(entry)
        entry.waits_for_turn = False
        entry.link.close()

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
        return _status(self._entry(name, rank).stream)

    def statuses(self) -> list[StreamStatus]:
        """State of all streams, in the order in which they were added."""
        return [_status(entry.stream) for entry in self._entries.values()]

    def checkpoint(self, name: str | None, rank: int) -> Checkpoint:
        """What to keep of one stream."""
        return self._entry(name, rank).checkpoint({id(delivery) for delivery in self.ready})

    def checkpoints(self) -> list[Checkpoint]:
        """What to keep of all streams, in the order in which they were added."""
        waiting = {id(delivery) for delivery in self.ready}
        return [entry.checkpoint(waiting) for entry in self._entries.values()]

    def trust(self, name: str | None, rank: int) -> Trust:
        """Trust of one stream."""
        return self._entry(name, rank).stream.trust

    def trust_changes(self) -> list[tuple[tuple[str, int], Trust]]:
        """Streams whose trust or its reason is another than this returned last."""
        touched, self._touched = self._touched, {}
        found = []
        for entry in touched:
            trust = entry.stream.trust
            if entry.known_trust != (known := (trust.name, trust.reason)):
                entry.known_trust = known
                found.append(((entry.stream.source.label, entry.stream.source.rank), trust))
        return found

    def report(self, delivery: Batch | RawBatch | Reset | Gap, findings: Findings) -> None:
        """What a consumer found in a batch."""
        entry = self._entries.get((delivery.source, delivery.rank))
        if entry is None or not isinstance(delivery, Batch | RawBatch):
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
        hungry, self._hungry = self._hungry, {}
        self._touched.update(hungry)
        for entry in hungry:
            if entry.link.pump(entry.stream, now, self._per_turn):
                self._hungry[entry] = None
            self._serve(entry, now)
        while self._timers and self._timers[0][0] <= now:
            due, _, entry = heapq.heappop(self._timers)
            if entry.timer != due:
                # An earlier one has taken its place. To go on from here as well would keep both, for as long as gaps come.
                continue
            entry.timer = None
            if self._by_link.get(entry.link) is entry:
                entry.stream.tick(now)
                self._touched[entry] = None
                own = entry.link.deadline()
                if own is not None and own <= now and entry.link.pump(entry.stream, now, self._per_turn):
                    self._hungry[entry] = None
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
            entry.link.end_replay()
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
        if ask is not None:
            entry.link.send(ask)
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
        due, own = entry.stream.deadline(), entry.link.deadline()
        if own is not None and (due is None or own < due):
            due = own
        if due is not None and (entry.timer is None or due < entry.timer):
            entry.timer = due
            self._tie += 1
            heapq.heappush(self._timers, (due, self._tie, entry))

    def close(self) -> None:
        """Close every link; idempotent."""
        for entry in self._entries.values():
            entry.link.close()
        self.transport.close()

    def describe(self) -> str:
        """Streams by trust, for a repr: `3 streams, 2 EXACT, 1 STALE, 0 ready`."""
        states: dict[str, int] = {}
        for entry in self._entries.values():
            name = entry.stream.trust.name
            states[name] = states.get(name, 0) + 1
        counts = "".join(f", {count} {name}" for name, count in sorted(states.items()))
        noun = "stream" if len(self._entries) == 1 else "streams"
        return f"{len(self._entries)} {noun}{counts}, {len(self.ready)} ready"


def _status(stream: Stream[Any]) -> StreamStatus:
    source = stream.source
    return StreamStatus(
        source=source.label,
        rank=source.rank,
        endpoint=source.endpoint,
        trust=stream.trust,
        doubts=stream.doubts,
        incarnation=stream.incarnation,
        last_seq=stream.last_seq,
        waiting=stream.waiting,
        counters=stream.counters.copy(),
    )
