"""The sequencer: deliveries and gaps cover the numbers of an incarnation; its buffers are bounded in number and in bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvevents.stream import PendingBytes, StreamLimits, payload_digest
from kvevents.stream.sequencer import GapEnd, Order, ReorderBuffer, Sequencer, SnapshotParts

LIMITS = StreamLimits(max_pending_batches=5, max_pending_bytes=40, max_replayed_digests=5)

payloads = st.binary(max_size=50)
seqs = st.integers(0, 12)


@given(st.lists(payloads, max_size=12))
def test_the_newest_replayed_digests_are_stored(payloads: list[bytes]) -> None:
    """They are those of the batches that were delivered last."""
    sequencer = Sequencer(LIMITS, ReorderBuffer(LIMITS, PendingBytes()))
    for seq, payload in enumerate(payloads):
        sequencer.add_digest(seq, payload_digest(payload))
    newest = list(enumerate(payloads))[-LIMITS.max_replayed_digests :]
    assert sequencer.replayed_digests == {seq: payload_digest(payload) for seq, payload in newest}


@given(st.lists(st.tuples(st.booleans(), seqs, payloads)))
def test_the_reorder_buffer_respects_both_limits(steps: list[tuple[bool, int, bytes]]) -> None:
    """A batch without room is rejected. The room of a removed batch can be used again."""
    pending, model = ReorderBuffer(LIMITS, PendingBytes()), dict[int, bytes]()
    for adds, seq, payload in steps:
        if not adds:
            popped = pending.pop(seq)
            assert (None if popped is None else popped[0]) == model.pop(seq, None)
        elif seq not in model:
            fits = len(model) < 5 and sum(map(len, model.values())) + len(payload) <= 40
            assert pending.add(seq, payload, replayed=False) == fits
            model |= {seq: payload} if fits else {}
        assert len(pending) == len(model)
        assert pending.first() == min(model, default=None)


def test_a_batch_that_was_removed_out_of_order_leaves_the_heap() -> None:
    """A snapshot takes the place of a waiting batch, and another batch with its number arrives."""
    pending = ReorderBuffer(LIMITS, PendingBytes())
    for seq in (1, 2):
        assert pending.add(seq, b"", replayed=False)
    assert pending.pop(2)
    assert pending.add(2, b"", replayed=False)
    for seq in range(1, 1000):
        assert pending.pop(seq)
        assert pending.add(seq + 2, b"", replayed=False)
    assert len(pending._order) == 2
    assert pending.first() == 1000


class CoverageRecorder:
    """Feeds a sequencer like a stream, and records the numbers that deliveries and gaps cover."""

    def __init__(self) -> None:
        self.sequencer = Sequencer(LIMITS, ReorderBuffer(LIMITS, PendingBytes()))
        self.covered: list[int] = []

    def live(self, seq: int) -> None:
        order = self.sequencer.order_of(seq)
        if order is not Order.REGRESSED:
            self.sequencer.last_live = seq
        if order is Order.NEXT:
            self.deliver()
        elif order is Order.AHEAD:
            self.wait(seq, replayed=False)

    def replayed(self, seq: int) -> None:
        if seq == self.sequencer.next_seq:
            self.deliver()
        elif seq > self.sequencer.next_seq:
            self.wait(seq, replayed=True)

    def wait(self, seq: int, *, replayed: bool) -> None:
        self.sequencer.highest_known = max(self.sequencer.highest_known, seq)
        if self.sequencer.early.get(seq) is None:
            self.sequencer.early.add(seq, b"", replayed=replayed)

    def deliver(self) -> None:
        self.covered.append(self.sequencer.next_seq)
        self.sequencer.next_seq += 1
        self.drain()

    def drain(self) -> None:
        while self.sequencer.pop_next() is not None:
            self.covered.append(self.sequencer.next_seq)
            self.sequencer.next_seq += 1

    def give_up(self) -> None:
        if not self.sequencer.is_complete:
            gap = self.sequencer.gap_before_early_batches()
            assert gap.last >= self.sequencer.next_seq
            self.covered.extend(range(self.sequencer.next_seq, gap.last + 1))
            self.sequencer.next_seq = gap.last + 1
            self.drain()


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(("live", "replayed", "give up"))), max_size=60))
def test_deliveries_and_gaps_cover_every_number_once(steps: list[tuple[int, str]]) -> None:
    """In whatever order batches arrive, each number is delivered once or is part of one gap, in rising order."""
    recorder = CoverageRecorder()
    for seq, step in steps:
        if step == "live":
            recorder.live(seq)
        elif step == "replayed":
            recorder.replayed(seq)
        else:
            recorder.give_up()
    while not recorder.sequencer.is_complete:
        recorder.give_up()
    assert recorder.covered == list(range(recorder.sequencer.next_seq))
    assert len(recorder.sequencer.early) == 0


@given(st.integers(0, 20), st.integers(-1, 20), st.integers(0, 20))
def test_a_live_number_is_classified_by_the_next_and_the_last_live_one(next_seq: int, last_live: int, seq: int) -> None:
    """Numbers of one connection rise. A number below the next one was already replayed; above it, a batch is missing."""
    sequencer = Sequencer(LIMITS, ReorderBuffer(LIMITS, PendingBytes()))
    sequencer.next_seq, sequencer.last_live = next_seq, last_live
    order = sequencer.order_of(seq)
    assert (order is Order.REGRESSED) == (seq <= last_live)
    assert (order is Order.NEXT) == (last_live < seq == next_seq)
    assert (order is Order.KNOWN) == (last_live < seq < next_seq)
    assert (order is Order.AHEAD) == (seq > last_live and seq > next_seq)


@given(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=3), st.integers(1, 12))
def test_the_gap_before_an_answer_ends_at_an_earlier_batch_that_waits(next_seq: int, early: list[int], first: int) -> None:
    sequencer = Sequencer(LIMITS, ReorderBuffer(LIMITS, PendingBytes()))
    sequencer.next_seq = next_seq
    waiting = {next_seq + 1 + seq for seq in early}
    for seq in waiting:
        sequencer.early.add(seq, b"", replayed=False)
    seq = next_seq + first
    assert sequencer.gap_before(seq) == GapEnd(min(waiting | {seq}) - 1, compacted=False)


@given(st.integers(0, 5), st.booleans(), st.booleans())
def test_a_snapshot_is_truncated_if_an_answer_stops_after_a_part_that_is_not_final(
    seq: int, is_final: bool, is_read_late: bool
) -> None:
    """The heartbeat of the part may be read before or after the answer stops."""
    parts = SnapshotParts()
    parts.last = seq
    if not is_final and not is_read_late:
        parts.last_not_final = seq
    assert not parts.is_truncated
    parts.stop()
    if not is_final and is_read_late:
        parts.last_not_final = seq
    assert (parts.is_open, parts.is_truncated) == (False, not is_final)


def test_streams_share_one_limit_of_bytes() -> None:
    """Bytes that one stream holds are not available to other streams. Every removal from a buffer frees the bytes."""
    shared = PendingBytes(100)
    one, other = (ReorderBuffer(StreamLimits(), shared) for _ in range(2))
    assert one.add(5, bytes(60), replayed=False)
    assert not other.add(5, bytes(50), replayed=False)
    assert other.add(5, bytes(40), replayed=True)
    assert one.pop(5) is not None
    assert shared.bytes_used == 40
    assert one.add(6, bytes(20), replayed=False)
    assert one.add(7, bytes(20), replayed=False)
    assert one.pop_live_run(6) == [bytes(20), bytes(20)]
    other.drop_replayed()
    assert shared.bytes_used == 0
    assert other.add(8, bytes(100), replayed=False)
    assert other.clear() == 1
    assert shared.bytes_used == 0
