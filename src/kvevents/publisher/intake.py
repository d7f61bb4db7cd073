"""Between the engine's thread and the publisher's: a queue that costs the engine one append.

Theory of operation. A batch's number is its position in the queue, so accepting is `deque.append` and numbering is counting on
the other side. Everything unusual, whether the queue is full, the publisher thread asleep, the publisher closed or the process
a fork, is the same one comparison on the engine's side: `_limit` is the capacity while the thread is awake, 0 while it sleeps
and -1 when there is no thread to come. Only then does `publish` take the slow way, and finds out which of these it is.

A batch refused by a full queue burns its number: a `_Hole` at the tail of the queue counts how many, and the consumer sees a
gap once a higher number comes. Where nothing else follows, the thread sends an empty batch. The lock is taken on the slow way
and once per burst by the thread, never by a batch that is simply accepted.

`publish` raises after the user's own `shutdown` and at no other time. When the thread has ended for another reason, or in a
forked child, batches are dropped and counted, so that the engine goes on.
"""

from __future__ import annotations

import _thread
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from kvevents.errors import ClosedError
from kvevents.publisher.base import EventPublisher
from kvevents.publisher.kept import Numbered

logger = logging.getLogger(__name__)

BURST: Final = 64
"""Batches that the thread takes, keeps for replay and sends in one go. Fewer cost more per batch, more delay the first one."""

Encode = Callable[[Any], bytes]


