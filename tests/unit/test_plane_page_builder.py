"""Bridges that write into one partition: after any fault the log has one consistent history of every stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvevents.plane.page_builder import RECORD_BYTES, PageBuilder
from kvevents.plane.partition_state import InvalidRecord, PartitionState, ResumePoint, StreamJoined, StreamLeft
from kvevents.plane.records import (
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
from kvevents.stream import PERSISTENT_REASONS, Checkpoint, Fingerprint, Gap, RawBatch, Reset, payload_digest

KEY = ("engine", 0)
ROOM = 1_000


def batched(seq: int, payload: bytes = b"x", incarnation: int = 0) -> BatchRecord:
    return BatchRecord(*KEY, incarnation, seq, False, payload)


@dataclass
class Partition:
    """What the server does: a page is taken only if the partition ends where its writer believes."""

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
    """One attempt; whether it was taken."""
    page = builder.build(now, 0.0)
    if page is None:
        return False
    position = partition.append(page, builder.state.position)
    if position is None:
        builder.withdraw()
        partition.read(builder)
        return False
    builder.acknowledge(position)
    return True


def bridge(name: str = "a", *records: StreamRecord, partition: Partition | None = None) -> PageBuilder:
    builder = PageBuilder(PartitionState(), name, ROOM, name)
    if partition is not None:
        partition.read(builder)
    builder.resync(KEY)
    for record in records:
        builder.enqueue(record)
    return builder


def numbers(found: list[object]) -> list[int]:
    return [event.seq for event in found if isinstance(event, RawBatch)]


# --- the rules, one by one


def test_a_batch_in_the_log_is_not_written_again() -> None:
    """Two bridges with the same batches write each batch once, whichever bridge is first."""
    partition = Partition()
    one, two = (
        bridge("a", JoinRecord(*KEY, b""), batched(0), batched(1)),
        bridge("b", JoinRecord(*KEY, b""), batched(0), batched(1), batched(2)),
    )
    assert write(partition, one)
    assert not write(partition, two)
    assert write(partition, two)
    state, found = partition.state()
    assert numbers(found) == [0, 1, 2]
    assert (state.duplicate_records, state.invalid_records, two.queued_records) == (0, 0, 0)


def test_another_batch_under_the_same_number_sets_the_bridge_adrift() -> None:
    """Numbers agree in two lives as well; payloads do not."""
    partition = Partition()
    write(partition, bridge("a", JoinRecord(*KEY, b""), batched(0, b"this life")))
    two = bridge("b", JoinRecord(*KEY, b""), batched(0, b"that life"), batched(1, b"that life"))
    assert not write(partition, two)
    assert not write(partition, two)
    assert list(two.diverged) == [KEY]
    assert numbers(partition.state()[1]) == [0]
    # The bridge resubscribes from the end of the log; the checkpoint makes the publisher prove that it is the same.
    resume = two.state.resume_point(KEY, "b").resume
    assert resume is not None
    assert resume.fingerprints == (Fingerprint(0, payload_digest(b"this life"), live=True),)
    two.resync(KEY)
    two.enqueue(IncarnationRecord(*KEY, 1, "another life"))
    two.enqueue(batched(0, b"that life", 1))
    assert write(partition, two)
    assert [type(event) for event in partition.state()[1][-2:]] == [Reset, RawBatch]


def settle(partition: Partition, builder: PageBuilder) -> None:
    """Write until there is nothing more to write, or the stream has to be followed again."""
    while builder.queued_records and not builder.diverged:
        write(partition, builder)


def test_a_bridge_that_missed_a_life_does_not_take_its_own_for_the_one_in_the_log() -> None:
    """Where the log has another life under that number, the bridge follows the stream again from the log's end."""
    partition = Partition()
    one = bridge("a", JoinRecord(*KEY, b""), batched(0, b"first life"))
    write(partition, one)
    missed = [batched(seq, b"second life", 1) for seq in range(9)]
    settle(partition, bridge("b", IncarnationRecord(*KEY, 1, "restart"), *missed, partition=partition))
    one.enqueue(IncarnationRecord(*KEY, 1, "restart"))
    one.enqueue(batched(0, b"third life", 1))
    settle(partition, one)
    assert list(one.diverged) == [KEY]
    assert one.state.resume_point(KEY, "a").resume == Checkpoint(
        *KEY, 1, 8, (Fingerprint(8, payload_digest(b"second life"), live=True),), True, {}
    )


