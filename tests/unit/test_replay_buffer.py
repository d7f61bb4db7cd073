"""`ReplayBuffer` and its snapshots: no consumer takes them for more than they are, whenever and from wherever it requests
replay."""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.events import AllBlocksCleared, BlockStored, KVEvent, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher.compaction import MAX_SNAPSHOT_PARTS, Compactor, SequencedPayload
from kvevents.publisher.replay_buffer import CompactedHistory, ReplayBuffer
from kvevents.publisher.settings import ReplayBufferSettings
from kvevents.stream import Batch, Source, Stream
from kvevents.wire import decode_batch, encode_batch
from kvevents.wire.framing import live_frames, replay_batch_frames, replay_end_frames
from publisher_engine import WORKER, Engine

NOTHING = f"{0:032x}"
DEFAULTS = ReplayBufferSettings()
GROUP, GROUPS = DEFAULTS.group_size, DEFAULTS.min_groups
MAX_BYTES = 4_000
"""Bytes of some ten batches."""
FEW_BYTES = ReplayBufferSettings(max_bytes=MAX_BYTES)


def limited(limit: int | None) -> ReplayBufferSettings:
    """Settings with this limit of snapshot payloads; None for the default limit."""
    return DEFAULTS if limit is None else ReplayBufferSettings(max_payload_bytes=limit)


def digest(index: PrefixIndex) -> str:
    return index.digest(WORKER) if index.workers() else NOTHING


def indexed(batches: list[SequencedPayload]) -> str:
    index = PrefixIndex()
    for seq, payload in batches:
        index.apply_payload(WORKER, 0, seq, payload)
    return digest(index)


def numbers(batches: list[SequencedPayload]) -> list[int]:
    return [seq for seq, _ in batches]


class Sent:
    """Everything that was sent, the digest after each number, and the buffer under test."""

    def __init__(
        self, seed: int, steps: int, limit: int | None = None, holes: float = 0.0, buffer: ReplayBufferSettings | None = None
    ) -> None:
        self._random = random.Random(seed)
        self._engine = Engine(seed)
        self._holes = holes
        self.buffer = ReplayBuffer.compacting(steps, settings=buffer or limited(limit))
        self.batches: list[SequencedPayload] = []
        self.digests: list[str] = []
        self.whole: list[bool] = []
        """By number: what is resident, and whether nothing is missing since the last clear."""
        self._index = PrefixIndex()

    def publish(self) -> SequencedPayload | None:
        """Publish one more number; return None if it is a missing one."""
        number = len(self.digests)
        if self._random.random() < self._holes:
            self.digests.append(digest(self._index))
            self.whole.append(False)
            return None
        events = self._engine.clear() if self._random.random() < 0.03 else self._engine.events()
        batch = (number, encode_batch(KVEventBatch(float(number), events, 3)))
        self._index.apply_payload(WORKER, 0, *batch)
        self.digests.append(digest(self._index))
        before = not self.whole or self.whole[-1]
        self.whole.append(before or any(isinstance(event, AllBlocksCleared) for event in events))
        self.batches.append(batch)
        self.buffer.extend([batch])
        return batch

    def publish_many(self, count: int) -> Sent:
        for _ in range(count):
            self.publish()
        return self


