"""The tolerant decoder: reads the envelope of a batch, leaves its events as raw slices, then reads each event by itself.

Only the events that cannot be read are rejected. `kvevents.wire.decode` uses this decoder when the fast one fails.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, ExtraKey, Heartbeat, KVEvent, KVEventBatch, TokenId
from kvevents.wire.checked_msgpack import (
    MSGPACK_ERRORS,
    NIL,
    BatchRejectedError,
    DecodeBudget,
    DecodeRejectedError,
    Rejected,
    WireLimits,
    array_items,
    declared_length,
    decode_scalar,
    first_byte,
    is_array,
    is_bin,
    is_map,
    is_nil,
    map_items,
    rejection_of,
    to_python,
)
from kvevents.wire.dialects import ARRAY_CLEARED, ARRAY_REMOVED, ARRAY_STORED, NEUTRAL_KINDS

MAX_SECONDS: Final = 1e11
"""A timestamp above 10**11 is in milliseconds (Mooncake RFC #1527), because 10**11 seconds are in the year 5138."""

_MAX_DIGITS: Final = 20
"""Maximum number of digits of a token id. Converting a long string of digits takes quadratic time, or raises."""
_MIN_EVENT_BYTES: Final = 14
"""One byte less than the shortest event, which is the array form of a removal without blocks."""
_MAX_FAST_EVENT_BYTES: Final = 4_096
"""Maximum size of an event for the fast decoder, which does not check lengths before it allocates."""
_FAST_STEPS: Final = 2
_SLOW_STEPS: Final = 10
_HASH_MASK: Final = (1 << 64) - 1
MIN_DIGEST_BYTES: Final = 8
INTERNAL_FIELDS: Final = {"unknown_fields", "block_digests", "parent_block_digest"}
"""Fields of `kvevents.events` that no engine sends."""

_Decoder = msgspec.msgpack.Decoder
_INTEGER: Final = _Decoder(int | None)
_TEXT: Final = _Decoder(str | None)
_INTEGERS: Final = _Decoder(list[int])
_HASH: Final = _Decoder(int | bytes | None)
_HASHES: Final = _Decoder(list[int | bytes])
_TOKENS: Final = _Decoder(list[int | float | str | bool | tuple[int, int] | None])
_IS_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}\Z").match
_HEARTBEAT: Final = _Decoder(Heartbeat)
_LOOKAHEAD: Final = _Decoder(list[list[int]])
_EXTRA_KEYS: Final = _Decoder(list[tuple[ExtraKey, ...] | None])
_decode_bin: Final = _Decoder(memoryview).decode


def decode_tolerant(
    payload: bytes, limits: WireLimits, decode_event: Callable[[msgspec.Raw, WireLimits, DecodeBudget], KVEvent | None]
) -> tuple[KVEventBatch, tuple[Rejected, ...]]:
    """Return the readable part of `payload`, and the records of its rejected parts.

    `decode_event` is the fast decoder for one event; it returns None for an event that it cannot read.

    Raise `DecodeRejectedError` if the payload is not a batch at all, or takes more time than its size allows.
    """
    if len(payload) > limits.max_payload_bytes:
        size = f"{len(payload)} bytes; the limit max_payload_bytes is {limits.max_payload_bytes}"
        raise DecodeRejectedError("oversized", f"the payload has {size}")
    raw_ts, raw_events, raw_rank = _read_envelope(payload, limits)
    rejected: list[Rejected] = []

    def reject(error: DecodeRejectedError, raw: msgspec.Raw, index: int | None = None) -> None:
        rejected.append(error.to_record(raw, index))
        if len(rejected) > limits.max_rejected:
            first = rejected[0]
            detail = f"more than {limits.max_rejected} events cannot be read; the first one: {first.reason}: {first.detail}"
            raise BatchRejectedError("too-many-rejected", detail)

    ts, rank = _read_timestamp(raw_ts, reject), _read_rank(raw_rank, reject)
    budget = DecodeBudget(limits.max_free_form_bytes, len(payload))
    events: list[KVEvent] = []
    for index, raw in enumerate(raw_events):
        try:
            event = decode_event(raw, limits, budget) if len(memoryview(raw)) <= _MAX_FAST_EVENT_BYTES else None
            budget.take_steps(_FAST_STEPS if event is not None else _SLOW_STEPS)
            event = _read_event(raw, limits, budget) if event is None else event
        except BatchRejectedError:
            raise
        except DecodeRejectedError as error:
            reject(error, raw, index)
        else:
            if event is not None:
                events.append(event)
    return KVEventBatch(ts, events, rank), tuple(rejected)


