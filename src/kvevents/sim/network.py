"""The network of a live fleet: a publisher for each worker, proxies, and faults such as `restart:60s,drop:1%`."""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self

import zmq

from kvevents.errors import ConfigError, EndpointError
from kvevents.events import KVEventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.routing import Worker
from kvevents.sim.settings import FleetSettings, LiveTimers
from kvevents.sim.simulated_fleet import SimulatedFleet
from kvevents.stream import Source
from kvevents.testing import FaultProxy
from kvevents.zeromq.sockets import destroy_context

REBIND_PAUSE: Final = 0.005
BUFFER_STEPS: Final = 10_000
"""Batches in the replay buffer of each engine, as engines have by default."""
KILL_SECONDS: Final = 0.05
"""Time for a publisher to pass queued batches to ZeroMQ when its engine is killed. ZeroMQ does not send all of them."""
SHUTDOWN_SECONDS: Final = 2.0
"""Time for a publisher to send its last batches when a run ends."""
HIGHEST_PORT: Final = 65_535


class WorkerEndpoints(NamedTuple):
    """The endpoints of a worker."""

    worker: Worker
    endpoint: str
    replay_endpoint: str

    @property
    def source(self) -> Source:
        """The source for a subscriber."""
        return Source(self.endpoint, self.replay_endpoint, name=self.worker[0], rank=self.worker[1])


class Sockets:
    """Publishers of all workers; a context manager.

    With `base_port` worker number `n` publishes at port `base_port + 2n` and answers replay requests at the next port; without
    it the operating system chooses ports. With `proxied` proxies listen there, and publishers at other ports. Raises
    `EndpointError` for a port in use, and `ConfigError` if a port would exceed 65535.
    """

    def __init__(
        self,
        settings: FleetSettings,
        *,
        host: str = "127.0.0.1",
        base_port: int | None = None,
        proxied: bool = False,
        rebind_seconds: float = LiveTimers().rebind,
    ) -> None:
        last = (base_port or 0) + 2 * len(settings.workers) - 1
        if base_port is not None and last > HIGHEST_PORT:
            raise ConfigError(
                f"invalid base port {base_port}: {len(settings.workers)} workers would need port {last}; choose a lower one"
            )
        self.proxies: Final[dict[Worker, tuple[FaultProxy, FaultProxy]]] = {}
        """Proxies of each worker, for live events and for replay."""
        self.addresses: Final[dict[Worker, WorkerEndpoints]] = {}
        self._settings: Final = settings
        self._host: Final = host
        self._base_port: Final = base_port
        self._proxied: Final = proxied
        self._rebind_seconds: Final = rebind_seconds
        self._closing: Final = ExitStack()
        self._context: Final[zmq.Context[zmq.Socket[bytes]]] = zmq.Context(io_threads=2)
        self._closing.callback(destroy_context, self._context)
        self._context.max_sockets = 4 * len(settings.workers) + 64
        self._publishers: Final[dict[Worker, ZmqEventPublisher]] = {}
        self._bound: Final[dict[Worker, tuple[str, str]]] = {}
        self._born: Final[dict[Worker, list[float]]] = {}

    # --- event sink

    def open(self, worker: Worker) -> None:
        """Bind a worker's sockets; after a restart to the same endpoints as before."""
        first = worker not in self._bound
        publisher = self._publishers[worker] = self._publisher(worker)
        # The replay endpoint exists because one was requested.
        ends = self._bound[worker] = publisher.endpoint, publisher.replay_endpoint or ""
        if first and self._proxied:
            listen = self._configured_endpoints(worker)
            live, replay = (self._closing.enter_context(FaultProxy(*pair)) for pair in zip(ends, listen, strict=True))
            self.proxies[worker] = live, replay
            ends = live.endpoint, replay.endpoint
        if first:
            self.addresses[worker] = WorkerEndpoints(worker, *ends)
        self._born.setdefault(worker, []).append(time.time())

    def publish(self, worker: Worker, batch: KVEventBatch) -> None:
        """Publish a batch."""
        self._publishers[worker].publish(batch)

    def close(self, worker: Worker) -> None:
        """End an incarnation of a worker like a kill: batches that were not sent are lost."""
        self._publishers.pop(worker).shutdown(KILL_SECONDS)

    # --- information for the consumer

    def incarnation(self, worker: Worker, ts: float) -> int:
        """Return the incarnation of a worker in which a batch with this timestamp was published."""
        return bisect_right(self._born[worker], ts) - 1

    def subscribers(self) -> int:
        """Return the number of subscribers of the worker that has the fewest."""
        return min(publisher.stats().subscribers for publisher in self._publishers.values())

    # --- the end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._closing:
            for publisher in self._publishers.values():
                self._closing.callback(publisher.shutdown, SHUTDOWN_SECONDS)

    def _publisher(self, worker: Worker) -> ZmqEventPublisher:
        until = time.monotonic() + self._rebind_seconds
        while True:
            try:
                return self._open_publisher(worker)
            except EndpointError:
                if worker not in self._bound or time.monotonic() > until:
                    raise
                time.sleep(REBIND_PAUSE)

    def _open_publisher(self, worker: Worker) -> ZmqEventPublisher:
        behind = ("tcp://127.0.0.1:*",) * 2
        endpoint, replay_endpoint = self._bound.get(worker) or (behind if self._proxied else self._configured_endpoints(worker))
        return ZmqEventPublisher(
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            buffer_steps=BUFFER_STEPS,
            bind=True,
            dialect=self._settings.wire,
            context=self._context,
        )

    def _configured_endpoints(self, worker: Worker) -> tuple[str, str]:
        if self._base_port is None:
            return f"tcp://{self._host}:*", f"tcp://{self._host}:*"
        port = self._base_port + 2 * self._settings.workers.index(worker)
        return f"tcp://{self._host}:{port}", f"tcp://{self._host}:{port + 1}"


