"""The state of fetching batches by replay: the open request and its progress, request pacing, and the schedule of checks."""

from __future__ import annotations

import enum
from math import inf
from typing import Final, NamedTuple

from msgspec import Struct

from kvevents.stream.identity import Fingerprint
from kvevents.stream.settings import StreamLimits

ALWAYS_DUE: Final = float("-inf")
"""A time before any time of the clock, so that an action is due at once."""


class FetchRequest(NamedTuple):
    """A replay request to send, from number `start`."""

    start: int
    needs_new_connection: bool
    """Whether to send the request on a new connection, on which no answer to an earlier request can arrive."""


class Purpose(enum.Enum):
    """Why batches are requested."""

    FILL = "batches are missing"
    VERIFY = "is the publisher the one from before the reconnect?"
    PROBE = "was the tail of a quiet stream lost?"
    COMPARE = "does replay hold the newest live batch?"


class Stage(enum.Enum):
    """The meaning of the next messages of an answer."""

    MATCHING = enum.auto()
    """Batches of an unknown incarnation, until a batch repeats the fingerprint."""
    COLLECTING = enum.auto()
    """Batches to deliver."""
    CONFIRMING = enum.auto()
    """Batches up to the live batch that confirms the answer; all missing batches have arrived."""


class ReplayFetch(Struct):
    """One open request and the progress of its answer. A retry continues the counts of the earlier attempts."""

    purpose: Purpose
    start: int
    fingerprint: Fingerprint | None
    """The next fingerprint that the answer must repeat before its batches count as history; None after the last fingerprint."""
    stage: Stage = Stage.COLLECTING
    needs_new_connection: bool = True
    is_sent: bool = False
    active_at: float = 0.0
    """The time at which the request was sent, or at which its answer last made progress."""
    next_seq_before: int = 0
    """The next number to deliver at the time when the request was sent, or when the answer had repeated the fingerprints."""
    is_first: bool = True
    """Whether the next batch is the first of its answer; no engine drops the first batch."""
    verifies_reconnect: bool = False
    """Whether the answer has repeated the first fingerprint of the chain, so that the later fingerprints must follow."""
    has_more: bool = False
    """Whether the answer had batches after its fingerprints; if so, further messages of the answer may have been lost."""
    live_before: int = -1
    """Number of the newest live batch at the time of the request, or -1. The live publisher's answer does not end before it."""
    highest_seq: int = -1
    """The highest number of a batch in the answer."""
    highest_early_seq: int = -1
    """The highest number that this answer or an earlier attempt brought early, before all earlier batches were delivered."""
    snapshot_part: int = -2
    """Number of the newest part of the snapshot with which the answer began; -2 if the next message cannot be a part."""
    duplicates: int = 0
    """Number of consecutive messages without progress."""
    has_delivered: bool = False
    """Whether the answer has brought the next batch to deliver; live batches that arrive meanwhile do not count."""
    unanswered: int = 0
    """Number of consecutive earlier attempts that brought no new batch in time."""
    incomplete: int = 0
    """Number of consecutive earlier answers that lacked the requested batch."""

    def __post_init__(self) -> None:
        if self.fingerprint is not None:
            self.stage = Stage.MATCHING

    def send(self, now: float, next_seq: int) -> FetchRequest:
        """Mark the request as sent and return it."""
        self.is_sent = True
        self.active_at = now
        self.next_seq_before = next_seq
        return FetchRequest(self.start, self.needs_new_connection)

    def deadline(self, limits: StreamLimits) -> float:
        """Return the time at which the request counts as unanswered, or the begun answer counts as ended."""
        return self.active_at + (limits.replay_timeout if self.is_first else limits.reply_idle_timeout)

    def begin_message(self, seq: int) -> bool:
        """Count a batch of the answer as a duplicate until `progress` is called. Return whether the batch is the first."""
        is_first, self.is_first = self.is_first, False
        self.highest_seq = max(self.highest_seq, seq)
        self.duplicates += 1
        return is_first

    def progress(self, now: float, *, is_new: bool = True) -> None:
        """Record progress: a new batch or, with `is_new=False`, a fingerprint, which does not reset `unanswered`."""
        self.active_at = now
        self.duplicates = 0
        if is_new:
            self.unanswered = 0

    def collect(self, next_seq: int) -> None:
        """Begin to collect history, because the answer has repeated the fingerprints."""
        self.fingerprint = None
        self.stage = Stage.COLLECTING
        self.next_seq_before = next_seq
        self.has_more = False
        if self.purpose is not Purpose.FILL:
            self.incomplete = 0

    def end_incomplete(self, next_seq: int, limits: StreamLimits) -> bool:
        """Count an answer that lacks the missing batch. Return whether to give up the batch."""
        self.incomplete = 0 if next_seq > self.next_seq_before else self.incomplete + 1
        return self.incomplete >= limits.max_incomplete_answers

    def end_without_fingerprint(self, limits: StreamLimits) -> bool:
        """Count an answer that does not repeat the fingerprint. Return whether to give up the fingerprint."""
        self.incomplete += 1
        return self.incomplete >= limits.max_incomplete_answers

    def end_unanswered(self, limits: StreamLimits) -> bool:
        """Count a request that brought no new batch in time. Return whether to give up replay."""
        self.unanswered = 0 if self.has_delivered else self.unanswered + 1
        return self.unanswered >= limits.max_unanswered_requests

    def retry(self, fetch: ReplayFetch, *, needs_new_connection: bool) -> ReplayFetch:
        """Return `fetch` as the next attempt, with the counts of the earlier attempts."""
        fetch.needs_new_connection = needs_new_connection
        fetch.unanswered, fetch.incomplete, fetch.highest_early_seq = self.unanswered, self.incomplete, self.highest_early_seq
        return fetch