def test_where_the_log_ends_with_a_gap_no_batch_of_an_unproven_life_follows_it() -> None:
    """Neither a batch nor a gap at its last number proves a life, since neither can be compared with what is missing."""
    same: list[StreamRecord] = [batched(9, b"another life"), GapRecord(*KEY, 0, 5, 9)]
    for record in same:
        partition = Partition()
        settle(partition, bridge("a", JoinRecord(*KEY, b""), batched(0), GapRecord(*KEY, 0, 1, 9)))
        two = bridge("b", JoinRecord(*KEY, b""), record, batched(10, b"another life"))
        settle(partition, two)
        assert list(two.diverged) == [KEY]
        assert numbers(partition.state()[1]) == [0]


def test_the_first_bridge_of_an_incarnation_compares_what_others_have_written_of_it() -> None:
    """Another bridge may have seen the next life first, and have taken the same number for it."""
    partition = Partition()
    one = bridge("a", JoinRecord(*KEY, b""), batched(0), IncarnationRecord(*KEY, 1, "restart"))
    settle(partition, one)
    two = bridge(
        "b", IncarnationRecord(*KEY, 1, "restart"), *(batched(seq, b"third life", 1) for seq in range(3)), partition=partition
    )
    settle(partition, two)
    one.enqueue(GapRecord(*KEY, 1, 0, 2))
    one.enqueue(batched(3, b"second life", 1))
    settle(partition, one)
    assert list(one.diverged) == [KEY]
    assert [event.payload for event in partition.state()[1] if isinstance(event, RawBatch)][1:] == [b"third life"] * 3


def test_the_newest_batch_of_a_snapshot_is_compared_by_its_digest() -> None:
    partition = Partition()
    write(partition, bridge("a", JoinRecord(*KEY, b""), batched(0, b"this life")))
    for payload, adrift in ((b"this life", []), (b"that life", [KEY])):
        builder = PageBuilder(PartitionState.decode(partition.state()[0].encode()), "b", ROOM, "b")
        builder.resync(KEY)
        builder.enqueue(batched(0, payload))
        builder.build(0.0, 0.0)
        assert list(builder.diverged) == adrift


def test_what_one_bridge_has_lost_another_one_fills() -> None:
    """A gap is written where it was not filled before it was due."""
    partition = Partition()
    one = bridge("a", JoinRecord(*KEY, b""), batched(0))
    one.enqueue(GapRecord(*KEY, 0, 1, 3), due=5.0)
    one.enqueue(batched(4))
    two = bridge("b", JoinRecord(*KEY, b""), *map(batched, range(3)))
    assert write(partition, one)
    assert one.next_due() == 5.0
    assert not write(partition, two)
    assert write(partition, two)
    assert not write(partition, one, now=6.0)
    assert write(partition, one, now=6.0)
    found = partition.state()[1]
    assert numbers(found) == [0, 1, 2, 4]
    assert [event for event in found if isinstance(event, Gap)] == [Gap(*KEY, 3, 3, 0)]


def test_trust_is_said_behind_what_it_is_about() -> None:
    """And not at all while it is not known whether bridge and log mean the same life."""
    partition = Partition()
    one = bridge("a", JoinRecord(*KEY, b""), batched(0))
    one.enqueue(TrustRecord(*KEY, "a", "EXACT", "", {}))
    one.enqueue(batched(1))
    assert write(partition, one)
    page = decode_page(partition.pages[0])
    assert page is not None
    assert [type(record) for record in page.records] == [JoinRecord, BatchRecord, BatchRecord, TrustRecord]
    two = bridge("b", TrustRecord(*KEY, "b", "EXACT", "", {}))
    partition.read(two)
    assert two.build(0.0, 0.0) is None
    two.enqueue(batched(1))
    assert write(partition, two)
    assert set(partition.state()[0].streams[KEY].trust_reports) == {"a", "b"}


