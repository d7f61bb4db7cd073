"""Bytes to events in two stages: the envelope, its events left as raw slices, then each event alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.wire.dialects import ARRAY_REMOVED, ARRAY_STORED
from kvevents.wire.fields import FieldReader, FreeForm
from kvevents.wire.limits import WireLimits
from kvevents.wire.raw import NIL, REFUSED, elements, head_of, is_array, is_bin, is_map, pairs, refusal_of, scalar
from kvevents.wire.rejected import RefusedError, Rejected

SECONDS_BELOW: Final = 1e11
"""A timestamp above this is in milliseconds (Mooncake RFC #1527): as seconds it would be the year 5138."""

_decode_bin: Final = msgspec.msgpack.Decoder(memoryview).decode


def careful(payload: bytes, limits: WireLimits) -> tuple[KVEventBatch, tuple[Rejected, ...]]:
    """Everything in `payload` that can be read, and what cannot. Raises `RefusedError` when it is no batch at all."""
    if len(payload) > limits.max_payload_bytes:
        size = f"{len(payload)} bytes; the limit max_payload_bytes is {limits.max_payload_bytes}"
        raise RefusedError("oversized", f"the payload has {size}")
    raw_ts, raw_events, raw_rank = _envelope(payload, limits)
    aside = _Aside(limits.max_rejected)
    ts, rank = _timestamp(raw_ts, aside), _rank(raw_rank, aside)
    free = FreeForm(limits.max_free_bytes)
    events: list[KVEvent] = []
    for index, raw in enumerate(raw_events):
        try:
            events.append(_event(raw, limits, free))
        except RefusedError as refusal:
            aside.add(refusal, raw, index)
    return KVEventBatch(ts, events, rank), aside.entries()


class _Aside:
    """What was set aside of one batch: the first ones as they are, the others as a number."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[Rejected] = []
        self._more = 0

    def add(self, refusal: RefusedError, raw: msgspec.Raw, index: int | None = None) -> None:
        if len(self._kept) < self._limit:
            self._kept.append(refusal.rejected(raw, index))
        else:
            self._more += 1

    def entries(self) -> tuple[Rejected, ...]:
        if self._more:
            self._kept.append(Rejected("more", f"{self._more} more were set aside", count=self._more))
        return tuple(self._kept)


def _envelope(payload: bytes, limits: WireLimits) -> tuple[msgspec.Raw, list[msgspec.Raw], msgspec.Raw]:
    """Timestamp, events and rank, undecoded, of a batch of 2, 3 or more elements, or of a map."""
    head = payload[0] if payload else 0xC0
    if is_map(head):
        fields = pairs(payload, "the batch", limits.max_fields)
        ranks = [fields.get(name, NIL) for name in ("data_parallel_rank", "attn_dp_rank")]
        rank = next((raw for raw in ranks if head_of(raw) != 0xC0), NIL)
        parts = [fields[name] for name in ("ts", "events") if name in fields]
    elif is_array(head):
        parts = elements(payload, "the batch", limits.max_fields, "not-a-batch")
        rank = parts[2] if len(parts) > 2 else NIL
    else:
        raise RefusedError("not-a-batch", "a batch is an array or a map")
    if len(parts) < 2 or not is_array(head_of(parts[1])):
        raise RefusedError("not-a-batch", "a batch is [ts, events, ...] or a map with ts and events")
    return parts[0], elements(parts[1], "the list of events", limits.max_events, "too-many-events"), rank


def _timestamp(raw: msgspec.Raw, aside: _Aside) -> float:
    """Seconds since the epoch; 0.0 and a rejection where there are none, since the events are worth more than their time."""
    value: object = None
    with suppress(RefusedError):
        value = scalar(raw, "the timestamp")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if 0 <= value <= SECONDS_BELOW:
            return float(value)
        if SECONDS_BELOW < value <= SECONDS_BELOW * 1000:
            return value / 1000
    aside.add(RefusedError("bad-timestamp", "the timestamp is neither seconds nor milliseconds since the epoch"), raw)
    return 0.0


def _rank(raw: msgspec.Raw, aside: _Aside) -> int | None:
    with suppress(RefusedError):
        value = scalar(raw, "the data-parallel rank")
        if value is None or type(value) is int:
            return value
    aside.add(RefusedError("bad-rank", "the data-parallel rank is not an integer"), raw)
    return None


def _event(raw: msgspec.Raw, limits: WireLimits, free: FreeForm, wrapped: bool = False) -> KVEvent:
    head = head_of(raw)
    if is_bin(head) and not wrapped:
        return _unwrapped(raw, limits, free)
    tag, fields = _fields(raw, head, limits)
    build = _BUILDERS.get(tag)
    if build is None:
        raise RefusedError("unknown-tag", f"event type {tag[:64]!r}")
    return build(FieldReader(fields, limits, free))


def _unwrapped(raw: msgspec.Raw, limits: WireLimits, free: FreeForm) -> KVEvent:
    """llm-d's storage connector wraps each event in a bin and writes 0 for "no parent"."""
    try:
        inner = msgspec.Raw(_decode_bin(raw))
    except REFUSED as error:
        raise refusal_of(error, "the event") from error
    event = _event(inner, limits, free, wrapped=True)
    if type(event) is BlockStored and event.parent_block_hash == 0:
        event.parent_block_hash = None
    return event


def _fields(raw: msgspec.Raw, head: int, limits: WireLimits) -> tuple[str, dict[str, msgspec.Raw]]:
    """Any form of an event: its tag, and its fields by our names, undecoded."""
    if is_array(head):
        items = elements(raw, "the event", limits.max_fields, "too-many-fields")
        tag = _tag(items[0] if items else NIL)
        names = _ARRAY_NAMES.get(tag, ())
        return tag, {names[at] if at < len(names) else str(at + 1): item for at, item in enumerate(items[1:])}
    if not is_map(head):
        raise RefusedError("malformed", "an event is an array or a map")
    fields = pairs(raw, "the event", limits.max_fields)
    kind = _MOONCAKE_TAGS.get(_tag(fields["event_type"])) if "event_type" in fields else None
    if kind is not None:
        return kind, _from_mooncake(kind, fields)
    return _tag(fields.pop("type", NIL)), fields


def _tag(raw: msgspec.Raw) -> str:
    value: object = None
    with suppress(RefusedError):
        value = scalar(raw, "the event type")
    if not isinstance(value, str):
        raise RefusedError("unknown-tag", "the event type is not a string")
    return value


def _from_mooncake(kind: str, fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Mooncake RFC #1527: its own names first; the doubles that its compatibility mode adds are dropped.

    https://github.com/kvcache-ai/Mooncake/pull/2214. Tokens, parent and block size are nil where the store does not know them.
    """
    for name in ("event_type", "type"):
        fields.pop(name, None)
    for theirs, ours in _MOONCAKE_NAMES.items():
        if theirs in fields:
            fields[ours] = fields.pop(theirs)
    known = {name: raw for name, raw in fields.items() if head_of(raw) != 0xC0}
    if kind == "BlockStored":
        return {"token_ids": _EMPTY, "block_size": _ZERO} | known
    return known


_EMPTY: Final = msgspec.Raw(b"\x90")
_ZERO: Final = msgspec.Raw(b"\x00")
_MOONCAKE_TAGS: Final = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
_MOONCAKE_NAMES: Final = {
    "seq_hashes": "block_hashes",
    "parent_hash": "parent_block_hash",
    "additional_salt": "cache_salt",
}
_ARRAY_NAMES: Final = {"BlockStored": ARRAY_STORED, "BlockRemoved": ARRAY_REMOVED}


def _stored(fields: FieldReader) -> BlockStored:
    hashes, digests = fields.hashes()
    parent, parent_digest = fields.parent()
    block_size = fields.integer("block_size")
    if block_size is None:
        raise RefusedError("bad-field", "block_size is missing")
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
        block_keys=fields.keys(),
        block_digests=digests,
        parent_block_digest=parent_digest,
        unrecognised=fields.rest(),
    )


def _removed(fields: FieldReader) -> BlockRemoved:
    hashes, digests = fields.hashes()
    return BlockRemoved(
        hashes,
        medium=fields.text("medium"),
        group_idx=fields.integer("group_idx"),
        locality=fields.text("locality"),
        ownership=fields.text("ownership"),
        heartbeat=fields.heartbeat(),
        block_digests=digests,
        unrecognised=fields.rest(),
    )


def _cleared(fields: FieldReader) -> AllBlocksCleared:
    return AllBlocksCleared(unrecognised=fields.rest())


_BUILDERS: Final[dict[str, Callable[[FieldReader], KVEvent]]] = {
    "BlockStored": _stored,
    "BlockRemoved": _removed,
    "AllBlocksCleared": _cleared,
}
