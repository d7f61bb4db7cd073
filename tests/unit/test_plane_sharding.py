"""Rendezvous hashing assigns partitions to replicas, which join and leave without a coordinator."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.plane.replicas import ShardAnnouncement, ShardAssignment, ShardTimers, assigned_replicas, plan_queries

NAMES = st.lists(st.text("abcdefgh-", min_size=1, max_size=4), min_size=1, max_size=8, unique=True)
PARTITIONS = 64
TIMERS = ShardTimers()


def announcement(*stored: int, holders: int = 1, counter: int = 0) -> ShardAnnouncement:
    return ShardAnnouncement("http://x", holders, list(stored), counter)


@given(NAMES, st.integers(0, 255), st.integers(1, 4))
def test_a_partition_has_the_wanted_number_of_holders_and_all_replicas_agree_on_them(
    names: list[str], partition: int, holders: int
) -> None:
    found = assigned_replicas(partition, names, holders)
    assert len(found) == len(set(found)) == min(holders, len(names))
    assert found == assigned_replicas(partition, reversed(names), holders)


@given(NAMES, st.integers(1, 3), st.data())
def test_only_partitions_of_a_lost_replica_move(names: list[str], holders: int, data: st.DataObject) -> None:
    """Each gets one new holder. In the other direction, a replica that joins takes over a share, and nothing else moves."""
    lost = data.draw(st.sampled_from(names))
    remaining = [name for name in names if name != lost]
    for partition in range(PARTITIONS):
        before, after = assigned_replicas(partition, names, holders), assigned_replicas(partition, remaining, holders)
        stayed = [name for name in before if name != lost]
        assert after[: len(stayed)] == stayed
        assert len(after) - len(stayed) == (lost in before and len(remaining) >= holders)


def test_shares_are_even() -> None:
    """With 256 partitions on 10 replicas, each stored twice, no replica has more than 1.5 times the mean."""
    names = [f"replica-{number}" for number in range(10)]
    shares = [sum(name in assigned_replicas(partition, names, 2) for partition in range(256)) for name in names]
    assert sum(shares) == 512
    assert max(shares) < 1.5 * 512 / 10


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=2), st.sets(st.integers(0, 9)), max_size=5), st.sets(st.integers(0, 9))
)
def test_a_plan_queries_each_partition_at_one_holder(holding: Mapping[str, set[int]], partitions: set[int]) -> None:
    queries, unheld = plan_queries("own", partitions, holding)
    planned = [partition for found in queries.values() for partition in found]
    assert sorted(planned + unheld) == sorted(partitions)
    assert all(set(found) <= holding[name] and found for name, found in queries.items())
    assert not set(unheld).intersection(*([set().union(*holding.values())] if holding else [set()]))


def test_a_plan_queries_as_few_replicas_as_possible() -> None:
    holding = {"all": [0, 1, 2, 3], "low": [0, 1], "high": [2, 3]}
    assert plan_queries("own", range(4), holding) == ({"all": [0, 1, 2, 3]}, [])
    assert plan_queries("own", range(5), {"low": [0, 1], "high": [2, 3]}) == ({"low": [0, 1], "high": [2, 3]}, [4])


def test_nothing_is_assigned_before_the_others_are_known() -> None:
    """Otherwise the first of many replicas would begin with all partitions."""
    assignment = ShardAssignment("own", 8, 1)
    assert assignment.assigned == frozenset()
    assignment.update({}, [], 0.0)
    assert assignment.assigned == frozenset(range(8))


def test_a_short_absence_moves_no_partitions_and_a_long_one_does() -> None:
    assignment = ShardAssignment("a", PARTITIONS, 1)
    assignment.update({"b": announcement()}, [], 0.0)
    share = assignment.assigned
    assert 0 < len(share) < PARTITIONS
    assignment.update({}, share, TIMERS.present_seconds - 1)
    assert (assignment.assigned, list(assignment.present)) == (share, ["b"]), "one read might have missed it"
    for now in range(int(TIMERS.present_seconds), int(TIMERS.dead_seconds), 2):
        assignment.update({"b": announcement()}, share, float(now))
    assert (assignment.assigned, dict(assignment.present)) == (share, {}), (
        "its old announcement is still there, but it reports nothing new"
    )
    assignment.update({}, share, TIMERS.dead_seconds + 1)
    assert assignment.assigned == frozenset(range(PARTITIONS))


def test_a_partition_is_released_only_after_all_new_holders_have_reported_it_for_some_time() -> None:
    assignment = ShardAssignment("a", PARTITIONS, 2)
    assignment.update({}, range(PARTITIONS), 0.0)
    others = {"b": announcement(holders=2), "c": announcement(holders=2)}
    assignment.update(others, range(PARTITIONS), 1.0)
    foreign = sorted(set(range(PARTITIONS)) - assignment.assigned)
    assert foreign
    assert assignment.releasable(1000.0) == frozenset()

    def others_at(now: float) -> dict[str, ShardAnnouncement]:
        counter = int(now)
        return {
            "b": announcement(*foreign, holders=2, counter=counter),
            "c": announcement(*foreign[1:], holders=2, counter=counter),
        }

    for now in (2.0, 7.0):
        assignment.update(others_at(now), range(PARTITIONS), now)
    assert assignment.releasable(2.0 + TIMERS.release_seconds - 0.1) == frozenset()
    assert assignment.releasable(2.0 + TIMERS.release_seconds) == frozenset(foreign[1:])
    assignment.update({"b": others_at(9.0)["b"]}, range(PARTITIONS), 9.0)  # one of the new holders is not reported
    assert assignment.releasable(1000.0) == frozenset()
    for now in (10.0, 13.0, 16.0, 19.0, 22.0):
        assignment.update(others_at(10.0), range(PARTITIONS), now)  # the announcements do not change
    assert assignment.releasable(22.0) == frozenset()


def test_an_hour_without_reports_removes_no_replica() -> None:
    """All come back at about the same time; the first reader must not begin with the partitions of slower replicas."""
    assignment = ShardAssignment("a", PARTITIONS, 1)
    assignment.update({"b": announcement(counter=1)}, [], 0.0)
    share = assignment.assigned
    assignment.update({}, share, 3_600.0)
    assert (assignment.assigned, list(assignment.present)) == (share, ["b"])
    for passed in range(0, int(TIMERS.dead_seconds) + 1, 2):
        assignment.update({}, share, 3_600.0 + passed)
    assert assignment.assigned == share
    assignment.update({}, share, 3_600.0 + TIMERS.dead_seconds + 2)
    assert assignment.assigned == frozenset(range(PARTITIONS))


def test_nothing_is_released_while_no_other_replica_is_reported() -> None:
    assignment = ShardAssignment("a", PARTITIONS, 1)
    everything = announcement(*range(PARTITIONS), counter=1)
    assignment.update({"b": everything}, range(PARTITIONS), 0.0)
    assert assignment.releasable(1_000.0) == frozenset()
    assignment.update({"b": announcement(*range(PARTITIONS), counter=2)}, range(PARTITIONS), 1_000.0)
    assert assignment.releasable(1_000.0 + TIMERS.present_seconds) == frozenset()
    assignment.update({"b": announcement(*range(PARTITIONS), counter=3)}, range(PARTITIONS), 1_005.0)
    assignment.update({"b": announcement(*range(PARTITIONS), counter=4)}, range(PARTITIONS), 1_010.0)
    assert assignment.releasable(1_000.0 + TIMERS.release_seconds) == frozenset(range(PARTITIONS)) - assignment.assigned


def test_the_highest_number_of_holders_that_any_replica_wants_counts() -> None:
    """Settings change on one replica after the other; until then no replica releases a partition that another one wants held
    twice."""
    assignment = ShardAssignment("a", PARTITIONS, 1)
    assignment.update({"b": announcement(holders=2)}, [], 0.0)
    assert assignment.assigned == frozenset(range(PARTITIONS))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=12), st.integers(1, 3))
def test_no_partition_is_without_a_holder_while_replicas_start_and_stop(changes: list[tuple[str, bool]], holders: int) -> None:
    """Each replica acts only on the announcements that it has read. One replica always stays."""
    cluster = Cluster(holders)
    cluster.start("stays")
    cluster.settle()
    assert cluster.is_covered
    for name, starts in changes:
        cluster.start(name) if starts else cluster.kill(name)
        for _ in range(3):
            cluster.step(2.0)
            assert cluster.is_covered
    cluster.settle()
    assert cluster.is_covered
    for partition in range(Cluster.PARTITIONS):
        assert set(assigned_replicas(partition, cluster.assignments, holders)) == {
            name for name in cluster.assignments if partition in cluster.stored[name]
        }


class Cluster:
    """Replicas with their assignments. A new holder loads a partition in one step.

    A replica is killed only if other replicas hold all its partitions, since nothing covers the loss of the only holder.
    """

    PARTITIONS = 16

    def __init__(self, holders: int) -> None:
        self.now = 0.0
        self.assignments: dict[str, ShardAssignment] = {}
        self.stored: dict[str, set[int]] = {}
        self._holders = holders

    def start(self, name: str) -> None:
        if name not in self.assignments:
            self.assignments[name], self.stored[name] = ShardAssignment(name, self.PARTITIONS, self._holders), set()

    def kill(self, name: str) -> None:
        rest = set().union(*(stored for other, stored in self.stored.items() if other != name))
        if name in self.assignments and rest == set(range(self.PARTITIONS)):
            del self.assignments[name], self.stored[name]

    def step(self, seconds: float) -> None:
        """Let each replica in turn read the announcements of the others, load new partitions and release old ones."""
        self.now += seconds
        for name, assignment in self.assignments.items():
            others = {
                other: announcement(*stored, holders=self._holders, counter=int(self.now))
                for other, stored in self.stored.items()
                if other != name
            }
            assignment.update(others, self.stored[name], self.now)
            self.stored[name] |= assignment.assigned
            self.stored[name] -= assignment.releasable(self.now)

    def settle(self) -> None:
        for _ in range(40):
            self.step(2.0)

    @property
    def is_covered(self) -> bool:
        return not self.assignments or set().union(*self.stored.values()) == set(range(self.PARTITIONS))


@pytest.mark.parametrize("value", [b"", b"{}", b'{"url": 1}', b"[]"])
def test_an_invalid_announcement_decodes_to_none(value: bytes) -> None:
    assert ShardAnnouncement.decode(value) is None


@pytest.mark.parametrize(
    "url", ["", "h:1", "ftp://h", "http://", "http://h:99999", "http://h/x", "http://u@h", "http://h\r\n", "http://["]
)
def test_an_announcement_without_a_valid_url_is_ignored(url: str) -> None:
    """A client with write access to the bucket cannot make the other replicas fail."""
    assert ShardAnnouncement.decode(ShardAnnouncement(url, 1, []).encode()) is None


@pytest.mark.parametrize("holders", [0, 9, 1 << 40])
def test_an_announcement_with_an_invalid_number_of_holders_is_ignored(holders: int) -> None:
    assert ShardAnnouncement.decode(ShardAnnouncement("http://h:1", holders, []).encode()) is None


def test_an_announcement_survives_a_round_trip() -> None:
    assert ShardAnnouncement.decode(announcement(1, 2).encode()) == announcement(1, 2)
