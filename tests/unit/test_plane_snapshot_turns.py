"""Tests of the order in which replicas write the snapshots of a plane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import PlaneError
from kvevents_plane.digests import ConsistencyCheck
from kvevents_plane.layout import Layout
from kvevents_plane.replica.build import Snapshotter, turn

INTERVAL = 0.05
NAMES = ("a", "b", "c")


@given(names=st.sets(st.text("ab-1", min_size=1, max_size=8), min_size=1, max_size=6), partition=st.integers(0, 63))
def test_replicas_that_know_the_same_names_have_different_turns(names: set[str], partition: int) -> None:
    turns = {name: turn(name, names - {name}, partition) for name in names}
    assert sorted(turns.values()) == list(range(len(names)))
    first = min(turns, key=turns.__getitem__)
    left = names - {first}
    assert all(turn(name, left - {name}, partition) == turns[name] - 1 for name in left), "the others keep their order"


def test_partitions_are_shared_among_the_replicas() -> None:
    firsts = [next(name for name in NAMES if turn(name, NAMES, partition) == 0) for partition in range(64)]
    assert min(firsts.count(name) for name in NAMES) >= 10


class Store:
    """The snapshots of one partition, by the names of their writers."""

    def __init__(self) -> None:
        self.writers: list[str] = []
        self.faults: dict[str, Exception] = {}
        self.refused: set[str] = set()
        self._written_at = 0.0

    async def list_valid(self, _: int) -> list[Any]:
        return []

    def newest_age(self, _: int) -> float | None:
        return time.monotonic() - self._written_at if self.writers else None

    async def save(self, _: Any, __: Any, ___: int, replica: str, ____: str) -> Any:
        if replica in self.faults:
            self.refused.add(replica)
            raise self.faults[replica]
        self.writers.append(replica)
        self._written_at = time.monotonic()
        return SimpleNamespace()


@asynccontextmanager
async def writing(store: Store, **faults: str) -> AsyncIterator[dict[str, Snapshotter]]:
    """Run a snapshotter of each name. `faults` are the reasons why replicas cannot publish digests, so no other knows them."""

    async def take(*_: Any) -> Any:
        return None, 0

    build: Any = SimpleNamespace(record=lambda _: None, take=take, stream_ids={0: "x"}, complete={0}, newest={})
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
    return sorted(NAMES, key=lambda name: turn(name, NAMES, 0))


async def test_a_replica_whose_turn_it_is_not_writes_if_the_others_fail(caplog: pytest.LogCaptureFixture) -> None:
    """A fault is served until a newer snapshot is known, by any replica: what was refused is in the log for longer."""
    store, (first, second, third) = Store(), order()
    store.faults = {first: PlaneError("no room", fault="full"), second: TimeoutError()}
    async with writing(store) as snapshotters:
        await until(lambda: set(store.writers) == {third} and store.refused == {first, second})
        assert {record.getMessage() for record in caplog.records} == {
            "no snapshot was written: partition 0: no room",
            "no snapshot was written: partition 0: it was not written in time",
        }
        store.faults.clear()
        await until(lambda: first in store.writers)
        await until(lambda: not snapshotters[first].fault)


@pytest.mark.parametrize("denied", NAMES)
async def test_a_replica_that_cannot_write_leaves_its_turn_to_the_others(denied: str) -> None:
    store, others = Store(), [name for name in NAMES if name != denied]
    async with writing(store, **{denied: "grant this user the permission"}):
        await until(lambda: len(store.writers) >= 3)
    assert denied not in store.writers
    assert store.writers[0] == min(others, key=lambda name: turn(name, others, 0))


async def test_a_router_alone_reports_that_no_replica_writes() -> None:
    store = Store()
    async with writing(store, **dict.fromkeys(NAMES, "grant this user the permission")) as snapshotters:
        await until(lambda: all(snapshotters[name].fault for name in NAMES))
    assert snapshotters["a"].fault == "partition 0: grant this user the permission"
    assert store.writers == []
