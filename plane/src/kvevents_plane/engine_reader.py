"""A bridge's thread, which follows engines and converts their deliveries into records of the log.

The thread does not index what it forwards, so its memory does not grow with the engines' caches. Replicas have an index; they
determine whether events can be decoded and whether an engine's digest matches. From a batch, the thread reads only what the
stream needs: whether the engine cleared its cache, and the heartbeat of a kvevents sender (`inspect_payload`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec.structs import replace

from kvevents.errors import ConfigError, KVEventsError, UnknownSourceError
from kvevents.stream import REASONS_ENDED_BY_CLEAR, Batch, BatchReport, Gap, RawBatch, Reset, Source, Trust, inspect_events
from kvevents.subscriber import SocketOptions, Subscriber, Transport, ZmqTransport
from kvevents.wire import decode_batch
from kvevents_plane.partition_state import ResumePoint
from kvevents_plane.records import BatchRecord, GapRecord, IncarnationRecord, StreamKey, StreamRecord, TrustRecord, stream_text
from kvevents_plane.settings import MAX_RECEIVED_BATCHES

log = logging.getLogger(__name__)

MAX_REGISTRATION_BYTES: Final = 8 << 10
MAX_SOURCE_BYTES: Final = 1 << 10
"""Maximum size of an engine's name."""
RECEIVE_SECONDS: Final = 0.02
"""Maximum number of seconds for which one turn waits for deliveries. Commands wait until the turn ends."""
TRUST_CHECK_SECONDS: Final = 0.1
"""Seconds between two checks for changed trust while no deliveries arrive."""
PAUSE_SECONDS: Final = 0.02
"""Seconds between two calls of `has_room` while it returns False."""
MAX_REASON_CHARACTERS: Final = 500
"""Maximum number of characters of a reason in the log; an engine can send a reason of any length."""
MAX_HISTORY_REQUESTS: Final = 2
"""Maximum number of consecutive requests for a sender's whole history. A third request would end no further reason."""
_CLEAR_MARKER: Final = b"leared"
"""Part of the name of the clear event in every known dialect."""
_HEARTBEAT_MARKER: Final = b"every"
"""A field that every heartbeat has."""


class Watch(NamedTuple):
    """A rank of an engine that the bridge follows."""

    source: Source
    registration: bytes = b""
    """Data of the engine for replicas, at most `MAX_REGISTRATION_BYTES`; the bridge does not interpret it."""

    @property
    def key(self) -> StreamKey:
        """The key of the stream in the log."""
        return self.source.label, self.source.rank

    def validate(self) -> Watch:
        """Return this watch if the watch's name and registration fit into the log. Raises `ConfigError`."""
        name = self.source.label
        try:
            size = len(name.encode())
        except UnicodeEncodeError as error:
            raise ConfigError(f"invalid engine name {name!r}: expected valid Unicode") from error
        if size > MAX_SOURCE_BYTES:
            raise ConfigError(f"the name of engine {name[:60]!r}... has {size} bytes; the limit is {MAX_SOURCE_BYTES}")
        if len(self.registration) > MAX_REGISTRATION_BYTES:
            raise ConfigError(
                f"the registration of {name!r} has {len(self.registration)} bytes; the limit is {MAX_REGISTRATION_BYTES}"
            )
        return self


class EngineRecord(NamedTuple):
    """A record of one stream."""

    record: StreamRecord
    follow_id: int
    """Number of the call of `follow` that led to the record. After a later call for the stream, the bridge drops the record."""


