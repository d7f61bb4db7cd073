"""Builds the pages that a bridge writes to one partition.

Theory of operation. The server accepts a page only if the partition ends where the page's writer expects
(`Nats-Expected-Last-Sequence`). A bridge whose page is rejected reads what other bridges have written and builds the page
again. The builder then classifies each of its queued records (`bridge_rules`):

- The log has the record: it is dropped. Before a bridge writes to an incarnation that another bridge has begun, it must verify
  that the log's newest batch equals its own batch, byte for byte. One comparison is enough, because every bridge makes it.
- The record is next: it is written.
- Neither: the stream has *diverged* from the log. The bridge follows it again from the end of the log. The comparison at that
  point either shows that the publisher's incarnation is the one in the log, or a new incarnation begins.

Records are dropped only after they were read or acknowledged, and not when they are sent. So a lost acknowledgement has the
same effect as a lost page.

One page is *in flight* at a time. Records that arrive while it is in flight go into the next page. If the page is rejected, or
a page of another bridge comes first, all its records are classified again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvevents.stream import RawBatch, trust_order
from kvevents_plane.bridge_rules import RecordVerdict, StreamEnd, advance_end, can_report_trust, classify_record, trim_record
from kvevents_plane.partition_state import PartitionEvent, PartitionState, StreamLeft
from kvevents_plane.records import (
    VERSION,
    BatchRecord,
    FragmentRecord,
    HeartbeatRecord,
    IncarnationRecord,
    Page,
    ReceivedMessage,
    Record,
    ResetRecord,
    StreamKey,
    StreamRecord,
    TrustRecord,
)

RECORD_HEAD_BYTES: Final = 96
"""Maximum size in bytes of an encoded record without its payload and texts."""
MAX_REASON_BYTES: Final = 32
"""Maximum size in bytes of an encoded degraded reason: its name and its number."""
MAX_RECORDS: Final = 2_000
"""Maximum number of records in one page."""


class _QueuedRecord(NamedTuple):
    due: float
    """Earliest time at which the record may be written."""
    record: StreamRecord
    size: int
    """Maximum size of the encoded record in bytes."""


@dataclass(slots=True, eq=False)
class _StreamQueue:
    """Records of one stream that might not be in the log yet."""

    records: deque[_QueuedRecord] = field(default_factory=deque)
    trust: TrustRecord | None = None
    """The report that is written after all queued records, or None if no report is queued."""
    followed_incarnation: int | None = None
    """The incarnation that the bridge follows; None after the stream has left the log. If the log has a later incarnation, the
    bridge has not seen that incarnation, and the bridge's trust does not apply to it."""
    agreed_incarnation: int | None = None
    """The log's incarnation, if it is known to equal the followed incarnation; else None."""


@dataclass(slots=True)
class _Selection:
    """The records of one stream that are selected for a page."""

    key: StreamKey
    queue: _StreamQueue
    end: StreamEnd
    """The end of the stream after the records."""
    room: int
    """Number of unused bytes in the page."""
    records: list[StreamRecord] = field(default_factory=list)
    covered_records: int = 0
    """Number of queued records that the log will have after the page is written."""
    trust: TrustRecord | None = None
    """The queued trust report, if it is one of `records`; else None."""

    def add(self, record: StreamRecord, size: int) -> None:
        """Select a record that takes at most `size` bytes."""
        self.records.append(record)
        self.room -= size


class _PageInFlight(NamedTuple):
    page: Page
    heartbeat: HeartbeatRecord | None
    selections: list[_Selection]


