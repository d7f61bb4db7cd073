"""The follower thread writes events to the index and runs submitted tasks in between."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import msgspec
import pytest

from kvevents.events import BlockRemoved
from kvevents.index import ApplyResult, PrefixIndex
from kvevents.service.data_plane import DataPlane
from kvevents.service.fleet.fleet import Fleet
from kvevents.service.fleet.follower import Follower, IndexSink
from kvevents.service.fleet.registration import Registration, source_name
from kvevents.stream import RawBatch, RawDelivery, StreamLimits, Trust
from kvevents.subscriber import Subscriber
from kvevents.testing.fake_transport import FakeTransport
from kvevents_plane.log_subscriber import LogSubscriber


def test_a_cancelled_task_is_skipped() -> None:
    """The thread does not run it, does not end because of it, and runs later tasks."""
    sink = IndexSink(PrefixIndex())
    follower = Follower(LogSubscriber(lambda: 0.0, lambda _: None, sink), sink)
    follower.start()
    begun, may_continue = threading.Event(), threading.Event()
    done: list[str] = []

    def block_thread() -> None:
        begun.set()
        may_continue.wait(60.0)

    follower.submit(block_thread)
    assert begun.wait(60.0)
    cancelled = follower.submit(lambda: done.append("cancelled"))
    assert cancelled.cancel()
    may_continue.set()
    follower.submit(lambda: done.append("awaited")).result(60.0)
    assert done == ["awaited"]
    assert follower.stop()


def test_trust_is_lowered_before_the_index_has_the_batch_that_lowers_it() -> None:
    """A replayed batch may come from another engine, so an answer that counts it must not be EXACT."""
    transport = FakeTransport()
    engine = transport.engine("tcp://engine:1", "tcp://engine:2")
    index = PrefixIndex()
    fleet = Fleet(index, max_sources=10)
    seen: list[tuple[bool, str]] = []
    states: list[str] = []

    class RecordingIndex:
        """The index, which records the trust that answers would have when deliveries arrive."""

        def apply_many(self, deliveries: Sequence[RawDelivery]) -> list[ApplyResult]:
            states.append(fleet.members[registration.key].trust_status.state)
            return index.apply_many(deliveries)

    sink = IndexSink(cast("PrefixIndex", RecordingIndex()), fleet)
    subscriber = Subscriber(decode=False, transport=transport, clock=transport.clock, sink=sink)
    fleet.follower.subscriber.close()  # the subscriber has sockets
    follower = fleet.follower = Follower(subscriber, sink)
    registration = Registration(instance="e", endpoint=engine.endpoint, replay_endpoint=engine.replay_endpoint, model="m")
    fleet.register(registration)

    def follow() -> None:
        for _ in range(5):
            deliveries = subscriber.receive_many(timeout=0)
            follower._count(deliveries)
            is_replayed = any(isinstance(delivery, RawBatch) and delivery.replayed for delivery in deliveries)
            seen.extend([(is_replayed, state) for state in states])
            states.clear()

    for _ in range(5):
        engine.publish(BlockRemoved([1]))
        follow()
    assert seen[-1] == (False, "EXACT")
    seen.clear()
    engine.publish(BlockRemoved([1]), lost=True)
    transport.clock.advance(StreamLimits().idle_before_probe)
    follow()
    assert [state for is_replayed, state in seen if is_replayed]
    assert "EXACT" not in [state for is_replayed, state in seen if is_replayed]
    for _ in range(2):
        engine.publish(BlockRemoved([3]))
        follow()
    assert fleet.members[registration.key].trust_status.state == "EXACT"
    subscriber.remove(*registration.key)
    fleet.on_received([registration.key])  # as if a log reported that the stream left after its last batch


def test_a_member_that_leaves_is_gone_from_answers_before_its_blocks_are() -> None:
    """Otherwise an answer would name it as EXACT, without the blocks that it had."""
    index = PrefixIndex()
    fleet = Fleet(index, max_sources=10)
    events: list[str] = []

    class RecordingIndex:
        """The index, which records when blocks are removed."""

        def remove_worker(self, key: tuple[str, int]) -> int:
            events.append("blocks removed")
            return index.remove_worker(key)

        def __getattr__(self, name: str) -> object:
            return getattr(index, name)

    transport = FakeTransport()
    transport.engine("tcp://engine:1")
    sink = IndexSink(index, fleet)
    fleet.follower.subscriber.close()
    fleet.follower = Follower(Subscriber(decode=False, transport=transport, clock=transport.clock, sink=sink), sink)
    fleet.follower.start()
    try:
        registration = Registration(instance="e", endpoint="tcp://engine:1", model="m")
        fleet.register(registration).result(60.0)
        fleet.index = cast("PrefixIndex", RecordingIndex())
        fleet.on_change = lambda: events.append(f"{len(fleet.members)} members published")
        fleet.unregister(registration.key).result(60.0)
    finally:
        assert fleet.follower.stop()
    last = events.index("blocks removed")
    assert "0 members published" in events[:last]


class RecordingServer:
    """A native data plane that records the changes of its table."""

    def __init__(self) -> None:
        self.changes: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}
        """Instances by their places."""

    def change_table(self, _: PrefixIndex, encoded: bytes) -> None:
        change = msgspec.json.decode(encoded)
        self.changes.append(change)
        for place in change["removed"]:
            del self.names[str(place)]
        self.names.update((place, worker["instance"]) for place, worker in change["workers"].items())


@pytest.fixture(name="published_fleet")
def publish_fleet() -> tuple[Fleet, RecordingServer]:
    """Return a fleet that follows nothing, and the server that has its routing table."""
    fleet, server = Fleet(PrefixIndex(), max_sources=1_000), RecordingServer()
    sink = IndexSink(fleet.index, fleet)
    fleet.follower.subscriber.close()  # the subscriber has sockets
    fleet.follower = Follower(LogSubscriber(lambda: 0.0, lambda _: None, sink), sink)
    plane = DataPlane(fleet, cast("Any", None), cast("Any", None))
    plane._native, plane._next_refresh = cast("Any", server), math.inf  # the server answers no probes
    fleet.on_change = plane.publish
    return fleet, server


def test_a_change_of_one_member_writes_one_row(published_fleet: tuple[Fleet, RecordingServer]) -> None:
    """If each registration wrote all rows, a thousand engines would cost half a million rows."""
    fleet, server = published_fleet
    wanted = [Registration(instance=f"e{number}", endpoint="tcp://engine:1", model="m") for number in range(100)]
    for registration in wanted:
        before = len(server.changes)
        fleet.register(registration).result()
        assert fleet.workers.keys() == fleet.members.keys()
        rows = [row for change in server.changes[before:] for row in change["workers"].values()]
        assert [row["instance"] for row in rows] == [registration.instance]
    server.changes.clear()
    fleet.members[wanted[70].key].set_trust(Trust.EXACT, (), 0.0)
    for registration in wanted[10:90:2]:
        fleet.unregister(registration.key)
    fleet.register(wanted[10]).result()
    assert sum(len(change["workers"]) + len(change["removed"]) for change in server.changes) == 1 + 40 + 1
    assert all(len(change) == 4 and not change["adapters"] for change in server.changes)
    assert sorted(server.names.values()) == sorted(member.registration.instance for member in fleet.members.values())
    assert max(map(int, server.names)) == 99, "free places are given again"


def test_members_are_found_by_their_endpoint(published_fleet: tuple[Fleet, RecordingServer]) -> None:
    """A registration is compared with those of its endpoint alone, or the last of a thousand would be with all others."""
    fleet, _ = published_fleet
    for number in range(9):
        fleet.register(Registration(instance=f"e{number}", endpoint=f"tcp://engine:{number // 2}", model="m"))

    def names_at(endpoint: str) -> list[str]:
        return [member.registration.instance for member in fleet.members_at(endpoint)]

    assert [names_at(f"tcp://engine:{port}") for port in (1, 4, 5)] == [["e2", "e3"], ["e8"], []]
    for name in ("e2", "e8"):
        fleet.unregister((source_name("default", "default", name), 0))
    assert [names_at(f"tcp://engine:{port}") for port in (1, 4)] == [["e3"], []]
    assert "tcp://engine:4" not in fleet._endpoints


def test_a_new_stream_begins_with_the_mean_load_of_a_few(
    published_fleet: tuple[Fleet, RecordingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it were the mean of all streams of a model, the last of a thousand would read a thousand loads."""
    fleet, _ = published_fleet
    peers: list[int] = []

    class RecordingLoads:
        def join(self, _: str, __: int, streams: Sequence[tuple[str, int]]) -> None:
            peers.append(len(streams))

    monkeypatch.setattr(fleet.loads, "requests", RecordingLoads())
    for number in range(300):
        fleet.register(Registration(instance=f"e{number}", endpoint="tcp://engine:1", model="m"))
    assert (peers[0], peers[62], max(peers), len(peers)) == (1, 63, 64, 300)
    assert min(peers[64:]) > 30


