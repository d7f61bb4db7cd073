"""A consumer in a process of its own: a subscriber, an index, and a file of its claims to be EXACT."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, overload

import msgspec

from kvevents.errors import SnapshotError
from kvevents.events import BlockRemoved
from kvevents.index import PrefixIndex
from kvevents.stream import Batch, Checkpoint, DegradedReason, Gap, RawBatch, Reset, Source, Trust
from kvevents.subscriber import AsyncSubscriber, SocketOptions, Subscriber, ZmqTransport
from tests.system.chaos_kit.judging import State
from tests.system.chaos_kit.timeouts import FAST_LIMITS, FAST_SOCKET_OPTIONS
from tests.system.chaos_kit.truth import EMPTY, NO_BATCH, Claim, ClaimWriter, describe_batch, key_of

NAME: Final = "engine"
RECEIVE_SECONDS: Final = 0.02
"""Limit of one wait for deliveries, after which a consumer reads its pipe."""
CLAIM_INTERVAL: Final = 0.004
"""Seconds between two claims at least."""
SAVE_INTERVAL: Final = 0.1
"""Seconds between two saved states at least."""

LASTING_REASONS: Final = frozenset(
    degraded_reason.name
    for degraded_reason in (
        DegradedReason.NO_REPLAY,
        DegradedReason.LOST,
        DegradedReason.REJECTED,
        DegradedReason.IDENTITY,
        DegradedReason.REPLAY_FOREIGN,
        DegradedReason.REPLAY_UNCONFIRMED,
    )
)
"""Degraded reasons that do not end while no batches arrive."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """The settings of a consumer."""

    name: str
    endpoint: str
    replay_endpoint: str | None
    folder: str
    state_folder: str = ""
    topic: str = "kv-events"
    decode: bool = False
    """Whether its subscriber decodes batches, instead of returning bytes."""
    asynchronous: bool = False
    has_short_timeouts: bool = True
    clock_leaps: int = 0
    """Leaps of its clock per second, about; 0 for a true clock."""
    saves_state: bool = False
    """Whether it saves its state, and resumes from a saved state at its start."""
    counts_batches: bool = False
    """Whether it counts the received batches of the engine, to be compared with the example subscribers."""
    writes_claims: bool = True
    """Whether it records its claims to be EXACT."""
    sink_failures: float = 0.0
    """Share of the calls in which its sink raises; without any, it applies deliveries itself."""
    name_delay: float = 0.0
    """Seconds that its name server takes; 0 to connect to addresses."""
    ignores_a_removal: bool = False
    """Whether it silently ignores one removal, which the check of a round must find."""

    @property
    def claims_path(self) -> Path:
        return Path(self.folder, f"{self.name}.claims")

    @property
    def state(self) -> Path:
        return Path(self.state_folder, f"{self.name}.state")


class Report(NamedTuple):
    """The state of a consumer."""

    trust: str
    reason_names: tuple[str, ...]
    """Names of the degraded reasons."""
    key: int
    digest: bytes
    seq: int
    counted: dict[str, int]
    resets: tuple[str, ...] = ()
    """The reasons of the last few resets."""

    @property
    def is_exact(self) -> bool:
        return self.trust == Trust.EXACT.name

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why the consumer is not EXACT."""
        return () if self.is_exact else self.reason_names or (self.trust,)

    @property
    def lasting_reasons(self) -> frozenset[str]:
        return LASTING_REASONS.intersection(self.reason_names)

    @property
    def state(self) -> State:
        after = f", after resets ({'; '.join(self.resets)})" if self.resets else ""
        return State(self.trust, self.reasons, self.digest, f"at {describe_batch(self.key)} (number {self.seq}){after}")


class _Saved(msgspec.Struct):
    """A saved state: snapshot and checkpoint of one moment."""

    snapshot: str
    checkpoint: Checkpoint
    key: int


class SinkError(Exception):
    """The sink of a consumer has raised, as a sink with an error does."""


