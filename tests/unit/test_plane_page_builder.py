"""After any fault of the bridges that write one partition, the log has one consistent history of every stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvevents.stream import PERSISTENT_REASONS, Checkpoint, Fingerprint, Gap, RawBatch, Reset, payload_digest
from kvevents_plane.page_builder import RECORD_HEAD_BYTES, PageBuilder
from kvevents_plane.partition_state import InvalidRecord, PartitionState, ResumePoint, StreamJoined, StreamLeft
from kvevents_plane.records import (
    EMPTY_HISTORY,
    VERSION,
    BatchRecord,
    FragmentRecord,
    GapRecord,
    HeartbeatRecord,
    IncarnationRecord,
    JoinRecord,
    LeaveRecord,
    Page,
    ResetRecord,
    StreamRecord,
    TrustRecord,
    decode_page,
    encode_page,
)

KEY = ("engine", 0)
PAGE_BYTES = 1_000


def batch_record(seq: int, payload: bytes = b"x", incarnation: int = 0) -> BatchRecord:
    return BatchRecord(*KEY, incarnation, seq, False, payload)


@dataclass
class Partition:
    """Accepts a page, as the server does, only if the partition ends where the writer expects."""

    pages: list[bytes] = field(default_factory=list)

    def append(self, page: Page, expected: int) -> int | None:
        if expected != len(self.pages):
            return None
        self.pages.append(encode_page(page))
        return len(self.pages)

    def read(self, builder: PageBuilder) -> None:
        for position in range(builder.state.position + 1, len(self.pages) + 1):
            page = decode_page(self.pages[position - 1])
            assert page is not None
            builder.apply(position, page)

    def state(self) -> tuple[PartitionState, list[object]]:
        found: list[object] = []
        state = PartitionState()
        for position, data in enumerate(self.pages, 1):
            page = decode_page(data)
            assert page is not None
            found += state.apply(position, page)
        return state, found


def write(partition: Partition, builder: PageBuilder, now: float = 0.0) -> bool:
    """Try to write one page, and return whether the partition accepted it."""
    page = builder.build(now)
    if page is None:
        return False
    position = partition.append(page, builder.state.position)
    if position is None:
        builder.withdraw()
        partition.read(builder)
        return False
    builder.acknowledge(position)
    return True


def new_builder(name: str = "a", *records: StreamRecord, partition: Partition | None = None) -> PageBuilder:
    builder = PageBuilder(PartitionState(), name, PAGE_BYTES, name)
    if partition is not None:
        partition.read(builder)
    builder.resync(KEY)
    for record in records:
        builder.enqueue(record)
    return builder


def batch_numbers(found: list[object]) -> list[int]:
    return [event.seq for event in found if isinstance(event, RawBatch)]


# --- the rules, one by one


def test_a_batch_in_the_log_is_not_written_again() -> None:
    """Two bridges with the same batches write each batch once, whichever bridge is first."""
    partition = Partition()
    one, two = (
        new_builder("a", JoinRecord(*KEY, b""), batch_record(0), batch_record(1)),
        new_builder("b", JoinRecord(*KEY, b""), batch_record(0), batch_record(1), batch_record(2)),
    )
    assert write(partition, one)
    assert not write(partition, two)
    assert write(partition, two)
    state, found = partition.state()
    assert batch_numbers(found) == [0, 1, 2]
    assert (state.duplicate_records, state.invalid_records, two.queued_records) == (0, 0, 0)


def test_another_batch_under_the_same_number_makes_the_stream_diverge() -> None:
    """Two incarnations can have equal sequence numbers, but their payloads differ."""
    partition = Partition()
    write(partition, new_builder("a", JoinRecord(*KEY, b""), batch_record(0, b"this life")))
    two = new_builder("b", JoinRecord(*KEY, b""), batch_record(0, b"that life"), batch_record(1, b"that life"))
    assert not write(partition, two)
    assert not write(partition, two)
    assert list(two.diverged) == [KEY]
    assert batch_numbers(partition.state()[1]) == [0]
    # The bridge resubscribes from the end of the log. The fingerprint verifies that the publisher is the same.
    resume = two.state.resume_point(KEY, "b").resume
    assert resume is not None
    assert resume.fingerprints == (Fingerprint(0, payload_digest(b"this life"), live=True),)
    two.resync(KEY)
    two.enqueue(IncarnationRecord(*KEY, 1, "another incarnation"))
    two.enqueue(batch_record(0, b"that life", 1))
    assert write(partition, two)
    assert [type(event) for event in partition.state()[1][-2:]] == [Reset, RawBatch]


def write_until_done(partition: Partition, builder: PageBuilder) -> None:
    """Write until nothing is queued or the stream has diverged."""
    while builder.queued_records and not builder.diverged:
        write(partition, builder)


def test_a_bridge_that_missed_an_incarnation_diverges_from_the_one_in_the_log() -> None:
    """If the log has another incarnation under the same number, the bridge follows the stream again from the log's end."""
    partition = Partition()
    one = new_builder("a", JoinRecord(*KEY, b""), batch_record(0, b"first life"))
    write(partition, one)
    missed = [batch_record(seq, b"second life", 1) for seq in range(9)]
    write_until_done(partition, new_builder("b", IncarnationRecord(*KEY, 1, "restart"), *missed, partition=partition))
    one.enqueue(IncarnationRecord(*KEY, 1, "restart"))
    one.enqueue(batch_record(0, b"third life", 1))
    write_until_done(partition, one)
    assert list(one.diverged) == [KEY]
    assert one.state.resume_point(KEY, "a").resume == Checkpoint(
        *KEY, 1, 8, (Fingerprint(8, payload_digest(b"second life"), live=True),), True, {}
    )


