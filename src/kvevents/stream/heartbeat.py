"""What a stream's sender says of itself in its heartbeats: how far it trusts what it tells, and how soon it speaks again."""

from __future__ import annotations

from kvevents.events import Heartbeat
from kvevents.stream.limits import StreamLimits
from kvevents.stream.trust import Trust


class HeartbeatMonitor:
    """The sender of one stream, as far as its heartbeats tell. One without heartbeats is never doubted for it.

    It says only what it was told; what follows from that is the stream's to decide.
    """

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._heartbeat: Heartbeat | None = None
        self._lives_in_a_row = 0
        self._diverged_through = -1
        self._divergences_in_a_row = 0
        self.begin_life()

    def begin_life(self) -> None:
        """Another life of the publisher began, or may have: what it said is kept until it speaks again."""
        self._newest = -1
        self._incarnation: int | None = None
        self.disconnected()

    def disconnected(self) -> None:
        """Whether it will speak at all on the next connection is not known."""
        self._every: float | None = None
        self._replayed_at = 0.0

    # --- what it says

    def says(self, seq: int, heartbeat: Heartbeat, *, live: bool) -> bool:
        """Take a heartbeat of batch `seq`; False when nothing newer is known than what it says."""
        if live:
            self._every = heartbeat.interval
        if seq < self._newest:
            return False
        self._newest, self._heartbeat = seq, heartbeat
        return True

    def is_another(self, heartbeat: Heartbeat, *, live: bool) -> bool:
        """Whether it is of another life than the others since `begin_life`."""
        known, self._incarnation = self._incarnation, heartbeat.incarnation
        if known is None or known == heartbeat.incarnation:
            if live and known is not None:
                self._lives_in_a_row = 0
            return False
        return True

    @property
    def trust(self) -> Trust:
        """What it said last of its own state, as trust in what it tells; of one that never spoke, EXACT."""
        if self._heartbeat is None or self._heartbeat.trust == Trust.EXACT.name:
            return Trust.EXACT
        stale = self._heartbeat.trust == Trust.STALE.name
        name = self._heartbeat.trust if self._heartbeat.trust in _KNOWN else Trust.DEGRADED.name
        reason = "".join(letter if letter.isprintable() else "?" for letter in self._heartbeat.reason)
        sentence = f"its sender is {name}: {reason}" if reason else f"its sender is {name}"
        return (Trust.STALE if stale else Trust.DEGRADED).with_reason(sentence)

    # --- whether it still speaks

    def replayed(self, now: float) -> None:
        """Something new of it came by replay."""
        self._replayed_at = now

    def silent_at(self, heard_at: float) -> float | None:
        """When it counts as silent if nothing more is heard; None while it has not said when it speaks again."""
        if self._every is None:
            return None
        return max(heard_at, self._replayed_at) + self._every * self._limits.max_missed_heartbeats

    @property
    def silence(self) -> str:
        """The sentence for one that is silent."""
        every = f"it said that it speaks every {self._every:g} s, and " if self._every is not None else ""
        return f"silent: {every}nothing was heard for {self._limits.max_missed_heartbeats:g} times as long"

    # --- starting over

    def agreed(self, seq: int, *, live: bool) -> None:
        """What was delivered up to `seq` is what it held then. Of replayed ones that only counts beyond the last difference."""
        if live or seq >= self._diverged_through:
            self._diverged_through = -1
            self._divergences_in_a_row = 0

    def may_send_again(self, seq: int) -> bool:
        """Whether to ask it once more for everything, because what was delivered up to `seq` is not what it held then."""
        self._diverged_through = max(seq, self._diverged_through)
        self._divergences_in_a_row += 1
        return self._divergences_in_a_row <= self._limits.max_consecutive_resyncs

    def may_be_reborn(self) -> bool:
        """Whether to believe once more that it is of another life, unless those come in turns."""
        self._lives_in_a_row += 1
        return self._lives_in_a_row <= self._limits.max_consecutive_resyncs


_KNOWN = frozenset({"CONNECTING", "REPLAYING", "DEGRADED", "STALE"})
