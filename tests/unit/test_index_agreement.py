"""At a heartbeat, the index compares its digest with the digest of the sender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import ApplyResult, IndexLimits, PrefixIndex
from kvevents.stream import Batch, BatchReport, RawBatch, RawDelivery, Reset
from kvevents.wire import Rejected, dialect_for, encode_batch
from kvevents.wire.dialects import Dialect

WORKER = ("relay", 0)


def stored(first: int, count: int = 1) -> BlockStored:
    """Return a store of blocks that share no tokens with other stores."""
    return BlockStored(list(range(first, first + count)), None, list(range(4 * first, 4 * (first + count))), 4, medium="GPU")


def heartbeat_event(digest: str) -> BlockRemoved:
    return BlockRemoved([], heartbeat=Heartbeat(digest, 5.0))


WRONG = "f" * 32


class SenderAndConsumer:
    """The index of a sender and the index of a consumer, which receive the same batches unless one is lost."""

    def __init__(self, consumer: PrefixIndex | None = None, *, raw: bool = True) -> None:
        self.sender = PrefixIndex()
        self.consumer = consumer or PrefixIndex()
        self.raw = raw
        self.seq = 0
        self.incarnation = 0

    def send(self, *events: KVEvent, lost: bool = False) -> ApplyResult | None:
        """Apply one batch to both indexes, or only to the sender's if it is lost. Return the result of the consumer."""
        applied = self.apply(self.sender, events)
        if not lost:
            applied = self.apply(self.consumer, events)
        self.seq += 1
        return None if lost else applied

    def apply(self, index: PrefixIndex, events: Sequence[KVEvent]) -> ApplyResult:
        payload = encode_batch(KVEventBatch(1.0, list(events)))
        raw = RawBatch(*WORKER, self.incarnation, self.seq, False, payload)
        return index.apply(raw if self.raw else raw.decode())

    def compare_digests(self) -> bool | None:
        """Send a heartbeat with the digest of the sender and return whether the consumer finds it equal; None if unknown."""
        applied = self.send(heartbeat_event(self.sender.digest(WORKER)))
        assert applied is not None
        assert applied.report is not None
        assert applied.report.heartbeat is not None
        return applied.report.digest_matches


@pytest.mark.parametrize("raw", [True, False])
def test_digests_are_equal_if_every_event_was_applied(raw: bool) -> None:
    pair = SenderAndConsumer(raw=raw)
    assert pair.send(stored(0, 8)) == ApplyResult("applied")
    assert pair.compare_digests() is True
    pair.send(BlockRemoved([3], "GPU"))
    assert pair.compare_digests() is True


@pytest.mark.parametrize("raw", [True, False])
def test_digests_differ_if_a_batch_was_lost(raw: bool) -> None:
    pair = SenderAndConsumer(raw=raw)
    pair.send(stored(0))
    pair.send(stored(100), lost=True)
    assert pair.compare_digests() is False


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_digest_is_compared_with_the_state_at_the_end_of_its_batch(place: int) -> None:
    """The position of the heartbeat among the other events does not matter."""
    pair = SenderAndConsumer()
    events: list[KVEvent] = [stored(0), stored(50)]
    ahead = PrefixIndex()
    ahead.apply(Batch(*WORKER, 0, 0, 0.0, list(events), False))
    events.insert(place, heartbeat_event(ahead.digest(WORKER)))
    applied = pair.send(*events)
    assert applied is not None
    assert applied.report is not None
    assert applied.report.digest_matches is True


def test_the_last_of_several_heartbeats_in_a_batch_counts() -> None:
    pair = SenderAndConsumer()
    pair.send(stored(0))
    applied = pair.send(heartbeat_event(WRONG), heartbeat_event(pair.sender.digest(WORKER)))
    assert applied is not None
    assert applied.report is not None
    assert applied.report.digest_matches is True
    applied = pair.send(heartbeat_event(pair.sender.digest(WORKER)), heartbeat_event(WRONG))
    assert applied is not None
    assert applied.report is not None
    assert applied.report.digest_matches is False


