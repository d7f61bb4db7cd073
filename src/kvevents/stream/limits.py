"""What a stream waits for and keeps: each bound named, defaulted and justified here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds of one stream. Reaching one is counted, and shows in its trust where it matters."""

    max_pending_batches: int = 65_536
    """Batches that wait for a missing one. An engine's replay buffer holds 10,000; what does not fit is replayed later."""
    max_pending_bytes: int = 64 * 1024 * 1024
    """Bytes of those batches."""
    replay_timeout: float = 2.0
    """Seconds without progress after which a replay request counts as unanswered. Engines need 0.1 s idle, 0.2 s for 10,000."""
    reply_idle_timeout: float = 0.5
    """The same once an answer has begun: engines lose end markers, and an answer that pauses this long has ended."""
    max_duplicate_replies: int = 200_000
    """Messages of one answer that bring nothing new, after which it is cut off: an endless answer ends here."""
    max_unanswered_requests: int = 3
    """Unanswered requests in a row after which a missing batch is given up."""
    max_incomplete_answers: int = 2
    """Answers in a row without the missing batch after which it is given up."""
    max_request_burst: int = 32
    """Replay requests of one stream that may follow each other without a pause, as after a long time without any. An engine's
    whole buffer of 10,000 batches needs ten: its sockets drop what is queued behind 1,000."""
    request_interval: float = 0.5
    """Seconds between two requests after those, whatever the answers hold, unless one led to where live batches are: engines
    publish and answer on one thread."""
    idle_before_probe: float = 1.0
    """Seconds of silence after which the tail is checked."""
    max_probe_interval: float = 30.0
    """Seconds between two checks of a stream that stays quiet, doubling up to this."""
    max_conflicts: int = 3
    """Contradictions between replay and live stream in a row after which the replay endpoint is no longer believed."""
    distrust_cooldown: float = 60.0
    """Seconds until a replay endpoint that is no longer believed is asked once more: contradictions also come of an engine that
    restarts again and again."""
    max_replayed_digests: int = 256
    """Replayed batches whose digests are kept, to be compared with the same ones arriving live a moment later. Replay is asked
    again for the number of a live batch that is older."""
    max_missed_heartbeats: float = 3.0
    """Times the interval that a sender has told in its heartbeats, after which it is silent when nothing is heard of it: one
    heartbeat may be lost and the next be late."""
    max_consecutive_resyncs: int = 2
    """How often in a row, with no agreement between, a stream starts over because of a heartbeat's digest, or of its life; or
    because replay has forgotten what it had brought, before it could be proven. What a second history from 0 does not mend, a
    third does not either."""


DEFAULT_STREAM_LIMITS: Final = StreamLimits()
