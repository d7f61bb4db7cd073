"""Where the engines' events go."""

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


class Outlet(Protocol):
    """Publishes batches of all workers of a fleet."""

    def open(self, worker: Worker) -> None:
        """A worker begins to live."""

    def publish(self, worker: Worker, batch: KVEventBatch) -> None:
        """Send what a step announced. Batches of one worker are numbered from 0 in each of its lives."""

    def close(self, worker: Worker) -> None:
        """It is gone, and forgets what it sent."""


class Postbox:
    """Events as bytes, which arrive after a while of virtual time; nothing is ever lost."""

    def __init__(
        self, timeline: Timeline, delay: float, dialect: Dialect, deliver: Callable[[RawBatch | Reset, int], object]
    ) -> None:
        self._timeline: Final = timeline
        self._delay: Final = delay
        # As declared, events are the newest vLLM's bytes, since the caches here set no field beyond those.
        self._encode: Final = _AS_DECLARED.encode if dialect is NEWEST_VLLM else batch_encoder(dialect)
        self._deliver: Final = deliver
        self._lives: Final[dict[Worker, int]] = {}
        self._sent: Final[dict[Worker, int]] = {}

    def open(self, worker: Worker) -> None:
        """A worker begins to live; from the second time on with a reset."""
        life = self._lives[worker] = self._lives.get(worker, -1) + 1
        self._sent[worker] = 0
        if life:
            self._post(Reset(*worker, life, "the engine was restarted"), life)

    def publish(self, worker: Worker, batch: KVEventBatch) -> None:
        """Encode a batch and send it."""
        life, number = self._lives[worker], self._sent[worker]
        self._sent[worker] = number + 1
        self._post(RawBatch(*worker, life, number, False, self._encode(batch)), life)

    def close(self, worker: Worker) -> None:
        """What was sent before still arrives."""

    def _post(self, delivery: RawBatch | Reset, life: int) -> None:
        self._timeline.after(self._delay, partial(self._deliver, delivery, life))
