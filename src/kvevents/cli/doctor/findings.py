"""The results of the checks of `kvevents doctor`."""

from __future__ import annotations

import enum

import msgspec


class Verdict(enum.Enum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    check: str
    """Name of the check, such as `address`, `traffic` or `trust`. Programs rely on it."""
    verdict: Verdict
    text: str
    advice: str = ""
    """What to do; empty if nothing has to be done."""


def ok(check: str, text: str, advice: str = "") -> Finding:
    """Return a finding without a fault."""
    return Finding(check, Verdict.OK, text, advice)


def warn(check: str, text: str, advice: str) -> Finding:
    """Return a finding that something works with limitations."""
    return Finding(check, Verdict.WARN, text, advice)


def fail(check: str, text: str, advice: str) -> Finding:
    """Return a finding that something does not work."""
    return Finding(check, Verdict.FAIL, text, advice)


def worst(findings: list[Finding]) -> Verdict:
    """Return the worst verdict of the findings."""
    found = {finding.verdict for finding in findings}
    return next((verdict for verdict in (Verdict.FAIL, Verdict.WARN) if verdict in found), Verdict.OK)
