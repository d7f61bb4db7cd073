"""One round, drawn from a seed: which engine, which consumers, which faults, and when."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Literal

from kvevents.testing import Faults
from kvevents.testing.playlist import ReplyShape
from kvevents.wire import Dialect, dialect_for, dialects
from tests.system.chaos.cache import Habits
from tests.system.chaos.consumer import Consumer
from tests.system.chaos.engine import Engine, Make
from tests.system.chaos.faults import ENDS, FAULTS
from tests.system.chaos.relaying import Hop
from tests.system.chaos.traits import TRAITS, WAYS, Setting

Transport = Literal["tcp", "ipc"]
Command = tuple[Any, ...]
"""A word, and what it needs: `("publish", until, rate)`, `("reach", number)`, `("strike", fault, leg)`, `("heal", fault)`,
`("life", how, batches)`, `("join", consumer)`, `("tail", until, lost)`."""

MAKES: Final[dict[Make, int]] = {"ours": 45, "tape": 33, "vllm": 11, "sglang": 11}
RATES: Final = (4_000.0, 8_000.0, 20_000.0)
"""Batches per second that an engine tries to publish."""
DRAWS: Final = 2_000
"""Rounds that are drawn until one has the faults that were asked for."""
LOST_TAIL: Final = "lost tail"
TAIL: Final = (1, 40)
"""Batches that are published last, when every fault is over; or lost, as the last ones that there are."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens in a round. Nothing else is drawn while it is played."""

    seed: str
    number: int
    setting: Setting
    consumers: tuple[Consumer, ...]
    """Those that join by a command are in here too."""
    faults: tuple[str, ...]
    script: tuple[Command, ...]
    lives: tuple[int, ...]
    """Batches that each life can publish."""

    @property
    def name(self) -> str:
        return f"--seed {self.seed} --round {self.number}"

    def draw(self, what: str) -> Random:
        """A source of chance of its own."""
        return _random(f"{self.seed}/{self.number}/{what}")

    def schedule(self) -> str:
        """For people, when something went wrong."""
        setting, engine = self.setting, self.setting.engine
        lines = [
            f"{self.name}: {engine.make} {'-'.join(engine.dialect)} over {setting.transport}, relays: {setting.relays}",
            f"  options {dict(engine.options)}, {engine.habits}, {engine.harm}",
            f"  {engine.faults}" if engine.make == "tape" else "",
            *(f"  {each}" for each in setting.hops),
            *(
                f"  consumer {each.name}: decode={each.decode} async={each.asynchronous} leaps={each.leaps} saves={each.saves}"
                for each in self.consumers
            ),
            *(f"  {' '.join(map(str, command))}" for command in self.script),
        ]
        return "\n".join(line for line in lines if line)


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
    """Round `number`: about `batches` batches from an engine of one of the makes, with all of `only` and none of `without`.

    Raises `LookupError` if no plan fits.
    """
    for attempt in range(DRAWS if only or without else 1):
        plan = _Drawing(seed, number, attempt, batches, makes, set(only), set(without), can_mount).plan()
        if set(only) <= set(plan.faults) and not set(without) & set(plan.faults):
            return plan
    raise LookupError(
        f"no round has {', '.join(only)} without {', '.join(without) or 'anything'}; there are {', '.join(known())}"
    )


def known() -> list[str]:
    """The names of all that a round can have."""
    return [*WAYS, *ENDS, *FAULTS, LOST_TAIL, *TRAITS]