def test_one_report_has_the_heartbeat_the_clear_and_the_unreadable_events() -> None:
    index = PrefixIndex()
    empty = Batch(*WORKER, 0, 0, 0.0, [], False)
    index.apply(empty)
    digest = index.digest(WORKER)
    rejected = (Rejected("unknown-tag", "not a known tag", 0),)
    batch = Batch(*WORKER, 0, 1, 1.0, [stored(0), AllBlocksCleared(), heartbeat_event(digest)], False, rejected=rejected)
    report = index.apply(batch).report
    assert report == BatchReport(rejected, True, heartbeat_event(digest).heartbeat, True)


def test_the_report_of_a_batch_that_is_not_applied_has_only_the_heartbeat() -> None:
    """The batch is a duplicate or belongs to an earlier incarnation, so its digest is not of the present state."""
    pair = SenderAndConsumer()
    pair.send(stored(0))
    events = [heartbeat_event(WRONG)]
    pair.apply(pair.consumer, events)
    again = pair.apply(pair.consumer, events)
    assert again == ApplyResult("duplicate", BatchReport(heartbeat=events[0].heartbeat))
    pair.consumer.apply(Reset(*WORKER, 1, "another incarnation"))
    assert pair.apply(pair.consumer, events) == ApplyResult("void", BatchReport(heartbeat=events[0].heartbeat))
    assert pair.apply(pair.consumer, [stored(1)]) == ApplyResult("void")


def test_no_digest_is_compared_for_a_removed_worker() -> None:
    pair = SenderAndConsumer()
    pair.send(stored(0))
    pair.consumer.remove_worker(WORKER)
    assert pair.compare_digests() is None


def test_runs_of_raw_batches_are_applied_in_order_around_heartbeats() -> None:
    """Python code reads batches with heartbeats, and native code reads all other batches. Each digest is compared at its own
    batch."""
    pair = SenderAndConsumer()
    deliveries: list[RawDelivery] = []
    for number in range(60):
        events: list[KVEvent] = [stored(10 * number)]
        if number % 7 == 3:
            events = [heartbeat_event(pair.sender.digest(WORKER))]
        payload = encode_batch(KVEventBatch(1.0, events))
        deliveries.append(RawBatch(*WORKER, 0, number, False, payload))
        pair.sender.apply(deliveries[-1])
    found = pair.consumer.apply_many(deliveries)
    assert [at for at, applied in enumerate(found) if applied.report is not None] == list(range(3, 60, 7))
    assert all(applied.report is None or applied.report.digest_matches is True for applied in found)
    assert pair.consumer.digest(WORKER) == pair.sender.digest(WORKER)


@pytest.mark.parametrize(
    "release", [("vllm", "0.9.0"), ("vllm", "0.11.0"), ("vllm", "0.24.0"), ("vllm", "0.33.0"), ("sglang", "0.5.20")]
)
def test_heartbeats_of_every_dialect_are_compared(release: tuple[str, str]) -> None:
    dialect: Dialect = dialect_for(*release)
    index, seq = PrefixIndex(), 0
    for block in (BlockStored([1], None, [1, 2], 2), BlockStored([2], 1, [3, 4], 2)):
        index.apply_payload(WORKER, 0, seq, encode_batch(KVEventBatch(1.0, [block]), dialect))
        payload = encode_batch(KVEventBatch(1.0, [heartbeat_event(index.digest(WORKER))]), dialect)
        report = index.apply_payload(WORKER, 0, seq + 1, payload).report
        assert report is not None
        assert report.digest_matches is True
        seq += 2


# --- an index that has evicted blocks ----------------------------------------------------------------------------------------


def pair_with_evictions() -> SenderAndConsumer:
    """Return a pair whose consumer has evicted blocks because of its memory limit."""
    pair = SenderAndConsumer(PrefixIndex(memory_limit=60_000))
    first = 0
    while not pair.consumer.stats().evicted:
        pair.send(stored(first, 100))
        first += 1_000
    return pair


def test_after_an_eviction_a_different_digest_is_not_a_mismatch() -> None:
    pair = pair_with_evictions()
    assert pair.compare_digests() is None
    assert pair.compare_digests() is None


def test_under_a_memory_limit_that_evicted_nothing_a_different_digest_is_a_mismatch() -> None:
    pair = SenderAndConsumer(PrefixIndex(memory_limit=1 << 30))
    pair.send(stored(0))
    assert pair.compare_digests() is True
    pair.send(stored(100), lost=True)
    assert pair.compare_digests() is False