def test_no_batch_of_an_unverified_incarnation_is_written_after_a_gap_at_the_end_of_the_log() -> None:
    """Neither a batch nor a gap at the last missing number confirms the incarnation, since nothing can be compared."""
    same: list[StreamRecord] = [batch_record(9, b"another life"), GapRecord(*KEY, 0, 5, 9)]
    for record in same:
        partition = Partition()
        write_until_done(partition, new_builder("a", JoinRecord(*KEY, b""), batch_record(0), GapRecord(*KEY, 0, 1, 9)))
        two = new_builder("b", JoinRecord(*KEY, b""), record, batch_record(10, b"another life"))
        write_until_done(partition, two)
        assert list(two.diverged) == [KEY]
        assert batch_numbers(partition.state()[1]) == [0]


def test_the_bridge_that_began_an_incarnation_compares_what_others_have_written_to_it() -> None:
    """Another bridge might have seen the next incarnation first and have written it under the same number."""
    partition = Partition()
    one = new_builder("a", JoinRecord(*KEY, b""), batch_record(0), IncarnationRecord(*KEY, 1, "restart"))
    write_until_done(partition, one)
    two = new_builder(
        "b",
        IncarnationRecord(*KEY, 1, "restart"),
        *(batch_record(seq, b"third life", 1) for seq in range(3)),
        partition=partition,
    )
    write_until_done(partition, two)
    one.enqueue(GapRecord(*KEY, 1, 0, 2))
    one.enqueue(batch_record(3, b"second life", 1))
    write_until_done(partition, one)
    assert list(one.diverged) == [KEY]
    assert [event.payload for event in partition.state()[1] if isinstance(event, RawBatch)][1:] == [b"third life"] * 3


def test_the_newest_batch_of_a_snapshot_is_compared_by_its_digest() -> None:
    partition = Partition()
    write(partition, new_builder("a", JoinRecord(*KEY, b""), batch_record(0, b"this life")))
    for payload, diverged_streams in ((b"this life", []), (b"that life", [KEY])):
        builder = PageBuilder(PartitionState.decode(partition.state()[0].encode()), "b", PAGE_BYTES, "b")
        builder.resync(KEY)
        builder.enqueue(batch_record(0, payload))
        builder.build(0.0)
        assert list(builder.diverged) == diverged_streams


def test_a_gap_of_one_bridge_is_filled_by_another() -> None:
    """A gap is written only for the numbers that are still missing when it is due."""
    partition = Partition()
    one = new_builder("a", JoinRecord(*KEY, b""), batch_record(0))
    one.enqueue(GapRecord(*KEY, 0, 1, 3), due=5.0)
    one.enqueue(batch_record(4))
    two = new_builder("b", JoinRecord(*KEY, b""), *map(batch_record, range(3)))
    assert write(partition, one)
    assert one.next_due() == 5.0
    assert not write(partition, two)
    assert write(partition, two)
    assert not write(partition, one, now=6.0)
    assert write(partition, one, now=6.0)
    found = partition.state()[1]
    assert batch_numbers(found) == [0, 1, 2, 4]
    assert [event for event in found if isinstance(event, Gap)] == [Gap(*KEY, 3, 3, 0)]


