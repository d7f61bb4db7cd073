"""A stream whose payloads state several ranks: an index and a history keep the ranks apart, for early and late consumers."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import compress
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import ApplyResult, IndexLimits, PrefixIndex
from kvevents.publisher.compaction import MAX_RANKS, Compactor, encode_snapshot
from kvevents.stream import Gap, RawBatch, Reset, Source
from kvevents.subscriber import Subscriber
from kvevents.testing import FakeTransport, VirtualClock
from kvevents.wire import decode_batch, encode_batch

SIZE = 2
Held = dict[int, Counter[tuple[int, int, str]]]


def block(number: int, seed: int = 0, **fields: Any) -> BlockStored:
    tokens = [seed * 1_000 + number * SIZE + at for at in range(SIZE)]
    return BlockStored([number], None, tokens, SIZE, **{"medium": "GPU", "group_idx": 0, **fields})


def batch_of(rank: int | None, *events: KVEvent) -> bytes:
    return encode_batch(KVEventBatch(1.0, list(events), rank))


class Consumer:
    """An index with the stream `pod`, which is registered under `rank`."""

    def __init__(self, rank: int = 0, **limits: int) -> None:
        self.index = PrefixIndex(limits=IndexLimits(**limits))
        self.rank, self.incarnation, self.seq = rank, 0, 0

    def __call__(self, *payloads: bytes) -> ApplyResult:
        """Apply batches; return the result of the last one."""
        *_, last = [ApplyResult("void"), *(self.index.apply(self.batch(payload)) for payload in payloads)]
        return last

    def batch(self, payload: bytes) -> RawBatch:
        self.seq += 1
        return RawBatch("pod", self.rank, self.incarnation, self.seq - 1, False, payload)

    @property
    def ranks(self) -> list[int]:
        return [info.rank for info in self.index.workers()]

    def held(self, rank: int) -> set[int]:
        return {each.hash for each in self.index.blocks(("pod", rank))}

    @property
    def copies(self) -> Held:
        """The copies of each rank with blocks, by hash, key and tier."""
        found = {
            rank: Counter({(each.hash, each.key, each.tier): each.copies for each in self.index.blocks(("pod", rank))})
            for rank in self.ranks
        }
        return {rank: copies for rank, copies in found.items() if copies}


def history(seed: int, ranks: Sequence[int], count: int) -> Iterator[bytes]:
    """Yield batches of several ranks, with equal hashes of different tokens, and some that concern all ranks."""
    random, held = Random(seed), {rank: Counter[tuple[int, str]]() for rank in ranks}
    for _ in range(count):
        rank = random.choice(ranks)
        own, what = held[rank], random.random()
        medium = random.choice(["GPU", "CPU"])
        if what < 0.6 or not own:
            numbers = [random.randrange(12) for _ in range(random.randrange(1, 4))]
            own.update((number, medium) for number in numbers)
            yield batch_of(rank, *(block(number, rank, medium=medium) for number in numbers))
        elif what < 0.9:
            number, medium = random.choice(list(own))
            own[number, medium] -= 1
            own += Counter()
            yield batch_of(rank, BlockRemoved([number], medium, group_idx=0))
        elif what < 0.95:
            held[rank].clear()
            yield batch_of(rank, AllBlocksCleared(), AllBlocksCleared({"medium": "CPU"}))
        else:
            for each in held.values():
                each.clear()
            yield batch_of(None, AllBlocksCleared(), AllBlocksCleared({"medium": "CPU"}))


def apart(payloads: Sequence[bytes], ranks: Sequence[int]) -> Held:
    """Return what each rank holds if it has a stream of its own."""
    found: Held = {}
    for rank in ranks:
        alone = Consumer()
        concerns = [decode_batch(payload).batch.data_parallel_rank in {None, rank} for payload in payloads]
        alone(batch_of(None), *compress(payloads, concerns))
        if alone.copies:
            found[rank] = alone.copies[0]
    return found


@given(st.integers(0, 2**16), st.integers(0, 60), st.sampled_from([(0, 1), (1, 0), (3, 7), (2, 0, 5)]), st.sampled_from([0, 1]))
def test_each_rank_holds_what_it_would_in_a_stream_of_its_own(seed: int, count: int, ranks: tuple[int, ...], own: int) -> None:
    """In any order of first batches, with any rank of the registration, as raw and as decoded batches."""
    payloads = [*(batch_of(rank, BlockRemoved([])) for rank in ranks), *history(seed, ranks, count)]
    consumer, decoded = Consumer(own), Consumer(own)
    for payload in payloads:
        consumer(payload)
        raw = decoded.batch(payload)
        decoded.index.apply(raw.decode())
    assert consumer.copies == decoded.copies == apart(payloads, ranks)


@given(st.integers(0, 2**16), st.integers(5, 60), st.sampled_from([(0, 1), (3, 7), (2, 0, 5)]), st.sampled_from([600, 1 << 20]))
def test_a_late_consumer_holds_the_same(seed: int, count: int, ranks: tuple[int, ...], limit: int) -> None:
    """By a snapshot of a history, also of one that was restored, and then the later batches."""
    payloads = [*(batch_of(rank, BlockRemoved([])) for rank in ranks), *history(seed, ranks, count)]
    cut = Random(seed).randrange(len(ranks), len(payloads))
    compactor, restored = Compactor.create(), Compactor.create()
    assert compactor is not None
    assert restored is not None
    compactor.extend(list(enumerate(payloads[:cut])))
    restored.restore(compactor.payloads(limit, 1.0) or [])
    early = Consumer()
    early(*payloads)
    for each in (compactor, restored):
        parts = encode_snapshot(each.snapshot_pieces(100_000) or [], 1.0, None, encode_batch, 100_000)
        assert parts is not None
        late = Consumer()
        late(batch_of(0, block(99)), batch_of(1, block(99)), *parts, *payloads[cut:])
        assert late.copies == early.copies == apart(payloads, ranks)
        assert late.index.digest("pod") == early.index.digest("pod")
        heartbeats = [decode_batch(part).batch.events[-1] for part in parts]
        assert all(isinstance(event, BlockRemoved) and event.heartbeat is not None for event in heartbeats)


@given(st.integers(0, 2**16), st.integers(5, 60), st.sampled_from([(0, 1), (1, 0), (3, 7)]))
def test_an_index_from_the_disk_continues(seed: int, count: int, ranks: tuple[int, ...]) -> None:
    """Batches that the snapshot has are delivered again."""
    payloads = list(history(seed, ranks, count))
    cut = Random(seed).randrange(len(payloads))
    early, late, file = Consumer(), Consumer(), io.BytesIO()
    early(*payloads[: cut + 1])
    early.index.snapshot(file, [("pod", 0)])
    file.seek(0)
    late.index.restore(file)
    assert late.copies == early.copies
    file.seek(0)
    merged = PrefixIndex()
    assert merged.merge(file) == [("pod", 0)]
    assert merged.digest("pod") == early.index.digest("pod")
    late.seq = max(0, cut - 3)
    early(*payloads[cut + 1 :])
    late(*payloads[late.seq :])
    assert late.copies == early.copies
    assert late.index.digest("pod") == early.index.digest("pod")


def test_a_stream_of_one_rank_is_known_by_the_rank_of_its_registration() -> None:
    """The registration decides even if payloads state a different rank or no rank."""
    consumer = Consumer()
    consumer(batch_of(3, block(1)), batch_of(None, block(2)), batch_of(3, BlockRemoved([1], "GPU", group_idx=0)))
    assert (consumer.ranks, consumer.held(0)) == ([0], {2})


def test_a_second_rank_names_both() -> None:
    consumer = Consumer()
    consumer(batch_of(1, block(1)))
    assert consumer.ranks == [0]
    consumer.index.speculate(("pod", 0), [1, 2], ttl=60)
    consumer(batch_of(2, block(1, 1)))
    assert [(info.rank, info.carried_ranks, info.blocks) for info in consumer.index.workers()] == [
        (0, [1, 2], 0),
        (1, [], 1),
        (2, [], 1),
    ]
    match = consumer.index.match([2, 3], overlay=True)
    assert [(source, rank, tokens) for source, rank, *_, tokens, _, _ in match.rows()] == [("pod", 1, 2)]


def test_a_clear_of_one_rank_leaves_the_others_and_is_none_of_the_stream() -> None:
    consumer = Consumer()
    consumer(batch_of(0, block(1)), batch_of(1, block(1)))
    applied = consumer(batch_of(1, AllBlocksCleared()))
    assert applied.report is None
    assert (consumer.held(0), consumer.held(1)) == ({1}, set())
    applied = consumer(batch_of(None, AllBlocksCleared()))
    assert applied.report is not None
    assert applied.report.cleared
    assert consumer.copies == {}


@pytest.mark.parametrize("ends", ["reset", "batch"])
def test_another_incarnation_ends_all_ranks(ends: str) -> None:
    consumer = Consumer()
    consumer(batch_of(0, block(1)), batch_of(1, block(1)))
    consumer.incarnation, consumer.seq = 1, 0
    if ends == "reset":
        consumer.index.apply(Reset("pod", 0, 1, "restarted"))
    consumer(batch_of(1, block(5)))
    assert (consumer.ranks, consumer.held(0)) == ([0], {5})
    consumer(batch_of(0, block(6)))
    assert (consumer.held(0), consumer.held(1)) == ({6}, {5})


def test_a_worker_is_removed_with_the_ranks_that_it_carries() -> None:
    consumer = Consumer()
    consumer(batch_of(0, block(1)), batch_of(1, block(1)))
    assert consumer.index.remove_worker("pod", 0) == 2
    assert consumer(batch_of(1, block(2))).status == "void"
    assert consumer.ranks == []
    consumer.index.readmit("pod")
    consumer(batch_of(1, block(2)), batch_of(0, block(3)))
    assert (consumer.held(0), consumer.held(1)) == ({3}, {2})


def test_more_ranks_than_allowed_are_refused_visibly() -> None:
    """Ranks that no registration can have are refused too. The other ranks continue."""
    consumer = Consumer(max_ranks=3)
    applied = consumer(batch_of(0, block(1)), *(batch_of(rank, block(1)) for rank in (1, 2, -7, 1 << 40, 3, 4, 5, 6)))
    assert consumer.ranks == [0, 1, 2, 3]
    (own, *_) = consumer.index.workers()
    assert own.rejected == {("none", "too-many-ranks"): 5}
    assert own.estimate == "set-aside"
    assert applied.report is None or applied.report.estimate
    consumer(batch_of(2, block(2)))
    assert consumer.held(2) == {1, 2}


def test_a_history_of_too_many_ranks_is_unavailable_until_all_are_cleared() -> None:
    compactor = Compactor.create()
    assert compactor is not None
    for rank in range(MAX_RANKS):
        compactor.append(batch_of(rank, block(1)))
    assert compactor.live == MAX_RANKS
    parts = encode_snapshot(compactor.snapshot_pieces(10_000) or [], 1.0, None, encode_batch, 10_000)
    assert parts is not None
    late = Consumer()
    late(*parts)
    assert [len(blocks) for blocks in late.copies.values()] == [1] * MAX_RANKS
    compactor.append(batch_of(MAX_RANKS, block(1)))
    assert compactor.unavailable_reason == "ranks"
    compactor.append(batch_of(0, AllBlocksCleared()))
    assert compactor.unavailable_reason == "ranks"
    compactor.append(batch_of(None, AllBlocksCleared()))
    assert compactor.live == 0
    assert not compactor.unavailable_reason


def test_a_rank_that_appears_after_a_loss_is_partial_too() -> None:
    compactor = Compactor.create()
    assert compactor is not None
    compactor.append(batch_of(0, block(1)))
    compactor.mark_gap()
    compactor.append(batch_of(1, block(1)))
    compactor.append(batch_of(0, AllBlocksCleared()))
    assert compactor.is_partial
    compactor.append(batch_of(1, AllBlocksCleared()))
    assert not compactor.is_partial


def test_blocks_without_a_rank_are_refused_among_several_ranks() -> None:
    consumer, compactor = Consumer(), Compactor.create()
    assert compactor is not None
    payloads = [batch_of(0, block(1)), batch_of(1, block(1)), batch_of(None, block(2), AllBlocksCleared())]
    applied = consumer(*payloads)
    assert applied.report is not None
    assert applied.report.estimate
    assert consumer.copies == {}
    reports = [consumer(batch_of(rank, AllBlocksCleared())).report for rank in (0, 1)]
    assert [report is not None and report.estimate for report in reports] == [applied.report.estimate, ""]
    compactor.extend(list(enumerate(payloads)))
    assert compactor.unavailable_reason == "ranks"


def test_a_rank_with_a_stream_of_its_own_is_not_mixed_with_that_of_another_stream() -> None:
    """The rank's blocks stay separate, whether its own stream came first, came later, or was preceded by the other stream's
    statement."""
    consumer, own = Consumer(), RawBatch("pod", 1, 0, 0, False, batch_of(1, block(9)))
    consumer(batch_of(0, block(1)), batch_of(1, block(1)), batch_of(2, block(1)))
    consumer.index.apply(own)
    consumer(batch_of(1, block(2)))
    assert {rank: consumer.held(rank) for rank in consumer.ranks} == {0: {1}, 1: {9}, 2: {1}}
    assert consumer.index.worker("pod").rejected == {("none", "rank-of-another-stream"): 1}
    swapped = Consumer()
    swapped.index.apply(own)
    swapped(batch_of(1, block(1)))
    assert (swapped.held(0), swapped.held(1)) == ({1}, {9})
    swapped(batch_of(0, block(2)))
    assert (swapped.held(0), swapped.held(1)) == ({2}, {9})
    assert swapped.index.worker("pod").estimate == "set-aside"


def test_a_digest_is_of_all_ranks_and_an_attestation_of_one() -> None:
    consumer = Consumer()
    consumer(batch_of(0, block(1)), batch_of(1, block(2), block(3)))
    digest, attestation = consumer.index.digest("pod"), 2 + 3

    def beat(rank: int | None, digest: str, attestation: int) -> tuple[bool | None, bool | None]:
        event = BlockRemoved([], heartbeat=Heartbeat(digest, 1.0, attestation=attestation))
        payload = batch_of(rank, event)
        by_form = []
        for delivery in (consumer.batch(payload), consumer.batch(payload).decode()):
            report = consumer.index.apply(delivery).report
            assert report is not None
            by_form.append((report.digest_matches, report.attestation_matches))
        assert by_form[0] == by_form[1]
        return by_form[0]

    assert beat(1, digest, attestation) == (True, True)
    assert beat(1, "0" * 32, attestation + 1) == (False, False)
    assert beat(0, digest, attestation) == (True, False)
    assert beat(None, digest, attestation) == (True, None)


def test_the_estimate_of_a_rank_is_that_of_the_stream() -> None:
    consumer = Consumer()
    consumer(batch_of(0, block(1)), batch_of(1, block(1)))
    applied = consumer(batch_of(1, BlockStored([7], 5, [1, 2], SIZE, medium="GPU", group_idx=0)))
    assert applied.report is not None
    assert "never announced" in (applied.report.estimate or "")
    applied = consumer(batch_of(0, block(2)))
    assert applied.report is None
    applied = consumer(batch_of(1, AllBlocksCleared()))
    assert applied.report is not None
    assert applied.report.estimate == ""


def test_a_gap_is_of_all_ranks() -> None:
    """Behind it, blocks with unknown parents are no sign of parents that were never announced."""
    consumer = Consumer()
    consumer(batch_of(0, block(1)), batch_of(1, block(1)))
    consumer.seq += 1
    consumer.index.apply(Gap("pod", 0, 2, 2))
    assert consumer(batch_of(1, BlockStored([7], 5, [1, 2], SIZE, medium="GPU", group_idx=0))).report is None
    assert consumer.index.worker("pod").gaps == 1


def test_without_an_index_a_clear_of_one_rank_does_not_end_a_loss() -> None:
    clock = VirtualClock()
    transport = FakeTransport(clock)
    engine = transport.engine("tcp://e:1", "tcp://e:2")
    subscriber = Subscriber(Source("tcp://e:1", "tcp://e:2"), transport=transport, clock=clock)

    def publish(rank: int | None, *events: KVEvent) -> None:
        engine.publish_payload(batch_of(rank, *events))
        for _ in range(20):
            clock.advance(0.5)
            subscriber.receive_many(timeout=0)

    publish(0, block(1))
    publish(1, block(1))
    assert subscriber.trust().name == "EXACT"
    engine.skip_number()
    publish(1, AllBlocksCleared())
    assert subscriber.trust().name == "DEGRADED"
    publish(None, AllBlocksCleared())
    assert subscriber.trust().name == "EXACT"
    subscriber.close()
