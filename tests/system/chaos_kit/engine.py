"""An engine in a process of its own: one incarnation of a cache, a publisher, and the truth after each batch.

All batches of an incarnation are made before its publisher opens, and the digest after each is written to a file at once.
So the truth is known however the process ends. The process receives commands by a pipe and sends its progress back.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import zmq

from kvevents.events import BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher import ZmqEventPublisher
from kvevents.recording import LiveBatch
from kvevents.stream import Batch
from kvevents.testing import Faults, TapePlayer
from kvevents.testing.tape import ENGINE_HWM
from kvevents.wire import Dialect, dialect_for, encode_batch, live_frames
from tests.system.chaos_kit import truth
from tests.system.chaos_kit.cache import Cache, CacheSettings, DialectFeatures
from tests.system.chaos_kit.parts import wait_until
from tools import released

Make = Literal["ours", "tape", "vllm", "sglang"]

TOPIC: Final = "kv-events"
CHUNK: Final = 16
"""Batches that are published before the engine reports its progress."""
DRAIN_SECONDS: Final = 30.0
"""Limit of the wait until a publisher has sent everything."""
MAX_JUMP: Final = 5_000_000
"""Seconds of a jump of the clock at most."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Behaviour of the engine's wall clock."""

    start: int = 1_000_000_000
    jumps: float = 0.0
    """Share of batches before which the clock jumps, forwards or backwards."""


