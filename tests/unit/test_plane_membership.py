"""A bridge decides which engines are removed from the log, by the trust reports and claims that it knows and their age."""

from __future__ import annotations

from kvevents_plane.bridge_rules import EngineLiveness, UnclaimedEngines
from kvevents_plane.records import StreamKey, TrustRecord

DEAD_SECONDS = 10.0


def keys(*names: str, ranks: int = 1) -> list[StreamKey]:
    return [(name, rank) for name in names for rank in range(ranks)]


def report_trust(liveness: EngineLiveness, trust: str, streams: list[StreamKey]) -> None:
    for key in streams:
        liveness.reports[key] = TrustRecord(*key, "bridge", trust, "", {})


def test_an_engine_is_dead_after_it_was_stale_for_the_configured_time() -> None:
    liveness, streams = EngineLiveness(DEAD_SECONDS), keys("a", "b", "c")
    report_trust(liveness, "EXACT", streams)
    assert liveness.dead_streams(streams, 0.0) == []
    report_trust(liveness, "STALE", keys("a"))
    assert liveness.dead_streams(streams, 5.0) == []
    assert liveness.dead_streams(streams, 15.0) == []
    assert liveness.dead_streams(streams, 15.1) == keys("a")
    report_trust(liveness, "REPLAYING", keys("a"))
    assert liveness.dead_streams(streams, 16.0) == []
    report_trust(liveness, "STALE", keys("a"))
    assert liveness.dead_streams(streams, 17.0) == []


def test_an_engine_without_any_report_is_not_dead() -> None:
    """A bridge that has just started has reported no engine yet."""
    liveness, streams = EngineLiveness(DEAD_SECONDS), keys("a", "b", "c")
    assert liveness.dead_streams(streams, 0.0) == []
    assert liveness.dead_streams(streams, 100.0) == []
    assert liveness.suspicion == ""


def test_if_more_than_half_of_the_engines_are_stale_the_network_is_suspected() -> None:
    liveness, streams = EngineLiveness(DEAD_SECONDS), keys("a", "b", "c", "d", "e")
    report_trust(liveness, "EXACT", streams)
    report_trust(liveness, "STALE", keys("a", "b", "c"))
    liveness.dead_streams(streams, 0.0)
    assert liveness.suspicion == ""  # not long enough to suspect the network
    assert liveness.dead_streams(streams, 11.0) == []
    assert liveness.suspicion == "3 of 5 engines are unreachable"
    report_trust(liveness, "EXACT", keys("c"))
    assert liveness.dead_streams(streams, 12.0) == []  # connections come back one after the other
    assert liveness.suspicion == ""
    report_trust(liveness, "EXACT", keys("b"))
    assert liveness.dead_streams(streams, 22.0) == []
    assert liveness.dead_streams(streams, 22.1) == keys("a")


def test_the_suspicion_counts_engines_and_not_ranks() -> None:
    liveness, streams = EngineLiveness(DEAD_SECONDS), [*keys("large", ranks=8), *keys("a", "b")]
    report_trust(liveness, "EXACT", streams)
    report_trust(liveness, "STALE", keys("large", ranks=8))
    liveness.dead_streams(streams, 0.0)
    assert liveness.dead_streams(streams, 11.0) == keys("large", ranks=8)


def test_engines_that_have_left_do_not_count() -> None:
    """Otherwise the network of a fleet that has shrunk would be suspected forever."""
    liveness, streams = EngineLiveness(DEAD_SECONDS), keys("a", "b", "c", "d", "e")
    report_trust(liveness, "EXACT", streams)
    for gone in ("a", "b", "c"):
        report_trust(liveness, "STALE", keys(gone))
        liveness.dead_streams(streams, 0.0)
        assert liveness.dead_streams(streams, 11.0) == keys(gone)
        streams = [key for key in streams if key[0] != gone]
        assert liveness.dead_streams(streams, 12.0) == []


def test_a_single_engine_is_too_few_to_suspect_the_network() -> None:
    liveness, streams = EngineLiveness(DEAD_SECONDS), keys("a")
    report_trust(liveness, "CONNECTING", streams)
    liveness.dead_streams(streams, 0.0)
    assert liveness.dead_streams(streams, 11.0) == streams


def test_resubscribing_does_not_restart_the_time_of_a_stale_engine() -> None:
    liveness, streams = EngineLiveness(DEAD_SECONDS), keys("a", "b", "c")
    report_trust(liveness, "EXACT", streams)
    report_trust(liveness, "STALE", keys("a"))
    liveness.dead_streams(streams, 0.0)
    liveness.reports.pop(("a", 0))
    assert liveness.dead_streams(streams, 11.0) == keys("a")
    liveness.forget(("a", 0))
    assert liveness.dead_streams(streams, 12.0) == []


# --- engines in the log that no bridge claims


def test_an_engine_that_no_bridge_claims_expires_after_the_configured_time() -> None:
    """The time starts again if a bridge claims the engine in between, or if `clear` is called because claims are unknown."""
    unclaimed, joined = UnclaimedEngines(DEAD_SECONDS), keys("a", "b", "c")
    assert unclaimed.expired_streams(joined, keys("a"), 0.0) == []
    assert unclaimed.expired_streams(joined, keys("a"), 10.0) == []
    assert unclaimed.expired_streams(joined, keys("a"), 10.1) == keys("a")
    assert unclaimed.engines == 1
    assert unclaimed.expired_streams(joined, [], 11.0) == []
    assert unclaimed.expired_streams(joined, keys("a"), 12.0) == []
    unclaimed.clear()
    assert unclaimed.expired_streams(joined, keys("a"), 30.0) == []
    assert unclaimed.expired_streams(joined, keys("a"), 40.1) == keys("a")


def test_more_than_half_of_the_engines_in_the_log_never_expire_together() -> None:
    """Engines are counted, and not their ranks; a single one is too few to suspect anything."""
    unclaimed, joined = UnclaimedEngines(DEAD_SECONDS), [*keys("large", ranks=8), *keys("a", "b", "c")]
    assert unclaimed.expired_streams(joined, keys("a", "b", "c"), 0.0) == []
    assert unclaimed.expired_streams(joined, keys("a", "b", "c"), 20.0) == []
    assert unclaimed.suspicion == "no bridge claims 3 of the 4 engines in the log"
    assert unclaimed.expired_streams(joined, keys("large", ranks=8), 21.0) == []
    assert (unclaimed.suspicion, unclaimed.engines) == ("", 1)
    assert unclaimed.expired_streams(joined, keys("large", ranks=8), 32.0) == keys("large", ranks=8)
    alone = UnclaimedEngines(DEAD_SECONDS)
    alone.expired_streams(keys("a"), keys("a"), 0.0)
    assert alone.expired_streams(keys("a"), keys("a"), 11.0) == keys("a")
