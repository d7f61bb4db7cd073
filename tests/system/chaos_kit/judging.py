"""Judges what holds the blocks of an engine, as a consumer or a replica: EXACT and right, not EXACT, or EXACT and wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from kvevents.stream import Trust
from tests.system.chaos_kit.truth import Claim

Kind = Literal["right", "inexact", "wrong"]


class State(NamedTuple):
    """The reported state of one holder for one engine."""

    trust: str
    reasons: tuple[str, ...]
    """Why it is not EXACT."""
    digest: bytes
    position: str
    """How far it has come, for messages."""


@dataclass(frozen=True, slots=True)
class CheckedClaims:
    """Result of a check of the claims of one holder."""

    claims: int = 0
    wrong: tuple[str, ...] = ()
    """Descriptions of the first wrong claims."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one holder for one engine."""

    holder: str
    kind: Kind
    reasons: tuple[str, ...]
    """Why it is not EXACT, as it reports."""
    detail: str
    claims: int = 0
    received: int = 0
    """Batches that it received, if it counts them."""

    def with_claims(self, checked: CheckedClaims) -> Result:
        """Return the result with the checked claims. A single wrong claim makes the result wrong."""
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a round."""

    seed: str
    number: int
    faults: tuple[str, ...]
    batches: int = 0
    results: tuple[Result, ...] = ()
    counted: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    settled: float = 0.0
    """Seconds from the last batch until every result was final."""
    flaws: tuple[str, ...] = ()
    """Errors that do not belong to one result."""
    error: str = ""
    """Why the round could not be played."""
    make: str = ""
    """Make of the engine, if the round has one engine."""
    examples: tuple[Example, ...] = ()
    reported: str = ""
    """Reports of the processes about themselves, for messages."""

    @property
    def wrong(self) -> bool:
        """Return whether the round has an error that must never happen."""
        return bool(self.flaws) or any(result.kind == "wrong" for result in self.results)

    @property
    def right(self) -> bool:
        """Return whether every holder is EXACT and holds what the engine holds."""
        return not self.error and not self.wrong and all(result.kind == "right" for result in self.results)

    def __str__(self) -> str:
        results = ", ".join(f"{each.holder} {each.kind} {'+'.join(each.reasons)}".strip() for each in self.results)
        divergences = f"; {self.counted['divergences']} divergences" if self.counted.get("divergences") else ""
        title = f"{self.number}: {self.make}".rstrip()
        first = f"{title} {self.batches} batches, {self.seconds:.1f} s, settled in {self.settled:.1f} s"
        lines = [f"{first}: {self.error or results} [{', '.join(self.faults)}{divergences}]"]
        lines += [f"    {each.holder}: {each.detail}" for each in self.results if each.kind != "right"]
        return "\n".join([*lines, *(f"    {flaw}" for flaw in self.flaws)])


def judge(holder: str, state: State, truth: bytes) -> Result:
    """Return the result of a holder after the last batch. `truth` is the digest of what the engine holds."""
    if state.trust != Trust.EXACT.name:
        same = "what" if state.digest == truth else "not what"
        reasons = ", ".join(state.reasons) or "no reason"
        detail = f"{state.trust}: {reasons}, {state.position}; it holds {same} the engine holds"
        return Result(holder, "inexact", state.reasons, detail)
    if state.digest == truth:
        return Result(holder, "right", (), state.position)
    detail = f"EXACT {state.position} with {state.digest.hex()}, but the engine holds {truth.hex()}"
    return Result(holder, "wrong", (), detail)


def check_claims(claims: Iterable[Claim], find_error: Callable[[Claim], str]) -> CheckedClaims:
    """Check every claim with a function that returns what is wrong with it, or an empty string."""
    count, wrong = 0, []
    for claim in claims:
        count += 1
        if error := find_error(claim):
            wrong.append(error)
    return CheckedClaims(count, tuple([*wrong[:3], f"{len(wrong)} wrong claims of {count}"] if wrong else ()))
