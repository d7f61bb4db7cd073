"""`kvevents plane status` as a process, for a plane on a real NATS server."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import nats

from cli_cases import ProcessResult, run
from kvevents.plane.connection import open_client
from kvevents.plane.layout import Layout, create_plane, partition_info
from kvevents.plane.leases import LeaseHolder, lease_key
from kvevents.plane.records import VERSION as PAGE_VERSION
from kvevents.plane.records import Page, encode_page
from kvevents.plane.replicas import SHARD_PREFIX, ShardAnnouncement
from kvevents.plane.snapshots import VERSION, SnapshotInfo, SnapshotList
from kvevents.plane.status import BRIDGE_SCAN_PAGES, PartitionView, PlaneView, ShardView, format_partitions
from nats_servers import NatsServer, needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import plane_at, run_bridge
from service_cases import engine, serving, wait_for
from service_replica_cases import watch_of

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
            return found if found["snapshots"] and found["replicas"] else None

        found = wait_for("a snapshot", read_status)
        assert found["faults"] == []
        assert [set(partition["bridges"]) for partition in found["partitions"]] == [{"bridge"}] * 2
        assert [(each["name"], each["differs"]) for each in found["replicas"]] == [("a", [])]
        ended = plane_status("--nats", server.url, "--plane", "shown")
        assert ended.code == 0
        assert "partition   0" in ended.out


def test_plane_status_shows_shards_and_the_snapshots_of_each_partition(server: NatsServer) -> None:
    """It prints the address and the partitions of each replica; a partition that no replica holds is a fault."""
    plane = plane_at(server.url, name="shares", partitions=4)
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
        layout = Layout("shares", 4)
        leases = await client.jetstream().key_value(layout.leases)
        await leases.put(lease_key("replica", "a"), msgspec.json.encode(LeaseHolder("host", 17, "x")))
        await leases.put("lease.snapshot.3", msgspec.json.encode(LeaseHolder("host", 18, "x")))
        for name, partitions in (("a", [0, 1]), ("b", [1])):
            await leases.put(SHARD_PREFIX + name, ShardAnnouncement(f"http://{name}:8090", 2, partitions).encode())
        bucket = await client.jetstream().key_value(layout.bucket)
        for partition, found in snapshots.items():
            await bucket.put(f"snapshot.{partition}", msgspec.json.encode(SnapshotList(VERSION, found)))
        await client.close()

    with engine() as one, run_bridge(plane, watch_of("one", one)):
        asyncio.run(put())
        ended = plane_status("--nats", server.url, "--plane", "shares")
        assert ended.code == 1
        for line in (
            r"partition   0 .*; held by a$",
            r"partition   1 .*; held by a, b$",
            r"partition   2 .*; held by no replica$",
            r"shard     a at http://a:8090: partitions 0-1, announced 0 s ago$",
            r"shard     b at http://b:8090: partition 1, announced 0 s ago$",
            r"snapshot  of partition   0: 5,000 blocks to page 7, 3.0 MiB, 6\d s ago by the clock of b$",
            r"snapshot  none of partitions 1, 3$",
            r"lease     the name of replica a: process 17 at host$",
            r"lease     snapshots of partition 3: process 18 at host$",
            r"^  no replica holds partitions 2-3: answers lack the engines there$",
        ):
            assert re.search(line, ended.out, re.MULTILINE), (line, ended.out)
        assert ended.out.count("snapshot  of partition   0") == 1
        assert "{" not in ended.out
        found = msgspec.json.decode(plane_status("--nats", server.url, "--plane", "shares", "--output=json").out)
        assert [(each["name"], each["url"], each["partitions"]) for each in found["shards"]] == [
            ("a", "http://a:8090", [0, 1]),
            ("b", "http://b:8090", [1]),
        ]
        assert set(found["leases"]) == {"replica.a", "lease.snapshot.3"}


def test_faults_of_shards_are_reported() -> None:
    partitions = [PartitionView(partition, 1, 1, 0, None, {"bridge": 0.0}) for partition in range(3)]

    def faults(*shards: ShardView) -> list[str]:
        return PlaneView("p", partitions, [], {}, [], list(shards)).faults

    assert faults() == []  # each replica holds everything
    whole = ShardView("a", "http://a:1", 1, [0, 1, 2], 0.0)
    assert faults(whole) == []
    silent, less = (
        msgspec.structs.replace(whole, name="b", silent=9.0),
        msgspec.structs.replace(whole, name="c", partitions=[1]),
    )
    assert faults(whole, silent) == ["replica b holds a shard and has announced nothing for 9 s"]
    assert faults(silent, less)[1:] == ["no replica holds partitions 0, 2: answers lack the engines there"]
    other = msgspec.structs.replace(whole, name="d", holders=2)
    assert faults(whole, other) == [
        "replicas have different settings of --replication-factor, of which the highest counts: a 1, d 2"
    ]


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
    assert ended.code == 4
    assert "Traceback" not in ended.err
    assert "cannot read" in ended.err


def test_a_bridge_that_writes_much_counts_as_alive(server: NatsServer) -> None:
    """A busy bridge writes few heartbeats among many pages; each of its pages shows as well that it is alive."""
    plane = plane_at(server.url, name="busy", partitions=1)

    async def write() -> None:
        async with open_client(plane, name="test") as client:
            js = client.jetstream()
            layout = await create_plane(js, plane)
            made = (await partition_info(js, layout, 0)).stream_id
            for _ in range(2 * BRIDGE_SCAN_PAGES):
                await js.publish(layout.subject(0), encode_page(Page(PAGE_VERSION, "busy", time.time(), [], made)))

    asyncio.run(write())
    ended = plane_status("--nats", server.url, "--plane", "busy")
    assert (ended.code, "bridges: busy " in ended.out) == (0, True), ended.out
