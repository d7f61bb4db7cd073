"""Tests of snapshots of a plane in the object store of a real NATS server."""

from __future__ import annotations

import asyncio
import base64
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from nats.js import JetStreamContext

from kvevents.errors import PlaneError, SnapshotError
from kvevents.events import BlockStored
from kvevents.index import PrefixIndex
from kvevents.stream import Batch, DegradedReason
from kvevents_plane.connection import open_client
from kvevents_plane.digests import ConsistencyCheck
from kvevents_plane.layout import create_partition, create_plane, partition_info
from kvevents_plane.partition_state import PartitionState, StreamState
from kvevents_plane.records import StreamKey
from kvevents_plane.replica.build import Snapshotter
from kvevents_plane.settings import PlaneSettings
from kvevents_plane.snapshots import SWEEP_SECONDS, VERSION, SnapshotBody, SnapshotInfo, Snapshots, capture
from nats_cases import needs_nats
from plane_cases import plane_at
from tools.nats_servers import nats_server

pytestmark = needs_nats
SMALL = 32 << 10


def test_a_snapshot_is_split_for_servers_that_accept_only_small_messages(tmp_path: Path) -> None:
    """The snapshot is larger than several messages, and equal when it is loaded."""
    with nats_server(tmp_path / "nats", max_payload=SMALL) as server:
        index = fill_index(10_000)
        saved, restored = asyncio.run(save_and_load(plane_at(server.url, partitions=1), index, tmp_path))
    assert saved.bytes > 2 * SMALL
    assert restored.digest("engine") == index.digest("engine")


def fill_index(blocks: int) -> PrefixIndex:
    index = PrefixIndex()
    hashes = [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(1, blocks + 1)]
    stored = BlockStored(hashes, None, [number % 50_000 for number in range(blocks * 4)], 4)
    index.apply(Batch("engine", 0, 0, 0, 0.0, [stored], replayed=False))
    return index


async def save_and_load(plane: PlaneSettings, index: PrefixIndex, folder: Path) -> tuple[SnapshotInfo, PrefixIndex]:
    async with open_client(plane, name="test") as client:
        js = client.jetstream()
        layout = await create_plane(js, plane)
        path = folder / "index"
        created_id = (await partition_info(js, layout, 0)).stream_id
        saved = await Snapshots(js, layout).save(
            capture(0, state_of(("engine", 0)), {}, index, path), path, 10_000, "test", created_id
        )
        restored = PrefixIndex()
        await Snapshots(js, layout).load((await Snapshots(js, layout).list_valid(0))[0], restored)
        return saved, restored


def state_of(*keys: StreamKey) -> PartitionState:
    """Return the state of a partition with these streams."""
    state = PartitionState()
    state.streams = {key: StreamState(b"card") for key in keys}
    return state


def test_each_partition_has_its_own_snapshots(tmp_path: Path) -> None:
    """A snapshot can be loaded into an index with other streams. A snapshot whose digests do not match its content is refused
    and changes nothing."""
    with nats_server(tmp_path / "nats") as server:
        asyncio.run(use_two_partitions(plane_at(server.url, partitions=2), tmp_path))


async def use_two_partitions(plane: PlaneSettings, folder: Path) -> None:
    async with open_client(plane, name="test") as client:
        js = client.jetstream()
        layout = await create_plane(js, plane)
        snapshots, path = Snapshots(js, layout), folder / "index"
        index = fill_index(100)
        index.apply(Batch("other", 0, 0, 0, 0.0, [BlockStored([7, 8], None, list(range(8)), 4)], replayed=False))
        degraded_reasons = {("engine", 0): frozenset({DegradedReason.LOST}), ("other", 0): frozenset({DegradedReason.REJECTED})}
        for partition, name in enumerate(("engine", "other")):
            created_id = (await partition_info(js, layout, partition)).stream_id
            await snapshots.save(
                capture(partition, state_of((name, 0)), degraded_reasons, index, path), path, 0, "test", created_id
            )
        restored = PrefixIndex()
        for partition, name in ((1, "other"), (0, "engine")):
            saved = await snapshots.list_valid(partition)
            state, found = await snapshots.load(saved[0], restored)
            assert list(state.streams) == [(name, 0)]
            assert found == {(name, 0): degraded_reasons[name, 0]}
            assert restored.digest(name) == index.digest(name)
        forged = capture(0, state_of(("engine", 0)), {}, index, path)
        forged.digests = {("engine", 0): index.digest("other")}
        saved_forgery = await snapshots.save(forged, path, 0, "test", (await partition_info(js, layout, 0)).stream_id)
        empty = PrefixIndex()
        with pytest.raises(SnapshotError, match="does not have its digests"):
            await snapshots.load(saved_forgery, empty)
        assert (empty.stats().blocks, empty.workers()) == (0, [])


