"""Servers whose clock is set, an hour forward and back, while bridges write, replicas read and leases are held.

What a server's clock is asked for is when messages came, until when entries of leases live, and which ids it remembers. Nothing
that is said of the engines depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from bridge_cases import TalkingEngine, settled
from clock_cases import ServersClock, needs_clocks
from kvevents.plane.settings import PlaneSettings
from kvevents.service.registration import Registration
from nats_servers import NatsServer, nats_cluster, nats_server, needs_nats
from plane_cases import SECONDS, Log, Running, bridging
from plane_lease_cases import Clock, bucket
from service_cases import MODEL, until
from service_replica_digest_cases import Serving

pytestmark = [needs_nats, needs_clocks]
HOUR = 3600
LEASE = 60.0


@pytest.fixture
def clock(tmp_path: Path) -> ServersClock:
    return ServersClock(tmp_path)


def shift_of(server: NatsServer) -> float:
    """By how much a server's clock differs from this process's."""
    return (datetime.fromisoformat(server.read("varz")["now"]) - datetime.now(UTC)).total_seconds()


def set_clock(clock: ServersClock, servers: list[NatsServer], seconds: int) -> None:
    clock.set(seconds)
    until("the servers' clock", lambda: all(abs(shift_of(server) - seconds) < HOUR / 2 for server in servers), SECONDS)


def serve_through_it(clock: ServersClock, servers: list[NatsServer], plane: PlaneSettings) -> None:
    """Two bridges and two replicas, through an hour forward, two back, and one forward."""
    with TalkingEngine() as engine, ExitStack() as stack:
        publisher = engine.publisher
        registration = Registration(
            instance="one", endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint, model=MODEL
        )
        engine.name, engine.registration = registration.key[0], msgspec.json.encode(registration)
        for name in ("a", "b"):
            stack.enter_context(bridging(plane, engine.watch, name=name))
        replicas = [Serving(plane, name) for name in ("r1", "r2")]
        for each in replicas:
            stack.callback(Running(each).end)
        log = Log(plane)
        with engine.talking(0.01):
            for seconds in (0, HOUR, -HOUR, 0):
                set_clock(clock, servers, seconds)
                before = len(log.read().numbers(engine.name))
                log.until("more in the log", lambda log, before=before: len(log.numbers(engine.name)) > before + 20)
                until("replicas", lambda: all(each.is_exact for each in replicas), SECONDS)
        settled(log, engine)
        until("the truth", lambda: {each.digest for each in replicas} == {engine.truth.digest}, SECONDS)
        assert all(each.is_exact for each in replicas)
        assert log.numbers(engine.name) == list(range(engine.truth.count))


def test_a_server_whose_clock_is_set_loses_nothing(clock: ServersClock, tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats", command=clock.command) as server:
        serve_through_it(clock, [server], PlaneSettings(servers=(server.url,), partitions=1, partition_bytes=64 << 20))


def test_a_server_of_a_cluster_whose_clock_is_another_one_loses_nothing(clock: ServersClock, tmp_path: Path) -> None:
    """One of three, whether it leads the partition or not: the others have the right time."""
    with nats_cluster(tmp_path / "nats", each={"n1": {"command": clock.command}}) as cluster:
        plane = PlaneSettings(servers=cluster.urls, partitions=1, partition_bytes=64 << 20, copies=3)
        serve_through_it(clock, [cluster.nodes["n1"]], plane)


def test_a_server_that_comes_back_with_another_time_has_all_it_had(clock: ServersClock, tmp_path: Path) -> None:
    """As a machine whose clock was lost while it was off."""
    with nats_server(tmp_path / "nats", command=clock.command) as server, TalkingEngine() as engine:
        plane = PlaneSettings(servers=(server.url,), partitions=1, partition_bytes=64 << 20)
        log = Log(plane)
        with bridging(plane, engine.watch):
            for seconds in (HOUR, -HOUR, 0):
                engine.say(20)
                settled(log, engine)
                server.kill()
                clock.set(seconds)
                engine.say(20)
                server.start()
                assert abs(shift_of(server) - seconds) < HOUR / 2
                settled(log, engine)
        assert log.numbers() == list(range(engine.truth.count))


@pytest.fixture
def timed(clock: ServersClock, tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats", command=clock.command) as found:
        yield found


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
def test_a_lease_is_had_after_its_length_whatever_the_servers_clock_is(
    clock: ServersClock, timed: NatsServer, seconds: int
) -> None:
    """Set back, the server would keep it for an hour more; set forward, the earlier holder knows it by its next renewal.

    Holders use clocks of the test, so no more of their time passes than the test says.
    """

    async def main() -> None:
        async with bucket(timed, name="clock", ttl=LEASE) as made:
            mine, theirs = Clock(), Clock()
            one = made.lease("here", seconds=LEASE, clock=mine)
            two = made.lease("there", seconds=LEASE, clock=theirs)
            assert await one.acquire()
            set_clock(clock, [timed], seconds)
            await two.acquire()  # which it is if the server has let the entry expire by now, and not before
            theirs.now += LEASE
            assert await two.acquire()
            assert not await one.renew()
            assert not one.is_held
            assert await two.renew()

    asyncio.run(main())
