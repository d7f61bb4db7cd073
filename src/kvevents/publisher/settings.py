"""Limits and timers of a publisher. Each field has its default, its unit and the reason for the default."""

from __future__ import annotations

from dataclasses import dataclass

from kvevents.wire import DEFAULT_WIRE_LIMITS
from kvevents.zeromq.zap import DEFAULT_SECURITY_SETTINGS, SecuritySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PollSettings:
    """When the publisher thread polls for batches instead of waiting for `publish` to wake it. All fields are in seconds."""

    max_interval: float = 0.005
    """Mean interval between batches up to which the thread polls. Above it, repeated polls of the queue cost more than a
    wake-up."""
    min_pause: float = 0.00025
    """Shortest pause before the first poll of the queue."""
    min_poll_interval: float = 0.0001
    """Shortest pause between two polls, once a batch is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayBufferSettings:
    """How much a compacting replay buffer holds, and how it moves batches into the compactor."""

    group_size: int = 64
    """Batches that are compacted in one call. A native call costs as much as a small batch."""
    min_groups: int = 16
    """Groups that `buffer_steps` holds at least. With fewer steps, groups are smaller than `group_size`."""
    max_bytes: int = 256 * 1024 * 1024
    """Payload bytes in the buffer: 10,000 batches of 26 KB. Most batches have some hundred bytes; batches of long prompts, and
    snapshots that a relay forwards, have MiB. Without compaction there is no limit in bytes."""
    max_payload_bytes: int = DEFAULT_WIRE_LIMITS.max_payload_bytes
    """Bytes of one payload of a snapshot: the largest that subscribers read by default."""
    max_backlog: int = 1024
    """Batches that may wait for the compaction thread before the sending thread compacts them itself."""
    compaction_bytes: int = 16 * 1024
    """Payload bytes that the compaction thread compacts without a pause: 8 batches of 32 blocks, about 0.1 ms."""
    compaction_pause: float = 0.001
    """Seconds between two such pieces, unless more than two groups wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayServerSettings:
    """Limits and timers of the replay server."""

    send_limit: int = 256
    """Messages in the pipe of one consumer (ZMQ_SNDHWM): enough to keep TCP busy for a millisecond, few enough to bound
    memory."""
    max_sessions: int = 256
    """Replies in progress; each may hold a buffer's worth of batches. Further requests wait in ZeroMQ."""
    max_waiting_requests: int = 8
    """Requests of one consumer that wait for its current reply. They are answered in order; more are refused."""
    messages_per_turn: int = 32
    """Messages sent for one session before the next session has its turn."""
    requests_per_turn: int = 64
    """Requests read before the sessions have their turn, so that a flood of requests does not stop replies."""
    yield_delay: float = 0.0001
    """Seconds between two turns of sessions, in which other threads get the interpreter lock and other processes a CPU. A
    thread that sends without a pause takes the lock back before a waiting thread wakes, which then waits 5 ms
    (`sys.getswitchinterval`). With this delay a full buffer of 10,000 batches takes 0.1 s."""
    retry_delays: tuple[float, ...] = (0.001, 0.002, 0.004, 0.008)
    """Seconds to wait while the pipes of all consumers are full. The last delay repeats."""
    error_delay: float = 0.1
    """Seconds to wait after an exception, so that a persistent fault does not keep a CPU busy."""
    idle_wait: float = 1.0
    """Longest sleep of the idle thread in seconds. A request, `wake` and `stop` end the sleep at once."""
    unread_timeout: float = 60.0
    """Seconds in which a TCP connection accepts no data before the kernel closes it and ZeroMQ frees its queue (ZMQ_TCP_MAXRT,
    on Linux). The replies of that consumer have been abandoned before."""
    large_frame_bytes: int = 16 * 1024
    """Size from which a frame is counted as in flight. A full pipe of 256 smaller frames holds at most 4 MiB."""
    in_flight_bytes: int = 4 * 1024 * 1024
    """Bytes of large frames in flight to one consumer. A single larger frame may be sent when none is in flight."""
    total_in_flight_bytes: int = 64 * 1024 * 1024
    """Bytes of large frames in flight to all consumers of one server. Above it each consumer gets one large frame at a time."""
    in_flight_poll_interval: float = 0.002
    """Seconds between two checks while the server waits until all large frames have left."""
    min_read_rate: int = 128 * 1024
    """Slowest reader that the server waits for, in bytes per second. A reply is not abandoned while its large frames could
    still be in flight at this rate."""
    progress_timeout: float = 30.0
    """Seconds without progress after which a reply is abandoned, in addition to the time that large frames may need at
    `min_read_rate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """Limits and timers of a `ZmqEventPublisher` that its constructor has no parameter for."""

    burst: int = 64
    """Batches that the publisher thread encodes, stores for replay and sends at once. Smaller bursts cost more per batch,
    larger ones delay the first batch."""
    max_sleep: float = 0.25
    """Longest sleep of the idle publisher thread in seconds."""
    poll_interval: float = 0.1
    """Seconds between two polls of everything except the queue: subscriptions, losses to log."""
    error_delay: float = 0.1
    """Seconds to wait after a failed burst, as in vLLM, so that a persistent fault does not keep a CPU busy."""
    term_timeout: float = 5.0
    """Seconds beyond the time for flushing in which ZeroMQ must end the publisher's context; a shutdown waits no longer."""
    loss_quiet_time: float = 10.0
    """Seconds without a further dropped batch after which a run of drops counts as over."""
    log_interval: float = 10.0
    """Seconds between two log records about exceptions of the same part."""
    reconnect_delay: float = 5.0
    """Seconds after a disconnect until a connecting event socket connects again where libzmq does not."""
    polling: PollSettings = PollSettings()
    buffer: ReplayBufferSettings = ReplayBufferSettings()
    replay: ReplayServerSettings = ReplayServerSettings()
    security: SecuritySettings = DEFAULT_SECURITY_SETTINGS


DEFAULT_PUBLISHER_SETTINGS = PublisherSettings()
