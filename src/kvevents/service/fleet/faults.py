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
"""The reason of a state that no other reason explains."""
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

    `degraded_reasons` are those of the stream, `faults` what is wrong with its endpoints, and `index_faults` what the index
    reports about it.
    """
    if state == "EXACT":
        return ()
    found = sorted(CODES_OF_DEGRADED_REASONS[reason] for reason in degraded_reasons)
    found += sorted(fault.reason for fault in (*faults, *index_faults))
    explained = bool(faults) or (state == "STALE" and not _STALE_WHILE_CONNECTED.isdisjoint(found))
    if state in _REASON_OF_STATE and not explained:
        found.append(_REASON_OF_STATE[state])
    return tuple(dict.fromkeys(found)) or (Reason.OTHER,)