@dataclass(frozen=True, slots=True)
class Defects:
    """Shares of batches with which the engine publishes something wrong."""

    unknown: float = 0.0
    """The batch has an event of an unknown type."""
    garbage: float = 0.0
    """A message follows whose payload is not a batch (tape)."""
    frames: float = 0.0
    """Malformed messages follow (tape)."""
    unencodable: float = 0.0
    """A batch follows that cannot be encoded, so that its number is skipped (`KveventsPublisher`)."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The settings of an engine, for all its incarnations."""

    make: Make
    dialect: tuple[str, str]
    endpoint: str
    replay_endpoint: str | None
    cache_settings: CacheSettings
    topic: str = TOPIC
    clock: Clock = Clock()
    defects: Defects = Defects()
    faults: Faults = field(default_factory=Faults)
    """Faults of the tape."""
    options: tuple[tuple[str, Any], ...] = ()
    """Options of the publisher, by name."""

    @property
    def features(self) -> DialectFeatures:
        return replace(DialectFeatures.of(dialect_for(*self.dialect)), has_signed_hashes=self.make == "sglang")


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One incarnation of an engine."""

    number: int
    seed: str
    batches: int
    """Batches that it can publish at most."""


def run(pipe: Connection, engine: Engine, incarnation: Incarnation, facts: Path) -> None:
    """Run the process. Its commands are `("publish", until, rate)`, `("drain",)` and `("close",)`."""
    batches = make_batches(engine, incarnation, facts)
    engine_publisher = PUBLISHERS[engine.make](engine, incarnation, batches)
    pipe.send(("open", 0))
    done = 0

    def note(first: int, end: int) -> None:
        keys = (truth.Key(incarnation.number, number).packed for number in range(first, end))
        truth.write_times(times_path(facts), keys, time.monotonic())

    with suppress(EOFError):
        while True:
            command, *details = pipe.recv()
            if command == "publish":
                done = _publish(pipe, engine_publisher, done, *details, note=note)
            elif command == "drain":
                engine_publisher.drain()
                pipe.send(("drained", done))
            else:
                engine_publisher.close()
                pipe.send(("closed", done))
                return


def times_path(facts: Path) -> Path:
    """Return the file with the times at which the batches of an engine are published."""
    return facts.with_name(f"times of {facts.name}")


def _publish(
    pipe: Connection,
    engine_publisher: EnginePublisher,
    done: int,
    until: int,
    rate: float,
    *,
    note: Callable[[int, int], None],
) -> int:
    """Publish batches up to number `until`. `note` is called with the next ones before they are published."""
    began, first = time.monotonic(), done
    while done < until:
        upto = min(until, done + CHUNK)
        note(done, upto)
        engine_publisher.publish(upto)
        done = upto
        pipe.send(("at", done))
        ahead = (done - first) / rate - (time.monotonic() - began)
        if ahead > 0:
            time.sleep(ahead)
    pipe.send(("published", done))
    return done


def make_batches(engine: Engine, incarnation: Incarnation, facts: Path) -> list[KVEventBatch]:
    """Return the batches of an incarnation, and write the digest after each to the file `facts`."""
    cache = Cache(Random(incarnation.seed), engine.features, engine.cache_settings)
    draw, index, found = Random(f"{incarnation.seed}/clock"), PrefixIndex(), []
    second, batches = engine.clock.start, []
    for number in range(incarnation.batches):
        key = truth.Key(incarnation.number, number)
        if engine.clock.jumps and draw.random() < engine.clock.jumps:
            second = min(max(0, second + draw.randrange(-MAX_JUMP, MAX_JUMP)), truth.LAST_SECOND)
        batch = KVEventBatch(truth.stamp(key, second), cache.step(), 0)
        index.apply(Batch("truth", 0, 0, number, batch.ts, batch.events, False))
        found.append((key.packed, bytes.fromhex(index.digest("truth"))))
        batches.append(batch)
    _check(cache, index)
    truth.write_facts(facts, found)
    return batches


def _check(cache: Cache, index: PrefixIndex) -> None:
    """Compare the index with the own count of the cache, so that an error of the index does not become the truth."""
    copies_held = sum(cache.copies_held().values())
    known = sum(block.copies for block in index.blocks("truth"))
    if (copies_held, len(cache.copies_held())) != (known, sum(1 for _ in index.blocks("truth"))):
        raise AssertionError(f"the cache holds {copies_held} copies, the index {known}")


def draw_malformed_message(draw: Random, topic: bytes, number: int) -> list[bytes]:
    """Return a message that is not a batch. The message begins with the topic, so that subscribers receive it."""
    good = live_frames(topic, number, b"x")
    return draw.choice(([topic], good[:2], [*good, b""], [topic, b"\0\0\0\5", b""], [topic, b"", b""]))


# --- makes -------------------------------------------------------------------------------------------------------------------


class EnginePublisher(ABC):
    """A publisher with the batches of one incarnation."""

    def __init__(self, engine: Engine, incarnation: Incarnation, batches: Sequence[KVEventBatch]) -> None:
        self._engine = engine
        self._batches = batches
        self._next = 0
        self._draw = Random(f"{incarnation.seed}/harm")
        self.open()

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def publish(self, upto: int) -> None:
        """Publish batches until this many have been published."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until everything has been sent."""

    @abstractmethod
    def close(self) -> None: ...

    def _take_next(self, upto: int) -> Sequence[KVEventBatch]:
        taken = self._batches[self._next : upto]
        self._next = upto
        return taken

    def _is_drawn(self, share: float) -> bool:
        return bool(share) and self._draw.random() < share

    def _add_unknown_event(self, batch: KVEventBatch) -> KVEventBatch:
        """Return the batch, with an unknown event if the draw says so."""
        if not self._is_drawn(self._engine.defects.unknown):
            return batch
        unknown: Any = {"type": "BlockPinned", "block_hashes": [1]}
        return KVEventBatch(batch.ts, [*batch.events, unknown], batch.data_parallel_rank)


class KveventsPublisher(EnginePublisher):
    """`kvevents.ZmqEventPublisher`."""

    def open(self) -> None:
        engine = self._engine
        options = dict(engine.options)
        self._publisher = ZmqEventPublisher(
            0, engine.endpoint, engine.replay_endpoint, topic=engine.topic, bind=True, dialect=_row(engine), **options
        )

    def publish(self, upto: int) -> None:
        for batch in self._take_next(upto):
            self._publisher.publish(self._add_unknown_event(batch))
            if self._is_drawn(self._engine.defects.unencodable):
                self._publisher.publish(KVEventBatch(1.0, [object()]))  # type: ignore[list-item]

    def drain(self) -> None:
        _wait_until_sent(lambda: not self._publisher.stats().queued)

    def close(self) -> None:
        self._publisher.shutdown()