# --- the envelope ------------------------------------------------------------------------------------------------------------


def _read_envelope(payload: bytes, limits: WireLimits) -> tuple[msgspec.Raw, list[msgspec.Raw], msgspec.Raw]:
    """Return the raw timestamp, events and rank of a batch, which is an array of 2 or more elements or a map."""
    head = payload[0] if payload else 0xC0
    if is_map(head):
        fields = map_items(payload, "the batch", limits.max_fields)
        ranks = [fields.get(name, NIL) for name in ("data_parallel_rank", "attn_dp_rank")]
        rank = next((raw for raw in ranks if not is_nil(raw)), NIL)
        parts = [fields[name] for name in ("ts", "events") if name in fields]
    elif is_array(head):
        parts = array_items(payload, "the batch", limits.max_fields, "not-a-batch")
        rank = parts[2] if len(parts) > 2 else NIL
    else:
        raise DecodeRejectedError("not-a-batch", "a batch is an array or a map")
    if len(parts) < 2 or not is_array(first_byte(parts[1])):
        raise DecodeRejectedError("not-a-batch", "a batch is [ts, events, ...] or a map with ts and events")
    count, size = declared_length(memoryview(parts[1])), len(memoryview(parts[1]))
    if count * _MIN_EVENT_BYTES - size > limits.max_rejected * _MIN_EVENT_BYTES:
        detail = f"{count} events in {size} bytes: more than {limits.max_rejected} of them are too short to be read"
        raise DecodeRejectedError("too-many-rejected", detail)
    return parts[0], array_items(parts[1], "the list of events", limits.max_events, "too-many-events"), rank


def _read_timestamp(raw: msgspec.Raw, reject: Callable[[DecodeRejectedError, msgspec.Raw], None]) -> float:
    """Return seconds since the epoch. Reject a timestamp that cannot be read and return 0.0, so that the events are kept."""
    value: object = None
    with suppress(DecodeRejectedError):
        value = decode_scalar(raw, "the timestamp")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if 0 <= value <= MAX_SECONDS:
            return float(value)
        if MAX_SECONDS < value <= MAX_SECONDS * 1000:
            return value / 1000
    detail = "the timestamp is neither seconds nor milliseconds since the epoch"
    reject(DecodeRejectedError("bad-timestamp", detail), raw)
    return 0.0


def _read_rank(raw: msgspec.Raw, reject: Callable[[DecodeRejectedError, msgspec.Raw], None]) -> int | None:
    with suppress(DecodeRejectedError):
        value = decode_scalar(raw, "the data-parallel rank")
        if value is None or type(value) is int:
            return value
    reject(DecodeRejectedError("bad-rank", "the data-parallel rank is not an integer"), raw)
    return None


# --- events ------------------------------------------------------------------------------------------------------------------


def _read_event(raw: msgspec.Raw, limits: WireLimits, budget: DecodeBudget) -> KVEvent | None:
    """Return the event; None if the kind of the event is neutral."""
    is_wrapped = is_bin(first_byte(raw))
    if is_wrapped:  # llm-d's storage connector wraps events
        try:
            raw = msgspec.Raw(_decode_bin(raw))
        except MSGPACK_ERRORS as error:
            raise rejection_of(error, "the event") from error
    tag, fields = _read_event_fields(raw, limits)
    if tag in NEUTRAL_KINDS:
        return None
    build = _EVENT_BUILDERS.get(tag)
    if build is None:
        raise DecodeRejectedError("unknown-tag", f"event type {tag[:64]!r}")
    event = build(FieldReader(fields, limits, budget))
    if is_wrapped and type(event) is BlockStored and event.parent_block_hash == 0:
        event.parent_block_hash = None  # the connector writes 0 for "no parent"
    return event


def _read_event_fields(raw: msgspec.Raw, limits: WireLimits) -> tuple[str, dict[str, msgspec.Raw]]:
    """Return the tag of an event of any form, and its raw fields by the names of `kvevents.events`."""
    head = first_byte(raw)
    if is_array(head):
        items = array_items(raw, "the event", limits.max_fields, "too-many-fields")
        tag = _read_tag(items[0] if items else NIL)
        names = _ARRAY_NAMES.get(tag, ())
        return tag, {names[i] if i < len(names) else str(i + 1): item for i, item in enumerate(items[1:])}
    if not is_map(head):
        raise DecodeRejectedError("malformed", "an event is an array or a map")
    fields = map_items(raw, "the event", limits.max_fields)
    kind = _MOONCAKE_TAGS.get(_read_tag(fields["event_type"])) if "event_type" in fields else None
    if kind is not None:
        return kind, _rename_mooncake_fields(kind, fields)
    return _read_tag(fields.pop("type", NIL)), fields


