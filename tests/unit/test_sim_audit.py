"""`kvevents.sim.audit`: it agrees with a true stream, and detects a wrong one."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.index import ApplyResult, PrefixIndex
from kvevents.sim.audit import MAX_EXAMPLES, Audit, EngineLookup, LookupPosition
from kvevents.sim.cache import CacheSize
from kvevents.sim.results import Disagreement
from kvevents.sim.simulated_engine import StepLimits
from kvevents.stream import Batch, BatchReport, Gap, RawBatch, Reset
from kvevents.wire.encode import batch_encoder
from sim_cases import Run, request
from sim_model import EventState

WORKER = ("engine", 0)
encode = batch_encoder()


def raw_batch(number: int, events: Items[KVEvent], engine_incarnation: int = 0) -> RawBatch:
    return RawBatch(*WORKER, engine_incarnation, number, False, encode(KVEventBatch(0.0, list(events), 0)))


@dataclass
class EngineRecording:
    """The batches and lookups of one incarnation of an engine."""

    size: CacheSize
    batches: list[list[KVEvent]] = field(default_factory=list)
    lookups: list[EngineLookup] = field(default_factory=list)

    def make_audit(self, exact: bool = True) -> Audit:
        """Return an audit that expects all lookups and has no deliveries yet."""
        audit = Audit(PrefixIndex(), lambda _: exact)
        audit.add(WORKER)
        for expected in self.lookups:
            audit.expect(WORKER, expected)
        return audit

    def wrong_lookups(self) -> int:
        """Return the number of lookups whose results differ from a plain mirror that applies these batches event by event."""
        mirror, place, wrong_lookups = EventState(strict=False), LookupPosition(0, 0, 0), 0
        for expected in self.lookups:
            wanted = expected.position
            while place < wanted and place.seq < len(self.batches):
                batch = self.batches[place.seq]
                if place.event_index < len(batch) and (place.seq, place.event_index) < (wanted.seq, wanted.event_index):
                    mirror.apply(batch[place.event_index])
                    place = place._replace(event_index=place.event_index + 1)
                elif place.seq < wanted.seq:
                    place = LookupPosition(0, place.seq + 1, 0)
                else:
                    break
            wrong_lookups += mirror.cached(self.size, expected.sequence.hashes, expected.tokens) != expected.cached
        return wrong_lookups


def record_engine(size: CacheSize, prompts: Items[tuple[Items[int], int]], side_by_side: int = 1) -> EngineRecording:
    """Return the recording of an engine that answers prompts with answers of these lengths, `side_by_side` at a time."""
    run = Run(size, StepLimits(4, 64))
    for start in range(0, len(prompts), side_by_side):
        run.submit(request(tokens, answer) for tokens, answer in prompts[start : start + side_by_side])
        run.finish()
    found = EngineRecording(size)
    for step in run.steps:
        for lookup in step.lookups:
            assert lookup.job.sequence is not None
            mark = LookupPosition(0, len(found.batches), lookup.position)
            found.lookups.append(EngineLookup(mark, lookup.job.sequence, lookup.tokens, lookup.cached))
        if step.events:
            found.batches.append(step.events)
    return found


def run_audit(audit: Audit, deliveries: Items[tuple[RawBatch | Reset | Gap, int]]) -> tuple[int, int, int]:
    """Apply deliveries and return the numbers of checked lookups, disagreements, and unproven lookups."""
    for delivery, engine_incarnation in deliveries:
        audit.apply(delivery, engine_incarnation)
    audit.finish()
    return audit.counts.checked, audit.counts.disagreements, audit.counts.unproven


def make_deliveries(batches: Items[Items[KVEvent]]) -> list[tuple[RawBatch | Reset | Gap, int]]:
    return [(raw_batch(number, events), 0) for number, events in enumerate(batches)]


def record_small_stream() -> EngineRecording:
    """Return the recording of an engine with three blocks of two tokens.

    A prompt comes, comes again and finds four tokens, is evicted, and comes once more. The second time nothing is
    announced: that lookup waits for a batch of another prompt.
    """
    found = record_engine(CacheSize(3, 2), [([1] * 5, 1), ([1] * 5, 1), ([2] * 5, 1), ([1] * 5, 1)])
    assert [(one.position, one.cached) for one in found.lookups] == [
        (LookupPosition(0, 0, 0), 0),
        (LookupPosition(0, 1, 0), 4),
        (LookupPosition(0, 1, 0), 0),
        (LookupPosition(0, 2, 0), 0),
    ]
    assert [len(batch) for batch in found.batches] == [1, 3, 3]
    return found


PROMPTS = st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=3, max_size=10), st.integers(1, 4)), min_size=4, max_size=12)
FULL = st.builds(CacheSize, st.integers(4, 12), st.integers(1, 3), st.just(0), st.none())
HYBRID = st.builds(CacheSize, st.integers(8, 20), st.integers(1, 3), st.just(0), st.integers(2, 8))
TIERED = st.builds(CacheSize, st.integers(4, 12), st.integers(1, 3), st.integers(1, 8), st.none())
STREAMS = st.builds(record_engine, st.one_of(FULL, HYBRID, TIERED), PROMPTS, st.integers(1, 3))
# After a lost event, the index lacks the window or the tokens of a copy in host memory; the plain mirror has them.
FULL_STREAMS = st.builds(record_engine, FULL, PROMPTS, st.integers(1, 3))


@settings(max_examples=60)
@given(STREAMS)
def test_a_true_stream_has_no_disagreement(stream: EngineRecording) -> None:
    assert run_audit(stream.make_audit(), make_deliveries(stream.batches)) == (len(stream.lookups), 0, 0)
    assert stream.wrong_lookups() == 0


@settings(max_examples=80)
@given(FULL_STREAMS, st.data())
def test_a_lost_event_is_detected_at_every_lookup_that_it_affects(stream: EngineRecording, data: st.DataObject) -> None:
    """The audit counts exactly the lookups for which a plain reader of the same events has another result."""
    if not stream.batches:
        return
    number = data.draw(st.integers(0, len(stream.batches) - 1))
    place = data.draw(st.integers(0, len(stream.batches[number]) - 1))
    stream.batches[number] = [event for other, event in enumerate(stream.batches[number]) if other != place]
    assert run_audit(stream.make_audit(), make_deliveries(stream.batches)) == (len(stream.lookups), stream.wrong_lookups(), 0)


@settings(max_examples=80)
@given(FULL_STREAMS, st.data())
def test_lookups_at_a_lost_batch_are_unproven_and_later_ones_detect_the_loss(
    stream: EngineRecording, data: st.DataObject
) -> None:
    """No gap is reported. Lookups at the lost batch do not count as checked, except those before its events."""
    if not stream.batches:
        return
    number = data.draw(st.integers(0, len(stream.batches) - 1))
    deliveries = make_deliveries(stream.batches)
    del deliveries[number]
    last = len(stream.batches) - 1
    # Lookups between its events; and lookups after it if no later batch shows that it is lost.
    lost = [
        (one.position.seq == number and one.position.event_index > 0) or (one.position.seq > number == last)
        for one in stream.lookups
    ]
    checked, wrong_lookups, unproven = run_audit(stream.make_audit(), deliveries)
    assert (checked, unproven) == (lost.count(False), lost.count(True))
    remaining = [one for one, is_lost in zip(stream.lookups, lost, strict=True) if not is_lost]
    batches = [events if other != number else [] for other, events in enumerate(stream.batches)]
    assert wrong_lookups == EngineRecording(stream.size, batches, remaining).wrong_lookups()


def test_dropping_any_event_of_the_small_stream_is_detected() -> None:
    """The dropped event is a store before a later hit, or a removal before a later miss."""
    for number, place in ((0, 0), (1, 0), (1, 1)):
        stream = record_small_stream()
        if number:
            # Both removals are dropped, because the first block of the prompt decides.
            stream.batches[1] = [event for event in stream.batches[1] if isinstance(event, BlockStored)]
        else:
            del stream.batches[number][place]
        assert run_audit(stream.make_audit(), make_deliveries(stream.batches))[1] > 0


def test_a_batch_that_is_applied_twice_is_detected() -> None:
    """Its blocks count twice, so the index still holds them after they are removed once."""
    stream = record_small_stream()
    deliveries = make_deliveries(stream.batches)
    assert run_audit(stream.make_audit(), [deliveries[0], *deliveries]) == (4, 1, 0)


def test_batches_of_another_incarnation_check_no_lookup() -> None:
    stream = record_small_stream()
    first, second, third = make_deliveries(stream.batches)
    assert run_audit(stream.make_audit(), [first, (second[0], 1), (third[0], 1)]) == (3, 0, 1)
    assert run_audit(stream.make_audit(), [(first[0], 1), (second[0], 1), (third[0], 1)]) == (1, 0, 3)


@pytest.mark.parametrize(("position", "wrong_lookups"), [(1, 0), (0, 1)])
def test_a_lookup_is_compared_between_two_events_of_a_batch(position: int, wrong_lookups: int) -> None:
    """Of two equal prompts in one step, the second finds what the first announces; it would find nothing before that event."""
    stream = record_engine(CacheSize(20, 2), [([1] * 5, 1), ([1] * 5, 1)], side_by_side=2)
    assert [(one.position, one.cached) for one in stream.lookups] == [
        (LookupPosition(0, 0, 0), 0),
        (LookupPosition(0, 0, 1), 4),
    ]
    moved = stream.lookups[1]
    stream.lookups[1] = EngineLookup(LookupPosition(0, 0, position), moved.sequence, moved.tokens, moved.cached)
    assert run_audit(stream.make_audit(), make_deliveries(stream.batches)) == (2, wrong_lookups, 0)


@given(st.sampled_from([-1, 1]))
def test_a_lookup_one_batch_too_early_or_too_late_is_detected(shift: int) -> None:
    """The cached prefix of the small stream exists only between its first two batches."""
    stream = record_small_stream()
    hit = stream.lookups.pop(1)
    stream.lookups = [EngineLookup(hit.position._replace(seq=hit.position.seq + shift), hit.sequence, hit.tokens, hit.cached)]
    assert run_audit(stream.make_audit(), make_deliveries(stream.batches)) == (1, 1, 0)


def test_an_index_with_wrong_answers_is_detected() -> None:
    """An example has the position, the engine's result and the index's result; at most ten are stored."""
    stream = record_small_stream()
    stream.batches[0] = []
    audit = stream.make_audit()
    run_audit(audit, make_deliveries(stream.batches))
    assert audit.counts.examples == [Disagreement(*WORKER, 0, 1, 0, 5, 4, 0)]
    many = EngineRecording(stream.size, stream.batches, [stream.lookups[1]] * 30)
    audit = many.make_audit()
    assert run_audit(audit, make_deliveries(stream.batches)) == (30, 30, 0)
    assert len(audit.counts.examples) == MAX_EXAMPLES


def test_lookups_in_a_stream_that_is_not_exact_are_unproven() -> None:
    """They count as neither agreement nor disagreement, also if they differ."""
    stream = record_small_stream()
    stream.batches[0] = []
    audit = stream.make_audit(exact=False)
    assert run_audit(audit, make_deliveries(stream.batches)) == (0, 0, 4)
    assert audit.counts.examples == []


def test_after_a_gap_batches_count_again() -> None:
    """Lookups in the gap are unproven; the batch after it is applied and not taken for a duplicate."""
    stream = record_engine(
        CacheSize(20, 2), [([number] * 5, 1) for number in (1, 2, 3)] + [([number] * 5, 1) for number in (3, 2, 1)]
    )
    first, _, third = make_deliveries(stream.batches)
    audit = stream.make_audit()
    audit.apply(*first)
    assert audit.apply(Gap(*WORKER, 1, 1)).status == "applied"
    assert audit.counts.unproven == 0, "the lookup before the gap was checked"
    assert audit.apply(*third).status == "applied"
    audit.finish()
    assert (audit.counts.checked, audit.counts.disagreements) == (6, 1), (
        "the engine has the second prompt in its cache, but the index does not"
    )


def test_lookups_inside_a_gap_are_unproven() -> None:
    stream = record_engine(CacheSize(40, 2), [([number // 2] * 5, 1) for number in range(8)], side_by_side=2)
    assert [one.position[1:] for one in stream.lookups] == [(n // 2, n % 2) for n in range(8)]
    first, _, _, last = make_deliveries(stream.batches)
    assert run_audit(stream.make_audit(), [first, (Gap(*WORKER, 1, 2), 0), last]) == (5, 0, 3)


def test_a_reset_checks_the_lookups_that_wait_for_no_batch_and_leaves_the_others_unproven() -> None:
    """A lookup that waits for nothing is compared before the index is cleared; one that waits for a lost batch never can be."""
    stream = record_small_stream()
    first, second, _ = make_deliveries(stream.batches)
    audit = stream.make_audit()
    audit.apply(*first)
    audit.expect(WORKER, EngineLookup(LookupPosition(1, 0, 0), stream.lookups[0].sequence, 5, 0))
    audit.apply(Reset(*WORKER, 1, "restarted"), 1)
    assert (audit.counts.checked, audit.counts.disagreements, audit.counts.unproven) == (3, 0, 1)
    audit.apply(RawBatch(*WORKER, 1, 0, False, second[0].payload if isinstance(second[0], RawBatch) else b""), 1)
    assert run_audit(audit, []) == (4, 0, 1)


def test_a_lookup_after_the_last_batch_is_compared_at_the_reset() -> None:
    """The lookup was expected after its batch had been applied, and only the reset followed."""
    stream = record_small_stream()
    audit = Audit(PrefixIndex())
    audit.add(WORKER)
    audit.apply(*make_deliveries(stream.batches)[0])
    audit.expect(WORKER, stream.lookups[1])
    audit.apply(Reset(*WORKER, 1, "restarted"), 1)
    assert run_audit(audit, []) == (1, 0, 0)


def test_a_new_incarnation_without_its_first_batches_leaves_their_lookups_unproven() -> None:
    """The gap comes right after the reset, so it is one of the new incarnation."""
    stream = record_small_stream()
    audit = stream.make_audit()
    lookups = [
        EngineLookup(one.position._replace(incarnation=1), one.sequence, one.tokens, one.cached) for one in stream.lookups
    ]
    for one in lookups:
        audit.expect(WORKER, one)
    deliveries = [
        *make_deliveries(stream.batches),
        (Reset(*WORKER, 1, "restarted"), 1),
        (Gap(*WORKER, 0, 1, 1), 1),
        (raw_batch(2, stream.batches[2], 1), 1),
    ]
    checked, wrong_lookups, unproven = run_audit(audit, deliveries)
    assert (checked + unproven, wrong_lookups) == (8, 0)
    assert unproven == 2, "the lookups at (1, 1, 0); the one at (1, 0, 0) found nothing, which is right after the reset"


def test_lookups_that_still_wait_at_the_end_are_unproven() -> None:
    stream = record_small_stream()
    assert run_audit(stream.make_audit(), make_deliveries(stream.batches)[:1]) == (3, 0, 1)
    assert run_audit(stream.make_audit(), []) == (1, 0, 3)


def test_parts_of_a_batch_are_reported_as_one() -> None:
    """The report has the status, the rejected events, and whether any part had a clear."""
    stream = record_engine(CacheSize(20, 2), [([1] * 5, 1), ([1] * 5, 1)], side_by_side=2)
    audit = stream.make_audit()
    assert audit.apply(*make_deliveries(stream.batches)[0]) == ApplyResult("applied")
    assert audit.index.stats().blocks == 2
    audit = Audit(PrefixIndex())
    audit.add(WORKER)
    for position in (1, 2):
        audit.expect(WORKER, EngineLookup(LookupPosition(0, 0, position), stream.lookups[0].sequence, 5, 4 * (position - 1)))
    assert audit.apply(raw_batch(0, [AllBlocksCleared(), *stream.batches[0]])) == ApplyResult(
        "applied", BatchReport(cleared=True)
    )
    assert run_audit(audit, []) == (2, 0, 0)


def test_a_decoded_batch_is_accepted_too() -> None:
    stream = record_small_stream()
    audit = stream.make_audit()
    for delivery, engine_incarnation in make_deliveries(stream.batches):
        assert isinstance(delivery, RawBatch)
        decoded = delivery.decode()
        assert isinstance(decoded, Batch)
        audit.apply(decoded, engine_incarnation)
    assert run_audit(audit, []) == (4, 0, 0)


def test_the_small_stream_removes_before_it_stores() -> None:
    assert [type(event) for event in record_small_stream().batches[1]] == [BlockRemoved, BlockRemoved, BlockStored]
