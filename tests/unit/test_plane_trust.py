"""Events go from an engine through a bridge and its log into a replica, in memory. No replica is EXACT with wrong blocks.

The bridge has no index and applies nothing. So the replica must detect unreadable events and heartbeats with a different
digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import UnknownSourceError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Heartbeat, KVEvent
from kvevents.index import PrefixIndex
from kvevents.publisher.compaction import Compactor, encode_snapshot
from kvevents.stream import DegradedReason, RawBatch, Source, Trust
from kvevents.testing.fake_transport import FakeTransport
from kvevents.wire import dialect_for, encode_batch
from kvevents.wire.encode import batch_encoder
from kvevents_plane import engine_reader
from kvevents_plane.engine_reader import EngineReader, EngineRecord, inspect_payload
from kvevents_plane.log_subscriber import LogSubscriber
from kvevents_plane.page_builder import PageBuilder
from kvevents_plane.partition_state import PartitionState, ResumePoint
from kvevents_plane.records import (
    VERSION,
    BatchRecord,
    GapRecord,
    HeartbeatRecord,
    IncarnationRecord,
    JoinRecord,
    Page,
    ReceivedMessage,
    Record,
    StreamKey,
    StreamRecord,
    TrustRecord,
    encode_page,
    stream_text,
)
from plane_subscriber_cases import add_partition
from wire_cases import GOLDENS

KEY: Final = ("engine", 0)
BLOCK: Final = 4


def stored(number: int) -> BlockStored:
    return BlockStored([number + 1], None, [number] * BLOCK, BLOCK)


class Pipeline:
    """One engine, one bridge and one replica. `truth` is an index with the blocks that the engine really holds."""

    def __init__(self, buffer_steps: int = 10_000) -> None:
        self.transport = FakeTransport()
        self.engine = self.transport.engine("tcp://engine:1", "tcp://engine:2", buffer_steps=buffer_steps)
        self._reset_truth()
        self.received: list[EngineRecord] = []
        self._last_report: TrustRecord | None = None
        """The newest trust report of the bridge, which is written again until the bridge sends another one."""
        self.bridge = EngineReader(
            "bridge", self.received.extend, lambda: True, transport=self.transport, clock=self.transport.clock
        )
        self.bridge.follow(Source("tcp://engine:1", "tcp://engine:2", name="engine"), ResumePoint(None, 0), 1)
        self.log = LogSubscriber(lambda: 0.0, lambda _: None)
        self.log.add_partition(0, PartitionState(), {})
        self.index = PrefixIndex()
        self.position = 0
        self.ends_live = True
        """Whether the newest batch was sent to subscribers. Subscribers cannot notice a lost batch before the next batch."""
        self._write(JoinRecord(*KEY, b""))

    def _reset_truth(self) -> None:
        self.truth = PrefixIndex()
        self._changes = 0
        self.change_cache(BlockRemoved([]))

    def change_cache(self, *events: KVEvent) -> None:
        """Change the cache of the engine without publishing the events."""
        self.truth.apply(RawBatch(*KEY, 0, self._changes, False, encode_batch(EventBatch(0.0, list(events)))))
        self._changes += 1

    def change_and_publish(self, *events: KVEvent, lost: bool = False) -> None:
        self.change_cache(*events)
        self.engine.publish(*events, lost=lost)
        self.ends_live = not lost and self.engine.is_up

    def heartbeat_event(self, *, lost: bool = False) -> None:
        self.change_and_publish(BlockRemoved([], heartbeat=Heartbeat(self.truth.digest(KEY), 3600.0)), lost=lost)

    def publish_unreadable(self, number: int) -> None:
        """Send a batch whose event cannot be decoded."""
        self.change_cache(stored(number))
        self.engine.publish_payload(encode_batch(EventBatch(0.0, [stored(number)])).replace(b"BlockStored", b"BlockStoned"))
        self.ends_live = self.engine.is_up

    def restart(self) -> None:
        self._reset_truth()
        self.engine.restart()
        self.ends_live = True

    def settle(self) -> None:
        """Let the bridge read and write everything that was sent, and let the replica apply it."""
        for _ in range(20):
            self.bridge._check_trust_at = 0.0
            self.bridge._turn()
        records = [each.record for each in self.received]
        self._last_report = next((record for record in reversed(records) if isinstance(record, TrustRecord)), self._last_report)
        self._write(*records, *([] if self._last_report is None else [self._last_report]))
        self.received.clear()
        deliveries = self.log.receive_many(timeout=0.0)
        for delivery, apply_result in zip(deliveries, self.index.apply_many(deliveries), strict=True):
            self.log.report(delivery, apply_result.report)

    def _write(self, *records: Record) -> None:
        self.position += 1
        page = Page(VERSION, "bridge", [*records, HeartbeatRecord("bridge", 3600.0)])
        self.log.put(0, [ReceivedMessage(self.position, encode_page(page), 0)])

    @property
    def trust(self) -> Trust:
        return self.log.trust(*KEY)

    @property
    def is_right(self) -> bool:
        try:
            return self.index.digest(KEY) == self.truth.digest(KEY)
        except UnknownSourceError:
            return self.truth.stats().blocks == 0


def skip_seq(pipeline: Pipeline, number: int) -> None:
    pipeline.change_cache(stored(number))
    pipeline.engine.skip_number()
    pipeline.ends_live = False


def set_answers_replay(pipeline: Pipeline, number: int, *, answers: bool) -> None:
    pipeline.engine.answers_replay = answers


STEPS: Final[dict[str, Callable[[Pipeline, int], None]]] = {
    "store": lambda pipeline, number: pipeline.change_and_publish(stored(number)),
    "lose": lambda pipeline, number: pipeline.change_and_publish(stored(number), lost=True),
    "skip number": skip_seq,
    "unreadable": lambda pipeline, number: pipeline.publish_unreadable(number),
    "clear": lambda pipeline, _: pipeline.change_and_publish(AllBlocksCleared()),
    "heartbeat": lambda pipeline, _: pipeline.heartbeat_event(),
    "lose heartbeat": lambda pipeline, _: pipeline.heartbeat_event(lost=True),
    "disconnect": lambda pipeline, _: pipeline.engine.disconnect(),
    "reconnect": lambda pipeline, _: pipeline.engine.reconnect(),
    "ignore replay": partial(set_answers_replay, answers=False),
    "answer replay": partial(set_answers_replay, answers=True),
    "restart": lambda pipeline, _: pipeline.restart(),
}


def run_steps(pipeline: Pipeline, *steps: str) -> None:
    """Run the steps. After each step, a replica that is EXACT must be right."""
    for number, step in enumerate(steps):
        STEPS[step](pipeline, number)
        pipeline.settle()
        if pipeline.ends_live and pipeline.engine.is_up and pipeline.trust == Trust.EXACT:
            assert pipeline.is_right, (number, step)


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=25), st.sampled_from([3, 10_000]))
def test_a_replica_that_is_exact_holds_what_the_engine_holds(steps: list[str], buffer_steps: int) -> None:
    """Batches are lost, skipped, unreadable or cut off by disconnects. A restart and a clear make the replica EXACT again."""
    pipeline = Pipeline(buffer_steps=buffer_steps)
    run_steps(pipeline, *steps)
    pipeline.engine.answers_replay = True
    run_steps(pipeline, "reconnect", "restart", "store", "clear", "store")
    assert pipeline.trust == Trust.EXACT
    assert pipeline.is_right


def test_unreadable_events_degrade_the_replica_until_a_clear() -> None:
    """The bridge forwards the payload without decoding its events, and reports EXACT."""
    pipeline = Pipeline()
    run_steps(pipeline, "store", "unreadable")
    assert pipeline.trust == Trust.DEGRADED
    assert "could not be read" in pipeline.trust.reason
    assert pipeline.log.status(*KEY).degraded_reasons == {DegradedReason.REJECTED}
    run_steps(pipeline, "clear")
    assert pipeline.trust == Trust.EXACT


def test_a_clear_ends_the_degraded_reasons_of_a_bridge() -> None:
    pipeline = Pipeline()
    run_steps(pipeline, "store", "skip number", "store")
    assert pipeline.trust == Trust.DEGRADED
    run_steps(pipeline, "clear")
    assert pipeline.trust == Trust.EXACT
    assert pipeline.is_right


def test_a_bridge_requests_the_whole_history_of_a_degraded_stream_with_digests() -> None:
    """The bridge has no index, so it cannot compare digests. The whole history ends the degraded reason as well."""
    pipeline = Pipeline()
    pipeline.change_and_publish(stored(0))
    pipeline.settle()
    pipeline.engine.answers_replay = False
    pipeline.change_and_publish(stored(1), lost=True)
    pipeline.change_and_publish(stored(2))
    for _ in range(100):
        pipeline.transport.clock.advance(1.0)
        pipeline.settle()
    assert pipeline.trust == Trust.DEGRADED
    pipeline.engine.answers_replay = True
    pipeline.heartbeat_event()
    pipeline.settle()
    pipeline.settle()
    pipeline.change_and_publish()  # everything came by replay; the next live batch confirms it
    pipeline.settle()
    assert pipeline.trust == Trust.EXACT
    assert pipeline.is_right
    before = pipeline.engine.requests.count(0)
    run_steps(pipeline, "heartbeat", "store", "heartbeat")
    assert pipeline.engine.requests.count(0) == before, "the history of an EXACT stream is not requested"


def test_a_bridge_does_not_request_the_whole_history_if_heartbeats_have_no_digest() -> None:
    """A publisher without the native module stores no snapshot. A request would cost blocks and end no degraded reason."""
    pipeline = Pipeline(buffer_steps=2)
    run_steps(pipeline, "store", "skip number", "store", "store", "store")
    incarnation = pipeline.log.status(*KEY).incarnation
    for _ in range(3):
        pipeline.change_and_publish(BlockRemoved([], heartbeat=Heartbeat(None, 3600.0)))
        pipeline.settle()
    assert pipeline.log.status(*KEY).incarnation == incarnation
    assert pipeline.trust == Trust.DEGRADED


def test_the_number_of_requests_for_the_whole_history_is_limited() -> None:
    pipeline = Pipeline(buffer_steps=2)
    run_steps(pipeline, "store", "skip number", "store", "store", "store")
    incarnations = []
    for _ in range(5):
        pipeline.heartbeat_event()
        pipeline.settle()
        incarnations.append(pipeline.log.status(*KEY).incarnation)
    assert incarnations[-1] == incarnations[-2] == engine_reader.MAX_HISTORY_REQUESTS
    assert pipeline.trust == Trust.DEGRADED


def test_a_different_digest_degrades_the_replica() -> None:
    """If the log equals what the engine has sent, only a replica can detect that the engine holds other blocks."""
    pipeline = Pipeline()
    run_steps(pipeline, "store")
    pipeline.change_cache(stored(7))  # the engine does not publish this block
    pipeline.heartbeat_event()
    pipeline.settle()
    assert pipeline.log.status(*KEY).degraded_reasons == {DegradedReason.DIVERGED}
    assert pipeline.log.diverged == 1


def test_after_a_known_loss_a_different_digest_is_not_a_divergence() -> None:
    """A replica builds its index again after a divergence. A new index would not contain the lost batches either, because the
    log lacks them."""
    pipeline = Pipeline(buffer_steps=2)
    run_steps(pipeline, "store", "skip number", "store", "store", "heartbeat", "heartbeat", "heartbeat")
    assert DegradedReason.LOST in pipeline.log.status(*KEY).degraded_reasons
    assert pipeline.log.diverged == 0


# --- what a bridge reads in a batch ------------------------------------------------------------------------------------------


def apply_result(payload: bytes) -> tuple[bool, Heartbeat | None]:
    found = PrefixIndex().apply(RawBatch("engine", 0, 0, 0, False, payload)).report
    return (False, None) if found is None else (found.cleared, found.heartbeat)


def read(payload: bytes) -> tuple[bool, Heartbeat | None]:
    found = inspect_payload(payload)
    return (False, None) if found is None else (found.cleared, found.heartbeat)


@given(st.lists(st.sampled_from([stored(1), AllBlocksCleared(), BlockRemoved([1]), "heartbeat"]), max_size=6))
def test_a_bridge_finds_the_same_clears_and_heartbeats_as_an_index(kinds: list[KVEvent | str]) -> None:
    """The bridge finds them without applying the batch."""
    heartbeat_event = BlockRemoved([], heartbeat=Heartbeat("0" * 32, 1.0))
    events = [heartbeat_event if kind == "heartbeat" else kind for kind in kinds]
    payload = encode_batch(EventBatch(0.0, events))
    assert read(payload) == apply_result(payload)


def test_a_bridge_finds_the_same_as_an_index_in_the_payloads_of_every_release() -> None:
    for golden in GOLDENS:
        assert read(golden.payload) == apply_result(golden.payload), golden


def test_a_replica_reports_the_degraded_reasons_of_an_idle_stream() -> None:
    """Reasons that a checkpoint does not store are included, so a service distinguishes an idle engine from lost batches."""
    pipeline = Pipeline()
    pipeline.change_and_publish(stored(1))
    pipeline.engine.disconnect()
    pipeline.settle()
    pipeline.engine.reconnect()
    pipeline.settle()
    assert pipeline.trust == Trust.DEGRADED
    assert pipeline.log.status(*KEY).degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    assert pipeline.log.states[0].resume_point(KEY, "bridge").resume is not None
    pipeline.change_and_publish(stored(2))
    pipeline.settle()
    assert pipeline.log.status(*KEY).degraded_reasons == frozenset()
    assert pipeline.trust == Trust.EXACT


# --- a snapshot that takes several pages of the log


PAGE_BYTES: Final = 2_500
"""Size of a page, which is less than a part of the snapshot."""
COMPACTED_BATCHES: Final = 16
"""Number of batches that the snapshot replaces."""
CHAIN_BLOCKS: Final = 40
"""Number of blocks of each chain in the snapshot."""


class CompactedHistory(NamedTuple):
    """The first batch of an engine, and a snapshot that replaces it and the following batches."""

    first: bytes
    """Payload of the first batch."""
    parts: list[bytes]
    """Parts of the snapshot, each larger than a page."""
    digests: set[str]
    """Digests of the blocks after the first batch and after all batches."""


def make_compacted_history() -> CompactedHistory:
    history, truth, first, digests = Compactor.create(), PrefixIndex(), b"", set[str]()
    assert history is not None
    for number in range(COMPACTED_BATCHES):
        hashes = list(range(number * 100, number * 100 + CHAIN_BLOCKS))
        tokens = list(range(number * 1_000, number * 1_000 + CHAIN_BLOCKS * BLOCK))
        payload = encode_batch(EventBatch(0.0, [BlockStored(hashes, None, tokens, BLOCK)]))
        history.append(payload)
        truth.apply(RawBatch(*KEY, 0, number, False, payload))
        first = first or payload
        if number in {0, COMPACTED_BATCHES - 1}:
            digests.add(truth.digest(KEY))
    pieces = history.snapshot_pieces(6_000)
    assert pieces is not None
    parts = encode_snapshot(pieces, 0.0, 0, batch_encoder(dialect_for("vllm")), 6_000, COMPACTED_BATCHES - 1)
    assert parts is not None
    assert len(parts) > 2
    assert min(map(len, parts)) > PAGE_BYTES
    return CompactedHistory(first, parts, digests)


class LogReader:
    """A replica that reads pages, and can restart from its own snapshot between two pages."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.log = LogSubscriber(lambda: 0.0, lambda _: None)
        add_partition(self.log, 0, PartitionState())

    def read(self, position: int, page: Page) -> None:
        self.log.put(0, [ReceivedMessage(position, encode_page(page), 0, page.name)])
        for delivery in self.log.receive_many(timeout=0.0):
            self.log.report(delivery, self.index.apply(delivery).report)

    def restart(self, folder: Path) -> None:
        state, degraded_reasons = PartitionState.decode(self.log.states[0].encode()), self.log.degraded_reasons()
        self.index.snapshot(folder / "index", workers=[KEY] if self.index.workers() else [])
        self.index = PrefixIndex()
        self.index.merge(folder / "index")
        self.log = LogSubscriber(lambda: 0.0, lambda _: None)
        add_partition(self.log, 0, state, degraded_reasons)

    def is_exact(self) -> bool:
        return self.log.trust(*KEY) == Trust.EXACT


