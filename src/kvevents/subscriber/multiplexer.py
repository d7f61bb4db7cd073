"""The core of both subscribers: streams, their connections and their timers. This module never waits; the front ends do.

`Transport` and `Connection` are the interface between streams and sockets: two small classes that a test can replace
(`kvevents.testing.FakeTransport`).
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable
from itertools import islice
from typing import Final, Protocol, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kvevents.backoff import MAX_DELAY, Backoff
from kvevents.errors import ConfigError, EndpointError, UnknownSourceError
from kvevents.stream import (
    Batch,
    BatchReport,
    Checkpoint,
    DegradedReason,
    FetchRequest,
    Gap,
    PendingBytes,
    RawBatch,
    RawDelivery,
    Reset,
    Source,
    Stream,
    StreamCounters,
    StreamLimits,
    Trust,
    printable,
)

log = logging.getLogger(__name__)

MESSAGES_PER_READ: Final = 256
"""Maximum number of messages that are read from one stream before the next stream is read."""
MAX_READY_DELIVERIES: Final = 4_096
"""Number of deliveries after which a run ends, even if streams still have messages, so that other tasks can run."""
DEFAULT_CONCURRENT_REPLAYS: Final = 64
"""Maximum number of concurrent replays in a process. Replay buffers can have 100 MB, and a fleet can reconnect at once."""


OnFound: TypeAlias = Callable[[Source], Source | None]
"""Receives a source that was found by its topic; returns the source to follow, or None to ignore the topic."""

MIN_UNREAD_SECONDS: Final = 0.1
"""Minimum number of seconds without a read of the connections after which streams can lose trust."""
_CAUGHT_UP_STATES: Final = ("EXACT", "DEGRADED")
_MAX_NAMES: Final = 3
"""Maximum number of endpoints in the repr of a subscriber, and maximum number of streams in an error message."""


class Connection(Protocol):
    """The live connection of one stream and, while replay is requested, its replay connection."""

    def feed_stream(self, stream: Stream, now: float, limit: int) -> bool:
        """Feed arrived messages to `stream`, at most about `limit` of each kind. Return True if there may be more to read.

        While no batch is missing, live messages are fed before a replay reply, which may come from a later incarnation. All
        messages of an old connection are fed before `begin_connection` is called. If a newer connection has begun,
        `end_connection` is called before its first message is fed; if not, after all messages of the old connection.

        Raise `EndpointError` if the connection cannot continue. The caller then closes the connection, and opens a new one
        later.
        """
        ...

    @property
    def fault(self) -> str:
        """Why there is no live connection; empty if there is one, or if the cause is unknown."""
        ...

    def deadline(self) -> float | None:
        """Return the time at which `feed_stream` is due even if nothing arrives; None if `feed_stream` is never due."""

    def request_replay(self, request: FetchRequest) -> None:
        """Send a replay request, on a new connection if the request requires it. Raise `EndpointError` if sending fails."""

    def end_replay(self) -> None:
        """Close the replay connection, and drop unread replies."""

    def close(self) -> None:
        """Close all sockets. Idempotent."""


class Transport(Protocol):
    """Opens connections and waits for them."""

    def open(self, source: Source) -> Connection:
        """Start to connect to `source`. Raise `EndpointError` if connecting can never succeed."""
        ...

    def wait(self, timeout: float | None) -> Collection[Connection]:
        """Wait at most `timeout` seconds (None: no limit) and return the connections that are readable."""
        ...

    def take_found(self) -> list[Source]:
        """Return the sources found since the last call (`Source.by_topic`). The caller opens or ignores each found source."""
        ...

    def ignore_found(self, source: Source) -> None:
        """Drop all messages with the topic of `source`, a source that `take_found` has returned."""

    @property
    def max_wait(self) -> float | None:
        """Maximum number of seconds between two calls of `wait`, even if nothing arrives; None for no limit."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when a connection is; -1 if there is no descriptor, so that `wait` is needed."""
        ...

    def wake(self) -> None:
        """Make the current and every later call of `wait` return at once, because the subscriber is being closed.

        Any thread and any signal handler may call `wake`, also after `close`.
        """

    def close(self) -> None:
        """Close every connection and their shared resources. Idempotent."""


