"""The subscriber of a plane's partitions: its deliveries, and their trust."""

from __future__ import annotations

import pytest

from kvevents.errors import UnknownSourceError
from kvevents.events import AllBlocksCleared, BlockStored, EventBatch, Heartbeat
from kvevents.index import PrefixIndex
from kvevents.plane.log_subscriber import LogSubscriber
from kvevents.plane.partition_state import PartitionState
from kvevents.plane.records import (
    MAX_HEARTBEAT_SECONDS,
    MISSED_HEARTBEATS,
    BatchRecord,
    GapRecord,
    HeartbeatRecord,
    IncarnationRecord,
    JoinRecord,
    LeaveRecord,
    ResetRecord,
    TrustRecord,
)
from kvevents.plane.settings import ReaderLimits
from kvevents.publisher.compaction import Compactor, encode_snapshot
from kvevents.stream import BatchReport, DegradedReason, Gap, Trust
from kvevents.wire import Rejected, encode_batch
from kvevents.wire.encode import batch_encoder
from plane_subscriber_cases import pushed, subscriber


def test_what_a_bridge_doubts_is_in_the_status() -> None:
    """So that a replica's reason has the same codes as the bridge's. Names of later releases are left out."""
    found = subscriber()
    said = TrustRecord("engine", 0, "bridge", "DEGRADED", "some sentence", {"IDENTITY": 7, "INVENTED_LATER": 7})
    found.put(0, [pushed(1, JoinRecord("engine", 0, b""), HeartbeatRecord("bridge", 1.0, 0.0), said)])
    found.receive_many(timeout=0.0)
    status = found.status("engine", 0)
    assert (status.trust, status.trust.reason) == (Trust.DEGRADED, "some sentence")
    assert status.degraded_reasons == {DegradedReason.IDENTITY}


def test_a_partition_is_complete_once_its_end_was_read() -> None:
    """What the servers had behind a page when they sent it says so; a quiet partition's reader does where no page comes."""
    found = subscriber(partitions=2)
    assert not found.is_complete(0)
    found.put(0, [pushed(1, pending=1)])
    found.report_progress(1, 0, "")  # while something is in the queue, its partition is not known
    found.receive_many(timeout=0.0)
    assert not found.is_complete(0)
    assert not found.is_complete(1)
    found.report_progress(1, 0, "")
    assert found.is_complete(1)
    found.put(0, [pushed(2)])
    found.receive_many(timeout=0.0)
    assert found.is_complete(0)
    found.put(0, [pushed(3, pending=7)])
    found.receive_many(timeout=0.0)
    assert found.is_complete(0), "it was at its end once"


def test_a_stream_is_not_exact_before_the_end_of_its_partition_was_read() -> None:
    """Few missing pages are as bad as many if no reader has ever had them."""
    found = subscriber()
    records = (
        JoinRecord("engine", 0, b""),
        HeartbeatRecord("bridge", 1.0, 0.0),
        TrustRecord("engine", 0, "bridge", "EXACT", "", {}),
    )
    found.put(0, [pushed(1, *records, pending=1)])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.REPLAYING
    found.put(0, [pushed(2)])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.EXACT


@pytest.mark.parametrize("compacted", [True, False])
def test_numbers_that_a_snapshot_represents_are_not_lost_to_readers_of_the_log(compacted: bool) -> None:
    """The record says so: such a gap is delivered as one, counted apart, and the stream is not doubted for it."""
    found = subscriber()
    clear = encode_batch(EventBatch(0.0, [AllBlocksCleared()]))
    records = (
        JoinRecord("engine", 0, b""),
        HeartbeatRecord("bridge", 1.0, 0.0),
        GapRecord("engine", 0, 0, 0, 4, compacted),
        BatchRecord("engine", 0, 0, 5, True, clear),
        TrustRecord("engine", 0, "bridge", "EXACT", "", {}),
    )
    found.put(0, [pushed(1, *records)])
    gap, batch = found.receive_many(timeout=0.0)
    assert gap == Gap("engine", 0, 0, 4, compacted=compacted)
    counters = found.status("engine").counters
    assert (counters.compacted, counters.gaps, counters.lost) == ((5, 0, 0) if compacted else (0, 1, 5))
    assert found.trust("engine") == (Trust.REPLAYING if compacted else Trust.DEGRADED), "the snapshot is not in the index yet"
    index = PrefixIndex()
    found.report(batch, index.apply(batch).report)
    assert found.trust("engine") == Trust.EXACT


