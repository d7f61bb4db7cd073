"""Keys and placements of blocks in plain Python, for prompts and for announced blocks."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest as xxh3

from kvevents.events import BlockRemoved, BlockStored, TokenId

MODULUS = 2**64
Worker = tuple[str, int]
Scheme = tuple[int, bool]
"""Block size, and whether blocks are those of EAGLE, which have one token more than they count."""


@dataclass(frozen=True)
class Scope:
    """The namespace and the model of a prompt, without the native module. `mm` has (id, start, length) of multimodal items."""

    model: str | None = None
    lora: str | int | None = None
    salt: str | None = None
    mm: tuple[tuple[str | int | bytes, int, int], ...] = ()


def seed_of(lora: str | int | None, salt: int) -> int:
    """Return the seed of local hashes. `salt` is the result of `salt_term`; 0 without a salt."""
    if isinstance(lora, int):
        return (1337 + (xxh3(struct.pack("<q", lora), 2) if lora >= 0 else 0) + salt) % MODULUS
    return (1337 + (xxh3(lora.encode()) if lora else 0) + salt) % MODULUS


def salt_term(salt: str | None) -> int:
    return xxh3(salt.encode(), 1) if salt else 0


def local_hash(tokens: Sequence[int], seed: int, extras: Iterable[int] = ()) -> int:
    return xxh3(struct.pack(f"<{len(tokens)}I", *tokens) + b"".join(struct.pack("<Q", extra) for extra in sorted(extras)), seed)


def rolling(parent: int | None, local: int) -> int:
    return local if parent is None else xxh3(struct.pack("<QQ", parent, local), 1337)


def item_hash(item: str | int | bytes, offset: int) -> int:
    """Return the hash of a multimodal item in a block that begins `offset` tokens before the item."""
    if isinstance(item, int):
        return item % MODULUS
    digest = isinstance(item, str) and re.fullmatch("[0-9a-fA-F]{64}", item)
    known = int(item[:16], 16) if digest else xxh3(item.encode() if isinstance(item, str) else item)
    return xxh3(struct.pack("<Qq", known, offset))


# --- prompts ----------------------------------------------------------------------------------------------------------------


def prompt_locals(tokens: Sequence[int], scheme: Scheme, scope: Scope) -> list[int]:
    size, eagle = scheme
    seed, found = seed_of(scope.lora, salt_term(scope.salt)), []
    for start in range(0, len(tokens) - size - eagle + 1, size):
        inside = [(item, at - start) for item, at, length in scope.mm if at < start + size and at + length > start]
        found.append(local_hash(tokens[start : start + size + eagle], seed, [item_hash(*pair) for pair in inside]))
    return found


def prompt_keys(tokens: Sequence[int], scheme: Scheme, scope: Scope) -> list[int]:
    keys: list[int] = []
    for local in prompt_locals(tokens, scheme, scope):
        keys.append(rolling(keys[-1] if keys else None, local))
    return keys


# --- events -----------------------------------------------------------------------------------------------------------------


def scheme_of(event: BlockStored) -> Scheme:
    return event.block_size, bool(event.token_ids) and isinstance(event.token_ids[0], tuple)


def has_keys(event: BlockStored) -> bool:
    """Return whether the event has a key for each hash, and a valid block size."""
    return 0 < event.block_size < 2**32 and len(event.block_keys or ()) == len(event.block_hashes)


def event_tokens(event: BlockStored, index: int) -> list[int]:
    size = event.block_size
    block: Sequence[TokenId] = event.token_ids[index * size : (index + 1) * size]
    plain = [token[0] if isinstance(token, tuple) else int(token) for token in block]
    return [*plain, block[-1][1]] if isinstance(block[-1], tuple) else plain


def keyable_blocks(event: BlockStored) -> int:
    """Return how many blocks of the event are before the first token that cannot be keyed."""
    tokens = [token if isinstance(token, tuple) else (token,) for token in event.token_ids]
    good = [all(isinstance(part, int) and 0 <= part < 2**32 for part in token) for token in tokens]
    return [*good, False].index(False) // event.block_size


def event_extras(event: BlockStored, index: int) -> tuple[list[str], list[int]]:
    """Return the bare strings of a block's extra keys, and hashes of all others. At a root the first string is the salt."""
    keys: list[Any] = list(event.extra_keys[index] or ()) if event.extra_keys and index < len(event.extra_keys) else []
    keys = keys[1:] if keys and event.lora_name is not None and keys[0] == event.lora_name else keys
    return [key for key in keys if isinstance(key, str)], [_extra_hash(key) for key in keys if not isinstance(key, str)]


def _extra_hash(key: Any) -> int:
    if type(key) is int:
        return key % MODULUS
    if isinstance(key, list | tuple) and len(key) == 2 and type(key[0]) in (str, int, bytes) and type(key[1]) is int:
        return item_hash(*key)
    return xxh3(key if isinstance(key, bytes) else msgspec.msgpack.encode(key), 3)


def block_key(event: BlockStored, index: int, parent: tuple[int, int] | None) -> tuple[int, int]:
    """Return key and salt of a block of `event`. `parent` is those of its parent; None for the root."""
    bare, extras = event_extras(event, index)
    named = event.cache_salt
    if parent is None and not named and bare:
        named = bare[0]
    bare = bare[1:] if parent is None else bare
    salt = salt_term(named) or (parent[1] if parent is not None else 0)
    seed = seed_of(event.lora_name or event.lora_id, salt)
    local = local_hash(event_tokens(event, index), seed, [*extras, *(xxh3(text.encode(), 3) for text in bare)])
    return rolling(parent[0] if parent is not None else None, local), salt


# --- places ----------------------------------------------------------------------------------------------------------------

GPU, CPU, DISK = ("", "GPU", "HBM", "DEVICE", "NPU", "NPU:0"), ("CPU", "DRAM", "CPU_PINNED", "CPU_TIER1", "HOST"), (
    "CPU_TIER2", "DISK", "SSD", "NVME", "FS", "STORAGE", "EXTERNAL", "REMOTE")  # fmt: skip
DENSE = (None, "full_attention", "mla_attention", "sink_full_attention")
TIERS = dict.fromkeys(GPU, "gpu") | dict.fromkeys(CPU, "cpu") | dict.fromkeys(DISK, "disk")


class Plane(NamedTuple):
    tier: str
    locality: str | None
    ownership: str | None
    group: int

    @property
    def level(self) -> int:
        level = {"gpu": 0, "cpu": 1, "disk": 2}.get(self.tier, 3)
        return max(level, 2) if self.locality == "REMOTE" else level


def tier_of(medium: str | None) -> str:
    return TIERS.get((medium or "").upper(), (medium or "").upper())


def plane_of(event: BlockStored | BlockRemoved) -> Plane:
    return Plane(tier_of(event.medium), event.locality, event.ownership, event.group_idx or 0)
