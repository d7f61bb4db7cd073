"""Which engines are removed from the log, by what a bridge receives and for how long."""

from __future__ import annotations

from kvevents.plane.bridge_rules import EngineLiveness, UnclaimedEngines
from kvevents.plane.records import StreamKey, TrustRecord

DEAD = 10.0


def keys(*names: str, ranks: int = 1) -> list[StreamKey]:
    return [(name, rank) for name in names for rank in range(ranks)]


def report_trust(members: EngineLiveness, trust: str, streams: list[StreamKey]) -> None:
    for key in streams:
        members.update(TrustRecord(*key, "bridge", trust, "", {}))


def test_an_engine_is_gone_after_so_many_seconds_and_not_before() -> None:
    members, streams = EngineLiveness(DEAD), keys("a", "b", "c")
    report_trust(members, "EXACT", streams)
    assert members.dead(streams, 0.0) == []
    report_trust(members, "STALE", keys("a"))
    assert members.dead(streams, 5.0) == []
    assert members.dead(streams, 15.0) == []
    assert members.dead(streams, 15.1) == keys("a")
    report_trust(members, "REPLAYING", keys("a"))
    assert members.dead(streams, 16.0) == []
    report_trust(members, "STALE", keys("a"))
    assert members.dead(streams, 17.0) == []


def test_an_engine_without_any_report_is_not_absent() -> None:
    """A bridge that has just begun reports no engine."""
    members, streams = EngineLiveness(DEAD), keys("a", "b", "c")
    assert members.dead(streams, 0.0) == []
    assert members.dead(streams, 100.0) == []
    assert members.suspicion == ""


def test_more_than_half_of_them_are_the_network() -> None:
    members, streams = EngineLiveness(DEAD), keys("a", "b", "c", "d", "e")
    report_trust(members, "EXACT", streams)
    report_trust(members, "STALE", keys("a", "b", "c"))
    members.dead(streams, 0.0)
    assert members.suspicion == ""  # a moment says nothing
    assert members.dead(streams, 11.0) == []
    assert members.suspicion == "3 of 5 engines are unreachable"
    report_trust(members, "EXACT", keys("c"))
    assert members.dead(streams, 12.0) == []  # connections come back one after the other
    assert members.suspicion == ""
    report_trust(members, "EXACT", keys("b"))
    assert members.dead(streams, 22.0) == []
    assert members.dead(streams, 22.1) == keys("a")


def test_engines_are_counted_and_not_their_ranks() -> None:
    members, streams = EngineLiveness(DEAD), [*keys("large", ranks=8), *keys("a", "b")]
    report_trust(members, "EXACT", streams)
    report_trust(members, "STALE", keys("large", ranks=8))
    members.dead(streams, 0.0)
    assert members.dead(streams, 11.0) == keys("large", ranks=8)


def test_those_that_have_left_do_not_count() -> None:
    """Or a fleet that has shrunk would be suspected for ever."""
    members, streams = EngineLiveness(DEAD), keys("a", "b", "c", "d", "e")
    report_trust(members, "EXACT", streams)
    for gone in ("a", "b", "c"):
        report_trust(members, "STALE", keys(gone))
        members.dead(streams, 0.0)
        assert members.dead(streams, 11.0) == keys(gone)
        streams = [key for key in streams if key[0] != gone]
        assert members.dead(streams, 12.0) == []


def test_a_single_engine_is_too_few_to_suspect_the_network() -> None:
    members, streams = EngineLiveness(DEAD), keys("a")
    report_trust(members, "CONNECTING", streams)
    members.dead(streams, 0.0)
    assert members.dead(streams, 11.0) == streams


def test_resubscribing_does_not_make_an_engine_younger() -> None:
    members, streams = EngineLiveness(DEAD), keys("a", "b", "c")
    report_trust(members, "EXACT", streams)
    report_trust(members, "STALE", keys("a"))
    members.dead(streams, 0.0)
    members.restart(("a", 0))
    assert members.dead(streams, 11.0) == keys("a")
    members.forget(("a", 0))
    assert members.dead(streams, 12.0) == []


# --- those of the log that no bridge names


def test_an_engine_that_no_bridge_names_is_removed_after_so_many_seconds() -> None:
    """Without a break: the time begins again if the engine is named in between, or if nothing can be known for a while."""
    unclaimed, joined = UnclaimedEngines(DEAD), keys("a", "b", "c")
    assert unclaimed.expired(joined, keys("a"), 0.0) == []
    assert unclaimed.expired(joined, keys("a"), 10.0) == []
    assert unclaimed.expired(joined, keys("a"), 10.1) == keys("a")
    assert unclaimed.engines == 1
    assert unclaimed.expired(joined, [], 11.0) == []
    assert unclaimed.expired(joined, keys("a"), 12.0) == []
    unclaimed.clear()
    assert unclaimed.expired(joined, keys("a"), 30.0) == []
    assert unclaimed.expired(joined, keys("a"), 40.1) == keys("a")


def test_more_than_half_of_the_log_are_not_let_go() -> None:
    """Engines are counted, and not their ranks; a single one is too few to suspect anything."""
    unclaimed, joined = UnclaimedEngines(DEAD), [*keys("large", ranks=8), *keys("a", "b", "c")]
    assert unclaimed.expired(joined, keys("a", "b", "c"), 0.0) == []
    assert unclaimed.expired(joined, keys("a", "b", "c"), 20.0) == []
    assert unclaimed.suspicion == "no bridge claims 3 of the 4 engines in the log"
    assert unclaimed.expired(joined, keys("large", ranks=8), 21.0) == []
    assert (unclaimed.suspicion, unclaimed.engines) == ("", 1)
    assert unclaimed.expired(joined, keys("large", ranks=8), 32.0) == keys("large", ranks=8)
    alone = UnclaimedEngines(DEAD)
    alone.expired(keys("a"), keys("a"), 0.0)
    assert alone.expired(keys("a"), keys("a"), 11.0) == keys("a")
