"""How far a stream can be trusted and why not further, and what its publisher says of itself in heartbeats."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import total_ordering
from typing import ClassVar, Final, Literal, TypeAlias, final

from kvevents.events import Heartbeat
from kvevents.stream.settings import StreamLimits


class DegradedReason(enum.Enum):
    """Why a stream is DEGRADED. The value is the sentence that an operator reads."""

    NO_REPLAY = "no replay endpoint: what is lost stays lost, and losses at the tail cannot be seen"
    REPLAY_SILENT = "the replay endpoint does not answer"
    REPLAY_FOREIGN = "the replay endpoint answers for another stream"
    REPLAY_UNCONFIRMED = "the replay endpoint contradicted the live stream and has not agreed with it since"
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
"""Reasons that are about older events. AllBlocksCleared ends them."""
REASONS_ENDED_BY_DIGEST: Final = REASONS_ENDED_BY_CLEAR - {DegradedReason.UNATTESTED}
"""The ones that a matching digest ends. A digest describes the stream, an attestation the engine: only an attestation that
agrees ends `UNATTESTED`."""
PERSISTENT_REASONS: Final = REASONS_ENDED_BY_CLEAR | {
    DegradedReason.REPLAY_UNCONFIRMED,
    DegradedReason.SENDER,
    DegradedReason.ESTIMATED_MATCHES,
}
"""Reasons that a checkpoint stores: they are about delivered batches or their publisher. The others are about an endpoint and
begin again in a later process."""


TrustState: TypeAlias = Literal["CONNECTING", "REPLAYING", "EXACT", "DEGRADED", "STALE"]
"""Name of the state of a stream, as in `Trust.name`."""


@final
@total_ordering
@dataclass(frozen=True, slots=True, repr=False)
class Trust:
    """State of a stream: `CONNECTING -> REPLAYING -> EXACT -> DEGRADED(reason) -> STALE`.

    Values compare by their states, from STALE to EXACT (`trust >= Trust.DEGRADED`); `reason` is for people. EXACT means three
    things. Every batch since the publisher's start, a clear or a matching digest, up to the newest one known, was delivered. A
    live batch of this connection has shown that replay comes from the same publisher, or the engine itself has named its replay
    endpoint. The newest heartbeat of the publisher, if there is one, says EXACT.
    """

    name: str
    """CONNECTING, REPLAYING, EXACT, DEGRADED or STALE."""
    reason: str = field(default="", compare=False)
    attested: bool = field(default=False, compare=False)
    """Whether the state is EXACT, and the engine's own cache was the same at the newest attestation. Only a publisher inside
    the engine sends attestations."""
    unproven: bool = field(default=False, compare=False)
    """Whether the state is DEGRADED only because no live batch has confirmed yet what replay says, as of every idle engine
    after a connect. Nothing contradicts it, so routers count its blocks fully."""
    inexact_tiers: tuple[str, ...] = field(default=(), compare=False)
    """Tiers that the state is not about: their stores are announced and their removals are not (`Source.stores_only`). What is
    held there is at most what was announced."""

    CONNECTING: ClassVar[Trust]
    """No connection yet."""
    REPLAYING: ClassVar[Trust]
    """Catching up, or verifying after a reconnect that the publisher is the same."""
    EXACT: ClassVar[Trust]
    ATTESTED: ClassVar[Trust]
    """EXACT and attested."""
    DEGRADED: ClassVar[Trust]
    """Following, but not exact; `reason` says why."""
    STALE: ClassVar[Trust]
    """The delivered state ages. The connection is gone, or not yet there after a restart of this process; or the publisher has
    missed its heartbeats, or reports STALE of itself."""

    def with_reason(self, reason: str) -> Trust:
        """Return the same state with a reason."""
        # A service does this ten times a second for each engine that is gone; `replace` takes more than twice the time.
        return Trust(self.name, reason, self.attested, self.unproven, self.inexact_tiers)

    def of_tier(self, tier: str) -> Trust:
        """Return the trust in what is held on one tier, such as `cpu`: at most DEGRADED for one of `inexact_tiers`."""
        if tier not in self.inexact_tiers or trust_order(self.name) <= trust_order("DEGRADED"):
            return self
        return Trust("DEGRADED", f"the engine announces no removals from {tier}")

    def __lt__(self, other: object) -> bool:
        """Compare states: STALE < CONNECTING < REPLAYING < DEGRADED < EXACT."""
        return trust_order(self.name) < trust_order(other.name) if isinstance(other, Trust) else NotImplemented

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

_ORDER: Final = {name: order for order, name in enumerate(("STALE", "CONNECTING", "REPLAYING", "DEGRADED", "EXACT"))}


def trust_order(name: str) -> int:
    """Return a number that orders the names of states, from STALE to EXACT; -1 for any other name."""
    return _ORDER.get(name, -1)


_UNATTESTED: Final = frozenset({DegradedReason.UNATTESTED})

MAX_MARKS: Final = 64
"""Maximum number of affected numbers that a ledger has for one reason: the newest ones. Older ones are one range."""


class _Marks:
    """The numbers up to which one degraded reason affects a stream, one for each of its causes.

    Causes come one by one, and consumers may report much later: a slow consumer may report after hundreds of gaps. Beyond
    `max_marks`, every number between the first mark and the oldest stored one counts as affected. That may explain a digest
    mismatch too often, but never too seldom.
    """

    __slots__ = ("_first_dropped", "_max_marks", "_newest")

    def __init__(self, max_marks: int) -> None:
        self._max_marks = max_marks
        self._newest: list[int] = []
        """Marks in rising order. After the first mark, it is empty only if all marks were removed."""
        self._first_dropped: int | None = None
        """The first of the marks that are no longer stored, all of which are below the stored ones."""

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
        """Remove the marks below the number `limit`. Return whether no mark is left."""
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

    A consumer that reads payloads itself reports a clear or unreadable events some time after the batch was delivered, in any
    order. The numbers make the outcome the same as if each batch had been read before the next one was delivered.
    """

    def __init__(self, max_marks: int = MAX_MARKS) -> None:
        self._max_marks = max_marks
        self._marks: dict[DegradedReason, _Marks] = {}
        self._last_clear = self._last_match = self._last_attestation = self._last_mismatch = self._last_estimate = -1
        self.estimate_reason = ""
        """Why the consumer's answers are estimates, as it last reported."""

    def __bool__(self) -> bool:
        return bool(self._marks)

    def __contains__(self, reason: DegradedReason) -> bool:
        return reason in self._marks

    @property
    def can_replay(self) -> bool:
        """Whether there is a replay endpoint and it is not distrusted."""
        return DegradedReason.NO_REPLAY not in self._marks and DegradedReason.REPLAY_FOREIGN not in self._marks

    def __iter__(self) -> Iterator[DegradedReason]:
        """Iterate in the order of `DegradedReason`."""
        if len(self._marks) <= 1:  # nearly always; every turn of a subscriber asks
            return iter(tuple(self._marks))
        return (reason for reason in DegradedReason if reason in self._marks)

    def add(self, reason: DegradedReason, last_affected: int) -> None:
        """Add a reason that affects everything up to number `last_affected`."""
        marks = self._marks.get(reason)
        if marks is None:
            marks = self._marks[reason] = _Marks(self._max_marks)
        marks.add(last_affected)

    def discard(self, reason: DegradedReason) -> None:
        """Remove a reason, regardless of the batches that it affects."""
        self._marks.pop(reason, None)

    def clear(self, seq: int) -> None:
        """Record that batch `seq` clears everything: what affects only batches before it has ended."""
        self._last_clear = max(seq, self._last_clear)
        self._end_before(REASONS_ENDED_BY_CLEAR, seq)

    def reject(self, seq: int) -> None:
        """Record that events of batch `seq` could not be read, unless a later clear or matching digest is known."""
        if seq >= self._last_clear and seq > self._last_match:
            self.add(DegradedReason.REJECTED, seq)

    def estimate(self, seq: int, reason: str) -> None:
        """Record why the consumer's answers are estimates from batch `seq` on; an empty reason means that they are not."""
        if seq >= self._last_estimate:
            self._last_estimate, self.estimate_reason = seq, reason
            self.discard(DegradedReason.ESTIMATED_MATCHES)
            if reason:
                self.add(DegradedReason.ESTIMATED_MATCHES, seq)

    def match_digest(self, seq: int) -> None:
        """Record that the state after batch `seq` is the publisher's: what affects earlier batches has ended."""
        self._last_match = max(seq, self._last_match)
        self._end_before(REASONS_ENDED_BY_DIGEST, seq)
        marks = self._marks.get(DegradedReason.REJECTED)
        if marks is not None and marks.last == seq:
            self.discard(DegradedReason.REJECTED)

    def record_digest_mismatch(self, seq: int) -> bool:
        """Record that the state after batch `seq` has another digest than the publisher's.

        Return False if a later clear or match is known.
        """
        matters = seq >= self._last_clear and seq > self._last_match
        if matters:
            self.add(DegradedReason.DIVERGED, seq)
        return matters

    def match_attestation(self, seq: int) -> None:
        """Record that the state after batch `seq` is that of the engine's own cache."""
        self._last_attestation = max(seq, self._last_attestation)
        self._end_before(_UNATTESTED, seq + 1)

    def mismatch_attestation(self, seq: int) -> bool:
        """Record that the state after batch `seq` is not that of the engine's own cache.

        Return False if a later clear or match is known.
        """
        is_relevant = seq >= self._last_clear and seq > self._last_attestation
        if is_relevant:
            self._last_mismatch = max(seq, self._last_mismatch)
            self.add(DegradedReason.UNATTESTED, seq)
        return is_relevant

    @property
    def is_attested(self) -> bool:
        """Whether the state was that of the engine's own cache at the newest attestation of this incarnation."""
        return self._last_attestation > self._last_mismatch

    def explains(self, seq: int) -> bool:
        """Whether a reason is known why the state after batch `seq` might not be the publisher's."""
        return any(reason in REASONS_ENDED_BY_DIGEST and marks.first <= seq for reason, marks in self._marks.items())

    def persistent(self) -> dict[DegradedReason, int]:
        """Return the reasons that a checkpoint stores, each with the last number that it affects."""
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
    """Counts consecutive heartbeats that the delivered state differs from, so that a stream does not start over for ever."""

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._last_mismatch = -1
        self._in_a_row = 0

    def match(self, seq: int, *, live: bool) -> None:
        """Record that the state after batch `seq` is the same.

        A replayed match counts only if it is not before the last mismatch.
        """
        if live or seq >= self._last_mismatch:
            self._last_mismatch = -1
            self._in_a_row = 0

    def allow_resync(self, seq: int) -> bool:
        """Count a mismatch after batch `seq`. Return whether to fetch everything once more."""
        self._last_mismatch = max(seq, self._last_mismatch)
        self._in_a_row += 1
        return self._in_a_row <= self._max_in_a_row


