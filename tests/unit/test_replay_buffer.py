"""Replies of `ReplayBuffer` and their snapshots never make a consumer EXACT and wrong, whenever and from where it requests."""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding_stream import DecodingStream
from kvevents.events import AllBlocksCleared, BlockStored, KVEvent, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher.compaction import MAX_SNAPSHOT_PARTS, Compactor, SequencedPayload
from kvevents.publisher.replay_buffer import CompactedHistory, ReplayBuffer
from kvevents.publisher.settings import ReplayBufferSettings
from kvevents.stream import Batch, Source
from kvevents.wire import decode_batch, encode_batch
from kvevents.wire.framing import live_frames, replay_batch_frames, replay_end_frames
from publisher_engine import WORKER, Engine, compacting_buffer

EMPTY_DIGEST = f"{0:032x}"
DEFAULTS = ReplayBufferSettings()
GROUP, GROUPS = DEFAULTS.group_size, DEFAULTS.min_groups
MAX_BYTES = 4_000
"""Bytes of about ten batches."""
FEW_BYTES = ReplayBufferSettings(max_bytes=MAX_BYTES)


def settings_with_limit(limit: int | None) -> ReplayBufferSettings:
    """Return settings with this limit of snapshot payloads, or with the default limit for None."""
    return DEFAULTS if limit is None else ReplayBufferSettings(max_payload_bytes=limit)


def digest(index: PrefixIndex) -> str:
    return index.digest(WORKER) if index.workers() else EMPTY_DIGEST


def digest_of(batches: list[SequencedPayload]) -> str:
    index = PrefixIndex()
    for seq, payload in batches:
        index.apply_payload(WORKER, 0, seq, payload)
    return digest(index)


def numbers(batches: list[SequencedPayload]) -> list[int]:
    return [seq for seq, _ in batches]


class ModelPublisher:
    """A publisher with everything that it has sent, the digest after each number, and the buffer under test."""

    def __init__(
        self, seed: int, steps: int, limit: int | None = None, gap_rate: float = 0.0, buffer: ReplayBufferSettings | None = None
    ) -> None:
        self._random = random.Random(seed)
        self._engine = Engine(seed)
        self._holes = gap_rate
        self.buffer = compacting_buffer(steps, settings=buffer or settings_with_limit(limit))
        self.batches: list[SequencedPayload] = []
        self.digests: list[str] = []
        self.is_complete: list[bool] = []
        """Whether nothing is missing since the last clear, by number. `digests` has the resident blocks by number."""
        self._index = PrefixIndex()

    def publish(self) -> SequencedPayload | None:
        """Publish the next batch and return it; return None if its number is skipped."""
        number = len(self.digests)
        if self._random.random() < self._holes:
            self.digests.append(digest(self._index))
            self.is_complete.append(False)
            return None
        events = self._engine.clear() if self._random.random() < 0.03 else self._engine.events()
        batch = (number, encode_batch(KVEventBatch(float(number), events, 3)))
        self._index.apply_payload(WORKER, 0, *batch)
        self.digests.append(digest(self._index))
        before = not self.is_complete or self.is_complete[-1]
        self.is_complete.append(before or any(isinstance(event, AllBlocksCleared) for event in events))
        self.batches.append(batch)
        self.buffer.extend([batch])
        return batch

    def publish_many(self, count: int) -> ModelPublisher:
        for _ in range(count):
            self.publish()
        return self


