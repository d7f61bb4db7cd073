"""The face of every publisher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from kvevents.publisher.stats import PublisherStats


class EventPublisher(ABC):
    """Publishes the batches of one data-parallel rank, in order.

    Each rank runs a publisher of its own, which writes its rank into batches that carry none.
    """

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank

    @abstractmethod
    def publish(self, events: Any) -> None:
        """Accept one batch (`kvevents.events.EventBatch` or an engine's) and give it the next number. Does not block."""

    @abstractmethod
    def shutdown(self) -> Any:
        """Stop, after sending what can be sent in bounded time."""

    def get_publisher_config(self) -> Any:
        """The settings in force, with endpoints as they were resolved; None without settings.

        vLLM 0.31 and later asks for them when the engine starts (`vllm/v1/core/sched/scheduler.py`).
        """
        return None

    def stats(self) -> PublisherStats:
        """Counters since the start; all zero for publishers that count nothing."""
        return PublisherStats()
