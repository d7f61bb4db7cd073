"""The subscriber of the partitions of a plane returns deliveries and their trust."""

from __future__ import annotations

import pytest

from kvevents.errors import UnknownSourceError
from kvevents.events import AllBlocksCleared, BlockStored, EventBatch, Heartbeat
from kvevents.index import PrefixIndex
from kvevents.publisher.compaction import Compactor, encode_snapshot
from kvevents.stream import BatchReport, DegradedReason, Gap, Trust
from kvevents.wire import Rejected, dialect_for, encode_batch
from kvevents.wire.encode import batch_encoder
from kvevents_plane.log_subscriber import LogSubscriber
from kvevents_plane.partition_state import PartitionState
from kvevents_plane.records import (
    MAX_HEARTBEAT_SECONDS,
    MISSED_HEARTBEATS,
    BatchRecord,
    GapRecord,
    HeartbeatRecord,
    IncarnationRecord,
    JoinRecord,
    LeaveRecord,
    Record,
    ResetRecord,
    TrustRecord,
)
from kvevents_plane.settings import ReaderLimits
from plane_subscriber_cases import add_partition, make_message, subscriber


def test_the_degraded_reasons_of_a_bridge_are_in_the_status() -> None:
    """A replica reports the same reason codes as the bridge. Names of later releases are ignored."""
    found = subscriber()
    trust_record = TrustRecord("engine", 0, "bridge", "DEGRADED", "some sentence", {"IDENTITY": 7, "INVENTED_LATER": 7})
    found.put(0, [make_message(1, JoinRecord("engine", 0, b""), HeartbeatRecord("bridge", 1.0), trust_record)])
    found.receive_many(timeout=0.0)
    status = found.status("engine", 0)
    assert (status.trust, status.trust.reason) == (Trust.DEGRADED, "some sentence")
    assert status.degraded_reasons == {DegradedReason.IDENTITY}


def test_a_partition_is_complete_once_its_end_was_read() -> None:
    """The number of pending pages, which each page has, shows the end. The reader reports it for a quiet partition."""
    found = LogSubscriber(lambda: 0.0, lambda _: None)
    for partition in (0, 1):
        found.add_partition(partition, PartitionState(), {})
    assert not found.is_complete(0)
    found.put(0, [make_message(1, pending=1)])
    found.report_progress(1, 0, "")  # ignored: while a page is queued, its partition is unknown
    found.receive_many(timeout=0.0)
    assert not found.is_complete(0)
    assert not found.is_complete(1)
    found.report_progress(1, 0, "")
    assert found.is_complete(1)
    found.put(0, [make_message(2)])
    found.receive_many(timeout=0.0)
    assert found.is_complete(0)
    found.put(0, [make_message(3, pending=7)])
    found.receive_many(timeout=0.0)
    assert found.is_complete(0), "the end was read once"


def test_a_stream_is_not_exact_before_the_end_of_its_partition_was_read() -> None:
    """Even a single pending page matters if the reader has never read the end. Heartbeats before it can be of any age."""
    found = LogSubscriber(lambda: 0.0, lambda _: None)
    found.add_partition(0, PartitionState(), {})
    records = (
        JoinRecord("engine", 0, b""),
        HeartbeatRecord("bridge", 1.0),
        TrustRecord("engine", 0, "bridge", "EXACT", "", {}),
    )
    found.put(0, [make_message(1, *records, pending=1)])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.REPLAYING
    found.put(0, [make_message(2, HeartbeatRecord("bridge", 1.0))])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.STALE
    found.put(0, [make_message(3, HeartbeatRecord("bridge", 1.0))])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.EXACT


def test_an_exact_stream_has_a_bounded_age() -> None:
    """Heartbeats count from when they were received, even if they are applied later, and pages must arrive in time."""
    now = 0.0
    found = LogSubscriber(lambda: now, lambda _: None)
    add_partition(found, 0, PartitionState())
    records = (JoinRecord("engine", 0, b""), TrustRecord("engine", 0, "bridge", "EXACT", "", {}))
    found.put(0, [make_message(1, *records, HeartbeatRecord("bridge", 0.5))])
    now = 1.4
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.EXACT
    now = 1.6
    assert found.trust("engine") == Trust.STALE
    for position in range(2, 12):
        found.put(0, [make_message(position, HeartbeatRecord("bridge", 0.5), pending=3)])
        found.receive_many(timeout=0.0)
        assert found.trust("engine") == Trust.EXACT, "the pages of a busy partition arrive in time"
        now += 0.4
    now += 1.0
    found.put(0, [make_message(12, HeartbeatRecord("bridge", 0.5), pending=3)])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.REPLAYING


