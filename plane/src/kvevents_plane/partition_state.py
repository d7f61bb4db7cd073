"""State of one partition of the log: its streams, and for each stream the newest batch and the trust of each bridge.

Theory of operation. Several bridges can write the same stream, and any of them can be killed, stopped or disconnected at any
moment. The log stays consistent. The server accepts a page only from a bridge that has read every earlier page
(`page_builder`), and all readers apply pages by the same rules, which are in this module:

- A batch is the next one if it has the stream's current incarnation and the number after the newest batch. The first batch of
  an incarnation can have any number, because the engine might no longer have the earlier batches.
- A batch whose number is already written is ignored, and so are records of incarnations that have ended.
- Any other record is *invalid*: no bridge writes it. The state counts it, marks the stream, and does not apply it.

The fragments of a large batch are in order; other records can be between them. A fragment at offset 0 begins the batch again.

Each page carries a digest of the names of all messages that its writer expects before it, and is *void*, that is ignored, if
other messages precede it. The server compares only sequence numbers. These can match by chance after the server has lost
acknowledged pages and has used their numbers again, or after the partition was deleted and created again.

If pages were purged before a bridge has read them, and no snapshot represents them, the partition has an *unknown prefix*.
Later pages are not applied until a bridge writes a `ResetRecord`, at which all streams leave and start over for every reader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from kvevents.settings import build_decoder_now
from kvevents.stream import PERSISTENT_REASONS, Checkpoint, Fingerprint, Gap, RawBatch, Reset, payload_digest
from kvevents.wire import DEFAULT_WIRE_LIMITS
from kvevents_plane.records import (
    EMPTY_HISTORY,
    BatchRecord,
    FragmentRecord,
    GapRecord,
    HeartbeatRecord,
    IncarnationRecord,
    JoinRecord,
    LeaveRecord,
    Page,
    ReceivedMessage,
    Record,
    ResetRecord,
    StreamKey,
    Tail,
    TrustRecord,
    engine_digest,
    extend_history,
)

log = logging.getLogger(__name__)

_PERSISTENT_NAMES: Final = frozenset(reason.name for reason in PERSISTENT_REASONS)
MAX_DEPARTED_STREAMS: Final = 100_000
"""Maximum number of remembered streams that have left the log. Records that arrive for these streams later are ignored."""
MAX_TRUST_REPORTS: Final = 64
"""Maximum number of trust reports about one stream. The report of the bridge with the oldest heartbeat is dropped first."""
MAX_BRIDGES: Final = 1_000
"""Maximum number of bridge processes whose newest heartbeat is remembered. The oldest heartbeats are dropped first."""


class StreamJoined(NamedTuple):
    """A stream has joined, or its registration has changed."""

    key: StreamKey
    registration: bytes


class StreamLeft(NamedTuple):
    """A stream has left."""

    key: StreamKey
    reason: str
    incarnation: int
    """The incarnation that has ended."""


class InvalidRecord(NamedTuple):
    """The page contains a record that no bridge writes."""

    key: StreamKey
    reason: str


PartitionEvent: TypeAlias = RawBatch | Reset | Gap | StreamJoined | StreamLeft | InvalidRecord


class PartialBatch(msgspec.Struct, array_like=True):
    """A batch whose last fragments have not arrived yet."""

    seq: int
    total: int
    size: int = 0
    """Total number of bytes in `fragments`."""
    fragments: list[bytes] = []

    def is_continued_by(self, fragment: FragmentRecord) -> bool:
        """Return whether a fragment is the next fragment of this batch."""
        fits = self.size + len(fragment.payload) <= self.total
        return fits and (self.seq, self.total, self.size) == (fragment.seq, fragment.total, fragment.offset)

    def add(self, fragment: FragmentRecord) -> None:
        """Append the next fragment."""
        self.fragments.append(fragment.payload)
        self.size += len(fragment.payload)


class StreamState(msgspec.Struct, array_like=True):
    """One stream in the log."""

    registration: bytes | None
    """Registration of the engine, or None after the stream has left."""
    incarnation: int = 0
    last_seq: int = -1
    digest: bytes | None = None
    """SHA-256 of the newest batch's payload, if the payload itself is not stored."""
    trust_reports: dict[str, TrustRecord] = {}
    """Trust report of each bridge by the bridge's id. The newest report is the last one in the dict."""
    partial_batch: PartialBatch | None = None
    has_ended: bool = False
    """Whether the incarnation accepts no further records, because the stream had left or an invalid record was written."""
    engines: dict[str, bytes] = {}
    """Maps each bridge to the digest (`engine_digest`) of the engine with which the bridge most recently joined the stream."""

    def differing_bridges(self, is_alive: Callable[[str], bool]) -> list[str]:
        """Return the living bridges that joined the stream if they named different engines; else return an empty list."""
        if len(set(self.engines.values())) < 2:
            return []
        alive = {bridge: engine for bridge, engine in self.engines.items() if is_alive(bridge)}
        return sorted(alive) if len(set(alive.values())) > 1 else []


