"""Bridges whose servers are killed, stopped, full or without a stream lose nothing, and their status names the fault."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from nats.js import JetStreamContext

from bridge_cases import (
    PublishingEngine,
    holds,
    numbers_of_last_incarnation,
    reports_by_bridge,
    run_with_jetstream,
    wait_until_complete,
)
from kvevents.errors import PlaneError
from kvevents.stream import Gap, Reset
from kvevents_plane.bridge import Bridge, BridgeSettings
from kvevents_plane.layout import Layout, find_plane, partition_info
from kvevents_plane.partition_writer import PartitionWriter
from kvevents_plane.records import ResetRecord
from kvevents_plane.settings import PlaneSettings
from kvevents_plane.snapshots import Snapshots, capture
from nats_cases import needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import SECONDS, Log, ThreadRunner, plane_at, run_bridge
from publisher_cases import batch
from service_cases import wait_for
from tools.nats_servers import NatsCluster, NatsServer, nats_cluster, nats_server

pytestmark = needs_nats
PARTITION_BYTES = 1 << 20


@pytest.fixture(name="plane")
def make_plane(server: NatsServer, request: pytest.FixtureRequest) -> PlaneSettings:
    return plane_at(server.url, name=f"t{abs(hash(request.node.name))}")


def partition_of(bridge: Bridge, name: str = "engine") -> PartitionWriter:
    partitions = bridge.partitions
    return partitions[Layout("", len(partitions)).partition_of(name)]


def publish_large(engine: PublishingEngine, size: int, count: int) -> None:
    """Publish `count` batches of `size` bytes, and wait until the publisher has sent them.

    The engine does not wait for readers: the tests make room in the partition only after this has returned. If it still sent
    batches then, the partition could become full again, and what the engine has dropped meanwhile would be missing twice.
    """
    for number in range(count):
        large = batch(number, size // 64)
        engine.truth.add(large)
        engine.publisher.publish(large)
    wait_for("all batches to be sent", lambda: engine.publisher.stats().published == engine.truth.count, SECONDS)


# --- servers that stop and restart


def test_nothing_is_lost_when_a_server_is_killed_and_restarted(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server, PublishingEngine() as engine:
        plane = plane_at(server.url)
        with run_bridge(plane, engine.watch, name="a") as first, run_bridge(plane, engine.watch, name="b") as second:
            log = Log(plane)
            with engine.publish_continuously():
                for _ in range(2):
                    before = engine.truth.count
                    log.wait_for("some batches", lambda log, before=before: len(log.numbers()) > before)
                    server.kill()
                    wait_for(
                        "the disconnection in the status of both bridges",
                        lambda: not (first.is_connected or second.is_connected),
                        SECONDS,
                    )
                    wait_for("a fault", lambda: partition_of(first).fault and partition_of(second).fault, SECONDS)
                    server.start()
            wait_until_complete(log, engine)
            wait_for("no fault", lambda: not partition_of(first).fault and not partition_of(second).fault, SECONDS)
        assert log.numbers() == list(range(engine.truth.count))


def test_pages_that_a_server_has_acknowledged_and_lost_are_written_again(tmp_path: Path) -> None:
    """The server restarts with an older state of its disk, as after a power cut. New readers find an engine added later."""
    with nats_server(tmp_path) as server, PublishingEngine("old") as old, PublishingEngine("new") as new:
        plane = plane_at(server.url, partitions=1)
        with run_bridge(plane, old.watch, name="a"):
            old.publish_next(20)
            wait_until_complete(Log(plane), old)
            server.stop()
            shutil.copytree(server.store, tmp_path / "older")
            server.start()
            with run_bridge(plane, old.watch, new.watch, name="b"):
                old.publish_next(20)
                new.publish_next(20)
                wait_until_complete(wait_until_complete(Log(plane), old), new)
                server.kill()
                shutil.rmtree(server.store)
                shutil.move(tmp_path / "older", server.store)
                server.start()
                for _ in range(2):
                    for engine in (old, new):
                        engine.publish_next(20)
                        assert wait_until_complete(Log(plane), engine).flaws == (0, 0)


def test_deleted_buckets_are_created_again(plane: PlaneSettings) -> None:
    """Replicas need the buckets, which an operator might delete or servers might lose with their newest data."""

    async def remove(js: JetStreamContext) -> None:
        for name in streams:
            await js.delete_stream(name)

    async def found(js: JetStreamContext) -> bool:
        return {*streams} <= {info.config.name for info in await js.streams_info()}

    layout = Layout(plane.name, plane.partitions)
    streams = (f"KV_{layout.bucket}", f"KV_{layout.digests}", f"OBJ_{layout.snapshots}")
    with run_bridge(plane):
        assert run_with_jetstream(plane, found)
        run_with_jetstream(plane, remove)
        wait_for("the buckets", lambda: run_with_jetstream(plane, found), SECONDS)


def test_nothing_is_lost_when_a_server_pauses(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server, PublishingEngine() as engine:
        plane = plane_at(server.url)
        with run_bridge(plane, engine.watch, name="a") as first, run_bridge(plane, engine.watch, name="b"):
            log = Log(plane)
            with engine.publish_continuously():
                log.wait_for("some batches", lambda log: len(log.numbers()) > 50)
                server.pause()
                wait_for("a fault", lambda: partition_of(first).fault, SECONDS)
                server.resume()
                wait_for("no fault", lambda: not partition_of(first).fault, SECONDS)
            wait_until_complete(log, engine)
        assert log.numbers() == list(range(engine.truth.count))


def test_nothing_is_lost_when_the_leader_of_a_cluster_is_killed_repeatedly(tmp_path: Path) -> None:
    with nats_cluster(tmp_path) as cluster, PublishingEngine() as engine:
        for name in ("p1", "p2"):
            # Bridges that start at the same time create one plane, although streams without a leader do not answer at first.
            started = [ThreadRunner(Bridge(plane_of_cluster(cluster, name), BridgeSettings(name=each))) for each in "abc"]
            wait_for("all bridges to be ready", partial(are_ready, started), SECONDS)
            for running in started:
                running.end()
        plane = plane_of_cluster(cluster, "default", partitions=1)
        with run_bridge(plane, engine.watch, name="a") as first, run_bridge(plane, engine.watch, name="b") as second:
            log = Log(plane)
            with engine.publish_continuously():
                for _ in range(2):
                    leader = cluster.leader_of(log.layout.stream(0))
                    written = first.written + second.written
                    cluster.kill(leader)
                    wait_for("batches", lambda: first.written + second.written > written + 50, SECONDS)  # noqa: B023
                    cluster.restart(leader)
                    cluster.settle()
            wait_until_complete(log, engine)
        assert log.numbers() == list(range(engine.truth.count))


def test_a_bridge_creates_its_plane_while_a_server_of_the_cluster_starts(tmp_path: Path) -> None:
    """At first the cluster rejects streams with three copies: `no suitable peers for placement, peer offline`."""
    with nats_cluster(tmp_path) as cluster:
        started = next(name for name in cluster.NAMES if name != cluster.leader())
        cluster.kill(started)
        cluster.restart(started)
        with run_bridge(plane_of_cluster(cluster, "default")) as bridge:
            assert bridge.ready.is_set()


def plane_of_cluster(cluster: NatsCluster, name: str, partitions: int = 2) -> PlaneSettings:
    return plane_at(*cluster.urls, name=name, partitions=partitions, copies=3)


def are_ready(started: list[ThreadRunner]) -> bool:
    assert not [running.error for running in started if running.error is not None]
    return all(running.what.ready.is_set() for running in started)


# --- no space


def purge_read_pages(plane: PlaneSettings, log: Log) -> Log:
    """Read all pages, purge them, and return the log."""
    log.read()
    for partition, state in log.states.items():
        run_with_jetstream(plane, lambda js: js.purge_stream(log.layout.stream(partition), seq=state.position + 1))  # noqa: B023
    return log


def test_a_full_partition_is_reported_and_bounds_the_queue_of_the_bridge(server: NatsServer, plane: PlaneSettings) -> None:
    """The engine is not affected. Once there is space, everything is fetched from the engine, and the log is complete."""
    small = PlaneSettings(servers=(server.url,), name=plane.name, partitions=1, partition_bytes=PARTITION_BYTES)
    queued = 256 << 10
    with PublishingEngine() as engine, run_bridge(small, engine.watch, max_queued_bytes=queued) as bridge:
        publish_large(engine, 8 << 10, 400)
        wait_for("a fault", lambda: "maximum bytes" in partition_of(bridge).fault, SECONDS)
        wait_for("its stream to be paused", lambda: len(partition_of(bridge).paused) == 1, SECONDS)
        log = Log(small)
        wait_for("all batches in the log", lambda: holds(purge_read_pages(small, log), engine), SECONDS)
        wait_until_complete(log, engine)
        assert not [each for each in log.events if isinstance(each, Gap | Reset)]
        wait_for("nothing to be paused", lambda: not partition_of(bridge).paused and not partition_of(bridge).fault, SECONDS)


def test_a_new_incarnation_begins_when_the_engine_has_dropped_the_missing_batches(
    server: NatsServer, plane: PlaneSettings
) -> None:
    """The engine cannot confirm its identity any more, so a new incarnation begins with the batches that it still has.

    What the bridge has queued and these batches fit into the partition, so that it does not become full a second time.
    """
    small = PlaneSettings(servers=(server.url,), name=plane.name, partitions=1, partition_bytes=4 * PARTITION_BYTES)
    with (
        PublishingEngine(compact=False, buffer_steps=20) as engine,
        run_bridge(small, engine.watch, max_queued_bytes=64 << 10) as bridge,
    ):
        engine.publish_next(1)
        log = Log(small).wait_for("the first batch", lambda log: log.numbers() == [0])
        publish_large(engine, 32 << 10, 200)
        wait_for("its stream to be paused", lambda: partition_of(bridge).paused, SECONDS)
        publish_large(engine, 32 << 10, 100)
        wait_for("the last batch", lambda: purge_read_pages(small, log).numbers()[-1:] == [engine.truth.count - 1], SECONDS)
        assert [each.incarnation for each in log.events if isinstance(each, Reset)] == [1]
        current_numbers = numbers_of_last_incarnation(log, "engine")
        assert current_numbers == list(range(current_numbers[0], engine.truth.count))
        assert current_numbers[0] > 200
        assert log.flaws == (0, 0)
        log.wait_for("its trust in the log", lambda log: "truncated" in reports_by_bridge(log)["bridge"].reason)
        assert reports_by_bridge(log)["bridge"].trust == "DEGRADED"


def test_a_full_partition_does_not_delay_the_others(server: NatsServer, plane: PlaneSettings) -> None:
    small = PlaneSettings(servers=(server.url,), name=plane.name, partitions=2, partition_bytes=PARTITION_BYTES)
    names = {Layout("", 2).partition_of(name): name for name in ("e0", "e1", "e2", "e3", "e4", "e5")}
    with (
        PublishingEngine(names[0]) as full,
        PublishingEngine(names[1]) as other,
        run_bridge(small, full.watch, other.watch, max_queued_bytes=256 << 10) as bridge,
    ):
        publish_large(full, 8 << 10, 300)
        wait_for("a fault", lambda: partition_of(bridge, names[0]).paused, SECONDS)
        other.publish_next(300)
        wait_until_complete(Log(small), other)
        wait_for("the fault", lambda: partition_of(bridge, names[0]).fault, SECONDS)
        assert not partition_of(bridge, names[1]).fault


def test_a_full_disk_is_reported_until_there_is_space(tmp_path: Path) -> None:
    with (
        nats_server(tmp_path, jetstream={"max_file": 4 << 20, "max_mem": 1 << 20}) as server,
        PublishingEngine() as engine,
    ):
        plane = PlaneSettings(servers=(server.url,), partitions=1, partition_bytes=2 << 20)
        with run_bridge(plane, engine.watch, max_queued_bytes=256 << 10) as bridge:
            filler = plane_at(server.url)

            async def fill_file_system(js: JetStreamContext) -> None:
                await js.add_stream(name="filler", subjects=["filler"])
                for _ in range(100):
                    try:
                        await js.publish("filler", bytes(64 << 10))
                    except Exception:  # noqa: BLE001 - full
                        return
                raise AssertionError("the disk does not become full")

            run_with_jetstream(filler, fill_file_system)
            publish_large(engine, 8 << 10, 100)
            wait_for("the fault", lambda: "is full" in partition_of(bridge).fault, SECONDS)
            run_with_jetstream(filler, lambda js: js.delete_stream("filler"))
            wait_until_complete(Log(plane), engine)
            wait_for("no fault", lambda: not partition_of(bridge).fault, SECONDS)


@contextmanager
def mount_small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size; skip the test if this machine does not permit it."""
    folder.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None:
        pytest.skip("the command mount does not exist")
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
    done = subprocess.run([mount, *options, folder], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([umount, "--lazy", folder], check=True)


def fill_file_system(file: Path) -> None:
    """Fill the file system of a file with this file."""
    with suppress(OSError), file.open("wb", buffering=0) as filler:
        while filler.write(bytes(64 << 10)) > 0:
            pass


def test_a_full_file_system_is_reported_and_nothing_is_lost(tmp_path: Path) -> None:
    """The server reaches the limit in the middle of a page; it uses its streams again only after a restart."""
    with (
        mount_small_disk(tmp_path / "disk", "24m") as disk,
        nats_server(tmp_path / "nats", jetstream={"store_dir": str(disk), "max_file": 64 << 20}) as server,
        PublishingEngine() as engine,
    ):
        plane = PlaneSettings(servers=(server.url,), partitions=1, partition_bytes=16 << 20)
        with run_bridge(plane, engine.watch, max_queued_bytes=256 << 10) as bridge:
            engine.publish_next(10)
            wait_until_complete(Log(plane), engine)
            fill_file_system(disk / "filler")
            publish_large(engine, 8 << 10, 300)
            # The server does not report the reason.
            wait_for("the fault", lambda: "the disks" in partition_of(bridge).fault, SECONDS)
            assert bridge.written < engine.truth.count
            (disk / "filler").unlink()
            server.kill()
            server.start()
            wait_until_complete(Log(plane), engine)
            wait_for("no fault", lambda: not partition_of(bridge).fault, SECONDS)


# --- partitions that operators change


def test_deleted_partitions_are_created_and_written_again(plane: PlaneSettings) -> None:
    """Two bridges do so, from what the engines still hold."""
    with (
        PublishingEngine("e1") as first,
        PublishingEngine("e2") as second,
        run_bridge(plane, first.watch, second.watch, name="a") as a,
        run_bridge(plane, first.watch, second.watch, name="b") as b,
    ):
        first.publish_next(50)
        second.publish_next(50)
        wait_until_complete(Log(plane), first, second)
        for _ in range(2):
            before_deletion = run_with_jetstream(plane, partial(stream_ids, plane))
            with first.publish_continuously():
                run_with_jetstream(plane, partial(delete_partitions, plane))
                wait_for("new partitions", partial(are_new, plane, before_deletion), SECONDS)
                before = first.truth.count
                wait_for("more batches", partial(has_published, first, before + 20), SECONDS)
            wait_until_complete(Log(plane), first, second)
        for bridge in (a, b):
            assert bridge.invalid_records == 0
            wait_for("no fault", partial(has_no_fault, bridge), SECONDS)


def has_no_fault(bridge: Bridge) -> bool:
    return not any(partition.fault for partition in bridge.partitions)


async def delete_partitions(plane: PlaneSettings, js: JetStreamContext) -> None:
    for partition in range(plane.partitions):
        await js.delete_stream(Layout(plane.name, plane.partitions).stream(partition))


async def stream_ids(plane: PlaneSettings, js: JetStreamContext) -> list[str | None]:
    """Return the stream id of each partition, or None if its stream does not exist."""
    found: list[str | None] = []
    for partition in range(plane.partitions):
        try:
            found.append((await partition_info(js, Layout(plane.name, plane.partitions), partition)).stream_id)
        except PlaneError:
            found.append(None)
    return found


def are_new(plane: PlaneSettings, before: list[str | None]) -> bool:
    """Return whether all partitions exist and none has a stream id of `before`."""
    now = run_with_jetstream(plane, partial(stream_ids, plane))
    return None not in now and not set(now) & set(before)


def has_published(engine: PublishingEngine, count: int) -> bool:
    return engine.truth.count >= count


def test_a_bridge_finds_a_plane_whose_first_partition_was_deleted(plane: PlaneSettings) -> None:
    """The bridge creates the deleted partition, and uses the number of partitions that the plane has, not its own setting."""
    with PublishingEngine() as engine:
        with run_bridge(plane, engine.watch):
            engine.publish_next(10)
            wait_until_complete(Log(plane), engine)
        run_with_jetstream(plane, lambda js: js.delete_stream(Layout(plane.name, 2).stream(0)))
        other = PlaneSettings(servers=plane.servers, name=plane.name, partitions=5)
        with run_bridge(other, engine.watch) as bridge:
            wait_until_complete(Log(plane), engine)
            assert len(bridge.partitions) == 2


def test_a_bridge_that_cannot_know_purged_pages_begins_the_partition_again(plane: PlaneSettings) -> None:
    """Every reader ends in the same state, also one that had read all purged pages."""
    with PublishingEngine() as engine, run_bridge(plane, engine.watch, name="knows") as informed:
        engine.publish_next(30)
        log = wait_until_complete(Log(plane), engine)
        engine.restart()
        engine.publish_next(30)
        wait_until_complete(log, engine)
        partition = log.layout.partition_of("engine")
        run_with_jetstream(plane, lambda js: js.purge_stream(log.layout.stream(partition)))
        with run_bridge(plane, engine.watch, name="does not"):
            engine.publish_next(30)
            log.wait_for(
                "its reset record",
                lambda log: any(isinstance(record, ResetRecord) for page in log.pages for record in page.records),
            )
            engine.publish_next(30)
            wait_until_complete(log, engine)
            newcomer = wait_until_complete(Log(plane), engine)
            incarnations = [each.states[partition].streams["engine", 0].incarnation for each in (log, newcomer)]
            assert incarnations[0] == incarnations[1] > 1
            assert informed.invalid_records == 0


def test_a_bridge_begins_with_a_snapshot_if_its_pages_were_purged(plane: PlaneSettings, tmp_path: Path) -> None:
    with PublishingEngine() as engine:
        with run_bridge(plane, engine.watch, name="first"):
            engine.publish_next(30)
            log = wait_until_complete(Log(plane), engine)
        layout = run_with_jetstream(plane, lambda js: find_plane(js, plane.name))
        assert layout is not None

        async def save_snapshots(js: JetStreamContext) -> None:
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

        run_with_jetstream(plane, save_snapshots)
        engine.publish_next(30)
        with run_bridge(plane, engine.watch, name="second"):
            wait_until_complete(log, engine)
        assert log.numbers() == list(range(60))
        assert not [each for each in log.events if isinstance(each, Reset)]
        assert not any(isinstance(record, ResetRecord) for page in log.pages for record in page.records)


def test_a_bridge_waits_for_a_partition_that_it_must_not_create(tmp_path: Path) -> None:
    """The other partitions continue, and so does this one when an operator creates it."""
    bridges = {"user": "bridge", "password": "b", "permissions": {"publish": {"allow": [">"]}}}
    users = [bridges, {"user": "admin", "password": "a"}]
    with nats_server(tmp_path, authorization={"users": users}) as server:
        plane = plane_at(server.url_of("bridge:b"))
        admin = plane_at(server.url_of("admin:a"))
        names = {Layout("", 2).partition_of(name): name for name in ("e0", "e1", "e2", "e3", "e4", "e5")}
        with (
            PublishingEngine(names[0]) as deleted,
            PublishingEngine(names[1]) as other,
            run_bridge(plane, deleted.watch, other.watch) as bridge,
        ):
            deleted.publish_next(10)
            other.publish_next(10)
            wait_until_complete(Log(admin), deleted, other)
            forbidden = {**bridges, "permissions": {"publish": {"deny": ["$JS.API.STREAM.CREATE.>"]}}}
            server.configure(authorization={"users": [forbidden, users[1]]})
            layout = Layout(plane.name, 2)
            info = run_with_jetstream(admin, lambda js: js.stream_info(layout.stream(0)))
            run_with_jetstream(admin, lambda js: js.delete_stream(layout.stream(0)))
            wait_for("the fault", lambda: "must not publish" in partition_of(bridge, names[0]).fault, SECONDS)
            other.publish_next(10)
            deleted.publish_next(10)
            log = Log(admin)
            log.states.pop(0)
            log.wait_for("the other partition", lambda log: len(log.numbers(names[1])) == 20)
            run_with_jetstream(admin, lambda js: js.add_stream(info.config))
            wait_until_complete(Log(admin), deleted, other)
            wait_for("no fault", lambda: not partition_of(bridge, names[0]).fault, SECONDS)
