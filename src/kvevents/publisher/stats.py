"""What a publisher tells about itself."""

from __future__ import annotations

import msgspec


class ReplayStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a server of replies, since it started."""

    requests: int = 0
    batches: int = 0
    """Batches sent in replies."""
    active: int = 0
    """Replies being sent now."""
    finished: int = 0
    abandoned: int = 0
    """Replies given up because the consumer read nothing for `REPLAY_STALL_TIMEOUT`, or because of a shutdown."""
    gone: int = 0
    """Replies that ended because the consumer disconnected."""
    malformed: int = 0
    """Requests without a meaning."""
    refused: int = 0
    """Requests beyond `MAX_WAITING_REQUESTS` of one consumer."""
    deferred: int = 0
    """Looks that found no room for a large message: `UNSENT_BYTES` of one consumer, or `UNSENT_BYTES_IN_ALL`, had not left."""
    unsent_bytes: int = 0
    """Of large messages that were sent and have not left yet."""


class HistoryStats(msgspec.Struct, frozen=True, kw_only=True):
    """What older batches than those buffered are collapsed into."""

    batches: int = 0
    """Numbers that it stands for: those from 0 to this, without it."""
    blocks: int = 0
    """Live in it."""
    bytes: int = 0
    """Memory, about."""
    partial: bool = False
    """Whether a number is missing from it since the stream was cleared last. Who gets its snapshot sees a gap."""
    lost: str | None = None
    """Why there is no snapshot, for most reasons until the stream is cleared; None when there is one. After `failed: ...`
    compaction is switched off for the publisher's life."""


class PublisherStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start.

    `accepted` is the sum of `published`, `queued`, `dropped["encode_failed"]` and `dropped["send_failed"]`.
    """

    accepted: int = 0
    published: int = 0
    queued: int = 0
    """Accepted and not yet published."""
    dropped: dict[str, int] = {}
    """By reason: `queue_full` (never accepted, its number burnt), `encode_failed` (accepted, then without bytes), `send_failed`
    (accepted; an exception prevented sending), `ended` (published after the publisher had ended without `shutdown()`, or in a
    forked child; without a number)."""
    failures: dict[str, int] = {}
    """Exceptions by the part of the publisher that raised them, each logged. `compaction` and `heartbeat` are switched off by
    their first one; `replay_buffer` forgets what it held; after one in `thread`, `replay` or `snapshot` that thread goes on."""
    next_seq: int = 0
    """Number that the next batch gets."""
    buffered_batches: int = 0
    buffered_bytes: int = 0
    """What a replay from 0 would send."""
    history: HistoryStats | None = None
    """None where history is not compacted."""
    heartbeats: int = 0
    """Batches of the publisher's own that say what is resident. They have numbers and count nowhere else, as barriers do."""
    subscribers: int = 0
    """Subscriptions on the event socket; a consumer with two topics counts twice."""
    replay: ReplayStats = ReplayStats()
    snapshots: ReplayStats = ReplayStats()
    """Of placement snapshots; `batches` are messages there."""


class ShutdownReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of everything that was accepted."""

    sent: int = 0
    """Batches handed to ZeroMQ during the publisher's life."""
    unsent: int = 0
    """Accepted batches that were still queued when time was up, or when the publisher ended without `shutdown()`."""
    dropped: int = 0
    """Batches dropped for any reason during the publisher's life."""
    replays_cut: int = 0
    """Replay replies that were not finished."""
    flushed: bool | None = None
    """Whether ZeroMQ got rid of every frame in time; None when the context is shared and nobody waited for it."""

    @property
    def complete(self) -> bool:
        """Whether nothing that was accepted is known to be lost."""
        return not self.unsent and not self.replays_cut and self.flushed is not False
