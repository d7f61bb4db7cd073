"""The upstreams of a relay: which of their batches are new, the trust in the upstreams, and which blocks each upstream holds.

Several upstreams can become one stream, in which each upstream clears only its own blocks. A clear of one upstream is sent as
removals of the blocks that this upstream holds, so that the blocks of other upstreams stay. If an upstream's history is not
known from its start, removals can name blocks that are not recorded for the upstream. These removals are dropped, because the
blocks can belong to another upstream.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from kvevents.events import (
    ATTESTATION_MASK,
    MEDIUM_ALL,
    MEDIUM_CPU_PINNED,
    TIERS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    attestation_group_term,
)
from kvevents.index import tier_of
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
from kvevents.subscriber.multiplexer import Transport
from kvevents.wire import DEFAULT_WIRE_LIMITS
from kvevents.wire.encode import scope_of

log = logging.getLogger(__name__)

Position: TypeAlias = tuple[int, int]
"""Incarnation and sequence number of an upstream's batch."""


class Upstreams:
    """Subscribes to the upstreams, and returns deliveries that were not forwarded before.

    `checkpoints` has the checkpoint of each upstream, by ordinal, that an earlier process stored. `forwarded` has the newest
    batch of each upstream that the earlier process sent, in the checkpoint's incarnation (`resume_point`). The batches from the
    checkpoint to that batch arrive again by replay, and are skipped.

    A sequence number identifies a batch only within one incarnation. So an upstream that is not verified to be the same
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
        """Position of each upstream in `sources`, by which the journal identifies the upstream."""
        self._forwarded = dict(forwarded or {})
        self.subscriber: Final[Subscriber[RawBatch]] = Subscriber(decode=False, limits=limits, clock=clock, transport=transport)
        resumed = {(checkpoint.source, checkpoint.rank): checkpoint for checkpoint in checkpoints}
        try:
            for source in sources:
                self.subscriber.add(source, resume=resumed.get((source.label, source.rank)))
        except BaseException:
            self.subscriber.close()
            raise

    def receive(self, timeout: float) -> list[RawDelivery]:
        """Return new deliveries in order; an empty list if none arrives within `timeout` seconds."""
        deliveries = self.subscriber.receive_many(timeout=timeout)
        return self._skip_forwarded(deliveries) if self._forwarded else deliveries

    def ordinal(self, delivery: RawDelivery) -> int:
        """Return the ordinal of the upstream that sent a delivery."""
        return self.ordinals[delivery.source, delivery.rank]

    def trust(self) -> Trust:
        """Return the lowest trust of all upstreams, as `lowest_trust` does."""
        return _combine_trust({source: self.subscriber.trust(*source) for source in self.ordinals})

    def statuses(self) -> list[StreamStatus]:
        """Return the status of each upstream, by ordinal."""
        return sorted(self.subscriber.statuses(), key=lambda status: self.ordinals[status.source, status.rank])

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoint of each upstream, by ordinal. Call this when all received deliveries have been sent."""
        return sorted(self.subscriber.checkpoints(), key=lambda checkpoint: self.ordinals[checkpoint.source, checkpoint.rank])

    def _skip_forwarded(self, deliveries: list[RawDelivery]) -> list[RawDelivery]:
        new: list[RawDelivery] = []
        restarted_ordinals: set[int] = set()
        for delivery in deliveries:
            ordinal = self.ordinal(delivery)
            if ordinal in restarted_ordinals:
                continue
            if isinstance(delivery, Gap) or self._is_new(ordinal, delivery):
                new.append(delivery)
            elif DegradedReason.IDENTITY in self.subscriber.status(delivery.source, delivery.rank).degraded_reasons:
                restarted_ordinals.add(ordinal)
                self._follow_from_start(ordinal)
            elif isinstance(delivery, RawBatch):
                # A skipped batch is decoded, because its findings affect the upstream's trust in this process.
                batch = delivery.decode()
                if (report := inspect_events(batch.events, batch.rejected)) is not None:
                    self.subscriber.report(delivery, report)
        return new

    def _is_new(self, ordinal: int, delivery: RawBatch | Reset) -> bool:
        newest = self._forwarded.get(ordinal)
        if newest is None:
            return True
        if isinstance(delivery, RawBatch) and (delivery.incarnation, delivery.seq) <= newest:
            return False
        # The deliveries are in order, so all deliveries after this one are new.
        del self._forwarded[ordinal]
        return True

    def _follow_from_start(self, ordinal: int) -> None:
        """Follow an upstream from number 0, because its numbers can belong to another incarnation."""
        source = self.sources[ordinal]
        log.warning(
            "%s rank %d: not verified to be the same incarnation as before the relay restarted; following it from its start",
            source.label,
            source.rank,
        )
        incarnation = self.subscriber.status(source.label, source.rank).incarnation
        del self._forwarded[ordinal]
        self.subscriber.remove(source.label, source.rank)
        self.subscriber.add(source, resume=Checkpoint(source.label, source.rank, incarnation, -1))


