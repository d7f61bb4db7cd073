"""The digest of an engine's own prefix cache; `kvevents.events.Heartbeat.attestation` defines it.

It is a sum with one term for each copy of a block, so it can be kept up to date with what enters and leaves the cache.
"""

from __future__ import annotations

from typing import Final

DIGEST_MASK: Final = 2**64 - 1
_GROUP_FACTOR: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: the multiples of it for small groups differ in many bits."""


def group_term(group: int | None) -> int:
    """Return what the hashes of a KV cache group are combined with; a block without a group is in group 0."""
    return (group or 0) * _GROUP_FACTOR & DIGEST_MASK


def hash_term(block_hash: int | bytes) -> int:
    """Return 64 bits of a block hash as announced: the low ones of an integer, or the last 8 bytes, big-endian."""
    if isinstance(block_hash, int):
        return block_hash & DIGEST_MASK
    return int.from_bytes(block_hash[-8:], "big")


def block_term(block_hash: int | bytes, group: int | None = None) -> int:
    """Return what one copy of a block adds to the digest."""
    return hash_term(block_hash) ^ group_term(group)
