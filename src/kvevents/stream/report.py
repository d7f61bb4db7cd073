"""What reading a delivered batch has shown about its stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvevents.events import AllBlocksCleared, BlockRemoved, Heartbeat, KVEvent
from kvevents.wire import Rejected


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What a stream cannot know unless the batch is read, and in part unless it is applied; see `Subscriber.report`."""

    rejected: tuple[Rejected, ...] = ()
    """Events that could not be read."""
    cleared: bool = False
    """Whether it holds an AllBlocksCleared for all tiers and groups."""
    heartbeat: Heartbeat | None = None
    """The last one in the batch: its digest is of everything up to the batch's end, wherever in the batch it stands."""
    digest_matches: bool | None = None
    """Whether the state after the batch has the heartbeat's digest; None without a heartbeat, or where nobody can say."""


def inspect_events(events: Iterable[KVEvent], rejected: tuple[Rejected, ...] = ()) -> BatchReport | None:
    """What the events of a batch show by themselves; None where that is nothing."""
    cleared, heartbeat = False, None
    for event in events:
        if type(event) is BlockRemoved:
            heartbeat = event.heartbeat or heartbeat
        elif type(event) is AllBlocksCleared:
            cleared = cleared or event.unrecognised is None
    return BatchReport(rejected, cleared, heartbeat) if rejected or cleared or heartbeat is not None else None
