"""What a stream doubts, and since which number: a clear heals what was before it, whenever it is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvevents.stream.trust import HEALED_BY_CLEAR, KEPT_BY_CHECKPOINT, Doubt

MAX_MARKS: Final = 64
"""Numbers that are remembered of one doubt: the newest ones. Of those before them it is known where they begin."""


class _Marks:
    """Of one doubt the last number that is in doubt for each of its causes.

    Doubts come one by one, and what consumers find may come much later: a slow one has lost hundreds of times before it says
    what was in the batches between. Where there were more than `MAX_MARKS`, anything between the first and the oldest that is
    still known counts as in doubt: that a difference is explained is said too often then, and never too seldom.
    """

    __slots__ = ("_newest", "_since")

    def __init__(self) -> None:
        self._newest: list[int] = []
        """Rising, and never empty once there was one, unless all are healed."""
        self._since: int | None = None
        """The first of those that are no longer known, all of which are below the newest."""

    def add(self, through: int) -> None:
        newest = self._newest
        newest.append(through)
        if len(newest) > 1 and newest[-2] >= through:
            newest.sort()
        if len(newest) > MAX_MARKS:
            forgotten = newest.pop(0)
            self._since = forgotten if self._since is None else min(self._since, forgotten)

    def heal(self, before: int) -> bool:
        """Forget those below a number; whether none is left."""
        if self._since is not None:
            self._since = max(self._since, before) if before <= self._newest[0] else None
        self._newest = [mark for mark in self._newest if mark >= before]
        return not self._newest

    @property
    def first(self) -> int:
        return self._newest[0] if self._since is None else self._since

    @property
    def last(self) -> int:
        return self._newest[-1]

    def __len__(self) -> int:
        return len(self._newest)


class Doubts:
    """The doubts of one stream, each with the last number in doubt because of it.

    A consumer that reads payloads itself tells of a clear or of unreadable events some time after the batch was handed out, in
    any order. The numbers make the outcome the same as if each batch had been read before the next one was delivered.
    """

    def __init__(self) -> None:
        self._through: dict[Doubt, _Marks] = {}
        self._cleared = self._agreed = -1

    def __bool__(self) -> bool:
        return bool(self._through)

    def __contains__(self, doubt: Doubt) -> bool:
        return doubt in self._through

    def __iter__(self) -> Iterator[Doubt]:
        """In the order in which `Doubt` lists them."""
        if len(self._through) <= 1:  # nearly always, and asked for with every turn of a subscriber
            return iter(tuple(self._through))
        return (doubt for doubt in Doubt if doubt in self._through)

    def add(self, doubt: Doubt, through: int) -> None:
        """Doubt everything up to number `through`."""
        marks = self._through.get(doubt)
        if marks is None:
            marks = self._through[doubt] = _Marks()
        marks.add(through)

    def discard(self, doubt: Doubt) -> None:
        """A doubt was settled."""
        self._through.pop(doubt, None)

    def clear(self, seq: int) -> None:
        """Batch `seq` clears everything: what was doubted before it no longer matters."""
        self._cleared = max(seq, self._cleared)
        self._heal(seq)

    def reject(self, seq: int) -> None:
        """Events of batch `seq` could not be read; that matters unless later it is known to make no difference."""
        if seq >= self._cleared and seq > self._agreed:
            self.add(Doubt.REJECTED, seq)

    def agree(self, seq: int) -> None:
        """After batch `seq` the state is the sender's: what was doubted up to there has made no difference."""
        self._agreed = max(seq, self._agreed)
        self._heal(seq)
        rejected = self._through.get(Doubt.REJECTED)
        if rejected is not None and rejected.last == seq:
            self.discard(Doubt.REJECTED)

    def diverge(self, seq: int) -> bool:
        """After batch `seq` the state is not the sender's. False where a later clear or agreement has ended that already."""
        matters = seq >= self._cleared and seq > self._agreed
        if matters:
            self.add(Doubt.DIVERGED, seq)
        return matters

    def explains(self, seq: int) -> bool:
        """Whether it is known already why the state after batch `seq` may not be the sender's."""
        return any(doubt in HEALED_BY_CLEAR and marks.first <= seq for doubt, marks in self._through.items())

    def kept(self) -> dict[Doubt, int]:
        """Those that outlive a process, each with the last number in doubt."""
        return {doubt: self._through[doubt].last for doubt in self if doubt in KEPT_BY_CHECKPOINT}

    def begin_life(self) -> None:
        """What was doubted about events, or told by the sender, is about a life that has ended."""
        self._cleared = self._agreed = -1
        self._heal(None)
        self.discard(Doubt.SENDER)
        self.discard(Doubt.SILENT)

    def _heal(self, before: int | None) -> None:
        for doubt in HEALED_BY_CLEAR & self._through.keys():
            if before is None or self._through[doubt].heal(before):
                del self._through[doubt]
