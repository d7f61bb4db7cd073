"""The plan of one round, drawn from a seed: the servers, the engines, the faults and their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

from kvevents.wire import dialects
from tests.system.chaos.cache import CacheSettings
from tests.system.chaos.engine import Clock, Engine, Make

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


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that a round may have."""

    target: str
    """The affected part: `bridge`, `replica`, `engine`, `server`, `servers` (all of them), `partition`, `leg`."""
    seconds: tuple[float, float] | None = (0.1, 1.5)
    """Shortest and longest duration; None for a fault without one."""
    weight: int = 4


FAULTS: Final[dict[str, Fault]] = {
    "kill bridge": Fault("bridge", weight=6),
    "stop bridge": Fault("bridge"),
    "bridge misses an incarnation": Fault("bridge", weight=3),
    "kill replica": Fault("replica", weight=6),
    "stop replica": Fault("replica"),
    "kill server": Fault("server", weight=6),
    "stop server": Fault("server"),
    "servers lose pages": Fault("servers", weight=3),
    "kill engine": Fault("engine", None),
    "end engine": Fault("engine", None),
    "stop engine": Fault("engine"),
    "delete partition": Fault("partition", None, 2),
    "purge partition": Fault("partition", None, 1),
    "stranger's message": Fault("partition", None, 1),
    "cut engine off": Fault("leg"),
    "half-open engine": Fault("leg", weight=2),
    "drop live batches": Fault("leg"),
}


@dataclass(frozen=True, slots=True)
class Trait:
    """A property that a round has from its begin."""

    share: float


TRAITS: Final[dict[str, Trait]] = {
    "cluster": Trait(0.2),
    "small max_payload": Trait(0.15),
    "small max_pending": Trait(0.15),
    "small partitions": Trait(0.1),
    "clock jumps": Trait(0.2),
    "heartbeats": Trait(0.4),
    "compaction": Trait(0.5),
    "no snapshots": Trait(0.3),
    "short replay": Trait(0.15),
    "replica with a clock ahead": Trait(0.2),
}


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault of a plan. Times are seconds from the begin of the round."""

    at: float
    until: float | None
    name: str
    target: int

    def __str__(self) -> str:
        return f"{self.at:5.2f} s: {self.name} {self.target}" + (f" until {self.until:.2f} s" if self.until is not None else "")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that happens in a round. Nothing else is drawn while it is played."""

    seed: str
    number: int
    traits: tuple[str, ...]
    partitions: int
    engines: tuple[Engine, ...]
    rates: tuple[float, ...]
    strikes: tuple[Strike, ...]

    @property
    def name(self) -> str:
        return f"--seed {self.seed} --round {self.number}"

    @property
    def faults(self) -> tuple[str, ...]:
        """Return the names of traits and faults, each once."""
        return tuple(dict.fromkeys([*self.traits, *(strike.name for strike in self.strikes)]))

    def batches(self, engine: int) -> int:
        """Return the batches that each incarnation of an engine can publish."""
        return int(self.rates[engine] * SECONDS) + 2 * TAIL

    def schedule(self) -> str:
        """Return the plan as text."""
        found = [f"{self.name}: {', '.join(self.traits) or 'no traits'}; {self.partitions} partitions"]
        for engine, rate in zip(self.engines, self.rates, strict=True):
            found.append(
                f"  {engine.make} {'-'.join(engine.dialect)} at {rate:g}/s {dict(engine.options)} {engine.cache_settings}"
            )
        return "\n".join([*found, *(f"  {strike}" for strike in self.strikes)])


def known_names() -> list[str]:
    """Return the names of all traits and faults."""
    return [*TRAITS, *FAULTS]


def draw_plan(seed: str, number: int, only: Sequence[str] = (), without: Sequence[str] = ()) -> Plan:
    """Return round `number`, with all of `only` and none of `without`."""
    draw = Random(f"{seed}/{number}")
    wanted = [name for name, trait in TRAITS.items() if draw.random() < trait.share]
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
    counts = {"bridge": BRIDGES, "replica": REPLICAS, "engine": count, "partition": partitions, "leg": BRIDGES * count}
    counts["server"] = 3 if "cluster" in traits else 1
    counts["servers"] = 1
    if "no snapshots" in traits:
        # Replicas could not recover purged pages that they have not read.
        without = [*without, "purge partition"]
    strikes = _draw_strikes(draw, counts, only, without)
    return Plan(seed, number, tuple(traits), partitions, tuple(engines), tuple(rates), tuple(strikes))


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


def _draw_strikes(draw: Random, counts: dict[str, int], only: Sequence[str], without: Sequence[str]) -> list[Strike]:
    names = [name for name in FAULTS if name not in without]
    weights = [FAULTS[name].weight for name in names]
    chosen = [name for name in only if name in FAULTS]
    chosen += draw.choices(names, weights, k=draw.choice((1, 2, 3, 4, 5, 6))) if names else []
    return sorted((_draw_strike(draw, name, counts[FAULTS[name].target]) for name in chosen), key=lambda strike: strike.at)


def _draw_strike(draw: Random, name: str, targets: int) -> Strike:
    duration = FAULTS[name].seconds
    at = draw.uniform(0.1, SECONDS)
    return Strike(at, None if duration is None else at + draw.uniform(*duration), name, draw.randrange(targets))
