"""A consumer of a relay, and the state of an engine behind it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvevents.events import EventBatch, KVEvent
from kvevents.index import PrefixIndex
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import Batch, Source
from kvevents.subscriber import Subscriber


class Listener:
    """A consumer with an index."""

    def __init__(self, source: Source) -> None:
        self.index = PrefixIndex()
        self.agreements: list[bool] = []
        self.subscriber = Subscriber(replace(source, name="it"), decode=False)

    def take(self) -> None:
        for delivery in self.subscriber.receive_many(timeout=0):
            report = self.index.apply(delivery).report
            self.subscriber.report(delivery, report)
            if report is not None and report.digest_matches is not None:
                self.agreements.append(report.digest_matches)

    @property
    def digest(self) -> str:
        return self.index.digest("it") if self.index.workers() else ""

    def is_exact(self, digest: str) -> bool:
        return self.subscriber.trust().name == "EXACT" and self.digest == digest


class Truth:
    """The state of an engine, computed from what it has published."""

    def __init__(self, publisher: ZmqEventPublisher) -> None:
        self._publisher = publisher
        self._index = PrefixIndex()
        self._seq = 0

    def publish_events(self, *events: KVEvent) -> None:
        self._publisher.publish(EventBatch(float(self._seq), list(events)))
        self._apply(events)

    def _apply(self, events: Sequence[KVEvent]) -> None:
        self._index.apply(Batch("it", 0, 0, self._seq, 0.0, list(events), False))
        self._seq += 1

    @property
    def digest(self) -> str:
        return self._index.digest("it")