class EngineReader(threading.Thread):
    """Follows engines, and calls `on_records` in this thread with their records. The reader is the sink of its own subscriber.

    While `has_room` returns False, the thread reads nothing. Up to `receive_queue` batches of an engine then wait in its
    connection. ZeroMQ drops further batches, and the streams recover them by replay. The engines are not slowed down.
    """

    def __init__(
        self,
        bridge: str,
        on_records: Callable[[list[EngineRecord]], None],
        has_room: Callable[[], bool],
        *,
        receive_queue: int = MAX_RECEIVED_BATCHES,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="kvevents-bridge", daemon=True)
        self.failure: BaseException | None = None
        """The exception that ended the thread, or None while it has not failed."""
        self._bridge: Final = bridge
        self._on_records: Final = on_records
        self._has_room: Final = has_room
        self._subscriber: Final[Subscriber[RawBatch]] = Subscriber(
            decode=False,
            transport=transport or ZmqTransport(options=SocketOptions(receive_hwm=receive_queue)),
            clock=clock,
            sink=self,
        )
        self._commands: deque[Callable[[], None]] = deque()
        self._followed: dict[StreamKey, _FollowedStream] = {}
        self._records: list[EngineRecord] = []
        """Records for the next call of `on_records`."""
        self._is_stopping = False
        self._check_trust_at = 0.0

    # --- methods for any thread

    def follow(self, source: Source, start: ResumePoint, follow_id: int) -> None:
        """Follow a stream from the end of the log."""
        self._commands.append(lambda: self._follow(source, start, follow_id))

    def unfollow(self, key: StreamKey) -> None:
        """Stop following a stream."""
        self._commands.append(lambda: self._unfollow(key))

    def stop(self, seconds: float = 5.0) -> bool:
        """End the thread; return False if it has not ended within `seconds`."""
        self._is_stopping = True
        if self.ident is None:
            self._subscriber.close()  # the thread was never started
        elif self.is_alive():
            self.join(seconds)
        return not self.is_alive()

    # --- methods of the reader's own thread

    def run(self) -> None:
        """Read until `stop`."""
        try:
            while not self._is_stopping:
                self._turn()
        except BaseException as error:
            log.exception("the thread that follows the engines has failed; the bridge writes nothing more")
            self.failure = error
        finally:
            self._subscriber.close()

    def _turn(self) -> None:
        while self._commands:
            self._commands.popleft()()
        if not self._has_room():
            time.sleep(PAUSE_SECONDS)
            return
        deliveries = self._subscriber.receive_many(timeout=RECEIVE_SECONDS)
        now = time.monotonic()
        # Lower trust is passed on with the deliveries that cause it, so that readers do not report these deliveries as EXACT.
        if deliveries or now >= self._check_trust_at:
            self._check_trust_at = now + TRUST_CHECK_SECONDS
            self._add_trust_changes()
        if self._records:
            records, self._records = self._records, []
            self._on_records(records)

    def apply_many(self, deliveries: Sequence[Batch | RawBatch | Reset | Gap], /) -> Sequence[_DeliveryOutcome]:
        """Convert deliveries into records. The subscriber calls this method, and reports the outcomes to the streams."""
        outcomes = []
        for delivery in deliveries:
            followed = self._followed[delivery.source, delivery.rank]
            self._records.append(EngineRecord(_make_record(delivery, followed), followed.follow_id))
            outcomes.append(_DeliveryOutcome(self, delivery))
        return outcomes

    def batch_report(self, batch: RawBatch) -> BatchReport | None:
        """Return the report about a batch. Make a degraded stream start over if its sender can send the whole history.

        A sender can send the whole history if its heartbeats have digests. A matching digest would also end the degraded
        reasons, but only a replica can compare digests.
        """
        report = inspect_payload(batch.payload)
        if report is None or report.heartbeat is None or report.heartbeat.digest is None or report.cleared or batch.replayed:
            return report
        key = (batch.source, batch.rank)
        degraded_reasons = self._subscriber.checkpoint(*key).degraded_reasons
        followed = self._followed[key]
        if any(degraded_reasons.get(reason.name, batch.seq) < batch.seq for reason in REASONS_ENDED_BY_CLEAR):
            if followed.history_requests == MAX_HISTORY_REQUESTS:
                return report
            followed.history_requests += 1
            return replace(report, digest_matches=False)
        if followed.history_requests:
            followed.history_requests = 0
            return replace(report, digest_matches=True)
        return report

    def _add_trust_changes(self) -> None:
        for key, trust in self._subscriber.trust_changes():
            status = self._subscriber.status(*key)
            degraded_reasons = {reason.name: status.last_seq for reason in status.degraded_reasons}
            degraded_reasons |= self._subscriber.checkpoint(*key).degraded_reasons
            record = TrustRecord(*key, self._bridge, trust.name, trust.reason[:MAX_REASON_CHARACTERS], degraded_reasons)
            self._records.append(EngineRecord(record, self._followed[key].follow_id))

    # --- commands from other threads

    def _follow(self, source: Source, start: ResumePoint, follow_id: int) -> None:
        key = (source.label, source.rank)
        self._unfollow(key)
        followed = self._followed[key] = _FollowedStream(follow_id)
        try:
            self._subscriber.add(source, start.resume)
            followed.incarnation = self._subscriber.status(*key).incarnation
            followed.log_incarnation = start.incarnation_offset + (0 if start.resume is None else followed.incarnation)
        except KVEventsError as error:
            # The bridge continues to follow all other engines.
            log.error("cannot follow %s: %s", stream_text(key), error)  # noqa: TRY400 - no traceback
            record = TrustRecord(*key, self._bridge, Trust.CONNECTING.name, str(error)[:MAX_REASON_CHARACTERS], {})
            self._records.append(EngineRecord(record, follow_id))

    def _unfollow(self, key: StreamKey) -> None:
        if self._followed.pop(key, None) is None:
            return
        with suppress(UnknownSourceError):  # `_follow` has failed
            self._subscriber.remove(*key)


