"""A network that is split: servers, bridges and replicas on hosts of their own, some of which are cut off for a while.

During the split no replica claims what cannot be known; afterwards every replica holds what the engine holds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import pytest
from nats.errors import Error as NatsError

from bridge_cases import BridgeProcess, TalkingEngine, settled
from kvevents.plane.layout import Layout
from kvevents.plane.settings import ConnectionLimits, PlaneSettings, ReaderLimits, ReplicaTimers
from kvevents.service.registration import Registration
from kvevents.stream import Trust
from nats_servers import NatsCluster, nats_cluster, needs_nats
from network_namespaces import Network, needs_networks, network
from plane_cases import Log, Running
from service_cases import MODEL, until
from service_replica_digest_cases import Serving

pytestmark = [needs_nats, needs_networks, pytest.mark.timeout(400)]
SERVERS = NatsCluster.NAMES
REPLICAS = ("r1", "r2")
BRIDGES = ("b1", "b2")
SECONDS = 90.0
"""Deadline of every wait: servers of which one is cut off take up to half a minute to elect leaders."""
PACE = 0.01
PING = 1.0
"""Seconds between two questions whether a server is there, so that one that is cut off is left soon."""


@pytest.fixture(scope="module", name="net")
def net_of_all() -> Iterator[Network]:
    with network(*SERVERS, *REPLICAS, *BRIDGES) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(net: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    each = {name: {"host": net.addresses[name], "command": net.command(name)} for name in SERVERS}
    with nats_cluster(tmp_path_factory.mktemp("nats"), each=each, ping_interval="1s", ping_max=2) as found:
        yield found


class Elsewhere(Serving):
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

    def is_stale(self, why: str) -> bool:
        return self.trust == Trust.STALE and why in self.trust.reason


class Scene:
    """An engine beside the test, bridges and replicas on their hosts, and the log of it all."""

    def __init__(self, net: Network, cluster: NatsCluster, engine: TalkingEngine, plane: PlaneSettings) -> None:
        self.net, self.cluster, self.engine, self.plane = net, cluster, engine, plane
        self.replicas: list[Elsewhere] = []
        self.log = Log(plane)

    @property
    def leader(self) -> str:
        """The server that leads the only partition."""
        return self.cluster.leader_of(Layout(self.plane.name, 1).stream(0))

    def goes_on(self) -> None:
        """More of the engine comes into the log."""
        before = self._written()
        until("more in the log", lambda: self._written() > before, SECONDS)

    def _written(self) -> int:
        with suppress(NatsError):  # the partition has no leader at the moment
            self.log.read()
        return len(self.log.numbers(self.engine.name))

    def settles(self) -> None:
        """Wait until every replica holds what the engine holds; the log must say it once."""
        settled(self.log, self.engine)
        until("the truth in every replica", self._is_everywhere, SECONDS)

    def _is_everywhere(self) -> bool:
        return all(each.is_exact and each.digest == self.engine.truth.digest for each in self.replicas)


@contextmanager
def scene(net: Network, cluster: NatsCluster, name: str, *, bridges: tuple[str, ...]) -> Iterator[Scene]:
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
    at = f"tcp://{net.address}:*"
    with ExitStack() as stack:
        stack.callback(net.heal)
        engine = stack.enter_context(TalkingEngine(endpoint=at, replay_endpoint=at, bind=True))
        publisher = engine.publisher
        registration = Registration(
            instance="one", endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint, model=MODEL
        )
        engine.name, engine.registration = registration.key[0], msgspec.json.encode(registration)
        engine.truth.name = engine.name
        for bridge in bridges:
            process = BridgeProcess(plane, engine, name=bridge, command=net.command(bridge), ping=PING, dead_seconds=600.0)
            stack.enter_context(process).wait_until_ready()
        found = Scene(net, cluster, engine, plane)
        found.replicas = [Elsewhere(net, host, plane) for host in REPLICAS]
        for each in found.replicas:
            stack.callback(Running(each).end)
        with engine.talking(PACE):
            until("replicas", lambda: all(each.is_exact for each in found.replicas), SECONDS)
        yield found
        net.heal()
        found.settles()


def test_a_bridge_that_is_cut_off_is_reported_by_every_replica(net: Network, cluster: NatsCluster) -> None:
    """From servers and engines alike: nothing is EXACT until it is back, and then what it has missed is there."""
    with scene(net, cluster, "bridge", bridges=("b1",)) as found, found.engine.talking(PACE):
        net.split("b1")
        until(
            "doubt",
            lambda: all(each.is_stale("no bridge that") for each in found.replicas),
            SECONDS,
        )
        net.heal()
        found.goes_on()


def test_a_replica_that_is_cut_off_says_so(net: Network, cluster: NatsCluster) -> None:
    """It says so to clients that still reach it; the other one is EXACT all the while."""
    with scene(net, cluster, "replica", bridges=("b1",)) as found, found.engine.talking(PACE):
        one, two = found.replicas
        net.split(one.replica.name)
        until("doubt", lambda: one.trust == Trust.STALE, SECONDS)
        found.goes_on()
        assert two.is_exact
        net.heal()
        until("it to be sure again", lambda: one.is_exact, SECONDS)


@pytest.mark.skipif("KVEVENTS_LONG" not in os.environ, reason="servers take a minute to elect again: `make partitions`")
def test_two_halves_of_everything(net: Network, cluster: NatsCluster) -> None:
    """There a bridge, a replica and the server that leads the partition; here the engine and another one of each, and two
    servers.

    Here it goes on under another leader, and there every process knows that it cannot.
    """
    with scene(net, cluster, "halves", bridges=BRIDGES) as found, found.engine.talking(PACE):
        one, two = found.replicas
        net.split("b2", two.replica.name, found.leader)
        until("doubt", lambda: two.trust == Trust.STALE, SECONDS)
        found.goes_on()
        until("the one half to be sure", lambda: one.is_exact, SECONDS)
        assert two.trust == Trust.STALE
        net.heal()
        until("the other half to be sure", lambda: two.is_exact, SECONDS)