def test_objects_of_another_partition_are_refused(tmp_path: Path) -> None:
    """An operator can restore or copy objects by hand. A replica would read such a snapshot again and again."""
    with nats_server(tmp_path / "nats") as server:
        asyncio.run(swap_objects(plane_at(server.url, partitions=2), tmp_path / "index"))


async def swap_objects(plane: PlaneSettings, path: Path) -> None:
    async with open_client(plane, name="test") as client:
        js = client.jetstream()
        layout = await create_plane(js, plane)
        snapshots, index = Snapshots(js, layout), fill_index(100)
        saved = []
        for partition in (0, 1):
            info, body = (
                await partition_info(js, layout, partition),
                capture(partition, state_of(("engine", 0)), {}, index, path),
            )
            saved.append(await snapshots.save(body, path, 100, "test", info.stream_id))
        store = await js.object_store(layout.snapshots)
        for suffix in ("streams", "index"):
            await store.put(f"{saved[0].name}.{suffix}", (await store.get(f"{saved[1].name}.{suffix}")).data or b"")
        empty = PrefixIndex()
        with pytest.raises(SnapshotError, match=f"{saved[0].name}.*has page 0 of partition 1 instead of page 0 of partition 0"):
            await snapshots.load(saved[0], empty)
        assert empty.workers() == []
        assert await snapshots.load_state(0, await partition_info(js, layout, 0)) is None


