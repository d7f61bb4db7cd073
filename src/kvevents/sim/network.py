"""The network of a live fleet: a publisher for each worker, and proxies."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from contextlib import ExitStack
from typing import Final, NamedTuple, Self

import zmq

from kvevents.endpoints import MAX_PORT
from kvevents.errors import ConfigError, EndpointError
from kvevents.events import KVEventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.routing import Worker
from kvevents.sim.settings import FleetSettings
from kvevents.stream import Source
from kvevents.testing import FaultProxy
from kvevents.zeromq.sockets import destroy_context

REBIND_SECONDS: Final = 5.0
"""Maximum time for which a restarted engine waits for its port. The previous socket closes within milliseconds."""
BUFFER_STEPS: Final = 10_000
"""Number of batches in the replay buffer of each engine: the default of real engines."""
KILL_SECONDS: Final = 0.05
"""Time for a publisher to pass queued batches to ZeroMQ when its engine is killed. ZeroMQ does not send all these batches."""
SHUTDOWN_SECONDS: Final = 2.0
"""Time for a publisher to send its last batches when a run ends."""


class WorkerEndpoints(NamedTuple):
    """The endpoints of a worker."""

    worker: Worker
    endpoint: str
    replay_endpoint: str

    @property
    def source(self) -> Source:
        """The worker's `Source`, for a subscriber."""
        return Source(self.endpoint, self.replay_endpoint, name=self.worker[0], rank=self.worker[1])


class Sockets:
    """The publishers of all workers, as a context manager.

    With `base_port`, worker number `n` publishes at port `base_port + 2n` and answers replay requests at the next port. If it
    is None, the operating system chooses ports. If `proxied`, proxies listen at these ports, and publishers at other ports.
    Raises `EndpointError` for a port in use, and `ConfigError` if a port would exceed 65535.
    """

    def __init__(
        self, settings: FleetSettings, *, host: str = "127.0.0.1", base_port: int | None = None, proxied: bool = False
    ) -> None:
        last = (base_port or 0) + 2 * len(settings.workers) - 1
        if base_port is not None and last > MAX_PORT:
            reason = f"{len(settings.workers)} workers would need port {last}"
            raise ConfigError(f"invalid base port {base_port}: {reason}; choose a lower one")
        self.proxies: Final[dict[Worker, tuple[FaultProxy, FaultProxy]]] = {}
        """The two proxies of each worker: one for live events and one for replay."""
        self.addresses: Final[dict[Worker, WorkerEndpoints]] = {}
        self._settings: Final = settings
        self._host: Final = host
        self._base_port: Final = base_port
        self._proxied: Final = proxied
        self._closing: Final = ExitStack()
        self._context: Final[zmq.Context[zmq.Socket[bytes]]] = zmq.Context(io_threads=2)
        self._closing.callback(destroy_context, self._context)
        self._context.max_sockets = 4 * len(settings.workers) + 64
        self._publishers: Final[dict[Worker, ZmqEventPublisher]] = {}
        self._bound: Final[dict[Worker, tuple[str, str]]] = {}
        self._born: Final[dict[Worker, list[float]]] = {}
        self._published: Final[Counter[Worker]] = Counter()

    # --- event sink

    def open(self, worker: Worker) -> None:
        """Bind a worker's sockets. After a restart, the endpoints are the same as before."""
        first = worker not in self._bound
        publisher = self._publishers[worker] = self._publisher(worker)
        # The publisher has a replay endpoint, because one was requested.
        ends = self._bound[worker] = publisher.endpoint, publisher.replay_endpoint or ""
        if first and self._proxied:
            listen = self._configured_endpoints(worker)
            live, replay = (self._closing.enter_context(FaultProxy(*pair)) for pair in zip(ends, listen, strict=True))
            self.proxies[worker] = live, replay
            ends = live.endpoint, replay.endpoint
        if first:
            self.addresses[worker] = WorkerEndpoints(worker, *ends)
        self._born.setdefault(worker, []).append(time.time())

    def publish(self, worker: Worker, batch: KVEventBatch) -> None:
        """Publish a batch."""
        self._published[worker] += 1
        self._publishers[worker].publish(batch)

    def close(self, worker: Worker) -> None:
        """End an incarnation as if the worker's process were killed: batches that were not sent are lost."""
        self._publishers.pop(worker).shutdown(KILL_SECONDS)

    # --- information for the consumer

    def incarnation(self, worker: Worker, ts: float) -> int:
        """Return the incarnation of a worker that published a batch with this timestamp."""
        return bisect_right(self._born[worker], ts) - 1

    def subscribers(self, worker: Worker | None = None) -> int:
        """Return the number of subscribers of a running worker; if `worker` is None, the smallest number over all workers."""
        publishers = self._publishers.values() if worker is None else [self._publishers[worker]]
        return min(publisher.stats().subscribers for publisher in publishers)

    @property
    def dropped(self) -> int:
        """Number of batches that the proxies have dropped."""
        return sum(live.counts.down.dropped for live, _ in self.proxies.values())

    def is_newest_dropped(self, worker: Worker) -> bool:
        """Return whether all batches of a worker have reached its proxy, and the proxy has dropped the newest one.

        If the proxy was not connected when a batch was published, the result is False.
        """
        if worker not in self.proxies:
            return False
        counts = self.proxies[worker][0].counts.down
        return counts.messages == self._published[worker] and counts.dropped_tail > 0

    # --- closing the network

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._closing:
            for publisher in self._publishers.values():
                self._closing.callback(publisher.shutdown, SHUTDOWN_SECONDS)

    def _publisher(self, worker: Worker) -> ZmqEventPublisher:
        behind = ("tcp://127.0.0.1:*",) * 2
        endpoint, replay_endpoint = self._bound.get(worker) or (behind if self._proxied else self._configured_endpoints(worker))
        until = time.monotonic() + REBIND_SECONDS
        while True:
            try:
                return ZmqEventPublisher(
                    endpoint=endpoint,
                    replay_endpoint=replay_endpoint,
                    buffer_steps=BUFFER_STEPS,
                    bind=True,
                    dialect=self._settings.wire,
                    context=self._context,
                )
            except EndpointError:
                if worker not in self._bound or time.monotonic() > until:
                    raise
                time.sleep(0.005)

    def _configured_endpoints(self, worker: Worker) -> tuple[str, str]:
        if self._base_port is None:
            return f"tcp://{self._host}:*", f"tcp://{self._host}:*"
        port = self._base_port + 2 * self._settings.workers.index(worker)
        return f"tcp://{self._host}:{port}", f"tcp://{self._host}:{port + 1}"
