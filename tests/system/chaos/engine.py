"""An engine in a process of its own: one life of a cache, one publisher of some make, and the truth of every batch.

A life is made before its publisher opens: the batches, and the digest after each, which goes to the file of facts at once. So
what is true is known however the process ends. Orders come by the pipe, and progress goes back.
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
from tests.system.chaos import truth
from tests.system.chaos.cache import Cache, Habits, Speech
from tools import released

Make = Literal["ours", "tape", "vllm", "sglang"]

CHUNK: Final = 16
"""Batches that are handed over before the engine looks at its orders and reports its progress."""
DRAIN_SECONDS: Final = 30.0
"""Until a publisher must have sent what it was given."""
LOOK: Final = 0.002
MOST_JUMP: Final = 5_000_000
"""Seconds that a clock jumps at most."""


@dataclass(frozen=True, slots=True)
class Clock:
    """What the engine's wall clock does."""

    start: int = 1_000_000_000
    jumps: float = 0.0
    """Share of batches before which it jumps, forwards or backwards."""


@dataclass(frozen=True, slots=True)
class Harm:
    """Shares of batches with which the engine itself does something wrong."""

    unknown: float = 0.0
    """An event that no release knows goes along."""
    garbage: float = 0.0
    """A message whose payload is not a batch follows (tape)."""
    frames: float = 0.0
    """Messages follow that are not batches (tape)."""
    unencodable: float = 0.0
    """A batch follows that cannot be encoded: its number is burnt (ours)."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine is, over all its lives."""

    make: Make
    dialect: tuple[str, str]
    endpoint: str
    replay_endpoint: str | None
    habits: Habits
    topic: str = "kv-events"
    clock: Clock = Clock()
    harm: Harm = Harm()
    faults: Faults = field(default_factory=Faults)
    """Of the tape."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of the publisher, by name."""

    @property
    def speech(self) -> Speech:
        return replace(Speech.of(dialect_for(*self.dialect)), signed=self.make == "sglang")


@dataclass(frozen=True, slots=True)
class Life:
    """Which life of an engine."""

    number: int
    seed: str
    batches: int
    """That it can publish at most."""


def run(pipe: Connection, engine: Engine, life: Life, facts: Path) -> None:
    """The process: orders are `("publish", until, rate)`, `("drain",)` and `("close",)`."""
    batches = make_life(engine, life, facts)
    outlet = OUTLETS[engine.make](engine, life, batches)
    pipe.send(("open", 0))
    done = 0
    with suppress(EOFError):
        while True:
            order, *details = pipe.recv()
            if order == "publish":
                done = _publish(pipe, outlet, done, *details)
            elif order == "drain":
                outlet.drain()
                pipe.send(("drained", done))
            else:
                outlet.close()
                pipe.send(("closed", done))
                return


def _publish(pipe: Connection, outlet: Outlet, done: int, until: int, rate: float) -> int:
    began, first = time.monotonic(), done
    while done < until:
        upto = min(until, done + CHUNK)
        outlet.publish(upto)
        done = upto
        pipe.send(("at", done))
        ahead = (done - first) / rate - (time.monotonic() - began)
        if ahead > 0:
            time.sleep(ahead)
    pipe.send(("published", done))
    return done


def make_life(engine: Engine, life: Life, facts: Path) -> list[KVEventBatch]:
    """The batches of a life, their digests written down."""
    cache = Cache(_random(life.seed), engine.speech, engine.habits)
    draw, index, found = _random(f"{life.seed}/clock"), PrefixIndex(), []
    second, batches = engine.clock.start, []
    for number in range(life.batches):
        key = truth.Key(life.number, number)
        if engine.clock.jumps and draw.random() < engine.clock.jumps:
            second = min(max(0, second + draw.randrange(-MOST_JUMP, MOST_JUMP)), truth.LAST_SECOND)
        batch = KVEventBatch(truth.stamp(key, second), cache.step(), 0)
        index.apply(Batch("truth", 0, 0, number, batch.ts, batch.events, False))
        found.append((key.packed, bytes.fromhex(index.digest("truth"))))
        batches.append(batch)
    _check(cache, index)
    truth.write_facts(facts, found)
    return batches


def _check(cache: Cache, index: PrefixIndex) -> None:
    """The truth is not ours alone: the cache counts for itself what it holds."""
    held = sum(cache.held().values())
    known = sum(block.copies for block in index.blocks("truth"))
    if (held, len(cache.held())) != (known, sum(1 for _ in index.blocks("truth"))):
        raise AssertionError(f"the cache holds {held} copies, the index that shall be the truth {known}")


# --- makes -------------------------------------------------------------------------------------------------------------------