class Consumer:
    """A stream and an index behind connections that lose batches, lag and break."""

    def __init__(self, publisher: ModelPublisher, seed: int, loss: float) -> None:
        self._sent = publisher
        self._random = random.Random(seed)
        self._loss = loss
        self._live: deque[SequencedPayload] = deque()
        self._reply: deque[list[bytes]] = deque()
        self._now = 0.0
        self._up = False
        self.stream = DecodingStream(Source("tcp://a:1", "tcp://a:2", name="engine"))
        self.index = PrefixIndex()

    def receive(self, batch: SequencedPayload) -> None:
        if self._up:
            self._live.append(batch)

    def act(self) -> None:
        """Perform one random action of the consumer or its connections, and handle the consequences."""
        chance = self._random.random()
        if not self._up:
            self._up = True
            self.stream.begin_connection(self._now)
        elif chance < 0.02:
            self._up = False
            self._live.clear()
            self.stream.end_connection()
        elif chance < 0.45:
            self._receive_live(self._random.randrange(1, 6))
        elif chance < 0.85:
            self._receive_replies(self._random.randrange(1, 6))
        elif chance < 0.88:
            self._reply.clear()  # the connection breaks during a reply
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
        request = self.stream.request_to_send(self._now)
        if request is not None:
            if request.needs_new_connection:
                self._reply.clear()
            self._reply.extend(replay_batch_frames(b"", *batch) for batch in self._sent.buffer.batches_from(request.start))
            self._reply.append(replay_end_frames(has_topic=True))
        for delivery in self.stream.deliveries():
            report = self.index.apply(delivery).report
            if isinstance(delivery, Batch) and report is not None:
                self.stream.report(delivery, report)
        if self.stream.trust.name == "EXACT" and self.stream.last_seq >= 0:
            number = self.stream.last_seq
            assert self._sent.is_complete[number], f"EXACT at {number}, though something is missing"
            assert digest(self.index) == self._sent.digests[number], f"EXACT and wrong at {number}"


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    steps=st.sampled_from([1, 3, 10]),
    limit=st.sampled_from([None, 900, 600]),
    gap_rate=st.sampled_from([0.0, 0.03]),
    loss=st.sampled_from([0.0, 0.05]),
)
def test_no_consumer_is_exact_and_wrong(seed: int, steps: int, limit: int | None, gap_rate: float, loss: float) -> None:
    """Random histories have missing numbers and snapshots of one or several parts. The consumer lags behind the whole buffer,
    loses live batches, and loses its connections during replies. Whenever it is EXACT, its blocks are right."""
    publisher = ModelPublisher(seed, steps, limit, gap_rate)
    draw = random.Random(seed + 1)
    consumer = Consumer(publisher, seed + 2, loss)
    publisher.publish_many(draw.randrange(40))
    for _ in range(150):
        for _ in range(draw.choice([0, 0, 0, 1, 1, 3])):
            batch = publisher.publish()
            if batch is not None:
                consumer.receive(batch)
        consumer.act()


@pytest.mark.parametrize("limit", [None, 600])
@pytest.mark.parametrize("seed", range(8))
def test_a_consumer_without_losses_becomes_exact(seed: int, limit: int | None) -> None:
    """The property above would also hold if no consumer were ever EXACT. Without losses, a late consumer becomes EXACT after
    live batches."""
    publisher = ModelPublisher(seed, 3, limit).publish_many(50)
    consumer = Consumer(publisher, seed, loss=0.0)
    for turn in range(400):
        consumer.act()
        if turn >= 200 and turn % 20 == 0:
            live = publisher.publish()
            assert live is not None
            consumer.receive(live)
        if consumer.stream.trust.name == "EXACT" and consumer.stream.last_seq >= 50:
            return
    pytest.fail(f"never exact: {consumer.stream.trust}")


# --- limit of bytes


def test_the_bytes_of_the_buffer_are_limited() -> None:
    """Evicted batches are in the snapshot, and a request from anywhere gets everything."""
    publisher = ModelPublisher(3, 10_000, buffer=FEW_BYTES)
    largest = 0
    for _ in range(300):
        publisher.publish()
        count, size = publisher.buffer.size()
        assert size <= MAX_BYTES or count == 1
        assert size == sum(len(payload) for _, payload in publisher.batches[-count:])
        largest = max(largest, count)
        reply = publisher.buffer.batches_from(0)
        assert digest_of(reply) == publisher.digests[-1]
        assert reply[-count:] == publisher.batches[-count:]
    assert 5 < largest < 100


def test_the_newest_batch_is_buffered_however_large_it_is() -> None:
    """Replay needs its number. All earlier batches are evicted."""
    buffer = compacting_buffer(100, settings=FEW_BYTES)
    large = encode_batch(KVEventBatch(0.0, [BlockStored([2], None, list(range(MAX_BYTES)), MAX_BYTES, medium="GPU")]))
    batches = [*ModelPublisher(3, 100).publish_many(5).batches, (5, large)]
    buffer.extend(batches)
    assert buffer.size() == (1, len(large))
    assert buffer.batches_from(5) == [(5, large)]
    assert digest_of(buffer.batches_from(0)) == digest_of(batches)