@pytest.mark.parametrize("compacted", [True, False])
def test_a_compacted_gap_is_counted_apart_and_does_not_degrade_the_stream(compacted: bool) -> None:
    """The record marks the gap as compacted, so that it is delivered as a compacted gap and counts as no loss."""
    found = subscriber()
    clear = encode_batch(EventBatch(0.0, [AllBlocksCleared()]))
    records = (
        JoinRecord("engine", 0, b""),
        HeartbeatRecord("bridge", 1.0),
        GapRecord("engine", 0, 0, 0, 4, compacted),
        BatchRecord("engine", 0, 0, 5, True, clear),
        TrustRecord("engine", 0, "bridge", "EXACT", "", {}),
    )
    found.put(0, [make_message(1, *records)])
    gap, batch = found.receive_many(timeout=0.0)
    assert gap == Gap("engine", 0, 0, 4, compacted=compacted)
    counters = found.status("engine").counters
    assert (counters.compacted, counters.gaps, counters.lost) == ((5, 0, 0) if compacted else (0, 1, 5))
    assert found.trust("engine") == (Trust.REPLAYING if compacted else Trust.DEGRADED), "the snapshot is not in the index yet"
    index = PrefixIndex()
    found.report(batch, index.apply(batch).report)
    assert found.trust("engine") == Trust.EXACT


def test_a_partition_that_is_added_again_keeps_nothing() -> None:
    """Pages for the first state that still arrive do not belong to the second."""
    found = subscriber(partitions=2)
    found.put(0, [make_message(1, JoinRecord("engine", 0, b"card"), BatchRecord("engine", 0, 0, 0, False, b"x"))])
    found.put(1, [make_message(1, JoinRecord("other", 0, b"card"))])
    assert len(found.receive_many(timeout=0.0)) == 1
    found.put(0, [make_message(2, BatchRecord("engine", 0, 0, 1, False, b"y"))])
    found.put(1, [make_message(2, BatchRecord("other", 0, 0, 0, False, b"z"))])
    found.add_partition(0, PartitionState(), {})
    assert list(found.registrations) == [("other", 0)]
    with pytest.raises(UnknownSourceError):
        found.trust("engine")
    assert not found.is_complete(0)
    assert [each.source for each in found.receive_many(timeout=0.0)] == ["other"]
    assert found.queued_bytes == 0
    found.put(0, [make_message(1, JoinRecord("engine", 0, b"card"), BatchRecord("engine", 0, 0, 0, False, b"x"))])
    assert [each.source for each in found.receive_many(timeout=0.0)] == ["engine"]
    assert set(found.partitions) == {0, 1}


def test_a_partition_with_pending_pages_can_be_exact_for_a_limited_time() -> None:
    """While much is written, some pages are always pending. Their age says whether the reader is catching up."""
    now = 0.0
    found = LogSubscriber(lambda: now, lambda _: None)
    found.add_partition(0, PartitionState(), {})
    found.put(0, [make_message(1)])
    found.receive_many(timeout=0.0)
    heartbeat = HeartbeatRecord("bridge", 10.0)
    records = (JoinRecord("engine", 0, b""), heartbeat, TrustRecord("engine", 0, "bridge", "EXACT", "", {}))
    found.put(0, [make_message(2, *records, pending=1_000)])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.EXACT
    now = ReaderLimits().max_lag_seconds + 0.1
    found.put(0, [make_message(position, pending=1_000) for position in range(3, 900)])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.REPLAYING
    found.put(0, [make_message(position, pending=1_000) for position in range(900, 1_003)])
    while found.queued_bytes:
        found.receive_many(timeout=0.0)
    assert found.trust("engine").name == "EXACT"


def test_registrations_are_replaced_as_a_whole() -> None:
    """Another thread sees the registrations of one moment, and recognises a change by their identity."""
    found = subscriber()
    before = found.registrations
    found.put(0, [make_message(1, JoinRecord("engine", 0, b"card"), JoinRecord("other", 1, b""))])
    found.receive_many(timeout=0.0)
    joined = found.registrations
    found.put(0, [make_message(2, HeartbeatRecord("bridge", 1.0)), make_message(3, LeaveRecord("other", 1, "gone"))])
    assert found.queued_bytes > 0
    found.receive_many(timeout=0.0)
    assert (before, joined, found.registrations) == ({}, {("engine", 0): b"card", ("other", 1): b""}, {("engine", 0): b"card"})
    assert found.queued_bytes == 0


