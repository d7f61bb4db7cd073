"""Counters of one stream."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class StreamCounters:
    """What happened to a stream so far."""

    live: int = 0
    delivered: int = 0
    replayed: int = 0
    duplicates: int = 0
    """Messages with nothing new, live or replayed, including the rest of an answer that was no longer needed."""
    malformed: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    gaps: int = 0
    """Runs of lost numbers. Runs that a snapshot represents are not included."""
    lost: int = 0
    """Batches in those gaps."""
    compacted: int = 0
    """Batches that were not delivered because a snapshot represents them: nothing is lost."""
    gaps_repaired: int = 0
    """Gaps after a live batch that replay has begun to fill: losses, and batches missed between two connections. History before
    the first live batch is not included. A gap of which a part is lost counts in `gaps` as well."""
    resets: int = 0
    reconnects: int = 0
    requests: int = 0
    """Replay requests. Their results are in the next four counters. A request that a lost connection or a restart ended has no
    result."""
    complete: int = 0
    """Requests that were answered, after which nothing was known to be missing."""
    truncated: int = 0
    """Requests that were answered without everything that was requested."""
    unanswered: int = 0
    conflicts: int = 0
    """Requests that were answered with something that contradicts the live stream."""
    overflowed: int = 0
    """Live batches for which there was no room to wait. They are replayed later."""
    discarded: int = 0
    """Waiting batches of a life that ended."""
    heartbeats: int = 0
    """Batches with a heartbeat of the publisher. If the stream does not decode, only reported ones count."""
    digests_matched: int = 0
    """Heartbeats whose digest the consumer's state had."""
    digests_mismatched: int = 0
    """Heartbeats whose digest the consumer's state did not have, without a known cause: 0 unless something is broken. An
    explained mismatch, such as after a gap, is not counted; nor is the same mismatch at the next heartbeat."""
    attestations_matched: int = 0
    """Heartbeats whose attestation was that of the consumer's state."""
    attestations_mismatched: int = 0
    """Heartbeats whose attestation was not that of the consumer's state."""

    def copy(self) -> StreamCounters:
        """Return a copy that does not change any more."""
        return replace(self, malformed=dict(self.malformed), rejected=dict(self.rejected))
