"""From an engine through a bridge and its log into a replica, in memory: no replica is EXACT and holds something else.

The bridge keeps no index. What it cannot know, because it applies nothing, the replica must find out: events that could not be
read, and heartbeats whose digest is another one.
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
from kvevents.plane import engine_reader
from kvevents.plane.engine_reader import EngineReader, EngineRecord, inspect_payload
from kvevents.plane.log_subscriber import LogSubscriber
from kvevents.plane.page_builder import PageBuilder
from kvevents.plane.partition_state import PartitionState, ResumePoint
from kvevents.plane.records import (
    VERSION,
    BatchRecord,
    GapRecord,
    HeartbeatRecord,
    IncarnationRecord,
    JoinRecord,
    Page,
    ReceivedMessage,
    Record,
    StreamRecord,
    TrustRecord,
    encode_page,
)
from kvevents.publisher.compaction import Compactor, encode_snapshot
from kvevents.stream import DegradedReason, RawBatch, Source, Trust
from kvevents.testing.fake_transport import FakeTransport
from kvevents.wire import encode_batch
from kvevents.wire.encode import batch_encoder
from wire_cases import GOLDENS

KEY: Final = ("engine", 0)
BLOCK: Final = 4


def stored(number: int) -> BlockStored:
    return BlockStored([number + 1], None, [number] * BLOCK, BLOCK)


class Scene:
    """One engine, one bridge and one replica; `events` is what the engine really holds."""

    def __init__(self, buffer_steps: int = 10_000) -> None:
        self.transport = FakeTransport()
        self.engine = self.transport.engine("tcp://engine:1", "tcp://engine:2", buffer_steps=buffer_steps)
        self._begin()
        self.received: list[EngineRecord] = []
        self._said: TrustRecord | None = None
        """What the bridge says of a life that has just begun, too, unless it says something else."""
        self.bridge = EngineReader(
            "bridge", self.received.extend, lambda: True, transport=self.transport, clock=self.transport.clock
        )
        self.bridge.follow(Source("tcp://engine:1", "tcp://engine:2", name="engine"), ResumePoint(None, 0), 1)
        self.log = LogSubscriber(lambda: 0.0, lambda _: None)
        self.log.add_partition(0, PartitionState(), {})
        self.index = PrefixIndex()
        self.position = 0
        self.ends_live = True
        """Whether the newest batch was sent to subscribers: of others nothing is known before the next one."""
        self._write(JoinRecord(*KEY, b""))

    def _begin(self) -> None:
        self.truth = PrefixIndex()
        self._held = 0
        self.hold(BlockRemoved([]))

    def hold(self, *events: KVEvent) -> None:
        """What the engine does, whether it can say so or not."""
        self.truth.apply(RawBatch(*KEY, 0, self._held, False, encode_batch(EventBatch(0.0, list(events)))))
        self._held += 1

    def say(self, *events: KVEvent, lost: bool = False) -> None:
        self.hold(*events)
        self.engine.publish(*events, lost=lost)
        self.ends_live = not lost and self.engine.is_up

    def beat(self, *, lost: bool = False) -> None:
        self.say(BlockRemoved([], heartbeat=Heartbeat(self.truth.digest(KEY), 3600.0)), lost=lost)

    def garble(self, number: int) -> None:
        """Send a batch whose event cannot be decoded."""
        self.hold(stored(number))
        self.engine.publish_payload(encode_batch(EventBatch(0.0, [stored(number)])).replace(b"BlockStored", b"BlockStoned"))
        self.ends_live = self.engine.is_up

    def restart(self) -> None:
        self._begin()
        self.engine.restart()
        self.ends_live = True

    def settle(self) -> None:
        """Everything that was sent is read, written, and applied."""
        for _ in range(20):
            self.bridge._check_trust_at = 0.0
            self.bridge._turn()
        records = [each.record for each in self.received]
        self._said = next((record for record in reversed(records) if isinstance(record, TrustRecord)), self._said)
        self._write(*records, *([] if self._said is None else [self._said]))
        self.received.clear()
        deliveries = self.log.receive_many(timeout=0.0)
        for delivery, applied in zip(deliveries, self.index.apply_many(deliveries), strict=True):
            self.log.report(delivery, applied.report)

    def _write(self, *records: Record) -> None:
        self.position += 1
        page = Page(VERSION, "bridge", 0.0, [*records, HeartbeatRecord("bridge", 3600.0, 0.0)])
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


def burn(scene: Scene, number: int) -> None:
    scene.hold(stored(number))
    scene.engine.skip_number()
    scene.ends_live = False


def answer(scene: Scene, number: int, *, does: bool) -> None:
    scene.engine.answers_replay = does


STEPS: Final[dict[str, Callable[[Scene, int], None]]] = {
    "store": lambda scene, number: scene.say(stored(number)),
    "lose": lambda scene, number: scene.say(stored(number), lost=True),
    "burn": burn,
    "garble": lambda scene, number: scene.garble(number),
    "clear": lambda scene, _: scene.say(AllBlocksCleared()),
    "beat": lambda scene, _: scene.beat(),
    "lose beat": lambda scene, _: scene.beat(lost=True),
    "cut": lambda scene, _: scene.engine.disconnect(),
    "join": lambda scene, _: scene.engine.reconnect(),
    "mute": partial(answer, does=False),
    "answer": partial(answer, does=True),
    "restart": lambda scene, _: scene.restart(),
}


def play(scene: Scene, *steps: str) -> None:
    """Each step, read to its end; what the replica says after it must be right."""
    for number, step in enumerate(steps):
        STEPS[step](scene, number)
        scene.settle()
        if scene.ends_live and scene.engine.is_up and scene.trust == Trust.EXACT:
            assert scene.is_right, (number, step)


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=25), st.sampled_from([3, 10_000]))
def test_a_replica_that_is_exact_holds_what_the_engine_holds(steps: list[str], buffer_steps: int) -> None:
    """Whatever is lost, burnt, unreadable or cut off; and a clear, or a restart, makes it EXACT again."""
    scene = Scene(buffer_steps=buffer_steps)
    play(scene, *steps)
    scene.engine.answers_replay = True
    play(scene, "join", "restart", "store", "clear", "store")
    assert scene.trust == Trust.EXACT
    assert scene.is_right


def test_events_that_could_not_be_read_are_doubted_by_the_replica_until_a_clear() -> None:
    """The bridge forwards what it does not read, and is EXACT."""
    scene = Scene()
    play(scene, "store", "garble")
    assert scene.trust == Trust.DEGRADED
    assert "could not be read" in scene.trust.reason
    assert scene.log.status(*KEY).degraded_reasons == {DegradedReason.REJECTED}
    play(scene, "clear")
    assert scene.trust == Trust.EXACT


def test_a_clear_ends_the_doubts_of_a_bridge_that_applies_nothing() -> None:
    scene = Scene()
    play(scene, "store", "burn", "store")
    assert scene.trust == Trust.DEGRADED
    play(scene, "clear")
    assert scene.trust == Trust.EXACT
    assert scene.is_right


def test_a_sender_with_heartbeats_is_asked_for_all_it_holds_where_its_stream_is_doubted() -> None:
    """Whether its digest is that of what was delivered the bridge cannot know; all that it holds ends the doubt as well."""
    scene = Scene()
    scene.say(stored(0))
    scene.settle()
    scene.engine.answers_replay = False
    scene.say(stored(1), lost=True)
    scene.say(stored(2))
    for _ in range(100):
        scene.transport.clock.advance(1.0)
        scene.settle()
    assert scene.trust == Trust.DEGRADED
    scene.engine.answers_replay = True
    scene.beat()
    scene.settle()
    scene.settle()
    scene.say()  # all of it came by replay; the next live batch confirms that
    scene.settle()
    assert scene.trust == Trust.EXACT
    assert scene.is_right
    before = scene.engine.requests.count(0)
    play(scene, "beat", "store", "beat")
    assert scene.engine.requests.count(0) == before, "what is not doubted is not asked for"


def test_a_sender_whose_heartbeats_have_no_digest_is_not_asked_for_all_it_holds() -> None:
    """It is a publisher without the native module, which keeps no snapshot. A request would cost blocks and end no doubt."""
    scene = Scene(buffer_steps=2)
    play(scene, "store", "burn", "store", "store", "store")
    incarnation = scene.log.status(*KEY).incarnation
    for _ in range(3):
        scene.say(BlockRemoved([], heartbeat=Heartbeat(None, 3600.0)))
        scene.settle()
    assert scene.log.status(*KEY).incarnation == incarnation
    assert scene.trust == Trust.DEGRADED


def test_a_sender_that_has_forgotten_what_is_missing_is_asked_a_bounded_number_of_times() -> None:
    scene = Scene(buffer_steps=2)
    play(scene, "store", "burn", "store", "store", "store")
    lives = []
    for _ in range(5):
        scene.beat()
        scene.settle()
        lives.append(scene.log.status(*KEY).incarnation)
    assert lives[-1] == lives[-2] == engine_reader.MAX_HISTORY_REQUESTS
    assert scene.trust == Trust.DEGRADED


def test_a_digest_that_differs_is_doubted_by_the_replica() -> None:
    """Of a log that says the same as the engine has said, only a replica can know that it is not what the engine holds."""
    scene = Scene()
    play(scene, "store")
    scene.hold(stored(7))  # it has said nothing of it
    scene.beat()
    scene.settle()
    assert scene.log.status(*KEY).degraded_reasons == {DegradedReason.DIVERGED}
    assert scene.log.diverged == 1


def test_a_loss_that_is_known_is_no_reason_to_read_the_log_again() -> None:
    """A replica builds its index again where a digest differs for no known reason; what the log lacks it lacks then as well."""
    scene = Scene(buffer_steps=2)
    play(scene, "store", "burn", "store", "store", "beat", "beat", "beat")
    assert DegradedReason.LOST in scene.log.status(*KEY).degraded_reasons
    assert scene.log.diverged == 0


# --- what a bridge reads of a batch ------------------------------------------------------------------------------------------


def applied(payload: bytes) -> tuple[bool, Heartbeat | None]:
    found = PrefixIndex().apply(RawBatch("engine", 0, 0, 0, False, payload)).report
    return (False, None) if found is None else (found.cleared, found.heartbeat)


def read(payload: bytes) -> tuple[bool, Heartbeat | None]:
    found = inspect_payload(payload)
    return (False, None) if found is None else (found.cleared, found.heartbeat)


@given(st.lists(st.sampled_from([stored(1), AllBlocksCleared(), BlockRemoved([1]), "beat"]), max_size=6))
def test_a_bridge_finds_what_an_index_finds(kinds: list[KVEvent | str]) -> None:
    """Clears and heartbeats, without applying anything."""
    beat = BlockRemoved([], heartbeat=Heartbeat("0" * 32, 1.0))
    events = [beat if kind == "beat" else kind for kind in kinds]
    payload = encode_batch(EventBatch(0.0, events))
    assert read(payload) == applied(payload)


def test_a_bridge_finds_what_an_index_finds_in_what_every_release_sends() -> None:
    for golden in GOLDENS:
        assert read(golden.payload) == applied(golden.payload), golden


def test_a_replica_names_the_doubts_of_an_idle_stream() -> None:
    """Also those that a checkpoint does not keep: so a service distinguishes an idle engine from one with lost batches."""
    scene = Scene()
    scene.say(stored(1))
    scene.engine.disconnect()
    scene.settle()
    scene.engine.reconnect()
    scene.settle()
    assert scene.trust == Trust.DEGRADED
    assert scene.log.status(*KEY).degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
    assert scene.log.states[0].resume_point(KEY, "bridge").resume is not None
    scene.say(stored(2))
    scene.settle()
    assert scene.log.status(*KEY).degraded_reasons == frozenset()
    assert scene.trust == Trust.EXACT


# --- a snapshot that takes several pages of the log


ROOM: Final = 2_500
"""Bytes of a page: less than a part of the snapshot."""
REPRESENTED: Final = 16
"""Batches in the place of which the snapshot is sent."""
KNOWN: Final = 40
"""Blocks of each chain of the snapshot."""


class Compacted(NamedTuple):
    """What an engine has sent."""

    first: bytes
    """Its first batch."""
    parts: list[bytes]
    """What it sends in the place of that and others: each is larger than a page."""
    digests: set[str]
    """Of what it held behind its first batch, and behind all of them."""


def compacted() -> Compacted:
    history, truth, first, digests = Compactor.create(), PrefixIndex(), b"", set[str]()
    assert history is not None
    for number in range(REPRESENTED):
        hashes = list(range(number * 100, number * 100 + KNOWN))
        tokens = list(range(number * 1_000, number * 1_000 + KNOWN * BLOCK))
        payload = encode_batch(EventBatch(0.0, [BlockStored(hashes, None, tokens, BLOCK)]))
        history.append(payload)
        truth.apply(RawBatch(*KEY, 0, number, False, payload))
        first = first or payload
        if number in {0, REPRESENTED - 1}:
            digests.add(truth.digest(KEY))
    held = history.events()
    assert held is not None
    parts = encode_snapshot(held, 0.0, 0, batch_encoder(None), 6_000, REPRESENTED - 1)
    assert parts is not None
    assert len(parts) > 2
    assert min(map(len, parts)) > ROOM
    return Compacted(first, parts, digests)


class LogReader:
    """A replica that reads pages, and may begin again with its own snapshot between two of them."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.log = LogSubscriber(lambda: 0.0, lambda _: None)
        self.log.add_partition(0, PartitionState(), {})

    def read(self, position: int, page: Page) -> None:
        self.log.put(0, [ReceivedMessage(position, encode_page(page), 0, page.name)])
        for delivery in self.log.receive_many(timeout=0.0):
            self.log.report(delivery, self.index.apply(delivery).report)

    def restart(self, folder: Path) -> None:
        state, doubts = PartitionState.decode(self.log.states[0].encode()), self.log.doubts()
        self.index.snapshot(folder / "index", workers=[KEY] if self.index.workers() else [])
        self.index = PrefixIndex()
        self.index.merge(folder / "index")
        self.log = LogSubscriber(lambda: 0.0, lambda _: None)
        self.log.add_partition(0, state, doubts)

    def is_exact(self) -> bool:
        return self.log.trust(*KEY) == Trust.EXACT


