"""The snapshot with which a bridge begins: the newest readable one, without an endless wait for an unreadable one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvevents.errors import PlaneError
from kvevents.plane import snapshots
from kvevents.plane.layout import Layout, PartitionInfo
from kvevents.plane.partition_state import PartitionState
from kvevents.plane.snapshots import VERSION, SnapshotBody, SnapshotInfo, Snapshots, SnapshotTimers

pytest.importorskip("nats")
LAYOUT = Layout("default", 1)
STATE: Any = SimpleNamespace(stream_id="made")


TIMERS = SnapshotTimers(body_seconds=0.05, cleanup_seconds=0.05)


async def hang(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


def kept(name: str) -> SnapshotInfo:
    return SnapshotInfo(name, 0, 0.0, "test", 7, "made", 0, 0)


def taken(position: int) -> bytes:
    state = PartitionState()
    state.position = position
    return msgspec.msgpack.encode(SnapshotBody(VERSION, 0, state.encode(), [], []))


def recall(monkeypatch: pytest.MonkeyPatch, objects: Mapping[str, bytes]) -> Snapshots:
    """Of two snapshots, whose objects are answered with these; servers say nothing of others."""

    async def get_info(name: str) -> Any:
        return SimpleNamespace(nuid=name, chunks=1)

    async def get(name: str, **_: object) -> Any:
        if name not in objects:
            await hang()
        return SimpleNamespace(data=objects[name])

    async def matching(_: Snapshots, __: int, ___: PartitionInfo) -> list[SnapshotInfo]:
        return [kept("newest"), kept("before")]

    monkeypatch.setattr(Snapshots, "matching", matching)
    return Snapshots(js_with(SimpleNamespace(get=get, get_info=get_info)), LAYOUT, timers=TIMERS)


def js_with(store: Any) -> Any:
    async def object_store(_: str) -> Any:
        return store

    async def stream_info(_: str, *, subjects_filter: str) -> Any:
        return SimpleNamespace(state=SimpleNamespace(subjects={subjects_filter: 1}))

    return SimpleNamespace(object_store=object_store, stream_info=stream_info)


def test_a_snapshot_that_does_not_come_gives_way_to_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-py waits for chunks without end, and the partition would never begin."""
    state = asyncio.run(within(recall(monkeypatch, {"before.streams": taken(7)}).load_state, 0, STATE))
    assert state is not None
    assert state.position == 7


def test_a_partition_without_snapshots_in_time_does_not_begin_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be complete: without them, a bridge would find pages purged and resubscribe to all streams."""
    with pytest.raises(PlaneError, match="reading the streams of snapshot newest") as caught:
        asyncio.run(within(recall(monkeypatch, {}).load_state, 0, STATE))
    assert caught.value.fault == "timeout"


def test_a_snapshot_is_taken_though_the_servers_do_not_remove_what_it_replaces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Its taker has the partition's lease until then."""

    async def entry(_: Snapshots, __: int) -> tuple[list[SnapshotInfo], int]:
        return [], 0

    async def nothing(*_: object) -> None: ...

    async def state(*_: object) -> Any:
        return SimpleNamespace(stream_id="another")

    monkeypatch.setattr(Snapshots, "_entry", entry)
    monkeypatch.setattr(Snapshots, "_put", nothing)
    monkeypatch.setattr(Snapshots, "_publish_list", nothing)
    monkeypatch.setattr(snapshots, "partition_info", state)
    path = tmp_path / "index"
    path.write_bytes(b"index")
    found = Snapshots(js_with(SimpleNamespace(list=hang)), LAYOUT, timers=TIMERS)
    written = asyncio.run(within(found.save, msgspec.msgpack.decode(taken(7), type=SnapshotBody), path, 0, "test", "made"))
    assert written.position == 7


async def within(work: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
    async with asyncio.timeout(5.0):
        return await work(*arguments)