def test_without_compaction_bytes_are_not_limited() -> None:
    """Without compaction, evicted batches would be lost, as in the engines. The same holds if the history is unavailable."""
    publisher = ModelPublisher(3, 100).publish_many(100)
    plain = ReplayBuffer(100, settings=FEW_BYTES)
    plain.extend(publisher.batches)
    assert plain.batches_from(0) == publisher.batches
    assert plain.size()[1] > MAX_BYTES
    lost = compacting_buffer(100, settings=FEW_BYTES)
    lost.restore(3, [b"no batch"], False)
    lost.extend(publisher.batches[4:])
    assert len(lost) == 96


# --- missing numbers


def test_a_snapshot_ends_before_a_missing_number() -> None:
    """An empty batch with the number of its last batch follows."""
    publisher = ModelPublisher(0, 2).publish_many(4)
    batches = [(seq + (seq > 1), payload) for seq, payload in publisher.batches]  # number 2 is missing
    buffer = compacting_buffer(1)
    buffer.extend(batches)
    assert numbers(buffer.batches_from(0)) == [1, 3, 4]
    assert numbers(buffer.batches_from(1)) == [1, 3, 4]
    assert numbers(buffer.batches_from(2)) == [4]
    assert numbers(buffer.batches_from(3)) == [4]
    empty_batch = decode_batch(buffer.batches_from(0)[1][1]).batch
    assert (empty_batch.events, empty_batch.data_parallel_rank) == ([], 3)
    assert digest_of(buffer.batches_from(0)) == publisher.digests[-1]


def test_without_the_first_number_there_is_no_snapshot() -> None:
    """The reply has the buffered batches, and the statistics have the reason."""
    buffer = compacting_buffer(1)
    buffer.extend([(seq + 1, payload) for seq, payload in ModelPublisher(0, 2).publish_many(4).batches])
    assert numbers(buffer.batches_from(0)) == [4]
    history = buffer.history_stats()
    assert history is not None
    assert (history.partial, history.unavailable_reason) == (True, "batches")


def test_the_first_sequence_number_can_be_any_number() -> None:
    """With a clear in the first batch nothing is missing, whatever its number is."""
    clear = encode_batch(KVEventBatch(0.0, [AllBlocksCleared()], 3))
    batches = [(1000, clear), *((1001 + seq, payload) for seq, payload in ModelPublisher(1, 2).publish_many(6).batches)]
    buffer = compacting_buffer(2)
    buffer.extend(batches)
    assert numbers(buffer.batches_from(0)) == [1004, 1005, 1006]
    assert digest_of(buffer.batches_from(0)) == digest_of(batches)


# --- snapshots of several parts


def test_a_large_snapshot_has_parts() -> None:
    """The parts end with the number of the last batch that they contain. Each part respects the limit, and only the first has
    a clear. Only requests from before the first part receive them."""
    publisher = ModelPublisher(2, 3, limit=600).publish_many(60)
    reply = publisher.buffer.batches_from(0)
    first = reply[0][0]
    parts = [batch for batch in reply if batch[0] < 57]
    assert len(parts) > 1
    assert numbers(reply) == list(range(first, 60))
    assert all(len(payload) <= 600 for _, payload in parts)
    clears = [AllBlocksCleared in map(type, decode_batch(payload).batch.events) for _, payload in parts]
    assert clears == [True] + [False] * (len(parts) - 1)
    assert digest_of(reply) == publisher.digests[-1]
    for start in range(60):
        found = publisher.buffer.batches_from(start)
        assert found == (reply if start < first else publisher.batches[max(start, 57) :])


def test_two_snapshots_share_no_number() -> None:
    """Until a new snapshot can have its own numbers, the buffer sends the last one and the batches evicted since then."""
    publisher = ModelPublisher(2, 3, limit=600).publish_many(60)
    before = publisher.buffer.batches_from(0)
    parts = {seq: payload for seq, payload in before if seq < 57}
    for _ in range(3 * MAX_SNAPSHOT_PARTS):
        publisher.publish()
        reply = publisher.buffer.batches_from(0)
        assert digest_of(reply) == publisher.digests[-1]
        assert numbers(reply) == list(range(reply[0][0], len(publisher.digests)))
        shared = [batch for batch in reply if batch[0] in parts]
        assert all(parts[seq] == payload for seq, payload in shared)
        if not shared:
            return
    pytest.fail("the first snapshot was never replaced")


