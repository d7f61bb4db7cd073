"""An exact prefix index: which worker holds how much of a prompt, on which tier.

::

    index = PrefixIndex()
    for delivery in subscriber:
        index.apply(delivery)
    best = index.match(token_ids).best

Needs the compiled module `kvevents._native`, which every wheel has; `MissingDependencyError` without it.
"""

try:
    import kvevents._native  # noqa: F401 - asked for here so that its absence is told once, and readably
except ImportError as error:
    from kvevents.errors import MissingDependencyError

    raise MissingDependencyError(
        "kvevents.index needs the compiled module kvevents._native, which is not there or does not fit this Python; install a "
        "wheel of kvevents, or build one with a Rust toolchain: pip install ."
    ) from error

from kvevents._native import Match, WorkerMatch
from kvevents.index.namespace import (
    MultiModal,
    Namespace,
    StoredKeys,
    block_keys,
    chain_hashes,
    lift_tokens,
    local_hashes,
    stored_keys,
    tier_of,
)
from kvevents.index.prefix import MAX_PAYLOAD_EXPANSION, PrefixIndex
from kvevents.index.reports import Applied, Block, IndexLimits, IndexStats, WorkerInfo

__all__ = [
    "MAX_PAYLOAD_EXPANSION",
    "Applied",
    "Block",
    "IndexLimits",
    "IndexStats",
    "Match",
    "MultiModal",
    "Namespace",
    "PrefixIndex",
    "StoredKeys",
    "WorkerInfo",
    "WorkerMatch",
    "block_keys",
    "chain_hashes",
    "lift_tokens",
    "local_hashes",
    "stored_keys",
    "tier_of",
]
