"""Keys of announced blocks: equal wherever tokens, prefix, LoRA, salt and multimodal items are, whatever engine hashed them.

They are those of `kvevents.index.block_keys`. What is not keyed has a reason, one of `UNKEYED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kvevents.events import BlockStored, TokenId
from kvevents.index import MultiModal, Namespace, chain_hashes, local_hashes

DENSE: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of KV cache groups whose events carry the tokens of each hash (vLLM `v1/kv_cache_interface.py`, 0.22 on)."""

UNKEYED: Final = {
    "other-group": "of a group that skips blocks, such as a sliding window, and of no hash that is resident with a key",
    "no-tokens": "announced without tokens, and of no hash that is resident with a key",
    "length-mismatch": "hashes and tokens do not fit each other",
    "bad-token": "a token id that is none",
    "extra-key": "an extra key that no prompt can show, such as the digest of a prompt embedding",
    "parent-unknown": "the block before it is not resident, as far as the recording tells",
    "parent-unkeyed": "the block before it has no key",
}
"""Why a block has no key."""


class Before(NamedTuple):
    """What a store continues."""

    key: int | None
    depth: int | None
    """Blocks from the root; None where nobody knows."""
    salt: str | None


ROOT: Final = Before(None, 0, None)
UNKNOWN: Final = Before(None, None, None)


class Keyed(NamedTuple):
    """Keys of the blocks of one event: of all, or of the first ones only, and why of no more."""

    keys: list[int]
    salt: str | None
    unkeyed: str | None


def keys_of(event: BlockStored, before: Before) -> Keyed:
    """Keys of the blocks of a store that continues `before`."""
    salt = _salt(event, before)
    reason = _why_not(event) or _why_not_after(before)
    if reason is not None:
        return Keyed([], salt, reason)
    try:
        hashes, reason = _local(event, before, salt)
    except (TypeError, ValueError, OverflowError):
        return Keyed([], salt, "bad-token")
    keys = chain_hashes(hashes) if before.key is None else chain_hashes([before.key, *hashes])[1:]
    return Keyed(keys, salt, reason)


def _why_not(event: BlockStored) -> str | None:
    if event.kv_cache_spec_kind not in DENSE:
        return "other-group"
    if not event.token_ids:
        return "no-tokens"
    if event.block_size <= 0 or len(event.token_ids) != len(event.block_hashes) * event.block_size:
        return "length-mismatch"
    return "extra-key" if (event.unrecognised or {}).get("mm_keys") else None


def _why_not_after(before: Before) -> str | None:
    if before.key is not None or before is ROOT:
        return None
    return "parent-unknown" if before.depth is None else "parent-unkeyed"


def _salt(event: BlockStored, before: Before) -> str | None:
    """SGLang's is a field; vLLM's the first bare string of the root's extra keys, the LoRA's name aside."""
    if event.cache_salt is not None:
        return event.cache_salt
    if before is ROOT:
        return next((key for key in _extra_keys(event, 0) if isinstance(key, str)), None)
    return before.salt


def _extra_keys(event: BlockStored, index: int) -> Sequence[Any]:
    given = event.extra_keys
    keys = (given[index] if given and index < len(given) else None) or ()
    return keys[1:] if keys and event.lora_name is not None and keys[0] == event.lora_name else keys


def _local(event: BlockStored, before: Before, salt: str | None) -> tuple[list[int], str | None]:
    """Hashes of blocks each for itself, up to the first with an extra key that has no place in a key, and then why."""
    lora = event.lora_id if event.lora_name is None else event.lora_name
    size, tokens = event.block_size, event.token_ids
    eagle = isinstance(tokens[0], tuple | list)
    if not event.extra_keys:
        return local_hashes(_plain(tokens), size, Namespace(lora=lora, salt=salt), eagle=eagle), None
    found: list[int] = []
    for index in range(len(event.block_hashes)):
        items = _items(event, index, before)
        if items is None:
            return found, "extra-key"
        block = _plain(tokens[index * size : (index + 1) * size])
        found += local_hashes(block, size, Namespace(lora=lora, salt=salt, mm=items), eagle=eagle)
    return found, None


def _plain(tokens: Sequence[TokenId]) -> list[int]:
    """Token ids of pairs `(token, next token)`: the first of each, and what follows the last."""
    last = tokens[-1]
    if isinstance(last, int):
        return tokens  # type: ignore[return-value]  # a mixture is refused by whoever hashes them
    return [*(token if isinstance(token, int) else token[0] for token in tokens), last[1]]


def _items(event: BlockStored, index: int, before: Before) -> list[MultiModal] | None:
    """Multimodal items of one block; None where there is an extra key that is none, and no salt in its place."""
    keys = list(_extra_keys(event, index))
    if index == 0 and before is ROOT:
        salt = next((key for key in keys if isinstance(key, str)), None)
        if salt is not None:
            keys.remove(salt)
    items = [_item(key, event.block_size) for key in keys]
    return None if None in items else [item for item in items if item is not None]


def _item(key: Any, size: int) -> MultiModal | None:
    if type(key) is int:
        return MultiModal(key, 0, size)
    pair = isinstance(key, list | tuple) and len(key) == 2 and type(key[0]) in {str, int, bytes} and type(key[1]) is int
    return MultiModal(key[0], key[1], size - key[1]) if pair and key[1] < size else None