def test_a_partition_that_is_let_go_leaves_nothing_behind_and_may_come_again() -> None:
    """Pages of the first subscription that still arrive do not belong to the second."""
    found = subscriber(partitions=2)
    found.put(0, [pushed(1, JoinRecord("engine", 0, b"card"), BatchRecord("engine", 0, 0, 0, False, b"x"))])
    found.put(1, [pushed(1, JoinRecord("other", 0, b"card"))])
    assert len(found.receive_many(timeout=0.0)) == 1
    found.put(0, [pushed(2, BatchRecord("engine", 0, 0, 1, False, b"y"))])
    found.put(1, [pushed(2, BatchRecord("other", 0, 0, 0, False, b"z"))])
    assert found.drop_partition(0) == [("engine", 0)]
    assert list(found.registrations) == [("other", 0)]
    with pytest.raises(UnknownSourceError):
        found.trust("engine")
    found.report_progress(0, 0, "")
    assert not found.is_complete(0)
    found.add_partition(0, PartitionState(), {})
    assert [each.source for each in found.receive_many(timeout=0.0)] == ["other"]
    assert found.queued_bytes == 0
    found.put(0, [pushed(1, JoinRecord("engine", 0, b"card"), BatchRecord("engine", 0, 0, 0, False, b"x"))])
    assert [each.source for each in found.receive_many(timeout=0.0)] == ["engine"]
    assert set(found.partitions) == {0, 1}


def test_a_partition_that_is_always_a_little_behind_can_be_trusted() -> None:
    """While much is written some pages are always on their way; more than some are a log that is being read."""
    found = subscriber()
    records = (
        JoinRecord("engine", 0, b""),
        HeartbeatRecord("bridge", 1.0, 0.0),
        TrustRecord("engine", 0, "bridge", "EXACT", "", {}),
    )
    found.put(0, [pushed(1, *records), pushed(2, pending=ReaderLimits().max_lag_pages)])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.EXACT
    found.put(0, [pushed(3, pending=ReaderLimits().max_lag_pages + 1)])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.REPLAYING


def test_members_are_replaced_as_a_whole() -> None:
    """Who looks at them from another thread sees those of one moment, and knows by identity whether they are others."""
    found = subscriber()
    before = found.registrations
    found.put(0, [pushed(1, JoinRecord("engine", 0, b"card"), JoinRecord("other", 1, b""))])
    found.receive_many(timeout=0.0)
    joined = found.registrations
    found.put(0, [pushed(2, HeartbeatRecord("bridge", 1.0, 0.0)), pushed(3, LeaveRecord("other", 1, "gone"))])
    assert found.queued_bytes > 0
    found.receive_many(timeout=0.0)
    assert (before, joined, found.registrations) == ({}, {("engine", 0): b"card", ("other", 1): b""}, {("engine", 0): b"card"})
    assert found.queued_bytes == 0


def test_what_a_stream_held_ends_with_its_leaving_even_where_it_joins_at_once() -> None:
    """Who looks at members may never see it away: its former blocks would be there, and a bridge that follows it is EXACT."""
    found, index = subscriber(), PrefixIndex()
    payload = encode_batch(EventBatch(0.0, [BlockStored([1, 2], None, list(range(8)), 4)]))
    found.put(0, [pushed(1, JoinRecord("engine", 0, b"card"), BatchRecord("engine", 0, 0, 0, False, payload))])
    index.apply_many(found.receive_many(timeout=0.0))
    assert index.stats().blocks == 2
    cards = found.registrations
    again = (LeaveRecord("engine", 0, "dead"), JoinRecord("engine", 0, b"card"), HeartbeatRecord("bridge", 1.0, 0.0))
    found.put(0, [pushed(2, *again, TrustRecord("engine", 0, "bridge", "EXACT", "", {}))])
    index.apply_many(found.receive_many(timeout=0.0))
    assert found.registrations == cards
    assert (found.trust("engine"), found.status("engine").last_seq, index.stats().blocks) == (Trust.EXACT, -1, 0)
    found.put(0, [pushed(3, IncarnationRecord("engine", 0, 1, "new"), BatchRecord("engine", 0, 1, 0, False, payload))])
    index.apply_many(found.receive_many(timeout=0.0))
    assert index.stats().blocks == 2
    found.put(0, [pushed(4, ResetRecord(5, "purged"), JoinRecord("engine", 0, b"card"))])
    index.apply_many(found.receive_many(timeout=0.0))
    assert index.stats().blocks == 0
    found.put(0, [pushed(5, BatchRecord("engine", 0, 5, 0, False, payload))])
    index.apply_many(found.receive_many(timeout=0.0))
    assert index.stats().blocks == 2


