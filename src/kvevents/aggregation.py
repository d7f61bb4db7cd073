"""Reduces the events of several workers to those that all of them announced.

The interface and behaviour are those of vLLM 0.33 (`vllm/distributed/kv_events.py`): each tensor-parallel worker reports what
its connector stored, and a block counts as stored when every worker has it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Self

from kvevents.events import KVCacheEvent


class KVEventAggregator:
    """Counts how often each event was announced. Events must be hashable, as those of `kvevents.events` are.

    Raises ValueError if `num_workers` is not positive.
    """

    __slots__ = ("_event_counter", "_num_workers")

    def __init__(self, num_workers: int) -> None:
        if num_workers <= 0:
            raise ValueError("num_workers must be greater than zero.")
        self._event_counter: Counter[KVCacheEvent] = Counter()
        self._num_workers = num_workers

    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Count the events of one worker. Raises TypeError unless they are a list."""
        if not isinstance(events, list):
            raise TypeError("events must be a list of KVCacheEvent.")
        self._event_counter.update(events)

    def get_common_events(self) -> list[KVCacheEvent]:
        """Return the events announced exactly as often as there are workers, in the order of their first announcement."""
        return [event for event, count in self._event_counter.items() if count == self._num_workers]

    def get_all_events(self) -> list[KVCacheEvent]:
        """Return every event, as often as it was announced."""
        return list(self._event_counter.elements())

    def clear_events(self) -> None:
        """Drop all events; the number of workers does not change."""
        self._event_counter.clear()

    def increment_workers(self, count: int = 1) -> None:
        """Expect `count` more workers. Raises ValueError if it is not positive."""
        if count <= 0:
            raise ValueError("count must be positive.")
        self._num_workers += count

    def reset_workers(self) -> None:
        """Expect one worker."""
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        """Return the number of expected workers."""
        return self._num_workers

    def __repr__(self) -> str:
        return f"<KVEventAggregator workers={self._num_workers}, events={len(self._event_counter)}>"


class KVConnectorKVEvents(ABC):
    """Collects the events of a vLLM KV connector. Connectors implement it, usually with a `KVEventAggregator`."""

    @abstractmethod
    def add_events(self, events: list[Any]) -> None:
        """Add the events of one worker."""

    @abstractmethod
    def aggregate(self) -> KVConnectorKVEvents:
        """Keep only the events that all workers announced."""

    @abstractmethod
    def increment_workers(self, count: int = 1) -> None:
        """Expect `count` more workers."""

    @abstractmethod
    def get_all_events(self) -> list[Any]:
        """Return every event, as often as it was announced."""

    @abstractmethod
    def get_number_of_workers(self) -> int:
        """Return the number of expected workers."""

    @abstractmethod
    def clear_events(self) -> None:
        """Drop all events."""

    def merge(self, other: KVConnectorKVEvents) -> Self:
        """Add the events of `other`; return self."""
        self.add_events(other.get_all_events())
        return self