class _Hole:
    """Numbers that no batch will have, at one place in the queue."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 1


class QueuedPublisher(EventPublisher):
    """A publisher whose `publish` only queues. Subclasses run the thread that takes the batches out."""

    def __init__(self, data_parallel_rank: int, max_queue_size: int) -> None:
        super().__init__(data_parallel_rank)
        self._capacity = max_queue_size or sys.maxsize
        self._limit = self._capacity
        self._queue: deque[Any] = deque()
        # Re-entrant, since a signal handler of the engine may publish while its main thread is in here.
        self._lock = threading.RLock()
        self._bell = _ringing_bell()
        self._asleep = False
        self._running = True
        self._is_shut_down = False
        self._why_ended = ""
        """Why nothing is sent any more, where that is not `shutdown`."""
        self._after_end = 0
        """Batches that came after that."""
        self._seq = 0
        self._refused = 0
        self._burnt = 0
        self._inserted = 0
        self._holes = 0
        self._failed = 0
        self._unsendable = 0
        self._unseen = False
        """Whether the newest number was burnt, which nobody can see before another one is sent."""

    def publish(self, events: Any) -> None:
        """Accept one batch and give it the next number. Never blocks, and never raises before `shutdown()`.

        A batch without a rank gets this publisher's. When the queue is full the batch is dropped and counted, and its number is
        burnt, which every consumer sees as a gap. An object that is not a batch burns its number as well. The batch must not be
        changed afterwards: another thread encodes it. In a forked child, and after the publisher thread has ended because its
        ZeroMQ context was terminated, batches are dropped and counted.

        Raises `ClosedError`, a RuntimeError, after `shutdown()`.
        """
        try:
            if events.data_parallel_rank is None:
                events.data_parallel_rank = self._data_parallel_rank
        except Exception:  # noqa: BLE001 - a user's own type may raise anything, and none of it is the engine's affair
            self._annotate(events)
        queue = self._queue
        # _limit is read after the length: in CPython nothing runs between reading it and the append, so a thread about to
        # sleep cannot be missed; elsewhere its sleep is bounded.
        if len(queue) >= self._limit:
            self._publish_slowly(events)
            return
        queue.append(events)

    def _annotate(self, events: Any) -> None:
        """For batch types without `data_parallel_rank`: SGLang's name for it, or, in users' own types, none at all."""
        with suppress(Exception):  # whatever a user's own type raises; its encoding will say more
            if getattr(events, "attn_dp_rank", self) is None:
                events.attn_dp_rank = self._data_parallel_rank

    def _publish_slowly(self, events: Any) -> None:
        if self._is_shut_down:
            raise ClosedError("Publisher is closed: shutdown() was called")
        if self._why_ended:
            self._after_end += 1
            if self._after_end == 1:
                logger.error("rank %d: what is published from now on is dropped: %s", self._data_parallel_rank, self._why_ended)
            return
        with self._lock:
            if len(self._queue) < self._capacity:
                self._queue.append(events)
            else:
                self._refuse()
            if self._asleep:
                self._rouse()

    def _refuse(self) -> None:
        self._refused += 1
        self._burnt += 1
        tail = self._queue[-1] if self._queue else None
        if isinstance(tail, _Hole):
            tail.count += 1
        else:
            self._queue.append(_Hole())
            self._holes += 1

    def _rouse(self) -> None:
        self._asleep = False
        if self._running:
            self._limit = self._capacity
        self._bell.release()

    def _close_intake(self) -> None:
        """From now on `publish` raises; the thread finds `_running` false, waking up if need be."""
        with self._lock:
            self._is_shut_down = True
            self._stop_taking()

    def _end_intake(self, why: str) -> None:
        """From now on `publish` drops what it is given: nothing is sent any more, and `shutdown` was not called."""
        with self._lock:
            if not self._is_shut_down:
                self._why_ended = why
            self._stop_taking()

    def _stop_taking(self) -> None:
        self._running = False
        self._limit = -1
        if self._asleep:
            self._rouse()

    def _become_child(self, why: str) -> None:
        """In a forked child: no thread of the parent's exists here, nor will its locks ever be released."""
        self._lock = threading.RLock()
        self._asleep = False
        self._end_intake(why)

    # --- the thread's side -------------------------------------------------------------------------------------------------

    def _sleep(self, seconds: float) -> None:
        """Until a batch comes or the intake closes, at most `seconds`."""
        self._limit = 0 if self._running else -1
        with self._lock:
            if self._queue or not self._running:
                self._limit = self._capacity if self._running else -1
                return
            self._asleep = True
        self._bell.acquire(timeout=seconds)
        with self._lock:
            self._asleep = False
            self._limit = self._capacity if self._running else -1
            # It may have been rung after the time was up.
            self._bell.acquire(blocking=False)

    def _take_burst(self, encode: Encode) -> list[Numbered]:
        """Number and encode what waits, at most `BURST` batches. What cannot be encoded burns its number."""
        seq, waiting = self._take()
        taken: list[Numbered] = []
        for batch in waiting:
            self._unseen = True
            if batch.__class__ is _Hole:
                seq += batch.count
                continue
            try:
                taken.append((seq, encode(batch)))
                self._unseen = False
            except BaseException as error:  # noqa: BLE001 - encoding runs code of users' event types; none of it may stop the thread
                self._failed += 1
                with suppress(Exception):  # an exception of a user's type may have no words
                    self._unencodable(seq, error)
            seq += 1
        return taken

    def _take(self) -> tuple[int, list[Any]]:
        """The number of the first one, and batches and holes from the head of the queue."""
        with self._lock:
            seq, take = self._seq, self._queue.popleft
            waiting = [take() for _ in range(min(BURST, len(self._queue)))]
            self._seq += len(waiting)
            if self._holes:
                holes = [item for item in waiting if item.__class__ is _Hole]
                burnt = sum(hole.count for hole in holes)
                self._seq += burnt - len(holes)
                self._holes -= len(holes)
                self._burnt -= burnt
            return seq, waiting

    def _insert(self) -> int:
        """The number of a batch of the thread's own, before all that wait."""
        self._unseen = False
        with self._lock:
            self._seq += 1
            self._inserted += 1
            return self._seq - 1

    def _numbers(self) -> tuple[int, int]:
        """The number of the next batch, and how many were accepted so far."""
        with self._lock:
            following = self._seq + len(self._queue) - self._holes + self._burnt
            return following, following - self._refused - self._inserted

    def _unencodable(self, seq: int, error: BaseException) -> None:
        raise NotImplementedError


def _ringing_bell() -> _thread.LockType:
    """A bell that has rung out: to wait is to acquire it, to ring is to release it. Cheaper than an Event by a Condition."""
    bell = _thread.allocate_lock()
    bell.acquire()
    return bell