def lowest_trust(statuses: Sequence[StreamStatus]) -> Trust:
    """Return the lowest trust of streams (ATTESTED only if all streams are); the reason names the streams with this trust."""
    return _combine_trust({(status.source, status.rank): status.trust for status in statuses})


def _combine_trust(trusts: Mapping[tuple[str, int], Trust]) -> Trust:
    lowest = min((trust.name for trust in trusts.values()), key=trust_order)
    if lowest == Trust.EXACT.name:
        return Trust.ATTESTED if all(trust.attested for trust in trusts.values()) else Trust.EXACT
    reasons = [f"{source} rank {rank}: {trust}" for (source, rank), trust in trusts.items() if trust.name == lowest]
    return Trust(lowest, "; ".join(reasons))


def resume_point(checkpoint: Checkpoint, position: Position | None) -> Checkpoint:
    """Return the checkpoint to resume from; `position` is the newest position of the upstream in the journal.

    If the upstream began a new incarnation after the checkpoint, the checkpoint's number does not show which batches were sent.
    Then the upstream is followed from its start, with a `Reset`.
    """
    if position is None or position[0] == checkpoint.incarnation:
        return checkpoint
    return Checkpoint(checkpoint.source, checkpoint.rank, max(position[0], checkpoint.incarnation), -1)


# --- the blocks of each upstream

_BLOCKS_PER_PIECE: Final = 500_000
"""Number of blocks in one piece of `UpstreamBlocks.dump`: a few megabytes."""


class RemovalPlacement(NamedTuple):
    """The placement of a copy, as given by the fields of a removal event."""

    medium: str | None
    group_idx: int | None
    locality: str | None
    ownership: str | None


PLACEMENT_FIELDS: Final = frozenset(RemovalPlacement._fields)


