"""The status of a relay, for operators and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from kvevents.publisher.stats import HistoryStats, ReplayStats
from kvevents.relay.journal import JournalStats
from kvevents.stream import Trust
from kvevents.subscriber import StreamStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStatus:
    """Endpoints, counters and trust of a relay, as of its last turn."""

    endpoint: str
    replay_endpoint: str | None
    trust: Trust
    """The lowest of its upstreams'."""
    incarnation: int
    last_seq: int
    """The relay's number of the newest batch; -1 before the first."""
    forwarded_batches: int
    """Batches of upstreams that this process sent."""
    skipped_seqs: int
    """Numbers skipped by this process because events are missing."""
    heartbeats: int
    """Sent by this process."""
    was_resumed: bool
    """Whether this process continues the incarnation of an earlier one."""
    start_reason: str
    """Why it continues, or why it began a new incarnation."""
    recovery_seconds: float
    """Time that reading the journal took."""
    blocks: int
    """Blocks that consumers hold."""
    digest: str
    """Digest of what consumers hold."""
    divergences: int
    """Heartbeats of upstreams whose digest differed from the relay's; 0 unless the sender or the relay has a defect."""
    subscribers: int
    buffered_batches: int
    """Batches in the replay buffer."""
    buffered_bytes: int
    """Bytes in the replay buffer."""
    history: HistoryStats | None
    """What batches older than the replay buffer are compacted into."""
    replay: ReplayStats
    journal: JournalStats | None
    """None if the relay has no journal."""
    upstreams: tuple[StreamStatus, ...]