def test_without_numbers_for_all_parts_there_is_no_snapshot() -> None:
    """A snapshot of two parts needs a number for each part, and a lower number for the request. When more batches have been
    evicted, a snapshot exists."""
    blocks = BlockStored(list(range(1, 401)), None, list(range(1_600)), 4, medium="GPU")
    buffer = compacting_buffer(1, settings=settings_with_limit(2_000))
    payloads = [encode_batch(KVEventBatch(0.0, [blocks])), *[encode_batch(KVEventBatch(0.0, []))] * 20]
    buffer.extend(list(enumerate(payloads[:2])))
    assert numbers(buffer.batches_from(0)) == [1]
    history = buffer.history_stats()
    assert history is not None
    assert history.unavailable_reason == "oversized"
    buffer.extend(list(enumerate(payloads))[2:])
    reply = buffer.batches_from(0)
    assert reply[0][0] > 0
    assert digest_of(reply) == digest_of(list(enumerate(payloads)))


# --- restored buffers


@pytest.mark.parametrize("limit", [None, 900])
@pytest.mark.parametrize("missing", [False, True])
@given(st.integers(0, 2**16), st.integers(0, 12))
def test_a_restored_buffer_replies_as_the_first_one(limit: int | None, missing: bool, seed: int, more: int) -> None:
    """With the compacted history of the first buffer and the later batches, it replies as the first one would."""
    publisher = ModelPublisher(seed, 4, limit, gap_rate=0.1 if missing else 0.0).publish_many(30)
    compacted = publisher.buffer.compacted_history()
    assert compacted is not None
    publisher.publish_many(more)
    other = compacting_buffer(4, settings=settings_with_limit(limit))
    other.restore(*compacted)
    other.extend([batch for batch in publisher.batches if batch[0] > compacted.last_seq])
    assert other.size() == publisher.buffer.size()
    restored_stats, first_stats = other.history_stats(), publisher.buffer.history_stats()
    assert restored_stats is not None
    assert first_stats is not None
    assert (restored_stats.batches, restored_stats.blocks, restored_stats.partial) == (
        first_stats.batches,
        first_stats.blocks,
        first_stats.partial,
    )
    reply = other.batches_from(0)
    assert reply[-len(other) :] == publisher.batches[-len(other) :]
    if restored_stats.unavailable_reason is None and numbers(reply)[0] < publisher.batches[-len(other)][0]:
        assert digest_of(reply) == publisher.digests[-1]
        assert {decode_batch(payload).batch.data_parallel_rank for _, payload in reply} == {3}


def test_a_snapshot_has_the_time_of_the_last_batch() -> None:
    """This also holds for a restored buffer, which has only the compacted history."""
    publisher = ModelPublisher(0, 2).publish_many(9)
    compacted = publisher.buffer.compacted_history()
    assert compacted is not None
    assert compacted.last_seq == 6
    other = compacting_buffer(2)
    other.restore(*compacted)
    other.extend(publisher.batches[7:])
    for buffer in (publisher.buffer, other):
        batch = decode_batch(buffer.batches_from(0)[0][1]).batch
        assert (batch.ts, batch.data_parallel_rank) == (6.0, 3)


def test_without_evicted_batches_there_is_no_history() -> None:
    assert ModelPublisher(0, 10).publish_many(5).buffer.compacted_history() is None
    assert ReplayBuffer(0).compacted_history() is None


