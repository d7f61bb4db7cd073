"""The interface of publishers, and the hooks by which the process shuts them down at exit and disables them after a fork."""

from __future__ import annotations

import atexit
import os
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import zmq.utils.garbage  # noqa: F401 - its exit hook cancels zero-copy sends; importing it first makes our hook run before it

from kvevents.publisher.stats import PublisherStats


class EventPublisher(ABC):
    """Publishes the batches of one data-parallel rank, in order.

    Each rank runs its own publisher, which writes its rank into batches that carry none.
    """

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank

    @abstractmethod
    def publish(self, events: Any) -> None:
        """Accept one batch (`kvevents.events.EventBatch` or an engine's) and give it the next number. Does not block."""

    @abstractmethod
    def shutdown(self) -> Any:
        """Send what can be sent in bounded time, then stop."""

    def get_publisher_config(self) -> Any:
        """Return the settings in force, with resolved endpoints; None for a publisher without settings.

        vLLM 0.31 and later calls this when the engine starts (`vllm/v1/core/sched/scheduler.py`).
        """
        return None

    def stats(self) -> PublisherStats:
        """Return counters since the start; all are zero for a publisher that counts nothing."""
        return PublisherStats()

    def _after_fork(self) -> None:  # noqa: B027 - most publishers have no threads
        """Stop using the threads and locks of the parent; called in a forked child for registered publishers."""


class NullEventPublisher(EventPublisher):
    """Accepts every batch and sends nothing."""

    def publish(self, events: Any) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


_registered: WeakSet[EventPublisher] = WeakSet()


def register(publisher: EventPublisher) -> None:
    """Shut `publisher` down at interpreter exit and disable it in forked children, until `unregister` or its deletion."""
    _registered.add(publisher)


def unregister(publisher: EventPublisher) -> None:
    """Undo `register`."""
    _registered.discard(publisher)


def _shut_down_all() -> None:
    with ExitStack() as stack:  # shuts down every publisher even if one raises, as after Ctrl-C
        for publisher in list(_registered):
            stack.callback(publisher.shutdown)


def _disable_all() -> None:
    for publisher in list(_registered):
        publisher._after_fork()  # noqa: SLF001 - the hook of this module


atexit.register(_shut_down_all)
os.register_at_fork(after_in_child=_disable_all)
