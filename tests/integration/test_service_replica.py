"""The service as a replica, which builds its index from the log of a real NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import nats
from nats.js import JetStreamContext

from certificate_cases import make_certificates
from kvevents_plane.layout import Layout
from kvevents_plane.records import ResetRecord
from kvevents_plane.snapshots import Snapshots
from nats_cases import needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import Log, plane_at, run_bridge
from service_cases import engine, engines, serving, wait_for
from service_replica_cases import watch_of
from tools.nats_servers import NatsServer, nats_server

pytestmark = needs_nats
T = TypeVar("T")


def test_a_replica_answers_like_a_service_that_follows_the_engines(server: NatsServer) -> None:
    """The replica has the blocks and the trust of all engines, also of those that publish later."""
    plane = plane_at(server.url, name="answers")
    with engines(2) as (one, two), run_bridge(plane, watch_of("one", one), watch_of("two", two)):
        one.store(range(64))
        with serving("--nats", server.url, "--plane", "answers") as service:
            service.wait_until_ready()
            service.exact("one", blocks=4)
            service.exact("two", blocks=0)
            two.store(range(32))
            service.wait_for_prefix("two", range(32))
            assert service.held(list(range(64))) == {"one": 64, "two": 32}


def test_a_replica_begins_with_a_snapshot_and_the_pages_before_it_are_purged(server: NatsServer) -> None:
    """The second snapshot purges the pages that the first one replaces. A replica that starts later has all blocks."""
    plane = plane_at(server.url, name="snapshots", partitions=1)
    flags = ("--nats", server.url, "--plane", "snapshots", "--snapshot-seconds", "0.3")
    with engine() as one, run_bridge(plane, watch_of("one", one)):
        with serving(*flags, "--replica-name", "a") as service:
            one.store(range(64))
            service.exact("one", blocks=4)
            first = wait_for("two snapshots", lambda: read_first_page(server, "KVEVENTS_snapshots_0") > 3)
            one.store(range(100, 132))
            service.exact("one", blocks=6)
        with serving(*flags, "--replica-name", "b") as service:
            service.exact("one", blocks=6)
            service.wait_for_log("loaded from snapshot")
            assert service.held(list(range(64))) == {"one": 64}
            assert first


def test_a_replica_skips_a_damaged_snapshot_and_uses_the_previous_one(server: NatsServer) -> None:
    """A replica must not wait for chunks that the servers have lost. It reports the snapshot that it skips."""
    plane = plane_at(server.url, name="damaged", partitions=1)
    flags = ("--nats", server.url, "--plane", "damaged", "--snapshot-seconds")
    with engine() as one, run_bridge(plane, watch_of("one", one)):
        with serving(*flags, "0.3", "--replica-name", "a") as service:
            one.store(range(64))
            service.exact("one", blocks=4)
            wait_for("two snapshots", lambda: read_first_page(server, "KVEVENTS_damaged_0") > 3)
        name = call_jetstream(server, lambda js: delete_chunks(js, Layout("damaged", 1)))
        with serving(*flags, "60", "--replica-name", "b") as service:
            service.exact("one", blocks=4)
            service.wait_for_log("loaded from snapshot")
            assert any(name in warning for warning in service.get("/health").json["warnings"])


async def delete_chunks(js: JetStreamContext, layout: Layout) -> str:
    """Delete the chunks of the index in the newest snapshot, and return its name."""
    newest, _ = await Snapshots(js, layout).list_valid(0)
    info = await (await js.object_store(layout.snapshots)).get_info(f"{newest.name}.index")
    await js.purge_stream(f"OBJ_{layout.snapshots}", subject=f"$O.{layout.snapshots}.C.{info.nuid}")
    return newest.name


def test_replicas_of_one_plane_have_equal_blocks(server: NatsServer) -> None:
    plane = plane_at(server.url, name="agree")
    flags = ("--nats", server.url, "--plane", "agree")
    with (
        engines(3) as found,
        run_bridge(plane, *(watch_of(f"e{at}", each) for at, each in enumerate(found))),
        serving(*flags, "--replica-name", "a") as one,
        serving(*flags, "--replica-name", "b") as two,
    ):
        for number in range(20):
            for each in found:
                each.store(range(number * 100, number * 100 + 64))
        for service in (one, two):
            for at in range(3):
                service.exact(f"e{at}", blocks=80)
        assert [one.keys(f"e{at}") for at in range(3)] == [two.keys(f"e{at}") for at in range(3)]


def test_the_index_is_rebuilt_after_a_partition_was_deleted(server: NatsServer) -> None:
    """The bridge writes the partition again from the replay of the engine, and the replica rebuilds its index."""
    plane = plane_at(server.url, name="deleted", partitions=1)
    with (
        engine() as one,
        run_bridge(plane, watch_of("one", one)),
        serving("--nats", server.url, "--plane", "deleted") as service,
    ):
        one.store(range(64))
        service.exact("one", blocks=4)
        delete_stream(server, "KVEVENTS_deleted_0")
        one.store(range(100, 132))
        service.exact("one", blocks=6)
        service.wait_for_log("it is read again")


def test_sources_are_stale_while_the_nats_server_is_down(tmp_path: Path) -> None:
    """All blocks are there after the server has restarted."""
    with nats_server(tmp_path) as server:
        plane = plane_at(server.url, partitions=1)
        with engine() as one, run_bridge(plane, watch_of("one", one)), serving("--nats", server.url) as service:
            one.store(range(64))
            service.exact("one", blocks=4)
            server.kill()
            wait_for("a stale source", lambda: service.trust("one")[0] == "STALE")
            one.store(range(100, 132))
            server.start()
            service.exact("one", blocks=6)


def test_an_invalid_ca_file_is_reported_until_it_is_valid_again(tmp_path: Path) -> None:
    """Files are replaced when certificates are renewed. The process continues and retries."""
    authority = make_certificates(tmp_path) / "ca.pem"
    right = authority.read_text()
    with serving("--nats", "tls://127.0.0.1:1", "--tls-ca", authority) as service:

        def read_why() -> str:
            assert service.get("/livez").status == 200
            return str(service.get("/readyz").json["why"])

        wait_for("a failed connection", lambda: "cannot use the NATS server" in read_why())
        authority.write_text("no certificate")
        wait_for("the invalid file", lambda: "is not a valid PEM file" in read_why())
        authority.write_text(right)
        wait_for("the valid file", lambda: "cannot use the NATS server" in read_why())


def test_no_source_is_exact_without_a_bridge(server: NatsServer) -> None:
    plane = plane_at(server.url, name="silent", partitions=1)
    with engine() as one, serving("--nats", server.url, "--plane", "silent") as service:
        assert service.get("/readyz").status == 503
        with run_bridge(plane, watch_of("one", one)):
            one.store(range(64))
            service.exact("one", blocks=4)
        wait_for("a stale source", lambda: (trust := service.trust("one"))[0] == "STALE" and "no bridge" in trust[1])


def test_an_engine_that_restarts_has_another_incarnation_in_a_replica(server: NatsServer) -> None:
    plane = plane_at(server.url, name="restart", partitions=1)
    with (
        engine() as one,
        run_bridge(plane, watch_of("one", one)) as bridge,
        serving("--nats", server.url, "--plane", "restart") as service,
    ):
        one.store(range(64))
        service.exact("one", blocks=4)
        endpoint, replay_endpoint = one.endpoint, one.replay_endpoint
        one.publisher.shutdown()
        with engine(endpoint=endpoint, replay_endpoint=replay_endpoint, bind=True, seed=2) as again:
            again.store(range(32))
            assert service.exact("one", blocks=2)["incarnation"] == 1
            assert bridge.invalid_records == 0


def test_a_replica_refuses_registrations(server: NatsServer) -> None:
    with serving("--nats", server.url, "--plane", "refuses") as service:
        answer = service.register("one", "tcp://127.0.0.1:5557")
        assert answer.status == 409
        assert "name engines to the bridges of its plane; to drain one, leave it out of" in answer.body.decode()


def test_a_replica_with_missing_pages_is_not_ready_until_a_bridge_rewrites_them(server: NatsServer) -> None:
    """Without a snapshot, no process knows the content of the missing pages."""
    plane = plane_at(server.url, name="hole", partitions=1)
    with engine() as one:
        with run_bridge(plane, watch_of("one", one)):
            one.store(range(64))
            wait_for("pages", lambda: call_jetstream(server, lambda js: js.stream_info("KVEVENTS_hole_0")).state.last_seq > 2)
        call_jetstream(server, lambda js: js.purge_stream("KVEVENTS_hole_0"))
        with serving("--nats", server.url, "--plane", "hole") as service:
            wait_for("a reason", lambda: b"are missing" in service.get("/readyz").body)
            assert service.get("/readyz").status == 503
            with run_bridge(plane, watch_of("one", one)):
                service.exact("one", blocks=4)


def test_a_running_bridge_rewrites_a_purged_partition(server: NatsServer) -> None:
    """No replica has read the pages, and no snapshot replaces them. A new replica is EXACT without help of an operator."""
    plane = plane_at(server.url, name="purged", partitions=1)
    with engine() as one, run_bridge(plane, watch_of("one", one)) as bridge:
        one.store(range(64))
        wait_for("pages", lambda: call_jetstream(server, lambda js: js.stream_info("KVEVENTS_purged_0")).state.last_seq > 2)
        call_jetstream(server, lambda js: js.purge_stream("KVEVENTS_purged_0"))
        with serving("--nats", server.url, "--plane", "purged") as service:
            service.exact("one", blocks=4)
        assert bridge.invalid_records == 0


def test_a_purged_partition_with_a_snapshot_is_not_rewritten(server: NatsServer) -> None:
    """Its pages are purged because the snapshot replaces them."""
    plane = plane_at(server.url, name="held", partitions=1)
    flags = ("--nats", server.url, "--plane", "held", "--snapshot-seconds", "0.3")
    with engine() as one, run_bridge(plane, watch_of("one", one), heartbeat_seconds=0.02):
        one.store(range(64))
        with serving(*flags) as service:
            service.exact("one", blocks=4)
            wait_for("a snapshot", lambda: read_first_page(server, "KVEVENTS_held_0") > 1)
        before = call_jetstream(server, lambda js: js.stream_info("KVEVENTS_held_0")).state.last_seq
        wait_for(
            "heartbeats",
            lambda: call_jetstream(server, lambda js: js.stream_info("KVEVENTS_held_0")).state.last_seq > before + 50,
        )
        assert not any(isinstance(record, ResetRecord) for page in Log(plane).read().pages for record in page.records)


def test_metrics_show_how_the_log_is_read(server: NatsServer) -> None:
    plane = plane_at(server.url, name="metrics", partitions=1)
    flags = ("--nats", server.url, "--plane", "metrics", "--snapshot-seconds", "0.3")
    with engine() as one, run_bridge(plane, watch_of("one", one)), serving(*flags) as service:
        one.store(range(64))
        service.exact("one", blocks=4)

        def read_partition_metrics() -> dict[str, float]:
            lines = [
                line.rsplit(" ", 1) for line in service.get("/metrics").body.decode().splitlines() if "kvevents_plane" in line
            ]
            return {name: float(value) for name, value in lines if not name.startswith("#")}

        def read_metrics_with_snapshot() -> dict[str, float] | None:
            found = read_partition_metrics()
            states = {found[f"kvevents_plane_{name}"] for name in ("synced", "readable", "bridges")}
            has_snapshot = 'kvevents_plane_partition_snapshot_timestamp_seconds{partition="0"}' in found
            return found if has_snapshot and states == {1} else None

        found = wait_for("a snapshot and a readable log", read_metrics_with_snapshot)
        assert found["kvevents_plane_index_builds_total"] == 1
        assert found["kvevents_plane_divergences_total"] == found["kvevents_plane_invalid_records_total"] == 0
        assert found["kvevents_plane_snapshot_failed"] == 0
        assert found['kvevents_plane_partition_position{partition="0"}'] > 0
        assert found['kvevents_plane_partition_lag_pages{partition="0"}'] >= 0


def read_first_page(server: NatsServer, stream: str) -> int:
    found: int = call_jetstream(server, lambda js: js.stream_info(stream)).state.first_seq
    return found


def delete_stream(server: NatsServer, stream: str) -> None:
    call_jetstream(server, lambda js: js.delete_stream(stream))


def call_jetstream(server: NatsServer, ask: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    """Return the result of one JetStream request."""

    async def main() -> T:
        client = await nats.connect(server.url)
        try:
            return await ask(client.jetstream())
        finally:
            await client.close()

    return asyncio.run(main())
