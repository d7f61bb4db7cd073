"""Encodes batches of events in the dialect of any engine release, and events for the native index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from kvevents.errors import EncodeError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVCacheEvent, KVEvent, KVEventBatch
from kvevents.wire.dialects import ARRAY_CLEARED, ARRAY_REMOVED, ARRAY_STORED, DECLARED_DIALECT, DEFAULT_DIALECT, Dialect


def _to_builtin(value: Any) -> Any:
    """Return a list or a number for a value that msgspec does not encode: an `array`, a NumPy value or another sequence."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_to_builtin)
_SIGN_BIT: Final = 1 << 63
_HASH_MODULUS: Final = 1 << 64
_EVENT_TAGS: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})

_OWN_FIELDS: Final = ("heartbeat", "block_keys")
"""Fields of kvevents that no engine has; kvevents sends them in every dialect with events as maps."""

_ENCODING_ERRORS: Final = (TypeError, ValueError, OverflowError, AttributeError, RecursionError)

_Converter = Callable[[Any], Any]
_Encoder = Callable[[Any], bytes]


def encode_batch(batch: EventBatch, dialect: Dialect | None = None) -> bytes:
    """Return the payload that a publisher of `dialect` sends for `batch`.

    With a dialect, KV cache events (those of kvevents and of `kvevents.compat`) are encoded as that release encodes them,
    without the fields that the release lacks. Users' own event types are encoded as they are declared.
    Without a dialect, KV cache events are encoded as arrays, which almost all subscribers read (`DEFAULT_DIALECT`). An event
    with a field that the array cannot hold is encoded as a map in the form of the newest vLLM, so no field is left out.

    Raise `EncodeError` if a value in the batch cannot be encoded.
    """
    return batch_encoder(dialect)(batch)


def batch_encoder(dialect: Dialect | None = None) -> _Encoder:
    """Return a function that encodes batches in one dialect, as `encode_batch` does."""
    layout = dialect or DEFAULT_DIALECT
    # In the newest releases of all engines, batches are arrays with a rank.
    is_common = layout.batch_form == "array" and layout.has_rank
    # Most stores are sent unchanged in this form, so no event has its hashes converted: removals must match their stores.
    keeps_hashes = layout.is_lossless and not layout.has_signed_hashes
    converters: dict[Any, _Converter] = {}

    def encode(batch: Any) -> bytes:
        try:
            events: list[Any] = []
            for event in batch.events:  # a comprehension is one more call in Python 3.11
                try:
                    convert = converters[event.__class__]
                except KeyError:
                    convert = converters[event.__class__] = _converter(event.__class__, layout, keeps_hashes)
                events.append(convert(event))
            wire_batch = batch
            if not is_common:
                wire_batch = _rare_batch(batch, events, layout)
            elif batch.__class__ is KVEventBatch:
                wire_batch = (batch.ts, events, batch.data_parallel_rank)
            elif events != batch.events:  # a converted event never equals its original
                wire_batch = (batch.ts, events, batch_rank(batch))
            return _ENCODER.encode(wire_batch)
        except _ENCODING_ERRORS as error:
            raise EncodeError(f"cannot encode {type(batch).__name__}: {error}") from error

    return encode


def _rare_batch(batch: Any, events: list[Any], dialect: Dialect) -> Any:
    """Return a batch in a form that few dialects have: an array without the rank, or a map."""
    if dialect.batch_form == "array":
        return [batch.ts, events]
    rank = batch_rank(batch)
    return {"ts": batch.ts, "events": events, **({} if rank is None else {"data_parallel_rank": rank})}


def batch_rank(batch: EventBatch) -> int | None:
    """Return the rank of a batch of any engine's type: `data_parallel_rank`, or `attn_dp_rank` in SGLang."""
    rank: int | None = getattr(batch, "data_parallel_rank", None)
    return getattr(batch, "attn_dp_rank", None) if rank is None else rank


@cache
def _converter(kind: Any, dialect: Dialect, keeps_hashes: bool) -> _Converter:
    """Return a function that converts events of type `kind` to the layout of `dialect`, except hashes if `keeps_hashes`."""
    # Whether the type is of kvevents or `kvevents.compat`; users' own types may derive from these types.
    is_event = isinstance(kind, type) and issubclass(kind, KVCacheEvent)
    tag = getattr(getattr(kind, "__struct_config__", None), "tag", None)
    if not is_event or tag not in _EVENT_TAGS:
        return _return_unchanged
    wire_type = _wire_type(tag, dialect)
    names = wire_type.__struct_fields__
    convert_hash = _return_unchanged if keeps_hashes else partial(_wire_hash, dialect.has_signed_hashes)

    def convert(event: Any) -> Any:
        values = [_read_field(event, name, convert_hash) for name in names]
        return _add_extra_fields(wire_type(*values), event, dialect)

    def convert_completely(event: Any) -> Any:
        is_limited_clear = isinstance(event, AllBlocksCleared) and scope_of(event) == event.unknown_fields
        is_misfit = not is_limited_clear and any(getattr(event, name) is not None for name in other_names)
        return fall_back(event) if is_misfit else convert(event)

    if not dialect.is_lossless:
        return convert
    other_names = [name for name in kind.__struct_fields__ if name not in {*names, "heartbeat"}]
    fall_back = _converter(kind, replace(DECLARED_DIALECT, has_signed_hashes=dialect.has_signed_hashes), keeps_hashes)
    is_fast = kind is BlockStored and names == ARRAY_STORED and keeps_hashes
    return _stored_converter(convert_completely) if is_fast else convert_completely


def _return_unchanged(value: Any) -> Any:
    return value


