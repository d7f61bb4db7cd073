"""Compaction of batches that have left the replay buffer, snapshots of the result, and digests of a stream.

`Compactor` stores the blocks of a stream's old batches that are still live. `encode_snapshot` encodes its events as batches
that subscribers can read. `DigestTracker` computes the digest that heartbeats carry.

A snapshot that is larger than one payload has several parts. A consumer needs all of them, consecutively. But the parts have
the numbers of earlier live batches, which a consumer may hold instead. So each part ends with a heartbeat whose digest covers
all parts up to and including it, and only the heartbeat of the last part has the trust EXACT. A consumer that misses a part
sees a wrong digest.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple
from itertools import chain
from typing import Any, Final, TypeAlias

import msgspec

from kvevents.events import (
    MAX_HEARTBEAT,
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
from kvevents.wire.dialects import ARRAY_STORED

SequencedPayload: TypeAlias = tuple[int, bytes]
"""A batch as it is sent: its number and its payload."""
Encode: TypeAlias = Callable[[Any], bytes]
"""Encodes a batch."""
EventTuple: TypeAlias = tuple[Any, ...]
"""An event as `_native.Compactor.events` returns it: its kind, its block hashes, then the other fields of that kind."""
RankEvents: TypeAlias = tuple[int | None, list[EventTuple]]
"""A rank and its events; the rank is None if no payload has stated one."""

_NATIVE_LIMITS: Final = astuple(DEFAULT_WIRE_LIMITS)[:6]

# --- the compactor -----------------------------------------------------------------------------------------------------------


class Compactor:
    """Takes the payloads of one stream, oldest first, and stores only blocks that are still live.

    `events` returns its state as stores that rebuild every chain after a clear. A consumer that applies them has the same state
    as one that has received every batch, except that it may be uncertain of more copies. Blocks of groups of unknown kinds are
    stored without tokens. The compactor ignores stores whose lengths disagree. If payloads state several ranks, each rank has
    its own state, as in an index.
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
        """Apply the payloads of consecutive batches. Releases the interpreter lock if that takes long."""
        self._native.apply_many(batches)

    def restore(self, payloads: Sequence[bytes], *, partial: bool = False) -> None:
        """Load the payloads that `payloads` returned in another process. Any other input makes the history unavailable."""
        for payload in payloads:
            self._native.apply(payload, own=True)
        if partial:
            self.mark_gap()

    def events(self) -> list[RankEvents] | None:
        """Return the events of each rank after a clear; None if the history is unavailable, or no order can express it.

        No order exists while blocks with equal hashes are stored repeatedly under different parents, until they are removed.
        """
        ranks: list[RankEvents] | None = None if self.unavailable_reason else self._native.events()
        return ranks

    def payloads(self, limit: int, ts: float) -> list[bytes] | None:
        """Return the state as payloads for `restore`, of at most `limit` bytes unless a single block is larger.

        None if the history is unavailable. Releases the interpreter lock.
        """
        payloads: list[bytes] | None = None if self.unavailable_reason else self._native.payloads(limit, ts)
        return payloads

    def mark_gap(self) -> None:
        """Record that a batch at this position was never sent; `partial` is True until the stream is cleared."""
        self._native.mark_partial()

    @property
    def unavailable_reason(self) -> str | None:
        """The limit that was exceeded, or why the history is unknown; None if it is available.

        `batches`: some were never received. `payloads`: some cannot be decoded. `digests`: block hashes are not numbers.
        """
        reason: str | None = self._native.lost
        return reason

    @property
    def partial(self) -> bool:
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

_STREAM: Final = "own"
_INDEX_LIMITS: Final = {"max_fences": 0, "max_speculated": 0}
"""All other limits are the defaults of `kvevents.index.IndexLimits`, because limits decide which blocks are in the digest."""
_EMPTY_DIGEST: Final = f"{0:032x}"
_APPLIED, _CLEARED = "applied", "cleared"
_OUTCOMES: Final = (_APPLIED, _CLEARED, "duplicate", "void")
"""The outcomes that the native index returns for a batch."""


