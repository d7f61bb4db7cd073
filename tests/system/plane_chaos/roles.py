"""Bridges and replicas, each in a process of its own that answers how it stands, and may be killed at any moment."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvevents.errors import PlaneError, UnknownSourceError
from kvevents.index import PrefixIndex
from kvevents.plane import engine_reader
from kvevents.plane.bridge import Bridge, BridgeSettings, Watch
from kvevents.plane.replicas import ShardTimers
from kvevents.plane.settings import PlaneSettings
from kvevents.service.config import ShardSettings
from kvevents.service.fleet import Fleet
from kvevents.service.index_build import IndexBuild
from kvevents.service.replica import Replica
from kvevents.stream import Trust
from kvevents.subscriber import Subscriber, ZmqTransport
from tests.system.chaos.consumer import BRISK, BRISK_SOCKETS
from tests.system.chaos.truth import EMPTY, Claim, Diary

CLAIM_EVERY: Final = 0.01
"""Seconds between two claims of a replica."""
AGAIN_SECONDS: Final = 0.2
"""After which the supervisor of a bridge starts it again."""
SHARE_PACE: Final = ShardTimers(
    announce_seconds=0.2, settle_seconds=0.6, present_seconds=0.7, dead_seconds=2.0, release_seconds=0.5
)


@dataclass(frozen=True, slots=True)
class BridgeRole:
    """One bridge."""

    settings: BridgeSettings
    watches: tuple[Watch, ...]
    log: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaRole:
    """One replica, and the engines that its diary is about."""

    plane: PlaneSettings
    name: str
    engines: tuple[str, ...]
    """Their names in the index; a claim's key is the place here."""
    diary: Path
    snapshot_seconds: float
    holders: int | None = None
    """Replicas that hold each partition; None where each holds all."""
    log: str = ""
    clock_ahead: float = 0.0
    """Seconds by which its wall clock is wrong."""


class Held(NamedTuple):
    """What a replica says of one engine."""

    trust: str
    reason: str
    digest: bytes
    seq: int
    incarnation: int


class TrustReport(NamedTuple):
    """What a replica or a bridge says when asked."""

    held: dict[str, Held]
    counted: dict[str, int]
    fault: str
    begun: str = ""
    """With what a replica began."""
    shown: frozenset[str] = frozenset()
    """The engines that a replica answers for."""


def bridge(pipe: Connection, role: BridgeRole) -> None:
    """The process of a bridge; it ends with the pipe."""
    _begin(role.log)
    _set(engine_reader, "Subscriber", _brisk)
    with suppress(EOFError, BrokenPipeError):
        asyncio.run(_bridge(pipe, role))


def replica(pipe: Connection, role: ReplicaRole) -> None:
    """The process of a replica; it ends with the pipe."""
    _begin(role.log)
    right = time.time
    time.time = lambda: right() + role.clock_ahead
    with suppress(EOFError, BrokenPipeError):
        asyncio.run(_replica(pipe, role))


def _brisk(*, decode: bool, transport: Any, clock: Any, sink: Any) -> Subscriber[Any]:
    transport = ZmqTransport(options=BRISK_SOCKETS)
    return Subscriber(decode=decode, limits=BRISK, transport=transport, clock=clock, sink=sink)


def _begin(log: str) -> None:
    if log:
        logging.disable(logging.NOTSET)
        logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s.%(msecs)03d %(process)d %(name)s %(message)s")


def _set(module: Any, name: str, value: Any) -> None:
    """Raises `AttributeError` if the name no longer exists."""
    getattr(module, name)
    setattr(module, name, value)


# --- bridges -----------------------------------------------------------------------------------------------------------------


