"""`kvevents.sim.audit`: it agrees with a true stream, and notices one that is not."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvevents.errors import UsageError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import ApplyResult, PrefixIndex
from kvevents.sim.audit import MAX_EXAMPLES, Audit, Expected, Mark
from kvevents.sim.cache import CacheSize
from kvevents.sim.requests import Sequence
from kvevents.sim.results import Disagreement
from kvevents.sim.simulated_engine import StepLimits
from kvevents.stream import Batch, BatchReport, Gap, RawBatch, Reset
from kvevents.wire.encode import batch_encoder
from sim_cases import Run, request
from sim_model import Mirror

WORKER = ("engine", 0)
encode = batch_encoder()


def raw(number: int, events: Items[KVEvent], life: int = 0) -> RawBatch:
    return RawBatch(*WORKER, life, number, False, encode(KVEventBatch(0.0, list(events), 0)))


@dataclass
class Recorded:
    """What an engine said in one life, and what it found."""

    size: CacheSize
    batches: list[list[KVEvent]] = field(default_factory=list)
    lookups: list[Expected] = field(default_factory=list)

    def audited(self, exact: bool = True, **limits: int) -> Audit:
        """Return an audit that expects all lookups and has no deliveries yet."""
        audit = Audit(PrefixIndex(), lambda _: exact, **limits)
        audit.add(WORKER)
        for expected in self.lookups:
            audit.expect(WORKER, expected)
        return audit

    def wrong(self) -> int:
        """Lookups that these batches, read one event after the other into a plain mirror, do not imply."""
        mirror, place, wrong = Mirror(strict=False), Mark(0, 0, 0), 0
        for expected in self.lookups:
            wanted = expected.mark
            while place < wanted and place.seq < len(self.batches):
                batch = self.batches[place.seq]
                if place.position < len(batch) and (place.seq, place.position) < (wanted.seq, wanted.position):
                    mirror.apply(batch[place.position])
                    place = place._replace(position=place.position + 1)
                elif place.seq < wanted.seq:
                    place = Mark(0, place.seq + 1, 0)
                else:
                    break
            wrong += mirror.cached(self.size, expected.sequence.hashes, expected.tokens) != expected.cached
        return wrong


def recorded(size: CacheSize, prompts: Items[tuple[Items[int], int]], side_by_side: int = 1) -> Recorded:
    """So many of these prompts at a time, with answers of these lengths, through an engine."""
    run = Run(size, StepLimits(4, 64))
    for start in range(0, len(prompts), side_by_side):
        run.submit(request(tokens, answer) for tokens, answer in prompts[start : start + side_by_side])
        run.finish()
    found = Recorded(size)
    for step in run.steps:
        for lookup in step.lookups:
            assert lookup.job.sequence is not None
            mark = Mark(0, len(found.batches), lookup.position)
            found.lookups.append(Expected(mark, lookup.job.sequence, lookup.tokens, lookup.cached))
        if step.events:
            found.batches.append(step.events)
    return found


def outcome(audit: Audit, deliveries: Items[tuple[RawBatch | Reset | Gap, int]]) -> tuple[int, int, int]:
    """Checked, of those wrong, and unproven."""
    for delivery, life in deliveries:
        audit.apply(delivery, life)
    audit.finish()
    return audit.counts.checked, audit.counts.disagreements, audit.counts.unproven


def deliveries_of(batches: Items[Items[KVEvent]]) -> list[tuple[RawBatch | Reset | Gap, int]]:
    return [(raw(number, events), 0) for number, events in enumerate(batches)]


def small() -> Recorded:
    """Three blocks of two tokens. A prompt comes, comes again and finds four tokens, is pushed out, and comes once more.

    The second time nothing is announced: that lookup waits for a batch which another prompt brings.
    """
    found = recorded(CacheSize(3, 2), [([1] * 5, 1), ([1] * 5, 1), ([2] * 5, 1), ([1] * 5, 1)])
    assert [(one.mark, one.cached) for one in found.lookups] == [
        (Mark(0, 0, 0), 0),
        (Mark(0, 1, 0), 4),
        (Mark(0, 1, 0), 0),
        (Mark(0, 2, 0), 0),
    ]
    assert [len(batch) for batch in found.batches] == [1, 3, 3]
    return found


PROMPTS = st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=3, max_size=10), st.integers(1, 4)), min_size=4, max_size=12)
FULL = st.builds(CacheSize, st.integers(4, 12), st.integers(1, 3), st.just(0), st.none())
HYBRID = st.builds(CacheSize, st.integers(8, 20), st.integers(1, 3), st.just(0), st.integers(2, 8))
TIERED = st.builds(CacheSize, st.integers(4, 12), st.integers(1, 3), st.integers(1, 8), st.none())
STREAMS = st.builds(recorded, st.one_of(FULL, HYBRID, TIERED), PROMPTS, st.integers(1, 3))
# An index that lost an event does not know of a window, or of the tokens of a copy in host memory; the plain mirror does.
FULL_STREAMS = st.builds(recorded, FULL, PROMPTS, st.integers(1, 3))


@settings(max_examples=60)
@given(STREAMS)
def test_a_true_stream_has_no_disagreement(stream: Recorded) -> None:
    assert outcome(stream.audited(), deliveries_of(stream.batches)) == (len(stream.lookups), 0, 0)
    assert stream.wrong() == 0


@settings(max_examples=80)
@given(FULL_STREAMS, st.data())
def test_a_lost_event_is_noticed_wherever_it_matters(stream: Recorded, data: st.DataObject) -> None:
    """The audit counts exactly the lookups for which a plain reader of the same events comes to something else."""
    if not stream.batches:
        return
    number = data.draw(st.integers(0, len(stream.batches) - 1))
    place = data.draw(st.integers(0, len(stream.batches[number]) - 1))
    stream.batches[number] = [event for other, event in enumerate(stream.batches[number]) if other != place]
    assert outcome(stream.audited(), deliveries_of(stream.batches)) == (len(stream.lookups), stream.wrong(), 0)


@settings(max_examples=80)
@given(FULL_STREAMS, st.data())
def test_a_lost_batch_leaves_its_lookups_unproven_and_is_noticed_after_it(stream: Recorded, data: st.DataObject) -> None:
    """No gap is reported: nothing that was looked up at the lost batch counts as compared, except what precedes its events."""
    if not stream.batches:
        return
    number = data.draw(st.integers(0, len(stream.batches) - 1))
    deliveries = deliveries_of(stream.batches)
    del deliveries[number]
    last = len(stream.batches) - 1
    # What was found between its events; and what was found behind it, where no later batch shows that it is gone.
    lost = [(one.mark.seq == number and one.mark.position > 0) or (one.mark.seq > number == last) for one in stream.lookups]
    checked, wrong, unproven = outcome(stream.audited(), deliveries)
    assert (checked, unproven) == (lost.count(False), lost.count(True))
    kept = [one for one, gone in zip(stream.lookups, lost, strict=True) if not gone]
    batches = [events if other != number else [] for other, events in enumerate(stream.batches)]
    assert wrong == Recorded(stream.size, batches, kept).wrong()


def test_each_event_of_the_small_stream_matters_and_none_can_be_left_out() -> None:
    """What is dropped is stored for a later hit, or removed before a later miss."""
    for number, place in ((0, 0), (1, 0), (1, 1)):
        stream = small()
        if number:
            # Of the two that are removed, the first block of the prompt decides.
            stream.batches[1] = [event for event in stream.batches[1] if isinstance(event, BlockStored)]
        else:
            del stream.batches[number][place]
        assert outcome(stream.audited(), deliveries_of(stream.batches))[1] > 0


def test_a_batch_that_is_applied_twice_is_noticed() -> None:
    """Its blocks count twice; when they are removed once, the index still believes in them."""
    stream = small()
    deliveries = deliveries_of(stream.batches)
    assert outcome(stream.audited(), [deliveries[0], *deliveries]) == (4, 1, 0)


def test_a_batch_under_another_life_proves_nothing() -> None:
    stream = small()
    first, second, third = deliveries_of(stream.batches)
    assert outcome(stream.audited(), [first, (second[0], 1), (third[0], 1)]) == (3, 0, 1)
    assert outcome(stream.audited(), [(first[0], 1), (second[0], 1), (third[0], 1)]) == (1, 0, 3)


@pytest.mark.parametrize(("position", "wrong"), [(1, 0), (0, 1)])
def test_a_lookup_is_compared_between_two_events_of_a_batch(position: int, wrong: int) -> None:
    """Two equal prompts in one step: the second finds what the first announces there, and nothing if it were before that."""
    stream = recorded(CacheSize(20, 2), [([1] * 5, 1), ([1] * 5, 1)], side_by_side=2)
    assert [(one.mark, one.cached) for one in stream.lookups] == [(Mark(0, 0, 0), 0), (Mark(0, 0, 1), 4)]
    moved = stream.lookups[1]
    stream.lookups[1] = Expected(Mark(0, 0, position), moved.sequence, moved.tokens, moved.cached)
    assert outcome(stream.audited(), deliveries_of(stream.batches)) == (2, wrong, 0)


@given(st.sampled_from([-1, 1]))
def test_a_lookup_one_batch_too_early_or_too_late_is_noticed(shift: int) -> None:
    """The hit of the small stream is there between its first two batches only."""
    stream = small()
    hit = stream.lookups.pop(1)
    stream.lookups = [Expected(hit.mark._replace(seq=hit.mark.seq + shift), hit.sequence, hit.tokens, hit.cached)]
    assert outcome(stream.audited(), deliveries_of(stream.batches)) == (1, 1, 0)


def test_an_index_with_wrong_answers_is_detected() -> None:
    """Example: where it was, what the engine found, what the index said; no more than ten are kept."""
    stream = small()
    stream.batches[0] = []
    audit = stream.audited()
    outcome(audit, deliveries_of(stream.batches))
    assert audit.counts.examples == [Disagreement(*WORKER, 0, 1, 0, 5, 4, 0)]
    many = Recorded(stream.size, stream.batches, [stream.lookups[1]] * 30)
    audit = many.audited()
    assert outcome(audit, deliveries_of(stream.batches)) == (30, 30, 0)
    assert len(audit.counts.examples) == MAX_EXAMPLES


def test_while_a_stream_is_not_exact_nothing_is_proven() -> None:
    """Neither agreement nor disagreement; how many differ is kept apart."""
    stream = small()
    stream.batches[0] = []
    audit = stream.audited(exact=False)
    assert outcome(audit, deliveries_of(stream.batches)) == (0, 0, 4)
    assert audit.counts.wrong_unproven == 1
    assert audit.counts.examples == []


def test_after_a_gap_batches_count_again() -> None:
    """What was looked up in the gap is unproven; the batch after it is applied, not taken for a duplicate."""
    stream = recorded(
        CacheSize(20, 2), [([number] * 5, 1) for number in (1, 2, 3)] + [([number] * 5, 1) for number in (3, 2, 1)]
    )
    first, _, third = deliveries_of(stream.batches)
    audit = stream.audited()
    audit.apply(*first)
    assert audit.apply(Gap(*WORKER, 1, 1)).status == "applied"
    assert audit.counts.unproven == 0, "the lookup before the gap was answered by what is there"
    assert audit.apply(*third).status == "applied"
    audit.finish()
    assert (audit.counts.checked, audit.counts.disagreements) == (6, 1), "the second prompt is cached, unknown to the index"


def test_lookups_inside_a_gap_are_unproven() -> None:
    stream = recorded(CacheSize(40, 2), [([number // 2] * 5, 1) for number in range(8)], side_by_side=2)
    assert [one.mark[1:] for one in stream.lookups] == [(n // 2, n % 2) for n in range(8)]
    first, _, _, last = deliveries_of(stream.batches)
    assert outcome(stream.audited(), [first, (Gap(*WORKER, 1, 2), 0), last]) == (5, 0, 3)


def test_a_reset_settles_what_it_does_not_touch_and_leaves_the_rest_unproven() -> None:
    """A hit that waited for nothing is compared before the index forgets; what a batch should have brought never can be."""
    stream = small()
    first, second, _ = deliveries_of(stream.batches)
    audit = stream.audited()
    audit.apply(*first)
    audit.expect(WORKER, Expected(Mark(1, 0, 0), stream.lookups[0].sequence, 5, 0))
    audit.apply(Reset(*WORKER, 1, "restarted"), 1)
    assert (audit.counts.checked, audit.counts.disagreements, audit.counts.unproven) == (3, 0, 1)
    audit.apply(RawBatch(*WORKER, 1, 0, False, second[0].payload if isinstance(second[0], RawBatch) else b""), 1)
    assert outcome(audit, []) == (4, 0, 1)


def test_a_quiet_lookup_after_the_last_batch_is_compared_at_the_reset() -> None:
    """It was expected after its batch had been applied, and nothing came behind it but the reset."""
    stream = small()
    audit = Audit(PrefixIndex())
    audit.add(WORKER)
    audit.apply(*deliveries_of(stream.batches)[0])
    audit.expect(WORKER, stream.lookups[1])
    audit.apply(Reset(*WORKER, 1, "restarted"), 1)
    assert outcome(audit, []) == (1, 0, 0)


def test_a_new_life_without_its_first_batches_proves_nothing_about_them() -> None:
    """The gap comes right after the reset: it is one of the new life."""
    stream = small()
    audit = stream.audited()
    lookups = [Expected(one.mark._replace(incarnation=1), one.sequence, one.tokens, one.cached) for one in stream.lookups]
    for one in lookups:
        audit.expect(WORKER, one)
    deliveries = [
        *deliveries_of(stream.batches),
        (Reset(*WORKER, 1, "restarted"), 1),
        (Gap(*WORKER, 0, 1, 1), 1),
        (raw(2, stream.batches[2], 1), 1),
    ]
    checked, wrong, unproven = outcome(audit, deliveries)
    assert (checked + unproven, wrong) == (8, 0)
    assert unproven == 2, "the lookups at (1, 1, 0); that at (1, 0, 0) found nothing, as was true after the reset"


def test_what_still_waits_at_the_end_is_unproven() -> None:
    stream = small()
    assert outcome(stream.audited(), deliveries_of(stream.batches)[:1]) == (3, 0, 1)
    assert outcome(stream.audited(), []) == (1, 0, 3)


def test_lookups_that_wait_are_bounded() -> None:
    stream = small()
    assert outcome(stream.audited(max_pending=3), deliveries_of(stream.batches)) == (3, 0, 1)


def test_parts_of_a_batch_are_reported_as_one() -> None:
    """Status, rejected events, and whether anything was cleared, in whichever part that was."""
    stream = recorded(CacheSize(20, 2), [([1] * 5, 1), ([1] * 5, 1)], side_by_side=2)
    audit = stream.audited()
    assert audit.apply(*deliveries_of(stream.batches)[0]) == ApplyResult("applied")
    assert audit.index.stats().blocks == 2
    audit = Audit(PrefixIndex())
    audit.add(WORKER)
    for position in (1, 2):
        audit.expect(WORKER, Expected(Mark(0, 0, position), stream.lookups[0].sequence, 5, 4 * (position - 1)))
    assert audit.apply(raw(0, [AllBlocksCleared(), *stream.batches[0]])) == ApplyResult("applied", BatchReport(cleared=True))
    assert outcome(audit, []) == (2, 0, 0)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_heartbeat_in_a_batch_that_is_looked_into_is_of_its_end(place: int) -> None:
    """The batch is applied in parts, for the lookups between; its digest is compared after the last of them."""
    stream = recorded(CacheSize(20, 2), [([1] * 5, 1), ([1] * 5, 1)], side_by_side=2)
    truth = PrefixIndex()
    truth.apply(Batch(*WORKER, 0, 0, 0.0, list(stream.batches[0]), False))
    for digest, agrees in ((truth.digest(WORKER), True), ("0" * 32, False)):
        beat = Heartbeat(digest, 5.0)
        events = list(stream.batches[0])
        events.insert(place, BlockRemoved([], heartbeat=beat))
        audit = Audit(PrefixIndex())
        audit.add(WORKER)
        audit.expect(WORKER, Expected(Mark(0, 0, 1), stream.lookups[0].sequence, 5, 0))
        assert audit.apply(raw(0, events)) == ApplyResult("applied", BatchReport(heartbeat=beat, digest_matches=agrees))


def test_a_decoded_batch_is_taken_as_well() -> None:
    stream = small()
    audit = stream.audited()
    for delivery, life in deliveries_of(stream.batches):
        assert isinstance(delivery, RawBatch)
        decoded = delivery.decode()
        assert isinstance(decoded, Batch)
        audit.apply(decoded, life)
    assert outcome(audit, []) == (4, 0, 0)


def test_an_unknown_worker_raises() -> None:
    with pytest.raises(UsageError, match="'other' with rank 3"):
        small().audited().apply(replace(raw(0, []), source="other", rank=3))


def test_what_could_have_been_cached_leaves_out_the_last_token() -> None:
    one = Expected(Mark(0, 0, 0), Sequence(array("I", range(9)), 5, 2, "seed", "adapter", "tenant"), 5, 4)
    assert one.usable.tolist() == [0, 1, 2, 3]
    assert (one.namespace.lora, one.namespace.salt) == ("adapter", "tenant")


def test_the_small_stream_removes_before_it_stores() -> None:
    assert [type(event) for event in small().batches[1]] == [BlockRemoved, BlockRemoved, BlockStored]