CLEAR = encode_batch(EventBatch(0.0, [AllBlocksCleared()]))
BEATS = (HeartbeatRecord("bridge", 1.0, 0.0), HeartbeatRecord("reserve", 1.0, 0.0))


def said(bridge: str, trust: str) -> TrustRecord:
    return TrustRecord("engine", 0, bridge, trust, "", {})


def followed() -> LogSubscriber:
    """A stream with one batch, of which two bridges say that it is EXACT."""
    found = subscriber()
    first = batched(0, encode_batch(EventBatch(0.0, [])))
    found.put(0, [pushed(1, JoinRecord("engine", 0, b""), *BEATS, first, said("bridge", "EXACT"), said("reserve", "EXACT"))])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.EXACT
    return found


def batched(seq: int, payload: bytes, incarnation: int = 0) -> BatchRecord:
    return BatchRecord("engine", 0, incarnation, seq, False, payload)


@pytest.mark.parametrize("report", [BatchReport(cleared=True), BatchReport(digest_matches=True)])
def test_a_report_ends_no_doubt_that_is_newer_than_its_batch(report: BatchReport) -> None:
    """Many batches are read before the first of them is applied: what is missing behind it is missing still."""
    found = followed()
    lost = GapRecord("engine", 0, 0, 2, 4)
    found.put(0, [pushed(2, batched(1, CLEAR), lost, batched(5, CLEAR))])
    first, gap, later = found.receive_many(timeout=0.0)
    assert isinstance(gap, Gap)
    found.report(first, report)
    assert found.status("engine").degraded_reasons == {DegradedReason.LOST}
    found.report(later, report)
    assert found.trust("engine") == Trust.EXACT


def test_a_report_of_a_life_that_has_ended_says_nothing_of_the_next_one() -> None:
    found = followed()
    renewed = (IncarnationRecord("engine", 0, 1, "restart"), batched(0, b"y", 1), said("bridge", "EXACT"))
    found.put(0, [pushed(2, batched(1, b"x"), *renewed)])
    old, _, new = found.receive_many(timeout=0.0)
    found.report(old, BatchReport(digest_matches=False, rejected=(Rejected("tag", "Other"),)))
    assert (found.trust("engine"), found.diverged) == (Trust.EXACT, 0)
    found.report(new, BatchReport(digest_matches=False))
    assert found.status("engine").degraded_reasons == {DegradedReason.DIVERGED}
    found.report(old, BatchReport(cleared=True, digest_matches=True))
    assert found.status("engine").degraded_reasons == {DegradedReason.DIVERGED}
    assert found.diverged == 1


def test_a_report_of_a_stream_that_has_left_does_not_wait_for_it_to_come_back() -> None:
    found = followed()
    found.put(
        0,
        [pushed(2, batched(1, b"x"), LeaveRecord("engine", 0, "gone"), JoinRecord("engine", 0, b""), said("bridge", "EXACT"))],
    )
    old, _ = found.receive_many(timeout=0.0)
    found.report(old, BatchReport(digest_matches=False))
    assert found.trust("engine") == Trust.EXACT


def snapshot_parts() -> list[bytes]:
    """As a publisher sends one that does not fit into a batch."""
    history = Compactor.create()
    assert history is not None
    for number in range(16):
        hashes, tokens = range(number * 100, number * 100 + 40), range(number * 1_000, number * 1_000 + 160)
        history.append(encode_batch(EventBatch(0.0, [BlockStored(list(hashes), None, list(tokens), 4)])))
    held = history.events()
    assert held is not None
    parts = encode_snapshot(held, 0.0, 0, batch_encoder(None), 6_000, 77)
    assert parts is not None
    assert len(parts) > 2
    return parts


def test_a_snapshot_in_parts_is_not_exact_before_its_last_part_is_in_the_index() -> None:
    """Even where another bridge, which has lost nothing, says that the stream is: readers hold what the log says."""
    found, index, parts = followed(), PrefixIndex(), snapshot_parts()
    records = (said("bridge", "REPLAYING"), GapRecord("engine", 0, 0, 1, 7, True))
    found.put(0, [pushed(2, *records)])
    trusts = []
    for position, part in enumerate(parts, 3):
        found.put(0, [pushed(position, batched(position + 5, part))])
        for delivery in found.receive_many(timeout=0.0):
            trusts.append(found.trust("engine"))
            found.report(delivery, index.apply(delivery).report)
            trusts.append(found.trust("engine"))
    assert trusts[:-1] == [Trust.REPLAYING] * (len(trusts) - 1)
    assert trusts[-1] == Trust.EXACT


