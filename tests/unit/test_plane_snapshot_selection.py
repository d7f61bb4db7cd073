"""A bridge begins with the newest readable snapshot, and waits only a limited time for one that does not arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvevents.errors import PlaneError
from kvevents_plane import snapshots
from kvevents_plane.layout import Layout, PartitionInfo
from kvevents_plane.partition_state import PartitionState
from kvevents_plane.records import EMPTY_HISTORY
from kvevents_plane.snapshots import VERSION, SnapshotBody, SnapshotInfo, Snapshots

pytest.importorskip("nats")
LAYOUT = Layout("default", 1)
STATE: Any = SimpleNamespace(stream_id="made")


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(snapshots, "CLEANUP_SECONDS", 0.05)


async def hang(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


def snapshot_info(name: str) -> SnapshotInfo:
    return SnapshotInfo(name, 0, 0.0, "test", 7, "made", 0, 0, "", EMPTY_HISTORY.hex())


def encoded_body(position: int) -> bytes:
    state = PartitionState()
    state.position = position
    return msgspec.msgpack.encode(SnapshotBody(VERSION, 0, state.encode(), {}, {}))


def snapshots_with(monkeypatch: pytest.MonkeyPatch, objects: Mapping[str, bytes]) -> Snapshots:
    """Return the snapshots `newest` and `before`. Servers return only these objects and do not answer for others."""

    async def get_info(name: str) -> Any:
        return SimpleNamespace(nuid=name, chunks=1)

    async def get(name: str, **_: object) -> Any:
        if name not in objects:
            await hang()
        return SimpleNamespace(data=objects[name])

    async def list_matching(_: Snapshots, __: int, ___: PartitionInfo) -> list[SnapshotInfo]:
        return [snapshot_info("newest"), snapshot_info("before")]

    monkeypatch.setattr(Snapshots, "list_matching", list_matching)
    return Snapshots(jetstream_with(SimpleNamespace(get=get, get_info=get_info)), LAYOUT)


def jetstream_with(store: Any) -> Any:
    async def object_store(_: str) -> Any:
        return store

    async def stream_info(_: str, *, subjects_filter: str) -> Any:
        return SimpleNamespace(state=SimpleNamespace(subjects={subjects_filter: 1}))

    return SimpleNamespace(object_store=object_store, stream_info=stream_info)


def test_if_the_newest_snapshot_does_not_arrive_the_previous_one_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-py would wait for chunks forever, and the partition would never begin."""
    state = asyncio.run(run_with_timeout(snapshots_with(monkeypatch, {"before.streams": encoded_body(7)}).load_state, 0, STATE))
    assert state is not None
    assert state.position == 7


def test_if_no_snapshot_arrives_in_time_loading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshots might be complete. Without them, a bridge would find pages purged and resubscribe to all streams."""
    with pytest.raises(PlaneError, match="reading the streams of snapshot newest") as caught:
        asyncio.run(run_with_timeout(snapshots_with(monkeypatch, {}).load_state, 0, STATE))
    assert caught.value.fault == "timeout"


def test_a_snapshot_is_saved_even_if_the_servers_do_not_delete_the_old_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The replica that saves it would write no other snapshot while it waits."""

    async def entry(_: Snapshots, __: int) -> tuple[list[SnapshotInfo], int]:
        return [], 0

    async def do_nothing(*_: object) -> None: ...

    async def state(*_: object) -> Any:
        return SimpleNamespace(stream_id="another")

    monkeypatch.setattr(Snapshots, "_read_entry", entry)
    monkeypatch.setattr(Snapshots, "_put_objects", do_nothing)
    monkeypatch.setattr(Snapshots, "_publish_list", do_nothing)
    monkeypatch.setattr(snapshots, "partition_info", state)
    path = tmp_path / "index"
    path.write_bytes(b"index")
    found = Snapshots(jetstream_with(SimpleNamespace(list=hang)), LAYOUT)
    written = asyncio.run(
        run_with_timeout(found.save, msgspec.msgpack.decode(encoded_body(7), type=SnapshotBody), path, 0, "test", "made")
    )
    assert written.position == 7


async def run_with_timeout(work: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
    async with asyncio.timeout(60.0):
        return await work(*arguments)
