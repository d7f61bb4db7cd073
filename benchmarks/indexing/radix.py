"""Events of Dynamo's `RadixTree`, which takes them as JSON with the tokens hashed beforehand. Runs in its interpreter."""

from __future__ import annotations

import json

from dynamo.llm import compute_block_hash_for_seq  # type: ignore[import-not-found]

from benchmarks.indexing.workload import Event, Removal


def in_json(event: Event) -> bytes:
    """What `RadixTree.apply_event` takes for an event."""
    data: object
    if isinstance(event, Removal):
        data = {"removed": {"block_hashes": event.hashes}}
    else:
        keys = compute_block_hash_for_seq(event.tokens, event.block_size)
        blocks = [{"block_hash": name, "tokens_hash": key} for name, key in zip(event.hashes, keys, strict=True)]
        data = {"stored": {"parent_hash": event.parent, "blocks": blocks}}
    return json.dumps({"event_id": 0, "data": data, "dp_rank": 0}).encode()
