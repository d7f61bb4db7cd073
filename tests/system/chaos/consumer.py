"""A consumer in a process of its own: a subscriber, an index, and a diary of every claim to be exact."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.errors import SnapshotError
from kvevents.events import BlockRemoved
from kvevents.index import PrefixIndex
from kvevents.stream import Batch, Checkpoint, Gap, RawBatch, Reset, Source, StreamLimits, Trust
from kvevents.subscriber import AsyncSubscriber, SocketOptions, Subscriber, ZmqTransport
from tests.system.chaos.truth import EMPTY, NOTHING, Claim, Diary, key_of

NAME: Final = "engine"
TURN_SECONDS: Final = 0.02
"""How long a consumer waits for deliveries before it looks at its orders."""
CLAIM_EVERY: Final = 0.004
"""Seconds between two claims."""
SAVE_EVERY: Final = 0.1
"""Seconds between two saved states."""

BRISK: Final = StreamLimits(replay_timeout=0.5, reply_idle_timeout=0.2, idle_before_probe=0.15, max_probe_interval=1.0)
"""A round shall not last as long as a production network's patience."""
BRISK_SOCKETS: Final = SocketOptions(reconnect_ms=20, reconnect_max_ms=200, heartbeat_ms=150, heartbeat_timeout_ms=600)


@dataclass(frozen=True, slots=True)
class Consumer:
    """What a consumer is."""

    name: str
    endpoint: str
    replay_endpoint: str | None
    folder: str
    state_folder: str = ""
    topic: str = "kv-events"
    decode: bool = False
    """Whether its subscriber hands out events instead of bytes."""
    asynchronous: bool = False
    brisk: bool = True
    leaps: int = 0
    """A clock that leaps forward: about so many times a second."""
    saves: bool = False
    """Whether it keeps its state, and goes on from what is there."""
    counts: bool = False
    """Whether it records which batches of the engine it got, beside the example subscribers, which get fewer."""
    claims: bool = True
    """Whether it writes down when it is exact."""
    sabotage: bool = False
    """Whether it passes over a removal, silently: what no checker may overlook."""

    @property
    def diary(self) -> Path:
        return Path(self.folder, f"{self.name}.claims")

    @property
    def state(self) -> Path:
        return Path(self.state_folder, f"{self.name}.state")