def test_after_a_matching_digest_earlier_evictions_do_not_excuse_a_mismatch() -> None:
    pair = pair_with_evictions()
    assert pair.compare_digests() is None
    pair.send(AllBlocksCleared())
    assert pair.compare_digests() is True
    pair.send(stored(5), lost=True)
    assert pair.compare_digests() is False


def test_evictions_in_an_earlier_incarnation_do_not_excuse_a_mismatch() -> None:
    pair = pair_with_evictions()
    for index in (pair.consumer, pair.sender):
        index.apply(Reset(*WORKER, 1, "another incarnation"))
    pair.incarnation, pair.seq = 1, 0
    pair.send(stored(0))
    assert pair.compare_digests() is True
    pair.send(stored(5), lost=True)
    assert pair.compare_digests() is False


def test_evictions_before_the_worker_was_removed_do_not_excuse_a_mismatch() -> None:
    """The counter of evicted blocks begins at 0 when the worker is readmitted."""
    pair = pair_with_evictions()
    assert pair.compare_digests() is None
    pair.consumer.remove_worker(WORKER)
    pair.consumer.readmit(*WORKER)
    pair.send(stored(0))
    assert pair.compare_digests() is False


def test_evictions_before_a_snapshot_was_restored_do_not_excuse_a_mismatch(tmp_path: Any) -> None:
    pair = pair_with_evictions()
    assert pair.compare_digests() is None
    other = PrefixIndex()
    other.snapshot(tmp_path / "index")
    pair.consumer.restore(tmp_path / "index")
    pair.send(stored(0))
    assert pair.compare_digests() is False


def test_a_dropped_orphan_is_a_mismatch() -> None:
    """A snapshot repairs the index, because parents come first in it."""
    pair = SenderAndConsumer(PrefixIndex(limits=IndexLimits(max_orphans=1)))
    for block in (2, 4):
        pair.send(BlockStored([block], block - 1, [block], 1))
    assert pair.compare_digests() is True
    for block in (1, 3):
        pair.send(BlockStored([block], None, [block], 1))
    assert pair.compare_digests() is False


# --- what an index lacks after its limits ------------------------------------------------------------------------------------


def send_refused(pair: SenderAndConsumer) -> None:
    first = 0
    while not pair.consumer.stats().evicted:
        pair.send(stored(first, 100))
        first += 1_000


def send_dropped(pair: SenderAndConsumer) -> None:
    for block in (2, 4):
        pair.send(BlockStored([block], block - 1, [block], 1))


def lacks(index: PrefixIndex) -> tuple[bool, bool]:
    info = index.worker(WORKER)
    return info.lacks_refused, info.lacks_dropped


@pytest.mark.parametrize(("send", "missing"), [(send_refused, (True, False)), (send_dropped, (False, True))])
@pytest.mark.parametrize("end", ["clear", "reset", "equal digest"])
def test_a_worker_lacks_blocks_until_its_index_is_known_to_be_complete(
    send: Callable[[SenderAndConsumer], None], missing: tuple[bool, bool], end: str, tmp_path: Any
) -> None:
    """A restored index lacks them too, although its counters begin at 0."""
    pair = SenderAndConsumer(PrefixIndex(memory_limit=60_000, limits=IndexLimits(max_orphans=1)))
    pair.send(stored(10_000))
    assert lacks(pair.consumer) == (False, False)
    send(pair)
    assert lacks(pair.consumer) == missing
    pair.consumer.snapshot(tmp_path / "index")
    pair.consumer = PrefixIndex()
    pair.consumer.restore(tmp_path / "index")
    assert pair.consumer.stats().evicted == pair.consumer.stats().orphans_dropped == 0
    assert lacks(pair.consumer) == missing
    if end == "reset":
        pair.consumer.apply(Reset(*WORKER, 1, "another incarnation"))
    elif end == "equal digest":
        pair.send(BlockRemoved([block.hash for block in pair.sender.blocks(WORKER)], medium="GPU"))
        assert pair.compare_digests() is True
    else:
        pair.send(AllBlocksCleared())
    assert lacks(pair.consumer) == (False, False)
