"""`kvevents.service.lookups`: what is counted behind answers is counted before it is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvevents.service.http.thread_pools import run_inline
from kvevents.service.lookups import MAX_UNCOUNTED, Lookups
from kvevents.service.registration import Scope

SCOPE = Scope("m", "default", "default", None, None)
PROMPT = list(range(32))


class Counts:
    """In place of `Metrics`: what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def lookup(self, tokens: int, longest: int) -> None:
        self.told.append((tokens, longest))


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def lookups(counts: Counts) -> Lookups:
    """Of a fleet in which one worker holds the first block of every prompt."""
    rows = [SimpleNamespace(tokens=16)]
    fleet: Any = SimpleNamespace(match=lambda *_, **__: rows, match_keys=lambda *_, **__: rows, block_sizes=lambda _: [16])
    return Lookups(fleet, counts, None)  # type: ignore[arg-type]


def test_a_lookup_is_counted_behind_its_answer(lookups: Lookups, counts: Counts) -> None:
    """Also if that fails."""
    for found in (
        asyncio.run(lookups.find(run_inline, SCOPE, PROMPT)),
        asyncio.run(lookups.find_keys(run_inline, SCOPE, [1, 2], local=False)),
    ):
        assert (len(found.rows), found.missing) == (1, "")
    assert counts.told == []
    lookups.count()
    assert counts.told == [(32, 16), (0, 16)]
    lookups.count()
    assert len(counts.told) == 2


def test_the_hottest_prefixes_have_all_that_was_asked(lookups: Lookups, counts: Counts) -> None:
    for _ in range(3):
        asyncio.run(lookups.find(run_inline, SCOPE, PROMPT))
    found = asyncio.run(lookups.hottest(run_inline, SCOPE, 10))
    assert (found.sampled, [each.lookups for each in found.prefixes]) == (3, [3])
    assert len(counts.told) == 3


def test_what_waits_to_be_counted_has_a_limit(lookups: Lookups, counts: Counts) -> None:
    """Where nobody comes to count, as behind the answers of a thread."""
    asyncio.run(lookups.find_many(run_inline, SCOPE, [PROMPT] * MAX_UNCOUNTED))
    assert counts.told == []
    asyncio.run(lookups.find(run_inline, SCOPE, PROMPT))
    assert len(counts.told) == MAX_UNCOUNTED + 1