def _read_tag(raw: msgspec.Raw) -> str:
    value: object = None
    with suppress(DecodeRejectedError):
        value = decode_scalar(raw, "the event type")
    if not isinstance(value, str):
        raise DecodeRejectedError("unknown-tag", "the event type is not a string")
    return value


def _rename_mooncake_fields(kind: str, fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Return the fields of a Mooncake event (RFC #1527) that are not nil, by the names of kvevents.

    Mooncake's own names take precedence over the duplicates that its compatibility mode adds
    (https://github.com/kvcache-ai/Mooncake/pull/2214). Tokens, parent and block size are nil if Mooncake does not know them.
    If a store begins within a prompt (`base_block_idx`) and its parent is unknown, its tokens are dropped, since its prefix is
    unknown.
    """
    for name in ("event_type", "type"):
        fields.pop(name, None)
    for wire_name, field in _MOONCAKE_NAMES.items():
        if wire_name in fields:
            fields[field] = fields.pop(wire_name)
    values = {name: raw for name, raw in fields.items() if not is_nil(raw)}
    if kind != "AllBlocksCleared" and values.get("block_hashes") == _EMPTY_ARRAY:
        raise DecodeRejectedError("bad-field", "seq_hashes is empty: the object key contains no hash")
    if kind != "BlockStored":
        return values
    if "parent_block_hash" not in values and not _is_zero(values.get("base_block_idx", _RAW_ZERO)):
        values.pop("token_ids", None)
    return {"token_ids": _EMPTY_ARRAY, "block_size": _RAW_ZERO, **values}


def _is_zero(raw: msgspec.Raw) -> bool:
    with suppress(DecodeRejectedError):
        value = decode_scalar(raw, "the index of the first block")
        return type(value) is int and not value
    return False


_EMPTY_ARRAY: Final = msgspec.Raw(b"\x90")
_RAW_ZERO: Final = msgspec.Raw(b"\x00")
_MOONCAKE_TAGS: Final = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
_MOONCAKE_NAMES: Final = {"seq_hashes": "block_hashes", "parent_hash": "parent_block_hash", "additional_salt": "cache_salt"}
_ARRAY_NAMES: Final = {"BlockStored": ARRAY_STORED, "BlockRemoved": ARRAY_REMOVED, "AllBlocksCleared": ARRAY_CLEARED}


def _build_stored(fields: FieldReader) -> BlockStored:
    hashes, digests = fields.read_hashes()
    parent, parent_digest = fields.read_parent()
    block_size = fields.read_integer("block_size")
    if block_size is None:
        raise DecodeRejectedError("bad-field", "block_size is missing")
    return BlockStored(
        hashes,
        parent,
        fields.read_tokens(),
        block_size,
        lora_id=fields.read_integer("lora_id"),
        medium=fields.read_text("medium"),
        lora_name=fields.read_text("lora_name"),
        extra_keys=fields.read_extra_keys(),
        group_idx=fields.read_integer("group_idx"),
        kv_cache_spec_kind=fields.read_text("kv_cache_spec_kind"),
        kv_cache_spec_sliding_window=fields.read_integer("kv_cache_spec_sliding_window"),
        locality=fields.read_text("locality"),
        ownership=fields.read_text("ownership"),
        session_id=fields.read_text("session_id"),
        lookahead_token_ids=fields.read_lookahead(),
        cache_salt=fields.read_text("cache_salt"),
        block_keys=fields.read_keys(),
        block_digests=digests,
        parent_block_digest=parent_digest,
        unknown_fields=fields.read_unknown_fields(),
    )


def _build_removed(fields: FieldReader) -> BlockRemoved:
    hashes, digests = fields.read_hashes()
    return BlockRemoved(
        hashes,
        medium=fields.read_text("medium"),
        group_idx=fields.read_integer("group_idx"),
        locality=fields.read_text("locality"),
        ownership=fields.read_text("ownership"),
        heartbeat=fields.read_heartbeat(),
        block_digests=digests,
        unknown_fields=fields.read_unknown_fields(),
    )


_EVENT_BUILDERS: Final[dict[str, Callable[[FieldReader], KVEvent]]] = {
    "BlockStored": _build_stored,
    "BlockRemoved": _build_removed,
    "AllBlocksCleared": lambda fields: AllBlocksCleared(fields.read_unknown_fields()),
}


# --- fields ------------------------------------------------------------------------------------------------------------------


class FieldReader:
    """Reads the raw fields of one event, each with its own type and within its own limit.

    Each method removes the field that it reads; `read_unknown_fields`, called last, returns the other fields. All methods raise
    `DecodeRejectedError` if a field is invalid.
    """

    def __init__(self, fields: dict[str, msgspec.Raw], limits: WireLimits, budget: DecodeBudget) -> None:
        self._fields = fields
        self._limits = limits
        self._budget = budget

    def read_integer(self, name: str) -> int | None:
        """Return an integer, or None if the field is missing or nil."""
        return self._read(name, _INTEGER) if name in self._fields else None

    def read_text(self, name: str) -> str | None:
        """Return a string, or None if the field is missing or nil."""
        return self._read(name, _TEXT) if name in self._fields else None

    def read_hashes(self) -> tuple[list[int], list[bytes] | None]:
        """Return the block hashes as unsigned integers and, if all of them were sent as bytes, the bytes."""
        name = "block_hashes"
        self._check_count(name)
        try:
            values: list[Any] = _INTEGERS.decode(self._fields.get(name, NIL))
        except MSGPACK_ERRORS:
            values = self._read(name, _HASHES)
        else:
            del self._fields[name]
        try:
            if not values or min(values) >= 0:
                return values, None
            return [value & _HASH_MASK for value in values], None
        except TypeError:  # some or all hashes are bytes
            if {*map(type, values)} == {bytes}:
                return shorten_digests(values), values
            return [_unsigned_hash(name, value) for value in values], None

    def read_parent(self) -> tuple[int | None, bytes | None]:
        """Return the parent hash as an unsigned integer and, if it was sent as bytes, the bytes."""
        value = self._read("parent_block_hash", _HASH)
        if value is None:
            return None, None
        return _unsigned_hash("parent_block_hash", value), value if type(value) is bytes else None

    def read_tokens(self) -> list[TokenId]:
        """Return token ids: integers, pairs of integers (SGLang with EAGLE), decimal strings or digests (TensorRT-LLM).

        Nil means that the tokens are unknown: vLLM-Ascend's AscendStoreConnector sends it.
        """
        if "token_ids" in self._fields and self._take_optional("token_ids") is None:
            return []
        try:
            values: list[Any] = _INTEGERS.decode(self._fields.get("token_ids", NIL))
        except MSGPACK_ERRORS:
            return read_tokens(self._read("token_ids", _TOKENS), self._budget)
        del self._fields["token_ids"]
        return values

    def read_extra_keys(self) -> list[tuple[Any, ...] | None] | None:
        """Return the extra keys of each block, or None if the field is missing or nil."""
        name = "extra_keys"
        raw = self._take_optional(name)
        if raw is None:
            return None
        self._check_count(name)
        self._budget.take_bytes(name, len(memoryview(raw)))
        try:
            keys: list[tuple[Any, ...] | None] = _EXTRA_KEYS.decode(raw)
        except MSGPACK_ERRORS:  # the keys have a free form
            values = to_python(raw, name, self._limits.max_nesting - 1, self._budget.take_steps)
            if not isinstance(values, list) or not all(value is None or isinstance(value, list) for value in values):
                raise DecodeRejectedError("bad-field", "extra_keys is not a list of lists or nil") from None
            keys = [None if value is None else tuple(value) for value in values]
        del self._fields[name]
        return keys

    def read_lookahead(self) -> list[list[int]] | None:
        """Return the lookahead tokens of each block, or None if the field is missing or nil."""
        name = "lookahead_token_ids"
        raw = self._take_optional(name)
        if raw is None:
            return None
        self._check_count(name)
        self._budget.take_steps(declared_length(memoryview(raw)) // 2)
        tokens: list[list[int]] = self._read(name, _LOOKAHEAD)
        return tokens

    def read_keys(self) -> list[int] | None:
        """Return the block keys that are sent instead of tokens, modulo 2**64, or None if the field is missing or nil."""
        if self._take_optional("block_keys") is None:
            return None
        self._check_count("block_keys")
        return [key & _HASH_MASK for key in self._read("block_keys", _INTEGERS)]

    def read_heartbeat(self) -> Heartbeat | None:
        """Return a heartbeat of kvevents. Any other value of the field `heartbeat` stays an unknown field."""
        raw = self._take_optional("heartbeat")
        if raw is None:
            return None
        heartbeat: Heartbeat | None = None
        with suppress(*MSGPACK_ERRORS):
            heartbeat = _HEARTBEAT.decode(raw)
            del self._fields["heartbeat"]
        return heartbeat

    def read_unknown_fields(self) -> dict[str, Any] | None:
        """Return the fields that no other method has read, within the limits of free form."""
        for name in INTERNAL_FIELDS:
            # The tolerant decoder ignores internal fields that are nil, as the fast decoder does.
            self._take_optional(name)
        return unknown_values(self._fields, self._limits, self._budget) or None

    def _read(self, name: str, decoder: _Decoder[Any]) -> Any:
        try:
            return decoder.decode(self._fields.pop(name, NIL))
        except MSGPACK_ERRORS as error:
            raise rejection_of(error, name) from error

    def _take_optional(self, name: str) -> msgspec.Raw | None:
        """Return the raw field; if it is missing or nil, remove it and return None."""
        raw = self._fields.get(name, NIL)
        if not is_nil(raw):
            return raw
        self._fields.pop(name, None)
        return None

    def _check_count(self, name: str) -> None:
        """Limit a field with one entry per block to `max_hashes` entries."""
        count, limit = declared_length(memoryview(self._fields.get(name, NIL))), self._limits.max_hashes
        if count > limit:
            raise DecodeRejectedError("too-many-hashes", f"{name} has {count} entries; the limit max_hashes is {limit}")


def unknown_values(fields: dict[str, msgspec.Raw], limits: WireLimits, budget: DecodeBudget) -> dict[str, Any]:
    """Return the values of unknown fields, within the limits of fields of free form. Raise `DecodeRejectedError`."""
    for name, raw in fields.items():
        budget.take_bytes(name[:64], len(memoryview(raw)))
    return {name: to_python(raw, name[:64], limits.max_nesting - 1, budget.take_steps) for name, raw in fields.items()}


def shorten_digests(digests: list[Any]) -> list[int]:
    """Return the last 8 bytes of digests as integers.

    Raise TypeError unless all digests are bytes, and `DecodeRejectedError` if one is shorter than `MIN_DIGEST_BYTES`.
    """
    content, size = b"".join(digests), len(digests[0])
    shortest, max_size = min(map(len, digests)), max(map(len, digests))
    if shortest < MIN_DIGEST_BYTES:
        raise DecodeRejectedError("bad-field", f"block_hashes holds a digest of less than {MIN_DIGEST_BYTES} bytes")
    if shortest != max_size or size % 8:
        return [int.from_bytes(digest[-8:], "big") for digest in digests]
    words = array("Q", content)[size // 8 - 1 :: size // 8]
    if sys.byteorder == "little":
        words.byteswap()
    return words.tolist()


def _unsigned_hash(name: str, value: int | bytes) -> int:
    if type(value) is int:
        return value & _HASH_MASK
    if len(value) < MIN_DIGEST_BYTES:  # type: ignore[arg-type]
        raise DecodeRejectedError("bad-field", f"{name} holds a digest of less than {MIN_DIGEST_BYTES} bytes")
    return int.from_bytes(value[-8:], "big")  # type: ignore[index]


def read_tokens(values: list[Any], budget: DecodeBudget) -> list[Any]:
    """Return the token ids of a list in which some tokens are not integers."""
    if {*map(type, values)} == {str}:
        budget.take_steps(len(values) // 8)
        digits = "".join(values)
        if digits.isascii() and digits.isdigit() and min(map(len, values)) > 0 and max(map(len, values)) <= _MAX_DIGITS:
            tokens = list(map(int, values))
            if max(tokens) <= _HASH_MASK:
                return tokens
    budget.take_steps((len(values) - [*map(type, values)].count(int)) // 3)
    return [value if type(value) is int else _read_token(value) for value in values]


def _read_token(value: float | str | tuple[int, int] | None) -> TokenId:
    """Return a token id; for an invalid value -1, which no prompt has, so its block and later blocks match no prompt."""
    if not isinstance(value, str):
        return value if type(value) is int or isinstance(value, tuple) else -1
    if _IS_DIGEST(value):
        return value.lower()
    is_number = value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS
    return int(value) if is_number and int(value) <= _HASH_MASK else -1
