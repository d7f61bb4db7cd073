"""How far a subscriber gets with all this."""

from __future__ import annotations

from typing import Final

from kvevents.cli.checkup.findings import Finding, fail, ok, warn
from kvevents.stream import Doubt, Trust
from kvevents.subscriber import StreamStatus

_ADVICE: Final[dict[Doubt, str]] = {
    Doubt.NO_REPLAY: "name a replay endpoint with --replay",
    Doubt.REPLAY_SILENT: "see replay above",
    Doubt.REPLAY_FOREIGN: "name this engine's own replay endpoint with --replay: the one in use belongs to another stream",
    Doubt.REPLAY_UNCONFIRMED: "look again with more --duration; if it stays, the replay endpoint belongs to another engine",
    Doubt.REPLAY_UNPROVEN: "look again with more --duration; if it stays, the replay endpoint belongs to another engine",
    Doubt.IDENTITY: "the connection broke meanwhile; a replay endpoint with a larger buffer_steps lets it be proven",
    Doubt.LOST: "exact again after the next AllBlocksCleared or restart; subscribe earlier, or raise buffer_steps",
    Doubt.REJECTED: "exact again after the next AllBlocksCleared; see decoding above",
    Doubt.DIVERGED: "exact again once a digest agrees; do relay and doctor run the same release? record it, and report it",
    Doubt.SENDER: "ask the relay itself: it does not trust what it tells",
    Doubt.SILENT: "is the relay still running? it sends no heartbeats any more",
}

_STALE_THOUGH_CONNECTED: Final = frozenset({Doubt.SENDER, Doubt.SILENT})
_IDLE: Final = "send the engine a request; the next batch confirms the replay endpoint"


def check_trust(status: StreamStatus, seconds: float) -> Finding:
    """The trust that a subscriber reached, and why not more."""
    counters = status.counters
    so_far = f"after {seconds:g} s: {counters.delivered:,} delivered, {counters.replayed:,} by replay, {counters.lost:,} lost"
    if counters.compacted:
        so_far += f"; a snapshot represents {counters.compacted:,} older ones"
    text = f"{status.trust}, {so_far}"
    if status.trust == Trust.EXACT:
        return ok("trust", text)
    if status.trust == Trust.DEGRADED and status.doubts == {Doubt.REPLAY_UNPROVEN} and not counters.live:
        return ok("trust", text, _IDLE)
    advice = "; ".join(_ADVICE.get(doubt, doubt.value) for doubt in Doubt if doubt in status.doubts)
    if status.trust == Trust.DEGRADED:
        return warn("trust", text, advice)
    if status.trust == Trust.REPLAYING:
        return warn("trust", text, "give it more time with --duration")
    return fail("trust", text, advice if status.doubts & _STALE_THOUGH_CONNECTED else "see what failed above")