class UpstreamBlocks:
    """Counts, for each placement, the copies of each block that one upstream holds.

    `fields` are those fields of a placement that the stream's dialect has; all other fields are ignored.
    """

    def __init__(self, fields: frozenset[str] = PLACEMENT_FIELDS) -> None:
        self._fields: Final = fields
        self._placements: dict[RemovalPlacement, Counter[int]] = {}
        self._certain: dict[RemovalPlacement, set[int]] = {}
        """Blocks of each placement below the device tier that certainly exist: no clear without a tier followed their store."""
        self._count = 0
        self._digest = 0

    def __len__(self) -> int:
        return self._count

    @property
    def digest(self) -> int:
        """The attestation (`Heartbeat.attestation`) that an engine with exactly these blocks sends."""
        return self._digest & ATTESTATION_MASK

    def apply(self, events: Iterable[KVEvent]) -> list[KVEvent]:
        """Record the events of the upstream, and return them for the shared stream: clears become removals.

        All returned events name a group, because without a group consumers do not count the copies of several upstreams.
        """
        shared_events: list[KVEvent] = []
        for event in events:
            if not isinstance(event, AllBlocksCleared) and event.group_idx is None:
                event = msgspec.structs.replace(event, group_idx=0)  # noqa: PLW2901 - the event with a group
            shared_events += _APPLY_BY_TYPE[type(event)](self, event)
        return shared_events

    def clear(self) -> list[KVEvent]:
        """Forget all blocks, and return their removals."""
        return self._remove_placements(self._placements)

    def removals(self) -> list[KVEvent]:
        """Return removals of all blocks, without forgetting them."""
        return list(chain.from_iterable(self._removals(placement, copies) for placement, copies in self._placements.items()))

    def dump(self) -> list[Any]:
        """Return the blocks for `load`, in pieces of a few megabytes that msgspec can encode."""
        pieces: list[Any] = []
        for placement, copies in self._placements.items():
            hashes, counts = list(copies), list(copies.values())
            ranges = (slice(start, start + _BLOCKS_PER_PIECE) for start in range(0, len(hashes), _BLOCKS_PER_PIECE))
            pieces += [[list(placement), hashes[piece], counts[piece]] for piece in ranges]
        return pieces

    def load(self, piece: Any) -> None:
        """Add one piece of a `dump`. Raises `msgspec.ValidationError`."""
        placement, hashes, counts = msgspec.convert(piece, tuple[RemovalPlacement, list[int], list[int]])
        added = Counter(dict(zip(hashes, counts, strict=True)))
        copies = self._placements.setdefault(placement, Counter())
        before = len(copies)
        copies.update(added)
        self._count += len(copies) - before
        self._digest += _digest_of(placement, added.elements())
        if not _is_attested(placement):
            self._certain.setdefault(placement, set()).update(hashes)

    def _apply_clear(self, event: AllBlocksCleared) -> list[KVEvent]:
        scope = scope_of(event)
        medium, group = scope.get("medium"), scope.get("group_idx")
        if medium == MEDIUM_ALL:
            return self.clear()
        tier = None if medium is None else tier_of(medium)
        held = {placement: tier_of(placement.medium) for placement in self._placements}
        if scope and tier in {None, *TIERS, *held.values()}:
            return self._remove_placements(at for at in held if tier in {None, held[at]} and group in {None, at.group_idx})
        # SGLang clears host memory as well as the GPU; SGLang's name for host memory is `MEDIUM_CPU_PINNED`.
        tiers = TIERS[: 1 + any(placement.medium == MEDIUM_CPU_PINNED for placement in held)]
        removals = self._remove_placements(at for at in held if held[at] in tiers and at.locality != "REMOTE")
        return [*removals, *chain.from_iterable(map(self._mark_uncertain, self._placements))]

    def _mark_uncertain(self, placement: RemovalPlacement) -> Iterator[KVEvent]:
        """Mark all copies of a placement as uncertain. Events that store and remove a further copy do so at consumers."""
        for removal in self._removals(placement, Counter(self._certain.pop(placement, ()))):
            yield BlockStored(removal.block_hashes, None, [], 0, **placement._asdict())
            yield removal

    def _apply_store(self, event: BlockStored) -> list[KVEvent]:
        placement = self._placement_of(event)
        events: list[KVEvent] = []
        if not _is_attested(placement):
            certain, known = self._certain.setdefault(placement, set()), self._placements.get(placement, ())
            repeated_hashes = [hash_ for hash_ in dict.fromkeys(event.block_hashes) if hash_ in known and hash_ not in certain]
            events = self._apply_removal(BlockRemoved(repeated_hashes, **placement._asdict())) if repeated_hashes else []
            self._certain.setdefault(placement, set()).update(event.block_hashes)
        copies = self._placements.setdefault(placement, Counter())
        before = len(copies)
        for block_hash in event.block_hashes:
            copies[block_hash] += 1
        self._count += len(copies) - before
        self._digest += _digest_of(placement, event.block_hashes)
        return [*events, event]

    def _apply_removal(self, event: BlockRemoved) -> list[KVEvent]:
        placement = self._placement_of(event)
        removed = self._remove_copies(placement, event.block_hashes)
        if len(removed) == len(event.block_hashes):
            return [event]
        missing = list((Counter(event.block_hashes) - Counter(removed)).elements())
        # As in the index, a removal without a block can mean placements that differ only in what one of the two does not state.
        others = [other for other in self._placements if other != placement and _may_mean(placement, other)]
        removals = [BlockRemoved(self._remove_copies(other, missing), **other._asdict()) for other in others]
        removals.insert(0, msgspec.structs.replace(event, block_hashes=removed, block_digests=None))
        return [removal for removal in removals if removal.block_hashes]

    def _remove_copies(self, placement: RemovalPlacement, block_hashes: list[int]) -> list[int]:
        """Remove one copy of each hash, and return the hashes that had a copy."""
        copies = self._placements.get(placement, Counter())
        removed = [block_hash for block_hash in block_hashes if self._remove_copy(copies, block_hash)]
        if placement in self._certain:
            self._certain[placement].difference_update(block_hash for block_hash in removed if block_hash not in copies)
        self._digest -= _digest_of(placement, removed)
        if not copies:
            self._placements.pop(placement, None)
            self._certain.pop(placement, None)
        return removed

    def _remove_copy(self, copies: Counter[int], block_hash: int) -> bool:
        """Remove one copy of a block; return False if the upstream holds no copy of it."""
        left = copies[block_hash] - 1
        if left > 0:
            copies[block_hash] = left
        elif left == 0:
            del copies[block_hash]
            self._count -= 1
        return left >= 0

    def _remove_placements(self, placements: Iterable[RemovalPlacement]) -> list[KVEvent]:
        removals: list[KVEvent] = []
        for placement in list(placements):
            copies = self._placements.pop(placement)
            self._certain.pop(placement, None)
            self._count -= len(copies)
            self._digest -= _digest_of(placement, copies.elements())
            removals += self._removals(placement, copies)
        return removals

    @staticmethod
    def _removals(placement: RemovalPlacement, copies: Counter[int]) -> Iterator[BlockRemoved]:
        hashes = list(copies.elements())
        for start in range(0, len(hashes), limit := DEFAULT_WIRE_LIMITS.max_hashes):
            yield BlockRemoved(hashes[start : start + limit], **placement._asdict())

    def _placement_of(self, event: BlockStored | BlockRemoved) -> RemovalPlacement:
        placement = RemovalPlacement(event.medium, event.group_idx, event.locality, event.ownership)
        if self._fields == PLACEMENT_FIELDS:
            return placement
        fields = {name: value if name in self._fields else None for name, value in placement._asdict().items()}
        return RemovalPlacement(**fields)


def _may_mean(one: RemovalPlacement, other: RemovalPlacement) -> bool:
    pairs = zip(one, other, strict=True)
    return tier_of(one.medium) == tier_of(other.medium) and all(None in pair or pair[0] == pair[1] for pair in [*pairs][1:])


def _is_attested(placement: RemovalPlacement) -> bool:
    return placement.locality != "REMOTE" and tier_of(placement.medium) == TIERS[0]


def _digest_of(placement: RemovalPlacement, hashes: Iterable[int]) -> int:
    if not _is_attested(placement):
        return 0
    term = attestation_group_term(placement.group_idx)
    return sum(block_hash ^ term for block_hash in hashes)


_APPLY_BY_TYPE: Final[dict[type[KVEvent], Callable[[UpstreamBlocks, Any], list[KVEvent]]]] = {
    AllBlocksCleared: UpstreamBlocks._apply_clear,  # noqa: SLF001 - the table of this class
    BlockStored: UpstreamBlocks._apply_store,  # noqa: SLF001 - the table of this class
    BlockRemoved: UpstreamBlocks._apply_removal,  # noqa: SLF001 - the table of this class
}