def bridge_records(bridge: str, state: PartitionState, parts: Sequence[bytes], *, is_new: bool) -> Iterator[StreamRecord]:
    """Yield the records that a bridge writes of an engine that sends the parts.

    They continue the log, or begin a new incarnation if `is_new` is set.
    """
    stream = state.streams.get(KEY)
    current, last = (0, -1) if stream is None else (stream.incarnation, stream.last_seq)
    yield JoinRecord(*KEY, b"")
    if is_new:
        current, last = current + 1, -1
        yield IncarnationRecord(*KEY, current, "it was not verified to be the same")
    first = COMPACTED_BATCHES
    if last < first - 1:
        yield GapRecord(*KEY, current, max(0, last + 1), first - 1, True)
    for seq, part in enumerate(parts, first):
        if seq > last:
            yield BatchRecord(*KEY, current, seq, True, part)
    yield TrustRecord(*KEY, bridge, Trust.EXACT.name, "", {})


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("replica_restarts", [False, True])
def test_a_snapshot_over_several_pages_is_not_exact_before_its_end(
    tmp_path: Path, is_new: bool, replica_restarts: bool
) -> None:
    """The bridge is killed after any page, and another one continues or begins a new incarnation."""
    sent = make_compacted_history()
    total = write_snapshot(tmp_path, sent, killed_after=10_000, is_new=False, replica_restarts=replica_restarts)
    assert total > 2 * len(sent.parts)
    for killed_after in range(1, total):
        write_snapshot(tmp_path, sent, killed_after=killed_after, is_new=is_new, replica_restarts=replica_restarts)


