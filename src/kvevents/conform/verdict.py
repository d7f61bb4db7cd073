"""Verdicts about answers, given the correct answer and what the target reports about itself; and the results of a run.

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

from kvevents.conform.scenario import VERSION
from kvevents.package_metadata import version


class ConformRun(msgspec.Struct, frozen=True):
    """A run of scenarios: targets, machine and results."""

    target: str
    command: str
    date: str
    """The day, in UTC."""
    machine: str
    referee: str
    """Version of kvevents."""
    scenarios: int
    """Version of the scenarios' format."""
    seconds: float
    results: list[Result]

    @property
    def counts(self) -> Counter[Verdict]:
        """Number of scenarios by verdict."""
        return Counter(result.verdict for result in self.results)

    @property
    def has_failed(self) -> bool:
        """Whether an answer was wrong without notice, or missing."""
        return any(result.verdict in FAILURES for result in self.results)

    @property
    def summary(self) -> str:
        """The counts as a sentence."""
        counts = ", ".join(f"{self.counts[verdict]} {verdict}" for verdict in list(Verdict)[1:])
        left_out = self.counts[Verdict.NOT_APPLICABLE]
        return f"{self.target}: {counts}" + (f"; {left_out} not applicable" if left_out else "")


def make_run(target: str, command: Sequence[str], seconds: float, results: list[Result]) -> ConformRun:
    """Return the results with what they were measured on."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    today = datetime.now(UTC).date().isoformat()
    return ConformRun(target, " ".join(command), today, machine, version(), VERSION, round(seconds, 1), results)


def to_json(run: ConformRun) -> bytes:
    """Return a run as JSON, with one line for each scenario."""
    return msgspec.json.format(msgspec.json.encode(run), indent=1)


def to_junit(run: ConformRun) -> bytes:
    """Return a run as JUnit XML: silent errors are failures, missing answers are errors."""
    counts = run.counts
    suite = ET.Element(
        "testsuite",
        name=f"kvevents conform {run.target}",
        tests=str(len(run.results)),
        failures=str(counts[Verdict.SILENT]),
        errors=str(counts[Verdict.UNANSWERED]),
        skipped=str(counts[Verdict.NOT_APPLICABLE]),
        time=f"{run.seconds:.1f}",
        timestamp=run.date,
    )
    tags = {Verdict.SILENT: "failure", Verdict.UNANSWERED: "error", Verdict.NOT_APPLICABLE: "skipped"}
    for result in run.results:
        case = ET.SubElement(suite, "testcase", classname=result.group, name=result.name, time=f"{result.seconds:.1f}")
        detail = _printable(result.detail)
        if result.verdict in tags:
            ET.SubElement(case, tags[result.verdict], message=f"{result.verdict}: {result.title}").text = detail
        else:
            ET.SubElement(case, "system-out").text = f"{result.verdict}: {detail}" if detail else result.verdict
    whole = ET.Element("testsuites")
    whole.append(suite)
    ET.indent(whole)
    found: bytes = ET.tostring(whole, encoding="utf-8", xml_declaration=True)
    return found


def _printable(text: str) -> str:
    """Return a text without the control characters that XML does not allow."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


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
