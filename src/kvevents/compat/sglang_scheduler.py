"""What SGLang's scheduler asks of its event module: which rank publishes, and under which hashes.

Rules of `sglang/srt/disaggregation/kv_events.py`, 0.5.23.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from typing import Final

from kvevents.errors import MissingDependencyError

_NAMESPACE_TAG: Final = b"sglang-kv-event-namespace-v1"
"""Part of every namespaced hash; a router that computes them uses the same bytes."""


def select_kv_publisher_dp_rank(attn_dp_size: int, attn_dp_rank: int, dp_rank: int | None) -> int:
    """The rank that offsets a scheduler's ports: with attention data parallelism its rank there, else its replica's."""
    return attn_dp_rank if attn_dp_size > 1 else dp_rank or 0


def is_kv_publisher_rank(kv_events_config: str | None) -> bool:
    """Whether this scheduler publishes: one per KV cache does, the first of its pipeline, tensor and context ranks.

    Raises `MissingDependencyError` outside an SGLang installation, whose runtime knows the ranks.
    """
    if not kv_events_config:
        return False
    try:
        runtime = import_module("sglang.srt.runtime_context")
    except ImportError as error:
        raise MissingDependencyError("is_kv_publisher_rank() asks SGLang's runtime for its ranks; install sglang") from error
    parallel = runtime.get_parallel()
    return bool(parallel.pp_rank == 0 and parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0)


def kv_event_namespace_seed(*, extra_key: str | None, cache_salt: str | None) -> bytes | None:
    """Seed (32 bytes) of the namespace that an extra key and a cache salt make; None when there is neither.

    Each part goes into a SHA-256 as a presence byte, its length in 8 bytes, little-endian, and its UTF-8.
    """
    if extra_key is None and cache_salt is None:
        return None
    parts = [_NAMESPACE_TAG]
    for text in (extra_key, cache_salt):
        if text is None:
            parts.append(b"\0")
        else:
            encoded = text.encode()
            parts += [b"\1", len(encoded).to_bytes(8, "little"), encoded]
    return hashlib.sha256(b"".join(parts)).digest()


def namespaced_block_hash(block_hash: int, *, namespace_seed: bytes | None) -> int:
    """A signed 64-bit block hash within a namespace: the first 8 bytes, signed, of SHA-256 over the seed and the hash.

    Without a seed the hash itself. Raises OverflowError for a hash that is not a signed 64-bit integer.
    """
    if namespace_seed is None:
        return block_hash
    digest = hashlib.sha256(namespace_seed + block_hash.to_bytes(8, "big", signed=True)).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
