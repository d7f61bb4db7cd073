"""What is right, what is doubted and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from kvevents.stream import Trust
from tests.system.chaos.truth import EMPTY, Claim, Key
from tests.system.plane_chaos.roles import TrustReport

NEVER: Final = ("breaches", "doubled", "fell")
"""What no bridge and no replica may count."""

Kind = Literal["right", "doubted", "wrong"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one replica stands with one engine at the end."""

    replica: str
    engine: str
    kind: Kind
    detail: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """Diaries, read."""

    count: int
    wrong: tuple[str, ...]

    def also(self, other: Claimed) -> Claimed:
        return Claimed(self.count + other.count, self.wrong + other.wrong)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a round."""

    seed: str
    number: int
    faults: tuple[str, ...]
    batches: int = 0
    verdicts: tuple[Verdict, ...] = ()
    logged: int = 0
    """Batches in the log at the end."""
    lost: int = 0
    """Batches that the log says are lost."""
    flaws: tuple[str, ...] = ()
    """What must not be: in the log, or claimed by a replica."""
    counted: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    settled: float = 0.0
    """Seconds from the last batch until all were right."""
    error: str = ""
    """Why the stage fell over."""
    reported: str = ""

    @classmethod
    def broken(cls, seed: str, number: int, faults: tuple[str, ...], error: str, seconds: float) -> Self:
        return cls(seed, number, faults, error=error, seconds=seconds)

    @property
    def wrong(self) -> bool:
        """Whether something is that must never be."""
        return (
            bool(self.flaws) or any(verdict.kind == "wrong" for verdict in self.verdicts) or any(map(self.counted.get, NEVER))
        )

    @property
    def right(self) -> bool:
        """Whether every replica holds what every engine holds, and says so."""
        return not self.error and not self.wrong and all(verdict.kind == "right" for verdict in self.verdicts)


def judge(replica: str, engine: str, report: TrustReport, truth: bytes) -> Verdict:
    """How a replica stands with an engine, when there is nothing left to come."""
    name = engine.rpartition("\x1f")[2]
    held = report.held.get(engine)
    if held is None:
        return Verdict(replica, name, "doubted", f"not there: {report.fault}")
    place = f"at number {held.seq} of incarnation {held.incarnation}, begun with {report.begun}"
    if held.trust != Trust.EXACT.name:
        same = "what" if held.digest == truth else "not what"
        return Verdict(replica, name, "doubted", f"{held.trust}: {held.reason}, {place}; it holds {same} the engine holds")
    if held.digest == truth:
        return Verdict(replica, name, "right", place)
    return Verdict(replica, name, "wrong", f"EXACT {place} with {held.digest.hex()}, but the engine holds {truth.hex()}")


def check_claims(replica: str, claims: Iterable[Claim], facts: Sequence[Mapping[int, bytes]], exact: Sequence[bool]) -> Claimed:
    """Every claim to be exact against what the engine ever held: after that number of some life, where `exact`.

    Engines with heartbeats give these numbers too, so that a batch's number is not its place in its life.
    """
    after = [{(Key.unpack(key).number, digest) for key, digest in fact.items()} for fact in facts]
    ever = [set(fact.values()) for fact in facts]
    count, wrong = 0, []
    for claim in claims:
        count += 1
        known = claim.digest == EMPTY and claim.seq < 0
        known |= (claim.seq, claim.digest) in after[claim.key] if exact[claim.key] else claim.digest in ever[claim.key]
        if not known and (exact[claim.key] or claim.digest != EMPTY):
            wrong.append(f"{replica} was EXACT with engine {claim.key} at number {claim.seq} with {claim.digest.hex()}")
    return Claimed(count, tuple([*wrong[:2], f"{len(wrong)} wrong claims of {count}"] if wrong else ()))
