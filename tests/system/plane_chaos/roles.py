"""Bridges and replicas, each in a process of its own, which reports its state and may be killed at any time."""

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
from kvevents.service.fleet.fleet import Fleet
from kvevents.stream import Trust
from kvevents.subscriber import Subscriber, ZmqTransport
from kvevents_plane import engine_reader
from kvevents_plane.bridge import Bridge, BridgeSettings, Watch
from kvevents_plane.replica.build import IndexBuild
from kvevents_plane.replica.replica import Replica
from kvevents_plane.settings import PlaneSettings
from tests.system.chaos_kit.judging import State
from tests.system.chaos_kit.timeouts import FAST_LIMITS, FAST_SOCKET_OPTIONS
from tests.system.chaos_kit.truth import EMPTY, Claim, ClaimWriter

CLAIM_INTERVAL: Final = 0.01
"""Seconds between two claims of a replica."""
RESTART_SECONDS: Final = 0.2
"""Seconds after which a failed bridge is started again."""


@dataclass(frozen=True, slots=True)
class BridgeRole:
    """Settings of a bridge process."""

    plane: PlaneSettings
    settings: BridgeSettings
    watches: tuple[Watch, ...]
    log: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaRole:
    """Settings of a replica process, and the engines that its claims are about."""

    plane: PlaneSettings
    name: str
    engines: tuple[str, ...]
    """Names of the engines in the index. The key of a claim is the position in this tuple."""
    claims_path: Path
    snapshot_seconds: float
    log: str = ""
    clock_ahead: float = 0.0
    """Seconds by which its wall clock is ahead."""


class Held(NamedTuple):
    """State of one engine in a replica."""

    trust: str
    reason: str
    digest: bytes
    seq: int
    incarnation: int


class TrustReport(NamedTuple):
    """The state of a replica or a bridge."""

    held: dict[str, Held]
    counted: dict[str, int]
    fault: str
    initial_state: str = ""
    """Snapshots that a replica has loaded at its start."""

    def state_of(self, engine: str) -> State:
        held = self.held.get(engine)
        if held is None:
            return State("", (f"has no copy: {self.fault}",), b"", "nowhere")
        position = f"at number {held.seq} of incarnation {held.incarnation}, begun with {self.initial_state}"
        return State(held.trust, (held.reason,), held.digest, position)


def bridge(pipe: Connection, role: BridgeRole) -> None:
    """Run the process of a bridge until the pipe is closed."""
    _start_log(role.log)
    _replace_attribute(engine_reader, "Subscriber", _create_fast_subscriber)
    with suppress(EOFError, BrokenPipeError):
        asyncio.run(_run_bridge(pipe, role))


def replica(pipe: Connection, role: ReplicaRole) -> None:
    """Run the process of a replica until the pipe is closed."""
    _start_log(role.log)
    real_time = time.time
    time.time = lambda: real_time() + role.clock_ahead
    with suppress(EOFError, BrokenPipeError):
        asyncio.run(_replica(pipe, role))


def _create_fast_subscriber(*, decode: bool, transport: Any, clock: Any, sink: Any) -> Subscriber[Any]:
    transport = ZmqTransport(options=FAST_SOCKET_OPTIONS)
    return Subscriber(decode=decode, limits=FAST_LIMITS, transport=transport, clock=clock, sink=sink)


def _start_log(log: str) -> None:
    if log:
        logging.disable(logging.NOTSET)
        logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s.%(msecs)03d %(process)d %(name)s %(message)s")


def _replace_attribute(module: Any, name: str, value: Any) -> None:
    """Replace an attribute of a module. Raises `AttributeError` if it does not exist."""
    getattr(module, name)
    setattr(module, name, value)


# --- bridges -----------------------------------------------------------------------------------------------------------------