class RequestPacer:
    """Paces replay requests: at most `max_request_burst` at once, then one per `request_interval`."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self.next_at = ALWAYS_DUE
        """Time before which no request is sent."""
        self.is_waiting = False
        """Whether a request waits for its turn."""

    def try_request(self, now: float) -> bool:
        """Return whether a request is allowed now. If it is, count the request.

        Unused intervals are saved for later requests, but not more than `max_request_burst`.
        """
        self.is_waiting = now < self.next_at
        if self.is_waiting:
            return False
        interval = self._limits.request_interval
        self.next_at = max(self.next_at, now - (self._limits.max_request_burst - 1) * interval) + interval
        return True

    def reset(self) -> None:
        """Allow a whole burst of requests again, because a request has reached a live batch."""
        self.next_at = ALWAYS_DUE


class CheckSchedule:
    """The schedule of probes of a quiet stream and of comparisons with a live batch. Pauses grow until a check has a result."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self.compare_at = ALWAYS_DUE
        """Time before which no comparison is requested."""
        self.failed_comparisons = 0
        """Number of consecutive comparisons that had no result."""
        self.answers_behind_live = 0
        """Number of consecutive answers that end with the requested batch, although newer live batches have arrived."""
        self.probes = 0
        """Number of probes since the last live batch."""
        self.only_replayed = 0
        """Number of probes since the last live batch after which new batches came by replay alone."""
        self._next_seq = 0
        self.probe_at = ALWAYS_DUE
        """Time of the next probe of the tail, unless a live batch arrives earlier."""
        self.busy_probe_at = inf
        """Time of the next probe although live batches arrive; infinite unless replay did not answer."""

    def probe(self, now: float, next_seq: int) -> None:
        """Schedule the next probe, after a probe or an unanswered request. `next_seq` is the next number to deliver."""
        self.only_replayed = self.only_replayed + (next_seq > self._next_seq) if self.probes else 0
        self._next_seq = next_seq
        self.probes += 1
        self.probe_at = now + self._pause(self.probes)

    def fail_comparison(self, now: float) -> None:
        """Record that a comparison had no result, because replay did not send a batch with the number of the live batch."""
        self.compare_at = now + self._pause(self.failed_comparisons)
        self.failed_comparisons += 1

    def reset_comparisons(self) -> None:
        """Request the next comparison at once, and forget the results of earlier comparisons."""
        self.failed_comparisons = self.answers_behind_live = self.only_replayed = 0
        self.compare_at = ALWAYS_DUE

    def _pause(self, failures: int) -> float:
        return min(self._limits.idle_before_probe * (1 << min(failures, 16)), self._limits.max_probe_interval)
