"""How far what is known of a stream can be trusted, and why not further."""

from __future__ import annotations

import enum
from typing import Any, ClassVar, Final, final


class Doubt(enum.Enum):
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


HEALED_BY_CLEAR: Final = frozenset({Doubt.IDENTITY, Doubt.LOST, Doubt.REJECTED, Doubt.DIVERGED})
"""After AllBlocksCleared nothing older matters: these doubts were about older events. An agreement ends them as well."""
KEPT_BY_CHECKPOINT: Final = HEALED_BY_CLEAR | {Doubt.REPLAY_UNCONFIRMED, Doubt.SENDER}
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

    def because(self, reason: str) -> Trust:
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


def rank_of(name: str) -> int:
    """Orders the names of states, STALE first and EXACT last; -1 for a name of none."""
    return _RANKS.get(name, -1)
