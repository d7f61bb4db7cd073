"""The limits and timers of a stream, with the reasons for their defaults."""

# This module has no `from __future__ import annotations`, for the reason that `kvevents.client.schemas` states.
from typing import Annotated, Final

from kvevents.settings import Bytes, Pause, Positive, Range, Seconds, Settings


class StreamLimits(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one stream. When a limit is reached, a counter shows it, and trust drops if batches may be missing."""

    max_pending_batches: Positive = 65_536
    """Maximum number of batches that wait for a missing batch; further batches are dropped, and replayed later. Engines' replay
    buffers have 10,000 batches."""
    max_pending_bytes: Bytes = 64 * 1024 * 1024
    """Maximum number of bytes of the batches that wait for a missing batch."""
    max_total_pending_bytes: Positive = 512 * 1024 * 1024
    """Maximum number of bytes of the batches that wait in all streams of a subscriber, as when a whole fleet reconnects."""
    replay_timeout: Seconds = 2.0
    """Seconds without progress after which a replay request counts as unanswered. Engines need 0.1 s if idle, or 0.2 s for
    10,000 batches."""
    reply_idle_timeout: Seconds = 0.5
    """Seconds without a message after which an answer that has begun counts as ended, because engines can lose end markers."""
    max_duplicate_replies: Positive = 200_000
    """Maximum number of consecutive messages without progress in one answer; with more, the request counts as unanswered, so
    that no answer is endless."""
    max_unanswered_requests: Positive = 3
    """Number of consecutive unanswered requests after which a missing batch is given up."""
    max_incomplete_answers: Positive = 2
    """Number of consecutive answers that lack a missing batch, after which the batch is given up."""
    max_request_burst: Positive = 32
    """Maximum number of replay requests that one stream sends without a pause, after a long time without requests. An engine's
    whole buffer of 10,000 batches needs ten requests, because engines' sockets drop messages when 1,000 are queued."""
    request_interval: Pause = 0.5
    """Seconds between two requests after the burst, regardless of the content of the answers. If an answer reaches a live
    batch, a further burst is allowed. Engines publish and answer on one thread, so requests cost throughput."""
    idle_before_probe: Seconds = 1.0
    """Seconds without a live batch after which the tail is checked by replay."""
    max_probe_interval: Seconds = 30.0
    """Maximum pause in seconds between two checks of a quiet stream. Pauses double up to this value."""
    max_conflicts: Positive = 3
    """Number of consecutive conflicts between replay and the live stream after which the replay endpoint is distrusted.
    After as many probes with new batches, of which none came live, replay counts as unconfirmed."""
    distrust_cooldown: Seconds = 60.0
    """Seconds until a distrusted replay endpoint is queried again. An engine that restarts repeatedly also causes conflicts."""
    max_replayed_digests: Positive = 256
    """Maximum number of replayed batches whose digests are stored, to compare these batches with live batches that have equal
    numbers. If an older batch arrives live, it is requested from replay again."""
    max_missed_heartbeats: Annotated[float, Range(is_open=True)] = 3.0
    """Number of heartbeat intervals without any message after which a publisher counts as silent; 3 tolerates a lost heartbeat
    followed by a late one."""
    max_unread: Seconds = 10.0
    """Seconds without a call of `receive` after which a stream is STALE, even if messages have arrived. The limit is lower if
    the publisher has promised heartbeats."""
    max_consecutive_resyncs: Positive = 2
    """Maximum number of restarts of a stream between two matches, for each kind of cause: the digest, the incarnation or the
    attestation of a heartbeat, or an unconfirmed batch that replay has evicted. If a second history from 0 repairs nothing, a
    third would not either."""


DEFAULT_STREAM_LIMITS: Final = StreamLimits()
