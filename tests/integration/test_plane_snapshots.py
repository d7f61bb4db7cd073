"""Snapshots of a plane in the object store of a real NATS server."""

from __future__ import annotations

import asyncio
import base64
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
from kvevents.plane.connection import open_client
from kvevents.plane.layout import create_partition, create_plane, partition_info
from kvevents.plane.partition_state import PartitionState, StreamState
from kvevents.plane.records import StreamKey
from kvevents.plane.settings import PlaneSettings
from kvevents.plane.snapshots import SWEEP_SECONDS, VERSION, SnapshotBody, SnapshotInfo, Snapshots, capture
from kvevents.service.index_build import Snapshotter
from kvevents.service.peers import ConsistencyCheck
from kvevents.stream import Batch, DegradedReason
from nats_servers import nats_server, needs_nats
from plane_cases import plane_at

pytestmark = needs_nats
SMALL = 32 << 10


def test_a_snapshot_is_written_to_servers_that_take_small_messages_only(tmp_path: Path) -> None:
    """Larger than several of them, and the same when it is read back."""
    with nats_server(tmp_path / "nats", max_payload=SMALL) as server:
        index = filled(10_000)
        kept, restored = asyncio.run(there_and_back(plane_at(server.url, partitions=1), index, tmp_path))
    assert kept.bytes > 2 * SMALL
    assert restored.digest("engine") == index.digest("engine")


def filled(blocks: int) -> PrefixIndex:
    index = PrefixIndex()
    hashes = [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(1, blocks + 1)]
    stored = BlockStored(hashes, None, [number % 50_000 for number in range(blocks * 4)], 4)
    index.apply(Batch("engine", 0, 0, 0, 0.0, [stored], replayed=False))
    return index


async def there_and_back(plane: PlaneSettings, index: PrefixIndex, folder: Path) -> tuple[SnapshotInfo, PrefixIndex]:
    async with open_client(plane, name="test") as client:
        js = client.jetstream()
        layout = await create_plane(js, plane)
        path = folder / "index"
        made = (await partition_info(js, layout, 0)).stream_id
        kept = await Snapshots(js, layout).save(capture(0, of(("engine", 0)), {}, index, path), path, 10_000, "test", made)
        restored = PrefixIndex()
        await Snapshots(js, layout).load((await Snapshots(js, layout).list_valid(0))[0], restored, folder)
        return kept, restored


def of(*keys: StreamKey) -> PartitionState:
    """A ledger that knows some streams, and no more of them."""
    state = PartitionState()
    state.streams = {key: StreamState(b"card") for key in keys}
    return state


def test_each_partition_has_snapshots_of_its_own(tmp_path: Path) -> None:
    """One that is added to an index that lives, beside what is there; and one that says something else than it holds is not."""
    with nats_server(tmp_path / "nats") as server:
        asyncio.run(partitions_apart(plane_at(server.url, partitions=2), tmp_path))


async def partitions_apart(plane: PlaneSettings, folder: Path) -> None:
    async with open_client(plane, name="test") as client:
        js = client.jetstream()
        layout = await create_plane(js, plane)
        snapshots, path = Snapshots(js, layout), folder / "index"
        index = filled(100)
        index.apply(Batch("other", 0, 0, 0, 0.0, [BlockStored([7, 8], None, list(range(8)), 4)], replayed=False))
        doubts = {("engine", 0): frozenset({DegradedReason.LOST}), ("other", 0): frozenset({DegradedReason.REJECTED})}
        for partition, name in enumerate(("engine", "other")):
            made = (await partition_info(js, layout, partition)).stream_id
            await snapshots.save(capture(partition, of((name, 0)), doubts, index, path), path, 0, "test", made)
        restored = PrefixIndex()
        for partition, name in ((1, "other"), (0, "engine")):
            kept = await snapshots.list_valid(partition)
            state, found = await snapshots.load(kept[0], restored, folder)
            assert list(state.streams) == [(name, 0)]
            assert found == {(name, 0): doubts[name, 0]}
            assert restored.digest(name) == index.digest(name)
        lying = capture(0, of(("engine", 0)), {}, index, path)
        lying.digests = [("engine", 0, index.digest("other"))]
        kept_lie = await snapshots.save(lying, path, 0, "test", (await partition_info(js, layout, 0)).stream_id)
        empty = PrefixIndex()
        with pytest.raises(SnapshotError, match="does not have its digests"):
            await snapshots.load(kept_lie, empty, folder)
        assert (empty.stats().blocks, empty.workers()) == (0, [])


