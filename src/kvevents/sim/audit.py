"""Compares the index with the engine's cache at every lookup of an engine.

An engine looks up a prompt between two of its events: after all batches before number `seq`, and after the first `event_index`
events of batch `seq`. So the audit queries the index at exactly this position, even if the batch arrives late. If the stream is
exact, the index must find as many tokens as the engine. If a lookup is between two events of one batch, the batch is applied in
parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from kvevents.events import KVEvent, KVEventBatch
from kvevents.index import ApplyResult, Namespace, PrefixIndex
from kvevents.routing import Worker
from kvevents.sim.requests import Sequence
from kvevents.sim.results import Disagreement
from kvevents.stream import Batch, Gap, RawBatch, Reset, inspect_events
from kvevents.wire.encode import batch_encoder

MAX_EXAMPLES: Final = 10
"""Maximum number of disagreements that are reported with details. All disagreements are counted."""


class LookupPosition(NamedTuple):
    """A position in the stream of an engine, at which the engine looked up a prompt."""

    incarnation: int
    """Number of the engine's incarnation; the first is 0."""
    seq: int
    """Sequence number of the batch that the step published; the next batch's number if the step published no batch."""
    event_index: int
    """Number of events in this batch that precede the lookup."""


@dataclass(frozen=True, slots=True)
class EngineLookup:
    """A lookup in an engine's cache, and the lookup's result."""

    position: LookupPosition
    sequence: Sequence
    tokens: int
    """Number of the sequence's tokens that were looked up."""
    cached: int


class AuditCounts(msgspec.Struct):
    """Counters of an audit, which are copied into a `PolicyResult`."""

    checked: int = 0
    """Number of lookups that were compared after the delivery of all earlier batches."""
    disagreements: int = 0
    """Number of compared lookups for which index and engine found different numbers of tokens."""
    unproven: int = 0
    """Number of lookups that could not be compared, because the stream was not exact or earlier batches were lost."""
    examples: list[Disagreement] = []


@dataclass(slots=True)
class _AuditedStream:
    """Position in one worker's stream, and the lookups that are not compared yet."""

    incarnation: int = 0
    next_seq: int = 0
    """Sequence number of the next batch to apply."""
    applied_count: int = 0
    """Number of batches and parts of batches that were applied to the index in this incarnation."""
    pending: deque[EngineLookup] = field(default_factory=deque)