class ResumePoint(NamedTuple):
    """The batch after which a bridge's subscriber must continue a stream, so that the log has neither gap nor repetition."""

    resume: Checkpoint | None
    """None if the log has no batch of the current incarnation, because no batch can be verified then."""
    incarnation_offset: int
    """Number that converts the subscriber's incarnation numbers to the log's incarnation numbers by addition."""


class LastHeartbeat(NamedTuple):
    """The newest heartbeat of a bridge."""

    record: HeartbeatRecord
    position: int
    """Position of the page that contains the heartbeat."""


class PartitionState:
    """The state of one partition after the page at `position`. Every page must be applied, in order."""

    def __init__(self) -> None:
        self.position = 0
        """Position of the newest message that was read; JetStream counts from 1."""
        self.streams: dict[StreamKey, StreamState] = {}
        """Streams, including remembered streams that have left. A stream moves to the end when it joins or leaves."""
        self.heartbeats: dict[str, LastHeartbeat] = {}
        """The newest heartbeat of each bridge, by the bridge's id."""
        self.invalid_records = 0
        self.duplicate_records = 0
        """Number of records that the log already had, or that belong to an incarnation that has ended."""
        self.foreign_messages = 0
        """Number of messages that are not pages."""
        self.void_pages = 0
        """Number of pages that are void because their writer expected other messages before them."""
        self.history: bytes | None = EMPTY_HISTORY
        """Digest of the names of all messages, or None if the partition could not be read from its beginning."""
        self.min_incarnation = 0
        """First incarnation of a new stream."""
        self.unknown_prefix = ""
        """Why no page can be applied before a `ResetRecord`; empty if the whole partition was read."""
        self.first_page = 1
        """Position of the page at which all streams start: the newest page with a `ResetRecord` or, without one, page 1."""
        self.newest: dict[StreamKey, bytes] = {}
        """Payload of the newest batch of each stream. Snapshots do not contain these payloads."""
        self._writer = ""
        """The bridge that wrote the page that is being applied."""
        self.name: str | None = ""
        """Name of the newest message."""

    # --- applying pages

    def apply(self, position: int, page: Page) -> list[PartitionEvent]:
        """Apply a page and return its events. Positions can skip numbers; the page's writer has read every earlier page."""
        history = self.history
        self._advance(position, page.name, is_first=page.history is None)
        if page.history is not None and history is not None and page.history != history:
            self.void_pages += 1
            return []
        self._writer = page.bridge
        events: list[PartitionEvent] = []
        for record in page.records:
            if isinstance(record, HeartbeatRecord):
                self._apply_heartbeat(LastHeartbeat(record, position))
            elif isinstance(record, ResetRecord):
                events += self._apply_reset(record)
            elif not self.unknown_prefix:
                apply: Callable[[PartitionState, Any], Iterable[PartitionEvent]] = _APPLY_BY_TYPE[type(record)]
                events += apply(self, record)
        return events

    def receive(self, message: ReceivedMessage, partition: int) -> list[PartitionEvent]:
        """Apply a message of a partition, and return its events. Count messages that are not pages, and log the first one."""
        if (page := message.page()) is not None:
            return self.apply(message.position, page)
        if not self.foreign_messages:
            log.error(
                "message %d of partition %d is not a page of kvevents: another application writes to its subject",
                message.position,
                partition,
            )
        self._advance(message.position, message.name, is_first=message.begins_history)
        self.foreign_messages += 1
        return []

    def _advance(self, position: int, name: str, *, is_first: bool = False) -> None:
        self.position, self.name = position, name
        known = EMPTY_HISTORY if is_first else self.history
        self.history = None if known is None else extend_history(known, name)

    def _apply_heartbeat(self, heartbeat: LastHeartbeat) -> None:
        self.heartbeats.pop(heartbeat.record.bridge, None)
        self.heartbeats[heartbeat.record.bridge] = heartbeat
        if len(self.heartbeats) > MAX_BRIDGES:
            del self.heartbeats[next(iter(self.heartbeats))]

    def _apply_reset(self, record: ResetRecord) -> Iterable[PartitionEvent]:
        left = [StreamLeft(key, record.reason, self.streams[key].incarnation) for key in self.registrations()]
        self.unknown_prefix, self.first_page = "", self.position
        self.min_incarnation = max(self.min_incarnation, record.floor)
        self.streams.clear()
        self.newest.clear()
        return left

    def _apply_join(self, record: JoinRecord) -> Iterable[PartitionEvent]:
        known = self.streams.get(record.key)
        if known is None:
            known = self.streams[record.key] = StreamState(record.registration, self.min_incarnation)
        elif known.registration is None:
            del self.streams[record.key]
            # Readers have dropped the old incarnation, so a bridge continues with the next one.
            known = self.streams[record.key] = StreamState(record.registration, known.incarnation, has_ended=True)
        else:
            known.registration = record.registration
        known.engines[self._writer] = engine_digest(record.registration)
        if len(known.engines) > MAX_TRUST_REPORTS:
            del known.engines[min(known.engines, key=self._heartbeat_position)]
        yield StreamJoined(record.key, record.registration)

    def _apply_leave(self, record: LeaveRecord) -> Iterable[PartitionEvent]:
        known = self.streams.pop(record.key, None)
        if known is None or known.registration is None:
            return
        self.newest.pop(record.key, None)
        self.streams[record.key] = StreamState(None, known.incarnation)
        if len(self.streams) > MAX_DEPARTED_STREAMS:
            departed = [key for key, stream in self.streams.items() if stream.registration is None]
            for key in departed[:-MAX_DEPARTED_STREAMS]:
                del self.streams[key]
        yield StreamLeft(record.key, record.reason, known.incarnation)

    def _apply_batch(self, record: BatchRecord) -> Iterable[PartitionEvent]:
        stream = self._find_current(record.key, record.incarnation)
        if stream is None:
            return
        if (reason := _invalid_reason(stream, record)) is not None:
            yield self._reject(record.key, stream, reason)
        elif record.seq <= stream.last_seq:
            self.duplicate_records += 1
        else:
            yield self._append(stream, record, record.payload)

    def _append(self, stream: StreamState, record: BatchRecord | FragmentRecord, payload: bytes) -> RawBatch:
        if stream.last_seq < 0:
            # The first batch identifies the incarnation. Earlier reports from other bridges might be about another incarnation.
            stream.trust_reports = {bridge: report for bridge, report in stream.trust_reports.items() if bridge == self._writer}
        stream.last_seq, stream.partial_batch, stream.digest = record.seq, None, None
        self.newest[record.key] = payload
        return RawBatch(record.source, record.rank, record.incarnation, record.seq, record.replayed, payload)

    def _apply_fragment(self, record: FragmentRecord) -> Iterable[PartitionEvent]:
        stream = self._find_current(record.key, record.incarnation)
        if stream is None or record.seq <= stream.last_seq:
            return
        partial = PartialBatch(record.seq, record.total) if record.offset == 0 else stream.partial_batch
        reason = _invalid_reason(stream, record)
        if reason is None and record.total > DEFAULT_WIRE_LIMITS.max_payload_bytes:
            reason = f"batch {record.seq} has {record.total} bytes"
        if partial is None or not partial.is_continued_by(record):
            reason = reason or f"the fragment of batch {record.seq} at offset {record.offset} continues no batch"
        if reason is not None or partial is None:
            yield self._reject(record.key, stream, reason or "")
            return
        partial.add(record)
        stream.partial_batch = partial
        if partial.size == partial.total:
            yield self._append(stream, record, b"".join(partial.fragments))

    def _apply_incarnation(self, record: IncarnationRecord) -> Iterable[PartitionEvent]:
        stream = self.streams.get(record.key)
        if stream is None or stream.registration is None or record.incarnation <= stream.incarnation:
            self.duplicate_records += 1
            return
        self.newest.pop(record.key, None)
        # The reports are about the previous incarnation, so they are dropped. Bridges that follow the new one report again.
        self.streams[record.key] = StreamState(stream.registration, record.incarnation, engines=stream.engines)
        yield Reset(record.source, record.rank, record.incarnation, record.reason)

    def _apply_gap(self, record: GapRecord) -> Iterable[PartitionEvent]:
        stream = self._find_current(record.key, record.incarnation)
        if stream is None:
            return
        if record.last <= stream.last_seq:
            self.duplicate_records += 1
        elif (reason := _invalid_reason(stream, record)) is not None:
            yield self._reject(record.key, stream, reason)
        else:
            stream.last_seq, stream.partial_batch, stream.digest = record.last, None, None
            self.newest.pop(record.key, None)
            yield Gap(record.source, record.rank, record.first, record.last, record.incarnation, record.compacted)

    def _apply_trust(self, record: TrustRecord) -> Iterable[PartitionEvent]:
        stream = self.streams.get(record.key)
        if stream is not None and stream.registration is not None:
            stream.trust_reports.pop(record.bridge, None)
            if record.trust:
                stream.trust_reports[record.bridge] = record
            if len(stream.trust_reports) > MAX_TRUST_REPORTS:
                del stream.trust_reports[min(stream.trust_reports, key=self._heartbeat_position)]
        return ()

    def _heartbeat_position(self, bridge: str) -> int:
        heartbeat = self.heartbeats.get(bridge)
        return 0 if heartbeat is None else heartbeat.position

    def _find_current(self, key: StreamKey, incarnation: int) -> StreamState | None:
        """Return the stream if `incarnation` has not ended. If it has, count a duplicate and return None."""
        stream = self.streams.get(key)
        if stream is None or stream.registration is None or incarnation < stream.incarnation:
            self.duplicate_records += 1
            return None
        return stream

    def _reject(self, key: StreamKey, stream: StreamState, reason: str) -> InvalidRecord:
        self.invalid_records += 1
        stream.has_ended = True
        return InvalidRecord(key, reason)

    # --- queries of the state

    @property
    def tail(self) -> Tail:
        """The newest message that was read."""
        return Tail(self.position, self.name, self.history)

    def registrations(self) -> dict[StreamKey, bytes]:
        """Return the registrations of the joined streams."""
        return {key: stream.registration for key, stream in self.streams.items() if stream.registration is not None}

    def resume_point(self, key: StreamKey, bridge: str) -> ResumePoint:
        """Return where a bridge continues a stream, with the degraded reasons of its own report (else of the newest one)."""
        stream = self.streams.get(key)
        if stream is None:
            return ResumePoint(None, self.min_incarnation)
        if stream.registration is not None and not stream.has_ended and stream.last_seq < 0:
            return ResumePoint(None, stream.incarnation)
        newest = self.newest.get(key)
        digest = stream.digest if newest is None else payload_digest(newest)
        if stream.registration is None or stream.has_ended or digest is None:
            # No batch identifies the incarnation, so it ends here, and the next batch begins another incarnation.
            return ResumePoint(Checkpoint(*key, stream.incarnation, -1), 0)
        fingerprint = Fingerprint(stream.last_seq, digest, True)
        reports = stream.trust_reports
        report = reports.get(bridge) or next(reversed(reports.values()), None)
        reported = {} if report is None else report.degraded_reasons
        persistent = {name: last for name, last in reported.items() if name in _PERSISTENT_NAMES}
        return ResumePoint(Checkpoint(*key, stream.incarnation, stream.last_seq, (fingerprint,), True, persistent), 0)

    # --- encoding for snapshots

    def encode(self) -> bytes:
        """Encode the state for a snapshot."""
        for key, newest in self.newest.items():
            self.streams[key].digest = payload_digest(newest)
        return msgspec.msgpack.encode(_SavedState(*(getattr(self, field) for field in _SavedState.__struct_fields__)))

    @classmethod
    def decode(cls, data: bytes) -> PartitionState:
        """Decode the result of `encode`. Raises `ValueError` for other data."""
        state, saved = cls(), msgspec.msgpack.decode(data, type=_SavedState)
        for field in _SavedState.__struct_fields__:
            setattr(state, field, getattr(saved, field))
        return state

    @classmethod
    def after_unknown_prefix(cls, position: int, reason: str) -> PartitionState:
        """Return the state of a partition that can be read only after `position`; `reason` says why."""
        state = cls()
        state.position, state.unknown_prefix = position, reason
        state.name = state.history = None
        return state


