"""Statistics of a publisher, and the logs of its failures and losses."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Final

import msgspec
import zmq

_TERMINATION_ERRNOS: Final = {zmq.ETERM, zmq.ENOTSOCK}


class ReplayStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a replay server since its start."""

    requests: int = 0
    batches: int = 0
    """Number of batches sent in replies."""
    active: int = 0
    """Number of replies in progress."""
    finished: int = 0
    abandoned: int = 0
    """Number of replies that the server gave up because the consumer read nothing or too slowly, or because of a shutdown."""
    disconnected: int = 0
    """Number of replies that ended because the consumer disconnected."""
    malformed: int = 0
    """Number of requests that could not be parsed."""
    merged: int = 0
    """Number of requests that shared a reply, because `max_waiting_requests` of their consumer were waiting."""
    deferred: int = 0
    """Number of times that a large message had to wait because `in_flight_bytes` or `total_in_flight_bytes` was reached."""
    unsent_bytes: int = 0
    """Number of bytes of large messages that ZeroMQ holds and has not sent yet."""


class HistoryStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of the compacted history of all batches that have left the replay buffer."""

    batches: int = 0
    """Number of batches, from batch 0 on, that are compacted into the history."""
    blocks: int = 0
    """Number of live blocks in the history."""
    bytes: int = 0
    """Approximate number of bytes of memory that the history needs."""
    partial: bool = False
    """Whether any number was skipped since the stream was last cleared. A skipped number is a gap in the snapshot."""
    unavailable_reason: str | None = None
    """Why a snapshot cannot be built; None if the snapshot can be built. Most reasons end when the stream is cleared. After
    `failed: ...` compaction is switched off until the process restarts."""


class PublisherStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a publisher since its start.

    `accepted` is the sum of `published`, `queued`, `dropped["encode_failed"]` and `dropped["send_failed"]`.
    """

    accepted: int = 0
    published: int = 0
    queued: int = 0
    """Number of batches that were accepted and are not yet published."""
    dropped: dict[str, int] = {}
    """Number of dropped batches for each reason: `queue_full` (not accepted; their numbers are gaps), `encode_failed` and
    `send_failed` (accepted, but an exception prevented encoding or sending), `ended` (not accepted and without numbers, because
    the publisher had ended without `shutdown()`, or in a forked child)."""
    failures: dict[str, int] = {}
    """Number of exceptions by the part of the publisher that raised them; all are logged. `compaction` and `heartbeat` are
    switched off by their first exception. An exception in `replay_buffer` empties the buffer. The publisher thread (`thread`)
    and the replay thread (`replay`) continue."""
    next_seq: int = 0
    """Number of the next batch."""
    buffered_batches: int = 0
    buffered_bytes: int = 0
    """Number of payload bytes that a replay from 0 would send, except those of the snapshot."""
    history: HistoryStats | None = None
    """State of the compacted history; None if history is not compacted."""
    heartbeats: int = 0
    """Number of heartbeats sent. Heartbeats have batch numbers, but no other counter includes them."""
    subscribers: int = 0
    """Number of subscriptions on the event socket; a consumer with two topics counts twice."""
    replay: ReplayStats = ReplayStats()


class ShutdownReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shutdown`: the numbers of sent, unsent and dropped batches."""

    sent: int = 0
    """Number of batches that were passed to ZeroMQ since the start."""
    unsent: int = 0
    """Number of accepted batches that were still queued at the timeout, or when the publisher ended without `shutdown()`."""
    dropped: int = 0
    """Number of batches that were dropped for any reason since the start."""
    replays_unfinished: int = 0
    """Number of replies that were not finished."""
    flushed: bool | None = None
    """Whether ZeroMQ sent every frame in time; None if the context is shared and the publisher did not wait for it."""

    @property
    def complete(self) -> bool:
        """Whether all accepted batches and replies were sent; True also if `flushed` is unknown."""
        return not self.unsent and not self.replays_unfinished and self.flushed is not False


class FailureLog:
    """Counts and logs, per part, the exceptions that a publisher survives. Only one thread may record exceptions of a part."""

    def __init__(self, logger: logging.Logger, label: str, log_interval: float) -> None:
        self._logger = logger
        self._label = label
        self._log_interval = log_interval
        self._counts: dict[str, int] = {}
        self._logged_at: dict[str, float] = {}

    def record(self, part: str, error: BaseException, consequence: str) -> None:
        """Count an exception, and log it with its traceback, but at most one per part in `log_interval` seconds."""
        self.count(part)
        now = monotonic()
        if part not in self._logged_at or now - self._logged_at[part] > self._log_interval:
            self._logged_at[part] = now
            self._logger.error("%s: %s failed: %r; %s", self._label, part, error, consequence, exc_info=error)

    def count(self, part: str) -> None:
        """Count an exception that is logged elsewhere."""
        self._counts[part] = self._counts.get(part, 0) + 1

    def counts(self) -> dict[str, int]:
        """Return the number of exceptions of each part; parts without exceptions are omitted."""
        return dict(self._counts)


class LossLogger:
    """Logs the first drop of a series of dropped batches, and the number of batches when the series is over."""

    def __init__(self, logger: logging.Logger, subject: str, quiet_time: float) -> None:
        """`quiet_time` is the number of seconds without a further drop after which a series is over."""
        self._logger = logger
        self._subject = subject
        self._quiet_time = quiet_time
        self._count_before_run = self._count = 0
        self._changed_at = 0.0

    def update(self, count: int, now: float, detail: str = "") -> None:
        """Log a change of the counter since the last call, or the end of a series; `now` is in monotonic seconds."""
        if count != self._count:
            if self._count_before_run == self._count:
                cause = f": {detail}" if detail else ""
                self._logger.warning("%s%s; consumers see a gap; further drops are counted", self._subject, cause)
            self._count, self._changed_at = count, now
        elif self._count_before_run != self._count and now - self._changed_at > self._quiet_time:
            self._logger.warning("%s: ended after %d dropped batches", self._subject, self._count - self._count_before_run)
            self._count_before_run = self._count


def is_context_terminated(error: BaseException) -> bool:
    """Whether the error says that the ZeroMQ context was terminated, or the socket closed with it."""
    return isinstance(error, zmq.ZMQError) and error.errno in _TERMINATION_ERRNOS
