"""Bytes to events, by shape and without configuration.

Theory of operation. A payload of a known release decodes in one native call into the types of `kvevents.events` (`_fast`). What
that call refuses, for a field that no row knows, a tag from tomorrow, byte hashes, or damage, is read again in two stages
(`_careful`): the envelope first, its events left as raw slices, then each event alone, so that one bad event never costs its
neighbours. Nothing a peer sends raises; it is returned as `Rejected`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.wire.dialects import ARRAY_REMOVED, ARRAY_STORED, Dialect
from kvevents.wire.limits import DEFAULT_WIRE_LIMITS, WireLimits
from kvevents.wire.shape import dialect_of

_MASK: Final = (1 << 64) - 1
_MILLISECONDS_FROM: Final = 1e11
"""A timestamp above this is in milliseconds (Mooncake RFC #1527): as seconds it would be the year 5138."""
_RAW_KEPT: Final = 256
"""Bytes of a rejected event kept for a person to look at."""
_REFUSED: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError)


class Rejected(msgspec.Struct, frozen=True):
    """What was set aside and why. `reason` is one of a few fixed words, for counting; `detail` is for a person."""

    reason: str
    """One of: oversized, malformed, not-a-batch, too-many-events, too-many-hashes, too-deep, unknown-tag, bad-field."""
    detail: str
    index: int | None = None
    """Position of the event in its batch; None when the batch itself is meant."""
    raw: bytes = b""
    """The first bytes of it."""