def _stored_converter(convert: _Converter) -> _Converter:
    """Return a function that converts stores as `convert` does, and takes a tenth of the time for most stores of engines."""

    def convert_stored(event: BlockStored) -> Any:
        if (
            event.locality is None is event.ownership
            and event.session_id is None is event.lookahead_token_ids
            and event.cache_salt is None is event.block_keys
            and event.block_digests is None is event.parent_block_digest
            and event.unknown_fields is None
            and event.token_ids.__class__ is list
        ):
            return (
                "BlockStored",
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
                event.lora_id,
                event.medium,
                event.lora_name,
                event.extra_keys,
                event.group_idx,
                event.kv_cache_spec_kind,
                event.kv_cache_spec_sliding_window,
            )
        return convert(event)

    return convert_stored


def _read_field(event: Any, name: str, convert_hash: _Converter) -> Any:
    """Return the value of one field. Hashes are bytes if the peer sent bytes, else integers that `convert_hash` returns."""
    value: Any = getattr(event, name, None)
    if name == "block_hashes":
        digests = getattr(event, "block_digests", None)
        return [convert_hash(item) for item in (() if value is None else value)] if digests is None else digests
    if name == "parent_block_hash":
        digest = getattr(event, "parent_block_digest", None)
        return convert_hash(value) if digest is None else digest
    if name == "token_ids" and isinstance(value, (bytes, bytearray, memoryview)):
        return memoryview(value).tolist()  # msgspec would encode this type as bytes
    return value


def _wire_hash(is_signed: bool, value: Any) -> Any:
    least = -_SIGN_BIT if is_signed else 0
    return (value - least) % _HASH_MODULUS + least if isinstance(value, int) else value


def _add_extra_fields(wire_event: msgspec.Struct, event: Any, dialect: Dialect) -> Any:
    """Add the fields that only kvevents has. Map events also get the unknown fields, which arrays cannot hold."""
    extra = {name: value for name in _OWN_FIELDS if (value := getattr(event, name, None)) is not None}
    if dialect.event_form == "array":
        if isinstance(event, AllBlocksCleared) and (scope := scope_of(event)):
            # The event ends with the scope of the clear. Decoders that ignore the scope clear everything.
            return [*msgspec.to_builtins(wire_event), *(scope.get(name) for name in ARRAY_CLEARED)]
        return _extend_array(wire_event, extra, dialect) if extra else wire_event
    extra |= getattr(event, "unknown_fields", None) or {}
    if not extra:
        return wire_event
    fields: dict[str, Any] = msgspec.to_builtins(wire_event, builtin_types=(bytes,))
    return fields | extra


def _extend_array(wire_event: msgspec.Struct, extra: dict[str, Any], dialect: Dialect) -> list[Any]:
    """Return an array event in its longest form, with a heartbeat at the end. Raise `ValueError` for any other extra field."""
    heartbeat = extra.pop("heartbeat", None)
    if extra:
        raise ValueError(f"the dialect {dialect} has no field for {' and '.join(extra)}; choose a dialect with events as maps")
    fields: list[Any] = msgspec.to_builtins(wire_event, builtin_types=(bytes,))
    return [*fields, *[None] * (len(ARRAY_REMOVED) - len(fields)), heartbeat]


@cache
def _wire_type(tag: str, dialect: Dialect) -> type[msgspec.Struct]:
    """Return a struct type with the layout of the release, so that msgspec orders and omits fields as the release does."""
    names_by_tag = {"BlockStored": dialect.stored_fields, "BlockRemoved": dialect.removed_fields}
    fields = [_wire_field(name, dialect) for name in names_by_tag.get(tag, ())]
    return msgspec.defstruct(
        f"{tag}_{dialect.name}", fields, tag=tag, array_like=dialect.event_form == "array", omit_defaults=True, gc=False
    )


def _wire_field(name: str, dialect: Dialect) -> tuple[str, Any] | tuple[str, Any, Any]:
    # Positional structs need defaults only after required fields. msgspec sends a default from a factory and omits a plain one.
    if name in dialect.optional_fields:
        return (name, Any, None)
    return (name, Any) if name == "block_hashes" else (name, Any, msgspec.field(default_factory=type(None)))


# --- events for the index ---------------------------------------------------------------------------------------------------


def encode_events(events: Iterable[KVEvent], rank: int | None = None) -> bytes:
    """Encode the parts of the events of a rank that an index needs, as a payload of the newest form.

    Raise `TypeError`, `ValueError` or `OverflowError` for events that are not as `kvevents.events` declares them.
    """
    return _ENCODER.encode((0.0, [_event_fields(event) for event in events], rank))


def scope_of(event: AllBlocksCleared) -> dict[str, Any]:
    """Return the `medium` and `group_idx` of a clear that is limited to them; empty if it clears everything.

    No engine declares these fields for clears, so they are decoded as unknown fields. Invalid values are ignored: to clear too
    much never makes the index report blocks that a worker does not hold.
    """
    fields = event.unknown_fields or {}
    medium, group = fields.get("medium"), fields.get("group_idx")
    scope: dict[str, Any] = {"medium": medium} if isinstance(medium, str) else {}
    return scope | ({"group_idx": (group + _SIGN_BIT) % _HASH_MODULUS - _SIGN_BIT} if type(group) is int else {})


def _event_fields(event: KVEvent) -> Any:
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"} | scope_of(event)
    if isinstance(event, BlockRemoved):
        return msgspec.structs.replace(event, block_digests=None, unknown_fields=None, heartbeat=None)
    copy = msgspec.structs.replace(event, block_digests=None, parent_block_digest=None, session_id=None, unknown_fields=None)
    items = (event.unknown_fields or {}).get("mm_keys")
    return msgspec.to_builtins(copy, builtin_types=(bytes,)) | {"mm_keys": items} if items else copy
