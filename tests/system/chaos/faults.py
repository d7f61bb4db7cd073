"""What is done to a chain: faults begin and mostly end, ends are how lives give way to the next.

Each stands in a table under the name that the report calls it by.
"""

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
from tests.system.chaos.relaying import Station
from tests.system.chaos.traits import Fits, Setting, always

if TYPE_CHECKING:
    from tests.system.chaos.stage import Stage

GLIMPSE: Final = 0.003
"""Seconds between two cuts of a connection that flaps."""
STRANGERS: Final = 25
"""Connections of a client that is not a peer, each time."""


def _proxied(setting: Setting) -> bool:
    return setting.transport == "tcp"


def _proxied_replay(setting: Setting) -> bool:
    return setting.transport == "tcp" and setting.replay


# --- faults ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    strike: Callable[[Stage, int, Random], None]
    fits: Fits = _proxied
    heal: Callable[[Stage, int], None] | None = None

    @property
    def heals(self) -> bool:
        return self.heal is not None


def _live(stage: Stage, leg: int) -> FaultProxy:
    proxy = stage.legs[min(leg, len(stage.legs) - 1)].live
    assert proxy is not None, "faults of the way are for chains over TCP"
    return proxy


def _replay(stage: Stage, leg: int) -> FaultProxy:
    proxy = stage.legs[min(leg, len(stage.legs) - 1)].replay
    assert proxy is not None, "faults of replay are for chains with it, over TCP"
    return proxy


def _heal_live(stage: Stage, leg: int) -> None:
    _live(stage, leg).heal()


def _heal_replay(stage: Stage, leg: int) -> None:
    _replay(stage, leg).heal()


def _heal_both(stage: Stage, leg: int) -> None:
    stage.legs[min(leg, len(stage.legs) - 1)].heal()


def _share(random: Random) -> float:
    return random.choice((0.001, 0.02, 0.3))


def _seed(random: Random) -> int:
    return random.randrange(1 << 30)


def _drop(stage: Stage, leg: int, random: Random) -> None:
    _live(stage, leg).drop(_share(random), seed=_seed(random))


def _drop_run(stage: Stage, leg: int, random: Random) -> None:
    _live(stage, leg).drop(random.choice((1, 10, 500)))


def _drop_replies(stage: Stage, leg: int, random: Random) -> None:
    _replay(stage, leg).drop(_share(random), seed=_seed(random))


def _drop_requests(stage: Stage, leg: int, random: Random) -> None:
    _replay(stage, leg).drop(random.choice((1, 3)), direction="up")


def _delay(stage: Stage, leg: int, random: Random) -> None:
    _live(stage, leg).delay(random.uniform(0.01, 0.3))


def _delay_replies(stage: Stage, leg: int, random: Random) -> None:
    _replay(stage, leg).delay(random.uniform(0.01, 0.3))


def _reorder(stage: Stage, leg: int, random: Random) -> None:
    _live(stage, leg).reorder(random.choice((0.0005, 0.01)), seed=_seed(random))


def _reorder_replies(stage: Stage, leg: int, random: Random) -> None:
    _replay(stage, leg).reorder(random.choice((0.0005, 0.01)), seed=_seed(random))


def _cut(stage: Stage, leg: int, random: Random) -> None:
    _live(stage, leg).cut()
    if stage.plan.setting.replay and random.random() < 0.5:
        _replay(stage, leg).cut()


def _refuse(stage: Stage, leg: int, _: Random) -> None:
    for proxy in stage.legs[min(leg, len(stage.legs) - 1)].proxies:
        proxy.cut(refuse=True)


def _flap(stage: Stage, leg: int, random: Random) -> None:
    for _ in range(random.randrange(10, 40)):
        _live(stage, leg).cut()
        time.sleep(random.expovariate(1 / GLIMPSE))


def _half_open(stage: Stage, leg: int, _: Random) -> None:
    _live(stage, leg).half_open()


def _half_open_replies(stage: Stage, leg: int, _: Random) -> None:
    _replay(stage, leg).half_open()


def _stall(stage: Stage, leg: int, _: Random) -> None:
    for proxy in stage.legs[min(leg, len(stage.legs) - 1)].proxies:
        proxy.stall()


def _dead_replay(stage: Stage, leg: int, _: Random) -> None:
    _replay(stage, leg).cut(refuse=True)


def _mute_replay(stage: Stage, leg: int, _: Random) -> None:
    _replay(stage, leg).stall()


def _foreign_replay(stage: Stage, leg: int, random: Random) -> None:
    """The replay endpoint is another engine's, with the same settings, that has published less or more."""
    _replay(stage, leg).redirect(stage.another_engine(random.choice((0.5, 1.0, 2.0))))


def _junk(stage: Stage, leg: int, random: Random) -> None:
    """Frames that are nothing, between those that are something."""
    topic = stage.plan.setting.engine.topic.encode()
    good = live_frames(topic, 7, b"x")
    for _ in range(random.randrange(1, 20)):
        _live(stage, leg).inject(random.choice(([topic], good[:2], [*good, b""], [topic, b"\0\0\0\5", b""], [topic, b"", b""])))


