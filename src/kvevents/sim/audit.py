"""Compares the index with the engine's cache at every lookup of an engine.

An engine looks up a prompt between two of its events: after all batches before number `seq`, and after the first `position`
events of batch `seq`. So the audit queries the index at exactly this position, no matter how late the batch arrives. If the
stream is exact, index and engine must find equally many tokens. A batch with a position inside is applied in parts.
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


class Mark(NamedTuple):
    """The position of a lookup in the stream of an engine."""

    incarnation: int
    """Number of the engine's incarnation; the first is 0."""
    seq: int
    """Sequence number of the batch that the step published; the next batch's number if the step published no batch."""
    position: int
    """Number of events in this batch that precede the lookup."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A lookup in an engine's cache, and the lookup's result."""

    mark: Mark
    sequence: Sequence
    tokens: int
    """Number of the sequence's tokens that were looked up."""
    cached: int


class AuditCounts(msgspec.Struct):
    """Counters of an audit, which are copied into a `PolicyResult`."""

    checked: int = 0
    """Number of lookups that were compared after all earlier batches had been delivered."""
    disagreements: int = 0
    """Number of compared lookups for which index and engine found different numbers of tokens."""
    unproven: int = 0
    """Number of lookups that could not be compared, because the stream was not exact or earlier batches were lost."""
    examples: list[Disagreement] = []


@dataclass(slots=True)
class _Stream:
    """Position in one worker's stream, and the lookups that are not compared yet."""

    incarnation: int = 0
    next: int = 0
    """Sequence number of the next batch to apply."""
    numbered: int = 0
    """Number of batches and parts of batches that were applied to the index in this incarnation."""
    pending: deque[Expected] = field(default_factory=deque)


class Audit:
    """Applies deliveries to an index and compares lookups. One thread calls all methods, but another can call `expect`."""

    def __init__(self, index: PrefixIndex, exact: Callable[[Worker], bool] = lambda _: True) -> None:
        self.index: Final = index
        self.others: Final[list[PrefixIndex]] = []
        """Further indexes to which the same deliveries are applied, but whose lookups are not compared."""
        self.counts: Final = AuditCounts()
        self._exact: Final = exact
        self._streams: Final[dict[Worker, _Stream]] = {}

    def add(self, worker: Worker) -> None:
        """Add a worker. Call this before `expect` for the worker."""
        self._streams[worker] = _Stream()

    def expect(self, worker: Worker, expected: Expected) -> None:
        """Compare this lookup as soon as the index has reached the lookup's position."""
        self._streams[worker].pending.append(expected)

    def apply(self, delivery: Batch | RawBatch | Reset | Gap, incarnation: int | None = None) -> ApplyResult:
        """Apply the next delivery of a stream to the index.

        `incarnation` is the engine's incarnation. None means the current one, also for a reset whose new one is still unknown.
        """
        worker = (delivery.source, delivery.rank)
        stream = self._streams[worker]
        for other in self.others:
            other.apply(delivery)
        if isinstance(delivery, Reset):
            self._skip_to(worker, stream, Mark(stream.incarnation if incarnation is None else incarnation, 0, 0))
            stream.numbered = 0
            return self.index.apply(delivery)
        if isinstance(delivery, Gap):
            self._skip_to(worker, stream, Mark(stream.incarnation, delivery.last + 1, 0))
            stream.numbered += 1
            return self.index.apply(msgspec.structs.replace(delivery, first=stream.numbered - 1, last=stream.numbered - 1))
        return self._batch(worker, stream, delivery, stream.incarnation if incarnation is None else incarnation)

    def settle(self, worker: Worker) -> None:
        """Compare the lookups whose position is before the next batch."""
        stream = self._streams[worker]
        self._compare_until(worker, stream, Mark(stream.incarnation, stream.next, 0))

    def finish(self) -> None:
        """Compare all lookups that can be compared, and count all other lookups as `unproven`."""
        for worker, stream in self._streams.items():
            self.settle(worker)
            self.counts.unproven += len(stream.pending)
            stream.pending.clear()

    # --- streams

    def _batch(self, worker: Worker, stream: _Stream, batch: Batch | RawBatch, incarnation: int) -> ApplyResult:
        if (incarnation, batch.seq) != (stream.incarnation, stream.next):
            self._skip_to(worker, stream, Mark(incarnation, batch.seq, 0))
        self.settle(worker)
        # `list` makes a copy, because another thread can call `expect` at the same time.
        splits = sorted({one.mark.position for one in list(stream.pending) if one.mark[:2] == (incarnation, batch.seq)})
        if splits:
            decoded, start = batch.decode() if isinstance(batch, RawBatch) else batch, 0
            for split in splits:
                self._apply_batch(stream, _partial_batch(decoded, decoded.events[start:split]))
                start = split
                self._compare_until(worker, stream, Mark(incarnation, batch.seq, split))
            applied = self._apply_batch(stream, _partial_batch(decoded, decoded.events[start:]))
            applied = ApplyResult(applied.status, inspect_events(decoded.events, decoded.rejected))
        else:
            applied = self._apply_batch(stream, batch)
        stream.next = batch.seq + 1
        self.settle(worker)
        return applied

    def _skip_to(self, worker: Worker, stream: _Stream, mark: Mark) -> None:
        """Continue the stream at `mark`. Lookups between the old position and `mark` cannot be compared."""
        self.settle(worker)
        if mark > Mark(stream.incarnation, stream.next, 0):
            while stream.pending and stream.pending[0].mark < mark:
                stream.pending.popleft()
                self.counts.unproven += 1
        stream.incarnation, stream.next = mark.incarnation, mark.seq

    def _apply_batch(self, stream: _Stream, batch: Batch | RawBatch) -> ApplyResult:
        number = stream.numbered
        stream.numbered += 1
        return self.index.apply_payload((batch.source, batch.rank), batch.incarnation, number, batch.payload)

    # --- lookups

    def _compare_until(self, worker: Worker, stream: _Stream, mark: Mark) -> None:
        """Compare the lookups up to `mark`, which is the position that the index has reached."""
        counts = self.counts
        while stream.pending and stream.pending[0].mark <= mark:
            expected = stream.pending.popleft()
            if not self._exact(worker):
                counts.unproven += 1
                continue
            sequence = expected.sequence
            # The last token of a sequence never counts as cached.
            match = self.index.match(
                sequence.tokens[: expected.tokens - 1], Namespace(lora=sequence.lora, salt=sequence.salt)
            ).get(*worker)
            indexed = 0 if match is None else match.tokens
            differs = indexed != expected.cached
            counts.checked += 1
            counts.disagreements += differs
            if differs and len(counts.examples) < MAX_EXAMPLES:
                counts.examples.append(Disagreement(*worker, *expected.mark, expected.tokens, expected.cached, indexed))


_encode: Final = batch_encoder()


def _partial_batch(batch: Batch, events: list[KVEvent]) -> RawBatch:
    payload = _encode(KVEventBatch(batch.ts, events, batch.rank))
    return RawBatch(batch.source, batch.rank, batch.incarnation, batch.seq, batch.replayed, payload)
