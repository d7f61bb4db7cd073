"""Programs whose threads answer beside one another keep the interpreter from each other for a short time only."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvevents.cli import bridge, process
from kvevents.cli.program import main
from kvevents.service import server


@pytest.fixture
def observed() -> Iterator[list[tuple[float, int]]]:
    """Filled by `observe`; what a program has set is taken back at the end."""
    before = sys.getswitchinterval()
    found: list[tuple[float, int]] = []
    yield found
    sys.setswitchinterval(before)
    gc.unfreeze()


def observe(into: list[tuple[float, int]]) -> Callable[..., None]:
    """In place of the program's work: what the interpreter is set to when that begins."""

    def work(*_: Any) -> None:
        into.append((sys.getswitchinterval(), gc.get_freeze_count()))

    return work


def run_service(monkeypatch: pytest.MonkeyPatch, work: Callable[..., None]) -> None:
    monkeypatch.setattr(server, "serve", work)
    assert main(["serve", "--port", "0"]) == 0


def run_bridge(monkeypatch: pytest.MonkeyPatch, work: Callable[..., None]) -> None:
    async def begin(*_: Any) -> None:
        work()

    monkeypatch.setattr(bridge, "_main", begin)
    config: Any = None
    bridge.run_bridge(config, None)


@pytest.mark.parametrize("run", [run_service, run_bridge])
def test_no_thread_and_no_garbage_collection_keeps_others_waiting(
    run: Callable[[pytest.MonkeyPatch, Callable[..., None]], None],
    observed: list[tuple[float, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collection of all that a service has imported stops it for 10 to 20 ms: it is not looked at."""
    run(monkeypatch, observe(observed))
    [(interval, frozen)] = observed
    assert interval == pytest.approx(process.SWITCH_SECONDS)
    assert frozen > 10_000