def test_a_snapshot_without_room_for_its_file_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica goes on, and tries again."""
    with nats_server(tmp_path / "nats") as server:
        asyncio.run(load_without_folder(plane_at(server.url, partitions=1), tmp_path / "index", monkeypatch))


async def load_without_folder(plane: PlaneSettings, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_client(plane, name="test") as client:
        js = client.jetstream()
        layout = await create_plane(js, plane)
        snapshots, index = Snapshots(js, layout), fill_index(100)
        info = await partition_info(js, layout, 0)
        saved = await snapshots.save(capture(0, state_of(("engine", 0)), {}, index, path), path, 100, "test", info.stream_id)
        monkeypatch.setattr(tempfile, "tempdir", str(path.parent / "absent"))
        with pytest.raises(PlaneError, match="cannot create a temporary file: No such file or directory; set TMPDIR"):
            await snapshots.load(saved, PrefixIndex())


@pytest.mark.parametrize("suffix", ["index", "streams"])
@pytest.mark.parametrize("damage", ["all chunks", "the last chunk", "a chunk within", "other bytes", "its description"])
def test_a_snapshot_with_missing_or_changed_parts_is_refused(tmp_path: Path, suffix: str, damage: str) -> None:
    """The error is raised at once, although nats-py waits without end for a missing chunk. A reader then loads the previous
    snapshot."""
    with nats_server(tmp_path / "nats", max_payload=SMALL) as server:
        assert asyncio.run(damage_and_load(plane_at(server.url, partitions=1), tmp_path / "index", suffix, damage))


async def damage_and_load(plane: PlaneSettings, path: Path, suffix: str, damage: str) -> bool:
    """Damage the newer of two snapshots, and return whether the older one can still be loaded."""
    async with open_client(plane, name="test") as client, asyncio.timeout(60.0):
        js = client.jetstream()
        layout = await create_plane(js, plane)
        snapshots, index = Snapshots(js, layout), fill_index(10_000)
        body = capture(0, state_of(("engine", 0), *((f"idle-{number}", 0) for number in range(4_000))), {}, index, path)
        created_id = (await partition_info(js, layout, 0)).stream_id
        older, newest = [await snapshots.save(body, path, 0, "test", created_id) for _ in range(2)]
        await damage_object(js, layout.snapshots, f"{newest.name}.{suffix}", damage)
        empty = PrefixIndex()
        with pytest.raises(SnapshotError, match=newest.name):
            await snapshots.load(newest, empty)
        if suffix == "streams":
            with pytest.raises(SnapshotError, match=newest.name):
                await snapshots.load_body(newest)
        assert empty.workers() == []
        await snapshots.load(older, empty)
        return empty.digest("engine") == index.digest("engine")


async def damage_object(js: JetStreamContext, bucket: str, name: str, damage: str) -> None:
    store, stream = await js.object_store(bucket), f"OBJ_{bucket}"
    info = await store.get_info(name)
    subject = f"$O.{bucket}.C.{info.nuid}"
    last = await js.get_last_msg(stream, subject)
    assert last.seq is not None
    assert info.chunks is not None
    assert info.chunks > 1
    if damage == "all chunks":
        await js.purge_stream(stream, subject=subject)
    elif damage == "the last chunk":
        await js.delete_msg(stream, last.seq)
    elif damage == "a chunk within":
        await js.delete_msg(stream, last.seq - 1)
    elif damage == "other bytes":
        await js.delete_msg(stream, last.seq)
        await js.publish(subject, bytes(reversed(last.data or b"")))
    else:
        meta = f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"
        await js.publish(meta, b"no description", headers={"Nats-Rollup": "sub"})


def test_snapshots_of_a_deleted_partition_do_not_purge_pages_of_the_recreated_one(tmp_path: Path) -> None:
    """A replica that has not noticed the change writes snapshots of the deleted partition; they do not contain the pages of the
    new one."""
    with nats_server(tmp_path / "nats") as server:
        first = asyncio.run(read_first_pages(plane_at(server.url, partitions=1), tmp_path / "index"))
    assert first == [3, 1]


async def read_first_pages(plane: PlaneSettings, path: Path) -> list[int]:
    """Return the first page after two snapshots that end with page 2, and the same after the partition was created again."""
    fill_index(1).snapshot(path)
    found = []
    async with open_client(plane, name="test") as client:
        js = client.jetstream()
        layout = await create_plane(js, plane)
        state = PartitionState()
        state.position = 2
        body = SnapshotBody(VERSION, 0, state.encode(), {}, {})
        created_id = (await partition_info(js, layout, 0)).stream_id
        for _ in range(2):
            for _ in range(3):
                await js.publish(layout.subject(0), b"page")
            for _ in range(2):
                await Snapshots(js, layout).save(body, path, 1, "test", created_id)
            found.append((await partition_info(js, layout, 0)).first)
            await js.delete_stream(layout.stream(0))
            await create_partition(js, layout, 0, plane)
    return found


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_snapshot_from_a_clock_that_is_ahead_does_not_prevent_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot is fresh for a time that counts from when it was first seen, by the clock of the process that looks."""

    async def main() -> None:
        async with open_client(plane_at(server.url, partitions=1), name="test") as client:
            js = client.jetstream()
            layout = await create_plane(js, plane_at(server.url, partitions=1))
            created_id = (await partition_info(js, layout, 0)).stream_id
            clock, path = Clock(), tmp_path / "index"
            snapshots_with_clock, snapshotter = (
                Snapshots(js, layout, clock),
                Snapshotter("good", ConsistencyCheck("good", 20.0), 60.0),
            )
            generation: Any = SimpleNamespace(record=id, newest={})
            assert not await snapshotter._is_new_enough(0, snapshots_with_clock, generation)
            fill_index(1).snapshot(path)
            with monkeypatch.context() as ahead:
                ahead.setattr(time, "time", lambda: 1e11)
                saved = await Snapshots(js, layout).save(
                    SnapshotBody(VERSION, 0, PartitionState().encode(), {}, {}), path, 1, "ahead", created_id
                )
            assert saved.taken_at == 1e11
            assert await snapshotter._is_new_enough(0, snapshots_with_clock, generation)
            clock.now += 59
            assert not await snapshotter._is_new_enough(0, snapshots_with_clock, generation)
            assert snapshots_with_clock.newest_age(0) == 59

    with nats_server(tmp_path / "nats") as server:
        asyncio.run(main())


