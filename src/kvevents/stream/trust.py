"""The trust in a stream, the reasons that lower it, and the publisher's reports about itself in heartbeats."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import ClassVar, Final, Literal, TypeAlias, final

from msgspec import Struct

from kvevents.events import Heartbeat
from kvevents.stream.settings import StreamLimits


class DegradedReason(enum.Enum):
    """Why a stream is DEGRADED. The value is the sentence that operators read."""

    NO_REPLAY = "no replay endpoint: what is lost stays lost, and losses at the tail cannot be seen"
    REPLAY_SILENT = "the replay endpoint does not answer"
    REPLAY_FOREIGN = "the replay endpoint answers for another stream"
    REPLAY_UNCONFIRMED = "the replay endpoint contradicted the live stream, or has batches that do not come live"
    IDENTITY = "after a reconnect, the publisher could not be verified to be the same process"
    LOST = "batches are permanently lost, or history is truncated"
    REJECTED = "a batch held events that could not be read"
    DIVERGED = "the delivered state does not have its publisher's digest"
    UNATTESTED = "the delivered state is not that of the engine's own cache"
    SENDER = "its sender reports that the events might be incomplete"
    SILENT = "the publisher has missed its heartbeats"
    ESTIMATED_MATCHES = "its consumer reports that answers are estimates"
    RANK = "its batches state the rank of another stream of this engine: the ports of ranks are swapped"
    SHARED = "two publishers send as this source in turn: give each its own topic or endpoint"
    REPLAY_UNPROVEN = "no live batch has confirmed yet what the replay endpoint says"

    __hash__ = object.__hash__


REASONS_ENDED_BY_CLEAR: Final = frozenset(
    {DegradedReason.IDENTITY, DegradedReason.LOST, DegradedReason.REJECTED, DegradedReason.DIVERGED, DegradedReason.UNATTESTED}
)
"""Reasons that an AllBlocksCleared ends, because they are about earlier events."""
REASONS_ENDED_BY_DIGEST: Final = REASONS_ENDED_BY_CLEAR - {DegradedReason.UNATTESTED}
"""Reasons that a matching digest ends. A digest is about the stream, but an attestation is about the engine, so only a matching
attestation ends `UNATTESTED`."""
PERSISTENT_REASONS: Final = REASONS_ENDED_BY_CLEAR | {
    DegradedReason.REPLAY_UNCONFIRMED,
    DegradedReason.SENDER,
    DegradedReason.ESTIMATED_MATCHES,
}
"""Reasons that a checkpoint stores, because they are about delivered batches or their publisher. The remaining reasons are
about an endpoint, and a later process determines these reasons again."""


TrustState: TypeAlias = Literal["CONNECTING", "REPLAYING", "EXACT", "DEGRADED", "STALE"]
"""Name of the state of a stream, as in `Trust.name`."""


@final
class Trust(Struct, frozen=True, eq=False):
    """State of a stream: `CONNECTING -> REPLAYING -> EXACT -> DEGRADED(reason) -> STALE`.

    Comparisons (`trust >= Trust.DEGRADED`) order the states from STALE to EXACT; operators read `reason`. EXACT means three
    things. Every batch was delivered, from the publisher's start, a clear or a matching digest up to the newest known batch. A
    live batch of this connection has shown that replay comes from the same publisher, or the engine itself has named its replay
    endpoint. The newest heartbeat of the publisher, if any, reports EXACT.
    """

    name: str
    """CONNECTING, REPLAYING, EXACT, DEGRADED or STALE."""
    reason: str = ""
    attested: bool = False
    """Whether the state is EXACT and the newest attestation of the engine's own cache matched. Only a publisher inside the
    engine sends attestations."""
    unproven: bool = False
    """Whether the state is DEGRADED only because no live batch has confirmed replay yet, as for every idle engine after a
    connect. No batch contradicts replay, so routers count the blocks fully."""
    inexact_tiers: tuple[str, ...] = ()
    """Tiers to which the state does not apply, because the engine announces their stores but no removals
    (`Source.stores_only`). A tier without announced removals has at most the announced blocks."""

    CONNECTING: ClassVar[Trust]
    """No connection yet."""
    REPLAYING: ClassVar[Trust]
    """The stream fetches missing batches, or verifies after a reconnect that the publisher is the same."""
    EXACT: ClassVar[Trust]
    ATTESTED: ClassVar[Trust]
    """EXACT and attested."""
    DEGRADED: ClassVar[Trust]
    """Batches are delivered, but the state might be inexact; `reason` says why."""
    STALE: ClassVar[Trust]
    """The delivered state might be outdated: the connection was lost, a restarted process has not connected yet, or the
    publisher has missed its heartbeats or reports that it is STALE."""

    def with_reason(self, reason: str) -> Trust:
        """Return this trust with the same state and a different reason."""
        # A service calls `with_reason` ten times a second for each lost engine; `replace` would take more than twice as long.
        return Trust(self.name, reason, self.attested, self.unproven, self.inexact_tiers)

    def of_tier(self, tier: str) -> Trust:
        """Return the trust in the blocks of one tier, such as `cpu`: at most DEGRADED if it is one of `inexact_tiers`."""
        if tier not in self.inexact_tiers or trust_order(self.name) <= trust_order("DEGRADED"):
            return self
        return Trust("DEGRADED", f"the engine announces no removals from {tier}")

    def __eq__(self, other: object) -> bool:
        return self.name == other.name if isinstance(other, Trust) else NotImplemented

    __ne__ = object.__ne__  # the inherited `__ne__` of a struct compares identities

    def __hash__(self) -> int:
        return hash(self.name)

    def __lt__(self, other: object) -> bool:
        """Compare states: STALE < CONNECTING < REPLAYING < DEGRADED < EXACT."""
        return trust_order(self.name) < trust_order(other.name) if isinstance(other, Trust) else NotImplemented

    def __le__(self, other: object) -> bool:
        return trust_order(self.name) <= trust_order(other.name) if isinstance(other, Trust) else NotImplemented

    def __str__(self) -> str:
        reason = self.reason or ("attested" if self.attested else "")
        if self.inexact_tiers:
            reason = f"{reason}; " * bool(reason) + f"without removals: {', '.join(self.inexact_tiers)}"
        return f"{self.name} ({reason})" if reason else self.name

    def __repr__(self) -> str:
        return f"<Trust {self}>"


Trust.CONNECTING = Trust("CONNECTING")
Trust.REPLAYING = Trust("REPLAYING")
Trust.EXACT = Trust("EXACT")
Trust.ATTESTED = Trust("EXACT", attested=True)
Trust.DEGRADED = Trust("DEGRADED")
Trust.STALE = Trust("STALE")

_STATE_ORDER: Final = {name: order for order, name in enumerate(("STALE", "CONNECTING", "REPLAYING", "DEGRADED", "EXACT"))}


def trust_order(name: str) -> int:
    """Return a number that orders the names of states, from STALE to EXACT; -1 for any other name."""
    return _STATE_ORDER.get(name, -1)


_REASONS_ENDED_BY_ATTESTATION: Final = frozenset({DegradedReason.UNATTESTED})

MAX_MARKS: Final = 64
"""Maximum number of marks (`_Marks`) that a ledger stores for one reason; older marks become one range."""


class _Marks:
    """The marks of one degraded reason: for each cause of the reason, the number of the last batch that it affects.

    A slow consumer can report about a batch after hundreds of later causes, so marks are stored separately. If there are more
    than `max_marks`, every number between the first mark and the oldest stored mark counts as affected. So a digest mismatch
    without a known cause can count as explained, but a mismatch with a known cause always counts as explained.
    """

    __slots__ = ("_first_dropped", "_max_marks", "_newest")

    def __init__(self, max_marks: int) -> None:
        self._max_marks = max_marks
        self._newest: list[int] = []
        """The stored marks in ascending order. After the first `add`, the list is empty only if all marks were removed."""
        self._first_dropped: int | None = None
        """The lowest of the marks that were dropped; all of them are below the stored marks."""

    def add(self, last_affected: int) -> None:
        """Add a mark."""
        newest = self._newest
        newest.append(last_affected)
        if len(newest) > 1 and newest[-2] >= last_affected:
            newest.sort()
        if len(newest) > self._max_marks:
            mark = newest.pop(0)
            self._first_dropped = mark if self._first_dropped is None else min(self._first_dropped, mark)

    def remove_below(self, limit: int) -> bool:
        """Remove the marks below `limit`. Return whether no mark remains."""
        if self._first_dropped is not None:
            self._first_dropped = max(self._first_dropped, limit) if limit <= self._newest[0] else None
        self._newest = [mark for mark in self._newest if mark >= limit]
        return not self._newest

    @property
    def first(self) -> int:
        """The lowest mark."""
        return self._newest[0] if self._first_dropped is None else self._first_dropped

    @property
    def last(self) -> int:
        """The highest mark."""
        return self._newest[-1]

    def __len__(self) -> int:
        return len(self._newest)


class TrustLedger:
    """The degraded reasons of one stream, each with the last number that it affects.

    A consumer that decodes payloads itself reports clears or unreadable events some time after a batch was delivered, in any
    order. Because each reason has a number, the order and the time of reports do not change which reasons remain.
    """

    def __init__(self, max_marks: int = MAX_MARKS) -> None:
        self._max_marks = max_marks
        self._marks: dict[DegradedReason, _Marks] = {}
        self._last_clear = self._last_match = self._last_attestation = self._last_mismatch = self._last_estimate = -1
        self.estimate_reason = ""
        """Why the consumer's prefix matches are estimates, according to its last report."""

    def __bool__(self) -> bool:
        return bool(self._marks)

    def __contains__(self, reason: DegradedReason) -> bool:
        return reason in self._marks

    @property
    def lacks_only_number_0(self) -> bool:
        """Whether no batch is missing except perhaps number 0."""
        return DegradedReason.LOST in self._marks and self._marks[DegradedReason.LOST].last == 0

    @property
    def can_replay(self) -> bool:
        """Whether a replay endpoint exists and is trusted."""
        return DegradedReason.NO_REPLAY not in self._marks and DegradedReason.REPLAY_FOREIGN not in self._marks

    def __iter__(self) -> Iterator[DegradedReason]:
        """Iterate in the order of `DegradedReason`."""
        if len(self._marks) <= 1:  # the usual case, which is fast because subscribers iterate often
            return iter(tuple(self._marks))
        return (reason for reason in DegradedReason if reason in self._marks)

    def add(self, reason: DegradedReason, last_affected: int) -> None:
        """Add a reason that affects all batches up to number `last_affected`."""
        marks = self._marks.get(reason)
        if marks is None:
            marks = self._marks[reason] = _Marks(self._max_marks)
        marks.add(last_affected)

    def discard(self, reason: DegradedReason) -> None:
        """Remove a reason with all its marks."""
        self._marks.pop(reason, None)

    def clear(self, seq: int) -> None:
        """Record that batch `seq` clears all blocks, which ends reasons that affect only earlier batches."""
        self._last_clear = max(seq, self._last_clear)
        self._end_before(REASONS_ENDED_BY_CLEAR, seq)

    def record_rejection(self, seq: int) -> None:
        """Record that events of batch `seq` could not be decoded, unless a later clear or matching digest is known."""
        if seq >= self._last_clear and seq > self._last_match:
            self.add(DegradedReason.REJECTED, seq)

    def record_estimate(self, seq: int, reason: str) -> None:
        """Record why the consumer's prefix matches are estimates from batch `seq` on; empty if the matches are exact."""
        if seq >= self._last_estimate:
            self._last_estimate, self.estimate_reason = seq, reason
            self.discard(DegradedReason.ESTIMATED_MATCHES)
            if reason:
                self.add(DegradedReason.ESTIMATED_MATCHES, seq)

    def match_digest(self, seq: int) -> None:
        """Record that the state after batch `seq` has the right digest, which ends reasons that affect earlier batches."""
        self._last_match = max(seq, self._last_match)
        self._end_before(REASONS_ENDED_BY_DIGEST, seq)
        marks = self._marks.get(DegradedReason.REJECTED)
        if marks is not None and marks.last == seq:
            self.discard(DegradedReason.REJECTED)

    def record_digest_mismatch(self, seq: int) -> bool:
        """Record that the digest of the state after batch `seq` differs from the publisher's digest.

        Return False if a later clear or match is known.
        """
        is_relevant = seq >= self._last_clear and seq > self._last_match
        if is_relevant:
            self.add(DegradedReason.DIVERGED, seq)
        return is_relevant

    def match_attestation(self, seq: int) -> None:
        """Record that the state after batch `seq` matches the engine's own cache."""
        self._last_attestation = max(seq, self._last_attestation)
        self._end_before(_REASONS_ENDED_BY_ATTESTATION, seq + 1)

    def record_attestation_mismatch(self, seq: int) -> bool:
        """Record that the state after batch `seq` differs from the engine's own cache.

        Return False if a later clear or match is known.
        """
        is_relevant = seq >= self._last_clear and seq > self._last_attestation
        if is_relevant:
            self._last_mismatch = max(seq, self._last_mismatch)
            self.add(DegradedReason.UNATTESTED, seq)
        return is_relevant

    @property
    def is_attested(self) -> bool:
        """Whether the newest attestation of this incarnation matched the state."""
        return self._last_attestation > self._last_mismatch

    def explains(self, seq: int) -> bool:
        """Whether a known reason explains why the state after batch `seq` differs from the publisher's."""
        return any(reason in REASONS_ENDED_BY_DIGEST and marks.first <= seq for reason, marks in self._marks.items())

    def persistent_reasons(self) -> dict[DegradedReason, int]:
        """Return the reasons that a checkpoint stores, each with the last batch number that it affects."""
        return {reason: self._marks[reason].last for reason in self if reason in PERSISTENT_REASONS}

    def begin_incarnation(self) -> None:
        """Remove the reasons that are about events or heartbeats of the incarnation that has ended."""
        self._last_clear = self._last_match = self._last_attestation = self._last_mismatch = self._last_estimate = -1
        self._end_before(REASONS_ENDED_BY_CLEAR, None)
        self.discard(DegradedReason.ESTIMATED_MATCHES)
        self.discard(DegradedReason.SENDER)
        self.discard(DegradedReason.SILENT)

    def _end_before(self, reasons: frozenset[DegradedReason], seq: int | None) -> None:
        for reason in reasons & self._marks.keys():
            if seq is None or self._marks[reason].remove_below(seq):
                del self._marks[reason]


