"""`kvevents plane status` as a process, for a plane on a real NATS server."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from nats.js import api

from cli_cases import ProcessResult, run
from kvevents_plane.connection import open_client
from kvevents_plane.digests import ReplicaDigests
from kvevents_plane.layout import Layout, create_plane
from kvevents_plane.records import VERSION as PAGE_VERSION
from kvevents_plane.records import Page, encode_page
from kvevents_plane.snapshots import VERSION, SnapshotInfo, SnapshotList
from kvevents_plane.status import BRIDGE_SCAN_PAGES, PartitionView, PlaneView, ReplicaView, format_partitions, inspect_plane
from nats_cases import needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import plane_at, run_bridge
from service_cases import engine, serving, wait_for
from service_replica_cases import watch_of
from tools.nats_servers import NatsServer

pytestmark = needs_nats


def plane_status(*args: object) -> ProcessResult:
    return run("plane", "status", *args)


def test_plane_status_shows_partitions_snapshots_and_replicas(server: NatsServer) -> None:
    plane = plane_at(server.url, name="shown", partitions=2)
    flags = ("--nats", server.url, "--plane", "shown", "--snapshot-seconds", "0.3", "--replica-name", "a")
    with engine() as one, run_bridge(plane, watch_of("one", one)), serving(*flags) as service:
        one.store(range(64))
        service.exact("one", blocks=4)

        def read_status() -> Any:
            found = msgspec.json.decode(plane_status("--nats", server.url, "--plane", "shown", "--output=json").out)
            return found if found["snapshots"] and found["replicas"] and not found["faults"] else None

        found = wait_for("a snapshot, and no fault", read_status)
        assert [set(partition["bridges"]) for partition in found["partitions"]] == [{"bridge"}] * 2
        assert [(each["name"], each["differs"]) for each in found["replicas"]] == [("a", [])]
        ended = plane_status("--nats", server.url, "--plane", "shown")
        assert ended.code == 0
        assert "partition   0" in ended.out


def test_plane_status_shows_the_snapshots_of_each_partition(server: NatsServer) -> None:
    plane = plane_at(server.url, name="snapshots", partitions=4)
    made = int(time.time())
    snapshots = {
        partition: [
            SnapshotInfo(f"{partition}-{made - age}-x", partition, made - age, "b", 7, "x", blocks, 3 << 20)
            for age, blocks in ((60, 5_000), (90, 1))
        ]
        for partition in (0, 2)
    }

    async def put() -> None:
        client = await nats.connect(server.url)
        layout = Layout("snapshots", 4)
        bucket = await client.jetstream().key_value(layout.bucket)
        for partition, found in snapshots.items():
            await bucket.put(f"snapshot.{partition}", msgspec.json.encode(SnapshotList(VERSION, found)))
        await client.close()

    with engine() as one, run_bridge(plane, watch_of("one", one)):
        asyncio.run(put())
        wait_for("pages of the bridge", lambda: plane_status("--nats", server.url, "--plane", "snapshots").code == 0)
        ended = plane_status("--nats", server.url, "--plane", "snapshots")
        for line in (
            r"snapshot  of partition   0: 5,000 blocks to page 7, 3.0 MiB, \d+ s ago by the clock of b$",
            r"snapshot  none of partitions 1, 3$",
        ):
            assert re.search(line, ended.out, re.MULTILINE), (line, ended.out)
        assert ended.out.count("snapshot  of partition   0") == 1
        assert "{" not in ended.out


def test_partitions_are_formatted_as_ranges() -> None:
    assert [format_partitions(partitions) for partitions in ([3], [0, 1], [7, 0, 2, 1, 9])] == [
        "partition 3",
        "partitions 0-1",
        "partitions 0-2, 7, 9",
    ]


def test_a_missing_plane_server_or_file_is_reported_in_one_sentence(server: NatsServer, tmp_path: Path) -> None:
    ended = plane_status("--nats", server.url, "--plane", "nowhere")
    assert (ended.code, ended.out) == (4, "")
    assert "plane 'nowhere' does not exist" in ended.err
    ended = plane_status("--nats", "nats://127.0.0.1:1")
    assert ended.code == 4
    assert "127.0.0.1:1" in ended.err
    ended = plane_status("--nats", server.url, "--creds", str(tmp_path / "none"))
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert "cannot read" in ended.err


def test_a_bridge_that_writes_much_counts_as_alive(server: NatsServer) -> None:
    """A busy bridge writes few heartbeats among many pages; each of its pages shows as well that it is alive."""
    plane = plane_at(server.url, name="busy", partitions=1)

    async def write() -> None:
        async with open_client(plane, name="test") as client:
            js = client.jetstream()
            layout = await create_plane(js, plane)
            for _ in range(2 * BRIDGE_SCAN_PAGES):
                await js.publish(layout.subject(0), encode_page(Page(PAGE_VERSION, "busy", [])))

    asyncio.run(write())
    ended = plane_status("--nats", server.url, "--plane", "busy")
    assert "bridges: busy " in ended.out
    assert "no bridge writes" not in ended.out


def test_limits_that_drop_unread_pages_are_a_fault(server: NatsServer) -> None:
    """An operator can change a stream while the plane runs. Bridges refuse it only when they start."""
    plane = plane_at(server.url, name="limited", partitions=1)

    async def change_limits() -> None:
        async with open_client(plane, name="test") as client:
            js = client.jetstream()
            layout = await create_plane(js, plane)
            config = (await js.stream_info(layout.stream(0))).config
            config.max_msgs, config.discard = 5, api.DiscardPolicy.OLD
            await js.update_stream(config)

    asyncio.run(change_limits())
    ended = plane_status("--nats", server.url, "--plane", "limited")
    assert ended.code == 1
    assert "partition 0: stream KVEVENTS_limited_0 discards old messages and retains by limits; bridges refuse it" in ended.out
    assert "partition   0          0 pages to 0, " in ended.out


def test_ages_are_by_the_clock_of_the_servers(server: NatsServer) -> None:
    """Clocks of bridges can differ by days, so nothing that they write says when they wrote it."""
    plane = plane_at(server.url, name="clocks", partitions=1)

    async def inspect() -> PlaneView:
        async with open_client(plane, name="test") as client:
            js = client.jetstream()
            layout = await create_plane(js, plane)
            for bridge in ("b0", "b1"):
                await js.publish(layout.subject(0), encode_page(Page(PAGE_VERSION, bridge, [])))
            digests = await js.key_value(layout.digests)
            await digests.put("replica", ReplicaDigests({0: []}, {}, {0: 0}).encode())
            return await inspect_plane(js, layout)

    view = asyncio.run(inspect())
    partition, replica = view.partitions[0], view.replicas[0]
    assert list(partition.bridges) == ["b0", "b1"]
    assert max(partition.bridges.values()) == partition.newest_at == pytest.approx(time.time(), abs=60.0)
    assert (replica.lag, replica.lag_seconds) == (2, partition.unsaved_seconds)
    assert 0.0 <= partition.unsaved_seconds < 60.0


def test_bridges_that_have_ended_are_a_fault(server: NatsServer) -> None:
    """Their last pages stay, so only waiting for another page shows it."""
    plane = plane_at(server.url, name="silent", partitions=2)
    flags = ("--nats", server.url, "--plane", "silent")
    with run_bridge(plane):
        wait_for("heartbeats", lambda: plane_status(*flags).code == 0)
    ended = plane_status(*flags)
    assert ended.code == 1
    for partition in (0, 1):
        assert (
            f"partition {partition}: no bridge has written for more than 1.5 s; check that the bridges run and can write"
            in ended.out
        )


def test_a_bridge_that_has_ended_is_a_fault_while_another_writes(server: NatsServer) -> None:
    plane = plane_at(server.url, name="halved", partitions=1)
    flags = ("--nats", server.url, "--plane", "halved")
    with run_bridge(plane, name="b0", heartbeat_seconds=1.0):
        with run_bridge(plane, name="b1"):
            wait_for("both bridges", lambda: "b1" in plane_status(*flags).out)
        ended = plane_status(*flags)
    assert ended.code == 1
    assert "partition 0: bridge b1 has not written for more than 3 s; check that it runs and can write" in ended.out
    assert "EXACT     is at most 3.5 s old at replicas" in ended.out


def test_two_engines_of_one_name_are_a_fault(server: NatsServer) -> None:
    """Bridges take turns in replacing the engine, so no replica calls it EXACT until one bridge has ended."""
    plane = plane_at(server.url, name="twins", partitions=1)
    flags = ("--nats", server.url, "--plane", "twins")
    conflict = "default/default/one rank 0 is another engine for bridge"
    with engine() as one, engine() as other, run_bridge(plane, watch_of("one", one), name="b0") as bridge:
        one.store(range(64))
        with serving(*flags) as service:
            service.exact("one", blocks=4)
            with run_bridge(plane, watch_of("one", other), name="b1"):
                stale = ("STALE", "bridges b0, b1 follow different engines under this name")
                wait_for("a stale source", lambda: service.trust("one") == stale)
                wait_for("the bridge to report it", lambda: conflict in bridge.engine_conflict)
                ended = wait_for("the fault", lambda: found if conflict in (found := plane_status(*flags)).out else None)
                assert f"partition 0: {conflict}" in ended.out
                assert ended.code == 1
            service.exact("one", blocks=4)


def test_what_is_old_is_a_fault() -> None:
    """Ages are compared with the newest page, so that the clock of the status does not matter."""
    partition = PartitionView(0, 1, 9, 0, None, {"b": 1e3}, 1.5, missing=2, unsaved_seconds=1_200.0)
    replica = ReplicaView("r", 7, [], {0: 5}, 8.0)
    assert PlaneView("p", [partition], [], [replica]).faults == [
        "partition 0: the oldest page that no snapshot contains is 20 min old; check that a replica may write snapshots",
        "replica r cannot read partition 0: pages before 5 are missing; the runbook has what to do",
        "replica r lacks pages that are 8 s old: it is frozen, overloaded, cut off, or rebuilds its index",
    ]
