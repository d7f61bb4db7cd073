"""The prefix index on a recorded run of the radix tree of SGLang 0.5.23, whose result is known for every request."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from typing import Any

from kvevents.events import ATTESTATION_MASK, attestation_term
from kvevents.index import Namespace, PrefixIndex
from paths import DATA

WORKER = ("sglang", 0)


def read_steps() -> Iterator[dict[str, Any]]:
    """Yield batches with the digest that the plugin attested after them, and prompts with the tokens that the tree found."""
    for line in gzip.decompress((DATA / "sglang-0.5.23-radix.jsonl.gz").read_bytes()).splitlines():
        yield json.loads(line)


def test_the_index_finds_the_same_prefixes_as_the_radix_tree_of_sglang() -> None:
    index, seq, hits = PrefixIndex(), 0, 0
    for step in read_steps():
        if "payload" in step:
            assert index.apply_payload(WORKER, 0, seq, base64.b64decode(step["payload"])).status == "applied"
            seq += 1
            continue
        found = index.match(step["prompt"], Namespace(lora=step["lora"], salt=step["salt"])).get(*WORKER)
        assert (0 if found is None else found.tokens) == step["cached"]
        hits += step["cached"] > 0
    assert hits == 24


def test_the_attestation_of_the_plugin_equals_that_of_the_blocks_in_the_index() -> None:
    """The plugin adds and subtracts sums of whole events; here the attestation is computed from the blocks that are left."""
    index, seq = PrefixIndex(), 0
    for step in read_steps():
        if "payload" in step:
            index.apply_payload(WORKER, 0, seq, base64.b64decode(step["payload"]))
            seq += 1
            held = sum(
                attestation_term(each.hash, each.group) * each.copies for each in index.blocks(WORKER) if each.tier == "gpu"
            )
            assert held & ATTESTATION_MASK == step["attestation"]
    assert seq == 110
