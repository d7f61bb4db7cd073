"""Compaction of batches that have left the replay buffer, snapshots of the result, and digests of a stream.

`Compactor` applies a stream's old batches and stores the live blocks. `encode_snapshot` encodes these blocks as batches of any
dialect. `DigestTracker` computes the digest that heartbeats carry.

A snapshot that is larger than one payload has several parts. A consumer needs all parts, consecutively. But the parts have the
numbers of earlier live batches, and a consumer can hold these batches instead. So each part ends with a heartbeat whose digest
covers all parts up to and including this part, and only the heartbeat of the last part has the trust EXACT. A consumer that
misses a part sees a wrong digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import astuple

from kvevents.events import (
    MAX_HEARTBEAT_SECONDS,
    MEDIUM_ALL,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Heartbeat,
    KVEvent,
    KVEventBatch,
)
from kvevents.native_module import find_native
from kvevents.stream import RawBatch, inspect_events
from kvevents.wire import DEFAULT_WIRE_LIMITS, decode_batch
from kvevents.wire.decode import rank_of

SequencedPayload: TypeAlias = tuple[int, bytes]
"""A batch as it is sent: its number and its payload."""
Encode: TypeAlias = Callable[[Any], bytes]
"""Function that returns the payload of a batch."""
_NATIVE_LIMITS: Final = astuple(DEFAULT_WIRE_LIMITS)[:6]

# --- the compactor -----------------------------------------------------------------------------------------------------------


class Compactor:
    """Takes the payloads of one stream, oldest first, and stores only blocks that are still live.

    `payloads` returns the state as stores that rebuild every chain after a clear. A consumer that applies these stores has the
    same state as one that has received every batch, except that it can count more copies as uncertain. If the kind of a group
    is unknown, its blocks are stored without tokens. Stores whose number of tokens does not fit their number of hashes are
    ignored. If payloads state several ranks, each rank has its own state, as in an index.
    """

    def __init__(self, native: Any) -> None:
        """`native` is a `_native.Compactor`, which is loaded at run time only: publishers work without the native module."""
        self._native = native

    @classmethod
    def create(cls) -> Compactor | None:
        """Return an empty compactor, or None if the native module is not installed."""
        native = find_native()
        return None if native is None else cls(native.Compactor(_NATIVE_LIMITS))

    def append(self, payload: bytes) -> None:
        """Apply the next payload, as it was sent."""
        self._native.apply(payload)

    def extend(self, batches: list[SequencedPayload]) -> None:
        """Apply the payloads of consecutive batches. Releases the interpreter lock during a long call."""
        self._native.apply_many(batches)

    def restore(self, payloads: Sequence[bytes], *, is_partial: bool = False) -> None:
        """Load payloads that `payloads` returned in another process. Payloads from elsewhere make the history unavailable."""
        for payload in payloads:
            self._native.apply(payload, own=True)
        if is_partial:
            self.mark_gap()

    def payloads(self, limit: int, ts: float) -> list[bytes] | None:
        """Return the state as payloads for `restore`, of at most `limit` bytes unless a single block is larger.

        Each rank has separate payloads: the first one clears everything, and the later ones store the blocks. Returns None if
        the history is unavailable, or if no order of events can express the state. No order exists while blocks with equal
        hashes are stored under different parents. Releases the interpreter lock.
        """
        payloads: list[bytes] | None = None if self.unavailable_reason else self._native.payloads(limit, ts)
        return payloads

    def snapshot_pieces(self, limit: int) -> list[bytes] | None:
        """Return small `payloads`, several of which together fill one payload of a snapshot with nearly `limit` bytes."""
        return self.payloads(max(1, limit // _PIECES_PER_PART), 0.0)

    def mark_gap(self) -> None:
        """Record that the next batch is missing; `is_partial` is True until the stream is cleared."""
        self._native.mark_partial()

    @property
    def unavailable_reason(self) -> str | None:
        """Name of the exceeded limit, or why the history is unknown; None if the history is available.

        `payloads`: a payload cannot be decoded. `digests`: block hashes are not numbers.
        """
        reason: str | None = self._native.lost
        return reason

    @property
    def is_partial(self) -> bool:
        """Whether a batch is missing since the stream was last cleared."""
        return bool(self._native.partial)

    @property
    def live(self) -> int:
        """Number of blocks with at least one copy."""
        return int(self._native.live)

    @property
    def bytes(self) -> int:
        """Approximate heap memory."""
        return int(self._native.bytes)


# --- the digest of a stream --------------------------------------------------------------------------------------------------

_STREAM_NAME: Final = "own"
_INDEX_LIMITS: Final = {"max_fences": 0, "max_speculated": 0}
"""Limits of the tracker's index. All other limits are the defaults of `kvevents.index.IndexLimits`, as in consumers, because
limits decide which blocks are in the digest."""
_EMPTY_DIGEST: Final = f"{0:032x}"
_APPLIED, _CLEARED = "applied", "cleared"
_OUTCOMES: Final = (_APPLIED, _CLEARED, "duplicate", "void")
"""The outcomes that the native index returns for a batch."""


class DigestTracker:
    """Applies a stream as the index of a consumer does, and computes its digest.

    `index` is a subclass of `_native.NativeIndex`. `_native` is loaded at run time only, so that publishers work without it.
    Without the native module, index and digest are None, and only missing numbers are detected.
    """

    def __init__(self, index: Any | None) -> None:
        self._index = index
        self._last_seq = -1
        self._newest_gap: int | None = None
        """The newest number that was skipped since the stream was last cleared; None if no number was skipped."""

    @classmethod
    def create(cls) -> DigestTracker:
        """Return a tracker of an empty stream. The tracker has no digest if the native module is not installed."""
        native = find_native()
        if native is None:
            return cls(None)
        # `_found` returns only the outcome of a payload, without the report about its events.
        index: Any = type("DigestIndex", (native.NativeIndex,), {"_found": lambda _self, outcome, *_found: outcome})
        return cls(index(_NATIVE_LIMITS, None, _INDEX_LIMITS, _OUTCOMES))

    def apply(self, batches: Sequence[SequencedPayload]) -> None:
        """Apply batches as they were sent. Releases the interpreter lock."""
        if self._index is None:
            for seq, payload in batches:
                has_gap = self._newest_gap is not None or seq != self._last_seq + 1
                report = inspect_events(decode_batch(payload).batch.events) if has_gap else None
                self._record_outcome(seq, _CLEARED if report is not None and report.cleared else _APPLIED)
            return
        raw = [RawBatch(_STREAM_NAME, 0, 0, seq, False, payload) for seq, payload in batches]
        count = 0
        while count < len(raw):
            outcomes = self._index._apply_many(raw[count:])  # noqa: SLF001 - the native method that kvevents.index uses
            if count + len(outcomes) < len(raw):
                failed_batch = raw[count + len(outcomes)]
                outcomes.append(self._index.apply_payload(_STREAM_NAME, 0, failed_batch.seq, failed_batch.payload))
            for batch, outcome in zip(raw[count:], outcomes, strict=False):
                self._record_outcome(batch.seq, outcome)
            count += len(outcomes)

    def _record_outcome(self, seq: int, outcome: Any) -> None:
        if seq != self._last_seq + 1:
            self._newest_gap = seq - 1
        if outcome == _CLEARED:
            self._newest_gap = None
        self._last_seq = seq

    def digest(self) -> str | None:
        """Return the digest that `kvevents.index.PrefixIndex.digest` returns for a consumer that has applied the same batches.

        Returns None if the native module is not installed.
        """
        if self._index is None:
            return None
        digest = self._index._digest(_STREAM_NAME, 0)  # noqa: SLF001 - the native method that kvevents.index uses
        return _EMPTY_DIGEST if digest is None else f"{digest:032x}"

    def heartbeat(self, number: int, interval: float, incarnation: int, attestation: int | None = None) -> Heartbeat:
        """Return the heartbeat for the batch `number`, which is sent next. `interval` is in seconds."""
        gap = number - 1 if number != self._last_seq + 1 else self._newest_gap
        if gap is None:
            return Heartbeat(self.digest(), interval, incarnation=incarnation, attestation=attestation)
        reason = f"number {gap} was never sent: it was dropped, or could not be encoded"
        return Heartbeat(self.digest(), interval, "DEGRADED", reason, incarnation, attestation)


# --- snapshots ---------------------------------------------------------------------------------------------------------------

MAX_SNAPSHOT_PARTS: Final = 16
"""Maximum number of batches of a snapshot of one rank; all of them are in memory at once. Batches of 32 MiB hold about six
million blocks of 16 tokens. Each further rank adds one batch, for at most `MAX_RANKS` ranks."""
MAX_RANKS: Final = 64
"""Maximum number of ranks of one stream, as in the native compactor."""
_PIECES_PER_PART: Final = 16
"""Number of pieces that fill one part; decoding a small piece does not block the process for long."""
_NOT_LAST_PART: Final = "its snapshot is several batches, of which this is not the last one"

_EncodeEvents = Callable[[int | None, list[KVEvent]], bytes]
"""Encodes events of a rank as a batch."""
_Group = tuple[int | None, list[KVEvent]]
"""The rank and the events of a part, or of a piece."""
_CLEAR_EVENTS: Final = (AllBlocksCleared(), AllBlocksCleared({"medium": MEDIUM_ALL}))
"""The first events of a snapshot. The second clear empties lower tiers, which the first clear might leave unchanged."""
_EVENT_TYPES: Final = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


def encode_snapshot(
    pieces: list[bytes], ts: float, rank: int | None, encode: Encode, limit: int, incarnation: int = 0
) -> list[bytes] | None:
    """Return the payloads of a snapshot, each of at most `limit` bytes. The first payload begins with a clear.

    `pieces` are from `Compactor.snapshot_pieces`. Usually the snapshot is one payload. If there are several ranks, the first
    payload clears all ranks, and each further payload belongs to one rank. `rank` is the only rank of a stream whose payloads
    state no rank. `incarnation` is the number in the sender's heartbeats. Returns None if one rank would need more than
    `MAX_SNAPSHOT_PARTS`, or if a single block is larger than `limit`.
    """

    def encode_events(rank: int | None, content: list[KVEvent]) -> bytes:
        return encode(KVEventBatch(ts, content, rank))

    stated, *other_ranks = dict.fromkeys(map(rank_of, pieces))
    rank = None if other_ranks else rank if stated is None else stated
    groups: Iterator[_Group] = chain([(rank, [*_CLEAR_EVENTS])], (_decode_piece(piece, rank) for piece in pieces))
    if not other_ranks and 2 * sum(map(len, pieces)) <= limit:  # no dialect needs more than twice the bytes of the pieces
        groups = iter([(rank, [event for _, events in groups for event in events])])
    else:
        groups = _group_pieces(groups, encode_events, limit)
    parts = _make_parts(groups, encode_events, MAX_SNAPSHOT_PARTS + len(other_ranks), incarnation)
    return parts if parts is not None and all(len(part) <= limit for part in parts) else None


def _decode_piece(piece: bytes, rank: int | None) -> _Group:
    """Return the rank of a piece (`rank` if the piece states none) and its events (empty if the piece only clears)."""
    _, maps, *stated = msgspec.msgpack.decode(piece)
    is_clear = maps[0]["type"] == "AllBlocksCleared"
    events = [] if is_clear else [_EVENT_TYPES[fields.pop("type")](**fields) for fields in maps]
    return stated[0] if stated else rank, events


def _group_pieces(pieces: Iterator[_Group], encode_events: _EncodeEvents, limit: int) -> Iterator[_Group]:
    """Yield groups of pieces that each fill a part of one rank."""
    rank, group = next(pieces)
    longest = Heartbeat("0" * 32, MAX_HEARTBEAT_SECONDS, "DEGRADED", _NOT_LAST_PART, 1 << 63)
    part_overhead = len(encode_events(rank, [BlockRemoved([], heartbeat=longest)]))
    size = part_overhead + len(encode_events(rank, group))
    for piece_rank, events in pieces:
        piece_size = len(encode_events(piece_rank, events))
        if piece_rank != rank or size + piece_size > limit:
            yield rank, group
            rank, group, size = piece_rank, [], part_overhead
        group += events
        size += piece_size
    yield rank, group


def _make_parts(groups: Iterator[_Group], encode_events: _EncodeEvents, max_parts: int, incarnation: int) -> list[bytes] | None:
    """Encode each group as a part. Each of several parts ends with a heartbeat that shows whether the part is the last."""
    tracker = DigestTracker.create()
    parts: list[bytes] = []

    def encode_part(rank: int | None, group: list[KVEvent], trust: str, reason: str = "") -> bytes:
        tracker.apply([(len(parts), encode_events(rank, group))])
        heartbeat = Heartbeat(tracker.digest(), MAX_HEARTBEAT_SECONDS, trust, reason, incarnation)
        return encode_events(rank, [*group, BlockRemoved([], heartbeat=heartbeat)])

    last = next(groups)
    for group in groups:
        if len(parts) + 1 == max_parts:
            return None
        parts.append(encode_part(*last, "DEGRADED", _NOT_LAST_PART))
        last = group
    return [*parts, encode_part(*last, "EXACT")] if parts else [encode_events(*last)]
