"""The base classes of publishers: the interface, the hooks at exit and after a fork, and the queue of the publisher thread.

Theory of operation of the queue. For the engine, accepting a batch costs one `deque.append`: the publisher thread numbers the
batches when it removes them. The engine detects every exceptional state (full queue, sleeping thread, closed publisher, forked
process) by one comparison, `len(queue) >= _limit`. The limit is the capacity while the thread is awake, 0 while the thread
sleeps, and -1 without a thread. Only in an exceptional state does `publish` take the slow path.

A batch that a full queue drops keeps its number: a `_DroppedRange` at the tail of the queue counts such numbers, and consumers
see a gap when a higher number arrives. If no batch follows, the thread sends an empty batch. The slow path takes the lock, and
the thread takes it once per burst; the fast path takes no lock.

`publish` raises only after the user has called `shutdown`. If the thread has ended for another reason, or in a forked child,
batches are dropped and counted, so that the engine continues.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Final
from weakref import WeakSet

import zmq.utils.garbage  # noqa: F401 - imported first, so that our exit hook runs before pyzmq's, which cancels sends

from kvevents.closeable import Closeable
from kvevents.errors import ClosedError
from kvevents.publisher.compaction import SequencedPayload
from kvevents.publisher.settings import PollSettings
from kvevents.publisher.stats import PublisherStats

logger = logging.getLogger(__name__)


class EventPublisher(Closeable, ABC):
    """Publishes the batches of one data-parallel rank, in order.

    Each rank has a separate publisher, which writes the rank into batches that carry no rank.
    """

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank

    @abstractmethod
    def publish(self, events: Any) -> None:
        """Accept one batch (`kvevents.events.EventBatch` or an engine's type) and give it the next number. Does not block."""

    @abstractmethod
    def shutdown(self) -> Any:
        """Stop accepting batches, and send the accepted ones within a limited time."""

    def close(self) -> None:
        """Call `shutdown`. A publisher used as a context manager calls `close` at the end of the block."""
        self.shutdown()

    def get_publisher_config(self) -> Any:
        """Return the settings in force, with resolved endpoints; None if the publisher has no settings.

        vLLM 0.31 and later calls this method when the engine starts (`vllm/v1/core/sched/scheduler.py`).
        """
        return None

    def stats(self) -> PublisherStats:
        """Return counters since the start; all are zero if the publisher counts nothing."""
        return PublisherStats()

    def _after_fork(self) -> None:
        """Stop using the threads and locks of the parent; called in a forked child for each of `open_publishers`."""


class NullEventPublisher(EventPublisher):
    """Accepts every batch and sends nothing."""

    def publish(self, events: Any) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


# --- exit and forks of the process

open_publishers: WeakSet[EventPublisher] = WeakSet()
"""The publishers that are shut down at interpreter exit, and disabled in forked children."""


def _shut_down_all() -> None:
    with ExitStack() as stack:  # an `ExitStack` calls every `shutdown` even if one raises an exception
        for publisher in list(open_publishers):
            stack.callback(publisher.shutdown)


def _disable_all() -> None:
    for publisher in list(open_publishers):
        publisher._after_fork()  # noqa: SLF001 - this module defines the method


atexit.register(_shut_down_all)
os.register_at_fork(after_in_child=_disable_all)


# --- the queue of the publisher thread

_MEAN_WEIGHT: Final = 1 / 8
_DEVIATION_WEIGHT: Final = 1 / 4
"""Weights with which TCP smooths round-trip times (RFC 6298)."""
_MAX_RELATIVE_DEVIATION: Final = 1 / 4
"""Maximum deviation of the intervals, as a fraction of the mean interval, up to which the next batch counts as predictable."""


class PollPlanner:
    """Predicts the arrival of the next batch from the intervals between the latest batches.

    While batches arrive steadily, the thread sleeps until shortly before the next one is expected and then polls a few times.
    So `publish` need not wake the thread, and a batch waits for about `min_poll_interval`. When the intervals are irregular the
    planner returns no pauses: the thread waits and `publish` wakes it.
    """

    def __init__(self, settings: PollSettings) -> None:
        self._settings = settings
        self._arrived_at = float("-inf")
        self._mean = float("inf")
        self._deviation = 0.0

    def record_arrival(self, now: float, *, at_first_poll: bool = False) -> None:
        """Record that batches were found at `now` (monotonic seconds). `at_first_poll`: the first poll found the batches."""
        interval = now - self._arrived_at
        # The batch came at an unknown time before the first poll. Without the subtraction, pauses would grow continually.
        interval -= self._settings.min_poll_interval if at_first_poll else 0.0
        self._arrived_at = now
        if interval > self._settings.max_interval or self._mean > self._settings.max_interval:
            self._mean, self._deviation = interval, interval / 2
            return
        error = interval - self._mean
        self._mean += error * _MEAN_WEIGHT
        self._deviation += (abs(error) - self._deviation) * _DEVIATION_WEIGHT

    def plan(self, now: float) -> list[float]:
        """Return the seconds to sleep before each check of the queue, starting at `now`; empty while arrivals are irregular."""
        if self._mean > self._settings.max_interval or self._deviation > self._mean * _MAX_RELATIVE_DEVIATION:
            return []
        step = max(self._settings.min_poll_interval, self._deviation / 2)
        first = self._arrived_at + self._mean - self._deviation - step - now
        return [max(first, self._settings.min_pause), *[step] * (3 + int(3 * self._deviation / step))]


class _DroppedRange:
    """Item of the queue that stands for consecutive numbers whose batches were dropped."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 1


class QueuedPublisher(EventPublisher):
    """A publisher whose `publish` only queues. A subclass runs the thread that dequeues and sends the batches."""

    def __init__(self, data_parallel_rank: int, max_queue_size: int, burst: int) -> None:
        """`burst` is the maximum number of batches that `_take_burst` takes."""
        super().__init__(data_parallel_rank)
        self._capacity = max_queue_size or sys.maxsize
        self._burst = burst
        self._limit = self._capacity
        self._queue: deque[Any] = deque()
        # The lock is re-entrant, because a signal handler of the engine can publish while the interrupted code holds the lock.
        self._lock = threading.RLock()
        # The thread waits by acquiring this lock, and releasing it wakes the thread, which is cheaper than a `threading.Event`.
        self._wakeup = _thread.allocate_lock()
        self._wakeup.acquire()
        self._is_asleep = False
        self._is_running = True
        self._is_shut_down = False
        self._end_reason = ""
        """Why the thread ended before `shutdown`; empty while the thread runs and after `shutdown`."""
        self._dropped_after_end = 0
        self._next_seq = 0
        """Number of the batch at the head of the queue."""
        self._dropped_full = 0
        """Number of batches that were dropped because the queue was full."""
        self._dropped_numbers = 0
        """Sum of the counts of all `_DroppedRange`s in the queue."""
        self._dropped_ranges = 0
        """Number of `_DroppedRange`s in the queue."""
        self._own_numbers = 0
        """Number of batches that the thread itself has created, such as heartbeats."""
        self._encode_failures = 0
        self._send_failures = 0
        self._has_tail_gap = False
        """Whether the newest number has no batch. Consumers notice the missing batch only when a higher number is sent."""

    def publish(self, events: Any) -> None:
        """Accept one batch and give it the next number. The method never blocks, and raises only after `shutdown()`.

        A batch without a rank gets the rank of this publisher. If the queue is full, the batch is dropped and counted; its
        number stays unused, and consumers see a gap. An object that is not a batch also uses a number and leaves a gap. Do not
        change the batch after the call, because another thread encodes the batch. In a forked child, and after the publisher
        thread has ended because its ZeroMQ context was terminated, batches are dropped and counted.

        Raises `ClosedError`, a RuntimeError, after `shutdown()`.
        """
        try:
            if events.data_parallel_rank is None:
                events.data_parallel_rank = self._data_parallel_rank
        except Exception:  # noqa: BLE001 - exceptions of a user's own type must not reach the engine
            self._set_attention_rank(events)
        queue = self._queue
        # _limit is read after the length: CPython runs no other thread between the comparison and the append, so the publisher
        # thread cannot fall asleep unnoticed. In other interpreters, a sleep ends at its limit.
        if len(queue) >= self._limit:
            self._publish_slowly(events)
            return
        queue.append(events)

    def _set_attention_rank(self, events: Any) -> None:
        """Set `attn_dp_rank`, SGLang's name of the rank, if a batch has this field instead of `data_parallel_rank`."""
        with suppress(Exception):  # a user's own type can raise anything; encoding the batch reports the problem
            if getattr(events, "attn_dp_rank", self) is None:
                events.attn_dp_rank = self._data_parallel_rank

    def _publish_slowly(self, events: Any) -> None:
        if self._is_shut_down:
            raise ClosedError("Publisher is closed: shutdown() was called")
        if self._end_reason:
            self._dropped_after_end += 1
            if self._dropped_after_end == 1:
                logger.error(
                    "rank %d: the publisher has ended and drops all further batches: %s",
                    self._data_parallel_rank,
                    self._end_reason,
                )
            return
        with self._lock:
            self._append_or_drop(events)
            if self._is_asleep:
                self._wake()

    def _append_or_drop(self, events: Any) -> None:
        if len(self._queue) < self._capacity:
            self._queue.append(events)
            return
        self._dropped_full += 1
        self._dropped_numbers += 1
        tail = self._queue[-1] if self._queue else None
        if isinstance(tail, _DroppedRange):
            tail.count += 1
        else:
            self._queue.append(_DroppedRange())
            self._dropped_ranges += 1

    def _wake(self) -> None:
        self._is_asleep = False
        if self._is_running:
            self._limit = self._capacity
        self._wakeup.release()

    def _end_queue(self, reason: str | None) -> None:
        """End the thread. Further calls of `publish` drop batches for `reason`, or raise if `reason` is None (a shutdown)."""
        with self._lock:
            if reason is None:
                self._is_shut_down = True
            elif not self._is_shut_down:
                self._end_reason = self._end_reason or reason
            self._is_running = False
            self._limit = -1
            if self._is_asleep:
                self._wake()

    def _end_in_child(self, reason: str) -> None:
        """End the queue in a forked child, and replace the lock, because a thread of the parent may have held it."""
        self._lock = threading.RLock()
        self._is_asleep = False
        self._end_queue(reason)

    # --- methods that the publisher thread calls -----------------------------------------------------------------------------

    def _sleep(self, seconds: float) -> None:
        """Sleep until a batch arrives or the queue closes, but at most `seconds`."""
        self._limit = 0 if self._is_running else -1
        with self._lock:
            if self._queue or not self._is_running:
                self._limit = self._capacity if self._is_running else -1
                return
            self._is_asleep = True
        self._wakeup.acquire(timeout=seconds)
        with self._lock:
            self._is_asleep = False
            self._limit = self._capacity if self._is_running else -1
            # `_wake` may have released the lock after the timeout.
            self._wakeup.acquire(blocking=False)

    def _take_burst(self, encode: Callable[[Any], bytes]) -> list[SequencedPayload]:
        """Take one burst out of the queue, and number and encode its batches. A batch that cannot be encoded leaves a gap."""
        with self._lock:
            seq, pop = self._next_seq, self._queue.popleft
            items = [pop() for _ in range(min(self._burst, len(self._queue)))]
            self._next_seq += len(items)
            if self._dropped_ranges:
                ranges = [item for item in items if item.__class__ is _DroppedRange]
                count = sum(item_range.count for item_range in ranges)
                self._next_seq += count - len(ranges)
                self._dropped_ranges -= len(ranges)
                self._dropped_numbers -= count
        burst: list[SequencedPayload] = []
        for item in items:
            if item.__class__ is _DroppedRange:
                seq += item.count
                continue
            try:
                burst.append((seq, encode(item)))
            except BaseException as error:  # noqa: BLE001 - code of users' event types must not end the thread
                self._encode_failures += 1
                with suppress(Exception):  # formatting an exception of a user's type can raise another one
                    self._on_encode_failure(seq, error)
            seq += 1
        if items:
            self._has_tail_gap = not burst or burst[-1][0] != seq - 1
        return burst

    def _take_queue(self) -> list[Any]:
        """Empty the queue and return its batches, without giving them numbers."""
        with self._lock:
            batches = [item for item in self._queue if item.__class__ is not _DroppedRange]
            self._queue.clear()
            self._dropped_ranges = self._dropped_numbers = 0
            return batches

    def _next_own_number(self) -> int:
        """Return a number for a batch that the thread itself creates; the batch precedes all queued batches."""
        self._has_tail_gap = False
        with self._lock:
            self._next_seq += 1
            self._own_numbers += 1
            return self._next_seq - 1

    def _next_seq_and_accepted(self) -> tuple[int, int]:
        """Return the number that the next published batch gets, and the number of batches accepted so far."""
        with self._lock:
            following = self._next_seq + len(self._queue) - self._dropped_ranges + self._dropped_numbers
            return following, following - self._dropped_full - self._own_numbers

    def _count_processed(self) -> int:
        """Return how many of the batches given to `publish` have left the queue, because they were sent or dropped."""
        with self._lock:
            return self._next_seq - self._own_numbers

    def _on_encode_failure(self, seq: int, error: BaseException) -> None:
        """Record why batch `seq` could not be encoded."""
        raise NotImplementedError
