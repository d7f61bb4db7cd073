"""The settings of a chain, and traits: what is wrong with it during the whole round.

`TRAITS` has the traits by the names that the report uses. The faults that a trait needs are added to its round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, Final, Literal

from tests.system.chaos.relaying import Hop
from tests.system.chaos_kit.engine import Clock, Engine


@dataclass(frozen=True, slots=True)
class Setting:
    """A chain: the engine, the relays, and what is between them and the consumers."""

    engine: Engine
    transport: Literal["tcp", "ipc"]
    hops: tuple[Hop, ...] = ()
    """The relays, in order."""
    replay: bool = True
    has_short_timeouts: bool = True
    """Whether consumers have short timeouts instead of the defaults."""
    clock_leaps: bool = False
    """Whether clocks of consumers leap forward."""
    sink_failures: float = 0.0
    """Share of the calls in which the sink of a consumer raises; 0 for a consumer without a sink."""
    name_delay: float = 0.0
    """Seconds that a consumer's name server takes for an answer; 0 for addresses in place of names."""
    can_mount: bool = False

    @property
    def relays(self) -> int:
        return len(self.hops)


Fits = Callable[[Setting], bool]
Change = Callable[[Setting, Random], Setting]


def fits_always(_: Setting) -> bool:
    return True


def _is_made_by(*makes: str) -> Fits:
    return lambda setting: setting.engine.make in makes


VARIANTS: Final[dict[str, Fits]] = {
    "engine compacts": lambda setting: bool(dict(setting.engine.options).get("compact")),
    "engine with heartbeats": lambda setting: bool(dict(setting.engine.options).get("heartbeat")),
    "one relay": lambda setting: setting.relays == 1,
    "two relays": lambda setting: setting.relays == 2,
    "relay without journal": lambda setting: any(not hop.journal for hop in setting.hops),
    "relay speaks a dialect": lambda setting: any(hop.dialect for hop in setting.hops),
    "relay hashes tokens": lambda setting: any(hop.tokens == "hash" for hop in setting.hops),
}
"""Features of a chain that are no faults, but are counted like them."""


# --- traits ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trait:
    """A lasting change of a chain: its function, the settings that it fits, and how many rounds have it."""

    change: Change
    fits: Fits = fits_always
    share: float = 0.08
    needs: tuple[str, ...] = ()
    """Faults without which the trait has no effect."""
    hides_tail: bool = False
    """Whether consumers cannot notice the loss of the last batches. If so, the round does not lose its last batches."""


def _change_options(**choices: Callable[[Random], Any]) -> Change:
    def change(setting: Setting, random: Random) -> Setting:
        options = {**dict(setting.engine.options), **{name: choose(random) for name, choose in choices.items()}}
        return replace(setting, engine=replace(setting.engine, options=tuple(options.items())))

    return change


def _change_engine(part: Literal["faults", "defects"], **choices: Callable[[Random], Any]) -> Change:
    """Return a change of the faults of a tape, or of the defects of an engine."""

    def change(setting: Setting, random: Random) -> Setting:
        changed = replace(getattr(setting.engine, part), **{name: choose(random) for name, choose in choices.items()})
        return replace(setting, engine=replace(setting.engine, **{part: changed}))

    return change


_change_tape: Final = partial(_change_engine, "faults")
_change_defects: Final = partial(_change_engine, "defects")


def _remove_replay(setting: Setting, _: Random) -> Setting:
    return replace(setting, replay=False)


def _set_clock_jumps(setting: Setting, random: Random) -> Setting:
    clock = Clock(random.randrange(1_400_000_000), random.choice((0.0005, 0.01, 1.0)))
    return replace(setting, engine=replace(setting.engine, clock=clock))


def _set_clock_leaps(setting: Setting, _: Random) -> Setting:
    return replace(setting, clock_leaps=True)


def _make_sinks_fail(setting: Setting, random: Random) -> Setting:
    return replace(setting, sink_failures=random.choice((0.001, 0.01)))


