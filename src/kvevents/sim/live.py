"""A fleet on real sockets: simulated engines that publish, routers that follow them, and faults.

Engines, routers and traffic are those of `kvevents.sim.simulated_fleet`. The events of engines pass through publishers,
sockets, a subscriber and an index, as those of real engines do. Any other consumer can subscribe to the same sockets. A fleet
runs in real time, `pace` times as fast, or in steps, which gives the same results on every machine.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple, Self

from kvevents.errors import ConfigError, ExternalError
from kvevents.index import ApplyResult, PrefixIndex
from kvevents.routing import Worker
from kvevents.sim.audit import Audit
from kvevents.sim.network import Sockets, WorkerEndpoints
from kvevents.sim.requests import Request
from kvevents.sim.results import PolicyResult, StreamResult
from kvevents.sim.routers import make_routers
from kvevents.sim.settings import FleetSettings, LiveTimers
from kvevents.sim.simulated_fleet import SimulatedFleet, Timeline
from kvevents.stream import Batch, DegradedReason, Gap, RawBatch, Reset, Source
from kvevents.subscriber import StreamStatus, Subscriber
from kvevents.testing import FaultProxy

RECEIVE_SECONDS: Final = 0.02
"""Number of seconds without a delivery after which the follower checks waiting lookups and the trust in streams."""
DELIVERIES_PER_CHECK: Final = 256
"""Maximum number of deliveries that the follower applies between two such checks."""
STOP_SECONDS: Final = 10.0
"""Maximum time for the follower's thread to end."""


