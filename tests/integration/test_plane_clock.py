"""Tests of servers whose clock is set, an hour forward and back, while bridges write and replicas read.

A server uses its clock for the time of messages, the expiry of digests, and its memory of message ids. Nothing in the log
about engines depends on it."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from bridge_cases import PublishingEngine, wait_until_complete
from clock_cases import ServersClock, needs_clocks
from kvevents.service.fleet.registration import Registration
from kvevents_plane.settings import PlaneSettings
from nats_cases import needs_nats
from plane_cases import SECONDS, Log, ThreadRunner, run_bridge
from service_cases import MODEL, wait_for
from service_replica_digest_cases import ReplicaRunner
from tools.nats_servers import NatsServer, nats_cluster, nats_server

pytestmark = [needs_nats, needs_clocks]
HOUR = 3600


@pytest.fixture
def clock(tmp_path: Path) -> ServersClock:
    return ServersClock(tmp_path)


def read_clock_shift(server: NatsServer) -> float:
    """Return how many seconds the server's clock is ahead of this process's."""
    return (datetime.fromisoformat(server.read("varz")["now"]) - datetime.now(UTC)).total_seconds()


def set_clock(clock: ServersClock, servers: list[NatsServer], seconds: int) -> None:
    clock.set(seconds)
    wait_for(
        "the servers' clock", lambda: all(abs(read_clock_shift(server) - seconds) < HOUR / 2 for server in servers), SECONDS
    )


def serve_while_the_clock_changes(clock: ServersClock, servers: list[NatsServer], plane: PlaneSettings) -> None:
    """Run two bridges and two replicas while the clock is set an hour forward, two back, and one forward."""
    with PublishingEngine() as engine, ExitStack() as stack:
        publisher = engine.publisher
        registration = Registration(
            instance="one", endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint, model=MODEL
        )
        engine.name, engine.registration = registration.key[0], msgspec.json.encode(registration)
        for name in ("a", "b"):
            stack.enter_context(run_bridge(plane, engine.watch, name=name))
        replicas = [ReplicaRunner(plane, name) for name in ("r1", "r2")]
        for each in replicas:
            stack.callback(ThreadRunner(each).end)
        log = Log(plane)
        with engine.publish_continuously(0.01):
            for seconds in (0, HOUR, -HOUR, 0):
                set_clock(clock, servers, seconds)
                before = len(log.read().numbers(engine.name))
                log.wait_for("more batches in the log", lambda log, before=before: len(log.numbers(engine.name)) > before + 20)
                wait_for("exact replicas", lambda: all(each.is_exact for each in replicas), SECONDS)
        wait_until_complete(log, engine)
        wait_for("the engine's digest", lambda: {each.digest for each in replicas} == {engine.truth.digest}, SECONDS)
        assert all(each.is_exact for each in replicas)
        assert log.numbers(engine.name) == list(range(engine.truth.count))


def test_nothing_is_lost_when_the_clock_of_a_server_is_set(clock: ServersClock, tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats", command=clock.command) as server:
        serve_while_the_clock_changes(
            clock, [server], PlaneSettings(servers=(server.url,), partitions=1, partition_bytes=64 << 20)
        )


def test_nothing_is_lost_when_one_server_of_a_cluster_has_a_wrong_clock(clock: ServersClock, tmp_path: Path) -> None:
    """One of three servers has a wrong clock, whether it leads the partition or not. The others have the right time."""
    with nats_cluster(tmp_path / "nats", each={"n1": {"command": clock.command}}) as cluster:
        plane = PlaneSettings(servers=cluster.urls, partitions=1, partition_bytes=64 << 20, copies=3)
        serve_while_the_clock_changes(clock, [cluster.nodes["n1"]], plane)


def test_a_server_that_restarts_with_another_time_has_all_its_data(clock: ServersClock, tmp_path: Path) -> None:
    """The machine has lost the time of its clock while it was off."""
    with nats_server(tmp_path / "nats", command=clock.command) as server, PublishingEngine() as engine:
        plane = PlaneSettings(servers=(server.url,), partitions=1, partition_bytes=64 << 20)
        log = Log(plane)
        with run_bridge(plane, engine.watch):
            for seconds in (HOUR, -HOUR, 0):
                engine.publish_next(20)
                wait_until_complete(log, engine)
                server.kill()
                clock.set(seconds)
                engine.publish_next(20)
                server.start()
                assert abs(read_clock_shift(server) - seconds) < HOUR / 2
                wait_until_complete(log, engine)
        assert log.numbers() == list(range(engine.truth.count))
