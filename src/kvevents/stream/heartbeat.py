"""What a publisher says of itself in heartbeats: its trust, its life, and when the next heartbeat comes."""

from __future__ import annotations

from typing import Final

from kvevents.events import Heartbeat
from kvevents.stream.limits import StreamLimits
from kvevents.stream.trust import Trust

_STATES: Final = frozenset({"CONNECTING", "REPLAYING", "DEGRADED", "STALE"})


class MismatchCounter:
    """Counts heartbeats in a row that the delivered state differs from, so that a stream does not start over for ever."""

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._up_to = -1
        self._in_a_row = 0

    def match(self, seq: int, *, live: bool) -> None:
        """Record that the state after batch `seq` is the same.

        A replayed match counts only if it is not before the last mismatch.
        """
        if live or seq >= self._up_to:
            self._up_to = -1
            self._in_a_row = 0

    def allow_resync(self, seq: int) -> bool:
        """Count a mismatch after batch `seq`. Return whether to fetch everything once more."""
        self._up_to = max(seq, self._up_to)
        self._in_a_row += 1
        return self._in_a_row <= self._max_in_a_row


class HeartbeatMonitor:
    """The heartbeats of one publisher. A publisher without heartbeats is trusted and never counts as silent.

    It records the results of heartbeats; `Stream` decides how to react.
    """

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._heartbeat: Heartbeat | None = None
        self._new_lives_in_a_row = 0
        self.digests = MismatchCounter(limits.max_consecutive_resyncs)
        """Whether heartbeats' digests are those of the delivered state."""
        self.attestations = MismatchCounter(limits.max_consecutive_resyncs)
        """Whether heartbeats' attestations are of the delivered state."""
        self.begin_life()

    def begin_life(self) -> None:
        """Begin another life of the publisher. Its last heartbeat counts until it sends the next one."""
        self._newest_seq = -1
        self._incarnation: int | None = None
        self.disconnect()

    def disconnect(self) -> None:
        """Expect no heartbeat before the first one of the next connection."""
        self.max_silence: float | None = None
        """Seconds without anything received after which the publisher is silent; None if it has promised no heartbeat."""
        self.replayed_at = 0.0
        """When replay last brought something new on this connection."""

    # --- what heartbeats say

    def receive(self, seq: int, heartbeat: Heartbeat, *, live: bool) -> bool:
        """Record the heartbeat of batch `seq`. Return False if a newer one is known."""
        if live:
            self.max_silence = heartbeat.interval * self._limits.max_missed_heartbeats
        if seq < self._newest_seq:
            return False
        self._newest_seq, self._heartbeat = seq, heartbeat
        return True

    def is_other_life(self, heartbeat: Heartbeat, *, live: bool) -> bool:
        """Record the incarnation of a heartbeat.

        Return whether it differs from the life of the heartbeat before, if there was one.
        """
        known, self._incarnation = self._incarnation, heartbeat.incarnation
        if known is None or known == heartbeat.incarnation:
            if live and known is not None:
                self._new_lives_in_a_row = 0
            return False
        return True

    @property
    def trust(self) -> Trust:
        """What the last heartbeat says of the publisher's state, as trust in its batches. EXACT without a heartbeat."""
        if self._heartbeat is None or self._heartbeat.trust == Trust.EXACT.name:
            return Trust.EXACT
        stale = self._heartbeat.trust == Trust.STALE.name
        name = self._heartbeat.trust if self._heartbeat.trust in _STATES else Trust.DEGRADED.name
        reason = "".join(letter if letter.isprintable() else "?" for letter in self._heartbeat.reason)
        sentence = f"its sender is {name}: {reason}" if reason else f"its sender is {name}"
        return (Trust.STALE if stale else Trust.DEGRADED).with_reason(sentence)

    @property
    def silence(self) -> str:
        """The reason that an operator reads while the publisher is silent."""
        missed = self._limits.max_missed_heartbeats
        interval = "" if self.max_silence is None else f" of {self.max_silence / missed:g} s"
        return f"silent: nothing was received for {missed:g} times the heartbeat interval{interval}"

    # --- starting over

    def allow_new_life(self) -> bool:
        """Count a heartbeat of another life. Return whether to start over once more; False if two lives alternate."""
        self._new_lives_in_a_row += 1
        return self._new_lives_in_a_row <= self._limits.max_consecutive_resyncs