class Consumer:
    """A stream and an index behind connections that lose batches, lag and break."""

    def __init__(self, sent: Sent, seed: int, loss: float) -> None:
        self._sent = sent
        self._random = random.Random(seed)
        self._loss = loss
        self._live: deque[SequencedPayload] = deque()
        self._reply: deque[list[bytes]] = deque()
        self._now = 0.0
        self._up = False
        self.stream = Stream(Source("tcp://a:1", "tcp://a:2", name="engine"))
        self.index = PrefixIndex()

    def receive(self, batch: SequencedPayload) -> None:
        if self._up:
            self._live.append(batch)

    def act(self) -> None:
        """Do one random thing that may happen to a consumer, and handle its consequences."""
        chance = self._random.random()
        if not self._up:
            self._up = True
            self.stream.connected(self._now)
        elif chance < 0.02:
            self._up = False
            self._live.clear()
            self.stream.disconnected()
        elif chance < 0.45:
            self._receive_live(self._random.randrange(1, 6))
        elif chance < 0.85:
            self._receive_replies(self._random.randrange(1, 6))
        elif chance < 0.88:
            self._reply.clear()  # in the middle of it
        else:
            self._now += self._random.choice([0.1, 0.6, 2.5])
            self.stream.tick(self._now)
        self._settle()

    def _receive_live(self, count: int) -> None:
        for _ in range(min(count, len(self._live))):
            seq, payload = self._live.popleft()
            if self._random.random() >= self._loss:
                self.stream.receive_live(live_frames(b"", seq, payload), self._now)
                self._settle()

    def _receive_replies(self, count: int) -> None:
        for _ in range(min(count, len(self._reply))):
            if self._reply:
                self.stream.receive_replay(self._reply.popleft(), self._now)
                self._settle()

    def _settle(self) -> None:
        ask = self.stream.request_to_send(self._now)
        if ask is not None:
            if ask.new_connection:
                self._reply.clear()
            self._reply.extend(replay_batch_frames(b"", *batch) for batch in self._sent.buffer.batches_from(ask.start))
            self._reply.append(replay_end_frames(with_topic=True))
        for delivery in self.stream.deliveries():
            report = self.index.apply(delivery).report
            if isinstance(delivery, Batch) and report is not None:
                self.stream.report(delivery, report)
        if self.stream.trust.name == "EXACT" and self.stream.last_seq >= 0:
            number = self.stream.last_seq
            assert self._sent.whole[number], f"EXACT at {number}, though something is missing"
            assert digest(self.index) == self._sent.digests[number], f"EXACT and wrong at {number}"


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    steps=st.sampled_from([1, 3, 10]),
    limit=st.sampled_from([None, 900, 600]),
    holes=st.sampled_from([0.0, 0.03]),
    loss=st.sampled_from([0.0, 0.05]),
)
def test_no_consumer_is_exact_and_wrong(seed: int, steps: int, limit: int | None, holes: float, loss: float) -> None:
    """Random histories have missing numbers, snapshots of one part and of several, and a consumer that lags behind the whole
    buffer, loses live batches, and loses its connections during replies. Whenever it is EXACT it is right."""
    sent = Sent(seed, steps, limit, holes)
    draw = random.Random(seed + 1)
    consumer = Consumer(sent, seed + 2, loss)
    sent.publish_many(draw.randrange(40))
    for _ in range(150):
        for _ in range(draw.choice([0, 0, 0, 1, 1, 3])):
            batch = sent.publish()
            if batch is not None:
                consumer.receive(batch)
        consumer.act()


@pytest.mark.parametrize("limit", [None, 600])
@pytest.mark.parametrize("seed", range(8))
def test_a_consumer_without_losses_becomes_exact(seed: int, limit: int | None) -> None:
    """The property above would hold if no consumer were ever exact. Without losses, a late consumer is exact after live
    batches."""
    sent = Sent(seed, 3, limit).publish_many(50)
    consumer = Consumer(sent, seed, loss=0.0)
    for turn in range(400):
        consumer.act()
        if turn >= 200 and turn % 20 == 0:
            live = sent.publish()
            assert live is not None
            consumer.receive(live)
        if consumer.stream.trust.name == "EXACT" and consumer.stream.last_seq >= 50:
            return
    pytest.fail(f"never exact: {consumer.stream.trust}")


# --- many bytes


def test_the_bytes_of_the_buffer_are_limited() -> None:
    """Evicted batches are in the snapshot, and a request from anywhere gets everything."""
    sent = Sent(3, 10_000, buffer=FEW_BYTES)
    most = 0
    for _ in range(300):
        sent.publish()
        count, size = sent.buffer.size()
        assert size <= MAX_BYTES or count == 1
        assert size == sum(len(payload) for _, payload in sent.batches[-count:])
        most = max(most, count)
        reply = sent.buffer.batches_from(0)
        assert indexed(reply) == sent.digests[-1]
        assert reply[-count:] == sent.batches[-count:]
    assert 5 < most < 100


