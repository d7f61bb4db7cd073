"""What the study runs: a policy, a fleet, and what it is asked; each in a process of a pool."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from benchmarks.simulation.ladder import Stage, climb
from kvevents.routing import policy
from kvevents.sim.requests import Request
from kvevents.sim.results import PolicyResult
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_fleet import simulate
from kvevents.sim.workloads import SAMPLE, read_trace, rescaled, workload

TRACE: Final = Path(os.environ.get("KVEVENTS_MOONCAKE_TRACE", "conversation_trace.jsonl.gz"))
"""Mooncake's conversation trace, which is not part of this repository."""
PROCESSES: Final = 2


def trace_path() -> Path:
    """The conversation trace where it is there, else the packaged sample, which is a tenth of it."""
    return TRACE if TRACE.exists() else SAMPLE


@lru_cache(1)
def trace(path: Path, limit: int | None) -> tuple[Request, ...]:
    """Its first `limit` requests, or all."""
    return tuple(read_trace(path, limit=limit))


@dataclass(frozen=True)
class Traced:
    """A trace, so many times as fast as it was recorded; whatever the seed."""

    speed: float = 1.0
    limit: int | None = None
    path: Path = field(default_factory=trace_path, repr=False)

    def requests(self, _: int) -> Iterator[Request]:
        return rescaled(trace(self.path, self.limit), self.speed)


@dataclass(frozen=True)
class Generated:
    """The first requests of a generator."""

    name: str
    rate: float
    count: int

    def requests(self, seed: int) -> Iterator[Request]:
        return workload(self.name, rate=self.rate, requests=self.count, seed=seed)


class _Asked(Protocol):
    def requests(self, seed: int) -> Iterator[Request]: ...


_Result_co = TypeVar("_Result_co", covariant=True)


class Runnable(Protocol[_Result_co]):
    """Can be a key, and be run in another process."""

    def __hash__(self) -> int: ...

    def run(self) -> _Result_co: ...


@dataclass(frozen=True)
class Case:
    """One run of a fleet under one policy."""

    policy: str
    asked: _Asked
    fleet: FleetSettings
    settings: tuple[tuple[str, Any], ...] = ()
    """Of the policy, where they are not its defaults."""

    def run(self) -> PolicyResult:
        chosen = policy(self.policy, self.fleet.seed, **dict(self.settings))
        return simulate(self.fleet, self.policy, self.asked.requests(self.fleet.seed), chosen=chosen)

    def __str__(self) -> str:
        words = [f"{name} {value}" for name, value in self.settings]
        size = f"{self.fleet.size.blocks:,} + {self.fleet.host_blocks:,} blocks of {self.fleet.block_size}"
        return ", ".join([self.policy, *words, str(self.asked), self.fleet.preset, size])

    def under(self, name: str, **settings: Any) -> Case:
        """The same under another policy."""
        return replace(self, policy=name, settings=tuple(settings.items()))

    def seeded(self, seed: int) -> Case:
        """The same with another seed, of the policy, the engines and generated requests."""
        return replace(self, fleet=msgspec.structs.replace(self.fleet, seed=seed))


@dataclass(frozen=True)
class Climb:
    """llm-d's ladder of rates under one of `ladder.ROUTERS`."""

    router: str
    fleet: FleetSettings
    stages: tuple[tuple[float, int], ...] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.router}, llm-d's stages"

    def run(self) -> list[Stage]:
        return climb(self.router, self.fleet, self.stages)


_Key = TypeVar("_Key", bound=Runnable[Any])


def run_all(cases: Iterable[_Key], print_line: Callable[[str], object]) -> dict[_Key, Any]:
    """What each came to; equal ones are run once."""
    different = list(dict.fromkeys(cases))
    with ProcessPoolExecutor(PROCESSES) as pool:
        running = {case: pool.submit(_timed, case) for case in different}
        found = {}
        for number, (case, future) in enumerate(running.items(), 1):
            found[case], seconds = future.result()
            print_line(f"{number} of {len(different)}, {seconds:.0f} s: {case}")
    return found


def _timed(case: Runnable[Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return case.run(), time.monotonic() - began


def to_stderr(line: str) -> None:
    """For `print_line`."""
    print(line, file=sys.stderr, flush=True)
