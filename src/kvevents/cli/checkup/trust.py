"""How far a subscriber gets with all this."""

from __future__ import annotations

from typing import Final

from kvevents.cli.checkup.findings import Finding, fail, ok, warn
from kvevents.stream import DegradedReason, Trust
from kvevents.subscriber import StreamStatus

_ADVICE: Final[dict[DegradedReason, str]] = {
    DegradedReason.NO_REPLAY: "name a replay endpoint with --replay",
    DegradedReason.REPLAY_SILENT: "see replay above",
    DegradedReason.REPLAY_FOREIGN: "give this engine's own replay endpoint with --replay: the one in use is another stream's",
    DegradedReason.REPLAY_UNCONFIRMED: "retry with more --duration; if it stays, the replay endpoint belongs to another engine",
    DegradedReason.REPLAY_UNPROVEN: "retry with more --duration; if it stays, the replay endpoint belongs to another engine",
    DegradedReason.IDENTITY: "the connection broke meanwhile; a replay endpoint with a larger buffer_steps lets it be proven",
    DegradedReason.LOST: "exact again after the next AllBlocksCleared or restart; subscribe earlier, or raise buffer_steps",
    DegradedReason.REJECTED: "exact again after the next AllBlocksCleared; see decoding above",
    DegradedReason.DIVERGED: "exact again once a digest matches; do relay and doctor run one release? record it, and report it",
    DegradedReason.SENDER: "ask the relay itself: it does not trust what it tells",
    DegradedReason.SILENT: "is the relay still running? it sends no heartbeats any more",
}

_STALE_THOUGH_CONNECTED: Final = frozenset({DegradedReason.SENDER, DegradedReason.SILENT})
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
    if status.trust == Trust.DEGRADED and status.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN} and not counters.live:
        return ok("trust", text, _IDLE)
    advice = "; ".join(_ADVICE.get(doubt, doubt.value) for doubt in DegradedReason if doubt in status.degraded_reasons)
    if status.trust == Trust.DEGRADED:
        return warn("trust", text, advice)
    if status.trust == Trust.REPLAYING:
        return warn("trust", text, "give it more time with --duration")
    return fail("trust", text, advice if status.degraded_reasons & _STALE_THOUGH_CONNECTED else "see what failed above")