def records_of(bridge: str, state: PartitionState, parts: Sequence[bytes], *, is_new: bool) -> Iterator[StreamRecord]:
    """What a bridge has to write of the engine that sends the parts: from where the log stands, or of a new incarnation."""
    stream = state.streams.get(KEY)
    life, last = (0, -1) if stream is None else (stream.incarnation, stream.last_seq)
    yield JoinRecord(*KEY, b"")
    if is_new:
        life, last = life + 1, -1
        yield IncarnationRecord(*KEY, life, "it has not proven to be the same")
    first = REPRESENTED
    if last < first - 1:
        yield GapRecord(*KEY, life, max(0, last + 1), first - 1, True)
    for seq, part in enumerate(parts, first):
        if seq > last:
            yield BatchRecord(*KEY, life, seq, True, part)
    yield TrustRecord(*KEY, bridge, Trust.EXACT.name, "", {})


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("replica_restarts", [False, True])
def test_a_snapshot_over_several_pages_is_not_exact_before_its_end(
    tmp_path: Path, is_new: bool, replica_restarts: bool
) -> None:
    """After whichever page its bridge is killed, and whether another one goes on or begins again; for any other replica too."""
    sent = compacted()
    total = pages_of(tmp_path, sent, killed_behind=10_000, is_new=False, replica_restarts=replica_restarts)
    assert total > 2 * len(sent.parts)
    for killed_behind in range(1, total):
        pages_of(tmp_path, sent, killed_behind=killed_behind, is_new=is_new, replica_restarts=replica_restarts)