class DigestTracker:
    """Applies a stream as the index of a consumer does, and computes its digest.

    `index` is a subclass of `_native.NativeIndex`. It is loaded at run time only, so that publishers work without the native
    module. Without that module, index and digest are None, and only missing numbers are detected.
    """

    def __init__(self, index: Any | None) -> None:
        self._index = index
        self._last_seq = -1
        self._newest_gap: int | None = None
        """The newest number that was skipped since the stream was last cleared; None if all were sent."""

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
                self._note(seq, _CLEARED if report is not None and report.cleared else _APPLIED)
            return
        raw = [RawBatch(_STREAM, 0, 0, seq, False, payload) for seq, payload in batches]
        count = 0
        while count < len(raw):
            outcomes = self._index._apply_many(raw[count:])  # noqa: SLF001 - the native module's, as in kvevents.index
            if count + len(outcomes) < len(raw):
                failed_batch = raw[count + len(outcomes)]
                outcomes.append(self._index.apply_payload(_STREAM, 0, failed_batch.seq, failed_batch.payload))
            for batch, outcome in zip(raw[count:], outcomes, strict=False):
                self._note(batch.seq, outcome)
            count += len(outcomes)

    def _note(self, seq: int, outcome: Any) -> None:
        if seq != self._last_seq + 1:
            self._newest_gap = seq - 1
        if outcome == _CLEARED:
            self._newest_gap = None
        self._last_seq = seq

    def digest(self) -> str | None:
        """Return what `kvevents.index.PrefixIndex.digest` returns for a consumer that applied the same batches.

        None without the native module.
        """
        if self._index is None:
            return None
        digest = self._index._digest(_STREAM, 0)  # noqa: SLF001 - the native module's
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
"""Maximum number of batches of a snapshot of one rank, all of which are in memory at once. At 32 MiB each, they hold about six
million blocks of 16 tokens. Each further rank adds one batch, for at most `MAX_RANKS` ranks."""
MAX_RANKS: Final = 64
"""Maximum number of ranks of one stream, as in the native compactor."""
_EVENTS_PER_PART: Final = 8
"""An event is split if it would fill more than this fraction (1/8) of a part, so that parts can be filled evenly."""
_FIXED_EVENT_BYTES: Final = 400
"""Upper bound in bytes for an event without its hashes, tokens and names."""
_ARRAY_HEADER_BYTES: Final = 16
"""Maximum number of bytes by which the array headers of a batch grow with its content."""
_NOT_LAST_PART: Final = "its snapshot is several batches, of which this is not the last one"

_EncodeEvents = Callable[[int | None, list[KVEvent]], bytes]
"""Encodes events of a rank as a batch."""
_Group = tuple[int | None, list[KVEvent]]
"""The rank and the events of a part."""
_CLEARS: Final = (AllBlocksCleared(), AllBlocksCleared({"medium": MEDIUM_ALL}))
"""The first events of a snapshot. Without the second one, lower tiers might retain blocks from before the snapshot."""


def encode_snapshot(
    ranks: list[RankEvents], ts: float, rank: int | None, encode: Encode, limit: int, incarnation: int = 0
) -> list[bytes] | None:
    """Return the payloads of a snapshot, each of at most `limit` bytes. The first one begins with a clear.

    Almost always there is only one payload. With several ranks, the first payload clears all ranks, and further payloads belong
    to one rank each. `rank` is the only rank of a stream whose payloads state no rank. `incarnation` is the sender's, as in its
    heartbeats. Returns None if one rank would need more than `MAX_SNAPSHOT_PARTS`, or if a single block is larger than `limit`.
    """

    def encode_events(rank: int | None, content: list[KVEvent]) -> bytes:
        return encode(KVEventBatch(ts, content, rank))

    clear: list[KVEvent] = [*_CLEARS]
    if len(ranks) == 1:
        ((stated_rank, events),) = ranks
        rank = rank if stated_rank is None else stated_rank
        if sum(map(_max_size, events)) + _FIXED_EVENT_BYTES <= limit:
            return [encode_events(rank, [*clear, *map(_to_event, events)])]
        groups = _group(rank, clear, events, encode_events, limit)
    else:
        groups_of_ranks = (_group(rank, [], events, encode_events, limit) for rank, events in ranks)
        groups = chain([(None, clear)], chain.from_iterable(groups_of_ranks))
    parts = _join(groups, encode_events, MAX_SNAPSHOT_PARTS - 1 + len(ranks), incarnation)
    return parts if parts is not None and all(len(part) <= limit for part in parts) else None


def _join(groups: Iterable[_Group], encode_events: _EncodeEvents, max_parts: int, incarnation: int) -> list[bytes] | None:
    """Encode each group as a part. If there are several, each part ends with a heartbeat that shows whether it is the last."""
    tracker = DigestTracker.create()
    parts: list[bytes] = []
    pending: _Group | None = None
    for number, (rank, group) in enumerate(groups):
        if number == max_parts:
            return None
        if pending is not None:
            parts.append(encode_events(pending[0], [*pending[1], _part_heartbeat("DEGRADED", tracker, incarnation)]))
        tracker.apply([(number, encode_events(rank, group))])
        pending = rank, group
    rank, group = pending or (None, [])
    return [*parts, encode_events(rank, [*group, _part_heartbeat("EXACT", tracker, incarnation)] if parts else group)]


