"""Reports: what reading and applying a delivered batch has shown about its stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvevents.events import AllBlocksCleared, BlockRemoved, Heartbeat, KVEvent
from kvevents.wire import Rejected


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What a stream can learn only from a consumer that reads, and in part applies, the batch; see `Subscriber.report`."""

    rejected: tuple[Rejected, ...] = ()
    """Events that could not be decoded."""
    cleared: bool = False
    """Whether the batch has an AllBlocksCleared for all tiers and groups."""
    heartbeat: Heartbeat | None = None
    """The last heartbeat in the batch. Its digest is of everything up to the end of the batch, wherever the heartbeat is."""
    digest_matches: bool | None = None
    """Whether the state after the batch has the heartbeat's digest; None if there is no digest or the state is unknown."""
    attestation_matches: bool | None = None
    """Whether the state after the batch is that of the engine's own cache, as the heartbeat's attestation says; None if there
    is no attestation or the state is unknown."""


def inspect_events(events: Iterable[KVEvent], rejected: tuple[Rejected, ...] = ()) -> BatchReport | None:
    """Return what the events of a batch show by themselves; None if that is nothing."""
    cleared, heartbeat = False, None
    for event in events:
        if type(event) is BlockRemoved:
            heartbeat = event.heartbeat or heartbeat
        elif type(event) is AllBlocksCleared:
            cleared = cleared or event.unrecognised is None
    return BatchReport(rejected, cleared, heartbeat) if rejected or cleared or heartbeat is not None else None
