"""The limits and timers of a stream, each with its default and reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits of one stream. Reaching one is counted, and affects trust where it matters."""

    max_pending_batches: int = 65_536
    """Batches that wait for a missing one. An engine's replay buffer holds 10,000. What does not fit is replayed later."""
    max_pending_bytes: int = 64 * 1024 * 1024
    """Bytes of those batches."""
    replay_timeout: float = 2.0
    """Seconds without progress after which a replay request counts as unanswered. Engines need 0.1 s if idle, 0.2 s for 10,000
    batches."""
    reply_idle_timeout: float = 0.5
    """The timeout after the first message of an answer. Engines lose end markers, so a pause of this length ends an answer."""
    max_duplicate_replies: int = 200_000
    """Messages of one answer in a row that bring nothing new, after which the request counts as unanswered: an endless answer
    ends here."""
    max_unanswered_requests: int = 3
    """Unanswered requests in a row after which a missing batch is given up."""
    max_incomplete_answers: int = 2
    """Answers in a row without the missing batch after which it is given up."""
    max_request_burst: int = 32
    """Replay requests of one stream that may follow each other without a pause after a long time without any. An engine's
    whole buffer of 10,000 batches needs ten, because its sockets drop messages beyond 1,000 queued ones."""
    request_interval: float = 0.5
    """Seconds between two requests after the burst, regardless of the content of the answers. A request that leads to a live
    batch allows another burst. Engines publish and answer on one thread, so requests cost them throughput."""
    idle_before_probe: float = 1.0
    """Seconds without a live batch after which the tail is checked by replay."""
    max_probe_interval: float = 30.0
    """Longest pause in seconds between two checks of a quiet stream. Pauses double up to this."""
    max_conflicts: int = 3
    """Conflicts between replay and the live stream in a row after which the replay endpoint is distrusted."""
    distrust_cooldown: float = 60.0
    """Seconds until a distrusted replay endpoint is asked again. An engine that restarts again and again also causes
    conflicts."""
    max_replayed_digests: int = 256
    """Replayed batches whose digests are stored, for comparison with the same batches when they arrive live a moment later.
    For a live batch that is older, replay is asked for its number again."""
    max_missed_heartbeats: float = 3.0
    """Heartbeat intervals without anything received after which a publisher counts as silent: one heartbeat may be lost and
    the next one late."""
    max_unread: float = 10.0
    """Seconds without a call of `receive` after which a stream is STALE, whatever has arrived meanwhile. Less if its publisher
    has promised heartbeats."""
    max_consecutive_resyncs: int = 2
    """Times in a row, with no match between, that a stream starts over for the same kind of cause: a heartbeat's digest, a
    heartbeat's incarnation, or an unconfirmed batch that replay has evicted. What a second history from 0 does not repair, a
    third one does not repair either."""


DEFAULT_STREAM_LIMITS: Final = StreamLimits()