def test_members_come_and_go_in_the_routing_table_at_once(
    published_fleet: tuple[Fleet, RecordingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing does not write the table, so the table must not wait for the thread that follows the engines."""
    fleet, server = published_fleet
    monkeypatch.setattr(fleet.follower, "submit", lambda _: Future[None]())
    registration = Registration(instance="e", endpoint="tcp://engine:1", model="m")
    fleet.register(registration)
    assert list(server.names.values()) == [member.registration.instance for member in fleet.workers.values()] == ["e"]
    fleet.unregister(registration.key)
    assert not server.names
    fleet.adapters = frozenset({registration.scope._replace(lora="sql")})
    fleet.replace_registrations("discovery", [], lambda _: None)
    assert server.changes[-1]["adapters"] == [["m", "default", "default", "sql", None]]


def test_the_trust_of_idle_streams_is_not_read_again() -> None:
    """A service of a thousand idle engines would read a thousand trusts ten times per second."""
    transport = FakeTransport()
    fleet = Fleet(PrefixIndex(), max_sources=1_000)
    sink = IndexSink(fleet.index, fleet)
    fleet.follower.subscriber.close()  # the subscriber has sockets
    subscriber = Subscriber(decode=False, transport=transport, clock=transport.clock, sink=sink)
    fleet.follower = Follower(subscriber, sink)
    made = [transport.engine(f"tcp://engine:{number}") for number in range(50)]
    for number, engine in enumerate(made):
        fleet.register(Registration(instance=f"e{number}", endpoint=engine.endpoint, model="m"))
    reads: list[tuple[str, int]] = []

    def turn() -> int:
        """Run one turn of the follower, and return how many trusts the fleet read."""
        reads.clear()
        fleet._trust_due = 0.0
        fleet.follower._count(subscriber.receive_many(timeout=0))
        fleet.on_tick()
        return len(reads)

    read_trust = subscriber.trust

    def record_read(name: str | None = None, rank: int = 0) -> Trust:
        reads.append((name or "", rank))
        return read_trust(name, rank)

    subscriber.trust = record_read  # type: ignore[method-assign]
    for _ in range(10):
        turn()
    fleet._refresh_due = float("inf")
    assert turn() == turn() == 0
    assert {member.trust_status.state for member in fleet.members.values()} == {"DEGRADED"}
    made[7].disconnect()
    assert 0 < sum(turn() for _ in range(3)) <= 4
    assert fleet.members[source_name("default", "default", "e7"), 0].trust_status.state == "STALE"


def test_a_query_that_misses_an_engine_by_a_moment_has_an_unknown_model() -> None:
    """That was true when the query was answered. A failure would be one of a service that works."""
    fleet = Fleet(PrefixIndex(), max_sources=10)
    sink = IndexSink(fleet.index, fleet)
    fleet.follower.subscriber.close()  # the subscriber has sockets
    fleet.follower = Follower(LogSubscriber(lambda: 0.0, lambda _: None, sink), sink)
    registration = Registration(instance="e", endpoint="tcp://engine:1", model="m")
    fleet.register(registration)
    error = fleet.why_unanswered(registration.scope)
    assert (error.status, error.reason) == (404, "unknown-model")