def _junk_replies(stage: Stage, leg: int, random: Random) -> None:
    proxy = _replay(stage, leg)
    for _ in range(random.randrange(1, 20)):
        proxy.inject(random.choice(([b""], [b"", b"x", b"y"], [b"", b"\0" * 8], [b"\xff" * 300])))
        proxy.inject(random.choice(([b""], [b"", b"\0\0"], [b"junk"] * 5)), direction="up")


def _strange_end(stage: Stage, leg: int, _: Random) -> None:
    """An end marker before the end: an answer that stopped short, in either shape."""
    for with_topic in (False, True):
        _replay(stage, leg).inject(replay_end_frames(with_topic))


def _strangers(stage: Stage, leg: int, random: Random) -> None:
    """Connections of clients that do not speak ZMTP: they close at once, stay silent, or send garbage."""
    place = stage.legs[min(leg, len(stage.legs) - 1)]
    for proxy in place.proxies:
        host, _, port = proxy.endpoint.removeprefix("tcp://").rpartition(":")
        for _ in range(STRANGERS):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0) as stranger:
                stranger.sendall(random.choice((b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" + bytes(8) + b"\x7f\x03")))


def _pauses(random: Random) -> float:
    return random.choice((0.02, 0.2, 0.8))


def _stop_engine(stage: Stage, _: int, random: Random) -> None:
    with _stopped([stage.engine]):
        time.sleep(_pauses(random))


@contextlib.contextmanager
def _stopped(parts: list[Any]) -> Iterator[None]:
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


def _revive_consumer(stage: Stage, _: int) -> None:
    stage.join("mortal")


def _relay(stage: Stage, leg: int) -> Station:
    return stage.relays[min(leg, len(stage.relays) - 1)]


def _stop_relay(stage: Stage, leg: int, _: Random) -> None:
    _relay(stage, leg).stop()


def _go_on_relay(stage: Stage, leg: int) -> None:
    _relay(stage, leg).go_on()


def _kill_relay(stage: Stage, leg: int, _: Random) -> None:
    _relay(stage, leg).kill()


def _revive_relay(stage: Stage, leg: int) -> None:
    _relay(stage, leg).start()


def _restart_relay(stage: Stage, leg: int, _: Random) -> None:
    """Killed, and back at once."""
    _relay(stage, leg).kill()
    _relay(stage, leg).start()


def _relayed(setting: Setting) -> bool:
    return setting.relays > 0


def _fill_disk(stage: Stage, _: int, __: Random) -> None:
    stage.disk.fill()


def _free_disk(stage: Stage, _: int) -> None:
    stage.disk.free()


FAULTS: Final[dict[str, Fault]] = {
    "live messages dropped": Fault(_drop, heal=_heal_live),
    "a run of live messages dropped": Fault(_drop_run, heal=_heal_live),
    "replies dropped": Fault(_drop_replies, _proxied_replay, _heal_replay),
    "requests dropped": Fault(_drop_requests, _proxied_replay, _heal_replay),
    "live messages delayed": Fault(_delay, heal=_heal_live),
    "replies delayed": Fault(_delay_replies, _proxied_replay, _heal_replay),
    "live messages out of order": Fault(_reorder, heal=_heal_live),
    "replies out of order": Fault(_reorder_replies, _proxied_replay, _heal_replay),
    "connection cut": Fault(_cut),
    "connection refused": Fault(_refuse, heal=_heal_both),
    "connection flaps": Fault(_flap),
    "half-open": Fault(_half_open),
    "half-open replay": Fault(_half_open_replies, _proxied_replay),
    "network swallows all": Fault(_stall, heal=_heal_both),
    "replay dead": Fault(_dead_replay, _proxied_replay, _heal_replay),
    "replay silent": Fault(_mute_replay, _proxied_replay, _heal_replay),
    "replay of another engine": Fault(_foreign_replay, _proxied_replay, _heal_replay),
    "malformed messages injected": Fault(_junk),
    "malformed replies and requests": Fault(_junk_replies, _proxied_replay),
    "end markers out of place": Fault(_strange_end, _proxied_replay),
    "strangers connect": Fault(_strangers),
    "stop engine": Fault(_stop_engine, always),
    "stop consumer": Fault(_stop_consumer, always, _go_on_consumer),
    "kill consumer": Fault(_kill_consumer, always, _revive_consumer),
    "stop relay": Fault(_stop_relay, _relayed, _go_on_relay),
    "kill relay": Fault(_kill_relay, _relayed, _revive_relay),
    "restart relay": Fault(_restart_relay, _relayed),
    "full disk": Fault(_fill_disk, lambda setting: setting.can_mount, _free_disk),
}


# --- ends --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class End:
    orderly: bool = False
    """Whether the engine may send what it has."""
    passes: bool = False
    """Whether the next incarnation is past the number of this one before any consumer reads."""


ENDS: Final[dict[str, End]] = {
    "restart": End(orderly=True),
    "kill engine": End(),
    "unseen restart": End(passes=True),
}
