"""The bridge's ear: a thread that follows engines and turns what they say into records of the log.

It does not apply what it forwards, so its memory does not grow with what engines hold. Replicas have an index: they find out
whether events could be read, and whether an engine holds what it has said. Of a batch the thread reads what its stream has to
know of it: whether everything was cleared, and what a sender of ours says of itself (`findings_in`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from kvevents.errors import KVEventsError, UnknownSourceError
from kvevents.plane.ledger import Start
from kvevents.plane.records import Batched, Key, Lost, Renewed, StreamRecord, Trusting
from kvevents.plane.settings import RECEIVE_QUEUE
from kvevents.plane.writing import RECORD_BYTES
from kvevents.stream import REASONS_ENDED_BY_CLEAR, BatchReport, Gap, RawBatch, RawDelivery, Source, Trust, inspect_events
from kvevents.subscriber import SocketOptions, Subscriber, ZmqTransport
from kvevents.wire import decode_batch

log = logging.getLogger(__name__)

TURN_SECONDS: Final = 0.02
"""How long a turn waits for the network: orders and trust are at most so old."""
LOOK_SECONDS: Final = 0.1
"""Between two looks at the trust of the streams that something has happened to, while nothing is delivered."""
PAUSE_SECONDS: Final = 0.02
"""Between two looks whether there is room again, while there is none."""
MAX_REASON: Final = 500
"""Characters of a reason; an engine may give one of any length."""
MAX_ASKED_AGAIN: Final = 2
"""How often in a row a sender is asked for all that it holds: what two histories from 0 do not end, a third does not either."""
_CLEARED: Final = b"leared"
"""In every spelling of `AllBlocksCleared`, of which `cleared` is one."""
_HEARTBEAT: Final = b"every"
"""A field that every heartbeat has."""


class Heard(NamedTuple):
    """What came of one stream."""

    record: StreamRecord
    turn: int
    """How often its stream was followed anew before: what is of an earlier time is void."""


Tell = Callable[[list[Heard]], None]


class Listener(threading.Thread):
    """Owns the subscriber, which may be given. `tell` is called from this thread; `room` says whether more may be heard.

    Where there is no room the thread reads nothing, and `receive_queue` batches of each engine wait in its connection. Engines
    notice nothing either: what finds no room in ZeroMQ's queues is dropped there, and asked for by replay afterwards.
    """

    def __init__(
        self,
        bridge: str,
        tell: Tell,
        room: Callable[[], bool],
        subscriber: Subscriber[RawBatch] | None = None,
        *,
        receive_queue: int = RECEIVE_QUEUE,
    ) -> None:
        super().__init__(name="kvevents-bridge", daemon=True)
        self.failure: BaseException | None = None
        self._bridge: Final = bridge
        self._tell: Final = tell
        self._room: Final = room
        self._subscriber: Final[Subscriber[RawBatch]] = subscriber or Subscriber(
            decode=False, transport=ZmqTransport(options=SocketOptions(receive_hwm=receive_queue))
        )
        self._orders: deque[Callable[[], None]] = deque()
        self._turns: dict[Key, int] = {}
        self._incarnations: dict[Key, _Incarnations] = {}
        self._asked_again: dict[Key, int] = {}
        """Streams whose sender was asked for all that it holds, and how often in a row."""
        self._refused: list[Heard] = []
        self._stopping = False
        self._look_at = 0.0

    # --- from any thread

    def follow(self, source: Source, start: Start, turn: int) -> None:
        """Follow a stream from where the log stands."""
        self._orders.append(lambda: self._follow(source, start, turn))

    def leave(self, key: Key) -> None:
        """Follow it no more."""
        self._orders.append(lambda: self._leave(key))

    def stop(self, seconds: float = 5.0) -> bool:
        """End the thread; False when it has not ended in time."""
        self._stopping = True
        if self.ident is None:
            self._subscriber.close()  # it was never started
        elif self.is_alive():
            self.join(seconds)
        return not self.is_alive()

    # --- the thread

    def run(self) -> None:
        """Listen until `stop`."""
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            log.exception("the thread that follows the engines has failed; nothing more is written of them")
            self.failure = error
        finally:
            self._subscriber.close()

    def _turn(self) -> None:
        while self._orders:
            self._orders.popleft()()
        if not self._room():
            time.sleep(PAUSE_SECONDS)
            return
        deliveries = self._subscriber.receive_many(timeout=TURN_SECONDS)
        heard, self._refused = self._refused, []
        if deliveries:
            heard += self._hear(deliveries)
        now = time.monotonic()
        # Together with deliveries, since trust may be less because of them: readers are EXACT until they hear of it.
        if deliveries or now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            heard += self._trust()
        if heard:
            self._tell(heard)

    def _hear(self, deliveries: Sequence[RawDelivery]) -> list[Heard]:
        for delivery in deliveries:
            if isinstance(delivery, RawBatch) and (report := findings_in(delivery.payload)) is not None:
                self._subscriber.report(delivery, self._with_doubts(delivery, report))
        records = [_record(delivery, self._incarnations[delivery.source, delivery.rank]) for delivery in deliveries]
        return [Heard(record, self._turns[record.key]) for record in records]

    def _with_doubts(self, batch: RawBatch, report: BatchReport) -> BatchReport:
        """Have a stream that is doubted start over where its sender can send all that it holds, as one with heartbeats does.

        Whether it holds what was delivered, which would end the doubts as well, only a replica can say.
        """
        if report.heartbeat is None or report.cleared or batch.replayed:
            return report
        key = (batch.source, batch.rank)
        doubts = self._subscriber.checkpoint(*key).degraded_reasons
        asked = self._asked_again.get(key, 0)
        if any(doubt.name in doubts and doubts[doubt.name] < batch.seq for doubt in REASONS_ENDED_BY_CLEAR):
            if asked == MAX_ASKED_AGAIN:
                return report
            self._asked_again[key] = asked + 1
            return replace(report, digest_matches=False)
        if asked:
            del self._asked_again[key]
            return replace(report, digest_matches=True)
        return report

    def _trust(self) -> list[Heard]:
        found: list[Heard] = []
        for key, trust in self._subscriber.trust_changes():
            status = self._subscriber.status(*key)
            doubts = {doubt.name: status.last_seq for doubt in status.degraded_reasons} | self._subscriber.checkpoint(
                *key
            ).degraded_reasons
            said = Trusting(*key, self._bridge, trust.name, trust.reason[:MAX_REASON], doubts)
            found.append(Heard(said, self._turns[key]))
        return found

    # --- orders

    def _follow(self, source: Source, start: Start, turn: int) -> None:
        key = (source.label, source.rank)
        if key in self._turns:
            self._leave(key)
        self._turns[key] = turn
        try:
            self._subscriber.add(source, start.resume)
            first = self._subscriber.status(*key).incarnation
            self._incarnations[key] = _Incarnations(first, start.added if start.resume is None else first + start.added)
        except KVEventsError as error:
            # One engine that cannot be followed is no reason to follow none.
            log.error("%s rank %d cannot be followed: %s", *key, error)  # noqa: TRY400 - no fault of ours
            said = Trusting(*key, self._bridge, Trust.CONNECTING.name, str(error)[:MAX_REASON], {})
            self._refused.append(Heard(said, turn))

    def _leave(self, key: Key) -> None:
        if self._turns.pop(key, None) is None:
            return
        with suppress(UnknownSourceError):  # it could not be followed
            self._subscriber.remove(*key)
        self._incarnations.pop(key, None)
        self._asked_again.pop(key, None)


def findings_in(payload: bytes) -> BatchReport | None:
    """What a stream has to know of a batch: whether everything was cleared, and what its sender says of itself.

    Nearly all batches have neither. Their bytes show that without being decoded, as text is written plainly in MessagePack.
    """
    if _CLEARED not in payload and _HEARTBEAT not in payload:
        return None
    return inspect_events(decode_batch(payload).batch.events)


def size_of(record: StreamRecord) -> int:
    """What a record counts in what is queued, about."""
    return RECORD_BYTES + len(getattr(record, "payload", b""))


class _Incarnations:
    """Numbers the incarnations of one stream one after the other, as the log does; those of a subscriber have holes."""

    __slots__ = ("_here", "_in_log")

    def __init__(self, here: int, in_log: int) -> None:
        self._here = here
        self._in_log = in_log

    def in_log(self, here: int) -> int:
        """The number in the log of the newest incarnation, or the one after it, by the subscriber's number."""
        if here != self._here:
            self._here = here
            self._in_log += 1
        return self._in_log


def _record(delivery: RawDelivery, incarnations: _Incarnations) -> StreamRecord:
    key = (delivery.source, delivery.rank)
    life = incarnations.in_log(delivery.incarnation)
    if isinstance(delivery, RawBatch):
        return Batched(*key, life, delivery.seq, delivery.replayed, delivery.payload)
    if isinstance(delivery, Gap):
        return Lost(*key, life, delivery.first, delivery.last, delivery.compacted)
    return Renewed(*key, life, delivery.reason[:MAX_REASON])