def write_snapshot(folder: Path, sent: CompactedHistory, *, killed_after: int, is_new: bool, replica_restarts: bool) -> int:
    """Write the snapshot and return its number of pages. After each page, check that a replica that is EXACT is right.

    Another bridge, which writes nothing of the snapshot, has reported that the stream is EXACT.
    """
    pages: list[Page] = []
    reader = LogReader()

    def append(page: Page) -> None:
        pages.append(page)
        if replica_restarts:
            reader.restart(folder)
        reader.read(len(pages), page)
        assert not reader.is_exact() or reader.index.digest(KEY) in sent.digests, len(pages)

    def heartbeat_event(*records: Record) -> None:
        """Write a heartbeat of the other bridge."""
        page = Page(VERSION, "other", [*records, HeartbeatRecord("other", 3600.0)])
        builder.apply(len(pages) + 1, page)
        append(page)

    bridge, builder = "one", PageBuilder(PartitionState(), "none", PAGE_BYTES, "none")
    heartbeat_event(
        JoinRecord(*KEY, b""),
        BatchRecord(*KEY, 0, 0, False, sent.first),
        TrustRecord(*KEY, "other", Trust.EXACT.name, "", {}),
    )
    builder = builder_at_log_end(bridge, pages, sent.parts, is_new=False)
    while builder.next_due() is not None:
        builder.set_heartbeat(HeartbeatRecord(bridge, 3600.0))
        page = builder.build(0.0)
        assert page is not None
        builder.acknowledge(len(pages) + 1)
        append(page)
        heartbeat_event()
        if len(pages) // 2 == killed_after:
            bridge = "two"
            builder = builder_at_log_end(bridge, pages, sent.parts, is_new=is_new)
    assert reader.is_exact()
    return len(pages) // 2


def builder_at_log_end(bridge: str, pages: Sequence[Page], parts: Sequence[bytes], *, is_new: bool) -> PageBuilder:
    """Return the page builder of a bridge that has read the log and has queued all its records."""
    state = PartitionState()
    for position, page in enumerate(pages, 1):
        state.apply(position, page)
    builder = PageBuilder(state, bridge, PAGE_BYTES, bridge)
    builder.resync(KEY)
    for record in bridge_records(bridge, state, parts, is_new=is_new):
        builder.enqueue(record)
    return builder


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (("default\x1fdefault\x1fe0", 2), "default/default/e0 rank 2"),
        (("plain", 0), "plain rank 0"),
        (("a\x1f\x1b[2J\n", 0), "a/\\x1b[2J\\n rank 0"),
    ],
)
def test_a_stream_is_named_without_control_characters(key: StreamKey, text: str) -> None:
    """A source that a client named must not write into the terminal of who reads the log."""
    assert stream_text(key) == text
