"""The publisher inside an engine: it attests the engine's cache, and hands over to the engine's own publisher when it fails.

Theory of operation of the takeover. The takeover begins if `publish` raises, if encoding or sending fails `max_failures` times
in sequence, or if the publisher thread fails. The thread then stops taking batches from the queue and closes its sockets.
Batches that arrive during the takeover wait in the queue. The thread creates the engine's own publisher, which binds the same
ports, and gives it the waiting batches. From then on `publish` passes every batch to the engine's publisher.

For consumers the stream continues. The engine's publisher begins at the next number, so no number is used twice. The replay
buffer of that publisher gets the batches of kvevents. From the stored batches a consumer recognises the stream after a
reconnect, and requests missing batches. A lost batch is a gap, which an empty batch reveals at once. Heartbeats, attestation
and full history end, because the engines' publishers do not have these features.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec

from kvevents.endpoints import split_tcp
from kvevents.errors import ClosedError
from kvevents.events import Heartbeat
from kvevents.publisher import ZmqEventPublisher
from kvevents.publisher.compaction import DigestTracker, Encode, SequencedPayload


class OwnPublisher(NamedTuple):
    """The constructor of the engine's own publisher, and its arguments."""

    engine: str
    """Name of the engine, for log messages."""
    options: dict[str, Any]
    """The options that the engine passed to its constructor."""
    create: Callable[..., Any]
    """Calls the constructor with the engine's options; the arguments replace options of the same name."""
    empty_batch: Callable[[], Any]
    """Returns a batch that has the engine's type and no events."""


