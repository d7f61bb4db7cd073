"""A relay with engines and consumers in memory, which a test can kill at any step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.index import ApplyResult, PrefixIndex
from kvevents.publisher.compaction import SequencedPayload
from kvevents.publisher.event_server import EventServer
from kvevents.publisher.replay_buffer import ReplayBuffer
from kvevents.publisher.stats import ReplayStats
from kvevents.relay import Relay, RelayLimits, RelaySettings
from kvevents.relay.journal import Journal, JournalLimits
from kvevents.relay.journal_disk import Disk
from kvevents.stream import Batch, Gap, RawBatch, RawDelivery, Reset, Source, Trust
from kvevents.subscriber import Subscriber
from kvevents.testing import FakeEngine, FakeTransport, VirtualClock
from kvevents.testing.fake_transport import FakeConnection
from kvevents.wire import encode_batch, live_frames, replay_batch_frames, replay_end_frames
from relay_journal_cases import TINY, Killed, WatchedDisk, crash, open_journal

SIZE = 4
"""Number of tokens in a block."""
MANY_TURNS = 50
LONG_TURN = 0.3
"""Seconds of one of `MANY_TURNS`; together they are longer than all timeouts of replay requests."""

TICK = 1e-6
"""Minimum number of seconds between two batches."""

LIMITS: Final = RelayLimits(journal=TINY)
"""Limits with which a journal has tiny files."""

FOREIGN = -1.0
"""The time of batches of another engine."""

Held = Counter[tuple[int, str]]


def block(number: int, *, parent: int | None = None, medium: str = "GPU", group_idx: int = 0, **fields: Any) -> BlockStored:
    """Return a store of one block, with tokens that depend on its number. It names a group, so that copies count."""
    tokens = list(range(number * SIZE, (number + 1) * SIZE))
    return BlockStored([number], parent, tokens, SIZE, medium=medium, group_idx=group_idx, **fields)


class Upstream:
    """An engine in memory that counts what it holds."""

    def __init__(self, engine: FakeEngine, clock: VirtualClock) -> None:
        self.engine = engine
        self._clock = clock
        self.held: Held = Counter()
        self._is_forged = False
        self.held_at: dict[float, Held] = {}
        """What it held after each batch, by the time of the batch, which is unique."""

    def publish_events(self, *events: KVEvent, lost: bool = False) -> int:
        """Publish a batch. With `lost` the live message is lost, so that only replay has the batch."""
        self._note(*events)
        seq = self.engine.publish(*events, lost=lost)
        if self._is_forged:
            self.engine._buffer[-1] = (seq, encode_batch(KVEventBatch(FOREIGN, [block(50 + seq)])))
        return seq

    def fail_to_publish(self, *events: KVEvent, payload: bytes | None = None) -> None:
        """Lose a batch, or replace it with bytes that cannot be decoded."""
        self._note(*events)
        if payload is None:
            self.engine.skip_number()
        else:
            self.engine.publish_payload(payload)

    def store(self, *numbers: int, medium: str = "GPU", lost: bool = False, **fields: Any) -> int:
        return self.publish_events(*(block(number, medium=medium, **fields) for number in numbers), lost=lost)

    def remove(self, *numbers: int, medium: str = "GPU", lost: bool = False) -> int:
        return self.publish_events(BlockRemoved(list(numbers), medium), lost=lost)

    def clear(self) -> int:
        return self.publish_events(AllBlocksCleared())

    def restart(self, *unseen: KVEvent) -> None:
        """Begin another incarnation, which publishes events before consumers are connected again."""
        self.held.clear()
        self.engine.disconnect()
        self.clear_replay_buffer()
        self.engine.next_seq = 0
        for event in unseen:
            self.publish_events(event)
        self.engine.reconnect()

    def clear_replay_buffer(self) -> None:
        """Empty its replay buffer."""
        self.engine._buffer.clear()

    def forge(self) -> None:
        """Replace batches in the replay buffer by those of another engine from now on; their times are `FOREIGN`."""
        self._is_forged = True

    def _note(self, *events: KVEvent) -> None:
        for event in events:
            self._take(event)
        self.held_at[self._clock.advance(TICK)] = self.held.copy()

    def _take(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            scope = event.unknown_fields or {}
            for each in [each for each in self.held if scope.get("medium", each[1]) == each[1]]:
                del self.held[each]
            return
        places = [(each, str(event.medium)) for each in event.block_hashes]
        if isinstance(event, BlockStored):
            self.held.update(places)
        else:
            self.held -= Counter(places)


class RelayEndpoint(FakeEngine):
    """The endpoint at which consumers connect to the current relay."""

    buffer: ReplayBuffer

    def answer(self, connection: FakeConnection, start: int) -> None:
        self.requests.append(start)
        if self.is_up:
            connection.replies.extend(
                replay_batch_frames(b"", seq, payload) for seq, payload in self.buffer.batches_from(start)
            )
            connection.replies.append(replay_end_frames(has_topic=True))


class FakeEventServer:
    """Replaces the sockets. It calls `step` with "keep" and "send" before these steps, and with "sent" after a message.

    `step` can kill the relay.
    """

    endpoint, replay_endpoint = "fake://relay", None
    events = SimpleNamespace(subscriptions=0, poll=lambda: None)

    def __init__(
        self, relay_endpoint: RelayEndpoint, buffer: ReplayBuffer, incarnation: int, step: Callable[[str], None]
    ) -> None:
        self.incarnation = buffer.incarnation = incarnation
        self.sent: list[SequencedPayload] = []
        self._station, self._buffer, self._step = relay_endpoint, buffer, step

    def send(self, batches: Sequence[SequencedPayload]) -> None:
        self._step("keep")
        self._buffer.extend(batches)
        for seq, payload in batches:
            self._step("send")
            self.sent.append((seq, payload))
            self._station.send_raw(live_frames(b"", seq, payload))
            self._step("sent")

    def replay_stats(self) -> ReplayStats:
        return ReplayStats()

    def close(self, seconds: float) -> None:
        """Do nothing: there are no sockets."""


class Consumer:
    """A subscriber of the relay with an index."""

    def __init__(self, relay_endpoint: RelayEndpoint, transport: FakeTransport, *, reads_heartbeats: bool = True) -> None:
        self.index = PrefixIndex()
        self.seen: list[Batch | RawBatch | Reset | Gap] = []
        self.applied: list[ApplyResult] = []
        self.reads_heartbeats = reads_heartbeats
        source = Source(relay_endpoint.endpoint, relay_endpoint.replay_endpoint, name="relay")
        self._subscriber = Subscriber(source, transport=transport, clock=transport.clock, decode=False)

    def turn(self) -> None:
        """Receive and apply. Without `reads_heartbeats` it ignores heartbeats, like a consumer that does not know them."""
        for delivery in self._subscriber.receive_many(timeout=0):
            self.seen.append(delivery)
            applied = self.index.apply(delivery)
            self.applied.append(applied)
            report = applied.report
            if report is not None and (self.reads_heartbeats or report.heartbeat is None):
                self._subscriber.report(delivery, report)

    @property
    def trust(self) -> Trust:
        return self._subscriber.trust()

    @property
    def held(self) -> Held:
        return sum(self.held_by_rank.values(), Counter())

    @property
    def held_by_rank(self) -> dict[int, Held]:
        """The blocks of each rank that has some."""
        tiers = {"gpu": "GPU", "cpu": "CPU", "disk": "DISK"}
        found = {}
        for rank in [info.rank for info in self.index.workers() if info.blocks]:
            blocks = self.index.blocks(("relay", rank))
            found[rank] = Counter({(each.hash, tiers[each.tier]): each.copies for each in blocks})
        return found

    @property
    def resets(self) -> int:
        return self._subscriber.status().counters.resets

    def agreements(self) -> list[bool]:
        return [
            found.report.digest_matches for found in self.applied if found.report and found.report.digest_matches is not None
        ]

    def close(self) -> None:
        self._subscriber.close()


class SharedTransport(FakeTransport):
    """A transport to engines that have other connections too."""

    def __init__(self, clock: VirtualClock, engines: Mapping[str, FakeEngine]) -> None:
        super().__init__(clock)
        self._engines = dict(engines)


class MemoryRelay(Relay):
    """A relay that sends to a `FakeEventServer`, and writes snapshots of its journal at once."""

    def __init__(self, settings: RelaySettings, world: World, **options: Any) -> None:
        self._world = world
        super().__init__(settings, **options)

    def take_turn_with(self, deliveries: list[RawDelivery]) -> None:
        """Forward deliveries as a turn does, also those that engines in memory deliver in several turns."""
        self._send_lower_trust(deliveries)
        self._forward(deliveries)

    def _open_journal(self, disk: Disk | None) -> Journal | None:
        folder = self.settings.journal
        return None if folder is None else self._world.open_journal(Path(folder), self.limits.journal, disk)

    def _open_event_server(self, buffer: ReplayBuffer, incarnation: int) -> EventServer:
        return cast("EventServer", self._world.make_event_server(buffer, incarnation))


class World:
    """Upstreams, one relay at a time with the same folder, and consumers, on one clock."""

    def __init__(self, folder: Path | None, stack: ExitStack, ranks: Sequence[int], buffer_steps: int = 10_000) -> None:
        self.clock = VirtualClock()
        self.ranks = ranks
        """The ranks by which the relay follows the upstreams."""
        self.upstreams = [
            Upstream(FakeEngine(self.clock, f"tcp://e:{at}", f"tcp://r:{at}", b"", buffer_steps), self.clock)
            for at in range(len(ranks))
        ]
        self._upstream_engines = {each.engine.endpoint: each.engine for each in self.upstreams}
        self.relay_endpoint = RelayEndpoint(self.clock, "tcp://relay:1", "tcp://relay:2", b"", 0)
        self.relay_endpoint.buffer = ReplayBuffer(1)
        self.relay_endpoint.disconnect()
        self.relay: MemoryRelay
        self.event_server: FakeEventServer
        self.before: Callable[[str], None] = lambda _: None
        """Called before each step at which the relay can be killed: calls of the disk, "keep" and "send"."""
        self.sent: Callable[[], None] = lambda: None
        """Called after a message was sent."""
        self._folder = folder
        self._journal: Journal | None = None
        self._stack = stack
        self._consumers: list[Consumer] = []

    @property
    def upstream(self) -> Upstream:
        return self.upstreams[0]

    def settings(self, **more: Any) -> RelaySettings:
        sources = tuple(
            Source(each.engine.endpoint, each.engine.replay_endpoint, name=f"u{at}", rank=self.ranks[at])
            for at, each in enumerate(self.upstreams)
        )
        journal = None if self._folder is None else str(self._folder)
        return RelaySettings(upstreams=sources, **{"journal": journal, "heartbeat": 1.0, **more})

    def begin(self, disk: Disk | None = None, limits: RelayLimits = LIMITS, **settings: Any) -> MemoryRelay:
        """Open a relay, and connect the consumers to it."""
        found = disk or WatchedDisk(lambda call, _: self.before(call))
        self._transport = SharedTransport(self.clock, self._upstream_engines)
        self.relay = MemoryRelay(
            self.settings(**settings), self, limits=limits, clock=self.clock, transport=self._transport, disk=found
        )
        self.relay_endpoint.reconnect()
        return self.relay

    def open_journal(self, folder: Path, limits: JournalLimits, disk: Disk | None) -> Journal:
        self._journal = open_journal(folder, limits, disk)
        self._stack.callback(crash, self._journal)  # so that its files do not stay open after the test
        return self._journal

    def make_event_server(self, buffer: ReplayBuffer, incarnation: int) -> FakeEventServer:
        self.relay_endpoint.buffer = buffer
        self.event_server = FakeEventServer(self.relay_endpoint, buffer, incarnation, self._step)
        return self.event_server

    def _step(self, name: str) -> None:
        if name == "sent":
            self.sent()
        else:
            self.before(name)

    def kill(self) -> None:
        """Kill the relay: everything in memory is lost."""
        self.relay_endpoint.disconnect()
        self._transport.close()
        if self._journal is not None:
            crash(self._journal)

    def end(self) -> None:
        """Close the relay."""
        self.relay.close()
        self.relay_endpoint.disconnect()

    def consumer(self, *, reads_heartbeats: bool = True) -> Consumer:
        transport = SharedTransport(self.clock, {self.relay_endpoint.endpoint: self.relay_endpoint})
        made = Consumer(self.relay_endpoint, transport, reads_heartbeats=reads_heartbeats)
        self._stack.callback(made.close)
        self._consumers.append(made)
        return made

    def turn(self, count: int = 1, seconds: float = 0.1) -> None:
        """Run a turn of the relay, then of each consumer."""
        for _ in range(count):
            self.relay.turn(seconds)
            for consumer in self._consumers:
                consumer.turn()

    def settle(self) -> None:
        self.turn(MANY_TURNS, LONG_TURN)

    def confirm(self) -> None:
        """Settle, have each upstream publish an empty batch, and settle again: a live batch confirms replayed ones."""
        self.settle()
        for each in self.upstreams:
            if each.engine.is_up:
                each.publish_events()
        self.settle()

    @property
    def truth(self) -> Held:
        return sum((each.held for each in self.upstreams), Counter())


@contextmanager
def world(
    folder: Path | None = None, count: int = 1, buffer_steps: int = 10_000, *, ranks: Sequence[int] | None = None
) -> Iterator[World]:
    """Create a world whose journals have tiny files, and whose relays have no sockets. The upstreams have rank 0 by default."""
    with ExitStack() as stack:
        yield World(folder, stack, [0] * count if ranks is None else ranks, buffer_steps)


def kill_before(world: World, step: str, after: int = 0) -> None:
    """Kill the relay before the next `step`, or after `after` more of them."""
    remaining = after

    def before(each: str) -> None:
        nonlocal remaining
        if each == step:
            remaining -= 1
            if remaining < 0:
                world.before = lambda _: None
                raise Killed

    world.before = before