class HeartbeatMonitor:
    """The heartbeats of one publisher. A publisher without heartbeats is trusted and never counts as silent.

    It records the results of heartbeats; `Stream` decides how to react.
    """

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._heartbeat: Heartbeat | None = None
        self.incarnations = MismatchCounter(limits.max_consecutive_resyncs)
        """Whether consecutive heartbeats name the same incarnation."""
        self.digests = MismatchCounter(limits.max_consecutive_resyncs)
        """Whether the digests of heartbeats match the delivered state."""
        self.attestations = MismatchCounter(limits.max_consecutive_resyncs)
        """Whether the attestations of heartbeats match the delivered state."""
        self.begin_incarnation()

    def begin_incarnation(self) -> None:
        """Begin another incarnation of the publisher. Its last heartbeat counts until it sends the next one."""
        self._newest_seq = -1
        self._incarnation: int | None = None
        self.disconnect()

    def disconnect(self) -> None:
        """Expect no heartbeat before the first one of the next connection."""
        self.max_silence: float | None = None
        """Seconds without anything received after which the publisher is silent; None if it has promised no heartbeat."""
        self.replayed_at = 0.0
        """The time at which replay last brought something new on this connection."""

    def receive(self, seq: int, heartbeat: Heartbeat, *, live: bool) -> bool:
        """Record the heartbeat of batch `seq`. Return False if a newer one is known."""
        if live:
            self.max_silence = heartbeat.interval * self._limits.max_missed_heartbeats
        if seq < self._newest_seq:
            return False
        self._newest_seq, self._heartbeat = seq, heartbeat
        return True

    def is_other_incarnation(self, heartbeat: Heartbeat, *, live: bool) -> bool:
        """Record the incarnation of a heartbeat.

        Return whether it differs from the incarnation of the heartbeat before, if there was one.
        """
        former, self._incarnation = self._incarnation, heartbeat.incarnation
        if live and former == heartbeat.incarnation:
            self.incarnations.match(0, live=True)
        return former not in (None, heartbeat.incarnation)

    @property
    def trust(self) -> Trust:
        """The publisher's state according to its last heartbeat, as trust in its batches. EXACT without a heartbeat."""
        if self._heartbeat is None or self._heartbeat.trust == Trust.EXACT.name:
            return Trust.EXACT
        is_stale = self._heartbeat.trust == Trust.STALE.name
        name = self._heartbeat.trust if self._heartbeat.trust in _ORDER else Trust.DEGRADED.name
        reason = "".join(letter if letter.isprintable() else "?" for letter in self._heartbeat.reason)
        sentence = f"its sender is {name}: {reason}" if reason else f"its sender is {name}"
        return (Trust.STALE if is_stale else Trust.DEGRADED).with_reason(sentence)

    @property
    def silence(self) -> str:
        """The reason that an operator reads while the publisher is silent."""
        max_missed = self._limits.max_missed_heartbeats
        interval = "" if self.max_silence is None else f" of {self.max_silence / max_missed:g} s"
        return f"silent: nothing was received for {max_missed:g} times the heartbeat interval{interval}"
