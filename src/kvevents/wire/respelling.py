"""Events as the native decoder reads them: what only Python can read, in the spelling of the newest engine."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, Final

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

_encode: Final = msgspec.msgpack.Encoder().encode
_I64: Final = 1 << 63


def respelled(events: Iterable[KVEvent]) -> bytes:
    """Events as a payload of the newest form. Whatever `decode_batch` makes of a peer's bytes has one.

    Raises `TypeError`, `ValueError` or `OverflowError` for events that are not as `kvevents.events` declares them.
    """
    return _encode((0.0, [_plain(event) for event in events]))


def scope_of(event: AllBlocksCleared) -> dict[str, Any]:
    """The tier and the group that a clear is meant for, by the names of other events; empty where it is of everything.

    No engine's struct has these fields, so they are read as unrecognised. One that makes no sense says nothing: forgetting too
    much never gives false credit.
    """
    fields = event.unrecognised or {}
    medium, group = fields.get("medium"), fields.get("group_idx")
    scope: dict[str, Any] = {"medium": medium} if isinstance(medium, str) else {}
    return scope | ({"group_idx": _signed(group)} if type(group) is int else {})


def _plain(event: KVEvent) -> Any:
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"} | scope_of(event)
    changes: dict[str, Any] = {"group_idx": _signed(event.group_idx), "block_digests": None, "unrecognised": None}
    others = {"heartbeat": None} if isinstance(event, BlockRemoved) else _stored(event)
    return msgspec.structs.replace(event, **changes, **others)


def _stored(event: BlockStored) -> dict[str, Any]:
    window = event.kv_cache_spec_sliding_window
    return {
        "token_ids": _tokens(event),
        "block_size": max(event.block_size, 0),
        "lora_id": _signed(event.lora_id),
        "extra_keys": _extra_keys(event),
        "kv_cache_spec_sliding_window": None if window is None else min(window, _I64 - 1),
        "parent_block_digest": None,
        "lookahead_token_ids": None,
        "session_id": None,
    }


def _signed(value: int | None) -> int | None:
    """A number of which 64 bits count: one of 2**63 and more is one below zero."""
    return None if value is None else (value + _I64) % (2 * _I64) - _I64


def _tokens(event: BlockStored) -> Any:
    """As they are; of tokens and pairs of tokens mixed, which are of no block, as many that are none."""
    mixed = len({isinstance(token, int) for token in event.token_ids}) > 1
    return [-1] * len(event.token_ids) if mixed else event.token_ids


# --- extra keys -------------------------------------------------------------------------------------------------------------


def _extra_keys(event: BlockStored) -> list[Any] | None:
    if not event.token_ids:
        return None  # no key is made
    given = (event.extra_keys or ())[: len(event.block_hashes)]  # what lies behind is of no block
    keys: list[Any] = [None if block is None else [_extra(key) for key in block] for block in given]
    items = (event.unrecognised or {}).get("mm_keys")
    if items:
        more = _items(items, len(event.block_hashes))
        keys = [(*(block or ()), *found) for block, found in zip_longest(keys, more, fillvalue=())]
    return keys or None


def _extra(key: Any) -> Any:
    """A key that the index knows; any other as bytes, which no prompt shows: its block is like no other and never credited."""
    pair = isinstance(key, list | tuple) and len(key) == 2
    known = (pair and type(key[0]) in _PLAIN and type(key[1]) is int and -_I64 <= key[1] < _I64) or type(key) in _PLAIN
    return key if known else _encode(key)


_PLAIN: Final = (str, int, bytes)


_MARK: Final = 16
"""Bytes of what marks a block."""


def _items(given: Any, blocks: int) -> list[list[Any]]:
    """TensorRT-LLM's `mm_keys` as extra keys: per block a list of `{"hash", "start_offset"}`, or of pairs of the two.

    A list that is not one per block is of the only block. Anything else marks every block, so that none of them is credited;
    by its beginning, since it is written once for each.
    """
    if isinstance(given, list) and len(given) == blocks and all(block is None or isinstance(block, list) for block in given):
        return [[_extra(_item(item)) for item in block or ()] for block in given]
    if isinstance(given, list) and blocks == 1:
        return [[_extra(_item(item)) for item in given]]
    return [[_encode(given)[:_MARK]]] * blocks


def _item(item: Any) -> Any:
    return (item.get("hash"), item.get("start_offset")) if isinstance(item, dict) and "hash" in item else item
