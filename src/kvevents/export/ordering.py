"""Batches of one recorded stream in the order of their numbers, each once, life by life.

Theory of operation. Live frames come in order, with holes; replayed ones come later, with what the recorder asked for. A batch
that is ahead waits for those before it until they come, until a note in the recording says that they never will, or until too
many wait: then there is a gap. A live number that is not above the last one, and not the same batch again, begins a new life of
the publisher, and so does a live batch that contradicts what a replay said of its number.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvevents.export.limits import ExportLimits

REMEMBERED: Final = 16_384
"""Batches by which repetitions are recognised; engines keep 10,000 for replay."""


class Arrived(NamedTuple):
    """A batch as it stands in a recording."""

    topic: bytes
    seq: int
    payload: bytes
    t: float | None
    """When it was recorded, in seconds since the epoch."""
    replayed: bool


class Placed(NamedTuple):
    """A batch in its place."""

    life: int
    gap_before: int
    """Batches that are missing right before it."""
    batch: Arrived


class Ordering:
    """Feed it `receive`, `give_up` and `restart`, in the recording's order; each returns what is next. `finish` ends it."""

    def __init__(self, limits: ExportLimits) -> None:
        self.life = 0
        self.duplicates = 0
        """Batches that came again, live or replayed."""
        self.compacted = 0
        """Batches that a snapshot represents."""
        self.late = 0
        """Replayed batches that came when their place was given up."""
        self.conflicting = 0
        """Replayed batches that differ from what was there under their number: they are of another life."""
        self._limits = limits
        self._begin()

    def _begin(self) -> None:
        self._expected = 0
        self._newest_live = -1
        self._gap = 0
        self._held: dict[int, Arrived] = {}
        self._held_bytes = 0
        self._seen: dict[int, int] = {}

    def receive(self, batch: Arrived) -> list[Placed]:
        """Take one batch."""
        same = self._same(batch)
        if not batch.replayed:
            if same is False or (same is None and batch.seq <= self._newest_live):
                return [*self.restart(), *self._admit(batch)]
            self._newest_live = max(self._newest_live, batch.seq)
        if same is not None:
            self.duplicates += same
            self.conflicting += not same
            return []
        return self._admit(batch)

    def give_up(self, first: int, last: int) -> list[Placed]:
        """Batches `first` to `last` will never come: whoever recorded has said so."""
        if not first <= self._expected <= last:
            return []
        self._skip_to(last + 1)
        return self._drain()

    def skip_compacted(self, first: int, last: int) -> list[Placed]:
        """Batches `first` to `last` are not in the recording because the snapshot that follows represents them."""
        if not first <= self._expected <= last:
            return []
        self.compacted += last + 1 - self._expected
        self._expected = last + 1
        return self._drain()

    def restart(self) -> list[Placed]:
        """What comes next is of a new life. Returns what was still waiting."""
        out = self.finish()
        self.life += self._expected > 0
        self._begin()
        return out

    def finish(self) -> list[Placed]:
        """Nothing comes any more. Returns what was still waiting."""
        out: list[Placed] = []
        while self._held:
            out += self._give_up_before_held()
        return out

    def _same(self, batch: Arrived) -> bool | None:
        """Whether it is what came under its number; None where nothing has, or nobody remembers."""
        held = self._held.get(batch.seq)
        if held is not None:
            return held.payload == batch.payload
        seen = self._seen.get(batch.seq)
        return None if seen is None else seen == hash(batch.payload)

    def _admit(self, batch: Arrived) -> list[Placed]:
        if not batch.replayed:
            self._newest_live = max(self._newest_live, batch.seq)
        if batch.seq < self._expected:
            self.late += 1
            return []
        if batch.seq == self._expected:
            return [self._place(batch), *self._drain()]
        self._held[batch.seq] = batch
        self._held_bytes += len(batch.payload)
        if len(self._held) > self._limits.held_batches or self._held_bytes > self._limits.held_bytes:
            return self._give_up_before_held()
        return []

    def _give_up_before_held(self) -> list[Placed]:
        self._skip_to(min(self._held))
        return self._drain()

    def _skip_to(self, seq: int) -> None:
        self._gap += seq - self._expected
        self._expected = seq

    def _drain(self) -> list[Placed]:
        out: list[Placed] = []
        while (batch := self._held.pop(self._expected, None)) is not None:
            self._held_bytes -= len(batch.payload)
            out.append(self._place(batch))
        return out

    def _place(self, batch: Arrived) -> Placed:
        self._expected = batch.seq + 1
        self._seen[batch.seq] = hash(batch.payload)
        if len(self._seen) > REMEMBERED:
            del self._seen[next(iter(self._seen))]
        gap, self._gap = self._gap, 0
        return Placed(self.life, gap, batch)
