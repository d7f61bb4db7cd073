"""Checks of consumers: EXACT and right, not EXACT, or EXACT and wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Self

from kvevents.stream import DegradedReason
from tests.system.chaos.consumer import Report
from tests.system.chaos.truth import EMPTY, NO_BATCH, UNKNOWN_BATCH, Claim, Key

LASTING_REASONS: Final = frozenset(
    degraded_reason.name
    for degraded_reason in (
        DegradedReason.NO_REPLAY,
        DegradedReason.LOST,
        DegradedReason.REJECTED,
        DegradedReason.IDENTITY,
        DegradedReason.REPLAY_FOREIGN,
        DegradedReason.REPLAY_UNCONFIRMED,
    )
)
"""Degraded reasons that do not end while no batches arrive."""

Kind = Literal["right", "inexact", "wrong"]


@dataclass(frozen=True, slots=True)
class CheckedClaims:
    """Result of a check of the claims of one consumer."""

    claims: int = 0
    wrong: tuple[str, ...] = ()
    """Descriptions of the first wrong claims."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one consumer."""

    consumer: str
    kind: Kind
    reasons: tuple[str, ...]
    """Why the consumer is not EXACT, as it reports."""
    detail: str
    claims: int = 0
    received: int = 0
    """Batches that it received, if it counts them."""

    @property
    def lasting(self) -> bool:
        """Return whether a reason will not end by itself."""
        return bool(self.reasons) and set(self.reasons) & LASTING_REASONS != set()

    def with_claims(self, checked: CheckedClaims) -> Result:
        """Return the result with the checked claims. One wrong claim makes the consumer wrong."""
        if not checked.wrong:
            return replace(self, claims=checked.claims)
        return replace(self, kind="wrong", detail="; ".join([*checked.wrong, self.detail]), claims=checked.claims)


@dataclass(frozen=True, slots=True)
class Example:
    """Result of an example subscriber of an engine."""

    name: str
    published: int
    lost: int
    right: bool
    """Whether it holds what the engine holds at the end."""
    missed: int
    """Batches that it has noticed as missing."""
    errors: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a round."""

    seed: str
    number: int
    faults: tuple[str, ...]
    make: str = ""
    relays: int = 0
    batches: int = 0
    results: tuple[Result, ...] = ()
    examples: tuple[Example, ...] = ()
    counted: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    """Why the round could not be played."""

    @classmethod
    def unplayable(cls, seed: str, number: int, faults: tuple[str, ...], error: str, seconds: float) -> Self:
        return cls(seed, number, faults, error=error, seconds=seconds)

    @property
    def wrong(self) -> bool:
        return any(result.kind == "wrong" for result in self.results)


def judge(consumer: str, report: Report, truth: bytes) -> Result:
    """Return the result of a consumer after the last batch. `truth` is the digest of what the engine holds."""
    position, received = f"at {_describe_batch(report.key)} (number {report.seq})", report.counted.get("received", 0)
    if report.resets:
        position += f", after resets ({'; '.join(report.resets)})"
    if not report.is_exact:
        detail = f"{report.trust}: {', '.join(report.reasons)}, {position}"
        return Result(consumer, "inexact", report.reasons, detail, received=received)
    if report.digest == truth:
        return Result(consumer, "right", (), position, received=received)
    return Result(consumer, "wrong", (), f"EXACT {position} with {report.digest.hex()}, but the engine holds {truth.hex()}")


def check_claims(claims: Iterable[Claim], facts: Mapping[int, bytes], *, foreign: bool) -> CheckedClaims:
    """Compare every claim with the truth after its batch. With `foreign`, a relay may send batches of its own."""
    count, wrong = 0, []
    for claim in claims:
        count += 1
        true_digest = EMPTY if claim.key == NO_BATCH else facts.get(claim.key)
        if true_digest is None and not (foreign and claim.key == UNKNOWN_BATCH):
            wrong.append(f"EXACT at number {claim.seq}, after a batch that the engine has not made")
        elif true_digest is not None and true_digest != claim.digest:
            wrong.append(
                f"EXACT at {_describe_batch(claim.key)} (number {claim.seq}) with {claim.digest.hex()}, not {true_digest.hex()}"
            )
    return CheckedClaims(count, tuple([*wrong[:3], f"{len(wrong)} wrong claims of {count}"] if wrong else ()))


def _describe_batch(packed: int) -> str:
    if packed < 0:
        return "no batch"
    key = Key.unpack(packed)
    return f"batch {key.number} of incarnation {key.lifetime}"