def _slow_down_names(setting: Setting, random: Random) -> Setting:
    return replace(setting, name_delay=random.choice((0.05, 0.3, 1.0)))


def _set_low_hwm(setting: Setting, random: Random) -> Setting:
    """Set a low high-water mark, over `ipc://`: the buffers of TCP in the kernel alone would hold a whole round."""
    hwm = random.choice((20, 200))
    engine = replace(setting.engine, options=tuple({**dict(setting.engine.options), "hwm": hwm}.items()))
    return replace(setting, engine=engine, transport="ipc")


def _draw_buffer_steps(random: Random) -> int:
    return random.choice((50, 500, 2_000))


def _draw_rare_share(random: Random) -> float:
    return random.choice((0.0003, 0.003))


TRAITS: Final[dict[str, Trait]] = {
    "no replay endpoint": Trait(_remove_replay, share=0.06),
    "short replay buffer": Trait(
        _change_options(buffer_steps=_draw_buffer_steps), _is_made_by("ours", "vllm", "sglang"), share=0.25
    ),
    "short replay buffer, tape": Trait(_change_tape(buffer_steps=_draw_buffer_steps), _is_made_by("tape"), share=0.2),
    "HWM overflow": Trait(_set_low_hwm, share=0.08, needs=("stop consumer",)),
    "queue full": Trait(
        _change_options(max_queue_size=lambda random: random.choice((40, 60))), _is_made_by("ours"), share=0.06
    ),
    "clock jumps of the engine": Trait(_set_clock_jumps, share=0.25),
    "clock leaps of the consumer": Trait(_set_clock_leaps, share=0.08),
    "sink that raises": Trait(_make_sinks_fail, share=0.1),
    "slow names": Trait(_slow_down_names, lambda setting: setting.transport == "tcp", share=0.1),
    "unknown events": Trait(_change_defects(unknown=_draw_rare_share), _is_made_by("ours", "tape"), share=0.06),
    "batches of garbage": Trait(_change_defects(garbage=_draw_rare_share), _is_made_by("tape"), share=0.1),
    "malformed messages": Trait(_change_defects(frames=lambda _: 0.01), _is_made_by("tape"), share=0.12),
    "batches that cannot be encoded": Trait(_change_defects(unencodable=_draw_rare_share), _is_made_by("ours"), share=0.06),
    "live messages never sent": Trait(
        _change_tape(drop=lambda random: random.choice((0.001, 0.02, 0.2))), _is_made_by("tape"), share=0.3
    ),
    "numbers skipped": Trait(_change_tape(skipped=lambda random: {random.randrange(5_000)}), _is_made_by("tape"), share=0.06),
    "replay of 1,000 at most": Trait(_change_tape(replay_send_limit=lambda _: 1_000), _is_made_by("tape"), share=0.2),
    "replay of what the socket takes": Trait(_change_tape(replay_sndhwm=lambda _: 1_000), _is_made_by("tape"), share=0.2),
    "replay with gaps": Trait(
        _change_tape(replay_holes=lambda random: random.choice((0.001, 0.05))), _is_made_by("tape"), share=0.2, hides_tail=True
    ),
    "replay without end marker": Trait(_change_tape(lose_end_marker=lambda _: True), _is_made_by("tape"), share=0.1),
    "replay never answers": Trait(_change_tape(replay_silent=lambda _: True), _is_made_by("tape"), share=0.06, hides_tail=True),
    "replay does not answer at first": Trait(
        _change_tape(replay_silent=lambda _: True, faulty_replies=lambda random: random.randrange(1, 6)),
        _is_made_by("tape"),
        share=0.06,
    ),
    "replay with junk": Trait(
        _change_tape(replay_junk=lambda _: ((b"",), (b"", b"x", b"y"), (b"", b"\0" * 8))), _is_made_by("tape"), share=0.08
    ),
}
