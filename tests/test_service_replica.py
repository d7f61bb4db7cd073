"""Replicas of a real service, built from the log of a real NATS server."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kvevents.plane.bridge import Watch
from kvevents.service.registration import Registration
from nats_servers import NatsServer, nats_server, needs_nats
from plane_cases import bridging, plane_at
from service_cases import MODEL, Engine, engines, serving, until

pytestmark = needs_nats


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as found:
        yield found


def watch_of(instance: str, found: Engine) -> Watch:
    registration = Registration(
        instance=instance,
        endpoint=found.publisher.endpoint,
        replay_endpoint=found.publisher.replay_endpoint,
        model=MODEL,
    )
    return Watch(registration.source(), msgspec.json.encode(registration))


def test_a_replica_answers_as_a_service_that_follows_the_engines(server: NatsServer) -> None:
    """What it holds, and how far it is to be trusted; engines join, publish and restart."""
    plane = plane_at(server.url, name="answers")
    with engines(2) as (one, two), bridging(plane, watch_of("one", one), watch_of("two", two)):
        one.store(range(64))
        with serving("--from", server.url, "--plane", "answers") as service:
            until("readiness", lambda: service.get("/readyz").status == 200)
            service.exact("one", blocks=4)
            service.exact("two", blocks=0)
            two.store(range(32))
            service.holds("two", range(32))
            assert service.held(list(range(64))) == {"one": 64, "two": 32}
