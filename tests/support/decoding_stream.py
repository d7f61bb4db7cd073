"""A stream together with an application that decodes its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvevents.stream import RawBatch, Stream, inspect_events


def trust_replay(stream: Stream) -> None:
    """Make a stream behave as if a live batch before all others had been compared with replay."""
    stream._deliverer.cross_check.first_live_seq = 0
    stream._deliverer.cross_check.confirm(0)


class DecodingStream(Stream):
    """Decodes each batch as soon as it is delivered, and reports what that shows. It delivers `Batch`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._read: list[Any] = []
        super().__init__(*arguments, **named)

    def receive_live(self, frames: Sequence[bytes], now: float) -> None:
        super().receive_live(frames, now)
        self._decode()

    def receive_run(self, payloads: Sequence[bytes], now: float) -> None:
        super().receive_run(payloads, now)
        self._decode()

    def receive_replay(self, frames: Sequence[bytes], now: float) -> None:
        super().receive_replay(frames, now)
        self._decode()

    def begin_connection(self, now: float) -> None:
        super().begin_connection(now)
        self._decode()

    def end_connection(self) -> None:
        super().end_connection()
        self._decode()

    def tick(self, now: float) -> None:
        super().tick(now)
        self._decode()

    def _decode(self) -> None:
        delivered, self._deliverer.deliveries = self._deliverer.deliveries, []
        for delivery in delivered:
            if isinstance(delivery, RawBatch):
                batch = delivery.decode()
                self._read.append(batch)
                report = inspect_events(batch.events, batch.rejected)
                if report is not None:
                    self.report(delivery, report)
            else:
                self._read.append(delivery)

    def deliveries(self) -> list[Any]:
        self._deliverer.deliveries = super().deliveries()
        self._decode()
        taken, self._read = self._read, []
        return taken
