"""Encodes events in the one form that the native decoder reads: that of the newest vLLM.

Events that only the tolerant decoder could read reach the native index this way.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, Final

import msgspec

from kvevents.events import AllBlocksCleared, BlockInactive, BlockRemoved, BlockStored, KVEvent

_encode: Final = msgspec.msgpack.Encoder().encode
_I64: Final = 1 << 63


def encode_canonical(events: Iterable[KVEvent]) -> bytes:
    """Encode events as a payload of the newest form. Every event that `decode_batch` returns has one.

    Raise `TypeError`, `ValueError` or `OverflowError` for events that are not as `kvevents.events` declares them.
    """
    return _encode((0.0, [_canonical_event(event) for event in events]))


def scope_of(event: AllBlocksCleared) -> dict[str, Any]:
    """Return the `medium` and `group_idx` of a clear that is limited to them; empty if it clears everything.

    No engine declares these fields for clears, so they are decoded as unknown fields. Invalid values are ignored: to clear too
    much never makes the index report blocks that a worker does not hold.
    """
    fields = event.unknown_fields or {}
    medium, group = fields.get("medium"), fields.get("group_idx")
    scope: dict[str, Any] = {"medium": medium} if isinstance(medium, str) else {}
    return scope | ({"group_idx": _signed(group)} if type(group) is int else {})


def _canonical_event(event: KVEvent) -> Any:
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"} | scope_of(event)
    changes: dict[str, Any] = {"group_idx": _signed(event.group_idx), "block_digests": None, "unknown_fields": None}
    if isinstance(event, BlockRemoved):
        changes |= _normalized_removal_fields(event)
    elif not isinstance(event, BlockInactive):
        changes |= _normalized_store_fields(event)
    return msgspec.structs.replace(event, **changes)


def _normalized_removal_fields(event: BlockRemoved) -> dict[str, Any]:
    counts = event.remaining_copy_counts
    return {"heartbeat": None, "remaining_copy_counts": None if counts and min(counts) < 0 else counts}


def _normalized_store_fields(event: BlockStored) -> dict[str, Any]:
    window = event.kv_cache_spec_sliding_window
    return {
        "token_ids": _tokens(event),
        "block_size": max(event.block_size, 0),
        "lora_id": _signed(event.lora_id),
        "extra_keys": _extra_keys(event),
        "kv_cache_spec_sliding_window": None if window is None else min(window, _I64 - 1),
        "parent_block_digest": None,
        "skipped_parent_block_hash": None,
        "skipped_token_ids": None,
        "skipped_extra_keys": None,
        "session_id": None,
    }


def _signed(value: int | None) -> int | None:
    """Return the signed integer with the same 64 bits."""
    return None if value is None else (value + _I64) % (2 * _I64) - _I64


def _tokens(event: BlockStored) -> Any:
    """Return the tokens unchanged. Tokens mixed with pairs form no block, so each of them is replaced by an invalid token."""
    is_mixed = len({isinstance(token, int) for token in event.token_ids}) > 1
    return [-1] * len(event.token_ids) if is_mixed else event.token_ids


# --- extra keys -------------------------------------------------------------------------------------------------------------


def _extra_keys(event: BlockStored) -> list[Any] | None:
    if not event.token_ids:
        return None  # no block key is computed without tokens
    given = (event.extra_keys or ())[: len(event.block_hashes)]  # further entries belong to no block
    keys: list[Any] = [None if block is None else [_extra(key) for key in block] for block in given]
    items = (event.unknown_fields or {}).get("mm_keys")
    if items:
        more = _multimodal_keys(items, len(event.block_hashes))
        keys = [(*(block or ()), *added) for block, added in zip_longest(keys, more, fillvalue=())]
    return keys or None


def _extra(key: Any) -> Any:
    """Return a key that the index can match, unchanged. Return any other as bytes that no prompt has, so it never matches."""
    is_pair = isinstance(key, list | tuple) and len(key) == 2
    is_known_pair = is_pair and type(key[0]) in _SCALARS and type(key[1]) is int and -_I64 <= key[1] < _I64
    return key if is_known_pair or type(key) in _SCALARS else _encode(key)


_SCALARS: Final = (str, int, bytes)

_MARKER_BYTES: Final = 16
"""Size of the key that prevents a block from being matched. It is short because it is written once per block."""


def _multimodal_keys(given: Any, blocks: int) -> list[list[Any]]:
    """Return TensorRT-LLM's `mm_keys` as extra keys per block.

    They are one list per block, with items `{"hash", "start_offset"}` or pairs of the two. With a single block, the outer list
    may be missing. If they have any other form, each block gets a key that no prompt has, so that it is never matched.
    """
    if isinstance(given, list) and len(given) == blocks and all(block is None or isinstance(block, list) for block in given):
        return [[_extra(_multimodal_pair(item)) for item in block or ()] for block in given]
    if isinstance(given, list) and blocks == 1:
        return [[_extra(_multimodal_pair(item)) for item in given]]
    return [[_encode(given)[:_MARKER_BYTES]]] * blocks


def _multimodal_pair(item: Any) -> Any:
    return (item.get("hash"), item.get("start_offset")) if isinstance(item, dict) and "hash" in item else item