def test_trust_is_written_after_the_records_that_it_is_about() -> None:
    """It is not written before the bridge has verified that the log is of the same incarnation."""
    partition = Partition()
    one = new_builder("a", JoinRecord(*KEY, b""), batch_record(0))
    one.enqueue(TrustRecord(*KEY, "a", "EXACT", "", {}))
    one.enqueue(batch_record(1))
    assert write(partition, one)
    page = decode_page(partition.pages[0])
    assert page is not None
    assert [type(record) for record in page.records] == [JoinRecord, BatchRecord, BatchRecord, TrustRecord]
    two = new_builder("b", TrustRecord(*KEY, "b", "EXACT", "", {}))
    partition.read(two)
    assert two.build(0.0) is None
    two.enqueue(batch_record(1))
    assert write(partition, two)
    assert set(partition.state()[0].streams[KEY].trust_reports) == {"a", "b"}


def test_less_trust_is_reported_before_and_after_the_records_it_is_about() -> None:
    """Readers are EXACT until they read the report, and the records it is about may take several pages."""
    partition = Partition()
    one = new_builder("a", JoinRecord(*KEY, b""), batch_record(0), TrustRecord(*KEY, "a", "EXACT", "", {}))
    assert write(partition, one)
    for record in batch_records(12)[1:]:
        one.enqueue(record)
    one.enqueue(TrustRecord(*KEY, "a", "DEGRADED", "unverified", {}))
    while write(partition, one):
        pass
    found = [record for data in partition.pages[1:] if (page := decode_page(data)) for record in page.records]
    assert isinstance(found[0], TrustRecord)
    assert isinstance(found[-1], TrustRecord)
    assert [type(record) for record in found[1:-1]] == [BatchRecord] * 11
    assert len(partition.pages) > 2


def test_trust_in_an_ended_incarnation_is_not_written() -> None:
    partition = Partition()
    one = new_builder(
        "a",
        JoinRecord(*KEY, b""),
        batch_record(0),
        TrustRecord(*KEY, "a", "EXACT", "", {}),
        IncarnationRecord(*KEY, 1, "restart"),
    )
    write(partition, one)
    assert partition.state()[0].streams[KEY].trust_reports == {}


def test_no_trust_is_reported_of_an_incarnation_that_the_bridge_has_not_seen() -> None:
    """While its connection hangs, another bridge begins the next incarnation, which has no batch yet to compare with."""
    partition = Partition()
    one, two = (
        new_builder(name, JoinRecord(*KEY, b""), batch_record(0), TrustRecord(*KEY, name, "EXACT", "", {})) for name in "ab"
    )
    assert write(partition, one)
    partition.read(two)
    assert write(partition, two)
    partition.read(one)
    one.enqueue(IncarnationRecord(*KEY, 1, "restart"))
    one.enqueue(TrustRecord(*KEY, "a", "REPLAYING", "", {}))
    assert write(partition, one)
    partition.read(two)
    two.enqueue(TrustRecord(*KEY, "b", "EXACT", "", {}))  # as a bridge does whose report the log no longer has
    assert two.next_due() is None
    assert not write(partition, two)
    two.enqueue(IncarnationRecord(*KEY, 1, "restart"))
    two.enqueue(TrustRecord(*KEY, "b", "EXACT", "", {}))
    assert write(partition, two)
    assert set(partition.state()[0].streams[KEY].trust_reports) == {"a", "b"}


def test_trust_in_a_stream_that_has_left_and_joined_again_is_not_written() -> None:
    """Readers have no state of the stream. The bridge must resubscribe, although it has not seen the stream leave."""
    partition = Partition()
    one, two = (
        new_builder(name, JoinRecord(*KEY, b""), batch_record(0), TrustRecord(*KEY, name, "EXACT", "", {})) for name in "ab"
    )
    assert write(partition, one)
    partition.read(two)
    assert write(partition, two)
    partition.read(one)
    assert not two.has_left(KEY)
    one.enqueue(LeaveRecord(*KEY, "not reached"))
    assert write(partition, one)
    one.resync(KEY)
    one.enqueue(JoinRecord(*KEY, b""))
    assert write(partition, one)
    partition.read(two)
    two.enqueue(TrustRecord(*KEY, "b", "EXACT", "", {}))
    assert two.has_left(KEY)
    assert not write(partition, two)
    two.resync(KEY)
    assert not two.has_left(KEY)


