"""The requests that were sent to workers and have not finished, and the load that they are."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from kvevents.routing.policy_types import IDLE, Load, Worker

MAX_IN_FLIGHT: Final = 65_536
"""Default limit of remembered requests, about 250 bytes each. It is four times as many as 64 workers with 256 requests each."""


class _WorkerLoad:
    """The load of a worker. Requests of a removed worker keep its object, and a new worker of the same name gets another."""

    __slots__ = ("load",)

    def __init__(self) -> None:
        self.load = IDLE


class _Request:
    __slots__ = ("is_decoding", "length", "waiting", "worker")

    def __init__(self, worker: _WorkerLoad, length: int, waiting: int) -> None:
        self.worker, self.length, self.waiting = worker, length, waiting
        self.is_decoding = False


class InFlightRequests:
    """Requests in flight by key, and the load of each worker. Not thread-safe.

    Above `max_in_flight` requests the oldest ones count as finished.
    """

    def __init__(self, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self._max_in_flight = max_in_flight
        self._workers: dict[Worker, _WorkerLoad] = {}
        self._requests: dict[Hashable, _Request] = {}
        self.evicted = 0
        """Requests that counted as finished because too many were in flight."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers, in the order in which they were added."""
        return tuple(self._workers)

    def add_worker(self, worker: Worker) -> None:
        """Add a worker; nothing if it exists."""
        self._workers.setdefault(worker, _WorkerLoad())

    def remove_worker(self, worker: Worker) -> None:
        """Remove a worker with its load; nothing if it does not exist."""
        self._workers.pop(worker, None)

    def loads(self) -> list[tuple[Worker, Load]]:
        """Return the load of every worker."""
        return [(worker, each.load) for worker, each in self._workers.items()]

    def load(self, worker: Worker) -> Load | None:
        """Return the load of a worker; None if it does not exist."""
        found = self._workers.get(worker)
        return found.load if found else None

    def add(self, key: Hashable, worker: Worker, length: int, waiting: int) -> None:
        """Add a request of `length` prompt tokens, of which the worker must compute `waiting`. Replaces an equal key."""
        self.finish(key)
        found = self._workers[worker]
        load = found.load
        found.load = Load(load.requests + 1, load.waiting_tokens + waiting, load.decoding, load.decoding_tokens)
        self._requests[key] = _Request(found, length, waiting)
        if len(self._requests) > self._max_in_flight:
            self.evicted += 1
            self.finish(next(iter(self._requests)))

    def record_first_token(self, key: Hashable) -> None:
        """Record that the prompt is computed; nothing for an unknown key, or if it was recorded before."""
        request = self._requests.get(key)
        if request is None or request.is_decoding:
            return
        request.is_decoding = True
        load = request.worker.load
        request.worker.load = Load(
            load.requests, load.waiting_tokens - request.waiting, load.decoding + 1, load.decoding_tokens + request.length
        )

    def finish(self, key: Hashable) -> None:
        """Remove a request that was answered, failed or was cancelled; nothing for an unknown key."""
        self.record_first_token(key)
        request = self._requests.pop(key, None)
        if request is None:
            return
        load = request.worker.load
        request.worker.load = Load(
            load.requests - 1, load.waiting_tokens, load.decoding - 1, load.decoding_tokens - request.length
        )
