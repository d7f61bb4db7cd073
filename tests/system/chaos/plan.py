"""The plan of one round, drawn from a seed: the engine, the consumers, the faults and their times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Literal

from kvevents.testing import Faults
from kvevents.testing.playlist import ReplyShape
from kvevents.wire import Dialect, dialect_for, dialects
from tests.system.chaos.consumer import Consumer
from tests.system.chaos.faults import ENDS, FAULTS
from tests.system.chaos.relaying import Hop
from tests.system.chaos.traits import TRAITS, VARIANTS, Setting
from tests.system.chaos_kit import plan
from tests.system.chaos_kit.cache import CacheSettings
from tests.system.chaos_kit.engine import Engine, Make
from tests.system.chaos_kit.plan import Command

Transport = Literal["tcp", "ipc"]
MAKES: Final[dict[Make, int]] = {"ours": 45, "tape": 33, "vllm": 11, "sglang": 11}
RATES: Final = (4_000.0, 8_000.0, 20_000.0)
"""Batches per second that an engine tries to publish."""
DRAWS: Final = 2_000
"""Plans that are drawn at most until one has the requested faults."""
LOST_TAIL: Final = "lost tail"
TAIL: Final = (1, 40)
"""Last batches of a round: published when all faults are over, or lost."""


@dataclass(frozen=True, slots=True)
class Plan(plan.Plan):
    """Everything that happens in a round."""

    setting: Setting
    consumers: tuple[Consumer, ...]
    """All consumers of the round, including consumers that join later by a command."""
    incarnations: tuple[int, ...]
    """Batches that each incarnation can publish."""

    def describe(self) -> list[str]:
        setting, engine = self.setting, self.setting.engine
        return [
            f"{engine.make} {'-'.join(engine.dialect)} over {setting.transport}, relays: {setting.relays}",
            f"options {dict(engine.options)}, {engine.cache_settings}, {engine.defects}",
            *([str(engine.faults)] if engine.make == "tape" else []),
            *map(str, setting.hops),
            *(
                f"consumer {each.name}: decode={each.decode} async={each.asynchronous} "
                f"leaps={each.clock_leaps} saves={each.saves_state} sink failures={each.sink_failures:g}"
                for each in self.consumers
            ),
        ]


def draw_plan(
    seed: str,
    number: int,
    batches: int,
    makes: Collection[Make],
    only: Collection[str] = (),
    without: Collection[str] = (),
    *,
    can_mount: bool = False,
) -> Plan:
    """Return round `number` with about `batches` batches of an engine of one of the makes, all of `only` and none of `without`.

    Raises `LookupError` if no plan fits.
    """
    for attempt in range(DRAWS if only or without else 1):
        random = Random(f"{seed}/{number}" + (f"/{attempt}" if attempt else ""))
        drawn = _PlanBuilder(seed, number, batches, makes, set(only), set(without), can_mount, random).plan()
        if set(only) <= set(drawn.faults) and not set(without) & set(drawn.faults):
            return drawn
    raise LookupError(
        f"no round has {', '.join(only)} without {', '.join(without) or 'anything'}; there are {', '.join(known_names())}"
    )


def known_names() -> list[str]:
    """Return the names of all features, faults and traits that a round can have."""
    return [*VARIANTS, *ENDS, *FAULTS, LOST_TAIL, *TRAITS]


@dataclass(frozen=True, slots=True)
class _PlanBuilder:
    seed: str
    number: int
    batches: int
    makes: Collection[Make]
    only: set[str]
    without: set[str]
    can_mount: bool
    random: Random

    def plan(self) -> Plan:
        setting, traits = self.traits(self.setting())
        incarnations, ends = self.incarnations()
        faults = self.faults(setting, traits)
        consumers = self.consumers(setting, faults)
        script = self.script(setting, incarnations, ends, faults, consumers, traits)
        variants = [name for name, has_feature in VARIANTS.items() if has_feature(setting)]
        tail = [LOST_TAIL] if any(command[0] == "tail" and command[2] for command in script) else []
        names = tuple(dict.fromkeys([*variants, *traits, *ends, *faults, *tail]))
        return Plan(self.seed, self.number, names, tuple(script), setting, consumers, tuple(incarnations))

    def is_chosen(self, share: float, name: str = "") -> bool:
        """Draw whether the round has something. A requested `name` is always chosen, an excluded one never."""
        drawn = self.random.random() < share
        return name in self.only or (drawn and name not in self.without)

    # --- settings

    def setting(self) -> Setting:
        random = self.random
        makes: list[Make] = [make for make in MAKES if make in self.makes]
        make = random.choices(makes, [MAKES[each] for each in makes])[0]
        row = _RELEASED.get(make) or random.choice(dialects())
        cache_settings = CacheSettings(
            blocks=random.choice((50, 400, 2_000)),
            block_size=random.choice((1, 4, 16)),
            removes_parents=self.is_chosen(0.3),
            clear_share=random.choice((0.0, 0.0002, 0.002)),
            events=random.choice((1, 2, 4)),
        )
        options: dict[str, Any] = {}
        if make == "ours":
            options = {"compact": self.is_chosen(0.6), "heartbeat": random.choice((None, 0.1, 0.5))}
        shape: ReplyShape = "topic" if row.has_replay_topic else "bare-end" if self.is_chosen(0.1) else "no-topic"
        faults = Faults(seed=random.randrange(1 << 30), reply_shape=shape)
        engine = Engine(make, (row.engine, row.since), "", "", cache_settings, faults=faults, options=tuple(options.items()))
        transport: Transport = "ipc" if self.is_chosen(0.15) else "tcp"
        has_short_timeouts = not self.is_chosen(0.01)
        hops = tuple(self.hop(row, has_short_timeouts) for _ in range(self.relays()))
        return Setting(engine, transport, hops, has_short_timeouts=has_short_timeouts, can_mount=self.can_mount)

    def relays(self) -> int:
        drawn = self.random.choices((0, 1, 2), (6, 3, 1))[0]
        counts = {"one relay": 1, "two relays": 2}
        requested = [count for name, count in counts.items() if name in self.only]
        return requested[0] if requested else 0 if drawn in [counts[name] for name in self.without & counts.keys()] else drawn

    def hop(self, row: Dialect, has_short_timeouts: bool) -> Hop:
        random = self.random
        own_dialect = f"{row.engine}-{row.since}"
        return Hop(
            journal=self.is_chosen(0.8),
            heartbeat=random.choice((0.1, 0.5)),
            dialect=random.choice((None, None, own_dialect, f"{row.engine}-latest")),
            tokens="hash" if row.event_form == "map" and self.is_chosen(0.2) else "keep",
            buffer_steps=random.choice((50, 1_000, 10_000)),
            has_short_timeouts=has_short_timeouts,
        )

    def traits(self, setting: Setting) -> tuple[Setting, list[str]]:
        """Draw the traits. Return the changed settings and their names."""
        names = []
        for name, trait in TRAITS.items():
            if trait.fits(setting) and self.is_chosen(trait.share, name):
                setting = trait.change(setting, self.random)
                names.append(name)
        return setting, names

    def incarnations(self) -> tuple[list[int], list[str]]:
        """Draw the batches of each incarnation, and how all but the last one end."""
        count = self.random.choices((1, 2, 3), (5, 4, 1))[0]
        requested = [name for name in ENDS if name in self.only]
        known_names = [name for name in ENDS if name not in self.without]
        ends = [*requested, *(self.random.choice(known_names) for _ in range(count - 1 if known_names else 0))][
            : max(count - 1, len(requested))
        ]
        count = len(ends) + 1
        weights = [self.random.uniform(0.5, 1.0) for _ in range(count)]
        for place, ending in enumerate(ends):
            if ENDS[ending].passes_number:
                weights[place + 1] = weights[place] * self.random.uniform(1.2, 2.0)
        total = sum(weights)
        return [max(TAIL[1] * 3, int(self.batches * weight / total)) for weight in weights], ends

    def faults(self, setting: Setting, traits: Sequence[str]) -> list[str]:
        """Draw the names of the faults."""
        known_names = [name for name, fault in FAULTS.items() if fault.fits(setting)]
        count = min(self.random.choices((0, 1, 2, 3, 4), (1, 4, 5, 3, 2))[0], len(known_names))
        chosen = [name for name in self.random.sample(known_names, count) if name not in self.without]
        needed = [need for name in traits for need in TRAITS[name].needs if need in known_names]
        requested = [name for name in known_names if name in self.only]
        return list(dict.fromkeys([*needed, *requested, *chosen]))

    def consumers(self, setting: Setting, faults: Sequence[str]) -> tuple[Consumer, ...]:
        names = ["steady"]
        names += ["late"] if self.random.random() < 0.7 else []
        names += ["mortal"] if "kill consumer" in faults or "full disk" in faults or self.is_chosen(0.2) else []
        return tuple(self.consumer(name, setting) for name in names)

    def consumer(self, name: str, setting: Setting) -> Consumer:
        return Consumer(
            name,
            "",
            None,
            "",
            topic=setting.engine.topic,
            decode=self.is_chosen(0.25),
            asynchronous=self.is_chosen(0.4),
            has_short_timeouts=setting.has_short_timeouts,
            clock_leaps=self.random.choice((1, 5)) if setting.clock_leaps else 0,
            saves_state=name == "mortal",
            sink_failures=setting.sink_failures,
            name_delay=setting.name_delay,
        )

    # --- times

    def script(
        self,
        setting: Setting,
        incarnations: Sequence[int],
        ends: Sequence[str],
        faults: Sequence[str],
        consumers: Sequence[Consumer],
        traits: Sequence[str],
    ) -> list[Command]:
        random = self.random
        late = any(each.name == "late" for each in consumers)
        # The highest number means after the last incarnation.
        joins_in = random.randrange(len(incarnations) + 1) if late else -1
        script: list[Command] = [("join", each.name) for each in consumers if each.name != "late"]
        legs = max(1, setting.relays + 1)
        for place, batches in enumerate(incarnations):
            last = place == len(incarnations) - 1
            stop = batches - random.randint(*TAIL) if last else int(batches * random.uniform(0.6, 1.0))
            fault_commands: list[tuple[int, int, Command]] = []
            for name in faults:
                if random.randrange(len(incarnations)) == place or (len(incarnations) > 1 and self.is_chosen(0.3)):
                    fault_commands += self.fault_commands(name, stop, random.randrange(legs))
            if joins_in == place:
                fault_commands.append((random.randrange(stop), len(fault_commands), ("join", "late")))
            script.append(("publish", stop, random.choice(RATES)))
            for at, _, command in sorted(fault_commands):
                script += [("reach", at), command]
            if not last:
                ending = ENDS[ends[place]]
                script += [("reach", stop if ending.is_orderly else int(stop * random.uniform(0.5, 1.0)))]
                script += [("end_incarnation", ends[place], incarnations[place + 1])]
        can_lose = setting.transport == "tcp" and not any(TRAITS[name].hides_tail for name in traits)
        script += [
            ("reach", incarnations[-1] - TAIL[1]),
            ("tail", incarnations[-1], bool(can_lose and self.is_chosen(0.4, LOST_TAIL))),
        ]
        return script + ([("join", "late")] if joins_in == len(incarnations) else [])

    def fault_commands(self, name: str, stop: int, leg: int) -> list[tuple[int, int, Command]]:
        """Draw when a fault begins and ends. Return its commands with their places in the script."""
        begin = self.random.randrange(stop)
        end = min(stop, begin + int(stop * self.random.uniform(0.02, 0.5)))
        order = self.random.randrange(1_000)
        fault_commands: list[tuple[int, int, Command]] = [(begin, 2 * order, ("strike", name, leg))]
        return [*fault_commands, (end, 2 * order + 1, ("heal", name, leg))] if FAULTS[name].heal is not None else fault_commands


_RELEASED: Final[dict[Make, Dialect]] = {"vllm": dialect_for("vllm", "0.32.0"), "sglang": dialect_for("sglang", "0.5.23")}
