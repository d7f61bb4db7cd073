"""The report of `make engines`, as text and as JSON."""

from __future__ import annotations

import msgspec

from tests.system.engines.concurrent_clients import ConcurrentResult
from tests.system.engines.failures import FailureResult
from tests.system.engines.judging import Tally
from tests.system.engines.sequential import SequentialResult
from tests.system.engines.timing import TimingResult


class Sequential(msgspec.Struct):
    """One sequential run."""

    publisher: str
    load_average: float
    """Of the machine over one minute, when it began."""
    result: SequentialResult


class Concurrent(msgspec.Struct):
    """One concurrent run."""

    publisher: str
    load_average: float
    result: ConcurrentResult


class Report(msgspec.Struct):
    """What came out of all parts."""

    engine: str
    started: str
    sequential: list[Sequential] = []
    concurrent: list[Concurrent] = []
    timings: list[TimingResult] = []
    failures: list[FailureResult] = []


def wrong(report: Report) -> int:
    """Predictions that were EXACT and wrong, and failures of the plugin that the engine did not survive.

    Not counted: predictions right after a reset without the plugin, since vLLM announces the reset of an idle engine with its
    next step; and those of clients that ask before the events of the last answer have arrived, which the report has as a share.
    """
    requests = sum(each.result.requests.wrong for each in report.sequential)
    resets = sum(each.result.after_reset.wrong for each in report.sequential if "plugin" in each.publisher)
    return requests + resets + sum(not each.is_survived for each in report.failures)


def summary(tally: Tally) -> str:
    """One line about a tally."""
    return (
        f"{tally.requests} requests, {tally.hits} with cached tokens: {tally.exact} EXACT and right, {tally.wrong} wrong, "
        f"{tally.unclaimed} not EXACT (of those {tally.unclaimed_equal} right), {tally.attested} attested"
    )


def text(report: Report) -> str:
    """The report as tables of Markdown."""
    lines = [f"{report.engine}, {report.started}", ""]
    if report.sequential:
        lines += [*_sequential(report), ""]
    if report.concurrent:
        lines += [*_concurrent(report), ""]
    if report.timings:
        lines += [*_timings(report), ""]
    if report.failures:
        lines += [*_failures(report), ""]
    return "\n".join(lines)


def _sequential(report: Report) -> list[str]:
    lines = [
        "| publisher | scenario | seed | requests | hits | right | wrong | not EXACT | attested | after a reset | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in report.sequential:
        tally, reset = each.result.requests, each.result.after_reset
        lines.append(
            f"| {each.publisher} | {each.result.scenario} | {each.result.seed} | {tally.requests} | {tally.hits} "
            f"| {tally.exact} | {tally.wrong} | {tally.unclaimed} | {tally.attested} "
            f"| {reset.exact} right, {reset.wrong} wrong, {reset.unclaimed} not EXACT "
            f"| {each.load_average:.1f} |"
        )
    return lines


def _concurrent(report: Report) -> list[str]:
    lines = [
        "| publisher | clients | requests | right | share | too many | too few | not EXACT | match p50 / p99 ms | load |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in report.concurrent:
        result, tally = each.result, each.result.requests
        lines.append(
            f"| {each.publisher} | {result.clients} | {tally.requests} | {tally.exact} | {tally.exact / tally.requests:.2%} "
            f"| {result.more} | {result.fewer} | {tally.unclaimed} | {result.match_ms_p50} / {result.match_ms_p99} "
            f"| {each.load_average:.1f} |"
        )
    return lines


def _timings(report: Report) -> list[str]:
    lines = [
        "| publisher | calls | publish() us p50 / p99 | its CPU us | steps | step ms p50 / p99 | its CPU ms | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in report.timings:
        publish, step = each.publish, each.step
        lines.append(
            f"| {each.publisher} | {publish.samples} | {publish.p50:.1f} / {publish.p99:.1f} "
            f"| {publish.cpu_p50:.1f} / {publish.cpu_p99:.1f} | {step.samples} | {step.p50 / 1e3:.2f} / {step.p99 / 1e3:.2f} "
            f"| {step.cpu_p50 / 1e3:.2f} / {step.cpu_p99 / 1e3:.2f} | {each.load_average:.1f} |"
        )
    return lines


def _failures(report: Report) -> list[str]:
    lines = ["| fault | engine serves | events flow | log lines | first line |", "|---|---|---|---|---|"]
    lines += [
        f"| {each.fault} | {_yes(each.serves)} | {_yes(each.has_events)} | {each.log_lines} | {each.log} |"
        for each in report.failures
    ]
    return lines


def _yes(value: bool) -> str:
    return "yes" if value else "no"