@pytest.mark.parametrize("suffix", ["index", "streams"])
@pytest.mark.parametrize("damage", ["all chunks", "the last chunk", "a chunk within", "other bytes", "its description"])
def test_a_snapshot_that_the_servers_have_lost_a_part_of_is_damaged(tmp_path: Path, suffix: str, damage: str) -> None:
    """At once, though nats-py waits without end for a chunk that does not come; a reader takes the one before."""
    with nats_server(tmp_path / "nats", max_payload=SMALL) as server:
        assert asyncio.run(damaged(plane_at(server.url, partitions=1), tmp_path / "index", suffix, damage))


async def damaged(plane: PlaneSettings, path: Path, suffix: str, damage: str) -> bool:
    """Of two snapshots the newest is damaged. Returns whether the one before is as it was."""
    async with open_client(plane, name="test") as client, asyncio.timeout(10.0):
        js = client.jetstream()
        layout = await create_plane(js, plane)
        snapshots, index = Snapshots(js, layout), filled(10_000)
        taken = capture(0, of(("engine", 0), *((f"idle-{number}", 0) for number in range(4_000))), {}, index, path)
        made = (await partition_info(js, layout, 0)).stream_id
        older, newest = [await snapshots.save(taken, path, 0, "test", made) for _ in range(2)]
        await spoil(js, layout.snapshots, f"{newest.name}.{suffix}", damage)
        assert await snapshots.is_complete(newest) == (damage == "other bytes")
        empty = PrefixIndex()
        with pytest.raises(SnapshotError, match=newest.name):
            await snapshots.load(newest, empty, path.parent)
        if suffix == "streams":
            with pytest.raises(SnapshotError, match=newest.name):
                await snapshots.load_body(newest)
        assert empty.workers() == []
        assert await snapshots.is_complete(older)
        await snapshots.load(older, empty, path.parent)
        return empty.digest("engine") == index.digest("engine")


async def spoil(js: JetStreamContext, bucket: str, name: str, damage: str) -> None:
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


def test_pages_of_a_recreated_partition_are_not_purged_for_snapshots_of_the_one_before(tmp_path: Path) -> None:
    """A replica that has not noticed yet takes snapshots of the partition that is gone; the new one's pages are in none of
    them."""
    with nats_server(tmp_path / "nats") as server:
        first = asyncio.run(first_page_of_the_second_life(plane_at(server.url, partitions=1), tmp_path / "index"))
    assert first == [3, 1]


async def first_page_of_the_second_life(plane: PlaneSettings, path: Path) -> list[int]:
    """The first page after two snapshots that end with page 2, and the same after another life of the partition."""
    filled(1).snapshot(path)
    found = []
    async with open_client(plane, name="test") as client:
        js = client.jetstream()
        layout = await create_plane(js, plane)
        state = PartitionState()
        state.position = 2
        taken = SnapshotBody(VERSION, 0, state.encode(), [], [])
        made = (await partition_info(js, layout, 0)).stream_id
        for _ in range(2):
            for _ in range(3):
                await js.publish(layout.subject(0), b"page")
            for _ in range(2):
                await Snapshots(js, layout).save(taken, path, 1, "test", made)
            found.append((await partition_info(js, layout, 0)).first)
            await js.delete_stream(layout.stream(0))
            await create_partition(js, layout, 0, plane)
    return found


