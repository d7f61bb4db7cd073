"""Programs with several threads limit how long one thread, or the garbage collector, holds the interpreter."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvevents.cli import signals
from kvevents.cli.program import main
from kvevents.service import process as server
from kvevents_plane.cli import bridge


@pytest.fixture
def observed() -> Iterator[list[tuple[float, int]]]:
    """Settings of the interpreter that `make_recorder` records; the settings of the test process are restored at the end."""
    before = sys.getswitchinterval()
    found: list[tuple[float, int]] = []
    yield found
    sys.setswitchinterval(before)
    gc.unfreeze()


def make_recorder(into: list[tuple[float, int]]) -> Callable[..., None]:
    """Return a replacement for the work of the program that records the settings of the interpreter at its start."""

    def work(*_: Any) -> None:
        into.append((sys.getswitchinterval(), gc.get_freeze_count()))

    return work


def run_service(monkeypatch: pytest.MonkeyPatch, work: Callable[..., None]) -> None:
    monkeypatch.setattr(server, "serve", work)
    assert main(["serve", "--port", "0"]) == 0


def run_bridge(monkeypatch: pytest.MonkeyPatch, work: Callable[..., None]) -> None:
    async def begin(*_: Any) -> None:
        work()

    monkeypatch.setattr(bridge, "_run_bridge", begin)
    assert main(["bridge", "--nats", "nats://127.0.0.1:1", "--model", "m", "--worker", "e=tcp://127.0.0.1:1"]) == 0


@pytest.mark.parametrize("run", [run_service, run_bridge])
def test_programs_shorten_the_switch_interval_and_freeze_imported_objects(
    run: Callable[[pytest.MonkeyPatch, Callable[..., None]], None],
    observed: list[tuple[float, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collection of all objects that a service has imported takes 10 to 20 ms, so these objects are frozen."""
    run(monkeypatch, make_recorder(observed))
    [(interval, frozen)] = observed
    assert interval == pytest.approx(signals.THREAD_SWITCH_SECONDS)
    assert frozen > 10_000
