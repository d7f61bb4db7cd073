"""How far what is known of a stream can be trusted, and why not further."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, ClassVar, Final, final


class DegradedReason(enum.Enum):
    """Why a stream is DEGRADED; the value is the sentence an operator reads."""

    NO_REPLAY = "no replay endpoint: what is lost stays lost, and losses at the tail cannot be seen"
    REPLAY_SILENT = "the replay endpoint does not answer"
    REPLAY_FOREIGN = "the replay endpoint answers for another stream"
    REPLAY_UNCONFIRMED = "the replay endpoint contradicted the live stream and has not agreed with it since"
    IDENTITY = "after a reconnect it could not be proven that the publisher is still the same process"
    LOST = "batches are lost for good, or history is truncated"
    REJECTED = "a batch held events that could not be read"
    DIVERGED = "what was delivered is not what its sender holds"
    SENDER = "its sender does not trust what it tells"
    SILENT = "its sender is not heard, although it said that it speaks regularly"
    REPLAY_UNPROVEN = "no live batch has confirmed yet what the replay endpoint says"


REASONS_ENDED_BY_CLEAR: Final = frozenset(
    {DegradedReason.IDENTITY, DegradedReason.LOST, DegradedReason.REJECTED, DegradedReason.DIVERGED}
)
"""After AllBlocksCleared nothing older matters: these doubts were about older events. An agreement ends them as well."""
PERSISTENT_REASONS: Final = REASONS_ENDED_BY_CLEAR | {DegradedReason.REPLAY_UNCONFIRMED, DegradedReason.SENDER}
"""These are about what was delivered, or about who delivered it. The others are about an endpoint, and arise anew."""


@final
class Trust:
    """State of a stream: `CONNECTING -> REPLAYING -> EXACT -> DEGRADED(reason) -> STALE`.

    Two values are equal when their states are; `reason` is for people. EXACT says that every batch since the publisher's start,
    or since a clear or an agreement, up to the newest one known, was delivered, that a live batch of this connection has shown
    replay to be of the same publisher, and that the sender says no less of itself.
    """

    __slots__ = ("name", "reason")
    name: str
    """CONNECTING, REPLAYING, EXACT, DEGRADED or STALE."""
    reason: str

    CONNECTING: ClassVar[Trust]
    """No connection yet."""
    REPLAYING: ClassVar[Trust]
    """Catching up, or proving after a reconnect that the publisher is the same."""
    EXACT: ClassVar[Trust]
    DEGRADED: ClassVar[Trust]
    """Following, but not exact; `reason` says why."""
    STALE: ClassVar[Trust]
    """What was delivered ages: the connection is gone, or not yet there after a restart of this process; or the sender, though
    it promised to speak, is silent, or says STALE of itself."""

    def __init__(self, name: str, reason: str = "") -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "reason", reason)

    def with_reason(self, reason: str) -> Trust:
        """The same state with a reason."""
        return Trust(self.name, reason)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Trust is immutable; cannot set {name} to {value!r}")

    def __eq__(self, other: object) -> bool:
        return self.name == other.name if isinstance(other, Trust) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name

    def __repr__(self) -> str:
        return f"<Trust {self}>"


for _name in ("CONNECTING", "REPLAYING", "EXACT", "DEGRADED", "STALE"):
    setattr(Trust, _name, Trust(_name))

_RANKS: Final = {name: rank for rank, name in enumerate(("STALE", "CONNECTING", "REPLAYING", "DEGRADED", "EXACT"))}


def trust_order(name: str) -> int:
    """Orders the names of states, STALE first and EXACT last; -1 for a name of none."""
    return _RANKS.get(name, -1)


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


class TrustLedger:
    """The doubts of one stream, each with the last number in doubt because of it.

    A consumer that reads payloads itself tells of a clear or of unreadable events some time after the batch was handed out, in
    any order. The numbers make the outcome the same as if each batch had been read before the next one was delivered.
    """

    def __init__(self) -> None:
        self._through: dict[DegradedReason, _Marks] = {}
        self._cleared = self._agreed = -1

    def __bool__(self) -> bool:
        return bool(self._through)

    def __contains__(self, doubt: DegradedReason) -> bool:
        return doubt in self._through

    def __iter__(self) -> Iterator[DegradedReason]:
        """In the order in which `DegradedReason` lists them."""
        if len(self._through) <= 1:  # nearly always, and asked for with every turn of a subscriber
            return iter(tuple(self._through))
        return (doubt for doubt in DegradedReason if doubt in self._through)

    def add(self, doubt: DegradedReason, through: int) -> None:
        """DegradedReason everything up to number `through`."""
        marks = self._through.get(doubt)
        if marks is None:
            marks = self._through[doubt] = _Marks()
        marks.add(through)

    def discard(self, doubt: DegradedReason) -> None:
        """A doubt was settled."""
        self._through.pop(doubt, None)

    def clear(self, seq: int) -> None:
        """Batch `seq` clears everything: what was doubted before it no longer matters."""
        self._cleared = max(seq, self._cleared)
        self._heal(seq)

    def reject(self, seq: int) -> None:
        """Events of batch `seq` could not be read; that matters unless later it is known to make no difference."""
        if seq >= self._cleared and seq > self._agreed:
            self.add(DegradedReason.REJECTED, seq)

    def match_digest(self, seq: int) -> None:
        """After batch `seq` the state is the sender's: what was doubted up to there has made no difference."""
        self._agreed = max(seq, self._agreed)
        self._heal(seq)
        rejected = self._through.get(DegradedReason.REJECTED)
        if rejected is not None and rejected.last == seq:
            self.discard(DegradedReason.REJECTED)

    def mismatch_digest(self, seq: int) -> bool:
        """After batch `seq` the state is not the sender's. False where a later clear or agreement has ended that already."""
        matters = seq >= self._cleared and seq > self._agreed
        if matters:
            self.add(DegradedReason.DIVERGED, seq)
        return matters

    def explains(self, seq: int) -> bool:
        """Whether it is known already why the state after batch `seq` may not be the sender's."""
        return any(doubt in REASONS_ENDED_BY_CLEAR and marks.first <= seq for doubt, marks in self._through.items())

    def persistent(self) -> dict[DegradedReason, int]:
        """Those that outlive a process, each with the last number in doubt."""
        return {doubt: self._through[doubt].last for doubt in self if doubt in PERSISTENT_REASONS}

    def begin_life(self) -> None:
        """What was doubted about events, or told by the sender, is about a life that has ended."""
        self._cleared = self._agreed = -1
        self._heal(None)
        self.discard(DegradedReason.SENDER)
        self.discard(DegradedReason.SILENT)

    def _heal(self, before: int | None) -> None:
        for doubt in REASONS_ENDED_BY_CLEAR & self._through.keys():
            if before is None or self._through[doubt].heal(before):
                del self._through[doubt]
