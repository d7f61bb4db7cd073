"""Checks of the claims of consumers: a claim is about the state after one batch of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.system.chaos_kit import judging
from tests.system.chaos_kit.judging import CheckedClaims
from tests.system.chaos_kit.truth import EMPTY, NO_BATCH, UNKNOWN_BATCH, Claim, describe_batch


def check_claims(claims: Iterable[Claim], facts: Mapping[int, bytes], *, foreign: bool) -> CheckedClaims:
    """Compare every claim with the truth after its batch. With `foreign`, a relay may send batches of its own."""

    def find_error(claim: Claim) -> str:
        true_digest = EMPTY if claim.key == NO_BATCH else facts.get(claim.key)
        if true_digest is None and not (foreign and claim.key == UNKNOWN_BATCH):
            return f"EXACT at number {claim.seq}, after a batch that the engine has not made"
        if true_digest is not None and true_digest != claim.digest:
            place = f"{describe_batch(claim.key)} (number {claim.seq})"
            return f"EXACT at {place} with {claim.digest.hex()}, not {true_digest.hex()}"
        return ""

    return judging.check_claims(claims, find_error)