def test_less_trust_is_reported_before_and_after_the_records_it_is_about() -> None:
    """Readers are EXACT until they read the report, and the records it is about may take several pages."""
    partition = Partition()
    one = bridge("a", JoinRecord(*KEY, b""), batched(0), TrustRecord(*KEY, "a", "EXACT", "", {}))
    assert write(partition, one)
    for record in several(12)[1:]:
        one.enqueue(record)
    one.enqueue(TrustRecord(*KEY, "a", "DEGRADED", "unproven", {}))
    while write(partition, one):
        pass
    found = [record for data in partition.pages[1:] if (page := decode_page(data)) for record in page.records]
    assert isinstance(found[0], TrustRecord)
    assert isinstance(found[-1], TrustRecord)
    assert [type(record) for record in found[1:-1]] == [BatchRecord] * 11
    assert len(partition.pages) > 2


def test_trust_of_a_life_that_ended_is_not_said() -> None:
    partition = Partition()
    one = bridge(
        "a", JoinRecord(*KEY, b""), batched(0), TrustRecord(*KEY, "a", "EXACT", "", {}), IncarnationRecord(*KEY, 1, "restart")
    )
    write(partition, one)
    assert partition.state()[0].streams[KEY].trust_reports == {}


def test_no_trust_is_reported_of_an_incarnation_that_the_bridge_has_not_seen() -> None:
    """While its connection hangs, another bridge begins the next incarnation, which has no batch yet to compare with."""
    partition = Partition()
    one, two = (bridge(name, JoinRecord(*KEY, b""), batched(0), TrustRecord(*KEY, name, "EXACT", "", {})) for name in "ab")
    assert write(partition, one)
    partition.read(two)
    assert write(partition, two)
    partition.read(one)
    one.enqueue(IncarnationRecord(*KEY, 1, "restart"))
    one.enqueue(TrustRecord(*KEY, "a", "REPLAYING", "", {}))
    assert write(partition, one)
    partition.read(two)
    two.enqueue(TrustRecord(*KEY, "b", "EXACT", "", {}))  # as a bridge does of whose word the log has nothing any more
    assert two.next_due() is None
    assert not write(partition, two)
    two.enqueue(IncarnationRecord(*KEY, 1, "restart"))
    two.enqueue(TrustRecord(*KEY, "b", "EXACT", "", {}))
    assert write(partition, two)
    assert set(partition.state()[0].streams[KEY].trust_reports) == {"a", "b"}


def test_trust_is_not_said_of_a_stream_that_has_left_and_joined_again() -> None:
    """Readers hold nothing of it: the bridge has to resubscribe, although it has not seen the stream leave."""
    partition = Partition()
    one, two = (bridge(name, JoinRecord(*KEY, b""), batched(0), TrustRecord(*KEY, name, "EXACT", "", {})) for name in "ab")
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
    """Nothing of the old incarnation counts, whichever bridge still has some of it."""
    partition = Partition()
    one = bridge("a", JoinRecord(*KEY, b""), batched(0), LeaveRecord(*KEY, "gone"))
    two = bridge("b", JoinRecord(*KEY, b""), batched(0), batched(1))
    write(partition, one)
    write(partition, two)
    assert not write(partition, two)  # joins again, but what it has is of the incarnation that has ended
    assert list(two.diverged) == [KEY]
    assert two.state.resume_point(KEY, "b") == ResumePoint(Checkpoint(*KEY, 0, -1), 0)
    two.resync(KEY)
    for record in (JoinRecord(*KEY, b""), IncarnationRecord(*KEY, 1, "it left"), batched(0, incarnation=1)):
        two.enqueue(record)
    assert write(partition, two)
    state, found = partition.state()
    assert state.invalid_records == 0
    assert [type(event).__name__ for event in found[-3:]] == ["StreamJoined", "Reset", "RawBatch"]


def test_a_large_batch_comes_in_pieces_and_another_bridge_may_go_on_with_them() -> None:
    partition = Partition()
    large = bytes(range(256)) * 12
    one, two = (bridge(name, JoinRecord(*KEY, b""), batched(0, large), batched(1)) for name in "ab")
    write(partition, one)  # the join, for which there is room
    write(partition, one)
    for _ in range(20):
        write(partition, two)
    assert len(partition.pages) > 4
    found = partition.state()[1]
    assert [event.payload for event in found if isinstance(event, RawBatch)] == [large, b"x"]


