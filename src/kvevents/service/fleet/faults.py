"""The reasons why a source is in its trust state, from its stream, its endpoints and the index."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from kvevents.client.reasons import Reason
from kvevents.stream import DegradedReason

ENDPOINT_FAULTS: Final = frozenset(
    {
        Reason.UNRESOLVED,
        Reason.REFUSED,
        Reason.UNANSWERED,
        Reason.UNREACHABLE,
        Reason.NOT_ZEROMQ,
        Reason.WRONG_SOCKET,
        Reason.KEYS,
        Reason.NO_PEER,
    }
)
"""Faults with which an endpoint cannot deliver anything."""
CODES_OF_DEGRADED_REASONS: Final[dict[DegradedReason, Reason]] = {
    reason: Reason(reason.name.lower().replace("_", "-")) for reason in DegradedReason
}
_REASON_OF_STATE: Final = {"CONNECTING": Reason.CONNECTING, "REPLAYING": Reason.REPLAYING, "STALE": Reason.DISCONNECTED}
"""The reason for a state if no other reason explains it."""
_STALE_WHILE_CONNECTED: Final = frozenset({Reason.SENDER, Reason.SILENT})


class SourceFault(NamedTuple):
    """A fault of a source: a code for programs, and a sentence for people."""

    reason: Reason
    sentence: str


def reasons_of(
    state: str,
    degraded_reasons: Iterable[DegradedReason],
    faults: Collection[SourceFault],
    index_faults: Collection[SourceFault],
) -> tuple[Reason, ...]:
    """Return all reasons why a source is in a state; at least one unless the state is EXACT.

    `degraded_reasons` come from the stream, `faults` concern its endpoints, and `index_faults` are what the index reports about
    it.
    """
    if state == "EXACT":
        return ()
    reasons = sorted(CODES_OF_DEGRADED_REASONS[reason] for reason in degraded_reasons)
    reasons += sorted(fault.reason for fault in (*faults, *index_faults))
    is_explained = bool(faults) or (state == "STALE" and not _STALE_WHILE_CONNECTED.isdisjoint(reasons))
    if state in _REASON_OF_STATE and not is_explained:
        reasons.append(_REASON_OF_STATE[state])
    return tuple(dict.fromkeys(reasons)) or (Reason.OTHER,)