def test_a_stream_that_left_comes_back_with_a_new_incarnation() -> None:
    """Records of the old incarnation are not written, even if a bridge still has some queued."""
    partition = Partition()
    one = new_builder("a", JoinRecord(*KEY, b""), batch_record(0), LeaveRecord(*KEY, "gone"))
    two = new_builder("b", JoinRecord(*KEY, b""), batch_record(0), batch_record(1))
    write(partition, one)
    write(partition, two)
    assert not write(partition, two)  # the bridge joins again, but its records are of the ended incarnation
    assert list(two.diverged) == [KEY]
    assert two.state.resume_point(KEY, "b") == ResumePoint(Checkpoint(*KEY, 0, -1), 0)
    two.resync(KEY)
    for record in (JoinRecord(*KEY, b""), IncarnationRecord(*KEY, 1, "it left"), batch_record(0, incarnation=1)):
        two.enqueue(record)
    assert write(partition, two)
    state, found = partition.state()
    assert state.invalid_records == 0
    assert [type(event).__name__ for event in found[-3:]] == ["StreamJoined", "Reset", "RawBatch"]


def test_another_bridge_can_continue_the_fragments_of_a_large_batch() -> None:
    partition = Partition()
    large = bytes(range(256)) * 12
    one, two = (new_builder(name, JoinRecord(*KEY, b""), batch_record(0, large), batch_record(1)) for name in "ab")
    write(partition, one)  # the join record, which fits
    write(partition, one)
    for _ in range(20):
        write(partition, two)
    assert len(partition.pages) > 4
    found = partition.state()[1]
    assert [event.payload for event in found if isinstance(event, RawBatch)] == [large, b"x"]


def test_an_invalid_record_is_counted_and_ends_the_incarnation() -> None:
    """No bridge writes these records, and readers derive no events from them."""
    state = PartitionState()
    odd: list[StreamRecord] = [
        batch_record(5),
        batch_record(1, incarnation=3),
        GapRecord(*KEY, 0, 4, 5),
        FragmentRecord(*KEY, 0, 1, False, 7, 9, b"x"),
    ]
    for record in odd:
        state = PartitionState()
        found = state.apply(1, Page(VERSION, "a", [JoinRecord(*KEY, b""), batch_record(0), record, batch_record(1)]))
        assert [type(event) for event in found[2:]] == [InvalidRecord, InvalidRecord]
        assert batch_numbers(list(found)) == [0]
        assert state.resume_point(KEY, "a") == ResumePoint(Checkpoint(*KEY, 0, -1), 0)


def test_invalid_bytes_decode_to_no_page() -> None:
    for data in (
        b"",
        b"\xc1",
        b"hello",
        encode_page(Page(99, "a", [])),
        b"\x93\x03\xa1a\x91\x91\xa1?",
    ):
        assert decode_page(data) is None


def test_after_a_gap_in_the_log_every_reader_begins_with_new_incarnations() -> None:
    """Their numbers are above all earlier ones, so readers that had read everything end in the same state."""
    partition = Partition()
    old = new_builder(
        "knows", JoinRecord(*KEY, b""), batch_record(0), IncarnationRecord(*KEY, 1, "restart"), batch_record(0, incarnation=1)
    )
    write(partition, old)
    new = PageBuilder(PartitionState.after_unknown_prefix(len(partition.pages), "purged"), "new", PAGE_BYTES, "new")
    new.resync(KEY)
    new.enqueue(JoinRecord(*KEY, b"card"))
    assert write(partition, new)
    page = decode_page(partition.pages[-1])
    assert page is not None
    assert [type(record) for record in page.records] == [ResetRecord]
    floor = new.state.resume_point(KEY, "new").incarnation_offset
    assert floor > 1
    for seq in (5, 6):
        new.enqueue(batch_record(seq, incarnation=floor))
    assert write(partition, new)
    old.enqueue(batch_record(1, incarnation=1))
    write(partition, old)
    write(partition, old)
    assert list(old.diverged) == [KEY]
    state, found = partition.state()
    assert [type(event) for event in found[-4:]] == [StreamLeft, StreamJoined, RawBatch, RawBatch]
    assert old.state.encode() == state.encode()
    assert state.streams[KEY].incarnation == new.state.streams[KEY].incarnation == floor
    assert (state.duplicate_records, state.invalid_records) == (0, 0)


def test_after_an_unknown_prefix_stream_records_are_ignored() -> None:
    state = PartitionState.after_unknown_prefix(7, "purged")
    assert state.apply(8, Page(VERSION, "a", [JoinRecord(*KEY, b""), batch_record(5), HeartbeatRecord("a", 1.0)])) == []
    assert (state.streams, state.invalid_records, list(state.heartbeats)) == ({}, 0, ["a"])
    again = PartitionState.decode(state.encode())
    assert (again.unknown_prefix, again.position) == ("purged", 8)