class _Drawing:
    def __init__(
        self,
        seed: str,
        number: int,
        attempt: int,
        batches: int,
        makes: Collection[Make],
        only: set[str],
        without: set[str],
        can_mount: bool,
    ) -> None:
        self.seed, self.number, self.batches, self.makes = seed, number, batches, makes
        self.only, self.without, self.can_mount = only, without, can_mount
        self.random = _random(f"{seed}/{number}" + (f"/{attempt}" if attempt else ""))

    def plan(self) -> Plan:
        setting, traits = self.traits(self.setting())
        lives, ends = self.lives()
        faults = self.faults(setting, traits)
        consumers = self.consumers(setting, faults)
        script = self.script(setting, lives, ends, faults, consumers, traits)
        ways = [name for name, is_there in WAYS.items() if is_there(setting)]
        tail = [LOST_TAIL] if ("tail", True) in _tails(script) else []
        names = tuple(dict.fromkeys([*ways, *traits, *ends, *faults, *tail]))
        return Plan(self.seed, self.number, setting, consumers, names, tuple(script), tuple(lives))

    def chance(self, share: float, name: str = "") -> bool:
        """Whether something is so; `name` may be asked for, or not be wanted."""
        drawn = self.random.random() < share
        return name in self.only or (drawn and name not in self.without)

    # --- processes

    def setting(self) -> Setting:
        random = self.random
        makes: list[Make] = [make for make in MAKES if make in self.makes]
        make = random.choices(makes, [MAKES[each] for each in makes])[0]
        row = _RELEASED.get(make) or random.choice(dialects())
        habits = Habits(
            blocks=random.choice((50, 400, 2_000)),
            block_size=random.choice((1, 4, 16)),
            ragged=self.chance(0.3),
            clears=random.choice((0.0, 0.0002, 0.002)),
            events=random.choice((1, 2, 4)),
        )
        options: dict[str, Any] = {}
        if make == "ours":
            options = {"compact": self.chance(0.6), "heartbeat": random.choice((None, 0.1, 0.5))}
        shape: ReplyShape = "topic" if row.has_replay_topic else "bare-end" if self.chance(0.1) else "no-topic"
        faults = Faults(seed=random.randrange(1 << 30), reply_shape=shape)
        engine = Engine(make, (row.engine, row.since), "", "", habits, faults=faults, options=tuple(options.items()))
        transport: Transport = "ipc" if self.chance(0.15) else "tcp"
        brisk = not self.chance(0.01)
        hops = tuple(self.hop(row, brisk) for _ in range(self.relays()))
        return Setting(engine, transport, hops, brisk=brisk, can_mount=self.can_mount)

    def relays(self) -> int:
        drawn = self.random.choices((0, 1, 2), (6, 3, 1))[0]
        counts = {"one relay": 1, "two relays": 2}
        asked = [count for name, count in counts.items() if name in self.only]
        return asked[0] if asked else 0 if drawn in [counts[name] for name in self.without & counts.keys()] else drawn

    def hop(self, row: Dialect, brisk: bool) -> Hop:
        random = self.random
        own = f"{row.engine}-{row.since}"
        return Hop(
            journal=self.chance(0.8),
            heartbeat=random.choice((0.1, 0.5)),
            dialect=random.choice((None, None, own, f"{row.engine}-latest")),
            tokens="hash" if row.event_form == "map" and self.chance(0.2) else "keep",
            buffer_steps=random.choice((50, 1_000, 10_000)),
            brisk=brisk,
        )

    def traits(self, setting: Setting) -> tuple[Setting, list[str]]:
        """What is wrong with the engine all the time."""
        names = []
        for name, trait in TRAITS.items():
            if trait.fits(setting) and self.chance(trait.share, name):
                setting = trait.change(setting, self.random)
                names.append(name)
        return setting, names

    def lives(self) -> tuple[list[int], list[str]]:
        """Batches of each life, and how all but the last end."""
        count = self.random.choices((1, 2, 3), (5, 4, 1))[0]
        asked = [name for name in ENDS if name in self.only]
        known = [name for name in ENDS if name not in self.without]
        ends = [*asked, *(self.random.choice(known) for _ in range(count - 1 if known else 0))][: max(count - 1, len(asked))]
        count = len(ends) + 1
        weights = [self.random.uniform(0.5, 1.0) for _ in range(count)]
        for place, how in enumerate(ends):
            if ENDS[how].passes:
                weights[place + 1] = weights[place] * self.random.uniform(1.2, 2.0)
        total = sum(weights)
        return [max(TAIL[1] * 3, int(self.batches * weight / total)) for weight in weights], ends

    def faults(self, setting: Setting, traits: Sequence[str]) -> list[str]:
        """What is done to it, at some time."""
        known = [name for name, fault in FAULTS.items() if fault.fits(setting)]
        count = min(self.random.choices((0, 1, 2, 3, 4), (1, 4, 5, 3, 2))[0], len(known))
        chosen = [name for name in self.random.sample(known, count) if name not in self.without]
        needed = [need for name in traits for need in TRAITS[name].needs if need in known]
        asked = [name for name in known if name in self.only]
        return list(dict.fromkeys([*needed, *asked, *chosen]))

    def consumers(self, setting: Setting, faults: Sequence[str]) -> tuple[Consumer, ...]:
        names = ["steady"]
        names += ["late"] if self.random.random() < 0.7 else []
        names += ["mortal"] if "kill consumer" in faults or "full disk" in faults or self.chance(0.2) else []
        return tuple(self.consumer(name, setting) for name in names)

    def consumer(self, name: str, setting: Setting) -> Consumer:
        return Consumer(
            name,
            "",
            None,
            "",
            topic=setting.engine.topic,
            decode=self.chance(0.25),
            asynchronous=self.chance(0.4),
            brisk=setting.brisk,
            leaps=self.random.choice((1, 5)) if setting.leaps else 0,
            saves=name == "mortal",
        )

    # --- when

    def script(
        self,
        setting: Setting,
        lives: Sequence[int],
        ends: Sequence[str],
        faults: Sequence[str],
        consumers: Sequence[Consumer],
        traits: Sequence[str],
    ) -> list[Command]:
        random = self.random
        late = any(each.name == "late" for each in consumers)
        joins_in = random.randrange(len(lives) + 1) if late else -1  # one more: when all is quiet again
        script: list[Command] = [("join", each.name) for each in consumers if each.name != "late"]
        legs = max(1, setting.relays + 1)
        for place, batches in enumerate(lives):
            last = place == len(lives) - 1
            stop = batches - random.randint(*TAIL) if last else int(batches * random.uniform(0.6, 1.0))
            marks: list[tuple[int, int, Command]] = []
            for name in faults:
                if random.randrange(len(lives)) == place or (len(lives) > 1 and self.chance(0.3)):
                    marks += self.marks(name, stop, random.randrange(legs))
            if joins_in == place:
                marks.append((random.randrange(stop), len(marks), ("join", "late")))
            script.append(("publish", stop, random.choice(RATES)))
            for at, _, command in sorted(marks):
                script += [("reach", at), command]
            if not last:
                how = ENDS[ends[place]]
                script += [("reach", stop if how.orderly else int(stop * random.uniform(0.5, 1.0)))]
                script += [("life", ends[place], lives[place + 1])]
        can_lose = setting.transport == "tcp" and not any(TRAITS[name].hides_tail for name in traits)
        script += [("reach", lives[-1] - TAIL[1]), ("tail", lives[-1], bool(can_lose and self.chance(0.4, LOST_TAIL)))]
        return script + ([("join", "late")] if joins_in == len(lives) else [])

    def marks(self, name: str, stop: int, leg: int) -> list[tuple[int, int, Command]]:
        """When a fault begins, and when it ends."""
        begin = self.random.randrange(stop)
        end = min(stop, begin + int(stop * self.random.uniform(0.02, 0.5)))
        order = self.random.randrange(1_000)
        marks: list[tuple[int, int, Command]] = [(begin, 2 * order, ("strike", name, leg))]
        return [*marks, (end, 2 * order + 1, ("heal", name, leg))] if FAULTS[name].heals else marks


_RELEASED: Final[dict[Make, Dialect]] = {"vllm": dialect_for("vllm", "0.32.0"), "sglang": dialect_for("sglang", "0.5.23")}


def _tails(script: Sequence[Command]) -> list[tuple[str, bool]]:
    return [(command[0], command[2]) for command in script if command[0] == "tail"]


def _random(seed: str) -> Random:
    return Random(seed)
