"""One round, drawn from a seed: the servers, the engines, which faults, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

from kvevents.wire import dialects
from tests.system.chaos.cache import Habits
from tests.system.chaos.engine import Clock, Engine, Make

BRIDGES: Final = 2
REPLICAS: Final = 3
SHARED_PARTITIONS: Final = 8
"""Of rounds in which each replica holds a share."""
SECONDS: Final = 3.0
"""That faults last for; their effects must be repaired after that."""
RATES: Final = (150.0, 300.0, 600.0)
"""Batches per second of an engine."""
LEAST_RATE: Final = 30.0
TAIL: Final = 20
"""Batches of each engine that come when every fault is over."""
LEAST_PARTITION_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that may be done to a round."""

    target: str
    """What one of it is done to: `bridge`, `replica`, `engine`, `server`, `servers` (all of them), `partition`, `leg`."""
    seconds: tuple[float, float] | None = (0.1, 1.5)
    """How long it lasts, about; None for what is over at once."""
    weight: int = 4


FAULTS: Final[dict[str, Fault]] = {
    "kill bridge": Fault("bridge", weight=6),
    "stop bridge": Fault("bridge"),
    "bridge misses a life": Fault("bridge", weight=3),
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
    """Something that a round has from the beginning."""

    share: float


TRAITS: Final[dict[str, Trait]] = {
    "cluster": Trait(0.2),
    "small max_payload": Trait(0.15),
    "small max_pending": Trait(0.15),
    "small partitions": Trait(0.1),
    "bridge in reserve": Trait(0.3),
    "clock jumps": Trait(0.2),
    "heartbeats": Trait(0.4),
    "compaction": Trait(0.5),
    "no snapshots": Trait(0.3),
    "short replay": Trait(0.15),
    "shares": Trait(0.3),
    "replica with a clock ahead": Trait(0.2),
}


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault at its time: seconds from the begin of the round."""

    at: float
    until: float | None
    name: str
    target: int

    def __str__(self) -> str:
        return f"{self.at:5.2f} s: {self.name} {self.target}" + (f" until {self.until:.2f} s" if self.until is not None else "")


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens in a round. Nothing else is drawn while it is played."""

    seed: str
    number: int
    traits: tuple[str, ...]
    partitions: int
    holders: int | None
    """Replicas that hold each partition; None where each holds all."""
    engines: tuple[Engine, ...]
    rates: tuple[float, ...]
    strikes: tuple[Strike, ...]

    @property
    def name(self) -> str:
        return f"--seed {self.seed} --round {self.number}"

    @property
    def faults(self) -> tuple[str, ...]:
        """All that it has, each once."""
        return tuple(dict.fromkeys([*self.traits, *(strike.name for strike in self.strikes)]))

    def batches(self, engine: int) -> int:
        """That each life of an engine can publish."""
        return int(self.rates[engine] * SECONDS) + 2 * TAIL

    def schedule(self) -> str:
        """For people, when something went wrong."""
        found = [f"{self.name}: {', '.join(self.traits) or 'no traits'}; {self.partitions} partitions"]
        for engine, rate in zip(self.engines, self.rates, strict=True):
            found.append(f"  {engine.make} {'-'.join(engine.dialect)} at {rate:g}/s {dict(engine.options)} {engine.habits}")
        return "\n".join([*found, *(f"  {strike}" for strike in self.strikes)])


def known() -> list[str]:
    """The names of all that a round can have."""
    return [*TRAITS, *FAULTS]


def draw_plan(seed: str, number: int, only: Sequence[str] = (), without: Sequence[str] = ()) -> Plan:
    """Round `number`, with all of `only` and none of `without`."""
    draw = Random(f"{seed}/{number}")
    wanted = [name for name, trait in TRAITS.items() if draw.random() < trait.share]
    traits = [name for name in TRAITS if name in only or (name in wanted and name not in without)]
    if {"small partitions", "no snapshots"} <= set(traits):
        traits.remove("no snapshots")  # a full partition would stay full: only what a snapshot holds is purged
    count = draw.randint(2, 4)
    engines = [_engine(draw, traits) for _ in range(count)]
    rates = [draw.choice(RATES) for _ in range(count)]
    if "small max_payload" in traits:
        # One whose batches are larger than a page.
        engines[0], rates[0] = replace(engines[0], habits=replace(engines[0].habits, events=200, blocks=4_000)), LEAST_RATE
    partitions = SHARED_PARTITIONS if "shares" in traits else draw.choice((1, 2, 3))
    holders = draw.choice((1, 2)) if "shares" in traits else None
    counts = {"bridge": BRIDGES, "replica": REPLICAS, "engine": count, "partition": partitions, "leg": BRIDGES * count}
    counts["server"] = 3 if "cluster" in traits else 1
    counts["servers"] = 1
    if {"no snapshots", "shares"} & set(traits):
        # No replica could recover pages that are gone and that it has not read: shares are read some time after a round begins.
        without = [*without, "purge partition"]
    strikes = _strikes(draw, counts, only, without)
    return Plan(seed, number, tuple(traits), partitions, holders, tuple(engines), tuple(rates), tuple(strikes))


def _engine(draw: Random, traits: Sequence[str]) -> Engine:
    make: Make = draw.choice(("ours", "ours", "tape"))
    row = draw.choice(dialects())
    habits = Habits(
        blocks=draw.choice((50, 400)),
        block_size=draw.choice((1, 4, 16)),
        ragged=draw.random() < 0.3,
        clears=draw.choice((0.0, 0.002)),
        events=draw.choice((1, 2, 4)),
    )
    options: dict[str, Any] = {}
    if make == "ours":
        # An engine that forgets is known in full by its history alone.
        options = {
            "compact": bool({"compaction", "short replay"} & set(traits)),
            "heartbeat": 0.2 if "heartbeats" in traits else None,
        }
        options |= {"buffer_steps": 200} if "short replay" in traits else {}
    clock = Clock(jumps=0.02 if "clock jumps" in traits else 0.0)
    return Engine(make, (row.engine, row.since), "", "", habits, clock=clock, options=tuple(options.items()))


def _strikes(draw: Random, counts: dict[str, int], only: Sequence[str], without: Sequence[str]) -> list[Strike]:
    names = [name for name in FAULTS if name not in without]
    weights = [FAULTS[name].weight for name in names]
    chosen = [name for name in only if name in FAULTS]
    chosen += draw.choices(names, weights, k=draw.choice((1, 2, 3, 4, 5, 6))) if names else []
    return sorted((_strike(draw, name, counts[FAULTS[name].target]) for name in chosen), key=lambda strike: strike.at)


def _strike(draw: Random, name: str, targets: int) -> Strike:
    lasts = FAULTS[name].seconds
    at = draw.uniform(0.1, SECONDS)
    return Strike(at, None if lasts is None else at + draw.uniform(*lasts), name, draw.randrange(targets))