def test_a_snapshot_of_a_replica_that_has_read_a_part_knows_that_others_are_to_come() -> None:
    """Who begins with it is EXACT no sooner, whatever it was between: the gap and the first part, or two parts."""
    for count in (0, 1, 2):
        found, index, parts = followed(), PrefixIndex(), snapshot_parts()
        found.put(0, [pushed(2, GapRecord("engine", 0, 0, 1, 7, True))])
        read(found, index)
        for position, part in enumerate(parts, 3):
            if position == 3 + count:
                state, doubts = found.states[0], found.doubts()
                found = LogSubscriber(lambda: 0.0, lambda _: None)
                found.add_partition(0, state, doubts)
            assert position == 3 + count or found.trust("engine") != Trust.EXACT
            found.put(0, [pushed(position, batched(position + 5, part), *BEATS)])
            read(found, index)
        assert found.trust("engine") == Trust.EXACT


def read(found: LogSubscriber, index: PrefixIndex) -> None:
    for delivery in found.receive_many(timeout=0.0):
        found.report(delivery, index.apply(delivery).report)


def test_an_engine_that_does_not_trust_itself_is_doubted_by_the_replica_as_well() -> None:
    """A bridge that has not received its newest heartbeat still reports EXACT."""
    found = followed()
    for seq, trust in ((1, "EXACT"), (2, "DEGRADED"), (3, "EXACT")):
        found.put(0, [pushed(seq + 1, batched(seq, b"x"))])
        (batch,) = found.receive_many(timeout=0.0)
        found.report(batch, BatchReport(heartbeat=Heartbeat("0" * 32, 60.0, trust), digest_matches=True))
        assert found.trust("engine").name == trust
        assert found.status("engine").degraded_reasons == ({DegradedReason.SENDER} if trust == "DEGRADED" else set())


def test_a_partition_that_is_broken_stays_so_while_pages_of_it_wait() -> None:
    """They may be wrong as well, and what the reader says afterwards changes nothing. A partition that is begun again is
    whole."""
    found = followed()
    found.put(0, [pushed(2, batched(1, b"x"))])
    found.mark_broken(0, "partition 0 was disputed")
    found.receive_many(timeout=0.0)
    assert "disputed" in found.trust("engine").reason
    found.report_progress(0, 0, "")
    assert found.trust("engine") == Trust.STALE
    found.drop_partition(0)
    found.add_partition(0, PartitionState(), {})
    assert (found.partitions[0].fault, found.partitions[0].is_broken) == ("", False)
    found.mark_broken(7, "it is not held")
    assert set(found.partitions) == {0}


def test_a_fault_that_passes_is_over_with_the_next_page() -> None:
    found = followed()
    found.report_progress(0, None, "no leader")
    assert found.trust("engine") == Trust.STALE
    found.put(0, [pushed(2)])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.EXACT


def test_no_bridge_is_believed_to_be_alive_for_longer_than_beats_may_be_apart() -> None:
    """Whatever it promises; bridges go by the same time."""
    now = 0.0
    found = LogSubscriber(lambda: now, lambda _: None)
    found.add_partition(0, PartitionState(), {})
    found.put(0, [pushed(1, JoinRecord("engine", 0, b""), HeartbeatRecord("bridge", 3_600.0, 0.0), said("bridge", "EXACT"))])
    found.receive_many(timeout=0.0)
    now = MISSED_HEARTBEATS * MAX_HEARTBEAT_SECONDS - 1
    assert found.trust("engine") == Trust.EXACT
    now += 1
    assert found.trust("engine") == Trust.STALE


@pytest.mark.parametrize(("digest_matches", "diverged"), [(True, 0), (None, 1)])
def test_an_attestation_is_about_the_index_only_if_no_digest_says_otherwise(digest_matches: bool | None, diverged: int) -> None:
    """An index with the engine's digest is what the log says, so building it again would not help."""
    found = followed()
    found.put(0, [pushed(2, batched(1, b"x"), batched(2, b"y"), batched(3, b"z"))])
    first, second, third = found.receive_many(timeout=0.0)
    found.report(first, BatchReport(digest_matches=True, attestation_matches=True))
    assert (found.trust("engine"), found.trust("engine").attested) == (Trust.EXACT, True)
    found.report(second, BatchReport(digest_matches=digest_matches, attestation_matches=False))
    assert found.status("engine").degraded_reasons == {DegradedReason.UNATTESTED}
    assert found.trust("engine").reason == "the engine's own cache differs from the log"
    found.report(third, BatchReport(attestation_matches=True))
    assert found.trust("engine").attested
    assert found.diverged == diverged
