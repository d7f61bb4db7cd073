"""Events of several workers, reduced to what all of them announced.

The surface and behaviour of vLLM 0.33 (`vllm/distributed/kv_events.py`): tensor-parallel workers each report what their
connector stored, and a block counts as stored when every worker has it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Self

from kvevents.events import KVCacheEvent


class KVEventAggregator:
    """Counts how often each event was announced. Events must be hashable, as those of `kvevents.events` are.

    Raises ValueError when `num_workers` is not positive.
    """

    __slots__ = ("_event_counter", "_num_workers")

    def __init__(self, num_workers: int) -> None:
        if num_workers <= 0:
            raise ValueError("num_workers must be greater than zero.")
        self._event_counter: Counter[KVCacheEvent] = Counter()
        self._num_workers = num_workers

    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Count what one worker announced. Raises TypeError for anything but a list."""
        if not isinstance(events, list):
            raise TypeError("events must be a list of KVCacheEvent.")
        self._event_counter.update(events)

    def get_common_events(self) -> list[KVCacheEvent]:
        """Events announced exactly as often as there are workers, in the order they first came."""
        return [event for event, count in self._event_counter.items() if count == self._num_workers]

    def get_all_events(self) -> list[KVCacheEvent]:
        """Every event, as often as it was announced."""
        return list(self._event_counter.elements())

    def clear_events(self) -> None:
        """Forget all events; the number of workers stays."""
        self._event_counter.clear()

    def increment_workers(self, count: int = 1) -> None:
        """Expect `count` more workers. Raises ValueError when it is not positive."""
        if count <= 0:
            raise ValueError("count must be positive.")
        self._num_workers += count

    def reset_workers(self) -> None:
        """Expect one worker."""
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        """How many workers are expected."""
        return self._num_workers

    def __repr__(self) -> str:
        return f"<KVEventAggregator workers={self._num_workers}, events={len(self._event_counter)}>"


class KVConnectorKVEvents(ABC):
    """What a KV connector of vLLM collects in; connectors implement it, usually around a `KVEventAggregator`."""

    @abstractmethod
    def add_events(self, events: list[Any]) -> None:
        """Add what one worker announced."""

    @abstractmethod
    def aggregate(self) -> KVConnectorKVEvents:
        """Reduce to what all workers announced."""

    @abstractmethod
    def increment_workers(self, count: int = 1) -> None:
        """Expect `count` more workers."""

    @abstractmethod
    def get_all_events(self) -> list[Any]:
        """Every event, as often as it was announced."""

    @abstractmethod
    def get_number_of_workers(self) -> int:
        """How many workers are expected."""

    @abstractmethod
    def clear_events(self) -> None:
        """Forget all events."""

    def merge(self, other: KVConnectorKVEvents) -> Self:
        """Add the events of `other`; returns itself."""
        self.add_events(other.get_all_events())
        return self
