"""The thread that receives the events of all streams and writes them to the index."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvevents.errors import KVEventsError
from kvevents.index import ApplyResult, PrefixIndex
from kvevents.routing import LoadReading, LoadSettings, LoadSource, LoadSubscriber
from kvevents.routing.load_readings import is_load_url
from kvevents.service.fleet.registration import NAME_SEPARATOR, Registration
from kvevents.stream import Batch, Checkpoint, Gap, RawBatch, RawDelivery, Reset, Source, Trust
from kvevents.subscriber import StreamStatus
from kvevents.wire import Rejected
from kvevents.wire.load import EngineLoad
from kvevents.zeromq.keys import Curve
from kvevents_native import _native

log = logging.getLogger(__name__)
T = TypeVar("T")

TICK_SECONDS: Final = 0.02
"""Maximum seconds to wait for deliveries, and so the maximum delay of submitted tasks and of `Listener.on_tick`."""
MIN_TURN_SECONDS: Final = 0.001
"""Minimum seconds from the start of a turn with deliveries to the next turn. A turn of the follower receives all that has
arrived. With this minimum and hundreds of engines, a turn receives the batches of a dozen engines, which saves about a quarter
of the CPU time. A follower that already waits receives an event without delay (decision record 0015)."""
RATE_SECONDS: Final = 10
"""Period in seconds over which the rate of batches is averaged."""


class Listener:
    """Callbacks that a follower calls in its own thread. The methods here do nothing; `Fleet` overrides them."""

    def on_received(self, keys: Iterable[tuple[str, int]]) -> None: ...
    def on_rejected(self, batch: RawBatch, events: tuple[Rejected, ...]) -> None: ...
    def on_applied(self, batches: list[RawBatch], losses: list[Reset | Gap]) -> None: ...
    def on_tasks_done(self) -> None: ...
    def on_tick(self) -> None: ...
    def on_failure(self, error: BaseException) -> None: ...


class IndexSink:
    """The `Sink` of a subscriber: it writes deliveries to the index, and returns the outcomes to the subscriber's streams.

    The sink calls the listener before each write, and after a write that rejected events.
    """

    def __init__(self, index: PrefixIndex, listener: Listener | None = None) -> None:
        self._index: Final = index
        self.listener = listener or Listener()
        """Object whose methods are called; any thread may replace the object at any time."""

    def apply_many(self, deliveries: Sequence[Batch | RawBatch | Reset | Gap], /) -> list[ApplyResult]:
        """Apply the deliveries in their order and return one outcome for each."""
        self.listener.on_received({(delivery.source, delivery.rank) for delivery in deliveries})
        outcomes = self._index.apply_many(deliveries)
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            if isinstance(delivery, RawBatch) and outcome.report is not None and outcome.report.rejected:
                self.listener.on_rejected(delivery, outcome.report.rejected)
        return outcomes


class StreamSubscriber(Protocol):
    """The methods of a `Subscriber` that follower and fleet use. `receive_many` returns deliveries that a sink has applied."""

    def receive_many(self, *, timeout: float | None = None) -> Sequence[RawDelivery]: ...
    def add(self, source: Source, resume: Checkpoint | None = None) -> None: ...
    def remove(self, name: str, rank: int = 0) -> None: ...
    def trust(self, name: str | None = None, rank: int = 0) -> Trust: ...
    def trust_changes(self) -> list[tuple[tuple[str, int], Trust]]: ...
    def status(self, name: str | None = None, rank: int = 0) -> StreamStatus: ...
    def checkpoints(self) -> list[Checkpoint]: ...
    def close(self) -> None: ...


class Follower(threading.Thread):
    """The thread that owns a subscriber and receives from it. Other threads submit tasks that change the subscriber."""

    def __init__(self, subscriber: StreamSubscriber, sink: IndexSink) -> None:
        """`sink` is the sink of `subscriber`."""
        super().__init__(name="kvevents-follower", daemon=True)
        self.subscriber = subscriber
        self.sink: Final = sink
        self._tasks: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_stopping = False
        self._per_second: deque[tuple[int, int]] = deque(maxlen=RATE_SECONDS + 1)
        self._began = int(time.monotonic())
        self.batches = 0
        """Number of batches that were applied to the index."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in the thread, when the index contains all that the subscriber has received; return its future.

        If the thread has not started or has ended, run `work` in the calling thread.
        """
        future: Future[T] = Future()
        self._tasks.append((work, future))
        if not self.is_alive():
            self._run_tasks()
        return future

    @property
    def rate(self) -> float:
        """Batches per second, averaged over the newest `RATE_SECONDS`."""
        now = int(time.monotonic())
        recent = [count for second, count in list(self._per_second) if now - RATE_SECONDS <= second < now]
        return sum(recent) / max(1, min(RATE_SECONDS, now - self._began))

    def run(self) -> None:
        """Receive until `stop` is called."""
        try:
            self._follow()
        except BaseException as error:
            log.exception("the follower thread failed; the index receives no more events")
            self.sink.listener.on_failure(error)
            raise
        finally:
            self.subscriber.close()

    def _follow(self) -> None:
        due = 0.0
        while not self._is_stopping:
            deliveries = self.subscriber.receive_many(timeout=TICK_SECONDS)
            began = time.monotonic()
            if deliveries:
                self._count(deliveries)
            # Now the index contains all deliveries of the subscriber, so tasks see index and subscriber in the same state.
            self._run_tasks()
            now = time.monotonic()
            if now >= due:
                due = now + TICK_SECONDS
                self.sink.listener.on_tick()
            if deliveries and (remaining := began + MIN_TURN_SECONDS - now) > 0:
                time.sleep(remaining)

    def _count(self, deliveries: Sequence[RawDelivery]) -> None:
        batches = [delivery for delivery in deliveries if isinstance(delivery, RawBatch)]
        losses = [delivery for delivery in deliveries if not isinstance(delivery, RawBatch)]
        self.batches += len(batches)
        count, second = len(batches), int(time.monotonic())
        if self._per_second and self._per_second[-1][0] == second:
            count += self._per_second.pop()[1]
        self._per_second.append((second, count))
        newest = {(batch.source, batch.rank): batch for batch in batches}
        self.sink.listener.on_applied(list(newest.values()), losses)

    def _run_tasks(self) -> None:
        """Run the submitted tasks, call the listener one time for all, and then set the results of the futures."""
        results: list[Callable[[], None]] = []
        failure: BaseException | None = None
        while self._tasks and failure is None:
            work, future = self._tasks.popleft()
            if not future.set_running_or_notify_cancel():
                continue  # The task was cancelled.
            try:
                results.append(partial(future.set_result, work()))
            except BaseException as error:  # noqa: BLE001 - the future gets every error; unexpected errors are raised below
                results.append(partial(future.set_exception, error))
                failure = None if isinstance(error, (KVEventsError, OSError)) else error
        try:
            if results:
                self.sink.listener.on_tasks_done()
        finally:
            for pass_on in results:
                pass_on()
        if failure is not None:
            raise failure

    def stop(self, timeout: float = 5.0) -> bool:
        """End the thread and close the subscriber. Return False if the thread does not end within `timeout` seconds."""
        self._is_stopping = True
        if self.is_alive():
            self.join(timeout)
        return not self.is_alive()


_decode_items = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def timestamp_of(payload: bytes) -> float | None:
    """Return the engine's timestamp of an encoded batch; None if the payload is not an array that begins with a number."""
    try:
        return msgspec.msgpack.decode(_decode_items(payload)[0], type=float)
    except (msgspec.MsgspecError, IndexError, ValueError, RecursionError):  # RecursionError is raised for deeply nested lists
        return None


