"""Results of a run as JSON and as JUnit XML."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from xml.etree import ElementTree as ET

import msgspec

from kvevents.conform.scenario import VERSION
from kvevents.conform.verdict import FAILURES, Result, Verdict
from kvevents.version import version


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