# --- faults

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class FaultTarget(Protocol):
    """The live fleet into which faults are injected."""

    settings: FleetSettings
    timers: LiveTimers
    pace: float
    fleet: SimulatedFleet
    sockets: Sockets
    requested: list[RequestedFault]
    """Requested faults."""
    injected: Counter[str]
    """Number of recurring faults that were injected, by kind."""
    stalled: set[Worker]
    """Workers whose network is stalled."""

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Call `action` after `seconds` seconds of real time."""
        ...


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault."""

    example: str
    """Example of an amount."""
    effect: str
    """Description of its effect with that amount, for `--help`."""
    share: bool
    """Whether its amount is a share (`1%`) instead of a duration (`60s`)."""
    inject: Callable[[FaultTarget, Worker], bool] | None = None
    """Injects the fault into one engine each time the duration has passed; returns False if there was nothing to do."""
    lasting: Callable[[FaultProxy, float, int], None] | None = None
    """Applies a lasting fault to the live events of an engine from the beginning: amount and seed."""
    network: bool = True
    """Whether it needs proxies before the engines."""


class RequestedFault(NamedTuple):
    """A requested fault."""

    kind: str
    amount: float
    """A share from 0 to 1, or seconds of real time."""

    @property
    def network(self) -> bool:
        """Whether it needs proxies before the engines."""
        return KINDS[self.kind].network


def parse_faults(text: str) -> list[RequestedFault]:
    """Parse faults such as `restart:60s,drop:1%`. Raises `ConfigError`, which lists the known faults."""
    return [_fault(part.strip()) for part in text.split(",") if part.strip()]


