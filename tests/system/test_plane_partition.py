"""A split network: servers, bridges and replicas run on hosts of their own, and some are cut off for a while.

During the split no replica claims what it cannot know; afterwards every replica holds what the engine holds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import pytest
from nats.errors import Error as NatsError

from bridge_cases import BridgeProcess, PublishingEngine, wait_until_complete
from kvevents.service.fleet.registration import Registration
from kvevents.stream import Trust
from kvevents_plane.layout import Layout
from kvevents_plane.settings import ConnectionLimits, PlaneSettings, ReaderLimits, ReplicaTimers
from nats_cases import needs_nats
from network_namespaces import Network, needs_networks, network
from plane_cases import Log, ThreadRunner
from service_cases import MODEL, wait_for
from service_replica_digest_cases import ReplicaRunner
from tools.nats_servers import NatsCluster, nats_cluster

pytestmark = [needs_nats, needs_networks, pytest.mark.timeout(400)]
SERVERS = NatsCluster.NAMES
REPLICAS = ("r1", "r2")
BRIDGES = ("b1", "b2")
SECONDS = 90.0
"""Deadline of every wait: servers of which one is cut off take up to half a minute to elect leaders."""
PACE = 0.01
PING = 1.0
"""Seconds between two pings of a server, so that a server that is cut off is left soon."""


@pytest.fixture(scope="module", name="net")
def make_network() -> Iterator[Network]:
    with network(*SERVERS, *REPLICAS, *BRIDGES) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(net: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    each = {name: {"host": net.addresses[name], "command": net.command(name)} for name in SERVERS}
    with nats_cluster(tmp_path_factory.mktemp("nats"), each=each, ping_interval="1s", ping_max=2) as running:
        yield running


class ReplicaOnHost(ReplicaRunner):
    """A replica on a host of its own."""

    def __init__(self, net: Network, host: str, plane: PlaneSettings) -> None:
        super().__init__(plane, host)
        self._net, self._host = net, host

    async def run(self, stop: asyncio.Event) -> None:
        self._net.enter(self._host)
        await super().run(stop)

    @property
    def trust(self) -> Trust:
        return next((member.trust for member in list(self.fleet.members.values())), Trust.CONNECTING)

    def is_stale(self, text: str) -> bool:
        return self.trust == Trust.STALE and text in self.trust.reason


class Scene:
    """An engine beside the test, bridges and replicas on their hosts, and the log that they share."""

    def __init__(self, net: Network, cluster: NatsCluster, engine: PublishingEngine, plane: PlaneSettings) -> None:
        self.net, self.cluster, self.engine, self.plane = net, cluster, engine, plane
        self.replicas: list[ReplicaOnHost] = []
        self.log = Log(plane)

    @property
    def leader(self) -> str:
        """Return the server that leads the only partition."""
        return self.cluster.leader_of(Layout(self.plane.name, 1).stream(0))

    def wait_for_more(self) -> None:
        """Wait until more batches of the engine are in the log."""
        before = self._count_written()
        wait_for("more in the log", lambda: self._count_written() > before, SECONDS)

    def _count_written(self) -> int:
        with suppress(NatsError):  # the partition has no leader at the moment
            self.log.read()
        return len(self.log.numbers(self.engine.name))

    def wait_until_equal(self) -> None:
        """Wait until every replica holds what the engine holds; the log must contain each batch once."""
        wait_until_complete(self.log, self.engine)
        wait_for("every replica to equal the engine", self._are_equal, SECONDS)

    def _are_equal(self) -> bool:
        return all(each.is_exact and each.digest == self.engine.truth.digest for each in self.replicas)


@contextmanager
def run_scene(net: Network, cluster: NatsCluster, name: str, *, bridges: tuple[str, ...]) -> Iterator[Scene]:
    plane = PlaneSettings(
        servers=cluster.urls,
        name=name,
        partitions=1,
        partition_bytes=64 << 20,
        copies=3,
        connection=ConnectionLimits(ping_seconds=PING),
        reader=ReaderLimits(digest_pages=2),
        replicas=ReplicaTimers(compare_seconds=0.1),
    )
    bind_endpoint = f"tcp://{net.address}:*"
    with ExitStack() as stack:
        stack.callback(net.reconnect)
        engine = stack.enter_context(PublishingEngine(endpoint=bind_endpoint, replay_endpoint=bind_endpoint, bind=True))
        publisher = engine.publisher
        registration = Registration(
            instance="one", endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint, model=MODEL
        )
        engine.name, engine.registration = registration.key[0], msgspec.json.encode(registration)
        engine.truth.name = engine.name
        for bridge in bridges:
            process = BridgeProcess(plane, engine, name=bridge, command=net.command(bridge), ping=PING, dead_seconds=600.0)
            stack.enter_context(process).wait_until_ready()
        running = Scene(net, cluster, engine, plane)
        running.replicas = [ReplicaOnHost(net, host, plane) for host in REPLICAS]
        for each in running.replicas:
            stack.callback(ThreadRunner(each).end)
        with engine.publish_continuously(PACE):
            wait_for("replicas", lambda: all(each.is_exact for each in running.replicas), SECONDS)
        yield running
        net.reconnect()
        running.wait_until_equal()


def test_a_bridge_that_is_cut_off_is_reported_by_every_replica(net: Network, cluster: NatsCluster) -> None:
    """The bridge is cut off from servers and engines: no replica is EXACT until it returns, and then no batch is missing."""
    with run_scene(net, cluster, "bridge", bridges=("b1",)) as running, running.engine.publish_continuously(PACE):
        net.split("b1")
        wait_for(
            "every replica to be STALE",
            lambda: all(each.is_stale("no bridge writes") for each in running.replicas),
            SECONDS,
        )
        net.reconnect()
        running.wait_for_more()


def test_a_replica_that_is_cut_off_reports_that_it_is_stale(net: Network, cluster: NatsCluster) -> None:
    """It reports STALE to clients that still reach it; meanwhile the other replica is EXACT."""
    with run_scene(net, cluster, "replica", bridges=("b1",)) as running, running.engine.publish_continuously(PACE):
        first, second = running.replicas
        net.split(first.replica.name)
        wait_for("the replica to be STALE", lambda: first.trust == Trust.STALE, SECONDS)
        running.wait_for_more()
        wait_for("the other replica to be EXACT", lambda: second.is_exact, SECONDS)
        assert first.trust == Trust.STALE
        net.reconnect()
        wait_for("the replica to be EXACT again", lambda: first.is_exact, SECONDS)


@pytest.mark.skipif("KVEVENTS_LONG" not in os.environ, reason="servers take a minute to elect again: `make partitions`")
def test_the_majority_continues_when_the_network_splits_in_two_halves(net: Network, cluster: NatsCluster) -> None:
    """The minority is a bridge, a replica and the server that leads the partition; the majority has the engine and the rest.

    The majority continues under another leader, and every process of the minority reports that it cannot.
    """
    with run_scene(net, cluster, "halves", bridges=BRIDGES) as running, running.engine.publish_continuously(PACE):
        first, second = running.replicas
        net.split("b2", second.replica.name, running.leader)
        wait_for("the replica of the minority to be STALE", lambda: second.trust == Trust.STALE, SECONDS)
        running.wait_for_more()
        wait_for("the majority to be EXACT", lambda: first.is_exact, SECONDS)
        assert second.trust == Trust.STALE
        net.reconnect()
        wait_for("the minority to be EXACT", lambda: second.is_exact, SECONDS)
