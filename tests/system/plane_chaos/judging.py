"""Checks of the claims of replicas: a claim is about what a replica held of one engine at one number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

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


def oldest_claim(claims: Iterable[Claim], facts: Sequence[Mapping[int, bytes]], times: Sequence[Mapping[int, float]]) -> float:
    """Return the greatest number of seconds for which the content of a claim had been outdated, of engines with `times`.

    The content of a claim is outdated from the time at which the engine published its next batch.
    """
    ended: list[dict[tuple[int, bytes], list[tuple[float, float]]]] = []
    for fact, published in zip(facts, times, strict=True):
        contents: dict[tuple[int, bytes], list[tuple[float, float]]] = {}
        for (key, begin), (_, end) in pairwise([*published.items(), (0, float("inf"))]):
            contents.setdefault((Key.unpack(key).number, fact[key]), []).append((begin, end))
        ended.append(contents)
    oldest = 0.0
    for claim in claims:
        if spans := ended[claim.key].get((claim.seq, claim.digest)):
            at = bisect_right(spans, (claim.at, float("inf"))) - 1
            oldest = max(oldest, claim.at - spans[max(0, at)][1])
    return oldest
