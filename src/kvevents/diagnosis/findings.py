"""Results of checks, also called findings: the check, the verdict, the reason, and what to do."""

from __future__ import annotations

import enum

import msgspec


class Severity(enum.Enum):
    """The severity of a finding, in ascending order."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class CheckResult(msgspec.Struct, frozen=True):
    """The result of one check."""

    check: str
    """Name of the check, such as `address`, `traffic` or `trust`. Programs rely on these names."""
    verdict: Severity
    text: str
    advice: str = ""
    """What to do; empty if nothing must be done."""


def ok(check: str, text: str, advice: str = "") -> CheckResult:
    """Return a finding without a fault."""
    return CheckResult(check, Severity.OK, text, advice)


def warn(check: str, text: str, advice: str) -> CheckResult:
    """Return a finding that something works with limitations."""
    return CheckResult(check, Severity.WARN, text, advice)


def fail(check: str, text: str, advice: str) -> CheckResult:
    """Return a finding that something does not work."""
    return CheckResult(check, Severity.FAIL, text, advice)


def worst_severity(findings: list[CheckResult]) -> Severity:
    """Return the worst verdict of the findings."""
    return max((finding.verdict for finding in findings), key=list(Severity).index, default=Severity.OK)