def test_the_newest_batch_stays_however_large() -> None:
    """Replay needs its number; earlier batches have been evicted."""
    buffer = ReplayBuffer.compacting(100, settings=FEW_BYTES)
    large = encode_batch(KVEventBatch(0.0, [BlockStored([2], None, list(range(MAX_BYTES)), MAX_BYTES, medium="GPU")]))
    batches = [*Sent(3, 100).publish_many(5).batches, (5, large)]
    buffer.extend(batches)
    assert buffer.size() == (1, len(large))
    assert buffer.batches_from(5) == [(5, large)]
    assert indexed(buffer.batches_from(0)) == indexed(batches)


def test_without_compaction_bytes_are_not_limited() -> None:
    """As in the engines, evicted batches would be lost. The same holds if the history is unavailable."""
    sent = Sent(3, 100).publish_many(100)
    plain = ReplayBuffer(100, settings=FEW_BYTES)
    plain.extend(sent.batches)
    assert plain.batches_from(0) == sent.batches
    assert plain.size()[1] > MAX_BYTES
    lost = ReplayBuffer.compacting(100, settings=FEW_BYTES)
    lost.restore(3, [b"no batch"], False, sent.batches[4:])
    assert len(lost) == 96


# --- something is missing


def test_a_snapshot_ends_before_a_missing_number() -> None:
    """An empty batch with the number of its last batch follows."""
    sent = Sent(0, 2).publish_many(4)
    batches = [(seq + (seq > 1), payload) for seq, payload in sent.batches]  # number 2 is missing
    buffer = ReplayBuffer.compacting(1)
    buffer.extend(batches)
    assert numbers(buffer.batches_from(0)) == [1, 3, 4]
    assert numbers(buffer.batches_from(1)) == [1, 3, 4]
    assert numbers(buffer.batches_from(2)) == [4]
    assert numbers(buffer.batches_from(3)) == [4]
    stand_in = decode_batch(buffer.batches_from(0)[1][1]).batch
    assert (stand_in.events, stand_in.data_parallel_rank) == ([], 3)
    assert indexed(buffer.batches_from(0)) == sent.digests[-1]


def test_without_the_first_number_there_is_no_snapshot() -> None:
    """The reply has the buffered batches, and the statistics have the reason."""
    buffer = ReplayBuffer.compacting(1)
    buffer.extend([(seq + 1, payload) for seq, payload in Sent(0, 2).publish_many(4).batches])
    assert numbers(buffer.batches_from(0)) == [4]
    history = buffer.history_stats()
    assert history is not None
    assert (history.partial, history.unavailable_reason) == (True, "batches")


def test_numbers_may_begin_anywhere() -> None:
    """With a clear in the first batch nothing is missing, whatever its number is."""
    clear = encode_batch(KVEventBatch(0.0, [AllBlocksCleared()], 3))
    batches = [(1000, clear), *((1001 + seq, payload) for seq, payload in Sent(1, 2).publish_many(6).batches)]
    buffer = ReplayBuffer.compacting(2)
    buffer.extend(batches)
    assert numbers(buffer.batches_from(0)) == [1004, 1005, 1006]
    assert indexed(buffer.batches_from(0)) == indexed(batches)


# --- more than one batch


def test_a_large_snapshot_has_parts() -> None:
    """They end with the number of the last batch they contain. Each one respects the limit, and only the first has a clear.
    Only requests from before the first part get them."""
    sent = Sent(2, 3, limit=600).publish_many(60)
    reply = sent.buffer.batches_from(0)
    first = reply[0][0]
    parts = [batch for batch in reply if batch[0] < 57]
    assert len(parts) > 1
    assert numbers(reply) == list(range(first, 60))
    assert all(len(payload) <= 600 for _, payload in parts)
    clears = [AllBlocksCleared in map(type, decode_batch(payload).batch.events) for _, payload in parts]
    assert clears == [True] + [False] * (len(parts) - 1)
    assert indexed(reply) == sent.digests[-1]
    for start in range(60):
        found = sent.buffer.batches_from(start)
        assert found == (reply if start < first else sent.batches[max(start, 57) :])


