"""Bridges whose servers are killed, stopped, full or without a stream: nothing is lost, and the status names the fault."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from nats.js import JetStreamContext

from bridge_cases import TalkingEngine, holds, numbers_of_last_life, reports_by_bridge, settled, with_js
from kvevents.errors import PlaneError
from kvevents.plane.bridge import Bridge, BridgeSettings, PartitionStatus
from kvevents.plane.layout import Layout, create_plane, find_plane, partition_info
from kvevents.plane.records import ResetRecord
from kvevents.plane.replicas import DIGEST_PREFIX, PartitionDigest, ReplicaDigests
from kvevents.plane.settings import PlaneSettings
from kvevents.plane.snapshots import Snapshots, capture
from kvevents.stream import Gap, Reset
from nats_servers import NatsCluster, NatsServer, nats_cluster, nats_server, needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import SECONDS, Log, Running, bridging, plane_at
from publisher_cases import batch
from service_cases import until

pytestmark = needs_nats
PARTITION_BYTES = 1 << 20


@pytest.fixture(name="plane")
def plane_of_its_own(server: NatsServer, request: pytest.FixtureRequest) -> PlaneSettings:
    return plane_at(server.url, name=f"t{abs(hash(request.node.name))}")


def partition_of(bridge: Bridge, name: str = "engine") -> PartitionStatus:
    partitions = bridge.status().partitions
    return partitions[Layout("", len(partitions)).partition_of(name)]


def say_large(engine: TalkingEngine, size: int, count: int) -> None:
    """So many batches of a size. The engine does not wait for readers: the tests make room only after this has returned."""
    for number in range(count):
        large = batch(number, size // 64)
        engine.truth.add(large)
        engine.publisher.publish(large)


# --- servers that come and go


def test_a_server_that_is_killed_and_comes_back_loses_nothing(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server, TalkingEngine() as engine:
        plane = plane_at(server.url)
        with bridging(plane, engine.watch, name="a") as one, bridging(plane, engine.watch, name="b") as two:
            log = Log(plane)
            with engine.talking():
                for _ in range(2):
                    before = engine.truth.count
                    log.until("some of it", lambda log, before=before: len(log.numbers()) > before)
                    server.kill()
                    until("the report", lambda: not (one.status().connected or two.status().connected), SECONDS)
                    until("a fault", lambda: partition_of(one).fault and partition_of(two).fault, SECONDS)
                    server.start()
            settled(log, engine)
            until("all well", lambda: not partition_of(one).fault and not partition_of(two).fault, SECONDS)
        assert log.numbers() == list(range(engine.truth.count))


def test_a_server_that_loses_pages_it_has_acknowledged_is_written_again(tmp_path: Path) -> None:
    """As after a power cut: its disk holds an older state. New readers find an engine that joined since then."""
    with nats_server(tmp_path) as server, TalkingEngine("old") as old, TalkingEngine("new") as new:
        plane = plane_at(server.url, partitions=1)
        with bridging(plane, old.watch, name="a"):
            old.say(20)
            settled(Log(plane), old)
            server.stop()
            shutil.copytree(server.store, tmp_path / "older")
            server.start()
            with bridging(plane, old.watch, new.watch, name="b"):
                old.say(20)
                new.say(20)
                settled(settled(Log(plane), old), new)
                server.kill()
                shutil.rmtree(server.store)
                shutil.move(tmp_path / "older", server.store)
                server.start()
                for _ in range(2):
                    for engine in (old, new):
                        engine.say(20)
                        assert settled(Log(plane), engine).flaws == (0, 0)


def test_buckets_that_are_gone_are_made_again(plane: PlaneSettings) -> None:
    """An operator has deleted them, or servers have lost their newest data: replicas need them."""

    async def remove(js: JetStreamContext) -> None:
        for name in streams:
            await js.delete_stream(name)

    async def found(js: JetStreamContext) -> bool:
        return {*streams} <= {info.config.name for info in await js.streams_info()}

    layout = Layout(plane.name, plane.partitions)
    streams = (f"KV_{layout.bucket}", f"KV_{layout.leases}", f"OBJ_{layout.snapshots}")
    with bridging(plane, unreadable_seconds=0.2):
        assert with_js(plane, found)
        with_js(plane, remove)
        until("the buckets", lambda: with_js(plane, found), SECONDS)


def test_a_server_that_stops_for_a_while_loses_nothing(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server, TalkingEngine() as engine:
        plane = plane_at(server.url)
        with bridging(plane, engine.watch, name="a") as one, bridging(plane, engine.watch, name="b"):
            log = Log(plane)
            with engine.talking():
                log.until("some of it", lambda log: len(log.numbers()) > 50)
                server.pause()
                until("a fault", lambda: partition_of(one).fault, SECONDS)
                server.resume()
                until("no fault", lambda: not partition_of(one).fault, SECONDS)
            settled(log, engine)
        assert log.numbers() == list(range(engine.truth.count))


def test_a_cluster_whose_leader_is_killed_again_and_again_loses_nothing(tmp_path: Path) -> None:
    with nats_cluster(tmp_path) as cluster, TalkingEngine() as engine:
        for name in ("p1", "p2"):
            # Several that begin at once make one plane, though streams without a leader do not answer at first.
            begun = [Running(Bridge(BridgeSettings(plane=plane_of(cluster, name), name=each))) for each in "abc"]
            until("all of them", partial(are_ready, begun), SECONDS)
            for running in begun:
                running.end()
        plane = plane_of(cluster, "default", partitions=1)
        with bridging(plane, engine.watch, name="a") as one, bridging(plane, engine.watch, name="b") as two:
            log = Log(plane)
            with engine.talking():
                for _ in range(2):
                    leader = cluster.leader_of(log.layout.stream(0))
                    written = one.status().written + two.status().written
                    cluster.kill(leader)
                    until("batches", lambda: one.status().written + two.status().written > written + 50, SECONDS)  # noqa: B023
                    cluster.restart(leader)
                    cluster.settle()
            settled(log, engine)
        assert log.numbers() == list(range(engine.truth.count))


def plane_of(cluster: NatsCluster, name: str, partitions: int = 2) -> PlaneSettings:
    return plane_at(*cluster.urls, name=name, partitions=partitions, copies=3)


def are_ready(begun: list[Running]) -> bool:
    assert not [running.error for running in begun if running.error is not None]
    return all(running.what.ready.is_set() for running in begun)


# --- no room


def made_room(plane: PlaneSettings, log: Log) -> Log:
    """Read what there is, and purge that."""
    log.read()
    for partition, state in log.states.items():
        with_js(plane, lambda js: js.purge_stream(log.layout.stream(partition), seq=state.position + 1))  # noqa: B023
    return log


def test_a_full_partition_is_reported_and_bounds_what_waits(server: NatsServer, plane: PlaneSettings) -> None:
    """The engine notices nothing; once there is room all of it is fetched from the engine, and the log is whole."""
    small = PlaneSettings(servers=(server.url,), name=plane.name, partitions=1, partition_bytes=PARTITION_BYTES)
    queued = 256 << 10
    with TalkingEngine() as engine, bridging(small, engine.watch, max_queued_bytes=queued) as bridge:
        say_large(engine, 8 << 10, 400)
        until("a fault", lambda: "maximum bytes" in partition_of(bridge).fault, SECONDS)
        until("its stream to wait", lambda: partition_of(bridge).paused == 1, SECONDS)
        log = Log(small)
        until("the truth in the log", lambda: holds(made_room(small, log), engine), SECONDS)
        settled(log, engine)
        assert not [each for each in log.events if isinstance(each, Gap | Reset)]
        until("nothing to wait", lambda: not partition_of(bridge).paused and not partition_of(bridge).fault, SECONDS)


def test_what_an_engine_has_forgotten_meanwhile_is_doubted(server: NatsServer, plane: PlaneSettings) -> None:
    """It cannot prove any more that it is the same, so a new incarnation begins, with the little that it still has."""
    small = PlaneSettings(servers=(server.url,), name=plane.name, partitions=1, partition_bytes=PARTITION_BYTES)
    with (
        TalkingEngine(compact=False, buffer_steps=20) as engine,
        bridging(small, engine.watch, max_queued_bytes=64 << 10) as bridge,
    ):
        engine.say(1)
        log = Log(small).until("it to be followed", lambda log: log.numbers() == [0])
        say_large(engine, 32 << 10, 60)
        until("its stream to wait", lambda: partition_of(bridge).paused, SECONDS)
        say_large(engine, 32 << 10, 100)
        until("the last batch", lambda: made_room(small, log).numbers()[-1:] == [engine.truth.count - 1], SECONDS)
        assert [each.incarnation for each in log.events if isinstance(each, Reset)] == [1]
        life = numbers_of_last_life(log, "engine")
        assert life == list(range(life[0], engine.truth.count))
        assert life[0] > 60
        assert log.flaws == (0, 0)
        log.until("its trust", lambda log: reports_by_bridge(log)["bridge"].trust == "DEGRADED")
        assert "truncated" in reports_by_bridge(log)["bridge"].reason


def test_a_full_partition_does_not_hold_up_the_others(server: NatsServer, plane: PlaneSettings) -> None:
    small = PlaneSettings(servers=(server.url,), name=plane.name, partitions=2, partition_bytes=PARTITION_BYTES)
    names = {Layout("", 2).partition_of(name): name for name in ("e0", "e1", "e2", "e3", "e4", "e5")}
    with (
        TalkingEngine(names[0]) as full,
        TalkingEngine(names[1]) as other,
        bridging(small, full.watch, other.watch, max_queued_bytes=256 << 10) as bridge,
    ):
        say_large(full, 8 << 10, 300)
        until("a fault", lambda: partition_of(bridge, names[0]).paused, SECONDS)
        other.say(300)
        settled(Log(small), other)
        assert partition_of(bridge, names[0]).fault
        assert not partition_of(bridge, names[1]).fault


def test_a_full_disk_is_reported_and_ends(tmp_path: Path) -> None:
    with (
        nats_server(tmp_path, jetstream={"max_file": 4 << 20, "max_mem": 1 << 20}) as server,
        TalkingEngine() as engine,
    ):
        plane = PlaneSettings(servers=(server.url,), partitions=1, partition_bytes=2 << 20)
        with bridging(plane, engine.watch, max_queued_bytes=256 << 10) as bridge:
            filler = plane_at(server.url)

            async def fill(js: JetStreamContext) -> None:
                await js.add_stream(name="filler", subjects=["filler"])
                for _ in range(100):
                    try:
                        await js.publish("filler", bytes(64 << 10))
                    except Exception:  # noqa: BLE001 - full
                        return
                raise AssertionError("the disk has no end")

            with_js(filler, fill)
            say_large(engine, 8 << 10, 100)
            until("a fault", lambda: partition_of(bridge).fault, SECONDS)
            assert "is full" in partition_of(bridge).fault
            with_js(filler, lambda js: js.delete_stream("filler"))
            settled(Log(plane), engine)
            until("no fault", lambda: not partition_of(bridge).fault, SECONDS)


@contextmanager
def small_disk(at: Path, size: str) -> Iterator[Path]:
    """A file system of its own, where the machine lets us make one."""
    at.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None:
        pytest.skip("there is no mount")
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
    done = subprocess.run([mount, *options, at], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run([umount, "--lazy", at], check=True)


def fill(file: Path) -> None:
    """Take all the room that the file system of a file has."""
    with suppress(OSError), file.open("wb", buffering=0) as filler:
        while filler.write(bytes(64 << 10)) > 0:
            pass


def test_a_file_system_without_room_is_reported_and_nothing_is_lost(tmp_path: Path) -> None:
    """The server itself runs into it, in the middle of a page; it uses its streams again only after a restart."""
    with (
        small_disk(tmp_path / "disk", "24m") as disk,
        nats_server(tmp_path / "nats", jetstream={"store_dir": str(disk), "max_file": 64 << 20}) as server,
        TalkingEngine() as engine,
    ):
        plane = PlaneSettings(servers=(server.url,), partitions=1, partition_bytes=16 << 20)
        with bridging(plane, engine.watch, max_queued_bytes=256 << 10) as bridge:
            engine.say(10)
            settled(Log(plane), engine)
            fill(disk / "filler")
            say_large(engine, 8 << 10, 300)
            until("a fault", lambda: partition_of(bridge).fault, SECONDS)
            assert "the disks" in partition_of(bridge).fault  # the server says nothing at all
            assert bridge.status().written < engine.truth.count
            (disk / "filler").unlink()
            server.kill()
            server.start()
            settled(Log(plane), engine)
            until("no fault", lambda: not partition_of(bridge).fault, SECONDS)


# --- what others do to a partition


def test_a_deleted_partition_is_recreated_and_written_again(plane: PlaneSettings) -> None:
    """By two bridges, from what the engines still hold."""
    with (
        TalkingEngine("e1") as one,
        TalkingEngine("e2") as two,
        bridging(plane, one.watch, two.watch, name="a") as a,
        bridging(plane, one.watch, two.watch, name="b") as b,
    ):
        one.say(50)
        two.say(50)
        settled(Log(plane), one, two)
        for _ in range(2):
            made = with_js(plane, partial(lives, plane))
            with one.talking():
                with_js(plane, partial(delete_partitions, plane))
                until("the partitions", partial(are_others, plane, made), SECONDS)
                before = one.truth.count
                until("more", partial(has_said, one, before + 20), SECONDS)
            settled(Log(plane), one, two)
        for bridge in (a, b):
            assert bridge.status().invalid_records == 0
            until("no fault", partial(is_well, bridge), SECONDS)


def is_well(bridge: Bridge) -> bool:
    return not any(partition.fault for partition in bridge.status().partitions)


async def delete_partitions(plane: PlaneSettings, js: JetStreamContext) -> None:
    for partition in range(plane.partitions):
        await js.delete_stream(Layout(plane.name, plane.partitions).stream(partition))


async def lives(plane: PlaneSettings, js: JetStreamContext) -> list[str | None]:
    """Which streams the partitions are; None for one that is not there."""
    found: list[str | None] = []
    for partition in range(plane.partitions):
        try:
            found.append((await partition_info(js, Layout(plane.name, plane.partitions), partition)).stream_id)
        except PlaneError:
            found.append(None)
    return found


def are_others(plane: PlaneSettings, before: list[str | None]) -> bool:
    """Whether all partitions are there, and others than before."""
    now = with_js(plane, partial(lives, plane))
    return None not in now and not set(now) & set(before)


def has_said(engine: TalkingEngine, count: int) -> bool:
    return engine.truth.count >= count


def test_a_plane_is_found_by_its_other_partitions_when_the_first_is_deleted(plane: PlaneSettings) -> None:
    """A bridge that begins then makes that one, and has as many partitions as there were."""
    with TalkingEngine() as engine:
        with bridging(plane, engine.watch):
            engine.say(10)
            settled(Log(plane), engine)
        with_js(plane, lambda js: js.delete_stream(Layout(plane.name, 2).stream(0)))
        other = PlaneSettings(servers=plane.servers, name=plane.name, partitions=5)
        with bridging(other, engine.watch) as bridge:
            settled(Log(plane), engine)
            assert len(bridge.status().partitions) == 2


def test_a_partition_with_a_gap_is_begun_again_by_a_bridge_that_cannot_know_what_was_in_it(plane: PlaneSettings) -> None:
    """For every reader alike; a reader that had read all of it ends in the same state."""
    with TalkingEngine() as engine, bridging(plane, engine.watch, name="knows") as knows:
        engine.say(30)
        log = settled(Log(plane), engine)
        engine.restart()
        engine.say(30)
        settled(log, engine)
        partition = log.layout.partition_of("engine")
        with_js(plane, lambda js: js.purge_stream(log.layout.stream(partition)))
        with bridging(plane, engine.watch, name="does not"):
            engine.say(30)
            log.until(
                "its record", lambda log: any(isinstance(record, ResetRecord) for page in log.pages for record in page.records)
            )
            engine.say(30)
            settled(log, engine)
            newcomer = settled(Log(plane), engine)
            standings = [each.states[partition].streams["engine", 0].incarnation for each in (log, newcomer)]
            assert standings[0] == standings[1] > 1
            assert knows.status().invalid_records == 0


def test_a_partition_is_readable_where_its_streams_begin_with_a_page_or_a_replica_holds_it(plane: PlaneSettings) -> None:
    async def work(js: JetStreamContext) -> list[bool]:
        layout = await create_plane(js, plane)
        for _ in range(5):
            await js.publish(layout.subject(0), b"page")
        found = [await Snapshots(js, layout).is_readable(0, await partition_info(js, layout, 0), first_page=1)]
        await js.purge_stream(layout.stream(0), seq=4)
        state = await partition_info(js, layout, 0)
        found += [await Snapshots(js, layout).is_readable(0, state, begins_at) for begins_at in (1, 3, 4)]
        bucket = await js.key_value(layout.leases)
        for partition in (1, 0):
            await bucket.put(f"{DIGEST_PREFIX}replica", ReplicaDigests.of({partition: [PartitionDigest.of(3, {})]}).encode())
            found.append(await Snapshots(js, layout).is_readable(0, state, first_page=1))
        return found

    assert with_js(plane, work) == [True, False, False, True, False, True]


def test_a_bridge_begins_with_a_snapshot_where_what_it_holds_was_purged(plane: PlaneSettings, tmp_path: Path) -> None:
    with TalkingEngine() as engine:
        with bridging(plane, engine.watch, name="first"):
            engine.say(30)
            log = settled(Log(plane), engine)
        layout = with_js(plane, lambda js: find_plane(js, plane.name))
        assert layout is not None

        async def take(js: JetStreamContext) -> None:
            path = tmp_path / "index"
            for partition, state in log.states.items():
                info = await partition_info(js, layout, partition)
                await Snapshots(js, layout).save(
                    capture(partition, state, {}, log.index, path), path, 0, "test", info.stream_id
                )
                await js.purge_stream(layout.stream(partition), seq=state.position + 1)
                found = await Snapshots(js, layout).load_state(partition, info)
                assert found is not None
                assert found.position == state.position
                assert await Snapshots(js, layout).load_state(partition, info._replace(stream_id="another life")) is None

        with_js(plane, take)
        engine.say(30)
        with bridging(plane, engine.watch, name="second"):
            settled(log, engine)
        assert log.numbers() == list(range(60))
        assert not [each for each in log.events if isinstance(each, Reset)]
        assert not any(isinstance(record, ResetRecord) for page in log.pages for record in page.records)


def test_a_partition_that_must_not_be_created_is_reported_and_waited_for(tmp_path: Path) -> None:
    """The other partitions go on; and when an operator creates it, so does this one."""
    bridges = {"user": "bridge", "password": "b", "permissions": {"publish": {"allow": [">"]}}}
    users = [bridges, {"user": "admin", "password": "a"}]
    with nats_server(tmp_path, authorization={"users": users}) as server:
        plane = plane_at(server.url_of("bridge:b"))
        admin = plane_at(server.url_of("admin:a"))
        names = {Layout("", 2).partition_of(name): name for name in ("e0", "e1", "e2", "e3", "e4", "e5")}
        with (
            TalkingEngine(names[0]) as robbed,
            TalkingEngine(names[1]) as other,
            bridging(plane, robbed.watch, other.watch) as bridge,
        ):
            robbed.say(10)
            other.say(10)
            settled(Log(admin), robbed, other)
            forbidding = {**bridges, "permissions": {"publish": {"deny": ["$JS.API.STREAM.CREATE.>"]}}}
            server.configure(authorization={"users": [forbidding, users[1]]})
            layout = Layout(plane.name, 2)
            info = with_js(admin, lambda js: js.stream_info(layout.stream(0)))
            with_js(admin, lambda js: js.delete_stream(layout.stream(0)))
            until("the report", lambda: "must not publish" in partition_of(bridge, names[0]).fault, SECONDS)
            other.say(10)
            robbed.say(10)
            log = Log(admin)
            log.states.pop(0)
            log.until("the other one", lambda log: len(log.numbers(names[1])) == 20)
            with_js(admin, lambda js: js.add_stream(info.config))
            settled(Log(admin), robbed, other)
            until("no fault", lambda: not partition_of(bridge, names[0]).fault, SECONDS)
