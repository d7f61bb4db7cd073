"""Bytes to events, by shape and without configuration.

Theory of operation. A payload of a known release decodes in one native call into the types of `kvevents.events` (`fast`). What
that call refuses, for a field that no row knows, a tag from tomorrow, byte hashes, or damage, is read again in two stages
(`kvevents.wire.careful`): the envelope first, its events left as raw slices, then each event alone, so that one bad event never
costs its neighbours. Nothing a peer sends raises; it is returned as `Rejected`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, ExtraKey, Heartbeat, KVEvent, KVEventBatch
from kvevents.wire.careful import SECONDS_BELOW, careful
from kvevents.wire.dialects import Dialect
from kvevents.wire.limits import DEFAULT_WIRE_LIMITS, FAST_BYTES, WireLimits
from kvevents.wire.raw import REFUSED
from kvevents.wire.rejected import RefusedError, Rejected
from kvevents.wire.shape import dialect_of

_MASK: Final = (1 << 64) - 1


class Decoded(msgspec.Struct, gc=False, eq=False):
    """Result of `decode_batch`: `batch`, `dialect`, `rejected`."""

    batch: KVEventBatch
    """What could be read; without events (and with `ts` 0) when the payload is no batch at all."""
    _payload: bytes
    rejected: tuple[Rejected, ...] = ()
    _dialect: Dialect | None = None
    _asked: bool = False

    @property
    def dialect(self) -> Dialect | None:
        """The oldest release that could have sent this payload; None when no row explains it. Computed when first asked."""
        if not self._asked:
            self._dialect = dialect_of(self._payload)
            self._asked = True
        return self._dialect

    def __repr__(self) -> str:
        return f"<Decoded {len(self.batch.events)} events, {len(self.rejected)} rejected, dialect {self.dialect}>"


def decode_batch(payload: bytes, limits: WireLimits = DEFAULT_WIRE_LIMITS) -> Decoded:
    """Read one batch as any engine sends it. Never raises on what a peer sent.

    Hashes come out unsigned: integers modulo 2**64, of byte hashes the last 8 bytes, big-endian, as vLLM itself shortens them.
    `ts` comes out in seconds, from 0 to 1e11; a timestamp that is none costs the timestamp, not the events.
    """
    batch = fast(payload, limits)
    if batch is not None:
        return Decoded(batch, payload)
    try:
        batch, rejected = careful(payload, limits)
    except RefusedError as refusal:
        # Without its payload: what is no batch has no dialect, and what is too large is not looked at again.
        return Decoded(KVEventBatch(0.0, []), b"", (refusal.rejected(payload),))
    return Decoded(batch, payload, rejected)


# --- one native call -------------------------------------------------------------------------------------------------------


class _ArrayEvent(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    pass


class _ArrayStored(_ArrayEvent, tag="BlockStored"):
    """BlockStored as an array; fields as in `dialects.ARRAY_STORED`, which are the first of `BlockStored`, in its order."""

    block_hashes: list[int]
    parent_block_hash: int | None
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
    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | None = None
    heartbeat: Heartbeat | None = None


class _ArrayCleared(_ArrayEvent, tag="AllBlocksCleared"):
    pass


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_ArrayStored | _ArrayRemoved | _ArrayCleared]
    data_parallel_rank: int | None = None


_decode_maps: Final = msgspec.msgpack.Decoder(KVEventBatch).decode
_decode_arrays: Final = msgspec.msgpack.Decoder(_ArrayBatch).decode


def fast(payload: bytes, limits: WireLimits) -> KVEventBatch | None:
    """The batch when it is wholly of a known shape and within limits, else None."""
    size = len(payload)
    if size > FAST_BYTES or size > limits.max_payload_bytes:
        return None
    try:
        # The type byte of the first event in `[float64, [event, ...`; any other beginning counts as a map.
        first = payload[11 if payload[10] != 0xDC else 13] if size > 13 else 0
        batch = _decode_maps(payload) if first & 0xF0 != 0x90 else _from_arrays(_decode_arrays(payload))
    except REFUSED:
        return None
    if not 0.0 <= batch.ts <= SECONDS_BELOW or len(batch.events) > limits.max_events:
        return None
    for event in batch.events:
        if not _settle(event, limits):
            return None
    return batch


def _from_arrays(found: _ArrayBatch) -> KVEventBatch:
    return KVEventBatch(found.ts, [_from_array(event) for event in found.events], found.data_parallel_rank)


def _from_array(event: _ArrayStored | _ArrayRemoved | _ArrayCleared) -> KVEvent:
    if type(event) is _ArrayStored:
        return BlockStored(*msgspec.structs.astuple(event))
    if type(event) is _ArrayRemoved:
        return BlockRemoved(event.block_hashes, event.medium, event.group_idx, heartbeat=event.heartbeat)
    return AllBlocksCleared()


def _settle(event: Any, limits: WireLimits) -> bool:
    """Make hashes unsigned in place; False where the event must be looked at with care."""
    kind = type(event)
    # Names that only a decoder sets are not the wire's; a peer that sends them is read with care.
    if event.unrecognised is not None:
        return False
    if kind is AllBlocksCleared:
        return True
    hashes = event.block_hashes
    if hashes:
        if len(hashes) > limits.max_hashes:
            return False
        if min(hashes) < 0:
            event.block_hashes = [value & _MASK for value in hashes]
    if kind is BlockStored:
        parent = event.parent_block_hash
        if parent is not None and parent < 0:
            event.parent_block_hash = parent & _MASK
        keys = event.block_keys
        if event.parent_block_digest is not None or (keys and min(keys) < 0):
            return False
        for found in (keys, event.extra_keys, event.lookahead_token_ids):
            if found is not None and len(found) > limits.max_hashes:
                return False
    return event.block_digests is None
