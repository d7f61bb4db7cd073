"""Faults of a round (`FAULTS`), and how an incarnation of the engine ends (`ENDS`), by the names that the report uses."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

from kvevents.testing import FaultProxy
from kvevents.wire import live_frames, replay_end_frames
from tests.system.chaos.relaying import RelayProcess
from tests.system.chaos.traits import Fits, Setting, fits_always

if TYPE_CHECKING:
    from tests.system.chaos.stage import Stage

FLAP_SECONDS: Final = 0.003
"""Mean seconds between two cuts of a connection that flaps."""
STRANGERS: Final = 25
"""Connections of a client that does not speak ZMTP, to each proxy."""


def _has_proxies(setting: Setting) -> bool:
    return setting.transport == "tcp"


def _has_replay_proxy(setting: Setting) -> bool:
    return setting.transport == "tcp" and setting.replay


# --- faults ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: the functions that begin and end it, and the settings that it fits."""

    strike: Callable[[Stage, int, Random], None]
    fits: Fits = _has_proxies
    heal: Callable[[Stage, int], None] | None = None

    @property
    def has_end(self) -> bool:
        return self.heal is not None


def _live_proxy(stage: Stage, leg: int) -> FaultProxy:
    proxy = stage.legs[min(leg, len(stage.legs) - 1)].live
    assert proxy is not None, "this fault needs a chain over TCP"
    return proxy


def _replay_proxy(stage: Stage, leg: int) -> FaultProxy:
    proxy = stage.legs[min(leg, len(stage.legs) - 1)].replay
    assert proxy is not None, "this fault needs a chain over TCP with a replay endpoint"
    return proxy


def _heal_live(stage: Stage, leg: int) -> None:
    _live_proxy(stage, leg).heal()


def _heal_replay(stage: Stage, leg: int) -> None:
    _replay_proxy(stage, leg).heal()


def _heal_both(stage: Stage, leg: int) -> None:
    stage.legs[min(leg, len(stage.legs) - 1)].heal()


def _draw_share(random: Random) -> float:
    return random.choice((0.001, 0.02, 0.3))


def _draw_seed(random: Random) -> int:
    return random.randrange(1 << 30)


def _drop(stage: Stage, leg: int, random: Random) -> None:
    _live_proxy(stage, leg).drop(_draw_share(random), seed=_draw_seed(random))


def _drop_run(stage: Stage, leg: int, random: Random) -> None:
    _live_proxy(stage, leg).drop(random.choice((1, 10, 500)))


def _drop_replies(stage: Stage, leg: int, random: Random) -> None:
    _replay_proxy(stage, leg).drop(_draw_share(random), seed=_draw_seed(random))


def _drop_requests(stage: Stage, leg: int, random: Random) -> None:
    _replay_proxy(stage, leg).drop(random.choice((1, 3)), direction="up")


def _delay(stage: Stage, leg: int, random: Random) -> None:
    _live_proxy(stage, leg).delay(random.uniform(0.01, 0.3))


def _delay_replies(stage: Stage, leg: int, random: Random) -> None:
    _replay_proxy(stage, leg).delay(random.uniform(0.01, 0.3))


def _reorder(stage: Stage, leg: int, random: Random) -> None:
    _live_proxy(stage, leg).reorder(random.choice((0.0005, 0.01)), seed=_draw_seed(random))


def _reorder_replies(stage: Stage, leg: int, random: Random) -> None:
    _replay_proxy(stage, leg).reorder(random.choice((0.0005, 0.01)), seed=_draw_seed(random))


def _cut(stage: Stage, leg: int, random: Random) -> None:
    _live_proxy(stage, leg).cut()
    if stage.plan.setting.replay and random.random() < 0.5:
        _replay_proxy(stage, leg).cut()


def _refuse(stage: Stage, leg: int, _: Random) -> None:
    for proxy in stage.legs[min(leg, len(stage.legs) - 1)].proxies:
        proxy.cut(refuse=True)


def _flap(stage: Stage, leg: int, random: Random) -> None:
    for _ in range(random.randrange(10, 40)):
        _live_proxy(stage, leg).cut()
        time.sleep(random.expovariate(1 / FLAP_SECONDS))


def _half_open(stage: Stage, leg: int, _: Random) -> None:
    _live_proxy(stage, leg).half_open()


def _half_open_replies(stage: Stage, leg: int, _: Random) -> None:
    _replay_proxy(stage, leg).half_open()


def _stall(stage: Stage, leg: int, _: Random) -> None:
    for proxy in stage.legs[min(leg, len(stage.legs) - 1)].proxies:
        proxy.stall()


def _dead_replay(stage: Stage, leg: int, _: Random) -> None:
    _replay_proxy(stage, leg).cut(refuse=True)


def _silent_replay(stage: Stage, leg: int, _: Random) -> None:
    _replay_proxy(stage, leg).stall()


def _foreign_replay(stage: Stage, leg: int, random: Random) -> None:
    """Redirect replay requests to another engine with the same settings, which has published fewer or more batches."""
    _replay_proxy(stage, leg).redirect(stage.start_foreign_engine(random.choice((0.5, 1.0, 2.0))))


def _inject_malformed(stage: Stage, leg: int, random: Random) -> None:
    """Inject malformed messages between live messages."""
    topic = stage.plan.setting.engine.topic.encode()
    good = live_frames(topic, 7, b"x")
    for _ in range(random.randrange(1, 20)):
        _live_proxy(stage, leg).inject(
            random.choice(([topic], good[:2], [*good, b""], [topic, b"\0\0\0\5", b""], [topic, b"", b""]))
        )