class TapePublisher(EnginePublisher):
    """`kvevents.testing.TapePlayer`, with the replies and faults of the engine generation that has the dialect."""

    def open(self) -> None:
        engine, row = self._engine, _row(self._engine)
        topic = engine.topic.encode()
        payloads: list[bytes] = []
        self._ends = []
        """Number of messages on the tape up to and including each batch of the engine."""
        for batch in self._batches:
            payloads.append(encode_batch(self._add_unknown_event(batch), row))
            if self._is_drawn(engine.defects.garbage):
                payloads.append(self._draw.choice((b"", b"\xc1garbage", payloads[-1][:40])))
            self._ends.append(len(payloads))
        tape = [LiveBatch(topic, seq, payload) for seq, payload in enumerate(payloads)]
        self._played = 0
        self._player = TapePlayer(
            tape,
            faults=engine.faults,
            endpoint=engine.endpoint,
            replay_endpoint=engine.replay_endpoint,
            hwm=dict(engine.options).get("hwm", ENGINE_HWM),
        )

    def publish(self, upto: int) -> None:
        end = self._ends[upto - 1]
        self._player.play(end - self._played)
        self._played = end
        if self._is_drawn(self._engine.defects.frames * CHUNK):
            self._player.send_raw(draw_malformed_message(self._draw, self._engine.topic.encode(), self._played))

    def drain(self) -> None:
        """Do nothing: `play` has sent everything."""

    def close(self) -> None:
        self._player.close()


class ReleasedPublisher(EnginePublisher):
    """The publisher class of a release, loaded from its wheel."""

    release: released.Engine

    def open(self) -> None:
        engine = self._engine
        self._types: Any = released.load(self.release)
        options = {"buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, **dict(engine.options)}
        self._publisher = self._types.ZmqEventPublisher(
            0, engine.endpoint, engine.replay_endpoint, **options, topic=engine.topic
        )
        self._release_batches = [self._translate_batch(batch) for batch in self._batches]

    def _translate_batch(self, batch: KVEventBatch) -> Any:
        return self._types.KVEventBatch(batch.ts, [self._translate_event(event) for event in batch.events])

    def _translate_event(self, event: KVEvent) -> Any:
        kind = getattr(self._types, type(event).__name__)
        if not isinstance(event, BlockStored | BlockRemoved):
            return kind()
        return kind(**{name: getattr(event, name) for name in kind.__struct_fields__})

    def publish(self, upto: int) -> None:
        for batch in self._release_batches[self._next : upto]:
            self._publisher.publish(batch)
        self._next = upto

    def drain(self) -> None:
        sent_buffer = self._publisher._buffer
        _wait_until_sent(lambda: not self._next or (bool(sent_buffer) and sent_buffer[-1][0] >= self._next - 1))

    def close(self) -> None:
        self._publisher.shutdown()
        zmq.Context.instance().destroy(linger=0)


class ReleasedVllm(ReleasedPublisher):
    release = released.VLLM


class ReleasedSglang(ReleasedPublisher):
    release = released.SGLANG


PUBLISHERS: Final[dict[Make, Callable[[Engine, Incarnation, Sequence[KVEventBatch]], EnginePublisher]]] = {
    "ours": KveventsPublisher,
    "tape": TapePublisher,
    "vllm": ReleasedVllm,
    "sglang": ReleasedSglang,
}
RELEASES: Final[dict[Make, released.Engine]] = {"vllm": released.VLLM, "sglang": released.SGLANG}


def _row(engine: Engine) -> Dialect:
    return dialect_for(*engine.dialect)


def _wait_until_sent(is_sent: Callable[[], bool]) -> None:
    """Wait until everything has been sent. Raises `TimeoutError` after `DRAIN_SECONDS`."""
    if not wait_until(is_sent, DRAIN_SECONDS):
        raise TimeoutError("a publisher has not sent all its batches")