# --- heartbeats of the publisher


class MismatchCounter:
    """Counts consecutive heartbeats that differ from the delivered state, so that a stream does not start over endlessly."""

    def __init__(self, max_consecutive: int) -> None:
        self._max_consecutive = max_consecutive
        self._last_mismatch = -1
        self._consecutive = 0

    def match(self, seq: int, *, live: bool) -> None:
        """Record a matching heartbeat in batch `seq`; a replayed batch older than the last mismatch does not count."""
        if live or seq >= self._last_mismatch:
            self._last_mismatch = -1
            self._consecutive = 0

    def allow_resync(self, seq: int) -> bool:
        """Count a mismatch after batch `seq`. Return whether the stream should fetch everything again."""
        self._last_mismatch = max(seq, self._last_mismatch)
        self._consecutive += 1
        return self._consecutive <= self._max_consecutive


class HeartbeatMonitor:
    """Records the heartbeats of one publisher and the results of their comparisons; `Deliverer` decides how to react.

    A publisher that sends no heartbeats is trusted and never counts as silent.
    """

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._heartbeat: Heartbeat | None = None
        self.incarnations = MismatchCounter(limits.max_consecutive_resyncs)
        """Counts heartbeats whose incarnation differs from that of the previous heartbeat."""
        self.digests = MismatchCounter(limits.max_consecutive_resyncs)
        """Counts heartbeats whose digest differs from the delivered state."""
        self.attestations = MismatchCounter(limits.max_consecutive_resyncs)
        """Counts heartbeats whose attestation differs from the delivered state."""
        self.begin_incarnation()

    def begin_incarnation(self) -> None:
        """Begin another incarnation. The last heartbeat stays valid until the publisher sends another one."""
        self._newest_seq = -1
        self._incarnation: int | None = None
        self.disconnect()

    def disconnect(self) -> None:
        """Expect no heartbeat until one arrives on the next connection."""
        self.max_silence: float | None = None
        """Seconds without any message after which the publisher counts as silent; None if no heartbeat was promised."""
        self.replayed_at = 0.0
        """The time at which replay last brought a new batch on this connection."""

    def receive(self, seq: int, heartbeat: Heartbeat, *, live: bool) -> bool:
        """Record the heartbeat of batch `seq`. Return False if a newer heartbeat is known."""
        if live:
            self.max_silence = heartbeat.interval * self._limits.max_missed_heartbeats
        if seq < self._newest_seq:
            return False
        self._newest_seq, self._heartbeat = seq, heartbeat
        return True

    def is_other_incarnation(self, heartbeat: Heartbeat, *, live: bool) -> bool:
        """Record the incarnation of a heartbeat.

        Return whether the previous heartbeat, if any, had a different incarnation.
        """
        former, self._incarnation = self._incarnation, heartbeat.incarnation
        if live and former == heartbeat.incarnation:
            self.incarnations.match(0, live=True)
        return former not in (None, heartbeat.incarnation)

    @property
    def trust(self) -> Trust:
        """The trust that the publisher's last heartbeat states; EXACT if there was no heartbeat."""
        if self._heartbeat is None or self._heartbeat.trust == Trust.EXACT.name:
            return Trust.EXACT
        is_stale = self._heartbeat.trust == Trust.STALE.name
        name = self._heartbeat.trust if self._heartbeat.trust in _STATE_ORDER else Trust.DEGRADED.name
        reason = "".join(letter if letter.isprintable() else "?" for letter in self._heartbeat.reason)
        sentence = f"its sender is {name}: {reason}" if reason else f"its sender is {name}"
        return (Trust.STALE if is_stale else Trust.DEGRADED).with_reason(sentence)

    @property
    def silence(self) -> str:
        """The reason that operators read while the publisher is silent."""
        max_missed = self._limits.max_missed_heartbeats
        interval = "" if self.max_silence is None else f" of {self.max_silence / max_missed:g} s"
        return f"silent: nothing was received for {max_missed:g} times the heartbeat interval{interval}"