def test_a_page_that_was_written_for_a_deleted_partition_is_ignored() -> None:
    """Its writer did not notice that the partition was deleted, and the position was right by chance."""
    state, deleted = PartitionState(), PartitionState()
    deleted.apply(1, Page(VERSION, "b", [JoinRecord(*KEY, b""), batch_record(6)], "b#1", EMPTY_HISTORY))
    state.apply(1, Page(VERSION, "a", [JoinRecord(*KEY, b""), batch_record(0)], "a#1", EMPTY_HISTORY))
    assert state.apply(2, Page(VERSION, "b", [batch_record(7)], "b#2", deleted.history)) == []
    assert (state.void_pages, state.invalid_records, state.position, state.streams[KEY].last_seq) == (1, 0, 2, 0)


def test_long_names_and_reasons_count_for_the_size_of_a_page() -> None:
    """A page keeps its maximum size, however long the names of engines and their reasons are."""
    keys = [("ü" * 100, rank) for rank in range(40)]
    builder = PageBuilder(PartitionState(), "b" * 128, 4_000, "run")
    for key in keys:
        builder.resync(key)
        builder.enqueue(JoinRecord(*key, bytes(300)))
        builder.enqueue(IncarnationRecord(*key, 1, "reason " * 70))
        builder.enqueue(TrustRecord(*key, "b" * 128, "DEGRADED", "ü" * 500, dict.fromkeys(REASON_NAMES, 2**60)))
    position = 0
    while (page := builder.build(0.0)) is not None:
        position += 1
        assert len(encode_page(page)) <= 4_000 + 300
        builder.acknowledge(position)
        assert position < 200
    assert {*builder.state.streams} == {*keys}
    assert all(stream.trust_reports for stream in builder.state.streams.values())


REASON_NAMES = [reason.name for reason in PERSISTENT_REASONS]


def test_a_page_does_not_exceed_its_maximum_size() -> None:
    builder = new_builder("a", JoinRecord(*KEY, b""), *(batch_record(number, bytes(100)) for number in range(50)))
    for position in range(1, 40):
        page = builder.build(0.0)
        if page is None:
            break
        assert len(encode_page(page)) <= PAGE_BYTES + RECORD_HEAD_BYTES
        builder.acknowledge(position)
    assert (builder.queued_records, builder.queued_bytes, builder.written) == (0, 0, 50)


# --- the page in flight


def batch_records(count: int, size: int = 200, first: int = 0) -> list[BatchRecord]:
    return [batch_record(seq, b"%d " % seq + bytes(size)) for seq in range(first, first + count)]


def build_page(builder: PageBuilder) -> Page:
    page = builder.build(0.0)
    assert page is not None
    return page


def test_records_that_arrive_while_a_page_is_in_flight_go_into_the_next_page() -> None:
    """No queued record is dropped before the page is acknowledged."""
    partition = Partition()
    one = new_builder("a", JoinRecord(*KEY, b""), *batch_records(2))
    page = build_page(one)
    for record in batch_records(10, first=2):
        one.enqueue(record)
    one.enqueue(TrustRecord(*KEY, "a", "EXACT", "", {}))
    assert (one.queued_records, one.build(0.0)) == (13, None)
    partition.append(page, 0)
    one.acknowledge(1)
    while write(partition, one):
        pass
    state, found = partition.state()
    assert batch_numbers(found) == list(range(12))
    assert (one.queued_records, one.queued_bytes, one.next_due()) == (0, 0, None)
    assert (state.void_pages, state.duplicate_records, state.streams[KEY].trust_reports["a"].trust) == (0, 0, "EXACT")
    assert one.state.encode() == state.encode()


def test_a_page_of_another_bridge_withdraws_the_page_in_flight() -> None:
    one = new_builder("a", JoinRecord(*KEY, b""), *batch_records(2))
    first = build_page(one)
    one.apply(1, Page(VERSION, "b", [HeartbeatRecord("b", 1.0)]))
    assert (one.queued_records, one.acknowledge(2)) == (3, [])
    assert build_page(one).records == first.records


def test_a_stored_page_without_an_acknowledgement_counts_as_written() -> None:
    one, other = (new_builder(name, JoinRecord(*KEY, b""), *batch_records(2)) for name in "ab")
    page = build_page(one)
    one.withdraw()
    for builder in (one, other):
        builder.apply(1, page)
    assert (one.written, other.written) == (2, 0)


