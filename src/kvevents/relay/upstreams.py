"""What a relay listens to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from kvevents.stream import Checkpoint, Doubt, Gap, RawBatch, Reset, Source, Trust, findings_of
from kvevents.stream.deliveries import RawDelivery
from kvevents.stream.trust import rank_of
from kvevents.subscriber import StreamStatus, Subscriber
from kvevents.subscriber.transport import Transport

log = logging.getLogger(__name__)

Position: TypeAlias = tuple[int, int]
"""Incarnation and number of a batch of an upstream."""


class Upstreams:
    """Follows one or more streams, and goes on where an earlier process has ended.

    `checkpoints` are where each was when the relay last wrote them down, `known` what it had sent on by then and afterwards: of
    what a checkpoint brings again, that is passed over. Both must be of one incarnation; see `agreeing`.

    A number says which batch it is only in the life that has it. So nothing is passed over of an upstream that has not proven
    to be the same: such a one begins anew, with a `Reset`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        checkpoints: Sequence[Checkpoint] = (),
        known: Mapping[int, Position] | None = None,
        clock: Callable[[], float] = time.monotonic,
        transport: Transport | None = None,
    ) -> None:
        self.sources: Final = tuple(sources)
        self.ordinals: Final = {(source.label, source.rank): at for at, source in enumerate(sources)}
        """The place of each among the upstreams: how the journal calls them."""
        self._known = dict(known or {})
        self.subscriber: Final[Subscriber[RawBatch]] = Subscriber(decode=False, clock=clock, transport=transport)
        resumed = {(each.source, each.rank): each for each in checkpoints}
        try:
            for source in sources:
                self.subscriber.add(source, resume=resumed.get((source.label, source.rank)))
        except BaseException:
            self.subscriber.close()
            raise

    def receive(self, timeout: float) -> list[RawDelivery]:
        """What is new, in order; empty after `timeout` seconds."""
        deliveries = self.subscriber.receive_many(timeout=timeout)
        return self._new_of(deliveries) if self._known else deliveries

    def ordinal(self, delivery: RawDelivery) -> int:
        """Of the upstream that a delivery is of."""
        return self.ordinals[delivery.source, delivery.rank]

    def trust(self) -> Trust:
        """The least of all; its reason names the upstreams that it is of."""
        return _least({source: self.subscriber.trust(*source) for source in self.ordinals})

    def statuses(self) -> list[StreamStatus]:
        """Each as its own stream has it, by ordinal."""
        return sorted(self.subscriber.statuses(), key=lambda each: self.ordinals[each.source, each.rank])

    def checkpoints(self) -> list[Checkpoint]:
        """What to write down, by ordinal; when everything received has been sent on."""
        return sorted(self.subscriber.checkpoints(), key=lambda each: self.ordinals[each.source, each.rank])

    def close(self) -> None:
        """End all connections."""
        self.subscriber.close()

    # --- what was sent on before

    def _new_of(self, deliveries: list[RawDelivery]) -> list[RawDelivery]:
        new: list[RawDelivery] = []
        void: set[int] = set()
        for delivery in deliveries:
            ordinal = self.ordinal(delivery)
            if ordinal in void:
                continue
            if isinstance(delivery, Gap) or self._is_new(ordinal, delivery):
                new.append(delivery)
            elif Doubt.IDENTITY in self.subscriber.status(delivery.source, delivery.rank).doubts:
                void.add(ordinal)
                self._begin_anew(ordinal)
            else:
                self._pass_over(delivery)
        return new

    def _is_new(self, ordinal: int, delivery: RawBatch | Reset) -> bool:
        known = self._known.get(ordinal)
        if known is None:
            return True
        if isinstance(delivery, RawBatch) and (delivery.incarnation, delivery.seq) <= known:
            return False
        # From here on everything is: deliveries come in order.
        del self._known[ordinal]
        return True

    def _pass_over(self, delivery: RawDelivery) -> None:
        """A batch that was sent on before; what reading it shows must be known to this process all the same."""
        if isinstance(delivery, RawBatch):
            batch = delivery.decode()
            findings = findings_of(batch.events, batch.rejected)
            if findings is not None:
                self.subscriber.report(delivery, findings)

    def _begin_anew(self, ordinal: int) -> None:
        """Follow an upstream from 0, since its numbers may be another life's."""
        source = self.sources[ordinal]
        log.warning("%s rank %d has not proven to be the same; it is followed anew", source.label, source.rank)
        life = self.subscriber.status(source.label, source.rank).incarnation
        del self._known[ordinal]
        self.subscriber.remove(source.label, source.rank)
        self.subscriber.add(source, resume=Checkpoint(source.label, source.rank, life, -1))


def least(statuses: Sequence[StreamStatus]) -> Trust:
    """The least trust of several streams; its reason names those that it is of."""
    return _least({(status.source, status.rank): status.trust for status in statuses})


def _least(trusts: Mapping[tuple[str, int], Trust]) -> Trust:
    worst = min((trust.name for trust in trusts.values()), key=rank_of)
    if worst == Trust.EXACT.name:
        return Trust.EXACT
    told = [f"{source} rank {rank}: {trust}" for (source, rank), trust in trusts.items() if trust.name == worst]
    return Trust(worst, "; ".join(told))


def agreeing(checkpoint: Checkpoint, position: Position | None) -> Checkpoint:
    """The checkpoint to go on with, where the journal ends with `position`.

    Where a new incarnation began after it was written, its number says nothing of what was sent: the upstream begins anew, with
    a `Reset`.
    """
    if position is None or position[0] == checkpoint.incarnation:
        return checkpoint
    return Checkpoint(checkpoint.source, checkpoint.rank, max(position[0], checkpoint.incarnation), -1)
