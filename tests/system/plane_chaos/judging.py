"""Checks of replicas: EXACT and right, not EXACT, or EXACT and wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from kvevents.stream import Trust
from tests.system.chaos.truth import EMPTY, Claim, Key
from tests.system.plane_chaos.roles import TrustReport

FORBIDDEN_COUNTERS: Final = ("invalid_records", "duplicates", "failures")
"""Counters of bridges and replicas that must stay 0."""

Kind = Literal["right", "inexact", "wrong"]


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one replica and one engine at the end."""

    replica: str
    engine: str
    kind: Kind
    detail: str


@dataclass(frozen=True, slots=True)
class CheckedClaims:
    """Result of a check of the claims of replicas."""

    count: int
    wrong: tuple[str, ...]

    def merge(self, other: CheckedClaims) -> CheckedClaims:
        return CheckedClaims(self.count + other.count, self.wrong + other.wrong)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a round."""

    seed: str
    number: int
    faults: tuple[str, ...]
    batches: int = 0
    results: tuple[Result, ...] = ()
    logged: int = 0
    """Batches in the log at the end."""
    lost: int = 0
    """Batches that the log reports as lost."""
    flaws: tuple[str, ...] = ()
    """Errors in the log and in the claims of replicas."""
    counted: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    settled: float = 0.0
    """Seconds from the last batch until all replicas were right."""
    error: str = ""
    """Why the round could not be played."""
    reported: str = ""

    @classmethod
    def unplayable(cls, seed: str, number: int, faults: tuple[str, ...], error: str, seconds: float) -> Self:
        return cls(seed, number, faults, error=error, seconds=seconds)

    @property
    def wrong(self) -> bool:
        """Return whether the round has an error that must never happen."""
        return (
            bool(self.flaws)
            or any(result.kind == "wrong" for result in self.results)
            or any(map(self.counted.get, FORBIDDEN_COUNTERS))
        )

    @property
    def right(self) -> bool:
        """Return whether every replica is EXACT and holds what the engines hold."""
        return not self.error and not self.wrong and all(result.kind == "right" for result in self.results)


def judge(replica: str, engine: str, report: TrustReport, truth: bytes) -> Result:
    """Return the result of a replica after the last batch. `truth` is the digest of what the engine holds."""
    name = engine.rpartition("\x1f")[2]
    held = report.held.get(engine)
    if held is None:
        return Result(replica, name, "inexact", f"has no copy: {report.fault}")
    position = f"at number {held.seq} of incarnation {held.incarnation}, begun with {report.initial_state}"
    if held.trust != Trust.EXACT.name:
        same = "what" if held.digest == truth else "not what"
        return Result(replica, name, "inexact", f"{held.trust}: {held.reason}, {position}; it holds {same} the engine holds")
    if held.digest == truth:
        return Result(replica, name, "right", position)
    return Result(replica, name, "wrong", f"EXACT {position} with {held.digest.hex()}, but the engine holds {truth.hex()}")


def check_claims(
    replica: str, claims: Iterable[Claim], facts: Sequence[Mapping[int, bytes]], exact: Sequence[bool]
) -> CheckedClaims:
    """Compare every claim with what the engine held at any time; with `exact`, after the claimed number of an incarnation.

    `exact` must be False for an engine with heartbeats: these have numbers too, so that a number does not identify its batch.
    """
    digests_by_number = [{(Key.unpack(key).number, digest) for key, digest in fact.items()} for fact in facts]
    digests = [set(fact.values()) for fact in facts]
    count, wrong = 0, []
    for claim in claims:
        count += 1
        is_known = claim.digest == EMPTY and claim.seq < 0
        is_known |= (
            (claim.seq, claim.digest) in digests_by_number[claim.key]
            if exact[claim.key]
            else claim.digest in digests[claim.key]
        )
        if not is_known and (exact[claim.key] or claim.digest != EMPTY):
            wrong.append(f"{replica} was EXACT with engine {claim.key} at number {claim.seq} with {claim.digest.hex()}")
    return CheckedClaims(count, tuple([*wrong[:2], f"{len(wrong)} wrong claims of {count}"] if wrong else ()))
