"""The status of a relay, for operators, and its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, get_args

from kvevents.prometheus import MetricTable, Probes, families, serve, state_set
from kvevents.publisher.stats import HistoryStats, ReplayStats
from kvevents.relay.journal import JournalState, JournalStats
from kvevents.stream import Trust, TrustState
from kvevents.subscriber import StreamStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStatus:
    """Endpoints, counters and trust of a relay, as of its last turn."""

    endpoint: str
    replay_endpoint: str | None
    trust: Trust
    """The lowest trust of the relay's upstreams."""
    incarnation: int
    last_seq: int
    """The relay's number of its newest batch; -1 before the first batch."""
    forwarded_batches: int
    """Number of upstream batches that this process has sent."""
    skipped_seqs: int
    """Number of sequence numbers that this process has skipped because events are missing."""
    heartbeats: int
    """Number of heartbeats that this process has sent."""
    was_resumed: bool
    """Whether this process continues the incarnation of an earlier process."""
    start_reason: str
    """Why this process continues an incarnation, or why it began a new one."""
    recovery_seconds: float
    """Seconds that reading the journal took."""
    blocks: int
    """Number of blocks that consumers hold."""
    digest: str
    """Digest of the blocks that consumers hold."""
    divergences: int
    """Number of upstream heartbeats whose digest differed from the relay's digest, because sender or relay has a defect."""
    subscribers: int
    buffered_batches: int
    """Number of batches in the replay buffer."""
    buffered_bytes: int
    """Number of payload bytes in the replay buffer."""
    history: HistoryStats | None
    """The compacted history of batches that are older than the replay buffer; None without compaction."""
    replay: ReplayStats
    journal: JournalStats | None
    """State of the journal; None if the relay has no journal."""
    upstreams: tuple[StreamStatus, ...]


# --- metrics

_METRICS: Final[MetricTable[RelayStatus]] = {
    "last_seq": (
        "Sequence number of the newest batch sent; absent before the first.",
        lambda s: s.last_seq if s.last_seq >= 0 else None,
    ),
    "incarnation": ("Incarnation of the relay; it changes when sequence numbers start over.", lambda s: s.incarnation),
    "blocks": ("Blocks that consumers hold after the newest batch.", lambda s: s.blocks),
    "subscribers": ("Subscribed consumers.", lambda s: s.subscribers),
    "buffered_batches": ("Batches in the replay buffer.", lambda s: s.buffered_batches),
    "buffered_bytes": ("Bytes in the replay buffer.", lambda s: s.buffered_bytes),
    "replay_unsent_bytes": ("Bytes of replay replies that consumers have not read yet.", lambda s: s.replay.unsent_bytes),
    "history_bytes": (
        "Memory of the history that is older than the replay buffer.",
        lambda s: s.history.bytes if s.history else 0,
    ),
    "history_lost": (
        "1 while the relay cannot send a snapshot of its history.",
        lambda s: s.history is None or s.history.unavailable_reason is not None,
    ),
    "journal_bytes": ("Bytes of the journal's snapshot and logs.", lambda s: s.journal.bytes if s.journal else 0),
    "journal_recovery_seconds": ("Time that reading the journal took at the start.", lambda s: s.recovery_seconds),
    "forwarded_batches_total": ("Batches of upstreams that the relay sent on.", lambda s: s.forwarded_batches),
    "skipped_seqs_total": ("Sequence numbers left out because upstream batches were lost.", lambda s: s.skipped_seqs),
    "heartbeats_total": ("Heartbeats sent.", lambda s: s.heartbeats),
    "divergences_total": (
        "Upstream heartbeats whose digest differed from the relay's blocks; stays at 0.",
        lambda s: s.divergences,
    ),
    "replayed_batches_total": ("Batches sent by replay.", lambda s: s.replay.batches),
    "journal_dropped_batches_total": (
        "Batches that were not written to the journal.",
        lambda s: s.journal.dropped if s.journal else 0,
    ),
    "journal_write_failures_total": ("Failed writes to the journal.", lambda s: s.journal.failures if s.journal else 0),
    "upstream_state": (
        "1 for the lowest trust state of the relay's upstreams.",
        lambda s: state_set("state", get_args(TrustState), s.trust.name),
    ),
    "journal_state": (
        "1 for the state of the journal: none, new, disk, memory or closed.",
        lambda s: state_set("state", ("none", *get_args(JournalState)), s.journal.state if s.journal else "none"),
    ),
}


def serve_metrics(
    status: Callable[[], RelayStatus], port: int, host: str = "127.0.0.1", live: Callable[[], str] = str
) -> Callable[[], None]:
    """Serve metrics and probes at a port until the returned function is called.

    `live` returns why the process should be restarted, or an empty text if no restart is needed. Raises `EndpointError` if the
    port cannot be bound.
    """
    return serve(
        lambda: families("kvevents_relay_", _METRICS, status()), port, host, Probes(live, lambda: _describe_unreached(status()))
    )


def _describe_unreached(status: RelayStatus) -> str:
    """Return a sentence that names the upstreams that have never been connected; empty if all have been connected."""
    unreached = [upstream for upstream in status.upstreams if upstream.trust == Trust.CONNECTING]
    names = ", ".join(f"{upstream.source} rank {upstream.rank} at {upstream.endpoint}" for upstream in unreached)
    return f"no connection yet to {names}" if unreached else ""