class EnginePublisher(ZmqEventPublisher):
    """A publisher inside an engine.

    A heartbeat carries the digest of a state of the engine's cache if all batches that lead to this state have been published.
    The engine's scheduler thread calls all methods except those of the publisher thread.
    """

    logger = logging.getLogger(__name__)
    _max_failures = 3
    """Number of consecutive failures after which the engine's own publisher takes over."""
    _accepted_batches = 0
    """Number of batches that `publish` has accepted."""
    _cache_state: tuple[int, int] | None = None
    """Number of batches that lead to the newest known state of the cache, and the digest of that state, as one object."""
    expects_attestation = False
    """Whether the first heartbeat after a batch logs a warning if no state of the cache is known."""
    _is_attestation_stopped = False
    _incompleteness = ""
    """Why the engine's events do not describe its cache; empty if they do."""
    _must_report_incompleteness = False
    """Whether a heartbeat with the reason in `_incompleteness` must precede the next batch."""
    _fallback: OwnPublisher | None = None
    _successor: Any = None
    """The engine's own publisher after the takeover, or None before it."""
    _failed_sends = _failed_encodes = 0
    """Number of consecutive failures to send a batch, and number of consecutive failures to encode a batch."""
    _fault: BaseException | None = None
    """The exception that started the takeover, or None before it."""

    def publish(self, events: Any) -> None:
        """Accept one batch, as the base class does. A fault of kvevents is not raised."""
        try:
            super().publish(events)
        except ClosedError:
            raise
        except Exception as error:  # noqa: BLE001 - a fault of kvevents must not reach the engine
            self._give_up(error)
            self._publish_slowly(events)
        self._accepted_batches += 1

    # --- attestation ---------------------------------------------------------------------------------------------------------

    def record_cache(self, digest: int, *, is_batch_pending: bool) -> None:
        """Record the digest of the cache after all accepted batches and, if `is_batch_pending`, after the next batch."""
        self._cache_state = (self._accepted_batches + is_batch_pending, digest)

    def end_attestation(self, error: Exception) -> None:
        """Stop sending attestations because a hook has failed, and log the first such failure."""
        if not self._is_attestation_stopped:
            self._is_attestation_stopped = True
            self.logger.warning("kvevents: attestation is switched off: a hook failed: %s: %s", type(error).__name__, error)

    @contextmanager
    def ending_attestation(self) -> Iterator[None]:
        """Pass an exception of a hook to `end_attestation` instead of raising it in the engine."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - faults of kvevents must not reach the engine
            self.end_attestation(error)

    def _attestation(self) -> int | None:
        state = self._cache_state
        if self._is_attestation_stopped:
            return None
        if state is None:
            if self.expects_attestation and self._accepted_batches:
                self.expects_attestation = False
                self.logger.warning("kvevents: heartbeats carry no attestation: this engine's cache was not found")
            return None
        batches, digest = state
        return digest if batches == self._count_processed() else None

    def report_incomplete_events(self, reason: str) -> None:
        """Report in heartbeats that the events do not describe the engine's cache, so that no consumer counts as EXACT.

        The first heartbeat with `reason` precedes the next batch.
        """
        self._incompleteness, self._must_report_incompleteness = reason, True
        note = "; heartbeats are off, so consumers do not see it" if self._digest_tracker is None else ""
        self.logger.warning("kvevents: the stream is not exact: %s%s", reason, note)

    def _publish_burst(self, encode: Encode) -> None:
        if self._must_report_incompleteness and self._digest_tracker is not None:
            self._send_heartbeat(self._digest_tracker, encode)
            self._must_report_incompleteness = False
        super()._publish_burst(encode)

    def _heartbeat(self, tracker: DigestTracker, number: int) -> Heartbeat:
        heartbeat = super()._heartbeat(tracker, number)
        if self._incompleteness and heartbeat.trust == "EXACT":
            heartbeat = msgspec.structs.replace(heartbeat, trust="DEGRADED", reason=self._incompleteness)
        return heartbeat

    # --- takeover by the engine's own publisher ------------------------------------------------------------------------------

    def hand_over_to(self, fallback: OwnPublisher | None, max_failures: int) -> None:
        """Let the engine's publisher take over after `max_failures` consecutive failures. Call this before the constructor."""
        self._fallback, self._max_failures = fallback, max_failures

    def _give_up(self, error: BaseException) -> None:
        """End the publisher thread, which then hands over. Do nothing if the engine's publisher cannot take over."""
        if self._fallback is not None and not self._end_reason:
            self._fault = error
            self._end_queue(f"{type(error).__name__}: {error}")

    def _publish_slowly(self, events: Any) -> None:
        with self._lock:
            has_given_up = self._fallback is not None and self._end_reason and not self._is_shut_down
            successor = self._successor if has_given_up else None
            if has_given_up and successor is None:  # the thread is handing over
                self._append_or_drop(events)
                return
        if successor is None:
            super()._publish_slowly(events)
        else:
            successor.publish(events)

    def _send(self, batches: list[SequencedPayload]) -> None:
        try:
            super()._send(batches)
        except BaseException as error:
            self._failed_sends += 1
            if self._failed_sends >= self._max_failures:
                self._give_up(error)
            raise
        if self._failed_sends and batches:
            self.logger.warning("kvevents: sending works again after %d failures in sequence", self._failed_sends)
            self._failed_sends = 0

    def _take_burst(self, encode: Encode) -> list[SequencedPayload]:
        burst = super()._take_burst(encode)
        if burst:
            self._failed_encodes = 0
        return burst

    def _on_encode_failure(self, seq: int, error: BaseException) -> None:
        self._failed_encodes += 1
        if self._failed_encodes >= self._max_failures:
            self._give_up(error)
        super()._on_encode_failure(seq, error)

    def _record_failure(self, error: BaseException) -> None:
        # The log message about the takeover names the error, so the failures before the takeover are not logged.
        if self._fallback is None or not self._failed_sends:
            super()._record_failure(error)
        else:
            self._failures.count("thread")

    def _poll(self, now: float) -> None:
        if not self._end_reason:
            super()._poll(now)

    def _run(self) -> None:
        try:
            super()._run()
        except BaseException as error:
            if self._fallback is None:
                raise
            self._give_up(error)
        if self._fallback is not None and not self._is_shut_down:
            self._hand_over(self._fallback)

    def _hand_over(self, fallback: OwnPublisher) -> None:
        """Let the engine's own publisher continue the stream, and log the takeover in one line."""
        fault = self._fault or RuntimeError(self._end_reason)
        try:
            first = self._create_successor(fallback)
        except Exception as error:  # noqa: BLE001 - the engine continues without events
            self._fallback = None
            self.logger.error(  # noqa: TRY400 - a traceback would show the second fault only
                "kvevents has failed, and no KV cache events are published from now on: %s: %s; the publisher of %s does not "
                "start: %s: %s",
                type(fault).__name__,
                fault,
                fallback.engine,
                type(error).__name__,
                error,
            )
        else:
            self.logger.warning(
                "kvevents is not used any more: %s publishes KV cache events itself from number %d on: %s: %s",
                fallback.engine,
                first,
                type(fault).__name__,
                fault,
            )

    def _create_successor(self, fallback: OwnPublisher) -> int:
        """Close all sockets and create the engine's own publisher. Return the first number of the engine's own publisher."""
        batches: list[SequencedPayload] = []
        with suppress(Exception):  # if reading the buffer fails, its batches become a gap
            batches = self._replay_buffer.buffered_batches()
        self._server.close(self.SHUTDOWN_TIMEOUT)
        successor = fallback.create(**self._successor_options(fallback.options))
        # In all supported releases, both engines' publishers have the attributes `_seq_gen` and `_buffer`.
        if not hasattr(successor, "_seq_gen"):
            successor.shutdown()
            raise AttributeError("the publisher has no `_seq_gen`, so its sequence numbers cannot continue those of kvevents")
        if isinstance(history := getattr(successor, "_buffer", None), deque):
            history.extend(batches)
        with self._lock:
            first = self._next_seq + self._dropped_numbers
            successor._seq_gen = itertools.count(first)  # noqa: SLF001 - `_seq_gen` was checked above
            for batch in (fallback.empty_batch(), *self._take_queue()):
                successor.publish(batch)
            self._successor = successor
            is_shut_down = self._is_shut_down
        if is_shut_down:  # `shutdown` was called during the takeover
            successor.shutdown()
        return first

    def _successor_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options with each port that the OS chose, minus the rank, because the engine's publisher adds the rank.

        Only `tcp://*:0` is replaced: the engines' publishers connect to other hosts instead of binding.
        """
        result = dict(options)
        for name, endpoint in (("endpoint", self._bound_endpoint), ("replay_endpoint", self._replay_bound)):
            bound_target, target = split_tcp(endpoint or ""), split_tcp(options.get(name) or "")
            if bound_target is not None and target == ("*", 0):
                result[name] = f"tcp://*:{bound_target[1] - self._data_parallel_rank}"
        return result

    def shutdown(self, timeout: float | None = None) -> Any:
        """Shut down as the base class does. Also shut down the engine's own publisher if it has taken over."""
        report = super().shutdown(timeout)
        with self._lock:
            successor, self._successor = self._successor, None
        if successor is not None:
            successor.shutdown()
        return report

    def _after_fork(self) -> None:
        self._fallback = self._successor = None
        super()._after_fork()