def test_acknowledging_a_page_drops_no_records_of_a_stream_that_was_resubscribed_meanwhile() -> None:
    """Its records belong to the earlier subscription. The log decides which of the new records are written."""
    one = new_builder("a", JoinRecord(*KEY, b""), batch_record(0), batch_record(1))
    build_page(one)
    one.resync(KEY)
    for record in (JoinRecord(*KEY, b""), batch_record(1), batch_record(2)):
        one.enqueue(record)
    one.acknowledge(1)
    assert one.queued_records == 3
    page = build_page(one)
    assert [record.seq for record in page.records if isinstance(record, BatchRecord)] == [2]
    one.acknowledge(2)
    assert (one.queued_records, one.queued_bytes, one.state.duplicate_records) == (0, 0, 0)
    one.enqueue(LeaveRecord(*KEY, "gone"))
    build_page(one)
    one.forget(KEY)
    one.acknowledge(3)
    assert (one.queued_records, one.queued_bytes, one.state.registrations()) == (0, 0, {})


def test_a_heartbeat_that_was_not_acknowledged_is_written_again() -> None:
    one = new_builder("a")
    one.set_heartbeat(HeartbeatRecord("a", 7.0))
    assert build_page(one).records == [HeartbeatRecord("a", 7.0)]
    assert one.build(0.0) is None
    one.withdraw()
    assert build_page(one).records == [HeartbeatRecord("a", 7.0)]
    one.set_heartbeat(HeartbeatRecord("a", 8.0))
    one.withdraw()
    assert build_page(one).records == [HeartbeatRecord("a", 8.0)]


def test_each_fragment_of_a_batch_waits_for_the_previous_one() -> None:
    """The offset of the next fragment is known when the previous one is acknowledged."""
    one = new_builder("a", JoinRecord(*KEY, b""))
    build_page(one)
    one.acknowledge(1)
    one.enqueue(batch_record(0, bytes(3_000)))
    one.enqueue(batch_record(1))
    assert [type(record) for record in build_page(one).records] == [FragmentRecord]
    assert one.build(0.0) is None
    one.acknowledge(2)
    assert [record.offset for record in build_page(one).records if isinstance(record, FragmentRecord)] == [
        PAGE_BYTES - RECORD_HEAD_BYTES - len(KEY[0])
    ]


def test_a_snapshot_contains_which_page_was_the_last() -> None:
    """A reader that begins with the snapshot reads the next page in the same way as a reader of all pages."""
    one = new_builder("a", JoinRecord(*KEY, b""), *batch_records(8))
    first = build_page(one)
    one.acknowledge(1)
    second = build_page(one)
    for known, other in (
        (first, 0),
        (Page(VERSION, "b", [JoinRecord(*KEY, b"")], name="other", history=EMPTY_HISTORY), 1),
    ):
        whole = PartitionState()
        whole.apply(1, known)
        restored = PartitionState.decode(whole.encode())
        assert restored.apply(2, second) == whole.apply(2, second)
        assert whole.void_pages == restored.void_pages == other


# --- several bridges that are killed, disconnected and late, with an engine that restarts


@dataclass
class Engine:
    """An engine that restarts: the payloads of each of its processes."""

    processes: list[list[bytes]] = field(default_factory=lambda: [[]])
    first: int = 0
    """Number of the oldest batch that the replay buffer of the present process still has."""

    @property
    def now(self) -> list[bytes]:
        return self.processes[-1]


@dataclass
class PageInFlight:
    """A page in flight. The page and its acknowledgement can arrive late or never."""

    page: Page
    expected: int
    arrived: bool = False
    position: int | None = None
    """Position at which the server has accepted the page; None if it has not."""


