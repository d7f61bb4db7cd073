"""Faults of a round (`FAULTS`), and how an incarnation of the engine ends (`ENDS`), by the names that the report uses."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

from kvevents.wire import replay_end_frames
from tests.system.chaos.traits import Fits, Setting, fits_always
from tests.system.chaos_kit import faults
from tests.system.chaos_kit.engine import TOPIC, draw_malformed_message
from tests.system.chaos_kit.faults import TargetT, always, draw_seed, refuse
from tests.system.chaos_kit.parts import Disk, Leg, Part
from tests.system.chaos_kit.redirecting_proxy import RedirectingProxy

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


def _has_relays(setting: Setting) -> bool:
    return setting.relays > 0


@dataclass(frozen=True, slots=True)
class Fault(faults.Fault[TargetT]):
    """A fault, and the settings that it fits."""

    fits: Fits = _has_proxies


# --- targets -----------------------------------------------------------------------------------------------------------------


def _find_place(stage: Stage, leg: int) -> list[tuple[Stage, int]]:
    """Return the arguments, for a fault that needs more of the stage than one proxy."""
    return [(stage, leg)]


def _find_leg(stage: Stage, leg: int) -> list[Leg]:
    return [stage.legs[min(leg, len(stage.legs) - 1)]]


def _find_proxies(stage: Stage, leg: int) -> list[RedirectingProxy]:
    return _find_leg(stage, leg)[0].proxies


def _find_live(stage: Stage, leg: int) -> list[RedirectingProxy]:
    proxy = _find_leg(stage, leg)[0].live
    assert proxy is not None, "this fault needs a chain over TCP"
    return [proxy]


def _find_replay(stage: Stage, leg: int) -> list[RedirectingProxy]:
    proxy = _find_leg(stage, leg)[0].replay
    assert proxy is not None, "this fault needs a chain over TCP with a replay endpoint"
    return [proxy]


def _find_engine(stage: Stage, _: int) -> list[Part]:
    return [stage.engine.part]


def _find_steady(stage: Stage, _: int) -> list[Part]:
    return [stage.consumers["steady"]]


def _find_mortal(stage: Stage, _: int) -> list[Part]:
    return [stage.consumers["mortal"]]


def _find_relay(stage: Stage, leg: int) -> list[Part]:
    return [stage.relays[min(leg, len(stage.relays) - 1)]]


def _find_disk(stage: Stage, _: int) -> list[Disk]:
    assert stage.disk is not None
    return [stage.disk]


# --- faults ------------------------------------------------------------------------------------------------------------------


def _drop(proxy: RedirectingProxy, random: Random) -> None:
    proxy.drop(random.choice((0.001, 0.02, 0.3)), seed=draw_seed(random))


def _drop_run(proxy: RedirectingProxy, random: Random) -> None:
    proxy.drop(random.choice((1, 10, 500)))


def _drop_requests(proxy: RedirectingProxy, random: Random) -> None:
    proxy.drop(random.choice((1, 3)), direction="up")


def _delay(proxy: RedirectingProxy, random: Random) -> None:
    proxy.delay(random.uniform(0.01, 0.3))


def _reorder(proxy: RedirectingProxy, random: Random) -> None:
    proxy.reorder(random.choice((0.0005, 0.01)), seed=draw_seed(random))


def _cut(leg: Leg, random: Random) -> None:
    for proxy in leg.proxies:
        if proxy is leg.live or random.random() < 0.5:
            proxy.cut()


def _flap(proxy: RedirectingProxy, random: Random) -> None:
    for _ in range(random.randrange(10, 40)):
        proxy.cut()
        time.sleep(random.expovariate(1 / FLAP_SECONDS))


def _redirect_to_foreign(place: tuple[Stage, int], random: Random) -> None:
    """Redirect replay requests to another engine with the same settings, which has published fewer or more batches."""
    _, replay_endpoint = place[0].start_foreign_engine(random.choice((0.5, 1.0, 2.0)))
    for proxy in _find_replay(*place):
        proxy.redirect(replay_endpoint)


def _swap_with_foreign(place: tuple[Stage, int], random: Random) -> None:
    """Redirect first one and then the other port of the engine to a different engine, as a cluster does when it reuses
    addresses."""
    endpoints = place[0].start_foreign_engine(random.choice((0.5, 1.0, 2.0)))
    ports = [*zip(_find_proxies(place[0], 0), endpoints, strict=False)]
    for proxy, endpoint in random.sample(ports, len(ports)):
        proxy.redirect(endpoint)
        time.sleep(random.choice((0.0, 0.05)))


def _heal_engine_ports(place: tuple[Stage, int]) -> None:
    _find_leg(place[0], 0)[0].heal()


def _heal_replay(place: tuple[Stage, int]) -> None:
    for proxy in _find_replay(*place):
        proxy.heal()


def _inject_malformed(proxy: RedirectingProxy, random: Random) -> None:
    """Inject malformed messages between live messages."""
    for _ in range(random.randrange(1, 20)):
        proxy.inject(draw_malformed_message(random, TOPIC.encode(), 7))


def _inject_malformed_replies(proxy: RedirectingProxy, random: Random) -> None:
    for _ in range(random.randrange(1, 20)):
        proxy.inject(random.choice(([b""], [b"", b"x", b"y"], [b"", b"\0" * 8], [b"\xff" * 300])))
        proxy.inject(random.choice(([b""], [b"", b"\0\0"], [b"junk"] * 5)), direction="up")


def _inject_end_markers(proxy: RedirectingProxy) -> None:
    """Inject end markers in both shapes, so that a reply seems to end early."""
    for has_topic in (False, True):
        proxy.inject(replay_end_frames(has_topic))


def _connect_strangers(proxy: RedirectingProxy, random: Random) -> None:
    """Connect clients that do not speak ZMTP: they close at once or send garbage."""
    host, _, port = proxy.endpoint.removeprefix("tcp://").rpartition(":")
    for _ in range(STRANGERS):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0) as stranger:
            stranger.sendall(random.choice((b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" + bytes(8) + b"\x7f\x03")))


def _restart(part: Part) -> None:
    part.kill()
    part.start()


def _pause(part: Part, random: Random) -> None:
    part.stop()
    try:
        time.sleep(random.choice((0.02, 0.2, 0.8)))
    finally:
        part.go_on()


_half_open: Final = always(RedirectingProxy.half_open)
_stall: Final = always(RedirectingProxy.stall)
_stop: Final = always(Part.stop)
_kill: Final = always(Part.kill)
_heal: Final = RedirectingProxy.heal

FAULTS: Final[dict[str, Fault[Any]]] = {
    "live messages dropped": Fault(_find_live, _drop, _heal),
    "a run of live messages dropped": Fault(_find_live, _drop_run, _heal),
    "replies dropped": Fault(_find_replay, _drop, _heal, _has_replay_proxy),
    "requests dropped": Fault(_find_replay, _drop_requests, _heal, _has_replay_proxy),
    "live messages delayed": Fault(_find_live, _delay, _heal),
    "replies delayed": Fault(_find_replay, _delay, _heal, _has_replay_proxy),
    "live messages out of order": Fault(_find_live, _reorder, _heal),
    "replies out of order": Fault(_find_replay, _reorder, _heal, _has_replay_proxy),
    "connection cut": Fault(_find_leg, _cut),
    "connection refused": Fault(_find_proxies, always(refuse), _heal),
    "connection flaps": Fault(_find_live, _flap),
    "half-open": Fault(_find_live, _half_open),
    "half-open replay": Fault(_find_replay, _half_open, fits=_has_replay_proxy),
    "network swallows all": Fault(_find_proxies, _stall, _heal),
    "replay dead": Fault(_find_replay, always(refuse), _heal, _has_replay_proxy),
    "replay silent": Fault(_find_replay, _stall, _heal, _has_replay_proxy),
    "replay of another engine": Fault(_find_place, _redirect_to_foreign, _heal_replay, _has_replay_proxy),
    "ports of another engine": Fault(_find_place, _swap_with_foreign, _heal_engine_ports),
    "malformed messages injected": Fault(_find_live, _inject_malformed),
    "malformed replies and requests": Fault(_find_replay, _inject_malformed_replies, fits=_has_replay_proxy),
    "end markers out of place": Fault(_find_replay, always(_inject_end_markers), fits=_has_replay_proxy),
    "strangers connect": Fault(_find_proxies, _connect_strangers),
    "stop engine": Fault(_find_engine, _pause, fits=fits_always),
    "stop consumer": Fault(_find_steady, _stop, Part.go_on, fits_always),
    "kill consumer": Fault(_find_mortal, _kill, Part.start, fits_always),
    "stop relay": Fault(_find_relay, _stop, Part.go_on, _has_relays),
    "kill relay": Fault(_find_relay, _kill, Part.start, _has_relays),
    "restart relay": Fault(_find_relay, always(_restart), fits=_has_relays),
    "full disk": Fault(_find_disk, always(Disk.fill), Disk.free, lambda setting: setting.can_mount),
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
