"""Verdicts about answers, which depend on the correct answer and on what the target reports; and the results of a run.

Results are written as JSON and as JUnit XML.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final, NamedTuple
from xml.etree import ElementTree as ET

import msgspec

from kvevents import package_metadata
from kvevents.conform.scenario import VERSION, Check


class ConformRun(msgspec.Struct, frozen=True):
    """A run of scenarios against one target: the target, the machine and the results."""

    target: str
    command: str
    date: str
    """Date of the run, in UTC."""
    machine: str
    referee: str
    """Version of kvevents."""
    scenarios: int
    """Version of the format in which the scenarios are written."""
    seconds: float
    results: list[Result]

    @property
    def counts(self) -> Counter[Verdict]:
        """Number of scenarios with each verdict."""
        return Counter(result.verdict for result in self.results)

    def has_failed(self, max_needless: int | None = None) -> bool:
        """Return whether an answer was silently wrong or missing, or more scenarios than a limit have the verdict `NEEDLESS`.

        The limit is `max_needless` or, if that is None, one scenario for each `SCENARIOS_PER_NEEDLESS` scenarios that were
        played. No scenario of the group `healthy` may have this verdict.
        """
        needless = [result.group for result in self.results if result.verdict is Verdict.NEEDLESS]
        played = len(self.results) - self.counts[Verdict.NOT_APPLICABLE]
        limit = played // SCENARIOS_PER_NEEDLESS if max_needless is None else max_needless
        failed = self.counts[Verdict.SILENT] + self.counts[Verdict.UNANSWERED]
        return bool(failed) or len(needless) > limit or "healthy" in needless

    @property
    def summary(self) -> str:
        """A sentence with the number of scenarios for each verdict."""
        counts = ", ".join(f"{self.counts[verdict]} {verdict}" for verdict in list(Verdict)[1:])
        left_out = self.counts[Verdict.NOT_APPLICABLE]
        return f"{self.target}: {counts}" + (f"; {left_out} not applicable" if left_out else "")


def make_run(target: str, command: Sequence[str], seconds: float, results: list[Result]) -> ConformRun:
    """Return a run that contains the results, the target, the command and this machine."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    today = datetime.now(UTC).date().isoformat()
    return ConformRun(target, " ".join(command), today, machine, package_metadata.VERSION, VERSION, round(seconds, 1), results)


def to_json(run: ConformRun) -> bytes:
    """Return a run as JSON, with one line for each scenario."""
    return msgspec.json.format(msgspec.json.encode(run), indent=1)


def to_junit(run: ConformRun) -> bytes:
    """Return a run as JUnit XML: silent errors and needless reports are failures, missing answers are errors."""
    counts = run.counts
    suite = ET.Element(
        "testsuite",
        name=f"kvevents conform {run.target}",
        tests=str(len(run.results)),
        failures=str(counts[Verdict.SILENT] + counts[Verdict.NEEDLESS]),
        errors=str(counts[Verdict.UNANSWERED]),
        skipped=str(counts[Verdict.NOT_APPLICABLE]),
        time=f"{run.seconds:.1f}",
        timestamp=run.date,
    )
    tags = {Verdict.SILENT: "failure", Verdict.NEEDLESS: "failure"}
    tags |= {Verdict.UNANSWERED: "error", Verdict.NOT_APPLICABLE: "skipped"}
    for result in run.results:
        case = ET.SubElement(suite, "testcase", classname=result.group, name=result.name, time=f"{result.seconds:.1f}")
        # XML does not allow control characters.
        detail = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in result.detail)
        if result.verdict in tags:
            ET.SubElement(case, tags[result.verdict], message=f"{result.verdict}: {result.title}").text = detail
        else:
            ET.SubElement(case, "system-out").text = f"{result.verdict}: {detail}" if detail else result.verdict
    whole = ET.Element("testsuites")
    whole.append(suite)
    ET.indent(whole)
    encoded: bytes = ET.tostring(whole, encoding="utf-8", xml_declaration=True)
    return encoded


class Verdict(StrEnum):
    """Verdict about an answer, from best to worst for the user of the target."""

    NOT_APPLICABLE = "not applicable"
    """The target has no interface for what the scenario needs."""
    CORRECT = "correct"
    """Every answer equals the truth."""
    REPORTED = "reported"
    """The target reports or has rejected a worker that it must report, or a worker whose answers are allowed to be wrong."""
    NEEDLESS = "reported without need"
    """The target reports a worker without a reason in the scenario. The worker's answers may be right or wrong."""
    SILENT = "silently wrong"
    """An answer about a worker is wrong, and the target does not report that the worker's answers can be wrong."""
    UNANSWERED = "unanswered"
    """The target ended, or did not answer in time."""


SCENARIOS_PER_NEEDLESS: Final = 20
"""By default, one of this many played scenarios may have the verdict `NEEDLESS`, for example 5 of 116 scenarios."""


class WrongAnswer(NamedTuple):
    """A wrong answer about one worker."""

    worker: str
    text: str
    """The answer and the truth, as text."""
    report: str | None = None
    """The problem that the answer reports for this worker; None if the answer reports no problem."""


class ScenarioOutcome(NamedTuple):
    """The verdict about a target at one check, and the reason."""

    verdict: Verdict
    detail: str


class Result(msgspec.Struct, frozen=True):
    """The result of a scenario."""

    name: str
    group: str
    title: str
    verdict: Verdict
    detail: str
    """The wrong answers and the target's reports, as text; if all answers are right, only the reports."""
    seconds: float
    """Duration of the scenario."""
    silent_seconds: float
    """Longest time from the beginning of a check to a silently wrong answer in this check."""


def judge(check: Check, differences: Sequence[WrongAnswer], reports: Mapping[str, str | None]) -> ScenarioOutcome:
    """Give a verdict about each worker, and return the worst one with the details of all workers.

    `reports` has the problem that the target reports for each worker, or None if the target reports no problem. A wrong answer
    about a worker counts as reported only if the target reports a problem of that worker, anywhere.
    """
    reported = {difference.worker: difference.report for difference in differences if difference.report is not None}
    reported |= {name: text for name, text in reports.items() if text is not None}
    wrong, outcomes = {difference.worker for difference in differences}, list[ScenarioOutcome]()
    for name in sorted({*wrong, *reported, *check.must_report}):
        texts = [difference.text for difference in differences if difference.worker == name]
        if name not in reported:
            verdict = Verdict.SILENT
            texts = texts or [f"nothing says that {name} cannot be followed"]
        elif name in check.must_report or (texts and name in check.may_be_wrong):
            verdict = Verdict.REPORTED
        elif not texts and name in {*check.may_report, *check.may_be_wrong}:
            verdict = Verdict.CORRECT
        else:
            verdict = Verdict.NEEDLESS
            texts = texts or [f"{name}: the answers are right"]
        texts += [f"{name}: {reported[name]}"] if name in reported else []
        outcomes.append(ScenarioOutcome(verdict, "; ".join(texts)))
    return ScenarioOutcome(worst(outcomes).verdict, "; ".join(outcome.detail for outcome in outcomes))


def worst(outcomes: Sequence[ScenarioOutcome]) -> ScenarioOutcome:
    """Return the outcome with the worst verdict; of equal verdicts, the latest. Return `CORRECT` if `outcomes` is empty."""
    order = list(Verdict)
    default = ScenarioOutcome(Verdict.CORRECT, "")
    return max(reversed(outcomes), key=lambda outcome: order.index(outcome.verdict), default=default)