async def _bridge(pipe: Connection, role: BridgeRole) -> None:
    """As a supervisor runs it: started again when it cannot reach its servers."""
    fell: list[str] = []
    now: list[Bridge] = []
    answering = asyncio.create_task(_answer(pipe, lambda: _of_bridge(now, fell)))
    while not answering.done():
        found = Bridge(role.settings, role.watches)
        now[:] = [found]
        stop = asyncio.Event()
        running = asyncio.create_task(found.run(stop))
        await asyncio.wait({running, answering}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            os._exit(0)  # the other end of the pipe is gone: the round is over
        error = running.exception()
        if not isinstance(error, PlaneError):
            fell.append(repr(error))
            logging.getLogger(__name__).error("the bridge fell", exc_info=error)
        await asyncio.sleep(AGAIN_SECONDS)


def _of_bridge(now: Sequence[Bridge], fell: Sequence[str]) -> TrustReport:
    counted, fault = {"fell": len(fell)}, "; ".join(fell[-2:])
    for each in now:
        status = each.status()
        states = [partition.builder.state for partition in each._partitions]
        counted |= {
            "written": status.written,
            "conflicts": status.conflicts,
            "adrift": status.resyncs,
            "breaches": status.invalid_records,
            "doubled": sum(state.duplicate_records for state in states),
            "strays": sum(state.stale_epoch_pages for state in states),
            "waiting": sum(partition.queued_records for partition in status.partitions),
        }
        fault = "; ".join(filter(None, [fault, status.failure, *(partition.fault for partition in status.partitions)]))
    return TrustReport({}, counted, fault)


# --- replicas ----------------------------------------------------------------------------------------------------------------


async def _replica(pipe: Connection, role: ReplicaRole) -> None:
    fleet = Fleet(PrefixIndex(), max_sources=100)
    fleet.follower.start()
    shard = None
    if role.holders is not None:
        shard = ShardSettings(url="http://127.0.0.1:1", replication_factor=role.holders, pace=SHARE_PACE)
    found = Replica(role.plane, role.name, fleet, snapshot_seconds=role.snapshot_seconds, memory_limit=None, shard=shard)
    diarist = _Diarist(role, found)
    running = asyncio.create_task(found.run())
    claiming = asyncio.create_task(diarist.keep())
    answering = asyncio.create_task(_answer(pipe, diarist.report))
    await asyncio.wait({running, claiming, answering}, return_when=asyncio.FIRST_COMPLETED)
    if not answering.done():
        error = running.exception() if running.done() else claiming.exception()
        logging.getLogger(__name__).error("the replica fell", exc_info=error)
        pipe.send(error and repr(error))
    os._exit(0)


class _Diarist:
    """Writes down what a replica holds whenever it says that this is exact."""

    def __init__(self, role: ReplicaRole, replica: Replica) -> None:
        self._role: Final = role
        self._replica: Final = replica
        self._diary: Final = Diary(role.diary)
        self._claims = 0

    async def keep(self) -> None:
        while True:
            await asyncio.sleep(CLAIM_EVERY)
            build = self._replica.build
            if build is None or not build.follower.is_alive():
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.wrap_future(build.follower.submit(partial(self._claim, build)))

    def _claim(self, build: IndexBuild) -> None:
        """By the thread that applies, between two deliveries."""
        for place, name in enumerate(self._role.engines):
            found = _held(build, name) if self._shows(build, name) else None
            if found is not None and found.trust == Trust.EXACT.name:
                self._diary.write(Claim(place, found.digest, found.seq))
                self._claims += 1

    def _shows(self, build: IndexBuild, name: str) -> bool:
        layout = self._replica.layout
        return layout is not None and layout.partition_of(name) in build.served

    def report(self) -> TrustReport:
        replica, build = self._replica, self._replica.build
        counted = {"claims": self._claims, "generations": replica.builds, "disagreements": replica.disagreements}
        if build is None or not replica.is_complete:
            return TrustReport({}, counted, replica.why_hidden, shown=frozenset(self._role.engines))
        states = build.subscriber.states.values()
        counted |= {
            "breaches": sum(state.invalid_records for state in states),
            "doubled": sum(state.duplicate_records for state in states),
            "foreign": sum(state.foreign_messages for state in states),
            "diverged": build.subscriber.diverged,
            "snapshots": len(build.newest),
        }
        order = build.follower.submit(
            lambda: {name: found for name in self._role.engines if (found := _held(build, name)) is not None}
        )
        faults = "; ".join(filter(None, [replica.fault, replica.snapshot_fault]))
        shown = frozenset(name for name in self._role.engines if self._shows(build, name))
        return TrustReport(
            order.result(2.0), counted, faults, ", ".join(build.loaded_snapshots.values()) or "the log alone", shown
        )


def _held(build: IndexBuild, name: str) -> Held | None:
    try:
        status = build.subscriber.status(name)
    except UnknownSourceError:
        return None
    known = any(info.source == name for info in build.index.workers())
    digest = bytes.fromhex(build.index.digest(name)) if known else EMPTY
    return Held(status.trust.name, status.trust.reason, digest, status.last_seq, status.incarnation)


# --- both --------------------------------------------------------------------------------------------------------------------


async def _answer(pipe: Connection, answer: Callable[[], TrustReport]) -> None:
    """Until the other end of the pipe is gone."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), asked.set)
    try:
        while True:
            await asked.wait()
            asked.clear()
            while pipe.poll():
                pipe.recv()
                try:
                    report = answer()
                except TimeoutError:
                    report = TrustReport({}, {}, "the thread that applies does not answer")
                pipe.send(report)
    except (EOFError, OSError):
        return
    finally:
        loop.remove_reader(pipe.fileno())