class Clock:
    """One that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_taker_whose_clock_is_ahead_does_not_keep_others_from_taking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is new for as long as it was seen unchanged, by the clock of the process that looks."""

    async def main() -> None:
        async with open_client(plane_at(server.url, partitions=1), name="test") as client:
            js = client.jetstream()
            layout = await create_plane(js, plane_at(server.url, partitions=1))
            made = (await partition_info(js, layout, 0)).stream_id
            clock, path = Clock(), tmp_path / "index"
            ours, taking = Snapshots(js, layout, clock), Snapshotter("good", ConsistencyCheck("good", 20.0), 60.0)
            generation: Any = SimpleNamespace(record=id)
            assert not await taking._is_fresh(0, ours, generation)
            filled(1).snapshot(path)
            with monkeypatch.context() as ahead:
                ahead.setattr(time, "time", lambda: 1e11)
                kept = await Snapshots(js, layout).save(
                    SnapshotBody(VERSION, 0, PartitionState().encode(), [], []), path, 1, "ahead", made
                )
            assert kept.taken_at == 1e11
            assert await taking._is_fresh(0, ours, generation)
            clock.now += 59
            assert not await taking._is_fresh(0, ours, generation)
            assert ours.newest_age(0) == 59

    with nats_server(tmp_path / "nats") as server:
        asyncio.run(main())


def test_objects_that_no_entry_names_are_removed_after_a_while(tmp_path: Path) -> None:
    """By the clock of the process that removes them, from when it has seen them: one may be written at this moment."""

    async def main() -> list[set[str]]:
        async with open_client(plane_at(server.url, partitions=1), name="test") as client:
            js = client.jetstream()
            layout = await create_plane(js, plane_at(server.url, partitions=1))
            made = (await partition_info(js, layout, 0)).stream_id
            clock, path = Clock(), tmp_path / "index"
            filled(1).snapshot(path)
            store = await js.object_store(layout.snapshots)
            await store.put("0-1-left.index", b"left by one that was killed")
            half = f"$O.{layout.snapshots}.C.half"
            await js.publish(half, b"left by one that was killed earlier")
            ours, found = Snapshots(js, layout, clock), []
            for _ in range(2):
                await ours.save(SnapshotBody(VERSION, 0, PartitionState().encode(), [], []), path, 1, "test", made)
                chunks = (await js.stream_info(f"OBJ_{layout.snapshots}", subjects_filter=half)).state.subjects or {}
                found.append({*chunks, *(str(info.name) for info in await store.list(ignore_deletes=True))})
                clock.now += SWEEP_SECONDS + 1
            return found

    with nats_server(tmp_path / "nats") as server:
        first, second = asyncio.run(main())
    assert len(first) == 4
    assert "0-1-left.index" in first
    assert len(second) == 4
    assert all(name.endswith((".index", ".streams")) and "left" not in name for name in second)


def test_a_snapshot_makes_room_in_a_full_bucket(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The older of the two that count gives way, and so do the pages up to the newest. Without any there is a plain error."""
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
            made, snapshots, state = (await partition_info(js, layout, 0)).stream_id, Snapshots(js, layout), PartitionState()

            async def take_one() -> SnapshotInfo:
                state.position = (await partition_info(js, layout, 0)).last
                return await snapshots.save(SnapshotBody(VERSION, 0, state.encode(), [], []), large, 1, "test", made)

            await fill(js, layout.subject(0), 4)
            for _ in range(2):
                await take_one()
            await fill(js, layout.subject(0), 20)
            third = await take_one()
            info = await partition_info(js, layout, 0)
            assert (await snapshots.matching(0, info))[0] == third
            assert "deleting the older snapshot" in caplog.text
            large.write_bytes(bytes(4 * size))
            with pytest.raises(PlaneError, match="is full: raise its limit or free space") as caught:
                await take_one()
            assert caught.value.fault == "full"
            assert (await snapshots.list_valid(0))[0].name == third.name

    large.write_bytes(bytes(size))
    with nats_server(tmp_path / "nats", jetstream={"max_file": 28 << 20}) as server:
        asyncio.run(main())