def test_two_snapshots_share_no_number() -> None:
    """Until a new snapshot can have its own numbers, the last one is sent, then the batches evicted since."""
    sent = Sent(2, 3, limit=600).publish_many(60)
    before = sent.buffer.batches_from(0)
    parts = {seq: payload for seq, payload in before if seq < 57}
    for _ in range(3 * MAX_SNAPSHOT_PARTS):
        sent.publish()
        reply = sent.buffer.batches_from(0)
        assert indexed(reply) == sent.digests[-1]
        assert numbers(reply) == list(range(reply[0][0], len(sent.digests)))
        shared = [batch for batch in reply if batch[0] in parts]
        assert all(parts[seq] == payload for seq, payload in shared)
        if not shared:
            return
    pytest.fail("the first snapshot was never replaced")


def test_without_numbers_for_all_parts_there_is_no_snapshot() -> None:
    """Two parts need a number each, and one more from which to request them. There is a snapshot when more batches have been
    evicted."""
    blocks = BlockStored(list(range(1, 401)), None, list(range(1_600)), 4, medium="GPU")
    buffer = ReplayBuffer.compacting(1, settings=limited(2_000))
    payloads = [encode_batch(KVEventBatch(0.0, [blocks])), *[encode_batch(KVEventBatch(0.0, []))] * 20]
    buffer.extend(list(enumerate(payloads[:2])))
    assert numbers(buffer.batches_from(0)) == [1]
    history = buffer.history_stats()
    assert history is not None
    assert history.unavailable_reason == "oversized"
    buffer.extend(list(enumerate(payloads))[2:])
    reply = buffer.batches_from(0)
    assert reply[0][0] > 0
    assert indexed(reply) == indexed(list(enumerate(payloads)))


# --- another life


@pytest.mark.parametrize("limit", [None, 900])
@pytest.mark.parametrize("missing", [False, True])
@given(st.integers(0, 2**16), st.integers(0, 12))
def test_another_buffer_continues_a_history(limit: int | None, missing: bool, seed: int, more: int) -> None:
    """With the compacted history of the first buffer and the later batches, it replies as the first one would."""
    sent = Sent(seed, 4, limit, holes=0.1 if missing else 0.0).publish_many(30)
    collapsed = sent.buffer.compacted_history()
    assert collapsed is not None
    sent.publish_many(more)
    other = ReplayBuffer.compacting(4, settings=limited(limit))
    other.restore(*collapsed, [batch for batch in sent.batches if batch[0] > collapsed.last_seq], rank=3)
    assert other.size() == sent.buffer.size()
    mine, theirs = other.history_stats(), sent.buffer.history_stats()
    assert mine is not None
    assert theirs is not None
    assert (mine.batches, mine.blocks, mine.partial) == (theirs.batches, theirs.blocks, theirs.partial)
    reply = other.batches_from(0)
    assert reply[-len(other) :] == sent.batches[-len(other) :]
    if mine.unavailable_reason is None and numbers(reply)[0] < sent.batches[-len(other)][0]:
        assert indexed(reply) == sent.digests[-1]
        assert {decode_batch(payload).batch.data_parallel_rank for _, payload in reply} == {3}


def test_a_snapshot_has_the_time_of_the_last_batch() -> None:
    """This also holds for a restored buffer, which has only the compacted history."""
    sent = Sent(0, 2).publish_many(9)
    collapsed = sent.buffer.compacted_history()
    assert collapsed is not None
    assert collapsed.last_seq == 6
    other = ReplayBuffer.compacting(2)
    other.restore(*collapsed, sent.batches[7:], rank=3)
    for buffer in (sent.buffer, other):
        batch = decode_batch(buffer.batches_from(0)[0][1]).batch
        assert (batch.ts, batch.data_parallel_rank) == (6.0, 3)


def test_without_evicted_batches_there_is_no_history() -> None:
    assert Sent(0, 10).publish_many(5).buffer.compacted_history() is None
    assert ReplayBuffer(0).compacted_history() is None


