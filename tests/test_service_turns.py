"""`kvevents.service.http.turns`: when the event loop looks for the next question rather than sleep."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest
import uvloop

from kvevents import _native
from kvevents.errors import ConfigError
from kvevents.service.config import ServiceConfig
from kvevents.service.http.turns import Turns

AWAKE = 0.0001


class Wire:
    """A transport that takes everything."""

    def write(self, data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return False


def nothing() -> None:
    """Before and behind."""


def looks(gaps: list[float]) -> list[float]:
    """For how long the loop looked, after each of some answers; each question came so long after the answer before it."""
    found: list[float] = []
    looked: list[float] = []
    now = 0.0

    def look(_: int, seconds: float) -> bool:
        looked.append(seconds)
        return False

    async def main() -> None:
        nonlocal now
        turns = Turns(AWAKE, before=nothing, behind=nothing, clock=lambda: now, look=look)
        for gap in gaps:
            came_at = now + gap
            now = came_at + 0.001  # the answer takes its time, which says nothing of the next question
            turns.answer(Wire(), b"", came_at)
            await asyncio.sleep(0)
            found.append(sum(looked))
            looked.clear()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    return found


def test_it_looks_only_where_the_last_question_came_at_once() -> None:
    soon, late = AWAKE / 2, AWAKE * 2
    assert looks([soon, soon, late, soon, late, late]) == [0.0, AWAKE, 0.0, AWAKE, 0.0, 0.0]


@pytest.mark.parametrize(("loop", "looks_at"), [(asyncio.new_event_loop, 0), (uvloop.new_event_loop, 2)])
def test_a_loop_without_a_descriptor_sleeps(loop: Any, looks_at: int) -> None:
    """There is nothing to look at; where there is something, the same answers make it look behind all but the first."""
    looked: list[int] = []

    def look(descriptor: int, _: float) -> bool:
        looked.append(descriptor)
        return False

    async def main() -> None:
        turns = Turns(AWAKE, before=nothing, behind=nothing, clock=lambda: 0.0, look=look)
        for _ in range(3):
            turns.answer(Wire(), b"", 0.0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # what `answer` has scheduled is done now, whatever it raises

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
    assert len(looked) == looks_at


def test_what_can_be_read_ends_a_look_at_once() -> None:
    """As does an error: whoever reads is told of it."""
    reader, writer = os.pipe()
    try:
        assert not _native.look_for(reader, 0.0)
        assert not _native.look_for(reader, 0.001)
        os.write(writer, b"x")
        assert _native.look_for(reader, 0.01)
    finally:
        os.close(reader)
        os.close(writer)
    assert _native.look_for(reader, 0.01)


def test_other_threads_run_while_it_looks() -> None:
    """It has no end in sight but what another thread does."""
    reader, writer = os.pipe()
    go = threading.Event()
    other = threading.Thread(target=lambda: (go.wait(), os.write(writer, b"x")))
    other.start()
    try:
        go.set()
        assert any(_native.look_for(reader, 0.01) for _ in range(1_000))
    finally:
        other.join()
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("seconds", [-1.0, 0.011, float("inf"), float("nan")])
def test_a_look_is_short(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"it is 0 to 0\.01"):
        _native.look_for(0, seconds)


@pytest.mark.parametrize("microseconds", [-1, 10_001])
def test_the_setting_has_bounds(microseconds: int) -> None:
    with pytest.raises(ConfigError, match="awake_microseconds is"):
        ServiceConfig(awake_microseconds=microseconds)
