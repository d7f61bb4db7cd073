"""The consumer of a live fleet: a subscriber, the index it fills, and the audit, in a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvevents.errors import ExternalError
from kvevents.index import Applied, PrefixIndex
from kvevents.routing import Worker
from kvevents.sim.audit import Audit
from kvevents.stream import Batch, DegradedReason, Gap, RawBatch, Reset, Source
from kvevents.subscriber import StreamStatus, Subscriber

PAUSE: Final = 0.02
"""Seconds without a delivery after which waiting lookups are looked at, and the trust of streams."""
AT_ONCE: Final = 256
"""Deliveries between two looks."""
STOP_SECONDS: Final = 10.0
"""That the thread has to end."""


class Follower:
    """Fills an index, and audits on the way. `life` says in which life of its engine a batch with some timestamp was made."""

    def __init__(self, index: PrefixIndex, life: Callable[[Worker, float], int]) -> None:
        self.audit: Final = Audit(index, self.exact)
        self.trust: dict[Worker, str] = {}
        """Names of the states of all streams, as of a moment ago; replaced, never changed."""
        self._life_of: Final = life
        self._lives: Final[dict[tuple[Worker, int], int]] = {}
        self._subscriber: Subscriber[RawBatch] | None = None
        self._statuses: list[StreamStatus] = []
        self._failure: BaseException | None = None
        self._stop: Final = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, sources: Iterable[Source]) -> None:
        """Begin; once only. Raises `ConfigError` and `EndpointError` as a subscriber does."""
        subscriber = self._subscriber = Subscriber(sources, decode=False, sink=self)
        self._look(subscriber)
        self._thread = threading.Thread(target=self._run, args=(subscriber,), name="kvevents-follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; what has not arrived will not be looked at. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive() and self._failure is None:
                self._failure = ExternalError(f"the fleet's own subscriber did not end within {STOP_SECONDS:g} s")

    def exact(self, worker: Worker) -> bool:
        """Whether all that came before the last delivery was delivered. For the audit, in the thread.

        An EXACT stream is that and up to date. Here it may be behind, as while a hole is being filled, and its replay endpoint,
        which is the fleet's own, need not be proven by a live batch. It must have no other doubts.
        """
        return self._subscriber is not None and self._subscriber.status(*worker).degraded_reasons <= {
            DegradedReason.REPLAY_UNPROVEN
        }

    def statuses(self) -> list[StreamStatus]:
        """Of every stream, as of a moment ago."""
        return self._statuses

    def check(self) -> None:
        """Raises what ended the thread before its time."""
        if self._failure is not None:
            raise self._failure

    # --- the thread

    def _run(self, subscriber: Subscriber[RawBatch]) -> None:
        try:
            with subscriber:
                while not self._stop.is_set():
                    # One by one, since the audit of the next one asks whether the stream is exact.
                    timeout = PAUSE
                    for _ in range(AT_ONCE):
                        if subscriber.receive(timeout) is None:
                            break
                        timeout = 0.0
                    self._look(subscriber)
        except BaseException as error:  # noqa: BLE001 - told to whoever runs the fleet, by `check`
            self._failure = error

    def apply_many(self, deliveries: Sequence[Batch | RawBatch | Reset | Gap]) -> list[Applied]:
        """Audit deliveries, and bring them into the index: for the subscriber, whose sink this is."""
        return [self.audit.apply(each, self._life(each) if isinstance(each, RawBatch) else None) for each in deliveries]

    def _life(self, batch: RawBatch) -> int:
        worker = (batch.source, batch.rank)
        life = self._lives.get((worker, batch.incarnation))
        if life is None:
            life = self._lives[worker, batch.incarnation] = self._life_of(worker, batch.decode().ts)
        return life

    def _look(self, subscriber: Subscriber[RawBatch]) -> None:
        self._statuses = subscriber.statuses()
        self.trust = {(status.source, status.rank): status.trust.name for status in self._statuses}
        for worker in self.trust:
            self.audit.settle(worker)