def _inject_malformed_replies(stage: Stage, leg: int, random: Random) -> None:
    proxy = _replay_proxy(stage, leg)
    for _ in range(random.randrange(1, 20)):
        proxy.inject(random.choice(([b""], [b"", b"x", b"y"], [b"", b"\0" * 8], [b"\xff" * 300])))
        proxy.inject(random.choice(([b""], [b"", b"\0\0"], [b"junk"] * 5)), direction="up")


def _early_end_marker(stage: Stage, leg: int, _: Random) -> None:
    """Inject end markers in both shapes, so that a reply seems to end early."""
    for with_topic in (False, True):
        _replay_proxy(stage, leg).inject(replay_end_frames(with_topic))


def _connect_strangers(stage: Stage, leg: int, random: Random) -> None:
    """Connect clients that do not speak ZMTP: they close at once or send garbage."""
    struck_leg = stage.legs[min(leg, len(stage.legs) - 1)]
    for proxy in struck_leg.proxies:
        host, _, port = proxy.endpoint.removeprefix("tcp://").rpartition(":")
        for _ in range(STRANGERS):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0) as stranger:
                stranger.sendall(random.choice((b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" + bytes(8) + b"\x7f\x03")))


def _draw_pause(random: Random) -> float:
    return random.choice((0.02, 0.2, 0.8))


def _stop_engine(stage: Stage, _: int, random: Random) -> None:
    with _stop_parts([stage.engine]):
        time.sleep(_draw_pause(random))


@contextlib.contextmanager
def _stop_parts(parts: list[Any]) -> Iterator[None]:
    for part in parts:
        part.stop()
    try:
        yield
    finally:
        for part in parts:
            part.go_on()


def _stop_consumer(stage: Stage, _: int, __: Random) -> None:
    stage.consumer("steady").stop()


def _go_on_consumer(stage: Stage, _: int) -> None:
    stage.consumer("steady").go_on()


def _kill_consumer(stage: Stage, _: int, __: Random) -> None:
    stage.kill_consumer("mortal")


def _start_consumer(stage: Stage, _: int) -> None:
    stage.join("mortal")


def _relay(stage: Stage, leg: int) -> RelayProcess:
    return stage.relays[min(leg, len(stage.relays) - 1)]


def _stop_relay(stage: Stage, leg: int, _: Random) -> None:
    _relay(stage, leg).stop()


def _go_on_relay(stage: Stage, leg: int) -> None:
    _relay(stage, leg).go_on()


def _kill_relay(stage: Stage, leg: int, _: Random) -> None:
    _relay(stage, leg).kill()


def _start_relay(stage: Stage, leg: int) -> None:
    _relay(stage, leg).start()


def _restart_relay(stage: Stage, leg: int, _: Random) -> None:
    """Kill the relay and start it again at once."""
    _relay(stage, leg).kill()
    _relay(stage, leg).start()


def _has_relays(setting: Setting) -> bool:
    return setting.relays > 0


def _fill_disk(stage: Stage, _: int, __: Random) -> None:
    stage.disk.fill()


def _free_disk(stage: Stage, _: int) -> None:
    stage.disk.free()


FAULTS: Final[dict[str, Fault]] = {
    "live messages dropped": Fault(_drop, heal=_heal_live),
    "a run of live messages dropped": Fault(_drop_run, heal=_heal_live),
    "replies dropped": Fault(_drop_replies, _has_replay_proxy, _heal_replay),
    "requests dropped": Fault(_drop_requests, _has_replay_proxy, _heal_replay),
    "live messages delayed": Fault(_delay, heal=_heal_live),
    "replies delayed": Fault(_delay_replies, _has_replay_proxy, _heal_replay),
    "live messages out of order": Fault(_reorder, heal=_heal_live),
    "replies out of order": Fault(_reorder_replies, _has_replay_proxy, _heal_replay),
    "connection cut": Fault(_cut),
    "connection refused": Fault(_refuse, heal=_heal_both),
    "connection flaps": Fault(_flap),
    "half-open": Fault(_half_open),
    "half-open replay": Fault(_half_open_replies, _has_replay_proxy),
    "network swallows all": Fault(_stall, heal=_heal_both),
    "replay dead": Fault(_dead_replay, _has_replay_proxy, _heal_replay),
    "replay silent": Fault(_silent_replay, _has_replay_proxy, _heal_replay),
    "replay of another engine": Fault(_foreign_replay, _has_replay_proxy, _heal_replay),
    "malformed messages injected": Fault(_inject_malformed),
    "malformed replies and requests": Fault(_inject_malformed_replies, _has_replay_proxy),
    "end markers out of place": Fault(_early_end_marker, _has_replay_proxy),
    "strangers connect": Fault(_connect_strangers),
    "stop engine": Fault(_stop_engine, fits_always),
    "stop consumer": Fault(_stop_consumer, fits_always, _go_on_consumer),
    "kill consumer": Fault(_kill_consumer, fits_always, _start_consumer),
    "stop relay": Fault(_stop_relay, _has_relays, _go_on_relay),
    "kill relay": Fault(_kill_relay, _has_relays, _start_relay),
    "restart relay": Fault(_restart_relay, _has_relays),
    "full disk": Fault(_fill_disk, lambda setting: setting.can_mount, _free_disk),
}


# --- ends --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class End:
    """An end of an incarnation of the engine."""

    is_orderly: bool = False
    """Whether the engine sends what it has before it ends."""
    passes_number: bool = False
    """Whether the next incarnation has passed the newest number of this one before any consumer reads."""


ENDS: Final[dict[str, End]] = {
    "restart": End(is_orderly=True),
    "kill engine": End(),
    "unseen restart": End(passes_number=True),
}
