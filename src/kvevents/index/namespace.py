"""Namespaces of prompts, and the keys of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from kvevents.events import BlockStored
from kvevents.wire.encode import encode_events
from kvevents_native import _native


class MultiModal(Struct, frozen=True):
    """One multimodal item of a prompt, such as an image: a span of consecutive placeholder tokens.

    An item that text interrupts has one entry for each span.
    """

    id: str | int | bytes
    """The hash that the engine sends in `extra_keys`; for `mm_keys` (TensorRT-LLM), the item's `uuid`, or its `hash` if it has
    no `uuid`. A number is Dynamo's `mm_hash`; only its lowest 64 bits are used, and the item's position in a block is ignored.
    Text and bytes are used together with the item's position in the block."""
    start: int
    """Position of the item's first placeholder token in the prompt."""
    length: int
    """Number of the item's placeholder tokens."""


class Namespace(Struct, frozen=True):
    """Separates equal tokens: blocks of different namespaces never match each other."""

    model: str | None = None
    """Match only workers with this model (`PrefixIndex.set_model`), or without a model if None. Keys ignore the model."""
    lora: str | int | None = None
    """Name of the LoRA adapter; for engines that send no name (vLLM before 0.14), its number, a signed 64-bit integer."""
    salt: str | None = None
    """Cache salt of the request."""
    mm: Sequence[MultiModal] = ()
    """Multimodal items of the prompt."""


def block_keys(tokens: Any, block_size: int, namespace: Namespace | None = None, *, eagle: bool = False) -> list[int]:
    """Return the rolling keys of the complete blocks of a prompt as unsigned 64-bit integers.

    `key[0] = local[0]`, `key[i] = XXH3-64(key[i-1] LE || local[i] LE, seed 1337)`, `local` as in `local_hashes`: the scheme of
    NVIDIA Dynamo (crate dynamo-kv-router 1.6.1) and of SMG, the SGLang gateway (crate kv-index 2.0.0). `PrefixIndex.match`
    explains `tokens`. If `eagle` is true, a block covers `block_size` + 1 tokens, as in SGLang. `block_size` is at least 1 and
    below 2**32. Raises `TypeError`, `ValueError` or `OverflowError` for invalid arguments.
    """
    return _native.hashes(tokens, block_size, namespace, eagle, True)


def keys_from_local_hashes(hashes: list[int]) -> list[int]:
    """Return the rolling keys of a prompt's blocks, like `block_keys`, from their `local_hashes` instead of tokens."""
    return _native.chained(hashes)


def extract_token_array(text: bytes, name: str) -> tuple[bytes, memoryview] | None:
    """Extract the array of token ids `name` from a JSON object, without a Python object for each token.

    Returns the text with an empty array in place of the token ids, and the token ids as a buffer of unsigned 32-bit integers.
    Returns None if the array is missing or contains a value that is not a token id; a JSON decoder must then read the text.
    """
    parts = _native.lifted(text, name)
    return None if parts is None else (parts[0], memoryview(parts[1]).cast("I"))


class StoredKeys(NamedTuple):
    """The keys of the blocks of one store."""

    keys: list[int]
    """Keys of the store's blocks before the first block without a key."""
    salt: int | None
    """What the salt adds to the seed of local hashes: 0 for a root without a salt, None if the parent's value applies."""
    unkeyed: str | None
    """Why the remaining blocks have no keys: `other-group`, `no-tokens`, `length-mismatch`, `bad-token` or `parent-unknown`."""


def stored_keys(event: BlockStored, parent: tuple[int, int] | None = None) -> StoredKeys:
    """Return the keys of the blocks of a store, as an index computes them.

    `parent` is the key of the first block's parent, and what the salt adds to the seed (`StoredKeys.salt`). `parent` is None if
    the parent is unknown, or the first block has no parent. Raises `TypeError`, `ValueError` or `OverflowError` for an event
    whose fields do not have the declared types.
    """
    return StoredKeys(*_native.stored_keys(encode_events([event]), parent))


def tier_of(medium: str | None) -> str:
    """Return a medium's tier: one of `kvevents.events.TIERS`, or an unknown name in upper case. Case is ignored."""
    return _native.tier_of(medium or "")


def local_hashes(tokens: Any, block_size: int, namespace: Namespace | None = None, *, eagle: bool = False) -> list[int]:
    """Return, for each complete block of a prompt, a hash that depends only on this block: `XXH3-64(u32-LE tokens, seed)`.

    The seed is 1337, plus `XXH3-64(LoRA name)`, plus `XXH3-64(salt, seed 1)`, modulo 2**64. Hashes of multimodal items in a
    block are appended to its tokens, sorted, as u64-LE. The arguments and errors are those of `block_keys`.
    """
    return _native.hashes(tokens, block_size, namespace, eagle, False)
