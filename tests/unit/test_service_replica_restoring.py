"""An index build begins a partition with the newest readable snapshot in bounded time, or with the log alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from kvevents.errors import PlaneError, SnapshotError
from kvevents.index import PrefixIndex
from kvevents_plane.layout import Layout, PartitionInfo
from kvevents_plane.partition_state import PartitionState
from kvevents_plane.replica import build as index_build
from kvevents_plane.replica.build import IndexBuild
from kvevents_plane.settings import ReaderLimits
from kvevents_plane.snapshots import SnapshotInfo, Snapshots

pytest.importorskip("nats")
LATE = PlaneError("snapshot newest was not read within 300 s", fault="timeout")
DAMAGED = SnapshotError("snapshot newest is damaged")


class FakeSnapshots:
    """The snapshots `newest` and `before`, both of page 7; reading fails as configured."""

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        self.failures = dict(failures)
        self.reads: list[str] = []

    async def list_matching(self, partition: int, _: PartitionInfo) -> list[SnapshotInfo]:
        return [SnapshotInfo(name, partition, 0.0, "test", 7, "made", 0, 0) for name in ("newest", "before")]

    async def list_valid(self, _: int) -> list[SnapshotInfo]:
        return []

    async def load(self, info: SnapshotInfo, *_: object) -> tuple[PartitionState, dict[Any, Any]]:
        self.reads.append(info.name)
        if info.name in self.failures:
            raise self.failures[info.name]
        state = PartitionState()
        state.position = info.position
        return state, {}


async def begin_partition(monkeypatch: pytest.MonkeyPatch, snapshots: FakeSnapshots, first: int) -> Any:
    """Return an index build that has begun a partition whose first page is `first`, and has read nothing of it."""

    async def partition_info(*_: object) -> PartitionInfo:
        return PartitionInfo(first, 9, 0, "made", None)

    async def read(*_: object) -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    async def find_reset(_: IndexBuild, __: int, state: PartitionState, ___: PartitionInfo) -> None:
        begun.set()
        raise PlaneError(state.unknown_prefix, fault="missing")

    begun = asyncio.Event()
    monkeypatch.setattr(index_build, "partition_info", partition_info)
    monkeypatch.setattr(IndexBuild, "_read_partition", read)
    monkeypatch.setattr(IndexBuild, "_find_reset", find_reset)
    client: Any = SimpleNamespace(jetstream=lambda: None)
    answering: Snapshots = snapshots  # type: ignore[assignment]
    build = IndexBuild(client, Layout("default", 1), answering, PrefixIndex(), ReaderLimits())
    try:
        while not begun.is_set() and not build.fault:
            await build.advance()
            await asyncio.sleep(0)
    finally:
        await build.end()
    return build


@pytest.mark.parametrize("failure", [LATE, DAMAGED])
def test_an_unreadable_snapshot_is_replaced_by_the_one_before(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    """Otherwise the replica would request it for ever and never answer."""
    snapshots = FakeSnapshots({"newest": failure})
    build = asyncio.run(begin_partition(monkeypatch, snapshots, first=5))
    assert (snapshots.reads, build.loaded_snapshots, build.fault) == (["newest", "before"], {0: "before"}, "")
    assert build.unreadable_snapshots == [str(failure)]
    build.record(SnapshotInfo("newest", 0, 0.0, "test", 7, "made", 0, 0))
    assert build.unreadable_snapshots == [str(failure)]
    build.record(SnapshotInfo("after", 0, 0.0, "test", 9, "made", 0, 0))
    assert build.unreadable_snapshots == []


def test_if_no_snapshot_can_be_read_in_time_the_log_alone_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = FakeSnapshots({"newest": LATE, "before": LATE})
    build = asyncio.run(begin_partition(monkeypatch, snapshots, first=1))
    assert (build.loaded_snapshots, build.fault, build.subscriber.states[0].position) == ({}, "", 0)
    assert build.unreadable_snapshots == [str(LATE)]


def test_if_the_log_alone_is_not_enough_the_missing_pages_are_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The partition stays hidden, and the build begins it again from time to time."""
    snapshots = FakeSnapshots({"newest": LATE, "before": DAMAGED})
    build = asyncio.run(begin_partition(monkeypatch, snapshots, first=5))
    assert build.loaded_snapshots == {}
    assert build.fault == f"pages of partition 0 are missing that no snapshot covers, and {LATE}; {DAMAGED}"


@pytest.mark.parametrize("fault", ["away", "denied"])
def test_a_failure_of_the_servers_does_not_count_as_an_unreadable_snapshot(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    snapshots = FakeSnapshots({"newest": PlaneError("no connection", fault=fault)})
    assert asyncio.run(begin_partition(monkeypatch, snapshots, first=5)).fault == "no connection"
    assert snapshots.reads == ["newest"]
