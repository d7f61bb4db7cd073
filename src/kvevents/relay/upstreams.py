"""The upstreams of a relay: which of their batches are new, and how far they are to be trusted together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from kvevents.stream import (
    DEFAULT_STREAM_LIMITS,
    Checkpoint,
    DegradedReason,
    Gap,
    RawBatch,
    RawDelivery,
    Reset,
    Source,
    StreamLimits,
    Trust,
    inspect_events,
    trust_order,
)
from kvevents.subscriber import StreamStatus, Subscriber
from kvevents.subscriber.transport import Transport

log = logging.getLogger(__name__)

Position: TypeAlias = tuple[int, int]
"""Incarnation and sequence number of a batch of an upstream."""


class Upstreams:
    """Subscribes to the upstreams, and returns what was not forwarded before.

    `checkpoints` are those of an earlier process, by ordinal. `forwarded` is the newest batch of each upstream that it had
    sent. Both must be of one incarnation; see `resume_point`. Replay returns the batches between them again, and these are
    skipped.

    A sequence number identifies a batch only within one incarnation. So an upstream that has not proven to be the same
    incarnation is followed from its start, with a `Reset`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        checkpoints: Sequence[Checkpoint] = (),
        forwarded: Mapping[int, Position] | None = None,
        *,
        limits: StreamLimits = DEFAULT_STREAM_LIMITS,
        clock: Callable[[], float] = time.monotonic,
        transport: Transport | None = None,
    ) -> None:
        self.sources: Final = tuple(sources)
        self.ordinals: Final = {(source.label, source.rank): at for at, source in enumerate(sources)}
        """Position of each upstream among the sources, by which the journal identifies it."""
        self._forwarded = dict(forwarded or {})
        self.subscriber: Final[Subscriber[RawBatch]] = Subscriber(decode=False, limits=limits, clock=clock, transport=transport)
        resumed = {(each.source, each.rank): each for each in checkpoints}
        try:
            for source in sources:
                self.subscriber.add(source, resume=resumed.get((source.label, source.rank)))
        except BaseException:
            self.subscriber.close()
            raise

    def receive(self, timeout: float) -> list[RawDelivery]:
        """Return new deliveries in order; an empty list after `timeout` seconds without one."""
        deliveries = self.subscriber.receive_many(timeout=timeout)
        return self._skip_forwarded(deliveries) if self._forwarded else deliveries

    def ordinal(self, delivery: RawDelivery) -> int:
        """Return the ordinal of the upstream that sent a delivery."""
        return self.ordinals[delivery.source, delivery.rank]

    def trust(self) -> Trust:
        """Return the lowest trust of all upstreams; the reason names them. It is attested if all of them are."""
        return _combine_trust({source: self.subscriber.trust(*source) for source in self.ordinals})

    def statuses(self) -> list[StreamStatus]:
        """Return the status of each upstream, by ordinal."""
        return sorted(self.subscriber.statuses(), key=lambda each: self.ordinals[each.source, each.rank])

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoint of each upstream, by ordinal. Call it when everything received has been sent."""
        return sorted(self.subscriber.checkpoints(), key=lambda each: self.ordinals[each.source, each.rank])

    def close(self) -> None:
        """Close all connections."""
        self.subscriber.close()

    def _skip_forwarded(self, deliveries: list[RawDelivery]) -> list[RawDelivery]:
        new: list[RawDelivery] = []
        restarted: set[int] = set()
        for delivery in deliveries:
            ordinal = self.ordinal(delivery)
            if ordinal in restarted:
                continue
            if isinstance(delivery, Gap) or self._is_new(ordinal, delivery):
                new.append(delivery)
            elif DegradedReason.IDENTITY in self.subscriber.status(delivery.source, delivery.rank).degraded_reasons:
                restarted.add(ordinal)
                self._follow_from_start(ordinal)
            elif isinstance(delivery, RawBatch):
                self._report_findings(delivery)
        return new

    def _is_new(self, ordinal: int, delivery: RawBatch | Reset) -> bool:
        newest = self._forwarded.get(ordinal)
        if newest is None:
            return True
        if isinstance(delivery, RawBatch) and (delivery.incarnation, delivery.seq) <= newest:
            return False
        # Deliveries come in order, so all that follow are new.
        del self._forwarded[ordinal]
        return True

    def _report_findings(self, delivery: RawBatch) -> None:
        """Report what decoding a skipped batch shows: trust of the upstream in this process depends on it."""
        batch = delivery.decode()
        report = inspect_events(batch.events, batch.rejected)
        if report is not None:
            self.subscriber.report(delivery, report)

    def _follow_from_start(self, ordinal: int) -> None:
        """Follow an upstream from number 0, since its numbers can be those of another incarnation."""
        source = self.sources[ordinal]
        log.warning(
            "%s rank %d: not proven to be the same incarnation as before the relay restarted; following it from its start",
            source.label,
            source.rank,
        )
        incarnation = self.subscriber.status(source.label, source.rank).incarnation
        del self._forwarded[ordinal]
        self.subscriber.remove(source.label, source.rank)
        self.subscriber.add(source, resume=Checkpoint(source.label, source.rank, incarnation, -1))


def lowest_trust(statuses: Sequence[StreamStatus]) -> Trust:
    """Return the lowest trust of several streams; the reason names the streams that have it. It is attested if all are."""
    return _combine_trust({(status.source, status.rank): status.trust for status in statuses})


def _combine_trust(trusts: Mapping[tuple[str, int], Trust]) -> Trust:
    lowest = min((trust.name for trust in trusts.values()), key=trust_order)
    if lowest == Trust.EXACT.name:
        return Trust.ATTESTED if all(trust.attested for trust in trusts.values()) else Trust.EXACT
    reasons = [f"{source} rank {rank}: {trust}" for (source, rank), trust in trusts.items() if trust.name == lowest]
    return Trust(lowest, "; ".join(reasons))


def resume_point(checkpoint: Checkpoint, position: Position | None) -> Checkpoint:
    """Return the checkpoint to resume from if the journal ends with `position` of the upstream.

    If the upstream began a new incarnation after the checkpoint, the checkpoint's number does not say what was sent. Then the
    upstream is followed from its start, with a `Reset`.
    """
    if position is None or position[0] == checkpoint.incarnation:
        return checkpoint
    return Checkpoint(checkpoint.source, checkpoint.rank, max(position[0], checkpoint.incarnation), -1)