def test_a_breach_is_counted_and_ends_the_incarnation() -> None:
    """What no writer of ours writes: nothing is made of it."""
    state = PartitionState()
    odd: list[StreamRecord] = [
        batched(5),
        batched(1, incarnation=3),
        GapRecord(*KEY, 0, 4, 5),
        FragmentRecord(*KEY, 0, 1, False, 7, 9, b"x"),
    ]
    for record in odd:
        state = PartitionState()
        found = state.apply(1, Page(VERSION, "a", 0.0, [JoinRecord(*KEY, b""), batched(0), record, batched(1)]))
        assert [type(event) for event in found[2:]] == [InvalidRecord, InvalidRecord]
        assert numbers(list(found)) == [0]
        assert state.resume_point(KEY, "a") == ResumePoint(Checkpoint(*KEY, 0, -1), 0)


def test_bytes_of_others_are_no_page() -> None:
    for data in (
        b"",
        b"\xc1",
        b"hello",
        encode_page(Page(99, "a", 0.0, [])),
        b"\x94\x01\xa1a\xcb\0\0\0\0\0\0\0\0\x91\x91\xa1?",
    ):
        assert decode_page(data) is None


def test_a_held_back_batch_is_dropped_as_soon_as_another_bridge_has_written_it() -> None:
    """A bridge in reserve keeps only what others have not written yet, however long it would wait."""
    partition = Partition()
    reserve = bridge("reserve")
    records: list[StreamRecord] = [JoinRecord(*KEY, b""), *map(batched, range(10))]
    for record in records:
        reserve.enqueue(record, due=1000.0)
    assert reserve.build(0.0, 0.0) is None
    assert reserve.queued_records == 11
    write(partition, bridge("active", JoinRecord(*KEY, b""), *map(batched, range(8))))
    partition.read(reserve)
    assert reserve.build(0.0, 0.0) is None
    assert (reserve.queued_records, reserve.next_due()) == (2, 1000.0)
    assert write(partition, reserve, now=1000.0)
    assert numbers(partition.state()[1]) == list(range(10))
    assert (reserve.queued_records, reserve.queued_bytes) == (0, 0)


def test_after_a_gap_in_the_log_every_reader_begins_with_new_incarnations() -> None:
    """Their numbers are above all earlier ones, so readers that had read everything end in the same state."""
    partition = Partition()
    knows = bridge("knows", JoinRecord(*KEY, b""), batched(0), IncarnationRecord(*KEY, 1, "restart"), batched(0, incarnation=1))
    write(partition, knows)
    new = PageBuilder(PartitionState.after_unknown_prefix(len(partition.pages), "purged"), "new", ROOM, "new")
    new.resync(KEY)
    new.enqueue(JoinRecord(*KEY, b"card"))
    assert write(partition, new)
    page = decode_page(partition.pages[-1])
    assert page is not None
    assert [type(record) for record in page.records] == [ResetRecord]
    floor = new.state.resume_point(KEY, "new").incarnation_offset
    assert floor > 1
    for seq in (5, 6):
        new.enqueue(batched(seq, incarnation=floor))
    assert write(partition, new)
    knows.enqueue(batched(1, incarnation=1))
    write(partition, knows)
    write(partition, knows)
    assert list(knows.diverged) == [KEY]
    state, found = partition.state()
    assert [type(event) for event in found[-4:]] == [StreamLeft, StreamJoined, RawBatch, RawBatch]
    assert knows.state.encode() == state.encode()
    assert state.streams[KEY].incarnation == new.state.streams[KEY].incarnation == floor
    assert (state.duplicate_records, state.invalid_records) == (0, 0)


def test_behind_a_hole_nothing_is_believed_before() -> None:
    state = PartitionState.after_unknown_prefix(7, "purged")
    assert state.apply(8, Page(VERSION, "a", 0.0, [JoinRecord(*KEY, b""), batched(5), HeartbeatRecord("a", 1.0, 0.0)])) == []
    assert (state.streams, state.invalid_records, list(state.heartbeats)) == ({}, 0, ["a"])
    again = PartitionState.decode(state.encode())
    assert (again.unknown_prefix, again.position) == ("purged", 8)


