"""Where a fleet publishes the events of its engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import msgspec

from kvevents.events import KVEventBatch
from kvevents.routing import Worker
from kvevents.sim.timeline import Timeline
from kvevents.stream import RawBatch, Reset
from kvevents.wire import Dialect
from kvevents.wire.dialects import NEWEST_VLLM
from kvevents.wire.encode import batch_encoder

_AS_DECLARED: Final = msgspec.msgpack.Encoder()


class EventSink(Protocol):
    """Publishes the batches of all workers of a fleet."""

    def open(self, worker: Worker) -> None:
        """Begin an incarnation of a worker."""

    def publish(self, worker: Worker, batch: KVEventBatch) -> None:
        """Publish the events of a step. Batches are numbered from 0 in each incarnation of a worker."""

    def close(self, worker: Worker) -> None:
        """End an incarnation of a worker; its replay buffer is lost."""


class DelayedDelivery:
    """Delivers encoded batches after `delay` seconds of virtual time, and loses none."""

    def __init__(
        self, timeline: Timeline, delay: float, dialect: Dialect, deliver: Callable[[RawBatch | Reset, int], object]
    ) -> None:
        self._timeline: Final = timeline
        self._delay: Final = delay
        # The plain encoding of events equals that of the newest vLLM, since the caches here set no other fields.
        self._encode: Final = _AS_DECLARED.encode if dialect is NEWEST_VLLM else batch_encoder(dialect)
        self._deliver: Final = deliver
        self._incarnations: Final[dict[Worker, int]] = {}
        self._sent: Final[dict[Worker, int]] = {}

    def open(self, worker: Worker) -> None:
        """Begin an incarnation; from the second one on deliver a reset."""
        incarnation = self._incarnations[worker] = self._incarnations.get(worker, -1) + 1
        self._sent[worker] = 0
        if incarnation:
            self._deliver_later(Reset(*worker, incarnation, "the engine was restarted"), incarnation)

    def publish(self, worker: Worker, batch: KVEventBatch) -> None:
        """Encode a batch and plan its delivery."""
        incarnation, number = self._incarnations[worker], self._sent[worker]
        self._sent[worker] = number + 1
        self._deliver_later(RawBatch(*worker, incarnation, number, False, self._encode(batch)), incarnation)

    def close(self, worker: Worker) -> None:
        """Do nothing: batches published before still arrive."""

    def _deliver_later(self, delivery: RawBatch | Reset, incarnation: int) -> None:
        self._timeline.after(self._delay, partial(self._deliver, delivery, incarnation))
