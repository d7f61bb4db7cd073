"""A replica whose contents differ from the others or from the engine rebuilds its index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from msgspec.structs import replace

from kvevents_plane.settings import PlaneSettings, ReaderLimits, ReplicaTimers
from nats_cases import needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import ThreadRunner, plane_at, run_bridge
from service_cases import engine, wait_for
from service_replica_cases import watch_of
from service_replica_digest_cases import ReplicaRunner
from tools.nats_servers import NatsServer

pytestmark = needs_nats
READER = ReaderLimits(digest_pages=2)
TIMERS = ReplicaTimers(compare_seconds=0.05, turn_seconds=0.5, rebuild_seconds=0.5)
KEY = ("default\x1fdefault\x1fone", 0)


@contextmanager
def replicas(plane: PlaneSettings, count: int) -> Iterator[list[ReplicaRunner]]:
    with ExitStack() as stack:
        found = [ReplicaRunner(plane, f"replica-{number}") for number in range(count)]
        for each in found:
            stack.callback(ThreadRunner(each).end)

        def are_exact() -> bool:
            for each in found:
                each.confirm()
            return all(each.is_exact for each in found)

        wait_for("replicas", are_exact)
        yield found


@pytest.mark.parametrize("count", [2, 3])
def test_a_replica_that_differs_from_others_rebuilds_its_index(server: NatsServer, count: int) -> None:
    """Two other replicas outvote it. With one other replica, the two rebuild in turn. Then all have the right digest."""
    # A replica whose digests come late must not leave the other two alone for as long as their turns.
    timers = TIMERS if count == 2 else replace(TIMERS, turn_seconds=4.0)
    plane = plane_at(server.url, name=f"digests{count}", partitions=1, reader=READER, replicas=timers)
    with engine() as one, run_bridge(plane, watch_of("one", one)):
        one.store(range(64))
        with replicas(plane, count) as found:
            right = wait_for("the block", lambda: len({each.digest for each in found}) == 1 and found[0].digest)
            found[0].corrupt_index()
            assert found[0].digest != right
            wait_for("another generation", lambda: found[0].replica.builds > 1)
            wait_for("agreement", lambda: {each.digest for each in found} == {right})
            assert found[0].replica.consistency.disagreements >= 1
            if count == 3:
                assert [each.replica.builds for each in found[1:]] == [1, 1]


def test_a_replica_that_differs_from_the_engine_rebuilds_its_index(server: NatsServer) -> None:
    """Heartbeats of the engine have digests, by which a single replica detects the difference."""
    plane = plane_at(server.url, name="heartbeat", partitions=1, reader=READER, replicas=TIMERS)
    with engine(heartbeat=0.1) as one, run_bridge(plane, watch_of("one", one)):
        one.store(range(64))
        with replicas(plane, 1) as (only,):
            right = wait_for("the block", lambda: only.digest)
            only.corrupt_index()
            wait_for("a degraded source or another generation", lambda: not only.is_exact or only.replica.builds > 1)
            wait_for("another generation", lambda: only.replica.builds > 1)
            wait_for("what the engine holds", lambda: only.digest == right and only.is_exact)
