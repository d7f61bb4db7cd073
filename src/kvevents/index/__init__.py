"""An exact prefix index: which worker holds how much of a prompt, on which tier.

::

    index = PrefixIndex()
    for delivery in subscriber:
        index.apply(delivery)
    best = index.match(token_ids).best

Needs the package `kvevents-native`, which the extra `native` installs, and raises `MissingDependencyError` without it.
"""

from kvevents.native_module import require_native

require_native("kvevents.index")

from kvevents.index.namespace import (
    MultiModal,
    Namespace,
    StoredKeys,
    block_keys,
    extract_token_array,
    keys_from_local_hashes,
    local_hashes,
    stored_keys,
    tier_of,
)
from kvevents.index.prefix_index import (
    MAX_PAYLOAD_EXPANSION,
    ApplyResult,
    Block,
    IndexLimits,
    IndexStats,
    PrefixIndex,
    WorkerInfo,
)
from kvevents_native._native import Match, WorkerMatch

__all__ = [
    "MAX_PAYLOAD_EXPANSION",
    "ApplyResult",
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
    "extract_token_array",
    "keys_from_local_hashes",
    "local_hashes",
    "stored_keys",
    "tier_of",
]