def _fault(text: str) -> RequestedFault:
    name, _, amount = text.partition(":")
    kind = KINDS.get(name)
    if kind is None:
        known = "; ".join(f"{known}:{kind.example} ({kind.effect})" for known, kind in KINDS.items())
        raise ConfigError(f"unknown fault {name!r}: expected {known}")
    parsed = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(%|ms|s|m|h)", amount)
    number = float(parsed[1]) if parsed is not None and (parsed[2] == "%") == kind.share else -1.0
    if kind.share and not 0 <= number <= 100:
        raise ConfigError(f"invalid fault '{text}': expected a share from 0% to 100%, for example {name}:1%")
    if not kind.share and number <= 0:
        raise ConfigError(f"invalid fault '{text}': expected a duration above 0, for example {name}:60s")
    return RequestedFault(name, number / 100 if parsed is None or kind.share else number * _UNITS[parsed[2]])


def begin_faults(fleet: FaultTarget) -> None:
    """Inject the fleet's faults from now on, into engines that its seed selects."""
    for number, fault in enumerate(fleet.requested):
        kind = KINDS[fault.kind]
        if kind.lasting is not None:
            for place, (live, _) in enumerate(fleet.sockets.proxies.values()):
                kind.lasting(live, fault.amount, fleet.settings.seed + place)
        else:
            random = Random(f"{fleet.settings.seed}/{number}/{fault.kind}")  # noqa: S311 - a fault, not a secret
            _plan(fleet, fault, random)


def _plan(fleet: FaultTarget, fault: RequestedFault, random: Random) -> None:
    """Inject a recurring fault into one engine after the other."""
    workers = _forever_shuffled(list(fleet.fleet.workers), random)
    inject = KINDS[fault.kind].inject
    assert inject is not None  # noqa: S101 - faults that recur have one

    def act() -> None:
        if not fleet.fleet.done:
            fleet.injected[fault.kind] += inject(fleet, next(workers))
            fleet.after(fault.amount, act)

    fleet.after(fault.amount, act)


def _forever_shuffled(workers: list[Worker], random: Random) -> Iterator[Worker]:
    while True:
        random.shuffle(workers)
        yield from workers


# --- effects


def _restart(fleet: FaultTarget, worker: Worker) -> bool:
    up = fleet.fleet.workers[worker].is_up
    fleet.fleet.restart(worker, down=fleet.timers.down * fleet.pace)
    return up


def _reset(fleet: FaultTarget, worker: Worker) -> bool:
    simulated = fleet.fleet.workers[worker]
    if simulated.is_up:
        simulated.engine.reset()
    return simulated.is_up


def _cut(fleet: FaultTarget, worker: Worker) -> bool:
    for proxy in fleet.sockets.proxies[worker]:
        proxy.cut()
    return True


def _stall(fleet: FaultTarget, worker: Worker) -> bool:
    if worker in fleet.stalled:
        return False
    fleet.stalled.add(worker)
    for proxy in fleet.sockets.proxies[worker]:
        proxy.stall()
    fleet.after(fleet.timers.stall, lambda: _resume(fleet, worker))
    return True


def _resume(fleet: FaultTarget, worker: Worker) -> None:
    fleet.stalled.discard(worker)
    for proxy in fleet.sockets.proxies[worker]:
        proxy.resume()


KINDS: Final = {
    "restart": FaultKind("60s", "every 60 s an engine is killed and restarts empty", False, inject=_restart, network=False),
    "reset": FaultKind("60s", "every 60 s an engine clears its prefix cache", False, inject=_reset, network=False),
    "drop": FaultKind(
        "1%",
        "1% of the live batches are lost in the network",
        True,
        lasting=lambda live, share, seed: live.drop(share, seed=seed),
    ),
    "delay": FaultKind("20ms", "live batches arrive 20 ms later", False, lasting=lambda live, seconds, _: live.delay(seconds)),
    "cut": FaultKind("60s", "every 60 s the connections of an engine are cut", False, inject=_cut),
    "stall": FaultKind(
        "60s", f"every 60 s the network of an engine drops everything for {LiveTimers().stall:g} s", False, inject=_stall
    ),
}
"""Kinds of faults by name."""
