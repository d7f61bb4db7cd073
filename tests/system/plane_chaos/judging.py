"""Checks of the claims of replicas: a claim is about what a replica held of one engine at one number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tests.system.chaos_kit import judging
from tests.system.chaos_kit.judging import CheckedClaims
from tests.system.chaos_kit.truth import EMPTY, Claim, Key


def check_claims(claims: Iterable[Claim], facts: Sequence[Mapping[int, bytes]], exact: Sequence[bool]) -> CheckedClaims:
    """Compare every claim with what the engine held at any time; with `exact`, after the claimed number of an incarnation.

    `exact` must be False for an engine with heartbeats: these have numbers too, so that a number does not identify its batch.
    """
    digests_by_number = [{(Key.unpack(key).number, digest) for key, digest in fact.items()} for fact in facts]
    digests = [set(fact.values()) for fact in facts]

    def find_error(claim: Claim) -> str:
        is_known = claim.digest == EMPTY and (claim.seq < 0 or not exact[claim.key])
        is_known |= (
            (claim.seq, claim.digest) in digests_by_number[claim.key]
            if exact[claim.key]
            else claim.digest in digests[claim.key]
        )
        return "" if is_known else f"EXACT with engine {claim.key} at number {claim.seq} with {claim.digest.hex()}"

    return judging.check_claims(claims, find_error)
