"""Tests of the order in which replicas write the snapshots of a plane."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import PlaneError
from kvevents_plane.digests import ConsistencyCheck
from kvevents_plane.layout import Layout
from kvevents_plane.replica import build as replica_build
from kvevents_plane.replica.build import Snapshotter, count_earlier_replicas

INTERVAL = 0.05
NAMES = ("a", "b", "c")


@given(names=st.sets(st.text("ab-1", min_size=1, max_size=8), min_size=1, max_size=6), partition=st.integers(0, 63))
def test_replicas_that_know_the_same_names_have_different_turns(names: set[str], partition: int) -> None:
    turns = {name: count_earlier_replicas(name, names - {name}, partition) for name in names}
    assert sorted(turns.values()) == list(range(len(names)))
    first = min(turns, key=turns.__getitem__)
    left = names - {first}
    assert all(count_earlier_replicas(name, left - {name}, partition) == turns[name] - 1 for name in left), (
        "the others keep their order"
    )


def test_partitions_are_shared_among_the_replicas() -> None:
    firsts = [next(name for name in NAMES if count_earlier_replicas(name, NAMES, partition) == 0) for partition in range(64)]
    assert min(firsts.count(name) for name in NAMES) >= 10


class Clock(selectors.DefaultSelector):
    """Time that passes only while an event loop waits, so that a busy machine does not change who is late."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0.0 if timeout else timeout)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(replica_build, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def runner(clock: Clock) -> Iterator[asyncio.Runner]:
    def make_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(clock)
        loop.time = clock  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=make_loop) as runner:
        yield runner


class Store:
    """The snapshots of one partition, by the names of their writers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.writers: list[str] = []
        self.faults: dict[str, Exception] = {}
        self.refused: set[str] = set()
        self._written_at = 0.0

    async def list_valid(self, _: int) -> list[Any]:
        return []

    def newest_age(self, _: int) -> float | None:
        return self._clock() - self._written_at if self.writers else None

    async def save(self, _: Any, __: Any, ___: int, replica: str, ____: str) -> Any:
        if replica in self.faults:
            self.refused.add(replica)
            raise self.faults[replica]
        self.writers.append(replica)
        self._written_at = self._clock()
        return SimpleNamespace()


@asynccontextmanager
async def writing(store: Store, **faults: str) -> AsyncIterator[dict[str, Snapshotter]]:
    """Run a snapshotter of each name. `faults` are the reasons why replicas cannot publish digests, so no other knows them."""

    async def capture(*_: Any) -> Any:
        return None, 0

    build: Any = SimpleNamespace(record=lambda _: None, capture_snapshot=capture, stream_ids={0: "x"}, complete={0}, newest={})
    found, tasks = {}, []
    for name in NAMES:
        check = ConsistencyCheck(name, 1.0)
        check.others = tuple(other for other in NAMES if other != name and other not in faults)
        check.write_fault = faults.get(name, "")
        found[name] = Snapshotter(name, check, INTERVAL)
        snapshots: Any = store
        tasks.append(asyncio.create_task(found[name].run(Layout("x", 1), snapshots, build)))
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(INTERVAL / 10)


def order() -> list[str]:
    return sorted(NAMES, key=lambda name: count_earlier_replicas(name, NAMES, 0))


def test_a_replica_whose_turn_it_is_not_writes_if_the_others_fail(
    clock: Clock, runner: asyncio.Runner, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault is served until a newer snapshot is known, by any replica: what was refused is in the log for longer."""
    store, (first, second, third) = Store(clock), order()
    store.faults = {first: PlaneError("no room", fault="full"), second: TimeoutError()}

    async def run() -> None:
        async with writing(store) as snapshotters:
            await until(lambda: set(store.writers) == {third} and store.refused == {first, second})
            assert {record.getMessage() for record in caplog.records} == {
                "no snapshot was written: partition 0: no room",
                "no snapshot was written: partition 0: it was not written in time",
            }
            store.faults.clear()
            await until(lambda: first in store.writers)
            await until(lambda: not snapshotters[first].fault)

    runner.run(run())


@pytest.mark.parametrize("denied", NAMES)
def test_a_replica_that_cannot_write_leaves_its_turn_to_the_others(denied: str, clock: Clock, runner: asyncio.Runner) -> None:
    store, others = Store(clock), [name for name in NAMES if name != denied]

    async def run() -> None:
        async with writing(store, **{denied: "grant this user the permission"}):
            await until(lambda: len(store.writers) >= 3)

    runner.run(run())
    assert store.writers == [min(others, key=lambda name: count_earlier_replicas(name, others, 0))] * 3


def test_a_router_alone_reports_that_no_replica_writes(clock: Clock, runner: asyncio.Runner) -> None:
    store = Store(clock)

    async def run() -> None:
        async with writing(store, **dict.fromkeys(NAMES, "grant this user the permission")) as snapshotters:
            await until(lambda: all(snapshotters[name].fault for name in NAMES))
        assert snapshotters["a"].fault == "partition 0: grant this user the permission"

    runner.run(run())
    assert store.writers == []
