"""The plan of one round, drawn from a seed: the servers, the engines, the faults and their times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from random import Random
from typing import Any, Final

from kvevents.wire import dialects
from tests.system.chaos_kit import plan
from tests.system.chaos_kit.cache import CacheSettings
from tests.system.chaos_kit.engine import Clock, Engine, Make
from tests.system.chaos_kit.plan import Command
from tests.system.plane_chaos import faults
from tests.system.plane_chaos.faults import FAULTS

Finder = Callable[[Any, int], Iterable[Any]]

BRIDGES: Final = 2
REPLICAS: Final = 3
SECONDS: Final = 3.0
"""Seconds of a round in which faults begin."""
RATES: Final = (150.0, 300.0, 600.0)
"""Batches per second of an engine."""
LEAST_RATE: Final = 30.0
TAIL: Final = 20
"""Batches that each engine publishes when all faults are over."""
LEAST_PARTITION_BYTES: Final = 1 << 20


TRAITS: Final = {
    "cluster": 0.2,
    "small max_payload": 0.15,
    "small max_pending": 0.15,
    "small partitions": 0.1,
    "clock jumps": 0.2,
    "heartbeats": 0.4,
    "compaction": 0.5,
    "no snapshots": 0.3,
    "short replay": 0.15,
    "replica with a clock ahead": 0.2,
}
"""Properties that a round has from its begin, and the share of rounds that have them."""


@dataclass(frozen=True, slots=True)
class Plan(plan.Plan):
    """Everything that happens in a round."""

    traits: tuple[str, ...]
    partitions: int
    engines: tuple[Engine, ...]
    rates: tuple[float, ...]

    def batches(self, engine: int) -> int:
        """Return the batches that each incarnation of an engine can publish."""
        return int(self.rates[engine] * SECONDS) + 2 * TAIL

    def describe(self) -> list[str]:
        return [
            f"{self.partitions} partitions",
            *(
                f"{engine.make} {'-'.join(engine.dialect)} at {rate:g}/s {dict(engine.options)} {engine.cache_settings}"
                for engine, rate in zip(self.engines, self.rates, strict=True)
            ),
        ]


def known_names() -> list[str]:
    """Return the names of all traits and faults."""
    return [*TRAITS, *FAULTS]


def draw_plan(seed: str, number: int, only: Sequence[str] = (), without: Sequence[str] = ()) -> Plan:
    """Return round `number`, with all of `only` and none of `without`."""
    draw = Random(f"{seed}/{number}")
    wanted = [name for name, share in TRAITS.items() if draw.random() < share]
    traits = [name for name in TRAITS if name in only or (name in wanted and name not in without)]
    if {"small partitions", "no snapshots"} <= set(traits):
        traits.remove("no snapshots")  # without snapshots, nothing is purged, and a full partition would stay full
    count = draw.randint(2, 4)
    engines = [_draw_engine(draw, traits) for _ in range(count)]
    rates = [draw.choice(RATES) for _ in range(count)]
    if "small max_payload" in traits:
        # The batches of this engine are larger than a page.
        engines[0], rates[0] = (
            replace(engines[0], cache_settings=replace(engines[0].cache_settings, events=200, blocks=4_000)),
            LEAST_RATE,
        )
    partitions = draw.choice((1, 2, 3))
    counts: dict[Finder, int] = {
        faults.find_stage: 1,
        faults.find_bridge: BRIDGES,
        faults.find_bridge_number: BRIDGES,
        faults.find_replica: REPLICAS,
        faults.find_server: 3 if "cluster" in traits else 1,
        faults.find_engine: count,
        faults.find_partition: partitions,
        faults.find_proxies: BRIDGES * count,
        faults.find_leg: BRIDGES * count,
    }
    if "no snapshots" in traits:
        # Replicas could not recover purged pages that they have not read.
        without = [*without, "purge partition"]
    struck, script = _draw_script(draw, counts, only, without)
    names = tuple(dict.fromkeys([*traits, *struck]))
    return Plan(seed, number, names, script, tuple(traits), partitions, tuple(engines), tuple(rates))


def _draw_engine(draw: Random, traits: Sequence[str]) -> Engine:
    make: Make = draw.choice(("ours", "ours", "tape"))
    row = draw.choice(dialects())
    cache_settings = CacheSettings(
        blocks=draw.choice((50, 400)),
        block_size=draw.choice((1, 4, 16)),
        removes_parents=draw.random() < 0.3,
        clear_share=draw.choice((0.0, 0.002)),
        events=draw.choice((1, 2, 4)),
    )
    options: dict[str, Any] = {}
    if make == "ours":
        # With a short replay buffer, only compaction keeps the whole state of an engine replayable.
        options = {
            "compact": bool({"compaction", "short replay"} & set(traits)),
            "heartbeat": 0.2 if "heartbeats" in traits else None,
        }
        options |= {"buffer_steps": 200} if "short replay" in traits else {}
    clock = Clock(jumps=0.02 if "clock jumps" in traits else 0.0)
    return Engine(make, (row.engine, row.since), "", "", cache_settings, clock=clock, options=tuple(options.items()))


def _draw_script(
    draw: Random, counts: Mapping[Finder, int], only: Sequence[str], without: Sequence[str]
) -> tuple[list[str], tuple[Command, ...]]:
    """Return the names of the faults by their times, and the script."""
    names = [name for name in FAULTS if name not in without]
    weights = [FAULTS[name].weight for name in names]
    chosen = [name for name in only if name in FAULTS]
    chosen += draw.choices(names, weights, k=draw.choice((1, 2, 3, 4, 5, 6))) if names else []
    timed: list[tuple[float, Command]] = []
    for name in chosen:
        fault, at = FAULTS[name], draw.uniform(0.1, SECONDS)
        until = at + draw.uniform(*fault.seconds) if fault.heal is not None else None
        place = draw.randrange(counts[fault.find])
        timed.append((at, ("strike", name, place)))
        if until is not None:
            timed.append((until, ("heal", name, place)))
    timed.sort(key=itemgetter(0))
    script = [each for at, command in timed for each in (("wait", round(at, 3)), command)]
    struck = [command[1] for _, command in timed if command[0] == "strike"]
    return struck, (*script, ("wait", SECONDS), ("tail",))
