"""The soak (`make soak`) distinguishes growth from noise, and disturbs the network before it measures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from random import Random
from typing import cast

import pytest

from tests.system.chaos.soak import (
    ALLOWANCES,
    MINUTES,
    OUTAGE_SECONDS,
    OUTAGES,
    WARM_UP,
    Sample,
    Trend,
    disturb_network,
    sample,
    tabulate,
    trends,
)
from tests.system.chaos_kit.parts import Leg

HOUR = 3600.0
DRAW = Random(1)


def make_samples(memory: Callable[[float], float], seconds: float = HOUR, every: float = 10.0) -> list[Sample]:
    return [Sample(at * every, memory(at * every), 20, 4) for at in range(int(seconds / every))]


def memory_trend(found: list[Trend]) -> Trend:
    return next(trend for trend in found if trend.quantity == "memory")


@pytest.mark.parametrize(
    ("memory", "grows"),
    [
        (lambda _: 100.0, False),
        (lambda _: 100.0 + DRAW.uniform(-5, 5), False),
        (lambda at: 100.0 + 60 * at / HOUR, True),
        (lambda at: 100.0 + 60 * at / HOUR + DRAW.uniform(-5, 5), True),
        (lambda at: 100.0 - 60 * at / HOUR, False),
        (lambda at: 100.0 + 10 * at / HOUR, False),
        (lambda at: 300.0 if at > 300 else at, False),
        (lambda at: 100.0 + at % 120 / 10, False),
        (lambda at: 100.0 + (300 if at % 600 > 560 else 0) * at / HOUR, False),
        (lambda at: 100.0 + (30 if at > 0.6 * HOUR else 0), False),
        (lambda at: 100.0 + 20 * at / HOUR + at % 120 / 5, True),
        (lambda at: 100.0 + 4 * (at // 600), True),
        (lambda at: 100.0 + max(0.0, at / HOUR - 0.5) * 40, True),
    ],
    ids=[
        "flat",
        "noise",
        "leak",
        "leak in noise",
        "shrinks",
        "within the allowance",
        "warms up",
        "sawtooth",
        "rising peaks",
        "one step",
        "leak under a sawtooth",
        "leak in steps",
        "leak that begins late",
    ],
)
def test_growth_is_distinguished_from_noise_and_warm_up(memory: Callable[[float], float], grows: bool) -> None:
    """A leak is found in noise. Noise, a warm-up and memory that is freed again do not count as growth."""
    assert memory_trend(trends("p", make_samples(memory), WARM_UP * HOUR)).grows is grows


def test_a_short_run_allows_for_noise() -> None:
    """In one minute, a steep rise below the noise allowance does not count, and a larger one does."""
    assert not memory_trend(trends("p", make_samples(lambda at: 100 + at / 60, 60, 2), 0.0)).grows
    assert memory_trend(trends("p", make_samples(lambda at: 100 + at, 60, 2), 0.0)).grows


@pytest.mark.parametrize("quantity", ["descriptors", "threads"])
def test_a_growing_number_of_descriptors_or_threads_is_found(quantity: str) -> None:
    """One more descriptor or thread each minute counts as growth."""
    measured = [Sample(at * 60.0, 100, 20, 4)._replace(**{quantity: 20 + at}) for at in range(60)]
    assert [trend.quantity for trend in trends("p", measured, WARM_UP * HOUR) if trend.grows] == [quantity]


def test_fewer_than_three_samples_have_no_trend() -> None:
    assert trends("p", [], 0.0) == []
    assert trends("p", make_samples(lambda _: 1.0, 20, 10), 0.0) == []
    assert len(trends("p", make_samples(lambda _: 1.0, 30, 10), 0.0)) == len(ALLOWANCES)


def test_a_process_is_measured() -> None:
    measured = sample(os.getpid(), 7.0)
    assert measured.at == 7.0
    assert min(measured[1:]) >= 1
    with pytest.raises(OSError, match="No such"):
        sample(2**22 + 1, 0.0)


LEAKING_PROGRAM = """
import sys
kept = []
for line in sys.stdin:
    kept.append(bytearray(b"x") * int(line))
    print(flush=True)
"""


@pytest.mark.parametrize(("size", "grows"), [(1 << 20, True), (1 << 10, False)], ids=["1 MiB a minute", "1 KiB a minute"])
def test_a_process_that_leaks_is_found(size: int, grows: bool) -> None:
    """A real process is measured by the kernel, with a clock of the test."""
    with subprocess.Popen([sys.executable, "-c", LEAKING_PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        measured = []
        for minute in range(60):
            child.stdin.write(b"%d\n" % size)
            child.stdin.flush()
            child.stdout.readline()
            measured.append(sample(child.pid, minute * 60.0))
        child.stdin.close()
    assert memory_trend(trends("leak", measured, WARM_UP * HOUR)).grows is grows


def test_the_table_names_what_grows() -> None:
    text = tabulate(trends("engine", make_samples(lambda at: 100 + at), 0.0))
    assert "| engine | memory | 100.0 MiB | 3,690.0 MiB | 3,690.0 MiB | +3,600.0 | **grows** |" in text
    assert text.count("| flat |") == 2


class Proxy:
    """Records the faults that are set on it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def drop(self, share: float, *, seed: int) -> None:
        assert seed >= 0
        self.calls.append(f"drop {share:g}")

    def cut(self) -> None:
        self.calls.append("cut")


class OneLeg:
    """A leg with such proxies."""

    def __init__(self) -> None:
        self.live, self.replay = Proxy(), Proxy()
        self.proxies = [self.live, self.replay]

    def heal(self) -> None:
        for proxy in self.proxies:
            proxy.calls.append("heal")


def test_outages_are_over_before_the_measurement() -> None:
    """The outages come first, so that what they cost once does not count as growth."""
    leg = OneLeg()
    network = disturb_network([cast("Leg", leg)], Random(1))
    assert [next(network) for _ in OUTAGES] == [OUTAGE_SECONDS] * len(OUTAGES)
    assert sum([OUTAGE_SECONDS] * len(OUTAGES)) < MINUTES * 60 * WARM_UP / 2
    assert leg.live.calls == ["drop 0.05", "drop 1"]
    assert leg.replay.calls == ["drop 0.05", "drop 0"]
    next(network)
    assert leg.live.calls[2] == leg.replay.calls[2] == "heal"
    assert {*leg.live.calls[3:], *leg.replay.calls[3:]} > {"cut"}