class Decoded:
    """Result of `decode_batch`: `batch`, `dialect`, `rejected`."""

    __slots__ = ("_dialect", "_payload", "batch", "rejected")

    def __init__(self, batch: KVEventBatch, rejected: tuple[Rejected, ...], payload: bytes) -> None:
        self.batch = batch
        """What could be read; without events (and with `ts` 0) when the payload is no batch at all."""
        self.rejected = rejected
        self._payload = payload
        self._dialect: Dialect | None = None

    @property
    def dialect(self) -> Dialect | None:
        """The oldest release that could have sent this payload; None when no row explains it. Computed when first asked."""
        if self._dialect is None:
            self._dialect = dialect_of(self._payload)
        return self._dialect

    def __repr__(self) -> str:
        return f"<Decoded {len(self.batch.events)} events, {len(self.rejected)} rejected, dialect {self.dialect}>"


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
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _ArrayRemoved(_ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | None = None


class _ArrayCleared(_ArrayEvent, tag="AllBlocksCleared"):
    pass


class _MapBatch(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    ts: float
    events: list[_ArrayStored | _ArrayRemoved | _ArrayCleared]
    data_parallel_rank: int | None = None


_decode_maps: Final = msgspec.msgpack.Decoder(_MapBatch).decode
_decode_arrays: Final = msgspec.msgpack.Decoder(_ArrayBatch).decode
_decode_any: Final = msgspec.msgpack.Decoder().decode
_decode_raw_list: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_raw_map: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode


def decode_batch(payload: bytes, limits: WireLimits = DEFAULT_WIRE_LIMITS) -> Decoded:
    """Read one batch as any engine sends it. Never raises on what a peer sent.

    Hashes come out unsigned: integers modulo 2**64, of byte hashes the last 8 bytes, big-endian, as vLLM itself shortens them.
    """
    if len(payload) > limits.max_payload_bytes:
        detail = f"{len(payload)} bytes; the limit max_payload_bytes is {limits.max_payload_bytes}"
        return _nothing(payload, Rejected("oversized", detail, raw=payload[:_RAW_KEPT]))
    batch = _fast(payload, limits)
    if batch is not None:
        return Decoded(batch, (), payload)
    return _careful(payload, limits)


def _nothing(payload: bytes, *rejected: Rejected) -> Decoded:
    return Decoded(KVEventBatch(0.0, []), rejected, payload)


# --- one native call -------------------------------------------------------------------------------------------------------


def _fast(payload: bytes, limits: WireLimits) -> KVEventBatch | None:
    """The batch when it is wholly of a known shape and within limits, else None."""
    found: _ArrayBatch | _MapBatch
    events: list[KVEvent]
    try:
        if _first_event_is_array(payload):
            arrays = found = _decode_arrays(payload)
            events = [_from_array(event) for event in arrays.events]
        else:
            maps = found = _decode_maps(payload)
            events = maps.events
    except _REFUSED:
        return None
    if found.ts > _MILLISECONDS_FROM or len(events) > limits.max_events:
        return None
    for event in events:
        if not _settle(event, limits):
            return None
    return KVEventBatch(found.ts, events, found.data_parallel_rank)


def _first_event_is_array(payload: bytes) -> bool:
    """Look at the type byte of the first event in `[float64, [event, ...`; any other beginning counts as a map."""
    if len(payload) < 14 or payload[1] != 0xCB:
        return False
    head = payload[10]
    first = payload[13 if head == 0xDC else 11]
    return 0x90 <= first <= 0x9F or first == 0xDC


def _from_array(event: _ArrayStored | _ArrayRemoved | _ArrayCleared) -> KVEvent:
    if type(event) is _ArrayStored:
        return BlockStored(*msgspec.structs.astuple(event))
    if type(event) is _ArrayRemoved:
        return BlockRemoved(event.block_hashes, event.medium, event.group_idx)
    return AllBlocksCleared()


def _settle(event: KVEvent, limits: WireLimits) -> bool:
    """Make hashes unsigned in place; False where the event must be looked at with care."""
    if type(event) is AllBlocksCleared:
        return event.unrecognised is None
    hashes = event.block_hashes  # type: ignore[union-attr]
    if hashes:
        if len(hashes) > limits.max_hashes:
            return False
        if min(hashes) < 0:
            event.block_hashes = [value & _MASK for value in hashes]  # type: ignore[union-attr]
    if type(event) is not BlockStored:
        return event.unrecognised is None and event.block_digests is None  # type: ignore[union-attr]
    if event.parent_block_hash is not None and event.parent_block_hash < 0:
        event.parent_block_hash &= _MASK
    if event.extra_keys is not None and any(event.extra_keys) and _depth(event.extra_keys) >= limits.max_nesting:
        return False
    # Names that only a decoder sets are not the wire's; a peer that sends them is read with care.
    return event.unrecognised is None and event.block_digests is None and event.parent_block_digest is None


def _depth(value: Any) -> int:
    """Levels of containers, without recursion: a peer chooses the depth."""
    depth, level = 0, [value]
    while level:
        inner: list[Any] = []
        nested = False
        for item in level:
            if isinstance(item, dict):
                nested = True
                inner.extend(item.values())
            elif isinstance(item, (list, tuple)):
                nested = True
                inner.extend(item)
        depth += nested
        level = inner
    return depth


# --- two stages ------------------------------------------------------------------------------------------------------------


class _RefusedError(Exception):
    """Why one event is set aside; never leaves this module."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def _careful(payload: bytes, limits: WireLimits) -> Decoded:
    try:
        ts, raw_events, rank = _envelope(payload, limits)
    except _RefusedError as refusal:
        return _nothing(payload, Rejected(refusal.reason, str(refusal), raw=payload[:_RAW_KEPT]))
    events: list[KVEvent] = []
    rejected: list[Rejected] = []
    for index, raw in enumerate(raw_events):
        try:
            events.append(_event(raw, limits))
        except _RefusedError as refusal:
            rejected.append(Rejected(refusal.reason, str(refusal), index, bytes(raw)[:_RAW_KEPT]))
    return Decoded(KVEventBatch(ts, events, rank), tuple(rejected), payload)


def _envelope(payload: bytes, limits: WireLimits) -> tuple[float, list[msgspec.Raw], int | None]:
    """Timestamp, raw events and rank of a batch of 2, 3 or more elements, or of a map."""
    try:
        if payload and (0x80 <= payload[0] <= 0x8F or payload[0] in (0xDE, 0xDF)):
            fields = _decode_raw_map(payload)
            parts = [fields.get("ts"), fields.get("events"), fields.get("data_parallel_rank") or fields.get("attn_dp_rank")]
        else:
            parts = [*_decode_raw_list(payload), None][:3]
        if len(parts) < 3 or parts[0] is None or parts[1] is None:
            raise _RefusedError("not-a-batch", "a batch is [ts, events, ...] or a map with ts and events")
        ts, rank = _decode_any(parts[0]), None if parts[2] is None else _decode_any(parts[2])
        events = _decode_raw_list(parts[1])
    except RecursionError as error:
        raise _RefusedError("too-deep", "containers nested deeper than the interpreter can follow") from error
    except msgspec.ValidationError as error:
        raise _RefusedError("not-a-batch", str(error)) from error
    except _REFUSED as error:
        raise _RefusedError("malformed", str(error)) from error
    if isinstance(ts, bool) or not isinstance(ts, (int, float)):
        raise _RefusedError("not-a-batch", f"the timestamp is a {type(ts).__name__}, not a number")
    if len(events) > limits.max_events:
        raise _RefusedError("too-many-events", f"{len(events)} events; the limit max_events is {limits.max_events}")
    seconds = ts / 1000 if ts > _MILLISECONDS_FROM else float(ts)
    return seconds, events, rank if type(rank) is int else None


def _event(raw: msgspec.Raw, limits: WireLimits, wrapped: bool = False) -> KVEvent:
    try:
        value = _decode_any(raw)
    except RecursionError as error:
        raise _RefusedError("too-deep", "containers nested deeper than the interpreter can follow") from error
    except _REFUSED as error:
        raise _RefusedError("malformed", str(error)) from error
    if isinstance(value, bytes) and not wrapped:
        # llm-d's storage connector wraps each event in a bin and writes 0 for "no parent".
        event = _event(msgspec.Raw(value), limits, wrapped=True)
        if type(event) is BlockStored and event.parent_block_hash == 0:
            event.parent_block_hash = None
        return event
    if _depth(value) > limits.max_nesting:
        raise _RefusedError("too-deep", f"nested deeper than the limit max_nesting, {limits.max_nesting}")
    fields = _fields(value)
    tag = fields.pop("type")
    build = _BUILDERS.get(tag) if isinstance(tag, str) else None
    if build is None:
        raise _RefusedError("unknown-tag", f"event type {str(tag)[:64]!r}")
    return build(_Fields(fields, limits))


def _fields(value: Any) -> dict[str, Any]:
    """Any form of an event as a map with `type` and our field names."""
    if isinstance(value, list) and value:
        tag, *items = value
        names = _ARRAY_NAMES.get(tag, ()) if isinstance(tag, str) else ()
        named = {names[at] if at < len(names) else str(at + 1): item for at, item in enumerate(items)}
        return {"type": tag} | named
    if not isinstance(value, dict):
        raise _RefusedError("malformed", f"an event is an array or a map, not {type(value).__name__}")
    fields = {str(key): item for key, item in value.items()}
    if "event_type" in fields:
        return _from_mooncake(fields)
    fields.setdefault("type", None)
    return fields


def _from_mooncake(fields: dict[str, Any]) -> dict[str, Any]:
    """Mooncake RFC #1527: its own names first; the doubles that its compatibility mode adds are dropped."""
    fields["type"] = _MOONCAKE_TAGS.get(str(fields.pop("event_type")))
    for theirs, ours in _MOONCAKE_NAMES.items():
        if theirs in fields:
            fields[ours] = fields.pop(theirs)
    if fields["type"] == "BlockStored":
        fields["token_ids"] = fields.get("token_ids") or []
        fields["block_size"] = fields.get("block_size") or 0
    elif fields.get("block_size") is None:
        fields.pop("block_size", None)
    return fields


_MOONCAKE_TAGS: Final = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
_MOONCAKE_NAMES: Final = {
    "seq_hashes": "block_hashes",
    "parent_hash": "parent_block_hash",
    "additional_salt": "cache_salt",
}
_ARRAY_NAMES: Final = {"BlockStored": ARRAY_STORED, "BlockRemoved": ARRAY_REMOVED}


class _Fields:
    """Fields of one event on their way into its type: each is taken once, what is left was not recognised."""

    def __init__(self, fields: dict[str, Any], limits: WireLimits) -> None:
        self._fields = fields
        self._limits = limits

    def integer(self, name: str, default: int | None = None) -> int | None:
        value = self._fields.pop(name, default)
        if value is not None and type(value) is not int:
            raise _RefusedError("bad-field", f"{name} is a {type(value).__name__}, not an integer")
        return value

    def text(self, name: str) -> str | None:
        value = self._fields.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise _RefusedError("bad-field", f"{name} is a {type(value).__name__}, not a string")
        return value

    def hashes(self) -> tuple[list[int], list[bytes] | None]:
        values = self._list("block_hashes")
        if len(values) > self._limits.max_hashes:
            raise _RefusedError("too-many-hashes", f"{len(values)} hashes; the limit max_hashes is {self._limits.max_hashes}")
        hashes = [_canonical_hash("block_hashes", value) for value in values]
        return hashes, values if values and all(isinstance(value, bytes) for value in values) else None

    def parent(self) -> tuple[int | None, bytes | None]:
        value = self._fields.pop("parent_block_hash", None)
        if value is None:
            return None, None
        return _canonical_hash("parent_block_hash", value), value if isinstance(value, bytes) else None

    def tokens(self) -> list[int | tuple[int, int]]:
        return [_token(value) for value in self._list("token_ids")]

    def extra_keys(self) -> list[tuple[Any, ...] | None] | None:
        value = self._fields.pop("extra_keys", None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(item is None or isinstance(item, list) for item in value):
            raise _RefusedError("bad-field", "extra_keys is not a list of lists or nil")
        return [None if item is None else tuple(item) for item in value]

    def lookahead(self) -> list[list[int]] | None:
        value = self._fields.pop("lookahead_token_ids", None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, list) for item in value):
            raise _RefusedError("bad-field", "lookahead_token_ids is not a list of lists")
        return value

    def rest(self) -> dict[str, Any] | None:
        """What nobody took. Call last."""
        return self._fields or None

    def _list(self, name: str) -> list[Any]:
        value = self._fields.pop(name, None)
        if not isinstance(value, list):
            raise _RefusedError("bad-field", f"{name} is a {type(value).__name__}, not a list")
        return value


def _canonical_hash(name: str, value: Any) -> int:
    if type(value) is int:
        return value & _MASK
    if isinstance(value, bytes) and len(value) >= 8:
        return int.from_bytes(value[-8:], "big")
    raise _RefusedError("bad-field", f"{name} holds a {type(value).__name__} that is neither an integer nor a digest")


def _token(value: Any) -> int | tuple[int, int]:
    """A token id; TensorRT-LLM may send it as a string, SGLang under EAGLE as a pair."""
    if type(value) is int:
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        return int(value)
    if isinstance(value, list) and len(value) == 2 and all(type(item) is int for item in value):
        return (value[0], value[1])
    raise _RefusedError("bad-field", f"token_ids holds a {type(value).__name__} that is no token id")


def _stored(fields: _Fields) -> BlockStored:
    hashes, digests = fields.hashes()
    parent, parent_digest = fields.parent()
    block_size = fields.integer("block_size")
    if block_size is None:
        raise _RefusedError("bad-field", "block_size is missing")
    return BlockStored(
        hashes,
        parent,
        fields.tokens(),
        block_size,
        lora_id=fields.integer("lora_id"),
        medium=fields.text("medium"),
        lora_name=fields.text("lora_name"),
        extra_keys=fields.extra_keys(),
        group_idx=fields.integer("group_idx"),
        kv_cache_spec_kind=fields.text("kv_cache_spec_kind"),
        kv_cache_spec_sliding_window=fields.integer("kv_cache_spec_sliding_window"),
        locality=fields.text("locality"),
        ownership=fields.text("ownership"),
        session_id=fields.text("session_id"),
        lookahead_token_ids=fields.lookahead(),
        cache_salt=fields.text("cache_salt"),
        block_digests=digests,
        parent_block_digest=parent_digest,
        unrecognised=fields.rest(),
    )


def _removed(fields: _Fields) -> BlockRemoved:
    hashes, digests = fields.hashes()
    return BlockRemoved(
        hashes,
        medium=fields.text("medium"),
        group_idx=fields.integer("group_idx"),
        locality=fields.text("locality"),
        ownership=fields.text("ownership"),
        block_digests=digests,
        unrecognised=fields.rest(),
    )


def _cleared(fields: _Fields) -> AllBlocksCleared:
    return AllBlocksCleared(unrecognised=fields.rest())


_BUILDERS: Final[dict[str, Callable[[_Fields], KVEvent]]] = {
    "BlockStored": _stored,
    "BlockRemoved": _removed,
    "AllBlocksCleared": _cleared,
}
