"""The consumer of a live fleet: a subscriber with its index and the audit, in their own thread."""

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
"""Seconds without a delivery after which waiting lookups and the trust of streams are checked."""
AT_ONCE: Final = 256
"""Most deliveries between two checks."""
STOP_SECONDS: Final = 10.0
"""Time for the thread to end."""


class Follower:
    """Applies deliveries to an index and audits them.

    `incarnation` returns the incarnation of a worker in which a batch with some timestamp was published.
    """

    def __init__(self, index: PrefixIndex, incarnation: Callable[[Worker, float], int]) -> None:
        self.audit: Final = Audit(index, self.exact)
        self.trust: dict[Worker, str] = {}
        """Trust state of each stream at the last check. The dict is replaced, never changed."""
        self._incarnation_of: Final = incarnation
        self._incarnations: Final[dict[tuple[Worker, int], int]] = {}
        self._subscriber: Subscriber[RawBatch] | None = None
        self._statuses: list[StreamStatus] = []
        self._failure: BaseException | None = None
        self._stop: Final = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, sources: Iterable[Source]) -> None:
        """Start to follow; call it once. Raises `ConfigError` and `EndpointError` as a subscriber does."""
        subscriber = self._subscriber = Subscriber(sources, decode=False, sink=self)
        self._look(subscriber)
        self._thread = threading.Thread(target=self._run, args=(subscriber,), name="kvevents-follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; deliveries that have not arrived are not audited. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive() and self._failure is None:
                self._failure = ExternalError(f"the fleet's subscriber did not stop within {STOP_SECONDS:g} s")

    def exact(self, worker: Worker) -> bool:
        """Return whether everything before the last delivery was delivered. The audit calls it in this thread.

        An EXACT stream is also up to date. Here it can be behind, for example while a gap is filled, and its replay endpoint
        need not be verified by a live batch, since it belongs to the fleet. It must have no other degraded reason.
        """
        return self._subscriber is not None and self._subscriber.status(*worker).degraded_reasons <= {
            DegradedReason.REPLAY_UNPROVEN
        }

    def statuses(self) -> list[StreamStatus]:
        """Return the status of every stream at the last check."""
        return self._statuses

    def check(self) -> None:
        """Raise the exception that ended the thread early, if any."""
        if self._failure is not None:
            raise self._failure

    # --- the thread

    def _run(self, subscriber: Subscriber[RawBatch]) -> None:
        try:
            with subscriber:
                while not self._stop.is_set():
                    # One by one, since the audit of the next one depends on whether the stream is exact.
                    timeout = PAUSE
                    for _ in range(AT_ONCE):
                        if subscriber.receive(timeout) is None:
                            break
                        timeout = 0.0
                    self._look(subscriber)
        except BaseException as error:  # noqa: BLE001 - raised by `check` in the thread that runs the fleet
            self._failure = error

    def apply_many(self, deliveries: Sequence[Batch | RawBatch | Reset | Gap]) -> list[Applied]:
        """Audit deliveries and apply them to the index. The subscriber calls this sink."""
        return [self.audit.apply(each, self._incarnation(each) if isinstance(each, RawBatch) else None) for each in deliveries]

    def _incarnation(self, batch: RawBatch) -> int:
        worker = (batch.source, batch.rank)
        incarnation = self._incarnations.get((worker, batch.incarnation))
        if incarnation is None:
            incarnation = self._incarnations[worker, batch.incarnation] = self._incarnation_of(worker, batch.decode().ts)
        return incarnation

    def _look(self, subscriber: Subscriber[RawBatch]) -> None:
        self._statuses = subscriber.statuses()
        self.trust = {(status.source, status.rank): status.trust.name for status in self._statuses}
        for worker in self.trust:
            self.audit.settle(worker)