class AuditingFollower:
    """Applies deliveries to an index and audits them.

    `incarnation` returns the incarnation of a worker that published a batch with a given timestamp.
    """

    def __init__(self, index: PrefixIndex, incarnation: Callable[[Worker, float], int]) -> None:
        self.audit: Final = Audit(index, self.exact)
        self.trust: dict[Worker, str] = {}
        """Trust state of each stream at the last check. The dict is replaced, never changed."""
        self._incarnation_of: Final = incarnation
        self._incarnations: Final[dict[tuple[Worker, int], int]] = {}
        self._subscriber: Subscriber[RawBatch] | None = None
        self.statuses: list[StreamStatus] = []
        """Status of each stream at the last check."""
        self._failure: BaseException | None = None
        self._stop: Final = threading.Event()
        self._checked: Final = threading.Event()
        """Set after each check of the statuses."""
        self._thread: threading.Thread | None = None

    def follow(self, sources: Iterable[Source]) -> None:
        """Start to follow the engines. Call this once. Raises `ConfigError` and `EndpointError` as a subscriber does."""
        subscriber = self._subscriber = Subscriber(sources, decode=False, sink=self)
        self._update_statuses(subscriber)
        self._thread = threading.Thread(target=self._run, args=(subscriber,), name="kvevents-follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; deliveries that have not arrived are not audited. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive() and self._failure is None:
                self._failure = ExternalError(f"the fleet's subscriber did not stop within {STOP_SECONDS:g} s")

    def exact(self, worker: Worker) -> bool:
        """Return whether all batches before the last delivery were delivered. The audit calls this in the follower's thread.

        The stream need not be EXACT: replay might be filling a gap, or no live batch has verified the replay endpoint yet. The
        latter does not matter, because the fleet owns that endpoint.
        """
        subscriber = self._subscriber
        return subscriber is not None and subscriber.status(*worker).degraded_reasons <= {DegradedReason.REPLAY_UNPROVEN}

    def check(self) -> None:
        """Raise the exception that ended the follower's thread, if there was one."""
        if self._failure is not None:
            raise self._failure

    def wait_for_check(self) -> None:
        """Wait until the statuses are checked again, at most `POLL_SECONDS` seconds."""
        self._checked.clear()
        self._checked.wait(POLL_SECONDS)

    # --- methods of the follower's thread

    def _run(self, subscriber: Subscriber[RawBatch]) -> None:
        try:
            with subscriber:
                while not self._stop.is_set():
                    # `receive` is called for one delivery at a time: its audit depends on the stream's trust at this point.
                    timeout = RECEIVE_SECONDS
                    for _ in range(DELIVERIES_PER_CHECK):
                        if subscriber.receive(timeout) is None:
                            break
                        timeout = 0.0
                    self._update_statuses(subscriber)
        except BaseException as error:  # noqa: BLE001 - raised by `check` in the thread that runs the fleet
            self._failure = error

    def apply_many(self, deliveries: Sequence[Batch | RawBatch | Reset | Gap]) -> list[ApplyResult]:
        """Audit deliveries and apply them to the index. The subscriber calls this sink."""
        return [
            self.audit.apply(delivery, self._incarnation(delivery) if isinstance(delivery, RawBatch) else None)
            for delivery in deliveries
        ]

    def _incarnation(self, batch: RawBatch) -> int:
        worker = (batch.source, batch.rank)
        incarnation = self._incarnations.get((worker, batch.incarnation))
        if incarnation is None:
            incarnation = self._incarnations[worker, batch.incarnation] = self._incarnation_of(worker, batch.decode().ts)
        return incarnation

    def _update_statuses(self, subscriber: Subscriber[RawBatch]) -> None:
        self.statuses = subscriber.statuses()
        self.trust = {(status.source, status.rank): status.trust.name for status in self.statuses}
        for worker in self.trust:
            self.audit.compare_due(worker)
        self._checked.set()


CONFIRM_SECONDS: Final = 0.5
"""Time between two empty batches that an engine publishes after the traffic, if some of its batches have not arrived."""
CHECK_SECONDS: Final = 0.1
"""Seconds between two checks of the stop request and of the consumer."""
POLL_SECONDS: Final = 0.01
_STREAM_COUNTERS: Final = ("replayed", "gaps_repaired", "lost", "resets", "reconnects")


class LiveFleet:
    """A running fleet; a context manager. Raises `EndpointError` for a port in use, `ConfigError` for invalid settings.

    With a `pace`, the fleet runs in real time, `pace` times as fast. If `pace` is None, it runs in steps: simulated time does
    not depend on the machine's speed, because each choice of a router waits until the index has all batches. Equal arguments
    then give equal results. A fleet in steps cannot have faults that last for a time: `delay`, `cut` and `stall`.
    """

    def __init__(
        self,
        settings: FleetSettings,
        name: str,
        *,
        pace: float | None = 1.0,
        host: str = "127.0.0.1",
        base_port: int | None = None,
        requested: Sequence[RequestedFault] = (),
        timers: LiveTimers | None = None,
    ) -> None:
        if pace is not None and not 0 < pace < float("inf"):
            raise ConfigError(f"invalid pace {pace}: expected a number above 0; 1 is real time")
        timed = [fault.kind for fault in requested if FAULT_KINDS[fault.kind].needs_time]
        if pace is None and timed:
            raise ConfigError(f"invalid fault {timed[0]!r} for a fleet that runs in steps: give the fleet a pace")
        self.settings = settings
        self.timers = timers = timers or LiveTimers()
        self.pace = pace
        self.scale = 1.0 if pace is None else pace
        """Simulated seconds in one second of a timer or of a fault's amount."""
        self.behind = 0.0
        """Maximum number of seconds by which the fleet was late. A large value means that this machine is too slow."""
        self.injected: Counter[str] = Counter()
        """Maps each kind of recurring fault to the number of its injections."""
        self.stalled: set[Worker] = set()
        """Workers whose network currently delivers nothing because of a `stall` fault."""
        self.name: Final = name
        """Name of the policy."""
        self.requested = list(requested)
        """Requested faults."""
        self._timeline: Final = Timeline()
        self._stop: Final = threading.Event()
        proxied = any(FAULT_KINDS[fault.kind].network for fault in requested)
        with ExitStack() as closing:
            self.sockets = closing.enter_context(Sockets(settings, host=host, base_port=base_port, proxied=proxied))
            self.index: Final = PrefixIndex(clock=lambda: self._timeline.now)
            self.follower: Final = AuditingFollower(self.index, self.sockets.incarnation)
            closing.callback(self.follower.close)
            audit, timeline = self.follower.audit, self._timeline
            routers = make_routers(settings, name, audit, trust=self._trust_state, clock=lambda: timeline.now)
            wait = self.catch_up if pace is None else None
            self.fleet = SimulatedFleet(settings, routers, audit, self.sockets, timeline, clock=time.time, before_choice=wait)
            self.follower.follow(address.source for address in self.addresses)
            self._wait_for_subscriber()
            self._closing: Final = closing.pop_all()

    @property
    def addresses(self) -> list[WorkerEndpoints]:
        """Endpoints of the workers."""
        return list(self.sockets.addresses.values())

    def schedule_after(self, seconds: float, action: Callable[[], object]) -> None:
        """Run an action after `seconds` seconds of real time; of simulated time if the fleet runs in steps."""
        self._timeline.schedule_after(seconds * self.scale, action)

    def stop(self) -> None:
        """Make `run` return after the current step. Any thread or signal handler can call this."""
        self._stop.set()

    def run(self, requests: Iterable[Request], *, look: Callable[[LiveFleet], object] = lambda _: None) -> PolicyResult:
        """Send requests until all are answered or `stop` is called, and call `look` every `CHECK_SECONDS` seconds.

        This method can be called once. Raises the exception that ended the consumer, and `ConfigError` for a request that the
        dialect cannot express.
        """
        self.fleet.feed(requests)
        begin_faults(self)
        began, looked = time.monotonic(), 0.0
        while (due := self._timeline.next) is not None and not self.fleet.done and not self._stop.is_set():
            now = time.monotonic()
            if now - looked >= CHECK_SECONDS:
                looked = now
                self.follower.check()
                look(self)
            wait = 0.0 if self.pace is None else began + due / self.pace - now
            if wait > 0:
                self._stop.wait(min(wait, CHECK_SECONDS))
                if wait > CHECK_SECONDS:
                    continue
            self.behind = max(self.behind, -wait)
            self._timeline.step()
        if self.pace is not None:
            self._await_batches()
        elif not self._stop.is_set():
            self.catch_up()
        self.follower.close()
        self.follower.check()
        return self.fleet.result(self.name)

    def catch_up(self) -> None:
        """Wait until the index has all batches that the running engines have published.

        If the network dropped the newest batch of an engine, the engine publishes an empty batch, so that the subscriber
        notices the gap. Raises `ExternalError` if the batches do not arrive within the timeout `settle`.
        """
        until = time.monotonic() + self.timers.settle
        while waiting := self._unsettled_workers():
            self.follower.check()
            if time.monotonic() > until:
                names = ", ".join(f"{source}/{rank}" for source, rank in waiting)
                raise ExternalError(f"batches of {names} did not arrive within {self.timers.settle:g} s")
            for worker in waiting:
                if self.sockets.is_newest_dropped(worker):
                    self.fleet.publish_empty(worker)
            self.follower.wait_for_check()

    def streams(self) -> list[StreamResult]:
        """Return the subscriber's status and counters of every stream."""
        return [
            StreamResult(
                source=status.source,
                rank=status.rank,
                endpoint=status.endpoint,
                trust=str(status.trust),
                batches=status.counters.delivered,
                **{name: getattr(status.counters, name) for name in _STREAM_COUNTERS},
            )
            for status in self.follower.statuses
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def _trust_state(self, worker: Worker) -> str:
        return self.follower.trust.get(worker, "CONNECTING")

    def _wait_for_subscriber(self) -> None:
        """Wait until the subscriber follows all streams.

        Batches that are published before a connection is up, or before history is replayed, would arrive by replay. Batches
        that arrive by replay would distort the beginning of a run.
        """
        until = time.monotonic() + self.timers.connect
        while time.monotonic() < until:
            self.follower.check()
            if self.sockets.subscribers() > 0 and {"CONNECTING", "REPLAYING"}.isdisjoint(self.follower.trust.values()):
                return
            time.sleep(POLL_SECONDS)

    def _await_batches(self) -> None:
        """End the network's faults, and wait until all published batches have arrived, or the timeout has passed.

        The subscriber might not have noticed that a fault cut a connection. So each engine behind proxies first publishes an
        empty batch. A stream whose last batches arrived by replay is not EXACT until its engine publishes another empty batch.
        """
        for worker, proxies in self.sockets.proxies.items():
            for proxy in proxies:
                proxy.heal()
            simulated = self.fleet.workers[worker]
            if simulated.is_up and simulated.batches:
                self.fleet.publish_empty(worker)
        now = time.monotonic()
        until, confirm_at = now + self.timers.settle, now + CONFIRM_SECONDS
        while (waiting := self._unsettled_workers()) and now < until and not self._stop.is_set():
            self.follower.check()
            if now >= confirm_at:
                confirm_at = now + CONFIRM_SECONDS
                for worker in waiting:
                    self.fleet.publish_empty(worker)
            time.sleep(POLL_SECONDS)
            now = time.monotonic()

    def _unsettled_workers(self) -> list[Worker]:
        """Return the running engines with published batches that the subscriber has not received or that are not confirmed.

        A fleet in steps also waits for running engines without batches that the subscriber does not follow yet.
        """
        waiting: list[Worker] = []
        for status in self.follower.statuses:
            worker = (status.source, status.rank)
            simulated = self.fleet.workers[worker]
            if not simulated.is_up:
                continue
            if simulated.batches:
                position = (simulated.incarnation, simulated.batches)
                is_settled = status.trust.name == "EXACT" and self.follower.audit.position(worker) == position
            else:
                is_followed = self.sockets.subscribers(worker) > 0 and self.follower.trust[worker] in ("EXACT", "DEGRADED")
                is_settled = self.pace is not None or is_followed
            if not is_settled:
                waiting.append(worker)
        return waiting


# --- faults

_DURATION_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault."""

    example: str
    """Example of a fault's amount, such as `1%` or `60s`."""
    effect: str
    """Description of the fault's effect with the amount in `example`, for `--help`."""
    inject: Callable[[LiveFleet, Worker], bool] | None = None
    """Injects the fault into one engine; called each time the duration has passed. Returns False if it changed nothing."""
    lasting: Callable[[FaultProxy, float, int], None] | None = None
    """Applies a lasting fault to an engine's live events. The arguments are their proxy, the amount and a seed."""
    network: bool = True
    """Whether the fault needs proxies in front of the engines."""
    needs_time: bool = False
    """Whether the effect lasts for a span of real time. A fleet in steps has no real time."""

    @property
    def share(self) -> bool:
        """Whether the fault's amount is a share (`1%`) and not a duration (`60s`)."""
        return self.example.endswith("%")


class RequestedFault(NamedTuple):
    """A requested fault."""

    kind: str
    amount: float
    """A share from 0 to 1, or seconds of real time."""


def parse_faults(text: str) -> list[RequestedFault]:
    """Parse faults such as `restart:60s,drop:1%`. Raises `ConfigError`, which lists the known faults."""
    return [_parse_fault(part.strip()) for part in text.split(",") if part.strip()]


def _parse_fault(text: str) -> RequestedFault:
    name, _, amount = text.partition(":")
    kind = FAULT_KINDS.get(name)
    if kind is None:
        known = "; ".join(f"{known}:{kind.example} ({kind.effect})" for known, kind in FAULT_KINDS.items())
        raise ConfigError(f"unknown fault {name!r}: expected {known}")
    parsed = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(%|ms|s|m|h)", amount)
    number = float(parsed[1]) if parsed is not None and (parsed[2] == "%") == kind.share else -1.0
    if kind.share and not 0 <= number <= 100:
        raise ConfigError(f"invalid fault '{text}': expected a share from 0% to 100%, for example {name}:1%")
    if not kind.share and number <= 0:
        raise ConfigError(f"invalid fault '{text}': expected a duration above 0, for example {name}:60s")
    return RequestedFault(name, number / 100 if parsed is None or kind.share else number * _DURATION_UNITS[parsed[2]])


def begin_faults(fleet: LiveFleet) -> None:
    """Inject the fleet's faults from now on. The fleet's seed selects the engines."""
    for number, fault in enumerate(fleet.requested):
        kind = FAULT_KINDS[fault.kind]
        if kind.lasting is not None:
            for place, (live, _) in enumerate(fleet.sockets.proxies.values()):
                kind.lasting(live, fault.amount, fleet.settings.seed + place)
        elif kind.inject is not None:
            random = Random(f"{fleet.settings.seed}/{number}/{fault.kind}")  # noqa: S311 - a fault, not a secret
            _plan(fleet, fault, kind.inject, _shuffle_forever(list(fleet.fleet.workers), random))


def _plan(
    fleet: LiveFleet, fault: RequestedFault, inject: Callable[[LiveFleet, Worker], bool], workers: Iterator[Worker]
) -> None:
    def act() -> None:
        if not fleet.fleet.done:
            fleet.injected[fault.kind] += inject(fleet, next(workers))
            fleet.schedule_after(fault.amount, act)

    fleet.schedule_after(fault.amount, act)


def _shuffle_forever(workers: list[Worker], random: Random) -> Iterator[Worker]:
    while True:
        random.shuffle(workers)
        yield from workers


# --- effects


def _restart(fleet: LiveFleet, worker: Worker) -> bool:
    up = fleet.fleet.workers[worker].is_up
    if fleet.pace is None:
        fleet.catch_up()
    fleet.fleet.restart(worker, down=fleet.timers.down * fleet.scale)
    return up


def _reset(fleet: LiveFleet, worker: Worker) -> bool:
    simulated = fleet.fleet.workers[worker]
    if simulated.is_up:
        simulated.engine.reset()
    return simulated.is_up


def _cut(fleet: LiveFleet, worker: Worker) -> bool:
    for proxy in fleet.sockets.proxies[worker]:
        proxy.cut()
    return True


def _stall(fleet: LiveFleet, worker: Worker) -> bool:
    if worker in fleet.stalled:
        return False
    fleet.stalled.add(worker)
    for proxy in fleet.sockets.proxies[worker]:
        proxy.stall()

    def resume() -> None:
        fleet.stalled.discard(worker)
        for proxy in fleet.sockets.proxies[worker]:
            proxy.resume()

    fleet.schedule_after(fleet.timers.stall, resume)
    return True


FAULT_KINDS: Final = {
    "restart": FaultKind("60s", "every 60 s an engine is killed and restarts empty", inject=_restart, network=False),
    "reset": FaultKind("60s", "every 60 s an engine clears its prefix cache", inject=_reset, network=False),
    "drop": FaultKind(
        "1%", "1% of the live batches are lost in the network", lasting=lambda live, share, seed: live.drop(share, seed=seed)
    ),
    "delay": FaultKind(
        "20ms", "live batches arrive 20 ms later", lasting=lambda live, seconds, _: live.delay(seconds), needs_time=True
    ),
    "cut": FaultKind("60s", "every 60 s the connections of an engine are cut", inject=_cut, needs_time=True),
    "stall": FaultKind(
        "60s",
        f"every 60 s the network of an engine drops everything for {LiveTimers().stall:g} s",
        inject=_stall,
        needs_time=True,
    ),
}
"""Maps the name of each fault to its kind."""