class Audit:
    """Applies deliveries to an index and compares lookups. One thread calls all methods; only `expect` is thread-safe."""

    def __init__(self, index: PrefixIndex, exact: Callable[[Worker], bool] = lambda _: True) -> None:
        self.index: Final = index
        self.further_indexes: Final[list[PrefixIndex]] = []
        """Indexes to which the same deliveries are applied, but with which no lookup is compared."""
        self.counts: Final = AuditCounts()
        self._exact: Final = exact
        self._streams: Final[dict[Worker, _AuditedStream]] = {}

    def add(self, worker: Worker) -> None:
        """Add a worker. Call this before `expect` for the worker."""
        self._streams[worker] = _AuditedStream()

    def expect(self, worker: Worker, lookup: EngineLookup) -> None:
        """Compare this lookup as soon as the index has reached the lookup's position."""
        self._streams[worker].pending.append(lookup)

    def apply(self, delivery: Batch | RawBatch | Reset | Gap, incarnation: int | None = None) -> ApplyResult:
        """Apply the next delivery of a stream to the index.

        `incarnation` is the engine's incarnation. None means the current incarnation or, for a reset, an unknown one.
        """
        worker = (delivery.source, delivery.rank)
        stream = self._streams[worker]
        for index in self.further_indexes:
            index.apply(delivery)
        if isinstance(delivery, Reset):
            self._skip_to(worker, stream, LookupPosition(stream.incarnation if incarnation is None else incarnation, 0, 0))
            stream.applied_count = 0
            return self.index.apply(delivery)
        if isinstance(delivery, Gap):
            self._skip_to(worker, stream, LookupPosition(stream.incarnation, delivery.last + 1, 0))
            stream.applied_count += 1
            number = stream.applied_count - 1
            return self.index.apply(msgspec.structs.replace(delivery, first=number, last=number))
        return self._process_batch(worker, stream, delivery, stream.incarnation if incarnation is None else incarnation)

    def position(self, worker: Worker) -> tuple[int, int]:
        """Return the incarnation, and the number of the next batch to apply. Any thread may call this."""
        stream = self._streams[worker]
        return stream.incarnation, stream.next_seq

    def compare_due(self, worker: Worker) -> None:
        """Compare the lookups whose position is before the next batch."""
        stream = self._streams[worker]
        self._compare_until(worker, stream, LookupPosition(stream.incarnation, stream.next_seq, 0))

    def finish(self) -> None:
        """Compare all lookups that can be compared, and count all other lookups as `unproven`."""
        for worker, stream in self._streams.items():
            self.compare_due(worker)
            self.counts.unproven += len(stream.pending)
            stream.pending.clear()

    # --- streams

    def _process_batch(self, worker: Worker, stream: _AuditedStream, batch: Batch | RawBatch, incarnation: int) -> ApplyResult:
        if (incarnation, batch.seq) != (stream.incarnation, stream.next_seq):
            self._skip_to(worker, stream, LookupPosition(incarnation, batch.seq, 0))
        self.compare_due(worker)
        # `list` makes a copy, because another thread can call `expect` at the same time.
        positions = [lookup.position for lookup in list(stream.pending)]
        splits = sorted({position.event_index for position in positions if position[:2] == (incarnation, batch.seq)})
        if splits:
            decoded, start = batch.decode() if isinstance(batch, RawBatch) else batch, 0
            for split in splits:
                self._apply_batch(stream, _partial_batch(decoded, decoded.events[start:split]))
                start = split
                self._compare_until(worker, stream, LookupPosition(incarnation, batch.seq, split))
            applied = self._apply_batch(stream, _partial_batch(decoded, decoded.events[start:]))
            applied = ApplyResult(applied.status, inspect_events(decoded.events, decoded.rejected))
        else:
            applied = self._apply_batch(stream, batch)
        stream.next_seq = batch.seq + 1
        self.compare_due(worker)
        return applied

    def _skip_to(self, worker: Worker, stream: _AuditedStream, position: LookupPosition) -> None:
        """Continue the stream at `position`. Lookups between the old position and `position` cannot be compared."""
        self.compare_due(worker)
        if position > LookupPosition(stream.incarnation, stream.next_seq, 0):
            while stream.pending and stream.pending[0].position < position:
                stream.pending.popleft()
                self.counts.unproven += 1
        # Another thread may call `position` between these assignments. The lookup must not get the old number in the new
        # incarnation.
        stream.next_seq, stream.incarnation = position.seq, position.incarnation

    def _apply_batch(self, stream: _AuditedStream, batch: Batch | RawBatch) -> ApplyResult:
        number = stream.applied_count
        stream.applied_count += 1
        return self.index.apply_payload((batch.source, batch.rank), batch.incarnation, number, batch.payload)

    # --- lookups

    def _compare_until(self, worker: Worker, stream: _AuditedStream, position: LookupPosition) -> None:
        """Compare the lookups up to `position`, the current position of the index."""
        counts = self.counts
        while stream.pending and stream.pending[0].position <= position:
            lookup = stream.pending.popleft()
            if not self._exact(worker):
                counts.unproven += 1
                continue
            sequence = lookup.sequence
            # The last token of a sequence never counts as cached.
            namespace = Namespace(lora=sequence.lora, salt=sequence.salt)
            match = self.index.match(sequence.tokens[: lookup.tokens - 1], namespace).get(*worker)
            indexed = 0 if match is None else match.tokens
            differs = indexed != lookup.cached
            counts.checked += 1
            counts.disagreements += differs
            if differs and len(counts.examples) < MAX_EXAMPLES:
                counts.examples.append(Disagreement(*worker, *lookup.position, lookup.tokens, lookup.cached, indexed))


_encode: Final = batch_encoder()


def _partial_batch(batch: Batch, events: list[KVEvent]) -> RawBatch:
    payload = _encode(KVEventBatch(batch.ts, events, batch.rank))
    return RawBatch(batch.source, batch.rank, batch.incarnation, batch.seq, batch.replayed, payload)
