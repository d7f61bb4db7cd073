"""Heartbeats in the index: its digest compared with the sender's, at the batch of the heartbeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import ApplyResult, IndexLimits, PrefixIndex
from kvevents.stream import Batch, BatchReport, RawBatch, RawDelivery, Reset
from kvevents.wire import Rejected, dialect_for, encode_batch
from kvevents.wire.dialects import Dialect

WORKER = ("relay", 0)


def stored(first: int, count: int = 1) -> BlockStored:
    """Blocks of a prompt of their own."""
    return BlockStored(list(range(first, first + count)), None, list(range(4 * first, 4 * (first + count))), 4, medium="GPU")


def beat(digest: str) -> BlockRemoved:
    return BlockRemoved([], heartbeat=Heartbeat(digest, 5.0))


WRONG = "f" * 32


class Sides:
    """The sender's own index and a consumer's."""

    def __init__(self, consumer: PrefixIndex | None = None, *, raw: bool = True) -> None:
        self.sender = PrefixIndex()
        self.consumer = consumer or PrefixIndex()
        self.raw = raw
        self.seq = 0
        self.incarnation = 0

    def send(self, *events: KVEvent, lost: bool = False) -> ApplyResult | None:
        """One batch, to the sender's index and to the consumer's."""
        applied = self.apply(self.sender, events)
        if not lost:
            applied = self.apply(self.consumer, events)
        self.seq += 1
        return None if lost else applied

    def apply(self, index: PrefixIndex, events: Sequence[KVEvent]) -> ApplyResult:
        payload = encode_batch(KVEventBatch(1.0, list(events)))
        raw = RawBatch(*WORKER, self.incarnation, self.seq, False, payload)
        return index.apply(raw if self.raw else raw.decode())

    def beats(self) -> bool | None:
        """What the consumer finds at a heartbeat."""
        applied = self.send(beat(self.sender.digest(WORKER)))
        assert applied is not None
        assert applied.report is not None
        assert applied.report.heartbeat is not None
        return applied.report.digest_matches


@pytest.mark.parametrize("raw", [True, False])
def test_events_that_are_sent_and_applied_agree(raw: bool) -> None:
    sides = Sides(raw=raw)
    assert sides.send(stored(0, 8)) == ApplyResult("applied")
    assert sides.beats() is True
    sides.send(BlockRemoved([3], "GPU"))
    assert sides.beats() is True


@pytest.mark.parametrize("raw", [True, False])
def test_what_is_missing_does_not(raw: bool) -> None:
    sides = Sides(raw=raw)
    sides.send(stored(0))
    sides.send(stored(100), lost=True)
    assert sides.beats() is False


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_digest_is_of_the_end_of_its_batch(place: int) -> None:
    """Wherever the heartbeat stands among other events."""
    sides = Sides()
    events: list[KVEvent] = [stored(0), stored(50)]
    ahead = PrefixIndex()
    ahead.apply(Batch(*WORKER, 0, 0, 0.0, list(events), False))
    events.insert(place, beat(ahead.digest(WORKER)))
    applied = sides.send(*events)
    assert applied is not None
    assert applied.report is not None
    assert applied.report.digest_matches is True


def test_of_several_the_last_counts() -> None:
    sides = Sides()
    sides.send(stored(0))
    applied = sides.send(beat(WRONG), beat(sides.sender.digest(WORKER)))
    assert applied is not None
    assert applied.report is not None
    assert applied.report.digest_matches is True
    applied = sides.send(beat(sides.sender.digest(WORKER)), beat(WRONG))
    assert applied is not None
    assert applied.report is not None
    assert applied.report.digest_matches is False


def test_a_heartbeat_is_reported_beside_a_clear_and_unreadable_events() -> None:
    """One report holds all of it."""
    index = PrefixIndex()
    empty = Batch(*WORKER, 0, 0, 0.0, [], False)
    index.apply(empty)
    digest = index.digest(WORKER)
    rejected = (Rejected("unknown-tag", "not a known tag", 0),)
    batch = Batch(*WORKER, 0, 1, 1.0, [stored(0), AllBlocksCleared(), beat(digest)], False, rejected=rejected)
    report = index.apply(batch).report
    assert report == BatchReport(rejected, True, beat(digest).heartbeat, True)


def test_the_report_of_a_batch_that_is_not_applied_has_only_the_heartbeat() -> None:
    """The batch is a duplicate or void, so the state is not of that moment."""
    sides = Sides()
    sides.send(stored(0))
    events = [beat(WRONG)]
    sides.apply(sides.consumer, events)
    again = sides.apply(sides.consumer, events)
    assert again == ApplyResult("duplicate", BatchReport(heartbeat=events[0].heartbeat))
    sides.consumer.apply(Reset(*WORKER, 1, "another life"))
    assert sides.apply(sides.consumer, events) == ApplyResult("void", BatchReport(heartbeat=events[0].heartbeat))
    assert sides.apply(sides.consumer, [stored(1)]) == ApplyResult("void")


def test_a_worker_that_was_removed_has_nothing_to_compare() -> None:
    sides = Sides()
    sides.send(stored(0))
    sides.consumer.remove_worker(WORKER)
    assert sides.beats() is None


def test_runs_of_raw_batches_are_applied_in_order_around_heartbeats() -> None:
    """Those are read by Python, the others at once; each digest is of its own moment."""
    sides = Sides()
    deliveries: list[RawDelivery] = []
    for number in range(60):
        events: list[KVEvent] = [stored(10 * number)]
        if number % 7 == 3:
            events = [beat(sides.sender.digest(WORKER))]
        payload = encode_batch(KVEventBatch(1.0, events))
        deliveries.append(RawBatch(*WORKER, 0, number, False, payload))
        sides.sender.apply(deliveries[-1])
    found = sides.consumer.apply_many(deliveries)
    assert [at for at, applied in enumerate(found) if applied.report is not None] == list(range(3, 60, 7))
    assert all(applied.report is None or applied.report.digest_matches is True for applied in found)
    assert sides.consumer.digest(WORKER) == sides.sender.digest(WORKER)


@pytest.mark.parametrize(
    "release", [("vllm", "0.9.0"), ("vllm", "0.11.0"), ("vllm", "0.24.0"), ("vllm", "0.33.0"), ("sglang", "0.5.20")]
)
def test_heartbeats_of_every_dialect_are_compared(release: tuple[str, str]) -> None:
    dialect: Dialect = dialect_for(*release)
    index, seq = PrefixIndex(), 0
    for block in (BlockStored([1], None, [1, 2], 2), BlockStored([2], 1, [3, 4], 2)):
        index.apply_payload(WORKER, 0, seq, encode_batch(KVEventBatch(1.0, [block]), dialect))
        payload = encode_batch(KVEventBatch(1.0, [beat(index.digest(WORKER))]), dialect)
        report = index.apply_payload(WORKER, 0, seq + 1, payload).report
        assert report is not None
        assert report.digest_matches is True
        seq += 2


# --- an index that holds less on purpose ------------------------------------------------------------------------------------


def crowded() -> Sides:
    """A consumer that has had to give up blocks."""
    sides = Sides(PrefixIndex(memory_limit=60_000))
    first = 0
    while not sides.consumer.stats().evicted:
        sides.send(stored(first, 100))
        first += 1_000
    return sides


def test_blocks_that_were_evicted_are_no_difference() -> None:
    sides = crowded()
    assert sides.beats() is None
    assert sides.beats() is None


def test_with_a_memory_limit_that_has_cost_nothing_a_difference_is_one() -> None:
    sides = Sides(PrefixIndex(memory_limit=1 << 30))
    sides.send(stored(0))
    assert sides.beats() is True
    sides.send(stored(100), lost=True)
    assert sides.beats() is False


def test_once_an_agreement_has_shown_the_index_to_be_whole_a_difference_counts_again() -> None:
    sides = crowded()
    assert sides.beats() is None
    sides.send(AllBlocksCleared())
    assert sides.beats() is True
    sides.send(stored(5), lost=True)
    assert sides.beats() is False


def test_what_was_evicted_in_an_earlier_life_is_no_excuse() -> None:
    sides = crowded()
    for index in (sides.consumer, sides.sender):
        index.apply(Reset(*WORKER, 1, "another life"))
    sides.incarnation, sides.seq = 1, 0
    sides.send(stored(0))
    assert sides.beats() is True
    sides.send(stored(5), lost=True)
    assert sides.beats() is False


def test_a_removed_worker_leaves_no_excuse_behind() -> None:
    """The index counts afresh what arrives later under its name."""
    sides = crowded()
    assert sides.beats() is None
    sides.consumer.remove_worker(WORKER)
    sides.consumer.readmit(*WORKER)
    sides.send(stored(0))
    assert sides.beats() is False


def test_a_snapshot_that_is_restored_leaves_no_excuse_behind(tmp_path: Any) -> None:
    sides = crowded()
    assert sides.beats() is None
    other = PrefixIndex()
    other.snapshot(tmp_path / "index")
    sides.consumer.restore(tmp_path / "index")
    sides.send(stored(0))
    assert sides.beats() is False


def test_what_waits_for_its_parent_and_fell_out_is_a_difference() -> None:
    """A snapshot, in which parents come first, repairs it; so the stream requests one."""
    sides = Sides(PrefixIndex(limits=IndexLimits(max_orphans=1)))
    for block in (2, 4):
        sides.send(BlockStored([block], block - 1, [block], 1))
    assert sides.beats() is True
    for block in (1, 3):
        sides.send(BlockStored([block], None, [block], 1))
    assert sides.beats() is False
