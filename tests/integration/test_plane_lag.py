"""Tests of a bridge that does not read, or cannot write what it has read: replicas do not report EXACT."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from kvevents.stream import Trust
from kvevents_plane.bridge import BridgeSettings
from kvevents_plane.log_subscriber import LogSubscriber
from kvevents_plane.page_builder import PageBuilder
from kvevents_plane.partition_state import PartitionState
from kvevents_plane.records import BatchRecord, HeartbeatRecord, JoinRecord, Record, TrustRecord
from nats_cases import needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import SECONDS, ThreadRunner, plane_at, run_bridge
from plane_subscriber_cases import make_message, subscriber
from service_cases import engine, wait_for
from service_replica_cases import watch_of
from service_replica_digest_cases import ReplicaRunner
from tools.nats_servers import NatsServer


@needs_nats
def test_while_a_bridge_reads_nothing_its_streams_are_not_exact(server: NatsServer) -> None:
    """Its heartbeats continue and report the lag even if its queue is full. When there is room again, all batches arrive and
    the stream is EXACT."""
    plane = plane_at(server.url, name="unread", partitions=1)
    with ExitStack() as stack:
        one = stack.enter_context(engine())
        bridge = stack.enter_context(run_bridge(plane, watch_of("one", one), max_lag_seconds=0.2))
        replica = ReplicaRunner(plane, "replica")
        stack.callback(ThreadRunner(replica).end)
        one.store(range(64))

        def found() -> str | None:
            replica.confirm()
            return replica.digest if replica.is_exact else None

        before = wait_for("an exact replica", found, SECONDS)
        bridge._handed_over += 1 << 40  # bytes that the servers have not accepted
        wait_for("it to read nothing", lambda: bridge._unread_since is not None, SECONDS)
        one.store(range(64, 128))
        wait_for(
            "less trust",
            lambda: (trust := trust_of(replica)) == Trust.REPLAYING and "lags" in trust.reason,
            SECONDS,
        )
        assert replica.digest == before
        bridge._handed_over -= 1 << 40
        wait_for("trust", lambda: replica.is_exact, SECONDS)
        wait_for("the other blocks", lambda: replica.digest != before, SECONDS)


def trust_of(replica: ReplicaRunner) -> Trust:
    return next(member.trust for member in list(replica.fleet.members.values()))


def records(trust: str, **lags: float) -> list[Record]:
    log_records: list[Record] = [JoinRecord("engine", 0, b"")]
    for bridge, lag in lags.items():
        log_records += [HeartbeatRecord(bridge, 1.0, "", lag), TrustRecord("engine", 0, bridge, trust, "", {})]
    return log_records


def trust_after(*log_records: Record) -> Trust:
    found: LogSubscriber = subscriber()
    found.put(0, [make_message(1, *log_records)])
    found.receive_many(timeout=0.0)
    return found.trust("engine")


@pytest.mark.parametrize("trust", ["EXACT", "DEGRADED"])
def test_the_report_of_a_lagging_bridge_counts_as_replaying(trust: str) -> None:
    """A report of another bridge that does not lag is used instead."""
    assert trust_after(*records(trust, a=0.0)) == Trust(trust)
    assert trust_after(*records(trust, a=7.0)) == Trust.REPLAYING
    assert "bridge a lags by 7 s" in trust_after(*records(trust, a=7.0)).reason
    assert trust_after(*records(trust, a=7.0, b=0.0)) == Trust(trust)


def test_a_lagging_bridge_can_still_report_that_its_engine_is_stale() -> None:
    assert trust_after(*records("STALE", a=7.0)) == Trust.STALE


def test_the_lag_of_a_partition_is_the_age_of_its_oldest_due_record() -> None:
    """A record that is held back on purpose, as a gap that another bridge may fill, does not count as lag."""
    builder = PageBuilder(PartitionState(), "bridge", 1 << 20, "life")
    builder.resync(("engine", 0))
    assert builder.lag(100.0) == 0.0
    builder.enqueue(BatchRecord("engine", 0, 0, 0, False, b"x"), due=103.0)
    builder.enqueue(BatchRecord("engine", 0, 0, 1, False, b"x"), due=104.0)
    assert builder.lag(100.0) == 0.0
    assert builder.lag(105.0) == 2.0


def test_a_maximum_lag_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="max_lag_seconds is 0"):
        BridgeSettings(name="b", max_lag_seconds=0)


def test_a_heartbeat_interval_longer_than_the_limit_is_refused() -> None:
    """Other bridges would consider it dead between two heartbeats."""
    with pytest.raises(ValueError, match="heartbeat_seconds is 3600; it must be above 0 and at most 60"):
        BridgeSettings(name="b", heartbeat_seconds=3600)
