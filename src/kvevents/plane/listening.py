"""The bridge's ear: a thread that follows engines and turns what they say into records of the log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from kvevents.errors import KVEventsError, UnknownSourceError
from kvevents.index import PrefixIndex
from kvevents.plane.ledger import Start
from kvevents.plane.records import Batched, Key, Lost, Renewed, StreamRecord, Trusting
from kvevents.plane.writing import RECORD_BYTES
from kvevents.stream import Gap, RawBatch, Reset, Source, Trust
from kvevents.stream.deliveries import RawDelivery
from kvevents.subscriber import StreamStatus, Subscriber

log = logging.getLogger(__name__)

TURN_SECONDS: Final = 0.02
"""How long a turn waits for the network: orders and trust are at most so old."""
LOOK_SECONDS: Final = 0.1
"""Between two looks at the trust of every stream."""
SWITCH_SECONDS: Final = 0.0005
"""How long this thread may keep Python to itself when the one that writes waits: a page needs it several times, and by default
it would wait 5 ms each time."""
PAUSE_SECONDS: Final = 0.02
"""Between two looks whether there is room again, while there is none."""
MAX_REASON: Final = 500
"""Characters of a reason; an engine may give one of any length."""


class Heard(NamedTuple):
    """What came of one stream."""

    record: StreamRecord
    turn: int
    """How often its stream was followed anew before: what is of an earlier time is void."""


Tell = Callable[[list[Heard]], None]


class Listener(threading.Thread):
    """Owns the subscriber. `tell` is called from this thread; `room` says whether more may be heard.

    Where there is no room the thread reads nothing. Its engines notice nothing either: what finds no room in ZeroMQ's queues is
    dropped there, and asked for by replay afterwards.
    """

    def __init__(self, bridge: str, tell: Tell, room: Callable[[], bool]) -> None:
        super().__init__(name="kvevents-bridge", daemon=True)
        self.failure: BaseException | None = None
        self.diverged = 0
        """Batches after which an engine held something else than what it had told."""
        self._bridge: Final = bridge
        self._tell: Final = tell
        self._room: Final = room
        self._subscriber: Final[Subscriber[RawBatch]] = Subscriber(decode=False)
        self._index: Final = PrefixIndex()
        """What the engines have said, to know whether it is what they hold."""
        self._orders: deque[Callable[[], None]] = deque()
        self._turns: dict[Key, int] = {}
        self._added: dict[Key, int] = {}
        self._whole: set[Key] = set()
        """Streams that the index knows from the beginning of their life on."""
        self._told: dict[Key, tuple[str, str]] = {}
        self._refused: list[Heard] = []
        self._statuses: list[StreamStatus] = []
        self._stopping = False
        self._look_at = 0.0

    # --- from any thread

    def follow(self, source: Source, start: Start, turn: int) -> None:
        """Follow a stream from where the log stands."""
        self._orders.append(lambda: self._follow(source, start, turn))

    def leave(self, key: Key) -> None:
        """Follow it no more."""
        self._orders.append(lambda: self._leave(key))

    def statuses(self) -> list[StreamStatus]:
        """Of every stream, as of the last look."""
        return self._statuses

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
        sys.setswitchinterval(SWITCH_SECONDS)
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
        if now >= self._look_at or any(not isinstance(delivery, RawBatch) for delivery in deliveries):
            self._look_at = now + LOOK_SECONDS
            heard += self._trust()
        if heard:
            self._tell(heard)

    def _hear(self, deliveries: Sequence[RawDelivery]) -> list[Heard]:
        for delivery, applied in zip(deliveries, self._index.apply_many(deliveries), strict=True):
            key = (delivery.source, delivery.rank)
            if isinstance(delivery, Reset):
                self._whole.add(key)
            findings = applied.findings
            if findings is not None:
                if findings.agrees is not None and key not in self._whole:
                    findings = replace(findings, agrees=None)
                self.diverged += findings.agrees is False
                self._subscriber.report(delivery, findings)
        return [Heard(_record(delivery, self._added), self._turns[delivery.source, delivery.rank]) for delivery in deliveries]

    def _trust(self) -> list[Heard]:
        found: list[Heard] = []
        self._statuses = self._subscriber.statuses()
        for status in self._statuses:
            key, trust = (status.source, status.rank), status.trust
            if self._told.get(key) == (trust.name, trust.reason):
                continue
            self._told[key] = (trust.name, trust.reason)
            doubts = self._subscriber.checkpoint(*key).doubts
            said = Trusting(*key, self._bridge, trust.name, trust.reason[:MAX_REASON], doubts)
            found.append(Heard(said, self._turns[key]))
        return found

    # --- orders

    def _follow(self, source: Source, start: Start, turn: int) -> None:
        key = (source.label, source.rank)
        if key in self._turns:
            self._leave(key)
        self._index.admit(key)
        self._turns[key], self._added[key] = turn, start.added
        if start.resume is None:
            self._whole.add(key)
        try:
            self._subscriber.add(source, start.resume)
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
        self._index.remove_worker(key)
        self._whole.discard(key)
        self._added.pop(key, None)
        self._told.pop(key, None)


def size_of(record: StreamRecord) -> int:
    """What a record counts in what is queued, about."""
    return RECORD_BYTES + len(getattr(record, "payload", b""))


def _record(delivery: RawDelivery, added: dict[Key, int]) -> StreamRecord:
    key = (delivery.source, delivery.rank)
    life = delivery.incarnation + added[key]
    if isinstance(delivery, RawBatch):
        return Batched(*key, life, delivery.seq, delivery.replayed, delivery.payload)
    if isinstance(delivery, Gap):
        return Lost(*key, life, delivery.first, delivery.last, delivery.compacted)
    return Renewed(*key, life, delivery.reason[:MAX_REASON])
