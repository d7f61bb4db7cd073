"""The heartbeat monitor: a publisher's reports about itself, its silence, and how often a stream starts over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvevents.events import Heartbeat
from kvevents.stream import StreamLimits, Trust
from kvevents.stream.trust import HeartbeatMonitor, MismatchCounter

LIMITS = StreamLimits(max_consecutive_resyncs=2, max_missed_heartbeats=3.0)
TRUSTS = st.sampled_from(("EXACT", "DEGRADED", "STALE", "REPLAYING", "unknown"))


def heartbeat(trust: str = "EXACT", incarnation: int = 0, interval: float = 5.0) -> Heartbeat:
    return Heartbeat("0" * 32, interval, trust, "a\x00reason", incarnation)


@given(st.lists(st.tuples(st.integers(0, 9), TRUSTS)))
def test_the_heartbeat_with_the_highest_number_counts(received: list[tuple[int, str]]) -> None:
    """Reports may come in any order. A publisher without heartbeats is trusted, and an unknown trust is DEGRADED."""
    monitor, newest = HeartbeatMonitor(LIMITS), (-1, "EXACT")
    for seq, trust in received:
        is_newest = monitor.receive(seq, heartbeat(trust), live=True)
        assert is_newest == (seq >= newest[0])
        newest = (seq, trust) if is_newest else newest
        expected = {"EXACT": Trust.EXACT, "STALE": Trust.STALE}.get(newest[1], Trust.DEGRADED)
        assert monitor.trust == expected
        assert monitor.trust.reason.isprintable()


@given(st.booleans(), st.floats(0.5, 100.0))
def test_only_a_live_heartbeat_of_this_connection_promises_the_next_one(live: bool, interval: float) -> None:
    monitor = HeartbeatMonitor(LIMITS)
    monitor.receive(0, heartbeat(interval=interval), live=live)
    assert monitor.max_silence == (3.0 * interval if live else None)
    monitor.disconnect()
    assert monitor.max_silence is None


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans())))
def test_mismatches_in_a_row_are_bounded(steps: list[tuple[int, bool, bool]]) -> None:
    """A live match resets the count; a replayed match does so only if it is not before the last mismatch."""
    monitor, in_a_row, last_mismatch = MismatchCounter(LIMITS.max_consecutive_resyncs), 0, -1
    for seq, matches, live in steps:
        if not matches:
            in_a_row, last_mismatch = in_a_row + 1, max(seq, last_mismatch)
            assert monitor.allow_resync(seq) == (in_a_row <= LIMITS.max_consecutive_resyncs)
            continue
        monitor.match(seq, live=live)
        if live or seq >= last_mismatch:
            in_a_row, last_mismatch = 0, -1


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans())))
def test_alternating_incarnations_are_bounded(steps: list[tuple[int, bool]]) -> None:
    """Each change of incarnation counts until a live heartbeat is of the same incarnation as the one before it."""
    monitor, known, in_a_row = HeartbeatMonitor(LIMITS), None, 0
    for incarnation, live in steps:
        is_other = monitor.is_other_incarnation(heartbeat(incarnation=incarnation), live=live)
        assert is_other == (known is not None and incarnation != known)
        if is_other:
            in_a_row += 1
            assert monitor.incarnations.allow_resync(0) == (in_a_row <= LIMITS.max_consecutive_resyncs)
        elif known is not None and live:
            in_a_row = 0
        known = incarnation