def test_the_blocks_of_a_stream_that_leaves_are_removed_even_if_it_joins_again_at_once() -> None:
    """A reader of the registrations might never see it absent. Its old blocks would stay, while its bridge reports EXACT."""
    found, index = subscriber(), PrefixIndex()
    payload = encode_batch(EventBatch(0.0, [BlockStored([1, 2], None, list(range(8)), 4)]))
    found.put(0, [make_message(1, JoinRecord("engine", 0, b"card"), BatchRecord("engine", 0, 0, 0, False, payload))])
    index.apply_many(found.receive_many(timeout=0.0))
    assert index.stats().blocks == 2
    cards = found.registrations
    again = (LeaveRecord("engine", 0, "dead"), JoinRecord("engine", 0, b"card"), HeartbeatRecord("bridge", 1.0))
    found.put(0, [make_message(2, *again, TrustRecord("engine", 0, "bridge", "EXACT", "", {}))])
    index.apply_many(found.receive_many(timeout=0.0))
    assert found.registrations == cards
    assert (found.trust("engine"), found.status("engine").last_seq, index.stats().blocks) == (Trust.EXACT, -1, 0)
    found.put(0, [make_message(3, IncarnationRecord("engine", 0, 1, "new"), BatchRecord("engine", 0, 1, 0, False, payload))])
    index.apply_many(found.receive_many(timeout=0.0))
    assert index.stats().blocks == 2
    found.put(0, [make_message(4, ResetRecord(5, "purged"), JoinRecord("engine", 0, b"card"))])
    index.apply_many(found.receive_many(timeout=0.0))
    assert index.stats().blocks == 0
    found.put(0, [make_message(5, BatchRecord("engine", 0, 5, 0, False, payload))])
    index.apply_many(found.receive_many(timeout=0.0))
    assert index.stats().blocks == 2


CLEAR = encode_batch(EventBatch(0.0, [AllBlocksCleared()]))
HEARTBEATS = (HeartbeatRecord("bridge", 1.0), HeartbeatRecord("other", 1.0))


def trust_record(bridge: str, trust: str) -> TrustRecord:
    return TrustRecord("engine", 0, bridge, trust, "", {})


def subscriber_of_exact_stream() -> LogSubscriber:
    """Return a subscriber of a stream with one batch, which two bridges report as EXACT."""
    found = subscriber()
    first = batch_record(0, encode_batch(EventBatch(0.0, [])))
    found.put(
        0,
        [
            make_message(
                1,
                JoinRecord("engine", 0, b""),
                *HEARTBEATS,
                first,
                trust_record("bridge", "EXACT"),
                trust_record("other", "EXACT"),
            )
        ],
    )
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.EXACT
    return found


def batch_record(seq: int, payload: bytes, incarnation: int = 0) -> BatchRecord:
    return BatchRecord("engine", 0, incarnation, seq, False, payload)


@pytest.mark.parametrize("report", [BatchReport(cleared=True), BatchReport(digest_matches=True)])
def test_a_report_ends_no_degraded_reason_that_is_newer_than_its_batch(report: BatchReport) -> None:
    """Many batches are read before the first of them is applied. What is missing after that batch is still missing."""
    found = subscriber_of_exact_stream()
    lost = GapRecord("engine", 0, 0, 2, 4)
    found.put(0, [make_message(2, batch_record(1, CLEAR), lost, batch_record(5, CLEAR))])
    first, gap, later = found.receive_many(timeout=0.0)
    assert isinstance(gap, Gap)
    found.report(first, report)
    assert found.status("engine").degraded_reasons == {DegradedReason.LOST}
    found.report(later, report)
    assert found.trust("engine") == Trust.EXACT


