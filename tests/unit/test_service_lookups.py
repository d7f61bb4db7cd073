"""`kvevents.service.lookups`: lookups are counted after their responses, and before counters are read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvevents.service.fleet.registration import Scope
from kvevents.service.http.thread_pools import run_inline
from kvevents.service.lookups import MAX_UNCOUNTED, Lookups

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


def test_count_counts_each_lookup_once(lookups: Lookups, metrics: FakeMetrics) -> None:
    for found in (
        asyncio.run(lookups.find(run_inline, SCOPE, PROMPT)),
        asyncio.run(lookups.find_keys(run_inline, SCOPE, [1, 2], local=False)),
    ):
        assert len(found) == 1
    assert metrics.recorded == []
    lookups.count()
    assert metrics.recorded == [(32, 16), (0, 16)]
    lookups.count()
    assert len(metrics.recorded) == 2


def test_the_hottest_prefixes_include_uncounted_lookups(lookups: Lookups, metrics: FakeMetrics) -> None:
    for _ in range(3):
        asyncio.run(lookups.find(run_inline, SCOPE, PROMPT))
    found = asyncio.run(lookups.hottest(run_inline, SCOPE, 10))
    assert (found.sampled, [each.lookups for each in found.prefixes]) == (3, [3])
    assert len(metrics.recorded) == 3


def test_uncounted_lookups_are_bounded(lookups: Lookups, metrics: FakeMetrics) -> None:
    """A lookup beyond the limit counts all of them."""
    asyncio.run(lookups.find_many(run_inline, SCOPE, [PROMPT] * MAX_UNCOUNTED))
    assert metrics.recorded == []
    asyncio.run(lookups.find(run_inline, SCOPE, PROMPT))
    assert len(metrics.recorded) == MAX_UNCOUNTED + 1
