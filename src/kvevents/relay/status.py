"""A relay as an operator sees it."""

from __future__ import annotations

from dataclasses import dataclass

from kvevents.publisher.stats import HistoryStats, ReplayStats
from kvevents.relay.journal import JournalStats
from kvevents.stream import Trust
from kvevents.subscriber import StreamStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStatus:
    """Where it is, what it carries, and how far that can be trusted."""

    endpoint: str
    replay_endpoint: str | None
    trust: Trust
    """The least of its upstreams'."""
    incarnation: int
    last_number: int
    """Of the newest batch sent; -1 before the first."""
    carried: int
    """Batches of upstreams that were sent on, by this process."""
    holes: int
    """Numbers left out because something is missing."""
    heartbeats: int
    resumed: bool
    """Whether this process went on with the numbers of an earlier one."""
    began: str
    """Why it did not, or what it went on with, in words."""
    recovery_seconds: float
    blocks: int
    """That consumers have resident."""
    digest: str
    diverged: int
    """Heartbeats of upstreams that told of other blocks than the relay has; stays at 0."""
    subscribers: int
    buffered_batches: int
    buffered_bytes: int
    history: HistoryStats | None
    replay: ReplayStats
    journal: JournalStats | None
    """None where nothing outlives the process."""
    upstreams: tuple[StreamStatus, ...]
