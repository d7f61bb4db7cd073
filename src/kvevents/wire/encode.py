"""Events to bytes, in the dialect of any engine release."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import msgspec

from kvevents.errors import EncodeError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVCacheEvent
from kvevents.wire.dialects import ARRAY_REMOVED, NEWEST_VLLM, Dialect

_ENCODER: Final = msgspec.msgpack.Encoder()
_SIGN: Final = 1 << 63
_MODULUS: Final = 1 << 64
_TAGS: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})

_DECLARED: Final = replace(
    NEWEST_VLLM, stored=(*NEWEST_VLLM.stored, "cache_salt"), optional=NEWEST_VLLM.optional | {"cache_salt"}
)
"""All fields of `kvevents.events`, as the newest vLLM orders them."""
_OURS: Final = ("heartbeat", "block_keys")
"""Fields that no engine's release has, and every dialect carries all the same."""

_REFUSED: Final = (TypeError, ValueError, OverflowError, AttributeError, RecursionError)

_Converter = Callable[[Any], Any]
_Encoder = Callable[[Any], bytes]


def encode_batch(batch: EventBatch, dialect: Dialect | None = None) -> bytes:
    """The payload that a publisher of `dialect` sends for `batch`.

    With a dialect, KV cache events (ours and those of `kvevents.compat`) are spelled as that release spells them; fields that
    it does not have are left out. Users' own event types are encoded as they declare themselves. Without a dialect everything
    is encoded as declared, which for `kvevents.events` is vLLM 0.33's layout.

    Raises `EncodeError` when something in the batch has no encoding.
    """
    try:
        if dialect is None and not any(map(_is_relayed, batch.events)):
            return _ENCODER.encode(batch)
        return _ENCODER.encode(_spelled(batch, dialect or _DECLARED))
    except _REFUSED as error:
        raise EncodeError(f"cannot encode {type(batch).__name__}: {error}") from error


def batch_encoder(dialect: Dialect | None = None) -> _Encoder:
    """`encode_batch` for the one thread that encodes a stream: the same bytes and errors, from a buffer that is used again."""
    if dialect is not None:
        return lambda batch: encode_batch(batch, dialect)
    buffer = bytearray()
    encode_into = _ENCODER.encode_into

    def encode(batch: Any) -> bytes:
        try:
            if not any(map(_is_relayed, batch.events)):
                encode_into(batch, buffer)
                return bytes(buffer)
        except _REFUSED as error:
            raise EncodeError(f"cannot encode {type(batch).__name__}: {error}") from error
        return encode_batch(batch)

    return encode


def _is_relayed(event: object) -> bool:
    """Whether an event carries what only a decoder sets; such fields are never sent as they stand."""
    kind = type(event)
    if kind is BlockStored or kind is BlockRemoved:
        return event.unrecognised is not None or event.block_digests is not None  # type: ignore[attr-defined]
    return kind is AllBlocksCleared and event.unrecognised is not None  # type: ignore[attr-defined]


def _spelled(batch: EventBatch, dialect: Dialect) -> Any:
    events = [_converter(event.__class__, dialect)(event) for event in batch.events]
    rank = batch_rank(batch)
    if dialect.batch == "map":
        return {"ts": batch.ts, "events": events, **({} if rank is None else {"data_parallel_rank": rank})}
    return [batch.ts, events, rank] if dialect.rank else [batch.ts, events]


def batch_rank(batch: EventBatch) -> int | None:
    """The rank of any engine's batch type, whatever the engine calls it."""
    rank: int | None = getattr(batch, "data_parallel_rank", None)
    return getattr(batch, "attn_dp_rank", None) if rank is None else rank


@cache
def _converter(kind: Any, dialect: Dialect) -> _Converter:
    """How events of type `kind` become what msgspec encodes in `dialect`; made once per pair."""
    tag = getattr(getattr(kind, "__struct_config__", None), "tag", None)
    if not issubclass(kind, KVCacheEvent) or tag not in _TAGS:
        return _as_declared
    wire_type = _wire_type(tag, dialect)
    names = wire_type.__struct_fields__

    def convert(event: Any) -> Any:
        values = [_value(event, name, dialect.signed) for name in names]
        return _with_unrecognised(wire_type(*values), event, dialect)

    return convert


def _as_declared(event: Any) -> Any:
    return event


def _value(event: Any, name: str, signed: bool) -> Any:
    """One field; digests where the peer sent digests, else hashes in the dialect's range."""
    value: Any = getattr(event, name, None)
    if name == "block_hashes":
        digests = getattr(event, "block_digests", None)
        return [_spell_hash(item, signed) for item in value or ()] if digests is None else digests
    if name == "parent_block_hash":
        digest = getattr(event, "parent_block_digest", None)
        return _spell_hash(value, signed) if digest is None else digest
    return value


def _spell_hash(value: Any, signed: bool) -> Any:
    if not isinstance(value, int):
        return value
    value %= _MODULUS
    return value - _MODULUS if signed and value >= _SIGN else value


def _with_unrecognised(spelled: msgspec.Struct, event: Any, dialect: Dialect) -> Any:
    """Map events carry on what was not recognised; array events have no place for it."""
    extra = {name: value for name in _OURS if (value := getattr(event, name, None)) is not None}
    if dialect.events == "array":
        return _lengthened(spelled, extra, dialect) if extra else spelled
    extra |= getattr(event, "unrecognised", None) or {}
    if not extra:
        return spelled
    fields: dict[str, Any] = msgspec.to_builtins(spelled, builtin_types=(bytes,))
    return fields | extra


def _lengthened(spelled: msgspec.Struct, ours: dict[str, Any], dialect: Dialect) -> list[Any]:
    """An array event with a heartbeat behind its longest form. Raises `ValueError` for what has no place there."""
    heartbeat = ours.pop("heartbeat", None)
    if ours:
        raise ValueError(f"{' and '.join(ours)} cannot be told to consumers of {dialect}; choose a dialect with events as maps")
    fields: list[Any] = msgspec.to_builtins(spelled, builtin_types=(bytes,))
    return [*fields, *[None] * (len(ARRAY_REMOVED) - len(fields)), heartbeat]


@cache
def _wire_type(tag: str, dialect: Dialect) -> type[msgspec.Struct]:
    """A struct laid out as the release's own, so that msgspec omits and orders as it does there."""
    names: Sequence[str] = {"BlockStored": dialect.stored, "BlockRemoved": dialect.removed}.get(tag, ())
    fields = [_field(name, dialect) for name in names]
    return msgspec.defstruct(
        f"{tag}_{dialect.name}", fields, tag=tag, array_like=dialect.events == "array", omit_defaults=True, gc=False
    )


def _field(name: str, dialect: Dialect) -> tuple[str, Any] | tuple[str, Any, Any]:
    # Positional structs need defaults only after required fields; a made default is sent, a plain one omitted.
    if name in dialect.optional:
        return (name, Any, None)
    return (name, Any) if name == "block_hashes" else (name, Any, msgspec.field(default_factory=_nil))


def _nil() -> None:
    return None
