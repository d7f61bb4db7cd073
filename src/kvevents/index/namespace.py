"""What a prompt is looked for within, and the keys of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvevents import _native
from kvevents.events import BlockStored
from kvevents.wire.canonical import encode_canonical


@dataclass(frozen=True, slots=True)
class MultiModal:
    """One image, sound or the like in a prompt: the span of placeholder tokens that stand for it."""

    id: str | int | bytes
    """As the engine sends it in `extra_keys`. A number, of which the lowest 64 bits count, is Dynamo's `mm_hash`: it counts
    wherever in a block the item begins, text and bytes together with that place."""
    start: int
    """Position of its first token in the prompt."""
    length: int
    """How many tokens stand for it."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Blocks of different namespaces never match each other, whatever their tokens."""

    model: str | None = None
    """Only workers that `PrefixIndex.label` gave this model; None for those without one. It is no part of the keys."""
    lora: str | int | None = None
    """Name of the LoRA; its number, of 64 bits with a sign, for engines that tell only that (vLLM before 0.14)."""
    salt: str | None = None
    """Cache salt of the request."""
    mm: Sequence[MultiModal] = ()
    """Multimodal items of the prompt."""


def block_keys(tokens: Any, block_size: int, namespace: Namespace | None = None, *, eagle: bool = False) -> list[int]:
    """Rolling keys of the whole blocks of a prompt, unsigned 64 bits.

    `key[0] = local[0]`, `key[i] = XXH3-64(key[i-1] LE || local[i] LE, seed 1337)`, `local` as in `local_hashes`: the scheme of
    NVIDIA Dynamo (crate dynamo-kv-router 1.6.1) and of SMG, the SGLang gateway (crate kv-index 2.0.0). `tokens` as for
    `PrefixIndex.match`. With `eagle` a block covers one token more than `block_size`, as SGLang's do. `block_size` is from 1
    to 2**32 - 1. Raises `TypeError`, `ValueError` or `OverflowError` for other arguments.
    """
    return _native.hashes(tokens, block_size, namespace, eagle, True)


def chain_hashes(hashes: list[int]) -> list[int]:
    """Rolling keys of blocks of which the hash of each for itself is known, from the root on: `block_keys` without tokens."""
    return _native.chained(hashes)


def lift_tokens(text: bytes, name: str) -> tuple[bytes, memoryview] | None:
    """Take the array of token ids that a JSON object has under `name` out of it, without a Python object for each.

    Returns the text with an empty array in its place, and the token ids as a buffer of unsigned 32-bit numbers. None where
    there is no such array, or anything in it that is no token id: then the text is to be read with care.
    """
    found = _native.lifted(text, name)
    return None if found is None else (found[0], memoryview(found[1]).cast("I"))


class StoredKeys(NamedTuple):
    """Keys of the blocks of one store."""

    keys: list[int]
    """Of all blocks, or of none."""
    salt: int | None
    """What its salt adds to the seed of local hashes; 0 for a root without one, None if that of the block before it counts."""
    unkeyed: str | None
    """Why there are no keys: `other-group`, `no-tokens`, `length-mismatch`, `bad-token` or `parent-unknown`."""


def stored_keys(event: BlockStored, parent: tuple[int, int] | None = None) -> StoredKeys:
    """Keys of the blocks of a store, as an index makes them.

    `parent` is the key of the block before the first one, with what its salt adds to the seed; None if it is unknown, or if
    there is no such block. Raises `TypeError`, `ValueError` or `OverflowError` for an event that is not as declared.
    """
    return StoredKeys(*_native.stored_keys(encode_canonical([event]), parent))


def tier_of(medium: str | None) -> str:
    """The tier of a medium, whatever its case: one of `kvevents.weights.TIERS`, or the medium's name in upper case."""
    return _native.tier_of(medium or "")


def local_hashes(tokens: Any, block_size: int, namespace: Namespace | None = None, *, eagle: bool = False) -> list[int]:
    """Hashes of the whole blocks of a prompt, each for itself: `XXH3-64(u32-LE tokens, seed)`.

    The seed is 1337, plus `XXH3-64(LoRA name)`, plus `XXH3-64(salt, seed 1)`, modulo 2**64. Hashes of multimodal items in a
    block are appended to its tokens, sorted, as u64-LE. Arguments and errors as of `block_keys`.
    """
    return _native.hashes(tokens, block_size, namespace, eagle, False)