@dataclass
class ModelBridge:
    """A model of a bridge with a page builder, which follows the engine as a subscriber does."""

    builder: PageBuilder
    process: list[bytes]
    incarnation: int = 0
    enqueued: int = 0
    in_flight: PageInFlight | None = None
    """The page that the builder counts as in flight."""
    reconnected: bool = False
    """Whether the end of the partition must be verified first (`PartitionReader`, `PartitionWriter.connected`)."""

    def reconnect(self) -> None:
        """Withdraw the page in flight, which counts as not acknowledged."""
        self.in_flight = None
        self.builder.withdraw()
        self.reconnected = True

    def contains_tail(self, partition: Partition) -> bool:
        """Return whether the partition still contains the last page that was read from it."""
        position, name, _ = self.builder.state.tail
        page = decode_page(partition.pages[position - 1]) if 0 < position <= len(partition.pages) else None
        return not position or (page is not None and page.name == name)

    def follow(self, engine: Engine) -> None:
        """Enqueue what the engine has published since the last call. A new process begins with a new incarnation."""
        if self.process is not engine.now:
            self.process, self.enqueued = engine.now, 0
            self.incarnation += 1
            self.builder.enqueue(IncarnationRecord(*KEY, self.incarnation, "restart"))
        if self.enqueued < engine.first:
            self.builder.enqueue(GapRecord(*KEY, self.incarnation, self.enqueued, engine.first - 1))
            self.enqueued = engine.first
        for seq in range(self.enqueued, len(self.process)):
            self.builder.enqueue(batch_record(seq, self.process[seq], self.incarnation))
        self.enqueued = len(self.process)

    def resume(self, engine: Engine) -> None:
        """Follow the engine from the end of the log, as `Subscriber.add(resume=...)` does.

        A new incarnation begins if the fingerprints do not match.
        """
        checkpoint, self.incarnation = self.builder.state.resume_point(KEY, "")
        self.builder.resync(KEY)
        self.builder.enqueue(JoinRecord(*KEY, b"card"))
        self.process, self.enqueued = engine.now, 0
        if checkpoint is None:
            return
        self.incarnation = checkpoint.incarnation
        matches = [
            engine.first <= each.seq < len(self.process) and payload_digest(self.process[each.seq]) == each.digest
            for each in checkpoint.fingerprints
        ]
        if matches and all(matches):
            self.enqueued = checkpoint.last_seq + 1
            return
        self.incarnation += 1
        self.builder.enqueue(IncarnationRecord(*KEY, self.incarnation, "not verified"))

    def read(self, partition: Partition) -> None:
        """Read all new pages of the partition, including its own, as the partition reader of a bridge does."""
        builder = self.builder
        for position in range(builder.state.position + 1, len(partition.pages) + 1):
            page = decode_page(partition.pages[position - 1])
            assert page is not None
            if self.in_flight is not None and self.in_flight.page.name == page.name:
                builder.acknowledge(position)
            else:
                builder.apply(position, page)
            self.in_flight = None

    def receive_reply(self) -> None:
        """Receive the reply to the page in flight, or stop waiting for it."""
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is not None and in_flight.position is not None:
            self.builder.acknowledge(in_flight.expected + 1)
        else:
            self.builder.withdraw()


class Simulation:
    """Three bridges, one partition and one engine. Each action is a method; its argument selects a bridge or a page."""

    def __init__(self) -> None:
        self.partition, self.engine = Partition(), Engine()
        self.published = self.processes = 0
        self.network: list[PageInFlight] = []
        """Pages that were sent and have not arrived."""
        self.bridges = [self.start_bridge(at) for at in range(3)]

    def start_bridge(self, at: int) -> ModelBridge:
        self.processes += 1
        builder = PageBuilder(PartitionState(), f"bridge {at}", PAGE_BYTES, f"run {self.processes}")
        self.partition.read(builder)
        model_bridge = ModelBridge(builder, [])
        model_bridge.resume(self.engine)
        return model_bridge

    def publish(self, _: int, size: int = 0) -> None:
        self.published += 1
        self.engine.now.append(b"%d " % self.published + bytes(size))

    def many(self, at: int) -> None:
        """Publish more batches than fit in a page."""
        for _ in range(5):
            self.publish(at, 400)

    def large(self, at: int) -> None:
        self.publish(at, 2_500)

    def restart(self, _: int) -> None:
        self.engine.processes.append([])
        self.engine.first = 0

    def overflow(self, _: int) -> None:
        """Reduce the engine's replay buffer to the newest batch. A bridge that has not received the others loses them."""
        self.engine.first = max(0, len(self.engine.now) - 1)

    def restart_twice_unseen(self, at: int) -> None:
        """Restart the engine twice, of which one bridge sees one restart. Another bridge follows the process in between."""
        self.restart(at)
        self.many(at)
        other = (at + 1) % len(self.bridges)
        self.read(other)
        self.follow(other)
        for _ in range(8):
            self.write(other)
        self.restart(at)

    def follow(self, at: int) -> None:
        self.bridges[at].follow(self.engine)

    def resubscribe(self, at: int) -> None:
        """Subscribe to the stream again, even with a page in flight."""
        self.bridges[at].resume(self.engine)

    def kill(self, at: int) -> None:
        self.bridges[at] = self.start_bridge(at)

    def crash(self, at: int) -> None:
        """Let the server lose its last acknowledged pages. Pages in the network can still arrive."""
        del self.partition.pages[max(0, len(self.partition.pages) - 1 - 2 * at) :]
        for model_bridge in self.bridges:
            model_bridge.reconnect()

    def verify(self, at: int) -> None:
        """Restart a reconnected bridge if the partition does not contain the last page that it has read."""
        model_bridge = self.bridges[at]
        if model_bridge.reconnected and not model_bridge.contains_tail(self.partition):
            self.kill(at)
        model_bridge.reconnected = False

    def send(self, at: int) -> None:
        """Send a page, unless one is in flight or nothing is queued."""
        self.verify(at)
        model_bridge = self.bridges[at]
        page = model_bridge.builder.build(0.0)
        if page is not None:
            model_bridge.in_flight = PageInFlight(page, model_bridge.builder.state.position)
            self.network.append(model_bridge.in_flight)
        if model_bridge.builder.diverged:
            model_bridge.resume(self.engine)

    def arrive(self, at: int) -> None:
        """Let one of the oldest pages in flight arrive. A page can overtake an earlier page."""
        if self.network:
            in_flight = self.network.pop(min(at, len(self.network) - 1))
            in_flight.arrived, in_flight.position = True, self.partition.append(in_flight.page, in_flight.expected)

    def lose(self, at: int) -> None:
        if self.network:
            self.network.pop(min(at, len(self.network) - 1))

    def receive_reply(self, at: int) -> None:
        self.bridges[at].receive_reply()

    def read(self, at: int) -> None:
        self.verify(at)
        self.bridges[at].read(self.partition)

    def write(self, at: int) -> None:
        """Send a page, let all pages in the network arrive, receive the reply and read."""
        self.send(at)
        while self.network:
            self.arrive(0)
        self.receive_reply(at)
        self.read(at)

    def end(self) -> None:
        """Let each bridge follow, read and write until nothing is left to write."""
        for at in [at for _ in range(12) for at in range(3)]:
            self.follow(at)
            for _ in range(12):
                self.read(at)
                self.write(at)


