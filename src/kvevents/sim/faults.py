"""Faults of a live fleet, such as `restart:60s,drop:1%`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple, Protocol

from kvevents.errors import ConfigError
from kvevents.routing import Worker
from kvevents.sim.fleet import Fleet
from kvevents.sim.settings import FleetSettings, LiveTimers
from kvevents.sim.sockets import Sockets
from kvevents.testing import FaultProxy

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Target(Protocol):
    """The live fleet into which faults are injected."""

    settings: FleetSettings
    timers: LiveTimers
    pace: float
    fleet: Fleet
    sockets: Sockets
    requested: list[Fault]
    """Requested faults."""
    injected: Counter[str]
    """Number of recurring faults that were injected, by kind."""
    stalled: set[Worker]
    """Workers whose network is stalled."""

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Call `action` after `seconds` seconds of real time."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault."""

    example: str
    """Example of an amount."""
    effect: str
    """Description of its effect with that amount, for `--help`."""
    share: bool
    """Whether its amount is a share (`1%`) instead of a duration (`60s`)."""
    inject: Callable[[Target, Worker], bool] | None = None
    """Injects the fault into one engine each time the duration has passed; returns False if there was nothing to do."""
    lasting: Callable[[FaultProxy, float, int], None] | None = None
    """Applies a lasting fault to the live events of an engine from the beginning: amount and seed."""
    network: bool = True
    """Whether it needs proxies before the engines."""


class Fault(NamedTuple):
    """A requested fault."""

    kind: str
    amount: float
    """A share from 0 to 1, or seconds of real time."""

    @property
    def network(self) -> bool:
        """Whether it needs proxies before the engines."""
        return KINDS[self.kind].network


def parse_faults(text: str) -> list[Fault]:
    """Parse faults such as `restart:60s,drop:1%`. Raises `ConfigError`, which lists the known faults."""
    return [_fault(part.strip()) for part in text.split(",") if part.strip()]


def _fault(text: str) -> Fault:
    name, _, amount = text.partition(":")
    kind = KINDS.get(name)
    if kind is None:
        known = "; ".join(f"{known}:{kind.example} ({kind.effect})" for known, kind in KINDS.items())
        raise ConfigError(f"unknown fault {name!r}: expected {known}")
    return Fault(name, _share(name, amount) if kind.share else _seconds(name, amount))


def _share(name: str, text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text)
    if found is None or float(found[1]) > 100:
        raise ConfigError(f"invalid fault '{name}:{text}': expected a share from 0% to 100%, for example {name}:1%")
    return float(found[1]) / 100


def _seconds(name: str, text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", text)
    if found is None or float(found[1]) <= 0:
        raise ConfigError(f"invalid fault '{name}:{text}': expected a duration above 0, for example {name}:60s")
    return float(found[1]) * _UNITS[found[2]]


def begin(fleet: Target) -> None:
    """Inject the fleet's faults from now on, into engines that its seed selects."""
    for number, fault in enumerate(fleet.requested):
        kind = KINDS[fault.kind]
        if kind.lasting is not None:
            for place, (live, _) in enumerate(fleet.sockets.proxies.values()):
                kind.lasting(live, fault.amount, fleet.settings.seed + place)
        else:
            random = Random(f"{fleet.settings.seed}/{number}/{fault.kind}")  # noqa: S311 - a fault, not a secret
            _Recurring(fleet, fault, random).plan()


class _Recurring:
    """A fault that is injected into one engine after the other."""

    def __init__(self, fleet: Target, fault: Fault, random: Random) -> None:
        self._fleet = fleet
        self._fault = fault
        self._workers = _forever_shuffled(list(fleet.fleet.workers), random)

    def plan(self) -> None:
        self._fleet.after(self._fault.amount, self._inject)

    def _inject(self) -> None:
        if self._fleet.fleet.done:
            return
        inject = KINDS[self._fault.kind].inject
        assert inject is not None  # noqa: S101 - faults that recur have one
        self._fleet.injected[self._fault.kind] += inject(self._fleet, next(self._workers))
        self.plan()


def _forever_shuffled(workers: list[Worker], random: Random) -> Iterator[Worker]:
    while True:
        random.shuffle(workers)
        yield from workers


# --- effects


def _restart(fleet: Target, worker: Worker) -> bool:
    up = fleet.fleet.workers[worker].is_up
    fleet.fleet.restart(worker, down=fleet.timers.down * fleet.pace)
    return up


def _reset(fleet: Target, worker: Worker) -> bool:
    simulated = fleet.fleet.workers[worker]
    if simulated.is_up:
        simulated.engine.reset()
    return simulated.is_up


def _cut(fleet: Target, worker: Worker) -> bool:
    for proxy in fleet.sockets.proxies[worker]:
        proxy.cut()
    return True


def _stall(fleet: Target, worker: Worker) -> bool:
    if worker in fleet.stalled:
        return False
    fleet.stalled.add(worker)
    for proxy in fleet.sockets.proxies[worker]:
        proxy.stall()
    fleet.after(fleet.timers.stall, lambda: _resume(fleet, worker))
    return True


def _resume(fleet: Target, worker: Worker) -> None:
    fleet.stalled.discard(worker)
    for proxy in fleet.sockets.proxies[worker]:
        proxy.resume()


def _drop(live: FaultProxy, share: float, seed: int) -> None:
    live.drop(share, seed=seed)


def _delay(live: FaultProxy, seconds: float, _seed: int) -> None:
    live.delay(seconds)


KINDS: Final = {
    "restart": Kind("60s", "every 60 s an engine is killed and restarts empty", False, inject=_restart, network=False),
    "reset": Kind("60s", "every 60 s an engine clears its prefix cache", False, inject=_reset, network=False),
    "drop": Kind("1%", "1% of the live batches are lost in the network", True, lasting=_drop),
    "delay": Kind("20ms", "live batches arrive 20 ms later", False, lasting=_delay),
    "cut": Kind("60s", "every 60 s the connections of an engine are cut", False, inject=_cut),
    "stall": Kind(
        "60s", f"every 60 s the network of an engine drops everything for {LiveTimers().stall:g} s", False, inject=_stall
    ),
}
"""Kinds of faults by name."""
