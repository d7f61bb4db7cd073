"""What a relay writes down beside its batches: how far its upstreams were followed, and what its journal may begin with.

Without a journal nothing is written, and the checkpoints are known all the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from kvevents.publisher.buffer import ReplayBuffer
from kvevents.relay.beginning import Mark, parts_of
from kvevents.relay.forwarding import Forwarding
from kvevents.relay.journal import Journal
from kvevents.relay.output import OWN, Output
from kvevents.relay.spelling import Spelling
from kvevents.relay.upstreams import Upstreams
from kvevents.stream import Checkpoint, Doubt, Gap, Reset
from kvevents.subscriber import StreamStatus

MARK_SECONDS: Final = 1.0
"""Between two notes of how far the upstreams were followed: what is asked for again after a kill, and left out."""
COLLAPSE_AGAIN_SECONDS: Final = 2.0
"""Between two attempts to give the journal a snapshot: what cannot be told now may be later."""


class Keeping:
    """Marks and snapshots of one relay. `checkpoints` are those that its journal has already."""

    def __init__(
        self,
        journal: Journal | None,
        fingerprint: str,
        upstreams: Upstreams,
        forwarding: Forwarding,
        spelling: Spelling,
        output: Output,
        buffer: ReplayBuffer,
        checkpoints: Sequence[Checkpoint],
    ) -> None:
        self._journal: Final = journal
        self._fingerprint: Final = fingerprint
        self._upstreams: Final = upstreams
        self._forwarding: Final = forwarding
        self._spelling: Final = spelling
        self._output: Final = output
        self._buffer: Final = buffer
        self.checkpoints = list(checkpoints)
        """By ordinal of the upstream, as they were written down last."""
        self._marked = -1
        self._mark_at = self._collapse_at = -math.inf
        self._doubts: list[frozenset[Doubt]] = []
        """Of upstreams, as of the last mark."""

    def soon(self) -> None:
        """Mark as soon as everything that was received has been sent."""
        self._mark_at = -math.inf

    def reset(self, ordinal: int, reset: Reset) -> None:
        """Before what a reset leads to. From here on no checkpoint of before counts: see `upstreams.agreeing`."""
        if self._journal is not None:
            self._journal.reset(ordinal, reset.incarnation)

    def lost(self, ordinal: int, gap: Gap) -> None:
        """Note the doubt of a gap, before the batches behind it are known."""
        checkpoint = self.checkpoints[ordinal]
        if checkpoint.incarnation == gap.incarnation:
            doubts = {**checkpoint.doubts, Doubt.LOST.name: gap.last}
            self.checkpoints[ordinal] = msgspec.structs.replace(checkpoint, doubts=doubts)
            self.write()

    def tend(self, seen: Sequence[StreamStatus], now: float) -> None:
        """Mark when it is time, or upstreams, as they were `seen`, are doubted otherwise; let the journal do what is due."""
        journal = self._journal
        if journal is None:
            return
        due = now >= self._mark_at + MARK_SECONDS and self._output.number != self._marked
        if due or [each.doubts for each in seen] != self._doubts:
            self._mark_at = now
            self.mark(seen)
        journal.tick(now)
        if journal.wants_snapshot and now >= self._collapse_at:
            self._collapse_at = now + COLLAPSE_AGAIN_SECONDS
            self._collapse(journal, seen)

    def mark(self, seen: Sequence[StreamStatus]) -> None:
        """How far the upstreams were followed: when everything received has been sent."""
        self._marked = self._output.number
        self._doubts = [each.doubts for each in seen]
        self.checkpoints = self._upstreams.checkpoints()
        self.write()

    def write(self) -> None:
        """Write the last mark down, with how blocks are spelled now."""
        if self._journal is not None:
            mark = Mark(self._fingerprint, self.checkpoints, self._spelling.form, self._forwarding.salted)
            self._journal.mark(msgspec.msgpack.encode(mark))

    def _collapse(self, journal: Journal, seen: Sequence[StreamStatus]) -> None:
        """Have the journal begin with a snapshot: what has left the buffer, and then what has not."""
        last = self._output.number - 1
        found = self._buffer.collapsed_at(last)
        if found is None:
            return
        collapsed, kept = found
        if collapsed is None and (journal.state == "disk" or self._has_history()):
            return
        number = -1 if collapsed is None else collapsed.number
        parts = parts_of(collapsed, last, self._forwarding.residents())
        partial = collapsed is not None and collapsed.partial
        self.mark(seen)  # the tail does not say which upstream said what, so this has to be as of its end
        journal.snapshot(number, parts, kept, OWN, partial=partial)

    def _has_history(self) -> bool:
        """Whether something has left the buffer."""
        history = self._buffer.history_stats()
        return history is None or history.batches > 0