class Outlet(ABC):
    """A publisher with the batches of one life."""

    def __init__(self, engine: Engine, life: Life, batches: Sequence[KVEventBatch]) -> None:
        self._engine = engine
        self._batches = batches
        self._next = 0
        self._draw = _random(f"{life.seed}/harm")
        self.open()

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def publish(self, upto: int) -> None:
        """Hand over batches until this many are."""

    @abstractmethod
    def drain(self) -> None:
        """Until everything was sent."""

    @abstractmethod
    def close(self) -> None: ...

    def _take(self, upto: int) -> Sequence[KVEventBatch]:
        taken = self._batches[self._next : upto]
        self._next = upto
        return taken

    def _chance(self, share: float) -> bool:
        return bool(share) and self._draw.random() < share

    def _spoilt(self, batch: KVEventBatch) -> KVEventBatch:
        """With an unknown event, if the engine takes one."""
        if not self._chance(self._engine.harm.unknown):
            return batch
        unknown: Any = {"type": "BlockPinned", "block_hashes": [1]}
        return KVEventBatch(batch.ts, [*batch.events, unknown], batch.data_parallel_rank)


class Ours(Outlet):
    """`kvevents.ZmqEventPublisher`."""

    def open(self) -> None:
        engine = self._engine
        options = dict(engine.options)
        self._publisher = ZmqEventPublisher(
            0, engine.endpoint, engine.replay_endpoint, topic=engine.topic, bind=True, dialect=_row(engine), **options
        )

    def publish(self, upto: int) -> None:
        for batch in self._take(upto):
            self._publisher.publish(self._spoilt(batch))
            if self._chance(self._engine.harm.unencodable):
                self._publisher.publish(KVEventBatch(1.0, [object()]))  # type: ignore[list-item]

    def drain(self) -> None:
        _wait(lambda: not self._publisher.stats().queued)

    def close(self) -> None:
        self._publisher.shutdown()


class Tape(Outlet):
    """`kvevents.testing.TapePlayer`: replies and faults as those of the engine generation that the dialect is of."""

    def open(self) -> None:
        engine, row = self._engine, _row(self._engine)
        topic = engine.topic.encode()
        payloads: list[bytes] = []
        self._ends = []
        """Batches of the tape up to each of the engine's own."""
        for batch in self._batches:
            payloads.append(encode_batch(self._spoilt(batch), row))
            if self._chance(engine.harm.garbage):
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
        if self._chance(self._engine.harm.frames * CHUNK):
            self._player.send_raw(self._junk())

    def _junk(self) -> list[bytes]:
        """A message that begins with the topic, so that it arrives, and is not a batch."""
        topic = self._engine.topic.encode()
        good = live_frames(topic, self._played, b"x")
        return self._draw.choice(([topic], good[:2], [*good, b""], [topic, b"\0\0\0\5", b""], [topic, b"", b""]))

    def drain(self) -> None:
        """`play` has sent it."""

    def close(self) -> None:
        self._player.close()


class Released(Outlet):
    """The class of a release, out of its wheel."""

    release: released.Engine

    def open(self) -> None:
        engine = self._engine
        self._types: Any = released.load(self.release)
        options = {"buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, **dict(engine.options)}
        self._publisher = self._types.ZmqEventPublisher(
            0, engine.endpoint, engine.replay_endpoint, **options, topic=engine.topic
        )
        self._made = [self._translated(batch) for batch in self._batches]

    def _translated(self, batch: KVEventBatch) -> Any:
        return self._types.KVEventBatch(batch.ts, [self._event(event) for event in batch.events])

    def _event(self, event: KVEvent) -> Any:
        kind = getattr(self._types, type(event).__name__)
        if not isinstance(event, BlockStored | BlockRemoved):
            return kind()
        return kind(**{name: getattr(event, name) for name in kind.__struct_fields__})

    def publish(self, upto: int) -> None:
        for batch in self._made[self._next : upto]:
            self._publisher.publish(batch)
        self._next = upto

    def drain(self) -> None:
        kept = self._publisher._buffer
        _wait(lambda: not self._next or (bool(kept) and kept[-1][0] >= self._next - 1))

    def close(self) -> None:
        self._publisher.shutdown()
        zmq.Context.instance().destroy(linger=0)


class ReleasedVllm(Released):
    release = released.VLLM


class ReleasedSglang(Released):
    release = released.SGLANG


OUTLETS: Final[dict[Make, Callable[[Engine, Life, Sequence[KVEventBatch]], Outlet]]] = {
    "ours": Ours,
    "tape": Tape,
    "vllm": ReleasedVllm,
    "sglang": ReleasedSglang,
}
RELEASES: Final[dict[str, released.Engine]] = {"vllm": released.VLLM, "sglang": released.SGLANG}


def _row(engine: Engine) -> Dialect:
    return dialect_for(*engine.dialect)


def _random(seed: str) -> Random:
    return Random(seed)


def _wait(ready: Callable[[], bool]) -> None:
    """Raises `TimeoutError` when it takes too long."""
    end = time.monotonic() + DRAIN_SECONDS
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError("a publisher has not sent what it was given")
        time.sleep(LOOK)