def test_a_report_about_an_ended_incarnation_does_not_affect_the_next_one() -> None:
    found = subscriber_of_exact_stream()
    renewed = (IncarnationRecord("engine", 0, 1, "restart"), batch_record(0, b"y", 1), trust_record("bridge", "EXACT"))
    found.put(0, [make_message(2, batch_record(1, b"x"), *renewed)])
    old, _, new = found.receive_many(timeout=0.0)
    found.report(old, BatchReport(digest_matches=False, rejected=(Rejected("tag", "Other"),)))
    assert (found.trust("engine"), found.diverged) == (Trust.EXACT, 0)
    found.report(new, BatchReport(digest_matches=False))
    assert found.status("engine").degraded_reasons == {DegradedReason.DIVERGED}
    found.report(old, BatchReport(cleared=True, digest_matches=True))
    assert found.status("engine").degraded_reasons == {DegradedReason.DIVERGED}
    assert found.diverged == 1


def test_a_report_about_a_stream_that_has_left_does_not_affect_it_after_it_joins_again() -> None:
    found = subscriber_of_exact_stream()
    found.put(
        0,
        [
            make_message(
                2,
                batch_record(1, b"x"),
                LeaveRecord("engine", 0, "gone"),
                JoinRecord("engine", 0, b""),
                trust_record("bridge", "EXACT"),
            )
        ],
    )
    old, _ = found.receive_many(timeout=0.0)
    found.report(old, BatchReport(digest_matches=False))
    assert found.trust("engine") == Trust.EXACT


def snapshot_parts() -> list[bytes]:
    """Return the parts in which a publisher sends a snapshot that does not fit in one batch."""
    history = Compactor.create()
    assert history is not None
    for number in range(16):
        hashes, tokens = range(number * 100, number * 100 + 40), range(number * 1_000, number * 1_000 + 160)
        history.append(encode_batch(EventBatch(0.0, [BlockStored(list(hashes), None, list(tokens), 4)])))
    pieces = history.snapshot_pieces(6_000)
    assert pieces is not None
    parts = encode_snapshot(pieces, 0.0, 0, batch_encoder(dialect_for("vllm")), 6_000, 77)
    assert parts is not None
    assert len(parts) > 2
    return parts


def test_a_snapshot_in_parts_is_not_exact_before_its_last_part_is_in_the_index() -> None:
    """This holds even if another bridge, which has lost nothing, reports EXACT: readers hold what the log contains."""
    found, index, parts = subscriber_of_exact_stream(), PrefixIndex(), snapshot_parts()
    records = (trust_record("bridge", "REPLAYING"), GapRecord("engine", 0, 0, 1, 7, True))
    found.put(0, [make_message(2, *records)])
    trusts = []
    for position, part in enumerate(parts, 3):
        found.put(0, [make_message(position, batch_record(position + 5, part))])
        for delivery in found.receive_many(timeout=0.0):
            trusts.append(found.trust("engine"))
            found.report(delivery, index.apply(delivery).report)
            trusts.append(found.trust("engine"))
    assert trusts[:-1] == [Trust.REPLAYING] * (len(trusts) - 1)
    assert trusts[-1] == Trust.EXACT


def test_a_replica_snapshot_between_the_parts_of_a_publisher_snapshot_is_not_exact() -> None:
    """A reader that begins with it is EXACT only after the last part, whether it was taken after the gap or after a part."""
    for count in (0, 1, 2):
        found, index, parts = subscriber_of_exact_stream(), PrefixIndex(), snapshot_parts()
        found.put(0, [make_message(2, GapRecord("engine", 0, 0, 1, 7, True))])
        apply_deliveries(found, index)
        for position, part in enumerate(parts, 3):
            if position == 3 + count:
                state, degraded_reasons = found.states[0], found.degraded_reasons()
                found = LogSubscriber(lambda: 0.0, lambda _: None)
                add_partition(found, 0, state, degraded_reasons)
            assert position == 3 + count or found.trust("engine") != Trust.EXACT
            found.put(0, [make_message(position, batch_record(position + 5, part), *HEARTBEATS)])
            apply_deliveries(found, index)
        assert found.trust("engine") == Trust.EXACT


def apply_deliveries(found: LogSubscriber, index: PrefixIndex) -> None:
    for delivery in found.receive_many(timeout=0.0):
        found.report(delivery, index.apply(delivery).report)


def test_an_engine_that_reports_degraded_is_degraded_at_the_replica() -> None:
    """A bridge that has not received its newest heartbeat still reports EXACT."""
    found = subscriber_of_exact_stream()
    for seq, trust in ((1, "EXACT"), (2, "DEGRADED"), (3, "EXACT")):
        found.put(0, [make_message(seq + 1, batch_record(seq, b"x"))])
        (batch,) = found.receive_many(timeout=0.0)
        found.report(batch, BatchReport(heartbeat=Heartbeat("0" * 32, 60.0, trust), digest_matches=True))
        assert found.trust("engine").name == trust
        assert found.status("engine").degraded_reasons == ({DegradedReason.SENDER} if trust == "DEGRADED" else set())


