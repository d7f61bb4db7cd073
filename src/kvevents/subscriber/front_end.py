"""The common part of the subscribers for threads (`sync`) and asyncio (`aio`): public methods that do not wait, and closing."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypedDict, cast

from kvevents.errors import ClosedError, ConfigError, ForkedError, TrustTimeoutError
from kvevents.stream import (
    DEFAULT_STREAM_LIMITS,
    Batch,
    BatchReport,
    BatchT,
    Checkpoint,
    Gap,
    RawBatch,
    RawDelivery,
    Reset,
    Source,
    StreamLimits,
    Trust,
    inspect_events,
    printable,
)
from kvevents.subscriber.multiplexer import (
    DEFAULT_CONCURRENT_REPLAYS,
    MESSAGES_PER_READ,
    Multiplexer,
    OnFound,
    StreamStatus,
    Transport,
)
from kvevents.subscriber.zmq_transport import ZmqTransport

log = logging.getLogger(__name__)

DECODED_MESSAGES_PER_READ: Final = 32
"""Maximum number of messages that are read from one stream before decoding, so that they fit in the CPU's cache."""
TRUST_CHECK_SECONDS: Final = 0.05
"""Seconds between two checks of the trust in `wait_for`, if nothing is received."""
DELIVERIES_PER_SLICE: Final = 8
"""Number of deliveries that are decoded and applied before the clock is read again."""
Sources: TypeAlias = Source | str | Iterable[Source | str]


class TrustChange(NamedTuple):
    """A stream whose trust, or the reason of its trust, has changed."""

    source: str
    rank: int
    trust: Trust


OnChange: TypeAlias = Callable[[TrustChange | Reset | Gap], None]


class Outcome(Protocol):
    """Result of applying one delivery to a `Sink`."""

    @property
    def report(self) -> BatchReport | None:
        """The findings of applying the delivery; None if the delivery needs no report."""


class Sink(Protocol):
    """Applies deliveries before the subscriber returns them, as a `PrefixIndex` does."""

    def apply_many(self, deliveries: Sequence[Batch | RawBatch | Reset | Gap], /) -> Sequence[Outcome]:
        """Apply the deliveries in this order and return one outcome for each."""
        ...


class Options(TypedDict, total=False):
    """Keyword options of `Subscriber` and `AsyncSubscriber`, except `decode`, on which their types depend."""

    limits: StreamLimits
    """Limits and timers of each stream."""
    max_concurrent_replays: int
    """Maximum number of streams that request replay at the same time, 1 or more; other streams wait."""
    transport: Transport | None
    """Opens connections; `ZmqTransport()` if None."""
    clock: Callable[[], float]
    """A monotonic clock in seconds."""
    sink: Sink | None
    """Object that applies each delivery before it is returned, such as a `PrefixIndex`."""
    on_change: OnChange | None
    """Function that `receive` calls with each change of trust, and with each reset and gap before it returns the delivery. The
    function replaces `trust_changes`. An exception of the function is raised by `receive`, like an exception of a sink."""
    on_found: OnFound | None
    """Function that `receive` calls with each source found by its topic (`Source.by_topic`). The function returns the source to
    follow, or None to ignore the topic. It may change the source's name, but neither its endpoint nor its topic. The function
    must not raise an exception."""


