"""The index compares an attestation, the digest of the engine's own cache, with what the stream has announced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.stream import RawBatch
from kvevents.wire import encode_batch

WORKER = ("engine", 0)
_GROUP = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1
VECTORS = Path(__file__).parents[1] / "data" / "attestation.json"


def attestation(copies: list[tuple[int, int]]) -> int:
    """Return `Heartbeat.attestation` for copies of blocks, each given by hash and group."""
    return sum(hash_ ^ (group * _GROUP & _MASK) for hash_, group in copies) & _MASK


class Consumer:
    """An index that applies the batches of one stream."""

    def __init__(self, *, raw: bool = True) -> None:
        self.index = PrefixIndex()
        self.raw = raw
        self.seq = -1

    def send(self, *events: KVEvent) -> Any:
        self.seq += 1
        payload = encode_batch(KVEventBatch(1.0, list(events)))
        batch = RawBatch(*WORKER, 0, self.seq, False, payload)
        return self.index.apply(batch if self.raw else batch.decode()).report

    def attest(self, copies: list[tuple[int, int]]) -> bool | None:
        """Send an attestation of these copies and return the result of the index."""
        heartbeat = Heartbeat("f" * 32, 5.0, attestation=attestation(copies))
        report = self.send(BlockRemoved([], heartbeat=heartbeat))
        assert report.heartbeat == heartbeat
        found: bool | None = report.attestation_matches
        assert self.index.worker(WORKER).attested is found
        return found


def stored(hashes: list[int], parent: int | None = None, medium: str | None = "GPU", **fields: Any) -> BlockStored:
    """Return a store of blocks of four tokens. Different hashes have different tokens."""
    tokens = [hash_ % (1 << 31) for hash_ in hashes for _ in range(4)]
    return BlockStored(hashes, parent, tokens, 4, medium=medium, **fields)


@pytest.mark.parametrize("raw", [True, False])
def test_only_copies_on_the_gpu_count(raw: bool) -> None:
    """Two copies count twice, a block in host memory not at all."""
    consumer = Consumer(raw=raw)
    assert consumer.index.stats().workers == 0
    assert consumer.attest([]) is True
    consumer.send(stored([1, 2, 3]), stored([1, 2]), stored([7], medium="CPU"), stored([1, 2], medium=None))
    assert consumer.attest([(1, 0), (2, 0), (3, 0)]) is False
    assert consumer.attest([(1, 0), (1, 0), (1, 0), (2, 0), (2, 0), (2, 0), (3, 0)]) is True
    consumer.send(BlockRemoved([1, 3], "GPU"), BlockRemoved([7], "CPU"))
    assert consumer.attest([(1, 0), (1, 0), (2, 0), (2, 0), (2, 0)]) is True
    consumer.send(AllBlocksCleared())
    assert consumer.attest([]) is True


def test_orphans_and_blocks_that_the_index_does_not_store_count() -> None:
    """Orphans, blocks of windows without their dense block, and groups of unknown kinds are in the engine's cache too."""
    consumer = Consumer()
    consumer.send(
        stored([10], parent=9),
        stored([20], group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=8),
        stored([30, 31], group_idx=2, kv_cache_spec_kind="a-kind-of-tomorrow"),
    )
    assert consumer.attest([(10, 0), (20, 1), (30, 2), (31, 2)]) is True
    consumer.send(BlockRemoved([30], "GPU", 2), BlockRemoved([20], "GPU", 1))
    assert consumer.attest([(10, 0), (31, 2)]) is True


def test_a_new_incarnation_is_not_attested() -> None:
    consumer = Consumer()
    consumer.send(stored([1]))
    assert consumer.attest([(1, 0)]) is True
    consumer.index.apply(RawBatch(*WORKER, 1, 0, False, encode_batch(KVEventBatch(1.0, [stored([2])]))))
    assert consumer.index.worker(WORKER).attested is None


def test_an_index_that_has_evicted_blocks_reports_no_attestation_result() -> None:
    """The index lacks blocks for a known reason, so a different digest proves nothing."""
    consumer = Consumer()
    consumer.index = PrefixIndex(memory_limit=1)
    consumer.send(stored([1, 2, 3]))
    assert consumer.attest([(1, 0), (2, 0), (3, 0)]) is None


HASHES = st.integers(0, 5)
PLACES = st.sampled_from([("GPU", 0), ("GPU", 1), ("CPU", 0)])
EVENTS: st.SearchStrategy[tuple[str, list[int], tuple[str, int]]] = st.one_of(
    st.tuples(st.just("store"), st.lists(HASHES, min_size=1, max_size=3, unique=True), PLACES),
    st.tuples(st.just("remove"), st.lists(HASHES, min_size=1, max_size=3, unique=True), PLACES),
    st.tuples(st.just("clear"), st.just([]), st.just(("GPU", 0))),
)


@given(st.lists(EVENTS, max_size=30))
def test_the_attested_copies_agree_with_a_list_of_copies(events: list[tuple[str, list[int], tuple[str, int]]]) -> None:
    """Only copies that exist are removed."""
    consumer, copies = Consumer(), list[tuple[int, str, int]]()
    for kind, hashes, (medium, group) in events:
        if kind == "clear":
            copies.clear()
            consumer.send(AllBlocksCleared())
        for hash_ in hashes if kind == "store" else []:
            copies.append((hash_, medium, group))
            consumer.send(stored([hash_], medium=medium, group_idx=group))
        for hash_ in hashes if kind == "remove" else []:
            if (hash_, medium, group) in copies:
                copies.remove((hash_, medium, group))
                consumer.send(BlockRemoved([hash_], medium, group))
    assert consumer.attest([(hash_, group) for hash_, medium, group in copies if medium == "GPU"]) is True


def test_the_digests_of_the_shared_test_vectors_match() -> None:
    """Hashes are integers, negative ones included, or bytes in hexadecimal digits; a group can be missing.

    The first attestation, of an empty cache, shows that stores without a group are copies.
    """
    if not VECTORS.exists():
        pytest.skip("tests/data/attestation.json is not there")
    for vector in json.loads(VECTORS.read_text()):
        consumer = Consumer()
        consumer.send(BlockRemoved([], heartbeat=Heartbeat("f" * 32, 5.0, attestation=0)))
        for hash_, group in vector["blocks"]:
            number = int.from_bytes(bytes.fromhex(hash_)[-8:]) if isinstance(hash_, str) else hash_ & _MASK
            consumer.send(stored([number], group_idx=group))
        heartbeat = Heartbeat("f" * 32, 5.0, attestation=vector["digest"])
        assert consumer.send(BlockRemoved([], heartbeat=heartbeat)).attestation_matches is True, vector
