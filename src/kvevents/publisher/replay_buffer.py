"""The batches that can be replayed, and the snapshot that represents older batches.

Theory of operation. Batches that leave the buffer are compacted. If a consumer requests batches that are older than the buffer,
it gets a snapshot first. Consumers treat a snapshot like ordinary batches, so its numbers must express what it contains:

- If no number was skipped, the snapshot ends with the number of the last batch that it contains. A snapshot larger than one
  payload has several parts (see `compaction`). A consumer must receive all parts or none, but it can hold live batches of the
  same numbers. So only a request that starts before the first part gets the snapshot, and the numbers of two snapshots never
  overlap. Until enough batches were evicted for a new snapshot, the previous snapshot is sent, followed by the batches that
  were evicted after it was built.
- If a number was skipped, the snapshot ends just before that number, so every consumer sees a gap after the clear and considers
  the state incomplete. An empty batch follows with the number of the last batch that the snapshot contains. A consumer
  that already holds the original batch of that number sees two contents under one number and starts over.

Sending never waits for compaction. `compact_until_stopped` is the body of a thread that evicts and compacts batches; while it
runs, `extend` only appends. If that thread does not run or lags too far, `extend` compacts, which bounds memory. The thread
compacts small pieces with pauses, so that a publisher thread on the same CPU waits for at most one piece.

If compaction raises any exception, it is switched off, because the compactor may have applied half a batch. From then on the
buffer keeps `steps` batches and sends no snapshot, and a late consumer sees that its history is truncated.

Locks, outermost first: `_snapshot_lock` (one snapshot is built at a time), `_history_lock` (the compactor, and what was
evicted), `_buffer_lock` (the buffered batches).
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice, takewhile
from operator import itemgetter
from typing import Final, NamedTuple

from kvevents.events import KVEventBatch
from kvevents.publisher.compaction import MAX_RANKS, MAX_SNAPSHOT_PARTS, Compactor, Encode, SequencedPayload, encode_snapshot
from kvevents.publisher.settings import ReplayBufferSettings
from kvevents.publisher.stats import HistoryStats
from kvevents.wire import decode_batch, encode_batch

logger = logging.getLogger(__name__)

_MAX_REASON_CHARACTERS: Final = 200
"""Maximum number of characters of an `unavailable_reason`."""
_DEFAULT_SETTINGS: Final = ReplayBufferSettings()

_seq_of = itemgetter(0)
_payload_of = itemgetter(1)


class BatchDeque(deque[SequencedPayload]):
    """Batches with ascending numbers, oldest first, and their size."""

    bytes = 0
    """Payload bytes of all batches."""

    def add(self, batches: Sequence[SequencedPayload]) -> None:
        """Append batches, whose numbers are higher than all earlier numbers."""
        self.extend(batches)
        self.bytes += _payload_bytes(batches)

    def popleft_many(self, count: int) -> list[SequencedPayload]:
        """Remove and return the `count` oldest batches; at least `count` batches must exist."""
        batches = [self.popleft() for _ in range(count)]
        self.bytes -= _payload_bytes(batches)
        return batches

    def count_within(self, size: int) -> int:
        """Return how many of the oldest batches have at most `size` bytes in total, but at least 1. The deque is not empty."""
        sizes = accumulate(len(payload) for _, payload in self)
        return max(1, sum(1 for _ in takewhile(lambda total: total <= size, sizes)))

    def batches_from(self, start: int) -> list[SequencedPayload]:
        """Return the batches numbered `start` or higher."""
        max_count = max(0, self[-1][0] - start + 1) if self else 0  # an upper bound, because some numbers have no batch
        newest = [*islice(reversed(self), max_count)][::-1]
        return newest[bisect_left(newest, start, key=_seq_of) :]


def _payload_bytes(batches: Sequence[SequencedPayload]) -> int:
    return sum(map(len, map(_payload_of, batches)))


class CompactedHistory(NamedTuple):
    """The history that has left a buffer, in the form that `ReplayBuffer.restore` takes."""

    last_seq: int
    """Number of the last batch in the history."""
    payloads: list[bytes]
    """State of the compactor for `restore`; consumers cannot read these payloads."""
    is_partial: bool = False
    """Whether any number up to `last_seq` was skipped since the stream was last cleared."""


class _Snapshot(NamedTuple):
    """Batches that replace all batches up to a number."""

    last_seq: int
    """Number of the last batch in the snapshot."""
    batches: list[SequencedPayload]
    latest_start: int
    """Highest first number of a request that gets the snapshot."""
    has_parts: bool
    """Whether the snapshot has several parts, which have the numbers of batches that were sent."""


class _SnapshotInput(NamedTuple):
    last_seq: int
    last_payload: bytes
    gap: int | None
    pieces: list[bytes] | None
    """Pieces of a new snapshot; None if no new snapshot is needed, or if the history is unavailable."""
    recently_evicted: list[SequencedPayload]


class ReplayBuffer:
    """The last `steps` published batches, in order. Numbers rise but can have gaps.

    With a `compactor`, evicted batches are compacted into a snapshot: a clear, and stores of the live blocks. `encode` encodes
    the snapshot. Batches are then evicted in groups: the buffer can exceed `steps` by less than `settings.group_size`, and by
    at most `steps / settings.min_groups`. If the batches have more than `settings.max_bytes`, fewer than `steps` are held.

    One thread calls `extend` and one thread calls `batches_from`; all other methods may be called from any thread.
    """

    def __init__(
        self,
        steps: int,
        compactor: Compactor | None = None,
        encode: Encode = encode_batch,
        *,
        settings: ReplayBufferSettings = _DEFAULT_SETTINGS,
    ) -> None:
        self._steps = steps
        self._settings = settings
        self._tolerance = 0 if compactor is None else min(settings.group_size - 1, steps // settings.min_groups)
        self._batches = BatchDeque()
        self.make_locks()
        self._compactor = compactor
        self._history_stats = None if compactor is None else HistoryStats()
        self._has_thread = self._is_stopped = False
        self._compaction_failed = False
        self._encode = encode
        self.incarnation = 0
        """The incarnation that the sender's heartbeats state; the heartbeats in parts of a snapshot also state it."""
        self._last_evicted: SequencedPayload = (-1, b"")
        self._newest_gap: int | None = None
        """The newest evicted number that was skipped since the stream was last cleared; None if no number was skipped."""
        self._recently_evicted: deque[SequencedPayload] = deque(maxlen=MAX_SNAPSHOT_PARTS + MAX_RANKS)
        self._snapshot: _Snapshot | None = None
        self._snapshot_failure: str | None = None
        """Why the last snapshot could not be built; None if the snapshot was built."""

    def extend(self, batches: Sequence[SequencedPayload]) -> None:
        """Add batches and evict the oldest ones. Call this before you send the batches, so that consumers can request them."""
        with self._buffer_lock:
            self._batches.add(batches)
            excess = self._count_excess(self._tolerance)
        if excess and (not self._has_thread or excess > self._settings.max_backlog):
            with self._history_lock:
                self._evict()
        elif excess:
            self._work.set()

    def compact_until_stopped(self) -> None:
        """Evict and compact batches until `stop_compacting`. Run this in its own thread; another thread calls `extend`."""
        self._has_thread = True
        try:
            while not self._is_stopped:
                self._work.wait()
                self._work.clear()
                self._compact_in_pieces()
        except BaseException:
            logger.exception("the compaction thread failed; the publisher thread compacts from now on")
        finally:
            self._has_thread = False

    def _compact_in_pieces(self) -> None:
        """Compact the current excess, with pauses unless the excess is so large that it would grow during a pause."""
        settings = self._settings
        with self._buffer_lock:
            excess = self._count_excess(self._tolerance)
        while excess > 0 and not self._is_stopped:
            max_bytes = settings.compaction_bytes if excess <= 2 * settings.group_size else None
            with self._history_lock:
                count = self._evict(exactly=True, max_bytes=max_bytes)
            # The excess is not exact: a replay request may have evicted some of its batches.
            excess = excess - count if count else 0
            if excess > 0:
                self._pause.wait(settings.compaction_pause)

    def stop_compacting(self) -> None:
        """End `compact_until_stopped`; afterwards `extend` itself compacts. Returns at once."""
        self._has_thread, self._is_stopped = False, True
        self._work.set()
        self._pause.set()

    def _count_excess(self, tolerance: int) -> int:
        """Return how many of the oldest batches to evict now; 0 if the buffer exceeds `steps` by at most `tolerance`."""
        batches = self._batches
        excess = len(batches) - self._steps
        excess = excess if excess > tolerance else 0
        stats = self._history_stats
        if stats is not None and stats.unavailable_reason is None and batches.bytes > self._settings.max_bytes:
            # Evict more batches than necessary, to delay the next eviction. Never evict the newest batch: replay needs its
            # number.
            target = self._settings.max_bytes - self._settings.max_bytes // self._settings.min_groups
            sizes = accumulate(batches, lambda size, batch: size - len(batch[1]), initial=batches.bytes)
            excess = max(excess, min(sum(1 for _ in takewhile(lambda size: size > target, sizes)), len(batches) - 1))
        return excess

    def _evict(self, *, exactly: bool = False, max_bytes: int | None = None) -> int:
        """Evict and compact the excess; return the number of evicted batches. The caller holds `_history_lock`.

        If `exactly` is True, even an excess smaller than a group is evicted. `max_bytes` limits the evicted payload bytes, but
        at least one batch is evicted.
        """
        with self._buffer_lock:
            excess = self._count_excess(0 if exactly else self._tolerance)
            if excess and max_bytes is not None:
                excess = min(excess, self._batches.count_within(max_bytes))
            batches = self._batches.popleft_many(excess)
        if batches and self._compactor is not None:
            with self._disabling_compaction_on_error():
                self._compact(self._compactor, batches)
        return len(batches)

    @contextmanager
    def _disabling_compaction_on_error(self) -> Iterator[None]:
        try:
            yield
        # A panic of native code is a BaseException.
        except BaseException as error:
            with self._history_lock:
                self._compactor = self._snapshot = None
                self._recently_evicted.clear()
                self._compaction_failed = True
                reason = f"failed: {type(error).__name__}: {error}"[:_MAX_REASON_CHARACTERS]
                self._history_stats = HistoryStats(batches=self._last_evicted[0] + 1, unavailable_reason=reason)
            logger.exception("compaction failed and is switched off; replay begins with the oldest buffered batch from now on")
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise

    def _compact(self, compactor: Compactor, batches: list[SequencedPayload]) -> None:
        if batches[-1][0] - self._last_evicted[0] == len(batches):  # no number between the batches was skipped
            compactor.extend(batches)
            self._last_evicted = batches[-1]
        else:
            for seq, payload in batches:
                if seq != self._last_evicted[0] + 1:
                    compactor.mark_gap()
                    self._newest_gap = seq - 1
                compactor.append(payload)
                self._last_evicted = (seq, payload)
        if self._newest_gap is not None and not compactor.is_partial:
            self._newest_gap = None
        self._recently_evicted.extend(batches)
        self._update_stats()

    def buffered_batches(self) -> list[SequencedPayload]:
        """Return the buffered batches, without a snapshot of older batches."""
        with self._buffer_lock:
            return list(self._batches)

    def batches_from(self, start: int) -> list[SequencedPayload]:
        """Return the buffered batches numbered `start` or higher.

        If `start` is older than the buffer, return the snapshot of all older batches and then all buffered batches; or the last
        `steps` batches if there is no snapshot.
        """
        with self._snapshot_lock:
            with self._history_lock:
                self._evict(exactly=True)
                with self._buffer_lock:
                    batches = self._batches.batches_from(start)
                    newest = self._batches[-1][0] if self._batches else self._last_evicted[0]
                is_older = start <= self._last_evicted[0]
                source = self._snapshot_input() if is_older and start <= newest else None
            prefix = [] if source is None else self._batches_before_buffered(start, source)
        return prefix + batches if prefix or not is_older else batches[-self._steps :] if self._steps else []

    # --- snapshots (encoded outside of the inner locks, because 50,000 blocks take a tenth of a second)

    def _snapshot_input(self) -> _SnapshotInput | None:
        compactor, snapshot = self._compactor, self._snapshot
        if compactor is None:
            return None
        seq, payload = self._last_evicted
        # A snapshot of n parts is reused until n more batches are evicted; an earlier new snapshot would overlap its numbers.
        is_current = snapshot is not None and seq - snapshot.last_seq < (len(snapshot.batches) if snapshot.has_parts else 1)
        snapshot_input = None
        with self._disabling_compaction_on_error():
            pieces = None if is_current else compactor.snapshot_pieces(self._settings.max_payload_bytes)
            snapshot_input = _SnapshotInput(seq, payload, self._newest_gap, pieces, list(self._recently_evicted))
        return snapshot_input  # noqa: RET504 - after an exception, the variable is None

    def _batches_before_buffered(self, start: int, source: _SnapshotInput) -> list[SequencedPayload]:
        """Return the batches that precede the buffered ones in a reply from `start`. A snapshot is encoded once."""
        if source.pieces is not None:
            with self._disabling_compaction_on_error():
                self._refresh_snapshot(source, source.pieces)
        snapshot, recent = self._snapshot, source.recently_evicted
        if snapshot is None or (snapshot.last_seq < source.last_seq and (not recent or recent[0][0] > snapshot.last_seq + 1)):
            return []
        batches = snapshot.batches if start <= snapshot.latest_start else []
        return batches + [batch for batch in recent if batch[0] > snapshot.last_seq and batch[0] >= start]

    def _refresh_snapshot(self, source: _SnapshotInput, pieces: list[bytes]) -> None:
        result = self._build_snapshot(source, pieces)
        self._snapshot_failure = result if isinstance(result, str) else None
        with self._history_lock:
            self._update_stats()
        last = self._snapshot
        if isinstance(result, str):
            return
        if last is None or not result.has_parts or result.batches[0][0] > last.last_seq:
            self._snapshot = result

    def _build_snapshot(self, source: _SnapshotInput, pieces: list[bytes]) -> _Snapshot | str:
        """Return the snapshot, or the reason why it cannot be built."""
        batch = decode_batch(source.last_payload).batch
        encode, rank, limit = self._encode, batch.data_parallel_rank, self._settings.max_payload_bytes
        parts = encode_snapshot(pieces, batch.ts, rank, encode, limit, self.incarnation)
        if parts is None:
            return "oversized"
        last = source.last_seq if source.gap is None else source.gap - 1
        first = last - len(parts) + 1
        has_parts = source.gap is None and len(parts) > 1
        if first < has_parts:  # consumers request the parts from the number before the first part
            return "oversized" if source.gap is None else "batches"
        batches = list(zip(range(first, last + 1), parts, strict=True))
        if source.gap is not None:
            batches.append((source.last_seq, encode(KVEventBatch(batch.ts, [], rank))))
        return _Snapshot(source.last_seq, batches, first - has_parts, has_parts)

    # --- transfer of the history to another buffer

    def compacted_history(self) -> CompactedHistory | None:
        """Return the history that has left the buffer; None if no batch has left, or if the history is unavailable."""
        with self._history_lock:
            seq, last = self._last_evicted
            if self._compactor is None or seq < 0:
                return None
            payloads = self._compactor.payloads(self._settings.max_payload_bytes, decode_batch(last).batch.ts)
            return None if payloads is None else CompactedHistory(seq, payloads, self._newest_gap is not None)

    def history_up_to(self, seq: int) -> tuple[CompactedHistory | None, list[SequencedPayload]] | None:
        """Return `compacted_history` and the buffered batches up to `seq`; None if a batch after it has left the buffer."""
        with self._history_lock:
            if self._last_evicted[0] > seq:
                return None
            with self._buffer_lock:
                batches = [batch for batch in self._batches if batch[0] <= seq]
            return self.compacted_history(), batches

    def restore(self, last_seq: int, payloads: Sequence[bytes], is_partial: bool) -> None:
        """Fill an empty buffer with the fields of a `CompactedHistory`; add the batches after it with `extend`.

        Without history, `last_seq` is -1. Consumers must not hold undelivered batches up to `last_seq`.
        """
        with self._history_lock:
            if payloads:
                self._last_evicted = (last_seq, payloads[-1])
                # Which number was skipped is unknown, and does not matter: no consumer holds any of these batches.
                self._newest_gap = last_seq - 1 if is_partial else None
                if self._compactor is not None:
                    self._compactor.restore(payloads, is_partial=is_partial)
                    self._update_stats()

    # --- state of the buffer

    def size(self) -> tuple[int, int]:
        """Return the number of buffered batches and the number of their payload bytes."""
        with self._buffer_lock:
            return len(self._batches), self._batches.bytes

    def history_stats(self) -> HistoryStats | None:
        """Return the state of the history after the newest compaction; None without compaction. Does not wait for a lock."""
        return self._history_stats

    def _update_stats(self) -> None:
        compactor = self._compactor
        if compactor is not None:
            self._history_stats = HistoryStats(
                batches=self._last_evicted[0] + 1,
                blocks=compactor.live,
                bytes=compactor.bytes,
                partial=self._newest_gap is not None,
                unavailable_reason=compactor.unavailable_reason or self._snapshot_failure,
            )

    def failures(self) -> dict[str, int]:
        """Return `{"compaction": 1}` if an exception has switched compaction off, and `{}` if not."""
        return {"compaction": 1} if self._compaction_failed else {}

    def discard(self) -> None:
        """Drop all buffered batches and switch compaction off; called after a batch could not be added."""
        with self._history_lock, self._buffer_lock:
            self._batches = BatchDeque()
            if self._compactor is not None:
                self._compactor = self._snapshot = None
                self._history_stats = HistoryStats(batches=self._last_evicted[0] + 1, unavailable_reason="batches")

    @property
    def has_evicted(self) -> bool:
        """Whether any batch has left the buffer."""
        return self._last_evicted[0] >= 0

    def make_locks(self) -> None:
        """Create the locks. A forked child calls this again: the threads that held the old locks do not exist in the child."""
        self._snapshot_lock, self._history_lock, self._buffer_lock = threading.Lock(), threading.RLock(), threading.Lock()
        self._work, self._pause = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return len(self._batches)
