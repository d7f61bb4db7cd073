"""What a check found."""

from __future__ import annotations

import enum

import msgspec


class Verdict(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """One verdict: what was looked at, what was seen, and what to do about it."""

    check: str
    """A word: address, socket, traffic, topic, decoding, ranks, replay, trust."""
    verdict: Verdict
    text: str
    advice: str = ""
    """What to do; empty when nothing is to be done."""


def ok(check: str, text: str, advice: str = "") -> Finding:
    """All is well."""
    return Finding(check, Verdict.OK, text, advice)


def warn(check: str, text: str, advice: str) -> Finding:
    """It works, but not as well as it could."""
    return Finding(check, Verdict.WARN, text, advice)


def fail(check: str, text: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(check, Verdict.FAIL, text, advice)


def worst(findings: list[Finding]) -> Verdict:
    """The worst verdict among them."""
    found = {finding.verdict for finding in findings}
    return next((verdict for verdict in (Verdict.FAIL, Verdict.WARN) if verdict in found), Verdict.OK)
