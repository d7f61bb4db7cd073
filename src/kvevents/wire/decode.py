"""Decodes payloads into events, by their shape and without configuration.

Theory of operation: a payload of a known release decodes in one native call into the types of `kvevents.events`
(`decode_fast`). The native call fails for unknown fields, unknown event types and damaged payloads. Then the tolerant
decoder (`kvevents.wire.tolerant`) reads the envelope first, leaves the events as raw slices, and reads each event by itself, so
that an invalid event does not affect the others. Input of a peer never raises; what cannot be read is returned as `Rejected`.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import astuple

from kvevents.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, ExtraKey, Heartbeat, KVEvent, KVEventBatch
from kvevents.wire.checked_msgpack import (
    DEFAULT_WIRE_LIMITS,
    MAX_FAST_BYTES,
    MAX_FAST_LIST_BYTES,
    MSGPACK_ERRORS,
    DecodeBudget,
    DecodeRejectedError,
    Rejected,
    WireLimits,
    declared_length,
    first_byte,
    is_array,
    is_map,
    is_nil,
    length_bytes,
    map_items,
    skip_value,
)
from kvevents.wire.dialects import Dialect, detect_dialect
from kvevents.wire.tolerant import (
    INTERNAL_FIELDS,
    MAX_SECONDS,
    MIN_DIGEST_BYTES,
    decode_tolerant,
    read_tokens,
    shorten_digests,
    unknown_values,
)

_HEAD_BYTES: Final = 512
"""Number of bytes to search for a clear: a clear without unknown fields takes less than 100 bytes in every dialect."""
_TAIL_BYTES: Final = 512
"""Number of bytes to search for a digest: the heartbeat at the end of a part of a snapshot takes less than 200 bytes."""
_CLEAR_TAG: Final = b"AllBlocksCleared"
_EVENTS_KEY: Final = b"\xa6events"
_MOONCAKE_KEY: Final = b"\xaaevent_type"
_DIGEST_PATTERN: Final = re.compile(rb"\xd9\x20[0-9a-f]{32}")


def has_no_number_0(payload: bytes) -> bool:
    """Return whether the batch is one of Mooncake (RFC #1527), which numbers its batches from 1."""
    return _MOONCAKE_KEY in payload[:_HEAD_BYTES]


def begins_with_clear(payload: bytes) -> bool:
    """Return whether the first event clears all blocks, as the first event of a snapshot does."""
    head = payload[:_HEAD_BYTES]
    if _CLEAR_TAG not in head:
        return False
    try:
        events = _events_at(head)
        if events is None or not is_array(head[events]):
            return False
        first = events + 1 + length_bytes(head[events])
        end = skip_value(head, first)
    except IndexError:
        return False
    if end > len(head):
        return False
    # The event is decoded as the only event of a batch, because the decoder knows how each dialect writes a clear.
    batch_events = decode_batch(b"\x92\xcb" + bytes(8) + b"\x91" + head[first:end]).batch.events
    return len(batch_events) == 1 and type(batch_events[0]) is AllBlocksCleared and batch_events[0].unknown_fields is None


def ends_with_digest(payload: bytes) -> bool:
    """Return whether the payload might end with a heartbeat's digest, as each part of a snapshot in several batches does."""
    return _DIGEST_PATTERN.search(payload, max(0, len(payload) - _TAIL_BYTES)) is not None


class _ArrayEnvelope(msgspec.Struct, array_like=True, gc=False):
    ts: msgspec.Raw
    events: msgspec.Raw
    data_parallel_rank: int | None = None


class _MapEnvelope(msgspec.Struct, gc=False):
    data_parallel_rank: int | None = None
    attn_dp_rank: int | None = None


_decode_array_envelope: Final = msgspec.msgpack.Decoder(_ArrayEnvelope).decode
_decode_map_envelope: Final = msgspec.msgpack.Decoder(_MapEnvelope).decode


def rank_of(payload: bytes) -> int | None:
    """Return the data-parallel rank that a batch states, without decoding its events; None if the batch states no rank."""
    try:
        if payload and is_array(payload[0]):
            return _decode_array_envelope(payload).data_parallel_rank
        envelope = _decode_map_envelope(payload)
    except MSGPACK_ERRORS:
        return None
    return envelope.attn_dp_rank if envelope.data_parallel_rank is None else envelope.data_parallel_rank


def _events_at(head: bytes) -> int | None:
    """Return the position at which the events of a batch begin; None if the batch is neither an array nor a map.

    Raise `IndexError` if the events begin after the end of `head`.
    """
    if is_array(head[0]):
        return skip_value(head, 1 + length_bytes(head[0]))
    if not is_map(head[0]):
        return None
    position = 1 + length_bytes(head[0])
    for _ in range(declared_length(memoryview(head))):
        value = skip_value(head, position)
        if head[position:value] == _EVENTS_KEY:
            return value
        position = skip_value(head, value)
    return None


_HASH_MASK: Final = (1 << 64) - 1


class Decoded(msgspec.Struct, gc=False, eq=False):
    """Result of `decode_batch`: `batch`, `dialect`, `rejected`."""

    batch: KVEventBatch
    """The readable part of the payload. The batch has no events, and `ts` is 0, if the payload is not a batch at all."""
    _payload: bytes
    rejected: tuple[Rejected, ...] = ()
    _dialect: Dialect | None = None
    _is_detected: bool = False

    @property
    def dialect(self) -> Dialect | None:
        """The oldest release that could have sent this payload, or None. The release is detected at first use."""
        if not self._is_detected:
            self._dialect = detect_dialect(self._payload)
            self._is_detected = True
        return self._dialect

    def __repr__(self) -> str:
        return f"<Decoded {len(self.batch.events)} events, {len(self.rejected)} rejected, dialect {self.dialect}>"


def decode_batch(payload: bytes, limits: WireLimits = DEFAULT_WIRE_LIMITS) -> Decoded:
    """Decode one batch of any engine. The function never raises for input from a peer.

    Hashes are unsigned: an integer hash is taken modulo 2**64, and a byte hash is its last 8 bytes, big-endian, as vLLM itself
    shortens it. `ts` is in seconds, from 0 to 1e11. If the timestamp is invalid, `ts` is 0 and the events are still read.
    """
    batch = decode_fast(payload, limits)
    if batch is not None:
        return Decoded(batch, payload)
    try:
        batch, rejected = decode_tolerant(payload, limits, _decode_event)
    except DecodeRejectedError as error:
        # The result has no payload: no dialect can be detected from it, and an oversized payload must not be read again.
        return Decoded(KVEventBatch(0.0, []), b"", (error.to_record(payload),))
    return Decoded(batch, payload, rejected)


# --- decoding in one native call -------------------------------------------------------------------------------------------


class _ArrayEvent(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    pass


class _ArrayStored(_ArrayEvent, tag="BlockStored"):
    """BlockStored as an array, with the fields of `dialects.ARRAY_STORED`, which are the first fields of `BlockStored`."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[ExtraKey, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _ArrayRemoved(_ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    heartbeat: Heartbeat | None = None


class _ArrayCleared(_ArrayEvent, tag="AllBlocksCleared"):
    pass


_AnyArray: TypeAlias = _ArrayStored | _ArrayRemoved | _ArrayCleared


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_AnyArray]
    data_parallel_rank: int | None = None


_decode_maps: Final = msgspec.msgpack.Decoder(KVEventBatch).decode
_decode_arrays: Final = msgspec.msgpack.Decoder(_ArrayBatch).decode


def decode_fast(payload: bytes, limits: WireLimits) -> KVEventBatch | None:
    """Return the batch if all of it has a known shape and is within the limits, else None."""
    size = len(payload)
    if size > MAX_FAST_BYTES or size > limits.max_payload_bytes:
        return None
    if size > MAX_FAST_LIST_BYTES and b"lookahead_token_ids" in payload:
        return None
    try:
        # The type byte of the first event in `[float64, [event, ...`. Any other beginning is treated as a map.
        first = payload[11 if payload[10] != 0xDC else 13] if size > 13 else 0
        if first & 0xF0 != 0x90:
            batch = _decode_maps(payload)
        else:
            arrays = _decode_arrays(payload)
            batch = KVEventBatch(arrays.ts, [_from_array(event) for event in arrays.events], arrays.data_parallel_rank)
    except MSGPACK_ERRORS:
        return None
    if not 0.0 <= batch.ts <= MAX_SECONDS or len(batch.events) > limits.max_events:
        return None
    for event in batch.events:
        if not _normalize(event, limits):
            return None
    return batch


class _LenientStored(BlockStored, tag="BlockStored", forbid_unknown_fields=False):
    """BlockStored as a map, with token ids as strings and with unknown fields, which the decoder skips."""

    token_ids: list[int | str | tuple[int, int]]  # pyright: ignore[reportIncompatibleVariableOverride] (as read, before normalising)


class _LenientRemoved(BlockRemoved, tag="BlockRemoved", forbid_unknown_fields=False):
    pass


class _LenientCleared(AllBlocksCleared, tag="AllBlocksCleared", forbid_unknown_fields=False):
    pass


_decode_lenient: Final = msgspec.msgpack.Decoder(_LenientStored | _LenientRemoved | _LenientCleared).decode
_decode_array: Final = msgspec.msgpack.Decoder(_AnyArray).decode
_KINDS: Final[dict[Any, Any]] = {_LenientStored: BlockStored, _LenientRemoved: BlockRemoved, _LenientCleared: AllBlocksCleared}
_KNOWN_FIELDS: Final = {kind: {"type", *kind.__struct_fields__} for kind in _KINDS}


def _decode_event(raw: msgspec.Raw, limits: WireLimits, budget: DecodeBudget) -> KVEvent | None:
    """Return an event of a known kind, with the unknown fields of a map; None if the tolerant decoder must read the event."""
    unknown: dict[str, msgspec.Raw] = {}
    try:
        if is_array(first_byte(raw)):
            event: Any = _from_array(_decode_array(raw))
        else:
            lenient = _decode_lenient(raw)
            event = _KINDS[type(lenient)](*astuple(lenient))
            known_names = _KNOWN_FIELDS[type(lenient)]
            fields = map_items(raw, "the event", limits.max_fields)
            unknown = {name: value for name, value in fields.items() if name not in known_names}
            for name in INTERNAL_FIELDS & unknown.keys():
                if is_nil(unknown[name]):
                    del unknown[name]
    except (*MSGPACK_ERRORS, DecodeRejectedError):
        return None
    if type(event) is BlockStored and str in {*map(type, event.token_ids)}:
        event.token_ids = read_tokens(list(event.token_ids), budget)
    if "event_type" in unknown or not _normalize(event, limits):
        return None
    if type(event) is BlockStored and (event.extra_keys is not None or event.lookahead_token_ids is not None):
        return None  # the tolerant decoder limits the size of both fields
    if unknown:
        event.unknown_fields = unknown_values(unknown, limits, budget)
    result: KVEvent = event
    return result


def _from_array(event: _AnyArray) -> KVEvent:
    if type(event) is _ArrayStored:
        return BlockStored(*msgspec.structs.astuple(event))
    if type(event) is _ArrayRemoved:
        return BlockRemoved(event.block_hashes, event.medium, event.group_idx, heartbeat=event.heartbeat)
    return AllBlocksCleared()


def _normalize(event: Any, limits: WireLimits) -> bool:
    """Make hashes unsigned in place. Return False if the tolerant decoder must read the event."""
    kind = type(event)
    # Some fields are set by decoders only. If a peer sends one, the tolerant decoder handles the event.
    if event.unknown_fields is not None:
        return False
    if kind is AllBlocksCleared:
        return True
    hashes = event.block_hashes
    if event.block_digests is not None or len(hashes) > limits.max_hashes:
        return False
    if hashes:
        try:
            if type(hashes[0]) is bytes:
                event.block_hashes, event.block_digests = shorten_digests(hashes), hashes
            elif min(hashes) < 0:
                event.block_hashes = [value & _HASH_MASK for value in hashes]
        except (TypeError, DecodeRejectedError):  # bytes and integers are mixed, or a digest is too short
            return False
    return kind is BlockRemoved or _normalize_store(event, limits)


def _normalize_store(event: BlockStored, limits: WireLimits) -> bool:
    keys = event.block_keys
    parent: Any = event.parent_block_hash  # a peer may send bytes
    if event.parent_block_digest is not None or (keys and min(keys) < 0):
        return False
    if type(parent) is bytes:
        if len(parent) < MIN_DIGEST_BYTES:
            return False
        event.parent_block_digest, event.parent_block_hash = parent, int.from_bytes(parent[-8:], "big")
    elif parent is not None and parent < 0:
        event.parent_block_hash = parent & _HASH_MASK
    lists = (keys, event.extra_keys, event.lookahead_token_ids)
    return all(values is None or len(values) <= limits.max_hashes for values in lists)
