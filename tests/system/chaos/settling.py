"""How long a consumer gets when all is quiet, and when it is done."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from kvevents.stream import DegradedReason, Trust
from tests.system.chaos.consumer import Report
from tests.system.chaos.judging import LASTING, Verdict, judge
from tests.system.chaos.parts import Broken, Part, Silent

RECONNECT_SECONDS: Final = 40.0
"""That they get when they have no connection: libzmq waits 30 s for a handshake that a half-open connection never ends."""
DEAD_SECONDS: Final = 3.0
"""After which such connections are cut after all, so that a round need not wait for that."""
SETTLE_DEFAULT_SECONDS: Final = 75.0
"""That those with default settings get: a half-open connection alone takes them 15 to notice, a doubling probe 30."""
CONFIRMATIONS: Final = 20
"""Batches that the last life of an engine can publish after the end of the script: a stream that has caught up by replay is not
EXACT before a live batch has confirmed what replay has brought."""
CONFIRM_SECONDS: Final = 1.0
"""Between two of those."""
CONFIRMATIONS_OF_SENDER: Final = 3
"""After so many of them, what a relay doubts is something else."""


BEHIND_SECONDS: Final = 180.0
"""The time of a consumer that lags and catches up, as on an overloaded machine."""


@dataclass(frozen=True, slots=True)
class SettleLimits:
    """Seconds that consumers get after the last batch; the defaults are those of `make chaos`."""

    settle: float = 12.0
    """Until a consumer with short timeouts must be exact."""
    lasting: float = 1.3
    """For which a consumer with a lasting doubt must have stayed as it is."""
    passing: float = 4.0
    """The same for any other doubt: a relay's heartbeat, a probe or a reconnect can yet end it."""


class Settling:
    """One consumer after the last batch. `fact` is what its engine holds."""

    def __init__(self, name: str, part: Part, fact: bytes, limits: SettleLimits, *, brisk: bool) -> None:
        self.name = name
        self.counted: dict[str, int] = {}
        self._part = part
        self._fact = fact
        self._began = self._steady_since = time.monotonic()
        self._limits = limits
        self._patience = limits.settle if brisk else SETTLE_DEFAULT_SECONDS
        self._state: Any = None
        self.is_unproven = False
        """Whether the next live batch may make it exact: itself, or a relay in front of it, has caught up by replay."""
        self._confirmations = 0

    def expect(self, fact: bytes) -> None:
        """The engine has published one more batch, and now holds this."""
        self._confirmations += 1
        self._fact = fact

    @property
    def is_cut_off(self) -> bool:
        """Whether it has waited for a connection for too long."""
        return self._state is not None and self._state[0] == Trust.STALE.name and self._steady_for > DEAD_SECONDS

    @property
    def _steady_for(self) -> float:
        return time.monotonic() - self._steady_since

    def look(self) -> Verdict | None:
        """Return its final state; None while that may change. Raises `Broken` when it does not answer."""
        try:
            report: Report = self._part.ask()
        except Silent as error:
            raise Broken(str(error)) from error
        verdict = judge(self.name, report, self._fact)
        state = (report.trust, report.key, LASTING & set(report.doubts))
        if state != self._state:
            self._state, self._steady_since = state, time.monotonic()
        self.is_unproven = not verdict.lasting and self._awaits_batch(report)
        elapsed = time.monotonic() - self._began
        if verdict.kind != "right" and elapsed < self._longest(report) and not self._stays(report, verdict):
            return None
        if verdict.kind == "wrong" and self._steady_for < self._limits.passing and elapsed < BEHIND_SECONDS:
            # Exact as far as it has come, and coming on: whether each step was right is in its claims.
            return None
        self.counted = report.counted
        return verdict

    def _awaits_batch(self, report: Report) -> bool:
        relayed = DegradedReason.SENDER.name in report.doubts and self._confirmations < CONFIRMATIONS_OF_SENDER
        return relayed or DegradedReason.REPLAY_UNPROVEN.name in report.doubts

    def _longest(self, report: Report) -> float:
        follows = report.exact or report.trust == Trust.DEGRADED.name
        return self._patience if follows else max(self._patience, RECONNECT_SECONDS)

    def _stays(self, report: Report, verdict: Verdict) -> bool:
        if report.trust != Trust.DEGRADED.name:
            return False
        return self._steady_for > (self._limits.lasting if verdict.lasting else self._limits.passing)