def test_a_page_that_was_meant_for_another_partition_is_void() -> None:
    """Its writer had not noticed that the partition was deleted; its number was right by chance."""
    state = PartitionState()
    state.apply(1, Page(VERSION, "a", 0.0, [JoinRecord(*KEY, b""), batched(0)], "this life"))
    assert state.apply(2, Page(VERSION, "b", 0.0, [batched(7)], "that life")) == []
    assert (state.stale_epoch_pages, state.invalid_records, state.position, state.streams[KEY].last_seq) == (1, 0, 2, 0)
    assert PartitionState.decode(state.encode()).epoch == "this life"


def test_long_texts_count() -> None:
    """A page stays within its room whatever engines give as reasons, and are called."""
    keys = [("ü" * 100, rank) for rank in range(40)]
    builder = PageBuilder(PartitionState(), "b" * 128, 4_000, "life")
    for key in keys:
        builder.resync(key)
        builder.enqueue(JoinRecord(*key, bytes(300)))
        builder.enqueue(IncarnationRecord(*key, 1, "reason " * 70))
        builder.enqueue(TrustRecord(*key, "b" * 128, "DEGRADED", "ü" * 500, dict.fromkeys(DOUBTS, 2**60)))
    position = 0
    while (page := builder.build(0.0, 0.0)) is not None:
        position += 1
        assert len(encode_page(page)) <= 4_000 + 300
        builder.acknowledge(position)
        assert position < 200
    assert {*builder.state.streams} == {*keys}
    assert all(stream.trust_reports for stream in builder.state.streams.values())


DOUBTS = [doubt.name for doubt in PERSISTENT_REASONS]


def test_a_page_stays_within_its_room() -> None:
    builder = bridge("a", JoinRecord(*KEY, b""), *(batched(number, bytes(100)) for number in range(50)))
    for position in range(1, 40):
        page = builder.build(0.0, 0.0)
        if page is None:
            break
        assert len(encode_page(page)) <= ROOM + RECORD_BYTES
        builder.acknowledge(position)
    assert (builder.queued_records, builder.queued_bytes, builder.written) == (0, 0, 50)


# --- the page that is under way


def several(count: int, size: int = 200, first: int = 0) -> list[BatchRecord]:
    return [batched(seq, b"%d " % seq + bytes(size)) for seq in range(first, first + count)]


def composed(builder: PageBuilder) -> Page:
    page = builder.build(0.0, 0.0)
    assert page is not None
    return page


def test_what_comes_while_a_page_is_under_way_goes_into_the_next_one() -> None:
    """Nothing is settled before the page is there."""
    partition = Partition()
    one = bridge("a", JoinRecord(*KEY, b""), *several(2))
    page = composed(one)
    for record in several(10, first=2):
        one.enqueue(record)
    one.enqueue(TrustRecord(*KEY, "a", "EXACT", "", {}))
    assert (one.queued_records, one.build(0.0, 0.0)) == (13, None)
    partition.append(page, 0)
    one.acknowledge(1)
    while write(partition, one):
        pass
    state, found = partition.state()
    assert numbers(found) == list(range(12))
    assert (one.queued_records, one.queued_bytes, one.next_due()) == (0, 0, None)
    assert (state.void_pages, state.duplicate_records, state.streams[KEY].trust_reports["a"].trust) == (0, 0, "EXACT")
    assert one.state.encode() == state.encode()


def test_a_page_of_another_bridge_withdraws_the_page_in_flight() -> None:
    one = bridge("a", JoinRecord(*KEY, b""), *several(2))
    first = composed(one)
    one.apply(1, Page(VERSION, "b", 0.0, [HeartbeatRecord("b", 1.0, 0.0)]))
    assert (one.queued_records, one.acknowledge(2)) == (3, [])
    assert composed(one).records == first.records


