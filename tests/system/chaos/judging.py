"""What is right, what is honest and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Self

from kvevents.stream import DegradedReason
from tests.system.chaos.consumer import Report
from tests.system.chaos.truth import EMPTY, NOTHING, UNPLACED, Claim, Key

LASTING: Final = frozenset(
    doubt.name
    for doubt in (
        DegradedReason.NO_REPLAY,
        DegradedReason.LOST,
        DegradedReason.REJECTED,
        DegradedReason.IDENTITY,
        DegradedReason.REPLAY_FOREIGN,
        DegradedReason.REPLAY_UNCONFIRMED,
    )
)
"""Doubts that a stream keeps which has gone quiet."""

Kind = Literal["right", "doubted", "wrong"]


@dataclass(frozen=True, slots=True)
class Checked:
    """A diary, read."""

    claims: int = 0
    wrong: tuple[str, ...] = ()
    """What is wrong with the first few that are."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one consumer."""

    consumer: str
    kind: Kind
    reasons: tuple[str, ...]
    """Why it is not exact, as it says."""
    detail: str
    claims: int = 0
    got: int = 0
    """Batches that it got, where it counted them."""

    @property
    def lasting(self) -> bool:
        """Whether its doubts will stay."""
        return bool(self.reasons) and set(self.reasons) & LASTING != set()

    def with_claims(self, checked: Checked) -> Verdict:
        """A consumer that was wrong once is wrong."""
        if not checked.wrong:
            return replace(self, claims=checked.claims)
        return replace(self, kind="wrong", detail="; ".join([*checked.wrong, self.detail]), claims=checked.claims)


@dataclass(frozen=True, slots=True)
class Example:
    """How an engine's own example subscriber fared."""

    name: str
    published: int
    lost: int
    right: bool
    """Whether it ends with what the engine holds."""
    missed: int
    """Batches of which it noticed that they were missing."""
    errors: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a round."""

    seed: str
    number: int
    faults: tuple[str, ...]
    make: str = ""
    relays: int = 0
    batches: int = 0
    verdicts: tuple[Verdict, ...] = ()
    examples: tuple[Example, ...] = ()
    counted: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    """Why the stage fell over."""

    @classmethod
    def broken(cls, seed: str, number: int, faults: tuple[str, ...], error: str, seconds: float) -> Self:
        return cls(seed, number, faults, error=error, seconds=seconds)

    @property
    def wrong(self) -> bool:
        return any(verdict.kind == "wrong" for verdict in self.verdicts)


def judge(consumer: str, report: Report, truth: bytes) -> Verdict:
    """How a consumer stands at the end, when there is nothing left to come: exact and right, or honest, or wrong."""
    place, got = f"at {_placed(report.key)} (number {report.seq})", report.counted.get("got", 0)
    if report.resets:
        place += f", after resets ({'; '.join(report.resets)})"
    if not report.exact:
        detail = f"{report.trust}: {', '.join(report.reasons)}, {place}"
        return Verdict(consumer, "doubted", report.reasons, detail, got=got)
    if report.digest == truth:
        return Verdict(consumer, "right", (), place, got=got)
    return Verdict(consumer, "wrong", (), f"EXACT {place} with {report.digest.hex()}, but the engine holds {truth.hex()}")


def check_claims(claims: Iterable[Claim], facts: Mapping[int, bytes], *, foreign: bool) -> Checked:
    """Every claim to be exact, against the truth after that batch. `foreign`: a relay sends batches of its own."""
    count, wrong = 0, []
    for claim in claims:
        count += 1
        known = EMPTY if claim.key == NOTHING else facts.get(claim.key)
        if known is None and not (foreign and claim.key == UNPLACED):
            wrong.append(f"EXACT at number {claim.seq}, after a batch that the engine has not made")
        elif known is not None and known != claim.digest:
            wrong.append(f"EXACT at {_placed(claim.key)} (number {claim.seq}) with {claim.digest.hex()}, not {known.hex()}")
    return Checked(count, tuple([*wrong[:3], f"{len(wrong)} wrong claims of {count}"] if wrong else ()))


def _placed(packed: int) -> str:
    if packed < 0:
        return "no batch"
    key = Key.unpack(packed)
    return f"batch {key.number} of life {key.life}"
