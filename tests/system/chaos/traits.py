"""What a chain is made of, and what is wrong with its engine all the time.

Each trait stands in a table under the name that the report calls it by. A fault that one needs to be felt is added to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final, Literal

from tests.system.chaos.engine import Clock, Engine
from tests.system.chaos.relaying import Hop


@dataclass(frozen=True, slots=True)
class Setting:
    """What a chain is made of."""

    engine: Engine
    transport: Literal["tcp", "ipc"]
    hops: tuple[Hop, ...] = ()
    """The relays."""
    replay: bool = True
    brisk: bool = True
    """Whether consumers have little patience; otherwise their defaults."""
    leaps: bool = False
    """Whether consumers' clocks leap."""
    can_mount: bool = False

    @property
    def relays(self) -> int:
        return len(self.hops)


Fits = Callable[[Setting], bool]


def always(_: Setting) -> bool:
    return True


def _of(*makes: str) -> Fits:
    return lambda setting: setting.engine.make in makes


WAYS: Final[dict[str, Fits]] = {
    "engine compacts": lambda setting: bool(dict(setting.engine.options).get("compact")),
    "engine with heartbeats": lambda setting: bool(dict(setting.engine.options).get("heartbeat")),
    "one relay": lambda setting: setting.relays == 1,
    "two relays": lambda setting: setting.relays == 2,
    "relay without journal": lambda setting: any(not hop.journal for hop in setting.hops),
    "relay speaks a dialect": lambda setting: any(hop.dialect for hop in setting.hops),
    "relay hashes tokens": lambda setting: any(hop.tokens == "hash" for hop in setting.hops),
}
"""What stands in the way from the engine to its consumers: no fault, but what faults happen to."""


# --- traits ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trait:
    change: Callable[[Setting, Random], Setting]
    fits: Fits = always
    share: float = 0.08
    needs: tuple[str, ...] = ()
    """Faults without which it is not felt."""
    hides_tail: bool = False
    """Whether last batches that are lost on their way cannot be known: such a round does not end with them lost."""


def _options(**choices: Callable[[Random], Any]) -> Callable[[Setting, Random], Setting]:
    def change(setting: Setting, random: Random) -> Setting:
        options = {**dict(setting.engine.options), **{name: choose(random) for name, choose in choices.items()}}
        return replace(setting, engine=replace(setting.engine, options=tuple(options.items())))

    return change


def _tape(**choices: Callable[[Random], Any]) -> Callable[[Setting, Random], Setting]:
    def change(setting: Setting, random: Random) -> Setting:
        drawn = {name: choose(random) for name, choose in choices.items()}
        return replace(setting, engine=replace(setting.engine, faults=replace(setting.engine.faults, **drawn)))

    return change


def _harm(**choices: Callable[[Random], float]) -> Callable[[Setting, Random], Setting]:
    def change(setting: Setting, random: Random) -> Setting:
        drawn: dict[str, Any] = {name: choose(random) for name, choose in choices.items()}
        return replace(setting, engine=replace(setting.engine, harm=replace(setting.engine.harm, **drawn)))

    return change


def _no_replay(setting: Setting, _: Random) -> Setting:
    return replace(setting, replay=False)


def _clock(setting: Setting, random: Random) -> Setting:
    clock = Clock(random.randrange(1_400_000_000), random.choice((0.0005, 0.01, 1.0)))
    return replace(setting, engine=replace(setting.engine, clock=clock))


def _leaps(setting: Setting, _: Random) -> Setting:
    return replace(setting, leaps=True)


def _narrow(setting: Setting, random: Random) -> Setting:
    """Little room on the way: a kernel's buffers for TCP alone would hold a whole round."""
    hwm = random.choice((20, 200))
    engine = replace(setting.engine, options=tuple({**dict(setting.engine.options), "hwm": hwm}.items()))
    return replace(setting, engine=engine, transport="ipc")


def _short(random: Random) -> int:
    return random.choice((50, 500, 2_000))


def _rare(random: Random) -> float:
    return random.choice((0.0003, 0.003))


TRAITS: Final[dict[str, Trait]] = {
    "no replay endpoint": Trait(_no_replay, share=0.06),
    "short replay buffer": Trait(_options(buffer_steps=_short), _of("ours", "vllm", "sglang"), share=0.25),
    "short replay buffer, tape": Trait(_tape(buffer_steps=_short), _of("tape"), share=0.2),
    "HWM overflow": Trait(_narrow, share=0.08, needs=("stop consumer",)),
    "queue full": Trait(_options(max_queue_size=lambda random: random.choice((40, 60))), _of("ours"), share=0.06),
    "clock jumps of the engine": Trait(_clock, share=0.25),
    "clock leaps of the consumer": Trait(_leaps, share=0.08),
    "unknown events": Trait(_harm(unknown=_rare), _of("ours", "tape"), share=0.06),
    "batches of garbage": Trait(_harm(garbage=_rare), _of("tape"), share=0.1),
    "malformed messages": Trait(_harm(frames=lambda _: 0.01), _of("tape"), share=0.12),
    "batches that cannot be encoded": Trait(_harm(unencodable=_rare), _of("ours"), share=0.06),
    "live messages never sent": Trait(_tape(drop=lambda random: random.choice((0.001, 0.02, 0.2))), _of("tape"), share=0.3),
    "numbers burnt": Trait(_tape(skipped=lambda random: {random.randrange(5_000)}), _of("tape"), share=0.06),
    "replay of 1,000 at most": Trait(_tape(replay_send_limit=lambda _: 1_000), _of("tape"), share=0.2),
    "replay of what the socket takes": Trait(_tape(replay_sndhwm=lambda _: 1_000), _of("tape"), share=0.2),
    "replay with holes": Trait(
        _tape(replay_holes=lambda random: random.choice((0.001, 0.05))), _of("tape"), share=0.2, hides_tail=True
    ),
    "replay without end marker": Trait(_tape(lose_end_marker=lambda _: True), _of("tape"), share=0.1),
    "replay mute": Trait(_tape(replay_silent=lambda _: True), _of("tape"), share=0.06, hides_tail=True),
    "replay mute at first": Trait(
        _tape(replay_silent=lambda _: True, faulty_replies=lambda random: random.randrange(1, 6)), _of("tape"), share=0.06
    ),
    "replay with junk": Trait(
        _tape(replay_junk=lambda _: ((b"",), (b"", b"x", b"y"), (b"", b"\0" * 8))), _of("tape"), share=0.08
    ),
}