class FailingSink:
    """Applies deliveries to an index, and raises in some calls: before all deliveries, between two deliveries, or after all of
    them."""

    def __init__(self, index: PrefixIndex, share: float, draw: Random) -> None:
        self._index = index
        self._share = share
        self._draw = draw
        self.applied: list[tuple[Any, Any]] = []
        """Deliveries with their outcomes, until the consumer takes them."""

    def apply_many(self, deliveries: Sequence[Any]) -> Sequence[Any]:
        fails = self._draw.random() < self._share
        count = self._draw.choice((0, len(deliveries) // 2, len(deliveries))) if fails else len(deliveries)
        outcomes = self._index.apply_many(deliveries[:count])
        self.applied += zip(deliveries, outcomes, strict=False)
        if fails:
            raise SinkError(f"after {count} of {len(deliveries)} deliveries")
        return outcomes


class Follower:
    """A subscriber of either kind with its index and its claims. The caller waits for deliveries."""

    def __init__(
        self,
        consumer: Consumer,
        subscriber: Subscriber[Any] | AsyncSubscriber[Any],
        index: PrefixIndex,
        sink: FailingSink | None,
    ) -> None:
        self.subscriber = subscriber
        self._consumer = consumer
        self._index = index
        self._sink = sink
        self._claim_writer = ClaimWriter(consumer.claims_path)
        self._key = NO_BATCH
        self._last: Batch | RawBatch | None = None
        self._seq = -1
        self._ignores_a_removal = consumer.ignores_a_removal
        self._resets = self._claims = 0
        self._reset_reasons: deque[str] = deque(maxlen=4)
        self._received_keys: set[int] = set()
        self._next_claim = self._next_save = 0.0
        self._saves = 0
        source = Source(consumer.endpoint, consumer.replay_endpoint, consumer.topic, NAME)
        subscriber.add(source, self._resume() if consumer.saves_state else None)

    def apply_all(self, deliveries: Sequence[Any]) -> None:
        """Apply deliveries, unless a sink has. Record a claim and save the state if they are due."""
        for delivery, outcome in self._apply(deliveries):
            self._record(delivery, outcome)
        now = time.monotonic()
        if self._consumer.writes_claims and now >= self._next_claim:
            self._next_claim = now + CLAIM_INTERVAL
            self._claim()
        if self._consumer.saves_state and now >= self._next_save:
            self._next_save = now + SAVE_INTERVAL
            self._save()

    def _apply(self, deliveries: Sequence[Any]) -> list[tuple[Any, Any]]:
        if self._sink is not None:
            applied, self._sink.applied = self._sink.applied, []
            return applied
        deliveries = [each for each in deliveries if not self._is_ignored(each)] if self._ignores_a_removal else deliveries
        if self._consumer.decode:
            outcomes = [self._index.apply(each) for each in deliveries]
        else:
            outcomes = self._index.apply_many(deliveries)
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            self.subscriber.report(delivery, outcome.report)
        return list(zip(deliveries, outcomes, strict=True))

    def _record(self, delivery: Any, outcome: Any) -> None:
        if isinstance(delivery, Reset):
            self._resets += 1
            self._reset_reasons.append(delivery.reason)
            self._last, self._key, self._seq = None, NO_BATCH, -1
            return
        if isinstance(delivery, Gap):
            self._seq = delivery.last
            return
        self._seq = delivery.seq
        is_heartbeat = outcome.report is not None and outcome.report.heartbeat is not None
        if outcome.status == "applied" and not is_heartbeat:
            self._last = delivery
            if self._consumer.counts_batches:
                self._received_keys.add(self._newest_key())

    def _is_ignored(self, delivery: Any) -> bool:
        batch = delivery.decode() if isinstance(delivery, RawBatch) else delivery
        if isinstance(batch, Batch) and any(isinstance(event, BlockRemoved) for event in batch.events):
            self._ignores_a_removal = False
            return True
        return False

    # --- reports and claims

    def report(self) -> Report:
        """Return the state. If the consumer records claims and is EXACT, record one."""
        if self._consumer.writes_claims:
            self._claim()
        status = self.subscriber.status(NAME)
        trust = status.trust
        reason_names = (
            tuple(sorted(degraded_reason.name for degraded_reason in status.degraded_reasons))
            if trust == Trust.DEGRADED
            else ()
        )
        counters = status.counters
        counted = {
            "reconnects": counters.reconnects,
            "resets": self._resets,
            "repaired": counters.gaps_repaired,
            "lost": counters.lost,
            "requests": counters.requests,
            "delivered": counters.delivered,
            "heartbeats": counters.heartbeats,
            "agreements": counters.digests_matched,
            "divergences": counters.digests_mismatched,
            "claims": self._claims,
            "received": len(self._received_keys),
        }
        return Report(
            trust.name, reason_names, self._newest_key(), self._digest(), self._seq, counted, tuple(self._reset_reasons)
        )

    def _claim(self) -> None:
        if self.subscriber.trust(NAME) == Trust.EXACT:
            self._claims += 1
            self._claim_writer.write(Claim(self._newest_key(), self._digest(), self._seq))

    def _newest_key(self) -> int:
        """Return the key of the newest applied batch of the engine."""
        last, self._last = self._last, None
        if last is not None:
            batch = last.decode() if isinstance(last, RawBatch) else last
            self._key = key_of(batch.ts)
        return self._key

    def _digest(self) -> bytes:
        is_known = any(info.source == NAME for info in self._index.workers())
        return bytes.fromhex(self._index.digest(NAME)) if is_known else EMPTY

    # --- saved state

    def _save(self) -> None:
        """Save snapshot and checkpoint of one moment. The new state replaces the old one atomically."""
        self._saves += 1
        state = self._consumer.state
        snapshot = state.with_suffix(f".snapshot-{os.getpid()}-{self._saves % 2}")
        temporary = state.with_suffix(".fresh")
        with suppress(SnapshotError, OSError):  # if the disk is full, the previous state stays
            self._index.snapshot(snapshot)
            saved = _Saved(str(snapshot), self.subscriber.checkpoint(NAME), self._newest_key())
            temporary.write_bytes(msgspec.json.encode(saved))
            temporary.replace(state)

    def _resume(self) -> Checkpoint | None:
        state = self._consumer.state
        if not state.exists():
            return None
        saved = msgspec.json.decode(state.read_bytes(), type=_Saved)
        self._index.restore(saved.snapshot)
        self._key, self._seq = saved.key, saved.checkpoint.last_seq
        return saved.checkpoint


def run(pipe: Connection, consumer: Consumer) -> None:
    """Run the process: send a `Report` for each message in the pipe, until the pipe is closed."""
    if consumer.name_delay:
        _slow_down_names(consumer.name_delay)
        consumer = replace(consumer, endpoint=_named(consumer.endpoint), replay_endpoint=_named(consumer.replay_endpoint))
    if consumer.asynchronous:
        asyncio.run(_run_async(pipe, consumer))
    else:
        _run_sync(pipe, consumer)


def _run_sync(pipe: Connection, consumer: Consumer) -> None:
    index, sink = _make_sink(consumer)
    with Subscriber(**_options(consumer), sink=sink) as subscriber, suppress(EOFError, BrokenPipeError):
        follower = Follower(consumer, subscriber, index, sink)
        while True:
            deliveries: Sequence[Any] = ()
            with suppress(SinkError):
                deliveries = subscriber.receive_many(timeout=RECEIVE_SECONDS)
            follower.apply_all(deliveries)
            _answer_requests(pipe, follower)


async def _run_async(pipe: Connection, consumer: Consumer) -> None:
    index, sink = _make_sink(consumer)
    async with AsyncSubscriber(**_options(consumer), sink=sink) as subscriber:
        with suppress(EOFError, BrokenPipeError):
            follower = Follower(consumer, subscriber, index, sink)
            while True:
                deliveries: Sequence[Any] = ()
                with suppress(SinkError):
                    deliveries = await subscriber.receive_many(timeout=RECEIVE_SECONDS)
                follower.apply_all(deliveries)
                _answer_requests(pipe, follower)


def _make_sink(consumer: Consumer) -> tuple[PrefixIndex, FailingSink | None]:
    index = PrefixIndex()
    return index, FailingSink(index, consumer.sink_failures, Random(consumer.name)) if consumer.sink_failures else None


def _slow_down_names(seconds: float) -> None:
    """Let each name resolve this late in this process, as with a name server that is not well; each fifth lookup fails."""
    resolve: Any = socket.getaddrinfo
    lookups = itertools.count(1)

    def resolve_late(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        if next(lookups) % 5 == 0:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer from the name server of this round")
        return resolve(*arguments, **options)

    socket.getaddrinfo = resolve_late


@overload
def _named(endpoint: str) -> str: ...
@overload
def _named(endpoint: None) -> None: ...
def _named(endpoint: str | None) -> str | None:
    return endpoint and endpoint.replace("tcp://127.0.0.1:", "tcp://localhost:")


def _answer_requests(pipe: Connection, follower: Follower) -> None:
    while pipe.poll():
        pipe.recv()
        pipe.send(follower.report())


def _options(consumer: Consumer) -> dict[str, Any]:
    sockets = FAST_SOCKET_OPTIONS if consumer.has_short_timeouts else SocketOptions()
    options: dict[str, Any] = {"decode": consumer.decode, "transport": ZmqTransport(options=sockets)}
    if consumer.has_short_timeouts:
        options["limits"] = FAST_LIMITS
    if consumer.clock_leaps:
        options["clock"] = make_leaping_clock(time.monotonic, consumer.clock_leaps, Random(consumer.name))
    return options


def make_leaping_clock(clock: Callable[[], float], clock_leaps: int, draw: Random) -> Callable[[], float]:
    """Return a monotonic clock that leaps forward by up to an hour, about `clock_leaps` times a second."""

    def seconds() -> Iterator[float]:
        ahead, next_leap = 0.0, clock()
        while True:
            now = clock()
            if now >= next_leap:
                next_leap = now + draw.expovariate(clock_leaps)
                ahead += draw.choice((0.3, 3.0, 3600.0))
            yield now + ahead

    return seconds().__next__