class StreamStatus(Struct, frozen=True):
    """State of one stream, for operators."""

    source: str
    rank: int
    endpoint: str
    trust: Trust
    degraded_reasons: frozenset[DegradedReason]
    incarnation: int
    last_seq: int
    """Sequence number of the newest batch that was delivered or given up; -1 before the first."""
    waiting: int
    """Number of batches that wait because an earlier batch is missing, or because their publisher is not verified."""
    counters: StreamCounters
    error: str = ""
    """Why there is no connection or no replay request; empty if both exist or the cause is unknown. The subscriber retries."""


class StreamEntry:
    """A stream with its connection, its timer, and its deliveries since the application last took all deliveries."""

    def __init__(self, stream: Stream, connection: Connection, first_incarnation: int) -> None:
        self.stream = stream
        self.connection: Connection | None = connection
        """The connection; None between a failure and the next attempt, which is due at `reopen_at`."""
        self.reopen_at = self.opened_at = float("-inf")
        self.backoff = Backoff()
        self.error = ""
        self.stated_rank: int | None = None
        """The rank that payloads stated when ranks were last compared."""
        self.failure = ""
        """Why the application could not apply a delivery; empty after the application has taken all batches again."""
        self.has_malformed = False
        """Whether the log names a message of this stream that is not a batch. Only the first message is logged."""
        self.first_incarnation = first_incarnation
        """The first incarnation of this subscription; only `resumed_incarnation` may be lower."""
        self.resumed_incarnation = stream.incarnation
        self.mark_consumed()
        self.timer: float | None = None
        self.found_endpoint = ""
        """The bound endpoint at which the source was found by its topic; empty if the application has added it."""
        self.reported_trust: tuple[str, str, bool] = ("", "", False)
        """State, reason and attestation that `Multiplexer.trust_changes` last returned."""

    def mark_consumed(self) -> None:
        """Record that the application has taken every delivery."""
        self.consumed_position = self.stream.position()
        self.delivered_batches: list[RawDelivery] = []
        if self.failure and self.stream.trust.name in _CAUGHT_UP_STATES:
            self.failure = ""

    @property
    def label(self) -> str:
        """Name of the stream in the log."""
        return f"{printable(self.stream.source.label)} rank {self.stream.source.rank}"

    def trust(self, unread_seconds: float) -> Trust:
        """Return the trust in the stream. The reason includes the fault of the connection, if any.

        `unread_seconds` is the time for which the application has not read the connections.
        """
        trust, fault, inexact = self.stream.trust, self.fault, self.stream.source.stores_only
        if self.failure and trust >= Trust.REPLAYING:
            trust = Trust.REPLAYING.with_reason(self.failure)
        if trust != Trust.CONNECTING and unread_seconds > self.stream.max_unread:
            trust = Trust.STALE.with_reason(f"the application has not called receive() for {unread_seconds:.0f} s")
        trust = replace(trust, inexact_tiers=inexact) if inexact else trust
        return trust.with_reason(f"{trust.reason}; {fault}" if trust.reason else fault) if fault else trust

    @property
    def fault(self) -> str:
        """The fault of the connection; empty if it has none."""
        return self.error or ("" if self.connection is None else self.connection.fault)

    def deadline(self) -> float | None:
        """Return the time at which a timer of the stream or of its connection is due; None if no timer runs."""
        connection_at = self.reopen_at if self.connection is None else self.connection.deadline()
        stream_at = self.stream.deadline()
        return stream_at if connection_at is None else connection_at if stream_at is None else min(stream_at, connection_at)

    def status(self, unread_seconds: float) -> StreamStatus:
        """Return the state of the stream."""
        stream, source = self.stream, self.stream.source
        return StreamStatus(
            source=source.label,
            rank=source.rank,
            endpoint=source.endpoint,
            trust=self.trust(unread_seconds),
            degraded_reasons=stream.degraded_reasons,
            incarnation=stream.incarnation,
            last_seq=stream.last_seq,
            waiting=stream.waiting,
            counters=stream.counters.copy(),
            error=self.fault,
        )

    def checkpoint(self, ready: Container[int]) -> Checkpoint:
        """Return a checkpoint after the deliveries that the application has taken: those whose id is not in `ready`."""
        position = self.stream.position()
        deliveries = [delivery for delivery in self.delivered_batches if id(delivery) not in ready]
        if len(deliveries) < len(self.delivered_batches):
            position = self.consumed_position.after_deliveries(deliveries, position)
        return position.checkpoint(self.stream.source.label, self.stream.source.rank)


