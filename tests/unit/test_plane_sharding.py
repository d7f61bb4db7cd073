"""Which replica holds which partitions: rendezvous hashing, with replicas that join and leave without a coordinator."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.plane.replicas import ShardAnnouncement, ShardAssignment, ShardTimers, assigned_replicas, plan_queries

NAMES = st.lists(st.text("abcdefgh-", min_size=1, max_size=4), min_size=1, max_size=8, unique=True)
PARTITIONS = 64
PACE = ShardTimers()


def says(*held: int, holders: int = 1, beat: int = 0) -> ShardAnnouncement:
    return ShardAnnouncement("http://x", holders, list(held), beat)


@given(NAMES, st.integers(0, 255), st.integers(1, 4))
def test_a_partition_has_as_many_owners_as_wanted_and_all_agree_on_them(names: list[str], partition: int, holders: int) -> None:
    found = assigned_replicas(partition, names, holders)
    assert len(found) == len(set(found)) == min(holders, len(names))
    assert found == assigned_replicas(partition, reversed(names), holders)


@given(NAMES, st.integers(1, 3), st.data())
def test_only_partitions_of_a_lost_replica_move(names: list[str], holders: int, data: st.DataObject) -> None:
    """Each gets one new holder. Read backwards, a replica joins: it takes over a share, and nothing else moves."""
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    for partition in range(PARTITIONS):
        before, after = assigned_replicas(partition, names, holders), assigned_replicas(partition, left, holders)
        stayed = [name for name in before if name != gone]
        assert after[: len(stayed)] == stayed
        assert len(after) - len(stayed) == (gone in before and len(left) >= holders)


def test_shares_are_even() -> None:
    """Of 256 partitions on 10 replicas, each held twice: no replica has half as much again as the mean."""
    names = [f"replica-{number}" for number in range(10)]
    shares = [sum(name in assigned_replicas(partition, names, 2) for partition in range(256)) for name in names]
    assert sum(shares) == 512
    assert max(shares) < 1.5 * 512 / 10


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=2), st.sets(st.integers(0, 9)), max_size=5), st.sets(st.integers(0, 9))
)
def test_a_plan_asks_each_partition_of_one_holder(holding: Mapping[str, set[int]], partitions: set[int]) -> None:
    asked, unheld = plan_queries("own", partitions, holding)
    planned = [partition for found in asked.values() for partition in found]
    assert sorted(planned + unheld) == sorted(partitions)
    assert all(set(found) <= holding[name] and found for name, found in asked.items())
    assert not set(unheld).intersection(*([set().union(*holding.values())] if holding else [set()]))


def test_a_plan_asks_as_few_as_can_be() -> None:
    holding = {"all": [0, 1, 2, 3], "low": [0, 1], "high": [2, 3]}
    assert plan_queries("own", range(4), holding) == ({"all": [0, 1, 2, 3]}, [])
    assert plan_queries("own", range(5), {"low": [0, 1], "high": [2, 3]}) == ({"low": [0, 1], "high": [2, 3]}, [4])


def test_nothing_is_assigned_before_the_others_are_known() -> None:
    """Otherwise the first of many replicas would begin with all partitions."""
    assignment = ShardAssignment("own", 8, 1)
    assert assignment.assigned == frozenset()
    assignment.update({}, [], 0.0)
    assert assignment.assigned == frozenset(range(8))


def test_a_restart_moves_no_partitions_and_a_death_does() -> None:
    assignment = ShardAssignment("a", PARTITIONS, 1)
    assignment.update({"b": says()}, [], 0.0)
    share = assignment.assigned
    assert 0 < len(share) < PARTITIONS
    assignment.update({}, share, PACE.present_seconds - 1)
    assert (assignment.assigned, list(assignment.present)) == (share, ["b"]), "one look may have missed it"
    for now in range(int(PACE.present_seconds), int(PACE.dead_seconds), 2):
        assignment.update({"b": says()}, share, float(now))
    assert (assignment.assigned, dict(assignment.present)) == (share, {}), "what it has said is still there, and nothing new"
    assignment.update({}, share, PACE.dead_seconds + 1)
    assert assignment.assigned == frozenset(range(PARTITIONS))


def test_a_partition_is_released_only_after_all_new_holders_have_held_it_for_a_while() -> None:
    assignment = ShardAssignment("a", PARTITIONS, 2)
    assignment.update({}, range(PARTITIONS), 0.0)
    others = {"b": says(holders=2), "c": says(holders=2)}
    assignment.update(others, range(PARTITIONS), 1.0)
    foreign = sorted(set(range(PARTITIONS)) - assignment.assigned)
    assert foreign
    assert assignment.releasable(1000.0) == frozenset()

    def others_at(now: float) -> dict[str, ShardAnnouncement]:
        beat = int(now)
        return {"b": says(*foreign, holders=2, beat=beat), "c": says(*foreign[1:], holders=2, beat=beat)}

    for now in (2.0, 7.0):
        assignment.update(others_at(now), range(PARTITIONS), now)
    assert assignment.releasable(2.0 + PACE.release_seconds - 0.1) == frozenset()
    assert assignment.releasable(2.0 + PACE.release_seconds) == frozenset(foreign[1:])
    assignment.update({"b": others_at(9.0)["b"]}, range(PARTITIONS), 9.0)  # one of them is not reported
    assert assignment.releasable(1000.0) == frozenset()
    for now in (10.0, 13.0, 16.0, 19.0, 22.0):
        assignment.update(others_at(10.0), range(PARTITIONS), now)  # they say nothing new
    assert assignment.releasable(22.0) == frozenset()


def test_an_hour_without_the_servers_removes_no_replica() -> None:
    """All come back at about the same time; the first reader must not begin with the partitions of slower replicas."""
    assignment = ShardAssignment("a", PARTITIONS, 1)
    assignment.update({"b": says(beat=1)}, [], 0.0)
    share = assignment.assigned
    assignment.update({}, share, 3_600.0)
    assert (assignment.assigned, list(assignment.present)) == (share, ["b"])
    for passed in range(0, int(PACE.dead_seconds) + 1, 2):
        assignment.update({}, share, 3_600.0 + passed)
    assert assignment.assigned == share
    assignment.update({}, share, 3_600.0 + PACE.dead_seconds + 2)
    assert assignment.assigned == frozenset(range(PARTITIONS))


def test_nothing_is_released_while_no_other_replica_is_reported() -> None:
    assignment = ShardAssignment("a", PARTITIONS, 1)
    everything = says(*range(PARTITIONS), beat=1)
    assignment.update({"b": everything}, range(PARTITIONS), 0.0)
    assert assignment.releasable(1_000.0) == frozenset()
    assignment.update({"b": says(*range(PARTITIONS), beat=2)}, range(PARTITIONS), 1_000.0)
    assert assignment.releasable(1_000.0 + PACE.present_seconds) == frozenset()
    assignment.update({"b": says(*range(PARTITIONS), beat=3)}, range(PARTITIONS), 1_005.0)
    assignment.update({"b": says(*range(PARTITIONS), beat=4)}, range(PARTITIONS), 1_010.0)
    assert assignment.releasable(1_000.0 + PACE.release_seconds) == frozenset(range(PARTITIONS)) - assignment.assigned


def test_the_highest_number_of_holders_in_any_setting_counts() -> None:
    """Settings change on one replica after the other; until then no replica releases a partition that another one wants held
    twice."""
    assignment = ShardAssignment("a", PARTITIONS, 1)
    assignment.update({"b": says(holders=2)}, [], 0.0)
    assert assignment.assigned == frozenset(range(PARTITIONS))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=12), st.integers(1, 3))
def test_replicas_that_come_and_go_leave_no_partition_uncovered(turns: list[tuple[str, bool]], holders: int) -> None:
    """Each acts alone on the reports it has; while the one that stays is alive, every partition always has a holder."""
    world = World(holders)
    world.start("stays")
    world.settle()
    assert world.covered
    for name, comes in turns:
        world.start(name) if comes else world.kill(name)
        for _ in range(3):
            world.step(2.0)
            assert world.covered
    world.settle()
    assert world.covered
    for partition in range(World.PARTITIONS):
        assert set(assigned_replicas(partition, world.rosters, holders)) == {
            name for name in world.rosters if partition in world.held[name]
        }


class World:
    """Replicas with their rosters; a new holder loads a partition in one step. A killed replica loses no partition that it
    alone holds: it leaves after others hold them, since no plan covers the loss of the only holder."""

    PARTITIONS = 16

    def __init__(self, holders: int) -> None:
        self.now = 0.0
        self.rosters: dict[str, ShardAssignment] = {}
        self.held: dict[str, set[int]] = {}
        self._holders = holders

    def start(self, name: str) -> None:
        if name not in self.rosters:
            self.rosters[name], self.held[name] = ShardAssignment(name, self.PARTITIONS, self._holders), set()

    def kill(self, name: str) -> None:
        rest = set().union(*(held for other, held in self.held.items() if other != name))
        if name in self.rosters and rest == set(range(self.PARTITIONS)):
            del self.rosters[name], self.held[name]

    def step(self, seconds: float) -> None:
        """Every replica reports and reads reports, one after the other, and then does what is due."""
        self.now += seconds
        for name, assignment in self.rosters.items():
            others = {
                other: says(*held, holders=self._holders, beat=int(self.now))
                for other, held in self.held.items()
                if other != name
            }
            assignment.update(others, self.held[name], self.now)
            self.held[name] |= assignment.assigned
            self.held[name] -= assignment.releasable(self.now)

    def settle(self) -> None:
        for _ in range(40):
            self.step(2.0)

    @property
    def covered(self) -> bool:
        return not self.rosters or set().union(*self.held.values()) == set(range(self.PARTITIONS))


@pytest.mark.parametrize("value", [b"", b"{}", b'{"url": 1}', b"[]"])
def test_an_invalid_announcement_decodes_to_none(value: bytes) -> None:
    assert ShardAnnouncement.decode(value) is None


@pytest.mark.parametrize(
    "url", ["", "h:1", "ftp://h", "http://", "http://h:99999", "http://h/x", "http://u@h", "http://h\r\n", "http://["]
)
def test_a_replica_without_an_address_is_not_asked(url: str) -> None:
    """A client with write access to the bucket cannot make the others fail by what it says of itself."""
    assert ShardAnnouncement.decode(ShardAnnouncement(url, 1, []).encode()) is None


@pytest.mark.parametrize("holders", [0, 9, 1 << 40])
def test_no_replica_makes_all_others_hold_everything(holders: int) -> None:
    assert ShardAnnouncement.decode(ShardAnnouncement("http://h:1", holders, []).encode()) is None


def test_an_announcement_comes_back_as_it_was() -> None:
    assert ShardAnnouncement.decode(says(1, 2).encode()) == says(1, 2)