def test_objects_without_an_entry_are_removed_after_a_while(tmp_path: Path) -> None:
    """The time counts from when a process first sees the object, by its own clock: another process may be writing the object at
    this moment."""

    async def main() -> list[set[str]]:
        async with open_client(plane_at(server.url, partitions=1), name="test") as client:
            js = client.jetstream()
            layout = await create_plane(js, plane_at(server.url, partitions=1))
            created_id = (await partition_info(js, layout, 0)).stream_id
            clock, path = Clock(), tmp_path / "index"
            fill_index(1).snapshot(path)
            store = await js.object_store(layout.snapshots)
            await store.put("0-1-left.index", b"left by one that was killed")
            subject_of_chunk = f"$O.{layout.snapshots}.C.half"
            await js.publish(subject_of_chunk, b"left by one that was killed earlier")
            snapshots_with_clock, found = Snapshots(js, layout, clock), []
            for _ in range(2):
                await snapshots_with_clock.save(
                    SnapshotBody(VERSION, 0, PartitionState().encode(), {}, {}), path, 1, "test", created_id
                )
                chunks = (
                    await js.stream_info(f"OBJ_{layout.snapshots}", subjects_filter=subject_of_chunk)
                ).state.subjects or {}
                found.append({*chunks, *(str(info.name) for info in await store.list(ignore_deletes=True))})
                clock.now += SWEEP_SECONDS + 1
            return found

    with nats_server(tmp_path / "nats") as server:
        first, second = asyncio.run(main())
    assert len(first) == 4
    assert "0-1-left.index" in first
    assert len(second) == 4
    assert all(name.endswith((".index", ".streams")) and "left" not in name for name in second)


def test_saving_into_a_full_bucket_deletes_an_older_snapshot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The older of the two current snapshots is deleted, and pages up to the newest snapshot are purged. Without anything to
    delete an error is raised."""
    large, size = tmp_path / "index", 8 << 20

    async def fill(js: JetStreamContext, subject: str, pages: int) -> None:
        for _ in range(pages):
            await js.publish(subject, bytes(512 << 10))

    async def main() -> None:
        plane = plane_at(server.url, partitions=1)
        plane = msgspec.structs.replace(plane, partition_bytes=24 << 20)
        async with open_client(plane, name="test") as client:
            js = client.jetstream()
            layout = await create_plane(js, plane)
            created_id, snapshots, state = (
                (await partition_info(js, layout, 0)).stream_id,
                Snapshots(js, layout),
                PartitionState(),
            )

            async def save_snapshot() -> SnapshotInfo:
                state.position = (await partition_info(js, layout, 0)).last
                return await snapshots.save(SnapshotBody(VERSION, 0, state.encode(), {}, {}), large, 1, "test", created_id)

            await fill(js, layout.subject(0), 4)
            for _ in range(2):
                await save_snapshot()
            await fill(js, layout.subject(0), 20)
            third = await save_snapshot()
            info = await partition_info(js, layout, 0)
            assert (await snapshots.list_matching(0, info))[0] == third
            assert "deleting the older snapshot" in caplog.text
            large.write_bytes(bytes(4 * size))
            with pytest.raises(PlaneError, match="is full: raise its limit or free space") as caught:
                await save_snapshot()
            assert caught.value.fault == "full"
            assert (await snapshots.list_valid(0))[0].name == third.name

    large.write_bytes(bytes(size))
    with nats_server(tmp_path / "nats", jetstream={"max_file": 28 << 20}) as server:
        asyncio.run(main())