def pages_of(folder: Path, sent: Compacted, *, killed_behind: int, is_new: bool, replica_restarts: bool) -> int:
    """How many pages take the snapshot. Behind each a replica that is EXACT holds what the engine holds.

    A bridge in reserve, which has written nothing of it yet, has said that the stream is EXACT.
    """
    pages: list[Page] = []
    reader = LogReader()

    def append(page: Page) -> None:
        pages.append(page)
        if replica_restarts:
            reader.restart(folder)
        reader.read(len(pages), page)
        assert not reader.is_exact() or reader.index.digest(KEY) in sent.digests, len(pages)

    def beat(*records: Record) -> None:
        """The bridge in reserve says that it is alive."""
        page = Page(VERSION, "reserve", 0.0, [*records, HeartbeatRecord("reserve", 3600.0, 0.0)])
        builder.apply(len(pages) + 1, page)
        append(page)

    bridge, builder = "one", PageBuilder(PartitionState(), "none", ROOM, "none")
    beat(
        JoinRecord(*KEY, b""),
        BatchRecord(*KEY, 0, 0, False, sent.first),
        TrustRecord(*KEY, "reserve", Trust.EXACT.name, "", {}),
    )
    builder = following(bridge, pages, sent.parts, is_new=False)
    while builder.next_due() is not None:
        builder.set_heartbeat(HeartbeatRecord(bridge, 3600.0, 0.0))
        page = builder.build(0.0, 0.0)
        assert page is not None
        builder.acknowledge(len(pages) + 1)
        append(page)
        beat()
        if len(pages) // 2 == killed_behind:
            bridge = "two"
            builder = following(bridge, pages, sent.parts, is_new=is_new)
    assert reader.is_exact()
    return len(pages) // 2


def following(bridge: str, pages: Sequence[Page], parts: Sequence[bytes], *, is_new: bool) -> PageBuilder:
    """A bridge that has read the log, and has all that it has to write."""
    state = PartitionState()
    for position, page in enumerate(pages, 1):
        state.apply(position, page)
    builder = PageBuilder(state, bridge, ROOM, bridge)
    builder.resync(KEY)
    for record in records_of(bridge, state, parts, is_new=is_new):
        builder.enqueue(record)
    return builder