class Multiplexer:
    """All streams of one subscriber.

    A stream that fails does not affect the other streams. If a connection raises `EndpointError`, it is closed, its stream is
    disconnected, and a new connection is opened after a delay. A replay request that cannot be sent counts as unanswered, so
    the stream sends it again.
    """

    def __init__(self, transport: Transport, limits: StreamLimits, max_concurrent_replays: int, messages_per_read: int) -> None:
        self.transport = transport
        self.on_found: OnFound = lambda found: None if (found.endpoint, found.topic) in self._removed_topics else found
        self._removed_topics: set[tuple[str, str]] = set()
        """Bound endpoints and topics of found sources that were removed, so that such sources are not followed again."""
        self.ready: deque[RawDelivery] = deque()
        """Deliveries that the application has not taken. The front ends call `run_once` only while this queue is empty."""
        self._limits = limits
        self._messages_per_read = messages_per_read
        self._max_replays = max_concurrent_replays
        self._entries: dict[tuple[str, int], StreamEntry] = {}
        self._finders: dict[tuple[str, int], StreamEntry] = {}
        """Entries of sources with `by_topic`, through which the subscriber finds further sources. The stream of such an entry
        receives nothing."""
        self._by_connection: dict[Connection, StreamEntry] = {}
        self._unconsumed_streams: set[StreamEntry] = set()
        """Streams with deliveries since `ready` was last empty."""
        self._readable: dict[StreamEntry, None] = {}
        """Streams to read: a set in insertion order, so that the same inputs are always processed in the same order."""
        self._changed_streams: dict[StreamEntry, None] = {}
        """Streams whose trust may have changed since the last call of `trust_changes`."""
        self._was_aging = False
        self._pending = PendingBytes(limits.max_total_pending_bytes)
        self._timers: list[tuple[float, int, StreamEntry]] = []
        self._timer_count = 0
        self._next_incarnation = 0
        """A number above all incarnations of removed sources."""
        self._replaying: set[StreamEntry] = set()
        self._replay_queue: OrderedDict[StreamEntry, None] = OrderedDict()
        """Streams that wait, in this order, until a stream in `_replaying` has finished its replay."""

    # --- sources

    def add(self, source: Source, resume: Checkpoint | None) -> None:
        """Start following `source`, or continue after a checkpoint. Raise `ConfigError`, `EndpointError`."""
        key = (source.label, source.rank)
        if key in self._entries or key in self._finders:
            raise ConfigError(f"source {source.label!r} rank {source.rank} is given twice; use different names or ranks")
        first = self._next_incarnation
        stream = Stream(source, self._limits, first, self._pending)
        if resume is not None:
            stream.restore(resume)
        connection = self.transport.open(source)
        self._by_connection[connection] = entry = StreamEntry(stream, connection, first)
        self._readable[entry] = None
        if source.by_topic:
            self._finders[key] = entry
        else:
            self._entries[key] = entry
            self._changed_streams[entry] = None

    def _add_found(self, found: Source) -> None:
        """Follow a source that was found by its topic, or ignore its topic."""
        source = self.on_found(found)
        if source is not None:
            try:
                self.add(source, None)
            except (ConfigError, EndpointError) as error:
                log.warning("%s: cannot follow the topic %s: %s", found.endpoint, found.topic, error)
            else:
                self._entries[source.label, source.rank].found_endpoint = found.endpoint
                log.info("%s: following the topic %s", found.endpoint, found.topic)
                return
        self.transport.ignore_found(found)

    def remove(self, name: str, rank: int) -> None:
        """Stop following a source, and the sources that it has found. Raise `UnknownSourceError`."""
        if (finder := self._finders.pop((name, rank), None)) is not None:
            self._readable.pop(finder, None)
            self._close_connection(finder)
            endpoint = finder.stream.source.endpoint
            for key in [key for key, entry in self._entries.items() if entry.found_endpoint == endpoint]:
                self.remove(*key)
            self._removed_topics = {removed for removed in self._removed_topics if removed[0] != endpoint}
            return
        entry = self.entry(name, rank)
        del self._entries[name, rank]
        if entry.found_endpoint:
            self._removed_topics.add((entry.found_endpoint, entry.stream.source.topic))
        self._next_incarnation = max(self._next_incarnation, entry.stream.incarnation + 1)
        self._readable.pop(entry, None)
        self._changed_streams.pop(entry, None)
        self._unconsumed_streams.discard(entry)
        self._replay_queue.pop(entry, None)
        entry.stream.close()
        self._close_connection(entry)

    def entry(self, name: str | None, rank: int) -> StreamEntry:
        """Return a stream that is followed; `name` can be None if only one stream exists. Raise `UnknownSourceError`."""
        if name is None and len(self._entries) == 1:
            return next(iter(self._entries.values()))
        entry = self._entries.get((name or "", rank))
        if entry is None:
            names = ", ".join(f"{label} rank {number}" for label, number in islice(self._entries, _MAX_NAMES)) or "none"
            more = f" and {len(self._entries) - _MAX_NAMES} more" if len(self._entries) > _MAX_NAMES else ""
            raise UnknownSourceError(f"no source {name!r} with rank {rank}; known: {names}{more}")
        return entry

    def statuses(self, unread_seconds: float) -> list[StreamStatus]:
        """Return the state of all streams, in the order in which they were added."""
        return [entry.status(unread_seconds) for entry in self._entries.values()]

    def checkpoint(self, name: str | None, rank: int) -> Checkpoint:
        """Return a checkpoint of one stream."""
        return self.entry(name, rank).checkpoint({id(delivery) for delivery in self.ready})

    def checkpoints(self) -> list[Checkpoint]:
        """Return checkpoints of all streams, in the order in which they were added."""
        ready = {id(delivery) for delivery in self.ready}
        return [entry.checkpoint(ready) for entry in self._entries.values()]

    def trust_changes(self, unread_seconds: float) -> list[tuple[tuple[str, int], Trust]]:
        """Return source, rank and trust of each stream whose trust, or its reason, has changed since the last call."""
        streams, self._changed_streams = self._changed_streams, {}
        # If the connections are not read, trust changes without any input, and changes back when they are read.
        is_aging = unread_seconds > MIN_UNREAD_SECONDS
        if is_aging or self._was_aging:
            streams = dict.fromkeys(self._entries.values())
        self._was_aging = is_aging
        changes = []
        for entry in streams:
            trust = entry.trust(unread_seconds)
            if entry.reported_trust != (current := (trust.name, trust.reason, trust.attested)):
                entry.reported_trust = current
                changes.append(((entry.stream.source.label, entry.stream.source.rank), trust))
        return changes

    def repeat_trust_changes(self, streams: Iterable[tuple[str, int]]) -> None:
        """Make `trust_changes` return the trust of these streams again."""
        for entry in [self._entries[key] for key in streams if key in self._entries]:
            entry.reported_trust = ("", "", False)
            self._changed_streams[entry] = None

    def report(self, delivery: Batch | RawBatch | Reset | Gap, report: BatchReport) -> None:
        """Pass a consumer's report about a batch to its stream, unless the batch is from an earlier subscription."""
        entry = self._entries.get((delivery.source, delivery.rank))
        if entry is None or not isinstance(delivery, Batch | RawBatch):
            return
        if delivery.incarnation < entry.first_incarnation and delivery.incarnation != entry.resumed_incarnation:
            return
        entry.stream.report(delivery, report)
        self._changed_streams[entry] = None
        if report.heartbeat is not None or report.digest_matches is not None:
            # The next run collects the deliveries, the request and the deadline that the report may have caused.
            self._readable[entry] = None

    def start_over(self, deliveries: Iterable[RawDelivery], reason: str) -> None:
        """For each delivery that the application could not apply, make its stream deliver all batches again."""
        streams = {(delivery.source, delivery.rank) for delivery in deliveries}
        remaining = [ready for ready in self.ready if (ready.source, ready.rank) not in streams]
        self.ready.clear()
        self.ready.extend(remaining)
        for entry in [self._entries[key] for key in streams & self._entries.keys()]:
            entry.stream.start_over(reason)
            entry.mark_consumed()
            entry.failure = reason
            self._unconsumed_streams.add(entry)
            self._changed_streams[entry] = self._readable[entry] = None

    # --- one run of the read loop

    def timeout(self, now: float) -> float | None:
        """Return the seconds until the next timer or read is due; None if nothing is due."""
        if self._readable or (self._replay_queue and len(self._replaying) < self._max_replays):
            return 0.0
        max_wait = self.transport.max_wait
        if not self._timers:
            return max_wait
        due = max(0.0, self._timers[0][0] - now)
        return due if max_wait is None else min(due, max_wait)

    def run_once(self, connections: Iterable[Connection], now: float) -> None:
        """Read from `connections` and from streams that still have messages, and run the timers that are due."""
        if not self.ready:
            self._mark_consumed()
        for connection in connections:
            readable = self._by_connection.get(connection)
            if readable is not None:
                self._readable[readable] = None
        self._changed_streams.update(self._readable)
        for entry in list(self._readable):
            # Streams are removed one by one: if an exception ends this loop, the next run still reads the later streams.
            del self._readable[entry]
            self._read(entry, now)
            self._collect(entry, now)
            if len(self.ready) >= MAX_READY_DELIVERIES:
                break
        for source in self.transport.take_found():
            self._add_found(source)
        while self._timers and self._timers[0][0] <= now:
            due, _, entry = heapq.heappop(self._timers)
            if entry.timer != due:
                # An earlier timer has replaced the popped timer, which is not pushed again: the heap would grow with each gap.
                continue
            entry.timer = None
            if self._entries.get((entry.stream.source.label, entry.stream.source.rank)) is entry:
                entry.stream.tick(now)
                self._changed_streams[entry] = None
                self._run_connection_timer(entry, now)
                self._collect(entry, now)
        while self._replay_queue and len(self._replaying) < self._max_replays:
            entry, _ = self._replay_queue.popitem(last=False)
            if entry.stream.is_fetching:
                self._request_replay(entry, now)
                self._schedule(entry)

    def _mark_consumed(self) -> None:
        """Record that the application has taken all deliveries."""
        streams, self._unconsumed_streams = self._unconsumed_streams, set()
        for entry in streams:
            if entry.failure:
                self._changed_streams[entry] = None
            entry.mark_consumed()
            if entry.failure:
                self._unconsumed_streams.add(entry)

    def pop(self, limit: int | None) -> list[RawDelivery]:
        """Remove and return at most `limit` deliveries, in order."""
        ready = self.ready
        if limit is not None and limit < len(ready):
            return [ready.popleft() for _ in range(limit)]
        deliveries = list(ready)
        ready.clear()
        return deliveries

    def _collect(self, entry: StreamEntry, now: float) -> None:
        """Collect deliveries, the replay request and the deadline from a stream after it was fed."""
        deliveries = entry.stream.deliveries()
        if deliveries:
            if entry.stream.stated_rank != entry.stated_rank:
                self._compare_ranks(entry)
            self.ready.extend(deliveries)
            entry.delivered_batches += deliveries
            self._unconsumed_streams.add(entry)
        if entry.stream.is_fetching:
            self._request_replay(entry, now)
        elif entry in self._replaying:
            self._replaying.discard(entry)
            if entry.connection is not None:
                entry.connection.end_replay()
                entry.error = ""
        self._schedule(entry)

    def _compare_ranks(self, changed_entry: StreamEntry) -> None:
        """For all streams of one engine, compare the rank that payloads state with the rank of the source."""
        changed_entry.stated_rank = changed_entry.stream.stated_rank
        label = changed_entry.stream.source.label
        ranks = {entry.stream.source.rank: entry for entry in self._entries.values() if entry.stream.source.label == label}
        for entry in ranks.values():
            namesake = ranks.get(-1 if entry.stated_rank is None else entry.stated_rank)
            entry.stream.compare_rank(None if namesake is None else namesake.stated_rank)
            self._changed_streams[entry] = None

    def _request_replay(self, entry: StreamEntry, now: float) -> None:
        if entry not in self._replaying:
            if len(self._replaying) >= self._max_replays:
                self._replay_queue.setdefault(entry)
                return
            self._replaying.add(entry)
        request = entry.stream.request_to_send(now)
        self._changed_streams[entry] = None
        if request is not None and entry.connection is not None:
            try:
                entry.connection.request_replay(request)
            except EndpointError as error:
                self._set_error(entry, f"replay cannot be requested: {error}")
            else:
                entry.error = ""
            # Sending may consume the signal of a message that has just arrived, so the connection must be read.
            self._readable[entry] = None

    def _schedule(self, entry: StreamEntry) -> None:
        due = entry.deadline()
        if due is not None and (entry.timer is None or due < entry.timer):
            entry.timer = due
            self._timer_count += 1
            heapq.heappush(self._timers, (due, self._timer_count, entry))

    # --- connections and their failures

    def _read(self, entry: StreamEntry, now: float) -> None:
        if entry.connection is None:
            return
        try:
            if entry.connection.feed_stream(entry.stream, now, self._messages_per_read):
                self._readable[entry] = None
        except EndpointError as error:
            if now - entry.opened_at > MAX_DELAY:
                entry.backoff.reset()
            self._close_connection(entry)
            entry.stream.end_connection()
            self._schedule_reopen(entry, error, now)
        if not entry.has_malformed and (malformed := entry.stream.counters.malformed):
            entry.has_malformed = True
            log.warning("%s: ignored a message that is not a batch: %s; check the ports", entry.label, next(iter(malformed)))

    def _run_connection_timer(self, entry: StreamEntry, now: float) -> None:
        if entry.connection is None:
            if entry.reopen_at <= now:
                self._reopen(entry, now)
        elif (due := entry.connection.deadline()) is not None and due <= now:
            self._read(entry, now)

    def _reopen(self, entry: StreamEntry, now: float) -> None:
        try:
            connection = self.transport.open(entry.stream.source)
        except EndpointError as error:
            self._schedule_reopen(entry, error, now)
            return
        log.info("%s: connection reopened", entry.label)
        entry.connection, entry.opened_at, entry.error = connection, now, ""
        self._by_connection[connection] = entry
        self._readable[entry] = None

    def _schedule_reopen(self, entry: StreamEntry, error: EndpointError, now: float) -> None:
        entry.reopen_at = now + entry.backoff.next_delay()
        self._set_error(entry, f"no connection: {error}")

    def _set_error(self, entry: StreamEntry, error: str) -> None:
        """Store an error, and log the error unless it equals the stored one."""
        if entry.error != error:
            entry.error = error
            log.warning("%s: %s; retrying", entry.label, error)

    def _close_connection(self, entry: StreamEntry) -> None:
        self._replaying.discard(entry)
        if entry.connection is not None:
            del self._by_connection[entry.connection]
            entry.connection.close()
            entry.connection = None

    def close(self) -> None:
        """Close every connection and the transport. Idempotent."""
        for entry in (*self._entries.values(), *self._finders.values()):
            if entry.connection is not None:
                entry.connection.close()
        self.transport.close()

    def describe(self, unread_seconds: float) -> str:
        """Return the number of streams by trust, for a repr: `3 streams, 2 EXACT, 1 STALE, 0 ready`."""
        states = Counter(entry.trust(unread_seconds).name for entry in self._entries.values())
        counts = "".join(f", {count} {name}" for name, count in sorted(states.items()))
        noun = "stream" if len(self._entries) == 1 else "streams"
        sources = [entry.stream.source for entry in (*self._finders.values(), *self._entries.values())]
        ends = [f" {'bound' if source.bind else 'connecting'} to {source.endpoint}," for source in sources[:_MAX_NAMES]]
        suffix = "" if len(sources) <= len(ends) else f" and {len(sources) - len(ends)} more,"
        return f"{''.join(ends)}{suffix} {len(self._entries)} {noun}{counts}, {len(self.ready)} ready".lstrip()