def _part_heartbeat(trust: str, tracker: DigestTracker, incarnation: int) -> BlockRemoved:
    reason = "" if trust == "EXACT" else _NOT_LAST_PART
    return BlockRemoved([], heartbeat=Heartbeat(tracker.digest(), MAX_HEARTBEAT, trust, reason, incarnation))


def _group(
    rank: int | None, first: list[KVEvent], events: list[EventTuple], encode_events: _EncodeEvents, limit: int
) -> Iterator[_Group]:
    """Yield groups of events that each fill a part. Large events are split, since encoding one would block the process."""
    group, min_count = list(first), len(first)
    base_size = len(encode_events(rank, []))
    heartbeat = Heartbeat("0" * 32, MAX_HEARTBEAT, "DEGRADED", _NOT_LAST_PART, 1 << 63)
    # A clear between the stores must not begin a part, because a consumer would take it for the beginning of a snapshot.
    clear = len(encode_events(rank, [AllBlocksCleared()])) - base_size
    part_overhead = _ARRAY_HEADER_BYTES + clear + len(encode_events(rank, [BlockRemoved([], heartbeat=heartbeat)]))
    size = part_overhead + len(encode_events(rank, group)) - base_size
    for piece in (piece for event in events for piece in _split(event, limit // _EVENTS_PER_PART)):
        event = _to_event(piece)
        event_size = len(encode_events(rank, [event])) - base_size
        if size + event_size > limit and len(group) > min_count and not isinstance(event, AllBlocksCleared):
            yield rank, group
            group, min_count, size = [], 0, part_overhead
        group.append(event)
        size += event_size
    yield rank, group


def _max_size(event: EventTuple) -> int:
    """Return an upper bound of the event's size in any dialect."""
    kind, hashes, *values = event
    tokens = len(values[1]) * 3 // 2 if kind == "stored" else 0
    names = sum(4 * len(value) for value in values if isinstance(value, str))
    extra = 2 * len(values[_EXTRA]) if kind == "stored" and values[_EXTRA] is not None else 0
    # 18 bytes per hash: a store with block keys has one for each hash.
    return _FIXED_EVENT_BYTES + 18 * len(hashes) + tokens + names + extra


def _split(event: EventTuple, room: int) -> Iterable[EventTuple]:
    """Split the event into events of at most `room` bytes each, unless a single block is larger."""
    size, count = _max_size(event), len(event[1])
    if size <= room or count < 2:
        return (event,)
    step = max(1, count * room // size)
    if event[0] == "stored":
        return _split_stored(event, step)
    kind, hashes, *fields = event
    return ((kind, hashes[start : start + step], *fields) for start in range(0, count, step))


def _split_stored(event: EventTuple, step: int) -> Iterator[EventTuple]:
    kind, hashes, parent, tokens, pairs, *fields = event
    tokens_per_block = len(tokens) // len(hashes)
    extra = None if fields[_EXTRA - 3] is None else _decode(fields[_EXTRA - 3])
    keys = fields[-1]
    for start in range(0, len(hashes), step):
        stop = start + step
        fields[-1] = None if keys is None else keys[start:stop]
        if extra is not None:
            fields[_EXTRA - 3] = _encode(extra[start:stop])
        yield (kind, hashes[start:stop], parent, tokens[start * tokens_per_block : stop * tokens_per_block], pairs, *fields)
        # Stores without tokens are copies of blocks that already have a place in a chain.
        parent = hashes[min(stop, len(hashes)) - 1] if tokens else parent


_STORED_FIELDS: Final = (
    *(*ARRAY_STORED[:3], "pairs", *ARRAY_STORED[3:]),  # `pairs` says how to read `token_ids`
    *("locality", "ownership", "cache_salt", "block_keys"),
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx", "locality", "ownership")
_EXTRA: Final = _STORED_FIELDS.index("extra_keys") - 1
"""Index of the extra keys among the fields after the hashes."""

_decode: Final = msgspec.msgpack.decode
_encode: Final = msgspec.msgpack.encode


def _to_event(event: EventTuple) -> KVEvent:
    kind, *values = event
    if kind == "cleared":
        return AllBlocksCleared()
    if kind == "removed":
        return BlockRemoved(**dict(zip(_REMOVED_FIELDS, values, strict=True)))
    fields = dict(zip(_STORED_FIELDS, values, strict=True))
    numbers = array("I", fields["token_ids"]).tolist()
    fields["token_ids"] = list(zip(numbers[::2], numbers[1::2], strict=True)) if fields.pop("pairs") else numbers
    if fields["extra_keys"] is not None:
        fields["extra_keys"] = _decode(fields["extra_keys"])
    return BlockStored(**fields)