class Report(NamedTuple):
    """What a consumer says when asked."""

    trust: str
    doubts: tuple[str, ...]
    key: int
    digest: bytes
    seq: int
    counted: dict[str, int]
    resets: tuple[str, ...] = ()
    """The reasons of its last few resets."""

    @property
    def exact(self) -> bool:
        return self.trust == Trust.EXACT.name

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not exact."""
        return () if self.exact else self.doubts or (self.trust,)


class _Saved(msgspec.Struct):
    """A state of one moment."""

    snapshot: str
    checkpoint: Checkpoint
    key: int


class Follower:
    """What both kinds of subscriber share: everything but the waiting."""

    def __init__(self, consumer: Consumer, subscriber: Subscriber[Any] | AsyncSubscriber[Any]) -> None:
        self.subscriber = subscriber
        self._consumer = consumer
        self._index = PrefixIndex()
        self._diary = Diary(consumer.diary)
        self._key = NOTHING
        self._last: Batch | RawBatch | None = None
        self._seq = -1
        self._sabotage = consumer.sabotage
        self._resets = self._claims = 0
        self._because: deque[str] = deque(maxlen=4)
        self._got: set[int] = set()
        self._claim_at = self._save_at = 0.0
        self._saves = 0
        source = Source(consumer.endpoint, consumer.replay_endpoint, consumer.topic, NAME)
        subscriber.add(source, self._resume() if consumer.saves else None)

    def take(self, deliveries: Sequence[Any]) -> None:
        """Apply deliveries, and claim what is to be claimed."""
        deliveries = [each for each in deliveries if not self._passed_over(each)] if self._sabotage else deliveries
        if self._consumer.decode:
            applied = [self._index.apply(each) for each in deliveries]
        else:
            applied = self._index.apply_many(deliveries)
        for delivery, outcome in zip(deliveries, applied, strict=True):
            self.subscriber.report(delivery, outcome.report)
            self._note(delivery, outcome)
        now = time.monotonic()
        if self._consumer.claims and now >= self._claim_at:
            self._claim_at = now + CLAIM_EVERY
            self._claim()
        if self._consumer.saves and now >= self._save_at:
            self._save_at = now + SAVE_EVERY
            self._save()

    def _note(self, delivery: Any, outcome: Any) -> None:
        if isinstance(delivery, Reset):
            self._resets += 1
            self._because.append(delivery.reason)
            self._last, self._key, self._seq = None, NOTHING, -1
            return
        if isinstance(delivery, Gap):
            self._seq = delivery.last
            return
        self._seq = delivery.seq
        speaks_of_itself = outcome.report is not None and outcome.report.heartbeat is not None
        if outcome.status == "applied" and not speaks_of_itself:
            self._last = delivery
            if self._consumer.counts:
                self._got.add(self._placed())

    def _passed_over(self, delivery: Any) -> bool:
        batch = delivery.decode() if isinstance(delivery, RawBatch) else delivery
        if isinstance(batch, Batch) and any(isinstance(event, BlockRemoved) for event in batch.events):
            self._sabotage = False
            return True
        return False

    # --- what it says

    def report(self) -> Report:
        """How it stands, which is a claim like those before."""
        if self._consumer.claims:
            self._claim()
        status = self.subscriber.status(NAME)
        trust = status.trust
        doubts = tuple(sorted(doubt.name for doubt in status.degraded_reasons)) if trust == Trust.DEGRADED else ()
        counters = status.counters
        counted = {
            "reconnects": counters.reconnects,
            "resets": self._resets,
            "healed": counters.gaps_repaired,
            "lost": counters.lost,
            "requests": counters.requests,
            "delivered": counters.delivered,
            "heartbeats": counters.heartbeats,
            "agreements": counters.digests_matched,
            "divergences": counters.digests_mismatched,
            "claims": self._claims,
            "got": len(self._got),
        }
        return Report(trust.name, doubts, self._placed(), self._digest(), self._seq, counted, tuple(self._because))

    def _claim(self) -> None:
        if self.subscriber.trust(NAME) == Trust.EXACT:
            self._claims += 1
            self._diary.write(Claim(self._placed(), self._digest(), self._seq))

    def _placed(self) -> int:
        """The key of the newest batch of the engine's that was applied."""
        last, self._last = self._last, None
        if last is not None:
            batch = last.decode() if isinstance(last, RawBatch) else last
            self._key = key_of(batch.ts)
        return self._key

    def _digest(self) -> bytes:
        known = any(info.source == NAME for info in self._index.workers())
        return bytes.fromhex(self._index.digest(NAME)) if known else EMPTY

    # --- what it keeps

    def _save(self) -> None:
        """Both of one moment; the old state is there until the new one is."""
        self._saves += 1
        state = self._consumer.state
        snapshot = state.with_suffix(f".snapshot-{os.getpid()}-{self._saves % 2}")
        fresh = state.with_suffix(".fresh")
        with suppress(SnapshotError, OSError):  # a full disk: the state before is good
            self._index.snapshot(snapshot)
            saved = _Saved(str(snapshot), self.subscriber.checkpoint(NAME), self._placed())
            fresh.write_bytes(msgspec.json.encode(saved))
            fresh.replace(state)

    def _resume(self) -> Checkpoint | None:
        state = self._consumer.state
        if not state.exists():
            return None
        saved = msgspec.json.decode(state.read_bytes(), type=_Saved)
        self._index.restore(saved.snapshot)
        self._key, self._seq = saved.key, saved.checkpoint.last_seq
        return saved.checkpoint


def run(pipe: Connection, consumer: Consumer) -> None:
    """The process: any message is a question, answered with a `Report`; when the pipe ends, so does it."""
    if consumer.asynchronous:
        asyncio.run(_run_async(pipe, consumer))
    else:
        _run_sync(pipe, consumer)


def _run_sync(pipe: Connection, consumer: Consumer) -> None:
    with Subscriber(**_options(consumer)) as subscriber, suppress(EOFError, BrokenPipeError):
        follower = Follower(consumer, subscriber)
        while True:
            follower.take(subscriber.receive_many(timeout=TURN_SECONDS))
            _answer(pipe, follower)


async def _run_async(pipe: Connection, consumer: Consumer) -> None:
    async with AsyncSubscriber(**_options(consumer)) as subscriber:
        with suppress(EOFError, BrokenPipeError):
            follower = Follower(consumer, subscriber)
            while True:
                follower.take(await subscriber.receive_many(timeout=TURN_SECONDS))
                _answer(pipe, follower)


def _answer(pipe: Connection, follower: Follower) -> None:
    while pipe.poll():
        pipe.recv()
        pipe.send(follower.report())


def _options(consumer: Consumer) -> dict[str, Any]:
    sockets = BRISK_SOCKETS if consumer.brisk else SocketOptions()
    options: dict[str, Any] = {"decode": consumer.decode, "transport": ZmqTransport(options=sockets)}
    if consumer.brisk:
        options["limits"] = BRISK
    if consumer.leaps:
        options["clock"] = leaping(time.monotonic, consumer.leaps, Random(consumer.name))
    return options


def leaping(clock: Callable[[], float], leaps: int, draw: Random) -> Callable[[], float]:
    """A monotone clock that leaps forward, by up to an hour, about `leaps` times a second."""

    def seconds() -> Iterator[float]:
        ahead, leap_at = 0.0, clock()
        while True:
            now = clock()
            if now >= leap_at:
                leap_at = now + draw.expovariate(leaps)
                ahead += draw.choice((0.3, 3.0, 3600.0))
            yield now + ahead

    return seconds().__next__
