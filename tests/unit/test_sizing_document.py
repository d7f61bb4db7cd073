"""docs/operations/sizing.md has the bytes of batches, pages, blocks and snapshots that this code has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import paths
from kvevents.events import BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.stream import RawBatch
from kvevents.wire import dialect_for, encode_batch
from kvevents_plane.records import VERSION, BatchRecord, Page, encode_page

DOCUMENT: Final = (paths.ROOT / "docs" / "operations" / "sizing.md").read_text(encoding="utf-8")
STORED: Final = 10
CHAIN: Final = 500
"""Blocks of a prompt."""
BLOCKS: Final = 50_000
"""Blocks that the engine's cache holds before its batches remove as many as they store."""
SPREAD: Final = 0x9E3779B97F4A7C15


def hash_of(block: int) -> int:
    """Return a hash that needs 64 bits."""
    return (block + 1) * SPREAD % 2**64


def payloads(first: int, count: int, *, with_removals: bool) -> Iterator[bytes]:
    """Yield batches that store blocks from `first` on, chain by chain, and remove those of `BLOCKS` before."""
    for block in range(first, first + count * STORED, STORED):
        stored = [hash_of(block + place) for place in range(STORED)]
        tokens = [(hash_ + place) % 60_000 for hash_ in stored for place in range(16)]
        parent = hash_of(block - 1) if block % CHAIN else None
        events: list[KVEvent] = [BlockStored(stored, parent, tokens, 16, medium="GPU", group_idx=0)]
        if with_removals:
            events = [BlockRemoved([hash_of(block + place - BLOCKS)], "GPU", 0) for place in range(STORED)] + events
        yield encode_batch(KVEventBatch(float(block), events), dialect_for("vllm"))


def test_sizes_in_the_document_are_those_of_the_code(tmp_path: Path) -> None:
    index = PrefixIndex()
    for seq, payload in enumerate(payloads(0, BLOCKS // STORED, with_removals=False)):
        index.apply(RawBatch("engine", 0, 0, seq, False, payload))
    index.snapshot(tmp_path / "index")
    stats = index.stats()
    batches = list(payloads(BLOCKS, 250, with_removals=True))
    records = [BatchRecord("engine-00000", 0, 0, seq, False, payload) for seq, payload in enumerate(batches)]
    page = encode_page(Page(VERSION, "sizing", [*records], "made"))
    measured = {
        "a batch of 10 blocks stored and 10 removed": sum(map(len, batches)) / len(batches),
        "a block in the index": stats.bytes / stats.blocks,
        "a block in a snapshot": (tmp_path / "index").stat().st_size / stats.blocks,
    }
    for name, value in measured.items():
        (cell,) = re.findall(rf"^\| {name} \| ([^|]*) \|", DOCUMENT, re.MULTILINE)
        number, unit = cell.partition(";")[0].split()
        assert value == pytest.approx(float(number) * {"B": 1, "kB": 1000}[unit], rel=0.05), name
    assert f"{len(page) / len(batches) / 1000:.2f} kB in a partition" in DOCUMENT
