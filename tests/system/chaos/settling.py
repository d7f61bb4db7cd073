"""Decides when the state of a consumer after the last batch is final."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvevents.stream import DegradedReason, Trust
from tests.system.chaos.consumer import Report
from tests.system.chaos_kit.judging import Result, judge
from tests.system.chaos_kit.parts import Part
from tests.system.chaos_kit.stage import EngineProcess

RECONNECT_SECONDS: Final = 40.0
"""Limit for consumers without a connection: libzmq waits 30 s for a handshake that a half-open connection never completes."""
DEAD_SECONDS: Final = 3.0
"""Time after which such connections are cut, so that a round need not wait for libzmq."""
SETTLE_DEFAULT_SECONDS: Final = 75.0
"""Limit for consumers with default settings, which take 15 s to notice a half-open connection, and 30 s between probes."""
CONFIRMATIONS_OF_SENDER: Final = 3
"""Batches of `EngineProcess.confirm` after which a degraded relay lacks something else than a confirmation."""
CATCH_UP_SECONDS: Final = 180.0
"""Limit for a consumer that lags and catches up, as on an overloaded machine."""


@dataclass(frozen=True, slots=True)
class SettleLimits:
    """Seconds that consumers may take after the last batch. The defaults are those of `make chaos`."""

    settle: float = 12.0
    """Limit until a consumer with short timeouts is EXACT."""
    lasting: float = 1.3
    """Seconds without a change after which a state with a lasting reason is final."""
    passing: float = 4.0
    """The same for other reasons, which a heartbeat of a relay, a probe or a reconnect can still end."""


class Settling:
    """A consumer after the last batch of an engine. `facts` has the digests after each batch."""

    def __init__(
        self,
        name: str,
        part: Part,
        engine: EngineProcess,
        facts: Mapping[int, bytes],
        limits: SettleLimits,
        *,
        has_short_timeouts: bool,
    ) -> None:
        self.name = name
        self.counted: dict[str, int] = {}
        self.is_unconfirmed = False
        """Whether the next live batch may make it EXACT, because it or a relay in front of it has caught up by replay."""
        self._part = part
        self._engine = engine
        self._facts = facts
        self._began = self._unchanged_since = time.monotonic()
        self._limits = limits
        self._limit = limits.settle if has_short_timeouts else SETTLE_DEFAULT_SECONDS
        self._state: Any = None

    @property
    def is_cut_off(self) -> bool:
        """Return whether it has been without a connection for `DEAD_SECONDS`."""
        return self._state is not None and self._state[0] == Trust.STALE.name and self._unchanged_for > DEAD_SECONDS

    @property
    def _unchanged_for(self) -> float:
        return time.monotonic() - self._unchanged_since

    def look(self) -> Result | None:
        """Return the result, or None while it may change. Raises `SilentPartError` if the consumer does not answer."""
        report: Report = self._part.exchange()
        result = judge(self.name, report.state, self._engine.digest(self._facts))
        state = (report.trust, report.key, report.lasting_reasons)
        if state != self._state:
            self._state, self._unchanged_since = state, time.monotonic()
        self.is_unconfirmed = not report.lasting_reasons and self._awaits_batch(report)
        elapsed = time.monotonic() - self._began
        if result.kind != "right" and elapsed < self._time_limit(report) and not self._is_final(report):
            return None
        if result.kind == "wrong" and self._unchanged_for < self._limits.passing and elapsed < CATCH_UP_SECONDS:
            # It is EXACT and still catches up. Its claims show whether each step was right.
            return None
        self.counted = report.counted
        return replace(result, received=report.counted["received"])

    def _awaits_batch(self, report: Report) -> bool:
        is_relay_degraded = DegradedReason.SENDER.name in report.reason_names
        can_confirm_relay = is_relay_degraded and self._engine.confirmations < CONFIRMATIONS_OF_SENDER
        return can_confirm_relay or DegradedReason.REPLAY_UNPROVEN.name in report.reason_names

    def _time_limit(self, report: Report) -> float:
        is_connected = report.is_exact or report.trust == Trust.DEGRADED.name
        return self._limit if is_connected else max(self._limit, RECONNECT_SECONDS)

    def _is_final(self, report: Report) -> bool:
        if report.trust != Trust.DEGRADED.name:
            return False
        return self._unchanged_for > (self._limits.lasting if report.lasting_reasons else self._limits.passing)
