"""An exact prefix index: which worker holds how much of a prompt, on which tier.

::

    index = PrefixIndex()
    for delivery in subscriber:
        index.apply(delivery)
    best = index.match(token_ids).best

Needs the compiled module `kvevents._native`, which every wheel has, and raises `MissingDependencyError` without it.
"""

try:
    import kvevents._native  # noqa: F401 - imported here to raise one readable error if it is missing
except ImportError as error:
    from kvevents.errors import MissingDependencyError

    raise MissingDependencyError(
        "kvevents.index needs the compiled module kvevents._native, which is missing or does not fit this Python: install a "
        "wheel of kvevents, or build one with a Rust toolchain (pip install .)"
    ) from error

from kvevents._native import Match, WorkerMatch
from kvevents.index.data_types import Applied, Block, IndexLimits, IndexStats, WorkerInfo
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
from kvevents.index.prefix_index import MAX_PAYLOAD_EXPANSION, PrefixIndex

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
    "extract_token_array",
    "keys_from_local_hashes",
    "local_hashes",
    "stored_keys",
    "tier_of",
]