def test_the_history_can_be_read_while_another_thread_sends() -> None:
    """Each result has the state after its last number."""
    publisher = ModelPublisher(5, 3)
    ended = threading.Event()
    found: list[CompactedHistory] = []

    def read_history() -> None:
        while not ended.is_set() or not found:
            compacted = publisher.buffer.compacted_history()
            if compacted is not None:
                found.append(compacted)

    thread = threading.Thread(target=read_history)
    thread.start()
    publisher.publish_many(300)
    ended.set()
    thread.join(60.0)
    assert found
    for compacted in found[:: max(1, len(found) // 20)]:
        other = compacting_buffer(1)
        other.restore(*compacted)
        other.extend([(compacted.last_seq + 1, encode_batch(KVEventBatch(0.0, [])))])
        assert digest_of(other.batches_from(0)) == publisher.digests[compacted.last_seq]


class Compactions:
    """Records which batches each call has compacted, and in which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._found: list[tuple[threading.Thread, list[SequencedPayload]]] = []
        self._changed = threading.Condition()
        original = Compactor.extend

        def record_call(history: Compactor, batches: list[SequencedPayload]) -> None:
            original(history, batches)
            with self._changed:
                self._found.append((threading.current_thread(), batches))
                self._changed.notify()

        monkeypatch.setattr(Compactor, "extend", record_call)

    def take(self, count: int) -> list[tuple[threading.Thread, list[SequencedPayload]]]:
        """Return the calls that compacted `count` batches together, when all are compacted."""
        with self._changed:
            assert self._changed.wait_for(lambda: sum(len(batches) for _, batches in self._found) >= count, 60.0)
            found, self._found = self._found, []
        assert sum(len(batches) for _, batches in found) == count
        return found


@pytest.mark.parametrize(("waiting", "in_pieces"), [(GROUP, True), (2 * GROUP, True), (2 * GROUP + 1, False)])
def test_the_compaction_thread_works_in_small_pieces(monkeypatch: pytest.MonkeyPatch, waiting: int, in_pieces: bool) -> None:
    """The sending thread then waits for a CPU only briefly. With a large backlog, pauses would let it grow, so there are
    none."""
    compactions, steps, numbers = Compactions(monkeypatch), GROUP * GROUPS, itertools.count()
    buffer = compacting_buffer(steps)
    thread = threading.Thread(target=buffer.compact_until_stopped, daemon=True)
    events: list[KVEvent] = [BlockStored(list(range(100)), None, list(range(200)), 2)]
    payload = encode_batch(KVEventBatch(1.0, events))

    def send(count: int) -> None:
        buffer.extend([(next(numbers), payload) for _ in range(count)])

    send(steps)
    thread.start()
    for _ in range(100_000):  # until it has started, `extend` compacts
        send(GROUP)
        if compactions.take(GROUP)[0][0] is thread:
            break
    send(waiting)
    sizes = [sum(len(payload) for _, payload in batches) for _, batches in compactions.take(waiting)]
    assert len(buffer) == steps
    assert (len(sizes) > 1) is in_pieces
    assert (max(sizes) <= DEFAULTS.compaction_bytes) is in_pieces
    buffer.stop_compacting()
    thread.join(60.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("steps", [1, 15, 16, 100, 64 * 16, 64 * 16 + 500])
def test_batches_are_evicted_in_groups(steps: int) -> None:
    """At most one group is buffered beyond `steps`, and without compaction none. Compacted and buffered batches together are
    always complete."""
    largest = steps + min(GROUP - 1, steps // GROUPS)
    publisher, plain, sizes = ModelPublisher(5, steps), ReplayBuffer(steps), set()
    for number in range(largest + 3 * GROUP):
        batch = publisher.publish()
        assert batch is not None
        plain.extend([batch])
        buffered = len(publisher.buffer)
        sizes.add(buffered)
        assert min(number + 1, steps) <= buffered <= largest
        assert len(plain) == min(number + 1, steps)
        stats = publisher.buffer.history_stats()
        assert stats is not None
        assert stats.batches + buffered == number + 1
    assert max(sizes) == largest
    found = publisher.buffer.batches_from(0)
    assert digest_of(found) == publisher.digests[-1]
    assert numbers(found) == list(range(found[0][0], len(publisher.digests)))


@given(
    numbers=st.sets(st.integers(0, 60), max_size=40),
    steps=st.integers(0, 20),
    start=st.integers(0, 2**64 - 1) | st.integers(0, 65),
)
def test_a_replay_buffer_agrees_with_a_list(numbers: set[int], steps: int, start: int) -> None:
    """The buffer holds the last `steps` batches and returns the ones from `start` on, with and without gaps."""
    batches = [(number, bytes([number])) for number in sorted(numbers)]
    buffer = ReplayBuffer(steps)
    for position in range(0, len(batches), 7):
        buffer.extend(batches[position : position + 7])
    buffered = batches[-steps:] if steps else []
    assert buffer.batches_from(start) == [item for item in buffered if item[0] >= start]
    assert buffer.size() == (len(buffered), len(buffered)) == (len(buffer), len(buffered))