class LoadFollower:
    """Receives the loads of ranks. `follow`, `watch` and `leave` are called in the follower's thread."""

    def __init__(self, settings: LoadSettings, max_reservations: int) -> None:
        self._settings = settings
        self._subscriber: LoadSubscriber | None = None
        """None before the first rank that has a load or an HTTP server."""
        self.requests: Final = _native.Loads(settings.max_age_seconds, max_reservations)
        """Number of requests of each source and rank, from three origins: engines' reports, reservations, and selections."""

    def follow(self, registration: Registration, curve: Curve | None) -> Callable[[], LoadReading | None]:
        """Receive the load of a rank if its registration has `load`. Return a function that returns the newest reading.

        `curve` has the keys for registrations without keys. If the endpoint cannot be used, the reading has a fault.
        """
        name, rank = registration.key
        if registration.load is None:
            return lambda: None
        try:
            subscriber = self._add(LoadSource(registration.load, name, rank, curve=registration.curve or curve))
        except KVEventsError as error:
            fault = f"its load is not received: {error}"
            log.warning("%s: %s", registration.label, fault)
            return lambda: LoadReading(None, None, 0, 0, fault)
        return lambda: subscriber.reading((name, rank))

    def watch(self, registration: Registration) -> Callable[[], str]:
        """Poll the server at which a rank takes requests. Return a function that returns why the server is silent, or "".

        A rank without `url` takes requests at the server from which its load is read. Then polls for the load also check the
        server.
        """
        load, worker = registration.load or "", registration.key
        url = registration.url or load
        if not is_load_url(url):
            return str
        subscriber = self._subscriber
        if not is_load_url(load) or urlsplit(load).netloc != urlsplit(url).netloc:
            parts, worker = urlsplit(url), _server_of(worker)
            try:
                subscriber = self._add(LoadSource(f"{parts.scheme}://{parts.netloc}", *worker, reads_load=False))
            except KVEventsError as error:
                log.warning("%s: cannot poll the server at %s: %s", registration.label, url, error)
        if subscriber is None:
            return str
        return lambda: "" if (reading := subscriber.reading(worker)) is None else reading.silence

    def _add(self, source: LoadSource) -> LoadSubscriber:
        self._subscriber = self._subscriber or LoadSubscriber(settings=self._settings, on_load=self._on_load)
        self._subscriber.add(source)
        return self._subscriber

    def leave(self, worker: tuple[str, int]) -> None:
        """Stop receiving the load of a rank."""
        self.requests.remove(*worker)
        if self._subscriber is not None:
            self._subscriber.remove(worker)
            self._subscriber.remove(_server_of(worker))

    def close(self) -> None:
        """Stop receiving load."""
        if self._subscriber is not None:
            self._subscriber.close()

    def _on_load(self, worker: tuple[str, int], load: EngineLoad) -> None:
        self.requests.report(*worker, load.requests)


def _server_of(worker: tuple[str, int]) -> tuple[str, int]:
    """Return the load subscriber's key for a rank's HTTP server that is polled, but from which no load is read."""
    return f"{worker[0]}{NAME_SEPARATOR}server", worker[1]
