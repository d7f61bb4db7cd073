"""The index stores no blocks that an event lists as skipped (vllm#44488), and gives no credit for them or because of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from index_cases import scanned
from kvevents.events import BlockStored, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.stream import RawBatch
from kvevents.wire import encode_batch

WORKER = ("engine", 0)
TOKENS = list(range(12))
FULL: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}


def payload(*events: BlockStored) -> bytes:
    return encode_batch(KVEventBatch(1.0, list(events)))


@pytest.mark.parametrize("raw", [True, False])
def test_a_block_after_skipped_ones_gives_no_credit_until_its_parent_is_stored(raw: bool) -> None:
    """The engine holds block 2 of three, and none before it: no request of the prompt finds anything."""
    index = PrefixIndex()

    def send(seq: int, *events: BlockStored) -> None:
        batch = RawBatch(*WORKER, 0, seq, False, payload(*events))
        report = index.apply(batch if raw else batch.decode())
        assert report.status == "applied"
        assert not report.report or not report.report.rejected

    def matched() -> int:
        found = index.match(TOKENS).get(*WORKER)
        return 0 if found is None else found.tokens

    send(
        0,
        BlockStored([3], 2, TOKENS[8:], 4, medium="GPU", skipped_token_ids=TOKENS[:8], skipped_extra_keys=[None, None], **FULL),
    )
    assert matched() == 0
    assert index.worker(WORKER).blocks == 0
    send(1, BlockStored([1], None, TOKENS[:4], 4, medium="GPU", **FULL))
    assert matched() == 4
    send(2, BlockStored([2], 1, TOKENS[4:8], 4, medium="GPU", **FULL))
    assert matched() == 12


def test_the_native_scanner_reads_skipped_blocks() -> None:
    """A payload with skipped blocks needs no Python decoder, so it is applied as fast as any other."""
    one = BlockStored([3], 2, TOKENS[8:], 4, skipped_parent_block_hash=1, skipped_token_ids=TOKENS[4:8])
    two = msgspec.structs.replace(one, skipped_parent_block_hash=None, skipped_extra_keys=[("salt",)])
    assert scanned(payload(one, two)) is not None
    assert scanned(payload(one, msgspec.structs.replace(two, skipped_token_ids=["5"]))) is None
