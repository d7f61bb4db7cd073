"""`tests.system.chaos.soak`: which measurements count as growth."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from random import Random
from typing import cast

import pytest

from tests.system.chaos.parts import Leg
from tests.system.chaos.soak import (
    ALLOWANCES,
    MINUTES,
    OUTAGE_SECONDS,
    OUTAGES,
    WARM_UP,
    Note,
    Trend,
    flaps,
    note,
    table,
    trends,
)

HOUR = 3600.0
DRAW = Random(1)


def notes(memory: Callable[[float], float], seconds: float = HOUR, every: float = 10.0) -> list[Note]:
    return [Note(at * every, memory(at * every), 20, 4) for at in range(int(seconds / every))]


def memory_of(found: list[Trend]) -> Trend:
    return next(trend for trend in found if trend.what == "memory")


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
        "saw",
        "higher and higher peaks",
        "one step",
        "leak under a saw",
        "leak by steps",
        "leak that begins late",
    ],
)
def test_what_grows(memory: Callable[[float], float], grows: bool) -> None:
    """A leak is found in noise; noise, a warm-up and what is collected again and again are not taken for one."""
    assert memory_of(trends("p", notes(memory), WARM_UP * HOUR)).grows is grows


def test_a_short_look_allows_for_noise() -> None:
    """However steep a line is in a minute: less than the noise is nothing, a leak of more than that is found all the same."""
    assert not memory_of(trends("p", notes(lambda at: 100 + at / 60, 60, 2), 0.0)).grows
    assert memory_of(trends("p", notes(lambda at: 100 + at, 60, 2), 0.0)).grows


@pytest.mark.parametrize("what", ["descriptors", "threads"])
def test_descriptors_and_threads(what: str) -> None:
    """One more each minute is found."""
    seen = [Note(at * 60.0, 100, 20, 4)._replace(**{what: 20 + at}) for at in range(60)]
    assert [trend.what for trend in trends("p", seen, WARM_UP * HOUR) if trend.grows] == [what]


def test_too_little_to_say() -> None:
    assert trends("p", [], 0.0) == []
    assert trends("p", notes(lambda _: 1.0, 20, 10), 0.0) == []
    assert len(trends("p", notes(lambda _: 1.0, 30, 10), 0.0)) == len(ALLOWANCES)


def test_a_process_is_noted() -> None:
    seen = note(os.getpid(), 7.0)
    assert seen.at == 7.0
    assert min(seen[1:]) >= 1
    with pytest.raises(OSError, match="No such"):
        note(2**22 + 1, 0.0)


LEAK = """
import sys
kept = []
for line in sys.stdin:
    kept.append(bytearray(b"x") * int(line))
    print(flush=True)
"""


@pytest.mark.parametrize(("size", "grows"), [(1 << 20, True), (1 << 10, False)], ids=["1 MiB a minute", "1 KiB a minute"])
def test_a_process_that_leaks_is_found(size: int, grows: bool) -> None:
    """In what the kernel says of it, as the soak notes it, on a clock of the test's own."""
    with subprocess.Popen([sys.executable, "-c", LEAK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        seen = []
        for minute in range(60):
            child.stdin.write(b"%d\n" % size)
            child.stdin.flush()
            child.stdout.readline()
            seen.append(note(child.pid, minute * 60.0))
        child.stdin.close()
    assert memory_of(trends("leak", seen, WARM_UP * HOUR)).grows is grows


def test_the_table_names_what_grows() -> None:
    text = table(trends("engine", notes(lambda at: 100 + at), 0.0))
    assert "| engine | memory | 100.0 MiB | 3,690.0 MiB | 3,690.0 MiB | +3,600.0 | **grows** |" in text
    assert text.count("| flat |") == 2


class Proxy:
    """Notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def drop(self, share: float, *, seed: int) -> None:
        assert seed >= 0
        self.done.append(f"drop {share:g}")

    def cut(self) -> None:
        self.done.append("cut")


class OneLeg:
    """A leg of such proxies."""

    def __init__(self) -> None:
        self.live, self.replay = Proxy(), Proxy()
        self.proxies = [self.live, self.replay]

    def heal(self) -> None:
        for proxy in self.proxies:
            proxy.done.append("heal")


def test_the_worst_comes_first_and_is_over_before_the_measurement() -> None:
    """Whatever it costs once is not taken for growth."""
    leg = OneLeg()
    network = flaps([cast("Leg", leg)], Random(1))
    assert [next(network) for _ in OUTAGES] == [OUTAGE_SECONDS] * len(OUTAGES)
    assert sum([OUTAGE_SECONDS] * len(OUTAGES)) < MINUTES * 60 * WARM_UP / 2
    assert leg.live.done == ["drop 0.05", "drop 1"]
    assert leg.replay.done == ["drop 0.05", "drop 0"]
    next(network)
    assert leg.live.done[2] == leg.replay.done[2] == "heal"
    assert {*leg.live.done[3:], *leg.replay.done[3:]} > {"cut"}