def test_a_page_in_flight_settles_nothing_of_a_stream_that_was_resubscribed() -> None:
    """Its records belong to an earlier attempt: what the log says then counts."""
    one = bridge("a", JoinRecord(*KEY, b""), batched(0), batched(1))
    composed(one)
    one.resync(KEY)
    for record in (JoinRecord(*KEY, b""), batched(1), batched(2)):
        one.enqueue(record)
    one.acknowledge(1)
    assert one.queued_records == 3
    page = composed(one)
    assert [record.seq for record in page.records if isinstance(record, BatchRecord)] == [2]
    one.acknowledge(2)
    assert (one.queued_records, one.queued_bytes, one.state.duplicate_records) == (0, 0, 0)
    one.enqueue(LeaveRecord(*KEY, "gone"))
    composed(one)
    one.forget(KEY)
    one.acknowledge(3)
    assert (one.queued_records, one.queued_bytes, one.state.registrations()) == (0, 0, {})


def test_a_beat_that_did_not_get_there_is_said_again() -> None:
    one = bridge("a")
    one.set_heartbeat(HeartbeatRecord("a", 1.0, 7.0))
    assert composed(one).records == [HeartbeatRecord("a", 1.0, 7.0)]
    assert one.build(0.0, 0.0) is None
    one.withdraw()
    assert composed(one).records == [HeartbeatRecord("a", 1.0, 7.0)]
    one.set_heartbeat(HeartbeatRecord("a", 1.0, 8.0))
    one.withdraw()
    assert composed(one).records == [HeartbeatRecord("a", 1.0, 8.0)]


def test_a_batch_in_pieces_waits_for_each_of_them() -> None:
    """Where the next piece begins is known once the one before is there."""
    one = bridge("a", JoinRecord(*KEY, b""))
    composed(one)
    one.acknowledge(1)
    one.enqueue(batched(0, bytes(3_000)))
    one.enqueue(batched(1))
    assert [type(record) for record in composed(one).records] == [FragmentRecord]
    assert one.build(0.0, 0.0) is None
    one.acknowledge(2)
    assert [record.offset for record in composed(one).records if isinstance(record, FragmentRecord)] == [
        ROOM - RECORD_BYTES - len(KEY[0])
    ]


def test_a_snapshot_knows_which_page_was_the_last() -> None:
    """A reader that begins with it reads the next page in the same way as a reader of everything."""
    one = bridge("a", JoinRecord(*KEY, b""), *several(8))
    first = composed(one)
    one.acknowledge(1)
    second = composed(one)
    for known, other in (
        (first, 0),
        (Page(VERSION, "b", 0.0, [JoinRecord(*KEY, b"")], name="other", history=EMPTY_HISTORY), 1),
    ):
        whole = PartitionState()
        whole.apply(1, known)
        restored = PartitionState.decode(whole.encode())
        assert restored.apply(2, second) == whole.apply(2, second)
        assert whole.void_pages == restored.void_pages == other


# --- any number of bridges, killed, cut off and late, over several lives of an engine


@dataclass
class Engine:
    """Lives, each a list of payloads."""

    lives: list[list[bytes]] = field(default_factory=lambda: [[]])
    first: int = 0
    """Number of the oldest batch that the replay buffer of the present life still has."""

    @property
    def now(self) -> list[bytes]:
        return self.lives[-1]


@dataclass
class Sent:
    """A page that is under way: it may arrive late, or never, and so may its answer."""

    page: Page
    expected: int
    arrived: bool = False
    position: int | None = None
    """Under which the server has taken it."""


