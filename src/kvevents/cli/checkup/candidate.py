"""A replay endpoint that was not named: where it would usually be, and whether what answers there belongs to this stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvevents.cli.checkup.address import next_ranks
from kvevents.cli.checkup.comparing import compare
from kvevents.cli.checkup.findings import Finding, ok, warn
from kvevents.cli.checkup.numbers import Numbers
from kvevents.cli.checkup.replay import NAME_IT
from kvevents.endpoints import MAX_PORT, split_tcp
from kvevents.security import Curve
from kvevents.subscriber.handshake import perform_handshake


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of the unnamed replay endpoint."""

    finding: Finding
    endpoint: str | None = None
    """Where replay requests are answered with batches of this very stream; None unless that is proven."""


def candidate_of(endpoint: str) -> str | None:
    """The port behind those of the engine's ranks; None for endpoints that are not TCP."""
    found = split_tcp(endpoint)
    if found is None:
        return None
    port = found[1] + 1 + next_ranks(endpoint)
    return f"tcp://{found[0]}:{port}" if port <= MAX_PORT else None


def examine_candidate(
    endpoint: str, numbers: Numbers, wait_for_live: Callable[[], None], curve: Curve | None = None
) -> Candidate:
    """Look for the replay endpoint of the engine at `endpoint`; `wait_for_live` waits until `numbers` has a batch."""
    candidate = candidate_of(endpoint)
    nothing = "no replay endpoint given: what is missed cannot be had again"
    if candidate is None:
        return Candidate(warn("replay", nothing, NAME_IT))
    handshake = perform_handshake(candidate)
    if handshake.outcome not in {"socket", "curve"} or (handshake.outcome == "socket" and handshake.detail != "ROUTER"):
        found = f"nothing listens at {candidate}" if handshake.outcome == "refused" else f"{candidate} is not a replay endpoint"
        return Candidate(warn("replay", f"{nothing}; {found}", NAME_IT))
    wait_for_live()
    if not numbers.newest:
        text = f"{nothing}; {candidate} may be one, but nothing live arrived that could be compared with what it holds"
        return Candidate(warn("replay", text, f"if it is this engine's, name it: --replay {candidate}"))
    comparison = compare(candidate, numbers, curve)
    if not comparison.answered:
        text = f"{nothing}; {candidate} is open and does not answer replay requests"
        advice = f"if it is this engine's, the engine may hang or be busy: try again with --replay {candidate}, then restart it"
        return Candidate(warn("replay", text, advice))
    if not comparison.same_stream:
        return Candidate(warn("replay", f"{nothing}; {candidate} belongs to another stream: {comparison.difference}", NAME_IT))
    text = f"no replay endpoint given; {candidate} holds the live batches as published, and is used here"
    return Candidate(ok("replay", text, f"name it for other commands: --replay {candidate}"), candidate)