@build_decoder_now
class _SavedState(msgspec.Struct, array_like=True):
    """Fields of a `PartitionState` that a snapshot contains."""

    position: int
    streams: dict[StreamKey, StreamState]
    heartbeats: dict[str, LastHeartbeat]
    min_incarnation: int
    unknown_prefix: str
    name: str | None
    history: bytes | None
    first_page: int


def _invalid_reason(stream: StreamState, record: BatchRecord | FragmentRecord | GapRecord) -> str | None:
    """Return why a record is not the next record of its stream."""
    first = record.first if isinstance(record, GapRecord) else record.seq
    if record.incarnation != stream.incarnation or stream.has_ended:
        return f"number {first} of incarnation {record.incarnation}, which has not begun"
    if stream.last_seq >= 0 and first > stream.last_seq + 1:
        return f"number {first} after {stream.last_seq}"
    return None


_APPLY_BY_TYPE: Final[dict[type[Record], Callable[[PartitionState, Any], Iterable[PartitionEvent]]]] = {
    JoinRecord: PartitionState._apply_join,  # noqa: SLF001 - the table of this class
    LeaveRecord: PartitionState._apply_leave,  # noqa: SLF001 - the table of this class
    BatchRecord: PartitionState._apply_batch,  # noqa: SLF001 - the table of this class
    FragmentRecord: PartitionState._apply_fragment,  # noqa: SLF001 - the table of this class
    IncarnationRecord: PartitionState._apply_incarnation,  # noqa: SLF001 - the table of this class
    GapRecord: PartitionState._apply_gap,  # noqa: SLF001 - the table of this class
    TrustRecord: PartitionState._apply_trust,  # noqa: SLF001 - the table of this class
}
