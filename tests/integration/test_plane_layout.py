"""Tests of the streams and buckets that make up a plane, on a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from nats.js import JetStreamContext, api

from bridge_cases import run_with_jetstream
from kvevents.errors import ConfigError, PlaneError
from kvevents_plane.layout import Layout, PartitionMetadata, create_partition, create_plane, find_plane, partition_info
from kvevents_plane.settings import PlaneSettings
from kvevents_plane.status import inspect_plane
from nats_cases import needs_nats, server_of_module  # noqa: F401 - a fixture
from tools.nats_servers import NatsServer

pytestmark = needs_nats


def plane(server: NatsServer, name: str, partitions: int = 3, **more: Any) -> PlaneSettings:
    return PlaneSettings(servers=(server.url,), name=name, partitions=partitions, **{"partition_bytes": 4 << 20, **more})


def test_a_plane_is_created_once_and_found(server: NatsServer) -> None:
    settings = plane(server, "once")

    async def work(js: JetStreamContext) -> None:
        assert await find_plane(js, "once") is None
        first = await create_plane(js, settings)
        stream_ids = [(await partition_info(js, first, partition)).stream_id for partition in range(3)]
        assert len(set(stream_ids)) == 3
        again = await create_plane(js, settings)
        assert [(await partition_info(js, again, partition)).stream_id for partition in range(3)] == stream_ids
        found = await find_plane(js, "once")
        assert found is not None
        assert (found.name, found.partitions) == ("once", 3)
        assert (await partition_info(js, first, 2))[:2] == (0, 0)

    run_with_jetstream(settings, work)


def test_settings_of_new_planes_that_an_existing_plane_does_not_have_are_logged(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the warning, an operator who sets `--copies 3` later believes that there are three copies."""
    settings = plane(server, "unused")

    async def work(js: JetStreamContext) -> None:
        await create_plane(js, settings)
        await create_plane(js, settings)
        await create_plane(js, PlaneSettings(servers=(server.url,), name="unused"))
        assert not caplog.records
        assert (await create_plane(js, plane(server, "unused", 4, copies=3))).partitions == 3

    run_with_jetstream(settings, work)
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.partition(":")[0] for line in logged] == [
        "plane 'unused' exists with --partitions 3, so 4 has no effect",
        "plane 'unused' exists with --copies 1, so 3 has no effect",
    ]


def test_processes_that_create_a_plane_at_once_get_the_same_plane(server: NatsServer) -> None:
    """This holds even if their settings differ."""
    settings = [plane(server, "race", partitions) for partitions in (2, 4, 3, 2)]

    async def work(js: JetStreamContext) -> None:
        layouts = await asyncio.gather(*(create_plane(js, each) for each in settings))
        found = await find_plane(js, "race")
        assert found is not None
        assert {layout.partitions for layout in layouts} == {found.partitions}

    run_with_jetstream(settings[0], work)


def test_changes_by_an_operator_are_preserved(server: NatsServer) -> None:
    """A full partition gets more room and another description. It is still the same partition."""
    settings = plane(server, "edited")

    async def work(js: JetStreamContext) -> None:
        layout = await create_plane(js, settings)
        config = (await js.stream_info(layout.stream(1))).config
        id_before = (await partition_info(js, layout, 1)).stream_id
        config.max_bytes, config.description = 8 << 20, "the one that was full"
        await js.update_stream(config)
        assert (await create_plane(js, settings)).partitions == 3
        assert (await partition_info(js, layout, 1)).stream_id == id_before
        assert (await js.stream_info(layout.stream(1))).config.max_bytes == 8 << 20

    run_with_jetstream(settings, work)


def test_a_partition_that_is_deleted_and_created_again_has_another_id(server: NatsServer) -> None:
    settings = plane(server, "again")

    async def work(js: JetStreamContext) -> None:
        layout = await create_plane(js, settings)
        before = (await partition_info(js, layout, 0)).stream_id
        await js.delete_stream(layout.stream(0))
        with pytest.raises(PlaneError, match="partition 0 of plane 'again'") as raised:
            await partition_info(js, layout, 0)
        assert raised.value.fault == "missing"
        await create_partition(js, layout, 0, settings)
        assert (await partition_info(js, layout, 0)).stream_id != before

    run_with_jetstream(settings, work)


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"owner": "me"}},
        {"subjects": ["kvevents.odd.partition.0", "more"]},
        {"discard": api.DiscardPolicy.OLD},
        {"max_age": 600.0},
        {"max_msgs": 5},
    ],
    ids=str,
)
def test_streams_that_could_drop_messages_are_refused_as_partitions(server: NatsServer, change: dict[str, Any]) -> None:
    """Streams of another application are refused too."""
    settings = plane(server, "odd")

    async def work(js: JetStreamContext) -> None:
        layout = await create_plane(js, settings)
        config = (await js.stream_info(layout.stream(0))).config
        for partition in range(3):
            await js.delete_stream(layout.stream(partition))
        for name, value in change.items():
            setattr(config, name, value)
        await js.add_stream(config)
        with pytest.raises(ConfigError, match=r"KVEVENTS_odd_0 .*delete it.* or choose another name"):
            await create_plane(js, settings)
        await js.delete_stream(layout.stream(0))

    run_with_jetstream(settings, work)


def test_a_partition_that_was_created_by_hand_is_refused_until_it_is_deleted(server: NatsServer) -> None:
    settings = plane(server, "hand")

    async def work(js: JetStreamContext) -> None:
        layout = await create_plane(js, settings)
        await js.delete_stream(layout.stream(1))
        await js.add_stream(name=layout.stream(1), subjects=[layout.subject(1)], discard=api.DiscardPolicy.NEW)
        with pytest.raises(ConfigError, match=r"KVEVENTS_hand_1 was not created .*or delete it: a bridge creates it"):
            await create_plane(js, settings)
        (fault,) = [fault for fault in (await inspect_plane(js, layout)).partitions[1].faults if "created" in fault]
        assert "or delete it: a bridge creates it" in fault
        await js.delete_stream(layout.stream(1))
        await create_plane(js, settings)
        assert not (await partition_info(js, layout, 1)).stream_fault

    run_with_jetstream(settings, work)


def test_a_plane_of_another_release_is_refused(server: NatsServer) -> None:
    async def work(js: JetStreamContext) -> None:
        await js.add_stream(
            name=Layout("later", 1).stream(0), subjects=["x"], metadata=PartitionMetadata(99, 2, "life").as_metadata()
        )
        with pytest.raises(ConfigError, match="layout version 99"):
            await find_plane(js, "later")

    run_with_jetstream(plane(server, "later"), work)


def test_the_assignment_of_engines_to_partitions_is_fixed_and_balanced() -> None:
    layout = Layout("any", 8)
    assert [layout.partition_of(f"engine-{at}") for at in range(8)] == [2, 4, 5, 5, 5, 6, 6, 7]
    counts = [0] * 8
    for at in range(8_000):
        counts[layout.partition_of(f"http://10.0.{at // 256}.{at % 256}:8000")] += 1
    assert max(counts) < 1.15 * min(counts)


def test_more_copies_than_servers_are_an_error_that_names_the_setting(server: NatsServer) -> None:
    settings = plane(server, "copied", copies=3)

    async def work(js: JetStreamContext) -> None:
        with pytest.raises(PlaneError, match=r"3 copies need a cluster with as many running servers: .* lower --copies"):
            await create_plane(js, settings)

    run_with_jetstream(settings, work)