class PageBuilder:
    """Builds the pages of one bridge for one partition, and applies all pages to `state`.

    The names of its pages begin with `builder_id`, which is unique.
    """

    def __init__(self, state: PartitionState, bridge: str, page_bytes: int, builder_id: str) -> None:
        self.state: Final = state
        self.diverged: dict[StreamKey, None] = {}
        """Streams that have diverged from the log; `resync` removes them."""
        self.queued_bytes = 0
        """Number of bytes in the records that are not known to be in the log."""
        self.written = 0
        """Number of batches that this builder has written to the log."""
        self.reset_reason = ""
        """Why all streams of the partition must start over; empty as soon as the partition has a page at which they do so."""
        self._bridge: Final = bridge
        self._page_bytes: Final = page_bytes
        self._builder_id: Final = builder_id
        self._pages = 0
        self._queues: dict[StreamKey, _StreamQueue] = {}
        self._active: dict[StreamKey, None] = {}
        """Streams with records to write, in round-robin order."""
        self._heartbeat: HeartbeatRecord | None = None
        self._in_flight: _PageInFlight | None = None

    # --- queued records

    def resync(self, key: StreamKey) -> None:
        """Continue a stream at the end of the log. Drop the records that were queued before."""
        self._clear(key)
        stream = self.state.streams.get(key)
        # The queue is a new object, so that an acknowledgement of the page in flight drops none of its records.
        self._queues[key] = _StreamQueue(
            followed_incarnation=self.state.min_incarnation if stream is None else stream.incarnation,
            agreed_incarnation=None if stream is None or stream.last_seq < 0 else stream.incarnation,
        )
        self.diverged.pop(key, None)

    def forget(self, key: StreamKey) -> None:
        """Remove a stream that is no longer followed."""
        self._clear(key)
        self._queues.pop(key, None)
        self.diverged.pop(key, None)

    def enqueue(self, record: StreamRecord, due: float = 0.0) -> None:
        """Queue the next record of a stream for writing at `due` or later; ignore it while the stream is diverged."""
        key = record.key
        queue = self._queues.get(key)
        if queue is None or key in self.diverged:
            return
        self._active[key] = None
        if isinstance(record, TrustRecord):
            queue.trust = record
            return
        if isinstance(record, IncarnationRecord):
            queue.trust = None  # the queued report is about the previous incarnation
            queue.followed_incarnation = record.incarnation
        size = record_size(record)
        queue.records.append(_QueuedRecord(due, record, size))
        self.queued_bytes += size

    def set_heartbeat(self, heartbeat: HeartbeatRecord) -> None:
        """Set the heartbeat that the next page will contain."""
        self._heartbeat = heartbeat

    def next_due(self) -> float | None:
        """Return the time at which the next queued record is due, or None if no record is queued."""
        if self._heartbeat is not None:
            return 0.0
        waiting = [
            queue
            for key in self._active
            if (queue := self._queues[key]).records or (queue.trust is not None and not self.is_replaced(key))
        ]
        return min((queue.records[0].due if queue.records else 0.0 for queue in waiting), default=None)

    def lag(self, now: float) -> float:
        """Return the number of seconds for which the oldest due record has waited; 0 if no record is due."""
        waiting = (queue.records[0].due for key in self._active if (queue := self._queues[key]).records)
        return max(0.0, now - min(waiting, default=now))

    def has_left(self, key: StreamKey) -> bool:
        """Return whether a stream has left the log since the last call of `resync`. It might have joined again."""
        queue = self._queues.get(key)
        return queue is not None and queue.followed_incarnation is None

    def is_replaced(self, key: StreamKey) -> bool:
        """Return whether the log's incarnation of a stream is known to differ from the one that the bridge follows."""
        queue = self._queues.get(key)
        return queue is not None and not can_report_trust(self._end_of(key, queue), queue.followed_incarnation)

    def has_queued(self, key: StreamKey) -> bool:
        """Return whether a stream has records that are not known to be in the log."""
        queue = self._queues.get(key)
        return queue is not None and bool(queue.records)

    @property
    def queued_records(self) -> int:
        """Number of records that are not known to be in the log."""
        return sum(len(self._queues[key].records) for key in self._active)

    def _clear(self, key: StreamKey) -> None:
        queue = self._queues.get(key)
        self._active.pop(key, None)
        if queue is not None:
            self.queued_bytes -= sum(queued.size for queued in queue.records)
            queue.records.clear()
            queue.trust = None

    # --- building a page

    def build(self, now: float) -> Page | None:
        """Return the next page, or None if no record is due or a page is in flight.

        Call `acknowledge` or `withdraw` when the result of the page is known.
        """
        if self._in_flight is not None:
            return None
        records: list[Record] = [] if self._heartbeat is None else [self._heartbeat]
        selections: list[_Selection] = []
        room = self._page_bytes
        if reason := self.state.unknown_prefix or self.reset_reason:
            # The number exceeds every incarnation: each began with a record, and earlier pages have fewer records than this.
            records.append(ResetRecord((self.state.position + 1) * MAX_RECORDS, reason))
        else:
            for key in list(self._active):
                selection = self._select(key, now, room, MAX_RECORDS - len(records))
                if selection is None:
                    continue
                if selection.records:
                    selections.append(selection)
                else:
                    self._commit(selection)  # the log has all fragments
                records += selection.records
                room = selection.room
                if room <= 0 or len(records) >= MAX_RECORDS:
                    break
        if not records:
            return None
        self._pages += 1
        page = Page(VERSION, self._bridge, records, f"{self._builder_id}#{self._pages}", self.state.history)
        self._in_flight = _PageInFlight(page, self._heartbeat, selections)
        self._heartbeat = None
        return page

    def _select(self, key: StreamKey, now: float, room: int, count: int) -> _Selection | None:
        """Return the next records of one stream that fit into the page, or None if the stream has diverged."""
        queue = self._queues[key]
        selection = _Selection(key, queue, self._end_of(key, queue), room)
        if (warning := self._lower_trust(key, queue, selection.end)) is not None:
            selection.add(warning, record_size(warning))
        for due, record, size in queue.records:
            verdict = classify_record(selection.end, record)
            if selection.room <= 0 or len(selection.records) >= count or (due > now and verdict is RecordVerdict.APPEND):
                break
            if verdict is RecordVerdict.DIVERGED:
                self._clear(key)
                self.diverged[key] = None
                return None
            if not self._add(selection, record, size, verdict):
                break
        trust = queue.trust
        is_all = selection.covered_records == len(queue.records) and can_report_trust(selection.end, queue.followed_incarnation)
        if is_all and trust is not None and (size := record_size(trust)) <= selection.room and len(selection.records) < count:
            selection.add(trust, size)
            selection.trust = trust
        return selection

    def _lower_trust(self, key: StreamKey, queue: _StreamQueue, end: StreamEnd) -> TrustRecord | None:
        """Return the queued trust report if its trust is lower than in the report that was written before.

        The page contains the report twice: before the records that might have lowered the trust, and after them.
        """
        stream = self.state.streams.get(key)
        report = None if stream is None else stream.trust_reports.get(self._bridge)
        if queue.trust is None or report is None or not queue.records or not can_report_trust(end, queue.followed_incarnation):
            return None
        return queue.trust if trust_order(queue.trust.trust) < trust_order(report.trust) else None

    def _add(self, selection: _Selection, record: StreamRecord, size: int, verdict: RecordVerdict) -> bool:
        """Select one record unless it is a duplicate. Return False if the page has no room for the whole record."""
        if verdict is RecordVerdict.APPEND:
            trimmed = trim_record(selection.end, record)
            if size > selection.room:
                if isinstance(trimmed, BatchRecord) and not selection.records and selection.room == self._page_bytes:
                    self._add_fragment(selection, trimmed)
                return False
            selection.add(trimmed, size)
        selection.end = advance_end(selection.end, record, verdict)
        selection.covered_records += 1
        return True

    def _add_fragment(self, selection: _Selection, record: BatchRecord) -> None:
        """Select the fragment that follows the fragments in the log, of a batch that is larger than a page."""
        partial, offset, total = selection.end.partial_batch, 0, len(record.payload)
        if partial is not None and (partial.seq, partial.total) == (record.seq, total):
            offset = partial.size if record.payload.startswith(b"".join(partial.fragments)) else 0
        part = record.payload[offset : offset + max(1, self._page_bytes - RECORD_HEAD_BYTES - _encoded_length(record.source))]
        fragment = FragmentRecord(*record.key, record.incarnation, record.seq, record.replayed, offset, total, part)
        selection.add(fragment, selection.room)
        if offset + len(part) == total:
            selection.end = advance_end(selection.end, record, RecordVerdict.APPEND)
            selection.covered_records += 1

    def _end_of(self, key: StreamKey, queue: _StreamQueue) -> StreamEnd:
        stream = self.state.streams.get(key)
        if stream is None:
            return StreamEnd(None, self.state.min_incarnation, -1, has_ended=False, agrees=False, newest=None)
        return StreamEnd(
            stream.registration,
            stream.incarnation,
            stream.last_seq,
            stream.has_ended or stream.registration is None,
            queue.agreed_incarnation == stream.incarnation,
            self.state.newest.get(key),
            stream.digest,
            stream.partial_batch,
        )

    # --- results of pages

    def acknowledge(self, position: int) -> list[PartitionEvent]:
        """Apply the page in flight, which the server has stored at `position`. Return the page's events."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return []
        events = self._take_events(in_flight.page.name, self.state.first_page, self.state.apply(position, in_flight.page))
        for selection in in_flight.selections:
            self._commit(selection)
        return events

    def withdraw(self) -> None:
        """Give up the page in flight, which the server might not have stored. Read the partition before the next `build`."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._heartbeat = self._heartbeat or in_flight.heartbeat

    def _commit(self, selection: _Selection) -> None:
        """Drop the queued records of a selection, which are now in the log."""
        key, queue = selection.key, selection.queue
        if self._queues.get(key) is not queue:
            return  # the stream was resynced or removed while the page was in flight
        for _ in range(selection.covered_records):
            self.queued_bytes -= queue.records.popleft().size
        if selection.end.agrees:
            queue.agreed_incarnation = selection.end.incarnation
        if queue.trust is selection.trust:
            queue.trust = None
        self._active.pop(key, None)
        if queue.records or queue.trust is not None:
            self._active[key] = None  # move the stream to the end of the round-robin order

    def apply(self, position: int, page: Page) -> list[PartitionEvent]:
        """Apply a page of any bridge, and return its events. The server will then reject the page in flight."""
        self.withdraw()
        return self._take_events(page.name, self.state.first_page, self.state.apply(position, page))

    def receive(self, message: ReceivedMessage, partition: int) -> None:
        """Apply a message that was read. The server will then reject the page in flight."""
        self.withdraw()
        self._take_events(message.name, self.state.first_page, self.state.receive(message, partition))

    def _take_events(self, name: str, first_page: int, events: list[PartitionEvent]) -> list[PartitionEvent]:
        """Update the queues and counts after the events of a page; `first_page` is `state.first_page` before the events.

        The server may have stored a page of this builder although no acknowledgement arrived.
        """
        if name.startswith(f"{self._builder_id}#"):
            self.written += sum(isinstance(event, RawBatch) for event in events)
        if self.state.first_page != first_page:
            self.reset_reason = ""
        for event in events:
            if isinstance(event, StreamLeft) and (queue := self._queues.get(event.key)) is not None:
                queue.followed_incarnation = None
        return events


def record_size(record: StreamRecord) -> int:
    """Return the maximum size in bytes of an encoded record."""
    size = RECORD_HEAD_BYTES + _encoded_length(record.source)
    if isinstance(record, BatchRecord | FragmentRecord):
        return size + len(record.payload)
    size += len(getattr(record, "registration", b"")) + _encoded_length(getattr(record, "reason", ""))
    if isinstance(record, TrustRecord):
        size += _encoded_length(record.bridge) + MAX_REASON_BYTES * len(record.degraded_reasons)
    return size


def _encoded_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
