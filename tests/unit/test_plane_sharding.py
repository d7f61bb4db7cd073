"""Which replica holds which partitions: rendezvous hashing, and replicas that come and go without anybody who decides for
all."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.plane.sharding import Announcement, Roster, SharePace, owners, plan

NAMES = st.lists(st.text("abcdefgh-", min_size=1, max_size=4), min_size=1, max_size=8, unique=True)
PARTITIONS = 64
PACE = SharePace()


def says(*held: int, holders: int = 1, beat: int = 0) -> Announcement:
    return Announcement("http://x", holders, list(held), beat)


@given(NAMES, st.integers(0, 255), st.integers(1, 4))
def test_a_partition_has_as_many_owners_as_are_wanted_and_all_agree_who(names: list[str], partition: int, holders: int) -> None:
    found = owners(partition, names, holders)
    assert len(found) == len(set(found)) == min(holders, len(names))
    assert found == owners(partition, reversed(names), holders)


@given(NAMES, st.integers(1, 3), st.data())
def test_only_partitions_of_who_goes_move_and_of_each_one_holder(names: list[str], holders: int, data: st.DataObject) -> None:
    """The other way round it is one who comes: it takes over a share, and nothing moves between the others."""
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    for partition in range(PARTITIONS):
        before, after = owners(partition, names, holders), owners(partition, left, holders)
        stayed = [name for name in before if name != gone]
        assert after[: len(stayed)] == stayed
        assert len(after) - len(stayed) == (gone in before and len(left) >= holders)


def test_shares_are_even() -> None:
    """Of 256 partitions on 10 replicas, each held twice: nobody has half as much again as the mean."""
    names = [f"replica-{number}" for number in range(10)]
    shares = [sum(name in owners(partition, names, 2) for partition in range(256)) for name in names]
    assert sum(shares) == 512
    assert max(shares) < 1.5 * 512 / 10


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=2), st.sets(st.integers(0, 9)), max_size=5), st.sets(st.integers(0, 9))
)
def test_a_plan_asks_each_partition_of_one_who_holds_it(holding: Mapping[str, set[int]], partitions: set[int]) -> None:
    asked, nobody = plan("own", partitions, holding)
    told = [partition for found in asked.values() for partition in found]
    assert sorted(told + nobody) == sorted(partitions)
    assert all(set(found) <= holding[name] and found for name, found in asked.items())
    assert not set(nobody).intersection(*([set().union(*holding.values())] if holding else [set()]))


def test_a_plan_asks_as_few_as_can_be() -> None:
    holding = {"all": [0, 1, 2, 3], "low": [0, 1], "high": [2, 3]}
    assert plan("own", range(4), holding) == ({"all": [0, 1, 2, 3]}, [])
    assert plan("own", range(5), {"low": [0, 1], "high": [2, 3]}) == ({"low": [0, 1], "high": [2, 3]}, [4])


def test_nothing_is_wanted_before_the_others_were_heard_of() -> None:
    """Or the first of many would begin with all partitions."""
    roster = Roster("own", 8, 1)
    assert roster.wanted == frozenset()
    roster.hear({}, [], 0.0)
    assert roster.wanted == frozenset(range(8))


def test_a_restart_moves_no_partitions_and_a_death_does() -> None:
    roster = Roster("a", PARTITIONS, 1)
    roster.hear({"b": says()}, [], 0.0)
    share = roster.wanted
    assert 0 < len(share) < PARTITIONS
    roster.hear({}, share, PACE.present_seconds - 1)
    assert (roster.wanted, list(roster.present)) == (share, ["b"]), "one look may have missed it"
    for now in range(int(PACE.present_seconds), int(PACE.dead_seconds), 2):
        roster.hear({"b": says()}, share, float(now))
    assert (roster.wanted, dict(roster.present)) == (share, {}), "what it has said is still there, and nothing new"
    roster.hear({}, share, PACE.dead_seconds + 1)
    assert roster.wanted == frozenset(range(PARTITIONS))


def test_a_partition_is_let_go_only_after_all_who_are_to_hold_it_have_held_it_for_a_while() -> None:
    roster = Roster("a", PARTITIONS, 2)
    roster.hear({}, range(PARTITIONS), 0.0)
    others = {"b": says(holders=2), "c": says(holders=2)}
    roster.hear(others, range(PARTITIONS), 1.0)
    foreign = sorted(set(range(PARTITIONS)) - roster.wanted)
    assert foreign
    assert roster.spare(1000.0) == frozenset()

    def others_at(now: float) -> dict[str, Announcement]:
        beat = int(now)
        return {"b": says(*foreign, holders=2, beat=beat), "c": says(*foreign[1:], holders=2, beat=beat)}

    for now in (2.0, 7.0):
        roster.hear(others_at(now), range(PARTITIONS), now)
    assert roster.spare(2.0 + PACE.release_seconds - 0.1) == frozenset()
    assert roster.spare(2.0 + PACE.release_seconds) == frozenset(foreign[1:])
    roster.hear({"b": others_at(9.0)["b"]}, range(PARTITIONS), 9.0)  # one of them is not heard of
    assert roster.spare(1000.0) == frozenset()
    for now in (10.0, 13.0, 16.0, 19.0, 22.0):
        roster.hear(others_at(10.0), range(PARTITIONS), now)  # they say nothing new
    assert roster.spare(22.0) == frozenset()


def test_an_hour_without_the_servers_is_nobodys_death() -> None:
    """All come back at about the same time; who looks first must not begin with the partitions of those who are slower."""
    roster = Roster("a", PARTITIONS, 1)
    roster.hear({"b": says(beat=1)}, [], 0.0)
    share = roster.wanted
    roster.hear({}, share, 3_600.0)
    assert (roster.wanted, list(roster.present)) == (share, ["b"])
    for passed in range(0, int(PACE.dead_seconds) + 1, 2):
        roster.hear({}, share, 3_600.0 + passed)
    assert roster.wanted == share
    roster.hear({}, share, 3_600.0 + PACE.dead_seconds + 2)
    assert roster.wanted == frozenset(range(PARTITIONS))


def test_nothing_is_let_go_while_nobody_can_be_heard() -> None:
    roster = Roster("a", PARTITIONS, 1)
    everything = says(*range(PARTITIONS), beat=1)
    roster.hear({"b": everything}, range(PARTITIONS), 0.0)
    assert roster.spare(1_000.0) == frozenset()
    roster.hear({"b": says(*range(PARTITIONS), beat=2)}, range(PARTITIONS), 1_000.0)
    assert roster.spare(1_000.0 + PACE.present_seconds) == frozenset()
    roster.hear({"b": says(*range(PARTITIONS), beat=3)}, range(PARTITIONS), 1_005.0)
    roster.hear({"b": says(*range(PARTITIONS), beat=4)}, range(PARTITIONS), 1_010.0)
    assert roster.spare(1_000.0 + PACE.release_seconds) == frozenset(range(PARTITIONS)) - roster.wanted


def test_the_most_holders_that_anybody_was_told_count() -> None:
    """Settings are changed one replica after the other; until then nobody lets a partition go that another one wants held
    twice."""
    roster = Roster("a", PARTITIONS, 1)
    roster.hear({"b": says(holders=2)}, [], 0.0)
    assert roster.wanted == frozenset(range(PARTITIONS))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=12), st.integers(1, 3))
def test_replicas_that_come_and_go_leave_no_partition_uncovered(turns: list[tuple[str, bool]], holders: int) -> None:
    """Each acts alone on what it has heard; as long as the one that stays lives, every partition is always held by somebody."""
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
        assert set(owners(partition, world.rosters, holders)) == {
            name for name in world.rosters if partition in world.held[name]
        }


class World:
    """Replicas with their rosters; who is to hold a partition loads it in one step. A killed one loses no partition that it
    alone holds: it leaves when others hold what it held, as one that nobody has planned for cannot be helped."""

    PARTITIONS = 16

    def __init__(self, holders: int) -> None:
        self.now = 0.0
        self.rosters: dict[str, Roster] = {}
        self.held: dict[str, set[int]] = {}
        self._holders = holders

    def start(self, name: str) -> None:
        if name not in self.rosters:
            self.rosters[name], self.held[name] = Roster(name, self.PARTITIONS, self._holders), set()

    def kill(self, name: str) -> None:
        rest = set().union(*(held for other, held in self.held.items() if other != name))
        if name in self.rosters and rest == set(range(self.PARTITIONS)):
            del self.rosters[name], self.held[name]

    def step(self, seconds: float) -> None:
        """Everybody tells and hears, one after the other, and then does what is to be done."""
        self.now += seconds
        for name, roster in self.rosters.items():
            others = {
                other: says(*held, holders=self._holders, beat=int(self.now))
                for other, held in self.held.items()
                if other != name
            }
            roster.hear(others, self.held[name], self.now)
            self.held[name] |= roster.wanted
            self.held[name] -= roster.spare(self.now)

    def settle(self) -> None:
        for _ in range(40):
            self.step(2.0)

    @property
    def covered(self) -> bool:
        return not self.rosters or set().union(*self.held.values()) == set(range(self.PARTITIONS))


@pytest.mark.parametrize("value", [b"", b"{}", b'{"url": 1}', b"[]"])
def test_what_is_no_announcement_is_none(value: bytes) -> None:
    assert Announcement.decode(value) is None


@pytest.mark.parametrize(
    "url", ["", "h:1", "ftp://h", "http://", "http://h:99999", "http://h/x", "http://u@h", "http://h\r\n", "http://["]
)
def test_nobody_is_asked_where_nobody_can_be(url: str) -> None:
    """Who may write the bucket cannot make the others fail by what it says of itself."""
    assert Announcement.decode(Announcement(url, 1, []).encode()) is None


@pytest.mark.parametrize("holders", [0, 9, 1 << 40])
def test_nobody_has_all_others_hold_everything(holders: int) -> None:
    assert Announcement.decode(Announcement("http://h:1", holders, []).encode()) is None


def test_an_announcement_comes_back_as_it_was() -> None:
    assert Announcement.decode(says(1, 2).encode()) == says(1, 2)
