"""Puts the batches of one incarnation in order: the next number, batches that arrive early, and gaps."""

from __future__ import annotations

import enum
import heapq
import math
from typing import NamedTuple

from kvevents.stream.settings import StreamLimits
from kvevents.wire.decode import begins_with_clear


class PendingBytes:
    """Counts the bytes of batches that wait in several streams, with one limit for all streams together."""

    def __init__(self, limit: float = math.inf) -> None:
        self.bytes_used = 0
        self._limit = limit

    def has_room(self, size: int) -> bool:
        """Whether the limit allows one more waiting batch of this size."""
        return self.bytes_used + size <= self._limit


class EarlyBatch(NamedTuple):
    """A batch that waits until all earlier batches were delivered or given up."""

    payload: bytes
    replayed: bool


class ReorderBuffer:
    """Early batches by number, bounded by `StreamLimits.max_pending_batches` and `max_pending_bytes`."""

    def __init__(self, limits: StreamLimits, pending: PendingBytes) -> None:
        self._limits = limits
        self._pending = pending
        self._batches: dict[int, EarlyBatch] = {}
        self._order: list[int] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def get(self, seq: int) -> EarlyBatch | None:
        """Return the batch with this number."""
        return self._batches.get(seq)

    def add(self, seq: int, payload: bytes, *, replayed: bool) -> bool:
        """Add a batch with a number that is not in the buffer. Return False if a limit is reached."""
        size = self._bytes + len(payload)
        is_full = len(self._batches) >= self._limits.max_pending_batches or size > self._limits.max_pending_bytes
        if is_full or not self._pending.has_room(len(payload)):
            return False
        self._batches[seq] = EarlyBatch(payload, replayed)
        heapq.heappush(self._order, seq)
        self._count(len(payload))
        return True

    def _count(self, size: int) -> None:
        self._bytes += size
        self._pending.bytes_used += size

    def pop(self, seq: int) -> EarlyBatch | None:
        """Remove and return the batch with this number."""
        batch = self._batches.pop(seq, None)
        if batch is not None:
            self._count(-len(batch.payload))
            self._clean_order()
        return batch

    def pop_live_run(self, seq: int) -> list[bytes]:
        """Remove and return the payloads of consecutive batches that came live, from number `seq` on."""
        batches, payloads = self._batches, list[bytes]()
        while (batch := batches.get(seq)) is not None and not batch.replayed:
            payloads.append(batches.pop(seq).payload)
            seq += 1
        self._count(-sum(map(len, payloads)))
        self._clean_order()
        return payloads

    def _clean_order(self) -> None:
        """Remove the lowest numbers from the heap while the buffer has no batches with them."""
        if not self._batches:
            self._order.clear()
        while self._order and self._order[0] not in self._batches:
            heapq.heappop(self._order)

    def first(self) -> int | None:
        """Return the lowest number in the buffer."""
        return self._order[0] if self._order else None

    def drop_up_to(self, last: int) -> None:
        """Drop the batches with numbers up to `last`."""
        for seq in [seq for seq in self._batches if seq <= last]:
            self.pop(seq)

    def drop_replayed(self) -> None:
        """Drop the batches that did not come live."""
        for seq in [seq for seq, batch in self._batches.items() if batch.replayed]:
            self.pop(seq)

    def clear(self) -> int:
        """Drop all batches. Return how many batches were dropped."""
        count = len(self._batches)
        self._batches.clear()
        self._order.clear()
        self._count(-self._bytes)
        return count


class Order(enum.Enum):
    """How the number of a live batch compares with the numbers received before."""

    NEXT = enum.auto()
    """The next number to deliver."""
    AHEAD = enum.auto()
    """An earlier batch is missing, or a part of a snapshot can still replace the batch."""
    KNOWN = enum.auto()
    """Replay has delivered this number already."""
    REGRESSED = enum.auto()
    """The number is not above the newest live batch's number, although the numbers of one connection always rise."""


class SnapshotParts:
    """Numbers of the parts of the newest snapshot that has several parts; -1 for no part. Replay sends the parts in order."""

    __slots__ = ("last", "last_not_final", "stopped_at")

    def __init__(self) -> None:
        self.last = -1
        """The newest delivered part if the answer can contain a next part, else -1."""
        self.stopped_at = -1
        """The part after which an answer stopped."""
        self.last_not_final = -1
        """The newest part whose heartbeat states that more parts follow."""

    @property
    def is_open(self) -> bool:
        """Whether the next part of this answer is still accepted."""
        return self.last >= 0

    @property
    def is_truncated(self) -> bool:
        """Whether an answer stopped after a part that is not the last part."""
        return self.stopped_at >= 0 and self.stopped_at == self.last_not_final

    def stop(self) -> None:
        """Record that no further part of the snapshot comes."""
        self.stopped_at, self.last = self.last, -1


class GapEnd(NamedTuple):
    """The last number of a gap, and whether a snapshot represents the missing batches."""

    last: int
    compacted: bool


class Sequencer:
    """The order of one incarnation. Each number from 0 on is either delivered once or part of one gap, in ascending order."""

    def __init__(self, limits: StreamLimits, early: ReorderBuffer) -> None:
        self.next_seq = 0
        """The number that must be delivered next."""
        self.highest_known = -1
        """The highest number that is known to exist."""
        self.last_live = -1
        """Number of the newest live batch."""
        self.early = early
        self.replayed_digests: dict[int, bytes] = {}
        """Digests of the newest batches that replay delivered, by number, the oldest first."""
        self._max_digests = limits.max_replayed_digests
        self.parts = SnapshotParts()

    @property
    def is_complete(self) -> bool:
        """Whether all batches that are known to exist were delivered or given up."""
        return self.next_seq > self.highest_known

    def order_of(self, seq: int) -> Order:
        """Classify the number of a live batch."""
        if seq <= self.last_live:
            return Order.REGRESSED
        if seq == self.next_seq and self.parts.last < 0:
            return Order.NEXT
        return Order.KNOWN if seq < self.next_seq else Order.AHEAD

    def add_digest(self, seq: int, digest: bytes) -> None:
        """Add the digest of a batch that replay has delivered, and evict the oldest digest if there are too many."""
        self.replayed_digests[seq] = digest
        if len(self.replayed_digests) > self._max_digests:
            del self.replayed_digests[next(iter(self.replayed_digests))]

    def pop_next(self) -> EarlyBatch | None:
        """Remove and return the early batch that is next in order, unless the next part of a snapshot can replace it."""
        return None if self.parts.last >= 0 else self.early.pop(self.next_seq)

    def pop_live_run(self) -> list[bytes]:
        """Remove and return the payloads of the early live batches that are next in order; see `pop_next`."""
        return [] if self.parts.last >= 0 else self.early.pop_live_run(self.next_seq)

    def gap_before_early_batches(self) -> GapEnd:
        """Return the gap before the first early batch; if no batch waits, the gap up to the highest known number.

        A replayed batch that begins with a clear is a snapshot; a clear in a live batch comes from the engine itself.
        """
        first = self.early.first()
        if first is None or (batch := self.early.get(first)) is None:
            return GapEnd(self.highest_known, compacted=False)
        return GapEnd(first - 1, compacted=batch.replayed and begins_with_clear(batch.payload))

    def gap_before(self, seq: int) -> GapEnd:
        """Return the gap before `seq`, the first number of an answer; if an earlier batch waits, the gap before that batch."""
        first = self.early.first()
        return GapEnd(seq - 1 if first is None else min(seq, first) - 1, compacted=False)