def test_a_broken_partition_stays_broken_until_it_is_added_again() -> None:
    """Queued pages might be wrong as well, and later reports of the reader change nothing. A partition that is added again is
    not broken."""
    found = subscriber_of_exact_stream()
    found.put(0, [make_message(2, batch_record(1, b"x"))])
    found.mark_broken(0, "partition 0 was disputed")
    assert found.receive_many(timeout=0.0) == []
    assert "disputed" in found.trust("engine").reason
    found.report_progress(0, 0, "")
    assert found.trust("engine") == Trust.STALE
    found.add_partition(0, PartitionState(), {})
    assert (found.partitions[0].fault, found.partitions[0].is_broken) == ("", False)
    found.mark_broken(7, "it is not held")
    assert set(found.partitions) == {0}


def test_a_temporary_fault_ends_with_the_next_page() -> None:
    found = subscriber_of_exact_stream()
    found.report_progress(0, None, "no leader")
    assert found.trust("engine") == Trust.STALE
    found.put(0, [make_message(2)])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.EXACT


def test_a_bridge_counts_as_alive_no_longer_than_the_maximum_heartbeat_interval_allows() -> None:
    """The interval that the bridge announces does not matter. Bridges apply the same limit to each other."""
    now = 0.0
    found = LogSubscriber(lambda: now, lambda _: None)
    add_partition(found, 0, PartitionState())
    found.put(
        0,
        [make_message(1, JoinRecord("engine", 0, b""), HeartbeatRecord("bridge", 3_600.0), trust_record("bridge", "EXACT"))],
    )
    found.receive_many(timeout=0.0)
    now = MISSED_HEARTBEATS * MAX_HEARTBEAT_SECONDS - 1
    assert found.trust("engine") == Trust.EXACT
    now += 1
    assert found.trust("engine") == Trust.STALE


@pytest.mark.parametrize(("digest_matches", "diverged"), [(True, 0), (None, 1)])
def test_a_different_attestation_is_a_divergence_only_if_the_digest_does_not_match(
    digest_matches: bool | None, diverged: int
) -> None:
    """An index with a matching digest equals the log, so building it again would not help."""
    found = subscriber_of_exact_stream()
    found.put(0, [make_message(2, batch_record(1, b"x"), batch_record(2, b"y"), batch_record(3, b"z"))])
    first, second, third = found.receive_many(timeout=0.0)
    found.report(first, BatchReport(digest_matches=True, attestation_matches=True))
    assert (found.trust("engine"), found.trust("engine").attested) == (Trust.EXACT, True)
    found.report(second, BatchReport(digest_matches=digest_matches, attestation_matches=False))
    assert found.status("engine").degraded_reasons == {DegradedReason.UNATTESTED}
    assert found.trust("engine").reason == "the engine's own cache differs from the log"
    found.report(third, BatchReport(attestation_matches=True))
    assert found.trust("engine").attested
    assert found.diverged == diverged


def test_heartbeats_count_from_when_they_were_sent() -> None:
    """A server that was stopped for a while delivers what it held, in which the bridge was alive at that time."""
    now = 100.0
    found = LogSubscriber(lambda: now, lambda _: None)
    add_partition(found, 0, PartitionState())

    def receive(position: int, uptime: float, *records: Record) -> Trust:
        found.put(0, [make_message(position, *records, HeartbeatRecord("bridge", 0.5, uptime=uptime))])
        found.receive_many(timeout=0.0)
        return found.trust("engine")

    assert receive(1, 7.0, JoinRecord("engine", 0, b""), trust_record("bridge", "EXACT")) == Trust.EXACT
    now += 12.5
    assert [receive(2 + number, 7.5 + number / 2) for number in range(26)] == [Trust.STALE] * 22 + [Trust.EXACT] * 4
    now += 3_600.0  # the host of the bridge was suspended, and its clock stood still
    delays = []
    for position in range(28, 1_000):
        now += 0.5
        delays.append(receive(position, 20.0 + position / 2))
    assert (delays[0], delays[-1]) == (Trust.STALE, Trust.EXACT)
    assert 200 < delays.index(Trust.EXACT) < 400
