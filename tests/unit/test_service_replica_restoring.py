"""The state with which an index build begins a partition: the newest readable snapshot, in bounded time, or the log alone."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from kvevents.errors import PlaneError, SnapshotError
from kvevents.index import PrefixIndex
from kvevents.plane.layout import Layout, PartitionInfo
from kvevents.plane.partition_state import PartitionState
from kvevents.plane.snapshots import SnapshotInfo, Snapshots
from kvevents.service import index_build
from kvevents.service.index_build import IndexBuild

pytest.importorskip("nats")
LATE = PlaneError("snapshot newest was not read within 300 s", fault="timeout")
DAMAGED = SnapshotError("snapshot newest is damaged")


class FakeSnapshots:
    """The snapshots `newest` and `before`, both of page 7; reading them fails as configured."""

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        self.failures = dict(failures)
        self.reads: list[str] = []

    async def matching(self, partition: int, _: PartitionInfo) -> list[SnapshotInfo]:
        return [SnapshotInfo(name, partition, 0.0, "test", 7, "made", 0, 0) for name in ("newest", "before")]

    async def load(self, kept: SnapshotInfo, *_: object) -> tuple[PartitionState, dict[Any, Any]]:
        self.reads.append(kept.name)
        if kept.name in self.failures:
            raise self.failures[kept.name]
        state = PartitionState()
        state.position = kept.position
        return state, {}


async def begun(
    monkeypatch: pytest.MonkeyPatch, snapshots: FakeSnapshots, first: int, partitions: Collection[int] = (0,)
) -> Any:
    """A index_build that has begun partitions whose first page is `first`, and has read nothing of them."""
    state: Any = SimpleNamespace(stream_id="made", first=first, last=9)

    async def partition_info(*_: object) -> Any:
        return state

    async def read(*_: object) -> None: ...

    monkeypatch.setattr(index_build, "partition_info", partition_info)
    monkeypatch.setattr(IndexBuild, "_read", read)
    client: Any = SimpleNamespace(jetstream=lambda: None)
    answering: Snapshots = snapshots  # type: ignore[assignment]
    made = IndexBuild(client, Layout("default", 1), answering, PrefixIndex())
    try:
        await made.adjust(partitions, ())
    finally:
        await made.end()
    return made


@pytest.mark.parametrize("failure", [LATE, DAMAGED])
def test_a_snapshot_that_cannot_be_read_gives_way_to_the_one_before(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """It would be asked for again and again otherwise, and the replica never answer."""
    snapshots = FakeSnapshots({"newest": failure})
    made = asyncio.run(begun(monkeypatch, snapshots, first=5))
    assert (snapshots.reads, made.loaded_snapshots, made.missing_pages) == (["newest", "before"], {0: "before"}, "")
    assert made.unreadable_snapshots == [str(failure)]
    made.record(SnapshotInfo("newest", 0, 0.0, "test", 7, "made", 0, 0))
    assert made.unreadable_snapshots == [str(failure)]
    made.record(SnapshotInfo("after", 0, 0.0, "test", 9, "made", 0, 0))
    assert made.unreadable_snapshots == []


def test_where_none_can_be_read_in_time_the_log_alone_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = FakeSnapshots({"newest": LATE, "before": LATE})
    made = asyncio.run(begun(monkeypatch, snapshots, first=1))
    assert (made.loaded_snapshots, made.missing_pages, made.subscriber.states[0].position) == ({}, "", 0)
    assert made.unreadable_snapshots == [str(LATE)]


def test_where_the_log_alone_is_not_enough_the_hole_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The partition stays hidden, and is begun again from time to time."""
    snapshots = FakeSnapshots({"newest": LATE, "before": DAMAGED})
    made = asyncio.run(begun(monkeypatch, snapshots, first=5))
    assert made.loaded_snapshots == {}
    assert made.missing_pages == f"pages of partition 0 are missing that no snapshot covers, and {LATE}; {DAMAGED}"


@pytest.mark.parametrize("fault", ["away", "denied"])
def test_servers_that_answer_nothing_at_all_are_no_fault_of_a_snapshot(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    snapshots = FakeSnapshots({"newest": PlaneError("no connection", fault=fault)})
    with pytest.raises(PlaneError, match="no connection"):
        asyncio.run(begun(monkeypatch, snapshots, first=5))
    assert snapshots.reads == ["newest"]
