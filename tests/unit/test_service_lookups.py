"""`kvevents.service.lookups`: each lookup is counted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvevents.service.fleet.registration import Scope
from kvevents.service.http.thread_pools import run_inline
from kvevents.service.lookups import Lookups

SCOPE = Scope("m", "default", "default", None, None)
PROMPT = list(range(32))


class FakeMetrics:
    """A fake of `Metrics` that records its calls."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, int]] = []

    def record_lookup(self, tokens: int, longest: int) -> None:
        self.recorded.append((tokens, longest))


@pytest.fixture
def metrics() -> FakeMetrics:
    return FakeMetrics()


@pytest.fixture
def lookups(metrics: FakeMetrics) -> Lookups:
    """Return the lookups of a fleet with one worker that holds the first block of every prompt."""
    rows = [SimpleNamespace(tokens=16)]
    fleet: Any = SimpleNamespace(match=lambda *_, **__: rows, match_keys=lambda *_, **__: rows, block_sizes=lambda _: [16])
    return Lookups(fleet, metrics)  # type: ignore[arg-type]


def test_each_lookup_is_counted_once(lookups: Lookups, metrics: FakeMetrics) -> None:
    for found in (
        asyncio.run(lookups.find(run_inline, SCOPE, PROMPT)),
        asyncio.run(lookups.find_keys(run_inline, SCOPE, [1, 2], local=False)),
    ):
        assert len(found) == 1
    assert metrics.recorded == [(32, 16), (0, 16)]


def test_each_of_several_prompts_is_counted(lookups: Lookups, metrics: FakeMetrics) -> None:
    asyncio.run(lookups.find_many(run_inline, SCOPE, [PROMPT] * 3))
    assert metrics.recorded == [(32, 16)] * 3