@dataclass(frozen=True, slots=True)
class _DeliveryOutcome:
    """Computes the report of a batch when the subscriber reads `report`: the reports of earlier batches change its content."""

    reader: EngineReader
    delivery: Batch | RawBatch | Reset | Gap

    @property
    def report(self) -> BatchReport | None:
        return self.reader.batch_report(self.delivery) if isinstance(self.delivery, RawBatch) else None


def inspect_payload(payload: bytes) -> BatchReport | None:
    """Return what a stream needs to know about a batch: whether it clears the cache, and the sender's heartbeat.

    Most batches contain neither. A search of their bytes shows this without decoding: MessagePack stores text unchanged.
    """
    if _CLEAR_MARKER not in payload and _HEARTBEAT_MARKER not in payload:
        return None
    return inspect_events(decode_batch(payload).batch.events)


@dataclass(slots=True)
class _FollowedStream:
    """One followed stream. Incarnations have consecutive numbers in the log, but the subscriber can skip numbers."""

    follow_id: int
    incarnation: int = 0
    """The subscriber's number of the newest incarnation."""
    log_incarnation: int = 0
    """The log's number of the newest incarnation."""
    history_requests: int = 0
    """Number of consecutive requests for the sender's whole history."""

    def to_log_incarnation(self, incarnation: int) -> int:
        """Return the log's number for an incarnation, which must be the newest incarnation or its successor."""
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            self.log_incarnation += 1
        return self.log_incarnation


def _make_record(delivery: Batch | RawBatch | Reset | Gap, followed: _FollowedStream) -> StreamRecord:
    key, incarnation = (delivery.source, delivery.rank), followed.to_log_incarnation(delivery.incarnation)
    if isinstance(delivery, RawBatch):
        return BatchRecord(*key, incarnation, delivery.seq, delivery.replayed, delivery.payload)
    if isinstance(delivery, Gap):
        return GapRecord(*key, incarnation, delivery.first, delivery.last, delivery.compacted)
    if isinstance(delivery, Reset):
        return IncarnationRecord(*key, incarnation, delivery.reason[:MAX_REASON_CHARACTERS])
    raise TypeError(f"the subscriber has decoded a batch: {delivery!r}")