async def _run_bridge(pipe: Connection, role: BridgeRole) -> None:
    """Run a bridge, and start it again when it has failed, as a supervisor does."""
    failures: list[str] = []
    running_bridges: list[Bridge] = []
    answering = asyncio.create_task(_answer_requests(pipe, lambda: _report_bridge(running_bridges, failures)))
    while not answering.done():
        found = Bridge(role.plane, role.settings, role.watches)
        running_bridges[:] = [found]
        stop = asyncio.Event()
        running = asyncio.create_task(found.run(stop))
        await asyncio.wait({running, answering}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            os._exit(0)  # the pipe is closed: the round is over
        error = running.exception()
        if not isinstance(error, PlaneError):
            failures.append(repr(error))
            logging.getLogger(__name__).error("the bridge has failed", exc_info=error)
        await asyncio.sleep(RESTART_SECONDS)


def _report_bridge(running_bridges: Sequence[Bridge], failures: Sequence[str]) -> TrustReport:
    counted, fault = {"failures": len(failures)}, "; ".join(failures[-2:])
    for each in running_bridges:
        states = [partition.builder.state for partition in each.partitions]
        counted |= {
            "written": each.written,
            "conflicts": sum(partition.conflicts for partition in each.partitions),
            "resyncs": each.resyncs,
            "invalid_records": each.invalid_records,
            "duplicates": sum(state.duplicate_records for state in states),
            "waiting": sum(partition.builder.queued_records for partition in each.partitions),
        }
        failure = "" if each._reader.failure is None else repr(each._reader.failure)
        fault = "; ".join(filter(None, [fault, failure, *(partition.fault for partition in each.partitions)]))
    return TrustReport({}, counted, fault)


# --- replicas ----------------------------------------------------------------------------------------------------------------


async def _replica(pipe: Connection, role: ReplicaRole) -> None:
    fleet = Fleet(PrefixIndex(), max_sources=100)
    fleet.follower.start()
    found = Replica(role.plane, role.name, fleet, snapshot_seconds=role.snapshot_seconds, memory_limit=None)
    recorder = _ClaimRecorder(role, found)
    running = asyncio.create_task(found.run())
    claiming = asyncio.create_task(recorder.record_claims())
    answering = asyncio.create_task(_answer_requests(pipe, recorder.report))
    await asyncio.wait({running, claiming, answering}, return_when=asyncio.FIRST_COMPLETED)
    if not answering.done():
        error = running.exception() if running.done() else claiming.exception()
        logging.getLogger(__name__).error("the replica has failed", exc_info=error)
        pipe.send(error and repr(error))
    os._exit(0)


class _ClaimRecorder:
    """Records what a replica holds whenever it is EXACT."""

    def __init__(self, role: ReplicaRole, replica: Replica) -> None:
        self._role: Final = role
        self._replica: Final = replica
        self._claim_writer: Final = ClaimWriter(role.claims_path)
        self._claims = 0

    async def record_claims(self) -> None:
        while True:
            await asyncio.sleep(CLAIM_INTERVAL)
            build = self._replica.build
            if build is None or not build.follower.is_alive():
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.wrap_future(build.follower.submit(partial(self._record_claims, build)))

    def _record_claims(self, build: IndexBuild) -> None:
        """Record the claims. The thread that applies deliveries calls this between two of them."""
        for position, name in enumerate(self._role.engines):
            began = time.monotonic()
            found = _read_state(build, name)
            if found is not None and found.trust == Trust.EXACT.name:
                self._claim_writer.write(Claim(position, found.digest, found.seq, began))
                self._claims += 1

    def report(self) -> TrustReport:
        replica, build = self._replica, self._replica.build
        counted = {"claims": self._claims, "generations": replica.builds, "disagreements": replica.consistency.disagreements}
        if build is None or not replica.is_complete:
            return TrustReport({}, counted, replica.why_incomplete)
        states = build.subscriber.states.values()
        counted |= {
            "invalid_records": sum(state.invalid_records for state in states),
            "duplicates": sum(state.duplicate_records for state in states),
            "foreign": sum(state.foreign_messages for state in states),
            "diverged": build.subscriber.diverged,
            "snapshots": len(build.newest),
        }
        future = build.follower.submit(
            lambda: {name: found for name in self._role.engines if (found := _read_state(build, name)) is not None}
        )
        faults = "; ".join(replica.warnings())
        initial_state = ", ".join(build.loaded_snapshots.values()) or "the log alone"
        return TrustReport(future.result(2.0), counted, faults, initial_state)


def _read_state(build: IndexBuild, name: str) -> Held | None:
    try:
        status = build.subscriber.status(name)
    except UnknownSourceError:
        return None
    is_known = any(info.source == name for info in build.index.workers())
    digest = bytes.fromhex(build.index.digest(name)) if is_known else EMPTY
    return Held(status.trust.name, status.trust.reason, digest, status.last_seq, status.incarnation)


# --- both --------------------------------------------------------------------------------------------------------------------


async def _answer_requests(pipe: Connection, answer: Callable[[], TrustReport]) -> None:
    """Send a report for each message in the pipe, until the pipe is closed."""
    requested = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), requested.set)
    try:
        while True:
            await requested.wait()
            requested.clear()
            while pipe.poll():
                pipe.recv()
                try:
                    report = answer()
                except TimeoutError:
                    report = TrustReport({}, {}, "the thread that applies deliveries does not answer")
                pipe.send(report)
    except (EOFError, OSError):
        return
    finally:
        loop.remove_reader(pipe.fileno())