def test_the_history_can_be_read_while_another_thread_sends() -> None:
    """Each result has the state after its last number."""
    sent = Sent(5, 3)
    ended = threading.Event()
    found: list[CompactedHistory] = []

    def collapse() -> None:
        while not ended.is_set() or not found:
            collapsed = sent.buffer.compacted_history()
            if collapsed is not None:
                found.append(collapsed)

    thread = threading.Thread(target=collapse)
    thread.start()
    sent.publish_many(300)
    ended.set()
    thread.join(20.0)
    assert found
    for collapsed in found[:: max(1, len(found) // 20)]:
        other = ReplayBuffer.compacting(1)
        other.restore(*collapsed, [(collapsed.last_seq + 1, encode_batch(KVEventBatch(0.0, [])))])
        assert indexed(other.batches_from(0)) == sent.digests[collapsed.last_seq]


class Compactions:
    """What was compacted in one call, and by which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._found: list[tuple[threading.Thread, list[SequencedPayload]]] = []
        self._changed = threading.Condition()
        fold = Compactor.extend

        def noting(history: Compactor, batches: list[SequencedPayload]) -> None:
            fold(history, batches)
            with self._changed:
                self._found.append((threading.current_thread(), batches))
                self._changed.notify()

        monkeypatch.setattr(Compactor, "extend", noting)

    def take(self, count: int) -> list[tuple[threading.Thread, list[SequencedPayload]]]:
        """Return the calls that compacted `count` batches together, when all are compacted."""
        with self._changed:
            assert self._changed.wait_for(lambda: sum(len(batches) for _, batches in self._found) >= count, 20.0)
            found, self._found = self._found, []
        assert sum(len(batches) for _, batches in found) == count
        return found


@pytest.mark.parametrize(("waiting", "in_pieces"), [(GROUP, True), (2 * GROUP, True), (2 * GROUP + 1, False)])
def test_the_compaction_thread_works_in_small_pieces(monkeypatch: pytest.MonkeyPatch, waiting: int, in_pieces: bool) -> None:
    """The sending thread then waits for a CPU only briefly. With a large backlog, pauses would let it grow, so there are
    none."""
    folds, steps, numbers = Compactions(monkeypatch), GROUP * GROUPS, itertools.count()
    buffer = ReplayBuffer.compacting(steps)
    thread = threading.Thread(target=buffer.compact_until_stopped, daemon=True)
    events: list[KVEvent] = [BlockStored(list(range(100)), None, list(range(200)), 2)]
    payload = encode_batch(KVEventBatch(1.0, events))

    def send(count: int) -> None:
        buffer.extend([(next(numbers), payload) for _ in range(count)])

    send(steps)
    thread.start()
    for _ in range(100_000):  # until it has started, `extend` compacts
        send(GROUP)
        if folds.take(GROUP)[0][0] is thread:
            break
    send(waiting)
    sizes = [sum(len(payload) for _, payload in batches) for _, batches in folds.take(waiting)]
    assert len(buffer) == steps
    assert (len(sizes) > 1) is in_pieces
    assert (max(sizes) <= DEFAULTS.compaction_bytes) is in_pieces
    buffer.stop_compacting()
    thread.join(20.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("steps", [1, 15, 16, 100, 64 * 16, 64 * 16 + 500])
def test_batches_are_evicted_in_groups(steps: int) -> None:
    """At most one group is buffered beyond `steps`, and without compaction none. Compacted and buffered batches together are
    always complete."""
    most = steps + min(GROUP - 1, steps // GROUPS)
    sent, plain, sizes = Sent(5, steps), ReplayBuffer(steps), set()
    for number in range(most + 3 * GROUP):
        batch = sent.publish()
        assert batch is not None
        plain.extend([batch])
        kept = len(sent.buffer)
        sizes.add(kept)
        assert min(number + 1, steps) <= kept <= most
        assert len(plain) == min(number + 1, steps)
        stats = sent.buffer.history_stats()
        assert stats is not None
        assert stats.batches + kept == number + 1
    assert max(sizes) == most
    found = sent.buffer.batches_from(0)
    assert indexed(found) == sent.digests[-1]
    assert numbers(found) == list(range(found[0][0], len(sent.digests)))
