"""Verdicts about answers, given the correct answer and what the target reports about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec


class Verdict(StrEnum):
    """Verdict about an answer, from best to worst for the user of the target."""

    NOT_APPLICABLE = "not applicable"
    """The target has no interface for what the scenario needs."""
    CORRECT = "correct"
    """Every answer equals the truth."""
    REPORTED = "reported"
    """An answer differs from the truth, and the target's own interface says so about the worker, or rejected it."""
    SILENT = "silently wrong"
    """An answer differs from the truth, and nothing that names the worker says so."""
    UNANSWERED = "unanswered"
    """The target ended, or did not answer in time."""


FAILURES: Final = frozenset({Verdict.SILENT, Verdict.UNANSWERED})
"""Verdicts that make a run fail."""


class WrongAnswer(NamedTuple):
    """An answer about one worker that is not the truth."""

    worker: str
    text: str
    """What was answered, and what is true."""
    report: str | None = None
    """What the answer itself reports against the worker."""


class ScenarioOutcome(NamedTuple):
    """The verdict about one look at a target, and why."""

    verdict: Verdict
    detail: str


class Result(msgspec.Struct, frozen=True):
    """The result of a scenario."""

    name: str
    group: str
    title: str
    verdict: Verdict
    detail: str
    """What differs, and what the target reports about it; for a correct answer, what the target reports nevertheless."""
    seconds: float
    """Duration of the scenario."""
    silent_seconds: float
    """Time for which an answer was wrong and nothing reported it, until the end of the scenario at most."""


def judge(
    differences: Sequence[WrongAnswer], reports: Mapping[str, str | None], required: Sequence[str] = ()
) -> ScenarioOutcome:
    """Return the verdict about the differences from the truth.

    `reports` has for each worker what the target says against it, or None if it says that all is well. `required` are
    workers that the target must report. A difference is reported only if the target reports the worker that it is about,
    in the answer or elsewhere.
    """
    answers = {each.worker: each.report for each in differences if each.report is not None}
    reports = {**reports, **answers, **{name: text for name, text in reports.items() if text is not None}}
    said = "; ".join(dict.fromkeys(f"{name}: {text}" for name, text in sorted(reports.items()) if text is not None))
    unreported = [name for name in required if reports.get(name) is None]
    concerned = {each.worker for each in differences}
    found = [each.text for each in differences] + [f"nothing says that {name} cannot be followed" for name in unreported]
    if not found:
        return ScenarioOutcome(Verdict.REPORTED if required else Verdict.CORRECT, said)
    silent = bool(unreported) or any(reports.get(name) is None for name in concerned)
    return ScenarioOutcome(Verdict.SILENT if silent else Verdict.REPORTED, "; ".join([*found, said] if said else found))


def worst(outcomes: Sequence[ScenarioOutcome]) -> ScenarioOutcome:
    """Return the worst outcome, the last one if several are equally bad; a correct one without outcomes."""
    order = list(Verdict)
    return max(reversed(outcomes), key=lambda each: order.index(each.verdict), default=ScenarioOutcome(Verdict.CORRECT, ""))