ACTIONS = (
    *("publish", "publish", "many", "follow", "follow", "write", "write", "send", "send", "send", "arrive", "arrive", "arrive"),
    *(
        "receive_reply",
        "receive_reply",
        "read",
        "lose",
        "restart",
        "kill",
        "large",
        "resubscribe",
        "overflow",
        "restart_twice_unseen",
        "crash",
    ),
)
STEPS = 120
"""Number of actions in a simulation, enough to have many pages in flight."""


@given(st.integers(0, 2**32), st.integers(0, 60))
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_log_has_one_consistent_history_after_any_faults_of_its_writers(seed: int, taken_at: int) -> None:
    """In the end the last incarnation in the log is the engine's last process, with each batch once and in order.

    A reader that begins with a snapshot ends in the same state. No incarnation in the log has batches of two processes. Any
    number of pages are in flight, including pages that their bridges no longer wait for. Pages and acknowledgements arrive
    late, in another order or never. Engines restart unnoticed by some bridges, and drop batches that no bridge has. The server
    loses pages that it has acknowledged, and uses their positions again.
    """
    rng = Random(seed)
    simulation = Simulation()
    for _ in range(STEPS):
        getattr(simulation, rng.choice(ACTIONS))(rng.randrange(3))
    simulation.end()
    state, found = simulation.partition.state()
    assert (state.invalid_records, state.duplicate_records) == (0, 0)
    last = max((at for at, event in enumerate(found) if isinstance(event, Reset)), default=-1)
    batches = [event for event in found[last + 1 :] if isinstance(event, RawBatch)]
    now = simulation.engine.now
    assert [event.payload for event in batches] == [now[event.seq] for event in batches]
    assert {event.seq for event in batches} >= {*range(simulation.engine.first, len(now))}
    processes = {payload: process for process, payloads in enumerate(simulation.engine.processes) for payload in payloads}
    seen: dict[int, set[int]] = {}
    for event in found:
        if isinstance(event, RawBatch):
            seen.setdefault(event.incarnation, set()).add(processes[event.payload])
    assert all(len(of_one) == 1 for of_one in seen.values())
    assert all(
        (model_bridge.builder.queued_records, model_bridge.builder.queued_bytes) == (0, 0)
        for model_bridge in simulation.bridges
    )
    assert all(model_bridge.builder.state.encode() == state.encode() for model_bridge in simulation.bridges)
    begun = Partition(simulation.partition.pages[:taken_at]).state()[0]
    late = PageBuilder(PartitionState.decode(begun.encode()), "late", PAGE_BYTES, "late")
    simulation.partition.read(late)
    assert late.state.encode() == state.encode()
