"""Tests of cache attestations behind a plane: a real service builds replicas from the log of a real NATS server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import pytest

from attestation_cases import AttestingEngine
from kvevents.events import AllBlocksCleared, BlockRemoved
from kvevents.service.fleet.registration import Registration
from kvevents_plane.bridge import Watch
from nats_cases import needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import plane_at, run_bridge
from relay_cases import block
from service_cases import Service, serving, wait_for
from tools.nats_servers import NatsServer

pytestmark = needs_nats


@pytest.fixture
def engine() -> Iterator[AttestingEngine]:
    with closing(AttestingEngine(buffer_steps=50)) as made:
        yield made


def watch_of(engine: AttestingEngine) -> Watch:
    found = Registration(
        instance="one", endpoint=engine.publisher.endpoint, replay_endpoint=engine.publisher.replay_endpoint, model="m"
    )
    return Watch(found.source(), msgspec.json.encode(found))


def fill(engine: AttestingEngine, first: int, count: int = 60) -> None:
    """Store blocks in two groups, some twice, and remove some. All are on the GPU, since an engine attests no other tier."""
    full: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}
    for number in range(first, first + count):
        engine.publish(block(number, **full), block(number, **window))
        if number % 3 == 0:
            engine.publish(block(number, **full))
        if number % 4 == 0:
            engine.publish(BlockRemoved([number], "GPU"))


def wait_until_attested(service: Service, engine: AttestingEngine) -> dict[str, Any]:
    """Wait until a replica has all blocks of the engine and reports that the engine attests them."""
    blocks = len({hash_ for hash_, _ in engine.cache})

    def find_attested() -> dict[str, Any] | None:
        found = service.sources().get(("one", 0))
        return found if found and found["blocks"] == blocks and found["trust"]["attested"] else None

    return wait_for(f"{blocks} attested blocks", find_attested)


def test_replicas_are_attested_after_a_failover_and_after_a_late_start(server: NatsServer, engine: AttestingEngine) -> None:
    """A second bridge takes over from the end of the log. A replica that starts late reads a snapshot and the pages after
    it."""
    plane = plane_at(server.url, name="attested", partitions=1)
    flags = ("--nats", server.url, "--plane", "attested", "--snapshot-seconds", "0.3")
    with ExitStack() as first, serving(*flags, "--replica-name", "a") as early:
        first.enter_context(run_bridge(plane, watch_of(engine), name="first"))
        fill(engine, 0)
        wait_until_attested(early, engine)
        with run_bridge(plane, watch_of(engine), name="second"):
            first.close()
            fill(engine, 100)
            wait_until_attested(early, engine)
            engine.publish(AllBlocksCleared())
            fill(engine, 200)
            wait_until_attested(early, engine)
            with serving(*flags, "--replica-name", "b") as late:
                found = wait_until_attested(late, engine)
            assert found["trust"]["state"] == "EXACT"


def test_a_replica_reports_that_the_engine_holds_other_blocks(server: NatsServer, engine: AttestingEngine) -> None:
    """The replica is DEGRADED while the engine attests blocks that it has not announced. Its index keeps all blocks, because it
    agrees with the log."""
    plane = plane_at(server.url, name="unattested", partitions=1)
    with run_bridge(plane, watch_of(engine)), serving("--nats", server.url, "--plane", "unattested") as service:
        fill(engine, 0)
        wait_until_attested(service, engine)
        engine.falsify_attestation(77)

        def reasons() -> list[str]:
            found: list[str] = service.source("one")["trust"]["reason_codes"]
            return found

        wait_for("the difference", lambda: "unattested" in reasons())
        assert service.trust("one")[0] == "DEGRADED"
        assert "own cache" in service.trust("one")[1]
        assert service.source("one")["blocks"] > 0
        engine.falsify_attestation(0)
        wait_until_attested(service, engine)
        wait_for("agreement", lambda: "unattested" not in reasons())