class FrontEnd(Generic[BatchT]):
    """Base class of both subscribers.

    Threads: only `add`, `remove` and the wait inside `receive` use the connections. `_calls` has a token for each call of these
    methods that is running. Any thread and any signal handler may call `close`, also during another call. If no running call
    uses the connections, `close` closes them. Otherwise `close` wakes the running calls, and the last call to return closes the
    connections. `close` first sets `_is_closed` and then reads `_calls`; the other calls first change `_calls` and then read
    `_is_closed`. So at least one of two concurrent calls sees both changes. `_lock` is held to read or change streams, never
    during a wait.
    """

    def __init__(  # noqa: PLR0913 - the parameters are the options of both subscribers
        self,
        sources: Sources = (),
        *,
        limits: StreamLimits = DEFAULT_STREAM_LIMITS,
        max_concurrent_replays: int = DEFAULT_CONCURRENT_REPLAYS,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
        decode: bool = True,
        sink: Sink | None = None,
        on_change: OnChange | None = None,
        on_found: OnFound | None = None,
        **unknown: object,
    ) -> None:
        """Raise `ConfigError` or `EndpointError`. `Options` explains the parameters."""
        if unknown:
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {next(iter(unknown))!r}")
        self._clock, self._on_change, self._process = clock, on_change, os.getpid()
        if not isinstance(max_concurrent_replays, int) or max_concurrent_replays < 1:
            raise ConfigError(f"invalid max_concurrent_replays {max_concurrent_replays!r}: expected at least 1")
        if not isinstance(limits, StreamLimits):
            raise ConfigError(f"invalid limits {limits!r}: expected StreamLimits")
        if not isinstance(sources, (Source, str, Iterable)):
            raise ConfigError(f"invalid sources {sources!r}: expected a Source, an endpoint, or several of them")
        if sink is not None and not callable(getattr(sink, "apply_many", None)):
            raise ConfigError(f"invalid sink {sink!r}: expected an object with a method apply_many, such as a PrefixIndex")
        per_read = DECODED_MESSAGES_PER_READ if decode else MESSAGES_PER_READ
        self._multiplexer = Multiplexer(transport or ZmqTransport(), limits, max_concurrent_replays, per_read)
        self._multiplexer.on_found = on_found or self._multiplexer.on_found
        self._decodes = decode
        self._sink = sink
        self._is_closed = False
        self._calls: set[object] = set()
        self._waits: set[object] = set()
        """The calls that wait for deliveries."""
        self._read_at = clock()
        """The time at which a waiting call last returned, or at which a waiting task last ran."""
        self._lock = threading.RLock()
        try:
            for given in [sources] if isinstance(sources, (Source, str)) else sources:
                self.add(given)
                source = Source(given) if isinstance(given, str) else given
                # Only the constructor logs this warning: services call `add`, and show the fault as the reason of the trust.
                if source.replay_endpoint is None and not source.by_topic:
                    text = "%s has no replay endpoint: lost batches stay lost, so it is never EXACT"
                    log.warning(text, printable(source.label))
        except BaseException:
            self._close()
            raise

    def add(self, source: Source | str, resume: Checkpoint | None = None) -> None:
        """Follow a further source; if `source` is a string, it is the endpoint.

        If `resume` is given, continue after this checkpoint of an earlier process. As after a reconnect, the stream first
        verifies that the publisher's incarnation has not changed; before this check succeeds, trust is STALE. If the
        incarnation has not changed, the next delivery is the batch after the checkpoint; otherwise it is a `Reset`.

        Raise `ConfigError` if a source with this name and rank is followed already, or if `resume` has another name or rank.
        Raise `EndpointError` if the endpoint is invalid.
        """
        if isinstance(source, str):
            source = Source(source)
        if not isinstance(source, Source):
            raise ConfigError(f"invalid source {source!r}: expected a Source or an endpoint such as tcp://HOST:PORT")
        call = object()
        try:
            self._begin_call(call)
            with self._lock:
                self._multiplexer.add(source, resume)
        finally:
            self._end_call(call)

    def remove(self, name: str, rank: int = 0) -> None:
        """Stop following a source. Deliveries already received from the source are returned. Raise `UnknownSourceError`."""
        call = object()
        try:
            self._begin_call(call)
            with self._lock:
                self._multiplexer.remove(name, rank)
        finally:
            self._end_call(call)

    def report(self, delivery: Batch | RawBatch | Reset | Gap, report: BatchReport | None) -> None:
        """Report the findings of decoding and applying a batch, which can change the trust. If `report` is None, do nothing.

        Call `report` at most once for each batch, at any time after its delivery. If there is a `sink`, `receive` does so.
        The report does not end degraded reasons that are newer than the batch. In a report about a `Batch`, all findings except
        comparisons and estimates are ignored, because the subscriber itself has decoded the batch. If a digest does not match,
        the next delivery can be a `Reset`. A report about a `Reset`, a `Gap` or a source that was removed is ignored.
        """
        if report is not None:
            with self._lock:
                self._multiplexer.report(delivery, report)

    def checkpoint(self, name: str | None = None, rank: int = 0) -> Checkpoint:
        """Return the checkpoint from which a later process can `resume` a stream after the returned deliveries.

        Call `checkpoint` when all returned deliveries have been applied and reported. The call also works after `close`.
        """
        with self._lock:
            return self._multiplexer.checkpoint(name, rank)

    def checkpoints(self) -> list[Checkpoint]:
        """Return a checkpoint of every stream; see `checkpoint`."""
        with self._lock:
            return self._multiplexer.checkpoints()

    def trust(self, name: str | None = None, rank: int = 0) -> Trust:
        """Return the trust in the deliveries of a stream. `name` can be omitted if only one stream exists.

        The trust covers the deliveries that were returned, and every known loss. Findings of decoding and applying a delivery
        count when the delivery is returned.

        Any thread may call `trust`, `status` and `statuses`, also after `close`. Raise `UnknownSourceError`.
        """
        with self._lock:
            return self._multiplexer.entry(name, rank).trust(self._unread_seconds)

    def trust_changes(self) -> list[tuple[tuple[str, int], Trust]]:
        """Return (source, rank) and trust of each stream whose trust or reason has changed since the last call.

        The first call returns all streams. Each change is returned only once, so only one thread should call this method.
        """
        with self._lock:
            return self._multiplexer.trust_changes(self._unread_seconds)

    def status(self, name: str | None = None, rank: int = 0) -> StreamStatus:
        """Return trust, sequence numbers and counters of one stream. Raise `UnknownSourceError`."""
        with self._lock:
            return self._multiplexer.entry(name, rank).status(self._unread_seconds)

    def statuses(self) -> list[StreamStatus]:
        """Return trust, sequence numbers and counters of every stream."""
        with self._lock:
            return self._multiplexer.statuses(self._unread_seconds)

    def _notify(self, on_change: OnChange) -> None:
        """Report each change of trust. If `on_change` raises, this change and all later changes are reported again."""
        changes = deque(self.trust_changes())
        try:
            while changes:
                (name, rank), trust = changes[0]
                on_change(TrustChange(name, rank, trust))
                changes.popleft()
        finally:
            with self._lock:
                self._multiplexer.repeat_trust_changes(key for key, _ in changes)

    _due_at = math.inf
    """The time by which a waiting call reads the connections again; a task does so later if its event loop is blocked."""

    def _has_reached(self, trust: Trust) -> bool:
        """Whether there is at least one stream, and all streams have at least this trust. Unproven streams count as EXACT."""
        trusts = [status.trust for status in self.statuses()]
        return bool(trusts) and all(current >= trust or current.unproven for current in trusts)

    def _check_reached(self, trust: Trust, deliveries: list[Any]) -> None:
        if not self._has_reached(trust):
            laggards = [f"{item.source} rank {item.rank} is {item.trust}" for item in self.statuses() if item.trust < trust]
            reason = "; ".join(laggards) or "there is no source"
            raise TrustTimeoutError(f"streams did not reach {trust.name} in time: {reason}", deliveries)

    @contextmanager
    def _redeliver_on_error(self) -> Iterator[list[Any]]:
        """Yield a list for deliveries. If the block raises, deliveries that no sink has applied are delivered again."""
        deliveries: list[Any] = []
        try:
            yield deliveries
        except BaseException:
            if self._sink is None:
                with self._lock:
                    self._multiplexer.start_over(deliveries, "wait_for() was interrupted; all is delivered again")
            raise

    @property
    def _unread_seconds(self) -> float:
        """Seconds for which the application has not read the connections; 0 while it waits for them."""
        if self._is_closed or (self._waits and self._clock() <= self._due_at):
            return 0.0
        return self._clock() - self._read_at

    def _end_of_wait(self, timeout: float | None) -> float | None:
        """Return the time at which a wait ends; None without a limit. Raises `ConfigError` unless `timeout` is finite."""
        if timeout is not None and not math.isfinite(timeout):
            raise ConfigError(f"invalid duration {timeout}: expected a finite number of seconds, or None")
        return None if timeout is None else self._clock() + timeout

    def _wait_time(self, now: float, end: float | None) -> float | None:
        """Return the seconds until a timer is due or `end` is reached; None means that the number is not limited."""
        due = self._multiplexer.timeout(now)
        if end is None:
            return due
        remaining = max(0.0, end - now)
        return remaining if due is None else min(due, remaining)

    def _pop_one(self) -> BatchT | Reset | Gap:
        """Remove and return the oldest delivery that is ready; there must be one."""
        if self._sink is not None or not self._decodes or self._on_change is not None:
            return self._decode_and_apply([self._multiplexer.ready.popleft()])[0]
        return cast("BatchT", self._decode(self._multiplexer.ready.popleft()))

    def _pop_many(self, limit: int | None, seconds: float = math.inf) -> list[BatchT | Reset | Gap]:
        """Remove and return at most `limit` ready deliveries, but stop after about `seconds` of decoding and applying."""
        if seconds == math.inf:
            return self._decode_and_apply(self._multiplexer.pop(limit))
        deliveries: list[BatchT | Reset | Gap] = []
        maximum, end = math.inf if limit is None else limit, time.perf_counter() + seconds
        while self._multiplexer.ready and len(deliveries) < maximum:
            count = int(min(maximum - len(deliveries), DELIVERIES_PER_SLICE))
            deliveries += self._decode_and_apply(self._multiplexer.pop(count))
            if time.perf_counter() >= end:
                break
        return deliveries

    def _decode_and_apply(self, raw_deliveries: list[RawDelivery]) -> list[BatchT | Reset | Gap]:
        """Decode deliveries that were removed from `ready`, apply them and report them, as far as the options require it."""
        deliveries: list[Any] = [self._decode(raw) for raw in raw_deliveries] if self._decodes else raw_deliveries
        if self._sink is not None or self._on_change is not None:
            try:
                if self._sink is not None:
                    for delivery, outcome in zip(deliveries, self._sink.apply_many(deliveries), strict=True):
                        self.report(delivery, outcome.report)
                if self._on_change is not None:
                    for loss in raw_deliveries:
                        if isinstance(loss, (Reset, Gap)):
                            self._on_change(loss)
            except BaseException as error:
                reason = f"the sink could not apply a delivery ({type(error).__name__}: {error}); all are delivered again"
                with self._lock:
                    self._multiplexer.start_over(raw_deliveries, reason)
                raise
        return deliveries

    def _decode(self, delivery: RawDelivery) -> Batch | Reset | Gap:
        if not isinstance(delivery, RawBatch):
            return delivery
        batch = delivery.decode()
        report = inspect_events(batch.events, batch.rejected)
        if report is not None:
            self.report(delivery, report)
        return batch

    @staticmethod
    def _check_limit(limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ConfigError(f"invalid limit {limit} of deliveries: expected at least 1, or None for no limit")

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"{type(self).__name__} is closed")
        if self._process != os.getpid():
            raise ForkedError(f"this {type(self).__name__} was created before a fork; create another one in this process")

    def _begin_call(self, call: object) -> None:
        """Start using the connections; `_end_call` must follow. Raise `ClosedError`."""
        self._calls.add(call)
        self._check_open()

    def _begin_wait(self, call: object) -> None:
        self._waits.add(call)
        self._begin_call(call)

    def _end_wait(self, call: object) -> None:
        self._read_at = self._clock()
        self._waits.discard(call)
        self._end_call(call)

    def _end_call(self, call: object) -> None:
        """Stop using the connections, and close them if `close` was called since `_begin_call`."""
        self._calls.discard(call)
        if self._is_closed:
            self._close_if_unused()

    def _close(self) -> None:
        self._is_closed = True
        if self._process != os.getpid():
            # In a forked child, a lock that another thread held is never released, and the call of that thread never returns.
            self._multiplexer.transport.close()
        elif self._calls:
            self._multiplexer.transport.wake()
        else:
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        with self._lock:
            if not self._calls:
                self._multiplexer.close()

    def __repr__(self) -> str:
        """Return the endpoints of up to three sources, and the number of streams by trust."""
        with self._lock:
            state = "closed" if self._is_closed else self._multiplexer.describe(self._unread_seconds)
            return f"<{type(self).__name__} {state}>"