@dataclass
class Watcher:
    """A bridge around a composer: follows the engine as a subscriber does."""

    builder: PageBuilder
    life: list[bytes]
    incarnation: int = 0
    handed: int = 0
    sent: Sent | None = None
    """What the composer believes to be under way."""
    reconnected: bool = False
    """Whether its tail has to be verified before anything else (`PartitionReader`, `PartitionWriter.connected`)."""

    def reconnect(self) -> None:
        """What is under way counts as not acknowledged from here on."""
        self.sent = None
        self.builder.withdraw()
        self.reconnected = True

    def has_tail(self, partition: Partition) -> bool:
        """Whether the partition still holds what was read of it."""
        position, name, _ = self.builder.state.tail
        page = decode_page(partition.pages[position - 1]) if 0 < position <= len(partition.pages) else None
        return not position or (page is not None and page.name == name)

    def follow(self, engine: Engine) -> None:
        """Hand over what is new; a new life begins with a reset."""
        if self.life is not engine.now:
            self.life, self.handed = engine.now, 0
            self.incarnation += 1
            self.builder.enqueue(IncarnationRecord(*KEY, self.incarnation, "restart"))
        if self.handed < engine.first:
            self.builder.enqueue(GapRecord(*KEY, self.incarnation, self.handed, engine.first - 1))
            self.handed = engine.first
        for seq in range(self.handed, len(self.life)):
            self.builder.enqueue(batched(seq, self.life[seq], self.incarnation))
        self.handed = len(self.life)

    def resume(self, engine: Engine) -> None:
        """From where the log stands, as `Subscriber.add(resume=...)` does it: proven by the newest batch, or a reset."""
        checkpoint, self.incarnation = self.builder.state.resume_point(KEY, "")
        self.builder.resync(KEY)
        self.builder.enqueue(JoinRecord(*KEY, b"card"))
        self.life, self.handed = engine.now, 0
        if checkpoint is None:
            return
        self.incarnation = checkpoint.incarnation
        held = [
            engine.first <= each.seq < len(self.life) and payload_digest(self.life[each.seq]) == each.digest
            for each in checkpoint.fingerprints
        ]
        if held and all(held):
            self.handed = checkpoint.last_seq + 1
            return
        self.incarnation += 1
        self.builder.enqueue(IncarnationRecord(*KEY, self.incarnation, "not proven"))

    def read(self, partition: Partition) -> None:
        """What is in the partition, its own pages among it, as the reader of a bridge's partition does."""
        builder = self.builder
        for position in range(builder.state.position + 1, len(partition.pages) + 1):
            page = decode_page(partition.pages[position - 1])
            assert page is not None
            if self.sent is not None and self.sent.page.name == page.name:
                builder.acknowledge(position)
            else:
                builder.apply(position, page)
            self.sent = None

    def receive_reply(self) -> None:
        """Receive the reply to the page in flight, or stop waiting for it."""
        sent, self.sent = self.sent, None
        if sent is not None and sent.position is not None:
            self.builder.acknowledge(sent.expected + 1)
        else:
            self.builder.withdraw()


class Story:
    """Three bridges, one partition, one engine, and what happens to them."""

    def __init__(self) -> None:
        self.partition, self.engine = Partition(), Engine()
        self.made = self.lives = 0
        self.network: list[Sent] = []
        """What was sent, and has not arrived."""
        self.watchers = [self.begin(at) for at in range(3)]

    def begin(self, at: int) -> Watcher:
        self.lives += 1
        builder = PageBuilder(PartitionState(), f"bridge {at}", ROOM, f"life {self.lives}")
        self.partition.read(builder)
        watcher = Watcher(builder, [])
        watcher.resume(self.engine)
        return watcher

    def publish(self, _: int, size: int = 0) -> None:
        self.made += 1
        self.engine.now.append(b"%d " % self.made + bytes(size))

    def many(self, at: int) -> None:
        """More than there is room for in a page."""
        for _ in range(5):
            self.publish(at, 400)

    def large(self, at: int) -> None:
        self.publish(at, 2_500)

    def restart(self, _: int) -> None:
        self.engine.lives.append([])
        self.engine.first = 0

    def overflow(self, _: int) -> None:
        """The engine's replay buffer keeps only the newest batch: a bridge that has not received the others has lost them."""
        self.engine.first = max(0, len(self.engine.now) - 1)

    def miss(self, at: int) -> None:
        """The engine restarts twice, and one bridge sees it only once: another one follows the life between."""
        self.restart(at)
        self.many(at)
        other = (at + 1) % len(self.watchers)
        self.read(other)
        self.follow(other)
        for _ in range(8):
            self.write(other)
        self.restart(at)

    def follow(self, at: int) -> None:
        self.watchers[at].follow(self.engine)

    def resubscribe(self, at: int) -> None:
        """Subscribe to the stream again, whatever of it is in flight."""
        self.watchers[at].resume(self.engine)

    def kill(self, at: int) -> None:
        self.watchers[at] = self.begin(at)

    def crash(self, at: int) -> None:
        """The server loses its last acknowledged pages; what is in the network may reach it after all."""
        del self.partition.pages[max(0, len(self.partition.pages) - 1 - 2 * at) :]
        for watcher in self.watchers:
            watcher.reconnect()

    def verify(self, at: int) -> None:
        """A bridge with a new connection begins again where the partition does not hold what it has read."""
        watcher = self.watchers[at]
        if watcher.reconnected and not watcher.has_tail(self.partition):
            self.kill(at)
        watcher.reconnected = False

    def send(self, at: int) -> None:
        """A page is under way, if none is."""
        self.verify(at)
        watcher = self.watchers[at]
        page = watcher.builder.build(0.0, 0.0)
        if page is not None:
            watcher.sent = Sent(page, watcher.builder.state.position)
            self.network.append(watcher.sent)
        if watcher.builder.diverged:
            watcher.resume(self.engine)

    def arrive(self, at: int) -> None:
        """One of the oldest pages that are under way: they may overtake each other."""
        if self.network:
            sent = self.network.pop(min(at, len(self.network) - 1))
            sent.arrived, sent.position = True, self.partition.append(sent.page, sent.expected)

    def lose(self, at: int) -> None:
        if self.network:
            self.network.pop(min(at, len(self.network) - 1))

    def receive_reply(self, at: int) -> None:
        self.watchers[at].receive_reply()

    def read(self, at: int) -> None:
        self.verify(at)
        self.watchers[at].read(self.partition)

    def write(self, at: int) -> None:
        """All of it at once, if it is the only one."""
        self.send(at)
        while self.network:
            self.arrive(0)
        self.receive_reply(at)
        self.read(at)

    def end(self) -> None:
        """Each follows, reads and writes until there is nothing more to write."""
        for at in [at for _ in range(12) for at in range(3)]:
            self.follow(at)
            for _ in range(12):
                self.read(at)
                self.write(at)


