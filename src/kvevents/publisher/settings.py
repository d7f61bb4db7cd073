"""Limits and timers of a publisher. The docstring of each field states its unit and the reason for its default."""

from __future__ import annotations

from kvevents.settings import Bytes, Pause, Positive, Seconds, Settings
from kvevents.wire import DEFAULT_WIRE_LIMITS
from kvevents.zeromq.zap import DEFAULT_SECURITY_SETTINGS, SecuritySettings


class PollSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of polling for batches, in seconds. A polling publisher thread needs no wake-up by `publish`."""

    max_interval: Seconds = 0.005
    """Maximum mean interval between batches with which the thread polls. At longer intervals, polling costs more than a
    wake-up."""
    min_pause: Seconds = 0.00025
    """Minimum pause before the first poll of the queue."""
    min_poll_interval: Seconds = 0.0001
    """Minimum pause between two polls while a batch is expected."""


class ReplayBufferSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size of a replay buffer that compacts batches, and how the buffer moves batches into the compactor."""

    group_size: Positive = 64
    """Number of batches that are compacted in one call, because a native call costs as much as compacting a small batch."""
    min_groups: Positive = 16
    """Minimum number of groups in `buffer_steps`. If the buffer has few steps, groups are smaller than `group_size`."""
    max_bytes: Bytes = 256 * 1024 * 1024
    """Maximum payload bytes in the buffer: 10,000 batches of 26 KB. Most batches have a few hundred bytes; batches of long
    prompts, and snapshots that a relay forwards, have several MiB. If nothing is compacted, there is no limit in bytes."""
    max_payload_bytes: Bytes = DEFAULT_WIRE_LIMITS.max_payload_bytes
    """Maximum number of bytes of one payload of a snapshot: the largest payload that subscribers accept by default."""
    max_backlog: Positive = 1024
    """Maximum number of batches that wait for the compaction thread. If more batches wait, the sending thread compacts them."""
    compaction_bytes: Bytes = 16 * 1024
    """Number of payload bytes that the compaction thread compacts without a pause: 8 batches of 32 blocks, about 0.1 ms."""
    compaction_pause: Pause = 0.001
    """Seconds of the pause after each `compaction_bytes` bytes; there are no pauses while more than two groups wait."""


class ReplayServerSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and timers of the replay server."""

    send_limit: Positive = 256
    """Maximum number of messages in the pipe of one consumer (ZMQ_SNDHWM): enough to keep TCP busy for a millisecond, few
    enough to bound memory."""
    max_sessions: Positive = 256
    """Maximum number of replies in progress; each may hold all batches of a buffer. Further requests wait in ZeroMQ."""
    max_waiting_requests: Positive = 8
    """Maximum number of requests of one consumer that wait for its current reply. Further requests share the reply of the last
    waiting request, which begins at the lowest of their numbers and has an end marker for each request."""
    messages_per_turn: Positive = 32
    """Maximum number of messages that are sent for one session before the next session has its turn."""
    requests_per_turn: Positive = 64
    """Maximum number of requests that are read before the sessions have their turn, so that a flood does not stop replies."""
    yield_delay: Pause = 0.0001
    """Seconds between two turns of sessions, so that other threads get the interpreter lock and other processes get a CPU.
    Without a pause, the sending thread would take the lock back before a waiting thread wakes; the waiting thread would then
    wait for further 5 ms (`sys.getswitchinterval`). With this delay a full buffer of 10,000 batches takes 0.1 s."""
    retry_delay: Seconds = 0.001
    """Seconds to wait while the pipes of all consumers are full. The delay doubles with each turn in which nothing was sent."""
    max_retry_delay: Seconds = 0.008
    """Maximum of `retry_delay` in seconds."""
    error_delay: Seconds = 0.1
    """Seconds to wait after an exception, so that a persistent fault does not keep a CPU busy."""
    idle_wait: Seconds = 1.0
    """Maximum sleep of the idle thread in seconds. A request and `stop` end the sleep at once."""
    unread_timeout: Seconds = 60.0
    """Seconds in which a TCP connection accepts no data before the kernel closes it and ZeroMQ frees its queue (ZMQ_TCP_MAXRT,
    on Linux). When that happens, replies to that consumer have already been abandoned."""
    large_frame_bytes: Bytes = 16 * 1024
    """Minimum size in bytes of a frame that is counted as in flight. A full pipe of 256 smaller frames holds at most 4 MiB."""
    in_flight_bytes: Bytes = 4 * 1024 * 1024
    """Maximum bytes of large frames in flight to one consumer. A single larger frame is sent if no other frame is in flight."""
    total_in_flight_bytes: Bytes = 64 * 1024 * 1024
    """If more bytes of large frames are in flight to all consumers, each consumer gets only one large frame at a time."""
    in_flight_poll_interval: Seconds = 0.002
    """Seconds between two checks while the server waits until all large frames were sent."""
    min_read_rate: Bytes = 128 * 1024
    """Minimum rate in bytes per second at which a consumer must read. The time that large frames need at this rate is added to
    the timeouts of a reply."""
    progress_timeout: Seconds = 30.0
    """Seconds without progress after which a reply is abandoned, in addition to the time that large frames may need at
    `min_read_rate`. A whole reply may take at most this many seconds longer than a reply at that rate."""
    busy_timeout: Seconds = 2.0
    """Replaces `progress_timeout` while `max_sessions` replies are in progress, so that slow consumers do not delay others."""


class PublisherSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Those limits and timers of a `ZmqEventPublisher` that are not parameters of its constructor."""

    burst: Positive = 64
    """Maximum number of batches that the publisher thread encodes, stores and sends at once. Smaller bursts cost more per
    batch, and larger bursts delay their first batch."""
    max_sleep: Seconds = 0.25
    """Maximum sleep of the idle publisher thread in seconds."""
    poll_interval: Seconds = 0.1
    """Seconds between two polls of everything except the queue, such as subscriptions and losses to log."""
    error_delay: Seconds = 0.1
    """Seconds to wait after a failed burst, as in vLLM, so that a persistent fault does not keep a CPU busy."""
    term_timeout: Seconds = 5.0
    """Maximum number of seconds for which a shutdown, after flushing, waits until ZeroMQ has ended the publisher's context."""
    loss_quiet_time: Seconds = 10.0
    """Seconds without a further dropped batch after which a series of drops counts as over."""
    log_interval: Seconds = 10.0
    """Minimum number of seconds between two log records about exceptions of the same part."""
    reconnect_delay: Seconds = 5.0
    """Seconds after a disconnect until a connecting event socket connects again, if libzmq does not reconnect it."""
    peer_timeout: Seconds = 5.0
    """Seconds after which a publisher that connects logs that no consumer has subscribed."""
    polling: PollSettings = PollSettings()
    buffer: ReplayBufferSettings = ReplayBufferSettings()
    replay: ReplayServerSettings = ReplayServerSettings()
    security: SecuritySettings = DEFAULT_SECURITY_SETTINGS


DEFAULT_PUBLISHER_SETTINGS = PublisherSettings()