DEEDS = (
    *("publish", "publish", "many", "follow", "follow", "write", "write", "send", "send", "send", "arrive", "arrive", "arrive"),
    *("receive_reply", "receive_reply", "read", "lose", "restart", "kill", "large", "resubscribe", "overflow", "miss", "crash"),
)
STEPS = 120
"""Of a story: it takes a while until much is in flight."""


@given(st.integers(0, 2**32), st.integers(0, 60))
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_log_is_one_story_whatever_becomes_of_its_writers(seed: int, taken_at: int) -> None:
    """In the end the log's last incarnation is the engine's life, each batch once, in order, also behind a snapshot.

    Any number of pages are in flight, those too that their bridges wait for no more. They, or their answers, arrive late, in
    another order, or never. Engines restart while some bridges do not look, and forget batches that no bridge has. The server
    loses pages that it has acknowledged, and uses their numbers again. No incarnation has batches of two lives.
    """
    chance = Random(seed)
    story = Story()
    for _ in range(STEPS):
        getattr(story, chance.choice(DEEDS))(chance.randrange(3))
    story.end()
    state, found = story.partition.state()
    assert (state.invalid_records, state.duplicate_records) == (0, 0)
    last = max((at for at, event in enumerate(found) if isinstance(event, Reset)), default=-1)
    batches = [event for event in found[last + 1 :] if isinstance(event, RawBatch)]
    now = story.engine.now
    assert [event.payload for event in batches] == [now[event.seq] for event in batches]
    assert {event.seq for event in batches} >= {*range(story.engine.first, len(now))}
    lives = {payload: life for life, payloads in enumerate(story.engine.lives) for payload in payloads}
    seen: dict[int, set[int]] = {}
    for event in found:
        if isinstance(event, RawBatch):
            seen.setdefault(event.incarnation, set()).add(lives[event.payload])
    assert all(len(of_one) == 1 for of_one in seen.values())
    assert all((watcher.builder.queued_records, watcher.builder.queued_bytes) == (0, 0) for watcher in story.watchers)
    assert all(watcher.builder.state.encode() == state.encode() for watcher in story.watchers)
    begun = Partition(story.partition.pages[:taken_at]).state()[0]
    late = PageBuilder(PartitionState.decode(begun.encode()), "late", ROOM, "late")
    story.partition.read(late)
    assert late.state.encode() == state.encode()
